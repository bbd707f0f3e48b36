"""
Tokens on the sphere: clusters that last
========================================

Many thin layers with residual and norm are a flow of tokens on a sphere (:class:`nlflow.SphereFlow`, after Geshkovski,
Letrouit, Polyanskiy and Rigollet). Tokens gather in a few clusters, which last for a time that is exponential in the
inverse temperature β.
"""

import matplotlib.pyplot as plt
import numpy as np
from scipy.integrate import quad

from nlflow import Energy, GeodesicMidpoint, RungeKutta, SphereFlow, on_sphere, solve

# %%
# :class:`nlflow.flows.GeodesicMidpoint` turns each token along the great circle of the velocity half a step ahead.

angles = 2 * np.pi * np.random.default_rng(3).random(48)
x = on_sphere(np.stack([np.cos(angles), np.sin(angles)], axis=1))
flow = SphereFlow(x, beta=6.0)
times = np.concatenate([[0], np.geomspace(0.05, 600, 120)])
course = solve(flow, x, t_eval=times, integrator=RungeKutta(), trackers=[Energy()])
short = solve(flow, x, t=2.0, integrator=GeodesicMidpoint(0.05))
assert np.abs(np.linalg.norm(short.final, axis=1) - 1).max() < 4e-16

# %%
# The energy stands still while the clusters do, and drops where two of them meet.

counts = [int(flow.clusters(u).max()) + 1 for u in course.u]
energy = course.records["energy"]
assert np.all(np.diff(energy["value"]) <= 1e-12)
print(f"{len(x)} tokens, then {counts[70]} clusters at t = {times[70]:.2g}, and {counts[-1]} at t = {times[-1]:g}")

# %%
# Two tokens meet after about exp(β (1 - c)) / (2β (1 - c²)), since c' = 2 (1 - c²) / (1 + exp(β (1 - c))) for the
# cosine c of their angle.

betas, meeting = np.arange(4.0, 13.0, 2.0), []
pair = on_sphere([[1.0, 0.0], [0.5, np.sqrt(0.75)]])
for beta in betas:
    two = SphereFlow(pair, beta)
    late = np.exp(beta / 2)
    found = solve(two, pair, t_eval=np.linspace(0, late, 400), integrator=RungeKutta(), energies=False)
    cosine = (found.u[:, 0] * found.u[:, 1]).sum(axis=1)
    meeting.append(float(np.interp(0.99, cosine, found.t)))
slope, _ = np.polyfit(betas, np.log(betas * meeting), 1)
print(f"log(β T) grows by {slope:.2f} for each β; 1 - c is 0.5")
assert abs(slope - 0.5) < 0.1

figure, panels = plt.subplot_mosaic([["a", "a"], ["e", "t"]], figsize=(7.6, 5.8), layout="constrained")
paths = np.unwrap(np.arctan2(course.u[:, :, 1], course.u[:, :, 0]), axis=0)
paths[:, paths[-1] < -np.pi] += 2 * np.pi  # one token meets the others across the cut
panels["a"].semilogx(times[1:], paths[1:], color="#0b5394", linewidth=0.8, alpha=0.7)
panels["a"].set(xlabel="t", ylabel="angle of each token", title="48 tokens on the circle, β = 6")
panels["e"].semilogx(energy["t"][1:], energy["value"][1:], color="#d1711c")
panels["e"].set(xlabel="t", ylabel="energy", title="Energy")
panels["t"].semilogy(betas, meeting, "o", color="#0b5394", label="two tokens, 60° apart")
exact = [quad(lambda c, b=beta: (np.exp(b * (1 - c)) + 1) / (2 * (1 - c**2)), 0.5, 0.99)[0] for beta in betas]
assert np.allclose(meeting, exact, rtol=0.01)
panels["t"].semilogy(betas, exact, color="black", linewidth=1, label="integral of their equation")
panels["t"].set(xlabel="β", ylabel="time until they meet", title="An exponential law")
panels["t"].legend(fontsize=8)
plt.show()
