"""Files of several arrays: NPZ, MAT and HDF5, against what NumPy, SciPy and h5py read and write."""

from __future__ import annotations

import io
import struct
import warnings
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.io

from nlflow.desk import files
from nlflow.errors import FileFormatError, InputError
from tests.desk.test_files import samples

REAL = np.random.default_rng(2).normal(size=(6, 7))
INTEGERS = ("i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8")


def written(path: Path, media: files.Media, data: Any = None) -> tuple[str, ...]:
    notes = files.check_output(path, media)
    files.write(path, media.data if data is None else data, media)
    return notes


# --- which array -----------------------------------------------------------------------------------------------------


def _save(path: Path, arrays: dict[str, Any]) -> None:
    if path.suffix == ".npz":
        np.savez(path, **arrays)
    elif path.suffix == ".mat":
        scipy.io.savemat(path, arrays)
    else:
        h5py = pytest.importorskip("h5py")
        with h5py.File(path, "w") as file:
            for name, array in arrays.items():
                file[name] = array


@pytest.mark.parametrize("suffix", [".npz", ".mat", ".h5"])
def test_one_of_several_arrays(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a{suffix}"
    slash = "/" if suffix == ".h5" else ""
    _save(path, {"only": REAL})
    media = files.read(path)
    np.testing.assert_array_equal(media.data, REAL)
    assert (media.kind, media.notes, media.format) == ("image", (), files.EXTENSIONS[suffix])

    _save(path, {"image": REAL, "sigma": 3.0})  # a single number is not what is meant
    media = files.read(path)
    np.testing.assert_array_equal(media.data, REAL)
    assert media.notes == (f"{path}: the array {slash}image is read, one of 2",)

    _save(path, {"noisy": REAL, "clean": 2 * REAL.astype(np.float32)})
    np.testing.assert_array_equal(files.read(path, array="clean").data, 2 * REAL.astype(np.float32))
    expected = rf"2 arrays: .*{slash}noisy \(6 x 7 float64\).*; say: nonlocal denoise {path} OUT --array {slash}"
    with pytest.raises(FileFormatError, match=expected):
        files.read(path)
    with pytest.raises(FileFormatError, match=rf"no array '{slash}other'; it holds .*{slash}noisy.*correct --array"):
        files.read(path, array="other")


def test_an_array_of_a_file_without_names(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", REAL)
    with pytest.raises(
        InputError, match=r"array: got 'x' for .*a\.npy, expected a file of several arrays; leave it out"
    ):
        files.read(tmp_path / "a.npy", array="x")


@pytest.mark.parametrize("suffix", [".npz", ".mat", ".h5"])
def test_axes_and_channels_as_of_npy(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a{suffix}"
    stack = samples("u2", (3, 6, 7))
    _save(path, {"a": stack})
    with pytest.raises(InputError, match="--axes ZYX"):
        files.read(path)
    media = files.read(path, axes="ZYX")
    assert (media.kind, media.axes) == ("volume", "ZYX")
    written(tmp_path / f"b{suffix}", media)
    np.testing.assert_array_equal(files.read(tmp_path / f"b{suffix}", axes="ZYX").data, stack)
    assert files.read(path, channel_axis=0).channel_axis == 0


# --- what is written -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_npz_keeps_the_others(tmp_path: Path, save: Any) -> None:
    path, out = tmp_path / "a.npz", tmp_path / "b.npz"
    others: dict[str, Any] = {"label": np.array(["a", "b"]), "count": np.arange(5), "clean": REAL}
    save(path, noisy=samples("u1", (6, 7)), **others)
    media = files.read(path, array="noisy")
    assert written(out, media, media.data + 0.25) == ()
    with np.load(out, allow_pickle=False) as found:
        assert sorted(found) == ["clean", "count", "label", "noisy"]
        np.testing.assert_array_equal(found["noisy"], media.data + 0.25)  # all digits, as of NPY
        for name, array in others.items():
            np.testing.assert_array_equal(found[name], array)
    assert written(tmp_path / "b.npy", media) == (f"{tmp_path / 'b.npy'}: the other arrays are left out",)


def _variables() -> dict[str, Any]:
    found: dict[str, Any] = {f"x{dtype}": samples(dtype, (4, 5)) for dtype in (*INTEGERS, "f4", "f8")}
    return found | {
        "small": np.array([[1.0, 2.0]]), "one": 7.0, "row": np.arange(5.0), "cube": samples("f8", (2, 3, 4)),
        "small_as_stored": np.arange(12.0).reshape(3, 4), "logical": REAL > 0, "text": "words", "struct": {"a": 1.0},
        "cell": np.array([1, "b"], object), "complex": REAL + 1j, "sparse": scipy.sparse.eye(3, format="csc"),
    }  # fmt: skip


def _loaded(path: Path) -> dict[str, Any]:
    with warnings.catch_warnings():  # of SciPy 1.18; in which form a sparse matrix comes does not matter here
        warnings.filterwarnings("ignore", "The default value for `spmatrix`", DeprecationWarning)
        return dict(scipy.io.loadmat(path))


@pytest.mark.parametrize("packed", [False, True])
def test_mat_as_scipy_reads_it(tmp_path: Path, packed: bool) -> None:
    path, out = tmp_path / "a.mat", tmp_path / "b.mat"
    scipy.io.savemat(path, _variables(), do_compression=packed)
    expected = _loaded(path)
    for name in [*(f"x{dtype}" for dtype in (*INTEGERS, "f4", "f8")), "small", "row", "cube", "logical"]:
        media = files.read(path, array=name, axes="ZYX" if name == "cube" else None)
        stored = expected[name]
        assert media.data.dtype == (np.dtype(bool) if name == "logical" else stored.dtype)
        np.testing.assert_array_equal(media.data.reshape(stored.shape), stored)
        assert media.kind == {"row": "signal", "small": "signal", "cube": "volume"}.get(name, "image")
        if name == "logical":
            with pytest.raises(FileFormatError, match=r"cannot hold bool samples;.*\.npy"):
                files.check_output(out, media)
            continue
        assert written(out, media, 0 * media.data) == ()
        found = _loaded(out)
        np.testing.assert_array_equal(found.pop(name), np.zeros_like(stored))
        assert found[f"x{INTEGERS[1]}" if name != "xu1" else "xi1"].dtype == np.dtype("u1" if name != "xu1" else "i1")
        assert [key for key in found if key[0] != "_"] == [key for key in expected if key[0] != "_" and key != name]
        for key in ("text", "cell", "complex", "xf8" if name != "xf8" else "xf4"):
            np.testing.assert_array_equal(found[key], expected[key])
    for name, kind in {"text": "a text", "struct": "a struct", "cell": "a cell array", "complex": "complex numbers",
                       "sparse": "a sparse matrix"}.items():  # fmt: skip
        with pytest.raises(FileFormatError, match=rf"'{name}', which holds {kind}.*cell2mat"):
            files.read(path, array=name)


@pytest.mark.parametrize("order", ["<", ">"])
def test_mat_in_any_order_of_bytes_and_small_types(tmp_path: Path, order: str) -> None:
    """By hand, as the format has it: doubles that MATLAB stores as bytes, and names of at most four letters."""
    values = np.arange(6, dtype="u1").reshape(2, 3, order="F")
    body = struct.pack(f"{order}4I", 6, 8, 6, 0) + struct.pack(f"{order}2I2i", 5, 8, 2, 3)
    body += struct.pack(f"{order}I", 1 << 16 | 1) + b"a\0\0\0"
    body += struct.pack(f"{order}2I", 2, 6) + values.tobytes(order="F") + bytes(2)
    head = b"MATLAB 5.0 MAT-file".ljust(124) + struct.pack(f"{order}H", 0x0100) + (b"IM" if order == "<" else b"MI")
    path = tmp_path / "a.mat"
    path.write_bytes(head + struct.pack(f"{order}2I", 14, len(body)) + body)
    np.testing.assert_array_equal(scipy.io.loadmat(path)["a"], values)
    media = files.read(path)
    np.testing.assert_array_equal(media.data, values.astype(float))
    assert media.data.dtype == np.float64
    if order == ">":
        with pytest.raises(FileFormatError, match=r"the other byte order.*\.npy"):
            files.check_output(tmp_path / "b.mat", media)
    whole = path.read_bytes()
    path.write_bytes(whole[:-6] if order == "<" else whole.replace(struct.pack(">2I", 2, 6), struct.pack(">2I", 2, 5)))
    with pytest.raises(FileFormatError, match="damaged"):
        files.read(path)


def test_mat_of_level_4_and_of_objects(tmp_path: Path) -> None:
    path = tmp_path / "a.mat"
    scipy.io.savemat(path, {"a": REAL}, format="4")
    with pytest.raises(FileFormatError, match=r"no MAT file of level 5 or 7\.3.*savemat"):
        files.read(path)
    scipy.io.savemat(path, {"c": np.array([1, "b"], object)})
    with pytest.raises(FileFormatError, match=r"no array of numbers \(c \(1 x 2 a cell array\)\).*cell2mat"):
        files.read(path)
    scipy.io.savemat(path, {"a": REAL})
    content = bytearray(path.read_bytes())
    content[116:124] = struct.pack("<Q", 4096)  # where objects are kept
    path.write_bytes(content)
    with pytest.raises(FileFormatError, match=r"a MAT file with objects.*\.npy"):
        files.check_output(tmp_path / "b.mat", files.read(path))


def test_mat_of_version_7_3(tmp_path: Path) -> None:
    """As MATLAB writes it: an HDF5 file behind 512 bytes, arrays in the order of columns, classes as attributes."""
    h5py = pytest.importorskip("h5py")
    path, out = tmp_path / "a.mat", tmp_path / "b.mat"
    with h5py.File(path, "w", userblock_size=512) as file:
        for name, array, kind in (("image", REAL, "double"), ("text", np.zeros((3, 1), "u2"), "char"),
                                  ("flags", (REAL > 0).astype("u1"), "logical")):  # fmt: skip
            file[name] = array.T
            file[name].attrs["MATLAB_class"] = np.bytes_(kind)
        file["#refs#/a"] = REAL
    with path.open("r+b") as stream:
        stream.write(b"MATLAB 7.3 MAT-file".ljust(124) + struct.pack("<H2s", 0x0200, b"IM"))
    media = files.read(path, array="image")
    np.testing.assert_array_equal(media.data, REAL)
    assert media.notes == (f"{path}: the array image is read, one of 3",)
    assert files.read(path, array="flags").data.dtype == np.bool_
    with pytest.raises(FileFormatError, match="'text', which holds a char"):
        files.read(path, array="text")
    assert written(out, media, media.data + 1) == (f"{out}: the other arrays are left out",)
    np.testing.assert_array_equal(scipy.io.loadmat(out)["image"], REAL + 1)
    path.rename(tmp_path / "a.h5")  # its content says what it is
    assert files.read(tmp_path / "a.h5", array="image").format == "mat"


def test_hdf5_by_path(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    path, out = tmp_path / "a.h5", tmp_path / "b.h5"
    counts = samples("u2", (6, 7))
    with h5py.File(path, "w") as file:
        file.create_dataset("scan/raw", data=counts, chunks=(4, 4), compression="gzip", shuffle=True, fletcher32=True)
        file["scan/raw"].attrs.update({"unit": "counts", "element_size_um": [0.5, 0.2]})
        file["scan/raw"].attrs["place"] = file["scan"].ref
        file["scan/mean"] = REAL
        file["soft"] = h5py.SoftLink("/scan/raw")
        file["loop"] = file["scan"]
        file["scan/up"] = file["/"]
        file["elsewhere"] = h5py.ExternalLink("/etc/hostname", "/")
    for name in ("/scan/raw", "scan/raw"):
        media = files.read(path, array=name)
        np.testing.assert_array_equal(media.data, counts)
        assert media.data.dtype == np.uint16
    with pytest.raises(FileFormatError, match="it holds"):
        files.read(path, array="/soft")  # links are not followed: they may lead out of the file
    assert written(out, media, media.data / 2) == (f"{out}: the other arrays are left out",)
    with h5py.File(out) as file:
        assert list(file) == ["scan"]
        np.testing.assert_array_equal(file["scan/raw"][()], np.rint(counts / 2))
        assert file["scan/raw"].dtype == np.uint16
        assert file["scan/raw"].attrs["unit"] == "counts"
        np.testing.assert_array_equal(file["scan/raw"].attrs["element_size_um"], [0.5, 0.2])
        assert "place" not in file["scan/raw"].attrs


def test_hdf5_out_of_the_file_is_refused(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    path, other = tmp_path / "a.h5", tmp_path / "other"
    other.write_bytes(REAL.tobytes())
    with h5py.File(path, "w") as file:
        file.create_dataset("a", shape=REAL.shape, dtype="f8", external=[(str(other), 0, REAL.nbytes)])
    with pytest.raises(FileFormatError, match="/a, whose values are in other files"):
        files.read(path)
    with h5py.File(path, "w") as file:
        layout = h5py.VirtualLayout(shape=REAL.shape, dtype="f8")
        layout[:] = h5py.VirtualSource(str(other), "a", shape=REAL.shape)
        file.create_virtual_dataset("a", layout)
    with pytest.raises(FileFormatError, match="/a, whose values are in other files"):
        files.read(path)


@pytest.mark.parametrize("suffix", [".npz", ".mat", ".h5"])
def test_a_picture_as_an_array(tmp_path: Path, suffix: str) -> None:
    if suffix == ".h5":
        pytest.importorskip("h5py")
    media = files.Media(tmp_path / "in.png", "png", "image", samples("u1", (5, 6, 3)), channel_axis=2)
    written(tmp_path / f"a{suffix}", media)
    again = files.read(tmp_path / f"a{suffix}")
    np.testing.assert_array_equal(again.data, media.data)
    assert again.extras["array"]["name"] == ("/data" if suffix == ".h5" else "data")
    if suffix == ".mat":  # names that MATLAB has no place for
        again = files.Media(
            tmp_path / "a.h5", "hdf5", "image", REAL, extras={"array": {"name": "/g/2 b", "others": False}}
        )
        written(tmp_path / "b.mat", again)
        np.testing.assert_array_equal(scipy.io.loadmat(tmp_path / "b.mat")["x2_b"], REAL)


def test_h5py_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.h5").write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(100))
    monkeypatch.setenv("NLFLOW_DECODE", "here")
    monkeypatch.setitem(__import__("sys").modules, "h5py", None)
    with pytest.raises(FileFormatError, match=r"h5py, which is not installed.*nlflow\[hdf5\]"):
        files.read(tmp_path / "a.h5")


# --- hostile ---------------------------------------------------------------------------------------------------------


def _zip(members: dict[str, bytes], method: int = zipfile.ZIP_STORED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def test_archives_that_are_refused(tmp_path: Path) -> None:
    path, buffer = tmp_path / "a.npz", io.BytesIO()
    np.save(buffer, REAL)
    array = buffer.getvalue()
    for content, message in (
        (_zip({"a.npy": array}, zipfile.ZIP_LZMA), "another compression"),
        (_zip({"a.npy": b"words"}), r"no array of numbers \(a \(one value damaged\)\)"),
        (_zip({"a.npy": array[:-8]}), "damaged"),
        (_zip({"a.npy": array + b"x"}), "more values"),
        (_zip({"a.npy": array}).replace(b"a.npy", b"b.npy", 1), "damaged"),
        (_zip({"a.npy": array}).replace(array[-8:], bytes(8)), "damaged"),
        (_zip({"a.txt": array}), "a ZIP archive.*unzip"),
        (_zip({}), "it is empty"),
    ):
        path.write_bytes(content)
        with pytest.raises(FileFormatError, match=message):
            files.read(path)
    big = np.lib.format.header_data_from_array_1_0(np.zeros(1, np.uint8)) | {"shape": (10**9,)}
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, big)
    content = bytearray(_zip({"a.npy": header.getvalue() + bytes(10**5)}, zipfile.ZIP_DEFLATED))
    for mark, place in ((b"PK\1\2", 24), (b"PK\3\4", 22)):  # the sizes that the archive tells of the member
        at = content.index(mark) + place
        content[at : at + 4] = struct.pack("<I", 10**9 + len(header.getvalue()))
    path.write_bytes(content)
    with pytest.raises(FileFormatError, match=r"declares 953\.7 MiB"):
        files.read(path)


def test_a_mat_file_that_unfolds(tmp_path: Path) -> None:
    from tests.hostile import mat

    path = tmp_path / "a.mat"
    path.write_bytes(mat((4, 4), 128, REAL.tobytes()[:128], packed=True))
    assert files.read(path).data.shape == (4, 4)
    path.write_bytes(mat((10**4, 10**4), 8 * 10**8, bytes(100), packed=True))
    with pytest.raises(FileFormatError, match=r"declares 762\.9 MiB"):
        files.read(path)
    element = zlib.compress(zlib.compress(b"x"))
    path.write_bytes(mat((4, 4), 128, b"")[:128] + struct.pack("<2I", 15, len(element)) + element)
    with pytest.raises(FileFormatError, match=r"damaged|packed element"):
        files.read(path)


@pytest.mark.parametrize(
    ("words", "message"), [({"axes": 5}, "axes: got 5, expected one letter"), ({"spacing": 5}, "spacing: got")]
)
def test_axes_and_spacing_are_letters_and_numbers(words: Any, message: str, tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros((3, 4, 5)))
    with pytest.raises(InputError, match=f"^{message}"):
        files.read(tmp_path / "a.npy", **words)


def test_a_folder_of_pictures_has_no_array_of_a_name(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="array: got 'x'"):
        files.read(tmp_path, axes="ZYX", array="x")
