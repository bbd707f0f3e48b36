"""Tasks of trained models."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nlflow.attention.injection.blocks import network_of
from nlflow.attention.injection.everyday import inputs_of, padded
from nlflow.attention.injection.inputs import positions
from nlflow.attention.probing.groups import pooled
from nlflow.attention.probing.probe import call_of
from nlflow.errors import InputError, check_array, check_choice, check_generator, check_integer, check_number

Floats = NDArray[np.float64]


def reciprocal_ranks(queries: Any, documents: Any) -> Floats:
    """Return 1 / rank of document i among all documents, by cosine with query i, in O(n² D) operations.

    Parameters
    ----------
    queries, documents : arrays of shape (n, D)
        Embeddings of the same numbers belong together.

    Returns
    -------
    array of shape (n,)
        From 1/n to 1; equal cosines count against the right document.
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
    """Task of an encoder: find the passage that follows a given one, among those that follow any.

    Parameters
    ----------
    tokenizer : tokenizer of transformers
    pairs : sequence of pairs of str
        Two or more, as of `neighbouring_passages`; passages are cut to the longest input of the tokenizer or the model.
    pooling : {'mean', 'first', 'last'}
        Which of the last hidden states is the embedding: the mean of all tokens, the first or the last.
    batch : int
        Passages at a time.
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

    def __call__(self, model: Any) -> Floats:
        """Return 1 / rank, (n,)."""
        embedded = self.embed(model, [one for pair in self.pairs for one in pair])
        return reciprocal_ranks(embedded[::2], embedded[1::2])

    def embed(self, model: Any, texts: Sequence[str]) -> Floats:
        """Return embeddings, shape (n, D)."""
        network = network_of(model)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of cut passages, which the docstring tells
            order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
            place = next(network.parameters()).device
            found: list[Any] = [None] * len(texts)
            for start in range(0, len(order), self.batch):
                chosen = order[start : start + self.batch]
                made = padded(self.tokenizer, [texts[i] for i in chosen], positions(network))
                mask = made["attention_mask"].to(place)
                with torch.no_grad():
                    output = network(input_ids=made["input_ids"].to(place), attention_mask=mask)
                states = getattr(output, "last_hidden_state", None)
                if states is None:
                    raise InputError(
                        f"model: got {type(network).__name__}, which gives no last_hidden_state; expected an encoder "
                        "without a head, as nlflow.attention.load_model gives it, or a function of your own as the task"
                    )
                for i, one in zip(chosen, pooled(states, mask, self.pooling), strict=True):
                    found[i] = one.double().cpu().numpy()
        return np.stack(found)

    @staticmethod
    def summary(scores: Floats) -> float:
        """Return the mean reciprocal rank."""
        return float(np.mean(scores))


class Perplexity:
    """Task of a decoder: predict the next token, in blocks of equal length.

    Parameters
    ----------
    tokenizer : tokenizer of transformers
    texts : sequence of str
        Joined by newlines, then cut into blocks, at least two; what is left at the end is not used.
    length : int
        Tokens of a block, at least 2; the first is not predicted.
    blocks : int, optional
        How many blocks at most, at even distances in the whole text.
    batch : int
        Blocks at a time.
    """

    name = "perplexity"

    def __init__(
        self, tokenizer: Any, texts: Sequence[str], *, length: int = 128, blocks: int | None = None, batch: int = 8
    ) -> None:
        length = check_integer("length", length, minimum=2)
        self.batch = check_integer("batch", batch, minimum=1)
        ids = tokenizer("\n".join(_several(texts)), add_special_tokens=False, verbose=False)["input_ids"]
        if len(ids) < 2 * length:
            raise InputError(f"texts: got {len(ids)} tokens, expected at least {2 * length}, two blocks; give more")
        whole = torch.tensor(ids[: len(ids) // length * length]).view(-1, length)
        self.blocks = (
            whole if blocks is None else whole[_evenly(len(whole), check_integer("blocks", blocks, minimum=1))]
        )

    def __call__(self, model: Any) -> Floats:
        """Return the mean log-likelihood of a token in each block, (n,), in nats."""
        model = network_of(model)
        found = []
        for ids in torch.split(self.blocks, self.batch):
            with torch.no_grad():
                logits = getattr(call_of(model, {"input_ids": ids})(), "logits", None)
            if logits is None or logits.shape[:2] != ids.shape:
                raise InputError(
                    f"model: got {type(model).__name__}, which gives no logits of the next token; expected one with "
                    "its head, as nlflow.attention.load_model(source, head='language') gives it"
                )
            told = ids[:, 1:, None].to(logits.device)
            logs = logits[:, :-1].double().log_softmax(dim=-1).gather(-1, told)[..., 0]
            found.append(logs.mean(dim=1).cpu().numpy())
        return np.concatenate(found)

    @staticmethod
    def summary(scores: Floats) -> float:
        """Return the perplexity, exp of the mean loss."""
        with np.errstate(over="ignore"):
            return float(np.exp(-np.mean(scores)))


class Classification:
    """Task of a model that makes features: find the class of each item (1 or 0) from the features of the others.

    Parameters
    ----------
    inputs : tensor, or sequence of texts, pictures or tensors
        The items, (n, ...).
    labels : sequence of int or str
    classifier : {'neighbours', 'linear'}
        A vote of the `neighbours` nearest items by cosine, with the weights 1 + cosine; or ridge regression of features
        of length 1, less their mean, beside a column of ones, with 1/100 of their mean squared singular value as
        penalty.
    neighbours : int
    pooling : {'first', 'mean', 'last'}
        Which of the last hidden states is the feature, where the model does not return one vector for each item.
    batch : int
        Items at a time.

    Raises
    ------
    InputError
        For fewer than ten items, labels of another number, and fewer than two classes.
    """

    def __init__(
        self,
        inputs: Any,
        labels: Sequence[Any],
        *,
        classifier: str = "neighbours",
        neighbours: int = 10,
        pooling: str = "first",
        batch: int = 32,
    ) -> None:
        self.classifier = check_choice("classifier", classifier, ("neighbours", "linear"))
        self.pooling = check_choice("pooling", pooling, ("first", "mean", "last"))
        self.batch, self.neighbours = (
            check_integer("batch", batch, minimum=1),
            check_integer("neighbours", neighbours, minimum=1),
        )
        self.inputs = inputs if isinstance(inputs, Tensor) else list(inputs)
        self.labels = np.unique(np.asarray(labels), return_inverse=True)[1]
        if len(self.labels) != len(self.inputs) or len(self.inputs) < 10:
            raise InputError(
                f"labels: got {len(self.labels)} for {len(self.inputs)} items, expected one for each of at least 10"
            )
        if self.labels.max() < 1:
            raise InputError("labels: got one class, expected at least two")
        names = {"neighbours": "k-nearest-neighbour accuracy", "linear": "linear-probe accuracy"}
        self.name = names[self.classifier]

    def __call__(self, model: Any) -> Floats:
        """Return whether each class is found."""
        features = _unit(self.embed(model))
        known = np.eye(self.labels.max() + 1)[self.labels]
        scores = self._voted(features, known) if self.classifier == "neighbours" else self._fitted(features, known)
        return np.asarray(scores.argmax(axis=1) == self.labels, dtype=np.float64)

    def embed(self, model: Any) -> Floats:
        """Return features, shape (n, D)."""
        network, found = network_of(model), []
        for start in range(0, len(self.inputs), self.batch):
            part = self.inputs[start : start + self.batch]
            given = inputs_of(model, part) if not isinstance(part, list) or not _tensors(part) else torch.stack(part)
            with torch.no_grad():
                output = call_of(network, given)()
            states = getattr(output, "last_hidden_state", None)
            if states is None and isinstance(output, Mapping):  # of a SentenceTransformer
                states = output.get("sentence_embedding", output.get("token_embeddings"))
            states = output if states is None else states
            if not isinstance(states, Tensor) or states.ndim not in (2, 3):
                raise InputError(
                    f"model: got {type(network).__name__}, which returns no features (batch, D) or states (batch, "
                    "tokens, D); expected such, or a function of your own as the task"
                )
            mask = given.get("attention_mask") if isinstance(given, Mapping) else None
            mask = None if mask is None else mask.to(states.device)
            made = pooled(states, mask, self.pooling) if states.ndim == 3 else states
            found.append(made.double().cpu().numpy())
        return np.concatenate(found)

    def _voted(self, features: Floats, known: Floats) -> Floats:
        cosines = features @ features.T
        np.fill_diagonal(cosines, -np.inf)
        count = min(self.neighbours, len(features) - 1)
        near = np.argsort(-cosines, axis=1, kind="stable")[:, :count]
        weights = np.take_along_axis(cosines, near, axis=1) + 1  # >= 0
        return np.asarray(np.einsum("nk,nkc->nc", weights, known[near]))

    def _fitted(self, features: Floats, known: Floats) -> Floats:
        """Return what ridge regressions without each item say of it, from one of all: (Hy - h y) / (1 - h)."""
        features = np.column_stack([features - features.mean(axis=0), np.ones(len(features))])
        left, sizes, _ = np.linalg.svd(features, full_matrices=False)
        shrunk = sizes**2 / (sizes**2 + 0.01 * (sizes**2).mean())
        own = np.einsum("nd,d,nd->n", left, shrunk, left)[:, None]
        fitted: Floats = (left * shrunk @ (left.T @ known) - own * known) / (1 - own)
        return fitted


def _tensors(part: list[Any]) -> bool:
    return all(isinstance(one, Tensor) for one in part)


class TokenAccuracy:
    """Task of a model with a head: predict tokens by their largest logit.

    Parameters
    ----------
    inputs : sequence of mappings
        What the model is called with, one or several sequences at a time.
    labels : sequence of tensors of int, (B, N)
        The right tokens, in the order of the logits; a negative number where none is asked for.
    name : str
        Of the metric.
    """

    def __init__(
        self, inputs: Sequence[Mapping[str, Any]], labels: Sequence[Tensor], *, name: str = "token accuracy"
    ) -> None:
        self.inputs, self.labels, self.name = list(inputs), [torch.as_tensor(one) for one in labels], name
        if len(self.inputs) != len(self.labels) or not self.inputs:
            raise InputError(f"labels: got {len(self.labels)} for {len(self.inputs)} inputs, expected one for each")
        for number, one in enumerate(self.labels):
            if one.ndim != 2 or not bool((one >= 0).any(dim=1).all()):
                raise InputError(
                    f"labels[{number}]: got shape {tuple(one.shape)}, expected (batch, tokens) with a token in each "
                    "sequence that is asked for"
                )

    def __call__(self, model: Any) -> Floats:
        """Return the share of tokens that are told in each sequence, (n,)."""
        network, found = network_of(model), []
        for number, given in enumerate(self.inputs):
            with torch.no_grad():
                logits = getattr(call_of(network, given)(), "logits", None)
            if logits is None or logits.shape[:2] != self.labels[number].shape:
                raise InputError(
                    f"model: got {type(network).__name__}, which gives no logits of the tokens; expected one with its "
                    "head, as nlflow.attention.load_model(source, head='masked') or head='speech' gives it"
                )
            labels = self.labels[number] = self.labels[number].to(logits.device)  # where they stay for the next setting
            asked = labels >= 0
            right = (logits.argmax(dim=-1) == labels) & asked
            found.append((right.sum(dim=1) / asked.sum(dim=1)).double())
        return np.asarray(torch.cat(found).cpu().numpy())


class WordErrors:
    """Task of a model of speech: write down what is said, by the largest logit of each next token.

    The score of a sound is minus its word error rate: the Levenshtein distance in words over the number of words said.
    Words are letters, digits, underscores and apostrophes, in any case.

    Parameters
    ----------
    sounds : sequence of tensor, (1, ...)
        Given to the model as ``input_features``.
    said : sequence of str
        What is said in each.
    write : callable
        Returns the text of a list of token numbers, such as the ``decode`` of a tokenizer.
    begin : sequence of int
        Tokens that the decoder begins with.
    end : int
        Token that ends a text.
    most : int
        Largest number of tokens of a text.
    """

    name = "word error rate"

    def __init__(
        self, sounds: Sequence[Tensor], said: Sequence[str], write: Any, *, begin: Sequence[int], end: int,
        most: int = 96,
    ) -> None:  # fmt: skip
        self.sounds, self.said = list(sounds), [_words(one) for one in said]
        self.write, self.begin, self.end = write, list(begin), check_integer("end", end, minimum=0)
        self.most = check_integer("most", most, minimum=1)
        if len(self.said) != len(self.sounds) or not self.sounds:
            raise InputError(f"said: got {len(self.said)} for {len(self.sounds)} sounds, expected one for each")
        for number, sound in enumerate(self.sounds):
            if sound.ndim < 2 or len(sound) != 1:
                raise InputError(f"sounds[{number}]: got shape {tuple(sound.shape)}, expected (1, ...), one sound each")
        for number, one in enumerate(self.said):
            if not one:
                raise InputError(f"said[{number}]: got {said[number]!r:.60}, expected some words")
        if not self.begin:
            raise InputError("begin: got no token, expected at least one, which the decoder begins with")

    def __call__(self, model: Any) -> Floats:
        """Return the scores, (n,)."""
        network = network_of(model)
        pairs = zip(self.sounds, self.said, strict=True)
        return np.array([-word_errors(_words(self.heard(network, one)), said) / len(said) for one, said in pairs])

    def heard(self, network: Any, sound: Tensor) -> str:
        """Return the words that a model writes down."""
        ids = list(self.begin)
        given: dict[str, Any] = {"input_features": sound}
        while len(ids) < len(self.begin) + self.most:
            with torch.no_grad():
                output = call_of(network, {**given, "decoder_input_ids": torch.tensor([ids])})()
            logits, state = (getattr(output, name, None) for name in ("logits", "encoder_last_hidden_state"))
            if logits is None or logits.shape[:2] != (1, len(ids)) or state is None:
                raise InputError(
                    f"model: got {type(network).__name__}, which writes nothing of what it hears; expected one with "
                    "its head, as nlflow.attention.load_model(source, head='speech') gives it"
                )
            given = {"encoder_outputs": (state,)}
            if (found := int(logits[0, -1].argmax())) == self.end:
                break
            ids.append(found)
        return str(self.write(ids[len(self.begin) :]))

    @staticmethod
    def summary(scores: Floats) -> float:
        """Return the mean word error rate."""
        return float(-np.mean(scores))


def _words(text: str) -> list[str]:
    return re.findall(r"[\w']+", text.lower())


def word_errors(heard: Sequence[str], said: Sequence[str]) -> int:
    row = list(range(len(said) + 1))
    for number, word in enumerate(heard, 1):
        before, row[0] = row[0], number
        for place, other in enumerate(said, 1):
            before, row[place] = row[place], min(before + (word != other), row[place] + 1, row[place - 1] + 1)
    return row[-1]


def masked_tokens(
    tokenizer: Any, texts: Sequence[str], *, share: float = 0.15, draws: int = 1, batch: int = 16, rng: Any = 0
) -> TokenAccuracy:
    """Return the task of an encoder with its head: predict masked tokens.

    Parameters
    ----------
    tokenizer : tokenizer of transformers, with a token for masks
    texts : sequence of str
        Sequences, cut to the tokenizer's longest input; blank ones are left out, and the others sorted by length.
    share : float
        Share of the tokens that is masked, at least one in each text; special ones stay.
    draws : int
        How often each text is masked; its score is the mean.
    batch : int
    rng : numpy.random.Generator or seed
    """
    share = check_number("share", share, minimum=0, strict=True, below=1)
    batch = check_integer("batch", batch, minimum=1)
    mask_token = getattr(tokenizer, "mask_token_id", None)
    if mask_token is None:
        raise InputError("tokenizer: got one without a token for masks, expected that of a model with masked tokens")
    generator, special = check_generator(rng), set(tokenizer.all_special_ids)
    order = sorted((one for one in _several(texts) if one.strip()), key=len)
    if not order:
        raise InputError("texts: got none with words, expected some")
    inputs, labels = [], []
    for start in range(0, len(order), batch):
        for _ in range(check_integer("draws", draws, minimum=1)):
            made = padded(tokenizer, order[start : start + batch])
            ids, wanted = made["input_ids"], torch.full_like(made["input_ids"], -100)
            for row, text in enumerate(ids):
                able = [
                    i
                    for i, token in enumerate(text.tolist())
                    if made["attention_mask"][row, i] and token not in special
                ]
                if not able:
                    raise InputError(f"texts: got {order[start + row]!r:.60}, all of whose tokens are special")
                chosen = generator.choice(able, size=max(1, round(share * len(able))), replace=False)
                wanted[row, chosen] = ids[row, chosen]
                ids[row, chosen] = mask_token
            inputs.append(made)
            labels.append(wanted)
    return _Drawn(inputs, labels, draws)


class _Drawn(TokenAccuracy):
    """Batches that come several times, with other masks: the mean of each sequence's scores."""

    def __init__(self, inputs: Any, labels: Any, draws: int) -> None:
        super().__init__(inputs, labels, name="masked-token accuracy")
        self.draws = draws

    def __call__(self, model: Any) -> Floats:
        scores, found, begin = super().__call__(model), [], 0
        for labels in self.labels[:: self.draws]:
            count = len(labels) * self.draws
            found.append(scores[begin : begin + count].reshape(self.draws, -1).mean(axis=0))
            begin += count
        return np.concatenate(found)


def neighbouring_passages(texts: Sequence[str], *, words: int = 48, pairs: int | None = None) -> list[tuple[str, str]]:
    """Return two or more pairs of passages that follow each other in texts, each passage in one pair only.

    Parameters
    ----------
    texts : sequence of str
        Headings are lines that begin with ``=`` (as in WikiText) or ``#``; no pair crosses one.
    words : int
        Of a passage; what is left of a section is not used.
    pairs : int, optional
        At most so many, at least 2, at even distances in the order of the texts.
    """
    words = check_integer("words", words, minimum=1)
    found = []
    for text in _several(texts):
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


def _several(texts: Sequence[str]) -> Sequence[str]:
    """Return texts; one alone is refused, since it is a sequence of its letters."""
    if isinstance(texts, str):
        raise InputError(f"texts: got {texts!r:.60}, expected a list of texts; write [text]")
    return texts


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
    return [i * count // most for i in range(most)] if count > most else list(range(count))
