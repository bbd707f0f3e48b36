"""The numerical tests under other processors: ``python -m validation.robustness.processors``, or `make portable`."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from nlflow.store.atomic import locked, make_folder
from nlflow.studies.cases import Case
from validation.robustness import ROOT
from validation.robustness.contract import Row, campaign_table, run_trials
from validation.robustness.processors.settings import SETTINGS, SHORT, Setting, lacking

# What once depended on the processor, and what everything else is made of; the whole is `make portable`.
SENSITIVE = (
    "tests/denoising/test_denoise_presets.py::test_a_pure_tone_far_above_the_noise_stays_whole",
    "tests/denoising/test_denoising.py::test_a_signal_may_run_backwards",
    "tests/denoising/test_denoising_groups.py::test_rounding_decides_no_tie",
    # Weights that are computed anew are the same.
    "tests/affinities/test_affinities_patches.py::test_exponential[float64-5e-15-True]",
    "tests/affinities/test_affinities_patches.py::test_exponential[float32-4e-07-True]",
    "tests/affinities/test_chebyshev.py",
)
RATIO = 1.1  # largest error in single precision over that in double precision
SPREAD = 0.005  # dB between any two processors


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit status: 1 if a test failed or a figure is out of its bound."""
    parser = argparse.ArgumentParser(prog="python -m validation.robustness.processors", description=__doc__)
    add = parser.add_argument
    add("--short", action="store_true", help="two processors and the most sensitive tests alone")
    add("--only", default="", help="settings whose names hold this text")
    add("--draws", type=int, default=0, help="figures of 20 signals, of so many draws of the noise (%(default)s)")
    add("--data", type=Path, help="a folder with Set12: figures of its images")
    add("--figures", action="store_true", help="the figures alone, no tests")
    add("--jobs", type=int, default=2, help="settings at a time (%(default)s)")
    add("--out", type=Path, default=Path("portable-output"), help="folder for the table (%(default)s)")
    args = parser.parse_args(arguments)
    if args.data is not None and not (args.data / "Set12").is_dir():
        parser.error(f"--data: {args.data} has no folder Set12")
    if args.draws < 0 or args.jobs < 1:
        parser.error("--draws: expected >= 0, --jobs: expected > 0")
    settings = [s for s in (SHORT if args.short else SETTINGS) if args.only.lower() in s.name.lower()]
    if not settings:
        parser.error(f"--only: no setting has {args.only!r} in its name")
    trials: list[Case] = []
    figures: dict[str, Any] = {}
    for setting in settings:
        if lack := lacking(setting):
            tqdm.write(f"not run: {setting.name}: this machine has no {', '.join(lack)}")
            continue
        if not args.figures:
            trials.append(Case(setting.name, tested, (setting, args.short)))
        if args.draws or args.data:
            trials.append(Case(f"figures, {setting.name}", measured, (setting, args.draws, args.data, figures)))
    if not trials:
        print("nothing was run: this machine can play none of these processors")
        return 1
    names = [trial.name for trial in trials]
    table = campaign_table(args.out, "processors", "Other processors, played on this machine", "make portable",
                           order=lambda entry: [*names, entry.key].index(entry.key))  # fmt: skip
    with locked(make_folder(args.out), "--out"):
        run_trials(trials, table, jobs=args.jobs, threads=True)
        run_trials([Case(name, dict.get, (rows, name)) for rows in [compared(figures)] for name in rows], table)
    print(f"table: {table.path.with_suffix('.md')}")
    return 0 if all(entry.row.good for entry in table.entries) else 1


def tested(setting: Setting, short: bool) -> Row:
    """Return the row of the numerical tests under a setting."""
    begun = time.monotonic()
    effect = json.loads(_run(setting, ["-m", "validation.robustness.processors.figures"]).stdout)["in effect"]
    which = ["-m", "not slow", *SENSITIVE] if short else ["-m", "numerical and not slow"]
    with tempfile.TemporaryDirectory(prefix="nlflow-processors-") as folder:
        report = Path(folder) / "tests.xml"
        words = ["-m", "pytest", "-q", "-n", "0", "--no-cov", "-p", "no:cacheprovider", f"--junitxml={report}"]
        ended = _run(setting, [*words, *which], allowed=(0, 1))
        outcomes, failed = _read(report)
    failed += setting.missed(effect)
    if ended.returncode == 1 and not failed:
        failed = ["pytest ended with 1"]
    plays = f"Numba {effect['numba']}, OpenBLAS {' '.join(effect['blas'])}, torch {effect['torch']}"
    return Row(f"{setting.name} ({plays})", sum(outcomes.values()), outcomes, 0, len(failed), time.monotonic() - begun,
               {"in effect": effect, "failed": failed})  # fmt: skip


def _read(report: Path) -> tuple[dict[str, int], list[str]]:
    """Return how tests ended, and which failed, from pytest's report."""
    outcomes: Counter[str] = Counter()
    failed = []
    for case in ET.parse(report).getroot().iter("testcase"):
        kind = next((child.tag for child in case if child.tag in ("failure", "error", "skipped")), "passed")
        outcomes["failed" if kind in ("failure", "error") else kind] += 1
        if kind in ("failure", "error"):
            failed.append(f"{case.get('classname')}::{case.get('name')}")
    return dict(outcomes), failed  # to dataclasses.asdict a Counter is no mapping


def measured(setting: Setting, draws: int, data: Path | None, figures: dict[str, Any]) -> Row:
    """Return the row of the figures under a setting, which are left in `figures`."""
    begun = time.monotonic()
    options = ["--draws", str(draws)] + ([] if data is None else ["--data", str(data.resolve())])
    found = json.loads(_run(setting, ["-m", "validation.robustness.processors.figures", *options]).stdout)
    figures[setting.name] = found
    failed = setting.missed(found["in effect"])
    ratios = {name: worst["single"] / worst["double"] for name, worst in found.get("signals", {}).items()}
    failed += [f"{name}: single over double precision {ratio:.3g}" for name, ratio in ratios.items() if ratio > RATIO]
    outcomes = {"signals and images": len(ratios) + len(found.get("images", {}))}
    details = {**found, "failed": failed, "draws": draws, "largest ratio": max(ratios.values(), default=None)}
    worst = f", errors of single over double precision at most {max(ratios.values()):.3f}" if ratios else ""
    return Row(f"{setting.name}: {draws} draws{worst}", sum(outcomes.values()), outcomes, 0, len(failed),
               time.monotonic() - begun, details)  # fmt: skip


def compared(figures: Mapping[str, Any]) -> dict[str, Row]:
    """Return a row of how far the images of all settings are apart; none for fewer than two settings."""
    tables = [found["images"] for found in figures.values() if found.get("images")]
    if len(tables) < 2:
        return {}
    spread = {name: max(t[name] for t in tables) - min(t[name] for t in tables) for name in tables[0]}
    apart = [f"{name}: {value:.4f} dB" for name, value in spread.items() if value > SPREAD]
    text = f"images under {len(tables)} processors: PSNR apart by at most {max(spread.values()):.5f} dB"
    return {"spread": Row(text, len(spread), {"images": len(spread)}, 0, len(apart), 0.0, {"failed": apart})}


def _run(setting: Setting, words: list[str], allowed: tuple[int, ...] = (0,)) -> subprocess.CompletedProcess[str]:
    """Run this interpreter under a setting; what ends otherwise than allowed is an error that shows its last lines."""
    ended = subprocess.run(
        [sys.executable, *words], env=setting.environment(), cwd=ROOT, capture_output=True, text=True, check=False
    )
    if ended.returncode not in allowed:
        last = "\n".join((ended.stdout + ended.stderr).splitlines()[-30:])
        raise SystemExit(f"{setting.name}: {' '.join(words[:3])} ended with {ended.returncode}\n{last}")
    return ended


if __name__ == "__main__":
    sys.exit(main())
