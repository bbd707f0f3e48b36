"""What Markov chains refuse: each message names the argument, what was got, and what to do."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import nlflow as nl
from nlflow import MarkovChain
from tests.chains import MatrixFree, built, given, ring, tilted

CHAIN = MarkovChain(nl.affinity(nl.Gaussian(width=1.0), nl.Grid((3, 4))))


@pytest.mark.parametrize("laziness", [1.0, 1.5, -0.1, math.nan, math.inf, True, "half", None])
def test_laziness(laziness: Any) -> None:
    with pytest.raises(nl.InputError, match=r"^laziness: got .*expected"):
        MarkovChain(built("keys")[0], laziness=laziness)


def test_affinity() -> None:
    with pytest.raises(
        nl.InputError, match=r"^affinity: got ndarray, expected an Affinity; build one with affinity\(\)"
    ):
        MarkovChain(np.eye(3))  # type: ignore[arg-type]
    for bad, words in (
        ([[1.0, 0.0], [0.0, 0.0]], r"row 1 is zero"),
        ([[1.0, -0.5], [1.0, 1.0]], r"matrix: got a negative entry \(-0.5\)"),
        ([[1.0, math.nan], [1.0, 1.0]], r"matrix: got 1 NaN"),
        ([[1.0, math.inf], [1.0, 1.0]], r"matrix: got 1 NaN or infinite"),
        ([[1.0, 1.0]], r"matrix: got shape \(1, 2\)"),
    ):
        with pytest.raises(nl.InputError, match=words):
            MarkovChain(nl.from_matrix(np.array(bad), nl.Points([0.0, 1.0], np.ones(2))))


def test_repr_and_attributes() -> None:
    affinity, _ = built("keys")
    chain = MarkovChain(affinity, laziness=0.25)
    assert chain.affinity is affinity
    assert (chain.laziness, chain.states) == (0.25, 12)
    assert "MarkovChain(<DenseAffinity" in repr(chain)
    assert "laziness=0.25" in repr(chain)


STARTS: dict[str, tuple[Any, str]] = {
    "beyond": (12, "start: got 12, expected an integer >= 0 that is below 12"),
    "negative": (-1, "start: got -1, expected an integer >= 0"),
    "fraction": (1.5, r"start: got shape \(\), expected a node number or probabilities of shape \(3, 4\)"),
    "none": (None, "start: got None"),
    "word": ("all", "start: got dtype <U3"),
    "uneven": ([[1, 2], [3]], r"start: got \[\[1, 2\], \[3\]\], .* uneven lengths"),
    "flat": (
        np.full(12, 1 / 12),
        r"start: got shape \(12,\), expected a node number or probabilities of shape \(3, 4\)",
    ),
    "sum": (np.full((3, 4), 0.1), r"start: got probabilities with minimum 0.1 and sum 1.2.*divide by the sum"),
    "below zero": (np.array([[1.5, -0.5, 0, 0], [0] * 4, [0] * 4]), "start: got probabilities with minimum -0.5"),
    "nan": (np.full((3, 4), np.nan), r"start: got 12 NaN"),
    "zero": (np.zeros((3, 4)), "start: got probabilities with minimum 0 and sum 0"),
}


@pytest.mark.parametrize("name", STARTS)
def test_start(name: str) -> None:
    start, words = STARTS[name]
    calls = [lambda: CHAIN.law(start), lambda: CHAIN.walk(start, 1, 3), lambda: CHAIN.stopped_walk(start, 0.5, 3)]
    if start is not None:
        calls += [lambda: CHAIN.total_variation(1, start), lambda: CHAIN.mixing_time(start=start)]
    for index, call in enumerate(calls):
        # For walks an integer is one of many starts, so the message gives their range.
        expected = (
            "start: got (12 to 12|-1 to -1), expected nodes 0 to 11"
            if index in (1, 2) and isinstance(start, int)
            else words
        )
        with pytest.raises(nl.InputError, match=f"^{expected}"):
            call()


def test_a_law_in_float32_is_a_law() -> None:
    law = np.full((3, 4), 1 / 12, np.float32)
    assert CHAIN.law(law, 3).sum() == pytest.approx(1, abs=1e-14)
    assert CHAIN.walk(law, 3, 5, rng=1).shape == (5,)


def test_starts_of_walks() -> None:
    with pytest.raises(nl.InputError, match=r"start: got shape \(2,\), expected one node number or 3, one a walker"):
        CHAIN.walk(np.array([1, 2]), 1, 3)
    with pytest.raises(nl.InputError, match=r"start: got -1 to 12, expected nodes 0 to 11"):
        CHAIN.walk(np.array([1, -1, 12]), 1, 3)


@pytest.mark.parametrize("steps", [-1, 1.5, None, "two", True])
def test_steps(steps: Any) -> None:
    v = np.ones((3, 4))
    for call in (
        lambda: CHAIN.expectation(v, steps), lambda: CHAIN.law(0, steps), lambda: CHAIN.total_variation(steps),
        lambda: CHAIN.total_variation(steps, 0), lambda: CHAIN.distance_to_limit(v, steps),
        lambda: CHAIN.walk(0, steps, 3),
    ):  # fmt: skip
        with pytest.raises(nl.InputError, match=r"^steps: got .*, expected an integer >= 0"):
            call()


@pytest.mark.parametrize("eps", [0.0, 1.0, -0.1, 2.0, math.nan, "small", None])
def test_eps(eps: Any) -> None:
    for call in (lambda: CHAIN.mixing_time(eps), lambda: CHAIN.mixing_time(eps, 0), lambda: CHAIN.mixing_bounds(eps)):
        with pytest.raises(nl.InputError, match=r"^eps: got .*expected"):
            call()


def test_more_walkers_or_moves_than_there_can_be() -> None:
    for call in (lambda: CHAIN.walk(0, 1, 10**15), lambda: CHAIN.stopped_walk(0, 0.5, 10**15)):
        with pytest.raises(nl.MemoryLimitError, match=r"1000000000000000 walkers needs .*use fewer"):
            call()
    with pytest.raises(nl.InputError, match=r"^steps: got 1152921504606846976, expected at most 2\^40"):
        CHAIN.walk(0, 2**60, 1)
    for call in (lambda: CHAIN.total_variation(2**63, 0), lambda: CHAIN.distance_to_limit(np.eye(3, 4), 2**63)):
        with pytest.raises(
            nl.InputError, match=r"^steps: got 9223372036854775808, expected an integer >= 0 that is be"
        ):
            call()


def test_entries_whose_sum_overflows() -> None:
    for make in (MarkovChain.from_counts, MarkovChain.from_transitions):
        with pytest.raises(nl.InputError, match=r"got entries up to 1e\+308, whose sum overflows; divide all by that"):
            make(np.full((6, 6), 1e308))
    with pytest.raises(nl.InputError, match=r"^start: got probabilities with minimum 1e.308 and sum inf"):
        CHAIN.law(np.full((3, 4), 1e308))


def test_a_signal_below_normal_numbers_has_no_digits_to_lose() -> None:
    with pytest.raises(nl.NumericalError, match=r"^rtol: 0.001 of the distance of v from a constant is below its"):
        CHAIN.steps_to_limit(1e-321 * np.arange(12.0).reshape(3, 4))


def test_targets_without_a_length() -> None:
    with pytest.raises(nl.InputError, match=r"^targets: got ndarray, expected a mapping"):
        CHAIN.absorption(np.array(2))


def test_distances_below_rounding() -> None:
    for start in (None, 0):
        with pytest.raises(nl.InputError, match=r"^eps: got 1e-13, expected at least 1e-12, .*use mixing_bounds"):
            CHAIN.mixing_time(1e-13, start)


@pytest.mark.parametrize("walkers", [0, -1, 2.5, None])
def test_walkers(walkers: Any) -> None:
    for call in (lambda: CHAIN.walk(0, 1, walkers), lambda: CHAIN.stopped_walk(0, 0.5, walkers)):
        with pytest.raises(nl.InputError, match=r"^walkers: got .*, expected an integer >= 1"):
            call()


@pytest.mark.parametrize("rng", ["seed", -3, 1.5])
def test_rng(rng: Any) -> None:
    for call in (lambda: CHAIN.walk(0, 1, 3, rng=rng), lambda: CHAIN.stopped_walk(0, 0.5, 3, rng=rng)):
        with pytest.raises(nl.InputError, match=r"^rng: got .*, expected a seed >= 0 or a numpy.random.Generator"):
            call()


@pytest.mark.parametrize(
    ("stop", "words"),
    [
        (0.0, r"stop: got 0 to 0, expected probabilities in \[0, 1\], not all 0; a fidelity lambda~ stops with"),
        (1.5, "stop: got 1.5 to 1.5"),
        (-0.1, "stop: got -0.1 to -0.1"),
        (np.zeros((3, 4)), "stop: got 0 to 0"),
        (np.full(12, 0.5), r"stop: got shape \(12,\), expected a number or \(3, 4\), one for each node"),
        (math.nan, "stop: got 1 NaN"),
        ("often", "stop: got dtype"),
    ],
)
def test_stop(stop: Any, words: str) -> None:
    with pytest.raises(nl.InputError, match=f"^{words}"):
        CHAIN.stopped_walk(0, stop, 3)


@pytest.mark.parametrize("method", ["expectation", "limit", "distance_to_limit"])
def test_signals(method: str) -> None:
    call = getattr(CHAIN, method)
    options = {"steps": 2} if method != "limit" else {}
    for v, words in (
        (np.ones(12), r"v: got shape \(12,\), expected \(3, 4\)"),
        (np.full((3, 4), np.inf), "v: got 12 NaN or infinite"),
        (np.ones((3, 4), complex), "v: got complex values"),
    ):
        with pytest.raises(nl.InputError, match=f"^{words}"):
            call(v, **options)
    single = MarkovChain(built("keys", "float32")[0])
    with pytest.raises(nl.InputError, match=r"^v: got dtype float64, expected float32"):
        getattr(single, method)(np.ones(12), **options)


def test_laws_that_are_pushed() -> None:
    for name in ("queries", "isolated"):
        affinity, _ = built(name)
        with pytest.raises(nl.InputError, match=r"^law: got shape"):
            affinity.push(np.ones(7))
        with pytest.raises(nl.InputError, match=r"^law: got .* NaN"):
            affinity.push(np.full(affinity.domain.shape, np.nan))


def test_an_affinity_that_cannot_push() -> None:
    class OneWay(MatrixFree):
        """Averages over the next node alone; it says nothing of p P."""

        def __init__(self) -> None:
            super().__init__((8,))
            self.symmetric = False

        def _average(self, u: Any) -> Any:
            return np.roll(u, -1, axis=0)

    affinity = OneWay()
    with pytest.raises(nl.NumericalError, match=r"^shifts: p P is not available.*method='dense'"):
        affinity.push(np.full(8, 1 / 8))
    with pytest.raises(nl.NumericalError, match="p P is not available"):
        MarkovChain(affinity).law(0)
    # What needs averages alone is there.
    assert MarkovChain(affinity).period == 8
    np.testing.assert_allclose(MarkovChain(affinity).stationary, 1 / 8, rtol=1e-14)


def test_probability_that_is_lost_is_told() -> None:
    """A push that does not keep the sum, as where degrees underflow, gives no law."""

    class Leaking(MatrixFree):
        def _push(self, law: Any) -> Any:
            return 0.9 * super()._push(law)

    chain = MarkovChain(Leaking((9,)))
    for call in (lambda: chain.law(0), lambda: chain.total_variation(2, 0), lambda: chain.mixing_time(0.1, 0)):
        with pytest.raises(nl.NumericalError, match=r"^start: probability 0.1 is lost"):
            call()


def test_memory_limits() -> None:
    """Before anything is allocated; what is matrix-free needs none."""
    grid = nl.Grid((8, 8))
    chain = MarkovChain(nl.affinity(nl.Gaussian(width=1.0), grid), memory_limit=8 * 64**2 - 1)
    v = np.ones((8, 8))
    for call in (
        chain.matrix, chain.eigenvalues, lambda: chain.total_variation(2), chain.mixing_time,
        lambda: chain.walk(0, 1, 3), lambda: chain.stopped_walk(0, 0.5, 3),
    ):  # fmt: skip
        with pytest.raises(nl.MemoryLimitError, match=r"64 states needs .* bytes\).*(memory_limit|second_eigenvalue)"):
            call()
    assert chain.expectation(v, 2).shape == (8, 8)
    assert chain.law(0, 2).shape == (8, 8)
    for call in (lambda: chain.modes(2), lambda: chain.metastable_sets(2), chain.mean_first_passage_times):
        with pytest.raises(
            nl.MemoryLimitError, match=r"(modes|passage times) of 64 states needs 192 KiB \(196608 bytes"
        ):
            call()
    turned = MarkovChain.from_graph(np.triu(np.ones((64, 64)), -1), memory_limit=150_000)
    for call in (lambda: turned.metastable_sets(2), lambda: turned.hitting_times([0, 9])):
        with pytest.raises(nl.MemoryLimitError, match=r"(Schur vectors|first passages) of 64 states needs"):
            call()
    enough = MarkovChain(nl.affinity(nl.Gaussian(width=1.0), grid), memory_limit=8 * 64**2)
    assert enough.matrix().shape == (64, 64)
    assert enough.walk(0, 3, 10, rng=1).shape == (10,)
    with pytest.raises(nl.MemoryLimitError, match="all eigenvalues of 64 states"):
        enough.eigenvalues()
    with pytest.raises(nl.MemoryLimitError, match=r"the positions of 1000 walkers needs .*record=False"):
        enough.walk(0, 100, 1000, rng=1, record=True)


def test_moves_that_take_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nlflow.markov.law.PATIENCE", 20)
    chain = MarkovChain(given([[1.0, 1e-6], [1e-6, 1.0]]))
    with pytest.raises(nl.NumericalError, match=r"eps: 0.1 was not reached in 20 moves; use mixing_bounds\(\)"):
        chain.mixing_time(0.1, 0)
    quick = MarkovChain(given([[1.0, 0.9], [0.9, 1.0]]))
    assert quick.mixing_time(0.1, 0) == 1
    frozen = MarkovChain(given([[1.0, 1e-30], [1e-30, 1.0]]))
    with pytest.raises(nl.NumericalError, match=r"eps: 0.1 was not reached in 2\^60 moves"):
        frozen.mixing_time(0.1)


def test_chains_that_are_not_reversible_have_no_bounds() -> None:
    around = MarkovChain(given(ring(6, 0.2) + 0.1 * np.roll(np.eye(6), 2, axis=1)))
    for call in (around.mixing_bounds, lambda: around.smallest_eigenvalue):
        with pytest.raises(nl.InputError, match="affinity: got a chain that is not reversible"):
            call()
    assert MarkovChain(given(tilted())).smallest_eigenvalue < 0.5
