"""Kernel sums between scattered nodes without a matrix, against plain double sums in float64."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from benchmarks.resident import traced
from nlflow import (
    E,
    ExpDotProduct,
    Gaussian,
    GradientFlow,
    Grid,
    InputError,
    J,
    Laplace,
    MemoryLimitError,
    NlflowWarning,
    NumericalError,
    Patch,
    Points,
    TopHat,
    affinity,
    solve,
)
from nlflow.affinities.neighbours import _Nodes
from nlflow.affinities.nonuniform import count_modes
from nlflow.affinities.pair_sums import PairSums
from nlflow.affinities.regions import Frame, along_axes
from tests.covering import pairs

pytestmark = pytest.mark.numerical

Floats = NDArray[Any]
KERNELS = {
    "gaussian": Gaussian(0.7),
    "laplace": Laplace(0.9),
    "top hat": TopHat(1.6),
    "dot product": ExpDotProduct(),
    "steep dot product": ExpDotProduct(scale=8.0),
    "negative dot product": ExpDotProduct(scale=-0.5),
}
ROUNDING = {"float64": 1e-13, "float32": 3e-6}


def plain(kernel: Any, queries: Floats, keys: Floats, weights: Floats, u: Floats) -> tuple[Floats, Floats]:
    """Return (Pu, log d) row by row, from the formulas themselves."""
    q, k, v = (a.astype(np.float64) for a in (queries, keys, u))
    average, log_degree = np.empty_like(v), np.empty(len(q))
    for i in range(len(q)):
        r = np.sqrt(np.sum((q[i] - k) ** 2, axis=1))
        if isinstance(kernel, Gaussian):
            logs = -(r**2) / (2 * kernel.width**2)
        elif isinstance(kernel, Laplace):
            logs = -r / kernel.width
        elif isinstance(kernel, TopHat):
            logs = np.where(r <= kernel.radius * (1 + 1e-12), 0.0, -np.inf)
        else:
            logs = k @ q[i] * (1 / np.sqrt(k.shape[1]) if kernel.scale is None else kernel.scale)
        logs = logs + np.log(weights)
        peak = logs.max()
        shares = np.exp(logs - peak)
        average[i] = shares @ v / shares.sum()
        log_degree[i] = peak + np.log(shares.sum())
    return average, log_degree


def nodes(n: int, d: int, dtype: str = "float64", seed: int = 0) -> tuple[Floats, Points, Floats]:
    """Return features, a domain with weights of its own, and a second set of features."""
    rng = np.random.default_rng(seed)
    domain = Points(np.arange(float(n)), weights=rng.uniform(0.5, 2, n))
    return rng.normal(size=(n, d)).astype(dtype), domain, rng.normal(size=(n, d)).astype(dtype)


# A loop is compiled for each dimension up to a few and for two widths of channels; all of them meet each kernel.
@pytest.mark.slow
@pytest.mark.parametrize(("d", "name", "dtype"), pairs([1, 2, 3, 4, 5, 8, 16, 17, 40], list(KERNELS), list(ROUNDING)))
@pytest.mark.sampled(11)
def test_averages_and_degrees(d: int, name: str, dtype: str) -> None:
    x, domain, _ = nodes(301, d, dtype)
    x *= np.float64(d) ** -0.5
    x = x.astype(dtype)
    p = affinity(KERNELS[name], domain, x, method="pairwise")
    for shape in [(301,), (301, 1), (301, 2), (301, 3), (301, 6), (301, 17)]:
        u = np.random.default_rng(1).normal(size=shape).astype(dtype)
        average, log_degree = plain(KERNELS[name], x, x, domain.weights, u.reshape(301, -1))
        result = p.average(u)
        assert result.dtype == u.dtype
        np.testing.assert_allclose(result.reshape(301, -1), average, rtol=0, atol=4 * ROUNDING[dtype])
        np.testing.assert_allclose(p.log_degree, log_degree, rtol=ROUNDING[dtype], atol=ROUNDING[dtype])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "name", "dtype"),
    pairs(
        [(1, 2), (2, 1), (63, 3), (64, 3), (65, 3), (1023, 2), (1024, 2), (2500, 2)],
        ["gaussian", "laplace", "dot product"],
        list(ROUNDING),
    ),
)
@pytest.mark.sampled(5)
def test_sizes_at_the_edges_of_tiles_and_blocks(size: tuple[int, int], name: str, dtype: str) -> None:
    n, d = size
    x, domain, q = nodes(n, d, dtype)
    u = np.random.default_rng(1).normal(size=(n, 2)).astype(dtype)
    dot = name == "dot product"
    p = affinity(KERNELS[name], domain, x, queries=q if dot else None, method="pairwise")
    average, _ = plain(KERNELS[name], q if dot else x, x, domain.weights, u)
    np.testing.assert_allclose(p.average(u), average, rtol=0, atol=4 * ROUNDING[dtype])


@pytest.mark.slow
@pytest.mark.parametrize("width", [0.003, 0.05, 1.0, 1e6])
@pytest.mark.parametrize("name", ["gaussian", "laplace", "top hat"])
@pytest.mark.sampled(3)
def test_blocks_that_are_skipped_change_nothing(name: str, width: float) -> None:
    rng = np.random.default_rng(2)
    x = np.concatenate([rng.uniform(size=(1500, 2)), 5 + 0.01 * rng.normal(size=(300, 2)), [[100.0, -40.0]]])
    domain, u = Points(x, weights=rng.uniform(0.1, 3, len(x))), rng.normal(size=len(x))
    kernel = type(KERNELS[name])(width)  # type: ignore[call-arg]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NlflowWarning)  # of the narrowest ones, which leave nodes alone
        p = affinity(kernel, domain, method="pairwise")
        average, log_degree = plain(kernel, x, x, domain.weights, u[:, None])
        np.testing.assert_allclose(p.average(u), average[:, 0], rtol=0, atol=1e-13)
        np.testing.assert_allclose(p.log_degree, log_degree, rtol=0, atol=1e-13)


def test_float32_nodes_of_a_wide_domain_keep_their_differences() -> None:
    # Differences of float32 positions are exact; scaled or moved before they are subtracted, they would not be.
    rng = np.random.default_rng(3)
    x = (1000 + np.cumsum(rng.uniform(0, 0.01, 2000))).astype(np.float32)[:, None]
    domain, u = Points(np.arange(2000.0)), rng.normal(size=2000).astype(np.float32)
    average, _ = plain(Gaussian(0.02), x, x, domain.weights, u[:, None])
    result = affinity(Gaussian(0.02), domain, x, method="pairwise").average(u)
    np.testing.assert_allclose(result, average[:, 0], rtol=0, atol=3e-6)


@pytest.mark.parametrize("kernel", [Gaussian(0.002), Laplace(0.002), TopHat(0.005)], ids=lambda k: type(k).__name__)
def test_positions_in_float64_serve_signals_in_float32(kernel: Any) -> None:
    rng = np.random.default_rng(4)
    domain, u = Points(1000 + rng.uniform(size=2000)), rng.normal(size=2000)
    p = affinity(kernel, domain, method="pairwise")
    coarse = p.average(u.astype(np.float32))
    assert coarse.dtype == np.float32
    np.testing.assert_allclose(coarse, p.average(u), rtol=0, atol=3e-6)


def test_a_million_terms_in_float32() -> None:
    # Three wide clusters of equal points: every sum has a million terms, and a closed form.
    n = 10**6
    x = np.repeat(np.float32([0, 1, 3]), [n // 2, n // 4, n // 4])[:, None]
    u = np.linspace(0, 1, n, dtype=np.float32)
    p = affinity(Gaussian(2.0), Points(np.zeros(n)), x, method="pairwise")
    rows = np.array([0, n // 2 + 5, n - 1])
    sums, totals, peaks = p.pairs(u[:, None], rows)
    np.testing.assert_allclose(peaks, -np.log(n), rtol=1e-15)  # sums are relative to the largest weight
    means = np.array([u[x[:, 0] == c].sum(dtype=np.float64) for c in (0, 1, 3)])
    share = np.array([np.mean(x == c) * n for c in (0, 1, 3)])
    k = np.exp(-((x[rows] - np.array([0.0, 1.0, 3.0])) ** 2) / 8)
    np.testing.assert_allclose(totals, k @ share, rtol=1e-6)
    np.testing.assert_allclose(sums[:, 0], k @ means, rtol=1e-6)


def test_a_sum_of_a_million_terms_is_pairwise() -> None:
    n = 2**20
    x = np.zeros((n, 1), np.float32)
    p = affinity(Gaussian(1.0), Points(np.zeros(n), weights=np.ones(n)), x, method="pairwise")
    sums, totals, _ = p.pairs(np.full((n, 1), 1 / 3, np.float32), np.array([0]))
    assert totals[0] == n
    assert sums[0, 0] == pytest.approx(n * float(np.float32(1 / 3)), rel=1e-6)


@pytest.mark.parametrize(
    ("name", "dtype", "d", "same"), pairs(["dot product", "steep dot product"], list(ROUNDING), [3, 20], [True, False])
)
def test_push_and_the_symmetrized(name: str, dtype: str, d: int, same: bool) -> None:
    x, domain, q = nodes(400, d, dtype)
    kernel = KERNELS[name]
    p = affinity(kernel, domain, x, queries=None if same else q, method="pairwise")
    exact = [a.astype(np.float64) for a in (x, x if same else q)]
    dense = affinity(kernel, domain, exact[0], queries=None if same else exact[1], method="dense")
    law = np.random.default_rng(1).dirichlet(np.ones(400), 2).T.astype(dtype)
    assert p.push(law) == pytest.approx(dense.push(law.astype(np.float64)), rel=0, abs=10 * ROUNDING[dtype])
    both, reference = p.symmetrized(), dense.symmetrized()
    u = law * 400
    average = reference.average(u.astype(np.float64))
    # A difference of two logarithms of up to 100 decides how the two averages are mixed.
    assert both.average(u) == pytest.approx(average, rel=0, abs=30 * ROUNDING[dtype] * float(np.abs(u).max()))
    assert both.log_degree == pytest.approx(reference.log_degree, rel=ROUNDING[dtype], abs=ROUNDING[dtype])
    assert both.symmetric


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("order", ["rising", "falling", "all low", "all high", "one row of each"])
def test_logits_of_any_size_and_order(order: str, dtype: str) -> None:
    # They are taken relative to a number that is kept while it serves, and has to be changed here.
    n, rng = 601, np.random.default_rng(3)
    steps = np.linspace(0, 1, n)
    largest = 60.0 if dtype == "float32" else 900.0
    keys = {
        "rising": largest * steps, "falling": -largest * steps, "all low": steps - largest, "all high": largest - steps,
        "one row of each": largest * np.sin(40 * steps),
    }[order]  # fmt: skip
    x = np.stack([np.ones(n), keys], axis=1).astype(dtype)
    q = np.stack([np.zeros(n), np.ones(n)], axis=1).astype(dtype)
    if order == "one row of each":
        q = np.stack([rng.uniform(-50, 50, n), rng.uniform(-1, 1, n)], axis=1).astype(dtype)
    u = rng.normal(size=(n, 3)).astype(dtype)
    domain = Points(np.zeros(n), weights=rng.uniform(0.5, 2, n))
    average, log_degree = plain(ExpDotProduct(scale=1.0), q, x, domain.weights, u)
    p = affinity(ExpDotProduct(scale=1.0), domain, x, queries=q, method="pairwise")
    size = 4 * largest * np.finfo(dtype).eps  # of a rounding of the logits
    np.testing.assert_allclose(p.average(u), average, rtol=0, atol=ROUNDING[dtype] + 4 * size)
    np.testing.assert_allclose(p.log_degree, log_degree, rtol=0, atol=ROUNDING[dtype] + size)


def narrower_processors() -> list[Any]:
    """Return the processors other than this one that loops can be compiled for here."""
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    reason = "x86 processors' instructions cannot be run here"
    return [
        pytest.param(*case, id=case[0], marks=pytest.mark.skipif(not x86, reason=reason))
        for case in (("haswell", "+avx,+avx2,+fma", 32), ("generic", "", 16))
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("processor", "features", "width"), narrower_processors())
def test_processors_with_narrower_vectors(processor: str, features: str, width: int, tmp_path: Path) -> None:
    code = """
        import numpy as np
        from nlflow import ExpDotProduct, Gaussian, Points, affinity
        from nlflow.backends.numba.vectors import AVX512, BYTES

        rng = np.random.default_rng(0)
        x, u = rng.normal(size=(150, 3)), rng.normal(size=(150, 2))
        for dtype, error in (("float64", 1e-14), ("float32", 4e-6)):
            for kernel in (Gaussian(0.3), ExpDotProduct(scale=3.0)):
                exact = affinity(kernel, Points(np.zeros(150)), x, method="dense").average(u)
                p = affinity(kernel, Points(np.zeros(150)), x.astype(dtype), method="pairwise")
                assert p.pairs.precision(dtype) == dtype, kernel
                assert np.abs(p.average(u.astype(dtype)) - exact).max() <= error, (dtype, kernel)
        print(AVX512, BYTES)
    """
    environment = {
        **os.environ, "NUMBA_CPU_NAME": processor, "NUMBA_CPU_FEATURES": features, "NUMBA_CACHE_DIR": str(tmp_path),
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.stdout.split() == ["False", str(width)], done.stderr


def test_attention_is_torch_attention() -> None:
    x, domain, q = nodes(3000, 8)
    v = np.random.default_rng(1).normal(size=(3000, 5))
    domain = Points(domain.nodes)
    heads = [torch.from_numpy(a)[None] for a in (q, x, v)]
    expected = torch.nn.functional.scaled_dot_product_attention(*heads)[0].numpy()
    p = affinity(ExpDotProduct(), domain, x, queries=q)
    assert p.method == "pairwise"
    np.testing.assert_allclose(p.average(v), expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("kernel", [Gaussian(3.0), Laplace(2.0), ExpDotProduct()], ids=lambda k: type(k).__name__)
@pytest.mark.parametrize(("d", "channels"), [(2, 3), (2, 20), (30, 3)])
@pytest.mark.sampled(2)
def test_the_number_of_threads_does_not_matter(kernel: Any, d: int, channels: int) -> None:
    x, domain, _ = nodes(2500, d)
    u = np.random.default_rng(1).normal(size=(2500, channels))
    results = []
    for threads in (1, 2):
        numba.set_num_threads(min(threads, numba.config.NUMBA_NUM_THREADS))
        with threadpool_limits(threads, "blas"):
            results.append(affinity(kernel, domain, x, method="pairwise").average(u))
    numba.set_num_threads(1)
    np.testing.assert_array_equal(*results)


def test_constants_stay_and_ranges_shrink() -> None:
    x, domain, _ = nodes(2500, 2)
    u = np.random.default_rng(1).uniform(-1, 2, 2500)
    for kernel in KERNELS.values():
        p = affinity(kernel, domain, x, method="pairwise")
        np.testing.assert_allclose(p.average(np.full(2500, 3.0)), 3.0, rtol=1e-14)
        assert u.min() <= p.average(u).min()
        assert p.average(u).max() <= u.max()


@pytest.mark.slow
@pytest.mark.parametrize("unit", [1e-200, 1e-30, 1e-6, 1e6, 1e30, 1e200])
def test_units_do_not_matter(unit: float) -> None:
    x, _, _ = nodes(500, 2)
    u = np.random.default_rng(1).normal(size=500)
    expected = affinity(Gaussian(0.5), Points(x), method="pairwise").average(u)
    result = affinity(Gaussian(0.5 * unit), Points(x * unit), method="pairwise").average(u)
    np.testing.assert_allclose(result, expected, rtol=1e-12)
    if 1e-30 <= unit <= 1e30:
        single = affinity(
            Gaussian(0.5 * unit), Points(np.arange(500.0)), (x * unit).astype(np.float32), method="pairwise"
        )
        np.testing.assert_allclose(single.average(u.astype(np.float32)), expected, atol=3e-6)


def test_coincident_nodes_count_as_often_as_they_are_there() -> None:
    x = np.repeat([[0.0, 0.0], [1.0, 0.0]], [1, 3], axis=0)
    p = affinity(Gaussian(1.0), Points(x, weights=np.ones(4)), method="pairwise")
    k = np.exp(-0.5)
    assert p.degree == pytest.approx([1 + 3 * k, 3 + k, 3 + k, 3 + k])
    assert p.average(np.array([1.0, 0, 0, 0]))[0] == pytest.approx(1 / (1 + 3 * k))


@pytest.mark.parametrize(
    ("n", "d", "radius"), [(1, 2, 1.0), (64, 1, 3.0), (700, 2, 0.2), (5000, 3, 0.05), (700, 16, 2.5)]
)
def test_pairs_within_a_radius_are_those_of_a_tree(n: int, d: int, radius: float) -> None:
    from scipy.spatial import cKDTree

    x = np.random.default_rng(d).normal(size=(n, d))
    x[n // 2 :: 7] = x[0]  # several at one place
    x = np.arange(float(n)).reshape(n, 1) if d == 1 else x  # some at the radius
    frame = Frame(x)
    places = frame.place(x)
    order = along_axes(places)
    nodes = _Nodes(x[order], frame, places[order])
    counts = nodes.counts(radius)
    indptr = np.concatenate([[0], np.cumsum(counts)])
    indices, squares = nodes.within(radius, indptr)
    rows = np.repeat(np.arange(n), counts)
    tree = cKDTree(x[order])
    expected = {(i, j) for i, row in enumerate(tree.query_ball_point(x[order], radius)) for j in row}
    assert set(zip(rows.tolist(), indices.tolist(), strict=True)) == expected
    assert (np.diff(indices)[np.diff(rows) == 0] > 0).all()
    there = np.sum((x[order][rows] - x[order][indices]) ** 2, axis=1)
    np.testing.assert_allclose(squares, there, rtol=4 * d * np.finfo(np.float64).eps)


def test_too_many_pairs_are_seen_before_they_are_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pairs of a million nodes within a wide kernel take minutes to find, and no memory holds them."""
    counted, count = [], _Nodes.counts

    def counts(self: _Nodes, radius: float) -> NDArray[np.int64]:
        counted.append(radius)
        return count(self, radius)

    monkeypatch.setattr(_Nodes, "counts", counts)
    x = np.random.default_rng(0).uniform(size=(5000, 3))
    with pytest.raises(MemoryLimitError, match=r"about 2\.[0-9]e\+07 pairs of neighbours among 5000 nodes"):
        affinity(Gaussian(0.15), Points(x), method="sparse", memory_limit=2e7)
    assert len(counted) == 1  # the near ones alone, for the least degree


@pytest.mark.parametrize("method", ["pairwise", "sparse", "nufft"])
def test_isolated_nodes_keep_their_value_and_are_told(method: str) -> None:
    x = np.array([0.0, 0.1, 0.2, 50.0, 80.0])
    with pytest.warns(NlflowWarning, match="2 of 5 nodes see no other node"):
        degree = affinity(Gaussian(0.1), Points(x), method=method).degree
    np.testing.assert_allclose(degree[3:], 0.2, rtol=1e-5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NlflowWarning)  # seen above
        result = affinity(Gaussian(0.1), Points(x), method=method).average(np.arange(5.0))
    np.testing.assert_allclose(result[3:], [3, 4], atol=1e-5)


@pytest.mark.parametrize("method", ["pairwise", "sparse", "nufft", "auto"])
def test_one_node(method: str) -> None:
    p = affinity(Gaussian(0.1), Points([[3.0, 4.0]], weights=[2.0]), method=method)
    assert p.average(np.array([7.0])) == pytest.approx([7.0])
    assert p.degree == pytest.approx([2.0])


@pytest.mark.slow
def test_memory_grows_with_nodes_not_with_pairs() -> None:
    x, domain, _ = nodes(20_000, 2)
    affinity(Gaussian(0.5), domain, x, method="pairwise").pairs(x[:, :1], np.arange(3))  # compiled
    with traced() as taken:
        p = affinity(Gaussian(0.5), domain, x, method="pairwise")
        p.average(x[:, 0])
    assert taken.bytes < 500 * 20_000
    assert p.memory_bytes < 200 * 20_000


# ---- flows


@pytest.mark.parametrize("method", ["pairwise", "sparse", "nufft"])
def test_flows_are_those_of_the_dense_matrix(method: str) -> None:
    rng = np.random.default_rng(5)
    domain, u = Points(rng.uniform(size=(400, 2))), rng.normal(size=400)
    options = {} if method == "pairwise" else {"rtol": 1e-11}
    for make in (J, lambda p: E(p, u, 0.3, measure="degree")):
        solutions = [
            solve(GradientFlow(make(affinity(Gaussian(0.1), domain, method=m, **o)), "degree"), u, t=5.0)
            for m, o in ((method, options), ("dense", {}))
        ]
        np.testing.assert_allclose(solutions[0].final, solutions[1].final, atol=1e-9)
        np.testing.assert_allclose(solutions[0].energy, solutions[1].energy, rtol=1e-8)
        assert solutions[0].stats["method"] == method
        assert solutions[0].stats["error_estimate"] <= 1e-11


def test_the_spectrum_of_an_approximation_stays_within_its_bound() -> None:
    x = np.linspace(0, 1, 200)
    p = affinity(Gaussian(0.02), Points(x), method="sparse", rtol=0.2)
    least = np.linalg.eigvals(p.average(np.eye(200))).real.min()
    assert least < -3e-4  # so that 1, which holds for the exact kernel, would not do
    bound = GradientFlow(J(p), metric="degree").diffusion_bound()
    assert 1 - least <= bound == 1 + p.error_estimate < 2


def test_an_evolving_kernel_is_built_by_the_same_method() -> None:
    rng = np.random.default_rng(6)
    u = rng.normal(size=(300, 2))
    domain = Points(np.arange(300.0))
    finals = [
        solve(GradientFlow(J(affinity(Gaussian(1.0), domain, u, method=m)), "degree", evolving=True), u, t=2.0).final
        for m in ("pairwise", "dense")
    ]
    np.testing.assert_allclose(*finals, atol=1e-12)


# ---- approximations


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "m", "rtol"),
    pairs(
        [("sparse", Gaussian(0.08)), ("sparse", Laplace(0.03)), ("sparse", TopHat(0.3)), ("nufft", Gaussian(0.08))],
        [1, 2, 3],
        [1e-3, 1e-6, 1e-10],
    ),
    ids=lambda v: f"{v[0]}, {type(v[1]).__name__}" if isinstance(v, tuple) else None,
)
@pytest.mark.sampled(3)
def test_the_error_is_within_its_estimate(way: tuple[str, Any], m: int, rtol: float) -> None:
    (method, kernel), n, rng = way, 600, np.random.default_rng(7)
    x = rng.uniform(size=(n, m)) ** 1.5
    domain = Points(x, weights=rng.uniform(0.5, 2, n))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NlflowWarning)  # some nodes in three dimensions are alone
        p = affinity(kernel, domain, method=method, rtol=rtol)
    assert p.error_estimate <= rtol
    for u in (rng.normal(size=n), 100 + rng.normal(size=(n, 3)), np.sign(x[:, 0] - 0.5)):
        average, log_degree = plain(kernel, x, x, domain.weights, u.reshape(n, -1))
        size = 0.5 * np.ptp(u)
        floor = 1e-12 * (1 + np.abs(u).max())
        assert np.abs(p.average(u).reshape(n, -1) - average).max() <= p.error_estimate * size + floor
        assert np.abs(p.log_degree - log_degree).max() <= p.error_estimate + 1e-12
        assert p.measure_error(u) <= p.error_estimate + floor
    np.testing.assert_allclose(p.average(np.full(n, 3.0)), 3.0, rtol=1e-13)


@pytest.mark.parametrize("method", ["sparse", "nufft"])
def test_approximations_of_signals_in_float32(method: str) -> None:
    rng = np.random.default_rng(8)
    domain, u = Points(rng.uniform(size=(1000, 2))), rng.normal(size=(1000, 2)).astype(np.float32)
    p = affinity(Gaussian(0.1), domain, method=method)
    assert p.average(u).dtype == np.float32
    np.testing.assert_allclose(p.average(u), p.average(u.astype(np.float64)), atol=1e-6)
    features = affinity(Gaussian(0.1), domain, domain.nodes.astype(np.float32), method=method)
    assert features.average(u).dtype == features.log_degree.dtype == np.float32
    np.testing.assert_allclose(features.average(u), p.average(u), atol=1e-5)


@pytest.mark.parametrize("tolerance", [1e-9, 1e-12])
@pytest.mark.parametrize("extent", [0.3, 4.0, 60.0])
def test_modes_are_as_many_as_the_tolerance_takes(tolerance: float, extent: float) -> None:
    """The Fourier sum is within the tolerance for all distances there are, and no longer with a sixth fewer modes."""
    width, distances = 0.7, np.linspace(0, extent, 400)
    exact = np.exp(-0.5 * (distances / width) ** 2)
    (modes,), (period,) = count_modes(np.array([extent]), width, tolerance)

    def worst(half: int) -> float:
        frequencies = 2 * np.pi / period * np.arange(-half, half + 1)
        share = width * np.sqrt(2 * np.pi) / period * np.exp(-0.5 * (width * frequencies) ** 2)
        return float(np.abs(np.cos(np.outer(distances, frequencies)) @ share - exact).max())

    assert modes % 2 == 1
    assert worst(modes // 2) <= tolerance
    assert worst(int(modes // 2 / 1.2)) > tolerance


def test_the_measured_error_sees_a_broken_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(9)
    p = affinity(Gaussian(0.1), Points(rng.uniform(size=(500, 2))), method="nufft", rtol=1e-8)
    assert p.measure_error() < 1e-8
    average = p._average
    monkeypatch.setattr(p, "_average", lambda u: average(u) + 1e-3)
    assert p.measure_error() > 1e-4


def test_edges_of_scattered_nodes() -> None:
    rng = np.random.default_rng(10)
    domain = Points(rng.uniform(size=(200, 2)), weights=rng.uniform(1, 2, 200))
    p = affinity(Gaussian(0.05, amplitude=3.0), domain, method="sparse")
    dense = affinity(Gaussian(0.05, amplitude=3.0), domain, method="dense")
    np.testing.assert_allclose(p.edges().toarray(), dense.edges().toarray(), atol=1e-6)
    assert p.edges().nnz < 200**2 / 2
    assert p.edges().indices.dtype == np.int32  # or each edge would have 4 bytes more, and 20 for a moment


@pytest.mark.slow
def test_what_is_chosen() -> None:
    rng = np.random.default_rng(11)
    few, many = Points(rng.uniform(size=(2048, 2))), Points(rng.uniform(size=(20_000, 2)))
    assert affinity(Gaussian(0.1), few).method == "dense"
    assert affinity(Gaussian(0.1), few, rtol=1e-3).method == "dense"
    exact = affinity(Gaussian(0.1), many)
    assert (exact.method, exact.error_estimate) == ("pairwise", 0.0)
    assert "no rtol" in exact.reason
    fast = affinity(Gaussian(0.1), many, rtol=1e-6)
    assert fast.method == "nufft"
    assert "rtol=1e-06: estimated at" in fast.reason
    assert affinity(Laplace(0.001), many, rtol=1e-3).method == "sparse"
    assert affinity(Laplace(1.0), many, rtol=1e-3).method == "pairwise"
    assert affinity(Gaussian(5.0), Grid((64, 64)), rtol=1e-3).method == "convolution"


def test_without_finufft_something_else_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "finufft", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    many = Points(np.random.default_rng(12).uniform(size=(5000, 2)))
    assert affinity(Gaussian(0.3), many, rtol=1e-6).method == "pairwise"
    with pytest.raises(InputError, match=r"method: 'nufft' needs FINUFFT.*pip install 'nlflow\[nufft\]'"):
        affinity(Gaussian(0.3), many, method="nufft")


def test_what_does_not_fit_is_replaced() -> None:
    # Few modes would serve, but memory for fewer; many nodes are in reach, so pairs are not stored either.
    x = np.random.default_rng(13).uniform(size=(5000, 2))
    p = affinity(Gaussian(0.05), Points(x), rtol=1e-6, memory_limit=6e5)
    assert p.method == "pairwise"
    assert "nufft was not possible (a Gaussian of width 0.05" in p.reason


# ---- bad input


FLAT = Points(np.arange(10.0))
BAD = {
    "a dot product by transforms": (
        lambda: affinity(ExpDotProduct(), FLAT, np.ones((10, 2)), method="nufft"),
        "kernel: got ExpDotProduct, expected a Gaussian for method='nufft'",
    ),
    "a dot product by neighbours": (
        lambda: affinity(ExpDotProduct(), FLAT, np.ones((10, 2)), method="sparse"),
        "kernel: got ExpDotProduct, expected a radial one for method='sparse'",
    ),
    "four dimensions": (
        lambda: affinity(Gaussian(1.0), FLAT, np.ones((10, 4)), method="nufft"),
        "features: got 4 dimensions, expected at most 3 for method='nufft'",
    ),
    "seventeen dimensions": (
        lambda: affinity(Gaussian(1.0), FLAT, np.ones((10, 17)), method="sparse"),
        "features: got 17 dimensions, expected at most 16 for method='sparse'",
    ),
    "rtol of 0": (lambda: affinity(Gaussian(1.0), FLAT, rtol=0), "rtol: got 0, expected a finite real number > 0"),
    "rtol of 1": (lambda: affinity(Gaussian(1.0), FLAT, rtol=1), "rtol: got 1, expected a finite real number"),
    "pairs on a grid": (
        lambda: affinity(Gaussian(1.0), Grid(10), method="pairwise"),
        "method: got 'pairwise', expected 'auto', 'dense', 'stencil' or 'convolution' for a kernel of positions on a",
    ),
    "patches": (
        lambda: affinity(Patch(1.0), Grid((20, 20)), np.ones((20, 20)), method="nufft"),
        "method: got 'nufft', expected 'auto', 'stencil' or 'dense': patch weights vary",
    ),
    "torch": (
        lambda: affinity(Gaussian(1.0), FLAT, torch.ones(10, 2), method="pairwise"),
        "method: got 'pairwise', expected 'auto', 'dense' or 'tiled' for features in torch tensors",
    ),
    "a width that is too narrow for a float": (
        lambda: affinity(Gaussian(1e-200), Points(np.arange(10.0)), method="pairwise"),
        "kernel: its width 1e-200 is less than 1e-150 of the features' size",
    ),
    "logits that overflow": (
        lambda: affinity(ExpDotProduct(), FLAT, np.full((10, 2), 1e200), method="pairwise"),
        "affinity: it has logits that overflow; scale the features or the kernel",
    ),
    "a measured error of what is exact": (
        lambda: affinity(Gaussian(1.0), FLAT, method="pairwise").measure_error(),
        "affinity: method 'pairwise' is exact to rounding",
    ),
    "a measured error of a constant": (
        lambda: affinity(Gaussian(1.0), FLAT, method="sparse").measure_error(np.ones(10)),
        "u: got a constant signal",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name: str) -> None:
    call, message = BAD[name]
    with pytest.raises(InputError) as caught:
        call()
    assert message in str(caught.value)


def test_an_accuracy_that_is_out_of_reach() -> None:
    x = np.concatenate([np.random.default_rng(0).uniform(size=10_000), [5.0]])
    with pytest.raises(
        NumericalError, match=r"rtol: got 1e-13, expected at least .* use a wider kernel, a larger rtol"
    ):
        affinity(Gaussian(0.5), Points(x), method="nufft", rtol=1e-13)


TOO_LARGE = {
    "pairs": (
        lambda: affinity(Gaussian(0.5), Points(np.linspace(0, 1, 5000)), method="sparse", memory_limit=1e8),
        r"\d+ pairs of neighbours among 5000 nodes needs .* or method='pairwise', which stores no pairs",
    ),
    "modes": (
        lambda: affinity(
            Gaussian(1e-4), Points(np.random.default_rng(0).uniform(size=(50, 2))), method="nufft", memory_limit=1e8
        ),
        r"a Gaussian of width 0\.0001 on a domain of .* x .*, which takes \d+ x \d+ Fourier modes",
    ),
    "channels": (
        lambda: affinity(Gaussian(1.0), Points(np.arange(1e4)), method="pairwise", memory_limit=1e6).average(
            np.ones((10_000, 5))
        ),
        r"sums over 10000 nodes with 5 channels needs .* use fewer nodes or channels",
    ),
}


@pytest.mark.parametrize("name", TOO_LARGE)
def test_memory_is_refused_before_it_is_taken(name: str) -> None:
    call, message = TOO_LARGE[name]
    with traced() as taken, pytest.raises(MemoryLimitError, match=message):
        call()
    assert taken.bytes < 2e7


@pytest.mark.parametrize("metric", ["l2", "degree"])
@pytest.mark.parametrize("name", ["J", "E"])
def test_value_gradient_and_degree_come_from_one_pass(name: str, metric: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, domain, _ = nodes(300, 2)
    u, f = np.random.default_rng(1).normal(size=(2, 300))

    def functional(method: str) -> J:
        k = affinity(Gaussian(0.7), domain, x, method=method)
        return J(k) if name == "J" else E(k, f, 0.4)

    reference, tested = functional("dense"), functional("pairwise")
    passes, compute = [], PairSums.__call__

    def counted(self: PairSums, *arguments: Any, **options: Any) -> Any:
        passes.append(1)
        return compute(self, *arguments, **options)

    monkeypatch.setattr(PairSums, "__call__", counted)
    value, gradient = tested.value_and_gradient(u, metric)
    assert len(passes) == 1
    assert value == pytest.approx(reference.value(u), rel=1e-12)
    np.testing.assert_allclose(gradient, reference.gradient(u, metric), rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("width", [0.05, 2.0, 50.0])
def test_distances_in_many_dimensions_keep_their_digits(width: float, dtype: str) -> None:
    # Close pairs far from the middle: |x|^2 + |y|^2 - 2 x.y would lose them for the narrow kernel.
    rng = np.random.default_rng(14)
    x = np.repeat(rng.normal(size=(60, 20)), 5, axis=0)
    x = (x + 0.02 * rng.normal(size=x.shape)).astype(dtype)
    domain, u = Points(np.zeros(300)), rng.normal(size=(300, 2)).astype(dtype)
    average, _ = plain(Gaussian(width), x, x, domain.weights, u)
    result = affinity(Gaussian(width), domain, x, method="pairwise").average(u)
    np.testing.assert_allclose(result, average, rtol=0, atol=30 * ROUNDING[dtype])


@pytest.mark.parametrize("unit", [1e-200, 1e-45, 1e45, 1e200])
def test_the_unit_of_the_weights_does_not_matter(unit: float) -> None:
    x, domain, _ = nodes(300, 2, "float32")
    u = np.random.default_rng(1).normal(size=300).astype(np.float32)
    expected = affinity(Gaussian(0.7), domain, x, method="pairwise").average(u)
    scaled = affinity(Gaussian(0.7), Points(domain.nodes, weights=domain.weights * unit), x, method="pairwise")
    np.testing.assert_allclose(scaled.average(u), expected, rtol=0, atol=1e-6)


def test_weights_that_span_many_decades() -> None:
    x = np.array([0.0, 0.5, 100.0])
    for least in (1e-25, 1e-60, 1e-200):
        p = affinity(Gaussian(1.0), Points(x, weights=[1, 1, least]), method="pairwise")
        with pytest.warns(NlflowWarning, match="1 of 3 nodes see no other"):
            result = p.average(np.array([1.0, 2.0, 5.0], np.float32))
        assert result[2] == 5
        average, _ = plain(Gaussian(1.0), x[:, None], x[:, None], np.array([1, 1, least]), np.array([[1.0], [2], [5]]))
        np.testing.assert_allclose(result, average[:, 0], rtol=1e-6)
    with pytest.raises(InputError, match="weights: got some that are less than 1e-280 of the largest"):
        affinity(Gaussian(1.0), Points(x, weights=[1, 1, 1e-290]), method="pairwise")
