"""Adapter for PyProximal."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nlflow.denoising.priors import denoisers
from nlflow.denoising.priors.denoisers import base
from nlflow.errors import InputError, check_number, install_command
from nlflow.functionals.forward import checked_shape

Base: Any = base("pyproximal", "ProxOperator", install_command("pyproximal"))


class Prior(Base):
    """The prior of `nlflow.denoise` as a proximal operator, for the solvers of PyProximal.

    The prox of tau R is the denoiser for noise of variance ``weight tau``. R is not known and its value is given as 0,
    so that solvers with a line search do not work.

    Parameters
    ----------
    dims : int or tuple of int
        Shape of the signals, which PyProximal holds as vectors.
    weight : float
        Of the prior, > 0.
    quality : {'fast', 'balanced', 'best', 'pixels'}
    **options
        As `nlflow.denoise` takes them.

    Examples
    --------
    >>> from nlflow.denoising.priors.pyproximal import Prior  # doctest: +SKIP
    >>> x, z = pyproximal.optimization.primal.ADMM(misfit, Prior((64, 64)), x0=x0, tau=0.01, niter=20)  # doctest: +SKIP
    """

    def __init__(self, dims: Any, weight: float = 1.0, quality: str = "balanced", **options: Any) -> None:
        super().__init__(None, False)
        self.dims = checked_shape("dims", dims)
        self.weight = check_number("weight", weight, minimum=0, strict=True)
        self.denoiser = denoisers.Denoiser(quality, **options)

    def __call__(self, x: Any) -> float:
        """Return 0."""
        del x
        return 0.0

    def prox(self, x: Any, tau: Any) -> NDArray[Any]:
        """Return ``denoise(x, sqrt(weight tau))`` as a vector."""
        tau = check_number("tau", tau, minimum=0, strict=True)
        if np.size(x) != math.prod(self.dims):
            raise InputError(f"x: got {np.size(x)} samples, expected {math.prod(self.dims)}, those of {self.dims}")
        return np.ravel(self.denoiser(np.reshape(x, self.dims), math.sqrt(self.weight * tau)))
