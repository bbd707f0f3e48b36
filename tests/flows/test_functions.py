"""Functions of operators: against dense eigendecompositions and closed forms, their bounds, and what they refuse."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.linalg import expm, sqrtm

import nlflow as nl
from nlflow.errors import InputError, NumericalError
from nlflow.flows import AttentionFlow, FunctionOf, function_of

Floats = NDArray[np.float64]
FUNCTIONS: dict[str, Any] = {
    "exp": lambda a: np.exp(-a),
    "heat": lambda a: np.exp(-20 * a),
    "sqrt": np.sqrt,
    "Matern": lambda a: (0.3**2 + a) ** -0.75,
    "inverse root": lambda a: 1 / np.sqrt(a),
}


def operator_by_hand(k: Floats, w: Floats, metric: str, phi: Any) -> tuple[Floats, Floats]:
    """Return A and the measure from the formulas: d_i = sum_j w_j K_ij, A = r (I - P) + phi with K = 2 k."""
    both = (k + k.T) * w
    d = both.sum(axis=1)
    laplacian = np.diag(d) - both
    scale = np.ones(len(w)) if metric == "l2" else d
    return laplacian / scale[:, None] + np.diag(np.broadcast_to(phi, len(w))), w * scale


class Case:
    """A random flow of weighted nodes with its matrix, made without the package."""

    def __init__(self, seed: int) -> None:
        rng = self.rng = np.random.default_rng(seed)
        n = int(rng.integers(2, 60))
        points, self.w = rng.random((n, 2)), rng.uniform(0.3, 2, n) / n
        far = ((points[:, None] - points) ** 2).sum(axis=2)
        width = rng.uniform(0.05, 0.6)
        k = rng.uniform(0.1, 30) * np.exp(-far / (2 * width**2)) + 1e-3
        self.metric = ("l2", "degree")[seed % 2]
        self.v = rng.standard_normal((n, 2))
        phi: Any = (0.0, float(rng.uniform(0.01, 3)), rng.uniform(0.05, 2, n))[seed // 2 % 3]
        weights = nl.from_matrix(k, nl.Points(points, weights=self.w))
        energy = nl.J(weights) if np.all(phi == 0) else nl.E(weights, self.v, phi, measure=self.metric)
        self.flow = nl.GradientFlow(energy, self.metric)
        a, self.m = operator_by_hand(k, self.w, self.metric, phi)
        root = np.sqrt(self.m)
        similar = root[:, None] * a / root
        self.values, vectors = np.linalg.eigh((similar + similar.T) / 2)
        if isinstance(phi, float):
            self.values[0] = phi  # of constants, exactly
        self._to, self._from = vectors / root[:, None], vectors.T * root

    def exact(self, g: Any, v: Floats) -> Floats:
        return self._to @ (g(self.values)[:, None] * (self._from @ v))

    def norm(self, v: Floats) -> float:
        return float(np.sqrt(np.sum(self.m[:, None] * v**2)))


def check(seed: int) -> float:
    """Return the largest error over its bound of all functions and methods of one case."""
    case, worst = Case(seed), 0.0
    for name, g in FUNCTIONS.items():
        if name == "inverse root" and case.values[0] == 0:
            continue
        exact = case.exact(g, case.v)
        for method in ("dense", "chebyshev", "lanczos"):
            if method == "chebyshev" and name == "sqrt" and case.values[0] == 0:
                continue
            operator = function_of(case.flow, g, method=method)
            found = operator.evaluate(case.v)
            assert found.success, (seed, name, method)
            assert found.error < 1e-6 * operator.scale, (seed, name, method)
            worst = max(worst, case.norm(found.u - exact) / case.norm(case.v) / found.error)
    return worst


@pytest.mark.numerical
def test_random_cases_are_inside_the_bound() -> None:
    assert max(check(seed) for seed in range(6)) < 1


@pytest.mark.slow
@pytest.mark.numerical
@pytest.mark.parametrize("block", range(10))
def test_two_thousand_random_cases_are_inside_the_bound(block: int) -> None:
    """Each case has up to 14 pairs of a function and a method; 2000 of such cases."""
    assert max(check(1000 + 200 * block + i) for i in range(200)) < 1


@pytest.mark.numerical
def test_against_scipy() -> None:
    rng = np.random.default_rng(0)
    k, w = rng.random((12, 12)), rng.uniform(0.5, 2, 12)
    a, _ = operator_by_hand(k, w, "degree", 0.4)
    points = nl.Points(np.zeros((12, 1)), weights=w)
    flow = nl.GradientFlow(nl.E(nl.from_matrix(k, points), np.zeros(12), 0.4, measure="degree"), "degree")
    for method in ("dense", "chebyshev", "lanczos"):
        assert function_of(flow, lambda a: np.exp(-2 * a), method=method).matmat(np.eye(12)) == pytest.approx(
            expm(-2 * a), abs=1e-12
        )
        assert function_of(flow, np.sqrt, method=method).matmat(np.eye(12)) == pytest.approx(sqrtm(a).real, abs=1e-12)


@pytest.mark.numerical
@pytest.mark.parametrize("boundary", ["periodic", "reflect"])
@pytest.mark.parametrize("shape", [(9,), (10,), (6, 5), (4, 3, 2)])
def test_transforms_agree_with_whole_matrices(boundary: Any, shape: tuple[int, ...]) -> None:
    v = np.random.default_rng(1).standard_normal((*shape, 2))
    weights = nl.affinity(nl.Gaussian(0.8), nl.Grid(shape, boundary=boundary), method="convolution")
    for metric in ("l2", "degree"):
        pairs = ((nl.J(weights), "sqrt"), (nl.E(weights, v, 0.3, measure=metric), "inverse root"))
        for functional, name in pairs:
            by_transform = function_of(functional, FUNCTIONS[name], metric, method="transform").evaluate(v)
            whole = function_of(functional, FUNCTIONS[name], metric, method="dense")
            assert np.abs(by_transform.u - whole(v)).max() < 1e-12
            assert by_transform.error < 1e-10
            assert function_of(functional, FUNCTIONS[name], metric).method == "transform"


@pytest.mark.numerical
def test_diagonals_and_traces_of_transforms() -> None:
    for boundary in ("periodic", "reflect"):
        for shape in ((9,), (10,), (1,), (6, 5)):
            grid = nl.Grid(shape, boundary=boundary)
            operator = function_of(nl.affinity(nl.Gaussian(0.8), grid, method="convolution"), FUNCTIONS["exp"])
            matrix = operator.matmat(np.eye(grid.size))
            basis, gains = operator._basis, operator._gains
            assert basis is not None
            assert basis.diagonal(gains).ravel() == pytest.approx(np.diag(matrix), abs=1e-14)
            assert np.sum(gains * basis.multiplicities) == pytest.approx(np.trace(matrix), rel=1e-14)


@pytest.mark.numerical
def test_rounding_is_in_the_bound() -> None:
    """In float32 it is all that is left where next to nothing is left out."""
    rng = np.random.default_rng(11)
    x = rng.random((80, 2)).astype(np.float32)
    v = rng.standard_normal(80).astype(np.float32)
    k = np.exp(-((x[:, None].astype(float) - x.astype(float)) ** 2).sum(axis=2) / (2 * 0.2**2))
    a, m = operator_by_hand(k, np.full(80, 1 / 80), "degree", 0.0)
    exact = expm(-40 * a) @ v.astype(float)
    weights = nl.affinity(nl.Gaussian(0.2), nl.Points(x.astype(float), weights=np.full(80, 1 / 80)), x)
    for method in ("chebyshev", "lanczos"):
        found = function_of(weights, lambda a: np.exp(-40 * a), "degree", tol=1e-13, method=method).evaluate(v)
        assert found.u.dtype == np.float32
        error = np.sqrt(np.sum(m * (found.u - exact) ** 2) / np.sum(m * v.astype(float) ** 2))
        assert found.left_out < 0.1 * error < 0.1 * found.error
        assert found.error < 1e-2


@pytest.mark.numerical
@pytest.mark.parametrize("method", ["dense", "chebyshev", "lanczos"])
@pytest.mark.parametrize("name", ["exp", "Matern"])
def test_a_signal_that_is_coarser_than_the_affinity_is_in_the_bound(method: str, name: str) -> None:
    rng = np.random.default_rng(12)
    x, w = rng.random((30, 2)), rng.uniform(0.5, 2, 30) / 30
    v = rng.standard_normal(30).astype(np.float32)
    k = np.exp(-((x[:, None] - x) ** 2).sum(axis=2) / (2 * 0.2**2))
    a, m = operator_by_hand(k, w, "degree", 0.0)
    root = np.sqrt(m)
    similar = root[:, None] * a / root
    values, vectors = np.linalg.eigh((similar + similar.T) / 2)
    exact = vectors @ (FUNCTIONS[name](np.maximum(values, 0.0)) * (vectors.T @ (root * v))) / root
    weights = nl.affinity(nl.Gaussian(0.2), nl.Points(x, weights=w))
    found = function_of(weights, FUNCTIONS[name], "degree", method=method).evaluate(v)
    assert found.success
    assert found.u.dtype == np.float32
    error = np.sqrt(np.sum(m * (found.u - exact) ** 2) / np.sum(m * v.astype(np.float64) ** 2))
    assert 1e-9 < error < found.error < 0.05
    assert ("about" if method == "lanczos" else "at most") in found.message


def test_systems_and_other_metrics_have_no_one_measure() -> None:
    weights = nl.affinity(nl.Gaussian(0.3), nl.Grid(8))
    system = nl.flows.SystemFlow([nl.J(weights), nl.J(weights.scaled(2.0))], [1.0, 0.5])
    with pytest.raises(InputError, match="got a SystemFlow with an operator of its own"):
        function_of(system, np.sqrt)
    with pytest.raises(InputError, match="expected 'l2' or 'degree'"):
        function_of(nl.J(weights), np.sqrt, "conserved")


def test_heat_is_what_the_flow_comes_to() -> None:
    rng = np.random.default_rng(2)
    flow = nl.GradientFlow(nl.J(nl.affinity(nl.Gaussian(0.2), nl.Points(rng.random((500, 2))))))
    u = rng.standard_normal(500)
    heat = function_of(flow, lambda a: np.exp(-0.3 * a))
    assert heat.method == "chebyshev"
    assert heat.error < 1e-10
    assert np.abs(heat(u) - nl.solve(flow, u, t=0.3).final).max() < 1e-10


def test_auto_takes_lanczos_iteration_where_a_slope_is_infinite() -> None:
    rng = np.random.default_rng(3)
    weights = nl.affinity(nl.Gaussian(0.05), nl.Points(rng.random((450, 2))))
    root = function_of(weights, np.sqrt, "degree")
    assert root.method == "lanczos"
    assert np.isnan(root.error)
    v = rng.standard_normal(450)
    found = root.evaluate(v)
    assert found.success
    assert found.applications == root.applications < 300
    twice = root(root(v))
    assert np.abs(twice - (v - weights.average(v))).max() < 1e-10


def test_lanczos_iteration_says_where_it_ends_too_early() -> None:
    rng = np.random.default_rng(4)
    weights = nl.affinity(nl.Gaussian(0.03), nl.Points(rng.random((450, 2))))
    short = function_of(weights, np.sqrt, "degree", maxiter=10, method="lanczos")
    v = rng.standard_normal(450)
    found = short.evaluate(v)
    assert not found.success
    exact = function_of(weights, np.sqrt, "degree", method="dense")(v)
    m = weights.measure("degree", v)
    error = np.sqrt(np.sum(m * (found.u - exact) ** 2) / np.sum(m * v**2))
    assert 1e-3 * found.error < error < found.error
    with pytest.raises(NumericalError, match="after 10 steps, expected at most"):
        short(v)


def test_scipy_operator() -> None:
    case = Case(5)
    n = len(case.w)
    operator = function_of(case.flow, FUNCTIONS["heat"])
    assert isinstance(operator, FunctionOf)
    assert operator.shape == (n, n)
    x, y = case.rng.standard_normal((2, n))
    assert operator.matvec(x) == pytest.approx(case.exact(FUNCTIONS["heat"], x[:, None])[:, 0], abs=1e-13)
    assert (operator @ x) @ y == pytest.approx(x @ (operator.H @ y), rel=1e-12)
    assert operator.T.matmat(np.eye(n)) == pytest.approx(operator.matmat(np.eye(n)).T, abs=1e-13)


def test_matrices_for_each_node() -> None:
    rng = np.random.default_rng(6)
    mixing = np.array([[2.0, 1.0], [1.0, 3.0]]) * np.ones((30, 1, 1))
    v = rng.standard_normal((30, 2))
    flow = nl.GradientFlow(nl.E(nl.affinity(nl.Gaussian(0.2), nl.Points(rng.random((30, 1)))), v, mixing))
    results = [function_of(flow, np.sqrt, method=method) for method in ("dense", "chebyshev", "lanczos")]
    twice = [root(root(v)) for root in results]
    for found in twice:
        assert np.abs(found - flow.linear(v)).max() < 1e-10
    assert results[0].shape == (60, 60)
    with pytest.raises(InputError, match="expected a multiple of 2 channels"):
        results[0](v[:, 0])


def test_tensors() -> None:
    torch = pytest.importorskip("torch")
    x = torch.tensor(np.random.default_rng(7).random((40, 2)), dtype=torch.float32)
    v = torch.tensor(np.random.default_rng(8).standard_normal((40, 3)), dtype=torch.float32)
    weights = nl.affinity(nl.Gaussian(0.3), nl.Points(x.numpy()), x)
    exact = function_of(nl.affinity(nl.Gaussian(0.3), nl.Points(x.numpy().astype(float))), np.sqrt)(v.numpy())
    for method in ("dense", "lanczos"):
        found = function_of(weights, np.sqrt, method=method).evaluate(v)
        assert found.success
        assert found.u.dtype == torch.float32
        assert np.abs(found.u.numpy() - exact).max() < 1e-4
        assert found.error < 1e-2
    with pytest.raises(InputError, match="expected one that does not"):
        function_of(weights, np.sqrt, method="lanczos")(v.requires_grad_())


def test_what_is_refused() -> None:
    rng = np.random.default_rng(9)
    points = nl.Points(rng.random((6, 1)))
    weights = nl.affinity(nl.Gaussian(0.3), points)
    flow = nl.GradientFlow(nl.J(weights))
    features = nl.affinity(nl.Gaussian(0.3), points, rng.random((6, 1)))
    refused: list[tuple[Any, Any, str]] = [
        (3, np.sqrt, "L: got int, expected a GradientFlow"),
        (AttentionFlow(nl.from_matrix(rng.random((6, 6)), points)), np.sqrt, "not symmetric"),
        (nl.GradientFlow(nl.J(features), evolving=True), np.sqrt, "evolving kernel"),
        (nl.GradientFlow(nl.J(weights), constraint=nl.Constraint([0], 1.0)), np.sqrt, "constraint"),
        (flow, 3, "function: got int, expected a callable"),
        (flow, lambda a: 1 / np.sqrt(a), "got inf at 0, .*eigenvalue of constants"),
        (flow, lambda a: np.sqrt(a - 1e-3), "got nan at 0, expected finite values on"),
        (flow, lambda a: a[:2], "returned float64 of shape"),
        (flow, lambda a: a * 1j, "returned complex128"),
        (flow, lambda a: a.missing, "it failed for an array of eigenvalues .AttributeError"),
    ]
    for what, function, message in refused:
        for method in ("dense", "lanczos"):
            with pytest.raises(InputError, match=message):
                function_of(what, function, method=method)
    with pytest.raises(InputError, match="method: got 'transform', expected another one"):
        function_of(flow, np.sqrt, method="transform")
    with pytest.raises(NumericalError, match="no polynomial reaches"):
        function_of(flow, np.sqrt, method="chebyshev")
    with pytest.raises(InputError, match="metric: got 'l2' for a flow, which has its own"):
        function_of(flow, np.sqrt, "l2")
    with pytest.raises(InputError, match="tol: got 0"):
        function_of(flow, np.sqrt, tol=0)
    with pytest.raises(InputError, match="v: got shape"):
        function_of(flow, np.sqrt)(np.ones(7))


def test_a_fidelity_of_zero_at_some_nodes_has_an_inverse_root() -> None:
    """The bound of the spectrum is 0 there, its smallest eigenvalue is not."""
    rng = np.random.default_rng(10)
    phi = np.where(np.arange(60) < 30, 0.0, 1.0)
    flow = nl.GradientFlow(nl.E(nl.affinity(nl.Gaussian(0.2), nl.Points(rng.random((60, 2)))), np.zeros(60), phi))
    v = rng.standard_normal(60)
    for method in ("dense", "lanczos"):
        white = function_of(flow, FUNCTIONS["inverse root"], method=method)
        assert np.abs(flow.linear(white(white(v))) - v).max() < 1e-9
