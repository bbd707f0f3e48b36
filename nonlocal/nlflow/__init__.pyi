from .affinities import Affinity as Affinity
from .affinities import affinity as affinity
from .affinities import affinity_from_graph as affinity_from_graph
from .affinities import from_matrix as from_matrix
from .affinities import neighbour_graph as neighbour_graph
from .denoising import denoise as denoise
from .denoising.noise import GaussianNoise as GaussianNoise
from .denoising.noise import Poisson as Poisson
from .denoising.noise import estimate_noise as estimate_noise
from .denoising.noise import estimate_sigma as estimate_sigma
from .denoising.total_variation import nonlocal_tv as nonlocal_tv
from .domains import Grid as Grid
from .domains import Points as Points
from .domains.mask import Mask as Mask
from .equilibria import diversity as diversity
from .equilibria import diversity_bounds as diversity_bounds
from .equilibria import equilibrium as equilibrium
from .equilibria import fidelity_for_diversity as fidelity_for_diversity
from .equilibria import largest_stable_fidelity as largest_stable_fidelity
from .errors import InputError as InputError
from .errors import NlflowError as NlflowError
from .flows.integrators import ExplicitEuler as ExplicitEuler
from .flows.integrators import Exponential as Exponential
from .flows.integrators import NeutrenoStep as NeutrenoStep
from .flows.integrators import RungeKutta as RungeKutta
from .flows.integrators import SemiImplicit as SemiImplicit
from .flows.linear import AttentionFlow as AttentionFlow
from .flows.linear import GradientFlow as GradientFlow
from .flows.p_flow import PFlow as PFlow
from .flows.result import Solution as Solution
from .flows.solver import solve as solve
from .flows.trackers import Checkpoint as Checkpoint
from .flows.trackers import Energy as Energy
from .flows.trackers import SteadyState as SteadyState
from .functionals.constraint import Constraint as Constraint
from .functionals.energies import E as E
from .functionals.energies import J as J
from .functionals.variational import Ep as Ep
from .functionals.variational import Jp as Jp
from .kernels import ExpDotProduct as ExpDotProduct
from .kernels import Formula as Formula
from .kernels import Gaussian as Gaussian
from .kernels import Patch as Patch
from .markov import MarkovChain as MarkovChain
from .studies import run_study as run_study

__version__: str

__all__ = [
    "Affinity",
    "AttentionFlow",
    "Checkpoint",
    "Constraint",
    "E",
    "Energy",
    "Ep",
    "ExpDotProduct",
    "ExplicitEuler",
    "Exponential",
    "Formula",
    "Gaussian",
    "GaussianNoise",
    "GradientFlow",
    "Grid",
    "InputError",
    "J",
    "Jp",
    "MarkovChain",
    "Mask",
    "NeutrenoStep",
    "NlflowError",
    "PFlow",
    "Patch",
    "Points",
    "Poisson",
    "RungeKutta",
    "SemiImplicit",
    "Solution",
    "SteadyState",
    "affinity",
    "affinity_from_graph",
    "denoise",
    "diversity",
    "diversity_bounds",
    "equilibrium",
    "estimate_noise",
    "estimate_sigma",
    "fidelity_for_diversity",
    "from_matrix",
    "largest_stable_fidelity",
    "neighbour_graph",
    "nonlocal_tv",
    "run_study",
    "solve",
]
