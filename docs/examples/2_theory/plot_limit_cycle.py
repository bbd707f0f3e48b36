r"""
A chemical clock, from its Hopf point on
========================================

The Brusselator, :math:`x' = a - (b + 1) x + x^2 y` and :math:`y' = b x - x^2 y`, is at rest at :math:`(a, b/a)`. For
:math:`b > 1 + a^2` it oscillates (Prigogine and Lefever 1968, doi 10.1063/1.1668896).
:func:`nlflow.continue_equilibria` finds this Hopf point, :func:`nlflow.find_cycle` the cycle.
"""

import matplotlib.pyplot as plt
import numpy as np

from nlflow import Brusselator, J, Points, SystemFlow, continue_equilibria, find_cycle, solve
from nlflow.affinities import Unlinked
from nlflow.plotting import portrait_figure

# %%

a = 1.0
vessel = J(Unlinked(Points([0.0])))


def make_flow(b):
    """Return the Brusselator with this b."""
    return SystemFlow(vessel, [1.0, 1.0], reaction=Brusselator(a, b))


# %%

branch = continue_equilibria(make_flow, np.array([[a, 1.0 / a]]), 1.0, (1.0, 3.0))
(hopf,) = branch.points
print(f"{hopf.kind} point at b = {hopf.parameter:.9f}, frequency {hopf.eigenvalue.imag:.9f}")
assert hopf.kind == "hopf"
assert abs(hopf.parameter - 2) < 1e-6

# %%
# The multiplier beside 1 says by what a deviation is smaller after a period.

cycle = find_cycle(make_flow(2.5), *hopf.cycle(0.8), settle=8.0)
print(cycle.message, cycle.verdict, sep="; ")
assert cycle.verdict == "stable"

# %%
# Nullclines, the unstable equilibrium (white), and two courses that end on the cycle.

window = (0.0, 3.5), (0.5, 5.0)
starts = {"from near the equilibrium": [[1.05, 2.5]], "from outside": [[0.4, 4.8]]}
times = np.linspace(0, 26, 500)
courses = {name: solve(make_flow(2.5), np.array(start), t_eval=times).u for name, start in starts.items()}
figure, axis = plt.subplots(figsize=(6.6, 5.8), layout="constrained")
portrait_figure(
    make_flow(2.5),
    *window,
    axis=axis,
    curves={**courses, f"limit cycle, period {cycle.period:.4f}": cycle},
    xlabel="x",
    ylabel="y",
    title="The Brusselator with a = 1, b = 2.5",
)
plt.show()
