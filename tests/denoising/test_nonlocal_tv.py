"""Nonlocal total variation (p = 1): the primal-dual minimizer and its gap against exact solvers and closed forms."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numba
import numpy as np
import pytest
from scipy.optimize import lsq_linear, minimize

from nlflow import E, Ep, Grid, InputError, MemoryLimitError, Patch, Points, TopHat, affinity, from_matrix, nonlocal_tv
from nlflow.functionals.variational import primal_dual
from nlflow.functionals.variational.certificate import bounding_box, fidelity_slack

pytestmark = pytest.mark.numerical


def normal(shape: Any, seed: int = 1) -> Any:
    return np.random.default_rng(seed).normal(size=shape)


def random_graph(n: int = 12, seed: int = 3, share: float = 0.4) -> Any:
    rng = np.random.default_rng(seed)
    half = np.triu(rng.random((n, n)) * (rng.random((n, n)) < share), 1)
    points = Points(np.arange(float(n)), weights=rng.uniform(0.5, 1.5, n))
    return from_matrix(half + half.T + np.eye(n), points), points


def weights_of(k: Any) -> Any:
    """Return W_ij = w_i w_j (k_ij + k_ji) from the averages of unit signals, without the list of edges."""
    n, w, d = k.domain.size, k.domain.weights.ravel(), k.degree.ravel()
    P = np.stack([k.average(e.reshape(k.domain.shape)).ravel() for e in np.eye(n)], axis=1)
    W = 2 * (w * d)[:, None] * P
    np.fill_diagonal(W, 0)
    return W


def exact_anisotropic(W: Any, stiff: Any, f: Any) -> Any:
    """Minimize 1/2 sum_ij W_ij |u_i - u_j| + 1/2 sum_i r_i (u_i - f_i)^2 by bounded least squares of its dual.

    u = f - R^-1 D'z, where |z_e| <= W_e minimizes |R^(1/2) f - R^(-1/2) D'z|^2; by an active set, thus exactly.
    """
    pairs = [(i, j) for i, j in itertools.combinations(range(len(f)), 2) if W[i, j] > 0]
    D = np.zeros((len(pairs), len(f)))
    for e, (i, j) in enumerate(pairs):
        D[e, i], D[e, j] = 1, -1
    bound = np.array([W[i, j] for i, j in pairs])
    found = lsq_linear((D / np.sqrt(stiff)).T, np.sqrt(stiff) * f, (-bound, bound), method="bvls", tol=1e-14)
    return f - D.T @ found.x / stiff


def plain_energy(k: Any, u: Any, f: Any, lam: Any, isotropic: bool) -> float:
    W, w = weights_of(k), k.domain.weights.ravel()
    u, f = (np.asarray(a, dtype=float).reshape(len(w), -1) for a in (u, f))
    squares = ((u[:, None] - u[None]) ** 2).sum(axis=2)
    total = np.sqrt(w * (W * squares).sum(axis=1)).sum() / 2 if isotropic else (W * np.sqrt(squares)).sum() / 2
    return float(total + 0.5 * (w * np.ravel(lam) @ ((u - f) ** 2).sum(axis=1)))


# ---- the minimizer, exactly


@pytest.mark.parametrize("fidelity", [0.05, 0.5, 3.0])
@pytest.mark.parametrize("graph", ["chain", "random", "plane"])
def test_anisotropic_minimizer_is_exact(graph: str, fidelity: float) -> None:
    k = {
        "chain": lambda: affinity(TopHat(radius=1.0), Grid(20, 1.0, "isolated"), method="stencil"),
        "random": lambda: random_graph()[0],
        "plane": lambda: affinity(Patch(1.0, patch_size=3, search_radius=1), Grid((5, 4)), normal((5, 4))),
    }[graph]()
    f = normal(k.domain.shape, 4)
    lam = fidelity * np.linspace(0.5, 2, k.domain.size)
    expected = exact_anisotropic(weights_of(k), k.domain.weights.ravel() * lam, f.ravel())
    found = Ep(k, f, lam.reshape(f.shape), 1).minimizer(rtol=1e-10, maxiter=200_000)
    assert found.success, found.message
    np.testing.assert_allclose(found.u.ravel(), expected, rtol=0, atol=1e-4)
    best = plain_energy(k, expected, f, lam, False)
    assert math.isclose(found.value, best, rel_tol=1e-9)
    # At any time the gap is at least what is left to gain, and what is left is found.
    for iterations in (1, 3, 10, 30, 100, 1000):
        early = Ep(k, f, lam.reshape(f.shape), 1).minimizer(rtol=1e-10, maxiter=iterations)
        value = plain_energy(k, early.u, f, lam, False)
        assert math.isclose(early.value, value, rel_tol=1e-9)
        assert -1e-9 * best <= value - best <= early.gap * value + 1e-9 * best


def test_the_chain_of_two_levels() -> None:
    """A step of n and m nodes moves together by W / (lambda n) and W / (lambda m), until both are at the mean."""
    k = affinity(TopHat(radius=1.0), Grid(12, 1.0, "isolated"), method="stencil")  # W = 2 between neighbours
    f = np.where(np.arange(12) < 4, 0.0, 1.0)
    found = Ep(k, f, 2.0, 1).minimizer(rtol=1e-10)
    np.testing.assert_allclose(found.u, np.where(f == 0, 2 / (2 * 4), 1 - 2 / (2 * 8)), rtol=0, atol=1e-4)
    np.testing.assert_allclose(Ep(k, f, 0.2, 1).minimizer(rtol=1e-10).u, f.mean(), rtol=0, atol=1e-4)


def test_two_clusters() -> None:
    """Two cliques of 4 and 6 nodes, each pair across joined by c: values move by c m / lambda and c n / lambda."""
    c, n, m = 0.01, 4, 6
    matrix = np.full((n + m, n + m), c / 2)
    matrix[:n, :n] = matrix[n:, n:] = 5.0
    k = from_matrix(matrix, Points(np.arange(10.0), weights=np.ones(10)))
    f = np.where(np.arange(10) < n, -1.0, 1.0)
    for fidelity in (0.2, 0.5):
        expected = np.where(f < 0, -1 + c * m / fidelity, 1 - c * n / fidelity)
        found = Ep(k, f, fidelity, 1).minimizer(rtol=1e-10)
        np.testing.assert_allclose(found.u, expected, rtol=0, atol=1e-4)
    # Isotropic: each node's slope over the cut is (2 / 2) (c m)^(1/2) or (c n)^(1/2), per unit of the difference.
    slope = 0.5 * (n * math.sqrt(c * m) + m * math.sqrt(c * n))
    found = Ep(k, f, 2.0, 1, isotropic=True).minimizer(rtol=1e-10)
    np.testing.assert_allclose(found.u, np.where(f < 0, -1 + slope / (2 * n), 1 - slope / (2 * m)), rtol=0, atol=1e-4)


@pytest.mark.parametrize("isotropic", [False, True])
def test_vectors_and_cones_against_a_general_solver(isotropic: bool) -> None:
    """Two channels on 6 nodes, by quasi-Newton steps on the energy with ever less smoothing of its norms."""
    k, points = random_graph(6, seed=5, share=0.7)
    f, lam, W, w = normal((6, 2), 4), np.linspace(0.4, 0.8, 6), weights_of(k), points.weights

    def energy(x: Any, smoothing: float) -> float:
        u = x.reshape(6, 2)
        squares = ((u[:, None] - u[None]) ** 2).sum(axis=2)
        cells = w * (W * squares).sum(axis=1) if isotropic else W**2 * squares
        total = np.sqrt(cells + smoothing**2).sum() / 2
        return float(total + 0.5 * (w * lam) @ ((u - f) ** 2).sum(axis=1))

    x = f.ravel()
    for smoothing in (1e-1, 1e-2, 1e-3, 1e-4):
        x = minimize(energy, x, args=(smoothing,), method="BFGS", options={"gtol": 1e-7}).x
    found = Ep(k, f, lam, 1, isotropic=isotropic).minimizer(rtol=1e-9, maxiter=200_000)
    assert found.success
    value = plain_energy(k, found.u, f, lam, isotropic)
    assert math.isclose(found.value, value, rel_tol=1e-9)
    # The general solver may stop short of the minimum; the certificate says that ours has not.
    general = plain_energy(k, x, f, lam, isotropic)
    assert general * (1 - 2e-3) <= value <= general * (1 + 1e-8)
    np.testing.assert_allclose(found.u, x.reshape(6, 2), rtol=0, atol=1e-2)


@pytest.mark.parametrize("isotropic", [False, True])
@pytest.mark.parametrize("holes", [False, True])
def test_the_gap_bounds_what_is_left_to_gain(holes: bool, isotropic: bool) -> None:
    f = normal((6, 7, 2), 4)
    k = affinity(Patch(1.0, patch_size=3, search_radius=2), Grid((6, 7), 0.7), f)
    lam = np.full((6, 7), 2.0)
    if holes:
        lam[2:4, 3:6] = 0
    e = Ep(k, f, lam, 1, isotropic=isotropic)
    best = e.minimizer(rtol=1e-9, maxiter=120_000)
    assert best.success, best.message
    gaps = []
    for iterations in (1, 5, 20, 100, 500):
        early = e.minimizer(rtol=1e-9, maxiter=iterations)
        assert math.isclose(early.value, e.value(early.u), rel_tol=1e-9)
        assert -1e-8 * best.value <= early.value - best.value <= early.gap * early.value
        gaps.append(early.gap)
    assert gaps[-1] < 1e-2 * gaps[0]
    # A start at the minimizer is no worse, and is left as it was.
    start = best.u.copy()
    again = e.minimizer(rtol=1e-4, start=start)
    np.testing.assert_array_equal(start, best.u)
    assert again.success
    assert again.iterations <= 1.5 * e.minimizer(rtol=1e-4).iterations


@pytest.mark.parametrize("isotropic", [False, True])
@pytest.mark.parametrize("graph", ["patches", "lattice"])
def test_iterations_that_it_takes(graph: str, isotropic: bool) -> None:
    """A few hundred, also with a hole; thousands without the extrapolation or without the balance of the steps."""
    f, grid = normal((24, 20), 4), Grid((24, 20))
    patches = affinity(Patch(1.0, patch_size=3, search_radius=2), grid, f)
    k = patches if graph == "patches" else affinity(TopHat(radius=1.0), grid, method="stencil")
    lam = np.full((24, 20), 0.3)
    lam[4:9, 6:14] = 0
    for size in (1.0, 1e-3):
        found = Ep(k, size * f, lam / size, 1, isotropic=isotropic).minimizer(rtol=1e-5, maxiter=800)
        assert found.success, found.message


@pytest.mark.parametrize(("isotropic", "maxiter"), [(False, 150), (True, 1000)])
def test_weak_edges_do_not_wait_for_strong_ones(isotropic: bool, maxiter: int) -> None:
    """Steps go by the degree of each node: weights over six decades take 50 and 400 iterations, not 800 and 5000."""
    n = 40
    k = np.diag(np.geomspace(1e-6, 1, n - 1), 1)
    points = Points(np.arange(float(n)))
    f, lam = normal(n, 4), np.geomspace(1e-6, 1, n)
    e = Ep(from_matrix(k + k.T + 1e-12 * np.eye(n), points), f, lam, 1, isotropic=isotropic)
    found = e.minimizer(rtol=1e-6, maxiter=maxiter)
    assert found.success, found.message


def test_slack_is_the_conjugate() -> None:
    """G(u) + G*(-flow) + <u, flow> by a search over a fine grid of the box."""
    rng = np.random.default_rng(3)
    u, f, flow = rng.normal(size=(5, 1)), rng.normal(size=(5, 1)), 30 * rng.normal(size=(5, 1))
    rigid = np.array([0.0, 0.5, 2.0, 10.0, 0.0])
    box = bounding_box(u, f, rigid)
    assert box.min() == min(u.min(), f[1:4].min())
    assert box.max() == max(u.max(), f[1:4].max())
    grid = np.linspace(box[0, 0], box[1, 0], 200_001)
    expected = 0.0
    for i in range(5):
        conjugate = (-flow[i] * grid - rigid[i] / 2 * (grid - f[i]) ** 2).max()
        expected += float(rigid[i] / 2 * (u[i, 0] - f[i, 0]) ** 2 + conjugate + u[i, 0] * flow[i, 0])
    assert math.isclose(fidelity_slack(u, flow, rigid, f, box), expected, rel_tol=1e-8)


# ---- numbers: precision, threads, memory


@pytest.mark.parametrize(
    ("shape", "isotropic"),
    [
        pytest.param((24, 20), False, marks=pytest.mark.slow),
        pytest.param((24, 20), True, marks=pytest.mark.slow),
        ((24, 20, 3), True),
    ],
)
@pytest.mark.slow
def test_the_number_of_threads_changes_no_bit(shape: Any, isotropic: bool) -> None:
    f = normal(shape, 4).astype(np.float32)
    e = Ep(affinity(Patch(1.0, patch_size=3, search_radius=2), Grid((24, 20)), f), f, 1.0, 1, isotropic=isotropic)
    before, results = numba.get_num_threads(), []
    try:
        for threads in {1, numba.config.NUMBA_NUM_THREADS}:
            numba.set_num_threads(threads)
            results.append(e.minimizer(rtol=1e-9, maxiter=12))
    finally:
        numba.set_num_threads(before)
    for other in results[1:]:
        np.testing.assert_array_equal(other.u, results[0].u)
        assert (other.gap, other.value) == (results[0].gap, results[0].value)


@pytest.mark.parametrize("isotropic", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_weights_of_any_size_in_single_precision(isotropic: bool) -> None:
    """Weights from 1 to e^-80 and less: no NaN, and the same as in double precision."""
    f = (10 * normal((9, 8), 4)).astype(np.float32)
    kernel = Patch(1.0, patch_size=1, search_radius=2)
    found = Ep(affinity(kernel, Grid((9, 8)), f), f, 0.5, 1, isotropic=isotropic).minimizer(rtol=1e-3)
    exact = f.astype(np.float64)
    other = Ep(affinity(kernel, Grid((9, 8)), exact), exact, 0.5, 1, isotropic=isotropic).minimizer(rtol=1e-6)
    assert found.success
    np.testing.assert_allclose(found.u, other.u, rtol=0, atol=0.1)
    assert math.isclose(found.value, other.value, rel_tol=2e-3)


def test_memory_of_the_dual_vectors_is_checked() -> None:
    f = normal((20, 20, 3), 4)
    e = Ep(affinity(Patch(1.0, patch_size=3, search_radius=1), Grid((20, 20)), f), f, 1.0, 1)
    flat = e.flat(f)
    with pytest.raises(MemoryLimitError, match=r"the dual vectors of 2964 edges needs 138.9 KiB"):
        primal_dual.minimize(e, flat, np.ones(400), rtol=1e-3, maxiter=1, memory_limit=60_000)


# ---- images


def picture() -> Any:
    """Return a piecewise constant image: a disc and a square of other heights than their ground."""
    y, x = np.mgrid[:48, :48]
    clean = np.where((y - 15) ** 2 + (x - 15) ** 2 < 80, 1.0, 0.0)
    clean[26:42, 22:42] = 0.5
    return clean


@pytest.mark.slow
def test_edges_are_kept_better_than_by_the_quadratic_functional() -> None:
    clean, sigma = picture(), 0.15
    noisy = clean + sigma * normal((48, 48))

    def error(u: Any) -> float:
        return float(np.sqrt(np.mean((u - clean) ** 2)))

    def jump(u: Any) -> float:
        """Height of the square, 0.5, over its ground, from one pixel before its edge to one behind."""
        return float((u[28:40, 23] - u[28:40, 20]).mean())

    def fitting(minimizer: Any) -> Any:
        """Return the minimizer whose residual is nearest to the noise."""
        signals = [minimizer(lam).u for lam in np.geomspace(0.3, 30, 15)]
        return min(signals, key=lambda u: abs(float(np.std(u - noisy)) - sigma))

    # On one graph, that of the four neighbours, as much taken out by either functional.
    lattice = affinity(TopHat(radius=1.0), Grid((48, 48)), method="stencil")
    quadratic = fitting(lambda lam: E(lattice, noisy, lam).minimizer(rtol=1e-4))
    for isotropic in (False, True):
        tv = fitting(lambda lam: Ep(lattice, noisy, lam, 1, isotropic=isotropic).minimizer(rtol=1e-2))  # noqa: B023
        assert error(tv) < 0.6 * error(quadratic)
        assert 0.5 - jump(tv) < 0.7 * (0.5 - jump(quadratic))
    result, found, fidelity = nonlocal_tv(noisy, sigma=sigma, residual=1.0, return_info=True)
    assert found.success, found.message
    assert fidelity > 0
    assert error(result) < 0.9 * error(tv)
    assert error(result) < 0.2 * sigma
    assert jump(result) > 0.45


@pytest.mark.slow
@pytest.mark.parametrize("residual", [0.85, 1.0])
def test_the_residual_is_what_was_asked_for(residual: float) -> None:
    noisy = (200 * picture() + 20 * normal((48, 48))).astype(np.float32)
    result, found, fidelity = nonlocal_tv(noisy, sigma=20, residual=residual, return_info=True)
    assert result.dtype == np.float32
    assert found.success, found.message
    assert math.isclose(np.std(result - noisy) / 20, residual, rel_tol=0.012)
    again = nonlocal_tv(noisy, sigma=20, fidelity=fidelity)
    np.testing.assert_allclose(again, result, rtol=0, atol=3)


@pytest.mark.slow
def test_scale_shift_and_types() -> None:
    noisy = np.round(200 * picture() + 20 + 10 * normal((48, 48)))
    result = nonlocal_tv(noisy, sigma=10, rtol=1e-4)
    for c, b in ((1e-6, 0.0), (1e6, 1e7)):
        np.testing.assert_allclose((nonlocal_tv(c * noisy + b, sigma=10 * c, rtol=1e-4) - b) / c, result, atol=1e-2)
    np.testing.assert_allclose(nonlocal_tv(noisy.T, sigma=10, rtol=1e-4).T, result, rtol=0, atol=0.5)
    whole = np.clip(noisy, 0, 255).astype(np.uint8)
    scaled = nonlocal_tv(whole, sigma=10)
    assert scaled.dtype == np.float64
    assert 0 <= scaled.min() <= scaled.max() <= 1
    np.testing.assert_allclose(nonlocal_tv(whole, sigma=10, preserve_range=True), 255 * scaled, rtol=0, atol=1e-3)
    estimated = nonlocal_tv(noisy)
    assert np.std(estimated - 200 * picture() - 20) < 5


@pytest.mark.slow
def test_colours_share_their_graph_and_signals_are_denoised() -> None:
    clean = np.stack([picture(), 1 - picture(), 0.3 * picture()], axis=0)
    noisy = clean + 0.15 * normal(clean.shape)
    together = nonlocal_tv(noisy, sigma=0.15, channel_axis=0)
    assert together.shape == noisy.shape
    alone = np.stack([nonlocal_tv(channel, sigma=0.15) for channel in noisy])
    assert np.std(together - clean) < np.std(alone - clean)
    steps = np.repeat([0.0, 1.0, 0.3, 0.8], 60)
    signal = steps + 0.1 * normal(240)
    for isotropic in (True, False):
        assert np.std(nonlocal_tv(signal, sigma=0.1, isotropic=isotropic) - steps) < 0.055


def test_nothing_to_do() -> None:
    noisy = picture() + 0.15 * normal((48, 48))
    for image, sigma in ((noisy, 0), (noisy, 1e-20), (np.full((20, 20), 7.0), 1.0)):
        result, found, fidelity = nonlocal_tv(image, sigma=sigma, return_info=True)
        np.testing.assert_array_equal(result, image)
        assert fidelity == math.inf
        assert "returned unchanged" in found.message
    result, found, fidelity = nonlocal_tv(normal((30, 30)), sigma=2.0, return_info=True)
    np.testing.assert_allclose(result, normal((30, 30)).mean(), rtol=0, atol=1e-12)
    assert fidelity == 0
    assert "within the noise" in found.message


def test_a_residual_that_is_not_reached_is_told() -> None:
    noisy = picture() + 0.15 * normal((48, 48))
    _, found, _ = nonlocal_tv(noisy, sigma=0.15, rtol=1e-9, maxiter=20, return_info=True)
    assert not found.success
    assert found.message.endswith("raise maxiter or lower rtol")


def test_bad_arguments() -> None:
    image = normal((12, 12))
    for name, value in (
        ("sigma", -1), ("residual", 0), ("fidelity", 0), ("rtol", 0), ("maxiter", 0), ("patch_size", 2),
        ("search_radius", 0), ("channel_axis", 5),
    ):  # fmt: skip
        with pytest.raises(InputError, match=f"^{name}: got"):
            nonlocal_tv(image, **{"sigma": 1.0, name: value})
    with pytest.raises(InputError, match=r"^image: got 3 axes of space .* denoise a volume slice by slice"):
        nonlocal_tv(np.zeros((9, 9, 9)), 1.0)
    with pytest.raises(InputError, match=r"^image: got 1 NaN"):
        nonlocal_tv(np.where(image == image.max(), np.nan, image), sigma=1.0)
    for limit in (1000, 10_000):
        with pytest.raises(MemoryLimitError, match=r"^memory_limit: .*; use a smaller search_radius or") as caught:
            nonlocal_tv(image, sigma=0.5, memory_limit=limit)
        assert "store" not in str(caught.value)  # which is no keyword of it
    wide = normal((48, 48)).astype(np.float32)  # the list of edges takes more than stencil and dual vectors
    with pytest.raises(MemoryLimitError, match=r"^memory_limit: the list of up to 110592 edges .* search_radius"):
        nonlocal_tv(wide, sigma=0.5, memory_limit=40 * 110592)
    nonlocal_tv(wide, sigma=0.5, memory_limit=50 * 110592, fidelity=1.0, maxiter=1)
