"""What a reader may do to a hostile input: return, or refuse it by name; nothing else, and nothing to the machine."""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.resident import peak

__all__ = [
    "ENDED",
    "READ",
    "REFUSED",
    "BrokenPropertyError",
    "Guard",
    "Reader",
    "broken",
    "judge",
    "place_of",
    "quiet",
    "require",
]

READ, REFUSED = "read", "refused by name"
ENDED = "refused by name, its decoder ended in its child"
_SPARE = 512 * 2**20  # bytes by which the peak of memory may grow in one input, with a limit of 128 MiB for an array

# Events of the interpreter (PEP 578) that no reader has a reason for: programs, sockets, pickles.
_NEVER = (
    "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.forkpty", "subprocess.Popen", "pty.spawn",
    "socket.connect", "socket.bind", "pickle.find_class", "marshal.load", "marshal.loads", "ctypes.dlopen",
    "webbrowser.open", "shutil.unpack_archive",
)  # fmt: skip
# Those that name a file: allowed within the folder alone.
_FILES = ("os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.chmod", "os.truncate",
          "shutil.rmtree", "shutil.move", "shutil.copyfile")  # fmt: skip
_CACHE = "numba/core/caching.py"
# Dask pickles functions of the package to tell them apart.
_TRUSTED = (
    _CACHE,
    "nlflow/desk/apart.py",
    "/dask/",
    "importlib/_bootstrap",
    "frozen importlib",
    "ctypes/__init__.py",
)


Reader = Callable[[bytes], object]


@contextmanager
def quiet() -> Iterator[None]:
    """Let warnings pass: they are meant for people."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class BrokenPropertyError(AssertionError):
    """A reader returned what it may not return, or did what it may not do."""


def require(condition: object, words: str) -> None:
    """Raise `BrokenPropertyError` unless `condition` holds."""
    if not condition:
        raise BrokenPropertyError(words)


class Guard:
    """An audit hook that sees files written outside of a folder, programs started and pickles read.

    Such an event is remembered, and raises: the reader cannot go on, and cannot hide it by catching the error.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = os.path.realpath(folder)
        self.seen: list[str] = []
        self._armed = False
        sys.addaudithook(self._hear)

    @contextmanager
    def armed(self) -> Iterator[None]:
        """Listen for a while."""
        self.seen.clear()
        self._armed = True
        try:
            yield
        finally:
            self._armed = False

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self._armed:
            return
        if event == "open":
            path, mode, flags = arguments
            writes = isinstance(mode, str) and any(letter in mode for letter in "wax+")
            writes = writes or (isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
            if writes and not self._inside(path) and not self._called_by(_CACHE):
                self._tell(f"{event} {path!r} to write")
        elif event in _FILES:
            outside = [entry for entry in arguments if isinstance(entry, str | bytes | os.PathLike)]
            outside = [entry for entry in outside if not self._inside(entry)]
            if outside and not self._called_by(_CACHE):  # what Numba compiles on the way goes to its cache
                self._tell(f"{event} {outside[0]!r}")
        elif event in _NEVER and not self._called_by(*_TRUSTED):
            self._tell(f"{event} {arguments!r:.200}")

    def _inside(self, path: Any) -> bool:
        if isinstance(path, int):  # a file that is open already
            return True
        text = os.path.realpath(os.fsdecode(path))
        return text == os.devnull or text == self.folder or text.startswith(self.folder + os.sep)

    def _called_by(self, *files: str) -> bool:
        frame = sys._getframe(2)
        while frame is not None:
            if any(name in frame.f_code.co_filename.replace("\\", "/") for name in files):
                return True
            frame = frame.f_back  # type: ignore[assignment]
        return False

    def _tell(self, words: str) -> None:
        self._armed = False  # what follows is a consequence
        self.seen.append(words)
        raise BrokenPropertyError(f"a reader did what none may do: {words}")


def judge(reader: Callable[[bytes], object], data: bytes, guard: Guard | None = None) -> str:
    """Give an input to a reader, and return how it ended.

    Raises
    ------
    Exception
        Whatever the reader raised that is no named error, and `BrokenPropertyError` for what it may not do.
    """
    from nlflow.errors import NlflowError

    before = peak()
    outcome = READ
    try:
        if guard is None:
            reader(data)
        else:
            with guard.armed():
                reader(data)
    except NlflowError as error:
        require(str(error).strip(), "a named error without a message")
        # Not kept in a variable: the frames of its trace lead back here, and pixels would wait for the collector.
        if isinstance(error.__cause__, MemoryError) and not isinstance(error.__cause__, NlflowError):
            raise BrokenPropertyError("memory was asked for before the header was looked at") from error
        outcome = ENDED if "a decoder that ended" in str(error) else REFUSED
    if guard is not None and guard.seen:
        raise BrokenPropertyError(f"a reader did what none may do: {guard.seen[0]}")
    grown = peak() - before
    require(grown <= _SPARE, f"the peak of memory grew by {grown} bytes for an input of {len(data)} bytes")
    return outcome


def place_of(error: BaseException) -> str:
    """Return what tells one failure from another: its kind and where in the package, or the library, it arose."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if "/nlflow/" in f.filename or "/validation/" in f.filename]
    last = [frames[-1]] if frames else []
    words = [f"{Path(frame.filename).name}:{frame.lineno}" for frame in (own[-1:] + last)]
    kind = type(error).__name__
    return f"{kind} at {' < '.join(reversed(list(dict.fromkeys(words))))}"


def broken(error: BaseException) -> str:
    """Return the whole trace of a failure as text."""
    return "".join(traceback.format_exception(error))
