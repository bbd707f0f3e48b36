"""
A film of two flows
===================

A noisy photograph under the flows of :class:`nlflow.J` and :class:`nlflow.E`, with one kernel of patches that look
alike (:class:`nlflow.Patch`). Both remove the noise; the flow of J runs on to a grey square.
"""

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.animation import FuncAnimation
from skimage import data

from nlflow import E, Exponential, GradientFlow, Grid, J, Patch, affinity, solve

# %%

sigma, fidelity = 20.0, 0.2
clean = data.camera()[16:496, 16:496].reshape(96, 5, 96, 5).mean(axis=(1, 3))
noisy = clean + np.random.default_rng(0).normal(0, sigma, clean.shape)
weights = affinity(Patch(width=2 * sigma, patch_size=5, search_radius=5, sigma=sigma), Grid(noisy.shape), noisy)

j_flow = GradientFlow(J(weights), metric="degree")
e_flow = GradientFlow(E(weights, noisy, fidelity, measure="degree"), metric="degree")
times = np.concatenate([[0.0], np.logspace(-0.5, 3.75, 17)])
j = solve(j_flow, noisy, t_eval=times, integrator=Exponential(tol=1e-5))
e = solve(e_flow, noisy, t_eval=times, integrator=Exponential(tol=1e-5))

# %%

assert np.all(np.diff(j.energy) <= 1e-6 * j.energy[0])
assert np.all(np.diff(e.energy) <= 1e-6 * e.energy[0])
contrast = {"J": [j_flow.distance_to_constant(u) for u in j.u], "E": [e_flow.distance_to_constant(u) for u in e.u]}
for name, values in contrast.items():
    print(f"{name}-flow: contrast {values[0]:.1f} at the start, {values[-1]:.3g} at t = {times[-1]:.0f}")
assert contrast["J"][-1] < 0.01 * contrast["J"][0]
assert contrast["E"][-1] > 0.5 * contrast["E"][0]

# %%

stills = (0, 4, 9, 17)
figure, rows = plt.subplots(2, len(stills), figsize=(7.6, 4.3), layout="constrained")
for row, name, solution in zip(rows, "JE", (j, e), strict=True):
    for axis, frame in zip(row, stills, strict=True):
        axis.imshow(solution.u[frame], cmap="gray", vmin=0, vmax=255)
        axis.set_title(f"{name}-flow, t = {times[frame]:.3g}")
        axis.set_axis_off()

# %%

figure, axes = plt.subplots(1, 2, figsize=(6.4, 3.6), layout="constrained", dpi=90)
pictures = []
for axis in axes:
    pictures.append(axis.imshow(noisy, cmap="gray", vmin=0, vmax=255))
    axis.set_axis_off()


def show(frame):
    """Put the pictures of one time into the panels."""
    for axis, picture, name, solution in zip(axes, pictures, "JE", (j, e), strict=True):
        picture.set_data(solution.u[frame])
        axis.set_title(f"{name}-flow, t = {times[frame]:.3g}\ncontrast {contrast[name][frame]:.1f}")
    return pictures


show(0)  # the layout makes room for the titles
film = FuncAnimation(figure, show, frames=len(times), interval=300)
plt.show()
