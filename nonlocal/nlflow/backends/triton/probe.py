"""Whether triton works."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl


@triton.jit
def _add_one(numbers):
    tl.atomic_add(numbers, 1.0)


@functools.cache
def failure(device: torch.device) -> str:
    try:
        numbers = torch.zeros(1, device=device)
        with torch.cuda.device_of(numbers):
            _add_one[(2,)](numbers)
        return "" if numbers.item() == 2 else "a kernel of triton gives a wrong sum"
    except Exception as error:  # of compilers, linkers and drivers
        text = str(error).strip().splitlines() or [""]
        return f"triton does not run here: {type(error).__name__}: {text[0]}"
