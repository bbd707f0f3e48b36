"""
A scan, slice by slice and as a volume
======================================

:func:`nlflow.denoise` of a volume groups blocks, not patches, and so averages over neighbouring slices as well. The
head is drawn here.
"""

import matplotlib.pyplot as plt
import numpy as np
from scipy.ndimage import gaussian_filter

from nlflow import denoise
from nlflow.denoising.quality import psnr

# %%

spacing = (1.6, 1.0, 1.0)
z, y, x = (step * (axis - axis.mean()) for axis, step in zip(np.indices((24, 68, 56)), spacing, strict=True))
folds = gaussian_filter(np.random.default_rng(1).normal(size=z.shape), [2.6 / step for step in spacing])
radius = np.sqrt((z / 29) ** 2 + (y / 32) ** 2 + (x / 26) ** 2)
brain = 0.7 + 0.2 * np.tanh(2 * folds / folds.std())
brain[(radius < 0.3) & (np.abs(x) > 2)] = 0.2  # two ventricles
clean = gaussian_filter(np.select([radius < 0.88, radius < 0.93, radius < 1], [brain, 0.15, 1.0]), [0.4, 0.6, 0.6])
sigma = 0.1
noisy = clean + np.random.default_rng(0).normal(0, sigma, clean.shape)

# %%

slices = np.stack([denoise(one, sigma) for one in noisy])
volume = denoise(noisy, sigma, axes="ZYX", spacing=spacing)
shown = {"noisy": noisy, "slice by slice": slices, "as a volume": volume}
quality = {name: psnr(clean, u) for name, u in shown.items()}
for name, value in quality.items():
    print(f"{name:>14}: {value:.2f} dB")
assert quality["as a volume"] > quality["slice by slice"] + 1 > quality["noisy"] + 1

# %%
# Slice by slice, flat parts differ from one slice to the next, which gives stripes in the cuts.

cuts = {"z = 13 of 24": (np.s_[12], 1.0), "y = 35 of 68": (np.s_[:, 34], 1.6), "x = 23 of 56": (np.s_[:, :, 22], 1.6)}
figure, rows = plt.subplots(3, 4, figsize=(7.6, 5.8), layout="constrained", height_ratios=[68, 39, 32])
for row, (cut, (part, aspect)) in zip(rows, cuts.items(), strict=True):
    for axis, (name, u) in zip(row, {**shown, "clean": clean}.items(), strict=True):
        axis.imshow(u[part], cmap="gray", vmin=0, vmax=1, aspect=aspect)
        heading = f"{name}, {quality[name]:.1f} dB" if name in quality else name
        axis.set_title(f"{heading}\n{cut}" if part == 12 else cut, fontsize=9)
        axis.set_axis_off()
plt.show()
