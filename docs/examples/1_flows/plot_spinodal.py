r"""
Spinodal decomposition
======================

A mixture that is quenched separates into two phases, by the flow of :class:`nlflow.functionals.ConservedMetric`, the
nonlocal Cahn-Hilliard equation

.. math:: \frac{du}{dt} = -M \mu, \qquad \mu = L u + u^3 - u,

with :math:`M = L`. Equal phases form a labyrinth, others form droplets.
"""

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.animation import FuncAnimation

from nlflow import ETD4RK, AllenCahn, ConvexSplitting, Gaussian, GradientFlow, Grid, J, affinity, solve

# %%
# The Gaussian kernel is scaled such that L is close to :math:`-\Delta` for waves that are long beside its width.

grid = Grid((128, 128), boundary="periodic")
width = 1.0
weights = affinity(Gaussian(width=width, amplitude=1 / (2 * np.pi * width**4)), grid)
flow = GradientFlow(J(weights), "conserved", reaction=AllenCahn(interval=(-1.2, 1.2)))

# %%

noise = 0.05 * np.random.default_rng(0).standard_normal(grid.shape)
times = np.concatenate([[0.0], np.logspace(0.7, 2.6, 24)])
runs = {mean: solve(flow, mean + noise - noise.mean(), t_eval=times, integrator=ETD4RK(0.5)) for mean in (0.0, -0.35)}

# %%
# There is no maximum principle: values pass −1 and 1 a little.

for mean, run in runs.items():
    print(
        f"mean {mean:+.2f}: it changes by {np.ptp(run.u.mean(axis=(1, 2))):.1e}; the energy falls from "
        f"{run.energy[0]:.0f} to {run.energy[-1]:.0f}; values from {run.final.min():.3f} to {run.final.max():.3f}"
    )
    assert np.ptp(run.u.mean(axis=(1, 2))) < 1e-13
    assert np.all(np.diff(run.energy) < 0)

figure, rows = plt.subplots(2, 4, figsize=(7.6, 4.2), layout="constrained")
for row, (mean, run) in zip(rows, runs.items(), strict=True):
    for axis, frame in zip(row, (5, 11, 17, 24), strict=True):
        axis.imshow(run.u[frame], cmap="viridis", vmin=-1, vmax=1)
        axis.set_title(f"mean {mean:g}, t = {times[frame]:.3g}", fontsize=9)
        axis.set_axis_off()

# %%
# At first a wave of wave number k grows at the rate :math:`\ell_k (1 - \ell_k)`, with :math:`\ell_k =
# \frac{2}{\sigma^2} (1 - e^{-k^2 \sigma^2 / 2})` for this kernel.

waves = 2 * np.pi * np.fft.fftfreq(128)
size = np.hypot(*np.meshgrid(waves, waves)).ravel()
first = solve(flow, 1e-4 * noise, t=5.0, integrator=ETD4RK(0.1), energies=False).final
rates = np.log(np.abs(np.fft.fft2(first) / np.fft.fft2(1e-4 * noise)).ravel()[1:]) / 5.0
ell = 2 / width**2 * (1 - np.exp(-((size * width) ** 2) / 2))
expected = ell * (1 - ell)
seen = size[1:] < 1.3
print(f"rates of growth against the formula: off by {np.abs(rates - expected[1:])[seen].max():.1e}")
assert np.abs(rates - expected[1:])[seen].max() < 1e-3

figure, (left, right) = plt.subplots(1, 2, figsize=(7.6, 3.2), layout="constrained")
order = np.argsort(size)
left.plot(size[1:][seen], rates[seen], ".", ms=2, label="measured")
left.plot(size[order], expected[order], lw=1, label="formula")
left.set(xlim=(0, 1.3), ylim=(-0.6, 0.3), xlabel="wave number", ylabel="rate", title="Onset")
left.legend()
for style, (mean, run) in zip(("o-", "s-"), runs.items(), strict=True):
    right.loglog(times[1:], run.energy[1:] / 128**2, style, ms=3, label=f"mean {mean:g}")
right.loglog(times[14:], 0.4 * times[14:] ** (-1 / 3), "--", color="grey", label="t to the power −1/3")
right.set(xlabel="t", ylabel="energy per node", title="Coarsening")
right.legend()

# %%
# :class:`nlflow.ConvexSplitting` lowers the energy also where steps are far too long to be right.

for dt in (1.0, 1e4):
    run = solve(flow, noise, t_eval=dt * np.arange(11), integrator=ConvexSplitting(dt))
    print(f"dt = {dt:g}: largest change of the energy in a step {np.diff(run.energy).max():.2g}")
    assert np.all(np.diff(run.energy) < 0)

# %%

figure, axes = plt.subplots(1, 2, figsize=(6.4, 3.6), layout="constrained", dpi=90)
pictures = [
    axis.imshow(run.u[0], cmap="viridis", vmin=-1, vmax=1) for axis, run in zip(axes, runs.values(), strict=True)
]
for axis in axes:
    axis.set_axis_off()


def show(frame):
    """Put the pictures of one time into the panels."""
    for axis, picture, (mean, run) in zip(axes, pictures, runs.items(), strict=True):
        picture.set_data(run.u[frame])
        axis.set_title(f"mean {mean:g}, t = {times[frame]:.3g}")
    return pictures


show(0)
film = FuncAnimation(figure, show, frames=len(times), interval=250)
plt.show()
