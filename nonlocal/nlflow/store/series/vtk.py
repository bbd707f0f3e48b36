"""Frames for VTK."""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO
from xml.sax.saxutils import quoteattr

import numpy as np
from numpy.typing import NDArray

from nlflow.domains import Grid
from nlflow.errors import InputError
from nlflow.store.atomic import remove, sweep, write_atomic, write_content, write_folder
from nlflow.store.encoding import decode
from nlflow.store.series.base import Frame, Layout, Series, described, reading, writing

_TYPES = {"f4": "Float32", "f8": "Float64", "i8": "Int64"}
_ORDER = "LittleEndian" if sys.byteorder == "little" else "BigEndian"
_HEAD = f'<?xml version="1.0"?>\n<VTKFile type="%s" version="1.0" byte_order="{_ORDER}" header_type="UInt64">\n'


class VtkSeries(Series):
    """Frames in the folder ``run.vtk/``, beside their list ``run.pvd`` (VTK file formats, docs.vtk.org)."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.folder = path.with_suffix(".vtk")
        self._layout: Layout | None = None
        self._times: list[str] = []  # the list is written anew with each frame, of some 80 bytes a frame

    @property
    def places(self) -> tuple[Path, ...]:
        return self.path, self.folder

    def check(self, layout: Layout) -> None:
        domain = layout.domain
        dimensions = 0 if domain.leading else len(domain.shape) if isinstance(domain, Grid) else domain.nodes.shape[1]
        if not 1 <= dimensions <= 3:
            got = "a batch" if domain.leading else f"{dimensions} dimensions"
            raise InputError(
                f"path: got {str(self.path)!r} for {got}, expected a Grid or Points of one to three dimensions, which "
                "VTK has; write .h5 or .zarr"
            )

    def create(self, layout: Layout) -> None:
        with writing(self.path):
            about = json.dumps(layout.attributes, indent=1).encode()
            write_folder(self.folder, lambda place: write_content(place / self._about.name, about), replace=False)
            self._layout, self._times, self.count, self.last = layout, [], 0, None
            self._list()

    def resume(self, layout: Layout, count: int) -> None:
        with reading(self.path):
            times = _listed(self.path)
            self._continue(layout, len(times), count, lambda k: float(times[k]))
        self._layout, self._times = layout, times[:count]
        with writing(self.path):
            sweep(self.folder)
            self._list()
            for number in range(count, len(times) + 1):  # one may lie there that is not in the list yet
                remove(self._place(number))

    def about(self) -> dict[str, Any]:
        return dict(decode(described(self._about)))

    def _append(self, frame: Frame) -> None:
        assert self._layout is not None  # created or resumed
        _write_vtk(self._place(self.count), self._layout, frame)
        self._times.append(repr(frame.t))
        try:
            self._list()
        except BaseException:
            self._times.pop()
            raise

    @property
    def _about(self) -> Path:
        return self.folder / "about.json"

    def _place(self, number: int) -> Path:
        assert self._layout is not None
        ending = "vti" if isinstance(self._layout.domain, Grid) else "vtp"
        return self.folder / f"{number:06d}.{ending}"

    def _list(self) -> None:
        rows = [
            f'<DataSet timestep="{t}" part="0" file={quoteattr(f"{self.folder.name}/{self._place(k).name}")}/>\n'
            for k, t in enumerate(self._times)
        ]
        text = _HEAD % "Collection" + "<Collection>\n" + "".join(rows) + "</Collection>\n</VTKFile>\n"
        write_content(self.path, text.encode())


def _listed(path: Path) -> list[str]:
    """Return the times of a series, as they are written."""
    try:
        root = ET.fromstring(described(path))
    except ET.ParseError as error:
        raise ValueError(str(error)) from error
    return [entry.attrib["timestep"] for entry in root.iter("DataSet")]


def _write_vtk(path: Path, layout: Layout, frame: Frame) -> None:
    """Write one frame: image data for a grid, points for scattered nodes."""
    blocks: list[NDArray[Any]] = []

    def array(name: str, values: NDArray[Any], components: int = 1, more: str = "") -> str:
        offset = sum(8 + block.nbytes for block in blocks)
        blocks.append(values)
        kind = _TYPES[values.dtype.str[1:]]
        return (
            f'<DataArray type="{kind}" Name="{name}" NumberOfComponents="{components}" {more}format="appended" '
            f'offset="{offset}"/>\n'
        )

    moment = [array(name, np.array([value]), more='NumberOfTuples="1" ')
              for name, value in (("TimeValue", frame.t), ("energy", frame.energy))]  # fmt: skip
    field = f"<FieldData>\n{''.join(moment)}</FieldData>\n"
    body = (
        _image(layout, frame, field, array) if isinstance(layout.domain, Grid) else _points(layout, frame, field, array)
    )

    def write(file: BinaryIO) -> None:
        file.write((body + '<AppendedData encoding="raw">\n_').encode())
        for block in blocks:
            file.write(np.uint64(block.nbytes).tobytes())
            file.write(np.ascontiguousarray(block).data)
        file.write(b"\n</AppendedData>\n</VTKFile>\n")

    write_atomic(path, write)


_Array = Callable[..., str]


def _image(layout: Layout, frame: Frame, field: str, array: _Array) -> str:
    grid = layout.domain
    assert isinstance(grid, Grid)
    nodes, u = grid.ndim, frame.u
    extent = " ".join(f"0 {n - 1}" for n in (*grid.shape, 1, 1)[:3])
    origin = " ".join(repr(float(x[0])) for x in grid.axes) + " 0.0" * (3 - nodes)
    spacing = " ".join(repr(float(h)) for h in grid.spacing) + " 1.0" * (3 - nodes)
    order = (*reversed(range(nodes)), *range(nodes, u.ndim))  # x runs fastest in VTK
    values = array("u", u.transpose(order), u.shape[-1] if u.ndim > nodes else 1)
    return (
        _HEAD % "ImageData" + f'<ImageData WholeExtent="{extent}" Origin="{origin}" Spacing="{spacing}">\n{field}'
        f'<Piece Extent="{extent}">\n<PointData Scalars="u">\n{values}</PointData>\n</Piece>\n</ImageData>\n'
    )


def _points(layout: Layout, frame: Frame, field: str, array: _Array) -> str:
    domain, u = layout.domain, frame.u
    count, dimensions = domain.nodes.shape
    positions = np.zeros((count, 3))
    positions[:, :dimensions] = domain.nodes
    values = array("u", u, u.shape[-1] if u.ndim > 1 else 1) + array("weight", domain.weights)
    points = array("Points", positions, 3)
    vertices = array("connectivity", np.arange(count)) + array("offsets", np.arange(1, count + 1))
    return (
        _HEAD % "PolyData" + f'<PolyData>\n{field}<Piece NumberOfPoints="{count}" NumberOfVerts="{count}" '
        'NumberOfLines="0" NumberOfStrips="0" NumberOfPolys="0">\n'
        f'<PointData Scalars="u">\n{values}</PointData>\n<Points>\n{points}</Points>\n'
        f"<Verts>\n{vertices}</Verts>\n</Piece>\n</PolyData>\n"
    )
