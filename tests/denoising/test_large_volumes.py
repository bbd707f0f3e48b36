"""Volumes and clips in blocks: the bits of the whole, whatever the blocks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dask
import dask.array as da
import numpy as np
import pytest
import tifffile
import zarr

import nlflow as nl
from nlflow.denoising.groupwise import CLIPS, VOLUMES, GroupPreset, Groups
from nlflow.denoising.large import denoise_array
from nlflow.denoising.large.survey import Blocks, estimated, surveyed
from nlflow.denoising.patches import Grouping
from nlflow.desk import large as storing
from nlflow.desk.large import denoise_store
from nlflow.desk.on_disk import block_sides, told_axes
from tests.commands import run
from tests.denoising.test_large import read, write
from tests.pictures import Floats

pytestmark = pytest.mark.numerical

SHAPE = (24, 30, 34)


def tiny(moving: bool) -> GroupPreset:
    """Groups that are quickly found, with halos of 12, 12 and 8 samples; of a clip 8 frames."""
    grouping = Grouping((2, 2, 2), 6, (1, 2, 2) if moving else (2, 2, 1), (1 if moving else 2, 2, 2))
    return GroupPreset(1, ((9e9, grouping),), ((9e9, grouping),), cosine=True, moving=moving)


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Blocks of this process, one after the other, with groups that are quickly found."""
    monkeypatch.setitem(VOLUMES, "balanced", tiny(moving=False))
    monkeypatch.setitem(CLIPS, "balanced", tiny(moving=True))
    with dask.config.set(scheduler="synchronous"):
        yield


def things(shape: tuple[int, ...] = SHAPE, seed: int = 0) -> Floats:
    """Return waves of 100 grey levels with noise of 10."""
    z, y, x = np.meshgrid(*(np.arange(n) for n in shape), indexing="ij")
    clean = 120 + 50 * np.sin(z / 5 + y / 7) * np.cos(x / 6) + 30 * (x > y)
    return np.asarray(clean + np.random.default_rng(seed).normal(0, 10, shape))


VOLUME = things().astype(np.float32)
BYTES = np.clip(np.rint(VOLUME), 0, 255).astype(np.uint8)
TWO = np.stack([VOLUME, VOLUME[::-1], VOLUME[:, ::-1]])
COUNTS = np.random.default_rng(1).poisson(things() / 10).astype(np.uint16)
CLIP = things().astype(np.float32)

CASES: dict[str, tuple[Any, Any, Any, dict[str, Any]]] = {
    "volume": (VOLUME, (12, 15, 34), 10.0, {}),
    "double": (VOLUME.astype(np.float64), (24, 15, 17), 10.0, {}),
    "bytes": (BYTES, (12, 30, 12), 10.0, {"axes": "ZYX"}),
    "thin patches": (VOLUME, (8, 30, 17), 10.0, {"spacing": (5, 1, 1)}),
    "channels": (TWO, (1, 12, 15, 34), [10.0, 0.0, 12.0], {"axes": "CZYX"}),
    "counts": (COUNTS, (12, 30, 34), None, {"noise": "poisson"}),
    "clip": (CLIP, (8, 15, 17), 10.0, {"axes": "TYX"}),
    "constant": (np.full(SHAPE, 3, np.uint8), (12, 15, 17), 10.0, {}),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.sampled(2)
def test_blocks_have_the_bits_of_the_whole(case: str) -> None:
    image, chunks, sigma, options = CASES[case]
    whole, told = nl.denoise(image, sigma, return_info=True, preserve_range=True, **options)
    if image.dtype.kind != "f":
        whole = np.rint(whole).astype(image.dtype)
    result, info = denoise_array(da.from_array(image, chunks=chunks), sigma, return_info=True, **options)
    assert info.tiles > 1
    np.testing.assert_array_equal(result.compute(), whole.astype(image.dtype))
    for name in ("sigma", "steps", "noise", "quality", "functional"):
        assert getattr(info, name) == getattr(told, name), name


def test_fast_has_the_bits_of_the_whole() -> None:
    image = things((40, 20, 20)).astype(np.float32)
    whole = nl.denoise(image, 10.0, quality="fast")
    result = denoise_array(da.from_array(image, chunks=(20, 20, 20)), 10.0, quality="fast")
    np.testing.assert_array_equal(result.compute(), whole)


def test_halos_are_as_wide_as_they_must_be_along_each_axis(monkeypatch: pytest.MonkeyPatch) -> None:
    from nlflow.denoising import groupwise

    whole, margins = nl.denoise(VOLUME, 10.0), groupwise.margins
    assert margins((tiny(False).first[0][1],) * 2, 1) == (12, 12, 8)
    for axis in range(3):

        def narrow(*words: Any, axis: int = axis) -> tuple[int, ...]:
            return tuple(n - 5 * (k == axis) for k, n in enumerate(margins(*words)))

        monkeypatch.setattr(groupwise, "margins", narrow)
        chunks = [n // 2 if k == axis else n for k, n in enumerate(SHAPE)]
        result = denoise_array(da.from_array(VOLUME, chunks=tuple(chunks)), 10.0)
        assert (result.compute() != whole).any(), axis


@pytest.mark.slow
def test_noise_is_estimated_from_planes() -> None:
    image = things((30, 60, 70))
    image[:9] = np.linspace(0, 1, 70)  # air without noise
    blocks = Blocks(da.from_array(image, chunks=(15, 30, 30)), None)
    assert estimated(blocks, *surveyed(blocks, None)[:2]) == pytest.approx(10, rel=0.05)
    colours = Blocks(da.from_array(np.stack([image, 2 * image]), chunks=(2, 15, 30, 30)), 0)
    assert estimated(colours, *surveyed(colours, None)[:2]) == pytest.approx([10, 20], rel=0.05)
    result, info = denoise_array(blocks.image, return_info=True)
    assert info.sigma_estimated
    here = np.zeros(image.shape, bool)  # air is data
    np.testing.assert_array_equal(result.compute(), nl.denoise(image, info.sigma, mask=here))


def test_blocks_of_a_clip_are_whole_frames() -> None:
    result = denoise_array(da.from_array(CLIP, chunks=(8, 10, 10)), 10.0, axes="TYX")
    assert result.chunks == ((8, 8, 8), (30,), (34,))
    assert block_sides((500, 1080, 1920), (1, 256, 256), None, 256, moving=True) == (8, 1080, 1920)
    assert block_sides((3, 500, 2048, 2048), (1, 10, 100, 100), 0, 256) == (3, 260, 300, 300)


def test_a_stack_of_two_thousand_millions_of_voxels_fits_in_blocks() -> None:
    """With the real presets: a block with its halo takes less than 4 GiB, whatever the whole."""
    for quality, side in (("fast", 256), ("best", 128)):
        preset = VOLUMES[quality]
        flow = Groups(preset, preset.groupings(1.0, 3), np.eye(1), np.dtype(np.float32), 1.0, 3)
        assert flow.bytes_needed(tuple(side + 2 * n for n in flow.halo), 1) < 4 * 2**30, quality


@pytest.mark.parametrize(
    ("image", "options", "message"),
    [
        (da.zeros((9, 9, 3)), {}, "is the last axis colour"),
        (da.zeros((9, 9, 9, 9)), {}, "denoise its volumes one by one"),
        (da.zeros((9, 9, 9)), {"axes": "YXT"}, "time before the axes of space"),
        (da.zeros((9, 9, 9)), {"spacing": (1, 2)}, "spacing: got"),
        (da.zeros((9, 9, 9)), {"quality": "fast", "steps": 2}, "steps: got 2 for a volume or a clip"),
        (da.zeros((9, 9, 9)), {"sigma": np.ones((9, 9, 9))}, "left to nlflow.denoise"),
        (da.from_array(np.where(np.arange(729).reshape(9, 9, 9) == 700, np.inf, 1.0)), {}, "image: got 1 infinite"),
    ],
)
def test_bad_arguments_are_named(image: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(nl.InputError, match=message):
        denoise_array(image, **{"sigma": 1.0, **options})


def test_a_block_that_does_not_fit_is_refused() -> None:
    with pytest.raises(nl.MemoryLimitError, match="largest block, of 24 x 15 x 34 samples with a halo of 12 x 12 x 8"):
        denoise_array(da.from_array(VOLUME, chunks=(24, 15, 34)), 10.0, max_memory=1e4)


@pytest.fixture
def local(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that are threads of this process."""
    from contextlib import contextmanager

    from distributed import Client

    @contextmanager
    def threads(scheduler: str, jobs: int | None) -> Iterator[None]:
        with Client(processes=False, n_workers=1, threads_per_worker=1, dashboard_address="127.0.0.1:0"):
            yield

    monkeypatch.setattr(storing._workers, "cluster", threads)


@pytest.mark.slow
@pytest.mark.usefixtures("local")
def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    image = np.pad(BYTES, ((0, 4), (0, 18), (0, 6)), mode="reflect")  # halos of 4, 20 and 12 samples
    write(Path("in.zarr"), image, 8)
    expected = np.rint(nl.denoise(image, 10.0, preserve_range=True, spacing=(2, 1, 1))).astype(np.uint8)
    given = ("denoise", "in.zarr", "out.zarr", "--axes", "ZYX", "--spacing", "2,1,1", "--sigma", "10", "--block", "24")
    report = json.loads(run(*given, "--json").stdout)
    assert report["blocks"] == 2 * 2 * 2
    np.testing.assert_array_equal(read(Path("out.zarr")), expected)
    Path("in.zarr").rename("0")  # an array in a group
    told = run("denoise", "0", "plain.zarr", "--axes", "ZYX", "--spacing", "2,1,1", "--sigma", "10", "--json").stdout
    assert json.loads(told)["blocks"] == 1
    np.testing.assert_array_equal(read(Path("plain.zarr")), expected)
    told = run("denoise", "0", "b.zarr", "--axes", "YX", "--block", "16", code=1).stderr
    assert "axes: got 'YX'" in told


def grouped(
    path: Path, values: Floats, letters: str, scale: list[float], version: str = "0.5", name: str = "0"
) -> Path:
    """Write an OME-Zarr image by the words of its specification, and return the folder of its array."""
    group = zarr.open_group(path, mode="w", zarr_format=2 if version == "0.4" else 3)
    array = group.create_array(name, shape=values.shape, chunks=(8,) * values.ndim, dtype=values.dtype)
    array[...] = values
    kinds = {"t": "time", "c": "channel"}
    axes = [{"name": letter, "type": kinds.get(letter, "space")} for letter in letters]
    levels = [{"path": name, "coordinateTransformations": [{"type": "scale", "scale": scale}]}]
    said: dict[str, Any] = {"multiscales": [{"axes": axes, "datasets": levels, "version": version}]}
    group.attrs.put(said if version == "0.4" else {"ome": {"version": version, **said}})
    return path / name


@pytest.mark.usefixtures("local")
@pytest.mark.parametrize(("version", "name"), [("0.4", "0"), ("0.5", "full/0")])
def test_an_array_in_a_group_has_the_axes_of_the_group(version: str, name: str, tmp_path: Path) -> None:
    source = grouped(tmp_path / "in.ome.zarr", BYTES, "zyx", [5, 1, 1], version, name)
    alone = write(tmp_path / "alone.zarr", BYTES, 8)
    words: dict[str, Any] = {"sigma": 10.0, "block": 24}
    denoise_store(alone, tmp_path / "expected.zarr", axes="ZYX", spacing=(5, 1, 1), **words)
    for axes in (None, "ZYX"):
        denoise_store(source, tmp_path / f"{axes}.zarr", axes=axes, **words)
        np.testing.assert_array_equal(read(tmp_path / f"{axes}.zarr"), read(tmp_path / "expected.zarr"))
    # Given spacing wins.
    denoise_store(alone, tmp_path / "ones.zarr", **words)
    denoise_store(source, tmp_path / "given.zarr", spacing=(1, 1, 1), **words)
    np.testing.assert_array_equal(read(tmp_path / "given.zarr"), read(tmp_path / "ones.zarr"))
    assert (read(tmp_path / "ones.zarr") != read(tmp_path / "expected.zarr")).any()


@pytest.mark.usefixtures("local")
def test_a_group_of_frames_is_a_clip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    grouped(Path("in.ome.zarr"), BYTES, "tyx", [0.5, 1, 1])
    told = run("denoise", "in.ome.zarr/0", "out.zarr", "--sigma", "10", "--json")
    assert "in.ome.zarr/0: read as TYX, 24 frames of 30 x 34" in told.stderr
    report = json.loads(told.stdout)
    assert (report["axes"], report["spacing"]) == ("TYX", None)
    expected = np.rint(nl.denoise(BYTES, 10.0, axes="TYX", preserve_range=True)).astype(np.uint8)
    np.testing.assert_array_equal(read(Path("out.zarr")), expected)
    run("denoise", "in.ome.zarr/0", "wins.zarr", "--sigma", "10", "--axes", "ZYX:1,1,1")
    expected = np.rint(nl.denoise(BYTES, 10.0, axes="ZYX", preserve_range=True)).astype(np.uint8)
    np.testing.assert_array_equal(read(Path("wins.zarr")), expected)
    notes: list[str] = []
    _, counts = denoise_store("in.ome.zarr/0", "out.zarr", 10.0, existing="overwrite", note=notes.append)
    assert (counts["axes"], counts["spacing"], len(notes)) == ("TYX", None, 1)


def test_axes_that_a_group_says(tmp_path: Path) -> None:
    colours = grouped(tmp_path / "c.zarr", TWO, "cyzx", [1, 1, 2, 3])
    assert told_axes(colours, None, None, None)[:2] == ("CYZX", (1, 2, 3))
    image, axis = storing.open_image(colours)
    assert (image.shape, axis) == (TWO.shape, 0)
    with pytest.raises(nl.InputError, match=r"channel_axis: got -1 for .*CYZX by its OME-Zarr group; leave it out, or"):
        storing.open_image(colours, channel_axis=-1)
    for letters in ("tzyx", "wzyx"):
        times = grouped(tmp_path / f"{letters}.zarr", TWO, letters, [1, 1, 1, 1])
        with pytest.raises(
            nl.FileFormatError, match=r"axes [T_]ZYX of 3 x 24 x 30 x 34 by .* group, .*; name the group"
        ):
            storing.open_image(times)
        assert told_axes(times, None, "CZYX", None)[0] == "CZYX"
    frames = grouped(tmp_path / "t.zarr", BYTES, "tyx", [1, 1, 1])
    _, _, notes = told_axes(frames, None, "ZYX", None)
    assert notes == (f"{frames}: its OME-Zarr group says TYX; read as ZYX, as given",)
    damaged = tmp_path / "t.zarr" / "zarr.json"
    damaged.write_text(damaged.read_text().replace(":", "", 1))
    with pytest.raises(
        nl.FileFormatError, match=r"a group around it that cannot be read .*; copy it anew, or give axes"
    ):
        told_axes(frames, None, None, None)
    # An array that no level names, and one in a group that is no image.
    other = zarr.open_group(tmp_path / "c.zarr", mode="r+").create_array("other", shape=(9, 9, 9), dtype="u1")
    assert other.shape == (9, 9, 9)
    _, _, notes = told_axes(tmp_path / "c.zarr" / "other", None, None, None)
    assert notes[0].endswith("other: read as ZYX, 9 slices of 9 x 9; --axes TYX takes them for frames")


def test_an_array_of_three_axes_is_told_to_be_a_volume(tmp_path: Path) -> None:
    told = told_axes(write(tmp_path / "a.zarr", BYTES, 8), None, None, None)
    assert told[:2] == (None, None)
    assert "read as ZYX, 24 slices of 30 x 34; --axes TYX takes them for frames" in told[2][0]
    assert "does not say how far apart its slices are" in told[2][1]
    zarr.create_array(tmp_path / "n.zarr", shape=(9, 9, 9), dtype="u1", dimension_names=("t", "y", "x"))
    _, _, notes = told_axes(tmp_path / "n.zarr", None, None, (1, 1, 1))
    assert notes == (f"{tmp_path / 'n.zarr'}: read as ZYX, 9 slices of 9 x 9, though its axes are named t, y, x; "
                     "--axes says otherwise",)  # fmt: skip
    assert told_axes(write(tmp_path / "p.zarr", BYTES[0], 8), None, None, None) == (None, None, ())


@pytest.mark.slow
@pytest.mark.usefixtures("local")
@pytest.mark.parametrize("imagej", [False, True])
def test_pages_of_a_tiff_file(imagej: bool, tmp_path: Path) -> None:
    tifffile.imwrite(tmp_path / "in.tif", BYTES, photometric="minisblack", imagej=imagej,
                     metadata={"axes": "ZYX"} if imagej else None)  # fmt: skip
    denoise_store(tmp_path / "in.tif", tmp_path / "out.zarr", 10.0, axes="ZYX", block=15)
    expected = np.rint(nl.denoise(BYTES, 10.0, preserve_range=True)).astype(np.uint8)
    np.testing.assert_array_equal(read(tmp_path / "out.zarr"), expected)
    if imagej:
        with pytest.raises(nl.FileFormatError, match="says ZYX of 24 x 30 x 34; got axes TYX"):
            denoise_store(tmp_path / "in.tif", tmp_path / "other.zarr", 10.0, axes="TYX")
