"""The step with the covariance of the noise is the best linear estimate of the patches of a group."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
from numpy.typing import NDArray
from scipy import signal, stats
from scipy.fft import dct
from scipy.linalg import block_diag

from nlflow import E, GradientFlow, Points, SemiImplicit, from_matrix
from nlflow.denoising.patches import CompiledFilter, Grouping, Groups, Images, Lattice, PlainFilter, Stage
from nlflow.plotting import new_figure
from validation.harness import FALSE_ALARM, Check, Claim, Context, Outcome, bonferroni, largest, smallest

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Floats = NDArray[np.float64]
SIDE = 4
SIZE = SIDE * SIDE
KERNELS = {"blurred": np.outer([1, 2, 1], [1, 2, 1.0]), "streaky": np.ones((1, 4)), "sharpened": np.array([[1, -0.7]])}


def noise_of(kernel: Floats) -> tuple[Floats, Floats]:
    """Return the correlation of white noise after a convolution, by offset, and its matrix for a patch."""
    function = signal.correlate(kernel, kernel, mode="full", method="direct")
    function = function / function.max()
    wide = np.pad(function, [(SIDE, SIDE), (SIDE, SIDE)])
    y, x = (i.ravel() for i in np.indices((SIDE, SIDE)))
    middle = [n // 2 for n in wide.shape]
    return function, wide[np.subtract.outer(y, y) + middle[0], np.subtract.outer(x, x) + middle[1]]


def priors() -> dict[str, Floats]:
    """Return covariances of clean patches: smooth ones, and stripes of any phase."""
    y, x = (i.ravel() for i in np.indices((SIDE, SIDE)))
    square = np.subtract.outer(y, y) ** 2 + np.subtract.outer(x, x) ** 2
    return {
        "smooth": 4 * np.exp(-square / 18.0),
        "stripes": 3 * np.cos(1.3 * np.subtract.outer(x, x) + 0.4 * np.subtract.outer(y, y)) + 0.2 * np.eye(SIZE),
    }


# ---- groups whose tokens and covariance are known


@dataclass(frozen=True)
class Rows:
    """An image of rows of patches side by side; the patches of a row are a group."""

    groups: Groups
    rows: int
    members: int

    @classmethod
    def of(cls, rows: int, members: int) -> Rows:
        shape = (SIDE * rows, SIDE * members)
        lattice = Lattice.of(shape, Grouping(SIDE, members, SIDE * members, SIDE))
        references = np.add.outer(lattice.rows * shape[1], lattice.columns)
        found = np.stack([np.roll(references, -k, axis=1) for k in range(members)], axis=-1)
        found = found.reshape(-1, members)
        return cls(Groups(lattice, found.astype(np.int32), np.full(len(found), members, np.int32)), rows, members)

    def image(self, tokens: Floats) -> Floats:
        """Return tokens (rows, members, SIZE) as planes (1, H, W)."""
        cells = tokens.reshape(self.rows, self.members, SIDE, SIDE)
        return np.ascontiguousarray(np.swapaxes(cells, 1, 2).reshape(1, SIDE * self.rows, SIDE * self.members))

    def tokens(self, image: Floats) -> Floats:
        """Return the tokens of planes (1, H, W)."""
        cells = image.reshape(self.rows, SIDE, self.members, SIDE)
        return np.swapaxes(cells, 1, 2).reshape(self.rows, self.members, SIZE)

    def step(self, filter: Any, noisy: Floats, clean: Floats, variance: float, function: Floats | None) -> Floats:
        """Return the estimates of noisy tokens, with covariances of clean ones."""
        planes = [self.image(tokens) for tokens in (noisy, clean)]
        given = None if function is None else function[None]
        images = Images(planes[0], planes[1], planes[0], np.full((1, 1, 1), variance), given)
        return self.tokens(filter.step(self.groups, images, Stage(shrink=0.0, running=False))[0])


def weighed_by_loops(
    places: NDArray[np.intp], state: Floats, pilot: Floats, observed: Floats, variance: float, stage: Stage
) -> tuple[Floats, Floats]:
    """Return the estimate and the next state of planes, from groups (G, n, SIZE) of samples, in white noise.

    Each sample of an estimate counts by one over the variance that the filter leaves of its noise and of the mean's.
    """
    total = np.zeros((3, state.size))
    for group in places:
        z, clean, seen = (image.ravel()[group] for image in (state, pilot, observed))
        n = len(z)
        left = max(1 - (seen - z).std() / np.sqrt(variance), stage.leave)
        noise, mean = variance * left**2 * stage.factor, z.mean(axis=0)
        matrix = filtered(np.cov(clean.T, bias=True) / noise, stage)
        centred = clean - clean.mean(axis=0)
        between = centred @ centred.T / SIZE
        across = between @ np.linalg.inv(between + max(1, n / SIZE) * noise * np.eye(n))
        u = (1 - stage.across) * (mean + (z - mean) @ matrix.T) + stage.across * (mean + across @ (z - mean))
        kept = (1 - stage.across) * np.diag(matrix) + stage.across * np.diag(across)[:, None]
        weights = 1 / (noise * (kept * (1 - 1 / n) + 1 / n))
        for values, image in zip((u, z + (1 - stage.leave / left) * (u - z), np.ones_like(u)), total, strict=True):
            np.add.at(image, group, weights * values)
    return (total[0] / total[2]).reshape(state.shape), (total[1] / total[2]).reshape(state.shape)


def filtered(own: Floats, stage: Stage) -> Floats:
    """Return C (C + I)⁻¹ for a covariance in units of the noise, with eigenvalues or those of cosines lowered."""
    values, vectors = np.linalg.eigh(own)
    if stage.cosine:
        waves = dct(np.eye(SIDE), norm="ortho", axis=0)
        vectors = np.kron(waves, waves).T
        values = np.maximum(np.diag(vectors.T @ own @ vectors) - stage.shrink, 0)
    gone = 1 / (1 + values)
    if stage.shrink and not stage.cosine:
        gone = gone * np.polynomial.Polynomial(stage.powers)(2 * gone - 1)
    return np.asarray((vectors * (1 - gone)) @ vectors.T)


def off_loops() -> float:
    """Return how far both filters are from loops on overlapping patches, relative to the largest value."""
    rng, shape, variance, worst = np.random.default_rng(5), (14, 17), 1.5, 0.0
    lattice = Lattice.of(shape, Grouping(SIDE, 20, 17, 2))
    rows, columns = (np.arange(SIDE) for _ in range(2))
    patch = (rows[:, None] * shape[1] + columns).ravel()
    clean = 4 * np.sin(np.add.outer(np.arange(14) / 2, np.arange(17) / 3))
    observed = clean + rng.normal(0, np.sqrt(variance), shape)
    state = observed + 0.4 * (clean - observed)
    planes = [np.ascontiguousarray(image.reshape(1, 1, *shape)) for image in (state, clean + 0.1 * state, observed)]
    images = Images(*planes, np.full((1, 1, 1, 1), variance))
    first = np.add.outer(lattice.rows * shape[1], lattice.columns).ravel()
    for members in (12, 20):  # fewer and more than the samples of a patch
        spread = rng.integers(0, shape[0] - SIDE + 1, (len(first), members)) * shape[1]
        spread += rng.integers(0, shape[1] - SIDE + 1, spread.shape)
        spread[:, 0] = first
        groups = Groups(lattice, spread.astype(np.int32), np.full(len(first), members, np.int32))
        for stage in (Stage(leave=0.2), Stage(leave=0.3, across=0.4, factor=1.3), Stage(leave=0.2, shrink=1.2),
                      Stage(leave=0.2, shrink=0.8, cosine=True)):  # fmt: skip
            wanted = weighed_by_loops(spread[..., None] + patch, planes[0], planes[1], planes[2], variance, stage)
            for filter in (PlainFilter(), CompiledFilter()):
                with mock.patch("nlflow.denoising.patches.filters._JOBS", 5):  # of which there are more here
                    found = filter.step(groups, images, stage)
                worst = largest(worst, *(float(np.abs(a - b).max()) for a, b in zip(found, wanted, strict=True)))
    return worst / float(np.abs(observed).max())


def energies() -> float:
    """Return errors of the energy of groups, n Σ |u − ū|² + n Σ ⟨u − z, C (u − z)⟩ in units of the noise, relative."""
    rng, worst = np.random.default_rng(2), 0.0
    layout = Rows.of(6, 20)
    clean = rng.standard_normal((6, 20, SIZE))
    noisy = clean + 0.5 * rng.standard_normal(clean.shape)
    seen = noisy + 0.2 * rng.standard_normal(clean.shape)
    planes = [layout.image(tokens) for tokens in (noisy, clean, seen)]
    for variance, stage in ((1.5, Stage(running=False)), (0.4, Stage(running=False, factor=1.4)),
                            (0.9, Stage(leave=0.1, factor=0.8))):  # fmt: skip
        images = Images(*planes, np.full((1, 1, 1), variance), None)
        told = PlainFilter().energy(layout.groups, images, stage)
        exact = 0.0
        for z, u, first in zip(noisy, clean, seen, strict=True):
            left = max(1 - (first - z).std() / np.sqrt(variance), stage.leave) if stage.running else 1.0
            own = np.cov(u.T, bias=True) / (variance * left**2 * stage.factor)
            pulled = np.einsum("ni,ij,nj", u - z, own, u - z)
            exact += 20 * float(((u - u.mean(axis=0)) ** 2).sum() + pulled) / variance
        worst = largest(worst, abs(told / exact - 1))
    return worst


def mixed_channels() -> float:
    """Return errors of implicit steps and minimizers with a matrix Λ for each node, against dense systems, relative."""
    rng, n, width, worst = np.random.default_rng(8), 9, 3, 0.0
    k, w = rng.random((n, n)), rng.uniform(0.3, 2.0, n) / n
    roots, (u, f) = rng.standard_normal((n, width, width)), rng.standard_normal((2, n, width))
    matrices = roots @ np.swapaxes(roots, 1, 2) + 0.1 * np.eye(width)
    weights, links = from_matrix(k, Points(np.zeros(n), weights=w)), (k + k.T) * w
    degree = links.sum(axis=1)
    for measure, metric, h in product(("l2", "degree"), ("l2", "degree"), (0.1, 5.0)):
        flow = GradientFlow(E(weights, f, matrices, measure=measure), metric)
        rate = degree if metric == "l2" else np.ones(n)
        held = matrices * (rate / degree if measure == "l2" else rate)[:, None, None]
        moved = u + h * rate[:, None] * (links @ u / degree[:, None] - u)
        exact = np.linalg.solve(np.eye(width) + h * held, (moved + h * (held @ f[..., None])[..., 0])[..., None])[
            ..., 0
        ]
        worst = largest(worst, float(np.abs(SemiImplicit(h).step(flow, u, h) - exact).max() / np.abs(exact).max()))
        whole = np.kron(np.diag(rate) - links * (rate / degree)[:, None], np.eye(width))
        pull = block_diag(*held)
        least = np.linalg.solve(whole + pull, pull @ f.ravel()).reshape(n, width)
        found = E(weights, f, matrices, measure=measure).minimizer(rtol=1e-12).u
        velocity = (pull @ (f - u).ravel() - whole @ u.ravel()).reshape(n, width)
        worst = largest(
            worst, float(np.abs(found - least).max()), float(np.abs(flow.velocity(u) - velocity).max() / 50)
        )
    return worst


def with_covariance(members: int, covariance: Floats, rng: np.random.Generator) -> Floats:
    """Return tokens (members, SIZE) whose covariance is exactly that, as far as so many tokens can have it."""
    white = rng.standard_normal((members, SIZE))
    white -= white.mean(axis=0)
    left, _, right = np.linalg.svd(white, full_matrices=False)
    values, vectors = np.linalg.eigh(covariance)
    return np.asarray(np.sqrt(members) * left @ right @ (vectors * np.sqrt(np.maximum(values, 0))) @ vectors.T)


def risk(matrix: Floats, prior: Floats, noise: Floats, members: int) -> float:
    """Return the mean squared error of m + K (z - m), with m the mean of so many tokens, for x of a prior's covariance.

    The error is K y - x + (I - K) m for y = z - E z, m the mean of n such y, and Cov(y, m) = S/n.
    """
    total, rest = prior + noise, np.eye(SIZE) - matrix
    known = np.trace(rest @ prior @ rest.T + matrix @ noise @ matrix.T)
    of_mean = np.trace(rest @ total @ rest.T) + 2 * np.trace(rest @ (matrix @ total - prior).T)
    return float(known + of_mean / members)


def run(context: Context) -> Outcome:
    rows, sizes = context.pick(400, 100), context.pick((24, 48, 96), (24, 48))
    rng = np.random.default_rng(0)
    closed, p_values, gains, excess, curves = 0.0, [], [], [], {}
    for prior_name, prior in priors().items():
        for kernel_name, kernel in KERNELS.items():
            function, shape = noise_of(kernel)
            level = 1.5
            noise = level * shape
            best = prior @ np.linalg.inv(prior + noise)
            white = prior @ np.linalg.inv(prior + level * np.eye(SIZE))
            roots = [np.linalg.cholesky(m + 1e-12 * np.eye(SIZE)) for m in (prior, noise)]
            for members in sizes:
                context.step(f"{prior_name} patches, {kernel_name} noise, {members} members")
                layout = Rows.of(rows, members)
                clean, added = (rng.standard_normal((rows, members, SIZE)) @ root.T for root in roots)
                clean += rng.normal(0, 10, (rows, 1, SIZE))
                pilot = np.broadcast_to(with_covariance(members, prior, rng), clean.shape)
                errors = []
                for matrix, given in ((best, function), (white, None)):
                    u = layout.step(CompiledFilter(), clean + added, pilot, level, given)
                    z = clean + added
                    mean = z.mean(axis=1, keepdims=True)
                    expected = mean + (z - mean) @ matrix.T
                    closed = largest(closed, float(np.abs(u - expected).max() / np.abs(z).max()))
                    squares = np.square(u - clean).sum(axis=2).mean(axis=1)
                    predicted = risk(matrix, prior, noise, members)
                    score = (squares.mean() - predicted) / (squares.std() / np.sqrt(rows))
                    p_values.append(float(2 * stats.t.sf(abs(score), rows - 1)))
                    errors.append((float(squares.mean()), predicted))
                plain = layout.step(PlainFilter(), clean + added, pilot, level, function)
                closed = largest(closed, float(np.abs(plain - (mean + (z - mean) @ best.T)).max() / np.abs(z).max()))
                gains.append(errors[1][0] / errors[0][0])
                curves.setdefault((prior_name, kernel_name), []).append((members, errors))
                shown = (
                    np.trace(prior - best @ prior) + np.trace(noise @ np.linalg.inv(prior + noise) @ noise) / members
                )
                closed = largest(closed, abs(errors[0][1] / float(shown) - 1))
            excess += _others(best, prior, roots, rng, context.pick(400, 100))
    checks = [
        Check("overlapping patches put together by their variances, against loops, relative", off_loops(), 1e-10),
        Check("steps and minimizers with a matrix for each node against dense systems", mixed_channels(), 1e-9),
        Check("energies of groups against sums written out, relative", energies(), 1e-10),
        Check("steps against mean + C (C + Σ)⁻¹ (z − mean), np.linalg.inv", closed, 1e-10),
        Check(
            f"{len(p_values)} mean squared errors against the closed form: smallest p × their number",
            bonferroni(p_values), FALSE_ALARM, at_least=True,
        ),
        Check("error of the step that takes Σ for white, over that with Σ: smallest", smallest(*gains), 1.0, True),
        Check("excess of other linear maps on the same samples, smallest", smallest(*dict(excess).values()), 0.0, True),
    ]  # fmt: skip
    captions = (
        "Mean squared error of a patch by the members of its group: sampled (dots), closed form (lines); with Σ, and "
        "with white noise of the same trace.",
        "Other linear maps, drawn at random around C (C + Σ)⁻¹: what they lose on samples, by their distance from it.",
    )
    figures = dict(zip(captions, (_by_members(curves), _by_distance(excess)), strict=True))
    return Outcome(checks, figures, {"gains": gains, "p_values": p_values})


def _others(
    best: Floats, prior: Floats, roots: list[Floats], rng: np.random.Generator, count: int
) -> list[tuple[float, float]]:
    """Return how far random linear maps are from the best one, and what they lose, relative to its error.

    All are tried on the same samples, 50 000 of them; directions are random, distances from 0.1 to 3.
    """
    clean, added = (rng.standard_normal((50_000, SIZE)) @ root.T for root in roots)
    noisy = clean + added
    second, cross = noisy.T @ noisy / len(noisy), clean.T @ noisy / len(noisy)
    power = float(np.trace(clean.T @ clean)) / len(noisy)

    def error(matrix: Floats) -> float:
        return power - 2 * float(np.sum(matrix * cross)) + float(np.sum((matrix @ second) * matrix))

    least, result = error(best), []
    for distance in np.geomspace(0.1, 3, count):
        direction = rng.standard_normal(best.shape)
        direction *= distance * np.linalg.norm(best) / np.linalg.norm(direction)
        result.append((float(distance), error(best + direction) / least - 1))
    for own in (np.eye(SIZE), np.zeros_like(best), best.T, np.diag(np.diag(best))):
        result.append((float(np.linalg.norm(own - best) / np.linalg.norm(best)), error(own) / least - 1))
    return result


def _by_members(curves: dict[tuple[str, str], list[Any]]) -> Figure:
    figure = new_figure(9, 5, dpi=110)
    axes = figure.subplots(2, 3, sharex=True)
    for axis, ((prior, kernel), points) in zip(axes.ravel(), curves.items(), strict=True):
        members = [n for n, _ in points]
        for index, label in enumerate(("with Σ", "white")):
            (line,) = axis.plot(members, [e[index][1] for _, e in points], linewidth=1)
            axis.plot(members, [e[index][0] for _, e in points], "o", color=line.get_color(), markersize=4, label=label)
        axis.set_title(f"{prior} patches, {kernel} noise", fontsize=9)
        axis.set_ylim(bottom=0)
        axis.tick_params(labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0, 0].legend(fontsize=8, frameon=False)
    for axis in axes[-1]:
        axis.set_xlabel("members", fontsize=8)
    return figure


def _by_distance(excess: list[tuple[float, float]]) -> Figure:
    figure = new_figure(5.5, 3.4, dpi=110)
    axis = figure.subplots()
    axis.loglog(*zip(*excess, strict=True), ".", markersize=3)
    axis.set_xlabel("distance from C (C + Σ)⁻¹, relative to it", fontsize=8)
    axis.set_ylabel("relative excess of the error", fontsize=8)
    axis.tick_params(labelsize=8)
    axis.spines[["top", "right"]].set_visible(False)
    return figure


CLAIM = Claim(
    name="correlated-noise",
    title="The step with Σ is the best linear estimate of a group",
    statement=(
        "Patches of a group have the covariance C, and Gaussian noise of the covariance Σ. One semi-implicit step of "
        "the flow of E with the fidelity Λ = C Σ⁻¹ is m + C (C + Σ)⁻¹ (z − m). Sampled from priors of smooth patches "
        "and of stripes, with blurred noise, streaks and noise of high frequencies, its mean squared error is "
        "tr(C − C (C + Σ)⁻¹ C), and tr(Σ (C + Σ)⁻¹ Σ)/n more for the mean m of n patches. No other linear map does "
        "better: neither the step that takes the noise for white with the same trace, nor random ones on the same "
        "samples. Means are held against the closed form by t tests with a false-alarm rate of "
        f"{FALSE_ALARM:g} (Bonferroni; seeds are fixed, so it is decided once)."
    ),
    source="Derived (Gauss and Markov; Lebrun, Buades, Morel 2013, doi 10.1137/120874989, for white noise)",
    run=run,
)
