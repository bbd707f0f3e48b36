from .affinities import affinity as affinity
from .affinities import affinity_from_graph as affinity_from_graph
from .affinities import from_matrix as from_matrix
from .affinities import neighbour_graph as neighbour_graph
from .denoising import denoise as denoise
from .denoising.noise import estimate_noise as estimate_noise
from .denoising.noise import estimate_sigma as estimate_sigma
from .denoising.total_variation import nonlocal_tv as nonlocal_tv
from .domains import Grid as Grid
from .domains import Points as Points
from .equilibria import diversity_bounds as diversity_bounds
from .equilibria import equilibrium as equilibrium
from .errors import InputError as InputError
from .errors import NlflowError as NlflowError
from .flows.integrators import ETD2RK as ETD2RK
from .flows.integrators import ETD4RK as ETD4RK
from .flows.integrators import IMEX as IMEX
from .flows.integrators import Adaptive as Adaptive
from .flows.integrators import ConvexSplitting as ConvexSplitting
from .flows.integrators import ExplicitEuler as ExplicitEuler
from .flows.integrators import Exponential as Exponential
from .flows.integrators import NeutrenoStep as NeutrenoStep
from .flows.integrators import RungeKutta as RungeKutta
from .flows.integrators import SemiImplicit as SemiImplicit
from .flows.linear import AttentionFlow as AttentionFlow
from .flows.linear import GradientFlow as GradientFlow
from .flows.p_flow import PFlow as PFlow
from .flows.reactions import AllenCahn as AllenCahn
from .flows.solver import solve as solve
from .flows.sphere import SphereFlow as SphereFlow
from .flows.sphere import on_sphere as on_sphere
from .flows.trackers import Checkpoint as Checkpoint
from .flows.trackers import Energy as Energy
from .flows.trackers import SteadyState as SteadyState
from .functionals.constraint import Constraint as Constraint
from .functionals.energies import E as E
from .functionals.energies import J as J
from .functionals.misfits import Huber as Huber
from .functionals.variational import Ep as Ep
from .kernels import ExpDotProduct as ExpDotProduct
from .kernels import Formula as Formula
from .kernels import Gaussian as Gaussian
from .kernels import Patch as Patch
from .markov import MarkovChain as MarkovChain
from .studies import run_study as run_study

__version__: str

__all__ = [
    "ETD2RK",
    "ETD4RK",
    "IMEX",
    "Adaptive",
    "AllenCahn",
    "AttentionFlow",
    "Checkpoint",
    "Constraint",
    "ConvexSplitting",
    "E",
    "Energy",
    "Ep",
    "ExpDotProduct",
    "ExplicitEuler",
    "Exponential",
    "Formula",
    "Gaussian",
    "GradientFlow",
    "Grid",
    "Huber",
    "InputError",
    "J",
    "MarkovChain",
    "NeutrenoStep",
    "NlflowError",
    "PFlow",
    "Patch",
    "Points",
    "RungeKutta",
    "SemiImplicit",
    "SphereFlow",
    "SteadyState",
    "affinity",
    "affinity_from_graph",
    "denoise",
    "diversity_bounds",
    "equilibrium",
    "estimate_noise",
    "estimate_sigma",
    "from_matrix",
    "neighbour_graph",
    "nonlocal_tv",
    "on_sphere",
    "run_study",
    "solve",
]
