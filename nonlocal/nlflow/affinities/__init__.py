"""Affinities: one averaging operator for each structure of K.

`base` is the contract; `dense` is the reference. `stencil` and `convolution` serve grids; `pairwise` (exact, by
`pair_sums`), `neighbours`, `nonuniform` and `lowrank` (approximate) scattered nodes and features, and `choice` chooses
among these. `tiled` serves tensors, `sharded` those of several
processes. `sparse` is that of a graph, which `given` reads as users have it and `nearest` takes from points, `block`
that of separate groups. `build` is what users call, `shown` what notebooks show.
"""

from nlflow.affinities.base import Affinity
from nlflow.affinities.block import BlockAffinity, Blocks
from nlflow.affinities.build import affinity, from_matrix
from nlflow.affinities.convolution import ConvolutionAffinity
from nlflow.affinities.dense import DenseAffinity
from nlflow.affinities.given import affinity_from_graph
from nlflow.affinities.nearest import neighbour_graph
from nlflow.affinities.sinkhorn import sinkhorn
from nlflow.affinities.sparse import SparseAffinity
from nlflow.affinities.stencil import PatchStencil, TableStencil

__all__ = [
    "Affinity",
    "BlockAffinity",
    "Blocks",
    "ConvolutionAffinity",
    "DenseAffinity",
    "PatchStencil",
    "SparseAffinity",
    "TableStencil",
    "affinity",
    "affinity_from_graph",
    "from_matrix",
    "neighbour_graph",
    "sinkhorn",
]
