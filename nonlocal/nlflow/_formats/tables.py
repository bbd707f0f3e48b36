"""NPY arrays and CSV tables."""

from __future__ import annotations

import csv
import io
import re
from pathlib import Path
from typing import BinaryIO

import numpy as np

from nlflow._formats.media import Array, Media, file_error
from nlflow._npy import read_array
from nlflow.errors import check_memory

__all__ = ["decode_csv", "decode_npy", "encode_csv", "encode_npy"]

# Names of a first CSV column that numbers the samples, with or without a unit: "t", "# time", "Time (s)"; an empty one
# is that of a written-out row index.
_TIME = re.compile(
    r"#?\s*(t|times?|timestamps?|date|datetime|sec|seconds?|ms|milliseconds?|minutes?|hours?|samples?|index|)"
    r"\s*([_\[(].*)?",
    re.IGNORECASE,
)

_CELL = 200  # bytes that a cell takes while it is text, lists and all


def decode_npy(path: Path) -> Media:
    """Read an array; pickled objects are refused."""
    with path.open("rb") as stream:
        if stream.read(6) != b"\x93NUMPY":
            raise file_error(path, "content that is no NPY array", "an NPY file", "write it with numpy.save")
        stream.seek(0)
        try:
            data = read_array(stream, path.stat().st_size, what=str(path))
        except ValueError as error:
            if "objects" not in str(error):
                raise
            remedy = "save array.astype(float) instead; pickled objects are never loaded"
            raise file_error(path, "an array of Python objects", "numbers", remedy) from error
    return Media(path, "npy", "image", data)


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def _count_cells(path: Path) -> int:
    """Return how many cells a table has at most, without holding more than a block of it."""
    with path.open("rb") as stream:
        blocks = iter(lambda: stream.read(2**20), b"")
        return 1 + path.stat().st_size // 32 + sum(block.count(mark) for block in blocks for mark in b",;\t\n\r")


def decode_csv(path: Path) -> Media:
    """Read columns of numbers, with their names and a first column of times."""
    remedy = "split it, or save it as .npy"
    check_memory(f"{path}: a text of {path.stat().st_size} bytes", 2 * path.stat().st_size, remedy)
    cells = _count_cells(path)
    check_memory(f"{path}: a table of {cells} cells", _CELL * cells, remedy)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        remedy = "export it as plain CSV"
        raise file_error(path, "bytes that are no UTF-8 text", "columns of numbers", remedy) from error
    first = next((line for line in text.splitlines() if line.strip()), "")
    delimiter = next((mark for mark in ";\t," if mark in first), ",")
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    rows = [(reader.line_num, [cell.strip() for cell in row]) for row in reader if any(cell.strip() for cell in row)]
    header, notes = None, []
    if rows and not any(map(_is_number, rows[0][1])):
        header = tuple(rows.pop(0)[1])
    if not rows:
        raise file_error(path, "no row of numbers", "columns of numbers", "export it again")
    width = len(header or rows[0][1])
    start = int(header is not None and width > 1 and _TIME.fullmatch(header[0]) is not None)
    values = np.empty((len(rows), width - start))
    for number, (line, row) in enumerate(rows):
        if len(row) != width:
            got = f"{len(row)} cell(s) in line {line}"
            raise file_error(path, got, f"{width} as in the first line", "give every line as many cells")
        for column in range(start, width):
            if not _is_number(row[column]):
                name = f" (column {header[column]!r})" if header else ""
                got = f"{row[column]!r} in line {line}, cell {column + 1}{name}"
                remedy = "correct the cell, write nan for a missing number, or remove the column"
                raise file_error(path, got, "a number with a decimal point", remedy)
            values[number, column - start] = float(row[column])
    time = tuple(row[0] for _, row in rows) if start else None
    if time is not None and header is not None:
        notes.append(f"{path}: column {header[0]!r} is kept as it is")
        steps = np.diff([float(cell) for cell in time]) if all(map(_is_number, time)) else np.ones(1)
        if len(steps) and not np.allclose(steps, steps[0], rtol=0.01, atol=0):
            notes.append(f"{path}: the steps of {header[0]!r} are unequal; the samples count as equally spaced")
    data = values[:, 0] if values.shape[1] == 1 else values
    told = tuple(notes)
    return Media(path, "csv", "signal", data, header=header, time=time, delimiter=delimiter, notes=told)


def encode_npy(stream: BinaryIO, values: Array, media: Media) -> None:
    """Write an array."""
    np.save(stream, values, allow_pickle=False)


def encode_csv(stream: BinaryIO, values: Array, media: Media) -> None:
    """Write columns of numbers with the names and times of the input."""
    text = io.StringIO(newline="")
    writer = csv.writer(text, delimiter=media.delimiter, lineterminator="\n")
    if media.header is not None:
        writer.writerow(media.header)
    # The shortest digits that give back the same number; str of a float32 has fewer of them than that of a float64.
    cells = [[str(value) for value in row] for row in values.reshape(len(values), -1)]
    for number, row in enumerate(cells):
        writer.writerow(row if media.time is None else [media.time[number], *row])
    stream.write(text.getvalue().encode())
