"""The programs of `validation/`: that they pass, that they can fail, and what they write."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from nlflow import equilibria
from nlflow.affinities import Affinity, from_matrix
from nlflow.desk.commands.main import app
from nlflow.domains import Points
from nlflow.errors import InputError, NlflowWarning
from nlflow.flows.gradient import GradientFlow
from nlflow.flows.integrators import ETD2RK, ExplicitEuler, NeutrenoStep
from nlflow.flows.solver import solve
from nlflow.flows.trackers import Callback
from nlflow.functionals.energies import E, J
from nlflow.functionals.fidelity import NodeFidelity
from nlflow.functionals.variational.jp import Jp
from nlflow.markov import MarkovChain
from nlflow.markov.moves import Moves
from nlflow.plotting import new_figure
from validation import claims, runner
from validation.harness import CannotRunError, Check, Claim, Context, Outcome, largest, smallest

ROOT = Path(__file__).parents[2]
QUICK = Context(quick=True)


def claim(run: Any, name: str = "made-up") -> Claim:
    return Claim(name, "A title", "A statement with <signs> & such", "nobody", run)


def named(name: str) -> Claim:
    return next(claim for claim in claims.all_claims() if claim.name == name)


# --- claims, as a user runs them -------------------------------------------------------------------------------------

CHEAP = ["frechet-derivative", "limit-of-averages"]


@pytest.fixture(scope="module", params=["cheap", pytest.param("all", marks=pytest.mark.slow)])
def quick_run(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[str], subprocess.CompletedProcess[str], Path]:
    """Names of claims, the run that went through them, and its folder."""
    names = CHEAP if request.param == "cheap" else [claim.name for claim in claims.all_claims()]
    out = tmp_path_factory.mktemp("validation") / "report"
    command = [sys.executable, "-m", "validation", "--quick", "--out", str(out)]
    if request.param == "cheap":
        command += names
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=3600)
    return names, done, out


def test_every_claim_passes_in_its_quick_form(
    quick_run: tuple[list[str], subprocess.CompletedProcess[str], Path],
) -> None:
    names, done, out = quick_run
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert [line[8:].split()[0] for line in lines[: len(names)]] == names
    # Claims about trained models need packages that are optional.
    missing = [line for line in lines[: len(names)] if line.startswith("not run")]
    reasons = ("is not installed", "are not installed", "is not given: --data DIR")  # nor are data sets part of it
    assert all(any(reason in line for reason in reasons) for line in missing), done.stdout
    assert all(line.startswith(("pass", "not run")) for line in lines[: len(names)]), done.stdout
    record = json.loads((out / "results.json").read_text())
    assert record["passed"]
    assert record["quick"]
    assert [entry["name"] for entry in record["claims"]] == names
    for entry in record["claims"]:
        assert entry["checks"] or entry["status"] == "not run", entry["name"]
        assert all(check["passed"] for check in entry["checks"]), entry


def test_report_is_one_page_with_its_figures_inside(
    quick_run: tuple[list[str], subprocess.CompletedProcess[str], Path],
) -> None:
    names, _, out = quick_run
    page = (out / "report.html").read_text()
    record = json.loads((out / "results.json").read_text())

    class Reader(HTMLParser):
        sources: list[str]
        links: list[str]

        def __init__(self) -> None:
            super().__init__()
            self.sources, self.links = [], []

        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            found = dict(attrs)
            self.sources += [value for key in ("src", "srcset") if (value := found.get(key))]
            self.links += [value for key in ("href", "action") if (value := found.get(key))]

    reader = Reader()
    reader.feed(page)
    figures = sum(len(entry["figures"]) for entry in record["claims"])
    assert figures >= (1 if names is CHEAP else 10)
    assert len(reader.sources) == figures
    assert all(source.startswith("data:image/png;base64,") for source in reader.sources)
    assert all(link.startswith("#") for link in reader.links)  # nothing is fetched
    assert "url(" not in page
    for entry in record["claims"]:
        assert f'id="{entry["name"]}"' in page


def test_each_file_of_claims_is_listed_and_named_after_itself() -> None:
    files = {path.stem for path in (ROOT / "validation" / "claims").glob("*.py")} - {"__init__"}
    assert set(claims.MODULES) == files
    assert [claim.name for claim in claims.all_claims()] == [name.replace("_", "-") for name in claims.MODULES]


# --- claims can fail -------------------------------------------------------------------------------------------------


def breakage(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Break one formula of the package."""
    if name == "the transposed kernel is dropped":
        monkeypatch.setattr(Affinity, "symmetrized", lambda self: self)
    elif name == "lambda stands for lambda~":
        monkeypatch.setattr(E, "fidelity_in", lambda self, metric: NodeFidelity(self.fidelity))
    elif name == "the stationary law is uniform":
        uniform = property(lambda self: np.full(self.affinity.domain.shape, 1 / self.states))
        monkeypatch.setattr(MarkovChain, "stationary", uniform)
    elif name == "the law goes by P, not its transpose":

        def averaged(self: Moves, law: np.ndarray) -> np.ndarray:
            moved = self.affinity.average(self.affinity.as_signal(law))
            return moved / moved.sum()

        monkeypatch.setattr(Moves, "_transposed", averaged)
    elif name == "the fidelity is not drawn in":
        monkeypatch.setattr(NeutrenoStep, "advance", lambda self, flow, u, t, target, memory: (flow.average(u), t + 1))
    elif name == "the bounds change places":
        from validation.claims import constant_limits

        def swapped(flow: Any) -> tuple[float, float]:
            low, high = equilibria.diversity_bounds(flow)
            return high, low

        monkeypatch.setattr(constant_limits, "diversity_bounds", swapped)
    elif name == "the limit of the step is 1":
        from validation.claims import stability_limit

        monkeypatch.setattr(stability_limit, "largest_stable_fidelity", lambda affinity: 1.0)
    elif name == "the correction of ETD2RK is short":
        whole = ETD2RK.reached.__func__

        def short(cls: Any, flow: Any, part: Any, like: Any, *functions: tuple[int, float]) -> list[Any]:
            return [0.9 * each if functions[0][0] == 2 else each for each in whole(cls, flow, part, like, *functions)]

        monkeypatch.setattr(ETD2RK, "reached", classmethod(short))
    elif name == "the exponent of J_p is longer":
        monkeypatch.setattr(Jp, "smoothed", lambda self, x, e: float(self.measure @ x ** (1.1 * self.p)) / 2 / self.p)
    elif name == "the fidelity for a share is larger":
        from validation.claims import constant_limits

        enough = equilibria.fidelity_for_diversity
        monkeypatch.setattr(constant_limits, "fidelity_for_diversity", lambda flow, share: 1.3 * enough(flow, share))


@pytest.mark.parametrize(
    ("what", "found_by"),
    [
        ("the transposed kernel is dropped", "frechet-derivative"),
        ("lambda stands for lambda~", "frechet-derivative"),
        pytest.param("the law goes by P, not its transpose", "law-of-the-walk", marks=pytest.mark.slow),
        ("the limit of the step is 1", "stability-limit"),
        pytest.param("the stationary law is uniform", "stationary-law", marks=pytest.mark.slow),
        pytest.param("the fidelity is not drawn in", "attention-step", marks=pytest.mark.slow),
        pytest.param("the bounds change places", "constant-limits", marks=pytest.mark.slow),
        pytest.param("the fidelity for a share is larger", "constant-limits", marks=pytest.mark.slow),
        pytest.param("the correction of ETD2RK is short", "order-of-steps", marks=pytest.mark.slow),
        pytest.param("the exponent of J_p is longer", "p-functionals", marks=pytest.mark.slow),
    ],
)
@pytest.mark.sampled(2)
def test_a_broken_formula_makes_a_claim_fail(what: str, found_by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    breakage(what, monkeypatch)
    finding = runner.run_one(named(found_by), QUICK)
    assert finding.status in ("fail", "error"), finding.line


# --- checks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("check", "passes"),
    [
        (Check("small", 0.9, 1.0), True),
        (Check("small", 1.1, 1.0), False),
        (Check("none allowed", 0.0, 0.0), True),
        (Check("none allowed", 1.0, 0.0), False),
        (Check("large", 2.0, 1.0, at_least=True), True),
        (Check("large", 0.5, 1.0, at_least=True), False),
        (Check("large", 0.0, 0.0, at_least=True), True),
        (Check("large", -1.0, 0.0, at_least=True), False),
        (Check("near", 2.05, 0.1, expected=2.0), True),
        (Check("near", 1.8, 0.1, expected=2.0), False),
        (Check("small", math.nan, 1.0), False),
        (Check("large", math.nan, 1.0, at_least=True), False),
        (Check("near", math.nan, 0.1, expected=2.0), False),
        (Check("small", math.inf, 1.0), False),
    ],
)
def test_check(check: Check, passes: bool) -> None:
    assert check.passed is passes
    assert (check.strain <= 1) is passes


def test_an_outcome_passes_only_with_checks_that_all_pass() -> None:
    good, bad = Check("good", 0.5, 1.0), Check("bad", 3.0, 1.0)
    assert Outcome([good]).passed
    assert not Outcome([good, bad]).passed
    assert not Outcome([]).passed
    assert Outcome([good, bad]).worst is bad


# --- the runner ------------------------------------------------------------------------------------------------------


def test_a_claim_that_raises_is_an_error_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def breaks(context: Context) -> Outcome:
        raise RuntimeError("nothing goes")

    def cannot(context: Context) -> Outcome:
        raise CannotRunError("torch is not installed")

    def works(context: Context) -> Outcome:
        figure = new_figure()
        figure.subplots().plot([1, 2])
        return Outcome([Check("what", 0.1, 1.0)], {"A <caption>": figure}, {"n": np.int64(3), "x": math.inf})

    made_up = [claim(breaks, "first"), claim(cannot, "second"), claim(works, "third")]
    monkeypatch.setattr(runner, "all_claims", lambda: made_up)
    lines: list[str] = []
    findings = runner.run_claims(out=tmp_path, progress=False, tell=lines.append)
    assert [finding.status for finding in findings] == ["error", "not run", "pass"]
    assert "nothing goes" in lines[0]
    assert "torch is not installed" in lines[1]
    assert not runner.succeeded(findings)
    assert runner.succeeded(findings[1:])
    assert runner.summary(findings).startswith("3 claims: 1 passed, 1 ended in an error, 1 not run")
    assert "Traceback" in capsys.readouterr().err
    record = json.loads((tmp_path / "results.json").read_text())
    assert record["passed"] is False
    assert record["claims"][2]["details"] == {"n": 3, "x": None}
    page = (tmp_path / "report.html").read_text()
    assert "A statement with &lt;signs&gt; &amp; such" in page
    assert "A &lt;caption&gt;" in page
    assert sorted(path.name for path in tmp_path.iterdir()) == ["claims", "report.html", "results.json"]


def test_an_interrupted_run_keeps_what_it_has_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def works(context: Context) -> Outcome:
        return Outcome([Check("what", 0.1, 1.0)])

    def interrupted(context: Context) -> Outcome:
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "all_claims", lambda: [claim(works, "first"), claim(interrupted, "second")])
    with pytest.raises(KeyboardInterrupt):
        runner.run_claims(out=tmp_path, progress=False, tell=lambda line: None)
    record = json.loads((tmp_path / "results.json").read_text())
    assert [entry["name"] for entry in record["claims"]] == ["first"]
    assert record["passed"] is record["complete"] is False
    page = (tmp_path / "report.html").read_text()
    assert 'id="first"' in page
    assert "1 more were not run" in page


def test_a_flow_cut_short_is_no_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`solve` answers Ctrl-C with what it has reached, and its claim then measures that: it must not be kept."""
    ends: list[float] = []

    def strike(t: float, u: np.ndarray, flow: Any) -> None:
        if t > 0 and not ends:
            signal.raise_signal(signal.SIGINT)

    def measures(context: Context) -> Outcome:
        flow = GradientFlow(J(from_matrix(np.array([[0.0, 1.0], [1.0, 0.0]]), Points(np.arange(2.0)[:, None]))))
        solution = solve(flow, [0.0, 1.0], t=1.0, integrator=ExplicitEuler(0.25), trackers=[Callback(strike)])
        ends.append(float(solution.t[-1]))
        return Outcome([Check("time that is left", 1.0 - ends[-1], 1.0)])

    monkeypatch.setattr(runner, "all_claims", lambda: [claim(measures, "flow")])
    arguments = {"out": tmp_path, "resume": True, "progress": False, "tell": lambda line: None}
    with pytest.raises(KeyboardInterrupt):
        runner.run_claims(**arguments)
    assert len(ends) == 1
    assert ends[0] < 1.0  # the claim went on
    assert not (tmp_path / "claims").exists()
    ends.clear()
    with pytest.raises(KeyboardInterrupt):  # a worker: what it finds after a signal is no finding either
        runner._run("flow", quick=True)
    [finding] = runner.run_claims(**arguments)
    assert finding.outcome is not None
    assert finding.outcome.checks[0].measured == 0.0


def test_unknown_names_are_refused_with_the_known_ones() -> None:
    with pytest.raises(InputError, match=r"NAME: got .propositon-1., expected one of .*proposition-1"):
        runner.select(["propositon-1"])
    assert [claim.name for claim in runner.select(["energy_balance", "attention-step"])] == [
        "attention-step",
        "energy-balance",
    ]


def test_command_ends_with_1_when_a_claim_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "all_claims", lambda: [claim(lambda context: Outcome([Check("x", 2.0, 1.0)]))])
    result = CliRunner().invoke(app, ["validate", "--out", str(tmp_path / "new")])
    assert result.exit_code == 1
    assert result.stdout.startswith("fail    made-up")
    assert (tmp_path / "new" / "report.html").is_file()


def test_command_lists_claims() -> None:
    result = CliRunner().invoke(app, ["validate", "--list"])
    assert result.exit_code == 0
    assert [line.split()[0] for line in result.stdout.splitlines()] == [claim.name for claim in claims.all_claims()]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["nonsense"], "NAME: got 'nonsense'"),
        (["--out", "a-file", "constant-limits"], "which is a file"),
        (
            ["--out", "a-file/sub", "constant-limits"],
            "a-file/sub: got Not a directory, expected a folder that can be made",
        ),
    ],
)
def test_command_tells_what_is_wrong(
    arguments: list[str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a-file").write_text("kept")
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["validate", *arguments])
    assert result.exit_code == 1
    assert told in result.stderr
    assert (tmp_path / "a-file").read_text() == "kept"
    assert [path.name for path in tmp_path.iterdir()] == ["a-file"]


def test_largest_and_smallest_do_not_lose_a_nan() -> None:
    assert largest(1.0, 3.0, 2.0) == 3
    assert smallest(2.0, 1.0, 3.0) == 1
    for values in ((math.nan, 1.0), (1.0, math.nan)):
        assert math.isnan(largest(*values))
        assert math.isnan(smallest(*values))


def test_a_run_goes_on_where_another_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def claim(name: str, error: bool = False) -> Claim:
        def run(context: Context) -> Outcome:
            calls.append(name)
            if error:
                raise RuntimeError("nothing goes")
            return Outcome([Check("what", 0.1, 1.0)], {}, {"n": 3, "x": math.inf})

        return Claim(name, "A title", "A statement", "eq. 1", run)

    claims = [claim("first"), claim("second", error=True), claim("third")]
    monkeypatch.setattr(runner, "all_claims", lambda: claims)
    whole = runner.run_claims(out=tmp_path, quick=True, progress=False, tell=lambda line: None)
    before = json.loads((tmp_path / "results.json").read_text())["claims"]
    calls.clear()
    again = runner.run_claims(out=tmp_path, quick=True, resume=True, progress=False, tell=lambda line: None)
    assert calls == ["second"]  # what ended in an error has found nothing
    assert [again[0].line, again[2].line] == [whole[0].line, whole[2].line]
    after = json.loads((tmp_path / "results.json").read_text())["claims"]
    assert [after[0], after[2]] == [before[0], before[2]]
    calls.clear()
    path = tmp_path / "claims" / "third.json"
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.warns(NlflowWarning, match="third.json: got a damaged file.*it is computed again"):
        runner.run_claims(out=tmp_path, quick=True, resume=True, progress=False, tell=lambda line: None)
    assert calls == ["second", "third"]
    calls.clear()
    runner.run_claims(out=tmp_path, quick=False, resume=True, progress=False, tell=lambda line: None)
    assert calls == ["first", "second", "third"]  # smaller experiments say nothing of whole ones


@pytest.mark.slow
def test_claims_run_side_by_side(tmp_path: Path) -> None:
    names = CHEAP
    lines: list[str] = []
    found = runner.run_claims(names, quick=True, out=tmp_path, jobs=2, progress=False, tell=lines.append)
    assert [finding.claim.name for finding in found] == [claim.name for claim in runner.select(names)]
    assert all(finding.status == "pass" for finding in found)
    assert sorted(line.split()[1] for line in lines) == names
    alone = runner.run_claims(names, quick=True, progress=False, tell=lambda line: None)
    for one, other in zip(found, alone, strict=True):
        assert one.outcome is not None
        assert other.outcome is not None
        assert [check.relation for check in one.outcome.checks] == [check.relation for check in other.outcome.checks]
        assert list(one.figures) == list(other.figures)
