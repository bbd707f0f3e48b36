"""Channels that are denoised each by itself have the bits of calls for each."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from nlflow import InputError, NlflowWarning, denoise
from nlflow.denoising import Trail
from nlflow.denoising.info import together
from nlflow.denoising.noise import GaussianNoise

TIME = np.arange(600) / 50
CLEAN = np.stack([np.sin(TIME), 101_325 + 500 * np.sign(np.sin(TIME / 2)), 20 + 1e-3 * np.cos(TIME)], 1)
NOISE = np.array([0.2, 100.0, 2e-4])
NOISY = CLEAN + np.random.default_rng(3).normal(size=CLEAN.shape) * NOISE


def test_separate_channels_are_alone() -> None:
    mask = np.zeros(CLEAN.shape, bool)
    mask[100:120, 1] = True
    keep = TIME < 1
    words: dict[str, Any] = {"quality": "pixels", "return_info": True, "steps": 2}
    shares: list[float] = []
    together, info = denoise(
        NOISY.T, NOISE, channel_axis=0, separate=True, mask=mask.T, keep=keep, progress=shares.append, **words
    )
    for c in range(3):
        alone, own = denoise(NOISY[:, c], NOISE[c], mask=mask[:, c], keep=keep, **words)
        np.testing.assert_array_equal(together[c], alone)
        assert info.columns[c].sigma == own.sigma == NOISE[c]
    assert info.sigma == pytest.approx(np.sqrt(np.mean(NOISE**2)))
    assert shares == sorted(shares)
    assert shares[-1] == 1


def test_what_is_told_of_all_channels_is_no_channel_s_own() -> None:
    rng = np.random.default_rng(0)
    image = np.stack([rng.normal(0, 8, (64, 64)), 100.0 * (np.arange(64) > 30) + rng.normal(0, 2, (64, 64))])
    models = GaussianNoise.from_kernel(np.ones((3, 3)), 8.0), GaussianNoise(2.0)
    infos = [denoise(one, noise=model, quality="pixels", return_info=True)[1]
             for one, model in zip(image, models, strict=True)]  # fmt: skip
    assert infos[0].sigma_effective not in (None, infos[0].sigma)
    told = together([replace(infos[0], confidence="high", reasons=("a",)), replace(infos[1], reasons=("a", "b"))])
    assert told.model is None
    assert told.sigma_effective == pytest.approx(np.hypot(infos[0].sigma_effective or 0, infos[1].sigma) / np.sqrt(2))
    assert (told.confidence, told.reasons) == ("high", ("a", "b"))
    assert together([replace(one, confidence="low") for one in infos] + [told]).confidence == "low"
    assert together([infos[1], infos[1]]).model == infos[1].model


def test_separate_channels_with_a_trail() -> None:
    trail = Trail()
    assert trail.tell is None
    first = denoise(NOISY, channel_axis=1, separate=True, quality="pixels", progress=trail)
    np.testing.assert_array_equal(first, denoise(NOISY, channel_axis=1, separate=True, quality="pixels"))
    assert (trail.course, trail.tell) == ({}, None)


def test_a_map_for_separate_channels() -> None:
    level = np.linspace(1, 2, 600)
    words: dict[str, Any] = {"quality": "pixels", "steps": 1}
    for given in (level, np.column_stack([level] * 3), level.tolist()):
        with pytest.warns(NlflowWarning, match="more than the range of the samples"):  # of one channel in other units
            found = denoise(NOISY, given, channel_axis=1, separate=True, **words)
        np.testing.assert_array_equal(found[:, 1], denoise(NOISY[:, 1], level, **words))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({}, "separate: got True for shape .* give channel_axis"),
        ({"channel_axis": 1, "sigma": [1, 2]}, r"sigma: got an array of shape \(2,\).*\(3,\) for one number a channel"),
        ({"channel_axis": 1, "mask": np.zeros(5, bool)}, r"mask: got an array of shape \(5,\)"),
        ({"channel_axis": 1, "mask": np.ones(600, bool)}, "mask: hides every sample"),
        ({"channel_axis": 1, "mask": "none"}, "mask: got 'none'"),
        ({"channel_axis": 1, "sigma": -1}, "sigma: got -1"),
        ({"channel_axis": 3}, "channel_axis: got 3"),
    ],
)
def test_separate_channels_are_checked(words: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        denoise(NOISY, separate=True, **words)
