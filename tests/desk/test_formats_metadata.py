"""What comes with the samples: kept where the format has a place for it, told where it has not."""

from __future__ import annotations

import io
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
from PIL import Image, ImageCms, PngImagePlugin, TiffImagePlugin
from scipy.io import wavfile

from nlflow.desk import files

RNG = np.random.default_rng(3)
COLOURS = RNG.integers(0, 256, (10, 20, 3), dtype=np.uint8)
PROFILE = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
XMP = b"<x:xmpmeta xmlns:x='adobe:ns:meta/'>caf\xc3\xa9</x:xmpmeta>"


def exif(turn: int = 1) -> Image.Exif:
    block = Image.Exif()
    block[0x0112], block[0x010F] = turn, "maker"
    return block


def passed(path: Path, out: Path) -> tuple[files.Media, tuple[str, ...]]:
    """Write what is read, and return it with the notes of what is left out."""
    media = files.read(path)
    notes = files.check_output(out, media)
    files.write(out, media.data.astype(np.float64), media)
    return media, notes


def seen(path: Path) -> np.ndarray[Any, Any]:
    """Return a picture as a viewer shows it."""
    from PIL import ImageOps

    with path.open("rb") as stream, Image.open(stream) as image:
        image.load()
        return np.asarray(ImageOps.exif_transpose(image))


# --- orientation -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("turn", range(1, 9))
def test_orientation_is_neither_applied_nor_lost(tmp_path: Path, turn: int) -> None:
    Image.fromarray(COLOURS).save(tmp_path / "a.png", exif=exif(turn))
    Image.fromarray(COLOURS).save(tmp_path / "a.jpg", exif=exif(turn), quality=100, subsampling=0)
    tifffile.imwrite(tmp_path / "a.tif", COLOURS, photometric="rgb", extratags=[(274, "H", 1, turn, True)])
    Image.fromarray(COLOURS).save(tmp_path / "lzw.tif", compression="tiff_lzw", exif=exif(turn))  # decoded by Pillow
    for source in ("a.png", "a.jpg", "a.tif", "lzw.tif"):
        looks = seen(tmp_path / source)
        for form in ("png", "tif", "jpg"):
            out = tmp_path / f"out-{source}.{form}"
            media, _ = passed(tmp_path / source, out)
            assert media.orientation == turn
            assert media.data.shape == COLOURS.shape
            if source != "a.jpg":
                np.testing.assert_array_equal(media.data, COLOURS)
            np.testing.assert_array_equal(files.upright(media.data, turn), looks)
            np.testing.assert_array_equal(files.as_stored(looks, turn), media.data)
            assert files.read(out).orientation == turn
            if form != "jpg":
                np.testing.assert_array_equal(seen(out), looks)
            else:
                assert seen(out).shape == looks.shape


def test_orientation_of_alpha_and_palettes(tmp_path: Path) -> None:
    alpha = RNG.integers(0, 256, (10, 20), dtype=np.uint8)
    Image.fromarray(np.dstack([COLOURS, alpha])).save(tmp_path / "a.tif", compression="tiff_lzw", exif=exif(6))
    media, _ = passed(tmp_path / "a.tif", tmp_path / "b.tif")
    np.testing.assert_array_equal(media.alpha, alpha)
    np.testing.assert_array_equal(media.data, COLOURS)
    np.testing.assert_array_equal(files.read(tmp_path / "b.tif").alpha, alpha)
    Image.fromarray(COLOURS[..., 0]).convert("P").save(tmp_path / "p.tif", exif=exif(6))
    np.testing.assert_array_equal(files.read(tmp_path / "p.tif").data[..., 0], COLOURS[..., 0])


def test_an_array_has_no_orientation(tmp_path: Path) -> None:
    Image.fromarray(COLOURS).save(tmp_path / "a.png", exif=exif(6))
    _, notes = passed(tmp_path / "a.png", tmp_path / "a.npy")
    assert notes == (f"{tmp_path / 'a.npy'}: the orientation (EXIF 6) and the EXIF block are left out",)


@pytest.mark.parametrize("turn", [0, 9, 65535])
def test_orientations_that_are_none(tmp_path: Path, turn: int) -> None:
    block = Image.Exif()
    block[0x0112] = turn
    Image.fromarray(COLOURS).save(tmp_path / "a.png", exif=block)
    assert files.read(tmp_path / "a.png").orientation == 1


# --- pictures --------------------------------------------------------------------------------------------------------


def test_photographs_keep_their_metadata(tmp_path: Path) -> None:
    Image.fromarray(COLOURS).save(
        tmp_path / "a.jpg", exif=exif(6), icc_profile=PROFILE, dpi=(300, 240), xmp=XMP, comment=b"by hand"
    )
    media, notes = passed(tmp_path / "a.jpg", tmp_path / "b.jpg")
    assert media.notes == notes == ()
    with Image.open(tmp_path / "b.jpg") as image:
        assert image.size == (20, 10)
        assert dict(image.getexif()) == dict(exif(6))
        assert image.info["icc_profile"] == PROFILE
        assert image.info["dpi"] == pytest.approx((300, 240))
        assert image.info["xmp"] == XMP
        assert image.info["comment"] == b"by hand"
    _, notes = passed(tmp_path / "a.jpg", tmp_path / "c.png")
    assert notes == (f"{tmp_path / 'c.png'}: the comment is left out",)
    with Image.open(tmp_path / "c.png") as image:
        assert dict(image.getexif()) == dict(exif(6))
        assert image.info["icc_profile"] == PROFILE
        assert image.info["dpi"] == pytest.approx((300, 240), abs=0.02)
        assert image.info["xmp"] == XMP
    _, notes = passed(tmp_path / "a.jpg", tmp_path / "c.tif")
    assert notes == (f"{tmp_path / 'c.tif'}: the EXIF block and the comment are left out",)
    with tifffile.TiffFile(tmp_path / "c.tif") as tif:
        tags = tif.pages[0].tags
        assert tags["InterColorProfile"].value == PROFILE
        assert (tags["XResolution"].value, tags["YResolution"].value) == ((300, 1), (240, 1))
        assert tags["Orientation"].value == 6
        assert tags["XMP"].value == XMP


def test_png_keeps_texts_gamma_and_resolution(tmp_path: Path) -> None:
    chunks = PngImagePlugin.PngInfo()
    chunks.add_text("Title", "noise")
    chunks.add_itxt("Author", "Zoë 雑", lang="de")
    chunks.add_itxt("XML:com.adobe.xmp", XMP.decode())
    chunks.add(b"gAMA", (100000).to_bytes(4, "big"))
    path = tmp_path / "a.png"
    Image.fromarray(COLOURS).save(path, pnginfo=chunks, dpi=(72, 72), icc_profile=PROFILE, exif=exif())
    _, notes = passed(path, tmp_path / "b.png")
    assert notes == ()
    with Image.open(path) as before, Image.open(tmp_path / "b.png") as after:
        assert (tmp_path / "b.png").read_bytes().count(b"XML:com.adobe.xmp") == 1
        assert {**before.text, **before.info} == {**after.text, **after.info}  # type: ignore[attr-defined]
    _, notes = passed(path, tmp_path / "b.jpg")
    assert notes == (f"{tmp_path / 'b.jpg'}: the gamma of the display and the texts are left out",)


def test_usual_gamma_is_no_loss(tmp_path: Path) -> None:
    chunks = PngImagePlugin.PngInfo()
    chunks.add(b"gAMA", (45455).to_bytes(4, "big"))
    Image.fromarray(COLOURS).save(tmp_path / "a.png", pnginfo=chunks)
    assert passed(tmp_path / "a.png", tmp_path / "a.tif")[1] == ()


def test_exif_too_long_for_jpeg(tmp_path: Path) -> None:
    block = exif(6).tobytes() + bytes(70000)
    Image.new("L", (8, 9)).save(tmp_path / "a.png", exif=block)
    media, notes = passed(tmp_path / "a.png", tmp_path / "b.jpg")
    assert len(media.extras["exif"]) > 65533
    assert notes == (f"{tmp_path / 'b.jpg'}: the EXIF block, which is too long for JPEG, is left out",)
    back = files.read(tmp_path / "b.jpg")
    assert back.data.shape == (9, 8)
    assert back.orientation == 6


def test_exif_in_the_text_of_a_png(tmp_path: Path) -> None:
    block = exif(3).tobytes()
    chunks = PngImagePlugin.PngInfo()
    chunks.add_text("Raw profile type exif", f"\nexif\n{len(block):8}\n{block.hex()}\n")
    Image.fromarray(COLOURS).save(tmp_path / "a.png", pnginfo=chunks)
    media, _ = passed(tmp_path / "a.png", tmp_path / "b.jpg")
    assert media.orientation == 3
    with Image.open(tmp_path / "b.jpg") as image:
        assert image.getexif()[0x010F] == "maker"


def test_profile_of_colours_that_are_converted(tmp_path: Path) -> None:
    Image.fromarray(COLOURS).convert("CMYK").save(tmp_path / "a.jpg", icc_profile=PROFILE)
    Image.fromarray(COLOURS).convert("CMYK").save(tmp_path / "a.tif", icc_profile=PROFILE)
    Image.fromarray(COLOURS).quantize(8).save(tmp_path / "p.png", icc_profile=PROFILE)
    for name in ("a.jpg", "a.tif"):
        media = files.read(tmp_path / name)
        assert "icc_profile" not in media.extras
        assert any("colour profile" in note and "left out" in note for note in media.notes)
    assert files.read(tmp_path / "p.png").extras["icc_profile"] == PROFILE


def test_iptc_is_told(tmp_path: Path) -> None:
    Image.fromarray(COLOURS).save(tmp_path / "a.jpg")
    content = (tmp_path / "a.jpg").read_bytes()
    block = b"Photoshop 3.0\0" + b"8BIM" + (0x0404).to_bytes(2, "big") + b"\0\0" + (4).to_bytes(4, "big") + b"iptc"
    segment = b"\xff\xed" + (len(block) + 2).to_bytes(2, "big") + block
    (tmp_path / "a.jpg").write_bytes(content[:2] + segment + content[2:])
    assert files.read(tmp_path / "a.jpg").notes == (f"{tmp_path / 'a.jpg'}: the IPTC block is left out",)


# --- TIFF ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["u1", "u2", "f4"])
def test_tiff_keeps_its_tags(tmp_path: Path, dtype: str) -> None:
    place = (1000.0, 2000.0, 0.0)
    tifffile.imwrite(
        tmp_path / "a.tif",
        COLOURS[..., 0].astype(dtype),
        resolution=((118110, 1000), (59055, 1000)),
        resolutionunit="CENTIMETER",
        description="section é 7".encode(),
        datetime="2024:01:02 03:04:05",
        iccprofile=PROFILE,
        metadata=None,
        extratags=[
            (33432, "s", 0, "CC0", True),
            (33550, "d", 3, place, True),
            (42113, "s", 0, "-9999", True),
            (700, "B", len(XMP), XMP, True),
        ],
    )
    media, notes = passed(tmp_path / "a.tif", tmp_path / "b.tif")
    assert media.notes == notes == ()
    with tifffile.TiffFile(tmp_path / "a.tif") as before, tifffile.TiffFile(tmp_path / "b.tif") as after:
        old, new = before.pages[0].tags, after.pages[0].tags
        for name in ("XResolution", "YResolution", "ResolutionUnit", "DateTime", "InterColorProfile", "Copyright"):
            assert new[name].value == old[name].value, name
        assert new["ImageDescription"].value == "section é 7"
        assert new[33550].value == place
        assert new[42113].value == "-9999"
        assert new[700].value == XMP
    assert media.extras["dpi"] == pytest.approx((300, 150), rel=1e-4)
    if dtype != "f4":
        _, notes = passed(tmp_path / "a.tif", tmp_path / "b.png")
        assert notes == (f"{tmp_path / 'b.png'}: the description and other tags are left out",)
        with Image.open(tmp_path / "b.png") as image:
            assert image.info["dpi"] == pytest.approx((300, 150), rel=1e-3)


@pytest.mark.parametrize(
    ("words", "note"), [({"imagej": True}, "description"), ({"ome": True}, "description"), ({}, "")]
)
def test_descriptions_of_the_layout_are_not_kept(tmp_path: Path, words: dict[str, bool], note: str) -> None:
    tifffile.imwrite(tmp_path / "a.tif", COLOURS[..., 0], photometric="minisblack", **words)
    media, _ = passed(tmp_path / "a.tif", tmp_path / "b.tif")
    assert any(note in text for text in media.notes) if note else media.notes == ()
    with tifffile.TiffFile(tmp_path / "b.tif") as tif:
        assert "ImageDescription" not in tif.pages[0].tags
    np.testing.assert_array_equal(files.read(tmp_path / "b.tif").data, COLOURS[..., 0])


def test_tiff_blocks_that_are_left_out(tmp_path: Path) -> None:
    tags = TiffImagePlugin.ImageFileDirectory_v2()
    tags[0x010F], tags[0x8769], tags[0x8825] = "maker", {0x829A: 0.01}, {1: "N"}
    Image.fromarray(COLOURS).save(tmp_path / "a.tif", tiffinfo=tags)
    media = files.read(tmp_path / "a.tif")
    assert media.notes == (f"{tmp_path / 'a.tif'}: the EXIF and GPS blocks are left out",)
    passed(tmp_path / "a.tif", tmp_path / "b.tif")
    with tifffile.TiffFile(tmp_path / "b.tif") as tif:
        assert tif.pages[0].tags["Make"].value == "maker"


@pytest.mark.parametrize("value", [(0, 1), (1, 0)])
def test_resolutions_that_are_none(tmp_path: Path, value: tuple[int, int]) -> None:
    tifffile.imwrite(tmp_path / "a.tif", COLOURS[..., 0], metadata=None, resolution=((7, 3), (7, 3)), resolutionunit=2)
    content = (tmp_path / "a.tif").read_bytes()
    broken = b"".join(part.to_bytes(4, "little") for part in value)
    (tmp_path / "a.tif").write_bytes(content.replace((7).to_bytes(4, "little") + (3).to_bytes(4, "little"), broken))
    media, _ = passed(tmp_path / "a.tif", tmp_path / "b.tif")
    assert "resolution" not in media.extras


# --- sound -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("channels", [1, 2])
def test_wav_of_24_bits(tmp_path: Path, channels: int) -> None:
    levels = np.array([-(2**23), 2**23 - 1, 0, 1, -1, 0x030201, -7, 77], "<i4")
    stored = levels.view(np.uint8).reshape(-1, 4)[:, :3].tobytes()
    with wave.open(str(tmp_path / "a.wav"), "wb") as sound:
        sound.setparams((channels, 3, 11025, 0, "NONE", ""))
        sound.writeframes(stored)
    media, notes = passed(tmp_path / "a.wav", tmp_path / "b.wav")
    assert media.data.dtype == np.int32
    np.testing.assert_array_equal(media.data.ravel(), levels * 256)
    assert "24-bit samples are held as 32-bit ones" in media.notes[0]
    assert notes == ()
    with wave.open(str(tmp_path / "b.wav"), "rb") as sound:
        assert sound.getparams()[:4] == (channels, 3, 11025, len(levels) // channels)
        assert sound.readframes(99) == stored
    files.write(tmp_path / "c.wav", np.full(media.data.shape, 2.0**31 - 1), media)  # rounds up past the largest
    with wave.open(str(tmp_path / "c.wav"), "rb") as sound:
        assert sound.readframes(1)[:3] == b"\xff\xff\x7f"
    files.write(tmp_path / "d.wav", np.full(media.data.shape, 255.0), media)
    with wave.open(str(tmp_path / "d.wav"), "rb") as sound:
        assert sound.readframes(1)[:3] == b"\x01\x00\x00", "rounded, not cut off"


@pytest.mark.parametrize("low", [0, 5], ids=["24 bits used", "32 bits used"])
def test_wav_of_24_bits_in_32(tmp_path: Path, low: int) -> None:
    """The bits below the 24 that the header names are fill by the format; where a file uses them, they are kept."""
    levels = np.array([-(2**23), 2**23 - 1, 0, 1, -1, 77], "<i4") * 256 + low
    wavfile.write(tmp_path / "a.wav", 8000, levels)
    content = bytearray((tmp_path / "a.wav").read_bytes())
    place = content.index(b"fmt ") + 22
    assert content[place : place + 2] == b"\x20\x00"
    content[place : place + 2] = b"\x18\x00"
    (tmp_path / "a.wav").write_bytes(content)
    media, _ = passed(tmp_path / "a.wav", tmp_path / "b.wav")
    np.testing.assert_array_equal(media.data, levels)
    np.testing.assert_array_equal(files.read(tmp_path / "b.wav").data, levels)
    assert media.extras.get("bits") == (None if low else 24)
    assert ("up to 32" if low else "24-bit samples are held") in media.notes[0]


@pytest.mark.parametrize("dtype", ["u1", "i2", "i4", "f4"])
def test_wav_clips_and_never_wraps(tmp_path: Path, dtype: str) -> None:
    wavfile.write(tmp_path / "a.wav", 8000, np.zeros(4, dtype))
    media = files.read(tmp_path / "a.wav")
    files.write(tmp_path / "b.wav", np.array([-1e12, 1e12, 0.4, 0.6]), media)
    back = files.read(tmp_path / "b.wav").data
    assert back.dtype == dtype
    if back.dtype.kind != "f":
        limits = np.iinfo(dtype)
        np.testing.assert_array_equal(back, [limits.min, limits.max, 0, 1])


def test_wav_chunks_that_are_left_out(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    wavfile.write(buffer, 8000, np.arange(9, dtype=np.int16))
    content = bytearray(buffer.getvalue())
    content += b"LIST" + (5).to_bytes(4, "little") + b"INFOx\0" + b"cue " + (4).to_bytes(4, "little") + bytes(4)
    content[4:8] = (len(content) - 8).to_bytes(4, "little")
    (tmp_path / "a.wav").write_bytes(content)
    media = files.read(tmp_path / "a.wav")
    assert media.notes == (f"{tmp_path / 'a.wav'}: what its chunks LIST, cue say beside the samples is left out",)
    np.testing.assert_array_equal(media.data, np.arange(9))
