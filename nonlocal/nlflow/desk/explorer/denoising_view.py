"""What "Denoise" computes."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from pathlib import Path, PurePath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nlflow.denoising import Trail, denoise
from nlflow.denoising.info import DenoiseInfo
from nlflow.denoising.noise import GaussianNoise, Noise, noise_of
from nlflow.denoising.noise.names import has_sigma
from nlflow.denoising.options import OF_PIXELS
from nlflow.desk.companions import measures, nearness
from nlflow.desk.explorer.sources import EXAMPLE, PREVIEW_PIXELS, Crop, Source, slices
from nlflow.desk.explorer.texts import call, shell
from nlflow.desk.formats import axes, written_extension
from nlflow.desk.formats.media import ARRAYS, Array, Media, extension
from nlflow.desk.options import as_words
from nlflow.errors import command
from nlflow.plotting.noise import NoiseCurves, model_curves


@dataclass(frozen=True)
class NoiseFile:
    """A model of noise and its file."""

    name: str
    model: Noise

    def __repr__(self) -> str:
        return f"load_noise({self.name!r})"


_NARROW = 3  # pixels to each side, the window of a coarse answer


@dataclass(frozen=True)
class DenoiseSettings:
    """Settings of the tab; None is chosen from the noise."""

    # Standard deviation of white noise, in the units of the file; found out with its kind where not given.
    sigma: float | None = None
    strength: float | None = None  # how many times the noise that was found counts
    quality: str = "fast"  # {'pixels', 'fast', 'balanced', 'best'}
    noise: str | NoiseFile = "auto"  # which noise it is: a word of `nlflow.denoising.noise.names.WORDS`, or a model
    # Filter parameter of the kernel, in the units of the file; ``pixels`` only, as all that follow.
    width: float | None = None
    # patch_size, search_radius: nodes.
    patch_size: int | None = None
    search_radius: int | None = None
    fidelity: float | None = None  # the number lambda~
    steps: int | None = None  # the flow's time: steps have length 1
    crop: Crop | None = None  # the part that is denoised; None for all

    def words(self, *, stacked: bool = False) -> dict[str, Any]:
        skipped = {"crop"} if self.quality == "pixels" and not stacked else {"crop", *OF_PIXELS}
        given = {one.name: getattr(self, one.name) for one in fields(self) if one.name not in skipped}
        return {
            name: value for name, value in given.items() if value is not None and (name, value) != ("noise", "auto")
        }


@dataclass(frozen=True)
class DenoiseResult:
    """A result."""

    settings: DenoiseSettings
    # noisy, result: in the units of the file; of the part that was computed.
    noisy: Array
    result: Array
    clean: Array | None
    info: DenoiseInfo
    course: dict[str, NDArray[np.float64]]  # see `nlflow.denoising.Trail`
    # ``psnr_input``, ``psnr_output`` and ``ssim_input``, ``ssim_output`` (images) or ``snr_input``, ``snr_output``
    # (signals) where there is a reference; of a table the means over its columns; of a stack ``psnr_*`` alone, over all
    # that was denoised.
    figures: dict[str, float | None] = field(default_factory=dict)
    notes: tuple[str, ...] = ()  # warnings
    # Of the noise that was found out; of a table that of its first column, of a stack over the intensities of the
    # picture in the middle.
    noise: NoiseCurves | None = None
    coarse: bool = False  # whether it is what `coarse` returns

    @property
    def residual(self) -> Array:
        return np.asarray(self.noisy.astype(np.float64) - self.result)


def compute(
    settings: DenoiseSettings,
    source: Source,
    *,
    trail: Trail | None = None,
    progress: Callable[[float], Any] | None = None,
    seen: Callable[[DenoiseResult], Any] = lambda result: None,
) -> DenoiseResult:
    """Denoise a source; `seen` gets the result before its measures, `trail` keeps weights between calls."""
    trail = Trail() if trail is None else trail
    noisy, clean = source.media.data, source.clean
    if settings.crop is not None:
        part = slices(source, settings.crop)
        noisy, clean = noisy[part], None if clean is None else clean[part]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        trail.tell = progress
        words = _words(settings, source)
        if isinstance(settings.noise, NoiseFile):
            words["noise"] = settings.noise.model
        result, info = denoise(noisy, **words, progress=trail)
    notes = tuple(dict.fromkeys(str(one.message) for one in caught))
    found = DenoiseResult(settings, noisy, result, clean, info, dict(trail.course), notes=notes)
    seen(found)
    figures = {} if clean is None else nearness(source.media, clean, noisy, result)
    curves = _noise(info, noisy, source.media) if settings.sigma is None else None
    return replace(found, figures=figures, noise=curves)


def coarse(settings: DenoiseSettings, source: Source, at: int, known: DenoiseResult | None) -> DenoiseResult | None:
    media = source.media
    quick = settings.quality != "best" and not media.stacked
    if quick or known is None or _differs(settings, known.settings):
        return None
    crop = settings.crop or tuple((0, n) for n in source.shape)
    axis = media.channel_axis
    if media.stacked:
        through = axes.through(media)
        crop = (*crop[:through], (at, at + 1), *crop[through + 1 :])
        axis = axes.plane_channels(media)
    elif media.kind != "image":
        return None
    if math.prod(high - low for low, high in crop) > PREVIEW_PIXELS:
        return None
    part = slices(source, crop)
    noisy, clean = media.data[part], None if source.clean is None else source.clean[part]
    flat = axes.plane(noisy, media, 0) if media.stacked else noisy
    result, info = denoise(flat, **_coarse_words(settings, known, media), channel_axis=axis)
    result = np.expand_dims(result, axes.through(media, channels=True)) if media.stacked else result
    return DenoiseResult(replace(settings, crop=crop), noisy, result, clean, info, {}, coarse=True)


def _differs(settings: DenoiseSettings, known: DenoiseSettings) -> bool:
    """Whether a result does not prepare the next one: it is of another quality, or its noise is another one."""
    same = (settings.quality, settings.noise) == (known.quality, known.noise)
    return not same or (settings.sigma is None and known.sigma is not None)


def _coarse_words(settings: DenoiseSettings, known: DenoiseResult, media: Media) -> dict[str, Any]:
    words = settings.words(stacked=media.stacked)
    window = min(words.get("search_radius", _NARROW), _NARROW)
    words |= {"quality": "pixels", "search_radius": window, "preserve_range": True, "return_info": True}
    if settings.sigma is None and not (isinstance(settings.noise, str) and not has_sigma(settings.noise)):
        words["noise"] = _model(known.info)
        words["strength"] = (settings.strength or 1) / (known.settings.strength or 1)  # the model holds the former
    return words


def _model(info: DenoiseInfo) -> Noise:
    return GaussianNoise(info.sigma) if info.model is None else noise_of(info.model)


def _noise(info: DenoiseInfo, noisy: Array, media: Media) -> NoiseCurves:
    axis = media.channel_axis
    if media.stacked:  # curves are those of a picture
        middle = noisy.shape[axes.through(media, channels=True)] // 2
        noisy, axis = axes.plane(noisy, media, middle), axes.plane_channels(media)
    if info.columns:
        info, noisy, axis = info.columns[0], np.take(noisy, 0, -1 if axis is None else axis), None
    return model_curves(_model(info), noisy, channel_axis=axis)


def _words(settings: DenoiseSettings, source: Source) -> dict[str, Any]:
    """Return all arguments for `nlflow.denoise`; each column of a table is a signal of its own."""
    media = source.media
    layout: dict[str, Any] = {"channel_axis": media.channel_axis} | ({"separate": True} if media.separate else {})
    layout = axes.words_of(media) if media.stacked else layout
    return {**settings.words(stacked=media.stacked), **layout, "preserve_range": True, "return_info": True}


def as_python(settings: DenoiseSettings, source: Source) -> str:
    media, compared = source.media, source.clean is not None
    imports = ["from nlflow import denoise", "from nlflow.denoising import Trail"]
    if compared:
        imports.append(f"from nlflow.denoising.quality import {', '.join(measures(media))}")
    if source.built_in:
        lines = [EXAMPLE, ""]
    else:
        lines = [call("media", "read", repr(source.name), _reading(source)), "noisy = media.data"]
        if compared:
            imports = ["from pathlib import Path", "", *imports, "from nlflow.desk.companions import read_reference"]
            lines.append(f'clean, _ = read_reference("clean", Path({source.clean_name!r}), media)')
        imports.append("from nlflow.desk.files import read")
    if isinstance(settings.noise, NoiseFile):
        imports.append("from nlflow.denoising.noise import load_noise")
    if settings.crop is not None:
        cuts = (":" if one == slice(None) else f"{one.start}:{one.stop}" for one in slices(source, settings.crop))
        part = ", ".join(cuts)
        lines += [f"{name} = {name}[{part}]" for name in (("noisy", "clean") if compared else ("noisy",))]
    denoised = call("result, info", "denoise", "noisy, progress=trail", _words(settings, source))
    lines += ["trail = Trail()", denoised, "curves = trail.course"]
    return "\n".join([*imports, "", *lines, *(_quality_lines(media) if compared else [])]) + "\n"


def _reading(source: Source) -> dict[str, Any]:
    """Return what the reader of a source is to be told, so that it finds the same in the file."""
    media = source.media
    layout = (
        {"kind": media.kind, "channel_axis": media.channel_axis} if media.format in ARRAYS and not media.axes else {}
    )
    return {name: value for name, value in layout.items() if value is not None} | source.reading


def _quality_lines(media: Media) -> list[str]:
    part, indent = ("[:, c]", "    ") if media.separate else ("", "")
    lines = ["", *(["for c in range(clean.shape[1]):"] if media.separate else [])]
    for name in measures(media):
        axis = f", {media.channel_axis!r}" if name == "ssim" else ""
        figures = (f"{name}(clean{part}, {data}{part}{axis})" for data in ("noisy", "result"))
        lines.append(f"{indent}print({', '.join([repr(name), *(['c'] if part else []), *figures])})")
    return lines


def command_note(settings: DenoiseSettings, source: Source) -> str:
    if not source.built_in and settings.crop is None:
        return ""
    what = "The example is no file" if source.built_in else "A part of the file is shown"
    return f"{what}: the command runs the Python text and saves the result as {_array_name(settings, source)}."


def _array_name(settings: DenoiseSettings, source: Source) -> str:
    part = "".join(f"-{low}-{high}" for low, high in settings.crop or ())
    return f"{'example' if source.built_in else PurePath(source.name).stem}{part}-denoised.npy"


def as_command(settings: DenoiseSettings, source: Source) -> str:
    if command_note(settings, source):
        return shell(as_python(settings, source), _array_name(settings, source), "np.save(file, result)")
    path, media = PurePath(source.name), source.media
    options = {"quality": settings.quality, **settings.words(stacked=media.stacked)}
    if isinstance(settings.noise, NoiseFile):
        options["noise"] = settings.noise.name
    finer = {name: options.pop(name) for name in OF_PIXELS if name in options}
    known, written = extension(Path(source.name)), written_extension(Path(source.name))
    suffix = path.name[len(path.name) - len(known) :]  # .nii.gz is one
    new = suffix if written in ("", known) else written
    if source.clean is not None:
        options["reference"] = source.clean_name
    target = path.with_name(f"{path.name.removesuffix(suffix)}-denoised{new}")
    words: list[object] = ["nonlocal", "denoise", path, target]
    for name, value in options.items():
        words += [f"--{name.replace('_', '-')}", str(value)]
    for name, value in finer.items():
        words += ["--set", f"{name.replace('_', '-')}={value}"]
    return command(*words, *as_words(_reading(source)))
