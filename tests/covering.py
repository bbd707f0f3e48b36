"""Covering arrays: few cases in which all pairs of values meet, in place of all combinations.

Most faults show with one value or with two that meet, and seldom need three. Five parameters of four values have 1024
combinations, and all pairs of their values fit in some twenty.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Sequence
from itertools import combinations, product
from typing import Any


def pairs(*levels: Sequence[Any], where: Callable[..., bool] | None = None) -> list[tuple[Any, ...]]:
    """Cases in which each pair of values of two parameters occurs at least once.

    Each level holds the values of one parameter. The combination that brings most new pairs is taken next,
    the first among equals, so that the same call gives the same cases in the same order. ``where`` is called with the
    values of a case, in the order of the levels, and says whether they may meet; a pair that occurs in no such case is
    left out. One level gives each of its values; two give their product.
    """
    if not all(len(values) for values in levels):
        raise ValueError(f"each parameter needs a value, got {levels}")
    chosen = []
    # Positions stand for values, which need not have a hash.
    left = [
        place
        for place in product(*(range(len(values)) for values in levels))
        if where is None or where(*(values[at] for values, at in zip(levels, place, strict=True)))
    ]
    if not left:
        raise ValueError("no case is left: where refuses all of them")
    groups = list(combinations(range(len(levels)), min(2, len(levels))))
    met = {place: {(group, tuple(place[i] for i in group)) for group in groups} for place in left}
    missing = set().union(*met.values())
    while missing:
        best = max(left, key=lambda place: len(met[place] & missing))
        chosen.append(best)
        missing -= met[best]
        # What brings nothing new now never will.
        left = [place for place in left if not met[place].isdisjoint(missing)]
    return [tuple(values[at] for values, at in zip(levels, place, strict=True)) for place in chosen]


def sample(values: Sequence[Hashable], k: int, rng: random.Random) -> list[int]:
    """Draw k of some cases, but at least one for each value of their first parameter; return their positions.

    ``values`` holds that value for each case. A fault often shows with one value of the first parameter alone: one
    integrator, one kernel, one reader. So none of these may be left out.
    """
    positions: dict[Hashable, list[int]] = {}
    for at, value in enumerate(values):
        positions.setdefault(value, []).append(at)
    drawn = [rng.choice(several) for several in positions.values()]
    others = [at for at in range(len(values)) if at not in drawn]
    return sorted(drawn + rng.sample(others, min(max(k - len(drawn), 0), len(others))))
