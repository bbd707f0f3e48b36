"""Sweeps of cures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter, process_time
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from nlflow._array import Brief
from nlflow.attention.injection.attach import attach, detach
from nlflow.attention.injection.blocks import Adapter, Block, blocks, later, network_of
from nlflow.attention.injection.cures import CURES, held_bytes, in_range
from nlflow.attention.injection.inputs import check_model_filled
from nlflow.attention.injection.keeping import RECORD
from nlflow.attention.injection.weights import LayoutError
from nlflow.attention.sweeping.intervals import paired_differences
from nlflow.backends.progress import bar
from nlflow.errors import InputError, check_array, check_choice, check_integer, check_number, checked_call
from nlflow.studies.tables import render_rows

Floats = NDArray[np.float64]

Setting = tuple[str, float, str]  # cure, its number, layers
LAYERS = ("all", "first half", "last half", "last")


@dataclass(frozen=True, repr=False)
class Sweep(Brief):
    """What `sweep` found.

    Attributes
    ----------
    metric : str
        Name of the task.
    items : int
        Number of items that each setting was measured on.
    level : float
        Of the intervals.
    stock : float
        The metric of the model as it is.
    rows : list of dict
        One for each setting: ``cure``, ``value``, ``layers``, ``metric``, ``gain`` (mean paired difference of the
        scores, larger is better), ``low`` and ``high`` (its interval, simultaneous for all settings), ``p`` (of no
        difference, adjusted for their number), ``helps`` (``low`` > 0), ``harms`` (``high`` < 0), ``worse`` (share of
        the items whose score falls), ``time`` (of the task, over that of the model as it is), ``bytes`` (what the cure
        keeps beside the model, and while it runs for each token).
    best : dict or None
        Arguments for `nlflow.attention.attach`: of the largest gain among the settings that help; None if none does.
    scores : dict
        Scores (n,) by setting, ``(cure, value, layers)``, and ``None`` for the model as it is.
    left_out : dict
        Cures that this model cannot have, and settings for which there was no time, with the reason.
    """

    metric: str
    items: int
    level: float
    stock: float
    rows: list[dict[str, Any]]
    best: dict[str, Any] | None
    scores: dict[Setting | None, Floats] = field(repr=False, compare=False)
    left_out: dict[str, str] = field(default_factory=dict)

    def table(self) -> str:
        """The settings and their scores as text."""
        shown = [{k: v for k, v in row.items() if k not in ("helps", "harms", "bytes")} for row in self.rows]
        for row, own in zip(shown, self.rows, strict=True):
            row["verdict"] = "helps" if own["helps"] else "harms" if own["harms"] else "no difference seen"
        return render_rows(shown)

    @property
    def chosen(self) -> dict[str, Any] | None:
        """The row of the best setting."""
        return max((row for row in self.rows if row["helps"]), key=lambda row: row["gain"], default=None)

    @property
    def verdict(self) -> str:
        """What the sweep says to do."""
        tried = f"{_settings(len(self.rows))} tried on {self.items} items"
        tried += f" ({', '.join(self.left_out)} left out)" if self.left_out else ""
        row = self.chosen
        if row is None:
            return f"none is seen to help: {tried}, no interval of the gain lies above 0; leave the model as it is"
        return (
            f"recommended: {row['cure']}, {CURES[row['cure']].parameter} = {row['value']:g}, layers {row['layers']}: "
            f"{self.metric} {self.stock:.4g} -> {row['metric']:.4g}, gain {row['gain']:.3g}, {self.level:.0%} interval "
            f"{row['low']:.3g} to {row['high']:.3g} for all settings at once; {tried}. {price(row)}"
        )

    def as_dict(self) -> dict[str, Any]:
        """Return everything but the scores in JSON's types."""
        return {
            "metric": self.metric, "items": self.items, "level": self.level, "stock": self.stock, "rows": self.rows,
            "best": self.best, "verdict": self.verdict, "left_out": self.left_out,
        }  # fmt: skip


def price(row: Mapping[str, Any]) -> str:
    kept, token = row["bytes"]
    return (
        f"Its price: {row['time']:.2f} times the seconds of the task, {kept / 2**20:.3g} MiB beside the model and "
        f"{token} bytes a token while it runs; {row['worse']:.0%} of the items get worse"
    )


@checked_call
def sweep(
    model: Any,
    task: Callable[[Any], Any],
    *,
    cures: Sequence[str] | Mapping[str, Sequence[float]] | None = None,
    layers: Sequence[str] | Mapping[str, Sequence[int]] | None = None,
    level: float = 0.95,
    resamples: int = 10_000,
    rng: Any = 0,
    seconds: float | None = None,
    adapter: Adapter | Sequence[Adapter] | None = None,
    progress: bool = False,
) -> Sweep:
    """Try cures on a trained model, without training, and say which one helps it at a task.

    All intervals together contain the true gains with about the probability `level` (bootstrap), if items are
    independent, which passages of one article may not be.

    Parameters
    ----------
    model : torch.nn.Module or pipeline of transformers
        In evaluation mode, without terms; it is left as it was.
    task : callable
        `Retrieval`, `Classification`, `Perplexity`, `TokenAccuracy`, `WordErrors`, or a function of the model that
        returns one score for each item, (n,), larger is better, in the same order at each call. Its attributes ``name``
        and ``summary`` name and compute the metric, by default the mean.
    cures : sequence of str, or mapping of str to sequence of float
        Names in `nlflow.attention.CURES`, by default all, with their own ``values`` or with given numbers.
    layers : sequence of str, or mapping of str to sequence of int
        Which layers are changed, by default all and the last half: ``'all'``, ``'first half'``, ``'last half'`` and
        ``'last'``, of each stack, or names for numbers of blocks in the order of `blocks`, from 0.
    level : float
        Of the intervals, between 0 and 1.
    resamples : int
        Draws of the bootstrap, at least 100.
    rng : numpy.random.Generator or seed
    seconds : float, optional
        Limit of the whole sweep, roughly kept. Settings that would exceed it are left out: the last names of `layers`
        first, then the last numbers of each cure.
    adapter
        As for `nlflow.attention.attach`.
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
    network = network_of(model)
    if any(RECORD in module.__dict__ for module in network.modules()):
        raise InputError("model: has terms already; take them off first: nlflow.attention.detach(model)")
    if any(module.training for module in network.modules()):
        raise InputError("model: got one that is training, expected evaluation mode; call model.eval()")
    check_model_filled(network)
    level = check_number("level", level, minimum=0, strict=True, below=1)
    resamples = check_integer("resamples", resamples, minimum=100)
    arguments = settings_of(network, cures=cures, layers=layers, adapter=adapter)
    scores: dict[Setting | None, Floats] = {}
    took: dict[Setting | None, float] = {}
    scores[None], took[None] = _scores(task, model, None)
    left_out: dict[str, str] = {}
    if seconds is not None:
        arguments, left = _within(arguments, check_number("seconds", seconds, minimum=0, strict=True) / took[None])
        names = ", ".join(f"{cure} {CURES[cure].parameter} = {value:g} ({part})" for cure, value, part in left)
        if left:
            left_out[_settings(len(left))] = f"all would take longer than {seconds:g} seconds: {names}"
    for setting in bar(list(arguments), desc="sweep", progress=progress):
        if setting[0] in left_out:
            continue
        found = _tried(network, model, task, arguments[setting], len(scores[None]))
        if not isinstance(found, InputError):
            scores[setting], took[setting] = found
        elif cures is not None:
            raise found
        else:
            left_out[setting[0]] = str(found)
    return _found(network, task, arguments, scores, took, left_out, level, resamples, rng)


def _tried(
    network: nn.Module, model: Any, task: Callable[[Any], Any], given: dict[str, Any], count: int
) -> tuple[Floats, float] | InputError:
    """Return scores and seconds with a cure, or why this model cannot have it."""
    try:
        attach(network, **given)
    except InputError as error:
        return error
    try:
        return _scores(task, model, count)
    except LayoutError as error:  # the first call shows where values lie
        return error
    finally:
        detach(network)


def _within(
    arguments: dict[Setting, dict[str, Any]], most: float
) -> tuple[dict[Setting, dict[str, Any]], list[Setting]]:
    """Return at most so many settings, of the first names of layers and the first numbers, and those that are left."""
    parts = list(dict.fromkeys(name for _, _, name in arguments))
    values: dict[str, list[float]] = {}
    for cure, value, _ in arguments:
        if value not in values.setdefault(cure, []):
            values[cure].append(value)
    order = sorted(arguments, key=lambda one: (parts.index(one[2]), values[one[0]].index(one[1])))
    kept = set(order[: max(1, int(most))])
    return {one: arguments[one] for one in arguments if one in kept}, [one for one in arguments if one not in kept]


def _settings(count: int) -> str:
    return f"{count} setting{'s' * (count != 1)}"


def _found(
    network: nn.Module, task: Any, arguments: Any, scores: Any, took: Any, left_out: dict[str, str], level: float,
    resamples: int, rng: Any,
) -> Sweep:  # fmt: skip
    settings = [setting for setting in arguments if setting in scores and setting[0] not in left_out]
    if not settings:
        raise InputError(
            f"model: got {type(network).__name__}, which can have no cure: {next(iter(left_out.values()))}"
        )
    table = np.stack([scores[setting] for setting in settings])
    differ = paired_differences(table, scores[None], level=level, resamples=resamples, rng=rng)
    summary = getattr(task, "summary", np.mean)
    found = blocks(network, arguments[settings[0]].get("adapter"))
    rows = [
        {"cure": cure, "value": value, "layers": name, "metric": float(summary(own)), "gain": float(gain),
         "low": float(low), "high": float(high), "p": float(p), "helps": bool(low > 0), "harms": bool(high < 0),
         "worse": float((own < scores[None]).mean()), "time": took[cure, value, name] / took[None],
         "bytes": held_bytes(cure, found, arguments[cure, value, name])}
        for (cure, value, name), own, gain, low, high, p in zip(
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
        scores={one: scores[one] for one in (None, *settings)},
        left_out=left_out,
    )


def settings_of(
    model: nn.Module,
    *,
    cures: Sequence[str] | Mapping[str, Sequence[float]] | None = None,
    layers: Sequence[str] | Mapping[str, Sequence[int]] | None = None,
    adapter: Adapter | Sequence[Adapter] | None = None,
) -> dict[Setting, dict[str, Any]]:
    if isinstance(cures, str):
        raise InputError(f"cures: got {cures!r}, expected a list of names; write [{cures!r}]")
    names = list(CURES if cures is None else cures)
    values: Any = cures if isinstance(cures, Mapping) else {}
    for name in names:
        check_choice("cures", name, tuple(CURES))
    found = blocks(model, adapter)
    where = {} if adapter is None else {"adapter": adapter}
    settings: dict[Setting, dict[str, Any]] = {}
    for name in names:
        cure = CURES[name]
        able = later(found) if cure.later else [True] * len(found)
        given = [in_range(cure, f"cures[{name!r}][{i}]", one) for i, one in enumerate(values.get(name, cure.values))]
        if not given or cure.neutral in given:
            raise InputError(
                f"cures[{name!r}]: got {given}, expected numbers other than {cure.neutral:g}, the model as it is"
            )
        for part, acting in _layers(found, able, layers).items():
            for value in given:
                own = [value if on else cure.neutral for on in acting]
                settings[name, value, part] = {**cure.arguments(own), **where}
    if not settings:
        if not names:
            raise InputError("cures: got no setting, expected at least one")
        raise InputError(
            f"cures: got {', '.join(names)}, which act in the second and further layers of a stack, for a model of "
            f"{len(found)} layer{'s' * (len(found) != 1)} that has none; expected cures of the first one, such as "
            "temperature"
        )
    return settings


def _layers(
    found: list[Block], able: list[bool], wanted: Sequence[str] | Mapping[str, Sequence[int]] | None
) -> dict[str, list[bool]]:
    """Return which blocks are to be changed, by the names of the layers."""
    places: list[int] = []
    counts: Counter[str] = Counter()
    for block in found:
        places.append(counts[block.group])
        counts[block.group] += 1
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
    given: Any = ("all", "last half") if wanted is None else wanted
    if isinstance(given, str):
        raise InputError(f"layers: got {given!r}, expected a list of names; write [{given!r}]")
    result: dict[str, list[bool]] = {}
    for name in given:
        if not isinstance(wanted, Mapping):
            check_choice("layers", name, LAYERS)
        acting = [one and can for one, can in zip(parts[name], able, strict=True)]
        if any(acting) and not (wanted is None and acting in result.values()):
            result[name] = acting
        elif wanted is not None:
            raise InputError(
                f"layers: got {name!r}, of which no layer can have a term, expected others than the first of each "
                "stack, whose values are v0"
            )
    return result


def _scores(task: Callable[[Any], Any], model: Any, count: int | None) -> tuple[Floats, float]:
    begin = perf_counter(), process_time()
    got = task(model)
    # Other programs of the machine lengthen the first, and several threads the second.
    took = max(min(perf_counter() - begin[0], process_time() - begin[1]), 1e-9)
    scores = np.asarray(check_array("task", got.detach().cpu() if hasattr(got, "detach") else got, ndim=1), float)
    if count is not None and len(scores) != count:
        raise InputError(f"task: got {len(scores)} scores after {count}, expected one for the same items at each call")
    return scores, took
