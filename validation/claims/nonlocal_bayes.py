"""The semi-implicit step with a matrix fidelity on groups of alike patches: the nonlocal Bayes filter."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize
from skimage import data

from nlflow import E, GradientFlow, PatchGroups, SemiImplicit
from nlflow.denoising.patches import Stage
from nlflow.plotting import new_figure
from nlflow.studies.settings import solve_to_end
from validation.harness import Check, Claim, Context, Outcome, largest, smallest

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Floats = NDArray[np.float64]
SIGMA = 25.0
REMOVED = 1.4  # of the noise variance, from the eigenvalues of the first stage's covariances


@dataclass
class Worst:
    """What is looked at in every stage, the worst of all so far."""

    groups: float = 0.0
    step: float = 0.0
    image: float = 0.0
    limit: float = 0.0
    damped: float = 0.0
    gradient: float = 0.0
    drop: float = 0.0
    least: float = math.inf
    psnr: dict[str, list[float]] = field(default_factory=dict)


def images(size: int) -> dict[str, tuple[Floats, int | None, dict[str, int]]]:
    """Return clean samples, their channel axis, and the parameters of their groups."""
    steps = np.cumsum(np.where(np.arange(8 * size) % 41 == 0, 60.0, 0) * np.cos(np.arange(8 * size)))
    return {
        "photograph": (
            data.camera()[64 : 64 + size, 224 : 224 + size].astype(float),
            None,
            {"patch_size": 5, "search_radius": 7, "members": 40, "step": 3},
        ),
        "colour": (
            data.astronaut()[70 : 70 + size // 2, 186 : 186 + size // 2].astype(float),
            -1,
            {"patch_size": 3, "search_radius": 5, "members": 36, "step": 2},
        ),
        "signal": (steps, None, {"patch_size": 12, "search_radius": 40, "members": 30, "step": 5}),
    }


# ---- the filter as its authors have it, by loops


def plain_groups(guide: Floats, references: NDArray[np.intp], p: int, r: int, n: int) -> list[list[tuple[int, ...]]]:
    """Return the n places in the window of each reference whose patches are nearest, in order."""
    axes = references.shape[1]
    last = [size - p for size in guide.shape[:axes]]

    def patch(place: tuple[int, ...]) -> Floats:
        return guide[tuple(slice(i, i + p) for i in place)]

    groups = []
    for own in map(tuple, references.tolist()):
        window = itertools.product(
            *(range(max(i - r, 0), min(i + r, end) + 1) for i, end in zip(own, last, strict=True))
        )
        ranked = sorted((place != own, float(((patch(place) - patch(own)) ** 2).sum()), place) for place in window)
        groups.append([place for _, _, place in ranked[:n]])
    return groups


def plain_filter(
    noisy: Floats, guide: Floats, groups: list[list[tuple[int, ...]]], p: int, removed: float
) -> tuple[Floats, Floats, Floats]:
    """Return mean + C (C + sigma^2 I)^-1 (patch - mean) for each group, and the average of all patches put back.

    With the mean and C of the guide's patches; the second result is the same with the mean of the noisy ones.
    """
    filtered: list[Floats] = []
    limits: list[Floats] = []
    total, count = np.zeros_like(noisy), np.zeros_like(noisy)
    for group in groups:
        slices = [tuple(slice(i, i + p) for i in place) for place in group]
        shown, seen = (np.array([image[s].ravel() for s in slices]) for image in (guide, noisy))
        covariance = np.cov(shown.T, bias=True).reshape(shown.shape[1], -1)
        if removed:
            values, vectors = np.linalg.eigh(covariance)
            covariance = vectors @ np.diag(np.maximum(values - removed, 0)) @ vectors.T
        for mean, results in ((shown.mean(axis=0), filtered), (seen.mean(axis=0), limits)):
            inverse = np.linalg.solve(covariance + SIGMA**2 * np.eye(len(mean)), (seen - mean).T)
            results.append(mean + (covariance @ inverse).T)
        for place, token in zip(slices, filtered[-1], strict=True):
            total[place] += token.reshape(total[place].shape)
            count[place] += 1
    return np.array(filtered), total / count, np.array(limits)


def off_removed(shrink: float) -> float:
    """Return how far the polynomial that stands for lowered eigenvalues is from that of SciPy's SLSQP, on [0, 1].

    Nearest to 1 / (1 + max(v - shrink, 0)) in the mean square, between 0 and 1, with the value 0 and the slope 1 at 0.
    """
    low, high = (1 - math.sqrt(1 / 3)) ** 2, (1 + math.sqrt(1 / 3)) ** 2
    noise, far, near = np.linspace(low, high, 801), np.geomspace(high, 1e3, 401), np.linspace(0, low, 101)
    density = np.sqrt((high - noise) * (noise - low)) / noise  # of Marchenko and Pastur
    v = np.concatenate((noise, far, near))
    weights = np.concatenate((4 * density / density.sum(), far / 401, np.full(101, 1e-3)))
    share, inside = 1 / (1 + v), np.linspace(0, 1, 1001)

    def powers(b: Floats) -> Floats:
        return np.stack([b**2 * np.polynomial.Legendre.basis(k)(2 * b - 1) for k in range(8)], axis=1)

    root = np.sqrt(weights)[:, None]
    basis, triangle = np.linalg.qr(root * powers(share))
    wanted = root[:, 0] * (1 / (1 + np.maximum(v - shrink, 0)) - share)
    rows = np.linalg.solve(triangle.T, powers(inside).T).T
    found = minimize(
        lambda c: float(np.sum((basis @ c - wanted) ** 2)), np.zeros(8), jac=lambda c: 2 * (c - basis.T @ wanted),
        method="SLSQP", options={"ftol": 1e-15, "maxiter": 500},
        constraints={
            "type": "ineq",
            "fun": lambda c: np.concatenate((inside + rows @ c, 1 - 1e-4 - inside - rows @ c)),
            "jac": lambda c: np.concatenate((rows, -rows)),
        },
    )  # fmt: skip
    ours = inside * np.polynomial.Polynomial(Stage(shrink=shrink).powers)(2 * inside - 1)
    return float(np.abs(ours - inside - rows @ found.x).max())


# ---- the same as a step of the flow of E


def one_stage(
    name: str, noisy: Floats, guide: Floats, axis: int | None, options: dict[str, int], worst: Worst
) -> Floats:
    """Take one step, from the tokens of the guide; return the image that it gives."""
    removed = REMOVED * SIGMA**2 if guide is noisy else 0.0
    groups = PatchGroups(guide, channel_axis=axis, **options)
    f, start = groups.lift(noisy), groups.lift(guide)
    fidelity = groups.covariance(guide, noise_variance=removed)[:, None] / SIGMA**2
    energy = E(groups.affinity(), f, fidelity, measure="degree")
    flow = GradientFlow(energy, metric="degree")
    stage = solve_to_end(flow, start, t=1, integrator=SemiImplicit())
    result = groups.aggregate(stage.final)

    p, r, n = options["patch_size"], options["search_radius"], options["members"]
    places = plain_groups(guide, groups.positions[:, 0], p, r, n)
    worst.groups = largest(worst.groups, float(np.sum(groups.positions != np.array(places))))
    tokens, image, limits = plain_filter(noisy, guide, places, p, removed)
    size = float(np.abs(noisy).max())
    worst.step = largest(worst.step, float(np.abs(stage.final - tokens).max()) / size)
    worst.image = largest(worst.image, float(np.abs(result - image).max()) / size)
    worst.limit = largest(worst.limit, float(np.abs(energy.minimizer(rtol=1e-13).u - limits).max()) / size)
    matrix = energy.fidelity_in("degree")
    solved = np.linalg.solve(np.eye(f.shape[-1]) + 0.7 * fidelity, f[..., None])[..., 0]
    worst.damped = largest(worst.damped, float(np.abs(matrix.damped(f, 0.7) - solved).max()) / size)
    pull = (1 + energy.fidelity_in("degree").bounds()[1]) * size
    worst.gradient = largest(worst.gradient, float(np.abs(energy.gradient(limits, "degree")).max()) / pull)

    moved = stage.final - start
    pulled = energy.fidelity_in("degree").times(moved)
    drop = 2 * 0.5 * float(np.sum(moved * (moved + pulled + flow.average(moved))))  # every degree of K = k + k^T is 2
    worst.drop = largest(worst.drop, abs(float(stage.energy[0] - stage.energy[1]) / drop - 1))
    worst.least = smallest(worst.least, float(stage.energy[0] - stage.energy[1]) / float(stage.energy[0]))
    return np.asarray(result)


def run(context: Context) -> Outcome:
    worst, shown = Worst(), {}
    size = context.pick(64, 32)
    for name, (clean, axis, options) in images(size).items():
        noisy = clean + SIGMA * np.random.default_rng(0).standard_normal(clean.shape)
        estimates = [noisy]
        for number in (1, 2):
            context.step(f"{name}, stage {number}")
            estimates.append(one_stage(name, noisy, estimates[-1], axis, options, worst))
        worst.psnr[name] = [
            round(20 * math.log10(255 / float(np.sqrt(np.mean((u - clean) ** 2)))), 2) for u in estimates
        ]
        shown[name] = (clean, estimates)
    checks = [
        Check("members of groups that differ from those found by loops", worst.groups, 0),
        Check("step against mean + C (C + σ²I)⁻¹ (patch − mean), np.linalg.solve per group", worst.step, 1e-12),
        Check("image put together against one by loops", worst.image, 1e-12),
        Check("minimizer of E against its closed form", worst.limit, 1e-12),
        Check("polynomial of lowered eigenvalues against SciPy's SLSQP", off_removed(REMOVED), 1e-6),
        Check("(I + 0.7 Λ)⁻¹ f against np.linalg.solve", worst.damped, 1e-12),
        Check("gradient of E at the closed form", worst.gradient, 1e-13),
        Check("drop of E in a step over ½⟨δ, (I + Λ + P) δ⟩, minus 1", worst.drop, 1e-9),
        Check("drop of E in a step, smallest relative to E", worst.least, 1e-3, at_least=True),
        Check(
            "gain of the first stage, smallest (dB)", smallest(*(p[1] - p[0] for p in worst.psnr.values())), 3.0, True
        ),
    ]
    caption = (
        "Photograph, colour image and signal: noisy (σ = 25), after one step from the noisy patches, and after one "
        "more with groups and covariances of the result; grey: the clean signal."
    )
    return Outcome(checks, {caption: _figure(shown, worst.psnr)}, {"psnr": worst.psnr})


def _figure(shown: dict[str, Any], psnr: dict[str, list[float]]) -> Figure:
    figure = new_figure(9, 6.2, dpi=110)
    axes = figure.subplots(3, 3, gridspec_kw={"height_ratios": [3, 3, 2]})
    for row, name in enumerate(("photograph", "colour", "signal")):
        clean, estimates = shown[name]
        for axis, estimate, title, value in zip(
            axes[row], estimates, ("noisy", "one step", "two steps"), psnr[name], strict=True
        ):
            axis.set_title(f"{title}: {value:.1f} dB", fontsize=9)
            if clean.ndim == 1:
                axis.plot(clean, color="0.7", linewidth=2)
                axis.plot(estimate, linewidth=0.8)
                axis.tick_params(labelsize=7)
                axis.spines[["top", "right"]].set_visible(False)
            else:
                axis.imshow(np.clip(estimate / 255, 0, 1), cmap="gray", vmin=0, vmax=1, interpolation="nearest")
                axis.set_axis_off()
    return figure


CLAIM = Claim(
    name="nonlocal-bayes",
    title="The step with a matrix fidelity is the nonlocal Bayes filter",
    statement=(
        "Tokens are the patches of a group, Pu their mean, C their covariance, Λ = C/σ². One semi-implicit step of "
        "length 1 of the flow of E in the degree metric, (I + Λ)⁻¹ (Pu + Λf), is the filter "
        "Pu + C (C + σ²I)⁻¹ (f − Pu). On a group E has the minimizer f̄ + C (C + σ²I)⁻¹ (f − f̄), which one step from "
        "f reaches; a step δ lowers E by ½⟨δ, (I + Λ + P) δ⟩. Two stages on a photograph, a colour image and a signal, "
        "the second with groups and covariances of the first one's result, against loops that know no flow: search, "
        "filter by np.linalg.solve for each group, patches put back. Errors relative to the largest value."
    ),
    source="Lebrun, Buades, Morel 2013 (doi 10.1137/120874989); derived",
    run=run,
)
