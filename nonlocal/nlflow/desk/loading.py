"""One file, read as its format has it, whatever is wrong with it."""

from __future__ import annotations

import os
import warnings
from contextlib import suppress
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path

from nlflow.desk.formats import FORMATS
from nlflow.desk.formats.content import HEAD, by_content, foreign, is_text
from nlflow.desk.formats.media import CONTAINERS, PICTURES, READABLE, FirstColumn, Media, format_of
from nlflow.errors import FileFormatError, InputError, NlflowError, file_error

# Content of a format, and names that say more: camera raws are TIFF files, and MAT files of version 7.3 are HDF5.
_ALIKE = (("tiff", "raw"), ("hdf5", "mat"))
#: One extension of each format that is written, for messages.
WRITABLE = ", ".join(name for name in READABLE.split(", ") if FORMATS[format_of(Path(f"x{name}"))].encode is not None)


def missing(path: Path) -> FileFormatError:
    """Return the exception that says that `path` is not there, and which name in its folder is nearly the same."""
    names: list[str] = []
    with suppress(OSError):  # a folder that is missing too, or that nobody may look into
        names = [entry.name for entry in path.parent.iterdir()]
    near = get_close_matches(path.name, names, n=1, cutoff=0.75)
    remedy = f"did you mean {path.with_name(near[0])}?" if near else "check the name and the folder"
    return FileFormatError(f"{path}: there is no such file or folder; {remedy}")


def known_format(path: Path) -> str:
    """Return the format that the name of an output tells, or raise `FileFormatError`."""
    form = format_of(path)
    if not form:
        got = f"the extension {path.suffix!r}" if path.suffix else "a name without extension"
        raise file_error(path, got, f"one of {WRITABLE}", "choose one of them")
    return form


def found_format(path: Path) -> tuple[str, list[str]]:
    """Return the format of a file, which its content decides before its name, and notes.

    Raises
    ------
    FileFormatError
        If it is of a format that is not read; the message names a way.
    """
    extension = ""
    if path.is_file():
        with suppress(OSError), path.open("rb") as stream:  # what is wrong with it is said when it is read
            extension = by_content(stream.read(HEAD))
    form, named = format_of(Path(f"x{extension}")), format_of(path)
    if form and form != named and (form, named) not in _ALIKE:
        return form, [f"{path}: the content is {form.upper()}, whatever its name says"]
    got, way = foreign(path, extension)
    if named and not got:
        return named, []
    if not path.exists():
        raise missing(path)
    if not got:
        got, way = foreign(path, path.suffix.lower())
    got = got or (f"the extension {path.suffix!r}" if path.suffix else "a name without extension")
    raise file_error(path, got, f"one of {READABLE}", way or "export it as one of them from the program that made it")


def load(path: str | os.PathLike[str], *, first_column: FirstColumn | None = None, array: str | None = None) -> Media:
    """Read a file without settling what the axes of an array or of a stack are; see `nlflow.desk.files.read`.

    Raises
    ------
    FileFormatError
        If the file is missing, empty, damaged, of an unknown format, or holds what cannot be read without loss.
    """
    path = Path(path)
    form, notes = found_format(path)
    expected = f"a readable {form.upper()} file"
    words: dict[str, str | None] = {"first_column": first_column} if form == "csv" else {}
    if form in CONTAINERS:
        words = {"array": array}
    elif array is not None:
        raise InputError(f"array: got {array!r} for {path}, expected a file of several arrays; leave it out")
    if not path.exists():
        raise missing(path)
    if FORMATS[form].folder:
        if not path.is_dir():
            raise file_error(path, "a file", "a folder, as zarr stores are", "check the name")
    elif not path.is_file():
        raise file_error(path, "a folder" if path.is_dir() else "no regular file", expected, "name the file itself")
    else:
        if path.stat().st_size == 0:
            raise file_error(path, "an empty file", expected, "copy or export it again")
        try:
            with path.open("rb") as stream:
                head = stream.read(HEAD)
        except OSError as error:
            raise file_error(path, f"{error.strerror}", expected, "check its permissions") from error
        if form != "csv" and is_text(head):  # no other format is a text
            remedy = "give a picture" if form in PICTURES else "copy or export it again"
            raise file_error(path, "a text file", expected, remedy)
    try:
        with warnings.catch_warnings():  # decoders warn about odd metadata; lost samples are errors in every one
            warnings.simplefilter("ignore")
            media = FORMATS[form].decode(path, **words)
    except NlflowError:
        raise
    except MemoryError as error:
        raise file_error(path, "more samples than memory can hold", expected, "crop or downsample it") from error
    except Exception as error:  # a damaged file makes decoders fail in any way: IndexError, struct.error, zlib.error
        got = f"a damaged or foreign file ({str(error) or type(error).__name__})"
        raise file_error(path, got, expected, "copy or export it again") from error
    data = media.data
    if data.dtype.kind not in "biuf":
        raise file_error(path, f"values of type {data.dtype}", "real numbers", "convert them, e.g. with astype or abs")
    if data.size == 0:
        raise file_error(path, f"an empty array of shape {data.shape}", "at least one sample", "export it again")
    if not data.dtype.isnative:
        media = replace(media, data=data.astype(data.dtype.newbyteorder("=")))
    return replace(media, notes=(*notes, *media.notes)) if notes else media
