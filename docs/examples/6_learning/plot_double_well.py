"""
A double well and its committor
===============================

A particle in a potential with two wells is a Markov chain on a grid. :meth:`nlflow.MarkovChain.committor` says from
which places it comes to the right well first, :meth:`nlflow.MarkovChain.hitting_times` how long that takes.
"""

import matplotlib.pyplot as plt
import numpy as np

from nlflow import MarkovChain, affinity_from_graph

# %%
# With the weights exp(-(V_i + V_j) / 2) the stationary law is nearly exp(-V).

side = 61
x, y = np.meshgrid(np.linspace(-1.6, 1.6, side), np.linspace(-1.2, 1.2, side), indexing="ij")
potential = 4 * (x**2 - 1) ** 2 + 3 * y**2 + x / 2
cells = np.arange(side * side).reshape(side, side)
pairs = np.concatenate([
    np.stack([cells[:-1].ravel(), cells[1:].ravel()]), np.stack([cells[:, :-1].ravel(), cells[:, 1:].ravel()])
], axis=1)  # fmt: skip
weights = np.exp(-(potential.ravel()[pairs[0]] + potential.ravel()[pairs[1]]) / 2)
both = np.concatenate([pairs, pairs[::-1]], axis=1)
chain = MarkovChain(affinity_from_graph(both, edge_weight=np.concatenate([weights, weights])), laziness=0.5)

# %%

left, right = (np.flatnonzero(np.hypot(x - place, y).ravel() < 0.25) for place in (-1.02, 0.97))
committor = chain.committor(left, right)
times = chain.hitting_times(left)
there, back = chain.mean_first_passage_time(left, right), chain.mean_first_passage_time(right, left)
print(f"from left to right {there:.0f} moves, back {back:.0f}")

# %%
# Two metastable sets, found without being told where the wells are, agree with the committor.

sets = chain.metastable_sets(2)
towards = sets.memberships[:, sets.memberships[right].mean(axis=0).argmax()]
law = chain.stationary
apart = float(np.sqrt(law @ (towards - committor) ** 2))
print(f"memberships and committor are {apart:.3f} apart in the mean; eigenvalue {sets.modes.values[1]:.6f}")
assert apart < 0.05

figure, axes = plt.subplots(1, 3, figsize=(7.8, 2.7), layout="constrained", sharey=True)
for axis, values, title in zip(
    axes,
    (committor, towards, times / 1e3),
    ("committor of the right well", "membership of its set", "1000 moves to the left well"),
    strict=True,
):
    image = axis.contourf(x, y, values.reshape(side, side), 12, cmap="viridis")
    axis.contour(x, y, potential, levels=[0.5, 2, 4, 8], cmap="gray", linewidths=0.6)
    axis.set_title(title, fontsize=9)
    axis.tick_params(labelsize=7)
    axis.set_xlabel("x", fontsize=8)
    axis.set_ylabel("y", fontsize=8)
    bar = figure.colorbar(image, ax=axis, shrink=0.9)
    bar.ax.tick_params(labelsize=7)
    bar.set_label("1000 moves" if "moves" in title else "probability", fontsize=7)
