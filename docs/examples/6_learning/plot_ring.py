"""
A ring of clusters
==================

The leading modes of the walk between points tell six clusters apart and give the ring its coordinates
(:func:`nlflow.learning.spectral_clustering`, :class:`nlflow.learning.DiffusionMap`).
"""

import matplotlib.pyplot as plt
import numpy as np

from nlflow import MarkovChain
from nlflow.learning import DiffusionMap, spectral_clustering

# %%

rng = np.random.default_rng(0)
sizes = [40, 240, 80, 200, 60, 160]
turns = np.concatenate([2 * np.pi * k / 6 + 0.17 * rng.normal(size=n) for k, n in enumerate(sizes)])
turns = np.concatenate([turns, rng.uniform(0, 2 * np.pi, 300)])
X = np.column_stack([np.cos(turns), np.sin(turns)]) + 0.06 * rng.normal(size=(len(turns), 2))

labels = spectral_clustering(X, 6, n_neighbors=12)
print("sizes of the clusters:", np.bincount(labels).tolist())
maps = {alpha: DiffusionMap(2, gamma=8.0, alpha=alpha).fit(X) for alpha in (0.0, 1.0)}

# %%
# With alpha = 1 the coordinates depend less on how dense the points lie.

spread = {alpha: float(np.std(np.linalg.norm(m.embedding_, axis=1))) for alpha, m in maps.items()}
print("standard deviation of the distance from the centre:", {a: round(s, 3) for a, s in spread.items()})
assert spread[1.0] < spread[0.0]

figure, axes = plt.subplots(1, 3, figsize=(7.5, 2.8), layout="constrained")
for axis, places, title in zip(
    axes,
    (X, *(m.embedding_ for m in maps.values())),
    ("points", "diffusion map, alpha = 0", "diffusion map, alpha = 1"),
    strict=True,
):
    axis.scatter(*places.T, s=4, c=labels, cmap="viridis")
    axis.set_title(title, fontsize=9)
    axis.set_xlabel("first coordinate", fontsize=8)
    axis.set_ylabel("second coordinate", fontsize=8)
    axis.tick_params(labelsize=7)

# %%

modes = MarkovChain(maps[0.0].affinity_).modes(10)
print(f"residual of the modes: {modes.residual:.0e}")
assert np.bincount(labels).min() > 40

figure, axis = plt.subplots(figsize=(7, 2.8), layout="constrained")
axis.plot(1 + np.arange(10), modes.values, "o")
axis.set_xlabel("number of the mode")
axis.set_ylabel("eigenvalue")
axis.set_title("Eigenvalues of the walk")
axis.spines[["top", "right"]].set_visible(False)
