"""The denoiser for SCICO (https://scico.readthedocs.io): a pseudo-functional whose proximal operator it is.

``pip install scico`` installs it, with the versions of JAX that it needs.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from nlflow.denoising.priors import denoisers
from nlflow.denoising.priors.packages import needed
from nlflow.errors import InputError

jax = needed("jax", "pip install scico")
functional = needed("scico.functional", "pip install scico")


class Prior(functional.Functional):
    """The prior of `nlflow.denoise` as a functional of SCICO, in place of its ``BM3D`` and ``DnCNN``.

    As with those, ``prox(v, lam)`` takes `lam` for the strength of the noise: in ADMM with penalty rho and the
    functional ``s * Prior()`` it is s / rho.

    Parameters
    ----------
    quality : {'fast', 'balanced', 'best'}
    **options
        As `nlflow.denoise` takes them, such as ``channel_axis``.
    """

    has_eval = False
    has_prox = True

    def __init__(self, quality: str = "balanced", **options: Any) -> None:
        super().__init__()
        self.denoiser = denoisers.Denoiser(quality, **options)

    def prox(self, v: Any, lam: Any = 1.0, **kwargs: Any) -> Any:
        """Return ``denoise(v, lam)``, the same bits, as an array of JAX.

        Parameters
        ----------
        v : array of JAX or NumPy
        lam : float
            Standard deviation of the noise.
        **kwargs
            A first guess, ``v0``, which SCICO's solvers pass and a denoiser does not need.

        Raises
        ------
        InputError
            Within ``jit`` and ``grad``, for arrays on another device than the CPU, and for other keywords.
        """
        if set(kwargs) - {"v0", "x0"}:
            raise InputError(f"{', '.join(kwargs)}: got unknown keywords, expected v0 alone")
        if isinstance(v, jax.core.Tracer) or isinstance(lam, jax.core.Tracer):
            raise InputError("v: it is being traced (jit or grad), which this denoiser cannot be; call it outside")
        if isinstance(v, jax.Array) and any(device.platform != "cpu" for device in v.devices()):
            raise InputError(f"v: it is on {v.devices()}, expected the CPU; move it with jax.device_put")
        return jax.numpy.asarray(self.denoiser(np.asarray(v), float(lam)))
