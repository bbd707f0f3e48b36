"""Files that a page sends."""

from __future__ import annotations

import base64
import binascii
import math
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, TypeVar

from nlflow.denoising.noise import load_noise
from nlflow.desk.explorer.denoising_view import NoiseFile
from nlflow.desk.explorer.layers_view import LayersFile, read_layers
from nlflow.desk.explorer.sources import Source, open_source
from nlflow.desk.files import found_format
from nlflow.desk.formats.media import CONTAINERS, EXTENSIONS, STACKS
from nlflow.desk.formats.tiff_pages import opened
from nlflow.errors import InputError, NlflowError, command, format_bytes

T = TypeVar("T")

_NAME = 80  # characters of a name that are shown
_PILLOW = ("png", "jpeg", "bmp", "webp", "gif", "avif")
_FORMATS = (*_PILLOW, "tiff", "npy", "wav", "csv")

#: What an upload may end in: camera raws and files of several arrays are opened by name on the command line.
SUFFIXES = tuple(suffix for suffix, form in EXTENSIONS.items() if form in _FORMATS)


@dataclass(frozen=True)
class Limits:
    """Limits."""

    content: int = 64 * 2**20  # bytes of the file
    samples: int = 2**26  # numbers in it, channels counted


def shown_name(name: str) -> str:
    last = PureWindowsPath(PurePosixPath(name).name).name
    plain = "".join(letter for letter in last if letter.isprintable())
    if len(plain) <= _NAME:
        return plain if plain.strip(". ") else "upload"
    stem, suffix = PurePosixPath(plain).stem, PurePosixPath(plain).suffix
    return stem[: _NAME - len(suffix[:10])] + suffix[:10] if plain.strip(". ") else "upload"


def unpacked(data: Any, limits: Limits) -> tuple[str, bytes]:
    """Return name and content of a file that a page sent.

    The message has ``name``, and ``content`` in base64; in its place the ``size`` of a file that is too large, or
    nothing.
    """
    name = shown_name(str(data["name"]))
    if "size" in data:
        raise _too_large(name, float(data["size"]), limits)
    if "content" not in data:
        raise InputError(f"{name}: got a file that the browser cannot read, expected one that is still there")
    try:
        return name, base64.b64decode(data["content"], validate=True)
    except (binascii.Error, TypeError, ValueError) as error:
        raise InputError(f"{name}: got content that is no base64, expected a file; send it again") from error


def received_source(name: str, content: bytes, limits: Limits) -> Source:
    source = _read(name, content, limits, SUFFIXES, open_source)
    _check_samples(shown_name(name), source.media.data.size, limits)
    return source


def received_reference(name: str, content: bytes, limits: Limits, source: Source) -> Source:
    return _read(name, content, limits, SUFFIXES, source.with_clean)


def received_layers(name: str, content: bytes, limits: Limits) -> LayersFile:
    return _read(name, content, limits, (".json",), read_layers)


def received_noise(name: str, content: bytes, limits: Limits) -> NoiseFile:
    return _read(name, content, limits, (".json",), lambda path, name: NoiseFile(name, load_noise(path)))


def _read(name: str, content: bytes, limits: Limits, suffixes: tuple[str, ...], reader: Callable[[Path, str], T]) -> T:
    name = shown_name(name)
    suffix = PurePosixPath(name).suffix.lower()
    if suffix not in suffixes:
        raise _another_kind(name, suffix, suffixes)
    if len(content) > limits.content:
        raise _too_large(name, len(content), limits)
    with tempfile.TemporaryDirectory(prefix="nlflow-") as folder:
        path = Path(folder) / f"upload{suffix}"
        path.write_bytes(content)
        try:
            if suffixes == SUFFIXES and found_format(path)[0] not in _FORMATS:
                raise _another_kind(name, suffix, suffixes)
            _check_samples(name, _declared(path), limits)
            return reader(path, name)
        except NlflowError as error:
            # The message names the upload, not the temporary file.
            raise type(error)(str(error).replace(str(path), name)) from error


def _another_kind(name: str, suffix: str, suffixes: tuple[str, ...]) -> InputError:
    by_name = suffixes == SUFFIXES and (suffix in EXTENSIONS or name.lower().endswith(tuple(STACKS)))
    several = EXTENSIONS.get(suffix) in CONTAINERS
    options = " --array NAME --axes ZYX" if several else ""
    told = f"; it is opened by its name: {command('nonlocal', 'explore', Path(name))}{options}" if by_name else ""
    return InputError(f"{name}: got a file of another kind, expected one of {', '.join(suffixes)}{told}")


def _declared(path: Path) -> int:
    """Return how many samples the header of a picture declares; 0 for other formats and for headers that are wrong."""
    try:
        form, _ = found_format(path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about large pictures, which are refused here, and odd tags
            if form in _PILLOW:
                from PIL import Image

                try:
                    with Image.open(path, formats=(form.upper(),)) as image:
                        return image.width * image.height * len(image.getbands())
                except Image.DecompressionBombError:
                    return 2 * (Image.MAX_IMAGE_PIXELS or 0) + 1
            if form == "tiff":
                with opened(path) as tiff:
                    return int(len(tiff.pages) * math.prod(tiff.pages[0].shape))
    except Exception:  # `files.read` says what is wrong with the header
        return 0
    return 0


def _check_samples(name: str, count: int, limits: Limits) -> None:
    if count > limits.samples:
        remedy = "crop it, or name the file on the command line"
        raise InputError(f"{name}: got {count} samples, expected at most {limits.samples}; {remedy}")


def _too_large(name: str, size: float, limits: Limits) -> InputError:
    got, most = format_bytes(size), format_bytes(limits.content)
    return InputError(f"{name}: got {got}, expected at most {most}; start with a larger --max-upload")
