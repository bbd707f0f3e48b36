"""The measure of the tests: which changes are made of a source, which are drawn, who can see them, what is noticed."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from coverage import CoverageData

from validation.robustness import ROOT
from validation.robustness.mutants.__main__ import Campaign, main
from validation.robustness.mutants.formulas import Formulas, WithDecisions
from validation.robustness.mutants.operators import SCOPE, Mutant, draw, mutants_of, mutants_under, part_of
from validation.robustness.mutants.results import EQUIVALENT, Result, judged, render, results_table
from validation.robustness.mutants.selection import Map, mirrors
from validation.robustness.mutants.workshop import Workshop
from validation.tables import Entry

SOURCE = '''"""Text with 1 < 2."""
__all__ = ["f"]
_BLOCK = 64
LIMIT = 3
TABLE = (0.5,)


class C:
    def f(self, x: "Literal[1]", *, y=True) -> "Literal[2]":
        """Text with 3 + 4."""
        if x < 1 and not y:  # 5 * 6
            raise ValueError(f"x: got {x - 7}, expected > 8")
        x += 9 * (x)
        return min(x, y)

    def __repr__(self):
        return "10" + str(11)
'''
CHANGES = [
    ("", "number +1", "TABLE = (0.5,) -> TABLE = (1.5,)"),
    ("", "number -1", "TABLE = (0.5,) -> TABLE = ((-0.5),)"),
    ("C.f", "True to False", None),
    ("C.f", "condition negated", None),
    ("C.f", "and to or", None),
    ("C.f", "< to <=", None),
    ("C.f", "< to >=", "if x < 1 and not y: # 5 * 6 -> if x >= 1 and not y: # 5 * 6"),
    ("C.f", "number +1", None),
    ("C.f", "number -1", None),
    ("C.f", "not removed", "if x < 1 and not y: # 5 * 6 -> if x < 1 and y: # 5 * 6"),
    ("C.f", "statement removed", None),
    ("C.f", "+= to -=", None),
    ("C.f", "statement removed", "x += 9 * (x) -> pass"),
    ("C.f", "* to /", "x += 9 * (x) -> x += 9 / (x)"),
    ("C.f", "number +1", None),
    ("C.f", "number -1", None),
    ("C.f", "returned value to None", "return min(x, y) -> return None"),
    ("C.f", "min to max", "return min(x, y) -> return max(x, y)"),
]


def test_numbers_and_decisions_are_changed_and_nothing_else() -> None:
    found = mutants_of(SOURCE.encode(), "a.py")
    assert [(mutant.function, mutant.operator) for mutant in found] == [change[:2] for change in CHANGES]
    for mutant, (_, _, change) in zip(found, CHANGES, strict=True):
        ast.parse(mutant.applied(SOURCE.encode()))
        assert change is None or mutant.change(SOURCE.encode()) == change
    assert len({mutant.name for mutant in found}) == len(found)


def test_formulas_are_broken_and_nothing_beside_them() -> None:
    source = """
def f(x, n, rtol):
    room = x - n
    self.iterations += n
    text = "a" + "b"
    y = np.pad(x, (n - 2 * x, 0)) + 0 * x
    found = solve(x * rtol, guess=x / y, name=x * "y")
    bad = -math.inf if x * y > 3 * y else x + 1e-12 * y
    warn("text" + x, stacklevel=5 - x)
    return -x * y**2 + found[x - y]
"""
    found = mutants_of(source.encode(), "a.py", Formulas)
    lines = {mutant.change(source.encode()) for mutant in found}
    assert lines == {
        f"return -x * y**2 + found[x - y] -> return {other}"
        for other in ("-x * y**2 - found[x - y]", "-x / y**2 + found[x - y]", "x * y**2 + found[x - y]",
                      "-x * y**(1.1 * (2)) + found[x - y]")
    }  # fmt: skip


def test_numbers_that_are_only_compared_are_no_formulas() -> None:
    source = """
def f(x, y):
    far = x * y
    twice = far + x
    told = x - y
    kept = x / y
    if twice > 3 and told > kept:
        raise ValueError(f"{told}")
    basis = x + y
    check_room("vectors", basis)
    return g(eigs(kept, ncv=basis))
"""
    operators = ([(mutant.line, mutant.operator) for mutant in mutants_of(source.encode(), "a.py", finder)]
                 for finder in (Formulas, WithDecisions))  # fmt: skip
    assert list(operators) == [[(6, "/ to *")],
                               [(3, "* to /"), (4, "+ to -"), (5, "- to +"), (6, "/ to *"), (9, "+ to -")]]  # fmt: skip


def test_names_stay_where_other_functions_change() -> None:
    later = SOURCE.replace("class C:", "def g(λ):\n    return λ < 1 < 2\n\n\nclass C:").encode()
    names = {mutant.name: mutant for mutant in mutants_of(later, "a.py")}
    for mutant in mutants_of(SOURCE.encode(), "a.py"):
        assert names[mutant.name].change(later) == mutant.change(SOURCE.encode())


@pytest.mark.slow
def test_the_draw() -> None:
    mutants = mutants_under(ROOT)
    drawn = draw(mutants, 150, 0)
    assert len(drawn) == len({mutant.name for mutant in drawn}) == 150
    assert {part_of(mutant.file) for mutant in drawn} == set(SCOPE)
    assert draw(mutants[::-1], 150, 0) == drawn != draw(mutants, 150, 1)
    # A part that grows leaves the mutants of the others; at most the shares move by one.
    fewer = [mutant for mutant in mutants if mutant.function != "PatchStencil.__init__"]
    assert len({mutant.name for mutant in drawn} - {mutant.name for mutant in draw(fewer, 150, 0)}) <= 6
    for mutant in drawn[::15]:
        source = (ROOT / mutant.file).read_bytes()
        assert ast.dump(ast.parse(mutant.applied(source))) != ast.dump(ast.parse(source)), mutant.name


@pytest.mark.slow
def test_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list", "--only", "nlflow/functionals/"]) == 0
    found = capsys.readouterr().out
    assert found.count("nonlocal/nlflow/functionals/") >= 2
    assert "nonlocal/nlflow/flows/" not in found


# ---------------------------------------------------------------------------------------------------------------------
# A package with two functions, of which one has a test.


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    root = tmp_path / "checkout"
    files = {
        "nonlocal/nlflow/__init__.py": "",
        "nonlocal/nlflow/flows/flow.py": "def half(x):\n    return x / 2\n\n\ndef third(x):\n    return x / 3\n",
        "nonlocal/nlflow/backends/numba/sums.py": "def total(x):\n    return x + x\n",
        "nonlocal/nlflow/functionals/krylov.py": "def double(x):\n"
        "    from nlflow.backends.numba.sums import total\n    return total(x)\n",
        "tests/test_flow.py": "import os\nfrom nlflow.flows.flow import half\n\n"
        "def test_breaks():\n    assert False\n\n"
        "def test_half():\n    assert half(4) == 2\n    assert os.getcwd() in half.__code__.co_filename\n",
        "pyproject.toml": "[tool.pytest.ini_options]\nmarkers = ['slow']\n",
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    subprocess.run(["git", "init", "-q", root], check=True)
    return root


def _mutant(root: Path, operator: str, function: str = "half", file: str = "nonlocal/nlflow/flows/flow.py") -> Mutant:
    found = mutants_of((root / file).read_bytes(), file)
    return next(mutant for mutant in found if (mutant.function, mutant.operator) == (function, operator))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="processes are forked")
def test_mutants_are_killed_by_tests_that_pass_without_them(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # others take a second to be imported
    monkeypatch.setenv("PYTEST_PLUGINS", "xdist.plugin,pytest_cov.plugin")
    workshop = Workshop(tmp_path / "shop", checkout, large=())
    try:
        campaign = Campaign([workshop], Map(root=checkout), 60.0)
        killed = campaign.tried(_mutant(checkout, "/ to *"))
        assert (killed.outcome, killed.how, killed.test) == ("killed", "test", "tests/test_flow.py::test_half")
        assert campaign.unsound == {"tests/test_flow.py::test_breaks"}
        survived = campaign.tried(_mutant(checkout, "/ to *", "third"))
        assert (survived.outcome, survived.test, survived.tried) == ("survived", "", 1)
        broken = campaign.tried(replace(_mutant(checkout, "/ to *"), text="/ /"))
        assert (broken.outcome, broken.how) == ("killed", "import")
        loops = workshop.tree / "nonlocal/nlflow/backends/numba"
        (loops / "more.py").write_text("from nlflow.backends.numba.sums import total\n")
        (loops / "__pycache__").mkdir()
        compiled = [loops / "__pycache__" / f"{name}.f-1.py311.1.nbc" for name in ("sums", "more", "other")]
        for path in compiled:
            path.touch()
        before = (loops / "sums.py").stat()
        with workshop.changed(_mutant(checkout, "+ to -", "total", "nonlocal/nlflow/backends/numba/sums.py")):
            assert "x - x" in (loops / "sums.py").read_text()
            assert [path.exists() for path in compiled] == [False, False, True]
        assert [path.exists() for path in compiled] == [True, True, True]
        after = (loops / "sums.py").stat()
        assert (after.st_size, after.st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    finally:
        workshop.close()
    assert "tests/test_flow.py::test_half" in killed.told


def test_maps(checkout: Path, tmp_path: Path) -> None:
    (checkout / "tests/test_more.py").touch()
    data = CoverageData(str(checkout / ".coverage"))
    for context, file, lines in [
        ("tests/test_flow.py::test_half|run", "flows/flow.py", [2]),
        ("tests/test_more.py::test_b[1.0]|run", "flows/flow.py", [2]),
        ("tests/test_more.py::test_fixture|setup", "flows/flow.py", [6]),
        ("tests/test_flow.py::test_half|run", "functionals/krylov.py", [3]),
        ("", "flows/flow.py", [1, 5]),
    ]:
        data.set_context(context)
        data.add_lines({str(checkout / "nonlocal/nlflow" / file): lines})
    data.write()
    (checkout / "junit.xml").write_text(
        '<testsuites><testcase classname="tests.test_more" name="test_b[1.0]" time="2"/></testsuites>'
    )
    now = tmp_path / "now"
    shutil.copytree(checkout, now)
    tests = Map(checkout / ".coverage", now)
    half, b = {"tests/test_flow.py::test_half": 0.1}, {"tests/test_more.py::test_b[1.0]": 2.0}
    fixture = {"tests/test_more.py::test_fixture": 0.1, **b}
    near, more = ["tests/test_flow.py"], ["tests/test_more.py"]
    assert tests.tests_of(_mutant(now, "/ to *")) == [(near, half), (more, b)]
    assert tests.tests_of(_mutant(now, "/ to *", "third")) == [(more, fixture)]
    # Loops are seen by who runs the Python that calls them.
    assert tests.tests_of(_mutant(now, "+ to -", "total", "nonlocal/nlflow/backends/numba/sums.py")) == [(near, half)]
    flow = now / "nonlocal/nlflow/flows/flow.py"
    flow.write_text("# one line\n\n" + flow.read_text())
    assert tests.tests_of(_mutant(now, "/ to *", "third")) == [(more, fixture)]
    # What the map does not know: a function that is new, and a file that no test has run.
    flow.write_text("def new(x):\n    return x / 2\n")
    assert tests.tests_of(_mutant(now, "/ to *", "new")) == [(near, half), (more, fixture)]
    assert Map(root=now).tests_of(_mutant(now, "/ to *", "new")) == [(near, {})]


def test_the_nearest_tests() -> None:
    files = ["tests/test_flow.py", "tests/test_affinities.py", "tests/test_affinities_lowrank.py"]
    assert mirrors(files, ["nonlocal/nlflow/affinities/lowrank.py"]) == {files[2]: 2, files[1]: 1}


# ---------------------------------------------------------------------------------------------------------------------


def test_the_table(tmp_path: Path) -> None:
    killed = Result("nonlocal/nlflow/flows/flow.py", "f", 1, "a | b -> a & b", "killed", "import", "", 0, 0, 1.0)
    open_ = replace(killed, outcome="survived", how="", tried=2, selected=3)
    written, again = (results_table(tmp_path, "Title.") for _ in range(2))
    for name, result in (("a", killed), ("b", open_), ("c", open_)):
        written.write(name, result)
    again.load()
    assert again.entries == written.entries
    assert (again.read("a"), again.read("c"), again.read("d")) == (killed, open_, None)
    assert "| flows/flow | 3 | 1 | 0 | 0 | 2 |" in (tmp_path / "mutants.md").read_text()
    results = [Entry(entry.key, entry.row, "2026-11-22", "1804795", "machine") for entry in written.entries]
    assert judged(tmp_path / "none.toml") == {}
    assert all(reason for reason in judged().values())
    assert EQUIVALENT.parent == ROOT / "validation" / "robustness" / "results"
    page = render(results, "Title.", {("b", open_.change): "nothing else", ("c", "another change"): "no more"}, ["t"])
    assert "| flows/flow | 3 | 1 | 0 | 1 | 1 |" in page
    assert "Title. 2026-11-22; machine; source 1804795." in page
    assert "1 could not be imported" in page
    assert "| nonlocal/nlflow/flows/flow.py:1 f | `a \\| b -> a & b` | 2 of 3 | 1 |" in page
    assert "`a \\| b -> a & b`: nothing else |" in page
