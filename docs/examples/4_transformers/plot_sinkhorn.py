"""
Sinkhorn's attention
====================

Softmax makes the rows of attention add up to 1. :func:`nlflow.affinities.sinkhorn` scales rows and columns until both
do, as Sinkformers do. With queries equal to keys the flow is a gradient flow in L².
"""

import matplotlib.pyplot as plt
import numpy as np

from nlflow import AttentionFlow, ExpDotProduct, InputError, Mask, Points, affinity, sinkhorn, solve

# %%

rng = np.random.default_rng(1)
x = rng.standard_normal((40, 4)) * np.linspace(0.5, 2.0, 40)[:, None]
nodes = Points(np.arange(40.0), np.ones(40))
softmax = affinity(ExpDotProduct(), nodes, x, method="dense")
doubly = sinkhorn(ExpDotProduct(), nodes, x)
print(f"softmax: columns from {softmax.matrix.sum(axis=0).min():.2f} to {softmax.matrix.sum(axis=0).max():.2f}")
print(f"Sinkhorn: columns off by {doubly.residual:.1e} after {doubly.iterations} scalings")
assert np.abs(doubly.matrix - doubly.matrix.T).max() < 1e-11

# %%
# Every token keeps its share, and the mean of a signal stays.

u = x[:, 0] + np.linspace(-1, 1, 40)
times = np.linspace(0, 6, 40)
courses = {name: solve(AttentionFlow(p), u, t_eval=times).u for name, p in (("softmax", softmax), ("Sinkhorn", doubly))}
assert np.abs(courses["Sinkhorn"].mean(axis=1) - u.mean()).max() < 1e-10

# %%
# Under a causal mask nothing but the diagonal could have such rows and columns: it is refused.

try:
    sinkhorn(ExpDotProduct(), nodes, x, mask=Mask(causal=True))
except InputError as error:
    print(error)

figure, panels = plt.subplot_mosaic([["s", "d"], ["c", "m"]], figsize=(7.6, 6.4), layout="constrained")
for name, p in (("s", softmax), ("d", doubly)):
    shown = panels[name].imshow(p.matrix, cmap="viridis", vmin=0, vmax=0.2)
    panels[name].set(title="softmax" if name == "s" else "Sinkhorn", xlabel="token j", ylabel="token i")
figure.colorbar(shown, ax=panels["d"], label="P", extend="max")
panels["c"].plot(softmax.matrix.sum(axis=0), color="#0b5394", label="softmax")
panels["c"].plot(doubly.matrix.sum(axis=0), "--", color="#d1711c", label="Sinkhorn")
panels["c"].set(xlabel="token j", ylabel="sum of column", title="What a token is given")
for (name, course), (style, colour) in zip(courses.items(), (("-", "#0b5394"), ("--", "#d1711c")), strict=True):
    panels["m"].plot(times, course.mean(axis=1), style, color=colour, label=name)
panels["m"].set(xlabel="t", ylabel="mean over tokens", title="The mean under the flow")
for name in "cm":
    panels[name].legend(fontsize=8)
plt.show()
