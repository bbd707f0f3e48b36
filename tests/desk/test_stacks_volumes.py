"""NIfTI and OME-Zarr: values, axes, distances and metadata, before and after, as nibabel and zarr see them."""

from __future__ import annotations

import gzip
import json
import struct
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import tifffile

from nlflow.desk import files
from nlflow.errors import FileFormatError, InputError
from tests.desk.test_files import samples

nibabel = pytest.importorskip("nibabel")
zarr = pytest.importorskip("zarr")

RNG = np.random.default_rng(6)
AFFINE = np.array([[-2.0, 0, 0.1, 90], [0, 1.5, 0.3, -120], [0.1, -0.3, 1.5, -70], [0, 0, 0, 1]])


def written(path: Path, target: str = "", **words: Any) -> tuple[files.Media, Path, tuple[str, ...]]:
    media = files.read(path, **words)
    place = path.with_name(target or f"out-{path.name}")
    notes = files.check_output(place, media)
    files.write(place, media.data, media)
    return media, place, notes


def fields(image: Any) -> dict[str, str]:
    return {key: repr(image.header[key].tolist()) for key in image.header}


def nifti(path: Path, data: Any, affine: Any = AFFINE, *, kind: Any = None, **words: Any) -> Any:
    image = (kind or nibabel.Nifti1Image)(data, affine, dtype=data.dtype)
    image.header.set_xyzt_units("mm", "sec")
    image.header["descrip"] = b"a scan"
    for name, value in words.items():
        image.header[name] = value
    image.header.extensions.append(nibabel.nifti1.Nifti1Extension("comment", b"kept by all"))
    nibabel.save(image, path)
    return nibabel.load(path)


# --- NIfTI -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a.nii", "a.nii.gz", "A.NII.GZ"])
@pytest.mark.parametrize("dtype", ["u1", "i2", "u2", "i4", "f4", "f8"])
def test_nifti_comes_back_as_it_was(tmp_path: Path, name: str, dtype: str) -> None:
    data = samples(dtype, (6, 7, 5))
    before = nifti(tmp_path / name, data, cal_max=9.0, intent_name=b"T1")
    media, target, notes = written(tmp_path / name)
    assert (media.kind, media.axes, notes) == ("volume", "ZYX", ())
    np.testing.assert_array_equal(media.data, data.T)
    after = nibabel.load(target)
    np.testing.assert_array_equal(np.asarray(after.dataobj), data)
    np.testing.assert_array_equal(after.affine, before.affine)
    assert fields(before) == fields(after)
    assert after.header.extensions[0].get_content() == b"kept by all"
    assert after.get_data_dtype() == np.dtype(dtype)
    sizes = np.sqrt((AFFINE[:3, :3] ** 2).sum(0))[::-1]
    assert media.spacing == pytest.approx(tuple(sizes))
    assert media.scale["Z"][1] == "mm"


def test_the_same_result_makes_the_same_file(tmp_path: Path) -> None:
    nifti(tmp_path / "a.nii.gz", samples("i2", (6, 7, 5)))
    media = files.read(tmp_path / "a.nii.gz")
    files.write(tmp_path / "one.nii.gz", media.data, media)
    files.write(tmp_path / "two.nii.gz", media.data, media)
    assert (tmp_path / "one.nii.gz").read_bytes() == (tmp_path / "two.nii.gz").read_bytes()


@pytest.mark.parametrize("kind", [nibabel.Nifti1Image, nibabel.Nifti2Image])
def test_scaled_values_are_in_the_units_of_the_file(tmp_path: Path, kind: Any) -> None:
    data = samples("i2", (6, 7, 5, 2)) // 2
    image = kind(data, AFFINE)
    image.header.set_slope_inter(0.25, 100)
    nibabel.save(image, tmp_path / "a.nii")
    media, target, _ = written(tmp_path / "a.nii")
    assert media.axes == "TZYX"
    assert media.data.dtype == np.float32
    np.testing.assert_array_equal(media.data, (0.25 * data.astype("f8") + 100).T)
    assert any("0.25 times the int16 numbers of the file plus 100" in note for note in media.notes)
    after = nibabel.load(target)
    assert isinstance(after, kind)
    assert (after.dataobj.slope, after.dataobj.inter) == (0.25, 100)
    np.testing.assert_array_equal(after.dataobj.get_unscaled(), data)
    files.write(target, np.full(media.data.shape, 1e6), media)  # beyond what 16 bits hold
    assert nibabel.load(target).dataobj.get_unscaled().min() == np.iinfo("i2").max
    with pytest.raises(InputError, match="NaN"):
        files.write(target, np.full(media.data.shape, np.nan), media)


def test_colours_of_nifti(tmp_path: Path) -> None:
    dtype = np.dtype([("R", "u1"), ("G", "u1"), ("B", "u1")])
    colours = samples("u1", (6, 7, 5, 3))
    nibabel.save(nibabel.Nifti1Image(colours.view(dtype)[..., 0], AFFINE), tmp_path / "a.nii")
    media, target, _ = written(tmp_path / "a.nii")
    assert (media.axes, media.channel_axis, media.data.shape) == ("ZYXC", 3, (5, 7, 6, 3))
    np.testing.assert_array_equal(media.data, colours.transpose(2, 1, 0, 3))
    assert nibabel.load(target).get_data_dtype() == dtype
    found = np.asarray(nibabel.load(target).dataobj, order="C")
    np.testing.assert_array_equal(found.view(np.uint8).reshape(colours.shape), colours)


def test_vectors_one_slice_and_more_dimensions(tmp_path: Path) -> None:
    vectors = samples("f4", (6, 7, 5, 1, 3))
    nibabel.save(nibabel.Nifti1Image(vectors, AFFINE), tmp_path / "v.nii")
    media, target, _ = written(tmp_path / "v.nii")
    assert (media.axes, media.data.shape) == ("CZYX", (3, 5, 7, 6))
    np.testing.assert_array_equal(np.asarray(nibabel.load(target).dataobj), vectors)
    nibabel.save(nibabel.Nifti1Image(samples("i2", (6, 7, 1)), AFFINE), tmp_path / "s.nii")
    media, target, _ = written(tmp_path / "s.nii")
    assert (media.kind, media.data.shape) == ("image", (7, 6))
    assert "one slice only, which is denoised as an image" in media.notes[-1]
    assert nibabel.load(target).shape == (6, 7, 1)
    nibabel.save(nibabel.Nifti1Image(samples("f4", (3, 4, 5, 2, 2, 2)), AFFINE), tmp_path / "m.nii")
    with pytest.raises(FileFormatError, match="6 dimensions"):
        files.read(tmp_path / "m.nii")
    nibabel.save(nibabel.Nifti1Image(np.zeros((3, 4, 5), "c8"), AFFINE), tmp_path / "c.nii")
    with pytest.raises(FileFormatError, match="complex64"):
        files.read(tmp_path / "c.nii")


@pytest.mark.parametrize("name", ["a.nii", "a.nii.gz"])
def test_truncated_and_foreign_nifti(tmp_path: Path, name: str) -> None:
    nifti(tmp_path / name, samples("i2", (6, 7, 5)))
    whole = (tmp_path / name).read_bytes()
    for size in [1, 3, 100, 170, 200, 347, 360, len(whole) - 20]:
        (tmp_path / name).write_bytes(whole[:size])
        with pytest.raises(FileFormatError, match="export it again"):
            files.read(tmp_path / name)
    (tmp_path / name).write_bytes(b"no scan at all\n" * 60)
    with pytest.raises(FileFormatError, match="export it again"):
        files.read(tmp_path / name)


def test_headers_that_ask_for_too_much(tmp_path: Path) -> None:
    nifti(tmp_path / "a.nii", samples("i2", (6, 7, 5)))
    whole = bytearray((tmp_path / "a.nii").read_bytes())
    large = bytes(whole[:40]) + struct.pack("<8h", 3, 30000, 30000, 30000, 1, 1, 1, 1) + bytes(whole[56:])
    (tmp_path / "b.nii.gz").write_bytes(gzip.compress(large))
    with pytest.raises((FileFormatError, MemoryError), match=r"declares"):
        files.read(tmp_path / "b.nii.gz")
    far = bytes(whole[:108]) + struct.pack("<f", 1e30) + bytes(whole[112:])
    (tmp_path / "c.nii").write_bytes(far)
    with pytest.raises(FileFormatError, match=r"a header of 1e\+30 bytes"):
        files.read(tmp_path / "c.nii")


def test_without_nibabel_the_remedy_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nifti(tmp_path / "a.nii", samples("i2", (6, 7, 5)))
    monkeypatch.setitem(sys.modules, "nibabel", None)
    with pytest.raises(FileFormatError, match=r"nibabel.*pip install 'nlflow\[volumes\]'"):
        files.read(tmp_path / "a.nii")


# --- OME-Zarr --------------------------------------------------------------------------------------------------------


def ngff(path: Path, data: Any, version: str, *, levels: int = 1, labels: bool = False, **more: Any) -> dict[str, Any]:
    """Write an image by the words of the specification."""
    form = 2 if version == "0.4" else 3
    group = zarr.open_group(path, mode="w", zarr_format=form)
    datasets = []
    for level in range(levels):
        part = data[..., :: 2**level, :: 2**level]
        keys: dict[str, Any] = {"chunk_key_encoding": {"name": "v2", "separator": "/"}} if form == 2 else {}
        array = group.create_array(f"scale{level}", shape=part.shape, dtype=part.dtype, chunks=part.shape, **keys)
        array[...] = part
        scale = [2.0, 1.0, 0.5, 0.2 * 2**level, 0.2 * 2**level]
        transforms = [{"type": "scale", "scale": scale}, {"type": "translation", "translation": [0, 0, 5.0, 1.0, 2.0]}]
        datasets.append({"path": f"scale{level}", "coordinateTransformations": transforms})
    axes = [{"name": "t", "type": "time", "unit": "second"}, {"name": "c", "type": "channel"}]
    axes += [{"name": name, "type": "space", "unit": "micrometer"} for name in "zyx"]
    said: dict[str, Any] = {"multiscales": [{"name": "cells", "axes": axes, "datasets": datasets, "type": "gaussian"}],
                            "omero": {"channels": [{"label": "GFP", "color": "00FF00"}] * data.shape[1]}}  # fmt: skip
    if form == 2:
        said["multiscales"][0]["version"] = "0.4"
    attributes = (said if form == 2 else {"ome": {"version": "0.5", **said}}) | more
    group.attrs.put(attributes)
    if labels:
        group.create_group("labels")
    return attributes


@pytest.mark.parametrize("version", ["0.4", "0.5"])
@pytest.mark.parametrize("dtype", ["u1", "u2", "i2", "f4", "u8"])
def test_ngff_comes_back_as_it_was(tmp_path: Path, version: str, dtype: str) -> None:
    data = samples(dtype, (2, 2, 3, 8, 10)) // (2**12 if dtype == "u8" else 1)  # what float64 holds
    before = ngff(tmp_path / "a.zarr", data, version, mine={"note": "stays"})
    media, target, notes = written(tmp_path / "a.zarr")
    assert (media.kind, media.axes, media.channel_axis, notes) == ("volume", "TCZYX", 1, ())
    assert media.spacing == (0.5, 0.2, 0.2)
    assert media.scale["T"] == (2.0, "s")
    np.testing.assert_array_equal(media.data, data)
    after = zarr.open_group(target, mode="r")
    assert after.metadata.zarr_format == (2 if version == "0.4" else 3)
    assert dict(after.attrs) == before
    np.testing.assert_array_equal(after["scale0"][...], data)
    assert after["scale0"].dtype == np.dtype(dtype)
    assert (target / ("scale0/0/0/0/0/0" if version == "0.4" else "scale0/c/0/0/0/0/0")).is_file()


def test_levels_and_labels_are_left_out_and_named(tmp_path: Path) -> None:
    data = samples("u2", (1, 1, 3, 8, 10))
    ngff(tmp_path / "a.ome.zarr", data, "0.5", levels=3, labels=True)
    media, target, _ = written(tmp_path / "a.ome.zarr")
    assert media.axes == "ZYX"
    assert "the 2 smaller level(s) of its pyramid and the labels are left out" in media.notes[0]
    after = zarr.open_group(target, mode="r")
    assert [one["path"] for one in after.attrs["ome"]["multiscales"][0]["datasets"]] == ["scale0"]
    assert after["scale0"].shape == data.shape


def test_a_store_of_bioformats2raw_a_plate_and_an_array(tmp_path: Path) -> None:
    data = samples("u2", (1, 1, 3, 8, 10))
    root = zarr.open_group(tmp_path / "a.zarr", mode="w", zarr_format=2)
    root.attrs.put({"bioformats2raw.layout": 3})
    ngff(tmp_path / "a.zarr" / "0", data, "0.4")
    media = files.read(tmp_path / "a.zarr")
    np.testing.assert_array_equal(media.data, data[0, 0])
    assert "what lies around the image" in media.notes[0]
    ngff(tmp_path / "a.zarr" / "1", data, "0.4")
    with pytest.raises(FileFormatError, match=r"2 images \(0, 1\).*name one of the folders"):
        files.read(tmp_path / "a.zarr")
    zarr.open_group(tmp_path / "p.zarr", mode="w").attrs.put({"ome": {"plate": {}}})
    with pytest.raises(FileFormatError, match="a plate of many images"):
        files.read(tmp_path / "p.zarr")
    zarr.save_array(tmp_path / "plain.zarr", data[0, 0])
    with pytest.raises(InputError, match="give --axes"):
        files.read(tmp_path / "plain.zarr")
    assert files.read(tmp_path / "plain.zarr", axes="TYX").kind == "clip"
    named = zarr.create_array(tmp_path / "n.zarr", shape=(3, 8, 10), dtype="u2", dimension_names=("z", "y", "x"))
    named[...] = data[0, 0]
    assert files.read(tmp_path / "n.zarr").axes == "ZYX"


@pytest.mark.parametrize("version", ["0.4", "0.5"])
def test_an_array_has_the_axes_and_scales_of_its_group(tmp_path: Path, version: str) -> None:
    data = samples("u2", (2, 2, 3, 8, 10))
    ngff(tmp_path / "a.zarr", data, version, levels=2)
    for name in ("zarr.json", ".zattrs"):  # a name of an array that is read by itself
        if (about := tmp_path / "a.zarr" / name).is_file():
            about.write_text(about.read_text().replace('"scale1"', '"small.zarr"'))
    array = (tmp_path / "a.zarr" / "scale1").rename(tmp_path / "a.zarr" / "small.zarr")
    media = files.read(array)
    assert (media.kind, media.axes, media.spacing, media.scale["T"]) == ("volume", "TCZYX", (0.5, 0.4, 0.4), (2.0, "s"))
    np.testing.assert_array_equal(media.data, data[..., ::2, ::2])


@pytest.mark.parametrize(("scale", "spacing"), [([5, 1, 1], (5, 1, 1)), ([1, 1, 1], None)])
def test_scales_without_units_are_distances_unless_all_are_1(
    tmp_path: Path, scale: list[float], spacing: tuple[float, ...] | None
) -> None:
    ngff(tmp_path / "a.zarr", samples("u2", (1, 1, 3, 8, 10)), "0.5")
    about = json.loads((tmp_path / "a.zarr" / "zarr.json").read_text())
    multiscale = about["attributes"]["ome"]["multiscales"][0]
    for axis in multiscale["axes"]:
        axis.pop("unit", None)
    multiscale["datasets"][0]["coordinateTransformations"] = [{"type": "scale", "scale": [1, 1, *scale]}]
    (tmp_path / "a.zarr" / "zarr.json").write_text(json.dumps(about))
    assert files.read(tmp_path / "a.zarr").spacing == spacing


def test_stores_that_are_refused(tmp_path: Path) -> None:
    ngff(tmp_path / "a.zarr", samples("u2", (1, 1, 3, 8, 10)), "0.5")
    about = json.loads((tmp_path / "a.zarr" / "zarr.json").read_text())
    image = about["attributes"]["ome"]["multiscales"][0]
    for change, message in (
        ({"axes": image["axes"][1:]}, "4 axes for 5 dimensions"),
        ({"datasets": []}, "multiscales without datasets that have a path"),
        ({"datasets": ["scale0"]}, "multiscales without datasets that have a path"),
        ({"datasets": [{"path": "/etc"}]}, "no array '/etc', which its metadata name as the first level"),
        ({"datasets": [{"path": ""}]}, "no array ''"),
        (
            {"datasets": [image["datasets"][0] | {"coordinateTransformations": [{"type": "scale", "scale": [1]}]}]},
            "a scale of 1 numbers for 5 axes",
        ),
        ({"axes": 5}, r"damaged or foreign file \(its parts contradict each other\)"),
        ({"datasets": [{"path": "../other"}]}, "the path '../other'"),
        ({"datasets": [{"path": "gone"}]}, "no array 'gone'"),
    ):
        about["attributes"]["ome"]["multiscales"] = [image | change]
        about.pop("consolidated_metadata", None)
        (tmp_path / "a.zarr" / "zarr.json").write_text(json.dumps(about))
        with pytest.raises(FileFormatError, match=message):
            files.read(tmp_path / "a.zarr")
    (tmp_path / "empty.zarr").mkdir()
    with pytest.raises(FileFormatError, match=r"a folder without zarr\.json"):
        files.read(tmp_path / "empty.zarr")
    (tmp_path / "file.zarr").write_text("x")
    with pytest.raises(FileFormatError, match="got a file, expected a folder"):
        files.read(tmp_path / "file.zarr")
    old = zarr.create_array(tmp_path / "p.zarr", shape=(3, 4), dtype="u2", zarr_format=2)
    old[...] = 1
    meta = json.loads((tmp_path / "p.zarr" / ".zarray").read_text())
    meta["compressor"] = {"id": "pickle"}
    (tmp_path / "p.zarr" / ".zarray").write_text(json.dumps(meta))
    with pytest.raises(FileFormatError):
        files.read(tmp_path / "p.zarr")


def test_only_stores_are_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ngff(tmp_path / "a.zarr", samples("u2", (1, 1, 3, 8, 10)), "0.5")
    media = files.read(tmp_path / "a.zarr")
    (tmp_path / "mine.zarr").mkdir()
    (tmp_path / "mine.zarr" / "thesis.txt").write_text("all of it")
    with pytest.raises(FileFormatError, match="a folder that is no zarr store"):
        files.write(tmp_path / "mine.zarr", media.data, media)
    with pytest.raises(FileFormatError, match="a folder that holds the input"):
        files.write(tmp_path / "a.zarr", media.data, media)
    files.write(tmp_path / "b.zarr", media.data, media)
    files.write(tmp_path / "b.zarr", media.data // 2, media)
    np.testing.assert_array_equal(files.read(tmp_path / "b.zarr").data, media.data // 2)
    before = sorted(tmp_path.iterdir())

    def failing(*_: Any, **__: Any) -> None:
        raise RuntimeError("halfway")

    monkeypatch.setattr(zarr.Group, "create_array", failing)
    with pytest.raises(FileFormatError, match="halfway"):
        files.write(tmp_path / "b.zarr", media.data, media)
    monkeypatch.undo()
    assert sorted(tmp_path.iterdir()) == before
    np.testing.assert_array_equal(files.read(tmp_path / "b.zarr").data, media.data // 2)


def test_a_store_stays_when_the_new_one_cannot_take_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ngff(tmp_path / "a.zarr", samples("u2", (1, 1, 3, 8, 10)), "0.5")
    media = files.read(tmp_path / "a.zarr")
    files.write(tmp_path / "b.zarr", media.data, media)
    replace, calls = Path.replace, []

    def failing(path: Path, target: Any) -> Any:
        calls.append(path)
        if len(calls) == 2:  # the old one has gone aside
            raise OSError(28, "No space left on device")
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", failing)
    with pytest.raises(FileFormatError, match="No space left on device"):
        files.write(tmp_path / "b.zarr", media.data // 2, media)
    monkeypatch.undo()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.zarr", "b.zarr"]
    np.testing.assert_array_equal(files.read(tmp_path / "b.zarr").data, media.data)


def test_without_zarr_the_remedy_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.zarr").mkdir()
    (tmp_path / "a.zarr" / "zarr.json").write_text("{}")
    monkeypatch.setenv("NLFLOW_DECODE", "here")
    monkeypatch.setitem(sys.modules, "zarr", None)
    with pytest.raises(FileFormatError, match=r"zarr.*pip install 'nlflow\[zarr\]'"):
        files.read(tmp_path / "a.zarr")


# --- from one to the other -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["b.nii.gz", "b.ome.zarr", "b.tif", "b.npy"])
@pytest.mark.parametrize("source", ["a.nii", "a.zarr"])
def test_conversions_keep_samples_and_distances(tmp_path: Path, source: str, target: str) -> None:
    data = samples("u2", (1, 1, 4, 6, 8))
    if source == "a.nii":
        image = nibabel.Nifti1Image(data[0, 0].T, np.diag([0.2, 0.2, 0.5, 1]))
        image.header.set_xyzt_units("micron")
        nibabel.save(image, tmp_path / source)
    else:
        ngff(tmp_path / source, data, "0.4")
    _, place, notes = written(tmp_path / source, target)
    found = files.read(place, axes="ZYX")
    np.testing.assert_array_equal(found.data, data[0, 0])
    if target != "b.npy":
        assert {found.scale[a][1] for a in "ZYX"} == {"µm"}
        assert [found.scale[a][0] for a in "ZYX"] == pytest.approx([0.5, 0.2, 0.2])
    else:
        assert "that its axes are ZYX and how far apart samples are" in notes[0]
    same = {"a.nii": "b.nii.gz", "a.zarr": "b.ome.zarr"}[source] == target
    assert same == (not notes)


@pytest.mark.parametrize("name", ["b.png", "b.wav", "b.csv", "b.mp4"])
def test_formats_that_hold_no_volume(tmp_path: Path, name: str) -> None:
    nifti(tmp_path / "a.nii", samples("i2", (6, 7, 5)))
    with pytest.raises(FileFormatError, match=r"cannot hold a volume; name the output \.tif"):
        files.check_output(tmp_path / name, files.read(tmp_path / "a.nii"))


def test_pictures_are_no_stacks(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros((5, 6), np.float32))
    for name in ("b.nii", "b.zarr", "b.mp4"):
        with pytest.raises(FileFormatError, match="cannot hold an image"):
            files.check_output(tmp_path / name, files.read(tmp_path / "a.npy"))


# --- names of channels, of pictures in a folder ----------------------------------------------------------------------


def test_names_of_channels_go_from_ome_tiff_to_ome_zarr_and_back(tmp_path: Path) -> None:
    data = np.random.default_rng(0).integers(0, 4000, (2, 3, 20, 24), dtype=np.uint16)
    names = ["DAPI", "GFP", "µ <&>"]
    tifffile.imwrite(tmp_path / "a.ome.tif", data, ome=True, metadata={"axes": "ZCYX", "Channel": {"Name": names}})
    first = files.read(tmp_path / "a.ome.tif")
    files.write(tmp_path / "b.ome.zarr", first.data, first)
    omero = zarr.open(tmp_path / "b.ome.zarr", mode="r").attrs["ome"]["omero"]
    assert [one["label"] for one in omero["channels"]] == names
    assert omero["channels"][0]["window"] == {"min": data.min(), "max": data.max(), "start": data.min(),
                                              "end": data.max()}  # fmt: skip
    second = files.read(tmp_path / "b.ome.zarr")
    files.write(tmp_path / "c.ome.tif", second.data, second)
    with tifffile.TiffFile(tmp_path / "c.ome.tif") as tif:
        found = ElementTree.fromstring(tif.ome_metadata).findall(".//{*}Channel")
    assert [one.get("Name") for one in found] == names


def test_pictures_are_placed_by_their_names(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    data = np.random.default_rng(0).integers(0, 60000, (2, 3, 11, 12, 14), dtype=np.uint16)
    for t, c, z in np.ndindex(2, 3, 11):
        tifffile.imwrite(folder / f"cells-2_channel{c}_Z{z}_t00{t + 5}.tif", data[t, c, z])
    media = files.read(folder, axes="TCZYX")
    assert media.axes == "TCZYX"
    np.testing.assert_array_equal(media.data, data)
    np.testing.assert_array_equal(files.read(folder, axes="ZTCYX").data, data.transpose(2, 0, 1, 3, 4))
    files.write(tmp_path / "out", media.data, media)
    for t, c, z in np.ndindex(2, 3, 11):
        again = tifffile.imread(tmp_path / f"out/cells-2_channel{c}_Z{z}_t00{t + 5}.tif")
        np.testing.assert_array_equal(again, data[t, c, z])
    (folder / "cells-2_channel1_Z3_t005.tif").rename(tmp_path / "gone.tif")
    with pytest.raises(FileFormatError, match=r"got 65 of 66 pictures, the first that lacks is t5_c1_z3"):
        files.read(folder, axes="TCZYX")
    tifffile.imwrite(folder / "cells_t5_c0_z1.tif", data[0, 0, 0])
    with pytest.raises(FileFormatError, match=r"got the place of cells.*expected one picture for each"):
        files.read(folder, axes="TCZYX")
    (tmp_path / "colours").mkdir()
    tifffile.imwrite(tmp_path / "colours/cells_t5.tif", data[0, 0, 0])
    with pytest.raises(FileFormatError, match=r"got a name that says t, expected names with t, z .* such as t0_z0"):
        files.read(tmp_path / "colours", axes="TZYX")
    (tmp_path / "colours/cells_t5.tif").unlink()
    for c, z in np.ndindex(2, 2):
        tifffile.imwrite(tmp_path / f"colours/c{c}z{z}.tif", data[0, 0, :3].T.astype("u1"), photometric="rgb")
    with pytest.raises(FileFormatError, match="pictures in colours whose names say a channel"):
        files.read(tmp_path / "colours", axes="CZYX")


@pytest.mark.parametrize(
    "words", [{"compression": "zlib"}, {"tile": (16, 16)}, {"compression": "lzw", "tile": (16, 16)}]
)
@pytest.mark.parametrize("shape", [(32, 48), (3, 32, 48)])
def test_packing_that_is_not_kept_is_told(words: dict[str, Any], shape: tuple[int, ...], tmp_path: Path) -> None:
    data = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    tifffile.imwrite(
        tmp_path / "a.tif", data, metadata={"axes": "ZYX"[-len(shape) :]}, photometric="minisblack", **words
    )
    media = files.read(tmp_path / "a.tif")
    notes = [note for note in files.check_output(tmp_path / "b.tif", media) if "in strips without compression" in note]
    assert len(notes) == 1
    assert ("tiles of 16 x 16" in notes[0], "compression" in notes[0].split("input")[1]) == (
        "tile" in words, "compression" in words)  # fmt: skip
    tifffile.imwrite(tmp_path / "plain.tif", data, metadata={"axes": "ZYX"[-len(shape) :]}, photometric="minisblack")
    assert not any(
        "strips" in note for note in files.check_output(tmp_path / "b.tif", files.read(tmp_path / "plain.tif"))
    )


def test_positions_are_told_as_such(tmp_path: Path) -> None:
    with tifffile.TiffWriter(tmp_path / "a.ome.tif", ome=True) as tif:
        for _ in range(2):
            tif.write(np.zeros((7, 20, 24), np.uint16), metadata={"axes": "ZYX"})
    with pytest.raises(FileFormatError, match=r"got 2 images of 7 x 20 x 24 uint16 each, such as positions.*save one"):
        files.read(tmp_path / "a.ome.tif")
