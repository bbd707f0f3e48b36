"""Low-rank affinities against all pairs: the bound of the error, large logits, queries unlike keys, edges of input."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import threadpoolctl

from benchmarks.resident import traced
from nlflow import (
    ExpDotProduct,
    Gaussian,
    GradientFlow,
    Grid,
    InputError,
    J,
    Laplace,
    MemoryLimitError,
    NumericalError,
    Points,
    TopHat,
    affinity,
    solve,
)
from nlflow.affinities import cholesky
from nlflow.affinities.lowrank import LowRankAffinity
from tests.reference import check_affinity, kept_bytes

pytestmark = pytest.mark.numerical

N = 240
WEIGHTS = np.random.default_rng(5).random(N) * 3 + 0.1
DOMAIN = Points(np.arange(float(N)), weights=WEIGHTS)


def normal(width: int, seed: int = 1, n: int = N) -> Any:
    return np.random.default_rng(seed).normal(size=(n, width))


def gathered(groups: int, width: int, spread: float, n: int = N) -> Any:
    """Points around a few places."""
    rng = np.random.default_rng(2)
    return rng.normal(size=(groups, width))[rng.integers(groups, size=n)] + spread * rng.normal(size=(n, width))


def logarithms(kernel: Any, q: Any, k: Any) -> Any:
    """Return log k_ij by the formulas, in float64."""
    q, k = np.asarray(q, np.float64), np.asarray(k, np.float64)
    if isinstance(kernel, ExpDotProduct):
        scale = q.shape[1] ** -0.5 if kernel.scale is None else kernel.scale
        return np.array([[scale * float(np.dot(a, b)) for b in k] for a in q]) + np.log(kernel.amplitude)
    distance = np.sqrt(np.array([((a - k) ** 2).sum(axis=1) for a in q]))
    logs = -(distance**2) / (2 * kernel.width**2) if isinstance(kernel, Gaussian) else -distance / kernel.width
    return logs + np.log(kernel.amplitude)


def exact(logs: Any, weights: Any = WEIGHTS) -> tuple[Any, Any]:
    """Return P and log d of a matrix of logarithms, each row about its largest entry."""
    logs = logs + np.log(weights)
    top = logs.max(axis=1, keepdims=True)
    terms = np.exp(logs - top)
    degree = terms.sum(axis=1, keepdims=True)
    return terms / degree, (top + np.log(degree))[:, 0]


def build(kernel: Any, keys: Any, queries: Any = None, domain: Any = DOMAIN, **options: Any) -> LowRankAffinity:
    options = {"rtol": 1e-4, "max_rank": 4 * len(keys)} | options
    return LowRankAffinity.from_features(kernel, domain, keys if queries is None else queries, keys, **options)


def worst_error(result: LowRankAffinity, p: Any) -> float:
    """Return |^Pu - Pu| for the signal with |u| <= 1 for which it is largest, measured."""
    difference = result.average(np.eye(len(p), dtype=result.dtype)).astype(np.float64) - p
    row = int(np.abs(difference).sum(axis=1).argmax())
    u = np.where(difference[row] > 0, 1, -1).astype(result.dtype)
    return float(np.abs(result.average(u).astype(np.float64) - p @ u)[row])


# --- the bound -------------------------------------------------------------------------------------------------------

CASES = {
    "gaussian": (Gaussian(width=2.0), normal(3)),
    "gaussian, many dimensions": (Gaussian(width=12.0, amplitude=3.0), normal(30)),
    "gaussian, heavy tails": (Gaussian(width=1.0), np.random.default_rng(3).standard_t(2, size=(N, 2))),
    "gaussian, groups": (Gaussian(width=1.0), gathered(7, 20, 1e-3)),
    "laplace on a line": (Laplace(width=1.0), np.random.default_rng(3).random((N, 1))),
    "laplace, groups": (Laplace(width=2.0), gathered(9, 16, 1e-6)),
    "dot product": (ExpDotProduct(), normal(3)),
    "dot product, large logits": (ExpDotProduct(scale=1.0, amplitude=0.5), normal(2) * 0.3 + [300.0, -40.0]),
    "dot product, groups": (ExpDotProduct(), gathered(8, 24, 1e-2)),
}


@pytest.mark.slow
@pytest.mark.parametrize("rtol", [1e-1, 1e-3, 1e-6, 1e-9])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.sampled(8)
def test_the_bound_holds_and_is_of_use(case: str, rtol: float) -> None:
    """What is measured stays below what is promised, at any rank, and not by orders without need."""
    kernel, x = CASES[case]
    p, log_degree = exact(logarithms(kernel, x, x))
    result = build(kernel, x, rtol=rtol)
    assert (result.method, result.symmetric, result.positive_semidefinite) == ("lowrank", True, True)
    assert 0 < result.error_estimate <= rtol
    measured = worst_error(result, p)
    assert measured <= result.error_estimate + 1e-13
    rounding = 1e-13 + 4 * np.finfo(np.float64).eps * np.abs(log_degree).max()
    assert np.abs(np.expm1(result.log_degree - log_degree)).max() <= result.error_estimate / 2 + rounding
    if result.rank < N and rtol >= 1e-6 and "groups" not in case:
        assert result.error_estimate <= 250 * measured


def factor_of(kernel: Any, x: Any, weights: Any, rtol: float) -> Any:
    whole = slice(0, N)
    sums = (cholesky.Sum(whole, whole, np.ones(N), weights / weights.max()),)
    return cholesky.factorize(kernel.log_matrix, x, sums, rtol=rtol, max_rank=N, seed=2)


CROWDED = np.sort(np.random.default_rng(4).random((N, 1)), axis=0) ** 6


@pytest.mark.parametrize(
    ("kernel", "x", "weights", "rtol"),
    [
        (Gaussian(width=2.0), normal(3), WEIGHTS, 1e-7),
        (Gaussian(width=1.0), gathered(7, 20, 1e-3), WEIGHTS, 1e-7),
        (Laplace(width=1.0), CROWDED, WEIGHTS, 1e-2),
        (Gaussian(width=0.3), CROWDED, np.exp(5 * normal(1, 3)[:, 0]), 1e-4),
        (Gaussian(width=5.0), CROWDED, np.exp(5 * normal(1, 3)[:, 0]), 1e-6),
    ],
)
def test_entries_of_the_remainder(kernel: Any, x: Any, weights: Any, rtol: float) -> None:
    """|R_pq| <= sqrt(Q_pp Q_qq) + gamma g_p g_q for all pairs, rounding amplified by pivots close together included."""
    factor = factor_of(kernel, x, weights, rtol)
    columns = np.concatenate(factor.columns, axis=1)
    matrix = np.exp(logarithms(kernel, x, x))
    remainder = matrix - columns @ columns.T
    room = np.outer(factor.root, factor.root) + factor.rounding * np.outer(factor.growth, factor.growth)
    assert (np.abs(remainder) / room).max() <= 1 + 1e-9
    np.testing.assert_allclose(remainder.diagonal(), factor.residual, rtol=0, atol=factor.rounding)
    assert np.abs(remainder[:, factor.pivots]).max() <= factor.rounding
    assert not np.triu(columns[factor.pivots], 1).any()
    # The interpolation weights by another way: least squares.
    weights = np.linalg.lstsq(matrix[np.ix_(factor.pivots, factor.pivots)], matrix[factor.pivots], rcond=None)[0]
    np.testing.assert_allclose(factor.growth, 1 + np.abs(weights).sum(axis=0), rtol=0.02)


def test_drawn_points_are_kept_as_if_drawn_one_at_a_time() -> None:
    """After a point that it overlaps by c a point has 1 - c^2 left, and is kept that often."""
    uniform = np.random.default_rng(3).random((4000, 3))
    matrix = np.array([[1.0, 0.8, 1.0], [0.8, 1.0, 0.8], [1.0, 0.8, 1.0]])
    kept = [cholesky._accepted(matrix, lambda i, left: left, u, 1e-15)[0] for u in uniform]
    assert all(k in ([0], [0, 1]) for k in kept)
    assert np.mean([len(k) == 2 for k in kept]) == pytest.approx(0.36, abs=0.03)
    triangle = cholesky._accepted(matrix, lambda i, left: left, uniform[0] * 0, 1e-15)[1]
    np.testing.assert_allclose(triangle, np.linalg.cholesky(matrix[:2, :2]), rtol=0, atol=1e-15)


def test_a_wider_tolerance_takes_a_lower_rank() -> None:
    kernel, x = CASES["gaussian"]
    ranks = [build(kernel, x, rtol=rtol).rank for rtol in (1e-1, 1e-3, 1e-6)]
    assert ranks == sorted(set(ranks))
    # The eigenvalues that a projection of that error has to keep are the least that any method needs.
    root = np.sqrt(WEIGHTS / WEIGHTS.sum())
    eigenvalues = np.linalg.eigvalsh(root[:, None] * np.exp(logarithms(kernel, x, x)) * root)[::-1]
    assert ranks[1] < 2.5 * int((eigenvalues > 1e-6).sum())


# --- the contract ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("domain", [DOMAIN, Grid((12, 20), (0.5, 2.0))])
@pytest.mark.parametrize("kernel", [Gaussian(width=2.5), Laplace(width=20.0), ExpDotProduct(scale=0.3, amplitude=0.5)])
@pytest.mark.sampled(3)
def test_contract(kernel: Any, domain: Any, dtype: Any) -> None:
    x = normal(2).astype(dtype)
    result = build(kernel, x, domain=domain, rtol=1e-2)
    assert result.dtype == dtype
    check_affinity(result, np.exp(logarithms(kernel, x, x)), dtype=dtype, tolerance=result.error_estimate)


def test_a_float32_signal_where_features_are_positions() -> None:
    """Without a dtype of its own (set by whoever passes positions) the affinity takes both precisions."""
    x = normal(2)
    result = build(Gaussian(width=2.0), x)
    expected = result.average(x)
    result.dtype = None
    assert result.average(x.astype(np.float32)).dtype == np.float32
    np.testing.assert_allclose(result.average(x.astype(np.float32)), expected, rtol=0, atol=1e-6)


def test_float32_counts_its_rounding() -> None:
    """The same features in both precisions: the factor kept in float32 costs digits, and the estimate says so."""
    x = normal(3).astype(np.float32)
    kernel = Gaussian(width=1.0)
    p, _ = exact(logarithms(kernel, x, x))
    single, double = build(kernel, x, rtol=1e-3), build(kernel, x.astype(np.float64), rtol=1e-3)
    assert single._columns[0].dtype == np.float32
    assert single.memory_bytes < 0.6 * double.memory_bytes
    assert worst_error(single, p) <= single.error_estimate + 1e-7
    if single.rank == double.rank:
        assert single.error_estimate > double.error_estimate
    with pytest.raises(NumericalError, match=r"rounding alone .* more than rtol=2e-05; use float64 features"):
        build(kernel, x, rtol=2e-5)


def test_constants_stay_to_the_last_bit() -> None:
    result = build(*CASES["gaussian"], rtol=0.5)
    for value in (1.0, -3e5, 1 / 3, 1e308, 5e-324):
        np.testing.assert_array_equal(result.average(np.full(N, value)), np.full(N, value))


@pytest.mark.parametrize("size", [1e307, 1e-300])
def test_signals_of_extreme_size(size: float) -> None:
    result = build(*CASES["dot product, large logits"])
    u = normal(2, 8)
    np.testing.assert_allclose(result.average(u * size) / size, result.average(u), rtol=0, atol=1e-12)


# --- dot products ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("apart", "ratio"), [(0.0, 1.0), (30.0, 1.0), (0.0, 20.0)])
def test_queries_unlike_keys(apart: float, ratio: float) -> None:
    """Bound, push and rank; clouds that lie apart or differ in size are brought together, so they cost nothing."""
    q, k = normal(3, 1) * ratio, (normal(3, 2) * 0.7 + apart) / ratio
    kernel = ExpDotProduct(scale=0.5)
    logs = logarithms(kernel, q, k)
    p, log_degree = exact(logs)
    result = build(kernel, k, q, rtol=1e-5)
    assert (result.symmetric, result.positive_semidefinite) == (False, False)
    assert result.error_estimate <= 1e-5
    assert worst_error(result, p) <= result.error_estimate
    np.testing.assert_allclose(result.log_degree, log_degree, rtol=0, atol=result.error_estimate)
    assert abs(result.rank - build(kernel, normal(3, 2) * 0.7, normal(3, 1), rtol=1e-5).rank) <= 0.2 * result.rank
    check_affinity(result)
    laws = np.random.default_rng(3).random((N, 3))
    error = np.abs(result.push(laws) - p.T @ laws).sum(axis=0)
    assert (error <= result.error_estimate * laws.sum(axis=0)).all()


@pytest.mark.parametrize("shift", [0.0, 25.0])
def test_symmetrized(shift: float) -> None:
    """K = k + k^T, whose two terms differ by factors that no float holds when logits are large."""
    q, k = normal(2, 1) * 0.6, normal(2, 2) * 0.5 + shift
    q[:, 0] += 2 * shift
    kernel = ExpDotProduct(scale=1.0, amplitude=2.0)
    logs = logarithms(kernel, q, k)
    p, log_degree = exact(np.logaddexp(logs, logs.T))
    given = build(kernel, k, q, rtol=1e-5)
    result: Any = given.symmetrized()
    assert isinstance(result, LowRankAffinity)
    assert (result.symmetric, result.positive_semidefinite, result.evolves) == (True, False, False)
    assert result.error_estimate <= 1e-5
    assert worst_error(result, p) <= result.error_estimate
    np.testing.assert_allclose(result.log_degree, log_degree, rtol=0, atol=result.error_estimate)
    if shift == 0:  # where log d is large its own rounding shows in what is self-adjoint in d
        check_affinity(result)
    # J by its double sum, in units of the total degree.
    u = normal(1, 4)[:, 0]
    k_sum = np.exp(np.logaddexp(logs, logs.T) - log_degree.max())
    products = WEIGHTS[:, None] * WEIGHTS * k_sum
    expected = 0.25 * (products * (u[:, None] - u) ** 2).sum() / products.sum()
    assert J(given).value(u, normalize=True) == pytest.approx(expected, abs=2e-5 * float(np.ptp(u)) ** 2)


def test_symmetrized_takes_the_same_pivots_each_time() -> None:
    given = build(ExpDotProduct(), normal(2, 1), normal(2, 2), rng=np.random.default_rng(3))
    first, second = given.symmetrized(), given.symmetrized()
    np.testing.assert_array_equal(first.average(WEIGHTS), second.average(WEIGHTS))
    with pytest.raises(InputError, match="has no exact sums here"):
        first.measure_error()


def test_logits_that_only_all_pairs_resolve_are_refused() -> None:
    """Keys of very different length: next to the heaviest the others' neighbours are below rounding."""
    with pytest.raises(NumericalError, match=r"rounding alone leaves .* method='pairwise' or a larger rtol"):
        build(ExpDotProduct(scale=1.0), normal(4) * 8)


# --- flows -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rtol", [1e-2, 1e-6])
def test_flow_stays_within_the_bound(rtol: float) -> None:
    """|exp(t (^P - I)) u - exp(t (P - I)) u| <= t b exp(t b) max|u - c|, b the bound: Duhamel's formula."""
    x, u, t = normal(3), normal(2, 9), 3.0
    kernel = Gaussian(width=1.5)
    result = build(kernel, x, rtol=rtol)
    dense = affinity(kernel, DOMAIN, x)
    ends = [solve(GradientFlow(J(a), metric="degree"), u, t=t).u for a in (result, dense)]
    bound = result.error_estimate
    difference = np.abs(ends[0] - ends[1]).max()
    assert difference <= t * bound * np.exp(t * bound) * float(np.ptp(u, axis=0).max()) / 2 + 1e-9
    assert difference > 1e-9 or rtol < 1e-2


# --- determinism, memory ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tiles", [1, 8])
@pytest.mark.sampled(1)
def test_the_same_bits_for_any_number_of_threads(tiles: int) -> None:
    """Few tiles, whose products BLAS would share between its threads, and so many that threads share the tiles."""
    n = tiles * cholesky.TILE + 1999
    x, domain = normal(3, n=n), Points(np.arange(float(n)))
    u = normal(64, 2, n=n)
    bits = []
    for threads in (1, 2):
        with threadpoolctl.threadpool_limits(threads, user_api="blas"):
            result = build(Gaussian(width=2.0), x, domain=domain, rtol=1e-3)
            bits.append([a.tobytes() for a in (result.log_degree, result.average(u), result.average(u[:, 0]))])
            libraries = threadpoolctl.threadpool_info()
            assert {one["num_threads"] for one in libraries if one["user_api"] == "blas"} == {threads}
    assert bits[0] == bits[1]


def test_callers_in_several_threads() -> None:
    """They get the same bits, and leave the number of BLAS threads as it was."""
    n = cholesky.TILE + 1999
    u = normal(64, 2, n=n)
    before = [library["num_threads"] for library in threadpoolctl.threadpool_info()]
    result = build(Gaussian(width=2.0), normal(3, n=n), domain=Points(np.arange(float(n))), rtol=1e-2)
    expected = result.average(u)
    same: list[bool] = []

    def work() -> None:
        same.extend(np.array_equal(result.average(u), expected) for _ in range(5))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert same == [True] * 20
    assert [library["num_threads"] for library in threadpoolctl.threadpool_info()] == before


def test_seeds() -> None:
    kernel, x = CASES["gaussian"]
    bits = [build(kernel, x, rng=seed).log_degree.tobytes() for seed in (0, 0, 1, np.random.default_rng(1))]
    assert bits[0] == bits[1]
    assert bits[0] != bits[2] == bits[3]


@pytest.mark.slow
def test_memory_grows_with_the_rank_and_not_with_pairs() -> None:
    n = 12_000
    x, domain = normal(3, n=n), Points(np.arange(float(n)))
    build(Gaussian(width=2.0), x[:N])  # loads what is loaded once
    with traced() as taken:
        result = build(Gaussian(width=2.0), x, domain=domain, max_rank=None, memory_limit=3e8)
    assert taken.bytes < 8 * n * (result.rank + 130) + 10**7 < 8 * n * n / 20
    assert abs(kept_bytes(result) - result.memory_bytes) <= 0.02 * result.memory_bytes + 2**16


def test_memory_limit() -> None:
    kernel, x = CASES["gaussian"]
    with pytest.raises(MemoryLimitError, match="a low-rank affinity of 240 nodes needs"):
        build(kernel, x, memory_limit=1e5)
    least = 8 * N * 150 + 8 * cholesky.TILE * cholesky.BLOCK * 8
    with pytest.raises(NumericalError, match=r"no higher rank is allowed; .* raise memory_limit"):
        build(kernel, x, rtol=1e-9, memory_limit=least + 16 * N * 40)


def test_max_rank() -> None:
    kernel, x = CASES["gaussian"]
    for rank in (1, 3, 20):
        with pytest.raises(NumericalError, match=f"rank {rank} for 240 nodes leaves an error bound of"):
            build(kernel, x, rtol=1e-9, max_rank=rank)


# --- edges -----------------------------------------------------------------------------------------------------------


def test_one_point() -> None:
    result = build(Gaussian(width=1.0), np.ones((1, 2)), domain=Points([0.0], weights=[2.0]), max_rank=None)
    assert (result.rank, float(result.log_degree[0])) == (1, np.log(2.0))
    np.testing.assert_array_equal(result.average(np.array([3.0])), [3.0])


@pytest.mark.parametrize(
    "kernel", [Gaussian(width=1e-3), Laplace(width=1e-3), ExpDotProduct(), ExpDotProduct(scale=0.0)]
)
def test_constant_features(kernel: Any) -> None:
    result = build(kernel, np.full((N, 3), 7.0), rtol=1e-10)
    assert result.rank == 1
    u = normal(2, 3)
    mean = (WEIGHTS[:, None] * u).sum(axis=0) / WEIGHTS.sum()
    np.testing.assert_allclose(result.average(u), np.tile(mean, (N, 1)), rtol=0, atol=1e-12)


def test_constant_queries_or_keys() -> None:
    k = normal(3)
    for queries, keys in ((np.zeros((N, 3)), k), (k, np.zeros((N, 3))), (k * 0 + 2, k * 0 - 1)):
        p, _ = exact(logarithms(ExpDotProduct(), queries, keys))
        assert worst_error(build(ExpDotProduct(), keys, queries, rtol=1e-6), p) <= 1e-6


def test_coincident_points_are_one_pivot() -> None:
    x = gathered(13, 5, 0.0)
    for kernel in (Gaussian(width=0.3), Laplace(width=0.3), ExpDotProduct()):
        result = build(kernel, x, rtol=1e-9)
        assert result.rank == 13
        p, _ = exact(logarithms(kernel, x, x))
        assert worst_error(result, p) <= result.error_estimate


def test_points_far_apart() -> None:
    """No point sees another: at the rank N all is exact, at a lower one nothing is."""
    x = 100 * np.arange(N, dtype=np.float64)[:, None]
    with pytest.raises(NumericalError, match=r"rank 64 for 240 nodes .*'pairwise', a larger rtol, a wider kernel"):
        build(Gaussian(width=1.0), x, max_rank=None)
    result = build(Gaussian(width=1.0), x, max_rank=N)
    assert result.rank == N
    u = normal(1, 3)[:, 0]
    np.testing.assert_allclose(result.average(u), u, rtol=0, atol=1e-12)


def test_features_at_the_ends_of_the_range() -> None:
    """Distances that overflow are infinite, affinities that underflow are 0, and nothing is said about it."""
    x = np.where(np.arange(N)[:, None] < N // 2, 1e200, -1e200)
    result = build(Gaussian(width=1.0), x)
    assert result.rank == 2
    np.testing.assert_allclose(result.average(np.sign(x[:, 0])), np.sign(x[:, 0]), rtol=0, atol=1e-15)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kernel": TopHat(radius=1.0)}, "kernel: got TopHat, expected one that is positive definite"),
        ({"kernel": ExpDotProduct(scale=-1.0)}, "scale: got -1, expected >= 0"),
        ({"queries": normal(3, 2)}, "queries: a radial kernel compares features with themselves"),
        ({"kernel": ExpDotProduct(), "queries": normal(2)}, r"queries: got shape \(240, 2\) of float64, expected"),
        ({"kernel": ExpDotProduct(), "queries": normal(3).astype(np.float32)}, "queries: got .* of float32, expected"),
        ({"keys": normal(3, n=12)}, r"features: got shape \(12, 3\), expected 240 rows"),
        ({"keys": np.full((N, 3), np.nan)}, "features: got 720 NaN"),
        ({"keys": normal(3)[:, 0]}, "features: got 1 dimension"),
        ({"kernel": ExpDotProduct(), "keys": normal(3) * 1e200}, "logits overflow; scale the features or the kernel"),
        ({"rtol": 0}, "rtol: got 0, expected a finite real number > 0 and < 1"),
        ({"rtol": 1}, "rtol: got 1, expected"),
        ({"rtol": 1e-11}, "rtol: got 1e-11, expected at least 1e-10 for features of float64; use method='pairwise'"),
        ({"rtol": 1e-6, "keys": normal(3).astype(np.float32)}, "at least 1e-05 .* float32; pass float64 features"),
        ({"max_rank": 0}, "max_rank: got 0, expected an integer >= 1"),
    ],
)
def test_bad_input(options: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        build(**{"kernel": Gaussian(width=2.0), "keys": normal(3)} | options)


def test_tensors_are_refused() -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(InputError, match=r"features: got Tensor, expected a NumPy array.*convert it \(.cpu"):
        build(Gaussian(width=2.0), torch.ones((N, 2)))
    with pytest.raises(InputError, match=r"u: got (a tensor|dtype)"):
        build(*CASES["gaussian"]).average(torch.ones(N))


def test_edges_are_not_listed() -> None:
    with pytest.raises(InputError, match="method 'lowrank' has all pairs of nodes as edges"):
        build(*CASES["gaussian"]).edges()
