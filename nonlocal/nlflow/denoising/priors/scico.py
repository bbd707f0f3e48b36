"""Adapter for SCICO."""

from __future__ import annotations

from typing import Any

import numpy as np

from nlflow.denoising.priors import denoisers
from nlflow.denoising.priors.denoisers import base
from nlflow.errors import InputError

Base: Any = base("scico.functional", "Functional", "pip install scico")


class Prior(Base):
    """The prior of `nlflow.denoise` as a functional of SCICO.

    ``prox(v, lam)`` takes `lam` for the strength of the noise: in ADMM with penalty rho and the functional
    ``s * Prior()`` it is s / rho.

    Parameters
    ----------
    quality : {'fast', 'balanced', 'best', 'pixels'}
    **options
        As `nlflow.denoise` takes them, such as ``channel_axis``.
    """

    has_eval = False
    has_prox = True

    def __init__(self, quality: str = "balanced", **options: Any) -> None:
        super().__init__()
        self.denoiser = denoisers.Denoiser(quality, **options)

    def prox(self, v: Any, lam: Any = 1.0, **kwargs: Any) -> Any:
        """Return ``denoise(v, lam)`` as an array of JAX; a first guess ``v0`` is ignored.

        Parameters
        ----------
        v : array of JAX or NumPy, float32 or float64
        lam : float
            Standard deviation of the noise.

        Raises
        ------
        InputError
            For other types of numbers, and other keywords. JAX refuses derivatives.
        """
        import jax

        if set(kwargs) - {"v0", "x0"}:
            raise InputError(f"{', '.join(kwargs)}: got unknown keywords, expected v0 alone")
        v = jax.numpy.asarray(v)
        if v.dtype not in (np.float32, np.float64):
            raise InputError(f"v: got dtype {v.dtype}, expected float32 or float64")
        # SCICO compiles its loops, from which Python is called so.
        like = jax.ShapeDtypeStruct(v.shape, v.dtype)
        return jax.pure_callback(lambda v, lam: self.denoiser(np.asarray(v), float(lam)), like, v, lam)
