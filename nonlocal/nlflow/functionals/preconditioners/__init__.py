"""Preconditioners of (I - P) + phi."""
