"""Probes of many inputs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import t as student
from torch import Tensor

from nlflow._array import Brief, underflowing
from nlflow.attention.injection.blocks import Adapter
from nlflow.attention.probing.columns import COLUMNS
from nlflow.attention.probing.groups import pooled
from nlflow.attention.probing.metrics import mean_cosine
from nlflow.attention.probing.probe import check_sequences, probe
from nlflow.attention.probing.recording import Take
from nlflow.attention.probing.trace import LayerTrace, as_frame
from nlflow.backends.progress import bar
from nlflow.errors import InputError, checked_call, warn_caller

Floats = NDArray[np.float64]
ONE_INPUT = (
    "inputs: got one input, of which isotropy, what all inputs have in common, and standard errors are not known "
    "(NaN); give several"
)
_LEVEL = 0.95  # of intervals
_ONE_WAY = 0.9  # isotropy from which inputs share a direction so much that it has no room to grow
_OF_INPUTS = tuple(one for one in COLUMNS if one.of in ("state", "layer"))
_OF_HEADS = tuple(one for one in COLUMNS if one.of == "heads")


@dataclass(frozen=True)
class Growth:
    """How alike the tokens of a stack become, and its inputs."""

    stack: str
    count: int  # of inputs whose tokens have a cosine
    cosine: tuple[float, float]  # of two tokens, before and after
    change: tuple[float, float, float]  # of it, with the interval of 95 % (Student's t); NaN where not known
    isotropy: tuple[float, float]  # cosine of the mean tokens of two inputs, before and after
    drift: tuple[float, float, float]  # of it, likewise
    steepest: tuple[int, float]  # the layer that moves the cosine most, and by how much

    @property
    def alike(self) -> bool | None:
        return True if self.change[1] > 0 else False if self.change[2] < 0 else None

    @property
    def verdict(self) -> str:
        if math.isnan(self.change[1]) or math.isnan(self.drift[1]):
            return "may over-smooth or not: to tell takes three inputs or more"
        if not self.alike:
            seen = "is not seen to over-smooth, since no growth of the cosine is seen"
            return seen if self.alike is None else "does not over-smooth, since tokens grow apart"
        if self.drift[1] > 0:
            return "makes tokens alike, and inputs too, which go one common way: that is not over-smoothing alone"
        if self.isotropy[1] > _ONE_WAY:
            return "makes tokens alike, but all inputs point one way already, which hides whether it over-smooths"
        return "over-smooths, since tokens grow alike and inputs are not seen to"

    def sentence(self) -> str:
        if math.isnan(self.cosine[1] - self.cosine[0]):
            return f"the {self.stack} has no cosine of two tokens: one token alone, or a layer that shows no states"
        told = f"the {self.stack} {self.verdict}; mean cosine of two tokens {_moved(self.cosine)}"
        if not math.isnan(self.change[1]):
            told += f" ({_interval(self.change)}), the largest step that way in layer {self.steepest[0]}"
        if not math.isnan(self.isotropy[1]):
            told += f"; of the mean tokens of two inputs (isotropy) {_moved(self.isotropy)}"
        return told if math.isnan(self.drift[1]) else f"{told} ({_interval(self.drift)})"


def _moved(ends: tuple[float, float]) -> str:
    return f"{ends[0]:.2f} before the first layer, {ends[1]:.2f} after the last"


def _interval(change: tuple[float, float, float]) -> str:
    return f"{change[0]:+.2g}, 95 % interval {change[1]:+.2g} to {change[2]:+.2g}"


def growth_of(stack: str, cosines: Sequence[Floats], before: Floats | None, after: Floats | None) -> Growth:
    step = np.array([mean_of(late - early)[0] for early, late in pairwise(cosines)])
    ends = mean_of(cosines[0])[0], mean_of(cosines[-1])[0]
    change = cosines[-1] - cosines[0]
    way = -1.0 if mean_of(change)[0] < 0 else 1.0
    layer = int(np.nan_to_num(way * step, nan=-np.inf).argmax())
    count = int((~np.isnan(change)).sum())
    isotropy, drift = (math.nan, math.nan), (math.nan, math.nan)
    if before is not None and after is not None:
        first, last = isotropy_of(before), isotropy_of(after)
        isotropy, drift = (first[0], last[0]), (last[0] - first[0], jackknife_error(last[1] - first[1]))
    of_change, of_drift = (
        _with_ends(*moved, number) for moved, number in ((mean_of(change), count), (drift, len(change)))
    )
    return Growth(stack, count, ends, of_change, isotropy, of_drift, (layer + 1, float(step[layer])))


def _with_ends(mean: float, error: float, count: int) -> tuple[float, float, float]:
    if count < 3:
        return mean, math.nan, math.nan
    half = float(student.ppf((1 + _LEVEL) / 2, count - 1)) * error
    return mean, mean - half, mean + half


@dataclass(frozen=True, eq=False, repr=False)
class SurveyedState(Brief):
    """One hidden state over all inputs: that before a stack, or that after a layer.

    Attributes
    ----------
    layer : str
        Name of the attention module, or ``'encoder input'``.
    index : int
        0 for the input of a stack.
    values : dict of str to array
        Columns of `LayerTrace.rows` that an input has one number of (``cosine``, ``share``), shape (n,).
    heads : dict of str to array
        Those that each head has one of (``J``, ``gradient``), shape (n, H); empty for the input of a stack.
    pooled : array of shape (n, D), or None
        The mean token of each input; None where the model does not show its states.
    """

    layer: str
    index: int
    values: dict[str, Floats]
    heads: dict[str, Floats]
    pooled: Floats | None

    def isotropy(self) -> tuple[float, float]:
        """Return the mean cosine of the pooled states of two inputs, and its jackknife error."""
        if self.pooled is None:
            return math.nan, math.nan
        mean, left = isotropy_of(self.pooled)
        return mean, jackknife_error(left)


@underflowing
@dataclass(frozen=True, eq=False, repr=False)
class Survey(Brief):
    """What the layers of a model did to many inputs.

    Attributes
    ----------
    model : str
        Name of the model's class.
    count : int
        Number n of inputs.
    states : tuple of SurveyedState
        For each stack its input, then its layers.
    """

    model: str
    count: int
    states: tuple[SurveyedState, ...]

    @checked_call
    def rows(self, *, by_head: bool = False) -> list[dict[str, Any]]:
        """Return one row for each state, or for each head.

        Parameters
        ----------
        by_head : bool
            A row for each head, with ``head``, ``J`` and ``gradient``, which are means over heads otherwise.

        Returns
        -------
        list of dict
            ``layer``, ``index``, ``inputs``, and for each quantity its mean and, with ``_se`` behind its name, the
            standard error s/sqrt(n) over the inputs that have it (NaN for fewer than two); not by head, also
            ``isotropy``.
        """
        result: list[dict[str, Any]] = []
        for state in self.states:
            row: dict[str, Any] = {"layer": state.layer, "index": state.index, "inputs": self.count}
            if by_head:
                for head in range(next(iter(state.heads.values())).shape[1] if state.heads else 0):
                    own: dict[str, Any] = {**row, "head": head}
                    for name, values in state.heads.items():
                        own[name], own[f"{name}_se"] = mean_of(values[:, head])
                    result.append(own)
                continue
            row["isotropy"], row["isotropy_se"] = state.isotropy()
            means = {name: _over_heads(values) for name, values in state.heads.items()}
            for name, values in {**state.values, **means}.items():
                row[name], row[f"{name}_se"] = mean_of(values)
            result.append(row)
        return result

    def growths(self) -> list[Growth]:
        """Return how much more alike tokens and inputs are after each stack."""
        return [
            growth_of(own[0].layer.removesuffix(" input"), [one.values["cosine"] for one in own],
                      own[0].pooled, own[-1].pooled) for own in self._stacks()
        ]  # fmt: skip

    def _stacks(self) -> list[tuple[SurveyedState, ...]]:
        begins = [number for number, state in enumerate(self.states) if state.index == 0]
        return [self.states[i:j] for i, j in zip(begins, [*begins[1:], None], strict=True)]

    def shifts(self, other: Survey) -> list[tuple[float, float, float]]:
        """Return for each stack how far another survey moved the cosine after the last layer.

        Parameters
        ----------
        other
            A `Survey` of the same inputs in the same order.

        Returns
        -------
        list of (float, float, float)
            The mean of the differences, and the ends of their interval of 95 % (NaN for fewer than three inputs).
        """
        if other.count != self.count or len(other.states) != len(self.states):
            raise InputError(
                f"other: got a survey of {other.count} inputs and {len(other.states)} states, expected the same inputs "
                f"and model, {self.count} and {len(self.states)}"
            )
        found = []
        for own, its in zip(self._stacks(), other._stacks(), strict=True):
            apart = its[-1].values["cosine"] - own[-1].values["cosine"]
            found.append(_with_ends(*mean_of(apart), int((~np.isnan(apart)).sum())))
        return found

    def findings(self) -> list[str]:
        """Return for each stack whether it over-smooths, in a sentence."""
        return [growth.sentence() for growth in self.growths()]

    @checked_call
    def to_pandas(self, *, by_head: bool = False) -> Any:
        """Return `rows` as a `pandas.DataFrame`."""
        return as_frame(self.rows(by_head=by_head))


def survey(
    model: Any,
    inputs: Iterable[Any],
    *,
    adapter: Adapter | Sequence[Adapter] | None = None,
    take: Take | None = None,
    progress: bool = False,
) -> Survey:
    """Probe a model on many inputs, and keep numbers of each layer and head for each input.

    Parameters
    ----------
    model : torch.nn.Module or pipeline
        As for `nlflow.attention.probe`.
    inputs : iterable
        Texts, pictures, or batches that `probe` takes, gone through once; each sequence of a batch is one input.
    adapter, take
        As for `probe`, which is called for each batch.
    progress : bool
        Progress bar on stderr.

    Raises
    ------
    InputError
        For one batch without a list, for none, for inputs that all have one token alone, for batches in which other
        layers ran than in the first, and for models whose layers run over other numbers of sequences.

    Warns
    -----
    NlflowWarning
        For one input alone, and for inputs of one token, which have no similarity (NaN).

    Examples
    --------
    >>> from transformers import BertConfig, BertModel
    >>> import torch
    >>> config = BertConfig(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32)
    >>> found = survey(BertModel(config), [torch.arange(5)[None] + i for i in range(4)])
    >>> found.count, [row["index"] for row in found.rows()]
    (4, [0, 1, 2])
    """
    check_several(inputs)
    parts: list[list[SurveyedState]] = []
    lonely: list[NDArray[np.bool_]] = []
    name = ""
    for batch in bar(inputs, desc="inputs", progress=progress, mininterval=1):
        alone = isinstance(batch, list | tuple) and len(batch) == 1  # of a TensorDataset
        trace = probe(model, batch[0] if alone else batch, adapter=adapter, take=take)
        name = trace.model
        check_sequences(name, (layer.items for layer in trace))
        parts.append(_states(trace))
        # Of each input whether it has one token in all stacks, and in some.
        each = np.stack([layer.tokens.sum(-1).cpu().numpy() < 2 for layer in trace])
        lonely.append(np.stack([each.all(axis=0), each.any(axis=0)]))
        layers = [[state.layer for state in part] for part in (parts[0], parts[-1])]
        if layers[0] != layers[1]:
            raise InputError(
                f"inputs: got batch {len(parts) - 1}, in which {', '.join(layers[1])} ran, expected {layers[0]}, as in "
                "the first; survey them apart"
            )
    if not parts:
        raise InputError("inputs: got no batch, expected at least one; a generator can be gone through once")
    _tell(np.concatenate(lonely, axis=1))
    return _survey(name, parts)


def check_several(inputs: Any) -> None:
    if isinstance(inputs, Mapping | Tensor | str) or not hasattr(inputs, "__iter__"):
        raise InputError(
            f"inputs: got {type(inputs).__name__}, expected a list or a DataLoader of what probe takes; call probe for "
            "one batch"
        )


def surveyed(trace: LayerTrace) -> Survey:
    return _survey(trace.model, [_states(trace)])


def _survey(name: str, parts: list[list[SurveyedState]]) -> Survey:
    states = tuple(_joined(several) for several in zip(*parts, strict=True))
    return Survey(name, len(states[0].values["cosine"]), states)


def _tell(alone: NDArray[np.bool_]) -> None:
    """Say which inputs have no similarity: of each whether it has one token in all stacks, and in some, (2, n)."""
    everywhere, somewhere = alone
    if everywhere.all():
        raise InputError(
            f"inputs: got {len(everywhere)} of one token, expected at least 2 tokens in some, since similarity is "
            "between tokens; give longer inputs"
        )
    if somewhere.any():
        warn_caller(
            f"inputs: {int(somewhere.sum())} of {len(somewhere)} have one token in a stack, where similarity is not "
            "known (NaN) and means leave it out; give longer inputs",
        )
    if len(somewhere) == 1:
        warn_caller(ONE_INPUT)


def _states(trace: LayerTrace) -> list[SurveyedState]:
    result: list[SurveyedState] = []
    begun: set[str] = set()
    for layer in trace:
        if layer.stack not in begun:
            begun.add(layer.stack)
            before = trace.states[layer.stack]
            values = {one.name: before.get(one.quantity, np.full(layer.items, np.nan)) for one in _OF_INPUTS}
            result.append(SurveyedState(f"{layer.stack} input", 0, values, {}, _pooled(layer.before, layer.tokens)))
        values, heads = (
            {one.name: layer.quantities[one.quantity] for one in columns} for columns in (_OF_INPUTS, _OF_HEADS)
        )
        mean = _pooled(layer.after, layer.tokens)
        result.append(SurveyedState(layer.name, result[-1].index + 1, values, heads, mean))
    return result


def _pooled(state: Tensor | None, tokens: Tensor) -> Floats | None:
    """Return the mean token (B, D) of each input, without padding."""
    if state is None or tuple(state.shape[:2]) != tuple(tokens.shape):
        return None
    return np.asarray(pooled(state.double(), tokens, "mean").cpu().numpy(), dtype=np.float64)


def _joined(several: Sequence[SurveyedState]) -> SurveyedState:
    first = several[0]
    values = {name: np.concatenate([one.values[name] for one in several]) for name in first.values}
    heads = {name: np.concatenate([one.heads[name] for one in several]) for name in first.heads}
    shown = [one.pooled for one in several if one.pooled is not None]
    means = np.concatenate(shown) if len(shown) == len(several) else None
    return SurveyedState(first.layer, first.index, values, heads, means)


def _over_heads(values: Floats) -> Floats:
    known = ~np.isnan(values)
    total = np.where(known, values, 0.0).sum(axis=1)
    return np.where(known.any(axis=1), total / np.maximum(known.sum(axis=1), 1), np.nan)


def isotropy_of(pooled: Floats) -> tuple[float, Floats]:
    """Return the mean cosine of two rows (n, D), and the same without each of them, (n,)."""
    count = len(pooled)
    if count < 2:
        return math.nan, np.full(count, math.nan)
    mean = float(mean_cosine(pooled))
    if count < 3:
        return mean, np.full(count, math.nan)
    lengths = np.linalg.norm(pooled, axis=1, keepdims=True)
    units = pooled / np.where(lengths > 0, lengths, 1.0)
    own = (units**2).sum(axis=1)
    # |S - u|^2 of the sum S without one input, less what its terms have with themselves.
    without = ((units.sum(axis=0) - units) ** 2).sum(axis=1) - (own.sum() - own)
    return mean, np.asarray(without / ((count - 1) * (count - 2)))


def jackknife_error(left: Floats) -> float:
    count = len(left)
    return float(np.sqrt((count - 1) / count * ((left - left.mean()) ** 2).sum()))


def mean_of(values: Floats) -> tuple[float, float]:
    numbers = values[~np.isnan(values)]
    if not numbers.size:
        return math.nan, math.nan
    mean = float(numbers.mean())
    if numbers.size < 2 or not math.isfinite(mean):
        return mean, math.nan
    return mean, float(numbers.std(ddof=1) / math.sqrt(numbers.size))
