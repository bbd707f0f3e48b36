"""The command ``noise``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from nlflow.desk.options import ArrayName, AsJson, Axes, Flat, Mask, Quiet, parse_axes, split_flat
from nlflow.desk.terminal import in_shell, named, print_json, print_table, say

if TYPE_CHECKING:
    from nlflow.denoising.noise import NoiseEstimate
    from nlflow.desk.commands.denoise_file import Inputs


HELP = """Find out which noise an image, a signal or a stack has.

The verdict is that of `nonlocal denoise`: white noise, or noise that is correlated or follows the intensity, as that of
a camera. How sure it is, and why, is said beside it: high where flat parts show nothing but this noise, low where
structure is everywhere. Strengths are in the units of the file: grey levels 0..255 for an 8-bit image.

--figure draws the picture, the strength of its noise by intensity, the power of its noise by frequency, as measured
and as the model has it, and the evidence for and against each kind where that was weighed; of a signal the power of the
noise beside that of the recording. --verbose says all numbers that were measured.

--flat names a part that holds nothing but noise, such as a wall or a sky: rows and columns of the picture as it is
seen, first:end,first:end, counted from 0, at least 32 x 32 pixels. The noise is measured there alone: its level, its
strength and how much neighbours share it, for each channel. What is not flat is refused. From one level it cannot be
told how noise follows the intensity: it counts as the same everywhere.

--save writes the model to a JSON file, for other files of the same camera or instrument:
`nonlocal denoise IN OUT --noise MODEL.json`. Each column of a CSV table has noise of its own, and a line of its own;
a model is saved of one column.

\b
Examples:
  nonlocal noise photo.jpg
  nonlocal noise photo.jpg --figure noise.png
  nonlocal noise flat-field.tif --save camera.json
  nonlocal noise page.jpg --flat 20:84,300:400
  nonlocal noise ecg.csv --figure ecg.pdf
  nonlocal noise holes.npy --mask nan --json
  nonlocal noise eeg.npy --axes kind=signal
  nonlocal noise volume.h5 --array /scan/raw --axes ZYX
  cat photo.jpg | nonlocal noise -
"""


def noise(
    context: typer.Context,
    source: Annotated[Path, typer.Argument(metavar="FILE", help="Image, signal or stack.", show_default=False)],
    figure: Annotated[Path | None, typer.Option(metavar="FIG", help="Draw the noise (.png, .pdf, .svg).")] = None,
    save: Annotated[Path | None, typer.Option(metavar="MODEL", help="Write the model (.json).")] = None,
    flat: Flat = None,
    mask: Mask = None,
    axes: Axes = None,
    array: ArrayName = None,
    existing: Annotated[
        Literal["refuse", "overwrite"], typer.Option(help="What to do about outputs that exist.")
    ] = "refuse",
    as_json: AsJson = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Say what was measured too.")] = False,
    quiet: Quiet = False,
) -> None:
    """See `HELP`."""
    from nlflow.denoising import Options
    from nlflow.desk.commands.denoise_file import Request, check_figure, noise_of_flat, read_inputs
    from nlflow.desk.commands.pipes import ends
    from nlflow.desk.files import Writing, format_of
    from nlflow.errors import InputError
    from nlflow.store.atomic import write_content

    if save is not None and save.suffix.lower() != ".json":
        raise typer.BadParameter(f"got {save}, expected a name that ends in .json", param_hint="--save")
    reading = parse_axes(axes, context.meta.get("former", {})) | ({} if array is None else {"array": array})
    part = split_flat(flat)
    if part is not None and mask is not None:
        raise typer.BadParameter("is not for --flat, of which all samples are measured; leave one of them out",
                                 param_hint="--mask")  # fmt: skip
    beside = {} if mask in (None, "nan") else {"--mask": Path(str(mask))}
    if "axes" not in reading and source.is_dir() and format_of(source) != "zarr":
        raise InputError(f"FILE: {source} is a folder, and noise takes one file; name a file in it, or for frames of a "
                         "clip or slices of a volume add --axes TYX or --axes ZYX")  # fmt: skip
    _check_names(source, beside, {"--figure": figure, "--save": save}, existing)
    form = "" if figure is None else check_figure("--figure", figure)
    request = Request(None, mask == "nan", reading, "", "auto", Options(), Writing(Path()))
    with ends([source]) as pipes:
        given = read_inputs(pipes.sources[0], beside, request)
        given.notes = pipes.told([*given.media.notes, *given.notes])
        given.media = replace(given.media, notes=())
        source = Path(pipes.told(str(pipes.sources[0])))
    for note in () if quiet else given.notes:
        say("note", note)
    found = _found(given) if part is None else {"": noise_of_flat(given.media, part)}
    if save is not None and len(found) > 1:
        raise typer.BadParameter(
            f"{source} has {len(found)} columns, each with noise of its own; save the model of a file with one column",
            param_hint="--save",
        )
    drawn = b"" if figure is None else _draw(given, found, source.name, form)
    _check_names(source, beside, {"--figure": figure, "--save": save}, existing)  # some may have come meanwhile
    if save is not None:
        next(iter(found.values())).model.save(save)
    if figure is not None:
        write_content(figure, drawn, replace=existing == "overwrite")
    written = {"figure": None if figure is None else str(figure), "model": None if save is None else str(save)}
    if as_json:
        _print_report(given, source, found, written)
    elif not quiet:
        _print_words(given, source, found, written, verbose=verbose)


def _check_names(source: Path, beside: dict[str, Path], outputs: dict[str, Path | None], existing: str) -> None:
    from nlflow.desk import files
    from nlflow.errors import InputError

    files.check_distinct({"FILE": source, **beside}, outputs)
    for option, path in outputs.items():
        if path is not None and path.is_file() and existing == "refuse":
            raise InputError(
                f"{option}: got {path}, already there, expected a new file; choose another name, or give "
                "--existing overwrite"
            )
        if path is not None:
            files.check_target(path)


def _found(given: Inputs) -> dict[str, NoiseEstimate]:
    """Return the verdict, by the name of the column for a table; of several volumes that on the one in the middle."""
    import numpy as np

    from nlflow.backends.interrupts import stopping
    from nlflow.denoising.given import NO_SAMPLE
    from nlflow.denoising.noise import estimate_noise
    from nlflow.errors import InputError

    media, missing = given.media, given.missing
    axes, axis = media.axes, media.channel_axis
    data = media.data if missing is None else np.where(missing, 0, media.data)
    if media.stacked and {"T", "Z"} <= set(axes):
        time = axes.index("T")
        data = data.take(data.shape[time] // 2, axis=time)
        missing = None if missing is None else missing.take(missing.shape[time] // 2, axis=time)
        axes = axes.replace("T", "")
        axis = axes.index("C") if "C" in axes else None
    with stopping(), named(media.path):
        if missing is not None and missing.all():
            raise InputError(NO_SAMPLE)
        if media.separate:
            lost = [None] * data.shape[1] if missing is None else list(missing.T)
            return {name: estimate_noise(data[:, c], mask=lost[c]) for c, name in enumerate(media.columns)}
        if missing is not None and axis is not None:
            missing = np.asarray(missing.any(axis=axis))
        layout: dict[str, Any] = {"axes": axes} if media.stacked else {"channel_axis": axis}
        return {"": estimate_noise(data, mask=missing, **layout)}


def _draw(given: Inputs, found: dict[str, NoiseEstimate], title: str, form: str) -> bytes:
    from nlflow.desk.files import upright
    from nlflow.plotting import noise_figure, render

    if given.media.stacked:
        from nlflow.desk.commands.denoise_file import middle

        given = middle(given)
    media = given.media
    data, missing = media.data, given.missing
    if media.kind == "image":
        data = upright(data, media.orientation)
        missing = None if missing is None else upright(missing, media.orientation)
    figure = noise_figure(
        data, list(found.values()), channel_axis=media.channel_axis, names=media.columns, missing=missing, title=title
    )
    return render(figure, form)


def _print_words(
    given: Inputs, source: Path, found: dict[str, NoiseEstimate], written: dict[str, str | None], *, verbose: bool
) -> None:
    from nlflow.desk.commands.reports import lost

    media = given.media
    size = " x ".join(map(str, media.data.shape))
    rows = [("input", f"{source}, {media.kind} of {size}, {media.data.dtype}")]
    missing = 0 if given.missing is None else int(given.missing.sum())
    rows += lost(missing, given.hidden, media.data.shape, media.channel_axis)
    for name, one in found.items():
        if len(found) > 1:
            rows.append((f"noise of {name}", f"{one}{_because(one)}"))
        else:
            rows += [("noise", one.model.describe()), *_channels(one), ("confidence", one.confidence)]
            rows += [("because", in_shell(reason)) for reason in one.reasons]
        rows += _measured(one, f" of {name}" if len(found) > 1 else "") if verbose else []
    print_table(rows + [(name, path) for name, path in written.items() if path is not None])


def _measured(one: NoiseEstimate, of: str) -> list[tuple[str, str]]:
    """Return the numbers that were measured; arrays are in --json and in the figure."""
    rows = []
    for name, value in one.measured.items():
        if isinstance(value, dict):  # hypotheses and their probabilities
            shown = ", ".join(f"{key} {part:.3g}" for key, part in sorted(value.items(), key=lambda item: -item[1]))
        elif isinstance(value, tuple):
            shown = " to ".join(f"{part:.4g}" for part in value)
        elif isinstance(value, float | int | str):
            shown = f"{value:.4g}" if isinstance(value, float) else str(value)
        else:
            continue
        rows.append((f"{name.replace('_', ' ')}{of}", in_shell(shown)))
    return rows


def _channels(one: NoiseEstimate) -> list[tuple[str, str]]:
    measured = one.measured
    if "level" not in measured:
        return []
    each = zip(measured["level"], measured["sigma"], measured["correlation"], strict=True)
    names = ("red", "green", "blue") if len(measured["level"]) == 3 else map(str, range(len(measured["level"])))
    told = [
        f"level {level:.4g}, sigma {sigma:.3g}, correlation with the next row {row:.2f}, column {column:.2f}"
        for level, sigma, (row, column) in each
    ]
    return [("flat part", told[0])] if len(told) == 1 else list(zip(names, told, strict=False))


def _because(one: NoiseEstimate) -> str:
    return f": {in_shell('; '.join(one.reasons))}" if one.reasons else ""


def _print_report(given: Inputs, source: Path, found: dict[str, NoiseEstimate], written: dict[str, Any]) -> None:
    from nlflow.backends.machine import provenance, version

    media = given.media
    each = [
        {**({"name": name} if name else {}), "noise": one.model.describe(), "confidence": one.confidence,
         "reasons": one.reasons, "model": one.model.as_dict(), "measured": one.measured}
        for name, one in found.items()
    ]  # fmt: skip
    print_json({
        "input": str(source), "kind": media.kind, "shape": media.data.shape, "channel_axis": media.channel_axis,
        "dtype": str(media.data.dtype), "missing": 0 if given.missing is None else int(given.missing.sum()),
        **({"columns": each} if media.separate else each[0]), "notes": given.notes, "written": written,
        "version": version(), "provenance": provenance(),
    })  # fmt: skip
