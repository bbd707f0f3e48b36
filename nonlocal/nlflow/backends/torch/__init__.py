"""Sums over pairs on torch tensors; loaded when a tensor comes."""
