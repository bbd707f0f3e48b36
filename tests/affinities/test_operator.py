"""Sums with a kernel in the open against dense ones in float64, and their derivatives against those of torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from nlflow import ExpDotProduct, Formula, Gaussian, InputError, NumericalError
from nlflow.affinities import kernel_operator
from nlflow.affinities.operator import ROUNDING
from nlflow.kernels import (
    Anisotropic,
    InverseMultiquadric,
    Laplace,
    Matern,
    RationalQuadratic,
    TopHat,
    TruncatedPower,
    Wendland,
)

pytestmark = pytest.mark.numerical

KERNELS = [
    Gaussian(0.3),
    Gaussian(0.3, amplitude=2.0),
    Matern(0.4),
    Laplace(0.5),
    RationalQuadratic(0.5, alpha=0.7),
    InverseMultiquadric(0.4),
    Wendland(0.8),
    TruncatedPower(1.5, 0.1),
    Formula("exp(-r**1.5)", width=0.4),
    ExpDotProduct(scale=0.8),
    ExpDotProduct(),
    Anisotropic(Gaussian(1.0), widths=(0.2, 0.5)),
    ExpDotProduct(query_map=np.ones((2, 3)) - np.eye(2, 3), key_map=np.eye(2, 3)),
]
ids = [type(kernel).__name__ + str(i) for i, kernel in enumerate(KERNELS)]


def drawn(seed: int, *shapes: tuple[int, ...]) -> list[Any]:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape) for shape in shapes]


def dense(kernel: Any, x: Any, y: Any) -> Any:
    """Return the matrix k(x_i, y_j), by torch."""
    maps = (getattr(kernel, name, None) for name in ("query_map", "key_map"))
    q, k = (p if m is None else p @ torch.as_tensor(m, dtype=p.dtype) for p, m in zip((x, y), maps, strict=True))
    if isinstance(kernel, Anisotropic):
        q, k = (p @ torch.as_tensor(kernel.linear_map).T for p in (x, y))
    return kernel.amplitude * torch.exp(kernel.compared.log_matrix(q, k))


def missed(kernel: Any, x: Any, y: Any, w: Any) -> float:
    """Return the largest error over the bound that the operator states."""
    found = kernel_operator(kernel, x, y) @ w
    assert found.dtype == x.dtype
    k = dense(kernel, *(torch.as_tensor(a.astype(np.float64)) for a in (x, y))).numpy()
    size = np.abs(w).astype(np.float64)
    start = 0.0 if isinstance(kernel, ExpDotProduct) else kernel.amplitude
    bound = ROUNDING[x.dtype.name] * (k @ size + start * size.sum(axis=0) / len(w))
    return float(np.max(np.abs(found - k @ w.astype(np.float64)) / bound))


def case(seed: int) -> float:
    rng = np.random.default_rng(seed)
    kernel = [*KERNELS[:11], TopHat(0.5)][rng.integers(12)]
    dtype, d = rng.choice(["float32", "float64"]), int(rng.integers(1, 7))
    m, n = (int(rng.integers(1, 400)) for _ in range(2))
    spread = 1.0 if isinstance(kernel, ExpDotProduct) else 10 ** rng.uniform(-1, 1.5)
    x, y = (spread * rng.standard_normal((count, d)) for count in (m, n))
    w = rng.standard_normal((n, 2)) * 10 ** rng.uniform(-3, 3, (n, 1))
    return missed(kernel, x.astype(dtype), y.astype(dtype), w.astype(dtype))


@pytest.mark.parametrize("seed", [*range(40), *(pytest.param(s, marks=pytest.mark.slow) for s in range(40, 2000))])
def test_sums_with_weights_of_any_sign_stay_within_their_bound(seed: int) -> None:
    assert case(seed) <= 1


@pytest.mark.other_bits("compiled loops on the CPU, tiles of tensors on a GPU")
@pytest.mark.parametrize("kernel", KERNELS, ids=ids)
def test_derivatives_are_those_that_torch_finds(kernel: Any) -> None:
    x, y, w, g = drawn(1, (40, 2), (33, 2), (33, 3), (40, 3))
    tensors = [torch.tensor(a, requires_grad=True) for a in (x, y, w)]
    expected = torch.autograd.grad((torch.tensor(g) * (dense(kernel, *tensors[:2]) @ tensors[2])).sum(), tensors)
    found = kernel_operator(kernel, x, y).gradients(w, g)
    for mine, theirs in zip((found.x, found.y, found.weights), expected, strict=True):
        assert mine == pytest.approx(theirs.numpy(), rel=1e-10, abs=1e-12 * float(theirs.abs().max()))
    own = kernel_operator(kernel, *tensors[:2]) @ tensors[2]
    for mine, theirs in zip(torch.autograd.grad((torch.tensor(g) * own).sum(), tensors), expected, strict=True):
        assert mine.numpy() == pytest.approx(theirs.numpy(), rel=1e-10, abs=1e-12 * float(theirs.abs().max()))


@pytest.mark.parametrize("kernel", KERNELS[:11], ids=ids[:11])
def test_derivatives_by_parameters_are_differences(kernel: Any) -> None:
    x, y, w, g = drawn(2, (40, 2), (33, 2), (33,), (40,))
    found = kernel_operator(kernel, x, y)
    slopes = found.gradients(w, g).parameters
    assert set(slopes) == set(found.parameters)
    assert len(slopes) > 1 or kernel == ExpDotProduct()
    for name, slope in slopes.items():
        value = getattr(kernel, name)
        ends = [kernel_operator(replace(kernel, **{name: value * (1 + e)}), x, y) @ w @ g for e in (1e-5, -1e-5)]
        assert slope == pytest.approx((ends[0] - ends[1]) / (2e-5 * value), rel=1e-6, abs=1e-7)


def test_it_is_a_linear_operator_with_its_transpose() -> None:
    x, y, w, g = drawn(3, (70, 3), (50, 3), (50,), (70, 2))
    k = kernel_operator(Matern(0.7), x, y)
    matrix = dense(Matern(0.7), torch.tensor(x), torch.tensor(y)).numpy()
    assert k.shape == (70, 50)
    assert k @ w == pytest.approx(matrix @ w, rel=1e-11, abs=1e-13)
    assert k.T @ g == pytest.approx(matrix.T @ g, rel=1e-11, abs=1e-13)
    assert (2 * k + k) @ w == pytest.approx(3 * matrix @ w, rel=1e-11, abs=1e-13)


def test_scales_of_any_size_have_their_sums_and_derivatives() -> None:
    x, y, w, g = drawn(4, (40, 2), (33, 2), (33,), (40,))
    one = kernel_operator(Gaussian(0.5), x, y)
    for size in (1e-120, 1e120):
        other = kernel_operator(Gaussian(0.5 * size), x * size, y * size)
        assert other @ w == pytest.approx(one @ w, rel=1e-12)
        assert other.gradients(w, g).x * size == pytest.approx(one.gradients(w, g).x, rel=1e-11, abs=1e-13)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda x: kernel_operator("gaussian", x), "expected a kernel of points"),  # type: ignore[arg-type]
        (lambda x: kernel_operator(Gaussian(1.0), x, x[:, :1]), "as many as x has"),
        (lambda x: kernel_operator(Gaussian(1.0), x, x.astype(np.float32)), "float32"),
        (lambda x: kernel_operator(Gaussian(1.0), x[:, 0]), "a column"),
        (lambda x: kernel_operator(Gaussian(1.0), np.where(x > 0, np.nan, x)), "NaN"),
        (lambda x: kernel_operator(Gaussian(1.0), x) @ torch.ones(9), "as the points are"),
        (lambda x: kernel_operator(Gaussian(1.0), torch.tensor(x)) @ torch.ones(9, dtype=torch.float64)[:5], "9 rows"),
        (lambda x: kernel_operator(Gaussian(1.0), x) @ np.full(9, np.nan), "NaN"),
        (lambda x: kernel_operator(TopHat(1.0), x).gradients(np.ones(9), np.ones(9)), "jumps"),
        (lambda x: kernel_operator(Gaussian(1.0), x).gradients(np.ones(9), np.ones((9, 2))), "expected"),
    ],
)
def test_what_has_no_sums_is_refused(make: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        make(drawn(5, (9, 2))[0])


def test_a_sum_that_no_float_holds_is_refused() -> None:
    x = 30 * drawn(6, (9, 2))[0]
    with pytest.raises(NumericalError, match="overflows"):
        kernel_operator(ExpDotProduct(scale=10.0), x) @ np.ones(9)
