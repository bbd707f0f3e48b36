"""``-`` for stdin as an input and stdout as an output."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nlflow.desk.files import EXTENSIONS, STACKS
from nlflow.desk.formats import FORMATS, written_extension
from nlflow.desk.formats.content import HEAD, by_content, foreign
from nlflow.desk.formats.media import READABLE, extension
from nlflow.desk.options import PIPE
from nlflow.errors import FileFormatError, InputError, MemoryLimitError, NlflowError, format_bytes, memory_limit

_BLOCK = 2**20
_KNOWN = EXTENSIONS | STACKS


@dataclass(frozen=True)
class Ends:
    """Inputs and output."""

    sources: list[Path]  # inputs; a file of the temporary folder in the place of stdin
    target: str  # the output; a file of the temporary folder in the place of stdout
    piped: bool  # whether stdout gets the file, and nothing else
    names: dict[str, str]  # from what stands in messages to what users are told

    def told(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {key: self.told(entry) for key, entry in value.items()}
        if isinstance(value, list | tuple):
            return [self.told(entry) for entry in value]
        for name, word in self.names.items() if isinstance(value, str) else ():
            value = value.replace(name, word)
        return value

    def deliver(self) -> None:
        if not self.piped:
            return
        stream = sys.stdout.buffer
        with Path(self.target).open("rb") as file:
            while block := memoryview(file.read(_BLOCK)):
                while block:  # a stdout without buffer (PYTHONUNBUFFERED) may take less than it is given
                    block = block[stream.write(block) or 0 :]
        stream.flush()


@contextmanager
def ends(sources: list[Path], target: str = "", form: str | None = None) -> Iterator[Ends]:
    """Replace stdin and stdout by files; `form` is the extension on stdout, by default that of the input."""
    if PIPE not in (str(sources[0]), target):
        yield Ends(sources, target, False, {})
        return
    piped = target == PIPE
    for name, what, stream in (("IN", "stdin", sys.stdin), ("OUT", "stdout", sys.stdout)):
        if stream is None and {"IN": str(sources[0]), "OUT": target}[name] == PIPE:
            raise InputError(f"{name}: got -, but {what} is closed, expected a pipe or a file; name a file")
    if piped and sys.stdout.isatty():
        raise InputError(
            "OUT: got -, but stdout is a terminal, expected a file or a pipe; add > out.png, or name a file"
        )
    with tempfile.TemporaryDirectory(prefix="nlflow-") as folder:
        source, names = sources[0], {}
        if str(source) == PIPE:
            source = _received(Path(folder))
            names[str(source)] = "stdin"
        if piped:
            out = Path(folder) / f"stdout{_extension(source, names, form)}"
            target = str(out)
            names |= {str(out): "stdout", out.name: "stdout"}
        found = Ends([source], target, piped, names)
        try:
            yield found
        except NlflowError as error:
            raise type(error)(found.told(str(error))) from error


def _extension(source: Path, names: dict[str, str], form: str | None) -> str:
    if form is not None:
        found = f".{form.lower().lstrip('.')}"
        if found not in _KNOWN or not FORMATS[_KNOWN[found]].written or FORMATS[_KNOWN[found]].folder:
            listed = ", ".join(
                name[1:] for name, one in _KNOWN.items() if FORMATS[one].written and not FORMATS[one].folder
            )
            raise InputError(f"--write format: got {form!r}, expected one of {listed}; correct it")
        return found
    content = ""
    if source.is_file():
        with source.open("rb") as stream:
            content = by_content(stream.read(HEAD))
    named = extension(source)
    found = content if content in _KNOWN and _KNOWN[content] != _KNOWN.get(named) else named
    if not found or FORMATS[_KNOWN[found]].folder:
        what = names.get(str(source), str(source))
        raise InputError(f"OUT: got - for {what}, expected a format that fits a stream; say which: --write format=png")
    return written_extension(Path(f"x{found}"))


def _received(folder: Path) -> Path:
    if sys.stdin.isatty():
        raise InputError(
            "IN: got -, but stdin is a terminal, expected a pipe or a file; name a file, or add < noisy.png"
        )
    stream = sys.stdin.buffer
    head = stream.read(HEAD)
    if not head:
        raise FileFormatError(
            "stdin: got nothing, expected a file; look whether the command before the pipe has failed"
        )
    found = by_content(head)
    if found not in _KNOWN:
        got, way = foreign(Path("FILE"), found)
        got = got or "content of an unknown format"
        raise FileFormatError(
            f"stdin: got {got}, expected one of {READABLE}; {way or 'convert it first, or name a file as IN'}"
        )
    path, limit, count = folder / f"stdin{found}", memory_limit(), len(head)
    with path.open("wb") as file:
        file.write(head)
        while block := stream.read(_BLOCK):
            count += len(block)
            if count > limit:
                raise MemoryLimitError(
                    f"stdin: got more than {format_bytes(limit)}, expected less; save it, and name the file"
                )
            file.write(block)
    return path
