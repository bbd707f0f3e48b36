"""The demonstration runs and says what it claims."""

import re

import numpy as np
import pytest
from matplotlib import image
from scipy.signal import find_peaks

from nlflow.desk.commands.demonstration import _heartbeats, run_demo


def test_a_heart_beats():
    heart = _heartbeats(3600)  # 20 seconds
    beats, _ = find_peaks(heart, height=900)
    assert len(beats) == 22  # 1.15 a second, and one on the first sample
    # R is 1000 high, less what Q and S take from it where their waves end.
    peak = 1000 * (1 - (0.167 + 0.25) * np.exp(-((np.pi / 12) ** 2) / (2 * 0.1**2)))
    assert np.abs(heart[beats] - peak).max() < 25  # it may lie between two samples
    assert np.ptp(np.diff(beats)) > 10  # it breathes


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    out = tmp_path_factory.mktemp("demo") / "new" / "folder"
    return out, run_demo(out, progress=False)


@pytest.mark.slow
def test_the_table_shows_gains_and_limits(shown):
    _, table = shown
    names = ("photograph 512x512, noisy", "  scikit-image NLM", "  nlflow.denoise")
    noisy, peer, ours = (float(re.search(rf"{name} +[\d.]+ +(\d+\.\d\d)", table)[1]) for name in names)
    assert noisy < 21
    assert ours >= peer > 29
    rows = re.findall(r"(J|E)-flow +(\S+) -> (\S+) +(\S+) -> (\S+)", table)
    assert [row[0] for row in rows] == ["J", "E", "J", "E"]
    for letter, *numbers in rows:
        energy_before, energy_after, before, after = map(float, numbers)
        assert energy_after < energy_before
        if letter == "J":
            assert after < 1e-6 * before
            assert energy_after < 1e-12 * energy_before
        else:
            assert after > 0.3 * before
    gaps = [float(gap) for gap in re.findall(r"minimizer of E: (\S+) sigma", table)]
    assert len(gaps) == 2
    assert max(gaps) < 1e-5


@pytest.mark.slow
def test_the_figure_is_drawn(shown):
    out, table = shown
    assert [p.name for p in out.iterdir()] == ["demo.png"]
    assert str(out / "demo.png") in table
    picture = image.imread(out / "demo.png")
    assert min(picture.shape[:2]) > 900
    assert np.ptp(picture) > 0.9
