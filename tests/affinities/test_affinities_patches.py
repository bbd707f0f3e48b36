"""Patch kernels against plain double sums over the pixels of patches, and against scikit-image."""

from __future__ import annotations

import contextlib
import itertools
import math
import struct
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from skimage.restoration import denoise_nl_means

from nlflow import Grid, InputError, Jp, NlflowWarning, Patch, affinity
from nlflow.affinities import DenseAffinity, PatchStencil
from tests.covering import pairs
from tests.reference import TOLERANCE, PatchSums, check_affinity, patch_matrix

pytestmark = pytest.mark.numerical

BOUNDARIES = ["periodic", "reflect", "isolated"]
DTYPES = [np.float64, np.float32]


def signal(shape: tuple[int, ...], dtype: Any = np.float64, seed: int = 1) -> Any:
    return np.random.default_rng(seed).random(shape).astype(dtype)


# --- all kernels ---------------------------------------------------------------------------------------------------

PATCHES = {
    "pixel": Patch(0.5, patch_size=3, search_radius=2),
    "patch": Patch(0.5, patch_size=3, search_radius=2, tokens="patch", amplitude=2.0),
    "sigma": Patch(0.3, patch_size=3, search_radius=1, sigma=0.15),
    "sigma, patch": Patch(0.3, patch_size=3, search_radius=2, sigma=0.15, tokens="patch"),
    "bilateral": Patch(0.4, patch_size=1, search_radius=2, spatial_width=1.2),
    "spatial, patch": Patch(0.4, patch_size=3, search_radius=1, spatial_width=0.8, tokens="patch", sigma=0.1),
}
IMAGES: dict[str, tuple[tuple[int, ...], int | None]] = {
    "1-D": ((13,), None),
    "1-D, 3 channels": ((9,), 3),
    "2-D": ((5, 8), None),
    "2-D, 1 channel": ((7, 5), 1),
    "2-D, 3 channels": ((5, 6), 3),
    "row": ((1, 9), 2),
    "column": ((8, 1), None),
}
STORAGE = {"dense": {"method": "dense"}, "stored": {}, "recomputed": {"store": False}}


@cache
def patch_case(name: str, image: str, boundary: Any) -> tuple[Grid, Any, Any]:
    shape, channels = IMAGES[image]
    domain = Grid(shape, 0.7, boundary)
    values = signal(shape if channels is None else (*shape, channels))
    return domain, values, patch_matrix(PATCHES[name], domain, values)


TURNS = list(itertools.product(PATCHES, DTYPES))


# What is clipped depends on the image, the boundary and the storage together, so that these meet as triples;
# kernels and dtypes take turns, so that all pairs occur.
@pytest.mark.parametrize(
    ("image", "boundary", "storage", "name", "dtype"),
    [
        (*way, *TURNS[(2 * i + i // 2) % len(TURNS)])
        for i, way in enumerate(itertools.product(IMAGES, BOUNDARIES, STORAGE))
    ],
)
@pytest.mark.sampled(13)
def test_patch_kernel(image: str, boundary: Any, storage: str, name: str, dtype: Any) -> None:
    domain, values, matrix = patch_case(name, image, boundary)
    result = affinity(PATCHES[name], domain, values.astype(dtype), **STORAGE[storage])  # type: ignore[arg-type]
    assert isinstance(result, DenseAffinity if storage == "dense" else PatchStencil)
    assert result.symmetric
    assert not result.positive_semidefinite
    assert result.dtype == dtype
    check_affinity(result, matrix, dtype=dtype)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("patch_size", "boundary", "tokens"), pairs([1, 3, 5, 7, 9, 11], BOUNDARIES, ["pixel", "patch"])
)
@pytest.mark.sampled(4)
def test_patch_sizes(patch_size: int, boundary: Any, tokens: Any) -> None:
    """Sums over patches of every size, most of them larger than the grid along one axis."""
    kernel = Patch(0.5, patch_size=patch_size, search_radius=2, tokens=tokens)
    domain = Grid((5, 6), boundary=boundary) if patch_size < 7 else Grid((3, 11), boundary=boundary)
    if patch_size >= 9:
        domain = Grid(11, boundary=boundary)
    values = signal(domain.shape)
    matrix = patch_matrix(kernel, domain, values) if min(domain.shape) > 4 else None
    if matrix is None:
        kernel = Patch(0.5, patch_size=patch_size, search_radius=1, tokens=tokens)
        matrix = patch_matrix(kernel, domain, values)
    for options in STORAGE.values():
        check_affinity(affinity(kernel, domain, values, **options), matrix)  # type: ignore[arg-type]


@pytest.mark.parametrize("storage", STORAGE)
@pytest.mark.parametrize("boundary", BOUNDARIES)
def test_search_larger_than_the_grid(boundary: Any, storage: str) -> None:
    """The search is shrunk so that no node is met twice; the message says to what, and blames the caller's line."""
    kernel, domain = Patch(0.5, patch_size=3, search_radius=9), Grid((4, 7), boundary=boundary)
    values = signal((4, 7))
    with pytest.warns(NlflowWarning, match=r"19 nodes is larger than the grid \(4, 7\); shrunk to 3 x 7") as caught:
        result = affinity(kernel, domain, values, **STORAGE[storage])  # type: ignore[arg-type]
    assert caught[0].filename == __file__
    check_affinity(result, patch_matrix(kernel, domain, values))


@pytest.mark.slow
@given(
    shape=st.one_of(
        st.tuples(st.integers(3, 12)), st.tuples(st.integers(3, 6), st.integers(3, 6)), st.just((1, 7)), st.just((7, 1))
    ),
    boundary=st.sampled_from(BOUNDARIES),
    patch_size=st.sampled_from([1, 3]),
    search_radius=st.integers(1, 2),
    sigma=st.sampled_from([0.0, 0.2]),
    tokens=st.sampled_from(["pixel", "patch"]),
    spatial_width=st.sampled_from([None, 0.7]),
    channels=st.integers(1, 2),
    seed=st.integers(0, 999),
)
def test_any_patch_kernel(
    shape: tuple[int, ...], boundary: Any, patch_size: int, search_radius: int, channels: int, seed: int, **options: Any
) -> None:
    radius = min(search_radius, *((n - 1) // 2 for n in shape if n > 1))
    kernel = Patch(0.5, patch_size=patch_size, search_radius=radius, **options)
    domain = Grid(shape, boundary=boundary)
    values = signal((*shape, channels), seed=seed)
    matrix = patch_matrix(kernel, domain, values)
    for storage in STORAGE.values():
        check_affinity(affinity(kernel, domain, values, **storage), matrix)  # type: ignore[arg-type]


# Work is cut into tiles of 32 rows and 512 columns; nodes on both sides of each cut, and at the edges.
TILED: dict[str, tuple[tuple[int, ...], list[tuple[int, ...]]]] = {
    "image": ((40, 530), [(0, 0), (0, 529), (29, 511), (31, 509), (31, 512), (32, 511), (33, 514), (39, 0), (39, 529)]),
    "rows": ((70, 9), [(0, 0), (29, 4), (31, 8), (32, 0), (33, 3), (63, 8), (64, 0), (66, 4), (69, 8)]),
    "line": ((520,), [(0,), (509,), (510,), (511,), (512,), (513,), (519,)]),
    "line, exactly one tile": ((512,), [(0,), (1,), (509,), (510,), (511,)]),
    "exactly one tile": ((32, 7), [(0, 0), (0, 6), (29, 3), (30, 3), (31, 0), (31, 6)]),
}


@pytest.mark.parametrize(
    ("name", "boundary", "tokens", "dtype"), pairs(list(TILED), BOUNDARIES, ["pixel", "patch"], DTYPES)
)
def test_more_than_one_tile(name: str, boundary: Any, tokens: Any, dtype: Any) -> None:
    shape, sampled = TILED[name]
    kernel, domain = Patch(0.5, patch_size=3, search_radius=3, tokens=tokens), Grid(shape, boundary=boundary)
    values = signal(shape, dtype)
    u = signal((*shape, 2), dtype, seed=2)
    both = [affinity(kernel, domain, values, store=store) for store in (True, False)]
    averages, degrees = [result.average(u) for result in both], [np.exp(result.log_degree) for result in both]
    rounding = 20 * np.finfo(dtype).eps
    np.testing.assert_allclose(averages[0], averages[1], rtol=0, atol=rounding)
    np.testing.assert_allclose(degrees[0], degrees[1], rtol=rounding)
    sums = PatchSums(kernel, domain, values)
    for node in sampled:
        row = sums.row(node)
        expected = row @ u.reshape(-1, 2).astype(np.float64) / row.sum()
        np.testing.assert_allclose(averages[0][node], expected, rtol=0, atol=TOLERANCE[np.dtype(dtype)])
        np.testing.assert_allclose(degrees[0][node], row.sum(), rtol=TOLERANCE[np.dtype(dtype)])


@pytest.mark.parametrize("store", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_large_and_small_units(dtype: Any, store: bool) -> None:
    """Only the signal over the width matters, whatever the units; also where a squared difference would overflow."""
    domain, values, u = Grid((9, 8)), signal((9, 8), dtype), signal((9, 8), dtype, seed=2)
    expected = affinity(Patch(0.5, 3, 2), domain, values, store=store).average(u)
    for unit in (2.0**-60, 2.0**60) if dtype == np.float32 else (2.0**-500, 2.0**500):
        result = affinity(Patch(0.5 * unit, 3, 2), domain, values * dtype(unit), store=store).average(u)
        np.testing.assert_allclose(result, expected, rtol=0, atol=1e-6 if dtype == np.float32 else 1e-14)


@pytest.mark.parametrize("options", [{}, {"store": False}, {"method": "dense"}])
def test_far_patches_have_no_weight(options: Any) -> None:
    """Squares that overflow float32 are infinite distances, not NaN."""
    values = np.where(np.arange(12) < 6, 0, 3e30).astype(np.float32)
    result = affinity(Patch(0.5, patch_size=1, search_radius=2), Grid(12), values, **options)
    np.testing.assert_allclose(result.average(values), values, rtol=3e-7)


@pytest.mark.parametrize("store", [True, False])
@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float64, 5e-15), (np.float32, 4e-7)])
def test_exponential(dtype: Any, tolerance: float, store: bool) -> None:
    """The loops have an exponential of their own: it is right to a few roundings, over the whole range."""
    for difference in np.arange(75) / 8:  # squares are exact in either dtype
        values = np.array([0, difference, 0], dtype)
        kernel, domain = Patch(1.0, patch_size=1, search_radius=1), Grid(3, boundary="isolated")
        share = affinity(kernel, domain, values, store=store).average(np.array([0, 1, 0], dtype))[0]
        expected = math.exp(-(difference**2)) if difference**2 < (87 if dtype == np.float32 else 708) else 0.0
        assert math.isclose(share, expected / (1 + expected), rel_tol=tolerance), difference


def test_equal_patches_average_evenly() -> None:
    """On a constant image all weights are 1: the average is the mean over the window, also in float32."""
    domain = Grid((6, 6), boundary="periodic")
    u = signal((6, 6), np.float32)
    result = affinity(Patch(1e-3, patch_size=5, search_radius=1), domain, np.full((6, 6), 0.3, np.float32))
    windows = [np.roll(u.astype(np.float64), (i, j), (0, 1)) for i in (-1, 0, 1) for j in (-1, 0, 1)]
    np.testing.assert_allclose(result.average(u), np.mean(windows, axis=0), rtol=3e-7)
    np.testing.assert_allclose(result.degree, 9, rtol=3e-7)


# --- scikit-image ----------------------------------------------------------------------------------------------------


def schraudolph(x: float) -> float:
    """Return the approximation of exp(x) that scikit-image uses, right to 6 %: its upper bits from one product."""
    upper = int(1512775.3951951856938 * x) + 1072632447
    return float(struct.unpack("<d", struct.pack("<ii", 0, upper))[0])


def nonlocal_means(image: Any, node: tuple[int, int], kernel: Patch, *, as_scikit_image: bool) -> float:
    """Return one pixel of nonlocal means, from loops, with or without the shortcuts that scikit-image takes.

    They are (its file ``_nl_means_denoising.pyx``, fast mode): the box of a patch of side s, a difference of
    cumulative sums, holds the (s - 1)^2 pixels from -s/2 + 1 to s/2 but is divided by s^2; the exponential is
    approximated; and exponents below -5 count as zero.
    """
    r = kernel.patch_size // 2
    first = 1 - r if as_scikit_image else -r
    values, weights = [], []
    for di in range(-kernel.search_radius, kernel.search_radius + 1):
        for dj in range(-kernel.search_radius, kernel.search_radius + 1):
            other = node[0] + di, node[1] + dj
            excess = math.fsum(
                (image[node[0] + oi, node[1] + oj] - image[other[0] + oi, other[1] + oj]) ** 2 - 2 * kernel.sigma**2
                for oi in range(first, r + 1)
                for oj in range(first, r + 1)
            )
            exponent = max(excess, 0) / (kernel.patch_size * kernel.width) ** 2
            if as_scikit_image:
                weights.append(schraudolph(-exponent) if exponent <= 5 else 0.0)
            else:
                weights.append(math.exp(-exponent))
            values.append(weights[-1] * image[other])
    return math.fsum(values) / math.fsum(weights)


@pytest.mark.parametrize("sigma", [0.0, 0.1])
def test_scikit_image(sigma: float) -> None:
    """One average is nonlocal means; scikit-image's differs by its shortcuts, and by nothing else.

    Its border differs as well (patches and windows run over a mirrored image, the edge not repeated), so nodes are
    taken where neither sees it.
    """
    clean = np.add.outer(np.sin(np.arange(24) / 4), np.arange(24) > 12)
    image = clean + np.random.default_rng(3).normal(0, 0.1, clean.shape)
    kernel = Patch(0.15, patch_size=5, search_radius=3, sigma=sigma)
    ours = affinity(kernel, Grid((24, 24)), image).average(image)
    theirs = denoise_nl_means(image, 5, 3, h=kernel.width, sigma=sigma, fast_mode=True)
    for node in [(i, j) for i in range(6, 18, 3) for j in range(6, 18, 2)]:
        assert abs(ours[node] - nonlocal_means(image, node, kernel, as_scikit_image=False)) < 1e-13
        assert abs(theirs[node] - nonlocal_means(image, node, kernel, as_scikit_image=True)) < 1e-12


def test_volumes_have_the_dense_matrix_alone() -> None:
    image, grid = np.random.default_rng(0).random((3, 4, 3)), Grid((3, 4, 3))
    kernel = Patch(0.5, patch_size=3, search_radius=1)
    check_affinity(affinity(kernel, grid, image, method="dense"), patch_matrix(kernel, grid, image))
    for method in ("auto", "stencil"):
        with pytest.raises(InputError, match=r"^domain: got a grid of 3 axes, expected one or two .* slice by slice"):
            affinity(kernel, grid, image, method=method)


@pytest.mark.parametrize("store", [True, False])
@pytest.mark.parametrize("shape", [(30,), (3, 20), (20, 3)], ids=str)
def test_edges_of_windows_that_are_clipped(shape: tuple[int, ...], store: bool) -> None:
    """Windows of another radius along each axis: W_ij = k_ij + k_ji between nodes that are in each other's window."""
    image = np.random.default_rng(0).random(shape)
    radii = [min(3, (n - 1) // 2) for n in shape]
    kernel = Patch(0.5, patch_size=1, search_radius=3)
    with contextlib.nullcontext() if min(shape) > 6 else pytest.warns(NlflowWarning, match="larger than the grid"):
        built = affinity(kernel, Grid(shape, boundary="isolated"), image, store=store)
    places = np.array(list(np.ndindex(*shape)))
    near = (np.abs(places[:, None] - places) <= radii).all(axis=-1) & ~np.eye(len(places), dtype=bool)
    values = image.ravel()
    expected = np.where(near, 2 * np.exp(-((values[:, None] - values) ** 2) / 0.5**2), 0.0)
    np.testing.assert_allclose(built.edges().toarray(), expected, rtol=1e-12, atol=0)
    total = 0.5 * (expected * np.abs(values[:, None] - values)).sum()
    assert Jp(built, 1).value(image) == pytest.approx(total, rel=1e-12)
