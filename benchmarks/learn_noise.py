"""Learn how much of what quiet blocks show is noise: draws pictures, fits a small network, tells how good it is.

    python -m benchmarks.learn_noise draw --data DATA --out FOLDER --items 8000 --jobs 2
    python -m benchmarks.learn_noise fit --out FOLDER

The first command writes figures of pictures that `benchmarks.blind.drawn` draws (some 0.2 s each); the second writes
`nlflow/denoising/noise/finding/learned.npz` and prints errors on pictures of photographs that were not learned from.
"""

from __future__ import annotations

import argparse
import math
import os
from concurrent.futures import ProcessPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
from PIL import Image

from benchmarks.blind.drawn import Drawing, Photographs, draw
from nlflow.denoising.noise.finding import evidence, learned, pictures
from nlflow.domains.samples import range_of

_AT_ONCE: Final = 50  # items of a task
HELD_OUT: Final = 5  # each fifth item is of photographs that the others do not see
REAL: Final = 10**6  # numbers from here on are of real cameras
PAIRS: Final = 600  # pieces of them
OFTEN: Final = 8  # a piece of a real camera is learned so many times as often as a drawing
CLEAN: Final = 0.2  # of the measured strength in every band: with less noise than that a picture counts as clean
FLAT: Final = 0.25  # by which the logarithms of the bands of white noise differ at most
LEAST: Final = -3.0  # a logarithm: less noise than 5 % of what is measured is none
DROPPED: Final = {1: 0.05, 3: 0.15}  # of the units, while learning
MILD: Final = 0.5  # the quantile of the noise that is told
WIDTHS: Final = {1: (64, 48), 3: (96, 64)}  # of the layers


def item(number: int, photographs: Photographs) -> dict[str, Any] | None:
    """Return the figures of one picture and what its noise is."""
    return figures(draw(np.random.default_rng([7, number]), photographs))


def figures(drawing: Drawing) -> dict[str, Any] | None:
    """Return the figures of the first shot, and its noise from the second."""
    first = drawing.first.astype(np.float64)
    if min(first.shape[:2]) < evidence.SIDE:
        return None
    found = evidence.look(first)
    if found is None:
        return None
    corners = evidence.places(first.shape[:2])
    seen = evidence.windows(first, corners)
    other = evidence.windows(drawing.second.astype(np.float64), corners)
    apart = (seen - other) / np.sqrt(2)
    planes = (apart @ evidence.planes_of(first.shape[-1]).T).astype(np.float32)
    light = ((seen - seen.min()) / range_of(seen)).mean(-1).astype(np.float32)
    levels = evidence.blocks_of(light, 8).mean(axis=(1, 2))
    high = evidence.squares_of(evidence.blocks_of(planes[..., 0], 8))[:, evidence.radius(8) > 0.3].mean(axis=1)
    edges = (found.intensities[1:] + found.intensities[:-1]) / 2
    which = np.searchsorted(edges, levels)
    strengths = [float(high[which == k].mean()) if (which == k).any() else 0.0 for k in range(len(found.intensities))]
    padded = evidence.CLASSES - len(strengths)
    return {
        "kind": drawing.kind, "features": found.features.astype(np.float32),
        "measured": found.powers.astype(np.float32),
        "true": _powers(planes).astype(np.float32),
        "strengths": np.pad(found.strengths, (0, padded)).astype(np.float32),
        "strengths_true": np.pad(strengths, (0, padded)).astype(np.float32),
        "channels": np.resize(apart.std(axis=(0, 1, 2)), 3).astype(np.float32), "pixels": math.prod(first.shape[:2]),
    }  # fmt: skip


def _task(arguments: tuple[int, Path, Path]) -> None:
    start, data, out = arguments
    path = out / f"items_{start:06d}.npz"
    if path.exists():
        return
    held, others = Photographs(data, slice(0, None, HELD_OUT)), Photographs(data)
    others.paths = [p for p in others.paths if p not in held.paths]

    def one_of(number: int) -> dict[str, Any] | None:
        if number >= REAL:
            return figures(pair(number, data))
        return item(number, held if number % HELD_OUT == 0 else others)

    rows: dict[str, list[Any]] = {}
    for number in range(start, start + _AT_ONCE):
        one = one_of(number)
        if one is None:
            continue
        planes = len(one["true"])
        for name, value in (one | {"number": number}).items():
            rows.setdefault(f"{planes}.{name}", []).append(value)
    stem = out / f".{path.name}"
    with stem.open("wb") as stream:
        np.savez_compressed(stream, **{name: np.asarray(values) for name, values in rows.items()})
    stem.replace(path)


def _powers(planes: np.ndarray) -> np.ndarray:
    """Return the mean powers (P, B) of all blocks of windows (N, 32, 32, P)."""
    return evidence.in_bands([evidence.mean_table(planes, size) for size in evidence.SIZES])


def pair(number: int, data: Path) -> Drawing:
    """Return a piece of a shot of a real camera, and what another shot would be that differs by as much noise."""
    rng = np.random.default_rng([8, number])
    paths = sorted((data / "PolyU-even").glob("*_real.JPG"))[::2]
    path = paths[number % len(paths)]
    shot, mean = (
        np.asarray(Image.open(p)).astype(np.float64) for p in (path, Path(str(path).replace("_real", "_mean")))
    )
    size = [int(n) for n in np.exp(rng.uniform(np.log(160), np.log(min(shot.shape[:2])), 2))]
    top, left = (int(rng.integers(0, n - m + 1)) for n, m in zip(shot.shape, size, strict=False))
    place = np.s_[top : top + size[0], left : left + size[1]]
    shot, mean = shot[place], mean[place]
    if number % 4 == 0:
        shot, mean = (v @ np.array([[0.299], [0.587], [0.114]]) for v in (shot, mean))
    # The mean of many has hardly any noise, so that its distance is that of two shots over the root of two.
    return Drawing(shot, shot - np.sqrt(2) * (shot - mean), "camera")


def draw_items(data: Path, out: Path, items: int, jobs: int) -> None:
    out.mkdir(parents=True, exist_ok=True)
    tasks = [(start, data, out) for start in (*range(0, items, _AT_ONCE), *range(REAL, REAL + PAIRS, _AT_ONCE))]
    with ProcessPoolExecutor(jobs) as pool:
        for _ in pool.map(_task, tasks):
            pass


# ---- fitting


def gathered(out: Path, planes: int) -> dict[str, np.ndarray]:
    """Return the figures of all pictures with so many planes."""
    found: dict[str, list[np.ndarray]] = {}
    for path in sorted(out.glob("items_*.npz")):
        with np.load(path, allow_pickle=False) as held:
            for name in held.files:
                if name.startswith(f"{planes}."):
                    found.setdefault(name[2:], []).append(held[name])
    return {name: np.concatenate(parts) for name, parts in found.items()}


def targets(rows: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return what is to be learned, and how much each number matters."""
    measured, true = rows["measured"].astype(np.float64), rows["true"].astype(np.float64)
    reference = measured[:, 0, 1:3].mean(axis=1)
    logs = 0.5 * np.log(np.maximum(true, 1e-16) / measured)
    strength = 0.5 * np.log(np.maximum((true.mean(axis=1) * pictures.areas()).sum(axis=1), 1e-16) / reference)
    share = logs[:, 0].max(axis=1)
    bands = 0.5 * np.log(np.maximum(true[:, 0], 1e-16))
    kind = np.where(share < np.log(CLEAN), 0, np.where(np.ptp(bands, axis=1) < FLAT, 1, 2))
    # A band matters by its part of the noise of its plane.
    weight = (
        np.sqrt(true * pictures.areas() / np.maximum((true * pictures.areas()).sum(axis=2, keepdims=True), 1e-16)) + 0.1
    )
    s, t = rows["strengths"].astype(np.float64), rows["strengths_true"].astype(np.float64)
    there = (s > 0) & (t > 0)
    mean = np.where(there, t, 0).sum(axis=1, keepdims=True) / np.maximum(there.sum(axis=1, keepdims=True), 1)
    a = np.where(there, np.log(np.where(there, s, 1)), 0)
    b = np.where(there, np.log(np.where(there, t, 1) / np.maximum(mean, 1e-30)), 0)
    a, b = (
        np.where(there, v - v.sum(1, keepdims=True) / np.maximum(there.sum(1, keepdims=True), 1), 0) for v in (a, b)
    )
    light = np.clip((a * b).sum(axis=1) / np.maximum((a * a).sum(axis=1), 1e-9), 0, 1)
    return {
        "logs": np.maximum(logs, LEAST), "weight": weight, "strength": np.clip(strength, LEAST, 3.0), "kind": kind,
        "light": light, "matters": np.where(kind > 0, np.minimum((a * a).sum(axis=1), 2.0), 0.0),
    }  # fmt: skip


def fit(out: Path, planes: int, members: int, steps: int) -> dict[str, np.ndarray]:
    """Fit networks and return their weights, and how good they are on pictures of unseen photographs."""
    import torch

    rows = gathered(out, planes)
    held = (rows["number"] % HELD_OUT == 0) & (rows["number"] < REAL)
    aim = {name: torch.as_tensor(np.asarray(value, np.float32)) for name, value in targets(rows).items()}
    mean, spread = rows["features"][~held].mean(axis=0), rows["features"][~held].std(axis=0) + 1e-3
    values = np.clip((rows["features"] - mean) / spread, -learned._FARTHEST, learned._FARTHEST)
    x = torch.as_tensor(values.astype(np.float32))
    count, kinds = planes * len(evidence.BANDS), len(learned.KINDS)
    quantiles = torch.tensor(learned.LIMITS)
    often = np.where(rows["number"] >= REAL, OFTEN, 1)
    train = torch.as_tensor(np.repeat(np.flatnonzero(~held), often[~held]))

    def loss(y: Any, which: Any) -> Any:
        error = aim["logs"][which] - y[:, :count].reshape(-1, planes, len(evidence.BANDS))
        # What is taken for noise and is none costs more than noise that stays.
        bands = torch.maximum(MILD * error, (MILD - 1) * error) + 0.2 * torch.nn.functional.huber_loss(
            error * 0, error, reduction="none", delta=0.5
        )
        first = (aim["weight"][which] * bands).mean()
        kind = torch.nn.functional.cross_entropy(y[:, count : count + kinds], aim["kind"][which].long())
        light = torch.nn.functional.binary_cross_entropy_with_logits(
            y[:, count + kinds], aim["light"][which], weight=aim["matters"][which]
        )
        apart = aim["strength"][which][:, None] - y[:, count + kinds + 1 :]
        limits = torch.maximum(quantiles * apart, (quantiles - 1) * apart).mean()
        return 4 * first + 0.3 * kind + 0.3 * light + 2 * limits

    weights: dict[str, np.ndarray] = {"mean": mean, "spread": spread, "members": np.array(members)}
    for member in range(members):
        torch.manual_seed(member)
        sizes = [x.shape[1], *WIDTHS[planes], count + kinds + 1 + len(learned.LIMITS)]
        layers = [torch.nn.Linear(a, b) for a, b in pairwise(sizes)]
        net = torch.nn.Sequential(
            *[part for layer in layers for part in (layer, torch.nn.ReLU(), torch.nn.Dropout(DROPPED[planes]))][:-2]
        )
        best = torch.optim.AdamW(net.parameters(), lr=2e-3, weight_decay=0.02)
        rate = torch.optim.lr_scheduler.CosineAnnealingLR(best, steps)
        for _ in range(steps):
            which = train[torch.randint(len(train), (512,))]
            best.zero_grad()
            loss(net(x[which] + 0.05 * torch.randn(len(which), x.shape[1])), which).backward()
            best.step()
            rate.step()
        net.eval()
        with torch.no_grad():
            test = torch.as_tensor(np.flatnonzero(held))
            learnt, unseen = (float(loss(net(x[which]), which)) for which in (train, test))
            print(f"{planes} plane(s), member {member}: {learnt:.3f} learned, {unseen:.3f} held out", flush=True)
        for k, layer in enumerate(layers):
            weights[f"{member}.{k}.weight"] = layer.weight.detach().numpy().astype(np.float16)
            weights[f"{member}.{k}.bias"] = layer.bias.detach().numpy().astype(np.float16)
    return {f"{planes}.{name}": value for name, value in weights.items()}


def report(out: Path, planes: int) -> str:
    """Return how good what was learned is on pictures of photographs that it was not learned from."""
    rows = gathered(out, planes)
    held = np.flatnonzero((rows["number"] % HELD_OUT == 0) & (rows["number"] < REAL))
    aim = targets(rows)
    beliefs = [learned.believe(rows["features"][n].astype(np.float64), planes) for n in held]
    found = np.array([np.log(b.shares) for b in beliefs])
    limits = np.log(np.array([b.limits for b in beliefs]))
    sure = np.array([max(b.probabilities.values()) for b in beliefs])
    said = np.array([list(b.probabilities.values()).index(max(b.probabilities.values())) for b in beliefs])
    right = said == aim["kind"][held]
    lines = [f"{planes} plane(s), {len(held)} pictures: kind right {np.mean(said == aim['kind'][held]):.3f}"]
    for low, high in ((0.3, 0.6), (0.6, 0.8), (0.8, 0.9), (0.9, 0.97), (0.97, 1.01)):
        of = (sure >= low) & (sure < high)
        if of.any():
            lines.append(f"  told {low:.2f} to {high:.2f}: {of.sum()} pictures, right {np.mean(right[of]):.3f}")
    noisy = aim["kind"][held] > 0
    error = found - aim["logs"][held]
    lines.append(
        f"  bands, rms of the logarithm: {np.sqrt(np.mean(error[noisy] ** 2, axis=(0, 2))).round(3)}; without learning "
        f"{np.sqrt(np.mean(aim['logs'][held][noisy] ** 2, axis=(0, 2))).round(3)}"
    )
    apart = aim["strength"][held] - limits[:, 1]
    lines.append(
        f"  strength: within 15 % {np.mean(np.abs(np.expm1(apart[noisy])) < 0.15):.3f}; within the limits "
        f"{np.mean((aim['strength'][held] >= limits[:, 0]) & (aim['strength'][held] <= limits[:, 2])):.3f}"
    )
    narrow = (limits[:, 2] - limits[:, 1] < 0.16) & (limits[:, 1] - limits[:, 0] < 0.16)
    near = np.mean(np.abs(np.expm1(apart[narrow])) < 0.15)
    lines.append(f"  narrow limits: {narrow.mean():.3f} of all, within 15 % {near:.4f}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("draw", "fit"))
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--items", type=int, default=8000)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--members", type=int, default=2)
    parser.add_argument("--steps", type=int, default=6000)
    options = parser.parse_args()
    if options.what == "draw":
        draw_items(options.data, options.out, options.items, options.jobs)
        return
    held: dict[str, np.ndarray] = {}
    for planes in (1, 3):
        held |= fit(options.out, planes, options.members, options.steps)
    np.savez_compressed(Path(learned.__file__).with_name("learned.npz"), **held)
    for planes in (1, 3):
        print(report(options.out, planes))


if __name__ == "__main__":
    main()
