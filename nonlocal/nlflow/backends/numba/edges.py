"""Loops over the edges of a symmetric graph."""

# Node i has the edges ``indptr[i] <= e < indptr[i + 1]`` to the nodes ``indices[e]``; each edge is kept at both its
# ends. A node sums its own row in a fixed order and writes to no other, so the bits do not depend on the number of
# threads.
#
# The primal-dual loops solve ``min_u F(Du) + sum_i [rigid_i / 2 |u_i - f_i|^2 + (u_i in the box)]`` in the scaling that
# `nlflow.functionals.variational.primal_dual` explains: with edges as cells F is ``1/2 sum_ij W_ij |u_i - u_j|`` and
# the dual vectors q_ij = -q_ji are kept at both ends, so that a node needs its own row alone; with nodes as cells F is
# ``sum_i a_i (sum_j W_ij |u_i - u_j|^2)^(1/2)``, q_ij belongs to the cell i, and a node looks up q_ji by ``reverse``.

import numpy as np
from numba import prange, types

from nlflow.backends.numba.loading import loader, njit

# The flags allow reordering and fused multiply-add. Inputs are finite (checked above), and no loop forms an infinity.
_FLAGS = {"contract", "reassoc", "nnan", "ninf", "nsz"}


@njit(parallel=True, cache=True, fastmath=_FLAGS)
def edge_lengths(indptr, indices, u, out):
    for i in prange(u.shape[0]):
        for e in range(indptr[i], indptr[i + 1]):
            j = indices[e]
            total = u.dtype.type(0)
            for c in range(u.shape[1]):
                total += (u[i, c] - u[j, c]) * (u[i, c] - u[j, c])
            out[e] = np.sqrt(total)


@njit(parallel=True, cache=True, fastmath=_FLAGS)
def edge_flux(indptr, indices, weights, u, out):
    """Sums ``out_i = sum_j weights_ij (u_i - u_j)``; u and out are (N, D)."""
    for i in prange(u.shape[0]):
        for c in range(u.shape[1]):
            total = u.dtype.type(0)
            for e in range(indptr[i], indptr[i + 1]):
                total += weights[e] * (u[i, c] - u[indices[e], c])
            out[i, c] = total


@njit(parallel=True, cache=True, fastmath=_FLAGS)
def edge_changes(indptr, indices, weights, u, out):
    """Sums ``out_i = sum_j weights_ij |u_i - u_j|``; u and out are (N, D)."""
    for i in prange(u.shape[0]):
        for c in range(u.shape[1]):
            total = u.dtype.type(0)
            for e in range(indptr[i], indptr[i + 1]):
                total += weights[e] * abs(u[i, c] - u[indices[e], c])
            out[i, c] = total


@njit(inline="always")
def _descend(i, flow, step, degree, rigid, f, box, u, ahead):
    """Move node i against the divergence `flow` of the dual field, take the proximal step, and extrapolate."""
    inertia = degree[i] / step
    stiffness = inertia + rigid[i]
    for c in range(u.shape[1]):
        new = (inertia * u[i, c] - flow[c] + rigid[i] * f[i, c]) / stiffness
        new = min(max(new, box[0, c]), box[1, c])
        ahead[i, c] = new + (new - u[i, c])
        u[i, c] = new


@njit(parallel=True, cache=True, fastmath=_FLAGS)
def step_edges(indptr, indices, weights, degree, rigid, f, box, steps, seen, q, u, ahead):
    # - weights : (edges,); W_ij.
    # - degree, rigid : (N,); sum_j W_ij, and the fidelity times the quadrature weight.
    # - f, seen, u, ahead : (N, D); Observed signal; extrapolated signals, read and written; the signal.
    # - box : (2, D)
    # - steps : (2,); Dual step and primal step.
    # - q : (edges, D)
    D = u.shape[1]
    rise = steps[0] * u.dtype.type(0.5)
    one = u.dtype.type(1)
    if D == 1:
        for i in prange(u.shape[0]):
            here = seen[i, 0]
            total = u.dtype.type(0)
            for e in range(indptr[i], indptr[i + 1]):
                value = q[e, 0] + rise * (here - seen[indices[e], 0])
                value = min(max(value, -one), one)
                q[e, 0] = value
                total += weights[e] * value
            flow = np.empty(1, u.dtype)
            flow[0] = total
            _descend(i, flow, steps[1], degree, rigid, f, box, u, ahead)
        return
    for i in prange(u.shape[0]):
        flow = np.zeros(D, u.dtype)
        for e in range(indptr[i], indptr[i + 1]):
            j = indices[e]
            square = u.dtype.type(0)
            for c in range(D):
                value = q[e, c] + rise * (seen[i, c] - seen[j, c])
                q[e, c] = value
                square += value * value
            shrink = one / np.sqrt(max(square, one))
            for c in range(D):
                q[e, c] *= shrink
                flow[c] += weights[e] * q[e, c]
        _descend(i, flow, steps[1], degree, rigid, f, box, u, ahead)


@njit(parallel=True, cache=True, fastmath=_FLAGS)
def raise_nodes(indptr, indices, roots, cells, rise, seen, q):
    """Take a dual step of cells at nodes, ``q_ij += rise a_i sqrt(W_ij) (u_i - u_j)``, scaled into the unit ball."""
    # ``roots`` is sqrt(W_ij), (edges,), and ``cells`` is a_i, (N,); the rest as in `step_edges`.
    D = seen.shape[1]
    one = seen.dtype.type(1)
    for i in prange(seen.shape[0]):
        factor = rise * cells[i]
        square = seen.dtype.type(0)
        if D == 1:  # a loop of its own, which vectorizes
            here = seen[i, 0]
            for e in range(indptr[i], indptr[i + 1]):
                value = q[e, 0] + factor * roots[e] * (here - seen[indices[e], 0])
                q[e, 0] = value
                square += value * value
        else:
            for e in range(indptr[i], indptr[i + 1]):
                for c in range(D):
                    value = q[e, c] + factor * roots[e] * (seen[i, c] - seen[indices[e], c])
                    q[e, c] = value
                    square += value * value
        if square > one:
            shrink = one / np.sqrt(square)
            for e in range(indptr[i], indptr[i + 1]):
                for c in range(D):
                    q[e, c] *= shrink


@njit(parallel=True, cache=True, fastmath=_FLAGS)
def lower_nodes(indptr, indices, reverse, roots, cells, degree, rigid, f, box, steps, q, u, ahead):
    D = u.shape[1]
    for i in prange(u.shape[0]):
        flow = np.zeros(D, u.dtype)
        here = cells[i]
        if D == 1:
            total = u.dtype.type(0)
            for e in range(indptr[i], indptr[i + 1]):
                total += roots[e] * (here * q[e, 0] - cells[indices[e]] * q[reverse[e], 0])
            flow[0] = total
        else:
            for e in range(indptr[i], indptr[i + 1]):
                there = cells[indices[e]]
                for c in range(D):
                    flow[c] += roots[e] * (here * q[e, c] - there * q[reverse[e], c])
        _descend(i, flow, steps[1], degree, rigid, f, box, u, ahead)


@njit(parallel=True, cache=True)
def dual_terms(indptr, indices, reverse, weights, roots, cells, nodes, u, q, flow, out):
    """Write the divergence D'q to ``flow`` and each node's share of F(Du) and of F(Du) - <Du, q> to ``out`` (N, 2)."""
    # In float64, and such that no share is negative. ``nodes`` says that nodes are cells.
    D = u.shape[1]
    for i in prange(u.shape[0]):
        for c in range(D):
            flow[i, c] = 0.0
        total = 0.0
        slack = 0.0
        squares = 0.0
        product = 0.0
        for e in range(indptr[i], indptr[i + 1]):
            j = indices[e]
            square = 0.0
            along = 0.0
            for c in range(D):
                difference = np.float64(u[i, c]) - np.float64(u[j, c])
                here = np.float64(q[e, c])
                square += difference * difference
                along += difference * here
                if nodes:
                    here = np.float64(cells[i]) * here - np.float64(cells[j]) * np.float64(q[reverse[e], c])
                    flow[i, c] += roots[e] * here
                else:
                    flow[i, c] += weights[e] * here
            if nodes:
                root = np.float64(roots[e])
                squares += root * root * square
                product += root * along
            else:
                length = np.sqrt(square)
                total += 0.5 * weights[e] * length
                slack += 0.5 * weights[e] * max(length - along, 0.0)
        if nodes:
            length = np.sqrt(squares)
            total = cells[i] * length
            slack = cells[i] * max(length - product, 0.0)
        out[i, 0] = total
        out[i, 1] = slack


_ROWS, _ENDS = types.int64[::1], types.int32[::1]
loop = loader(
    lambda f: {
        "edge_lengths": (edge_lengths, _ROWS, _ENDS, f[:, ::1], f[::1]),
        "edge_flux": (edge_flux, _ROWS, _ENDS, f[::1], f[:, ::1], f[:, ::1]),
        "edge_changes": (edge_changes, _ROWS, _ENDS, f[::1], f[:, ::1], f[:, ::1]),
        "step_edges": (step_edges, _ROWS, _ENDS, *(f[::1],) * 3, *(f[:, ::1],) * 2, f[::1], *(f[:, ::1],) * 4),
        "raise_nodes": (raise_nodes, _ROWS, _ENDS, f[::1], f[::1], f, f[:, ::1], f[:, ::1]),
        "lower_nodes": (
            lower_nodes, _ROWS, _ENDS, _ROWS, *(f[::1],) * 4, f[:, ::1], f[:, ::1], f[::1], *(f[:, ::1],) * 3,
        ),
        "dual_terms": (
            dual_terms, _ROWS, _ENDS, _ROWS, *(f[::1],) * 3, types.boolean, f[:, ::1], f[:, ::1],
            types.float64[:, ::1], types.float64[:, ::1],
        ),
    }
)  # fmt: skip
"""Loop of a name, for ``float32`` or ``float64``."""
