"""The denoiser as a prior: reconstruction from linear measurements.

`deepinv`, `pylops`, `pyproximal` and `scico` are adapters, imported by name.
"""

from nlflow.denoising.priors.denoisers import Denoiser, Resolvent
from nlflow.denoising.priors.reconstruction import Reconstruction, reconstruct
from nlflow.functionals.forward import EA, Forward

__all__ = ["EA", "Denoiser", "Forward", "Reconstruction", "Resolvent", "reconstruct"]
