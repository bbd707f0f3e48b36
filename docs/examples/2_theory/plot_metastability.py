"""
Noise and metastability
=======================

Where one of the two phases of the Allen-Cahn equation is deeper, the other one stays without noise.
:class:`nlflow.flows.Noise` makes nuclei of the deeper phase, and large ones grow. How long that takes is random, and
nearly exponential.
"""

import matplotlib.pyplot as plt
import numpy as np

from nlflow import AllenCahn, Gaussian, GradientFlow, Grid, J, affinity, solve
from nlflow.flows import ExponentialEuler, Noise, Source, ensemble

# %%
# The noise is white in the measure of the flow, so that exp(-beta E) is the law that the sheet comes to in the end.

n = 128
sheet = affinity(Gaussian(width=1.5), Grid((n, n), boundary="periodic"), method="convolution")
wells = AllenCahn(2.0, interval=(-2.0, 2.0))
flow = GradientFlow(J(sheet), "degree") + wells + Source(np.full((n, n), 0.2))
times = [8.0, 16.0, 24.0, 32.0]
quiet = solve(flow, -np.ones((n, n)), t=32.0, integrator=ExponentialEuler(0.08))
noisy = solve(flow + Noise(beta=0.165, rng=1), -np.ones((n, n)), t_eval=times, integrator=ExponentialEuler(0.08))
print(
    f"after t = 32 {np.mean(quiet.final > 0):.0%} of the sheet has changed its phase without noise, and with it "
    f"{np.mean(noisy.final > 0):.0%}"
)
assert quiet.final.max() < 0

# %%
# A short ring, whose nodes all see each other, changes as a whole. 256 paths run side by side; of each the time is kept
# at which its mean passes 0.

ring = affinity(Gaussian(width=3.0), Grid(12, boundary="periodic"), method="convolution")
small = GradientFlow(J(ring), "degree") + wells
t = np.linspace(0, 100, 401)


def of_path(t, u):
    """Return the means of the ring, and when they passed 0: the end where they did not."""
    means = u.mean(axis=1)
    return np.append(means, t[np.argmax(means > 0)] if means.max() > 0 else np.inf)


many = ensemble(
    small + Noise(beta=0.22, rng=2), -np.ones(12), 256, t_eval=t, integrator=ExponentialEuler(0.08), keep=of_path
)
means, waits = many.values[:, :-1], many.values[:, -1]
left = np.array([(waits > time).mean() for time in t])
rate = np.isfinite(waits).sum() / np.minimum(waits, t[-1]).sum()
print(f"the ring waits for {1 / rate:.0f} on average; {np.isfinite(waits).mean():.0%} have changed")

figure = plt.figure(figsize=(7.6, 5.2), layout="constrained")
above, below = figure.subfigures(2, 1, height_ratios=[1, 1.25])
axes = above.subplots(1, 4)
for axis, time, u in zip(axes, noisy.t, noisy.u, strict=True):
    shown = axis.imshow(u, cmap="cividis", vmin=-1.5, vmax=1.5)
    axis.set_title(f"t = {time:.0f}", fontsize=10)
    axis.set_axis_off()
above.colorbar(shown, ax=axes, shrink=0.85, ticks=[-1, 0, 1], label="u")
paths, law = below.subplots(1, 2)
for path in means[:6]:
    paths.plot(t, path, linewidth=0.7)
paths.set(xlabel="t", ylabel="mean of a ring", title="six of 256 paths")
low, high = (np.clip(left + sign * 2 * np.sqrt(left * (1 - left) / len(waits)), 1e-3, 1) for sign in (-1, 1))
law.fill_between(t, low, high, alpha=0.3, label="256 paths, 95 %")
law.plot(t, left)
law.plot(t, np.exp(-rate * t), "k--", label=f"exp(-t / {1 / rate:.0f})")
law.set(xlabel="t", ylabel="share of rings", yscale="log", ylim=(0.25, 1.1), title="still in the first phase")
law.set_yticks([0.3, 0.5, 0.7, 1.0], ["30 %", "50 %", "70 %", "100 %"])
law.minorticks_off()
law.legend()
