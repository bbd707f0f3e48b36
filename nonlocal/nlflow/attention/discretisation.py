"""A trained layer beside the continuous flow that it is one step of, and a stack of layers beside one chain repeated.

In the degree metric the flow of a head is du/dt = Pu - u from u(0) = v, and the layer, v -> Pv, is one Euler step of
length 1 (arXiv 2312.00751, theorem 1, where the step of the L2 flow is 1/d(x)). m steps of length 1/m tend to the flow
at time 1 as 1/m.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nlflow._array import underflowing
from nlflow.affinities import Affinity
from nlflow.attention.heads import Head
from nlflow.attention.metrics import energy_per_token, mean_cosine
from nlflow.attention.trace import Layer, LayerTrace
from nlflow.errors import InputError, check_integer, check_number
from nlflow.flows.flow import Flow
from nlflow.flows.integrators import ExplicitEuler, Exponential, RungeKutta
from nlflow.flows.linear import AttentionFlow
from nlflow.flows.solver import solve
from nlflow.studies.fits import FEWEST, regress

__all__ = ["Discretisation", "Extrapolation", "discretise", "extrapolate"]

Floats = NDArray[np.float64]
_EXACT = 1e-12  # relative tolerance of the flow that steps are held against
_ROUNDING = 1e-9  # distances below it say nothing about an order
_FITTED = 4  # the finest steps, whose errors the leading term rules


@dataclass(frozen=True)
class Discretisation:
    """How far steps are from the flow.

    Attributes
    ----------
    substeps : tuple of int
        m.
    distance : array of shape (M,)
        |u_m - u(1)| / |u(1) - v|, Frobenius norms over tokens and the channels of all heads: the error in units of the
        way that the flow takes.
    layer : float
        The same of the layer's own result Pv. Equal to the distance at m = 1, unless the flow is another (symmetric).
    order : float
        Slope of log distance over log(1/m) through the finest steps; the theory says 1. NaN with fewer than 3.
    """

    substeps: tuple[int, ...]
    distance: Floats
    layer: float
    order: float


@underflowing
def discretise(
    layer: Layer | Head,
    *,
    substeps: Sequence[int] = (1, 2, 4, 8, 16, 32),
    symmetric: bool = False,
    evolving: bool = False,
    item: int = 0,
) -> Discretisation:
    """Compare a layer, and m steps of length 1/m, with the continuous flow at time 1 from the layer's own values.

    Parameters
    ----------
    layer : Layer or Head
        From a `LayerTrace`; of a layer all heads are taken, one after another.
    substeps : sequence of int
        m >= 1.
    symmetric : bool
        The flow with the keys as queries: the gradient flow of J that the layer is compared to in the theory.
    evolving : bool
        Queries and keys are averaged along with the values, and the kernel is that of the moment. Otherwise it stays
        as the layer has it.
    item : int
        Number of the sequence in the batch.

    Returns
    -------
    Discretisation

    Raises
    ------
    InputError
        For numbers of steps that are none.

    Notes
    -----
    A frozen symmetric flow is computed by Chebyshev expansion, others by Runge-Kutta steps of order 5 and, with an
    evolving kernel, order 8 (SciPy's DOP853), to about 1e-11. O(N^2 (d + d_v)) for each step and head.
    """
    counts = tuple(check_integer("substeps", m, minimum=1) for m in substeps)
    if not counts:
        raise InputError("substeps: got none, expected at least one number of steps")
    heads = [layer] if isinstance(layer, Head) else [layer.head(h, item) for h in range(layer.heads)]
    errors, own, way, size = np.zeros(len(counts)), 0.0, 0.0, 0.0
    for head in heads:
        start, steps, exact = _frozen(head, symmetric) if not evolving else _evolving(head, symmetric)
        width = head.v.shape[1]
        errors += [float(((steps(m) - exact)[:, -width:] ** 2).sum()) for m in counts]
        own += float(((head.affinity.average(head.v) - exact[:, -width:]) ** 2).sum())
        way += float(((start - exact)[:, -width:] ** 2).sum())
        size += float((head.v**2).sum())
    if way <= _EXACT**2 * size:
        raise InputError(
            "layer: got values that the flow does not move (all tokens are equal), expected some that differ"
        )
    distance = np.sqrt(errors / way)
    return Discretisation(counts, distance, math.sqrt(own / way), _order(counts, distance))


def _order(counts: Sequence[int], distance: Floats) -> float:
    """Return the slope of log distance over log(1/m) through the finest steps that are above rounding."""
    used = sorted((m, value) for m, value in zip(counts, distance, strict=True) if value > _ROUNDING)[-_FITTED:]
    if len({m for m, _ in used}) < FEWEST:
        return math.nan
    return regress([-math.log(m) for m, _ in used], [math.log(value) for _, value in used]).slope


class _Euler:
    """The result of m explicit Euler steps of length 1/m."""

    def __init__(self, flow: Flow, start: Floats) -> None:
        self.flow, self.start = flow, start

    def __call__(self, count: int) -> Floats:
        found = solve(self.flow, self.start, t=1.0, integrator=ExplicitEuler(dt=1 / count), energies=False)
        return np.asarray(found.final)


def _frozen(head: Head, symmetric: bool) -> tuple[Floats, _Euler, Floats]:
    """Return (u(0), the result of m steps, u(1)) with the kernel that the layer has."""
    flow = AttentionFlow(head.along(head.k, head.k) if symmetric else head.affinity)
    integrator = Exponential(_EXACT) if flow.symmetric else _runge_kutta(head.v)
    exact = solve(flow, head.v, t=1.0, integrator=integrator, energies=False)
    return head.v, _Euler(flow, head.v), np.asarray(exact.final)


def _runge_kutta(start: Floats) -> RungeKutta:
    return RungeKutta(rtol=_EXACT, atol=_EXACT * (float(np.abs(start).max()) or 1.0))


def _evolving(head: Head, symmetric: bool) -> tuple[Floats, _Euler, Floats]:
    """Return (u(0), the result of m steps, u(1)) of queries, keys and values that move together."""
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

    flow = AttentionFlow(kernel(start), evolving=True)
    size = float(np.abs(start).max()) or 1.0
    exact = solve_ivp(velocity, (0.0, 1.0), start.ravel(), method="DOP853", rtol=_EXACT, atol=_EXACT * size)
    return start, _Euler(flow, start), np.asarray(exact.y[:, -1]).reshape(start.shape)


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
        Predicted: mean cosine of the tokens' values, heads side by side, and J over the mean of |v|^2, so that layers
        of different scale can be compared.
    measured_cosine, measured_energy : array of shape (n + 1,)
        Of the values of the stack's own layers; NaN beyond its last.
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
    """Predict how alike values are after more layers with the chain of one layer, against the measured stack.

    Each head's values are averaged by that head's P again and again, u <- (1 - s) Pu + s u + lambda~ (v0 - u), with
    the laziness s for the residual connection and v0 of the first layer of the stack. What weights, MLPs and norms of
    the layers do besides is not in the prediction: the difference is theirs.

    Parameters
    ----------
    trace : LayerTrace
    layer : int or str
    depth : int, optional
        Layers to go on; to the end of the stack by default.
    laziness : float
        In [0, 1).
    fidelity : float
        lambda~ >= 0 of NeuTRENO.
    item : int
        Number of the sequence in the batch.

    Returns
    -------
    Extrapolation
    """
    number, chosen = trace.number(layer), trace[layer]
    stay = check_number("laziness", laziness, minimum=0, below=1)
    strength = check_number("fidelity", fidelity, minimum=0)
    stack = [one for one in trace.layers[number:] if one.stack == chosen.stack]
    steps = len(stack) - 1 if depth is None else check_integer("depth", depth, minimum=0)
    first = next(one for one in trace.layers if one.stack == chosen.stack)
    heads = [chosen.head(h, item) for h in range(chosen.heads)]
    anchors = [first.head(h, item).v for h in range(chosen.heads)] if strength else [head.v for head in heads]
    courses = [
        _repeated(head.affinity, head.v, anchor, stay, strength) for head, anchor in zip(heads, anchors, strict=True)
    ]
    predicted, measured = np.empty((2, steps + 1)), np.full((2, steps + 1), math.nan)
    for n in range(steps + 1):
        values = [next(course) for course in courses]
        predicted[:, n] = _likeness([head.affinity for head in heads], values)
        if n < len(stack):
            own = [stack[n].head(h, item) for h in range(stack[n].heads)]
            measured[:, n] = _likeness([head.affinity for head in own], [head.v for head in own])
    return Extrapolation(chosen.name, np.arange(steps + 1), *predicted, *measured)


def _repeated(affinity: Affinity, v: Floats, anchor: Floats, stay: float, strength: float) -> Iterator[Floats]:
    """Yield the values after 0, 1, ... layers."""
    u = v
    while True:
        yield u
        u = (1 - stay) * affinity.average(u) + stay * u + strength * (anchor - u)


def _likeness(affinities: Sequence[Affinity], values: Sequence[Floats]) -> tuple[float, float]:
    """Return the mean cosine of tokens, heads side by side, and J over the mean square of values."""
    energy = size = 0.0
    for affinity, v in zip(affinities, values, strict=True):
        centred = v - v.mean(axis=0)
        squares = (centred**2).sum(axis=1)
        energy += float(energy_per_token(centred, affinity.average(centred), affinity.average(squares)))
        size += float((v**2).sum(axis=1).mean())
    return float(mean_cosine(np.concatenate(values, axis=1))), energy / size if size > 0 else math.nan
