"""What is trained: data, a model, a loss and what is measured; one task a module, this is what they share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from nlflow.attention import LayerTrace, attach, probe
from nlflow.errors import InputError
from validation.training.variants import Variant

__all__ = ["LAYERS", "SIZES", "WEIGHTS", "Plan", "Size", "Task", "pixels", "random"]

WEIGHTS = "weights.safetensors"
"""The file of a finished training's weights."""

SIZES = ("tiny", "small", "full")
LAYERS = {"cosine": "mean_cosine", "t_sim": "token_similarity", "J": "energy"}
"""What is kept of every layer, with the name of the quantity in a trace."""


@dataclass(frozen=True)
class Plan:
    """How long and how fast.

    Attributes
    ----------
    steps : int
        In all.
    epoch : int
        Steps after which the model is measured.
    batch : int
    rate : float
        Largest learning rate, reached after the share `warmup` of all steps; then half a cosine down to 0.
    decay : float
        Weight decay of AdamW, for matrices alone.
    clip : float
        Largest norm of the gradient.
    """

    steps: int
    epoch: int
    batch: int
    rate: float
    decay: float = 0.05
    warmup: float = 0.05
    clip: float = 1.0

    def __post_init__(self) -> None:
        for name in ("steps", "epoch", "batch"):
            if getattr(self, name) < 1:
                raise InputError(f"--{name}: got {getattr(self, name)}, expected 1 or more")


@dataclass(frozen=True)
class Size:
    """What a size of a task means.

    Attributes
    ----------
    count : int
        Items to train on; for a task whose items are drawn anew, steps in an epoch.
    epochs, batch : int
    rate : float
        Largest learning rate.
    looked_at : tuple of int
        Items that are looked at after each epoch, and at the end.
    shape : dict
        Of the model.
    """

    count: int
    epochs: int
    batch: int
    rate: float
    looked_at: tuple[int, int]
    shape: dict[str, Any]


def random(*key: int) -> np.random.Generator:
    """Return the generator of this key: every number of a training is a function of seed and step, not of history."""
    return np.random.default_rng(key)


def pixels(images: Tensor) -> Tensor:
    """Return bytes (B, height, width, 3) as numbers from -1 to 1, (B, 3, height, width)."""
    return images.permute(0, 3, 1, 2).float() / 127.5 - 1


class Task(ABC):
    """One model on one kind of data.

    Attributes
    ----------
    name : str
    measure : str
        The figure that variants are compared by, one of what `evaluate` returns.
    fidelity : float
        λ̃ of the variants with the term.
    sizes : dict of str to Size
    plan : Plan
    shape : dict
        Size of the model.
    looked_at : tuple of int
        Items that are looked at after each epoch, and at the end.
    device : torch.device
    """

    name: str
    measure: str
    fidelity: float
    sizes: ClassVar[dict[str, Size]]

    def __init__(
        self,
        size: str,
        device: str,
        shape: dict[str, Any],
        *,
        items: int | None = None,
        decay: float = 0.05,
        epochs: int | None = None,
        steps: int | None = None,
        batch: int | None = None,
        rate: float | None = None,
    ) -> None:
        usual = self.sizes[size]
        batch = usual.batch if batch is None else batch
        epoch = usual.count
        if items is not None:
            batch = min(batch, items)
            epoch = items // batch
        total = epoch * (usual.epochs if epochs is None else epochs) if steps is None else steps
        self.plan = Plan(total, epoch, batch, usual.rate if rate is None else rate, decay)
        self.size, self.looked_at, self.shape = size, usual.looked_at, {**usual.shape, **shape}
        self.device = torch.device(device)
        self._order: tuple[tuple[int, int, int], Tensor] | None = None

    def settings(self) -> dict[str, Any]:
        """Return what a result depends on, but for variant and seed."""
        return {"task": self.name, "size": self.size, "plan": asdict(self.plan), "model": self.shape}

    def model(self, variant: Variant, seed: int) -> nn.Module:
        """Return a new model; all variants of one seed have the same numbers at the start."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = self.build(variant)
        return model.to(self.device)

    def tensor(self, array: NDArray[Any]) -> Tensor:
        """Return an array as a tensor on the device."""
        return torch.from_numpy(array).to(self.device)

    def chosen(self, seed: int, step: int, count: int) -> Tensor:
        """Return which of so many items the batch of this step holds; in an epoch none comes twice."""
        epoch, place = divmod(step, self.plan.epoch)
        key = (seed, epoch, count)
        if self._order is None or self._order[0] != key:
            self._order = key, self.tensor(random(seed, 0, epoch).permutation(count))
        return self._order[1][place * self.plan.batch : (place + 1) * self.plan.batch]

    @abstractmethod
    def build(self, variant: Variant) -> nn.Module:
        """Return the model with this attention."""

    @abstractmethod
    def loss(self, model: nn.Module, seed: int, step: int) -> Tensor:
        """Return the loss of the batch of this step, the same for all variants of one seed."""

    @abstractmethod
    def evaluate(self, model: nn.Module, *, whole: bool) -> dict[str, float]:
        """Return figures of data that is not trained on: a part of it, or the whole."""

    @abstractmethod
    def probed(self) -> Any:
        """Return the inputs on which layers are looked at."""

    def tokenizer(self) -> Any:
        """Return what turns a text into the model's tokens, a tokenizer of transformers; None for pictures."""
        return None

    def trace(self, model: nn.Module) -> LayerTrace:
        """Look at the layers of the model."""
        return probe(model, self.probed())

    def layers(self, model: nn.Module) -> dict[str, list[float]]:
        """Return the mean over inputs of what each layer does: cosine of tokens, t_sim, J of the values."""
        trace = self.trace(model)
        return {
            name: [float(np.mean(layer.quantities[quantity])) for layer in trace] for name, quantity in LAYERS.items()
        }

    def equip(self, model: nn.Module, variant: Variant) -> nn.Module:
        """Give a model of transformers the attention of a variant."""
        if variant.kind:
            raise InputError(
                f"--variants: got {variant.kind}, which models of transformers have no attention for, expected it with "
                "the task of scenes alone; use train_scenes.py"
            )
        return model if variant.stock else attach(model, semi_implicit=False, **variant.options(self.fidelity))
