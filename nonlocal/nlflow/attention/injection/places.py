"""Which token each row of values belongs to, where layers cut their tokens into windows, shift them or pad them.

The layer is run again on other inputs, up to its values. A token's row of values changes if and only if the token does.
So 2 log2(T) runs, in each of which half of the T tokens are others, spell the number of the token of each row in bits.
This is done once for each shape of inputs, and only where rows of values are not those of the tokens that came in.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from nlflow.attention.injection.threads import using
from nlflow.errors import InputError

_TRACED: ContextVar[nn.Module | None] = ContextVar("nlflow_places", default=None)


class _Shown(BaseException):  # no module between may catch it
    """The values of the traced module, which end its run."""

    def __init__(self, values: Tensor) -> None:
        self.values = values


def shown(module: nn.Module, values: Tensor) -> None:
    """End the run of a layer whose values are asked for; does nothing otherwise."""
    if not torch.compiler.is_compiling() and _TRACED.get() is module:
        raise _Shown(values)


def tracing() -> bool:
    """Return whether a layer runs only for its values."""
    return not torch.compiler.is_compiling() and _TRACED.get() is not None


def note(call: dict[str, Any], module: nn.Module, layer: nn.Module, args: tuple[Any, ...], kwargs: Any) -> None:
    """Keep what a layer is called with: of the first of a call and of the latest."""
    if "entered" in call and call["entered"][0] is not call.get("owner", call["entered"][0]):
        call.pop("entered")
    call["latest"] = (module, layer, args, kwargs)
    call.setdefault("entered", call["latest"])


def counting(call: dict[str, Any], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Keep how many tokens an attention module is called with, none of which has been averaged yet."""
    given = (kwargs.get("hidden_states"), *args, *kwargs.values())
    tokens = next((one for one in given if isinstance(one, Tensor) and one.ndim > 1 and one.is_floating_point()), None)
    call.setdefault("counts", {})[id(module)] = [0, 0 if tokens is None else tokens.shape[:-1].numel(), 0]


def turn(call: dict[str, Any], module: nn.Module, new: Tensor) -> int:
    """Return which set of values of a module this is, 0 for most: some average two sets with the same P, as DiffLlama.

    Pieces of a sequence are one set.
    """
    counts = call.get("counts", {}).get(id(module))
    if counts is None or _piece(call, module, new) is not None:
        return 0
    counts[2] += 1
    return int(counts[2]) - 1


def _piece(call: dict[str, Any], module: nn.Module, new: Tensor) -> list[int] | None:
    """Return the counts of a module that averages over parts of its tokens, one call of its function after the other.

    Vision towers of language models do so: their sequence has all pictures, and no token sees those of another one.
    """
    counts: list[int] | None = call.get("counts", {}).get(id(module))
    return counts if counts is not None and new.shape[0] == 1 and new.shape[-2] < counts[1] else None


def values_so_far(call: dict[str, Any], module: nn.Module, new: Tensor, number: int) -> None:
    """Keep v0, or add to it the next piece. Checkpointing comes here again: the first v0 has the whole graph."""
    sets: dict[int, Tensor] = call.setdefault("first", {})
    counts = _piece(call, module, new)
    if number not in sets:
        sets[number] = new
    elif counts is not None and sets[number].shape[-2] < counts[1]:
        sets[number] = torch.cat([sets[number], new], dim=-2)
    if counts is not None:
        counts[0] += new.shape[-2]


def piece_of(call: dict[str, Any], module: nn.Module, first: Tensor, new: Tensor) -> Tensor | None:
    """Return the rows of v0 that belong to a piece of the tokens; None where `new` has all of them."""
    counts = _piece(call, module, new)
    if counts is None:
        return None
    begin, counts[0] = counts[0], counts[0] + new.shape[-2]
    if first.shape[-2] != counts[1] or counts[0] > counts[1]:
        raise InputError(
            f"model: got {type(module).__name__}, which averages over parts of {counts[1]} tokens, and a first layer "
            f"of its stack with {first.shape[-2]}; expected layers over the same tokens; give these layers fidelity 0"
        )
    return first.narrow(-2, begin, new.shape[-2])


def rearranged(call: dict[str, Any], kept: dict[Any, Tensor], module: nn.Module, first: Tensor, new: Tensor) -> Tensor:
    """Return v0 with its rows in the order of this layer's; `first` itself where tokens stay in their places.

    `first` and `new` are (B, H, N, D); B and N may be those of windows.
    """
    begun, latest = call.get("entered"), call.get("latest")
    if begun is None or latest is None or latest[0] is not module or begun[0] is not call["owner"]:
        return first  # the layer is the attention itself
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
            f"model: got tokens in {type(module).__name__} that the first layer of its stack did not have; expected "
            "layers over the same tokens; give these layers fidelity 0"
        )
    flat = first.transpose(1, 2).flatten(0, 1).index_select(0, order)
    return flat.reshape(*target.shape, *flat.shape[1:]).transpose(1, 2)


def _tokens(values: Any) -> Tensor | None:
    """Return the tokens (B, …, C) among the arguments of a layer: its first tensor of numbers with three axes."""
    return next((one for one in values if isinstance(one, Tensor) and one.ndim > 2 and one.is_floating_point()), None)


def _plain(kept: dict[Any, Tensor], entered: Any, values: Tensor) -> bool:
    """Return whether rows of values are the tokens of the layer's input, in their places."""
    tokens = _tokens((*entered[2], *entered[3].values()))
    if tokens is None or (tokens.shape[0] == values.shape[0] and tokens.shape[1:-1].numel() == values.shape[2]):
        return True
    return _key_of_streams(entered[0], tokens, values) in kept


def _streams(tokens: Tensor, values: Tensor) -> int | None:
    """Return the axis along which the same tokens come several times, as in hyper-connections; None without such."""
    shape, wanted = list(tokens.shape[:-1]), [values.shape[0], values.shape[2]]
    return next((axis for axis in range(len(shape)) if shape[:axis] + shape[axis + 1 :] == wanted), None)


def _key_of_streams(module: nn.Module, tokens: Tensor, values: Tensor) -> tuple[int, str, int | None]:
    """Return under what is kept that the rows of a module's values are the tokens, whatever their streams."""
    return id(module), "streams", _streams(tokens, values)


def fresh(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return arguments with copies of caches, which a run of the module would write into."""
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


def _layout(kept: dict[Any, Tensor], entered: Any, values: Tensor) -> Tensor:
    """Return the number of the token of each row of values, (B, N); -1 for rows of no token."""
    module, layer, args, kwargs = entered
    tokens = _tokens((*args, *kwargs.values()))
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
        base = _values(entered, tokens, tokens)
        if (base.shape[0], base.shape[2]) != tuple(found.shape):
            raise InputError(
                f"model: got {type(module).__name__}, which makes {tuple(base.shape)} values, then "
                f"{tuple(values.shape)}, of one input; expected one row of values for each token; "
                "leave this module out with adapter="
            )
        for bit in range(count.bit_length()):
            chosen = (numbers >> bit) & 1 == 1
            one = (_values(entered, tokens, torch.where(chosen, other, tokens)) != base).any(-1).any(1)
            rest = (_values(entered, tokens, torch.where(chosen, tokens, other)) != base).any(-1).any(1)
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


def _values(entered: Any, tokens: Tensor, given: Tensor) -> Tensor:
    """Return the values that a layer makes of other tokens."""
    module, layer, args, kwargs = entered
    args, kwargs = fresh(args, kwargs)
    token = _TRACED.set(module)
    try:
        layer(
            *(given if one is tokens else one for one in args),
            **{name: given if one is tokens else one for name, one in kwargs.items()},
        )
    except _Shown as found:
        return found.values
    finally:
        _TRACED.reset(token)
    raise InputError(f"model: got {type(module).__name__}, which did not run when its layer ran again; expected values")


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put all modules into evaluation mode for a while, without dropout; other threads may not run them then."""
    training = [module for module in model.modules() if module.training]
    if not training:
        yield
        return
    with using(model, "has put the training into evaluation mode", alone=True):
        for module in training:
            module.training = False
        try:
            yield
        finally:
            for module in training:
                module.training = True
