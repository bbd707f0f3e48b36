"""Cases in which all pairs of values meet."""

from __future__ import annotations

import random
from itertools import combinations, product
from typing import Any

import pytest

from tests.covering import pairs, sample


def met(cases: list[tuple[Any, ...]]) -> set[tuple[Any, ...]]:
    return {(i, j, case[i], case[j]) for case in cases for i, j in combinations(range(len(case)), 2)}


@pytest.mark.parametrize("sizes", [(2, 2, 2), (4, 3, 2), (3, 3, 3, 3), (5, 4, 4, 3, 2), (1, 6, 1, 2)])
def test_every_pair_occurs_in_few_cases(sizes: tuple[int, ...]) -> None:
    levels = [range(size) for size in sizes]
    whole = list(product(*levels))
    cases = pairs(*levels)
    assert met(cases) == met(whole)
    assert set(cases) <= set(whole)
    assert len(set(cases)) == len(cases)
    largest, next_to_it = sorted(sizes)[:-3:-1]
    assert largest * next_to_it <= len(cases) <= 1.7 * largest * next_to_it
    assert cases == pairs(*levels)


def test_cases_that_cannot_be_are_left_out() -> None:
    levels = ["abc", (1, 2, 3), (False, True)]

    def can_be(letter: str, number: int, flag: bool) -> bool:
        return not (letter == "b" and number == 2) and not (flag and letter == "c" and number == 3)

    whole = [case for case in product(*levels) if can_be(*case)]
    cases = pairs(*levels, where=can_be)
    assert set(cases) <= set(whole)
    assert met(cases) == met(whole)


def test_one_two_and_values_without_a_hash() -> None:
    assert pairs([[1], [2]]) == [([1],), ([2],)]
    assert sorted(pairs("ab", "cd")) == sorted(product("ab", "cd"))


def test_nothing_to_choose_from() -> None:
    with pytest.raises(ValueError, match="each parameter needs a value"):
        pairs([1, 2], [])
    with pytest.raises(ValueError, match="no case is left"):
        pairs([1, 2], [3, 4], where=lambda one, other: False)


@pytest.mark.parametrize("k", [1, 3, 5, 9, 20])
def test_a_sample_keeps_every_value_of_the_first_parameter(k: int) -> None:
    values = [first for first, _ in product("abc", range(4))]
    for seed in range(20):
        drawn = sample(values, k, random.Random(seed))
        assert len(drawn) == len(set(drawn)) == min(max(k, 3), 12)
        assert {values[at] for at in drawn} == set("abc")
    assert drawn == sample(values, k, random.Random(seed))
