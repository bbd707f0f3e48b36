"""What must be reached, as numbers, and the verdicts on what was measured."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.denoising.methods import BM3D, BY_CHANNEL, ESTIMATED, NLM_6, NLM_10, QUALITIES, WAVELETS
from benchmarks.harness import Row

Record = dict[str, Any]

# Quality, in decibels above the best of the peers, for each sigma: preset, peers, sets, gain.
QUALITY_TARGETS = (
    ("fast", (NLM_6, NLM_10), ("Set12", "BSD68-even"), 0.3),
    ("balanced", (BM3D,), ("Set12", "BSD68-even"), -0.10),
    ("best", (BM3D,), ("Set12", "BSD68-even"), 0.15),
    ("best", (BM3D,), ("Kodak24",), -0.1),
    ("balanced", (BY_CHANNEL.format("balanced"),), ("Kodak24",), 0.5),
    ("fast", (BY_CHANNEL.format("fast"),), ("Kodak24",), 0.5),
)
# Seconds on one thread, as a multiple of the peer's.
TIME_TARGETS = (("fast", NLM_10, 1.0), ("fast", NLM_6, None), ("balanced", BM3D, 0.25), ("best", BM3D, 1.5))
MEMORY_TARGET = 1.5  # kB a pixel, every preset
UNKNOWN_TARGET = 0.15  # decibels that may be lost when sigma is estimated
FLOOR_TARGET = 0.02  # decibels that best may be below balanced on any image
# Means over Set12 published for the kin of `best` (arXiv 2212.00422), not measured here.
PUBLISHED = {
    "WNNM": {15.0: 32.70, 25.0: 30.26, 50.0: 27.05},
    "LIChI": {15.0: 32.71, 25.0: 30.24, 50.0: 26.81},
    "NL-Ridge": {15.0: 32.46, 25.0: 30.00, 50.0: 26.73},
    "BM3D": {15.0: 32.37, 25.0: 29.97, 50.0: 26.72},
}
PUBLISHED_ROUNDING = 0.005  # of means with two decimals
WINS_TARGET = 5  # demonstration signals on which a preset must not be below tuned wavelets


@dataclass
class Results:
    """What was measured: scores by set, seconds by threads and method, bytes a pixel by method."""

    data: Path
    quick: bool = False
    records: dict[str, list[Record]] = field(default_factory=dict)
    times: dict[int, dict[str, float]] = field(default_factory=dict)
    memory: dict[str, float] = field(default_factory=dict)
    earlier: dict[str, Any] = field(default_factory=dict)  # machine and versions of a report that is brought up to date

    def replace(self, name: str, found: Iterable[Record]) -> None:
        """Put records of a set in the place of those of the same method, image and noise level, and keep the others."""
        keys = ("method", "image", "sigma")
        kept = {tuple(r[key] for key in keys): r for r in self.records.get(name, [])}
        self.records[name] = list((kept | {tuple(r[key] for key in keys): r for r in found}).values())


def mean(records: Iterable[Record], method: str, sigma: float, score: str = "psnr") -> float | None:
    """Return the mean score of a method at a noise level, None if it has none."""
    values = [r[score] for r in records if r["method"] == method and r["sigma"] == sigma]
    return statistics.fmean(values) if values else None


def sigmas(records: Iterable[Record]) -> list[float]:
    return sorted({r["sigma"] for r in records})


row = partial(Row.of, "denoising")


def quality_rows(records: dict[str, list[Record]]) -> list[Row]:
    """Hold the presets against the peers on the sets of images."""
    found = []
    for preset, peers, sets, gain in QUALITY_TARGETS:
        for name in sets:
            for sigma in sigmas(records.get(name, [])):
                ours = mean(records[name], preset, sigma)
                scores = {p: value for p in peers if (value := mean(records[name], p, sigma)) is not None}
                if ours is None or not scores:
                    continue
                best = max(scores, key=lambda p: scores[p])
                difference = ours - scores[best]
                work = f"{preset}: PSNR on {name}, sigma {sigma:g}, gain in dB over {best}"
                found.append(row(work, f"{scores[best]:.2f} dB", f"{ours:.2f} dB", difference, least=gain))
    return found


def floor_rows(records: dict[str, list[Record]]) -> list[Row]:
    """Hold best against balanced on each image, and its mean on Set12 against the published one of WNNM."""
    found = []
    for name in dict.fromkeys(name for target in QUALITY_TARGETS for name in target[2]):
        for sigma in sigmas(records.get(name, [])):
            scores = {(r["method"], r["image"]): r["psnr"] for r in records[name] if r["sigma"] == sigma}
            losses = {
                image: scores["balanced", image] - psnr
                for (method, image), psnr in scores.items()
                if method == "best" and ("balanced", image) in scores
            }
            if losses:
                worst = max(losses, key=lambda image: losses[image])
                work = f"best: largest loss in dB to balanced on an image of {name}, sigma {sigma:g} ({worst})"
                texts = f"{scores['balanced', worst]:.2f} dB", f"{scores['best', worst]:.2f} dB"
                found.append(row(work, *texts, losses[worst], most=FLOOR_TARGET))
    for sigma, published in PUBLISHED["WNNM"].items():
        ours = mean(records.get("Set12", []), "best", sigma)
        if ours is not None:
            work = f"best: PSNR on Set12, sigma {sigma:g}, gain in dB over WNNM as published"
            found.append(
                row(work, f"{published:.2f} dB", f"{ours:.2f} dB", ours - published, least=-PUBLISHED_ROUNDING)
            )
    return found


def unknown_rows(records: list[Record]) -> list[Row]:
    """Hold the result with an estimated sigma against that with the given one."""
    found = []
    for sigma in sigmas(records):
        given, estimated = mean(records, "balanced", sigma), mean(records, ESTIMATED, sigma)
        if given is not None and estimated is not None:
            work = f"balanced: sigma {sigma:g} estimated on Set12, loss in dB to sigma given"
            texts = f"{given:.2f} dB", f"{estimated:.2f} dB"
            found.append(row(work, *texts, given - estimated, most=UNKNOWN_TARGET))
    return found


def tuned(records: list[Record]) -> dict[tuple[str, float], dict[str, float]]:
    """Return, for each signal and level, the SNR of each preset and of each family of peers with its best choice."""
    best: dict[tuple[str, float], dict[str, float]] = {}
    for r in records:
        name = r["method"] if r["method"] in QUALITIES else r["family"]
        scores = best.setdefault((r["image"], r["sigma"]), {})
        scores[name] = max(r["snr"], scores.get(name, -np.inf))
    return best


def wins(scores: dict[tuple[str, float], dict[str, float]], preset: str, peer: str, level: float) -> list[str]:
    """Return the demonstration signals on which a preset is not below a peer."""
    both = {
        name: s for (name, sigma), s in scores.items() if sigma == level and name != "ecg" and {preset, peer} <= set(s)
    }
    return [name for name, s in both.items() if s[preset] >= s[peer]]


def signal_rows(records: list[Record]) -> list[Row]:
    """Hold the presets on groups against wavelets with the choice that is best for each signal and level."""
    found, scores = [], tuned(records)
    for preset in ("balanced", "best"):
        if not any(preset in s for s in scores.values()):
            continue
        for level in sigmas(records):
            if ("ecg", level) in scores:
                ours, peer = (scores["ecg", level][name] for name in (preset, WAVELETS))
                work = f"{preset}: SNR on the ECG, noise {level:g} of its spread, gain in dB over wavelets"
                found.append(row(work, f"{peer:.2f} dB", f"{ours:.2f} dB", ours - peer, least=0))
            won = len(wins(scores, preset, WAVELETS, level))
            count = sum(name != "ecg" and sigma == level for name, sigma in scores)
            work = f"{preset}: demonstration signals not below wavelets, noise {level:g} of their spread"
            found.append(row(work, f"of {count}", str(won), won, least=WINS_TARGET))
    return found


def cost_rows(times: dict[int, dict[str, float]], memory: dict[str, float]) -> list[Row]:
    """Hold seconds and bytes against their targets; what several threads do is stated beside."""
    found = []
    for count, seconds in times.items():
        for preset, peer, limit in TIME_TARGETS:
            if preset in seconds and peer in seconds:
                texts = f"{seconds[peer]:.3g} s", f"{seconds[preset]:.3g} s"
                found.append(
                    row(f"{preset}: time against {peer}, threads: {count}", *texts, seconds[preset] / seconds[peer],
                        most=limit if count == 1 else None)
                )  # fmt: skip
    for preset in QUALITIES:
        if preset in memory:
            work = f"{preset}: peak memory a pixel in kB"
            found.append(row(work, "none", f"{memory[preset]:.0f} B", memory[preset] / 1000, most=MEMORY_TARGET))
    return found


def verdicts(results: Results) -> list[Row]:
    """Return a row for each target for which there are figures."""
    return [
        *quality_rows(results.records),
        *floor_rows(results.records),
        *unknown_rows(results.records.get("unknown", [])),
        *signal_rows(results.records.get("signals", [])),
        *cost_rows(results.times, results.memory),
    ]
