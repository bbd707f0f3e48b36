"""Learn how much of what quiet blocks show is noise: draws pictures, fits a small network, tells how good it is.

    python -m benchmarks.learn_noise draw --data DATA --out FOLDER --items 8000 --jobs 2
    python -m benchmarks.learn_noise fit --out FOLDER
    python -m benchmarks.learn_noise calibrate --out FOLDER [--results benchmarks/results]

The first command writes figures of pictures that `benchmarks.blind.drawn` draws (some 0.2 s each); the second writes
`nlflow/denoising/noise/finding/learned.npz` and prints errors on pictures of photographs that were not learned from.
The third writes noise_calibration.json and .png: of these pictures, told probabilities and limits against what is true.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
from PIL import Image

from benchmarks.blind.drawn import Drawing, draw
from benchmarks.blind.drawn_scenes import Photographs
from nlflow.denoising.noise.finding import evidence, learned, pictures
from nlflow.denoising.noise.finding.sigma import estimate_sigmas

_AT_ONCE: Final = 50  # items of a task
HELD_OUT: Final = 5  # each fifth item is of photographs that the others do not see
REAL: Final = 10**6  # numbers from here on are of real cameras
PAIRS: Final = 600  # pieces of them
OFTEN: Final = 8  # a piece of a real camera is learned so many times as often as a drawing
CLEAN: Final = 0.2  # of the measured strength in every band: with less noise than that a picture counts as clean
FLAT: Final = 0.25  # by which the logarithms of the bands of white noise differ at most
LEAST: Final = -3.0  # a logarithm: less noise than 5 % of what is measured is none
MILD: Final = 0.5  # the quantile of the noise that is told
#: What confidence promises: an error of the strength, and in which share of the pictures it is not exceeded.
PROMISED: Final = ((0.15, 0.995), (0.5, 0.95))
WIDEST: Final = (math.log(1.5), math.log(2.0))  # limits, as users read them, whatever is kept


@dataclass(frozen=True)
class Net:
    """A network of two layers, and how it is learned: what keeps it from learning its pictures by heart."""

    widths: tuple[int, int]
    dropped: float  # of the units
    decay: float  # of the weights
    jitter: float  # of the figures, in standard deviations
    steps: int


#: Networks whose means are told, of grey pictures and of coloured ones. Of 16 that were tried, these were the best
#: together on the half of the held-out pictures that calibrates.
NETS: Final = {
    1: (Net((96, 64), 0.05, 0.02, 0.05, 8000), Net((96, 64), 0.05, 0.02, 0.05, 8000),
        Net((128, 96), 0.1, 0.05, 0.1, 4000)),
    3: (Net((112, 72), 0.15, 0.02, 0.05, 8000), Net((112, 72), 0.3, 0.05, 0.2, 4000)),
}  # fmt: skip


def item(number: int, photographs: Photographs) -> dict[str, Any] | None:
    """Return the figures of one picture and what its noise is."""
    return figures(draw(np.random.default_rng([7, number]), photographs))


def figures(drawing: Drawing) -> dict[str, Any] | None:
    """Return the figures of the first shot, and its noise from the second."""
    first = drawing.first.astype(np.float64)
    if min(first.shape[:2]) < evidence.SIDE:
        return None
    shown = first if drawing.missing is None else np.where(drawing.missing[..., None], 0.0, first)
    found = evidence.look(shown, drawing.missing)
    if found is None:
        return None
    corners = evidence.places(first.shape[:2])
    seen = evidence.windows(first, corners)
    other = evidence.windows(drawing.second.astype(np.float64), corners)
    apart = (seen - other) / np.sqrt(2)
    planes = (apart @ evidence.planes_of(first.shape[-1]).T).astype(np.float32)
    told = 1 if found.grey else planes.shape[-1]  # three channels that are alike hold one picture
    planes = planes[..., :told]
    levels = evidence.blocks_of(seen.mean(axis=-1), 8).mean(axis=(1, 2))
    high = evidence.squares_of(evidence.blocks_of(planes[..., 0], 8))[:, evidence.radius(8) > 0.3].mean(axis=1)
    edges = (found.intensities[1:] + found.intensities[:-1]) / 2
    which = np.searchsorted(edges, levels)
    strengths = [float(high[which == k].mean()) if (which == k).any() else 0.0 for k in range(len(found.intensities))]
    padded = evidence.CLASSES - len(strengths)
    return {
        "kind": drawing.kind, "features": found.features.astype(np.float32),
        "measured": found.powers[:told].astype(np.float32),
        "true": _powers(planes).astype(np.float32),
        "strengths": np.pad(found.strengths, (0, padded)).astype(np.float32),
        "strengths_true": np.pad(strengths, (0, padded)).astype(np.float32),
        "white": np.resize(estimate_sigmas(shown, drawing.missing), 3).astype(np.float32),
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


def fit(out: Path, planes: int) -> dict[str, np.ndarray]:
    """Fit networks and return their weights, by how much their limits are wider, and how wide those of "high" are."""
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

    weights: dict[str, np.ndarray] = {"mean": mean, "spread": spread, "members": np.array(len(NETS[planes]))}
    for member, own in enumerate(NETS[planes]):
        torch.manual_seed(member)
        sizes = [x.shape[1], *own.widths, count + kinds + 1 + len(learned.LIMITS)]
        layers = [torch.nn.Linear(a, b) for a, b in pairwise(sizes)]
        net = torch.nn.Sequential(
            *[part for layer in layers for part in (layer, torch.nn.ReLU(), torch.nn.Dropout(own.dropped))][:-2]
        )
        best = torch.optim.AdamW(net.parameters(), lr=2e-3, weight_decay=own.decay)
        rate = torch.optim.lr_scheduler.CosineAnnealingLR(best, own.steps)
        for _ in range(own.steps):
            which = train[torch.randint(len(train), (512,))]
            best.zero_grad()
            loss(net(x[which] + own.jitter * torch.randn(len(which), x.shape[1])), which).backward()
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
    return {f"{planes}.{name}": value for name, value in (weights | calibration(rows, weights)).items()}


def calibration(rows: dict[str, np.ndarray], weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return what a half of the held-out pictures says of the limits: how much wider they are, and which are sure."""
    told = Told.of(rows, parted(rows)[0], weights)
    below, above = np.diff(told.limits, axis=1).T
    outside = np.abs(told.error) / np.where(told.error < 0, below, above)
    stretch = max(float(np.quantile(outside, learned.LIMITS[2] - learned.LIMITS[0])), 1.0)
    told = Told.of(rows, parted(rows)[0], weights | {"stretch": np.array(stretch)})
    widths = [min(told.widest(error, share), most) for (error, share), most in zip(PROMISED, WIDEST, strict=True)]
    return {"stretch": np.array(stretch), "widths": np.array(widths)}


def parted(rows: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return the pictures of photographs that were not learned from: a half that calibrates, and one that judges."""
    held = np.flatnonzero((rows["number"] % HELD_OUT == 0) & (rows["number"] < REAL))
    first = rows["number"][held] // HELD_OUT % 2 == 0
    return held[first], held[~first]


@dataclass(frozen=True)
class Told:
    """What is said of some pictures, and what is true: kinds, and logarithms of strengths."""

    probabilities: np.ndarray  # (N, 3)
    limits: np.ndarray  # (N, 3)
    shares: np.ndarray  # (N, P, B)
    light: np.ndarray
    confidence: np.ndarray
    aim: dict[str, np.ndarray]

    @classmethod
    def of(cls, rows: dict[str, np.ndarray], which: np.ndarray, held: dict[str, np.ndarray]) -> Told:
        planes = rows["measured"].shape[1]
        each = [learned.believe(rows["features"][n].astype(np.float64), planes, held) for n in which]
        return cls(
            np.array([list(one.probabilities.values()) for one in each]),
            np.log(np.array([one.limits for one in each])),
            np.log(np.array([one.shares for one in each])),
            np.array([one.light for one in each]),
            np.array([one.confidence for one in each]),
            {name: value[which] for name, value in targets(rows).items()},
        )

    @property
    def noisy(self) -> np.ndarray:
        return np.array([pictures.acts(p[0]) for p in self.probabilities])

    @property
    def width(self) -> np.ndarray:
        return np.asarray(np.diff(self.limits, axis=1).max(axis=1))

    @property
    def error(self) -> np.ndarray:
        return np.asarray(self.aim["strength"] - self.limits[:, 1])

    def widest(self, error: float, share: float) -> float:
        """Return up to which width of the limits the strength of so many of the noisy ones is met within an error."""
        order = np.argsort(self.width[self.noisy])
        near = np.abs(np.expm1(-self.error[self.noisy][order])) < error
        enough = np.flatnonzero(np.cumsum(near) >= share * np.arange(1, len(near) + 1))
        return float(self.width[self.noisy][order][enough[-1]]) if len(enough) else 0.0

    @property
    def right(self) -> np.ndarray:
        return np.asarray(self.probabilities.argmax(axis=1) == self.aim["kind"])

    @property
    def within(self) -> np.ndarray:
        strength = self.aim["strength"]
        return np.asarray((strength >= self.limits[:, 0]) & (strength <= self.limits[:, 2]))


def report(out: Path, planes: int) -> str:
    """Return how good what was learned is on pictures of photographs that it was neither learned nor calibrated by."""
    rows = gathered(out, planes)
    told = Told.of(rows, parted(rows)[1], learned.weights(planes))
    truly = told.aim["kind"] > 0
    lines = [f"{planes} plane(s), {len(truly)} pictures: kind right {np.mean(told.right):.3f}"]
    lines += [
        f"  told {low:.2f} to {high:.2f}: {count} pictures, right {right:.3f}"
        for low, high, count, right in calibrated(told)
    ]
    apart = (told.shares - told.aim["logs"])[truly]
    lines.append(
        f"  bands, rms of the logarithm: {np.sqrt(np.mean(apart**2, axis=(0, 2))).round(3)}; without learning "
        f"{np.sqrt(np.mean(told.aim['logs'][truly] ** 2, axis=(0, 2))).round(3)}"
    )
    near = np.abs(np.expm1(-told.error)) < PROMISED[0][0]
    lines.append(f"  strength: within 15 % {np.mean(near[truly]):.3f}; within the limits {np.mean(told.within):.3f}")
    for sure in ("high", "medium", "low"):
        figures = ", ".join(f"{name} {value:.4g}" for name, value in of_confidence(told, sure).items())
        lines.append(f"  {sure}: {figures}")
    kept = ~told.noisy
    lines.append(f"  clean ones that stay {np.mean(kept[~truly]):.4f}; noisy ones that stay {np.mean(kept[truly]):.4f}")
    return "\n".join(lines)


def calibrated(told: Told) -> list[tuple[float, float, int, float]]:
    """Return between which probabilities how many kinds were told, and which share of them is right."""
    sure, found = told.probabilities.max(axis=1), []
    for low, high in pairwise((1 / 3, 0.6, 0.8, 0.9, 0.97, 1.001)):
        of = (sure >= low) & (sure < high)
        found.append((low, high, int(of.sum()), float(np.mean(told.right[of])) if of.any() else math.nan))
    return found


def of_confidence(told: Told, sure: str) -> dict[str, float]:
    """Return how often a confidence is said of noisy pictures, and how often limits and strength were right then."""
    of = told.noisy & (told.confidence == sure)
    error = np.abs(np.expm1(-told.error[of]))
    return {
        "pictures": int(of.sum()), "share": float(of.mean()), "within the limits": float(told.within[of].mean()),
        "within 15 %": float(np.mean(error < 0.15)), "within 50 %": float(np.mean(error < 0.5)),
    }  # fmt: skip


def calibrate(out: Path, results: Path) -> None:
    """Write how well told probabilities and limits agree with what is true, as figures and as a picture."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    content: dict[str, Any] = {}
    figure = Figure(figsize=(8, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    for planes, name, mark in ((1, "grey", "o"), (3, "coloured", "s")):
        rows = gathered(out, planes)
        told = Told.of(rows, parted(rows)[1], learned.weights(planes))
        kinds = calibrated(told)
        sures = {sure: of_confidence(told, sure) for sure in ("high", "medium", "low")}
        names = ("from", "to", "pictures", "right")
        kinds_told = [dict(zip(names, row, strict=True)) for row in kinds]
        content[name] = {"pictures": len(told.right), "kinds": kinds_told, "confidence": sures}
        errors = [math.sqrt(share * (1 - share) / max(count, 1)) for _, _, count, share in kinds]
        middles = [(low + min(high, 1.0)) / 2 for low, high, _, _ in kinds]
        left.errorbar(middles, [share for *_, share in kinds], errors, marker=mark, capsize=3, label=name)
        right.plot(list(sures), [one["within the limits"] for one in sures.values()], mark, label=f"{name}, limits")
        right.plot(
            list(sures), [one["within 15 %"] for one in sures.values()], mark, fillstyle="none", label=f"{name}, 15 %"
        )
    left.plot([1 / 3, 1], [1 / 3, 1], "k:", label="as told")
    left.set(xlabel="probability of the kind, as told", ylabel="share that is right")
    right.axhline(learned.LIMITS[2] - learned.LIMITS[0], color="k", ls=":", label="96 % are asked for")
    right.set(xlabel="confidence", ylabel="share of pictures whose strength is within", ylim=(0, 1.03))
    for axis in (left, right):
        axis.legend(fontsize=8)
    FigureCanvasAgg(figure)
    results.mkdir(parents=True, exist_ok=True)
    figure.savefig(results / "noise_calibration.png", dpi=90)
    (results / "noise_calibration.json").write_text(json.dumps(content, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("draw", "fit", "report", "calibrate"))
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--items", type=int, default=8000)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    options = parser.parse_args()
    if options.what == "draw":
        draw_items(options.data, options.out, options.items, options.jobs)
        return
    if options.what == "calibrate":
        calibrate(options.out, options.results)
        return
    if options.what == "fit":
        held: dict[str, np.ndarray] = {}
        for planes in (1, 3):
            held |= fit(options.out, planes)
        np.savez_compressed(Path(learned.__file__).with_name("learned.npz"), **held)
    for planes in (1, 3):
        print(report(options.out, planes))


if __name__ == "__main__":
    main()
