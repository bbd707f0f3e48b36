"""Attention matrices."""

from __future__ import annotations

import torch
from torch import Tensor

from nlflow.attention.probing.recording import kept_by_tokens
from nlflow.attention.probing.trace import Layer
from nlflow.attention.terms.averages import capped, log_affinity, seen
from nlflow.attention.terms.neutreno import wide

Place = tuple[slice, slice]
"""Sequences and heads."""


def bias_of(layer: Layer, place: Place) -> Tensor | None:
    """Return what is added to the logarithms, where padding sees and is seen by itself alone, or None."""
    count, tokens = layer.q.shape[-2], layer.tokens[place[0], None]
    padded = layer.padded and not bool(tokens.all())
    if layer.mask is None and not padded:
        return None
    bias = torch.zeros(1, 1, 1, 1, device=tokens.device)
    if layer.mask is not None:
        items, heads = (own if size > 1 else slice(None) for own, size in zip(place, layer.mask.shape[:2], strict=True))
        mask = layer.mask[items, heads]
        added = bias if mask.dtype == torch.bool else mask.float()
        bias = torch.where(seen(mask), added, -torch.inf)
    if padded:
        # Rows of padding do not count, but must have some value.
        own = ~tokens[..., :, None] & torch.eye(count, dtype=torch.bool, device=tokens.device)
        bias = bias.masked_fill(~tokens[..., None, :], -torch.inf).masked_fill(own, 0.0)
    return bias


def without_padding(layer: Layer, place: Place, part: Tensor) -> Tensor:
    """Return queries, keys or values with 0 at padding, where some models have NaN that a weight of 0 would spread."""
    part = wide(part[place])
    return part.masked_fill(~layer.tokens[place[0], None, :, None], 0.0) if layer.padded else part


def logarithms_of(layer: Layer, q: Tensor, k: Tensor, bias: Tensor | None) -> Tensor:
    found = capped(log_affinity(q, k, layer.kernel, layer.scaling), layer.softcap)
    return found if bias is None else found + bias


def matrices_of(layer: Layer, place: Place, k: Tensor | None = None) -> Tensor:
    keys = without_padding(layer, place, layer.k) if k is None else wide(k)
    logarithms = logarithms_of(layer, without_padding(layer, place, layer.q), keys, bias_of(layer, place))
    weights = logarithms.softmax(-1)
    return weights if layer.sink is None else weights * kept_by_tokens(logarithms, layer.sink[place])
