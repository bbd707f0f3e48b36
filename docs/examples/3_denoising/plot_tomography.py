"""
Tomography from few views
=========================

A slice is seen by 45 parallel-beam projections with noise. The energy :math:`|Au - f|^2 / (2 \\sigma^2) + J(u)` of a
frozen kernel (:class:`nlflow.denoising.priors.EA`) is minimized by conjugate gradients, beside the denoiser as the
prior (:func:`nlflow.denoising.priors.reconstruct`).
"""

import matplotlib.pyplot as plt
import numpy as np
from scipy.sparse import coo_array
from skimage import data
from skimage.metrics import peak_signal_noise_ratio
from skimage.transform import iradon, resize

from nlflow import Grid, Patch, affinity
from nlflow.denoising.priors import EA, Forward, reconstruct

n, views, sigma = 96, 45, 0.3
clean = resize(data.shepp_logan_phantom(), (n, n), anti_aliasing=True)
angles = np.linspace(0, np.pi, views, endpoint=False)

# %%


def projection(n, angles):
    middle, s = (n - 1) / 2, np.arange(n) - (n - 1) / 2
    entries = []
    for number, angle in enumerate(angles):
        y = middle - s[:, None] * np.sin(angle) - s * np.cos(angle)
        x = middle + s[:, None] * np.cos(angle) - s * np.sin(angle)
        rays = np.broadcast_to(number * n + np.arange(n)[:, None], y.shape)
        for i, j in ((np.floor(y) + a, np.floor(x) + b) for a in (0, 1) for b in (0, 1)):
            inside = (i >= 0) & (i < n) & (j >= 0) & (j < n)
            weights = (1 - abs(y - i)) * (1 - abs(x - j))
            entries.append([part[inside] for part in (weights, rays, i * n + j)])
    values, rows, columns = map(np.concatenate, zip(*entries, strict=True))
    return coo_array((values, (rows, columns.astype(int))), shape=(n * len(angles), n * n))


forward = Forward(projection(n, angles), (n, n), data_shape=(views, n))
sinogram = forward.apply(clean) + np.random.default_rng(0).normal(0, sigma, (views, n))

# %%
# The pilot of the frozen kernel is the filtered backprojection of scikit-image, whose unfiltered one is no adjoint of
# its projection.

backprojected = iradon(sinogram.T, np.degrees(angles), circle=True)
kernel = affinity(Patch(width=0.35, patch_size=5, search_radius=5), Grid((n, n)), backprojected)
weight = 0.5  # of J
frozen = EA(kernel.scaled(weight), sinogram, forward, sigma).minimizer(rtol=1e-6)
found = reconstruct(sinogram, forward, sigma)
print(frozen.message)
print(found)


def decibels(u):
    return peak_signal_noise_ratio(clean, u, data_range=1)


assert frozen.success
assert found.success
assert decibels(found.u) > decibels(frozen.u) > decibels(backprojected) + 1

figure, axes = plt.subplots(1, 4, figsize=(8, 2.1), layout="constrained")
pictures = {"clean": clean, "backprojection": backprojected, "frozen kernel": frozen.u, "denoiser as prior": found.u}
for axis, (title, picture) in zip(axes, pictures.items(), strict=True):
    axis.imshow(picture, cmap="gray", vmin=0, vmax=1)
    axis.set_title(title if title == "clean" else f"{title}: {decibels(picture):.1f} dB", fontsize=8)
    axis.set_axis_off()
plt.show()
