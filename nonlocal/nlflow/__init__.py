"""nlflow: numerical simulation of nonlocal gradient flows.

Names are loaded when they are first used, so that ``import nlflow`` costs next to nothing.
"""

import lazy_loader

# The list of names and where they live is the stub beside this file, which type checkers read as well.
_load, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

del lazy_loader


def __getattr__(name: str) -> object:
    """Return a name of the package, loaded now, or its version."""
    if name == "__version__":
        from nlflow.backends.machine import version

        return version()
    try:
        return _load(name)
    except AttributeError:
        if name in __all__:  # something else fails while its module is loaded
            raise
        from difflib import get_close_matches

        near = get_close_matches(name, __all__, 1)
        remedy = f"; did you mean {near[0]}?" if near else ""
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{remedy}", name=name) from None
