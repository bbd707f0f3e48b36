"""One file from input to output: what is read, how `denoise` is called, what is written and reported."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from nlflow.commands.batches import Job
from nlflow.errors import FileFormatError, InputError
from nlflow.io import companions, files
from nlflow.io.atomic import make_folder
from nlflow.io.files import Array, FirstColumn, Kind, Media
from nlflow.io.terminal import stopping

__all__ = ["Options", "denoise_file"]

FIGURES = ("png", "pdf", "svg")


@dataclass(frozen=True)
class Options:
    """How every file of a command is denoised.

    Attributes
    ----------
    sigma : float, list of float or None
        Given noise; a map of it is a file beside the input.
    fill_nan : bool
        Whether samples that are no numbers are missing ones.
    kind, channel_axis
        What an .npy array is; see `nlflow.io.files.read`.
    first_column : {"keep", "denoise"} or None
        What becomes of the first column of a table; see there.
    words : dict
        Further words for `nlflow.denoise`.
    """

    sigma: float | list[float] | None
    fill_nan: bool
    kind: Kind | None
    channel_axis: int | None
    words: dict[str, Any]
    first_column: FirstColumn | None = None


@dataclass(frozen=True)
class _Given:
    """What was read for an input."""

    media: Media
    sigma: Any
    mask: Any
    keep: Array | None
    reference: Array | None
    missing: Array | None  # of the shape of the data


def denoise_file(
    job: Job,
    options: Options,
    *,
    folders: bool,
    progress: bool,
    note: Callable[[str, str], None],
    writes: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Denoise one file and write the result.

    Parameters
    ----------
    job : Job
        The input, its outputs and the files beside it.
    options : Options
        How it is denoised.
    folders : bool
        Make the folders of the outputs where they are missing.
    progress : bool
        Show how far the work on this file has come.
    note : callable
        Gets "note" or "warning" and a text for the user, as soon as there is one.
    writes : callable
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
    began = time.perf_counter()
    if job.missing:
        raise FileFormatError(job.missing)
    media = files.read(
        job.source, kind=options.kind, channel_axis=options.channel_axis, first_column=options.first_column
    )
    _check_sigmas(options.sigma, media)
    given, more = _read_beside(job, options, media)
    for path in (job.target, job.figure) if folders else ():
        if path is not None:
            make_folder(path.parent)
    form = "" if job.figure is None else _check_figure(job.figure)
    lost = files.check_output(job.target, media)
    notes = [*media.notes, *lost, *more]
    for text in notes:
        note("note", text)

    from nlflow.denoising import denoise

    with stopping(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        result, outcome = denoise(
            media.data,
            given.sigma,
            **options.words,
            channel_axis=media.channel_axis,
            separate=media.separate,
            mask=given.mask,
            keep=given.keep,
            preserve_range=True,
            return_info=True,
            progress=progress,
        )
    warned = list(dict.fromkeys(str(warning.message) for warning in caught))
    for text in warned:
        note("warning", text)
    details: dict[str, Any] = outcome.as_dict()
    columns = _columns(given, result, details)
    for column in columns:
        if column["stopped_by"].startswith("returned unchanged"):
            name = column["name"] if media.header is None else f"column {column['name']!r}"
            notes.append(f"{media.path}: {name} stays as it is ({column['stopped_by']})")
            note("note", notes[-1])
    drawn = b""
    if job.figure is not None:  # drawn before anything is written, so that a failure here leaves nothing behind
        levels = [column["sigma"] for column in columns] if len(columns) > 1 else details["sigma"]
        drawn = _draw(given, result, levels, job.source.name, form)
    writes()
    files.write(job.target, result, media)
    if job.figure is not None:
        files.write_atomic(job.figure, lambda stream: stream.write(drawn))
    return {
        "input": str(job.source),
        "output": str(job.target),
        "figure": None if job.figure is None else str(job.figure),
        "kind": media.kind,
        "shape": media.data.shape,
        "channel_axis": media.channel_axis,
        "dtype": str(media.data.dtype),
        "sigma_given": str(job.beside["--sigma"]) if "--sigma" in job.beside else options.sigma,
        "missing": 0 if given.missing is None else int(np.count_nonzero(given.missing)),
        "kept": 0 if given.keep is None else int(np.count_nonzero(given.keep)),
        **({"columns": columns} if columns else {}),
        **(_means(columns) if media.separate else _quality(media, given.reference, result)),
        "denoise": details,
        "notes": notes,
        "warnings": warned,
        "seconds_total": time.perf_counter() - began,
    }


def _check_sigmas(sigma: Any, media: Media) -> None:
    """Refuse another number of sigmas for a table than it has columns."""
    if isinstance(sigma, list) and media.columns and len(sigma) != len(media.columns):
        names = ", ".join(media.columns)
        raise InputError(
            f"--sigma: got {len(sigma)} numbers for {media.path}, expected one for all columns, or "
            f"{len(media.columns)}, one for each of {names}; a first column that is kept has none"
        )


def _columns(given: _Given, result: Array, details: dict[str, Any]) -> list[dict[str, Any]]:
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


def _means(columns: list[dict[str, Any]]) -> dict[str, float | None]:
    """Return the figures of quality of a table: means over its columns, whose units differ."""
    found = {}
    for name in ("psnr_input", "snr_input", "psnr_output", "snr_output"):
        values = [column[name] for column in columns if name in column]
        if values:
            found[name] = None if None in values else float(np.mean(values))
    return found


def _check_figure(path: Path) -> str:
    """Return the format of a figure that can be written to `path`."""
    form = path.suffix.lower().removeprefix(".")
    if form not in FIGURES:
        raise FileFormatError(f"--compare: got {path}, expected a name that ends in .png, .pdf or .svg; rename it")
    files.check_target(path)
    return form


def _read_beside(job: Job, options: Options, media: Media) -> tuple[_Given, list[str]]:
    """Read what belongs to an input, check that it fits, and return it with the notes made on the way."""
    notes: list[str] = []

    def read(option: str, reader: Callable[[str, Path, Media], tuple[Array, list[str]]]) -> Any:
        if option not in job.beside:
            return None
        values, more = reader(option, job.beside[option], media)
        notes.extend(more)
        return values

    mask = read("--mask", companions.read_mask)
    keep = read("--keep", companions.read_mask)
    reference = read("--reference", companions.read_reference)
    sigma = read("--sigma", companions.read_map)
    finite = np.isfinite(media.data)
    missing = None if mask is None else _over_channels(mask, media)
    if options.fill_nan and not finite.all():
        missing = ~finite
    covered = finite if missing is None else finite | missing
    if not covered.all():
        raise InputError(
            f"{media.path}: got {np.count_nonzero(~covered)} NaN or infinite value(s), expected numbers; "
            "give --mask nan to fill them in"
        )
    chosen = "nan" if options.fill_nan else mask
    return _Given(media, options.sigma if sigma is None else sigma, chosen, keep, reference, missing), notes


def _over_channels(mask: Array, media: Media) -> Array:
    """Return a mask in the full shape of the data."""
    if mask.ndim < media.data.ndim and media.channel_axis is not None:
        mask = np.expand_dims(mask, media.channel_axis)
    return np.broadcast_to(mask, media.data.shape)


def _quality(media: Media, clean: Array | None, result: Array) -> dict[str, float | None]:
    """Return how near input and result come to the reference, in figures that suit their kind."""
    if clean is None:
        return {}
    from nlflow.denoising.quality import psnr, snr, ssim

    known = bool(np.isfinite(media.data).all())
    figures: dict[str, float | None] = {}
    for name, data in (("input", media.data), ("output", result)):
        counts = name == "output" or known  # a NaN is no distance from anything
        figures[f"psnr_{name}"] = psnr(clean, data) if counts else None
        if media.kind == "signal":
            figures[f"snr_{name}"] = snr(clean, data) if counts else None
        else:
            figures[f"ssim_{name}"] = ssim(clean, data, media.channel_axis) if counts else None
    return figures


def _draw(given: _Given, result: Array, sigma: float | list[float], title: str, form: str) -> bytes:
    """Return the figure of noisy data, result and residual as the content of a file."""
    from nlflow.plotting import comparison_figure, render

    media = given.media

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
