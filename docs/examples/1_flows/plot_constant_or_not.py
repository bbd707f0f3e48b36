"""
Constant or not
===============

The gradient flow of :class:`nlflow.J` runs to a constant, that of :class:`nlflow.E` also draws back to the signal. One
eigenvalue gives the rates of both.
"""

import matplotlib.pyplot as plt
import numpy as np

from nlflow import E, Gaussian, GradientFlow, Grid, J, MarkovChain, affinity, equilibrium, solve

# %%
# In the degree metric the flow of J is :math:`du/dt = Pu - u`; that of E adds :math:`\tilde\lambda (f - u)`.

width, fidelity = 0.05, 0.3
grid = Grid(200, spacing=1 / 200, boundary="reflect")
x = grid.nodes[:, 0]
f = np.where((x > 0.15) & (x < 0.4), 1.0, 0.0) + np.where(x > 0.5, 0.5 * np.sin(8 * np.pi * x), 0.0)
f += 0.05 * np.random.default_rng(0).standard_normal(x.size)

weights = affinity(Gaussian(width), grid)
j_flow = GradientFlow(J(weights), metric="degree")
e_flow = GradientFlow(E(weights, f, fidelity, measure="degree"), metric="degree")
times = np.concatenate([[0.0], np.logspace(-1, np.log10(2000), 120)])
j = solve(j_flow, f, t_eval=times, energies=False)
e = solve(e_flow, f, t_eval=times, energies=False)

# %%
# The slowest deviation from the mean decays at the rate :math:`1 - \mu_2`, :math:`\mu_2` being the second eigenvalue of
# P; that from the minimizer of E at :math:`1 - \mu_2 + \tilde\lambda`. Here the slowest deviation is half a cosine, so
# the eigenvalue has a closed form.

rate = 1 - MarkovChain(weights).second_eigenvalue
print(f"rate of the J-flow {rate:.6f}, closed form {-np.expm1(-((np.pi * width) ** 2) / 2):.6f}")
assert np.isclose(rate, -np.expm1(-((np.pi * width) ** 2) / 2), rtol=1e-9)

limit = equilibrium(e_flow).u
to_constant = np.array([j_flow.distance_to_constant(u) for u in j.u])
to_limit = np.array([e_flow.norm(u - limit) for u in e.u])
left_by_e = np.array([e_flow.distance_to_constant(u) for u in e.u])
j_bound = to_constant[0] * np.exp(-rate * times)
e_bound = to_limit[0] * np.exp(-(rate + fidelity) * times)
rounding = 1e-11 * to_constant[0]
assert np.all(to_constant <= j_bound + rounding)
assert np.all(to_limit <= e_bound + rounding)
print(f"deviation from the mean left at t = {times[-1]:.0f}:")
print(f"J-flow {to_constant[-1] / to_constant[0]:.1e}, E-flow {left_by_e[-1] / left_by_e[0]:.3f}")

# %%

figure, axes = plt.subplot_mosaic([["J", "E"], ["decay", "decay"]], figsize=(7.6, 6.4), layout="constrained")
for name, title, solution in (("J", "J-flow", j), ("E", rf"E-flow, $\tilde\lambda = {fidelity}$", e)):
    drawn = axes[name].pcolormesh(times[1:], x, solution.u[1:].T, cmap="viridis", vmin=-0.6, vmax=1.1)
    axes[name].set(title=title, xscale="log", xlabel="time t", ylabel="position x")
figure.colorbar(drawn, ax=[axes["J"], axes["E"]], label="signal u(x, t)")

blue, orange, grey = "#0b5394", "#d1711c", "0.4"
shown = slice(1, None)
axis = axes["decay"]
axis.loglog(times[shown], to_constant[shown], "o", color=orange, markersize=3.5, label="J-flow to its mean")
axis.loglog(times[shown], j_bound[shown], "-", color=orange, linewidth=1, label=r"$\exp(-(1-\mu_2)\,t)$")
axis.loglog(times[shown], to_limit[shown], "s", color=blue, markersize=3.5, label="E-flow to the minimizer of E")
axis.loglog(times[shown], e_bound[shown], "--", color=blue, linewidth=1, label=r"$\exp(-(1-\mu_2+\tilde\lambda)\,t)$")
axis.loglog(times[shown], left_by_e[shown], "-.", color=grey, label="E-flow to its mean")
axis.set(xlabel="time t", ylabel="distance (root mean square)", ylim=(1e-10, 3), title="Both limits are reached")
axis.legend(loc="lower left", fontsize=9)
axis.grid(alpha=0.3)
plt.show()
