"""One job of the command ``nonlocal denoise``: read an input, denoise it, write the result, report."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from nlflow.backends.interrupts import stopping
from nlflow.desk import companions, files
from nlflow.desk.commands import stacks
from nlflow.desk.commands.denoise_film import denoise_film, film_to_stream
from nlflow.desk.commands.inputs import Inputs, Options, noise_of_flat
from nlflow.desk.commands.jobs import Job
from nlflow.desk.files import Array, Media
from nlflow.desk.terminal import Log, warnings_kept
from nlflow.errors import FileFormatError, InputError
from nlflow.store.atomic import write_content

_LARGE = 8_000_000  # samples at one place, from which on the work takes minutes
_FASTER = {"image": "up to four", "volume": "about 14"}  # times, as measured: 1.4 for grey, 4 for a camera
FIGURES = ("png", "pdf", "svg")


def denoise_file(
    job: Job,
    options: Options,
    *,
    progress: bool | Log,
    tell: Callable[[str, str], None],
    begin: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Denoise one file and write the result.

    Parameters
    ----------
    job : Job
        The input, its outputs and the files beside it.
    options : Options
        How it is denoised.
    progress : bool or Log
        Show how far the work on this file has come: with a bar, or with lines in a log.
    tell : callable
        Gets "note" or "warning" and a text for the user, as soon as there is one.
    begin : callable
        Called before anything is written.

    Returns
    -------
    dict
        The report.

    Raises
    ------
    FileFormatError
        If a file cannot be read or written.
    InputError
        If the files do not fit each other, or `nlflow.denoise` refuses its arguments.
    """
    start = time.perf_counter()
    if job.missing:
        raise FileFormatError(job.missing)
    reader = film_to_stream(job, options)
    if reader is not None:
        return denoise_film(job, reader, options, progress=progress, tell=tell, begin=begin)
    given = read_inputs(job.source, job.beside, options)
    media = given.media
    if options.flat is not None:
        options = replace(options, words={**options.words, "noise": noise_of_flat(media, options.flat).model})
    form = "" if job.figure is None else check_figure("--compare", job.figure)
    notes = [*media.notes, *files.check_output(job.target, media), *given.notes]
    for text in notes:
        tell("note", text)
    if isinstance(progress, Log):
        _announce(media, options.words["quality"], progress)
    result, details, warned = _denoise(given, options, progress)
    for text in warned:
        tell("warning", text)
    columns = _columns(given, result, details)
    for text in _unchanged(media, columns):
        notes.append(text)
        tell("note", text)
    drawn = b""
    if job.figure is not None:  # drawn before anything is written, so that a failure here leaves nothing behind
        levels = [column["sigma"] for column in columns] if len(columns) > 1 else details["sigma"]
        drawn = _draw(given, result, levels, job.source.name, form)
    begin()
    files.write(job.target, result, media)
    if job.figure is not None:
        write_content(job.figure, drawn)
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
        "sigma_given": str(job.beside["--sigma"]) if "--sigma" in job.beside else options.sigma,
        "strength": options.words.get("strength", 1.0),
        "missing": 0 if given.missing is None else int(np.count_nonzero(given.missing)),
        "kept": 0 if given.keep is None else int(np.count_nonzero(given.keep)),
        **({"columns": columns} if columns else {}),
        **(_means(columns) if media.separate else _quality(media, given.reference, result)),
        "denoise": details,
        "notes": notes,
        "warnings": warned,
        "seconds_total": time.perf_counter() - start,
    }


def _announce(media: Media, quality: str, log: Log) -> None:
    """Say in a log what takes minutes."""
    if math.prod(media.spatial_shape) < _LARGE:
        return
    size = " x ".join(map(str, reversed(media.spatial_shape) if media.kind == "image" else media.spatial_shape))
    faster = ""
    if quality == "balanced" and media.kind in _FASTER:
        faster = f"; --quality fast is {_FASTER[media.kind]} times as quick, and takes the noise for white"
    log.begin(f"{size} samples with --quality {quality} take minutes; lines tell how far it is{faster}")


def read_inputs(source: Path, beside: Mapping[str, Path], options: Options) -> Inputs:
    """Read an input and what belongs to it, and check that all of it fits together."""
    media = files.read(
        source, kind=options.kind, channel_axis=options.channel_axis, first_column=options.first_column,
        axes=options.axes, spacing=options.spacing, array=options.array,
    )  # fmt: skip
    if options.video_quality is not None:
        media = replace(media, extras={**media.extras, "video_quality": options.video_quality})
    if isinstance(options.sigma, list) and media.columns and len(options.sigma) != len(media.columns):
        raise InputError(
            f"--sigma: got {len(options.sigma)} numbers for {media.path}, expected one for all columns, or "
            f"{len(media.columns)}, one for each of {', '.join(media.columns)}; a first column that is kept has none"
        )
    given = Inputs(media, options.sigma)
    readers = {"mask": companions.read_mask, "keep": companions.read_mask, "reference": companions.read_reference,
               "sigma": companions.read_map}  # fmt: skip
    for name, reader in readers.items():
        option = f"--{name}"
        if option in beside:
            values, notes = reader(option, beside[option], media)
            setattr(given, name, values)
            given.notes += notes
    finite = np.isfinite(media.data)
    if given.mask is not None:
        given.missing = _over_channels(given.mask, media)
    elif options.fill_nan:
        given.mask, given.missing = "nan", None if finite.all() else ~finite
        if media.data.dtype.kind not in "fc":
            given.notes.append(f"{source}: --mask nan has no effect, since every one of {media.data.dtype} is a number")
    lost = ~finite if given.missing is None else ~finite & ~given.missing
    if lost.any():
        raise InputError(
            f"{media.path}: got {np.count_nonzero(lost)} NaN or infinite value(s), expected numbers; "
            "give --mask nan to fill them in"
        )
    return given


def _over_channels(mask: Array, media: Media) -> Array:
    """Return a mask in the full shape of the data."""
    if mask.ndim < media.data.ndim and media.channel_axis is not None:
        mask = np.expand_dims(mask, media.channel_axis)
    return np.broadcast_to(mask, media.data.shape)


def _denoise(given: Inputs, options: Options, progress: bool | Log) -> tuple[Array, dict[str, Any], list[str]]:
    """Return the result, how it was found, and warnings."""
    from nlflow.denoising import denoise
    from nlflow.denoising.runs import within

    media = given.media
    with stopping(), warnings_kept() as warned:
        parts, details = [], []
        count = stacks.count(media)
        for number, part in enumerate(stacks.parts(given)):
            share = within(progress if callable(progress) else None, number / count, (number + 1) / count)
            result, outcome = denoise(
                part.data,
                part.sigma,
                **options.words,
                **part.layout,
                separate=media.separate,
                mask=part.mask,
                keep=part.keep,
                preserve_range=True,
                return_info=True,
                progress=share or progress is True,
            )
            parts.append(result)
            details.append(outcome.as_dict())
    return stacks.joined(media, parts), stacks.summed(details), list(dict.fromkeys(warned))


def check_figure(option: str, path: Path) -> str:
    """Return the format of a figure that can be written to `path`."""
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
        clean = None if given.reference is None else given.reference[:, c]
        own = replace(media, data=media.data[:, c], channel_axis=None)
        rows.append({"name": name, **part, **_quality(own, clean, result[:, c])})
    return rows


def _unchanged(media: Media, columns: list[dict[str, Any]]) -> list[str]:
    """Return a note for each column that was not denoised."""
    notes = []
    for column in columns:
        if column["stopped_by"].startswith("returned unchanged"):
            name = column["name"] if media.header is None else f"column {column['name']!r}"
            notes.append(f"{media.path}: {name} stays as it is ({column['stopped_by']})")
    return notes


def _means(columns: list[dict[str, Any]]) -> dict[str, float | None]:
    """Return the figures of quality of a table: means over its columns, whose units differ."""
    found = {}
    for name in ("psnr_input", "snr_input", "psnr_output", "snr_output"):
        values = [column[name] for column in columns if name in column]
        if values:
            found[name] = None if None in values else float(np.mean(values))
    return found


def _quality(media: Media, clean: Array | None, result: Array) -> dict[str, float | None]:
    """Return how near input and result come to the reference, in figures that suit their kind."""
    if clean is None:
        return {}
    from nlflow.denoising.quality import psnr, snr, ssim

    figures: dict[str, float | None] = {}
    for name, data in (("input", media.data), ("output", result)):
        known = name == "output" or bool(np.isfinite(data).all())  # a NaN is no distance from anything
        figures[f"psnr_{name}"] = psnr(clean, data) if known else None
        if media.stacked:
            continue
        if media.kind == "signal":
            figures[f"snr_{name}"] = snr(clean, data) if known else None
        else:
            figures[f"ssim_{name}"] = ssim(clean, data, media.channel_axis) if known else None
    return figures


def _draw(given: Inputs, result: Array, sigma: float | list[float], title: str, form: str) -> bytes:
    """Return the figure of noisy data, result and residual as the content of a file."""
    from nlflow.plotting import comparison_figure, render, stack_figure

    media = given.media
    if media.stacked:
        level = sigma if isinstance(sigma, float) else max(sigma)
        figure = stack_figure(
            media.data, result, axes=media.axes, spacing=media.spacing, sigma=level, clean=given.reference,
            missing=given.missing, kept=given.keep, title=title, upward=stacks.upward(media),
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
        title=title,
    )
    return render(figure, form)
