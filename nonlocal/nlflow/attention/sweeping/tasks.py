"""What a model is measured by: neighbouring passages found again by encoders, the next token by decoders."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from nlflow.attention.injection.trial import positions
from nlflow.errors import InputError, check_array, check_choice, check_integer

Floats = NDArray[np.float64]


def reciprocal_ranks(queries: Any, documents: Any) -> Floats:
    """Return 1 / rank of document i among all documents, by cosine with query i; their mean is the MRR.

    Parameters
    ----------
    queries, documents : arrays of shape (n, D)
        Embeddings of the same numbers belong together.

    Returns
    -------
    array of shape (n,)
        From 1/n to 1. Equal cosines count against the right document, so that a model which gives all texts one
        embedding gets 1/n. O(n² D) operations.

    Raises
    ------
    InputError
        For other shapes, and NaN or infinite values.
    """
    asked, given = (np.asarray(check_array(name, array, ndim=(2,)), float)
                    for name, array in (("queries", queries), ("documents", documents)))  # fmt: skip
    if asked.shape != given.shape:
        raise InputError(f"documents: got shape {given.shape}, expected {asked.shape}, that of queries")
    cosines = _unit(asked) @ _unit(given).T
    own = np.diagonal(cosines).copy()
    # Rounding must not tell equal documents apart: cosines within it are equal.
    near = 4 * asked.shape[1] * np.finfo(float).eps
    ranks: Floats = (cosines >= own[:, None] - near).sum(axis=1)
    return 1 / ranks


def _unit(x: Floats) -> Floats:
    size = np.abs(x).max(axis=1, keepdims=True)
    x = np.divide(x, size, out=np.zeros_like(x), where=size > 0)
    length = np.sqrt(np.square(x).sum(axis=1, keepdims=True))
    unit: Floats = np.divide(x, length, out=np.zeros_like(x), where=length > 0)
    return unit


class Retrieval:
    """Task of an encoder: from one passage, find the one that follows it among the followers of all others.

    Called with a model, it returns the reciprocal rank of each pair.

    Parameters
    ----------
    tokenizer : tokenizer of transformers
    pairs : sequence of pairs of str
        Neighbouring passages; `neighbouring_passages` makes them of texts. Passages beyond the longest input that the
        tokenizer knows are cut.
    pooling : {'mean', 'first', 'last'}
        What of the last hidden states is the embedding: the mean of all tokens, the first or the last one.
    batch : int
        Passages at a time.

    Raises
    ------
    InputError
        For fewer than two pairs, and what are no pairs of words.
    """

    name = "MRR"

    def __init__(
        self, tokenizer: Any, pairs: Sequence[tuple[str, str]], *, pooling: str = "mean", batch: int = 32
    ) -> None:
        self.tokenizer, self.pooling = tokenizer, check_choice("pooling", pooling, ("mean", "first", "last"))
        self.batch = check_integer("batch", batch, minimum=1)
        self.pairs: list[Any] = list(pairs)
        if len(self.pairs) < 2:
            raise InputError(f"pairs: got {len(self.pairs)}, expected at least 2; give more or longer texts")
        for number, pair in enumerate(self.pairs):
            fits = isinstance(pair, tuple | list) and len(pair) == 2
            if not fits or not all(isinstance(one, str) and one.strip() for one in pair):
                raise InputError(f"pairs[{number}]: got {pair!r:.80}, expected two passages of some words")

    def __call__(self, model: nn.Module) -> Floats:
        """Return 1 / rank of each pair, (n,)."""
        embedded = self.embed(model, [one for pair in self.pairs for one in pair])
        return reciprocal_ranks(embedded[::2], embedded[1::2])

    def embed(self, model: nn.Module, texts: Sequence[str]) -> Floats:
        """Return embeddings (n, D) of texts, in batches of about equal lengths."""
        limit = min(positions(model), int(min(self.tokenizer.model_max_length, 10**9)))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of cut passages, which the docstring tells
            tokens = [self.tokenizer(one, truncation=True, max_length=limit)["input_ids"] for one in texts]
        order = sorted(range(len(tokens)), key=lambda i: len(tokens[i]))
        place = next(model.parameters()).device
        found: list[Any] = [None] * len(tokens)
        for start in range(0, len(order), self.batch):
            chosen = order[start : start + self.batch]
            most = max(len(tokens[i]) for i in chosen)
            ids = torch.zeros(len(chosen), most, dtype=torch.long)
            mask = torch.zeros(len(chosen), most, dtype=torch.long)
            for row, i in enumerate(chosen):
                ids[row, : len(tokens[i])] = torch.tensor(tokens[i])
                mask[row, : len(tokens[i])] = 1
            with torch.no_grad():
                output = model(input_ids=ids.to(place), attention_mask=mask.to(place))
            states = getattr(output, "last_hidden_state", None)
            if states is None:
                raise InputError(
                    f"model: got {type(model).__name__}, which gives no last_hidden_state; expected an encoder without "
                    "a head, as nlflow.attention.load_model gives it, or a function of your own as the task"
                )
            for i, one in zip(chosen, self._pooled(states, mask.to(place)), strict=True):
                found[i] = one.double().cpu().numpy()
        return np.stack(found)

    def _pooled(self, states: Tensor, mask: Tensor) -> Tensor:
        if self.pooling == "first":
            return states[:, 0]
        if self.pooling == "last":
            return states[torch.arange(len(states), device=states.device), mask.sum(dim=1) - 1]
        return (states * mask[..., None]).sum(dim=1) / mask.sum(dim=1, keepdim=True)

    @staticmethod
    def summary(scores: Floats) -> float:
        """Return the mean reciprocal rank."""
        return float(np.mean(scores))


class Perplexity:
    """Task of a decoder: tell the next token, in blocks of equal numbers of tokens.

    Called with a model, it returns the mean log-likelihood of a token of each block.

    Parameters
    ----------
    tokenizer : tokenizer of transformers
    texts : sequence of str
        Joined, then cut into blocks. What is left at the end is not used.
    length : int
        Tokens of a block, at least 2. The first of them is not told.
    blocks : int, optional
        How many blocks at most, evenly from all of the text.
    batch : int
        Blocks at a time.

    Raises
    ------
    InputError
        For texts with less than two blocks.
    """

    name = "perplexity"

    def __init__(
        self, tokenizer: Any, texts: Sequence[str], *, length: int = 128, blocks: int | None = None, batch: int = 8
    ) -> None:
        length = check_integer("length", length, minimum=2)
        self.batch = check_integer("batch", batch, minimum=1)
        ids = tokenizer("\n".join(texts), add_special_tokens=False, verbose=False)["input_ids"]
        if len(ids) < 2 * length:
            raise InputError(f"texts: got {len(ids)} tokens, expected at least {2 * length}, two blocks; give more")
        whole = torch.tensor(ids[: len(ids) // length * length]).view(-1, length)
        self.blocks = (
            whole if blocks is None else whole[_evenly(len(whole), check_integer("blocks", blocks, minimum=1))]
        )

    def __call__(self, model: nn.Module) -> Floats:
        """Return the mean log-likelihood of a token in each block, (n,), in nats."""
        place = next(model.parameters()).device
        found = []
        for ids in torch.split(self.blocks, self.batch):
            ids = ids.to(place)
            with torch.no_grad():
                logits = getattr(model(input_ids=ids), "logits", None)
            if logits is None or logits.shape[:2] != ids.shape:
                raise InputError(
                    f"model: got {type(model).__name__}, which gives no logits of the next token; expected one with "
                    "its head, as nlflow.attention.load_model(source, head='language') gives it"
                )
            logs = logits[:, :-1].double().log_softmax(dim=-1).gather(-1, ids[:, 1:, None])[..., 0]
            found.append(logs.mean(dim=1).cpu().numpy())
        return np.concatenate(found)

    @staticmethod
    def summary(scores: Floats) -> float:
        """Return the perplexity, exp of the mean loss."""
        with np.errstate(over="ignore"):
            return float(np.exp(-np.mean(scores)))


def neighbouring_passages(texts: Sequence[str], *, words: int = 48, pairs: int | None = None) -> list[tuple[str, str]]:
    """Return pairs of passages that follow each other in texts, each passage in one pair only.

    Parameters
    ----------
    texts : sequence of str
        A pair lies in one text, and between two headings: lines that begin with ``=`` (as in WikiText) or ``#``, which
        are left out.
    words : int
        Of a passage. What is left of a section is not used.
    pairs : int, optional
        How many at most, evenly from all of the texts.

    Raises
    ------
    InputError
        When there are no two pairs.
    """
    words = check_integer("words", words, minimum=1)
    found = []
    for text in texts:
        for section in _sections(text):
            parts = [" ".join(section[i : i + words]) for i in range(0, len(section) - words + 1, words)]
            found += [both for number, both in enumerate(pairwise(parts)) if number % 2 == 0]
    if len(found) < 2:
        raise InputError(
            f"texts: got {len(found)} pair(s) of passages of {words} words, expected at least 2; give more text, or "
            "fewer words a passage"
        )
    if pairs is None:
        return found
    return [found[i] for i in _evenly(len(found), check_integer("pairs", pairs, minimum=2))]


def _sections(text: str) -> Iterator[list[str]]:
    section: list[str] = []
    for line in text.splitlines():
        if line.lstrip().startswith(("=", "#")):
            yield section
            section = []
        else:
            section += line.split()
    yield section


def _evenly(count: int, most: int) -> list[int]:
    """Return at most so many of the numbers below `count`, at equal distances."""
    return [i * count // most for i in range(most)] if count > most else list(range(count))
