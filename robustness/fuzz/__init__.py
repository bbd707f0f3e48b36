"""Hostile files: every reader of the package under a coverage-guided fuzzer; ``python -m robustness.fuzz``."""
