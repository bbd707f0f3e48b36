"""The gallery: its examples run unchanged, in reasonable time, and everybody can read their figures."""

from __future__ import annotations

import ast
import re
import runpy
import time
from collections.abc import Iterator
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tests.names import resolved
from tests.problems import torch_on_one_thread

GALLERY = Path(__file__).parents[2] / "docs" / "examples"
EXAMPLES = sorted(GALLERY.glob("*/plot_*.py"))
CHEAP = "plot_orders"  # the only one that is not a slow test
SECTIONS = sorted(folder for folder in GALLERY.iterdir() if folder.is_dir() and not folder.name.startswith("_"))
OPTIONAL = ("dask", "finufft", "networkx", "scanpy", "sklearn", "torch", "transformers", "zarr")
PATIENCE = 60.0  # seconds of processor time; on two cores no example takes more than a quarter of it
WIDEST = 8.0  # inches, of which 7 are shown at their own size
UNIFORM = {"viridis", "cividis", "magma", "inferno", "plasma", "gray"}


@pytest.fixture(autouse=True)
def nothing_on_screen() -> Iterator[None]:
    """Draw into memory; begin and end without figures."""
    plt.switch_backend("agg")
    plt.close("all")
    with matplotlib.rc_context():
        yield
    plt.close("all")


def source_of(example: Path) -> str:
    """Return the source of an example; skip it where an optional package is not installed."""
    source = example.read_text(encoding="utf-8")
    for name in OPTIONAL:
        if re.search(rf"^(import|from) {name}\b", source, flags=re.M) or (name == "finufft" and "nufft" in source):
            pytest.importorskip(name, reason=f"{name} is optional")
    if "import torch" in source:
        torch_on_one_thread()
    return source


def text_of(example: Path) -> str:
    """Return the texts of an example: its docstring and its cells of text."""
    source = source_of(example)
    cells = re.findall(r"^# %%\n((?:#.*\n)*)", source, flags=re.M)
    return "\n".join([ast.get_docstring(ast.parse(source)) or "", *(re.sub(r"^# ?", "", c, flags=re.M) for c in cells)])


def test_sections_have_headers() -> None:
    assert [folder.name[2:] for folder in SECTIONS] == [
        "flows",
        "theory",
        "denoising",
        "transformers",
        "large",
        "learning",
    ]
    for folder in (GALLERY, *SECTIONS):
        title, line, blank, *_ = (folder / "GALLERY_HEADER.rst").read_text(encoding="utf-8").splitlines()
        assert title
        assert set(line) <= {"=", "-"}
        assert len(line) == len(title)
        assert not blank


@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.stem)
def test_text(example: Path) -> None:
    """A title, a paragraph, and links to parts of the package that exist."""
    text = text_of(example)
    title, line, blank, first, *_ = text.splitlines()
    assert line == "=" * len(title)
    assert not blank
    assert first
    linked = re.findall(r":(?:func|class|meth|attr|mod):`(?:[^`<]*<)?~?([\w.]+)>?`", text)
    assert linked
    for name in linked:
        resolved(name)


@pytest.mark.filterwarnings("ignore:FigureCanvasAgg is non-interactive")  # plt.show() needs a screen
@pytest.mark.parametrize(
    "example",
    [
        pytest.param(example, id=example.stem, marks=[] if example.stem == CHEAP else [pytest.mark.slow])
        for example in EXAMPLES
    ],
)
def test_example(example: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source_of(example)
    monkeypatch.chdir(example.parent)  # where the gallery runs it
    before = {path.name for path in example.parent.iterdir()}
    begun = time.process_time()
    names = runpy.run_path(str(example), run_name="__main__")
    assert time.process_time() - begun < PATIENCE
    assert {path.name for path in example.parent.iterdir()} == before  # no file is left behind
    figures = [plt.figure(number) for number in plt.get_fignums()]
    assert figures
    for figure in figures:
        figure.canvas.draw()  # warns if the layout does not fit
        check(figure)
    assert names["plt"] is plt  # films live as long as the names of the example


def check(figure: Figure) -> None:
    """Check the rules for all figures of the gallery."""
    assert figure.get_figwidth() <= WIDEST
    assert figure.get_layout_engine() is not None
    for axis in figure.axes:
        if hasattr(axis, "_colorbar"):
            assert axis.get_xlabel() or axis.get_ylabel()
        elif axis.axison:
            assert axis.get_xlabel()
            assert axis.get_ylabel()
            assert axis.get_title()
        else:
            assert axis.get_images()
            assert axis.get_title()
        for drawn in (*axis.get_images(), *axis.collections):
            if drawn.get_array() is not None and getattr(drawn.get_array(), "ndim", 0) < 3:
                assert drawn.get_cmap().name in UNIFORM
        check_legend(axis)


def check_legend(axis: Axes) -> None:
    """The entries of a legend differ in more than colour."""
    legend = axis.get_legend()
    if legend is None:
        return
    looks = [
        (line.get_linestyle() if line.get_linewidth() else "None", line.get_marker(), line.get_linewidth())
        for line in legend.get_lines()
    ]
    assert len(set(looks)) == len(looks)
