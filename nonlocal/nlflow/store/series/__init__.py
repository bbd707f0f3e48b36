"""Files that grow by one frame of a signal at a time, for other programs to read: HDF5, zarr and VTK."""

from __future__ import annotations

from pathlib import Path

from nlflow.errors import InputError
from nlflow.store.series.base import Frame, Layout, Series
from nlflow.store.series.hdf5 import Hdf5Series
from nlflow.store.series.vtk import VtkSeries
from nlflow.store.series.zarr_store import ZarrSeries

__all__ = ["Frame", "Layout", "Series", "series_of"]

_KINDS: dict[str, type[Series]] = {
    ".h5": Hdf5Series,
    ".hdf5": Hdf5Series,
    ".nc": Hdf5Series,  # netCDF 4 is HDF5 with named axes
    ".zarr": ZarrSeries,
    ".pvd": VtkSeries,
}


def series_of(path: Path) -> Series:
    """Return the series of a path, as its name ends.

    Raises
    ------
    InputError
        For another ending, and for a format whose package is not installed.
    """
    kind = _KINDS.get(path.suffix.lower())
    if kind is None:
        raise InputError(f"path: got {str(path)!r}, expected a name that ends with one of {', '.join(_KINDS)}")
    return kind(path)
