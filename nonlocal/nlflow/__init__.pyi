from .affinities import Affinity as Affinity
from .affinities import affinity as affinity
from .affinities import from_matrix as from_matrix
from .denoising import DenoiseInfo as DenoiseInfo
from .denoising import denoise as denoise
from .domain import Batch as Batch
from .domain import Grid as Grid
from .domain import Points as Points
from .equilibria import Equilibrium as Equilibrium
from .equilibria import diversity as diversity
from .equilibria import diversity_bounds as diversity_bounds
from .equilibria import equilibrium as equilibrium
from .equilibria import fidelity_for as fidelity_for
from .equilibria import neutreno_limit as neutreno_limit
from .errors import FileFormatError as FileFormatError
from .errors import InputError as InputError
from .errors import MemoryLimitError as MemoryLimitError
from .errors import NlflowError as NlflowError
from .errors import NlflowWarning as NlflowWarning
from .errors import NumericalError as NumericalError
from .errors import StabilityError as StabilityError
from .errors import WorkerError as WorkerError
from .events import Callback as Callback
from .events import Checkpoint as Checkpoint
from .events import Discrepancy as Discrepancy
from .events import DistanceToConstant as DistanceToConstant
from .events import Energy as Energy
from .events import Stationary as Stationary
from .flow import AttentionFlow as AttentionFlow
from .flow import GradientFlow as GradientFlow
from .functional import E as E
from .functional import J as J
from .integrators import AttentionStep as AttentionStep
from .integrators import ExplicitEuler as ExplicitEuler
from .integrators import Exponential as Exponential
from .integrators import NeutrenoStep as NeutrenoStep
from .integrators import RungeKutta as RungeKutta
from .integrators import SemiImplicit as SemiImplicit
from .kernel import DotProduct as DotProduct
from .kernel import Gaussian as Gaussian
from .kernel import Laplace as Laplace
from .kernel import Patch as Patch
from .kernel import TopHat as TopHat
from .markov import MarkovChain as MarkovChain
from .mask import Mask as Mask
from .noise import Poisson as Poisson
from .noise import estimate_sigma as estimate_sigma
from .patches import PatchGroups as PatchGroups
from .result import Solution as Solution
from .result import Status as Status
from .solver import solve as solve
from .study import StudyResult as StudyResult
from .study import run_study as run_study
from .variational import CertifiedMinimizer as CertifiedMinimizer
from .variational import Ep as Ep
from .variational import Jp as Jp
from .variational import LaggedDiffusivity as LaggedDiffusivity
from .variational import PFlow as PFlow
from .variational import nonlocal_tv as nonlocal_tv

__all__ = [
    "Affinity",
    "AttentionFlow",
    "AttentionStep",
    "Batch",
    "Callback",
    "CertifiedMinimizer",
    "Checkpoint",
    "DenoiseInfo",
    "Discrepancy",
    "DistanceToConstant",
    "DotProduct",
    "E",
    "Energy",
    "Ep",
    "Equilibrium",
    "ExplicitEuler",
    "Exponential",
    "FileFormatError",
    "Gaussian",
    "GradientFlow",
    "Grid",
    "InputError",
    "J",
    "Jp",
    "LaggedDiffusivity",
    "Laplace",
    "MarkovChain",
    "Mask",
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
    "RungeKutta",
    "SemiImplicit",
    "Solution",
    "StabilityError",
    "Stationary",
    "Status",
    "StudyResult",
    "TopHat",
    "WorkerError",
    "affinity",
    "denoise",
    "diversity",
    "diversity_bounds",
    "equilibrium",
    "estimate_sigma",
    "fidelity_for",
    "from_matrix",
    "neutreno_limit",
    "nonlocal_tv",
    "run_study",
    "solve",
]
