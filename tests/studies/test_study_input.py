"""What studies do with odd options: every answer is the right one, or an error that names the argument."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nlflow import Gaussian, InputError, MemoryLimitError, NumericalError, TopHat, run_study
from nlflow.flows.integrators import ExplicitEuler, RungeKutta

DRAWS: dict[str, Any] = {"nodes": [8, 16, 32], "seeds": 3, "dimension": 1}


def test_integers_of_numpy_are_seeds() -> None:
    assert run_study("monte-carlo", rng=np.int64(5), **DRAWS).rows == run_study("monte-carlo", rng=5, **DRAWS).rows
    generator = run_study("monte-carlo", rng=np.random.default_rng(1), **DRAWS)
    assert generator.options["rng"] == int(np.random.default_rng(1).integers(2**63))


@pytest.mark.parametrize("rng", ["one", 1.5, -1, np.int64(-1), True])
def test_what_is_no_seed(rng: Any) -> None:
    with pytest.raises(InputError, match=r"^rng: got .*, expected"):
        run_study("monte-carlo", rng=rng, **DRAWS)


@pytest.mark.slow
def test_options_of_the_same_name_are_told_apart() -> None:
    steps = [lambda dt: ExplicitEuler(dt), lambda dt: RungeKutta(dt=dt, adaptive=False)]
    result = run_study("time-order", nodes=16, metric="degree", fidelity=0.5, integrator=steps)
    assert [fit.expected for fit in result.fits] == [1, 5]
    assert [fit.passed for fit in result.fits] == [True, True]
    assert list(dict.fromkeys(row["integrator"] for row in result.rows)) == ["<lambda>", "<lambda>#2"]
    kernels = [Gaussian(0.1), Gaussian(0.1 + 1e-9)]
    result = run_study("mixing", nodes=12, boundary="periodic", kernel=kernels)
    assert len(result.fits) == 4
    assert all(fit.passed for fit in result.fits)


@pytest.mark.parametrize("name", ["keys", "queries", "values"])
@pytest.mark.parametrize("value", [3.0, np.ones((6, 2, 2))])
def test_tokens_have_rows(name: str, value: Any) -> None:
    options = {"keys": np.eye(6), name: value}
    with pytest.raises(InputError, match=rf"^{name}: got \d dimension.*one row for each token"):
        run_study("time-order", **options)


@pytest.mark.slow
def test_tokens_may_have_derivatives() -> None:
    torch = pytest.importorskip("torch")
    keys = np.random.default_rng(0).normal(size=(8, 2))
    given = torch.tensor(keys, requires_grad=True)
    assert run_study("stability", keys=given).rows == run_study("stability", keys=keys).rows


@pytest.mark.parametrize("kind", ["monte-carlo", "space-order", "time-order"])
@pytest.mark.parametrize(
    ("start", "message"),
    [
        (lambda x: np.zeros(3), r"start: got a function that returns shape \(3,\) for \d+ nodes"),
        (lambda x: np.zeros((len(x), 1, 1)), "start: got a function that returns shape"),
        (lambda x: ["a"] * len(x), "start: got dtype"),
        (lambda x: x[:, 0] * np.nan, r"start: got \d+ NaN or infinite"),
    ],
)
def test_functions_that_are_no_signals(kind: str, start: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        run_study(kind, start=start, dimension=1)


def test_lists_are_values_of_signals() -> None:
    for kind in ("monte-carlo", "space-order"):
        options = {**DRAWS, "nodes": [8, 16, 32]} if kind == "monte-carlo" else {"dimension": 1, "boundary": "periodic"}
        listed = run_study(kind, start=lambda x: x[:, 0].tolist(), **options)
        assert listed.rows == run_study(kind, start=lambda x: x[:, 0], **options).rows


def test_errors_name_their_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"kernel": [Gaussian(0.2), TopHat(0.01)], "nodes": 12, "boundary": "periodic"}
    with pytest.raises(InputError, match=r"reducible chain .*\[in the case tophat:radius=0.01 N=12 1-D periodic"):
        run_study("mixing", out=tmp_path, **options)
    assert len(list((tmp_path / "cases").iterdir())) == 1  # what was done is kept

    def lost(flow: Any) -> float:
        raise NumericalError("flow: the slowest rate was not found")

    monkeypatch.setattr("nlflow.studies.equilibrium.relaxation_rate", lost)
    with pytest.raises(NumericalError, match=r"was not found \[in the case gaussian:width=0.1 N=12 1-D periodic"):
        run_study("equilibrium", nodes=12)


@pytest.mark.slow
def test_studies_do_not_share_the_files_of_cases(tmp_path: Path) -> None:
    """Two that begin in one folder at the same time, before either has written what it is."""
    names = []
    for t in (1.0, 2.0):
        folder = tmp_path / str(t)
        run_study("time-order", out=folder, nodes=12, integrator="euler", metric="degree", fidelity=0.5, t=t)
        names += [path.name for path in (folder / "cases").iterdir()]
    assert len(set(names)) == 2


@pytest.mark.slow
def test_huge_fidelities() -> None:
    result = run_study("equilibrium", nodes=12, metric="degree", fidelity=[1.0, 1e200, 1e300])
    assert [row["rate_ratio"] for row in result.rows] == pytest.approx([1, 1, 1], rel=1e-3)
    result = run_study("stability", kernel=Gaussian(0.1), nodes=12, fidelity=[0.5, 1.5, 1e300])
    assert [row["stable"] for row in result.rows] == [True, False, False]
    assert result.rows[-1]["growth"] == pytest.approx(1e300, rel=1e-9)


def test_stability_without_fidelity_is_refused() -> None:
    with pytest.raises(InputError, match=r"^fidelity: got 0, expected numbers > 0"):
        run_study("stability", fidelity=[0, 0.5, 1.5])


def test_a_wide_interval_about_the_limit_cannot_tell() -> None:
    result = run_study("stability", kernel=TopHat(0.1), nodes=64, fidelity=[0.2, 1.4, 1.5])
    limit = result.fits[0]
    assert (limit.low, limit.high) == (0.2, 1.4)
    assert limit.expected is not None
    assert abs(limit.slope - limit.expected) > limit.tolerance
    assert limit.verdict == "cannot tell"


def test_a_rate_is_measured_once_the_slowest_mode_rules() -> None:
    """With -4.305 for the slowest and -4.509 for the next, and a start that has almost none of the slowest."""
    options: dict[str, Any] = {"kernel": "matern:width=0.947,nu=2.5", "nodes": 13, "boundary": "reflect"}
    result = run_study("equilibrium", rng=71, metric="l2", fidelity=[0.001, 1.0, 10.0], **options)
    assert [row["rate_ratio"] for row in result.rows] == pytest.approx([1, 1, 1], abs=0.005)


@pytest.mark.parametrize(("seed", "verdict"), [(5, "cannot tell"), (0, "agrees")])
def test_a_mixing_rate_is_told_of_a_start_with_enough_of_the_slowest_mode(seed: int, verdict: str) -> None:
    options: dict[str, Any] = {"kernel": "matern:width=0.947,nu=2.5", "nodes": 13, "boundary": "isolated"}
    rate = run_study("mixing", rng=seed, laziness=0.9, **options).fits[0]
    assert rate.verdict == verdict
    assert rate.note == ("another mode is nearly as slow" if verdict == "cannot tell" else "")


@pytest.mark.slow
def test_chains_that_are_too_slow_have_no_late_rate() -> None:
    """After 5000 steps a chain that hardly ever moves shows all of its modes."""
    result = run_study("mixing", nodes=16, boundary="periodic", laziness=0.999)
    rate, time = result.fits
    assert rate.passed is None
    assert rate.reason == "mixes too slowly for 5000 steps"
    assert time.passed is True


def test_too_many_first_nodes_are_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NLFLOW_MEMORY_LIMIT", "10e6")
    monkeypatch.setattr("nlflow.markov.MarkovChain.limit", lambda *_: pytest.fail("began"))
    with pytest.raises(MemoryLimitError, match=r"following every first node needs .* use fewer nodes"):
        run_study("mixing", nodes=1000, boundary="periodic")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"origin": [1.0], "nodes": 5, "boundary": "periodic"},
            r"^origin: got shape \(1,\), expected a node number or",
        ),
        (
            {"origin": 7, "nodes": 5, "boundary": "periodic"},
            r"^origin: got 7, expected an integer >= 0 that is below 5",
        ),
        ({"keys": np.ones((4, 2)), "queries": iter([1])}, r"^queries: got dtype object"),
        ({"keys": np.ones((4, 2)), "queries": 3.0}, r"^queries: got 0 dimension"),
    ],
)
def test_options_are_named_as_they_were_given(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        run_study("mixing", **options)
