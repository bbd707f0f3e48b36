"""Checks of own kernels, affinities, fidelities, flows, integrators and noise."""

import lazy_loader

# The list of names and where they live is the stub beside this file, which type checkers read as well.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

del lazy_loader
