"""What a page about a model that others trained costs, and what `explain` costs beside a plain run of the model.

``--data DIR`` has for each model of the table a folder NAME with ``model``, which transformers reads, and ``data``,
which the command takes (a file of texts, pictures by class, or sounds). The page is written there as ``page.html``.
The part ``words`` sweeps the word errors of Whisper, in minutes.
"""

from __future__ import annotations

import resource
import statistics
import subprocess
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import Row, timed
from nlflow.errors import InputError

MODELS: dict[str, tuple[str, str, list[str]]] = {
    "minilm": ("all-MiniLM-L6-v2, 60 pairs of passages", "--texts", ["--items", "60"]),
    "antiberty": ("AntiBERTy, antibodies", "--texts", ["--items", "24"]),
    "rxnfp": ("BERT of reactions, 24 reactions", "--texts", ["--items", "24"]),
    "albert": ("ALBERT of reactions, 24 reactions", "--texts", ["--items", "24"]),
    "dinov2": ("DINOv2 ViT-S/14, 150 pictures at 98 x 98", "--images",
               ["--items", "150", "--size", "98", "--metric", "linear"]),
    "whisper": ("Whisper tiny.en, 12 sounds", "--sounds", ["--items", "12"]),
}  # fmt: skip
_SECONDS = 20  # of the sweep
_TURNS = {"whisper": 3}
_INPUTS = 8  # of `explain`, as many as a report takes
_WORDS = {"temperature": [0.8], "semi-implicit": [0.4]}
PARTS = (*MODELS, "words")


def run(only: Sequence[str] = PARTS, data: Path | None = None) -> list[Row]:
    """Return two rows for each model that is there, and one for each setting of the word errors."""
    if data is None or not any((data / name / "model").exists() for name in MODELS):
        raise InputError(f"--data: got {data}, expected a folder with NAME/model and NAME/data for {', '.join(MODELS)}")
    rows = []
    if "words" in only and (data / "whisper" / "model").exists():
        rows += _words(data / "whisper")
    for name in (name for name in MODELS if name in only and (data / name / "model").exists()):
        about, option, more = MODELS[name]
        spent = _page(data / name, ["--name", about.split(",")[0], option, str(_data(data / name)), *more])
        rows.append(Row.of("trained", f"{about}: page, CPU seconds", "none", f"{spent:.0f} s", spent,
                           most=180, unit=" s"))  # fmt: skip
        plain, why = _explained(name, data / name)
        rows.append(Row.of("trained", f"{about}: explain beside a plain run", f"{plain:.2f} s",
                           f"{why * plain:.2f} s", why, most=3))  # fmt: skip
    return rows


def _data(folder: Path) -> Path:
    return next(path for path in sorted(folder.iterdir()) if path.stem == "data")


def _page(folder: Path, options: list[str]) -> float:
    """Write the page of a model in a process of its own, and return the CPU seconds of all its threads."""
    command = [str(Path(sys.executable).with_name("nonlocal")), "attention", str(folder / "model"), *options,
               "--seconds", str(_SECONDS), "--report", str(folder / "page.html"), "--quiet"]  # fmt: skip
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def _measured(name: str, folder: Path, items: int, **more: Any) -> Any:
    from nlflow.desk.commands.attention_data import measured

    given = {MODELS[name][1].removeprefix("--"): _data(folder)}
    usual: dict[str, Any] = {"texts": None, "images": None, "sounds": None, "metric": "auto", "words": 48, "size": None}
    return measured(str(folder / "model"), items=items, **{**usual, **given, **more})


def _words(folder: Path) -> list[Row]:
    """Sweep the word errors of 12 sounds: a row for each setting, with the interval of its gain."""
    from nlflow.attention import sweep
    from nlflow.backends.threads import one_torch_thread

    found = _measured("whisper", folder, 12, metric="words")
    with one_torch_thread():
        swept = sweep(found.network, found.task, cures=_WORDS)
    rows = []
    for row in swept.rows:
        setting = f"{row['cure']} {row['value']:g}, {row['layers']}: gain {row['low']:+.2g} to {row['high']:+.2g}"
        rows.append(Row.of("trained", f"Whisper tiny.en, {swept.items} sounds, word error rate, {setting}",
                           f"{swept.stock:.3f}", f"{row['metric']:.3f}", row["gain"]))  # fmt: skip
    return rows


def _explained(name: str, folder: Path) -> tuple[float, float]:
    """Return the CPU seconds of a plain run, and the ratio of `explain` and that: medians, in turns."""
    import torch

    from nlflow.attention import explain
    from nlflow.attention.injection.everyday import gathered
    from nlflow.backends.threads import one_torch_thread

    found = _measured(name, folder, 24, **({"metric": "linear", "size": 98} if name == "dinov2" else {}))
    batches = gathered(found.inputs[:_INPUTS])

    def plain() -> None:
        for one in batches:
            found.network(**one)

    with one_torch_thread(), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of one input alone, where a batch is one
        times = [(timed(plain)[1], timed(explain, found.network, batches)[1]) for _ in range(1 + _TURNS.get(name, 7))]
    each = times[1:]
    return statistics.median(one for one, _ in each), statistics.median(why / one for one, why in each)
