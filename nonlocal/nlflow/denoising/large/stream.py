"""Clips that are read twice: to survey the whole, and to denoise it."""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nlflow.denoising.frame import Frame
from nlflow.denoising.given import NO_SAMPLE, Known, as_given, find_nodata, told_of
from nlflow.denoising.info import DenoiseInfo
from nlflow.denoising.large.arrays import (
    Wanted,
    counts_only,
    denoise_part,
    examined,
    info_of,
    levels_of,
    looked_at,
    widened,
)
from nlflow.denoising.large.survey import (
    Statistics,
    for_all,
    merged,
    middle_of,
    statistics_of,
    typical,
)
from nlflow.denoising.layout import Axes
from nlflow.denoising.noise.finding.sigma import estimate_sigmas
from nlflow.denoising.options import Options
from nlflow.denoising.residual import Figures, figures_in, places_of
from nlflow.errors import InputError, MemoryLimitError, format_bytes, memory_limit, warn_caller

Array = NDArray[Any]
Timed = tuple[int, int, Array]
#: Frames from whose noise that of all is estimated.
FIRST = 16
_MIDDLE = 96  # rows and columns of the middle of the first frames, by whose noise the kind is told
_AROUND = 24  # rows and columns around a place of them whose residual is looked at
_FILM = "a clip that is read in parts"
_LONG = 8  # times the margin: longer parts save little
_COPIES = 6  # of the samples of a part in single precision, beside the work of the flow


def surveyed(
    frames: Iterable[Array],
    sigma: Any = None,
    *,
    quality: str = "balanced",
    noise: Any = "auto",
    options: Options | None = None,
    **more: Any,
) -> Frame:
    """Read a clip once, and return what its parts need to know of the whole.

    Parameters
    ----------
    frames : iterable of array
        Of shape (H, W) or (H, W, C), all alike.
    sigma, quality, noise, options, **more
        As `nlflow.denoising.large.denoise_array`; by default sigma is the median over the first 16 frames,
        or less.
    """
    chosen = Options.of(options, more)
    chosen.refuse(("separate", "stopping"), _FILM)
    chosen.check(quality, 3)
    model = counts_only(noise, sigma, chosen.strength, _FILM)
    rest = iter(frames)
    first = list(itertools.islice(rest, FIRST))
    if not first:
        raise InputError("image: got a clip without frames, expected at least one")
    shape, begin = first[0].shape, np.stack(first)
    axes = Axes.of(begin.shape, None, "TYXC" if len(shape) == 3 else "TYX")
    nodata, why = find_nodata(begin, axes.channel)
    known = Known()
    if nodata is not None:
        known = Known(begin[nodata].ravel()[0], told=(f"in the first {len(first)} frames {told_of(nodata, why)}",))
    inner = (slice(0, 1), slice(0, shape[0]), slice(0, shape[1]))
    parts = [statistics_of(one[None], (number, 0, 0), inner, axes, model, known) for number, one in enumerate(first)]
    whole, count = merged(parts), len(first)
    for one in rest:
        part = statistics_of(one[None], (count, 0, 0), inner, axes, model, known)
        whole, count = merged([whole, part]), count + 1
    if not whole.count:
        raise InputError(NO_SAMPLE)
    axes = replace(axes, shape=(count, *shape))
    levels, verdict = None, None
    if model is None and sigma is not None:
        levels = levels_of(sigma, axes)
    elif model is None:
        looked = as_given(begin, replace(axes, shape=begin.shape), known=known)
        lost = [None] * len(first) if looked.missing is None else list(looked.missing)
        sigmas = [estimate_sigmas(one, where) for one, where in zip(looked.samples, lost, strict=True)]
        levels = for_all(typical(sigmas), whole)
        if noise == "auto":
            levels, verdict = examined(begin[:, *middle_of(shape[:2], _MIDDLE)], axes, whole, known, levels)
    wanted = Wanted(axes, begin.dtype, whole, known, quality, model, chosen, sigma is None and model is None)
    frame, texts = wanted.checked(levels, verdict, lambda frame: _figures(begin, whole, frame))
    for text in texts:
        warn_caller(text)
    return frame


def _figures(begin: Array, whole: Statistics, frame: Frame) -> Figures | None:
    """Return what the residual of the first frames shows, of which parts are looked at."""
    count, *sides = begin.shape[:3]
    found = []
    for place in places_of((count, *sides)):
        wide, corner, inner = widened(place, (None, _AROUND, _AROUND))
        found.append(looked_at(begin[tuple(wide)], place, corner, inner, frame))
    return figures_in(found, frame, *whole.ends_in(frame))


def window(frame: Frame, max_memory: float | None = None) -> tuple[int, int]:
    count, height, width = frame.shape
    allowed = memory_limit() if max_memory is None else max_memory
    margin = frame.halo[0]

    def needed(core: int) -> int:
        part = (min(core + 2 * margin, count), height, width)
        copies = _COPIES * math.prod(part) * frame.axes.channels * 4
        return copies + frame.bytes_needed(part)

    if needed(1) > allowed:
        raise MemoryLimitError(
            f"max_memory: {min(1 + 2 * margin, count)} frames of {width} x {height}, which one frame needs, take "
            f"{format_bytes(needed(1))} ({needed(1)} bytes), the limit is {format_bytes(allowed)}; raise max_memory, "
            "take quality='fast', or make the pictures smaller"
        )
    low, high = 1, min(count, max(_LONG * margin, 1))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if needed(middle) <= allowed else (low, middle - 1)
    return low, needed(low)


def denoise_frames(
    frames: Iterable[Timed], frame: Frame, max_memory: float | None = None, tell: Callable[[int], Any] = lambda n: None
) -> Iterator[tuple[Timed, Array]]:
    """Denoise the frames of a clip in its second reading; for given noise the result is that of the whole clip.

    Parameters
    ----------
    frames : iterable of (time, duration, array)
    frame : Frame
        Of the first reading of the same clip.
    max_memory : float, optional
        Bytes, for a window of frames; half of the physical memory by default.
    tell : callable
        Gets the number of frames that are done.

    Yields
    ------
    (time, duration, array), array
        A frame as it was read, and its estimate in the units of the input, float32 for integers of up to 16 bits.

    Raises
    ------
    InputError
        When there are fewer frames than in the first reading.
    """
    count, margin = frame.shape[0], frame.halo[0]
    core, _ = window(frame, max_memory)
    source, held = iter(frames), deque[Timed]()
    inside = tuple(slice(0, n) for n in frame.shape[1:])
    for start in range(0, count, core):
        stop, low = min(start + core, count), max(start - margin, 0)
        for _ in range(low - max(start - core - margin, 0) if start else 0):
            held.popleft()
        held.extend(itertools.islice(source, min(stop + margin, count) - low - len(held)))
        if len(held) != min(stop + margin, count) - low:
            raise InputError(f"image: got {low + len(held)} frames in the second reading after {count} in the first; "
                             "do not change the film while it is read")  # fmt: skip
        part = np.stack([one for _, _, one in held])
        inner = (slice(start - low, stop - low), *inside)
        result = denoise_part(part, (low, 0, 0), inner, frame, math.inf, alone=True)
        yield from zip(itertools.islice(held, start - low, stop - low), result, strict=True)
        tell(stop)


def told(frame: Frame, max_memory: float | None, residual: float) -> DenoiseInfo:
    core, memory = window(frame, max_memory)
    return replace(info_of(frame, "", memory, -(-frame.shape[0] // core)), residual=residual)
