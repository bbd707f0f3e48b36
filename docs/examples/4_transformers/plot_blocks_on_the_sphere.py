"""
Trained blocks beside their flow
================================

The norm of a block looks at directions alone. So its attention is a velocity on the sphere of directions, and
:func:`nlflow.attention.discretize_blocks` says how much of what a block does to its tokens that flow explains.
"""

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
import transformers
from skimage import data
from skimage.transform import resize

from nlflow.attention import discretize_blocks, load_model

# %%

transformers.logging.set_verbosity_error()  # it tells that the classifier on top, which is not needed, is left out
here = Path.cwd()
folder = next(f for f in (p / "validation" / "checkpoints" for p in (here, *here.parents)) if f.is_dir())
picture = resize(data.chelsea()[:, 60:360], (32, 32), anti_aliasing=True)
pixels = torch.tensor(2 * np.moveaxis(picture, -1, 0)[None] - 1, dtype=torch.float32)
model = load_model(folder / "cifar10-softmax")
found = discretize_blocks(model, {"pixel_values": pixels}, substeps=(1, 2))

# %%
# A share of 1 would mean that the block does what its attention flow does, 0 that the flow explains as much as a block
# at rest.

for number, one in enumerate(found, start=1):
    print(
        f"block {number:2d}: turns tokens by {np.degrees(one.angle):3.0f}°, flow {one.explained:6.2f}, one step "
        f"{one.layer:6.2f}, direction {one.direction:5.2f}"
    )
    assert one.explained <= 1
    assert 0 <= one.direction <= 1

blocks = np.arange(1, len(found) + 1)
figure, (left, right) = plt.subplots(1, 2, figsize=(7.6, 3.8), layout="constrained")
left.axhline(0, color="black", linewidth=0.8)
left.plot(blocks, [one.explained for one in found], "o-", color="#0b5394", label="flow, to time 1")
left.plot(blocks, [one.layer for one in found], "s-", color="#d1711c", label="one step with residual")
left.plot(blocks, [one.direction for one in found], "^-", color="#4d4d4d", label="direction, best time")
left.set(xlabel="block", ylabel="share of the update", title="What attention explains", xticks=blocks)
left.legend(fontsize=8)
right.plot(blocks, [np.degrees(one.angle) for one in found], "o-", color="#0b5394")
right.set(xlabel="block", ylabel="degrees", title="How far a block turns tokens", xticks=blocks, ylim=(0, None))
for axis in (left, right):
    axis.grid(alpha=0.3)
plt.show()
