"""Outputs: refused before any work, written completely or not at all."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nlflow.desk import files
from nlflow.errors import FileFormatError, InputError
from tests.desk.test_files import listing, samples

# --- outputs ---------------------------------------------------------------------------------------------------------


def make(kind: Any, dtype: str, shape: tuple[int, ...], axis: int | None = None, **more: Any) -> files.Media:
    return files.Media(Path("in.npy"), "npy", kind, samples(dtype, shape), channel_axis=axis, **more)


ALPHA = np.full((4, 5), 9, np.uint8)


@pytest.mark.parametrize(
    ("name", "media", "message"),
    [
        ("o.jpg", make("image", "u2", (4, 5)), "uint16.*tif"),
        ("o.jpg", make("image", "f4", (4, 5)), "float32.*tif"),
        ("o.jpg", make("image", "u1", (4, 5, 3), 2, alpha=ALPHA), "alpha.*png"),
        ("o.png", make("image", "f8", (4, 5)), "float64.*tif"),
        ("o.png", make("image", "i2", (4, 5)), "int16.*tif"),
        ("o.pgm", make("image", "u1", (4, 5, 3), 2), "3 channels.*tif"),
        ("o.pbm", make("image", "u1", (4, 5)), "black and white.*o.pgm"),
        ("o.png", make("image", "u1", (4, 5, 4), 2), "4 channels.*tif"),
        ("o.png", make("signal", "u1", (9,)), "a signal.*wav"),
        ("o.tif", make("signal", "f8", (9,)), "a signal.*wav"),
        ("o.wav", make("image", "f8", (4, 5)), "an image.*png"),
        ("o.csv", make("image", "f8", (4, 5)), "an image.*png"),
        ("o.wav", make("signal", "f8", (9,)), "sample rate.*csv"),
        ("o.wav", make("signal", "u2", (9,), sample_rate=8000), "uint16.*csv"),
        (
            "o.xyz",
            make("image", "u1", (4, 5)),
            r"csv, .parquet, .au, .bmp, .webp, .pgm, .npz, .mat, .h5, .nii, .zarr, .mp4; choose",
        ),
        ("o.parquet", make("signal", "f8", (9,)), "no Parquet file; name the output .csv"),
        ("o.au", make("signal", "f8", (9,)), "sample rate.*csv"),
        ("o.gif", make("image", "u1", (4, 5)), "256 colours.*o.png"),
        ("o.avif", make("image", "u1", (4, 5)), "read only.*o.png"),
        ("o.nef", make("image", "u1", (4, 5)), "read only.*o.tif"),
        ("o.bmp", make("image", "u2", (4, 5)), "uint16.*tif"),
        ("o.bmp", make("image", "u1", (4, 5), alpha=np.zeros((4, 5), np.uint8)), "alpha channel.*png"),
        ("o.webp", make("image", "u1", (4, 5, 2), 2), "2 channels.*tif"),
        ("o.webp", make("image", "u1", (4, 16384)), "a side of 16384 pixels.*tif"),
        ("missing/o.png", make("image", "u1", (4, 5)), "does not exist.*create it"),
        ("folder.png", make("image", "u1", (4, 5)), "a folder"),
    ],
)
def test_output_that_cannot_be(tmp_path: Path, name: str, media: files.Media, message: str) -> None:
    (tmp_path / "folder.png").mkdir()
    for attempt in (files.check_output, lambda path, media: files.write(path, media.data, media)):
        with pytest.raises(FileFormatError, match=message):
            attempt(tmp_path / name, media)
    assert listing(tmp_path) == ["folder.png"]


def test_bool_array_as_image(tmp_path: Path) -> None:
    media = files.Media(Path("in.npy"), "npy", "image", np.ones((3, 4), bool))
    for name in ("o.png", "o.tif"):
        with pytest.raises(FileFormatError, match=r"bool samples.*\.npy"):
            files.check_output(tmp_path / name, media)


def test_output_without_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    media = make("image", "u1", (4, 5))
    (tmp_path / "o.png").touch()
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).is_dir())
    with pytest.raises(FileFormatError, match="write-protected"):
        files.check_output(tmp_path / "o.png", media)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(FileFormatError, match="without write permission"):
        files.check_output(tmp_path / "p.png", media)


def test_check_writes_nothing(tmp_path: Path) -> None:
    assert files.check_output(tmp_path / "o.png", make("image", "u1", (4, 5))) == ()
    assert listing(tmp_path) == []


def test_what_an_output_leaves_out_is_told(tmp_path: Path) -> None:
    image = make("image", "u1", (4, 5), alpha=ALPHA)
    sound = make("signal", "i2", (9,), sample_rate=8000)
    table = make("signal", "f8", (9,), header=("t", "x"), time=tuple("123456789"))
    assert "alpha" in files.check_output(tmp_path / "o.npy", image)[0]
    assert "8000 Hz" in files.check_output(tmp_path / "o.npy", sound)[0]
    assert "8000 Hz" in files.check_output(tmp_path / "o.csv", sound)[0]
    assert "column names and the first column are" in files.check_output(tmp_path / "o.npy", table)[0]
    assert files.check_output(tmp_path / "o.csv", table) == ()


@pytest.mark.parametrize(
    ("name", "media"),
    [
        ("o.tif", make("image", "u1", (4, 5, 3), 2, alpha=ALPHA)),
        ("o.tif", make("image", "f4", (3, 4, 5), 0)),
        ("o.tif", make("image", "u1", (4, 5, 1), 2)),
        ("o.png", make("image", "u1", (3, 4, 5), 0)),
        ("o.png", make("image", "u1", (4, 5, 1), 2)),
        ("o.npy", make("image", "u1", (4, 5))),
        ("o.npy", make("signal", "i2", (9, 2), 1)),
        ("o.csv", make("signal", "f4", (2, 9), 0)),
        ("o.csv", make("signal", "i2", (9,))),
        ("o.wav", make("signal", "i2", (2, 9), 0, sample_rate=8000)),
    ],
)
def test_other_formats(tmp_path: Path, name: str, media: files.Media) -> None:
    files.write(tmp_path / name, media.data, media)
    back = files.read(tmp_path / name, kind="signal" if media.kind == "signal" else None)
    expected = media.data
    if media.channel_axis is not None and not name.endswith("npy"):
        expected = np.moveaxis(expected, media.channel_axis, -1)
    np.testing.assert_array_equal(back.data.astype(media.data.dtype), np.squeeze(expected))
    if media.alpha is not None:
        np.testing.assert_array_equal(back.alpha, media.alpha)


@pytest.mark.parametrize("dtype", ["u1", "u2", "i2", "i4", "u4", "i8", "u8"])
def test_integers_are_rounded_and_clipped_never_wrapped(tmp_path: Path, dtype: str) -> None:
    limits = np.iinfo(dtype)
    media = make("image", dtype, (1, 6))
    for precision in (np.float32, np.float64):
        result = np.array([[-1e30, limits.min - 3.0, 41.6, 42.4, float(limits.max) * 1.001, 1e30]], precision)
        files.write(tmp_path / "o.tif", result, media)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            back = files.read(tmp_path / "o.tif").data
        assert back.dtype == dtype
        assert back[0, :4].tolist() == [limits.min, limits.min, 42, 42]
        assert limits.max - back[0, 4] <= limits.max // 2**53
        assert back[0, 5] == back[0, 4]


def test_wrong_results_are_refused(tmp_path: Path) -> None:
    media = make("image", "u1", (4, 5))
    with pytest.raises(InputError, match=r"shape \(5, 4\), expected \(4, 5\)"):
        files.write(tmp_path / "o.png", np.zeros((5, 4)), media)
    with pytest.raises(InputError, match="NaN"):
        files.write(tmp_path / "o.png", np.full((4, 5), np.nan), media)
    assert listing(tmp_path) == []


def test_encoder_failure(tmp_path: Path) -> None:
    media = make("image", "u1", (4, 5), extras={"icc_profile": object()})
    with pytest.raises(FileFormatError, match="encoder failure"):
        files.write(tmp_path / "o.png", media.data, media)
    assert listing(tmp_path) == []


# --- atomic writing --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("failure", [RuntimeError("halfway"), KeyboardInterrupt(), SystemExit(1)])
@pytest.mark.parametrize("existing", [True, False])
def test_failure_halfway_leaves_what_was_there(tmp_path: Path, failure: BaseException, existing: bool) -> None:
    path = tmp_path / "o.bin"
    if existing:
        path.write_bytes(b"old")

    def writer(stream: Any) -> None:
        stream.write(b"new" * 100000)
        stream.flush()
        raise failure

    with pytest.raises(type(failure)):
        files.write_atomic(path, writer)
    assert listing(tmp_path) == (["o.bin"] if existing else [])
    if existing:
        assert path.read_bytes() == b"old"


def test_full_disk_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    def writer(stream: Any) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(FileFormatError, match=r"o\.bin: got No space left.*free some space"):
        files.write_atomic(tmp_path / "o.bin", writer)
    with pytest.raises(FileFormatError, match="No such file"):
        files.write_atomic(tmp_path / "missing" / "o.bin", writer)
    assert listing(tmp_path) == []


def test_failure_to_replace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, target: Path) -> None:
        raise PermissionError(13, "Permission denied")

    (tmp_path / "o.bin").write_bytes(b"old")
    monkeypatch.setattr(Path, "replace", refuse)
    with pytest.raises(FileFormatError, match="Permission denied"):
        files.write_atomic(tmp_path / "o.bin", lambda stream: stream.write(b"new"))
    assert listing(tmp_path) == ["o.bin"]
    assert (tmp_path / "o.bin").read_bytes() == b"old"


def test_the_target_is_untouched_until_the_writer_is_done(tmp_path: Path) -> None:
    path = tmp_path / "o.bin"
    path.write_bytes(b"old")

    def writer(stream: Any) -> None:
        stream.write(b"new")
        stream.flush()
        assert path.read_bytes() == b"old"
        assert len(listing(tmp_path)) == 2

    files.write_atomic(str(path), writer)
    assert path.read_bytes() == b"new"
    assert listing(tmp_path) == ["o.bin"]


@pytest.mark.skipif(os.name != "posix", reason="permissions and links of POSIX")
def test_permissions_and_links(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        files.write_atomic(tmp_path / "new.bin", lambda stream: stream.write(b"1"))
    finally:
        os.umask(before)
    assert (tmp_path / "new.bin").stat().st_mode & 0o777 == 0o640
    (tmp_path / "new.bin").chmod(0o604)
    (tmp_path / "link.bin").symlink_to("new.bin")
    files.write_atomic(tmp_path / "link.bin", lambda stream: stream.write(b"2"))
    assert (tmp_path / "link.bin").is_symlink()
    assert (tmp_path / "new.bin").read_bytes() == b"2"
    assert (tmp_path / "new.bin").stat().st_mode & 0o777 == 0o604


def test_long_names(tmp_path: Path) -> None:
    path = tmp_path / ("x" * 251 + ".npy")
    files.write_atomic(path, lambda stream: stream.write(b"1"))
    assert path.read_bytes() == b"1"
