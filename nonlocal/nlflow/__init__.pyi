from .affinities import Affinity as Affinity
from .affinities import affinity as affinity
from .affinities import affinity_from_graph as affinity_from_graph
from .affinities import from_matrix as from_matrix
from .affinities import neighbour_graph as neighbour_graph
from .affinities import sinkhorn as sinkhorn
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
from .domains import Mask as Mask
from .domains import Points as Points
from .equilibria import Equilibrium as Equilibrium
from .equilibria import GaussianField as GaussianField
from .equilibria import choose_fidelity as choose_fidelity
from .equilibria import choose_parameter as choose_parameter
from .equilibria import continue_equilibria as continue_equilibria
from .equilibria import diversity as diversity
from .equilibria import diversity_bounds as diversity_bounds
from .equilibria import equilibrium as equilibrium
from .equilibria import fidelity_for_diversity as fidelity_for_diversity
from .equilibria import find_cycle as find_cycle
from .equilibria import find_equilibria as find_equilibria
from .equilibria import find_equilibrium as find_equilibrium
from .equilibria import largest_stable_fidelity as largest_stable_fidelity
from .equilibria import stability as stability
from .errors import FileFormatError as FileFormatError
from .errors import InputError as InputError
from .errors import KeywordError as KeywordError
from .errors import MemoryLimitError as MemoryLimitError
from .errors import NlflowError as NlflowError
from .errors import NlflowWarning as NlflowWarning
from .errors import NumericalError as NumericalError
from .errors import StabilityError as StabilityError
from .errors import WorkerError as WorkerError
from .flows import AttentionStep as AttentionStep
from .flows import Brusselator as Brusselator
from .flows import Callback as Callback
from .flows import DiscrepancyPrinciple as DiscrepancyPrinciple
from .flows import DistanceToConstant as DistanceToConstant
from .flows import EulerMaruyama as EulerMaruyama
from .flows import Event as Event
from .flows import ExactGaussian as ExactGaussian
from .flows import ExponentialEuler as ExponentialEuler
from .flows import FisherKPP as FisherKPP
from .flows import FitzHughNagumo as FitzHughNagumo
from .flows import ForwardBackward as ForwardBackward
from .flows import Frames as Frames
from .flows import GeodesicEuler as GeodesicEuler
from .flows import GeodesicMidpoint as GeodesicMidpoint
from .flows import GrayScott as GrayScott
from .flows import LaggedDiffusivity as LaggedDiffusivity
from .flows import LayerStep as LayerStep
from .flows import Lie as Lie
from .flows import Milstein as Milstein
from .flows import Noise as Noise
from .flows import PlatenWeak2 as PlatenWeak2
from .flows import PredatorPrey as PredatorPrey
from .flows import Reaction as Reaction
from .flows import Rosenbrock as Rosenbrock
from .flows import Solution as Solution
from .flows import Source as Source
from .flows import Status as Status
from .flows import StoermerVerlet as StoermerVerlet
from .flows import Strang as Strang
from .flows import SystemFlow as SystemFlow
from .flows import WaveExponential as WaveExponential
from .flows import WaveFlow as WaveFlow
from .flows import ensemble as ensemble
from .flows import function_of as function_of
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
from .functionals import L1 as L1
from .functionals import CertifiedMinimizer as CertifiedMinimizer
from .functionals import ConservedMetric as ConservedMetric
from .functionals import FractionalLaplacian as FractionalLaplacian
from .functionals import Jp as Jp
from .functionals import KullbackLeibler as KullbackLeibler
from .functionals.constraint import Constraint as Constraint
from .functionals.energies import E as E
from .functionals.energies import J as J
from .functionals.misfits import Huber as Huber
from .functionals.variational import Ep as Ep
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
from .plotting import Film as Film
from .plotting import Live as Live
from .studies import StudyResult as StudyResult
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
