"""
A trained layer as a time step
==============================

The average of a head is an Euler step of length 1 of the flow :math:`du/dt = Pu - u`. With the same attention, m steps
of length 1/m converge to the continuous flow as 1/m (:func:`nlflow.attention.discretize`).
"""

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
import transformers
from scipy.linalg import expm
from skimage import data
from skimage.transform import resize

from nlflow.attention import discretize, load_model, probe

# %%

transformers.logging.set_verbosity_error()  # it tells that the classifier on top, which is not needed, is left out
here = Path.cwd()
folder = next(f for f in (p / "validation" / "checkpoints" for p in (here, *here.parents)) if f.is_dir())
model = load_model(folder / "cifar10-softmax")
picture = resize(data.chelsea()[:, 60:360], (32, 32), anti_aliasing=True)
pixels = torch.tensor(2 * np.moveaxis(picture, -1, 0)[None] - 1, dtype=torch.float32)
trace = probe(model, {"pixel_values": pixels})
print(trace)

# %%
# For a mean over all tokens, m steps leave :math:`(1 - 1/m)^m` of the deviation from it in place of 1/e.

substeps = (1, 2, 4, 8, 16, 32)
found = {f"layer {number + 1}": discretize(trace[number], substeps=substeps) for number in (0, 5, 11)}
found["layer 6, one head, evolving"] = discretize(trace.head(5, 0), substeps=substeps, evolving=True)
for name, result in found.items():
    null = f" ({result.random_order:.3f} with random P)" if np.isfinite(result.random_order) else ""
    print(f"{name:>28}: order {result.order:.3f}{null}, the layer itself is off by {result.layer:.3f} of the way")
    assert abs(result.order - 1) < 0.1
mean = np.abs((1 - 1 / np.array(substeps)) ** substeps - np.exp(-1)) / (1 - np.exp(-1))

# %%

head = trace.head(0, 0)
generator = head.matrix - np.eye(head.tokens)
exact = expm(generator) @ head.v
euler = [np.linalg.matrix_power(np.eye(head.tokens) + generator / m, m) @ head.v for m in substeps]
expected = [np.linalg.norm(u - exact) / np.linalg.norm(exact - head.v) for u in euler]
assert np.allclose(discretize(head, substeps=substeps).distance, expected, rtol=1e-6)

# %%

single = np.array([[discretize(trace.head(i, h), substeps=(1,)).layer for h in range(4)] for i in range(len(trace))])
print(f"the layer itself is off by {single.min():.3f} to {single.max():.3f}; a mean over all tokens by {mean[0]:.3f}")

figure, (left, right) = plt.subplots(1, 2, figsize=(7.6, 3.8), layout="constrained", width_ratios=[1.4, 1])
left.loglog(substeps, mean, "-", color="black", linewidth=1, label="mean over all tokens")
looks = (("o", "#0b5394"), ("s", "#d1711c"), ("^", "#4d4d4d"), ("D", "#b5179e"))
for size, ((name, result), (marker, colour)) in enumerate(zip(found.items(), looks, strict=True)):
    left.loglog(
        result.substeps, result.distance, marker, color=colour, fillstyle="none", markersize=10 - 2 * size,
        label=f"{name}, order {result.order:.2f}",
    )  # fmt: skip
left.set(xlabel="steps m of length 1/m", ylabel="distance to the flow / its way", title="From a layer to the flow")
left.legend(fontsize=8)
left.grid(alpha=0.3, which="both")
for h, (marker, colour) in enumerate(looks):
    right.plot(range(1, 13), single[:, h], marker, color=colour, markersize=5, label=f"head {h + 1}")
right.axhline(mean[0], color="black", linewidth=1, label="mean over all tokens")
right.set(xlabel="layer", ylabel="distance to the flow / its way", title="One step", xticks=range(1, 13))
right.legend(fontsize=8)
right.grid(alpha=0.3)
plt.show()
