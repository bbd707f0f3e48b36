"""nlflow: numerical simulation of nonlocal gradient flows.

The names that most programs need are here; each room (`nlflow.kernels`, `nlflow.flows`, `nlflow.denoising.noise`, ...)
has all of its own. Names and rooms are loaded when they are first used: ``import nlflow`` costs next to nothing.
"""

import ast
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import lazy_loader

from nlflow import _moved
from nlflow.backends import forks as forks  # a fork is seen from the first import on, before a loop is loaded

# What names there are and where they live says the stub beside this file, which type checkers read as well. Those of
# its list are shown; the other names of rooms are found from here too, for short programs.
_load, _, _found = lazy_loader.attach_stub(__name__, __file__)
_stub = ast.parse(Path(__file__).with_suffix(".pyi").read_bytes())
__all__ = next(ast.literal_eval(line.value) for line in _stub.body if isinstance(line, ast.Assign))

del lazy_loader, ast, Path, _stub


def __dir__() -> list[str]:
    """Return the names that most programs need."""
    return list(__all__)


_moved.install()


def __getattr__(name: str) -> object:
    """Return a name of the package, loaded now, or its version."""
    if name == "__version__":
        from nlflow.backends.machine import version

        return version()
    if not name.startswith("_") and find_spec(f"nlflow.{name}"):
        return import_module(f"nlflow.{name}")
    try:
        return _load(name)
    except AttributeError:
        if name in _found:  # something else fails while its module is loaded
            raise
        from difflib import get_close_matches

        near = get_close_matches(name, _found, 1)
        remedy = f"; did you mean {near[0]}?" if near else ""
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{remedy}", name=name) from None
