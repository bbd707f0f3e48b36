"""How near the law of a walker is to the stationary one, in total variation."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import numpy as np

from nlflow._array import Floats
from nlflow.errors import NumericalError
from nlflow.markov.law import StationaryLaw

PATIENCE = 10**6
SMALLEST_DISTANCE = 1e-12
"""In total variation: the sum of N roundings stays below."""


def _farthest(law: StationaryLaw, laws: Floats) -> float:
    return float(np.abs(laws - law.stationary).sum(axis=1).max()) / 2


def distances(law: StationaryLaw, steps: int, laws: Iterator[Floats] | None) -> Floats:
    """Return those after 0 ... `steps` moves from a start, given by its laws, or from the worst node."""
    if laws is not None:
        return np.array([_farthest(law, moved.reshape(1, -1)) for moved in islice(laws, steps + 1)])
    matrix, reached = law.moves.matrix(), np.eye(law.states)
    result = [_farthest(law, reached)]
    for _ in range(steps):
        reached = reached @ matrix
        result.append(_farthest(law, reached))
    return np.array(result)


def mixing_time(law: StationaryLaw, eps: float, laws: Iterator[Floats] | None) -> int:
    """Return the first k within `eps` of pi from a start, given by its laws, or from the worst node.

    Distances of small chains are often fractions of small numbers, and equal to an `eps` such as 1/4 before they are
    rounded. So they may pass it by their rounding.
    """
    within = eps + min(1e-6 if law.moves.single else SMALLEST_DISTANCE, eps / 4)
    if laws is not None:
        for k, moved in enumerate(islice(laws, PATIENCE + 1)):
            if _farthest(law, moved.reshape(1, -1)) <= within:
                return k
        raise NumericalError(f"eps: {eps:g} was not reached in {PATIENCE} moves; use mixing_bounds()")
    # The distance decreases with k: double until it is small enough, then add up the powers that keep it above.
    powers = [law.moves.matrix()]
    if _farthest(law, np.eye(law.states)) <= within:
        return 0
    while _farthest(law, powers[-1]) > within:
        if len(powers) > 60:
            raise NumericalError(f"eps: {eps:g} was not reached in 2^60 moves; the chain hardly mixes")
        square = powers[-1] @ powers[-1]
        powers.append(square / square.sum(axis=1, keepdims=True))
    done, reached = 0, np.eye(law.states)
    for exponent in reversed(range(len(powers) - 1)):
        further = reached @ powers[exponent]
        if _farthest(law, further) > within:
            done, reached = done + 2**exponent, further
    return done + 1
