"""Dense affinities: feature vectors, softmax attention, given matrices, and what they turn into."""

from __future__ import annotations

import decimal
import math
import re
from typing import Any

import numpy as np
import pytest

from benchmarks.resident import traced
from nlflow import (
    ExpDotProduct,
    Gaussian,
    Grid,
    InputError,
    J,
    Laplace,
    MemoryLimitError,
    NumericalError,
    Patch,
    Points,
    TopHat,
    affinity,
    from_matrix,
)
from nlflow.affinities import DenseAffinity, dense
from tests.reference import TOLERANCE, check_affinity, feature_matrix, kept_bytes, plain_average, plain_degree

pytestmark = pytest.mark.numerical

DTYPES = [np.float64, np.float32]
WEIGHTS = np.linspace(0.5, 2.0, 12)
POINTS = Points(np.arange(12.0), weights=WEIGHTS)


def features(width: int, dtype: Any = np.float64, seed: int = 1, n: int = 12) -> Any:
    return np.random.default_rng(seed).normal(size=(n, width)).astype(dtype)


# --- node positions and feature vectors ------------------------------------------------------------------------------

RADIAL = [Gaussian(width=0.8), Laplace(width=0.5, amplitude=2.0), TopHat(radius=1.1)]


@pytest.mark.parametrize("kernel", RADIAL)
@pytest.mark.parametrize("dimension", [1, 2, 3])
def test_scattered_points(kernel: Any, dimension: int) -> None:
    x = features(dimension)
    domain = Points(x if dimension > 1 else x.ravel(), weights=WEIGHTS)
    result = affinity(kernel, domain)
    assert result.method == "dense"
    assert not result.evolves
    check_affinity(result, feature_matrix(kernel, x, x))


@pytest.mark.parametrize("kernel", [Gaussian(width=0.8), Laplace(width=0.5)])
def test_float32_signal_on_scattered_points(kernel: Any) -> None:
    """Node positions are float64, signals are what they are: float32 stays float32."""
    x = features(2)
    check_affinity(affinity(kernel, Points(x, weights=WEIGHTS)), feature_matrix(kernel, x, x), dtype=np.float32)


def test_float32_signal_on_a_dense_grid() -> None:
    """What the stencil and the convolution of the same kernel take, the dense reference takes as well."""
    u = features(2, np.float32)
    result = affinity(Gaussian(width=1.0), Grid(12), method="dense").average(u)
    assert result.dtype == np.float32
    np.testing.assert_allclose(result, affinity(Gaussian(width=1.0), Grid(12)).average(u), rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("domain", [POINTS, Grid((3, 4), (0.5, 2.0)), Grid(12, boundary="periodic")])
@pytest.mark.parametrize("kernel", [*RADIAL, ExpDotProduct(), ExpDotProduct(scale=-0.4, amplitude=0.5)])
def test_features(kernel: Any, domain: Any, dtype: Any) -> None:
    """Features are compared in all pairs, on any domain; its boundary plays no part."""
    x = features(3, dtype)
    result = affinity(kernel, domain, x.reshape(*domain.shape, 3))
    assert (result.method, result.dtype, result.symmetric) == ("dense", dtype, True)
    assert result.positive_semidefinite == kernel.positive_semidefinite
    check_affinity(result, feature_matrix(kernel, x, x), dtype=dtype)


@pytest.mark.parametrize("kernel", RADIAL)
def test_one_feature_without_a_channel_axis(kernel: Any) -> None:
    grey = features(1)
    check_affinity(affinity(kernel, POINTS, grey.ravel()), feature_matrix(kernel, grey, grey))


@pytest.mark.parametrize("dtype", DTYPES)
def test_queries_and_keys(dtype: Any) -> None:
    queries, keys = features(4, dtype, 1), features(4, dtype, 2)
    result = affinity(ExpDotProduct(), POINTS, keys, queries=queries)
    assert not result.symmetric
    assert not result.positive_semidefinite
    assert not result.evolves
    check_affinity(result, feature_matrix(ExpDotProduct(), queries, keys), dtype=dtype)


def test_queries_equal_to_keys_are_symmetric() -> None:
    keys = features(4)
    result = affinity(ExpDotProduct(), POINTS, keys, queries=keys.copy())
    assert result.symmetric
    assert result.positive_semidefinite
    check_affinity(result, feature_matrix(ExpDotProduct(), keys, keys))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("given", ["query_map", "key_map", "both"])
def test_maps(given: str, dtype: Any) -> None:
    x = features(3, dtype)
    maps = {"query_map": features(3, dtype, 2, n=3), "key_map": features(3, dtype, 3, n=3)}
    used = maps if given == "both" else {given: maps[given]}
    result = affinity(ExpDotProduct(scale=0.3, **used), POINTS, x)
    assert not result.symmetric
    queries = x @ used["query_map"] if "query_map" in used else x
    keys = x @ used["key_map"] if "key_map" in used else x
    check_affinity(result, feature_matrix(ExpDotProduct(scale=0.3), queries, keys), dtype=dtype)


def test_maps_of_given_queries() -> None:
    """The query map is applied to the queries, the key map to the features."""
    queries, keys = features(3, seed=1), features(3, seed=2)
    maps = {"query_map": features(2, seed=3, n=3), "key_map": features(2, seed=4, n=3)}
    result = affinity(ExpDotProduct(**maps), POINTS, keys, queries=queries)
    check_affinity(result, feature_matrix(ExpDotProduct(), queries @ maps["query_map"], keys @ maps["key_map"]))


def test_maps_give_queries_and_keys_another_width() -> None:
    x = features(5)
    kernel = ExpDotProduct(query_map=features(2, seed=2, n=5), key_map=features(2, seed=3, n=5))
    matrix = feature_matrix(ExpDotProduct(), x @ kernel.query_map, x @ kernel.key_map)
    check_affinity(affinity(kernel, POINTS, x), matrix)


def test_map_that_does_not_fit() -> None:
    kernel = ExpDotProduct(query_map=features(2, n=4), key_map=features(2, n=5))
    with pytest.raises(InputError, match=r"query_map: got shape \(4, 2\), expected 5 rows"):
        affinity(kernel, POINTS, features(5))
    with pytest.raises(InputError, match="queries: got width 3, expected 5, the width of the keys"):
        affinity(ExpDotProduct(query_map=features(3, n=5)), POINTS, features(5))


def test_several_blocks_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are formed a block at a time; where they are cut makes no difference, and a zero row is named."""
    queries, keys = features(4, seed=1), features(4, seed=2)
    matrix = feature_matrix(ExpDotProduct(), queries, keys)
    given = matrix.copy()
    given[9] = 0
    monkeypatch.setattr(dense, "_BLOCK_BYTES", 5 * 12 * 8)
    result = affinity(ExpDotProduct(), POINTS, keys, queries=queries)
    check_affinity(result, matrix)
    check_affinity(result.symmetrized(), matrix + matrix.T)
    check_affinity(from_matrix(matrix, POINTS), matrix)
    with pytest.raises(InputError, match="row 9 is zero"):
        from_matrix(given, POINTS)


# --- logits of any size ----------------------------------------------------------------------------------------------


def exact_average(logits: Any, weights: Any, u: Any) -> tuple[Any, Any]:
    """Return sum_j w_j e^l u_j / d and log d with 60 digits, rounded to float64 in the end."""
    with decimal.localcontext(decimal.Context(prec=60)):
        terms = [
            [decimal.Decimal(float(w)) * decimal.Decimal(float(x)).exp() for w, x in zip(weights, row, strict=True)]
            for row in logits
        ]
        degrees = [sum(row) for row in terms]
        averages = [
            sum(t * decimal.Decimal(float(v)) for t, v in zip(row, u, strict=True)) / d
            for row, d in zip(terms, degrees, strict=True)
        ]
        return np.array([float(a) for a in averages]), np.array([float(d.ln()) for d in degrees])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("top", [50.0, 700.0, 1e4])
def test_large_logits(top: float, dtype: Any) -> None:
    """Logits of +-1e4, exact in binary: nothing overflows and the averages are right to rounding."""
    q = (np.array([1, 1, -1, 1, -1, 0.5, 0, 1, -0.5, 1, 0.25, -1]) * np.sqrt(top)).astype(dtype)
    k = q[::-1].copy()
    k[3] = k[2] * (1 - 2.0**-12)  # a logit within a few units of the largest one
    u = features(1, dtype).ravel()
    result = affinity(ExpDotProduct(scale=1.0), POINTS, k, queries=q)
    logits = np.outer(q.astype(np.float64), k.astype(np.float64))
    expected, log_degree = exact_average(logits, WEIGHTS, u)
    tolerance = TOLERANCE[np.dtype(dtype)]
    np.testing.assert_allclose(result.average(u), expected, rtol=0, atol=tolerance)
    np.testing.assert_allclose(result.log_degree, log_degree, rtol=tolerance, atol=tolerance)
    both = result.symmetrized()
    expected, log_degree = exact_average(np.logaddexp(logits, logits.T), WEIGHTS, u)
    np.testing.assert_allclose(both.average(u), expected, rtol=0, atol=tolerance)
    np.testing.assert_allclose(both.log_degree, log_degree, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("top", "dtype"), [(1e4, np.float64), (-1e4, np.float64), (100.0, np.float32)])
def test_degree_that_cannot_be_represented(top: float, dtype: Any) -> None:
    x = np.full(12, math.sqrt(abs(top)), dtype)
    result = affinity(ExpDotProduct(scale=math.copysign(1.0, top)), POINTS, x)
    first = re.escape(f"{float(result.log_degree.min()):.4g}")
    with pytest.raises(NumericalError, match=f"degree: log d runs from {first} to .* cannot be represented; use the"):
        _ = result.degree
    assert np.isfinite(result.average(x)).all()
    with pytest.raises(NumericalError, match="degree"):
        J(result).gradient(x)
    assert np.isfinite(J(result).gradient(x, "degree")).all()


# --- K = k + k^T, multiples, evolving kernels ------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("amplitude", [1.0, 0.5])
def test_symmetrized(amplitude: float, dtype: Any) -> None:
    queries, keys = features(4, dtype, 1), features(4, dtype, 2)
    kernel = ExpDotProduct(amplitude=amplitude)
    k = feature_matrix(kernel, queries, keys)
    given = affinity(kernel, POINTS, keys, queries=queries)
    both = given.symmetrized()
    assert both.symmetric
    check_affinity(both, k + k.T, dtype=dtype)
    check_affinity(both.symmetrized(), 2 * (k + k.T), dtype=dtype)
    check_affinity(given.scaled(3.0).symmetrized(), 3 * (k + k.T), dtype=dtype)


def test_symmetric_affinities_share_their_data() -> None:
    """K = 2 k for a symmetric k, without a copy; a paper that gives K itself has k = K / 2."""
    keys = features(4)
    k = feature_matrix(ExpDotProduct(), keys, keys)
    given = affinity(ExpDotProduct(amplitude=0.5), POINTS, keys)
    both = given.symmetrized()
    assert isinstance(given, DenseAffinity)
    assert isinstance(both, DenseAffinity)
    assert both.matrix is given.matrix
    check_affinity(both, k)


@pytest.mark.parametrize("factor", [0.25, 1e-300, 3])
def test_scaled(factor: float) -> None:
    kernel, domain = Gaussian(width=0.8, amplitude=2.0), Grid(12)
    for result in (affinity(kernel, domain), affinity(Patch(1.0, 3, 2), domain, features(1).ravel())):
        scaled = result.scaled(factor)
        u = features(2)
        np.testing.assert_array_equal(scaled.average(u), result.average(u))
        np.testing.assert_allclose(scaled.degree, factor * result.degree, rtol=1e-12)
        np.testing.assert_allclose(scaled.scaled(1 / factor).log_degree, result.log_degree, rtol=0, atol=1e-12)
    with pytest.raises(InputError, match="factor: got -1"):
        result.scaled(-1)


EVOLVING: dict[str, Any] = {
    "patch": lambda u: affinity(Patch(1.0, 3, 2), Grid(12), u),
    "patch, store=False": lambda u: affinity(Patch(1.0, 3, 2), Grid(12), u, store=False),
    "patch, dense": lambda u: affinity(Patch(1.0, 3, 2), Grid(12), u, method="dense"),
    "radial": lambda u: affinity(Gaussian(width=1.0), Grid(12), u),
    "dot product": lambda u: affinity(ExpDotProduct(amplitude=0.5), POINTS, u),
    "maps": lambda u: affinity(ExpDotProduct(query_map=features(2, n=3), key_map=features(2, seed=2, n=3)), POINTS, u),
}


@pytest.mark.parametrize("change", ["as it is", "scaled", "symmetrized", "scaled and symmetrized"])
@pytest.mark.parametrize("name", EVOLVING)
def test_update(name: str, change: str) -> None:
    """An updated affinity is the one built from the new signal, with the options and the factors of the old one."""

    def changed(result: Any) -> Any:
        result = result.scaled(3.0) if "scaled" in change else result
        return result.symmetrized() if "symmetrized" in change else result

    first, second = features(3, seed=1), features(3, seed=2)
    u = features(2, seed=3)
    updated, expected = changed(EVOLVING[name](first)).update(second), changed(EVOLVING[name](second))
    assert updated.evolves
    assert type(updated) is type(expected)
    assert updated.memory_bytes == expected.memory_bytes
    for result in (updated, updated.update(first).update(second)):
        np.testing.assert_array_equal(result.average(u), expected.average(u))
        np.testing.assert_allclose(result.log_degree, expected.log_degree, rtol=0, atol=1e-13)


@pytest.mark.parametrize(
    "result",
    [
        affinity(Gaussian(width=1.0), Grid(12)),
        affinity(Gaussian(width=1.0), POINTS),
        affinity(ExpDotProduct(), POINTS, features(2), queries=features(2, seed=2)),
        from_matrix(np.eye(12), POINTS),
    ],
)
def test_what_does_not_evolve(result: Any) -> None:
    assert not result.evolves
    with pytest.raises(InputError, match=r"affinity: .*features=u"):
        result.update(features(2))


def test_what_is_no_signal_updates_nothing() -> None:
    result = affinity(Gaussian(width=1.0), POINTS, features(2))
    with pytest.raises(InputError, match=r"^u: got shape \(3,\), expected \(12,\) or \(12, 'D'\)"):
        result.update(np.ones(3))


# --- given matrices --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("symmetric", [True, False])
def test_from_matrix(symmetric: bool, dtype: Any) -> None:
    matrix = np.random.default_rng(4).random((12, 12)) * (np.random.default_rng(5).random((12, 12)) < 0.4) + np.eye(12)
    matrix = matrix + matrix.T if symmetric else matrix
    matrix = matrix.astype(dtype)
    domain = Grid((3, 4), (0.5, 0.25))
    result = from_matrix(matrix, domain)
    assert result.symmetric == symmetric
    assert result.kernel is None
    assert result.reason
    check_affinity(result, matrix.astype(np.float64), dtype=dtype)
    check_affinity(result.symmetrized(), matrix.astype(np.float64) + matrix.T, dtype=dtype)


def test_from_matrix_of_whole_numbers() -> None:
    """A graph's adjacency is a matrix of whole numbers, perhaps a list of lists."""
    ring = [[1, 1, 0, 1], [1, 1, 1, 0], [0, 1, 1, 1], [1, 0, 1, 1]]
    result = from_matrix(ring, Points(np.arange(4.0), volume=4.0))
    np.testing.assert_allclose(result.average([3.0, 0, 0, 0]), [1, 1, 0, 1], rtol=1e-15)
    np.testing.assert_allclose(result.degree, 3, rtol=1e-15)


@pytest.mark.parametrize(
    ("matrix", "message"),
    [
        (np.ones((3, 4)), r"matrix: got shape \(3, 4\), expected \(4, 4\), one row for each node"),
        (np.ones((5, 5)), r"matrix: got shape \(5, 5\), expected \(4, 4\)"),
        (np.ones(16), r"matrix: got 1 dimension\(s\) \(shape \(16,\)\), expected 2"),
        (np.eye(4) - 0.5, r"matrix: got a negative entry \(-0.5\), expected affinities >= 0"),
        (np.full((4, 4), np.nan), "matrix: got 16 NaN or infinite"),
        (np.full((4, 4), np.inf), "matrix: got 16 NaN or infinite"),
        (np.diag([1.0, 1, 0, 1]), "affinity: row 2 is zero or not finite; every node needs a neighbour"),
        (np.eye(4) * 1j, "matrix: got complex values"),
    ],
)
def test_from_matrix_refuses(matrix: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        from_matrix(matrix, Grid((2, 2)))
    with pytest.raises(InputError, match="domain: got tuple, expected a Grid or Points"):
        from_matrix(np.eye(4), (2, 2))  # type: ignore[arg-type]


def test_a_matrix_beyond_the_memory_limit_is_not_copied() -> None:
    """One that is not symmetric would be kept beside what is made of it."""
    n = 600
    matrix = np.random.default_rng(2).random((n, n))
    with traced() as taken, pytest.raises(MemoryLimitError, match=r"a dense affinity of 600 nodes needs"):
        from_matrix(matrix, Points(np.arange(float(n))), memory_limit=matrix.nbytes)
    assert taken.bytes < matrix.nbytes / 2


def test_memory_of_dense_affinities_is_what_is_kept() -> None:
    x = features(50, n=200)
    domain = Points(np.arange(200.0))
    for result in (
        affinity(ExpDotProduct(), domain, x),
        affinity(ExpDotProduct(), domain, x, queries=x[::-1].copy()),
        from_matrix(np.exp(-((x @ x.T) ** 2)), domain),
    ):
        kept = kept_bytes(result)
        assert abs(result.memory_bytes - kept) <= 0.05 * kept, f"{result.memory_bytes} stated, {kept} kept"


# --- attention -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("container", ["numpy", "torch"])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-13), ("float32", 1e-6)])
@pytest.mark.parametrize("symmetric", [True, False])
def test_one_average_is_softmax_attention(symmetric: bool, dtype: str, tolerance: float, container: str) -> None:
    """Theorem 1 of arXiv 2312.00751: with K = exp(k.k'/sqrt(d)) the average is attention, and with queries too."""
    torch = pytest.importorskip("torch", reason="compares with torch's attention")
    n, d = 40, 8
    queries, keys, values = (torch.from_numpy(features(d, dtype, seed, n=n)) for seed in (1, 2, 3))
    queries = keys if symmetric else queries
    expected = torch.nn.functional.scaled_dot_product_attention(queries, keys, values)
    given = [a.numpy() if container == "numpy" else a for a in (queries, keys, values)]
    result = affinity(ExpDotProduct(amplitude=0.5), Points(np.arange(float(n))), given[1], queries=given[0])
    assert result.symmetric == symmetric
    got = result.average(given[2])
    assert type(got) is type(given[2])
    assert got.dtype == given[2].dtype
    assert float(np.abs(np.asarray(got) - expected.numpy()).max()) <= tolerance


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("kernel", [*RADIAL, ExpDotProduct(), "maps"], ids=str)
def test_torch_gives_the_numbers_of_numpy(kernel: Any, dtype: str) -> None:
    torch = pytest.importorskip("torch", reason="the device code")
    x, u = features(3, dtype), features(2, dtype, 2)
    kernels = [kernel, kernel]
    if kernel == "maps":
        maps = {"query_map": features(2, dtype, 3, n=3), "key_map": features(2, dtype, 4, n=3)}
        kernels = [ExpDotProduct(**maps), ExpDotProduct(**{name: torch.from_numpy(m) for name, m in maps.items()})]
    results = [affinity(kernels[0], POINTS, x), affinity(kernels[1], POINTS, torch.from_numpy(x))]
    tolerance = TOLERANCE[np.dtype(dtype)]
    for here, there in (results, [result.symmetrized() for result in results]):
        assert here.symmetric == there.symmetric
        assert isinstance(there.log_degree, torch.Tensor)
        np.testing.assert_allclose(there.log_degree.numpy(), here.log_degree, rtol=0, atol=tolerance)
        for signal in (u, u[:, 0].copy(), u[:, :1].copy()):
            got = there.average(torch.from_numpy(signal))
            assert isinstance(got, torch.Tensor)
            assert got.dtype == getattr(torch, dtype)
            np.testing.assert_allclose(got.numpy(), here.average(signal), rtol=0, atol=tolerance)


def test_from_matrix_of_torch() -> None:
    torch = pytest.importorskip("torch", reason="the device code")
    matrix = np.random.default_rng(4).random((12, 12)) * (np.random.default_rng(5).random((12, 12)) < 0.5) + np.eye(12)
    u = features(2)
    result = from_matrix(torch.from_numpy(matrix), POINTS)
    for got, k in ((result, matrix), (result.symmetrized(), matrix + matrix.T)):
        average = got.average(torch.from_numpy(u))
        assert isinstance(average, torch.Tensor)
        np.testing.assert_allclose(average.numpy(), plain_average(k, WEIGHTS, u), rtol=0, atol=1e-14)
        np.testing.assert_allclose(got.degree.numpy(), plain_degree(k, WEIGHTS), rtol=1e-13)
