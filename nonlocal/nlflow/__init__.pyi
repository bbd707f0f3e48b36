from .affinities import Affinity as Affinity
from .affinities import affinity as affinity
from .affinities import affinity_from_graph as affinity_from_graph
from .affinities import from_matrix as from_matrix
from .affinities import neighbour_graph as neighbour_graph
from .affinities.sinkhorn import sinkhorn as sinkhorn
from .denoising import DenoiseInfo as DenoiseInfo
from .denoising import denoise as denoise
from .denoising.noise import GaussianNoise as GaussianNoise
from .denoising.noise import Poisson as Poisson
from .denoising.noise import estimate_noise as estimate_noise
from .denoising.noise import estimate_sigma as estimate_sigma
from .denoising.patches import PatchGroups as PatchGroups
from .denoising.total_variation import nonlocal_tv as nonlocal_tv
from .domains import Batch as Batch
from .domains import Grid as Grid
from .domains import Points as Points
from .domains.mask import Mask as Mask
from .equilibria import Equilibrium as Equilibrium
from .equilibria import diversity as diversity
from .equilibria import diversity_bounds as diversity_bounds
from .equilibria import equilibrium as equilibrium
from .equilibria import fidelity_for_diversity as fidelity_for_diversity
from .equilibria import largest_stable_fidelity as largest_stable_fidelity
from .errors import FileFormatError as FileFormatError
from .errors import InputError as InputError
from .errors import KeywordError as KeywordError
from .errors import MemoryLimitError as MemoryLimitError
from .errors import NlflowError as NlflowError
from .errors import NlflowWarning as NlflowWarning
from .errors import NumericalError as NumericalError
from .errors import StabilityError as StabilityError
from .errors import WorkerError as WorkerError
from .flows.frames import Frames as Frames
from .flows.integrators import ETD2RK as ETD2RK
from .flows.integrators import ETD4RK as ETD4RK
from .flows.integrators import IMEX as IMEX
from .flows.integrators import Adaptive as Adaptive
from .flows.integrators import AttentionStep as AttentionStep
from .flows.integrators import ConvexSplitting as ConvexSplitting
from .flows.integrators import ExplicitEuler as ExplicitEuler
from .flows.integrators import Exponential as Exponential
from .flows.integrators import NeutrenoStep as NeutrenoStep
from .flows.integrators import RungeKutta as RungeKutta
from .flows.integrators import SemiImplicit as SemiImplicit
from .flows.linear import AttentionFlow as AttentionFlow
from .flows.linear import GradientFlow as GradientFlow
from .flows.p_flow import ForwardBackward as ForwardBackward
from .flows.p_flow import LaggedDiffusivity as LaggedDiffusivity
from .flows.p_flow import PFlow as PFlow
from .flows.reactions import AllenCahn as AllenCahn
from .flows.reactions import FisherKPP as FisherKPP
from .flows.reactions import Reaction as Reaction
from .flows.result import Solution as Solution
from .flows.result import Status as Status
from .flows.solver import solve as solve
from .flows.sphere import GeodesicEuler as GeodesicEuler
from .flows.sphere import GeodesicMidpoint as GeodesicMidpoint
from .flows.sphere import LayerStep as LayerStep
from .flows.sphere import SphereFlow as SphereFlow
from .flows.sphere import on_sphere as on_sphere
from .flows.trackers import Callback as Callback
from .flows.trackers import Checkpoint as Checkpoint
from .flows.trackers import DiscrepancyPrinciple as DiscrepancyPrinciple
from .flows.trackers import DistanceToConstant as DistanceToConstant
from .flows.trackers import Energy as Energy
from .flows.trackers import SteadyState as SteadyState
from .functionals.constraint import Constraint as Constraint
from .functionals.energies import E as E
from .functionals.energies import J as J
from .functionals.fractional import FractionalLaplacian as FractionalLaplacian
from .functionals.misfits import L1 as L1
from .functionals.misfits import Huber as Huber
from .functionals.misfits import KullbackLeibler as KullbackLeibler
from .functionals.variational import CertifiedMinimizer as CertifiedMinimizer
from .functionals.variational import Ep as Ep
from .functionals.variational import Jp as Jp
from .kernels import Anisotropic as Anisotropic
from .kernels import ExpDotProduct as ExpDotProduct
from .kernels import Formula as Formula
from .kernels import Gaussian as Gaussian
from .kernels import InverseMultiquadric as InverseMultiquadric
from .kernels import Laplace as Laplace
from .kernels import Matern as Matern
from .kernels import Patch as Patch
from .kernels import RationalQuadratic as RationalQuadratic
from .kernels import TopHat as TopHat
from .kernels import TruncatedPower as TruncatedPower
from .kernels import Wendland as Wendland
from .markov import MarkovChain as MarkovChain
from .plotting.film import Film as Film
from .plotting.film import Live as Live
from .studies import StudyResult as StudyResult
from .studies import run_study as run_study

__version__: str

__all__ = [
    "ETD2RK",
    "ETD4RK",
    "IMEX",
    "L1",
    "Adaptive",
    "Affinity",
    "AllenCahn",
    "Anisotropic",
    "AttentionFlow",
    "AttentionStep",
    "Batch",
    "Callback",
    "CertifiedMinimizer",
    "Checkpoint",
    "Constraint",
    "ConvexSplitting",
    "DenoiseInfo",
    "DiscrepancyPrinciple",
    "DistanceToConstant",
    "E",
    "Energy",
    "Ep",
    "Equilibrium",
    "ExpDotProduct",
    "ExplicitEuler",
    "Exponential",
    "FileFormatError",
    "Film",
    "FisherKPP",
    "Formula",
    "ForwardBackward",
    "FractionalLaplacian",
    "Frames",
    "Gaussian",
    "GaussianNoise",
    "GeodesicEuler",
    "GeodesicMidpoint",
    "GradientFlow",
    "Grid",
    "Huber",
    "InputError",
    "InverseMultiquadric",
    "J",
    "Jp",
    "KeywordError",
    "KullbackLeibler",
    "LaggedDiffusivity",
    "Laplace",
    "LayerStep",
    "Live",
    "MarkovChain",
    "Mask",
    "Matern",
    "MemoryLimitError",
    "NeutrenoStep",
    "NlflowError",
    "NlflowWarning",
    "NumericalError",
    "PFlow",
    "Patch",
    "PatchGroups",
    "Points",
    "Poisson",
    "RationalQuadratic",
    "Reaction",
    "RungeKutta",
    "SemiImplicit",
    "Solution",
    "SphereFlow",
    "StabilityError",
    "Status",
    "SteadyState",
    "StudyResult",
    "TopHat",
    "TruncatedPower",
    "Wendland",
    "WorkerError",
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
    "on_sphere",
    "run_study",
    "sinkhorn",
    "solve",
]
