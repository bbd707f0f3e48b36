"""The command ``denoise``."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from nlflow.denoising.noise.names import WORDS, has_sigma
from nlflow.desk.options import (
    PIPE,
    WRITINGS,
    ArrayName,
    AsJson,
    Axes,
    Flat,
    Given,
    Mask,
    Quality,
    Quiet,
    check_device,
    described,
    given,
    noise_of,
    options_of,
    parse_axes,
    settings,
    split_flat,
    split_sigma,
)
from nlflow.desk.terminal import named, print_json, print_table, progress_bar, progress_of, say

if TYPE_CHECKING:
    from nlflow.desk.commands.denoise_file import Request
    from nlflow.desk.commands.jobs import Job
    from nlflow.desk.commands.pipes import Ends

BRIEF = """Remove noise from images, signals, volumes and video.

Kind and strength of the noise are found out, unless told. OUT has the size and the units of IN. Several files or a
folder need a folder as OUT. - is stdin or stdout, in the format of IN or of --write format=png.

\b
Examples:
  nonlocal denoise noisy.png out.png
  nonlocal denoise photos denoised --quality best
  nonlocal denoise scan.tif out.tif --sigma 350 --compare before-after.png

`nonlocal denoise --help-all` has all formats, options and examples: volumes and video, tables, masks, cameras, GPUs,
files larger than memory.
"""

USUAL = (
    "quality", "sigma", "noise", "strength", "mask", "compare", "recursive", "axes", "existing", "as_json", "verbose",
    "quiet",
)  # fmt: skip

_WORDS = "\n".join(f"  {f'--noise {name}':<38}{word.help}" for name, word in WORDS.items() if name != "auto")

HELP = f"""Remove noise from images, signals, volumes and video.

The result has the size and the units of the input: grey levels 0..255 for an 8-bit image, raw samples for a WAV
file. It has its type too, but in NPY, NPZ and tables, which get floats; 1 bit becomes grey levels of 8 bits. What
comes with the samples is kept: alpha channel, orientation, EXIF, colour profile, resolution, TIFF description, sample
rate and format, column names. A note names what OUT cannot hold. OUT may have another format than IN if it can hold
the data.

Formats: PNG, JPEG, TIFF, BMP, WebP, PGM, PPM; NPY, NPZ, MAT (5 and 7.3), HDF5 (extra hdf5); WAV, AU; tables (CSV, TSV,
TXT, DAT, and Parquet with the extra parquet); stacks and video (below). Read only, with OUT in another format: PBM, GIF
(its first frame), AVIF, camera raws (DNG, NEF, CR2, ARW, ...; extra raw). The content of a file decides what it is, and
not its name. Of several arrays in a file, --array names one; OUT keeps the others from NPZ to NPZ, and from MAT 5 to
MAT. IN or OUT may be - for stdin or stdout, which gets the format of IN or of --write format=png.

\b
The kind of noise and its strength are found out from the file, unless told otherwise:
  --strength 1.5                        1.5 times the noise that was found: smoother
  --sigma 20                            white noise of this standard deviation, in the file's units
  --sigma 12,10,15                      one for each channel
  --sigma map.tif                       one for each pixel (.tif, .npy, .png)
  --sigma auto                          found out, as without --sigma
  --flat 20:84,300:400                  measured in a flat part: rows and columns of the picture as it is seen
{_WORDS}
  --noise model.json                    a model, from `nonlocal noise FILE --save model.json`
  --noise poisson --set gain=2.1 --set read-noise=4 --set offset=100
                                        raw data of a camera

\b
Colours, and the channels of WAV and NPY files, are denoised together: patches are compared in all channels at once,
and one noise level is estimated, or one a channel where those differ by more than a quarter. Each column of numbers of
a table is denoised alone, in its own units, with its own estimated level; all else stays as it stands there, and empty
cells stay empty. One number for --sigma is the level of every column; several numbers are one for each column. The
first of several columns is kept as it is if it has a name for times (time, t, index), or is strictly increasing or
decreasing, and others are if they are in equal steps; a note says so. --axes first-column=denoise or =keep decides
otherwise of the first. Rows out of the order of their times are refused: sort them first.

\b
Quality against time: --quality fast, balanced (default) or best; pixels is the
flow of pixels. Finer settings are given by name, such as --set
max-memory=2GiB; the list below has them. --set stopping=sure ends the smoothing where the estimated risk is smallest,
=discrepancy where the residual is as large as the noise.

\b
Files that belong to IN, of its size (pictures as they are seen, arrays as they are stored):
  --mask FILE       where it is not 0, samples are missing and are filled in
  --mask nan        samples that are NaN or infinite are filled in; without it NaN stays, and so does what
                    a file says is no data (GDAL_NODATA), or nothing is seen of (alpha)
  --keep FILE       where it is not 0, the input is left as it is
  --reference FILE  the same without noise: reports PSNR, and SSIM (images) or SNR (signals)

Several inputs, a folder (its files; with --recursive those in folders inside too, and OUT gets the same tree) or a
quoted pattern such as '*.png' need a folder as OUT: it is made, and outputs have the names of the inputs. --mask,
--keep, --sigma and --reference are then one file for all, or a folder with files of the same names; --compare is a
folder for figures. If a file fails, it is named, the
others are done, and the exit code is 1. A run that ended early leaves complete files only. To go on, give the same
command with --existing resume: outputs of the same inputs and options stay, the others are made. For this OUT keeps
a small folder .nlflow, with a record of each output. Nothing else needs it, so you may remove it at the end; resume
refuses outputs without a record.

\b
Volumes, time series and video are denoised as a whole, not picture by picture: TIFF (ImageJ, OME, pages), OME-Zarr,
NIfTI (extra volumes), NPY, video (extra video), and with --axes a folder of frames. A note says how IN was read.
  --axes ZYX         which axis is which, where the file does not say it: Z slices, T times, Y, X, C channels
  --axes ZYX:5,1,1   and how far apart slices, rows and columns are, in any unit; :5,1,1 where the axes are known
  --write quality=8  of a film: lossless, or a rate factor from 0 (best) to 51
With times and slices, each time is denoised on its own. Axes, distances and metadata are kept.

\b
--set device=cuda runs the flows of fast, balanced and best on a GPU (extra torch), auto where there is one, cpu-tensors
on tensors of the CPU, to compare with. The noise is found out on the CPU. pixels and clips are for the CPU alone: cuda
is refused, and auto leaves them there.

\b
Larger than memory: if OUT ends in .zarr and IN is a zarr array (of a stack with --axes, or in an OME-Zarr group,
which says its axes) or a TIFF file of one picture (of pages with --axes and --write block=192), noise is taken to be
white (or of counts), and OUT is written block by block by processes of this machine, or by workers of a Dask scheduler:
--write workers=ADDRESS. Until it is complete it is called OUT.partial; with --existing resume the same command goes on
with that.

\b
Examples:
  nonlocal denoise noisy.png out.png
  nonlocal denoise scan.tif out.tif --sigma 350 --compare before-after.png
  nonlocal denoise noisy.png out.png --reference original.png --json > report.json
  nonlocal denoise photos denoised --quality best
  nonlocal denoise photos denoised --recursive
  cat noisy.png | nonlocal denoise - - > clean.png
  nonlocal denoise photo.nef clean.tif
  nonlocal denoise data.npz out.npz --array noisy
  nonlocal denoise volume.h5 out.h5 --array /scan/raw --axes ZYX
  nonlocal denoise 'frames/*.tif' denoised --mask frames/dead-pixels.png --existing skip
  nonlocal denoise night.jpg out.png --strength 1.3
  nonlocal denoise photos denoised --noise camera.json
  nonlocal denoise page.jpg out.png --flat 20:84,300:400
  nonlocal denoise counts.tif out.tif --noise poisson
  nonlocal denoise dark.tif out.tif --noise hot
  nonlocal denoise holes.npy filled.npy --mask nan
  nonlocal denoise ecg.csv out.csv --compare ecg.pdf
  nonlocal denoise bands.npy out.npy --axes channel-axis=0
  nonlocal denoise stack.tif out.tif
  nonlocal denoise pages.tif out.tif --axes ZYX:0.5,0.2,0.2
  nonlocal denoise scan.nii.gz out.nii.gz --mask nan
  nonlocal denoise film.mp4 out.mp4 --write quality=8
  nonlocal denoise frames cleaned --axes TYX
  nonlocal denoise eeg.npy out.npy --axes kind=signal
  nonlocal denoise noisy.png out.png --quality pixels --sigma 20 --set width=12 --set steps=5
  nonlocal denoise slide.tif clean.zarr --sigma 25 --quality fast
  nonlocal denoise volume.zarr clean.zarr --axes ZYX --quality fast --set max-memory=4GiB
  nonlocal denoise sky.zarr clean.zarr --write workers=tcp://10.0.0.1:8786
"""


Existing = Literal["refuse", "overwrite", "skip", "resume"]


def sections() -> list[tuple[str, list[tuple[str, str]]]]:
    return [("Settings (--set NAME=VALUE) [default]", described(settings())),
            ("Ways to write (--write NAME=VALUE) [default]", described(WRITINGS))]  # fmt: skip


def denoise(
    context: typer.Context,
    sources: Annotated[
        list[Path],
        typer.Argument(
            metavar="IN", help="Images, signals or stacks, a folder, or a quoted pattern.", show_default=False
        ),
    ],
    target: Annotated[str, typer.Argument(metavar="OUT", help="File to write; a folder for several inputs.")],
    quality: Annotated[Quality, typer.Option(help="How much time the result is worth.")] = "balanced",
    sigma: Annotated[
        str | None,
        typer.Option(
            metavar="NUMBER|FILE|auto",
            help="Standard deviation of the noise in the file's units: one, one a channel or column, or a map "
            "[default: auto, which finds it out].",
        ),
    ] = None,
    noise: Annotated[
        str, typer.Option(metavar=f"{'|'.join(WORDS)}|FILE", help="Kind of the noise: found out, a word, or a model.")
    ] = "auto",
    flat: Flat = None,
    strength: Annotated[
        float | None, typer.Option(metavar="NUMBER", help="Count so many times the noise that was found or given.")
    ] = None,
    mask: Mask = None,
    keep: Annotated[Path | None, typer.Option(metavar="FILE", help="Samples to leave as they are: not 0.")] = None,
    reference: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Noise-free reference: report PSNR and SSIM or SNR.")
    ] = None,
    compare: Annotated[
        Path | None, typer.Option(metavar="FIG", help="Also draw noisy, result and residual (.png, .pdf, .svg).")
    ] = None,
    axes: Axes = None,
    array: ArrayName = None,
    finer: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=VALUE",
            help="A finer setting, of the list below. May be repeated.",
            show_default=False,
        ),
    ] = None,
    write: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE", help="How OUT is written, of the list below. May be repeated.", show_default=False
        ),
    ] = None,
    recursive: Annotated[
        bool, typer.Option("--recursive", "-r", help="Folders inside folders too; OUT gets the same tree.")
    ] = False,
    existing: Annotated[Existing, typer.Option(help="What to do about outputs that exist.")] = "refuse",
    as_json: AsJson = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Say how it was done too: flow, steps, memory and so on.")
    ] = False,
    quiet: Quiet = False,
) -> None:
    """See `HELP`."""
    former = context.meta.get("former", {})
    chosen, output = given("--set", finer, settings(), former), given("--write", write, WRITINGS, former)
    reading = parse_axes(axes, former) | ({} if array is None else {"array": array})
    level, sigma_map = split_sigma(sigma)
    part = split_flat(flat)
    if part is not None and (sigma is not None or noise != "auto"):
        raise typer.BadParameter("measures the noise; leave --sigma and --noise out, or --flat", param_hint="--flat")
    options = options_of(quality, strength, chosen)
    model = noise_of(noise, level if sigma_map is None else sigma_map, strength, chosen)
    _check_pipes(sources, target, as_json=as_json, recursive=recursive)
    for name, acts, why in (
        ("format", target == PIPE, "is for - as OUT; leave it out, and end the name of OUT so"),
        ("block", target.endswith(".zarr"), "is for an OUT that ends in .zarr; name one, or leave it out"),
        ("workers", target.endswith(".zarr"), "is for an OUT that ends in .zarr; name one, or leave it out"),
    ):
        if name in output.values and not acts:
            raise output.refuse(name, why)
    by_blocks = "block" in output.values or "workers" in output.values
    if target.endswith(".zarr") and (by_blocks or not _is_whole(sources, target, reading)):
        refused = {"--mask": mask, "--keep": keep, "--reference": reference, "--compare": compare,
                   "--sigma FILE": sigma_map, "--array": array, "--recursive": recursive or None,
                   "--verbose": verbose or None, "--flat": flat}  # fmt: skip
        for given_, name in ((chosen, "stopping"), (chosen, "device"), (output, "format"), (output, "quality")):
            harmless = name == "device" and options.device in ("auto", "cpu")
            refused[given_.hint(name)] = None if harmless else given_.values.get(name)
        hints = Given("--axes", reading, former)
        refused |= {hints.hint(name): reading.get(name) for name in ("kind", "first_column")}
        words = {"quality": quality, "noise": model, "options": options, "existing": existing,
                 "block": output.values.get("block"), **_workers(output)}  # fmt: skip
        words |= {name: reading.get(name) for name in ("channel_axis", "axes", "spacing")}
        _denoise_large(sources, target, level, words, refused, as_json=as_json, quiet=quiet)
        return
    from nlflow.desk.formats import prepare

    prepare(sources)
    from nlflow.desk.commands.denoise_file import Request
    from nlflow.desk.commands.jobs import plan, quality_misfit
    from nlflow.desk.commands.pipes import ends
    from nlflow.desk.formats.media import Writing

    check_device(options.device, chosen.hint("device"))
    beside = {"--sigma": sigma_map, "--keep": keep, "--reference": reference}
    beside["--mask"] = None if mask in (None, "nan") else Path(str(mask))
    request = Request(level, mask == "nan", reading, quality, model, options, Writing.of(output.values), part)
    with ends(sources, target, output.values.get("format")) as pipes:
        todo = plan(
            pipes.sources, pipes.target, figure=compare, beside=beside, existing=existing, frames="axes" in reading,
            recursive=recursive,
        )  # fmt: skip
        why = quality_misfit(todo.jobs, output.values["quality"]) if "quality" in output.values else ""
        if why:
            raise output.refuse("quality", why)
        for note in () if quiet else todo.notes:
            say("note", note)
        if todo.folder is not None and verbose:
            raise typer.BadParameter(
                "says how one file was denoised, got several; give --json, which has it of each", param_hint="--verbose"
            )
        if todo.folder is not None and part is not None:
            raise typer.BadParameter("is a part of one picture, and there are several; measure it in one of them "
                                     "(nonlocal noise FILE --flat ... --save MODEL.json), then give --noise MODEL.json",
                                     param_hint="--flat")  # fmt: skip
        if todo.folder is not None:
            from nlflow.desk.commands.denoise_folder import denoise_folder

            denoise_folder(todo, request, resume=existing == "resume", as_json=as_json, quiet=quiet)
        elif todo.jobs:
            _denoise_one(todo.jobs[0], request, pipes, as_json=as_json, quiet=quiet, verbose=verbose)
        elif as_json:
            print_json({"input": str(sources[0]), "output": target, "skipped": True})


def _check_pipes(sources: list[Path], target: str, *, as_json: bool, recursive: bool) -> None:
    names = [str(source) for source in sources]
    if PIPE not in (*names, target):
        return
    folder = any(source.is_dir() for source in sources) and target == PIPE
    if len(names) > 1 or recursive or folder or target.endswith((".zarr", "/")) or Path(target).is_dir():
        raise typer.BadParameter("got -, expected one file in and one file out beside it; name files", param_hint="IN")
    if as_json and target == PIPE:
        raise typer.BadParameter("goes to stdout, and so does the file; name OUT", param_hint="--json")


def _denoise_one(job: Job, request: Request, pipes: Ends, *, as_json: bool, quiet: bool, verbose: bool) -> None:
    """Denoise a file, and print what was done: to stderr where the file goes to stdout."""
    from nlflow.backends.machine import provenance, version
    from nlflow.desk import files
    from nlflow.desk.commands.denoise_file import denoise_file
    from nlflow.desk.commands.reports import summary

    def tell(level: str, text: str) -> None:
        if not quiet:
            say(level, pipes.told(text))

    progress = progress_of(quiet, pipes.told(str(job.source)))
    report = pipes.told(denoise_file(job, request, progress=progress, tell=tell))
    pipes.deliver()
    if pipes.piped:
        report["output"] += f", as {files.format_of(job.target).upper()}"
    if as_json:
        print_json(report | {"version": version(), "provenance": provenance()})
    elif not quiet:
        print_table(summary(report, verbose=verbose), err=pipes.piped)


# ---- an OUT of zarr, block by block


def _is_whole(sources: list[Path], target: str, reading: dict[str, Any]) -> bool:
    """Return whether an OUT of zarr is that of a stack, which is denoised as a whole and not block by block."""
    from nlflow.desk.files import is_stack

    if target.lower().endswith(".ome.zarr") or any(map(is_stack, sources)):
        return True
    return "axes" in reading and not all((s / "zarr.json").is_file() or (s / ".zarray").is_file() for s in sources)


def _workers(output: Given) -> dict[str, Any]:
    """Return who denoises blocks: so many processes of this machine, or the workers of a scheduler."""
    text = output.values.get("workers", "local")
    if not text.lstrip("+-").isdecimal():
        return {"scheduler": text, "workers": None}
    if int(text) < 1:
        raise output.refuse(
            "workers", f"got {text}, expected a number of processes >= 1, or the address of a scheduler"
        )
    return {"scheduler": "local", "workers": int(text)}


def _denoise_large(
    sources: list[Path], target: str, sigma: Any, words: dict[str, Any], refused: dict[str, Any], *, as_json: bool,
    quiet: bool,
) -> None:  # fmt: skip
    """Denoise an image block by block; none of the options `refused`, which need the whole image, may have a value."""
    from nlflow.backends.machine import version
    from nlflow.desk.large import denoise_store
    from nlflow.errors import renamed

    for option, value in refused.items():
        if value is not None:
            raise typer.BadParameter(
                "is decided by the whole image at once, and not by blocks; leave it out, or name OUT .tif or .npy",
                param_hint=option,
            )
    if len(sources) != 1:
        raise typer.BadParameter(f"got {len(sources)} inputs, expected one for an OUT of zarr", param_hint="IN")
    if words["existing"] == "skip":
        raise typer.BadParameter("got skip, expected refuse, overwrite or resume for one OUT", param_hint="--existing")
    if words["noise"] == "auto" and sigma is None and not quiet:
        told = "the noise is taken to be white, since blocks know no other; to have it found out, name OUT .tif or .npy"
        say("note", told)
    notes: list[str] = []

    def note(text: str) -> None:
        notes.append(text)
        if not quiet:
            say("note", text)

    start, log = time.perf_counter(), progress_of(quiet, str(sources[0]))
    with progress_bar(quiet, desc="denoise", unit="block") as bar:

        def tell(done: int, count: int) -> None:
            bar.total, bar.n = count, done
            bar.refresh()
            if callable(log):
                log(done / count)

        with named(sources[0]), renamed("target", "OUT"):
            info, counts = denoise_store(sources[0], target, sigma, progress=tell, note=note, **words)
    details = info.as_dict()
    details.pop("residual")  # nobody has computed it
    seconds = time.perf_counter() - start
    if as_json:
        print_json({"input": str(sources[0]), "output": target, "sigma_given": sigma, **counts, "denoise": details,
                    "notes": notes, "seconds_total": seconds, "version": version()})  # fmt: skip
    elif not quiet:
        kept = f" ({counts['kept']} of them done before)" if counts["kept"] else ""
        origin = "estimated" if info.sigma_estimated else "given"
        sigma_told = f"{info.sigma:.4g} ({origin}): standard deviation of the noise, in the units of the file"
        rows = [("input", str(sources[0])), ("noise", info.noise)]
        rows += [("sigma", sigma_told)] if has_sigma(info.model) else []
        print_table([*rows, ("blocks", f"{counts['blocks']}{kept}"), ("time", f"{seconds:.1f} s"), ("written", target)])
