"""
A z-stack of counts
===================

A microscope counts few photons in each voxel. :class:`nlflow.denoising.noise.Poisson` stabilizes the noise;
``axes="ZYX"`` and ``spacing`` of :func:`nlflow.denoise` group blocks of the whole stack.
"""

import matplotlib.pyplot as plt
import numpy as np
from scipy.ndimage import gaussian_filter

from nlflow import Poisson, denoise
from nlflow.denoising.quality import psnr

# %%

spacing, peak = (2.5, 1.0, 1.0), 20.0
rng = np.random.default_rng(1)
z, y, x = (axis * step for axis, step in zip(np.indices((20, 80, 80)), spacing, strict=True))
light = np.zeros(z.shape)
for _ in range(26):
    centre, size = rng.uniform((0, 0, 0), (50, 80, 80)), rng.uniform(8, 13)
    turn = rng.uniform(0, np.pi)
    u = (x - centre[2]) * np.cos(turn) + (y - centre[1]) * np.sin(turn)
    v = (y - centre[1]) * np.cos(turn) - (x - centre[2]) * np.sin(turn)
    radius = np.sqrt((u / 1.3) ** 2 + v**2 + (z - centre[0]) ** 2) / size
    cell = 0.25 * (radius < 1) + 0.75 * np.exp(-(((radius - 1) / 0.1) ** 2)) + 0.4 * (radius < 0.4)
    light = np.maximum(light, cell)
light = gaussian_filter(light, (0.8, 0.9, 0.9))
clean = 0.5 + (peak - 0.5) * light / light.max()
counts = np.random.default_rng(0).poisson(clean)

# %%

words = {"noise": Poisson(), "preserve_range": True}
slices = np.stack([denoise(one, **words) for one in counts])
stack = denoise(counts, axes="ZYX", spacing=spacing, **words)
shown = {"counts": counts, "slice by slice": slices, "as a stack": stack}
quality = {name: psnr(clean, u) for name, u in shown.items()}
for name, value in quality.items():
    print(f"{name:>14}: {value:.2f} dB")
print(f"mean light: true {clean.mean():.4f}, of the counts {counts.mean():.4f}, of the result {stack.mean():.4f}")
assert quality["as a stack"] > quality["slice by slice"] + 1 > quality["counts"] + 1
assert abs(stack.mean() - counts.mean()) < 0.02 * counts.mean()

# %%

figure, rows = plt.subplots(2, 4, figsize=(7.6, 3.9), layout="constrained", height_ratios=[80, 50])
for row, (cut, part, aspect) in zip(
    rows, (("z = 11 of 20", 10, 1.0), ("y = 41 of 80", np.s_[:, 40], 2.5)), strict=True
):
    for axis, (name, u) in zip(row, {**shown, "clean": clean}.items(), strict=True):
        axis.imshow(u[part], cmap="magma", vmin=0, vmax=peak, aspect=aspect)
        heading = f"{name}, {quality[name]:.1f} dB" if name in quality else name
        axis.set_title(f"{heading}\n{cut}" if part == 10 else cut, fontsize=9)
        axis.set_axis_off()
plt.show()
