"""
A hundred thousand scattered nodes
==================================

:func:`nlflow.affinity` computes exact sums without a matrix. With ``rtol`` it chooses a faster method, here a
non-uniform Fourier transform, and estimates the error of its averages.
"""

import time

import matplotlib.pyplot as plt
import numpy as np

from nlflow import E, Gaussian, GradientFlow, Points, affinity, solve

rng = np.random.default_rng(0)


def cloud(count):
    """Return nodes in the unit square, denser towards a corner, and a noisy signal on them."""
    nodes = rng.beta(1.2, 2.0, (count, 2))
    clean = np.sin(8 * nodes[:, 0]) * np.cos(6 * nodes[:, 1])
    return Points(nodes), clean, clean + 0.5 * rng.standard_normal(count)


# %%

points, clean, noisy = cloud(100_000)
fast = affinity(Gaussian(width=0.015), points, rtol=1e-6)
measured = fast.measure_error(noisy, samples=200)
print(f"{fast.method}: {fast.reason}")
print(f"error of an average: estimated {fast.error_estimate:.1e}, measured {measured:.1e}")
assert measured <= fast.error_estimate <= 1e-6

flow = GradientFlow(E(fast, noisy, 0.1, measure="degree"), metric="degree")
solution = solve(flow, t=10.0, energies=False)
errors = [np.sqrt(np.mean((u - clean) ** 2)) for u in (noisy, solution.final)]
print(f"root mean square error {errors[0]:.3f} -> {errors[1]:.3f} with {solution.stats['applications']} averages")
assert errors[1] < 0.3 * errors[0]

# %%


def seconds(weights, signal):
    """Return the least time of an average out of four, after one to warm up."""
    weights.average(signal)
    times = []
    for _ in range(4):
        begun = time.perf_counter()
        weights.average(signal)
        times.append(time.perf_counter() - begun)
    return min(times)


sizes = {"pairwise": [3000, 6000, 12_000, 24_000], "nufft": [3000, 10_000, 30_000, 100_000]}
times = {name: [] for name in sizes}
worst = []
for method, counts in sizes.items():
    for count in counts:
        domain, _, signal = cloud(count)
        options = {"rtol": 1e-6} if method == "nufft" else {}
        weights = affinity(Gaussian(width=0.2), domain, method=method, **options)
        times[method].append(seconds(weights, signal))
        if method == "nufft":
            worst.append((count, weights.error_estimate, weights.measure_error(signal, samples=100)))
for name, found in times.items():
    slope = np.polyfit(np.log(sizes[name][-3:]), np.log(found[-3:]), 1)[0]
    print(f"{name:>9}: slope {slope:.2f} over the last three sizes")
for count, estimate, error in worst:
    print(f"nufft, {count} nodes: error estimated {estimate:.1e}, measured {error:.1e}")
    assert error <= estimate <= 1e-6

figure, (left, right) = plt.subplots(1, 2, figsize=(7.8, 3.9), layout="constrained")
shown = rng.choice(points.size, 15_000, replace=False)
drawn = left.scatter(*points.nodes[shown].T, c=solution.final[shown], s=1, cmap="viridis", rasterized=True)
left.set(xlabel="x", ylabel="y", title="E-flow at t = 10", aspect="equal")
figure.colorbar(drawn, ax=left, label="signal", shrink=0.85)
for name, style, colour in (("pairwise", "o-", "#d1711c"), ("nufft", "s--", "#0b5394")):
    label = "exact sums (pairwise)" if name == "pairwise" else "to 1e-6 (nufft)"
    right.loglog(sizes[name], times[name], style, color=colour, label=label)
ends = np.array([3000, 24_000])
right.loglog(ends, times["pairwise"][-1] * (ends / 24_000) ** 2, ":", color="black", linewidth=1, label="$N^2$")
right.set(xlabel="nodes N", ylabel="seconds for an average", title="Cost")
right.legend(fontsize=8)
right.grid(alpha=0.3)
plt.show()
