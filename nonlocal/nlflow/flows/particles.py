"""Particles that move."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from nlflow._array import (
    Array,
    Floats,
    check_real,
    constant_like,
    is_numpy,
    is_tensor,
    kept_like,
    namespace,
    scalar,
    to_numpy,
    underflowing,
)
from nlflow.affinities.pair_fields import PairFields
from nlflow.affinities.unlinked import Unlinked
from nlflow.domains import Points
from nlflow.errors import (
    InputError,
    NumericalError,
    check_array,
    check_detached,
    check_floats,
    check_number,
    check_tensor,
    checked_call,
    is_function,
    kind_of,
)
from nlflow.flows.noise import Noise
from nlflow.flows.second_order import SecondOrder, response
from nlflow.functionals.constraint import TermError
from nlflow.kernels import RadialKernel
from nlflow.kernels.interactions import Interaction

_UNSEEN = {4: 1e-9, 8: 1e-18}
"""By the bytes of a number: of the forces of a pair at half a distance and beyond, what is left out at it."""
_AT_HALF = (1e-6, 0.05)  # of the forces from a twentieth of half a period on: what may be left at half a period
_MEETING = 1e-9  # distance at which a singular force is looked at
_PATIENCE = 64  # refused steps after which particles are said to collide
_SLOPES = {4: 2e-3, 8: 1e-5}  # relative difference of a gradient from differences of its function
_STEPS = (1 / 512, 1 / 64, 1 / 8, 1.0)  # of those differences, over that which suits slow functions


class CollisionError(TermError):
    """Two particles meet where their force is infinite, however short a step is."""


@dataclass(frozen=True)
class External:
    """A potential V(x) that acts on each particle.

    Parameters
    ----------
    value : callable
        Positions (N, d) to V at each, (N,).
    gradient : callable
        Positions (N, d) to the gradient at each, (N, d).

    Examples
    --------
    >>> from nlflow.flows import External
    >>> trap = External(lambda x: (x**2).sum(-1) / 2, lambda x: x)
    """

    value: Callable[[Array], Array]
    gradient: Callable[[Array], Array]

    def __post_init__(self) -> None:
        for name in ("value", "gradient"):
            if not is_function(getattr(self, name)):
                raise InputError(f"{name}: got {kind_of(getattr(self, name))}, expected a function of positions")

    def check(self, x: Array) -> None:
        """Raise `InputError` where the gradient at x is not that of the values.

        Not seen are errors below 1e-5 of the steepest slope along an axis, 2e-3 in float32, and below the rounding of
        the values. A potential that swings within 1e-7 of the largest position, 1e-4 in float32, may be refused.
        """
        xp = namespace(x)
        values, slopes = self.value(x), self.gradient(x)
        for name, found, shape in (("value", values, x.shape[:1]), ("gradient", slopes, x.shape)):
            check_array(f"potential: what its {name} gives", found)
            if tuple(getattr(found, "shape", ())) != tuple(shape):
                raise InputError(
                    f"potential: its {name} gave shape {tuple(getattr(found, 'shape', ()))}, expected {tuple(shape)}"
                )
        for c in range(int(x.shape[1])):
            steepest = scalar(xp.max(xp.abs(slopes[:, c])))
            allowed = _SLOPES[x.dtype.itemsize] * steepest
            finer: list[tuple[Array, float]] = []
            for expected, unsure in self._differences(x, c, values, steepest):
                off = scalar(xp.max(xp.abs(expected - slopes[:, c])))
                # Steps that are too long for a fast function are told by shorter ones.
                known = all(scalar(xp.max(xp.abs(expected - one))) <= unsure + other for one, other in finer)
                finer.append((expected, unsure))
                if off <= allowed + unsure or not known:
                    continue
                raise InputError(
                    f"potential: its gradient differs by {off:.3g} from differences of its value along axis {c}, where "
                    f"slopes are up to {steepest:.3g}; correct one of them"
                )

    def _differences(self, x: Array, c: int, values: Array, steepest: float) -> list[tuple[Array, float]]:
        """Return slopes along an axis by extrapolated differences of ever longer steps, with bounds of their errors."""
        xp, eps = namespace(x), float(namespace(x).finfo(x.dtype).eps)
        axis = constant_like(np.eye(int(x.shape[1]))[c], x)
        size = scalar(xp.max(xp.abs(x[:, c]))) or 1.0
        result: list[tuple[Array, float]] = []
        highest, longest = scalar(xp.max(xp.abs(values))), eps ** (1 / 3) * size

        def around(h: float) -> tuple[Array, Array, Array]:
            after, before = x + h * axis, x - h * axis
            return self.value(after), self.value(before), after[:, c] - before[:, c]

        with np.errstate(all="ignore"):
            above, below, _ = around(4 * longest)
            curved = scalar(xp.max(xp.abs((above - values) + (below - values)))) / (4 * longest) ** 2
            for h in (factor * longest for factor in _STEPS):
                # The rounding of the values, that of x within them, and that of the place where the slope is.
                rounding = (highest + size * steepest) / h + (size * curved if math.isfinite(curved) else 0.0)
                found = [(above - below) / length for above, below, length in (around(h), around(2 * h), around(4 * h))]
                apart = max(scalar(xp.max(xp.abs(one - two))) for one, two in pairwise(found))
                result.append(((4 * found[0] - found[1]) / 3, 4 * (apart + eps * rounding)))
        return result


def _met(x: Floats, w: Floats) -> float:
    """Return sum_{i /= j} w_i w_j over particles at the same place."""
    places = np.unique(x, axis=0, return_inverse=True)[1].ravel()
    several = np.bincount(places)[places] > 1
    if not several.any():
        return 0.0
    return float(np.sum(np.bincount(places[several], w[several]) ** 2) - np.sum(w[several] ** 2))


def trap(stiffness: float = 1.0, centre: Any = 0.0) -> External:
    """Return the potential stiffness |x - centre|^2 / 2."""
    strength = check_number("stiffness", stiffness)
    middle = check_floats("centre", centre, ndim=(0, 1))

    return External(partial(_well, strength, middle), partial(_pull, strength, middle))


# By name: functions that `trap` makes could not be pickled.


def _well(stiffness: float, centre: Any, x: Array) -> Array:
    return 0.5 * stiffness * namespace(x).sum(_away(centre, x) ** 2, axis=-1)


def _pull(stiffness: float, centre: Any, x: Array) -> Array:
    return stiffness * _away(centre, x)


def _away(centre: Floats, x: Array) -> Array:
    if centre.ndim and len(centre) != x.shape[-1]:
        raise InputError(f"centre: got {len(centre)} coordinates, expected {x.shape[-1]}, as many as particles have")
    return x - kept_like(centre, x)


@checked_call
@underflowing
class ParticleFlow(SecondOrder):
    r"""Interacting particles, dx_i/dt = -sum_j w_j grad W(x_i - x_j) - grad V(x_i), in any dimension.

    The gradient flow of E(x) = 1/2 sum_{i /= j} w_i w_j W(\|x_i - x_j\|) + sum_i w_i V(x_i) in the metric sum_i w_i
    \|dx_i\|^2 (Carrillo, McCann and Villani 2003, doi 10.4171/RMI/376). With `friction` the signal is positions and
    velocities side by side, (N, 2 d) (D'Orsogna, Chuang, Bertozzi and Chayes 2006, doi 10.1103/PhysRevLett.96.104302)::

        dx_i/dt = v_i,   dv_i/dt = -grad E_i - (friction + drag |v_i|^2) v_i

    `Noise` moves positions, with inertia velocities; with w = 1/N its beta is N times that of one particle. A velocity
    takes up to O(N^2 d) time, and O(N d) memory.

    Parameters
    ----------
    particles : array_like of shape (N, d)
        They give the dtype and the shape; the start goes to `solve`.
    interaction : Interaction or RadialKernel, optional
        W, such as ``Morse()`` or ``PowerLaws(2, 0)``; a kernel repels.
    weights : array_like of shape (N,), optional
        w_i > 0; 1/N for all by default.
    potential : External, optional
        V, such as `trap`.
    box : float or sequence of d floats, optional
        Periods, None or infinity for axes without one; positions in the box are those of `wrapped`.
    friction : float, optional
        With a number, 0 too, particles have inertia; below 0, which needs a drag, it propels them.
    drag : float
        >= 0.

    Raises
    ------
    InputError
        For particles that coincide where the interaction is singular, for a box of less than twice the interaction's
        range, and for a gradient that is not that of the potential.

    Examples
    --------
    >>> import numpy as np
    >>> from nlflow import solve
    >>> from nlflow.flows import ParticleFlow
    >>> from nlflow.kernels import PowerLaws
    >>> x = np.random.default_rng(0).standard_normal((50, 2))
    >>> flow = ParticleFlow(x, PowerLaws(attraction=4, repulsion=2))
    >>> ring = solve(flow, x, t=60.0).final
    >>> np.round(np.linalg.norm(ring - ring.mean(axis=0), axis=1).std(), 3)  # r = 1/sqrt(3)
    np.float64(0.0)
    """

    def __init__(
        self,
        particles: Any,
        interaction: Interaction | RadialKernel | None = None,
        *,
        weights: Any = None,
        potential: External | None = None,
        box: Any = None,
        friction: float | None = None,
        drag: float = 0.0,
    ) -> None:
        x = check_array("particles", particles, ndim=2, hint="for one dimension a column, x[:, None]")
        count, d = (int(n) for n in x.shape)
        w = np.full(count, 1 / count) if weights is None else check_floats("weights", weights, ndim=1)
        domain = Points(np.arange(float(count)), w)
        super().__init__(Unlinked(domain, x), "l2", None, evolving=False, every=1)
        self.weights, self.dimensions, self._like = w, d, x[:1]
        self.interaction = _as_interaction(interaction)
        self.potential = potential
        if potential is not None and not isinstance(potential, External):
            raise InputError(f"potential: got {kind_of(potential)}, expected an External(value, gradient)")
        self.friction = None if friction is None else check_number("friction", friction)
        self.drag = check_number("drag", drag, minimum=0)
        if self.friction is None and self.drag:
            raise InputError(f"drag: got {self.drag:g} for particles without inertia; give friction=0.0 as well")
        if self.friction is not None and self.friction < 0 and self.drag == 0:
            raise InputError(
                f"friction: got {self.friction:g} with drag=0, with which velocities grow without end; give a drag > 0"
            )
        self.box = None if box is None else _periods(box, d)
        self._met: dict[tuple[int, int], int] = {}  # how often two particles were found to collide
        if self.interaction is not None:
            self._check_box()
            unseen = _UNSEEN[x.dtype.itemsize]
            self._forces = PairFields(self.interaction.pull, self.interaction.seen(unseen), self.box)
            rest, reach = self.interaction.beside_far
            self._energies = PairFields(rest, reach, self.box)
            self._check_apart("particles", self.wrapped(x), InputError)
        if potential is not None:
            potential.check(x)

    def _check_box(self) -> None:
        if self.box is None or self.interaction is None or not (self.box > 0).any():
            return
        reach, least = self.interaction.seen(*_AT_HALF), float(self.box[self.box > 0].min())
        if reach > least / 2 * (1 + 1e-9):
            raise InputError(
                f"box: got a period of {least:g}, expected at least {2 * reach:g}, twice the range of "
                f"{self.interaction!r}: beyond half a period the nearest image is another; use a larger box, or an "
                f"interaction with a cutoff of {least / 2:g}"
            )

    # ---- positions and velocities

    def positions(self, u: Array) -> Array:
        """Return the positions in a signal, (N, d)."""
        return self._of_particles(u)[:, : self.dimensions]

    def velocities(self, u: Array) -> Array:
        """Return the velocities of the particles, (N, d)."""
        return self._of_particles(u)[:, self.dimensions :] if self.inertial else self.velocity(u)

    def _of_particles(self, u: Array) -> Array:
        check_real("u", u)
        got = tuple(u.shape)
        if got not in ((len(self.weights), self.dimensions), self._shape[0]):
            raise InputError(f"u: got shape {got}, expected {self._shape[0]}, {self._shape[1]}")
        return u

    @property
    def inertial(self) -> bool:
        return self.friction is not None

    def parts(self, state: Array) -> tuple[Array, Array]:
        return state[:, : self.dimensions], state[:, self.dimensions :]

    def joined(self, displacement: Array, velocity: Array) -> Array:
        return namespace(displacement).concat([displacement, velocity], axis=1)

    def wrapped(self, u: Array) -> Array:
        """Return the positions in the box, in [0, period)."""
        x = self.positions(u)
        if self.box is None:
            return x
        box, xp = kept_like(self.box, x), namespace(x)
        period = xp.where(box > 0, box, xp.ones_like(box))
        inside = x - period * xp.floor(x / period)
        inside = xp.where(inside < period, inside, 0 * inside)  # rounding takes -1e-20 to the period itself
        return xp.where(box > 0, inside, x)

    def momentum(self, u: Array) -> Floats:
        """Return sum_i w_i v_i, shape (d,), in float64."""
        return np.asarray(self.weights @ to_numpy(self.velocities(u)).astype(np.float64))

    # ---- what moves them

    def acceleration(self, x: Array) -> Array:
        """Return -grad E of each particle over its weight, at positions (N, d)."""
        self.applications += 1
        xp, total = namespace(x), None
        if self.interaction is not None:
            inside = self.wrapped(x)
            self._check_apart("particles", inside, NumericalError)
            weights = self.weights if is_numpy(x) else kept_like(self.weights, x)
            total = -self._forces.pulls(inside, inside, weights)
            if not bool(xp.all(xp.isfinite(total))):
                raise self._overflowed(inside, total)
        if self.potential is not None:
            pulled = self.potential.gradient(x)
            total = -pulled if total is None else total - pulled
        return xp.zeros_like(x) if total is None else xp.astype(total, x.dtype, copy=False)

    def velocity(self, u: Array) -> Array:
        if not self.inertial:
            return self.acceleration(u)
        x, v = self.parts(u)
        return self.joined(v, self.acceleration(x) - self.resistance(v) * v)

    def resistance(self, v: Array) -> Array | float:
        """Return friction + drag |v|^2 for velocities (N, d)."""
        friction = self.friction or 0.0
        return friction if self.drag == 0 else friction + self.drag * namespace(v).sum(v * v, axis=1, keepdims=True)

    def kicked(self, velocity: Array, acceleration: Array, dt: float) -> Array:
        if self.drag == 0:
            kept, gained = response(self.friction or 0.0, dt)
            return kept * velocity + gained * acceleration
        return self._slowed(self._slowed(velocity, dt / 2) + dt * acceleration, dt / 2)

    def _slowed(self, v: Array, dt: float) -> Array:
        """Return velocities after a time in which friction and drag alone act, exactly.

        q = |v|^2 has q' = -2 (friction + drag q) q, which is a logistic equation.
        """
        xp, friction = namespace(v), self.friction or 0.0
        share = dt if friction == 0 else -math.expm1(-2 * friction * dt) / (2 * friction)
        slower = xp.sqrt(1 + 2 * self.drag * share * xp.sum(v * v, axis=1, keepdims=True))
        return math.exp(-friction * dt) * v / slower

    # ---- noise

    @property
    def dissipation(self) -> float:  # type: ignore[override]  # a number of the class elsewhere
        return 1.0 if self.friction is None else self.friction

    def check_noise(self, noise: Noise) -> None:
        if self.friction is None:
            return
        if not noise.additive:
            raise InputError("strength: got a function for particles with inertia, expected a number or an array")
        if noise.beta is not None and (self.friction <= 0 or self.drag > 0):
            raise InputError(
                f"beta: got {noise.beta:g} for particles of friction={self.friction:g} and drag={self.drag:g}, which "
                "have no temperature, expected a friction > 0 and no drag; give a strength"
            )

    def spread(self, white: Array) -> Array:
        if not self.inertial:
            return white
        still, moved = self.parts(white)
        return self.joined(0 * still, moved)

    # ---- what is lost

    @property
    def has_energy(self) -> bool:
        return self.friction is None or self.friction >= 0

    def energy(self, u: Array) -> float:
        """Return `total_energy`; NaN for a friction below 0."""
        return self.total_energy(u) if self.has_energy else math.nan

    def total_energy(self, u: Array) -> float:
        """Return E, and with inertia the kinetic energy sum_i w_i |v_i|^2 / 2, in float64."""
        x = np.asarray(to_numpy(self.wrapped(u)), np.float64)
        if not np.isfinite(x).all():
            return math.inf
        total, w = 0.0, self.weights
        if self.interaction is not None:
            self.applications += 1
            pairs = w @ self._energies.sums(x, x, w[:, None])[:, 0] + self.interaction.meeting * _met(x, w)
            total = float(pairs + self.interaction.far * (np.sum(w) ** 2 - np.sum(w * w))) / 2
        if self.potential is not None:
            total += float(w @ to_numpy(self.potential.value(self.positions(u))).astype(np.float64))
        if self.inertial:
            v = to_numpy(self.velocities(u)).astype(np.float64)
            total += float(w @ np.sum(v * v, axis=1)) / 2
        return total

    # ---- the contract

    def check_signal(self, name: str, value: Any) -> Array:
        u = super().check_signal(name, value)
        self._check_apart(name, self.wrapped(u), InputError)
        return u

    @property
    def _shape(self) -> tuple[tuple[int, ...], str]:
        what = "positions and velocities side by side" if self.inertial else "positions"
        return (len(self.weights), self.dimensions * (2 if self.inertial else 1)), f"{what} of the particles"

    def rebuilt(self, u: Array) -> Self:
        del u
        return self

    def given(self) -> list[Any]:
        return [repr(self), self.weights, self.potential]

    def __repr__(self) -> str:
        words = [f"{len(self.weights)} x {self.dimensions}", repr(self.interaction)]
        words += ["potential"] if self.potential is not None else []
        words += [f"box={self.box.tolist()}"] if self.box is not None else []
        words += [f"friction={self.friction!r}, drag={self.drag!r}"] if self.inertial else []
        words += [] if self.noise is None else [repr(self.noise)]
        return f"ParticleFlow({', '.join(words)})"

    # ---- collisions

    def _check_apart(self, name: str, inside: Array, kind: type[Exception]) -> None:
        """Raise unless all are apart, and farther than positions tell where the singular force draws them together."""
        if self.interaction is None or not self.interaction.singular or len(inside) < 2:
            return
        points = to_numpy(inside)
        if not np.isfinite(points).all():  # which the forces say
            return
        if float(self.interaction.slope(_MEETING)) > 0:
            distance, *pair = self._nearest(points)
            near = float(np.finfo(points.dtype).eps) ** (1 / 3) * float(np.ptp(points, axis=0).max())
            found = (pair[0], pair[1]) if distance < near or distance == 0 else None
        else:
            found = coinciding(points)
        if found is None:
            return
        self._met[found] = self._met.get(found, 0) + 1
        raise (CollisionError if self._met[found] > _PATIENCE else kind)(_collision(name, *found, self.interaction))

    def _nearest(self, points: NDArray[Any]) -> tuple[float, int, int]:
        """Return the least distance of two particles, and their numbers. O(N log N)."""
        from scipy.spatial import cKDTree

        found = cKDTree(points.astype(np.float64), boxsize=self.box).query(points.astype(np.float64), k=2)
        distances, others = np.asarray(found[0]), np.asarray(found[1])
        first = int(np.argmin(distances[:, 1]))
        low, high = sorted((first, int(others[first, 1])))
        return float(distances[first, 1]), low, high

    def _overflowed(self, inside: Array, total: Array) -> NumericalError:
        points = to_numpy(inside)
        wrong = int(np.argmax(~np.isfinite(to_numpy(total)).all(axis=1)))
        if not np.isfinite(points).all():
            return NumericalError(f"particles: particle {wrong} left the range of floats; use a shorter step")
        _, first, second = self._nearest(points)
        return NumericalError(_collision("particles", first, second, self.interaction))


def _collision(name: str, first: int, second: int, interaction: Interaction | None) -> str:
    return (
        f"{name}: particles {first} and {second} collide, where the force of {interaction!r} is infinite; soften it, "
        "as PowerLaws(..., softening=0.01) does, or move one of them"
    )


def coinciding(x: NDArray[Any]) -> tuple[int, int] | None:
    """Return the numbers of two points (N, d) at one place, or None."""
    order = np.lexsort(x.T)
    same = np.flatnonzero((np.diff(x[order], axis=0) == 0).all(axis=1))
    if not len(same):
        return None
    first, second = sorted(int(i) for i in order[same[0] : same[0] + 2])
    return first, second


def _as_interaction(given: Any) -> Interaction | None:
    if given is None or isinstance(given, Interaction):
        return given
    if isinstance(given, RadialKernel):
        return Interaction(given)
    raise InputError(f"interaction: got {kind_of(given)}, expected an Interaction, such as Morse(), or a radial kernel")


def _periods(box: Any, d: int) -> Floats:
    check_detached("box", box)
    if is_tensor(box):
        check_tensor("box", box)
    given = list(box) if isinstance(box, list | tuple) or getattr(box, "ndim", 0) > 0 else [box] * d
    if len(given) != d:
        raise InputError(f"box: got {len(given)} periods, expected {d}, one for each dimension")
    periods = [math.inf if p is None else check_number("box", p, minimum=0, strict=True, finite=False) for p in given]
    return np.array([0.0 if p == math.inf else p for p in periods])
