"""How the presets ``balanced`` and ``best`` of `nlflow.denoise` were chosen.

Each choice is varied on its own about the preset, on central crops of photographs (BSD68, every second image, and
Kodak, grey; Kodak in colour) and, for signals, on the demonstration signals of PyWavelets. A value is taken when it
gains at most noise levels for its time. What results are quoted on (Set12, scikit-image's camera, PyWavelets' ecg) is
not looked at here. White Gaussian noise, ``default_rng(0)`` for each image, not clipped; signals have variance 1.

    python -m benchmarks.tune_groups --data DIR [--quality best] [--kind grey] [--quick] [--out tune_groups.json]

DIR holds the folders BSD68-even and Kodak24. With ``--quick`` there are fewer and smaller crops.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from benchmarks.tune_denoise import COLOUR, GREY, SIGNAL, decibel, load, noisy
from nlflow import denoise
from nlflow.denoising.groupwise import PRESETS, Grouping, GroupPreset

LEVELS = {GREY: (15, 25, 50), COLOUR: (15, 25, 50), SIGNAL: (0.1, 0.3, 0.5)}
# Fields of the preset, and the values that each is tried at.
FLOW: dict[str, tuple[float, ...]] = {
    "steps": (2, 3, 4, 6, 8),
    "shrink": (1.2, 1.4, 1.6),
    "leave": (0.6, 0.75, 0.9),
    "factor": (0.7, 0.8, 0.9),
    "search_every": (1, 2),
}
# Fields of the groupings, as factors on the value (sizes) or as what is added (patch, stride).
GROUPING: dict[str, tuple[float, ...]] = {
    "neighbours": (0.7, 0.85, 1.2, 1.5),
    "radius": (0.75, 1.3),
    "patch": (-1, 1),
    "stride": (-1, 1),
}


def changed(grouping: Grouping, name: str, value: float) -> Grouping:
    old = getattr(grouping, name)
    if name in ("neighbours", "radius"):
        return replace(grouping, **{name: round(old * value)})
    scale = 4 if grouping.patch > 10 and name == "patch" else 1  # windows of signals are long
    return replace(grouping, **{name: max(old + int(value) * scale, 1)})


def variants(preset: GroupPreset, kind: str) -> Iterator[tuple[str, Any, GroupPreset]]:
    """Yield each choice: its name, its value and the preset with it."""
    yield "the preset", "", preset
    for name, values in FLOW.items():
        for value in values:
            if value != getattr(preset, name):
                yield name, value, replace(preset, **{name: value})
    stages = ("first_signal", "later_signal") if kind == SIGNAL else ("first", "later")
    for stage in stages:
        for name, values in GROUPING.items():
            for value in values:
                old = getattr(preset, stage)
                new: Any = (
                    changed(old, name, value)
                    if isinstance(old, Grouping)
                    else tuple((limit, changed(g, name, value)) for limit, g in old)
                )
                yield (
                    f"{stage} {name}",
                    f"{value:+g}" if name in ("patch", "stride") else f"x{value:g}",
                    replace(preset, **{stage: new}),
                )


def main() -> None:
    parser = argparse.ArgumentParser(description="How the presets of nlflow.denoise were chosen.")
    parser.add_argument("--data", type=Path, required=True, help="folder with BSD68-even/ and Kodak24/")
    parser.add_argument("--quality", choices=sorted(PRESETS), default="balanced")
    parser.add_argument("--kind", choices=(GREY, COLOUR, SIGNAL), default=GREY)
    parser.add_argument("--quick", action="store_true", help="fewer and smaller crops")
    parser.add_argument("--out", type=Path, default=Path("tune_groups.json"), help="where the JSON goes")
    arguments = parser.parse_args()
    kind, quality = arguments.kind, arguments.quality
    material = load(arguments.data, arguments.quick)[kind]
    axis = -1 if kind == COLOUR else None
    preset, rows, base = PRESETS[quality], [], None
    unchanged = {f.name: getattr(preset, f.name) for f in fields(preset)}
    print(f"{quality}, {kind}: decibel at {LEVELS[kind]}, then what the choice gains, and its time", flush=True)
    for name, value, variant in tqdm(list(variants(preset, kind)), disable=None):
        PRESETS[quality] = variant
        begun, scores = time.perf_counter(), []
        for sigma in LEVELS[kind]:
            results = (
                denoise(noisy(c, sigma).astype(np.float32), sigma, quality=quality, channel_axis=axis) for c in material
            )
            scores.append(float(np.mean([decibel(r, c) for r, c in zip(results, material, strict=True)])))
        seconds = time.perf_counter() - begun
        base = base or (scores, seconds)
        gains = [s - b for s, b in zip(scores, base[0], strict=True)]
        rows.append({"choice": name, "value": value, "decibel": scores, "gain": gains, "time": seconds / base[1]})
        shown = "  ".join(f"{s:+.3f}" for s in (gains if name != "the preset" else scores))
        print(f"{name:24}{value!s:>8}  {shown}  x{seconds / base[1]:.2f}", flush=True)
    PRESETS[quality] = preset
    about = {"quality": quality, "kind": kind, "quick": arguments.quick, "levels": LEVELS[kind], "rows": rows}
    about["preset"] = {name: repr(value) for name, value in unchanged.items()}
    arguments.out.write_text(json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    main()
