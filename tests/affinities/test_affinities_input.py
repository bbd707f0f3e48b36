"""What `affinity` and its averages refuse: with which words, and before anything is computed or allocated."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest

from benchmarks.resident import traced
from nlflow import (
    ExpDotProduct,
    Gaussian,
    GradientFlow,
    Grid,
    InputError,
    J,
    MemoryLimitError,
    NlflowError,
    NlflowWarning,
    Patch,
    Points,
    affinity,
    from_matrix,
)
from nlflow.affinities import dense

GRID, POINTS = Grid((6, 7)), Points(np.arange(6.0))
PATCH = Patch(1.0, patch_size=3, search_radius=2)
IMAGE = np.random.default_rng(0).random((6, 7))
KEYS = np.random.default_rng(1).normal(size=(6, 3))


def masked() -> Any:
    return np.ma.masked_array(IMAGE, mask=IMAGE > 0.5)


# --- signals ---------------------------------------------------------------------------------------------------------

AFFINITIES: dict[str, Any] = {
    "stencil": lambda dtype: affinity(PATCH, GRID, IMAGE.astype(dtype)),
    "recomputed": lambda dtype: affinity(PATCH, GRID, IMAGE.astype(dtype), store=False),
    "dense": lambda dtype: affinity(Gaussian(width=1.0), GRID, IMAGE.astype(dtype)),
    "table": lambda dtype: affinity(Gaussian(width=1.0), GRID, window=1),
    "convolution": lambda dtype: affinity(Gaussian(width=1.0), GRID, method="convolution"),
}
BAD_SIGNALS = [
    (
        np.full((6, 7), np.nan),
        r"u: got 42 NaN or infinite value\(s\) \(the first at index .*\), expected finite ones; replace them first$",
    ),
    (np.where(np.arange(42).reshape(6, 7) == 9, np.inf, IMAGE), r"u: got 1 NaN or infinite"),
    (np.empty((6, 0)), r"u: got an empty array of shape \(6, 0\)"),
    (np.ones(6), r"u: got shape \(6,\), expected \(6, 7\) or \(6, 7, 'D'\): the node axes of the domain first"),
    (np.ones((7, 6)), r"u: got shape \(7, 6\), expected \(6, 7\)"),
    (np.ones((3, 6, 7)), r"u: got shape \(3, 6, 7\), expected \(6, 7\)"),
    (np.ones((6, 7, 2, 2)), r"u: got shape \(6, 7, 2, 2\), expected \(6, 7\)"),
    (IMAGE * 1j, r"u: got complex values \(complex128\), expected real ones; pass .real or abs\(\)"),
    (masked(), r"u: got a masked array, expected a plain one; fill it$"),
    (np.full((6, 7), "a"), r"u: got dtype <U1, expected a real numeric array"),
    (None, r"u: got None, expected a real numeric array"),
]


@pytest.mark.parametrize(("u", "message"), BAD_SIGNALS)
@pytest.mark.parametrize("name", AFFINITIES)
def test_bad_signals(name: str, u: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        AFFINITIES[name](np.float64).average(u)


@pytest.mark.parametrize("u", [np.arange(42).reshape(6, 7), masked(), IMAGE * 1j, IMAGE.tolist()])
def test_means_are_those_of_floats(u: Any) -> None:
    """A mean of integers was cut to an integer, and masked entries counted."""
    smooth = AFFINITIES["table"](np.float64)
    with pytest.raises(InputError, match=r"^u: got .*, expected"):
        smooth.mean(u, "degree")


def test_flows_take_no_masked_array() -> None:
    flow = GradientFlow(J(AFFINITIES["dense"](np.float64)))
    with pytest.raises(InputError, match=r"^u: got a masked array, expected a plain one"):
        flow.velocity(masked())


@pytest.mark.parametrize("name", ["stencil", "recomputed", "dense"])
def test_signal_of_another_dtype_than_the_features(name: str) -> None:
    with pytest.raises(InputError, match=r"u: got dtype float64, expected float32, .* convert one of them"):
        AFFINITIES[name](np.float32).average(IMAGE)
    with pytest.raises(InputError, match=r"u: got dtype float32, expected float64, .* convert one of them"):
        AFFINITIES[name](np.float64).average(IMAGE.astype(np.float32))


@pytest.mark.parametrize("name", AFFINITIES)
def test_lists_integers_and_strides(name: str) -> None:
    """What NumPy can read as numbers is taken, in any memory layout; the input is left as it was."""
    result = AFFINITIES[name](np.float64)
    whole = (IMAGE * 100).astype(np.int16)
    expected = result.average(whole.astype(np.float64))
    wide = np.zeros((12, 7, 2))
    wide[::2, :, 0] = whole
    reordered = whole.astype(">f8")
    for u in (
        whole,
        whole.tolist(),
        np.asfortranarray(whole),
        wide[::2, :, 0],
        whole[::-1, ::-1][::-1, ::-1],
        reordered,
    ):
        before = np.array(u)
        np.testing.assert_allclose(result.average(u), expected, rtol=1e-14)
        np.testing.assert_array_equal(u, before)
    assert result.average(whole > 50).dtype == np.float64


@pytest.mark.parametrize("name", AFFINITIES)
def test_torch_where_only_numpy_is_computed(name: str) -> None:
    """A tensor is refused with the words for it, whichever loop lies below."""
    torch = pytest.importorskip("torch", reason="the device code")
    with pytest.raises(InputError, match=r"u: got .*torch"):
        AFFINITIES[name](np.float64).average(torch.from_numpy(IMAGE))


@pytest.mark.parametrize(
    "build",
    [
        lambda image: affinity(PATCH, GRID, image),
        lambda image: affinity(PATCH, GRID, image, store=False),
        lambda image: affinity(PATCH, GRID, image, method="dense"),
        lambda image: affinity(ExpDotProduct(), GRID, image),
        lambda image: affinity(ExpDotProduct(), Grid(6), np.ones((6, 7)), queries=image),
        lambda image: from_matrix(image[:, :6], Grid(6)),
    ],
)
def test_features_are_not_changed_and_may_change_later(build: Any) -> None:
    """An affinity is built once: what becomes of the arrays that it was built from does not matter."""
    image = IMAGE.copy()
    result = build(image)
    u = IMAGE if result.domain is GRID else IMAGE[:, 0]
    np.testing.assert_array_equal(image, IMAGE)
    before = result.average(u), result.symmetrized().average(u)
    image[:] = 0.5
    np.testing.assert_array_equal(result.average(u), before[0])
    np.testing.assert_array_equal(result.symmetrized().average(u), before[1])


# --- arguments of affinity -------------------------------------------------------------------------------------------

BAD_CALLS: dict[str, tuple[Any, str]] = {
    "kernel": (lambda: affinity("gaussian", GRID), r"kernel: got str, expected a Kernel such as Gaussian"),
    "kernel class": (lambda: affinity(Gaussian, GRID), r"kernel: got the class Gaussian, expected a Kernel"),
    "domain": (lambda: affinity(Gaussian(1.0), (6, 7)), r"domain: got tuple, expected a Grid, Points or Batch"),
    "method": (lambda: affinity(Gaussian(1.0), GRID, method="fft"), r"method: got 'fft', expected one of 'auto', 'den"),
    "method type": (lambda: affinity(Gaussian(1.0), GRID, method=None), r"method: got None, expected one of"),
    "window 0": (lambda: affinity(Gaussian(1.0), GRID, window=0), r"window: got 0, expected an integer >= 1"),
    "window 1.5": (lambda: affinity(Gaussian(1.0), GRID, window=1.5), r"window: got 1.5, expected an integer"),
    "patch on points": (lambda: affinity(PATCH, POINTS, np.ones(6)), r"domain: a patch kernel needs a Grid"),
    "patch without image": (lambda: affinity(PATCH, GRID), r"features: a patch kernel needs the image"),
    "patch by convolution": (
        lambda: affinity(PATCH, GRID, IMAGE, method="convolution"),
        r"method: got 'convolution', expected 'auto', 'stencil' or 'dense': patch weights vary in space",
    ),
    "patch with a window": (lambda: affinity(PATCH, GRID, IMAGE, window=2), r"window: .*search_radius"),
    "patch with queries": (lambda: affinity(PATCH, GRID, IMAGE, queries=IMAGE), r"queries: "),
    "position without a store": (lambda: affinity(Gaussian(1.0), GRID, store=False), r"store: only patch kernels"),
    "position with queries": (lambda: affinity(Gaussian(1.0), GRID, queries=IMAGE), r"queries: "),
    "features by stencil": (
        lambda: affinity(Gaussian(1.0), GRID, IMAGE, method="stencil"),
        r"method: got 'stencil', expected 'auto', 'dense', 'pairwise', 'tiled', 'sparse', 'nufft' or 'lowrank' for a",
    ),
    "features in a window": (
        lambda: affinity(Gaussian(1.0), GRID, IMAGE, window=2),
        r"window: only position kernels on a Grid can be windowed; leave it out",
    ),
    "points by convolution": (
        lambda: affinity(Gaussian(1.0), POINTS, method="convolution"),
        r"method: got 'convolution', expected 'auto', 'dense', 'pairwise', 'tiled', 'sparse', 'nufft' or 'lowrank' on",
    ),
    "points in a window": (lambda: affinity(Gaussian(1.0), POINTS, window=2), r"window: only position kernels on a Gr"),
    "dot product of nothing": (
        lambda: affinity(ExpDotProduct(), POINTS),
        r"features: got none for ExpDotProduct, which compares them",
    ),
    "queries of a radial kernel": (
        lambda: affinity(Gaussian(1.0), POINTS, KEYS, queries=KEYS),
        r"queries: a radial kernel compares features with themselves; leave queries out",
    ),
    "queries of another dtype": (
        lambda: affinity(ExpDotProduct(), POINTS, KEYS, queries=KEYS.astype(np.float32)),
        r"queries: got ndarray of float32, expected ndarray of float64; convert one of them",
    ),
    "queries of another width": (
        lambda: affinity(ExpDotProduct(), POINTS, KEYS, queries=KEYS[:, :2]),
        r"queries: got width 2, expected 3, the width of the keys",
    ),
    "queries of other nodes": (
        lambda: affinity(ExpDotProduct(), POINTS, KEYS, queries=KEYS[:5]),
        r"queries: got shape \(5, 3\), expected \(6,\) or \(6, 'D'\)",
    ),
    "map of another dtype": (
        lambda: affinity(ExpDotProduct(query_map=np.eye(3), key_map=np.eye(3)), POINTS, KEYS.astype(np.float32)),
        r"query_map: got ndarray of float64, expected ndarray of float32",
    ),
    "features of other nodes": (lambda: affinity(PATCH, GRID, IMAGE.T), r"features: got shape \(7, 6\), expected"),
    "features with NaN": (lambda: affinity(PATCH, GRID, IMAGE * np.nan), r"features: got 42 NaN or infinite"),
    "features with inf": (lambda: affinity(ExpDotProduct(), POINTS, KEYS / 0), r"features: got 18 NaN or infinite"),
    "complex features": (lambda: affinity(ExpDotProduct(), POINTS, KEYS * 1j), r"features: got complex values"),
    "masked features": (lambda: affinity(PATCH, GRID, masked()), r"features: got a masked array"),
    "empty features": (lambda: affinity(ExpDotProduct(), POINTS, KEYS[:, :0]), r"features: got an empty array"),
    "huge map": (
        lambda: affinity(ExpDotProduct(1.0, np.eye(KEYS.shape[1]) * 1e308, None), POINTS, 10 * KEYS),
        "affinity: row 0 has logits that overflow",
    ),
    "memory limit": (
        lambda: affinity(Gaussian(1.0), GRID, memory_limit=0),
        r"memory_limit: got 0, expected a real num",
    ),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_calls(name: str) -> None:
    call, message = BAD_CALLS[name]
    with np.errstate(divide="ignore", invalid="ignore"), pytest.raises(InputError, match=message):
        call()


def test_torch_given_to_a_patch_kernel() -> None:
    torch = pytest.importorskip("torch", reason="the device code")
    with pytest.raises(InputError, match=r"features: got Tensor, expected a NumPy array; convert it \(.cpu\(\).numpy"):
        affinity(PATCH, GRID, torch.from_numpy(IMAGE))


def test_torch_mixed_with_numpy() -> None:
    torch = pytest.importorskip("torch", reason="the device code")
    keys, weights = torch.from_numpy(KEYS), np.eye(3)
    with pytest.raises(InputError, match=r"queries: got ndarray of float64, expected Tensor of torch.float64"):
        affinity(ExpDotProduct(), POINTS, keys, queries=KEYS)
    with pytest.raises(InputError, match=r"u: got dtype float64, expected torch.float64"):
        affinity(ExpDotProduct(), POINTS, keys).average(KEYS)
    with pytest.raises(InputError, match=r"u: got dtype torch.float64, expected float64"):
        affinity(ExpDotProduct(), POINTS, KEYS).average(keys)
    with pytest.raises(InputError, match=r"query_map: got ndarray of float64, expected Tensor of torch.float64"):
        affinity(ExpDotProduct(query_map=weights, key_map=weights), POINTS, keys)
    with pytest.raises(InputError, match=r"features: got a torch tensor of dtype torch.int64, expected a floating-poi"):
        affinity(ExpDotProduct(), POINTS, torch.ones(6, 2, dtype=torch.int64))


def test_the_warning_is_given_once_for_an_evolving_kernel() -> None:
    """A search that was shrunk was reported when the affinity was built; each later step would say it again."""
    kernel = Patch(1.0, patch_size=3, search_radius=5)
    with pytest.warns(NlflowWarning, match="shrunk to 5 x 7"):
        result = affinity(kernel, GRID, IMAGE)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result.update(IMAGE + 1)


# --- memory ----------------------------------------------------------------------------------------------------------

LARGE = np.zeros((1500, 1500), np.float32)
TOO_LARGE: dict[str, tuple[Any, str]] = {
    "dense points": (
        lambda **limit: affinity(Gaussian(1.0), Points(np.arange(20000.0)), method="dense", **limit),
        r"a dense affinity of 20000 nodes needs 2\.9\d+ GiB \(3\d{9} bytes\), the limit is .*; use method='pairwise'",
    ),
    "dense features": (
        lambda **limit: affinity(ExpDotProduct(), Points(np.arange(2e4)), np.zeros(20000), method="dense", **limit),
        r"a dense affinity of 20000 nodes needs 2\.9\d+ GiB",
    ),
    "dense grid": (
        lambda **limit: affinity(Gaussian(0.1), Grid((150, 150)), method="dense", **limit),
        r"a dense affinity of 22500 nodes needs 3\.7\d+ GiB .* raise memory_limit",
    ),
    "dense patches": (
        lambda **limit: affinity(PATCH, Grid((200, 200)), np.zeros((200, 200)), method="dense", **limit),
        r"a dense affinity of 40000 nodes needs 1\d\.\d+ GiB",
    ),
    "stencil": (
        lambda **limit: affinity(Patch(1.0), Grid((1500, 1500)), LARGE, **limit),
        r"a stencil of 21 x 21 on 2250000 nodes needs 1\.\d+ GiB \(\d+ bytes\), the limit is .*; use store=False",
    ),
    "table": (
        lambda **limit: affinity(Gaussian(1e4), Grid((10, 10)), method="stencil", **limit),
        r"the table of Gaussian\(.*needs .*GiB .*; use a smaller width, a window, or the boundary 'isolated'",
    ),
    "stencil nodes": (
        lambda **limit: affinity(Gaussian(0.2), Grid((10**6, 10**6)), **limit),
        r"a stencil on 1000000000000 nodes needs 14\.55 TiB .*; use fewer nodes or raise memory_limit",
    ),
    "dense nodes": (
        lambda **limit: affinity(Gaussian(0.2), Grid(10**12), method="dense", **limit),
        r"a dense affinity of 1000000000000 nodes needs .*; use method='convolution'",
    ),
    "convolution table": (
        lambda **limit: affinity(Gaussian(1e4), Grid((10, 10), boundary="periodic"), **limit),
        r"the table of Gaussian\(.*needs .*GiB",
    ),
}


@pytest.mark.parametrize("given", ["argument", "environment"])
@pytest.mark.parametrize("name", TOO_LARGE)
def test_memory_is_refused_before_it_is_taken(name: str, given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call, message = TOO_LARGE[name]
    limit = {"memory_limit": 5e8} if given == "argument" else {}
    if given == "environment":
        monkeypatch.setenv("NLFLOW_MEMORY_LIMIT", "500000000")
    with traced() as taken, pytest.raises(MemoryLimitError, match=message) as caught:
        call(**limit)
    assert "476.8 MiB" in str(caught.value)
    assert isinstance(caught.value, MemoryError)
    assert isinstance(caught.value, NlflowError)
    assert taken.bytes < 4e6


def test_memory_of_a_convolution() -> None:
    with pytest.raises(MemoryLimitError, match=r"a convolution on 10000 nodes needs .*KiB .*; use fewer nodes or"):
        affinity(Gaussian(5.0), Grid((100, 100)), memory_limit=1e5)
    assert affinity(Gaussian(5.0), Grid((100, 100)), memory_limit=1e6).method == "convolution"


def test_the_argument_goes_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NLFLOW_MEMORY_LIMIT", "1000")
    with pytest.raises(MemoryLimitError, match="the limit is 1000 B"):
        affinity(PATCH, GRID, IMAGE)
    assert affinity(PATCH, GRID, IMAGE, memory_limit=1e6).method == "stencil"
    assert affinity(PATCH, GRID, IMAGE, memory_limit=np.inf).method == "stencil"


def test_the_limit_holds_for_what_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    """An affinity that was let pass is updated and symmetrized within the limit that it was given."""
    monkeypatch.setenv("NLFLOW_MEMORY_LIMIT", "1000")
    limit = 1e9
    assert affinity(PATCH, GRID, IMAGE, memory_limit=limit).update(IMAGE + 1).method == "stencil"
    two_maps = ExpDotProduct(query_map=np.eye(3), key_map=2 * np.eye(3))
    result = affinity(two_maps, POINTS, KEYS, memory_limit=limit)
    assert result.symmetrized().update(KEYS + 1).symmetric
    assert from_matrix(np.triu(np.ones((6, 6))), POINTS, memory_limit=limit).symmetrized().symmetric


@pytest.mark.slow
@pytest.mark.parametrize("name", ["features", "matrix", "stencil", "recomputed"])
def test_building_takes_no_more_than_was_asked_for(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes that are held against the limit are those that building takes, not only those that are kept."""
    monkeypatch.setattr(dense, "_BLOCK_BYTES", 2**20)
    grid, image = Grid((200, 200)), np.random.default_rng(0).random((200, 200))
    points, keys = Points(np.arange(1500.0)), np.random.default_rng(0).normal(size=(1500, 2))
    matrix = np.exp(-((keys[:, :1] - keys[:, 0]) ** 2))
    build: dict[str, Any] = {
        "features": lambda **limit: affinity(ExpDotProduct(), points, keys, **limit),
        "matrix": lambda **limit: from_matrix(matrix, points, **limit),
        "stencil": lambda **limit: affinity(PATCH, grid, image, **limit),
        "recomputed": lambda **limit: affinity(PATCH, grid, image, store=False, **limit),
    }
    with pytest.raises(MemoryLimitError) as caught:
        build[name](memory_limit=1)
    needed = int(str(caught.value).split("(")[1].split(" ")[0])
    build[name]()  # loops are compiled
    with traced() as taken:
        build[name]()
    assert taken.bytes <= 1.15 * needed, f"{needed} bytes asked for, {taken.bytes} taken"
