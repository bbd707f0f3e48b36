"""
An electrocardiogram
====================

:func:`nlflow.denoise` takes signals as well as pictures. All beats of a heart are alike, so each is averaged with the
others, and the spikes stay. ``stopping="sure"`` chooses the estimate with the least estimated risk on the path of the
flow.
"""

import matplotlib.pyplot as plt
import numpy as np
import pywt
from scipy.ndimage import gaussian_filter1d

from nlflow import denoise, estimate_sigma

clean = pywt.data.ecg().astype(float)
sigma = 0.25 * clean.std()
noisy = clean + np.random.default_rng(0).normal(0, sigma, clean.shape)


def error(u):
    """Return the root mean square error."""
    return np.sqrt(np.mean((u - clean) ** 2))


# %%
# The best Gaussian average has its width chosen with the help of the clean signal.

result = denoise(noisy)
chosen, info = denoise(noisy, sigma, quality="pixels", stopping="sure", return_info=True)
best = min((gaussian_filter1d(noisy, width) for width in np.linspace(0.3, 6, 40)), key=error)
print(f"noise: estimated {estimate_sigma(noisy):.2f}, true {sigma:.2f}")
for name, u in (("noisy", noisy), ("best Gaussian average", best), ("nlflow", result), ("stopped by Stein", chosen)):
    print(f"{name:>21}: root mean square error {error(u):.2f}")
print(f"Stein's estimate of the last, without the clean signal: {info.risk**0.5:.2f}")
assert error(result) < error(best) < error(noisy)
assert abs(info.risk**0.5 - error(chosen)) < 0.25 * error(chosen)

# %%

figure, (upper, lower) = plt.subplots(2, 1, figsize=(7.6, 5.6), layout="constrained", height_ratios=[1.6, 1])
part = slice(440, 570)
sample = np.arange(clean.size)
upper.plot(sample[part], noisy[part], ".", color="0.65", markersize=4, label="noisy")
upper.plot(sample[part], clean[part], "-", color="black", linewidth=3.0, alpha=0.35, label="clean")
upper.plot(sample[part], best[part], ":", color="#d1711c", linewidth=1.8, label="best Gaussian average")
upper.plot(sample[part], result[part], "--", color="#0b5394", linewidth=1.4, label="nlflow.denoise")
upper.set(xlabel="sample", ylabel="units of the recorder", title="Electrocardiogram")
upper.legend(fontsize=8, loc="upper left")
bins = np.linspace(-4 * sigma, 4 * sigma, 60)
for name, u, style, colour in (
    ("noisy", noisy, "-", "0.5"),
    ("best Gaussian average", best, ":", "#d1711c"),
    ("nlflow.denoise", result, "--", "#0b5394"),
):
    counts, edges = np.histogram(u - clean, bins)
    lower.plot((edges[1:] + edges[:-1]) / 2, np.maximum(counts, 0.5), style, color=colour, label=name)
lower.set(xlabel="error (units of the recorder)", ylabel="samples", yscale="log", title="Errors")
lower.legend(fontsize=8)
lower.grid(alpha=0.3)
plt.show()
