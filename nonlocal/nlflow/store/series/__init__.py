"""Files that grow."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from nlflow.errors import InputError
from nlflow.store.series.base import Frame, Layout, Series

__all__ = ["Frame", "Layout", "Series", "series_of"]

# Modules of this package and classes in them, loaded when one is asked for.
_KINDS = {
    ".h5": ("hdf5", "Hdf5Series"),
    ".hdf5": ("hdf5", "Hdf5Series"),
    ".nc": ("hdf5", "Hdf5Series"),  # netCDF 4 is HDF5 with named axes
    ".zarr": ("zarr_store", "ZarrSeries"),
    ".pvd": ("vtk", "VtkSeries"),
}


def series_of(path: Path) -> Series:
    kind = _KINDS.get(path.suffix.lower())
    if kind is None:
        raise InputError(f"path: got {str(path)!r}, expected a name that ends with one of {', '.join(_KINDS)}")
    made: Series = getattr(import_module(f"{__name__}.{kind[0]}"), kind[1])(path)
    return made
