"""Where Triton kernels run."""

from __future__ import annotations

import functools
import importlib.util
import os
from typing import Final

import torch
from torch import Tensor

OFFSETS: Final = 4096
"""Of a window, at most: the program of a group holds all its distances in registers."""
SAMPLES: Final = 64
"""Of a patch, at most: the program of a group holds matrices of so many rows in registers, and their products in the
memory that its threads share."""
_PLACES = 2**31 - 1  # that an index of 32 bits tells apart


def why_not(like: Tensor, kernels: bool | None) -> str:
    """Return why kernels do not run on the device of a tensor, or an empty text."""
    # `kernels` says whether they are asked for; then they run on the CPU as well where triton interprets them.
    if kernels is False:
        return "kernels=False"
    if type(like) not in (Tensor, torch.nn.Parameter):
        return f"a {type(like).__module__}.{type(like).__qualname__} need not have memory that kernels can read"
    if not _is_installed():
        return "triton is not installed"
    if kernels and os.environ.get("TRITON_INTERPRET") == "1":
        return ""
    if not like.is_cuda:
        return f"kernels run on CUDA devices, and tensors lie on {like.device}"
    if torch.version.cuda is None or not torch.cuda.is_available():
        return "torch knows no CUDA driver"
    if torch.cuda.get_device_capability(like.device) < (8, 0):
        return "the device is older than those of compute capability 8.0"
    from nlflow.backends.triton.probe import failure

    return failure(like.device)


@functools.cache
def _is_installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def why_no_search(guide: Tensor, offsets: int) -> str:
    """Return why the kernel of the search does not take a guide (C, ...) and these offsets, or an empty text."""
    if offsets > OFFSETS:
        return f"windows of {offsets} offsets, more than {OFFSETS}"
    return _why_too_large(guide)


def why_no_step(state: Tensor, samples: int, *, correlated: bool, across: bool, tracked: bool) -> str:
    """Return why the kernel of the step does not take images (C, ...) with such patches, or an empty text."""
    if tracked:
        return "derivatives are asked for"
    if correlated:
        return "the noise is correlated"
    if across:
        return "estimates are combined across members"
    if samples > SAMPLES:
        return f"patches of {samples} samples, more than {SAMPLES}"
    if torch.are_deterministic_algorithms_enabled():
        return "sums have one order under torch.use_deterministic_algorithms"
    return _why_too_large(state)


def _why_too_large(planes: Tensor) -> str:
    if planes.numel() > _PLACES:
        return f"{planes.numel()} samples, more than {_PLACES}"
    if planes.dtype not in (torch.float32, torch.float64):
        return f"samples of {planes.dtype}"
    return ""
