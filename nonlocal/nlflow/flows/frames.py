"""Frames in files."""

from __future__ import annotations

import math
import os
from contextlib import ExitStack
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

from nlflow._array import Array, to_numpy
from nlflow.errors import FileFormatError, InputError, check_flag, check_path
from nlflow.flows.flow import Flow
from nlflow.flows.result import layout_of
from nlflow.flows.trackers import About, Tracker, check_place
from nlflow.store.atomic import locked
from nlflow.store.series import Frame, Layout, series_of


def check_whole(tracker: Tracker, flow: Flow) -> None:
    """Raise `InputError` where a process holds only a part of the signal."""
    if flow.affinity.whole_shape != tuple(flow.affinity.domain.shape):
        raise InputError(
            f"trackers: {type(tracker).__name__} needs the whole signal in one process, got nodes shared out among "
            "several; use t_eval and Solution, or run in one process"
        )


def taken(place: Path, what: str) -> InputError:
    return InputError(
        f"path: got {str(place)!r}, which would be lost; expected a new name, or {what} of this problem "
        "(signal, kernel, flow, times, those of trackers, and integrator); choose another name, or remove it"
    )


class Resumable(Tracker):
    """Base of `Frames` and `Film`, whose files a resumed run goes on with."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        every: int = 1,
        *,
        interval: float | None = None,
        at: ArrayLike | None = None,
    ) -> None:
        super().__init__(every, interval=interval, at=at)
        self.path = check_path("path", path)
        check_place(self.path, folders=True)
        self.count = 0
        self._resumed = False
        self._lock = ExitStack()

    def start(self, flow: Flow, u: Array, t: float, end: float) -> None:
        check_whole(self, flow)
        check_place(self.path, folders=True)  # anew: the run may begin much later
        self._lock.enter_context(locked(self.path, "path", whole=True))
        self.count, self._resumed = 0, False

    def record(self) -> dict[str, NDArray[np.float64]]:
        return {"count": np.array([float(self.count)])}

    def restore(self, record: dict[str, NDArray[np.float64]]) -> None:
        self.count, self._resumed = int(record["count"][0]), True

    def finish(self) -> None:
        self._lock.close()


class Frames(Resumable):
    """Write signals, times and energies to a file while the run goes on, for h5py, xarray, zarr or ParaView.

    ``u`` has the axes and coordinates of `Solution.to_xarray`.

    Parameters
    ----------
    path : path
        A new name, or the file of a run of the same problem (signal, kernel, flow, end and output times, integrator,
        times of trackers), which is replaced, or continued by ``resume``. Its suffix gives the format:

        - ``.h5``, ``.hdf5``, ``.nc``: HDF5 with the named axes of netCDF 4 (extra ``hdf5``).
        - ``.zarr``: a zarr store of format 3 (extra ``zarr``).
        - ``.pvd``: a series of VTK, see `Solution.to_vtk`.
    every, interval, at
        When it looks; see `nlflow.flows.trackers.Tracker`.
    energy : bool
        Compute the energy of each frame, one average; otherwise it is NaN.

    Raises
    ------
    InputError
        For a path that is taken or cannot be written, a missing package, and a domain that the format does not know.
    FileFormatError
        When a frame cannot be written, or a file is of another run than the checkpoint.
    """

    name = "frames"

    def __init__(
        self,
        path: str | os.PathLike[str],
        every: int = 1,
        *,
        interval: float | None = None,
        at: ArrayLike | None = None,
        energy: bool = True,
    ) -> None:
        super().__init__(path, every, interval=interval, at=at)
        self.energy = check_flag("energy", energy)
        self._series = series_of(self.path)

    def begin(self, flow: Flow, u: Array, t: float, about: About) -> None:
        layout = layout_of(flow.affinity.domain, to_numpy(u), about())
        self._series.check(layout)
        if self._resumed:
            if not self.path.exists():
                raise FileFormatError(
                    f"{self.path}: there is no such file, expected the one that was written beside the checkpoint, "
                    f"with {self.count} frames; restore it, or start afresh"
                )
            self._series.resume(layout, self.count)
        else:
            self._check_free(layout)
            self._series.create(layout)

    def _check_free(self, layout: Layout) -> None:
        """Remove the file of the same problem; raise `InputError` for others."""
        if self._series.is_of(layout):
            self._series.remove()
        for place in self._series.places:
            if place.exists():
                raise taken(place, "a file")

    def look(self, flow: Flow, u: Array, t: float) -> str | None:
        if self._series.last != t:
            energy = flow.energy(u) if self.energy else math.nan
            self._series.append(Frame(t, to_numpy(u), energy))
            self.count = self._series.count
        return None

    def finish(self) -> None:
        try:
            self._series.close()
        finally:
            super().finish()
