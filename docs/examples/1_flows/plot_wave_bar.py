r"""
A wave in a peridynamic bar
===========================

In peridynamics the nodes of a bar pull at all others within reach:

.. math:: \rho\, u'' = \int k(|x - y|)\, (u(y) - u(x))\, dy = -L u.

Short waves are slower than long ones, so a pulse falls apart. :class:`nlflow.flows.WaveFlow` is the flow, and
:class:`nlflow.flows.StoermerVerlet` its step.
"""

import matplotlib.pyplot as plt
import numpy as np

from nlflow import Gaussian, GradientFlow, Grid, J, StoermerVerlet, WaveExponential, WaveFlow, affinity, solve

# %%
# The kernel is scaled such that long waves have the speed 1.

width, nodes = 0.02, 512
grid = Grid(nodes, spacing=1 / nodes, boundary="periodic")
x = grid.nodes[:, 0]
strength = 1 / (width**3 * np.sqrt(2 * np.pi))
flow = WaveFlow(GradientFlow(J(affinity(Gaussian(width=width, amplitude=strength), grid))))

# %%
# A wave has the frequency :math:`\omega(k)^2 = \frac{2}{\sigma^2} (1 - e^{-k^2 \sigma^2 / 2})`, measured at standing
# waves.


def frequency(k):
    """Return the closed form."""
    return np.sqrt(2 * (1 - np.exp(-((k * width) ** 2) / 2))) / width


numbers = np.arange(1, 41)
measured = []
for number in numbers:
    mode, t = np.cos(2 * np.pi * number * x), 0.5 / frequency(2 * np.pi * number)
    end = solve(flow, flow.state(mode), t=t, integrator=WaveExponential(), energies=False).final
    measured.append(np.arccos(flow.displacement(end) @ mode / (mode @ mode)) / t)
error = np.abs(measured / frequency(2 * np.pi * numbers) - 1).max()
print(f"frequencies against the closed form: off by {error:.1e}")
assert error < 1e-9

# %%
# Velocities are those of a wave that moves to the right, formed in Fourier space.


def pulse(size):
    """Return a pulse that runs to the right."""
    u = np.exp(-(((x - 0.2) / size) ** 2) / 2)
    k = 2 * np.pi * np.fft.rfftfreq(nodes, 1 / nodes)
    v = np.fft.irfft(-1j * frequency(k) * np.fft.rfft(u), nodes)
    return flow.state(u, v)


times = np.linspace(0, 0.6, 121)
dt = 0.1 * StoermerVerlet(1.0).stability_limit(flow)
runs = {size: solve(flow, pulse(size), t_eval=times, integrator=StoermerVerlet(dt)) for size in (0.012, 0.05)}
for size, run in runs.items():
    exact = solve(flow, pulse(size), t=0.6, integrator=WaveExponential()).final
    off = np.abs(flow.displacement(run.final - exact)).max()
    print(f"pulse of {size}: energy changes by {np.ptp(run.energy) / run.energy[0]:.1e}, off by {off:.1e}")
    assert np.ptp(run.energy) < 1e-2 * run.energy[0]
    assert off < 2e-2

figure, axes = plt.subplots(1, 3, figsize=(7.8, 3.2), layout="constrained")
k = 2 * np.pi * np.linspace(0.01, 40, 400)
axes[0].plot(k, k, "--", color="grey", label="local bar, ω = k")
axes[0].plot(k, frequency(k), label="closed form")
axes[0].plot(2 * np.pi * numbers, measured, ".", ms=4, label="measured")
axes[0].set(xlabel="wave number k", ylabel="ω", ylim=(0, 1.6 * np.sqrt(2) / width), title="Dispersion")
axes[0].legend(fontsize=8)
for axis, (size, run) in zip(axes[1:], runs.items(), strict=True):
    axis.imshow(
        flow.displacement(run.u), cmap="viridis", vmin=-1, vmax=1, aspect="auto", origin="lower", extent=(0, 1, 0, 0.6)
    )
    axis.set(xlabel="x", ylabel="t", title=f"pulse of width {size}")

# %%

figure, axis = plt.subplots(figsize=(7.6, 2.8), layout="constrained")
for style, (size, run) in zip(("-", "-."), runs.items(), strict=True):
    axis.plot(x, flow.displacement(run.final), style, label=f"pulse of width {size}")
axis.plot(x, np.exp(-(((x - 0.8) / 0.05) ** 2) / 2), ":", color="grey", label="the wide one in a local bar")
axis.set(xlabel="x", ylabel="u", title="t = 0.6")
axis.legend(fontsize=8)
plt.show()
