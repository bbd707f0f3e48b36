"""Errors of estimates."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nlflow._array import root_mean_square
from nlflow.errors import (
    InputError,
    NumericalError,
    check_floats,
    check_generator,
    check_integer,
    check_number,
    shortened,
)


def perturbation(shape: tuple[int, ...], *, rng: Any = None, dtype: Any = np.float64) -> NDArray[Any]:
    """Return independent random signs, +1 or -1, for `sure`.

    Parameters
    ----------
    shape : tuple of int
    rng : int, numpy.random.Generator or None
        For `numpy.random.default_rng`.
    dtype : dtype
        float32 or float64.

    Raises
    ------
    InputError
        For another dtype, and for what is no shape.

    References
    ----------
    Hutchinson 1990 (doi 10.1080/03610919008812866).
    """
    try:
        known = np.dtype(dtype)
    except TypeError:
        known = None
    if known not in (np.float32, np.float64):
        raise InputError(f"dtype: got {dtype if known is None else known}, expected float32 or float64")
    given: Any = shape
    axes = tuple(given) if isinstance(given, tuple | list) else (given,)
    sizes = tuple(check_integer("shape", n, minimum=0, hint="the numbers of samples along the axes") for n in axes)
    generator = check_generator(rng)
    try:
        signs = generator.integers(0, 2, sizes, dtype=np.int8)
    except ValueError as error:  # too many axes, or samples
        raise InputError(
            f"shape: got {shortened(repr(shape))}, expected one that an array can have ({error})"
        ) from error
    return (2 * signs - 1).astype(dtype)


def sure(
    noisy: NDArray[Any],
    estimate: NDArray[Any],
    perturbed_estimate: NDArray[Any],
    perturbation: NDArray[Any],
    epsilon: float,
    sigma: float | NDArray[Any],
) -> float:
    """Return Stein's unbiased estimate of the mean squared error of a denoiser f, per sample; it may be negative.

    For y = x + Gaussian noise of variance σ_i², independent between samples,

        E mean (f(y) - x)² = E mean[(f(y) - y)² - σ² + 2 σ² ∂f_i/∂y_i],

    with the divergence from one more evaluation of f, ∂f_i/∂y_i ≈ b_i (f(y + ε b) - f(y))_i / ε in the mean over
    random signs b. O(N), besides the evaluations of f.

    Parameters
    ----------
    noisy, estimate : array
        y and f(y), of the same shape.
    perturbed_estimate : array
        f(y + epsilon * perturbation), with the random numbers of f(y).
    perturbation : array
        Of `perturbation`.
    epsilon : float
        > 0. Small against sigma, but large against the rounding of f: a tenth of sigma is a good choice in single
        precision.
    sigma : float or array
        Standard deviation of the noise, >= 0; an array is broadcast to the shape of `noisy`.

    Raises
    ------
    InputError
        For shapes that do not match, values that are not finite, epsilon not > 0 and negative sigma.
    NumericalError
        Where it overflows floats.

    References
    ----------
    Stein 1981 (doi 10.1214/aos/1176345632); Ramani, Blu and Unser 2008 (doi 10.1109/TIP.2008.2001404).
    """
    y, u = _pair(noisy, estimate)
    moved = _like("perturbed_estimate", perturbed_estimate, y)
    signs = _like("perturbation", perturbation, y)
    step = check_number("epsilon", epsilon, minimum=0, strict=True, hint="a tenth of sigma is a good choice")
    with np.errstate(over="ignore", invalid="ignore"):
        variance = np.square(_sigma(sigma, y, strict=False))
        divergence = signs * (moved - u) / step
        risk = float(np.mean(np.square(u - y) + variance * (2 * divergence - 1)))
    return _finite("the risk", risk)


def discrepancy(noisy: NDArray[Any], estimate: NDArray[Any], sigma: float | NDArray[Any]) -> float:
    """Return the root mean square of (noisy - estimate) / sigma.

    Parameters
    ----------
    noisy, estimate : array
        Of the same shape.
    sigma : float or array
        Standard deviation of the noise, > 0; an array is broadcast to the shape of `noisy`.

    Raises
    ------
    InputError
        For shapes that do not match, values that are not finite, and sigma not > 0.
    NumericalError
        Where it overflows floats.
    """
    y, u = _pair(noisy, estimate)
    with np.errstate(over="ignore", invalid="ignore"):
        relative = (y - u) / _sigma(sigma, y, strict=True)
    return _finite("the discrepancy", root_mean_square(relative))


def _finite(what: str, number: float) -> float:
    if not math.isfinite(number):
        raise NumericalError(f"{what} overflows floats; divide samples, estimates and sigma by one number")
    return number


def _pair(noisy: Any, estimate: Any) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    y = check_floats("noisy", noisy)
    return y, _like("estimate", estimate, y)


def _like(name: str, value: Any, y: NDArray[np.float64]) -> NDArray[np.float64]:
    array = check_floats(name, value)
    if array.shape != y.shape:
        raise InputError(f"{name}: got shape {array.shape}, expected that of noisy, {y.shape}")
    return array


def _sigma(sigma: Any, y: NDArray[np.float64], *, strict: bool) -> NDArray[np.float64]:
    array = check_floats("sigma", sigma)
    if not ((array > 0) if strict else (array >= 0)).all():
        raise InputError(f"sigma: got {float(array.min()):g}, expected numbers {'>' if strict else '>='} 0")
    try:
        return np.broadcast_to(array, y.shape)
    except ValueError as error:
        raise InputError(f"sigma: got shape {array.shape}, expected one that is broadcast to {y.shape}") from error
