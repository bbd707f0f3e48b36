"""What a flow has beside its linear part: a reaction R(u), a source, an f(t), and values held at some nodes."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from nlflow._array import (
    Array,
    Floats,
    constant_like,
    is_numpy,
    namespace,
    over_channels,
    same_kind,
    scalar,
    underflowing,
)
from nlflow.affinities import Affinity
from nlflow.errors import InputError, NumericalError, all_digits, check_integer, check_number, shortened
from nlflow.flows.flow import difference
from nlflow.functionals.constraint import Constraint, Held, as_constraint, count_arguments

_SAMPLES = 128  # places at which what is claimed of a reaction is compared with its values
_FINE = 4097  # places at which the largest slope is looked for
_KINKS = 2  # samples at which a derivative may differ: a function may have corners


@underflowing
class Reaction:
    """A pointwise term R of a flow, du/dt = -grad + R(u).

    What is claimed of R is compared with its values at 128 places of its interval.

    Parameters
    ----------
    function : callable
        R, of arrays of any shape (NumPy arrays, or tensors where the flow has tensors), element by element. The result
        has the shape and dtype of the argument.
    interval : tuple of float
        The values that the signal takes. What is said of R holds there, and a signal must start there.
    derivative : callable, optional
        R'. Its largest modulus on the interval, among 4097 values, is the bound.
    bound : float, optional
        Bound of |R'| on the interval, a Lipschitz constant of R; needed without `derivative`. It shortens stable steps.
        Of a coupled reaction the bound of the norm of its Jacobian matrix, for vectors of values in the interval.
    potential : callable, optional
        F with F' = -R. The flow then descends J (or E) + sum_i m_i F(u_i), where m is w in the L2 metric and w d in the
        degree metric.
    components : int, optional
        Of a coupled reaction: the number of channels D that the function takes together, in the last axis. It has a
        `bound`, neither derivative nor potential.
    name : str, optional
        What messages call it; the name of the function by default. It tells checkpoints apart, as values of R do.

    Raises
    ------
    InputError
        For a function whose result has another shape or dtype, or that is not finite on the interval; for a derivative,
        bound or potential that disagrees with it.

    Examples
    --------
    >>> from nlflow import Gaussian, GradientFlow, Grid, J, Reaction, affinity, solve
    >>> import numpy as np
    >>> decay = Reaction(lambda u: -(u**3), (-2.0, 2.0), derivative=lambda u: -3 * u**2)
    >>> flow = GradientFlow(J(affinity(Gaussian(width=1.0), Grid(8))), "degree", reaction=decay)
    >>> round(float(solve(flow, np.ones(8), t=1.5).final[0]), 5)  # 1 / sqrt(1 + 2 t)
    0.5
    """

    components: int | None = None
    turns: bool = False
    """Whether values of one channel or node move those of another, so that slopes may be complex.

    So those of a coupled reaction may be. A subclass for which this is so says it: then no limit of explicit steps is
    told.
    """

    def __init__(
        self,
        function: Callable[[Array], Array],
        interval: tuple[float, float],
        *,
        derivative: Callable[[Array], Array] | None = None,
        bound: float | None = None,
        potential: Callable[[Array], Array] | None = None,
        components: int | None = None,
        name: str = "",
    ) -> None:
        if not callable(function):
            raise InputError(f"function: got {type(function).__name__}, expected a callable of an array")
        for what, given in (("derivative", derivative), ("potential", potential)):
            if given is not None and not callable(given):
                raise InputError(f"{what}: got {type(given).__name__}, expected a callable of an array")
            if given is not None and components is not None:
                raise InputError(f"{what}: got one for a coupled reaction, expected none; give it a bound")
        if components is not None:  # of others checkpoints know nothing that they did not
            self.components, self.turns = check_integer("components", components, minimum=2), True
        self.function, self.derivative, self.potential = function, derivative, potential
        self.name = name or str(getattr(function, "__name__", type(function).__name__))
        self.interval = _checked_interval(interval)
        self._check_function()
        if derivative is None and bound is None:
            raise InputError("bound: got none without a derivative, expected one of them, for the limits of steps")
        if derivative is not None:
            self._check_derivative(derivative)
        self.bound = self._checked_bound(bound)
        if potential is not None:
            self._check_potential(potential)

    def __call__(self, u: Array) -> Array:
        """Return R(u); `InputError` for another shape or dtype, `NumericalError` where it is not finite though u is."""
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):  # found out below
            value = self.function(u)
        self._check_like(value, u)
        here = is_numpy(u) or str(u.device) == "cpu"
        if here and not _finite(value) and _finite(u):
            at = scalar(u[~namespace(u).isfinite(value)][0])
            raise NumericalError(
                f"reaction: {self!r} is not finite at u = {at:.4g}; use a smaller dt or RungeKutta(), or a reaction "
                "that keeps the signal bounded"
            )
        return value

    def jacobian(self, u: Array, v: Array) -> Array:
        """Return the derivative of R at `u` along `v`, by `derivative` or by central differences."""
        return difference(self, u, v) if self.derivative is None else self.derivative(u) * v

    def __add__(self, other: Any) -> Reaction:
        """Return the sum of two reactions, where both are known."""
        return SumOfReactions(self, other) if isinstance(other, Reaction) else NotImplemented

    def check_start(self, name: str, u: Array) -> None:
        """Raise `InputError` unless the values of `u` lie in the interval, up to rounding."""
        xp = namespace(u)
        low, high = scalar(xp.min(u)), scalar(xp.max(u))
        slack = 1e-6 * (self.interval[1] - self.interval[0])
        if low < self.interval[0] - slack or high > self.interval[1] + slack:
            raise InputError(
                f"{name}: got values from {low:.6g} to {high:.6g}, expected them in {list(self.interval)}, where the "
                f"slope of the reaction {self!r} is known; give it an interval that holds them"
            )
        if self.components is not None and (u.ndim < 2 or int(u.shape[-1]) != self.components):
            raise InputError(
                f"{name}: got shape {tuple(u.shape)}, expected {self.components} channels in the last axis, the "
                f"components of the reaction {self!r}"
            )
        if not self.turns and u.ndim > 1:
            flat = xp.reshape(u, (-1,))
            alone = xp.reshape(self(flat), tuple(u.shape))
            whole = self(u)
            unit = float(xp.finfo(u.dtype).eps) ** 0.5 * (scalar(xp.max(xp.abs(whole))) + self.bound * (high - low))
            if scalar(xp.max(xp.abs(whole - alone))) > unit:
                raise InputError(
                    f"reaction: {self!r} is not element by element: values of a signal of shape {tuple(u.shape)} move "
                    "others than they do alone; expected R(u) of each value by itself, or override velocity() of the "
                    "flow for what mixes channels"
                )

    def word(self) -> str:
        """Return what tells the reaction from others: its name and a digest of its values."""
        values = " ".join(f"{value:.9e}" for value in np.ravel(self.function(self._samples())))
        return f"{self!r} {hashlib.sha256(values.encode()).hexdigest()}"

    def _samples(self) -> Floats:
        """Return places in the interval, none of them where corners usually are."""
        low, high = self.interval
        turn = 0.6180339887498949
        if self.components is not None:  # other multiples of it for other components, so that they fill the box
            turn = turn * np.sqrt(1.0 + np.arange(self.components))
            return np.asarray(low + (high - low) * np.modf((np.arange(_SAMPLES)[:, None] + 0.5) * turn)[0])
        shares: Floats = np.modf((np.arange(_SAMPLES) + 0.5) * turn)[0]
        return low + (high - low) * shares

    def _check_like(self, value: Any, u: Array) -> None:
        if tuple(getattr(value, "shape", ())) != tuple(u.shape) or not hasattr(value, "dtype"):
            got = type(value).__name__ if not hasattr(value, "shape") else f"shape {tuple(value.shape)}"
            raise InputError(f"reaction: {self!r} returns {got}, expected shape {tuple(u.shape)}, that of the signal")
        same_kind(f"reaction: what {self!r} returns", value, u)

    def _check_function(self) -> None:
        for dtype in (np.float32, np.float64):
            with np.errstate(over="ignore", invalid="ignore", divide="ignore"):  # found out below
                samples = self._samples().astype(dtype)
                kept = samples.copy()
                value = self.function(samples)
            self._check_like(value, samples)
            if not np.array_equal(samples, kept):
                raise InputError(f"function: {self!r} changes its argument in place, expected a new array")
        if not _finite(value):
            raise InputError(f"function: {self!r} is not finite on its interval, expected finite values there")

    def _difference(self, function: Callable[[Array], Array], samples: Floats) -> Floats:
        """Return central differences, exact to about 1e-7 of the largest slope for smooth functions."""
        step = 1e-5 * (self.interval[1] - self.interval[0])
        return np.asarray((function(samples + step) - function(samples - step)) / (2 * step))

    def _agree(self, what: str, claimed: Any, found: Floats, samples: Floats) -> None:
        """Raise `InputError` where what is claimed differs from differences at more places than corners explain."""
        scale = max(float(np.abs(found).max()), float(np.abs(claimed).max()))
        wrong = ~(np.abs(claimed - found) <= 1e-5 * scale)
        if np.count_nonzero(wrong) > _KINKS:
            first = int(np.argmax(wrong))
            raise InputError(
                f"{what}: it disagrees with the function of {self!r}: at u = {samples[first]:.6g} got "
                f"{float(claimed[first]):.6g}, expected about {float(found[first]):.6g}"
            )

    def _check_derivative(self, derivative: Callable[[Array], Array]) -> None:
        samples = self._samples()
        self._check_like(derivative(samples), samples)
        self._agree("derivative", derivative(samples), self._difference(self.function, samples), samples)

    def _check_potential(self, potential: Callable[[Array], Array]) -> None:
        samples = self._samples()
        self._check_like(potential(samples), samples)
        self._agree("potential", -self._difference(potential, samples), self.function(samples), samples)

    def _checked_bound(self, bound: float | None) -> float:
        if bound is None:
            assert self.derivative is not None
            return float(np.abs(self.derivative(np.linspace(*self.interval, _FINE))).max())
        bound = check_number("bound", bound, minimum=0)
        steepest = self._steepest()
        if steepest > bound * (1 + 1e-5) + 1e-300:
            raise InputError(f"bound: got {bound:g}, but {self!r} has a slope of {steepest:.6g} on its interval")
        return bound

    def _steepest(self) -> float:
        samples = self._samples()
        if self.components is None:
            return float(np.abs(self._difference(self.function, samples)).max())
        step = 1e-5 * (self.interval[1] - self.interval[0])
        moves = step * np.eye(self.components)
        columns = [(self.function(samples + e) - self.function(samples - e)) / (2 * step) for e in moves]
        return float(np.linalg.norm(np.stack(columns, axis=-1), 2, axis=(-2, -1)).max())

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(all_digits(end) for end in self.interval)})"


@underflowing
class SumOfReactions(Reaction):
    """The sum of two reactions, on the interval that both know: its bound is the sum of theirs at most.

    Raises
    ------
    InputError
        For intervals without a common one, and for different numbers of components.
    """

    def __init__(self, first: Reaction, second: Reaction) -> None:
        counts = {one.components for one in (first, second)} - {None}
        if len(counts) > 1:
            raise InputError(f"reaction: got {first!r} and {second!r}, expected the same number of components")
        low, high = (pick(a, b) for pick, a, b in zip((max, min), first.interval, second.interval, strict=True))
        if not low < high:
            raise InputError(
                f"reaction: got {first!r} and {second!r}, expected intervals that overlap; the signal must stay where "
                "both are known"
            )
        self.parts = (first, second)
        slopes = [one.derivative for one in self.parts]
        potentials = [one.potential for one in self.parts]
        super().__init__(
            lambda u: first.function(u) + second.function(u), (low, high),
            derivative=None if None in slopes else lambda u: sum(slope(u) for slope in slopes),  # type: ignore[misc]
            bound=None if None not in slopes else first.bound + second.bound,
            potential=None if None in potentials or counts else lambda u: sum(f(u) for f in potentials),  # type: ignore[misc]
            components=next(iter(counts), None), name=f"{first!r} + {second!r}",
        )  # fmt: skip
        self.turns = first.turns or second.turns

    def jacobian(self, u: Array, v: Array) -> Array:
        """Return the derivative of the sum at `u` along `v`."""
        first, second = self.parts
        return first.jacobian(u, v) + second.jacobian(u, v)

    def __repr__(self) -> str:
        return self.name


def _finite(values: Array) -> bool:
    xp = namespace(values)
    return bool(xp.all(xp.isfinite(values)))


def _checked_interval(interval: Any) -> tuple[float, float]:
    try:
        low, high = interval
    except (TypeError, ValueError) as error:
        raise InputError(f"interval: got {shortened(repr(interval))}, expected a pair (low, high)") from error
    low, high = check_number("interval", low), check_number("interval", high)
    if not low < high or not math.isfinite(high - low):
        raise InputError(f"interval: got ({low:g}, {high:g}), expected low < high")
    return low, high


@underflowing
class AllenCahn(Reaction):
    """R(u) = s (u - u^3), which drives values to -1 and 1; its potential is s (u^2 - 1)^2 / 4.

    With diffusion it separates two phases, which then coarsen; |u| <= 1 is kept. (Allen and Cahn 1979, doi
    10.1016/0001-6160(79)90196-2; with a nonlocal diffusion Bates 2006, in Nonlinear Dynamics and Evolution Equations.)

    Parameters
    ----------
    strength : float
        s > 0, beside the rate of the diffusion (1 in the degree metric).
    interval : tuple of float
        Of the values that the signal takes; see `Reaction`.

    Examples
    --------
    >>> from nlflow import AllenCahn
    >>> AllenCahn(3.0).bound
    6.0
    """

    def __init__(self, strength: float = 1.0, *, interval: tuple[float, float] = (-1.0, 1.0)) -> None:
        s = self.strength = check_number("strength", strength, minimum=0, strict=True)
        super().__init__(
            lambda u: s * (u * (1 - u * u)), interval,
            derivative=lambda u: s * (1 - 3 * (u * u)), potential=lambda u: s / 4 * (u * u - 1) ** 2, name="AllenCahn",
        )  # fmt: skip


@underflowing
class FisherKPP(Reaction):
    """R(u) = r u (1 - u), logistic growth; its potential is r (u^3 / 3 - u^2 / 2).

    With diffusion a front of ones runs into zeros. (Fisher 1937, doi 10.1111/j.1469-1809.1937.tb02153.x; Kolmogorov,
    Petrovsky and Piskunov 1937.)

    Parameters
    ----------
    rate : float
        r > 0.
    interval : tuple of float
        Of the values that the signal takes; see `Reaction`. Values below 0 run off to minus infinity in finite time.

    Examples
    --------
    >>> from nlflow import FisherKPP
    >>> FisherKPP(0.5).bound
    0.5
    """

    def __init__(self, rate: float = 1.0, *, interval: tuple[float, float] = (0.0, 1.0)) -> None:
        r = self.rate = check_number("rate", rate, minimum=0, strict=True)
        super().__init__(
            lambda u: r * (u * (1 - u)), interval,
            derivative=lambda u: r * (1 - 2 * u), potential=lambda u: r * (u * u * (u / 3 - 0.5)), name="FisherKPP",
        )  # fmt: skip


class Source:
    """A term g that is added to du/dt: ``flow + Source(g)``.

    Parameters
    ----------
    values : array or callable
        An array shaped like the signal, or a callable of t, or of t and the nodes, of shape (N, m), that returns one.

    Examples
    --------
    >>> import numpy as np
    >>> from nlflow import GradientFlow, Gaussian, Grid, J, affinity, solve
    >>> from nlflow.flows import Source
    >>> flow = GradientFlow(J(affinity(Gaussian(1.0), Grid(8)))) + Source(np.ones(8))
    >>> flow = flow + Source(lambda t: 2 * t * np.ones(8))
    >>> round(float(solve(flow, np.zeros(8), t=1.0).final.mean()), 6)  # t + t^2
    2.0
    """

    def __init__(self, values: Any) -> None:
        self.values = values


class TermError(NumericalError):
    """A term has no value at some time, whatever the signal is: no shorter step changes that."""


class Signal:
    """A signal that may change with time: an array, or a callable of t, or of t and the nodes x of shape (N, m)."""

    def __init__(self, name: str, given: Any, affinity: Affinity) -> None:
        self.name = name
        self.timed = callable(given)
        self._nodes = affinity.domain.nodes if self.timed and count_arguments(name, given) == 2 else None
        self._given = given if self.timed else _own(affinity.check_signal(name, given))
        self._affinity = affinity

    def at(self, t: float, like: Array | None = None) -> Array:
        """Return the signal at time t, of the kind of `like`; `InputError` for another kind, `TermError` for NaN."""
        found = self._called(t, like) if self.timed else self._given
        if like is None:
            return self._affinity.check_signal(self.name, found)
        if tuple(getattr(found, "shape", ())) != tuple(like.shape):
            got = f"shape {tuple(found.shape)}" if hasattr(found, "shape") else type(found).__name__
            raise InputError(f"{self.name}: got {got}{self._when(t)}, expected {tuple(like.shape)}, that of the signal")
        same_kind(self.name, found, like)
        if self.timed and not bool(namespace(found).all(namespace(found).isfinite(found))):
            raise TermError(f"{self.name}: NaN or infinite{self._when(t)}; expected finite values at all times")
        return found

    def _called(self, t: float, like: Array | None) -> Array:
        if self._nodes is None:
            return self._given(float(t))
        found = self._given(float(t), self._nodes if like is None else constant_like(self._nodes, like))
        shape = self._affinity.domain.shape
        if getattr(found, "ndim", 0) in (1, 2) and found.shape[0] == len(self._nodes):  # a value for each row of x
            return namespace(found).reshape(found, (*shape, *tuple(found.shape)[1:]))
        return found

    def _when(self, t: float) -> str:
        return f" at t={t:.6g}" if self.timed else ""


class SumOfSignals(Signal):
    """The sum of two signals."""

    def __init__(self, first: Signal, second: Signal) -> None:
        self.name, self.timed = first.name, first.timed or second.timed
        self._parts = (first, second)

    def at(self, t: float, like: Array | None = None) -> Array:
        """Return the sum at time t; see `Signal.at`."""
        first, second = self._parts
        return first.at(t, like) + second.at(t, like)


def _own(signal: Array) -> Array:
    return namespace(signal).astype(signal, signal.dtype, copy=True)


@dataclass(frozen=True)
class Terms:
    """What a flow has beside its linear part; `observed` is that of its fidelity, where it changes with time."""

    reaction: Reaction | None = None
    source: Signal | None = None
    observed: Signal | None = None
    constraint: Held | None = None

    def joined(self, term: Any, affinity: Affinity) -> Terms:
        """Return these terms and one more, or raise `InputError`."""
        if isinstance(term, Reaction):
            return replace(self, reaction=term if self.reaction is None else self.reaction + term)
        if isinstance(term, Source):
            more = Signal("source", term.values, affinity)
            return replace(self, source=more if self.source is None else SumOfSignals(self.source, more))
        if isinstance(term, Constraint):
            if self.constraint is not None:
                raise InputError("constraint: the flow has one, expected one Constraint that holds all values")
            return replace(self, constraint=as_constraint(affinity, term))
        raise InputError(f"flow: got {type(term).__name__} to be added, expected a Reaction, a Source or a Constraint")

    @property
    def timed(self) -> bool:
        """Whether one of them depends on time."""
        return any(one is not None and one.timed for one in (self.source, self.observed, self.constraint))

    @property
    def drives(self) -> bool:
        """Whether there is a reaction or a source."""
        return self.reaction is not None or self.source is not None

    @property
    def words(self) -> list[str]:
        """What there is, in words for messages."""
        return [*self.moving, *([] if self.constraint is None else [f"constraint {self.constraint!r}"])]

    @property
    def moving(self) -> list[str]:
        """What there is beside a constraint, in words for messages."""
        return [
            *([] if self.reaction is None else [f"reaction {self.reaction!r}"]),
            *([] if self.source is None else ["source g(t)" if self.source.timed else "source g"]),
            *([] if self.observed is None else ["observed signal f(t)"]),
        ]

    @property
    def has_potential(self) -> bool:
        """Whether what drives is the gradient of something."""
        return self.reaction is None or self.reaction.potential is not None

    @property
    def bound(self) -> float:
        """Bound of the slope of what drives, 0 without a reaction."""
        return 0.0 if self.reaction is None else self.reaction.bound

    @property
    def turns(self) -> bool:
        """Whether slopes of what drives may be complex; see `Reaction.turns`."""
        return self.reaction is not None and self.reaction.turns

    def driving(self, t: float, u: Array) -> Array:
        """Return R(u) + g(t) where there is a reaction or a source."""
        if self.reaction is None:
            assert self.source is not None
            return self.source.at(t, u)
        value = self.reaction(u)
        return value if self.source is None else value + self.source.at(t, u)

    def potential(self, t: float, u: Array, measure: Array) -> float:
        """Return sum_i m_i (F(u_i) - g_i u_i), channels added up."""
        xp = namespace(u)
        total = 0 * u
        if self.reaction is not None and self.reaction.potential is not None:
            total = total + self.reaction.potential(u)
        if self.source is not None:
            total = total - self.source.at(t, u) * u
        return scalar(xp.sum(over_channels(measure, u) * total, dtype=xp.float64))

    def given(self) -> list[Any]:
        """Return what tells these terms apart, as `Flow.given` does; `moments` has what changes with time."""
        own: list[Any] = list(self.words)
        if self.reaction is not None:
            own += [self.reaction, self.reaction.word()]
        if self.source is not None and not self.source.timed:
            own.append(self.source.at(0.0))
        return own if self.constraint is None else [*own, *self.constraint.given()]

    def moments(self, t: float, like: Array) -> list[Array]:
        """Return the signals that change with time, as they are at t."""
        signals = (self.source, self.observed, self.constraint)
        return [one.at(t, like) for one in signals if one is not None and one.timed]


def as_terms(affinity: Affinity, reaction: Any, source: Any, observed: Any = None, constraint: Any = None) -> Terms:
    """Return the terms that a flow was given, or raise `InputError`."""
    if reaction is not None and not isinstance(reaction, Reaction):
        raise InputError(
            f"reaction: got {type(reaction).__name__}, expected a Reaction, such as AllenCahn() or "
            "Reaction(function, interval, derivative=...)"
        )
    if observed is not None and not callable(observed):
        raise InputError(f"observed: got {type(observed).__name__}, expected a callable of t; a fixed one is that of E")
    source = source.values if isinstance(source, Source) else source
    return Terms(
        reaction,
        None if source is None else Signal("source", source, affinity),
        None if observed is None else Signal("observed", observed, affinity),
        None if constraint is None else as_constraint(affinity, constraint),
    )
