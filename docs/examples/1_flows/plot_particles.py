"""
Particles: discs, rings, mills and clusters
===========================================

:class:`nlflow.flows.ParticleFlow` moves particles that attract from afar and repel nearby down their energy. Tokens of
a transformer are particles on a sphere: :class:`nlflow.SphereFlow`.
"""

import matplotlib.pyplot as plt
import numpy as np

from nlflow import RungeKutta, SphereFlow, on_sphere, solve
from nlflow.flows import ParticleFlow
from nlflow.kernels import Morse, PowerLaws

rng = np.random.default_rng(0)

# %%
# Attraction by r^2 / 2. With the repulsion -log r the minimizer of the energy is a disc of radius 1 with the same
# density everywhere; with softer ones particles gather on a ring.

x = rng.uniform(-1, 1, (400, 2))
loose = RungeKutta(1e-3, 1e-4)
disc = solve(ParticleFlow(x, PowerLaws(attraction=2, repulsion=0)), x, t=20.0, integrator=loose)
ring = solve(ParticleFlow(x, PowerLaws(attraction=4, repulsion=2)), x, t=20.0, integrator=loose)
radii = np.sort(np.linalg.norm(disc.final - disc.final.mean(axis=0), axis=1))
half = np.searchsorted(radii, np.sqrt(0.5)) / len(radii)
print(f"the disc has the radius {radii[-1]:.3f}, and {half:.0%} of its particles in half of its area")
print(f"the ring has the radius {np.linalg.norm(ring.final - ring.final.mean(axis=0), axis=1).mean():.4f}; "
      f"1 / sqrt(3) = {1 / np.sqrt(3):.4f}")  # fmt: skip
assert disc.energy[-1] < disc.energy[0]

# %%
# Self-propelled particles, dv/dt = (1.6 - 0.5 v^2) v - grad, with the Morse potential, circle around their middle with
# the speed sqrt(1.6 / 0.5) = 1.79 (D'Orsogna, Chuang, Bertozzi and Chayes 2006, doi 10.1103/PhysRevLett.96.104302).

start = rng.uniform(-1.5, 1.5, (200, 2))
turning = np.stack([-start[:, 1], start[:, 0]], axis=1) + 0.5 * rng.standard_normal((200, 2))
swarm = ParticleFlow(
    start,
    Morse(repulsion=1.0, repulsion_length=0.5, attraction=0.5, attraction_length=2.0),
    weights=np.ones(200),
    friction=-1.6,
    drag=0.5,
)
mill = solve(swarm, np.hstack([start, turning]), t=30.0, integrator=loose)
place, v = swarm.positions(mill.final), swarm.velocities(mill.final)
place = place - place.mean(axis=0)
spin = np.mean((place[:, 0] * v[:, 1] - place[:, 1] * v[:, 0]) / np.linalg.norm(place, axis=1))
print(f"mean speed {np.linalg.norm(v, axis=1).mean():.2f}, of which {abs(spin):.2f} goes around the middle")

# %%

tokens = on_sphere(rng.standard_normal((800, 3)))
flow = SphereFlow(tokens, beta=16.0)
ends = solve(flow, tokens, t_eval=np.linspace(0, 12, 40), integrator=loose, energies=False)
found = flow.clusters(ends.final, cosine=0.99)
print(f"{found.max() + 1} clusters of tokens")

figure = plt.figure(figsize=(7.8, 7.3), layout="constrained")
for place_of, title, points in ((221, "disc: r²/2 − log r", disc.final), (222, "ring: r⁴/4 − r²/2", ring.final)):
    axis = figure.add_subplot(place_of)
    axis.scatter(*x.T, s=8, marker="x", linewidths=0.5, color="0.7", label="start")
    axis.scatter(*points.T, s=9, color="tab:blue", label="end")
    axis.set(title=title, aspect="equal", xticks=[-1, 0, 1], yticks=[-1, 0, 1], xlabel="x", ylabel="y")
    axis.legend(loc="upper right", fontsize=8)
axis = figure.add_subplot(223)
arrows = axis.quiver(*place.T, *v.T, np.linalg.norm(v, axis=1), cmap="viridis", scale=45, width=0.006)
axis.set(title="mill: self-propelled, Morse", aspect="equal", xlabel="x", ylabel="y")
figure.colorbar(arrows, ax=axis, label="speed", shrink=0.8)
sphere = figure.add_subplot(224)
arc = np.linspace(-np.pi / 2, np.pi / 2, 61)
for level in np.sin(np.pi / 6 * np.arange(-3, 4)):  # a globe seen from the front: meridians and parallels
    sphere.plot(level * np.cos(arc), np.sin(arc), color="0.85", linewidth=0.5)
    sphere.plot([-np.sqrt(1 - level**2), np.sqrt(1 - level**2)], [level, level], color="0.85", linewidth=0.5)
for path, number in zip(ends.u.transpose(1, 2, 0), found, strict=True):
    front = np.where(path[1] < 0, path, np.nan)
    sphere.plot(front[0], front[2], color=plt.cm.tab10(number % 10), linewidth=0.6, alpha=0.6)
seen = ends.final[:, 1] < 0
sphere.scatter(*ends.final[seen][:, [0, 2]].T, c=[plt.cm.tab10(number % 10) for number in found[seen]], s=40)
sphere.set(title="tokens of attention, β = 16", aspect="equal", xlabel="x", ylabel="z", xticks=[], yticks=[])
