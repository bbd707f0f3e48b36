"""
Values held in a volume
=======================

:class:`nlflow.Constraint` holds a plate at given temperatures along its rim, which has to be as wide as nodes see, and
in a disk. The other nodes follow the flow of :class:`nlflow.J`, whose limit is the harmonic extension of the held
values.
"""

import matplotlib.pyplot as plt
import numpy as np

from nlflow import ETD4RK, Constraint, GradientFlow, Grid, J, TopHat, affinity, equilibrium, solve

# %%
# The left and the right rim have the temperatures -1 and 1, the disk oscillates.

n, reach = 60, 3
grid = Grid((n, n), boundary="isolated")
weights = affinity(TopHat(radius=reach), grid, window=reach, method="stencil")
rows, columns = np.indices((n, n))
rim = np.minimum.reduce([rows, columns, n - 1 - rows, n - 1 - columns]) < reach
disk = np.hypot(rows - 22, columns - 36) < 8
values = np.where(rim, np.clip(2 * (columns - n / 2) / (n - 2 * reach), -1, 1), 0.0)


def held(t):
    """Return the values at time t; only those of held nodes count."""
    return np.where(disk, 1.5 * np.cos(0.05 * t), values)


# %%

moving = GradientFlow(J(weights), metric="degree", constraint=Constraint(rim | disk, held))
film = solve(moving, np.zeros((n, n)), t_eval=[0.0, 20.0, 60.0], integrator=ETD4RK(1.0))
for t, u in zip(film.t, film.u, strict=True):
    assert np.array_equal(u[disk], held(t)[disk])

# %%

still = GradientFlow(J(weights), metric="degree", constraint=Constraint(rim | disk, held(0.0)))
limit = equilibrium(still, np.zeros((n, n)))
assert limit.success
assert -1 <= limit.u.min() <= limit.u.max() <= 1.5
late = solve(still, np.zeros((n, n)), t=600.0).final
print(f"after t = 600 the flow is {np.abs(late - limit.u).max():.1e} from its limit")
assert np.abs(late - limit.u).max() < 0.05

figure, axes = plt.subplots(1, 3, figsize=(7.6, 2.9), layout="constrained")
pictures = [("t = 20", film.u[1]), ("t = 60", film.u[2]), ("limit, disk held at 1.5", limit.u)]
for axis, (name, picture) in zip(axes, pictures, strict=True):
    shown = axis.imshow(picture, cmap="viridis", vmin=-1.5, vmax=1.5)
    axis.set_title(name)
    axis.set_axis_off()
figure.colorbar(shown, ax=axes, label="temperature", shrink=0.8)
plt.show()
