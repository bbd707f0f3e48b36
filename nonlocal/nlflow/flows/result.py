"""What `solve` returns."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Generic

import numpy as np
from numpy.typing import ArrayLike, NDArray

from nlflow._array import ArrayT, namespace, to_numpy
from nlflow.domains import Batch, Domain, Grid
from nlflow.errors import FileFormatError, InputError, check_floats, check_path, kind_of, not_installed, shortened
from nlflow.store.encoding import misfit
from nlflow.store.notebook import card, picture
from nlflow.store.series import Frame, Layout
from nlflow.store.series.vtk import VtkSeries
from nlflow.store.storage import load_archive, save_archive


class Status(StrEnum):
    """Why an integration ended."""

    FINISHED = "finished"
    STOPPED = "stopped"
    INTERRUPTED = "interrupted"
    DIVERGED = "diverged"
    STEP_FAILED = "step failed"
    NOT_CONVERGED = "not converged"


@dataclass(frozen=True)
class Solution(Generic[ArrayT]):
    """The course of a flow.

    Attributes
    ----------
    t : array of shape (T,)
        Output times that were reached; the last is where the integration ended.
    u : array of shape (T, ...)
        The signal at each of them, of the start's dtype and on its device; integers become float64, half precision
        float32.
    energy : array of shape (T,)
        NaN for flows without one.
    success : bool
        Whether the integration ended at its time or by a stopping rule.
    status : Status
    message : str
        What happened and, where it failed, what to change.
    stats : dict
        ``steps``, ``rejected``, ``applications`` of P by steps, ``analysis_applications`` by energies and trackers,
        ``order`` of the integrator for this flow, ``error_bound`` (of expansions), ``compile_seconds``,
        ``solve_seconds``, ``tracker_seconds``, ``integrator``; ``method``, ``reason`` and ``error_estimate`` of the
        affinity; with noise ``strong_order``, ``weak_order`` and ``seed``.
    records : dict of str to dict
        What each tracker collected: ``{'energy': {'t': ..., 'value': ...}}``.
    provenance : dict
        Versions, the machine and the problem in words.
    domain : Grid, Points, Batch or None
        None for a solution that was read from a file.
    between : callable or None
        What `at` asks, for ``solve(dense=True)``.
    """

    t: NDArray[np.float64]
    u: ArrayT
    energy: NDArray[np.float64]
    success: bool
    status: Status
    message: str
    stats: dict[str, Any]
    records: dict[str, dict[str, NDArray[np.float64]]] = field(default_factory=dict)
    provenance: dict[str, Any] = field(default_factory=dict)
    domain: Domain | None = None
    between: Callable[[float], ArrayT] | None = None

    def at(self, t: float | ArrayLike) -> ArrayT:
        """Return the signal at a time that was reached, or at several, shape (T, ...), after ``solve(dense=True)``.

        Raises
        ------
        InputError
            For a solution without ``dense``, and for times that were not reached.
        """
        if self.between is None:
            raise InputError("at: the solution knows its output times alone; ask for solve(..., dense=True)")
        times = check_floats("t", t, ndim=(0, 1))
        if times.min() < 0 or times.max() > self.t[-1]:
            raise InputError(
                f"t: got times from {times.min():g} to {times.max():g}, expected them in [0, {self.t[-1]:g}]"
            )
        if times.ndim == 0:
            return self.between(float(times))
        stacked: ArrayT = namespace(self.u).stack([self.between(float(one)) for one in times])
        return stacked

    @property
    def final(self) -> ArrayT:
        """The signal at the last time."""
        last: ArrayT = self.u[-1]
        return last

    def to_vtk(self, path: str | os.PathLike[str], domain: Domain | None = None) -> None:
        """Write the solution as a series of VTK, which ParaView reads.

        Parameters
        ----------
        path : path
            Of the list of files, ending with ``.pvd``. The files lie in a folder beside it that ends with ``.vtk``:
            image data (``.vti``) of a grid, points (``.vtp``) of scattered nodes, each with ``TimeValue`` and
            ``energy``; channels are components.
        domain : Grid or Points, optional
            Of one to three dimensions; needed for a solution that was read from a file.

        Raises
        ------
        InputError
            For other domains and names, and where something is at the path already.
        FileFormatError
            When the files cannot be written.
        """
        write_series(self, self.domain if domain is None else domain, path)

    def to_xarray(self, domain: Domain | None = None) -> Any:
        """Return the solution as a dataset with named axes.

        Parameters
        ----------
        domain : Grid, Points or Batch, optional
            Where the signal lives; needed for a solution that was read from a file.

        Returns
        -------
        xarray.Dataset
            ``u`` over ``t``, the axes of the domain and ``channel`` where there is one; ``energy`` over ``t``; what
            trackers recorded, as ``distance_value`` over ``distance_t``. A grid of up to three axes has ``x``, ``y``,
            ``z`` in this order, with positions as coordinates; scattered nodes have ``node``, with positions and
            quadrature weights; a batch has ``batch_0``, ... before them.

        Raises
        ------
        InputError
            Without xarray, and without a domain or with another one.
        """
        return to_dataset(self, self.domain if domain is None else domain)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the solution, without its domain, to an npz archive."""
        arrays = {"t": self.t, "u": to_numpy(self.u), "energy": self.energy}
        for name, record in self.records.items():
            arrays.update({f"record/{name}/{key}": value for key, value in record.items()})
        meta = {
            "kind": "solution",
            "success": self.success,
            "status": self.status.value,
            "message": self.message,
            "stats": self.stats,
            "provenance": self.provenance,
        }
        save_archive(path, arrays, meta)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Solution[NDArray[Any]]:
        """Read a solution written by `save`, with NumPy arrays.

        Raises
        ------
        FileFormatError
            When the file is damaged or of another kind.
        """
        arrays, meta = load_archive(path, "solution")
        records: dict[str, dict[str, NDArray[np.float64]]] = {}
        for key in [k for k in arrays if k.startswith("record/")]:
            name, _, column = key.removeprefix("record/").partition("/")
            records.setdefault(name, {})[column] = arrays.pop(key)
        trouble = misfit({name: meta.get(name) for name in _SAVED}, _SAVED) or _misshapen(arrays)
        if trouble is None and meta["status"] not in tuple(Status):
            trouble = f"{shortened(repr(meta['status']), 60)} as status"
        if trouble is not None:
            raise FileFormatError(f"{path}: got {trouble}, which is no solution; check the path, or start afresh")
        return Solution(
            t=arrays["t"], u=arrays["u"], energy=arrays["energy"], success=meta["success"],
            status=Status(meta["status"]), message=meta["message"], stats=meta["stats"], records=records,
            provenance=meta["provenance"],
        )  # fmt: skip

    def __repr__(self) -> str:
        return (
            f"<Solution {self.status.value} at t={self.t[-1]:.6g} after {self.stats.get('steps')} steps, "
            f"energy {self.energy[-1]:.6g}: {self.message}>"
        )

    def _repr_html_(self) -> str:
        """Return it for a notebook: what it says, the energy against time, and the last signal of one or two axes."""
        stats = self.stats
        return card(
            "Solution",
            [
                ("status", self.status.value),
                ("message", self.message),
                ("t", f"{self.t[0]:.6g} to {self.t[-1]:.6g}, {len(self.t)} output times"),
                ("u", f"{' x '.join(map(str, self.u.shape))}, {self.u.dtype}"),
                ("energy", f"{self.energy[0]:.6g} to {self.energy[-1]:.6g}"),
                ("steps", f"{stats.get('steps')} ({stats.get('rejected', 0)} rejected) of {stats.get('integrator')}"),
                ("method", stats.get("method")),
                ("seconds", f"{stats['solve_seconds']:.3g}" if "solve_seconds" in stats else None),
                ("records", ", ".join(self.records)),
            ],
            picture("energy against t", self.energy, self.t) if len(self.t) > 1 else "",
            picture(f"u at t = {self.t[-1]:.6g}", to_numpy(self.u[-1])) if self._shown else "",
        )

    @property
    def _shown(self) -> bool:
        return self.domain is not None and not self.domain.leading and self.u.shape[1:] == self.domain.shape


_SAVED = {"success": bool, "status": str, "message": str, "stats": dict, "provenance": dict}


def _misshapen(arrays: dict[str, NDArray[Any]]) -> str | None:
    """Return why arrays are not the times, signals and energies of a solution; None if they are."""
    for name in ("t", "u", "energy"):
        found = arrays.get(name)
        if found is None or found.dtype.kind != "f" or not found.ndim:
            return f"no array of floats {name}"
        if len(found) != len(arrays["t"]) or not len(found) or (found.ndim > 1 and name != "u"):
            return f"{name} of shape {found.shape} beside t of shape {arrays['t'].shape}"
    return None


_LETTERS = ("x", "y", "z")


def to_dataset(solution: Any, domain: Any) -> Any:
    xarray = need_xarray("to_xarray")
    u = to_numpy(solution.u)
    dims = ("t", *_dims(domain, u.shape[1:], "to_xarray"))
    variables = {"u": (dims, u), "energy": (("t",), solution.energy)}
    coordinates = {"t": (("t",), solution.t), **_coordinates(domain)}
    for name, record in solution.records.items():
        for column, values in record.items():
            place = (f"{name}_t", *(f"{name}_{column}_{axis}" for axis in range(1, values.ndim)))
            kind = coordinates if column == "t" else variables
            kind[f"{name}_{column}"] = (place, values)
    return xarray.Dataset(variables, coordinates, _attributes(solution))


def layout_of(domain: Domain, frame: NDArray[Any], attributes: dict[str, Any]) -> Layout:
    return Layout(
        domain,
        frame.shape,
        frame.dtype,
        _dims(domain, frame.shape, "to_vtk"),
        {name: (axes, np.asarray(x), dict(*more)) for name, (axes, x, *more) in _coordinates(domain).items()},
        {name: _plain(value) for name, value in attributes.items()},
    )


def write_series(solution: Any, domain: Any, path: str | os.PathLike[str]) -> None:
    series = VtkSeries(check_path("path", path))
    if series.path.suffix.lower() != ".pvd":
        raise InputError(f"path: got {os.fspath(path)!r}, expected a name that ends with .pvd, the list of the files")
    u = to_numpy(solution.u)
    layout = layout_of(domain, u[0], _attributes(solution))
    series.check(layout)
    for place in series.places:
        if place.exists():
            raise InputError(f"path: got {str(place)!r}, which exists; choose another name, or remove it")
    series.create(layout)
    for t, frame, energy in zip(solution.t, u, solution.energy, strict=True):
        series.append(Frame(float(t), frame, float(energy)))


def _dims(domain: Any, shape: tuple[int, ...], method: str) -> tuple[str, ...]:
    if not isinstance(domain, Domain):
        raise InputError(
            f"domain: got {kind_of(domain)}, expected the Grid, Points or Batch of the flow, which files do not "
            f"hold: {method}(domain=...)"
        )
    names = _axes(domain)
    if shape[: len(names)] != domain.shape or len(shape) > len(names) + 1:
        raise InputError(f"domain: got nodes of shape {domain.shape} for signals of shape {shape}")
    return (*names, *(("channel",) if len(shape) > len(names) else ()))


def need_xarray(name: str) -> Any:
    try:
        import xarray
    except ImportError as error:
        raise not_installed(name, "xarray", "xarray") from error
    return xarray


def _axes(domain: Domain) -> tuple[str, ...]:
    if isinstance(domain, Batch):
        return (*(f"batch_{axis}" for axis in range(len(domain.leading))), *_axes(domain.item))
    if len(domain.shape) == 1 and not isinstance(domain, Grid):
        return ("node",)
    return _named(len(domain.shape), "axis")


def _named(count: int, other: str) -> tuple[str, ...]:
    return _LETTERS[:count] if count <= len(_LETTERS) else tuple(f"{other}_{i}" for i in range(count))


def _coordinates(domain: Domain) -> dict[str, Any]:
    item = domain.item
    if isinstance(item, Grid):
        names = _named(item.ndim, "axis")
        return {
            name: ((name,), x, {"spacing": h, "boundary": item.boundary})
            for name, x, h in zip(names, item.axes, item.spacing, strict=True)
        }
    if len(item.shape) != 1:
        return {}
    columns = {"weight": (("node",), item.weights)}
    for name, position in zip(_named(item.nodes.shape[1], "position"), item.nodes.T, strict=True):
        columns[name] = (("node",), position)
    return columns


def _attributes(solution: Any) -> dict[str, Any]:
    """Return what a solution says about itself in numbers and words, which every file format can hold."""
    said = {"success": solution.success, "status": solution.status.value, "message": solution.message}
    return {name: _plain(value) for name, value in {**solution.provenance, **solution.stats, **said}.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, str | float | int) and not isinstance(value, bool):
        return value
    if isinstance(value, bool | np.bool_):
        return int(value)
    return value.item() if isinstance(value, np.number) else json.dumps(value, default=str)
