"""The linear rate at which averages make tokens equal, and its bound for one application."""

from __future__ import annotations

import numpy as np

from validation.harness import Check, Claim, Context, Outcome, largest
from validation.networks import minilm, on_one_thread, read, traced

STEPS = 30  # of the slope, after as many


@on_one_thread
def run(context: Context) -> Outcome:
    from nlflow.attention.probing.spectra import eigenvalues_of, rate_of
    from nlflow.attention.probing.verdicts import contraction_of, random_stochastic

    rng = np.random.default_rng(61)
    slope_error, beyond, null_gap = 0.0, 0.0, 0.0
    rates: dict[str, list[float]] = {"trained": [], "random stochastic": []}
    trace = traced(minilm(), read(0))
    heads = [trace.head(layer, head) for layer in context.pick(range(6), (0, 5)) for head in range(12)]
    for head in heads:
        p = head.matrix
        count = len(p)
        centre = np.eye(count) - 1 / count
        mu = rate_of(eigenvalues_of(p))
        rates["trained"].append(mu)
        # Applications of P to what tells tokens apart, with the length taken out: their slope is log |mu_2|.
        x = centre @ rng.standard_normal((count, 8))
        logs = []
        for _ in range(context.pick(40, 20) * STEPS):
            x = centre @ p @ x
            size = np.linalg.norm(x)
            logs.append(np.log(size))
            x = x / size
        slope_error = largest(slope_error, abs(np.exp(np.mean(logs[len(logs) // 2 :])) / mu - 1))
        v = centre @ head.v
        beyond = largest(beyond, float(np.linalg.norm(centre @ p @ head.v) / np.linalg.norm(v)) - contraction_of(p))
        null = rate_of(eigenvalues_of(random_stochastic(count, rng)))
        rates["random stochastic"].append(null)
        null_gap = largest(null_gap, abs(null * np.sqrt(count) - 1))
    checks = [
        Check("slope of |P^n x less its mean| against |mu_2|, relative", slope_error, 0.02),
        Check("values of trained heads: what is left of their differences, less the bound", beyond, 1e-12),
        Check("random stochastic matrices: |mu_2| sqrt(N) less 1", null_gap, 0.5),
    ]
    means = {name: float(np.mean(values)) for name, values in rates.items()}
    return Outcome(checks, details={"mean |mu_2|": means})


CLAIM = Claim(
    name="linear-rate",
    title="Averages make tokens equal at the rate |μ₂|",
    statement=(
        "Repeated averages P^n v lose what tells tokens apart as |μ₂|^n, with 1 − |μ₂| the spectral gap: the linear "
        "rate at which token similarity escalates, since the leading eigenspace of all P, equal tokens, is the same. "
        "In one application no values keep more than |(I − 11ᵀ/N) P| in the 2-norm, which may be above 1. Held "
        "against the attention matrices of MiniLM on a passage. Random stochastic matrices have |μ₂| near 1/√N "
        "(exponential weights), and so mix much faster than trained ones."
    ),
    source="arXiv 2312.06182; null: circular law",
    run=run,
)
