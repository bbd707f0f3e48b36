r"""
Where a NeuTRENO layer is stable
================================

The layer :math:`u \leftarrow Pu + \tilde\lambda (f - u)` is an explicit Euler step of the flow of E. For symmetric
kernels it converges where :math:`\tilde\lambda < 1 + \mu_{\min}(P)`
(:func:`nlflow.equilibria.largest_stable_fidelity`). :class:`nlflow.NeutrenoStep` refuses larger values.
"""

import matplotlib.pyplot as plt
import numpy as np

from nlflow import (
    AttentionFlow,
    NeutrenoStep,
    Points,
    StabilityError,
    equilibrium,
    from_matrix,
    largest_stable_fidelity,
    solve,
)

# %%
# The smaller the weight of a node on itself is, the nearer is :math:`\mu_{\min}` to -1.

nodes = 24
ring = np.roll(np.eye(nodes), 1, axis=1) + np.roll(np.eye(nodes), -1, axis=1)
smallest = np.linspace(-0.96, 0.64, 26)  # of P: (a - 2) / (a + 2) for the own weight a
own_weights = 2 * (1 + smallest) / (1 - smallest)
kernels = [from_matrix(ring + own * np.eye(nodes), Points(np.arange(nodes))) for own in own_weights]
limits = np.array([largest_stable_fidelity(weights) for weights in kernels])
assert np.allclose(limits, 1 + smallest, atol=1e-10)

# %%
# The growth is the factor by which a layer changes the distance to the equilibrium in the long run.

fidelities = np.linspace(0.04, 1.96, 49)
start = np.repeat(np.random.default_rng(0).standard_normal((nodes, 1)), len(fidelities), axis=1)


def growth(weights, layers=400):
    """Return the factor by which a disturbance grows in one layer, for each fidelity."""
    v, sizes = start, np.zeros((layers, len(fidelities)))
    for layer in range(layers):
        v = weights.average(v) - fidelities * v  # f drops out of the difference of two signals
        size = np.linalg.norm(v, axis=0)
        sizes[layer], v = np.log(size), v / size
    return np.exp(sizes[layers // 2 :].mean(axis=0))


factors = np.array([growth(weights) for weights in kernels])
converges = factors < 1
predicted = fidelities < limits[:, None]
clear = np.abs(fidelities - limits[:, None]) > 0.01  # next to the limit 400 layers are not enough
wrong = int((converges != predicted)[clear].sum())
print(f"{int(clear.sum())} pairs of kernel and fidelity, {wrong} on the wrong side")
assert wrong == 0

# %%

chosen = kernels[10]
limit, f = largest_stable_fidelity(chosen), np.random.default_rng(1).standard_normal(nodes)
below = AttentionFlow(chosen, f, 0.95 * limit)
course = solve(below, f, t_eval=np.arange(201.0), integrator=NeutrenoStep())
try:
    solve(AttentionFlow(chosen, f, 1.05 * limit), f, t=1, integrator=NeutrenoStep())
except StabilityError as error:
    print(error)
else:
    raise AssertionError("a layer above the limit was not refused")
stable = [below.norm(u - equilibrium(below).u) for u in course.u]
above = AttentionFlow(chosen, f, 1.05 * limit)
u, unstable = f, []
for _ in range(201):  # the refused steps, by hand
    unstable.append(above.norm(u - equilibrium(above).u))
    u = chosen.average(u) + above.fidelity.times(f - u)
assert stable[-1] < 0.01 * stable[0]
assert unstable[-1] > 10 * unstable[0]

figure, (left, right) = plt.subplots(1, 2, figsize=(7.8, 4.0), layout="constrained", width_ratios=[1.25, 1])
drawn = left.pcolormesh(smallest, fidelities, factors.T, cmap="cividis", vmin=0, vmax=2)
left.plot(smallest, 1 + smallest, "k-", linewidth=2, label=r"$\tilde\lambda = 1 + \mu_{\min}$")
grid_x, grid_y = np.meshgrid(smallest[1::3], fidelities[2::5], indexing="ij")
inside = converges[1::3, 2::5]
left.plot(grid_x[inside], grid_y[inside], "o", color="white", markersize=4, label="converges")
left.plot(grid_x[~inside], grid_y[~inside], "x", color="black", markersize=5, label="diverges")
left.set(xlabel=r"smallest eigenvalue $\mu_{\min}$ of P", ylabel=r"fidelity $\tilde\lambda$", ylim=(0, 2.25))
left.set(title="Measured growth", xticks=[-0.8, -0.4, 0, 0.4])
left.legend(loc="upper center", fontsize=7.5, ncols=3, facecolor="0.75", columnspacing=1.0, handletextpad=0.4)
figure.colorbar(drawn, ax=left, label="growth of a disturbance in one layer")
right.semilogy(unstable, "--", color="#d1711c", label="5 % above the limit")
right.semilogy(stable, "-", color="#0b5394", label="5 % below the limit")
right.set(xlabel="layer", ylabel="distance to the equilibrium", title=rf"$\mu_{{\min}} = {limit - 1:.2f}$")
right.legend(fontsize=8)
right.grid(alpha=0.3)
plt.show()
