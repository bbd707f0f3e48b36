"""What averages of tensors need of a device."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from nlflow._array import Array
from nlflow.backends.memory import Need, free_bytes

_SIGNALS, _TILES = 12, 2**28
"""Signals that a flow or an iteration holds at a time, and bytes of tiles and of what is made of them, about."""


@contextmanager
def guarded(affinity: Any, u: Array | None) -> Iterator[None]:
    """Turn "out of memory" of an affinity's device into `MemoryLimitError`.

    Products of tensors keep the digits of their dtype meanwhile, also under `torch.autocast`.
    """
    from nlflow.backends.torch.workers import exact_products

    device = affinity.device
    with exact_products(device):
        try:
            yield
        except RuntimeError as error:
            with _need(affinity, u).guarded(str(device), lambda: free_bytes(device)):
                raise error


def _need(affinity: Any, u: Array | None) -> Need:
    nodes = affinity.domain.size
    channels = 1 if u is None else max(1, math.prod(u.shape) // nodes)
    itemsize = 8 if affinity.dtype is None else int(affinity.dtype.itemsize)

    def needed(count: int) -> int:
        share = count / nodes
        kept = affinity.memory_bytes * (share**2 if affinity.method == "dense" else share)
        return int(kept + _SIGNALS * count * channels * itemsize) + _TILES

    return Need(
        needed, nodes,
        f"with {channels} channel(s) in {str(affinity.dtype).split('.')[-1]} by method {affinity.method!r}",
        "use fewer nodes, or fewer channels at a time, or close other programs that use the device",
        argument="affinity",
    )  # fmt: skip
