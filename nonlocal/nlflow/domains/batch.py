"""Copies of a domain side by side."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from nlflow._array import Floats
from nlflow.domains.base import Domain, check_count
from nlflow.domains.grid import Grid
from nlflow.domains.points import Points
from nlflow.errors import InputError, check_integer, kind_of


@dataclass(frozen=True, eq=False)
class Batch(Domain):
    """Copies of a domain whose nodes see those of their own copy alone.

    J is the sum over the items; means are those of each item.

    Parameters
    ----------
    domain : Grid or Points
        Of one item.
    leading : int or tuple of int
        How many: 8, or (8, 12) for 8 sequences and 12 heads. Signals have these axes first.

    Examples
    --------
    >>> import numpy as np
    >>> from nlflow import Batch, Gaussian, Points, affinity
    >>> batch = Batch(Points([0.0, 1.0]), 2)
    >>> p = affinity(Gaussian(width=1.0), batch)
    >>> p.average(np.array([[1.0, 1.0], [5.0, 5.0]])).round(12).tolist()
    [[1.0, 1.0], [5.0, 5.0]]
    """

    one: Grid | Points
    leading: tuple[int, ...]

    def __init__(self, domain: Grid | Points, leading: int | tuple[int, ...]) -> None:
        if not isinstance(domain, Grid | Points):
            raise InputError(f"domain: got {kind_of(domain)}, expected a Grid or Points, the domain of one item")
        sizes = tuple(leading) if isinstance(leading, tuple | list) else (leading,)
        if not sizes:
            raise InputError("leading: got (), expected at least one axis")
        object.__setattr__(self, "one", domain)
        object.__setattr__(self, "leading", tuple(check_integer("leading", n, minimum=1) for n in sizes))
        check_count("leading", self.shape)

    @property
    def item(self) -> Domain:
        return self.one

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]  # a field in the base, derived here
        """Shape of the nodes, ``leading + domain.shape``."""
        return (*self.leading, *self.one.shape)

    @property
    def nodes(self) -> Floats:
        return np.tile(self.one.nodes, (math.prod(self.leading), 1))

    @property
    def weights(self) -> Floats:
        return np.array(np.broadcast_to(self.one.weights, self.shape))
