"""Layers as gradient steps: attention and least squares in context, subspace attention and the coding rate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from nlflow.plotting import new_figure
from nlflow.plotting.base import PALETTE, finish
from validation.harness import Check, Claim, Context, Outcome, largest, smallest
from validation.networks import libraries, on_one_thread

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Floats = NDArray[np.float64]

INPUTS = 4  # features of x, and of y
EXAMPLES = 20
RATE = 0.3  # length of a step, times the number of examples
SCALES = (0.1, 0.05, 0.02, 0.01, 0.005, 0.002)  # of the logits of a softmax that is to be linear

TOKENS, WIDTH, HEADS, RANK = 64, 24, 4, 6
PRECISIONS = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)  # ε of the coding rate


# ---- least squares in context (arXiv 2212.07677)


@dataclass(frozen=True)
class Problem:
    """Examples (x_j, y_j), a start W of the regression, and a query without its y."""

    x: Floats
    y: Floats
    start: Floats
    query: Floats


def draw_problem(seed: int) -> Problem:
    rng = np.random.default_rng([60, seed])
    x = rng.standard_normal((EXAMPLES, INPUTS))
    x -= x.mean(axis=0)  # softmax attention takes the mean of the keys away, linear attention does not
    y = x @ rng.standard_normal((INPUTS, INPUTS)) + 0.1 * rng.standard_normal((EXAMPLES, INPUTS))
    return Problem(x, y, rng.standard_normal((INPUTS, INPUTS)), rng.standard_normal(INPUTS))


def descended(problem: Problem, steps: int) -> list[Floats]:
    """Return W after 0, 1, … gradient steps on Σ |W x_j − y_j|² / 2, differentiated by torch."""
    torch, _ = libraries()
    x, y = torch.from_numpy(problem.x), torch.from_numpy(problem.y)
    found = [problem.start]
    for _ in range(steps):
        w = torch.from_numpy(found[-1]).requires_grad_()
        (((x @ w.T - y) ** 2).sum() / 2).backward()
        found.append((w - RATE / EXAMPLES * w.grad).detach().numpy())
    return found


def prompt(problem: Problem) -> Floats:
    """Return tokens (x_j, y_j − W x_j), the last one the query's with y = 0 − W x: what is still to be explained."""
    x = np.vstack([problem.x, problem.query])
    y = np.vstack([problem.y, np.zeros(INPUTS)])
    return np.hstack([x, y - x @ problem.start.T])


def linear_layer(tokens: Floats) -> Floats:
    """Return e_i + P Σ_j W_V e_j (W_K e_j · W_Q e_i) with constructed weights, over the examples j."""
    zero, one = np.zeros((INPUTS, INPUTS)), np.eye(INPUTS)
    look = np.block([[one, zero], [zero, zero]])  # W_K = W_Q: the x of a token
    give = np.block([[zero, zero], [zero, -one]])  # W_V: what is not explained yet, with its sign
    seen = tokens[:EXAMPLES]
    weights = (tokens @ look.T) @ (seen @ look.T).T
    return np.asarray(tokens + RATE / EXAMPLES * (weights @ (seen @ give.T)))


def softmax_layer(scale: float) -> Any:
    """Return the package's layer with two heads of opposite queries: linear attention up to O(s²)."""
    torch, _ = libraries()
    from nlflow.attention import NeutrenoAttention

    layer = NeutrenoAttention(2 * INPUTS, 2, fidelity=0.0, bias=False).double()
    zero, one = np.zeros((INPUTS, INPUTS)), np.eye(INPUTS)
    width = np.sqrt(INPUTS)  # undoes the 1/√d of the logits
    step = RATE / (2 * scale)  # N of the average cancels that of the rate
    weights = {
        "query": [[scale * width * one, zero], [-scale * width * one, zero]],
        "key": [[one, zero], [one, zero]],
        "value": [[zero, -one], [zero, -one]],
        "output": [[zero, zero], [step * one, -step * one]],
    }
    with torch.no_grad():
        for name, blocks in weights.items():
            getattr(layer, name).weight.copy_(torch.from_numpy(np.block(blocks)))
    return layer


def softmax_step(tokens: Floats, scale: float) -> Floats:
    torch, _ = libraries()
    mask = torch.ones(1, len(tokens), dtype=torch.bool)
    mask[:, EXAMPLES:] = False  # the query's token looks and is not looked at
    with torch.no_grad():
        moved, _ = softmax_layer(scale)(torch.from_numpy(tokens)[None], mask=mask)
    return tokens + np.asarray(moved[0].numpy())


def least_squares(context: Context) -> tuple[dict[str, float], list[float]]:
    """Return the largest errors of predictions of layers, and those of softmax layers by scale."""
    one, many, softmax = 0.0, 0.0, np.zeros(len(SCALES))
    depth = context.pick(20, 8)
    for seed in range(context.pick(20, 5)):
        problem = draw_problem(seed)
        course = descended(problem, depth)
        tokens = prompt(problem)
        explained = -tokens[-1, INPUTS:]  # W x of the query
        assert np.allclose(explained, problem.start @ problem.query)
        for place, scale in enumerate(SCALES):
            predictions = softmax_step(tokens, scale)[:, INPUTS:]
            expected = linear_layer(tokens)[:, INPUTS:]
            softmax[place] = largest(
                softmax[place], float(np.abs(predictions - expected).max() / np.abs(expected).max())
            )
        for number in range(1, depth + 1):
            tokens = linear_layer(tokens)
            expected = course[number] @ problem.query
            error = float(np.abs(-tokens[-1, INPUTS:] - expected).max() / np.abs(expected).max())
            residual = problem.y - problem.x @ course[number].T
            error = largest(error, float(np.abs(tokens[:EXAMPLES, INPUTS:] - residual).max() / np.abs(residual).max()))
            many = largest(many, error)
            one = largest(one, error) if number == 1 else one
    return {"one": one, "many": many, "depth": depth}, list(softmax)


# ---- the coding rate of subspaces (arXiv 2306.01129)


def coding_rate_gradient(z: Floats, bases: Floats, beta: float) -> Floats:
    """Return the derivative of ½ Σ_k log det(I + β z_kᵀ z_k), z_k = U_kᵀ z the (p, n) tokens in a subspace."""
    torch, _ = libraries()
    tokens = torch.from_numpy(z).requires_grad_()
    parts = torch.from_numpy(bases).transpose(-1, -2) @ tokens
    gram = torch.eye(z.shape[1], dtype=torch.float64) + beta * parts.transpose(-1, -2) @ parts
    (torch.linalg.slogdet(gram)[1].sum() / 2).backward()
    return np.asarray(tokens.grad.numpy())


def subspace_attention(z: Floats, bases: Floats) -> Floats:
    """Return Σ_k U_k z_k softmax(z_kᵀ z_k), by the package's average with q = k = v."""
    torch, _ = libraries()
    from nlflow.attention.terms.averages import average

    parts = torch.from_numpy(np.ascontiguousarray(np.swapaxes(np.swapaxes(bases, 1, 2) @ z, 1, 2)))[None]
    averages, _ = average(parts, parts, parts, "symmetric", scaling=1.0)
    return np.asarray((bases @ np.swapaxes(averages[0].numpy(), 1, 2)).sum(axis=0))


def cosine(a: Floats, b: Floats) -> float:
    return float((a * b).sum() / (np.linalg.norm(a) * np.linalg.norm(b)))


def coding_rate(context: Context) -> dict[float, dict[str, list[float]]]:
    """Return, for each ε and draw, cosines of the gradient with the way of the layer, and their bounds."""
    found: dict[float, dict[str, list[float]]] = {}
    for eps in PRECISIONS:
        course: dict[str, list[float]] = {name: [] for name in (LINEAR, LINEAR_BOUND, SOFTMAX, BOUND, CONTROL, BEYOND)}
        for seed in range(context.pick(50, 10)):
            rng = np.random.default_rng([61, seed])
            bases = np.linalg.qr(rng.standard_normal((WIDTH, WIDTH)))[0].reshape(WIDTH, HEADS, RANK).transpose(1, 0, 2)
            # Each token near one of the subspaces, as the layer wants them; of length √WIDTH, as a norm leaves them.
            z = np.concatenate(
                [u @ rng.standard_normal((RANK, TOKENS // HEADS)) for u in bases], axis=1
            ) + 0.3 * rng.standard_normal((WIDTH, TOKENS))
            z *= np.sqrt(WIDTH) / np.linalg.norm(z, axis=0)
            beta = RANK / (TOKENS * eps**2)
            gradient = coding_rate_gradient(z, bases, beta) / beta
            parts = np.swapaxes(bases, 1, 2) @ z
            grams = np.swapaxes(parts, 1, 2) @ parts
            linear = z - beta * (bases @ parts @ grams).sum(axis=0)
            attended = subspace_attention(z, bases)
            reach = beta * float(np.linalg.eigvalsh(grams).max())
            course[LINEAR].append(cosine(gradient, linear))
            # In an eigenvector with βg: z/(1 + βg) against z (1 − βg), which differ by (βg)² of the first.
            course[LINEAR_BOUND].append(guaranteed(reach**2))
            course[SOFTMAX].append(cosine(gradient, z - beta * attended))
            # |z/(1+βg) − (z − β A z)| ≤ (βg/(1+βg)) |z| + β |Az|, and the gradient is at least |z| / (1 + βg).
            off = reach / (1 + reach) + beta * float(np.linalg.norm(attended) / np.linalg.norm(z))
            course[BOUND].append(guaranteed(off * (1 + reach)))
            course[CONTROL].append(cosine(gradient, z))
            course[BEYOND].append(cosine(gradient - z, -attended))
        found[eps] = course
    return found


def guaranteed(off: float) -> float:
    """Return the least cosine of two vectors that differ by this part of one of them; −1 where it says nothing."""
    return float(np.sqrt(1 - off**2)) if off < 1 else -1.0


LINEAR, LINEAR_BOUND = "first order: z − β z zᵀz", "bound of the first order"
SOFTMAX, BOUND = "layer: z − β z softmax(zᵀz)", "bound of the layer"
CONTROL, BEYOND = "z alone", "what the layer adds to z"


@on_one_thread
def run(context: Context) -> Outcome:
    context.step("least squares")
    errors, softmax = least_squares(context)
    order = float(np.polyfit(np.log(SCALES[-3:]), np.log(softmax[-3:]), 1)[0])
    context.step("coding rate")
    rates = coding_rate(context)
    margins = [
        a - b
        for course in rates.values()
        for name, bound in ((LINEAR, LINEAR_BOUND), (SOFTMAX, BOUND))
        for a, b in zip(course[name], course[bound], strict=True)
    ]
    told = sum(b > 0 for course in rates.values() for b in (*course[LINEAR_BOUND], *course[BOUND]))
    coarse = rates[PRECISIONS[-1]]
    checks = [
        Check("linear attention with constructed weights against one gradient step, relative", errors["one"], 1e-12),
        Check(f"{errors['depth']} such layers against as many gradient steps, relative", errors["many"], 1e-12),
        Check("softmax layer of the package against linear attention: order in the scale of its logits", order, 0.05,
              expected=2),
        Check(f"the same, relative error at scale {SCALES[-1]}", softmax[-1], 1e-3),
        Check("coding rate: cosine less its bound, least of all", smallest(*margins), -1e-12, at_least=True),
        Check("coding rate: bounds that say something (> 0)", told, 1, at_least=True),
        Check(f"ε = {PRECISIONS[-1]:g}: least cosine of the gradient with the layer", smallest(*coarse[SOFTMAX]),
              smallest(*coarse[BOUND]), at_least=True),
        Check("what the layer adds to z: least cosine with what the gradient adds, mean over draws",
              smallest(*(float(np.mean(course[BEYOND])) for course in rates.values())), 0, at_least=True),
    ]  # fmt: skip
    details = {
        "softmax layer: relative error by scale of the logits": dict(zip(SCALES, softmax, strict=True)),
        "coding rate, mean over draws": {
            f"ε = {eps:g}": {name: float(np.mean(values)) for name, values in course.items()}
            for eps, course in rates.items()
        },
    }
    return Outcome(checks, {CAPTION: draw(softmax, rates)}, details)


def draw(softmax: list[float], rates: dict[float, dict[str, list[float]]]) -> Figure:
    figure = new_figure(10.4, 3.9, dpi=130)
    left, right = figure.subplots(1, 2)
    left.loglog(SCALES, softmax, color=PALETTE[0], marker="o", label="two softmax heads")
    left.loglog(SCALES, [softmax[0] * (s / SCALES[0]) ** 2 for s in SCALES], color="0.5", linestyle="--", label="s²")
    finish(left, "least squares in context", "scale s of the logits", "relative error of one gradient step")
    for number, name in enumerate((LINEAR, SOFTMAX, CONTROL, BEYOND, BOUND)):
        values = [np.mean(course[name]) for course in rates.values()]
        shown = [value if value > -1 else np.nan for value in values]
        right.plot(PRECISIONS, shown, color=PALETTE[number], marker="osD^v"[number], label=name,
                   linestyle=":" if name == BOUND else "-")  # fmt: skip
    right.set_xscale("log")
    right.set_xticks(PRECISIONS, [f"{eps:g}" for eps in PRECISIONS])
    right.minorticks_off()
    finish(right, "coding rate", "ε", "cosine with the gradient")
    for axis in (left, right):
        axis.legend(fontsize=8.5, frameon=False)
    return figure


CAPTION = (
    "Left: two softmax heads with opposite queries give the gradient step up to s², s being the scale of their "
    "logits. Right: cosine of the gradient of the coding rate with the way of subspace attention. For coarse ε both "
    "are nearly z itself (diamonds); what attention adds to it (triangles) is what tells the layer from doing nothing "
    "but shrinking z."
)

CLAIM = Claim(
    name="gradient-steps",
    title="Layers as gradient steps: least squares in context, and the coding rate",
    statement=(
        "Linear attention e_i ← e_i + (η/N) Σ_j W_V e_j (W_K e_j · W_Q e_i) with the weights of arXiv 2212.07677 is "
        "one gradient step of Σ |W x_j − y_j|²/2 over the examples in the context, and k layers are k steps; the "
        "gradient by automatic differentiation. A softmax layer of the package with two heads of opposite queries is "
        "the same up to the square of the scale of its logits, for x of mean 0. Subspace attention (arXiv 2306.01129) "
        "goes z − β z softmax(zᵀz) in each subspace, where the gradient of the coding rate is β z (I + β zᵀz)⁻¹: "
        "their cosine is measured and held above bounds that are derived from the largest eigenvalue of β zᵀz, for ε "
        "from 0.5 to 16 (β = p/(n ε²)). With small ε the bounds say nothing; and z alone, without any attention, is "
        "about as near to the gradient as the layer."
    ),
    source="arXiv 2212.07677, Prop. 1; arXiv 2306.01129, eq. 12-16",
    run=run,
)
