"""The base of flows."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial, wraps
from typing import Any, Self, TypeVar, cast

import numpy as np

from nlflow._array import (
    Array,
    Pending,
    check_signal_like,
    namespace,
    over_channels,
    same_kind,
    scalar,
    underflowing,
    unit_of,
)
from nlflow.affinities import Affinity, shown
from nlflow.errors import InputError, NumericalError, check_array, check_flag, check_integer, kind_of
from nlflow.flows.noise import Noise
from nlflow.functionals.metrics import Metric, as_metric
from nlflow.store.notebook import card


def difference(function: Callable[[Array], Array], u: Array, v: Array) -> Array:
    """Return the derivative of a function at `u` along `v` by central differences."""
    xp = namespace(u)
    length = scalar(xp.max(xp.abs(v)))
    if length == 0:
        return 0 * v
    # The step that balances rounding against the third derivative, in units of the signal; of 1 where that is 0.
    h = float(xp.finfo(u.dtype).eps) ** (1 / 3) * (scalar(xp.max(xp.abs(u))) or 1.0) / length
    return (function(u + h * v) - function(u - h * v)) / (2 * h)


Method = TypeVar("Method", bound=Callable[..., Any])

_looked_at: ContextVar[list[int] | None] = ContextVar("looked_at", default=None)
"""Whose signals are known to be of the right kind: the count that flows share which come of one another."""

_ASKED = frozenset(("velocity", "jacobian", "energy", "speed", "distance_to_constant"))


def of_signal(method: Method) -> Method:
    """Return a method that checks its signal, where no caller has checked it."""

    @wraps(method)
    def checked(self: Flow, u: Array, *others: Any) -> Any:
        if _looked_at.get() is self._count:
            return method(self, u, *others)
        self.check_kind("u", u)
        try:
            with self.looking_at(u):
                return method(self, u, *others)
        except (InputError, NumericalError) as error:
            if "NaN" in str(error) or bool(namespace(u).all(namespace(u).isfinite(u))):
                raise
            raise type(error)(f"u: got NaN or infinity, expected finite values: {error}") from error

    return cast(Method, checked)


def _told(listeners: list[Callable[[float], Any]], share: float) -> None:
    for listener in listeners:
        listener(share)


@underflowing
class Flow:
    """Base of flows: what `nlflow.solve` and trackers ask of one.

    A subclass defines `velocity`; where it descends a functional also `functional`, or `energy` and `has_energy`.

    Attributes
    ----------
    affinity : Affinity
        Its domain is that of the signal.
    metric : str
        The name of the metric, such as 'l2' or 'degree'.
    observed : array or None
    symmetric : bool
        Whether there is a linear part that is self-adjoint in the flow's measure.
    advice : str
        Which integrators messages advise.
    needs_integrator : bool
        Whether `nlflow.solve` has no integrator for it by default.
    checks_steps : bool
        Whether a step that is not finite raises by itself.
    differentiated : str
        Which function messages advise for derivatives through steps.
    evolving : bool
        Whether the kernel is that of u(t).
    every : int
        Of an evolving flow: after how many steps the kernel is taken anew; with 1 it is that of the present signal.
    time : float
        At which terms are taken that depend on time.
    noise : Noise or None
    takes_noise : bool
    dissipation : float
        Noise of inverse temperature beta has the strength (2 dissipation / beta)^1/2.
    during : callable
        A long step calls it with the share of the step that is done.
    """

    symmetric: bool = False
    advice: str = "integrate it with RungeKutta()"
    needs_integrator: bool = False
    checks_steps: bool = False
    differentiated: str = "nlflow.flows.derivatives.run"
    time: float = 0.0
    during: Callable[[float], Any] = staticmethod(lambda share: None)
    noise: Noise | None = None
    takes_noise: bool = True
    dissipation: float = 1.0

    _like: Array | None  # what signals share their kind with

    def __init_subclass__(cls, **options: Any) -> None:
        """Look at the signals that methods of a subclass are asked of; see `of_signal`."""
        super().__init_subclass__(**options)
        for name in _ASKED & vars(cls).keys():
            setattr(cls, name, of_signal(vars(cls)[name]))

    def __init__(
        self,
        affinity: Affinity,
        metric: str | Metric,
        observed: Array | None,
        *,
        evolving: bool,
        every: int,
    ) -> None:
        self.inner = as_metric(metric)
        self.metric = self.inner.name
        self.observed = self._like = observed
        self.evolving = check_flag("evolving", evolving)
        self.every = check_integer("every", every, minimum=1)
        if self.every > 1 and not self.evolving:
            raise InputError(f"every: got {every} for a frozen kernel, expected evolving=True with it; leave it out")
        self._count = [0]  # one for all flows that come of this one by `rebuilt`
        self._root: list[tuple[Affinity, Array]] = []  # of the mass, for the flow at all times
        self._seen: Array | None = None  # the signal that `rebuilt` took the kernel from
        self.affinity = affinity
        if self.evolving and not affinity.evolves:
            raise InputError(
                "evolving: the affinity compares node positions or queries, or is a given matrix, which no signal "
                "changes; build it from features, or leave evolving=False"
            )

    @property
    def affinities(self) -> list[Affinity]:
        """The affinities that the flow averages by."""
        return [self.affinity]

    @property
    def tracked(self) -> bool:
        """Whether gradients are asked for."""
        return self.affinity.tracked or getattr(self.observed, "requires_grad", False)

    @property
    def applications(self) -> int:
        """How often P has been applied so far."""
        return self._count[0]

    @applications.setter
    def applications(self, count: int) -> None:
        self._count[0] = count

    @property
    def timed(self) -> bool:
        """Whether a term depends on time."""
        return False

    def when(self, t: float) -> Self:
        """Return the flow at time t."""
        return self if t == self.time else self._at_time(t)

    def _at_time(self, t: float) -> Self:
        result = copy.copy(self)
        result.time = t
        return result

    def held(self, u: Array) -> Array:
        """Return `u` with the values that a constraint gives at the flow's time."""
        return u

    def free(self, v: Array) -> Array:
        """Return `v` with 0 where a constraint gives values."""
        return v

    def __add__(self, term: Any) -> Self:
        """Return a copy with noise; `InputError` for other terms, or where it takes none."""
        if not isinstance(term, Noise):
            raise InputError(f"flow: got {kind_of(term)} to be added to a {type(self).__name__}, expected Noise")
        term.check(self)
        result = copy.copy(self)
        result.noise, result._count, result._root = term, [0], []
        return result

    def is_like(self, other: Flow | None) -> bool:
        """Whether `other`, made from this flow, has the same velocities."""
        if other is None:
            return False
        return other.affinity is self.affinity and (other.time == self.time or not self.timed)

    @property
    def functional(self) -> Any:
        """The functional that the flow descends, or None."""
        return None

    @property
    def has_energy(self) -> bool:
        """Whether `energy` is a number."""
        return self.functional is not None

    def at(self, u: Array) -> Self:
        """Return the flow with the kernel that it has at `u`, an array that must not be changed in place afterwards."""
        follows = self.evolving and self.every == 1
        return self.rebuilt(u) if follows and not self.is_of(u) else self

    def is_of(self, u: Array) -> bool:
        """Whether the kernel was taken from this very array."""
        return self._seen is u

    def following(self, u: Array, memory: dict[str, Any]) -> Self:
        """Return the evolving flow with the kernel of `u`, from an integrator's memory if it is there."""
        left = memory.get("_flow")
        return left if isinstance(left, type(self)) and left.is_of(u) else self.rebuilt(u)

    def velocity(self, u: Array) -> Array:
        """Return du/dt at `u`, with the kernel of `u` for an evolving flow."""
        raise NotImplementedError  # pragma: no cover - abstract

    @of_signal
    def jacobian(self, u: Array, v: Array) -> Array:
        """Return the derivative of `velocity` at `u` along `v`, by central differences unless a subclass knows it."""
        return difference(self.velocity, u, v)

    @of_signal
    def energy(self, u: Array) -> float:
        """Return the energy at `u`, potentials of terms too; NaN where there is none, infinity where it overflows."""
        try:
            return float(self.functional.value(u)) if self.has_energy else math.nan
        except NumericalError:
            return math.inf

    def pending_energy(self, u: Array) -> Pending | float:
        """Return `energy`, which may still lie on a device."""
        return self.energy(u)

    @property
    def leaves_pending(self) -> bool:
        """Whether `pending_energy` waits for no device, the building of an evolving kernel aside."""
        return False

    def more_than(self, piece: str) -> str | None:
        """See `LinearFlow.more_than`."""
        del piece
        return "velocity"

    def given(self) -> list[Any]:
        """Return arrays, numbers and words that tell the flow from others, its kernel aside."""
        return [self.observed]

    def moments(self, t: float, like: Array) -> list[Array]:
        """Return the sources, observed signals and held values that depend on time, at t."""
        del t, like
        return []

    def measure(self, like: Array) -> Array:
        """Return the measure of nodes: w, or w d (degree metric) with a sum of 1 that items of a batch share alike."""
        return self.affinity.measure(self.inner.measure, like, by_item=True)

    def mass(self, like: Array) -> Array:
        """Return m_i of the sums over nodes in the functional: w_i, or w_i d_i (degree metric)."""
        return self._mass_of(getattr(self.functional, "affinity", self.affinity), like)

    def _mass_of(self, affinity: Affinity, like: Array) -> Array:
        measure = affinity.measure(self.inner.measure, like)
        total = affinity.log_total() if self.inner.normalized else 0.0
        if abs(total) > 700:
            raise NumericalError(
                f"noise: the sum of degrees is exp({total:.4g}), out of the range of floats; scale the kernel's "
                "amplitude or logits, or give the noise white='nodes'"
            )
        return math.exp(total) * measure

    def root_mass(self, like: Array) -> Array:
        """Return m_i^-1/2 in the precision of a signal."""
        if not self._root or self._root[0][0] is not self.affinity or self._root[0][1].dtype != like.dtype:
            self._root[:] = [(self.affinity, namespace(like).astype(self.mass(like) ** -0.5, like.dtype))]
        return self._root[0][1]

    def check_noise(self, noise: Noise) -> None:  # a hook: most flows take all noise
        """Raise `InputError` for noise that the flow does not take."""

    @property
    def unspread(self) -> str | None:
        """Return why `spread` is not known, or None."""
        return None if self.inner.by_nodes else f"a {type(self).__name__}"

    def spread(self, white: Array) -> Array:
        """Return noise with the covariance of the metric, from white noise."""
        return white

    def mean(self, u: Array) -> Array:
        """Return the mean of each channel in the flow's measure."""
        return self.affinity.mean(u, self.inner.measure)

    @of_signal
    def distance_to_constant(self, u: Array) -> float:
        """Return the root mean square of u - mean(u) in the flow's measure, channels added up."""
        now = self.at(u)
        return now.norm(u - now.mean(u))

    def pending_distance(self, u: Array) -> Pending | float:
        """Return `distance_to_constant`, which may still lie on a device."""
        if type(self).distance_to_constant is not Flow.distance_to_constant or type(self).norm is not Flow.norm:
            return self.distance_to_constant(u)
        now = self.at(u)
        return now._pending_norm(u - now.mean(u))

    @of_signal
    def speed(self, u: Array) -> float:
        """Return the root mean square of du/dt in the flow's measure."""
        with np.errstate(over="ignore", invalid="ignore"):  # found out in what comes of it
            now = self.at(u)
            result = now.norm(now.velocity(u))
        if not math.isfinite(result):
            raise NumericalError("speed: degree or fidelity times the signal overflows; scale one of them down")
        return result

    def tension(self, u: Array) -> float:
        """Return the size of the parts that cancel in du/dt; 0 where it is not known."""
        del u
        return 0.0

    def norm(self, v: Array) -> float:
        """Return the root mean square of `v` in the flow's measure, channels added up."""
        return float(self._pending_norm(v))

    def total(self, measure: Array) -> Array:
        """Return the sum of a measure over nodes, averaged over channels where each has its own."""
        width = int(measure.shape[-1]) if measure.ndim > len(self.affinity.domain.shape) else 1
        xp = namespace(measure)
        return xp.sum(measure, dtype=xp.float64) / width

    def _pending_norm(self, v: Array) -> Pending:
        xp = namespace(v)
        measure = self.measure(v)
        size = unit_of(v)  # squares of very large and very small values have no float
        v = v / size
        total = xp.sum(over_channels(measure, v) * v * v, dtype=xp.float64)
        mean = total / self.total(measure)
        return Pending(lambda size, mean: size * math.sqrt(mean) if mean >= 0 else math.nan, size, mean)

    def check_signal(self, name: str, value: Any) -> Array:
        """Return `value` as a signal of this flow, or raise `InputError`."""
        alone = self.observed is None and self._like is not None  # particles, which are no signal of an affinity
        u = check_array(name, value) if alone else self.affinity.check_signal(name, value)
        self.check_kind(name, u)
        return u

    @contextmanager
    def looking_at(self, u: Array) -> Iterator[None]:
        """Skip the checks of signals like `u` within this block."""
        with self.affinity.within_memory(u):
            token = _looked_at.set(self._count)
            try:
                yield
            finally:
                _looked_at.reset(token)

    @contextmanager
    def telling(self, during: Callable[[float], Any]) -> Iterator[None]:
        """Let the flow call `during` within a step."""
        # Neither the flow nor a copy that is made in the step may hold the run after it: its signals would stay until
        # the collector of cycles comes.
        before, listeners = vars(self).get("during"), [during]
        self.during = partial(_told, listeners)
        try:
            yield
        finally:
            listeners.clear()
            vars(self).pop("during", None)
            if before is not None:
                self.during = before

    def check_kind(self, name: str, u: Array) -> None:
        """Raise `InputError` for another shape, dtype or device than a signal's."""
        if self._like is None:
            check_signal_like(name, u)
        else:  # before the affinity: what particles are made of is no feature of one
            same_kind(name, u, self._like)
        expected, words = self._shape
        if expected is not None and tuple(u.shape) != expected:
            raise InputError(f"{name}: got shape {tuple(u.shape)}, expected {expected}, {words}")
        self.affinity.check_kind(name, u)

    @property
    def _shape(self) -> tuple[tuple[int, ...] | None, str]:
        """The only shape that signals have, if there is one, and what it is, in words."""
        return (None, "") if self.observed is None else (tuple(self.observed.shape), "that of the observed signal")

    def rebuilt(self, u: Array) -> Self:
        """Return the flow with its kernel taken from `u`; counts go on."""
        raise NotImplementedError  # pragma: no cover - abstract

    def _repr_html_(self) -> str:
        """Return it for a notebook: what it says, and for up to 4096 nodes a row of P and known eigenvalues."""
        kernel = f"that of u(t), taken at every step that {self.every} divides" if self.evolving else "frozen"
        rows = [
            ("descends", type(self.functional).__name__ if self.has_energy else "no functional"),
            ("metric", self.metric),
            ("its kernel is", kernel),
            ("observed", None if self.observed is None else f"a signal of shape {tuple(self.observed.shape)}"),
        ]
        pictures = shown.row_pictured(self.affinity), shown.spectrum_pictured(self.affinity)
        return card(type(self).__name__, [*rows, *shown.said(self.affinity)], *pictures)

    def _with(self, affinity: Affinity, u: Array) -> Self:
        result = copy.copy(self)
        result.affinity = affinity
        result._seen = u
        return result


def as_flow(given: Any, name: str = "flow", expected: str = "such as a GradientFlow or an AttentionFlow") -> Flow:
    if not isinstance(given, Flow):
        raise InputError(f"{name}: got {kind_of(given)}, expected a flow{expected and ', '}{expected}")
    return given


def start_of(flow: Flow, start: Any) -> Array:
    """Return the signal that a run starts from, by default the observed one."""
    if start is None:
        if flow.observed is None:
            raise InputError("start: needed, since the flow has no observed signal to start from")
        start = flow.observed
    return flow.check_signal("start", start)
