"""The contract that all affinities share, and position kernels on grids against plain double sums."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import numpy as np
import pytest

from nlflow import ExpDotProduct, Gaussian, Grid, Laplace, NlflowWarning, Patch, Points, TopHat, affinity
from nlflow.affinities import Affinity, ConvolutionAffinity, DenseAffinity, TableStencil
from tests.reference import check_affinity, kept_bytes, plain_average, plain_degree, position_matrix

pytestmark = pytest.mark.numerical

BOUNDARIES = ["periodic", "reflect", "isolated"]
DTYPES = [np.float64, np.float32]


def signal(shape: tuple[int, ...], dtype: Any = np.float64, seed: int = 1) -> Any:
    return np.random.default_rng(seed).random(shape).astype(dtype)


# --- position kernels ------------------------------------------------------------------------------------------------

KERNELS = {
    "gaussian": Gaussian(width=0.6),
    "gaussian, amplitude": Gaussian(width=0.4, amplitude=0.5),
    "laplace": Laplace(width=0.25),
    "top-hat": TopHat(radius=1.0),
}
GRIDS = {
    "1-D": ((11,), (0.3,)),
    "2-D": ((5, 7), (0.5, 0.8)),
    "row": ((1, 9), (2.0, 0.5)),
    "column": ((6, 1), (0.5, 1.0)),
    "node": ((1,), (1.0,)),
    "3-D": ((4, 3, 5), (1.0, 1.5, 1.2)),
}


def built(method: str, kernel: Any, grid: Grid, window: int | None, dtype: Any) -> Affinity:
    # The dense matrix has one dtype, float64 unless it is built here with another; the others take both.
    if method == "dense":
        return DenseAffinity.from_table(kernel, grid, window, dtype)
    result = affinity(kernel, grid, method=method, window=window)
    assert isinstance(result, TableStencil if method == "stencil" else ConvolutionAffinity)
    return result


METHODS = ["dense", "stencil", "convolution"]
TURNS = list(itertools.product(KERNELS, DTYPES))


# How images are met depends on the grid, the boundary and the method together, so that these three meet as triples;
# kernels and dtypes take turns, so that all pairs occur.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("grid", "boundary", "method", "kernel", "dtype"),
    [(*way, *TURNS[i % len(TURNS)]) for i, way in enumerate(itertools.product(GRIDS, BOUNDARIES, METHODS))],
)
@pytest.mark.sampled(11)
def test_position_kernel(grid: str, boundary: Any, method: str, kernel: str, dtype: Any) -> None:
    domain = Grid(*GRIDS[grid], boundary)
    result = built(method, KERNELS[kernel], domain, None, dtype)
    check_affinity(result, position_matrix(KERNELS[kernel], domain), dtype=dtype)
    assert result.method == method
    assert result.symmetric
    assert result.positive_semidefinite == (kernel != "top-hat")


# What a window cuts off depends on the boundary, the method and the window together.
@pytest.mark.parametrize(
    ("boundary", "method", "kernel", "window", "dtype"),
    [
        (*case, DTYPES[i % 2])
        for i, case in enumerate(
            (boundary, method, *window)
            for boundary in BOUNDARIES
            for method in METHODS
            for window in (("gaussian", 1), ("gaussian", 3), ("laplace", 2), ("top-hat", 4), ("gaussian", 2))
        )
    ],
)
@pytest.mark.sampled(9)
def test_window(boundary: Any, method: str, kernel: str, window: int, dtype: Any) -> None:
    """The window is smaller than the kernel, or larger than the grid (7 nodes, 4 to each side), or than both."""
    domain = Grid((9, 7), (0.5, 0.8), boundary)
    if window == 4:
        domain = Grid((9, 11), (0.5, 0.8), boundary)
    matrix = position_matrix(KERNELS[kernel], domain, window)
    check_affinity(built(method, KERNELS[kernel], domain, window, dtype), matrix, dtype=dtype)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("boundary", BOUNDARIES)
def test_window_in_more_dimensions(boundary: Any, method: str) -> None:
    """Three axes of different lengths and spacings; and four, where two outer axes are flattened into planes."""
    for shape, spacing, dtype in (((4, 3, 6), (0.5, 0.8, 0.6), np.float32), ((2, 3, 1, 4), (0.5,) * 4, np.float64)):
        domain = Grid(shape, spacing, boundary)
        matrix = position_matrix(KERNELS["gaussian"], domain, 1)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "search window", NlflowWarning)  # axes of one node
            result = built(method, KERNELS["gaussian"], domain, 1, dtype)
        check_affinity(result, matrix, dtype=dtype)
        if method == "stencil":
            off = matrix - np.diag(matrix.diagonal())
            np.testing.assert_allclose(result.edges().toarray() / domain.cell**2 / 2, off, rtol=1e-6, atol=1e-15)


@pytest.mark.parametrize("method", ["stencil", "convolution"])
@pytest.mark.parametrize("boundary", BOUNDARIES)
def test_one_slice_is_a_plane(boundary: Any, method: str) -> None:
    """Images of the one slice lie straight above and below, and change a Gaussian by a factor."""
    plane, volume = Grid((7, 9), (0.5, 0.8), boundary), Grid((1, 7, 9), (2.0, 0.5, 0.8), boundary)
    flat, thick = (affinity(Gaussian(width=0.9), domain, method=method) for domain in (plane, volume))
    u = signal((7, 9, 2))
    np.testing.assert_allclose(thick.average(u[None])[0], flat.average(u), rtol=0, atol=1e-14)
    if (boundary, method) == ("isolated", "stencil"):  # the same sums in the same order
        np.testing.assert_array_equal(thick.average(u[None])[0], flat.average(u))


@pytest.mark.parametrize("method", ["stencil", "convolution"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_fourier_modes_of_a_volume(method: str, dtype: Any) -> None:
    """A mode is an eigenvector; a windowed Gaussian has the product of three sums of cosines as its eigenvalue."""
    shape, spacing, modes, width, window = (6, 8, 5), (0.5, 0.4, 0.7), (1, -2, 2), 0.6, 3
    p = affinity(Gaussian(width=width), Grid(shape, spacing, "periodic"), method=method, window=window)
    eigenvalue, phase = 1.0, np.zeros(shape)
    for n, h, m, i in zip(shape, spacing, modes, np.indices(shape), strict=True):
        offsets = np.arange(-window, window + 1)
        k = np.exp(-((offsets * h / width) ** 2) / 2)
        eigenvalue *= float((k * np.cos(2 * np.pi * m * offsets / n)).sum() / k.sum())
        phase += 2 * np.pi * m * i / n
    wave = np.stack([np.cos(phase), np.sin(phase)], axis=-1).astype(dtype)
    np.testing.assert_allclose(p.average(wave), eigenvalue * wave, rtol=0, atol=8 * np.finfo(dtype).eps)
    assert p.known_spectrum() is not None
    assert np.abs(p.known_spectrum() - eigenvalue).min() < 1e-14  # type: ignore[operator]


def test_large_windows_of_volumes_in_single_precision() -> None:
    """69 000 weights are added row by row and plane by plane, so that the error grows with the side of the window."""
    p = affinity(Laplace(width=2.0), Grid((4, 4, 4), boundary="periodic"), window=20, method="stencil")
    u = signal((4, 4, 4))
    np.testing.assert_allclose(p.average(u.astype(np.float32)), p.average(u), rtol=0, atol=3e-7)
    p.push(u.astype(np.float32))  # mass is kept to 1e-6


@pytest.mark.parametrize("method", ["dense", "stencil", "convolution"])
@pytest.mark.parametrize("boundary", ["periodic", "reflect"])
def test_window_larger_than_a_grid_with_images(boundary: Any, method: str) -> None:
    """Nine images of each node: the sum over them is finite and exact, so nothing is shrunk and nothing is said."""
    kernel, domain = Laplace(width=3.0), Grid((3, 4), boundary=boundary)
    check_affinity(affinity(kernel, domain, method=method, window=10), position_matrix(kernel, domain, 10))


@pytest.mark.parametrize(
    ("shape", "window", "side"),
    [((7,), 7, "13"), ((5, 3), 9, "9 x 5"), ((4, 40), 12, "7 x 25"), ((40, 4), 12, "25 x 7")],
)
def test_window_larger_than_an_isolated_grid(shape: tuple[int, ...], window: int, side: str) -> None:
    """Beyond n - 1 nodes there is nothing on an isolated grid, whichever of its axes is the short one."""
    kernel, domain = Laplace(width=3.0), Grid(shape, boundary="isolated")
    with pytest.warns(NlflowWarning, match=f"window of {2 * window + 1} nodes .*shrunk to {side}$") as caught:
        result = affinity(kernel, domain, window=window)
    assert caught[0].filename == __file__
    check_affinity(result, position_matrix(kernel, domain, window))


@pytest.mark.parametrize(("shape", "window"), [((10,), 6), ((10,), 9), ((6, 12), 5)])
def test_no_warning_for_a_window_that_fits(shape: tuple[int, ...], window: int) -> None:
    """Offsets up to n - 1 connect nodes of the grid, so the window is used as it was given."""
    kernel, domain = Laplace(width=3.0), Grid(shape, boundary="isolated")
    check_affinity(affinity(kernel, domain, window=window), position_matrix(kernel, domain, window))


@pytest.mark.parametrize("boundary", BOUNDARIES)
def test_choice_of_method(boundary: Any) -> None:
    """Few weights are summed, many are transformed, and the reason says which; results agree."""
    kernel, domain = Gaussian(width=2.0), Grid((30, 40), boundary=boundary)
    small, large = affinity(kernel, domain, window=3), affinity(kernel, domain)
    assert (small.method, large.method) == ("stencil", "convolution")
    assert "49 weights, no more than" in small.reason
    assert "weights, more than" in large.reason
    assert affinity(kernel, domain, method="stencil").reason == "asked for"
    u = signal((30, 40))
    np.testing.assert_allclose(
        large.average(u), affinity(kernel, domain, method="stencil").average(u), rtol=0, atol=1e-14
    )


@pytest.mark.slow
@pytest.mark.parametrize("method", ["stencil", "convolution"])
@pytest.mark.parametrize("boundary", BOUNDARIES)
def test_rows_longer_than_one_tile(boundary: Any, method: str) -> None:
    kernel, domain = Gaussian(width=1.2), Grid(530, boundary=boundary)
    u = signal((530, 2))
    result = affinity(kernel, domain, method=method)
    matrix = position_matrix(kernel, domain)
    np.testing.assert_allclose(result.average(u), plain_average(matrix, domain.weights, u), rtol=0, atol=1e-14)


# --- threads, memory, the contract itself ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("storage", "dtype"),
    [("stored", np.float64), ("recomputed", np.float32), ("table", np.float64), ("volume", np.float32)],
)
def test_the_number_of_threads_changes_no_bit(storage: str, dtype: Any) -> None:
    import numba

    if numba.config.NUMBA_NUM_THREADS < 2:
        pytest.skip("numba was started with one thread")
    domain = Grid((75, 40), boundary="isolated")
    values, u = signal((75, 40), dtype), signal((75, 40, 3), dtype, seed=2)
    results = []
    before = numba.get_num_threads()
    try:
        for threads in (1, 2):
            numba.set_num_threads(threads)
            if storage == "volume":
                domain, u = Grid((9, 30, 40)), signal((9, 30, 40), dtype, seed=2)
                result: Affinity = affinity(Gaussian(width=1.0), domain, method="stencil", window=2)
            elif storage == "table":
                result = affinity(Gaussian(width=1.0), domain, method="stencil")
            else:
                kernel = Patch(0.5, patch_size=5, search_radius=3, tokens="patch")
                result = affinity(kernel, domain, values, store=storage == "stored")
            results.append((result.average(u), result.log_degree))
    finally:
        numba.set_num_threads(before)
    np.testing.assert_array_equal(results[0][0], results[1][0])
    np.testing.assert_array_equal(results[0][1], results[1][1])


MEMORY: dict[str, Any] = {
    "dense": lambda: affinity(Gaussian(width=2.0), Grid((16, 16)), method="dense"),
    "dense, patches": lambda: affinity(Patch(0.5, 3, 2), Grid((16, 16)), signal((16, 16, 40)), method="dense"),
    "stencil, stored": lambda: affinity(Patch(0.5, 9, 1), Grid((90, 90)), signal((90, 90, 20))),
    "stencil, recomputed": lambda: affinity(Patch(0.5, 9, 1), Grid((90, 90)), signal((90, 90, 20)), store=False),
    "table": lambda: affinity(Gaussian(width=4.0), Grid((60, 50)), method="stencil"),
    "convolution, periodic": lambda: affinity(Gaussian(width=4.0), Grid((120, 100), boundary="periodic")),
    "convolution, reflect": lambda: affinity(Gaussian(width=4.0), Grid((120, 100))),
    "convolution, isolated": lambda: affinity(Gaussian(width=4.0), Grid((120, 100), boundary="isolated")),
}


@pytest.mark.parametrize("name", MEMORY)
def test_memory_is_what_is_kept(name: str) -> None:
    """Large enough that a second copy of anything that counts would show; after an average in either dtype."""
    result = MEMORY[name]()
    for dtype in DTYPES if result.dtype is None else [result.dtype]:
        result.average(np.ones(result.domain.shape, dtype))
    kept = kept_bytes(result)
    assert abs(result.memory_bytes - kept) <= 0.05 * kept, f"{result.memory_bytes} stated, {kept} kept"


class Broken(Affinity):
    """An affinity with one deliberate fault."""

    method = "broken"

    def __init__(self, fault: str, right: DenseAffinity) -> None:
        super().__init__(right.domain, right.kernel, symmetric=True, positive_semidefinite=True)
        self.fault = fault
        self._kept, self._log_degrees = right.matrix.copy(), right._log_degree()
        if fault == "asymmetric weights":
            self._kept = np.tril(self._kept) + 0.5 * np.triu(self._kept, 1)
            self._kept /= self._kept.sum(axis=1, keepdims=True)

    def _average(self, u: Any) -> Any:
        result = np.tensordot(self._kept, u, axes=1)
        if self.fault == "not normalized":
            result = result * np.exp(self._log_degrees).reshape(-1, *[1] * (u.ndim - 1))
        if self.fault == "shifted by one node":
            result = np.roll(result, 1, axis=0)
        if self.fault == "sharpened":
            result = 2 * u - result
        if self.fault == "clipped":
            result = np.clip(result, -0.5, 0.5)
        if self.fault == "channels mixed" and u.ndim > 1:
            result = result[..., ::-1]
        return result.astype(np.float32) if self.fault == "other dtype" else result

    def _log_degree(self) -> Any:
        slope = np.linspace(0, 0.1, self.domain.size)
        return self._log_degrees + (slope if self.fault == "wrong degree" else 0)

    @property
    def memory_bytes(self) -> int:
        return 0 if self.fault == "no memory" else self._kept.nbytes


FAULTS = {
    "none": "",
    "not normalized": "constants",
    "shifted by one node": "adjoint",
    "asymmetric weights": "adjoint",
    "wrong degree": "adjoint",
    "sharpened": "range",
    "clipped": "constants",
    "channels mixed": "channels",
    "other dtype": "average: dtype",
    "no memory": "memory_bytes",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_contract_finds_a_broken_operator(fault: str) -> None:
    """Each fault breaks one law, and is found by it without a reference."""
    kernel, domain = Gaussian(width=1.5), Grid(120)
    right = affinity(kernel, domain, method="dense")
    assert isinstance(right, DenseAffinity)
    broken, matrix = Broken(fault, right), position_matrix(kernel, domain)
    if fault == "none":
        check_affinity(broken, matrix)
        return
    with pytest.raises(AssertionError, match=f"^{FAULTS[fault]}"):
        check_affinity(broken)
    with pytest.raises(AssertionError):
        check_affinity(broken, matrix)


def test_degree_agrees_with_its_logarithm() -> None:
    kernel, domain = Laplace(width=0.5, amplitude=3.0), Grid(20, 0.1, "isolated")
    result = affinity(kernel, domain)
    np.testing.assert_allclose(result.degree, plain_degree(position_matrix(kernel, domain), domain.weights), rtol=1e-13)
    assert "Laplace" in repr(result)
    assert "20 nodes" in repr(result)


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [128, 129, 1000, 1024])
def test_single_precision_averages_of_many_nodes_keep_their_digits(nodes):
    _, keys, values, _ = np.random.default_rng(3).standard_normal((4, nodes, 64)).astype(np.float32)
    average = affinity(ExpDotProduct(), Points(np.zeros(nodes)), keys).average(values)
    logits = keys.astype(float) @ keys.T.astype(float) / 8
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    exact = weights @ values.astype(float) / weights.sum(axis=1, keepdims=True)
    assert average.dtype == np.float32
    # A product in float32 all through is off by 1.2e-6 here for 1024 nodes (OpenBLAS).
    assert np.abs(average - exact).max() <= 8e-7 * np.abs(exact).max()
