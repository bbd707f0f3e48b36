"""What `denoise` makes and tells of a f + b is what a and b make of f; widths, risks and mixtures are as written."""

from __future__ import annotations

import math
import re
import warnings
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nlflow import denoise, solve
from nlflow.denoising import groupwise, pixelwise
from nlflow.denoising.frame import Frame, Part, Spread, observe, units_of
from nlflow.denoising.layout import Axes
from nlflow.denoising.noise import GaussianNoise, perturbation
from nlflow.denoising.options import Options
from nlflow.denoising.patches import GroupFlow, Grouping, RelaxedSemiImplicit
from nlflow.denoising.runs import ALONE
from validation.harness import CannotRunError, Check, Claim, Context, Outcome, largest

Floats = NDArray[np.float64]
MOVED = 0.1  # of the noise, for a divergence


def picture(rng: np.random.Generator, *shape: int, sigma: float = 2.0) -> Floats:
    """Return a noisy image (H, W) or (H, W, C) of multiples of 1/1024, of which a f + b is no other number."""
    i, j = np.mgrid[: shape[0], : shape[1]]
    clean = 10 * np.sin(i / 5) + 8.0 * (j > shape[1] // 2)
    clean = clean if len(shape) == 2 else clean[..., None] * np.linspace(1, 0.4, shape[2])
    return np.asarray(np.round((clean + rng.normal(0, sigma, shape)) * 1024) / 1024)


def observed(image: Floats, sigma: Any, quality: str, noise: Any = "auto", channel: int | None = None,
             **more: Any) -> tuple[Frame, Part]:  # fmt: skip
    """Return what an image decides as a whole, and its samples in units of the noise."""
    mask = more.pop("mask", None)
    return observe(image, sigma, noise, Axes.of(image.shape, channel), quality, Options(**more), mask=mask)


def apart(a: Any, b: Any) -> float:
    return float(np.abs(np.asarray(a) - np.asarray(b)).max())


def units(rng: np.random.Generator, torch: Any) -> float:
    """Return errors of estimates and of all that is told of 8 f + 64, from those of f, in units of the noise."""
    worst, array, tensor = 0.0, np.asarray, torch.from_numpy
    grey, colour = (picture(rng, 18, 20), 2.0, None), (picture(rng, 17, 16, 3), np.array([2.0, 1.5, 3.0]), -1)
    for convert, (image, sigma, channel), quality, stopping in (
        (array, grey, "fast", None), (array, grey, "balanced", "sure"), (array, grey, "best", None),
        (array, grey, "pixels", "discrepancy"), (array, colour, "fast", "discrepancy"),
        (array, colour, "balanced", None),
        (array, colour, "pixels", "sure"), (tensor, grey, "fast", "sure"), (tensor, colour, "fast", None),
        (tensor, colour, "balanced", "discrepancy"),
    ):  # fmt: skip
        more: Any = {"quality": quality, "stopping": stopping, "channel_axis": channel, "return_info": True}
        strong = sigma if np.ndim(sigma) == 0 else convert(sigma)
        u, told = denoise(convert(image), strong, **more)
        v, other = denoise(convert(8 * image + 64), 8 * strong, **more)
        removed = float(np.sqrt(np.mean((image - np.asarray(u)) ** 2)))
        worst = largest(
            worst, apart(v, 8 * np.asarray(u) + 64) / 16, abs(other.sigma / told.sigma / 8 - 1),
            abs(told.residual / removed - 1), abs(other.residual / removed / 8 - 1),
            abs(told.sigma / float(np.sqrt(np.mean(np.square(sigma)))) - 1),
        )  # fmt: skip
        if stopping == "sure":
            worst = largest(worst, abs(other.risk / told.risk / 64 - 1))
        if quality == "pixels":
            worst = largest(worst, abs(other.parameters["width"] / told.parameters["width"] / 8 - 1))
    return worst


def strengths(rng: np.random.Generator, torch: Any) -> float:
    """Return errors of a strength, of a map of the noise, and of levels that stand for no noise."""
    image = picture(rng, 20, 26)
    worst = apart(denoise(image, 2.0, strength=1.5), denoise(image, 3.0))
    worst = largest(worst, apart(denoise(torch.from_numpy(image), 2.0, strength=1.5), denoise(image, 3.0)) / 100)
    once, more = (denoise(image, noise="white", strength=s, return_info=True)[1].sigma for s in (1.0, 1.5))
    worst = largest(worst, abs(more / once / 1.5 - 1))
    colour, by = picture(rng, 20, 26, 2), rng.uniform(1.0, 3.0, (20, 26, 2))
    frame = observed(colour, by, "balanced", channel=-1)[0]
    squares = (by**2).mean(axis=(0, 1))
    worst = largest(worst, apart(frame.level, np.sqrt(squares)), apart(frame.variance, (by**2 / squares).mean(axis=-1)))
    found = denoise(torch.from_numpy(colour), torch.from_numpy(by), channel_axis=-1)
    worst = largest(worst, apart(found, denoise(colour, by, channel_axis=-1)) / 100)
    levels, divided, *_ = units_of(np.array([0.0, 3.0]), np.array([9.0, 9.0]))  # a hundredth of the strongest
    worst = largest(worst, apart(levels, [0, 3]), apart(divided, [0.03, 3]))
    hole = np.zeros(image.shape, bool)
    hole[8:11, 9:12] = True
    frame = observed(image, 0.0, "balanced", mask=hole)[0]  # filled in as if 0.08 of the signal were noise
    return largest(worst, abs(float(frame.level[0]) / (0.08 * image[~hole].std()) - 1))


def spreads(rng: np.random.Generator, torch: Any) -> float:
    """Return errors of what flows are chosen by, of arrays and of items of tensors."""
    from nlflow.denoising.looked import Looked

    items = torch.from_numpy(rng.normal(40.0, 3.0, (2, 9, 11, 3)))
    looked, level, offset, own = (
        Looked.at(items),
        np.array([2.0, 0.7]),
        np.array([38.0, 41.0]),
        np.array([1, 0, 1], bool),
    )
    offset = items[1].numpy().mean(axis=(0, 1))[own]
    told = looked.spread(1, own, items[1], offset, level)
    f = (items[1].numpy()[..., own] - offset) / level
    variances = f.var(axis=(0, 1))
    worst = largest(
        abs(told.extent - (f.max() - f.min())), abs(told.variance / variances.mean() - 1),
        apart(told.moments() / (f.reshape(-1, 2).T @ f.reshape(-1, 2)), 1),
        abs(looked.span(1) - float(np.ptp(items[1].numpy()))),
        abs(told.ratio * 2 * math.sqrt(variances.mean() - 1) - 1), abs(Spread.of(f).ratio / told.ratio - 1),
    )  # fmt: skip
    preset = groupwise.PRESETS["balanced"]
    for extent, weakest, wanted in ((60.0, 0.5, np.float64), (60.0, 0.8, np.float32), (160.0, 2.0, np.float32)):
        chosen = groupwise.Groups.of(preset, replace(told, extent=extent), 2, weakest)
        worst = largest(worst, float(chosen.precision != wanted))
    return worst


# ---- pixels


def widths(rng: np.random.Generator) -> float:
    """Return errors of kernels of patches, h = 1.9 s n^(-1/4) for n samples and noise s that the smoothing leaves."""
    line = np.exp(-(np.arange(-2, 3) ** 2) / (2 * pixelwise.SMOOTHING**2))
    left = float(np.linalg.norm(line / line.sum()))
    worst = 0.0
    for ratio, axes, channels, patch, radius in (
        (0.2, 2, 3, 3, 8),
        (0.5, 2, 1, 5, 8),
        (0.7, 2, 4, 7, 8),
        (0.7, 1, 2, 15, 60),
    ):
        kernel = pixelwise.kernel_for(ratio, axes, channels, None, None, None)
        wide = 1.9 * left**axes * (channels * patch**axes) ** -0.25
        worst = largest(worst, abs(kernel.width / wide - 1), abs(kernel.sigma / left**axes - 1))
        worst = largest(worst, abs(kernel.spatial_width / (0.6 * radius) - 1), abs(kernel.patch_size - patch))
        worst = largest(worst, abs(kernel.search_radius - radius))
    image = picture(rng, 20, 26)
    told = denoise(image, 2.0, quality="pixels", return_info=True)[1].parameters
    worst = largest(worst, abs(told["width"] / (2 * 1.9 * left**2 / math.sqrt(told["patch_size"])) - 1))
    given, again = denoise(image, 2.0, quality="pixels", width=told["width"], return_info=True)
    worst = largest(worst, abs(again.parameters["width"] / told["width"] - 1))
    return largest(worst, apart(given, denoise(image, 2.0, quality="pixels")) / 100)


def by_levels(rng: np.random.Generator) -> float:
    """Return errors of flows of pixels for a map of the noise: at levels a factor of at most 1.5 apart, and between."""
    image, by = picture(rng, 13, 30), np.exp(np.linspace(0, 1.1, 30)) * np.linspace(1, 1.3, 13)[:, None]
    count = 1 + math.ceil(math.log(by.max() / by.min()) / math.log(1.5))
    places = np.log(by / by.min()) / math.log(by.max() / by.min()) * (count - 1)
    total = np.zeros(image.shape)
    for k in range(count):
        level = by.min() * (by.max() / by.min()) ** (k / (count - 1))
        total += np.clip(1 - np.abs(places - k), 0, None) * denoise(image, float(level), quality="pixels", steps=2)
    return apart(total, denoise(image, by, quality="pixels", steps=2))


# ---- risks


def risk_of(f: Floats, u: Floats, v: Floats, signs: Floats, sigma: Floats) -> float:
    """Return Stein's estimate of the mean squared error, with the divergence from v, made of f + σ b / 10."""
    return float(np.mean((u - f) ** 2 + sigma**2 * (2 * signs * (v - u) / (MOVED * sigma) - 1)))


def risks(rng: np.random.Generator, torch: Any) -> float:
    """Return errors of risks that are told, from runs of which the number of steps is known, relative."""
    image, sigma, seed = picture(rng, 16, 18, 2), np.array([2.0, 3.0]), 3
    signs = perturbation(image.shape, rng=seed)
    words: Any = {"quality": "pixels", "channel_axis": -1}
    all_ = []
    for steps in range(1, pixelwise.MOST_STEPS + 1):
        u, v = (denoise(z, sigma, steps=steps, **words) for z in (image, image + MOVED * sigma * signs))
        all_.append(risk_of(image, u, v, signs, sigma))
    told = denoise(image, sigma, stopping="sure", seed=seed, return_info=True, **words)[1]
    worst = largest(abs(told.risk / min(all_) - 1), float(told.steps != 1 + int(np.argmin(all_))))
    # Of tensors, where the noise varies: one estimate, in units of the root mean square of each channel.
    by = rng.uniform(1.5, 3.0, (16, 18, 1)) * np.array([1.0, 1.4])
    level = np.sqrt((by**2).mean(axis=(0, 1)))
    own = np.sqrt((by**2 / level**2).mean(axis=-1, keepdims=True))  # relative, one for all channels
    more: Any = {"quality": "fast", "channel_axis": -1}

    def made(z: Floats, **options: Any) -> Any:
        return denoise(torch.from_numpy(z), torch.from_numpy(by), **more, **options)

    u, told = made(image, stopping="sure", seed=seed, return_info=True)
    signs = perturbation((1, *image.shape), rng=seed)[0]
    v, u = np.asarray(made(image + MOVED * level * signs)), np.asarray(u)
    each = (u - image) ** 2 / level**2 + own**2 * (2 * signs * (v - u) / (MOVED * level) - 1)
    worst = largest(worst, abs(told.risk / float((level**2 * each).mean()) - 1))
    said = re.search(r"residual of (\S+) sigma", made(image, stopping="discrepancy", return_info=True)[1].stopped_by)
    off = float(np.sqrt(np.mean(((u - image) / level / own) ** 2)))
    return largest(worst, abs(float(said[1]) / off - 1) / 10 if said else math.inf)


# ---- groups


def designs() -> float:
    """Return how many designs of groups differ from what they say of patches, windows and members."""
    best, wrong = groupwise.PRESETS["best"], 0
    for ratio, widest in ((0.3, (6, 50)), (0.5, (7, 56)), (0.85, (8, 64)), (1.6, (8, 64))):
        first, *later = best.groupings(ratio, 2)
        half = next(g for limit, g in best.first if ratio / 2 <= limit)  # of means: half the noise, half the window
        wrong += first.means != replace(half, radius=9, means=None)
        wrong += [(g.along("patch")[2], g.neighbours) for g in later] != [
            (widest[0] + more, round(widest[1] * (12 + more) / 12)) for more in (1, -1)
        ]
    cube = groupwise._blocks(2, Grouping(6, 30, 5, 4), Grouping(4, 30, (3, 5, 5), 3))
    thin = cube.spaced((4.0, 1.0, 1.0))  # a mean of 4^(1/3) = 1.59: 0.40, and at most 1.4
    wrong += thin.first[0][1] != Grouping((2, 8, 8), 30, (2, 7, 7), (2, 6, 6))
    wrong += thin.later[0][1] != Grouping((2, 6, 6), 30, (1, 7, 7), (1, 4, 4))
    for sizes in ((1.0,), (2.5, 40.0)):
        for spread in sizes:
            strongest = max(0.6 * spread, 1.0)
            count = math.ceil(math.log(strongest) / math.log(1 / 0.7))
            told = groupwise.filling_levels(spread * np.array([[1.0], [-1.0]] * 4))
            exact = [strongest ** (1 - k / max(count, 1)) for k in range(count + 1)] if count else [1.0]
            wrong += len(told) != len(exact) or apart(told, exact) > 1e-12
    return float(wrong)


def filled_in(rng: np.random.Generator) -> float:
    """Return errors of estimates with holes: flows as if there were more noise, each with its groups, then less."""
    image, hole = picture(rng, 24, 27), np.zeros((24, 27), bool)
    hole[9:13, 10:13] = True
    frame, part = observed(image, 2.0, "balanced", mask=hole)
    preset, signal = groupwise.PRESETS["balanced"], part.f.astype(np.float32)
    ratio = 1 / math.sqrt(part.f.var() - 1)
    for level in groupwise.filling_levels(part.f[~hole]):
        steps = preset.steps if level == 1 else groupwise.FILLING_STEPS
        flow = GroupFlow(
            signal / np.float32(level), preset.groupings(ratio * level, 2), missing=hole, channels=True,
            shrink=preset.shrink, factor=preset.factor, search_every=preset.search_every,
        )  # fmt: skip
        u = solve(flow, t=steps + 1, integrator=RelaxedSemiImplicit(steps, preset.leave)).final
        signal = np.where(hole[..., None], u * np.float32(level), signal)
    return apart(u[..., 0] * 2.0 + frame.offset, denoise(image, 2.0, mask=hole))


def compressed(rng: np.random.Generator, torch: Any) -> float:
    """Return errors of estimates for compressed noise: three tenths of that for white noise 2.5 times as strong."""
    low = np.exp(-5 * np.hypot(np.fft.fftfreq(16)[:, None], np.fft.fftfreq(16)))
    noise = GaussianNoise(2.0, low, compressed=0.7, intensities=[-10, 20], strengths=[0.8, 1.5])
    image = picture(rng, 30, 34)
    frame, part = observed(image, None, "balanced", noise)
    held, preset = frame.coloured, groupwise.PRESETS["balanced"]
    assert held is not None
    wider = replace(preset, shrink=1.0, cosine=True, steps=preset.steps - 1)
    own = groupwise.coloured(part.f, frame, replace(held, compressed=False), wider, ALONE).path[-1]
    level = 2.5 * math.sqrt(float(held.strength.mean()))
    weak = replace(preset, steps=2)
    flow = groupwise.Groups.of(weak, Spread.of(part.f / level), 2)
    white = level * flow.run(part.f / level, replace(frame, coloured=None, flow=flow), ALONE).path[-1]
    made, told = denoise(image, noise=noise, return_info=True)
    worst = largest(apart(made, part.result(0.7 * own + 0.3 * white, frame)[..., 0]), abs(told.steps - 5.0))
    # What is told: the strength at the samples, and that with what compression cut off filled up.
    relative = float(np.sqrt(held.strength.mean()))
    strongest = np.max(held.shown)
    full = strongest * (held.shown / strongest) ** 0.3
    worst = largest(worst, abs(told.sigma / (2 * relative) - 1))
    worst = largest(worst, abs(told.sigma_effective / (2 * relative * math.sqrt(full.mean())) - 1))
    # Patches are chosen by the noise that is counted, and single precision.
    mean = float(full.mean())
    for size, sides in ((4.0, 30), (90.0, 30)):
        wide = size * np.sin(np.arange(sides) / 5)[:, None] * np.ones(34)
        f = wide + noise.sample(np.zeros(wide.shape), rng=rng)
        frame, part = observed(f, None, "balanced", noise)
        ratio = 1 / math.sqrt(max(part.f.var() / mean - 1, 0.01))
        groupings = preset.groupings(ratio, 2)
        told = denoise(f, noise=noise, return_info=True)[1]
        worst = largest(worst, float(told.parameters["patch_size"] != groupings[-1].patch))
        white = groupwise.Groups.of(weak, Spread.of(part.f / 2.5 / np.sqrt(frame.coloured.strength.mean())), 2)  # type: ignore[union-attr]
        size_of = 4 if np.ptp(part.f) / math.sqrt(mean) < 90 else 8
        bytes_ = [groupwise.bytes_needed((1, sides, 34), groupings, 4, size_of),
                  groupwise.bytes_needed((1, sides, 34), white.groupings, 2, white.precision.itemsize)]  # fmt: skip
        worst = largest(worst, abs(told.memory_bytes - max(bytes_)))
    # On tensors the same, of channels with noise of their own.
    pair = picture(rng, 26, 30, 2)
    both = GaussianNoise(np.array([1.5, 4.0]), low)
    there = [denoise(pair, noise=both, channel_axis=-1, device=device) for device in ("cpu", "cpu-tensors")]
    return largest(worst, apart(*there) / 1e3)


def run(context: Context) -> Outcome:
    try:
        import torch
    except ImportError as error:
        raise CannotRunError("torch is not installed: pip install 'nlflow[torch]'") from error
    rng = np.random.default_rng(8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # hints at images so small
        return Outcome([
            Check("estimates, noise, residual, risk and width of 8 f + 64 against those of f", units(rng, torch), 1e-5),
            Check("strengths, maps and missing noise against other ways to say them", strengths(rng, torch), 1e-6),
            Check("range, variance and moments that flows are chosen by", spreads(rng, torch), 1e-9),
            Check("widths of patch kernels against h = 1.9 s n^(−1/4)", widths(rng), 1e-7),
            Check("pixels under a map of noise, against flows at levels", by_levels(rng), 1e-4),
            Check("risks and residuals that are told, against runs with moved samples", risks(rng, torch), 1e-3),
            Check("designs of groups that differ from what they say", designs(), 0),
            Check("holes, against flows with less and less noise", filled_in(rng), 1e-4),
            Check("compressed noise: what is made and told, against its parts", compressed(rng, torch), 1e-4),
        ])  # fmt: skip


CLAIM = Claim(
    name="units-of-denoise",
    title="Denoising knows no unit, and tells what it did in that of the input",
    statement=(
        "Of 8f + 64 `denoise` makes 8u + 64, with 8 times the noise, residual and width and 64 times the risk. Noise "
        "that is given by a strength, a map, channel or spectrum is the same noise. The risk that is told is Stein's "
        "estimate of a run with moved samples. Patches have the width 1.9 s n^(−1/4). Flows at levels of the noise, "
        "flows that fill in and those for compressed noise are mixed as written, from runs of their own."
    ),
    source="derived; Ramani, Blu, Unser 2008, doi 10.1109/TIP.2008.2001404; docs/parameters",
    run=run,
)
