"""Fractional Laplacians: weights and operators against plain sums, solving, flows, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import mpmath
import numpy as np
import pytest
from scipy import integrate, special

from nlflow import (
    E,
    Exponential,
    FractionalLaplacian,
    GradientFlow,
    Grid,
    InputError,
    J,
    MarkovChain,
    MemoryLimitError,
    NumericalError,
    solve,
)
from nlflow.affinities import fractional as halfspace
from nlflow.affinities.lattice import Lattice, epstein, normalization
from nlflow.functionals import fractional as capacitance
from nlflow.functionals.fractional import Capacitance
from tests.fractional import disc, error, interval

pytestmark = pytest.mark.numerical

ORDERS = (0.25, 0.5, 0.75)


def plain_matrix(nodes: Any, h: float, s: float) -> Any:
    """Return A without a correction as a matrix: a double sum, with zeta functions by mpmath."""
    ndim = nodes.shape[1]

    def zeta(power: float) -> float:
        if ndim == 1:
            return 2 * float(mpmath.zeta(power))
        beta = 4 ** (-power / 2) * (mpmath.zeta(power / 2, 0.25) - mpmath.zeta(power / 2, 0.75))
        return float(4 * mpmath.zeta(power / 2) * beta)

    c = 4**s * math.gamma(ndim / 2 + s) / (math.pi ** (ndim / 2) * abs(math.gamma(-s))) * h ** (-2 * s)
    nearest = -zeta(ndim + 2 * s - 2) / (2 * ndim)
    r = np.linalg.norm(nodes[:, None] - nodes, axis=-1) / h
    weights = np.where(r > 0.5, np.maximum(r, 0.5) ** (-ndim - 2 * s), 0.0) + nearest * (np.abs(r - 1) < 1e-9)
    return c * ((zeta(ndim + 2 * s) + 2 * ndim * nearest) * np.eye(len(nodes)) - weights)


# ---- weights


@pytest.mark.parametrize("power", [-1.3, 0.0, 0.5, 1.5, 2.75])
def test_zeta_functions_against_mpmath(power: float) -> None:
    assert epstein(1, power) == pytest.approx(2 * float(mpmath.zeta(power)), rel=1e-13)
    beta = 4 ** (-power / 2) * (mpmath.zeta(power / 2, 0.25) - mpmath.zeta(power / 2, 0.75))
    assert epstein(2, power) == pytest.approx(float(4 * mpmath.zeta(power / 2) * beta), rel=1e-13)
    # Each value at 3 axes has its mirror (the functional equation of the theta function).
    mirror = math.pi ** (power - 1.5) * special.gamma((3 - power) / 2) * special.rgamma(power / 2)
    assert epstein(3, power) == pytest.approx(mirror * epstein(3, 3 - power) if power else -1, rel=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(("ndim", "reach"), [(1, 4000), (2, 150), (3, 40)])
@pytest.mark.parametrize("tempering", [0.0, 0.3])
def test_sum_and_second_moment_of_the_weights(ndim: int, reach: int, tempering: float) -> None:
    lattice = Lattice(ndim, 0.6, math.inf, tempering, 1.0)
    table = lattice.table((reach,) * ndim)
    area = 2 * math.pi ** (ndim / 2) / math.gamma(ndim / 2)

    def beyond(power: float) -> float:  # the box has the volume of a ball; its corners differ by the order of the tail
        ball = (2 * reach - 1) * (math.gamma(ndim / 2 + 1) / math.pi ** (ndim / 2)) ** (1 / ndim)
        tail, _ = integrate.quad(lambda r: r ** (power - 2.2) * math.exp(-tempering * r), ball, math.inf, limit=500)
        return area * tail

    assert table.min() >= 0
    assert table.sum() + beyond(0) == pytest.approx(lattice.total, rel=beyond(0) / 5 / lattice.total + 1e-7)
    if tempering:
        offsets = np.arange(1.0 - reach, reach) ** 2
        moment = float(table.sum(axis=tuple(range(1, ndim))) @ offsets)
        exact = area / ndim * math.gamma(0.8) * tempering**-0.8
        assert moment == pytest.approx(exact, rel=1e-9 if ndim < 3 else 1e-3)  # beyond the box


@pytest.mark.slow
@pytest.mark.parametrize("ndim", [1, 2, 3])
@pytest.mark.parametrize("horizon", [1.01, 1.4, 2.0, 3.3, 9.7])
def test_weights_within_a_horizon(ndim: int, horizon: float) -> None:
    for s in (0.05, 0.5, 0.95):
        lattice = Lattice(ndim, s, horizon, 0.0, 1.0)
        n = math.ceil(horizon) + 1
        table = lattice.table((n + 3,) * ndim)
        assert table.min() >= 0
        assert table.sum() == pytest.approx(lattice.total, rel=1e-13)
        area = 2 * math.pi ** (ndim / 2) / math.gamma(ndim / 2)
        exact = area / ndim * horizon ** (2 - 2 * s) / (2 - 2 * s)
        offsets = np.arange(-n - 2.0, n + 3) ** 2
        assert table.sum(axis=tuple(range(1, ndim))) @ offsets == pytest.approx(exact, rel=1e-12)


@pytest.mark.parametrize("ndim", [2, 3])
def test_layers_across_an_axis_are_sums_of_weights(ndim: int) -> None:
    """By Poisson summation, against plain sums over a layer and an integral beyond."""
    s, reach = 0.8, {2: 3000, 3: 150}[ndim]
    table = Lattice(ndim, s, math.inf, 0.0, normalization(ndim, s)).table((4, *(reach,) * (ndim - 1)))
    ball = (2 * reach - 1) * (math.gamma((ndim + 1) / 2) / math.pi ** ((ndim - 1) / 2)) ** (1 / (ndim - 1))
    area = 2 * math.pi ** ((ndim - 1) / 2) / math.gamma((ndim - 1) / 2)
    beyond = normalization(ndim, s) * area * ball ** (-1 - 2 * s) / (1 + 2 * s)
    plain = table.sum(axis=tuple(range(1, ndim)))[4:] + beyond
    # A box for a ball, and the layers within them: relative to the tail.
    assert halfspace._line_weights(ndim, s)[:3] == pytest.approx(plain, abs=0.2 * beyond)


@pytest.mark.parametrize("s", [0.25, 0.75])
def test_straight_edges_are_slanted_ones(s: float) -> None:
    """Where both formulas hold; farther than the window, lines of nodes along the edge are left out by one of them."""
    d = np.array([0.5, 1.5])
    slanted = halfspace.slanted(s, d, np.array([[1.0, 0.0], [0.0, -1.0]]))
    assert slanted == pytest.approx(halfspace.along_axis(2, s, d), abs=2e-4)


def test_hats_at_the_horizon_are_integrals() -> None:
    table = Lattice(2, 0.3, 4.4, 0.0, 1.0).table((8, 8))
    line = (np.arange(1000) + 0.5) / 500 - 1
    x, y = np.meshgrid(line, line, indexing="ij")
    hat = (1 - abs(x)) * (1 - abs(y)) / 500**2
    for i, j in ((4, 2), (3, 3), (5, 0), (4, 4)):
        covered = float(np.sum(hat * (np.hypot(x + i, y + j) < 4.4)))
        assert table[7 + i, 7 - j] == pytest.approx(
            covered * (i * i + j * j) ** -1.3, rel=1e-3, abs=1e-7
        )  # points cut by the edge


@pytest.mark.slow
@pytest.mark.parametrize("s", ORDERS)
@pytest.mark.parametrize("ndim", [1, 2])
def test_symbol_on_a_torus(s: float, ndim: int) -> None:
    """The multiplier is |k|^2s to the order 4 - 2s, for all waves of a small grid and of a fine one."""
    errors = []
    for n in (32, 64):
        a = FractionalLaplacian(Grid((n,) * ndim, 2 * math.pi / n, "periodic"), s)
        x = a.domain.nodes
        u = np.cos(2 * x[:, 0] + (x[:, 1] if ndim == 2 else 0)).reshape(a.domain.shape)
        errors.append(error(a.apply(u), (4 + (ndim == 2)) ** s * u))
        f = (4 + (ndim == 2)) ** s * u
        found = a.solve(f + 1e-7).u  # what is left of a mean, which A u has not
        assert error(a.apply(found), f) < 1e-11
        assert abs(found.mean()) < 1e-14
    assert math.log2(errors[0] / errors[1]) == pytest.approx(4 - 2 * s, abs=0.1)


def test_images_on_a_torus_are_summed_up() -> None:
    """The symbol of an endless kernel, whose images are counted one by one, and of one that ends."""
    n, s = 6, 0.4
    lattice = Lattice(1, s, math.inf, 0.0, 1.0)
    reach = 200_000
    w = np.zeros(n)
    np.add.at(w, np.arange(1, reach) % n, lattice.table((reach,))[reach:])
    matrix = w + w[-np.arange(n) % n]
    beyond = 2 * reach ** (-2 * s) / (2 * s) / n  # spread over the nodes
    assert lattice.symbol((n,)) == pytest.approx(np.fft.rfft(matrix + beyond).real, abs=1e-5 * lattice.total)
    a = FractionalLaplacian(Grid(12, 0.25, "periodic"), s, horizon=5.2)  # the box is 3 long
    b = FractionalLaplacian(Grid(600, 0.25, "isolated"), s, horizon=5.2, corrected=False)
    u = np.random.default_rng(0).normal(size=12)
    assert a.apply(u) == pytest.approx(b.apply(np.tile(u, 50))[300:312], rel=1e-11)


@pytest.mark.parametrize("shape", [(40,), (7, 9)])
@pytest.mark.parametrize("s", [0.3, 0.8])
def test_operator_against_a_plain_double_sum(shape: tuple[int, ...], s: float) -> None:
    rng = np.random.default_rng(1)
    grid = Grid(shape, 0.3, "isolated")
    for inside in (None, rng.random(shape) < 0.6):
        a = FractionalLaplacian(grid, s, inside=inside, corrected=False)
        nodes = a.domain.nodes
        matrix = plain_matrix(nodes, 0.3, s)
        u = rng.normal(size=(*a.domain.shape, 2))
        flat = matrix @ u.reshape(-1, 2)
        assert a.apply(u).reshape(-1, 2) == pytest.approx(flat, abs=1e-12 * np.abs(matrix).sum(axis=1).max())
        assert a.killing.ravel() == pytest.approx(matrix.sum(axis=1), rel=1e-9)
        gradient = a.functional().gradient(u[..., 0])  # the same from averages and degrees
        assert gradient == pytest.approx(a.apply(u)[..., 0], abs=1e-11 * float(np.abs(flat).max()))
        found = a.solve(u)
        assert found.success
        assert found.u.reshape(-1, 2) == pytest.approx(np.linalg.solve(matrix, u.reshape(-1, 2)), rel=1e-8, abs=1e-10)
        assert a.functional(rhs=u[..., 0]).minimizer().u == pytest.approx(found.u[..., 0], rel=1e-7, abs=1e-9)


# ---- solving


@pytest.mark.slow
@pytest.mark.parametrize("s", [0.25, 0.75, 0.9])
@pytest.mark.sampled(1)
def test_iterations_hardly_grow(s: float) -> None:
    lines = {n: interval(n, s)[0].solve(1.0, rtol=1e-6).iterations for n in (1000, 30_000)}
    assert lines[30_000] <= lines[1000] + 2 <= 7
    planes = {n: disc(n, s)[0].solve(1.0, rtol=1e-8).iterations for n in (36, 200)}
    assert planes[200] <= planes[36] + 2 <= 8


def test_preconditioner_is_self_adjoint_and_does_without_its_strip(monkeypatch: pytest.MonkeyPatch) -> None:
    a, _ = disc(20, 0.7)
    rng = np.random.default_rng(0)
    v, w = rng.normal(size=(2, a.domain.size))
    whole = Capacitance(a._region, a._lattice, a._extra)
    assert v @ whole(w) == pytest.approx(w @ whole(v), rel=1e-9)
    assert v @ whole(v) > 0
    monkeypatch.setattr(capacitance, "LARGEST", 3)
    without = Capacitance(a._region, a._lattice, a._extra)
    assert whole.size > without.size == 0
    assert without(v) == pytest.approx(without(v.reshape(-1, 1)).ravel())
    assert a.solve(1.0).success


def test_what_would_take_too_long_is_left_out() -> None:
    """In three dimensions the strip is most of the nodes."""
    found = FractionalLaplacian(Grid((12, 13, 14), 0.1, "isolated"), 0.7).solve(1.0)
    assert found.success
    assert found.message.endswith("of 0 nodes")


def test_what_rounding_allows_is_a_success() -> None:
    """The sum of weights is 10^7 times the smallest eigenvalue, so 1e-10 is out of reach."""
    found = interval(10_000, 0.9)[0].solve(1.0)
    assert found.success
    assert 1e-10 < found.residual < 1e-6
    assert found.iterations < 10
    assert not interval(10_000, 0.9)[0].solve(1.0, rtol=1e-14, maxiter=20).success


def test_heat_flow_decays_at_the_first_eigenvalue() -> None:
    """du/dt = -A u by the integrators that there are."""
    a, x = interval(150, 0.6)
    functional = a.functional()
    assert isinstance(functional, E)
    flow = GradientFlow(functional, "l2")
    found = solve(flow, (1 - x * x), t_eval=[4.0, 5.0], integrator=Exponential())
    rate = math.log(np.linalg.norm(found.u[0]) / np.linalg.norm(found.u[1]))
    assert rate == pytest.approx(np.linalg.eigvalsh(a.apply(np.eye(150)))[0], rel=1e-6)
    # With a source it ends at the solution.
    ended = solve(GradientFlow(a.functional(rhs=1.0), "l2"), 0 * x, t=40.0, integrator=Exponential())
    assert ended.u[-1] == pytest.approx(a.solve(1.0).u, rel=1e-8)


def test_chain_is_a_flight() -> None:
    a, _ = interval(30, 0.5)
    chain = MarkovChain(a.affinity)
    matrix = plain_matrix(a.domain.nodes, 2 / 30, 0.5)
    weights = np.diag(np.diag(matrix)) - matrix
    assert chain.matrix() == pytest.approx(weights / weights.sum(axis=1, keepdims=True), abs=1e-12)
    law = np.full(30, 1 / 30)
    assert a.affinity.push(law) == pytest.approx(law @ chain.matrix(), abs=1e-14)


def test_single_precision_and_channels() -> None:
    a, x = disc(20, 0.5)
    u = np.random.default_rng(0).normal(size=(a.domain.size, 3)).astype(np.float32)
    image = a.apply(u)
    assert image.dtype == np.float32
    assert image == pytest.approx(a.apply(u.astype(float)), abs=1e-4 * float(np.abs(image).max()))
    found = a.solve(u)
    assert found.u.dtype == np.float32
    assert found.success
    assert found.u == pytest.approx(a.solve(u.astype(float)).u, abs=1e-3)
    picture = a.on_grid(x, outside=-1.0)
    assert picture.shape == (20, 20)
    assert picture[0, 0] == -1
    assert picture.max() < 1


# ---- what is refused

LINE = Grid(8, 0.5, "isolated")
PLANE = Grid((8, 8), 0.25, "isolated")
RADII = np.linalg.norm(PLANE.nodes - 1, axis=1).reshape(8, 8)


@pytest.mark.parametrize(
    ("grid", "options", "message"),
    [
        ("line", {}, "grid: got str"),
        (Grid(8), {}, "reflect"),
        (Grid((2,) * 4, boundary="isolated"), {}, "at most 3"),
        (Grid((4, 4), (1.0, 2.0), "isolated"), {}, "spacing"),
        (Grid(1, boundary="isolated"), {}, "one node"),
        (LINE, {"s": 0.0}, "s: got 0"),
        (LINE, {"s": 1.0}, "s: got 1"),
        (LINE, {"s": math.nan}, "s: got nan"),
        (LINE, {"horizon": 0.5}, "horizon: got 0.5"),
        (LINE, {"inside": np.ones(8, int)}, "inside: got integers"),
        (LINE, {"tempering": -1.0}, "tempering"),
        (LINE, {"tempering": 2.5}, "finer grid"),
        (LINE, {"scaling": "none"}, "scaling"),
        (LINE, {"scaling": "local"}, "without a horizon"),
        (LINE, {"corrected": 1}, "corrected: got 1"),
        (Grid(8, 1.0, "periodic"), {"corrected": True}, "no edge"),
        (Grid(8, 1.0, "periodic"), {"inside": np.ones(8, bool)}, "periodic"),
        (LINE, {"inside": np.zeros(8, bool)}, r"got 0 node\(s\)"),
        (LINE, {"inside": np.arange(8) == 3}, r"got 1 node\(s\)"),
        (LINE, {"inside": np.full(8, np.nan)}, "NaN"),
        (LINE, {"inside": np.ones(7, bool)}, "shape"),
        (LINE, {"inside": np.ones(8, bool), "corrected": True}, "distance"),
        (LINE, {"inside": np.arange(8) % 5 == 0, "horizon": 0.9}, "sees no other"),
        (Grid((3, 3, 3), 1.0, "isolated"), {"inside": np.ones((3, 3, 3))}, "three dimensions"),
        (PLANE, {"inside": 5 * (1 - RADII)}, "expected a grid that holds"),
        (PLANE, {"inside": 0.3 * (0.9 - RADII)}, "expected 1"),
    ],
)
def test_what_is_no_operator(grid: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        FractionalLaplacian(grid, options.pop("s", 0.5), **options)


def test_what_cannot_be_solved() -> None:
    a = FractionalLaplacian(LINE, 0.5)
    for bad in (np.full(8, np.nan), np.zeros(7), "one", np.zeros((8, 2, 2))):
        with pytest.raises(InputError, match="rhs"):
            a.solve(bad)
    with pytest.raises(InputError, match="exterior"):
        a.solve(1.0, math.inf)
    with pytest.raises(NumericalError, match=r"^exterior: so large"):
        a.solve(1.0, 1e308)
    with pytest.raises(InputError, match="all nodes of the grid are inside"):
        a.solve(1.0, np.zeros(8))
    with pytest.raises(InputError, match="rtol"):
        a.solve(1.0, rtol=-1)
    torus = FractionalLaplacian(Grid(8, 0.5, "periodic"), 0.5)
    with pytest.raises(InputError, match="its mean"):
        torus.solve(1.0)
    with pytest.raises(InputError, match="no outside"):
        torus.apply(np.zeros(8), np.zeros(8))
    with pytest.raises(InputError, match=r"exterior: got 3\.0 on a periodic grid"):
        torus.solve(np.zeros(8), 3.0)
    assert type(torus.functional()) is J
    short = FractionalLaplacian(LINE, 0.5, horizon=0.8)
    with pytest.raises(InputError, match="do not see the exterior"):
        short.functional(rhs=1.0)
    assert short.functional(2.0).gradient(np.full(8, 2.0)) == pytest.approx(np.zeros(8), abs=1e-12)
    masked = FractionalLaplacian(PLANE, 0.5, inside=RADII < 1)
    with pytest.raises(InputError, match="exterior: got shape"):
        masked.apply(np.zeros(masked.domain.size), np.zeros(3))
    with pytest.raises(MemoryLimitError):
        FractionalLaplacian(PLANE, 0.5, memory_limit=10)
    with pytest.raises(MemoryLimitError, match="images"):
        FractionalLaplacian(Grid((8, 8), 0.25, "periodic"), 0.5, horizon=1e6)
