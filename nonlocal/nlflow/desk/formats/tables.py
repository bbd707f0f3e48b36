"""NPY arrays and CSV tables."""

from __future__ import annotations

import csv
import io
import re
from pathlib import Path
from typing import BinaryIO

import numpy as np

from nlflow.desk.formats.media import Array, FirstColumn, Media, Writing
from nlflow.errors import check_memory, file_error
from nlflow.store.npy import read_array

# Names of a first CSV column that numbers the samples, with or without a unit: "t", "# time", "Time (s)"; an empty one
# is that of a written-out row index.
_TIME = re.compile(
    r"#?\s*(t|times?|timestamps?|date|datetime|sec|seconds?|ms|milliseconds?|minutes?|hours?|samples?|index|)"
    r"\s*([_\[(].*)?",
    re.IGNORECASE,
)

_COMMA = re.compile(r"[+-]?\d*,\d+([eE][+-]?\d+)?")  # a number with a decimal comma
_THOUSANDS = re.compile(r"[+-]?[1-9]\d{0,2}(,\d{3})+")  # what may as well be a whole number

_LEAST = 3  # rows from which on a monotone column counts as a scale; fewer are monotone by chance
_EVEN = 8  # rows from which on equally spaced numbers count as a scale, in whatever order they are
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


def decode_csv(path: Path, first_column: FirstColumn | None = None) -> Media:
    """Read columns of numbers, with their names and a first column that numbers the rows.

    Parameters
    ----------
    first_column : {"keep", "denoise"}, optional
        What becomes of the first of several columns. By default it is kept if its name is one of times or if it is
        strictly monotone (times, depths, an index), and is one of the signals otherwise. Rows that are not in the order
        of their times are refused then: sorted rows would no longer fit the files beside them.
    """
    header, lines, delimiter, decimal = _rows(path)
    width = len(header or lines[0][1])
    for line, row in lines:
        if len(row) != width:
            got = f"{len(row)} cell(s) in line {line}"
            raise file_error(path, got, f"{width} as in the first line", "give every line as many cells")
    if first_column == "keep" and width == 1:
        raise file_error(path, "one column, to be kept", "another to denoise", "leave first-column=keep out")
    scale = _numbers([row[0] for _, row in lines])
    trend = _trend(scale)
    named = header is not None and _TIME.fullmatch(header[0]) is not None
    kept = first_column == "keep" or (width > 1 and first_column is None and (named or trend != ""))
    name = "column 1" if header is None else f"column {header[0]!r}"
    notes = [f"{path}: commas count as decimal points, and OUT has them too"] if decimal == "," else []
    if first_column is None and width > 1:
        _check_order(path, lines, name, named)
    if kept:
        why = "" if named or first_column else f"is strictly {trend} and "
        remedy = "; give --axes first-column=denoise if it is data" if why else ""
        notes.append(f"{path}: {name} {why}is kept as it is{remedy}")
        steps = np.ones(1) if scale is None else np.diff(scale)
        if len(steps) and not np.allclose(steps, steps[0], rtol=0.01, atol=0):
            notes.append(
                f"{path}: the steps of {name.removeprefix('column ')} are unequal; the samples count as equally spaced"
            )
    elif width == 1 and trend:
        notes.append(f"{path}: {name} is strictly {trend} and is denoised all the same, since there is no other")
    values = _values(path, lines, header, int(kept))
    data = values[:, 0] if values.shape[1] == 1 else values
    firsts = (row[0] for _, row in lines)  # as they stood there; dates have points of their own
    time = tuple(cell.replace(".", decimal) if _is_number(cell) else cell for cell in firsts) if kept else None
    told = tuple(notes)
    return Media(
        path, "csv", "signal", data, header=header, time=time, delimiter=delimiter, decimal=decimal, notes=told
    )


def _check_order(path: Path, lines: list[tuple[int, list[str]]], name: str, named: bool) -> None:
    """Raise an error where the first column is a scale and the rows are not in its order, as signals have to be.

    A scale is what has a name for times, and numbers that would be equally spaced in their order.
    """
    cells = [row[0] for _, row in lines]
    scale = _times(cells) if named else _numbers(cells)
    if scale is None or not (named or _is_even(scale)):
        return
    with np.errstate(invalid="ignore"):
        steps = np.diff(scale)
    falls = np.sum(steps < 0) > np.sum(steps > 0)
    wrong = ~(steps <= 0 if falls else steps >= 0)  # NaN is neither
    if wrong.any():
        line, row = lines[int(np.argmax(wrong)) + 1]
        got = f"{row[0]!r} in line {line}, out of order in {name} ({int(wrong.sum())} of {len(steps)} steps)"
        remedy = (
            "sort the rows by it, give --axes first-column=keep if the rows are in order, or =denoise if it is data"
        )
        raise file_error(path, got, "rows in the order of their times", remedy)


def _times(cells: list[str]) -> Array | None:
    """Return times, numbers or dates such as 2024-05-31T10:00, as numbers; None where one is neither."""
    numbers = _numbers(cells)
    if numbers is not None:
        return numbers
    try:
        dates = np.array([cell.removesuffix("Z") for cell in cells], "datetime64[us]")
    except ValueError:
        return None
    return np.where(np.isnat(dates), np.nan, dates.astype(np.int64).astype(np.float64))


def _is_even(values: Array) -> bool:
    """Tell whether numbers would be equally spaced in their order; too few are so by chance."""
    if len(values) < _EVEN or not np.isfinite(values).all():
        return False
    steps = np.diff(np.sort(values))
    return bool(steps[0] > 0 and np.allclose(steps, steps[0], rtol=0.01, atol=0))


def _rows(path: Path) -> tuple[tuple[str, ...] | None, list[tuple[int, list[str]]], str, str]:
    """Return the header of a table, the cells of its lines with their numbers, what separates them, and the point.

    Cells have points; where they had commas, the last is a comma.
    """
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
    decimal = "," if delimiter != "," and _has_commas([cell for _, row in rows for cell in row]) else "."
    if decimal == ",":
        rows = [(n, [cell.replace(",", ".") if _COMMA.fullmatch(cell) else cell for cell in row]) for n, row in rows]
    header = tuple(rows.pop(0)[1]) if rows and not any(map(_is_number, rows[0][1])) else None
    if not rows:
        raise file_error(path, "no row of numbers", "columns of numbers", "export it again")
    return header, rows, delimiter, decimal


def _has_commas(cells: list[str]) -> bool:
    """Whether the decimal points of numbers are commas for sure: none has a point, and not all may be thousands."""
    points = any("." in cell and _is_number(cell) for cell in cells)
    return not points and any(_COMMA.fullmatch(cell) and not _THOUSANDS.fullmatch(cell) for cell in cells)


def _values(path: Path, lines: list[tuple[int, list[str]]], header: tuple[str, ...] | None, start: int) -> Array:
    width = len(lines[0][1])
    values = np.empty((len(lines), width - start))
    for number, (line, row) in enumerate(lines):
        for column in range(start, width):
            if not _is_number(row[column]):
                name = f" (column {header[column]!r})" if header else ""
                got = f"{row[column]!r} in line {line}, cell {column + 1}{name}"
                remedy = (
                    "correct the cell, write nan for a missing number (--mask nan fills it in), or remove the column"
                )
                raise file_error(path, got, "a number with a decimal point", remedy)
            values[number, column - start] = float(row[column])
    return values


def _numbers(cells: list[str]) -> Array | None:
    return np.array([float(cell) for cell in cells]) if all(map(_is_number, cells)) else None


def _trend(values: Array | None) -> str:
    """Return whether numbers are strictly increasing or strictly decreasing; empty if neither."""
    if values is None or len(values) < _LEAST:
        return ""
    for name, one in (("increasing", values), ("decreasing", values[::-1])):
        if np.isfinite(one).all() and bool((one[1:] > one[:-1]).all()):
            return name
    return ""


def encode_npy(stream: BinaryIO, values: Array, media: Media, writing: Writing) -> None:
    """Write an array."""
    np.save(stream, values, allow_pickle=False)


def encode_csv(stream: BinaryIO, values: Array, media: Media, writing: Writing) -> None:
    """Write columns of numbers with the names and times of the input."""
    text = io.StringIO(newline="")
    writer = csv.writer(text, delimiter=media.delimiter, lineterminator="\n")
    if media.header is not None:
        writer.writerow(media.header)
    # The shortest digits that give back the same number; str of a float32 has fewer of them than that of a float64.
    cells = [[str(value) for value in row] for row in values.reshape(len(values), -1)]
    for number, row in enumerate(cells):
        numbers = [value.replace(".", media.decimal) for value in row]
        writer.writerow(numbers if media.time is None else [media.time[number], *numbers])
    stream.write(text.getvalue().encode())
