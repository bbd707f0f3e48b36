"""Where flows are at rest: limits of linear flows, equilibria of others with their stability, and what limits keep."""

from nlflow.equilibria.bounds import diversity, diversity_bounds, fidelity_for_diversity, largest_stable_fidelity
from nlflow.equilibria.eigenvalues import Stability, stability
from nlflow.equilibria.limits import Equilibrium, equilibrium
from nlflow.equilibria.newton import find_equilibria, find_equilibrium

__all__ = [
    "Equilibrium",
    "Stability",
    "diversity",
    "diversity_bounds",
    "equilibrium",
    "fidelity_for_diversity",
    "find_equilibria",
    "find_equilibrium",
    "largest_stable_fidelity",
    "stability",
]
