"""The pages: what they show runs, what they name exists, and they build without a warning."""

from __future__ import annotations

import importlib
import inspect
import re
import runpy
import subprocess
import sys
import tomllib
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.names import resolved

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "nonlocal" / "nlflow"
DOCS = ROOT / "docs"
DECISIONS = sorted(path for path in (DOCS / "decisions").glob("*.md") if path.name != "index.md")
TEXTS = sorted(
    path
    for path in (*ROOT.glob("*.md"), *DOCS.glob("*.md"), *DOCS.glob("*.rst"), *DOCS.glob("[!_]*/*.md"))
    if path.name != "CHANGELOG.md"  # has old names
)
EQUATIONS: dict[str, dict[str, Any]] = tomllib.loads((DOCS / "equations.toml").read_text(encoding="utf-8"))


def listed() -> set[str]:
    """Return all names in the reference."""
    names, module = set(), ""
    for line in (DOCS / "reference" / "index.rst").read_text(encoding="utf-8").splitlines():
        if line.startswith(".. currentmodule::"):
            module = line.split()[-1]
        elif re.fullmatch(r"   [A-Za-z0-9_.]+", line):
            names.add(f"{module}.{line.strip()}")
    return names


@pytest.mark.parametrize("label", EQUATIONS)
def test_equations_name_what_computes_them(label: str) -> None:
    equation = EQUATIONS[label]
    assert equation["latex"].strip()
    assert equation["source"]
    assert equation["computed_by"]
    for name in equation["computed_by"]:
        assert resolved(name).__doc__
        # There is a page to link to: its own, or that of its class.
        assert name in listed() or name.rpartition(".")[0] in listed()


def test_every_equation_is_shown_once() -> None:
    shown = re.findall(r"^\.\. equation:: (\S+)$", (DOCS / "mathematics.rst").read_text(encoding="utf-8"), flags=re.M)
    assert sorted(shown) == sorted(EQUATIONS)


@pytest.mark.parametrize(
    "module",
    [
        *("nlflow", "nlflow.attention", "nlflow.flows.derivatives", "nlflow.flows.integrators"),
        *("nlflow.denoising", "nlflow.denoising.patches", "nlflow.denoising.large", "nlflow.denoising.priors"),
        *("nlflow.denoising.noise", "nlflow.learning", "nlflow.testing"),
    ],
)
def test_the_reference_has_every_public_name(module: str) -> None:
    names = {name.rsplit(".", 1)[-1] for name in listed()}
    hidden = {"StepFailureError"}  # never leaves `solve`
    assert sorted(set(importlib.import_module(module).__all__) - names - hidden) == []


@pytest.mark.parametrize("name", sorted(listed()))
def test_what_the_reference_lists_is_documented(name: str) -> None:
    listed = resolved(name)
    assert listed.__doc__
    if not inspect.isclass(listed):
        return
    ours = [base for base in listed.__mro__ if base.__module__.startswith("nlflow")]
    fields = {name for base in ours for name in inspect.get_annotations(base)}  # stand under Attributes
    members = {name for base in ours for name, value in vars(base).items() if is_code(value) and name[0] != "_"}
    texts = {name: [vars(base)[name].__doc__ for base in ours if name in vars(base)] for name in members - fields}
    bare = sorted(name for name, found in texts.items() if not any(found))
    assert bare == []


def is_code(value: object) -> bool:
    return isinstance(value, property | cached_property | classmethod | staticmethod) or inspect.isfunction(value)


@pytest.mark.slow
def test_five_minutes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / "start.md").read_text(encoding="utf-8"), flags=re.S)
    assert len(blocks) == 7
    names: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, "start.md", "exec"), names)
    said = capsys.readouterr().out.splitlines()
    errors = [re.fullmatch(r"error ([\d.]+) before, ([\d.]+) after", line) for line in said]
    pairs = [tuple(map(float, found.groups())) for found in errors if found is not None]
    assert len(pairs) == 3
    assert all(after < 0.5 * before for before, after in pairs)
    assert any(line.startswith("white noise: sigma 2") for line in said)  # of 25, to 20 %
    assert np.std(names["again"]) < np.std(names["noisy"])
    assert names["smoothing"].distance_to_constant(names["forgotten"]) < 1e-8
    share = names["keeping"].distance_to_constant(names["kept"]) / names["keeping"].distance_to_constant(names["f"])
    low, high = names["diversity_bounds"](names["keeping"])
    assert low <= share <= high
    cosines = [names[which].rows()[-1]["cosine"] for which in ("plain", "held")]
    assert cosines[0] > 0.99
    assert cosines[1] < 0.7 * cosines[0]


@pytest.mark.parametrize(("name", "online"), [("READTHEDOCS", "True"), ("DOCS_ONLINE", "1"), ("DOCS_ONLINE", "0")])
def test_other_packages_are_linked_only_where_there_is_a_network(
    name: str, online: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("sphinx", reason="optional")
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.setenv(name, online)
    conf = runpy.run_path(str(DOCS / "conf.py"))
    assert ("sphinx.ext.intersphinx" in conf["extensions"]) == (online != "0")
    assert {"numpy", "scipy", "torch"} <= set(conf["intersphinx_mapping"])


@pytest.mark.parametrize("page", TEXTS, ids=lambda page: page.stem)
def test_pages_name_what_exists(page: Path) -> None:
    """Names of the package, and paths of the repository or of the package, between backquotes."""
    literal = re.findall(r"(?<![}:`])`+([^`\n]+)`+", page.read_text(encoding="utf-8"))  # no roles
    for name in {found for text in literal for found in re.findall(r"\bnlflow(?:\.[A-Za-z_]\w*)+", text)}:
        resolved(name)
    for path in {text for text in literal if re.fullmatch(r"[\w.-]+(/[\w*.-]+)+/?", text)}:
        made = path.startswith((".venv", "docs/_build")) or "-output" in path
        assert made or list(ROOT.glob(path)) or list(PACKAGE.glob(path)), path


def test_architecture_lists_the_rooms_from_low_to_high() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 90
    told = re.findall(r"^\| `(\w+)` \|", text, flags=re.M)
    there = {path.stem for path in PACKAGE.iterdir() if (path / "__init__.py").is_file() or path.suffix == ".py"}
    assert sorted(told) == sorted(there - {"__init__", "__main__"})
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"][
        "contracts"
    ]
    layers = [layer.split(" | ") for layer in contracts[0]["layers"]]
    heights = [next(height for height, layer in enumerate(reversed(layers)) if room in layer) for room in told]
    assert heights == sorted(heights)


@pytest.mark.parametrize("page", DECISIONS, ids=lambda page: page.stem)
def test_a_decision_is_dated_and_short(page: Path) -> None:
    title, blank, date, *rest = page.read_text(encoding="utf-8").splitlines()
    assert title.startswith("# ")
    assert not blank
    assert re.fullmatch(r"\*\d{4}-\d{2}-\d{2}\*", date)
    parts = re.findall(r"^\*\*(\w+)\.\*\*", "\n".join(rest), flags=re.M)
    assert parts == ["Context", "Decision", "Consequence"]
    assert page.stem in (DOCS / "decisions" / "index.md").read_text(encoding="utf-8").splitlines()


@pytest.mark.slow
def test_the_pages_build(tmp_path: Path) -> None:
    """Every link has a target, and every page is in the tree. Another test runs the gallery's programs."""
    pytest.importorskip("sphinx", reason="pip install '.[docs]'")
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-D", "plot_gallery=0", "-b", "html",
         "-d", str(tmp_path / "doctrees"), str(DOCS), str(tmp_path / "html")],
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    page = (tmp_path / "html" / "mathematics.html").read_text(encoding="utf-8")
    assert 'href="reference/generated/nlflow.J.html#nlflow.J"' in page
    back = (tmp_path / "html" / "reference" / "generated" / "nlflow.J.html").read_text(encoding="utf-8")
    assert "mathematics.html#equation-j" in back.lower()
    outside = [
        path.name
        for path in (tmp_path / "html").rglob("*.html")
        if re.search(r'(src|href)="https?://[^"]*\.(js|css)', path.read_text(encoding="utf-8"))
    ]
    assert outside == []  # pages must work without a network
