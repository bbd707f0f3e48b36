"""Patches as tokens: groups of alike patches, on which E and its flows act as the classical denoisers do."""

from nlflow.patches.groups import PatchGroups

__all__ = ["PatchGroups"]
