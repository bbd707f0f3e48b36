"""
Two moons and six labels
========================

Three labels on each of two moons. :class:`nlflow.learning.LabelSpreading`, :class:`nlflow.learning.HarmonicClassifier`,
:class:`nlflow.learning.PoissonClassifier` and :class:`nlflow.learning.PLaplacianClassifier` minimize E, J, J with a
source and J_p on one graph of neighbours.
"""

import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import make_moons

from nlflow.learning import HarmonicClassifier, LabelSpreading, PLaplacianClassifier, PoissonClassifier, choose

# %%

X, y = make_moons(400, noise=0.09, random_state=3)
few = np.full(len(y), -1)
for label in (0, 1):
    few[np.flatnonzero(y == label)[:3]] = label

models = {
    "label spreading": LabelSpreading("knn", alpha=0.99),
    "harmonic": HarmonicClassifier("knn"),
    "Poisson": PoissonClassifier("knn"),
    "p-Laplace, p = 4": PLaplacianClassifier("knn", p=4),
}
right = {}
for name, model in models.items():
    model.fit(X, few)
    right[name] = float(np.mean(model.transduction_ == y))
    print(f"{name}: {100 * right[name]:.1f} % right after {model.n_iter_} iterations")
assert min(right.values()) > 0.85

# %%
# Other points get classes by an average over the known ones: the line is where the class changes.

figure, axes = plt.subplots(2, 2, figsize=(7, 5), layout="constrained", sharex=True, sharey=True)
across, up = np.meshgrid(np.linspace(-1.4, 2.4, 120), np.linspace(-0.9, 1.4, 80))
plane = np.column_stack([across.ravel(), up.ravel()])
for axis, (name, model) in zip(axes.flat, models.items(), strict=True):
    axis.contour(across, up, model.predict(plane).reshape(across.shape), levels=[0.5], cmap="gray")
    axis.scatter(*X.T, s=6, c=np.where(model.transduction_ == 0, "#0b5394", "#c55a11"))
    axis.scatter(*X[few >= 0].T, s=60, facecolors="none", edgecolors="black", label="labels")
    axis.set_title(f"{name}: {100 * right[name]:.1f} % right", fontsize=9)
    axis.set_xlabel("x", fontsize=8)
    axis.set_ylabel("y", fontsize=8)
axes[0, 0].legend(frameon=False, fontsize=8, loc="upper right")

# %%
# Labels that are held out choose the fidelity.

noisy = few.copy()
known = np.random.default_rng(0).choice(len(y), 40, replace=False)
noisy[known] = np.where(np.arange(40) % 8 == 0, 1 - y[known], y[known])  # one in eight is wrong
strengths = np.geomspace(0.01, 30, 9)
curve = choose(HarmonicClassifier("knn"), X, noisy, "fidelity", strengths, folds=8)
print(f"best fidelity: {curve.best:.2f}; iterations along the path: {curve.iterations.tolist()}")

figure, axis = plt.subplots(figsize=(7, 3), layout="constrained")
axis.semilogx(curve.values, curve.means, "o-")
axis.axvline(curve.best, color="gray", linestyle=":")
axis.set_xlabel("fidelity of the labels")
axis.set_ylabel("log probability of hidden labels")
axis.set_title("A curve to look at: one label in eight is wrong")
axis.spines[["top", "right"]].set_visible(False)
