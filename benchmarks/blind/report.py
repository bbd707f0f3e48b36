"""Goals, verdicts, tables and the document."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Final

from benchmarks.blind import methods as by
from benchmarks.blind.runner import Figure, Kept
from benchmarks.blind.scenes import SECTIONS
from benchmarks.denoising.report import about
from benchmarks.harness import Row, keep, listed, table
from validation.tables import markdown

NAME = "real_noise"
BALANCED, BEST = by.BLIND.format("balanced"), by.BLIND.format("best")

# Means over PolyU (100 pairs) as Self2Self's paper reports them: Quan et al., CVPR 2020, doi
# 10.1109/CVPR42600.2020.00196. Here every second pair counts, so that the figures stand beside each other and no more.
PUBLISHED: Final = {"TWSC": 36.10, "CBM3D": 36.98, "Self2Self": 37.52, "CDnCNN": 37.55}


@dataclass(frozen=True)
class Goal:
    """A gain in dB over another method that is to be reached, or none; for each setting, or over all of a section."""

    section: str
    method: str
    over: str
    least: float | None
    each: bool = True


GOALS: Final = (
    Goal("cameras", BALANCED, by.ORACLE, -0.1),
    Goal("cameras", BEST, by.ORACLE, 0.2),
    Goal("cameras", BALANCED, by.OPENCV, None),
    Goal("cameras", BEST, by.OPENCV, 0.8),
    Goal("simulated", BALANCED, by.ORACLE, 0.5, each=False),
    Goal("coloured", by.SPECTRUM, by.BM3D, -0.1),
    Goal("coloured", BALANCED, by.SPECTRUM, -0.3),
    Goal("impulses", BALANCED, by.MEDIAN, 4.0),
    Goal("speckle", BALANCED, by.LOGARITHM, 0.5),
    Goal("speckle", BALANCED, by.UNBIASED, None),
    Goal("white", BALANCED, by.WHITE, -0.03),
)
CLEAN_GOAL: Final = 45.0  # dB, the least of all pictures
TIME_GOAL: Final = 2.5

row = partial(Row.of, "real noise")


def pairs(figures: Sequence[Figure], goal: Goal, setting: str | None) -> list[tuple[float, float]]:
    """Return the figures of both methods on the scenes that both have."""
    found: dict[str, dict[tuple[str, str], float]] = {goal.method: {}, goal.over: {}}
    for f in figures:
        if f.section == goal.section and f.method in found and setting in (None, f.setting) and f.value is not None:
            found[f.method][f.setting, f.picture] = f.value
    ours, other = found[goal.method], found[goal.over]
    return [(ours[place], other[place]) for place in ours if place in other]


def gain_rows(figures: Sequence[Figure]) -> list[Row]:
    """Hold means against each other for each goal."""
    found = []
    for goal in GOALS:
        every = dict.fromkeys(f.setting for f in figures if f.section == goal.section)
        for setting in every if goal.each else [None]:
            both = pairs(figures, goal, setting)
            if both:
                ours, other = (statistics.fmean(values) for values in zip(*both, strict=True))
                where = goal.section if setting in (None, "PolyU-even") else f"{goal.section}, {setting}"
                work = f"{where}: {goal.method}, gain in dB over {goal.over} ({len(both)})"
                found.append(row(work, f"{other:.2f} dB", f"{ours:.2f} dB", ours - other, least=goal.least))
    return found


def clean_rows(figures: Sequence[Figure]) -> list[Row]:
    """Hold the picture that changed most against the goal, for each kind of pictures and quality."""
    found = []
    for setting, method in groups(figures, "clean"):
        least = min(of(figures, "clean", setting, method), key=lambda f: f.value or 0.0)
        work = f"clean, {setting}: {method}, PSNR to the input itself in dB, the least ({least.picture})"
        found.append(row(work, "none", f"{least.value:.2f} dB", least.value or 0.0, least=CLEAN_GOAL))
    return found


def time_rows(figures: Sequence[Figure]) -> list[Row]:
    return [
        row(f"time, {f.setting}: {f.method}", *reversed(f.note.split(" / ")), f.value, most=TIME_GOAL)
        for f in figures
        if f.section == "time" and f.value is not None
    ]


def verdicts(figures: Sequence[Figure]) -> list[Row]:
    return [*gain_rows(figures), *clean_rows(figures), *time_rows(figures)]


def of(figures: Sequence[Figure], section: str, setting: str, method: str) -> list[Figure]:
    where = (section, setting, method)
    return [f for f in figures if (f.section, f.setting, f.method) == where and f.value is not None]


def groups(figures: Sequence[Figure], section: str) -> list[tuple[str, str]]:
    """Return the settings and methods of a section that have figures."""
    return list(dict.fromkeys((f.setting, f.method) for f in figures if f.section == section and f.value is not None))


def cell(section: str, found: Sequence[Figure]) -> str:
    values = [f.value for f in found if f.value is not None]
    if not values:
        return "–"
    if section == "clean":
        finite = [v for v in values if math.isfinite(v)]
        mean = f"{statistics.fmean(finite):.2f}" if finite else "–"
        return f"least {min(values):.2f}, mean {mean}, unchanged {len(values) - len(finite)} of {len(values)}"
    return f"{statistics.fmean(values):.2f}"


def section_table(figures: Sequence[Figure], section: str) -> str:
    """Return means over the pictures of each setting by method, and below why methods are missing."""
    mine = [f for f in figures if f.section == section]
    methods = list(dict.fromkeys(f.method for f in mine))
    lines = []
    for setting in dict.fromkeys(f.setting for f in mine):
        cells = [cell(section, of(mine, section, setting, method)) for method in methods]
        lines.append([setting, len({f.picture for f in mine if f.setting == setting}), *cells])
    reasons = dict.fromkeys(f"- {f.method}: {f.note}" for f in mine if f.value is None)
    return "\n".join([markdown(["", "pictures", *methods], lines), *(["", *reasons] if reasons else [])])


NOTE = """Blind denoising: ours gets the samples of the noisy picture and nothing else. PSNR in dB with peak 255 over
all channels, means over pictures; `default_rng(0)` for each picture. The best white sigma (`balanced`), the width of
OpenCV and the size of the median are chosen for each picture by the truth, which flatters them; they are searched as
if they had one maximum. cameras: pairs of one shot and the mean of many. simulated: the truth is the mean of many shots
too (`benchmarks.blind.simulated_camera` says why). clean: PSNR to the input itself, inf where nothing was changed.
time: medians of calls in turns. Gains are over the scenes that both methods have; their number is in parentheses. The
rules that find the noise were chosen with a look at every fourth pair of PolyU, at the simulated cameras over Kodak24
and at Set12 with coloured noise, so these pictures are not unseen. BM3D is a closed package for non-commercial use,
compared with where the user has installed it."""


def document(figures: Sequence[Figure], limited: bool) -> str:
    """Return all results as Markdown."""
    parts = ["# Blind denoising of real and simulated noise", NOTE]
    if limited:
        parts.append("**Some of these figures are of a trial run on few pictures (`--images`).**")
    parts += ["## Goals", table(verdicts(figures))]
    for section in SECTIONS:
        if any(f.section == section for f in figures):
            parts += [f"## {section}", section_table(figures, section)]
        if section == "cameras":
            listing = ", ".join(f"{name} {value:.2f}" for name, value in PUBLISHED.items())
            parts.append(f"Published means over all of PolyU (Quan et al. 2020): {listing}; the half here differs.")
    parts += ["## Machine and versions", listed(about())]
    return "\n\n".join(parts) + "\n"


def write(kept: Kept, out: Path, limited: bool) -> None:
    """Write real_noise.json and real_noise.md to a folder."""
    figures = kept.figures
    rows = [asdict(r) for r in verdicts(figures)]
    content = {"machine": about(), "limited": limited, "rows": rows, "entries": kept.plain()}
    keep(out, NAME, content, document(figures, limited))
