"""The nonlocal p-functionals J_p and E_p, 1 <= p <= 2: minimisers with duality gaps, flows, total variation."""

from nlflow.variational.certificate import CertifiedMinimizer
from nlflow.variational.dirichlet import Jp
from nlflow.variational.evolution import LaggedDiffusivity, PFlow
from nlflow.variational.fitting import Ep
from nlflow.variational.restoration import nonlocal_tv

__all__ = ["CertifiedMinimizer", "Ep", "Jp", "LaggedDiffusivity", "PFlow", "nonlocal_tv"]
