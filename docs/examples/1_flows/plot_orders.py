"""
Orders of accuracy
==================

Each integrator states its ``order``. Here the orders are measured on a flow of :class:`nlflow.E`, against the matrix
exponential of SciPy.
"""

import matplotlib.pyplot as plt
import numpy as np
from scipy.linalg import expm

from nlflow import (
    E,
    ExplicitEuler,
    Exponential,
    Gaussian,
    GradientFlow,
    Grid,
    RungeKutta,
    SemiImplicit,
    affinity,
    solve,
)

# %%

end, fidelity = 4.0, 0.4
rng = np.random.default_rng(0)
f, start = rng.standard_normal((2, 64))
weights = affinity(Gaussian(width=3.0), Grid(64, boundary="periodic"))
flow = GradientFlow(E(weights, f, fidelity, measure="degree"), metric="degree")

operator = (1 + fidelity) * np.eye(64) - weights.average(np.eye(64))
limit = np.linalg.solve(operator, fidelity * f)
exact = limit + expm(-end * operator) @ (start - limit)


def error_and_cost(integrator):
    """Return the largest error at the end, and how often P was applied."""
    solution = solve(flow, start, t=end, integrator=integrator, energies=False)
    return np.abs(solution.final - exact).max(), solution.stats["applications"]


# %%
# The measured order is the slope over the three shortest steps.

steps = end / 2.0 ** np.arange(2, 8)
kinds = {
    "explicit Euler": (ExplicitEuler, "o-", "#d1711c"),
    "semi-implicit": (SemiImplicit, "s--", "#0b5394"),
    "Runge-Kutta": (lambda dt: RungeKutta(dt=dt, adaptive=False), "^-.", "#4d4d4d"),
}
measured = {name: np.array([error_and_cost(make(dt)) for dt in steps]) for name, (make, *_) in kinds.items()}
slopes = {name: np.polyfit(np.log(steps[-3:]), np.log(found[-3:, 0]), 1)[0] for name, found in measured.items()}
for name, slope in slopes.items():
    stated = kinds[name][0](0.1).order
    print(f"{name:>15}: order {slope:.3f}, stated {stated:g}")
    assert abs(slope - stated) < 0.2
tolerances = 10.0 ** -np.arange(2, 13)
chebyshev = np.array([error_and_cost(Exponential(tol=tol)) for tol in tolerances])
print(f"    exponential: error {chebyshev[-1, 0]:.1e} with {chebyshev[-1, 1]:.0f} averages")

# %%

figure, (left, right) = plt.subplots(1, 2, figsize=(7.6, 3.9), layout="constrained", sharey=True)
for name, (_, style, colour) in kinds.items():
    errors, costs = measured[name].T
    left.loglog(steps, errors, style, color=colour, label=f"{name}, slope {slopes[name]:.2f}")
    right.loglog(costs, errors, style, color=colour, label=name)
right.loglog(chebyshev[:, 1], chebyshev[:, 0], "D:", color="#b5179e", label="exponential")
left.set(xlabel="step Δt", ylabel="largest error at t = 4", title="Accuracy")
right.set(xlabel="averages Pu", title="Cost")
right.set_ylabel("largest error at t = 4")
for axis in (left, right):
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
plt.show()
