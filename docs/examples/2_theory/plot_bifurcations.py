r"""
Which patterns a nonlocal Allen-Cahn equation has
=================================================

On a circle, :math:`u = 0` is an equilibrium of :math:`du/dt = Pu - u + r (u - u^3)`. At :math:`r = 1 - \mu_k`,
:math:`\mu_k` being an eigenvalue of P, a branch of patterns with k waves begins. :func:`nlflow.continue_equilibria`
follows the branches, finds these pitchforks, and says which equilibria are stable.
"""

import matplotlib.pyplot as plt
import numpy as np

from nlflow import Gaussian, GradientFlow, Grid, J, Reaction, affinity, continue_equilibria
from nlflow.plotting import bifurcation_figure

# %%

nodes = 64
circle = Grid(nodes, spacing=1 / nodes, boundary="periodic")
weights = affinity(Gaussian(width=0.12), circle)


def make_flow(r):
    """Return the flow with this strength of the reaction."""
    cubic = Reaction(lambda u: r * (u - u**3), (-2, 2), derivative=lambda u: r * (1 - 3 * u**2))
    return GradientFlow(J(weights), "degree", reaction=cubic)


# %%
# All eigenvalues but the first are double: a pattern may be turned round the circle.

zero = continue_equilibria(make_flow, np.zeros(nodes), -0.08, (-0.08, 0.95))
found = [point.parameter for point in zero.points]
row = weights.average(np.eye(nodes)[0])
expected = 1 - np.fft.rfft(row).real[: len(found)]
for point, value in zip(zero.points, expected, strict=True):
    print(f"{point.kind} at r = {point.parameter:.12f}, off by {abs(point.parameter - value):.0e}")
assert np.allclose(found, expected, atol=1e-9)

# %%

waves = [zero.switch(point, sign=sign) for point in zero.points[1:] for sign in (1, -1)]
constants = [continue_equilibria(make_flow, np.full(nodes, sign), 0.95, (0.005, 0.95)) for sign in (1.0, -1.0)]
assert all(branch.success for branch in waves)
assert all(branch.stable.all() for branch in constants)

figure, axis = plt.subplots(figsize=(7.6, 4.8), layout="constrained")
names = ["one wave", "two waves", "three waves"]
bifurcation_figure(
    {"u = 0": zero, "u = ±1": constants} | {name: waves[2 * i : 2 * i + 2] for i, name in enumerate(names)},
    axis=axis,
    value=lambda u: u[0],
    xlabel="strength r of the reaction",
    ylabel="u at one node",
    title="Equilibria of a nonlocal Allen-Cahn equation on a circle",
)

# %%

x = circle.nodes[:, 0]
profiles, axis = plt.subplots(figsize=(7.6, 3.2), layout="constrained")
for name, style, branch in zip(names, ("-", "--", ":"), waves[::2], strict=True):
    axis.plot(x, branch.u[-1], style, label=f"{name}; directions that grow: {branch.unstable[-1]}")
axis.set(xlabel="x", ylabel="u", title="Patterns at r = 0.95")
axis.legend(loc="upper center", ncols=2, fontsize=8)
axis.set_ylim(-1.1, 1.6)
plt.show()
