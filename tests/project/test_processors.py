"""Other processors: which a machine can play, what is compared, and the short form of `make portable`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from validation.robustness.contract import campaign_table
from validation.robustness.processors import __main__ as portable
from validation.robustness.processors.figures import SIGNALS, demonstration
from validation.robustness.processors.settings import SETTINGS, SHORT, Setting, in_effect, lacking


def test_each_setting_changes_what_it_names_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUMBA_CPU_NAME", "another")
    names = ("NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES", "OPENBLAS_CORETYPE", "ATEN_CPU_CAPABILITY", "OMP_NUM_THREADS")
    for setting in (*SETTINGS, *SHORT):
        found = {name: setting.environment().get(name) for name in names}
        plain = "" if setting.numba == "x86-64" else None
        expected = (setting.numba or None, plain, setting.blas or None, setting.torch or None, str(setting.threads))
        assert tuple(found.values()) == expected


def test_what_is_not_in_effect_is_told() -> None:
    effect = in_effect()
    assert Setting("this one").missed(effect) == []
    other = Setting("another", numba="pentium4", blas="Prescott", torch="avx9")
    assert len(other.missed(effect)) == 2 + len(effect["blas"])
    assert Setting("Zen", blas="Zen").missed({**effect, "blas": ["Haswell"]}) == []


def test_settings_that_a_machine_cannot_run_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    alien = Setting("of tomorrow", needs=("avx1024",))
    assert lacking(alien) == ["avx1024"]
    monkeypatch.setattr(portable, "SETTINGS", (alien,))
    assert portable.main(["--out", str(tmp_path)]) == 1  # nothing was run, so nothing is known
    assert "not run: of tomorrow: this machine has no avx1024" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["--only", "no such"], ["--data", "nowhere"], ["--draws", "-1"], ["--jobs", "0"]])
def test_wrong_words_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        portable.main(words)
    assert words[0] in capsys.readouterr().err


def test_images_of_two_settings_are_compared() -> None:
    figures = {name: {"images": {"01, fast": value, "02, fast": 31.0}} for name, value in (("a", 30), ("b", 30.004))}
    assert portable.compared(figures)["spread"].good
    figures["c"] = {"images": {"01, fast": 30.006, "02, fast": 31.0}}
    assert portable.compared(figures)["spread"].details["failed"] == ["01, fast: 0.0060 dB"]
    assert portable.compared({"a": figures["a"]}) == {}


def test_signals_of_the_figures() -> None:
    lengths = {name: len(demonstration(name)) for name in SIGNALS}
    assert len(lengths) == 20
    assert set(lengths.values()) == {512, 1024}
    assert all(np.isrealobj(demonstration(name)) for name in SIGNALS)


@pytest.mark.slow
@pytest.mark.parametrize("setting", [pytest.param(s, id=s.name) for s in SHORT])
def test_the_most_sensitive_tests_pass_under_other_processors(setting: Setting, tmp_path: Path) -> None:
    """The short form of `make portable`."""
    if lack := lacking(setting):
        pytest.skip(f"this machine has no {', '.join(lack)}")
    status = portable.main(["--short", "--only", setting.name, "--out", str(tmp_path)])
    table = campaign_table(tmp_path, "processors")
    table.load()
    (entry,) = table.entries
    assert entry.row.details["failed"] == []
    assert status == 0
    assert sum(entry.row.outcomes.values()) == entry.row.tried
