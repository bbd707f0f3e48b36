"""One job of the command ``nonlocal denoise`` for a film that is too long for the memory: some frames at a time."""

from __future__ import annotations

import math
import time
from array import array
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from nlflow.backends.interrupts import stopping
from nlflow.denoising.noise import Noise
from nlflow.desk import files
from nlflow.desk.formats.axes import settle
from nlflow.desk.terminal import Log, progress_bar, warnings_kept
from nlflow.errors import InputError, memory_limit
from nlflow.store.atomic import write_atomic

if TYPE_CHECKING:
    from nlflow.desk.commands.inputs import Options
    from nlflow.desk.commands.jobs import Job
    from nlflow.desk.formats.film import VideoReader

_BYTES = 40  # of a sample, while a clip is denoised as a whole


def film_to_stream(job: Job, options: Options) -> VideoReader | None:
    """Return the film of a job that does not fit the memory as a whole; None for what is denoised as a whole.

    So are films with files beside them, with noise that only a whole shows, and with a rule to stop.
    """
    if "video" not in (files.format_of(job.source), files.format_of(job.target)) or not job.source.is_file():
        return None
    if files.format_of(job.source) != files.format_of(job.target):
        return None
    if options.flat is not None:
        raise InputError(f"--flat: got {job.source}, a film, expected an image")
    words = options.words
    model = words["noise"]
    if job.beside or job.figure is not None or words["stopping"] is not None or options.fill_nan:
        return None
    if isinstance(model, Noise) and not model.in_blocks:
        return None
    from nlflow.desk.formats.film import VideoReader
    from nlflow.desk.formats.video import length

    reader = VideoReader(job.source)
    own = "TYXC" if len(reader.info.shape) == 3 else "TYX"
    if options.axes not in (None, own) or options.spacing is not None or options.kind is not None:
        return None
    count = length(reader.info)
    fits = count > 0 and _BYTES * count * math.prod(reader.info.shape) <= _limit(options)
    return None if fits or options.channel_axis is not None else reader


def _limit(options: Options) -> float:
    given = options.words["max_memory"]
    return float(memory_limit() if given is None else given)


def denoise_film(
    job: Job, reader: VideoReader, options: Options, *, progress: bool | Log, tell: Callable[[str, str], None],
    begin: Callable[[], None] = lambda: None,
) -> dict[str, Any]:  # fmt: skip
    """Denoise a film frame by frame; see `nlflow.desk.commands.denoise_file.denoise_file`.

    The film is read twice: what all of it decides is found first, so that the result has the bits of the whole, and a
    film that was cut off is refused before any work.
    """
    from nlflow.denoising.large.stream import FIRST, denoise_frames, surveyed, told, window
    from nlflow.desk.formats.film import VideoWriter
    from nlflow.desk.formats.film_coding import QUALITY
    from nlflow.desk.formats.video import clip

    start, info, words = time.perf_counter(), reader.info, options.words
    if words["device"] not in ("auto", "cpu"):
        raise InputError(f"device: got {words['device']!r} for a film, whose search follows motion on the CPU alone, "
                         "expected 'cpu'")  # fmt: skip
    for name in ("width", "patch_size", "search_radius", "fidelity", "steps"):
        if words[name] is not None:
            raise InputError(f"{name}: got {words[name]} for a volume or a clip, whose qualities are all flows of "
                             "groups; leave it out")  # fmt: skip
    limit, coding = _limit(options), options.video_quality
    times, lengths = array("q"), array("q")

    def noted() -> Any:
        for moment, span, frame in reader:
            times.append(moment)
            lengths.append(span)
            yield frame

    with stopping(), warnings_kept() as warned:
        found = surveyed(noted(), options.sigma, **{key: words[key] for key in ("quality", "noise", "strength")})
        shape = (len(times), *info.shape)
        blank = np.broadcast_to(np.zeros((), info.dtype), shape)  # one number, in the shape of all frames
        media = settle(clip(info, blank, times, lengths), options.axes, None)
        if coding is not None:
            media = replace(media, extras={**media.extras, "video_quality": coding})
        notes = [*media.notes, *files.check_output(job.target, media)]
        core, _ = window(found, limit)
        notes.append(f"{job.source}: is denoised in parts of {core} frames, so that it fits the memory")
        if found.estimated:
            first = min(FIRST, len(times))
            notes.append(f"{job.source}: the noise is taken to be white, and as strong as in the first {first} frames")
        for text in notes:
            tell("note", text)
        begin()
        squares = 0.0

        def write(stream: BinaryIO) -> None:
            nonlocal squares
            name = Path(job.target.name)
            with (
                progress_bar(not progress, desc="denoise", unit="frame", total=len(times)) as bar,
                VideoWriter(stream, name, info, QUALITY if coding is None else coding) as writer,
            ):
                parts = denoise_frames(reader, found, limit)
                for number, ((moment, span, frame), estimate) in enumerate(parts):
                    squares += float(np.sum(np.square(estimate - frame.astype(estimate.dtype)), dtype=np.float64))
                    writer.write(moment, span, files.stored(estimate, info.dtype, "video", info.bits))
                    bar.update()
                    if callable(progress):
                        progress((number + 1) / len(times))

        write_atomic(job.target, write)
        details = told(found, limit, math.sqrt(squares / math.prod(shape))).as_dict()
    details["seconds"] = time.perf_counter() - start
    for text in warned:
        tell("warning", text)
    return {
        "input": str(job.source),
        "output": str(job.target),
        "figure": None,
        "kind": media.kind,
        "shape": shape,
        "channel_axis": media.channel_axis,
        "axes": media.axes,
        "spacing": media.spacing,
        "dtype": str(info.dtype),
        "sigma_given": options.sigma,
        "missing": 0,
        "kept": 0,
        "denoise": details,
        "notes": notes,
        "warnings": list(dict.fromkeys(warned)),
        "seconds_total": time.perf_counter() - start,
    }
