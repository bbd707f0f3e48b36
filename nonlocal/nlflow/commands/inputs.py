"""What a command is told about all of its files, and what was read for a job of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import typer

from nlflow.backends.devices import choose_device
from nlflow.errors import InputError
from nlflow.io.files import Array, FirstColumn, Kind, Media


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
        See `nlflow.io.files.read`.
    video_quality : int or "lossless", optional
        Of a film that is written.
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
