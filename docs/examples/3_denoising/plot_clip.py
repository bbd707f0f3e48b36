"""
A clip, frame by frame and as a whole
=====================================

With ``axes="TYX"`` :func:`nlflow.denoise` looks for alike patches along the motion, from frame to frame. A camera moves
over gravel, and a disc of bricks moves against it.
"""

import matplotlib.pyplot as plt
import numpy as np
from skimage import data

from nlflow import denoise
from nlflow.denoising.quality import psnr

# %%

sigma, frames, side = 25.0, 9, 88
gravel = data.gravel().astype(float)
brick = data.brick().reshape(128, 4, 128, 4).mean(axis=(1, 3))
rows, columns = np.indices((side, side))
clean = np.empty((frames, side, side))
for t in range(frames):
    scene = gravel[100 + 2 * t :, 100 + 3 * t :][:side, :side].copy()
    top, left = 50 - t, 30 + 2 * t
    disc = (rows - top) ** 2 + (columns - left) ** 2 < 14**2
    scene[disc] = brick[rows - top + 60, columns - left + 60][disc]
    clean[t] = scene
noisy = clean + np.random.default_rng(0).normal(0, sigma, clean.shape)

# %%

each = np.stack([denoise(frame, sigma) for frame in noisy])
clip = denoise(noisy, sigma, axes="TYX")
shown = {"noisy": noisy, "frame by frame": each, "as a clip": clip}
quality = {name: [psnr(a, b) for a, b in zip(clean, u, strict=True)] for name, u in shown.items()}
for name, values in quality.items():
    print(f"{name:>14}: {np.mean(values):.2f} dB")
assert np.mean(quality["as a clip"]) > np.mean(quality["frame by frame"]) + 1

# %%

figure = plt.figure(figsize=(7.6, 6.2), layout="constrained")
axes = figure.subplot_mosaic([["noisy", "frame by frame", "as a clip", "clean"], ["a", "b", "c", "d"], ["line"] * 4],
                             height_ratios=[1, 1, 0.9])  # fmt: skip
middle = frames // 2
for below, (name, u) in zip("abcd", {**shown, "clean": clean}.items(), strict=True):
    for panel, picture in ((name, u[middle]), (below, u[middle][24:68, 18:62])):
        axes[panel].imshow(picture, cmap="gray", vmin=0, vmax=255)
        axes[panel].set_axis_off()
    axes[name].set_title(f"{name}\n{quality[name][middle]:.1f} dB" if name in quality else name, fontsize=10)
    axes[below].set_title("a part of it", fontsize=9)
for name, style, colour in (("as a clip", "s-", "#0b5394"), ("frame by frame", "o--", "#d1711c")):
    axes["line"].plot(range(1, frames + 1), quality[name], style, color=colour, label=name)
axes["line"].set(xlabel="frame", ylabel="PSNR (dB)", title="Quality of each frame")
axes["line"].legend(fontsize=8)
axes["line"].grid(alpha=0.3)
plt.show()
