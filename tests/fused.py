"""Attention by kernels that GPUs alone have, with their limits, computed by the one of the CPU: for tests.pretended."""

from __future__ import annotations

from typing import Any

import torch


def _efficient(
    q: Any, k: Any, v: Any, bias: Any, _: bool, dropout: float = 0.0, causal: bool = False, *, scale: Any = None
) -> Any:
    """Attention by the memory-efficient kernel of GPUs, with its limits, computed by the one of the CPU."""
    if q.dtype == torch.float64:
        raise RuntimeError("Expected query, key and value to have float, half or bfloat16")
    if any(x.shape[-1] % 8 for x in (q, v)) or (bias is not None and bias.stride(-2) % 8):
        raise RuntimeError("attention: widths and biases are aligned to 8 numbers")
    out, logarithm = _on_cpu(q, k, v, dropout, causal, attn_mask=bias, scale=scale)
    return out, torch.nn.functional.pad(logarithm, (0, -q.shape[-2] % 32)), *torch.zeros(2, dtype=torch.int64)


def _efficient_backward(
    g: Any, q: Any, k: Any, v: Any, bias: Any, out: Any, logarithm: Any, *rest: Any, scale: Any = None
) -> Any:
    _seed, _offset, dropout, wanted, causal = *rest, *[False][len(rest) - 4 :]
    assert not wanted[3], "derivatives by a bias are not pretended"
    logarithm = logarithm[..., : q.shape[-2]]
    return *_on_cpu_backward(g, q, k, v, out, logarithm, dropout, causal, attn_mask=bias, scale=scale), None


def _flash(q: Any, k: Any, v: Any, dropout: float = 0.0, causal: bool = False, *_: bool, scale: Any = None) -> Any:
    """Attention by the flash kernel of GPUs, with its limits, computed by the one of the CPU."""
    if q.dtype not in (torch.float16, torch.bfloat16):
        raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
    if q.shape[-1] % 8 or q.shape[-1] > 256:
        raise RuntimeError("attention: widths are multiples of 8, and at most 256")
    out, logarithm = _on_cpu(q, k, v, dropout, causal, scale=scale)
    seed = torch.zeros(2, dtype=torch.int64)
    return out, logarithm, None, None, q.shape[-2], k.shape[-2], seed, seed.clone(), out.new_empty(0)


def _flash_backward(g: Any, q: Any, k: Any, v: Any, out: Any, logarithm: Any, *rest: Any, scale: Any = None) -> Any:
    return _on_cpu_backward(g, q, k, v, out, logarithm, *rest[4:6], scale=scale)


def _cudnn(
    q: Any,
    k: Any,
    v: Any,
    bias: Any,
    _: bool,
    dropout: float = 0.0,
    causal: bool = False,
    *_rest: bool,
    scale: Any = None,
) -> Any:
    """Attention by cuDNN, whose log-sum-exp has one more axis, computed by the kernel of the CPU."""
    out, logarithm, *rest = _flash(q, k, v, dropout, causal, scale=scale)
    assert bias is None, "biases of cuDNN are not pretended"
    return out, logarithm[..., None], *rest


_on_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_on_cpu_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
# Kernels of GPUs alone, and what computes in their place.
KERNELS = {
    "_scaled_dot_product_cudnn_attention": _cudnn,
    "_scaled_dot_product_efficient_attention": _efficient,
    "_scaled_dot_product_efficient_attention_backward": _efficient_backward,
    "_scaled_dot_product_flash_attention": _flash,
    "_scaled_dot_product_flash_attention_backward": _flash_backward,
    "histc": lambda x, *rest: torch.histc(x.double(), *rest).to(x.dtype),  # of integers too, as on a GPU
}


def attention(q: Any, k: Any, v: Any, mask: Any = None, dropout: float = 0.0, causal: bool = False, **rest: Any) -> Any:
    """`scaled_dot_product_attention`, by the kernel that serves the CPU: the dispatcher has none for this device."""
    choice = torch.ops.aten._fused_sdp_choice(q, k, v, mask, dropout, causal, **rest)
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill_(~mask, -torch.inf)
    if choice == 0:
        return torch.ops.aten._scaled_dot_product_attention_math(q, k, v, mask, dropout, causal, None, **rest)[0]
    return _on_cpu(q, k, v, dropout, causal, attn_mask=mask, scale=rest.get("scale"))[0]
