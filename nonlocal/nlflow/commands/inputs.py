"""What was read for a job of a command."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from nlflow.io.files import Array, Media


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
