"""How much of a signal equilibria keep, and which fidelities are stable, against dense spectra and by trial."""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
import pytest
from hypothesis import given as drawn
from hypothesis import strategies as st

import nlflow as nl
from nlflow import AttentionFlow, E, GradientFlow, J, diversity, diversity_bounds, equilibrium, fidelity_for_diversity
from nlflow.errors import NlflowWarning
from tests.chains import (
    CASES,
    NOT_SYMMETRIC,
    TOLERANCE,
    MatrixFree,
    built,
    directed_ring,
    given,
    normal,
    ring,
    stationary_law,
)
from tests.problems import Floats, problem, random_chain, torch_on_one_thread

pytestmark = pytest.mark.numerical

METRICS = ("l2", "degree")


def deviation(law: Floats, u: Any) -> float:
    """Return the root mean square of u - law u in a law."""
    v = np.asarray(u, dtype=float).reshape(len(law), -1)
    return math.sqrt((law[:, None] * (v - law @ v) ** 2).sum())


# --- diversity -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("name", CASES)
def test_diversity(name: str, dtype: str) -> None:
    affinity, p = built(name, dtype)
    flow = AttentionFlow(affinity)
    for channels in ((), (3,)):
        u = normal((*affinity.domain.shape, *channels), 2, dtype)
        assert diversity(flow, u) == pytest.approx(deviation(stationary_law(p), u), rel=3 * TOLERANCE[dtype])
    assert diversity(flow, np.full(affinity.domain.shape, 3.0, dtype)) == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("metric", METRICS)
def test_diversity_in_the_measure_of_the_metric(metric: str) -> None:
    p = problem(metric, channels=2)
    assert diversity(p.flow, p.start) == pytest.approx(deviation(p.measure / p.measure.sum(), p.start), rel=1e-12)
    assert diversity(p.flow, p.start) == p.flow.distance_to_constant(p.start)


# --- bounds ----------------------------------------------------------------------------------------------------------


def modes(matrix: Floats, measure: Floats) -> tuple[Floats, Floats]:
    """Return eigenvalues, increasing, and eigenvectors of a matrix that is self-adjoint in a measure."""
    root = np.sqrt(measure)
    symmetric = root[:, None] * matrix / root
    values, vectors = np.linalg.eigh((symmetric + symmetric.T) / 2)
    return values, vectors / root[:, None]


@pytest.mark.parametrize("fidelity", [1e-3, 0.4, 30.0])
@pytest.mark.parametrize("metric", METRICS)
def test_bounds_are_attained_by_eigenvectors(metric: str, fidelity: float) -> None:
    p = problem(metric, fidelity)
    values, vectors = modes(p.matrix - fidelity * np.eye(24), p.measure)
    low, high = diversity_bounds(p.flow)
    assert low == pytest.approx(fidelity / (fidelity + values[-1]), rel=1e-11)
    assert high == pytest.approx(fidelity / (fidelity + values[1]), rel=1e-11)
    for vector, bound in ((vectors[:, -1], low), (vectors[:, 1], high)):
        f = 2.0 + vector
        flow = GradientFlow(E(p.flow.functional.given, f, fidelity, measure=metric), metric)  # type: ignore[union-attr]
        ratio = diversity(flow, equilibrium(flow, method="direct").u) / diversity(flow, f)
        assert ratio == pytest.approx(bound, rel=1e-10)


@drawn(st.sampled_from(sorted(CASES)), st.floats(-3, 3), st.integers(0, 10**6))
def test_bounds_hold_for_every_signal(name: str, exponent: float, seed: int) -> None:
    """Ones with a peak, random ones, single modes; symmetric or not."""
    affinity, p = built(name)
    shape, rng = affinity.domain.shape, np.random.default_rng(seed)
    kind = seed % 3
    f = rng.standard_normal(shape) if kind else np.zeros(shape)
    f.flat[seed % f.size] += 100.0 * (kind == 0)
    if kind == 2:
        f = np.linalg.eig(p)[1][:, seed % len(p)].real.reshape(shape)
    flow = AttentionFlow(affinity, f, 10.0**exponent)
    low, high = diversity_bounds(flow)
    assert 0 < low <= high <= 1
    law = stationary_law(p)
    before = deviation(law, f)
    after = deviation(law, equilibrium(flow, method="direct").u)
    assert low * before * (1 - 1e-9) - 1e-13 <= after <= high * before * (1 + 1e-9) + 1e-13


@pytest.mark.parametrize("fidelity", [1e-2, 1.0, 40.0])
@pytest.mark.parametrize("name", NOT_SYMMETRIC)
def test_bounds_are_attained_by_singular_vectors(name: str, fidelity: float) -> None:
    affinity, p = built(name)
    n, law = len(p), stationary_law(p)
    root = np.sqrt(law)
    # On signals of mean 0: the map is extended by the identity times its smallest gain on constants, then left out.
    basis = np.linalg.svd(root[None, :])[2][1:].T
    inside = basis.T @ (root[:, None] * ((1 + fidelity) * np.eye(n) - p) / root) @ basis
    left, values, right = np.linalg.svd(inside)
    low, high = diversity_bounds(AttentionFlow(affinity, np.zeros(n), fidelity))
    assert low == pytest.approx(fidelity / values[0], rel=1e-10)
    assert high == pytest.approx(min(fidelity / values[-1], 1), rel=1e-10)
    for index, bound in ((0, low), (-1, high)):
        f = (basis @ left[:, index]) / root  # what the inverse maps to right[index] / values[index]
        flow = AttentionFlow(affinity, f, fidelity)
        assert diversity(flow, equilibrium(flow).u) / diversity(flow, f) == pytest.approx(bound, rel=1e-9)
    assert right.shape == (n - 1, n - 1)


def test_bounds_of_many_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """By iteration for symmetric P, from Markov's inequality alone for others; both hold."""
    symmetric, other = (AttentionFlow(built(name)[0], normal(12), 0.3) for name in ("keys", "queries"))
    exact, inner = diversity_bounds(symmetric), diversity_bounds(other)
    monkeypatch.setattr("nlflow.equilibria.bounds._DENSE_NODES", 5)
    monkeypatch.setattr("nlflow.flows.spectrum._DENSE_NODES", 5)
    monkeypatch.setattr("nlflow.flows.spectrum._DENSE_RATE_NODES", 5)
    assert diversity_bounds(symmetric) == pytest.approx(exact, rel=1e-5)
    assert diversity_bounds(symmetric)[0] <= exact[0] * (1 + 1e-12)
    assert diversity_bounds(other) == (0.3 / 2.3, 1.0)
    assert diversity_bounds(other)[0] <= inner[0] <= inner[1] <= 1.0


def test_bounds_at_the_ends() -> None:
    one = AttentionFlow(given([[1.0]]), np.ones(1), 0.5)
    assert diversity_bounds(one) == (1.0, 1.0)
    split = AttentionFlow(given(np.kron(np.eye(2), np.ones((2, 2)))), normal(4), 0.5)
    assert diversity_bounds(split) == pytest.approx((1 / 3, 1.0), rel=1e-13)  # a part keeps its own mean
    assert diversity_bounds(AttentionFlow(built("keys")[0], normal(12), 0.0)) == (0.0, 0.0)
    around = AttentionFlow(given(directed_ring(6)), normal(6), 0.5)
    gains = np.abs(1.5 - np.exp(2j * np.pi * np.arange(1, 6) / 6))
    assert diversity_bounds(around) == pytest.approx((0.5 / gains.max(), 0.5 / gains.min()), rel=1e-12)


@pytest.mark.slow
def test_causal_attention_keeps_a_diversity_that_its_stationary_law_does_not_see() -> None:
    matrix = np.tril(np.random.default_rng(3).random((8, 8)) + 0.1)
    weights = np.linspace(0.5, 1.5, 8)
    p = matrix * weights / (matrix @ weights)[:, None]  # all walks end at node 0: pi^T f = f_0
    points = nl.Points(np.arange(8.0), weights=weights)
    affinity = nl.from_matrix(matrix, points)
    m = weights / weights.sum()

    def norm(v: Floats) -> float:
        return float(np.sqrt(m @ (v - v[0]) ** 2))

    for fidelity in (0.01, 0.5, 20.0):
        ratios = []
        for seed in range(200):
            f = normal(8, seed)
            flow = AttentionFlow(affinity, f, fidelity)
            assert diversity(flow, f) == pytest.approx(norm(f), rel=1e-13)
            u = np.linalg.solve((1 + fidelity) * np.eye(8) - p, fidelity * f)
            ratios.append(norm(u) / norm(f))
        low, high = diversity_bounds(flow)
        assert low <= min(ratios) <= max(ratios) <= high
        # Attained: by the singular vectors on signals that vanish at node 0.
        root = np.sqrt(m[1:])
        a = root[:, None] * ((1 + fidelity) * np.eye(7) - p[1:, 1:]) / root
        gains = np.linalg.svd(a, compute_uv=False)
        # The norm of v - v_0 over all nodes is that over the others.
        assert (low, high) == pytest.approx((fidelity / gains[0], fidelity / gains[-1]), rel=1e-10)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", nl.NlflowWarning)  # a layer would be unstable: not the question here
        wanted = fidelity_for_diversity(AttentionFlow(affinity), 0.4)
    assert diversity_bounds(AttentionFlow(affinity, normal(8), wanted))[0] >= 0.4 * (1 - 1e-12)
    chain = nl.MarkovChain(affinity)
    v = normal(8)
    expected = [norm(np.linalg.matrix_power(p, k) @ v - v[0] + 0 * v) for k in range(4)]
    assert chain.distance_to_limit(v, 3) == pytest.approx(expected, rel=1e-12)
    assert chain.steps_to_limit(v, 0.01) > 0


def test_transient_states_among_many_nodes_have_no_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nlflow.equilibria.bounds._DENSE_NODES", 4)
    flow = AttentionFlow(given(np.tril(np.ones((6, 6)))), normal(6), 0.5)
    for ask in (lambda: diversity_bounds(flow), lambda: fidelity_for_diversity(flow, 0.3)):
        with pytest.raises(nl.InputError, match=r"affinity: got 6 nodes with transient states"):
            ask()


def test_float32_and_torch() -> None:
    torch = torch_on_one_thread()
    keys, queries = normal((12, 3), 1), normal((12, 3), 2)
    points = nl.Points(np.arange(12.0), weights=np.linspace(0.5, 1.5, 12))
    for q in (None, queries):
        flow = AttentionFlow(nl.affinity(nl.ExpDotProduct(), points, keys, queries=q), normal(12), 0.4)
        for kind in (np.float32, torch.float64, torch.float32):
            k, p, f = (
                None if a is None else a.astype(kind) if kind is np.float32 else torch.as_tensor(a, dtype=kind)
                for a in (keys, q, normal(12))
            )
            other = AttentionFlow(nl.affinity(nl.ExpDotProduct(), points, k, queries=p), f, 0.4)
            assert diversity_bounds(other) == pytest.approx(diversity_bounds(flow), rel=1e-5)
            assert diversity(other, f) == pytest.approx(diversity(flow, normal(12)), rel=1e-5)
            assert nl.largest_stable_fidelity(other.affinity) == pytest.approx(
                nl.largest_stable_fidelity(flow.affinity), rel=1e-5
            )


# --- the fidelity for a wanted diversity -----------------------------------------------------------------------------


@pytest.mark.parametrize("fraction", [1e-3, 0.3, 0.9])
@pytest.mark.parametrize("metric", METRICS)
def test_a_fidelity_for_a_fraction_is_enough_and_no_more(metric: str, fraction: float) -> None:
    p = problem(metric)
    values, vectors = modes(p.matrix, p.measure)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NlflowWarning)  # looked at below
        fidelity = fidelity_for_diversity(p.flow, fraction)
    assert fidelity == pytest.approx(fraction / (1 - fraction) * values[-1], rel=1e-11)
    rng = np.random.default_rng(0)
    for f in (vectors[:, -1], vectors[:, 5], rng.standard_normal(24)):
        flow = GradientFlow(E(p.flow.functional.given, f, fidelity, measure=metric), metric)  # type: ignore[union-attr]
        ratio = diversity(flow, equilibrium(flow, method="direct").u) / diversity(flow, f)
        assert ratio >= fraction * (1 - 1e-10)
        if f is vectors[:, -1]:
            assert ratio == pytest.approx(fraction, rel=1e-9)
    flow = GradientFlow(E(p.flow.functional.given, f, 5.0, measure=metric), metric)  # type: ignore[union-attr]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NlflowWarning)
        assert fidelity_for_diversity(flow, fraction) == pytest.approx(fidelity, rel=1e-12)  # its own does not count


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("name", NOT_SYMMETRIC)
def test_a_fidelity_for_a_fraction_without_symmetry(name: str, many: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    affinity, p = built(name)
    n, law = len(p), stationary_law(p)
    root = np.sqrt(law)
    away = np.eye(n) - np.outer(root, root)
    norm = np.linalg.norm(away @ (root[:, None] * (np.eye(n) - p) / root) @ away, 2)
    if many:
        monkeypatch.setattr("nlflow.equilibria.bounds._DENSE_NODES", 5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NlflowWarning)  # looked at below
        fidelity = fidelity_for_diversity(AttentionFlow(affinity), 0.25)
    assert fidelity == pytest.approx((2.0 if many else norm) / 3, rel=1e-10)
    monkeypatch.undo()
    assert diversity_bounds(AttentionFlow(affinity, np.zeros(n), fidelity))[0] >= 0.25 * (1 - 1e-12)


@pytest.mark.parametrize("name", ["keys", "queries", "periodic"])
def test_a_fidelity_beyond_the_layers_limit_is_told(name: str) -> None:
    flow = AttentionFlow(built(name)[0])
    limit = nl.largest_stable_fidelity(flow.affinity)
    with pytest.warns(
        NlflowWarning, match=rf"NeuTRENO layer with lambda~ = .* \(limit {limit:.4g}\); use SemiImplicit"
    ) as told:
        assert fidelity_for_diversity(flow, 0.7) >= limit
    assert told[0].filename == __file__
    assert fidelity_for_diversity(flow, 0.2) < limit  # without a warning, which would be an error here
    slow = GradientFlow(J(built("keys")[0]), "l2")
    assert fidelity_for_diversity(slow, 0.99) > 10  # an L2 flow is no layer


# --- the limit of the NeuTRENO step ----------------------------------------------------------------------------------


def growth(p: Floats, fidelity: float) -> float:
    """Return the largest modulus of the factors by which errors of u <- Pu + lambda~ (f - u) change."""
    return float(np.abs(np.linalg.eigvals(p - fidelity * np.eye(len(p)))).max())


LIMITS: dict[str, Any] = {
    **{name: lambda name=name: built(name)[0] for name in CASES},
    "complex": lambda: given(random_chain(12)),
    "very complex": lambda: given(random_chain(12, asymmetry=10.0)),
    "three": lambda: given(directed_ring(3, 0.1) + 0.02),
    "nearly still": lambda: given(np.eye(12) + 1e-4 * np.random.default_rng(0).random((12, 12))),
}


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("name", LIMITS)
def test_errors_grow_just_above_the_limit(name: str, many: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """All eigenvalues, and the iterations for many nodes."""
    affinity = LIMITS[name]()
    p = nl.MarkovChain(affinity).matrix()
    if many:
        monkeypatch.setattr("nlflow.equilibria.bounds._DENSE_NODES", 5)
        monkeypatch.setattr("nlflow.flows.spectrum._DENSE_NODES", 5)
        monkeypatch.setattr(np.linalg, "eigvalsh", None)
    limit = nl.largest_stable_fidelity(affinity)
    monkeypatch.undo()
    step = 1e-5 if many else 1e-9
    assert growth(p, limit - step) < 1 < growth(p, limit + step)
    # A layer does what the spectrum says.
    f, u = normal((len(p),)), normal((len(p),), 2)
    for fidelity, grows in ((0.95 * limit, False), (1.05 * limit, True)):
        error = u - np.linalg.solve((1 + fidelity) * np.eye(len(p)) - p, fidelity * f)
        after = np.linalg.matrix_power(p - fidelity * np.eye(len(p)), 2000) @ error
        assert (np.abs(after).max() > np.abs(error).max()) == grows


def test_a_top_hat_lowers_the_limit_below_one() -> None:
    affinity, p = built("periodic")
    smallest = np.linalg.eigvals(p).real.min()
    assert smallest < -0.1
    assert nl.largest_stable_fidelity(affinity) == pytest.approx(1 + smallest, rel=1e-12)
    assert nl.largest_stable_fidelity(given(np.ones((4, 4)))) == pytest.approx(1.0, rel=1e-12)
    assert nl.largest_stable_fidelity(given(np.eye(4))) == pytest.approx(2.0, rel=1e-12)


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("n", [2, 4, 5, 7])
def test_a_chain_that_only_goes_round_has_no_stable_fidelity(
    n: int, many: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """n = 3 too: exp(2 pi i / 3) has the real part -1/2."""
    if many:
        monkeypatch.setattr("nlflow.equilibria.bounds._DENSE_NODES", 1)
    limit = nl.largest_stable_fidelity(given(directed_ring(n)))
    assert 0.0 <= limit <= 1e-7


@pytest.mark.slow
def test_thousands_of_nodes() -> None:
    """A random directed chain beyond what is looked at in whole; a torus, of which the limit is known."""
    n = 1001
    rng = np.random.default_rng(0)
    k = rng.random((n, n)) * np.kron(directed_ring(3, 0.1) + 0.02, np.ones((334, 334)))[:n, :n]
    limit = nl.largest_stable_fidelity(given(k))
    assert 0 < limit < 1
    p = k / k.sum(axis=1, keepdims=True)
    # At the limit the spectral radius is 1: powers of the step neither die out nor explode.
    for factor, low, high in ((0.97, 0.0, 0.9), (1.03, 1.1, math.inf)):
        u = rng.standard_normal(n)
        u /= np.abs(u).max()
        sizes = []
        for _ in range(400):
            u = p @ u - factor * limit * u
            sizes.append(np.linalg.norm(u))
        assert low <= sizes[-1] / sizes[199] <= high
    odd = MatrixFree((41, 41))
    assert nl.largest_stable_fidelity(odd) == pytest.approx(1 - math.cos(math.pi / 41), rel=1e-3)


# --- what is refused -------------------------------------------------------------------------------------------------


def test_arguments() -> None:
    affinity, _ = built("keys")
    f = normal(12)
    free = AttentionFlow(affinity)
    features = normal((12, 3))
    moving = AttentionFlow(nl.affinity(nl.ExpDotProduct(), affinity.domain, features), features, 0.1, evolving=True)
    for call in (diversity_bounds, lambda flow: fidelity_for_diversity(flow, 0.5), lambda flow: diversity(flow, f)):
        with pytest.raises(nl.InputError, match="flow: got DenseAffinity, expected a GradientFlow or an AttentionFlow"):
            call(affinity)
    for call in (diversity_bounds, lambda flow: fidelity_for_diversity(flow, 0.5)):
        with pytest.raises(nl.InputError, match="flow: got an evolving kernel"):
            call(moving)
    with pytest.raises(nl.InputError, match=r"u: got shape \(5,\)"):
        diversity(free, np.ones(5))
    with pytest.raises(nl.InputError, match="flow: got a flow without fidelity"):
        diversity_bounds(free)
    for metric in METRICS:
        other = "l2" if metric == "degree" else "degree"
        with pytest.raises(nl.InputError, match="fidelity: got one value for each node"):
            diversity_bounds(GradientFlow(E(affinity, f, 0.5, measure=other), metric))
    with pytest.raises(nl.InputError, match="fidelity: got one value for each node"):
        diversity_bounds(AttentionFlow(affinity, f, np.full(12, 0.5)))
    for fraction in (0.0, -0.5, 1.0, 1.5, math.nan, "half"):
        with pytest.raises(nl.InputError, match="fraction: got"):
            fidelity_for_diversity(free, fraction)  # type: ignore[arg-type]
    with pytest.raises(nl.InputError, match="affinity: got AttentionFlow, expected an Affinity"):
        nl.largest_stable_fidelity(free)  # type: ignore[arg-type]
    split = np.kron(np.eye(2), np.ones((3, 3))) * np.arange(1.0, 7)[:, None]
    for call in (
        diversity_bounds,
        lambda flow: fidelity_for_diversity(flow, 0.5),
        lambda flow: diversity(flow, normal(6)),
    ):
        with pytest.raises(nl.InputError, match="reducible chain with 2 classes"):
            call(AttentionFlow(given(split), normal(6), 0.5))


def test_a_limit_that_is_not_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from scipy.sparse.linalg import ArpackError

    def fails(*args: Any, **options: Any) -> None:
        raise ArpackError(-9999)

    monkeypatch.setattr("nlflow.equilibria.bounds._DENSE_NODES", 5)
    monkeypatch.setattr("scipy.sparse.linalg.eigs", fails)
    with pytest.raises(
        nl.NumericalError, match="affinity: the limit was not found by Arnoldi iteration; use at most 5"
    ):
        nl.largest_stable_fidelity(given(ring(9) + 0.1 * directed_ring(9)))


@pytest.mark.numerical
@pytest.mark.parametrize("seed", range(12))
def test_bounds_hold_the_share_of_two_nodes_with_large_logits(seed: int) -> None:
    """lambda / (lambda + mu) with mu = K_01, beside which the diagonal of K may be 1e20 times as large."""
    rng = np.random.default_rng(seed)
    keys, queries = rng.normal(size=(2, 2, 4)) * 6
    logits = queries @ keys.T / 2
    mu = math.exp(logits[0, 1]) + math.exp(logits[1, 0])
    fidelity = mu * 10.0 ** rng.uniform(-2, 2)
    weights = nl.affinity(nl.ExpDotProduct(), nl.Points(np.arange(2.0)), keys, queries=queries)
    flow = nl.GradientFlow(nl.E(weights, np.array([0.3, -0.9]), fidelity), "l2")
    exact = fidelity / (fidelity + mu)
    low, high = nl.diversity_bounds(flow)
    # The exponential of a logit l has l roundings.
    assert low * (1 - 1e-12) <= exact <= high * (1 + 1e-12)
    assert high - low <= 1e-12 * exact
    found = nl.equilibrium(flow)
    assert found.success
    assert (found.u[0] - found.u[1]) / 1.2 == pytest.approx(exact, rel=1e-6)
