"""Solutions as datasets of xarray, which is loaded when one is asked for, and as files of frames."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nlflow._array import to_numpy
from nlflow.domains import Batch, Domain, Grid
from nlflow.errors import InputError, install_command
from nlflow.store.series import Frame, Layout
from nlflow.store.series.vtk import VtkSeries

_LETTERS = ("x", "y", "z")


def to_dataset(solution: Any, domain: Any) -> Any:
    """Return an `xarray.Dataset` of a `Solution` on a domain; see `Solution.to_xarray`."""
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
    """Return what the frames of a run look like, which begin with this one."""
    return Layout(
        domain,
        frame.shape,
        frame.dtype,
        _dims(domain, frame.shape, "to_vtk"),
        {name: (axes, np.asarray(x), dict(*more)) for name, (axes, x, *more) in _coordinates(domain).items()},
        {name: _plain(value) for name, value in attributes.items()},
    )


def write_series(solution: Any, domain: Any, path: str | os.PathLike[str]) -> None:
    """Write a `Solution` as a series of VTK; see `Solution.to_vtk`."""
    series = VtkSeries(Path(path))
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
    """Return the names of the axes of signals of this shape."""
    if not isinstance(domain, Domain):
        raise InputError(
            f"domain: got {type(domain).__name__}, expected the Grid, Points or Batch of the flow, which files do not "
            f"hold: {method}(domain=...)"
        )
    names = _axes(domain)
    if shape[: len(names)] != domain.shape or len(shape) > len(names) + 1:
        raise InputError(f"domain: got nodes of shape {domain.shape} for signals of shape {shape}")
    return (*names, *(("channel",) if len(shape) > len(names) else ()))


def need_xarray(name: str) -> Any:
    """Return xarray, which `name` needs, or raise `InputError`."""
    try:
        import xarray
    except ImportError as error:
        raise InputError(f"{name}: it needs xarray, which is not installed: {install_command('xarray')}") from error
    return xarray


def _axes(domain: Domain) -> tuple[str, ...]:
    """Return the names of a domain's axes."""
    if isinstance(domain, Batch):
        return (*(f"batch_{axis}" for axis in range(len(domain.leading))), *_axes(domain.item))
    if len(domain.shape) == 1 and not isinstance(domain, Grid):
        return ("node",)
    return _named(len(domain.shape), "axis")


def _named(count: int, other: str) -> tuple[str, ...]:
    return _LETTERS[:count] if count <= len(_LETTERS) else tuple(f"{other}_{i}" for i in range(count))


def _coordinates(domain: Domain) -> dict[str, Any]:
    """Return positions along the axes of a grid, with their spacing, or those of scattered nodes."""
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
