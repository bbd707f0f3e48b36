"""The Gaussian field of E: against dense matrices, and what it refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scipy.stats import chi2

import nlflow as nl
from nlflow.equilibria import GaussianField, trace_of
from nlflow.equilibria.sums import spectral_sums
from nlflow.errors import InputError, MemoryLimitError, NumericalError
from nlflow.flows.functions import symmetric_flow
from nlflow.flows.spectrum import largest_eigenvalue

BETA = 1.7


class Problem:
    """A field of weighted nodes, with its precision written out."""

    def __init__(self, measure: str, fidelity: Any, n: int = 60, width: float = 0.15, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        x, w = rng.random((n, 2)), rng.uniform(0.5, 2, n) / n
        self.k = 3 * np.exp(-((x[:, None] - x) ** 2).sum(axis=2) / (2 * width**2))
        self.f = rng.standard_normal((n, 2))
        strength = {"number": 0.3, "nodes": rng.uniform(0.2, 1, n), "some": rng.integers(0, 2, n) * 1.0}.get(
            str(fidelity), fidelity
        )
        self.energy = nl.E(nl.from_matrix(self.k, nl.Points(x, weights=w)), self.f, strength, measure=measure)
        self.field = GaussianField(self.energy, beta=BETA)
        both = (self.k + self.k.T) * w
        degree = both.sum(axis=1)
        self.prior = BETA * w[:, None] * (np.diag(degree) - both)
        self.noise = BETA * (w if measure == "l2" else w * degree) * strength
        self.precision = self.prior + np.diag(self.noise)
        self.covariance = np.linalg.inv(self.precision)


CASES = [(measure, fidelity) for measure in ("l2", "degree") for fidelity in ("number", "nodes", "some")]


@pytest.mark.numerical
@pytest.mark.parametrize(("measure", "fidelity"), CASES)
def test_variances_and_determinant(measure: str, fidelity: str) -> None:
    problem = Problem(measure, fidelity)
    found = problem.field.variance()
    assert found.method == "dense"
    assert found.exact
    assert found.value == pytest.approx(np.diag(problem.covariance), rel=1e-12)
    assert (found.lower <= found.value).all()
    assert (found.value <= found.upper).all()
    exact = float(np.linalg.slogdet(problem.precision)[1])
    assert problem.field.log_determinant().value == pytest.approx(exact, rel=1e-12)
    estimated = problem.field.log_determinant(method="lanczos", rng=1)
    assert 0 < abs(estimated.value - exact) < 2 * estimated.error
    assert estimated.error < 8


@pytest.mark.numerical
@pytest.mark.parametrize(("measure", "fidelity"), CASES)
@pytest.mark.parametrize("method", ["root", "perturbed"])
@pytest.mark.slow
def test_samples_have_the_covariance(measure: str, fidelity: str, method: str) -> None:
    """Whitened samples have forms of a chi-squared law, and each entry of their covariance is within its spread."""
    problem = Problem(measure, fidelity)
    if method == "perturbed" and fidelity == "some":
        with pytest.raises(InputError, match="a fidelity > 0 at all nodes"):
            problem.field.sample(method=method)
        return
    count = 600
    samples = problem.field.sample(count, rng=2, method=method)
    assert samples.shape == (count, 60, 2)
    centred = np.concatenate([samples[..., 0] - problem.field.mean[:, 0], samples[..., 1] - problem.field.mean[:, 1]])
    forms = np.einsum("si,ij,sj->s", centred, problem.precision, centred)
    low, high = chi2.ppf([1e-4, 1 - 1e-4], 60 * len(forms))
    assert low < forms.sum() < high
    empirical = centred.T @ centred / len(centred)
    spread = np.sqrt((problem.covariance**2 + np.outer(*2 * [np.diag(problem.covariance)])) / len(centred))
    assert np.abs((empirical - problem.covariance) / spread).max() < 5


def test_samples_of_a_seed_are_the_same() -> None:
    field = Problem("l2", "number").field
    assert np.array_equal(field.sample(3, rng=5), field.sample(3, rng=5))
    assert not np.array_equal(field.sample(3, rng=5), field.sample(3, rng=6))
    assert np.array_equal(field.sample(2, rng=np.random.default_rng(5)), field.sample(2, rng=5))


@pytest.mark.parametrize("method", ["root", "perturbed"])
def test_samples_have_the_type_of_the_observed_signal(method: str) -> None:
    rng = np.random.default_rng(1)
    k, f = nl.affinity(nl.Gaussian(0.3), nl.Points(rng.random((40, 2)))), rng.standard_normal((40, 2))
    wide, single = (
        GaussianField(nl.E(k, f.astype(dtype), 0.3), beta=BETA).sample(2, rng=3, method=method)
        for dtype in (np.float64, np.float32)
    )
    assert (wide.dtype, single.dtype) == (np.float64, np.float32)
    np.testing.assert_allclose(single, wide, rtol=1e-4, atol=1e-3)


@pytest.mark.numerical
@pytest.mark.parametrize("measure", ["l2", "degree"])
@pytest.mark.parametrize("boundary", ["periodic", "reflect"])
def test_variances_by_transforms(boundary: Any, measure: str) -> None:
    grid = nl.Grid((9, 8), spacing=0.3, boundary=boundary)
    weights = nl.affinity(nl.Gaussian(0.5), grid, method="convolution")
    field = GaussianField(nl.E(weights, np.zeros((9, 8)), 0.05, measure=measure), beta=2.0)
    exact, whole = field.variance(), field.variance(method="dense")
    assert exact.method == "transform"
    assert exact.value == pytest.approx(whole.value, rel=1e-10)
    assert np.ptp(exact.value) > (-1 if boundary == "periodic" else 1e-3)
    assert field.log_determinant().value == pytest.approx(field.log_determinant(method="dense").value, rel=1e-12)


@pytest.mark.numerical
@pytest.mark.parametrize("fidelity", ["number", "nodes", 1e-6])
def test_intervals_of_sampled_variances_cover(fidelity: Any) -> None:
    """Of all nodes and repeats 95 % are covered; 99 % of the intervals of that share are above 93 %."""
    problem = Problem("l2", fidelity)
    covered = []
    for seed in range(15):
        found = problem.field.variance(method="samples", samples=50, rng=seed)
        exact = np.diag(problem.covariance)
        covered.append(np.mean((found.lower <= exact) & (exact <= found.upper)))
        assert found.samples == 50
    assert np.mean(covered) >= 0.93


@pytest.mark.slow
@pytest.mark.numerical
def test_variances_of_two_thousand_nodes() -> None:
    for fidelity in ("number", "nodes", 1e-4):
        problem = Problem("degree", fidelity, n=2000, width=0.05)
        exact = np.diag(problem.covariance)
        assert np.abs(problem.field.variance().value / exact - 1).max() < 1e-8


@pytest.mark.numerical
@pytest.mark.parametrize("measure", ["l2", "degree"])
@pytest.mark.parametrize("fidelity", ["number", "nodes"])
def test_evidence_is_the_density_of_contrasts(measure: str, fidelity: str) -> None:
    problem = Problem(measure, fidelity)
    contrasts = np.linalg.svd(np.ones((1, 60)))[2][1:].T
    prior = np.linalg.inv(contrasts.T @ problem.prior @ contrasts)
    covariance = prior + contrasts.T @ np.diag(1 / problem.noise) @ contrasts
    y = contrasts.T @ problem.f
    exact = -float(np.linalg.slogdet(2 * np.pi * covariance)[1]) - 0.5 * np.sum(y * np.linalg.solve(covariance, y))
    assert problem.field.log_evidence().value == pytest.approx(exact, rel=1e-12)
    estimated = problem.field.log_evidence(method="lanczos", rng=1)
    assert abs(estimated.value - exact) < 2 * estimated.error < 20


@pytest.mark.numerical
def test_bands() -> None:
    problem = Problem("degree", "number")
    pointwise = problem.field.band(0.9)
    whole = problem.field.band(0.9, simultaneous=True, samples=2000)
    sd = np.sqrt(np.diag(problem.covariance))[:, None]
    assert pointwise.factor == pytest.approx(1.6448536, rel=1e-6)
    assert pointwise.upper - pointwise.lower == pytest.approx(np.broadcast_to(2 * pointwise.factor * sd, (60, 2)))
    rng = np.random.default_rng(9)
    drawn = np.linalg.cholesky(problem.covariance) @ rng.standard_normal((60, 4000))
    inside = np.abs(drawn / sd)
    assert np.mean(inside <= pointwise.factor) == pytest.approx(0.9, abs=0.01)
    assert np.mean(inside.max(axis=0) <= whole.factor) == pytest.approx(0.9, abs=0.025)


def test_sigma_in_place_of_beta() -> None:
    grid = nl.Grid(30, spacing=0.5, boundary="reflect")
    energy = nl.E(nl.affinity(nl.Gaussian(1.0), grid), np.zeros(30), 0.4)
    field = GaussianField(energy, sigma=0.2)
    assert 1 / (field.beta * 0.5 * 0.4) == pytest.approx(0.2**2)
    with pytest.raises(InputError, match="the noise that E assumes differs between nodes"):
        GaussianField(Problem("l2", "number").energy, sigma=0.2)
    with pytest.raises(InputError, match="sigma: got beta too"):
        GaussianField(energy, sigma=0.2, beta=1.0)


@pytest.mark.numerical
def test_channels_that_are_mixed_have_traces_too() -> None:
    rng = np.random.default_rng(3)
    weights = nl.affinity(nl.Gaussian(0.2), nl.Points(rng.random((40, 2))))
    f = rng.standard_normal((40, 2))
    flow = symmetric_flow(nl.E(weights, f, np.array([[2.0, 1.0], [1.0, 3.0]]) * np.ones((40, 1, 1))))
    whole, drawn = (
        spectral_sums(flow, f, method=method, samples=8, averages=60, rng=0) for method in ("dense", "lanczos")
    )
    assert drawn.form(np.log)[0] == pytest.approx(whole.form(np.log)[0], rel=1e-10)
    assert abs(drawn.trace(np.log).value - whole.trace(np.log).value) < 2 * drawn.trace(np.log).error


@pytest.mark.numerical
@pytest.mark.parametrize(("measure", "fidelity"), CASES)
def test_traces_of_functions(measure: str, fidelity: str) -> None:
    problem = Problem(measure, fidelity)
    mass = problem.energy.affinity.measure(measure, problem.f[:, 0])
    mass = mass if measure == "l2" else mass * np.exp(problem.energy.affinity.log_total())
    values = np.linalg.eigvals(problem.precision / (BETA * mass[:, None])).real
    for g in (np.log, lambda a: np.exp(-2 * a), lambda a: 0.1 / (0.1 + a)):
        exact = float(g(values).sum())
        found = trace_of(problem.energy, g, measure)
        assert found.value == pytest.approx(exact, rel=1e-10, abs=1e-10)
        assert found.exact
        drawn = trace_of(problem.energy, g, measure, method="lanczos", rng=3)
        assert abs(drawn.value - exact) <= 2 * drawn.error + 1e-9
        assert not drawn.exact
    with pytest.raises(InputError, match=r"got -inf at 0, .*0 is the eigenvalue of constants"):
        trace_of(problem.energy.given, np.log, measure)
    with pytest.raises(InputError, match="got nan at"):
        trace_of(problem.energy, lambda a: np.sqrt(a - values.max() / 2), measure)


@pytest.mark.numerical
def test_rules_of_gauss_and_radau_enclose_forms() -> None:
    """For log and powers of a resolvent, in few steps."""
    problem = Problem("l2", "number")
    flow = symmetric_flow(nl.J(problem.energy.given))
    whole = spectral_sums(flow, problem.f, method="dense", samples=2, averages=1, rng=0)
    for steps in (2, 4, 8):
        drawn = spectral_sums(flow, problem.f, method="lanczos", samples=2, averages=steps, rng=0)
        assert drawn.averages == steps
        for g in (lambda a: np.log(a + 0.1), lambda a: 1 / (a + 0.1), lambda a: 1 / (a + 0.1) ** 2):
            value, gap = drawn.form(g)
            assert abs(value - whole.form(g)[0]) <= gap
            assert gap < abs(value)


def test_what_is_refused() -> None:
    rng = np.random.default_rng(4)
    points = nl.Points(rng.random((8, 2)))
    weights, f = nl.affinity(nl.Gaussian(0.3), points), rng.standard_normal((8, 2))
    matrices = np.array([[2.0, 1.0], [1.0, 3.0]]) * np.ones((8, 1, 1))
    refused: list[tuple[Any, str]] = [
        (nl.J(weights), "got J, whose field is improper: constants have an infinite variance"),
        (nl.E(weights, f, 0.0), "improper: constants have an infinite variance"),
        (nl.E(weights, f, matrices), "mixes channels"),
        (nl.GradientFlow(nl.E(weights, f, 1.0)), "got GradientFlow, expected E"),
        (3, "energy: got int"),
    ]
    for energy, message in refused:
        with pytest.raises(InputError, match=message):
            GaussianField(energy)
    apart = nl.affinity_from_graph(np.kron(np.eye(2), np.ones((4, 4))))
    with pytest.raises(InputError, match=r"1 connected component\(s\) of the graph have no node with a fidelity"):
        GaussianField(nl.E(apart, f, np.repeat([1.0, 0.0], 4)))
    two = GaussianField(nl.E(apart, f, 1.0))
    with pytest.raises(NumericalError, match="falls into parts"):
        two.log_evidence()
    field = GaussianField(nl.E(weights, f, np.repeat([1.0, 0.0], 4)))
    with pytest.raises(InputError, match="a fidelity of 0 at some nodes"):
        field.log_evidence()
    for call, message in (
        (lambda: field.sample(0), "count: got 0"),
        (lambda: field.sample(rng="seed"), "rng: got 'seed'"),
        (lambda: field.sample(method="gibbs"), "method: got 'gibbs'"),
        (lambda: field.variance(method="transform"), "method: got 'transform'"),
        (lambda: field.band(1.0), "level: got 1.0"),
        (lambda: GaussianField(nl.E(weights, f, 1.0), beta=0.0), "beta: got 0.0"),
    ):
        with pytest.raises(InputError, match=message):
            call()
    with pytest.raises(MemoryLimitError, match="draw fewer at a time"):
        field.sample(10**10)
    dense_parts = nl.from_matrix(np.kron(np.eye(2), np.ones((4, 4))), points)
    hidden = GaussianField(nl.E(dense_parts, f, np.repeat([1.0, 0.0], 4)))
    with pytest.raises(NumericalError, match="hardly sees a node"):
        hidden.variance()


@pytest.mark.parametrize("fidelity", [3.0, np.array([3.0, 1e3])])
def test_a_node_that_sees_itself_above_all_loses_no_digits(fidelity: Any) -> None:
    """Its affinity with itself, e^64, has no part in J: k = 2 e^8 is all there is between two nodes."""
    f, (one, two) = np.array([0.0, 1.0]), np.broadcast_to(fidelity, 2)
    weights = nl.affinity(nl.ExpDotProduct(), nl.Points([0.0, 1.0], weights=[1.0, 1.0]), np.array([[8.0], [1.0]]))
    field, k = GaussianField(nl.E(weights, f, fidelity)), 2 * np.exp(8.0)
    determinant = k * (one + two) + one * two
    assert field.variance().value == pytest.approx(np.array([k + two, k + one]) / determinant, rel=1e-9)
    assert field.log_determinant().value == pytest.approx(np.log(determinant), rel=1e-9)
    values = np.linalg.eigvalsh([[k + one, -k], [-k, k + two]])
    assert largest_eigenvalue(field.flow) == pytest.approx(values[1], rel=1e-9)


def test_tensors() -> None:
    torch = pytest.importorskip("torch")
    x = torch.tensor(np.random.default_rng(7).random((30, 2)), dtype=torch.float64)
    f = torch.zeros((30, 2), dtype=torch.float64)
    field = GaussianField(nl.E(nl.affinity(nl.Gaussian(0.3), nl.Points(x.numpy()), x), f, 0.5))
    host = GaussianField(nl.E(nl.affinity(nl.Gaussian(0.3), nl.Points(x.numpy())), f.numpy(), 0.5))
    assert field.variance().value == pytest.approx(host.variance().value, rel=1e-9)
    drawn = field.sample(2, rng=0)
    assert isinstance(drawn, torch.Tensor)
    assert drawn.numpy() == pytest.approx(host.sample(2, rng=0), rel=1e-6, abs=1e-9)
    assert field.log_evidence().value == pytest.approx(host.log_evidence().value, rel=1e-9)
    estimated = field.variance(method="samples", samples=20)
    assert estimated.value == pytest.approx(host.variance(method="samples", samples=20).value, rel=1e-6)
