"""Stacks in TIFF files: axes, distances and metadata, before and after, as tifffile sees them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import tifffile

from nlflow.desk import files
from nlflow.errors import FileFormatError, InputError
from tests.desk.test_files import samples

RNG = np.random.default_rng(5)


def written(path: Path, **words: Any) -> tuple[files.Media, Path]:
    """Return a file as it is read, and the name of the same after it was written again."""
    media = files.read(path, **words)
    target = path.with_name(f"out-{path.name}")
    files.check_output(target, media)
    files.write(target, media.data, media)
    return media, target


def read_note(media: files.Media) -> str:
    return next(note for note in media.notes if "read as" in note).removeprefix(f"{media.path}: ")


# --- ImageJ ----------------------------------------------------------------------------------------------------------


def test_a_hyperstack_keeps_all_that_imagej_says(tmp_path: Path) -> None:
    data = samples("u2", (2, 3, 2, 7, 9))
    said = {
        "axes": "TZCYX", "spacing": 0.5, "unit": "um", "finterval": 2.0, "Info": "µ-slide\nline", "loop": True,
        "Labels": [f"plane {n}" for n in range(12)], "Ranges": (0.0, 5.0, 1.0, 9.0), "mode": "composite",
        "LUTs": [RNG.integers(0, 256, (3, 256), dtype=np.uint8) for _ in range(2)], "ROI": b"Iout" + bytes(60),
        "Properties": {"key": "value", "of": "mine"}, "min": 3.0, "max": 900.0,
    }  # fmt: skip
    said["Properties"] = ["key", "value", "of", "mine"]
    tifffile.imwrite(tmp_path / "a.tif", data, imagej=True, resolution=(5, 4), metadata=said)
    media, target = written(tmp_path / "a.tif")
    assert (media.kind, media.axes, media.channel_axis) == ("volume", "TZCYX", 2)
    assert media.spacing == (0.5, 0.25, 0.2)
    assert (
        read_note(media)
        == "read as TZCYX, 2 times, 3 slices, 2 channels of 7 x 9, 0.5 x 0.25 x 0.2 µm, 2 s between times"
    )
    with tifffile.TiffFile(tmp_path / "a.tif") as before, tifffile.TiffFile(target) as after:
        one, other = dict(before.imagej_metadata or {}), dict(after.imagej_metadata or {})
        for mine, theirs in zip(one.pop("LUTs"), other.pop("LUTs"), strict=True):
            np.testing.assert_array_equal(mine, theirs)
        assert one == other
        assert before.series[0].axes == after.series[0].axes == "TZCYX"
        for tag in ("XResolution", "YResolution", "ResolutionUnit", "ImageDescription"):
            assert before.pages[0].tags[tag].value == after.pages[0].tags[tag].value
        np.testing.assert_array_equal(after.asarray(), data)


def test_a_colour_table_of_imagej_shows_intensities(tmp_path: Path) -> None:
    data, table = samples("u1", (4, 6, 5)), RNG.integers(0, 2**16, (3, 256), dtype=np.uint16)
    words = {"axes": "ZYX", "spacing": 1.0}
    tifffile.imwrite(tmp_path / "a.tif", data, imagej=True, colormap=table, metadata=words)
    media, target = written(tmp_path / "a.tif")
    np.testing.assert_array_equal(media.data, data)
    with tifffile.TiffFile(target) as after:
        np.testing.assert_array_equal(after.pages[0].colormap, table)
        assert after.is_imagej
    with tifffile.TiffWriter(tmp_path / "b.tif") as writer:
        for page in data:
            writer.write(page, colormap=table, photometric="palette", metadata=None)
    with pytest.raises(FileFormatError, match=r"pages with palette colours.*convert them to RGB"):
        files.read(tmp_path / "b.tif", axes="ZYX")


@pytest.mark.parametrize("unit", ["um", "micron", "\\u00B5m"])
def test_units_of_imagej(tmp_path: Path, unit: str) -> None:
    words = {"axes": "ZYX", "spacing": 2.0, "unit": unit}
    tifffile.imwrite(tmp_path / "a.tif", samples("u1", (3, 5, 6)), imagej=True, resolution=(2, 2), metadata=words)
    assert files.read(tmp_path / "a.tif").scale == {"Z": (2.0, "µm"), "Y": (0.5, "µm"), "X": (0.5, "µm")}


# --- OME -------------------------------------------------------------------------------------------------------------


def ome(path: Path) -> Any:
    with tifffile.TiffFile(path) as tif:
        return ElementTree.fromstring(tif.ome_metadata or "")


def told(element: Any) -> list[tuple[str, dict[str, str], str]]:
    """Return all elements of OME-XML but for where planes lie in the file, and whose it is."""
    return [
        (one.tag, {key: value for key, value in one.attrib.items() if key != "UUID"}, (one.text or "").strip())
        for one in element.iter()
        if not one.tag.endswith("TiffData")
    ]


@pytest.mark.parametrize("order", ["TZCYX", "TCZYX"])
def test_ome_keeps_its_text(tmp_path: Path, order: str) -> None:
    data = samples("u2", (2, 3, 2, 7, 9)) % 4096
    said = {
        "axes": order, "PhysicalSizeX": 0.2, "PhysicalSizeXUnit": "µm", "PhysicalSizeY": 200, "PhysicalSizeYUnit": "nm",
        "PhysicalSizeZ": 0.5, "SignificantBits": 12, "TimeIncrement": 0.1, "Name": "cell",
        "Plane": {"ExposureTime": [0.1] * 12, "PositionZ": list(np.arange(12.0))}, "Description": "déjà vu",
    }  # fmt: skip
    said["Channel"] = {"Name": ["GFP", "mCherry"] if order == "TZCYX" else ["GFP", "mCherry", "DAPI"]}
    tifffile.imwrite(tmp_path / "a.ome.tif", data, metadata=said)
    media, target = written(tmp_path / "a.ome.tif")
    assert (media.axes, media.bits) == (order, 12)
    assert media.spacing == pytest.approx((5e-7, 2e-7, 2e-7))  # in metres, since units differ
    assert told(ome(tmp_path / "a.ome.tif")) == told(ome(target))
    np.testing.assert_array_equal(tifffile.imread(target), data)
    assert files.read(target).axes == order


def test_planes_of_ome_in_another_order(tmp_path: Path) -> None:
    data = samples("u1", (4, 6, 8))
    tifffile.imwrite(tmp_path / "plain.tif", data, photometric="minisblack", metadata={"axes": "ZYX"}, ome=True)
    text = str(tifffile.tiffcomment(tmp_path / "plain.tif"))
    places = "".join(f'<TiffData IFD="{n}" FirstZ="{3 - n}" PlaneCount="1"/>' for n in range(4))
    text = re.sub(r"<TiffData.*?/>", places, text)
    tifffile.imwrite(tmp_path / "a.ome.tif", data, photometric="minisblack", description=text.encode(), metadata=None)
    media, target = written(tmp_path / "a.ome.tif")
    np.testing.assert_array_equal(media.data, data[::-1])
    np.testing.assert_array_equal(tifffile.imread(target), data[::-1])


def test_twelve_bits_stay_twelve_bits(tmp_path: Path) -> None:
    data = np.full((3, 5, 6), 4095, np.uint16)
    tifffile.imwrite(tmp_path / "a.ome.tif", data, metadata={"axes": "ZYX", "SignificantBits": 12})
    tifffile.imwrite(tmp_path / "b.tif", data, photometric="minisblack", metadata={"axes": "ZYX"},
                     extratags=[(281, 3, 1, 4095, True)])  # fmt: skip
    for name in ("a.ome.tif", "b.tif"):
        media = files.read(tmp_path / name)
        assert media.bits == 12
        assert any("12 of 16 bits are used" in note for note in media.notes)
        files.write(tmp_path / "out.tif", np.full(data.shape, 4100.0), media)
        assert tifffile.imread(tmp_path / "out.tif").max() == 4095
        files.write(tmp_path / "low.tif", np.full(data.shape, -3.0), media)
        assert tifffile.imread(tmp_path / "low.tif").min() == 0


def test_entities_in_ome_are_refused(tmp_path: Path) -> None:
    tifffile.imwrite(tmp_path / "a.ome.tif", samples("u1", (3, 5, 6)), metadata={"axes": "ZYX"})
    text = str(tifffile.tiffcomment(tmp_path / "a.ome.tif"))
    bomb = text.replace("<OME", '<!DOCTYPE a [<!ENTITY b "cc">]><OME', 1)
    words: dict[str, Any] = {"photometric": "minisblack", "description": bomb.encode(), "metadata": None}
    tifffile.imwrite(tmp_path / "b.ome.tif", samples("u1", (3, 5, 6)), **words)
    with pytest.raises(FileFormatError, match="defines entities"):
        files.read(tmp_path / "b.ome.tif")


# --- other pages -----------------------------------------------------------------------------------------------------


def test_plain_pages_ask_for_axes_and_keep_their_tags(tmp_path: Path) -> None:
    data = samples("u2", (3, 5, 6))
    with tifffile.TiffWriter(tmp_path / "a.tif") as writer:
        for number, page in enumerate(data):
            words = {"description": f"page {number}", "datetime": f"2020:01:01 00:00:0{number}"}
            writer.write(page, metadata=None, resolution=(72, 72), **words)
    with pytest.raises(
        InputError, match=r"axes: got None .*its 3 pages are; give --axes ZYX .* slices.*TYX for frames"
    ):
        files.read(tmp_path / "a.tif")
    media, target = written(tmp_path / "a.tif", axes="tyx")
    assert (media.kind, media.axes, media.spacing) == ("clip", "TYX", None)
    with tifffile.TiffFile(target) as after:
        assert [page.description for page in after.pages] == ["page 0", "page 1", "page 2"]
        assert [str(page.datetime)[-1] for page in after.pages] == ["0", "1", "2"]
        np.testing.assert_array_equal(after.asarray(), data)


def test_what_tifffile_notes_stays(tmp_path: Path) -> None:
    data = samples("f4", (2, 3, 5, 6))
    tifffile.imwrite(tmp_path / "a.tif", data, photometric="minisblack", metadata={"axes": "CZYX", "mine": [1, "µ"]})
    media, target = written(tmp_path / "a.tif")
    assert (media.axes, media.channel_axis) == ("CZYX", 0)
    assert json.loads(tifffile.tiffcomment(target)) == json.loads(tifffile.tiffcomment(tmp_path / "a.tif"))


@pytest.mark.parametrize("dtype", ["u1", "u2", "u4", "i1", "i2", "i4", "f4", "f8"])
@pytest.mark.parametrize("kind", ["ome", "shaped"])
def test_every_dtype_comes_back(tmp_path: Path, dtype: str, kind: str) -> None:
    data = samples(dtype, (3, 5, 6))
    tifffile.imwrite(tmp_path / "a.tif", data, ome=kind == "ome", photometric="minisblack", metadata={"axes": "ZYX"})
    media, target = written(tmp_path / "a.tif")
    found = tifffile.imread(target)
    assert media.data.dtype == found.dtype == np.dtype(dtype)
    np.testing.assert_array_equal(found, data)


def test_byte_order_and_big_files(tmp_path: Path) -> None:
    data = samples("u2", (3, 5, 6))
    tifffile.imwrite(tmp_path / "a.tif", data, imagej=True, byteorder=">",
                     metadata={"axes": "ZYX", "Labels": ["a", "b", "c"]})  # fmt: skip
    tifffile.imwrite(tmp_path / "b.tif", data, bigtiff=True, photometric="minisblack", metadata={"axes": "ZYX"})
    with tifffile.TiffFile(written(tmp_path / "a.tif")[1]) as after:
        assert after.byteorder == ">"
        assert after.imagej_metadata is not None
        assert after.imagej_metadata["Labels"] == ["a", "b", "c"]
        np.testing.assert_array_equal(after.asarray(), data)
    with tifffile.TiffFile(written(tmp_path / "b.tif")[1]) as after:
        assert after.is_bigtiff


@pytest.mark.parametrize(
    ("kind", "planes"),
    [("ome", "contig"), ("ome", "separate"), ("shaped", "contig"), ("shaped", "separate"), ("imagej", "contig")],
)
def test_colours_and_opacity(tmp_path: Path, kind: str, planes: Any) -> None:
    count = 3 if kind == "imagej" else 4
    data = samples("u1", (3, 5, 6, count))
    axes, given = ("ZYXS", data) if planes == "contig" else ("ZSYX", np.moveaxis(data, -1, 1))
    words: dict[str, Any] = {} if count == 3 else {"extrasamples": ["unassalpha"], "planarconfig": planes}
    words |= {} if kind == "imagej" else {"photometric": "rgb"}
    tifffile.imwrite(tmp_path / "a.tif", given, ome=kind == "ome", imagej=kind == "imagej", metadata={"axes": axes},
                     **words)  # fmt: skip
    media, target = written(tmp_path / "a.tif")
    assert (media.axes, media.channel_axis) == ("ZYXC", 3)
    np.testing.assert_array_equal(media.data, data[..., :3])
    with tifffile.TiffFile(target) as after:
        np.testing.assert_array_equal(after.asarray(), data)
        assert after.pages[0].photometric == tifffile.PHOTOMETRIC.RGB
    assert files.read(target).axes == "ZYXC"


def test_white_as_zero_and_one_bit(tmp_path: Path) -> None:
    data = samples("u1", (3, 8, 8))
    tifffile.imwrite(tmp_path / "a.tif", data, photometric="miniswhite", metadata={"axes": "ZYX"})
    media = files.read(tmp_path / "a.tif")
    np.testing.assert_array_equal(media.data, ~data)
    assert any("inverted" in note for note in media.notes)


def test_channels_of_one_slice_are_an_image(tmp_path: Path) -> None:
    data = samples("u2", (5, 7, 9))
    tifffile.imwrite(tmp_path / "b.ome.tif", data, metadata={"axes": "CYX"})
    media, target = written(tmp_path / "b.ome.tif")
    assert (media.kind, media.axes, media.channel_axis) == ("image", "CYX", 0)
    np.testing.assert_array_equal(tifffile.imread(target), data)
    with pytest.raises(InputError, match=r"spacing: got \[1.0, 1.0\], but .* is an image"):
        files.read(tmp_path / "b.ome.tif", spacing=[1, 1])
    colours = samples("u1", (3, 7, 9))
    tifffile.imwrite(tmp_path / "c.ome.tif", colours, photometric="minisblack", metadata={"axes": "CYX"})
    media = files.read(tmp_path / "c.ome.tif")
    files.write(tmp_path / "c.png", media.data, media)
    np.testing.assert_array_equal(files.read(tmp_path / "c.png").data, np.moveaxis(colours, 0, -1))


def test_one_page_with_axes_of_a_stack(tmp_path: Path) -> None:
    tifffile.imwrite(tmp_path / "a.tif", samples("u1", (7, 9)))
    media = files.read(tmp_path / "a.tif", axes="ZYX")
    assert (media.kind, media.axes) == ("image", "")
    assert media.notes == (f"{tmp_path / 'a.tif'}: one picture only, which is denoised as an image",)


# --- what is refused -------------------------------------------------------------------------------------------------


def test_pages_that_are_not_alike(tmp_path: Path) -> None:
    with tifffile.TiffWriter(tmp_path / "sizes.tif") as writer:
        for side in (4, 6, 4):
            writer.write(samples("u1", (side, side)), metadata=None)
    with tifffile.TiffWriter(tmp_path / "types.tif") as writer:
        writer.write(samples("u1", (4, 4)), metadata=None)
        writer.write(samples("u2", (4, 4)), metadata=None)
    for name, words in (("sizes", "3 pages.*4 x 4 uint8.*6 x 6 uint8"), ("types", "2 pages.*uint8.*uint16")):
        with pytest.raises(FileFormatError, match=f"{words}.*one size and type; save those"):
            files.read(tmp_path / f"{name}.tif", axes="ZYX")


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ("TYX", "got 'TYX', but .*a.tif says ZYX of 3 x 5 x 6; leave axes out"),
        ("ZYXC", "expected 3 letters"),
        ("ZZX", "each once"),
        ("QYX", "each once"),
        ("", "each once"),
        ("YXZ", "says ZYX"),
    ],
)
def test_axes_that_contradict_the_file(tmp_path: Path, axes: str, message: str) -> None:
    tifffile.imwrite(tmp_path / "a.tif", samples("u1", (3, 5, 6)), imagej=True, metadata={"axes": "ZYX"})
    with pytest.raises(InputError, match=message):
        files.read(tmp_path / "a.tif", axes=axes)


@pytest.mark.parametrize("words", [{"kind": "signal"}, {"kind": "image"}, {"channel_axis": 0}])
def test_other_words_that_contradict_the_file(tmp_path: Path, words: dict[str, Any]) -> None:
    tifffile.imwrite(tmp_path / "a.tif", samples("u1", (3, 5, 6)), imagej=True, metadata={"axes": "ZYX"})
    with pytest.raises(InputError, match=r"(kind|channel_axis): got .*leave"):
        files.read(tmp_path / "a.tif", **words)


def test_spacing_of_the_user(tmp_path: Path) -> None:
    words = {"axes": "TZYX", "spacing": 2.0, "unit": "um"}
    tifffile.imwrite(tmp_path / "a.tif", samples("u1", (2, 3, 5, 6)), imagej=True, resolution=(1, 1), metadata=words)
    assert files.read(tmp_path / "a.tif").spacing == (2, 1, 1)
    assert files.read(tmp_path / "a.tif", spacing=[3, 1, 1]).spacing == (3, 1, 1)
    assert files.read(tmp_path / "a.tif", spacing=[9, 3, 1, 1]).spacing == (3, 1, 1)
    for bad in ([1, 1], [3, 1, -1], [3, 1, np.nan]):
        with pytest.raises(InputError, match="spacing"):
            files.read(tmp_path / "a.tif", spacing=bad)
    tifffile.imwrite(tmp_path / "b.tif", samples("u1", (5, 6)))
    with pytest.raises(InputError, match=r"spacing: got .*an image, expected a stack"):
        files.read(tmp_path / "b.tif", spacing=[1, 1])


@pytest.mark.parametrize("compression", [None, "zlib"])
@pytest.mark.parametrize("kind", ["ome", "imagej", "pages"])
def test_truncated_stacks(tmp_path: Path, kind: str, compression: Any) -> None:
    data = samples("u1", (4, 40, 50))
    words: dict[str, Any] = {"metadata": {"axes": "ZYX"}, kind: True} if kind != "pages" else {"metadata": None}
    tifffile.imwrite(tmp_path / "a.tif", data, photometric="minisblack", compression=compression, **words)
    whole = (tmp_path / "a.tif").read_bytes()
    for size in [1, 8, 60, 200, 400, *range(600, len(whole) - 40, 977), len(whole) - 40]:
        (tmp_path / "a.tif").write_bytes(whole[:size])
        try:  # what is lost may be no more than the space at the end
            np.testing.assert_array_equal(files.read(tmp_path / "a.tif", axes="ZYX").data, data)
            assert size > len(whole) - 700
        except FileFormatError as error:
            assert "export it again" in str(error)  # noqa: PT017
    (tmp_path / "a.tif").write_bytes(whole)
    files.read(tmp_path / "a.tif", axes="ZYX")


def test_a_part_of_a_set_of_files(tmp_path: Path) -> None:
    tifffile.imwrite(tmp_path / "a.ome.tif", samples("u1", (2, 5, 6)), metadata={"axes": "ZYX"})
    text = str(tifffile.tiffcomment(tmp_path / "a.ome.tif")).replace('SizeZ="2"', 'SizeZ="4"')
    text = re.sub(r"<TiffData.*?/>", '<TiffData IFD="0" PlaneCount="2"/>', text)
    tifffile.imwrite(tmp_path / "b.ome.tif", samples("u1", (2, 5, 6)), photometric="minisblack",
                     description=text.encode(), metadata=None)  # fmt: skip
    with pytest.raises(FileFormatError, match="copy or export it again"):
        files.read(tmp_path / "b.ome.tif")


# --- other formats ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("source", "target"), [("a.tif", "b.ome.tif"), ("a.ome.tif", "b.tif"), ("a.npy", "b.tif")])
@pytest.mark.parametrize("dtype", ["u2", "i4", "f8"])
def test_from_one_kind_to_another(tmp_path: Path, source: str, target: str, dtype: str) -> None:
    data = samples(dtype, (3, 5, 6))
    if source == "a.npy":
        np.save(tmp_path / source, data)
    elif source == "a.ome.tif" or dtype != "u2":
        words = {"axes": "ZYX", "PhysicalSizeZ": 2.0, "PhysicalSizeY": 1.0, "PhysicalSizeX": 1.0}
        tifffile.imwrite(tmp_path / source, data, ome=True, metadata=words)
    else:
        words = {"axes": "ZYX", "spacing": 2.0, "unit": "um"}
        tifffile.imwrite(tmp_path / source, data, imagej=True, resolution=(1, 1), metadata=words)
    media = files.read(tmp_path / source, axes="ZYX")
    files.write(tmp_path / target, media.data, media)
    found = files.read(tmp_path / target)
    np.testing.assert_array_equal(found.data, data)
    assert found.axes == "ZYX"
    with tifffile.TiffFile(tmp_path / target) as tif:
        assert tif.is_ome or target == "b.tif"
    if source != "a.npy":
        assert found.scale["Z"] == (2.0, "µm")


def test_arrays_of_four_dimensions(tmp_path: Path) -> None:
    data = samples("f4", (2, 3, 5, 6))
    np.save(tmp_path / "a.npy", data)
    with pytest.raises(FileFormatError, match=r"one to three dimensions.*--axes TZYX"):
        files.read(tmp_path / "a.npy")
    media, target = written(tmp_path / "a.npy", axes="CZYX", spacing=[2, 1, 1])
    assert (media.axes, media.spacing) == ("CZYX", (2, 1, 1))
    np.testing.assert_array_equal(np.load(target), data)
    np.save(tmp_path / "one.npy", data[0, :1])
    media, target = written(tmp_path / "one.npy", axes="ZYX")
    assert (media.kind, media.data.shape) == ("image", (5, 6))
    assert "one slice only" in media.notes[-1]
    assert np.load(target).shape == (1, 5, 6)
    for words in ({"kind": "image"}, {"channel_axis": 0}):
        with pytest.raises(InputError, match="leave"):
            files.read(tmp_path / "a.npy", axes="TZYX", **words)


def paged(path: Path, data: Any, description: str, compression: str | None) -> None:
    """Write pages one by one, the first with a description."""
    with tifffile.TiffWriter(path) as writer:
        for number, page in enumerate(data):
            text = description if number == 0 else None
            writer.write(page, description=text, metadata=None, contiguous=False, compression=compression,
                         photometric="minisblack")  # fmt: skip


@pytest.mark.parametrize("compression", [None, "zlib"])
@pytest.mark.parametrize(
    ("description", "told"),
    [('{"shape": [6, 40, 30]}', 6), ("ImageJ=1.11a\nimages=9\nslices=6\n", 6), ("ImageJ=1.11a\nslices=2\n", 2)],
)
def test_descriptions_that_tell_of_other_pages(
    tmp_path: Path, description: str, told: int, compression: str | None
) -> None:
    data = samples("u1", (5, 40, 30))
    paged(tmp_path / "a.tif", data, description, compression)
    with (tmp_path / "a.tif").open("ab") as stream:
        stream.write(bytes(4 * data.nbytes))
    with pytest.raises(
        FileFormatError, match=rf"got 5 page\(s\) and a description that tells of {told}, expected {told}"
    ):
        files.read(tmp_path / "a.tif", axes="ZYX")
    paged(tmp_path / "b.tif", data, '{"shape": [5, 40, 30]}', compression)
    np.testing.assert_array_equal(files.read(tmp_path / "b.tif", axes="ZYX").data, data)


def test_planes_behind_one_header(tmp_path: Path) -> None:
    data = samples("u1", (9, 40, 30))
    tifffile.imwrite(tmp_path / "a.tif", data, truncate=True, photometric="minisblack")
    with tifffile.TiffFile(tmp_path / "a.tif") as tif:
        assert len(tif.pages) == 1
    np.testing.assert_array_equal(files.read(tmp_path / "a.tif", axes="ZYX").data, data)
    for text, fits in (("images=9\nslices=9\n", True), ("images=9\nslices=6\n", False)):
        paged(tmp_path / "b.tif", data[:1], f"ImageJ=1.11a\n{text}", None)
        with tifffile.TiffFile(tmp_path / "b.tif") as tif:
            start = tif.pages.first.dataoffsets[0]
        whole = (tmp_path / "b.tif").read_bytes()[:start] + data.tobytes()
        (tmp_path / "b.tif").write_bytes(whole)
        if fits:
            np.testing.assert_array_equal(files.read(tmp_path / "b.tif").data, data)
        else:
            with pytest.raises(FileFormatError, match=r"got 9 page\(s\) and a description that tells of 6"):
                files.read(tmp_path / "b.tif")
