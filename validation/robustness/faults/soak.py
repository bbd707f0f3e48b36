"""Many calls of all kinds in one process: ``python -m validation.robustness.faults.soak CALLS FOLDER``.

Prints what the process holds, memory, open files and threads, again and again while it makes the calls, as JSON.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil

import nlflow as nl
from validation.robustness.contract import Row
from validation.robustness.faults.processes import LIMIT, Running, Tally, tell_tale
from validation.robustness.faults.program import program

__all__ = ["endured"]

MOST = 20.0  # MiB by which memory may grow
LOOKS = 100  # at what is held, over all calls; the first tenth fills caches


def _pictures(rng: np.random.Generator, folder: Path) -> None:
    colour = rng.random() < 0.15
    shape = (*(int(side) for side in rng.integers(12, 24, 2)), *([3] if colour else []))
    image = np.cumsum(rng.normal(size=shape), 0) + rng.normal(size=shape)
    if rng.random() < 0.2:
        image[4:6, 3:9] = np.nan
    if rng.random() < 0.3:
        image = image.astype(np.float32)
    words: dict[str, Any] = {"channel_axis": -1} if colour else {}
    quality = str(rng.choice(["fast", "balanced", "pixels"], p=[0.48, 0.04, 0.48]))
    nl.denoise(image, None if rng.random() < 0.1 else 1.0, quality=quality, **words)


def _signals(rng: np.random.Generator, folder: Path) -> None:
    signal = rng.poisson(20 + 10 * np.sin(np.linspace(0, 9, 120))).astype(float)
    draw = rng.random()
    if draw < 0.1:
        nl.denoise(signal, return_info=True)
    elif draw < 0.4:
        nl.denoise(signal, noise="poisson")
    else:
        nl.denoise(signal, 4.0, quality="fast")


def _tensors(rng: np.random.Generator, folder: Path) -> None:
    import torch

    image = torch.from_numpy(rng.normal(size=(1, 20, 20))).requires_grad_()
    nl.denoise(image, sigma=1.0, quality="fast", channel_axis=0).sum().backward()


def _flows(rng: np.random.Generator, folder: Path) -> None:
    signal = rng.normal(size=(60, 2))
    domain = nl.Grid(60) if rng.random() < 0.5 else nl.Points(np.sort(rng.uniform(0, 60, 60)))
    energy = nl.E(nl.affinity(nl.Gaussian(2.0), domain, signal), signal, 0.3, measure="degree")
    integrators = [nl.ExplicitEuler(0.1), nl.SemiImplicit(0.5), nl.RungeKutta(1e-6, 1e-8), nl.Exponential()]
    integrator: Any = integrators[int(rng.integers(4))]
    trackers: list[Any] = [nl.Energy()]
    with tempfile.TemporaryDirectory(dir=folder) as place:
        if rng.random() < 0.2:
            trackers.append(nl.Checkpoint(Path(place) / "checkpoint", seconds=0))
        solution = nl.solve(nl.GradientFlow(energy, "degree"), signal, t=1.0, integrator=integrator, trackers=trackers)
        solution.save(Path(place) / "solution.npz")


def _chains(rng: np.random.Generator, folder: Path) -> None:
    points = rng.normal(size=(40, 2))
    chain = nl.MarkovChain(nl.affinity(nl.Gaussian(1.0), nl.Points(points)))
    chain.expectation(points, 5)
    chain.limit(points)


def _labels(rng: np.random.Generator, folder: Path) -> None:
    from nlflow import learning

    points = np.concatenate([rng.normal(-1, 1, (12, 2)), rng.normal(1, 1, (12, 2))])
    labels = np.repeat([0, 1], 12)
    labels[2:-2] = -1
    kinds: list[Any] = [learning.LabelSpreading, learning.HarmonicClassifier, learning.PoissonClassifier]
    kinds[int(rng.choice(3, p=[0.6, 0.35, 0.05]))]("rbf", gamma=1.0).fit(points, labels).predict(points)
    learning.DiffusionMap(2).fit_transform(points)


def _layers(rng: np.random.Generator, folder: Path) -> None:
    import torch
    from transformers import BertConfig, BertModel

    from nlflow.attention import attach, detach, load_terms, probe, save_terms

    config = BertConfig(hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=32, vocab_size=50)
    model = attach(BertModel(config), fidelity=0.6, learned=True)
    words = torch.from_numpy(rng.integers(0, 50, (1, 12)))
    model(words)
    if rng.random() < 0.2:
        save_terms(model, folder / "terms")
        load_terms(BertModel(config), folder / "terms")
    detach(model)
    if rng.random() < 0.2:
        probe(model, words)


def _refused(rng: np.random.Generator, folder: Path) -> None:
    calls: list[Callable[[], Any]] = [
        lambda: nl.denoise(np.array([["a"]])),
        lambda: nl.denoise(np.zeros((8, 8)), sigma=-1.0),
        lambda: nl.affinity(nl.Gaussian(1.0), nl.Points(np.full((3, 2), np.nan))),
        lambda: nl.solve(nl.GradientFlow(nl.J(nl.affinity(nl.Gaussian(1.0), nl.Grid(9)))), np.zeros(4), t=1.0),
    ]
    try:
        calls[int(rng.integers(len(calls)))]()
    except nl.InputError:
        return
    raise AssertionError("bad input was taken")


KINDS: dict[Callable[[np.random.Generator, Path], None], float] = {
    _pictures: 0.2, _signals: 0.1, _tensors: 0.1, _flows: 0.25, _chains: 0.1, _labels: 0.1, _layers: 0.05, _refused: 0.1
}  # fmt: skip


def main(calls: str, folder: str) -> int:
    """Make the calls, and return the exit status."""
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    rng, number, here = np.random.default_rng(11), int(calls), psutil.Process()
    kinds, weights = list(KINDS), list(KINDS.values())
    for kind in kinds:  # each once, whatever the draw
        kind(rng, Path(folder))
    for done in range(1, number + 1):
        kinds[int(rng.choice(len(kinds), p=weights))](rng, Path(folder))
        if done % max(1, number // LOOKS) == 0:
            gc.collect()
            held = here.memory_info().rss / 2**20, here.num_fds(), here.num_threads()
            print(json.dumps([done, *held]), flush=True)
    return 0


def endured(calls: int, folder: Path) -> Row:
    """Make so many calls in one process; memory, open files and threads are not to grow."""
    tally = Tally("calls of all kinds in one process", folder)
    (folder / "work").mkdir(parents=True)
    command = [sys.executable, "-m", "validation.robustness.faults.soak", str(calls), str(folder / "work")]
    ended = Running(command).end(LIMIT + calls)
    trouble = tell_tale(ended, (0,))
    if trouble is not None:
        tally.note(trouble)
        return tally.row(calls)
    return judged(ended.text, calls, tally)


def judged(text: str, calls: int, tally: Tally) -> Row:
    """Return the row of what the program has printed."""
    looks = [json.loads(line) for line in text.splitlines() if line.startswith("[")]
    grown = growth(looks)
    for name, (before, after), most in zip(("memory", "open files", "threads"), grown, (MOST, 0, 0), strict=True):
        if after - before > most:
            tally.note(f"{name} grew from {before:.1f} to {after:.1f}")
    tally.outcomes["held no more memory, files and threads than before"] += calls * (not tally.wrong)
    megabytes, files, threads = grown
    return tally.row(calls, MiB=megabytes, files=files, threads=threads, looks=looks)


def growth(looks: Sequence[Sequence[float]]) -> list[tuple[float, float]]:
    """Return the medians of what was held in the second and in the last tenth of the looks."""
    tenth = max(1, len(looks) // 10)
    columns = list(zip(*looks, strict=True))[1:]
    return [(statistics.median(one[tenth : 2 * tenth]), statistics.median(one[-tenth:])) for one in columns]


if __name__ == "__main__":
    program(main)
