"""Small valid files of what newcomers have: other pictures, files of several arrays, a camera raw."""

from __future__ import annotations

import io
import struct
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from validation.robustness.fuzz.seeds import GREY, RGB, packed

__all__ = ["avif", "bmp", "dng", "gif", "hdf5", "mat", "matlab", "npz", "parquet", "raw", "webp", "zarr"]

REAL = (GREY / 7).astype(np.float32)


def _saved(data: Any, form: str, mode: str | None = None, **options: Any) -> bytes:
    from PIL import Image

    image, buffer = Image.fromarray(data), io.BytesIO()
    (image if mode is None else image.convert(mode)).save(buffer, format=form, **options)
    return buffer.getvalue()


def bmp() -> list[bytes]:
    """Return BMP files: grey, colours, a palette, one bit, run lengths."""
    packed = bytearray(_saved(GREY, "BMP"))
    packed[30] = 1  # the same bytes as runs of 8 bits
    return [_saved(GREY, "BMP"), _saved(RGB, "BMP"), _saved(RGB, "BMP", "P"), _saved(GREY, "BMP", "1"), bytes(packed)]


def netpbm() -> list[bytes]:
    """Return PNM files: bytes and text, 8 and 16 bits, grey, colours, bits."""
    return [_saved(GREY, "PPM"), _saved(RGB, "PPM"), _saved(GREY, "PPM", "1"), b"P2\n# words\n2 1\n900\n1 899\n",
            b"P5 2 1 900\n\0\1\3\0", b"P1\n3 1\n101\n"]  # fmt: skip


def au() -> list[bytes]:
    """Return AU files: of laws, integers, floats, with words and without a length."""
    body = bytes(range(24))
    heads = [(24, 24, 1, 8000, 1), (24, 24, 3, 44100, 2), (32, 16, 7, 1, 1), (24, 2**32 - 1, 27, 8000, 3)]
    return [b".snd" + struct.pack(">IIIII", *head) + body for head in heads]


def gif() -> list[bytes]:
    """Return GIF files: one frame, transparency, several frames with a comment."""
    from PIL import Image

    more = [Image.fromarray(255 - GREY)]
    return [_saved(GREY, "GIF"), _saved(RGB, "GIF", "P", transparency=3),
            _saved(GREY, "GIF", save_all=True, append_images=more, comment=b"words", interlace=1)]  # fmt: skip


def webp() -> list[bytes]:
    """Return WebP files: with loss and without, opacity, EXIF and a profile, several frames."""
    from PIL import Image

    both = {"exif": b"Exif\0\0II*\0\x08\0\0\0\0\0", "icc_profile": b"profile", "xmp": b"<x:xmpmeta/>"}
    return [_saved(RGB, "WEBP", quality=50), _saved(np.dstack([RGB, GREY]), "WEBP", lossless=True, exact=True, **both),
            _saved(RGB, "WEBP", save_all=True, append_images=[Image.fromarray(255 - RGB)], lossless=True)]  # fmt: skip


def avif() -> list[bytes]:
    """Return AVIF files of small pictures."""
    return [_saved(RGB, "AVIF"), _saved(np.dstack([RGB, GREY]), "AVIF", quality=90)]


def npz() -> list[bytes]:
    """Return archives of one and of several arrays, packed and not."""
    found = []
    for write, arrays in ((np.savez, {"a": REAL}), (np.savez_compressed, {"a": REAL, "sigma": np.float64(3)}),
                          (np.savez, {"a": RGB, "b": REAL})):  # fmt: skip
        buffer = io.BytesIO()
        write(buffer, **arrays)  # type: ignore[operator]
        found.append(buffer.getvalue())
    return found


def mat() -> list[bytes]:
    """Return MAT files of level 5, packed and not, with a text, a struct and complex numbers, and one of level 4."""
    from scipy.io import savemat

    found = []
    others: dict[str, Any] = {"text": "words", "struct": {"b": 1.0}, "complex": np.ones((2, 2)) * 1j}
    for options, variables in (
        ({}, {"a": REAL}), ({"do_compression": True}, {"a": REAL, **others}), ({}, {"a": GREY.astype(float), "b": RGB}),
        ({"format": "4"}, {"a": REAL}),
    ):  # fmt: skip
        buffer = io.BytesIO()
        savemat(buffer, variables, **options)  # type: ignore[arg-type, call-overload]
        found.append(buffer.getvalue())
    return found


def hdf5() -> list[bytes]:
    """Return HDF5 files: one dataset, several in groups, chunks that are packed, links out of the file."""
    import h5py

    def made(fill: Any) -> bytes:
        with h5py.File("seed", "w", driver="core", backing_store=False) as file:
            fill(file)
            file.flush()
            content: bytes = file.id.get_file_image()
        return content

    def filtered(file: Any) -> None:
        file.create_dataset("group/a", data=REAL, chunks=(4, 4), compression="gzip", shuffle=True)
        file["link"] = h5py.SoftLink("/group/a")
        file["elsewhere"] = h5py.ExternalLink("other.h5", "/a")

    def several(file: Any) -> None:
        file["a"], file["b/c"], file["text"] = GREY, REAL, "words"

    def checked(**options: Any) -> bytes:
        return made(lambda file: file.create_dataset("a", data=GREY.astype(np.int32), chunks=(3, 4), **options))

    return [made(lambda file: file.create_dataset("a", data=REAL)), made(filtered), made(several),
            checked(fletcher32=True), checked(compression="lzf"), checked(scaleoffset=0)]  # fmt: skip


def matlab() -> list[bytes]:
    """Return MAT files of version 7.3, which are HDF5: numbers, truth values, a text, a cell array."""
    import h5py

    buffer = io.BytesIO()
    with h5py.File(buffer, "w", userblock_size=512) as file:
        for name, value, kind in (("a", REAL, "single"), ("b", (GREY > 99).astype("u1"), "logical"),
                                  ("text", np.array([[119], [111]], "u2"), "char")):  # fmt: skip
            file[name] = value
            file[name].attrs["MATLAB_class"] = np.bytes_(kind)
        cells = file.create_dataset("cells", (1,), h5py.ref_dtype)
        cells[0], cells.attrs["MATLAB_class"] = file["a"].ref, np.bytes_("cell")
    head = b"MATLAB 7.3 MAT-file".ljust(124) + b"\0\2IM"
    return [head + buffer.getvalue()[128:]]


def zarr() -> list[bytes]:
    """Return zarr arrays of both versions with the usual codecs, and an OME-Zarr image, as zips of folders."""
    import zarr

    from nlflow.desk import files

    found = []
    deep = np.arange(6 * 7 * 9, dtype=np.uint16).reshape(6, 7, 9)
    with tempfile.TemporaryDirectory() as place:

        def kept(name: str) -> None:
            folder = Path(place) / name
            inside = sorted(path for path in folder.rglob("*") if path.is_file())
            found.append(packed({path.relative_to(folder).as_posix(): path.read_bytes() for path in inside}))

        codecs = zarr.codecs
        kinds: dict[str, Any] = {
            "zstd": {"compressors": codecs.ZstdCodec()}, "gzip": {"compressors": codecs.GzipCodec()},
            "blosc": {"compressors": codecs.BloscCodec(cname="lz4")}, "shards": {"shards": (6, 8, 10)},
        }  # fmt: skip
        for name, words in kinds.items():
            array = zarr.create_array(Path(place) / name, shape=deep.shape, chunks=(3, 4, 5), dtype="u2", **words)
            array[...] = deep
            kept(name)
        array = zarr.create_array(Path(place) / "two", shape=(7, 9), chunks=(4, 5), dtype="f4", zarr_format=2)
        array[...] = REAL
        kept("two")
        np.save(Path(place) / "deep.npy", deep)
        media = files.read(Path(place) / "deep.npy", axes="ZYX")
        files.write(Path(place) / "image.ome.zarr", media.data.astype(float), media)
        kept("image.ome.zarr")
    return found


def dng(mosaic: Any, *, orientation: int = 1, balance: tuple[float, ...] = (1.0, 1.0, 1.0)) -> bytes:
    """Return a camera raw with this mosaic (red and green in its first row), whose colours are those of sRGB.

    Parameters
    ----------
    mosaic : array of 16-bit integers, shape (H, W)
    orientation : int
        As EXIF counts.
    balance : tuple of float
        What white is in the camera's colours.
    """
    import tifffile

    # From XYZ to sRGB, IEC 61966-2-1, in ten thousandths.
    matrix = (32405, -15371, -4985, -9693, 18760, 416, 556, -2040, 10572)
    fractions = [part for value in matrix for part in (value, 10000)]
    white = [part for value in balance for part in (round(10000 * value), 10000)]
    tags = [
        (274, "H", 1, orientation, True), (271, "s", 0, "Maker", True), (272, "s", 0, "Model", True),
        (50706, "B", 4, (1, 4, 0, 0), True), (50708, "s", 0, "Model", True),
        (33421, "H", 2, (2, 2), True), (33422, "B", 4, (0, 1, 1, 2), True),
        (50714, "H", 1, 0, True), (50717, "H", 1, 65535, True),
        (50721, "2i", 9, fractions, True), (50728, "2I", 3, white, True), (50778, "H", 1, 21, True),
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "raw.dng"
        tifffile.imwrite(path, mosaic, photometric="cfa", extratags=tags, metadata=None)
        return path.read_bytes()


def parquet() -> list[bytes]:
    """Return Parquet tables: numbers of several types with texts and gaps, in several codecs and encodings."""
    import pyarrow
    from pyarrow.parquet import write_table

    time = pyarrow.array([f"2026-01-{day:02}" for day in range(1, 13)])
    counts = pyarrow.array([1, None, *range(2, 12)], pyarrow.int16())
    table = pyarrow.table({"time": time, "counts": counts, "level": pyarrow.array(np.linspace(-1, 1, 12), "float64")})
    found = []
    for words in ({}, {"compression": "none", "use_dictionary": False}, {"compression": "zstd", "row_group_size": 5},
                  {"compression": "gzip", "data_page_version": "2.0"}):  # fmt: skip
        buffer = io.BytesIO()
        write_table(table, buffer, **words)
        found.append(buffer.getvalue())
    return found


def raw() -> list[bytes]:
    """Return camera raws of small pictures; LibRaw wants some pixels of them."""
    mosaic = np.random.default_rng(6).integers(0, 65536, (32, 40), dtype=np.uint16)
    return [dng(mosaic), dng(mosaic, orientation=6)]
