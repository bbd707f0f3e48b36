"""The product W_V W_O of a block, with which tokens enter what attention adds to them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from nlflow.attention.injection.blocks import TORCH, Block, heads_of, width
from nlflow.errors import InputError

_THIRDS = ("qkv", "c_attn", "Wqkv", "to_qkv")  # queries, keys and values one after the other
_ALONE = (
    "value", "v_proj", "v_lin", "value_proj", "v", "project_v", "v_head", "projection_value", "to_v",
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class Product:
    """x -> x W + c of one block: what attention adds to tokens that are all x, with W = W_V W_O.

    Attributes
    ----------
    matrix : tensor of shape (D, D)
        W, so that rows are tokens.
    values_bias : tensor of shape (D,)
        b_V W_O.
    output_bias : tensor of shape (D,)
        b_O. Then c = b_V W_O + b_O.
    """

    matrix: Tensor
    values_bias: Tensor
    output_bias: Tensor


@torch.no_grad()
def product_of(block: Block) -> Product:
    """Return the product of a block, computed in float64, in the type of its weights.

    Raises
    ------
    InputError
        For blocks whose W_V or W_O is not one dense matrix that is known: fused projections of unknown layout,
        quantized weights, no output projection.
    """
    (values, bias), (output, output_bias) = _values(block), _output(block)
    if values.shape[1] != output.shape[0]:  # one head of values serves several heads of queries
        values, bias = (_repeated(block, one, output.shape[0]) for one in (values, bias))
    matrix, moved = values.double() @ output.double(), bias.double() @ output.double()
    if matrix.shape[0] != matrix.shape[1]:
        raise _unknown(block, f"W_V W_O of shape {tuple(matrix.shape)}", "a square one")
    return Product(matrix.to(output.dtype), moved.to(output.dtype), output_bias)


def _values(block: Block) -> tuple[Tensor, Tensor]:
    """Return W_V (D, H d) and b_V (H d,)."""
    module: Any = block.module
    if block.kind == TORCH:
        size, fused = module.embed_dim, module.in_proj_weight
        weight = module.v_proj_weight if fused is None else fused[2 * size :]
        bias = None if module.in_proj_bias is None else module.in_proj_bias[2 * size :]
        return weight.T, weight.new_zeros(len(weight)) if bias is None else bias
    name = next((name for name, child in module.named_children() if child is block.values), "")
    weight, bias = _dense(block, block.values, "W_V")
    if name in _ALONE:
        return weight, bias
    if name in _THIRDS and weight.shape[1] % 3 == 0 and weight.shape[0] == weight.shape[1] // 3:
        return weight[:, 2 * weight.shape[1] // 3 :], bias[2 * len(bias) // 3 :]
    raise _unknown(block, f"a fused projection {name!r} of unknown layout", "a projection of values alone, or q, k, v")


def _output(block: Block) -> tuple[Tensor, Tensor]:
    """Return W_O (H d, D) and b_O (D,)."""
    projection = getattr(block.module, "out_proj", None) if block.kind == TORCH else block.projection
    return _dense(block, projection, "W_O")


def _dense(block: Block, projection: nn.Module | None, name: str) -> tuple[Tensor, Tensor]:
    weight = getattr(projection, "weight", None)
    if not isinstance(weight, Tensor) or weight.ndim != 2 or not weight.is_floating_point():
        got = "no known module" if projection is None else type(projection).__name__
        raise _unknown(block, f"{got} for {name}", "one matrix of floating-point numbers, as in nn.Linear")
    made = width(projection)
    weight = (
        weight.T if isinstance(projection, nn.Linear) or weight.shape[1] != made else weight
    )  # GPT-2's Conv1D: (in, out)
    bias = getattr(projection, "bias", None)
    return weight, weight.new_zeros(weight.shape[1]) if bias is None else bias


def _repeated(block: Block, part: Tensor, size: int) -> Tensor:
    """Return the columns of values for each head of queries."""
    heads = heads_of(block.module)
    features = size // heads if heads else 0
    if not features or part.shape[-1] % features or size % part.shape[-1]:
        raise _unknown(block, f"values of {part.shape[-1]} features for {size}", "heads that serve several others")
    heads_of_values = part.reshape(*part.shape[:-1], -1, features)
    return heads_of_values.repeat_interleave(size // part.shape[-1], dim=-2).flatten(-2)


def _unknown(block: Block, got: str, expected: str) -> InputError:
    return InputError(
        f"model: got {got} in {block.name} ({type(block.module).__name__}), expected {expected}; leave this block out "
        "with adapter=, or take a cure without W_V W_O"
    )
