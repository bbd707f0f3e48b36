"""Frames in zarr."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nlflow.store.atomic import remove, sweep, write_content, write_folder
from nlflow.store.encoding import decode
from nlflow.store.series.base import Frame, Layout, Series, described, missing, reading, writing

_ROWS = 1024  # times in a chunk
_GROWING = ("u", "t", "energy")


class ZarrSeries(Series):
    """Frames in a store of zarr 3, a chunk for each.

    The new length is written last, so that a store never tells of a frame that is not there.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        try:
            import zarr
        except ImportError as error:
            raise missing("zarr", "zarr", path) from error
        self._zarr: Any = zarr
        self._rows: dict[str, NDArray[np.float64]] = {}  # the chunks of times and energies that are being filled

    def create(self, layout: Layout) -> None:
        def fill(folder: Path) -> None:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=".*[Cc]onsolidated metadata")  # not in the specification yet
                _fill(self._zarr.open_group(folder, mode="w", zarr_format=3), layout)
                self._zarr.consolidate_metadata(folder)

        with writing(self.path):
            write_folder(self.path, fill, replace=False)
        self.count, self.last = 0, None
        self._rows = {name: np.zeros(_ROWS) for name in _GROWING[1:]}

    def resume(self, layout: Layout, count: int) -> None:
        with reading(self.path):
            arrays = self._root()["consolidated_metadata"]["metadata"]
            self._continue(layout, min(arrays[name]["shape"][0] for name in _GROWING), count, self._time)
            self._rows = {name: self._chunk(name, count) for name in _GROWING[1:]}
        with writing(self.path):
            sweep(self.path / "u" / "c")
            self._tell(count, reversed_order=True)
            for folder in (self.path / "u" / "c").glob("*"):
                if folder.name.isdecimal() and int(folder.name) >= count:
                    remove(folder)

    def about(self) -> dict[str, Any]:
        return dict(self._root()["attributes"])

    def _root(self) -> dict[str, Any]:
        return dict(decode(described(self.path / "zarr.json")))

    def _time(self, number: int) -> float:
        return float(self._chunk("t", number)[number % _ROWS])

    def _chunk(self, name: str, count: int) -> NDArray[np.float64]:
        path = self.path / name / "c" / str(count // _ROWS)
        if not path.exists():
            return np.zeros(_ROWS)
        return np.frombuffer(path.read_bytes(), dtype="<f8", count=_ROWS).copy()

    def _append(self, frame: Frame) -> None:
        count = self.count
        place = self.path / "u" / "c" / "/".join([str(count), *("0" * frame.u.ndim)])
        place.parent.mkdir(parents=True, exist_ok=True)
        write_content(
            place, np.ascontiguousarray(frame.u).astype(frame.u.dtype.newbyteorder("<"), copy=False).tobytes()
        )
        for name, value in (("t", frame.t), ("energy", frame.energy)):
            rows = self._rows[name]
            rows[count % _ROWS] = value
            (self.path / name / "c").mkdir(exist_ok=True)
            write_content(self.path / name / "c" / str(count // _ROWS), rows.astype("<f8").tobytes())
        self._tell(count + 1)

    def _tell(self, count: int, *, reversed_order: bool = False) -> None:
        """Write the length into all descriptions: that of the store last, or first where frames are taken away."""
        parts: tuple[str, ...] = (*_GROWING, ".")
        for part in reversed(parts) if reversed_order else parts:
            path = self.path / part / "zarr.json"
            about = json.loads(path.read_text(encoding="utf-8"))
            arrays = [about] if part != "." else [about["consolidated_metadata"]["metadata"][n] for n in _GROWING]
            for array in arrays:
                array["shape"][0] = count
            write_content(path, json.dumps(about, indent=1).encode())


def _fill(group: Any, layout: Layout) -> None:
    """Put all but the frames into a new store."""
    group.attrs.update(layout.attributes)
    # Frames are as they are in memory, little end first: what adds them needs no codec.
    plain: dict[str, Any] = {"compressors": None, "filters": None, "fill_value": float("nan")}
    little = layout.dtype.newbyteorder("<")
    u = group.create_array(
        "u", shape=(0, *layout.shape), chunks=(1, *layout.shape), dtype=little, dimension_names=("t", *layout.axes),
        **plain,
    )  # fmt: skip
    u.attrs.update(layout.beside)
    for name in _GROWING[1:]:
        group.create_array(name, shape=(0,), chunks=(_ROWS,), dtype="<f8", dimension_names=("t",), **plain)
    for name, (axes, values, attributes) in layout.coordinates.items():
        array = group.create_array(name, shape=values.shape, dtype=values.dtype, dimension_names=axes)
        array[...] = values
        array.attrs.update(attributes)
