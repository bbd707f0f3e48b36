"""Former places: programs that name one get the module, or the function, that is now elsewhere, the same object."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, spec_from_loader

TYPE_CHECKING = False  # `typing` would be half of what importing the package costs
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import CodeType, ModuleType
    from typing import Any

# The longest that fits counts; what was in `nlflow.io` and is not named is in `nlflow.store`.
_PLACES = {
    "nlflow.attention.terms.neighbours": "nlflow.attention.terms.modules",
    "nlflow.commands": "nlflow.desk.commands",
    "nlflow.denoising.large.parts": "nlflow.denoising.frame",
    "nlflow.denoising.large.sources": "nlflow.desk.on_disk",
    "nlflow.denoising.large.store": "nlflow.desk.large",
    "nlflow.denoising.noise.base": "nlflow.denoising.noise.models.base",
    "nlflow.denoising.noise.pyramid": "nlflow.denoising.noise.spectra",
    "nlflow.denoising.presets": "nlflow.denoising.groupwise",
    "nlflow.explorer": "nlflow.desk.explorer",
    "nlflow.functionals.operators": "nlflow.functionals.forward",
    "nlflow.io": "nlflow.store",
    "nlflow.io.companions": "nlflow.desk.companions",
    "nlflow.io.files": "nlflow.desk.files",
    "nlflow.io.formats": "nlflow.desk.formats",
    "nlflow.io.formats.codecs": "nlflow.desk.foreign",
    "nlflow.io.formats.links": "nlflow.desk.foreign",
    "nlflow.io.frames": "nlflow.desk.files",
    "nlflow.io.loading": "nlflow.desk.files",
    "nlflow.io.terminal": "nlflow.desk.terminal",
    "nlflow.io.video": "nlflow.plotting.video",
    "nlflow.napari": "nlflow.desk.napari",
}
_SPLIT = "nlflow.io"  # its modules went to several rooms
# Of a package that is where it was: names that went elsewhere.
_NAMES = {"nlflow.denoising.large": {"denoise_store": "nlflow.desk.large", "open_image": "nlflow.desk.large"}}


def place_of(name: str) -> str | None:
    """Return where a module is that was called `name`; None where it has not moved."""
    parts = name.split(".")
    for count in range(len(parts), 1, -1):
        if new := _PLACES.get(".".join(parts[:count])):
            return ".".join([new, *parts[count:]])
    return None


def names(package: str) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a package from which names went elsewhere."""

    def found(name: str) -> Any:
        if name in _NAMES[package]:
            return getattr(import_module(_NAMES[package][name]), name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}", name=name)

    return found


class _Alias:
    """Gives a module that is loaded under its own name already."""

    def __init__(self, new: str) -> None:
        self.new = new

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = import_module(self.new)
        self.spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self.spec  # the import system has put the former one there

    def get_code(self, name: str) -> CodeType | None:
        """Return what ``python -m`` runs."""
        found = find_spec(self.new)
        loader: Any = found.loader if found else None
        return loader.get_code(self.new) if loader else None


class _Finder:
    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name == _SPLIT:
            return ModuleSpec(name, None, is_package=True)
        new = place_of(name) if name.startswith("nlflow.") else None
        found = find_spec(new) if new else None
        if new is None or found is None:
            return None
        alias: Any = _Alias(new)  # a loader by its methods
        return spec_from_loader(name, alias, is_package=found.submodule_search_locations is not None)


def install() -> None:
    """Let the import system ask here first: else it finds modules of a package under its former name once more."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
