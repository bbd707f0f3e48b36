"""Numbers that ask for a gradient: every public parameter has a derivative, or refuses the tensor by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import nlflow as nl
from nlflow import attention, equilibria, flows, functionals, kernels, learning
from nlflow.kernels import NAMED
from tests.names import FOUND

torch = pytest.importorskip("torch", reason="tensors")

X = np.random.default_rng(0).random((12, 2))
U = np.sin(5 * X[:, 0])
Y = (X[:, 0] > 0.5).astype(int)
PICTURE = np.random.default_rng(1).normal(100, 5, (12, 12))


def points() -> Any:
    return nl.affinity(nl.Gaussian(0.5), nl.Points(X))


def flow() -> Any:
    return nl.GradientFlow(nl.E(points(), U, 0.5))


def field() -> Any:
    return equilibria.GaussianField(flow().functional)


def kinetics() -> Any:
    """Return a flow of two channels that comes to rest, at (1, 1)."""
    return nl.GradientFlow(nl.J(points()), "degree", reaction=flows.Brusselator(1.0, 1.0))


def kinked(p: float) -> Any:
    return nl.GradientFlow(nl.J(points()), "degree", reaction=nl.Reaction(lambda u: p * u - u**3, (-2, 2), bound=20.0))


def fitted(kind: Any) -> Callable[..., Any]:
    """Return what makes an estimator and fits it: parameters are checked there."""

    def make(**given: Any) -> Any:
        return kind(**given).fit(X, Y if "Classifier" in kind.__name__ or "Spreading" in kind.__name__ else U)

    make.__name__ = kind.__name__
    return make


FIT = {"gamma": 1.0, "n_neighbors": 4, "accuracy": 1e-3, "tol": 1e-3, "memory_limit": 1e9}
EVERY = {"every": 1, "interval": 0.5}
PAIR: dict[str, Any] = {"interval": ((0.0, 4.0), (0.0, 4.0))}
ESTIMATE = {"samples": 8.0, "averages": 100.0, "rng": 0.0}
CHOICE: dict[str, Any] = {"values": np.array([0.1, 1.0, 10.0]), "factor": 1.0, **ESTIMATE}
LONG: dict[str, Any] = {"path": "unused"}
# What is called, with what it needs, and the numbers that it takes.
TABLE: list[tuple[Any, dict[str, Any], dict[str, Any]]] = [
    (nl.Gaussian, {"width": 1.0}, {"width": 1.0, "amplitude": 1.0}),
    (nl.Laplace, {"width": 1.0}, {"width": 1.0, "amplitude": 1.0}),
    (nl.Matern, {"width": 1.0}, {"width": 1.0, "nu": 1.5, "amplitude": 1.0}),
    (nl.RationalQuadratic, {"width": 1.0}, {"width": 1.0, "alpha": 1.0, "amplitude": 1.0}),
    (nl.InverseMultiquadric, {"width": 1.0}, {"width": 1.0, "amplitude": 1.0}),
    (nl.TopHat, {"radius": 1.0}, {"radius": 1.0, "amplitude": 1.0}),
    (nl.Wendland, {"radius": 1.0}, {"radius": 1.0, "derivatives": 2, "amplitude": 1.0}),
    (nl.TruncatedPower, {"power": 2.0, "core": 0.1}, {"power": 2.0, "core": 0.1, "horizon": 1.0, "amplitude": 1.0}),
    (nl.Formula, {"k": "exp(-r)"}, {"width": 1.0, "amplitude": 1.0}),
    (nl.Anisotropic, {"kernel": nl.Gaussian(1.0), "widths": (1.0, 1.0)}, {"amplitude": 1.0, "widths": (1.0, 2.0)}),
    (nl.Anisotropic, {"kernel": nl.Gaussian(1.0)}, {"matrix": np.eye(2), "covariance": np.eye(2)}),
    (nl.ExpDotProduct, {}, {"scale": 1.0, "amplitude": 1.0}),
    (
        nl.Patch, {"width": 1.0},
        {"width": 1.0, "patch_size": 3, "search_radius": 2, "sigma": 1.0, "spatial_width": 1.0, "amplitude": 1.0},
    ),
    (nl.Points, {"nodes": X}, {"nodes": X, "weights": np.ones(12), "volume": 1.0}),
    (nl.Grid, {"shape": 8}, {"shape": 8, "spacing": 0.1}),
    (nl.Grid, {"shape": (4, 4)}, {"spacing": (0.1, 0.2)}),
    (
        nl.FractionalLaplacian, {"grid": nl.Grid(8, boundary="isolated"), "s": 0.5},
        {"s": 0.5, "horizon": 3.0, "tempering": 0.1, "memory_limit": 1e9},
    ),
    *((kind, {"dt": 0.1}, {"dt": 0.1}) for kind in (
        nl.ExplicitEuler, nl.SemiImplicit, nl.ETD2RK, nl.ETD4RK, nl.IMEX, nl.ConvexSplitting, nl.ForwardBackward,
        nl.LaggedDiffusivity, nl.GeodesicEuler, nl.GeodesicMidpoint, nl.LayerStep, flows.Lie, flows.Strang,
        flows.EulerMaruyama, flows.Milstein, flows.PlatenWeak2, flows.ExponentialEuler, flows.StoermerVerlet,
    )),
    (flows.StoermerVerlet, {"dt": 0.1}, {"stride": 2}),
    (flows.Rosenbrock, {}, {"rtol": 1e-3, "atol": 1e-3, "dt": 0.1}),
    (flows.ExactGaussian, {}, {"tol": 1e-3}),
    (flows.WaveExponential, {}, {"tol": 1e-3}),
    (nl.LaggedDiffusivity, {"dt": 0.1}, {"smoothing": 1e-3}),
    (nl.RungeKutta, {}, {"rtol": 1e-3, "atol": 1e-3, "dt": 0.1}),
    (nl.Adaptive, {"integrator": nl.ETD2RK(0.1)}, {"rtol": 1e-3, "atol": 1e-3}),
    (nl.Exponential, {}, {"tol": 1e-3}),
    (nl.Huber, {}, {"delta": 0.1}),
    (nl.AllenCahn, {}, {"strength": 1.0, "interval": (-1.0, 1.0)}),
    (nl.FisherKPP, {}, {"rate": 1.0, "interval": (0.0, 1.0)}),
    (
        nl.Reaction, {"function": lambda u: -u, "interval": (0.0, 1.0), "bound": 1.0},
        {"interval": (0.0, 1.0), "bound": 1.0},
    ),
    (
        nl.Reaction, {"function": lambda u: -u, "components": 2, "interval": (0.0, 1.0), "bound": 1.0},
        {**PAIR, "components": 2},
    ),
    (flows.GrayScott, {}, {"feed": 0.04, "kill": 0.06, **PAIR}),
    (flows.FitzHughNagumo, {}, {"a": 0.7, "b": 0.8, "epsilon": 0.08, "current": 0.1, **PAIR}),
    (flows.Brusselator, {}, {"a": 1.0, "b": 3.0, **PAIR}),
    (flows.PredatorPrey, {}, {"growth": 1.0, "saturation": 0.3, "conversion": 1.0, "mortality": 0.5, **PAIR}),
    (flows.SystemFlow, {"functional": nl.J(points())}, {"diffusivity": [1.0, 2.0]}),
    (flows.SystemFlow, {"functional": nl.J(points())}, {"diffusivity": np.eye(2)}),
    (functionals.ConservedMetric, {}, {"mobility": 1.0}),
    (functionals.ConservedMetric, {}, {"mobility": np.ones(12)}),
    (functionals.ConservedMetric, {"mobility": np.cos}, {"largest": 1.0}),
    (flows.WaveFlow, {"flow": nl.GradientFlow(nl.J(points()))}, {"damping": 0.1, "density": 1.0}),
    (flows.WaveFlow, {"flow": nl.GradientFlow(nl.J(points()))}, {"damping": np.ones(12), "density": [1.0] * 12}),
    (flows.Noise, {}, {"beta": 1.0, "strength": 1.0}),
    (flows.Noise, {}, {"strength": [1.0, 2.0]}),
    (flows.Noise, {"beta": 1.0}, {"channels": [1.0, 2.0], "rng": 1.0, "path": 1.0}),
    (flows.normals, {"seed": 1, "shape": (2, 3)}, {
        "seed": 1.0, "shape": (2.0, 3.0), "node": 1.0, "channel": 1.0, "step": 1.0, "stream": 1.0,
    }),
    (
        flows.ensemble, {"flow": flow() + flows.Noise(beta=1.0, rng=1), "count": 2, "t": 0.1},
        {"count": 2.0, "t": 0.1, "side_by_side": 1.0, "memory_limit": 1e9},
    ),
    (flows.ensemble, {"flow": flow() + flows.Noise(beta=1.0, rng=1), "count": 2}, {"t_eval": [0.0, 0.1]}),
    (flows.Event, {"function": lambda t, u: t - 0.5}, {"direction": 1.0, "tol": 1e-9}),
    (kernels.Interaction, {"w": "r**2"}, {"strength": 1.0, "cutoff": 2.0}),
    (kernels.Interaction, {"w": "r**2"}, {"cutoff": np.inf}),
    (
        kernels.Morse, {},
        {"repulsion": 1.0, "repulsion_length": 0.5, "attraction": 0.5, "attraction_length": 1.0, "cutoff": 3.0},
    ),
    (kernels.PowerLaws, {}, {"attraction": 4.0, "repulsion": 2.0, "cutoff": 3.0, "softening": 0.1}),
    (flows.trap, {}, {"stiffness": 1.0, "centre": [0.0, 1.0]}),
    (
        flows.ParticleFlow, {"particles": X, "friction": 0.0},
        {"weights": np.ones(12), "box": [5.0, 5.0], "friction": 1.0, "drag": 1.0},
    ),
    (flows.ParticleFlow, {"particles": X}, {"box": 5.0}),
    (flows.ParticleFlow, {"particles": X}, {"box": np.array([5.0, 5.0])}),
    (flows.AveragingFlow, {"particles": X, "kernel": nl.Gaussian(1.0)}, {"weights": np.ones(12)}),
    (flows.mean_shift, {"data": X}, {"width": 1.0}),
    (flows.hegselmann_krause, {"opinions": X}, {"confidence": 1.0}),
    (flows.Kuramoto, {"frequencies": U, "coupling": 1.0}, {"frequencies": U, "coupling": 1.0}),
    (flows.function_of, {"L": points(), "function": np.exp}, {"tol": 1e-3, "maxiter": 10.0}),
    (flows.function_of(points(), np.exp).dot, {}, {"x": U}),
    (equilibria.GaussianField, {"energy": flow().functional}, {"beta": 1.0, "sigma": 1.0}),
    (field().sample, {}, {"count": 2.0, "rng": 1.0}),
    (field().variance, {}, {"samples": 20.0, "rng": 1.0}),
    (field().band, {}, {"level": 0.9, "samples": 20.0, "rng": 1.0}),
    (field().log_determinant, {}, ESTIMATE),
    (field().log_evidence, {}, ESTIMATE),
    (equilibria.trace_of, {"L": points(), "function": np.exp}, ESTIMATE),
    (equilibria.choose_fidelity, {"energy": flow().functional}, CHOICE),
    (equilibria.choose_fidelity, {"energy": flow().functional, "method": "sure"}, {"sigma": 0.1}),
    (
        equilibria.choose_parameter,
        {"build": lambda p: nl.E(points(), U, p), "values": [0.1, 1.0, 10.0], "method": "gcv"}, CHOICE,
    ),
    (
        equilibria.choose_parameter,
        {"build": lambda p: nl.E(points(), U, p), "values": [0.1, 1.0, 10.0], "method": "sure"}, {"sigma": 0.1},
    ),
    (
        equilibria.find_equilibrium, {"flow": kinetics(), "start": np.ones((12, 2))},
        {"start": np.ones((12, 2)), "rtol": 1e-3, "maxiter": 10.0},
    ),
    (
        equilibria.find_equilibria, {"flow": kinetics(), "starts": [np.ones((12, 2))]},
        {"starts": [np.ones((12, 2))], "most": 2.0, "rtol": 1e-3, "maxiter": 10.0},
    ),
    (equilibria.stability, {"flow": kinetics(), "u": np.ones((12, 2))}, {"u": np.ones((12, 2)), "k": 2.0}),
    (
        equilibria.continue_equilibria,
        {"make_flow": kinked, "start": np.zeros(12), "parameter": 0.0, "bounds": (-1.0, 1.0)},
        {"start": np.zeros(12), "parameter": 0.0, "bounds": (-1.0, 1.0), "direction": 1.0, "size": 1.0, "step": 0.01,
         "longest": 0.05, "most": 5.0, "k": 2.0, "rtol": 1e-3},
    ),
    (
        equilibria.find_cycle, {"flow": kinetics(), "start": np.ones((12, 2)), "settle": 1.0},
        {"start": np.ones((12, 2)), "period": 1.0, "settle": 1.0, "rtol": 1e-3, "maxiter": 5.0},
    ),
    (nl.Constraint, {"nodes": [0]}, {"values": 1.0}),
    (nl.Constraint, {"nodes": [0, 1]}, {"values": np.ones(2)}),
    (nl.Energy, {}, {**EVERY, "at": [0.1]}),
    (nl.DistanceToConstant, {}, EVERY),
    (nl.Callback, {"function": print}, EVERY),
    (nl.SteadyState, {}, {"rtol": 1e-3, "atol": 1e-3, **EVERY}),
    (nl.DiscrepancyPrinciple, {"observed": U, "sigma": 1.0}, {"observed": U, "sigma": 1.0, "factor": 1.0, **EVERY}),
    (nl.Checkpoint, LONG, {"seconds": 1.0, **EVERY}),
    (nl.Frames, {"path": "unused.npy"}, EVERY),
    (nl.Film, {"path": "unused.gif"}, {**EVERY, "limits": (0.0, 1.0), "rate": 10.0}),
    (nl.Live, {}, {**EVERY, "limits": (0.0, 1.0), "seconds": 1.0}),
    (nl.E, {"affinity": points(), "observed": U, "fidelity": 0.5}, {"observed": U, "fidelity": 0.5}),
    (nl.Jp, {"affinity": points(), "p": 1.5}, {"p": 1.5, "memory_limit": 1e9}),
    (
        nl.Ep, {"affinity": points(), "observed": U, "fidelity": 0.5, "p": 1.5},
        {"observed": U, "fidelity": 0.5, "p": 1.5, "memory_limit": 1e9},
    ),
    (nl.GradientFlow, {"functional": nl.J(points()), "evolving": False}, {"every": 1}),
    (nl.AttentionFlow, {"affinity": nl.affinity(nl.ExpDotProduct(), nl.Points(X), X)}, {"fidelity": 0.5, "every": 1}),
    (nl.SphereFlow, {"tokens": X / np.linalg.norm(X, axis=1, keepdims=True)}, {"beta": 1.0}),
    (nl.MarkovChain, {"affinity": points()}, {"laziness": 0.1, "memory_limit": 1e9}),
    (nl.affinity, {"kernel": nl.Gaussian(1.0), "domain": nl.Points(X)}, {"rtol": 1e-3, "memory_limit": 1e9}),
    (nl.affinity_from_graph, {"graph": np.ones((3, 3))}, {"memory_limit": 1e9}),
    (nl.from_matrix, {"matrix": np.ones((3, 3)), "domain": nl.Points(X[:3])}, {"memory_limit": 1e9}),
    (nl.neighbour_graph, {"points": X, "neighbours": 3}, {"points": X, "neighbours": 3, "memory_limit": 1e9}),
    (nl.sinkhorn, {"kernel": np.ones((3, 3))}, {"tolerance": 1e-3, "iterations": 10, "memory_limit": 1e9}),
    (nl.solve, {"flow": flow(), "start": U}, {"t": 1.0, "t_eval": np.array([0.0, 1.0]), "start": U}),
    (nl.equilibrium, {"flow": flow()}, {"rtol": 1e-3, "maxiter": 10, "memory_limit": 1e9}),
    (nl.fidelity_for_diversity, {"flow": nl.GradientFlow(nl.J(points())), "fraction": 0.5}, {"fraction": 0.5}),
    (flow().functional.minimizer, {}, {"rtol": 1e-3, "maxiter": 10}),
    (
        nl.denoise, {"image": PICTURE, "quality": "fast"},
        {"sigma": 5.0, "strength": 1.0, "width": 0.5, "fidelity": 0.1, "steps": 2, "max_memory": 1e9, "seed": 1},
    ),
    (
        nl.nonlocal_tv, {"image": PICTURE, "sigma": 5.0},
        {"image": PICTURE, "sigma": 5.0, "fidelity": 0.1, "residual": 0.9, "patch_size": 3, "search_radius": 2,
         "rtol": 1e-2, "maxiter": 5, "memory_limit": 1e9},
    ),
    (
        nl.PatchGroups, {"image": PICTURE},
        {"patch_size": 3, "search_radius": 4, "members": 4, "step": 2, "memory_limit": 1e9},
    ),
    (nl.GaussianNoise, {"sigma": 5.0}, {"sigma": 5.0, "compressed": 0.5}),
    (nl.Poisson, {}, {"gain": 1.0, "sigma": 1.0, "offset": 1.0}),
    *((fitted(kind), {}, {**FIT, **more}) for kind, more in (
        (learning.HarmonicClassifier, {"fidelity": 1.0, "max_iter": 9}),
        (learning.HarmonicRegressor, {"fidelity": 1.0, "max_iter": 9}),
        (learning.LabelSpreading, {"alpha": 0.5, "max_iter": 9}),
        (learning.PLaplacianClassifier, {"p": 2.0, "max_iter": 9}),
        (learning.PLaplacianRegressor, {"p": 2.0, "max_iter": 9}),
        (learning.PoissonClassifier, {"max_iter": 9}),
        (learning.DiffusionMap, {"n_components": 2, "alpha": 0.5, "t": 1.0, "beta": -0.5}),
    )),
    (learning.spectral_clustering, {"X": X, "n_clusters": 2}, {"n_clusters": 2, **FIT}),
    (
        learning.log_evidence, {"affinity": points(), "labelled": [0, 1], "values": [0.0, 1.0], "fidelity": 1.0},
        {"fidelity": 1.0},
    ),
    (
        attention.NeutrenoAttention, {"width": 8, "heads": 2},
        {"width": 8, "heads": 2, "fidelity": 0.5, "similarity_removal": 0.1, "dropout": 0.1},
    ),
    (attention.FeatScale, {}, {"width": 8}),
    (attention.SignedProjection, {}, {"width": 8}),
]  # fmt: skip
# With a derivative, as their pages say.
DERIVATIVES = {("E", "observed"), ("E", "fidelity"), ("solve", "start"), ("denoise", "sigma")}
RESULTS = {"CertifiedMinimizer", "DenoiseInfo", "Equilibrium", "Solution"}  # are returned, not made


def tracked(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return type(value)(tracked(entry) for entry in value)
    return torch.tensor(value, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize(
    ("make", "needed", "name", "value"),
    [
        pytest.param(make, needed, name, value, id=f"{make.__name__}-{name}-{number}")
        for number, (make, needed, numbers) in enumerate(TABLE)
        for name, value in numbers.items()
    ],
)
def test_a_number_that_asks_for_a_gradient_is_refused_by_name(
    make: Any, needed: dict[str, Any], name: str, value: Any
) -> None:
    if (make.__name__, name) in DERIVATIVES:
        return
    with pytest.raises(nl.InputError, match=name):
        make(**{**needed, name: tracked(value)})


def test_the_table_has_every_number_of_the_package() -> None:
    told = {(make.__name__, name) for make, _, numbers in TABLE for name in numbers}
    for name in FOUND:
        kind = getattr(nl, name)
        if not callable(kind) or name in RESULTS or (isinstance(kind, type) and issubclass(kind, BaseException)):
            continue
        for parameter in inspect.signature(kind).parameters.values():
            words = str(parameter.annotation)
            if ("float" in words and "Callable" not in words) or words == "int":
                assert (name, parameter.name) in told, (name, parameter.name)
    assert {kind.__name__ for kind in NAMED.values()} <= {make.__name__ for make, _, _ in TABLE}


def test_without_gradients_tensors_are_numbers() -> None:
    with torch.no_grad():
        assert nl.Gaussian(tracked(0.5)).width == 0.5


@pytest.mark.parametrize("part", ["observed", "fidelity", "features"])
@pytest.mark.parametrize(
    "make",
    [
        equilibria.GaussianField,
        equilibria.choose_fidelity,
        lambda energy: flows.function_of(energy, np.exp).evaluate(energy.observed),
        lambda energy: equilibria.stability(nl.GradientFlow(energy), torch.zeros(12, dtype=torch.float64)),
        lambda energy: equilibria.find_equilibrium(nl.GradientFlow(energy), torch.zeros(12, dtype=torch.float64)),
    ],
    ids=["GaussianField", "choose_fidelity", "function_of", "stability", "find_equilibrium"],
)
def test_an_energy_whose_parts_ask_for_a_gradient_is_refused_where_there_is_none(make: Any, part: str) -> None:
    given = {"observed": U, "fidelity": 0.5, "features": X}
    parts = {name: tracked(value).requires_grad_(name == part) for name, value in given.items()}
    weights = nl.affinity(nl.ExpDotProduct(), nl.Points(X), parts["features"])
    with pytest.raises(nl.InputError, match="got a tensor that requires a gradient"):
        make(nl.E(weights, parts["observed"], parts["fidelity"]))
