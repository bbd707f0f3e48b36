"""Linear flows with terms beside A."""

from __future__ import annotations

import copy
import math
from functools import partial
from typing import Any, Self

import numpy as np

from nlflow._array import (
    Array,
    Floats,
    Pending,
    constant_like,
    is_numpy,
    namespace,
    over_channels,
    scalar,
    underflowing,
)
from nlflow._looks import doubt
from nlflow.affinities import Affinity
from nlflow.errors import InputError, NumericalError
from nlflow.flows.flow import Flow
from nlflow.flows.modes import Modes, bases_of
from nlflow.flows.noise import Noise
from nlflow.flows.reactions import Reaction
from nlflow.flows.terms import Source, Terms
from nlflow.functionals.constraint import Constraint, Held
from nlflow.functionals.energies import E, J
from nlflow.functionals.fidelity import Fidelity, NodeFidelity
from nlflow.functionals.metrics import ConservedMetric, Metric

_LOST = 1e-3  # of the size of a signal: what a step may lose to the rounding of a mean that it does not have


def _is_lost(eps: float, moved: Any, size: Any) -> Any:
    return moved * eps > _LOST * size


def _rounded(eps: float, moved: float, size: float) -> str | None:
    """Return what to say of a step whose mean is moved by rounding, where that loses too much of the rest."""
    if not _is_lost(eps, moved, size):
        return None
    return (
        f"rounding of du/dt times the step moves the mean by {moved:.3g}, of a signal of size {size:.3g}, though the "
        "flow conserves it; use a smaller dt, or Exponential()"
    )


@underflowing
class LinearFlow(Flow):
    """Base of linear flows with terms beside A = r (I - P) + phi.

    A subclass of another operator overrides `velocity`, `linear` and `spectral_bounds` together: some integrators are
    made of each.

    Attributes
    ----------
    fidelity : Fidelity or None
    terms : Terms
    rate : array or float
        r of the metric.
    """

    def __init__(
        self,
        affinity: Affinity,
        metric: str | Metric,
        fidelity: Fidelity | None,
        observed: Array | None,
        *,
        evolving: bool,
        every: int,
        terms: Terms | None = None,
    ) -> None:
        super().__init__(affinity, metric, observed, evolving=evolving, every=every)
        self.terms = terms or Terms()
        self._take(affinity, fidelity)

    def _take(self, affinity: Affinity, fidelity: Fidelity | None) -> None:
        self.affinity = affinity
        self.fidelity = fidelity
        self.inner.check(affinity)
        self.symmetric = affinity.symmetric and self.inner.self_adjoint(affinity, fidelity)
        self._pulled: list[tuple[Array, Array]] = []  # one place for the flow at all times
        self._modes: list[Modes | None] = []
        self._even: list[Self] = []
        self._bounds: list[tuple[Array | float, float]] = []
        self.rate: Array | float = self.inner.rate(affinity)

    @property
    def functional(self) -> J | None:
        return None

    def given(self) -> list[Any]:
        # The fidelity as it was given: what the flow makes of it is rounded, by each number of processes differently.
        stated = self.functional if isinstance(self.functional, E) else None
        fidelity = None if self.fidelity is None else self.fidelity.stated(self.observed)
        own = (fidelity, "") if stated is None else (stated.fidelity, stated.measure)
        fixed = None if self.terms.observed is not None else self.observed
        return [own[1], fixed, own[0], *self.terms.given(), *self.inner.given()]

    @property
    def tracked(self) -> bool:
        return super().tracked or self.terms.tracked or (self.fidelity is not None and self.fidelity.tracked)

    @property
    def timed(self) -> bool:
        return self.terms.timed

    def _at_time(self, t: float) -> Self:
        result = super()._at_time(t)
        if self.terms.observed is not None:
            result.observed = self.terms.observed.at(t, self.observed)
        return result

    def moments(self, t: float, like: Array) -> list[Array]:
        return self.terms.moments(t, like)

    def held(self, u: Array) -> Array:
        constraint = self.terms.constraint
        return u if constraint is None else constraint.held(u, self.time)

    def free(self, v: Array) -> Array:
        return v if self.terms.constraint is None else self.terms.constraint.free(v)

    def on_free(self, v: Array) -> Array:
        """Return A v at free nodes, of a signal that is 0 at the others."""
        return self.free(self.linear(v))

    def drawn(self, u: Array) -> Array:
        """Return N(u, t), du/dt + A u at free nodes of a signal that is 0 at the others."""
        if not self.split:
            return self.free(self.velocity(u) + self.linear(u))
        return self.pulled(u) + self.driven(u) if self.terms.drives else self.pulled(u)

    def toward(self, u: Array) -> Array:
        """Return the part of N that implicit steps take at their end."""
        return self.pulled(u) if self.split else 0 * u

    def rest(self, u: Array) -> Array:
        """Return N less `toward`."""
        return self.driven(u) if self.split else self.drawn(u)

    def pulled(self, u: Array) -> Array:
        """Return the part of N that does not depend on u: phi f, and -A of held values."""
        held = self.terms.constraint
        result = 0 * u
        if self.fidelity is not None and self.observed is not None:
            result = self.moved(self.fidelity.times(self.observed))
        return result if held is None else held.free(result - self._boundary(held, u))

    def driven(self, u: Array) -> Array:
        """Return R(u) + g(t) at free nodes."""
        return self.free(self.moved(self._driving(self.held(u)))) if self.terms.drives else 0 * u

    def beside_diffusion(self, u: Array) -> Array | None:
        """Return phi (f - u) + R(u) + g at free nodes, or None where du/dt has other parts beside r (Pu - u)."""
        if not self.split or not self.inner.by_nodes:
            return None
        now, u = self.at(u), self.held(u)
        result = now.driven(u)
        if now.fidelity is not None and now.observed is not None:
            result = result + now.free(now.fidelity.times(now.observed - u))
        return result

    def _driving(self, u: Array) -> Array:
        """Return R(u) + g(t); averages that a reaction sees are counted."""
        self.applications += 0 if self.terms.reaction is None else len(self.terms.reaction.averages)
        return self.terms.driving(self.time, u)

    @property
    def affinities(self) -> list[Affinity]:
        return [self.affinity, *([] if self.terms.reaction is None else self.terms.reaction.averages)]

    def _boundary(self, constraint: Held, u: Array) -> Array:
        """Return A of the values of the constraint, kept while they stay the same."""
        values = constraint.at(self.time, u)
        if not self._pulled or self._pulled[0][0] is not values:
            self._pulled[:] = [(values, self.linear(values))]
        return self._pulled[0][1]

    @property
    def modes(self) -> Modes | None:
        """The modes of A between all nodes that a transform gives, or None."""
        if not self._modes:
            self._modes.append(self._found_modes())
        return self._modes[0]

    def _found_modes(self) -> Modes | None:
        uniform = 0.0 if self.fidelity is None else alike(self.fidelity)
        conserved = self.inner if isinstance(self.inner, ConservedMetric) else None
        known = self.inner.by_nodes or (conserved is not None and conserved.even)
        mobile = self.affinity if conserved is None or conserved.affinity is None else conserved.affinity
        if not (self.plain and known) or uniform is None or (bases := bases_of(self.affinity, mobile)) is None:
            return None
        # Where a transform diagonalizes P all degrees are alike.
        rates = [math.exp(float(one.log_degree.ravel()[0])) for one in (self.affinity, mobile)]
        values = (1.0 if self.inner.normalized else rates[0]) * bases[0].rest + uniform
        if conserved is None:
            return Modes(bases[0], values)
        moving = conserved.factor * rates[1] * bases[1].rest
        return Modes(bases[0], moving * values, moving)

    @property
    def conserves_mean(self) -> bool:
        """Whether `mean` is conserved."""
        if self.inner.conserves:
            return self.affinity.symmetric and self.plain and self.terms.constraint is None
        pulls = self.fidelity is not None and self.observed is not None and self.fidelity.bounds()[1] > 0
        return self.symmetric and self.plain and not (pulls or self.terms.words)

    def average(self, u: Array) -> Array:
        """Return Pu."""
        return self._averaged(self.affinity.check_kind("u", u))

    def _averaged(self, u: Array) -> Array:
        # Beneath `average`: who computes the same Pu in another way is no other flow.
        self.applications += 1
        return self.affinity._average(u)

    def diffusion(self, v: Array) -> Array:
        """Return B r (v - Pv) for the kernel that the flow holds; B = M in the conserved metric, else 1."""
        return self.moved(self._times_rate(v - self.average(v)))

    def moved(self, force: Array) -> Array:
        """Return B force."""
        if self.inner.by_nodes:
            return force
        moved = self.inner.moved(force, lambda v: self._times_rate(v - self.average(v)))
        return self.without_mean(moved) if self.inner.conserves else moved

    def without_mean(self, v: Array) -> Array:
        """Subtract the mean."""
        # Twice: a mean may be so large beside the rest that to subtract it leaves a rounding of its size.
        v = v - self.affinity.mean(v, self.inner.measure)
        return v - self.affinity.mean(v, self.inner.measure)

    def with_mean_of(self, u: Array, v: Array) -> Array:
        """Return `v` with the mean of `u`, where it is conserved."""
        return u + self.kept_mean(u, v - u)

    def kept_mean(self, u: Array, change: Array) -> Array:
        """Return a change of `u` without the mean that rounding gives it, where the mean is conserved.

        Where that loses too much of the rest it raises `NumericalError`; of tensors it is NaN, and leaves a `doubt`.
        """
        if not self.conserves_mean:
            return change
        kept, xp = self.without_mean(change), namespace(u)
        before, given, rest = (one if is_numpy(one) else one.detach() for one in (u, change, kept))
        with np.errstate(over="ignore", invalid="ignore"):
            moved, size = xp.max(xp.abs(given - rest)), xp.max(xp.maximum(xp.abs(before), xp.abs(rest)))
        eps = float(xp.finfo(u.dtype).eps)
        if is_numpy(u):
            if reason := _rounded(eps, scalar(moved), scalar(size)):
                raise NumericalError(reason)
            return kept
        # A device is not asked: the step is not finite then, and who finds that asks why.
        nan = xp.full_like(moved, math.nan)
        moved, size = (xp.astype(one, xp.float64) for one in (moved, size))
        doubt(partial(_rounded, eps), moved, size)
        return xp.where(_is_lost(eps, moved, size), nan, kept)

    def metric_at(self, u: Array) -> Self:
        """Return the flow with its mobility at `u`."""
        if not self.inner.varies:
            return self
        return self.in_metric(self.inner.at(u))

    @property
    def evened(self) -> Self:
        """The flow with the largest mobility everywhere."""
        if not isinstance(self.inner, ConservedMetric) or self.inner.even:
            return self
        if not self._even:
            self._even.append(self.in_metric(self.inner.evened()))
        return self._even[0]

    def in_metric(self, inner: Metric) -> Self:
        """Return the flow in another metric with the same measure."""
        result = copy.copy(self)
        result.inner, result._modes = inner, []
        result.symmetric = self.affinity.symmetric and inner.self_adjoint(self.affinity, self.fidelity)
        return result

    @property
    def unspread(self) -> str | None:
        if self.inner.by_nodes:
            return None
        if self.inner.varies or self.modes is None:
            return "no transform of both operators, expected position kernels on a periodic or reflecting grid"
        return None if self.terms.constraint is None else "a constraint, which does not conserve the mean"

    def spread(self, white: Array) -> Array:
        if self.inner.by_nodes:
            return white
        if self.inner.varies or self.modes is None:
            raise InputError(f"flow: got {self!r}, which has {self.unspread}")
        image = self.modes.root_of_metric(self.modes.forward(white))
        return self.without_mean(self.modes.back(image, white.dtype))

    def force(self, u: Array) -> Array:
        """Return r (Pu - u) + phi (f - u) + R(u) + g, -dE/du in the densities of the measure."""
        now = self.at(self.held(u))
        return now._force(now.held(u))

    def beside(self, u: Array) -> Array:
        """R(u) + g + phi f."""
        result = 0 * u
        if self.fidelity is not None and self.observed is not None:
            result = result + self.fidelity.times(self.observed)
        return result + self._driving(u) if self.terms.drives else result

    def _force(self, u: Array) -> Array:
        result = -self._times_rate(u - self.average(u))
        if self.fidelity is not None and self.observed is not None:
            result = result + self.fidelity.times(self.observed - u)
        return result + self._driving(u) if self.terms.drives else result

    def linear(self, v: Array) -> Array:
        """Return A v = r (v - Pv) + phi v, for the kernel that the flow holds."""
        if self.fidelity is not None and self.moves_whole:
            return self.moved(self._times_rate(v - self.average(v)) + self.fidelity.times(v))
        result = self.diffusion(v)
        return result if self.fidelity is None else result + self.moved(self.fidelity.times(v))

    def velocity(self, u: Array) -> Array:
        u = self.held(u)
        now = self.at(u).metric_at(u)
        if now.moves_whole:
            return now.free(now.moved(now._force(u)))
        result = -now.diffusion(u)
        if now.fidelity is not None and now.observed is not None:
            result = result + now.moved(now.fidelity.times(now.observed - u))
        return now.free(result + now.moved(now._driving(u)) if now.terms.drives else result)

    def jacobian(self, u: Array, v: Array) -> Array:
        """Return the derivative of `velocity` at `u` along `v`, by differences where A and R' do not give it."""
        if (self.evolving and self.every == 1) or self.overridden("linear") or self.inner.varies:
            return super().jacobian(u, v)
        u, v = self.held(u), self.free(v)
        result = -self.linear(v)
        if self.terms.reaction is not None:
            result = result + self.moved(self.terms.reaction.when(self.time).jacobian(u, v))
        return self.free(result)

    def __add__(self, term: Reaction | Source | Constraint | Noise) -> Self:
        """Return a copy of the flow with one more term; reactions and sources add up.

        Raises
        ------
        InputError
            For what is no term, for a second constraint or noise, and for reactions that do not go together.
        """
        if isinstance(term, Noise):
            return super().__add__(term)
        result = copy.copy(self)
        result.terms, result._pulled, result._count = self.terms.joined(term, self.affinity), [], [0]
        return result

    def check_signal(self, name: str, value: Any) -> Array:
        u = self.held(super().check_signal(name, value))
        if self.terms.reaction is not None:
            self.terms.reaction.check_start(name, u)
        if self.terms.drives:
            self.terms.driving(self.time, u)
        return u

    def _times_rate(self, v: Array) -> Array:
        return v if isinstance(self.rate, float) else over_channels(self.rate, v) * v

    def spectral_bounds(self) -> tuple[float, float]:
        """Return bounds of the eigenvalues of A, of moduli where they are complex, at no cost."""
        return self.inner.bounds(self._bound(), (0.0, 0.0) if self.fidelity is None else self.fidelity.bounds())

    @property
    def safe_step(self) -> float:
        """A stable step of explicit Euler without a reaction."""
        high = self.spectral_bounds()[1]
        if self.symmetric or not self.inner.by_nodes:  # products of two that are self-adjoint have real eigenvalues
            return math.inf if high == 0 else 2 / high
        # Without symmetry the eigenvalues of P lie in the unit disk.
        return 2 / (2 + (0.0 if self.fidelity is None else self.fidelity.bounds()[1]))

    def width(self, *, diffusion: bool = False) -> int:
        """Return how many channels the fidelity, or with `diffusion` the kernel, mixes."""
        return 1 if diffusion or self.fidelity is None else self.fidelity.width

    @property
    def mixes(self) -> bool:
        """Whether `diffusion` mixes channels."""
        return False

    @property
    def has_own_bounds(self) -> bool:
        """Whether `spectral_bounds` are those of the operator."""
        return self.plainly_linear or (self.plain and isinstance(self.inner, ConservedMetric))

    def diffusion_bound(self) -> float:
        """Return an upper bound of the spectrum of `diffusion`."""
        return self.inner.diffusion_bound(self._bound())

    def driving_bound(self) -> float:
        """Return a bound of the slope of `driven`, or NaN."""
        bound = self.terms.bound
        return bound if bound == 0 else bound * self.inner.force_bound(self._bound())

    def _bound(self) -> float:
        """Return an upper bound of the spectrum of r (I - P)."""
        if not self._bounds or self._bounds[0][0] is not self.rate:
            self._bounds[:] = [(self.rate, bound_of(self.affinity, self.rate))]
        return self._bounds[0][1]

    def tension(self, u: Array) -> float:
        now, parts = self.at(u), []
        with np.errstate(over="ignore", invalid="ignore"):
            if now.fidelity is not None and now.observed is not None:
                parts += [now.fidelity.times(now.observed - u)]
            if now.terms.drives:
                parts.append(now.terms.driving(now.time, now.held(u)))
            total = now.cancelling(u) + sum(now.norm(part) for part in parts) * now._force_bound()
            return 0.0 if math.isnan(total) else total

    def cancelling(self, v: Array) -> float:
        """Return the size of the parts that cancel in `diffusion`; NaN where it is not known."""
        return self.norm(self._times_rate(v - self.mean(v))) * self._force_bound()

    def _force_bound(self) -> float:
        return self.inner.force_bound(self._bound())

    def energy(self, u: Array) -> float:
        return float(self._pending_energy(u))

    def pending_energy(self, u: Array) -> Pending | float:
        return self._pending_energy(u) if self.leaves_pending else self.energy(u)

    @property
    def leaves_pending(self) -> bool:
        return self._depth("energy") >= self._depth("_pending_energy")

    def _pending_energy(self, u: Array) -> Pending | float:
        now = self.at(u)
        functional = now.functional
        if functional is None or not now.terms.has_potential:
            return math.nan
        try:
            value = functional.pending(u, average=now.average(u))
            return (value + now._potential(functional.affinity, u) if now.terms.drives else value).or_infinite()
        except NumericalError:
            return math.inf

    @property
    def has_energy(self) -> bool:
        return super().has_energy and self.terms.has_potential

    def _potential(self, affinity: Affinity, u: Array, channels: Floats | None = None) -> Pending:
        measure = affinity.measure(self.inner.measure, u)
        if channels is not None:  # the share of each
            measure = measure[..., None] * constant_like(channels, measure)
        with np.errstate(over="ignore", invalid="ignore"):
            total = self.terms.potential(self.time, u, measure)
        return Pending(self._in_range, total, *affinity.total_parts())

    def _in_range(self, value: float, highest: float, mass: float) -> float:
        """Return a potential times the total of the measure, exp(highest) mass, where that was normalized."""
        if not self.inner.normalized or value == 0:
            return value if math.isfinite(value) else math.inf
        # The total of the measure may be out of the range of floats.
        exponent = math.log(abs(value)) + (highest + math.log(mass)) if math.isfinite(value) else math.inf
        return math.copysign(math.exp(exponent), value) if exponent < 709 else math.inf

    def _replaced(self, affinity: Affinity, fidelity: Fidelity | None, u: Array) -> Self:
        result = self._with(affinity, u)
        result._take(affinity, fidelity)
        return result

    @property
    def _words(self) -> list[str]:
        return [*self.terms.words, *([] if self.noise is None else [repr(self.noise)])]

    # ---- which pieces a subclass says more than

    def more_than(self, piece: str) -> str | None:
        """Return the method that adds to what is made of 'average', 'diffusion' or 'linear', or None."""
        return "velocity" if self.moving or self.terms.words else self.overridden(piece)

    @property
    def moving(self) -> list[str]:
        """What moves the signal beside A."""
        return [*self.terms.moving, *(["mobility m(u)"] if self.inner.varies else [])]

    def overridden(self, piece: str) -> str | None:
        """Return `more_than` without regard to terms."""
        order = ("average", "diffusion", "linear", "velocity")
        depth = self._depth(piece)
        above = order[order.index(piece) + 1 :]
        return next((name for name in reversed(above) if self._depth(name) < depth), None)

    @property
    def split(self) -> bool:
        """Whether `pulled` and `driven` hold, no subclass overriding `velocity` or `linear` alone."""
        said = max(self._depth("pulled"), self._depth("driven"))
        return said <= min(self._depth("velocity"), self._depth("linear")) and not self.inner.varies

    @property
    def plainly_linear(self) -> bool:
        """Whether A is overridden nowhere."""
        depth = self._depth("_take")
        return self.inner.by_nodes and all(self._depth(piece) >= depth for piece in ("average", "diffusion", "linear"))

    @property
    def moves_whole(self) -> bool:
        """Whether the metric moves the sum of all forces at once, which saves averages."""
        return not self.inner.by_nodes and self._depth("diffusion") >= self._depth("_take")

    @property
    def plain(self) -> bool:
        """Whether nothing is overridden."""
        own = self.overridden("average") is None
        return own and self._depth("average") >= self._depth("_take")

    def _depth(self, name: str) -> int:
        """Return how far from this object a method is defined: 0 on itself, then class by class."""
        if name in vars(self):
            return 0
        return 1 + next(i for i, cls in enumerate(type(self).__mro__) if name in vars(cls))


def alike(fidelity: Fidelity) -> float | None:
    """Return the number, if a fidelity is the same for all nodes to rounding, as lambda / d, else None."""
    values: Any = getattr(fidelity, "values", None)
    if fidelity.uniform is not None or not isinstance(fidelity, NodeFidelity) or not is_numpy(values):
        return fidelity.uniform
    low, high = fidelity.bounds()
    return (low + high) / 2 if high - low <= 16 * float(np.finfo(values.dtype).eps) * high else None


def bound_of(affinity: Affinity, rate: Array | float) -> float:
    """Return an upper bound of the spectrum of r (I - P)."""
    rate = rate if isinstance(rate, float) else float(namespace(rate).max(rate))
    definite = affinity.symmetric and affinity.positive_semidefinite
    # What approximates a definite kernel has eigenvalues that are below 0 by its error at most.
    return rate * min(1 + affinity.error_estimate, 2) if definite else 2 * rate


def as_linear(flow: Flow, name: str = "flow") -> LinearFlow:
    if not isinstance(flow, LinearFlow):
        raise InputError(f"{name}: {flow!r} is not linear; {flow.advice}")
    return flow
