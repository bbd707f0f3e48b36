"""Layers as steps."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from nlflow._array import Brief, underflowing
from nlflow.affinities import Affinity, from_matrix
from nlflow.attention.injection.blocks import Adapter, blocks
from nlflow.attention.probing.branches import Seen, watching
from nlflow.attention.probing.metrics import energy_per_token, mean_cosine
from nlflow.attention.probing.probe import call_of, placed, tokens_of
from nlflow.attention.probing.trace import Head, Layer, LayerTrace
from nlflow.attention.probing.verdicts import random_stochastic
from nlflow.attention.threads import evaluating, using
from nlflow.domains import Points
from nlflow.errors import InputError, check_integer, check_number, checked_call
from nlflow.flows.flow import Flow
from nlflow.flows.gradient import AttentionFlow
from nlflow.flows.integrators import ExplicitEuler, Exponential, RungeKutta
from nlflow.flows.solver import solve
from nlflow.flows.sphere import turned
from nlflow.studies.fits import FEWEST, regress

Floats = NDArray[np.float64]
_EXACT = 1e-12  # relative tolerance of the flow that steps are compared with
_ROUNDING = 1e-9  # smaller distances say nothing about an order
_FITTED = 4  # number of finest steps for the order; there the leading term of the error is the largest


@dataclass(frozen=True, repr=False)
class Discretization(Brief):
    """How far steps are from the flow.

    Attributes
    ----------
    substeps : tuple of int
        m.
    distance : array of shape (M,)
        Errors |u_m - u(1)| / |u(1) - v|, in Frobenius norms over tokens and the channels of all heads.
    layer : float
        The same for the layer's own result Pv.
    order : float
        Slope of log distance over log(1/m) through the finest steps; NaN with fewer than 3.
    random_order : float
        The same with random stochastic matrices, masked as the heads are; NaN where the kernel evolves or has keys as
        queries. An `order` near it says nothing about training.
    """

    substeps: tuple[int, ...]
    distance: Floats
    layer: float
    order: float
    random_order: float = math.nan


@underflowing
@checked_call
def discretize(
    layer: Layer | Head,
    *,
    substeps: Sequence[int] = (1, 2, 4, 8, 16, 32),
    symmetric: bool = False,
    evolving: bool = False,
    item: int = 0,
) -> Discretization:
    """Compare a layer v -> Pv, and m steps of length 1/m, with the flow du/dt = Pu - u at time 1 from its own values.

    Parameters
    ----------
    layer : layer or head of a `LayerTrace`
        Of a layer, all heads.
    substeps : sequence of int
        m >= 1.
    symmetric : bool
        Use keys as queries in the flow: without a causal mask the gradient flow of J (arXiv 2312.00751, theorem 1).
    evolving : bool
        Average queries and keys as the values, so that the kernel changes.
    item : int
        Number of the sequence in the batch.

    Raises
    ------
    InputError
        For numbers of steps below 1, and values that the flow does not move.

    Notes
    -----
    O(N^2 (d + d_v)) for each step and head, of the flow to a relative tolerance of 1e-12.
    """
    counts = tuple(check_integer("substeps", m, minimum=1) for m in substeps)
    if not counts:
        raise InputError("substeps: got none, expected at least one number of steps")
    heads = [layer] if isinstance(layer, Head) else [layer.head(h, item) for h in range(layer.heads)]
    errors, own, way, size = np.zeros(len(counts)), 0.0, 0.0, 0.0
    random, rng = np.zeros(len(counts)), np.random.default_rng(0)
    for head in heads:
        flow, start, exact = (_evolving if evolving else _frozen)(head, symmetric)
        width = head.v.shape[1]
        errors += [float(((_euler(flow, start, m) - exact)[:, -width:] ** 2).sum()) for m in counts]
        own += float(((head.affinity.average(head.v) - exact[:, -width:]) ** 2).sum())
        way += float(((start - exact)[:, -width:] ** 2).sum())
        size += float((head.v**2).sum())
        if not evolving and not symmetric:
            drawn = random_stochastic(head.tokens, rng, head.matrix > 0)
            flow, start, exact = _of(from_matrix(drawn, Points(np.arange(head.tokens))), head.v)
            random += [float(((_euler(flow, start, m) - exact) ** 2).sum()) for m in counts]
    if way <= _EXACT**2 * size:
        raise InputError(
            "layer: got values that the flow does not move (all tokens are equal), expected some that differ"
        )
    distance = np.sqrt(errors / way)
    null = order_of(counts, np.sqrt(random / way))
    return Discretization(counts, distance, math.sqrt(own / way), order_of(counts, distance), null)


def order_of(counts: Sequence[int], distance: Floats) -> float:
    used = sorted((m, value) for m, value in zip(counts, distance, strict=True) if value > _ROUNDING)[-_FITTED:]
    if len({m for m, _ in used}) < FEWEST:
        return math.nan
    return regress([-math.log(m) for m, _ in used], [math.log(value) for _, value in used]).slope


def _euler(flow: Flow, start: Floats, count: int) -> Floats:
    return np.asarray(solve(flow, start, t=1.0, integrator=ExplicitEuler(dt=1 / count), energies=False).final)


def _frozen(head: Head, symmetric: bool) -> tuple[Flow, Floats, Floats]:
    """Return (the flow, u(0), u(1)) with the kernel of the layer."""
    return _of(head.along(head.k, head.k) if symmetric else head.affinity, head.v)


def _of(weights: Affinity, values: Floats) -> tuple[Flow, Floats, Floats]:
    """Return (the flow, u(0), u(1)) of a kernel that stays."""
    flow = AttentionFlow(weights)
    size = float(np.abs(values).max()) or 1.0
    exactly = Exponential(_EXACT) if flow.symmetric else RungeKutta(rtol=_EXACT, atol=_EXACT * size)
    return flow, values, np.asarray(solve(flow, values, t=1.0, integrator=exactly, energies=False).final)


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


@dataclass(frozen=True, repr=False)
class Extrapolation(Brief):
    """A stack of layers as it is, and as it would be if all repeated one.

    Attributes
    ----------
    layer : str
        Name of the layer that is repeated.
    depth : array of int of shape (n + 1,)
        Layers after that one: 0 ... n.
    cosine, energy : array of shape (n + 1,)
        Predicted: mean cosine of the tokens' values, with heads side by side; and J over the mean of |v|^2.
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
    """Predict how alike values become if all further layers repeat one layer, and compare with the stack.

    Each head repeats u <- (1 - s) Pu + s u + lambda~ (v0 - u) with its own P, and v0 of the first layer of the stack.

    Parameters
    ----------
    trace : result of `nlflow.attention.probe`
    layer : int or str
    depth : int, optional
        Number of further layers; to the end of the stack by default.
    laziness : float
        s in [0, 1), for the residual connection.
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


# ---- blocks on the sphere

_FINER = 4  # times as many steps of order 2 in the flow that steps are compared with
_AGAIN = 1e-4  # how far a block may be from itself when it is called again, relatively, in float32


@dataclass(frozen=True, repr=False)
class BlockFlow(Brief):
    """One trained block beside its flow on the sphere.

    Shares are 1 - sum |found - update|^2 / sum |update|^2 over tokens, as tangents at the block's input.

    Attributes
    ----------
    name : str
        Of the attention module.
    explained : float
        Share of the update that the flow at time 1 explains.
    layer : float
        Share that attention with the residual in one step explains, (u + a / r) over its length: the block without MLP.
    direction : float
        Share that the flow's velocity at the input explains with the time that fits best.
    time : float
        That time; below 0 where the block moves against its attention.
    angle : float
        Root mean square of the angle by which the block turns tokens, in radians.
    substeps : tuple of int
    distance : array of shape (M,)
        Of m geodesic Euler steps of length 1/m from the flow at time 1, over the way of the flow.
    order : float
        Slope of log distance over log(1/m); NaN with fewer than 3.
    """

    name: str
    explained: float
    layer: float
    direction: float
    time: float
    angle: float
    substeps: tuple[int, ...]
    distance: Floats
    order: float


def discretize_blocks(
    model: nn.Module,
    inputs: Any,
    *,
    substeps: Sequence[int] = (1, 2, 4, 8),
    adapter: Adapter | Sequence[Adapter] | None = None,
) -> list[BlockFlow]:
    """Compare the blocks of a trained model (norm, W_V, residual and all) with their flows on the sphere.

    With the length r of the block's input held, attention a is a velocity du/dt = (I - u u^T) a(x(u)) / r of the
    direction u of a token (arXiv 2312.10794).

    Parameters
    ----------
    model : torch.nn.Module
        Whose blocks can be called again on other tokens with the arguments of a run; without terms.
    inputs : mapping or tensor
        As for `nlflow.attention.probe`; tokens that ``attention_mask`` (or ``decoder_attention_mask``) calls padding
        are left out.
    substeps : sequence of int
        m >= 1.
    adapter
        As for `nlflow.attention.probe`.

    Returns
    -------
    list of BlockFlow
        One for each call of a block (``'… (call 2)'``, in models such as ALBERT).

    Raises
    ------
    InputError
        For layers of which it is not known what attention adds to their input, that give something else when they are
        called again, or whose attention moves no token beyond rounding.

    Notes
    -----
    Each block is run about sum(substeps) + 8 max(substeps) times; where the norm comes after attention, what its gain
    stretches counts as not explained.

    Examples
    --------
    >>> from transformers import BertConfig, BertModel
    >>> import torch
    >>> config = BertConfig(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32)
    >>> found = discretize_blocks(BertModel(config), torch.arange(5)[None])
    >>> len(found), all(one.explained <= 1 for one in found)
    (2, True)
    """
    counts = tuple(check_integer("substeps", m, minimum=1) for m in substeps)
    if not counts:
        raise InputError("substeps: got none, expected at least one number of steps")
    seen = [Seen(block) for block in blocks(model, adapter)]
    run = call_of(model, inputs)
    with torch.no_grad(), using(model, "looks into it"), evaluating(model):
        with watching(seen, calls=True):
            run()
        calls = [one for last in seen for one in (*last.earlier, last) if one.attended]
        if not calls:
            raise InputError(
                f"inputs: got a call of {type(model).__name__} in which no self-attention ran; expected inputs that "
                "need it"
            )
        several, given = len({one.block.stack for one in calls}) > 1, placed(model, inputs)
        return [_compared(one, given, one.block.stack if several else "", counts) for one in calls]


def _added(one: Seen, hidden: Tensor) -> Tensor:
    """Return what attention adds at other hidden states: the layer is called again."""
    # A cache would grow with each further call.
    args = [None if hasattr(value, "get_seq_length") else value for value in one.args[1:]]
    kwargs = {name: None if hasattr(value, "get_seq_length") else value for name, value in one.kwargs.items()}
    seen = Seen(one.block)
    given = hidden.transpose(0, 1) if one.turned else hidden
    with watching([seen]):
        if one.args:
            one.block.layer(given, *args, **kwargs)
        else:
            one.block.layer(**{**kwargs, "hidden_states": given})
    if seen.added is None:
        raise InputError(f"model: {one.name} did not run as before when its layer was called again: {seen.reason}")
    return seen.added


def _compared(one: Seen, inputs: Any, stack: str, counts: tuple[int, ...]) -> BlockFlow:
    name, before, added, after = one.name, one.before, one.added, one.after
    if before is None or after is None or added is None:
        reason = one.reason or "it is not in a layer that takes hidden states (B, N, D) and returns them"
        raise InputError(
            f"model: got {name} in {type(one.block.layer).__name__}, of which it is not known what its attention adds: "
            f"{reason}; expected x + attention + MLP, each perhaps normed; use nlflow.attention.probe"
        )
    once_more = _added(one, before)
    if float((once_more - added).norm()) > _AGAIN * float(added.norm()):
        raise InputError(
            f"model: {name} adds something else when its layer is called again with the same arguments, expected the "
            "same; the state of a call (terms, a cache) is in the way: detach the model, and give whole sequences"
        )
    centred = any(isinstance(module, nn.LayerNorm) for module in one.block.layer.modules())
    inside = tokens_of(before[:, None], None, inputs, stack)

    def direction(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return directions (M, D) of the tokens that count, their lengths and means."""
        x = x.double()
        mean = x.mean(-1, keepdim=True) if centred else torch.zeros_like(x[..., :1])
        length = (x - mean).norm(dim=-1, keepdim=True)
        if float(length.min()) == 0:
            raise InputError(f"model: {name} was given a token without a direction (all its features are equal)")
        return (x - mean) / length, length, mean

    start, length, mean = direction(before)
    flat = (-1, start.shape[-1])

    def attention(u: Tensor) -> Tensor:
        """Return a / r at directions (B, N, D), with the mean taken away."""
        found = _added(one, (u * length + mean).to(before.dtype)).double()
        return (found - found.mean(-1, keepdim=True) if centred else found) / length

    def velocity(u: Tensor) -> Tensor:
        a = attention(u)
        return a - (a * u).sum(-1, keepdim=True) * u

    def moved(u: Tensor, centre: Tensor, v: Tensor, dt: float) -> Tensor:
        found: Tensor = turned(u.reshape(flat), centre.reshape(flat), v.reshape(flat), dt).reshape(u.shape)
        return found

    def euler(count: int) -> Tensor:
        u = start
        for _ in range(count):
            u = moved(u, u, velocity(u), 1 / count)
        return u

    end, fine = start, _FINER * max(counts)
    for _ in range(fine):
        middle = moved(end, end, velocity(end), 0.5 / fine)
        end = moved(end, middle, velocity(middle), 1 / fine)

    first = velocity(start)
    step = start + attention(start)
    update = _logarithm(start, direction(after)[0])[inside]
    size, way = float(update.square().sum()), float((end - start)[inside].square().sum())
    along, square = float((first[inside] * update).sum()), float(first[inside].square().sum())
    # Angles that rounding makes: of the tokens, and of scalar products of D terms.
    least = max(torch.finfo(before.dtype).eps, start.shape[-1] * torch.finfo(torch.float64).eps)
    if min(size, way, square) <= len(update) * least**2:
        finer = "; load the model in float32" if before.element_size() < 4 else ""
        raise InputError(
            f"model: {name} moves no token beyond the rounding of {before.dtype}, expected some that move{finer}"
        )

    def share(found: Tensor) -> float:
        return 1 - float((_logarithm(start, found)[inside] - update).square().sum()) / size

    distance = [float((euler(m) - end)[inside].square().sum() / way) ** 0.5 for m in counts]
    found = torch.tensor(distance, dtype=torch.float64).numpy()
    return BlockFlow(
        name, share(end), share(step / step.norm(dim=-1, keepdim=True)), along**2 / (square * size), along / square,
        (size / len(update)) ** 0.5, counts, found, order_of(counts, found),
    )  # fmt: skip


def _logarithm(x: Tensor, y: Tensor) -> Tensor:
    """Return the tangent at x of the great circle to y, as long as its arc; both of length 1."""
    across = y - (x * y).sum(-1, keepdim=True) * x
    sine = across.norm(dim=-1, keepdim=True)
    angle = torch.atan2(sine, (x * y).sum(-1, keepdim=True))
    return torch.where(sine > 0, angle / sine.clamp_min(torch.finfo(sine.dtype).tiny), torch.ones_like(sine)) * across
