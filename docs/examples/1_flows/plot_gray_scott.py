"""
Spots and stripes of two substances
===================================

Two channels that diffuse by averages over a kernel, and react: :class:`nlflow.flows.SystemFlow` with
:class:`nlflow.flows.GrayScott`. Which pattern a few drops of the catalyst make depends on how much substrate is fed (F)
and how quickly the catalyst dies (k).
"""

import matplotlib.pyplot as plt
import numpy as np

from nlflow import ETD4RK, Gaussian, Grid, J, affinity, solve
from nlflow.flows import GrayScott, SystemFlow

# %%
# An average over a narrow kernel, less the value itself, is about half the square of its width times the second
# derivatives, so the rates are 2 D / width².

side, width = 120, 1.2
grid = Grid((side, side), boundary="periodic")
weights = J(affinity(Gaussian(width), grid))
spacing = 0.9 / side
rates = 2 * np.array([2e-5, 1e-5]) / (width * spacing) ** 2

rng = np.random.default_rng(0)
offsets = (grid.nodes[:, None] - side * rng.random((24, 2)) + side / 2) % side - side / 2
drops = np.minimum(np.exp(-np.sum(offsets**2, axis=-1) / 18).sum(axis=1), 1).reshape(side, side)
start = np.stack([1 - drops / 2, drops / 4], axis=-1)

# %%

names = {"spots that divide": (0.0367, 0.0649), "a maze": (0.029, 0.057), "coral": (0.0545, 0.062)}
patterns = {}
for name, (feed, kill) in names.items():
    flow = SystemFlow(weights, rates, reaction=GrayScott(feed, kill))
    solution = solve(flow, start, t=3000.0, integrator=ETD4RK(6.0), energies=False)
    assert solution.success
    patterns[name] = solution.final[..., 1]
    print(f"{name}: {solution.stats['steps']} steps, v up to {patterns[name].max():.2f}")
    assert np.ptp(patterns[name]) > 0.2

figure, panels = plt.subplots(1, 3, figsize=(8.0, 3.0), layout="constrained")
for panel, (name, pattern) in zip(panels, patterns.items(), strict=True):
    panel.imshow(pattern, cmap="magma", interpolation="bilinear")
    feed, kill = names[name]
    panel.set_title(f"{name}\nF = {feed:g}, k = {kill:g}", fontsize=10)
    panel.set_axis_off()
plt.show()
