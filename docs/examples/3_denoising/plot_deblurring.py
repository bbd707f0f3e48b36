"""
Deblurring
==========

A photograph is seen through a blur, with noise. :func:`nlflow.denoising.priors.reconstruct` fits the data and denoises
in turn (plug-and-play), with less and less strength.
"""

import matplotlib.pyplot as plt
import numpy as np
from skimage import data
from skimage.metrics import peak_signal_noise_ratio

from nlflow.denoising.priors import Forward, reconstruct

clean = data.camera()[60:220, 150:310].astype(float)

# %%
# `Forward` draws random signals and refuses a pair of functions which are not adjoint.

i, j = np.mgrid[-7:8, -7:8]
kernel = np.zeros(clean.shape)
kernel[:15, :15] = 1 / (1 + i**2 + j**2)
transfer = np.fft.rfft2(np.roll(kernel / kernel.sum(), (-7, -7), axis=(0, 1)))


def blur(u):
    return np.fft.irfft2(np.fft.rfft2(u) * transfer, u.shape)


def adjoint(v):
    return np.fft.irfft2(np.fft.rfft2(v) * transfer.conj(), v.shape)


forward, sigma = Forward((blur, adjoint), clean.shape), 2.0
blurred = forward.apply(clean) + np.random.default_rng(0).normal(0, sigma, clean.shape)

# %%
# Tikhonov's way weighs the misfit against the size of the solution, here with the weight that the clean picture likes
# best.

weights = np.geomspace(1e-4, 1, 30)
candidates = [
    np.fft.irfft2(np.fft.rfft2(blurred) * transfer.conj() / (abs(transfer) ** 2 + w), clean.shape) for w in weights
]
tikhonov = min(candidates, key=lambda u: np.mean((u - clean) ** 2))

found = reconstruct(blurred, forward, sigma)
print(found)

# %%


def decibels(u):
    return peak_signal_noise_ratio(clean, u, data_range=255)


assert found.success
assert 0.9 < found.misfit[-1] < 1.1
assert decibels(found.u) > decibels(tikhonov) + 1

figure, axes = plt.subplots(1, 4, figsize=(8, 2.1), layout="constrained")
pictures = {"clean": clean, "blurred, noisy": blurred, "Tikhonov": tikhonov, "denoiser as prior": found.u}
for axis, (title, picture) in zip(axes, pictures.items(), strict=True):
    axis.imshow(picture, cmap="gray", vmin=0, vmax=255)
    axis.set_title(title if title == "clean" else f"{title}: {decibels(picture):.1f} dB", fontsize=8)
    axis.set_axis_off()
plt.show()

# %%

figure, axis = plt.subplots(figsize=(5, 2.8), layout="constrained")
axis.semilogx(found.strength, found.misfit, "o-")
axis.axhline(1, color="0.6", linewidth=1)
axis.invert_xaxis()
axis.set_xticks(found.strength, [f"{s:.0f}" for s in found.strength])
axis.minorticks_off()
axis.set_xlabel("strength of the denoiser (grey levels)")
axis.set_ylabel("residual / noise")
axis.set_title("What is left of the data, step by step")
axis.spines[["top", "right"]].set_visible(False)
plt.show()
