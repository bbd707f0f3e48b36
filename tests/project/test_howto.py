"""The how-to pages: their programs run unchanged, are short, and end with a check that can fail."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest

from tests.problems import torch_on_one_thread

PAGES = sorted((Path(__file__).parents[2] / "docs" / "howto").glob("own_*.md"))
NAMES = (
    *("fractional", "noise_of_stacks", "cure_a_model", "look_into_a_model", "priors", "denoise_tensors"),
    "learn_on_graphs",
    "markov_models",
    "simulate",
    "uncertainty",
    "cookbook",
)
GUIDES = [Path(__file__).parents[2] / "docs" / "howto" / f"{name}.md" for name in NAMES]
LONGEST = 60  # lines of code on a page, with its check, without blank lines


def blocks_of(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", page.read_text(encoding="utf-8"), flags=re.S | re.M)


def lines_of(block: str) -> int:
    return sum(bool(line.strip()) for line in block.splitlines())


def test_there_is_a_page_for_each_kind_of_part() -> None:
    assert [page.stem for page in PAGES] == [
        "own_adapter",
        "own_fidelity",
        "own_graph",
        "own_groups",
        "own_integrator",
        "own_kernel",
        "own_reaction",
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_what_a_user_adds_is_short(page: Path) -> None:
    found = blocks_of(page)
    assert 0 < sum(map(lines_of, found)) < LONGEST
    # No private name is used; the contract of an affinity needs two definitions.
    used = {node.attr for node in ast.walk(ast.parse("\n".join(found))) if isinstance(node, ast.Attribute)}
    assert not {name for name in used if name.startswith("_") and not name.startswith("__")}


@pytest.mark.parametrize(
    "page", [*PAGES, *(pytest.param(page, marks=pytest.mark.slow) for page in GUIDES)], ids=lambda page: page.stem
)
def test_page_runs_and_checks_itself(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = blocks_of(page)
    if any("import torch" in block for block in blocks):
        torch_on_one_thread()
    names: dict[str, object] = {"__name__": "howto"}
    for block in blocks:
        exec(compile(block, str(page), "exec", dont_inherit=True), names)  # without this module's future imports
    assert blocks[-1].count("assert ") >= 3
    assert not list(tmp_path.iterdir())


def test_the_adapted_model_is_that_of_the_record() -> None:
    root = Path(__file__).parents[2]
    rows = json.loads((root / "benchmarks" / "results" / "adapt_dinov2.json").read_text(encoding="utf-8"))["rows"]
    page = (root / "docs" / "howto" / "cure_a_model.md").read_text(encoding="utf-8").replace("\N{MINUS SIGN}", "-")
    for row in rows:
        gain = f"{row['gain']:.3f} ({row['low']:.3f} to {row['high']:+.3f})" if "gain" in row else ""
        assert f"| {row['arm']} | {row['accuracy']:.3f} | {gain}{' ' * bool(gain)}| {row['cosine']:.2f} |" in page


@pytest.mark.slow
def test_the_page_about_keeping_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its program runs unchanged, and leaves the files that it names and no others."""
    for package in ("xarray", "zarr", "h5py", "h5netcdf"):
        pytest.importorskip(package, reason="optional")
    page = Path(__file__).parents[2] / "docs" / "howto" / "keep_a_run.md"
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "howto"}
    for block in blocks_of(page):
        exec(compile(block, str(page), "exec", dont_inherit=True), names)
    assert {place.name for place in tmp_path.iterdir() if not place.name.endswith(".lock")} == {
        *("run.h5", "run.zarr", "run.pvd", "run.vtk", "run.gif", "run.checkpoint", "run.checkpoint.previous"),
    }
