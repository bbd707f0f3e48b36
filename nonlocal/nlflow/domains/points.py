"""Scattered nodes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from nlflow._array import Floats, underflowing
from nlflow.domains.base import Domain
from nlflow.errors import InputError, check_floats, check_number, checked_call


@checked_call
@underflowing
@dataclass(frozen=True, eq=False)
class Points(Domain):
    """Scattered nodes with quadrature weights.

    Parameters
    ----------
    nodes : array_like of shape (N, m) or (N,)
        Positions; a flat array has N points on a line.
    weights : array_like of shape (N,), optional
        Quadrature weights > 0; ``volume / N`` by default, the Monte-Carlo rule.
    volume : float, optional
        In place of weights: their sum.
    """

    positions: Floats
    quadrature: Floats

    def __init__(self, nodes: ArrayLike, weights: ArrayLike | None = None, volume: float = 1.0) -> None:
        # Copies: a domain does not change when the arrays that it was made from do.
        x = check_floats("nodes", nodes, ndim=(1, 2))
        x = x[:, None] if x.ndim == 1 else x
        if weights is not None and volume != 1:
            raise InputError(f"volume: got {volume!r} beside weights, whose sum is the volume; give one of them")
        if weights is None:
            w = np.full(len(x), check_number("volume", volume, minimum=0, strict=True) / len(x))
        else:
            w = check_floats("weights", weights, ndim=1)
            if w.shape != (len(x),):
                raise InputError(f"weights: got shape {w.shape}, expected ({len(x)},), one for each node")
            if w.min() <= 0:
                raise InputError(f"weights: got {w.min():g}, expected every weight > 0; leave such nodes out")
        object.__setattr__(self, "positions", x)
        object.__setattr__(self, "quadrature", w)

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]  # a field in the base, derived here
        """Shape of the nodes, (N,)."""
        return (len(self.positions),)

    @property
    def nodes(self) -> Floats:
        return self.positions

    @property
    def weights(self) -> Floats:
        return self.quadrature
