"""What holds for every flow, whatever the nodes, kernels, signals and steps: invariants drawn at random.

Tolerances follow from rounding. One average of n values errs by at most n eps times the largest of them, a step by a
little more, and none of these flows enlarges in the maximum norm what an earlier step has lost. What an integrator is
allowed beyond that (the bound of the exponential, the tolerance of the adaptive pair) is added.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

import nlflow as nl
from nlflow.flows.flow import Flow
from nlflow.flows.integrators import Integrator
from tests.problems import Floats

EPS = float(np.finfo(float).eps)
METRICS = st.sampled_from(["l2", "degree"])
FRACTION = st.floats(0.05, 1.0)
STEPPERS = ["ExplicitEuler", "SemiImplicit", "layer", "RungeKutta", "adaptive", "Exponential"]


# --- what is drawn ---------------------------------------------------------------------------------------------------


def values(low: float, high: float) -> st.SearchStrategy[float]:
    return st.floats(low, high, allow_subnormal=False)


@st.composite
def scattered(draw: st.DrawFn) -> nl.Affinity:
    """A symmetric affinity on scattered points: of positions, of features, or given as a matrix."""
    n = draw(st.integers(2, 9))
    points = nl.Points(
        draw(arrays(float, (n, 2), elements=values(-2, 2))), draw(arrays(float, n, elements=values(0.05, 2)))
    )
    kind = draw(st.sampled_from(["Gaussian", "Laplace", "TopHat", "ExpDotProduct", "features", "matrix"]))
    width, amplitude = draw(values(0.2, 3)), draw(values(0.1, 2))
    features = draw(arrays(float, (n, 2), elements=values(-2, 2)))
    if kind == "matrix":
        k = draw(arrays(float, (n, n), elements=values(0, 1)))
        return nl.from_matrix(k + k.T + 0.1 * np.eye(n), points)
    if kind == "ExpDotProduct":
        return nl.affinity(nl.ExpDotProduct(scale=draw(values(-1, 1)), amplitude=amplitude), points, features)
    kernel = {
        "Laplace": nl.Laplace(width, amplitude=amplitude), "TopHat": nl.TopHat(width, amplitude=amplitude),
    }.get(kind, nl.Gaussian(width, amplitude=amplitude))  # fmt: skip
    return nl.affinity(kernel, points, features if kind == "features" else None)


@st.composite
def gridded(draw: st.DrawFn) -> nl.Affinity:
    """A position kernel on a grid, in any of its forms."""
    shape = draw(st.sampled_from([(2,), (7,), (12,), (3, 4), (1, 5)]))
    grid = nl.Grid(
        shape, spacing=draw(values(0.2, 2)), boundary=draw(st.sampled_from(["periodic", "reflect", "isolated"]))
    )
    width = draw(values(0.2, 3))
    kernel = draw(st.sampled_from([nl.Gaussian(width), nl.Laplace(width), nl.TopHat(width)]))
    return nl.affinity(kernel, grid, method=draw(st.sampled_from(["auto", "dense", "stencil", "convolution"])))


AFFINITIES = st.one_of(scattered(), gridded())


@dataclass(frozen=True)
class Case:
    """A flow, a start and an observed signal, with what tolerances are made of."""

    flow: Flow
    start: Floats
    observed: Floats

    @property
    def nodes(self) -> int:
        return self.flow.affinity.domain.size

    @property
    def axes(self) -> tuple[int, ...]:
        return tuple(range(len(self.flow.affinity.domain.shape)))

    @property
    def scale(self) -> float:
        """Largest modulus of any value."""
        return float(max(np.abs(self.start).max(), np.abs(self.observed).max()))

    def error(self, solution: nl.Solution, integrator: Integrator) -> float:
        """Return what a value at the end may differ by from the exact result of the steps taken."""
        stages = 6 if isinstance(integrator, nl.RungeKutta) else 1
        averages = 1 + stages * (solution.stats["steps"] + solution.stats["rejected"])
        if isinstance(integrator, nl.Exponential):
            averages += solution.stats["applications"]
        allowed = 8 * EPS * (self.nodes + 8) * averages * self.scale
        if isinstance(integrator, nl.Exponential):
            measure = self.flow.measure(self.start)
            allowed += solution.stats.get("error_bound", 0.0) * self.scale / np.sqrt(measure.min() / measure.sum())
        if isinstance(integrator, nl.RungeKutta) and integrator.adaptive:
            # The root mean square of the local error over (atol + rtol |u|) is at most 1 in each step.
            local = integrator.atol + integrator.rtol * self.scale
            allowed += solution.stats["steps"] * np.sqrt(self.start.size) * local
        return float(allowed)


@st.composite
def cases(draw: st.DrawFn, affinities: Any = AFFINITIES, *, fidelity: bool | None = None, own: bool = False) -> Case:
    """Draw a J-flow, or an E-flow with `fidelity`; with `own` one number in the flow's own measure."""
    affinity, metric = draw(affinities), draw(METRICS)
    channels = draw(st.sampled_from([(), (1,), (2,)]))
    shape = (*affinity.domain.shape, *channels)
    start, observed = (draw(arrays(float, shape, elements=values(-100, 100))) for _ in range(2))
    with_fidelity = draw(st.booleans()) if fidelity is None else fidelity
    if not with_fidelity:
        return Case(nl.GradientFlow(nl.J(affinity), metric), start, start)
    strength: Any = draw(values(0, 3))
    if not own and draw(st.booleans()):
        strength = draw(arrays(float, affinity.domain.shape, elements=values(0, 3)))
    measure = metric if own else draw(METRICS)
    return Case(nl.GradientFlow(nl.E(affinity, observed, strength, measure=measure), metric), start, observed)


def rate(flow: Flow) -> float:
    return float(flow.affinity.degree.max()) if flow.metric == "l2" else 1.0


def strongest(flow: Flow) -> float:
    return 0.0 if flow.fidelity is None else flow.fidelity.bounds()[1]


def run(
    case: Case, stepper: str, fraction: float, *, convex: bool = False, **options: Any
) -> tuple[nl.Solution, Integrator]:
    """Integrate a few steps of a fraction of the longest that is stable, or a convex average with `convex`."""
    flow, steps = case.flow, 5
    reach = 10 * fraction / flow.spectral_bounds()[1]
    if stepper == "Exponential":
        integrator: Integrator = nl.Exponential()
    elif stepper == "adaptive":
        integrator = nl.RungeKutta(1e-8, 1e-10)
    elif stepper == "RungeKutta":
        integrator = nl.RungeKutta(dt=reach / 5, adaptive=False)
    elif stepper == "layer":
        assume(flow.metric == "degree")
        if flow.fidelity is None:
            integrator = nl.AttentionStep()
        else:
            integrator = nl.NeutrenoStep()
            eye = np.eye(case.nodes).reshape(*flow.affinity.domain.shape, case.nodes)
            self_weight = np.diag(flow.affinity.average(eye).reshape(case.nodes, case.nodes)).min()
            # u <- Pu + lambda~ (f - u) is a convex average for lambda~ up to the weight that a node gives itself.
            assume(strongest(flow) <= self_weight if convex else integrator.stability_limit(flow) > 1)
        reach = steps
    else:
        kind = getattr(nl, stepper)
        longest = kind(1.0).stability_limit(flow)
        if convex:
            longest = 1 / (rate(flow) + (strongest(flow) if stepper == "ExplicitEuler" else 0.0))
        dt = min(
            fraction * longest * (1 - 1e-12), 10 / flow.spectral_bounds()[1] * (1 if stepper == "ExplicitEuler" else 10)
        )
        integrator, reach = kind(dt), steps * dt
    times = {"t_eval": np.linspace(0, 1, 4) * reach} if stepper in ("Exponential", "adaptive") else {"t": reach}
    return nl.solve(flow, case.start, integrator=integrator, **times, **options), integrator


# --- invariants ------------------------------------------------------------------------------------------------------


@given(cases(), st.sampled_from(STEPPERS), FRACTION)
def test_maximum_principle(case: Case, stepper: str, fraction: float) -> None:
    """The J-flow stays in the range of u(0), channel by channel; the E-flow in the hull of u(0) and f."""
    assume(stepper != "RungeKutta")  # of order 5: no convex average, so only its tolerance holds it
    solution, integrator = run(case, stepper, fraction, convex=True)
    both = np.stack([case.start, case.observed])
    low, high = both.min(axis=(0, *(a + 1 for a in case.axes))), both.max(axis=(0, *(a + 1 for a in case.axes)))
    error = case.error(solution, integrator)
    assert np.all(solution.u >= low - error)
    assert np.all(solution.u <= high + error)


@given(cases(fidelity=False), st.sampled_from(STEPPERS), FRACTION)
def test_j_flow_conserves_the_mean_of_its_metric(case: Case, stepper: str, fraction: float) -> None:
    solution, integrator = run(case, stepper, fraction)
    mean = case.flow.mean(case.start)
    for u in solution.u:
        np.testing.assert_allclose(case.flow.mean(u), mean, rtol=0, atol=case.error(solution, integrator))


@given(cases(fidelity=True, own=True), st.sampled_from(STEPPERS), FRACTION)
def test_e_flow_from_the_observed_signal_keeps_its_mean(case: Case, stepper: str, fraction: float) -> None:
    case = Case(case.flow, case.observed, case.observed)
    solution, integrator = run(case, stepper, fraction)
    np.testing.assert_allclose(
        case.flow.mean(solution.final), case.flow.mean(case.observed), rtol=0, atol=case.error(solution, integrator)
    )


@given(cases(), st.sampled_from(STEPPERS), FRACTION)
def test_energy_never_rises(case: Case, stepper: str, fraction: float) -> None:
    solution, integrator = run(case, stepper, fraction, trackers=[nl.Energy()])
    energies = solution.records["energy"]["value"]
    affinity, functional = case.flow.affinity, case.flow.functional
    weights = affinity.domain.weights
    strength = 0.0 if case.flow.fidelity is None else np.max(functional.fidelity)
    mass = (weights * affinity.degree).sum()
    if strength and functional.measure == "l2":
        mass += strength * weights.sum()
    elif strength:
        mass += strength * mass
    # E is a sum of products of differences of size 2 scale, of which each is off by the error of a value.
    allowed = 8 * mass * case.start.size / case.nodes * case.scale * case.error(solution, integrator)
    assert np.all(np.diff(energies) <= allowed)
    assert np.all(energies >= 0)


@given(cases(fidelity=False), values(-100, 100), st.sampled_from(STEPPERS), FRACTION)
def test_constants_do_not_move(case: Case, constant: float, stepper: str, fraction: float) -> None:
    case = Case(case.flow, np.full_like(case.start, constant), np.full_like(case.start, constant))
    solution, integrator = run(case, stepper, fraction)
    np.testing.assert_allclose(solution.final, constant, rtol=0, atol=case.error(solution, integrator) + 1e-300)


@given(cases(), st.floats(0.0, 30.0), st.floats(0.0, 30.0))
def test_semigroup(case: Case, first: float, second: float) -> None:
    """Going on for t_2 from where t_1 led is going t_1 + t_2."""
    unit = 1 / case.flow.spectral_bounds()[1]
    one = nl.solve(case.flow, case.start, t=first * unit, integrator=nl.Exponential())
    two = nl.solve(case.flow, one.final, t=second * unit, integrator=nl.Exponential())
    whole = nl.solve(case.flow, case.start, t=(first + second) * unit, integrator=nl.Exponential())
    error = sum(case.error(s, nl.Exponential()) for s in (one, two, whole))
    np.testing.assert_allclose(two.final, whole.final, rtol=0, atol=error)


# --- equivariances ---------------------------------------------------------------------------------------------------

REPEATABLE = st.sampled_from([s for s in STEPPERS if s != "adaptive"])  # its decisions turn on the last bits


@given(cases(), st.floats(0.1, 10.0), st.booleans(), values(-100, 100), REPEATABLE, FRACTION)
def test_shifts_and_scales_pass_through(
    case: Case, size: float, flip: bool, shift: float, stepper: str, fraction: float
) -> None:
    """The flow of a u + c towards a f + c is a times the flow of u towards f, plus c."""
    factor = -size if flip else size
    solution, integrator = run(case, stepper, fraction)
    flow = case.flow
    moved_to = factor * case.observed + shift
    if flow.fidelity is not None:
        functional = nl.E(flow.functional.given, moved_to, flow.functional.fidelity, measure=flow.functional.measure)
        flow = nl.GradientFlow(functional, flow.metric)
    moved = Case(flow, factor * case.start + shift, moved_to)
    result = nl.solve(flow, moved.start, t=solution.t[-1], integrator=integrator)
    error = moved.error(result, integrator) + size * case.error(solution, integrator) + 8 * EPS * abs(shift)
    np.testing.assert_allclose(result.final, factor * solution.final + shift, rtol=0, atol=error)


@given(cases(scattered(), fidelity=True), st.randoms(use_true_random=False), REPEATABLE, FRACTION)
def test_the_numbering_of_nodes_does_not_matter(case: Case, random: Any, stepper: str, fraction: float) -> None:
    order = list(range(case.nodes))
    random.shuffle(order)
    flow = case.flow
    domain = nl.Points(flow.affinity.domain.nodes[order], flow.affinity.domain.weights[order])
    # K = d P / w holds what the kernel was, in any numbering.
    k = np.exp(flow.functional.given.log_degree)[:, None] * flow.functional.given.matrix / flow.affinity.domain.weights
    k = (k + k.T) / 2
    strength = flow.functional.fidelity
    strengths = strength[order] if isinstance(strength, np.ndarray) else strength

    def built(matrix: Floats, where: nl.Points, observed: Floats, given: Any) -> Flow:
        functional = nl.E(nl.from_matrix(matrix, where), observed, given, measure=flow.functional.measure)
        return nl.GradientFlow(functional, flow.metric)

    plain = Case(built(k, flow.affinity.domain, case.observed, strength), case.start, case.observed)
    mixed = Case(
        built(k[np.ix_(order, order)], domain, case.observed[order], strengths), case.start[order], case.observed[order]
    )
    solution, integrator = run(plain, stepper, fraction)
    result = nl.solve(mixed.flow, mixed.start, t=solution.t[-1], integrator=integrator)
    error = plain.error(solution, integrator) + mixed.error(result, integrator)
    np.testing.assert_allclose(result.final, solution.final[order], rtol=0, atol=error)


# --- evolving kernels and layers -------------------------------------------------------------------------------------


@given(
    arrays(float, st.tuples(st.integers(2, 9), st.integers(1, 2)), elements=values(-5, 5)),
    values(0.2, 3),
    METRICS,
    st.sampled_from(["ExplicitEuler", "SemiImplicit", "layer"]),
    st.integers(1, 3),
    FRACTION,
)
def test_the_hull_shrinks_under_an_evolving_kernel(
    u: Floats, width: float, metric: str, stepper: str, every: int, fraction: float
) -> None:
    """No gradient flow of one J, but every step is an average: each channel's range only shrinks."""
    affinity = nl.affinity(nl.Gaussian(width), nl.Points(np.arange(len(u), dtype=float)), u)
    flow = nl.GradientFlow(nl.J(affinity), metric, evolving=True, every=every)
    assume(stepper != "layer" or metric == "degree")
    bound = 2.0 if metric == "l2" else 1.0  # K = 2k <= 2 on weights that sum to 1
    integrator = nl.AttentionStep() if stepper == "layer" else getattr(nl, stepper)(fraction / bound)
    states: list[Floats] = []
    keep = nl.Callback(lambda t, v, now: states.append(v))
    end = 6.0 if stepper == "layer" else 6 * fraction / bound
    nl.solve(flow, u, t=end, integrator=integrator, trackers=[keep], energies=False)
    error = 8 * EPS * (len(u) + 8) * np.abs(u).max() + 1e-300
    assert len(states) == 7
    assert np.all(np.diff([s.max(axis=0) for s in states], axis=0) <= error)
    assert np.all(np.diff([s.min(axis=0) for s in states], axis=0) >= -error)


@given(
    arrays(float, st.tuples(st.integers(2, 9), st.just(2)), elements=values(-3, 3)),
    arrays(float, (2, 2, 3), elements=values(-2, 2)),
    values(0, 5),
)
def test_layers_of_any_attention_stay_in_the_hull(u: Floats, maps: Floats, fidelity: float) -> None:
    """Queries that differ from keys give no gradient flow, yet averages of averages."""
    points = nl.Points(np.arange(len(u), dtype=float))
    affinity = nl.affinity(nl.ExpDotProduct(), points, u @ maps[0], queries=u @ maps[1])
    f = np.roll(u, 1, axis=0)
    error = 8 * EPS * (len(u) + 8) * 5 * np.abs(u).max() + 1e-300
    layers = nl.solve(nl.AttentionFlow(affinity), u, t=5, integrator=nl.AttentionStep()).final
    implicit = nl.solve(nl.AttentionFlow(affinity, f, fidelity), u, t=5, integrator=nl.SemiImplicit(1.0)).final
    for result in (layers, implicit):
        assert np.all(result <= u.max(axis=0) + error)
        assert np.all(result >= u.min(axis=0) - error)
