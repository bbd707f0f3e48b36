"""
Choosing the fidelity without the clean signal
==============================================

:func:`nlflow.equilibria.choose_fidelity` estimates from the noisy signal alone with which fidelity the minimizer of E
is nearest to the clean one: by generalized cross-validation, Stein's estimate, the evidence of the Gaussian field, or
the corner of the L-curve.
"""

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.ticker import NullFormatter

from nlflow import E, Gaussian, Grid, affinity
from nlflow.equilibria import choose_fidelity

# %%

COLOURS = ("#0b5394", "#56b4e9", "#d1711c", "#009e73", "#cc79a7", "#4d4d4d")
n, sigma = 200, 0.25
rows, columns = np.mgrid[:n, :n] / n
clean = np.sin(6 * rows) * np.cos(5 * columns) + 0.6 * (np.hypot(rows - 0.55, columns - 0.4) < 0.2)
noisy = clean + np.random.default_rng(0).normal(0, sigma, clean.shape)
weights = affinity(Gaussian(width=2.0), Grid((n, n), boundary="reflect"))
energy = E(weights, noisy, 1.0)

# %%

methods = ("rgcv", "gcv", "sure", "discrepancy", "evidence", "lcurve")
chosen = {name: choose_fidelity(energy, method=name, sigma=None if "gcv" in name else sigma) for name in methods}
values = chosen["gcv"].values


def error(fidelity):
    """Return the mean squared error of the minimizer, which needs the clean signal."""
    return np.mean((E(weights, noisy, float(fidelity)).minimizer().u - clean) ** 2)


true = np.array([error(fidelity) for fidelity in values])
errors = {name: error(choice.value) for name, choice in chosen.items()}
for name, choice in chosen.items():
    print(f"{name:12s} fidelity {choice.value:8.4f}, mean squared error {errors[name]:.5f}")
print(f"{'best':12s} fidelity {values[true.argmin()]:8.4f}, mean squared error {true.min():.5f}")
assert max(errors["rgcv"], errors["sure"]) < 1.1 * true.min()
assert errors["gcv"] > 1.5 * true.min()

# %%
# For large fidelities the minimizer is nearly a number times the noisy signal, and cross-validation is flat; its robust
# form rises there.

figure, panels = plt.subplot_mosaic([["error", "error"], ["L", "evidence"]], figsize=(7.8, 7), layout="constrained")
looks = dict(zip(methods, zip(COLOURS, "osD^vP", strict=True), strict=True))
panels["error"].plot(values, true, color="black", linewidth=4, alpha=0.25, label="true error")
panels["error"].plot(values, chosen["gcv"].curve - sigma**2, color=COLOURS[1], linewidth=1.4, label="gcv, less σ²")
panels["error"].plot(values, chosen["sure"].curve, "--", color=COLOURS[2], linewidth=1.4, label="sure")
panels["error"].set(xscale="log", yscale="log", xlabel="fidelity λ", ylabel="mean squared error")
panels["error"].set(title="Chosen without the clean signal", ylim=(0.5 * true.min(), 1))
panels["L"].plot(chosen["lcurve"].residual, chosen["lcurve"].roughness, color="0.3", linewidth=1.4)
panels["L"].set(xscale="log", yscale="log", xlabel="residual", ylabel="roughness <u, Lu>", title="L-curve")
panels["L"].set_xticks([0.03, 0.1, 0.3], ["0.03", "0.1", "0.3"])
panels["L"].xaxis.set_minor_formatter(NullFormatter())
panels["evidence"].plot(values, -chosen["evidence"].curve / n**2, color=COLOURS[4], linewidth=1.6)
panels["evidence"].set(xscale="log", xlabel="fidelity λ", ylabel="log evidence, per node", title="Evidence")
for name, choice in chosen.items():
    style = {"color": looks[name][0], "marker": looks[name][1], "linestyle": "", "markersize": 7}
    panels["error"].plot(choice.value, errors[name], label=f"chosen by {name}", **style)
    place = np.log(choice.value), np.log(values)
    panels["L"].plot(np.interp(*place, choice.residual), np.exp(np.interp(*place, np.log(choice.roughness))), **style)
    panels["evidence"].plot(choice.value, np.interp(*place, -chosen["evidence"].curve / n**2), **style)
panels["error"].legend(fontsize=8, loc="lower left")
plt.show()
