"""Code that is made from formulas of kernels: against matrices, special functions and tensors; what is refused."""

from __future__ import annotations

import inspect
import math
import random
import warnings
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, ClassVar

import numpy as np
import pytest
from scipy.special import gamma, kv

import nlflow as nl
from nlflow.affinities.pair_sums import PairSums
from nlflow.kernels import NAMED, Kernel, RadialKernel, written
from nlflow.kernels.expressions import SQUARED, as_expression, structure, value
from nlflow.kernels.forms import logarithm, rate, weight
from nlflow.kernels.rewriting import simplified
from tests.covering import pairs
from validation.robustness import formulas
from validation.robustness.formulas import formula, judged

pytestmark = pytest.mark.numerical

KERNELS = [
    nl.Gaussian(0.3), nl.Laplace(0.2), nl.TopHat(0.5), *(nl.Matern(0.2, nu) for nu in (0.5, 1.5, 2.5, 3.5)),
    nl.RationalQuadratic(0.3), nl.RationalQuadratic(0.3, alpha=0.3), nl.InverseMultiquadric(0.2),
    *(nl.Wendland(0.7, d) for d in (0, 2, 4)), nl.TruncatedPower(2.5, 0.1, 1.0), nl.TruncatedPower(3, 0.1),
    nl.Formula("exp(-r**1.5)", 0.2), nl.Formula("1 / (1 + r**1.3)", 0.2),
    nl.Formula(lambda r: np.exp(-r) * (1 + np.minimum(r, 2.0)), 0.3),
    nl.Formula("where(r < 1, (1 - r)**4 * (1 + 4*r), 0)", 0.7), nl.Formula("maximum(1 - square(r), 0)", 0.8),
]  # fmt: skip
POSITIVE = [k for k in KERNELS if k.positive_semidefinite]


def named(kernel: Any) -> str:
    """Return a short name, the same one in each process."""
    return "function" if inspect.isfunction(kernel) else str(kernel)[:80]


# ---- sums without a matrix


@pytest.mark.sampled(24)
@pytest.mark.parametrize(("kernel", "d", "dtype"), pairs(KERNELS, [1, 2, 20], ["float32", "float64"]), ids=named)
def test_compiled_sums_are_those_of_the_matrix(kernel: Any, d: int, dtype: str) -> None:
    rng = np.random.default_rng(0)
    x = (rng.random((150, d)) / math.sqrt(d / 2)).astype(dtype)
    v = rng.normal(size=(150, 3)).astype(dtype)
    sums, totals, peaks = PairSums(kernel, x, x, np.ones(150))(v)
    matrix = np.exp(kernel.log_matrix(x.astype(np.float64), x.astype(np.float64)))
    eps = float(np.finfo(dtype).eps)
    # Of a weight: a few dozen roundings of its formula, and of the distance times the slope of log k.
    of_weight = (40 + 4 * min(kernel.steepness, 50) * 3) * eps
    np.testing.assert_allclose(totals * np.exp(peaks), matrix.sum(axis=1), rtol=of_weight)
    allowed = of_weight * np.abs(matrix) @ np.abs(v.astype(np.float64))
    assert np.all(np.abs(sums * np.exp(peaks)[:, None] - matrix @ v.astype(np.float64)) <= allowed)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", KERNELS, ids=named)
def test_all_methods_agree_among_scattered_nodes(kernel: Any) -> None:
    x = np.random.default_rng(1).random((120, 2))
    u = np.sin(5 * x)
    domain = nl.Points(x)
    dense = nl.affinity(kernel, domain, method="dense").average(u)
    np.testing.assert_allclose(nl.affinity(kernel, domain, method="pairwise").average(u), dense, rtol=0, atol=1e-12)
    if math.isfinite(kernel.support(0)):
        near = nl.affinity(kernel, domain, method="sparse", rtol=1e-6)
        np.testing.assert_allclose(near.average(u), dense, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "kernel",
    [nl.Matern(3.0, 2.5), nl.RationalQuadratic(2.0), nl.InverseMultiquadric(2.0), nl.Wendland(9.0, 4)],
    ids=named,
)
def test_definite_kernels_have_low_ranks(kernel: Any) -> None:
    x = np.random.default_rng(1).random((300, 2))
    u = np.sin(5 * x)
    low = nl.affinity(kernel, nl.Points(x), method="lowrank", rtol=1e-4)
    dense = nl.affinity(kernel, nl.Points(x), method="dense").average(u)
    assert np.abs(low.average(u) - dense).max() <= low.error_estimate * np.abs(u).max()


@pytest.mark.parametrize("kernel", KERNELS, ids=named)
def test_grids_agree_with_points(kernel: Any) -> None:
    grid = nl.Grid((12, 9), spacing=(0.1, 0.13), boundary="isolated")
    u = np.random.default_rng(2).normal(size=(12, 9))
    points = nl.Points(grid.nodes, grid.weights.ravel())
    expected = nl.affinity(kernel, points, method="dense").average(u.ravel()).reshape(12, 9)
    for method in ("stencil", "convolution"):
        np.testing.assert_allclose(nl.affinity(kernel, grid, method=method).average(u), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kernel", KERNELS, ids=named)
def test_tensors_have_the_same_numbers_and_derivatives(kernel: Any) -> None:
    torch = pytest.importorskip("torch", reason="the device code")
    x = np.random.default_rng(3).random((12, 2))
    features = torch.tensor(x, requires_grad=True)
    tiled = nl.affinity(kernel, nl.Points(x), features, method="tiled")
    u = torch.tensor(np.sin(5 * x))
    result = tiled.average(u)
    expected = nl.affinity(kernel, nl.Points(x), x, method="dense").average(u.numpy())
    np.testing.assert_allclose(result.detach().numpy(), expected, rtol=0, atol=1e-12)
    if isinstance(kernel, nl.TopHat):
        return  # constant where it has a derivative
    (gradient,) = torch.autograd.grad(result.square().sum(), features)
    assert bool(torch.all(torch.isfinite(gradient)))
    if kernel.steepness < 10:  # smooth enough for a difference of two values
        step = np.random.default_rng(4).normal(size=x.shape)

        def total(shift: float) -> float:
            moved = nl.affinity(kernel, nl.Points(x), x + shift * step, method="dense")
            return float((moved.average(u.numpy()) ** 2).sum())

        slope = (total(1e-6) - total(-1e-6)) / 2e-6
        assert slope == pytest.approx(float((gradient.numpy() * step).sum()), rel=1e-5, abs=1e-7)


def test_a_second_kernel_of_the_same_form_shares_the_code_and_not_the_numbers() -> None:
    (first, numbers), (second, others) = (structure(nl.Matern(w).weight()) for w in (0.1, 0.4))
    assert first == second
    assert numbers != others
    assert structure(nl.Matern(0.1, 2.5).weight())[0] != first


@dataclass(frozen=True)
class Counted(RadialKernel):
    """k = exp(-r^4), which counts how often its formula is called."""

    formula: ClassVar[str] = "exp(-r^4)"
    calls: ClassVar[list[Any]] = []

    def log_profile(self, squared: Any) -> Any:
        self.calls.append(squared)
        return -(squared**2)


def test_an_evolving_kernel_is_built_anew_without_its_formula() -> None:
    x = np.random.default_rng(0).random((30, 2))
    p = nl.affinity(Counted(), nl.Points(x), x, method="pairwise")
    Counted.calls.clear()
    again = p.update(1 - x)
    assert not Counted.calls
    fresh = nl.affinity(Counted(), nl.Points(x), 1 - x, method="pairwise")
    np.testing.assert_array_equal(again.average(x), fresh.average(x))


# ---- formulas


@pytest.mark.parametrize("nu", [0.5, 1.5, 2.5, 3.5])
def test_matern_is_that_of_bessel_functions(nu: float) -> None:
    r = np.linspace(0.01, 3, 60)
    s = math.sqrt(2 * nu) * r / 0.7
    expected = 2 ** (1 - nu) / gamma(nu) * s**nu * kv(nu, s)
    np.testing.assert_allclose(np.exp(nl.Matern(0.7, nu).log_profile(r**2)), expected, rtol=1e-12)


def test_limits_of_families() -> None:
    r2 = np.linspace(0, 4, 30)
    gaussian = nl.Gaussian(1.0).log_profile(r2)
    np.testing.assert_allclose(nl.RationalQuadratic(1.0, alpha=1e8).log_profile(r2), gaussian, atol=1e-7)
    np.testing.assert_allclose(nl.Matern(1.0, 0.5).log_profile(r2), nl.Laplace(1.0).log_profile(r2), atol=1e-15)
    power = nl.TruncatedPower(2.6, core=0.1, horizon=1.5, amplitude=0.1**-2.6)
    r = np.array([0.2, 0.7, 1.4, 1.6])
    with np.errstate(divide="ignore"):
        np.testing.assert_allclose(
            power.amplitude * np.exp(power.log_profile(r**2)), np.where(r < 1.5, r**-2.6, 0), rtol=1e-13
        )


@pytest.mark.parametrize("kernel", POSITIVE, ids=named)
@pytest.mark.parametrize("d", [1, 3, 5])
def test_declared_definiteness(kernel: Any, d: int) -> None:
    x = np.random.default_rng(d).random((60, d))
    lowest = np.linalg.eigvalsh(np.exp(kernel.log_matrix(x, x)))[0]
    if kernel.is_definite(d):
        assert lowest > -1e-13 * 60
    else:
        assert isinstance(kernel, nl.Wendland)
        assert d > 3


@pytest.mark.parametrize("kernel", KERNELS, ids=named)
def test_support_scale_and_steepness(kernel: Any) -> None:
    def k(r: float) -> float:
        return float(np.exp(kernel.log_profile(np.array([r * r])))[0])

    for rtol in (1e-3, 0.3):
        radius = kernel.support(rtol)
        assert k(radius * (1 + 1e-9)) <= rtol * (1 + 1e-6)
        assert k(radius * (1 - 1e-9)) >= rtol * (1 - 1e-6)
    jumps = isinstance(kernel, nl.TopHat) or getattr(kernel, "horizon", math.inf) < 2
    assert math.isinf(kernel.steepness) == jumps


@pytest.mark.parametrize(
    ("left", "jumps"), [(0.0, True), (1e-7, True), (1.4e-6, True), (1.6e-6, False), (3.9e-6, False)]
)
def test_a_jump_at_the_end_is_one_by_more_than_a_factor_of_e(left: float, jumps: bool) -> None:
    """Beside what the last weight that counts, 4e-6, may fall to."""
    assert math.isinf(nl.Formula(f"where(r <= 1, 1, {left})", width=3.0).steepness) == jumps


def test_a_jump_inside_is_as_deep_as_the_square_of_the_last_weight_that_counts() -> None:
    def steepness(low: float) -> float:
        return nl.Formula(f"where(r <= 1, 1, where(r <= 2, {low}, exp(-r)))", width=2.0).steepness

    least = 4e-6**2
    assert steepness(0.0) == pytest.approx(steepness(least), rel=1e-12)
    assert steepness(1e-10) == pytest.approx(steepness(0.0) * math.log(1e-10) / math.log(least), rel=1e-12)


def test_numbers_are_rounded_once() -> None:
    """Widths of any unit, whose squares no float holds, and what a formula multiplies, become one number."""
    unit = 2.0**-600
    assert rate(nl.Gaussian(2.0**600).weight(unit)) == -0.5 / math.log(2)
    form, numbers = structure(nl.Laplace(3.0).weight())
    assert form == "exp2(multiply(power:1/2(squared),c0))"
    assert numbers == [pytest.approx(-1 / (3 * math.log(2)), rel=1e-16)]
    same = [structure(nl.Formula(k).weight()) for k in ("exp(-0.5*r**2)", "exp(-r*r/2)", "exp(-square(r)*0.5)")]
    assert same == [structure(nl.Gaussian(1.0).weight())] * 3
    assert structure(nl.TopHat(2.0).weight())[0] == "where(le(squared,c0),c1,c2)"


@pytest.mark.parametrize("power", [-3, -0.75, 0.25, 0.5, 1.3, 7, 40])
def test_powers(power: float) -> None:
    x = np.geomspace(1e-3, 1e3, 20)
    np.testing.assert_allclose(value(SQUARED**power, x), x**power, rtol=1e-14)
    np.testing.assert_allclose(value((4 * SQUARED) ** power, x), (4 * x) ** power, rtol=1e-13)


def test_weights_have_no_logarithms_where_there_need_be_none() -> None:
    assert "log" not in "".join(structure(k.weight())[0] for k in KERNELS)
    assert str(weight(as_expression(-1.0) * SQUARED)).startswith("exp2")


def test_a_function_is_told_by_what_it_does() -> None:
    first, second = (repr(nl.Formula(lambda r, c=c: np.exp(-c * r), 0.3)) for c in (1, 2))
    assert first == "Formula(k=<log k: multiply(power:1/2(squared),-1.0)>, width=0.3, definite=False, amplitude=1.0)"
    assert "-2.0" in second


# ---- what is refused


@pytest.mark.parametrize(
    ("k", "message"),
    [
        ("exp(-r) - 0.5*r", "negative, or no number"),
        ("1/r", "infinite at the distance 0"),
        ("2*exp(-r)", "is 2 at r = 0, expected 1"),
        ("exp(-x)", "'x' is not known"),
        ("__import__('os').system('true')", "not known"),
        ("(lambda: 1)()", "not known"),
        ("exp(-r", "no expression"),
        ("+".join(["r"] * 20_000), "got 39999 characters, expected at most 10000"),
        ("exp(-9**9**9*r)", "overflows"),
        ("exp(-r, r)", "has 2 arguments"),
        ("exp(-r, base=2)", "not known"),
        ("log(-1)", "negative"),
        (3.0, "got float, expected text or a function"),
        (lambda r: math.exp(-r), "single numbers"),
        (lambda r: 1.0 if r < 1 else 0.0, "decides by `if`"),
        (lambda r: np.cos(r), "uses cos, which compiled sums do not have"),
        (lambda r: r.mean(), "failed on a symbol"),
        (lambda r: "one", "uses str"),
    ],
)
def test_formulas_that_are_refused(k: Any, message: str) -> None:
    with pytest.raises(nl.InputError, match=message):
        nl.Formula(k)


@dataclass(frozen=True)
class Cosine(RadialKernel):
    """A kernel of a formula that compiled sums do not have."""

    formula: ClassVar[str] = "(1 + cos r) / 2 for r < pi"

    def log_profile(self, squared: Any) -> Any:
        r = np.sqrt(squared)
        with np.errstate(divide="ignore"):
            return np.where(r < math.pi, np.log((1 + np.cos(np.minimum(r, math.pi))) / 2), -math.inf)


@dataclass(frozen=True)
class Wrong(RadialKernel):
    """k = 1 - r, which is negative beyond 1."""

    formula: ClassVar[str] = "1 - r"

    def log_profile(self, squared: Any) -> Any:
        return np.log(1 - np.sqrt(squared))


def test_a_comparison_with_a_multiple_that_is_infinite() -> None:
    k = nl.Formula("exp(-r)*where(r/(1-1) >= 1, 0.5, 1)")
    np.testing.assert_allclose(
        np.exp(k.log_matrix(np.zeros((1, 1)), np.array([[1.0], [2.0]]))), [[0.5 * math.exp(-1), 0.5 * math.exp(-2)]]
    )


def test_a_formula_that_is_not_compiled_becomes_a_matrix_and_says_so() -> None:
    x = np.random.default_rng(0).random((20, 2))
    p = nl.affinity(Cosine(), nl.Points(x))
    assert p.method == "dense"
    assert "uses cos" in p.reason
    with pytest.raises(nl.InputError, match="expected 'auto' or 'dense': kernel: its formula uses cos"):
        nl.affinity(Cosine(), nl.Points(x), method="pairwise")


def test_a_kernel_that_is_negative_is_refused() -> None:
    with pytest.raises(nl.InputError, match="negative, or no number, at the distance"):
        nl.affinity(Wrong(), nl.Points(np.arange(5.0)))


@dataclass(frozen=True)
class Growing(RadialKernel):
    """A kernel that overflows: weights are ratios, which do not."""

    formula: ClassVar[str] = "exp(480 r^2)"

    def log_profile(self, squared: Any) -> Any:
        return squared * 480


@pytest.mark.parametrize("kernel", [Growing(), nl.Formula("exp(480*r**2)")], ids=named)
def test_kernels_that_overflow_are_ratios_or_are_told(kernel: Any) -> None:
    import torch

    def ratios(squared: Any) -> Any:
        logs = 480 * squared
        weights = np.exp(logs - logs.max(axis=1, keepdims=True))
        return weights / weights.sum(axis=1, keepdims=True)

    x, u = np.random.default_rng(1).random((10, 1)) * 3, np.cos(np.arange(10.0))
    expected = ratios((x - x.T) ** 2) @ u
    assert near(nl.affinity(kernel, nl.Points(x)).average(u), expected)
    assert near(nl.affinity(kernel, nl.Points(x), torch.tensor(x)).average(torch.tensor(u)), expected)
    line = nl.Grid(10, spacing=0.25, boundary="isolated")
    dense = nl.affinity(kernel, line, method="dense")
    assert near(dense.average(u), ratios((line.nodes - line.nodes.T) ** 2) @ u)
    assert dense.log_degree.max() > 2000
    for method in ("stencil", "convolution"):
        with pytest.raises(nl.InputError, match=r"the sum inf \(log k is up to 2430\).*method='dense'"):
            nl.affinity(kernel, line, method=method)
    with pytest.raises(nl.InputError, match="overflows between neighbours"):
        nl.neighbour_graph(x, 9, kernel)


def test_kernels_that_grow_are_told_where_their_sums_overflow() -> None:
    import torch

    kernel, u = nl.Formula("(1+r)**4"), np.cos(np.arange(12.0))
    x = np.random.default_rng(0).random((12, 2))
    for size in (1e10, 1e80):
        dense = nl.affinity(kernel, nl.Points(size * x), method="dense").average(u)
        for method in ("pairwise", "sparse"):
            if size == 1e10:
                few = nl.affinity(kernel, nl.Points(size * x), (size * x).astype(np.float32), method=method)
                np.testing.assert_allclose(few.average(u.astype(np.float32)), dense, atol=1e-6)
                continue
            with pytest.raises(nl.InputError, match=r"row 0 has weights whose sum is.*method='dense'"):
                nl.affinity(kernel, nl.Points(size * x), method=method).average(u)
    with pytest.raises(nl.InputError, match="row 0 has logits that overflow"):
        nl.affinity(Growing(), nl.Points(1e160 * x), torch.tensor(1e160 * x))


def test_sums_on_grids_keep_the_digits_of_small_degrees() -> None:
    kernel, line = nl.Formula("exp(30*r)"), nl.Grid(10, spacing=0.25, boundary="isolated")
    p, u = nl.affinity(kernel, line, method="stencil"), np.cos(np.arange(10.0))
    assert near(p.average(u), nl.affinity(kernel, line, method="dense").average(u))
    np.testing.assert_allclose(p.average(u.astype(np.float32)), p.average(u), atol=1e-6)
    with pytest.raises(nl.InputError, match="which transforms would lose in rounding; use method='stencil'"):
        nl.affinity(kernel, line, method="convolution")
    slow = nl.affinity(nl.Formula("exp(3*r)"), line, method="convolution")
    wanted = nl.affinity(nl.Formula("exp(3*r)"), line, method="dense").average(u)
    np.testing.assert_allclose(slow.average(u), wanted, atol=1e-12)
    np.testing.assert_allclose(slow.average(u.astype(np.float32)), wanted, atol=1e-6)
    law = np.full(10, np.float32(0.1))
    for q in (p, slow):
        np.testing.assert_allclose(q.push(law), q.push(law.astype(np.float64)), atol=1e-6)


@dataclass(frozen=True)
class OneWay(Kernel):
    """A kernel that is not symmetric though it does not say so."""

    formula: ClassVar[str] = "exp(x - 2 y)"

    def log_matrix(self, x: Any, y: Any) -> Any:
        return x - 2 * y.T


def test_a_kernel_that_is_not_symmetric_has_to_say_so() -> None:
    x = np.linspace(0, 1, 9)[:, None]
    with pytest.raises(nl.InputError, match=r"OneWay has log k = .* though it says that it is symmetric"):
        nl.affinity(OneWay(), nl.Points(x), x)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nl.Matern(1.0, 1.0), "nu: got 1, expected one of 0.5"),
        (lambda: nl.Wendland(1.0, 3), "derivatives: got 3, expected one of 0, 2 or 4"),
        (lambda: nl.TruncatedPower(2.0, 1.0, 0.5), "horizon: got 0.5, expected more than the core"),
        (lambda: nl.RationalQuadratic(1.0, 0.0), "alpha: got 0"),
        (lambda: nl.Anisotropic(nl.Gaussian(1.0)), "got none, expected exactly one of widths"),
        (lambda: nl.Anisotropic(nl.Gaussian(1.0), (1, -1)), "widths: got"),
        (lambda: nl.Anisotropic(nl.Gaussian(1.0), matrix=np.ones((2, 2))), "matrix: got a singular one"),
        (lambda: nl.Anisotropic(nl.Gaussian(1.0), matrix=np.ones((2, 3))), "matrix: got shape"),
        (lambda: nl.Anisotropic(nl.Gaussian(1.0), covariance=[[1, 2], [2, 1]]), "not positive definite"),
        (lambda: nl.Anisotropic(nl.Gaussian(1.0), covariance=[[1, 2], [0, 1]]), "not symmetric"),
        (lambda: nl.Anisotropic(nl.ExpDotProduct(), (1, 1)), "expected a radial one"),  # type: ignore[arg-type]
    ],
)
def test_parameters_that_are_refused(make: Any, message: str) -> None:
    with pytest.raises(nl.InputError, match=message):
        make()


# ---- rules that need a proof, and what is compared with what is written


def near(x: Any, y: Any) -> bool:
    return bool(np.allclose(x, y, rtol=0, atol=1e-13))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "function"),
    [
        ("exp(-sqrt((r**2-r)**2))", lambda r: np.exp(-np.abs(r**2 - r))),
        ("exp(-((r*(1-r))**2)**1.5)", lambda r: np.exp(-(np.abs(r * (1 - r)) ** 3))),
        ("(1-r**2)**2*exp(-r**2)", lambda r: (1 - r**2) ** 2 * np.exp(-(r**2))),
        ("(1-r)*exp(-r)*(1-r)", lambda r: (1 - r) ** 2 * np.exp(-r)),
        ("(r<1)*(1-r)", lambda r: np.where(r < 1, 1 - r, 0)),
        ("sqrt((1-r)**2)*exp(-r)", lambda r: np.abs(1 - r) * np.exp(-r)),
        ("exp(1-sqrt((r-1)**2))", lambda r: np.exp(1 - np.abs(r - 1))),
        ("where(r<0.5, 1, log1p(r)/r)", lambda r: np.where(r < 0.5, 1, np.log1p(r) / np.where(r > 0, r, 1))),
        ("2/(1+exp(40*r))", lambda r: 2 / (1 + np.exp(40 * r))),
        ("exp(1000)*exp(-r-1000)", lambda r: np.exp(-r)),
        ("exp(-r)**0.001", lambda r: np.exp(-r / 1000)),
        ("(1+r**20)*exp(-r)", lambda r: (1 + r**20) * np.exp(-r)),
        ("r**r*exp(-r**2)", lambda r: r**r * np.exp(-(r**2))),
        ("exp(-" + "abs(" * 40 + "r-1" + ")" * 40 + ")*exp(1)", lambda r: np.exp(1 - np.abs(r - 1))),
    ],
    ids=named,
)
def test_formulas_have_the_values_of_what_is_written(text: str, function: Any) -> None:
    kernel = nl.Formula(text)
    r = np.array([0, 1e-9, 0.2, 0.5, 0.9, 1.1, 1.7, 3.0, 12.0])
    np.testing.assert_allclose(np.exp(kernel.log_profile(r**2)), function(r), rtol=1e-12)
    x = np.random.default_rng(5).random((40, 1)) * 3
    k, u = function(np.abs(x - x.T)), np.sin(3 * x[:, 0])
    assert near(nl.affinity(kernel, nl.Points(x), method="dense").average(u), k @ u / k.sum(axis=1))
    line = nl.Grid(20, spacing=0.1, boundary="isolated")
    k, u = function(np.abs(line.nodes - line.nodes.T)), np.sin(3 * line.nodes[:, 0])
    assert near(nl.affinity(kernel, line, method="stencil").average(u), k @ u / k.sum(axis=1))


@pytest.mark.parametrize(
    "text",
    ["exp(-sqrt((r**2-r)**2))", "(r<1)*(1-r)", "2/(1+exp(40*r))", "exp(-log1p(r)**2)", "1-log(1+minimum(r,1))"],
)
def test_compiled_formulas_are_those_of_the_matrix(text: str) -> None:
    x = np.random.default_rng(5).random((40, 1)) * 3
    u = np.sin(3 * x[:, 0])
    p = [nl.affinity(nl.Formula(text), nl.Points(x), method=method).average(u) for method in ("dense", "pairwise")]
    np.testing.assert_allclose(p[1], p[0], rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("k", "message"),
    [
        ("exp(-r) + 0*((((((2**64)**64)**64)**64)**64)**64)", "overflows"),
        ("exp(-r)*(0*" + "square(" * 40 + "3" + ")" * 40 + "+1)", "overflows"),
        ("exp(-r)*1" + "0" * 400, "a number that overflows"),
        ("exp(-r)*(1e308*1e308)", "expected 1"),
        ("exp(1000)*exp(-r)", "expected 1"),
        ("exp(-r)+exp(1e308)", "overflows"),
        ("exp(-r)+0*(1/0)", "not a number"),
        ("+".join(["exp(-r)"] * 300), "more than 150 operations"),
        ("exp(-" + "-" * 3000 + "r)", "no expression"),
        ("exp(-r)" + " " * 20_000 + "*1", "at most 10000"),
        ("where(r,1,0)", "compares nothing"),
        ("exp(-sqrt(r-1)**2)", "negative, or no number"),
        ("exp(-r/r)", "negative, or no number"),
        ("exp(-r)*1e17 - exp(-r)*(1e17-1) + exp(-r)*((1e17+r)-1e17-r)", "expected 1|loses its digits"),
        (lambda r: np.exp(-r) * 10**5000, "overflows"),
        (lambda r: np.exp(-r) / 0 ** (1 - 1.0) * (1 / 0), "ZeroDivisionError"),
    ],
    ids=named,
)
def test_numbers_and_depths_have_bounds(k: Any, message: str) -> None:
    with pytest.raises(nl.InputError, match=message):
        nl.Formula(k)


def test_a_formula_that_doubles_at_each_step_is_refused() -> None:
    def doubling(r: Any) -> Any:
        for _ in range(60):
            r = r * (1 + r)
        return np.exp(-r)

    with pytest.raises(nl.InputError, match="more than 2000 operations"):
        nl.Formula(doubling)


def test_values_are_negative_where_they_are_used_and_not_where_factors_are() -> None:
    """A dip too narrow for samples is refused by name where a distance meets it."""
    kernel = nl.Formula("exp(-r) - where(abs(r-0.1234)<1e-9, 2, 0)")
    with pytest.raises(nl.InputError, match=r"negative, or no number, at the distance 0\.1234"):
        nl.affinity(kernel, nl.Points([0.0, 0.1234]), method="dense").average(np.ones(2))


def test_what_overflows_is_not_called_negative() -> None:
    kernel = nl.Formula("abs(where(r<1, 1, exp(r)) - 0.5) * exp(-r) / 0.5")
    assert kernel.log_profile(np.array([1e20]))[0] == pytest.approx(np.log(2), rel=1e-12)  # with more digits
    with pytest.raises(nl.InputError, match=r"no number in floats at the distance 1e\+18.*no part of it overflows"):
        kernel.log_profile(np.array([1e36]))


@pytest.mark.parametrize("width", [1.0, 1e-160, 1e-310])
def test_squares_that_overflow_have_a_limit_or_are_told(width: float) -> None:
    squared = np.array([0.0, 1.0, 1e300, math.inf])
    far = dict(zip((1.0, 1e-160, 1e-310), ([-0.36651292, -339.543096], [-math.inf] * 2, [-math.inf] * 2), strict=True))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        falls = nl.Formula("where(r>0, log1p(r)/r, 1)", width).log_profile(squared)
        np.testing.assert_allclose(falls, [0, *far[width], -math.inf], rtol=1e-8)
        levels = nl.Formula("1/(1+r/(1+r))", width).log_profile(squared[1:])
        np.testing.assert_allclose(levels, [-math.log(1.5 if width == 1 else 2), *[-math.log(2)] * 2], rtol=1e-12)
        with pytest.raises(nl.InputError, match="not told at distances over the width whose squares overflow"):
            nl.Formula("(1+r)**3", width).log_profile(squared)
    assert nl.TruncatedPower(2.5, 1e-160, 1.0).log_profile(np.zeros(1)) == 0


def test_rewriting_needs_proofs() -> None:
    r = SQUARED**0.5
    a, b = r - 1, r + 1
    assert str(simplified((a**2) ** 0.5)) == "abs(add(power:1/2(squared),-1.0))"
    assert str(simplified((b**2) ** 0.5)) == "add(power:1/2(squared),1.0)"
    assert str(simplified((a**0.5) ** 2)).startswith("power:2(power:1/2")
    assert simplified(r / r).operation == "multiply"
    assert simplified(b / b).is_number
    assert simplified(0 * (1 / r)).operation == "multiply"
    assert simplified(0 * np.exp(a)).is_number
    assert "log(add" in str(logarithm(simplified(a * b)))
    assert logarithm(simplified(b * np.exp(a))).operation == "add"


@pytest.mark.parametrize(
    ("text", "log"),
    [
        ("1-r/(1+r)", lambda r: -np.log1p(r)),
        ("(2-2*r/(1+r))**3/8", lambda r: -3 * np.log1p(r)),
        ("1-r**2/(1+r**2)", lambda r: -np.log1p(r**2)),
        ("sqrt(1+r**2)-r", lambda r: -np.arcsinh(r)),
        ("1-r/sqrt(1+r**2)", lambda r: -np.arcsinh(r) - 0.5 * np.log1p(r**2)),
        ("1-(1-exp(-r**2))", lambda r: -(r**2)),
        ("exp(-r)*(1+r-r)", lambda r: -r),
    ],
    ids=named,
)
def test_differences_that_cancel_far_out_have_another_form(text: str, log: Any) -> None:
    r = np.array([0, 1e-9, 0.3, 1.0, 40.0, 1e9, 1e18])
    found = nl.Formula(text).log_profile(r**2)
    assert np.all(np.abs(found - log(r)) <= 1e-13 * (1 + np.abs(log(r))))


def test_differences_are_kept_where_nothing_is_proved() -> None:
    r = SQUARED**0.5
    a, b = (r - 1) ** 0.5, 1 / (r - 1)
    for one in (1 - a / (1 + a), 1 - b / (1 + b), r - (r + 1) / (r - 1), 1 - r / r, r - (1 + r**2) ** 0.3):
        assert simplified(one).operation == "add"
    with pytest.raises(nl.InputError, match="loses its digits in floats"):
        nl.Formula("1-(r/(1+r))**2")  # weights far out are all that graphs without loops have


@pytest.mark.slow
def test_random_formulas_are_those_of_python() -> None:
    """A few; ``python -m validation.robustness.formulas`` has 2000."""
    chance = random.Random(3)
    for _ in range(6):
        end, wrong = judged(formula(chance), compiled=False)
        assert not wrong, end


def test_values_that_formulas_are_compared_with() -> None:
    assert formulas.exact("exp(-exp(exp(r)))", 1e9) == 0  # in a moment: mpmath's exp would never end
    assert formulas.exact("exp(exp(r))", 1e9) != formulas.exact("exp(exp(r))", 1e9)  # not told
    assert formulas.exact("exp(-abs((1-r)**-1))", 1.0) == 0
    assert formulas.exact("sqrt(r-2)", 1.0) is None
    assert formulas.exact("1/r", 0.0) is None


@pytest.mark.parametrize(
    ("k", "kind"), [("exp(-r)", formulas.STRICT), ("1-r/sqrt(1+r**2)", formulas.LOST), ("1-r", formulas.REFUSED)]
)
def test_refusals_without_need_are_told_apart(k: str, kind: str) -> None:
    assert formulas._refused("it loses its digits", formulas.Exact(k)) == kind


def test_a_formula_is_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    first = nl.Formula("exp(-r**1.25)", 0.5)
    monkeypatch.setattr(written, "values", None)
    assert nl.Formula("exp( -r**1.25 )", 0.25, definite=True)._log is first._log
    assert nl.Formula(lambda r: np.exp(-(r**1.25)))._log is first._log
    with pytest.raises(TypeError):
        nl.Formula("exp(-r**1.26)")


def test_powers_and_logarithms_in_digits_take_short_ways() -> None:
    points = [0.0, 1e-300, 0.3, 2.0, 1e300]
    for power in (1.5, 0.75, -0.25, -1.5):
        by_roots = written.values(SQUARED**power, points)
        context = written._EXACT.copy()
        by_logarithms = [context.power(Decimal(s), Decimal(power)) for s in points]
        for a, b in zip(by_roots, by_logarithms, strict=True):
            assert a == b or abs(a - b) < Decimal("1e-45") * b
    for text in ("1e-30", "0.4", "0.99999999999999999999", "1", "1.7", "1e200", "1e-100000", "0"):
        k = Decimal(text)
        assert written.logarithm(k) == pytest.approx(float(written._ROUNDED.ln(k)), rel=1e-15, abs=0)
    nothing, none = written.values((-SQUARED) ** 1.5, [0.0, 1.0])
    assert str(nothing) == "0"  # not -0, whose inverse is -infinity
    assert str(none) == "NaN"


# ---- anisotropic kernels


@pytest.mark.parametrize("base", [nl.Gaussian(1.0, amplitude=2.0), nl.Matern(1.0, 1.5), nl.TopHat(1.0)], ids=named)
@pytest.mark.parametrize("boundary", ["isolated", "periodic"])
@pytest.mark.sampled(2)
def test_anisotropic_kernels_on_grids_and_points(base: Any, boundary: Any) -> None:
    matrix = np.array([[4.0, 1.0], [-0.5, 6.0]])
    kernel = nl.Anisotropic(base, matrix=matrix, amplitude=3.0)
    grid = nl.Grid((10, 8), spacing=(0.1, 0.125), boundary=boundary)
    u = np.random.default_rng(0).normal(size=(10, 8))
    x = grid.nodes
    k = np.zeros((80, 80))
    for i in range(-30, 31) if boundary == "periodic" else (0,):
        for j in range(-30, 31) if boundary == "periodic" else (0,):
            offsets = (x[:, None] - x[None] + [i, j]) @ matrix.T
            k += np.exp(base.log_profile((offsets**2).sum(axis=-1)))
    degree = 3 * base.amplitude * k.sum(axis=1) * 0.0125
    for method in ("stencil", "convolution", "dense"):
        p = nl.affinity(kernel, grid, method=method)
        np.testing.assert_allclose(p.average(u).ravel(), k @ u.ravel() / k.sum(axis=1), rtol=0, atol=1e-12)
        np.testing.assert_allclose(p.degree.ravel(), degree, rtol=1e-12)
    if boundary == "isolated":
        for method in ("dense", "pairwise"):
            p = nl.affinity(kernel, nl.Points(x, np.full(80, 0.0125)), method=method)
            np.testing.assert_allclose(p.average(u.ravel()), k @ u.ravel() / k.sum(axis=1), rtol=0, atol=1e-12)
            np.testing.assert_allclose(p.degree, degree, rtol=1e-12)


def test_widths_covariance_and_matrix_say_the_same() -> None:
    x = np.random.default_rng(0).random((30, 2))
    given: list[dict[str, Any]] = [
        {"widths": (0.2, 0.5)}, {"matrix": np.diag([5.0, 2.0])}, {"covariance": np.diag([0.04, 0.25])}
    ]  # fmt: skip
    averages = [nl.affinity(nl.Anisotropic(nl.Gaussian(1.0), **g), nl.Points(x)).average(x) for g in given]
    for average in averages[1:]:
        np.testing.assert_allclose(average, averages[0], rtol=0, atol=1e-14)


def test_anisotropic_kernels_of_features_evolve() -> None:
    x = np.random.default_rng(0).random((25, 2))
    kernel = nl.Anisotropic(nl.Gaussian(1.0), widths=(0.3, 0.6))
    flow = nl.GradientFlow(nl.J(nl.affinity(kernel, nl.Points(x), x)), metric="degree", evolving=True)
    end = nl.solve(flow, x, t=0.3, integrator=nl.RungeKutta(rtol=1e-8, atol=1e-8)).final
    scaled = x / [0.3, 0.6]
    plain = nl.GradientFlow(nl.J(nl.affinity(nl.Gaussian(1.0), nl.Points(x), scaled)), metric="degree", evolving=True)
    other = nl.solve(plain, scaled, t=0.3, integrator=nl.RungeKutta(rtol=1e-8, atol=1e-8)).final
    np.testing.assert_allclose(end, other * [0.3, 0.6], rtol=0, atol=1e-6)


def test_a_map_that_is_not_diagonal_has_no_mirror_images() -> None:
    kernel = nl.Anisotropic(nl.Gaussian(1.0), matrix=[[4.0, 1.0], [0.0, 4.0]])
    with pytest.raises(nl.InputError, match="expected widths along the axes for the boundary 'reflect'"):
        nl.affinity(kernel, nl.Grid((6, 6), boundary="reflect"))
    with pytest.raises(nl.InputError, match="got a map of 2 coordinates, expected 3"):
        nl.affinity(kernel, nl.Points(np.zeros((4, 3))))


# ---- names


def test_studies_know_all_kernels_by_name() -> None:
    from nlflow.studies.options import kernel_label, parse_kernel

    for text in ("matern:width=0.1,nu=2.5", "wendland:radius=0.3,derivatives=4", "rational-quadratic:width=0.2"):
        kernel = parse_kernel(text)
        assert parse_kernel(kernel_label(kernel)) == kernel
    with pytest.raises(nl.InputError, match="expected one of gaussian, laplace, tophat, matern"):
        parse_kernel("box:width=1")
    assert all(issubclass(kind, nl.kernels.Kernel) for kind in NAMED.values())


def test_the_order_on_grids_follows_from_the_smoothness() -> None:
    study = nl.run_study("space-order", kernel=[nl.Matern(0.08, 1.5)], dimension=1, boundary="periodic")
    (fit,) = study.fits
    assert fit.expected == 4
    assert fit.passed
