"""One reader under fuzzing in a process of its own, which `campaign` starts.

With atheris the branches of the modules that a target names, and of those alone, guide the search. Without it the same
mutations are applied to the seeds at random. Counts are kept in a small file that outlasts whatever becomes of the
process; a failure is written beside it, with its trace, and the search goes on.
"""

from __future__ import annotations

import argparse
import faulthandler
import hashlib
import importlib
import mmap
import os
import random
import struct
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

from validation.robustness.fuzz.mutate import MUTATORS, random_bytes
from validation.robustness.fuzz.targets import TARGETS, Target
from validation.robustness.fuzz.watch import ENDED, READ, Guard, broken, judge, place_of

__all__ = ["COUNTS", "PATIENCE", "WITHOUT", "Counts", "main", "mutated"]

COUNTS = ("tried", "read", "refused", "wrong", "busy", "ended")  # "busy" in nanoseconds of a processor
PATIENCE = 30  # seconds for one input, on a machine that has other work
_MEMORY = 3072  # MiB of a whole process, torch and all
WITHOUT = "atheris is not installed: pip install 'nlflow[fuzz]'; mutations at random, not guided by coverage, instead"


class Counts:
    """How many inputs were tried and how they ended, in a file."""

    def __init__(self, path: Path) -> None:
        if not path.exists():
            path.write_bytes(bytes(8 * len(COUNTS)))
        with path.open("r+b") as stream:
            self._map = mmap.mmap(stream.fileno(), 8 * len(COUNTS))

    def add(self, name: str, more: int = 1) -> None:
        """Count more."""
        place = 8 * COUNTS.index(name)
        (number,) = struct.unpack_from("<q", self._map, place)
        struct.pack_into("<q", self._map, place, number + more)

    def as_dict(self) -> dict[str, int]:
        """Return all counts by name."""
        return dict(zip(COUNTS, struct.unpack(f"<{len(COUNTS)}q", self._map[:]), strict=True))


class _Current:
    """The input that is being read, in a file that outlasts the process."""

    def __init__(self, path: Path, longest: int) -> None:
        path.write_bytes(bytes(8 + longest))
        with path.open("r+b") as stream:
            self._map = mmap.mmap(stream.fileno(), 8 + longest)

    def set(self, data: bytes) -> None:
        """Keep an input."""
        self._map[: 8 + len(data)] = struct.pack("<q", len(data)) + data


def _followed(place: str, atheris: Any) -> None:
    """Let the fuzzer see the branches of every function of a module, or of the classes of it that stand behind ':'."""
    name, _, classes = place.partition(":")
    module = importlib.import_module(name)

    def follow(function: Any) -> None:
        if isinstance(function, types.FunctionType) and function.__module__ == name:
            atheris.instrument_func(function)

    for label, entry in list(vars(module).items()):
        if classes and label not in classes.split(","):
            continue
        follow(entry)
        if isinstance(entry, type) and entry.__module__ == name:
            for member in list(vars(entry).values()):
                inner = getattr(member, "__func__", None) or getattr(member, "fget", None)
                inner = inner or getattr(member, "func", None) or member
                follow(inner)


def _tester(target: Target, work: Path, found: Path, counts: Counts) -> Callable[[bytes], None]:
    """Return the function that gives one input to the reader and keeps what fails."""
    reader = target.make(work)
    for seed in target.seeds():  # whatever is loaded on the first call is loaded before anything is watched
        try:
            judge(reader, seed)
        except Exception as error:
            _keep(found, seed, error, counts, tried=False)
    guard = Guard(work)
    current = _Current(found / "current", target.longest)
    seen = time.process_time_ns()

    def test(data: bytes) -> None:
        nonlocal seen
        now = time.process_time_ns()  # with what the fuzzer did since the last input
        counts.add("busy", now - seen)
        seen = now
        counts.add("tried")
        current.set(data)
        # A thread of the interpreter, which ends the process in whatever compiled code it hangs.
        faulthandler.dump_traceback_later(PATIENCE, exit=True)
        try:
            outcome = judge(reader, data, guard)
            counts.add("read" if outcome == READ else "refused")
            if outcome == ENDED:
                counts.add("ended")
                (found / f"ended-{hashlib.sha256(data).hexdigest()[:12]}").write_bytes(data)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a reader that ends the program is a finding as well
            _keep(found, data, error, counts)
        finally:
            faulthandler.cancel_dump_traceback_later()

    return test


def _keep(folder: Path, data: bytes, error: BaseException, counts: Counts, *, tried: bool = True) -> None:
    """Write an input that failed, once for each place at which inputs fail."""
    if tried:
        counts.add("wrong")
    place = place_of(error)
    path = folder / f"wrong-{hashlib.sha256(place.encode()).hexdigest()[:12]}"
    if not path.exists():
        path.write_bytes(data)
        path.with_suffix(".txt").write_text(f"{place}\n\n{broken(error)}", encoding="utf-8", errors="backslashreplace")


def _escaped(word: str) -> str:
    return "".join(f"\\x{byte:02x}" for byte in word.encode())


def _changed(change: Any, data: bytes, longest: int, rng: random.Random, inner: Any) -> bytes:
    """Return data changed by its structure, or as plain bytes where it has none any more."""
    try:
        return bytes(change(data, longest, rng, inner))[:longest]
    except Exception:  # what was mutated before cannot be taken apart, in as many ways as there are
        return random_bytes(data, longest, rng)


def _guided(atheris: Any, target: Target, test: Callable[[bytes], None], out: Path, seconds: float, seed: int) -> None:
    for name in target.modules:
        _followed(name, atheris)
    change = MUTATORS[target.structure]

    def mutate(data: bytes, longest: int, number: int) -> bytes:
        rng = random.Random(number)
        inner = (lambda part, most, _: atheris.Mutate(part, most)) if rng.randrange(3) else random_bytes
        if rng.randrange(5) == 0:
            return inner(data, longest, rng)[:longest]
        return _changed(change, data, longest, rng, inner)

    corpus = out / "corpus"
    corpus.mkdir(exist_ok=True)
    for content in target.seeds():
        (corpus / hashlib.sha256(content).hexdigest()[:16]).write_bytes(content)
    arguments = [
        sys.argv[0], str(corpus), f"-max_total_time={max(1, int(seconds))}", f"-timeout={2 * PATIENCE}",
        f"-seed={seed or 1}", f"-rss_limit_mb={_MEMORY}", f"-max_len={target.longest}", f"-artifact_prefix={out}/",
        "-close_fd_mask=3",
    ]  # fmt: skip
    if target.words:
        words = out / "words"
        words.write_text("".join(f'"{_escaped(word)}"\n' for word in target.words))
        arguments.append(f"-dict={words}")
    atheris.Setup(arguments, test, custom_mutator=mutate)
    atheris.Fuzz()


def mutated(target: Target, data: bytes, words: list[bytes], rng: random.Random) -> bytes:
    """Return an input of a target with one to four mutations, of its structure or of bytes, without any guide."""

    def inner(part: bytes, longest: int, dice: random.Random) -> bytes:
        if words and dice.randrange(2):
            place = dice.randrange(len(part) + 1)
            part = part[:place] + dice.choice(words) + part[place:]
        return random_bytes(part, longest, dice)

    for _ in range(rng.choice((1, 1, 2, 4))):
        data = _changed(MUTATORS[target.structure], data, target.longest, rng, inner)
    return data


def _unguided(target: Target, test: Callable[[bytes], None], seconds: float, seed: int, most: int) -> None:
    """Mutate the seeds at random until the time is over, or so many times: then the seed alone says how."""
    rng = random.Random(seed)
    contents = target.seeds()
    words = [word.encode() for word in target.words]
    end = time.monotonic() + seconds
    while most and time.monotonic() < end:
        most -= 1
        test(mutated(target, rng.choice(contents), words, rng))


def main() -> None:
    """Fuzz one reader."""
    parser = argparse.ArgumentParser()
    parser.add_argument("target", choices=TARGETS)
    parser.add_argument("seconds", type=float)
    parser.add_argument("out", type=Path)
    parser.add_argument("work", type=Path)
    parser.add_argument("seed", type=int)
    parser.add_argument("--unguided", type=int, default=0)
    given = parser.parse_args()
    os.environ["NLFLOW_MEMORY_LIMIT"] = str(128 * 2**20)
    os.environ["NLFLOW_DECODE_SECONDS"] = str(PATIENCE / 2)  # a child that hangs ends before this process does
    target = TARGETS[given.target]
    counts = Counts(given.out / "counts")
    end = time.monotonic() + given.seconds
    atheris: Any = None
    if not given.unguided:
        try:
            import atheris  # type: ignore[import-not-found, import-untyped, no-redef, unused-ignore]
        except ImportError:
            print(WITHOUT, file=sys.stderr)
    test = _tester(target, given.work, given.out, counts)
    left = end - time.monotonic()
    if atheris is None:
        _unguided(target, test, left, given.seed, given.unguided or -1)
    else:
        _guided(atheris, target, test, given.out, left, given.seed)


if __name__ == "__main__":
    main()
