"""Why tokens grow alike."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from nlflow._array import Brief
from nlflow.attention.injection.blocks import Adapter, blocks, network_of
from nlflow.attention.injection.everyday import inputs_of
from nlflow.attention.probing.branches import Seen, watching
from nlflow.attention.probing.findings import findings
from nlflow.attention.probing.groups import Choice, chosen, token_groups
from nlflow.attention.probing.operators import Projected, projecting
from nlflow.attention.probing.parts import NULLS, PARTS, Course, Few, Formula, course_of
from nlflow.attention.probing.points import Point, joined
from nlflow.attention.probing.probe import (
    beside_pooling,
    call_of,
    check_finite,
    check_sequences,
    layer_of,
    placed,
    tokens_of,
)
from nlflow.attention.probing.recording import Take, recording, taking
from nlflow.attention.probing.spectra import LayerSpectrum, Maps, Products, spectrum_of
from nlflow.attention.probing.survey import ONE_INPUT, isotropy_of, jackknife_error, mean_of
from nlflow.attention.probing.trace import as_frame
from nlflow.attention.terms.neutreno import wide
from nlflow.attention.threads import evaluating, using
from nlflow.backends.progress import bar
from nlflow.errors import InputError, check_generator, check_seed, checked_call, warn_caller

Floats = NDArray[np.float64]

_EVERY = 4  # of how many inputs one has nulls
_DRAWS = 2  # of nulls at the least, where there are so many inputs: one draw has no error

MEASURES = ("cosine", "t_sim", "rank", "centred", "isotropy")
"""Of tokens: mean cosine, share of the mean token, participation rank, and that share without what all inputs have in
common; of inputs: the mean cosine of their mean tokens."""


@dataclass(frozen=True, eq=False, repr=False)
class CausedBlock(Brief):
    """What one block changed over all inputs, part by part.

    Attributes
    ----------
    name : str
        Of the attention module, with the number of the call where a block is called several times.
    stack : str
        ``'encoder'`` or ``'decoder'``.
    index : int
        Number of the block in its stack, from 1.
    points : dict of str to Point
        Measures at the points of the stream, ``before`` and ``after`` among them.
    parts : dict of str to dict
        What each part changed, as weights of points; see `nlflow.attention.probing.parts`.
    orders : dict of str to dict
        ``mixing first`` and ``mixing last``, whose mean is the part ``mixing``.
    nulls : dict of str to dict of str to dict
        The same parts under ``weights``, ``keys`` and ``random``.
    contraction : dict of str to array of shape (n, H)
        How much of what differs between the values of two tokens is left after the averages: with ``P``, and with the
        nulls ``keys`` and ``random``.
    groups : dict of str to dict of str to array of shape (n,)
        For each group of tokens ``count``, ``length`` (mean of the tokens), ``cosine`` and ``t_sim`` after the block,
        and ``to_others``, the cosine of its mean token and that of the ordinary ones; empty where there is one group.
    channels : array of shape (2, n, D)
        Sum of squares of each channel before and after the block, over the tokens that count.
    reason : str
        Why the parts of attention are not told apart; empty where they are.
    maps : optional
        W_V and W_O, and the attention on the first input.
    """

    name: str
    stack: str
    index: int
    points: dict[str, Point]
    parts: dict[str, Formula]
    orders: dict[str, Formula]
    nulls: dict[str, dict[str, Formula]]
    contraction: dict[str, Floats]
    groups: dict[str, dict[str, Floats]]
    channels: Floats
    reason: str
    maps: Maps | None = None

    def measured(self, formula: Mapping[str, float], measure: str) -> tuple[float, float]:
        """Return a sum of a measure at points: its mean over inputs and standard error (NaN for fewer than two)."""
        if measure == "isotropy":
            known = self._known(formula)
            whole = {name: isotropy_of(self.points[name].pooled[known]) for name in formula}
            mean = sum(weight * whole[name][0] for name, weight in formula.items())
            left = sum(weight * whole[name][1] for name, weight in formula.items())
            return float(mean), jackknife_error(np.asarray(left))
        return mean_of(self.of_inputs(formula, measure))

    def of_inputs(self, formula: Mapping[str, float], measure: str) -> Floats:
        """Return a sum of a measure at points for each input, shape (n,); not of ``isotropy``, which is of pairs."""
        known = self._known(formula)
        found = np.full(len(known), np.nan)
        found[known] = 0.0
        for name, weight in formula.items():
            point = self.points[name].part(known)
            found[known] += weight * (_centred(point) if measure == "centred" else point.values[measure])
        return found

    def _known(self, formula: Mapping[str, float]) -> NDArray[np.bool_]:
        """Return which inputs have all points of a formula: nulls are of some inputs."""
        return np.asarray(np.all([np.isfinite(self.points[name].energy) for name in formula], axis=0))

    def change(self, measure: str) -> tuple[float, float]:
        """Return how far a measure moved, and the standard error."""
        return self.measured({"after": 1.0, "before": -1.0}, measure)

    def part(self, part: str, measure: str, null: str = "") -> tuple[float, float]:
        """Return what a part changed, or would under a null, and the standard error; NaN where not known."""
        found = (self.nulls.get(null, {}) if null else self.parts).get(part)
        return (math.nan, math.nan) if found is None else self.measured(found, measure)

    def outliers(self, *, times: float = 6.0) -> list[tuple[int, float]]:
        """Return (channel, share of the squared length) where the root mean square is over `times` the median."""
        square = self.channels[1].sum(0)
        beyond = np.flatnonzero(square > times**2 * np.median(square))
        order = beyond[np.argsort(-square[beyond], kind="stable")]
        return [(int(channel), float(square[channel] / square.sum())) for channel in order]

    def similarity_without(self, channels: Sequence[int]) -> tuple[float, float]:
        """Return t_sim after the block without some channels, and the standard error."""
        kept = np.setdiff1d(np.arange(self.channels.shape[2]), channels)
        point = self.points["after"]
        rest = self.channels[1][:, kept].sum(1)
        with np.errstate(invalid="ignore", divide="ignore"):
            return mean_of(point.count * (point.pooled[:, kept] ** 2).sum(1) / rest)


@dataclass(frozen=True, eq=False, repr=False)
class Cause(Brief):
    """Why tokens grow alike in a model, as `nlflow.attention.explain` finds it.

    Attributes
    ----------
    model : str
        Name of the model's class.
    count : int
        Number n of inputs.
    tokens : str
        Which tokens count.
    blocks : tuple of CausedBlock
    """

    model: str
    count: int
    tokens: str
    blocks: tuple[CausedBlock, ...]

    def rows(self, measure: str = "") -> list[dict[str, Any]]:
        """Return one row for each block and measure.

        Parameters
        ----------
        measure : str
            One of `MEASURES`; by default all.

        Returns
        -------
        list of dict
            ``layer``, ``index``, ``measure``, ``before``, ``after``, ``change``; the parts (``norms``, ``mixing``,
            ``projection``, ``attention``, ``cross-attention``, ``mlp``, ``unknown``), which add up to ``change``;
            ``mixing first`` and ``mixing last``; the parts under nulls (``mixing, keys``); with ``_se`` behind a name,
            its standard error over inputs.
        """
        if measure and measure not in MEASURES:
            raise InputError(f"measure: got {measure!r}, expected one of {', '.join(map(repr, MEASURES))}")
        parts = [name for name in PARTS if any(name in block.parts for block in self.blocks)]
        nulls = [
            (part, null) for part in PARTS for null in NULLS
            if any(part in block.nulls.get(null, {}) for block in self.blocks)
        ]  # fmt: skip
        orders = [name for name in ("mixing first", "mixing last") if any(name in one.orders for one in self.blocks)]
        result: list[dict[str, Any]] = []
        for block in self.blocks:
            for name in (measure,) if measure else MEASURES:
                row: dict[str, Any] = {"layer": block.name, "index": block.index, "measure": name}
                found = {"before": block.measured({"before": 1.0}, name), "after": block.measured({"after": 1.0}, name)}
                found["change"] = block.change(name)
                # A part that a block does not have changes nothing in it.
                found |= {part: block.part(part, name) if part in block.parts else (0.0, 0.0) for part in parts}
                absent = math.nan, math.nan
                found |= {
                    order: block.measured(block.orders[order], name) if order in block.orders else absent
                    for order in orders
                }  # fmt: skip
                found |= {f"{part}, {null}": block.part(part, name, null) for part, null in nulls}
                for key, (mean, error) in found.items():
                    row[key], row[f"{key}_se"] = mean, error
                result.append(row)
        return result

    def group_rows(self) -> list[dict[str, Any]]:
        """Return number, length and similarity for each block and kind of token."""
        result: list[dict[str, Any]] = []
        for block in self.blocks:
            for name, values in block.groups.items():
                row: dict[str, Any] = {"layer": block.name, "index": block.index, "group": name}
                for key, each in values.items():
                    row[key], row[f"{key}_se"] = mean_of(each)
                result.append(row)
        return result

    def outlier_rows(self) -> list[dict[str, Any]]:
        """Return for each block its outlier channels with their share, and t_sim with and without them."""
        result: list[dict[str, Any]] = []
        for block in self.blocks:
            found = block.outliers()
            channels = [channel for channel, _ in found]
            row: dict[str, Any] = {
                "layer": block.name, "index": block.index, "channels": " ".join(map(str, channels)),
                "share": sum(share for _, share in found),
            }  # fmt: skip
            row["t_sim"], row["t_sim_se"] = block.measured({"after": 1.0}, "t_sim")
            row["without"], row["without_se"] = block.similarity_without(channels)
            result.append(row)
        return result

    def spectra(self, *, rng: Any = 0, progress: bool = False) -> list[LayerSpectrum]:
        """Return the spectra of W_V W_O and of P, on the first input, of blocks whose maps are known.

        O(H (N^3 + d^3) + D^3) time for each block, beside the ruling of its heads.

        Parameters
        ----------
        rng : numpy.random.Generator or seed
            Of the nulls.
        progress : bool
            Progress bar on stderr.
        """
        generator = check_generator(rng)
        known = [(block.name, block.maps) for block in self.blocks if block.maps is not None]
        shown = bar(known, desc="spectra", progress=progress, mininterval=1)
        products: Products = {}
        return [spectrum_of(name, maps, generator, products) for name, maps in shown]

    def findings(self, spectra: Sequence[LayerSpectrum] | None = None) -> list[str]:
        """Return sentences about the model, also about `spectra` where they are given."""
        return findings(self, spectra)

    def to_pandas(self, measure: str = "") -> Any:
        """Return `rows` as a `pandas.DataFrame`."""
        return as_frame(self.rows(measure))


@checked_call
def explain(
    model: Any,
    inputs: Any,
    *,
    tokens: Choice = "all",
    nulls: bool = True,
    rng: int = 0,
    adapter: Adapter | Sequence[Adapter] | None = None,
    take: Take | None = None,
    progress: bool = False,
) -> Cause:
    """Measure what each part of each block changes in how alike tokens are, beside nulls.

    Parameters
    ----------
    model : torch.nn.Module or pipeline
        As for `nlflow.attention.probe`.
    inputs : mapping, tensor, str or iterable
        A batch that `probe` takes, or several. Each sequence is one input; padding does not count.
    tokens : str, tensor, mapping or callable
        Which tokens count: ``'all'``, ``'ordinary'``, ``'class'``, ``'distillation'``, ``'register'``, ``'patch'``,
        ``'special'``, a boolean mask (B, N), one of these for each stack (``{'encoder': 'patch'}``), or a function of a
        batch that returns one.
    nulls : bool
        Also what parts would change with weights in random order and signs, keys of other tokens, and random stochastic
        matrices; for the first two inputs and each fourth, without the rank (NaN).
    rng : int
        Seed of the nulls.
    adapter, take
        As for `probe`.
    progress : bool
        Progress bar on stderr.

    Raises
    ------
    InputError
        For inputs of which fewer than two tokens count, groups that a model lacks, batches in which other layers ran
        than in the first, and models whose layers show no states or run over other numbers of sequences.

    Warns
    -----
    NlflowWarning
        For one input, and for blocks whose parts of attention cannot be told apart.

    Notes
    -----
    The parts (`nlflow.attention.probing.parts`) add up to the change over the block, to rounding, and take O(N^2 D) for
    each block beside a plain run, and O(N D min(N, D)) for the rank of each point.

    Examples
    --------
    >>> from transformers import BertConfig, BertModel
    >>> import torch
    >>> config = BertConfig(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32)
    >>> found = explain(BertModel(config), [torch.arange(5)[None] + i for i in range(4)])
    >>> row = found.rows("cosine")[0]
    >>> parts = row["norms"] + row["mixing"] + row["projection"] + row["mlp"]
    >>> bool(abs(parts - row["change"]) < 1e-12)
    True
    """
    seed = check_seed("rng", rng)
    several: Iterable[Any] = [inputs] if isinstance(inputs, Mapping | Tensor | str) else inputs
    if not hasattr(several, "__iter__"):
        raise InputError(
            f"inputs: got {type(inputs).__name__}, expected what probe takes, or a list or a DataLoader of it"
        )
    generator = torch.Generator().manual_seed(seed)
    network = network_of(model)
    network = getattr(network, "_orig_mod", network)
    parts: list[list[CausedBlock]] = []
    for batch in bar(several, desc="inputs", progress=progress, mininterval=1):
        alone = isinstance(batch, list | tuple) and len(batch) == 1  # of a TensorDataset
        given = inputs_of(model, batch[0] if alone else batch)
        with torch.no_grad():
            run = _run(network, given, adapter, take)
            few = _few(run, sum(part[0].points["before"].count.size for part in parts)) if nulls else None
            parts.append(_blocks(network, given, run, tokens, few, generator, not parts))
        layers = [[block.name for block in part] for part in (parts[0], parts[-1])]
        if layers[0] != layers[1]:
            raise InputError(
                f"inputs: got batch {len(parts) - 1}, in which {', '.join(layers[1])} ran, expected {layers[0]}, as in "
                "the first; explain them apart"
            )
    if not parts:
        raise InputError("inputs: got no batch, expected at least one; a generator can be gone through once")
    found = tuple(_joined(each) for each in zip(*parts, strict=True))
    count = len(found[0].points["before"].count)
    _tell(found, count)
    name = tokens if isinstance(tokens, str) else "chosen"
    return Cause(type(network).__name__, count, name, found)


def _tell(found: Sequence[CausedBlock], count: int) -> None:
    if count == 1:
        warn_caller(ONE_INPUT)
    for reason in dict.fromkeys(block.reason for block in found if block.reason):
        names = [block.name for block in found if block.reason == reason]
        warn_caller(
            f"model: the parts of attention are not told apart in {len(names)} of {len(found)} blocks, first "
            f"{names[0]}: {reason}",
        )


# ---- one batch

_Run = list[tuple[Seen, Projected]]


def _run(model: nn.Module, batch: Any, adapter: Any, take: Take | None) -> _Run:
    """Run the model once, and return what was seen of each call of a block."""
    watched = [Seen(block) for block in blocks(model, adapter)]
    given = call_of(model, _without_marks(batch))
    # What comes to W_O is compared with the averages where they are split, and elsewhere they are not used.
    taken = recording(watched, compared=False) if take is None else taking(watched, take)
    with using(model, "looks into it"), evaluating(model), ExitStack() as stack:
        stack.enter_context(watching(watched, calls=True))
        stack.enter_context(taken)
        projected = stack.enter_context(projecting(watched))
        given()
    found: _Run = []
    for last in watched:
        calls = [one for one in (*last.earlier, last) if one.attended or one.taken is not None]
        shown = projected[id(last.block.module)]
        found += zip(calls, shown if len(shown) == len(calls) else [Projected()] * len(calls), strict=True)
    if not found:
        raise InputError(
            f"inputs: got a call of {type(model).__name__} in which no self-attention ran; expected inputs that need it"
        )
    kept = beside_pooling([one for one, _ in found])
    return [each for each in found if each[0] in kept]


def _without_marks(batch: Any) -> Any:
    """Return a batch without the mask of special tokens, which models do not take."""
    if isinstance(batch, Mapping) and "special_tokens_mask" in batch:
        return {name: value for name, value in batch.items() if name != "special_tokens_mask"}
    return batch


def _few(run: _Run, before: int) -> Few:
    """Return which inputs of a batch have nulls, with `before` inputs before them."""
    state = run[0][0].before
    if state is None:
        return Few.numbered([], torch.device("cpu"))
    numbers = range(before, before + len(state))
    drawn = [one - before for one in numbers if one < _DRAWS or one % _EVERY == 0]
    return Few.numbered(drawn, state.device)


def _blocks(
    model: nn.Module,
    batch: Any,
    run: _Run,
    choice: Choice,
    few: Few | None,
    generator: torch.Generator,
    first: bool,
) -> list[CausedBlock]:
    check_sequences(type(model).__name__, (len(one.before) for one, _ in run if one.before is not None))
    several, batch = len({one.block.stack for one, _ in run}) > 1, placed(model, batch)
    result: list[CausedBlock] = []
    numbers: dict[str, int] = {}
    known: dict[str, tuple[Tensor, dict[str, Tensor]]] = {}  # of each stack: tokens, and their groups
    ends: dict[str, tuple[Tensor, Tensor, CausedBlock]] = {}  # of each stack: state, tokens, and what was measured
    for one, projected in run:
        stack = one.block.stack
        numbers[stack] = numbers.get(stack, 0) + 1
        if one.before is None or one.after is None or one.before.shape != one.after.shape:
            shows = "no states" if one.before is None or one.after is None else "states of another shape than it takes"
            raise InputError(
                f"model: got {one.name} in {type(one.block.layer).__name__}, which shows {shows}; expected a layer "
                "that takes hidden states (B, N, D) and returns them, as one module around attention, what is added to "
                "it and the MLP; where a model has none (windows, x-transformers), take probe and attach"
            )
        layer = None if one.taken is None else layer_of(one, batch, several=several)
        if layer is not None and layer.tokens.shape == one.before.shape[:2]:
            inside = layer.tokens
        else:
            inside = tokens_of(one.before[:, None], None, batch, stack if several else "")
        if stack not in known or not torch.equal(known[stack][0], inside):
            known[stack] = inside, token_groups(model, batch, stack, inside)
        groups = known[stack][1]
        counted = chosen(choice, batch, stack, groups)
        last = None  # whose state is the one before this block, so it is measured once
        if stack in ends and torch.equal(ends[stack][0], one.before) and torch.equal(ends[stack][1], counted):
            last = ends[stack][2]
        check_finite(one.name, (one.before, one.after) if last is None else (one.after,), counted)
        course = course_of(
            one, layer, projected, counted, few=few, generator=generator,
            before=None if last is None else last.points["after"],
        )  # fmt: skip
        maps = None
        if first and layer is not None and course.operator is not None:
            maps = Maps(course.operator, layer.of(layer.tokens.new_zeros(1, dtype=torch.long)), course.scale)
        result.append(_block(one, stack, numbers[stack], course, groups, counted, maps, last))
        ends[stack] = one.after, counted, result[-1]
    return result


def _block(
    one: Seen, stack: str, index: int, course: Course, groups: Mapping[str, Tensor], counted: Tensor,
    maps: Maps | None, last: CausedBlock | None,
) -> CausedBlock:  # fmt: skip
    assert one.before is not None
    assert one.after is not None
    before = _squares(one.before, counted) if last is None else last.channels[1]
    channels = [before, _squares(one.after, counted)]
    return CausedBlock(
        one.name, stack, index, course.points, course.parts, course.orders, course.nulls, course.contraction,
        _groups(one.after, groups), np.stack(channels), course.reason, maps,
    )  # fmt: skip


def _squares(state: Tensor, tokens: Tensor) -> Floats:
    """Return the sum of squares of each channel, (B, D)."""
    return np.asarray((wide(state) * tokens[..., None]).square_().sum(1, dtype=torch.float64).cpu().numpy())


def _groups(state: Tensor, groups: Mapping[str, Tensor]) -> dict[str, dict[str, Floats]]:
    if len(groups) < 3:  # all are ordinary
        return {}
    names = [
        name for name, members in groups.items()
        if name == "ordinary" or (name not in ("all", "patch") and bool(members.any()))
    ]  # fmt: skip
    # Sums over the tokens of each group are products with the state, (B, G, N) @ (B, N, D).
    inside = torch.stack([groups[name] for name in names], 1)
    state = wide(state.masked_fill(~inside.any(1)[..., None], 0.0))  # what counts nowhere may be anything
    length = torch.linalg.vector_norm(state, dim=-1, dtype=torch.float64)
    some = inside & (length > 0)[:, None]
    units = torch.where(some, 1 / torch.where(length > 0, length, 1.0)[:, None], 0.0)
    sums, directions = (torch.cat([inside, units], 1).to(state.dtype) @ state).double().chunk(2, 1)
    count, ordinary = inside.double().sum(-1), sums[:, [names.index("ordinary")]]
    long, square = sums.norm(dim=-1), (inside * length.square()[:, None]).sum(-1)
    measured = torch.stack([
        count, (inside * length[:, None]).sum(-1) / count,
        (sums * ordinary).sum(-1) / (long * ordinary.norm(dim=-1)),
        (directions.square().sum(-1) - some.sum(-1)) / (count * (count - 1)), long.square() / (count * square),
    ]).cpu().numpy()  # fmt: skip
    measured[3:][~np.isfinite(measured[3:])] = np.nan
    keys = ("count", "length", "to_others", "cosine", "t_sim")
    return {
        name: dict(zip(keys, measured[:, :, number], strict=True))
        for number, name in enumerate(names) if measured[0, :, number].any()
    }  # fmt: skip


def _joined(several: Sequence[CausedBlock]) -> CausedBlock:
    first = several[0]
    if len(several) == 1:
        return first
    reasons = [block.reason for block in several if block.reason]
    groups = {
        name: {key: np.concatenate([block.groups[name][key] for block in several if name in block.groups])
               for key in first.groups[name]} for name in first.groups
    }  # fmt: skip
    return CausedBlock(
        first.name, first.stack, first.index,
        {name: joined(block.points[name] for block in several) for name in first.points},
        first.parts, first.orders, first.nulls,
        {name: np.concatenate([block.contraction[name] for block in several]) for name in first.contraction},
        groups, np.concatenate([block.channels for block in several], axis=1), reasons[0] if reasons else "",
        first.maps,
    )  # fmt: skip


# ---- measures of all inputs together


def _centred(point: Point) -> Floats:
    """Return t_sim of each input when the mean of all tokens of all inputs is taken away first; NaN of one input."""
    if len(point.count) < 2:
        return np.full(len(point.count), np.nan)
    common = point.count @ point.pooled / point.count.sum()
    mean = ((point.pooled - common) ** 2).sum(1)
    rest = point.energy + point.count * ((common**2).sum() - 2 * point.pooled @ common)
    return np.asarray(point.count * mean / rest)
