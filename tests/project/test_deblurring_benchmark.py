"""The benchmark of deblurring: its settings are those of the literature, and what is not measured again is kept."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.ndimage import convolve

from benchmarks import deblurring
from benchmarks.harness import KIND
from nlflow.store.storage import load_record


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


@pytest.mark.slow
def test_settings_that_are_not_measured_keep_their_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    value = 1.0

    def measured(data: Path, setting: str, images: list[str]) -> Iterator[Any]:
        yield deblurring.row(f"setting {setting}, {images[0]}", "peer", "ours", value, least=0.0, unit=" dB")

    monkeypatch.setattr(deblurring, "measured", measured)

    def run(*more: str) -> list[float]:
        words = ["deblurring", "--data", str(tmp_path), "--out", str(tmp_path), *more]
        monkeypatch.setattr("sys.argv", words)
        deblurring.main()
        return [one["ratio"] for one in load_record(tmp_path / "deblurring.json", KIND)["rows"]]

    assert run() == [1.0] * 4
    value = -2.0
    assert run("--only", "3") == [1.0, 1.0, -2.0, 1.0]
    page = (tmp_path / "deblurring.md").read_text(encoding="utf-8")
    assert page.count("**no**") == 1
