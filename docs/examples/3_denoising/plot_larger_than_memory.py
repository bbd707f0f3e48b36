"""
Larger than memory
==================

A picture that does not fit into memory is denoised in parts, with the bits of the whole. ``max_memory`` of
:func:`nlflow.denoise` cuts it into strips. :func:`nlflow.denoising.large.denoise_array` takes blocks of a Dask array,
from disk to disk.
"""

import tempfile
from pathlib import Path

import dask.array as da
import matplotlib.pyplot as plt
import numpy as np
import zarr
from matplotlib.patches import Rectangle
from skimage import data

from nlflow import denoise
from nlflow.denoising.large import denoise_array

sigma = 25.0
rng = np.random.default_rng(0)

# %%

scan = np.concatenate([data.brick(), data.grass()])[:, :32].astype(np.float32)
scan += rng.normal(0, sigma, scan.shape).astype(np.float32)
whole, told = denoise(scan, sigma, return_info=True)
strips, cut = denoise(scan, sigma, max_memory=0.9 * told.memory_bytes, return_info=True)
print(f"{cut.tiles} strips of {cut.memory_bytes / 2**20:.1f} MiB in place of {told.memory_bytes / 2**20:.1f} MiB")
assert cut.tiles > 1
assert np.array_equal(whole, strips)

# %%
# The whole picture decides the noise, the range and the number of steps, which are computed first.

noisy = data.camera()[40:424, 80:464] + rng.normal(0, sigma, (384, 384)).astype(np.float32)
with tempfile.TemporaryDirectory() as folder:
    source, target = Path(folder) / "noisy.zarr", Path(folder) / "clean.zarr"
    stored = zarr.create_array(source, shape=noisy.shape, chunks=(128, 128), dtype=noisy.dtype)
    stored[:] = noisy
    lazy, info = denoise_array(da.from_zarr(source), sigma, quality="pixels", return_info=True)
    lazy.to_zarr(target)
    blocks = zarr.open_array(target, mode="r")[:]
once, plain = denoise(noisy, sigma, quality="pixels", return_info=True)
print(f"{info.tiles} blocks of {info.memory_bytes / 2**20:.1f} MiB in place of {plain.memory_bytes / 2**20:.1f} MiB")
assert np.array_equal(blocks, once)

# %%

figure, (left, right) = plt.subplots(1, 2, figsize=(7.6, 4.2), layout="constrained", width_ratios=[1.35, 1])
left.imshow(blocks, cmap="gray", vmin=0, vmax=255)
for edge in (127.5, 255.5):
    left.axhline(edge, color="white", linewidth=0.8, linestyle=":")
    left.axvline(edge, color="white", linewidth=0.8, linestyle=":")
left.add_patch(Rectangle((87.5, 87.5), 208, 208, fill=False, edgecolor="white", linewidth=1.5, linestyle="--"))
left.set(title="Blocks, and one with its halo", xlabel="pixel", ylabel="pixel")
sizes = [memory / 2**20 for memory in (told.memory_bytes, cut.memory_bytes, plain.memory_bytes, info.memory_bytes)]
names = ["balanced,\nwhole", "balanced,\nstrips", "pixels,\nwhole", "pixels,\nblocks"]
bars = right.bar(names, sizes, color=["#0b5394", "#9db8d6"] * 2, edgecolor="black", hatch=["", "//"] * 2)
right.bar_label(bars, fmt="%.1f")
right.set(yscale="log", ylim=(1, 300), ylabel="working memory (MiB)", xlabel="how it was denoised")
right.set_title("The same bits")
right.tick_params(axis="x", labelsize=8)
plt.show()
