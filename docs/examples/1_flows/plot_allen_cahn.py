"""
Two phases that coarsen, as a film
==================================

:class:`nlflow.AllenCahn` drives values to −1 and 1, and the diffusion of :class:`nlflow.J` shortens the border between
them. :class:`nlflow.plotting.Film` makes a film while the run goes on.
"""

import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.animation import FuncAnimation
from PIL import Image

from nlflow import ETD4RK, AllenCahn, Energy, Film, Gaussian, GradientFlow, Grid, J, affinity, solve

# %%
# :class:`nlflow.ETD4RK` takes the diffusion exactly, by a Fourier transform; the reaction limits its steps.

grid = Grid((192, 192), boundary="periodic")
flow = GradientFlow(J(affinity(Gaussian(width=2.0), grid)), metric="degree", reaction=AllenCahn(1.0))
start = 0.1 * np.random.default_rng(0).standard_normal(grid.shape)

# %%

times = np.logspace(0.5, 2.5, 25)
with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "coarsening.gif"
    trackers = [Energy(at=times), Film(path, interval=5.0, limits=(-1, 1), size=(480, 400), rate=12)]
    solution = solve(flow, start, t_eval=[0, 3, 30, 100, 316.5], integrator=ETD4RK(0.5), trackers=trackers)
    with Image.open(path) as film:
        pictures = []
        for number in range(film.n_frames):
            film.seek(number)
            pictures.append(film.convert("RGB"))

# %%
# The border shortens by its curvature: once patches have formed, its length, and the energy, fall like one over the
# root of t.

energy = solution.records["energy"]
assert np.abs(solution.u).max() <= 1 + 1e-6
assert np.all(np.diff(energy["value"]) < 0)
late = energy["t"] > 20
slope, _ = np.polyfit(np.log(energy["t"][late]), np.log(energy["value"][late]), 1)
print(f"{len(pictures)} pictures; the energy falls like t^{slope:.2f}")
assert -0.75 < slope < -0.3

figure, panels = plt.subplot_mosaic([["a", "b", "c"], ["e", "e", "e"]], figsize=(7.6, 5.4), layout="constrained")
for name, number in zip("abc", (1, 2, 4), strict=True):
    panels[name].imshow(solution.u[number], cmap="viridis", vmin=-1, vmax=1)
    panels[name].set_title(f"t = {solution.t[number]:.4g}")
    panels[name].set_axis_off()
panels["e"].loglog(energy["t"], energy["value"], "o-", label="energy")
panels["e"].loglog(times[late], energy["value"][-1] * (times[late] / times[-1]) ** -0.5, "--", label="one over root t")
panels["e"].set(xlabel="t", ylabel="J and the potential", title="Energy")
panels["e"].legend()

# %%

figure, axis = plt.subplots(figsize=(4.8, 4.2), layout="constrained", dpi=90)
shown = axis.imshow(pictures[0])
axis.set_title("Coarsening")
axis.set_axis_off()


def show(number):
    """Put one picture of the film into the panel."""
    shown.set_data(pictures[number])
    return [shown]


film = FuncAnimation(figure, show, frames=range(0, len(pictures), 2), interval=150)
plt.show()
