"""Archives and records."""

from __future__ import annotations

import hashlib
import io
import os
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nlflow.backends.machine import environment
from nlflow.errors import FileFormatError, InputError, check_memory, check_path, shortened
from nlflow.store.atomic import write_atomic
from nlflow.store.encoding import decode, digest, encode
from nlflow.store.npy import read_array

FORMAT = 2
_META = "__meta__"
_KINDS = "biufcSU"  # booleans, numbers and text; no objects
_LONGEST_META = 2**26  # bytes of JSON; a description is not where data goes

Arrays = dict[str, NDArray[Any]]
Meta = dict[str, Any]


class DamagedFileError(FileFormatError):
    """A file is damaged, so that it holds nothing that could be lost."""


# ---- archives


def save_archive(path: str | os.PathLike[str], arrays: Arrays, meta: Meta) -> None:
    """Write arrays of numbers, booleans or text and a JSON description with its ``kind`` to an npz archive."""
    about = {"format": FORMAT, "versions": environment()["versions"], **meta}
    kept = {name: np.asarray(array) for name, array in arrays.items()}
    for name, array in kept.items():
        if array.dtype.kind not in _KINDS:
            raise InputError(f"{name}: got an array of {array.dtype}, expected numbers, booleans or text")
    text = encode({**about, "sha256": _digest(kept, about)}, indent=None)
    packed = {_META: np.frombuffer(text.encode(), dtype=np.uint8), **kept}
    # numpy types the names of the arrays as if they were its own keywords.
    write_atomic(path, lambda file: np.savez(file, **packed))  # type: ignore[arg-type]


def load_archive(path: str | os.PathLike[str], kind: str) -> tuple[Arrays, Meta]:
    """Return the arrays and the description of an archive of `save_archive`; `FileFormatError` for anything else."""
    place = check_path("path", path)
    try:
        with place.open("rb") as file, zipfile.ZipFile(file) as archive:
            members = archive.infolist()
            if any(member.compress_type != zipfile.ZIP_STORED for member in members):
                raise ValueError("it is compressed")
            size = os.fstat(file.fileno()).st_size
            if sum(member.file_size for member in members) > size:
                raise ValueError("its arrays lie on top of each other")
            check_memory(f"{path}: the archive", size, "move it to a larger machine")
            contents = {member.filename.removesuffix(".npy"): archive.read(member) for member in members}
        if len(contents) != len(members):
            raise ValueError("two of its arrays have one name")
        about = _array(contents.pop(_META))
        if about.dtype != np.uint8 or about.size > _LONGEST_META:
            raise ValueError("its description is no text")
        meta = decode(about.tobytes().decode())
        arrays = {name: _array(content) for name, content in contents.items()}
    except FileNotFoundError as error:
        raise FileFormatError(f"{path}: there is no such file; check the path, or start afresh") from error
    except (OSError, ValueError, KeyError, EOFError, RuntimeError, NotImplementedError, zipfile.BadZipFile) as error:
        raise DamagedFileError(
            f"{path}: not a whole nlflow archive ({shortened(error)}); use an earlier one, or start afresh"
        ) from error
    _check_envelope(path, meta, kind, "archive")
    if meta.pop("sha256", None) != _digest(arrays, meta):
        raise DamagedFileError(
            f"{path}: not a whole nlflow archive (its content does not have its checksum); use an earlier one, or "
            "start afresh"
        )
    return arrays, meta


def _array(content: bytes) -> NDArray[Any]:
    array = read_array(io.BytesIO(content), len(content))
    if array.dtype.kind not in _KINDS:
        raise ValueError(f"an array of {array.dtype}")
    return array


def _digest(arrays: Arrays, meta: Meta) -> str:
    found = hashlib.sha256(encode(dict(sorted(meta.items())), indent=None).encode())
    for name, array in sorted(arrays.items()):
        found.update(f"{name}\0{array.dtype.str}\0{array.shape}\0".encode())
        found.update(np.ascontiguousarray(array).data if array.size else b"")
    return found.hexdigest()


# ---- records


def save_record(path: str | os.PathLike[str], kind: str, content: Any) -> None:
    about = {"kind": kind, "format": FORMAT, "versions": environment()["versions"], "content": content}
    text = encode({**about, "sha256": _record_digest(kind, content)}) + "\n"
    write_atomic(path, lambda file: file.write(text.encode()))


def load_record(path: str | os.PathLike[str], kind: str) -> Any:
    try:
        record = decode(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise FileFormatError(f"{path}: there is no such file; check the path, or start afresh") from error
    except (OSError, ValueError) as error:
        raise DamagedFileError(
            f"{path}: got a damaged file ({shortened(error)}), expected a record in JSON; restore it, or start afresh"
        ) from error
    _check_envelope(path, record, kind, "record")
    if "content" not in record or record.get("sha256") != _record_digest(kind, record["content"]):
        raise DamagedFileError(
            f"{path}: got a damaged file (its content does not have its checksum), expected a record as it was "
            "written; restore it, or start afresh"
        )
    return record["content"]


def _record_digest(kind: str, content: Any) -> str:
    return digest(encode([kind, FORMAT, content]))


def _check_envelope(path: str | os.PathLike[str], meta: Any, kind: str, what: str) -> None:
    found = meta.get("kind") if isinstance(meta, dict) else None
    if found != kind:
        which = "no" if found is None else "another"
        raise FileFormatError(
            f"{path}: got {which} {what} of nlflow ({shortened(found)}), expected one of kind {kind!r}; check the path"
        )
    if meta.get("format") != FORMAT:
        raise FileFormatError(
            f"{path}: got format {shortened(meta.get('format'))}, this version reads {FORMAT}; use the version that "
            "wrote it, or start afresh"
        )
