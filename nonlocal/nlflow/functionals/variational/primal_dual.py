"""Nonlocal total variation by the primal-dual method of Chambolle and Pock."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nlflow._array import Floats
from nlflow.errors import check_memory
from nlflow.functionals.misfits import Misfit, Squares
from nlflow.functionals.variational.certificate import bounding_box, fidelity_slack, misfit_slack
from nlflow.functionals.variational.constants import constants
from nlflow.functionals.variational.jp import Jp, edge_loop

_EVERY = 10


@dataclass
class Saddle:
    """Signal `u` (N, D), dual vectors `q` (edges, D), value and absolute gap."""

    u: NDArray[Any]
    q: NDArray[Any]
    value: float = math.inf
    gap: float = math.inf
    iterations: int = 0


def minimize(
    jp: Jp,
    f: NDArray[Any],
    rigid: Floats,
    *,
    rtol: float,
    maxiter: int,
    start: NDArray[Any] | None = None,
    dual: NDArray[Any] | None = None,
    memory_limit: float | None = None,
    misfit: Misfit | None = None,
) -> Saddle:
    """Minimize J_1(u) + 1/2 sum_i r_i |u_i - f_i|^2, or with a misfit g, in the dtype of `f` (N, D).

    Steps are preconditioned (Pock and Chambolle 2011, doi 10.1109/ICCV.2011.6126441) and balanced (as Applegate et al.
    2021, arXiv 2106.04756).
    """
    bytes_an_edge = 2 * f.shape[1] * f.dtype.itemsize + (8 + f.dtype.itemsize if jp.isotropic else 0)
    check_memory(
        f"the dual vectors of {len(jp.graph)} edges",
        len(jp.graph) * bytes_an_edge,
        "use a smaller window or fewer nodes, or raise memory_limit",
        memory_limit,
    )
    make = _Iteration if misfit is None else partial(_Proximal, misfit)
    iteration = make(jp, f, rigid, start, dual)
    saddle = iteration.saddle
    given = misfit or Squares()
    plain = jp.plain(f, rigid, given, f.dtype)  # no gap is small beside the value
    if plain is not None or (plain := constants(jp, f, rigid, given)) is not None:
        saddle.u, saddle.value, saddle.gap = plain[0].astype(f.dtype), plain[1], 0.0
        return saddle
    due = _EVERY
    while saddle.iterations < maxiter:
        for _ in range(min(_EVERY, maxiter - saddle.iterations)):
            iteration.step()
        iteration.certify()
        if saddle.gap <= rtol * saddle.value:
            break
        if saddle.iterations >= due:
            iteration.balance()
            due *= 2
    return saddle


class _Iteration:
    def __init__(
        self, jp: Jp, f: NDArray[Any], rigid: Floats, start: NDArray[Any] | None, dual: NDArray[Any] | None
    ) -> None:
        graph, dtype, nodes = jp.graph, f.dtype, jp.isotropic
        self._f, self._rigid, self._stiff = f, rigid, rigid.astype(dtype)
        self._graph = (graph.starts, graph.ends)
        self._weights = graph.weights.astype(dtype, copy=False)
        self._cells = (np.sqrt(jp.affinity.domain.weights).ravel() / 2).astype(dtype)
        self._roots = np.sqrt(self._weights) if nodes else self._weights[:0]
        self._reverse = graph.reverse if nodes else np.empty(0, np.int64)
        self._nodes = nodes
        degree = graph.degree
        if nodes:
            degree = graph.row_sums(graph.weights * 2 * graph.over_edges(self._cells.astype(np.float64) ** 2))
        # A node without edges takes the value observed there; next to none must not leave the range of float32.
        degree = np.maximum(np.where(degree > 0, degree, degree.max()), 1e-20 * degree.max() or 1.0)
        self._degree = degree.astype(dtype)
        u = np.array(f if start is None else start)
        self._box = bounding_box(u, f, rigid)
        self.saddle = Saddle(u, np.zeros((len(graph), f.shape[1]), dtype) if dual is None else np.array(dual))
        self._seen, self._ahead = u.copy(), np.empty_like(u)
        self._fall = 2 * float(f[rigid > 0].std()) or 1.0
        if nodes:  # in the units of the dual vectors of nodes
            self._fall *= math.sqrt(float(degree.mean()))
        self._balanced = (self.saddle.u.copy(), self.saddle.q.copy())
        self._raise = edge_loop("raise_nodes", dtype) if nodes else None
        self._lower = edge_loop("lower_nodes" if nodes else "step_edges", dtype)
        self._terms = edge_loop("dual_terms", dtype)

    def step(self) -> None:
        """Make one step of the dual vectors and one of the signal."""
        saddle = self.saddle
        steps = np.array([1 / self._fall, self._fall], self._f.dtype)
        signal = (self._degree, self._stiff, self._f, self._box, steps)
        if self._raise is not None:
            self._raise(*self._graph, self._roots, self._cells, steps[0] / 2, self._seen, saddle.q)
            self._lower(
                *self._graph, self._reverse, self._roots, self._cells, *signal, saddle.q, saddle.u, self._ahead
            )  # fmt: skip
        else:
            self._lower(*self._graph, self._weights, *signal, self._seen, saddle.q, saddle.u, self._ahead)
        self._seen, self._ahead = self._ahead, self._seen
        saddle.iterations += 1

    def balance(self) -> None:
        """Set the steps by how far the signal and the dual vectors have moved since they were last set."""
        before, dual = self._balanced
        square = np.sum((self.saddle.q - dual) ** 2, axis=1, dtype=np.float64)
        risen = 2 * float(square.sum()) if self._nodes else float(np.sum(self._weights * square))
        fallen = float(np.sum(self._degree[:, None] * (self.saddle.u - before).astype(np.float64) ** 2))
        if risen > 0 and fallen > 0:
            self._fall = math.sqrt(self._fall * math.sqrt(fallen / risen))
        self._balanced = (self.saddle.u.copy(), self.saddle.q.copy())

    def certify(self) -> None:
        """Compute the value and the gap, at the cost of about one step."""
        saddle = self.saddle
        flow, shares = np.empty(saddle.u.shape), np.empty((len(saddle.u), 2))
        self._terms(
            *self._graph, self._reverse, self._weights, self._roots, self._cells, self._nodes, saddle.u, saddle.q,
            flow, shares,
        )  # fmt: skip
        misfit, slack = self._fidelity(flow)
        saddle.value = float(shares[:, 0].sum()) + misfit
        saddle.gap = float(shares[:, 1].sum()) + slack

    def _fidelity(self, flow: Floats) -> tuple[float, float]:
        u = self.saddle.u
        value = 0.5 * float(np.sum(self._rigid[:, None] * (u - self._f).astype(np.float64) ** 2))
        return value, fidelity_slack(u, flow, self._rigid, self._f, self._box)


class _Proximal(_Iteration):
    def __init__(self, misfit: Misfit, jp: Jp, *given: Any) -> None:
        super().__init__(jp, *given)
        self._misfit = misfit
        self._heads, self._ends = jp.graph.heads, jp.graph.ends
        self._sums = jp.graph.summation(self._f.dtype)

    def step(self) -> None:
        """Make one step of the dual vectors and one of the signal."""
        saddle, q = self.saddle, self.saddle.q
        rise = self._f.dtype.type(0.5 / self._fall)
        if self._raise is not None:
            self._raise(*self._graph, self._roots, self._cells, rise, self._seen, q)
            flux = self._cells[self._heads, None] * q - self._cells[self._ends, None] * q[self._reverse]
            flow = self._sums @ (self._roots[:, None] * flux)
        else:
            q += rise * (self._seen[self._heads] - self._seen[self._ends])
            q /= np.maximum(np.sqrt(np.sum(q * q, axis=1, keepdims=True)), 1)
            flow = self._sums @ (self._weights[:, None] * q)
        step = self._fall / self._degree[:, None].astype(np.float64)
        there = self._misfit.prox(saddle.u - step * flow, self._f.astype(np.float64), step * self._rigid[:, None])
        there = np.where(self._rigid[:, None] > 0, there, saddle.u - step * flow)
        new = np.clip(there, self._box[0], self._box[1]).astype(self._f.dtype)
        self._seen, saddle.u = 2 * new - saddle.u, new
        saddle.iterations += 1

    def _fidelity(self, flow: Floats) -> tuple[float, float]:
        u, f = self.saddle.u.astype(np.float64), self._f.astype(np.float64)
        known = np.broadcast_to(self._rigid[:, None] > 0, u.shape)
        value = float(np.sum(np.where(known, self._rigid[:, None] * self._misfit.value(u, f), 0.0)))
        return value, misfit_slack(self._misfit, u, flow, self._rigid, f, self._box)
