"""
A flow on a volume
==================

A grid of 48 × 48 × 20 nodes, as of a scan whose slices lie farther apart than its pixels. :class:`nlflow.flows.Frames`
writes the volume for ParaView while the flow of :class:`nlflow.E` runs.
"""

import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

from nlflow import E, Frames, Gaussian, GradientFlow, Grid, affinity, solve

# %%
# The spacing is part of the grid, so the width of the kernel is a length.

volume = Grid((48, 48, 20), spacing=(1.0, 1.0, 2.4))
distance = np.linalg.norm(volume.nodes - 24, axis=1).reshape(volume.shape)
clean = np.where(distance < 20, 1.0, 0.0) - np.where(distance < 12, 0.6, 0.0)
noisy = clean + 0.4 * np.random.default_rng(0).standard_normal(volume.shape)
weights = affinity(Gaussian(width=1.2), volume)
flow = GradientFlow(E(weights, noisy, 0.15, measure="degree"), metric="degree")

# %%
# ParaView opens ``scan.pvd`` as a film in space.

with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "scan.pvd"
    solution = solve(flow, t_eval=[0.0, 1.0, 5.0], trackers=[Frames(path, interval=0.5)])
    files = sorted(place.name for place in path.with_suffix(".vtk").glob("*.vti"))
print(f"{len(files)} files, from {files[0]} to {files[-1]}")
assert len(files) == 11

# %%

errors = [np.sqrt(np.mean((u - clean) ** 2)) for u in solution.u]
print("error " + ", ".join(f"{error:.3f} at t = {t:g}" for t, error in zip(solution.t, errors, strict=True)))
assert errors[-1] < 0.5 * errors[0]

figure, rows = plt.subplots(2, 3, figsize=(7.6, 5.2), layout="constrained")
slices = {"z = 22.8": np.s_[:, :, 9], "y = 24.5": np.s_[:, 24, :], "x = 24.5": np.s_[24, :, :]}
shapes = {"z = 22.8": (48, 48), "y = 24.5": (48, 48), "x = 24.5": (48, 48)}
for row, u, when in zip(rows, (solution.u[0], solution.u[-1]), ("t = 0", "t = 5"), strict=True):
    for axis, (name, part) in zip(row, slices.items(), strict=True):
        height, width = shapes[name]
        axis.imshow(u[part], extent=(0, width, height, 0), cmap="gray", vmin=-0.3, vmax=1.3)
        axis.set_title(f"{name}, {when}")
        axis.set_axis_off()
plt.show()
