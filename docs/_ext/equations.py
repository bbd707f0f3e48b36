"""Links equations to the code that computes them, in both directions.

``docs/equations.toml`` has each equation once: its label, its title, its source, and the public names that compute it.
The directive ``equation`` shows one, with its number and a line of links to those names. The pages of those names get a
section "Equations" with links back.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError
from sphinx.util.docutils import SphinxDirective

PATH = Path(__file__).parents[1] / "equations.toml"


@dataclass(frozen=True)
class Equation:
    """One equation: see `docs/equations.toml`."""

    label: str
    title: str
    source: str
    computed_by: tuple[str, ...]
    latex: str


@cache
def equations() -> dict[str, Equation]:
    """Return all equations by their labels."""
    found = {}
    for label, entry in tomllib.loads(PATH.read_text(encoding="utf-8")).items():
        found[label] = Equation(
            label, entry["title"], entry["source"], tuple(entry["computed_by"]), entry["latex"].strip()
        )
    return found


@cache
def _computed() -> dict[str, list[Equation]]:
    """Return what each public name computes."""
    found: dict[str, list[Equation]] = {}
    for equation in equations().values():
        for name in equation.computed_by:
            found.setdefault(name, []).append(equation)
    return found


class EquationDirective(SphinxDirective):
    """``.. equation:: label`` sets an equation of `docs/equations.toml`."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        label = self.arguments[0]
        if label not in equations():
            raise self.error(f"equation: got {label!r}, expected one of those in {PATH.name}")
        equation = equations()[label]
        shown = self.env.__dict__.setdefault("nlflow_equations", {})
        shown[label] = self.env.docname
        names = ", ".join(f":py:obj:`~{name}`" for name in equation.computed_by)
        text = [
            ".. math::",
            f"   :label: {label}",
            "",
            *(f"   {line}" for line in equation.latex.splitlines()),
            "",
            ".. container:: equation-source",
            "",
            f"   {equation.title[0].upper()}{equation.title[1:]}. {equation.source}. Computed by {names}.",
        ]
        return self.parse_text_to_nodes("\n".join(text))


def _note(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Add its equations to the text of a public name."""
    found = _computed().get(name, [])
    if found:
        lines += ["", ".. rubric:: Equations", ""]
        lines += [f"* :eq:`{equation.label}` {equation.title}" for equation in found]
        lines += [""]


def _all_shown(app: Sphinx, env: Any) -> None:
    missing = sorted(set(equations()) - set(env.__dict__.get("nlflow_equations", {})))
    if missing:
        raise ExtensionError(f"equations: no page shows {', '.join(missing)}")


def setup(app: Sphinx) -> dict[str, Any]:
    """Register with Sphinx."""
    app.add_directive("equation", EquationDirective)
    app.connect("autodoc-process-docstring", _note, priority=900)  # after numpydoc
    app.connect("env-check-consistency", _all_shown)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
