"""Files that belong to an input: how they are found, turned, and refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
from PIL import Image

from nlflow.desk import files
from nlflow.desk.commands.jobs import find_companion
from nlflow.desk.companions import read_map, read_mask, read_reference
from nlflow.errors import FileFormatError, InputError

RNG = np.random.default_rng(4)
WHERE = RNG.random((5, 8)) < 0.4
PAINTED = np.where(WHERE, 255, 0).astype(np.uint8)


def media(shape: tuple[int, ...], axis: int | None = None, **more: Any) -> files.Media:
    spatial = len(shape) - (axis is not None)
    more.setdefault("format", "png")
    kind = "image" if spatial == 2 else "signal"
    return files.Media(Path("in.x"), kind=kind, data=np.zeros(shape), channel_axis=axis, **more)


def test_found_by_name(tmp_path: Path) -> None:
    for name in ("a.tif", "b.png", "b.tif", "c.md"):
        (tmp_path / name).touch()
    assert find_companion("--mask", tmp_path / "b.png", Path("a.png")) == tmp_path / "b.png"
    assert find_companion("--mask", tmp_path, Path("x/a.png")) == tmp_path / "a.tif"
    assert find_companion("--mask", tmp_path, Path("x/b.tif")) == tmp_path / "b.tif"
    with pytest.raises(FileFormatError, match="with 2 files called b, expected one for b"):
        find_companion("--mask", tmp_path, Path("b.jpg"))
    with pytest.raises(FileFormatError, match=r"with no file called c\.png or c"):
        find_companion("--mask", tmp_path, Path("c.png"))
    (tmp_path / "d.npy").touch()
    (tmp_path / "d.zarr").mkdir()
    assert find_companion("--mask", tmp_path, Path("d.zarr")) == tmp_path / "d.zarr"


def test_painted_masks(tmp_path: Path) -> None:
    red = np.dstack([PAINTED, np.zeros_like(PAINTED), np.zeros_like(PAINTED)])
    Image.fromarray(PAINTED).save(tmp_path / "grey.png")
    Image.fromarray(WHERE).save(tmp_path / "bits.png")
    Image.fromarray(red).save(tmp_path / "red.png")
    Image.fromarray(np.dstack([np.full((5, 8, 3), 255, np.uint8), PAINTED])).save(tmp_path / "clear.png")
    tifffile.imwrite(tmp_path / "float.tif", WHERE.astype(np.float32))
    for name in ("grey.png", "bits.png", "red.png", "clear.png", "float.tif"):
        for input_media in (media((5, 8)), media((5, 8, 3), 2)):
            mask, _ = read_mask("--mask", tmp_path / name, input_media)
            assert mask.dtype == bool
            np.testing.assert_array_equal(mask, WHERE, err_msg=name)
    assert read_mask("--mask", tmp_path / "grey.png", media((5, 8)))[1] == []


def test_masks_of_many_values_are_told(tmp_path: Path) -> None:
    Image.fromarray(np.arange(40, dtype=np.uint8).reshape(5, 8)).save(tmp_path / "a.png")
    mask, notes = read_mask("--mask", tmp_path / "a.png", media((5, 8)))
    assert mask.sum() == 39
    assert "40 different values; all but 0 count" in notes[-1]


def test_masks_of_arrays(tmp_path: Path) -> None:
    full = RNG.random((3, 5, 8)) < 0.3
    np.save(tmp_path / "full.npy", full)
    np.save(tmp_path / "flat.npy", full[0])
    of_colours = media((3, 5, 8), 0, format="npy")
    np.testing.assert_array_equal(read_mask("--mask", tmp_path / "full.npy", of_colours)[0], full)
    np.testing.assert_array_equal(read_mask("--mask", tmp_path / "flat.npy", of_colours)[0], full[0])
    np.testing.assert_array_equal(read_mask("--keep", tmp_path / "full.npy", of_colours)[0], full.any(axis=0))
    (tmp_path / "a.csv").write_text("time,bad\n" + "".join(f"{i},{i % 2}\n" for i in range(9)))
    np.testing.assert_array_equal(read_mask("--mask", tmp_path / "a.csv", media((9,)))[0], np.arange(9) % 2 == 1)


def test_masks_that_do_not_fit(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", WHERE.T)
    with pytest.raises(InputError, match=r"--mask: got .*a\.npy of shape \(8, 5\), expected \(5, 8\) as in in\.x"):
        read_mask("--mask", tmp_path / "a.npy", media((5, 8)))
    np.save(tmp_path / "a.npy", np.where(WHERE, np.nan, 0))
    with pytest.raises(InputError, match=r"--keep: .*a\.npy: got NaN .*write 0 or 1"):
        read_mask("--keep", tmp_path / "a.npy", media((5, 8)))


@pytest.mark.parametrize("turn", range(1, 9))
def test_pictures_fit_as_they_are_seen(tmp_path: Path, turn: int) -> None:
    """A mask without orientation, drawn upright, belongs to a photograph that is stored turned."""
    photograph = media((5, 8, 3), 2, orientation=turn, format="jpeg")
    upright = files.upright(PAINTED, turn)
    Image.fromarray(upright).save(tmp_path / "mask.png")
    np.testing.assert_array_equal(read_mask("--mask", tmp_path / "mask.png", photograph)[0], WHERE)
    tifffile.imwrite(tmp_path / "map.tif", upright.astype(np.float32))
    np.testing.assert_array_equal(read_map("--sigma", tmp_path / "map.tif", photograph)[0], PAINTED)
    colours = np.dstack([upright] * 3)
    Image.fromarray(colours).save(tmp_path / "clean.png")
    found, _ = read_reference("--reference", tmp_path / "clean.png", photograph)
    np.testing.assert_array_equal(found, np.dstack([PAINTED] * 3))
    alpha = np.dstack([np.full((*upright.shape, 3), 9, np.uint8), upright])
    Image.fromarray(alpha).save(tmp_path / "alpha.png")
    np.testing.assert_array_equal(read_mask("--mask", tmp_path / "alpha.png", photograph)[0], WHERE)
    exif = Image.Exif()
    exif[0x0112] = turn
    Image.fromarray(PAINTED).save(tmp_path / "turned.png", exif=exif)
    np.testing.assert_array_equal(read_mask("--mask", tmp_path / "turned.png", photograph)[0], WHERE)
    np.save(tmp_path / "mask.npy", WHERE)  # an array is what is stored
    np.testing.assert_array_equal(read_mask("--mask", tmp_path / "mask.npy", photograph)[0], WHERE)


def test_maps_and_references(tmp_path: Path) -> None:
    levels = RNG.random((5, 8))
    np.save(tmp_path / "a.npy", levels)
    values, _ = read_map("--sigma", tmp_path / "a.npy", media((5, 8, 3), 2))
    np.testing.assert_array_equal(values, levels)
    assert values.dtype == np.float64
    with pytest.raises(InputError, match=r"expected \(5, 9\), one number for each pixel"):
        read_map("--sigma", tmp_path / "a.npy", media((5, 9)))
    with pytest.raises(InputError, match=r"expected \(40,\), one number for each sample"):
        read_map("--sigma", tmp_path / "a.npy", media((40,)))
    with pytest.raises(InputError, match=r"--reference: got .* of shape \(5, 8\), expected \(5, 8, 3\)"):
        read_reference("--reference", tmp_path / "a.npy", media((5, 8, 3), 2))
    Image.fromarray(PAINTED).save(tmp_path / "a.png")
    deep = files.Media(Path("in.x"), "png", "image", np.zeros((5, 8), np.uint16))
    assert "uint8 samples are compared with uint16 ones" in read_reference("--r", tmp_path / "a.png", deep)[1][0]
