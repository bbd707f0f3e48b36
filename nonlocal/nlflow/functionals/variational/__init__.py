"""The nonlocal p-functionals J_p and E_p, 1 <= p <= 10, and their minimizers with duality gaps."""

from nlflow.functionals.variational.certificate import CertifiedMinimizer
from nlflow.functionals.variational.ep import Ep
from nlflow.functionals.variational.jp import Jp
from nlflow.functionals.variational.reweighted import harmonic_extension

__all__ = ["CertifiedMinimizer", "Ep", "Jp", "harmonic_extension"]
