"""The nonlocal p-functionals and their minimizers."""

from nlflow.functionals.variational.certificate import CertifiedMinimizer
from nlflow.functionals.variational.ep import Ep
from nlflow.functionals.variational.jp import Jp
from nlflow.functionals.variational.reweighted import harmonic_extension

__all__ = ["CertifiedMinimizer", "Ep", "Jp", "harmonic_extension"]
