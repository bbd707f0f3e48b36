"""Whole blocks as steps of a flow on the sphere: how much of what a trained block does its attention flow explains.

A norm divides tokens by their lengths, so what a block sees of a token x is its direction u (for a layer norm: of
x - mean). With the length r and the mean of the block's input held, its attention a(x), with norm, W_Q, W_K, W_V and
W_O as they were trained, is a velocity on the sphere, du/dt = (I - u u^T) a(x(u)) / r (arXiv 2312.10794, section 2). At
time 1 that flow is what the block would be as many thin layers of attention. What is left is the MLP, and what
one long step misses.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from nlflow.attention.injection.adapters import Adapter, Block, blocks
from nlflow.attention.injection.places import evaluating
from nlflow.attention.probing.discretization import Floats, order_of
from nlflow.attention.probing.probe import call_of
from nlflow.errors import InputError, check_integer
from nlflow.flows.sphere.steps import turned

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
        Where the blocks are, with their output projections.

    Returns
    -------
    list of BlockFlow
        In the order of the blocks.

    Raises
    ------
    InputError
        For blocks whose output projection is not known, that give something else when they are called again, or whose
        attention moves no token.

    Notes
    -----
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
    seen = [_Seen(block) for block in blocks(model, adapter)]
    for one in seen:
        if one.block.projection is None:
            raise InputError(
                f"model: got {one.block.name}, whose output projection is not known, expected a module; name it in "
                "adapter=Adapter(…, projection=…)"
            )
    with torch.no_grad(), evaluating(model):
        with _watching(seen):
            call_of(model, inputs)()
        return [_compared(one, inputs, counts) for one in seen]


@dataclass(eq=False)
class _Seen:
    """What a run shows of a block: the arguments of its layer, what comes out, and what attention adds."""

    block: Block
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    after: Tensor | None = None
    added: Tensor | None = None

    def tokens(self) -> Tensor:
        """Return the hidden state that the layer was given."""
        given = self.args[0] if self.args else self.kwargs.get("hidden_states")
        if not isinstance(given, Tensor) or self.after is None or self.added is None or self.after.shape != given.shape:
            raise InputError(
                f"model: {self.block.name} is in a layer that does not take hidden states (B, N, D) first and return "
                "them, expected one; use nlflow.attention.probe"
            )
        return given

    def again(self, hidden: Tensor) -> Tensor:
        """Return what attention adds at other hidden states."""
        kept = self.after, self.added
        with self.watched():
            if self.args:
                self.block.layer(hidden, *self.args[1:], **self.kwargs)
            else:
                self.block.layer(**{**self.kwargs, "hidden_states": hidden})
        found = self.added
        self.after, self.added = kept
        if found is None:
            raise InputError(f"model: {self.block.name} did not run when its layer was called again")
        return found

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Keep what the output projection returns."""

        def keep(module: nn.Module, args: Any, output: Tensor) -> None:
            self.added = output.detach()

        projection = self.block.projection
        handle = projection.register_forward_hook(keep)  # type: ignore[union-attr]  # checked before
        try:
            yield
        finally:
            handle.remove()


@contextmanager
def _watching(seen: list[_Seen]) -> Iterator[None]:
    with ExitStack() as stack:

        def watch(one: _Seen) -> None:
            def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                # A cache would grow with each further call.
                without = {name: None if hasattr(value, "get_seq_length") else value for name, value in kwargs.items()}
                one.args = tuple(None if hasattr(value, "get_seq_length") else value for value in args)
                one.kwargs = without
                first = one.args[0] if one.args else without.get("hidden_states")
                if isinstance(first, Tensor):  # later modules may write into it
                    copied = first.detach().clone()
                    if one.args:
                        one.args = (copied, *one.args[1:])
                    else:
                        one.kwargs["hidden_states"] = copied

            def leave(module: nn.Module, args: Any, output: Any) -> None:
                found = output[0] if isinstance(output, tuple | list) else output
                one.after = found.detach().clone() if isinstance(found, Tensor) else None

            stack.callback(one.block.layer.register_forward_pre_hook(enter, with_kwargs=True).remove)
            stack.callback(one.block.layer.register_forward_hook(leave).remove)
            stack.enter_context(one.watched())

        for one in seen:
            watch(one)
        yield


# ---- the flow of one block


def _compared(one: _Seen, inputs: Any, counts: tuple[int, ...]) -> BlockFlow:
    before = one.tokens()
    name, added, after = one.block.name, one.added, one.after
    assert added is not None
    assert after is not None
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
