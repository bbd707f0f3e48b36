"""
Fractional diffusion
====================

:class:`nlflow.functionals.FractionalLaplacian` lets a Lévy flight and heat run on the same disc, with the value 0
outside: the flight by its singular kernel, heat as the limit of a kernel with a small horizon.
"""

import matplotlib.pyplot as plt
import numpy as np

from nlflow import Exponential, FractionalLaplacian, GradientFlow, Grid, solve

# %%

side = 81
grid = Grid((side, side), spacing=2 / side, boundary="isolated")
x, y = (grid.nodes - 1).T
inside = (1 - np.hypot(x, y)).reshape(side, side)
operators = {
    "flight, s = 0.5": FractionalLaplacian(grid, s=0.5, inside=inside),
    "heat": FractionalLaplacian(grid, s=0.5, inside=inside, horizon=3 / side, scaling="local", corrected=False),
}

# %%
# Clocks are set so that the first eigenfunctions decay alike.

spot = np.exp(-((x + 0.4) ** 2 + y**2) / 0.01).reshape(side, side)[inside > 0]
moments = np.array([0.05, 0.2, 0.6])
pictures, cuts = {}, {}
for name, operator in operators.items():
    u = np.ones(operator.domain.shape)
    for _ in range(12):
        u = operator.solve(u / np.linalg.norm(u)).u
    rate = 1 / np.linalg.norm(u)
    print(f"{name}: first eigenvalue {rate:.3f}")
    solution = solve(GradientFlow(operator.functional()), spot, t_eval=moments / rate, integrator=Exponential())
    pictures[name] = [operator.on_grid(np.maximum(now, 1e-300)) for now in solution.u]
    cuts[name] = [picture[:, side // 2] for picture in pictures[name]]


def far(picture):
    return np.nanmax(picture[3 * side // 4 :]) / np.nanmax(picture)


assert abs(rate / 2.4048**2 - 1) < 0.05  # heat: the square of the first zero of the Bessel function J0
assert far(pictures["flight, s = 0.5"][0]) > 1000 * far(pictures["heat"][0])

# %%

figure, axes = plt.subplots(2, 3, figsize=(7, 4.6), layout="constrained")
for row, (name, shown) in zip(axes, pictures.items(), strict=True):
    for axis, picture, moment in zip(row, shown, moments, strict=True):
        image = axis.imshow(np.log10(picture / np.nanmax(picture)).T, cmap="viridis", vmin=-4, vmax=0, origin="lower")
        axis.set_title(f"{name}, t = {moment:g}", fontsize=9)
        axis.set_axis_off()
bar = figure.colorbar(image, ax=axes, shrink=0.7)
bar.set_label("log10 of u over its maximum", fontsize=9)

# %%
# Along the diameter through the spot the flight keeps a peak and has heavy tails; heat is a bell that widens.

figure, axis = plt.subplots(figsize=(7, 3), layout="constrained")
places = grid.axes[0] - 1
for (name, shown), style in zip(cuts.items(), ("-", "--"), strict=True):
    axis.semilogy(places, shown[0] / np.nanmax(shown[0]), style, label=name)
axis.set_ylim(1e-6, 2)
axis.set_xlabel("place along the diameter")
axis.set_ylabel("u over its maximum")
axis.set_title("The flight has tails at once")
axis.legend(frameon=False)
axis.spines[["top", "right"]].set_visible(False)
