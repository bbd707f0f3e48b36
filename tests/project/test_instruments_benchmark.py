"""The benchmark of simulated instruments: what it simulates, and how it judges."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks import instruments
from benchmarks.blind.methods import NOISY
from benchmarks.blind.runner import Figure

SKEWED = {"photon counting": 0.45, "magnitude mri": 0.32}  # mostly zeros; magnitudes where there is nothing


def figure(picture: str, method: str, value: float | None) -> Figure:
    return Figure(instruments.NAME, "some instrument", picture, method, value)


def scene(picture: str, noisy: float, ours: float | None, peer: float) -> list[Figure]:
    values = {NOISY: noisy, instruments.OURS: ours, "best peer": peer}
    return [figure(picture, method, value) for method, value in values.items()]


def test_harm_and_distance_are_told_apart():
    found = [*scene("better", 20, 30, 29), *scene("worse than the samples", 20, 19, 20), *scene("near", 20, 24.8, 25)]
    harm, near = instruments.verdicts(found)
    assert harm.ratio == pytest.approx(-1)
    assert not harm.met
    assert near.ratio == pytest.approx(2 / 3)
    assert not near.met
    harm, near = instruments.verdicts(scene("better", 20, 30, 29))
    assert harm.met
    assert near.met


def test_a_refusal_harms_nothing_but_falls_short():
    harm, near = instruments.verdicts([*scene("refused", 20, None, 29), *scene("equal", np.inf, np.inf, np.inf)])
    assert harm.ratio == 0
    assert near.ratio == pytest.approx(0.5)


@pytest.mark.slow
@pytest.mark.parametrize("each", list(instruments.scenes(list(instruments.INSTRUMENTS))), ids=lambda s: s.setting)
def test_samples_are_the_truth_and_noise(each):
    sample, again = each.make(), each.make()
    np.testing.assert_array_equal(sample.noisy, again.noisy)
    assert sample.noisy.shape == sample.truth.shape
    assert sample.peak > 0
    # Half of the samples lie above the truth, whatever outliers there are; more or fewer where the noise is skewed.
    seen = np.isfinite(sample.truth) & (sample.truth != sample.noisy)
    width = SKEWED.get(each.setting, 0.25)
    if seen.any():
        assert abs(np.mean((np.asarray(sample.noisy, float) > sample.truth)[seen]) - 0.5) < width
