"""Random walks on a finite chain."""

# A move takes one 64-bit number and one table entry, or a bisection among the edges of a state. The numbers are those
# of SplitMix64 (Steele, Lea and Flood 2014, doi 10.1145/2660193.2660195), a hash of a counter: number c of a walker is
# computed from (key, walker, c) alone, so walks have the same bits for any number of threads. Walkers go in blocks, one
# step of all after the other, since the entries that different walkers need come from memory at the same time.

import numpy as np
from numba import prange, types
from numba.extending import overload

from nlflow.backends.numba.loading import loader, njit

BLOCK = 256
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_LOW = np.uint64(0xFFFFFFFF)


@njit(inline="always")
def _random(key, counter):
    z = key + counter * _GOLDEN
    z = (z ^ (z >> np.uint64(30))) * _MIX_1
    z = (z ^ (z >> np.uint64(27))) * _MIX_2
    return z ^ (z >> np.uint64(31))


@njit(inline="always")
def _move(tables, state, number):
    """Return the next state: a cell of the state's table, or the cell's alias."""
    n = np.uint64(tables.shape[1])
    # number * n as a 96-bit product: the upper part is the cell, the 32 bits below it the place within the cell.
    product = (number >> np.uint64(32)) * n + (((number & _LOW) * n) >> np.uint64(32))
    cell = product >> np.uint64(32)
    entry = tables[state, cell]
    if (product & _LOW) < (entry >> np.uint64(32)):
        return np.int64(cell)
    return np.int64(entry & _LOW)


@njit(parallel=True, cache=True)
def build_tables(rows, tables):
    """Build an alias table for each row (Walker 1977, doi 10.1145/355744.355749; Vose 1991, doi 10.1109/32.92917)."""
    # - rows : (N, M), probabilities, each row summing to 1
    # - tables : (N, M), output
    # An entry holds the share of its cell that is kept, in 2^-32, in its upper half and the alias in its lower half.
    size = rows.shape[1]
    for i in prange(rows.shape[0]):
        share = np.empty(size)
        small = np.empty(size, np.int64)
        large = np.empty(size, np.int64)
        few = 0
        many = 0
        total = 0.0
        for j in range(size):
            total += rows[i, j]
        for j in range(size):
            share[j] = rows[i, j] / total * size
            if share[j] < 1.0:
                small[few] = j
                few += 1
            else:
                large[many] = j
                many += 1
        while few > 0 and many > 0:
            few -= 1
            low = small[few]
            high = large[many - 1]
            kept = np.uint64(share[low] * 4294967296.0)
            tables[i, low] = (kept << np.uint64(32)) | np.uint64(high)
            share[high] -= 1.0 - share[low]
            if share[high] < 1.0:
                many -= 1
                small[few] = high
                few += 1
        # What is left is full up to rounding; with itself as its alias the share does not matter.
        for index in range(many):
            j = large[index]
            tables[i, j] = (_LOW << np.uint64(32)) | np.uint64(j)
        for index in range(few):
            j = small[index]
            # A cell that nothing is left for must not be kept: its state may be impossible.
            best = j
            if rows[i, j] == 0.0:
                for other in range(size):
                    if rows[i, other] > rows[i, best]:
                        best = other
            tables[i, j] = np.uint64(best) if best != j else (_LOW << np.uint64(32)) | np.uint64(j)


@njit(inline="always")
def _edge_move(starts, ends, shares, state, number):
    """Return the next state: the first edge of the state's row whose share is above a uniform number, by bisection."""
    low = starts[state]
    high = starts[state + 1] - 1
    place = np.float64(number >> np.uint64(11)) * 2.0**-53
    while low < high:
        middle = (low + high) // 2
        if place < shares[middle]:
            high = middle
        else:
            low = middle + 1
    return np.int64(ends[low])


def _next(chain, state, number):
    """Return the next state of a chain: (alias tables,), or (starts, ends, shares) of edges."""


@overload(_next, inline="always")
def _next_of(chain, state, number):
    if len(chain) == 1:
        return lambda chain, state, number: _move(chain[0], state, number)
    return lambda chain, state, number: _edge_move(chain[0], chain[1], chain[2], state, number)


@njit(parallel=True, cache=True)
def add_up(starts, probabilities, shares):
    for i in prange(starts.shape[0] - 1):
        total = 0.0
        for e in range(starts[i], starts[i + 1]):
            total += probabilities[e]
            shares[e] = total


@njit(parallel=True, cache=True)
def walk(chain, key, steps, first, states):
    # - chain : tuple of arrays; Alias tables (N, N); or, of a sparse chain, starts (N + 1,), ends (edges,) and shares
    #   (edges,) from `add_up`. State i has the edges starts[i] ... starts[i + 1] - 1, at least one.
    # - key : uint64
    # - steps, first : int64; Number of moves, and of those made before, where the counters go on.
    # - states : (walkers,), changed in place
    walkers = states.shape[0]
    for block in prange((walkers + BLOCK - 1) // BLOCK):
        low = block * BLOCK
        high = min(low + BLOCK, walkers)
        for step in range(steps):
            for w in range(low, high):
                # 2^40 moves a walker, 2^24 walkers a key; the caller changes the key beyond.
                counter = (np.uint64(w) << np.uint64(40)) + np.uint64(first + step)
                states[w] = _next(chain, states[w], _random(key, counter))


@njit(parallel=True, cache=True)
def walk_stopped(chain, key, stop, most, states, moves):
    # - chain, key: As those of `walk`.
    # - stop : (N,)
    # - most : int64; Largest number of moves; a walker that is not stopped then has ``moves = -1``.
    # - states, moves : (walkers,), the first changed in place, the second output
    for w in prange(states.shape[0]):
        state = states[w]
        moves[w] = -1
        for step in range(most):
            counter = (np.uint64(w) << np.uint64(40)) + np.uint64(2 * step)
            # 53 bits of the number, as a float in [0, 1).
            if np.float64(_random(key, counter) >> np.uint64(11)) * 2.0**-53 < stop[state]:
                moves[w] = step
                break
            state = _next(chain, state, _random(key, counter + np.uint64(1)))
        states[w] = state


_TABLES, _STATES = types.uint64[:, ::1], types.int64[::1]
_CHAINS = {
    "tables": types.Tuple((_TABLES,)),
    "edges": types.Tuple((types.int64[::1], types.int32[::1], types.float64[::1])),
}


def _walks(kind, f):
    chain = _CHAINS[kind]
    return {
        f"walk along {kind}": (walk, chain, types.uint64, types.int64, types.int64, _STATES),
        f"walk along {kind} until stopped": (walk_stopped, chain, types.uint64, f[::1], types.int64, _STATES, _STATES),
    }


loop = loader(
    lambda f: {
        "build_tables": (build_tables, f[:, ::1], _TABLES),
        "add_up": (add_up, types.int64[::1], types.float64[::1], types.float64[::1]),
        **_walks("tables", f),
        **_walks("edges", f),
    }
)
"""Loop of a name."""
