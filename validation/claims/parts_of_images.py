"""Parts of images, films and progress: what is cut, joined, followed, filled and told is that of the whole."""

from __future__ import annotations

import importlib.util
import itertools
import math
import warnings
from typing import Any
from unittest import mock

import numpy as np
from numpy.typing import NDArray

from nlflow import denoise, solve
from nlflow.denoising.frame import observe
from nlflow.denoising.given import Beside, Known, _next
from nlflow.denoising.layout import Axes
from nlflow.denoising.noise import GaussianNoise
from nlflow.denoising.options import Options
from nlflow.denoising.patches import GroupFlow, Grouping, PlainFilter, RelaxedSemiImplicit, TensorFilter
from nlflow.denoising.patches.lattice import Lattice, follow, nearest_offsets, reference_positions
from nlflow.denoising.patches.means import Blocks
from nlflow.denoising.runs import telling
from validation.harness import CannotRunError, Check, Claim, Context, Outcome, largest

Floats = NDArray[np.float64]


def apart(a: Any, b: Any) -> float:
    return float(np.abs(np.asarray(a, np.float64) - np.asarray(b, np.float64)).max())


def stars(rng: np.random.Generator, *shape: int) -> NDArray[np.float32]:
    """Return a noisy image with peaks like no other, of which a part is given back, about 0 from end to end."""
    i, j = np.mgrid[: shape[0], : shape[1]]
    image = 5 * np.sin(i / 9) + rng.normal(0, 1.5, shape)
    for a, b in ((20, 15), (shape[0] // 2 - 3, 22), (shape[0] - 25, 19)):
        image += 30 * np.exp(-((i - a) ** 2 + (j - b) ** 2) / 4.0)
    image -= (image.max() + image.min()) / 2
    low, high = image.min(), image.max()
    return np.asarray(np.clip(image, -min(-low, high), min(-low, high)), np.float32)


# ---- blocks and films


def blocks(rng: np.random.Generator) -> float:
    """Return errors of results in blocks, of what is told of them, and of statistics that are joined."""
    import dask.array as da

    from nlflow.denoising.large import denoise_array
    from nlflow.denoising.large.arrays import frame_for
    from nlflow.denoising.large.survey import _joined, merged, statistics_of

    image, worst = stars(rng, 260, 40), 0.0
    cut = da.from_array(image, chunks=((80, 90, 80, 10), (40,)))
    parts, told = denoise_array(cut, 1.5, quality="fast", strength=1.2, return_info=True)
    worst = largest(worst, apart(parts.compute(), denoise(image, 1.5, quality="fast", strength=1.2)))
    frame = observe(image, 1.8, "auto", Axes.of(image.shape), "fast", Options())[0]
    worst = largest(worst, abs(told.memory_bytes - frame.bytes_needed((90 + 2 * frame.halo[0], 40))))
    few = image[:110, :14]
    found = denoise_array(da.from_array(few, chunks=(55, 14)), 1.5, quality="pixels", fidelity=9.0, return_info=True)
    whole = denoise(few, 1.5, quality="pixels", fidelity=9.0, return_info=True)
    worst = largest(worst, apart(found[0].compute(), whole[0]), abs(found[1].steps - whole[1].steps))
    worst = largest(worst, float(_joined((9, 20, 3, 4, 2), 8) != (9, 20, 9)))
    # A value that says nothing, in areas of both blocks.
    holes = image.copy()
    holes[60:72, 4:14] = holes[100:109, 20:31] = -999.0
    there = np.asarray(
        denoise_array(da.from_array(holes, chunks=(130, 40)), 1.5, quality="fast", return_info=True)[1].given
    )
    worst = largest(
        worst, float(there.tolist() != list(denoise(holes, 1.5, quality="fast", return_info=True)[1].given))
    )
    # Statistics of parts, of which one says nothing.
    pair = rng.normal([3.0, -8.0], [1.0, 4.0], (12, 10, 2))
    pair[:3] = np.nan
    axes, inner = Axes.of(pair.shape, -1), (slice(0, 3), slice(0, 10))
    some = [statistics_of(pair[k : k + 3], (k, 0), inner, axes, None, Known()) for k in (0, 3, 6, 9)]
    all_, flat = merged(some), pair[3:].reshape(-1, 2)
    about = flat - flat.mean(axis=0)
    worst = largest(worst, apart(all_.mean, flat.mean(axis=0)), apart(all_.moments, about.T @ about) / 1e3)
    worst = largest(worst, apart(all_.low, flat.min(axis=0)), apart(all_.high, flat.max(axis=0)))
    levels = np.array([1.0, 3.0])
    frame = frame_for(axes, pair.dtype, all_, levels, "balanced", None, Options(strength=0.9))
    wanted = observe(pair[3:], levels, "auto", Axes.of((9, 10, 2), -1), "balanced", Options(strength=0.9))[0]
    worst = largest(worst, apart(frame.level, 0.9 * levels), abs(frame.flow.ratio / wanted.flow.ratio - 1))  # type: ignore[union-attr]
    return largest(worst, float(frame.flow.groupings != wanted.flow.groupings))  # type: ignore[union-attr]


def films(rng: np.random.Generator) -> float:
    """Return errors of a film that is read in windows, of its frames as they were read, and of its memory."""
    from nlflow.denoising.large import stream

    clip = (20 * np.sin(np.arange(22)[:, None, None] / 3 + np.arange(14) / 4) + rng.normal(0, 2, (22, 12, 14))).astype(
        np.float32
    )
    frame = stream.surveyed(clip, 2.0, quality="fast")
    margin = frame.halo[0]
    core, memory = stream.window(frame, 1e12)
    part = (min(core + 2 * margin, 22), 12, 14)
    worst = abs(memory - (6 * math.prod(part) * 4 + frame.bytes_needed(part)))  # six copies in single precision
    colour = stream.surveyed(
        np.repeat(clip[..., None], 3, axis=-1) + rng.normal(0, 1, (22, 12, 14, 3)), 2.0, quality="fast"
    )
    part = (min(stream.window(colour, 1e12)[0] + 2 * colour.halo[0], 22), 12, 14)
    worst = largest(worst, abs(stream.window(colour, 1e12)[1] - 18 * math.prod(part) * 4 - colour.bytes_needed(part)))
    few = stream.window(frame, stream.window(frame, memory * 0.95)[1])[0]
    timed = [(10 * k, 3, one) for k, one in enumerate(clip)]
    most = float(stream.window(frame, memory * 0.95)[1])
    found = list(stream.denoise_frames(timed, frame, most))
    worst = largest(worst, float(few >= 22), float([t for (t, _, _), _ in found] != [t for t, _, _ in timed]))
    worst = largest(worst, *(apart(one, clip[k]) for k, ((_, _, one), _) in enumerate(found)))
    whole = denoise(clip, 2.0, axes="TYX", quality="fast")
    return largest(worst, apart(np.stack([u for _, u in found]), whole))


# ---- lattices


def lattices(rng: np.random.Generator) -> float:
    """Return how many places, offsets, reaches and windows of groups differ from what they are one by one."""
    wrong = 0.0
    for last, step in ((17, 3), (16, 5), (20, 7), (9, 20), (30, 4)):
        wanted = set(range(0, last // 2 + 1, step)) | {last - k for k in range(0, last // 2 + 1, step)}
        left = max(range(0, last // 2 + 1, step))
        wanted |= {last // 2, last - last // 2} if last - 2 * left > step else set()
        wrong += reference_positions(last, step).tolist() != sorted(wanted)
    offsets, order = nearest_offsets((2, 3))
    lengths = (offsets[order] ** 2).sum(axis=1)
    wrong += bool((np.diff(lengths) < 0).any())
    for p, r, means in ((5, 18, None), (4, (1, 5, 7), None), (6, 3, Grouping(4, 9, (2, 5, 9), 2))):
        own = [2 * (a + p - 1) for a in ((r, r, r) if isinstance(r, int) else r)]
        if means is not None:  # blocks of two, which are spread over two others
            own = [max(a, 4 * (b + 3)) + 5 for a, b in zip(own, (2, 5, 9), strict=True)]
        wrong += Grouping(p, 20, r, 3, means).halo != tuple(own)
    for shape, grouping, origin, whole in (
        ((11, 23), Grouping(4, 60, 6, 3), (0, 0), None), ((7, 9), Grouping(5, 60, 30, 2), (0, 0), None),
        ((40,), Grouping(6, 9, 50, 4), (0,), None), ((12, 20), Grouping(4, 60, 6, 3), (28, 0), (40, 20)),
    ):  # fmt: skip
        lattice = Lattice.of(shape, grouping, origin, whole)
        ends = [n - p for n, p in zip(lattice.shape, lattice.patch, strict=True)]
        seen = [
            math.prod(min(x + r, end) - max(x - r, 0) + 1 for x, r, end in zip(own, lattice.radii, ends, strict=True))
            for own in lattice.references()
        ]
        wrong += lattice.fewest != min(seen)
        full = zip((grouping.along("radius")), ends, strict=True)
        wrong += lattice.radii != tuple(min(r, end) for r, end in full)
    run = Lattice.of((30, 90), Grouping(5, 20, 4, 3), run=4)
    longest = max(run.columns[k : k + 4][-1] - run.columns[k] for k in range(0, len(run.columns), 4))
    wrong += run.window != (1, 13, 13 + longest)
    wide = Lattice.of((5, 40, 44), Grouping((1, 5, 5), 20, (2, 6, 3), 3))
    with (
        mock.patch("nlflow.backends.triton.choice.why_not", return_value=""),
        mock.patch("nlflow.backends.triton.choice.OFFSETS", 9),
    ):
        import torch

        text = TensorFilter().why_no_search(torch.zeros(1, 5, 40, 44), wide)
    wrong += text.split()[2] != str(5 * 13 * 7)
    blocks = Blocks.of((24, 26), Grouping(3, 8, 3, 2), (0, 0), None)
    assert blocks is not None
    plane = rng.standard_normal((1, 1, 24, 26))
    means = plane[0, 0].reshape(12, 2, 13, 2).mean(axis=(1, 3))
    wrong += blocks.size != 4 or apart(blocks.mean(plane)[0, 0], means) > 1e-12
    for numbers in (None, 100):
        chunked, bytes_ = TensorFilter.within(torch.zeros(3), 1e7 if numbers is None else 1e4)
        each = bytes_ / (chunked.numbers or 1)
        wrong += not (
            each == int(each) and each * (chunked.numbers or 0) <= (1e7 if numbers is None else 1e4) / 4 + each
        )
    wrong += Axes.of((2, 3, 20, 21), axes="BCYX", batches=True).channel != 1
    return wrong + (Axes.of((3, 2, 20, 21), axes="CBYX", batches=True).channel != 0)


def motion(rng: np.random.Generator) -> float:
    """Return by how many samples motion that is followed is off: from frame to frame, and within the picture."""
    from scipy.ndimage import gaussian_filter

    texture = gaussian_filter(rng.standard_normal((200, 220)), 1.5)
    path = np.array([(0, 0), (2, 1), (3, 5), (7, 6), (8, 3), (5, 2)])  # of the picture, which is another each time
    clip = np.stack([texture[60 - a : 156 - a, 60 - b : 164 - b] for a, b in path])
    lattice = Lattice.of(clip.shape, Grouping((2, 5, 5), 10, (2, 3, 3), (1, 5, 5)), run=6)
    found = follow(lattice, clip).motion.reshape(len(lattice.slices), len(lattice.rows), -1, 6, 2)
    worst, height, width = 0.0, 96 - 5, 104
    for n, z in enumerate(lattice.slices.tolist()):
        for k in range(-2, 4):
            if not 0 <= z + k < len(path):
                continue
            for i, top in enumerate(lattice.rows.tolist()):
                for j in range(found.shape[2]):
                    columns = lattice.columns[6 * j : 6 * j + 6]
                    own = path[z + k] - path[z]
                    if n == len(lattice.slices) - 1 and k in (0, 1):
                        own = own * 0  # the last frames stay, so that each pixel belongs to a patch
                    elif k in (0, 1):
                        own = np.clip(own, (-top, -columns[0]), (height - top, width - 5 - columns[-1]))
                    middle = top, (columns[0] + columns[-1]) // 2
                    if min(*middle, 96 - middle[0], 104 - middle[1]) > 30 or k in (0, 1):
                        off = np.abs(found[n, i, j, 2 + k] - own).max()
                        inside = min(*middle, 96 - middle[0], 104 - middle[1]) > 30
                        ends = found[n, i, j, 2 + k] + [top, columns[-1]] <= [height, width - 5]
                        worst = largest(worst, float(off) if inside else 0.0, float(k in (0, 1) and not ends.all()))
    return worst


# ---- steps and progress


class _Noting(PlainFilter):
    """A filter that notes how much of the noise a step is to leave."""

    def __init__(self) -> None:
        self.left: list[float] = []

    def step(self, groups: Any, images: Any, stage: Any, during: Any = lambda share: None) -> Any:
        """Note, and step."""
        self.left.append(stage.leave)
        return super().step(groups, images, stage, during)


def steps(rng: np.random.Generator) -> float:
    """Return errors of what steps leave of the noise, of velocities, and of traces of derivatives."""
    import torch

    from nlflow.denoising.derivatives import linearized
    from nlflow.denoising.noise import perturbation

    image, filter_ = rng.standard_normal((14, 15)) + 3.0 * (np.arange(15) > 7), _Noting()
    flow = GroupFlow(image, Grouping(4, 12, 5, 3), filter=filter_)
    solve(flow, t=5, integrator=RelaxedSemiImplicit(4, 0.7))
    worst = apart(filter_.left, [0.0, 0.7 * 0.75, 0.7 * 0.5, 0.7 * 0.25, 0.0])
    worst = largest(worst, apart(flow.velocity(image), flow.step(image)[0] - image))
    f = torch.from_numpy(image)
    map_ = linearized(f, 1.0, quality="fast")
    signs = torch.from_numpy(perturbation((3, *f.shape), rng=5))
    exact = np.mean([float((map_.vjp(one) * one).sum()) for one in signs.to(f)])
    return largest(worst, abs(map_.divergence(3, seed=5) / float(exact) - 1) / 1e3)


def shares(rng: np.random.Generator) -> float:
    """Return errors of shares of work that are told: of channels, of coarser images, of steps, and on a bar."""

    class Bar:
        n = 0.0

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *_: Any) -> None: ...

        def update(self, more: float) -> None:
            self.n += more

    bar, worst = Bar(), 0.0
    with mock.patch("nlflow.backends.progress.bar", return_value=bar), telling(True, "") as tell:
        assert tell is not None
        for share in (0.25, 0.5, 0.75):
            tell(share)
            worst = largest(worst, abs(bar.n - share))

    def heard(image: Any, *args: Any, **words: Any) -> tuple[list[float], Any]:
        said: list[float] = []
        info = denoise(image, *args, progress=said.append, return_info=True, **words)[1]
        return said, info

    colour = rng.standard_normal((20, 21, 3)) + np.arange(21)[:, None]
    told, _ = heard(colour, 1.0, separate=True, channel_axis=-1, quality="balanced")
    # Six steps of each channel: k steps of channel c are (c + k/6) / 3 of the work, with shares of a step between.
    near = [min(abs(one - (c + k / 6) / 3) for one in told) for c in range(3) for k in range(1, 7)]
    worst = largest(worst, *near, float(min(np.diff(told)) < -1e-12), abs(max(told) - 1), float(min(told) < 0))
    told, _ = heard(colour[..., 0], 1.0, quality="pixels", steps=4)  # weights are half of it
    worst = largest(worst, *(min(abs(one - 0.5 - k / 8) for one in told) for k in range(5)), float(max(told) > 1))
    low = np.exp(-25 * np.hypot(np.fft.fftfreq(16)[:, None], np.fft.fftfreq(16)))
    large = rng.standard_normal((100, 98)) + np.arange(98) / 9
    told, info = heard(large, noise=GaussianNoise(1.0, low), quality="fast")
    # Two coarser images, the coarsest first: 1, 4 and 16 of 21 parts.
    worst = largest(worst, *(min(abs(one - k / 21) for one in told) for k in (1, 5, 21)), float(max(told) > 1 + 1e-12))
    return largest(worst, abs(info.steps - 3.0), abs(info.parameters["coarser_images"] - 2.0))


def values(rng: np.random.Generator) -> float:
    """Return errors of what lies beside a value that says nothing, and of the samples next to it."""
    samples = rng.uniform(5.0, 6.0, (12, 13))
    samples[3:6, 4:8] = -7.0
    found = Beside.of(-7.0, samples, None)
    at = samples == -7.0
    beside = [
        samples[i, j] for i, j in itertools.product(range(12), range(13))
        if not at[i, j] and any(at[(i + a) % 12, (j + b) % 13] for a, b in ((1, 0), (-1, 0), (0, 1), (0, -1)))
    ]  # fmt: skip
    worst = apart(np.sort(found.away), np.sort(np.abs(np.array(beside) + 7)))
    others = np.array([-9.0, 5.0, 30.0])
    worst = largest(worst, abs(_next(others, -7.0) + 9), abs(_next(others, 20.0) - 30))
    # A rare sample below it, which is not among some of them: it is the next one.
    rare = Beside(-7.0, 2, 400, 80, 60, 0, 320, -9.0, 6.0, -9.0, 5.0, np.zeros(0))
    return largest(worst, float("the next is -9" not in rare.why(rng.uniform(5, 6, 300))))


def warned(rng: np.random.Generator, torch: Any) -> float:
    """Return how many warnings of nearly clean images tensors have otherwise than arrays."""
    wrong = 0
    i, j = np.mgrid[:64, :66]
    smooth = 100 + 50 * np.sin(i / 9) * np.cos(j / 7)
    for image in (smooth, smooth + rng.normal(0, 0.02, smooth.shape), smooth + rng.normal(0, 5, smooth.shape)):
        said = []
        for given in (image, torch.from_numpy(image)):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                denoise(given, quality="fast")
            said.append([str(one.message) for one in caught])
        wrong += said[0] != said[1]
    return float(wrong)


def run(context: Context) -> Outcome:
    for name, extra in (("torch", "torch"), ("dask", "distributed")):
        if importlib.util.find_spec(name) is None:
            raise CannotRunError(f"{name} is not installed: pip install 'nlflow[{extra}]'")
    import torch

    rng = np.random.default_rng(21)
    told = warned(rng, torch)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # hints at images so small
        return Outcome([
            Check("blocks against the whole: result, steps, memory, statistics, what is missing", blocks(rng), 1e-5),
            Check("films against the whole: results, frames, memory", films(rng), 1e-5),
            Check("places, reaches and windows of groups that differ from those one by one", lattices(rng), 0),
            Check("motion that is followed, in samples", motion(rng), 0),
            Check("what steps leave, velocities, and traces of derivatives", steps(rng), 1e-9),
            Check("shares of work", shares(rng), 1e-9),
            Check("what lies beside a value that says nothing", values(rng), 1e-12),
            Check("nearly clean images of which a tensor is told otherwise than an array", told, 0),
        ])  # fmt: skip


CLAIM = Claim(
    name="parts-of-images",
    title="Parts of an image are those of the whole, and shares of the work are told as they are",
    statement=(
        "Results in blocks and in windows of a film are those of the whole, as are the statistics that are joined, the "
        "steps, and the memory that is told. Patches of reference look the same from both ends; a sample looks "
        "2 (r + p − 1) samples far. Motion is followed from frame to frame. Step k of n leaves (1 − k/n) of a part of "
        "the noise. k steps of n are k/n of the work, coarser images a quarter of the next."
    ),
    source="derived; docs/scale; Hutchinson 1990, doi 10.1080/03610919008812866",
    run=run,
)
