"""Runs the programs of a page when the page is built, and shows the figures that they end with.

A block of Python whose last line is a figure is followed by it, with the title of its section. A notebook of the same
content is made by ``python docs/_ext/programs.py``, so that nothing is written twice.
"""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[1]
PAGES = ("use/theory",)
_BLOCK = re.compile(r"^```python\n(.*?)^```\n", flags=re.S | re.M)


def parts(text: str) -> list[tuple[str, str]]:
    """Return a page as its parts in order: ``('text', ...)`` and ``('code', ...)``."""
    found, end = [], 0
    for block in _BLOCK.finditer(text):
        found += [("text", text[end : block.start()]), ("code", block[1])]
        end = block.end()
    return [(kind, part.strip("\n")) for kind, part in [*found, ("text", text[end:])] if part.strip()]


def shown(source: str, names: dict[str, Any], file: str) -> Any:
    """Run a block, and return what a notebook would show below it: the value of its last line."""
    tree = ast.parse(source)
    last = tree.body[-1]
    if not isinstance(last, ast.Expr):
        exec(compile(tree, file, "exec"), names)
        return None
    exec(compile(ast.Module(tree.body[:-1], []), file, "exec"), names)
    return eval(compile(ast.Expression(last.value), file, "eval"), names)


def notebook(text: str) -> dict[str, Any]:
    """Return a page as a notebook without outputs; links lead from the folder of the notebooks."""
    cells: list[dict[str, Any]] = []
    for kind, part in parts(text):
        if kind == "code":
            cell: dict[str, Any] = {"cell_type": "code", "execution_count": None, "metadata": {}, "outputs": []}
        else:
            cell = {"cell_type": "markdown", "metadata": {}}
            part = part.replace("](../notebooks/", "](")
            part = re.sub(r"\]\((?!\.\.|https?:|[\w-]+\.ipynb)([^)]+)\)", r"](../use/\1)", part)
        cells.append({**cell, "source": part.splitlines(keepends=True)})
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    about = {"kernelspec": kernel, "language_info": {"name": "python"}}
    named = [{**cell, "id": f"part-{number}"} for number, cell in enumerate(cells)]
    return {"cells": named, "metadata": about, "nbformat": 4, "nbformat_minor": 5}


def written(text: str) -> str:
    """Return the notebook of a page as the content of its file."""
    return json.dumps(notebook(text), indent=1, ensure_ascii=False) + "\n"


def _with_figures(app: Any, docname: str, source: list[str]) -> None:
    if docname not in PAGES:
        return
    from matplotlib.figure import Figure

    from nlflow.plotting.page import picture

    names: dict[str, Any] = {"__name__": "page"}
    title, made = "", []
    for kind, part in parts(source[0]):
        if kind == "text":
            title = next((line.lstrip("# ") for line in part.splitlines()[::-1] if line.startswith("#")), title)
            made.append(part)
            continue
        value = shown(part, names, docname)
        made.append(f"```python\n{part}\n```")
        if isinstance(value, Figure):
            made.append(picture(value, title))
    source[0] = "\n\n".join(made) + "\n"


def setup(app: Any) -> dict[str, Any]:
    """Register with Sphinx."""
    app.connect("source-read", _with_figures)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


if __name__ == "__main__":
    for page in PAGES:
        text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
        (DOCS / "notebooks" / f"{Path(page).name}.ipynb").write_text(written(text), encoding="utf-8")
