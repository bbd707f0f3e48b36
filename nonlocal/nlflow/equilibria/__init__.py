"""Where flows are at rest, and what E says beside its minimizer."""

from nlflow.equilibria.bounds import diversity, diversity_bounds, fidelity_for_diversity, largest_stable_fidelity
from nlflow.equilibria.branches import Branch, BranchPoint
from nlflow.equilibria.choice import Choice, choose_fidelity, choose_parameter
from nlflow.equilibria.continuation import continue_equilibria
from nlflow.equilibria.cycles import Cycle, find_cycle
from nlflow.equilibria.eigenvalues import Stability, stability
from nlflow.equilibria.field import Band, GaussianField, Variances
from nlflow.equilibria.limits import Equilibrium, equilibrium
from nlflow.equilibria.newton import find_equilibria, find_equilibrium
from nlflow.equilibria.sums import Estimate, trace_of

__all__ = [
    "Band",
    "Branch",
    "BranchPoint",
    "Choice",
    "Cycle",
    "Equilibrium",
    "Estimate",
    "GaussianField",
    "Stability",
    "Variances",
    "choose_fidelity",
    "choose_parameter",
    "continue_equilibria",
    "diversity",
    "diversity_bounds",
    "equilibrium",
    "fidelity_for_diversity",
    "find_cycle",
    "find_equilibria",
    "find_equilibrium",
    "largest_stable_fidelity",
    "stability",
    "trace_of",
]
