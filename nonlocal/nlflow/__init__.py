"""nlflow: numerical simulation of nonlocal gradient flows.

The names that most programs need are here; each room (`nlflow.kernels`, `nlflow.flows`, `nlflow.denoising.noise`, ...)
has all of its own. Names and rooms are loaded when they are first used: ``import nlflow`` costs next to nothing.
"""

from importlib import import_module
from importlib.util import find_spec

import lazy_loader

from nlflow import _moved
from nlflow.backends import forks as forks  # a fork is seen from the first import on, before a loop is loaded

# The list of names and where they live is the stub beside this file, which type checkers read as well.
_load, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

del lazy_loader

_moved.install()

# Names of rooms that are found from here too, for short programs; a new name needs no place in this table.
_IN_ROOMS = {
    "affinities": "Affinity sinkhorn",
    "denoising": "DenoiseInfo",
    "denoising.noise": "GaussianNoise Poisson",
    "denoising.patches": "PatchGroups",
    "domains": "Batch Mask",
    "equilibria": (
        "choose_fidelity choose_parameter continue_equilibria diversity Equilibrium fidelity_for_diversity "
        "find_cycle find_equilibria find_equilibrium GaussianField largest_stable_fidelity stability"
    ),
    "errors": "FileFormatError KeywordError MemoryLimitError NlflowWarning NumericalError StabilityError WorkerError",
    "flows": (
        "AttentionStep Brusselator Callback DiscrepancyPrinciple DistanceToConstant EulerMaruyama Event ExactGaussian "
        "ExponentialEuler FisherKPP FitzHughNagumo ForwardBackward Frames GeodesicEuler GeodesicMidpoint GrayScott "
        "LaggedDiffusivity LayerStep Lie Milstein Noise PlatenWeak2 PredatorPrey Reaction Rosenbrock Solution Source "
        "Status StoermerVerlet Strang SystemFlow WaveExponential WaveFlow ensemble function_of"
    ),
    "functionals": "CertifiedMinimizer ConservedMetric FractionalLaplacian Jp KullbackLeibler L1",
    "kernels": "Anisotropic InverseMultiquadric Laplace Matern RationalQuadratic TopHat TruncatedPower Wendland",
    "plotting": "Film Live",
    "studies": "StudyResult",
}
_ROOM_OF = {name: room for room, names in _IN_ROOMS.items() for name in names.split()}


def __getattr__(name: str) -> object:
    """Return a name of the package, loaded now, or its version."""
    if name == "__version__":
        from nlflow.backends.machine import version

        return version()
    if name in _ROOM_OF:
        return getattr(import_module(f"nlflow.{_ROOM_OF[name]}"), name)
    if not name.startswith("_") and find_spec(f"nlflow.{name}"):
        return import_module(f"nlflow.{name}")
    try:
        return _load(name)
    except AttributeError:
        if name in __all__:  # something else fails while its module is loaded
            raise
        from difflib import get_close_matches

        near = get_close_matches(name, [*__all__, *_ROOM_OF], 1)
        remedy = f"; did you mean {near[0]}?" if near else ""
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{remedy}", name=name) from None
