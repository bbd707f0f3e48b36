"""Compiled loops. Nothing above this package knows how a sum is computed.

Each loop is compiled for a float type when it is first asked for and cached on disk, so that a later process loads it.
"""

RUN = 64
"""Groups of patches whose references lie in a row are filtered so many at a time, and their sums added in one go."""
