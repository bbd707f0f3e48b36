"""The nonlocal p-functionals J_p and E_p, 1 <= p <= 10, and their minimizers with duality gaps."""

from nlflow.functionals.variational.certificate import CertifiedMinimizer
from nlflow.functionals.variational.ep import Ep
from nlflow.functionals.variational.held import harmonic_extension
from nlflow.functionals.variational.jp import Jp

__all__ = ["CertifiedMinimizer", "Ep", "Jp", "harmonic_extension"]
