"""
Scratches and missing samples
=============================

Where samples are missing (``mask`` of :func:`nlflow.denoise`) the fidelity is 0, and the flow fills them in from
patches that are alike. ``keep`` names samples that must not change.
"""

import matplotlib.pyplot as plt
import numpy as np
from scipy.ndimage import binary_dilation
from skimage import data
from skimage.draw import line
from skimage.metrics import peak_signal_noise_ratio

from nlflow import denoise

sigma = 15.0
clean = data.coins()[20:180, 30:230].astype(np.float32)
rng = np.random.default_rng(2)
noisy = clean + rng.normal(0, sigma, clean.shape).astype(np.float32)

# %%
# The values at missing samples are never used: here they are NaN.

scratches = np.zeros(clean.shape, bool)
for _ in range(12):
    ends = rng.integers(0, clean.shape, (2, 2))
    scratches[line(*ends[0], *ends[1])] = True
missing = binary_dilation(scratches, np.ones((3, 3))) | (rng.random(clean.shape) < 0.1)
damaged = np.where(missing, np.nan, noisy)

kept = np.zeros(clean.shape, bool)
kept[:40, :60] = True
result = denoise(damaged, sigma, mask=missing, keep=kept)
assert np.isfinite(result).all()
assert np.array_equal(result[kept & ~missing], damaged[kept & ~missing])

# %%

known = np.where(missing, np.nan, noisy)
around = np.array([
    np.nanmedian(known[max(i - 3, 0) : i + 4, max(j - 3, 0) : j + 4]) for i, j in np.argwhere(missing)
])  # fmt: skip
by_flow = peak_signal_noise_ratio(clean[missing], result[missing], data_range=255)
by_median = peak_signal_noise_ratio(clean[missing], around.astype(np.float32), data_range=255)
print(f"{missing.mean():.0%} missing; filled in: nlflow {by_flow:.2f} dB, median around {by_median:.2f} dB")
assert by_flow > by_median

figure, axes = plt.subplots(1, 3, figsize=(7.8, 2.4), layout="constrained")
grey = plt.get_cmap("gray").with_extremes(bad="white")
for axis, (title, picture) in zip(
    axes, (("clean", clean), ("noisy, white is missing", damaged), ("denoised and filled in", result)), strict=True
):
    axis.imshow(picture, cmap=grey, vmin=0, vmax=255)
    axis.set_title(title, fontsize=10)
    axis.set_axis_off()
axes[2].plot([0, 59.5, 59.5], [39.5, 39.5, 0], "--", color="white", linewidth=1)
axes[2].text(3, 33, "kept as it is", color="white", fontsize=8)
plt.show()
