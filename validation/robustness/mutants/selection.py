"""Which tests can see a mutant: those that ran its statement, by a map that coverage made; the nearest first."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import TypeAlias
from xml.etree import ElementTree

from coverage import CoverageData

from validation.robustness import ROOT
from validation.robustness.mutants.operators import SOURCE, Mutant
from validation.robustness.mutants.workshop import Ran, Workshop, copy

__all__ = ["Batch", "Map", "make_map", "mirrors"]

Batch: TypeAlias = tuple[list[str], dict[str, float]]
"""Files of tests, and the tests in order with the seconds that each takes; none for all in the files."""

_LOOPS = SOURCE + "/backends/numba"
_SETTINGS = "[run]\nbranch = false\nsource = nlflow\n[report]\nfail_under = 0\n"
_UNKNOWN = 0.1  # seconds of a test whose time is not told


def make_map(folder: Path, jobs: int, root: Path = ROOT) -> Path:
    """Run all tests that are not slow in a copy of the checkout, which stays; return what `coverage` wrote there."""
    tree = folder / "map"
    if not (tree / ".coverage").exists():
        copy(root, tree)
        (tree / "map.ini").write_text(_SETTINGS)
        subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-m", "not slow", "-n", str(jobs), "--dist", "loadfile", "--cov",
             "--cov-config=map.ini", "--cov-context=test", "--cov-report=", "--junitxml=junit.xml"],
            cwd=tree, env={**os.environ, "PYTHONPATH": str(tree / "nonlocal")}, check=False,
        )  # fmt: skip
    return tree / ".coverage"


def mirrors(files: Iterable[str], sources: Iterable[str]) -> dict[str, int]:
    """Return the files of tests that share words with the names of sources, the nearest first, and how many words."""
    words = set(re.findall(r"[a-z]+", " ".join(source.removeprefix(SOURCE) for source in sources))) - {"py"}
    own = {file: set(Path(file).stem.removeprefix("test_").split("_")) for file in files}
    near = sorted((-len(own[file] & words), len(own[file] - words), file) for file in own if own[file] & words)
    return {file: -count for count, _, file in near}


class Map:
    """From lines to tests.

    Parameters
    ----------
    path : Path, optional
        What `coverage` wrote, with one context a test. The sources are read where they were then, if they still are
        there, so that lines that have moved since are found. ``junit.xml`` beside it tells seconds. Without a map, and
        where it knows of no test, the tests are those in the files whose names are nearest to a module's.
    root : Path
        The checkout.
    """

    def __init__(self, path: Path | None = None, root: Path = ROOT) -> None:
        self.root, self._lock = root, Lock()
        self._data, self._places = None, dict[str, str]()
        self._seconds: dict[str, float] = {}
        self._tests: dict[str, list[str]] = {}
        self.files = sorted(file.relative_to(root).as_posix() for file in (root / "tests").rglob("test_*.py"))
        if path is None:
            return
        self._data = CoverageData(str(path))
        self._data.read()
        if not self._data.measured_files():
            raise FileNotFoundError(f"{path}: no map of coverage")
        for place in self._data.measured_files():
            self._places[SOURCE + place.rpartition(SOURCE)[2]] = place
        for context in self._data.measured_contexts():
            if context:
                test = context.rpartition("|")[0]
                self._tests.setdefault(test.partition("::")[0], []).append(test)
        if (times := path.with_name("junit.xml")).exists():
            for case in ElementTree.parse(times).iter("testcase"):
                name = f"{case.get('classname')}.{case.get('name')}"
                self._seconds[name] = self._seconds.get(name, 0.0) + float(case.get("time", 0.0))

    def tests_of(self, mutant: Mutant) -> list[Batch]:
        """Return those in the files that are nearest to the module, and all others, the cheapest first."""
        with self._lock:
            loops = mutant.file.startswith(_LOOPS)
            lines = self._callers(mutant.file) if loops else {mutant.file: self._lines(mutant)}
            near = mirrors(self.files, [mutant.file, *lines])
            nearest = [file for file in near if near[file] == max(near.values())]
            if not (running := self._running(lines)):
                return [(nearest, {})] if nearest else []
            of_file: dict[str, list[tuple[float, str]]] = {}
            for test in running:
                of_file.setdefault(test.partition("::")[0], []).append((self._time(test), test))
            place = {file: index for index, file in enumerate(near)}

            def order(file: str) -> tuple[int, float]:
                return place.get(file, len(place)), sum(time for time, _ in of_file[file])

            batches: list[Batch] = [([], {}), ([], {})]
            for file in sorted(set(of_file) & set(self.files), key=order):
                files, seconds = batches[file not in nearest]
                files.append(file)
                seconds.update({test: time for time, test in sorted(of_file[file])})
            return [batch for batch in batches if batch[0]]

    def ask(self, workshop: Workshop, batch: Batch, most: float, without: set[str]) -> Ran:
        """Run tests of a mutant until one fails."""
        return workshop.tests(batch[0], batch[1], most, without)

    def _running(self, lines: dict[str, set[int]]) -> set[str]:
        """Return the tests that ran one of the lines."""
        tests = set()
        for file, numbers in lines.items():
            contexts = self._contexts(file)
            for context in {context for number in numbers for context in contexts.get(number, ())} - {""}:
                test, _, when = context.rpartition("|")
                # What a fixture has computed may be looked at by any other test of the file.
                tests.update([test] if when == "run" else self._tests[test.partition("::")[0]])
        return tests

    def _time(self, test: str) -> float:
        """Return the seconds that a test takes."""
        name, bracket, parameters = test.partition("[")
        name = name.replace(".py::", ".").replace("::", ".").replace("/", ".")
        return self._seconds.get(name + bracket + parameters, _UNKNOWN)

    def _lines(self, mutant: Mutant) -> set[int]:
        """Return the lines of a map that tell who runs a mutant.

        Those of its statement, if what it computes is not kept from one call for the next; those of the whole function
        if it is in the signature, and of all functions of the file otherwise.
        """
        then = _functions(self._source(mutant.file))
        now = _functions((self.root / mutant.file).read_text())
        if mutant.function in then and mutant.function in now and not _cached(now, mutant.function):
            before, after = then[mutant.function], now[mutant.function]
            if mutant.first < after.body[0].lineno or ast.dump(before) != ast.dump(after):
                return _body(before)
            by = before.lineno - after.lineno
            return {line + by for line in range(mutant.first, mutant.line + 1)}
        return {line for function in then.values() for line in _body(function)}

    def _callers(self, file: str) -> dict[str, set[int]]:
        """Return the lines of Python that call loops of a module, by file: those of functions that name them."""
        modules = [Path(file).stem]
        for module in modules:
            for other in sorted((self.root / _LOOPS).glob("*.py")):
                if other.stem not in modules and re.search(rf"nlflow\.backends\.numba\.{module}\b", other.read_text()):
                    modules.append(other.stem)
        found: dict[str, set[int]] = {}
        for path in sorted((self.root / SOURCE).rglob("*.py")):
            caller = path.relative_to(self.root).as_posix()
            if "backends.numba" in (source := self._source(caller)) and not caller.startswith(_LOOPS):
                names = set(_imported(ast.parse(source), modules))
                for function in _functions(source).values():
                    if names & {node.id for node in ast.walk(function) if isinstance(node, ast.Name)}:
                        found.setdefault(caller, set()).update(_body(function))
        return found

    def _source(self, file: str) -> str:
        """Return a source as it was when the map was made, as far as is known."""
        place = Path(self._places.get(file, ""))
        return (place if place.is_file() else self.root / file).read_text()

    @lru_cache(maxsize=8)  # noqa: B019 - there is one map
    def _contexts(self, file: str) -> dict[int, list[str]]:
        return self._data.contexts_by_lineno(self._places[file]) if self._data and file in self._places else {}


@lru_cache(maxsize=8)
def _functions(source: str) -> dict[str, ast.FunctionDef]:
    """Return the functions of a source by qualified name; the last of those with one name."""

    def within(node: ast.AST, names: tuple[str, ...]) -> Iterator[tuple[str, ast.FunctionDef]]:
        for child in ast.iter_child_nodes(node):
            inner = (*names, child.name) if isinstance(child, ast.FunctionDef | ast.ClassDef) else names
            if isinstance(child, ast.FunctionDef):
                yield ".".join(inner), child
            yield from within(child, inner)

    return dict(within(ast.parse(source), ()))


def _body(function: ast.FunctionDef) -> set[int]:
    """Return the lines that run when a function is called."""
    return set(range(function.body[0].lineno, (function.end_lineno or 0) + 1))


def _cached(functions: dict[str, ast.FunctionDef], name: str) -> bool:
    """Tell whether a function, or one around it, keeps its results."""
    parts = name.split(".")
    around = [functions.get(".".join(parts[: count + 1])) for count in range(len(parts))]
    return any(re.match(r"(functools\.)?(lru_)?cache\b(?!_)", ast.unparse(decorator))
               for function in around if function is not None for decorator in function.decorator_list)  # fmt: skip


def _imported(tree: ast.AST, modules: Iterable[str]) -> Iterator[str]:
    """Yield the names that a source gives to modules of loops, and to what it imports from them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                if any(re.match(rf"nlflow\.backends\.numba\.{module}\b", whole) for module in modules):
                    yield alias.asname or alias.name
