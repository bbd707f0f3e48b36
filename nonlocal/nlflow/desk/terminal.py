"""Terminals."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from nlflow.backends.progress import bar

PAUSE = 30  # seconds between lines of progress
_REMEDIES = {
    errno.EMFILE: "; allow more open files, as with ulimit -n 256",
    errno.ENOSPC: "; free some space",
    errno.ENAMETOOLONG: "; choose a shorter name",
}


# What messages of the library advise, as the shell says it.
_IN_SHELL = (
    (r"estimate_noise\(image, flat=np\.s_\[(\d+:\d+), (\d+:\d+)\]\)\.model", r"nonlocal denoise IN OUT --flat \1,\2"),
    (r"flat=np\.s_\[(\d+:\d+), (\d+:\d+)\]", r"--flat \1,\2"),
    (r"estimate_noise\(other\)\.model", "nonlocal noise OTHER --save camera.json, then --noise camera.json"),
    (r"estimate_noise\(image\)\.model", "nonlocal noise FILE --save MODEL.json"),
    (r"strength=0\.5", "--strength 0.5"),
    (r"\bor give sigma\b", "or give --sigma"),
    (
        r"noise=Poisson\(gain=\.\.\., sigma=\.\.\., offset=\.\.\.\)",
        "--set gain=... --set read-noise=... --set offset=...",
    ),
    (r"such as 'distilbert-base-uncased'", "nonlocal attention --help has examples"),
    (r"as Noise\.save writes it", "as `nonlocal noise --save` writes it"),
)


def in_shell(message: str) -> str:
    for advice, command in _IN_SHELL:
        message = re.sub(advice, command, message)
    return message


def echo(text: str, *, err: bool = False) -> None:
    """Print `text`; control characters, and those that the encoding lacks, become escapes."""
    import typer

    from nlflow.errors import visible

    text = visible(text, keep="\n\t")
    encoding = getattr(sys.stderr if err else sys.stdout, "encoding", None) or "utf-8"
    with suppress(OSError) if err else nullcontext():  # no note is worth the result
        typer.echo(text.encode(encoding, "backslashreplace").decode(encoding), err=err)


def say(level: str, text: str) -> None:
    from nlflow.errors import visible

    echo(f"nonlocal: {level}: {in_shell(visible(text))}", err=True)


def ensure_streams() -> None:
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    if sys.stderr is None:
        sys.stderr = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115  # as long as the process


def nobody_reads(error: Exception) -> bool:
    if isinstance(error, BrokenPipeError):
        return True
    return os.name == "nt" and isinstance(error, OSError) and error.errno == errno.EINVAL and error.filename is None


def close_stdout() -> None:
    try:
        number = sys.stdout.fileno()
    except (AttributeError, OSError, ValueError):  # it is no file
        return
    os.dup2(os.open(os.devnull, os.O_WRONLY), number)


def mendable(error: Exception) -> str | None:
    """Return the message of an error that a user can mend in one line, and None for any other."""
    from nlflow.errors import NlflowError, shortened, visible

    if not isinstance(error, NlflowError | OSError | MemoryError):
        return None
    remedy = _REMEDIES.get(error.errno or 0, "") if isinstance(error, OSError) else ""
    told = str(error)
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        told = f"{shortened(error.filename)}: {error.strerror}"
    return visible(" ".join(told.splitlines()) + remedy) or "out of memory; crop the input or close other programs"


def print_table(rows: list[tuple[str, str]], *, err: bool = False) -> None:
    from nlflow.errors import visible

    shown = [(visible(name), visible(str(value))) for name, value in rows]
    width = max(len(name) for name, _ in shown)
    for name, value in shown:
        echo(f"{name:<{width}}  {value}", err=err)


def print_json(report: Mapping[str, Any]) -> None:
    from nlflow.store.encoding import plain

    echo(json_text(plain(report)))


def json_text(value: Any, margin: str = "") -> str:
    inner = margin + "  "
    if isinstance(value, dict) and value:
        rows = [f"{inner}{json.dumps(key)}: {json_text(entry, inner)}" for key, entry in value.items()]
        return "{\n" + ",\n".join(rows) + f"\n{margin}}}"
    if isinstance(value, list) and any(isinstance(entry, dict | list) for entry in value):
        return "[\n" + ",\n".join(inner + json_text(entry, inner) for entry in value) + f"\n{margin}]"
    return json.dumps(value, allow_nan=False)


def shows_progress(quiet: bool) -> bool:
    return not quiet and sys.stderr.isatty()


def progress_bar(quiet: bool, **words: Any) -> Any:
    return bar(progress=shows_progress(quiet), **words)


class Log:
    """Progress if stderr is no terminal: the beginning, and a line every half minute."""

    def __init__(self, name: str = "") -> None:
        self.name = name
        self._last, self._share = time.monotonic(), 0.0
        self._begun = False

    def begin(self, text: str) -> None:
        if not self._begun:
            say("note", f"{self.name}: {text}")
        self._begun = True

    def __call__(self, share: float) -> None:
        now = time.monotonic()
        if now - self._last >= PAUSE:
            gained = share - self._share
            minutes = (1 - share) * (now - self._last) / gained / 60 if gained > 0 and self._share > 0 else 0.0
            left = f", about {math.ceil(minutes)} min left" if minutes > 1 else ""
            self._last, self._share = now, share
            say(self.name, f"{math.floor(100 * share)} % done{left}")


def progress_of(quiet: bool, name: str = "") -> bool | Log:
    return shows_progress(quiet) or (not quiet and Log(name))


def tell_of_compiling(quiet: bool) -> None:
    from nlflow.backends.numba import loading

    def say() -> None:
        from tqdm import tqdm  # writes above the bars that are shown

        tqdm.write("nonlocal: note: compiling loops, once in this installation: about a minute", file=sys.stderr)

    loading.tell = say if shows_progress(quiet) else None


@contextmanager
def warnings_kept() -> Iterator[list[str]]:
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        yield texts
    texts += dict.fromkeys(str(warning.message) for warning in caught)


@contextmanager
def named(path: Path) -> Iterator[None]:
    from nlflow.errors import InputError

    try:
        yield
    except InputError as error:
        what, colon, rest = str(error).partition(": ")
        if what != "image":
            raise
        raise InputError(f"{path}{colon}{rest}") from error


def check_installed(command: str, module: str, named: str) -> None:
    from nlflow.errors import not_installed

    if find_spec(module) is None:
        raise not_installed(f"{command}:", named, command)


def check_out(out: Path | None) -> None:
    from nlflow.errors import FileFormatError

    if out is not None and out.exists() and not out.is_dir():
        raise FileFormatError(f"--out: got {out}, which is a file, expected a folder; choose another name")


def read_tokens(option: str, path: Path | None) -> Any:
    if path is None:
        return None
    from nlflow.errors import FileFormatError
    from nlflow.store.npy import read_array

    try:
        with path.open("rb") as stream:
            if stream.read(4) == b"PK\x03\x04":
                raise FileFormatError(f"{option}: got {path}, an archive of arrays, expected an .npy file with one")
            stream.seek(0)
            array = read_array(stream, path.stat().st_size, what=f"{option} {path}")
    except OSError as error:
        raise FileFormatError(f"{option}: got {path} ({error.strerror or error}), expected an .npy file") from error
    except FileFormatError:
        raise
    except ValueError as error:
        raise FileFormatError(
            f"{option}: got {path}, which is no .npy file of numbers ({error}); write it with numpy.save"
        ) from error
    return array
