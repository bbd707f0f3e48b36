"""A decoder of six layers on the characters of a text."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import GPT2Config, GPT2LMHeadModel

from nlflow.errors import InputError
from validation.training.data import Characters
from validation.training.task import Size, Task, random
from validation.training.variants import Variant

__all__ = ["Text"]

_SEEN = 16  # windows on which layers are looked at
_AT_ONCE = 64


class Text(Task):
    """The next character of a text.

    Parameters
    ----------
    text : Characters
    size : {'tiny', 'small', 'full'}
    device : str
    **given
        ``epochs``, ``steps``, ``batch`` or ``rate``, where they are to be others than those of the size. Windows begin
        at random places, so an epoch is a number of steps.
    """

    name = "text"
    measure = "loss"
    fidelity = 0.4
    file = "tinyshakespeare.txt"

    sizes = {  # noqa: RUF012 (read alone)
        "tiny": Size(24, 2, 8, 2e-3, (8, 32), {"n_embd": 32, "n_head": 4, "n_positions": 64}),
        "small": Size(250, 8, 16, 2e-3, (64, 870), {"n_embd": 96, "n_head": 4, "n_positions": 128}),
        "full": Size(125, 10, 128, 1.5e-3, (256, 870), {"n_embd": 256, "n_head": 8, "n_positions": 128}),
    }

    def __init__(self, text: Characters, *, size: str = "small", device: str = "cpu", **given: Any) -> None:
        shape = {
            "n_layer": 6,
            "vocab_size": len(text.vocabulary),
            "attn_implementation": "sdpa" if device.startswith("cuda") else "eager",
        }
        super().__init__(size, device, shape, decay=0.1, **given)
        self.context = int(self.shape["n_positions"])
        if min(len(text.train), len(text.test)) <= self.context:
            raise InputError(
                f"--data: got a text of {len(text.train) + len(text.test)} characters, expected more than "
                f"{10 * (self.context + 1)}, so that a tenth is one window; take a longer text"
            )
        self.vocabulary = text.vocabulary
        self.train, self.test = self.tensor(text.train), self.tensor(text.test)

    def build(self, variant: Variant) -> nn.Module:
        config = GPT2Config(
            **self.shape,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=0,  # the usual ones are beyond this vocabulary
            eos_token_id=0,
            use_cache=False,
        )
        return self.equip(GPT2LMHeadModel(config), variant)

    def loss(self, model: nn.Module, seed: int, step: int) -> Tensor:
        starts = random(seed, 0, step).integers(0, len(self.train) - self.context, size=self.plan.batch)
        return _lost(model, *self._windows(self.train, starts))[0].mean()

    def evaluate(self, model: nn.Module, *, whole: bool) -> dict[str, float]:
        starts = np.arange(0, len(self.test) - self.context, self.context)
        starts = random(0).permutation(starts)[: self.looked_at[whole]]
        lost, right = 0.0, 0
        for first in range(0, len(starts), _AT_ONCE):
            losses, hits = _lost(model, *self._windows(self.test, starts[first : first + _AT_ONCE]))
            lost, right = lost + float(losses.double().sum()), right + int(hits.sum())
        count = len(starts) * self.context
        return {"loss": lost / count, "accuracy": right / count, "perplexity": float(np.exp(lost / count))}

    def probed(self) -> dict[str, Tensor]:
        starts = np.arange(0, len(self.test) - self.context, self.context)[:_SEEN]
        return {"input_ids": self._windows(self.test, starts)[0]}

    def tokenizer(self) -> Any:
        """Return a tokenizer whose tokens are single characters. It refuses those that the text does not have."""
        from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast

        # None of the vocabulary stands for unknown characters, and the model has no token for such.
        tokens = Tokenizer(models.WordLevel({character: place for place, character in enumerate(self.vocabulary)}))
        tokens.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        tokens.decoder = decoders.Fuse()
        return PreTrainedTokenizerFast(
            tokenizer_object=tokens, model_max_length=self.context, clean_up_tokenization_spaces=False
        )

    def _windows(self, text: Tensor, starts: Any) -> tuple[Tensor, Tensor]:
        """Return windows of the text and what follows each of their characters."""
        places = self.tensor(np.asarray(starts)[:, None] + np.arange(self.context))
        return text[places], text[places + 1]


def _lost(model: nn.Module, inputs: Tensor, following: Tensor) -> tuple[Tensor, Tensor]:
    """Return the loss of each character in nats, and whether it was the likeliest."""
    logits = model(input_ids=inputs).logits.float().flatten(0, 1)
    return functional.cross_entropy(logits, following.flatten(), reduction="none"), torch.eq(
        logits.argmax(-1), following.flatten()
    )
