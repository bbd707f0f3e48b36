"""The command `nonlocal denoise` for stacks and films, with a stand-in: what it passes on, says and writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
from PIL import Image

from nlflow.desk import files
from nlflow.desk.commands import denoise_file
from nlflow.desk.formats import axes
from tests.commands import RNG, Denoiser, fails, listing, misused, run

STACK = RNG.integers(0, 200, (5, 9, 8), dtype=np.uint8)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    said = {"axes": "ZYX", "spacing": 0.5, "unit": "um", "Info": "kept"}
    tifffile.imwrite("stack.tif", STACK, imagej=True, resolution=(5, 5), metadata=said)
    np.save("stack.npy", STACK)
    return tmp_path


def test_a_stack_that_says_its_axes_asks_nothing(folder: Path, denoiser: Denoiser) -> None:
    result = run("denoise", "stack.tif", "out.tif")
    assert "note: stack.tif: read as ZYX, 5 slices of 9 x 8, 0.5 x 0.2 x 0.2 µm" in result.stderr
    ((image, _, options),) = denoiser.calls
    np.testing.assert_array_equal(image, STACK)
    assert options["channel_axis"] is None
    assert denoiser.layouts == [{"axes": "ZYX", "spacing": (0.5, 0.2, 0.2)}]
    with tifffile.TiffFile("out.tif") as tif:
        assert tif.imagej_metadata is not None
        assert (tif.imagej_metadata["Info"], tif.imagej_metadata["spacing"]) == ("kept", 0.5)
        np.testing.assert_array_equal(tif.asarray(), np.rint(STACK * 0.5))
    assert "volume of 5 x 9 x 8, uint8" in result.stdout


def test_pictures_are_called_as_before(folder: Path, denoiser: Denoiser) -> None:
    Image.fromarray(STACK[0]).save("in.png")
    run("denoise", "in.png", "out.png")
    assert denoiser.layouts == [{}]


def test_axes_and_spacing_of_the_user(folder: Path, denoiser: Denoiser) -> None:
    message = fails("denoise", "stack.npy", "out.npy")
    assert "--axes ZYX (slices of a volume) or TYX (frames)" in message
    run("denoise", "stack.npy", "out.npy", "--axes", "zyx", "--spacing", "3,1,1")
    run("denoise", "stack.npy", "clip.npy", "--axes", "TYX")
    assert denoiser.layouts == [{"axes": "ZYX", "spacing": (3, 1, 1)}, {"axes": "TYX"}]
    assert "says ZYX of 5 x 9 x 8; leave axes out" in fails("denoise", "stack.tif", "o.tif", "--axes", "TYX")
    for wrong in ("0,1,1", "a", "1,,1", "1,nan,1"):
        result = run("denoise", "stack.npy", "o.npy", "--axes", "ZYX", "--spacing", wrong, code=2)
        assert "--spacing" in result.stderr
    assert "expected 3, one for each of Z, Y, X" in fails("denoise", "stack.tif", "o.tif", "--spacing", "1,1")


def test_times_are_volumes_of_their_own(folder: Path, denoiser: Denoiser) -> None:
    data = RNG.integers(0, 200, (2, 3, 4, 6, 5), dtype=np.uint8)
    tifffile.imwrite("h.tif", data, imagej=True, metadata={"axes": "TZCYX", "spacing": 1.0})
    mask = np.zeros((2, 3, 6, 5), bool)
    mask[1, 2] = True
    np.save("mask.npy", mask)
    np.save("sigma.npy", np.arange(1, 181.0).reshape(2, 3, 6, 5))
    np.save("clean.npy", data + 3)
    result = run("denoise", "h.tif", "out.tif", "--mask", "mask.npy", "--sigma", "sigma.npy", "--reference",
                 "clean.npy", "--json")  # fmt: skip
    assert "each of the 2 times is a volume, denoised on its own" in result.stderr
    assert [layout["axes"] for layout in denoiser.layouts] == ["ZCYX", "ZCYX"]
    for time, (image, sigma, options) in enumerate(denoiser.calls):
        np.testing.assert_array_equal(image, data[time])
        np.testing.assert_array_equal(options["mask"], mask[time])
        np.testing.assert_array_equal(sigma, np.load("sigma.npy")[time])
    np.testing.assert_array_equal(tifffile.imread("out.tif"), np.rint(data * 0.5))
    report = json.loads(result.stdout)
    assert (report["kind"], report["axes"], report["missing"]) == ("volume", "TZCYX", 4 * 30)
    assert len(report["denoise"]["volumes"]) == 2
    assert report["denoise"]["steps"] == 8
    assert report["psnr_input"] > report["psnr_output"]


def test_nan_in_a_volume(folder: Path, denoiser: Denoiser) -> None:
    data = STACK.astype(np.float32)
    data[2, 3, 4] = np.nan
    tifffile.imwrite("nan.tif", data, imagej=True, metadata={"axes": "ZYX", "spacing": 1.0})
    assert json.loads(run("denoise", "nan.tif", "n.tif", "--json").stdout)["missing"] == 1
    assert denoiser.calls.pop()[2]["mask"] is None
    run("denoise", "nan.tif", "o.tif", "--mask", "nan")
    assert denoiser.calls[0][2]["mask"] == "nan"
    assert np.isfinite(tifffile.imread("o.tif")).all()


def test_a_mask_as_a_stack_of_the_same_shape(folder: Path, denoiser: Denoiser) -> None:
    tifffile.imwrite("mask.tif", (STACK > 100).astype(np.uint8), photometric="minisblack", metadata=None)
    run("denoise", "stack.tif", "out.tif", "--keep", "mask.tif")
    np.testing.assert_array_equal(denoiser.calls[0][2]["keep"], STACK > 100)
    tifffile.imwrite("small.tif", np.zeros((4, 9, 8), np.uint8), photometric="minisblack", metadata=None)
    assert "small.tif of shape (4, 9, 8), expected (5, 9, 8)" in fails(
        "denoise", "stack.tif", "o.tif", "--mask", "small.tif")  # fmt: skip


def test_a_folder_of_frames_is_one_clip(folder: Path, denoiser: Denoiser) -> None:
    (folder / "frames").mkdir()
    order = [1, 2, 9, 10, 11]
    for number, frame in zip(order, STACK, strict=True):
        Image.fromarray(frame).save(folder / "frames" / f"f{number}.png", dpi=(300, 300))
    (folder / "frames" / "readme.txt").write_text("mine")
    result = run("denoise", "frames", "out", "--axes", "TYX")
    assert "frames: read as TYX, 5 frames of 9 x 8" in result.stderr
    np.testing.assert_array_equal(denoiser.calls[0][0], STACK)
    assert listing(folder / "out") == sorted(f"f{number}.png" for number in order)
    for number, frame in zip(order, STACK, strict=True):
        with Image.open(folder / "out" / f"f{number}.png") as picture:
            np.testing.assert_array_equal(np.asarray(picture), np.rint(frame * 0.5))
            assert picture.info["dpi"] == pytest.approx((300, 300), rel=1e-4)
    assert "out/f1.png, already there" in fails("denoise", "frames", "out", "--axes", "TYX")
    run("denoise", "frames", "out", "--axes", "TYX", "--existing", "overwrite")
    run("denoise", "frames", "out.tif", "--axes", "ZYX")
    np.testing.assert_array_equal(tifffile.imread("out.tif"), np.rint(STACK * 0.5))
    run("denoise", "frames", "single")  # without axes: pictures of their own, as before
    assert len(denoiser.calls) == 3 + 5
    assert "the same file as IN" in fails("denoise", "frames", "frames", "--axes", "TYX", "--existing", "overwrite")
    assert "name the folder" in fails("denoise", "frames/f1.png", "frames/f2.png", "three", "--axes", "TYX")
    assert "--existing: got" in misused("denoise", "frames", "out", "--axes", "TYX", "--existing", "resume")


@pytest.mark.parametrize(
    ("frame", "name", "message"),
    [
        (np.zeros((9, 7), np.uint8), "f3.png", "got the size (9, 7), expected (9, 8) as in frames/f1.png"),
        (np.zeros((9, 8), np.uint16), "f3.png", "got the type uint16, expected uint8"),
        (np.zeros((9, 8, 3), np.uint8), "f3.png", "got the size (9, 8, 3)"),
        (STACK, "f3.tif", "got a stack, expected a picture"),
    ],
)
def test_frames_that_are_not_alike(folder: Path, denoiser: Denoiser, frame: Any, name: str, message: str) -> None:
    (folder / "frames").mkdir()
    for number in (1, 2):
        Image.fromarray(STACK[0]).save(folder / "frames" / f"f{number}.png")
    if name.endswith(".tif"):
        tifffile.imwrite(folder / "frames" / name, frame, photometric="minisblack")
    else:
        Image.fromarray(frame).save(folder / "frames" / name)
    assert message in fails("denoise", "frames", "out", "--axes", "TYX")


def test_one_slice_is_an_image(folder: Path, denoiser: Denoiser) -> None:
    np.save("one.npy", STACK[:1])
    result = run("denoise", "one.npy", "out.npy", "--axes", "ZYX")
    assert "one slice only, which is denoised as an image" in result.stderr
    assert denoiser.layouts == [{}]
    assert denoiser.calls[0][0].shape == (9, 8)
    assert np.load("out.npy").shape == (1, 9, 8)


def test_the_figure_gets_the_whole_stack_as_the_file_says_it(
    folder: Path, denoiser: Denoiser, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: dict[str, Any] = {}

    def figure(noisy: Any, result: Any, **words: Any) -> Any:
        from matplotlib.figure import Figure

        drawn.update(words, noisy=noisy, result=result)
        return Figure()

    monkeypatch.setattr("nlflow.plotting.stack_figure", figure)
    np.save("mask.npy", STACK > 100)
    run("denoise", "stack.tif", "out.tif", "--compare", "fig.png", "--mask", "mask.npy", "--reference", "stack.npy")
    np.testing.assert_array_equal(drawn["noisy"], STACK)
    np.testing.assert_array_equal(drawn["result"], STACK * 0.5)
    np.testing.assert_array_equal(drawn["clean"], STACK)
    np.testing.assert_array_equal(drawn["missing"], STACK > 100)
    assert (drawn["axes"], drawn["spacing"], drawn["upward"]) == ("ZYX", (0.5, 0.2, 0.2), "")
    assert (drawn["title"], drawn["kept"]) == ("stack.tif", None)


@pytest.mark.slow
def test_the_figure_of_times_of_a_scan(folder: Path, denoiser: Denoiser) -> None:
    nibabel = pytest.importorskip("nibabel")
    data = RNG.integers(0, 200, (7, 6, 5, 3)).astype(np.int16)
    nibabel.save(nibabel.Nifti1Image(data, np.diag([2.0, -2.0, 3.0, 1.0])), "scan.nii")
    assert denoise_file.upward(files.read("scan.nii")) == "Z"  # Y runs to the back of the head
    run("denoise", "scan.nii", "out.nii", "--compare", "fig.png")
    assert (folder / "fig.png").read_bytes().startswith(b"\x89PNG")


def test_the_middle_of_times_slices_and_channels() -> None:
    data = RNG.normal(size=(4, 3, 2, 6, 5))
    media = files.Media(Path("a.npy"), "npy", "volume", data, channel_axis=2, axes="TZCYX")
    np.testing.assert_array_equal(axes.plane(data, media), data[2, 1])
    np.testing.assert_array_equal(axes.plane(data[:, :, 0], media), data[2, 1, 0])


def test_many_stacks_and_going_on(folder: Path, denoiser: Denoiser) -> None:
    (folder / "in").mkdir()
    for name in ("a.tif", "b.tif"):
        (folder / "in" / name).write_bytes((folder / "stack.tif").read_bytes())
    run("denoise", "in", "out")
    assert listing(folder / "out") == ["a.tif", "b.tif"]
    run("denoise", "in", "out", "--existing", "resume")
    assert len(denoiser.calls) == 2
    plain = {"photometric": "minisblack", "metadata": None}
    for name in ("a.tif", "b.tif"):
        tifffile.imwrite(folder / "in" / name, STACK, **plain)
    run("denoise", "in", "again", "--axes", "ZYX")  # stacks, and no frames: each on its own
    assert [call[0].shape for call in denoiser.calls[2:]] == [(5, 9, 8)] * 2


@pytest.mark.slow
def test_zarr_stores_count_as_files(folder: Path, denoiser: Denoiser) -> None:
    pytest.importorskip("zarr")
    result = run("denoise", "stack.tif", "out.ome.zarr")
    assert "out.ome.zarr: the metadata of ImageJ, OME or single pages" in result.stderr
    media = files.read("out.ome.zarr")
    assert (media.axes, media.spacing) == ("ZYX", (0.5, 0.2, 0.2))
    run("denoise", "out.ome.zarr", "two.zarr")
    assert "already there" in fails("denoise", "out.ome.zarr", "two.zarr")
    run("denoise", "out.ome.zarr", "two.zarr", "--existing", "overwrite")
    np.testing.assert_array_equal(files.read("two.zarr").data, np.rint(media.data * 0.5))
    run("denoise", "stack.tif", "three.zarr")  # a stack: as a whole
    assert files.read("three.zarr").axes == "ZYX"
    (folder / "many").mkdir()
    (folder / "two.zarr").rename(folder / "many" / "a.zarr")
    run("denoise", "many", "cleaned")
    assert listing(folder / "cleaned") == ["a.zarr"]
    run("denoise", "many", "cleaned", "--existing", "resume")
    assert len(denoiser.calls) == 5
    assert "the same file as IN" in fails("denoise", "many/a.zarr", "many/a.zarr", "--existing", "overwrite")


@pytest.mark.slow
def test_films(folder: Path, denoiser: Denoiser) -> None:
    pytest.importorskip("av")
    np.save("clip.npy", np.repeat(STACK[..., None], 3, axis=-1)[:, :8])
    run("denoise", "clip.npy", "a.mkv", "--axes", "TYXC", "--video-quality", "lossless")
    result = run("denoise", "a.mkv", "b.mkv", "--video-quality", "4")
    assert "coded as H.264 by x264 at a rate factor of 4" in result.stderr
    assert "read as TYXC, 5 frames, 3 channels of 8 x 8, 25 frames a second" in result.stderr
    assert denoiser.layouts[-1] == {"axes": "TYXC"}
    for wrong in ("best", "52", "-1", "1.5"):
        assert "--video-quality" in run("denoise", "a.mkv", "c.mkv", f"--video-quality={wrong}", code=2).stderr
    whole = (folder / "a.mkv").read_bytes()
    (folder / "cut.mkv").write_bytes(whole[: len(whole) // 2])
    assert "export it again" in fails("denoise", "cut.mkv", "d.mkv")


def test_the_bits_are_those_of_the_library(folder: Path) -> None:
    """No stand-in: magnitudes of a volume, whose noise is named by a word."""
    from nlflow import denoise
    from nlflow.denoising.noise import Rician

    z, y, x = np.mgrid[:8, :24, :20]
    scan = Rician(6.0).sample(50 + 40 * np.sin((x + z) / 4) * np.cos(y / 5), rng=0)
    np.save("scan.npy", scan)
    told = run("denoise", "scan.npy", "out.npy", "--axes", "ZYX", "--noise", "rician", "--quality", "fast", "--json")
    assert "Rician" in told.stdout
    expected = denoise(scan, noise="rician", quality="fast", axes="ZYX", preserve_range=True)
    np.testing.assert_array_equal(np.load("out.npy"), expected)
    run("denoise", "scan.npy", "told.npy", "--axes", "ZYX", "--noise", "rician", "--sigma", "6", "--quality", "fast")
    expected = denoise(scan, 6.0, noise="rician", quality="fast", axes="ZYX", preserve_range=True)
    np.testing.assert_array_equal(np.load("told.npy"), expected)


@pytest.mark.slow
def test_noise_of_stacks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from nlflow.denoising import noise

    real, calls = noise.estimate_noise, []

    def estimate(
        image: Any, *, channel_axis: Any = None, mask: Any = None, axes: Any = None, spacing: Any = None
    ) -> Any:
        calls.append((image, axes, mask))
        return real(np.asarray(image)[0])

    monkeypatch.setattr(noise, "estimate_noise", estimate)
    result = run("noise", "stack.tif")
    assert "volume of 5 x 9 x 8, uint8" in result.stdout
    run("noise", "stack.npy", "--axes", "TYX", "--figure", "noise.png")
    assert [axes for _, axes, _ in calls] == ["ZYX", "TYX"]


def test_the_explorer_takes_no_slices_at_several_times(folder: Path) -> None:
    from nlflow.desk.explorer.sources import open_source
    from nlflow.errors import InputError

    assert open_source("stack.tif").media.axes == "ZYX"
    tifffile.imwrite("times.tif", np.zeros((3, 4, 9, 8), np.uint8), imagej=True, metadata={"axes": "TZYX"})
    with pytest.raises(InputError, match=r"times.tif: got a stack of slices at several times \(TZYX\)"):
        open_source("times.tif")


def test_quality_of_frames(folder: Path, denoiser: Denoiser) -> None:
    Path("jpegs").mkdir()
    for number in range(3):
        Image.fromarray(np.random.default_rng(number).integers(0, 256, (24, 32), np.uint8)).save(f"jpegs/{number}.jpg")
    run("denoise", "jpegs", "fine", "--axes", "TYX")
    run("denoise", "jpegs", "coarse", "--axes", "TYX", "--write", "quality=20")
    for number in range(3):
        assert Path(f"coarse/{number}.jpg").stat().st_size < Path(f"fine/{number}.jpg").stat().st_size
