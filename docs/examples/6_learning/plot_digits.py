"""
Digits with few labels
======================

1 797 pictures of digits, of which a few have a label. :class:`nlflow.learning.PoissonClassifier` and
:class:`nlflow.learning.HarmonicClassifier` share one graph; :func:`nlflow.learning.ask_next` says which picture to ask
for next.
"""

import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import load_digits

from nlflow.learning import HarmonicClassifier, PoissonClassifier, ask_next

# %%

X, y = load_digits(return_X_y=True)
graph = PoissonClassifier("knn").fit(X, y).affinity_
print(graph.reason)


def hidden(known):
    """Return labels of which all but those of some samples are hidden."""
    few = np.full(len(y), -1)
    few[known] = y[known]
    return few


def right(model, known):
    """Return the share of the other samples that a model gets right."""
    few = hidden(known)
    return float(np.mean((model.fit(X, few).transduction_ == y)[few < 0]))


# %%

counts = [1, 2, 3, 5, 10]
shares = {"harmonic": [], "Poisson": []}
for count in counts:
    draws = []
    for seed in range(5):
        rng = np.random.default_rng(seed)
        known = np.concatenate([rng.choice(np.flatnonzero(y == c), count, replace=False) for c in range(10)])
        draws.append([right(HarmonicClassifier(graph), known), right(PoissonClassifier(graph), known)])
    for name, values in zip(shares, np.transpose(draws), strict=True):
        shares[name].append(100 * values)
assert abs(np.mean(shares["Poisson"][0]) - np.mean(shares["harmonic"][0])) < 3
assert np.mean(shares["harmonic"][-1]) > 95

figure, axis = plt.subplots(figsize=(7, 3.2), layout="constrained")
for (name, values), style in zip(shares.items(), ("o--", "s-"), strict=True):
    axis.errorbar(counts, np.mean(values, axis=1), np.std(values, axis=1), fmt=style, capsize=3, label=name)
axis.set_xlabel("labels a class")
axis.set_ylabel("right (%)")
axis.set_title("Mean and standard deviation of five draws")
axis.legend(frameon=False)
axis.spines[["top", "right"]].set_visible(False)

# %%
# Labels that are asked for, those from which a walk takes longest to a label, beside random ones.

rng = np.random.default_rng(1)
first = np.array([np.flatnonzero(y == c)[0] for c in range(10)])
asked = np.concatenate([first, ask_next(graph, first, 20, by="hitting time").nodes])
drawn = [np.concatenate([first, rng.choice(len(y), 20, replace=False)]) for _ in range(5)]
steps = [10, 14, 18, 22, 26, 30]
by_time = [100 * right(HarmonicClassifier(graph), asked[:s]) for s in steps]
at_random = [100 * np.mean([right(HarmonicClassifier(graph), d[:s]) for d in drawn]) for s in steps]
print(f"with 30 labels: {by_time[-1]:.1f} % asked for, {at_random[-1]:.1f} % at random")

figure, axis = plt.subplots(figsize=(7, 3), layout="constrained")
axis.plot(steps, by_time, "s-", label="longest hitting time")
axis.plot(steps, at_random, "o--", label="random, mean of 5")
axis.set_xlabel("labels")
axis.set_ylabel("right (%)")
axis.set_title("Labels that were asked for, and random ones")
axis.legend(frameon=False)
axis.spines[["top", "right"]].set_visible(False)
