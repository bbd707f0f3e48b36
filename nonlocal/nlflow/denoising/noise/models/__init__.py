"""Models of noise."""
