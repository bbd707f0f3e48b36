"""Nodes in compact blocks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nlflow._array import Floats, power_of_two
from nlflow.backends.threads import blas_limited

BLOCK = 64
"""Nodes that are skipped together."""
_AXES = 16  # along which there are boxes; the distance along some axes is a lower bound
_SAMPLE, _FEW = 4096, 256  # points from which the axes of all, and of a part, are found
_ROUNDS = 6  # of subspace iteration
_EPS = float(np.finfo(np.float64).eps)
LARGEST = float(np.finfo(np.float64).max)
"""Squared distance beyond which there is none."""


def squared_limit(reach: float, slack: float) -> float:
    return min((reach + slack) * (reach + slack) * (1 + 1e-6), LARGEST)


class Frame:
    """The principal axes of points (N, d), the longest first, at most 16 of them."""

    # Boxes along them are tight where the points fill a flat of few dimensions, however it lies in their space.

    def __init__(self, points: NDArray[Any]) -> None:
        low, high = (np.asarray(a, np.float64) for a in (points.min(axis=0), points.max(axis=0)))
        self._middle = low / 2 + high / 2
        sample = points[:: -(-len(points) // _SAMPLE)].astype(np.float64) - self._middle
        sample /= power_of_two(float(np.abs(sample).max()))
        sample -= sample.mean(axis=0)
        with blas_limited():  # the order of nodes, and so the bits of sums, are those of any number of threads
            axes = np.eye(points.shape[1])
            if len(axes) > _AXES:
                axes = axes[:, np.argsort(-np.square(sample).sum(axis=0), kind="stable")[:_AXES]]
                for _ in range(_ROUNDS):
                    axes = np.linalg.qr(sample.T @ (sample @ axes))[0]
            along = sample @ axes
            self._axes = axes @ np.linalg.eigh(along.T @ along)[1][:, ::-1]
        size = float(np.linalg.norm((high / 2 - low / 2) / (unit := power_of_two(float(np.abs(high - low).max())))))
        # What rounding may add to the distance of two boxes: d products for each coordinate of two points.
        self.slack = 4 * math.sqrt(self._axes.shape[1]) * (points.shape[1] + 2) * _EPS * size * unit

    def place(self, points: NDArray[Any]) -> Floats:
        result = np.empty((len(points), self._axes.shape[1]))
        with blas_limited():
            for start in range(0, len(points), 2**16):  # no copy of all in float64
                strip = slice(start, start + 2**16)
                result[strip] = (points[strip] - self._middle) @ self._axes
        return result


def along_axes(places: Floats) -> NDArray[np.intp]:
    """Return an order of points (N, axes) in which each `BLOCK` of them is compact; O(N log N) time."""
    # Halves across the longest axis of what is halved, until a block is left.
    order, parts = np.arange(len(places)), [(0, len(places))]
    with blas_limited():
        while parts:
            start, end = parts.pop()
            if end - start <= BLOCK:
                continue
            own = order[start:end]
            half = -(-len(own) // BLOCK) // 2 * BLOCK
            direction = _longest(places[own[:: -(-len(own) // _FEW)]])
            order[start:end] = own[np.argpartition(places[own] @ direction, half)]
            parts += [(start, start + half), (start + half, end)]
    return order


def _longest(points: Floats) -> Floats:
    """Return about the direction in which points vary most."""
    centred = points - points.mean(axis=0)
    centred /= power_of_two(float(np.abs(centred).max()))
    direction = np.zeros(points.shape[1])
    direction[np.square(centred).sum(axis=0).argmax()] = 1.0
    for _ in range(_ROUNDS):
        turned = centred.T @ (centred @ direction)
        length = float(np.linalg.norm(turned))
        if length == 0:
            break
        direction = turned / length
    return direction


def places_in(order: NDArray[np.intp]) -> NDArray[np.intp]:
    places = np.empty_like(order)
    places[order] = np.arange(len(order))
    return places


@dataclass(frozen=True)
class Regions:
    """Boxes around blocks of nodes, (blocks, axes), and squared distances beyond which a block leaves others out."""

    lows: Floats
    highs: Floats
    limits: Floats

    @classmethod
    def of(cls, places: Floats, limits: Floats | float) -> Regions:
        starts = np.arange(0, len(places), BLOCK)
        lows, highs = np.minimum.reduceat(places, starts), np.maximum.reduceat(places, starts)
        return cls(lows, highs, np.broadcast_to(limits, len(starts)).astype(np.float64))

    @classmethod
    def without_end(cls, count: int) -> Regions:
        return cls.of(np.empty((count, 0)), 0.0)

    def share_seen(self, other: Regions, samples: int = 64) -> float:
        seen = []
        for block in np.linspace(0, len(self.limits) - 1, min(samples, len(self.limits))).astype(np.intp):
            gaps = np.maximum(np.maximum(other.lows - self.highs[block], self.lows[block] - other.highs), 0)
            with np.errstate(over="ignore"):
                squared = np.square(gaps).sum(axis=1)
            seen.append(np.mean(squared <= np.maximum(self.limits[block], other.limits)))
        return float(np.mean(seen))

    @property
    def memory_bytes(self) -> int:
        return self.lows.nbytes + self.highs.nbytes + self.limits.nbytes
