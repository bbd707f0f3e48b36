"""The denoiser as a prior: operators and their adjoints, E with one, and loops against dense solutions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from scipy.sparse import csr_array
from scipy.sparse.linalg import LinearOperator, aslinearoperator
from skimage.transform import iradon, radon

from nlflow import (
    Gaussian,
    Grid,
    InputError,
    J,
    NumericalError,
    Points,
    StabilityError,
    Status,
    affinity,
    affinity_from_graph,
    denoise,
    sinkhorn,
)
from nlflow.affinities import Affinity
from nlflow.denoising.priors import EA, Denoiser, Forward, Reconstruction, Resolvent, reconstruct
from nlflow.denoising.priors.denoisers import base

N, M, SIGMA = 30, 45, 0.5
RNG = np.random.default_rng(0)
MATRIX = RNG.standard_normal((M, N))
CLEAN = np.cumsum(RNG.standard_normal(N))
DATA = MATRIX @ CLEAN + SIGMA * RNG.standard_normal(M)
FORWARD = Forward(MATRIX, N)
EPS = float(np.finfo(np.float64).eps)


def kernel(shape: Any = N) -> Affinity:
    return affinity(Gaussian(1.5), Grid(shape))


def laplacian(k: Affinity) -> Any:
    """w d (I - P) of K = k + k^T as a matrix, by the average of each unit vector."""
    both = k.symmetrized()
    size = both.domain.size
    columns = [both.average(c.reshape(both.domain.shape)).ravel() for c in np.eye(size)]
    return np.ravel(both.degree * both.domain.weights)[:, None] * (np.eye(size) - np.stack(columns, axis=1))


def close(a: Any, b: Any, matrix: Any, rtol: float) -> None:
    """Check a solution whose residual is rtol of the right-hand side: the error is at most the condition times that."""
    allowed = np.linalg.cond(matrix) * (rtol + N * EPS) * np.linalg.norm(b)
    assert np.linalg.norm(np.ravel(a - b)) <= allowed


# ---- operators


def pair(matrix: Any = MATRIX) -> tuple[Callable[..., Any], Callable[..., Any]]:
    return lambda u: matrix @ u, lambda v: matrix.T @ v


@pytest.mark.parametrize(
    "operator",
    [MATRIX, csr_array(MATRIX), aslinearoperator(MATRIX), pair(), MATRIX.tolist()],
    ids=["matrix", "sparse", "LinearOperator", "functions", "lists"],
)
def test_operators_of_all_kinds_do_the_same(operator: Any) -> None:
    found = Forward(operator, N)
    assert found.data_shape == (M,)
    v = RNG.standard_normal(M)
    np.testing.assert_allclose(found.apply(CLEAN), MATRIX @ CLEAN, rtol=0, atol=N * EPS * np.abs(MATRIX @ CLEAN).max())
    np.testing.assert_allclose(found.adjoint(v), MATRIX.T @ v, rtol=0, atol=M * EPS * 10 * np.abs(v).max())
    # The power method is a lower bound, and near after 30 steps of a small matrix.
    largest = np.linalg.norm(MATRIX, 2) ** 2
    assert 0.7 * largest <= found.squared_norm <= largest * (1 + 1e-12)


def test_shapes_of_signals_and_data() -> None:
    found = Forward(MATRIX, (5, 6), data_shape=(5, 9))
    u = CLEAN.reshape(5, 6).astype(np.float32)
    assert found.apply(u).shape == (5, 9)
    assert found.apply(u).dtype == np.float32
    assert found.adjoint(found.apply(u)).shape == (5, 6)
    assert repr(found) == "<Forward from (5, 6) to (5, 9)>"
    single = Forward(pair(MATRIX.astype(np.float32)), N)  # whose rounding is allowed
    assert single.data_shape == (M,)


def scaled(factor: float) -> Any:
    return lambda u: MATRIX @ u, lambda v: factor * (MATRIX.T @ v)


def poisoned(value: float) -> Any:
    def apply(u: Any) -> Any:
        result = MATRIX @ u
        result[3] = value
        return result

    return apply, lambda v: MATRIX.T @ v


NOT_ADJOINT = r"operator: its adjoint is none: <Au, v> = \S+ but <u, A'v> = \S+ .* a mismatch of \S+, expected at most"


@pytest.mark.parametrize(
    ("operator", "error", "message"),
    [
        (scaled(1.0 + 1e-9), InputError, NOT_ADJOINT),
        (scaled(-1.0), InputError, NOT_ADJOINT),
        ((lambda u: np.roll(u, 1), lambda v: np.roll(v, 1)), InputError, NOT_ADJOINT),
        ((lambda u: u * np.arange(N), lambda v: v * np.arange(N)[::-1]), InputError, NOT_ADJOINT),
        (poisoned(np.nan), NumericalError, r"operator: A u has 1 NaN or infinite value"),
        (poisoned(7.0), InputError, NOT_ADJOINT),
        ((lambda u: u + 1e-9, lambda v: v), InputError, NOT_ADJOINT),
        ((np.tanh, lambda v: v), InputError, NOT_ADJOINT),
        ((lambda u: u, np.tanh), InputError, NOT_ADJOINT),
        ((lambda u: 0 * u, lambda v: 0 * v), InputError, "operator: it maps a random signal to 0"),
        ((lambda u: u * 1j, lambda v: v * -1j), InputError, "operator: A u has dtype complex128, expected real"),
        ((lambda u: u[:5], lambda v: v), InputError, r"operator: A'v has shape \(5,\), expected \(30,\)"),
        (MATRIX * 1j, InputError, "operator: got complex values"),
        (csr_array(MATRIX * 1j), InputError, "operator: got complex values"),
        (aslinearoperator(MATRIX * 1j), InputError, r"operator: got a complex one \(complex128\)"),
        (MATRIX[:, :7], InputError, r"operator: got 45 x 7, expected 30 columns, one for each sample of signals"),
        (np.where(MATRIX > 2, np.nan, MATRIX), InputError, "operator: got .* NaN"),
        (MATRIX[0], InputError, "operator: got 1 dimension"),
        ("blur", InputError, "operator: got dtype .* expected a real numeric array; or a sparse matrix"),
        (LinearOperator((M, N), matvec=lambda u: MATRIX @ u, dtype=float), InputError, "it has no adjoint"),
    ],
)
def test_operators_that_are_none_are_refused(operator: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Forward(operator, N)


def test_filtered_backprojection_is_not_the_adjoint_of_the_projection() -> None:
    angles = np.linspace(0, 180, 12, endpoint=False)
    forth = partial(radon, theta=angles, circle=True)
    inside = np.hypot(*(np.mgrid[:16, :16] - 7.5)) < 7
    for ramp in ("ramp", None):
        back = partial(iradon, theta=angles, filter_name=ramp, circle=True)
        with pytest.raises(InputError, match=NOT_ADJOINT):
            Forward((lambda u: forth(u * inside), lambda v, back=back: back(v) * inside), (16, 16))


def test_a_lower_precision_can_be_allowed() -> None:
    with pytest.raises(InputError, match="rtol= for an operator of lower precision"):
        Forward(scaled(1 + 1e-6), N)
    Forward(scaled(1 + 1e-6), N, rtol=1e-5)


def test_a_wrong_factor_shows_in_single_precision_too() -> None:
    """Of independent random u and v it would be a share of 1 / sqrt(N), below the rounding that is allowed."""

    def single(factor: float) -> Callable[[Any], Any]:
        return lambda u: (factor * u).astype(np.float32)

    Forward((single(1.0), single(1.0)), (64, 64))
    with pytest.raises(InputError, match=NOT_ADJOINT):
        Forward((single(1.0), single(1.001)), (64, 64))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"shape": 0}, r"shape: got 0, expected a tuple of integers >= 1"),
        ({"shape": True}, r"shape: got True"),
        ({"shape": (5, 6.0)}, r"shape: got \(5, 6.0\)"),
        ({"shape": N, "data_shape": (3, 7)}, r"data_shape: got \(3, 7\), expected sizes that multiply to 45"),
        ({"shape": N, "rtol": 0}, "rtol: got 0"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Forward(MATRIX, **arguments)


# ---- E with an operator


@pytest.mark.numerical
def test_energy_and_its_gradient() -> None:
    energy = EA(kernel(), DATA, FORWARD, SIGMA)
    matrix = laplacian(kernel())
    misfit = MATRIX @ CLEAN - DATA
    expected = 0.5 * CLEAN @ matrix @ CLEAN + 0.5 * misfit @ misfit / SIGMA**2
    assert energy.value(CLEAN) == pytest.approx(expected, rel=N * N * EPS)
    total = np.exp(energy.affinity.log_total())
    assert energy.value(CLEAN, normalize=True) == pytest.approx(expected / total, rel=N * N * EPS)
    gradient = matrix @ CLEAN + MATRIX.T @ misfit / SIGMA**2
    size = np.linalg.norm(matrix, 2) * np.linalg.norm(CLEAN) + np.linalg.norm(MATRIX, 2) * np.linalg.norm(misfit) * 4
    np.testing.assert_allclose(energy.gradient(CLEAN), gradient, rtol=0, atol=N * EPS * size)
    degree = energy.affinity.degree
    np.testing.assert_allclose(
        energy.gradient(CLEAN, "degree"), gradient / degree, rtol=0, atol=N * EPS * size / degree.min()
    )
    assert energy.with_affinity(kernel()).value(CLEAN) == energy.value(CLEAN)


@pytest.mark.numerical
@pytest.mark.parametrize("spacing", [1.0, 0.25])
def test_minimizer_is_that_of_the_dense_system(spacing: float) -> None:
    k = affinity(Gaussian(1.5), Grid(N, spacing=spacing))
    found = EA(k, DATA, FORWARD, SIGMA).minimizer(rtol=1e-12)
    assert found.success
    matrix = laplacian(k) + MATRIX.T @ MATRIX / SIGMA**2
    close(found.u, np.linalg.solve(matrix, MATRIX.T @ DATA / SIGMA**2), matrix, 1e-12)
    short = EA(k, DATA, FORWARD, SIGMA).minimizer(maxiter=3)
    assert not short.success
    assert "raise maxiter" in short.message
    again = EA(k, DATA, FORWARD, SIGMA).minimizer(start=found.u)
    assert again.iterations < found.iterations / 2


def test_minimizer_with_channels_and_in_single_precision() -> None:
    wide = Forward(np.kron(MATRIX, np.eye(2)), (N, 2))
    both = np.stack([DATA, 2 * DATA], axis=1)
    found = EA(kernel(), both.ravel(), wide, SIGMA).minimizer().u
    alone = EA(kernel(), DATA, FORWARD, SIGMA).minimizer().u
    np.testing.assert_allclose(found, np.stack([alone, 2 * alone], axis=1), atol=1e-6 * np.abs(alone).max())
    single = affinity(Gaussian(1.5), Grid(N), CLEAN[:, None].astype(np.float32))
    assert EA(single, DATA.astype(np.float32), FORWARD, SIGMA).minimizer().u.dtype == np.float32


def parted() -> Affinity:
    """Two paths of 15 nodes."""
    path = np.eye(N, k=1) + np.eye(N, k=-1)
    path[14, 15] = path[15, 14] = 0
    return affinity_from_graph(path)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: EA(kernel(), DATA[:-1], FORWARD, SIGMA), r"data: got shape \(44,\), expected \(45,\), that of A u"),
        (lambda: EA(kernel(), DATA * 1j, FORWARD, SIGMA), "data: got complex values"),
        (lambda: EA(kernel(), DATA, MATRIX, SIGMA), "forward: got ndarray, expected a Forward"),
        (lambda: EA(kernel(), DATA, FORWARD, 0), "sigma: got 0, expected a finite real number > 0"),
        (lambda: EA(kernel(7), DATA, FORWARD, SIGMA), r"forward: got signals of shape \(30,\), expected \(7,\)"),
        (lambda: EA(kernel(), DATA, FORWARD, SIGMA).value(CLEAN[:, None]), r"u: got shape \(30, 1\), expected \(30,\)"),
        (
            lambda: EA(kernel(), DATA, Forward(MATRIX - MATRIX.mean(axis=1, keepdims=True), N), SIGMA).minimizer(),
            "forward: it maps constants to 0",
        ),
        (
            lambda: EA(parted(), DATA[:10], Forward(np.eye(N)[:10], N), SIGMA).minimizer(),
            r"forward: it maps constants on 15 of 30 nodes \(the first is node 15, channel 0\) to 0",
        ),
        (
            lambda: EA(kernel(), DATA, Forward(np.kron(MATRIX, [1.0, 0.0]), (N, 2)), SIGMA).minimizer(),
            r"forward: it maps constants on 30 of 30 nodes \(the first is node 0, channel 1\) to 0",
        ),
    ],
)
def test_energies_that_are_none_are_refused(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        call()


def test_values_out_of_range_are_told() -> None:
    with pytest.raises(NumericalError, match="value: the misfit over sigma overflows"), np.errstate(over="ignore"):
        EA(kernel(), DATA * 1e200, FORWARD, SIGMA).value(CLEAN)


# ---- denoisers


def test_denoiser_has_the_bits_of_denoise() -> None:
    noisy = RNG.normal(100, 20, (24, 26, 3))
    for quality in ("fast", "balanced"):
        expected = denoise(noisy, 20.0, quality=quality, channel_axis=-1)
        assert np.array_equal(Denoiser(quality, channel_axis=-1)(noisy, 20.0), expected)
    assert repr(Denoiser("fast", separate=True)) == "Denoiser('fast', separate=True)"


@pytest.mark.parametrize("option", ["sigma", "noise", "return_info", "quallity"])
def test_options_that_denoise_does_not_have_are_refused(option: str) -> None:
    with pytest.raises(InputError, match=f"{option}: got an unknown option, expected one of .*strength"):
        Denoiser(**{option: 1})


@pytest.mark.numerical
@pytest.mark.parametrize("spacing", [1.0, 0.25])
def test_resolvent_is_the_proximal_map(spacing: float) -> None:
    k = affinity(Gaussian(1.5), Grid(N, spacing=spacing))
    matrix = np.eye(N) + 0.09 * laplacian(k)
    close(Resolvent(k, rtol=1e-12)(CLEAN, 0.3), np.linalg.solve(matrix, CLEAN), matrix, 1e-12)
    with pytest.raises(InputError, match="strength: got 0"):
        Resolvent(k)(CLEAN, 0.0)
    with pytest.raises(InputError, match="u: got complex values"):
        Resolvent(k)(CLEAN + 1j, 0.3)
    with pytest.raises(InputError, match=r"u: got shape \(5,\)"):
        Resolvent(k)(CLEAN[:5], 0.3)
    with pytest.raises(NumericalError, match="strength: residual"):
        Resolvent(k, rtol=1e-30)(CLEAN, 0.3)


# ---- loops

S, MU = 0.3, 0.7


def minimizer_of(method: str) -> tuple[Any, Any]:
    """Return what a method with the resolvent looks for, and the matrix of its linear system."""
    matrix = laplacian(kernel())
    smoother = np.linalg.inv(np.eye(N) + S**2 * matrix)
    prior = matrix if method in ("admm", "forward-backward") else (np.eye(N) - smoother) / S**2
    system = MATRIX.T @ MATRIX / SIGMA**2 + MU * prior
    found = np.linalg.solve(system, MATRIX.T @ DATA / SIGMA**2)
    return (smoother @ found if method == "hqs" else found), system


def loop(method: str, **options: Any) -> Reconstruction:
    given = {"denoiser": Resolvent(kernel(), rtol=1e-13), "weight": MU, "strength": S, "rtol": 1e-11, "maxiter": 3000}
    return reconstruct(DATA, FORWARD, SIGMA, method=method, **(given | options))


@pytest.mark.slow
@pytest.mark.numerical
@pytest.mark.parametrize("method", ["hqs", "admm", "red", "forward-backward"])
def test_fixed_points_with_a_frozen_filter_minimize_their_energies(method: str) -> None:
    if method == "forward-backward":  # its steps are small
        found = loop(method, strength=None, rtol=1e-10, maxiter=20_000)
    else:
        found = loop(method)
    assert found.success
    assert found.status is Status.STOPPED
    expected, system = minimizer_of(method)
    # A state that moves by c is about c / (1 - rate) from its limit, with the rate of the last iterations.
    rate = (found.change[-1] / found.change[-21]) ** (1 / 20)
    assert rate < 1
    allowed = 10 * found.change[-1] / (1 - rate) * np.linalg.norm(expected) + np.linalg.cond(system) * N * EPS
    assert np.linalg.norm(found.u - expected) <= allowed
    assert found.iterations == len(found.change) == len(found.misfit) == len(found.strength)
    residual = np.linalg.norm(MATRIX @ found.u - DATA) / (SIGMA * np.sqrt(M))
    assert found.misfit[-1] == pytest.approx(residual, rel=1e-9)


def test_red_solves_its_equation_with_any_averaging() -> None:
    """With D = P of a symmetric kernel of degree 1, the term of RED is the velocity of the J-flow."""
    p = sinkhorn(Gaussian(1.5), Points(np.arange(N)))
    found = loop("red", denoiser=lambda u, s: p.average(u))
    slope = MATRIX.T @ (MATRIX @ found.u - DATA) / SIGMA**2
    velocity = J(p).gradient(found.u, "degree")
    assert found.success
    size = np.linalg.norm(slope)
    np.testing.assert_allclose(slope + MU * velocity / S**2, 0, atol=1e-8 * size)


def test_a_schedule_is_followed_and_ends_the_loop() -> None:
    strengths = np.geomspace(2, 0.2, 5)
    found = loop("hqs", strength=strengths, maxiter=1)
    assert found.status is Status.FINISHED
    assert found.success
    np.testing.assert_array_equal(found.strength, strengths)
    assert "the schedule of 5 strengths was followed; the residual is" in found.message
    by_default = reconstruct(DATA, FORWARD, SIGMA, denoiser=Resolvent(kernel()))
    assert by_default.iterations == 8
    assert by_default.strength[-1] == pytest.approx(SIGMA / np.sqrt(FORWARD.squared_norm))
    assert "<Reconstruction finished after 8 iterations" in repr(by_default)


def test_one_iteration_is_what_it_says() -> None:
    """By a dense solve and the denoiser: half-quadratic splitting from a given start."""
    found = loop("hqs", strength=[S], start=CLEAN)
    pull = MU * (SIGMA / S) ** 2
    x = np.linalg.solve(MATRIX.T @ MATRIX + pull * np.eye(N), MATRIX.T @ DATA + pull * CLEAN)
    z = np.linalg.solve(np.eye(N) + S**2 * laplacian(kernel()), x)
    np.testing.assert_allclose(found.u, z, atol=1e-9 * np.abs(z).max())


def test_the_denoiser_restores_a_blurred_image() -> None:
    clean = np.zeros((40, 40))
    clean[10:28, 12:30] = 100
    clean[14:20, 16:26] = 40

    def blur(u: Any) -> Any:
        return sum(np.roll(u, k, axis) for axis in (0, 1) for k in (-2, -1, 0, 1, 2)) / 10

    forward = Forward((blur, blur), clean.shape)
    data = (forward.apply(clean) + np.random.default_rng(0).normal(0, 2, clean.shape)).astype(np.float32)
    found = reconstruct(data, forward, 2.0, denoiser=Denoiser("fast"))
    assert found.success
    assert found.u.dtype == np.float32
    assert 0.7 < found.misfit[-1] < 1.3
    assert np.std(found.u - clean) < 0.5 * np.std(data - clean)
    again = reconstruct(data, forward, 2.0, denoiser=Denoiser("fast"))
    assert np.array_equal(found.u, again.u)


def test_a_loop_that_does_not_converge_says_so() -> None:
    found = loop("admm", maxiter=4)
    assert found.status is Status.NOT_CONVERGED
    assert not found.success
    assert "iteration 4 changes the state by" in found.message
    assert "above rtol=1e-11: raise maxiter or rtol" in found.message
    assert found.iterations == 4


def test_a_loop_that_diverges_says_so() -> None:
    found = loop("admm", denoiser=lambda u, s: -5 * u, strength=5.0)
    assert found.status is Status.DIVERGED
    assert not found.success
    assert "the state grew beyond 1000 times its first size at strength 5" in found.message
    assert np.isfinite(found.u).all()


def test_what_fails_within_is_told_and_what_was_reached_is_returned() -> None:
    calls = []

    def failing(u: Any, s: float) -> Any:
        calls.append(s)
        return u if len(calls) < 3 else np.full_like(u, np.nan)

    found = loop("hqs", denoiser=failing)
    assert found.status is Status.STEP_FAILED
    assert "denoiser: it returned NaN or infinite values" in found.message
    assert found.iterations == 2
    assert np.isfinite(found.u).all()

    def interrupted(u: Any, s: float) -> Any:
        calls.append(s)
        if len(calls) > 8:
            raise KeyboardInterrupt
        return 0.5 * u

    found = loop("hqs", denoiser=interrupted)
    assert found.status is Status.INTERRUPTED
    assert not found.success
    assert found.iterations == 5

    turns = []

    def weary(u: Any) -> Any:
        turns.append(0)
        result = MATRIX @ u
        return result if len(turns) < 40 else result * np.nan

    found = reconstruct(DATA, Forward((weary, pair()[1]), N), SIGMA, denoiser=Resolvent(kernel()), strength=S)
    assert found.status is Status.STEP_FAILED
    assert "operator: A u has 45 NaN" in found.message


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sigma": 0}, "sigma: got 0, expected a finite real number > 0"),
        ({"sigma": -1.0}, "sigma: got -1"),
        ({"sigma": [1.0, 2.0]}, "sigma: got"),
        ({"data": DATA[:-2]}, r"data: got shape \(43,\), expected \(45,\)"),
        ({"data": np.where(DATA > 0, np.nan, DATA)}, "data: got .* NaN"),
        ({"data": DATA * 1j}, "data: got complex values"),
        ({"forward": MATRIX}, "forward: got ndarray, expected a Forward, which tests the adjoint"),
        ({"method": "pnp"}, "method: got 'pnp', expected one of 'hqs', 'admm', 'forward-backward', 'red'"),
        ({"strength": 0}, "strength: got 0, expected numbers > 0"),
        ({"strength": [1.0, -1.0]}, "strength: got -1, expected numbers > 0"),
        ({"strength": [[1.0]]}, "strength: got 2 dimension"),
        ({"weight": 0}, "weight: got 0"),
        ({"rtol": 0}, "rtol: got 0"),
        ({"maxiter": 0}, "maxiter: got 0"),
        ({"denoiser": "best"}, "denoiser: got str, expected a function of a signal and a strength"),
        ({"denoiser": lambda u, s: u[:-1]}, r"denoiser: it returned shape \(29,\), expected \(30,\)"),
        ({"denoiser": lambda u, s: u * 1j}, "denoiser: it returned dtype complex128"),
        ({"start": CLEAN[1:]}, r"start: got shape \(29,\), expected \(30,\)"),
        ({"start": CLEAN * np.inf}, "start: got .* infinite"),
    ],
)
def test_bad_input_is_refused(options: dict[str, Any], message: str) -> None:
    given = {"data": DATA, "forward": FORWARD, "sigma": SIGMA, "denoiser": Resolvent(kernel())} | options
    with pytest.raises(InputError, match=message):
        reconstruct(given.pop("data"), given.pop("forward"), given.pop("sigma"), **given)


@pytest.mark.parametrize(
    ("value", "message"),
    [(None, "got None"), (1.0, r"got shape \(\), expected"), ("a", "got dtype <U1"), ([[1], [1, 2]], "got .*uneven"),
     (np.ones(3), r"got shape \(3,\), expected"), (np.ones(N, complex), "got complex")],
)  # fmt: skip
def test_what_an_operator_cannot_act_on_is_named(value: Any, message: str) -> None:
    for name, act in (("u", FORWARD.apply), ("v", FORWARD.adjoint)):
        with pytest.raises(InputError, match=f"^{name}: {message}"):
            act(value)
    whole = np.arange(N)
    np.testing.assert_array_equal(FORWARD.apply(whole.tolist()), FORWARD.apply(whole.astype(float)))


def test_tensors_are_refused_by_name() -> None:
    torch = pytest.importorskip("torch", reason="torch is optional")
    with pytest.raises(InputError, match="data: got Tensor, expected a NumPy array"):
        reconstruct(torch.zeros(M), FORWARD, SIGMA)
    with pytest.raises(InputError, match="start: got Tensor, expected a NumPy array"):
        reconstruct(DATA, FORWARD, SIGMA, start=torch.zeros(N))
    with pytest.raises(InputError, match="operator: got Tensor, expected a NumPy array"):
        Forward(torch.zeros(M, N), N)


def test_the_limit_of_forward_backward_is_told() -> None:
    limit = SIGMA * np.sqrt(2 * MU / FORWARD.squared_norm)
    with pytest.raises(StabilityError, match=rf"strength: got 1, expected < {limit:g} .*use 'hqs' or 'admm'"):
        loop("forward-backward", strength=1.0)
    assert loop("forward-backward", strength=0.9 * limit, maxiter=3, rtol=1e-3).iterations <= 3


def test_progress_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    loop("hqs", strength=[1.0, 0.5], progress=True)
    with pytest.raises(InputError, match="progress: got 'no', expected True or False"):
        loop("hqs", strength=[1.0, 0.5], progress="no")
    assert "iteration" in capsys.readouterr().err
    loop("hqs", strength=[1.0, 0.5])
    assert capsys.readouterr().err == ""


def test_a_missing_package_is_refused_with_what_to_do() -> None:
    class Adapter(base("nosuch.models", "Model", "pip install nosuch")):  # type: ignore[misc]
        pass

    with pytest.raises(InputError, match=r"nosuch: it cannot be imported \(No module .*; pip install nosuch"):
        Adapter("fast", channel_axis=0)
