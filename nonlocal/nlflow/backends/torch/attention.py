"""Softmax averages and their log-sum-exp from fused attention kernels: O(N) memory, at the speed of attention.

``scaled_dot_product_attention`` itself falls back to a table of all pairs without a word, and does not return the
log-sum-exp. The operators beneath it do neither.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

WIDEST = 128
"""Columns of values that are taken at a time: kernels slow down, or end, beyond 256."""
_ALIGNED = 8  # columns; kernels on GPUs want a multiple
_LOADED = 16  # bytes that kernels on GPUs load at a time, from addresses that are multiples of it
_ITEMS = 2**16 - 1  # of a batch that CUDA takes in one launch


_FOR_CPU = "_scaled_dot_product_flash_attention_for_cpu"
_FLASH = "_scaled_dot_product_flash_attention"
_FLASH_WIDEST = 256  # columns that it takes at most
_EFFICIENT = "_scaled_dot_product_efficient_attention"


def offered(like: Tensor) -> bool:
    """Tell whether a fused kernel serves tensors of this dtype on this device."""
    return _operator(like) is not None


def _operator(like: Tensor, biased: bool = False) -> str | None:
    kind, half = like.device.type, like.dtype in (torch.float16, torch.bfloat16)
    if kind == "cpu":
        name = _FOR_CPU
    elif kind == "cuda" and half and not biased and like.shape[-1] <= _FLASH_WIDEST:
        name = _FLASH
    elif kind == "cuda" and (half or like.dtype == torch.float32):
        name = _EFFICIENT
    else:
        return None
    return name if hasattr(torch.ops.aten, name) else None


@dataclass(frozen=True)
class Form:
    """What fused attention makes of q.k: logits scale q.k + bias, for all keys or those that are no later.

    Parameters
    ----------
    scale : float
    causal : bool
        Query i sees the keys j <= i.
    bias : tensor of shape (M, N), optional
        The same for all items; N is a multiple of 8 on GPUs.
    """

    scale: float = 1.0
    causal: bool = False
    bias: Tensor | None = None


def fused(q: Tensor, k: Tensor, v: Tensor, form: Form) -> tuple[Tensor, Tensor]:
    """Return averages (B, 1, M, E) and the log-sum-exp (B, 1, M) of one fused kernel; all of the same width E."""
    if q.device.type != "cuda" or len(q) <= _ITEMS:
        return _fused(q, k, v, form)
    parts = zip(torch.split(q, _ITEMS), torch.split(k, _ITEMS), torch.split(v, _ITEMS), strict=True)
    pieces = [_fused(*part, form) for part in parts]
    averages, logarithms = zip(*pieces, strict=True)
    return torch.cat(averages), torch.cat(logarithms)


def _fused(q: Tensor, k: Tensor, v: Tensor, form: Form) -> tuple[Tensor, Tensor]:
    bias = form.bias
    name = _operator(q, bias is not None)
    operator: Any = getattr(torch.ops.aten, str(name))
    if name == _EFFICIENT:
        whole = None if bias is None else bias.expand(q.shape[0], 1, *bias.shape)
        average, logarithm = operator(q, k, v, whole, True, 0.0, form.causal, scale=form.scale)[:2]
    elif name == _FOR_CPU:
        average, logarithm = operator(q, k, v, 0.0, form.causal, attn_mask=bias, scale=form.scale)
    else:
        average, logarithm = operator(q, k, v, 0.0, form.causal, scale=form.scale)[:2]
    return average, logarithm[..., : q.shape[-2]]  # some kernels fill up the rows


def widened(x: Tensor, width: int) -> Tensor:
    """Return x (..., N, d) as (B, 1, N, width), with zeros added: they leave all dot products as they are."""
    flat = x.reshape(-1, 1, *x.shape[-2:])
    if x.shape[-1] < width:
        return torch.nn.functional.pad(flat, (0, width - x.shape[-1]))
    return _aligned(flat) if flat.device.type == "cuda" else flat


def _aligned(x: Tensor) -> Tensor:
    """Return a tensor whose rows begin where kernels load: a part of a wider one begins anywhere."""
    x = x.contiguous()
    return x if x.storage_offset() * x.element_size() % _LOADED == 0 else x.clone()


def width_for(q: Tensor, channels: int) -> int:
    """Return the width that queries, keys and a piece of the values are brought to."""
    width = max(q.shape[-1], min(channels, WIDEST))
    return -(-width // _ALIGNED) * _ALIGNED if q.device.type == "cuda" else width


def attend(q: Tensor, k: Tensor, v: Tensor, form: Form) -> Tensor:
    """Return sum_j softmax_j(scale q_i . k_j + bias_ij) v_j.

    Parameters
    ----------
    q : tensor of shape (..., M, d)
    k : tensor of shape (..., N, d)
    v : tensor of shape (..., N, D)
        The leading axes of all three are the same.
    form : Form

    Returns
    -------
    tensor of shape (..., M, D)
        Has first derivatives.
    """
    width = width_for(q, v.shape[-1])
    wide_q, wide_k = widened(q, width), widened(k, width)
    parts = []
    for part in torch.split(v, width, dim=-1):
        average = fused(wide_q, wide_k, widened(part, width), form)[0]
        parts.append(average[..., : part.shape[-1]])
    whole = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
    return whole.reshape(*q.shape[:-1], v.shape[-1])


def spread(q: Tensor, k: Tensor, values: Tensor, form: Form) -> Tensor:
    """Return sum_i softmax_j(...) values_i for all j, (..., M, D) to (..., N, D): `attend` transposed."""
    # The average is linear in v, so that its derivative, applied from the left, is its transpose.
    v = torch.zeros(*k.shape[:-1], values.shape[-1], dtype=k.dtype, device=k.device, requires_grad=True)
    with torch.enable_grad():
        average = attend(q.detach(), k.detach(), v, form)
    (result,) = torch.autograd.grad(average, v, values)
    return result


class _LogSumExp(torch.autograd.Function):
    """The logarithm of the sums of softmax's weights, whose derivatives are averages of k and of q."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, form: Form) -> Tensor:
        ctx.save_for_backward(q, k)
        ctx.form = form
        width = width_for(q, 1)
        wide = widened(k, width)
        return fused(widened(q, width), wide, wide, form)[1].reshape(q.shape[:-1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        q, k = ctx.saved_tensors
        weight = (ctx.form.scale * gradient)[..., None].to(q.dtype)
        return weight * attend(q, k, k, ctx.form), spread(q, k, weight * q, ctx.form), None


def log_sum_exp(q: Tensor, k: Tensor, form: Form) -> Tensor:
    """Return log sum_j exp(scale q_i . k_j + bias_ij), shape (..., M); it has first derivatives."""
    return _LogSumExp.apply(q, k, form)  # type: ignore[no-any-return,no-untyped-call]  # torch's apply is untyped
