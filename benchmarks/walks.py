"""Random walks: 10^6 walkers, 100 moves, 1000 states; against inverse cumulative sampling in NumPy."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from benchmarks.harness import Row, interleaved
from nlflow import ExpDotProduct, MarkovChain, Points, affinity

STATES, WALKERS, MOVES, PEER_MOVES = 1000, 10**6, 100, 2


def run() -> list[Row]:
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((2, STATES, 16))
    chain = MarkovChain(affinity(ExpDotProduct(), Points(np.zeros(STATES)), k, queries=q))
    chain.walk(0, 1, 1000, rng=0)  # compiles, or loads from the cache
    fresh = MarkovChain(chain.affinity)
    start = time.perf_counter()
    fresh.walk(0, 0, 1, rng=0)
    tables = time.perf_counter() - start

    # Rows of the distribution function, one behind the other: row i lies in (i, i + 1], so one sorted array serves all.
    ends = np.cumsum(chain.matrix(), axis=1)
    ends /= ends[:, -1:]
    flat = (ends + np.arange(STATES)[:, None]).ravel()

    def peer() -> Any:
        states = np.zeros(WALKERS, np.int64)
        for _ in range(PEER_MOVES):
            states = np.searchsorted(flat, states + rng.random(WALKERS), side="left") % STATES
        return states

    times = interleaved(
        {"peer": peer, "ours": lambda: chain.walk(0, MOVES, WALKERS, rng=1)},
        repeats=5,
    )
    theirs, ours = times["peer"] / PEER_MOVES * MOVES, times["ours"]
    each = ours / (WALKERS * MOVES) * 1e9
    work = f"10^6 walkers, 100 moves on 10^3 states: {each:.1f} ns a move; peer: NumPy, {PEER_MOVES} moves scaled up"
    return [
        Row.of("walks", work, f"{theirs:.1f} s", f"{ours:.2f} s", ours / theirs, most=0.1, unit=", about 1 s",
               also=ours <= 1.2),
        Row.of("walks", "tables of 10^3 states, once a chain", "none", f"{tables * 1e3:.0f} ms", tables),
    ]  # fmt: skip
