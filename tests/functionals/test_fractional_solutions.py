"""Fractional Laplacians: solutions, their orders and their limits against exact ones."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from scipy import integrate, special

from nlflow import (
    FractionalLaplacian,
    Grid,
)
from nlflow.affinities.lattice import normalization
from tests.fractional import ball_solution, disc, error, interval

pytestmark = pytest.mark.numerical

ORDERS = (0.25, 0.5, 0.75)


# ---- exact solutions


@pytest.mark.parametrize(
    ("s", "theirs"), [(0.25, 0.005677), (0.75, 0.001334)]
)  # PyNucleus at 127 unknowns, tests/cache_runFractional.py, "relative interpolated L2 error"
def test_interval_is_below_finite_elements(s: float, theirs: float) -> None:
    a, x = interval(127, s)
    assert error(a.solve(1.0).u, ball_solution(1, s, x * x)) < theirs / 20


def test_disc_is_below_finite_elements() -> None:
    a, r = disc(61, 0.75)  # PyNucleus: 2977 unknowns, 0.002898
    assert 2800 < a.domain.size < 2977
    assert error(a.solve(1.0).u, ball_solution(2, 0.75, r * r)) < 0.002898 / 10


@pytest.mark.parametrize("s", ORDERS)
def test_order_of_solutions(s: float) -> None:
    """1 + s with the correction, and min(1, 1/2 + s) without, that of finite elements."""
    sizes = (250, 1000, 4000)
    for corrected, order in ((True, 1 + s), (False, min(1, 0.5 + s))):
        errors = []
        for n in sizes:
            a, x = interval(n, s, corrected=corrected)
            errors.append(error(a.solve(1.0).u, ball_solution(1, s, x * x)))
        assert math.log(errors[1] / errors[2], 4) == pytest.approx(order, abs=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("s", [0.25, 0.75])
def test_tempered_solution_converges(s: float) -> None:
    """To its own on a grid nine times as fine, whose error is at most a tenth."""
    coarse, fine = (interval(n, s, tempering=20.0)[0].solve(1.0).u for n in (90, 810))
    assert error(coarse, fine[4::9]) < 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("s", [0.25, 0.75])
@pytest.mark.sampled(1)
def test_short_horizon_beside_a_slanted_edge(s: float) -> None:
    """The rate of killing stays positive within the horizon and 0 beyond, and the correction helps."""
    for end in np.linspace(0.9, 0.93, 7):
        line = Grid(31, 2 / 31, "isolated")
        b = FractionalLaplacian(line, s, inside=end - np.abs(line.nodes[:, 0] - 1), horizon=0.1)
        assert b.killing.min() >= 0
        assert b.solve(1.0).success
    found = {}
    for n, corrected in ((30, True), (30, False), (210, True)):
        grid = Grid((n, n), 2 / n, "isolated")
        r = np.linalg.norm(grid.nodes - 1, axis=1).reshape(n, n)
        a = FractionalLaplacian(grid, s, inside=0.93 - r, horizon=0.1, corrected=corrected)
        assert (a.killing[r[r < 0.93] > 0.93 - 0.05] > 0).all()
        assert (a.killing[r[r < 0.93] < 0.93 - 0.11 - 2 / n] == 0).all()
        found[n, corrected] = a.on_grid(a.solve(1.0).u, outside=0.0)
    fine = found[210, True][3::7, 3::7]
    errors = {corrected: error(found[30, corrected], fine) for corrected in (True, False)}
    assert errors[True] < 0.7 * errors[False]


@pytest.mark.parametrize("s", ORDERS)
@pytest.mark.parametrize("degree", [1, 4])
def test_other_right_hand_sides_on_the_interval(s: float, degree: int) -> None:
    """(1 - x^2)^s C_n(x), Gegenbauer (Dyda, Kuznetsov and Kwasnicki 2017, doi 10.1007/s00365-016-9336-4)."""
    errors = []
    for n in (1000, 4000):
        a, x = interval(n, s)
        polynomial = special.eval_gegenbauer(degree, s + 0.5, x)
        rhs = special.gamma(2 * s + degree + 1) / math.factorial(degree) * polynomial
        errors.append(error(a.solve(rhs).u, np.maximum(1 - x * x, 0) ** s * polynomial))
    assert errors[1] < 5e-5
    assert math.log(errors[0] / errors[1], 4) == pytest.approx(1 + s, abs=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("s", ORDERS)
@pytest.mark.sampled(1)
def test_other_right_hand_side_on_the_disc(s: float) -> None:
    """(1 - r^2)^s P_1(2 r^2 - 1), Jacobi: another profile up to the edge than that of f = 1."""
    errors = []
    for n in (60, 240):
        a, r = disc(n, s)
        polynomial = special.eval_jacobi(1, s, 0, 2 * r * r - 1)
        rhs = 4**s * math.gamma(2 + s) ** 2 * polynomial
        errors.append(error(a.solve(rhs).u, (1 - r * r) ** s * polynomial))
    assert errors[0] < 6e-3
    assert errors[1] < errors[0] / 4**1


@pytest.mark.parametrize("s", ORDERS)
def test_smooth_solution_has_the_order_of_the_weights(s: float) -> None:
    """(1 - x^2)^4 on the line, whose image is a hypergeometric function (Dyda 2012, doi 10.2478/s13540-012-0038-8)."""
    errors = []
    for n in (64, 128):
        a, x = interval(n, s, corrected=False)
        c = 4**s * special.gamma(s + 0.5) * special.gamma(5) / (math.sqrt(math.pi) * special.gamma(5 - s))
        rhs = c * special.hyp2f1(s + 0.5, s - 4, 0.5, x * x)
        errors.append(error(a.solve(rhs).u, (1 - x * x) ** 4))
    assert math.log2(errors[0] / errors[1]) == pytest.approx(4 - 2 * s, abs=0.1)


@pytest.mark.slow
def test_box_and_rotated_box_agree() -> None:
    """Edges along the axes and slanted ones: the same square, turned by 30 degrees on a finer grid."""
    s, n = 0.6, 48
    straight = FractionalLaplacian(Grid((n, n), 2 / n, "isolated"), s).solve(1.0).u
    m = 141
    grid = Grid((m, m), 3 / m, "isolated")
    x, y = (grid.nodes - 1.5).T
    turned = np.abs([x * math.sqrt(0.75) + y / 2, y * math.sqrt(0.75) - x / 2]).max(axis=0)
    a = FractionalLaplacian(grid, s, inside=(1 - turned).reshape(m, m))
    found = a.on_grid(a.solve(1.0).u)
    middle = straight[n // 2 - 1 : n // 2 + 1, n // 2 - 1 : n // 2 + 1].mean()
    assert found[m // 2, m // 2] == pytest.approx(middle, rel=2e-3)


@pytest.mark.parametrize("s", [0.4, 0.75])
def test_box_in_three_dimensions_converges(s: float) -> None:
    """At its centre, faster than without the correction: to what both tend to."""
    centres = {}
    for corrected in (True, False):
        for n in (5, 15):
            a = FractionalLaplacian(Grid((n, n, n), 2 / n, "isolated"), s, corrected=corrected)
            centres[corrected, n] = float(a.solve(1.0).u[n // 2, n // 2, n // 2])
    assert abs(centres[True, 5] - centres[True, 15]) < 0.01 * centres[True, 15]
    assert centres[True, 15] < centres[False, 15] < centres[False, 5]
    assert abs(centres[False, 5] - centres[True, 15]) > 3 * abs(centres[True, 5] - centres[True, 15])


def test_ball_of_cells_converges() -> None:
    errors = []
    for n in (10, 20):
        grid = Grid((n, n, n), 2 / n, "isolated")
        squared = ((grid.nodes - 1) ** 2).sum(axis=1).reshape(n, n, n)
        a = FractionalLaplacian(grid, 0.4, inside=squared < 1)
        errors.append(error(a.solve(1.0).u, ball_solution(3, 0.4, squared[squared < 1])))
    assert errors[1] < 0.6 * errors[0] < 0.12


@pytest.mark.parametrize("s", [0.25, 0.75])
def test_eigenvalues_of_the_interval(s: float) -> None:
    """(n pi / 2 - (1 - s) pi / 4)^2s + O(1 / n) (Kwasnicki 2012, doi 10.1016/j.jfa.2011.12.004)."""
    a, _ = interval(400, s)
    found = np.linalg.eigvalsh(a.apply(np.eye(400)))[:12]
    n = np.arange(1, 13)
    exact = (n * math.pi / 2 - (1 - s) * math.pi / 4) ** (2 * s)
    assert np.all(np.abs(found - exact) < 0.1 / n)
    assert np.abs(found - exact)[-1] < 0.01


@pytest.mark.slow
@pytest.mark.parametrize("s", [0.25, 0.75])
def test_values_given_outside(s: float) -> None:
    """A Gaussian on the line, given outside (-1, 1) by an array, and found inside."""
    solved = []
    for n in (400, 800):
        h = 20 / n
        x = (np.arange(n) + 0.5) * h - 10
        # Ends between nodes.
        a = FractionalLaplacian(Grid(n, h, "isolated"), s, inside=1.013 - np.abs(x))
        inside = x[np.abs(x) < 1.013]
        image = 4**s * math.gamma(0.5 + s) / math.sqrt(math.pi) * special.hyp1f1(0.5 + s, 0.5, -(inside**2))
        g = np.exp(-(x**2))
        solved.append(error(a.solve(image, g).u, np.exp(-(inside**2))))
    assert max(solved) < 0.02  # first order: the value at the edge is that of the nearest node outside
    # The correction is for solutions that behave like dist^s: a smooth u is not one, so it is left out here.
    plain = FractionalLaplacian(Grid(n, h, "isolated"), s, inside=np.abs(x) < 1.013)
    assert error(plain.apply(g[np.abs(x) < 1.013], g), image) < 1e-4
    assert plain.solve(0.0, 3.0).u == pytest.approx(np.full(len(inside), 3.0), rel=1e-9)


# ---- limits


@pytest.mark.parametrize("s", ORDERS)
@pytest.mark.parametrize("nodes", [1.5, 3.0, 10.0])
def test_local_limit(s: float, nodes: float) -> None:
    """The horizon falls with the spacing: -Laplace to second order, for any fixed number of nodes within it."""
    errors = []
    for n in (100, 200):
        a = FractionalLaplacian(
            Grid(n, 2 * math.pi / n, "periodic"), s, horizon=nodes * 2 * math.pi / n, scaling="local"
        )
        u = np.sin(2 * a.domain.nodes[:, 0])
        errors.append(error(a.apply(u), 4 * u))
    assert errors[0] < 0.07
    assert math.log2(errors[0] / errors[1]) == pytest.approx(2, abs=0.1)


@pytest.mark.slow
def test_growing_horizon_and_vanishing_tempering() -> None:
    """The rest of the kernel is C 2 delta^(-2s) / 2s on the line: solutions differ in proportion to it."""
    whole, _ = interval(200, 0.75)
    u = whole.solve(1.0).u
    gaps = [float(np.abs(interval(200, 0.75, horizon=d)[0].solve(1.0).u - u).max()) for d in (10.0, 100.0)]
    assert math.log10(gaps[0] / gaps[1]) == pytest.approx(1.5, abs=0.05)
    near = [float(np.abs(interval(200, 0.75, tempering=t)[0].solve(1.0).u - u).max()) for t in (1e-2, 1e-4)]
    assert near[1] < 0.02 * near[0] < 0.002


@pytest.mark.parametrize("options", [{"tempering": 2.0}, {"horizon": 0.7}, {"horizon": 0.7, "tempering": 2.0}])
def test_other_kernels_against_integrals(options: dict[str, float]) -> None:
    """A u for u = cos on the line, by an adaptive quadrature of (1 - cos y) k(y)."""
    s = 0.65
    horizon, tempering = options.get("horizon", math.inf), options.get("tempering", 0.0)
    c = normalization(1, s)
    top = min(horizon, 40 / tempering if tempering else math.inf)
    exact, _ = integrate.quad(
        lambda y: 2 * c * 2 * math.sin(y / 2) ** 2 * y ** (-1 - 2 * s) * math.exp(-tempering * y), 0, top, limit=400
    )
    errors = []
    for n in (128, 256):
        a = FractionalLaplacian(Grid(n, 2 * math.pi / n, "periodic"), s, **options)
        u = np.cos(a.domain.nodes[:, 0])
        errors.append(error(a.apply(u), exact * u))
    assert errors[1] < 2e-4
    assert errors[1] < errors[0] / 2


@pytest.mark.parametrize("unit", [1e-30, 1.0, 1e25])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_torus_tells_the_residual_of_each_channel_and_whether_it_is_wanted(dtype: Any, unit: float) -> None:
    a = FractionalLaplacian(Grid(16, 1.0, "periodic"), 0.7)
    wave = np.cos(2 * np.pi * np.arange(16) / 16 * np.array([[1], [5]])).T
    b = (wave * [unit, 1e-6 * unit]).astype(dtype)
    b -= b.mean(axis=0)
    matrix = np.stack([a.apply(e) for e in np.eye(16)], axis=1)
    found = a.solve(b)
    assert found.u.dtype == dtype
    assert found.success, found.message
    left = np.linalg.norm(matrix @ found.u.astype(float) / unit - b.astype(float) / unit, axis=0)
    residual = (left / np.linalg.norm(b.astype(float) / unit, axis=0)).max()
    assert residual / 20 <= found.residual + np.finfo(dtype).eps <= 20 * (residual + np.finfo(dtype).eps)
    refused = a.solve(b, rtol=1e-20)
    assert not refused.success
    assert "above rtol=1e-20" in refused.message
