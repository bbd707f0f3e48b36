"""The verdicts on layers, smoothing or sharpening, against what many layers leave."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from validation.harness import Check, Claim, Context, Outcome
from validation.networks import libraries, minilm, on_one_thread, read
from validation.plain_transformer import token_similarity

Floats = NDArray[np.float64]

LAYERS = 4096
MARGIN = 0.02  # between the two rates: nearer models take more layers to show which they are
ALIKE = 1e-6  # of the tokens' squared length: what tells them apart is gone


def stochastic(rng: np.random.Generator, count: int, *, reversible: bool) -> Floats:
    """Return a stochastic matrix, with real eigenvalues where it is reversible."""
    weights = np.exp(1.5 * rng.standard_normal((count, count)))
    weights = weights + weights.T if reversible else weights
    if rng.random() < 0.5:  # little weight on oneself: eigenvalues below 0
        np.fill_diagonal(weights, 0.05)
    return np.asarray(weights / weights.sum(axis=1, keepdims=True))


def one_head(rng: np.random.Generator) -> tuple[Floats, Floats, Floats]:
    """Return P (1, N, N), V and O of one head whose W has real eigenvalues that are drawn."""
    count, width = int(rng.integers(3, 10)), int(rng.integers(2, 5))
    basis = np.eye(width) + 0.5 * rng.standard_normal((width, width))
    omegas = rng.uniform(-3, 1, width) * rng.choice([0.3, 1.0])
    inverse = np.asarray(np.linalg.inv(basis), np.float64)
    return stochastic(rng, count, reversible=True)[None], basis[None] * omegas, inverse[None]


def several_heads(rng: np.random.Generator) -> tuple[Floats, Floats, Floats]:
    """Return P (H, N, N), V and O of a few heads, with any eigenvalues."""
    count, width, heads = int(rng.integers(3, 10)), int(rng.integers(2, 5)), int(rng.integers(2, 4))
    matrices = np.stack([stochastic(rng, count, reversible=False) for _ in range(heads)])
    values = rng.standard_normal((heads, width, 2)) - 0.3 * np.eye(width, 2)
    return matrices, values, 0.6 * values.transpose(0, 2, 1) * rng.choice([-1.0, 1.0], (heads, 2, 1))


def left_alike(matrices: Floats, values: Floats, output: Floats, rng: np.random.Generator) -> bool:
    """Return whether many layers X <- X + sum_h P_h X V_h O_h leave tokens that are equal."""
    size = matrices.shape[1] * values.shape[1]
    whole = np.eye(size) + sum(
        np.kron(p, (v @ o).T) for p, v, o in zip(matrices, values, output, strict=True)
    )  # fmt: skip
    power = whole
    for _ in range(int(np.log2(LAYERS))):
        power = power @ power
        power = power / np.linalg.norm(power)
    x = (power @ rng.standard_normal(size)).reshape(matrices.shape[1], values.shape[1])
    return token_similarity(x) > 1 - ALIKE


def verdicts(context: Context) -> dict[str, Any]:
    """Compare the verdicts on random models with what many layers leave."""
    from nlflow.attention import ruling
    from nlflow.attention.probing.verdicts import NEITHER, SMOOTHING, ruling_of_heads

    rng = np.random.default_rng(60)
    wanted, wrong, apart = context.pick(500, 100), 0, 0
    counts = {"smoothing": 0, "sharpening": 0}
    tried = 0
    while sum(counts.values()) < wanted:
        tried += 1
        single = tried % 2 == 0
        matrices, values, output = one_head(rng) if single else several_heads(rng)
        found = ruling_of_heads(matrices, values, output)
        if found.verdict == NEITHER or abs(found.smooth / found.other - 1) < MARGIN:
            continue
        counts[found.verdict] += 1
        wrong += (found.verdict == SMOOTHING) != left_alike(matrices, values, output, rng)
        if single:  # by the products of eigenvalues
            other = ruling(np.linalg.eigvals(matrices[0]), np.linalg.eigvals(values[0] @ output[0]))
            apart += other.verdict != found.verdict
    return {"wrong": wrong, "apart": apart, **counts, "left out, nearly equal": tried - wanted}


def heads_of_minilm() -> tuple[float, list[float]]:
    """Return how far eigenvalues of W_V W_O are from those of torch, and the largest of each layer."""
    torch, _ = libraries()
    from nlflow.attention import explain

    model = minilm()
    worst, largest = 0.0, []
    with np.errstate(all="ignore"):
        found = explain(model, [read(0), read(1)], nulls=False).spectra()
    for layer, one in zip(found, model.encoder.layer, strict=True):
        value, out = one.attention.self.value.weight, one.attention.output.dense.weight
        for number, head in enumerate(layer.heads):
            part = slice(32 * number, 32 * (number + 1))
            dense = torch.linalg.eigvals(value[part].T @ out[:, part].T).detach().numpy()
            dense = dense[np.argsort(-np.abs(dense))][:32]
            gaps = np.abs(dense[:, None] - head.omegas)
            worst = max(worst, float(gaps.min(axis=0).max()), float(gaps.min(axis=1).max()))
        largest.append(float(layer.omegas[0].real))
    return worst, largest


@on_one_thread
def run(context: Context) -> Outcome:
    found = verdicts(context)
    context.step("MiniLM")
    worst, largest = heads_of_minilm()
    checks = [
        Check("models of which many layers leave something else than the verdict", found.pop("wrong"), 0),
        Check("models of one head: products of eigenvalues against the layer as a whole", found.pop("apart"), 0),
        Check("eigenvalues of W_V W_O of MiniLM's heads against torch's of the whole matrix", worst, 1e-10),
    ]
    return Outcome(checks, details={**found, "largest eigenvalue of W_V W_O, by layer": largest})


CLAIM = Claim(
    name="smoothing-verdicts",
    title="Smoothing or sharpening: the larger of two spectral radii rules",
    statement=(
        "The layer X ← X + Σ_h P_h X W_h keeps equal tokens equal, on which it is I + Σ_h W_h; the rest of its "
        "spectrum is that of what it does to X less its mean token. If the first has the larger spectral radius, many "
        "layers leave equal tokens (smoothing), if the second, tokens that differ (sharpening). For one head these are "
        "max |1 + ω| and max |1 + ωα| over the other eigenvalues α of P. Held against 500 random models of one to "
        "three heads whose radii differ by 2 % or more, each repeated 4096 times. The eigenvalues of W_V W_O of "
        "MiniLM's heads, from matrices of the head's width, are those of torch for the whole matrix."
    ),
    source="arXiv 2401.04301 for one head; several heads derived",
    run=run,
)
