"""
A photograph from a camera
==========================

The noise of a photograph follows the light, neighbours share it after demosaicking, and compression cuts its high
frequencies off, so an estimate of white noise finds almost none. :func:`nlflow.denoise` finds out which noise there is.
"""

import io
from itertools import pairwise

import matplotlib.pyplot as plt
import numpy as np
from PIL import Image
from scipy.ndimage import convolve
from skimage import data
from skimage.metrics import peak_signal_noise_ratio

from nlflow import denoise, estimate_sigma
from nlflow.denoising.noise import estimate_noise

# %%
# A camera: photons and read noise in linear light, one colour a pixel (Bayer), a tone curve, and JPEG of quality 80.


def camera(light, photons, read, rng):
    """Return the file of a camera, 0...255, that sees this light, 0...1; without noise for no photons."""
    seen = rng.normal(rng.poisson(light * photons), read) / photons if photons else light
    mosaic = np.zeros_like(seen)
    for row, column, colour in ((0, 0, 0), (0, 1, 1), (1, 0, 1), (1, 1, 2)):
        mosaic[row::2, column::2, colour] = seen[row::2, column::2, colour]
    cross, square = np.array([[0, 1, 0], [1, 4, 1], [0, 1, 0]]) / 4, np.array([[1, 2, 1], [2, 4, 2], [1, 2, 1]]) / 4
    full = np.stack([convolve(mosaic[..., c], kernel) for c, kernel in enumerate((square, cross, square))], axis=-1)
    toned = np.rint(255 * np.clip(full, 0, 1) ** (1 / 2.2)).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(toned).save(file, "JPEG", quality=80)
    return np.asarray(Image.open(file))


light = (data.astronaut()[:320, 60:380] / 255.0) ** 2.2
clean = camera(light, None, None, None)
noisy = camera(light, photons=120, read=2.0, rng=np.random.default_rng(0))

# %%

sigma = estimate_sigma(noisy.astype(float), channel_axis=-1)
white = denoise(noisy, sigma=float(np.mean(sigma)), channel_axis=-1, preserve_range=True)
found = estimate_noise(noisy, channel_axis=-1)
result, info = denoise(noisy, channel_axis=-1, preserve_range=True, return_info=True)
print("white:", np.round(sigma, 2))
print("found:", found)
for reason in found.reasons:
    print("      ", reason)

psnr = {
    name: peak_signal_noise_ratio(clean, np.clip(u, 0, 255), data_range=255)
    for name, u in (("noisy", noisy.astype(float)), ("white", white), ("noise found out", result))
}
for name, value in psnr.items():
    print(f"{name:>16}: {value:.2f} dB")

# %%
# What was removed, from -25 to 25 grey levels. ``strength=0.7`` keeps more of the hair.

part = np.s_[60:220, 60:220]
figure, axes = plt.subplots(2, 3, figsize=(7.8, 5.6), layout="constrained")
for (upper, lower), (name, u) in zip(
    axes.T, (("noisy", noisy), ("white", white), ("noise found out", result)), strict=True
):
    upper.imshow(np.clip(u[part] / 255, 0, 1))
    upper.set_title(f"{name}\n{psnr[name]:.2f} dB", fontsize=10)
    removed = clean[part] if name == "noisy" else np.clip(0.5 + (noisy[part] - u[part]) / 50, 0, 1)
    lower.imshow(removed)
    lower.set_title("without noise" if name == "noisy" else "noisy minus this", fontsize=10)
    upper.set_axis_off()
    lower.set_axis_off()
plt.show()

# %%
# Beside the noise of the simulation. Its power at the lowest frequencies has the shifts that the tone curve and
# clipping make in dark parts.

model, error, light_grey = found.model, noisy.astype(float) - clean, clean.mean(axis=-1)
power = 3 * np.abs(np.fft.fft2(error.mean(axis=-1))) ** 2 / light_grey.size


def rings(values):
    """Return the middles of rings of frequencies, and the mean of a spectrum over each."""
    places = np.hypot(*np.meshgrid(*(np.fft.fftfreq(n) for n in values.shape), indexing="ij"))
    middles = np.linspace(0.02, 0.5, 25)
    return middles, [values[np.abs(places - f) < 0.015].mean() for f in middles]


edges = np.quantile(light_grey, np.linspace(0, 1, 13))
bins = [(light_grey >= low) & (light_grey <= high) for low, high in pairwise(edges)]
greys = np.array([light_grey[b].mean() for b in bins])
strengths = np.sqrt(np.mean(model.sigma**2)) * model.relative(greys)
simulated, own = {"color": "#d1711c", "markersize": 4, "label": "simulated"}, {"color": "#0b5394", "markersize": 4}

figure, (left, right) = plt.subplots(1, 2, figsize=(7.8, 2.9), layout="constrained")
left.plot(greys, [error[b].std() for b in bins], "o", **simulated)
left.plot(greys, strengths, "s-", label="found", **own)
left.set(xlabel="mean of the colours", ylabel="standard deviation", title="Noise by intensity", ylim=(0, None))
right.semilogy(*rings(power), "o", **simulated)
right.semilogy(*rings(model.powers(3, 2)[0]), "s-", label="found", **own)
right.set(xlabel="frequency (cycles a pixel)", ylabel="power", title="Spectrum of the luminance")
for axis in (left, right):
    axis.legend(fontsize=7)
    axis.grid(alpha=0.3)
plt.show()

assert psnr["white"] < psnr["noisy"] + 0.5 < psnr["noise found out"]
