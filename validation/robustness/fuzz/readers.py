"""Every reader of the package as a function of bytes, with what has to hold for whatever it returns.

Each function makes a reader that works in a folder of its own. A reader returns, or raises a named error of the
package (`nlflow.errors`); everything else is a finding.
"""

from __future__ import annotations

import ast
import contextlib
import io
import itertools
import json
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from validation.robustness.fuzz.watch import require

__all__ = [
    "archive",
    "command",
    "companion",
    "kernel",
    "layers",
    "media",
    "model",
    "npy",
    "pictures",
    "run_small_study",
    "state",
    "study",
]

Reader = Callable[[bytes], object]

_KINDS = {"png": "u", "jpeg": "u", "tiff": "iuf", "npy": "biuf", "wav": "iuf", "csv": "f"}
_LOSSLESS = ("png", "tiff", "npy", "wav", "csv")
_MOST = 2000  # bytes of samples that one byte of a file may stand for, beside the first 16 MiB


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Let warnings pass: they are meant for people."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _check_samples(found: Any, size: int) -> None:
    """Hold what was read against what the file can hold, and what is documented of it."""
    from nlflow.io.files import EXTENSIONS

    data = found.data
    require(isinstance(data, np.ndarray) and data.dtype.kind in "biuf" and data.dtype.isnative, f"dtype {data.dtype}")
    require(found.format in EXTENSIONS.values(), f"format {found.format!r}")
    require(data.dtype.kind in _KINDS[found.format], f"{found.format} with {data.dtype}")
    require(data.size > 0, "an empty array")
    require(data.nbytes <= _MOST * size + 2**24, f"{data.nbytes} bytes of samples from {size} bytes")
    if found.kind == "image" and found.format != "npy":
        require(data.ndim == 2 or (data.ndim == 3 and data.shape[2] >= 2), f"an image of shape {data.shape}")
        require(found.alpha is None or found.alpha.shape == data.shape[:2], "opacity of another shape")
    require(found.orientation in range(1, 9), f"orientation {found.orientation!r}")
    require(all(isinstance(note, str) for note in found.notes), "a note that is no text")
    require(found.sample_rate is None or found.sample_rate >= 0, f"sample rate {found.sample_rate}")


def media(suffix: str) -> Callable[[Path], Reader]:
    """Return the maker of a reader of images or signals; what is read is written and read again."""

    def make(folder: Path) -> Reader:
        from nlflow.errors import FileFormatError
        from nlflow.io import files

        source = folder / f"in{suffix}"

        def read(data: bytes) -> None:
            source.write_bytes(data)
            with _quiet():
                found = files.read(source)
            _check_samples(found, len(data))
            require(found.data.ndim in (1, 2, 3), f"{found.data.ndim} dimensions")
            if found.format not in _LOSSLESS or found.data.size > 10**6:
                return
            target = folder / f"out.{found.format}"
            try:
                with _quiet(), np.errstate(all="ignore"):
                    files.write(target, found.data, found)
            except FileFormatError:
                return  # what the format has no place for is told before any work begins
            with _quiet(), np.errstate(all="ignore"):
                again = files.read(target, kind=found.kind, channel_axis=found.channel_axis)
            kept = found.data
            if found.format == "npy":  # whose results have single or double precision
                kept = kept.astype(np.float32 if kept.dtype in (np.float16, np.float32) else np.float64)
            same = np.array_equal(again.data, kept, equal_nan=kept.dtype.kind == "f")
            require(same, "what was written is not what is read again")
            if found.alpha is not None and found.format != "npy":
                require(np.array_equal(again.alpha, found.alpha), "opacity changed on its way")

        return read

    return make


def npy(folder: Path) -> Reader:
    """Return a reader of .npy files: as images and signals, and as tokens."""
    from nlflow.errors import NlflowError
    from nlflow.io.terminal import read_tokens

    plain = media(".npy")(folder)
    path = folder / "tokens.npy"

    def read(data: bytes) -> None:
        path.write_bytes(data)
        tokens = None
        with contextlib.suppress(NlflowError), _quiet():
            tokens = read_tokens("--tokens", path)
        if tokens is not None:
            require(isinstance(tokens, np.ndarray), f"tokens of type {type(tokens).__name__}")
            require(tokens.dtype.kind != "O" and not tokens.dtype.hasobject, f"tokens of {tokens.dtype}")
            require(tokens.nbytes <= len(data), f"{tokens.nbytes} bytes of tokens from {len(data)} bytes")
        plain(data)

    return read


def companion(folder: Path) -> Reader:
    """Return a reader of masks, maps of noise and references; two bytes say which, and of what format."""
    from nlflow.io import companions, files

    source = folder / "image.npy"
    np.save(source, np.arange(63.0).reshape(7, 9))
    image = files.read(source)
    suffixes = (".png", ".jpg", ".tif", ".npy", ".csv", ".wav")

    def read(data: bytes) -> None:
        path = folder / f"beside{suffixes[(data[1] if len(data) > 1 else 0) % len(suffixes)]}"
        path.write_bytes(data[2:])
        choice = (data[0] if data else 0) % 4
        with _quiet():
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
    from nlflow.io.storage import load_archive
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
        with _quiet():
            found = nl.solve(flow, t_eval=[0.0, 0.5, 1.0], resume=path)
        require(found.u.shape[1:] == (6, 1), f"resumed to shape {found.u.shape}")

    return read


_STUDY: dict[str, Any] = {"nodes": [4, 5], "boundary": "periodic", "kernel": "gaussian:width=0.3"}


def run_small_study(folder: Path) -> Any:
    """Run or go on with the study whose folder is fuzzed."""
    from nlflow.studies import run_study

    return run_study("mixing", out=folder, **_STUDY)


def _empty(folder: Path) -> None:
    """Make a folder, or take everything out of it."""
    folder.mkdir(exist_ok=True)
    for path in sorted(folder.rglob("*"), reverse=True):
        if path.is_dir() and not path.is_symlink():
            path.rmdir()
        else:
            path.unlink()


def _unfold(data: bytes, folder: Path, longest: int = 2**22) -> bool:
    """Write the members of a zip as the files of a folder, those alone whose names stay in it."""
    _empty(folder)
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
        with _quiet():
            result = run_small_study(place)
        require(isinstance(result.rows, list), "rows that are no list")
        json.dumps(result.as_dict(), allow_nan=False)
        require(isinstance(result.report(), str), "a report that is no text")
        require(len(expected) > 0, "nothing measured")

    return read


def kernel(folder: Path) -> Reader:
    """Return a reader of kernels and options of studies as text, ``name=value`` on lines after the kernel."""
    del folder
    from nlflow.commands.study import _listed
    from nlflow.studies.options import kernel_label, parse_kernel, read_options
    from nlflow.studies.registry import KINDS
    from nlflow.studies.settings import make_settings

    numbers: dict[str, Any] = {"nodes": int, "dimension": int, "channels": int, "fidelity": float, "dt": float}
    single: dict[str, Any] = {"seeds": int, "laziness": float, "eps": float, "t": float}

    def read(data: bytes) -> None:
        first, *lines = data.decode("utf-8", "surrogateescape").split("\n")
        options: dict[str, Any] = {}
        for line in lines[:8]:
            name, _, value = line.partition("=")
            if name in single:
                with contextlib.suppress(ValueError):
                    options[name] = single[name](value)
            elif name:
                options[name] = _listed(name, value, numbers.get(name, str))
        chosen = parse_kernel(first)
        label = kernel_label(chosen)
        require(type(parse_kernel(label)) is type(chosen), f"{label!r} is another kernel")
        for kind in KINDS.values():
            read_options(kind, {"kernel": chosen})
            cases = make_settings(kind, read_options(kind, {"kernel": first, **options})) if len(data) < 200 else []
            require(all(case.label for case in cases), "a case without a label")

    return read


def command(folder: Path) -> Reader:
    """Return a reader of command lines, one word a line; they run in a folder with an image and an array."""
    from PIL import Image
    from typer.testing import CliRunner

    from nlflow import denoise
    from nlflow.commands import main as cli
    from nlflow.errors import InputError

    place = folder / "place"
    runner = CliRunner()

    def measured(*arguments: Any, **options: Any) -> Any:
        """Stand in for a study, whose options are checked and whose work may take hours."""
        from nlflow.studies.options import read_options
        from nlflow.studies.registry import KINDS

        options = {name: value for name, value in options.items() if name not in ("out", "jobs", "progress", "rng")}
        read_options(KINDS[arguments[0]], options)
        raise InputError("study: got options that can be studied")

    outside = sorted(path.name for path in folder.iterdir())
    for quality, dtype in itertools.product(("fast", "balanced", "best"), (np.float32, np.float64)):
        with _quiet():  # compiled now, and not in the time of an input
            denoise(np.arange(63, dtype=dtype).reshape(7, 9) % 8, 1.0, quality=quality)

    def read(data: bytes) -> None:
        words = [_inside(word) for word in data.decode("utf-8", "surrogateescape").split("\n")[:24]]
        words = [word for word in words if "\0" not in word]
        if words and words[0] in ("demo", "validate"):  # no options but names of folders, and minutes of work
            words = [*words, "--help"]
        _empty(place)
        Image.fromarray(np.arange(63, dtype=np.uint8).reshape(7, 9)).save(place / "in.png")
        np.save(place / "in.npy", np.arange(24.0).reshape(4, 6) % 7)
        with _quiet(), contextlib.chdir(place), patch("nlflow.studies.run_study", measured):
            result = runner.invoke(cli.app, words, prog_name="nonlocal")
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        require(result.exit_code in (0, 1, 2), f"exit code {result.exit_code} of {words}")
        require("Traceback (most recent call last)" not in result.output, f"a trace after {words}")
        now = sorted(path.name for path in folder.iterdir() if path != place)
        require(now == outside, f"{words} wrote {now} outside of its folder")
        if result.exit_code:
            require(result.stderr.strip(), f"exit code {result.exit_code} without a word after {words}")
            raise InputError("refused")

    return read


def _inside(word: str) -> str:
    """Return a word of a command line that names nothing outside of the folder, and no model on the hub."""
    return word.replace("/", "_").replace("..", "_")


def model(folder: Path) -> Reader:
    """Return a reader of folders of transformers, with their terms and the settings of their pictures."""
    from nlflow.attention import image_inputs, load_model, token_inputs
    from nlflow.errors import FileFormatError, NlflowError

    place = folder / "model"
    picture = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)

    def read(data: bytes) -> None:
        if not _unfold(data, place):
            raise FileFormatError("no folder")
        with _quiet(), _silenced():
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
    from nlflow.commands.attention import _quiet_library

    with _quiet_library(), contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


def layers(folder: Path) -> Reader:
    """Return the reader of what `nonlocal attention --out` tells of layers."""
    from nlflow.explorer.layers_view import HEAD_QUANTITIES, QUANTITIES, as_command, as_python, read_layers

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
        with _quiet():
            found = read_pictures(path, progress=False)
        require(found.images.dtype == np.uint8 and found.images.ndim == 4, f"{found.images.dtype} {found.images.shape}")
        require(len(found.labels) == len(found.images), "as many labels as pictures")
        require(found.images.nbytes <= _MOST * len(data) + 2**24, f"{found.images.nbytes} bytes of pictures")
        # The same bytes as what a cache may hold: refused, or passed over.
        cache.write_bytes(data)
        with contextlib.suppress(NlflowError), _quiet():
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
        with _quiet():
            load_state(states(path), lambda arrays, meta: None, *training)
        require(training[0].weight.shape == (2, 3), "weights of another shape")
        require(training[0].weight.dtype == torch.float32, "weights of another type")

    return read
