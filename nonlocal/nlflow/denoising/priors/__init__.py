"""The denoiser as a prior: reconstruction from linear measurements.

`reconstruct` needs no other library. `deepinv`, `pylops`, `pyproximal` and `scico` are adapters for those who use one:
import them by name, such as ``from nlflow.denoising.priors.deepinv import Denoiser``.
"""

from nlflow.denoising.priors.denoisers import Denoiser, Resolvent
from nlflow.denoising.priors.reconstruction import Reconstruction, reconstruct
from nlflow.functionals.forward import EA, Forward

__all__ = ["EA", "Denoiser", "Forward", "Reconstruction", "Resolvent", "reconstruct"]
