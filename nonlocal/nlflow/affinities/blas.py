"""Matrix products of tiles in threads, with bits that do not depend on their number."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from nlflow.backends.threads import one_blas_thread

T = TypeVar("T")

TILE = 2048
"""Points of one piece of work; sums over points are cut here whatever the number of threads."""


def over_tiles(function: Callable[[slice], T], size: int, tile: int = TILE) -> list[T]:
    """Return `function` of each tile of `size` points, in order; tiles share the threads, each is computed by one."""
    tiles = [slice(start, min(start + tile, size)) for start in range(0, size, tile)]
    with one_blas_thread() as threads:
        workers = min(threads, len(tiles) // 4)  # to start a thread costs more than a few tiles
        if workers < 2:
            return [function(tile) for tile in tiles]
        with ThreadPoolExecutor(workers) as pool:
            return list(pool.map(function, tiles))
