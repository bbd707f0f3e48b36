"""The command ``nonlocal denoise``: files and folders of images and signals."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from nlflow.denoising.noise.names import WORDS
from nlflow.desk.commands.effects import refuse_without_film
from nlflow.desk.commands.wording import (
    DeviceName,
    Quality,
    check_pipes,
    is_whole,
    noise_of,
    of_fast,
    parse_bytes,
    split_flat,
    split_sigma,
    split_spacing,
    video_coding,
)
from nlflow.desk.terminal import print_json, print_table, progress_of, say

if TYPE_CHECKING:
    from nlflow.desk.commands.inputs import Options
    from nlflow.desk.commands.jobs import Job
    from nlflow.desk.commands.pipes import Ends

BRIEF = """Remove noise from images, signals, volumes and video.

Kind and strength of the noise are found out, unless told. OUT has the size, the type and the units of IN. Several files
or a folder need a folder as OUT. - is stdin or stdout, in the format of IN or of --format.

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
    "quiet", "form",
)  # fmt: skip

_WORDS = "\n".join(f"  {f'--noise {name}':<38}{word.help}" for name, word in WORDS.items() if name != "auto")

HELP = f"""Remove noise from images, signals, volumes and video.

The result has the size, the type and the units of the input: grey levels 0..255 for an 8-bit image, raw samples
for a WAV file. What comes with the samples is kept: alpha channel, orientation, EXIF, colour profile, resolution,
TIFF description, sample rate and format, column names. A note names what OUT cannot hold. OUT may have another
format than IN if it can hold the data; NPY, NPZ and CSV keep all digits.

Formats: PNG, JPEG, TIFF, BMP, WebP; NPY, NPZ, MAT (5 and 7.3), HDF5 (extra hdf5); WAV, CSV; stacks and video (below).
Read only, with OUT in another format: GIF (its first frame), AVIF, camera raws (DNG, NEF, CR2, ARW, ...; extra raw).
The content of a file decides what it is, and not its name. Of several arrays in a file, --array names one; OUT of the
same format keeps the others. IN or OUT may be - for stdin or stdout, which gets the format of IN or of --format.

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
  --noise poisson --gain 2.1 --read-noise 4 --offset 100
                                        raw data of a camera

\b
Colours, and the channels of WAV and NPY files, are denoised together: patches are compared in all channels at once, and
one noise level is estimated. Each column of a CSV table is denoised alone, in its own units, with its own
estimated level. One number for --sigma is the level of every column; several numbers are one for each column. The first
of several columns is kept as it is if it has a name for times (time, t, index), or is strictly increasing or
decreasing; a note says so. --first-column denoise or keep decides otherwise. Rows out of the order of their times are
refused: sort them first.

\b
Quality against time: --quality fast, balanced (default) or best. --stopping says when the smoothing ends: by the
discrepancy principle (the residual is as large as the noise) or by SURE (the estimated risk is smallest). The settings
that fast chooses by itself can be given: --width, --patch-size, --search-radius, --fidelity, --steps.

\b
Files that belong to IN, of its size (pictures as they are seen, arrays as they are stored):
  --mask FILE       where it is not 0, samples are missing and are filled in
  --mask nan        samples that are NaN or infinite are filled in
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
  --axes ZYX        which axis is which, where the file does not say it: Z slices, T times, Y, X, C channels
  --spacing 5,1,1   how far apart slices, rows and columns are, in any unit
  --video-quality   lossless, or a rate factor from 0 (best) to 51
With times and slices, each time is denoised on its own. Axes, distances and metadata are kept.

\b
--device cuda runs the flows of balanced and best on a GPU (extra torch), auto where there is one, cpu-tensors on
tensors of the CPU, to compare with. The noise is found out, and fast and clips are denoised, on the CPU.

\b
Larger than memory: if OUT ends in .zarr and IN is a zarr array (of a stack with --axes) or a TIFF file of one picture
(of pages with --axes and --block), noise is taken to be white (or of counts), and OUT is written block by block by
processes of this machine, or by workers of --scheduler. Until it is complete it is called OUT.partial; with --existing
resume the same command goes on with that.

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
  nonlocal denoise holes.npy filled.npy --mask nan
  nonlocal denoise ecg.csv out.csv --compare ecg.pdf
  nonlocal denoise bands.npy out.npy --channel-axis 0
  nonlocal denoise stack.tif out.tif
  nonlocal denoise pages.tif out.tif --axes ZYX --spacing 0.5,0.2,0.2
  nonlocal denoise scan.nii.gz out.nii.gz --mask nan
  nonlocal denoise film.mp4 out.mp4 --video-quality 8
  nonlocal denoise frames cleaned --axes TYX
  nonlocal denoise eeg.npy out.npy --kind signal
  nonlocal denoise noisy.png out.png --quality fast --sigma 20 --width 12 --steps 5
  nonlocal denoise slide.tif clean.zarr --sigma 25 --quality fast
  nonlocal denoise volume.zarr clean.zarr --axes ZYX --quality fast --max-memory 4GiB
  nonlocal denoise sky.zarr clean.zarr --scheduler tcp://10.0.0.1:8786
"""


Existing = Literal["refuse", "overwrite", "skip", "resume"]


def denoise(
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
        str,
        typer.Option(metavar=f"{'|'.join(WORDS)}|FILE", help="Kind of the noise: found out, a word, or a model."),
    ] = "auto",
    flat: Annotated[
        str | None,
        typer.Option(metavar="ROWS,COLUMNS", help="Measure the noise in a flat part of a picture: 20:84,300:400."),
    ] = None,
    strength: Annotated[
        float | None, typer.Option(metavar="NUMBER", help="Count so many times the noise that was found or given.")
    ] = None,
    gain: Annotated[float | None, typer.Option(metavar="NUMBER", help="Units of the file per count.")] = None,
    read_noise: Annotated[
        float | None, typer.Option(metavar="NUMBER", help="Gaussian noise beside that of counts, in the file's units.")
    ] = None,
    offset: Annotated[float | None, typer.Option(metavar="NUMBER", help="What the file holds for no counts.")] = None,
    mask: Annotated[
        str | None, typer.Option(metavar="FILE|nan", help="Samples to fill in: not 0 in FILE, or those that are NaN.")
    ] = None,
    keep: Annotated[Path | None, typer.Option(metavar="FILE", help="Samples to leave as they are: not 0.")] = None,
    reference: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Noise-free reference: report PSNR and SSIM or SNR.")
    ] = None,
    compare: Annotated[
        Path | None, typer.Option(metavar="FIG", help="Also draw noisy, result and residual (.png, .pdf, .svg).")
    ] = None,
    stopping: Annotated[
        Literal["discrepancy", "sure"] | None,
        typer.Option(help="Rule by which the flow ends [default: that of the quality]."),
    ] = None,
    width: Annotated[
        float | None,
        typer.Option(
            metavar="NUMBER", help="Of fast: filter parameter h, in the file's units [default: of the noise]."
        ),
    ] = None,
    patch_size: Annotated[
        int | None, typer.Option(metavar="ODD", help="Of fast: side of the patches [default: of the noise].")
    ] = None,
    search_radius: Annotated[
        int | None,
        typer.Option(metavar="PIXELS", help="Of fast: half side of the search window [default: of the noise]."),
    ] = None,
    fidelity: Annotated[
        float | None,
        typer.Option(metavar="NUMBER", help="Of fast: one lambda~ for all samples, 0 for the J-flow [default: local]."),
    ] = None,
    steps: Annotated[
        int | None, typer.Option(metavar="COUNT", help="Of fast: exactly this many steps [default: to the noise].")
    ] = None,
    max_memory: Annotated[
        int | None,
        typer.Option(metavar="SIZE", parser=parse_bytes, help="Work in tiles below this size, e.g. 2GiB."),
    ] = None,
    kind: Annotated[
        Literal["image", "signal"] | None, typer.Option(help="What a two-dimensional .npy array is.")
    ] = None,
    channel_axis: Annotated[
        int | None, typer.Option(metavar="INDEX", help="Axis of the channels in an .npy array.")
    ] = None,
    axes: Annotated[
        str | None,
        typer.Option(
            metavar="LETTERS", help="Which axis of a stack is which: ZYX, TYX, CZYX, ... [default: the file's]."
        ),
    ] = None,
    spacing: Annotated[
        str | None,
        typer.Option(
            metavar="NUMBERS", help="Distance of samples along Z, Y and X, with commas between [default: the file's]."
        ),
    ] = None,
    video_quality: Annotated[
        str | None,
        typer.Option(
            metavar="NUMBER|lossless", help="Of a video that is written: rate factor, 0 (best) to 51 [default: 12]."
        ),
    ] = None,
    first_column: Annotated[
        Literal["keep", "denoise"] | None,
        typer.Option(help="What becomes of the first CSV column [default: kept if it is times or monotone]."),
    ] = None,
    device: Annotated[DeviceName, typer.Option(help="Where balanced and best run; all else runs on the CPU.")] = "cpu",
    array: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Which array of an NPZ, MAT or HDF5 file, where there are several."),
    ] = None,
    recursive: Annotated[
        bool, typer.Option("--recursive", "-r", help="Folders inside folders too; OUT gets the same tree.")
    ] = False,
    form: Annotated[
        str | None,
        typer.Option("--format", metavar="EXTENSION", help="Of - as OUT: png, tif, npy, ... [default: that of IN]."),
    ] = None,
    existing: Annotated[Existing, typer.Option(help="What to do about outputs that exist.")] = "refuse",
    scheduler: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="Dask scheduler whose workers denoise an OUT of zarr [default: local]."),
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(metavar="COUNT", help="Local processes for an OUT of zarr [default: all cores].")
    ] = None,
    block: Annotated[
        int | None,
        typer.Option(
            metavar="PIXELS",
            help="Side of the blocks of an OUT of zarr [default: 1024 for fast, or 2048; of volumes 256 or 192].",
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Report as one JSON object; of several inputs, with a list 'files'.")
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Say how it was done too: flow, steps, memory and so on.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors, and --json.")] = False,
) -> None:
    """Remove noise from images, signals, volumes and video."""
    level, sigma_map = split_sigma(sigma)
    part = split_flat(flat)
    if part is not None and (sigma is not None or noise != "auto"):
        raise typer.BadParameter("measures the noise; leave --sigma and --noise out, or --flat", param_hint="--flat")
    if strength is not None and not 0 <= strength < math.inf:
        raise typer.BadParameter(f"got {strength:g}, expected a number >= 0", param_hint="--strength")
    words: dict[str, Any] = {
        "quality": quality,
        "noise": noise_of(
            noise, level if sigma_map is None else sigma_map, strength, gain=gain, read_noise=read_noise, offset=offset
        ),
        "strength": 1.0 if strength is None else strength,
        "stopping": stopping,
        "max_memory": max_memory,
        "device": device,
        **of_fast(
            stopping, width=width, patch_size=patch_size, search_radius=search_radius, fidelity=fidelity, steps=steps
        ),
    }  # fmt: skip
    if verbose and (quiet or as_json):
        raise typer.BadParameter(
            "is for the printed report; leave it out, or --quiet and --json", param_hint="--verbose"
        )
    check_pipes(sources, target, as_json=as_json, recursive=recursive)
    large = scheduler is not None or jobs is not None or block is not None
    if target.endswith(".zarr") and (large or not is_whole(sources, target, axes)):
        from nlflow.desk.commands.denoise_large import denoise_large

        refused = {"--mask": mask, "--keep": keep, "--reference": reference, "--compare": compare, "--kind": kind,
                   "--stopping": stopping, "--sigma FILE": sigma_map, "--first-column": first_column,
                   "--video-quality": video_quality, "--array": array, "--format": form,
                   "--recursive": recursive or None, "--verbose": verbose or None, "--flat": flat,
                   "--device": None if device in ("auto", "cpu") else device}  # fmt: skip
        del words["stopping"], words["device"]
        words |= {"channel_axis": channel_axis, "existing": existing, "workers": jobs, "block": block, "axes": axes,
                  "spacing": split_spacing(spacing), "scheduler": scheduler or "local"}  # fmt: skip
        denoise_large(sources, target, level, words, refused, as_json=as_json, quiet=quiet)
        return
    from nlflow.desk.commands.denoise_folder import denoise_folder
    from nlflow.desk.commands.inputs import Options, check_device
    from nlflow.desk.commands.jobs import plan
    from nlflow.desk.commands.pipes import ends
    from nlflow.desk.files import format_of

    check_device(device)
    fill_nan = mask == "nan"
    beside = {"--sigma": sigma_map, "--keep": keep, "--reference": reference}
    beside["--mask"] = None if mask is None or fill_nan else Path(mask)
    options = Options(level, fill_nan, kind, channel_axis, words, first_column, axes, split_spacing(spacing),
                      video_coding(video_quality), array, part)  # fmt: skip
    with ends(sources, target, form) as pipes:
        todo = plan(
            pipes.sources, pipes.target, figure=compare, beside=beside, existing=existing, frames=axes is not None,
            recursive=recursive,
        )  # fmt: skip
        films = any(format_of(job.target) == "video" for job in todo.jobs)
        refuse_without_film(films or not todo.jobs, video_quality)
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
            denoise_folder(todo, options, resume=existing == "resume", as_json=as_json, quiet=quiet)
        elif todo.jobs:
            _denoise_one(todo.jobs[0], options, pipes, as_json=as_json, quiet=quiet, verbose=verbose)
        elif as_json:
            print_json({"input": str(sources[0]), "output": target, "skipped": True})


def _denoise_one(job: Job, options: Options, pipes: Ends, *, as_json: bool, quiet: bool, verbose: bool) -> None:
    """Denoise a file, and print what was done: to stderr where the file goes to stdout."""
    from nlflow.backends.machine import provenance, version
    from nlflow.desk import files
    from nlflow.desk.commands.denoise_file import denoise_file
    from nlflow.desk.commands.reports import summary

    def tell(level: str, text: str) -> None:
        if not quiet:
            say(level, pipes.told(text))

    progress = progress_of(quiet, pipes.told(str(job.source)))
    report = pipes.told(denoise_file(job, options, progress=progress, tell=tell))
    pipes.deliver()
    if pipes.piped:
        report["output"] += f", as {files.format_of(job.target).upper()}"
    if as_json:
        print_json(report | {"version": version(), "provenance": provenance()})
    elif not quiet:
        print_table(summary(report, verbose=verbose), err=pipes.piped)
