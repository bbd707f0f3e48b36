"""Which eigenvalue rules X ← X + A X W: that of equal tokens, or the one that sharpens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from nlflow import ExpDotProduct, Gaussian, Grid, Points, affinity, from_matrix
from nlflow.plotting import new_figure
from nlflow.plotting.base import PALETTE, finish
from validation.harness import Check, Claim, Context, Outcome, largest
from validation.networks import embeddings, libraries, minilm, on_one_thread, read, traced
from validation.plain_transformer import plain_copy, token_similarity

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Floats = NDArray[np.float64]

CHANNELS = 3
LAYERS = 60  # of the drawn courses


def matrices() -> dict[str, Floats]:
    """Return row-stochastic A with real eigenvalues, α_min above, near and below 0."""
    rng = np.random.default_rng(50)
    ring = np.roll(np.eye(9), 1, axis=1) + np.roll(np.eye(9), -1, axis=1)
    cases = {
        "Gaussian": affinity(Gaussian(1.0), Grid(12)),
        "attention, q = k": affinity(ExpDotProduct(), Points(np.zeros(10)), rng.standard_normal((10, 6))),
        "ring with self-weight 0.4": from_matrix(ring + 0.4 * np.eye(9), Points(np.zeros(9))),
    }
    return {name: np.asarray(one.average(np.eye(one.domain.size))) for name, one in cases.items()}


def predicted(omega: float, lowest: float) -> float:
    """Return which α has the largest |1 + ωα|, of those from α_min to 1."""
    return lowest if -2 / (1 + lowest) < omega < 0 else 1.0


def heads_of_minilm(context: Context) -> dict[str, Any]:
    """Compare max |1 + ω_j α_i| of each head, W = W_V W_O, with the measured growth of X ← X + A X W."""
    model = minilm()
    trace = traced(model, read(0))
    plain = plain_copy(model)
    blocks = plain.run(embeddings(trace))
    steps = context.pick(3000, 500)
    rng = np.random.default_rng(51)
    errors, smoothing, count, undecided = [], 0, 0, 0
    for number in context.pick(range(6), (0, 5)):
        context.step(f"MiniLM, layer {number + 1}")
        weights, a = plain.layers[number], blocks[number].a
        width = a.shape[0], len(weights.out[0]) // a.shape[0]
        w_v = weights.v[0].reshape(-1, *width).transpose(1, 0, 2)  # (H, D, d)
        w_o = weights.out[0].reshape(*width, -1)  # (H, d, D)
        # What matters of X is Z = X W_V, for which the map is Z + A Z (W_O W_V).
        inner = w_o @ w_v
        alphas, omegas = np.linalg.eigvals(a), np.linalg.eigvals(inner)
        sizes = np.abs(1 + omegas[:, None, :] * alphas[:, :, None])
        z = rng.standard_normal((len(a), a.shape[1], width[1]))
        logs = []
        for _ in range(steps):
            z = z + a @ z @ inner
            length = np.linalg.norm(z, axis=(1, 2), keepdims=True)
            logs.append(np.log(length[:, 0, 0]))
            z = z / length
        measured = np.exp(np.mean(logs[steps // 2 :], axis=0))
        expected = sizes.max(axis=(1, 2))
        errors += list(np.abs(measured / expected - 1))
        unity = np.abs(alphas - 1).argmin(axis=1)
        best = sizes.max(axis=2)  # of each α
        others = np.where(np.arange(a.shape[1]) == unity[:, None], 0, best).max(axis=1)
        mine = best[np.arange(len(a)), unity]
        smoothing += int((mine > others).sum())
        undecided += int((np.abs(mine / others - 1) < 1e-3).sum())
        count += len(a)
    return {"error": max(errors), "heads": count, "ruled by α = 1": smoothing, "nearly equal": undecided}


def signed_courses() -> dict[str, list[float]]:
    """Return t_sim by layer with the package's projection of one sign."""
    torch, _ = libraries()
    from nlflow.attention import SignedProjection

    a = torch.from_numpy(matrices()["attention, q = k"])
    courses = {}
    for kind in ("sharpening", "smoothing"):
        random = torch.Generator().manual_seed(52)
        projection = SignedProjection(6, kind, generator=random, dtype=torch.float64)
        x = torch.randn(10, 6, generator=random, dtype=torch.float64) + 0.3
        courses[kind] = [token_similarity(x.numpy())]
        with torch.no_grad():
            projection.psi.clamp_(min=0.5)  # no direction in which next to nothing happens
            for _ in range(LAYERS):
                x = x + a @ projection(x)
                x = x / torch.linalg.norm(x)
                courses[kind].append(token_similarity(x.numpy()))
    return courses


@on_one_thread
def run(context: Context) -> Outcome:
    grid = np.linspace(-4, 1, context.pick(401, 51))
    rng = np.random.default_rng(53)
    spectrum_error, largest_error, wrong, near = 0.0, 0.0, 0, 0
    drawn = {}
    for name, a in matrices().items():
        context.step(name)
        n = len(a)
        alphas, vectors = np.linalg.eig(a)
        alphas, vectors = alphas.real, vectors.real
        lowest = float(alphas.min())
        # A W with different eigenvalues: all eigenvalues of the whole map.
        basis = rng.standard_normal((CHANNELS, CHANNELS))
        omegas = np.array([-1.3, -0.4, 0.7])
        w = basis @ np.diag(omegas) @ np.linalg.inv(basis)
        dense = np.sort(np.linalg.eigvals(np.eye(n * CHANNELS) + np.kron(w.T, a)).real)
        spectrum_error = largest(
            spectrum_error, float(np.abs(dense - np.sort(np.ravel(1 + omegas[:, None] * alphas))).max())
        )
        sizes = []
        for omega in grid:
            dense_map = np.eye(n * CHANNELS) + np.kron(omega * np.eye(CHANNELS), a)
            found = float(np.abs(np.linalg.eigvals(dense_map)).max())
            alpha = predicted(float(omega), lowest)
            largest_error = largest(largest_error, abs(found - abs(1 + omega * alpha)))
            sizes.append((abs(1 + omega), abs(1 + omega * lowest)))
            others = np.abs(1 + omega * alphas)
            ranked = np.sort(others)
            if ranked[-2] > 0.999 * ranked[-1]:
                near += 1
                continue
            # What many layers leave: the eigenvector that is predicted, in every channel.
            x = np.linalg.matrix_power((np.eye(n) + omega * a) / ranked[-1], 20_000) @ rng.standard_normal(
                (n, CHANNELS)
            )
            target = vectors[:, np.abs(alphas - alpha).argmin()]
            along = np.outer(target, target @ x) / (target @ target)
            wrong += not np.linalg.norm(x - along) < 1e-6 * np.linalg.norm(x)
        drawn[name] = (lowest, np.array(sizes))
    heads = heads_of_minilm(context)
    courses = signed_courses()
    checks = [
        Check("eigenvalues of I + Wᵀ⊗A against 1 + ω_j α_i", spectrum_error, 1e-12),
        Check("largest |eigenvalue| against |1 + ωα| with the predicted α, over all ω", largest_error, 1e-11),
        Check("ω for which many layers leave another eigenvector than predicted", wrong, 0),
        Check("heads of MiniLM: measured growth against max |1 + ω_j α_i|, relative", heads.pop("error"), 0.01),
        Check("SignedProjection, smoothing: t_sim in the end", courses["smoothing"][-1], 0.999, at_least=True),
        Check("SignedProjection, sharpening: t_sim in the end", courses["sharpening"][-1], 0.02),
    ]
    details = {
        "α_min": {name: lowest for name, (lowest, _) in drawn.items()},
        "ω left aside, two eigenvalues within 0.1 %": near,
        "heads of MiniLM": heads,
    }
    return Outcome(checks, {CAPTION: draw(grid, drawn, courses)}, details)


def draw(grid: Floats, drawn: dict[str, tuple[float, Floats]], courses: dict[str, list[float]]) -> Figure:
    figure = new_figure(12.4, 3.6, dpi=130)
    panels = figure.subplots(1, len(drawn) + 1)
    for axis, (name, (lowest, sizes)) in zip(panels, drawn.items(), strict=False):
        axis.plot(grid, sizes[:, 0], color=PALETTE[0], label="α = 1: equal tokens")
        axis.plot(grid, sizes[:, 1], color=PALETTE[1], label="α = α_min: sharpening")
        axis.axvspan(max(-2 / (1 + lowest), grid[0]), 0, color=PALETTE[1], alpha=0.12, linewidth=0)
        finish(axis, f"{name}\nα_min = {lowest:.2f}", "ω", "|1 + ωα|")
    panels[0].legend(fontsize=8.5, frameon=False)
    for number, (kind, values) in enumerate(reversed(courses.items())):
        panels[-1].plot(values, color=PALETTE[number], label=kind)
    finish(panels[-1], "SignedProjection\nattention, q = k", "layer", "t_sim")
    panels[-1].legend(fontsize=8.5, frameon=False)
    return figure


CAPTION = (
    "|1 + ωα| of equal tokens (α = 1) and of α_min over ω; where −2/(1 + α_min) < ω < 0 (shaded) α_min rules, and "
    "layers sharpen. Right: t_sim by layer with the package's projections of either sign, normalized in each layer."
)

CLAIM = Claim(
    name="sharpening-eigenvalue",
    title="Which eigenvalue rules X ← X + AXW: smoothing and sharpening",
    statement=(
        "The layer X ← X + A X W has the eigenvalues 1 + ω_j α_i, α of A and ω of W. For ω > 0 that of α = 1 is the "
        "largest in modulus, and tokens become equal; for −2/(1 + α_min) < ω < 0 that of α_min is, and what tells "
        "tokens apart grows; below, α = 1 again. Held against dense eigenvalues of I + Wᵀ⊗A and against what many "
        "layers leave, for ω from −4 to 1. For trained heads (W = W_V W_O and the attention matrix of a passage), "
        "whose eigenvalues are complex, the measured growth is max |1 + ω_j α_i|; the details tell in how many of "
        "them α = 1 rules."
    ),
    source="arXiv 2401.04301; range of ω derived",
    run=run,
)
