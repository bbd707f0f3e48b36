"""Sweeps of cures."""
