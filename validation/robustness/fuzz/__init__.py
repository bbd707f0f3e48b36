"""Hostile files: every reader of the package fuzzed, guided by coverage; ``python -m validation.robustness.fuzz``."""
