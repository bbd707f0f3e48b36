"""The benchmark of blind denoising: a tiny run of it, its noise, its searches, and its verdicts on made-up figures."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from skimage.data import astronaut, camera
from skimage.io import imread

from benchmarks import real_noise
from benchmarks.blind import methods as by
from benchmarks.blind import report
from benchmarks.blind.delicate import CLEAN, PACKAGED, packaged
from benchmarks.blind.methods import Method, Outcome, Sample, climbed
from benchmarks.blind.runner import Figure, Kept, measure
from benchmarks.blind.scenes import CAMERAS, SECTIONS, SPECTRA, Scene, coloured_noise
from benchmarks.harness import KIND
from nlflow.store.storage import load_record

SIDE = 48
BALANCED, BEST = report.BALANCED, report.BEST


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Folders as those of the data, with small pictures of scikit-image."""
    folder = tmp_path / "data"
    grey, colour = camera()[100 : 100 + SIDE, 200 : 200 + SIDE], astronaut()[:SIDE, 200 : 200 + SIDE]
    shot = np.clip(colour + np.random.default_rng(0).normal(0, 8, colour.shape), 0, 255).astype(np.uint8)
    for place, samples in (
        ("Set12/01.png", grey),
        ("Set12/02.png", grey.T),
        ("Kodak24/kodim01.png", colour),
        ("PolyU-even/a_real.JPG", shot),
        ("PolyU-even/a_mean.JPG", colour),
    ):
        path = folder / place
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(samples).save(path, quality=95)
    return folder


def call(monkeypatch: pytest.MonkeyPatch, *words: object) -> None:
    monkeypatch.setattr(sys, "argv", ["real_noise", "--jobs", "1", *map(str, words)])
    real_noise.main()


@pytest.mark.slow
def test_a_run_measures_writes_and_draws_and_the_next_measures_what_is_left(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, drawn = tmp_path / "out", tmp_path / "figures"
    words = ("--data", data, "--out", out, "--images", 1, "--quality", "fast")
    call(monkeypatch, *words, "--only", "impulses", "--figure", drawn)
    assert "impulses, 5%" not in capsys.readouterr().out  # the goal is that of balanced
    content = load_record(out / "real_noise.json", KIND)
    found = {entry["key"]: entry for entry in content["entries"]}
    assert {key.rpartition("/")[2] for key in found} == {by.NOISY, by.MEDIAN, "blind fast"}
    assert len(found) == 6
    clean, noisy = imread(data / "Set12" / "01.png"), found["impulses/20%/01/noisy"]["row"]
    assert noisy["source"] == ""
    # A fifth of the samples is black or white: the mean square follows from the picture alone, but for the draws.
    expected = 0.2 * np.mean((clean.astype(float) ** 2 + (255.0 - clean) ** 2) / 2)
    assert noisy["value"] == pytest.approx(10 * np.log10(255**2 / expected), abs=0.5)
    assert found["impulses/5%/01/median"]["row"]["note"].startswith("size = ")
    sheets = sorted(path.name for path in drawn.iterdir())
    assert sheets == ["impulses-20-01-blind-fast.png", "impulses-5-01-blind-fast.png"]
    assert imread(drawn / sheets[0]).shape == (2 * (SIDE + 14), 2 * SIDE + 4, 3)

    runs: list[str] = []
    monkeypatch.setattr("benchmarks.blind.runner.measured", lambda scene, name, *rest: runs.append(name))
    monkeypatch.setattr("benchmarks.real_noise.source_digest", lambda: "another source")
    monkeypatch.setattr(Kept, "write", lambda self, name, finding: None)
    call(monkeypatch, *words, "--only", "impulses")
    assert runs == ["blind fast"] * 2
    runs.clear()
    call(monkeypatch, *words, "--only", "impulses", "--fresh")
    assert len(runs) == 6


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cameras", "simulated", "coloured", "speckle", "white", "clean"])
@pytest.mark.sampled(2)
def test_every_section_has_scenes_whose_noise_is_what_they_say(data: Path, name: str) -> None:
    section = SECTIONS[name]
    scenes = list(section.scenes(data, 1))
    assert len({(s.setting, s.picture) for s in scenes}) == len(scenes)
    sample = scenes[-1].make()
    assert sample.noisy.shape == sample.truth.shape
    assert np.isfinite(sample.noisy).all()
    assert (sample.axis is None) == (sample.noisy.ndim == 2)
    for method in section.methods(("fast",)).values():
        outcome = method.call(sample) if method.call not in (by.oracle, by.bm3d, by.opencv) else Outcome(sample.noisy)
        assert (outcome.result is None) == outcome.note.startswith("not ")
        if outcome.result is not None:
            assert outcome.result.shape == sample.noisy.shape


@pytest.mark.parametrize("name", SPECTRA)
def test_coloured_noise_has_its_spectrum_and_strength(name: str, rng: np.random.Generator) -> None:
    power = SPECTRA[name]((16, 24))
    power *= 400 / power.mean()
    draws = np.stack([coloured_noise(power, 20.0, rng) for _ in range(400)])
    assert np.sqrt(np.mean(draws**2, axis=(1, 2))) == pytest.approx(20.0)
    measured = np.mean(np.abs(np.fft.fft2(draws)) ** 2, axis=0) / power.size
    # The mean of 400 squares errs by 5 % (7 % where the coefficient is real): five times that at most. To scale each
    # draw to one strength shrinks what few frequencies share, as in rows.
    assert np.allclose(measured, power, rtol=0.35, atol=1e-6 * power.max())


def test_speckle_and_impulses_and_rows_are_what_they_are_called(data: Path) -> None:
    looks = {s.setting: s.make() for s in SECTIONS["speckle"].scenes(data, 1)}
    for setting, number in (("1 look", 1), ("16 looks", 16)):
        factor = looks[setting].noisy / looks[setting].truth
        assert factor.mean() == pytest.approx(1.0, abs=5 / np.sqrt(number * factor.size))
        assert factor.var() == pytest.approx(1 / number, rel=0.3)
    rows = next(s for s in SECTIONS["coloured"].scenes(data, 1) if s.setting == "rows").make()
    assert np.ptp(rows.noisy - rows.truth, axis=1).max() < 1e-9
    assert rows.spectrum is not None
    assert rows.spectrum.mean() == pytest.approx(400.0)


@pytest.mark.parametrize("best", [0, 3, 7])
def test_a_search_by_the_truth_finds_the_top_from_anywhere(best: int) -> None:
    for start in range(8):
        tried: list[float] = []

        def attempt(value: float, tried: list[float] = tried) -> tuple[float, str]:
            tried.append(value)
            return -abs(value - 10 * best), f"at {value}"

        assert climbed(range(0, 80, 10), start, attempt) == (10 * best, f"at {10 * best}")
        assert len(tried) == len(set(tried)) <= abs(best - start) + 3


def test_the_oracle_takes_the_sigma_that_the_truth_asks_for(data: Path) -> None:
    clean = np.tile(np.linspace(60, 200, SIDE), (SIDE, 1))
    noisy = clean + np.random.default_rng(0).normal(0, 15, clean.shape)
    assert by.oracle(Sample(noisy, clean)).note in ("sigma = 15", "sigma = 20", "sigma = 30")
    assert by.oracle(Sample(clean, clean)).note == "sigma = 3"


def test_packaged_and_drawn_pictures_are_of_8_bits() -> None:
    for picture in [*map(packaged, PACKAGED), *(make() for make in CLEAN["drawn"].values())]:
        assert picture.dtype == np.uint8
        assert picture.ndim == 2 or picture.shape[2] == 3
        assert np.ptp(picture) > 100


def test_each_camera_takes_some_of_the_pictures_and_each_picture_two() -> None:
    assert len(set(CAMERAS)) == len(CAMERAS) == 8
    assert {iso for iso, _ in CAMERAS} == {800, 3200, 12800}
    assert {(c.quality, c.demosaicking) for _, c in CAMERAS} == {
        (q, d) for q in (80, 90, 95, 100) for d in ("bilinear", "gradient-corrected")
    }


def figure(section: str, method: str, value: float | None, picture: str = "a", setting: str = "s") -> Figure:
    return Figure(section, setting, picture, method, value, "1 s / 2 s" if section == "time" else "why")


@pytest.mark.parametrize("goal", [goal for goal in report.GOALS if goal.least is not None])
def test_goals_are_met_at_them_and_not_below(goal: Any) -> None:
    for offset, met in ((0.01, True), (-0.01, False)):
        values = [figure(goal.section, goal.method, 30 + goal.least + offset), figure(goal.section, goal.over, 30.0)]
        values.append(figure(goal.section, goal.method, 99.0, picture="without the other"))
        rows = [row for row in report.verdicts(values) if f"{goal.method}, gain in dB over {goal.over} (" in row.work]
        assert [row.met for row in rows] == [met]
        assert rows[0].ratio == pytest.approx(goal.least + offset)
        assert "(1)" in rows[0].work


def test_the_picture_that_changes_most_and_the_slowest_call_decide() -> None:
    values = [figure("clean", BALANCED, np.inf), figure("clean", BALANCED, 44.9, "b"), figure("time", "t", 2.6)]
    changed, slow = report.verdicts(values)
    assert not changed.met
    assert "(b)" in changed.work
    assert (slow.peer, slow.ours, slow.met) == ("2 s", "1 s", False)
    assert "least 44.90, mean 44.90, unchanged 1 of 2" in report.document(values, False)


def test_what_is_not_there_is_named_with_its_reason_and_measured_the_next_time(tmp_path: Path) -> None:
    text = report.document([figure("coloured", by.BM3D, None), figure("coloured", by.NOISY, 20.0)], True)
    assert f"- {by.BM3D}: why" in text
    assert "trial run" in text
    kept = Kept(tmp_path / "none.json", "now")
    scene = Scene("coloured", "s", "a", lambda: Sample(np.zeros((4, 4)), np.zeros((4, 4))))
    for _ in range(2):
        absent = {"x": Method(lambda sample: Outcome(note="not there"), ours=False)}
        (found,) = measure("coloured", [scene], absent, kept, "now")
        assert (found.value, found.note) == (None, "not there")
        assert kept.read(found.key) is None


def test_a_record_keeps_unchanged_pictures_and_drops_scenes_that_are_no_more(tmp_path: Path) -> None:
    def scene(picture: str) -> Scene:
        return Scene("clean", "s", picture, lambda: Sample(np.eye(4), np.eye(4)))

    path = tmp_path / f"{report.NAME}.json"
    kept = Kept(path, "now")
    unchanged = {"x": Method(lambda sample: Outcome(sample.noisy))}
    assert len(list(measure("clean", [scene("here"), scene("gone")], unchanged, kept, "now"))) == 2
    report.write(kept, tmp_path, False)
    kept = Kept(path, "now")
    kept.drop_former("clean", [scene("here")])
    assert [(figure.picture, figure.value) for figure in kept.figures] == [("here", np.inf)]
    assert kept.read(kept.figures[0].key) == kept.figures[0]


def test_what_denoise_refuses_unasked_stays_as_it_is() -> None:
    labels = np.kron(np.arange(16).reshape(4, 4), np.ones((12, 12))).astype(np.uint8)[::-1]
    outcome = by.ours(Sample(labels, labels.astype(float)))
    assert outcome.note.startswith("refused: image: got an image of 16 labels")
    assert np.array_equal(outcome.result, labels)


def test_numbers_below_one_and_folders_without_files_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        call(monkeypatch, "--data", tmp_path, "--images", 0)
    assert "--images: got 0, expected a whole number >= 1" in capsys.readouterr().err
    with pytest.raises(SystemExit, match=r"PolyU-even: got no files \*_real.JPG"):
        call(monkeypatch, "--data", tmp_path, "--out", tmp_path / "out", "--only", "cameras")
