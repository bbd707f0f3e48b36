"""
How much an equilibrium keeps
=============================

Proposition 1 of `arXiv 2312.00751 <https://arxiv.org/abs/2312.00751>`_ says that the flow of E does not run to a
constant. More holds: the equilibrium keeps a fraction of the diversity of f, its distance from its mean, that lies
between two numbers for every f (:func:`nlflow.diversity_bounds`).
"""

import matplotlib.pyplot as plt
import numpy as np

from nlflow import (
    AttentionFlow,
    ExpDotProduct,
    MarkovChain,
    Points,
    affinity,
    diversity,
    diversity_bounds,
    equilibrium,
    fidelity_for_diversity,
)

# %%

rng = np.random.default_rng(0)
keys, queries = rng.standard_normal((2, 48, 8))
tokens = Points(np.arange(48))
kinds = {
    "queries = keys": affinity(ExpDotProduct(), tokens, keys),
    "queries ≠ keys": affinity(ExpDotProduct(), tokens, keys, queries=queries),
}
fidelities = np.logspace(-2, 2, 9)
signals = rng.standard_normal((10, 48))


def kept(weights, f, fidelity):
    """Return the fraction of the diversity of f that the equilibrium has."""
    flow = AttentionFlow(weights, f, fidelity)
    return diversity(flow, equilibrium(flow, rtol=1e-12).u) / diversity(flow, f)


# %%

fractions = {name: np.array([[kept(w, f, s) for s in fidelities] for f in signals]) for name, w in kinds.items()}
bounds = {
    name: np.array([diversity_bounds(AttentionFlow(weights, signals[0], s)) for s in fidelities])
    for name, weights in kinds.items()
}
for name, found in fractions.items():
    assert np.all(found >= bounds[name][:, 0] * (1 - 1e-7))
    assert np.all(found <= bounds[name][:, 1] * (1 + 1e-7))
    print(f"{name}: with fidelity 0.01 random signals keep {found[:, 0].min():.4f} to {found[:, 0].max():.4f}")

# %%
# Eigenvectors of a symmetric flow attain the bounds: that of the second eigenvalue the upper one, that of the smallest
# the lower one.

symmetric = kinds["queries = keys"]
values, vectors = np.linalg.eig(MarkovChain(symmetric).matrix())
order = np.argsort(values.real)
ends = {
    "eigenvector of $\\mu_2$": vectors[:, order[-2]].real,
    "eigenvector of $\\mu_{\\min}$": vectors[:, order[0]].real,
}
attained = {
    name: np.array([kept(symmetric, np.ascontiguousarray(f), s) for s in fidelities]) for name, f in ends.items()
}
for (name, found), column in zip(attained.items(), (1, 0), strict=True):
    gap = np.abs(found / bounds["queries = keys"][:, column] - 1).max()
    print(f"{name} is at its bound to {gap:.0e}")
    assert gap < 1e-7

# %%
# This fidelity keeps at least half of the diversity of any signal (:func:`nlflow.equilibria.fidelity_for_diversity`).

strength = fidelity_for_diversity(AttentionFlow(symmetric), 0.5)
least = min(kept(symmetric, f, strength) for f in [*signals, *map(np.ascontiguousarray, ends.values())])
print(f"fidelity {strength:.3f} keeps at least {least:.6f}")
assert least >= 0.5 * (1 - 1e-7)

figure, axes = plt.subplots(1, 2, figsize=(7.6, 4.0), layout="constrained", sharey=True)
for axis, (name, found) in zip(axes, fractions.items(), strict=True):
    low, high = bounds[name].T
    axis.fill_between(fidelities, low, high, color="0.88", label="between the bounds")
    axis.loglog(fidelities, high, "-", color="black", linewidth=1)
    axis.loglog(fidelities, low, "-", color="black", linewidth=1)
    for number, row in enumerate(found):
        axis.loglog(fidelities, row, ".", color="#0b5394", markersize=4, label="" if number else "random signals")
    axis.set(title=name, xlabel=r"fidelity $\tilde\lambda$")
    axis.set_ylabel("fraction of the diversity that is kept")
    axis.grid(alpha=0.3)
for (name, found), marker in zip(attained.items(), "sD", strict=True):
    axes[0].loglog(fidelities, found, marker, color="#d1711c", fillstyle="none", markersize=7, label=name)
axes[0].legend(fontsize=8, loc="lower right")
axes[1].legend(fontsize=8, loc="lower right")
plt.show()
