"""Kernel families: formulas, supports, symmetry and definiteness as declared, and parameters that are refused."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest

from nlflow import Anisotropic, ExpDotProduct, Gaussian, Grid, InputError, Laplace, Patch, Points, TopHat, affinity
from nlflow.kernels import InverseMultiquadric, Kernel, Matern, RadialKernel, RationalQuadratic, TruncatedPower
from tests.reference import feature_matrix, profile

RADIAL = [Gaussian(width=0.7), Laplace(width=1.3), TopHat(radius=1.5), Gaussian(width=2.0, amplitude=3.0)]


def features(width: int, seed: int = 0, n: int = 9) -> Any:
    return np.random.default_rng(seed).normal(size=(n, width))


@pytest.mark.parametrize("kernel", [*RADIAL, ExpDotProduct(), ExpDotProduct(scale=-2.0), ExpDotProduct(scale=0.3)])
@pytest.mark.parametrize("width", [1, 4])
def test_formula(kernel: Any, width: int) -> None:
    """log_matrix is the formula without the amplitude, also between two sets of points."""
    x, y = features(width), features(width, 1)[:5]
    got = np.exp(kernel.log_matrix(x, y))
    assert got.shape == (9, 5)
    np.testing.assert_allclose(kernel.amplitude * got, feature_matrix(kernel, x, y), rtol=1e-13, atol=0)


@pytest.mark.parametrize("kernel", RADIAL)
def test_profile_and_support(kernel: Any) -> None:
    r = np.linspace(0, 6, 50)
    got = kernel.amplitude * np.exp(kernel.log_profile(r**2))
    np.testing.assert_allclose(got, [profile(kernel)(x) for x in r], rtol=1e-13)
    whole = np.arange(40)
    np.testing.assert_allclose(kernel.log_profile(whole), kernel.log_profile(whole.astype(float)), rtol=1e-15)
    for rtol in (1e-3, 1e-25):
        beyond = kernel.support(rtol) * np.array([1 + 1e-9, 1.5])
        assert np.all(np.exp(kernel.log_profile(beyond**2)) <= rtol * (1 + 1e-6))
        just_inside = kernel.support(rtol) * (1 - 1e-9)
        assert np.exp(kernel.log_profile(np.array(just_inside**2))) >= rtol * (1 - 1e-6)


@pytest.mark.parametrize(
    "kernel",
    [
        Gaussian(width=0.7), Laplace(width=1.3), RationalQuadratic(width=1.0), InverseMultiquadric(width=1.0),
        TruncatedPower(power=2.0, core=1.0), Matern(width=1.0, nu=2.5),
    ],
)  # fmt: skip
def test_a_share_that_no_kernel_falls_to_is_refused(kernel: Any) -> None:
    for rtol in (2, -1e-3, math.nan, "a", None):
        with pytest.raises(InputError, match=r"^rtol: got .*(number >= 0|from 0 to 1)$"):
            kernel.support(rtol)
    assert 0 <= kernel.support(1) <= 1


@pytest.mark.parametrize("kernel", [*RADIAL, ExpDotProduct(), ExpDotProduct(scale=-2.0), ExpDotProduct(scale=0.0)])
def test_declared_definiteness(kernel: Any) -> None:
    """What is declared positive semidefinite has no negative eigenvalue; what is not has one, for some points."""
    lowest = math.inf
    for seed in range(20):
        x = features(2, seed, n=12)
        matrix = kernel.amplitude * np.exp(kernel.log_matrix(x, x))
        np.testing.assert_allclose(matrix, matrix.T, rtol=1e-13)
        values = np.linalg.eigvalsh(matrix)
        lowest = min(lowest, values[0] / values[-1])
    assert kernel.symmetric
    assert (lowest > -1e-13) == kernel.positive_semidefinite


def test_nodes_at_exactly_the_radius_count() -> None:
    """0.3 is not 3 times 0.1 in binary; the comparison allows for it."""
    for steps in (3, 6, 7):
        grid = Grid(40, spacing=0.1, boundary="periodic")
        degree = affinity(TopHat(radius=steps / 10), grid).degree
        np.testing.assert_allclose(degree, (2 * steps + 1) * 0.1, rtol=1e-12)


@pytest.mark.parametrize("unit", [1e-150, 1e150])
@pytest.mark.parametrize("family", [Gaussian, Laplace])
def test_units_do_not_matter(family: Any, unit: float) -> None:
    """Widths whose squares are near the ends of the range of float64, with distances to match."""
    grid = Grid(12, spacing=0.5 * unit)
    u = features(1, n=12).ravel()
    expected = affinity(family(width=1.0), Grid(12, spacing=0.5)).average(u)
    np.testing.assert_allclose(affinity(family(width=unit), grid).average(u), expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("kernel", [*RADIAL, ExpDotProduct(), ExpDotProduct(scale=0.3)])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_torch(kernel: Any, dtype: str) -> None:
    torch = pytest.importorskip("torch", reason="the device code")
    x, y = features(3).astype(dtype), features(3, 1)[:5].astype(dtype)
    got = kernel.log_matrix(torch.from_numpy(x), torch.from_numpy(y))
    assert got.dtype == getattr(torch, dtype)
    assert got.shape == (9, 5)
    tolerance = 1e-12 if dtype == "float64" else 2e-6
    np.testing.assert_allclose(got.numpy(), kernel.log_matrix(x, y), rtol=tolerance, atol=tolerance)


def test_points_in_float16_are_told_by_their_type() -> None:
    torch = pytest.importorskip("torch", reason="the device code")
    x = torch.from_numpy(features(3)).to(torch.float16)
    with pytest.raises(InputError, match=r"x: got float16, .* expected float32 or float64"):
        Gaussian(width=1.0).log_matrix(x, x)


def test_torch_distances_of_close_points() -> None:
    """Far from the origin, close to one another: distances come from differences, so that nothing cancels."""
    torch = pytest.importorskip("torch", reason="the device code")
    x = torch.from_numpy(1e6 + 0.125 * np.arange(5.0)[:, None]).to(torch.float64)
    got = Gaussian(width=1.0).log_matrix(x, x).numpy()
    np.testing.assert_allclose(got, -0.5 * (0.125 * np.subtract.outer(np.arange(5), np.arange(5))) ** 2, rtol=1e-12)


def test_patch_log_matrix_agrees_with_its_affinity() -> None:
    """Patches as rows, one row for each node: the same numbers inside the window."""
    kernel, u = Patch(0.8, patch_size=3, search_radius=2, sigma=0.2), features(1, n=11).ravel()
    wide = np.concatenate([u[-1:], u, u[:1]])
    patches = np.stack([wide[i : i + 3] for i in range(11)])
    logarithm = kernel.log_matrix(patches, patches)
    apart = np.abs(np.subtract.outer(np.arange(11), np.arange(11)))
    inside = np.minimum(apart, 11 - apart) <= 2
    weights = np.where(inside, np.exp(logarithm), 0)
    weights /= weights.sum(axis=1, keepdims=True)
    result = affinity(kernel, Grid(11, boundary="periodic"), u)
    np.testing.assert_allclose(result.average(u), weights @ u, rtol=0, atol=1e-14)


def test_correction() -> None:
    assert Patch(0.5, sigma=0.25).correction == 0.5
    assert Patch(0.5).correction == 0


def test_defaults_and_identity() -> None:
    kernel = Patch(1.0)
    assert (kernel.patch_size, kernel.search_radius, kernel.sigma, kernel.tokens) == (7, 10, 0.0, "pixel")
    assert Gaussian(1.0) == Gaussian(width=1)
    assert hash(Gaussian(1.0)) == hash(Gaussian(width=1))
    assert Gaussian(1.0) != Gaussian(1.0, amplitude=2.0)
    assert issubclass(Gaussian, RadialKernel)
    assert not issubclass(Patch, RadialKernel)
    for family in (Gaussian, Laplace, TopHat, ExpDotProduct, Patch):
        assert issubclass(family, Kernel)
        assert family.formula
    with pytest.raises(AttributeError):
        kernel.width = 2.0  # type: ignore[misc]
    with pytest.raises(TypeError, match="abstract"):
        Kernel()  # type: ignore[abstract]


def test_maps_are_kept_as_arrays() -> None:
    kernel = ExpDotProduct(query_map=[[1, 0], [0, 1]], key_map=np.eye(2, dtype=np.float32))
    queries, keys = kernel.map_features(features(2))
    np.testing.assert_array_equal(queries, features(2))
    np.testing.assert_allclose(keys, features(2))
    unmapped = features(2)
    assert ExpDotProduct().map_features(unmapped) == (unmapped, unmapped)


@pytest.mark.parametrize("given", [[[1.0, 2.0], [0.0, 1.0]], np.array([[1, 2], [0, 1]]), np.eye(2)], ids=repr)
def test_one_map_for_both_says_that_queries_are_keys(given: Any) -> None:
    kernel = ExpDotProduct(query_map=given, key_map=given)
    assert affinity(kernel, Points(np.arange(9.0)), features(2)).symmetric
    other = ExpDotProduct(query_map=given, key_map=copy.deepcopy(given))
    assert not affinity(other, Points(np.arange(9.0)), features(2)).symmetric


def test_default_scale_is_that_of_the_mapped_width() -> None:
    """The scale is 1 / sqrt(d) with d the width of queries and keys, not of the features."""
    x, q, k = features(5), features(3, 1, n=5), features(3, 2, n=5)
    result = affinity(ExpDotProduct(query_map=q, key_map=k), Points(np.arange(9.0)), x)
    expected = np.exp((x @ q) @ (x @ k).T / math.sqrt(3))
    np.testing.assert_allclose(result.average(x), expected @ x / expected.sum(axis=1)[:, None], rtol=0, atol=1e-13)


@pytest.mark.parametrize(
    ("family", "arguments", "message"),
    [
        (Gaussian, {"width": 0}, r"width: got 0, expected a finite real number > 0"),
        (Gaussian, {"width": -1.0}, r"width: got -1.0, expected"),
        (Gaussian, {"width": math.inf}, r"width: got inf, expected a finite"),
        (Gaussian, {"width": math.nan}, r"width: got nan"),
        (Gaussian, {"width": "1"}, r"width: got '1'"),
        (Gaussian, {"width": np.ones(2)}, r"width: got array"),
        (Gaussian, {"width": 1.0, "amplitude": 0}, r"amplitude: got 0, expected a finite real number > 0"),
        (Laplace, {"width": 0}, r"width: got 0, expected a finite real number > 0"),
        (TopHat, {"radius": 0}, r"radius: got 0, expected a finite real number > 0"),
        (TopHat, {"radius": 1, "amplitude": -1}, r"amplitude: got -1"),
        (ExpDotProduct, {"scale": math.inf}, r"scale: got inf, expected a finite real number"),
        (ExpDotProduct, {"scale": True}, r"scale: got True"),
        (ExpDotProduct, {"query_map": np.ones(3)}, r"query_map: got 1 dimension\(s\) \(shape \(3,\)\), expected 2"),
        (ExpDotProduct, {"key_map": np.full((2, 2), np.nan)}, r"key_map: got 4 NaN or infinite"),
        (ExpDotProduct, {"amplitude": math.nan}, r"amplitude: got nan"),
        (Patch, {"width": 0}, r"width: got 0"),
        (Patch, {"width": 1, "patch_size": 4}, r"patch_size: got 4, expected an odd integer >= 1"),
        (Patch, {"width": 1, "patch_size": 0}, r"patch_size: got 0"),
        (Patch, {"width": 1, "patch_size": 3.0}, r"patch_size: got 3.0"),
        (Patch, {"width": 1, "search_radius": 0}, r"search_radius: got 0, expected an integer >= 1"),
        (Patch, {"width": 1, "sigma": -0.1}, r"sigma: got -0.1, expected a finite real number >= 0"),
        (Patch, {"width": 1, "tokens": "patches"}, r"tokens: got 'patches', expected one of 'pixel', 'patch'"),
        (Patch, {"width": 1, "spatial_width": 0}, r"spatial_width: got 0, expected a finite real number > 0"),
    ],
)
def test_parameters_that_are_refused(family: Any, arguments: Any, message: str) -> None:
    with pytest.raises(InputError, match=f"^{message}"):
        family(**arguments)


def test_dot_products_are_equal_where_scale_and_maps_are() -> None:
    matrix = np.eye(3)
    plain, same = ExpDotProduct(scale=2.0, key_map=matrix), ExpDotProduct(scale=2.0, key_map=matrix)
    assert plain == same
    assert hash(plain) == hash(same)
    for other in (
        ExpDotProduct(scale=1.0, key_map=matrix),
        ExpDotProduct(scale=2.0),
        ExpDotProduct(scale=2.0, query_map=matrix),
    ):
        assert plain != other
    assert ExpDotProduct() != 1
    wide, narrow = (Anisotropic(Gaussian(width=1.0), axes) for axes in ([1.0, 2.0], [1.0, 3.0]))
    assert wide != narrow
    assert wide == wide  # what is compared is which object it is
