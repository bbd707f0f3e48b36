"""What `denoise` tells while it runs, and weights that are kept from one call to the next."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from nlflow import NlflowWarning, NumericalError, denoise
from nlflow.denoising import Trail, pixelwise
from nlflow.denoising.groupwise import PRESETS
from nlflow.denoising.noise.finding import sigma as estimation
from nlflow.denoising.runs import within
from nlflow.flows.linear import LinearFlow
from tests.covering import pairs
from tests.pictures import GROUPS_SLOWLY, QUALITIES, SLOWLY, SMALL


class Stop(BaseException):
    """No error: nothing that catches errors may catch it."""


@pytest.fixture(scope="module")
def noisy() -> np.ndarray[Any, Any]:
    x = np.linspace(0, 3, 48)
    clean = 100 * np.sin(x)[:, None] * np.cos(2 * x)
    return clean + np.random.default_rng(3).normal(0, 10, clean.shape)


@pytest.mark.parametrize("quality", SLOWLY)
def test_shares_rise_to_one_and_leave_the_bits(noisy: np.ndarray[Any, Any], quality: str) -> None:
    shares: list[float] = []
    told = denoise(noisy, 10, quality=quality, progress=shares.append)
    assert np.array_equal(told, denoise(noisy, 10, quality=quality))
    assert len(shares) >= 3
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    assert 0 <= shares[0] < 1


def test_shares_of_fast_are_those_of_weights_and_steps(noisy: np.ndarray[Any, Any]) -> None:
    shares: list[float] = []
    denoise(noisy, 10, quality="pixels", steps=4, progress=shares.append)
    assert shares == [0.5, 0.625, 0.75, 0.875, 1.0, 1.0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        {"quality": "pixels", "stopping": "sure"},
        {"quality": "balanced", "stopping": "sure"},
        {"quality": "pixels", "sigma": np.linspace(5, 30, 48 * 48).reshape(48, 48)},
        {"quality": "balanced", "mask": np.arange(48 * 48).reshape(48, 48) % 97 == 0},
        {"sigma": 0.0},
    ],
)
@pytest.mark.sampled(2)
def test_shares_of_other_ways(noisy: np.ndarray[Any, Any], words: dict[str, Any]) -> None:
    words = {"sigma": 10, **words}
    shares: list[float] = []
    told = denoise(noisy, **words, progress=shares.append)
    assert np.array_equal(told, denoise(noisy, **words))
    assert shares == sorted(shares)
    assert shares[-1] == 1.0


def test_shares_of_strips(noisy: np.ndarray[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PRESETS, "balanced", SMALL)
    image, shares = np.tile(noisy[:, :24], (9, 1)), []
    whole, info = denoise(image, 10, return_info=True)
    told, parts = denoise(image, 10, max_memory=0.8 * info.memory_bytes, return_info=True, progress=shares.append)
    assert parts.tiles > info.tiles == 1
    assert np.array_equal(told, whole)
    assert shares == sorted(shares)
    assert shares[-1] == 1.0


@pytest.mark.parametrize(
    ("error", "quality", "at"),
    pairs([Stop(), KeyboardInterrupt(), NumericalError("mine"), ValueError("mine")], QUALITIES, [0.0, 0.52, 1.0]),
)
@pytest.mark.sampled(3)
def test_what_is_raised_comes_out_as_it_is(
    noisy: np.ndarray[Any, Any], error: BaseException, quality: str, at: float
) -> None:
    calls: list[float] = []

    def tell(share: float) -> None:
        calls.append(share)
        if share >= at:
            raise error

    with pytest.raises(type(error)) as caught:
        denoise(noisy, 10, quality=quality, progress=tell)
    assert caught.value is error
    assert calls[-1] >= at
    assert all(share < at for share in calls[:-1])  # the call ended there


def test_the_last_share_of_a_part_is_its_end() -> None:
    shares: list[float] = []
    tell = within(shares.append, 0.1, 0.3)
    assert tell is not None
    for share in (0.0, 0.5, 1.0, 1 + 1e-12):
        tell(share)
    assert shares == [0.1, 0.2, 0.3, 0.3]
    assert within(None, 0, 1) is None


# ---- weights that are kept


def count_builds(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    built: list[int] = []
    build = pixelwise._affinity
    monkeypatch.setattr(pixelwise, "_affinity", lambda *words: (built.append(1), build(*words))[1])
    return built


def test_weights_are_built_once_for_fidelity_and_time(
    noisy: np.ndarray[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    built = count_builds(monkeypatch)
    trail = Trail()
    for words in ({}, {"fidelity": 0.3}, {"fidelity": 0.0}, {"steps": 3}, {"fidelity": 0.5, "steps": 2}):
        told = denoise(noisy, 10, quality="pixels", **words, progress=trail)
        assert len(built) == 1
        assert np.array_equal(told, denoise(noisy, 10, quality="pixels", **words))
        built[1:] = []  # that call has no trail
    assert trail.reused == 4


@pytest.mark.parametrize(
    "words", [{"sigma": 11}, {"width": 9.0}, {"patch_size": 7}, {"search_radius": 5}, {"max_memory": 2e6}]
)
def test_weights_of_another_kernel_are_others(noisy: np.ndarray[Any, Any], words: dict[str, Any]) -> None:
    trail = Trail()
    denoise(noisy, 10, quality="pixels", progress=trail)
    words = {"sigma": 10, **words}
    followed = denoise(noisy, quality="pixels", **words, progress=trail)
    assert np.array_equal(followed, denoise(noisy, quality="pixels", **words))
    assert trail.reused == 0


def test_noise_is_estimated_once(noisy: np.ndarray[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    estimated: list[int] = []
    denoise(noisy, noise="white", quality="pixels")  # loads the verdict, whose own estimates do not count
    estimate = estimation.estimate_sigmas
    monkeypatch.setattr(estimation, "estimate_sigmas", lambda *words: (estimated.append(1), estimate(*words))[1])
    trail, found = Trail(), []
    images = (noisy, noisy, noisy + np.random.default_rng(1).normal(0, 9, noisy.shape))
    for image in images:
        told, info = denoise(image, noise="white", quality="pixels", return_info=True, progress=trail)
        found.append((told, info, len(estimated)))
    assert [count for *_, count in found] == [1, 1, 2]
    for image, (told, info, _) in zip(images, found, strict=True):
        expected, plain = denoise(image, noise="white", quality="pixels", return_info=True)
        assert np.array_equal(told, expected)
        assert (info.sigma, info.sigma_estimated) == (plain.sigma, True)


def test_weights_of_another_image_are_others(noisy: np.ndarray[Any, Any]) -> None:
    trail = Trail()
    denoise(noisy, 10, quality="pixels", progress=trail)
    other = noisy.copy()
    other[20, 20] += 1
    other[20, 21] -= 1
    assert np.array_equal(denoise(other, 10, quality="pixels", progress=trail), denoise(other, 10, quality="pixels"))
    assert trail.reused == 0


def test_two_sets_of_weights_are_kept(noisy: np.ndarray[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    built = count_builds(monkeypatch)
    trail = Trail()
    for width in (8.0, 9.0, 8.0, 10.0, 8.0, 9.0):
        denoise(noisy, 10, quality="pixels", width=width, progress=trail)
    assert len(built) == 4  # 8, 9, 10, and 9 again
    assert trail.reused == 2
    monkeypatch.setattr("nlflow.denoising.runs._MOST_BYTES", 1000)
    denoise(noisy, 10, quality="pixels", width=9.0, progress=trail)
    assert not trail._kept


def test_warnings_come_with_kept_weights_too(noisy: np.ndarray[Any, Any]) -> None:
    trail = Trail()
    for _ in range(2):
        with pytest.warns(NlflowWarning, match="shrunk"):
            denoise(noisy[:12], 10, quality="pixels", search_radius=40, progress=trail)
    assert trail.reused == 1


# ---- the course


def test_course_of_fast(noisy: np.ndarray[Any, Any]) -> None:
    trail = Trail()
    result = denoise(noisy, 10, quality="pixels", steps=5, fidelity=0.4, progress=trail)
    course = trail.course
    assert course["t"].tolist() == [0, 1, 2, 3, 4, 5]
    assert np.all(np.diff(course["E"]) <= 1e-12)  # the functional that the steps descend
    assert np.all(course["E"] >= course["J"])
    assert course["E"][0] == course["J"][0]  # nothing is away from f yet
    # In units of the input: about the spread of what comes out, which the degrees weigh.
    assert course["distance"][-1] == pytest.approx(result.std(), rel=0.2)
    scaled = Trail()
    denoise(7 * noisy, 70, quality="pixels", steps=5, fidelity=0.4, progress=scaled)
    assert scaled.course["distance"] == pytest.approx(7 * course["distance"], rel=1e-4)
    assert scaled.course["E"] == pytest.approx(course["E"], rel=1e-4)


def test_a_course_costs_one_average_beyond_the_steps(
    noisy: np.ndarray[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = []
    averaged = LinearFlow._averaged  # `average` makes another flow where it is replaced
    monkeypatch.setattr(LinearFlow, "_averaged", lambda flow, u: (counts.append(1), averaged(flow, u))[1])
    plain = denoise(noisy, 10, quality="pixels", steps=6, fidelity=0.4)
    assert len(counts) == 6
    counts.clear()
    assert np.array_equal(denoise(noisy, 10, quality="pixels", steps=6, fidelity=0.4, progress=Trail()), plain)
    assert len(counts) == 7


@pytest.mark.parametrize("quality", GROUPS_SLOWLY)
def test_course_of_groups(noisy: np.ndarray[Any, Any], quality: str) -> None:
    trail = Trail()
    result, info = denoise(noisy, 10, quality=quality, return_info=True, progress=trail)
    assert np.array_equal(result, denoise(noisy, 10, quality=quality))
    assert set(trail.course) == {"t", "distance"}
    assert len(trail.course["t"]) == info.steps + 1
    assert trail.course["distance"][0] == pytest.approx(noisy.std(), rel=1e-3)
    assert trail.course["distance"][-1] == pytest.approx(result.std(), rel=1e-3)


def test_course_is_that_of_the_last_call(noisy: np.ndarray[Any, Any]) -> None:
    trail = Trail()
    denoise(noisy, 10, quality="pixels", progress=trail)
    assert trail.course
    denoise(np.zeros((8, 8)), 10, quality="pixels", progress=trail)
    assert trail.course == {}


def test_a_course_is_that_of_the_result() -> None:
    """Of a recording whose coarser scales come first there is none, though the other flow was run as well."""
    rng = np.random.default_rng(0)
    slow = np.cumsum(rng.normal(0, 0.05, 3000)) + rng.normal(0, 1, 3000)
    trail = Trail()
    _, info = denoise(slow, progress=trail, return_info=True)
    assert info.parameters["coarser_images"] > 0
    assert trail.course == {}
