"""Pictures enlarged by repeating samples: noise lies within their cells, and cells of unlike values are no noise."""

from __future__ import annotations

import numpy as np
import pytest
import skimage.data
from numpy.typing import NDArray

from nlflow import NlflowWarning, denoise, estimate_noise
from nlflow.denoising.noise.finding.enlarged import find_enlarged
from tests.pictures import rms


def cells(side: int, colours: int = 3, seed: int = 0, size: int = 120) -> NDArray[np.float64]:
    """Return cells of values at random, as sprites and maps of a matrix have them; the first ones are cut."""
    values = np.random.default_rng(seed).integers(30, 226, (size // side + 2, size // side + 2, colours))
    return values.repeat(side, axis=0).repeat(side, axis=1)[1 : size + 1, side - 1 : size + side - 1].astype(float)


@pytest.mark.parametrize("side", [2, 3, 5, 8])
@pytest.mark.parametrize("colours", [1, 3])
def test_noise_is_measured_within_cells(side: int, colours: int) -> None:
    clean = cells(side, colours)
    for sigma in (2.0, 15.0):
        noisy = clean + np.random.default_rng(1).normal(0, sigma, clean.shape)
        found = find_enlarged(noisy)
        assert found is not None
        assert found.noise is not None
        assert (found.side, found.corner) == (side, (side - 1, 1 % side))
        # A variance from so many samples less one of each cell, of which three estimates differ by chance.
        assert np.mean(found.noise.sigma) == pytest.approx(sigma, rel=0.05)
        assert estimate_noise(noisy, channel_axis=-1).confidence == "high"


@pytest.mark.slow
@pytest.mark.parametrize("side", [2, 5])
def test_cells_stay_when_their_noise_goes(side: int) -> None:
    clean = cells(side)
    noisy = np.clip(np.rint(clean + np.random.default_rng(1).normal(0, 10, clean.shape)), 0, 255).astype(np.uint8)
    result = denoise(noisy, channel_axis=-1, preserve_range=True)
    assert rms(result, clean) < 0.95 * rms(noisy, clean)  # 7 times as large where cells counted as noise


def test_even_cells_stay_as_they_are() -> None:
    clean = cells(3)
    with pytest.warns(NlflowWarning, match="before it was enlarged, as one sample of each cell"):
        assert np.array_equal(denoise(clean, channel_axis=-1), clean)
    blank = np.zeros((16, 16, 1))
    blank[4:12, 4:12], blank[6:8, 6:8] = 90.0, 200.0
    drawing = np.tile(blank, (3, 3, 1)).repeat(4, axis=0).repeat(4, axis=1)
    assert estimate_noise(drawing[..., 0]).model.white_sigma == 0


def test_other_pictures_are_not_of_cells() -> None:
    rng = np.random.default_rng(0)
    photo = skimage.data.camera()[::2, ::2, None].astype(float)
    smooth = np.add.outer(np.arange(128.0), np.arange(128.0))[..., None]
    lines = np.tile(np.arange(128.0)[:, None, None] % 4, (1, 128, 1))
    correlated = cells(4, 1) + rng.normal(0, 5, (120, 120, 1)).cumsum(axis=0) / 9
    rising = cells(4, 1) + rng.normal(0, 1, (120, 120, 1)) * cells(4, 1) / 10
    noise = rng.normal(0, 5, (120, 120, 1))
    for other in (
        photo,
        photo + rng.normal(0, 5, photo.shape),
        smooth,
        lines,
        correlated,
        rising,
        noise,
        noise[:7, :7],
    ):
        assert find_enlarged(other) is None
    assert find_enlarged(cells(4, 1), np.zeros((120, 120), bool)) is None
    assert find_enlarged(noise[..., 0]) is None
