"""
Counts of photons
=================

The noise of counts grows with the light. :class:`nlflow.denoising.noise.Poisson` stabilizes its variance by a
transform, which the exact unbiased inverse takes back after denoising; it describes cameras with a gain and read noise
too.
"""

import matplotlib.pyplot as plt
import numpy as np
from skimage import data
from skimage.metrics import peak_signal_noise_ratio

from nlflow import Poisson, denoise

# %%

peak = 12.0
clean = data.chelsea()[50:210, 110:270, 1].astype(float)
clean = peak * (clean - clean.min()) / np.ptp(clean)
counts = np.random.default_rng(0).poisson(clean)

model = Poisson()
result = denoise(counts, noise=model, preserve_range=True)
ignorant = denoise(counts.astype(float), noise="white")
psnr = {
    name: peak_signal_noise_ratio(clean, u, data_range=peak)
    for name, u in (("counts", counts.astype(float)), ("one sigma for all", ignorant), ("Poisson", result))
}
for name, value in psnr.items():
    print(f"{name:>18}: {value:.2f} dB")
print(f"mean light: true {clean.mean():.4f}, of the counts {counts.mean():.4f}, of the result {result.mean():.4f}")
assert psnr["counts"] < psnr["one sigma for all"] < psnr["Poisson"]
assert abs(result.mean() - counts.mean()) < 0.02 * counts.mean()

# %%
# Counts with mean x have the standard deviation :math:`\sqrt x`, transformed ones about 1 from three photons on.

means = np.linspace(0.25, peak, 24)
draws = np.random.default_rng(1).poisson(means, (20_000, means.size))
stabilized = model.stabilize(draws).std(axis=0)
assert np.abs(stabilized[means >= 3] - 1).max() < 0.05

figure, axes = plt.subplots(1, 4, figsize=(7.8, 2.7), layout="constrained", width_ratios=[1, 1, 1, 1.25])
for axis, (name, u) in zip(axes[:3], (("clean", clean), ("counts", counts), ("Poisson", result)), strict=True):
    axis.imshow(u, cmap="gray", vmin=0, vmax=peak)
    axis.set_title(f"{name}\n{psnr[name]:.2f} dB" if name in psnr else name, fontsize=10)
    axis.set_axis_off()
axes[3].plot(means, draws.std(axis=0), "o", color="#d1711c", markersize=4, label="counts")
axes[3].plot(means, np.sqrt(means), ":", color="black", linewidth=1, label="root of the mean")
axes[3].plot(means, stabilized, "s-", color="#0b5394", markersize=4, label="stabilized")
axes[3].set(xlabel="mean count", ylabel="standard deviation", title="Noise", ylim=(0, None))
axes[3].legend(fontsize=7)
axes[3].grid(alpha=0.3)
plt.show()
