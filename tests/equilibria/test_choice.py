"""Choice of fidelities and widths: against criteria written out with hat matrices, and what it refuses."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.optimize import brentq, minimize_scalar

import nlflow as nl
from nlflow.equilibria import choose_fidelity, choose_parameter
from nlflow.errors import InputError, NumericalError

Floats = NDArray[np.float64]
SIGMA = 0.45
GRID = np.geomspace(1e-3, 1e2, 41)


class Problem:
    """Weighted nodes with a noisy signal of two channels, and all criteria written out."""

    def __init__(self, measure: str, seed: int = 0, n: int = 70) -> None:
        rng = np.random.default_rng(seed)
        self.x, self.w, self.measure = np.sort(rng.random((n, 1)), axis=0), rng.uniform(0.5, 2, n) / n, measure
        self.clean = np.column_stack([np.sin(3 * self.x[:, 0]), self.x[:, 0] ** 2])
        self.f = self.clean + rng.normal(0, 0.5, (n, 2))
        self.k = self.kernel(0.04)
        self.energy = self.energy_of(self.k)

    def kernel(self, width: float) -> Floats:
        return np.asarray(20 * np.exp(-((self.x - self.x.T) ** 2) / (2 * width**2)))

    def energy_of(self, k: Floats, fidelity: float = 1.0) -> nl.E:
        return nl.E(nl.from_matrix(k, nl.Points(self.x, weights=self.w)), self.f, fidelity, measure=self.measure)

    def pieces(self, k: Floats, fidelity: float) -> tuple[Floats, Floats, Floats]:
        """Return the matrix of J, the measure, and the hat matrix S."""
        laplacian = -self.w[:, None] * (k + k.T) * self.w
        np.fill_diagonal(laplacian, 0.0)
        np.fill_diagonal(laplacian, -laplacian.sum(axis=1))
        degree = (k + k.T) @ self.w
        m = self.w if self.measure == "l2" else self.w * degree
        return laplacian, m, np.linalg.solve(laplacian + np.diag(fidelity * m), np.diag(fidelity * m))

    def residual(self, fidelity: float) -> float:
        _, m, hat = self.pieces(self.k, fidelity)
        return float(m @ ((self.f - hat @ self.f) ** 2).mean(axis=1) / m.sum())

    def criterion(self, method: str, fidelity: float, sigma: float, k: Floats | None = None) -> float:
        laplacian, m, hat = self.pieces(self.k if k is None else k, fidelity)
        n = len(m)
        rest = self.f - hat @ self.f
        mean_square = float(m @ (rest**2).mean(axis=1) / m.sum())
        if method == "rgcv":
            robust = 0.3 + 0.7 * float(np.sum(hat * hat.T)) / n
            return robust * mean_square / (1 - np.trace(hat) / n) ** 2
        if method == "gcv":
            return mean_square / (1 - np.trace(hat) / n) ** 2
        if method == "sure":
            return mean_square - sigma**2 + 2 * sigma**2 * np.trace(hat) / n
        if method == "discrepancy":
            return abs(math.sqrt(mean_square) - sigma)
        # The density of contrasts, whose covariance is that of the prior and the noise; beta is the likeliest.
        contrasts = np.linalg.svd(np.ones((1, n)))[2][1:].T
        prior = np.linalg.inv(contrasts.T @ laplacian @ contrasts)
        covariance = prior + contrasts.T @ np.diag(1 / (fidelity * m)) @ contrasts
        y = contrasts.T @ self.f
        form, free = float(np.sum(y * np.linalg.solve(covariance, y))), y.size
        logs = 2 * float(np.linalg.slogdet(covariance)[1])
        return 0.5 * (free * math.log(2 * math.pi * form / free) + logs + free)


@pytest.mark.numerical
@pytest.mark.parametrize("measure", ["l2", "degree"])
@pytest.mark.parametrize("method", ["rgcv", "gcv", "sure", "discrepancy", "evidence"])
def test_against_hat_matrices(method: str, measure: str) -> None:
    problem = Problem(measure)
    found = choose_fidelity(
        problem.energy, GRID, method=method, sigma=SIGMA if method in ("sure", "discrepancy") else None
    )
    expected = np.array([problem.criterion(method, one, SIGMA) for one in GRID])
    assert found.curve == pytest.approx(expected, rel=1e-8, abs=1e-9)
    traces = [np.trace(problem.pieces(problem.k, one)[2]) for one in GRID]
    assert found.trace == pytest.approx(np.array(traces), rel=1e-9)
    assert found.residual**2 == pytest.approx(np.array([problem.residual(one) for one in GRID]), rel=1e-8)
    assert found.success
    assert (found.trace_error == 0).all()
    assert found.traces == "dense"
    if method == "discrepancy":
        best = brentq(lambda x: math.sqrt(problem.residual(math.exp(x))) - SIGMA, *np.log(GRID[[0, -1]]))
    else:
        ends = np.log(GRID[[int(np.argmin(expected)) - 1, int(np.argmin(expected)) + 1]])
        best = minimize_scalar(
            lambda x: problem.criterion(method, math.exp(x), SIGMA), bounds=ends, method="bounded",
            options={"xatol": 1e-7},
        ).x  # fmt: skip
    assert math.log(found.value) == pytest.approx(best, abs=1e-3)
    assert found.energy.fidelity == found.value


@pytest.mark.numerical
@pytest.mark.parametrize("measure", ["l2", "degree"])
@pytest.mark.parametrize("missing", [0, 25])
def test_a_fidelity_for_each_node(measure: str, missing: int) -> None:
    """Against hat matrices of all nodes: residuals, traces and the density of contrasts of the observed ones."""
    problem = Problem(measure)
    rng = np.random.default_rng(3)
    strength = rng.uniform(0.5, 2, 70)
    strength[rng.permutation(70)[:missing]] = 0
    seen = strength > 0
    laplacian, m, _ = problem.pieces(problem.k, 1.0)
    weight = m * strength
    points = nl.Points(problem.x, weights=problem.w)
    hidden = np.where(seen[:, None], problem.f, 0.0)
    energy = nl.E(nl.from_matrix(problem.k, points), hidden, strength, measure=measure)
    n, contrasts = int(seen.sum()), np.linalg.svd(np.ones((1, int(seen.sum()))))[2][1:].T
    expected: dict[str, list[float]] = {"gcv": [], "sure": [], "evidence": []}
    traces = []
    for one in GRID:
        hat = np.linalg.solve(laplacian + np.diag(one * weight), np.diag(one * weight))
        rest = (problem.f - hat @ hidden)[seen]
        mean_square = float(weight[seen] @ (rest**2).mean(axis=1) / weight.sum())
        share = np.trace(hat) / n
        expected["gcv"].append(mean_square / (1 - share) ** 2)
        expected["sure"].append(mean_square - SIGMA**2 + 2 * SIGMA**2 * share)
        # Contrasts of observed nodes are contrasts of all nodes, of which the prior has the covariance L^+.
        prior = np.linalg.pinv(laplacian, rcond=1e-13, hermitian=True)[np.ix_(seen, seen)]
        covariance = contrasts.T @ (prior + np.diag(1 / (one * weight[seen]))) @ contrasts
        y = contrasts.T @ problem.f[seen]
        form, free = float(np.sum(y * np.linalg.solve(covariance, y))), y.size
        logs = 2 * float(np.linalg.slogdet(covariance)[1])
        expected["evidence"].append(0.5 * (free * math.log(2 * math.pi * form / free) + logs + free))
        traces.append(np.trace(hat))
    for method, curve in expected.items():
        found = choose_fidelity(energy, GRID, method=method, sigma=SIGMA if method == "sure" else None)
        assert found.curve == pytest.approx(np.array(curve), rel=1e-7, abs=1e-9)
        assert found.trace == pytest.approx(np.array(traces), rel=1e-8)
        assert found.energy.fidelity == pytest.approx(found.value * strength)
    widths = [0.03, 0.04, 0.05]
    found = choose_parameter(lambda h: energy.with_affinity(nl.from_matrix(problem.kernel(h), points)), widths)
    assert found.curve[1] == pytest.approx(expected["evidence"][int(np.argmin(np.abs(GRID - 1)))], rel=1e-7)


@pytest.mark.numerical
@pytest.mark.parametrize("boundary", ["periodic", "reflect"])
def test_transforms_agree_with_all_eigenvalues(boundary: Any) -> None:
    rng = np.random.default_rng(1)
    weights = nl.affinity(nl.Gaussian(1.5), nl.Grid((13, 12), boundary=boundary), method="convolution")
    energy = nl.E(weights, rng.standard_normal((13, 12, 2)), 1.0)
    for method in ("gcv", "sure", "evidence", "lcurve"):
        options: dict[str, Any] = {"method": method, "sigma": 0.7}
        one, other = (choose_fidelity(energy, GRID, traces=traces, **options) for traces in ("transform", "dense"))
        assert one.curve == pytest.approx(other.curve, rel=1e-8, abs=1e-10)
        assert choose_fidelity(energy, GRID, **options).traces == "transform"


@pytest.mark.numerical
def test_the_corner_of_the_l_curve() -> None:
    """The curvature is that of finite differences along log residual and log roughness."""
    problem = Problem("l2")
    fine = np.geomspace(1e-2, 1e2, 2001)
    found = choose_fidelity(problem.energy, fine, method="lcurve")
    x, y = 2 * np.log(found.residual), np.log(found.roughness)
    h = math.log(fine[1] / fine[0])
    dx, dy = np.gradient(x, h), np.gradient(y, h)
    ddx, ddy = np.gradient(dx, h), np.gradient(dy, h)
    curvature = (dx * ddy - dy * ddx) / (dx**2 + dy**2) ** 1.5
    assert -found.curve[5:-5] == pytest.approx(curvature[5:-5], rel=1e-3, abs=1e-3)
    assert found.success


@pytest.mark.numerical
def test_lanczos_iteration_is_within_its_interval() -> None:
    rng = np.random.default_rng(2)
    grid = nl.Grid((60, 60), boundary="periodic")
    weights = nl.affinity(nl.Gaussian(2.0), grid, method="convolution")
    f = np.sin(grid.nodes[:, 0] / 8).reshape(60, 60) + rng.normal(0, 0.3, (60, 60))
    fidelities = 50.0 * np.geomspace(1e-3, 1e-1, 15)
    for method in ("gcv", "rgcv", "sure"):
        exact = choose_fidelity(nl.E(weights, f, 1.0), fidelities, method=method, sigma=0.3)
        found = choose_fidelity(nl.E(weights, f, 1.0), fidelities, method=method, sigma=0.3, traces="lanczos", rng=3)
        assert found.traces == "lanczos"
        assert found.averages <= 100
        assert (np.abs(found.trace - exact.trace) <= 1.5 * found.trace_error).all()
        assert found.residual == pytest.approx(exact.residual, rel=1e-6)
        assert found.value == pytest.approx(exact.value, rel=0.2)
        assert (found.trace_error[1:] > 0).all()


def test_an_end_of_the_range_is_no_success() -> None:
    problem = Problem("l2")
    best = choose_fidelity(problem.energy, GRID).value
    assert best == choose_fidelity(problem.energy, GRID, method="rgcv").value
    for values, word in ((GRID[best * 2 < GRID], "first"), (GRID[best / 2 > GRID], "last")):
        found = choose_fidelity(problem.energy, values)
        assert not found.success
        assert f"the {word} of the values" in found.message
    smooth = choose_fidelity(problem.energy, GRID, method="discrepancy", sigma=100.0)
    rough = choose_fidelity(problem.energy, GRID, method="discrepancy", sigma=1e-9)
    assert not smooth.success
    assert smooth.value == GRID[0]
    assert not rough.success
    assert rough.value == GRID[-1]


@pytest.mark.numerical
def test_widths_by_the_evidence() -> None:
    problem = Problem("degree")
    widths = np.array([0.02, 0.04, 0.08, 0.16, 0.32])
    for method in ("evidence", "gcv"):
        found = choose_parameter(lambda width: problem.energy_of(problem.kernel(width), 2.0), widths, method=method)
        expected = [problem.criterion(method, 2.0, SIGMA, problem.kernel(width)) for width in widths]
        assert found.curve == pytest.approx(np.array(expected), rel=1e-7)
        assert found.value == widths[int(np.argmin(expected))]
        assert found.success == (0 < int(np.argmin(expected)) < 4)


def test_what_is_refused() -> None:
    problem = Problem("l2", n=12)
    energy = problem.energy
    points = nl.Points(problem.x, weights=problem.w)
    nodes = nl.E(nl.from_matrix(problem.k, points), problem.f, np.linspace(0.1, 1, 12))
    refused: list[tuple[Any, dict[str, Any], str]] = [
        (nl.J(energy.given), {}, "got J, whose field is improper"),
        (nl.GradientFlow(energy), {}, "got GradientFlow, expected E"),
        (nodes, {"traces": "lanczos"}, "expected 'auto' with a fidelity for each node"),
        (energy.with_observed(0 * problem.f + 3.0), {}, "a constant observed signal"),
        (energy, {"method": "sure"}, "sigma: needed for method='sure'"),
        (energy, {"method": "discrepancy"}, "sigma: needed"),
        (energy, {"method": "sure", "sigma": -1}, "sigma: got -1"),
        (energy, {"method": "aic"}, "method: got 'aic'"),
        (energy, {"values": [1.0, 0.5, 2.0]}, r"got \[1.0, 0.5, 2.0\], expected at least 3 increasing fidelities > 0"),
        (energy, {"values": [0.0, 0.5, 2.0]}, r"got \[0.0, 0.5, 2.0\], expected at least 3 increasing fidelities > 0"),
        (energy, {"traces": "transform"}, "method: got 'transform'"),
        (energy, {"traces": "fft"}, "traces: got 'fft', expected one of"),
        (energy, {"traces": "lanczos", "rng": "seed"}, "rng: got 'seed'"),
    ]
    for given, options, message in refused:
        with pytest.raises(InputError, match=message):
            choose_fidelity(given, **options)
    with pytest.raises(NumericalError, match=r"values: 1e\+308 is so large that nothing is smoothed"):
        choose_fidelity(energy, [0.5, 1.0, 1e308])
    with pytest.raises(InputError, match="it compares fidelities alone"):
        choose_parameter(problem.energy_of, [1.0, 2.0, 3.0], method="lcurve")
    with pytest.raises(InputError, match="build: it returned E with other observed signals"):
        choose_parameter(lambda s: nl.E(energy.given, s * problem.f, 1.0), [1.0, 2.0, 3.0])
    apart = np.kron(np.eye(2), np.ones((6, 6)))
    with pytest.raises(NumericalError, match="falls into parts"):
        choose_fidelity(problem.energy_of(apart), method="evidence")


def test_random_traces_that_say_too_little_are_no_success() -> None:
    """Of 60 nodes two random signals say little, and the interval of the trace knows it."""
    problem = Problem("l2", n=60)
    exact = choose_fidelity(problem.energy, GRID)
    drawn = choose_fidelity(problem.energy, GRID, traces="lanczos", samples=2, rng=0)
    assert exact.success
    assert not drawn.success
    assert "raise samples" in drawn.message


def test_tensors() -> None:
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    x = rng.random((40, 2))
    f = np.sin(3 * x[:, 0]) + rng.normal(0, 0.3, 40)
    tensors = nl.affinity(nl.Gaussian(0.2), nl.Points(x), torch.tensor(x))
    host = nl.affinity(nl.Gaussian(0.2), nl.Points(x), x)
    for method in ("rgcv", "evidence"):
        for fidelity in (1.0, np.linspace(0.5, 1, 40)):
            given = fidelity if isinstance(fidelity, float) else torch.tensor(fidelity)
            found = choose_fidelity(nl.E(tensors, torch.tensor(f), given), method=method)
            expected = choose_fidelity(nl.E(host, f, fidelity), method=method)
            assert found.value == pytest.approx(expected.value, rel=1e-6)
            assert isinstance(found.energy.minimizer().u, torch.Tensor)


def test_figure() -> None:
    axis = pytest.importorskip("matplotlib.figure").Figure().add_subplot()
    found = choose_fidelity(Problem("l2", n=20).energy)
    found.plot(axis)
    assert axis.lines[0].get_ydata() == pytest.approx(found.curve)
    assert found.method in axis.get_title()


@pytest.mark.parametrize("fidelity", [1.0, np.arange(1.0, 10.0)])
@pytest.mark.parametrize("method", ["gcv", "rgcv", "evidence", "lcurve"])
def test_nodes_of_which_none_sees_another_are_refused(method: str, fidelity: Any) -> None:
    alone = nl.affinity(nl.TopHat(0.8), nl.Grid(9, boundary="isolated"))
    with pytest.raises(nl.NlflowError, match=r"none sees another|falls into parts"):
        nl.choose_fidelity(nl.E(alone, np.arange(9.0) ** 2, fidelity), method=method)
