"""Solutions as datasets of xarray, which is loaded when one is asked for."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from nlflow._array import to_numpy
from nlflow.domains import Batch, Domain, Grid
from nlflow.errors import InputError

_LETTERS = ("x", "y", "z")


def to_dataset(solution: Any, domain: Any) -> Any:
    """Return an `xarray.Dataset` of a `Solution` on a domain; see `Solution.to_xarray`."""
    xarray = _xarray()
    if not isinstance(domain, Domain):
        raise InputError(
            f"domain: got {type(domain).__name__}, expected the Grid, Points or Batch of the flow, which files do not "
            "hold: to_xarray(domain=...)"
        )
    u = to_numpy(solution.u)
    names = _axes(domain)
    if u.shape[1 : 1 + len(names)] != domain.shape or u.ndim > len(names) + 2:
        raise InputError(f"domain: got nodes of shape {domain.shape} for signals of shape {u.shape[1:]}")
    dims = ("t", *names, *(("channel",) if u.ndim > len(names) + 1 else ()))
    variables = {"u": (dims, u), "energy": (("t",), solution.energy)}
    coordinates = {"t": (("t",), solution.t), **_coordinates(domain)}
    for name, record in solution.records.items():
        for column, values in record.items():
            place = (f"{name}_t", *(f"{name}_{column}_{axis}" for axis in range(1, values.ndim)))
            kind = coordinates if column == "t" else variables
            kind[f"{name}_{column}"] = (place, values)
    return xarray.Dataset(variables, coordinates, _attributes(solution))


def _xarray() -> Any:
    try:
        import xarray
    except ImportError as error:
        raise InputError("to_xarray: it needs xarray, which is not installed: pip install 'nlflow[xarray]'") from error
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
