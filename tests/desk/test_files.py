"""Reading of images and signals: what the axes are, and what is refused with which words."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
from PIL import Image
from scipy.io import wavfile

from nlflow.desk import files
from nlflow.errors import FileFormatError, InputError


def samples(dtype: str, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Return values that reach both ends of the dtype."""
    kind = np.dtype(dtype)
    rng = np.random.default_rng(3)
    if kind.kind == "f":
        return (100 * rng.standard_normal(shape)).astype(kind)
    limits = np.iinfo(kind)
    values = rng.integers(limits.min, limits.max, shape, dtype=kind, endpoint=True)
    values.flat[:2] = limits.min, limits.max
    return values


def listing(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


# --- layout ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "options", "kind", "axis"),
    [
        ((9,), {}, "signal", None),
        ((9,), {"kind": "signal"}, "signal", None),
        ((9, 2), {}, "image", None),
        ((9, 2), {"kind": "image"}, "image", None),
        ((9, 2), {"kind": "signal"}, "signal", 1),
        ((2, 9), {"channel_axis": 0}, "signal", 0),
        ((9, 2), {"channel_axis": -1}, "signal", 1),
        ((5, 7, 3), {}, "image", 2),
        ((5, 7, 2), {"kind": "image"}, "image", 2),
        ((6, 5, 7), {"channel_axis": 0}, "image", 0),
        ((5, 7, 6), {"channel_axis": -1}, "image", 2),
        ((3, 5, 7), {"channel_axis": -3}, "image", 0),
    ],
)
def test_npy_layout(tmp_path: Path, shape: tuple[int, ...], options: Any, kind: str, axis: int | None) -> None:
    np.save(tmp_path / "a.npy", samples("f8", shape))
    media = files.read(tmp_path / "a.npy", **options)
    assert (media.kind, media.channel_axis) == (kind, axis)
    assert media.data.shape == shape


@pytest.mark.parametrize(
    ("shape", "options", "named"),
    [
        ((9,), {"kind": "image"}, "kind"),
        ((9,), {"channel_axis": 0}, "channel_axis"),
        ((9, 2), {"kind": "image", "channel_axis": 1}, "kind"),
        ((9, 2), {"channel_axis": 2}, "channel_axis"),
        ((9, 2), {"channel_axis": -3}, "channel_axis"),
        ((9, 2), {"channel_axis": 1.5}, "channel_axis"),
        ((9, 2), {"kind": "video"}, "kind"),
        ((5, 7, 6), {}, "channel_axis"),
        ((5, 7, 1), {}, "channel_axis"),
        ((5, 7, 3), {"kind": "signal"}, "kind"),
    ],
)
def test_npy_layout_refused(tmp_path: Path, shape: tuple[int, ...], options: Any, named: str) -> None:
    np.save(tmp_path / "a.npy", samples("f8", shape))
    with pytest.raises(InputError, match=named):
        files.read(tmp_path / "a.npy", **options)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("a.png", {"kind": "signal"}),
        ("a.png", {"channel_axis": 0}),
        ("c.png", {"channel_axis": 0}),
        ("a.wav", {"kind": "image"}),
        ("a.wav", {"channel_axis": 0}),
    ],
)
def test_layout_that_contradicts_the_file(tmp_path: Path, name: str, options: Any) -> None:
    Image.new("L", (4, 3)).save(tmp_path / "a.png")
    Image.new("RGB", (4, 3)).save(tmp_path / "c.png")
    wavfile.write(tmp_path / "a.wav", 8000, samples("i2", (9,)))
    with pytest.raises(InputError, match="leave"):
        files.read(tmp_path / name, **options)
    assert files.read(tmp_path / "c.png", kind="image", channel_axis=-1).channel_axis == 2


# --- files that are refused ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a.png", "a.jpg", "a.tif", "z.tif", "a.npy", "a.wav"])
def test_truncated(tmp_path: Path, name: str) -> None:
    image = samples("u1", (60, 80))
    Image.fromarray(image).save(tmp_path / "a.png")
    Image.fromarray(image).save(tmp_path / "a.jpg")
    tifffile.imwrite(tmp_path / "a.tif", image)
    tifffile.imwrite(tmp_path / "z.tif", image, compression="zlib", rowsperstrip=8)
    np.save(tmp_path / "a.npy", image)
    wavfile.write(tmp_path / "a.wav", 8000, samples("i2", (500, 2)))
    whole = (tmp_path / name).read_bytes()
    for size in [1, 5, 12, 20, 30, 44, 60, 100, 200, *range(300, len(whole) - 30, 211), len(whole) - 30]:
        (tmp_path / name).write_bytes(whole[:size])
        with pytest.raises(FileFormatError, match=r"export it again|numpy\.save"):
            files.read(tmp_path / name)
    (tmp_path / name).write_bytes(whole)
    files.read(tmp_path / name)


@pytest.mark.parametrize("name", ["a.png", "a.jpeg", "a.tif", "a.npy", "a.wav"])
def test_a_text_with_another_name(tmp_path: Path, name: str) -> None:
    remedy = "give a picture" if name in ("a.png", "a.jpeg", "a.tif") else "copy or export it again"
    for text in ("no such thing as an image\n" * 400, "\ufefféééé", "é" * 3000, "x" + "é" * 3000):
        (tmp_path / name).write_text(text, encoding="utf-8")
        with pytest.raises(FileFormatError, match=rf"{name}: got a text file, expected a readable .* file; {remedy}"):
            files.read(tmp_path / name)
    (tmp_path / name).write_bytes(b"some words\0")
    with pytest.raises(FileFormatError, match=name) as caught:
        files.read(tmp_path / name)
    assert "text file" not in str(caught.value)


def test_a_name_that_is_nearly_right(tmp_path: Path) -> None:
    (tmp_path / "photo.jpg").touch()
    for wrong in ("photo.jgp", "foto.jpg", "photo.png"):
        with pytest.raises(FileFormatError) as caught:
            files.read(tmp_path / wrong)
        right = tmp_path / "photo.jpg"
        assert str(caught.value) == f"{tmp_path / wrong}: there is no such file or folder; did you mean {right}?"
    with pytest.raises(FileFormatError, match="no such file or folder; check the name and the folder"):
        files.read(tmp_path / "elsewhere" / "photo.jgp")


def test_no_decoder_speaks_of_its_own_code(tmp_path: Path) -> None:
    path = tmp_path / "speech.wav"
    wavfile.write(path, 16_000, np.arange(20, dtype=np.int16))
    path.write_bytes(path.read_bytes()[:22] + b"\0\0" + path.read_bytes()[24:])  # no channels
    with pytest.raises(FileFormatError, match=r"damaged or foreign file \(its parts contradict each other\)"):
        files.read(path)


@pytest.mark.skipif(os.name == "nt", reason="Windows asks for a privilege to make links")
def test_a_link_to_nothing_is_said(tmp_path: Path) -> None:
    for name, target in (("photo.jpg", "gone.jpg"), ("loop.jpg", "loop.jpg")):
        (tmp_path / name).symlink_to(target)
        with pytest.raises(FileFormatError, match=f"{name}: got a link to {target}, which does not exist"):
            files.read(tmp_path / name)


@pytest.mark.parametrize("extension", files.EXTENSIONS)
def test_empty_missing_and_folder(tmp_path: Path, extension: str) -> None:
    path = tmp_path / f"a{extension}"
    with pytest.raises(FileFormatError, match="there is no such file or folder; check the name and the folder"):
        files.read(path)
    path.touch()
    with pytest.raises(FileFormatError, match="got an empty file"):
        files.read(str(path))
    path.unlink()
    path.mkdir()
    with pytest.raises(FileFormatError, match="got a folder"):
        files.read(path)


@pytest.mark.parametrize("name", ["a.xyz", "a", "a.PSD", ".png"])
def test_unknown_extension(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"words")
    with pytest.raises(FileFormatError, match=r"one of \.png, .*\.csv"):
        files.read(tmp_path / name)


def test_no_regular_file(tmp_path: Path) -> None:
    if not hasattr(os, "mkfifo"):
        pytest.skip("named pipes are a matter of POSIX")
    os.mkfifo(tmp_path / "a.npy")
    with pytest.raises(FileFormatError, match="no regular file"):
        files.read(tmp_path / "a.npy")
    media = files.Media(tmp_path / "x.npy", "npy", "image", samples("f8", (2, 3)))
    with pytest.raises(FileFormatError, match="no regular file"):
        files.check_output(tmp_path / "a.npy", media)


def test_unreadable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.npy").write_bytes(b"x")

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(FileFormatError, match=r"Permission denied.*check its permissions"):
        files.read(tmp_path / "a.npy")


def test_npy_that_is_not_numbers(tmp_path: Path) -> None:
    path = tmp_path / "a.npy"
    np.save(path, np.array([{}, 1], object), allow_pickle=True)
    with pytest.raises(FileFormatError, match=r"Python objects.*never loaded"):
        files.read(path)
    for array in (np.zeros(3, [("x", "f8"), ("y", "f8")]), np.zeros(3, complex), np.array(["a"]), np.zeros(3, "M8[s]")):
        np.save(path, array)
        with pytest.raises(FileFormatError, match="expected real numbers"):
            files.read(path)
    np.save(path, np.zeros((0, 3)))
    with pytest.raises(FileFormatError, match="empty array"):
        files.read(path)
    for shape in ((), (2, 2, 2, 2)):
        np.save(path, np.zeros(shape))
        with pytest.raises(FileFormatError, match="one to three dimensions"):
            files.read(path)
    path.write_bytes(b"no array\0")
    with pytest.raises(FileFormatError, match="no NPY array"):
        files.read(path)


def test_npy_larger_than_memory(tmp_path: Path) -> None:
    with (tmp_path / "a.npy").open("wb") as stream:
        np.lib.format.write_array_header_1_0(stream, {"descr": "<f8", "fortran_order": False, "shape": (2**50, 2)})
    with pytest.raises(FileFormatError, match="memory"):
        files.read(tmp_path / "a.npy")


def test_complex_tiff_and_premultiplied_alpha(tmp_path: Path) -> None:
    tifffile.imwrite(tmp_path / "c.tif", np.zeros((4, 5), np.complex64))
    with pytest.raises(FileFormatError, match="complex64, expected real"):
        files.read(tmp_path / "c.tif")
    tifffile.imwrite(tmp_path / "a.tif", samples("u1", (4, 5, 4)), photometric="rgb", extrasamples=["assocalpha"])
    with pytest.raises(FileFormatError, match="unassociated alpha"):
        files.read(tmp_path / "a.tif")


def test_very_large_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Image.new("L", (40, 30)).save(tmp_path / "a.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)  # Pillow warns
    assert files.read(tmp_path / "a.png").data.shape == (30, 40)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 500)  # Pillow refuses
    with pytest.raises(FileFormatError, match=r"more than 1000 pixels.*crop"):
        files.read(tmp_path / "a.png")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"1,2\n3\n", "1 cell.* in line 2, expected 2"),
        (b"1,2\n3,x\n", "'x' in line 2, cell 2"),
        (b"1,500;2,500\n2,500;3,500\n", "decimal point"),
        (b"a,b\n", "no row of numbers"),
        (b"\n \n", "no row of numbers"),
        (b"\xff\xfe1\x00\x01\x00", "no text"),
        (b'"1,2\n3', "damaged"),
    ],
)
def test_bad_csv(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "a.csv").write_bytes(content)
    with pytest.raises(FileFormatError, match=message):
        files.read(tmp_path / "a.csv")


def test_not_a_number_is_left_to_the_denoiser(tmp_path: Path) -> None:
    values = np.array([[1, np.nan], [np.inf, 2]], np.float32)
    np.save(tmp_path / "a.npy", values)
    tifffile.imwrite(tmp_path / "a.tif", values)
    for name in ("a.npy", "a.tif"):
        media = files.read(tmp_path / name)
        files.write(tmp_path / name, media.data, media)
        np.testing.assert_array_equal(files.read(tmp_path / name).data, values)


@pytest.mark.slow
def test_import_is_cheap() -> None:
    code = (
        "import sys, nlflow.desk.files; print([m for m in ('PIL', 'tifffile', 'scipy', 'numba') if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
