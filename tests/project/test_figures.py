"""Figures of pages: those that a record has are the record's, and what was missed is listed."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import sources
from nlflow.denoising.frame import Spread
from nlflow.denoising.groupwise import CLIPS, PRESETS, VOLUMES, Groups
from nlflow.denoising.large import denoise_array
from nlflow.denoising.options import Options
from nlflow.denoising.pixelwise import Pixels
from nlflow.denoising.residual import REACH

pytest.importorskip("sphinx", reason="optional")
ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "docs" / "_ext"))

import measured  # noqa: E402  # an extension of the pages

CIFAR = "10000 test pictures of CIFAR-10, 50 principal components, 10 labels a class, Poisson"
SET12 = "PSNR on Set12, sigma 25, gain in dB over BM3D"
BM4D = "T1 96^3, white 10%, balanced"
KEOPS = "Gaussian average of 65536 nodes, d = 2, D = 1, float32, against KeOps"
CAMERAS = "cameras: blind balanced, gain in dB over"
MORSE = "forces of 8192 Morse particles in 2-D, float32, against KeOps"
HEAT = "heat, 2000 nodes: {}, against funm_multiply_krylov, 30 steps"
PLAN, TV = "2000 points in the plane, scaling 0.9:", "7 pictures of Set12, sigma 25: total variation against {}"
FATES = "100000 cells, drift 0"
PHASES = "nonlocal Allen–Cahn on 256 × 256 to t = 10, error below 0.0002: nlflow, RungeKutta, against py-pde, scipy"
DROPS = "nonlocal Cahn–Hilliard on 64 × 64 to t = 30, error below 0.001 at t = 20: nlflow, ETD4RK, against py-pde"
# A page that is read on a forge too, what it says, and where each {} comes from: record, work and column.
HELD: list[tuple[str, str, list[tuple[str, str, str]]]] = [
    ("README.md", "BM3D {} | {}; 512², a fifth of its time",
     [("denoise_quality.json", f"balanced: {SET12}", "peer"), ("denoise_quality.json", f"balanced: {SET12}", "ours")]),
    ("README.md", "{}, {} | {}, {} |",
     [("volumes.json", f"{BM4D}: PSNR less", "peer"), ("volumes.json", f"{BM4D}: time over", "peer"),
      ("volumes.json", f"{BM4D}: PSNR less", "ours"), ("volumes.json", f"{BM4D}: time over", "ours")]),
    ("README.md", "OpenCV NLM {}, white σ {} | {} |",
     [("real_noise.json", f"{CAMERAS} OpenCV", "peer"), ("real_noise.json", f"{CAMERAS} best white", "peer"),
      ("real_noise.json", f"{CAMERAS} OpenCV", "ours")]),
    ("README.md", "KeOps {} | {} |", [("pairwise.json", KEOPS, "peer"), ("pairwise.json", KEOPS, "ours")]),
    ("docs/use/photographs.md", "very many pictures | {} | {} |",
     [("denoise_quality.json", "fast: time against scikit-image NLM, d=10, threads: 1", "ours"),
      ("denoise_quality.json", "fast: PSNR on Set12, sigma 25", "ours")]),
    ("docs/use/photographs.md", "nearly all pictures | {} | {} |",
     [("denoise_quality.json", "balanced: time against BM3D, threads: 1", "ours"),
      ("denoise_quality.json", f"balanced: {SET12}", "ours")]),
    ("docs/use/photographs.md", "get `balanced` | longer | {} |", [("denoise_quality.json", f"best: {SET12}", "ours")]),
    ("docs/comparison.md", "{} | {} (`balanced`), {} (`best`)",
     [("denoise_quality.json", f"balanced: {SET12}", "peer"), ("denoise_quality.json", f"balanced: {SET12}", "ours"),
      ("denoise_quality.json", f"best: {SET12}", "ours")]),
    ("docs/comparison.md", "{}, {} | {}, {} (`balanced`)",
     [("volumes.json", f"{BM4D}: PSNR less", "peer"), ("volumes.json", f"{BM4D}: time over", "peer"),
      ("volumes.json", f"{BM4D}: PSNR less", "ours"), ("volumes.json", f"{BM4D}: time over", "ours")]),
    ("docs/comparison.md", "heat on a graph of 20 000 nodes | {} | {}",
     [("flows.json", "heat semigroup", "peer"), ("flows.json", "heat semigroup", "ours")]),
    ("docs/comparison.md", "{}, {} | {}, {}",
     [("learning.json", f"{CIFAR}: accuracy", "peer"), ("learning.json", f"{CIFAR}: a trial", "peer"),
      ("learning.json", f"{CIFAR}: accuracy", "ours"), ("learning.json", f"{CIFAR}: a trial", "ours")]),
    ("docs/comparison.md", "processor time of one thread | {} | {} |",
     [("particles.json", MORSE, "peer"), ("particles.json", MORSE, "ours")]),
    ("docs/comparison.md", "{} products, {} | {} products, {} | `benchmarks functions`",
     [("functions.json", HEAT.format(what), side) for side in ("peer", "ours")
      for what in ("products to an error of 1e-08", "time")]),
    ("docs/comparison.md", "its sums, `scaling` 0.9 | {} | {} |",
     [("neighbours.json", PLAN, side) for side in ("peer", "ours")]),
    ("docs/comparison.md", "its total variation | {} | {} (`fast`); {} (`balanced`) |",
     [("neighbours.json", TV.format("fast"), "peer"),
      *(("neighbours.json", TV.format(quality), "ours") for quality in ("fast", "balanced"))]),
    ("docs/comparison.md", "`RungeKutta`, error below 2 · 10⁻⁴ | {} | {} |",
     [("pde.json", PHASES, "peer"), ("pde.json", PHASES, "ours")]),
    ("docs/comparison.md", "`ETD4RK`, error below 10⁻³ | {} | {} |",
     [("cahn_hilliard.json", DROPS, "peer"), ("cahn_hilliard.json", DROPS, "ours")]),
    ("docs/comparison.md", "times ten) | {}, 4 · 10⁻⁵ off, its tolerance of 10⁻⁸ not reached | {}, proved to 10⁻¹¹",
     [("fates.json", FATES, "peer"), ("fates.json", FATES, "ours")]),
    ("docs/comparison.md", "in 15 dimensions, memory | {} | {} |",
     [("learning.json", "label spreading, 697526 points in 15 dimensions (a cube", side) for side in ("peer", "ours")]),
]  # fmt: skip


RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def short(text: str) -> str:
    """Return a figure of a record as pages write it: without a peer's name, in as many digits as they have room for."""
    text = re.sub(r"^(BM3D|bm4d|slices|GeomLoss|deepinv|.*:) ", "", text)

    def rounded(found: re.Match[str]) -> str:
        number, unit = float(found[1]), found[2]
        digits = {" s": 0 if number >= 10 else 1, " ms": 0, " ns": 2 if number < 1 else 1}[unit]
        return f"{number:.{digits}f}{unit}" if number >= 1 or unit != " s" else found[0]

    def written(found: re.Match[str]) -> str:
        power = int(found[2])
        return f"{float(found[0]):g}" if power > -4 else f"{found[1]} · 10{str(power).translate(RAISED)}"

    text = re.sub(r"([\d.]+)( s| ms| ns)\b", rounded, text)
    text = re.sub(r"([\d.]+)e(-\d+)", written, text)
    return f"{float(text):.2g}" if re.fullmatch(r"\d*\.\d+", text) else text


@pytest.mark.parametrize(("page", "words", "places"), HELD, ids=lambda value: str(value)[:24])
def test_figures_are_those_of_the_records(page: str, words: str, places: list[tuple[str, str, str]]) -> None:
    told = words.format(*(short(measured.figure(*place)) for place in places)).replace(" a pair |", " |")
    text = (ROOT / page).read_text(encoding="utf-8").replace(" a pair |", " |")
    assert told in text, told


def test_a_fifth_of_the_time() -> None:
    assert 0.15 < float(measured.figure("denoise_quality.json", "balanced: time against BM3D, threads: 1")) < 0.25


def test_what_was_missed_is_listed() -> None:
    """The build writes the page: ``python -m sphinx``, or `measured.write_missed`."""
    assert measured.MISSED.read_text(encoding="utf-8") == measured.missed_page()
    assert "](docs/missed.md)" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_a_figure_that_no_record_has_is_named() -> None:
    with pytest.raises(LookupError, match="0 rows begin with 'nothing'"):
        measured.figure("pairwise.json", "nothing")
    with pytest.raises(LookupError, match=r"\d\d rows begin with 'digits'"):
        measured.figure("learning.json", "digits")


@pytest.mark.slow
def test_a_record_knows_the_sources_that_it_measured() -> None:
    loaded = sources.measured()
    assert {"__init__.py", "denoising/pixelwise.py"} <= set(loaded)
    assert sources.changed(loaded) == []
    assert sources.changed({**loaded, "denoising/pixelwise.py": "", "gone.py": "1"}) == [
        "denoising/pixelwise.py",
        "gone.py",
    ]
    assert "2 have changed since: denoising 1, gone 1." in sources.told({"denoising/pixelwise.py": "", "gone.py": "1"})
    code = b'def f(x):\n    """Text."""\n    return x + 1  # why\n'
    assert sources.digest(code) == sources.digest(b"def f( x ):\n\n    return x+1\n")
    assert sources.digest(code) != sources.digest(code.replace(b"1", b"2"))
    for path in measured.FOLDER.glob("*.json"):
        assert measured.content_of(path.name)["sources"], path.name


def test_halos_are_as_wide_as_is_told() -> None:
    def halo(flow: Any, channels: int = 1, dimension: int = 2, words: dict[str, Any] | None = None) -> int:
        widths = []
        for variance in 1 + np.geomspace(1e-3, 1e4, 60):
            spread = Spread(1.0, variance, channels, np.dtype(np.float32), lambda: np.eye(channels))
            made = Pixels.of(spread, dimension, Options(**words)) if words else Groups.of(flow, spread, dimension)
            widths.append(made.halo[0] if dimension == 3 else made.halo[-1] + (REACH if channels == 1 else 0))
        return max(widths)

    told = re.sub(r"\s+", " ", denoise_array.__doc__ or "")
    pixels = halo(None, words={"steps": 1})
    fast, balanced, best = (halo(PRESETS[quality]) for quality in ("fast", "balanced", "best"))
    assert f"at most {pixels} samples wide for ``pixels`` and one step, {fast} for ``fast``" in told
    assert f"{balanced} for ``balanced`` and {best} for ``best``" in told
    assert f"({pixels - halo(None, 3, words={'steps': 1})} less in colours" in told
    assert balanced - halo(PRESETS["balanced"], 3) == pixels - halo(None, 3, words={"steps": 1})
    volumes, clips = ([halo(flow, dimension=3) for flow in table.values()] for table in (VOLUMES, CLIPS))
    assert "In volumes it is {}, {} and {} along".format(*volumes) in told
    assert "In clips it is {}, {} and {} frames".format(*clips) in told
    stacks = (ROOT / "docs" / "howto" / "stacks.md").read_text(encoding="utf-8")
    assert "{} samples wide for `fast`, {} for `balanced`, {} for `best`".format(*volumes) in stacks
    assert [measured.figure("rates.json", mode, "halo") for mode in ("pixels, radius 8", "fast", "balanced")] == [
        str(width) for width in (pixels, fast, balanced)
    ]
