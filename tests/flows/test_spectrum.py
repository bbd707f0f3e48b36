"""Extreme eigenvalues: the iterations for many nodes agree with the dense ones, and with the matrix written out."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from scipy import sparse

import nlflow as nl
from nlflow.errors import StabilityError
from nlflow.flows import spectrum
from nlflow.flows.spectrum import euler_limit, largest_eigenvalue, relaxation_rate
from tests.problems import Floats, Problem, gaussian_matrix, operator, problem, random_chain, torch_on_one_thread

pytestmark = pytest.mark.numerical

METRICS = ("l2", "degree")
FIDELITIES = {"J": None, "E": 0.7, "E per node": np.linspace(0.0, 1.5, 24)}


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("fidelity", FIDELITIES.values(), ids=FIDELITIES.keys())
def test_largest_eigenvalue(fidelity: Any, metric: str) -> None:
    p = problem(metric, fidelity)
    assert largest_eigenvalue(p.flow) == pytest.approx(p.radius, rel=1e-12)
    assert largest_eigenvalue(p.flow, diffusion=True) == pytest.approx(p.eigenvalues(diffusion=True)[-1], rel=1e-12)
    assert euler_limit(p.flow) == pytest.approx(2 / p.radius, rel=1e-12)
    assert p.flow.applications == 0  # analysis is not counted


@pytest.fixture
def iterate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have few nodes treated as many: dense references of hundreds of nodes cost seconds on a busy machine."""
    monkeypatch.setattr(spectrum, "_DENSE_NODES", 30)


def agrees_with_the_dense_eigenvalues(p: Problem) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(np.linalg, "eigvalsh", None)  # the matrix is not looked at
        iterated = largest_eigenvalue(p.flow)
    assert p.radius * (1 - 1e-9) <= iterated <= p.radius * (1 + 1e-5)  # on the safe side of a limit
    assert largest_eigenvalue(p.flow) == iterated  # the same each time
    assert largest_eigenvalue(p.flow, diffusion=True) == pytest.approx(p.eigenvalues(diffusion=True)[-1], rel=1e-5)
    assert p.flow.applications == 0


def test_lanczos_beyond_400_nodes() -> None:
    agrees_with_the_dense_eigenvalues(problem("l2", 0.4, n=401))


@pytest.mark.slow
@pytest.mark.usefixtures("iterate")
@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("fidelity", [None, 0.4, np.linspace(0, 2, 60)], ids=["J", "E", "E per node"])
def test_lanczos(fidelity: Any, metric: str) -> None:
    agrees_with_the_dense_eigenvalues(problem(metric, fidelity, n=60))


@pytest.mark.usefixtures("iterate")
@pytest.mark.parametrize("boundary", ["periodic", "reflect", "isolated"])
def test_lanczos_on_a_grid_of_two_axes(boundary: Any) -> None:
    grid = nl.Grid((8, 9), spacing=0.2, boundary=boundary)
    affinity = nl.affinity(nl.TopHat(radius=0.45), grid)
    fidelity = np.linspace(0.0, 3.0, grid.size).reshape(grid.shape)
    flow = nl.GradientFlow(nl.E(affinity, np.zeros(grid.shape), fidelity), "l2")
    dense = nl.affinity(nl.TopHat(radius=0.45), grid, method="dense")
    degree = 2 * dense.degree.ravel()
    matrix = degree[:, None] * (np.eye(grid.size) - dense.matrix) + np.diag(fidelity.ravel())
    assert largest_eigenvalue(flow) == pytest.approx(np.linalg.eigvalsh((matrix + matrix.T) / 2)[-1], rel=1e-5)


def chain_flow(k: Floats, fidelity: float = 0.0) -> tuple[nl.AttentionFlow, Floats]:
    n = len(k)
    weights = np.linspace(0.5, 1.5, n)
    flow = nl.AttentionFlow(nl.from_matrix(k, nl.Points(np.arange(float(n)), weights)), np.zeros(n), fidelity)
    return flow, (1 + fidelity) * np.eye(n) - k * weights / (k @ weights)[:, None]


@pytest.mark.parametrize("fidelity", [0.0, 0.3])
@pytest.mark.parametrize("asymmetry", [0.1, 1.0, 10.0])
def test_euler_limit_of_complex_eigenvalues(asymmetry: float, fidelity: float) -> None:
    flow, matrix = chain_flow(random_chain(12, asymmetry=asymmetry), fidelity)
    values = np.linalg.eigvals(matrix)
    assert np.abs(values.imag).max() > 0.01
    limit = euler_limit(flow)
    values = values[np.abs(values) > 1e-10]
    # At the limit the fastest of the factors 1 - h a sits on the unit circle, and none is outside.
    assert np.abs(1 - limit * values).max() == pytest.approx(1.0, abs=1e-12)
    assert np.abs(1 - 0.99 * limit * values).max() < 1
    assert flow.applications == 0


def test_arnoldi_agrees_with_the_dense_eigenvalues(monkeypatch: pytest.MonkeyPatch) -> None:
    # Mostly pairs that swap: the eigenvalues that set the limit are those of largest modulus, which are looked for.
    k = random_chain(60, asymmetry=0.0) + 30 * np.fliplr(np.eye(60)) * np.linspace(0.5, 1.5, 60)
    flow, _ = chain_flow(k, 0.2)
    assert not flow.symmetric
    dense = euler_limit(flow)
    monkeypatch.setattr(spectrum, "_DENSE_NODES", 30)
    assert euler_limit(flow) == pytest.approx(dense, rel=1e-5)
    assert flow.applications == 0


@pytest.mark.usefixtures("iterate")
def test_the_limit_may_come_of_an_eigenvalue_that_is_not_among_the_largest() -> None:
    """A cycle of three, a = 1 - exp(2 pi i / 3) with |a| = 1.73, beside many pairs that swap, a = 1.9."""
    k = np.zeros((43, 43))
    k[:3, :3] = np.roll(np.eye(3), 1, axis=1)
    for i in range(3, 43, 2):
        k[i : i + 2, i : i + 2] = [[0.05, 0.95], [0.95, 0.05]]
    flow = nl.AttentionFlow(nl.from_matrix(k, nl.Points(np.arange(43.0), np.ones(43))))
    assert euler_limit(flow) <= 1.0 + 1e-9
    start = np.random.default_rng(0).standard_normal(43)
    with pytest.raises(StabilityError, match=r"dt: got 1\.04, which is unstable"):
        nl.solve(flow, start, t=1040.0, integrator=nl.ExplicitEuler(1.04))


@pytest.mark.usefixtures("iterate")
def test_a_limit_that_is_found_by_trial() -> None:
    """The cycle now stays with 0.03, |a| = 1.68: its limit 1 / 0.97 is below that of the pairs, above the safe step."""
    k = np.zeros((43, 43))
    k[:3, :3] = 0.03 * np.eye(3) + 0.97 * np.roll(np.eye(3), 1, axis=1)
    for i in range(3, 43, 2):
        k[i : i + 2, i : i + 2] = [[0.05, 0.95], [0.95, 0.05]]
    flow = nl.AttentionFlow(nl.from_matrix(k, nl.Points(np.arange(43.0), np.ones(43))))
    values = np.linalg.eigvals(np.eye(43) - k)
    values = values[np.abs(values) > 1e-10]
    assert np.min(2 * values.real / np.abs(values) ** 2) == pytest.approx(1 / 0.97, rel=1e-12)
    assert euler_limit(flow) == pytest.approx(1 / 0.97, rel=2e-6)


@pytest.mark.parametrize("n", [1, 5, 500])
def test_a_flow_that_does_not_move_has_no_limit(n: int) -> None:
    flow = nl.GradientFlow(nl.J(nl.from_matrix(np.eye(n), nl.Points(np.arange(float(n))))), "degree")
    assert largest_eigenvalue(flow) == pytest.approx(0.0, abs=1e-14)
    assert euler_limit(flow) > 1e13


@pytest.mark.usefixtures("iterate")
@pytest.mark.parametrize("n", [7, 60])
def test_one_directed_step_has_its_limit_at_the_average(n: int) -> None:
    # P a cyclic shift: eigenvalues of P all round the unit circle, factors |1 - h + h mu| <= 1 just for h <= 1.
    flow, _ = chain_flow(np.roll(np.eye(n), 1, axis=1))
    assert euler_limit(flow) == pytest.approx(1.0, rel=1e-9)
    assert flow.applications == 0


def test_underflowed_weights_divide_nothing_by_zero() -> None:
    weights = np.full(6, 1.0)
    weights[0] = 1e-300
    affinity = nl.affinity(nl.Gaussian(width=1.0), nl.Points(np.arange(6.0), weights))
    for metric in METRICS:
        assert 0.0 < largest_eigenvalue(nl.GradientFlow(nl.J(affinity), metric)) < math.inf


def test_float32_and_torch() -> None:
    p = problem("l2", 0.4)
    single = problem("l2", 0.4, dtype="float32").flow
    assert largest_eigenvalue(single) == pytest.approx(p.radius, rel=1e-5)
    torch = torch_on_one_thread()
    x = p.flow.affinity.domain.nodes
    affinity = nl.affinity(nl.Gaussian(width=0.3), p.flow.affinity.domain, torch.as_tensor(x))
    flow = nl.GradientFlow(nl.E(affinity, torch.as_tensor(p.observed), 0.4), "l2")
    assert largest_eigenvalue(flow) == pytest.approx(p.radius, rel=1e-12)


def test_the_matrix_of_the_tests_is_the_formula() -> None:
    rng = np.random.default_rng(2)
    x, w = rng.random((4, 2)), rng.random(4)
    k = gaussian_matrix(x, 0.5)
    matrix, degree = operator(k, w, "l2")
    u = rng.standard_normal(4)
    for i in range(4):
        by_hand = sum(w[j] * (k[i, j] + k[j, i]) * (u[i] - u[j]) for j in range(4))
        assert (matrix @ u)[i] == pytest.approx(by_hand, rel=1e-13)
    assert sparse.csr_array(matrix).sum(axis=1) == pytest.approx(np.zeros(4), abs=1e-15)
    assert degree[0] == pytest.approx(2 * sum(w[j] * k[0, j] for j in range(4)))


# --- spectra that the structure tells --------------------------------------------------------------------------------

TOLD = [
    (kernel, boundary, shape, method)
    for kernel in (nl.Gaussian(width=1.3), nl.Laplace(width=0.9), nl.TopHat(radius=2.2))
    for boundary in ("periodic", "reflect")
    for shape in ((1,), (2,), (9,), (12,), (5, 6), (4, 7))
    for method in ("stencil", "convolution")
]


@pytest.mark.parametrize(("kernel", "boundary", "shape", "method"), TOLD)
def test_known_spectrum_is_that_of_the_matrix(
    kernel: nl.Gaussian | nl.Laplace | nl.TopHat, boundary: Any, shape: tuple[int, ...], method: str
) -> None:
    affinity = nl.affinity(kernel, nl.Grid(shape, spacing=0.8, boundary=boundary), method=method)
    known = affinity.known_spectrum()
    assert known is not None
    dense = nl.affinity(kernel, nl.Grid(shape, spacing=0.8, boundary=boundary), method="dense")
    expected = np.linalg.eigvals(dense.matrix).real
    assert known[0] == pytest.approx(1, abs=1e-14)
    assert dense.known_spectrum() is None
    apart = np.abs(known[:, None] - expected)
    assert apart.min(axis=1).max() < 1e-12  # each is an eigenvalue
    assert apart.min(axis=0).max() < 1e-12  # and each eigenvalue is there
    for metric in ("l2", "degree"):
        for fidelity in (0.0, 0.7):
            f = np.ones(shape)
            flows = [
                nl.GradientFlow(nl.E(a, f, fidelity, measure=metric) if fidelity else nl.J(a), metric)
                for a in (affinity, dense)
            ]
            for diffusion in (False, True):
                told, whole = (largest_eigenvalue(flow, diffusion=diffusion) for flow in flows)
                assert told == pytest.approx(whole, rel=1e-12, abs=1e-13)
            told, whole = (relaxation_rate(flow) for flow in flows)
            assert told == pytest.approx(whole, rel=1e-10, abs=1e-12)


def test_no_spectrum_is_told_where_the_degree_varies() -> None:
    for method in ("stencil", "convolution"):
        affinity = nl.affinity(nl.Gaussian(width=1.0), nl.Grid(9, boundary="isolated"), method=method)
        assert affinity.known_spectrum() is None
    image = np.random.default_rng(0).standard_normal(16)
    assert nl.affinity(nl.Patch(1.0, patch_size=3, search_radius=2), nl.Grid(16), image).known_spectrum() is None


def test_fidelities_that_vary_are_not_read_off_the_symbol() -> None:
    grid = nl.Grid(12, boundary="periodic")
    f = np.ones(12)
    fidelity = np.linspace(0.1, 2.0, 12)
    flows = [
        nl.GradientFlow(nl.E(nl.affinity(nl.Gaussian(1.5), grid, method=m), f, fidelity, measure="degree"), "degree")
        for m in ("convolution", "dense")
    ]
    assert largest_eigenvalue(flows[0]) == pytest.approx(largest_eigenvalue(flows[1]), rel=1e-12)
    assert relaxation_rate(flows[0]) == pytest.approx(relaxation_rate(flows[1]), rel=1e-10)


def test_a_million_nodes_cost_one_transform() -> None:
    n, width = 10**6, 50.0
    flow = nl.GradientFlow(nl.J(nl.affinity(nl.Gaussian(width), nl.Grid(n, boundary="periodic"))), "degree")
    symbol = np.exp(-2 * (np.pi * width / n) ** 2)  # of the slowest mode, by Poisson's formula
    assert relaxation_rate(flow) == pytest.approx(1 - symbol, rel=1e-5)
    assert flow.applications == 0


def test_an_own_operator_between_many_nodes_that_moves_nothing_has_no_limit() -> None:
    class Still(nl.GradientFlow):
        def linear(self, v: Any) -> Any:
            return 0 * v

        def velocity(self, u: Any) -> Any:
            return 0 * u

    still = Still(nl.J(nl.affinity(nl.Gaussian(1.0), nl.Grid(500))))
    assert euler_limit(still) == math.inf
    assert largest_eigenvalue(still) == 0


def test_an_eigenvalue_near_0_is_found_beside_large_ones() -> None:
    """Its residual is held against the size of the products, which is not its own."""
    values = np.append(1e-11, np.linspace(0.5, 1.0, 60))
    found = spectrum.extreme(lambda v: values * v, 61, "SA", symmetric=True, tol=1e-6)
    assert found[0] == pytest.approx(0.0, abs=1e-6)


@pytest.mark.slow
def test_a_slow_rate_is_looked_for_again_with_more_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    path = sparse.diags_array([np.ones(1199), np.ones(1199)], offsets=[-1, 1]).tocsr()
    flow = nl.GradientFlow(nl.J(nl.affinity_from_graph(path)), "degree")
    exact, asked = 1 - math.cos(math.pi / 1199), []
    extreme = spectrum.extreme

    def failing(*given: Any, **options: Any) -> Any:
        asked.append(options["tol"])
        if options["tol"] > least:
            raise nl.NumericalError("affinity: none")
        return extreme(*given, **options)

    monkeypatch.setattr(spectrum, "extreme", failing)
    least = 1e-10
    assert relaxation_rate(flow) == pytest.approx(exact, rel=1e-4)
    assert asked == [1e-8, 1e-14]
    least = 0.0
    with pytest.raises(nl.NumericalError, match="slowest rate"):
        relaxation_rate(flow)


def test_the_rate_of_many_nodes_that_turn() -> None:
    """Beyond the nodes whose eigenvalues are all computed: groups that walk round, and jumps to anywhere."""
    groups, each, share = 5, 210, 0.8
    n = groups * each
    walk = np.kron(np.roll(np.eye(groups), 1, axis=1), np.full((each, each), 1 / each))
    flow = nl.AttentionFlow(nl.from_matrix(share * walk + (1 - share) / n, nl.Points(np.arange(float(n)), np.ones(n))))
    assert relaxation_rate(flow) == pytest.approx(1 - share * math.cos(2 * math.pi / groups), rel=1e-7)


def test_a_small_eigenvalue_that_turns_sets_the_limit() -> None:
    matrix = np.diag(np.linspace(1.0, 1.5, 30))
    matrix[:2, :2] = [[0.01, 0.5], [-0.5, 0.01]]

    class Own(nl.GradientFlow):
        def linear(self, u: Any) -> Any:
            return matrix @ u

    flow = Own(nl.J(nl.affinity(nl.Gaussian(1.0), nl.Points(np.arange(30.0)))), "degree")
    assert euler_limit(flow) == pytest.approx(0.02 / (0.01**2 + 0.5**2), rel=1e-9)


def test_an_operator_that_returns_nan_is_named() -> None:
    class Own(nl.GradientFlow):
        def linear(self, u: Any) -> Any:
            return math.nan * u

    flow = Own(nl.J(nl.affinity(nl.Gaussian(1.0), nl.Points(np.arange(30.0)))), "degree")
    with pytest.raises(nl.NumericalError, match=r"linear\(\) of Own returns NaN"):
        euler_limit(flow)


@pytest.mark.parametrize(("beside", "told"), [(0.0, True), (1e-4, False)])
def test_limits_are_told_where_what_is_beside_the_operator_is_constant(beside: float, told: bool) -> None:
    class Own(nl.GradientFlow):
        def linear(self, u: Any) -> Any:
            return 1.5 * super().linear(u)

        def velocity(self, u: Any) -> Any:
            return 0.3 - self.linear(u) + beside * u**2

    assert spectrum.is_told(Own(nl.J(nl.affinity(nl.Gaussian(1.0), nl.Points(np.arange(30.0)))), "degree")) == told
