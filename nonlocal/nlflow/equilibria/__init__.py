"""Limits of flows for t to infinity, and how much of a signal they keep."""

from nlflow.equilibria.bounds import diversity, diversity_bounds, fidelity_for_diversity, largest_stable_fidelity
from nlflow.equilibria.limits import Equilibrium, equilibrium

__all__ = [
    "Equilibrium",
    "diversity",
    "diversity_bounds",
    "equilibrium",
    "fidelity_for_diversity",
    "largest_stable_fidelity",
]
