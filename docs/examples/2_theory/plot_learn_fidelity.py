"""
Learning a fidelity and a width
===============================

:func:`nlflow.flows.derivatives.minimizer` differentiates the minimizer of E by the implicit function theorem. So the
strength of the fidelity and the width of the kernel are learnt from one clean signal.
"""

import matplotlib.pyplot as plt
import numpy as np
import torch

from nlflow import E, Gaussian, Points, affinity
from nlflow.flows.derivatives import minimizer

# %%
# The kernel is a Gaussian of positions and of values that are divided by a width, which is learnt as a logarithm.

torch.manual_seed(0)
torch.set_num_threads(1)  # threads cost more than they give for tensors of this size
x = torch.linspace(0, 1, 120, dtype=torch.float64)
clean = torch.tensor([0.0, 1.5, 0.5, 2.0, 0.8], dtype=torch.float64).repeat_interleave(24)
noisy, other = clean + 0.25 * torch.randn(2, 120, dtype=torch.float64)
nodes = Points(x.numpy())


def restored(parameters, observed):
    """Return the minimizer of E."""
    width, strength = parameters.exp()
    features = torch.stack([x / 0.03, observed / width], dim=1)
    weights = affinity(Gaussian(width=1.0), nodes, features)
    return minimizer(E(weights, observed, strength, measure="degree"))


def loss(parameters, observed):
    """Return the mean squared error of the restored signal."""
    return ((restored(parameters, observed) - clean) ** 2).mean()


# %%

parameters = torch.tensor([np.log(1.5), np.log(2.0)], dtype=torch.float64, requires_grad=True)
loss(parameters, noisy).backward()
with torch.no_grad():
    shifts = 1e-4 * torch.eye(2, dtype=torch.float64)
    quotients = torch.stack([loss(parameters + s, noisy) - loss(parameters - s, noisy) for s in shifts]) / 2e-4
print("gradient", parameters.grad.numpy().round(6), "difference quotients", quotients.numpy().round(6))
assert torch.allclose(parameters.grad, quotients, rtol=1e-5)

# %%

optimizer = torch.optim.Adam([parameters], lr=0.15)
path, losses = [], []
for _ in range(80):
    optimizer.zero_grad()
    value = loss(parameters, noisy)
    value.backward()
    path.append(parameters.detach().exp().numpy())
    losses.append(value.item())
    optimizer.step()
width, strength = path[-1]
with torch.no_grad():
    elsewhere = loss(torch.tensor(path[-1]).log(), other).item()
    found = restored(torch.tensor(path[-1]).log(), noisy)
print(f"width {width:.4f}, fidelity {strength:.4f}: mean squared error {losses[0]:.4f} -> {losses[-1]:.4f}")
print(f"with other noise {elsewhere:.4f}; of the noisy signals {((noisy - clean) ** 2).mean():.4f}")

# %%
# The loss over both parameters, by dense matrices.


def by_hand(width, strength):
    """Return the loss by plain sums."""
    f = noisy.numpy()
    far = np.subtract.outer(x.numpy(), x.numpy()) / 0.03
    kernel = np.exp(-(far**2 + (np.subtract.outer(f, f) / width) ** 2) / 2)
    average = kernel / kernel.sum(axis=1, keepdims=True)
    u = np.linalg.solve((1 + strength) * np.eye(f.size) - average, strength * f)
    return np.mean((u - clean.numpy()) ** 2)


widths, strengths = np.geomspace(0.05, 3, 15), np.geomspace(0.005, 4, 15)
landscape = np.array([[by_hand(a, b) for b in strengths] for a in widths])
assert np.isclose(by_hand(width, strength), losses[-1], rtol=1e-8)
assert losses[-1] <= landscape.min()
assert elsewhere < 0.4 * ((other - clean) ** 2).mean()

figure, (left, right) = plt.subplots(1, 2, figsize=(7.8, 3.9), layout="constrained")
filled = left.contourf(widths, strengths, np.log10(landscape.T), levels=14, cmap="viridis")
left.plot(*np.transpose(path), "w.-", linewidth=1, markersize=5, label="steps of Adam")
left.plot(*path[-1], "*", color="#d1711c", markeredgecolor="black", markersize=13, label="learnt")
left.set(xscale="log", yscale="log", xlabel="width of the kernel in values", ylabel=r"fidelity $\tilde\lambda$")
left.set_title("Mean squared error")
left.legend(fontsize=8, facecolor="0.6")
figure.colorbar(filled, ax=left, label="log10 of the mean squared error")
right.plot(x, noisy, ".", color="0.6", markersize=4, label="noisy")
right.plot(x, clean, "--", color="black", linewidth=1.2, label="clean")
right.plot(x, found, "-", color="#0b5394", linewidth=1.8, label="minimizer of E, learnt")
right.set(xlabel="position x", ylabel="signal", title="Restored")
right.legend(fontsize=8)
plt.show()
