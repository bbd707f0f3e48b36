"""Denoising by flows."""

import lazy_loader

# Names are loaded when they are first used; the stub beside this file lists them, also for type checkers.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

del lazy_loader
