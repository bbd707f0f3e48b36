"""Conjugate gradients in any inner product: known solutions, many systems at once, honest residuals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nlflow.functionals.krylov import Solved, conjugate_gradients, gmres

pytestmark = pytest.mark.numerical

N = 12


class System:
    """A matrix M^-1 A, self-adjoint and positive in <a, b> = a . M b, with eigenvalues from 1 to `condition`."""

    def __init__(self, condition: float = 100.0, channels: int = 3, seed: int = 0, dtype: Any = np.float64) -> None:
        rng = np.random.default_rng(seed)
        self.measure = rng.uniform(0.1, 3.0, (N, 1)).astype(dtype)
        basis, _ = np.linalg.qr(rng.normal(size=(N, N)))
        root = np.sqrt(self.measure.astype(np.float64))
        symmetric = basis * np.geomspace(1, condition, N) @ basis.T
        self.matrix = (symmetric * root.T / root).astype(dtype)
        self.x = rng.normal(size=(N, channels)).astype(dtype)
        self.b = self.matrix @ self.x
        self.applied = 0

    def operator(self, v: Any) -> Any:
        self.applied += 1
        return self.matrix @ v

    def inner(self, a: Any, b: Any) -> Any:
        return (self.measure * a * b).sum(axis=0, keepdims=True)

    def residual(self, x: Any) -> float:
        """Return the larger of the ratios of the norms, for the worst system, and of the largest entries."""
        r = self.b - self.matrix @ x
        ratio = self.inner(r, r) / self.inner(self.b, self.b)
        return max(float(np.sqrt(ratio.max())), float(np.abs(r).max() / np.abs(self.b).max()))

    def solve(
        self, x: Any = None, b: Any = None, rtol: float = 1e-12, maxiter: int = 200, precondition: Any = None
    ) -> Solved:
        b = self.b if b is None else b
        identity: Callable[[Any], Any] = lambda v: v  # noqa: E731
        return conjugate_gradients(
            self.operator,
            b,
            np.zeros_like(b) if x is None else x,
            inner=self.inner,
            precondition=precondition or identity,
            rtol=rtol,
            maxiter=maxiter,
        )


@given(condition=st.sampled_from([1.0, 10.0, 1e4]), channels=st.integers(1, 5), seed=st.integers(0, 99))
def test_known_solution(condition: float, channels: int, seed: int) -> None:
    system = System(condition, channels, seed)
    solved = system.solve(rtol=1e-10)
    assert solved.residual <= 1.01e-10
    np.testing.assert_allclose(solved.x, system.x, rtol=0, atol=1e-8 * condition)
    if condition == 1:
        assert solved.iterations == 1


def test_as_many_iterations_as_there_are_eigenvalues() -> None:
    system = System(condition=50.0, channels=1)
    assert system.solve(rtol=1e-6).iterations <= N
    assert system.solve(rtol=1e-6, maxiter=N // 2).residual > 1e-3


def test_an_inner_product_in_which_it_is_not_self_adjoint_does_not_work() -> None:
    """The weighted inner product is needed: the plain one takes the same system for another."""
    system = System(condition=50.0, channels=1)
    right = system.solve(rtol=1e-9)
    system.measure = np.ones_like(system.measure)
    wrong = system.solve(rtol=1e-9, maxiter=right.iterations)
    assert wrong.residual > 1e3 * right.residual


@pytest.mark.parametrize("maxiter", [1, 2, 5])
def test_residual_is_that_of_the_answer(maxiter: int) -> None:
    system = System()
    solved = system.solve(maxiter=maxiter)
    assert solved.iterations == maxiter
    assert solved.residual == pytest.approx(system.residual(solved.x), rel=1e-12)
    assert solved.residual > 1e-12


def test_systems_at_once_are_systems_one_by_one() -> None:
    """Also when they converge at different speeds, or need nothing at all: none disturbs another."""
    system = System(condition=1e4, channels=4)
    _, vectors = np.linalg.eig(system.matrix)
    system.b[:, 1] = np.real(vectors[:, 0])  # one iteration
    system.b[:, 2] = 0  # none
    together = system.solve(rtol=1e-8)
    assert together.residual <= 1.01e-8
    assert np.all(together.x[:, 2] == 0)
    np.testing.assert_allclose(together.x, np.linalg.solve(system.matrix, system.b), rtol=0, atol=1e-5)
    for channel in range(4):
        alone = system.solve(b=system.b[:, channel : channel + 1], rtol=1e-8)
        np.testing.assert_allclose(together.x[:, channel : channel + 1], alone.x, rtol=0, atol=1e-5)


def test_nothing_on_the_right() -> None:
    """The solution is 0, whatever the first guess was."""
    system = System()
    solved = system.solve(x=np.ones((N, 3)), b=np.zeros((N, 3)))
    assert (solved.residual, solved.iterations) == (0, 0)
    assert np.all(solved.x == 0)


def test_first_guess() -> None:
    system = System()
    assert system.solve(x=system.x.copy()).iterations == 0
    near = system.solve(x=system.x + 1e-6, rtol=1e-9)
    assert near.iterations < system.solve(rtol=1e-9).iterations
    guess = np.ones((N, 3))
    system.solve(x=guess)
    np.testing.assert_array_equal(guess, 1)


def test_far_first_guess() -> None:
    """The answer is right to the tolerance, not to the tolerance times the size of the first residual."""
    system = System()
    solved = system.solve(x=np.full((N, 3), 1e8), rtol=1e-10)
    assert solved.residual <= 1.01e-10
    assert system.residual(solved.x) <= 1.01e-10


@pytest.mark.parametrize("condition", [1e2, 1e6])
def test_preconditioner(condition: float) -> None:
    """The inverse of the diagonal, on a system whose size varies from node to node."""
    system = System(condition=2.0)
    scale = np.geomspace(1, condition, N)[:, None]
    root = np.sqrt(scale)
    system.matrix = root * system.matrix * root.T  # still self-adjoint: both factors are those of the same node
    system.b = system.matrix @ system.x
    plain = system.solve(rtol=1e-8, maxiter=2000)
    preconditioned = system.solve(rtol=1e-8, precondition=lambda v: v / scale)
    assert preconditioned.iterations < plain.iterations
    assert preconditioned.residual <= 1.01e-8


def test_float32() -> None:
    system = System(condition=30.0, dtype=np.float32)
    solved = system.solve(rtol=1e-5)
    assert solved.x.dtype == np.float32
    assert solved.residual <= 1.01e-5
    np.testing.assert_allclose(solved.x, system.x, rtol=0, atol=1e-3)


@pytest.mark.parametrize("maxiter", [45, 5000])
def test_ill_conditioned(maxiter: int) -> None:
    """Iterations in which the recursive residual leaves the true one, within a round and after many."""
    system = System(condition=1e10, channels=2)
    solved = system.solve(rtol=1e-7, maxiter=maxiter)
    assert solved.residual == pytest.approx(system.residual(solved.x), rel=1e-9)
    assert solved.residual <= 1.01e-7 or maxiter < 50


def test_tolerance_that_cannot_be_reached() -> None:
    system = System()
    solved = system.solve(rtol=1e-40, maxiter=60)
    assert solved.iterations <= 60
    assert np.isfinite(solved.x).all()
    assert solved.residual == pytest.approx(system.residual(solved.x), rel=1e-12)
    assert solved.residual < 1e-12
    np.testing.assert_allclose(solved.x, system.x, rtol=0, atol=1e-11)


def test_residuals_that_hardly_fall_are_not_given_up() -> None:
    """A chain fixed at both ends, pulled at one: residuals fall as 1 / k until the pull is at the other end."""
    n = 700

    def bent(v: Any) -> Any:
        padded = np.pad(v, ((1, 1), (0, 0)))
        return 2 * v - padded[:-2] - padded[2:]

    pull = np.eye(n, 1)
    solved = conjugate_gradients(
        bent, pull, np.zeros_like(pull), inner=lambda a, b: (a * b).sum(axis=0, keepdims=True),
        precondition=lambda v: v, rtol=1e-9, maxiter=2 * n,
    )  # fmt: skip
    assert solved.residual <= 1e-9
    np.testing.assert_allclose(solved.x[:, 0], 1 - np.arange(1, n + 1) / (n + 1), rtol=0, atol=1e-10)


def test_one_application_an_iteration() -> None:
    system = System()
    solved = system.solve(rtol=1e-9)
    assert solved.iterations < 50
    assert system.applied <= solved.iterations + 3


def test_torch() -> None:
    torch = pytest.importorskip("torch", reason="any array namespace")
    system = System(condition=30.0)
    matrix, measure = torch.from_numpy(system.matrix), torch.from_numpy(system.measure)
    solved = conjugate_gradients(
        lambda v: matrix @ v,
        torch.from_numpy(system.b),
        torch.zeros(N, 3, dtype=torch.float64),
        inner=lambda a, b: (measure * a * b).sum(dim=0, keepdim=True),
        precondition=lambda v: v,
        rtol=1e-10,
        maxiter=100,
    )
    assert isinstance(solved.x, torch.Tensor)
    assert solved.residual <= 1.01e-10
    np.testing.assert_allclose(solved.x.numpy(), system.solve(rtol=1e-10).x, rtol=0, atol=1e-8)


# --- GMRES -----------------------------------------------------------------------------------------------------------


def resolvent(n: int, fidelity: float, seed: int = 0, power: int = 6) -> np.ndarray:
    """Return (1 + fidelity) I - P for a chain that is not reversible."""
    p = np.random.default_rng(seed).random((n, n)) ** power
    return (1 + fidelity) * np.eye(n) - p / p.sum(axis=1, keepdims=True)


@pytest.mark.parametrize("fidelity", [1e-3, 1e-1, 1.0, 1e2])
@pytest.mark.parametrize("channels", [1, 5])
def test_gmres_solves_every_column(fidelity: float, channels: int) -> None:
    a = resolvent(60, fidelity)
    b = np.random.default_rng(1).standard_normal((60, channels))
    solved = gmres(lambda v: a @ v, b, np.zeros_like(b), rtol=1e-12, maxiter=1000)
    exact = np.linalg.solve(a, b)
    assert np.abs(solved.x - exact).max() <= 1e-10 * np.abs(exact).max()
    assert solved.residual <= 1e-12
    assert solved.residual == pytest.approx(
        (np.linalg.norm(a @ solved.x - b, axis=0) / np.linalg.norm(b, axis=0)).max(), rel=0.5
    )


def test_gmres_finds_the_best_vector_of_the_krylov_space() -> None:
    a, b = resolvent(40, 0.1), np.random.default_rng(2).standard_normal((40, 1))
    for m in (1, 3, 6):
        space = np.hstack([np.linalg.matrix_power(a, i) @ b for i in range(m)])
        best = space @ np.linalg.lstsq(a @ space, b, rcond=None)[0]
        solved = gmres(lambda v: a @ v, b, np.zeros_like(b), rtol=1e-15, maxiter=m)
        assert solved.iterations == m
        assert np.allclose(solved.x, best, rtol=1e-8, atol=1e-10)


def test_gmres_with_zero_columns_and_solved_ones() -> None:
    a = resolvent(30, 0.5)
    b = np.random.default_rng(3).standard_normal((30, 3))
    b[:, 1] = 0
    b[:, 2] = a @ np.ones(30)  # the constant 1 is its solution: one step
    solved = gmres(lambda v: a @ v, b, np.full_like(b, 7.0), rtol=1e-13, maxiter=200)
    assert np.all(solved.x[:, 1] == 0)
    assert np.abs(solved.x[:, 2] - 1).max() <= 1e-12
    assert np.abs(a @ solved.x - b).max() <= 1e-11


def test_gmres_restarts_and_tells_what_it_has_not_reached() -> None:
    ring = 1.05 * np.eye(80) - np.roll(np.eye(80), 1, axis=1)  # needs the whole space without restarts
    b = np.random.default_rng(4).standard_normal((80, 2))
    solved = gmres(lambda v: ring @ v, b, np.zeros_like(b), rtol=1e-10, maxiter=5000, restart=10)
    assert solved.residual <= 1e-10
    assert solved.iterations > 10
    short = gmres(lambda v: ring @ v, b, np.zeros_like(b), rtol=1e-10, maxiter=7, restart=10)
    assert short.iterations == 7
    assert short.residual > 1e-3
    assert short.residual == pytest.approx(
        (np.linalg.norm(ring @ short.x - b, axis=0) / np.linalg.norm(b, axis=0)).max(), rel=1e-10
    )


def test_gmres_ends_where_rounding_is_all_that_is_left() -> None:
    a, b = resolvent(50, 1e-3), np.random.default_rng(5).standard_normal((50, 2))
    solved = gmres(lambda v: a @ v, b, np.zeros_like(b), rtol=1e-30, maxiter=100_000)
    assert solved.iterations < 1000
    assert solved.residual < 1e-12


@pytest.mark.parametrize("size", [2.0**-60, 2.0**60])
def test_gmres_knows_no_unit(size: float) -> None:
    a, b = resolvent(60, 0.1), np.random.default_rng(1).standard_normal((60, 2))
    solved = gmres(lambda v: a @ v, size * b, np.zeros_like(b), rtol=1e-12, maxiter=1000)
    assert solved.residual <= 1e-12
    np.testing.assert_allclose(solved.x / size, np.linalg.solve(a, b), rtol=0, atol=1e-9)


@pytest.mark.parametrize("coupled", [False, True])
def test_gmres_on_tensors(coupled: bool) -> None:
    """In single precision with products in double; as one system for all columns, or one for each."""
    torch = pytest.importorskip("torch", reason="any array namespace")
    a, b = resolvent(60, 0.1).astype(np.float32), np.random.default_rng(1).standard_normal((60, 3)).astype(np.float32)
    b[:, 1] *= 1e-3
    matrix = torch.from_numpy(a)

    def inner(v: Any, w: Any) -> Any:
        products = v.double() * w.double()
        return products.sum().reshape(1) if coupled else products.sum(dim=0)

    options: dict[str, Any] = {"rtol": 1e-5, "maxiter": 200, "inner": inner}
    solved = gmres(lambda v: matrix @ v, torch.from_numpy(b), torch.zeros(60, 3), **options)
    assert solved.x.dtype == torch.float32
    left = np.linalg.norm(a @ solved.x.numpy() - b, axis=None if coupled else 0)
    assert np.all(left <= 2e-5 * np.linalg.norm(b, axis=None if coupled else 0))
    assert solved.iterations < 40
