"""Patches as tokens: groups of alike patches, on which E and its flows act as the classical denoisers do."""

from nlflow.denoising.patches.groups import PatchGroups

__all__ = ["PatchGroups"]
