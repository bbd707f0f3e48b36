"""What the eye says to the numbers: noisy, ours, what was removed, and the truth, in two columns."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from benchmarks.blind.methods import Sample
from benchmarks.denoising.methods import eight_bits
from nlflow.store.atomic import make_folder, write_atomic

SIDE: Final = 256  # of the middle of a picture, which is shown
_GREY, _TIMES, _HEAD = 128, 4, 14


def panels(sample: Sample, result: NDArray[Any]) -> dict[str, NDArray[Any]]:
    removed = _GREY + _TIMES * (np.asarray(sample.noisy, np.float64) - result)
    return {"noisy": sample.noisy, "ours": result, f"removed, times {_TIMES}": removed, "truth": sample.truth}


def middle(picture: NDArray[Any]) -> NDArray[Any]:
    top, left = (max(0, (n - SIDE) // 2) for n in picture.shape[:2])
    return picture[top : top + SIDE, left : left + SIDE]


def draw(path: Path, sample: Sample, result: NDArray[Any]) -> None:
    """Write a PNG of two columns."""
    shown = {name: eight_bits(middle(panel)) for name, panel in panels(sample, result).items()}
    height, width = next(iter(shown.values())).shape[:2]
    sheet = Image.new("RGB", (2 * width + 4, 2 * (height + _HEAD)), "white")
    for k, (name, panel) in enumerate(shown.items()):
        place = (k % 2) * (width + 4), (k // 2) * (height + _HEAD)
        ImageDraw.Draw(sheet).text((place[0] + 2, place[1]), name, fill="black")
        sheet.paste(Image.fromarray(panel), (place[0], place[1] + _HEAD))
    written = io.BytesIO()
    sheet.save(written, "PNG")
    make_folder(path.parent)
    write_atomic(path, lambda stream: stream.write(written.getvalue()))


def file_name(key: str) -> str:
    """Return the name of the file of a scene and a method."""
    return re.sub(r"[^\w.,=-]+", "-", key).strip("-") + ".png"
