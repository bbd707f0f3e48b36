r"""
Attention as a random walk
==========================

Lemma 1 of `arXiv 2312.00751 <https://arxiv.org/abs/2312.00751>`_: the value after k attention layers is the expected
value at the end of a walk of k moves, each to a token drawn from the attention (:class:`nlflow.MarkovChain`). Lemma 2:
in the long run its law is the stationary law, so repeated layers run to the constant :math:`\pi^T v`.
"""

import matplotlib.pyplot as plt
import numpy as np

from nlflow import ExpDotProduct, MarkovChain, Points, affinity

# %%

rng = np.random.default_rng(5)
queries, keys = 1.8 * rng.standard_normal((2, 30, 8))
values = rng.standard_normal(30)
chain = MarkovChain(affinity(ExpDotProduct(), Points(np.arange(30)), keys, queries=queries))
matrix = np.exp(queries @ keys.T / np.sqrt(8))
matrix /= matrix.sum(axis=1, keepdims=True)  # the same, written out

# %%

walkers = 1_000_000
shares = {k: np.bincount(chain.walk(0, k, walkers, rng=k), minlength=30) / walkers for k in (1, 4)}
laws = {k: np.linalg.matrix_power(matrix, k)[0] for k in shares}
for k, law in laws.items():
    assert np.abs(chain.law(0, k) - law).max() < 1e-13
    deviation = np.abs(shares[k] - law) / np.sqrt(law * (1 - law) / walkers)
    print(f"after {k} moves: largest deviation of a share {deviation.max():.1f} standard deviations, of 30 shares")
    assert deviation.max() < 5
assert np.abs(chain.stationary @ matrix - chain.stationary).max() < 1e-14

# %%

depth = np.arange(31)
distances = chain.distance_to_limit(values, 30)
second = abs(chain.second_eigenvalue)
measured = (distances[25] / distances[5]) ** (1 / 20)
print(f"|mu_2| = {second:.4f}; a layer leaves {measured:.4f} of the distance")
assert abs(measured - second) < 0.02

# %%
# The error of the mean over M walkers is the standard deviation of the values over the root of M.

sizes = 4 ** np.arange(2, 8)
expected = (np.linalg.matrix_power(matrix, 4) @ values)[0]
spread = np.sqrt(laws[4] @ values**2 - expected**2)
errors = []
for size in sizes:
    ends = chain.walk(0, 4, 100 * int(size), rng=int(size)).reshape(100, size)
    errors.append(np.sqrt(np.mean((values[ends].mean(axis=1) - expected) ** 2)))
slope = np.polyfit(np.log(sizes), np.log(errors), 1)[0]
print(f"slope of the error over the number of walkers: {slope:.3f}")
assert abs(slope + 0.5) < 0.06

figure, axes = plt.subplots(2, 2, figsize=(7.6, 6.0), layout="constrained")
blue, orange = "#0b5394", "#d1711c"
for axis, (k, law) in zip(axes[0], laws.items(), strict=True):
    axis.bar(np.arange(30), shares[k], color="0.8", width=1.0, edgecolor="white", label="walkers")
    axis.plot(law, "o", color=blue, markersize=4, label="row 0 of the power of P")
    axis.plot(chain.stationary, "_", color=orange, markersize=9, label="stationary law")
    axis.set(title=f"After {k} move{'s' * (k > 1)}", xlabel="token", ylabel="share of the walkers")
axes[0, 0].set_ylim(0, 0.66)
axes[0, 0].legend(fontsize=8, loc="upper right")
axes[1, 0].semilogy(depth, distances, "o", color=blue, markersize=4, label="measured")
axes[1, 0].semilogy(depth, distances[5] * second ** (depth - 5.0), "-", color="black", label=r"$|\mu_2|^k$")
axes[1, 0].set(title="Layers run to a constant", xlabel="layers k", ylabel=r"distance of $P^k v$ to $\pi^T v$")
axes[1, 1].loglog(sizes, errors, "s", color=blue, label=f"measured, slope {slope:.2f}")
axes[1, 1].loglog(sizes, spread / np.sqrt(sizes), "-", color="black", label=r"standard deviation / $\sqrt{M}$")
axes[1, 1].set(title="Monte Carlo", xlabel="walkers M", ylabel="root mean square error")
for axis in axes[1]:
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
plt.show()
