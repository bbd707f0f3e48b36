"""
A colour picture with unknown noise
===================================

Without ``sigma`` the noise is estimated (:func:`nlflow.estimate_sigma`). ``channel_axis=-1`` denoises the channels
together, since all of them say which patches are alike.
"""

import matplotlib.pyplot as plt
import numpy as np
from skimage import data
from skimage.metrics import peak_signal_noise_ratio

from nlflow import denoise, estimate_sigma

sigma = 20.0
clean = data.astronaut()[10:186, 140:300].astype(np.float32)
noisy = clean + np.random.default_rng(0).normal(0, sigma, clean.shape).astype(np.float32)

# %%

together, info = denoise(noisy, channel_axis=-1, return_info=True)
alone = np.stack([denoise(noisy[..., channel]) for channel in range(3)], axis=-1)
print(f"noise: estimated {info.sigma:.2f}, true {sigma:.2f}; {info.steps} steps, {info.stopped_by}")
print("of the channels alone:", *(f"{estimate_sigma(noisy[..., channel]):.2f}" for channel in range(3)))
assert info.sigma_estimated
assert abs(info.sigma - sigma) < 0.1 * sigma

pictures = {"clean": clean, "noisy": noisy, "channel by channel": alone, "together": together}
psnr = {name: peak_signal_noise_ratio(clean, u, data_range=255) for name, u in pictures.items() if name != "clean"}
for name, value in psnr.items():
    print(f"{name:>18}: {value:.2f} dB")
assert psnr["noisy"] < psnr["channel by channel"] < psnr["together"]

# %%

figure, axes = plt.subplots(1, 4, figsize=(7.8, 2.6), layout="constrained")
for axis, (name, picture) in zip(axes, pictures.items(), strict=True):
    axis.imshow(np.clip(picture / 255, 0, 1))
    axis.set_title(f"{name}\n{psnr[name]:.2f} dB" if name in psnr else f"{name}\n", fontsize=10)
    axis.set_axis_off()
plt.show()
