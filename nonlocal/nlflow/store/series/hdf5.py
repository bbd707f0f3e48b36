"""Frames in HDF5."""

from __future__ import annotations

import os
import secrets
import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from nlflow.errors import FileFormatError
from nlflow.store.atomic import sync_folder, workshop, write_content
from nlflow.store.series.base import IDENTITY, Frame, Layout, Series, missing, reading, writing

_CHUNK = 2**26  # bytes of a chunk, at most, unless one row is larger
_ROWS = 1024  # times in a chunk
_INDEX = 2**18  # bytes by which all but the frames may grow with one of them


class Hdf5Series(Series):
    """Frames in HDF5, with the named axes of netCDF 4.

    A frame is added to a copy, which then takes the name, since an HDF5 file whose writer is killed in the middle may
    not open, or lack frames.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        try:
            import h5py
        except ImportError as error:
            raise missing("h5py", "hdf5", path) from error
        self._h5py: Any = h5py
        self._work = ExitStack()
        self._place: Path | None = None  # a workshop, from the first frame on
        self._other: Path | None = None  # has all frames but the last
        self._lacks: list[Frame] = []

    def create(self, layout: Layout) -> None:
        with self._h5py.File(self.path.name, "w", driver="core", backing_store=False) as file:
            _fill(file, layout)
            file.flush()
            content = file.id.get_file_image()
        write_content(self.path, content)
        self._other, self._lacks = None, []
        self.count, self.last = 0, None

    def resume(self, layout: Layout, count: int) -> None:
        with reading(self.path), self._h5py.File(self.path, "r") as file:
            for name in ("u", "t", "energy"):
                if not isinstance(file.get(name, getlink=True), self._h5py.HardLink):
                    raise LookupError(f"{name} is in another file, or missing")
                check_own(self.path, file[name])
            times = file["t"]
            self._continue(layout, len(times), count, lambda k: float(times[k]))
            longer = len(times) > count
        if longer:
            with writing(self.path):
                other = self._copied()
                _reserve(other, 0)
                with self._h5py.File(other, "r+") as file:
                    for name in ("u", "t", "energy"):
                        file[name].resize(count, axis=0)
                self._take(other)

    def about(self) -> dict[str, Any]:
        with self._h5py.File(self.path, "r") as file:
            return {name: file.attrs.get(name) for name in IDENTITY}

    def _append(self, frame: Frame) -> None:
        other, lacks = self._other, [*self._lacks, frame]
        if other is not None:
            try:
                self._add(other, lacks)
            except OSError:  # somebody reads it still: then a copy
                other.unlink(missing_ok=True)
                other = self._other = None
        if other is None:
            other = self._copied()
            self._add(other, [frame])
        older = self._spare()
        try:
            os.link(self.path, older)
        except OSError:  # a file system without second names
            self._take(other)
        else:
            self._take(other)
            self._other, self._lacks = older, [frame]

    def _add(self, other: Path, frames: list[Frame]) -> None:
        _reserve(other, sum(frame.u.nbytes for frame in frames))
        with self._h5py.File(other, "r+") as file:
            for frame in frames:
                count = len(file["t"])
                for name, value in (("u", frame.u), ("t", frame.t), ("energy", frame.energy)):
                    file[name].resize(count + 1, axis=0)
                    file[name][count] = value

    def _spare(self) -> Path:
        """Return a free name, which is that of nobody's file once this process is gone."""
        if self._place is None:
            self._place = self._work.enter_context(workshop(self.path))
        return self._place / secrets.token_hex(8)

    def _copied(self) -> Path:
        other = self._spare()
        shutil.copyfile(self.path, other)
        return other

    def _take(self, other: Path) -> None:
        with other.open("r+b") as stream:  # Windows flushes no file that is open for reading alone
            os.fsync(stream.fileno())
        other.replace(self.path)
        sync_folder(self.path.absolute().parent)
        self._other, self._lacks = None, []

    def close(self) -> None:
        self._work.close()
        self._place, self._other, self._lacks = None, None, []


def _reserve(path: Path, content: int) -> None:
    """Take room on the disk before HDF5 writes, which does not survive a full one; it gives back what is left."""
    if not hasattr(os, "posix_fallocate"):  # then what is free was looked at
        return
    with path.open("r+b") as stream:
        size = os.fstat(stream.fileno()).st_size
        os.posix_fallocate(stream.fileno(), 0, size + content + _INDEX)


def _fill(file: Any, layout: Layout) -> None:
    """Put all but the frames into a new file."""
    file.attrs.update(layout.attributes)
    rows = max(1, min(layout.shape[0], _CHUNK * layout.shape[0] // max(layout.nbytes, 1)))
    u = file.create_dataset(
        "u", (0, *layout.shape), layout.dtype, maxshape=(None, *layout.shape), chunks=(1, rows, *layout.shape[1:])
    )
    u.attrs.update(layout.beside)
    for name in ("t", "energy"):
        file.create_dataset(name, (0,), np.float64, maxshape=(None,), chunks=(_ROWS,))
    file["t"].make_scale("t")
    for name, (axes, values, attributes) in layout.coordinates.items():
        data = file.create_dataset(name, data=values)
        data.attrs.update(attributes)
        if axes == (name,):
            data.make_scale(name)
    for name, length in zip(layout.axes, layout.shape, strict=True):
        if name not in file:  # an axis without positions, as netCDF says it
            file.create_dataset(name, (length,), ">f4").make_scale(
                f"This is a netCDF dimension but not a netCDF variable.{length:10d}"
            )
    for axis, name in enumerate(("t", *layout.axes)):
        u.dims[axis].attach_scale(file[name])
    file["energy"].dims[0].attach_scale(file["t"])
    for name, (axes, _, _) in layout.coordinates.items():
        if axes != (name,):
            file[name].dims[0].attach_scale(file[axes[0]])


def check_own(path: Path, dataset: Any) -> None:
    if dataset.is_virtual or dataset.external:
        raise FileFormatError(
            f"{path}: got {dataset.name}, whose values are in other files, expected values in this file; "
            "copy it with h5repack"
        )
