"""Softmax averages from fused kernels."""

# ``scaled_dot_product_attention`` may form a table of all pairs, and does not return the log-sum-exp; the operators
# beneath it do neither.

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

WIDEST = 128
"""Columns of values that are taken at a time: kernels slow down, or end, beyond 256."""
_ALIGNED = 8  # columns; kernels on GPUs want a multiple
_LOADED = 16  # bytes that kernels on GPUs load at a time, from addresses that are multiples of it
_ITEMS = 2**16 - 1  # of a batch that CUDA takes in one launch

_HALF = (torch.float16, torch.bfloat16)
_WAITED = 2**28  # pairs whose time makes up for the plan that cuDNN makes for each new shape, about 30 ms


@dataclass(frozen=True)
class Place:
    """Properties of a device that decide among the kernels."""

    # - kind : str; ``cpu``, ``cuda`` or another device of torch.
    # - capability : tuple of int; Of CUDA: (9, 0) is an H100.
    # - cudnn : int; Version of cuDNN, such as 91002; 0 where there is none, or where torch's settings forbid its
    #   attention.
    # - activated : str; The implementation of FlashAttention that `torch.nn.attention.activate_flash_attention_impl`
    #   was asked for: ``FA3``, ``FA4``, or nothing.

    kind: str
    capability: tuple[int, int] = (0, 0)
    cudnn: int = 0
    activated: str = ""

    @classmethod
    def of(cls, device: torch.device) -> Place:
        if device.type != "cuda":
            return cls(device.type)
        allowed = getattr(torch.backends.cuda, "cudnn_sdp_enabled", lambda: False)()
        version: Any = torch.backends.cudnn.version() if allowed else None  # type: ignore[no-untyped-call]
        activated = getattr(torch.nn.attention, "current_flash_attention_impl", lambda: None)()
        return cls("cuda", torch.cuda.get_device_capability(device), int(version or 0), str(activated or ""))

    def __str__(self) -> str:
        return self.kind if self.kind != "cuda" else "CUDA {}.{}".format(*self.capability)


@dataclass(frozen=True)
class Call:
    """What is asked."""

    dtype: torch.dtype
    width: int
    biased: bool = False
    tracked: bool = False
    pairs: int = 0


@dataclass(frozen=True)
class Kernel:
    """A fused kernel and the calls that it takes."""

    # - name : str; For messages.
    # - operator : str; Its name in ``torch.ops.aten``.
    # - kind : str; Of devices.
    # - capability : dict; The least compute capability for each dtype that it takes.
    # - widest : float; Columns that it takes at most.
    # - biases, derivatives : bool; Whether it takes a table of biases, and is taken where there will be a derivative.
    # - only : tuple of tuple of int; Compute capabilities on which it is the fastest; all by default.
    # - cudnn : int; Least version of cuDNN.
    # - activated : bool; Whether it is for who has activated another implementation.
    # - pairs : int; Below which another is preferred.

    name: str
    operator: str
    kind: str
    capability: dict[torch.dtype, tuple[int, int]]
    widest: float = math.inf
    biases: bool = True
    derivatives: bool = True
    only: tuple[tuple[int, int], ...] = ()
    cudnn: int = 0
    activated: bool = False
    pairs: int = 0

    def takes(self, place: Place, call: Call) -> bool:
        return (
            self.kind == place.kind
            and call.dtype in self.capability
            and place.capability >= self.capability[call.dtype]
            and (not self.only or place.capability in self.only)
            and call.width <= self.widest
            and (self.biases or not call.biased)
            and (self.derivatives or not call.tracked)
            and place.cudnn >= self.cudnn
            and (bool(place.activated) or not self.activated)
            and call.pairs >= self.pairs
            and hasattr(torch.ops.aten, self.operator)
        )


_FLASH = "_scaled_dot_product_flash_attention"
_CUDNN = "_scaled_dot_product_cudnn_attention"
_EFFICIENT = "_scaled_dot_product_efficient_attention"
_FOR_CPU = "_scaled_dot_product_flash_attention_for_cpu"

# The first that takes a call is asked. On an H100, against FlashAttention-2 in bfloat16, cuDNN takes 0.66 of the time
# for 64 columns and 2^18 nodes, 0.58 for 128 (benchmarks/results/gpu.md); it has no float32, which no kernel but the
# efficient one has. Compute capabilities, widths and versions are those that torch itself asks for.
KERNELS = (
    Kernel("the FlashAttention that was activated", _FLASH, "cuda", dict.fromkeys(_HALF, (8, 0)), widest=256,
           biases=False, activated=True),
    Kernel("cuDNN's attention", _CUDNN, "cuda", dict.fromkeys(_HALF, (8, 0)), widest=128, biases=False,
           derivatives=False, only=((9, 0), (10, 0)), cudnn=91501, pairs=_WAITED),
    Kernel("FlashAttention-2", _FLASH, "cuda", dict.fromkeys(_HALF, (8, 0)), widest=256, biases=False),
    Kernel("memory-efficient attention", _EFFICIENT, "cuda",
           {torch.float32: (5, 0), torch.float16: (5, 0), torch.bfloat16: (8, 0)}),
    Kernel("FlashAttention of the CPU", _FOR_CPU, "cpu",
           dict.fromkeys((torch.float64, torch.float32, *_HALF), (0, 0))),
)  # fmt: skip
"""Fused kernels, the fastest first. What none takes is summed in tiles (`nlflow.backends.torch.sums`)."""


def kernels_for(place: Place, call: Call) -> Iterator[Kernel]:
    return (kernel for kernel in KERNELS if kernel.takes(place, call))


def offered(like: Tensor, biased: bool = False) -> bool:
    """Tell whether a fused kernel serves tensors of this dtype on this device."""
    call = Call(like.dtype, width_for(like, 1), biased)
    return next(kernels_for(Place.of(like.device), call), None) is not None


def told(like: Tensor, biased: bool, pairs: int) -> str:
    place, call = Place.of(like.device), Call(like.dtype, width_for(like, 1), biased, like.requires_grad, pairs)
    kernel = next(kernels_for(place, call), None)
    what = f"{str(like.dtype).removeprefix('torch.')} of {call.width} columns on {place}"
    return f"no fused kernel takes {what}" if kernel is None else f"{kernel.name}, for {what}"


@dataclass(frozen=True)
class Form:
    """The logits scale q.k + bias, for all keys or, if `causal`, for the keys j <= i of query i."""

    # `bias` is (M, N), the same for all items; on GPUs N is a multiple of 8.

    scale: float = 1.0
    causal: bool = False
    bias: Tensor | None = None


def fused(q: Tensor, k: Tensor, v: Tensor, form: Form) -> tuple[Tensor, Tensor]:
    """Return averages (B, 1, M, E) and the log-sum-exp (B, 1, M) of one fused kernel; all inputs have the width E."""
    if q.device.type != "cuda" or len(q) <= _ITEMS:
        return _fused(q, k, v, form)
    parts = zip(torch.split(q, _ITEMS), torch.split(k, _ITEMS), torch.split(v, _ITEMS), strict=True)
    pieces = [_fused(*part, form) for part in parts]
    averages, logarithms = zip(*pieces, strict=True)
    return torch.cat(averages), torch.cat(logarithms)


def _fused(q: Tensor, k: Tensor, v: Tensor, form: Form) -> tuple[Tensor, Tensor]:
    tracked = torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v))
    pairs = q.shape[0] * q.shape[-2] * k.shape[-2]
    call = Call(q.dtype, q.shape[-1], form.bias is not None, tracked, pairs)
    kernels = list(kernels_for(Place.of(q.device), call))
    for kernel in kernels[:-1]:
        try:
            return _called(kernel, q, k, v, form)
        except RuntimeError as error:  # cuDNN says only after it was asked that it has no plan for a shape
            if kernel.operator != _CUDNN or "cudnn" not in str(error).lower():
                raise
    return _called(kernels[-1], q, k, v, form)


def _called(kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, form: Form) -> tuple[Tensor, Tensor]:
    operator: Any = getattr(torch.ops.aten, kernel.operator)
    bias, causal, scale = form.bias, form.causal, form.scale
    if kernel.operator == _FOR_CPU:
        average, logarithm = operator(q, k, v, 0.0, causal, attn_mask=bias, scale=scale)
    elif kernel.operator == _FLASH:
        average, logarithm = operator(q, k, v, 0.0, causal, scale=scale)[:2]
    else:  # the two that write the log-sum-exp where they are told to
        whole = None if bias is None else bias.expand(q.shape[0], 1, *bias.shape)
        average, logarithm = operator(q, k, v, whole, True, 0.0, causal, scale=scale)[:2]
    # Some kernels fill up the rows, and that of cuDNN has one more axis.
    return average, logarithm.reshape(*q.shape[:2], -1)[..., : q.shape[-2]]


def widened(x: Tensor, width: int) -> Tensor:
    """Return x (..., N, d) as (B, 1, N, width), filled up with zeros."""
    flat = x.reshape(-1, 1, *x.shape[-2:])
    if x.shape[-1] < width:
        return torch.nn.functional.pad(flat, (0, width - x.shape[-1]))
    return _aligned(flat) if flat.device.type == "cuda" else flat


def _aligned(x: Tensor) -> Tensor:
    """Return a tensor whose rows begin where kernels load: those of a view begin anywhere."""
    x = x.contiguous()
    return x if x.storage_offset() * x.element_size() % _LOADED == 0 else x.clone()


def width_for(q: Tensor, channels: int) -> int:
    width = max(q.shape[-1], min(channels, WIDEST))
    return -(-width // _ALIGNED) * _ALIGNED if q.device.type == "cuda" else width


def attend(q: Tensor, k: Tensor, v: Tensor, form: Form) -> Tensor:
    """Return sum_j softmax_j(scale q_i . k_j + bias_ij) v_j, (..., M, D), with first derivatives.

    Shapes are (..., M, d), (..., N, d) and (..., N, D), with the same leading axes.
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
    """Return log sum_j exp(scale q_i . k_j + bias_ij), (..., M), with first derivatives."""
    return _LogSumExp.apply(q, k, form)  # type: ignore[no-any-return,no-untyped-call]  # torch's apply is untyped
