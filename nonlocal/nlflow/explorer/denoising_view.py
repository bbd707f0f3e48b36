"""What the tab "Denoise" computes, and the texts that compute the same."""

from __future__ import annotations

import shlex
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import PurePath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nlflow.denoising import Trail, denoise
from nlflow.denoising.info import DenoiseInfo
from nlflow.denoising.inputs import OF_FAST
from nlflow.denoising.quality import psnr, snr, ssim
from nlflow.explorer.sources import EXAMPLE, Crop, Source, cropped, slices
from nlflow.explorer.texts import call, shell
from nlflow.io.formats.media import Array

__all__ = ["DenoiseResult", "DenoiseSettings", "as_command", "as_python", "command_note", "compute"]


_OF_SIGNALS = {"psnr": psnr, "snr": snr}


@dataclass(frozen=True)
class DenoiseSettings:
    """What may be set, as `nlflow.denoise` takes it; None: chosen from the noise.

    Attributes
    ----------
    sigma : float or None
        Standard deviation of the noise, in the units of the file.
    quality : {'fast', 'balanced', 'best'}
    width : float or None
        Filter parameter of the kernel, in the units of the file; ``fast`` only, as all that follow.
    patch_size, search_radius : int or None
        Nodes.
    fidelity : float or None
        The number lambda~.
    steps : int or None
        The flow's time: steps have length 1.
    crop : Crop or None
        The part that is denoised; None for all.
    """

    sigma: float | None = None
    quality: str = "fast"
    width: float | None = None
    patch_size: int | None = None
    search_radius: int | None = None
    fidelity: float | None = None
    steps: int | None = None
    crop: Crop | None = None

    def words(self) -> dict[str, Any]:
        """Return the words for `nlflow.denoise`; what is chosen is left out, and what the quality does not have."""
        skipped = {"crop"} if self.quality == "fast" else {"crop", *OF_FAST}
        given = {one.name: getattr(self, one.name) for one in fields(self) if one.name not in skipped}
        return {name: value for name, value in given.items() if value is not None}


@dataclass(frozen=True)
class DenoiseResult:
    """What was computed.

    Attributes
    ----------
    settings : DenoiseSettings
    noisy, result : array
        In the units of the file; of the part that was computed.
    clean : array or None
    info : DenoiseInfo
    course : dict of str to array
        See `nlflow.denoising.following.Trail`.
    figures : dict of str to float or None
        ``psnr_input``, ``psnr_output`` and ``ssim_input``, ``ssim_output`` (images) or ``snr_input``, ``snr_output``
        (signals) where there is a reference; of a table the means over its columns.
    notes : tuple of str
        Warnings.
    """

    settings: DenoiseSettings
    noisy: Array
    result: Array
    clean: Array | None
    info: DenoiseInfo
    course: dict[str, NDArray[np.float64]]
    figures: dict[str, float | None] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def residual(self) -> Array:
        """Input minus result."""
        return np.asarray(self.noisy.astype(np.float64) - self.result)


def compute(
    settings: DenoiseSettings,
    source: Source,
    *,
    trail: Trail | None = None,
    progress: Callable[[float], Any] | None = None,
) -> DenoiseResult:
    """Denoise a source.

    Parameters
    ----------
    settings : DenoiseSettings
    source : Source
    trail : Trail, optional
        Keeps weights from one call to the next; without it nothing is kept.
    progress : callable, optional
        Gets the share done and may raise, which ends the call; see `nlflow.denoise`.

    Raises
    ------
    InputError
        As `nlflow.denoise`.
    """
    trail = Trail() if trail is None else trail
    noisy, clean = cropped(source, settings.crop)
    axis = source.media.channel_axis
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        trail.tell = progress
        words = settings.words() | _layout(source) | {"preserve_range": True, "return_info": True}
        result, info = denoise(noisy, **words, progress=trail)
    figures: dict[str, float | None] = {}
    if clean is not None:
        for name, data in (("input", noisy), ("output", result)):
            figures[f"psnr_{name}"] = psnr(clean, data)
            if source.media.kind == "image":
                figures[f"ssim_{name}"] = ssim(clean, data, axis)
            else:
                figures[f"snr_{name}"] = snr(clean, data)
            if source.media.separate:
                figures |= {f"{one}_{name}": _mean(measure, clean, data) for one, measure in _OF_SIGNALS.items()}
    notes = tuple(dict.fromkeys(str(one.message) for one in caught))
    return DenoiseResult(settings, noisy, result, clean, info, dict(trail.course), figures, notes)


def _mean(measure: Callable[[Array, Array], float], clean: Array, data: Array) -> float:
    """Return the mean of a figure over the columns of a table, whose units differ."""
    return float(np.mean([measure(clean[:, c], data[:, c]) for c in range(data.shape[1])]))


def _layout(source: Source) -> dict[str, Any]:
    """Return what `nlflow.denoise` has to know of the channels; the columns of a table are signals of their own."""
    return {"channel_axis": source.media.channel_axis} | ({"separate": True} if source.media.separate else {})


def as_python(settings: DenoiseSettings, source: Source) -> str:
    """Return a program that makes ``noisy``, ``result``, ``info``, ``curves`` and, with a reference, ``clean``.

    ``result`` has the bits of `compute`, and so have the curves.
    """
    axis = source.media.channel_axis
    own = "from nlflow.denoising import Trail, denoise"
    words = {**settings.words(), **_layout(source), "preserve_range": True, "return_info": True}
    if source.built_in:
        lines = [EXAMPLE, ""]
        imports = [own]
    else:
        layout = {"kind": source.media.kind, "channel_axis": axis} if source.media.format == "npy" else {}
        given = {name: value for name, value in layout.items() if value is not None}
        lines = [call("media", "read", repr(source.name), given), "noisy = media.data"]
        imports = [own, "from nlflow.io.files import read"]
        if source.clean is not None:
            imports = ["from pathlib import Path", "", "from nlflow.io.companions import read_reference", own]
            imports.append("from nlflow.io.files import read")
            lines.append(f'clean, _ = read_reference("clean", Path({source.clean_name!r}), media)')
    if settings.crop is not None:
        part = ", ".join(
            ":" if one == slice(None) else f"{one.start}:{one.stop}" for one in slices(source, settings.crop)
        )
        lines.append(f"noisy = noisy[{part}]")
        if source.clean is not None:
            lines.append(f"clean = clean[{part}]")
    lines += ["trail = Trail()", call("result, info", "denoise", "noisy, progress=trail", words)]
    if source.clean is not None:
        lines += _quality_lines(source)
    lines += [
        "",
        "curves = trail.course",
    ]
    return "\n".join([*imports, "", *lines]) + "\n"


def _quality_lines(source: Source) -> list[str]:
    names = ["psnr", "ssim"] if source.media.kind == "image" else ["psnr", "snr"]
    lines = ["", f"from nlflow.denoising.quality import {', '.join(names)}", ""]
    if source.media.separate:
        lines.append("for c in range(clean.shape[1]):")
        for name in names:
            lines.append(f"    print({name!r}, c, {name}(clean[:, c], noisy[:, c]), {name}(clean[:, c], result[:, c]))")
        return lines
    for name in names:
        axis = f", {source.media.channel_axis!r}" if name == "ssim" else ""
        lines.append(f"print({name!r}, {name}(clean, noisy{axis}), {name}(clean, result{axis}))")
    return lines


def command_note(settings: DenoiseSettings, source: Source) -> str:
    """Return what is to be known of the command; nothing where it is ``nonlocal denoise``."""
    if not source.built_in and settings.crop is None:
        return ""
    what = "The example is no file" if source.built_in else "A part of the file is shown"
    return f"{what}: the command runs the Python text and saves the result as {_array_name(settings, source)}."


def _array_name(settings: DenoiseSettings, source: Source) -> str:
    part = "".join(f"-{low}-{high}" for low, high in settings.crop or ())
    return f"{'example' if source.built_in else PurePath(source.name).stem}{part}-denoised.npy"


def as_command(settings: DenoiseSettings, source: Source) -> str:
    """Return a command that writes the result to a file: see `command_note`."""
    if command_note(settings, source):
        # Opened for a new file alone: what is there is not replaced.
        name = _array_name(settings, source)
        saving = f"import numpy as np\n\nwith open({name!r}, 'xb') as file:\n    np.save(file, result)"
        return shell(as_python(settings, source), saving)
    path = PurePath(source.name)
    words = ["nonlocal", "denoise", source.name, str(path.with_name(f"{path.stem}-denoised{path.suffix}"))]
    words += ["--quality", settings.quality]
    if settings.sigma is not None:
        words += ["--sigma", repr(settings.sigma)]
    for name, value in settings.words().items():
        if name in OF_FAST:
            words += [f"--{name.replace('_', '-')}", repr(value)]
    if source.media.format == "npy":
        words += ["--kind", source.media.kind]
        if source.media.channel_axis is not None:
            words += ["--channel-axis", str(source.media.channel_axis)]
    if source.clean is not None:
        words += ["--reference", source.clean_name]
    return shlex.join(words)
