"""Figures of quality, held against their formulas and against scikit-image."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from skimage.metrics import peak_signal_noise_ratio, structural_similarity

from nlflow.denoising.quality import psnr, snr, ssim
from nlflow.errors import InputError

RNG = np.random.default_rng(8)
CLEAN = RNG.integers(0, 256, (16, 20, 3), dtype=np.uint8)
NOISY = CLEAN + RNG.normal(0, 20, CLEAN.shape)


def test_against_scikit_image() -> None:
    clean = CLEAN.astype(np.float64)
    assert psnr(CLEAN, NOISY) == pytest.approx(peak_signal_noise_ratio(clean, NOISY, data_range=255))
    for channel_axis in (0, 1, 2, -1):
        pair = (np.moveaxis(clean, 2, channel_axis), np.moveaxis(NOISY, 2, channel_axis))
        expected = structural_similarity(clean, NOISY, data_range=255, channel_axis=2)
        assert ssim(pair[0].astype(np.uint8), pair[1], channel_axis) == pytest.approx(expected)


def test_snr_is_about_the_mean() -> None:
    clean = np.array([0.0, 2.0])
    assert snr(clean, clean + 0.1) == pytest.approx(20)
    assert snr(clean + 1000, clean + 1000.1) == pytest.approx(20)
    assert snr(clean, clean) == np.inf
    assert snr(np.ones(3), np.zeros(3)) == -np.inf


def test_ssim_needs_a_window_and_a_range() -> None:
    assert ssim(CLEAN[:6, :, 0], NOISY[:6, :, 0]) is None
    assert ssim(np.zeros((9, 9)), np.ones((9, 9))) is None
    assert ssim(CLEAN[:7, :7, 0], CLEAN[:7, :7, 0]) == 1
    assert ssim(np.moveaxis(CLEAN, 2, 0), np.moveaxis(CLEAN, 2, 0), -3) == 1


@pytest.mark.parametrize("measure", [psnr, snr, ssim])
def test_wrong_shapes(measure: Callable[..., Any]) -> None:
    with pytest.raises(InputError, match="estimate: got shape"):
        measure(np.zeros((9, 9)), np.zeros((9, 8)))
