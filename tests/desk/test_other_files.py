"""What a file says of other files is not followed: its reader reads it alone, or refuses it by name."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile

from nlflow.desk import files
from nlflow.desk.formats.tiff_pages import opened
from nlflow.errors import FileFormatError
from tests.commands import run

SOURCES = Path(files.__file__).parents[1]
SECRET = np.arange(64 * 64, dtype=np.uint8).reshape(64, 64)
_UUID = "urn:uuid:00000000-0000-0000-0000-00000000000"


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    """Return somebody's own picture, beside the folder of what was downloaded."""
    (tmp_path / "private").mkdir()
    (tmp_path / "download").mkdir()
    tifffile.imwrite(tmp_path / "private" / "secret.tif", SECRET)
    return tmp_path / "private" / "secret.tif"


def part_of_a_set(path: Path, other: str, planes: int) -> Path:
    """Write an OME-TIFF of one page, of whose planes the last is said to be in another file."""
    own = f'<TiffData IFD="0" FirstZ="0" PlaneCount="1"><UUID FileName="{path.name}">{_UUID}1</UUID></TiffData>'
    text = f"""<?xml version="1.0"?><OME xmlns="http://www.openmicroscopy.org/Schemas/OME/2016-06" UUID="{_UUID}1">
<Image ID="Image:0"><Pixels ID="Pixels:0" DimensionOrder="XYZCT" Type="uint8" SizeX="64" SizeY="64" SizeZ="{planes}"
SizeC="1" SizeT="1"><Channel ID="C:0" SamplesPerPixel="1"/>{own if planes > 1 else ""}<TiffData IFD="0"
FirstZ="{planes - 1}" PlaneCount="1"><UUID FileName="{other}">{_UUID}2</UUID></TiffData></Pixels></Image></OME>"""
    page = np.full((64, 64), 90, np.uint8)
    tifffile.imwrite(path, page, description=text, metadata=None, photometric="minisblack")
    return path


@pytest.mark.parametrize("planes", [1, 2])
@pytest.mark.parametrize("absolute", [True, False])
def test_parts_of_ome_are_refused_by_name(tmp_path: Path, secret: Path, planes: int, absolute: bool) -> None:
    other = str(secret) if absolute else "../private/secret.tif"
    path = part_of_a_set(tmp_path / "download" / "cells.ome.tif", other, planes)
    with pytest.raises(FileFormatError, match=r"a part of a set of files, with .*secret"):
        files.read(path)
    from nlflow.desk.on_disk import open_stack

    with pytest.raises(FileFormatError, match=r"a part of a set of files, with .*secret"):
        open_stack(path, None, None, 32, "fast")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no pipes with names")
def test_pipes_that_ome_names_are_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(FileFormatError, match="a part of a set"):
        files.read(part_of_a_set(tmp_path / "cells.ome.tif", str(tmp_path / "pipe"), 1))


def test_tiff_files_are_opened_in_one_place_and_know_no_folder(tmp_path: Path, secret: Path) -> None:
    """Stacks of Micro-Manager and NDTiff look for files of their names beside them: there is no beside."""
    calls = re.compile(r"TiffFile\(|TiffSequence|tifffile\.(imread|memmap)|tiffcomment|aszarr=")
    found = [path.name for path in SOURCES.rglob("*.py") if calls.search(path.read_text(encoding="utf-8"))]
    assert found == ["tiff_pages.py"]
    with opened(secret) as tif:
        assert not tif.filehandle.is_file
        assert not tif._multifile
        np.testing.assert_array_equal(tif.asarray(), SECRET)


def _linked(path: Path, secret: Path) -> None:
    try:
        path.symlink_to(secret)
    except OSError:
        pytest.skip("this system makes no links")


def test_chunks_of_a_store_that_are_links(tmp_path: Path, secret: Path) -> None:
    zarr = pytest.importorskip("zarr")
    pytest.importorskip("dask")
    from nlflow.desk.on_disk import open_array

    path = tmp_path / "download" / "a.zarr"
    array = zarr.create_array(path, shape=(64, 64), chunks=(64, 64), dtype="u1", compressors=None)
    array[...] = 7
    chunk = path / "c" / "0" / "0"
    chunk.replace(path / "c" / "0" / "own")
    _linked(chunk, path / "c" / "0" / "own")  # a link that stays inside is one of its own files
    assert files.read(path, axes="ZY".replace("Z", "Y").replace("YY", "YX")).data.max() == 7
    open_array(path)
    raw = tmp_path / "private" / "raw"
    raw.write_bytes(SECRET.tobytes())
    chunk.unlink()
    _linked(chunk, raw)
    for read in (files.read, open_array):
        with pytest.raises(FileFormatError, match=r"the link 'c/0/0' in it, which leads to .*raw"):
            read(path)


def test_pictures_of_a_folder_that_are_links(tmp_path: Path, secret: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tifffile.imwrite("download/a.tif", np.full((64, 64), 90, np.uint8))
    _linked(Path("download/b.tif"), secret)
    with pytest.raises(FileFormatError, match=r"the link 'b.tif' in it"):
        files.read("download", axes="TYX")
    result = run("denoise", "download", "out", "--sigma", "5", "--quality", "fast")
    assert "download: 1 link(s) to files elsewhere are left out; name them as IN" in result.stderr
    assert not Path("out/b.tif").exists()
    run("denoise", "download/b.tif", "named.tif", "--sigma", "0", "-q")
    np.testing.assert_array_equal(tifffile.imread("named.tif"), SECRET)
    Path("download/a.tif").unlink()
    result = run("denoise", "download", "none", "--sigma", "5", code=1)
    assert "1 link(s) to files elsewhere are left out; name them as IN" in result.stderr


def test_lists_of_weights_name_files_of_their_folder(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from nlflow.attention import load_model

    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    index = tmp_path / "model.safetensors.index.json"
    for name in ("../other/model.safetensors", "/etc/model.safetensors", "..\\model.safetensors", "a/../../b"):
        index.write_text(json.dumps({"metadata": {}, "weight_map": {"a": name}}))
        with pytest.raises(FileFormatError, match="expected names of files in this folder"):
            load_model(tmp_path)
    index.write_text("[]")
    with pytest.raises(FileFormatError, match="cannot be loaded"):
        load_model(tmp_path)


def test_pairs_of_nifti_are_not_followed(tmp_path: Path) -> None:
    nibabel = pytest.importorskip("nibabel")
    nibabel.save(nibabel.Nifti1Pair(np.ones((4, 5, 6), np.int16), np.eye(4)), tmp_path / "a.hdr")
    with pytest.raises(FileFormatError, match="a pair of files"):
        files.read(tmp_path / "a.hdr")
    (tmp_path / "a.hdr").replace(tmp_path / "a.nii")
    with pytest.raises(FileFormatError, match="a pair of files"):
        files.read(tmp_path / "a.nii")


@pytest.mark.parametrize("kind", ["external", "virtual", "link", "soft"])
def test_datasets_in_other_files(tmp_path: Path, kind: str) -> None:
    h5py = pytest.importorskip("h5py")
    (tmp_path / "raw").write_bytes(SECRET.tobytes())
    with h5py.File(tmp_path / "other.h5", "w") as file:
        file["d"] = SECRET
    with h5py.File(tmp_path / "a.h5", "w") as file:
        if kind == "external":
            file.create_dataset("d", (64, 64), "u1", external=[(str(tmp_path / "raw"), 0, 4096)])
        elif kind == "virtual":
            layout = h5py.VirtualLayout((64, 64), "u1")
            layout[...] = h5py.VirtualSource(str(tmp_path / "other.h5"), "d", (64, 64))
            file.create_virtual_dataset("d", layout)
        else:
            file["d"] = h5py.ExternalLink("other.h5", "d") if kind == "link" else h5py.SoftLink("/e")
    with pytest.raises(FileFormatError):
        files.read(tmp_path / "a.h5")


def _playlist(path: Path, other: str) -> dict[str, str]:
    return {
        ".m3u8": f"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\n{other}\n#EXT-X-ENDLIST\n",
        ".ffconcat": f"ffconcat version 1.0\nfile '{other}'\n",
    }


@pytest.mark.parametrize("name", ["a.mkv", "a.mp4", "a.avi", "a.webm", "a.mov"])
@pytest.mark.parametrize("kind", [".m3u8", ".ffconcat"])
def test_playlists_that_are_called_films(tmp_path: Path, name: str, kind: str) -> None:
    pytest.importorskip("av")
    (tmp_path / name).write_text(_playlist(tmp_path, "file:///etc/passwd")[kind])
    with pytest.raises(FileFormatError):
        files.read(tmp_path / name)


def test_members_of_archives_write_nowhere_else(tmp_path: Path) -> None:
    import io
    import zipfile

    stream = io.BytesIO()
    np.save(stream, SECRET)
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("../../b.npy", stream.getvalue())
    media: Any = files.read(tmp_path / "a.npz")
    (tmp_path / "deep" / "er").mkdir(parents=True)
    files.write(tmp_path / "deep" / "er" / "out.npz", media.data, media)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["a.npz", "deep", "er", "out.npz"]
