"""All readers under fuzzing for a stated time, each in processes of its own; what came of it as rows of a table."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from nlflow.studies.cases import Case
from validation.robustness import ROOT
from validation.robustness.contract import Row
from validation.robustness.fuzz.engine import PATIENCE, WITHOUT, Counts
from validation.robustness.fuzz.targets import TARGETS
from validation.robustness.fuzz.watch import ENDED, READ, REFUSED

__all__ = ["run_target", "trials"]

_FEWEST = 3.0  # seconds that are worth a start


def trials(minutes: float, out: Path, *, names: Sequence[str] = (), seed: int = 0, mutations: int = 0) -> list[Case]:
    """Return the readers of the package, each to be fuzzed for so long.

    Parameters
    ----------
    minutes : float
        Wall time of each, its start included.
    out : Path
        Gets a folder for each reader: what failed, with its trace; the corpus; counts; what the fuzzer said.
    names : sequence of str
        Of the readers; all by default.
    seed : int
        Of the mutations. With atheris the search depends on the speed of the machine as well.
    mutations : int
        So many at random, without a guide, in place of as many as the time allows: then the seed alone says which.

    Returns
    -------
    list of Case
        Their rows: ``tried`` inputs, how many were read and how many were refused by name, and ``wrong``: other
        exceptions, what a reader may not do, crashes, timeouts, memory.
    """
    long = f"{mutations} mutations" if mutations else f"{minutes:g} minutes"
    return [
        Case(f"fuzz, {name}, {long}, seed {seed}", run_target, (name, minutes, out / name, seed, mutations))
        for name in names or TARGETS
    ]


def run_target(name: str, minutes: float, out: Path, seed: int = 0, mutations: int = 0, *, guided: bool = True) -> Row:
    """Fuzz one reader; a process that dies is started again until the time is over.

    Returns
    -------
    Row
        See `trials`.
    """
    out.mkdir(parents=True, exist_ok=True)
    for pattern in ("counts", "current", "log-*.txt", "wrong-*", "died-*", "crash-*", "oom-*", "ended-*"):
        for old in out.glob(pattern):
            old.unlink()
    begun = time.monotonic()
    died: list[str] = []
    start = 0
    while (left := begun + 60 * minutes - time.monotonic()) > _FEWEST or not start:
        start += 1
        left_over = mutations - Counts(out / "counts").as_dict()["tried"] if mutations else 0
        if mutations and left_over <= 0:
            break
        unguided = (mutations and left_over) or 2**62 * (not guided)
        code = _one_process(name, max(left, _FEWEST), out, seed + start, unguided)
        if code == 0:
            break
        died.append(f"exit code {code} of start {start}: see log-{seed + start}.txt")
        _keep_current(out, seed + start)
        if len(died) > 20:
            break
    counts = Counts(out / "counts").as_dict()
    wrong = counts["wrong"] + len(died)
    ended = counts["read"] + counts["refused"] + counts["wrong"]
    outcomes = {READ: counts["read"], REFUSED: counts["refused"] - counts["ended"], ENDED: counts["ended"]}
    if counts["wrong"]:
        outcomes["other exception"] = counts["wrong"]
    if counts["tried"] > ended:
        outcomes["crash, timeout or memory"] = counts["tried"] - ended
    kept = sorted(path for pattern in ("wrong-*.txt", "died-*", "crash-*", "oom-*") for path in out.glob(pattern))
    return Row(
        fault=f"hostile input: {TARGETS[name].about}",
        tried=counts["tried"],
        outcomes=outcomes,
        lost=0,
        wrong=wrong,
        seconds=time.monotonic() - begun,
        details={
            "reader": name,
            "fuzzer": f"{mutations} mutations at random"
            if mutations
            else "atheris"
            if guided and importlib.util.find_spec("atheris")
            else WITHOUT,
            "processor seconds": round(counts["busy"] / 1e9),
            "corpus": sum(1 for _ in (out / "corpus").glob("*")),
            "died": died,
            "findings": {path.name: _first_line(path) for path in kept},
        },
    )


def _keep_current(out: Path, number: int) -> None:
    """Keep what a process that died was reading."""
    path = out / "current"
    if path.is_file():
        data = path.read_bytes()
        (out / f"died-{number}").write_bytes(data[8 : 8 + int.from_bytes(data[:8], "little")])


def _first_line(path: Path) -> str:
    return path.read_text(encoding="utf-8").split("\n", 1)[0] if path.suffix == ".txt" else ""


def _one_process(name: str, seconds: float, out: Path, seed: int, unguided: int) -> int:
    """Run the engine once; return its exit code, 0 when it ended by itself with nothing to tell."""
    environment = {
        **os.environ,
        "PYTHONDONTWRITEBYTECODE": "1",  # modules that are loaded late are written nowhere
        "PYTHONHASHSEED": "0",
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "NUMBA_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }
    # In memory where there is such a place: a disk that is flushed after each file would set the pace.
    place = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with (
        tempfile.TemporaryDirectory(prefix="nlflow-fuzz-", dir=place) as work,
        (out / f"log-{seed}.txt").open("wb") as log,
    ):
        words = [name, str(seconds), str(out), work, str(seed), "--unguided", str(unguided)]
        process = subprocess.Popen(
            [sys.executable, "-m", "validation.robustness.fuzz.engine", *words],
            cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            return process.wait(seconds + 4 * PATIENCE + 60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            return -9
        except BaseException:  # Ctrl-C: the fuzzer ends with whoever started it
            process.kill()
            process.wait()
            raise
