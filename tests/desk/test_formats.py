"""Every file format there and back: samples, types and what comes with them."""

from __future__ import annotations

import re
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import PIL
import pytest
import tifffile
from PIL import Image
from scipy.io import wavfile

from nlflow.desk import files
from nlflow.errors import FileFormatError, InputError
from tests.desk.test_files import listing, samples

DTYPES = ("u1", "u2", "u4", "i1", "i2", "i4", "f2", "f4", "f8")


def png_chunk(name: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))


def write_png(path: Path, values: np.ndarray[Any, Any], colour: int) -> None:
    """Write a 16-bit PNG, of the kinds that Pillow does not write."""
    height, width = values.shape[:2]
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)
    header = struct.pack(">IIBBBBB", width, height, 16, colour, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")]
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(png_chunk(*chunk) for chunk in chunks))


def round_trip(path: Path, out: Path, **options: Any) -> tuple[files.Media, files.Media]:
    media = files.read(path, **options)
    files.check_output(out, media)
    files.write(out, media.data.astype(np.float64), media)
    assert listing(path.parent) == sorted({path.name, out.name})
    return media, files.read(out, **options)


def assert_same(a: files.Media, b: files.Media) -> None:
    assert a.data.dtype == b.data.dtype
    np.testing.assert_array_equal(a.data, b.data)
    assert (a.kind, a.channel_axis, a.sample_rate, a.header, a.time) == (
        b.kind,
        b.channel_axis,
        b.sample_rate,
        b.header,
        b.time,
    )
    assert (a.alpha is None) == (b.alpha is None)
    if a.alpha is not None:
        np.testing.assert_array_equal(a.alpha, b.alpha)


# --- round trips -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "shape"), [("u1", (5, 7)), ("u2", (5, 7)), ("u1", (5, 7, 2)), ("u1", (5, 7, 3)), ("u1", (5, 7, 4))]
)
def test_png(tmp_path: Path, dtype: str, shape: tuple[int, ...]) -> None:
    stored = samples(dtype, shape)
    Image.fromarray(stored).save(tmp_path / "a.png")
    media, back = round_trip(tmp_path / "a.png", tmp_path / "b.png")
    assert media.notes == ()
    assert media.kind == "image"
    assert media.data.dtype == dtype
    assert media.channel_axis == (2 if shape[2:] in ((3,), (4,)) else None)
    if shape[2:] in ((2,), (4,)):
        np.testing.assert_array_equal(media.alpha, stored[..., -1])
        stored = stored[..., 0] if shape[2:] == (2,) else stored[..., :3]
    else:
        assert media.alpha is None
    np.testing.assert_array_equal(media.data, stored)
    assert_same(media, back)


@pytest.mark.parametrize("quality", [20, 75, 90, 98])
def test_jpeg_keeps_its_quality(tmp_path: Path, quality: int) -> None:
    Image.fromarray(samples("u1", (16, 24, 3))).save(tmp_path / "a.jpg", quality=quality)
    media, back = round_trip(tmp_path / "a.jpg", tmp_path / "b.jpg")
    assert media.extras["quality"] == back.extras["quality"] == quality
    files.write(files.Writing(tmp_path / "c.jpg", 60), media.data, media)
    assert files.read(tmp_path / "c.jpg").extras["quality"] == 60


@pytest.mark.parametrize("shape", [(16, 24), (16, 24, 3)])
def test_jpeg(tmp_path: Path, shape: tuple[int, ...]) -> None:
    ramp = np.indices(shape)[1].astype("u1") * 4
    Image.fromarray(ramp).save(tmp_path / "a.JPG", quality=95)
    media, back = round_trip(tmp_path / "a.JPG", tmp_path / "b.jpeg")
    assert media.data.shape == back.data.shape == shape
    assert back.data.dtype == np.uint8
    assert np.abs(media.data.astype(int) - back.data).max() <= 6
    assert media.notes == ()


@pytest.mark.parametrize("shape", [(5, 7), (5, 7, 3)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_tiff(tmp_path: Path, dtype: str, shape: tuple[int, ...]) -> None:
    stored = samples(dtype, shape)
    tifffile.imwrite(tmp_path / "a.tif", stored, photometric="rgb" if len(shape) == 3 else "minisblack")
    media, back = round_trip(tmp_path / "a.tif", tmp_path / "b.tiff")
    assert media.data.dtype == dtype
    np.testing.assert_array_equal(media.data, stored)
    assert media.channel_axis == (2 if len(shape) == 3 else None)
    assert_same(media, back)


@pytest.mark.parametrize(
    ("shape", "photometric", "extra", "channels"),
    [
        ((5, 7, 2), "minisblack", ["unassalpha"], None),
        ((5, 7, 4), "rgb", ["unassalpha"], 3),
        ((5, 7, 4), "rgb", ["unspecified"], 4),
        ((5, 7, 2), "minisblack", ["unspecified"], 2),
        ((5, 7, 6), "minisblack", ["unspecified"] * 5, 6),
    ],
)
def test_tiff_samples(
    tmp_path: Path, shape: tuple[int, ...], photometric: str, extra: list[str], channels: int | None
) -> None:
    stored = samples("u2", shape)
    tifffile.imwrite(tmp_path / "a.tif", stored, photometric=photometric, extrasamples=extra, planarconfig="contig")
    media, back = round_trip(tmp_path / "a.tif", tmp_path / "b.tif")
    assert media.data.shape == (5, 7) + ((channels,) if channels else ())
    assert (media.alpha is not None) == ("unassalpha" in extra)
    assert_same(media, back)


def test_tiff_planes_and_byte_order(tmp_path: Path) -> None:
    stored = samples("u2", (3, 5, 7))
    tifffile.imwrite(tmp_path / "a.tif", stored, photometric="rgb", planarconfig="separate", byteorder=">")
    media, back = round_trip(tmp_path / "a.tif", tmp_path / "b.tif")
    np.testing.assert_array_equal(media.data, np.moveaxis(stored, 0, -1))
    assert media.data.dtype.isnative
    assert_same(media, back)


def test_planes_of_a_tiff_whose_header_is_unsure_of_them(tmp_path: Path) -> None:
    """What stands in the file decides, as tifffile reads it, not the broken tag that should tell."""
    stored = np.random.default_rng(0).integers(0, 256, (3, 7, 1), np.uint8)
    path = tmp_path / "a.tif"
    tifffile.imwrite(path, stored, photometric="rgb", planarconfig="separate", metadata=None)
    whole, tag = path.read_bytes(), struct.pack("<HHIHH", 284, 3, 1, 2, 0)
    assert whole.count(tag) == 1
    path.write_bytes(whole.replace(tag, struct.pack("<HHIHH", 284, 3, 1, 65535, 0)))
    with tifffile.TiffFile(path) as tif:
        expected = np.moveaxis(tif.series[0].asarray(), tif.series[0].axes.index("S"), -1)
    found = files.read(path)
    assert found.data.shape == (7, 1, 3)
    np.testing.assert_array_equal(found.data, expected)


@pytest.mark.parametrize("compression", ["tiff_lzw", "packbits", "tiff_deflate", "jpeg"])
def test_tiff_compression(tmp_path: Path, compression: str) -> None:
    values = np.indices((16, 24, 3))[1].astype("u1") * 4
    Image.fromarray(values).save(tmp_path / "a.tif", compression=compression)
    data = files.read(tmp_path / "a.tif").data
    assert np.abs(data.astype(int) - values).max() <= (8 if compression == "jpeg" else 0)


@pytest.mark.parametrize("dtype", ["u1", "i4", "f2", "f4", "f8", ">f4", "?"])
def test_npy(tmp_path: Path, dtype: str) -> None:
    stored = np.arange(35).reshape(5, 7).astype(dtype)
    np.save(tmp_path / "a.npy", stored)
    media = files.read(tmp_path / "a.npy")
    assert media.kind == "image"
    assert media.data.dtype == np.dtype(dtype).newbyteorder("=")
    result = media.data + np.float64(0.25)
    files.write(tmp_path / "b.npy", result, media)
    back = files.read(tmp_path / "b.npy").data
    assert back.dtype == (np.float32 if media.data.dtype in (np.float16, np.float32) else np.float64)
    np.testing.assert_array_equal(back, result)


@pytest.mark.parametrize("shape", [(50,), (50, 2)])
@pytest.mark.parametrize("dtype", ["u1", "i2", "i4", "f4", "f8"])
def test_wav(tmp_path: Path, dtype: str, shape: tuple[int, ...]) -> None:
    stored = samples(dtype, shape)
    wavfile.write(tmp_path / "a.wav", 11025, stored)
    media, back = round_trip(tmp_path / "a.wav", tmp_path / "b.wav")
    assert media.kind == "signal"
    assert media.sample_rate == 11025
    assert media.channel_axis == (1 if len(shape) == 2 else None)
    np.testing.assert_array_equal(media.data, stored)
    assert media.notes == ()
    assert_same(media, back)


@pytest.mark.parametrize("law", ["mu-law", "A-law"])
@pytest.mark.parametrize("form", ["wav", "au"])
@pytest.mark.parametrize("channels", [1, 2])
def test_sound_of_a_law_comes_back_in_it(tmp_path: Path, law: str, form: str, channels: int) -> None:
    # Samples of ITU-T G.711, tables 1 and 2: the largest, the smallest, and 0 of mu-law.
    known = {"mu-law": {0x80: 32124, 0x00: -32124, 0xFF: 0, 0xEF: 132}, "A-law": {0xAA: 32256, 0x2A: -32256, 0xD5: 8}}
    codes = np.array([*known[law], *range(128, 256), 64], np.uint8)
    codes = codes[: len(codes) // 2 * 2]
    if form == "au":
        content = (
            b".snd" + struct.pack(">IIIII", 28, len(codes), {"mu-law": 1, "A-law": 27}[law], 8000, channels) + b"word"
        )
    else:
        head = struct.pack("<HHIIHHH", {"mu-law": 7, "A-law": 6}[law], channels, 8000, 8000 * channels, channels, 8, 0)
        frames = struct.pack("<I", len(codes) // channels)
        content = b"WAVEfmt " + struct.pack("<I", 18) + head + b"fact" + struct.pack("<I", 4) + frames + b"data"
        content += struct.pack("<I", len(codes))
        content = b"RIFF" + struct.pack("<I", len(content) + len(codes)) + content
    (tmp_path / f"a.{form}").write_bytes(content + codes.tobytes())
    media, back = round_trip(tmp_path / f"a.{form}", tmp_path / f"b.{form}")
    assert media.data.ravel()[: len(known[law])].tolist() == list(known[law].values())
    assert (media.data.dtype, media.data.size, media.sample_rate) == (np.int16, len(codes), 8000)
    assert_same(media, back)
    assert (tmp_path / f"a.{form}").read_bytes() == (tmp_path / f"b.{form}").read_bytes()


@pytest.mark.parametrize(("kind", "dtype"), [(2, "i1"), (3, ">i2"), (5, ">i4"), (6, ">f4"), (7, ">f8")])
def test_au(tmp_path: Path, kind: int, dtype: str) -> None:
    stored = np.arange(-10, 10).astype(dtype)
    head = struct.pack(">IIIII", 24, 2**32 - 1, kind, 22050, 2)
    (tmp_path / "a.au").write_bytes(b".snd" + head + stored.tobytes())
    media, back = round_trip(tmp_path / "a.au", tmp_path / "b.au")
    np.testing.assert_array_equal(media.data, stored.reshape(10, 2))
    assert_same(media, back)


CSV = [
    ("1\n2.5\n-3e4\n", (3,), None, None, ","),
    ("1,2\n3,4\n2,6", (3, 2), None, None, ","),
    ("1,2\n3,4\n5,6", (3,), None, ("1", "3", "5"), ","),
    ("1,2\n3,4", (2, 2), None, None, ","),
    ("1,2\n3,4\n3,6", (3, 2), None, None, ","),
    ("1,2\nnan,4\n5,6", (3, 2), None, None, ","),
    ("1,2\n3,4\ninf,6", (3, 2), None, None, ","),
    ("depth;x;y\n3.50;1;1\n2;2;2\n-1e1;3;3\n", (3, 2), ("depth", "x", "y"), ("3.50", "2", "-1e1"), ";"),
    ("left;right\n1;2\n3;4\n", (2, 2), ("left", "right"), None, ";"),
    ("x\ty\r\n1\t2\r\n3\t4\r\n\r\n", (2, 2), ("x", "y"), None, "\t"),
    ("t,x\n0.0,1\n0.1,2\n0.2,3\n", (3,), ("t", "x"), ("0.0", "0.1", "0.2"), ","),
    ("Time (s); a ;b\n00:01;1;2\n00:02;3;4\n", (2, 2), ("Time (s)", "a", "b"), ("00:01", "00:02"), ";"),
    ("# time,x\n1,2\n", (1,), ("# time", "x"), ("1",), ","),
    (",x\n0,5\n1,6\n", (2,), ("", "x"), ("0", "1"), ","),
    ("time\n1\n2\n", (2,), ("time",), None, ","),
    ("temperature,x\n1,2\n", (1, 2), ("temperature", "x"), None, ","),
    ('"a,b",c\n1,nan\n', (1, 2), ("a,b", "c"), None, ","),
    ("\ufeffvalue\n1\n", (1,), ("value",), None, ","),
]


@pytest.mark.parametrize(("text", "shape", "header", "time", "delimiter"), CSV)
def test_csv(tmp_path: Path, text: str, shape: Any, header: Any, time: Any, delimiter: str) -> None:
    (tmp_path / "a.csv").write_text(text, encoding="utf-8", newline="")
    media, back = round_trip(tmp_path / "a.csv", tmp_path / "b.csv")
    assert media.data.shape == shape
    assert (media.header, media.time, media.delimiter) == (header, time, delimiter)
    assert (media.channel_axis, media.kind) == (1 if len(shape) == 2 else None, "signal")
    assert_same(media, back)
    assert any("kept as it is" in note for note in media.notes) == (time is not None)


def test_the_first_column_of_a_table(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("depth,x,y\n1,5,1\n2,4,1\n4,6,1\n")
    media = files.read(path)
    assert (media.time, media.columns, media.separate) == (("1", "2", "4"), ("x", "y"), True)
    assert media.notes[0].endswith(
        "column 'depth' is strictly increasing and is kept as it is; give --axes first-column=denoise if it is data"
    )
    assert "steps of column 'depth' are unequal" in media.notes[1]
    data = files.read(path, first_column="denoise")
    assert (data.time, data.columns, data.notes) == (None, ("depth", "x", "y"), ())
    path.write_text("4,1\n3,2\n2,5\n")
    media = files.read(path)
    assert (media.columns, media.separate) == (("column 2",), False)
    assert "column 1 is strictly decreasing and is kept" in media.notes[0]
    path.write_text("5,1\n3,2\n4,5\n")
    assert files.read(path).notes == ()
    assert files.read(path, first_column="keep").time == ("5", "3", "4")
    with pytest.raises(InputError, match="first_column: got 'x'"):
        files.read(path, first_column="x")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("t,x\n0,1\n2,2\n1,3\n3,4\n", r"got '1' in line 4, out of order in column 't' \(1 of 3 steps\)"),
        ("time,x\n3,1\n2,2\n2.5,3\n1,4\n", r"'2\.5' in line 4"),
        ("time,x\n0,1\nnan,2\n2,3\n", "'nan' in line 3"),
        ("date,x\n2024-01-31,1\n2024-03-01,2\n2024-02-01,3\n", "'2024-02-01' in line 4"),
        ("Timestamp,x\n2024-01-31T10:00Z,1\n2024-01-31T09:59Z,2\n2024-01-31T11:00Z,3\n", "line 3"),
        ("depth,x\n" + "".join(f"{k},1\n" for k in (0, 3, 6, 1, 4, 7, 2, 5)), "'1' in line 5.*'depth'"),
    ],
)
def test_rows_out_of_the_order_of_their_times_are_refused(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "a.csv"
    path.write_text(text)
    with pytest.raises(FileFormatError, match=told):
        files.read(path)
    assert files.read(path, first_column="keep").time is not None
    header, *rows = text.splitlines()
    path.write_text("\n".join([header, *sorted(rows)[: 2 if "nan" in text else None]]))
    assert files.read(path).time is not None


def test_equal_times_and_other_first_columns_are_in_order(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("t,x\n0,1\n0,2\n1,3\n")
    assert files.read(path).time == ("0", "0", "1")
    path.write_text("x,y\n" + "".join(f"{k * k % 11},1\n" for k in range(9)))
    assert files.read(path).time is None


def test_one_column_is_data(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("time\n1\n2\n3\n")
    media = files.read(path)
    assert (media.data.tolist(), media.time) == ([1, 2, 3], None)
    assert media.notes == (
        f"{path}: column 'time' is strictly increasing and is denoised all the same, since there is no other",
    )
    with pytest.raises(FileFormatError, match=r"one column, to be kept.*leave first-column=keep out"):
        files.read(path, first_column="keep")


def test_csv_keeps_all_digits(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x,y\n1,2\n3,4\n")
    media = files.read(tmp_path / "a.csv")
    result = np.array([[1 / 3, np.pi], [1e-300, -2e17]])
    files.write(tmp_path / "b.csv", result, media)
    np.testing.assert_array_equal(files.read(tmp_path / "b.csv").data, result)
    assert (tmp_path / "b.csv").read_text().startswith("x,y\n0.3333333333333333,3.14159")


def test_csv_with_unequal_steps(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("t,x\n0,1\n1,2\n5,3\n")
    assert "unequal" in files.read(tmp_path / "a.csv").notes[-1]


# --- conversions that are told, and files that are refused -----------------------------------------------------------


def test_palette(tmp_path: Path) -> None:
    colours = Image.fromarray(samples("u1", (6, 6, 3))).quantize(8)
    expected = np.asarray(colours.convert("RGB"))
    colours.save(tmp_path / "a.png")
    colours.save(tmp_path / "t.png", transparency=0)
    colours.save(tmp_path / "a.tif")
    for name in ("a.png", "t.png", "a.tif"):
        media = files.read(tmp_path / name)
        assert "palette" in media.notes[0]
        assert (media.alpha is not None) == (name == "t.png")
        np.testing.assert_array_equal(media.data, expected)


@pytest.mark.parametrize("name", ["a.png", "a.tif"])
def test_one_bit(tmp_path: Path, name: str) -> None:
    bits = np.arange(35).reshape(5, 7) % 3 == 0
    Image.fromarray(bits).save(tmp_path / name)
    media = files.read(tmp_path / name)
    np.testing.assert_array_equal(media.data, np.where(bits, 255, 0))
    assert media.data.dtype == np.uint8
    assert "1-bit" in media.notes[-1]


@pytest.mark.parametrize("dtype", ["u1", "u2"])
def test_tiff_with_white_as_zero(tmp_path: Path, dtype: str) -> None:
    values = samples(dtype, (5, 7))
    tifffile.imwrite(tmp_path / "a.tif", values, photometric="miniswhite")
    media, back = round_trip(tmp_path / "a.tif", tmp_path / "b.tif")
    np.testing.assert_array_equal(media.data, np.iinfo(dtype).max - values)
    assert "inverted" in media.notes[0]
    assert_same(media, back)


@pytest.mark.parametrize("name", ["a.jpg", "a.tif"])
def test_cmyk(tmp_path: Path, name: str) -> None:
    Image.new("RGB", (8, 8), (250, 120, 10)).convert("CMYK").save(tmp_path / name)
    media = files.read(tmp_path / name)
    assert media.data.shape == (8, 8, 3)
    assert np.abs(media.data[4, 4].astype(int) - (250, 120, 10)).max() < 5
    assert "CMYK" in media.notes[0]
    assert "icc_profile" not in media.extras


@pytest.mark.parametrize(("mode", "key"), [("L", 10), ("RGB", (10, 10, 10))])
def test_transparent_colour(tmp_path: Path, mode: str, key: Any) -> None:
    image = Image.new(mode, (4, 3), 0)
    image.putpixel((1, 2), key)
    image.save(tmp_path / "a.png", transparency=key)
    media, back = round_trip(tmp_path / "a.png", tmp_path / "b.png")
    assert media.alpha is not None
    assert media.alpha[2, 1] == 0
    assert media.alpha.sum() == 11 * 255
    assert "alpha" in media.notes[0]
    assert_same(media, back)


def test_transparent_colour_of_16_bit_grey(tmp_path: Path) -> None:
    Image.fromarray(samples("u2", (3, 4))).save(tmp_path / "a.png", transparency=7)
    media = files.read(tmp_path / "a.png")
    assert media.data.dtype == np.uint16
    assert "dropped" in media.notes[0]


def test_content_that_differs_from_the_name(tmp_path: Path) -> None:
    Image.new("L", (8, 8), 7).save(tmp_path / "a.jpg", format="PNG")
    media = files.read(tmp_path / "a.jpg")
    assert media.format == "png"
    assert "PNG" in media.notes[0]


@pytest.mark.parametrize(("colour", "channels"), [(0, 1), (2, 3), (4, 2), (6, 4)])
def test_png_of_16_bits_keeps_them_and_what_stands_beside(tmp_path: Path, colour: int, channels: int) -> None:
    stored = samples("u2", (5, 7, channels))
    write_png(tmp_path / "a.png", stored, colour)
    beside = png_chunk(b"pHYs", struct.pack(">IIB", 11811, 11811, 1)) + png_chunk(b"tEXt", b"Title\0words")
    content = (tmp_path / "a.png").read_bytes()
    (tmp_path / "a.png").write_bytes(
        content[:33] + beside + png_chunk(b"iCCP", b"i\0\0" + zlib.compress(b"abc")) + content[33:]
    )
    media, back = round_trip(tmp_path / "a.png", tmp_path / "b.png")
    whole = media.data if media.alpha is None else np.dstack([media.data, media.alpha])
    np.testing.assert_array_equal(whole.reshape(stored.shape), stored)
    assert_same(media, back)
    assert (media.extras, media.extras["text"]) == (back.extras, {"Title": "words"})
    (tmp_path / "a.png").write_bytes(content[:-30])
    with pytest.raises(FileFormatError, match="damaged or foreign file"):
        files.read(tmp_path / "a.png")


@pytest.mark.parametrize("compression", ["lzw", "zstd", "lzma"])
@pytest.mark.parametrize("dtype", ["u1", "u2"])
def test_compressed_tiff_keeps_all_bits(tmp_path: Path, compression: str, dtype: str) -> None:
    values = samples(dtype, (16, 24, 3))
    tifffile.imwrite(tmp_path / "a.tif", values, photometric="rgb", compression=compression)
    np.testing.assert_array_equal(files.read(tmp_path / "a.tif").data, values)


@pytest.mark.parametrize("options", [{}, {"rowsperstrip": 8}, {"tile": (16, 16)}, {"planarconfig": "separate"}])
def test_tiff_of_jpeg_parts(tmp_path: Path, options: dict[str, Any]) -> None:
    values = (np.indices((601, 503, 3))[1] // 2).astype("u1")
    separate = "planarconfig" in options
    tifffile.imwrite(
        tmp_path / "a.tif", np.moveaxis(values, -1, 0) if separate else values, photometric="rgb", compression="jpeg",
        compressionargs={"level": 95}, **options,
    )  # fmt: skip
    data = files.read(tmp_path / "a.tif").data
    assert np.abs(data.astype(int) - values).max() <= 12


def test_tiff_parts_that_unfold_to_more_than_their_place_are_refused(tmp_path: Path) -> None:
    """Their decoders would take the memory that the part asks for, whatever the header of the file says."""
    path = tmp_path / "a.tif"
    tifffile.imwrite(path, samples("u1", (16, 24, 3)), photometric="rgb", compression="jpeg")
    whole = path.read_bytes()
    frame = struct.pack(">HH", 16, 24)
    assert whole.count(b"\x08" + frame) == 1
    path.write_bytes(whole.replace(b"\x08" + frame, b"\x08" + struct.pack(">HH", 60000, 60000)))
    with pytest.raises(FileFormatError, match="a JPEG part of 3600000000 pixels in the place of 384"):
        files.read(path)
    for compression in ("lerc", "jpeg2000", "webp", "jpegxl"):
        tifffile.imwrite(path, samples("u1", (16, 24, 3)), photometric="rgb", compression=compression)
        with pytest.raises(FileFormatError, match=r"got compression .*save it uncompressed, or with LZW"):
            files.read(path)


def release(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)))


def test_tiff_of_faxes(tmp_path: Path) -> None:
    bits = np.arange(16 * 24).reshape(16, 24) % 5 == 0
    for compression in ("group3", "group4"):
        Image.fromarray(bits).save(tmp_path / "a.tif", compression=compression)
        if release(tifffile.__version__) < (2026, 3, 3):
            with pytest.raises(FileFormatError, match=r"CCITT_T\d: \d> not supported.*export it again"):
                files.read(tmp_path / "a.tif")
            continue
        np.testing.assert_array_equal(files.read(tmp_path / "a.tif").data, np.where(bits, 255, 0))


@pytest.mark.parametrize("compression", [None, "tiff_lzw", "jpeg"])
def test_tiff_in_other_colours(tmp_path: Path, compression: str | None) -> None:
    """What tifffile decodes and Pillow turns into RGB is what Pillow alone makes of the file."""
    ramp = Image.fromarray(np.indices((16, 24, 3))[1].astype("u1") * 4)
    for mode in ("CMYK", "YCbCr"):
        ramp.convert(mode).save(tmp_path / "a.tif", compression=compression)
        media = files.read(tmp_path / "a.tif")
        assert np.abs(media.data.astype(int) - np.asarray(ramp)).max() <= (12 if compression == "jpeg" else 2)
        if release(PIL.__version__) < (13,) and (mode, compression) == ("YCbCr", None):
            continue  # which Pillow itself writes, but does not read
        with Image.open(tmp_path / "a.tif") as image:
            np.testing.assert_array_equal(media.data, np.asarray(image.convert("RGB")))


def test_tiff_that_would_lose_bits_is_refused(tmp_path: Path) -> None:
    for photometric, count in (("separated", 4), ("cielab", 3)):
        values = samples("u2", (5, 7, count))
        tifffile.imwrite(tmp_path / "a.tif", values, photometric=photometric, planarconfig="contig")
        with pytest.raises(FileFormatError, match=rf"got uint16 samples, {count} a pixel.*as grey or RGB"):
            files.read(tmp_path / "a.tif")


def test_several_images_in_a_file(tmp_path: Path) -> None:
    frames = [Image.new("L", (8, 8), shade) for shade in (1, 2, 3)]
    frames[0].save(tmp_path / "a.png", save_all=True, append_images=frames[1:])
    with pytest.raises(FileFormatError, match=r"got 3 frames.*one by one"):
        files.read(tmp_path / "a.png")


def test_multi_picture_photographs_give_the_first(tmp_path: Path) -> None:
    pictures = [Image.new("RGB", (16, 16), (shade, 0, 0)) for shade in (200, 20)]
    pictures[0].save(tmp_path / "a.jpg", format="MPO", save_all=True, append_images=pictures[1:])
    media = files.read(tmp_path / "a.jpg")
    assert media.data[8, 8, 0] > 190
    assert "first of 2" in media.notes[0]
