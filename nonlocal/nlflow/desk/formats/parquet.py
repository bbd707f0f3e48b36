"""Parquet tables."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import BinaryIO

import numpy as np

from nlflow.desk.formats.media import Array, FirstColumn, Media, Writing, check_declared, installed
from nlflow.desk.formats.tables import Sheet, chosen
from nlflow.domains.samples import rounded

_CELL = 8  # bytes of a number


_need_pyarrow = partial(
    installed, "parquet", "pyarrow", "pyarrow pyarrow.ipc pyarrow.parquet", otherwise=", or save the table as CSV"
)


def decode(path: Path, first_column: FirstColumn | None = None) -> Media:
    """See `Format.decode`."""
    arrow = _need_pyarrow(path)
    with arrow.parquet.ParquetFile(path) as file:
        about = file.metadata
        check_declared(path, _CELL * about.num_rows * about.num_columns, path.stat().st_size, copies=3)
        codec = about.row_group(0).column(0).compression if about.num_row_groups and about.num_columns else "NONE"
        table = file.read()
    names = tuple(map(str, table.column_names))
    kinds = [field.type for field in table.schema]
    numeric = [arrow.types.is_integer(kind) or arrow.types.is_floating(kind) for kind in kinds]
    columns = [
        np.array(table.column(c).cast(arrow.float64(), safe=False).to_numpy(), np.float64) if found else None
        for c, found in enumerate(numeric)
    ]
    firsts = [str(value) for value in table.column(0).to_pylist()] if names else []
    samples, kept, notes = chosen(path, names, columns, firsts, first_column)
    data = np.stack([values for c in samples if (values := columns[c]) is not None], axis=1)
    absent = np.stack([table.column(c).is_null().to_numpy() for c in samples], axis=1)
    if data.shape[1] == 1:
        data, absent = data[:, 0], absent[:, 0]
    kept_table = arrow.BufferOutputStream()
    with arrow.ipc.new_stream(kept_table, table.schema) as stream:
        stream.write_table(table)
    whole = kept_table.getvalue().to_pybytes()  # as it travels from the child in which it is read
    extras = {"sheet": Sheet((), (), tuple(samples), len(names) - len(samples)), "parquet": (whole, codec)}
    return Media(
        path, "parquet", "signal", data, header=names, time=tuple(firsts) if kept else None, extras=extras,
        notes=tuple(notes), absent=absent if absent.any() else None,
    )  # fmt: skip


def check(media: Media, writing: Writing) -> str:
    """See `Format.check`."""
    return "" if "parquet" in media.extras else "a signal that comes from no Parquet file"


def encode(stream: BinaryIO, values: Array, media: Media, writing: Writing) -> None:
    arrow = _need_pyarrow(writing.path)
    whole, codec = media.extras["parquet"]
    table = arrow.ipc.open_stream(whole).read_all()
    values = values.reshape(len(values), -1)
    absent = None if media.absent is None else media.absent.reshape(values.shape)
    for place, column in enumerate(media.extras["sheet"].columns):
        field, own = table.schema.field(column), values[:, place].astype(np.float64)
        lost = np.zeros(len(own), bool) if absent is None else absent[:, place]
        if arrow.types.is_integer(field.type):
            own = rounded(np.where(lost, 0, own), np.dtype(field.type.to_pandas_dtype()))
        table = table.set_column(column, field, arrow.array(own, mask=lost).cast(field.type))
    arrow.parquet.write_table(table, stream, compression=codec)
