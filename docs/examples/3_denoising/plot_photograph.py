"""
A photograph
============

Three qualities of :func:`nlflow.denoise` beside the nonlocal means of scikit-image.
"""

import time

import matplotlib.pyplot as plt
import numpy as np
from skimage import data
from skimage.metrics import peak_signal_noise_ratio, structural_similarity
from skimage.restoration import denoise_nl_means

from nlflow import denoise

sigma = 25.0
clean = data.camera()[60:260, 140:340].astype(np.float32)
noisy = clean + np.random.default_rng(0).normal(0, sigma, clean.shape).astype(np.float32)

# %%

results, rows = {}, {}
for name in ("noisy", "scikit-image", "fast", "balanced", "best"):
    begun = time.perf_counter()
    if name == "noisy":
        results[name] = noisy
    elif name == "scikit-image":
        results[name] = denoise_nl_means(noisy, patch_size=5, patch_distance=6, h=0.7 * sigma, sigma=sigma)
    else:
        results[name] = denoise(noisy, sigma, quality=name)
    seconds = time.perf_counter() - begun
    psnr = peak_signal_noise_ratio(clean, results[name], data_range=255)
    ssim = structural_similarity(clean, results[name], data_range=255)
    rows[name] = (psnr, ssim)
    print(f"{name:>13}: {psnr:.2f} dB, SSIM {ssim:.3f}, {seconds:.2f} s")
assert rows["noisy"][0] < rows["fast"][0] < rows["balanced"][0] <= rows["best"][0] + 0.05

# %%
# The lower row shows what was removed, from -60 to 60 grey levels.

figure, axes = plt.subplots(2, 4, figsize=(7.8, 4.5), layout="constrained")
for (upper, lower), name in zip(axes.T, ("noisy", "scikit-image", "balanced", "best"), strict=True):
    upper.imshow(results[name], cmap="gray", vmin=0, vmax=255)
    upper.set_title(f"{name}\n{rows[name][0]:.2f} dB", fontsize=10)
    if name == "noisy":
        lower.imshow(clean, cmap="gray", vmin=0, vmax=255)
        lower.set_title("clean", fontsize=10)
    else:
        lower.imshow(noisy - results[name], cmap="gray", vmin=-60, vmax=60)
        lower.set_title("noisy minus this", fontsize=10)
    upper.set_axis_off()
    lower.set_axis_off()
plt.show()
