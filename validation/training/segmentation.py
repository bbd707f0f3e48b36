"""Segmentation of drawn scenes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from nlflow.attention import LayerTrace, probe
from validation.training.scenes import CLASSES, draw_scenes
from validation.training.segmenter import ADAPTERS, Segmenter, taken
from validation.training.task import Size, Task, pixels
from validation.training.variants import Variant

__all__ = ["Scenes", "mean_iou"]

_SEEN = 16  # scenes on which layers are looked at
_AT_ONCE = 64
_DATA = (1, 2)  # seeds of the scenes to train on, and of the others: the same for all seeds of a training


def _shape(side: int, width: int, heads: int, depth: int) -> dict[str, int]:
    return {"side": side, "patch": 4, "width": width, "heads": heads, "depth": depth, "decoder_depth": 2}


class Scenes(Task):
    """The class of each pixel of a drawn scene.

    Parameters
    ----------
    size : {'tiny', 'small', 'full'}
    device : str
    **given
        ``epochs``, ``steps``, ``batch`` or ``rate``, where they are to be others than those of the size.
    """

    name = "scenes"
    measure = "mean_iou"
    fidelity = 0.6

    sizes = {  # noqa: RUF012 (read alone)
        "tiny": Size(256, 4, 16, 2e-3, (32, 64), _shape(32, 32, 4, 4)),
        "small": Size(2048, 10, 32, 1e-3, (128, 512), _shape(48, 64, 4, 6)),
        "full": Size(8192, 10, 64, 1e-3, (256, 1024), _shape(64, 192, 6, 8)),
    }

    def __init__(self, *, size: str = "small", device: str = "cpu", **given: Any) -> None:
        count = self.sizes[size].count
        super().__init__(size, device, {"classes": len(CLASSES)}, items=count, **given)
        side = int(self.shape["side"])
        self.train, self.test = (
            tuple(self.tensor(part) for part in draw_scenes(number, side, seed))
            for number, seed in zip((count, self.looked_at[True]), _DATA, strict=True)
        )

    def build(self, variant: Variant) -> nn.Module:
        return Segmenter(**self.shape, options=variant.options(self.fidelity))

    def loss(self, model: nn.Module, seed: int, step: int) -> Tensor:
        images, labels = self.train
        chosen = self.chosen(seed, step, len(labels))
        return functional.cross_entropy(model(pixels(images[chosen])).float(), labels[chosen])

    def evaluate(self, model: nn.Module, *, whole: bool) -> dict[str, float]:
        images, labels = self.test
        count = self.looked_at[whole]
        confusion = torch.zeros(len(CLASSES), len(CLASSES), dtype=torch.int64, device=self.device)
        lost = 0.0
        for first in range(0, count, _AT_ONCE):
            part = slice(first, min(first + _AT_ONCE, count))
            logits = model(pixels(images[part])).float()
            lost += float(functional.cross_entropy(logits, labels[part], reduction="sum"))
            pairs = labels[part].flatten() * len(CLASSES) + logits.argmax(1).flatten()
            confusion += torch.bincount(pairs, minlength=len(CLASSES) ** 2).view_as(confusion)
        seen = int(confusion.sum())
        return {
            "mean_iou": mean_iou(confusion),
            "accuracy": int(confusion.diagonal().sum()) / seen,
            "loss": lost / seen,
        }

    def probed(self) -> Tensor:
        return pixels(self.test[0][:_SEEN])

    def trace(self, model: nn.Module) -> LayerTrace:
        return probe(model, self.probed(), adapter=ADAPTERS, take=taken)


def mean_iou(confusion: Tensor) -> float:
    """Return the mean over classes of intersection over union.

    Parameters
    ----------
    confusion : tensor of shape (K, K)
        How many pixels of a class (row) were given one (column). Classes that occur on neither side are left out.
    """
    both = confusion.diagonal().double()
    either = confusion.sum(0).double() + confusion.sum(1).double() - both
    return float((both[either > 0] / either[either > 0]).mean())
