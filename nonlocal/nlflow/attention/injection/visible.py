"""What attention sees: the tokens over which means of cures are."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from nlflow.attention.injection.blocks import SUMS, TORCH, Block
from nlflow.attention.injection.inputs import without_wrapper
from nlflow.attention.terms.averages import causal_mask, seen
from nlflow.attention.threads import OfThread
from nlflow.errors import InputError

_PADDING = ("attention_mask", "key_padding_mask", "src_key_padding_mask", "padding_mask", "mask")  # of tokens
_IN_TORCH = (  # of padding, and between pairs
    (nn.MultiheadAttention, ("key_padding_mask", "attn_mask")),
    (nn.TransformerEncoderLayer, ("src_key_padding_mask", "src_mask")),
    (nn.TransformerDecoderLayer, ("tgt_key_padding_mask", "tgt_mask")),
)
_BETWEEN = ("attention_mask", "mask")  # of modules and layers elsewhere


class Present:
    """Tokens without padding."""

    def __init__(self, *, needed: bool) -> None:
        self.needed = needed
        self._own: dict[bool, OfThread] = {False: OfThread(), True: OfThread()}
        self._open = OfThread()
        self._last = OfThread()  # the last mask of a call, and what it shows
        self._padded = False  # whether any call had padding

    def hooks(self, model: nn.Module) -> list[Any]:
        return [
            model.register_forward_pre_hook(self._begin, with_kwargs=True),
            model.register_forward_hook(self._end, always_call=True),
        ]

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = dict(zip(inspect.signature(without_wrapper(module).forward).parameters, args, strict=False))
        for one in args:
            given |= dict(one) if isinstance(one, Mapping) else {}
        given |= kwargs
        self._open.set(True)
        for decoder, own in self._own.items():
            own.set(None)
            prefix = "decoder_" if decoder else ""
            for name in _PADDING:
                one = given.get(f"{prefix}{name}")
                if not isinstance(one, Tensor):
                    continue
                if one.ndim == 2 and not one.is_floating_point():
                    own.set(~one.bool() if "padding" in name else one.bool())
                elif self.needed and name == _PADDING[0]:
                    raise InputError(
                        f"{prefix}{name}: got {one.dtype} of shape {tuple(one.shape)} for a cure that takes means over "
                        "tokens, expected whole numbers or truth of shape (batch, tokens), 1 for those that are no "
                        "padding; take a cure without a mean where masks are between pairs"
                    )

    def _end(self, *_: Any) -> None:
        for own in (self._open, self._last, *self._own.values()):
            own.set(None)

    def once(self, mask: Tensor, key: tuple[Any, ...], shown: Callable[[], Tensor | None]) -> Tensor | None:
        """Return what a mask shows: a device is asked once for all layers of a call that get the same one."""
        if torch.compiler.is_compiling() or self._open.get() is None:
            return shown()
        last = self._last.get()
        if last is None or last[0] is not mask or last[1] != key:
            last = mask, key, shown()
            self._last.set(last)
        found: Tensor | None = last[2]
        return found

    def seen(self, block: Block, tokens: Tensor) -> Tensor | None:
        """Return which tokens (B, N, D) each may see, (B, N or 1, N)."""
        several = self._own[True].get() if block.stack == "decoder" else None
        mask = self._own[False].get() if several is None else several
        if self._padded and self._open.get() is None and torch._C._current_graph_task_id() != -1:
            raise InputError(
                f"cures: got gradient checkpointing, which computes {block.name} again when the padding of its call is "
                "forgotten, expected a call that keeps its states, for a cure with means over tokens; switch "
                "checkpointing off, or give sequences without padding"
            )
        if mask is None or tuple(mask.shape) != tuple(tokens.shape[:2]):
            return None
        return self.once(mask, (block.causal,), partial(self._beside_padding, block, mask))

    def _beside_padding(self, block: Block, mask: Tensor) -> Tensor | None:
        if not torch.compiler.is_compiling() and bool(mask.all()):  # a graph asks for no number
            return None
        self._padded = True
        square: Tensor = mask[:, None, :]
        if block.causal:
            square = square & causal_mask(mask.shape[1], mask.shape[1], mask.device)
        return square


def visible(
    block: Block, present: Present, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], tokens: Tensor
) -> Tensor | None:
    """Return which tokens (B, N, D) each may see in a call of an attention module or of its layer, (B, N or 1, N).

    None stands for all tokens, or in a causal block for those up to itself. Where masks differ between heads, the mask
    of the first head counts.
    """
    if block.kind != TORCH:
        for mask in _told(module.forward, args, kwargs, *_BETWEEN):
            if isinstance(mask, Tensor) and mask.ndim == 4:
                key = (block.causal, block.kind, *tokens.shape[:2])
                found = present.once(mask, key, partial(_between, block, mask, tokens))
                if found is not None:
                    return found
    for kind, names in _IN_TORCH:
        if block.kind == TORCH and isinstance(module, kind):
            padding, pairs = _told(module.forward, args, kwargs, *names)
            return _seen_in_torch(block, tokens, padding, pairs)
    return present.seen(block, tokens)


def _told(call: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *names: str) -> list[Any]:
    given = {**dict(zip(inspect.signature(call).parameters, args, strict=False)), **kwargs}
    return [given.get(name) for name in names]


def _between(block: Block, mask: Tensor, tokens: Tensor) -> Tensor | None:
    """Return what a mask (B or 1, H or 1, N or 1, N or more) of transformers shows, with windows; None for others."""
    items, count = tokens.shape[:2]
    if mask.shape[-1] < count or mask.shape[0] not in (1, items) or mask.shape[-2] not in (1, count):
        return None
    found = seen(mask[:, 0, :, :count])  # a cache of fixed size holds these tokens first
    if block.causal and (block.kind == SUMS or mask.shape[-2] == 1):
        found = found & causal_mask(count, count, mask.device)
    # A row is alone in its kind, and a graph asks for no number.
    if found.shape[1] > 1 and not torch.compiler.is_compiling() and bool((found == found[:, :1]).all()):
        found = found[:, :1]  # all see the same
    return found.expand(items, -1, -1)


def _seen_in_torch(block: Block, tokens: Tensor, padding: Any, pairs: Any) -> Tensor | None:
    """Return which tokens (B, N, D) each may see, (B, N or 1, N), by the masks of torch; None where all see all.

    Where masks differ between heads, the mask of the first head counts.
    """
    items, count = tokens.shape[:2]
    if padding is None and pairs is None and not block.causal:
        return None
    found = torch.ones(1, 1, count, dtype=torch.bool, device=tokens.device)
    if padding is not None:
        found = found & _shown_in_torch(padding).reshape(items, 1, count)
    if pairs is not None:
        shown = _shown_in_torch(pairs)
        found = found & (shown if shown.ndim == 2 else shown.reshape(items, -1, count, count)[:, 0])
    if block.causal:
        found = found & causal_mask(count, count, tokens.device)
    hides = block.causal and count > 1
    if not hides and not torch.compiler.is_compiling() and bool(found.all()):
        return None
    return found.expand(items, -1, -1)


def _shown_in_torch(mask: Tensor) -> Tensor:
    return ~mask if mask.dtype == torch.bool else seen(mask)
