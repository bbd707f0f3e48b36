"""nlflow: numerical simulation of nonlocal gradient flows."""

from importlib import import_module
from importlib.util import find_spec

import lazy_loader

from nlflow import _moved
from nlflow.backends import forks as forks  # a fork is seen from the first import on, before a loop is loaded

# What names there are and where they live says the stub beside this file, which type checkers read as well.
_load, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

del lazy_loader

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
        if name in __all__:  # something else fails while its module is loaded
            raise
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{_remedy(name)}", name=name) from None


def _remedy(name: str) -> str:
    """Say which room has a name that is not here, or which name is near."""
    import re
    from difflib import get_close_matches
    from pathlib import Path

    root, known = Path(__file__).parent, re.escape(name)
    for stub in sorted(root.glob("*/**/__init__.py*"), key=lambda path: len(path.parts)):
        if re.search(rf' as {known}$|"{known}"[],]', stub.read_text(), re.MULTILINE):
            room = ".".join(stub.parent.relative_to(root.parent).parts)
            return f"; write from {room} import {name}"
    near = get_close_matches(name, __all__, 1)
    return f"; did you mean {near[0]}?" if near else ""
