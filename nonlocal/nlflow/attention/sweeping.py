"""Which terms help a trained model at a task: settings against the model as it is, intervals for all at once, tasks."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import stats
from torch import Tensor, nn

from nlflow.attention.injection.attach import attach, detach
from nlflow.attention.injection.blocks import Adapter, Block, blocks
from nlflow.attention.injection.inputs import positions
from nlflow.attention.injection.keeping import RECORD
from nlflow.backends.progress import bar
from nlflow.errors import InputError, check_array, check_choice, check_integer, check_number, checked_call
from nlflow.studies.result import render_rows

Floats = NDArray[np.float64]

Setting = tuple[str, float, str]  # form, strength λ̃, layers
FORMS = ("semi-implicit", "explicit")
LAYERS = ("all", "first half", "last half", "last")


@dataclass(frozen=True)
class Sweep:
    """What `sweep` found.

    Attributes
    ----------
    metric : str
        Name of the task.
    items : int
        Number of items that each setting was measured on.
    level : float
        Probability with which all intervals hold together.
    stock : float
        The metric of the model as it is.
    rows : list of dict
        One for each setting: ``form``, ``strength``, ``layers``, ``metric``, ``gain`` (mean paired difference of the
        scores, larger is better), ``low`` and ``high`` (its interval, simultaneous for all settings), ``p`` (of no
        difference, adjusted for their number), ``helps`` (``low`` > 0).
    best : dict or None
        Arguments for `nlflow.attention.attach`: of the largest gain among the settings that help. None if none does.
    scores : dict
        Scores (n,) by setting, ``(form, strength, layers)``, and ``None`` for the model as it is.
    """

    metric: str
    items: int
    level: float
    stock: float
    rows: list[dict[str, Any]]
    best: dict[str, Any] | None
    scores: dict[Setting | None, Floats] = field(repr=False, compare=False)

    def table(self) -> str:
        """Return the settings as text."""
        return render_rows([{**row, "helps": "yes" if row["helps"] else "no"} for row in self.rows])

    @property
    def verdict(self) -> str:
        """What to do, in a sentence."""
        tried = f"{len(self.rows)} setting{'s' * (len(self.rows) > 1)} tried on {self.items} items"
        if self.best is None:
            return f"none helps: {tried}, no interval of the gain lies above 0; leave the model as it is"
        row = max((row for row in self.rows if row["helps"]), key=lambda row: row["gain"])
        return (
            f"recommended: {row['form']}, strength {row['strength']:g}, layers {row['layers']}: {self.metric} "
            f"{self.stock:.4g} -> {row['metric']:.4g}, gain {row['gain']:.3g}, {self.level:.0%} interval "
            f"{row['low']:.3g} to {row['high']:.3g} for all settings at once; {tried}"
        )

    def as_dict(self) -> dict[str, Any]:
        """Return everything but the scores in JSON's types."""
        return {
            "metric": self.metric, "items": self.items, "level": self.level, "stock": self.stock, "rows": self.rows,
            "best": self.best, "verdict": self.verdict,
        }  # fmt: skip


@checked_call
def sweep(
    model: nn.Module,
    task: Callable[[Any], Any],
    *,
    strengths: Sequence[float] = (0.2, 0.4, 0.6),
    layers: Sequence[str] | Mapping[str, Sequence[int]] | None = None,
    forms: Sequence[str] = FORMS,
    level: float = 0.95,
    resamples: int = 10_000,
    rng: Any = 0,
    adapter: Adapter | Sequence[Adapter] | None = None,
    progress: bool = False,
) -> Sweep:
    """Try terms on a trained model, without training, and say which one helps it at a task.

    Each setting is compared with the model as it is over the same items. The intervals allow for the number of
    settings: all of them together contain the true gains with probability `level` (bootstrap of the largest difference
    in units of its error). So the best of many is no winner by chance.
    Items count as independent: passages of one article may be less so, and another text is the better test.

    Parameters
    ----------
    model : torch.nn.Module
        In evaluation mode, without terms. It is left as it was. Decoders need their head for `Perplexity`.
    task : callable
        `Retrieval`, `Perplexity`, or a function of the model that returns one score for each item, (n,), larger is
        better, in the same order at each call. Its attributes ``name`` and ``summary``, where it has them, give the
        metric: a function of the scores, their mean by default. It is called once for each setting, and once for the
        model as it is.
    strengths : sequence of float
        λ̃ > 0 to try.
    layers : sequence of str, or mapping of str to sequence of int
        Which layers have a term: ``'all'``, ``'first half'``, ``'last half'`` and ``'last'``, of each stack, or names
        for numbers of blocks in the order of `blocks`, from 0. By default all, the first and the last half. The first
        layer of a stack never has a term.
    forms : sequence of {'semi-implicit', 'explicit'}
    level : float
        Of the intervals, between 0 and 1.
    resamples : int
        Draws of the bootstrap, at least 100.
    rng : numpy.random.Generator or seed
    adapter : Adapter or sequence of Adapter, optional
        Where attention is, where it is not found.
    progress : bool
        Progress bar on stderr.

    Raises
    ------
    InputError
        For a model that is training or has terms, settings that no layer has, and scores that are no finite numbers,
        fewer than 10, or not as many as before.

    Examples
    --------
    >>> found = sweep(model, Retrieval(tokenizer, neighbouring_passages(texts)))  # doctest: +SKIP
    >>> print(found.verdict)  # doctest: +SKIP
    >>> if found.best:  # doctest: +SKIP
    ...     attach(model, **found.best)
    """
    if any(RECORD in module.__dict__ for module in model.modules()):
        raise InputError("model: has terms already; take them off first: nlflow.attention.detach(model)")
    if any(module.training for module in model.modules()):
        raise InputError("model: got one that is training, expected evaluation mode; call model.eval()")
    level = check_number("level", level, minimum=0, strict=True, below=1)
    resamples = check_integer("resamples", resamples, minimum=100)
    arguments = settings_of(model, strengths=strengths, layers=layers, forms=forms, adapter=adapter)
    settings = list(arguments)
    scores: dict[Setting | None, Floats] = {None: _scores(task, model, None)}
    for setting in bar(settings, desc="sweep", disable=not progress):
        attach(model, **arguments[setting])
        try:
            scores[setting] = _scores(task, model, len(scores[None]))
        finally:
            detach(model)
    table = np.stack([scores[setting] for setting in settings])
    differ = paired_differences(table, scores[None], level=level, resamples=resamples, rng=rng)
    summary = getattr(task, "summary", np.mean)
    rows = [
        {"form": form, "strength": strength, "layers": name, "metric": float(summary(own)), "gain": float(gain),
         "low": float(low), "high": float(high), "p": float(p), "helps": bool(low > 0)}
        for (form, strength, name), own, gain, low, high, p in zip(
            settings, table, differ.mean, differ.low, differ.high, differ.p, strict=True)
    ]  # fmt: skip
    helping = [number for number, row in enumerate(rows) if row["helps"]]
    best = max(helping, key=lambda number: rows[number]["gain"], default=None)
    return Sweep(
        metric=str(getattr(task, "name", getattr(task, "__name__", "score"))),
        items=table.shape[1],
        level=level,
        stock=float(summary(scores[None])),
        rows=rows,
        best=None if best is None else arguments[settings[best]],
        scores=scores,
    )


def settings_of(
    model: nn.Module,
    *,
    strengths: Sequence[float] = (0.2, 0.4, 0.6),
    layers: Sequence[str] | Mapping[str, Sequence[int]] | None = None,
    forms: Sequence[str] = FORMS,
    adapter: Adapter | Sequence[Adapter] | None = None,
) -> dict[Setting, dict[str, Any]]:
    """Return the arguments of `attach` for each setting that `sweep` tries on a model; arguments as for `sweep`."""
    given = [check_number(f"strengths[{i}]", one, minimum=0, strict=True) for i, one in enumerate(strengths)]
    kinds = [check_choice(f"forms[{i}]", one, FORMS) for i, one in enumerate(forms)]
    chosen = _layers(blocks(model, adapter), layers)
    where = {} if adapter is None else {"adapter": adapter}
    settings = {
        (form, strength, name): {
            "fidelity": [strength * on for on in chosen[name]], "semi_implicit": form == FORMS[0], **where
        }
        for form in kinds for name in chosen for strength in given
    }  # fmt: skip
    if not settings:
        raise InputError("strengths, layers, forms: got no setting, expected at least one of each")
    return settings


def _layers(found: list[Block], wanted: Sequence[str] | Mapping[str, Sequence[int]] | None) -> dict[str, list[int]]:
    """Return 1 for each block that is to have a term and 0 for the others, by the names of the layers."""
    places: list[int] = []
    counts: Counter[str] = Counter()
    for block in found:
        places.append(counts[block.group])
        counts[block.group] += 1
    able = [place > 0 or block.repeated for place, block in zip(places, found, strict=True)]
    parts = {
        "all": able,
        "first half": [2 * place < counts[block.group] for place, block in zip(places, found, strict=True)],
        "last half": [2 * place >= counts[block.group] for place, block in zip(places, found, strict=True)],
        "last": [place == counts[block.group] - 1 for place, block in zip(places, found, strict=True)],
    }
    if isinstance(wanted, Mapping):
        for name, numbers in wanted.items():
            for number in numbers:
                if check_integer(f"layers[{name!r}]", number, minimum=0) >= len(found):
                    raise InputError(
                        f"layers[{name!r}]: got {number}, expected numbers from 0 to {len(found) - 1}, the model's "
                        "blocks of self-attention"
                    )
            parts[name] = [index in set(numbers) for index in range(len(found))]
    given: Any = LAYERS[:3] if wanted is None else wanted
    if isinstance(given, str):
        raise InputError(f"layers: got {given!r}, expected a list of names; write [{given!r}]")
    result: dict[str, list[int]] = {}
    for name in given:
        if not isinstance(wanted, Mapping):
            check_choice("layers", name, LAYERS)
        acting = [int(one and can) for one, can in zip(parts[name], able, strict=True)]
        if any(acting) and not (wanted is None and acting in result.values()):
            result[name] = acting
        elif wanted is not None:
            raise InputError(
                f"layers: got {name!r}, of which no layer can have a term, expected others than the first of each "
                "stack, whose values are v0"
            )
    return result


def _scores(task: Callable[[Any], Any], model: nn.Module, count: int | None) -> Floats:
    got = task(model)
    scores = np.asarray(check_array("task", got.detach().cpu() if hasattr(got, "detach") else got, ndim=1), float)
    if count is not None and len(scores) != count:
        raise InputError(f"task: got {len(scores)} scores after {count}, expected one for the same items at each call")
    return scores


# ---- intervals

_LEAST = 10  # items: of fewer a bootstrap repeats whole samples
_ENTRIES = 2**22  # of counts at a time


@dataclass(frozen=True)
class Differences:
    """Mean differences (S,) of S settings, with the ends of their intervals and p-values, all of them simultaneous."""

    mean: Floats
    low: Floats
    high: Floats
    p: Floats


def paired_differences(
    scores: Any, stock: Any, *, level: float = 0.95, resamples: int = 10_000, rng: Any = 0
) -> Differences:
    """Return how far the scores (S, n) of settings are from `stock` (n,) over the same items, with bootstrap intervals.

    Items are drawn again, the same for all settings. The largest difference of each draw from what was found, in units
    of its standard error, gives the bound for all: at level 0.95, all intervals hold together in 95 % of experiments,
    however the settings depend on each other (single-step max-T, Westfall and Young 1993). So the best may be
    picked afterwards. O(resamples S n) operations.
    """
    gains = np.asarray(scores, float) - np.asarray(stock, float)
    count = gains.shape[1]
    if count < _LEAST:
        raise InputError(f"task: got scores of {count} items, expected at least {_LEAST}; give more texts")
    generator = np.random.default_rng(rng)
    mean = gains.mean(axis=1)
    scale = np.abs(gains).max(axis=1, keepdims=True)  # differences in units of the largest: squares do not underflow
    gains = np.divide(gains, scale, out=np.zeros_like(gains), where=scale > 0)
    centred = gains - gains.mean(axis=1, keepdims=True)
    error = centred.std(axis=1, ddof=1) / np.sqrt(count)
    # What is constant but for rounding has no spread.
    error[np.ptp(gains, axis=1) <= 8 * np.finfo(float).eps] = 0
    largest = np.empty(resamples)
    chunk = max(1, _ENTRIES // count)
    # The draws of n have the variance of n - 1.
    inverse = np.divide(np.sqrt(count / (count - 1)), error, out=np.zeros_like(error), where=error > 0)
    for start in range(0, resamples, chunk):
        stop = min(start + chunk, resamples)
        drawn = generator.multinomial(count, np.full(count, 1 / count), size=stop - start) / count
        largest[start:stop] = np.abs((drawn @ centred.T) * inverse).max(axis=1)
    # The draws know the law of the means, but not that errors are estimated: Student's law in the place of Gauss'.
    bound = stats.t.isf(stats.norm.sf(np.quantile(largest, level, method="higher")), count - 1)
    size = np.abs(mean) / np.where(scale[:, 0] > 0, scale[:, 0], 1)
    found = np.divide(size, error, out=np.where(size > 0, np.inf, 0.0), where=error > 0)
    found = stats.norm.isf(stats.t.sf(found, count - 1))
    p = (1 + (largest >= found[:, None]).sum(axis=1)) / (resamples + 1)
    reach = bound * error * scale[:, 0]
    return Differences(mean, mean - reach, mean + reach, p)


# ---- tasks


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
        Two or more neighbouring passages; `neighbouring_passages` makes them of texts. Passages beyond the longest
        input that the tokenizer knows are cut.
    pooling : {'mean', 'first', 'last'}
        What of the last hidden states is the embedding: the mean of all tokens, the first or the last one.
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
        Joined, then cut into two or more blocks. What is left at the end is not used.
    length : int
        Tokens of a block, at least 2. The first of them is not told.
    blocks : int, optional
        How many blocks at most, evenly from all of the text.
    batch : int
        Blocks at a time.
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
    """Return two or more pairs of passages that follow each other in texts, each passage in one pair only.

    Parameters
    ----------
    texts : sequence of str
        A pair lies in one text, and between two headings: lines that begin with ``=`` (as in WikiText) or ``#``, which
        are left out.
    words : int
        Of a passage. What is left of a section is not used.
    pairs : int, optional
        How many at most, evenly from all of the texts.
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
    return [i * count // most for i in range(most)] if count > most else list(range(count))
