"""Loops of reconstruction with a frozen symmetric filter in place of the denoiser, and the energies they minimize."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import circulant

from nlflow import Affinity, Gaussian, Grid, Points, affinity, denoise, sinkhorn
from nlflow.denoising.priors import EA, Forward, Reconstruction, Resolvent, reconstruct
from nlflow.errors import StabilityError
from nlflow.plotting import new_figure
from validation.harness import Check, Claim, Context, Outcome, largest, smallest

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Floats = NDArray[np.float64]
SIGMA, MU, S = 0.3, 0.7, 0.5
RTOL = 1e-11
METHODS = ("hqs", "admm", "red")


def averaging(k: Affinity) -> Floats:
    """Return P as a matrix."""
    size = k.domain.size
    return np.stack([np.ravel(k.average(c.reshape(k.domain.shape))) for c in np.eye(size)], axis=1)


def laplacian(k: Affinity) -> Floats:
    """Return w d (I - P) of K = k + k^T as a matrix."""
    both = k.symmetrized()
    mass = np.ravel(np.asarray(both.degree) * both.domain.weights)
    return np.asarray(mass[:, None] * (np.eye(len(mass)) - averaging(both)))


def operators(n: int, rng: np.random.Generator) -> dict[str, Floats]:
    """Return a blur, samples of every other node and random projections."""
    row = np.exp(-0.5 * (np.minimum(np.arange(n), n - np.arange(n)) / 1.2) ** 2)
    return {
        "blur": circulant(row / row.sum()),
        "every other sample": np.eye(n)[::2],
        "projections": rng.standard_normal((2 * n // 3, n)),
    }


def off(found: Reconstruction, expected: Floats) -> float:
    """Return how far a result is from a dense solution, relative to it; infinite for a loop that did not converge."""
    if not found.success:
        return float("inf")
    return float(np.linalg.norm(np.ravel(found.u) - expected) / np.linalg.norm(expected))


def asymmetry(matrix: Floats) -> float:
    """Return the share of a matrix that is not symmetric."""
    return float(np.linalg.norm(matrix - matrix.T) / np.linalg.norm(matrix))


def by_numbers(rng: np.random.Generator) -> float:
    """Return errors of two iterations of each method for A = 3 and D(u, s) = u / (1 + s²), which are numbers."""
    n, c, worst = 30, 3.0, 0.0
    forward = Forward((lambda u: c * u, lambda v: c * v), n)
    data, start = c * np.cumsum(rng.standard_normal(n)) + SIGMA * rng.standard_normal(n), rng.standard_normal(n)

    def near(u: Floats, s: float) -> Floats:
        pull = MU * SIGMA**2 / s**2
        return (c * data + pull * u) / (c**2 + pull)

    def filtered(u: Any, s: float) -> Any:
        return u / (1 + s**2)

    for method in (*METHODS, "forward-backward"):
        state = estimate = start
        for s in (0.1, 0.06):
            if method == "hqs":
                state = estimate = filtered(near(state, s), s)
            elif method == "red":
                state = estimate = near(filtered(state, s), s)
            elif method == "admm":
                estimate = filtered(state, s)
                state = state + near(2 * estimate - state, s) - estimate
            else:
                moved = state - s**2 / (MU * SIGMA**2) * c * (c * state - data)
                state = estimate = filtered(moved, s)
        options: Any = {"denoiser": filtered, "method": method, "weight": MU, "start": start}
        found = reconstruct(data, forward, SIGMA, strength=[0.1, 0.06], rtol=1e-9, **options)
        misfit = np.linalg.norm(c * estimate - data) / (SIGMA * np.sqrt(n))
        worst = largest(worst, float(np.abs(found.u - estimate).max()), abs(float(found.misfit[-1] / misfit - 1)))
        told = reconstruct(data, forward, SIGMA, maxiter=2, **options).strength
        rough = (c * data + 0.01 * c**2 * start) / (1.01 * c**2)  # which tells the standard deviation of the signal
        wanted = np.geomspace(0.8 * rough.std(), SIGMA / c, len(told))
        if method == "forward-backward":  # half of what is allowed in s²
            wanted = np.full(len(told), SIGMA * np.sqrt(MU) / c)
        worst = largest(worst, float(np.abs(told / wanted - 1).max()))
    flat = reconstruct(data, forward, SIGMA, denoiser=lambda u, s: 0 * u + u.mean(), strength=[0.05], weight=MU)
    return largest(worst, float(np.abs(flat.u - data.mean() / c).max()))  # of the constant that fits best


def adapters(rng: np.random.Generator) -> float:
    """Return errors of the resolvent and, where they are installed, of what PyLops and PyProximal get.

    Of nodes with weights w: (I + s² w L)⁻¹ u, w L u, and D(u, √(weight τ)).
    """
    k = affinity(Gaussian(0.8), Points(rng.standard_normal((12, 2)), weights=rng.uniform(0.5, 2, 12)))
    u = rng.standard_normal(12)
    wanted = np.linalg.solve(np.eye(12) + 0.7**2 * laplacian(k), u)
    worst = float(np.abs(Resolvent(k, rtol=1e-13)(u, 0.7) - wanted).max())
    if importlib.util.find_spec("pylops") is not None:
        from nlflow.denoising.priors.pylops import Laplacian

        worst = largest(worst, float(np.abs(Laplacian(k) @ u - laplacian(k) @ u).max()))
    if importlib.util.find_spec("pyproximal") is not None:
        from nlflow.denoising.priors.pyproximal import Prior

        u = rng.standard_normal((20, 21)) + np.arange(21)
        found = Prior(u.shape, weight=2.0, quality="fast").prox(u.ravel(), 0.6)
        worst = largest(worst, float(np.abs(found - denoise(u, np.sqrt(1.2), quality="fast").ravel()).max()) / 1e3)
    return worst


def run(context: Context) -> Outcome:
    rng = np.random.default_rng(0)
    n = context.pick(48, 24)
    clean = np.cumsum(rng.standard_normal(n)) / 2
    nodes = Points(rng.standard_normal((n, 2)), weights=np.ones(n))
    kernels: dict[str, Affinity] = {
        "Gaussian, grid": affinity(Gaussian(1.5), Grid(n)),
        "Gaussian, scattered nodes": affinity(Gaussian(0.8), nodes),
    }
    by_method = dict.fromkeys(METHODS, 0.0)
    direct, filters, descended, told, courses = 0.0, 0.0, 0.0, 0.0, {}
    for name, k in kernels.items():
        matrix, shape = laplacian(k), k.domain.shape
        smoother = np.linalg.inv(np.eye(n) + S**2 * matrix)
        for what, a in operators(n, rng).items():
            context.step(f"{name}, {what}")
            forward = Forward(a, shape)
            data = a @ clean + SIGMA * rng.standard_normal(len(a))
            right, normal = a.T @ data / SIGMA**2, a.T @ a / SIGMA**2
            energy = EA(k.scaled(MU), data, forward, SIGMA).minimizer(rtol=RTOL)
            minimizer = np.linalg.solve(normal + MU * matrix, right)
            descended = largest(descended, _descended(data, forward, k, matrix, right, normal))
            envelope = np.linalg.solve(normal + MU * (np.eye(n) - smoother) / S**2, right)
            direct = largest(direct, float(np.linalg.norm(np.ravel(energy.u) - minimizer) / np.linalg.norm(minimizer)))
            expected = {"hqs": smoother @ envelope, "admm": minimizer, "red": envelope}
            for method in METHODS:
                found = _loop(data, forward, Resolvent(k, rtol=1e-12), method)
                by_method[method] = largest(by_method[method], off(found, expected[method]))
                missed = np.linalg.norm(a @ np.ravel(found.u) - data) / (SIGMA * np.sqrt(len(data)))
                told = largest(told, abs(float(found.misfit[-1] / missed) - 1))
                courses[name, what, method] = found.change

    # Where A is a multiple of 1, a rough solution is exact: a hundredth of |A|² draws it to the mean.
    data = 3.1 * clean + SIGMA * rng.standard_normal(n)
    found = reconstruct(data, Forward(3.1 * np.eye(n), n), SIGMA, denoiser=lambda u, s: u)
    rule = np.geomspace(0.8 * (data / 3.1).std() / 1.01, SIGMA / 3.1, 8)
    told = largest(told, float(np.abs(found.strength / rule - 1).max()))
    context.step("a filter that is no resolvent")
    fair, skew = sinkhorn(Gaussian(0.8), nodes), affinity(Gaussian(0.8), nodes)
    lazy = (np.eye(n) + averaging(fair)) / 2  # eigenvalues in (1/2, 1]
    for a in operators(n, rng).values():
        data = a @ clean + SIGMA * rng.standard_normal(len(a))
        prior = (np.linalg.inv(lazy) - np.eye(n)) / S**2
        minimizer = np.linalg.solve(a.T @ a / SIGMA**2 + MU * prior, a.T @ data / SIGMA**2)
        found = _loop(data, Forward(a, n), lambda u, s: (u + fair.average(u)) / 2, "admm")
        filters = largest(filters, off(found, minimizer))
    checks = [
        Check("two iterations, schedules and misfits where all are numbers", by_numbers(rng), 1e-7),
        Check("filters of nodes with weights, and what PyLops and PyProximal get where installed", adapters(rng), 1e-9),
        Check("E_A's minimizer against np.linalg.solve", direct, 1e-8),
        *(Check(f"fixed points of {m} against np.linalg.solve", by_method[m], 1e-8) for m in METHODS),
        Check("fixed point, limit and schedule of forward-backward and hqs over what they may be off", descended, 1.0),
        Check("misfits that are told, and a schedule of an operator that is a multiple of 1, relative", told, 1e-6),
        Check("fixed points of admm with (I + P)/2 of a doubly stochastic P", filters, 1e-8),
        Check("asymmetry of the Jacobian of RED's field, P doubly stochastic", asymmetry(averaging(fair)), 1e-9),
        Check("the same for P with unequal degrees", smallest(asymmetry(averaging(skew))), 0.05, at_least=True),
    ]
    caption = "Change of the state in each iteration, for each kernel and operator: all loops converge linearly."
    return Outcome(checks, {caption: _figure(courses)}, {"nodes": n})


def _descended(data: Floats, forward: Forward, k: Affinity, matrix: Floats, right: Floats, normal: Floats) -> float:
    """Return how far forward-backward, its limit and a schedule are from dense ones, over what they may be off."""
    weight, norm = 40 * MU, float(np.linalg.norm(normal, 2)) * SIGMA**2
    most = SIGMA * np.sqrt(2 * weight / norm)
    options: dict[str, Any] = {"denoiser": Resolvent(k, rtol=1e-13), "method": "forward-backward", "weight": weight}
    found = reconstruct(data, forward, SIGMA, strength=0.7 * most, rtol=1e-11, maxiter=50_000, **options)
    worst = off(found, np.linalg.solve(normal + weight * matrix, right)) / 1e-8
    told = reconstruct(data, forward, SIGMA, maxiter=1, **options).strength
    worst = largest(worst, abs(float(told[0]) * np.sqrt(2) / most - 1) / 0.01)  # |A| is estimated
    for share in (0.98, 1.02):
        try:
            reconstruct(data, forward, SIGMA, strength=share * most, maxiter=1, **options)
            refused = False
        except StabilityError:
            refused = True
        worst = largest(worst, 2 * float(refused != (share > 1)))
    # Of hqs: eight strengths, from 0.8 of what a rough solution has to the noise.
    seen = forward.apply(np.ones(forward.shape))
    first = float(seen @ data / (seen @ seen))
    rough = np.linalg.solve(
        normal + 0.01 * norm / SIGMA**2 * np.eye(len(normal)), right + 0.01 * norm / SIGMA**2 * first
    )
    rule = np.geomspace(0.8 * rough.std(), SIGMA / np.sqrt(norm), 8)
    scheduled = reconstruct(data, forward, SIGMA, denoiser=options["denoiser"]).strength
    return largest(worst, float(np.abs(scheduled / rule - 1).max()) / 0.04)  # a rough solution, to a hundredth


def _loop(data: Floats, forward: Forward, denoiser: Callable[[Any, float], Any], method: str) -> Reconstruction:
    return reconstruct(
        data, forward, SIGMA, denoiser=denoiser, method=method, strength=S, weight=MU, rtol=RTOL, maxiter=20_000
    )


def _figure(courses: dict[tuple[str, str, str], Floats]) -> Figure:
    figure = new_figure(8, 3, dpi=110)
    axes = figure.subplots(1, len(METHODS), sharey=True)
    for axis, method in zip(axes, METHODS, strict=True):
        for (name, what, own), change in courses.items():
            if own == method:
                axis.loglog(np.arange(1, len(change) + 1), change, label=f"{name}, {what}", linewidth=1)
        axis.set_title(method, fontsize=9)
        axis.set_xlabel("iteration", fontsize=8)
        axis.tick_params(labelsize=7)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("relative change", fontsize=8)
    axes[-1].legend(fontsize=6, frameon=False)
    return figure


CLAIM = Claim(
    name="frozen-priors",
    title="With a frozen symmetric filter, plug-and-play and RED minimize energies that are known",
    statement=(
        "Data f = Au + noise of strength σ, a denoiser D of strength s, a weight μ. For D = (I + s²L)⁻¹, an implicit "
        "step of the J-flow of a frozen kernel, ADMM converges to the minimizer of |Au − f|²/(2σ²) + μJ(u), RED to "
        "that of |Au − f|²/(2σ²) + μ⟨u, u − Du⟩/(2s²), whose second term is the Moreau envelope of μJ, and "
        "half-quadratic splitting to D of the same. For a symmetric D with eigenvalues in (0, 1], ADMM minimizes "
        "|Au − f|²/(2σ²) + μ⟨u, (D⁻¹ − I)u⟩/(2s²). RED's field is the gradient of an energy only if D has a symmetric "
        "Jacobian: P of a doubly stochastic kernel has one, P with unequal degrees has not. Errors relative to the "
        "dense solution, the largest over blur, missing samples and random projections."
    ),
    source=(
        "Moreau 1965; Romano, Elad, Milanfar 2017 (arXiv 1611.02862); Reehorst, Schniter 2019 (arXiv 1806.02296); "
        "derived"
    ),
    run=run,
)
