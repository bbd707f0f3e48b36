"""What is kept on disk: archives of arrays, records in JSON, checkpoints with the one before, and who may write.

Everything that can be gone on from (flows, studies, claims, folders of images, trainings) is written here, and alike:
a file appears complete or not at all, says of what kind and format it is and which versions wrote it, and has a
checksum of all that it says. Nothing is ever unpickled.
"""

from __future__ import annotations

import hashlib
import io
import os
import warnings
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout
from numpy.typing import NDArray

from nlflow._atomic import sweep, sync_folder, temporary_name, write_atomic
from nlflow._encoding import decode, digest, encode
from nlflow._machine import environment
from nlflow._npy import read_array
from nlflow.errors import FileFormatError, InputError, NlflowWarning, check_memory

__all__ = [
    "FORMAT",
    "Checkpoints",
    "DamagedFileError",
    "Fits",
    "load_archive",
    "load_record",
    "locked",
    "previous",
    "save_archive",
    "save_record",
]

FORMAT = 2
_META = "__meta__"
_KINDS = "biufcSU"  # booleans, numbers and text; no objects
_LONGEST_META = 2**26  # bytes of JSON; a description is not where data goes

Arrays = dict[str, NDArray[Any]]
Meta = dict[str, Any]
Fits = Callable[[Arrays, Meta], str | None]


class DamagedFileError(FileFormatError):
    """A file is not as it was written: it holds nothing that could be lost."""


# ---- archives


def save_archive(path: str | os.PathLike[str], arrays: Arrays, meta: Meta) -> None:
    """Write arrays and a JSON description to an npz archive, atomically.

    A file of that name is always whole, the old one or the new one. The description gets the format, the versions that
    write it and a SHA-256 of everything.

    Parameters
    ----------
    path : path
    arrays : dict of str to array
        Of numbers, booleans or text.
    meta : dict
        Plain data, with the ``kind`` of the archive.

    Raises
    ------
    FileFormatError
        When the folder is missing, not writable or full; nothing is left behind then.
    """
    about = {"format": FORMAT, "versions": environment()["versions"], **meta}
    kept = {name: np.asarray(array) for name, array in arrays.items()}
    text = encode({**about, "sha256": _digest(kept, about)}, indent=None)
    packed = {_META: np.frombuffer(text.encode(), dtype=np.uint8), **kept}
    # numpy types the names of the arrays as if they were its own keywords.
    write_atomic(path, lambda file: np.savez(file, **packed))  # type: ignore[arg-type]


def load_archive(path: str | os.PathLike[str], kind: str) -> tuple[Arrays, Meta]:
    """Return the arrays and the description of an archive written by `save_archive`.

    Parameters
    ----------
    path : path
    kind : str
        What the description must say under ``kind``.

    Raises
    ------
    FileFormatError
        When the file is truncated or altered, of another kind or of another format.
    MemoryLimitError
        For an archive that is larger than the memory limit, before it is read.

    Notes
    -----
    Archives are not compressed, so that no member is larger than the file, and what a member says of its shape is held
    against its length before there is an array.
    """
    try:
        with Path(path).open("rb") as file, zipfile.ZipFile(file) as archive:
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
            f"{path}: not a whole nlflow archive ({_brief(error)}); use an earlier one, or start afresh"
        ) from error
    _check_envelope(path, meta, kind, "archive")
    if meta.pop("sha256", None) != _digest(arrays, meta):
        raise DamagedFileError(
            f"{path}: not a whole nlflow archive (its content does not have its checksum); use an earlier one, or "
            "start afresh"
        )
    return arrays, meta


def _array(content: bytes) -> NDArray[Any]:
    """Return the array of an .npy file; raise `ValueError` for one that is no whole array of numbers."""
    array = read_array(io.BytesIO(content), len(content))
    if array.dtype.kind not in _KINDS:
        raise ValueError(f"an array of {array.dtype}")
    return array


def _digest(arrays: Arrays, meta: Meta) -> str:
    """Return the SHA-256 of a description and of arrays, in no particular order."""
    found = hashlib.sha256(encode(dict(sorted(meta.items())), indent=None).encode())
    for name, array in sorted(arrays.items()):
        found.update(f"{name}\0{array.dtype.str}\0{array.shape}\0".encode())
        found.update(np.ascontiguousarray(array).data if array.size else b"")
    return found.hexdigest()


# ---- records


def save_record(path: str | os.PathLike[str], kind: str, content: Any) -> None:
    """Write plain data as a record in JSON, atomically, with its kind, format, versions and checksum.

    Parameters
    ----------
    path : path
    kind : str
    content : plain data
        Floats come back to the last bit, NaN and infinities too.

    Raises
    ------
    FileFormatError
        When the folder is missing, not writable or full.
    """
    about = {"kind": kind, "format": FORMAT, "versions": environment()["versions"], "content": content}
    text = encode({**about, "sha256": _record_digest(kind, content)}) + "\n"
    write_atomic(path, lambda file: file.write(text.encode()))


def load_record(path: str | os.PathLike[str], kind: str) -> Any:
    """Return the content of a record of `save_record`.

    Raises
    ------
    FileFormatError
        When the file is missing, truncated, altered, of another kind or of another format.
    """
    try:
        record = decode(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise FileFormatError(f"{path}: there is no such file; check the path, or start afresh") from error
    except (OSError, ValueError) as error:
        raise DamagedFileError(
            f"{path}: got a damaged file ({_brief(error)}), expected a record in JSON; restore it, or start afresh"
        ) from error
    _check_envelope(path, record, kind, "record")
    if record.get("sha256") != _record_digest(kind, record.get("content")):
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
        raise FileFormatError(f"{path}: got {'no' if found is None else 'another'} {what} of nlflow ({_brief(found)}), "
                              f"expected one of kind {kind!r}; check the path")  # fmt: skip
    if meta.get("format") != FORMAT:
        raise FileFormatError(
            f"{path}: got format {_brief(meta.get('format'))}, this version reads {FORMAT}; use the version that wrote "
            "it, or start afresh"
        )


def _brief(value: Any) -> str:
    text = " ".join(str(value).split()) or type(value).__name__
    return text if len(text) <= 160 else text[:157] + "..."


# ---- checkpoints


def previous(path: str | os.PathLike[str]) -> Path:
    """Return where the checkpoint before the one at `path` is kept."""
    return Path(f"{os.fspath(path)}.previous")


class Checkpoints:
    """A checkpoint at a path, and the one before it.

    Writing keeps what was there as ``<path>.previous`` as long as it is whole, so that there is a good one at any
    moment, whatever becomes of the new one; reading takes the newest that is whole and of this problem.

    Parameters
    ----------
    path : path
    kind : str
        Of the archives.
    """

    def __init__(self, path: str | os.PathLike[str], kind: str) -> None:
        self.path = Path(path)
        self.kind = kind
        self._known: tuple[int, ...] | None = None  # the file that this object wrote or read whole

    @property
    def places(self) -> tuple[Path, Path]:
        """The newest, and the one before."""
        return self.path, previous(self.path)

    def __bool__(self) -> bool:
        """Whether there is a file to go on from, be it whole or not."""
        return any(place.is_file() for place in self.places)

    def save(self, arrays: Arrays, meta: Meta) -> None:
        """Write a checkpoint; see `save_archive`."""
        # One that was damaged meanwhile must not push out the good one before it.
        if self.path.is_file() and (self._known == _identity(self.path) or self._sound(self.path)):
            _duplicate(self.path, previous(self.path))
        save_archive(self.path, arrays, {**meta, "kind": self.kind})
        self._known = _identity(self.path)

    def load(self, fits: Fits) -> tuple[Arrays, Meta]:
        """Return the newest checkpoint that is whole, of this version and fits.

        Parameters
        ----------
        fits : callable
            Gets arrays and description of a whole one, and returns None, or why it cannot be gone on from. Called at
            most once a place.

        Raises
        ------
        FileFormatError
            If there is none, with the reasons.

        Warns
        -----
        NlflowWarning
            When the newest is refused and the one before is taken, and when other versions of libraries wrote it.
        """
        reasons: list[str] = []
        for place in self.places:
            if reasons and not place.is_file():
                continue
            try:
                arrays, meta = load_archive(place, self.kind)
            except FileFormatError as error:
                reasons.append(str(error))
                continue
            reason = _other_version(meta) or fits(arrays, meta)
            if reason is not None:
                reasons.append(f"{place}: {reason}")
                continue
            if reasons:
                warnings.warn(f"{reasons[0]}. {place}, the one before, is used", NlflowWarning, stacklevel=3)
            else:
                self._known = _identity(place)
            _tell_libraries(place, meta)
            return arrays, meta
        raise FileFormatError("; ".join(reasons))

    def check_replaceable(self, name: str, fits: Fits) -> None:
        """Refuse to write where that would destroy something else than a state of this run.

        Parameters
        ----------
        name : str
            The argument or option, for messages.
        fits : callable
            As for `load`.

        Raises
        ------
        InputError
            For a file that is no checkpoint, and for a checkpoint of another problem or version.
        """
        if not self.path.is_file() or self._known == _identity(self.path):
            return
        try:
            reason = self._unfit(self.path, fits)
        except DamagedFileError as error:
            # What is damaged may be anything, unless the one before it is of this run.
            reason = None if self._sound(previous(self.path), fits) else str(error)
        except FileFormatError as error:
            reason = str(error)
        if reason is not None:
            raise InputError(
                f"{name}: got {self.path}, which would be lost ({_brief(reason)}); expected a new name, or a "
                "checkpoint of this problem; choose another name, or remove the file"
            )

    def remove(self) -> None:
        """Remove both, once there is a result in their place."""
        for place in self.places:
            with suppress(OSError):
                place.unlink(missing_ok=True)

    def _unfit(self, place: Path, fits: Fits) -> str | None:
        """Return why a whole file is not to go on from; None if it is."""
        arrays, meta = load_archive(place, self.kind)
        return _other_version(meta) or fits(arrays, meta)

    def _sound(self, place: Path, fits: Fits = lambda arrays, meta: None) -> bool:
        try:
            return self._unfit(place, fits) is None
        except FileFormatError:
            return False


def _other_version(meta: Meta) -> str | None:
    """Return what is wrong with the version that wrote a checkpoint: steps may have been other ones."""
    found = _versions(meta).get("nlflow")
    now = environment()["versions"]["nlflow"]
    if found == now:
        return None
    return f"nlflow {found} wrote the checkpoint, and this is {now}; use that version, or start afresh"


def _tell_libraries(place: Path, meta: Meta) -> None:
    found = _versions(meta)
    others = [f"{name} {found.get(name)}" for name, now in environment()["versions"].items() if found.get(name) != now]
    if others:
        warnings.warn(
            f"{place}: was written with {', '.join(others)}, which is not what runs now; the last digits may differ "
            "from those of an uninterrupted run",
            NlflowWarning,
            stacklevel=4,
        )


def _versions(meta: Meta) -> dict[str, Any]:
    found = meta.get("versions")
    return found if isinstance(found, dict) else {}


def _identity(path: Path) -> tuple[int, ...] | None:
    """Return what tells a file from others of its name, without reading it."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _duplicate(source: Path, target: Path) -> None:
    """Give a file a second name, in the place of what has it; the first stays at any moment."""
    spare = temporary_name(source)
    try:
        try:
            os.link(source, spare)
        except OSError:  # a file system without second names
            content = source.read_bytes()
            write_atomic(target, lambda file: file.write(content))
        else:
            spare.replace(target)
            spare.unlink(missing_ok=True)  # a file that has the target's name already keeps this one as well
            sync_folder(target.parent)
    except OSError as error:
        with suppress(OSError):
            spare.unlink(missing_ok=True)
        raise FileFormatError(
            f"{target}: got {error.strerror or error}, expected a file that can be written; free some space or choose "
            "another place"
        ) from error


# ---- who may write


@contextmanager
def locked(path: str | os.PathLike[str], name: str) -> Iterator[None]:
    """Keep a file or folder for this process as long as the context lasts.

    The lock is a file beside (in a folder: in ``.nlflow`` inside) that holds no data and stays; it is the operating
    system that forgets the lock when a process ends, however it ends.

    Parameters
    ----------
    path : path
        A folder that exists, or a file, which need not.
    name : str
        The argument or option, for messages.

    Raises
    ------
    InputError
        When another process has it.
    FileFormatError
        When the folder cannot be written.
    """
    target = Path(path)
    folder = target.is_dir()
    lock = FileLock(target / ".nlflow" / "lock" if folder else target.with_name(f".{target.name}.lock"), timeout=0)
    try:
        if folder:
            (target / ".nlflow").mkdir(exist_ok=True)
        lock.acquire()
    except Timeout as error:
        raise InputError(
            f"{name}: got {target}, in which another process is writing, expected a place of its own; wait for it, or "
            "choose another name"
        ) from error
    except OSError as error:
        raise FileFormatError(
            f"{name}: got {target} ({error.strerror or error}), expected a place that can be written; choose another"
        ) from error
    try:
        sweep(target)
        yield
    finally:
        lock.release()
