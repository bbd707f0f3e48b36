"""Campaigns against the package: kills, full disks, hostile files; ``python -m validation.robustness``."""
