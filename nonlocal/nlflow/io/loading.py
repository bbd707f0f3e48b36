"""One file, read as its format has it, whatever is wrong with it."""

from __future__ import annotations

import os
import warnings
from dataclasses import replace
from pathlib import Path

from nlflow.errors import NlflowError
from nlflow.io.formats import FORMATS
from nlflow.io.formats.media import EXTENSIONS, STACKS, FirstColumn, Media, file_error, format_of
from nlflow.io.formats.tables import decode_csv


def known_format(path: Path) -> str:
    """Return the format that a name tells, or raise `FileFormatError`."""
    form = format_of(path)
    if not form:
        got = f"the extension {path.suffix!r}" if path.suffix else "a name without extension"
        raise file_error(path, got, f"one of {', '.join(EXTENSIONS | STACKS)}", "convert the file or rename it")
    return form


def load(path: str | os.PathLike[str], *, first_column: FirstColumn | None = None) -> Media:
    """Read a file without settling what the axes of an .npy array or of a stack are; see `nlflow.io.files.read`.

    Raises
    ------
    FileFormatError
        If the file is missing, empty, damaged, of an unknown format, or holds what cannot be read without loss.
    """
    path = Path(path)
    form = known_format(path)
    expected = f"a readable {form.upper()} file"
    if not path.exists():
        raise file_error(path, "no such file", expected, "check the name and the folder")
    if FORMATS[form].folder:
        if not path.is_dir():
            raise file_error(path, "a file", "a folder, as zarr stores are", "check the name")
    elif not path.is_file():
        raise file_error(path, "a folder" if path.is_dir() else "no regular file", expected, "name the file itself")
    else:
        if path.stat().st_size == 0:
            raise file_error(path, "an empty file", expected, "copy or export it again")
        try:
            path.open("rb").close()
        except OSError as error:
            raise file_error(path, f"{error.strerror}", expected, "check its permissions") from error
    try:
        with warnings.catch_warnings():  # decoders warn about odd metadata; lost samples are errors in every one
            warnings.simplefilter("ignore")
            media = FORMATS[form].decode(path) if form != "csv" else decode_csv(path, first_column)
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
    return media
