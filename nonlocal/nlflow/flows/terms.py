"""Terms of flows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from nlflow._array import Array, kept_like, namespace, over_channels, same_kind
from nlflow.affinities import Affinity
from nlflow.errors import InputError, is_function, kind_of
from nlflow.flows.reactions import Reaction
from nlflow.functionals.constraint import (
    Constraint,
    Held,
    TermError,
    as_constraint,
    count_arguments,
    term_at_a_time,
)


class Source:
    """A term g that is added to du/dt: ``flow + Source(g)``.

    Parameters
    ----------
    values : array or callable
        An array shaped like the signal, or a callable of t, or of t and the nodes (N, m), that returns one.

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


class Signal:
    """A signal that may change with time."""

    def __init__(self, name: str, given: Any, affinity: Affinity) -> None:
        self.name = name
        self.timed = is_function(given)
        self._nodes = affinity.domain.nodes if self.timed and count_arguments(name, given) == 2 else None
        self._given = given if self.timed else _own(affinity.check_signal(name, given))
        self._affinity = affinity

    @term_at_a_time()
    def at(self, t: float, like: Array | None = None) -> Array:
        """Return the signal at time t, or raise `InputError` for another kind than `like`, `TermError` for NaN."""
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
        found = self._given(float(t), self._nodes if like is None else kept_like(self._nodes, like))
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
        first, second = self._parts
        return first.at(t, like) + second.at(t, like)


def _own(signal: Array) -> Array:
    return namespace(signal).astype(signal, signal.dtype, copy=True)


@dataclass(frozen=True)
class Terms:
    """The terms of a flow."""

    reaction: Reaction | None = None
    source: Signal | None = None
    observed: Signal | None = None
    constraint: Held | None = None

    def joined(self, term: Any, affinity: Affinity) -> Terms:
        if isinstance(term, Reaction):
            term = term.on(affinity)
            return replace(self, reaction=term if self.reaction is None else self.reaction + term)
        if isinstance(term, Source):
            more = Signal("source", term.values, affinity)
            return replace(self, source=more if self.source is None else SumOfSignals(self.source, more))
        if isinstance(term, Constraint):
            if self.constraint is not None:
                raise InputError("constraint: the flow has one, expected one Constraint that holds all values")
            return replace(self, constraint=as_constraint(affinity, term))
        raise InputError(f"flow: got {kind_of(term)} to be added, expected a Reaction, a Source or a Constraint")

    @property
    def tracked(self) -> bool:
        source = self.source
        return source is not None and not source.timed and bool(getattr(source.at(0.0), "requires_grad", False))

    @property
    def timed(self) -> bool:
        terms = (self.reaction, self.source, self.observed, self.constraint)
        return any(one is not None and one.timed for one in terms)

    @property
    def drives(self) -> bool:
        return self.reaction is not None or self.source is not None

    @property
    def words(self) -> list[str]:
        return [*self.moving, *([] if self.constraint is None else [f"constraint {self.constraint!r}"])]

    @property
    def moving(self) -> list[str]:
        """The terms but a constraint, in words."""
        return [
            *([] if self.reaction is None else [f"reaction {self.reaction!r}"]),
            *([] if self.source is None else ["source g(t)" if self.source.timed else "source g"]),
            *([] if self.observed is None else ["observed signal f(t)"]),
        ]

    @property
    def has_potential(self) -> bool:
        return self.reaction is None or self.reaction.potential is not None

    @property
    def bound(self) -> float:
        return 0.0 if self.reaction is None else self.reaction.bound

    @property
    def turns(self) -> bool:
        return self.reaction is not None and self.reaction.turns

    def driving(self, t: float, u: Array) -> Array:
        if self.reaction is None:
            assert self.source is not None
            return self.source.at(t, u)
        value = self.reaction.when(t)(u)
        return value if self.source is None else value + self.source.at(t, u)

    def potential(self, t: float, u: Array, measure: Array) -> Array:
        """Return sum_i m_i (F(u_i) - g_i u_i), channels added up; an array of one number."""
        xp = namespace(u)
        total = 0 * u
        if self.reaction is not None and (potential := self.reaction.when(t).potential) is not None:
            total = total + potential(u)
        if self.source is not None:
            total = total - self.source.at(t, u) * u
        return xp.sum(over_channels(measure, u) * total, dtype=xp.float64)

    def given(self) -> list[Any]:
        own: list[Any] = list(self.words)
        if self.reaction is not None:
            own += [self.reaction, self.reaction.word()]
        if self.source is not None and not self.source.timed:
            own.append(self.source.at(0.0))
        return own if self.constraint is None else [*own, *self.constraint.given()]

    def moments(self, t: float, like: Array) -> list[Array]:
        signals = (self.source, self.observed, self.constraint)
        return [one.at(t, like) for one in signals if one is not None and one.timed]


def as_terms(affinity: Affinity, reaction: Any, source: Any, observed: Any = None, constraint: Any = None) -> Terms:
    if reaction is not None and not isinstance(reaction, Reaction):
        raise InputError(
            f"reaction: got {kind_of(reaction)}, expected a Reaction, such as AllenCahn() or "
            "Reaction(function, interval, derivative=...)"
        )
    if observed is not None and not is_function(observed):
        raise InputError(f"observed: got {kind_of(observed)}, expected a callable of t; a fixed one is that of E")
    source = source.values if isinstance(source, Source) else source
    return Terms(
        None if reaction is None else reaction.on(affinity),
        None if source is None else Signal("source", source, affinity),
        None if observed is None else Signal("observed", observed, affinity),
        None if constraint is None else as_constraint(affinity, constraint),
    )
