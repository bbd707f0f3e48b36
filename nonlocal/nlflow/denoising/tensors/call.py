"""`denoise` on torch tensors: from samples to units of their noise, flows of groups on their device, and back.

Noise is white here. What a model of it does, and what is missing, is met on the host: the image is copied there and
back once, and the flow alone runs on the device.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nlflow._array import is_tensor, root_mean_square, to_numpy
from nlflow.denoising.doubts import doubts
from nlflow.denoising.groupwise import described
from nlflow.denoising.info import DenoiseInfo
from nlflow.denoising.noise import Noise, NoiseEstimate
from nlflow.denoising.noise.estimation import channel_levels, estimate_sigmas
from nlflow.denoising.noise.names import choose_noise
from nlflow.denoising.noise.risk import perturbation
from nlflow.denoising.noise.verdict import examine
from nlflow.denoising.options import Options
from nlflow.denoising.patches import TensorFilter
from nlflow.denoising.progress import Trail, telling, within
from nlflow.denoising.runs import Watch
from nlflow.denoising.selection import EPSILON
from nlflow.denoising.tensors.axes import Axes, beside, check_tensor
from nlflow.denoising.tensors.flows import Alike, TensorTask, free_bytes
from nlflow.errors import InputError, MemoryLimitError, NlflowWarning, format_bytes

Denoise = Callable[..., Any]


@dataclass(frozen=True)
class Noisy:
    """The noise of a tensor's items, where it is white.

    Attributes
    ----------
    sigma : number, sequence or tensor
        As `Units.of` takes it.
    estimated : bool
    found : list of NoiseEstimate
        What was found out about each item; empty where the noise was given.
    """

    sigma: Any
    estimated: bool = False
    found: tuple[NoiseEstimate, ...] = ()

    @classmethod
    def of(cls, items: Tensor, sigma: Any, model: Noise | str) -> Noisy | str:
        """Return the noise of items (B, ..., C), or why it is met on the host; estimates are constants of the host."""
        if not isinstance(model, str):
            white = model.white_sigma if sigma is None else None
            return f"noise={type(model).__name__}" if white is None else cls(white)
        if sigma is not None:
            return cls(sigma)
        samples, found = [to_numpy(one) for one in items], []
        if model == "auto":
            found = [examine(one, None) for one in samples]
            other = [one for one in found if not one.is_white]
            if other or items.ndim == 5:
                return f"noise that was found to be {(other or found)[0].model.describe()}"
        levels = [channel_levels(estimate_sigmas(one, None)) for one in samples]
        return cls(np.stack(levels), True, tuple(found))


def denoised_tensor(
    denoise: Denoise, image: Tensor, sigma: Any, options: Options, *, quality: str, noise: Any,
    channel_axis: int | None, axes: str | None, spacing: Any, mask: Any, keep: Any, return_info: bool, progress: Any,
) -> Any:  # fmt: skip
    """Return what `nlflow.denoise` says of tensors; `denoise` is that function, for what is met on the host."""
    if options.device != "cpu":
        raise InputError(f"device: got {options.device!r} for a tensor, which stays on {image.device}; leave it out")
    begun, image = time.perf_counter(), check_tensor(image)
    for name, value in (("sigma", sigma), ("mask", mask), ("keep", keep)):
        beside(name, value, image)
    if options.separate:
        raise InputError("separate: got True for a tensor, expected False; name its channels as a batch (axes='BYX')")
    if isinstance(progress, Trail):
        raise InputError("progress: got a Trail for a tensor, expected True or a callable; a Trail keeps NumPy arrays")
    stopping, max_memory = options.stopping, options.max_memory
    placed = Axes.of(tuple(image.shape), channel_axis, axes, spacing)
    options.check(quality, len(placed.layout.letters))
    words = {"quality": quality, "noise": noise, "options": options}
    model, left = choose_noise("white" if stopping is not None and noise == "auto" else noise, sigma)
    items = placed.items(image.detach())
    found = "a mask of missing samples" if mask is not None else Noisy.of(items, left, model)
    tracked = image.requires_grad and torch.is_grad_enabled()
    if isinstance(found, str):
        if tracked:
            raise InputError(
                f"image: got a tensor that requires a gradient with {found}, which is met on the host without "
                "derivatives; detach it, or give sigma as the strength of white noise"
            )
        with telling(progress, quality) as tell:
            given = {"sigma": sigma, "mask": mask, "keep": keep}
            return _on_host(denoise, image, placed, given, words, tell, return_info)
    task = TensorTask.of(image, found.sigma, placed, quality, options.strength, keep)
    with telling(progress, quality) as tell:
        watch = Watch(limit=max_memory, tell=tell)
        results, told = [], []
        for number, (one, f) in enumerate(task.parts(image)):
            part = replace(watch, tell=within(tell, number / len(task.flows), (number + 1) / len(task.flows)))
            with _guarded(one, f, max_memory):
                u, said = _chosen(task, one, f, options, part, tracked)
            results.append((one, u))
            told.append(said)
        result = task.assembled(image, results)
        for sample, u, estimate in zip(items, placed.items(result.detach()), found.found, strict=False):
            for text in doubts(to_numpy(sample), to_numpy(u), estimate):
                warnings.warn(text, NlflowWarning, stacklevel=5)
        if tell is not None:
            tell(1.0)
    if not return_info:
        return result
    return result, _info(task, found, quality, told, image, result, begun)


def _chosen(
    task: TensorTask, one: Alike, f: Tensor, options: Options, watch: Watch, tracked: bool
) -> tuple[Tensor, dict[str, Any]]:
    """Return the estimate (b, ..., C) in units of noise that the preset or a rule chooses, and what is told."""
    stopping = options.stopping
    told: dict[str, Any] = {**described(one.groupings), "steps": one.preset.steps + 1,
                            "stopped_by": "all steps of the preset were taken"}  # fmt: skip
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
        levels, risks = task.units.level[one.which], []
        for u, v in zip(path, moved, strict=True):
            divergence = signs * (v - u).double() / EPSILON
            each = ((u - f).double().square() + relative**2 * (2 * divergence - 1)).mean(dim=inner)
            risks.append(np.mean(levels**2 * to_numpy(each), axis=1))
        best = np.argmin(risks, axis=0)
        told["risk"] = float(np.mean(np.min(risks, axis=0)))
        said = f"SURE: least estimated risk, of {len(path)} estimates the number {best[0] + 1}"
    told |= {"steps": int(best.max()) + 1, "stopped_by": said}
    return torch.stack([path[index][row] for row, index in enumerate(best)]), told


@contextmanager
def _guarded(one: Alike, f: Tensor, limit: float | None) -> Iterator[None]:
    """Turn a device's "out of memory" into `MemoryLimitError`."""
    try:
        yield
    except RuntimeError as error:  # which torch.OutOfMemoryError is; other devices raise nothing more special
        if not any(words in str(error).lower() for words in ("out of memory", "can't allocate memory")):
            raise
        free = free_bytes(f) if limit is None else int(limit)
        needed, each = one.bytes_needed(f, free)
        fits = min(max(int((free - (needed - each * f.numel())) / each), 0), f.numel() // 2)
        raise MemoryLimitError(
            f"image: {f.numel()} samples in {one.precision} need about {format_bytes(needed)} on {f.device}, where "
            f"{format_bytes(free)} are free; about {fits} samples fit at most: give max_memory, with which images are "
            "cut into parts, or close other programs that use the device"
        ) from error


def _on_host(
    denoise: Denoise, image: Tensor, axes: Axes, given: dict[str, Any], words: dict[str, Any], tell: Any, info: bool
) -> Any:
    """Return the result of the image as an array, whose flow runs on the device of the tensor."""
    if axes.batch is not None:
        return _one_by_one(denoise, image, axes, given, words, tell, info)
    arrays = {name: to_numpy(value) if is_tensor(value) else value for name, value in given.items()}
    letters = {"channel_axis": axes.channel} if len(axes.layout.letters) < 3 else {"axes": axes.word}
    device = "cuda" if image.is_cuda else "cpu-tensors"
    with torch.cuda.device(image.device) if image.is_cuda else nullcontext():
        made = denoise(
            to_numpy(image), **arrays, **letters, **words, spacing=axes.layout.spacing, device=device,
            return_info=True,
            progress=tell or False,
        )  # fmt: skip
    result = torch.from_numpy(made[0]).to(image.device)
    return (result, made[1]) if info else result


def _one_by_one(
    denoise: Denoise, image: Tensor, axes: Axes, given: dict[str, Any], words: dict[str, Any], tell: Any, info: bool
) -> Any:
    """Return the results of the items of a batch."""
    batch, count, results = int(axes.batch or 0), image.shape[axes.batch or 0], []
    whole = {tuple(image.shape), tuple(n for axis, n in enumerate(image.shape) if axis != axes.channel)}
    for number, item in enumerate(image.unbind(batch)):
        own = {
            name: value.select(batch, number) if is_tensor(value) and tuple(value.shape) in whole else value
            for name, value in given.items()
        }
        part = within(tell, number / count, (number + 1) / count)
        alone = Axes.of(tuple(item.shape), None, axes.word.replace("B", ""), axes.layout.spacing)
        results.append(_on_host(denoise, item, alone, own, words, part, True))
    result = torch.stack([one for one, _ in results], batch)
    return (result, replace(results[0][1], columns=tuple(one for _, one in results))) if info else result


def _info(
    task: TensorTask, noisy: Noisy, quality: str, told: list[dict[str, Any]], image: Tensor, result: Tensor,
    begun: float,
) -> DenoiseInfo:  # fmt: skip
    """Return what was done; of several flows the largest numbers, and parameters where they share them."""
    idle = next(iter(filter(None, task.units.idle)), "")
    said: dict[str, Any] = {"functional": "none", "stopped_by": f"returned unchanged: {idle}"}
    if told:
        risks = [one["risk"] for one in told if "risk" in one]
        shared = all(one["parameters"] == told[0]["parameters"] for one in told)
        said = {
            **told[0],
            "parameters": told[0]["parameters"] if shared else {},
            "risk": float(np.mean(risks)) if risks else None,
            **{name: max(one[name] for one in told) for name in ("steps", "tiles", "memory_bytes")},
        }
    return DenoiseInfo(
        sigma=root_mean_square(task.units.told),
        sigma_estimated=noisy.estimated,
        noise="white noise" + (", varying" if task.units.variance is not None else ""),
        quality=quality,
        residual=root_mean_square((image - result).detach()),
        confidence=noisy.found[0].confidence if noisy.found else "",
        seconds=time.perf_counter() - begun,
        **said,
    )
