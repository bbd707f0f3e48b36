"""Files made to fill memory, to loop or to run code, and a program that measures what reading them takes.

Run as ``python -m tests.hostile FOLDER``: prints one JSON object with the error and the growth of the peak of memory of
every case.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import struct
import sys
import time
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.resident import begin_anew, peak

DEEP = b"[" * 100_000 + b"]" * 100_000
MANY = 200_000_000  # bytes that a bomb unfolds to


def png(width: int, height: int, content: bytes) -> bytes:
    """Return a grey PNG file of 8 bits whose header declares this size."""
    chunks = [(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)), (b"IDAT", content), (b"IEND", b"")]
    parts = [struct.pack(">I", len(b)) + n + b + struct.pack(">I", zlib.crc32(n + b)) for n, b in chunks]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def npy(descr: str, shape: str, content: bytes = b"") -> bytes:
    """Return an .npy file of version 1.0 with this header."""
    header = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}".encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + content


def wav(form: bytes, size: int, long: int = 0) -> bytes:
    """Return a sound of 8 bits with 100 samples, of which its header tells of `size` (or `long`, as RF64)."""
    body = b"ds64" + struct.pack("<IQQQI", 28, 0, long, 0, 0) if form == b"RF64" else b""
    body += b"fmt " + struct.pack("<IHHIIHH", 16, 1, 1, 8000, 8000, 1, 8)
    body += b"data" + struct.pack("<I", size) + bytes(100)
    return form + struct.pack("<I", len(body) + 4) + b"WAVE" + body


def tiff(
    width: int, height: int, content: bytes, *, compression: int = 1, description: bytes = b"", pages: int = 1
) -> bytes:
    """Return a grey TIFF file of 8 bits with one strip, and as many further pages as asked for."""
    tags = [(256, 4, 1, width), (257, 4, 1, height), (258, 3, 1, 8), (259, 3, 1, compression), (262, 3, 1, 1),
            (277, 3, 1, 1), (278, 4, 1, height)]  # fmt: skip
    found = b"II*\0" + struct.pack("<I", 8)
    size = 2 + 12 * (len(tags) + 2 + bool(description)) + 4
    place = 8 + pages * size
    every = [*tags, (273, 4, 1, place + len(description)), (279, 4, 1, len(content))]
    every += [(270, 2, len(description), place)] if description else []
    for page in range(pages):
        found += struct.pack("<H", len(every)) + b"".join(struct.pack("<HHII", *tag) for tag in sorted(every))
        found += struct.pack("<I", 8 + (page + 1) * size if page + 1 < pages else 0)
    return found + description + content


def zipped(members: dict[str, bytes], *, deflate: bool = False) -> bytes:
    """Return a zip archive."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED if deflate else zipfile.ZIP_STORED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def overlapping(count: int, content: bytes, form: str) -> bytes:
    """Return a zip archive whose many members, with names made by a format, are the same bytes of the file."""
    name = form.format(0).encode()
    crc = zlib.crc32(content)
    local = struct.pack("<4s5H3I2H", b"PK\3\4", 20, 0, 0, 0, 0, crc, len(content), len(content), len(name), 0) + name
    central = b""
    for number in range(count):
        other = form.format(number).encode()
        central += struct.pack(
            "<4s6H3I5H2I", b"PK\1\2", 20, 20, 0, 0, 0, 0, crc, len(content), len(content), len(other), 0, 0, 0, 0, 0, 0
        ) + other  # fmt: skip
    start = len(local) + len(content)
    end = struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, count, count, len(central), start, 0)
    return local + content + central + end


def small_model(folder: Path) -> None:
    """Write a transformer of one layer to a folder."""
    import transformers

    config = transformers.BertConfig(
        hidden_size=4, num_hidden_layers=1, num_attention_heads=2, intermediate_size=4, vocab_size=5,
        max_position_embeddings=6,
    )  # fmt: skip
    transformers.BertModel(config).save_pretrained(folder)


def within(limit: int, read: Callable[[], object]) -> Callable[[], object]:
    """Return a reader under a memory limit."""

    def limited() -> object:
        os.environ["NLFLOW_MEMORY_LIMIT"] = str(limit)
        try:
            return read()
        finally:
            del os.environ["NLFLOW_MEMORY_LIMIT"]

    return limited


def mat(shape: tuple[int, int], stored: int, content: bytes, *, packed: bool = False) -> bytes:
    """Return a MAT file of level 5 with one array of doubles, whose values take `stored` bytes by its header."""
    body = struct.pack("<4I", 6, 8, 6, 0) + struct.pack("<2I2i", 5, 8, *shape) + struct.pack("<HH4s", 1, 1, b"a\0\0\0")
    body += struct.pack("<2I", 9, stored) + content
    element = struct.pack("<2I", 14, len(body)) + body
    if packed:
        element = zlib.compress(element, 1)
        element = struct.pack("<2I", 15, len(element)) + element
    return b"MATLAB 5.0 MAT-file".ljust(124) + struct.pack("<H2s", 0x0100, b"IM") + element


def hdf5(**options: Any) -> bytes:
    """Return an HDF5 file with one dataset of these options, of which no value is written."""
    import h5py

    with h5py.File("made", "w", driver="core", backing_store=False) as file:
        file.create_dataset("a", dtype="f8", **options)
        file.flush()
        content: bytes = file.id.get_file_image()
    return content


def _newcomers() -> dict[str, dict[str, bytes]]:
    """Return what is wrong with BMP, GIF, WebP, NPZ, MAT and HDF5 files, by their endings."""
    bmp = struct.pack("<2sIHHI", b"BM", 60, 0, 0, 54)
    bmp += struct.pack("<IiiHHIIiiII", 40, 60000, 60000, 1, 24, 0, 0, 0, 0, 0, 0)
    runs = bmp[:30].replace(struct.pack("<ii", 60000, 60000), struct.pack("<ii", 13000, 13000))
    wide = b"RIFF" + struct.pack("<I", 30) + b"WEBPVP8X" + struct.pack("<I4x", 10) + b"\xff\xff\xff" * 2
    lossless = b"RIFF" + struct.pack("<I", 30) + b"WEBPVP8L" + struct.pack("<I", 18)
    lossless += b"\x2f" + struct.pack("<I", 16382 | 16382 << 14) + bytes(13)
    return {
        "bmp": {"of 60000 x 60000": bmp + bytes(6), "of runs": runs + struct.pack("<I", 1) + bmp[34:] + bytes(1100)},
        "gif": {"of 65535 x 65535": b"GIF89a\xff\xff\xff\xff\x80" + bytes(8) + b",\0\0\0\0\xff\xff\xff\xff\0\x08"},
        "webp": {"of 16777216 x 16777216": wide, "of 16383 x 16383": lossless},
        "npz": {
            "of 10^12 numbers": zipped({"a.npy": npy("'<f8'", "(1000000000000,)", bytes(80))}),
            "of zeros, deflated": zipped({"a.npy": npy("'|u1'", f"({MANY},)", bytes(MANY))}, deflate=True),
            "of objects": zipped({"a.npy": npy("'|O'", "(3,)", bytes(80))}),
            "of a long header": zipped(
                {"a.npy": b"\x93NUMPY\2\0" + struct.pack("<I", MANY) + b" " * MANY}, deflate=True
            ),
        },
        "mat": {
            "of 10^12 numbers": mat((10**6, 10**6), 80, bytes(80)),
            "of 2^31 x 2^31": mat((2**31 - 1, 2**31 - 1), 80, bytes(80)),
            "of zeros, packed": mat((MANY // 8000, 1000), MANY, bytes(MANY), packed=True),
            "of a long element": mat((4, 4), 128, bytes(128)).replace(b"\x0e\0\0\0\xb0\0\0\0", b"\x0e\0\0\0\0\0\0\x80"),
        },
        "h5": {"of 10^12 numbers": hdf5(shape=(10**12,), chunks=(1000,)),
               "of a chunk of 3 GiB": hdf5(shape=(10, 10), chunks=(20000, 20000), maxshape=(None, None)),
               "of 200 MB of nothing": hdf5(shape=(MANY // 8,), chunks=(1000,))},
    }  # fmt: skip


def cases(folder: Path) -> dict[str, Callable[[], object]]:
    """Return what is read in each case; the files are written first."""
    from nlflow.attention import load_model
    from nlflow.desk import files
    from nlflow.desk.companions import read_mask
    from nlflow.desk.terminal import read_tokens
    from nlflow.store.storage import load_archive
    from nlflow.studies import run_study
    from validation.training.data import read_pictures
    from validation.training.state import read_tensors

    zeros = zlib.compress(bytes(MANY), 1)
    rows = zlib.compress(bytes(13000 * 13001), 1)
    shape = b'{"shape": [1000000, 1000000]}\0'
    images = {
        "png of 60000 x 60000": ("png", png(60000, 60000, zlib.compress(bytes(60001)))),
        "png of 13000 x 13000 zeros": ("png", png(13000, 13000, rows)),
        "tiff of 100000 x 100000": ("tif", tiff(100000, 100000, bytes(100))),
        "tiff of 4294967295 x 4294967295": ("tif", tiff(2**32 - 1, 2**32 - 1, bytes(100))),
        "tiff of zeros, deflated": ("tif", tiff(MANY // 10000, 10000, zeros, compression=8)),
        "tiff of 5000 pages": ("tif", tiff(4, 4, bytes(16), pages=5000)),
        "tiff of a strip of 3 GiB": (
            "tif",
            tiff(4, 4, bytes(16), compression=8).replace(
                struct.pack("<HHII", 279, 4, 1, 16), struct.pack("<HHII", 279, 4, 1, 3 * 2**30)
            ),
        ),
        "tiff with a shape in words": ("tif", tiff(4, 4, bytes(15), description=shape)),
        "npy of 10^12 numbers": ("npy", npy("'<f8'", "(1000000000000,)", bytes(80))),
        "npy beyond 64 bits": ("npy", npy("'<f8'", "(4294967296, 4294967296)", bytes(80))),
        "npy of long items": ("npy", npy("'|V2000000000'", "(3,)", bytes(80))),
        "npy of objects": ("npy", npy("'|O'", "(3,)", bytes(80))),
        "npy nested deeply": ("npy", npy("'<f8'", "(" * 4000 + ")" * 4000)),
        "npy with minus signs": ("npy", npy("'<f8'", "-" * 9000 + "1")),
        "npy in gzip": ("npy", gzip.compress(npy("'|u1'", f"({MANY},)", bytes(MANY)), 1)),
        "csv in gzip": ("csv", gzip.compress(b"1\n" * (MANY // 2), 1)),
        "wav of 4 GiB": ("wav", wav(b"RIFF", 2**32 - 16)),
        "wav of 2^62 bytes": ("wav", wav(b"RF64", 2**32 - 1, 2**62)),
        "wav whose first chunk is cut": ("wav", bytes.fromhex("524636000000000100000045666d7420010000000000 00da3f12")),
    }
    images |= {name: one for suffix, group in _newcomers().items() for name, one in
               {f"{suffix} {what}": (suffix, content) for what, content in group.items()}.items()}  # fmt: skip
    found: dict[str, Callable[[], object]] = {}
    for number, (name, (suffix, content)) in enumerate(images.items()):
        path = folder / f"{number}.{suffix}"
        path.write_bytes(content)
        found[name] = lambda path=path: files.read(path)  # type: ignore[misc]
        if suffix == "npy":
            found[f"{name}, as tokens"] = lambda path=path: read_tokens("--tokens", path)  # type: ignore[misc]
    image = folder / "image.npy"
    np.save(image, np.zeros((4, 4)))
    found["mask of 13000 x 13000"] = lambda: read_mask("--mask", folder / "1.png", files.read(image))
    bombs = ("webp of 16383 x 16383", "mat of zeros, packed", "h5 of 200 MB of nothing")
    found["npz of zeros, deflated"] = within(2**27, found["npz of zeros, deflated"])
    for name in ("png of 13000 x 13000 zeros", "tiff of zeros, deflated", "mask of 13000 x 13000", *bombs):
        found[name] = within(2**28, found[name])

    store = folder / "store.zarr"
    store.mkdir()
    (store / "zarr.json").write_text(json.dumps({
        "zarr_format": 3, "node_type": "array", "shape": [50000, 50000], "data_type": "uint8", "fill_value": 0,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [1000, 1000]}},
        "chunk_key_encoding": {"name": "default"}, "codecs": [{"name": "bytes"}],
    }))  # fmt: skip
    found["zarr of 2.5 GB of nothing"] = lambda: files.read(store)

    sparse = folder / "sparse.csv"  # a long text that takes no place on the disk
    with sparse.open("wb") as stream:
        stream.truncate(2**40)
    found["csv of 2^40 bytes"] = lambda: files.read(sparse)
    wide = folder / "wide.csv"
    wide.write_bytes(b"1," * 10**7 + b"1\n")

    # 10^9 columns are a file of 2 GB: this is a hundredth of it, and of the memory.
    found["csv of 10^7 columns"] = within(10**9, lambda: files.read(wide))

    meta = npy("'|u1'", "(2,)", b"{}")
    deep = npy("'|u1'", f"({len(DEEP)},)", DEEP)
    archives = {
        "archive that tells of 10^12 numbers": zipped(
            {"__meta__.npy": meta, "u.npy": npy("'<f8'", "(1000000000000,)")}
        ),
        "archive of zeros, deflated": zipped({"__meta__.npy": meta, "u.npy": bytes(MANY)}, deflate=True),
        "archive of overlapping members": overlapping(2000, npy("'|u1'", "(1000000,)", bytes(10**6)), "{:04d}.npy"),
        "archive of objects": zipped({"__meta__.npy": meta, "u.npy": npy("'|O'", "(1,)", bytes(80))}),
        "archive nested deeply": zipped({"__meta__.npy": deep}),
    }
    for number, (name, content) in enumerate(archives.items()):
        path = folder / f"{number}.npz"
        path.write_bytes(content)
        found[name] = lambda path=path: load_archive(path, "checkpoint")  # type: ignore[misc]

    sets = {
        "zip of a picture of 13000 x 13000": zipped({"a/1.png": png(13000, 13000, rows)}),
        "zip of a long picture": zipped({"a/1.png": bytes(MANY)}, deflate=True),
        "zip of overlapping pictures": overlapping(
            3000, png(1000, 1000, zlib.compress(bytes(1001000))), "a/{:04d}.png"
        ),
    }
    for number, (name, content) in enumerate(sets.items()):
        path = folder / f"{number}.zip"
        path.write_bytes(content)
        found[name] = lambda path=path: read_pictures(path, progress=False)  # type: ignore[misc]

    long = b'{"a":{"dtype":"U8","shape":[1125899906842624],"data_offsets":[0,1125899906842624]}}'
    weights = {
        "tensors with a header of 2^60 bytes": struct.pack("<Q", 2**60) + b"{}",
        "tensors with a deep header": struct.pack("<Q", len(DEEP)) + DEEP,
        "tensors of 2^50 bytes": struct.pack("<Q", len(long)) + long,
    }
    for number, (name, content) in enumerate(weights.items()):
        path = folder / f"{number}.safetensors"
        path.write_bytes(content)
        found[name] = lambda path=path: read_tensors(path)  # type: ignore[misc]
        place = folder / f"weights-{number}"
        small_model(place)
        (place / "model.safetensors").write_bytes(content)
        found[f"model of {name}"] = lambda place=place: load_model(place)  # type: ignore[misc]

    plain = folder / "plain"
    small_model(plain)
    load_model(plain)  # what is loaded once is loaded now
    about = json.loads((plain / "config.json").read_text())
    for name, value in {
        "vocab_size": 10**9,
        "num_hidden_layers": 10**7,
        "num_labels": 10**9,
        "hidden_size": 10**7,
    }.items():
        place = folder / name
        small_model(place)
        (place / "config.json").write_text(json.dumps({**about, name: value}))
        found[f"model with {name} {value}"] = lambda place=place: load_model(place)  # type: ignore[misc]
    for name, config in {
        "lists of layers": {"model_type": "qwen2", "num_hidden_layers": 10**9},
        "a list of many layers": {"model_type": "gpt_neo", "num_layers": 2, "attention_types": [[["global"], 10**9]]},
        "deep stages": {"model_type": "swin", "depths": [10**6]},
        "many experts": {"model_type": "mixtral", "num_hidden_layers": 1, "num_local_experts": 10**9},
    }.items():
        place = folder / name.replace(" ", "-")
        small_model(place)
        (place / "config.json").write_text(json.dumps(config))
        found[f"model with {name}"] = lambda place=place: load_model(place)  # type: ignore[misc]
    for name in ("config.json", "attention.json"):
        place = folder / f"deep-{name}"
        small_model(place)
        (place / name).write_bytes(DEEP)
        found[f"model with a deep {name}"] = lambda place=place: load_model(place)  # type: ignore[misc]

    study = folder / "study"
    study.mkdir()
    (study / "study.json").write_bytes(DEEP)
    found["study nested deeply"] = lambda: run_study("mixing", nodes=4, boundary="periodic", out=study)
    return found


def main() -> None:
    """Read every case and print what came of it."""
    from nlflow.errors import NlflowError

    results: dict[str, Any] = {}
    for name, read in cases(Path(sys.argv[1])).items():
        begin_anew()
        before, begun = peak(), time.process_time()
        try:
            read()
            kind, words = "read", ""
        except NlflowError as error:
            kind, words = type(error).__name__, str(error)
        except BaseException as error:
            kind, words = f"unnamed {type(error).__name__}", str(error)
        results[name] = [kind, words, peak() - before, time.process_time() - begun]
    print(json.dumps(results))


if __name__ == "__main__":
    main()
