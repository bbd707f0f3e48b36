"""Campaigns against the package: kills, full disks, hostile files; ``python -m validation.robustness``."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
"""The checkout."""
