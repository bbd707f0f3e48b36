"""Regressions with their confidence intervals, and options in plain data."""

from __future__ import annotations

import functools
import json
import math
import os
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from scipy import stats

from nlflow import ExpDotProduct, Formula, Gaussian, Grid, InputError, MarkovChain, Points, from_matrix
from nlflow.kernels import RadialKernel
from nlflow.store.encoding import decode, encode
from nlflow.store.identity import describe
from nlflow.studies import mixing
from nlflow.studies.contract import judged
from nlflow.studies.fits import Fit, largest, no_fit, power_fit, regress
from nlflow.studies.options import kernel_label, parse_kernel


def test_regression_is_that_of_scipy(rng: np.random.Generator) -> None:
    x = rng.random(12)
    y = 3 * x - 1 + 0.1 * rng.standard_normal(12)
    line, expected = regress(x, y), stats.linregress(x, y)
    quantile = stats.t.ppf(0.975, 10)
    assert line.points == 12
    np.testing.assert_allclose([line.slope, line.intercept], [expected.slope, expected.intercept], rtol=1e-12)
    np.testing.assert_allclose(line.slope_half, quantile * expected.stderr, rtol=1e-10)
    np.testing.assert_allclose(line.intercept_half, quantile * expected.intercept_stderr, rtol=1e-10)


def test_regression_needs_three_points() -> None:
    with pytest.raises(ValueError, match="at least 3"):
        regress([1, 2], [1, 2])
    with pytest.raises(ValueError, match="different x"):
        regress([1, 1, 1], [1, 2, 3])


def test_interval_covers_the_slope_as_often_as_it_says() -> None:
    rng = np.random.default_rng(5)
    x = np.linspace(0, 1, 6)
    inside = 0
    for _ in range(1000):
        line = regress(x, 2 * x + rng.standard_normal(6))
        inside += abs(line.slope - 2) <= line.slope_half
    assert 0.93 < inside / 1000 < 0.97


def test_power_and_exponential() -> None:
    x = [1.0, 2.0, 4.0, 8.0]
    fit = power_fit("a", "order", x, [3 * v**-2 for v in x], [True] * 4, expected=-2, tolerance=1e-9)
    np.testing.assert_allclose([fit.slope, math.exp(fit.intercept)], [-2, 3], rtol=1e-12)
    np.testing.assert_allclose([fit.low, fit.high], -2, rtol=1e-8)
    assert fit.passed is True
    assert fit.points == 4
    decay = power_fit("a", "rate", x, [3 * math.exp(-0.5 * v) for v in x], [True] * 4, exponential=True)
    np.testing.assert_allclose([decay.slope, math.exp(decay.intercept)], [-0.5, 3], rtol=1e-12)
    assert decay.passed is None


def test_points_at_rounding_are_left_out_and_too_few_give_no_slope() -> None:
    x = [1.0, 0.5, 0.25, 0.125]
    errors = [1.0, 0.25, 1 / 16, 1e-17]
    fit = power_fit("a", "order", x, errors, [True, True, True, False], expected=2, tolerance=0.01)
    assert fit.passed is True
    assert fit.reason == "1 point(s) left out"
    none = power_fit("a", "order", x, errors, [True, True, False, False], expected=2, tolerance=0.01)
    assert math.isnan(none.slope)
    assert none.passed is None
    assert "only 2 size(s) above rounding level" in none.reason
    assert "not fitted, expected 2: cannot tell (only 2 size(s)" in str(none)


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (0.97, 1.02, "agrees"),
        (0.81, 1.19, "agrees"),
        (0.79, 1.02, "cannot tell"),  # reaches further than four tolerances
        (-5.8, 78.0, "cannot tell"),
        (0.96, 0.99, "cannot tell"),  # excludes 1, by less than the tolerance
        (0.80, 0.96, "cannot tell"),
        (0.80, 0.94, "disagrees"),
        (1.051, 1.2, "disagrees"),
    ],
)
def test_verdict_on_a_number(low: float, high: float, verdict: str) -> None:
    fit = Fit("a", "b", (low + high) / 2, low, high, 1.0, tolerance=0.05)
    assert fit.verdict == verdict
    assert fit.passed is {"agrees": True, "disagrees": False}.get(verdict)
    assert bool(fit.note) == (verdict == "cannot tell")
    assert fit.expectation == "1, to within 0.05"


@pytest.mark.parametrize(
    ("relation", "low", "high", "verdict"),
    [
        (">=", 6.0, 70.0, "agrees"),
        (">=", -5.8, 78.0, "cannot tell"),
        (">=", 5.9, 5.99, "cannot tell"),
        (">=", 1.0, 5.0, "disagrees"),
        ("<=", 1.0, 6.0, "agrees"),
        ("<=", 1.0, 7.0, "cannot tell"),
        ("<=", 7.0, 8.0, "disagrees"),
        ("in", 1.0, 8.0, "agrees"),
        ("in", 5.0, 8.0, "disagrees"),
    ],
)
def test_verdict_on_bounds(relation: str, low: float, high: float, verdict: str) -> None:
    value = 4.0 if relation == "in" else (low + high) / 2
    fit = Fit("a", "b", value, low, high, None if relation == "in" else 6.0, relation=relation, tolerance=0.2)
    assert fit.verdict == verdict


def test_what_has_no_scatter_is_held_against_its_bound() -> None:
    assert [largest("a", "b", [0.1, value], 0.2).verdict for value in (0.2, 0.21)] == ["agrees", "disagrees"]


def consistent(fit: Fit) -> bool:
    """Whether a verdict agrees with the interval that is shown, by a rule of its own."""
    if fit.verdict != "agrees" or fit.expected is None:
        return True
    holds = fit.low <= fit.expected <= fit.high
    return holds and fit.high - fit.low <= 8 * fit.tolerance


def test_verdicts_over_simulated_studies_of_draws() -> None:
    """Where the truth is as expected, at most one in twenty disagrees; where it is not, no one agrees."""
    rng = np.random.default_rng(0)
    n = np.repeat([64.0, 128, 256, 512, 1024, 2048], 40)
    counts: dict[float, list[str]] = {-0.5: [], -1.0: []}
    for truth, verdicts in counts.items():
        for _ in range(500):
            error = n**truth * np.exp(rng.normal(0, 0.6, n.size)) * (1 + rng.normal(0, 1) / n)
            fit = power_fit("a", "b", n, np.abs(error), [True] * n.size, expected=-0.5, tolerance=0.05, sampled=True)
            assert consistent(fit)
            verdicts.append(fit.verdict)
    assert counts[-0.5].count("disagrees") <= 25
    assert counts[-0.5].count("agrees") > 400
    assert counts[-1.0].count("disagrees") > 490
    assert "agrees" not in counts[-1.0]


def test_verdicts_over_simulated_sequences_of_steps() -> None:
    """Errors C h^p (1 + a h + b h^2) of an integrator, of its order and of another."""
    rng = np.random.default_rng(1)
    counts: dict[int, list[str]] = {0: [], 1: []}
    for off, verdicts in counts.items():
        for _ in range(500):
            order = int(rng.integers(1, 6))
            h = np.geomspace(0.25, 0.03, 6)
            error = h ** (order + off) * (1 + rng.uniform(-1, 1) * h + rng.uniform(-1, 1) * h**2)
            fit = power_fit("a", "b", h, error, [True] * 6, expected=order, tolerance=0.05 * order)
            assert consistent(fit)
            verdicts.append(fit.verdict)
    assert counts[0].count("disagrees") <= 25
    assert counts[0].count("agrees") > 450
    assert counts[1].count("disagrees") == 500


def test_three_points_that_scatter_tell_nothing() -> None:
    x, y = [1.0, 2.0, 4.0], [1.0, 8.0, 1.5]
    for sampled in (False, True):
        fit = power_fit("a", "b", x, y, [True] * 3, expected=0, tolerance=0.1, sampled=sampled)
        assert fit.verdict == "cannot tell"
        assert fit.note == "the interval ends more than 4 tolerances from 0"


def test_fits_in_words() -> None:
    fit = power_fit("N=4", "order in dt", [1, 2, 4], [1, 2, 4], [True] * 3, expected=2, tolerance=0.1)
    assert str(fit).startswith("N=4: order in dt 1 [1, 1], expected 2, to within 0.1: disagrees")
    assert "at least 6" in str(no_fit("a", "b", "why", 6.0, ">="))


def test_judgement() -> None:
    assert judged(1e-3, 1.0) == {"used": True, "note": ""}
    assert judged(1e-14, 1.0)["note"] == "rounding level"
    assert judged(1e-14, 1e-3)["used"] is True
    assert judged(0.0, 0.0)["note"] == "rounding level"
    assert judged(math.nan, 1.0)["note"] == "not finite"
    assert judged(math.inf, 1.0)["used"] is False
    assert judged(1e-10, 1.0, 1e-9)["used"] is False


def test_rounding_decides_no_flag_of_mixing() -> None:
    """Distances that fall by 0.72 a step and end at some units in the last place: whatever these are."""
    unit = 3 * 2.0**-52
    exact = 0.7 * 0.7254 ** np.arange(114)
    flags = []
    for size in (0.02, 0.1, 0.18, 0.2, 0.3, 0.5, 1.0, 3.0):
        noise = size * unit * np.random.default_rng(int(100 * size)).uniform(1, 3, exact.size)
        flags.append([row["used"] for row in mixing._late(np.hypot(exact, noise), unit)])
    assert all(other == flags[0] for other in flags)
    used = np.flatnonzero(flags[0])
    assert used.size > 30
    assert exact[used[-1]] > 500 * unit
    # What ends higher is left out from higher on.
    approximate = mixing._late(np.hypot(exact, 1e-9), unit)
    assert 5e-7 < exact[[row["used"] for row in approximate]].min() < 2e-6


def test_what_is_so_near_to_a_threshold_lies_at_it() -> None:
    """Eigenvalues and distances that exact arithmetic puts on a threshold."""
    # Of two states with moves of probability 1/4 the distance after k moves is 2^-(k + 1): 1/4 after one.
    for error in (0.0, 1e-15, -1e-15):
        both = np.array([[0.75 + error, 0.25], [0.25, 0.75 + error]])
        chain = MarkovChain(from_matrix(both, Points([0.0, 1.0], [1.0, 1.0])))
        assert [chain.mixing_time(eps) for eps in (0.25, 0.125, 2.0**-20)] == [1, 2, 19]
        assert [chain.mixing_time(eps, 0) for eps in (0.25, 0.125, 2.0**-20)] == [1, 2, 19]


# --- plain data ------------------------------------------------------------------------------------------------------


def test_floats_come_back_to_the_last_bit(rng: np.random.Generator) -> None:
    values = [*rng.standard_normal(50), 5e-324, 1e308, -0.0, math.inf, -math.inf]
    back = decode(encode({"rows": values, "nan": math.nan, "word": "nan", "none": None, "yes": True}))
    assert [v.hex() for v in back["rows"]] == [float(v).hex() for v in values]
    assert math.isnan(back["nan"])
    assert (back["word"], back["none"], back["yes"]) == ("nan", None, True)
    json.loads(encode([math.nan]), parse_constant=lambda name: pytest.fail(name))


@dataclass(frozen=True)
class Ring(RadialKernel):
    """A user's kernel."""

    width: float = 1.0

    def log_profile(self, squared: Any) -> Any:
        return -squared / self.width

    def support(self, rtol: float) -> float:
        return self.width * math.sqrt(-math.log(rtol))


def _power(exponent: float) -> Any:
    return lambda x: x[:, 0] ** exponent


def test_what_differs_is_described_differently() -> None:
    pairs = [
        (np.zeros(3), np.zeros(4)),
        (np.zeros(3), np.zeros(3, np.float32)),
        (np.zeros(3), np.array([0, 0, 1e-300])),
        (Gaussian(1.0), Gaussian(2.0)),
        (ExpDotProduct(query_map=np.eye(2)), ExpDotProduct(query_map=2 * np.eye(2))),
        (Grid(4), Grid(5)),
        (Points(np.zeros(3)), Points(np.ones(3))),
        (_power(1), _power(2)),
        (lambda x: x + 1, lambda x: x + 2),
        (np.sin, np.cos),
        (functools.partial(pow, 2), functools.partial(pow, 3)),
        (Ring(1.0), Ring(2.0)),
        (1.0, 1.5),
    ]
    for a, b in pairs:
        assert encode(describe(a)) == encode(describe(a))
        assert encode(describe(a)) != encode(describe(b)), (a, b)


def test_a_function_that_knows_itself_is_described() -> None:
    def countdown(n: int) -> int:
        return countdown(n - 1) if n else 0

    assert encode(describe(countdown)) == encode(describe(countdown))


@pytest.mark.slow
def test_descriptions_are_the_same_in_every_process() -> None:
    code = """
import numpy as np, dataclasses
from nlflow.store.encoding import encode
from nlflow.store.identity import describe
from nlflow import Gaussian, Points
def start(x, names={"a": 1}):
    return x[:, 0] if str(x.dtype) in {"float64", "float32", "int8", "int16"} else None
class Own:
    def __init__(self): self.x = np.arange(3)
    def __call__(self, x): return x * self.x
print(encode(describe([start, Own(), Gaussian(0.1), Points(np.arange(4.0))])))
"""
    runs = [
        subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    ]
    assert runs[0] == runs[1]
    assert "sha256" in runs[0]


# --- kernels as text -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "gaussian:width=0.1",
        "laplace:width=2.5",
        "tophat:radius=0.2",
        "dot",
        "dot:scale=1",
        "gaussian:amplitude=2,width=3",
        "formula:1/(1+r**2)",
        "formula:where(r <= 1, (1 - minimum(r, 1))**2, 0),amplitude=2,width=0.3,definite=1",
    ],
)
def test_kernel_text_and_back(text: str) -> None:
    assert kernel_label(parse_kernel(text)) == text


def test_a_formula_as_text_is_that_formula() -> None:
    """So a file of a study can hold it, and the shell repeats it."""
    kernel = Formula("maximum(0, 1 - r)", width=0.2, definite=True)
    assert parse_kernel(" formula: maximum(0, 1 - r) , width = 0.2,definite=1") == kernel
    assert repr(parse_kernel(kernel_label(kernel))) == repr(kernel)


def test_kernels_without_a_text_are_shown() -> None:
    assert kernel_label(Ring(2.0)).startswith("Ring(")
    assert kernel_label(Formula(lambda r: np.exp(-r))).startswith("Formula(k=<log k: ")
    assert kernel_label(ExpDotProduct(query_map=np.eye(2))).startswith("ExpDotProduct(")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("box:width=1", "as in gaussian:width=0.1"),
        ("formula:exp(-r),definite=0.5", "got 'definite=0.5'"),
        ("gaussian", "a value for width"),
        ("gaussian:width=wide", "got 'width=wide'"),
        ("gaussian:radius=1", "got 'radius=1'"),
        ("gaussian:width=1,width=2", "once each"),
        ("gaussian:width=-1", "expected a finite real number > 0"),
        ("dot:query_map=1", "got 'query_map=1'"),
        ("formula:exp(-r),radius=1", "got 'radius=1'"),
        ("formula:", "k: got '', which is no expression"),
        ("", "expected one of gaussian"),
    ],
)
def test_wrong_kernel_texts(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message.replace("(", r"\(")):
        parse_kernel(text)
