"""Contracts of extensions: each public class meets its check, and each check finds what breaks a promise."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import types
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
import scipy.linalg
from scipy.sparse import csr_array

import nlflow as nl
from nlflow.affinities import Affinity, SparseAffinity, Unlinked
from nlflow.flows import (
    AverageVectorField,
    AveragingFlow,
    Brusselator,
    Kuramoto,
    Lie,
    ParticleFlow,
    Rosenbrock,
    StoermerVerlet,
    Strang,
    SystemFlow,
    WaveExponential,
    WaveFlow,
)
from nlflow.flows.flow import Flow
from nlflow.flows.integrators import FixedStep, Integrator
from nlflow.flows.spectrum import dense_operator
from nlflow.functionals.fidelity import Fidelity, MatrixFidelity, NodeFidelity
from nlflow.kernels import Kernel, Morse, RadialKernel
from nlflow.testing import (
    ContractError,
    check_affinity,
    check_fidelity,
    check_flow,
    check_integrator,
    check_kernel,
)

RNG = np.random.default_rng(0)
X = RNG.normal(size=(24, 2))
F = np.sin(np.arange(24.0))
DENSE = nl.affinity(nl.Gaussian(width=1.0), nl.Points(X))
EDGES = nl.affinity(nl.Gaussian(width=1.0), nl.Grid(20), window=2)
ROOTS = RNG.normal(size=(6, 3, 3))
LOOP = np.diag([0.0, 0.0, 0.0, 0.0, 2.0])
SPHERE = nl.on_sphere(RNG.normal(size=(9, 3)))
TOKENS = nl.affinity(nl.ExpDotProduct(), nl.Points(np.arange(24.0)), X, queries=X[::-1].copy())


def _grid(method: str, boundary: str = "isolated") -> Affinity:
    return nl.affinity(nl.Gaussian(width=0.3), nl.Grid((5, 4), spacing=0.2, boundary=boundary), method=method)


KERNELS: dict[str, Callable[[], Kernel]] = {
    "Anisotropic": lambda: nl.Anisotropic(nl.Gaussian(width=1.0), (1.0, 0.5)),
    "ExpDotProduct": nl.ExpDotProduct,
    "Formula": lambda: nl.Formula("exp(-r**1.5)", width=0.4),
    "Gaussian": lambda: nl.Gaussian(width=0.7),
    "InverseMultiquadric": lambda: nl.InverseMultiquadric(width=0.7),
    "Laplace": lambda: nl.Laplace(width=0.7),
    "Matern": lambda: nl.Matern(width=0.7),
    "RationalQuadratic": lambda: nl.RationalQuadratic(width=0.7),
    "TopHat": lambda: nl.TopHat(radius=1.1),
    "Wendland": lambda: nl.Wendland(radius=1.5),
}


@pytest.mark.parametrize("name", KERNELS)
def test_kernels(name: str) -> None:
    check_kernel(KERNELS[name]())


AFFINITIES: dict[str, Callable[[], Affinity]] = {
    "graph with a node that sees nobody": lambda: nl.affinity_from_graph(np.diag(np.ones(4), 1)),
    "graph with a node that has a loop alone": lambda: nl.affinity_from_graph(np.diag(np.ones(4), 1) + LOOP),
    "graph with a node without any edge": lambda: SparseAffinity(
        nl.Points(np.arange(5.0)), csr_array(np.diag([1.0, 1.0, 1.0, 0.0], 1)), symmetric=False
    ),
    "DenseAffinity": lambda: DENSE,
    "PairwiseAffinity": lambda: nl.affinity(nl.Gaussian(width=1.0), nl.Points(X), method="pairwise"),
    "NeighbourAffinity": lambda: nl.affinity(nl.Gaussian(width=1.0), nl.Points(X), method="sparse"),
    "NonuniformAffinity": lambda: nl.affinity(nl.Gaussian(width=1.0), nl.Points(X), method="nufft"),
    "LowRankAffinity": lambda: nl.affinity(nl.Gaussian(width=1.0), nl.Points(X), method="lowrank"),
    "TableStencil": lambda: _grid("stencil"),
    "PatchStencil": lambda: nl.affinity(nl.Patch(1.0, search_radius=1), nl.Grid((6, 5)), RNG.normal(size=(6, 5))),
    "ConvolutionAffinity": lambda: _grid("convolution", "periodic"),
    "SinkhornAffinity": lambda: nl.sinkhorn(nl.ExpDotProduct(), nl.Points(np.arange(24.0)), X),
    "dense, not symmetric": lambda: TOKENS,
    "SparseAffinity": lambda: nl.affinity_from_graph(nl.neighbour_graph(X, 4), nl.Points(X)),
    "Unlinked": lambda: Unlinked(nl.Points(X, weights=np.linspace(1, 2, 24))),
}


@pytest.mark.parametrize("name", AFFINITIES)
def test_affinities(name: str) -> None:
    check_affinity(AFFINITIES[name]())


FIDELITIES: dict[str, tuple[Fidelity, tuple[int, ...], int | None]] = {
    "NodeFidelity": (NodeFidelity(np.linspace(0, 2, 6)), (6,), None),
    "one number": (NodeFidelity(0.5), (3, 2), 2),
    "MatrixFidelity": (MatrixFidelity(ROOTS @ np.swapaxes(ROOTS, 1, 2)), (6,), None),
}


@pytest.mark.parametrize("name", FIDELITIES)
def test_fidelities(name: str) -> None:
    check_fidelity(*FIDELITIES[name])


def _p_flow(p: float) -> nl.PFlow:
    return nl.PFlow(nl.Ep(EDGES, np.sin(np.arange(20.0)), 0.5, p=p))


def _wave() -> tuple[WaveFlow, Any]:
    flow = WaveFlow(nl.GradientFlow(nl.J(DENSE)), damping=0.1)
    return flow, flow.state(F, F[::-1])


SWARM = ParticleFlow(X, Morse(), friction=0.3)
SYSTEM = SystemFlow(nl.J(_grid("convolution", "periodic")), [1.0, 0.2]) + Brusselator(1.0, 1.5)
MIXED = np.ones((5, 4, 2)) + 0.1 * RNG.normal(size=(5, 4, 2))
MOVING = np.concatenate([X, X[::-1]], axis=1)

INTEGRATORS: dict[str, Callable[[], tuple[Any, ...]]] = {
    "Adaptive": lambda: (nl.Adaptive(nl.ETD2RK(0.1)),),
    "AverageVectorField": lambda: (AverageVectorField(0.1),),
    "AttentionStep": lambda: (nl.AttentionStep(),),
    "ConvexSplitting": lambda: (nl.ConvexSplitting(0.1),),
    "ETD2RK": lambda: (nl.ETD2RK(0.1),),
    "ETD4RK": lambda: (nl.ETD4RK(0.1),),
    "ExplicitEuler": lambda: (nl.ExplicitEuler(0.1),),
    "EulerMaruyama": lambda: (nl.EulerMaruyama(0.1),),
    "ExactGaussian": lambda: (nl.ExactGaussian(),),
    "Exponential": lambda: (nl.Exponential(),),
    "ExponentialEuler": lambda: (nl.ExponentialEuler(0.1),),
    "ForwardBackward": lambda: (nl.ForwardBackward(0.01), _p_flow(2.0)),
    "GeodesicEuler": lambda: (nl.GeodesicEuler(0.1), nl.SphereFlow(SPHERE), SPHERE),
    "GeodesicMidpoint": lambda: (nl.GeodesicMidpoint(0.1), nl.SphereFlow(SPHERE), SPHERE),
    "IMEX": lambda: (nl.IMEX(0.1),),
    "LaggedDiffusivity": lambda: (nl.LaggedDiffusivity(0.1), _p_flow(1.5)),
    "LayerStep": lambda: (nl.LayerStep(0.1), nl.SphereFlow(SPHERE), SPHERE),
    "Lie": lambda: (Lie(0.05), SYSTEM, MIXED),
    "Milstein": lambda: (nl.Milstein(0.1),),
    "PlatenWeak2": lambda: (nl.PlatenWeak2(0.1),),
    "NeutrenoStep": lambda: (nl.NeutrenoStep(),),
    "StoermerVerlet of particles": lambda: (StoermerVerlet(0.02), SWARM, MOVING),
    "Rosenbrock": lambda: (Rosenbrock(1e-6),),
    "RungeKutta": lambda: (nl.RungeKutta(1e-8),),
    "SemiImplicit": lambda: (nl.SemiImplicit(0.1),),
    "StoermerVerlet": lambda: (StoermerVerlet(0.02), *_wave()),
    "Strang": lambda: (Strang(0.05), SYSTEM, MIXED),
    "WaveExponential": lambda: (WaveExponential(), *_wave()),
}


@pytest.mark.numerical
@pytest.mark.parametrize("name", INTEGRATORS)
def test_integrators(name: str) -> None:
    check_integrator(*INTEGRATORS[name]())


FLOWS: dict[str, Callable[[], tuple[Any, ...]]] = {
    "AttentionFlow": lambda: (nl.AttentionFlow(TOKENS, F, 0.4),),
    "GradientFlow": lambda: (nl.GradientFlow(nl.E(DENSE, F, 0.4)),),
    "with a reaction": lambda: (nl.GradientFlow(nl.J(DENSE), "degree", reaction=nl.AllenCahn()),),
    "with a source": lambda: (nl.GradientFlow(nl.J(DENSE), source=lambda t: np.cos(t) * F),),
    "with a constraint": lambda: (nl.GradientFlow(nl.J(DENSE), constraint=nl.Constraint([0, 3], [1.0, 2.0])),),
    "PFlow": lambda: (_p_flow(1.5),),
    "SphereFlow": lambda: (nl.SphereFlow(SPHERE), SPHERE),
    "AveragingFlow": lambda: (AveragingFlow(X, nl.Gaussian(width=1.0)), X),
    "Kuramoto": lambda: (Kuramoto(F, coupling=0.5), F),
    "ParticleFlow": lambda: (ParticleFlow(X, Morse()), X),
    "with inertia": lambda: (SWARM, MOVING),
    "SystemFlow": lambda: (SYSTEM, MIXED),
    "WaveFlow": _wave,
    "conserved": lambda: (nl.GradientFlow(nl.J(DENSE), "conserved", reaction=nl.AllenCahn()),),
}


@pytest.mark.parametrize("name", FLOWS)
def test_flows(name: str) -> None:
    check_flow(*FLOWS[name]())


@pytest.mark.parametrize("name", ["AveragingFlow", "ParticleFlow", "SphereFlow", "SystemFlow", "WaveFlow"])
def test_a_start_that_a_flow_needs_is_asked_for(name: str) -> None:
    flow, *_ = FLOWS[name]()
    with pytest.raises(nl.InputError, match=rf"^start: got none, expected a signal of the {name}, .*: got shape .*"):
        check_flow(flow)


# --- every class has a recipe ---------------------------------------------------------------------------------------

ELSEWHERE = {
    "Patch": "compares windows of images, in test_patches.py",
    "TruncatedPower": "is singular and integrated over cells on grids, in test_fractional.py",
    "BatchAffinity": "is one of items, in test_batch.py",
    "BlockAffinity": "is one of items, in test_batch.py",
    "FractionalAffinity": "is integrated over cells, in test_fractional.py",
    "HalfspaceAffinity": "is integrated over cells, in test_fractional.py",
    "MixedAffinity": "is one of items, in test_batch.py",
    "RowAffinity": "forms rows of a flow on the sphere, in test_sphere.py",
    "GroupAffinity": "is of groups of patches, in test_group_flow.py",
    "ShardedAffinity": "needs several processes, in test_sharded.py",
    "TiledAffinity": "is of torch tensors, in test_tiled.py",
    "Replayed": "is of torch tensors, in test_budgets.py",
    "RememberingFlow": "is a GradientFlow inside the denoiser",
    "GroupFlow": "has no velocity, in test_group_flow.py",
    "Variations": "is a flow and its derivatives side by side, in test_cycles.py",
    "RelaxedSemiImplicit": "steps a GroupFlow, in test_group_flow.py",
}


def _classes(base: type) -> set[str]:
    """Return the concrete classes of the package below a base, those of a name that begins with _ left aside."""
    for module in pkgutil.walk_packages(nl.__path__, "nlflow."):
        if module.name.split(".")[1] in ("kernels", "affinities", "functionals", "flows", "denoising"):
            with suppress(ModuleNotFoundError):  # of packages that are optional
                importlib.import_module(module.name)
    found, left = set(), [base]
    while left:
        cls = left.pop()
        left += cls.__subclasses__()
        own = cls.__module__.startswith("nlflow.") and not cls.__name__.startswith("_")
        if own and not inspect.isabstract(cls) and cls.__module__ != base.__module__:
            found.add(cls.__name__)
    return found


@pytest.mark.parametrize(
    ("base", "recipes"),
    [(Kernel, KERNELS), (Affinity, AFFINITIES), (Fidelity, FIDELITIES), (Integrator, INTEGRATORS), (Flow, FLOWS)],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_every_class_is_checked(base: type, recipes: dict[str, Any]) -> None:
    shared = {"LinearFlow", "SecondOrder", "Pieces", "SphereStep", "ImplicitStep"}
    missing = _classes(base) - set(recipes) - set(ELSEWHERE) - shared
    assert not missing, f"without a recipe: {sorted(missing)}"


# --- what checks find ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Lopsided(Kernel):
    formula: ClassVar[str] = "exp(x . (1, 0))"

    def log_matrix(self, x: Any, y: Any) -> Any:
        return x[:, :1] + 0 * y[:, 0]


@dataclass(frozen=True)
class Window(RadialKernel):
    """A top hat that says that it is definite."""

    formula: ClassVar[str] = "1 for r < 1"
    positive_semidefinite: ClassVar[bool] = True

    def log_profile(self, squared: Any) -> Any:
        return np.where(squared < 1, 0.0, -np.inf)


class Sums(Affinity):
    """A dense affinity that a user writes, with faults."""

    method = "sums"

    def __init__(self, fault: str = "") -> None:
        super().__init__(nl.Points(X), None, symmetric=fault != "", positive_semidefinite=False)
        self.fault, self.symmetric = fault, True
        self.k = np.exp(-((X[:, None] - X[None]) ** 2).sum(-1))

    def _average(self, u: Any) -> Any:
        flat = u.reshape(24, -1)
        if self.fault == "shape":
            return self.k @ flat[:, 0]
        sums = self.k @ (self.domain.weights[:, None] * flat)
        if self.fault == "rows":
            return sums.reshape(u.shape)
        if self.fault == "channels":
            flat = flat + 1e-3 * flat.sum(axis=1, keepdims=True)
            sums = self.k @ (self.domain.weights[:, None] * (flat - flat.mean(axis=1, keepdims=True)))
        result = sums / (self.k @ self.domain.weights)[:, None]
        if self.fault == "place":
            u *= 1.5
        return result.astype(np.float64 if self.fault == "dtype" else u.dtype).reshape(u.shape)

    def _log_degree(self) -> Any:
        logs = np.log(self.k @ self.domain.weights)
        return logs + np.arange(24.0) / 9 if self.fault == "degree" else logs


@pytest.mark.parametrize("fault", ["shape", "rows", "channels", "degree", "place", "dtype"])
def test_affinities_with_faults_are_found(fault: str) -> None:
    check_affinity(Sums())
    with pytest.raises(ContractError, match="affinity"):
        check_affinity(Sums(fault))


class Halved(SparseAffinity):
    """A graph whose K has half of the last row."""

    def _symmetrized(self) -> Affinity:
        edges = (self._graph + self._graph.T).toarray()
        edges[-1] /= 2
        result = super()._symmetrized()
        result._take(csr_array(edges))
        return result


@pytest.mark.parametrize("loop", [0, 1])
def test_a_wrong_row_of_a_node_that_sees_nobody_is_found(loop: int) -> None:
    edges = csr_array(np.diag(np.ones(4), 1) + loop * LOOP)
    with pytest.raises(ContractError, match=r"symmetrized\(\) (has|averages with) .*k \+ k\^T"):
        check_affinity(Halved(nl.Points(np.arange(5.0)), edges, symmetric=False))


@pytest.mark.parametrize("enter", [nl.J, nl.AttentionFlow, nl.MarkovChain], ids=lambda one: one.__name__)
def test_affinities_with_faults_are_refused_where_they_enter(enter: Any) -> None:
    enter(Sums())
    for fault, message in (
        ("shape", "has shape"),
        ("rows", "averages a signal of ones"),
        ("degree", "says that it is"),
    ):
        with pytest.raises(nl.InputError, match=rf"affinity: .*Sums .*{message}|of Sums has shape"):
            enter(Sums(fault))


def test_kernels_with_faults_are_found() -> None:
    with pytest.raises(ContractError, match=r"kernel Lopsided: symmetric: k\(x, y\) = k\(y, x\)"):
        check_kernel(Lopsided())
    with pytest.raises(nl.InputError, match="dimensions: got 0, expected an integer >= 1"):
        check_kernel(nl.Gaussian(1.0), dimensions=0)
    check_kernel(nl.Gaussian(1.0), dimensions=np.array(2))
    with pytest.raises(ContractError, match="kernel Window: positive semidefinite: got an eigenvalue"):
        check_kernel(Window())


class Weights(Fidelity):
    """A number for each node, with every abstract method of the contract and nothing else."""

    def __init__(self, numbers: Any, fault: str = "") -> None:
        self.numbers, self.fault = np.asarray(numbers, dtype=float), fault

    def _for(self, v: Any) -> Any:
        numbers = self.numbers if v.ndim == self.numbers.ndim else self.numbers[..., None]
        return numbers.astype(v.dtype)

    def times(self, v: Any) -> Any:
        return self._for(v) * v

    def damped(self, v: Any, step: float) -> Any:
        return v / (1 + (0.5 if self.fault == "damped" else 1.0) * v.dtype.type(step) * self._for(v))

    def bounds(self) -> tuple[float, float]:
        return float(self.numbers.min()), float(self.numbers.max()) * (2 if self.fault == "bounds" else 1)

    def scaled(self, factor: Any) -> Weights:
        return self if self.fault == "scaled" else Weights(factor * self.numbers, self.fault)

    def over_degree(self, log_degree: Any, like: Any) -> Weights:
        return Weights(self.numbers * np.exp((1 if self.fault == "degree" else -1) * log_degree), self.fault)

    def centre(self, f: Any, measure: Any, axes: tuple[int, ...]) -> Any:
        mass = measure * self._for(f) if self.fault != "centre" else measure
        return (mass * f).sum(axis=axes, keepdims=True) / (mass + 0 * f).sum(axis=axes, keepdims=True)


@pytest.mark.parametrize("fault", ["damped", "bounds", "scaled", "degree", "centre"])
def test_fidelities_with_faults_are_found(fault: str) -> None:
    numbers = np.linspace(0.1, 2, 6)
    check_fidelity(Weights(numbers), (6,))
    with pytest.raises(ContractError, match=r"fidelity Weights: .*expected"):
        check_fidelity(Weights(numbers, fault), (6,))


@pytest.mark.parametrize(
    ("nodes", "channels", "message"),
    [
        (6, None, "nodes: got 6, expected a shape"),
        ((), None, "nodes: got"),
        ((0,), None, "nodes: got 0, expected an integer >= 1"),
        ((5,), None, r"nodes: got \(5,\), expected \(6,\)"),
        ((2, 3), None, r"nodes: got \(2, 3\), expected \(6,\)"),
        ((6,), 0, "channels: got 0, expected an integer >= 1"),
    ],
)
def test_nodes_of_a_fidelity_are_a_shape(nodes: Any, channels: Any, message: str) -> None:
    with pytest.raises(nl.InputError, match=message):
        check_fidelity(NodeFidelity(np.linspace(0, 2, 6)), nodes, channels)


@pytest.mark.numerical
def test_a_fidelity_with_the_abstract_methods_alone_is_taken_everywhere(tmp_path: Any) -> None:
    numbers = np.linspace(0.1, 2, 24)
    own, plain = (
        nl.GradientFlow(nl.E(DENSE, F, one, measure="degree"), "degree") for one in (Weights(numbers), numbers)
    )
    assert np.abs(own.functional.minimizer().u - plain.functional.minimizer().u).max() < 1e-8
    assert np.abs(nl.equilibrium(own).u - nl.equilibrium(plain).u).max() < 1e-8
    assert np.array_equal(own.functional.fidelity, numbers)
    path = tmp_path / "own.npz"
    nl.solve(own, t=1.0, integrator=nl.IMEX(0.1), trackers=[nl.Checkpoint(path, seconds=0)])
    other = nl.GradientFlow(nl.E(DENSE, F, Weights(numbers + 1e-15), measure="degree"), "degree")
    with pytest.raises(nl.FileFormatError, match="another problem"):
        nl.solve(other, t=1.0, integrator=nl.IMEX(0.1), resume=path)
    with pytest.raises(nl.InputError, match="one number for all"):
        nl.diversity_bounds(own)


class Stage(FixedStep):
    """Runge-Kutta method of order 2 or 4 of a user, with faults."""

    order = 2.0
    takes_time = True
    takes_constraint = True

    def __init__(self, dt: float = 0.1, fault: str = "") -> None:
        super().__init__(dt)
        self.fault = fault

    def stability_limit(self, flow: Any) -> float:
        return nl.ExplicitEuler(self.dt).stability_limit(flow) * (1.16 if self.fault == "limit" else 1.0)

    def step(self, flow: Any, u: Any, dt: float) -> Any:
        first = flow.velocity(u)
        now = flow if self.fault == "time" else flow.when(flow.time + dt / 2)
        share = 0.4 if self.fault == "order" else 0.5
        middle = u + share * dt * first
        result = u + dt * now.velocity(middle if self.fault == "held" else now.held(middle))
        if self.fault == "rest":
            result = result * (1 + 1e-5)
        if self.fault == "place":
            u += 1e-3
        return result.astype(np.float64) if self.fault == "dtype" else result


class Remembers(Stage):
    """Keeps what it needs on itself."""

    def step(self, flow: Any, u: Any, dt: float) -> Any:
        last = vars(self).get("_last", 0 * u)
        self._last = flow.velocity(u)
        return super().step(flow, u, dt) + 1e-6 * last


@pytest.mark.numerical
@pytest.mark.parametrize(
    ("fault", "promise"),
    [
        ("limit", "steps within stability_limit"),
        ("time", "order 2 with a source that changes"),
        ("order", "order 2 of a linear flow"),
        ("rest", "a signal at rest stays at rest"),
        ("place", "changed in place"),
        ("dtype", "float32"),
    ],
)
def test_integrators_with_faults_are_found(fault: str, promise: str) -> None:
    with pytest.raises(ContractError, match=rf"integrator Stage: .*{promise}"):
        check_integrator(Stage(0.1, fault))


@pytest.mark.numerical
class Noisy(nl.flows.EulerMaruyama):
    """Steps of Euler and Maruyama with a fault in the noise."""

    def __init__(self, dt: float, fault: str) -> None:
        super().__init__(dt)
        self.fault = fault

    def noisy(self, flow: Any, u: Any, dt: float, white: Any, noise: Any) -> Any:
        if self.fault == "its own":
            white = dt**0.5 * np.random.default_rng().standard_normal(u.shape) * flow.root_mass(u)[:, None]
        if self.fault == "once":
            white = noise.increments(flow, u, 0, dt)
        if self.fault == "by nodes":
            white = white / flow.root_mass(u)[:, None]
        return super().noisy(flow, u, dt, white, noise)


@pytest.mark.parametrize(
    ("fault", "promise"),
    [
        ("its own", "the same seed gives the same bits"),
        ("once", "another step gives other noise"),
        ("by nodes", "noise has the variance"),
    ],
)
def test_noise_with_faults_is_found(fault: str, promise: str) -> None:
    with pytest.raises(ContractError, match=promise):
        check_integrator(Noisy(0.1, fault))


def test_integrators_without_faults_and_with_a_state_of_their_own() -> None:
    check_integrator(Stage(0.1))
    with pytest.raises(nl.InputError, match="start: got one without a flow"):
        check_integrator(Stage(0.1), start=F)
    with pytest.raises(nl.InputError, match="flow: got J, expected a flow"):
        check_integrator(Stage(0.1), nl.J(DENSE), F)
    with pytest.raises(nl.InputError, match="start: got shape"):
        check_integrator(Stage(0.1), nl.GradientFlow(nl.J(DENSE)), F[:3])
    with pytest.raises(ContractError, match="state is kept in memory alone"):
        check_integrator(Remembers(0.1))


class Conserved(nl.GradientFlow):
    """The flow in the metric of H^-1, du/dt = -L grad E with L = d (I - P)."""

    def velocity(self, u: Any) -> Any:
        return self.diffusion(super().velocity(u))

    def linear(self, v: Any) -> Any:
        return self.diffusion(super().linear(v))

    def spectral_bounds(self) -> tuple[float, float]:
        high = super().spectral_bounds()[1]
        return 0.0, high * self.diffusion_bound()


class Unbounded(Conserved):
    def spectral_bounds(self) -> tuple[float, float]:
        return nl.GradientFlow.spectral_bounds(self)


class Pulled(Conserved):
    """All pieces, one of them wrong."""

    def pulled(self, u: Any) -> Any:
        return super().pulled(u)

    def driven(self, u: Any) -> Any:
        return super().driven(u)


def test_flows_with_faults_are_found() -> None:
    energy = nl.E(DENSE.scaled(0.01), F, 0.5)
    check_flow(Conserved(energy))
    check_flow(nl.GradientFlow(energy), 0 * F)
    with pytest.raises(ContractError, match=r"velocity is made of linear\(\), pulled\(\) and driven\(\)"):
        check_flow(Pulled(energy))
    with pytest.raises(ContractError, match=r"spectral_bounds\(\) hold the eigenvalues"):
        check_flow(Unbounded(nl.E(DENSE, F, 0.5)))

    class Rising(nl.GradientFlow):
        def velocity(self, u: Any) -> Any:
            return -super().velocity(u)

    with pytest.raises(ContractError, match="the energy falls along the velocity"):
        check_flow(Rising(energy))


# --- one right-hand side for all integrators -------------------------------------------------------------------------

GRID = nl.Grid(24, spacing=1 / 24, boundary="periodic")
WAVE = np.sin(2 * np.pi * GRID.nodes[:, 0])
LUMP = 0.1 * np.random.default_rng(0).standard_normal(24)


def _energy(method: str = "convolution") -> tuple[nl.E, Any]:
    """Return E on a periodic grid, and L = d (I - P) as a matrix."""
    affinity = nl.affinity(nl.Gaussian(width=0.08), GRID, method=method)
    affinity = affinity.scaled(float(1 / (2 * affinity.degree.max())))
    both = affinity.symmetrized()
    laplacian = both.degree.ravel()[:, None] * (np.eye(24) - np.array([both.average(row) for row in np.eye(24)]).T)
    return nl.E(affinity, WAVE, 0.5), laplacian


class Whole(Conserved):
    """With the two other pieces said as well."""

    def pulled(self, u: Any) -> Any:
        return self.diffusion(nl.GradientFlow.pulled(self, u))

    def driven(self, u: Any) -> Any:
        return self.diffusion(nl.GradientFlow.driven(self, u))


@pytest.mark.slow
@pytest.mark.numerical
@pytest.mark.parametrize("cls", [Conserved, Whole])
@pytest.mark.parametrize("reaction", [None, nl.AllenCahn(2.0, interval=(-1.5, 1.5))], ids=["E", "AllenCahn"])
def test_an_operator_of_ones_own_is_the_same_to_every_integrator(cls: Any, reaction: Any) -> None:
    from scipy.integrate import solve_ivp

    energy, laplacian = _energy("dense")

    def velocity(t: float, u: Any) -> Any:
        drive = 0 if reaction is None else 2 * (u - u**3)
        return -laplacian @ (laplacian @ u + 0.5 * (u - WAVE) - drive)

    expected = solve_ivp(velocity, (0, 1), LUMP, method="DOP853", rtol=1e-11, atol=1e-13).y[:, -1]
    bounds = {
        nl.RungeKutta(1e-9, 1e-11): 1e-8,
        nl.ETD4RK(0.05): 1e-6,
        nl.IMEX(0.01): 1e-4,
        nl.ExplicitEuler(1e-3): 1e-3,
    }
    if reaction is None:
        bounds |= {nl.Exponential(): 1e-10, nl.ConvexSplitting(0.01): 1e-2}
    for integrator, bound in bounds.items():
        found = nl.solve(cls(energy, reaction=reaction), LUMP, t=1.0, integrator=integrator)
        assert np.abs(found.final - expected).max() < bound, integrator


@pytest.mark.numerical
def test_limits_of_an_operator_of_ones_own() -> None:
    energy, laplacian = _energy()
    exact = 2 / np.linalg.eigvals(laplacian @ (laplacian + 0.5 * np.eye(24))).real.max()
    for cls in (Conserved, Whole):
        flow = cls(energy)
        assert nl.ExplicitEuler(1.0).stability_limit(flow) == pytest.approx(exact, rel=1e-9)
        with pytest.raises(nl.StabilityError, match="explicit Euler needs dt <"):
            nl.solve(flow, LUMP, t=9.0, integrator=nl.ExplicitEuler(1.1 * exact))
    assert np.isnan(nl.ExplicitEuler(1.0).stability_limit(Conserved(energy, reaction=nl.AllenCahn())))


@pytest.mark.numerical
def test_a_spectrum_that_is_known_is_not_that_of_an_overridden_diffusion() -> None:
    class Faster(nl.GradientFlow):
        def diffusion(self, v: Any) -> Any:
            return 3 * super().diffusion(v)

    energy = _energy()[0]
    limits = [nl.SemiImplicit(1.0).stability_limit(cls(nl.J(energy.given))) for cls in (nl.GradientFlow, Faster)]
    assert limits[1] == pytest.approx(limits[0] / 3, rel=1e-9)


def test_pieces_that_do_not_belong_together_are_refused() -> None:
    energy = _energy()[0]
    with pytest.raises(nl.InputError, match=r"override velocity\(\) and linear\(\) together"):
        nl.solve(Pulled(energy), LUMP, t=1.0, integrator=nl.ETD4RK(0.05))
    for integrator in (nl.Exponential(), nl.ETD2RK(0.05)):
        with pytest.raises(nl.InputError, match=r"Unbounded whose spectral_bounds\(\) are"):
            nl.solve(Unbounded(nl.E(energy.given.scaled(4.0), WAVE, 0.5)), LUMP, t=1.0, integrator=integrator)


# --- limits of steps, and energies that rise -------------------------------------------------------------------------


class Turning(nl.GradientFlow):
    def velocity(self, u: Any) -> Any:
        return super().velocity(u) + 5 * np.stack([-u[..., 1], u[..., 0]], axis=-1)


def test_no_limit_is_told_where_slopes_are_complex() -> None:
    flow = Turning(nl.J(DENSE), "degree")
    for integrator in (nl.ExplicitEuler(0.1), nl.RungeKutta(dt=0.1, adaptive=False)):
        assert np.isnan(integrator.stability_limit(flow))
    mixing = nl.Reaction(lambda u: np.roll(u, 1, axis=-1) if u.ndim > 1 else u, (-2, 2), bound=1.0, name="mixing")
    with pytest.raises(nl.InputError, match=r"mixing.* is not element by element"):
        nl.solve(nl.GradientFlow(nl.J(DENSE), "degree", reaction=mixing), X.clip(-2, 2), t=1.0)


class Classical(FixedStep):
    """The classical Runge-Kutta method of order 4."""

    order = 4.0

    def stability_limit(self, flow: Any) -> float:
        return 2.785 / 2 * nl.ExplicitEuler(self.dt).stability_limit(flow)

    def step(self, flow: Any, u: Any, dt: float) -> Any:
        a = flow.velocity(u)
        b = flow.velocity(u + dt / 2 * a)
        c = flow.velocity(u + dt / 2 * b)
        return u + dt / 6 * (a + 2 * b + 2 * c + flow.velocity(u + dt * c))


class Careless(Classical):
    def stability_limit(self, flow: Any) -> float:
        return np.inf


class Own(Integrator):
    """A method that chooses its steps, all of them too long."""

    order = 1.0

    def stability_limit(self, flow: Any) -> float:
        return nl.ExplicitEuler(1.0).stability_limit(flow)

    def advance(self, flow: Any, u: Any, t: float, target: float, memory: Any) -> Any:
        return u + 40 * flow.velocity(u), t + 40


@pytest.mark.numerical
def test_methods_are_held_to_their_limit() -> None:
    flow = nl.GradientFlow(nl.J(DENSE), metric="degree")
    limit = Classical(1.0).stability_limit(flow)
    with pytest.raises(nl.StabilityError, match=rf"^dt: got 40, .*Classical needs dt < {limit:.6g}; reduce dt"):
        nl.solve(flow, F, t=400.0, integrator=Classical(40.0))
    assert nl.solve(flow, F, t=50 * limit, integrator=Classical(0.99 * limit)).success
    found = nl.solve(flow, F, t=400.0, integrator=Own())
    assert (found.status, found.success) == (nl.Status.STEP_FAILED, False)
    assert "took a step of 40, above the limit of stable ones that it declares" in found.message


class Growing(nl.GradientFlow):
    """du/dt = -(A - c) u: constants grow at the rate c."""

    def linear(self, u: Any) -> Any:
        return super().linear(u) - 0.1 * u

    def velocity(self, u: Any) -> Any:
        return -self.linear(u)

    def spectral_bounds(self) -> tuple[float, float]:
        low, high = super().spectral_bounds()
        return low - 0.1, high


@pytest.mark.numerical
@pytest.mark.parametrize(
    ("integrator", "tolerance"),
    [
        (nl.Exponential(), 1e-10), (nl.ETD4RK(0.1), 1e-10), (nl.RungeKutta(), 1e-5),
        (nl.RungeKutta(dt=0.1, adaptive=False), 1e-5), (nl.ExplicitEuler(0.01), 1e-1),
    ],
    ids=repr,
)  # fmt: skip
def test_what_grows_of_itself_is_followed(integrator: Any, tolerance: float) -> None:
    flow = Growing(nl.J(DENSE), "degree")
    exact = scipy.linalg.expm(-20.0 * dense_operator(flow)) @ F
    found = nl.solve(flow, F, t=20.0, integrator=integrator)
    assert found.success
    np.testing.assert_allclose(found.final, exact, rtol=0, atol=tolerance * np.abs(exact).max())


@pytest.mark.numerical
def test_eigenvalues_that_are_nearly_alike_are_no_obstacle() -> None:
    """Those of I - P - 0.1 of a narrow kernel crowd at 0.9."""
    points = np.random.default_rng(1).random((420, 2))
    flow = Growing(nl.J(nl.affinity(nl.Gaussian(width=0.1), nl.Points(points))), "degree")
    assert nl.ExplicitEuler(0.1).stability_limit(flow) == pytest.approx(2 / 0.9, rel=2e-3)
    assert nl.solve(flow, points[:, 0], t=1.0).success


def test_a_layer_that_overshoots_is_refused() -> None:
    class Mirrored(nl.AttentionFlow):
        def average(self, u: Any) -> Any:
            return -2.0 * super().average(u)

    with pytest.raises(nl.StabilityError, match="makes the NeuTRENO step unstable"):
        nl.solve(Mirrored(DENSE, F, 0.5), F, t=10.0, integrator=nl.NeutrenoStep())

    class Overshooting(nl.GradientFlow):
        def average(self, u: Any) -> Any:
            return -2.0 * super().average(u)

    with pytest.raises(nl.StabilityError, match="flow: the longest stable step"):
        nl.solve(Overshooting(nl.J(DENSE), "degree"), F, t=10.0, integrator=nl.AttentionStep())


@pytest.mark.numerical
def test_energies_that_no_float_holds_do_not_rise() -> None:
    found = nl.solve(nl.GradientFlow(nl.J(DENSE)), 1e200 * F, t_eval=[0.0, 1.0, 2.0])
    assert found.success
    assert np.isinf(found.energy).all()


@pytest.mark.numerical
@pytest.mark.parametrize("outputs", [{"t": 4000.0}, {"t_eval": [0.0, 80.0, 160.0]}], ids=["end", "outputs"])
def test_an_energy_that_rises_without_reason_ends_the_run(outputs: Any) -> None:
    flow = nl.GradientFlow(nl.E(DENSE, F, 0.4, measure="degree"), metric="degree")
    found = nl.solve(flow, **outputs, integrator=Careless(4.0), start=F[::-1].copy())
    assert (found.status, found.success) == (nl.Status.DIVERGED, False)
    assert "the energy rose from" in found.message
    assert "smaller dt" in found.message
    assert found.stats["steps"] <= 20
    rest = flow.functional.minimizer().u
    assert nl.solve(flow, rest, t_eval=np.arange(9.0), integrator=nl.RungeKutta(1e-3)).success


def test_every_step_has_its_time() -> None:
    seen = []

    class Told(Classical):
        def step(self, flow: Any, u: Any, dt: float) -> Any:
            seen.append((flow.time, flow.when(flow.time + dt / 2).time))
            return super().step(flow, u, dt)

    nl.solve(nl.GradientFlow(nl.J(DENSE)), F, t=0.5, integrator=Told(0.125))
    assert seen == [(0.0, 0.0625), (0.125, 0.1875), (0.25, 0.3125), (0.375, 0.4375)]


def test_a_first_step_is_shortened_to_the_limit() -> None:
    flow = nl.GradientFlow(nl.J(DENSE), "degree", reaction=nl.AllenCahn(1.0, interval=(-5, 5)))
    assert nl.ETD4RK(0.1).stability_limit(flow) < 0.1
    assert nl.solve(flow, F, t=1.0, integrator=nl.Adaptive(nl.ETD4RK(0.1))).success


@pytest.mark.parametrize("integrator", [nl.RungeKutta(), nl.ETD4RK(0.1), nl.Adaptive(nl.ETD2RK(0.1))], ids=str)
def test_a_source_that_is_no_number_is_named_at_once(integrator: Any) -> None:
    flow = nl.GradientFlow(nl.J(DENSE), source=lambda t: F * (np.nan if t > 0.3 else 0.0))
    found = nl.solve(flow, F, t=1.0, integrator=integrator)
    assert found.status is nl.Status.STEP_FAILED
    assert found.message.startswith("source: NaN or infinite at t=0.")
    assert found.stats["rejected"] < 5


def test_a_speed_at_rest_is_within_its_own_threshold() -> None:
    """Whatever the product of the tolerance and of what was divided by it is rounded to."""
    for speed in np.random.default_rng(0).uniform(1e-16, 1e-15, 300):
        at_rest: Any = types.SimpleNamespace(
            speed=lambda u, speed=speed: float(speed), tension=lambda u: 1.0, velocity=lambda u: 0 * u
        )
        tracker = nl.SteadyState()
        tracker.start(at_rest, F, 0.0, 1.0)
        assert tracker.look(at_rest, F, 0.0)


@pytest.mark.numerical
def test_a_start_at_rest_ends_at_once() -> None:
    flow = nl.GradientFlow(nl.E(DENSE, F, 0.5, measure="degree"), "degree")
    for start in (flow.functional.minimizer().u, nl.solve(flow, t=200.0).final):
        found = nl.solve(flow, start, t=50.0, integrator=nl.RungeKutta(), trackers=[nl.SteadyState()])
        assert found.status is nl.Status.STOPPED
        assert found.t[-1] == 0
    moved = nl.solve(flow, F, t=500.0, integrator=nl.RungeKutta(), trackers=[nl.SteadyState()])
    assert 5 < moved.t[-1] < 500


def test_signals_that_are_given_are_copied_and_keep_their_kind() -> None:
    f = F.copy()
    functional = nl.E(DENSE, np.zeros(24), 1.0).with_observed(f)
    attention, forced = nl.AttentionFlow(DENSE, f, 0.5), nl.GradientFlow(nl.J(DENSE), source=f)
    before = forced.velocity(F)
    f[:] = 99
    assert np.array_equal(functional.observed, F)
    assert np.array_equal(attention.observed, F)
    assert np.array_equal(forced.velocity(F), before)
    with pytest.raises(nl.InputError, match="observed: got ndarray of float32, expected ndarray of float64"):
        functional.with_observed(np.zeros(24, np.float32))


def test_checkpoints_tell_subclasses_apart() -> None:
    energy = nl.E(DENSE, F, 0.5)
    assert repr(Conserved(energy)).startswith("Conserved(E, ")
    assert nl.Anisotropic(nl.Gaussian(1.0), (1.0, 2.0)) == nl.Anisotropic(nl.Gaussian(1.0), (1.0, 2.0))
    assert nl.Anisotropic(nl.Gaussian(1.0), (1.0, 2.0)) != nl.Anisotropic(nl.Gaussian(1.0), (1.0, 2.0 + 1e-15))


def test_scalings_that_overflow_are_told_at_once() -> None:
    rng = np.random.default_rng(0)
    x, y = (nl.on_sphere(rng.normal(size=(40, 3))) for _ in range(2))
    with pytest.raises(nl.NumericalError, match=r"sinkhorn: sums of columns underflow after .* iterations"):
        nl.sinkhorn(nl.ExpDotProduct(scale=1e4), nl.Points(np.arange(40.0)), x, queries=y)


def test_the_remedy_for_too_many_points_is_one_for_points() -> None:
    with pytest.raises(nl.MemoryLimitError, match="use method='pairwise'"):
        nl.affinity(nl.Gaussian(1.0), nl.Points(np.zeros((200_000, 2))), method="dense")
