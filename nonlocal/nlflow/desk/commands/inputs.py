"""What a command is told about all of its files, and what was read for a job of it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import typer

from nlflow.backends.devices import choose_device
from nlflow.desk.files import Array, FirstColumn, Kind, Media, upright
from nlflow.errors import InputError

if TYPE_CHECKING:
    from nlflow.denoising.noise import NoiseEstimate


def check_device(device: str) -> None:
    """Raise what gives exit code 2, as every option of which there is no such value, where a device is missing."""
    try:
        choose_device(device)
    except InputError as error:
        raise typer.BadParameter(str(error).removeprefix("device: "), param_hint="--device") from None


@dataclass
class Inputs:
    """What was read for a job; `missing` has the shape of the data, `notes` are those of the files beside the input."""

    media: Media
    sigma: Any
    mask: Any = None
    keep: Array | None = None
    reference: Array | None = None
    missing: Array | None = None
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Options:
    """How every file of a command is denoised.

    Attributes
    ----------
    sigma : float, list of float or None
        Given noise; a map of it is a file beside the input.
    fill_nan : bool
        Whether samples that are no numbers are missing ones.
    kind, channel_axis, first_column, axes, spacing, array
        See `nlflow.desk.files.read`.
    video_quality : int or "lossless", optional
        Of a film that is written.
    flat : pair of slice, optional
        Rows and columns of a part of a picture, as it is seen, in which its noise is measured.
    words : dict
        Further words for `nlflow.denoise`.
    """

    sigma: float | list[float] | None
    fill_nan: bool
    kind: Kind | None
    channel_axis: int | None
    words: dict[str, Any]
    first_column: FirstColumn | None = None
    axes: str | None = None
    spacing: list[float] | None = None
    video_quality: int | str | None = None
    array: str | None = None
    flat: tuple[slice, slice] | None = None


def noise_of_flat(media: Media, flat: tuple[slice, slice]) -> NoiseEstimate:
    """Return the noise of a picture as a flat part shows it, which is named as the picture is seen."""
    from nlflow.denoising.noise import estimate_noise

    if media.kind != "image" or media.stacked or media.separate:
        raise InputError(f"--flat: got {media.path}, a {media.kind}, expected an image")
    axis = media.channel_axis
    shown = upright(media.data if axis is None else np.moveaxis(media.data, axis, -1), media.orientation)
    try:
        found = estimate_noise(shown, channel_axis=None if axis is None else -1, flat=flat)
    except InputError as error:
        raise InputError(str(error).replace("flat: ", "--flat: ", 1)) from error
    if media.orientation >= 5:  # rows are stored as columns
        model: Any = found.model
        turned = None if model.spectrum is None else model.spectrum.swapaxes(1, 2)
        found = replace(found, model=replace(model, spectrum=turned))
    return found
