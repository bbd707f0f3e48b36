"""`denoise` on torch tensors, with derivatives for white noise."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nlflow._array import is_tensor, root_mean_square, to_numpy
from nlflow.backends.memory import Need, free_bytes
from nlflow.denoising.columns import each_item
from nlflow.denoising.frame import (
    Frame,
    is_by_pixels,
    live_of,
    units_of,
)
from nlflow.denoising.groupwise import Groups, bytes_needed, in_tiles, problem
from nlflow.denoising.info import DenoiseInfo, doubts
from nlflow.denoising.layout import Axes, marks_of
from nlflow.denoising.looked import Looked
from nlflow.denoising.noise.finding.sigma import channel_levels, estimate_sigmas
from nlflow.denoising.noise.finding.verdict import examine
from nlflow.denoising.noise.models.base import Noise, NoiseEstimate
from nlflow.denoising.noise.names import choose_noise
from nlflow.denoising.noise.risk import perturbation
from nlflow.denoising.options import Options
from nlflow.denoising.patches import Grouping, TensorFilter
from nlflow.denoising.patches.lattice import three
from nlflow.denoising.residual import figures_of, milder
from nlflow.denoising.runs import EPSILON, Trail, Watch, telling, unrolled, within
from nlflow.denoising.sigmas import LEAST_VARIANCE, numbers_of, strengthened
from nlflow.errors import InputError, check_array, check_memory, check_tensor, warn_caller

Denoise = Callable[..., Any]
_FIRST = 0.9  # share of the progress at which the residual is looked at, which seldom asks for another flow
_TRACKED = 8  # planes that a step keeps for its derivative


def denoised_tensor(
    denoise: Denoise, image: Tensor, sigma: Any, options: Options, *, quality: str, noise: Any,
    channel_axis: int | None, axes: str | None, spacing: Any, mask: Any, keep: Any, return_info: bool, progress: Any,
) -> Any:  # fmt: skip
    if options.device != "cpu":
        raise InputError(f"device: got {options.device!r} for a tensor, which stays on {image.device}; leave it out")
    begun, image = time.perf_counter(), checked_image(image)
    for name, value in (("sigma", sigma), ("mask", mask), ("keep", keep)):
        beside(name, value, image)
    if options.separate:
        raise InputError("separate: got True for a tensor, expected False; name its channels as a batch (axes='BYX')")
    if isinstance(progress, Trail):
        raise InputError("progress: got a Trail for a tensor, expected True or a callable; a Trail keeps NumPy arrays")
    stopping, max_memory = options.stopping, options.max_memory
    placed = Axes.of(image.shape, channel_axis, axes, spacing, batches=True)
    placed.check_count()
    options.check(quality, len(placed.letters))
    check_flow(quality, placed)
    words = {"quality": quality, "noise": noise, "options": options}
    model, left = choose_noise("white" if stopping is not None and noise == "auto" else noise, sigma)
    items, tracked = placed.items(image.detach()), image.requires_grad and torch.is_grad_enabled()
    # What a mask hides may be infinite, which is no matter on the host.
    looked = Looked.at(items, some=not tracked) if mask is None else None
    found: Noisy | str
    if looked is None:
        found = "a mask of missing samples"
    elif looked.missing:
        found = "NaN, which counts as missing samples"
    elif not tracked and looked.says_nothing(items):  # a guess, for which no derivative is given up
        found = "samples that say nothing"
    else:
        found = Noisy.of(items, left, model)

    def on_host(tell: Any) -> Any:
        """Denoise as array."""
        made = _on_host(denoise, image, placed, {"sigma": sigma, "mask": mask, "keep": keep}, words, tell)
        return made if return_info else made[0]

    if looked is None or isinstance(found, str):
        if tracked:
            raise InputError(
                f"image: got a tensor that requires a gradient with {found}, which is met on the host without "
                "derivatives; detach it, or give sigma as the strength of white noise"
            )
        with telling(progress, quality) as tell:
            return on_host(tell)
    task = Items.of(image, found, placed, quality, options, keep, looked)
    with telling(progress, quality) as tell:
        judged = bool(found.found) and not tracked and options.strength == 1
        watch = Watch(limit=max_memory, tell=within(tell, 0.0, _FIRST) if judged else tell)
        results, told = [], list[dict[str, Any]]()
        for number, (one, f) in enumerate(task.parts(image)):
            part = replace(watch, tell=within(tell, number / len(task.flows), (number + 1) / len(task.flows)))
            with _guarded(one, f, max_memory), TensorFilter.held(f):
                u, known = _chosen(one, f, options, part, tracked)
            if judged and _is_doubted(one, f, u):
                return on_host(within(tell, _FIRST, 1.0))
            results.append((one, u))
            told.append(known)
        result = task.assembled(image, results)
        for number, (frame, sample, u) in enumerate(
            zip(task.frames, items, placed.items(result.detach()), strict=True)
        ):  # fmt: skip
            said = [frame.too_strong(looked.span(number))]
            if frame.found is not None:
                changed = root_mean_square(to_numpy(u - sample))
                said += doubts(to_numpy(sample), changed, frame.doubted, sample.ndim - 1)
            for text in filter(None, said):
                warn_caller(text)
        if tell is not None:
            tell(1.0)
    if not return_info:
        return result
    # Channels by their numbers: a mask of them would be copied to the device.
    removed = [
        change[..., channel].flatten()
        for frame, change in zip(task.frames, placed.items((image - result).detach()), strict=True)
        for channel in (range(change.shape[-1]) if frame.live is None else np.flatnonzero(frame.live).tolist())
    ]
    residual = root_mean_square(torch.cat(removed))
    return result, _info(task.frames, told, residual, begun)


def _is_doubted(one: Alike, f: Tensor, u: Tensor) -> bool:
    """Tell whether the residual of an item, in units of its noise, is not the noise that was found."""
    for frame, noisy, estimate in zip(one.frames, f, u, strict=True):
        known = replace(frame, exact=None if frame.exact is None else to_numpy(frame.exact))
        figures = figures_of(to_numpy(noisy), to_numpy(estimate), known)
        if figures is not None and milder(known, figures) is not None:
            return True
    return False


def _chosen(one: Alike, f: Tensor, options: Options, watch: Watch, tracked: bool) -> tuple[Tensor, dict[str, Any]]:
    """Return the estimate (b, ..., C) in units of noise that the preset or a rule chooses, and what is told."""
    stopping = options.stopping
    told = one.groups.told()
    told["method"] += f"; {TensorFilter().told(f, one.groups.preset.across)}"
    if stopping is None:
        path, told["tiles"], told["memory_bytes"] = one.paths(f, watch, TensorFilter() if tracked else None)
        return path[-1], told
    if tracked:
        raise InputError(
            f"stopping: got {stopping!r} with a tensor that requires a gradient, expected None; a choice between "
            "estimates has no derivative"
        )
    relative = torch.ones((), dtype=torch.float64, device=f.device)
    if one.variance is not None:
        relative = one.variance.sqrt()[..., None]
    inner, every = tuple(range(1, f.ndim - 1)), replace(watch, every=True)
    if stopping == "discrepancy":
        path, told["tiles"], told["memory_bytes"] = one.paths(f, every)
        squares = [((f - u) / relative).square().mean(dim=tuple(range(1, f.ndim)), dtype=torch.float64) for u in path]
        residuals = to_numpy(torch.stack(squares).sqrt())
        best = np.abs(residuals - 1).argmin(axis=0)
        said = f"discrepancy: rms residual of {residuals[best[0], 0]:.4g} sigma, the nearest to sigma"
    else:
        path, told["tiles"], told["memory_bytes"] = one.paths(f, replace(every, tell=within(watch.tell, 0.0, 0.5)))
        signs = torch.from_numpy(perturbation(tuple(f.shape), rng=options.seed)).to(f)
        # Groups of the moved samples are others, which a derivative for groups held still would not see.
        moved, *_ = one.paths(f + EPSILON * signs, replace(every, tell=within(watch.tell, 0.5, 1.0)))
        levels, risks = np.stack([frame.level for frame in one.frames]), []
        for u, v in zip(path, moved, strict=True):
            divergence = signs * (v - u).double() / EPSILON
            each = ((u - f).double().square() + relative**2 * (2 * divergence - 1)).mean(dim=inner)
            risks.append(np.mean(levels**2 * to_numpy(each), axis=1))
        best = np.argmin(risks, axis=0)
        told["risk"] = float(np.mean(np.min(risks, axis=0)))
        said = f"SURE: least estimated risk, of {len(path)} estimates the number {best[0] + 1}"
    told |= {"steps": int(best.max()) + 1, "stopped_by": said}
    return torch.stack([path[index][row] for row, index in enumerate(best)]), told


def _guarded(one: Alike, f: Tensor, limit: float | None) -> AbstractContextManager[None]:
    """Turn a device's "out of memory" into `MemoryLimitError`."""

    def free() -> int:
        return free_bytes(f.device) if limit is None else int(limit)

    @cache  # known once memory has run out
    def whole() -> tuple[int, float]:
        return one.bytes_needed(f, free())

    def needed(samples: int) -> int:
        total, each = whole()
        return int(total + each * (samples - f.numel()))

    need = Need(
        needed, f.numel(), f"in {one.precision}", "give max_memory, with which images are cut into parts, or close "
        "other programs that use the device", argument="image", unit="samples",
    )  # fmt: skip
    return need.guarded(str(f.device), free)


def _on_host(
    denoise: Denoise, image: Tensor, axes: Axes, given: dict[str, Any], words: dict[str, Any], tell: Any
) -> tuple[Tensor, DenoiseInfo]:
    """Denoise items one by one as arrays, whose flow runs on the device of the tensor."""
    word = axes.word.replace("B", "")
    channel = word.index("C") if "C" in word else None
    places = {"axes": word} if len(axes.letters) == 3 else {"channel_axis": channel}
    device = "cuda" if image.is_cuda else "cpu-tensors"

    def array(value: Any) -> Any:
        return to_numpy(value) if is_tensor(value) else value

    def of_item(value: Any) -> Callable[[tuple[int, ...]], Any]:
        own = is_tensor(value) and axes.batch is not None and tuple(value.shape) in whole
        return lambda index: array(value.select(axes.batch, *index) if own else value)

    whole = (axes.shape, tuple(n for axis, n in enumerate(axes.shape) if axis != axes.channel))
    items = () if axes.batch is None else (axes.shape[axes.batch],)
    own = {name: of_item(value) for name, value in given.items()}
    with torch.cuda.device(image.device) if image.is_cuda else nullcontext():
        results, info = each_item(
            denoise, items, of_item(image), own, tell or False, spacing=axes.spacing, device=device, **places, **words
        )
    made = results[0] if axes.batch is None else np.stack(results, axes.batch)
    return torch.from_numpy(made).to(image.device), info


def _info(frames: list[Frame], told: list[dict[str, Any]], residual: float, begun: float) -> DenoiseInfo:
    """Return what was done; of several flows the largest numbers, and parameters where they share them."""
    first = next((frame for frame in frames if frame.idle), frames[0]).told()
    if told:
        risks = [one["risk"] for one in told if "risk" in one]
        shared = all(one["parameters"] == told[0]["parameters"] for one in told)
        first |= {
            **told[0],
            "parameters": told[0]["parameters"] if shared else {},
            "risk": float(np.mean(risks)) if risks else None,
            **{name: max(one[name] for one in told) for name in ("steps", "tiles", "memory_bytes")},
        }
    varying = next((frame.noise for frame in frames if frame.variance is not None), first["noise"])
    sigma = root_mean_square(np.concatenate([frame.level for frame in frames]))
    return DenoiseInfo(
        **{**first, "sigma": sigma, "noise": varying}, residual=residual, seconds=time.perf_counter() - begun
    )


@dataclass(frozen=True)
class Noisy:
    """White noise of a tensor's items."""

    sigma: Any  # one number, one a channel, one an item and channel, or a map
    estimated: bool = False
    found: tuple[NoiseEstimate, ...] = ()  # what was found out about each item, where it was

    @classmethod
    def of(cls, items: Tensor, sigma: Any, model: Noise | str) -> Noisy | str:
        if not isinstance(model, str):
            white = model.white_sigma if sigma is None else None
            return f"noise={type(model).__name__}" if white is None else cls(white)
        if sigma is not None:
            return cls(sigma)
        samples, found = [to_numpy(one) for one in items], []
        live = [_varies(one) for one in samples]
        if model == "auto":
            found = [examine(one[..., which], None) for one, which in zip(samples, live, strict=True)]
            other = [one for one in found if not one.is_white]
            if other or items.ndim == 5:
                return f"noise that was found to be {(other or found)[0].model.describe()}"
        levels = np.zeros((len(items), items.shape[-1]))
        for level, one, which in zip(levels, samples, live, strict=True):
            level[which] = channel_levels(estimate_sigmas(one[..., which], None))
        return cls(levels, True, tuple(found))


def _varies(samples: NDArray[Any]) -> Any:
    """Return which channels of samples (..., C) vary, or all of them where none does."""
    live = live_of(np.ptp(samples.reshape(-1, samples.shape[-1]), axis=0) > 0)
    return slice(None) if live is None else live


def checked_image(image: Tensor) -> Tensor:
    check_tensor("image", image)
    if image.device.type not in ("cpu", "cuda"):
        raise InputError(
            f"image: it is on {image.device}, expected a tensor on cpu or cuda (mps has no float64, in which sums are "
            "formed); move it with .cpu()"
        )
    if image.dtype == torch.bfloat16:
        raise InputError("image: got bfloat16, whose 8 binary digits are fewer than a grey level has, expected float32 "
                         "or float64; convert it with .float()")  # fmt: skip
    if not (image.is_floating_point() or image.is_complex()):
        raise InputError(f"image: got a tensor of {image.dtype}, expected float32 or float64; convert it with .float()")
    if image.is_complex() or image.numel() == 0 or image.element_size() == 1:
        check_array("image", image)
    checked: Tensor = image.float() if image.element_size() < 4 else image
    return checked


def beside(name: str, value: Any, image: Tensor) -> None:
    """Raise `InputError` for an argument on another device than the image, or one that requires a gradient."""
    if is_tensor(value) and value.device != image.device:
        raise InputError(f"{name}: it is on {value.device}, expected {image.device}, as the image; move one of them")
    if isinstance(value, np.ndarray) and value.ndim:
        raise InputError(
            f"{name}: got an array beside a tensor on {image.device}, expected a tensor there; use torch.as_tensor"
        )
    if getattr(value, "requires_grad", False):
        raise InputError(f"{name}: got a tensor that requires a gradient, expected a constant one; detach it")


def check_flow(quality: str, axes: Axes) -> None:
    if is_by_pixels(quality, axes):
        raise InputError(
            f"quality: got {quality!r} for a tensor, a flow of pixels on the CPU alone, expected 'fast', 'balanced' or "
            "'best'; or denoise the NumPy array (.cpu().numpy())"
        )
    if axes.moving:
        raise InputError("axes: got a clip for a tensor, whose search follows no motion, expected images or volumes; "
                         "denoise the NumPy array (.cpu().numpy()), or name its first axis Z")  # fmt: skip


def _groups(frame: Frame) -> Groups:
    flow = frame.flow
    assert isinstance(flow, Groups)  # tensors know no other flow
    return flow


def frames_of(items: Tensor, noisy: Noisy, axes: Axes, quality: str, options: Options, looked: Looked) -> list[Frame]:
    check_flow(quality, axes)
    sigma, inner = noisy.sigma, tuple(range(1, items.ndim - 1))
    means, spans = looked.means, looked.high - looked.low
    numbers = numbers_of(sigma, axes.spatial, items.shape[-1], axes.channel is not None, len(items))
    maps = None
    if numbers is not None:
        numbers = strengthened(numbers, options.strength)
    elif is_tensor(sigma):
        maps = axes.spread("sigma", check_array("sigma", sigma).double()) * options.strength
        if float(maps.min()) < 0:
            raise InputError(f"sigma: got {float(maps.min()):g}, expected values >= 0")
        squares = maps.square().mean(dim=inner)
        numbers = to_numpy(squares.sqrt())
    else:
        each = "" if axes.channel is None else f", or ({items.shape[-1]},) for one a channel"
        raise InputError(f"sigma: got numbers of shape {np.shape(sigma)}, expected one{each}; or a tensor as a map")
    frames = []
    for number, item in enumerate(items.detach()):
        live = live_of(spans[number] > 0)
        own = slice(None) if live is None else live
        _, level, hidden, idle = units_of(numbers[number][own], spans[number][own])
        exact, variance = None, None
        if maps is not None:
            which = slice(None) if live is None else torch.from_numpy(live).to(items.device)
            each, mean = maps[number][..., which], squares[number][which]
            exact = each == 0
            exact = exact if bool(exact.any()) else None
            if bool((each.flatten(0, -2).amax(dim=0) > each.flatten(0, -2).amin(dim=0)).any()):
                variance = (each.square() / torch.where(mean > 0, mean, 1)).mean(dim=-1).clamp(min=LEAST_VARIANCE)
        elif is_tensor(sigma) or np.ndim(sigma):
            zero = numbers[number][own] == 0
            hidden = zero if hidden is None else hidden | zero
        if hidden is not None and hidden.any():
            placed = torch.from_numpy(hidden).to(items.device)
            exact = placed if exact is None else exact | placed
        found = noisy.found[number] if noisy.found else None
        offset = means[number][own]
        frame = Frame(axes, quality, options, offset, level, idle, exact=exact, live=live, variance=variance,
                      found=found, estimated=noisy.estimated, sigma=root_mean_square(level))  # fmt: skip
        if not idle:
            weakest = 1.0 if variance is None else float(variance.amin().sqrt())
            frame = frame.with_flow(looked.spread(number, own, item, offset, level), weakest)
        frames.append(frame)
    return frames


@dataclass(frozen=True)
class Items:
    """A tensor's items with their flows."""

    axes: Axes
    frames: list[Frame]
    flows: list[Alike]
    kept: Tensor | None  # (B, ..., C), where the result is the input

    @classmethod
    def of(
        cls, image: Tensor, noisy: Noisy, axes: Axes, quality: str, options: Options, keep: Any, looked: Looked
    ) -> Items:
        items = axes.items(image.detach())
        frames, kept = frames_of(items, noisy, axes, quality, options, looked), None
        if keep is not None:
            marked, told = marks_of("keep", to_numpy(keep))
            if told:
                warn_caller(told)
            kept = axes.spread("keep", torch.from_numpy(marked).to(keep.device)).any(dim=-1, keepdim=True)
        kinds: dict[Any, list[int]] = {}
        for number, frame in enumerate(frames):
            if not frame.idle:
                flow, live = _groups(frame), None if frame.live is None else frame.live.tobytes()
                alone = number if len(axes.letters) == 3 else -1  # a volume has no axis left to lie beside another
                key = (flow.groupings, flow.precision, live, frame.variance is None, alone)
                kinds.setdefault(key, []).append(number)
        task = cls(axes, frames, [Alike.of(which, frames, items) for which in kinds.values()], kept)
        if image.requires_grad and torch.is_grad_enabled():
            task.check_moves()
        return task

    def check_moves(self) -> None:
        for number, frame in enumerate(self.frames):
            if frame.idle:
                item = f", item {number}" if self.axes.batch is not None else ""
                raise InputError(
                    f"image: {frame.idle}{item}, so that it is returned unchanged and has no derivative; detach it, or "
                    "leave it out"
                )

    def parts(self, image: Tensor) -> list[tuple[Alike, Tensor]]:
        items = self.axes.items(image)
        return [(one, one.observe(items)) for one in self.flows]

    def differentiable(self, image: Tensor, filters: Sequence[TensorFilter], limit: float | None) -> Tensor:
        found = [
            (one, one.paths(f, Watch(limit=limit), filter)[0][-1])
            for (one, f), filter in zip(self.parts(image), filters, strict=True)
        ]
        return self.assembled(image, found)

    def assembled(self, image: Tensor, found: list[tuple[Alike, Tensor]]) -> Tensor:
        items = self.axes.items(image)
        rows: list[Tensor] = list(items)
        for one, u in found:
            one.put(rows, items, u)
        whole = torch.stack(rows)
        back: Tensor = self.axes.back(whole if self.kept is None else torch.where(self.kept, items, whole))
        return back


@dataclass(frozen=True)
class Alike:
    """Items with the same groupings, precision and channels, which lie side by side in one flow."""

    which: list[int]  # their numbers among all items
    frames: list[Frame]
    offset: Tensor  # (b, 1, ..., C), what is subtracted, in float64 as the next two
    level: Tensor  # (b, 1, ..., C), what is divided by
    colours: Tensor  # (b, C, C), the channels that are not correlated, as rows
    variance: Tensor | None  # (b, ...)
    live: Tensor | None  # numbers of the channels that vary, where not all do

    @classmethod
    def of(cls, which: list[int], frames: list[Frame], items: Tensor) -> Alike:
        own, device = [frames[number] for number in which], items.device
        count, channels = len(own), len(own[0].level)
        flat = (count, *(1 for _ in items.shape[1:-1]), channels)
        told = [np.stack([frame.offset for frame in own]), np.stack([frame.level for frame in own]),
                np.stack([_groups(frame).colours for frame in own])]  # fmt: skip
        placed = torch.from_numpy(np.concatenate([one.astype(np.float64).ravel() for one in told])).to(device)
        offset, level, colours = torch.split(placed, [one.size for one in told])
        maps = [frame.variance for frame in own]
        live = None if own[0].live is None else torch.from_numpy(np.flatnonzero(own[0].live)).to(device)
        variance = None if maps[0] is None else torch.stack(maps)
        return cls(
            which, own, offset.view(flat), level.view(flat), colours.view(count, channels, channels), variance, live
        )

    @property
    def groups(self) -> Groups:
        return _groups(self.frames[0])

    @property
    def precision(self) -> torch.dtype:
        return torch.float32 if self.groups.precision == np.float32 else torch.float64

    def observe(self, items: Tensor) -> Tensor:
        own = items if len(self.which) == len(items) else torch.stack([items[number] for number in self.which])
        own = own if self.live is None else own.index_select(-1, self.live)
        return ((own - self.offset) / self.level).to(items.dtype)

    def put(self, rows: list[Tensor], items: Tensor, u: Tensor) -> None:
        found = (u * self.level + self.offset).to(items.dtype)
        for number, frame, row in zip(self.which, self.frames, found, strict=True):
            item = items[number] if self.live is None else items[number].index_select(-1, self.live)
            row = row if frame.exact is None else torch.where(frame.exact, item, row)
            rows[number] = row if self.live is None else items[number].index_copy(-1, self.live, row)

    def flow(self, f: Tensor) -> tuple[Tensor, Tensor | None, tuple[Grouping, ...]]:
        """Return the signal of a flow, its variance, and its groupings; images are slices, signals rows."""
        mixed = self._mixed(f, self.colours.mT).to(self.precision)
        variance = None
        if self.variance is not None:
            variance = self.variance[..., None].to(self.precision).expand(mixed.shape)
        if len(mixed) == 1:
            return mixed[0], None if variance is None else variance[0], self.groups.groupings
        signals = mixed.ndim == 3
        groupings = tuple(_apart(grouping, signals) for grouping in self.groups.groupings)
        if signals:
            mixed, variance = mixed[None], None if variance is None else variance[None]
        return mixed, variance, groupings

    def back(self, u: Tensor, like: Tensor) -> Tensor:
        return self._mixed(u.reshape(like.shape), self.colours).to(like.dtype)

    def _mixed(self, f: Tensor, matrices: Tensor) -> Tensor:
        # One channel after the other: a caller may have allowed products of matrices to lose digits.
        flat, columns = f.flatten(1, -2), matrices.to(f.dtype)
        parts = [flat[..., c : c + 1] * columns[:, c : c + 1] for c in range(f.shape[-1])]
        return torch.stack(parts).sum(dim=0).view(f.shape) if len(parts) > 1 else parts[0].view(f.shape)

    def paths(self, f: Tensor, watch: Watch, filter: TensorFilter | None = None) -> tuple[list[Tensor], int, int]:
        preset, (signal, variance, groupings) = self.groups.preset, self.flow(f)
        options = {} if variance is None else {"variance": variance}
        limit = free_bytes(f.device) if watch.limit is None else watch.limit
        chunked, working = TensorFilter.within(signal, limit)
        if filter is None:
            make = partial(problem, filter=chunked)
            path, tiles, memory = in_tiles(
                signal, preset, groupings, variance, None, make, replace(watch, limit=limit), working
            )
        else:
            memory = _bytes(signal, groupings, preset.steps, working)
            memory += _TRACKED * preset.steps * signal.nbytes
            check_memory("image: its flow with derivatives", memory, "denoise smaller parts, or detach it", limit)
            path, tiles = unrolled(problem(signal, preset, groupings, filter=filter, **options)), 1
        return [self.back(u, f) for u in (path if watch.every else path[-1:])], tiles, memory

    def bytes_needed(self, f: Tensor, limit: float) -> tuple[int, float]:
        signal, _, groupings = self.flow(f)
        working = TensorFilter.within(signal, limit)[1]
        needed = _bytes(signal, groupings, self.groups.preset.steps, working)
        return needed, (needed - working) / f.numel()


def _bytes(signal: Tensor, groupings: tuple[Grouping, ...], steps: int, working: int) -> int:
    shape = (signal.shape[-1], *three(tuple(signal.shape[:-1])))
    return bytes_needed(shape, groupings, steps, signal.itemsize, working)


def _apart(grouping: Grouping, signals: bool) -> Grouping:
    """Return a grouping that has no extent along the axis of the items."""

    def along(name: str, least: int) -> tuple[int, int, int]:
        _, b, c = grouping.along(name)
        return (least, least, c) if signals else (least, b, c)

    means = None if grouping.means is None else _apart(grouping.means, signals)
    return Grouping(along("patch", 1), grouping.neighbours, along("radius", 0), along("stride", 1), means)
