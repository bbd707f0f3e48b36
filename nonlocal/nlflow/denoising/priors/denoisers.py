"""Denoisers as priors."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nlflow.affinities import Affinity
from nlflow.affinities.checks import check_affinity
from nlflow.denoising.api import denoise
from nlflow.denoising.options import OPTIONS, QUALITIES
from nlflow.errors import (
    InputError,
    MissingPackageError,
    NumericalError,
    check_choice,
    check_floats,
    check_number,
    shortened,
)
from nlflow.functionals.energies import E

Array = NDArray[Any]

# What says how strong the noise is comes with each call, and a result is an array.
_OPTIONS = ("channel_axis", "axes", "spacing", "mask", "keep", "preserve_range", *OPTIONS)


def base(module: str, name: str, install: str) -> Any:
    """Return a class to derive an adapter from; without its package no instance can be made."""
    try:
        return getattr(importlib.import_module(module), name)
    except ImportError as error:
        message = f"{module.partition('.')[0]}: it cannot be imported ({shortened(error)}); {install}"

    class Missing:
        def __new__(cls, *_: Any, **__: Any) -> Any:
            raise MissingPackageError(message)

    return Missing


class Denoiser:
    """`nlflow.denoise` with its options, as a function of a signal and of the strength of white noise in it.

    Parameters
    ----------
    quality : {'fast', 'balanced', 'best', 'pixels'}
    **options
        Of `denoise`, but ``noise``, ``return_info`` and ``progress``.

    Raises
    ------
    InputError
        For other keywords.

    Examples
    --------
    >>> import numpy as np
    >>> from nlflow import denoise
    >>> from nlflow.denoising.priors import Denoiser
    >>> noisy = np.random.default_rng(0).normal(0, 1, (32, 32))
    >>> bool(np.array_equal(Denoiser("fast")(noisy, 1.0), denoise(noisy, 1.0, quality="fast")))
    True
    """

    def __init__(self, quality: str = "balanced", **options: Any) -> None:
        self.quality = check_choice("quality", quality, QUALITIES)
        for name in options:
            if name not in _OPTIONS:
                raise InputError(f"{name}: got an unknown option, expected one of {', '.join(_OPTIONS)}")
        self.options = options

    def __call__(self, u: Any, strength: Any, **more: Any) -> Any:
        """Return ``denoise(u, strength)``; `more` are options for this call."""
        return denoise(u, strength, quality=self.quality, **{**self.options, **more})

    def __repr__(self) -> str:
        return f"Denoiser({', '.join([repr(self.quality), *(f'{k}={v!r}' for k, v in self.options.items())])})"


class Resolvent:
    """The filter (I + s^2 w L)^-1 of a frozen kernel, an implicit Euler step of the J-flow for node weights w = 1.

    It is the proximal map of s^2 J in the norm without weights, linear and symmetric with eigenvalues in (0, 1].

    Parameters
    ----------
    affinity : Affinity
        Of k; it is symmetrized to K = k + k^T.
    rtol : float, optional
        Of the linear systems; 1e-10 in float64 and 1e-5 in float32 by default.

    Raises
    ------
    NumericalError
        From a call whose system is not solved to `rtol`.
    """

    def __init__(self, affinity: Affinity, *, rtol: float | None = None) -> None:
        self.affinity = check_affinity(affinity)
        self.rtol = rtol

    def __call__(self, u: Array, strength: float) -> Array:
        """Return (I + s^2 w L)^-1 u in the dtype of the affinity, float64 where it has none."""
        strength = check_number("strength", strength, minimum=0, strict=True)
        u = self.affinity.check_signal("u", check_floats("u", u).astype(self.affinity.dtype or np.float64, copy=False))
        weights = np.asarray(self.affinity.domain.weights)
        fidelity = np.broadcast_to(1 / (strength**2 * weights), self.affinity.domain.shape).astype(u.dtype)
        found = E(self.affinity, u, fidelity).minimizer(rtol=self.rtol, start=u)
        if not found.success:
            raise NumericalError(f"strength: {found.message}")
        return np.asarray(found.u)


def check_denoised(result: Any, like: Array) -> Array:
    array = np.asarray(result)
    if array.dtype.kind not in "biuf":
        raise InputError(f"denoiser: it returned dtype {array.dtype}, expected real numbers")
    if array.shape != like.shape:
        raise InputError(f"denoiser: it returned shape {array.shape}, expected {like.shape}, that of its input")
    if not np.isfinite(array).all():
        raise NumericalError("denoiser: it returned NaN or infinite values, expected finite ones")
    return array.astype(like.dtype, copy=False)
