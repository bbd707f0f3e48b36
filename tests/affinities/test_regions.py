"""Blocks of nodes, how far they are apart, and sums that leave out what a tolerance allows, against double sums."""

import numpy as np
import pytest
from scipy.spatial.distance import cdist

from nlflow import Gaussian, Laplace, Matern, Points, RationalQuadratic, TopHat, affinity
from nlflow.affinities.pair_sums import PairSums
from nlflow.affinities.regions import BLOCK, Frame, Regions, along_axes

KERNELS = [Gaussian(0.5), Laplace(0.15), Matern(0.3, nu=1.5), RationalQuadratic(0.2, alpha=4.0), TopHat(2.0)]
ROUNDING = {"float32": 4e-6, "float64": 2e-13}


def flat(n, d, dims, rng, noise=0.01):
    """Clusters on a flat of some dimensions that lies askew in d dimensions, away from 0."""
    turn = np.linalg.qr(rng.normal(size=(d, dims)))[0]
    centres = 4 * rng.normal(size=(6, dims))
    z = centres[rng.integers(6, size=n)] + rng.normal(size=(n, dims))
    return z @ turn.T + noise * rng.normal(size=(n, d)) + 10


@pytest.mark.parametrize("shift", [0.0, 1e6])
@pytest.mark.parametrize(("d", "dims"), [(1, 1), (3, 1), (15, 3), (40, 30)])
def test_boxes_are_no_farther_apart_than_their_points(d, dims, shift):
    rng = np.random.default_rng(d)
    x = flat(500, d, dims, rng, noise=0.01 * (dims > 1)) + shift  # on a line boxes are as far apart as points
    frame = Frame(x)
    places = frame.place(x)
    order = along_axes(places)
    assert (np.sort(order) == np.arange(500)).all()
    regions = Regions.of(places[order], 0.0)
    blocks = [x[order][start : start + BLOCK] for start in range(0, 500, BLOCK)]
    assert len(regions.limits) == len(blocks)
    for i, own in enumerate(blocks):
        for j, other in enumerate(blocks):
            gaps = np.maximum(np.maximum(regions.lows[i] - regions.highs[j], regions.lows[j] - regions.highs[i]), 0)
            assert np.linalg.norm(gaps) <= cdist(own, other).min() + frame.slack
    assert frame.slack < 1e-13 * (d + 2) ** 2 * (1 + shift)


@pytest.mark.parametrize("d", [15, 40])
def test_blocks_of_a_flat_are_compact_however_it_lies(d):
    x = flat(6000, d, 2, np.random.default_rng(0), noise=0.001)
    assert PairSums(Gaussian(0.05), x, x, np.ones(6000)).share_seen() < 0.15
    noise = np.random.default_rng(0).normal(size=(6000, d))
    assert PairSums(Gaussian(1.0), noise, noise, np.ones(6000)).share_seen() == 1  # nothing is gained there


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: type(k).__name__)
@pytest.mark.parametrize("d", [2, 15, 40])
@pytest.mark.sampled(12)
def test_what_is_left_out_is_within_the_tolerance(d, kernel, dtype):
    rng = np.random.default_rng(1)
    x = flat(1500, d, 2, rng).astype(dtype)
    domain = Points(np.arange(1500.0), weights=rng.uniform(0.5, 2, 1500))
    u = rng.normal(size=(1500, 3)).astype(dtype)
    wide = x.astype(np.float64)
    k = np.exp(kernel.log_profile(cdist(wide, wide, "sqeuclidean"))) * domain.weights
    degree = k.sum(axis=1)
    exact = (k / degree[:, None]) @ u.astype(np.float64)
    size = np.abs(u - (u.max(axis=0) + u.min(axis=0)) / 2).max()
    for rtol in (1e-2, 1e-5):
        p = affinity(kernel, domain, x, method="pairwise", rtol=rtol)
        assert p.error_estimate == (0 if isinstance(kernel, TopHat) else rtol)
        error = np.abs(p.average(u) - exact).max() / size
        lost = 1 - np.exp(p.log_degree.astype(np.float64)) / degree
        assert error <= p.error_estimate + 4 * ROUNDING[dtype]
        assert -4 * ROUNDING[dtype] <= lost.min()
        assert lost.max() <= p.error_estimate / 2 + 4 * ROUNDING[dtype]
        if isinstance(kernel, TopHat):
            continue
        assert p.measure_error(u) <= rtol
        if rtol == 1e-2 and dtype == "float64":
            assert error > 10 * ROUNDING[dtype]  # something was left out
    ones = np.full((1500, 1), 3.0, dtype)
    assert np.abs(p.average(ones) - 3).max() <= 3 * ROUNDING[dtype]


def test_a_tolerance_keeps_p_self_adjoint():
    rng = np.random.default_rng(2)
    x = flat(1500, 15, 2, rng)
    p = affinity(Gaussian(0.5), Points(np.arange(1500.0)), x, method="pairwise", rtol=1e-2)
    u, v = rng.normal(size=(2, 1500))
    mass = p.measure("degree", u)
    left, right = (mass * v) @ p.average(u), (mass * u) @ p.average(v)
    assert left == pytest.approx(right, abs=1e-13)  # 1500 terms of probabilities that sum to 1
    law = np.abs(v) / np.abs(v).sum()
    assert p.push(law).sum() == pytest.approx(1, abs=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("d", [2, 15, 40])
def test_sums_at_other_points_and_at_some_rows(d):
    rng = np.random.default_rng(3)
    x = flat(1500, d, 2, rng)
    y, u = x[:700] + 0.1 * rng.normal(size=(700, d)), rng.normal(size=(1500, 2))
    k = np.exp(-cdist(y, x, "sqeuclidean") / (2 * 0.2**2))
    sums = PairSums(Gaussian(0.2), y, x, np.ones(1500))
    rows = rng.permutation(700)[:333]
    for chosen in (None, rows):
        found, totals, peaks = sums(u, chosen)
        expected = k if chosen is None else k[chosen]
        assert np.abs(found * np.exp(peaks)[:, None] - expected @ u).max() < 1e-11  # sums of up to 1500 terms below 4
        assert np.abs(totals * np.exp(peaks) - expected.sum(axis=1)).max() < 1e-11
    own = PairSums(Gaussian(0.2), x, x, np.ones(1500), rtol=1e-3)
    whole, some = own(u)[0], own(u, rows)[0]
    assert np.abs(whole[rows] - some).max() <= 1e-3 * 1500  # rows meet other blocks, each within the tolerance
