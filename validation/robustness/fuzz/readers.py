"""Readers of single files as functions of bytes, with what has to hold for whatever they return.

Each function makes a reader that works in a folder of its own. A reader returns, or raises a named error of the
package (`nlflow.errors`); everything else is a finding.
"""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from validation.robustness.fuzz.watch import Reader, quiet, require

__all__ = ["archive", "check_samples", "companion", "layers", "media", "npy", "pictures", "state"]

_KINDS = {
    "png": "u",
    "jpeg": "u",
    "tiff": "iuf",
    "npy": "biuf",
    "wav": "iuf",
    "csv": "f",
    "parquet": "f",
    "au": "if",
    "nifti": "iuf",
    "video": "u",
    "bmp": "u",
    "webp": "u",
    "pnm": "u",
    "pbm": "u",
    "gif": "u",
    "avif": "u",
    "npz": "biuf",
    "mat": "biuf",
    "hdf5": "biuf",
    "raw": "u",
    "zarr": "biuf",
}
_LOSSLESS = ("png", "tiff", "npy", "wav", "au", "csv", "nifti", "bmp", "webp", "pnm", "npz", "mat", "hdf5")
_ARRAYS = ("npy", "npz", "mat", "hdf5")
_ENDINGS = {"nifti": "nii", "hdf5": "h5"}
_MOST = 2000  # bytes of samples that one byte of a file may stand for, beside the first 16 MiB


def check_samples(found: Any, size: int) -> None:
    """Hold what was read against what the file can hold, and what is documented of it."""
    from nlflow.desk.files import EXTENSIONS, STACKS

    data = found.data
    require(isinstance(data, np.ndarray) and data.dtype.kind in "biuf" and data.dtype.isnative, f"dtype {data.dtype}")
    require(found.format in (*EXTENSIONS.values(), *STACKS.values()), f"format {found.format!r}")
    require(data.dtype.kind in _KINDS[found.format], f"{found.format} with {data.dtype}")
    require(data.size > 0, "an empty array")
    require(data.nbytes <= _MOST * size + 2**24, f"{data.nbytes} bytes of samples from {size} bytes")
    if found.axes:
        require(len(found.axes) == data.ndim and set(found.axes) <= set("TZCYX?"), f"axes {found.axes}")
    elif found.kind == "image" and found.format not in _ARRAYS:
        require(data.ndim == 2 or (data.ndim == 3 and data.shape[2] >= 2), f"an image of shape {data.shape}")
        require(found.alpha is None or found.alpha.shape == data.shape[:2], "opacity of another shape")
    require(found.orientation in range(1, 9), f"orientation {found.orientation!r}")
    require(all(isinstance(note, str) for note in found.notes), "a note that is no text")
    require(found.sample_rate is None or found.sample_rate >= 0, f"sample rate {found.sample_rate}")


def media(suffix: str, **named: Any) -> Callable[[Path], Reader]:
    """Return the maker of a reader of images or signals; what is read is written and read again.

    `named` are further arguments of `nlflow.desk.files.read`.
    """

    def make(folder: Path) -> Reader:
        from nlflow.desk import files
        from nlflow.errors import FileFormatError

        source = folder / f"in{suffix}"

        def read(data: bytes) -> None:
            source.write_bytes(data)
            with quiet():
                found = files.read(source, **named)
            check_samples(found, len(data))
            require(found.data.ndim in (1, 2, 3) or bool(found.axes), f"{found.data.ndim} dimensions")
            if found.format not in _LOSSLESS or found.data.size > 10**6:
                return
            target = folder / f"out.{_ENDINGS.get(found.format, found.format)}"
            try:
                with quiet(), np.errstate(all="ignore"):
                    files.write(target, found.data, found)
            except FileFormatError:
                return  # what the format has no place for is told before any work begins
            with quiet(), np.errstate(all="ignore"):
                words = {} if found.axes else {"kind": found.kind, "channel_axis": found.channel_axis}
                words |= {"array": found.extras["array"]["name"]} if "array" in found.extras else {}
                again = files.read(target, **words)
            kept = found.data
            if found.format in ("npy", "npz"):  # whose results have single or double precision
                kept = kept.astype(np.float32 if kept.dtype in (np.float16, np.float32) else np.float64)
            if found.format == "nifti" and found.data.dtype.kind == "f":
                return  # a scale may be too coarse for its own values
            same = np.array_equal(again.data, kept, equal_nan=kept.dtype.kind == "f")
            require(same, "what was written is not what is read again")
            if found.alpha is not None and found.format not in _ARRAYS:
                require(np.array_equal(again.alpha, found.alpha), "opacity changed on its way")

        return read

    return make


def npy(folder: Path) -> Reader:
    """Return a reader of .npy files: as images and signals, and as tokens."""
    from nlflow.desk.terminal import read_tokens
    from nlflow.errors import NlflowError

    plain = media(".npy")(folder)
    path = folder / "tokens.npy"

    def read(data: bytes) -> None:
        path.write_bytes(data)
        tokens = None
        with contextlib.suppress(NlflowError), quiet():
            tokens = read_tokens("--tokens", path)
        if tokens is not None:
            require(isinstance(tokens, np.ndarray), f"tokens of type {type(tokens).__name__}")
            require(tokens.dtype.kind != "O" and not tokens.dtype.hasobject, f"tokens of {tokens.dtype}")
            require(tokens.nbytes <= len(data), f"{tokens.nbytes} bytes of tokens from {len(data)} bytes")
        plain(data)

    return read


def companion(folder: Path) -> Reader:
    """Return a reader of masks, maps of noise and references; two bytes say which, and of what format."""
    from nlflow.desk import companions, files

    source = folder / "image.npy"
    np.save(source, np.arange(63.0).reshape(7, 9))
    image = files.read(source)
    suffixes = (".png", ".jpg", ".tif", ".npy", ".csv", ".wav")

    def read(data: bytes) -> None:
        path = folder / f"beside{suffixes[(data[1] if len(data) > 1 else 0) % len(suffixes)]}"
        path.write_bytes(data[2:])
        choice = (data[0] if data else 0) % 4
        with quiet():
            if choice < 2:
                array, notes = companions.read_mask(("--mask", "--keep")[choice], path, image)
                require(array.dtype == np.bool_ and array.shape == (7, 9), f"a mask {array.dtype} {array.shape}")
            elif choice == 2:
                array, notes = companions.read_map("--sigma", path, image)
                require(array.dtype == np.float64 and array.shape == (7, 9), f"a map {array.dtype} {array.shape}")
            else:
                array, notes = companions.read_reference("--reference", path, image)
                require(array.shape == (7, 9), f"a reference of shape {array.shape}")
        require(all(isinstance(note, str) for note in notes), "a note that is no text")

    return read


def archive(folder: Path) -> Reader:
    """Return a reader of archives, and of checkpoints by resuming a flow."""
    import nlflow as nl
    from nlflow.store.storage import load_archive
    from validation.robustness.fuzz.seeds import small_flow

    path = folder / "archive"
    flow = small_flow()
    nl.solve(small_flow(), t=1.0)  # whatever is loaded on the first call is loaded now

    def read(data: bytes) -> None:
        path.write_bytes(data)
        arrays, meta = load_archive(path, "checkpoint")
        require(isinstance(meta, dict), "a description that is no mapping")
        total = sum(array.nbytes for array in arrays.values())
        require(total <= len(data), f"{total} bytes of arrays from {len(data)} bytes")
        require(all(not array.dtype.hasobject for array in arrays.values()), "objects in an archive")
        with quiet():
            found = nl.solve(flow, t_eval=[0.0, 0.5, 1.0], resume=path)
        require(found.u.shape[1:] == (6, 1), f"resumed to shape {found.u.shape}")

    return read


def layers(folder: Path) -> Reader:
    """Return the reader of what `nonlocal attention --out` tells of layers."""
    from nlflow.desk.explorer.layers_view import HEAD_QUANTITIES, QUANTITIES, as_command, as_python, read_layers

    path = folder / "result.json"

    def read(data: bytes) -> None:
        path.write_bytes(data)
        found = read_layers(path, "result.json")
        require(found.content == data, "another file than was read")
        require(len(found.runs) > 0, "no run")
        for run in found.runs:
            states = len(run.layers)
            require(states == len(run.index) > 0, "states and their numbers differ")
            require(set(run.columns) <= set(QUANTITIES) and set(run.heads) <= set(HEAD_QUANTITIES), "foreign columns")
            for values in (*run.columns.values(), *run.heads.values()):
                require(values.dtype == np.float64 and values.shape[0] == states, "a column of another length")
                require(not np.isinf(values).any(), "an infinite number")
            total = sum(values.nbytes for values in run.heads.values())
            require(total <= _MOST * len(data) + 2**24, f"{total} bytes of heads from {len(data)} bytes")
            ast.parse(as_python(found, next(iter(QUANTITIES))))
        require("\n" not in as_command(found).strip(), "a command of several lines")

    return read


def pictures(folder: Path) -> Reader:
    """Return a reader of data sets of trainings: zip archives of pictures, their caches, and texts."""
    from nlflow.errors import NlflowError
    from validation.training.data import read_characters, read_pictures

    path, cache = folder / "data.zip", folder / "cache.npz"

    def read(data: bytes) -> None:
        path.write_bytes(data)
        with contextlib.suppress(NlflowError):
            text = read_characters(path)
            require(len(text.train) + len(text.test) >= 1000, "a text that is too short")
        with quiet():
            found = read_pictures(path, progress=False)
        require(found.images.dtype == np.uint8 and found.images.ndim == 4, f"{found.images.dtype} {found.images.shape}")
        require(len(found.labels) == len(found.images), "as many labels as pictures")
        require(found.images.nbytes <= _MOST * len(data) + 2**24, f"{found.images.nbytes} bytes of pictures")
        # The same bytes as what a cache may hold: refused, or passed over.
        cache.write_bytes(data)
        with contextlib.suppress(NlflowError), quiet():
            read_pictures(path, cache, progress=False)

    return read


def state(folder: Path) -> Reader:
    """Return a reader of the states of trainings."""
    import torch

    from validation.robustness.fuzz.seeds import small_training
    from validation.training.state import load_state, read_tensors, states

    path = folder / "state"

    def read(data: bytes) -> None:
        path.write_bytes(data)
        if not data.startswith(b"PK"):
            tensors, meta = read_tensors(path)
            require(isinstance(meta, dict), "a description that is no mapping")
            total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
            require(total <= len(data), f"{total} bytes of tensors from {len(data)} bytes")
            return
        training = small_training()
        with quiet():
            load_state(states(path), lambda arrays, meta: None, *training)
        require(training[0].weight.shape == (2, 3), "weights of another shape")
        require(training[0].weight.dtype == torch.float32, "weights of another type")

    return read
