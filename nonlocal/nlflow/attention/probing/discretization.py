"""A trained layer as one step of a continuous flow, and a stack of layers compared with one repeated chain.

In the degree metric the flow of a head is du/dt = Pu - u from u(0) = v. The layer, v -> Pv, is one Euler step of length
1 (arXiv 2312.00751, theorem 1, where the step of the L2 flow is 1/d(x)). The error of m steps of length 1/m at time 1
falls as 1/m.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nlflow._array import underflowing
from nlflow.affinities import Affinity
from nlflow.attention.probing.heads import Head
from nlflow.attention.probing.metrics import energy_per_token, mean_cosine
from nlflow.attention.probing.trace import Layer, LayerTrace
from nlflow.errors import InputError, check_integer, check_number
from nlflow.flows.flow import Flow
from nlflow.flows.integrators import ExplicitEuler, Exponential, RungeKutta
from nlflow.flows.linear import AttentionFlow
from nlflow.flows.solver import solve
from nlflow.studies.fits import FEWEST, regress

Floats = NDArray[np.float64]
_EXACT = 1e-12  # relative tolerance of the flow that steps are compared with
_ROUNDING = 1e-9  # smaller distances say nothing about an order
_FITTED = 4  # number of finest steps for the order; there the leading term of the error is the largest


@dataclass(frozen=True)
class Discretization:
    """How far steps are from the flow.

    Attributes
    ----------
    substeps : tuple of int
        m.
    distance : array of shape (M,)
        |u_m - u(1)| / |u(1) - v|, Frobenius norms over tokens and the channels of all heads: the error relative to the
        length of the flow's way.
    layer : float
        The same for the layer's own result Pv. It is the distance at m = 1, unless the flow is another (symmetric).
    order : float
        Slope of log distance over log(1/m) through the finest steps; the theory says 1. NaN with fewer than 3.
    """

    substeps: tuple[int, ...]
    distance: Floats
    layer: float
    order: float


@underflowing
def discretize(
    layer: Layer | Head,
    *,
    substeps: Sequence[int] = (1, 2, 4, 8, 16, 32),
    symmetric: bool = False,
    evolving: bool = False,
    item: int = 0,
) -> Discretization:
    """Compare a layer, and m steps of length 1/m, with the continuous flow at time 1 from the layer's own values.

    Parameters
    ----------
    layer : Layer or Head
        From a `LayerTrace`; all heads of a layer are taken, one after another.
    substeps : sequence of int
        m >= 1.
    symmetric : bool
        Use the flow with keys as queries, the gradient flow of J with which the theory compares the layer.
    evolving : bool
        Queries and keys are averaged together with the values, and the kernel follows them. Otherwise the layer's
        kernel stays.
    item : int
        Number of the sequence in the batch.

    Raises
    ------
    InputError
        For numbers of steps below 1, and values that the flow does not move.

    Notes
    -----
    The exact flow has an error of about 1e-11. It is a Chebyshev expansion where the kernel is frozen and symmetric,
    Runge-Kutta steps of order 5 where it is only frozen, and of order 8 (SciPy's DOP853) where it evolves.
    O(N^2 (d + d_v)) for each step and head.
    """
    counts = tuple(check_integer("substeps", m, minimum=1) for m in substeps)
    if not counts:
        raise InputError("substeps: got none, expected at least one number of steps")
    heads = [layer] if isinstance(layer, Head) else [layer.head(h, item) for h in range(layer.heads)]
    errors, own, way, size = np.zeros(len(counts)), 0.0, 0.0, 0.0
    for head in heads:
        flow, start, exact = (_evolving if evolving else _frozen)(head, symmetric)
        width = head.v.shape[1]
        errors += [float(((_euler(flow, start, m) - exact)[:, -width:] ** 2).sum()) for m in counts]
        own += float(((head.affinity.average(head.v) - exact[:, -width:]) ** 2).sum())
        way += float(((start - exact)[:, -width:] ** 2).sum())
        size += float((head.v**2).sum())
    if way <= _EXACT**2 * size:
        raise InputError(
            "layer: got values that the flow does not move (all tokens are equal), expected some that differ"
        )
    distance = np.sqrt(errors / way)
    return Discretization(counts, distance, math.sqrt(own / way), order_of(counts, distance))


def order_of(counts: Sequence[int], distance: Floats) -> float:
    """Return the slope of log distance over log(1/m) through the finest steps whose error is above rounding."""
    used = sorted((m, value) for m, value in zip(counts, distance, strict=True) if value > _ROUNDING)[-_FITTED:]
    if len({m for m, _ in used}) < FEWEST:
        return math.nan
    return regress([-math.log(m) for m, _ in used], [math.log(value) for _, value in used]).slope


def _euler(flow: Flow, start: Floats, count: int) -> Floats:
    """Return the result of this number of explicit Euler steps up to time 1."""
    return np.asarray(solve(flow, start, t=1.0, integrator=ExplicitEuler(dt=1 / count), energies=False).final)


def _frozen(head: Head, symmetric: bool) -> tuple[Flow, Floats, Floats]:
    """Return (the flow, u(0), u(1)) with the kernel of the layer."""
    flow = AttentionFlow(head.along(head.k, head.k) if symmetric else head.affinity)
    size = float(np.abs(head.v).max()) or 1.0
    exactly = Exponential(_EXACT) if flow.symmetric else RungeKutta(rtol=_EXACT, atol=_EXACT * size)
    return flow, head.v, np.asarray(solve(flow, head.v, t=1.0, integrator=exactly, energies=False).final)


def _evolving(head: Head, symmetric: bool) -> tuple[Flow, Floats, Floats]:
    """Return (the flow, u(0), u(1)) of queries, keys and values that move together."""
    from scipy.integrate import solve_ivp

    width = head.k.shape[1]
    parts = (head.k, head.v) if symmetric else (head.q, head.k, head.v)
    start = np.concatenate(parts, axis=1)

    def kernel(u: Floats) -> Affinity:
        keys = u[:, -head.v.shape[1] - width : -head.v.shape[1]]
        found = head.along(keys if symmetric else u[:, :width], keys)
        found._recipe = kernel
        return found

    def velocity(t: float, u: Floats) -> Floats:
        moving = u.reshape(start.shape)
        return np.asarray(kernel(moving).average(moving) - moving).ravel()

    flow, size = AttentionFlow(kernel(start), evolving=True), float(np.abs(start).max()) or 1.0
    exact = solve_ivp(velocity, (0.0, 1.0), start.ravel(), method="DOP853", rtol=_EXACT, atol=_EXACT * size)
    return flow, start, np.asarray(exact.y[:, -1]).reshape(start.shape)


@dataclass(frozen=True)
class Extrapolation:
    """A stack of layers as it is, and as it would be if all layers were the chain of one.

    Attributes
    ----------
    layer : str
        Name of the layer whose chain is repeated.
    depth : array of int of shape (n + 1,)
        Layers after that one: 0 ... n.
    cosine, energy : array of shape (n + 1,)
        Predicted: mean cosine of the tokens' values, with heads side by side; and J over the mean of |v|^2, which
        compares layers of different scale.
    measured_cosine, measured_energy : array of shape (n + 1,)
        The same for the stack's own layers; NaN after its last.
    """

    layer: str
    depth: NDArray[np.int64]
    cosine: Floats
    energy: Floats
    measured_cosine: Floats
    measured_energy: Floats


@underflowing
def extrapolate(
    trace: LayerTrace,
    layer: int | str = 0,
    depth: int | None = None,
    *,
    laziness: float = 0.0,
    fidelity: float = 0.0,
    item: int = 0,
) -> Extrapolation:
    """Predict how alike values are if all further layers were the chain of one layer, and compare with the stack.

    Each head's values are averaged by that head's P repeatedly: u <- (1 - s) Pu + s u + lambda~ (v0 - u), with the
    laziness s for the residual connection, and v0 of the first layer of the stack. The prediction leaves out weights,
    MLPs and norms of the layers: they make the difference.

    Parameters
    ----------
    trace : LayerTrace
    layer : int or str
    depth : int, optional
        Number of further layers; to the end of the stack by default.
    laziness : float
        In [0, 1).
    fidelity : float
        lambda~ >= 0 of the NeuTRENO term.
    item : int
        Number of the sequence in the batch.
    """
    number, chosen = trace.number(layer), trace[layer]
    stay = check_number("laziness", laziness, minimum=0, below=1)
    strength = check_number("fidelity", fidelity, minimum=0)
    stack = [one for one in trace.layers[number:] if one.stack == chosen.stack]
    steps = len(stack) - 1 if depth is None else check_integer("depth", depth, minimum=0)
    first = next(one for one in trace.layers if one.stack == chosen.stack)
    heads = [chosen.head(h, item) for h in range(chosen.heads)]
    anchors = [first.head(h, item).v for h in range(chosen.heads)] if strength else [head.v for head in heads]
    courses = [_repeated(*both, stay, strength) for both in zip(heads, anchors, strict=True)]
    predicted, measured = np.empty((2, steps + 1)), np.full((2, steps + 1), math.nan)
    for n in range(steps + 1):
        values = [next(course) for course in courses]
        predicted[:, n] = _likeness([head.affinity for head in heads], values)
        if n < len(stack):
            own = [stack[n].head(h, item) for h in range(stack[n].heads)]
            measured[:, n] = _likeness([head.affinity for head in own], [head.v for head in own])
    return Extrapolation(chosen.name, np.arange(steps + 1), *predicted, *measured)


def _repeated(head: Head, anchor: Floats, stay: float, strength: float) -> Iterator[Floats]:
    """Yield the values after 0, 1, ... layers."""
    u = head.v
    while True:
        yield u
        u = (1 - stay) * head.affinity.average(u) + stay * u + strength * (anchor - u)


def _likeness(affinities: Sequence[Affinity], values: Sequence[Floats]) -> tuple[float, float]:
    """Return the mean cosine of tokens, with heads side by side, and J over the mean square of values."""
    energy = size = 0.0
    for affinity, v in zip(affinities, values, strict=True):
        centred = v - v.mean(axis=0)
        squares = (centred**2).sum(axis=1)
        energy += float(energy_per_token(centred, affinity.average(centred), affinity.average(squares)))
        size += float((v**2).sum(axis=1).mean())
    return float(mean_cosine(np.concatenate(values, axis=1))), energy / size if size > 0 else math.nan
