"""Readers of folders, which travel as zips: studies, and transformers."""

from __future__ import annotations

import contextlib
import io
import json
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from validation.robustness.fuzz.watch import Reader, quiet, require

__all__ = ["emptied", "model", "run_small_study", "store", "study"]

_STUDY: dict[str, Any] = {"nodes": [4, 5], "boundary": "periodic", "kernel": "gaussian:width=0.3"}


def run_small_study(folder: Path) -> Any:
    """Run or go on with the study whose folder is fuzzed."""
    from nlflow.studies import run_study

    return run_study("mixing", out=folder, **_STUDY)


def emptied(folder: Path) -> Path:
    """Make a folder, or take everything out of it; return it."""
    folder.mkdir(exist_ok=True)
    for path in sorted(folder.rglob("*"), reverse=True):
        if path.is_dir() and not path.is_symlink():
            path.rmdir()
        else:
            path.unlink()
    return folder


def _unfold(data: bytes, folder: Path, longest: int = 2**22) -> bool:
    """Write the members of a zip as the files of a folder, those alone whose names stay in it."""
    emptied(folder)
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as packed:
            for info in packed.infolist()[:40]:
                parts = info.filename.split("/")
                if info.file_size > longest or not all(part.strip(".") and "\0" not in part for part in parts):
                    continue
                target = folder.joinpath(*parts)
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(packed.read(info))
    except Exception:  # the zip is only how the folder travels
        return False
    return True


def study(folder: Path) -> Reader:
    """Return a reader of folders of studies."""
    from nlflow.errors import FileFormatError

    place = folder / "study"
    expected = run_small_study(folder / "first").rows

    def read(data: bytes) -> None:
        if not _unfold(data, place):
            raise FileFormatError("no folder")
        with quiet():
            result = run_small_study(place)
        require(isinstance(result.rows, list), "rows that are no list")
        json.dumps(result.as_dict(), allow_nan=False)
        require(isinstance(result.report(), str), "a report that is no text")
        require(len(expected) > 0, "nothing measured")

    return read


def store(folder: Path) -> Reader:
    """Return a reader of zarr arrays and OME-Zarr images, whole and block by block."""
    from nlflow.desk import files
    from nlflow.desk.large import open_image
    from nlflow.errors import FileFormatError, NlflowError
    from validation.robustness.fuzz.readers import check_samples

    place = folder / "in.zarr"

    def read(data: bytes) -> None:
        if not _unfold(data, place):
            raise FileFormatError("no folder")
        with contextlib.suppress(NlflowError), quiet():
            image, _ = open_image(place, block=8)
            require(image.ndim <= 3, f"{image.ndim} axes")
            if image.size < 10**5:
                image.compute(scheduler="synchronous")
        with quiet():
            found = files.load(place)
        check_samples(found, len(data))

    return read


def model(folder: Path) -> Reader:
    """Return a reader of folders of transformers, with their terms and the settings of their pictures."""
    from nlflow.attention import image_inputs, load_model, token_inputs
    from nlflow.errors import FileFormatError, NlflowError

    place = folder / "model"
    picture = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)

    def read(data: bytes) -> None:
        if not _unfold(data, place):
            raise FileFormatError("no folder")
        with quiet(), _silenced():
            network = load_model(place)
            require(not network.training, "a model in training mode")
            # Buffers aside, which are computed: every parameter comes from the file, or is small.
            total = sum(p.numel() * p.element_size() for p in network.parameters())
            require(total <= 64 * len(data) + 2**24, f"{total} bytes of weights from {len(data)} bytes")
            with contextlib.suppress(NlflowError):
                found = image_inputs(network, place, picture)["pixel_values"]
                require(bool(found.isfinite().all()), "pixels that are no numbers")
            with contextlib.suppress(NlflowError):
                token_inputs(network, np.array([1, 2]))

    return read


@contextlib.contextmanager
def _silenced() -> Iterator[None]:
    from nlflow.desk.commands.attention import quiet_library

    with quiet_library(), contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield
