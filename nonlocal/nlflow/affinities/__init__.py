"""Affinities: one averaging operator for each structure of K.

`base` is the contract; `dense` is the reference. `stencil` and `convolution` serve grids; `pairwise` (exact, by
`pair_sums`), `neighbours`, `nonuniform` and `lowrank` (approximate) scattered nodes and features, and `choice`, which
users call, chooses among these. `tiled` serves tensors, `sharded` those of several processes. `sparse` is that of a
graph, which `given` reads as users have it and `nearest` takes from points, `block` that of separate groups, and
`unlinked` that of nodes alone.
"""

import lazy_loader

# Names are loaded when they are first used; the stub beside this file lists them, also for type checkers.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

del lazy_loader
