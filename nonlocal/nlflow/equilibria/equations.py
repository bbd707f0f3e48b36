"""A flow as equations F(x) = 0, x being the free entries of a signal and F their du/dt."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from nlflow._array import Array, Floats, check_untracked, constant_like, is_numpy, namespace, to_numpy
from nlflow.domains import Grid
from nlflow.errors import InputError, NumericalError
from nlflow.flows.flow import Flow, as_flow
from nlflow.flows.linear import LinearFlow
from nlflow.flows.spectrum import dense_operator
from nlflow.flows.sphere import SphereFlow
from nlflow.flows.systems import SystemFlow
from nlflow.functionals.constraint import components_of
from nlflow.functionals.krylov import gmres

DENSE = 600
"""Unknowns up to which the Jacobian is formed as a matrix."""
_TIMES = 0.1234567, 0.7390851, 1.6180340, 3.7, 12.345678, 98.7654, 1234.567, 23456.78  # looked at for changes
ALMOST, NONE = 1e-2, -1.0
"""Of the Jacobian: what a grid may hold a pattern by that is not moved along it; and for patterns that are moved."""
_NEUTRAL = 1e-6  # of the Jacobian: what a neutral direction may be moved by
RESTART = 80  # products of a Krylov space
_PUSHES = 400  # of laws by P, to find the stationary one
_ENTRIES = 2**25  # numbers that neutral directions of components may have beyond `DENSE` unknowns


def check_autonomous(given: Any, name: str = "flow") -> Flow:
    flow = as_flow(given, name)
    if isinstance(flow, SphereFlow):
        raise InputError(
            f"{name}: got a SphereFlow, whose signals stay on a sphere, expected one that moves in all directions; "
            "follow it with solve() until it is stationary (SteadyState)"
        )
    if flow.noise is not None:
        raise InputError(
            f"{name}: got one with {flow.noise!r}, which leaves nothing at rest, expected one without noise; follow it "
            "with solve(), or look at the flow without its noise"
        )
    if flow.evolving and flow.every > 1:
        raise InputError(
            f"{name}: got every={flow.every}, whose kernel is held for some steps, expected every=1, where du/dt is a "
            "function of u"
        )
    return flow


class Equations:
    """F(x) = du/dt at the free entries of a signal.

    Attributes
    ----------
    flow : Flow
    like : array
        A signal of the flow.
    weights : array of shape (n,)
        The flow's measure of each unknown; over nodes it sums to 1.
    free : array of bool
        Which entries of a signal are unknowns.
    """

    def __init__(self, flow: Flow, name: str, value: Any) -> None:
        self.flow = check_autonomous(flow)
        self.like = flow.check_signal(name, value)
        tracked = flow.tracked or getattr(self.like, "requires_grad", False)
        check_untracked(f"{name}, or what the flow is made of", tracked, "numbers without gradients")
        full = np.asarray(to_numpy(self.like), dtype=np.float64)
        self._held = full.copy()
        self.free = np.ones(full.shape, bool)
        if isinstance(flow, LinearFlow) and flow.terms.constraint is not None:
            mask = flow.terms.constraint.mask
            self.free = np.broadcast_to(~mask.reshape(mask.shape + (1,) * (full.ndim - mask.ndim)), full.shape).copy()
        measure = np.asarray(to_numpy(flow.measure(self.like)), dtype=np.float64)
        measure = measure.reshape(measure.shape + (1,) * (full.ndim - measure.ndim)) / flow.total(measure)
        self.weights: Floats = np.broadcast_to(measure, full.shape)[self.free].copy()
        self.start: Floats = full[self.free]
        self.single = self.like.dtype == namespace(self.like).float32
        self.rounding = 1e-6 if self.single else 1e-14
        if not is_numpy(self.like):
            self(self.start)  # refuses terms that ask for a gradient
        self._require_steady()
        self._linear: Floats | None = None
        self._sure = False  # whether the flow was found to be that and a local term

    def __len__(self) -> int:
        return len(self.start)

    def of(self, flow: Flow) -> Self:
        result = copy.copy(self)
        result.flow, result._sure = check_autonomous(flow), False
        for name in ("invariants", "shifts", "_moved", "laws_of_diffusion"):
            vars(result).pop(name, None)
        result._require_steady()
        return result

    def _require_steady(self) -> None:
        """Raise `InputError` where du/dt changes with time; terms that are called with t may not depend on it."""
        if not self.flow.timed:
            return
        probe = self._probe(0)
        first, others = self(probe), [self.of_time(t)(probe) for t in _TIMES]
        if all(self.norm(other - first) <= 1e2 * self.rounding * self.norm(first) for other in others):
            return
        raise InputError(
            f"flow: got {self.flow!r}, in which something depends on time, so that nothing stays at rest; give its "
            "terms as they are at one time, or follow it with solve()"
        )

    def of_time(self, t: float) -> Self:
        result = copy.copy(self)
        result.flow = self.flow.when(t)
        return result

    # ---- vectors and signals

    def signal(self, x: Floats) -> Array:
        full = self._held.copy()
        full[self.free] = x
        return constant_like(full, self.like)

    def _direction(self, v: Floats) -> Array:
        full = np.zeros_like(self._held)
        full[self.free] = v
        return constant_like(full, self.like)

    def _vector(self, signal: Array) -> Floats:
        return np.asarray(to_numpy(signal), dtype=np.float64)[self.free]

    def shaped(self, v: Any) -> Any:
        full = np.zeros(self.free.shape, dtype=np.asarray(v).dtype)
        full[self.free] = v
        return full

    def inner(self, v: Floats, w: Floats) -> float:
        return float(np.sum(self.weights * v * w))

    def norm(self, v: Floats) -> float:
        size = float(np.max(np.abs(v), initial=0.0))
        if not math.isfinite(size):
            return math.inf
        return size * math.sqrt(self.inner(v / size, v / size)) if size > 0 else 0.0

    @property
    def root(self) -> Floats:
        return np.asarray(np.sqrt(np.maximum(self.weights, self.weights.max(initial=0.0) * 1e-280)))

    # ---- F and its derivative

    def __call__(self, x: Floats) -> Floats:
        """Return F(x); NaN where it has no value."""
        counted = self.flow.applications
        try:
            with np.errstate(over="ignore", invalid="ignore"):
                found = self.flow.velocity(self.signal(x))
            check_untracked("a term of flow", getattr(found, "requires_grad", False), "numbers without gradients")
            return self._vector(found)
        except NumericalError:
            return np.full_like(x, np.nan)
        finally:
            self.flow.applications = counted

    def times(self, x: Floats, v: Floats) -> Floats:
        counted = self.flow.applications
        try:
            with np.errstate(over="ignore", invalid="ignore"):
                return self._vector(self.flow.jacobian(self.signal(x), self._direction(v)))
        finally:
            self.flow.applications = counted

    def cancelling(self, x: Floats) -> float:
        counted = self.flow.applications
        try:
            told = self.flow.tension(self.signal(x))
        except NumericalError:
            told = 0.0
        self.flow.applications = counted
        return max(told if math.isfinite(told) else 0.0, self.norm(self.times(x, x)))

    def _diffusing(self, x: Floats, v: Floats) -> float:
        """Return the size of the parts that cancel in the diffusion of a direction at x; 0 where it is not known."""
        # A direction is no signal: terms and mobilities have no value at it.
        if not isinstance(self.flow, LinearFlow):
            return 0.0
        with np.errstate(over="ignore", invalid="ignore"):
            size = self.flow.at(self.signal(x)).cancelling(self._direction(v))
        return size if math.isfinite(size) else 0.0

    # ---- the Jacobian as a matrix

    def matrix(self, x: Floats) -> Floats:
        for quick in (self._from_parts, self._side_by_side):
            if (found := quick(x)) is not None:
                return found
        return np.stack([self.times(x, e) for e in np.eye(len(x))], axis=1)

    def _from_parts(self, x: Floats) -> Floats | None:
        flow = self.flow
        if not isinstance(flow, LinearFlow) or flow.evolving or not self.free.all():
            return None
        if self._sure and self._linear is not None:
            return np.asarray(self._linear + self._local(x, self._linear))
        probe = np.random.default_rng(0).standard_normal(len(x))
        target = self.times(x, probe)
        for _ in range(2):
            if self._linear is None:
                operator = dense_operator(flow)  # of each channel alike, or of all together
                self._linear = np.asarray(-np.kron(operator, np.eye(len(x) // len(operator))), np.float64)
            linear = self._linear
            result = np.asarray(linear + self._local(x, linear))
            off = np.abs(result @ probe - target).max()
            size = max(np.abs(result).sum(axis=1).max(), self._diffusing(x, probe), 1e-300)
            if off <= 1e2 * self._noise(x) * size:
                self._sure = True
                return result
            self._linear = None  # that of a flow with another parameter
        return None

    def _side_by_side(self, x: Floats) -> Floats | None:
        """Return the Jacobian by one product with all directions as channels, of a flow that takes channels alike."""
        flow = self.flow
        one = (
            isinstance(flow, LinearFlow)
            and len(x) == flow.affinity.domain.size
            and self.like.ndim == len(flow.affinity.domain.shape)
            and flow._shape[0] is None
        )
        if not one or not isinstance(flow, LinearFlow) or flow.evolving or not self.free.all():
            return None
        if flow.terms.turns or flow.overridden("linear") or (flow.fidelity is not None and flow.fidelity.width > 1):
            return None
        shape = (*self.free.shape, len(x))
        counted = flow.applications
        signals = np.broadcast_to(x.reshape(*self.free.shape, 1), shape), np.eye(len(x)).reshape(shape)
        found = flow.jacobian(*(constant_like(np.ascontiguousarray(one), self.like) for one in signals))
        flow.applications = counted
        result = np.asarray(to_numpy(found), dtype=np.float64).reshape(len(x), len(x))
        probe = np.random.default_rng(0).standard_normal(len(x))
        off = np.abs(result @ probe - self.times(x, probe)).max()
        return result if off <= 1e2 * self._noise(x) * max(np.abs(result).sum(axis=1).max(), 1e-300) else None

    def _noise(self, x: Floats) -> float:
        """Return how far products are from linear, relative: rounding, and more where they are differences."""
        v, w = np.random.default_rng(2).standard_normal((2, len(x)))
        parts = self.times(x, v), self.times(x, w)
        size = max(self.norm(part) for part in parts)
        left = self.norm(self.times(x, v + w) - parts[0] - parts[1])
        return max(left / size if size > 0 else 0.0, 10 * self.rounding)

    def _local(self, x: Floats, linear: Floats) -> Floats:
        """Return what the Jacobian is beside a linear part, if it moves each node by its own channels alone."""
        nodes = self.flow.affinity.domain.size
        channels = len(x) // nodes
        blocks = np.zeros((nodes, channels, nodes, channels))
        own = np.arange(nodes)
        for channel in range(channels):
            ones = np.zeros((nodes, channels))
            ones[:, channel] = 1.0
            moved = self.times(x, ones.ravel()) - linear @ ones.ravel()
            blocks[own, :, own, channel] = moved.reshape(nodes, channels)
        return blocks.reshape(len(x), len(x))

    # ---- neutral directions

    @cached_property
    def invariants(self) -> list[tuple[Floats, Floats]]:
        """Pairs l, a such that l @ x is conserved, l @ a = 1, and a is constant on connected components."""
        # By what moves beside diffusion too: beside a fast one it may be no more than rounding.
        moved, slow = self._moved
        return self._laws_of(moved, slow)

    def unbalanced(self, x: Floats) -> float:
        """Return how much what moves beside diffusion moves a mean that diffusion conserves, over its size nearby."""
        _, slow = self._moved
        if not slow.any():
            return 0.0
        now, laws = self._beside_diffusion(x), self.laws_of_diffusion
        sizes = [float((np.abs(slow.reshape(len(slow), -1)) @ np.abs(law)).max()) for law in laws]
        return max(
            (abs(float(law @ now)) / size for law, size in zip(laws, sizes, strict=True) if size > 0), default=0.0
        )

    @cached_property
    def laws_of_diffusion(self) -> list[Floats]:
        moved, slow = self._moved
        return [law for law, _ in self._laws_of(moved - slow, 0 * slow)]

    @cached_property
    def _moved(self) -> tuple[Floats, Floats]:
        """Return du/dt of some signals near the start, and its part beside diffusion."""
        channels = self._held.size // self.flow.affinity.domain.size
        probes = [self._probe(seed) for seed in range(channels + 2)]
        shape = len(probes), -1, channels
        slow = [self._beside_diffusion(x) for x in probes]
        return np.reshape([self(x) for x in probes], shape), np.reshape(slow, shape)

    def _laws_of(self, moved: Floats, slow: Floats) -> list[tuple[Floats, Floats]]:
        """Return pairs l, a; see `invariants`."""
        if not len(self) or not (np.isfinite(moved).all() and moved.any(axis=(1, 2)).all()):
            return []
        domain, channels = self.flow.affinity.domain, moved.shape[2]
        items = self._of_nodes(np.arange(domain.size) // (domain.size // math.prod(domain.leading)))
        (parts, *others), weights = self._partitions(items), self.weights.reshape(-1, channels)
        # Below, what is left of a component is rounding, as it is of a node without neighbours.
        floor = 1e-3 * self.cancelling(self._probe(0)) if others else 0.0
        each = [self._conserved(moved, slow, part, weights, floor) for part in parts]
        if not all(each) and (laws := self._laws(parts)) is not None:
            laws = np.repeat(laws[:, None], channels, axis=1)
            again = [self._conserved(moved, slow, part, laws, floor) for part in parts]
            each = [one or other for one, other in zip(each, again, strict=True)]
        found = [pair for one in each for pair in one]
        for part in (part for parts in others for part in parts):
            for law, a in self._conserved(moved, slow, part, weights, floor):
                self._add(found, law, a)
        return found

    def _conserved(
        self, moved: Floats, slow: Floats, part: NDArray[np.intp], weights: Floats, floor: float
    ) -> list[tuple[Floats, Floats]]:
        """Return pairs l, a of a part of the nodes, l being the weights times a.

        `moved` is du/dt of some signals, `slow` its part beside diffusion.
        """
        allowed = 1e-5 if self.single else 1e-11
        own = weights[part]
        parts = own * moved[:, part]
        totals = np.maximum(np.abs(parts).sum(axis=(1, 2)), floor * float(np.abs(own).sum()))
        if not (totals > 0).all():
            return []
        slow = own * slow[:, part]
        sums = np.abs(slow).sum(axis=(1, 2))
        shares = [parts.sum(axis=1) / totals[:, None], slow.sum(axis=1) / np.where(sums > 0, sums, 1.0)[:, None]]
        _, sizes, mixes = np.linalg.svd(np.concatenate(shares))
        found = []
        for mix in mixes[sizes <= allowed]:
            law, direction = np.zeros((2, *moved.shape[1:]))
            law[part], direction[part] = own * mix, mix
            size = self.norm(direction.ravel())
            mass = float(np.sum(law * direction))
            if size > 0 and mass > 0:
                found.append((law.ravel() * size / mass, direction.ravel() / size))
        return found

    def _beside_diffusion(self, x: Floats) -> Floats:
        """Return what moves a linear flow beside diffusion; 0 where that is not known."""
        counted = self.flow.applications
        try:
            with np.errstate(over="ignore", invalid="ignore"):
                found = self.flow.beside_diffusion(self.signal(x)) if isinstance(self.flow, LinearFlow) else None
        finally:
            self.flow.applications = counted
        return np.zeros(len(x)) if found is None else self._vector(found)

    def _of_nodes(self, values: NDArray[Any]) -> NDArray[Any]:
        """Return one value for each node that is free."""
        nodes = self.flow.affinity.domain.size
        return values.reshape(nodes)[self.free.reshape(nodes, -1)[:, 0]]

    def _partitions(self, items: NDArray[Any]) -> list[list[NDArray[np.intp]]]:
        """Return the free nodes by connected components of each affinity, if not too many, and by items of a batch."""
        flow = self.flow
        affinities = [one.affinity for one in flow.functionals] if isinstance(flow, SystemFlow) else [flow.affinity]
        known = [components_of(one) for one in dict.fromkeys(affinities)]
        found: list[list[NDArray[np.intp]]] = []
        for labels in (*(self._of_nodes(one) for one in known if one is not None), items):
            names, numbers = np.unique(labels, return_inverse=True)
            if labels is not items and len(self) > DENSE and len(names) * len(self) > _ENTRIES:
                continue
            parts = np.split(np.argsort(numbers, kind="stable"), np.cumsum(np.bincount(numbers))[:-1])
            if not any(len(parts) == len(one) and all(map(np.array_equal, parts, one)) for one in found):
                found.append(parts)
        return found

    def _laws(self, parts: list[NDArray[np.intp]]) -> Floats | None:
        """Return the stationary law of P in each connected component, where pi P = pi is what a flow conserves."""
        flow = self.flow
        if not isinstance(flow, LinearFlow) or flow.evolving or flow.affinity.symmetric or not self.free.all():
            return None
        if flow.fidelity is not None or flow.terms.reaction is not None or not isinstance(flow.rate, float):
            return None
        affinity, nodes = flow.affinity, flow.affinity.domain.size
        labels, mass = np.zeros(nodes, np.intp), np.zeros(nodes)
        for number, part in enumerate(parts):
            labels[part], mass[part] = number, 1 / len(part)

        def system(law: Floats) -> Floats:
            """Return law (I - P) and what makes the mass of each component count, shape (N, D)."""
            signal = affinity.as_signal(law.reshape(*affinity.domain.shape, -1))
            pushed = np.asarray(to_numpy(affinity._push(signal)), np.float64).reshape(law.shape)
            sums = np.stack([np.bincount(labels, one, len(parts)) for one in law.T], axis=1)
            return law - pushed + mass[:, None] * sums[labels]

        try:
            if nodes <= DENSE:
                return np.asarray(np.linalg.solve(system(np.eye(nodes)), mass), np.float64)
            rtol = self.rounding if self.single else 10 * self.rounding
            solved = gmres(system, mass[:, None], None, rtol=rtol, maxiter=_PUSHES, restart=RESTART)
            return np.asarray(solved.x[:, 0], np.float64)
        except (NumericalError, np.linalg.LinAlgError):  # several closed classes, or rounding
            return None

    def _probe(self, seed: int) -> Floats:
        """Return a signal near the start that varies as noise does."""
        noise = np.random.default_rng(seed).uniform(-1, 1, len(self))
        size = float(np.abs(self.start).max()) or 1.0
        probe = self.start + 0.1 * size * noise
        reaction = self.flow.terms.reaction if isinstance(self.flow, LinearFlow) else None
        if reaction is None:
            return probe
        inside = self._vector(reaction.clipped(self.signal(probe)))
        # Back from the ends of the interval, at which a reaction may be 0: there nothing would seem to move.
        return self._vector(reaction.clipped(self.signal(2 * inside - probe)))

    @cached_property
    def shifts(self) -> list[int]:
        grid = self.flow.affinity.domain
        if not isinstance(grid, Grid) or grid.boundary != "periodic" or not self.free.all():
            return []
        probe = self._probe(0).reshape(self.free.shape)
        moved = self(probe.ravel()).reshape(probe.shape)
        allowed = 1e3 * self.rounding * max(self.cancelling(probe.ravel()), self.norm(moved.ravel()))
        found = []
        for axis in range(grid.ndim):
            other = self(np.roll(probe, 1, axis).ravel()).reshape(probe.shape)
            if self.norm((other - np.roll(moved, 1, axis)).ravel()) <= allowed:
                found.append(axis)
        return found

    def translations(self, x: Floats) -> list[Floats]:
        if not self.shifts:
            return []
        result = []
        signal = x.reshape(self.free.shape)
        for axis in self.shifts:
            count = int(signal.shape[axis])
            waves = np.fft.rfftfreq(count, 1 / count)
            if count % 2 == 0:
                waves[-1] = 0.0
            waves = waves.reshape((-1,) + (1,) * (signal.ndim - axis - 1))
            slope = np.fft.irfft(1j * waves * np.fft.rfft(signal, axis=axis), count, axis=axis)
            if np.abs(slope).max() > 1e-9 * max(float(np.abs(x).max()), 1e-3):
                result.append(slope.ravel())
        return result

    def neutral(self, x: Floats, within: float = _NEUTRAL) -> Neutral:
        found = list(self.invariants)
        conserved = len(found)
        translations = self.translations(x)
        if translations:
            probe = np.random.default_rng(1).standard_normal(len(x))
            size = self.norm(self.times(x, probe)) / self.norm(probe)
            for slope in translations:
                slope = slope / self.norm(slope)
                if self.norm(self.times(x, slope)) > within * size:
                    continue
                self._add(found, self.weights * slope, slope)
        if not found:
            return Neutral(np.zeros((len(x), 0)), np.zeros((0, len(x))), 0)
        rows, columns = zip(*found, strict=True)
        return Neutral(np.stack(columns, axis=1), np.stack(rows), conserved)

    def _add(self, found: list[tuple[Floats, Floats]], row: Floats, column: Floats) -> None:
        """Add a pair to others, of which it keeps what they have not."""
        for law, other in found:
            row, column = row - (row @ other) * law, column - (law @ column) * other
        if (left := self.norm(column)) > 1e-3:
            column = column / left
            found.append((row / (row @ column), column))


@dataclass(frozen=True)
class Neutral:
    """Pairs of a row and a column, rows @ columns = I; first those of conserved means, whose rows @ F = 0."""

    columns: Floats  # of a mean: it changes the mean, and need not be neutral; of a translation: neutral
    rows: Floats  # of a translation: it conserves nothing
    conserved: int

    @property
    def count(self) -> int:
        return int(self.columns.shape[1])

    @property
    def words(self) -> str:
        moved = self.count - self.conserved
        parts = [f"{self.conserved} conserved mean{'s' * (self.conserved > 1)}"] * bool(self.conserved)
        parts += [f"{moved} translation{'s' * (moved > 1)}"] * bool(moved)
        return " and ".join(parts)
