"""
Single cells with few labels
============================

700 blood cells, of which a few of each type keep their label. The cells come with scanpy (``pip install scanpy``).
"""

import warnings
from collections import Counter

import matplotlib.pyplot as plt
import numpy as np
import scanpy as sc
from sklearn.semi_supervised import LabelPropagation
from sklearn.semi_supervised import LabelSpreading as TheirSpreading

from nlflow import MarkovChain
from nlflow.learning import DiffusionMap, HarmonicClassifier, LabelSpreading, PoissonClassifier

# %%

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of the age of the file
    cells = sc.datasets.pbmc68k_reduced()
X = np.asarray(cells.obsm["X_pca"], np.float64)
types = cells.obs["bulk_labels"].astype(object).to_numpy()
names, counts = np.unique(types, return_counts=True)
print(X.shape, dict(zip(names, counts.tolist(), strict=True)))

# %%
# Cells without a type have None; ``missing=None`` says so.


def hidden(each, seed):
    """Return the types, of which all but `each` of a kind are None."""
    rng = np.random.default_rng(seed)
    known = np.concatenate([rng.choice(np.flatnonzero(types == name), each, replace=False) for name in names])
    few = np.full(len(types), None, dtype=object)
    few[known] = types[known]
    return few


few = hidden(5, 0)
model = HarmonicClassifier(metric="correlation", missing=None).fit(X, few)
print(model.reason_)
print(model.message_)

# %%
# With scanpy each Louvain cluster takes the type that most of its labelled cells have.


def by_scikit_learn(kind, few):
    """Return what an estimator of scikit-learn makes of numbers, -1 being no label."""
    numbers = np.array([-1 if name is None else np.searchsorted(names, name) for name in few])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of iterations that do not converge
        return names[kind.fit(X, numbers).transduction_]


def by_clusters(few):
    """Return the type of most labelled cells in the cluster of each cell."""
    clusters, found = cells.obs["louvain"].astype(str).to_numpy(), few.copy()
    for cluster in np.unique(clusters):
        seen = [name for name in few[clusters == cluster] if name is not None]
        found[clusters == cluster] = Counter(seen).most_common(1)[0][0] if seen else None
    return found


ways = {
    "harmonic": lambda few: HarmonicClassifier(metric="correlation", missing=None).fit(X, few).transduction_,
    "Poisson": lambda few: PoissonClassifier(metric="correlation", missing=None).fit(X, few).transduction_,
    "spreading": lambda few: LabelSpreading(metric="correlation", alpha=0.9, missing=None).fit(X, few).transduction_,
    "scikit-learn: spreading": lambda few: by_scikit_learn(TheirSpreading(kernel="knn", n_neighbors=10), few),
    "scikit-learn: propagation": lambda few: by_scikit_learn(LabelPropagation(kernel="knn", n_neighbors=10), few),
    "scanpy: clusters": by_clusters,
}
right = {name: [] for name in ways}
for seed in range(10):
    few = hidden(5, seed)
    free = np.array([name is None for name in few])
    for name, way in ways.items():
        right[name].append(100 * np.mean((way(few) == types)[free]))
for name, shares in right.items():
    print(f"{name}: {np.mean(shares):.1f} %")

figure, axis = plt.subplots(figsize=(7, 3), layout="constrained")
order = list(right)[::-1]
axis.barh(order, [np.mean(right[name]) for name in order], xerr=[np.std(right[name]) for name in order], color="0.6")
axis.set_xlabel("right (%)")
axis.set_ylabel("way")
axis.set_title("Cells without a label that get their type: mean of ten draws")
axis.spines[["top", "right"]].set_visible(False)

# %%
# The probability is that of a walk from the cell to meet this type first.

few = hidden(5, 0)
model = HarmonicClassifier(metric="correlation", missing=None).fit(X, few)
sure = model.label_distributions_.max(axis=1)
by_doubt = np.flatnonzero(~model.labelled_)[np.argsort(sure[~model.labelled_])]
thirds = [100 * np.mean((model.transduction_ == types)[part]) for part in np.array_split(by_doubt, 3)]
print("right, from the least sure third to the surest:", ", ".join(f"{share:.0f} %" for share in thirds))

figure, axis = plt.subplots(figsize=(6, 3.6), layout="constrained")
place = np.asarray(cells.obsm["X_umap"])
drawn = axis.scatter(*place.T, c=sure, s=12, cmap="viridis")
axis.scatter(*place[model.labelled_].T, s=30, facecolors="none", edgecolors="k", label="had a label")
figure.colorbar(drawn, label="largest probability")
axis.set_xlabel("UMAP 1")
axis.set_ylabel("UMAP 2")
axis.set_title("How sure each cell's type is")
axis.legend(frameon=False, loc="upper right")
axis.set_aspect("equal")

# %%
# With scanpy's own graph (``affinity="precomputed"``) :class:`nlflow.learning.DiffusionMap` has the eigenvalues of
# ``scanpy.tl.diffmap``.

weights = cells.obsp["connectivities"]
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of the age of the file
    sc.tl.diffmap(cells, n_comps=6)
theirs = np.asarray(cells.uns["diffmap_evals"], np.float64)[1:]
mapped = DiffusionMap(5, "precomputed", alpha=1.0).fit(weights)
print("scanpy", theirs.round(5))
print("nlflow", mapped.eigenvalues_.round(5))
assert np.abs(theirs - mapped.eigenvalues_).max() < 1e-4  # theirs are of single precision

# From which cells does a walk reach the monocytes before the B cells?
first = MarkovChain(mapped.affinity_).committor(types == "CD19+ B", types == "CD14+ Monocyte")
for name in names:
    print(f"{name:30s} {first[types == name].mean():.2f}")
