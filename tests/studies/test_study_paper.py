"""What a study leaves for a paper: figures without collisions, tables in LaTeX, and a file that repeats it."""

from __future__ import annotations

import csv
import itertools
import json
import re
import subprocess
import sys
import tomllib
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.mathtext import MathTextParser
from matplotlib.text import Text

from nlflow import ExpDotProduct, FileFormatError, Gaussian, Grid, InputError, NlflowWarning, run_study
from nlflow.plotting import bounds_figure, layers_figure, new_figure, rate_figure, render, survey_figure
from nlflow.plotting.base import FORMATS
from nlflow.plotting.paper import drawn
from nlflow.plotting.rates import Series
from nlflow.store.records import program
from nlflow.studies import StudyResult
from nlflow.studies.quantities import QUANTITIES
from nlflow.studies.tables import latex_text, number_in_math, render_table

SMALL: dict[str, dict[str, Any]] = {
    "time-order": {"nodes": 12, "metric": ["l2", "degree"], "fidelity": [0, 0.5], "t": 0.5},
    "space-order": {"dimension": 1},
    "monte-carlo": {"nodes": [64, 128, 256], "seeds": 20},
    "samples": {"nodes": [64, 128, 256], "seeds": 20},
    "mixing": {"nodes": [12, 16]},
    "equilibrium": {"nodes": 12, "fidelity": [0.01, 0.1, 1, 10]},
    "stability": {"nodes": 12, "kernel": ["gaussian:width=0.1", "tophat:radius=0.2"]},
}
WIDTHS = (3.3, 7.0)


@pytest.fixture(scope="module")
def small() -> StudyResult:
    return run_study("mixing", nodes=12)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ({"formats": "gif"}, "format: got 'gif'"),
        ({"formats": ()}, "format: got none"),
        ({"formats": 5}, "format: got 5"),
        ({"width": 0}, "width: got 0"),
        ({"style": "no-such"}, "style: got 'no-such'"),
    ],
)
def test_what_no_figure_has_is_told_before_a_file_is_written(
    small: StudyResult, tmp_path: Path, words: dict[str, Any], reason: str
) -> None:
    with pytest.raises(InputError, match=reason):
        small.save(tmp_path / "new", **words)
    assert not (tmp_path / "new").exists()


def texts(figure: Any) -> list[tuple[str, Any]]:
    """Return what is written on a figure, with its box; ticks out of view are not drawn."""
    figure.draw_without_rendering()
    found = []
    for text in figure.findobj(Text):
        axis = next((a for axes in figure.axes for a in (axes.xaxis, axes.yaxis) if text in labels_of(a)), None)
        if text.get_text() and text.get_visible() and (axis is None or text in in_view(axis)):
            found.append((text.get_text(), text.get_window_extent()))
    return found


def labels_of(axis: Any) -> list[Any]:
    return [label for minor in (False, True) for label in axis.get_ticklabels(minor=minor)]


def in_view(axis: Any) -> list[Any]:
    low, high = sorted(axis.get_view_interval())
    slack = 1e-9 * (high - low)
    return [
        label
        for minor in (False, True)
        for place, label in zip(axis.get_ticklocs(minor=minor), axis.get_ticklabels(minor=minor), strict=False)
        if low - slack <= place <= high + slack and axis.axes.axison
    ]


def collisions(figure: Any) -> list[str]:
    """Return which texts meet, leave the figure, or lie over a panel."""
    written = texts(figure)
    width, height = figure.bbox.width, figure.bbox.height
    found = [
        f"{one!r} meets {other!r}"
        for (one, a), (other, b) in itertools.combinations(written, 2)
        if min(a.x1, b.x1) - max(a.x0, b.x0) > 0.5 and min(a.y1, b.y1) - max(a.y0, b.y0) > 0.5
    ]
    found += [f"{text!r} leaves" for text, a in written if min(a.x0, a.y0, width - a.x1, height - a.y1) < -0.5]
    panels = [axes.get_window_extent() for axes in figure.axes if axes.axison]
    found += [
        f"{text!r} lies on a panel"
        for (text, a), b in itertools.product(written, panels)
        if min(a.x1, b.x1) - max(a.x0, b.x0) > 1 and min(a.y1, b.y1) - max(a.y0, b.y0) > 1
    ]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", SMALL)
def test_figures_of_all_studies_have_no_collision(kind: str) -> None:
    result = run_study(kind, **SMALL[kind])
    for width in WIDTHS:
        figure = result.figure(width=width)
        assert figure.get_figwidth() == width
        assert collisions(figure) == []
        panels = [axes for axes in figure.axes if axes.axison]
        assert all(axes.get_window_extent().height > 0.3 * axes.get_window_extent().width for axes in panels[:1])
        assert any("$" in axes.get_xlabel() for axes in panels)
        for form in FORMATS:
            assert len(render(figure, form)) > 4000


@pytest.mark.slow
def test_a_figure_of_a_column_has_no_collision(small: StudyResult) -> None:
    assert collisions(small.figure(width=3.3)) == []


def test_collisions_are_found() -> None:
    figure = new_figure(6, 2)
    figure.text(0.5, 0.5, "one word")
    figure.text(0.52, 0.5, "another")
    figure.text(0.95, 0.1, "outside")
    assert collisions(figure) == ["'one word' meets 'another'", "'outside' leaves"]


@pytest.mark.parametrize(
    "width", [pytest.param(w, marks=[pytest.mark.slow] * (w != 3.3)) for w in (2.5, 3.3, 5.0, 7.0)]
)
def test_long_labels_are_broken_and_ticks_left_out(width: float) -> None:
    x = np.geomspace(0.013, 0.17, 7)
    series = [Series(f"a series with a long name {k}", x, x**k, slope=k, expected=k) for k in (1, 9)]

    def draw() -> Any:
        label = "a quantity of many words $\\|u - v\\|_m$ [unit]"
        return rate_figure({"a panel of many words, $N = 3$": series, "b": series[:1]}, xlabel=label, ylabel=label)

    figure = drawn(draw, width=width)
    assert collisions(figure) == []
    assert figure.get_figwidth() == width
    assert all(axes.get_window_extent().width > 0.3 * figure.bbox.width for axes in figure.axes if axes.axison)


@pytest.mark.slow
@pytest.mark.parametrize("width", [2.5, 2.9, 3.3, 7.0])
@pytest.mark.parametrize("draw", [survey_figure, layers_figure])
def test_figures_of_layers_have_no_collision(draw: Any, width: float) -> None:
    names = ("cosine", "isotropy", "J", "gradient", "gap", "stable")
    rows = [{"index": k, **dict.fromkeys(names, 0.2 + 0.05 * k)} for k in range(13)]
    runs = {"as it is": rows, "with a term of a fidelity of 0.6": rows}
    figure = drawn(lambda: draw(runs, title="two models"), width=width)
    assert collisions(figure) == []
    assert all(axes.get_window_extent().height > 0.2 * axes.get_window_extent().width for axes in figure.axes)


def test_each_row_of_bounds_has_its_label() -> None:
    x = np.arange(1.0, 5.0)
    panels = dict.fromkeys("abcd", (x, x, x - 1, x + 1))
    for width, labelled in ((3.3, "abcd"), (7.0, "ac")):
        figure = drawn(lambda: bounds_figure(panels, xlabel="x", ylabel="kept"), width=width)
        assert "".join(axes.get_title() for axes in figure.axes if axes.get_ylabel()) == labelled


@pytest.mark.slow
def test_fonts_are_embedded_and_text_is_text(small: StudyResult) -> None:
    figure = small.figure()
    pdf, svg = render(figure, "pdf"), render(figure, "svg").decode()
    assert b"/FontFile2" in pdf  # TrueType
    assert b"/Type3" not in pdf
    assert re.search(r"<text[^>]*>periodic</text>", svg)
    assert "<text" not in render(figure, "svg", outlines=True).decode()
    assert (pdf, svg) == (render(figure, "pdf"), render(figure, "svg").decode())  # no dates, no random names


@pytest.mark.slow
def test_styles(small: StudyResult, tmp_path: Path) -> None:
    import matplotlib as mpl

    before = dict(mpl.rcParams)
    assert small.figure(style="dark_background").get_facecolor()[:3] == (0, 0, 0)
    lines = small.figure(style="grayscale").axes[0].lines
    assert {line.get_color() for line in lines} == {"0.00", "0.40"}
    sheet = tmp_path / "mine.mplstyle"
    sheet.write_text("# mine\naxes.titlesize: 5  # small\naxes.prop_cycle: cycler('color', ['ff0000', '00ff00'])\n")
    assert small.figure(style=sheet).axes[0].lines[0].get_color() == "#ff0000"
    assert dict(mpl.rcParams) == before


@pytest.mark.slow
def test_a_figure_without_room_for_its_panels_is_told_once(small: StudyResult, tmp_path: Path) -> None:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        small.save(tmp_path / "new", width=2.5, style="ggplot")
    (warning,) = told
    assert isinstance(warning.message, NlflowWarning)
    assert str(warning.message).startswith("width: got 2.5 inches, which leave no room for the panels")
    assert warning.filename == __file__


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"style": "nice"}, "style: got 'nice', expected a file NAME.mplstyle or one of .*ggplot"),
        ({"style": "https://example.org/a.mplstyle"}, "style: got 'https"),
        ({"style": 3}, "style: got 3"),
        ({"style": "bad.mplstyle"}, "style: got 'axes.titlesizes: 5' in line 2 of bad.mplstyle, expected a setting"),
        ({"style": "tex.mplstyle"}, "style: got 'text.usetex: True' in line 1 .* without LaTeX"),
        ({"style": "value.mplstyle"}, "style: got lines.linewidth in line 1 of value.mplstyle"),
        ({"style": "bytes.mplstyle"}, "style: got bytes.mplstyle"),
        ({"width": 1}, "width: got 1, expected .* >= 2.5"),
        ({"width": 100}, "width: got 100 inches, expected 40 at most"),
        ({"formats": "eps"}, "format: got 'eps', expected one of 'pdf', 'svg', 'png'"),
        ({"formats": []}, "format: got none, expected one or several of pdf, svg, png"),
    ],
)
def test_what_is_no_figure_is_refused(
    small: StudyResult, options: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bad.mplstyle").write_text("axes.titlesize: 5\naxes.titlesizes: 5\n")
    Path("tex.mplstyle").write_text("text.usetex: True\n")
    Path("value.mplstyle").write_text("lines.linewidth: wide\n")
    Path("bytes.mplstyle").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match=message):
        small.save(tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


# --- tables ----------------------------------------------------------------------------------------------------------


def test_tables(small: StudyResult) -> None:
    rows = list(csv.DictReader(small.table("csv").splitlines()))
    assert [float(row["distance"]) for row in rows] == [row["distance"] for row in small.rows]
    fits = list(csv.DictReader(small.table("csv", what="fits").splitlines()))
    assert [float(row["value"]) for row in fits] == [fit.slope for fit in small.fits]
    assert [row["result"] for row in fits] == [fit.verdict for fit in small.fits]
    head, rule, *body = small.table("markdown", what="fits").splitlines()
    assert len(body) == len(small.fits)
    assert {len(re.findall(r"(?<!\\)\|(?![P\\_])", line)) for line in (head, rule)} == {7}
    with pytest.raises(InputError, match="form: got 'html'"):
        small.table("html")
    with pytest.raises(InputError, match="what: got 'figure'"):
        small.table(what="figure")


@pytest.mark.parametrize("what", ["rows", "fits"])
def test_latex_is_whole(small: StudyResult, what: str) -> None:
    text = small.table("latex", what=what)
    lines = text.splitlines()
    heads = [line for line in lines if line.startswith("%")]
    assert heads[0] == r"% \usepackage{booktabs}"
    assert len(heads) == (2 if what == "rows" else 1)  # what all rows share is for the caption
    assert ("N" in lines[len(heads) + 2]) == (what == "fits" and "N" in text)
    columns = re.fullmatch(r"\\begin\{tabular\}\{([lr]+)\}", lines[len(heads)])
    assert columns is not None
    body = [line for line in lines if line.endswith(r"\\")]
    assert {len(re.findall(r"(?<!\\)&", line)) for line in body} == {len(columns[1]) - 1}
    outside = re.sub(r"\$.*?\$", "", "\n".join(body))
    assert not re.search(r"(?<!\\)[%#_^~]", outside)
    parse = MathTextParser("agg").parse
    for formula in re.findall(r"\$.*?\$", text):
        parse(formula)


def test_what_latex_would_obey_is_shown() -> None:
    assert latex_text("a_b & 5 % of #1 {x} ~ \\ ^ $") == (
        r"a\_b \& 5 \% of \#1 \{x\} \textasciitilde{} \textbackslash{} \textasciicircum{} \$"
    )
    cell = render_table([{"kernel": "Own_1(a$b)", "error": 1.5e-7}], "latex")
    assert r"Own\_1(a\$b) & $1.5 \times 10^{-7}$" in cell
    assert [number_in_math(value) for value in (float("inf"), -0.5, 12345678.0)] == [
        r"\infty", "-0.5", r"1.2346 \times 10^{7}",
    ]  # fmt: skip


@pytest.mark.parametrize("name", QUANTITIES)
def test_symbols_are_mathematics(name: str) -> None:
    MathTextParser("agg").parse(QUANTITIES[name].label)


# --- the file of a study ---------------------------------------------------------------------------------------------


def process(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", "-m", "nlflow.desk.commands.main", "study", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, cwd=cwd)


@pytest.mark.slow
def test_a_study_is_repeated_from_its_file_in_another_process(tmp_path: Path) -> None:
    for name, array in zip("qkv", np.random.default_rng(0).normal(size=(3, 20, 3)), strict=True):
        np.save(tmp_path / f"{name}.npy", array)
    tokens = ("--queries", "q.npy", "--keys", "k.npy", "--values", "v.npy", "--seed", "7", "--fidelity", "0.3")
    first = process("time-order", *tokens, "--out", "a", "--format", "svg", cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    for name in "qkv":  # the study has its own
        (tmp_path / f"{name}.npy").unlink()
    again = process("a/study.toml", "--out", "b", "--format", "svg", cwd=tmp_path)
    assert (again.returncode, again.stderr) == (0, "")
    assert again.stdout.endswith("the same bits as a/study.toml\n")
    for name in ("table.csv", "fits.csv", "study.toml", "figure.svg"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


@pytest.mark.parametrize("kind", SMALL)
def test_the_file_of_every_kind_gives_its_options_back(kind: str, tmp_path: Path) -> None:
    """Without measuring: what is read is what was given."""
    from nlflow.studies.options import read_options
    from nlflow.studies.replay import read_study, study_files
    from nlflow.studies.runner import KINDS

    given = {
        **SMALL[kind],
        "kernel": ["dot:scale=0.25"] if kind == "samples" else [Gaussian(0.1 + 1e-17), "laplace:width=2"],
    }
    if kind == "time-order":
        given = {**given, "start": np.arange(12.0), "dt": [0.1, 1e-5, 3e-17]}
    chosen = read_options(KINDS[kind], given)
    for name, content in study_files(kind, {name: chosen[name] for name in given}, 2**63, []).items():
        (tmp_path / name).write_bytes(content)
    recipe = read_study(tmp_path / "study.toml")
    assert (recipe.kind, recipe.seed, recipe.own) == (kind, 2**63, {})
    back = read_options(KINDS[kind], recipe.with_own({}))
    assert back["kernel"] == chosen["kernel"]
    for name in given:
        np.testing.assert_array_equal(back[name], chosen[name])


def keep(result: StudyResult, folder: Path) -> Path:
    """Write the file of a study, without its figure, which takes a second."""
    from nlflow.studies.replay import study_files

    for name, content in study_files(result.kind, result._given, result.options["rng"], result.rows).items():
        (folder / name).write_bytes(content)
    return folder / "study.toml"


def test_a_study_is_repeated_in_python(tmp_path: Path) -> None:
    options: dict[str, Any] = {"nodes": 12, "boundary": "periodic", "start": lambda x: x[:, 0] ** 2}
    first = run_study("mixing", rng=3, **options)
    file = keep(first, tmp_path)
    assert tomllib.loads(file.read_text())["seed"] == 3
    with pytest.raises(InputError, match=r"start: got none, .* run_study\('.*study.toml', start=...\)"):
        run_study(file)
    with pytest.raises(InputError, match=r"nodes: got it beside .* which says what the study is"):
        run_study(file, nodes=8, start=options["start"])
    with pytest.raises(InputError, match="rng: got it beside"):
        run_study(file, rng=1, start=options["start"])
    again = run_study(str(file), start=options["start"])
    assert again.rows == first.rows
    assert again.provenance["repeated"] == {"file": str(file), "same": True, "differs": []}
    other = run_study(file, start=lambda x: x[:, 0])
    assert other.provenance["repeated"] == {"file": str(file), "same": False, "differs": ["start: another object"]}
    file.write_text(re.sub(r'numpy = ".*"', 'numpy = "1.0"', file.read_text()))
    repeated = run_study(file, start=options["start"]).provenance["repeated"]
    assert repeated == {"file": str(file), "same": True, "differs": [f"numpy: 1.0 there, {np.__version__} here"]}


def test_a_study_of_another_processor_says_so(tmp_path: Path) -> None:
    file = keep(run_study("mixing", nodes=12, boundary="periodic"), tmp_path)
    text = file.read_text()
    file.write_text(re.sub(r'"processor of BLAS" = ".*"', '"processor of BLAS" = "another"', text))
    here = program()["processor of BLAS"]
    repeated = run_study(file).provenance["repeated"]
    assert repeated == {"file": str(file), "same": True, "differs": [f"processor of BLAS: another there, {here} here"]}
    file.write_text(re.sub(r'"processor of BLAS" = ".*"\n', "", text))  # as files of before
    repeated = run_study(file).provenance["repeated"]
    assert repeated == {"file": str(file), "same": True, "differs": [f"processor of BLAS: none there, {here} here"]}


def test_a_study_on_tensors_says_their_version_too(tmp_path: Path) -> None:
    keys = np.random.default_rng(0).normal(size=(10, 3))
    file = keep(run_study("mixing", kernel=ExpDotProduct(), keys=keys, device="cpu-tensors"), tmp_path)
    file.write_text(re.sub(r'torch = ".*"', 'torch = "1.0"', file.read_text()))
    repeated = run_study(file).provenance["repeated"]
    assert repeated == {"file": str(file), "same": True, "differs": [f"torch: 1.0 there, {torch.__version__} here"]}


def test_what_no_file_holds_is_named(tmp_path: Path) -> None:
    result = run_study("mixing", domain=Grid(8, spacing=0.125, boundary="periodic"))
    found = tomllib.loads(keep(result, tmp_path).read_text())
    assert list(found["own"]) == ["domain"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            ("file_format = 1", "file_format = 2"),
            "got a study of format 2, this version reads 1; use the version of nlflow",
        ),
        (("file_format = 1", ""), "got no file_format, expected study.toml as a study writes it"),
        (("file_format = 1", "file_format = true"), "got a study of format|got True as file_format"),
        (("seed = 0", 'seed = "0"'), "got '0' as seed"),
        (("[own]", "[[own]]"), "as own, expected study.toml as a study writes it"),
        (("seed = 0", "seed = 0\nseed = 1"), "got .*, expected a study in TOML"),
        (('study = "mixing"', 'study = "magic"'), "study: got 'magic', expected one of 'time-order'"),
        (("nodes = [12]", "nodes = [1]"), "nodes: got 1, expected an integer >= 2"),
        (
            ("nodes = [12]", "node = [12]"),
            "study.toml: node: the study 'mixing' has no such option; did you mean nodes\\?",
        ),
        (("[own]", '[arrays.keys]\nfile = "../k.npy"\nsha256 = "0"\n[own]'), "got no name of a file for keys"),
        (
            ("[own]", '[arrays.keys]\nfile = "k.npy"\nsha256 = "0"\n[own]'),
            "k.npy: got .*No such file.*expected the keys",
        ),
        (("[own]", '[arrays.keys]\nfile = "there.npy"\nsha256 = "0"\n[own]'), "there.npy: got its SHA-256 is another"),
    ],
)
def test_files_that_are_no_studies(small: StudyResult, change: tuple[str, str], message: str, tmp_path: Path) -> None:
    from nlflow.studies.replay import study_files

    text = study_files("mixing", {"nodes": [12]}, 0, small.rows)["study.toml"].decode()
    assert change[0] in text
    np.save(tmp_path / "there.npy", np.ones(3))
    (tmp_path / "study.toml").write_text(text.replace(*change))
    with pytest.raises((FileFormatError, InputError), match=message):
        run_study(tmp_path / "study.toml")


def test_other_files_are_no_studies(tmp_path: Path) -> None:
    with pytest.raises(FileFormatError, match=r"there is no such file, expected study\.toml"):
        run_study("none.toml")
    (tmp_path / "a.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(FileFormatError, match="expected a study in TOML"):
        run_study(tmp_path / "a.toml")
    (tmp_path / "a.toml").write_bytes(b"#" * (2**20 + 1))
    with pytest.raises(FileFormatError, match="more than 1048576 bytes"):
        run_study(tmp_path / "a.toml")
    (tmp_path / "a.toml").write_text("a = " + "[" * 5000)
    with pytest.raises(FileFormatError, match="expected a study in TOML"):
        run_study(tmp_path / "a.toml")


def test_the_report_has_verdicts(small: StudyResult) -> None:
    found = json.loads(json.dumps(small.as_dict()))["fits"]
    assert [fit["verdict"] for fit in found] == ["agrees"] * 4
    assert found[0]["expectation"].endswith("to within 0.0039")
