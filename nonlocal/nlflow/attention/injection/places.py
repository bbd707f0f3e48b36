"""Which token each row of values belongs to, where layers cut, shift or pad their tokens."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from nlflow.attention.threads import evaluating, run_for_values
from nlflow.errors import InputError


class Entered(NamedTuple):
    """A layer's arguments."""

    module: nn.Module
    layer: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tokens: Tensor | None


def rearrange(kept: dict[Any, Tensor], begun: Entered, latest: Entered, first: Tensor, new: Tensor) -> Tensor:
    """Return v0 (B, H, N, D) with its rows in the order of this layer's; B and N may be those of windows."""
    if _plain(kept, begun, first) and _plain(kept, latest, new):
        return first
    source, target = _layout(kept, begun, first), _layout(kept, latest, new)
    if source.shape == target.shape and torch.equal(source, target):
        return first
    places = torch.full((int(max(source.max(), target.max())) + 1,), -1, dtype=torch.long, device=source.device)
    rows = torch.arange(source.numel(), device=source.device)
    inside = source.flatten() >= 0
    places[source.flatten()[inside]] = rows[inside]
    order = torch.where(target.flatten() >= 0, places[target.flatten().clamp_min(0)], 0)
    if bool((order < 0).any()):
        raise InputError(
            f"model: got tokens in {type(latest.module).__name__} that the first layer of its stack did not have; "
            "expected layers over the same tokens; give these layers fidelity 0"
        )
    flat = first.transpose(1, 2).flatten(0, 1).index_select(0, order)
    return flat.reshape(*target.shape, *flat.shape[1:]).transpose(1, 2)


def _plain(kept: dict[Any, Tensor], entered: Entered, values: Tensor) -> bool:
    tokens = entered.tokens
    if tokens is None or (tokens.shape[0] == values.shape[0] and tokens.shape[1:-1].numel() == values.shape[2]):
        return True
    return _key_of_streams(entered.module, tokens, values) in kept


def _streams(tokens: Tensor, values: Tensor) -> int | None:
    """Return the axis along which the same tokens come several times, as in hyper-connections; None without such."""
    shape, wanted = list(tokens.shape[:-1]), [values.shape[0], values.shape[2]]
    return next((axis for axis in range(len(shape)) if shape[:axis] + shape[axis + 1 :] == wanted), None)


def _key_of_streams(module: nn.Module, tokens: Tensor, values: Tensor) -> tuple[int, str, int | None]:
    return id(module), "streams", _streams(tokens, values)


def fresh(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    memo: dict[int, Any] = {}

    def copied(one: Any) -> Any:
        if not hasattr(one, "get_seq_length"):
            return one
        for layer in getattr(one, "layers", ()):
            for kept in vars(layer).values():
                if isinstance(kept, Tensor) and not kept.is_leaf:  # keys of a training, whose graph has no copy
                    memo[id(kept)] = kept.detach().clone()
        return copy.deepcopy(one, memo)

    return tuple(copied(one) for one in args), {name: copied(one) for name, one in kwargs.items()}


def _layout(kept: dict[Any, Tensor], entered: Entered, values: Tensor) -> Tensor:
    """Return the number of the token of each row of values, (B, N); -1 for rows of no token.

    A row of values changes where its token does: 2 log2(T) runs, with about half of the T tokens others, spell the
    number of each row's token.
    """
    module, layer, args, kwargs, tokens = entered
    assert tokens is not None  # or `_plain` had been true
    others = repr([one for one in (*args, *kwargs.items()) if not isinstance(one, Tensor | tuple)])
    key = (id(module), tuple(tokens.shape), tuple(values.shape), others)
    if key in kept:
        return kept[key]
    if torch.compiler.is_compiling():
        raise InputError(
            f"model: got {type(module).__name__}, which rearranges its tokens, in torch.compile before a run without; "
            "run the model once on inputs of these shapes, and then compile it"
        )
    streams = _streams(tokens, values)
    shape = [1 if axis == streams else length for axis, length in enumerate(tokens.shape[:-1])]
    count = torch.Size(shape).numel()
    numbers = torch.arange(1, count + 1, device=tokens.device).view(*shape, 1)
    generator = torch.Generator().manual_seed(0)
    other = torch.randn(tokens.shape, generator=generator).to(tokens)
    found = torch.zeros((values.shape[0], values.shape[2]), dtype=torch.long, device=tokens.device)
    with evaluating(layer), torch.no_grad():
        # Kernels of a GPU are chosen by where rows lie in memory, and give other last bits: all runs have them alike.
        tokens = tokens.clone(memory_format=torch.contiguous_format)
        base = _values(entered, tokens)
        if (base.shape[0], base.shape[2]) != tuple(found.shape):
            raise InputError(
                f"model: got {type(module).__name__}, which makes {tuple(base.shape)} values, then "
                f"{tuple(values.shape)}, of one input; expected one row of values for each token; "
                "leave this module out with adapter="
            )
        for bit in range(count.bit_length()):
            chosen = (numbers >> bit) & 1 == 1
            one = (_values(entered, torch.where(chosen, other, tokens)) != base).any(-1).any(1)
            rest = (_values(entered, torch.where(chosen, tokens, other)) != base).any(-1).any(1)
            if bool((one & rest).any()):
                raise InputError(
                    f"model: got values of {type(module).__name__} that each belong to several tokens, so that v0 and "
                    "v cannot be compared; expected one token for each; leave this module out with adapter="
                )
            found |= one.long() << bit
    kept[key] = found - 1
    # Values without any token are those that an earlier layer of the same tokens has made.
    if streams is not None and (torch.equal(found.flatten(), numbers.flatten()) or not bool(found.any())):
        kept[_key_of_streams(module, tokens, values)] = found
    return kept[key]


def _values(entered: Entered, given: Tensor) -> Tensor:
    args, kwargs = fresh(entered.args, entered.kwargs)
    args = tuple(given if one is entered.tokens else one for one in args)
    kwargs = {name: given if one is entered.tokens else one for name, one in kwargs.items()}
    found = run_for_values(entered.module, lambda: entered.layer(*args, **kwargs))
    if found is None:
        raise InputError(
            f"model: got {type(entered.module).__name__}, which did not run when its layer ran again; expected values"
        )
    return found
