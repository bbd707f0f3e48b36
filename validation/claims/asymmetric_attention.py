"""Attention with queries of its own is no gradient step of J; with q = k, or a reversible P, it is one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from nlflow import Affinity, ExpDotProduct, J, MarkovChain, Points, affinity, from_matrix
from nlflow.plotting import new_figure
from validation.harness import PAPER, Check, Claim, Context, Outcome

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Floats = NDArray[np.float64]

TOKENS, WIDTH = 16, 8  # tokens of an attention head, and what they are wide
SHARPNESS = 3.0  # standard deviation of the logits
CASES = ("queries ≠ keys", "queries = keys", "reversible, k not symmetric")
SHADES = {CASES[0]: "#b03a2e", CASES[1]: "#0b5394", CASES[2]: "#009e73"}
SWEEP = (0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
ROUNDING = 1e-13
NORMAL = 1.96  # 95 % of a normal law lie within so many standard deviations


@dataclass(frozen=True)
class Trial:
    """An attention layer with its signal, beside the matrix k_ij and the symmetric conductances J is made of."""

    sums: Affinity
    k: Floats
    conductances: Floats
    v: Floats


def draw_trial(case: str, trial: int, sharpness: float = SHARPNESS) -> Trial:
    """Random tokens and random projections to queries, keys and values, as in a layer that was never trained."""
    rng = np.random.default_rng([trial, round(1000 * sharpness)])
    x = rng.standard_normal((TOKENS, WIDTH))
    to_query, to_key, to_value = rng.standard_normal((3, WIDTH, WIDTH)) / np.sqrt(WIDTH)
    q, k, v = np.sqrt(sharpness) * x @ to_query, np.sqrt(sharpness) * x @ to_key, x @ to_value
    points = Points(np.zeros(TOKENS), volume=TOKENS)
    if case == "queries = keys":
        matrix = np.exp(k @ k.T / np.sqrt(WIDTH))
        return Trial(affinity(ExpDotProduct(), points, k), matrix, 2 * matrix, v)
    if case == "queries ≠ keys":
        matrix = np.exp(q @ k.T / np.sqrt(WIDTH))
        return Trial(affinity(ExpDotProduct(), points, k, queries=q), matrix, matrix + matrix.T, v)
    # Each query and each key with a weight of its own: k_ij = a_i s_ij b_j, and b_i s_ij b_j is what J sees.
    s = np.exp(k @ k.T / np.sqrt(WIDTH))
    a, b = np.exp(rng.standard_normal((2, TOKENS)))
    matrix = a[:, None] * s * b
    return Trial(from_matrix(matrix, points), matrix, b[:, None] * s * b, v)


def energy(conductances: Floats, u: Floats) -> float:
    """Return ¼ Σ c_ij |u_i − u_j|², as a plain double sum."""
    return float(np.sum(conductances * ((u[:, None] - u[None]) ** 2).sum(axis=2)) / 4)


def change(trial: Trial) -> float:
    """Return (J(Pv) − J(v)) / J(v) for an attention step of the package and double sums."""
    before = energy(trial.conductances, trial.v)
    return energy(trial.conductances, trial.sums.average(trial.v)) / before - 1


def worst_rise(trial: Trial) -> float:
    """Return the largest (J(Pv) − J(v)) / |v|² over all signals v, over the largest J(v) / |v|²."""
    laplacian = np.diag(trial.conductances.sum(axis=1)) - trial.conductances
    p = trial.sums.average(np.eye(TOKENS))
    return float(np.linalg.eigvalsh(p.T @ laplacian @ p - laplacian)[-1] / np.linalg.eigvalsh(laplacian)[-1])


def package_error(trial: Trial) -> float:
    """Return how far the package's J is from the double sum, over the terms of the sum that cancel."""
    functional = J(trial.sums)
    double = energy(trial.k + trial.k.T, trial.v)
    return abs(functional.value(trial.v) - double) / float(trial.k.sum(axis=1) @ (trial.v**2).sum(axis=1))


def wilson(successes: int, trials: int) -> tuple[float, float]:
    """Return the 95 % Wilson interval of a probability."""
    share, square = successes / trials, NORMAL**2 / trials
    centre = (share + square / 2) / (1 + square)
    half = NORMAL / (1 + square) * np.sqrt(share * (1 - share) / trials + square / trials / 4)
    return max(0.0, float(centre - half)), min(1.0, float(centre + half))


def circulation(k: Floats) -> float:
    """Return the largest |log (k_ij k_jl k_li) / (k_ji k_lj k_il)|: 0 exactly where P is reversible (Kolmogorov)."""
    a = np.log(k) - np.log(k).T
    return float(np.abs(a[:, :, None] + a[None] + a.T[:, None, :]).max())


def cosine(trial: Trial, keys_only: Trial) -> float:
    """Return the mean over tokens of the cosine of v − Av with and without queries of their own (E.1).

    Tokens that see only themselves move nowhere and are left out.
    """
    asymmetric, symmetric = (t.v - t.sums.average(t.v) for t in (trial, keys_only))
    lengths = np.linalg.norm(asymmetric, axis=1) * np.linalg.norm(symmetric, axis=1)
    moving = lengths > 0
    return float(np.mean((asymmetric * symmetric).sum(axis=1)[moving] / lengths[moving]))


def run(context: Context) -> Outcome:
    count = context.pick(4000, 1000)
    changes: dict[str, list[float]] = {case: [] for case in CASES}
    anyhow: dict[str, list[float]] = {case: [] for case in CASES}
    turns: dict[str, list[float]] = {case: [] for case in CASES}
    error, wrong, cosines, doubted = 0.0, 0, [], []
    for number in range(count):
        if number % 100 == 0:
            context.step(f"trial {number + 1} of {count}")
        drawn = {case: draw_trial(case, number) for case in CASES}
        for case, trial in drawn.items():
            changes[case].append(change(trial))
            anyhow[case].append(worst_rise(trial))
            turns[case].append(circulation(trial.k))
            error = float(np.maximum(error, package_error(trial)))  # NaN stays NaN
            if number < 100:
                wrong += MarkovChain(trial.sums).reversible is (case == CASES[0])
        cosines.append(cosine(drawn[CASES[0]], drawn[CASES[1]]))
        # The J of k + kᵀ is not what a reversible chain descends.
        last = drawn[CASES[2]]
        doubted.append(change(Trial(last.sums, last.k, last.k + last.k.T, last.v)))
    rises = {case: int(np.sum(~(np.array(values) <= ROUNDING))) for case, values in changes.items()}
    low, high = wilson(rises[CASES[0]], count)
    some = int(np.sum(np.array(anyhow[CASES[0]]) > ROUNDING))
    sweep = {case: [share_rising(case, sharpness, context) for sharpness in SWEEP] for case in CASES[:2]}
    checks = [
        Check("queries ≠ keys: share of trials in which J rises, lower end of its interval", low, 0.01, at_least=True),
        Check("queries ≠ keys: share of layers in which J rises for some signal", some / count, 0.5, at_least=True),
        Check("queries ≠ keys: least circulation (0 for a reversible P)", min(turns[CASES[0]]), 0.1, at_least=True),
        Check("queries = keys: trials in which J rises", rises[CASES[1]], 0),
        Check("queries = keys: share of trials in which J rises, at any sharpness", max(sweep[CASES[1]])[0], 0),
        Check("queries = keys: largest rise for any signal, over max J", float(np.max(anyhow[CASES[1]])), ROUNDING),
        Check("reversible: trials in which the J of the reversible measure rises", rises[CASES[2]], 0),
        Check("reversible: largest rise for any signal, over max J", float(np.max(anyhow[CASES[2]])), ROUNDING),
        Check("reversible: largest circulation", float(np.max(turns[CASES[2]])), 1e-12),
        Check("chains that the package takes for reversible and are not, or the reverse", wrong, 0),
        Check("J of the package against double sums, over the terms that cancel", error, 1e-12),
    ]
    details = {
        "trials": count,
        "share of trials in which J rises, 95 % interval": [rises[CASES[0]] / count, low, high],
        "by standard deviation of the logits": dict(zip(SWEEP, sweep[CASES[0]], strict=True)),
        "reversible: share of trials in which the J of k + kᵀ rises": float(np.mean(np.array(doubted) > 0)),
        "cosine of v − Av with and without queries (mean, standard deviation)": [np.mean(cosines), np.std(cosines)],
    }
    return Outcome(checks, {CAPTION: draw(changes, sweep)}, details)


def share_rising(case: str, sharpness: float, context: Context) -> tuple[float, float, float]:
    """Return the share of trials in which J rises for logits of this standard deviation, with its interval."""
    context.step(f"{case}, logits of standard deviation {sharpness}")
    count = context.pick(2000, 600)
    rises = sum(change(draw_trial(case, number, sharpness)) > ROUNDING for number in range(count))
    return rises / count, *wilson(rises, count)


def draw(changes: dict[str, list[float]], sweep: dict[str, list[tuple[float, float, float]]]) -> Figure:
    figure = new_figure(11, 4.4, dpi=130)
    left, right = figure.subplots(1, 2)
    for case, values in changes.items():
        above = 1 - np.arange(len(values)) / len(values)
        # The curves of q = k and of the reversible case nearly cover each other.
        left.step(np.sort(values), above, color=SHADES[case], linewidth=4 if case == CASES[1] else 2, label=case)
    end = max(0.3, 1.05 * max(changes[CASES[0]]))
    left.axvspan(0, end, color=SHADES[CASES[0]], alpha=0.1, linewidth=0)
    left.axvline(0, color="black", linewidth=1)
    left.set_xlim(-1.02, end)
    left.set_yscale("log")
    left.set_xlabel("relative change of J in one layer, (J(Pv) − J(v)) / J(v)")
    left.set_ylabel("share of trials with at least this change")
    left.legend(fontsize=9, frameon=False, loc="upper right")
    for case, shares in sweep.items():
        share, low, high = np.array(shares).T
        right.errorbar(
            SWEEP, share, yerr=np.maximum([share - low, high - share], 0), color=SHADES[case], marker="o", capsize=3,
            label=case,
        )  # fmt: skip
    right.set_ylim(-0.02, None)
    right.set_xlabel("standard deviation of the logits")
    right.set_ylabel("share of trials in which J rises, 95 % interval")
    right.legend(fontsize=9, frameon=False, loc="upper left")
    for axis in (left, right):
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    return figure


CAPTION = (
    "With queries of their own (red) some attention layers raise J (shaded), the more of them the sharper the "
    "attention; with queries equal to keys (blue) and with a reversible P (green, J of the reversible measure) none "
    "does."
)

CLAIM = Claim(
    name="asymmetric-attention",
    title="Attention with queries of its own is no gradient step of J",
    statement=(
        "The attention step v ← Pv with kᵢⱼ = exp(qᵢ·kⱼ/√d) is a gradient step of a J only if P is reversible. With "
        "q = k it is one, and J never rises, for no signal at all; the same holds for kᵢⱼ = aᵢ sᵢⱼ bⱼ with symmetric "
        "s, which is not symmetric but reversible, and the J of bᵢ sᵢⱼ bⱼ. With queries of their own P is not "
        "reversible (products of kᵢⱼ around triangles depend on the sense of rotation), and J, formed with k + kᵀ, "
        "rises in some random layers. Held against J as a plain double sum, and against the eigenvalues of PᵀLP − L, "
        "which speak for all signals."
    ),
    source=f"derived; {PAPER}, Theorem 1 and E.1",
    run=run,
)
