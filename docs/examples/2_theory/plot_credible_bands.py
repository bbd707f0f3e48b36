"""
Credible bands of a denoised signal
===================================

:class:`nlflow.E` is quadratic, so exp(−βE) is the law of a Gaussian field, whose mean is the minimizer of E.
:class:`nlflow.equilibria.GaussianField` draws bands around it, which widen in a gap where nothing was observed.
"""

import matplotlib.pyplot as plt
import numpy as np

from nlflow import E, Gaussian, Points, affinity
from nlflow.equilibria import GaussianField, choose_fidelity

# %%

n, sigma = 400, 0.3
x = np.linspace(0, 1, n)
clean = np.sin(2 * np.pi * x) + 0.5 * np.cos(5 * np.pi * x)
noisy = clean + np.random.default_rng(4).normal(0, sigma, n)
seen = (x < 0.55) | (x > 0.67)

# %%
# The evidence of the observed values, the marginal likelihood of the field, says how strong the fidelity is to be.

nodes = Points(x, weights=np.full(n, 1 / n))
weights = affinity(Gaussian(width=0.015), nodes)
energy = E(weights, np.where(seen, noisy, 0.0), seen.astype(float))
choice = choose_fidelity(energy, method="evidence", sigma=sigma)
print(choice.message, "; success:", choice.success)

# %%

field = GaussianField(choice.energy, sigma=sigma)
variances = field.variance()
pointwise = field.band(0.95, variances=variances)
whole = field.band(0.95, simultaneous=True, variances=variances, samples=2000)
samples = field.sample(3, rng=1)
inside = np.mean((pointwise.lower <= clean) & (clean <= pointwise.upper))
covered = np.all((whole.lower <= clean) & (clean <= whole.upper))
print(f"{inside:.1%} of the nodes within the band of each node, whole signal within the other: {covered}")
print(f"half widths: {pointwise.factor:.2f} and {whole.factor:.2f} standard deviations")
assert inside > 0.9
assert covered

# %%

figure, (top, bottom) = plt.subplots(
    2, 1, figsize=(7.8, 6), height_ratios=(3, 1), layout="constrained"
)  # fmt: skip
blue = "#0b5394"
top.fill_between(x, whole.lower, whole.upper, color=blue, alpha=0.15, linewidth=0, label="95 % of whole signals")
top.fill_between(x, pointwise.lower, pointwise.upper, color=blue, alpha=0.35, linewidth=0, label="95 % at each node")
top.plot(x[seen], noisy[seen], ".", color="0.55", markersize=3.5, label="observed")
top.plot(x, clean, "--", color="black", linewidth=1.3, label="clean")
top.plot(x, field.mean, color=blue, linewidth=1.8, label="mean, the minimizer of E")
top.set(xlabel="position x", ylabel="signal", xlim=(0, 1), title="What E says beside its minimum")
top.legend(ncols=2, fontsize=8, loc="upper right")
for sample, shade in zip(samples, ("#d1711c", "#e39a55", "#f0c096"), strict=True):
    bottom.plot(x, sample - field.mean, color=shade, linewidth=0.7)
deviation = np.sqrt(variances.value)
bottom.plot(x, 2 * deviation, color=blue, linewidth=1.5, label="two standard deviations")
bottom.plot(x, -2 * deviation, color=blue, linewidth=1.5)
bottom.set(xlabel="position x", ylabel="less the mean", xlim=(0, 1), title="Three draws")
bottom.legend(fontsize=8, loc="upper left")
plt.show()
