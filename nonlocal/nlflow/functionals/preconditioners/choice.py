"""The choice of a preconditioner."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from nlflow._array import Array, Floats, is_numpy
from nlflow.affinities import Affinity, SparseAffinity
from nlflow.domains import Grid
from nlflow.errors import InputError, check_memory, memory_limit
from nlflow.functionals.fidelity import Fidelity, NodeFidelity

if TYPE_CHECKING:
    from nlflow.functionals.preconditioners.multigrid import Multigrid
    from nlflow.functionals.preconditioners.sweeps import Sweeps

Operator: TypeAlias = Callable[[Array], Array]

PRECONDITIONERS = ("auto", "diagonal", "transform", "multigrid", "graph", "sweeps")
PAYS, PAYS_EDGE = 100.0, 2.0
"""Multigrid pays from this many further iterations with the diagonal, and this many more for each edge of a node.

Measured on 256 x 256 (``python -m benchmarks.equilibrium crossover``): set-up and solution took as long as 116 of them
in a window of 3 x 3, 92 and 135 in one of 5 x 5, 194 in one of 7 x 7.
"""

PAIRS = 2**10  # most edges a node with which multigrid is worth having
_NEEDS = {
    "transform": "a position kernel on a periodic or reflecting grid",
    "multigrid": f"a stencil or a sparse graph of at most {PAIRS} edges a node",
    "direct": "a symmetric graph of edges",
    "sweeps": "a symmetric graph of edges, whose degrees are within a factor of 1e30",
}
_SMALL = 2048  # nodes up to which elimination is the first choice for a graph: 0.05 s for the worst fill measured
_SWEEPS = 1.5  # further iterations of sweeps from which on multigrid pays, over those with the diagonal
_UNIFORM = 4.0  # ratio of fidelities up to which a transform is the first choice
_QUICK = 16  # iterations with the diagonal below which it is not


class Choice:
    """A preconditioner, and whether to change it."""

    def __init__(
        self, affinity: Affinity, fidelity: Fidelity, operator: Operator, like: Array, name: str, rtol: float,
        held: NDArray[np.bool_] | None = None, maxiter: int = 10_000,
    ) -> None:  # fmt: skip
        self._affinity, self._fidelity, self._operator = affinity, fidelity, operator
        self._rtol = rtol
        self._before = (0, math.inf)
        self._pays = PAYS
        self.used = "diagonal"
        numbers = isinstance(fidelity, NodeFidelity) and is_numpy(like)
        low, high = fidelity.bounds()
        transform = numbers and name in ("auto", "graph", "transform") and has_transform(affinity)
        self._multigrid = numbers and name in ("auto", "graph", "multigrid") and has_multigrid(affinity)
        direct = numbers and is_graph(affinity)
        self.first: Operator = lambda r: fidelity.damped(r, 1.0)
        self._sweeps: Sweeps | None = None
        sweeps = name in ("graph", "sweeps") and direct and _has_sweeps(affinity)
        free = name in ("auto", "graph")
        if name == "graph":
            name = self._for_graph(direct, sweeps, held)
        offered = {"transform": transform, "multigrid": self._multigrid, "direct": direct, "sweeps": sweeps}
        if not offered.get(name, True):
            needs = _NEEDS[name]
            raise InputError(
                f"preconditioner: got {name!r}, expected 'auto' or 'diagonal' here: it needs {needs}, and a fidelity "
                "of one number for each node"
            )
        pays = transform and 0 < high <= _UNIFORM * low and _expected(low, high, affinity.domain.size, rtol) >= _QUICK
        if name == "transform" or (name == "auto" and pays):
            from nlflow.functionals.preconditioners.transform import Transform

            self.used = "transform"
            self.first = Transform(affinity, math.sqrt(low * high) if low > 0 else high / 2)
        elif name == "multigrid":
            check_memory(
                f"multigrid for {affinity.domain.size} nodes",
                setup_bytes(affinity),
                "use preconditioner='diagonal', or a smaller window",
            )
            self.first = self._set_up()
        elif name == "direct" and self.used != "direct":
            check_memory(
                f"the factors for {affinity.domain.size} nodes, if none of their entries is 0",
                12 * affinity.domain.size**2,  # 12 bytes an entry, in two triangles
                "use preconditioner='auto'",
            )
            self._eliminate(held)
        elif name == "sweeps":
            from nlflow.functionals.preconditioners.sweeps import Sweeps

            self._sweeps = Sweeps(affinity, self._values(), rtol, maxiter, None if held is None else held.ravel())
            self.first, self.used = self._sweeps, "sweeps"
        self._open = free and self.used in ("diagonal", "sweeps") and self._multigrid
        if self._open:
            self._open = setup_bytes(affinity) <= memory_limit()
            self._pays = PAYS + PAYS_EDGE * affinity._edge_bound() / affinity.domain.size
            if self._sweeps is not None:
                self._sweeps.limit(_SWEEPS * self._pays)

    def again(self) -> None:
        self._open = False
        if self._sweeps is not None:
            self._sweeps.again()

    def beside(self) -> int:
        if self._sweeps is None:
            return 0
        taken, self._sweeps.iterations = self._sweeps.iterations, 0
        return taken

    def reconsider(self, done: int, residual: float) -> Operator | None:
        before, self._before = self._before, (done, residual)
        if done == 0 or not self._open:
            return None
        if self._sweeps is not None:
            return self._switched() if self._sweeps.slow else None
        # At the rate since it was last asked: the first iterations are often the quick ones.
        fall = math.log(before[1] / residual) if residual < before[1] else 0.0
        if (done - before[0]) * math.log(residual / self._rtol) <= self._pays * fall:
            return None
        return self._switched()

    def _switched(self) -> Operator:
        self.first = self._set_up()
        return self.first

    def _for_graph(self, direct: bool, sweeps: bool, held: NDArray[np.bool_] | None) -> str:
        """Return the first choice for a graph; elimination, where it is that, is set up."""
        from nlflow.functionals.preconditioners.elimination import LostDigitsError

        if direct and self._affinity.domain.size <= _SMALL:
            with suppress(LostDigitsError):
                self._eliminate(held)
                return "direct"
        return "sweeps" if sweeps else "auto"

    def _eliminate(self, held: NDArray[np.bool_] | None) -> None:
        from nlflow.functionals.preconditioners.elimination import Elimination

        self.first = Elimination(self._affinity, self._values(), None if held is None else held.ravel())
        self.used = "direct"

    def _set_up(self) -> Multigrid:
        from nlflow.functionals.preconditioners.multigrid import Multigrid

        size = self._affinity.domain.size
        self.used, self._sweeps, self._open = "multigrid", None, False
        measure = self._affinity.measure("degree", np.empty(0))
        return Multigrid(self._affinity, self._operator, measure.reshape(size), self._values())

    def _values(self) -> Floats:
        shape = self._affinity.domain.shape
        values = np.asarray(self._fidelity.stated(np.zeros(shape)), np.float64)
        return np.broadcast_to(values, shape).reshape(-1)


def has_transform(affinity: Affinity) -> bool:
    grid = affinity.domain
    if affinity.method not in ("stencil", "convolution") or not isinstance(grid, Grid):
        return False
    return grid.boundary != "isolated" and affinity.known_spectrum() is not None


def has_multigrid(affinity: Affinity) -> bool:
    if affinity.method not in ("stencil", "sparse"):
        return False
    return affinity.symmetric and affinity._edge_bound() <= PAIRS * affinity.domain.size


def setup_bytes(affinity: Affinity) -> int:
    return 30 * affinity._edge_bound()


def is_graph(affinity: Affinity) -> bool:
    return isinstance(affinity, SparseAffinity) and affinity.symmetric


def _has_sweeps(affinity: Affinity) -> bool:
    """Whether float32 holds the weights of a given graph."""
    measure = affinity.measure("degree", np.empty(0))
    return bool(measure.max() < 1e30 * measure.min())


def _expected(low: float, high: float, nodes: int, rtol: float) -> float:
    """Return the bound of the iterations with the diagonal for fidelities from `low` > 0 to `high`."""
    condition = max((2 + low) / low * (1 + high) / (1 + low), 1.0)
    return min(nodes, 0.5 * math.sqrt(condition) * math.log(2 / min(rtol, 1.0)))
