"""Equilibria of flows with reactions: against SciPy and dense matrices; neutral directions; what is refused."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.optimize import root

import nlflow as nl
from nlflow.equilibria import equations as equations_module
from nlflow.equilibria import find_equilibria, find_equilibrium, stability, tangents
from nlflow.equilibria.equations import Equations
from nlflow.flows.flow import Flow
from nlflow.flows.spectrum import dense_operator, relaxation_rate

Floats = NDArray[np.float64]


class Cubic:
    """A flow by a matrix of random weights with s (u - u^3) + g, and du/dt written out."""

    def __init__(self, metric: str, symmetric: bool = True, n: int = 24, strength: float = 0.4) -> None:
        rng = np.random.default_rng(3)
        self.w = rng.uniform(0.3, 2.0, n) / n
        k = rng.random((n, n)) ** 3
        g = 0.05 * rng.standard_normal(n)
        points = nl.Points(np.zeros(n), weights=self.w)
        self.s = strength
        reaction = nl.AllenCahn(strength, interval=(-3.0, 3.0))
        if symmetric:
            both = (k + k.T) * self.w
            self.flow: Any = nl.GradientFlow(nl.J(nl.from_matrix(k, points)), metric, reaction=reaction, source=g)
        else:
            both = k * self.w
            self.flow = nl.AttentionFlow(nl.from_matrix(k, points), reaction=reaction, source=g)
        degree = both.sum(axis=1)
        self.linear = both - np.diag(degree)
        if metric == "degree":
            self.linear = self.linear / degree[:, None]
        self.g = g

    def velocity(self, u: Floats) -> Floats:
        return self.linear @ u + self.s * (u - u**3) + self.g

    def jacobian(self, u: Floats) -> Floats:
        return self.linear + np.diag(self.s * (1 - 3 * u**2))


KINDS = (("l2", True), ("degree", True), ("degree", False))


@pytest.mark.parametrize(("metric", "symmetric"), KINDS)
def test_equilibria_are_those_of_scipy_and_eigenvalues_those_of_the_matrix(metric: str, symmetric: bool) -> None:
    p = Cubic(metric, symmetric)
    start = np.sign(np.random.default_rng(0).standard_normal(24))
    expected = root(p.velocity, start, jac=p.jacobian, tol=1e-13)
    found = find_equilibrium(p.flow, start)
    assert expected.success
    assert found.success, found.message
    assert np.abs(p.velocity(found.u)).max() < 1e-9
    assert np.abs(found.u - root(p.velocity, found.u, jac=p.jacobian, tol=1e-13).x).max() < 1e-8
    values = np.linalg.eigvals(p.jacobian(found.u))
    values = values[np.lexsort((values.imag < 0, -values.real))]
    told = stability(p.flow, found.u, 6)
    assert told.symmetric == symmetric
    assert np.abs(told.eigenvalues - values[:6]).max() < 1e-12
    assert told.unstable == np.count_nonzero(values.real > 0)
    assert told.verdict == ("stable" if values.real.max() < 0 else "unstable")
    assert told.margin == pytest.approx(-values.real.max(), abs=1e-12)
    for value, vector in zip(told.eigenvalues, told.vectors, strict=True):
        assert np.abs(p.jacobian(found.u) @ vector - value * vector).max() < 1e-11


@pytest.mark.parametrize(("metric", "symmetric"), KINDS)
def test_iterations_find_what_matrices_do(metric: str, symmetric: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    p = Cubic(metric, symmetric)
    start = np.random.default_rng(1).uniform(-1, 1, 24)
    dense = find_equilibrium(p.flow, start), stability(p.flow, find_equilibrium(p.flow, start).u, 4)
    monkeypatch.setattr(equations_module, "DENSE", 4)
    monkeypatch.setattr(tangents, "DENSE", 4)
    monkeypatch.setattr("nlflow.equilibria.eigenvalues.DENSE", 4)
    krylov = find_equilibrium(p.flow, start), stability(p.flow, dense[0].u, 4)
    assert krylov[0].success
    assert np.abs(krylov[0].u - dense[0].u).max() < 1e-8
    assert np.abs(krylov[1].eigenvalues.real - dense[1].eigenvalues.real).max() < 1e-9
    assert krylov[1].verdict == dense[1].verdict


@pytest.mark.parametrize("boundary", ["periodic", "reflect"])
@pytest.mark.slow
def test_transforms_precondition(boundary: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reaction that is weak beside the averages: their transform undoes most of the Jacobian."""
    x, y = np.indices((12, 10))
    grid = nl.Grid((12, 10), boundary=boundary)
    flow = nl.GradientFlow(nl.J(nl.affinity(nl.Gaussian(1.0), grid)), reaction=nl.AllenCahn(0.3))
    start = np.where(x < 6, 0.85, -0.85) + 0.1 * np.cos(y)
    dense = find_equilibrium(flow, start, rtol=1e-12)
    monkeypatch.setattr(equations_module, "DENSE", 4)
    monkeypatch.setattr(tangents, "DENSE", 4)
    products: list[int] = []
    times = Equations.times
    monkeypatch.setattr(Equations, "times", lambda *given: products.append(1) or times(*given))
    krylov = find_equilibrium(flow, start, rtol=1e-12)
    with_transform = len(products)
    monkeypatch.setattr(tangents, "modes_of", lambda flow, like: None)
    assert find_equilibrium(flow, start, rtol=1e-12).success
    assert dense.success
    assert krylov.success
    assert np.abs(dense.u - krylov.u).max() < 1e-8
    assert with_transform < 0.75 * (len(products) - with_transform)


def test_the_preconditioner_is_the_inverse_of_the_shifted_operator() -> None:
    flow = nl.GradientFlow(nl.J(nl.affinity(nl.Gaussian(1.0), nl.Grid((12, 10)))), reaction=nl.AllenCahn(3.0))
    u, v = np.random.default_rng(0).uniform(-1, 1, (2, 12, 10))
    tangent = tangents.Tangent(Equations(flow, "u", u), u.ravel(), shift=0.7)
    lifted = (0.7 + flow.terms.bound) * v - nl.GradientFlow(flow.functional).velocity(v)  # (A + s) v
    assert tangent._preconditioner()(lifted.ravel()) == pytest.approx(-v.ravel(), abs=1e-13)


def test_the_matrix_of_the_jacobian_is_that_of_products() -> None:
    p = Cubic("l2")
    u = np.random.default_rng(5).uniform(-1, 1, 24)
    assert np.abs(Equations(p.flow, "u", u).matrix(u) - p.jacobian(u)).max() < 1e-12
    mixed = nl.Reaction(
        lambda u: np.stack([u[..., 1] ** 2, -u[..., 0] * u[..., 1]], -1), (-2, 2), components=2, bound=9.0
    )
    flow = nl.GradientFlow(nl.J(nl.affinity(nl.Gaussian(1.0), nl.Grid(6))), "degree", reaction=mixed)
    v = np.random.default_rng(5).uniform(-1, 1, (6, 2))
    equations = Equations(flow, "u", v)
    x = v.ravel()
    products = np.stack([equations.times(x, e) for e in np.eye(12)], axis=1)
    assert np.abs(equations.matrix(x) - products).max() < 1e-9
    weights = nl.affinity(nl.Gaussian(1.0), nl.Grid(6))
    for diffusivity in ([1.0, 0.2], [[1.0, 0.3], [0.2, 1.0]]):
        system = Equations(nl.SystemFlow(nl.J(weights), diffusivity, reaction=mixed), "u", v)
        products = np.stack([system.times(x, e) for e in np.eye(12)], axis=1)
        assert np.abs(system.matrix(x) - products).max() < 1e-9


def test_measures_of_channels_sum_up_by_themselves() -> None:
    """Kernels of one object and of two that are alike make the same equations."""
    weights, u = nl.affinity(nl.Gaussian(1.0), nl.Grid(9)), np.random.default_rng(0).standard_normal((9, 2))
    one, two = (
        Equations(nl.SystemFlow(functionals, [1.0, 0.3]), "u", u)
        for functionals in (nl.J(weights), [nl.J(weights), nl.J(weights)])
    )
    np.testing.assert_allclose(one.weights, two.weights, rtol=1e-14)
    assert one.norm(one.start) == pytest.approx(one.flow.norm(u), rel=1e-14)


@pytest.mark.parametrize("shape", [(3, 7), (3, 7, 2)], ids=["one channel", "two"])
def test_each_item_of_a_batch_keeps_its_mean(shape: tuple[int, ...]) -> None:
    keys, u = np.random.default_rng(1).standard_normal((3, 7, 2)), np.random.default_rng(2).standard_normal(shape)
    flow = nl.AttentionFlow(nl.affinity(nl.ExpDotProduct(), nl.Batch(nl.Points(np.arange(7.0)), 3), keys))
    found = find_equilibrium(flow, u)
    assert found.success
    np.testing.assert_allclose(found.u, flow.mean(u) + 0 * u, rtol=0, atol=1e-9)
    told = stability(flow, found.u)
    assert (told.verdict, told.neutral) == ("stable", 3 * (shape[2] if len(shape) > 2 else 1))


def test_stability_where_the_measure_of_nodes_underflows() -> None:
    """Logits of thousands leave almost all of the law at one node; eigenvalues are those of the matrix all the same."""
    rng = np.random.default_rng(0)
    keys, f = 40 * rng.standard_normal((9, 3)), rng.standard_normal(9)
    flow = nl.AttentionFlow(nl.affinity(nl.ExpDotProduct(), nl.Points(np.arange(9.0)), keys), f, 0.3)
    assert float(flow.measure(f).min()) == 0
    told = stability(flow, nl.equilibrium(flow).u, k=9)
    expected = np.sort(np.linalg.eigvals(dense_operator(flow)).real)
    assert told.verdict == "stable"
    np.testing.assert_allclose(-told.eigenvalues.real, expected, rtol=0, atol=1e-9)


def test_one_large_degree_is_no_neutral_direction() -> None:
    n = 200
    star = np.zeros((n, n))
    star[0, 1:] = star[1:, 0] = 1
    flow = nl.GradientFlow(nl.J(nl.from_matrix(star, nl.Points(np.arange(n)[:, None]))), "l2")
    values = stability(flow, np.zeros(n), k=n - 1).eigenvalues
    # The Laplacian of a star has 0, 1 and n.
    np.testing.assert_allclose(values, -2 * np.r_[np.ones(n - 2), n] / n, rtol=1e-10)


def test_a_search_that_newton_does_not_end_follows_the_flow() -> None:
    # From 1/sqrt(3) the slope of u - u^3 is 0: Newton's first step goes nowhere.
    flow = nl.GradientFlow(nl.J(nl.affinity(nl.Gaussian(9.0), nl.Grid(5))), "degree", reaction=nl.AllenCahn(0.5))
    start = np.full(5, 3**-0.5)
    found = find_equilibrium(flow, start)
    assert (found.success and np.abs(np.abs(found.u).max() - 1) < 1e-9) or np.abs(found.u).max() < 1e-9
    transient = find_equilibrium(flow, start, method="transient")
    assert transient.success
    assert transient.method == "transient"
    assert np.abs(transient.u - 1).max() < 1e-8  # where the flow itself goes
    short = find_equilibrium(flow, start, method="transient", maxiter=1)
    assert not short.success
    assert "maxiter" in short.message


def test_what_is_conserved_stays() -> None:
    flow = nl.GradientFlow(nl.J(nl.affinity(nl.Gaussian(2.0), nl.Grid(20))))
    start = np.random.default_rng(0).standard_normal((20, 2)) * [1.0, 5.0]
    found = find_equilibrium(flow, start)
    assert found.success
    assert "2 conserved means" in found.message
    assert np.abs(found.u - flow.mean(start)).max() < 1e-10
    told = stability(flow, found.u)
    assert (told.verdict, told.neutral) == ("stable", 2)
    assert told.margin == pytest.approx(relaxation_rate(flow), rel=1e-9)


def apart(n: int = 5, m: int = 4) -> Floats:
    """Symmetric weights of two connected components."""
    k = np.zeros((n + m, n + m))
    k[:n, :n], k[n:, n:] = np.random.default_rng(8).random((n, n)), np.random.default_rng(9).random((m, m))
    return k + k.T


@pytest.mark.parametrize("channels", [(), (2,)])
@pytest.mark.parametrize("metric", ["l2", "degree"])
def test_each_connected_component_keeps_its_mean(metric: str, channels: tuple[int, ...]) -> None:
    points = nl.Points(np.arange(9.0), weights=np.random.default_rng(5).uniform(0.5, 2, 9))
    functional = nl.J(nl.from_matrix(apart(), points))
    flow = nl.GradientFlow(functional, metric)
    start = np.random.default_rng(0).standard_normal((9, *channels))
    found, count = find_equilibrium(flow, start), math.prod(channels)
    assert found.success
    m = np.asarray(flow.measure(start)).reshape(9, -1)[:, 0]
    for part in (slice(0, 5), slice(5, 9)):
        mean = np.tensordot(m[part], start[part], axes=1) / m[part].sum()
        np.testing.assert_allclose(found.u[part], np.broadcast_to(mean, found.u[part].shape), rtol=0, atol=1e-12)
    told = stability(flow, found.u, k=99)
    assert (told.verdict, told.neutral, told.unstable) == ("stable", 2 * count, 0)
    expected = np.sort(np.linalg.eigvals(dense_operator(flow)).real)[2:]
    np.testing.assert_allclose(np.sort(-told.eigenvalues.real)[::count], expected, rtol=1e-9)
    # With a fidelity on the first, or values that it takes, the mean of the second is left.
    pulled = nl.E(functional.affinity, start, np.where(np.arange(9) < 5, 0.3, 0.0))
    held = nl.GradientFlow(functional, metric, constraint=nl.Constraint([1], np.zeros((1, *channels))))
    for other in (nl.GradientFlow(pulled, metric), held):
        told = stability(other, find_equilibrium(other, start).u)
        assert (told.verdict, told.neutral, told.unstable) == ("stable", count, 0)


def test_components_beyond_those_of_a_matrix_keep_their_means() -> None:
    n = equations_module.DENSE + 100
    k = apart(n // 2 - 1, n - n // 2 - 1)
    lone = np.zeros((n, n))
    lone[: n - 2, : n - 2], lone[n - 2, n - 2], lone[n - 1, n - 1] = k, 1.0, 2.0
    flow = nl.GradientFlow(nl.J(nl.from_matrix(lone, nl.Points(np.arange(float(n))))), "degree")
    start = np.random.default_rng(0).standard_normal(n)
    found = find_equilibrium(flow, start)
    assert found.success
    np.testing.assert_allclose(found.u[-2:], start[-2:], rtol=1e-14)
    told = stability(flow, found.u, k=3)
    assert (told.verdict, told.neutral, told.unstable) == ("stable", 4, 0)
    expected = np.sort(np.linalg.eigvals(dense_operator(flow)).real)[4:7]
    np.testing.assert_allclose(-told.eigenvalues.real, expected, rtol=1e-9)


def test_what_channels_conserve_on_other_components_counts_once() -> None:
    points = nl.Points(np.arange(9.0))
    one, two = (nl.J(nl.from_matrix(k, points)) for k in (apart(), apart() + 0.1))
    for functionals in ([one, two], [two, one]):
        flow = nl.SystemFlow(functionals, np.eye(2))
        told = stability(flow, np.ones((9, 2)))
        assert (told.verdict, told.neutral, told.unstable) == ("stable", 3, 0)


@pytest.mark.parametrize("transient", [False, True])
@pytest.mark.parametrize("n", [9, 700])
def test_attention_keeps_the_mean_in_its_stationary_law(n: int, transient: bool) -> None:
    rng = np.random.default_rng(2)
    k, start = rng.random((n, n)) ** 3, rng.standard_normal(n)
    if transient:
        k[n // 3 :, : n // 3] = 0
    flow = nl.AttentionFlow(nl.from_matrix(k, nl.Points(np.arange(float(n)))))
    moves = k / k.sum(axis=1, keepdims=True)
    law = np.linalg.lstsq(np.vstack([np.eye(n) - moves.T, np.ones(n)]), np.r_[np.zeros(n), 1], rcond=None)[0]
    found = find_equilibrium(flow, start)
    assert found.success
    assert "1 conserved mean" in found.message
    np.testing.assert_allclose(found.u, law @ start, rtol=0, atol=1e-9)
    told = stability(flow, found.u, k=2)
    assert (told.verdict, told.neutral, told.unstable) == ("stable", 1, 0)
    values = np.sort(np.linalg.eigvals(moves).real)[::-1] - 1
    assert told.margin == pytest.approx(-values[1], rel=1e-8)
    pulled = nl.AttentionFlow(flow.affinity, start, 0.3)
    assert stability(pulled, nl.equilibrium(pulled).u, k=2).neutral == 0


def test_attention_keeps_a_mean_of_each_component() -> None:
    k = apart() * np.random.default_rng(3).random((9, 9))
    told = stability(nl.AttentionFlow(nl.from_matrix(k, nl.Points(np.arange(9.0)))), np.ones(9), k=9)
    assert (told.verdict, told.neutral, told.unstable) == ("stable", 2, 0)
    values = np.sort(np.linalg.eigvals(k / k.sum(axis=1, keepdims=True)).real)[::-1] - 1
    np.testing.assert_allclose(np.sort(told.eigenvalues.real)[::-1], values[2:], rtol=1e-9)


def test_an_eigenvalue_within_its_error_is_not_unstable() -> None:
    k = np.diag([0.0] * 9)
    k[:3, :3], k[3:6, 3:6], k[6:] = 1.0, 2.0, 0.5  # two closed classes, of which one direction is known at most
    told = stability(nl.AttentionFlow(nl.from_matrix(k, nl.Points(np.arange(9.0)))), np.ones(9))
    assert (told.verdict, told.unstable) == ("cannot tell", 0)


@pytest.mark.parametrize("closed", [0, 1, 2])
def test_classes_that_walkers_do_not_leave_are_not_overlooked_by_iteration(closed: int) -> None:
    n, rng = 700, np.random.default_rng(1)
    k = np.where(rng.random((n, n)) < 6e-3, rng.random((n, n)), 0.0) + np.eye(n)
    k[:closed] = np.eye(n)[:closed]
    zeros = np.count_nonzero(np.abs(np.linalg.eigvals(k / k.sum(axis=1, keepdims=True)) - 1) < 1e-9)
    assert zeros > 1 + closed
    told = stability(nl.AttentionFlow(nl.from_matrix(k, nl.Points(np.arange(float(n))))), np.ones(n), k=4)
    assert (told.verdict, told.unstable) == ("cannot tell", 0)
    assert abs(told.eigenvalues[0]) <= told.error


def test_a_pattern_on_a_circle_is_told_up_to_translation() -> None:
    grid = nl.Grid(256, spacing=1 / 256, boundary="periodic")
    flow = nl.GradientFlow(nl.J(nl.affinity(nl.Gaussian(0.2), grid)), "degree", reaction=nl.AllenCahn(0.6))
    found = find_equilibrium(flow, 0.3 * np.cos(2 * np.pi * grid.nodes[:, 0] - 0.3))
    assert found.success
    assert "1 translation" in found.message
    told = stability(flow, found.u)
    assert told.neutral == 1
    assert told.verdict == "unstable"
    equations = Equations(flow, "u", found.u)
    values = np.sort(np.linalg.eigvals(equations.matrix(equations.start)).real)[::-1]
    inside = np.abs(values) > 1e-6 * np.abs(values).max()
    assert np.count_nonzero(~inside) == 1
    assert np.abs(told.eigenvalues[:4].real - values[inside][:4]).max() < 1e-9


@pytest.mark.parametrize("dense", [600, 4])
def test_eigenvectors_beside_a_translation_are_those_of_the_jacobian(
    dense: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    grid = nl.Grid(64, spacing=1 / 64, boundary="periodic")
    flow = nl.GradientFlow(nl.J(nl.affinity(nl.Gaussian(0.2), grid)), "conserved", reaction=nl.AllenCahn(0.65))
    found = find_equilibrium(flow, 0.3 * np.cos(2 * np.pi * grid.nodes[:, 0] - 0.3) + 0.02)
    equations = Equations(flow, "u", found.u)
    matrix = equations.matrix(equations.start)
    monkeypatch.setattr(equations_module, "DENSE", dense)
    monkeypatch.setattr("nlflow.equilibria.eigenvalues.DENSE", dense)
    told = stability(flow, found.u, 5)
    assert (told.neutral, told.symmetric) == (2, False)
    for value, vector, residual in zip(told.eigenvalues, told.vectors, told.residuals, strict=True):
        assert np.sqrt(np.mean(np.abs(vector) ** 2)) == pytest.approx(1, abs=1e-12)
        off = np.sqrt(np.mean(np.abs(matrix @ vector - value * vector) ** 2))
        assert off < 1e-9
        assert abs(off - residual) < 1e-12


def test_deflation_finds_the_others() -> None:
    flow = nl.GradientFlow(nl.J(nl.affinity(nl.Gaussian(0.5), nl.Grid(4))), "degree", reaction=nl.AllenCahn(0.9))
    found = find_equilibria(flow, [np.array([0.9, -0.7, 0.8, 0.6]), 0.2 * np.ones(4)], most=9)
    signals = np.array([one.u for one in found])
    assert all(one.success for one in found)
    assert len(found) == 9
    gaps = np.abs(signals[:, None] - signals).max(axis=2) + np.eye(len(found))
    assert gaps.min() > 1e-4
    for one in found:
        assert np.abs(flow.velocity(one.u)).max() < 1e-9


def test_float32_stays_what_it_is() -> None:
    flow = nl.GradientFlow(nl.J(nl.affinity(nl.Gaussian(1.0), nl.Grid(32))), "degree", reaction=nl.AllenCahn(0.5))
    start = np.tanh(np.arange(32, dtype=np.float32) - 15.5)
    found = find_equilibrium(flow, start)
    assert found.success
    assert found.u.dtype == np.float32
    double = find_equilibrium(flow, start.astype(np.float64))
    assert np.abs(found.u - double.u).max() < 1e-3
    assert stability(flow, found.u).verdict == stability(flow, double.u).verdict


def test_values_that_are_held_stay() -> None:
    held = nl.Constraint([0, 31], [-1.0, 1.0])
    flow = (
        nl.GradientFlow(nl.J(nl.affinity(nl.Gaussian(1.0), nl.Grid(32))), "degree", reaction=nl.AllenCahn(0.3)) + held
    )
    found = find_equilibrium(flow, np.zeros(32))
    assert found.success
    assert (found.u[0], found.u[31]) == (-1.0, 1.0)
    assert np.abs(flow.velocity(found.u)).max() < 1e-9
    told = stability(flow, found.u)
    equations = Equations(flow, "u", found.u)
    assert len(equations) == 30
    assert np.all(told.vectors[:, [0, 31]] == 0)


def test_kernels_that_follow_the_signal() -> None:
    x = np.random.default_rng(0).standard_normal((8, 2))
    flow = nl.AttentionFlow(nl.affinity(nl.Gaussian(2.0), nl.Points(x), features=x), evolving=True)
    found = find_equilibrium(flow, 0.1 * x, method="transient", maxiter=300)
    assert found.success
    assert "differences" in found.message
    assert np.ptp(found.u, axis=0).max() < 1e-6


def refuse(message: str, flow: Any, start: Any) -> None:
    for function in (find_equilibrium, find_equilibria, stability):
        with pytest.raises(nl.InputError, match=re.escape(message)):
            function(flow, start)


def test_refusals() -> None:
    p = Cubic("degree")
    refuse("flow: got int, expected a flow", 3, np.zeros(24))
    refuse("NaN", p.flow, np.full(24, np.nan))
    refuse("shape", p.flow, np.zeros(23))
    timed = nl.GradientFlow(nl.J(p.flow.affinity), source=lambda t: t * np.ones(24))
    refuse("depends on time", timed, np.zeros(24))
    refuse("expected one without noise", p.flow + nl.flows.Noise(strength=0.1), np.zeros(24))
    x = nl.on_sphere(np.random.default_rng(0).standard_normal((4, 3)))
    refuse("SphereFlow", nl.SphereFlow(x), x)
    y = np.random.default_rng(0).standard_normal((8, 2))
    slow = nl.AttentionFlow(nl.affinity(nl.Gaussian(2.0), nl.Points(y), features=y), evolving=True, every=3)
    refuse("every=3", slow, y)
    with pytest.raises(nl.InputError, match="starts: got none"):
        find_equilibria(p.flow, [])
    with pytest.raises(nl.InputError, match="method"):
        find_equilibrium(p.flow, np.zeros(24), method="secant")
    far = stability(p.flow, np.ones(24))
    assert far.verdict == "cannot tell"
    assert "not at rest" in far.message


def test_flows_of_ones_own() -> None:
    class Pendulum(Flow):
        """du/dt = (v, -sin u - v / 2) at one node."""

        def velocity(self, u: Any) -> Any:
            return np.stack([u[..., 1], -np.sin(u[..., 0]) - u[..., 1] / 2], axis=-1)

    flow = Pendulum(nl.affinities.Unlinked(nl.Points([0.0])), "l2", None, evolving=False, every=1)
    found = find_equilibrium(flow, np.array([[0.4, 0.3]]))
    assert found.success
    assert np.abs(found.u).max() < 1e-9
    told = stability(flow, found.u)
    assert told.verdict == "stable"
    assert np.abs(told.eigenvalues - np.roots([1, 0.5, 1])).max() < 1e-8
    above = find_equilibrium(flow, np.array([[3.0, 0.0]]))
    assert above.u[0, 0] == pytest.approx(np.pi, abs=1e-9)
    assert (stability(flow, above.u).verdict, stability(flow, above.u).unstable) == ("unstable", 1)


def test_a_reaction_with_an_interval_for_each_channel() -> None:
    weights = nl.affinity(nl.Gaussian(width=9.0), nl.Grid(2))
    reaction = nl.flows.Brusselator(1.0, 1.5, interval=((0.0, 3.0), (0.5, 4.0)))
    flow = nl.SystemFlow(nl.J(weights), [0.1, 0.2]) + reaction
    found = find_equilibrium(flow, np.tile([1.1, 1.4], (2, 1)))
    assert found.success
    assert np.abs(found.u - [1.0, 1.5]).max() < 1e-9


def test_reactions_that_differ_from_node_to_node() -> None:
    grid = nl.Grid(16, spacing=1 / 16)

    def hills(t: float, x: Any, u: Any) -> Any:
        return (1 + x[..., 0]) - u**3

    weights = nl.J(nl.affinity(nl.Gaussian(width=0.1), grid))
    flow = nl.GradientFlow(weights, "degree", reaction=nl.Reaction(hills, (-3, 3), bound=60.0))
    assert flow.timed
    found = find_equilibrium(flow, np.ones(16))
    assert found.success
    assert np.abs(flow.velocity(found.u)).max() < 1e-9
    assert np.all(np.diff(found.u) > 0)
    late = nl.Reaction(lambda t, u: (t > 1000) - u, (-3, 3), bound=1.0)
    refuse("depends on time", nl.GradientFlow(weights, "degree", reaction=late), np.zeros(16))


def test_values_outside_of_an_interval_are_told() -> None:
    flow = nl.GradientFlow(nl.J(nl.affinity(nl.Gaussian(9.0), nl.Grid(4))), "degree", reaction=nl.AllenCahn(0.5))
    outside = find_equilibrium(flow, np.ones(4))
    assert "interval" not in outside.message
    pushed = nl.GradientFlow(
        nl.J(nl.affinity(nl.Gaussian(9.0), nl.Grid(4))), "degree", reaction=nl.AllenCahn(0.5), source=0.3 * np.ones(4)
    )
    assert "values leave the interval" in find_equilibrium(pushed, np.ones(4)).message


def test_nonlocal_cahn_hilliard_keeps_its_mass() -> None:
    grid = nl.Grid(24, spacing=1 / 24, boundary="reflect")
    functional = nl.J(nl.affinity(nl.Gaussian(width=0.12), grid))
    flow = nl.GradientFlow(functional, nl.ConservedMetric(), reaction=nl.AllenCahn(1.5, interval=(-1.5, 1.5)))
    start = 0.15 + 0.8 * np.cos(np.pi * grid.nodes[:, 0])
    equations = Equations(flow, "u", start)
    products = np.stack([equations.times(start, e) for e in np.eye(24)], axis=1)
    assert np.abs(equations.matrix(start) - products).max() < 1e-12
    found = find_equilibrium(flow, start)
    assert found.success
    assert "1 conserved mean" in found.message
    assert abs(found.u.mean() - start.mean()) < 1e-12
    assert np.ptp(found.u) > 1
    mu = nl.GradientFlow(functional, reaction=nl.AllenCahn(1.5)).velocity(found.u)
    assert np.ptp(mu) < 1e-8  # the chemical potential is one number
    told = stability(flow, found.u)
    values = np.sort(np.linalg.eigvals(equations.matrix(found.u)).real)[::-1]
    assert told.neutral == 1
    assert np.abs(told.eigenvalues.real - values[np.abs(values) > 1e-9][:6]).max() < 1e-9


def test_a_front_that_hardly_moves_is_not_called_an_equilibrium() -> None:
    """Between the nodes of a lattice that it does not feel, |du/dt| is 1e-13; the next equilibrium is a node away."""
    weights = nl.affinity(nl.Gaussian(3.0), nl.Grid(200))
    flow = nl.GradientFlow(nl.J(weights), "degree", reaction=nl.AllenCahn(0.2))
    found = find_equilibrium(flow, np.tanh((np.arange(200) - 60.3) / 6))
    assert found.residual < 1e-12
    assert not found.success
    assert "nearly singular" in found.message
    felt = nl.GradientFlow(nl.J(nl.affinity(nl.Gaussian(1.0), nl.Grid(200))), "degree", reaction=nl.AllenCahn(0.2))
    assert find_equilibrium(felt, np.tanh((np.arange(200) - 60.3) / 2)).success


@pytest.mark.parametrize("reaction", [None, nl.AllenCahn(1.0)])
@pytest.mark.parametrize("metric", ["l2", "degree"])
def test_a_fast_diffusion_conserves_no_mean_that_something_else_moves(metric: str, reaction: Any) -> None:
    """On a grid in micrometres degrees are 1e13 times as large as the fidelity, or the slope of the reaction."""
    weights = nl.affinity(nl.Gaussian(1.5e6), nl.Grid((7, 2), 1e6, "reflect"))
    f = np.random.default_rng(0).uniform(-0.5, 0.5, (7, 2))
    functional = nl.E(weights, f, 1.0) if reaction is None else nl.J(weights)
    rate = None if reaction is None or metric == "l2" else nl.AllenCahn(1e-13)
    flow = nl.GradientFlow(functional, metric, reaction=rate or reaction)
    rest = nl.equilibrium(flow).u if reaction is None else np.ones((7, 2))
    found, near = nl.find_equilibrium(flow, rest - 0.4), nl.find_equilibrium(flow, rest)
    assert np.abs(found.u - rest).max() < 1e-2 or not found.success
    assert near.success or reaction is None
    assert "family" not in near.message
    assert "family" not in found.message
    np.testing.assert_allclose(near.u, rest, atol=1e-4)
    told = stability(flow, rest)
    assert told.neutral == 0
    assert told.verdict == "cannot tell" or told.margin < 10


@pytest.mark.parametrize(("rest", "unstable"), [(0.0, 21), (1.0, 0)])
def test_a_node_alone_at_an_end_of_the_interval_conserves_nothing(rest: float, unstable: int) -> None:
    """Twenty of them, where the reaction is 0, beside twenty that see each other."""
    k = nl.from_matrix(np.kron(np.diag([1.0, 0.0]), np.ones((20, 20))) + np.eye(40), nl.Points(np.arange(40.0)))
    told = stability(nl.GradientFlow(nl.J(k), "l2", reaction=nl.FisherKPP(1.0)), np.full(40, rest), k=40)
    assert (told.unstable, told.neutral, len(told.eigenvalues)) == (unstable, 0, 40)


@pytest.mark.parametrize(
    ("x", "strength", "allowed"),
    [
        ([8.0, 5.0, 1.0, 0.5, 0.2], 1.0, False),  # a singular Jacobian: 5e17 beside 1
        ([8.0, 5.0, 1.0, 0.5, 0.2], 1e-3, False),
        ([7.0, 4.7, -6.0], 1e9, False),  # products with the Jacobian lose what its matrix has
        ([3.0, 2.0, 1.0, 0.5, 0.2], 1.0, True),
    ],
)
def test_a_fast_diffusion_that_hides_a_slow_one_finds_no_equilibrium(x: Any, strength: float, allowed: bool) -> None:
    f, keys = np.random.default_rng(0).normal(size=len(x)), np.array(x)[:, None]
    weights = nl.affinity(nl.ExpDotProduct(scale=1.0), nl.Points(np.arange(1.0 * len(x)), np.ones(len(x))), keys)
    found = find_equilibrium(nl.GradientFlow(nl.E(weights, f, strength), "l2"), f)
    assert found.success == allowed, found.message
    k = 2 * np.exp(keys @ keys.T) * (1 - np.eye(len(x)))
    exact = np.linalg.solve(np.diag(k.sum(axis=1) + strength) - k, strength * f)
    assert not allowed or np.abs(found.u - exact).max() < 1e-10


def test_what_rounding_hides_of_du_dt_is_told() -> None:
    """A node that sees itself e^64 fold: du/dt there is off by 1e12, and the fidelity pulls by 1e10."""
    x, f = np.array([[8.0], [5.0], [1.0], [0.5], [0.2]]), np.random.default_rng(0).normal(size=5)
    weights = nl.affinity(nl.ExpDotProduct(), nl.Points(np.arange(5.0), weights=np.ones(5)), x)
    k = 2 * np.exp(x @ x.T) * (1 - np.eye(5))
    for strength in (1e10, 1e22):
        exact = np.linalg.solve(np.diag(k.sum(axis=1) / strength + 1) - k / strength, f)
        found = find_equilibrium(nl.GradientFlow(nl.E(weights, f, strength), "l2"), f)
        assert found.success == (strength > 1e20), found.message
        assert not found.success or np.abs(found.u - exact).max() < 1e-6


def test_terms_are_asked_at_signals_alone() -> None:
    def mobility(u: Floats) -> Floats:
        assert np.abs(u).max() < 1.5  # a direction of the Jacobian is no signal, and reaches further
        return 1 + u * u

    weights = nl.affinity(nl.Gaussian(1.0), nl.Grid((6, 5)))
    metric = nl.ConservedMetric(mobility=mobility, largest=3.0)
    start = np.random.default_rng(5).uniform(-0.5, 0.5, (6, 5))
    flow = nl.GradientFlow(nl.J(weights), metric, reaction=nl.AllenCahn(1.0))
    found = find_equilibrium(flow, start)
    assert found.success, found.message
    np.testing.assert_allclose(found.u, start.mean(), atol=1e-9)
