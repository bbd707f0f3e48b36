"""`sweep`: terms of several strengths, layers and forms against the model as it is, and which one to take."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from nlflow.attention.injection.adapters import Adapter, Block, blocks
from nlflow.attention.injection.attach import attach, detach
from nlflow.attention.injection.keeping import RECORD
from nlflow.attention.sweeping.intervals import paired_differences
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
        metric: a function of the scores, their mean by default.
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

    Returns
    -------
    Sweep
        The task is called once for each setting and once for the model as it is.

    Raises
    ------
    InputError
        For a model that is training or has terms, settings that no layer has, and scores that are no finite numbers,
        fewer than 10, or as many as before.

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
    """Return what the task gives for a model, one finite number for each item."""
    got = task(model)
    scores = np.asarray(check_array("task", got.detach().cpu() if hasattr(got, "detach") else got, ndim=1), float)
    if count is not None and len(scores) != count:
        raise InputError(f"task: got {len(scores)} scores after {count}, expected one for the same items at each call")
    return scores
