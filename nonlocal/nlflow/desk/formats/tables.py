"""Arrays and tables."""

from __future__ import annotations

import csv
import io
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import BinaryIO

import numpy as np

from nlflow.desk.formats.content import encoding_of
from nlflow.desk.formats.media import Array, FirstColumn, Media, Writing
from nlflow.domains.samples import is_ruled
from nlflow.errors import FileFormatError, check_memory, file_error
from nlflow.store.npy import read_array

# Names of a first CSV column that numbers the samples, with or without a unit: "t", "# time", "Time (s)"; an empty one
# is that of a written-out row index.
_TIME = re.compile(
    r"#?\s*(t|times?|timestamps?|date|datetime|sec|seconds?|ms|milliseconds?|minutes?|hours?|samples?|index|)"
    r"\s*([_\[(].*)?",
    re.IGNORECASE,
)

_POINT = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?|[+-]?(nan|inf|infinity)", re.IGNORECASE)
_COMMA = re.compile(r"[+-]?\d*,\d+([eE][+-]?\d+)?")  # a number with a decimal comma
_THOUSANDS = re.compile(r"[+-]?[1-9]\d{0,2}(,\d{3})+")  # what may as well be a whole number
_ODD = re.compile(r"[+-]?\d[\d.,' ]*(,[\d.']*\.|\.[\d,']*,)\d+")  # a number with marks of both kinds
_NOTHING = frozenset(("", "na", "n/a", "#n/a", "null", "none", "-", "--"))  # cells without a sample, in small letters
_MARKS = (";", "\t", ",", " ")  # what separates cells; the last stands for any white space
_SAMPLE = 400  # lines that tell which of them it is

_LEAST = 3  # rows from which on a monotone column counts as a scale; fewer are monotone by chance
_CELL = 200  # bytes that a cell takes while it is text, lists and all


@dataclass(frozen=True)
class Sheet:
    """A table's text."""

    lines: tuple[str, ...]  # without the ends of lines
    rows: tuple[int, ...]  # which lines hold samples
    columns: tuple[int, ...]  # which of their cells are samples
    kept: int = 0  # how many other columns there are
    delimiter: str = ","
    decimal: str = "."
    newline: str = "\n"
    encoding: str = "utf-8"
    bom: bytes = b""

    def part(self, rows: slice) -> Sheet:
        gone = {*self.rows} - {*self.rows[rows]}
        kept = [number for number in range(len(self.lines)) if number not in gone]
        places = {number: place for place, number in enumerate(kept)}
        return replace(
            self, lines=tuple(self.lines[n] for n in kept), rows=tuple(places[n] for n in self.rows[rows])
        )  # fmt: skip

    def text(self, values: Array, absent: Array | None) -> bytes:
        lines = list(self.lines)
        for number, (line, row) in enumerate(zip(self.rows, values, strict=True)):
            pieces = _pieces(lines[line], self.delimiter)
            for place, (column, value) in enumerate(zip(self.columns, row, strict=True)):
                if absent is None or not absent[number, place]:
                    cell = pieces[2 * column + 1]
                    # The shortest digits that give back the same number; those of a float32 are fewer.
                    pieces[2 * column + 1] = cell.replace(_bare(cell), str(value).replace(".", self.decimal), 1)
            lines[line] = "".join(pieces)
        return self.bom + self.newline.join(lines).encode(self.encoding)

    def of_kind(self, name: str) -> Sheet:
        ending = name.rpartition(".")[2]
        mark = "\t" if ending == "tsv" else self.delimiter
        if ending == "csv" and self.delimiter in "\t ":
            mark = "," if self.decimal == "." else ";"
        if mark == self.delimiter:
            return self
        lines = list(self.lines)
        width = max(map(len, (_cells(lines[n], self.delimiter) for n in self.rows)))
        for number, line in enumerate(lines):
            cells = _cells(line, self.delimiter)
            if len(cells) >= max(width - 1, 1) and line.strip() and not _is_comment(line):
                text = io.StringIO(newline="")
                csv.writer(text, delimiter=mark, lineterminator="").writerow(cells)
                lines[number] = text.getvalue()
        return replace(self, lines=tuple(lines), delimiter=mark)


def decode_npy(path: Path) -> Media:
    """See `Format.decode`."""
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


# ---- which columns are samples, whatever the file


def chosen(
    path: Path,
    names: Sequence[str] | None,
    columns: Sequence[Array | None],
    firsts: Sequence[str],
    first_column: FirstColumn | None,
    lines: Sequence[int] = (),
) -> tuple[list[int], bool, list[str]]:
    """Return the columns that are samples, whether the first column is kept, and notes.

    `columns` are arrays with NaN for missing numbers, or None. By default the first column, with the cells `firsts`, is
    kept if its name is one of times or if it is strictly monotone. Tables without numbers or with times that are not
    sorted raise `FileFormatError`.
    """
    width = len(columns)
    values = {column: numbers for column, numbers in enumerate(columns) if numbers is not None}
    found = list(values)
    if not found:
        got = "columns of text alone" + ("" if names is None else f" ({', '.join(map(repr, names[:4]))})")
        raise file_error(path, got, "at least one column of numbers", "check what was exported")
    if first_column == "keep" and found == [0]:
        raise file_error(path, "one column, to be kept", "another to denoise", "leave first-column=keep out")
    scale, notes = columns[0], []
    trend = _trend(scale)
    named = names is not None and _TIME.fullmatch(names[0]) is not None
    told = ["column " + (str(c + 1) if names is None or not names[c] else repr(names[c])) for c in range(width)]
    if names is not None:
        told[0] = f"column {names[0]!r}"
    several = len(found) > 1 or found != [0]
    if scale is None and first_column == "denoise":
        raise file_error(path, f"no numbers in {told[0]}", "samples to denoise", "leave first-column=denoise out")
    kept = scale is None or first_column == "keep" or (several and first_column is None and (named or trend != ""))
    if first_column is None and width > 1 and several:
        _check_order(path, firsts, lines or range(1, len(firsts) + 1), told[0], named, scale)
    if kept and (scale is not None or named):
        why = "" if named or first_column else f"is strictly {trend} and "
        remedy = "; give --axes first-column=denoise if it is data" if why else ""
        notes.append(f"{path}: {told[0]} {why}is kept as it is{remedy}")
        steps = np.ones(1) if scale is None else np.diff(scale)
        if len(steps) and not np.allclose(steps, steps[0], rtol=0.01, atol=0):
            notes.append(f"{path}: the steps of {told[0]} are unequal; the samples count as equally spaced")
    elif found == [0] and trend:
        notes.append(f"{path}: {told[0]} is strictly {trend} and is denoised all the same, since there is no other")
    samples = [c for c in found if not (kept and c == 0)]
    ruled = [c for c in samples if c > 0 and is_ruled(values[c])]
    if ruled and len(ruled) < len(samples):
        samples = [c for c in samples if c not in ruled]
        notes.append(
            _told(path, [told[c] for c in ruled], "rises or falls in equal steps", "rise or fall in equal steps")
        )
    words = [c for c in range(width) if columns[c] is None and not (c == 0 and named)]
    if words:
        notes.append(_told(path, [told[c] for c in words], "holds no numbers", "hold no numbers"))
    return samples, kept, notes


def _told(path: Path, names: list[str], one: str, several: str) -> str:
    shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    return f"{path}: {shown} " + (f"{several} and are kept" if len(names) > 1 else f"{one} and is kept as it is")


def _check_order(
    path: Path, cells: Sequence[str], numbers: Sequence[int], name: str, named: bool, scale: Array | None
) -> None:
    """Raise an error where the first column is a scale and the rows are not in its order, as signals have to be.

    A scale is what has a name for times, and numbers that would be equally spaced in their order.
    """
    scale = _times(cells) if named and scale is None else scale
    if scale is None or not (named or (np.isfinite(scale).all() and is_ruled(np.sort(scale)))):
        return
    with np.errstate(invalid="ignore"):
        steps = np.diff(scale)
    falls = np.sum(steps < 0) > np.sum(steps > 0)
    wrong = ~(steps <= 0 if falls else steps >= 0)  # NaN is neither
    if wrong.any():
        row = int(np.argmax(wrong)) + 1
        got = (
            f"{cells[row]!r} in line {numbers[row]}, out of order in {name} ({int(wrong.sum())} of {len(steps)} steps)"
        )
        remedy = (
            "sort the rows by it, give --axes first-column=keep if the rows are in order, or =denoise if it is data"
        )
        raise file_error(path, got, "rows in the order of their times", remedy)


def _times(cells: Sequence[str]) -> Array | None:
    """Return dates such as 2024-05-31T10:00 as numbers; None where one is none."""
    try:
        dates = np.array([cell.removesuffix("Z") for cell in cells], "datetime64[us]")
    except ValueError:
        return None
    return np.where(np.isnat(dates), np.nan, dates.astype(np.int64).astype(np.float64))


def _trend(values: Array | None) -> str:
    """Return whether numbers are strictly increasing or strictly decreasing; empty if neither."""
    if values is None or len(values) < _LEAST:
        return ""
    for name, one in (("increasing", values), ("decreasing", values[::-1])):
        if np.isfinite(one).all() and bool((one[1:] > one[:-1]).all()):
            return name
    return ""


# ---- texts


def decode_csv(path: Path, first_column: FirstColumn | None = None) -> Media:
    """See `Format.decode`."""
    text, encoding, bom = _text(path)
    newline = "\r\n" if "\r\n" in text else "\r" if "\r" in text and "\n" not in text else "\n"
    lines = _lines(text, newline)
    delimiter = _delimiter(lines)
    places = list(accumulate((1 + line.count("\n") for line in lines), initial=1))
    rows, cells, header = _rows(path, lines, delimiter, places)
    decimal = "," if delimiter != "," and _has_commas([cell for row in cells for cell in row]) else "."
    numbers = [places[number] for number in rows]
    width = len(cells[0])
    columns = [_column(path, [row[c] for row in cells], numbers, c, header, delimiter, decimal) for c in range(width)]
    while len(columns) > 1 and columns[-1] is None and not any(row[len(columns) - 1] for row in cells):
        columns.pop()  # of a delimiter at the end of each line
    firsts = [row[0] for row in cells]
    samples, kept, notes = chosen(path, header, columns, firsts, first_column, numbers)
    if decimal == ",":
        notes.insert(0, f"{path}: commas count as decimal points, and OUT has them too")
    of_samples = {*rows}
    around = [n for n in range(len(lines)) if n not in of_samples and lines[n].strip() and not _is_comment(lines[n])]
    others = len(around) - (header is not None and not header[0].startswith(("#", "%")))
    if others > 0:
        notes.append(f"{path}: {others} line(s) of text around the numbers are kept as they are")
    data = np.stack([values for c in samples if (values := columns[c]) is not None], axis=1)
    absent = np.array([[row[c].lower() in _NOTHING for c in samples] for row in cells])
    if data.shape[1] == 1:
        data, absent = data[:, 0], absent[:, 0]
    others = len(columns) - len(samples)
    sheet = Sheet(tuple(lines), tuple(rows), tuple(samples), others, delimiter, decimal, newline, encoding, bom)
    return Media(
        path, "csv", "signal", data, header=header, time=tuple(firsts) if kept else None, delimiter=delimiter,
        decimal=decimal, extras={"sheet": sheet}, notes=tuple(notes), absent=absent if absent.any() else None,
    )  # fmt: skip


def _text(path: Path) -> tuple[str, str, bytes]:
    remedy = "split it, or save it as .npy"
    check_memory(f"{path}: a text of {path.stat().st_size} bytes", 2 * path.stat().st_size, remedy)
    cells = _count_cells(path)
    check_memory(f"{path}: a table of {cells} cells", _CELL * cells, remedy)
    content = path.read_bytes()
    bom, encoding = encoding_of(content)
    try:
        text = content[len(bom) :].decode(encoding)
    except UnicodeDecodeError:
        encoding = "latin-1"  # a degree or a micro sign of an older Windows: each byte comes back as it was
        text = content.decode(encoding)
    if any(ord(one) < 32 and one not in "\t\n\r\f\v\x1b" for one in set(text)):
        raise file_error(path, "bytes that are no text", "columns of numbers", "export it as plain CSV")
    return text, encoding, bom


def _count_cells(path: Path) -> int:
    """Return how many cells a table has at most, without holding more than a block of it."""
    with path.open("rb") as stream:
        blocks = iter(lambda: stream.read(2**20), b"")
        return 1 + path.stat().st_size // 32 + sum(block.count(mark) for block in blocks for mark in b",;\t\n\r")


def _lines(text: str, newline: str) -> list[str]:
    """Return the lines of a text; those that a pair of quotes spans are one."""
    lines = text.split(newline)
    if '"' not in text or text.count('"') % 2 or all(line.count('"') % 2 == 0 for line in lines):
        return lines
    joined: list[str] = []
    open_quote = False
    for line in lines:
        if open_quote:
            joined[-1] += newline + line
        else:
            joined.append(line)
        open_quote ^= line.count('"') % 2 == 1
    return joined


def _pieces(line: str, delimiter: str) -> list[str]:
    """Return what separates the cells of a line, and the cells, in turn."""
    if delimiter == " ":
        return re.split(r"(\S+)", line)
    if '"' not in line:
        return ["", *[piece for cell in line.split(delimiter) for piece in (cell, delimiter)][:-1], ""]
    found = re.findall(rf'((?:\s*"(?:[^"]|"")*"|[^{delimiter}])*)({delimiter}|$)', line)
    pieces = [""]
    for cell, mark in found:
        pieces += [cell, mark]
        if not mark:
            break
    return pieces


def _bare(cell: str) -> str:
    """Return the text of a cell as it stands there, without spaces and quotes around it."""
    text = cell.strip()
    return text[1:-1].strip() if len(text) > 1 and text[0] == text[-1] == '"' else text


def _cells(line: str, delimiter: str) -> list[str]:
    if '"' not in line and delimiter != " ":
        return [cell.strip() for cell in line.split(delimiter)]
    return [_bare(cell).replace('""', '"') for cell in _pieces(line, delimiter)[1::2]]


def _is_comment(line: str) -> bool:
    return line.lstrip()[:1] in ("#", "%")


def _kind(cell: str, delimiter: str) -> str:
    if _POINT.fullmatch(cell) or (delimiter != "," and _COMMA.fullmatch(cell)):
        return "number"
    return "nothing" if cell.lower() in _NOTHING else "text"


def _delimiter(lines: list[str]) -> str:
    """Return what separates cells: what makes the most of them numbers, and the fewest text."""
    there = [line for line in lines if line.strip() and not _is_comment(line)]
    some = there[:: max(len(there) // _SAMPLE, 1)]
    scores = []
    for mark in _MARKS:
        score = 0
        for line in some:
            kinds = Counter(_kind(cell, mark) for cell in _cells(line, mark))
            score += kinds["number"] - kinds["text"] if kinds["number"] else 0
        scores.append(score)
    if max(scores) <= 0:  # names and words alone
        return next((mark for mark in _MARKS[:-1] if some and mark in some[0]), ",")
    best = _MARKS[int(np.argmax(scores))]
    return best if any(len(_cells(line, best)) > 1 for line in some) else ","


def _rows(
    path: Path, lines: list[str], delimiter: str, places: list[int]
) -> tuple[list[int], list[list[str]], tuple[str, ...] | None]:
    """Return which lines hold samples, their cells, and the names of the columns.

    Lines before and after them are texts; between them are rows and comments alone.
    """
    cells = {n: _cells(line, delimiter) for n, line in enumerate(lines) if line.strip() and not _is_comment(line)}
    kinds = {n: [_kind(cell, delimiter) for cell in row] for n, row in cells.items()}
    some = [n for n, kind in kinds.items() if "number" in kind]
    if not some:
        if len(cells) > 1 and len(row := next(iter(cells.values()))) > 1 and "text" in kinds[max(kinds)]:
            return list(cells)[1:], list(cells.values())[1:], tuple(row)  # a table of texts, which is told as such
        raise file_error(path, "no row of numbers", "columns of numbers", "export it again")
    width = Counter(len(kinds[n]) for n in some).most_common(1)[0][0]
    full = [n for n in some if len(kinds[n]) >= width and set(kinds[n][width:]) <= {"nothing"}]
    told = [Counter(kinds[n][c] for n in full) for c in range(width)]
    of_numbers = [c for c, count in enumerate(told) if count["number"] >= max(count["text"], 1)]
    rows = [n for n in full if all(kinds[n][c] != "text" for c in of_numbers)
            and any(kinds[n][c] == "number" for c in of_numbers)]  # fmt: skip
    if not rows:
        raise file_error(path, "no row of numbers", "columns of numbers", "export it again")
    before = [n for n in cells if n < rows[0]]
    header = _header(lines, cells, rows[0], width, delimiter)
    one_name = delimiter == "," and width == 2 and before and len(cells[before[-1]]) == 1
    if one_name and all(_COMMA.fullmatch(lines[n].strip()) for n in rows):
        got = f"one name over numbers such as {lines[rows[0]].strip()!r}"
        remedy = "separate columns by semicolons, or write decimal points"
        raise file_error(path, got, "to know whether commas separate columns or are decimal", remedy)
    doubtful = (
        before[-1:] if len(before) > 1 and len(cells[before[-2]]) == width and "number" in kinds[before[-1]] else []
    )
    beyond = [n for n in cells if n > rows[-1] and "number" in kinds[n]]
    if doubtful:
        header = tuple(cells[before[-2]])
    for n in sorted({n for n in cells if rows[0] < n < rows[-1]} - {*rows} | {*doubtful} | {*beyond}):
        if len(kinds[n]) != width:
            got = f"{len(kinds[n])} cell(s) in line {places[n]}"
            raise file_error(path, got, f"{width} as in most lines", "give every line as many cells")
        bad = next((c for c in of_numbers if kinds[n][c] == "text"), of_numbers[0])
        raise _bad_cell(path, cells[n][bad], places[n], bad, header)
    return rows, [cells[n] for n in rows], header


def _header(
    lines: list[str], cells: dict[int, list[str]], first: int, width: int, delimiter: str
) -> tuple[str, ...] | None:
    """Return the names of columns: the line before the first row, if it has as many cells; a comment if need be."""
    before = [n for n in range(first) if lines[n].strip()]
    if not before:
        return None
    names = cells.get(before[-1]) or _cells(lines[before[-1]], delimiter)
    if before[-1] not in cells and width == 1:
        return None
    if delimiter == " " and names[0] == "#":
        names = names[1:]
    while len(names) > width and not names[-1]:
        names = names[:-1]
    if len(names) == width - 1 > 1:  # of a table whose rows have names, or whose lines end in a delimiter
        last = all(not row[width - 1] for n, row in cells.items() if n >= first and len(row) >= width)
        names = [*names, ""] if last else ["", *names]
    return tuple(names) if len(names) == width else None


def _bad_cell(path: Path, cell: str, line: int, column: int, header: tuple[str, ...] | None) -> FileFormatError:
    name = f" (column {header[column]!r})" if header else ""
    got = f"{cell!r} in line {line}, cell {column + 1}{name}"
    remedy = (
        "correct the cell, leave it empty where the number is missing (with nan, --mask nan fills it in), or remove "
        "the column"
    )
    return file_error(path, got, "a number with a decimal point", remedy)


def _has_commas(cells: list[str]) -> bool:
    """Whether the decimal points of numbers are commas for sure: none has a point, and not all may be thousands."""
    points = any("." in cell and _POINT.fullmatch(cell) for cell in cells)
    return not points and any(_COMMA.fullmatch(cell) and not _THOUSANDS.fullmatch(cell) for cell in cells)


def _column(
    path: Path,
    cells: list[str],
    lines: list[int],
    column: int,
    header: tuple[str, ...] | None,
    delimiter: str,
    decimal: str,
) -> Array | None:
    """Return the numbers of a column, NaN where there is none; None for a column of text."""
    kinds = Counter(_kind(cell, delimiter) for cell in cells)
    if not kinds["number"] or kinds["text"] > kinds["number"]:
        odd = next((number for number, cell in enumerate(cells) if _ODD.fullmatch(cell)), None)
        if odd is not None:
            raise _bad_cell(path, cells[odd], lines[odd], column, header)
        return None
    values = np.full(len(cells), np.nan)
    for number, (line, cell) in enumerate(zip(lines, cells, strict=True)):
        text = cell.replace(",", ".") if decimal == "," and _COMMA.fullmatch(cell) else cell
        if _POINT.fullmatch(text):
            values[number] = float(text)
        elif cell.lower() not in _NOTHING:
            raise _bad_cell(path, cell, line, column, header)
    return values


def encode_npy(stream: BinaryIO, values: Array, media: Media, writing: Writing) -> None:
    """See `Format.encode`."""
    np.save(stream, values, allow_pickle=False)


def encode_csv(stream: BinaryIO, values: Array, media: Media, writing: Writing) -> None:
    """See `Format.encode`."""
    values = values.reshape(len(values), -1)
    sheet = media.extras.get("sheet")
    if sheet is None or not sheet.lines:
        mark = "," if writing.name.endswith(".csv") else "\t"
        names = media.columns
        rows = [*([names] if names else []), *([str(value) for value in row] for row in values)]
        stream.write("".join(f"{mark.join(row)}\n" for row in rows).encode())
        return
    absent = None if media.absent is None else media.absent.reshape(values.shape)
    if writing.path.suffix.lower() != media.path.suffix.lower():
        sheet = sheet.of_kind(writing.name)
    stream.write(sheet.text(values, absent))
