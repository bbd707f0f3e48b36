"""The code of the README and of the pages for its readers runs unchanged, and their commands exist."""

import re
import shlex
from importlib.util import find_spec
from pathlib import Path

import pytest
import typer

import nlflow as nl

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs" / "use").glob("*.md"))]
TEXTS = {page.stem: page.read_text(encoding="utf-8") for page in PAGES}
FOUND = {name: re.findall(r"```python\n(.*?)```", text, flags=re.S) for name, text in TEXTS.items()}
FOUND["paper_kit"] = ["\n".join(FOUND["paper_kit"])]  # its blocks follow from each other, and end with their checks
del FOUND["theory"]  # runs as the notebook that is made from it
BLOCKS = {f"{name}-{number}": block for name, blocks in FOUND.items() for number, block in enumerate(blocks)}
CODE = [found for text in TEXTS.values() for found in re.findall(r"```sh\n(.*?)```|`([^`\n]+)`", text, flags=re.S)]
LONGEST = 600  # words of the README
COMMANDS = [
    shlex.split(line, comments=True)
    for block, literal in CODE
    for line in (block or literal).splitlines()
    if re.match(r"(\.venv/bin/)?(nonlocal|make|python -m) [\w-]", line)
]


def test_readme_is_short_and_has_an_example_of_each_kind():
    assert len(TEXTS["README"].split()) < LONGEST
    assert [name.partition("-")[0] for name in BLOCKS].count("README") == 3
    assert len(BLOCKS) == 18


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_readme_commands_exist(words):
    """The command and all of its options are there; tests of their own run them."""
    program, name, *rest = words
    if program == "make":
        makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
        assert re.search(rf"^{re.escape(name)}:", makefile, flags=re.M)
    elif program == "python":
        assert find_spec(rest[0]) is not None
    else:
        from nlflow.desk.commands.main import app

        command = typer.main.get_command(app).get_command(None, name)
        options = {option for parameter in command.params for option in parameter.opts}
        assert {word for word in rest if word.startswith("--")} <= {*options, "--help", "--help-all"}


def test_readme_has_commands_of_each_kind():
    assert {Path(program).name for program, *_ in COMMANDS} == {"nonlocal", "make", "python"}
    assert len(COMMANDS) > 25


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (not name.startswith("README"))) for name in BLOCKS]
)
def test_example_runs(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    block, names = BLOCKS[name], {}
    exec(compile(block, name, "exec"), names)
    if name.startswith("README"):
        said = [float(word) for word in re.findall(r"[\d.]+(?:e-?\d+)?", capsys.readouterr().out)]
        assert said[0] < 1e-8 < 1 < said[1] if "solve(" in block else said[1] < 0.7 * said[0]
    if "keeping" in names:
        flow, end, kept = names["smoothing"], names["end"], names["kept"]
        assert flow.distance_to_constant(end.final) < 1e-8
        assert flow.distance_to_constant(kept.final) > 0.1
        assert abs(kept.final - names["keeping"].functional.minimizer().u).max() < 1e-8
    if "chain" in names:
        chain, flow, v = names["chain"], names["layers"], names["v"]
        assert abs(chain.expectation(v, 20) - chain.limit(v)).max() < 1e-10
        assert nl.diversity(flow, names["limit"]) >= 0.3 * nl.diversity(flow, v)
        assert names["strength"] < nl.largest_stable_fidelity(names["attention"])
    if "fidelities" in names:
        assert names["report"].missing_keys == []
        assert len(names["report"].unexpected_keys) == 5  # λ̃ of all layers but the first
        assert names["fidelities"](names["plain"]) == names["fidelities"](names["model"])
        assert all(value != pytest.approx(0.6, rel=1e-3) for value in names["fidelities"](names["model"]).values())
        assert names["right"] > 0.9
    if "log_likelihood" in names:
        assert names["found"].items == 40
        assert len(names["found"].rows) == 4
    if "restored" in names:
        assert names["attention"].method == "tiled"
        assert names["attention"].fused
        assert all(abs(float(names[name].grad)) > 1e-9 for name in ("width", "strength"))
    if "Checkpoint" in names:
        first = names["solution"]
        assert (tmp_path / "run.npz").is_file()
        exec(compile(block, name, "exec"), names)
        assert names["solution"].stats["steps"] == first.stats["steps"]
        assert (names["solution"].u == first.u).all()
    if "fast" in names:
        fast, solution = names["fast"], names["solution"]
        assert fast.measure_error(names["u"]) <= fast.error_estimate <= 1e-6
        assert solution.success
