"""OME-Zarr (NGFF 0.4 on zarr 2, 0.5 on zarr 3) and single zarr arrays."""

from __future__ import annotations

import copy
import math
import os
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from nlflow.desk.apart import size_of
from nlflow.desk.foreign import check_links, links_in, strange_codecs
from nlflow.desk.formats.axes import LONG_UNITS, arranged, scale_of
from nlflow.desk.formats.media import Array, Media, Writing, check_declared, installed
from nlflow.errors import check_memory, file_error

_EXPECTED = "an OME-Zarr image"
_CHUNK = 2**22  # bytes of a chunk that is written


_need_zarr = partial(installed, "zarr", "zarr", "zarr")


def is_store(path: Path) -> bool:
    return path.is_dir() and any((path / name).is_file() for name in ("zarr.json", ".zgroup", ".zarray"))


def is_group(path: Path) -> bool:
    if (path / "zarr.json").is_file():
        with suppress(OSError, ValueError):
            return '"group"' in (path / "zarr.json").read_text(encoding="utf-8")[: 2**20]
    return (path / ".zgroup").is_file()


def decode(path: Path) -> Media:
    """See `Format.decode`."""
    zarr = _need_zarr(path)
    if not is_store(path):
        raise file_error(path, "a folder without zarr.json, .zgroup or .zarray", _EXPECTED, "name the store itself")
    check_links(path, links_in(path), _EXPECTED)
    opened = zarr.open(path, mode="r")
    if isinstance(opened, zarr.Array):
        said = [str(name).upper() for name in getattr(opened.metadata, "dimension_names", None) or ()]
        known = len(said) == opened.ndim and len(set(said)) == len(said)
        told = "".join(a if a in ("T", "Z", "C", "Y", "X") else "?" for a in said) if known else "?" * opened.ndim
        told, scale = told_by_group(path) or (told, {})
        return Media(path, "zarr", "volume", _loaded(path, opened), axes=told, scale=scale)
    group, beside = _image(path, opened)
    attributes = _plain(group.attrs)
    own = attributes.get("ome", attributes)
    version = str(own.get("version", "0.4" if "ome" not in attributes else "0.5"))
    scales = own.get("multiscales")
    if not isinstance(scales, list) or not scales:
        names = ", ".join(sorted(name for name, _ in group.arrays())[:5]) or "none"
        raise file_error(path, f"a zarr group without multiscales (arrays in it: {names})", _EXPECTED, "name an array")
    multiscale = scales[0]
    levels = multiscale.get("datasets") if isinstance(multiscale, dict) else None
    if not isinstance(levels, list) or not levels or not isinstance(levels[0], dict) or "path" not in levels[0]:
        raise file_error(path, "multiscales without datasets that have a path", _EXPECTED, "export it again")
    level = levels[0]
    if not isinstance(level["path"], str) or ".." in level["path"].split("/"):
        raise file_error(path, f"the path {level['path']!r} of its first level", _EXPECTED, "export it again")
    array = group.get(level["path"])
    if not isinstance(array, zarr.Array):
        got = f"no array {level['path']!r}, which its metadata name as the first level"
        raise file_error(path, got, _EXPECTED, "copy or export it again")
    axes, scale = _placed(path, multiscale, level, array.ndim)
    notes = []
    if len(levels) > 1:
        beside = [f"the {len(levels) - 1} smaller level(s) of its pyramid", *beside]
    if len(scales) > 1:
        beside.append(f"{len(scales) - 1} other multiscale(s)")
    if "labels" in group:
        beside.append("the labels")
    if beside:
        notes.append(f"{path}: {' and '.join(beside)} {'are' if len(beside) > 1 else 'is'} left out")
    own = {"version": version, "attributes": attributes, "axes": axes, "shape": array.shape, "path": level["path"]}
    told = own["attributes"].get("ome", own["attributes"]).get("omero", {})
    labels = tuple(str(one.get("label", "")) for one in told.get("channels", ()))
    extras: dict[str, Any] = {"channels": labels} if labels and all(labels) else {}
    extras |= {"ngff": {**own, "format": array.metadata.zarr_format, "chunks": array.chunks}}
    data = _loaded(path, array)
    return Media(path, "zarr", "volume", data, extras=extras, notes=tuple(notes), axes=axes, scale=scale)


def told_by_group(path: Path) -> tuple[str, dict[str, tuple[float, str]]] | None:
    """Return axes and scale of an array by the OME-Zarr group that it is a level of; None outside of such groups."""
    array = Path(os.path.realpath(path))
    for folder in array.parents:
        if not is_group(folder):
            break
        check_links(folder, [folder / name for name in ("zarr.json", ".zgroup", ".zattrs")], _EXPECTED)
        attributes = _plain(_need_zarr(path).open_group(folder, mode="r").attrs)
        scales = attributes.get("ome", attributes).get("multiscales")
        for multiscale in scales if isinstance(scales, list) else []:
            levels = multiscale.get("datasets") if isinstance(multiscale, dict) else None
            for level in levels if isinstance(levels, list) else []:
                name = level.get("path") if isinstance(level, dict) else None
                if isinstance(name, str) and name.strip("/") == array.relative_to(folder).as_posix():
                    opened = _need_zarr(path).open_array(array, mode="r")
                    return _placed(folder, multiscale, level, opened.ndim)
    return None


def _placed(
    path: Path, multiscale: dict[str, Any], level: dict[str, Any], count: int
) -> tuple[str, dict[str, tuple[float, str]]]:
    axes, units = _axes(path, multiscale, count)
    factors = [1.0] * count
    for transform in (*level.get("coordinateTransformations", ()), *multiscale.get("coordinateTransformations", ())):
        if transform.get("type") == "scale":
            if len(transform["scale"]) != count:
                got = f"a scale of {len(transform['scale'])} numbers for {count} axes"
                raise file_error(path, got, _EXPECTED, "export it again")
            factors = [a * float(b) for a, b in zip(factors, transform["scale"], strict=True)]
    # Where all factors are 1 and none has a unit, nobody has measured them.
    told = {a for a, factor, unit in zip(axes, factors, units, strict=True) if unit or factor != 1}
    told |= {*"ZYX"} if told & {*"ZYX"} else set()
    scale = {}
    for letter, factor, unit in zip(axes, factors, units, strict=True):
        value = scale_of(factor, unit)
        if letter in "TZYX" and value is not None and letter in told:
            scale[letter] = value
    return axes, scale


def _image(path: Path, group: Any) -> tuple[Any, list[str]]:
    attributes = _plain(group.attrs)
    own = attributes.get("ome", attributes)
    if "plate" in own or "well" in own:
        raise file_error(path, "a plate of many images", _EXPECTED, "name one of the images inside")
    if "bioformats2raw.layout" not in own or "multiscales" in own:
        return group, []
    images = sorted(name for name, _ in group.groups() if name != "OME")
    if len(images) != 1:
        raise file_error(
            path, f"{len(images)} images ({', '.join(images[:5])})", "one", "name one of the folders inside"
        )
    return group[images[0]], ["what lies around the image in its store"]


def _plain(value: Any) -> Any:
    return copy.deepcopy(value.asdict() if hasattr(value, "asdict") else value)


def _axes(path: Path, multiscale: dict[str, Any], count: int) -> tuple[str, list[str]]:
    """Return letters and units; NGFF before 0.4 has names alone, before 0.3 five axes in one order."""
    said = multiscale.get("axes", list("tczyx")[-count:] if count == 5 else None)
    if said is None or len(said) != count:
        raise file_error(path, f"{0 if said is None else len(said)} axes for {count} dimensions", _EXPECTED, "mend it")
    letters, units = "", list[str]()
    for one in said:
        name, kind = (one, "") if isinstance(one, str) else (str(one.get("name", "")), str(one.get("type", "")))
        letter = name.upper() if name.upper() in ("T", "Z", "Y", "X", "C") else ""
        letter = letter or {"time": "T", "channel": "C"}.get(kind, "?")
        letters += letter
        units.append("" if isinstance(one, str) else str(one.get("unit", "")))
    return letters, units


def _loaded(path: Path, array: Any) -> Array:
    """Return the samples of a zarr array, whose codecs do nothing but decode."""
    strange = strange_codecs(array.metadata.to_dict())
    if strange:
        got = f"the codec(s) {', '.join(strange)}"
        raise file_error(path, got, "those that only turn bytes into numbers (zstd, blosc, gzip)", "write it anew")
    needed = array.dtype.itemsize * max(math.prod(array.shape), math.prod(array.chunks))
    check_memory(f"{path}: the array of shape {array.shape}", 2 * needed, "name OUT .zarr, or crop it")
    check_declared(path, needed, size_of(path), copies=2)
    data: Array = array[...]
    return data


def part(path: Path, place: list[tuple[int, int]]) -> Array:
    array: Any = _need_zarr(path).open(path, mode="r")
    found: Array = np.asarray(array[tuple(slice(*ends) for ends in place)])
    return found


def check(media: Media, writing: Writing) -> str:
    """See `Format.check`."""
    _need_zarr(writing.path)
    return ""


def encode(folder: Path, values: Array, media: Media, writing: Writing) -> None:
    """See `Format.encode`."""
    zarr = _need_zarr(folder)
    own = media.extras.get("ngff")
    if own is not None:
        values = values.reshape(own["shape"])
        axes, version, form = own["axes"], own["version"], own["format"]
        attributes, name = copy.deepcopy(own["attributes"]), own["path"]
        said = attributes.get("ome", attributes)
        said["multiscales"] = said["multiscales"][:1]
        said["multiscales"][0]["datasets"] = said["multiscales"][0]["datasets"][:1]
    else:
        axes = "".join(a for a in "TCZYX" if a in media.axes)
        values, version, form, name = arranged(values, media.axes, axes), "0.5", 3, "0"
        attributes = {"ome": {"version": version, "multiscales": [_multiscale(media, axes)]}}
        attributes["ome"] |= _channels(media, values, axes)
    group = zarr.open_group(folder, mode="w", zarr_format=form)
    more: dict[str, Any] = {"chunk_key_encoding": {"name": "v2", "separator": "/"}} if form == 2 else {
        "dimension_names": [a.lower() for a in axes]}  # fmt: skip
    chunks = own["chunks"] if own is not None else _chunks(values)
    array = group.create_array(name, shape=values.shape, chunks=chunks, dtype=values.dtype.str, **more)
    array[...] = values
    group.attrs.put(attributes)


def _multiscale(media: Media, axes: str) -> dict[str, Any]:
    described: list[dict[str, str]] = []
    for letter in axes:
        kind = {"T": "time", "C": "channel"}.get(letter, "space")
        unit = LONG_UNITS.get(media.scale.get(letter, (1.0, ""))[1], "")
        described.append({"name": letter.lower(), "type": kind} | ({"unit": unit} if unit and letter != "C" else {}))
    factors = [media.scale.get(letter, (1.0, ""))[0] for letter in axes]
    level = {"path": "0", "coordinateTransformations": [{"type": "scale", "scale": factors}]}
    return {"name": media.path.name.split(".")[0], "axes": described, "datasets": [level]}


def _channels(media: Media, values: Array, axes: str) -> dict[str, Any]:
    """Return what OME-Zarr says of channels: their names and, as it wants it, how they are shown."""
    names = media.extras.get("channels", ())
    if len(names) != (values.shape[axes.index("C")] if "C" in axes else 1):
        return {}
    low, high = float(values.min()), float(values.max())
    window = {"min": low, "max": high, "start": low, "end": high}
    return {"omero": {"channels": [{"label": name, "color": "FFFFFF", "window": window} for name in names]}}


def _chunks(values: Array) -> tuple[int, ...]:
    sizes = [1] * (values.ndim - 2) + [min(size, 1024) for size in values.shape[-2:]]
    for place in range(values.ndim - 3, -1, -1):
        room = _CHUNK // max(1, math.prod(sizes) * values.itemsize)
        sizes[place] = max(1, min(values.shape[place], room))
    return tuple(sizes)
