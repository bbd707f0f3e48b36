"""One file for each comparison: peers and nlflow in the same run, medians, ratios."""
