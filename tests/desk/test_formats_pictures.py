"""Pictures that newcomers have: BMP, WebP, GIF, AVIF, camera raws, and files that are not what their names say."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, features

from nlflow.desk import files
from nlflow.desk.formats.content import FOREIGN, HEAD, by_content
from nlflow.errors import FileFormatError
from tests.desk.test_files import samples
from validation.robustness.fuzz import files as made
from validation.robustness.fuzz import seeds

GREY, RGB, ALPHA = samples("u1", (9, 11)), samples("u1", (9, 11, 3)), samples("u1", (9, 11))
EXIF = Image.Exif()
EXIF[0x0112] = 6
EXIF[0x010E] = "words"


def needs(form: str) -> None:
    if not features.check(form):
        pytest.skip(f"this Pillow is built without {form}")


# --- what is read and written ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("data", [GREY, RGB], ids=["grey", "colours"])
def test_bmp(tmp_path: Path, data: Any) -> None:
    Image.fromarray(data).save(tmp_path / "a.bmp", dpi=(300, 300))
    media = files.read(tmp_path / "a.bmp")
    np.testing.assert_array_equal(media.data, data)
    assert media.notes == ()
    assert files.check_output(tmp_path / "b.bmp", media) == ()
    files.write(tmp_path / "b.bmp", media.data, media)
    assert (tmp_path / "b.bmp").read_bytes() == (tmp_path / "a.bmp").read_bytes()


@pytest.mark.parametrize("text", [False, True])
@pytest.mark.parametrize(("most", "shape"), [(255, (5, 7)), (200, (5, 7, 3)), (4095, (5, 7)), (65535, (5, 7, 3))])
def test_netpbm_comes_back_as_it_was(tmp_path: Path, most: int, shape: tuple[int, ...], text: bool) -> None:
    path, out = tmp_path / "a.pnm", tmp_path / "b.pnm"
    values = np.random.default_rng(0).integers(0, most + 1, shape).astype("u1" if most < 256 else ">u2")
    body = (" ".join(map(str, values.ravel())) + "\n").encode() if text else values.tobytes()
    path.write_bytes(b"P%d\n# words\n7 5\n%d\n" % ((2 if text else 5) + len(shape) - 2, most) + body)
    media = files.read(path)
    np.testing.assert_array_equal(media.data, values)
    assert files.check_output(out, media) == ()
    files.write(out, media.data.astype(float) + (values == most), media)  # no value is beyond the largest
    assert b"\n".join(out.read_bytes().split()) == b"\n".join(path.read_bytes().split())
    with Image.open(out) as image:
        assert image.size == (7, 5)


@pytest.mark.parametrize("content", [b"P1\n# words\n3 2\n101\n0 1 0\n", b"P4\n3 2\n\xa0\x40"])
def test_bits_become_grey(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.pbm").write_bytes(content)
    np.testing.assert_array_equal(files.read(tmp_path / "a.pbm").data, [[0, 255, 0], [255, 0, 255]])


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"P5\n3 2\n255\n123", "tells of 6 bytes"), (b"P5\n3 2\n0\n123456", "no largest value"), (b"P5 3", "no header"),
     (b"P2\n2 2\n9\n1 2 3", "3 of 4 samples"), (b"P2\n2 2\n9\n1 2 3 12", "values from 1 to 12"),
     (b"P2\n1 1\n9\n-1", "values from -1"), (b"P5\n0 0\n255\n", "empty"), (b"P5\n40000 9000\n255\n1", "declares")],
)  # fmt: skip
def test_damaged_netpbm(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "a.pnm").write_bytes(content)
    with pytest.raises(FileFormatError, match=words):
        files.read(tmp_path / "a.pnm")


def test_palettes_become_rgb(tmp_path: Path) -> None:
    image = Image.fromarray(RGB).quantize(17)
    for name in ("a.bmp", "a.gif"):
        image.save(tmp_path / name)
        media = files.read(tmp_path / name)
        np.testing.assert_array_equal(media.data, np.asarray(image.convert("RGB")))
        assert media.notes == (f"{tmp_path / name}: palette colours converted to RGB",)


def test_webp_keeps_everything(tmp_path: Path) -> None:
    needs("webp")
    whole = np.dstack([RGB, ALPHA])
    path, out = tmp_path / "a.webp", tmp_path / "b.webp"
    Image.fromarray(whole).save(path, lossless=True, exact=True, exif=EXIF, icc_profile=b"profile", xmp=b"<x:xmpmeta/>")
    media = files.read(path)
    np.testing.assert_array_equal(np.dstack([media.data, media.alpha]), whole)
    assert (media.orientation, media.extras["icc_profile"]) == (6, b"profile")
    assert files.check_output(out, media) == ()
    files.write(out, 255 - media.data, media)
    with Image.open(out) as image:
        seen = np.where(ALPHA[..., np.newaxis] == 0, RGB, 255 - RGB)  # what is transparent is never changed
        np.testing.assert_array_equal(np.asarray(image), np.dstack([seen, ALPHA]))
        assert image.info["icc_profile"] == b"profile"
        assert image.info["xmp"] == b"<x:xmpmeta/>"
        assert dict(image.getexif()) == dict(EXIF)


@pytest.mark.parametrize("opaque", [True, False])
def test_grey_as_webp(tmp_path: Path, opaque: bool) -> None:
    needs("webp")
    media = files.Media(tmp_path / "a.png", "png", "image", GREY, alpha=None if opaque else ALPHA)
    out = tmp_path / "b.webp"
    assert files.check_output(out, media) == (f"{out}: grey levels are written as RGB, since WebP has no grey",)
    files.write(out, GREY, media)
    again = files.read(out)
    np.testing.assert_array_equal(again.data, GREY)
    assert again.notes == (f"{out}: its three channels are equal, and are read as grey",)
    with Image.open(out) as image:
        np.testing.assert_array_equal(np.asarray(image.convert("RGB")), np.dstack([GREY] * 3))
    assert opaque or np.array_equal(again.alpha, ALPHA)


@pytest.mark.parametrize("form", ["gif", "webp", "avif"])
def test_the_first_of_several_frames(tmp_path: Path, form: str) -> None:
    if form != "gif":
        needs(form)
    path = tmp_path / f"a.{form}"
    options: dict[str, Any] = {"webp": {"lossless": True}}.get(form, {})
    Image.fromarray(GREY).save(path, save_all=True, append_images=[Image.fromarray(255 - GREY)], **options)
    media = files.read(path)
    assert media.notes[0] == f"{path}: the first of 2 frames is read"
    colours = media.data.astype(int) - (GREY if media.data.ndim == 2 else GREY[..., np.newaxis])
    assert np.abs(colours).mean() < (1 if form != "avif" else 30)  # AVIF loses; the other frame is 85 away on average


def test_avif(tmp_path: Path) -> None:
    needs("avif")
    path = tmp_path / "a.avif"
    Image.fromarray(np.dstack([RGB, ALPHA])).save(path, exif=EXIF, icc_profile=b"profile")
    with Image.open(path) as image:
        expected = np.asarray(image)
    media = files.read(path)
    np.testing.assert_array_equal(np.dstack([media.data, media.alpha]), expected)
    content = bytearray(path.read_bytes())
    content[content.index(b"av1C") + 6] |= 0x40  # more than 8 bits
    path.write_bytes(content)
    with pytest.raises(FileFormatError, match=r"AVIF picture of more than 8 bits, of which 8 would be read.*avifdec"):
        files.read(path)


def test_avif_without_its_decoder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.avif").write_bytes(b"\0\0\0\x1cftypavif" + bytes(40))
    monkeypatch.setenv("NLFLOW_DECODE", "here")
    monkeypatch.setattr(features, "check", lambda name: False)
    with pytest.raises(FileFormatError, match=r"Pillow 11\.3 or newer.*pip install --upgrade pillow"):
        files.read(tmp_path / "a.avif")


# --- camera raws -----------------------------------------------------------------------------------------------------


def _srgb(linear: float) -> float:
    """The curve that LibRaw has for sRGB by default: that of Rec. 709."""
    return 4.5 * linear if linear < 0.018 else 1.099 * linear**0.45 - 0.099


@pytest.mark.parametrize("turn", [1, 6])
def test_a_camera_raw_of_known_colours(tmp_path: Path, turn: int) -> None:
    pytest.importorskip("rawpy")
    levels = (0.2, 0.4, 0.1)  # of red, green, blue
    mosaic = np.empty((40, 60))
    mosaic[::2, ::2], mosaic[1::2, 1::2] = levels[0], levels[2]
    mosaic[::2, 1::2] = mosaic[1::2, ::2] = levels[1]
    path = tmp_path / "a.dng"
    path.write_bytes(made.dng(np.rint(65535 * mosaic).astype(np.uint16), orientation=turn))
    media = files.read(path)
    assert (media.format, media.data.dtype, media.orientation) == ("raw", np.uint16, 1)
    assert media.data.shape == ((40, 60, 3) if turn == 1 else (60, 40, 3))  # it is turned upright
    found = media.data[20, 20] / 65535
    # 16 bits on the way in and out, the gamma by table, colours by a matrix of three products.
    np.testing.assert_allclose(found, [_srgb(level) for level in levels], atol=1e-3)
    assert "developed with the camera's white balance to 16-bit sRGB" in media.notes[0]
    files.write(tmp_path / "b.tif", media.data, media)
    np.testing.assert_array_equal(files.read(tmp_path / "b.tif").data, media.data)
    path.rename(tmp_path / "a.tif")  # a camera raw is no picture, whatever it is called
    assert files.read(tmp_path / "a.tif").format == "raw"


def test_a_camera_raw_that_is_cut(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("rawpy")
    path = tmp_path / "a.dng"
    path.write_bytes(made.raw()[0][:-100])
    with pytest.raises(FileFormatError, match="LibRaw says: Input/output error"):
        files.read(path)
    capfd.readouterr()  # LibRaw prints


def test_rawpy_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.nef").write_bytes(b"II*\0" + bytes(100))
    monkeypatch.setenv("NLFLOW_DECODE", "here")
    monkeypatch.setitem(sys.modules, "rawpy", None)
    with pytest.raises(FileFormatError, match=r"rawpy, which is not installed.*nlflow\[raw\].*darktable-cli .*a\.tif"):
        files.read(tmp_path / "a.nef")


# --- what a file is --------------------------------------------------------------------------------------------------

_FTYP = b"\0\0\0\x20ftyp"


def _tiff(*tags: tuple[int, int]) -> bytes:
    entries = b"".join(tag.to_bytes(2, "little") + b"\4\0\1\0\0\0" + value.to_bytes(4, "little") for tag, value in tags)
    return b"II*\0\x08\0\0\0" + len(tags).to_bytes(2, "little") + entries + bytes(4)


@pytest.mark.parametrize(
    ("head", "extension"),
    [
        (seeds.png()[0], ".png"), (seeds.jpeg()[0], ".jpg"), (seeds.tiff()[0], ".tif"), (seeds.npy()[0], ".npy"),
        (seeds.wav()[0], ".wav"), (seeds.nifti()[0], ".nii"), (made.bmp()[1], ".bmp"), (made.gif()[0], ".gif"),
        (made.npz()[1], ".npz"), (made.mat()[0], ".mat"), (made.raw()[0], ".dng"),
        (_tiff((254, 1), (271, 0), (330, 0)), ".nef"), (_tiff((254, 0), (271, 0), (330, 0)), ".tif"),
        (b"II*\0\x10\0\0\0CR\2\0" + bytes(50), ".cr2"), (_FTYP + b"crx \0\0\0\1", ".cr3"),
        (b"\x89HDF\r\n\x1a\n", ".h5"), (b"RIFF\0\0\0\0WEBPVP8L", ".webp"), (b"RIFF\0\0\0\0AVI LIST", ".avi"),
        (_FTYP + b"avif\0\0\0\0", ".avif"), (_FTYP + b"mif1\0\0\0\0avif", ".avif"),
        (_FTYP + b"heic\0\0\0\0mif1", ".heic"), (_FTYP + b"isom\0\0\2\0", ".mp4"), (b"\x1a\x45\xdf\xa3\x01", ".mkv"),
        (b"%PDF-1.7", ".pdf"), (b"8BPS\0\1", ".psd"), (bytes(128) + b"DICM", ".dcm"), (b"SIMPLE  =   T", ".fits"),
        (b"\xff\x0a\0", ".jxl"), (b"\0\0\0\x0cjP  \r\n", ".jp2"), (b"P6\n9 9\n255\n", ".ppm"),
        (b"P4 9 9\n", ".pbm"), (b"PAR1", ".parquet"), (b".snd\0\0\0\x18", ".au"), (b"P7\nWIDTH 9\n", ".pam"),
        (b'<?xml version="1.0"?>\n<svg xmlns="">', ".svg"), (b"\xef\xbb\xbf<!DOCTYPE html><p>", ".html"),
        (b"time,value\n0,1.5\n1,-2e-3\n2,nan\n", ".csv"), (b"P1\tP2\n1\t2\n", ".csv"), (b"1,2\n3,", ".csv"),
        (b"word;word\nword;word\n", ""), (b"BM, a text", ""), (b"", ""), (b"no image\n" * 20, ""),
        (b"\x1f\x8b\x08 no gzip", ""), (b"RIFF\0\0\0\0RMID", ""), (b"PK\3\4", ".zip"),
    ],
)  # fmt: skip
def test_by_content(head: bytes, extension: str) -> None:
    assert by_content(head[:HEAD]) == extension


def test_every_seed_is_what_it_is() -> None:
    for name, extension in (("bmp", ".bmp"), ("gif", ".gif"), ("webp", ".webp"), ("avif", ".avif"), ("npz", ".npz")):
        assert {by_content(content[:HEAD]) for content in getattr(made, name)()} == {extension}


@pytest.mark.parametrize("name", ["a.jpg", "a.heic", "a.npy", "a.csv", "a", "a.dat", "a.nii", "a.gif", "a.h5"])
def test_content_decides_and_not_the_name(tmp_path: Path, name: str) -> None:
    Image.fromarray(RGB).save(tmp_path / "real.png")
    (tmp_path / "real.png").rename(tmp_path / name)
    media = files.read(tmp_path / name)
    np.testing.assert_array_equal(media.data, RGB)
    assert media.notes == (f"{tmp_path / name}: the content is PNG, whatever its name says",)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (_FTYP + b"heic\0\0\0\0", "a HEIC picture.*heif-convert"),
        (b"%PDF-1.4\n", "a PDF document.*pdftoppm -r 300 -png"),
        (b"<svg xmlns=''/>", "an SVG drawing.*rsvg-convert"),
        (bytes(128) + b"DICM", "a DICOM file.*dcm2niix"),
        (b"SIMPLE  =                    T", "a FITS file.*astropy"),
        (b"8BPS\0\1", r"a Photoshop document.*export it as \.png or \.tif"),
        (b"\xff\x0a\0\0", "a JPEG XL picture.*djxl"),
        (b"\0\0\0\x0cjP  \r\n\x87\n", "a JPEG 2000 picture.*opj_decompress"),
        (b"fLaC\0", "compressed sound.*ffmpeg"),
        (b"<html>Not found</html>", "a web page.*Save Image As"),
    ],
)
def test_what_is_not_read_names_a_way(tmp_path: Path, content: bytes, words: str) -> None:
    for name in ("a.png", "a", "a.tif"):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(FileFormatError, match=words):
            files.read(tmp_path / name)


@pytest.mark.parametrize("extension", [*FOREIGN, ".heif", ".fit", ".HEIC"])
def test_names_of_what_is_not_read(tmp_path: Path, extension: str) -> None:
    """A name alone tells enough."""
    got, way = FOREIGN[{".heif": ".heic", ".fit": ".fits"}.get(extension.lower(), extension.lower())]
    (tmp_path / f"a{extension}").touch()
    with pytest.raises(FileFormatError) as caught:
        files.read(tmp_path / f"a{extension}")
    assert f"got {got}, expected one of .png, .jpg" in str(caught.value)
    assert str(caught.value).endswith(way.format(name=tmp_path / f"a{extension}", stem="a"))
    assert "rename" not in str(caught.value)
    media = files.Media(tmp_path / "a.png", "png", "image", GREY)
    with pytest.raises(
        FileFormatError, match=rf"the extension '{extension}', expected one of \.png.*choose one of them"
    ):
        files.check_output(tmp_path / f"b{extension}", media)
