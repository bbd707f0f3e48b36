"""Pictures and text to train on, read from files that the user names; nothing is downloaded."""

from __future__ import annotations

import io
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from tqdm import tqdm

from nlflow.errors import FileFormatError, check_memory
from nlflow.store.storage import load_archive, save_archive

__all__ = ["Characters", "Pictures", "read_characters", "read_pictures"]

_KIND = "decoded pictures"
_LONGEST, _PIXELS = (
    2**24,
    2**20,
)  # bytes and pixels of a picture to train on; more is not meant for training, or hostile


@dataclass(frozen=True, eq=False)
class Pictures:
    """Pictures with the number of their class.

    Attributes
    ----------
    images : array of uint8 of shape (N, height, width, 3)
    labels : array of int64 of shape (N,)
    classes : tuple of str
        Names of the classes, sorted; a label is a place in it.
    """

    images: NDArray[np.uint8]
    labels: NDArray[np.int64]
    classes: tuple[str, ...]

    def some(self, count: int, seed: int = 0) -> Pictures:
        """Return so many of them in an order of chance, which is the same for one seed; all if there are fewer."""
        chosen = np.random.default_rng(seed).permutation(len(self.labels))[:count]
        return Pictures(self.images[chosen], self.labels[chosen], self.classes)


@dataclass(frozen=True, eq=False)
class Characters:
    """A text as numbers: the first nine tenths to train on, the rest to look at.

    Attributes
    ----------
    train, test : array of int64
    vocabulary : str
        The characters of the text, sorted; a number is a place in it.
    """

    train: NDArray[np.int64]
    test: NDArray[np.int64]
    vocabulary: str


def read_pictures(path: Path, cache: Path | None = None, *, progress: bool = True) -> Pictures:
    """Decode a zip of JPEG or PNG files that lie in one folder for each class: ``[any/]class/name.jpg``.

    Parameters
    ----------
    path : Path
    cache : Path, optional
        An .npz file that is read instead if it was made from this zip, and written otherwise.
    progress : bool
        Progress bar on stderr.

    Raises
    ------
    FileFormatError
        For a file that is no zip, has no pictures, damaged ones, such of more than 16 MiB or 2^20 pixels, or of
        different sizes.
    MemoryLimitError
        For more pictures than the memory limit allows.
    """
    source = _identity(path)
    if cache is not None and cache.is_file():
        arrays, meta = load_archive(cache, _KIND)
        if meta.get("source") == source:
            return _cached(cache, arrays, meta)
    pictures = _decode(path, progress)
    if cache is not None:
        meta = {"kind": _KIND, "source": source, "classes": list(pictures.classes)}
        save_archive(cache, {"images": pictures.images, "labels": pictures.labels}, meta)
    return pictures


def _cached(path: Path, arrays: dict[str, Any], meta: dict[str, Any]) -> Pictures:
    """Return the pictures of an archive, or raise `FileFormatError` where it does not hold any."""
    images, labels, classes = arrays.get("images"), arrays.get("labels"), meta.get("classes")
    whole = images is not None and images.dtype == np.uint8 and images.ndim == 4 and images.shape[3] == 3
    whole = whole and labels is not None and labels.dtype == np.int64 and labels.shape == images.shape[:1]
    whole = whole and isinstance(classes, list) and all(isinstance(name, str) for name in classes)
    if not whole or np.any((labels < 0) | (labels >= len(classes))):
        raise FileFormatError(f"{path}: got an archive without pictures and their classes; remove it")
    return Pictures(images, labels, tuple(classes))


def _identity(path: Path) -> list[object]:
    """Return what tells one zip from another without reading it."""
    try:
        return [path.name, path.stat().st_size]
    except OSError as error:
        raise FileFormatError(
            f"--data: got no file {path} ({error.strerror or error}), expected a zip of pictures, class/name.jpg; "
            "check the folder"
        ) from error


def _decode(path: Path, progress: bool) -> Pictures:
    try:
        archive = zipfile.ZipFile(path)
    except (OSError, ValueError, NotImplementedError, zipfile.BadZipFile) as error:
        raise FileFormatError(
            f"{path}: got no zip archive ({error}), expected one of pictures; copy it again"
        ) from error
    with archive:
        names = sorted(
            name for name in archive.namelist() if name.lower().endswith((".jpg", ".jpeg", ".png")) and "/" in name
        )
        if not names:
            raise FileFormatError(f"{path}: got a zip without pictures, expected class/name.jpg in it")
        kinds = [name.split("/")[-2] for name in names]
        classes = tuple(sorted(set(kinds)))
        images: list[NDArray[np.uint8]] = []
        for name in tqdm(names, desc=path.name, unit="picture", disable=not progress, leave=False):
            try:
                images.append(_picture(archive, name))
            except Exception as error:  # zipfile, zlib and Pillow each have their own ways to say 'damaged'
                raise FileFormatError(
                    f"{path}: got {name}, which is damaged ({error}), expected a picture; copy the zip again"
                ) from error
            if len(images) == 1:
                check_memory(f"{path}: {len(names)} pictures", len(names) * images[0].nbytes, "take fewer")
            if images[-1].shape != images[0].shape:
                raise FileFormatError(
                    f"{path}: got {name} of shape {images[-1].shape}, expected {images[0].shape}, that of the others"
                )
    labels = np.array([classes.index(kind) for kind in kinds], dtype=np.int64)
    return Pictures(np.stack(images), labels, classes)


def _picture(archive: zipfile.ZipFile, name: str) -> NDArray[np.uint8]:
    """Return the colours of a picture, or raise `ValueError` where its header declares more than a small picture."""
    if archive.getinfo(name).file_size > _LONGEST:
        raise ValueError(f"more than {_LONGEST} bytes")
    with Image.open(io.BytesIO(archive.read(name)), formats=("PNG", "JPEG")) as picture:
        if picture.width * picture.height > _PIXELS:
            raise ValueError(f"{picture.width} x {picture.height} pixels, more than {_PIXELS}")
        return np.asarray(picture.convert("RGB"))


def read_characters(path: Path) -> Characters:
    """Read a text as characters.

    Raises
    ------
    FileFormatError
        For a missing file, one that is not UTF-8, and one of fewer than 1000 characters.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise FileFormatError(f"--data: got {path} ({error}), expected a text in UTF-8; check the folder") from error
    if len(text) < 1000:
        raise FileFormatError(
            f"--data: got {path} with {len(text)} characters, expected 1000 or more; take a longer text"
        )
    vocabulary = "".join(sorted(set(text)))
    place = {character: index for index, character in enumerate(vocabulary)}
    numbers = np.array([place[character] for character in text], dtype=np.int64)
    split = len(numbers) * 9 // 10
    return Characters(numbers[:split], numbers[split:], vocabulary)
