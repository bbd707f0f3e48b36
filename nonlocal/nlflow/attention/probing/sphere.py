"""Whole blocks as steps of a flow on the sphere: how much of what a trained block does its attention flow explains.

A norm divides tokens by their lengths, so what a block sees of a token x is its direction u (for a layer norm: of
x - mean). With the length r and the mean of the block's input held, its attention a(x), with norm, W_Q, W_K, W_V and
W_O as they were trained, is a velocity on the sphere, du/dt = (I - u u^T) a(x(u)) / r (arXiv 2312.10794, section 2). At
time 1 that flow is what the block would be as many thin layers of attention. What is left is the MLP, and what
one long step misses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from nlflow.attention.injection.adapters import Adapter, blocks
from nlflow.attention.injection.places import evaluating
from nlflow.attention.injection.threads import using
from nlflow.attention.probing.branches import Seen, watching
from nlflow.attention.probing.discretization import Floats, order_of
from nlflow.attention.probing.probe import call_of
from nlflow.errors import InputError, check_integer
from nlflow.flows.sphere import turned

_FINER = 4  # times as many steps of order 2 in the flow that steps are compared with
_AGAIN = 1e-4  # how far a block may be from itself when it is called again, relatively, in float32


@dataclass(frozen=True)
class BlockFlow:
    """One trained block beside its flow on the sphere.

    All shares are 1 - sum |found - update|^2 / sum |update|^2 over tokens, with the update of the block and what is
    found as tangents at the block's input (of the great circles that lead there). 0 explains as much as a block at
    rest; below 0 it leads away.

    Attributes
    ----------
    name : str
        Of the attention module.
    explained : float
        Share of the update that the flow at time 1 explains.
    layer : float
        Share that attention with the residual in one step explains, (u + a / r) over its length: the block without MLP.
    direction : float
        Share that the flow's velocity at the input explains with the time that fits best: cos^2 of the angle between
        both, over all tokens.
    time : float
        That time; below 0 where the block moves against its attention.
    angle : float
        Root mean square of the angle by which the block turns tokens, in radians.
    substeps : tuple of int
        m.
    distance : array of shape (M,)
        Of m geodesic Euler steps of length 1/m from the flow at time 1, over the way of the flow.
    order : float
        Slope of log distance over log(1/m); the theory says 1. NaN with fewer than 3.
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

    Parameters
    ----------
    model : torch.nn.Module
        Whose blocks can be called again on other tokens with the arguments of a run; without terms.
    inputs : mapping or tensor
        As for `nlflow.attention.probe`. With an ``attention_mask`` the tokens that are padding are left out.
    substeps : sequence of int
        m >= 1.
    adapter : Adapter or sequence of Adapter, optional
        Where the blocks are.

    Returns
    -------
    list of BlockFlow
        In the order of the blocks, with one for each call of a block (``'… (call 2)'``, in models such as ALBERT).

    Raises
    ------
    InputError
        For layers of which it is not known what attention adds to their input (the reason is told), that give something
        else when they are called again, or whose attention moves no token.

    Notes
    -----
    What attention adds is what is added to the hidden state: after an output projection, a norm or a LayerScale.
    Each block is run sum(substeps) + 8 max(substeps) times. Where the norm comes after attention, its gain stretches
    the sphere from block to block; what it stretches counts as not explained.

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
    given = call_of(model, inputs)
    with torch.no_grad(), using(model, "looks into it"), evaluating(model):
        with watching(seen, calls=True):
            given()
        calls = [_Call(one) for last in seen for one in (*last.earlier, last) if one.attended]
        if not calls:
            raise InputError(
                f"inputs: got a call of {type(model).__name__} in which no self-attention ran; expected inputs that "
                "need it"
            )
        return [_compared(one, inputs, counts) for one in calls]


class _Call:
    """One call of a layer: the state that it was given, the state after it, and what attention adds."""

    def __init__(self, seen: Seen) -> None:
        self.name, self.block = seen.name, seen.block
        if seen.before is None or seen.after is None or seen.added is None:
            reason = seen.reason or "it is not in a layer that takes hidden states (B, N, D) and returns them"
            raise InputError(
                f"model: got {self.name} in {type(self.block.layer).__name__}, of which it is not known what its "
                f"attention adds: {reason}; expected x + attention + MLP, each perhaps normed; use "
                "nlflow.attention.probe"
            )
        self.before, self.after, self.added = seen.before, seen.after, seen.added
        # A cache would grow with each further call.
        self.args = tuple(None if hasattr(one, "get_seq_length") else one for one in seen.args)
        self.kwargs = {name: None if hasattr(one, "get_seq_length") else one for name, one in seen.kwargs.items()}

    def again(self, hidden: Tensor) -> Tensor:
        """Return what attention adds at other hidden states."""
        seen = Seen(self.block)
        with watching([seen]):
            if self.args:
                self.block.layer(hidden, *self.args[1:], **self.kwargs)
            else:
                self.block.layer(**{**self.kwargs, "hidden_states": hidden})
        if seen.added is None:
            raise InputError(f"model: {self.name} did not run as before when its layer was called again: {seen.reason}")
        return seen.added


# ---- the flow of one block


def _compared(one: _Call, inputs: Any, counts: tuple[int, ...]) -> BlockFlow:
    name, before, added, after = one.name, one.before, one.added, one.after
    once_more = one.again(before)
    if float((once_more - added).norm()) > _AGAIN * float(added.norm()):
        raise InputError(
            f"model: {name} adds something else when its layer is called again with the same arguments, expected the "
            "same; the state of a call (terms, a cache) is in the way: detach the model, and give whole sequences"
        )
    centred = any(isinstance(module, nn.LayerNorm) for module in one.block.layer.modules())
    inside = _inside(inputs, before)

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
        found = one.again((u * length + mean).to(before.dtype)).double()
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
        raise InputError(f"model: {name} moves no token, expected some that move")

    def share(found: Tensor) -> float:
        return 1 - float((_logarithm(start, found)[inside] - update).square().sum()) / size

    distance = [float((euler(m) - end)[inside].square().sum() / way) ** 0.5 for m in counts]
    found = torch.tensor(distance, dtype=torch.float64).numpy()
    return BlockFlow(
        name, share(end), share(step / step.norm(dim=-1, keepdim=True)), along**2 / (square * size), along / square,
        (size / len(update)) ** 0.5, counts, found, order_of(counts, found),
    )  # fmt: skip


def _inside(inputs: Any, before: Tensor) -> Tensor:
    """Return which tokens are no padding, bool (B, N)."""
    given = inputs.get("attention_mask") if isinstance(inputs, Mapping) else None
    if isinstance(given, Tensor) and tuple(given.shape) == tuple(before.shape[:2]):
        return given.bool().to(before.device)
    return torch.ones(before.shape[:2], dtype=torch.bool, device=before.device)


def _logarithm(x: Tensor, y: Tensor) -> Tensor:
    """Return the tangent at x of the great circle to y, as long as its arc; both of length 1."""
    across = y - (x * y).sum(-1, keepdim=True) * x
    sine = across.norm(dim=-1, keepdim=True)
    angle = torch.atan2(sine, (x * y).sum(-1, keepdim=True))
    return torch.where(sine > 0, angle / sine.clamp_min(torch.finfo(sine.dtype).tiny), torch.ones_like(sine)) * across
