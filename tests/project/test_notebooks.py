"""The notebooks: their cells run in order, what they show draws itself, and no output is kept in them."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from tests.problems import torch_on_one_thread

DOCS = Path(__file__).parents[2] / "docs"
BOOKS = sorted((DOCS / "notebooks").glob("*.ipynb"))
NEEDS = {"equations": ["xarray"], "points": ["sklearn"], "theory": ["torch"], "transformers": ["transformers"]}
MADE = ["theory"]  # from their pages
_SPEC = importlib.util.spec_from_file_location("programs", DOCS / "_ext" / "programs.py")
assert _SPEC is not None
assert _SPEC.loader is not None
programs = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(programs)


def cells(book: Path) -> list[Any]:
    found: list[Any] = json.loads(book.read_text(encoding="utf-8"))["cells"]
    return found


def code(book: Path) -> list[str]:
    return ["".join(cell["source"]) for cell in cells(book) if cell["cell_type"] == "code"]


def test_there_is_one_for_each_kind_of_user() -> None:
    assert [book.stem for book in BOOKS] == ["equations", "photographs", "points", "theory", "transformers"]
    for book in BOOKS:
        page = (DOCS / "use" / f"{book.stem}.md").read_text(encoding="utf-8")
        assert f"(../notebooks/{book.name})" in page
        title = next(line for line in page.splitlines() if line.startswith("# "))
        assert "".join(cells(book)[0]["source"]).splitlines()[0] == title


@pytest.mark.parametrize("book", BOOKS, ids=lambda book: book.stem)
def test_no_output_is_kept(book: Path) -> None:
    for cell in cells(book):
        assert cell["cell_type"] == "markdown" or (cell["outputs"], cell["execution_count"]) == ([], None)
    assert code(book)[-1].count("assert ") >= 3


@pytest.mark.slow
@pytest.mark.parametrize("book", BOOKS, ids=lambda book: book.stem)
def test_notebook_runs_and_checks_itself(book: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import matplotlib
    import matplotlib.pyplot as plt
    from matplotlib.figure import Figure

    for package in NEEDS.get(book.stem, ()):
        pytest.importorskip(package, reason="optional")
    matplotlib.use("agg")
    monkeypatch.chdir(tmp_path)
    if book.stem in ("theory", "transformers"):
        torch_on_one_thread()
    names: dict[str, Any] = {"__name__": "__main__"}
    drawn = [programs.shown(source, names, f"{book.name}[{number}]") for number, source in enumerate(code(book))]
    html = [value._repr_html_() for value in drawn if type(value).__module__.startswith("nlflow.")]
    assert all("<figure" in one for one in html)
    assert len(html) == {"equations": 4, "points": 1, "transformers": 1}.get(book.stem, 0)
    for number in plt.get_fignums():
        plt.figure(number).canvas.draw()
    figures = [value for value in drawn if isinstance(value, Figure)]
    assert len(figures) == (5 if book.stem == "theory" else 0)
    assert plt.get_fignums() or figures
    plt.close("all")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", MADE)
def test_notebook_is_made_from_its_page(name: str) -> None:
    """``python docs/_ext/programs.py`` writes it again; what runs in it is what the page shows."""
    text = (DOCS / "use" / f"{name}.md").read_text(encoding="utf-8")
    assert (DOCS / "notebooks" / f"{name}.ipynb").read_text(encoding="utf-8") == programs.written(text)
    blocks = [part for kind, part in programs.parts(text) if kind == "code"]
    assert blocks == code(DOCS / "notebooks" / f"{name}.ipynb")
