"""Solutions as datasets of xarray: axes, coordinates, attributes, and what is said where xarray is missing."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nlflow as nl
from nlflow import Batch, Gaussian, Grid, InputError, Points, affinity

KERNEL = Gaussian(width=1.0)
LINE = Points(np.linspace(0, 3, 6), np.linspace(1, 2, 6))
PLANE = Grid((4, 5), spacing=(0.5, 0.25), boundary="periodic")


def solution(domain: Any, channels: int | None = None, **options: Any) -> Any:
    shape = (*domain.shape, *(() if channels is None else (channels,)))
    u = np.random.default_rng(0).standard_normal(shape)
    features = np.random.default_rng(1).standard_normal((*domain.shape, 2)) if domain.leading else None
    flow = nl.GradientFlow(nl.J(affinity(KERNEL, domain, features)), "degree")
    return nl.solve(flow, u, t_eval=[0.0, 0.5, 1.0], **options)


def test_without_xarray_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "xarray", None)
    with pytest.raises(InputError, match=r"pip install 'nlflow\[xarray\]'"):
        solution(LINE).to_xarray()


@pytest.mark.parametrize(
    ("domain", "channels", "axes"),
    [
        (Grid(6, 0.1), None, ("x",)),
        (PLANE, None, ("x", "y")),
        (PLANE, 3, ("x", "y", "channel")),
        (LINE, 2, ("node", "channel")),
        (Batch(LINE, (2, 3)), None, ("batch_0", "batch_1", "node")),
    ],
)
def test_axes_are_named(domain: Any, channels: int | None, axes: tuple[str, ...]) -> None:
    pytest.importorskip("xarray", reason="xarray is optional")
    found = solution(domain, channels)
    data = found.to_xarray()
    assert data.u.dims == ("t", *axes)
    assert np.array_equal(data.u.values, found.u)
    assert np.shares_memory(data.u.values, found.u)
    assert data.t.values.tolist() == [0.0, 0.5, 1.0]
    assert np.array_equal(data.energy.values, found.energy)


def test_coordinates_are_those_of_the_domain() -> None:
    pytest.importorskip("xarray", reason="xarray is optional")
    plane = solution(PLANE).to_xarray()
    assert plane.x.values.tolist() == [0, 0.5, 1, 1.5]
    assert plane.y.attrs == {"spacing": 0.25, "boundary": "periodic"}
    assert float(plane.u.sel(t=0.5, x=1.0, y=0.25)) == solution(PLANE).u[1, 2, 1]
    line = solution(LINE).to_xarray()
    assert np.array_equal(line.x.values, LINE.nodes[:, 0])
    assert np.array_equal(line.weight.values, LINE.weights)
    batch = solution(Batch(LINE, 2)).to_xarray()
    assert np.array_equal(batch.weight.values, LINE.weights)


def test_records_and_provenance_come_along(tmp_path: Path) -> None:
    xarray = pytest.importorskip("xarray", reason="xarray is optional")
    found = solution(LINE, trackers=[nl.Energy(every=1)])
    data = found.to_xarray()
    assert data.energy_value.dims == ("energy_t",)
    assert np.array_equal(data.energy_t.values, found.records["energy"]["t"])
    assert data.attrs["integrator"] == found.stats["integrator"]
    assert data.attrs["status"] == "finished"
    assert data.attrs["success"] == 1
    assert json.loads(data.attrs["threads"]) == found.provenance["threads"]
    assert all(isinstance(value, str | int | float) for value in data.attrs.values())
    data.to_netcdf(tmp_path / "solution.nc", engine="scipy")
    with xarray.open_dataset(tmp_path / "solution.nc", engine="scipy") as read:
        assert np.array_equal(read.u.values, found.u)


def test_a_solution_from_a_file_needs_its_domain(tmp_path: Path) -> None:
    pytest.importorskip("xarray", reason="xarray is optional")
    solution(PLANE).save(tmp_path / "run.npz")
    read = nl.Solution.load(tmp_path / "run.npz")
    with pytest.raises(InputError, match=r"domain: got NoneType, expected the Grid"):
        read.to_xarray()
    assert read.to_xarray(PLANE).u.dims == ("t", "x", "y")
    with pytest.raises(InputError, match=r"nodes of shape \(5, 4\) for signals of shape \(4, 5\)"):
        read.to_xarray(Grid((5, 4)))
