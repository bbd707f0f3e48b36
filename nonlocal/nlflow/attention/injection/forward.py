"""What runs in the forward pass of a model with terms: the attention function, and the state of one call of a stack.

The function calls what the model calls without a term (its own ``eager`` function, or ``sdpa``), and adds the term to
the result. So masks, dropout and returned weights stay the model's. v0 travels from the first layer that runs to the
others in the dictionary of the call (`stacks`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from nlflow.attention.injection.adapters import transformers_library
from nlflow.attention.injection.discovery import own_eager
from nlflow.attention.injection.places import piece_of, rearranged, shown, turn, values_so_far
from nlflow.attention.injection.stacks import CALL, Stack
from nlflow.attention.terms.averages import FUSED, average, repeated, with_squares
from nlflow.attention.terms.neutreno import removed_similarity
from nlflow.errors import InputError

TERMS = "neutreno"  # the submodule of an attention module that holds its terms
STOCK = "_neutreno_stock"  # what an attention module calls without a term; modules without terms call just that
STACK = "_neutreno_stack"


def attention(
    affinity: str,
    base: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Compute the attention of one block: the names that `attach.register` registers stand for this function.

    The name gives `affinity` and `base`, the model the rest: `module` is its attention module, `query` is (B, H, M, d),
    `key` and `value` are (B, G, N, d), and `kwargs` has ``scaling``, ``dropout`` and other arguments. The result is the
    output (B, M, H, d), and the weights (B, H, M, N) where the base returns them.

    Raises
    ------
    InputError
        If the name needs terms and the model has none, if v0 is not that of these tokens, or if its derivative would
        be lost.
    """
    call = kwargs.pop(CALL, None)
    terms: Any = getattr(module, TERMS, None)
    if terms is None:  # cross-attention beside blocks that have terms, or a model that was not attached
        stock = hasattr(module, STOCK)
        if not stock and affinity in ("softmax", "symmetric"):
            raise InputError(
                f"attn_implementation: got a name of NeuTRENO's for {type(module).__name__}, whose model has no terms; "
                "call nlflow.attention.attach(model), which numbers its layers and sets the name"
            )
        return _plain("softmax" if stock else affinity, base, module, (query, key, value), attention_mask, kwargs)
    stack: Stack = getattr(module, STACK)
    name: str = terms.label or type(module).__name__
    shown(module, value)
    call = stack.of(call, name)
    count, past = query.shape[-2], call["past"]
    _check_tokens(call, name, count, value)
    if affinity == "symmetric":
        query = repeated(_new_rows(key, count, past), query.shape[1])
    output, weights = _plain(affinity, base, module, (query, key, value), attention_mask, kwargs)
    new, causal = _new_rows(value, count, past), terms.causal and count > 1
    if terms.feat is not None:
        terms.visible.set(_square_mask(attention_mask, count, key.shape[-2], terms.causal, "feat_scale"))
    first = first_values(stack, call, module, terms, new)
    if first is None and terms.attn_weight is None:
        return output, weights
    if causal and attention_mask is None and key.shape[-2] > count:
        # transformers gave no causal mask: a cache of fixed size holds these tokens first, and then nothing.
        key, value = key[..., :count, :], value[..., :count, :]
    used = weights
    if terms.log_variance is not None and first is not None and (weights is None or kwargs.get("dropout")):
        kernel = "softmax" if affinity == "symmetric" else affinity  # whose queries are keys already
        scaling = kwargs.get("scaling")
        used = average(query, key, value, kernel, scaling=scaling, mask=attention_mask, causal=causal)[1]
    result = terms(output.transpose(1, 2), value, new, first, used, attention_mask, causal)
    return result.transpose(1, 2), weights


def _plain(
    affinity: str, base: str, module: nn.Module, tokens: tuple[Tensor, ...], mask: Tensor | None, kwargs: dict[str, Any]
) -> tuple[Tensor, Tensor | None]:
    """Return the average alone, in transformers' layout (B, M, H, d), and its weights where they are formed.

    `tokens` are queries, keys and values; with ``'symmetric'`` the queries are keys already.
    """
    query, key, value = tokens
    if affinity in FUSED:
        if affinity == "gaussian":
            scaling = kwargs.get("scaling")
            kwargs = {**kwargs, "scaling": query.shape[-1] ** -0.5 if scaling is None else scaling}
            query, key = with_squares(query, key)
        if base == "eager" and getattr(module, "reorder_and_upcast_attn", False):  # GPT-2's other eager path
            return module._upcast_and_reordered_attn(query, key, value, mask)  # type: ignore[no-any-return,operator]
        stock = getattr(module, STOCK, None) or stock_function(module, base)
        return stock(module, query, key, value, mask, **kwargs)  # type: ignore[no-any-return]
    foreign = [name for name in ("softcap", "s_aux", "position_bias") if kwargs.get(name) is not None]
    if foreign:
        raise InputError(
            f"affinity: got {affinity!r} for {type(module).__name__}, whose attention uses {', '.join(foreign)}, "
            "which is defined for softmax; expected 'softmax', 'symmetric' or 'gaussian'"
        )
    averages, weights = average(
        query, key, value, affinity, scaling=kwargs.get("scaling"), mask=mask,
        causal=bool(getattr(module, "is_causal", False)),
        dropout=kwargs.get("dropout", 0.0) if module.training else 0.0,
    )  # fmt: skip
    return averages.transpose(1, 2).contiguous(), weights


def stock_function(module: nn.Module, base: str) -> Callable[..., Any]:
    """Return what a module calls without a term: its own file's eager function, or transformers' sdpa."""
    if base == "sdpa":
        function: Callable[..., Any] = transformers_library().AttentionInterface()["sdpa"]
        return function
    if (found := own_eager(module)) is not None:
        return found
    raise InputError(
        f"model: got {type(module).__name__}, whose file has no eager_attention_forward, expected one as in "
        "transformers 5; load the model with attn_implementation='sdpa'"
    )


def _new_rows(value: Tensor, count: int, past: int | Tensor) -> Tensor:
    """Return the rows of values that belong to this call's tokens.

    With a growing cache they are the last. In a cache of fixed size they follow those of the past, until it is full.
    """
    tokens = value.shape[-2]
    if tokens == count:
        return value
    if isinstance(past, Tensor):
        start = past.clamp_max(tokens - count)
        return value.index_select(-2, start + torch.arange(count, device=value.device))
    return value.narrow(-2, min(past, tokens - count), count)


def first_values(stack: Stack, call: dict[str, Any], module: nn.Module, terms: Any, new: Tensor) -> Tensor | None:
    """Return v0 for this layer, in its order of tokens, or None where it has no term: in the first that runs.

    After a look at whether v0 is what this layer needs: of the first layer and not of itself, of the same shape, with
    its derivative.
    """
    name = terms.label or type(module).__name__
    owner = call.setdefault("owner", module)
    number = turn(call, module, new)
    if "first" not in call or (owner is module and (not terms.repeated or number not in call["first"])):
        values_so_far(call, module, new, number)
        call.setdefault("graph", torch.is_grad_enabled())
        if not (terms.first or terms.repeated or module.training):
            raise InputError(
                f"model: got a call in which {name} ran and the first layer of its stack did not, so that there is no "
                "v0; do not drop the first layer (layerdrop=0)"
            )
        return None
    if not terms.active:
        if terms.first:
            raise InputError(
                f"model: got a call in which {name}, the first layer of its stack, ran after another, whose values "
                "would be v0; expected layers that run in the order in which the model lists them"
            )
        return None
    if number not in call["first"]:
        raise InputError(
            f"model: got {number + 1} averages in one call of {name}, more than in the first layer of its stack; "
            "expected layers of the same kind; give these layers fidelity 0"
        )
    first: Tensor = call["first"][number]
    call["acted"].add(name)
    if first.device != new.device:  # layers on several devices
        first = first.to(new.device)
    moved = piece_of(call, module, first, new)
    if moved is None:
        moved = rearranged(call, stack.layouts, module, first, new)
    if moved.shape != new.shape:
        raise InputError(
            f"model: got values of shape {tuple(new.shape)} in {name} and v0 of shape {tuple(first.shape)}; expected "
            "layers of the same heads and tokens; give these layers fidelity 0"
        )
    if not call["graph"] and torch.is_grad_enabled() and new.requires_grad:
        raise InputError(
            "model: got gradient checkpointing with use_reentrant=True (or a first layer under no_grad), with which "
            "the derivative with respect to v0 is lost; expected the other kind; switch checkpointing on with "
            "use_reentrant=False"
        )
    return moved


def _check_tokens(call: dict[str, Any], name: str, count: int, value: Tensor) -> None:
    """Refuse values of other tokens than those that look: reduced keys, or another sequence."""
    tokens = value.shape[-2]
    if tokens < count or (tokens > count and not call["cached"]):
        raise InputError(
            f"model: got {tokens} values for {count} queries in {name}, without a cache: reduced keys, or those of "
            "another sequence; expected self-attention over the same tokens; leave this module out with adapter="
        )


def _square_mask(mask: Tensor | None, queries: int, keys: int, causal: bool, name: str) -> Tensor | None:
    """Return the mask between the tokens of this call, (B, N, N), or refuse where means need tokens of the past."""
    if queries != keys and causal:
        raise InputError(
            f"{name}: got {queries} token(s) after {keys - queries} in a cache, expected the whole sequence, since the "
            "mean over its tokens is not in the cache; decode with use_cache=False"
        )
    return None if mask is None else mask[:, 0]


def mask_position(layer: nn.Module) -> int:
    """Return which argument of a transformer layer its mask is, or refuse layers without one."""
    names = list(inspect.signature(layer.forward).parameters)
    if "attention_mask" not in names:
        raise InputError(
            f"similarity_removal: got layers {type(layer).__name__} without an argument attention_mask, expected "
            "one, which says what tokens the mean is over; use NeutrenoAttention in an own model"
        )
    return names.index("attention_mask")


@dataclass(eq=False)
class SimilarityRemoval:
    """A hook before a transformer layer that takes the tokens' mean away; `position` is that of its mask."""

    position: int
    strength: float
    causal: bool
    stack: Stack

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Return the arguments of the layer with other tokens."""
        mask = kwargs.get("attention_mask", args[self.position] if len(args) > self.position else None)
        call = self.stack.of(kwargs.get(CALL), type(module).__name__)
        inside = bool(args)
        tokens = args[0] if inside else kwargs["hidden_states"]
        count, past = tokens.shape[-2], call["past"]
        keys = count + past if mask is None else mask.shape[-1]
        mask = _square_mask(mask, count, keys, self.causal, "similarity_removal")
        changed = removed_similarity(tokens, self.strength, mask, causal=self.causal)
        return ((changed, *args[1:]), kwargs) if inside else (args, {**kwargs, "hidden_states": changed})
