"""Compiled loops. Nothing above this package knows how a sum is computed.

Each loop is compiled for a float type when it is first asked for and cached on disk, so that a later process loads it.
"""
