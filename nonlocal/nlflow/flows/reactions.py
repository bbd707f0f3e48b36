"""Reactions."""

from __future__ import annotations

import copy
import hashlib
import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from nlflow._array import (
    Array,
    Floats,
    constant_like,
    is_numpy,
    kept_like,
    namespace,
    numbers,
    recorded,
    same_kind,
    scalar,
    underflowing,
)
from nlflow.affinities import Affinity
from nlflow.affinities.checks import check_affinity
from nlflow.errors import (
    InputError,
    NlflowError,
    NumericalError,
    all_digits,
    check_detached,
    check_integer,
    check_number,
    check_range,
    check_text,
    is_function,
    kind_of,
    shortened,
)
from nlflow.flows.flow import difference
from nlflow.functionals.constraint import count_arguments

_SAMPLES = 128  # places at which what is claimed of a reaction is compared with its values
_FINE = 4097  # places at which the largest slope is looked for
_CORNERS = 10  # columns of a box whose corners are looked at
_ARGUMENTS = "one of u, of (t, u) or of (t, x, u), with its averages last where there is an average"
_KINKS = 2  # samples at which a derivative may differ: a function may have corners


class _Averages:
    """An affinity of which its words count alone: checkpoints ask the flow for what its averages do."""

    __slots__ = ("affinity",)

    def __init__(self, affinity: Affinity) -> None:
        self.affinity = affinity

    def __repr__(self) -> str:
        return repr(self.affinity)


@underflowing
class Reaction:
    """A term R of a flow that acts at each node, du/dt = -grad + R: of u, of (t, u), or of (t, x, u).

    R is checked at samples of its interval, at t = 0, and `derivative`, `bound` and `potential` are compared with it.

    Parameters
    ----------
    function : callable
        R, of arrays of any shape (NumPy arrays, or tensors where the flow has tensors), element by element. It takes u,
        (t, u) or (t, x, u), t being the time and x the nodes, with their m coordinates in the last axis: ``x[..., 0]``
        broadcasts with u, or with ``u[..., 0]`` where there are `components`. With `average`, Pu, shaped like u, comes
        after these.
    interval : tuple of float
        The values that the signal takes; it must start there. A coupled reaction has one pair, or one for each
        component.
    derivative : callable, optional
        R', of the arguments of `function`. A coupled reaction gives the Jacobian matrices, shape (..., D, D), whose
        entry (i, j) is dR_i / du_j. With `average` the slopes along u, then those along Pu, shape (..., 2) or (..., D,
        2 D).
    bound : float, optional
        Bound of |R'| on the interval, for the limits of steps: for a coupled reaction of the norm of its Jacobian
        matrix, with `average` of the sum of the norms of both parts. Needed without `derivative`, and where R depends
        on t or x; by default the largest on samples.
    potential : callable, optional
        F with F' = -R. The energy of the flow then has sum_i m_i F(u_i) in it, m being w, or w d in the degree metric.
    components : int, optional
        The number of channels D that a coupled reaction takes together, in the last axis.
    average : Affinity, optional
        Its P gives the averages Pu that R sees.
    name : str, optional
        What messages call it; the name of the function by default.

    Raises
    ------
    InputError
        For a function that fails, or whose result has another shape or dtype or is not finite at a sample; for a
        derivative, bound or potential that disagrees with it.

    Examples
    --------
    >>> from nlflow import Gaussian, GradientFlow, Grid, J, Reaction, affinity, solve
    >>> import numpy as np
    >>> decay = Reaction(lambda u: -(u**3), (-2.0, 2.0), derivative=lambda u: -3 * u**2)
    >>> flow = GradientFlow(J(affinity(Gaussian(width=1.0), Grid(8))), "degree", reaction=decay)
    >>> round(float(solve(flow, np.ones(8), t=1.5).final[0]), 5)  # 1 / sqrt(1 + 2 t)
    0.5

    >>> crowd = affinity(Gaussian(width=2.0), Grid(8))
    >>> def growth(t, u, seen):
    ...     return (1 + np.sin(t)) * u * (1 - seen)
    >>> season = Reaction(growth, (0, 2), bound=8.0, average=crowd)
    >>> flow = GradientFlow(J(affinity(Gaussian(width=1.0), Grid(8))), "degree", reaction=season)
    >>> round(float(solve(flow, np.full(8, 0.5), t=np.pi).final[0]), 5)  # 1 / (1 + exp(-pi - 2))
    0.99419
    """

    components: int | None = None
    turns: bool = False
    """Whether values of one channel or node move those of another: no limit of explicit steps is told then."""
    timed: bool = False
    """Whether it depends on time."""
    placed: bool = False
    """Whether it depends on the nodes."""
    time: float = 0.0
    _average: _Averages | None = None
    _x: Array | None = None

    def __init__(
        self,
        function: Callable[..., Array],
        interval: Any,
        *,
        derivative: Callable[..., Array] | None = None,
        bound: float | None = None,
        potential: Callable[..., Array] | None = None,
        components: int | None = None,
        average: Affinity | None = None,
        name: str = "",
    ) -> None:
        if not is_function(function):
            raise InputError(f"function: got {kind_of(function)}, expected a callable of an array")
        for what, given in (("derivative", derivative), ("potential", potential)):
            if given is not None and not is_function(given):
                raise InputError(f"{what}: got {kind_of(given)}, expected a callable of an array")
        if potential is not None and (components is not None or average is not None):
            raise InputError("potential: got one for a reaction that is not pointwise, expected none")
        if components is not None:  # of others checkpoints know nothing that they did not
            self.components, self.turns = check_integer("components", components, minimum=2), True
        if average is not None:
            self._average, self.turns = _Averages(check_affinity(average, "average")), True
        count = count_arguments("function", function, _ARGUMENTS, most=3 if average is None else 4)
        if count - (average is not None) not in (1, 2, 3):
            raise InputError(f"function: got a callable of {count} argument, expected one of u and its averages")
        if count - (average is not None) > 1:
            self.timed, self.placed = True, count - (average is not None) == 3
        self._function, self._derivative, self._potential = function, derivative, potential
        self.name = check_text("name", name) or str(getattr(function, "__name__", type(function).__name__))
        self.interval = _checked_interval(interval, self.components)
        if bound is None and (derivative is None or self.timed):
            why = "for a reaction that depends on t" if self.timed else "without a derivative"
            more = "it" if self.timed else "one of them"
            raise InputError(f"bound: got none {why}, expected {more}, for the limits of steps")
        self._stated = bound
        self.bound = math.nan if bound is None else check_number("bound", bound, minimum=0)
        if not self.placed:
            self._check()

    # ---- what it is of: the time, the nodes, averages

    @property
    def average(self) -> Affinity | None:
        """The affinity that averages u, or None; None for a sum of reactions too, see `averages`."""
        return None if self._average is None else self._average.affinity

    @property
    def averages(self) -> list[Affinity]:
        """`average` in a list, empty without one; of a sum of reactions those of all its parts."""
        return [] if self._average is None else [self._average.affinity]

    def when(self, t: float) -> Reaction:
        """Return the reaction at time t."""
        if not self.timed or t == self.time:
            return self
        result = copy.copy(self)
        result.time = float(t)
        return result

    def on(self, affinity: Affinity) -> Reaction:
        """Return the reaction at the nodes of a flow, or raise `InputError`."""
        shape = affinity.domain.shape
        if self.average is not None and self.average.domain.shape != shape:
            raise InputError(
                f"reaction: the average of {self!r} is on nodes of shape {self.average.domain.shape}, expected "
                f"{shape}, the domain of the flow"
            )
        if not self.placed or self._x is not None:
            return self
        result = copy.copy(self)
        nodes = affinity.domain.nodes
        result._x = nodes.reshape(*shape, nodes.shape[-1])
        result._check()
        return result

    def _called(self, function: Callable[..., Array], u: Array, *seen: Array, x: Array | None = None) -> Array:
        x = self._x if x is None else x
        given: tuple[Any, ...] = (self.time,) if self.timed else ()
        if x is not None:
            own = x.ndim - 1 + (self.components is not None)
            beside = (1,) * (u.ndim - own)  # channels that x does not depend on
            given += (kept_like(x.reshape(*x.shape[:-1], *beside, x.shape[-1]), u),)
        try:
            return function(*given, u, *seen)
        except (TypeError, ValueError, IndexError, RuntimeError) as error:
            if isinstance(error, NlflowError) or (isinstance(error, RuntimeError) and type(error) is not RuntimeError):
                raise  # a device without memory is no fault of the function
            words = {id(self._derivative): "derivative", id(self._potential): "potential"}
            shapes, hint = f"u of shape {tuple(u.shape)}", ""
            if x is not None:
                shapes, hint = f"x of shape {tuple(given[-1].shape)} and {shapes}", "; write x[..., 0] for a coordinate"
            raise InputError(
                f"{words.get(id(function), 'function')}: that of {self!r} fails for {shapes} ({shortened(error)}), "
                f"expected {_ARGUMENTS}, for arrays of any shape{hint}"
            ) from error

    def _seen(self, u: Array) -> tuple[Array, ...]:
        return () if self.average is None else (self.average._average(u),)

    def function(self, u: Array) -> Array:
        """Return R(u), unchecked."""
        return self._called(self._function, u, *self._seen(u))

    @property
    def derivative(self) -> Callable[[Array], Array] | None:
        """R' of u, or None."""
        given = self._derivative
        return None if given is None else lambda u: self._called(given, u, *self._seen(u))

    @property
    def potential(self) -> Callable[[Array], Array] | None:
        """F of u, or None."""
        given = self._potential
        return None if given is None else lambda u: self._called(given, u)

    def __call__(self, u: Array) -> Array:
        """Return R(u); `InputError` for another shape or dtype, `NumericalError` where it is not finite though u is."""
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):  # found out below
            value = self.function(u)
        self._check_like(value, u)
        here = is_numpy(u) or (str(u.device) == "cpu" and not recorded.get())
        if here and not _finite(value) and _finite(u):
            at = scalar(u[~namespace(u).isfinite(value)][0])
            raise NumericalError(
                f"reaction: {self!r} is not finite at u = {at:.4g}; use a smaller dt or RungeKutta(), or a reaction "
                "that keeps the signal bounded"
            )
        return value

    def jacobian(self, u: Array, v: Array) -> Array:
        """Return the derivative of R at `u` along `v`."""
        if self.derivative is None:
            return difference(self, u, v)
        slopes, moved = self.derivative(u), [v, *self._seen(v)]
        if self.components is None:
            parts = [slopes] if self.average is None else [slopes[..., 0], slopes[..., 1]]
            return sum((slope * w for slope, w in zip(parts, moved, strict=True)), 0 * v)
        return (slopes @ namespace(v).concat(moved, axis=-1)[..., None])[..., 0]

    def __add__(self, other: Any) -> Reaction:
        """Return the sum of two reactions, on the values that are in both intervals."""
        return SumOfReactions(self, other) if isinstance(other, Reaction) else NotImplemented

    def clipped(self, u: Array) -> Array:
        """Clip to the interval."""
        xp, (low, high) = namespace(u), self.interval
        if isinstance(low, float):
            return xp.clip(u, low, high)
        return xp.minimum(xp.maximum(u, kept_like(low, u)), kept_like(high, u))

    def check_start(self, name: str, u: Array) -> None:
        """Raise `InputError` unless the values of `u` lie in the interval, up to rounding."""
        if self.components is not None and (u.ndim < 2 or int(u.shape[-1]) != self.components):
            raise InputError(
                f"{name}: got shape {tuple(u.shape)}, expected {self.components} channels in the last axis, the "
                f"components of the reaction {self!r}"
            )
        xp = namespace(u)
        size = _width(self.interval)
        off = xp.abs(u - self.clipped(u))
        if scalar(xp.max(off - constant_like(1e-6 * size, u))) > 0:
            low, high = scalar(xp.min(u)), scalar(xp.max(u))
            raise InputError(
                f"{name}: got values from {low:.6g} to {high:.6g}, expected them in {_said(self.interval)}, where the "
                f"slope of the reaction {self!r} is known; give it an interval that holds them"
            )
        if not (self.turns or self.placed) and u.ndim > 1:
            flat = xp.reshape(u, (-1,))
            alone = xp.reshape(self(flat), tuple(u.shape))
            whole = self(u)
            largest, off = numbers(xp.max(xp.abs(whole)), xp.max(xp.abs(whole - alone)))
            if off > float(xp.finfo(u.dtype).eps) ** 0.5 * (largest + self.bound * float(size)):
                raise InputError(
                    f"reaction: {self!r} is not element by element: values of a signal of shape {tuple(u.shape)} move "
                    "others than they do alone; expected R(u) of each value by itself, or override velocity() of the "
                    "flow for what mixes channels"
                )

    def bound_between(self, low: float, high: float) -> float:
        """Return a bound of |R'| for values from low to high, which may lie beyond the interval of an R of u alone."""
        if self.turns or self.timed or self.placed:
            return self.bound
        slack = 1e-9 * (self.interval[1] - self.interval[0])
        if self.interval[0] - slack <= low and high <= self.interval[1] + slack:
            return self.bound
        places = np.linspace(min(low, self.interval[0]), max(high, self.interval[1]), _FINE)
        with np.errstate(over="ignore", invalid="ignore"):
            slope = self.derivative
            steep = difference(self.function, places, np.ones(_FINE)) if slope is None else slope(places)
        return max(self.bound, float(np.abs(steep).max()))

    def word(self) -> str:
        """Return its name and a digest of its values."""
        samples = self._samples()
        times = (self.time, self.time + 0.3819660112501051, self.time + 1.0) if self.timed else (self.time,)
        values = [value for t in times for value in np.ravel(self.when(t)._at(self._function, *samples))]
        said = " ".join(f"{value:.9e}" for value in values)
        return f"{self!r} {hashlib.sha256(said.encode()).hexdigest()}"

    # ---- what is claimed of it, compared at places of its interval

    def _samples(self, count: int = _SAMPLES) -> tuple[Floats, ...]:
        """Return places in the interval, none of them where corners usually are: of u, and of its averages."""
        low, high = self.interval
        turn = 0.6180339887498949
        own = self.components or 1
        columns = own * (1 if self.average is None else 2)
        turns = turn if columns == 1 else turn * np.sqrt(1.0 + np.arange(columns))  # so that they fill the box
        shares = np.modf((np.arange(count)[:, None] + 0.5) * turns)[0]
        parts = [shares[:, i : i + own] for i in range(0, columns, own)]
        return tuple(low + (high - low) * (part if self.components else part[:, 0]) for part in parts)

    def _at(self, function: Callable[..., Array], *samples: Array) -> Array:
        """Return what a function that was given says at samples, at as many of the nodes where it depends on them."""
        if not self.placed:
            return self._called(function, *samples)
        assert self._x is not None
        nodes = self._x.reshape(-1, self._x.shape[-1])
        rows = np.linspace(0, len(nodes) - 1, len(samples[0])).astype(int)
        return self._called(function, *samples, x=nodes[rows])

    def _check_like(self, value: Any, u: Array, what: str = "", shape: tuple[int, ...] | None = None) -> None:
        expected = tuple(u.shape) if shape is None else shape
        if tuple(getattr(value, "shape", ())) != expected or not hasattr(value, "dtype"):
            got = type(value).__name__ if not hasattr(value, "shape") else f"shape {tuple(value.shape)}"
            meant = ", that of the signal" if shape is None else ""
            raise InputError(f"{what or 'reaction'}: {self!r} returns {got}, expected shape {expected}{meant}")
        same_kind(f"{what or 'reaction'}: what {self!r} returns", value, u)

    def _check(self) -> None:
        self._check_function()
        if self._derivative is not None:
            self._check_derivative(self._derivative)
        self.bound = self._checked_bound(self._stated)
        if self._potential is not None:
            self._check_potential(self._potential)

    def _check_function(self) -> None:
        # Where NumPy's functions of t are in it, as np.sin(t) * u, the dtype of u is kept in float64 alone.
        for dtype in (np.float64,) if self.timed else (np.float32, np.float64):
            with np.errstate(over="ignore", invalid="ignore", divide="ignore"):  # found out below
                samples = [part.astype(dtype) for part in self._samples()]
                kept = [part.copy() for part in samples]
                value = self._at(self._function, *samples)
            self._check_like(value, samples[0])
            if not all(map(np.array_equal, samples, kept)):
                raise InputError(f"function: {self!r} changes its argument in place, expected a new array")
        if not _finite(value):
            raise InputError(f"function: {self!r} is not finite on its interval, expected finite values there")

    def _slopes(self, function: Callable[..., Array], samples: tuple[Floats, ...]) -> Floats:
        """Return central differences, exact to about 1e-7 of the largest slope for smooth functions.

        Along each component of u, and of its averages, in the last axis where there are several.
        """
        columns = []
        for index, part in enumerate(samples):
            units = np.eye(part.shape[-1]) if self.components else np.ones((1, 1))
            for unit in units:
                step = 1e-5 * _width(self.interval)
                move = step * unit if self.components else float(step)
                ahead, behind = (
                    self._at(function, *(p + sign * move if i == index else p for i, p in enumerate(samples)))
                    for sign in (1, -1)
                )
                length = float(np.max(move))
                columns.append(np.asarray((ahead - behind) / (2 * length)))
        return columns[0] if len(columns) == 1 else np.stack(columns, axis=-1)

    def _agree(self, what: str, claimed: Any, found: Floats, samples: Floats) -> None:
        """Raise `InputError` where what is claimed differs from differences at more places than corners explain."""
        both = np.maximum(np.abs(found), np.abs(claimed)).reshape(len(found), -1)
        scale = np.maximum(both.max(axis=0), 1e-2 * both.max())  # of each entry of a matrix
        wrong = ~(np.abs(claimed - found).reshape(both.shape) <= 1e-5 * scale)
        if np.count_nonzero(wrong.any(axis=1)) > _KINKS:
            first = int(np.argmax(wrong.any(axis=1)))
            entry = int(np.argmax(wrong[first]))
            got, expected = (np.reshape(values, both.shape)[first, entry] for values in (claimed, found))
            at = ", ".join(f"{value:.6g}" for value in np.atleast_1d(samples[first]))
            where = "" if found.ndim == 1 else f" in entry {tuple(map(int, np.unravel_index(entry, found.shape[1:])))}"
            raise InputError(
                f"{what}: it disagrees with the function of {self!r}: at u = {at} got {float(got):.6g}{where}, "
                f"expected about {float(expected):.6g}"
            )

    def _check_derivative(self, derivative: Callable[..., Array]) -> None:
        samples = self._samples()
        found = self._slopes(self._function, samples)
        claimed = self._at(derivative, *samples)
        self._check_like(claimed, samples[0], "derivative", None if found.ndim == 1 else found.shape)
        self._agree("derivative", claimed, found, samples[0])

    def _check_potential(self, potential: Callable[..., Array]) -> None:
        samples = self._samples()
        self._check_like(self._at(potential, *samples), samples[0], "potential")
        self._agree("potential", -self._slopes(potential, samples), self._at(self._function, *samples), samples[0])

    def _sizes(self, slopes: Floats) -> Floats:
        """Return the norms of slopes at samples, those along u and along its averages added up."""
        if self.components is None:
            return np.asarray(np.abs(slopes) if self.average is None else np.abs(slopes).sum(axis=-1))
        parts = np.split(slopes, 1 if self.average is None else 2, axis=-1)
        return np.asarray(sum(np.linalg.norm(part, 2, axis=(-2, -1)) for part in parts))

    def _checked_bound(self, bound: float | None) -> float:
        if bound is None:
            assert self._derivative is not None
            samples = self._samples(_FINE)
            if len(samples) == 1 and self.components is None:
                samples = (np.linspace(*self.interval, _FINE),)
            elif (columns := (self.components or 1) * len(samples)) <= _CORNERS:  # slopes are often largest there
                ends = np.array(list(itertools.product((0.0, 1.0), repeat=columns)))
                low, high = self.interval
                corners = np.split(ends, len(samples), axis=1)
                at = [low + (high - low) * (c if self.components else c[:, 0]) for c in corners]
                samples = tuple(np.concatenate(pair) for pair in zip(samples, at, strict=True))
            return float(self._sizes(self._at(self._derivative, *samples)).max())
        bound = check_number("bound", bound, minimum=0)
        steepest = float(self._sizes(self._slopes(self._function, self._samples())).max())
        if steepest > bound * (1 + 1e-5) + 1e-300:
            raise InputError(f"bound: got {bound:g}, but {self!r} has a slope of {steepest:.6g} on its interval")
        return bound

    def __repr__(self) -> str:
        low, high = (np.atleast_1d(end) for end in self.interval)
        pairs = [f"{all_digits(a)}, {all_digits(b)}" for a, b in zip(low, high, strict=True)]
        return f"{self.name}({pairs[0] if len(pairs) == 1 else ', '.join(f'({pair})' for pair in pairs)})"


@underflowing
class SumOfReactions(Reaction):
    """The sum of two reactions."""

    def __init__(self, first: Reaction, second: Reaction) -> None:
        counts = {one.components for one in (first, second)} - {None}
        if len(counts) > 1:
            raise InputError(f"reaction: got {first!r} and {second!r}, expected the same number of components")
        pairs = zip((np.maximum, np.minimum), first.interval, second.interval, strict=True)
        low, high = (pick(a, b) for pick, a, b in pairs)
        if not np.all(low < high):
            raise InputError(
                f"reaction: got {first!r} and {second!r}, expected intervals that overlap; the signal must stay where "
                "both are known"
            )
        self.interval = (float(low), float(high)) if np.ndim(low) == 0 else (low, high)
        self.components = next(iter(counts), None)
        self.name = f"{first!r} + {second!r}"
        self._take(first, second)
        self.bound = first.bound + second.bound
        if not (self.turns or self.timed) and self.derivative is not None:
            self.bound = float(np.abs(self.derivative(np.linspace(low, high, _FINE))).max())

    def _take(self, first: Reaction, second: Reaction) -> None:
        self.parts = (first, second)
        self.turns, self.timed = first.turns or second.turns, first.timed or second.timed
        self.placed = first.placed or second.placed

    def _of(self, first: Reaction, second: Reaction) -> Reaction:
        result = copy.copy(self)
        result._take(first, second)
        return result

    def when(self, t: float) -> Reaction:
        return self._of(*(one.when(t) for one in self.parts)) if self.timed else self

    def on(self, affinity: Affinity) -> Reaction:
        return self._of(*(one.on(affinity) for one in self.parts))

    @property
    def averages(self) -> list[Affinity]:
        return [affinity for one in self.parts for affinity in one.averages]

    def function(self, u: Array) -> Array:
        first, second = self.parts
        return first.function(u) + second.function(u)

    @property
    def derivative(self) -> Callable[[Array], Array] | None:
        slopes = [one.derivative for one in self.parts]
        return None if self.turns or None in slopes else lambda u: sum(slope(u) for slope in slopes)  # type: ignore[misc]

    @property
    def potential(self) -> Callable[[Array], Array] | None:
        found = [one.potential for one in self.parts]
        return None if None in found else lambda u: sum(one(u) for one in found)  # type: ignore[misc]

    def jacobian(self, u: Array, v: Array) -> Array:
        first, second = self.parts
        return first.jacobian(u, v) + second.jacobian(u, v)

    def word(self) -> str:
        return " + ".join(one.word() for one in self.parts)

    def __repr__(self) -> str:
        return self.name


def _finite(values: Array) -> bool:
    xp = namespace(values)
    return bool(xp.all(xp.isfinite(values)))


def _width(interval: tuple[Any, Any]) -> Any:
    """Return the length of an interval, or of one for each component."""
    return interval[1] - interval[0]


def _said(interval: tuple[Any, Any]) -> str:
    low, high = interval
    return str([low, high] if isinstance(low, float) else np.stack([low, high], axis=-1).tolist())


def _checked_interval(interval: Any, components: int | None) -> tuple[Any, Any]:
    """Return the ends of an interval: two numbers, or two arrays of one for each component."""
    check_detached("interval", interval)
    try:
        rows = np.shape(interval) if isinstance(interval, list | tuple | np.ndarray) else ()
    except ValueError as error:  # rows of unequal lengths
        raise InputError(f"interval: got {shortened(repr(interval))}, expected a pair (low, high)") from error
    if components is not None and len(rows) == 2:
        if rows != (components, 2):
            raise InputError(f"interval: got shape {rows}, expected a pair for each of {components} components")
        pairs = [_checked_interval(tuple(pair), None) for pair in interval]
        return np.array([low for low, _ in pairs]), np.array([high for _, high in pairs])
    return check_range("interval", interval)
