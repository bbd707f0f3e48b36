"""A segmenter in plain torch: an encoder of patches, and a decoder of patches and classes, each with its own v0."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from nlflow.attention import Adapter, NeighbourAttention, NeutrenoAttention, Taken
from nlflow.attention.terms.modules import value_residual

__all__ = ["ADAPTERS", "Segmenter", "taken"]

ADAPTERS = (
    Adapter("encoder.layers.*.attention", stack="encoder", causal=False),
    Adapter("decoder.layers.*.attention", stack="decoder", causal=False),
)
"""Where `nlflow.attention.probe` finds the attention."""


def taken(module: NeutrenoAttention, args: Any, kwargs: Any, output: Any) -> Taken:
    """Return what an attention module compared and averaged, for `nlflow.attention.probe`."""
    query, key, value = module.parts(args[0])
    kind = getattr(module, "kind", "")
    if kind == "value-residual" and args[1] is not None:
        value = value_residual(value, args[1], *module.shares.flip(0))
    elif kind == "differential":  # two averages of the same values, as twice as many heads
        query, key = (torch.cat(part.chunk(2, dim=-1), dim=1) for part in (query, key))
        value = torch.cat([value, value], dim=1)
    return Taken(query, key, value, kernel=module.terms.options.affinity)


class _Layer(nn.Module):
    def __init__(self, number: int, width: int, heads: int, options: dict[str, Any]) -> None:
        super().__init__()
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        kinds = {"kind": options["kind"], "layer": number + 1} if "kind" in options else None
        self.attention = (
            NeutrenoAttention(width, heads, **options) if kinds is None else NeighbourAttention(width, heads, **kinds)
        )
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, tokens: Tensor, first: Tensor | None) -> tuple[Tensor, Tensor]:
        step, first = self.attention(self.before_attention(tokens), first)
        tokens = tokens + step
        return tokens + self.mlp(self.before_mlp(tokens)), first


class _Stack(nn.Module):
    def __init__(self, depth: int, width: int, heads: int, options: dict[str, Any]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Layer(n, width, heads, options) for n in range(depth))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: Tensor) -> Tensor:
        first = None
        for layer in self.layers:
            tokens, first = layer(tokens, first)
        return self.norm(tokens)


class Segmenter(nn.Module):
    """Class of each pixel from patches: a vision transformer, then a mask transformer.

    Parameters
    ----------
    side, patch : int
        Pixels of a picture and of a patch along each axis.
    width, heads : int
    depth, decoder_depth : int
        Layers of encoder and decoder.
    classes : int
    options : dict
        Of `nlflow.attention.NeutrenoAttention`; with ``kind`` alone, that of `nlflow.attention.NeighbourAttention`.

    References
    ----------
    .. [1] R. Strudel, R. Garcia, I. Laptev, C. Schmid, "Segmenter: transformer for semantic segmentation", ICCV 2021,
       arXiv 2105.05633.
    """

    def __init__(
        self,
        *,
        side: int,
        patch: int,
        width: int,
        heads: int,
        depth: int,
        decoder_depth: int,
        classes: int,
        options: dict[str, Any],
    ) -> None:
        super().__init__()
        self.grid, self.patch, self.classes = side // patch, patch, classes
        self.embed = nn.Conv2d(3, width, patch, stride=patch)
        self.position = nn.Parameter(torch.randn(1, self.grid**2, width) * 0.02)
        self.encoder = _Stack(depth, width, heads, options)
        self.between = nn.Linear(width, width)
        self.class_tokens = nn.Parameter(torch.randn(1, classes, width) * 0.02)
        self.decoder = _Stack(decoder_depth, width, heads, options)
        self.patch_side, self.class_side = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.mask_norm = nn.LayerNorm(classes)

    def forward(self, pixels: Tensor) -> Tensor:
        """Return the logits of each pixel, (B, classes, side, side), for pixels (B, 3, side, side)."""
        tokens = self.embed(pixels).flatten(2).transpose(1, 2) + self.position
        tokens = self.between(self.encoder(tokens))
        tokens = self.decoder(torch.cat([tokens, self.class_tokens.expand(len(tokens), -1, -1)], dim=1))
        patches = functional.normalize(self.patch_side(tokens[:, : -self.classes]), dim=-1)
        classes = functional.normalize(self.class_side(tokens[:, -self.classes :]), dim=-1)
        masks = self.mask_norm(patches @ classes.transpose(1, 2))
        masks = masks.transpose(1, 2).unflatten(-1, (self.grid, self.grid))
        return functional.interpolate(masks, scale_factor=self.patch, mode="bilinear", align_corners=False)
