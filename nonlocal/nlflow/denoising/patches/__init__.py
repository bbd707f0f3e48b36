"""Patches as tokens: groups of alike patches, on which E and its flows act as the classical denoisers do."""

from nlflow.denoising.patches.affinity import GroupAffinity
from nlflow.denoising.patches.filters import CompiledFilter, GroupFilter, Groups, Images, Stage
from nlflow.denoising.patches.flow import GroupFlow, RelaxedSemiImplicit
from nlflow.denoising.patches.groups import PatchGroups
from nlflow.denoising.patches.lattice import Grouping, Lattice
from nlflow.denoising.patches.plain import PlainFilter
from nlflow.denoising.patches.tensors import TensorFilter

__all__ = [
    "CompiledFilter",
    "GroupAffinity",
    "GroupFilter",
    "GroupFlow",
    "Grouping",
    "Groups",
    "Images",
    "Lattice",
    "PatchGroups",
    "PlainFilter",
    "RelaxedSemiImplicit",
    "Stage",
    "TensorFilter",
]
