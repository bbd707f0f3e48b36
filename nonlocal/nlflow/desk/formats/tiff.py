"""TIFF files."""

from __future__ import annotations

import json
import math
import re
import struct
from pathlib import Path
from typing import Any, BinaryIO
from xml.etree import ElementTree

import numpy as np

from nlflow.desk.formats.axes import arranged, in_unit, scale_of
from nlflow.desk.formats.media import Array, Media, Writing, check_declared
from nlflow.desk.formats.pictures import from_pillow, with_alpha
from nlflow.desk.formats.tiff_pages import check_own, check_page, extras_of, kept_tags, opened, plain
from nlflow.errors import file_error

_MOST_PAGES = 100_000
_ORIENTATION, _XMP, _JPEG = 274, 700, 7
_CONVERTED = {(5, 4): "CMYK", (6, 3): "YCbCr"}  # by Pillow to RGB, from a photometric and the samples of a pixel


def decode(path: Path) -> Media:
    """See `Format.decode`."""
    with opened(path) as tif:
        count = _count_pages(path, tif)
        check_own(path, tif)
        page, series = tif.pages[0], tif.series[0]
        if len(tif.series) > 1 or series.axes not in ("YX", "YXS", "SYX"):
            return _decode_stack(path, tif, count)
        _check_layout(path, page, series)
        stored = series.asarray()
        stored = np.moveaxis(stored, 0, -1) if series.axes == "SYX" else stored  # planes one after the other
        data, alpha, notes = _in_colours(stored, page, path)
        extras, more = extras_of(page, path)
        extras |= _packing(page)
        turn = _orientation(page)
    notes += more
    data = np.ascontiguousarray(data)
    return Media(path, "tiff", "image", data, alpha=alpha, orientation=turn, extras=extras, notes=tuple(notes))


def is_stack(path: Path) -> bool:
    try:
        with opened(path) as tif:
            return len(tif.pages) <= _MOST_PAGES and tif.series[0].axes not in ("YX", "YXS", "SYX")
    except Exception:  # a damaged file makes tifffile fail in any way
        return False


def _count_pages(path: Path, tif: Any) -> int:
    """Return how many pages there are; a series is looked for among all of them."""
    count = len(tif.pages)
    if count > _MOST_PAGES:
        raise file_error(path, f"{count} pages", f"at most {_MOST_PAGES}", "split it")
    form, stream = tif.tiff, tif.filehandle
    stream.seek(tif.pages[-1].offset)
    entries = struct.unpack(form.tagnoformat, stream.read(form.tagnosize))[0]
    stream.seek(entries * form.tagsize, 1)
    following = stream.read(form.offsetsize)
    if len(following) < form.offsetsize or any(following):  # tifffile takes such a page for the last
        got = f"{count} page(s) and more behind its end"
        raise file_error(path, got, "a whole file", "copy or export it again")
    return count


def _in_colours(data: Array, page: Any, path: Path) -> tuple[Array, Array | None, list[str]]:
    kind = int(page.photometric)
    if kind in (0, 1, 2) or (kind == 6 and int(page.compression) == _JPEG):  # the decoder of JPEG returns RGB
        return plain(data, page, path)
    if kind == 3 and data.ndim == 2 and data.dtype == np.uint8:
        colours = (np.asarray(page.colormap).T >> 8).astype(np.uint8)
        return colours[data], None, [f"{path}: palette colours converted to RGB"]
    count = data.shape[-1] if data.ndim == 3 else 1
    if (kind, count) not in _CONVERTED or data.dtype != np.uint8:
        got = f"{data.dtype} samples, {count} a pixel, photometric {page.photometric!r}"
        raise file_error(path, got, "a plain TIFF file", "save it uncompressed, as grey or RGB")
    from PIL import Image

    mode = _CONVERTED[kind, count]
    return from_pillow(Image.frombytes(mode, data.shape[1::-1], data.tobytes()), path)


def _check_layout(path: Path, page: Any, series: Any) -> None:
    """Refuse what a header declares and the file cannot hold, before anything is decoded."""
    samples = max(math.prod(series.shape), math.prod(page.shape))
    check_declared(path, samples * series.dtype.itemsize, path.stat().st_size, copies=2)
    check_page(path, page)


def _orientation(page: Any) -> int:
    tag = page.tags.get(_ORIENTATION)
    return int(tag.value) if tag is not None and 1 <= tag.value <= 8 else 1


def encode(stream: BinaryIO, values: Array, media: Media, writing: Writing) -> None:
    """See `Format.encode`."""
    import tifffile

    if media.axes:
        _encode_stack(stream, values, media, writing)
        return
    values = with_alpha(values, media)
    count = values.shape[-1] - (media.alpha is not None) if values.ndim == 3 else 1
    extra = (values.shape[-1] if values.ndim == 3 else 1) - (3 if count >= 3 else 1)
    kinds = ["unspecified"] * extra
    if media.alpha is not None:
        kinds[-1] = "unassalpha"
    extras = media.extras
    horizontal, vertical, unit = extras.get("resolution") or (*extras.get("dpi", (0, 0)), 2)
    tags = list(extras.get("tags", ()))
    if media.orientation != 1:
        tags.append((_ORIENTATION, 3, 1, media.orientation, True))
    if "xmp" in extras:
        tags.append((_XMP, 1, len(extras["xmp"]), extras["xmp"], True))
    tifffile.imwrite(
        stream,
        values,
        photometric="rgb" if count >= 3 else "minisblack",
        planarconfig="contig" if values.ndim == 3 else None,
        extrasamples=kinds or None,
        iccprofile=extras.get("icc_profile"),
        resolution=(horizontal, vertical) if horizontal else None,
        resolutionunit=unit if horizontal else None,
        extratags=tags,
        metadata=None,
        software="nlflow",
    )


# ---- stacks

_BITS = 281  # the largest value of a sample
_IMAGEJ_DTYPES, _OME_DTYPES = ("u1", "u2", "f4"), ("u1", "u2", "u4", "i1", "i2", "i4", "f4", "f8")
_OWN = ("shaped", "uniform", "generic", "imagej", "ome")  # as tifffile calls the layouts that are written back
_UNEQUAL = 3  # kinds of pages that a message names


def _decode_stack(path: Path, tif: Any, count: int) -> Media:
    series, axes, shape = _whole(tif)
    _check_one(path, tif, count)
    page = series.keyframe
    check_declared(path, math.prod(shape) * series.dtype.itemsize, path.stat().st_size, copies=2)
    if int(page.photometric) not in (0, 1, 2, 3, 6):
        raise file_error(path, f"pages with photometric {page.photometric!r}", "grey levels or RGB", "convert them")
    for number in range(count):
        check_page(path, tif.pages[number])
    if int(page.photometric) == 3 and not tif.is_imagej:  # ImageJ's numbers are intensities, shown in colours
        raise file_error(path, "pages with palette colours", "grey levels or RGB", "convert them to RGB")
    needed = series.dataoffset + series.nbytes if series.dataoffset is not None else 0
    if needed > path.stat().st_size:
        got = f"a description that tells of {needed} bytes in a file of {path.stat().st_size}"
        raise file_error(path, got, "a whole file", "copy or export it again")
    data = series.asarray().reshape(shape)
    if "S" in axes:  # planes one after the other, in some files
        place = axes.index("S")
        data, axes = np.moveaxis(data, place, -1), axes[:place] + axes[place + 1 :] + "S"
        shape = data.shape
    alpha: Array | None = None
    notes: list[str] = []
    if int(page.photometric) != 3:
        data, alpha, notes = plain(data, page, path)
    extras, more = extras_of(page, path, layout_kept=True)
    layout = _layout(tif, page, axes, shape, count)
    letters = _letters(path, axes, shape)
    scale, bits = _scales(tif, page, layout, path)
    lost = [] if not series.is_pyramidal else [f"{path}: the smaller pictures of its pyramid are left out"]
    if series.kind in _OWN:
        extras["tiff"] = layout
    else:
        lost.append(f"{path}: what is special to its kind ({series.kind}) is left out")
    if data.ndim < len(letters):  # grey levels with opacity
        data = data[..., None]
    if layout["flavour"] == "ome":
        extras |= _ome_channels(path, layout["description"])
    extras |= _packing(page)
    told = (*notes, *more, *lost)
    return Media(
        path, "tiff", "volume", data, alpha=alpha, extras=extras, notes=told, axes=letters, scale=scale, bits=bits
    )


def _whole(tif: Any) -> tuple[Any, str, tuple[int, ...]]:
    """Return the first series with all of its axes and its shape, lengths of 1 among them."""
    if callable(tif.series):  # tifffile >= 2026.5.2
        series = tif.series(squeeze=False)[0]
        return series, series.axes, series.shape
    series = tif.series[0]
    return series, series.get_axes(squeeze=False), series.get_shape(squeeze=False)


def _check_one(path: Path, tif: Any, count: int) -> None:
    if len(tif.series) > 1:
        kinds = [f"{' x '.join(map(str, one.shape))} {one.dtype}" for one in tif.series]
        if len(set(kinds)) == 1:  # positions of a microscope, most often
            got, remedy = f"{len(kinds)} images of {kinds[0]} each, such as positions", "save one as a file of its own"
            raise file_error(path, got, "one image or stack", remedy)
        shown = ", ".join(kinds[:_UNEQUAL]) + (f" and {len(kinds) - _UNEQUAL} more" if len(kinds) > _UNEQUAL else "")
        remedy = "save those of one size and type as a file of their own"
        raise file_error(path, f"{count} pages that are not alike ({shown})", "pages of one size and type", remedy)


def _letters(path: Path, axes: str, shape: tuple[int, ...]) -> str:
    """Return the axes in our letters: samples of a pixel are channels, what only this file knows has none."""
    both = "S" in axes and "C" in axes
    letters = []
    for letter, size in zip(axes, shape, strict=True):
        if letter == "C" and both and size > 1:
            if shape[axes.index("S")] > 1:
                got = f"{size} channels of {shape[axes.index('S')]} colours each"
                raise file_error(path, got, "channels or colours", "save each channel as a file of its own")
            letters.append("C")
        elif letter == "S":
            letters.append("C" if not both or size > 1 else "?")
        else:
            letters.append(letter if letter in "TZYX" or (letter == "C" and not both) else "?")
    return "".join(letters)


def _layout(tif: Any, page: Any, axes: str, shape: tuple[int, ...], count: int) -> dict[str, Any]:
    flavour = "ome" if tif.is_ome else "imagej" if tif.is_imagej else "shaped" if tif.is_shaped else "plain"
    description = page.tags.get(270) if flavour == "plain" else tif.pages[0].tags.get(270)
    words = b"" if description is None or flavour == "plain" else str(description.value).encode()
    found: dict[str, Any] = {"flavour": flavour, "axes": axes, "shape": shape, "description": words,
                             "byteorder": tif.byteorder, "big": tif.is_bigtiff}  # fmt: skip
    if flavour == "imagej":
        found["block"] = dict(tif.imagej_metadata or {})
        if "ColorMap" in page.tags:
            found["colormap"] = page.tags["ColorMap"].value
    elif flavour != "ome" or count > 1:
        own = [kept_tags(tif.pages[number].aspage().tags) for number in range(count)]
        if count > 1 and any(own[1:]):
            found["pages"] = own
    return found


def _scales(tif: Any, page: Any, layout: dict[str, Any], path: Path) -> tuple[dict[str, tuple[float, str]], int | None]:
    """Return the distances that a file tells, and how many bits of a sample are used."""
    top = page.tags.get(_BITS)
    largest = int(np.max(top.value)) if top is not None else 0
    bits = largest.bit_length() if largest > 1 and (largest + 1) & largest == 0 else None
    if layout["flavour"] == "ome":
        found, own = _ome_scales(path, layout["description"])
        return found, own or bits
    words = dict(tif.imagej_metadata or (tif.shaped_metadata or ({},))[0]) if layout["flavour"] != "plain" else {}
    unit, scale = words.get("unit", ""), {}
    if unit or "spacing" in words:
        for letter, code in (("X", 282), ("Y", 283)):
            tag = page.tags.get(code)
            per = tag.value[0] / tag.value[1] if tag is not None and tag.value[1] else 0
            scale[letter] = scale_of(1 / per if per else None, unit)
        scale["Z"] = scale_of(words.get("spacing"), unit)
    rate = scale_of(words.get("fps"))
    scale["T"] = scale_of(words.get("finterval") or (1 / rate[0] if rate else None), "s")
    return {letter: value for letter, value in scale.items() if value is not None}, bits


def _ome_pixels(path: Path, text: bytes) -> tuple[Any, Any]:
    """Return the tree of an OME-XML text, and its element of pixels."""
    if b"<!DOCTYPE" in text or b"<!ENTITY" in text:
        raise file_error(path, "an OME-XML text that defines entities", "plain OME-XML", "export it again")
    tree = ElementTree.fromstring(text)
    pixels = tree.find("{*}Image/{*}Pixels")
    if pixels is None:
        raise file_error(path, "an OME-XML text without pixels", "that of an image", "export it again")
    return tree, pixels


def _ome_scales(path: Path, text: bytes) -> tuple[dict[str, tuple[float, str]], int | None]:
    _, pixels = _ome_pixels(path, text)
    scale = {}
    for letter in "ZYX":
        unit = pixels.get(f"PhysicalSize{letter}Unit", "µm")
        scale[letter] = scale_of(pixels.get(f"PhysicalSize{letter}"), unit)
    scale["T"] = scale_of(pixels.get("TimeIncrement"), pixels.get("TimeIncrementUnit", "s"))
    bits = pixels.get("SignificantBits", "")
    return {k: v for k, v in scale.items() if v is not None}, int(bits) if bits.isascii() and bits.isdecimal() else None


def _ome_channels(path: Path, text: bytes) -> dict[str, Any]:
    names = tuple(one.get("Name", "") for one in _ome_pixels(path, text)[1].findall("{*}Channel"))
    return {"channels": names} if all(names) and names else {}


def _packing(page: Any) -> dict[str, Any]:
    """Return in words how the samples of a page are packed, where it is otherwise than they are written."""
    words = [] if int(page.compression) == 1 else [f"compression {page.compression.name}"]
    words += [f"tiles of {page.tilewidth} x {page.tilelength}"] if page.is_tiled else []
    return {"packing": " in ".join(words)} if words else {}


def notes(media: Media, writing: Writing) -> list[str]:
    """See `Format.notes`."""
    packing = media.extras.get("packing")
    return [f"{writing.path}: is written in strips without compression; the input has {packing}"] if packing else []


def _own_ome(path: Path, text: bytes, planes: int) -> bytes:
    """Return an OME-XML text for a file of all planes in their order, whatever their places were."""
    tree, pixels = _ome_pixels(path, text)
    space = tree.tag.partition("}")[0].lstrip("{")
    for name, value in re.findall(r'xmlns:?(\w*)="([^"]+)"', text.decode()):
        if not re.fullmatch(r"ns\d+", name):  # names that the writer keeps to itself
            ElementTree.register_namespace(name, value)
    ElementTree.register_namespace("", space)
    old = pixels.findall("{*}TiffData")
    at = list(pixels).index(old[0]) if old else len(pixels)
    for element in (*old, *pixels.findall("{*}BinData"), *pixels.findall("{*}MetadataOnly")):
        pixels.remove(element)
    pixels.insert(min(at, len(pixels)), ElementTree.Element(f"{{{space}}}TiffData", IFD="0", PlaneCount=str(planes)))
    pixels.attrib.pop("BigEndian", None)
    tree.attrib.pop("UUID", None)  # that of the other file
    mended: bytes = ElementTree.tostring(tree, encoding="UTF-8", xml_declaration=True)
    return mended


def becomes_ome(media: Media, writing: Writing) -> bool:
    return ".ome.tif" in writing.name and media.extras.get("tiff", {"flavour": ""})["flavour"] != "ome"


def has_metadata(layout: dict[str, Any] | None) -> bool:
    return layout is not None and (layout["flavour"] in ("ome", "imagej") or "pages" in layout)


def _encode_stack(stream: BinaryIO, values: Array, media: Media, writing: Writing) -> None:
    """Write a stack as its input was written; one from another format for ImageJ or, beyond its types, as OME-TIFF."""
    import tifffile

    layout = media.extras.get("tiff")
    if layout is None or becomes_ome(media, writing):
        _encode_anew(stream, values, media, writing)
        return
    shape = layout["shape"]
    if media.alpha is not None:
        parts = values.reshape(*shape[:-1], -1), media.alpha.reshape(*shape[:-1], 1)
        values = np.concatenate(parts, axis=-1)
    values = values.reshape(shape)
    samples = shape[-1] if "S" in layout["axes"] else 1
    if samples == 1 and "S" in layout["axes"]:
        values = values[..., 0]
    frames = values.reshape(-1, *values.shape[-3 if samples > 1 else -2 :])
    extras = media.extras
    flavour, words, tags = layout["flavour"], layout["description"] or None, list(extras.get("tags", ()))
    options: dict[str, Any] = {"photometric": "rgb" if samples >= 3 else "minisblack", "metadata": None,
                               "software": False}  # fmt: skip
    if samples > 1:
        kinds = ["unspecified"] * (samples - (3 if samples >= 3 else 1))
        if media.alpha is not None:
            kinds[-1] = "unassalpha"
        options |= {"planarconfig": "contig", "extrasamples": kinds or None}
    if "resolution" in extras:
        horizontal, vertical, unit = extras["resolution"]
        options |= {"resolution": (horizontal, vertical), "resolutionunit": unit}
    if "icc_profile" in extras:
        options["iccprofile"] = extras["icc_profile"]
    if "xmp" in extras:
        tags.append((_XMP, 1, len(extras["xmp"]), extras["xmp"], True))
    if layout.get("block"):
        tags += tifffile.tifffile.imagej_metadata_tag(_block(layout["block"]), layout["byteorder"])
    if "colormap" in layout:
        options |= {"colormap": layout["colormap"], "photometric": "palette"}
    if flavour == "shaped":
        told = {**json.loads(words or b"{}"), "shape": shape}
        words = json.dumps(told if "axes" not in told else {**told, "axes": layout["axes"]}).encode()
    elif flavour == "ome":
        words = _own_ome(media.path, layout["description"], len(frames))
    big = layout["big"] or values.nbytes > 2**32 - 2**25
    with tifffile.TiffWriter(stream, bigtiff=big, byteorder=layout["byteorder"], ome=False, shaped=False) as writer:
        own = layout.get("pages")
        if own is None or len(own) != len(frames):
            writer.write(frames, description=words, extratags=tags, **options)
            return
        for number, (frame, more) in enumerate(zip(frames, own, strict=True)):
            kept = [tag for tag in more if not (words and number == 0 and tag[0] == 270)]
            writer.write(frame, description=words if number == 0 else None, extratags=kept, **options)


def _block(words: dict[str, Any]) -> dict[str, Any]:
    found = dict(words)
    properties = found.get("Properties")
    if isinstance(properties, dict):
        found["Properties"] = [text for pair in properties.items() for text in pair]
    return found


def _encode_anew(stream: BinaryIO, values: Array, media: Media, writing: Writing) -> None:
    import tifffile

    scale, dtype = media.scale, values.dtype.str[1:]
    names = media.extras.get("channels", ())  # colours have none
    colour = media.channel_axis is not None and values.shape[media.channel_axis] in (3, 4) and dtype in ("u1", "u2")
    colour = colour and not names
    axes = "TZYXS" if colour else "TZCYX"
    values = arranged(values, media.axes.replace("C", "S") if colour else media.axes, axes)
    large = values.nbytes > 2**32 - 2**25
    options: dict[str, Any] = {"photometric": "rgb" if colour else "minisblack"}
    if ".ome.tif" not in writing.name and dtype in _IMAGEJ_DTYPES and not large:
        distances = {letter: in_unit(scale.get(letter), "µm") for letter in "ZYX"}
        unit = "µm" if distances["X"] else next((scale[a][1] for a in "XY" if a in scale), "")
        step = {letter: distances[letter] or scale.get(letter, (0.0, ""))[0] for letter in "ZYX"}
        words: dict[str, Any] = {"axes": axes}
        words |= {"unit": unit.replace("µ", "\\u00B5")} if unit else {}
        words |= {"spacing": step["Z"]} if step["Z"] else {}
        seconds = in_unit(scale.get("T"), "s")
        words |= {"finterval": seconds} if seconds else {}
        if step["X"] and step["Y"]:
            options |= {"resolution": (1 / step["X"], 1 / step["Y"])}
        tifffile.imwrite(stream, values, imagej=True, metadata=words, **options)
        return
    words = {"axes": axes}
    if names and len(names) == values.shape[axes.index("C")]:
        words["Channel"] = {"Name": list(names)}
    for letter in "ZYX":
        if letter in scale:
            words |= {
                f"PhysicalSize{letter}": scale[letter][0],
                f"PhysicalSize{letter}Unit": scale[letter][1] or "pixel",
            }
    if "T" in scale:
        words |= {"TimeIncrement": scale["T"][0], "TimeIncrementUnit": scale["T"][1] or "s"}
    if media.bits is not None:
        words["SignificantBits"] = media.bits
    ome = dtype in _OME_DTYPES
    tifffile.imwrite(stream, values, ome=ome, bigtiff=large, metadata=words, **options)
