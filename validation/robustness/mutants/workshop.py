"""Where mutants are tried: a private copy of the checkout, and a process there that runs tests."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

from validation.robustness import ROOT
from validation.robustness.mutants.operators import SOURCE, Mutant

__all__ = ["Ran", "Workshop", "copy"]

LARGE = ("numpy", "scipy.sparse.linalg", "scipy.special", "scipy.optimize", "scipy.fft", "numba.extending",
         "matplotlib.figure", "skimage", "torch")  # fmt: skip
_START = 180.0  # seconds until the first test starts, and those that any test may take: loops may have to be compiled
_TIMES = 10.0  # a test may take so many times its normal seconds longer


def copy(source: Path, target: Path) -> None:
    """Copy what git knows or would add, and compiled loops; times of files stay, since caches go by them."""
    listed = subprocess.run(["git", "-C", source, "ls-files", "-z", "-co", "--exclude-standard"],
                            capture_output=True, text=True, check=False)  # fmt: skip
    files = [Path(file) for file in listed.stdout.split("\0") if file]
    if listed.returncode != 0:  # no checkout but a copy of one
        files = [path.relative_to(source) for path in source.rglob("*")]
    loops = [path.relative_to(source) for path in (source / SOURCE).rglob("__pycache__/*.nb[ci]")]
    for file in (*files, *loops):
        if (source / file).is_file():
            (target / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source / file, target / file)


@dataclass(frozen=True)
class Ran:
    """What came of a request.

    Attributes
    ----------
    outcome : str
        ``passed``, ``failed``, ``timeout``, ``died`` or ``nothing`` (no test was collected).
    test : str
        The first test that failed, or the one that ran last.
    tried, selected : int
        Tests that were started, and those that could have been.
    seconds : float
    """

    outcome: str
    test: str
    tried: int
    selected: int
    seconds: float


class Workshop:
    """A copy of a checkout in which one source at a time is another, and tests are run.

    Parameters
    ----------
    folder : Path
        Gets the copy, and temporary files of the tests.
    root : Path
        The checkout.
    large : sequence of str
        Packages that are imported once for all tests.
    """

    def __init__(self, folder: Path, root: Path = ROOT, large: Sequence[str] = LARGE) -> None:
        self.tree = folder / "tree"
        copy(root, self.tree)
        (folder / "tmp").mkdir(parents=True)
        paths = [str(self.tree / "nonlocal"), str(self.tree)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "TMPDIR": str(folder / "tmp")}
        environment.pop("NUMBA_CACHE_DIR", None)
        self._aside, self._process = folder / "aside", 0
        self._server = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("server.py")), *large],
            cwd=self.tree, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        self._messages: SimpleQueue[dict[str, Any] | None] = SimpleQueue()
        Thread(target=self._read, daemon=True).start()
        self._next(_START)  # it is ready

    def close(self) -> None:
        """End the process."""
        self._server.kill()
        self._kill()
        self._server.communicate()

    def imports(self, file: str) -> Ran:
        """Import a source of the package."""
        module = file.removeprefix("nonlocal/").removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        return self._run({"module": module}, {})

    def tests(
        self, files: Sequence[str], seconds: Mapping[str, float], most: float, without: Iterable[str] = ()
    ) -> Ran:
        """Run tests of files until one fails.

        Parameters
        ----------
        files : sequence of str
        seconds : mapping of str to float
            The tests in their order, each with the seconds that it takes; an empty one means all tests of the files.
        most : float
            Seconds for all of them; the first is run in any case.
        without : iterable of str
            Tests that are left out.
        """
        request = {"files": list(files), "seconds": dict(seconds), "most": most, "without": list(without)}
        return self._run(request, seconds)

    def claims(self, names: Sequence[str], seconds: Mapping[str, float], most: float) -> Ran:
        """Run claims in their quick form until one does not pass; as many as the seconds suffice for, at least one."""
        kept, left = [], most
        for name in names:
            left -= seconds.get(name, 0.0)
            if left > 0 or not kept:
                kept.append(name)
        return replace(self._run({"claims": kept}, seconds), selected=len(names))

    @contextmanager
    def changed(self, mutant: Mutant) -> Iterator[None]:
        """Put a mutant into its place for a while.

        Loops that were compiled with its source are put aside: caches know of changes of a loop's own file only.
        """
        path = self.tree / mutant.file
        source, times = path.read_bytes(), path.stat()
        loops = self._compiled_with(path) if path.parent.name == "numba" else []
        self._aside.mkdir(exist_ok=True)
        for loop in loops:
            for file in (path.parent / "__pycache__").glob(f"{loop}.*.nb[ci]"):
                file.rename(self._aside / file.name)
        try:
            path.write_bytes(mutant.applied(source))
            yield
        finally:
            path.write_bytes(source)
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
            for loop in loops:
                for file in (path.parent / "__pycache__").glob(f"{loop}.*.nb[ci]"):
                    file.unlink()
            for file in self._aside.iterdir():
                file.rename(path.parent / "__pycache__" / file.name)

    def _compiled_with(self, path: Path) -> list[str]:
        """Return a module of loops and those that import it, at any remove."""
        found = [path.stem]
        for name in found:
            for other in sorted(path.parent.glob("*.py")):
                if other.stem not in found and re.search(rf"nlflow\.backends\.numba\.{name}\b", other.read_text()):
                    found.append(other.stem)
        return found

    def _run(self, request: dict[str, Any], seconds: Mapping[str, float]) -> Ran:
        assert self._server.stdin is not None
        begin = time.perf_counter()
        self._server.stdin.write(json.dumps(request).encode() + b"\n")
        self._server.stdin.flush()
        self._process = self._next(_START)["process"]
        started: list[str] = []
        failed, late, selected, allowed = "", False, 0, _START
        while "ended" not in (message := self._next(allowed)):
            if not message:
                late = True
                self._kill()
            selected = message.get("selected", selected)
            failed = failed or message.get("failed", "")
            if "start" in message:
                started.append(message["start"])
                allowed = _START + _TIMES * seconds.get(message["start"], 0.0)
        self._kill()  # what its tests have left running
        status = message["ended"]
        outcome = "timeout" if late else "failed" if failed else {0: "passed", 5: "nothing"}.get(status, "died")
        test = failed or (started[-1] if started else "")
        shutil.rmtree(self._aside.with_name("tmp"), ignore_errors=True)
        self._aside.with_name("tmp").mkdir(exist_ok=True)
        return Ran(outcome, test, len(started), selected, time.perf_counter() - begin)

    def _kill(self) -> None:
        if self._process:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process, signal.SIGKILL)

    def _next(self, seconds: float) -> dict[str, Any]:
        """Return the next message; an empty one where none comes in time."""
        try:
            message = self._messages.get(timeout=seconds)
        except Empty:
            return {}
        if message is None:
            raise RuntimeError(f"the process that runs tests ended: see {self.tree / 'server.log'}")
        return message

    def _read(self) -> None:
        assert self._server.stdout is not None
        for line in self._server.stdout:
            self._messages.put(json.loads(line))
        self._messages.put(None)
