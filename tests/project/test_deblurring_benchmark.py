"""The benchmark of deblurring: its settings are those of the literature, and what is not measured again is kept."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from scipy.ndimage import convolve

from benchmarks import __main__ as program
from benchmarks import deblurring
from benchmarks.harness import Row, sections_of
from nlflow import InputError


@pytest.mark.parametrize("setting", deblurring.SETTINGS)
def test_blur_is_a_circular_convolution(setting: str) -> None:
    clean = np.random.default_rng(1).uniform(0, 255, (20, 24))
    forward, data, sigma = deblurring.observed(clean, setting)
    kernel, variance, _ = deblurring.SETTINGS[setting]
    expected = convolve(clean, kernel / kernel.sum(), mode="wrap")
    np.testing.assert_allclose(forward.apply(clean), expected, atol=1e-10)
    np.testing.assert_array_equal(data, forward.apply(clean) + np.random.default_rng(0).normal(0, sigma, clean.shape))
    if variance is None:
        assert 10 * np.log10(expected.var() / sigma**2) == pytest.approx(40)
    else:
        assert sigma**2 == pytest.approx(variance)


def test_the_loop_restores() -> None:
    clean = np.zeros((32, 32))
    clean[8:22, 10:24] = 200
    blurred = deblurring.score(clean, deblurring.observed(clean, "1")[1], "grey")["psnr"]
    value, seconds = deblurring.restored(clean, "1", deblurring.Denoiser("fast"))
    assert value > blurred + 3
    assert seconds > 0


def test_parts_that_are_not_measured_keep_their_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    value = 1.0

    def run(only: Sequence[str], data: Path) -> list[Row]:
        return [deblurring.row(f"setting {one}", "peer", data.name, value, least=0.0, unit=" dB") for one in only]

    monkeypatch.setattr(deblurring, "run", run)

    def rows(*more: str) -> list[float]:
        words = ["benchmarks", "deblurring", "--data", str(tmp_path), "--out", str(tmp_path), *more]
        monkeypatch.setattr("sys.argv", words)
        program.main()
        return [one.ratio for part in sections_of(tmp_path, "deblurring").values() for one in part]

    assert rows() == [1.0] * 4
    value = -2.0
    assert rows("--only", "3") == [1.0, 1.0, -2.0, 1.0]
    page = (tmp_path / "deblurring.md").read_text(encoding="utf-8")
    assert page.count("**no**") == 1
    with pytest.raises(InputError, match=r"--only: got 9 for deblurring, expected any of 1, 2, 3, 4"):
        rows("--only", "9")


def test_without_its_pictures_it_says_what_it_needs() -> None:
    with pytest.raises(InputError, match=r"--data: needed for deblurring, expected a folder with Set12"):
        deblurring.run(["1"])
