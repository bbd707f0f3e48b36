"""A vision transformer on small pictures: twelve layers, patches of 4 × 4."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import ViTConfig, ViTForImageClassification

from validation.training.data import Pictures
from validation.training.task import Size, Task, pixels, random
from validation.training.variants import Variant

__all__ = ["Cifar10", "varied"]

_SHIFT = 2  # pixels by which pictures are moved at most, in both directions
_SEEN = 64  # pictures on which layers are looked at
_AT_ONCE = 256


class Cifar10(Task):
    """Classes of 32 × 32 pictures.

    Parameters
    ----------
    train, test : Pictures
    size : {'tiny', 'small', 'full'}
    device : str
    **given
        ``epochs``, ``steps``, ``batch`` or ``rate``, where they are to be others than those of the size.
    """

    name = "cifar10"
    measure = "accuracy"
    fidelity = 0.6
    files = ("cifar10-train.zip", "cifar10-test.zip")

    sizes = {  # noqa: RUF012 (read alone)
        size: Size(*numbers, {"hidden_size": width, "intermediate_size": 2 * width, "num_attention_heads": 4})
        for size, numbers, width in (
            ("tiny", (768, 2, 32, 1e-3, (256, 1000)), 32),
            ("small", (50_000, 6, 64, 1.5e-3, (2000, 10_000)), 64),
            ("full", (50_000, 16, 512, 1.5e-3, (10_000, 10_000)), 192),
        )
    }

    def __init__(
        self, train: Pictures, test: Pictures, *, size: str = "small", device: str = "cpu", **given: Any
    ) -> None:
        count = min(self.sizes[size].count, len(train.labels))
        shape = {
            "image_size": int(train.images.shape[1]),
            "patch_size": 4,
            "num_hidden_layers": 12,
            "num_labels": len(train.classes),
            # Without a GPU the plain products are faster for so few tokens.
            "attn_implementation": "sdpa" if device.startswith("cuda") else "eager",
        }
        super().__init__(size, device, shape, items=count, **given)
        train, test = train.some(count), test.some(len(test.labels))
        self.classes = train.classes
        self.train = (self.tensor(train.images), self.tensor(train.labels))
        self.test = (self.tensor(test.images), self.tensor(test.labels))

    def build(self, variant: Variant) -> nn.Module:
        config = ViTConfig(
            **self.shape,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            id2label=dict(enumerate(self.classes)),
            label2id={name: index for index, name in enumerate(self.classes)},
        )
        return self.equip(ViTForImageClassification(config), variant)

    def loss(self, model: nn.Module, seed: int, step: int) -> Tensor:
        images, labels = self.train
        chosen = self.chosen(seed, step, len(labels))
        found: Any = model(pixel_values=varied(images[chosen], random(seed, 1, step)))
        return functional.cross_entropy(found.logits.float(), labels[chosen])

    def evaluate(self, model: nn.Module, *, whole: bool) -> dict[str, float]:
        images, labels = self.test
        count = min(len(labels), self.looked_at[whole])
        right, lost = 0, 0.0
        for first in range(0, count, _AT_ONCE):
            part = slice(first, min(first + _AT_ONCE, count))
            logits = model(pixel_values=pixels(images[part])).logits.float()
            right += int((logits.argmax(-1) == labels[part]).sum())
            lost += float(functional.cross_entropy(logits, labels[part], reduction="sum"))
        return {"accuracy": right / count, "loss": lost / count}

    def probed(self) -> dict[str, Tensor]:
        return {"pixel_values": pixels(self.test[0][:_SEEN])}


def varied(images: Tensor, rng: np.random.Generator) -> Tensor:
    """Return pictures mirrored and moved by chance, as a model's input."""
    count, high, wide = images.shape[:3]
    padded = functional.pad(pixels(images), (_SHIFT,) * 4, mode="reflect")
    by = torch.from_numpy(rng.integers(0, 2 * _SHIFT + 1, size=(2, count))).to(images.device)
    mirrored = torch.from_numpy(rng.integers(0, 2, size=count).astype(bool)).to(images.device)
    rows = by[0][:, None] + torch.arange(high, device=images.device)
    columns = torch.arange(wide, device=images.device).expand(count, wide)
    columns = by[1][:, None] + torch.where(mirrored[:, None], columns.flip(1), columns)
    number = torch.arange(count, device=images.device)[:, None, None]
    # Indices apart from a slice come first: (B, height, width, 3).
    return padded[number, :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2).contiguous()
