"""The command ``nonlocal denoise`` for one file."""

from __future__ import annotations

import math
import shutil
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from nlflow.backends.interrupts import stopping
from nlflow.denoising.noise.names import has_sigma
from nlflow.desk import companions, files
from nlflow.desk.commands.jobs import Job
from nlflow.desk.files import Array, Media, Writing
from nlflow.desk.formats.axes import plane, words_of
from nlflow.desk.terminal import Log, in_shell, named, progress_bar, warnings_kept
from nlflow.errors import FileFormatError, InputError, memory_limit
from nlflow.store.atomic import write_atomic, write_content

if TYPE_CHECKING:
    from nlflow.denoising import Options
    from nlflow.denoising.noise import NoiseEstimate
    from nlflow.desk.formats.film import VideoReader

_LARGE = 8_000_000  # samples of a picture at one place, from which on the work may take minutes
_SLOWER = {"volume": 2, "clip": 6, "signal": 9}  # times the work at a place of a picture, about
_IN_FAST = 8  # times as many samples, about, in the same time with --quality fast
_QUICKER = ("image", "volume")  # of which --quality fast makes much less work
_BYTES = 40  # of a sample, while a clip is denoised as a whole
FIGURES = ("png", "pdf", "svg")
_COPIED = ("png", "jpeg", "tiff", "bmp", "webp", "pnm", "wav", "au", "video")  # formats of one picture, sound or film


@dataclass(frozen=True)
class Request:
    """How files are denoised."""

    sigma: float | list[float] | None  # given noise; a map of it is a file beside the input
    fill_nan: bool  # whether samples that are no numbers are missing ones
    reading: dict[str, Any]  # words of `nlflow.desk.files.read`: how a file is read
    # quality, noise, options: as `nlflow.denoise` takes them.
    quality: str
    noise: Any
    options: Options
    writing: Writing  # how a file is written, whatever its path
    # Rows and columns of a part of a picture, as it is seen, in which its noise is measured.
    flat: tuple[slice, slice] | None = None


@dataclass
class Inputs:
    """What was read for a file; `missing` has the shape of the data."""

    media: Media
    sigma: Any
    mask: Any = None
    keep: Array | None = None
    reference: Array | None = None
    missing: Array | None = None
    notes: list[str] = field(default_factory=list)
    warned: list[str] = field(default_factory=list)

    @property
    def unseen(self) -> Array | None:
        """Pixels (H, W) that an alpha channel hides; their samples count as missing."""
        alpha = self.media.alpha
        return alpha == 0 if self.media.absent is not None and alpha is not None and alpha.ndim == 2 else None

    @property
    def hidden(self) -> int:
        return 0 if self.unseen is None else int(np.count_nonzero(self.unseen))


def denoise_file(
    job: Job,
    request: Request,
    *,
    progress: bool | Log,
    tell: Callable[[str, str], None],
    begin: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Denoise one file, write the result, and return the report; `begin` is called before anything is written."""
    start = time.perf_counter()
    if job.refused:
        raise FileFormatError(job.refused)
    reader = _film_to_stream(job, request)
    work = _whole if reader is None else _Film(reader)
    with named(job.source):
        given, details, more = work(job, request, progress, tell, begin)
    media = given.media
    return {
        "input": str(job.source),
        "output": str(job.target),
        "figure": None if job.figure is None else str(job.figure),
        "kind": media.kind,
        "shape": media.data.shape,
        "alpha": media.alpha is not None,
        "channel_axis": media.channel_axis,
        **({"axes": media.axes, "spacing": media.spacing} if media.axes else {}),
        "dtype": str(media.data.dtype),
        "sigma_given": str(job.beside["--sigma"]) if "--sigma" in job.beside else request.sigma,
        "strength": request.options.strength,
        "missing": 0 if given.missing is None else int(np.count_nonzero(given.missing)),
        "hidden": given.hidden,
        "kept": 0 if given.keep is None else int(np.count_nonzero(given.keep)),
        **more,
        "denoise": details,
        "notes": given.notes,
        "warnings": list(dict.fromkeys(map(in_shell, given.warned))),
        "seconds_total": time.perf_counter() - start,
    }


def _whole(
    job: Job, request: Request, progress: bool | Log, tell: Callable[[str, str], None], begin: Callable[[], None]
) -> tuple[Inputs, dict[str, Any], dict[str, Any]]:
    """Denoise a file as a whole; return what was read, how it was done, and what else there is to report."""
    given, writing = read_inputs(job.source, job.beside, request), job.writing(request.writing)
    media = given.media
    if request.flat is not None:
        request = replace(request, noise=noise_of_flat(media, request.flat).model)
    form = "" if job.figure is None else check_figure("--compare", job.figure)
    coded, copies = files.check_output(writing, media), _may_copy(media, writing, request)
    early, given.notes = [*media.notes, *(() if copies else coded), *given.notes], []
    _note(given, early, tell)
    if isinstance(progress, Log):
        _announce(media, request.quality, progress)
    result, details, given.warned = _denoise(given, request, progress)
    if media.alpha is not None:  # figures tell of what is written, not of what was filled in where nobody sees it
        result = media.restored(result)
    for text in given.warned:
        tell("warning", text)
    columns = _columns(given, result, details)
    anew = copies and not (details.get("residual") == 0 and np.array_equal(result, media.data, equal_nan=True))
    copies &= not anew
    _note(given, [*(coded if anew else ()), *_unchanged(media, columns)], tell)
    drawn = b""
    if job.figure is not None:  # drawn before anything is written, so that a failure here leaves nothing behind
        # Counts have no sigma in the units of the file: what was removed says how far colours reach.
        parts = columns if len(columns) > 1 else [details]
        each = [
            one.get("sigma_effective") or one["sigma" if has_sigma(one.get("model")) else "residual"] for one in parts
        ]
        levels = each if len(columns) > 1 else each[0]
        drawn = _draw(given, result, levels, job.source.name, form)
    begin()
    if copies:
        copy(media, writing)
    else:
        files.write(writing, result, media)
    if job.figure is not None:
        write_content(job.figure, drawn, replace=job.figure not in job.free)
    clean, figures = given.reference, {}
    if clean is not None:
        figures = companions.nearness(media, clean, media.data, result)
    return given, details, {"copied": copies, **({"columns": columns} if columns else {}), **figures}


def _note(given: Inputs, texts: Iterable[str], tell: Callable[[str, str], None]) -> None:
    for text in texts:
        given.notes.append(text)
        tell("note", text)


def _may_copy(media: Media, writing: Writing, request: Request) -> bool:
    same = files.format_of(writing.path) == media.format in _COPIED and writing.quality is None
    if media.format in ("video", "pnm"):  # whose names say more than the format
        same &= files.extension(writing.path) == files.extension(media.path)
    return same and media.path.is_file() and not request.reading and (media.format == "video" or not media.notes)


def copy(media: Media, writing: Writing) -> None:
    def write(stream: BinaryIO) -> None:
        with media.path.open("rb") as source:
            shutil.copyfileobj(source, stream)

    write_atomic(writing.path, write, replace=writing.replaces)


def _announce(media: Media, quality: str, log: Log) -> None:
    work = math.prod(media.spatial_shape) * _SLOWER.get(media.kind, 1)
    if work < _LARGE * (_IN_FAST if quality == "fast" else 1):
        return
    size = " x ".join(map(str, reversed(media.spatial_shape) if media.kind == "image" else media.spatial_shape))
    faster = "; --quality fast is quicker" if quality == "balanced" and media.kind in _QUICKER else ""
    log.begin(f"{size} samples with --quality {quality} may take minutes; lines tell how far it is{faster}")


def read_inputs(source: Path, beside: Mapping[str, Path], request: Request) -> Inputs:
    media, sigma = files.read(source, **request.reading), request.sigma
    if isinstance(sigma, list) and media.columns and len(sigma) != len(media.columns):
        raise InputError(
            f"--sigma: got {len(sigma)} numbers for {media.path}, expected one for all columns, or "
            f"{len(media.columns)}, one for each of {', '.join(media.columns)}; a first column that is kept has none"
        )
    given = Inputs(media, sigma)
    readers = {"mask": companions.read_mask, "keep": companions.read_mask, "reference": companions.read_reference,
               "sigma": companions.read_map}  # fmt: skip
    for name, reader in readers.items():
        option = f"--{name}"
        if option in beside:
            values, notes = reader(option, beside[option], media)
            setattr(given, name, values)
            given.notes += notes
    if given.mask is not None:
        given.missing = _over_channels(given.mask, media)
    elif request.fill_nan:
        finite = np.isfinite(media.data)
        given.mask, given.missing = "nan", None if finite.all() else ~finite
        if media.data.dtype.kind not in "fc":
            given.notes.append(f"{source}: --mask nan has no effect, since every one of {media.data.dtype} is a number")
    if media.absent is not None:
        if media.absent.all():
            raise InputError(f"{media.path}: got a file none of whose samples hold data, as it says, expected some")
        if given.missing is not None and (given.missing | media.absent).all():
            raise InputError(f"{media.path}: got {np.count_nonzero(media.absent)} sample(s) without data, as the file "
                             "says, and --mask hides all others, expected some that are there; turn the mask round: "
                             "not 0 is where a sample is missing")  # fmt: skip
        given.missing = media.absent if given.missing is None else given.missing | media.absent
        given.mask = given.missing
    said = np.zeros((), bool) if given.missing is None else given.missing
    infinite = np.isinf(media.data) & ~said
    if infinite.any():
        raise InputError(
            f"{media.path}: got {np.count_nonzero(infinite)} infinite value(s), expected numbers, or nan where a "
            "sample is missing; give --mask nan to fill them in"
        )
    nan = np.isnan(media.data) & ~said
    if nan.any():  # they stay so
        given.missing = nan | said
    return given


def _over_channels(mask: Array, media: Media) -> Array:
    if mask.ndim < media.data.ndim and media.channel_axis is not None:
        mask = np.expand_dims(mask, media.channel_axis)
    return np.broadcast_to(mask, media.data.shape)


def _denoise(given: Inputs, request: Request, progress: bool | Log) -> tuple[Array, dict[str, Any], list[str]]:
    from nlflow.denoising import denoise
    from nlflow.denoising.runs import within

    media = given.media
    with stopping(), warnings_kept() as warned:
        parts, details, times = [], [], _count(media)
        for number, part in enumerate(_parts(given)):
            share = within(progress if callable(progress) else None, number / times, (number + 1) / times)
            result, outcome = denoise(
                part.data,
                part.sigma,
                quality=request.quality,
                noise=request.noise,
                options=replace(request.options, separate=media.separate),
                **{"channel_axis": None, **part.layout},
                mask=part.mask,
                keep=part.keep,
                preserve_range=True,
                return_info=True,
                progress=share or progress is True,
            )
            parts.append(result)
            details.append(outcome.as_dict())
    return _joined(media, parts), _summed(details), list(dict.fromkeys(warned))


def check_figure(option: str, path: Path) -> str:
    form = path.suffix.lower().removeprefix(".")
    if form not in FIGURES:
        raise FileFormatError(f"{option}: got {path}, expected a name that ends in .png, .pdf or .svg; rename it")
    files.check_target(path)
    return form


def _columns(given: Inputs, result: Array, details: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what was done to each column of a table, with its name; takes it out of `details`."""
    media = given.media
    parts = details.pop("columns", ())
    if not media.separate:
        keys = ("sigma", "sigma_estimated", "stopped_by", "residual")
        return [{"name": name, **{key: details[key] for key in keys}} for name in media.columns]
    rows = []
    for c, (name, part) in enumerate(zip(media.columns, parts, strict=False)):
        part.pop("columns", None)
        if given.reference is not None:
            own = replace(media, data=media.data[:, c], channel_axis=None)
            part |= companions.nearness(own, given.reference[:, c], own.data, result[:, c])
        rows.append({"name": name, **part})
    return rows


def _unchanged(media: Media, columns: list[dict[str, Any]]) -> list[str]:
    notes = []
    for column in columns:
        if column["stopped_by"].startswith("returned unchanged"):
            name = column["name"] if media.header is None else f"column {column['name']!r}"
            notes.append(f"{media.path}: {name} stays as it is ({column['stopped_by']})")
    return notes


def _draw(given: Inputs, result: Array, sigma: float | list[float], title: str, form: str) -> bytes:
    from nlflow.plotting import comparison_figure, render, stack_figure

    media = given.media
    if media.stacked:
        level = sigma if isinstance(sigma, float) else max(sigma)
        figure = stack_figure(
            media.data, result, axes=media.axes, spacing=media.spacing, sigma=level, clean=given.reference,
            missing=given.missing, kept=given.keep, title=title, upward=upward(media),
        )  # fmt: skip
        return render(figure, form)

    def turned(array: Array | None) -> Any:
        return array if array is None or media.kind == "signal" else files.upright(array, media.orientation)

    figure = comparison_figure(
        turned(media.data),
        turned(result),
        channel_axis=media.channel_axis,
        sigma=sigma,
        clean=turned(given.reference),
        missing=turned(given.missing),
        kept=turned(given.keep),
        hidden=turned(given.unseen),
        title=title,
    )
    return render(figure, form)


def noise_of_flat(media: Media, flat: tuple[slice, slice]) -> NoiseEstimate:
    from nlflow.denoising.noise import estimate_noise

    if media.kind != "image" or media.stacked or media.separate:
        raise InputError(f"--flat: got {media.path}, a {media.kind}, expected an image")
    axis = media.channel_axis
    shown = files.upright(media.data if axis is None else np.moveaxis(media.data, axis, -1), media.orientation)
    try:
        found = estimate_noise(shown, channel_axis=None if axis is None else -1, flat=flat)
    except InputError as error:
        raise InputError(str(error).replace("flat: ", "--flat: ", 1)) from error
    if media.orientation >= 5:  # rows are stored as columns
        model: Any = found.model
        turned = None if model.spectrum is None else model.spectrum.swapaxes(1, 2)
        found = replace(found, model=replace(model, spectrum=turned))
    return found


# ---- stacks: volume by volume where there are times beside slices


@dataclass(frozen=True)
class _Part:
    """What one call denoises; `layout` are its words about axes."""

    data: Array
    sigma: Any
    mask: Any
    keep: Array | None
    layout: dict[str, Any]


def _parts(given: Inputs) -> Iterator[_Part]:
    """Return what is denoised at once: all of it, or each time of a stack of volumes on its own."""
    media, layout = given.media, words_of(given.media)
    if not {"T", "Z"} <= set(media.axes):
        yield _Part(media.data, given.sigma, given.mask, given.keep, layout)
        return
    time = media.axes.index("T")
    spatial = media.axes.replace("C", "").index("T")

    def at(values: Any, number: int) -> Any:
        """Return the part of an array of this time; numbers and words are the same at all times."""
        if not isinstance(values, np.ndarray) or values.shape not in (media.data.shape, media.spatial_shape):
            return values
        return values.take(number, axis=time if values.shape == media.data.shape else spatial)

    for number in range(media.data.shape[time]):
        yield _Part(
            media.data.take(number, axis=time), at(given.sigma, number), at(given.mask, number),
            at(given.keep, number), layout,
        )  # fmt: skip


def _count(media: Media) -> int:
    return media.data.shape[media.axes.index("T")] if {"T", "Z"} <= set(media.axes) else 1


def _joined(media: Media, results: list[Array]) -> Array:
    if len(results) == 1 and results[0].shape == media.data.shape:
        return results[0]
    return np.stack(results, axis=media.axes.index("T"))


def _summed(details: list[dict[str, Any]]) -> dict[str, Any]:
    """Return how a stack was denoised: of many volumes the first, with means and sums, and each in ``volumes``."""
    if len(details) == 1:
        return details[0]
    told = dict(details[0])
    for name in ("sigma", "residual"):
        told[name] = float(np.mean([one[name] for one in details]))
    for name in ("steps", "seconds"):
        told[name] = type(told[name])(sum(one[name] for one in details))
    kinds = list(dict.fromkeys(one["noise"] for one in details))
    told["noise"] = "; ".join(kinds[:3]) + (" and others" if len(kinds) > 3 else "")
    keys = ("sigma", "noise", "steps", "stopped_by", "residual", "seconds")
    told["volumes"] = [{key: one[key] for key in keys} for one in details]
    return told


def middle(given: Inputs) -> Inputs:
    media = given.media
    axes = media.axes.replace("T", "").replace("Z", "")
    picture = replace(
        media, kind="image", data=plane(media.data, media), axes=axes,
        channel_axis=axes.index("C") if "C" in axes else None,
    )  # fmt: skip

    def of(values: Array | None) -> Any:
        return None if values is None else plane(values, media)

    return replace(given, media=picture, reference=of(given.reference), missing=of(given.missing), keep=of(given.keep))


def upward(media: Media) -> str:
    """See `stack_figure`."""
    own = media.extras.get("nifti")
    if own is None:
        return ""
    from nlflow.desk.formats import nifti

    return nifti.upward(own["affine"])


# ---- films that are too long for the memory


def _film_to_stream(job: Job, request: Request) -> VideoReader | None:
    """Return the film of a job that does not fit the memory as a whole; None for what is denoised as a whole."""
    if "video" not in (files.format_of(job.source), files.format_of(job.target)) or not job.source.is_file():
        return None
    if files.format_of(job.source) != files.format_of(job.target):
        return None
    if request.flat is not None:
        raise InputError(f"--flat: got {job.source}, a film, expected an image")
    from nlflow.denoising.noise import Noise

    model, reading = request.noise, request.reading
    if job.beside or job.figure is not None or request.options.stopping is not None or request.fill_nan:
        return None
    if isinstance(model, Noise) and not model.in_blocks:
        return None
    from nlflow.desk.formats.film import VideoReader, length

    reader = VideoReader(job.source)
    own = "TYXC" if len(reader.info.shape) == 3 else "TYX"
    if reading.get("axes", own) != own or set(reading) - {"axes"}:
        return None
    count = length(reader.info)
    fits = count > 0 and _BYTES * count * math.prod(reader.info.shape) <= _limit(request)
    return None if fits else reader


def _limit(request: Request) -> float:
    given = request.options.max_memory
    return float(memory_limit() if given is None else given)


class _Film:
    """A film that is denoised some frames at a time.

    It is read twice, so that the result has the bits of the whole, and a film that was cut off is refused before any
    work.
    """

    def __init__(self, reader: VideoReader) -> None:
        self.reader, self.info = reader, reader.info
        self.times, self.lengths = array("q"), array("q")

    def _frames(self) -> Iterator[Array]:
        for moment, span, frame in self.reader:
            self.times.append(moment)
            self.lengths.append(span)
            yield frame

    def _clip(self, axes: str | None) -> Media:
        """Return the film as a clip, of which all samples are one number."""
        from nlflow.desk.formats.axes import settle
        from nlflow.desk.formats.film import clip

        blank = np.broadcast_to(np.zeros((), self.info.dtype), (len(self.times), *self.info.shape))
        return settle(clip(self.info, blank, self.times, self.lengths), axes, None)

    def __call__(
        self, job: Job, request: Request, progress: bool | Log, tell: Callable[[str, str], None],
        begin: Callable[[], None],
    ) -> tuple[Inputs, dict[str, Any], dict[str, Any]]:  # fmt: skip
        from nlflow.denoising.large.stream import FIRST, denoise_frames, surveyed, told, window

        start, options, writing = time.perf_counter(), request.options, job.writing(request.writing)
        if options.device not in ("auto", "cpu"):
            raise InputError(f"device: got {options.device!r} for a film, whose search follows motion on the CPU "
                             "alone, expected 'cpu'")  # fmt: skip
        limit = _limit(request)
        with stopping(), warnings_kept() as warned:
            found = surveyed(self._frames(), request.sigma, quality=request.quality, noise=request.noise,
                             options=options)  # fmt: skip
            given = Inputs(self._clip(request.reading.get("axes")), request.sigma)
            media, count = given.media, len(self.times)
            core, _ = window(found, limit)
            coded = files.check_output(writing, media)
            copies = bool(found.idle) and _may_copy(media, writing, request)
            notes = [*media.notes, *(() if copies else coded)]
            notes.append(f"{job.source}: is denoised in parts of {core} frames, so that it fits the memory")
            if found.estimated:
                first = min(FIRST, count)
                notes.append(
                    f"{job.source}: the noise is taken to be white, and as strong as in the first {first} frames"
                )
            _note(given, notes, tell)
            begin()
            squares = 0.0

            def write(stream: BinaryIO) -> None:
                nonlocal squares
                from nlflow.desk.formats.film import VideoWriter

                with (
                    progress_bar(not progress, desc="denoise", unit="frame", total=count) as bar,
                    VideoWriter(stream, self.info, writing) as writer,
                ):
                    parts = denoise_frames(self.reader, found, limit)
                    for number, ((moment, span, frame), estimate) in enumerate(parts):
                        squares += float(np.sum(np.square(estimate - frame.astype(estimate.dtype)), dtype=np.float64))
                        values = files.stored(estimate, self.info.dtype, "video", self.info.bits)
                        writer.write(moment, span, values)
                        bar.update()
                        if callable(progress):
                            progress((number + 1) / count)

            if copies:
                copy(media, writing)
            else:
                write_atomic(job.target, write, replace=writing.replaces)
            details = told(found, limit, math.sqrt(squares / math.prod(media.data.shape))).as_dict()
        details["seconds"] = time.perf_counter() - start
        given.warned = warned
        for text in warned:
            tell("warning", text)
        return given, details, {"copied": copies}
