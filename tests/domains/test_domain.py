"""Grids and points: nodes, quadrature weights, what lies beyond the edge, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nlflow import Grid, InputError, Points
from nlflow.domains import Domain
from tests.reference import image_of

BOUNDARIES = ["periodic", "reflect", "isolated"]


# --- grids -----------------------------------------------------------------------------------------------------------


def test_a_line() -> None:
    grid = Grid(4, 0.5)
    assert (grid.shape, grid.spacing, grid.boundary) == ((4,), (0.5,), "reflect")
    assert (grid.ndim, grid.size, grid.cell) == (1, 4, 0.5)
    np.testing.assert_array_equal(grid.nodes, [[0.25], [0.75], [1.25], [1.75]])
    np.testing.assert_array_equal(grid.weights, [0.5, 0.5, 0.5, 0.5])
    np.testing.assert_array_equal(Grid(4, 0.5, "periodic").nodes.ravel(), [0, 0.5, 1, 1.5])


def test_a_plane() -> None:
    grid = Grid((2, 3), (0.5, 2.0), "isolated")
    assert (grid.ndim, grid.size, grid.cell) == (2, 6, 1.0)
    np.testing.assert_array_equal(grid.nodes, [[0.25, 1], [0.25, 3], [0.25, 5], [0.75, 1], [0.75, 3], [0.75, 5]])
    assert grid.weights.shape == (2, 3)
    assert [axis.tolist() for axis in grid.axes] == [[0.25, 0.75], [1, 3, 5]]


def test_a_volume() -> None:
    grid = Grid((2, 1, 3), (0.5, 2.0, 1.0))
    assert (grid.ndim, grid.size, grid.cell) == (3, 6, 1.0)
    np.testing.assert_array_equal(grid.nodes[[0, 1, 3]], [[0.25, 1, 0.5], [0.25, 1, 1.5], [0.75, 1, 0.5]])
    assert grid.weights.shape == (2, 1, 3)
    padded = grid.pad(np.arange(6.0).reshape(2, 1, 3), (1, 0, 2))
    np.testing.assert_array_equal(padded[:, 0], [[1, 0, 0, 1, 2, 2, 1]] * 2 + [[4, 3, 3, 4, 5, 5, 4]] * 2)


def test_equal_ways_to_write_a_grid() -> None:
    grid = Grid((4, 5), 0.5, "periodic")
    same = Grid([np.int64(4), 5], [0.5, np.float32(0.5)], "periodic")  # type: ignore[arg-type,list-item]
    assert grid == same
    assert hash(grid) == hash(same)
    assert grid != Grid((4, 5), 0.5)
    assert isinstance(grid, Domain)
    with pytest.raises(AttributeError):
        grid.shape = (3,)  # type: ignore[misc]


@pytest.mark.parametrize(("boundary", "order"), [("periodic", None), ("reflect", 2), ("isolated", 2)])
def test_quadrature(boundary: Any, order: int | None) -> None:
    """The rectangle rule is exact for what is periodic, the midpoint rule has second order."""
    errors = []
    for n in (20, 40):
        grid = Grid(n, 1 / n, boundary)
        x = grid.nodes[:, 0]
        values = np.exp(np.sin(2 * np.pi * x)) if order is None else np.exp(x)
        exact = 1.2660658777520084 if order is None else math.e - 1  # the Bessel function I_0(1)
        errors.append(abs(float((grid.weights * values).sum()) - exact))
    if order is None:
        assert max(errors) < 1e-14
    else:
        assert abs(math.log2(errors[0] / errors[1]) - order) < 0.01


@pytest.mark.parametrize("boundary", BOUNDARIES)
def test_volume(boundary: Any) -> None:
    assert math.isclose(Grid((10, 30), (0.1, 0.5), boundary).weights.sum(), 15.0)


def test_beyond_the_edge() -> None:
    u = np.array([1.0, 2, 3])
    assert Grid(3, boundary="periodic").pad(u, (4,)).tolist() == [3, 1, 2, 3, 1, 2, 3, 1, 2, 3, 1]
    assert Grid(3).pad(u, (4,)).tolist() == [3, 3, 2, 1, 1, 2, 3, 3, 2, 1, 1]
    assert Grid(3, boundary="isolated").pad(u, (4,)).tolist() == [0, 0, 0, 0, 1, 2, 3, 0, 0, 0, 0]
    mirrored = Grid(3, boundary="isolated").pad(u, (2,), isolated="symmetric")
    assert mirrored.tolist() == [2, 1, 1, 2, 3, 3, 2]
    assert Grid(3, boundary="periodic").pad(u, (1,), isolated="symmetric").tolist() == [3, 1, 2, 3, 1]


@pytest.mark.slow
@given(
    shape=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    margin=st.tuples(st.integers(0, 9), st.integers(0, 9)),
    boundary=st.sampled_from(BOUNDARIES),
    channels=st.sampled_from([(), (2,)]),
)
def test_padding_is_the_image_of_a_node(
    shape: tuple[int, int], margin: tuple[int, int], boundary: Any, channels: tuple[int, ...]
) -> None:
    """Also for margins of several grid lengths; the channel axis is left alone."""
    u = np.random.default_rng(0).random(shape + channels)
    padded = Grid(shape, boundary=boundary).pad(u, margin)
    assert padded.shape == (shape[0] + 2 * margin[0], shape[1] + 2 * margin[1], *channels)
    for i in range(padded.shape[0]):
        for j in range(padded.shape[1]):
            node = image_of(i - margin[0], shape[0], boundary), image_of(j - margin[1], shape[1], boundary)
            expected = np.zeros(channels) if None in node else u[node]
            np.testing.assert_array_equal(padded[i, j], expected)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((),), r"shape: got \(\), expected one axis or more"),
        (((2, 3, 4), (1.0, 2.0)), r"spacing: got \(1.0, 2.0\), expected one number or 3, one for each axis"),
        ((0,), r"shape: got 0, expected an integer >= 1"),
        (((4, -1),), r"shape: got -1, expected an integer >= 1"),
        ((4.0,), r"shape: got 4.0, expected an integer"),
        ((True,), r"shape: got True, expected an integer"),
        (("4",), r"shape: got '4', expected an integer"),
        ((None,), r"shape: got None, expected an integer"),
        ((4, 0), r"spacing: got 0, expected a finite real number > 0"),
        ((4, -1.0), r"spacing: got -1.0, expected a finite real number > 0"),
        ((4, math.inf), r"spacing: got inf, expected a finite real number > 0"),
        ((4, math.nan), r"spacing: got nan"),
        ((4, "fine"), r"spacing: got 'fine'"),
        ((4, (1.0, 2.0)), r"spacing: got \(1.0, 2.0\), expected one number or 1, one for each axis"),
        (((4, 5), (1.0,)), r"spacing: got \(1.0,\), expected one number or 2, one for each axis"),
        ((None, (1.0, 2.0)), r"shape: got None, expected an integer"),
        ((2**62,), r"shape: got \(4611686018427387904,\), expected fewer nodes"),
        (((2**32, 2**32),), r"shape: got .*, expected fewer nodes"),
        ((5, 1e308), r"spacing: got 1e\+308, expected a cell whose volume, and sides whose lengths, a float can hold"),
        ((4, 1.0, "wrap"), r"boundary: got 'wrap', expected one of 'periodic', 'reflect', 'isolated'"),
        ((4, 1.0, None), r"boundary: got None, expected one of"),
    ],
)
def test_grids_that_do_not_exist(arguments: Any, message: str) -> None:
    with pytest.raises(InputError, match=f"^{message}"):
        Grid(*arguments)


# --- points ----------------------------------------------------------------------------------------------------------


def test_points() -> None:
    points = Points([[0, 1], [2, 3], [4, 5]], volume=6)
    assert (points.shape, points.size, points.nodes.shape, points.nodes.dtype) == ((3,), 3, (3, 2), np.float64)
    np.testing.assert_array_equal(points.weights, [2, 2, 2])
    np.testing.assert_array_equal(Points([1, 2, 4]).nodes, [[1], [2], [4]])
    np.testing.assert_allclose(Points([1, 2, 4]).weights, 1 / 3)
    np.testing.assert_array_equal(Points([1, 2], weights=[0.5, 3]).weights, [0.5, 3])
    assert isinstance(points, Domain)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"nodes": []}, r"nodes: got an empty array of shape \(0,\)"),
        ({"nodes": 1.0}, r"nodes: got 0 dimension\(s\)"),
        ({"nodes": np.ones((2, 2, 2))}, r"nodes: got 3 dimension\(s\) \(shape \(2, 2, 2\)\), expected 1 or 2"),
        ({"nodes": [0, math.nan]}, r"nodes: got 1 NaN or infinite.*; replace them first$"),
        ({"nodes": ["a"]}, r"nodes: got dtype <U1"),
        ({"nodes": [1, 2], "weights": [1, 2, 3]}, r"weights: got shape \(3,\), expected \(2,\), one for each node"),
        ({"nodes": [1, 2], "weights": [[1, 2]]}, r"weights: got 2 dimension\(s\)"),
        ({"nodes": [1, 2], "weights": [1, 0]}, r"weights: got 0, expected every weight > 0; leave such nodes out"),
        ({"nodes": [1, 2], "weights": [1, -2.5]}, r"weights: got -2.5, expected every weight > 0"),
        ({"nodes": [1, 2], "weights": [1, math.inf]}, r"weights: got 1 NaN or infinite"),
        ({"nodes": [1, 2], "volume": 0}, r"volume: got 0, expected a finite real number > 0"),
        ({"nodes": [1, 2], "volume": "2"}, r"volume: got '2', expected a finite real number > 0"),
    ],
)
def test_points_that_do_not_exist(arguments: Any, message: str) -> None:
    with pytest.raises(InputError, match=f"^{message}"):
        Points(**arguments)


def test_points_keep_what_they_were_given() -> None:
    """A domain is immutable: arrays that change later do not move its nodes."""
    nodes, weights = np.array([[0.0], [1.0]]), np.array([1.0, 2.0])
    points = Points(nodes, weights=weights)
    nodes[:], weights[:] = 5, 7
    np.testing.assert_array_equal(points.nodes, [[0], [1]])
    np.testing.assert_array_equal(points.weights, [1, 2])


# --- signals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("domain", [Grid((3, 4)), Grid(5), Points([1.0, 2, 3])])
def test_signals(domain: Any) -> None:
    for shape in (domain.shape, (*domain.shape, 1), (*domain.shape, 7)):
        u = np.ones(shape, np.float32)
        assert domain.check_signal("u", u) is u
    assert domain.check_signal("u", np.ones(domain.shape, int).tolist()).dtype == np.float64
    for shape in ((*domain.shape, 2, 2), (2, *domain.shape), (domain.shape[0] + 1, *domain.shape[1:]), ()):
        with pytest.raises(InputError, match=r"^signal: got shape \(.*\), expected \(.*\) or \(.*'D'\): the node axes"):
            domain.check_signal("signal", np.ones(shape))
    with pytest.raises(InputError, match=r"^signal: got an empty array"):
        domain.check_signal("signal", np.ones((*domain.shape, 0)))
