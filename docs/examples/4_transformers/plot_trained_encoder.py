r"""
Over-smoothing in a trained encoder, and its repair
===================================================

Two small vision transformers were trained in the same way on CIFAR-10, one with the term :math:`\tilde\lambda (v_0 -
v)` in each layer. :func:`nlflow.attention.probe` looks into them, :func:`nlflow.attention.attach` adds the term to the
plain model, :func:`nlflow.attention.detach` removes it.
"""

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
import transformers
from skimage import data
from skimage.transform import resize

from nlflow.attention import attach, detach, load_model, probe

# %%

transformers.logging.set_verbosity_error()  # it tells that the classifier on top, which is not needed, is left out
here = Path.cwd()
folder = next(f for f in (p / "validation" / "checkpoints" for p in (here, *here.parents)) if f.is_dir())
softmax, neutreno = (load_model(folder / f"cifar10-{name}") for name in ("softmax", "neutreno"))

photographs = [data.astronaut(), data.chelsea(), data.coffee(), data.rocket()]
rng = np.random.default_rng(0)
pictures = []
for photograph in photographs:
    side = min(photograph.shape[:2]) * 3 // 4
    for _ in range(4):
        top, left = (int(rng.integers(n - side + 1)) for n in photograph.shape[:2])
        crop = photograph[top : top + side, left : left + side]
        pictures.append(resize(crop, (32, 32), anti_aliasing=True))
inputs = {"pixel_values": torch.tensor(2 * np.moveaxis(np.array(pictures), -1, 1) - 1, dtype=torch.float32)}

# %%

traces = {"softmax": probe(softmax, inputs), "NeuTRENO": probe(neutreno, inputs)}
with torch.no_grad():
    before = softmax(**inputs).last_hidden_state
attach(softmax, fidelity=0.3, semi_implicit=False)  # the form that the other was trained with
traces["softmax, term attached"] = probe(softmax, inputs)
detach(softmax)
with torch.no_grad():
    assert torch.equal(softmax(**inputs).last_hidden_state, before)


def by_layer(trace, quantity):
    """Return the mean of a quantity of hidden states over the pictures, of the embeddings first."""
    states = [trace.states[trace[0].stack], *(layer.quantities for layer in trace)]
    return np.array([state[quantity].mean() for state in states])


cosine = {name: by_layer(trace, "mean_cosine") for name, trace in traces.items()}
rank = {name: by_layer(trace, "rank") for name, trace in traces.items()}
for name in traces:
    print(f"{name:>22}: mean cosine after the last layer {cosine[name][-1]:.3f}, rank {rank[name][-1]:.1f}")
for name in ("NeuTRENO", "softmax, term attached"):
    assert cosine[name][-1] < cosine["softmax"][-1] - 0.1
    assert rank[name][-1] > rank["softmax"][-1] + 0.5

# %%
# The mean cosine of two tokens after each layer, and the number of directions in which tokens differ (the participation
# rank).

figure, axes = plt.subplot_mosaic([["pictures", "cosine", "rank"]], figsize=(7.8, 3.6), layout="constrained",
                                  width_ratios=[0.55, 1, 1])  # fmt: skip
axes["pictures"].imshow(np.concatenate([np.concatenate(pictures[i : i + 2], axis=1) for i in (0, 4, 8, 12)]))
axes["pictures"].set_title("8 of 16 pictures", fontsize=10)
axes["pictures"].set_axis_off()
looks = {"softmax": ("o-", "#d1711c"), "NeuTRENO": ("s--", "#0b5394"), "softmax, term attached": ("^:", "#4d4d4d")}
for name, (style, colour) in looks.items():
    for panel, values in (("cosine", cosine), ("rank", rank)):
        axes[panel].plot(values[name], style, color=colour, markersize=4, label=name)
axes["cosine"].set(xlabel="layer (0: embeddings)", ylabel="mean cosine of two tokens", title="How alike tokens are")
axes["rank"].set(
    xlabel="layer (0: embeddings)", ylabel="participation rank", title="In how many directions they differ"
)
for name in ("cosine", "rank"):
    axes[name].grid(alpha=0.3)
    axes[name].title.set_fontsize(10)
axes["cosine"].legend(fontsize=8)
plt.show()
