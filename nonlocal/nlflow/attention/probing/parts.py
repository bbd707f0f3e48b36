"""What each part of a block changes: differences of a measure after each step of the block, which add up.

Attention adds ``sum_h P_h n W_h``, with the normed state n and W_h = W_V W_O, and what all tokens share. With the
identity for P, or the trace w_h of W_h over D for W, it would make

======== ======== ================================
P        W        state
======== ======== ================================
I        trace    ``normed`` x + sum_h w_h n
P        trace    ``mixed`` x + sum_h w_h P_h n
I        W        ``projected`` x + sum_h n W_h
P        W        ``attended`` x + sum_h P_h n W_h
======== ======== ================================

There are two ways from ``normed`` to ``attended``, and each part is the mean of both (the Shapley value of two
players).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nlflow.attention.injection.weights import UnknownError
from nlflow.attention.probing.branches import ATTENTION, CROSS, MLP, NORM, Seen, Step, equal
from nlflow.attention.probing.operators import Norm, Operator, Projected, norm_of, operator_of
from nlflow.attention.probing.points import Point, numbers_of, point_of, spread_over
from nlflow.attention.probing.trace import Layer
from nlflow.attention.probing.verdicts import stochastic
from nlflow.attention.probing.weights import Place, bias_of, matrices_of, without_padding

Floats = NDArray[np.float64]
Formula = dict[str, float]
"""A sum of measures at points: the weight of each point, by its name."""

PARTS = ("norms", "mixing", "projection", "attention", "cross-attention", "mlp", "unknown")
"""Norms; the averages P; W_V W_O with biases; attention as one where it cannot be split; and the rest."""

NULLS = ("weights", "keys", "random")
"""Weights: W_O, or the last matrix of the MLP, with its columns in random order and signs, and gains of norms in random
order; keys: those of other tokens; random: stochastic matrices of exponential variables, masked as P is."""

_CHUNK = 2**22  # bytes of attention matrices at a time
_TOGETHER = 2**22  # bytes of states that are measured in one go: many small ones cost their calls, large ones memory
_OFF, _ROUNDINGS = 1e-3, 8  # of the largest value: what comes to W_O is something else; units of half precision
_ROWS = 8  # of each head that are compared
_TINY = 1e-30
_ALL = (slice(None), slice(None))


class Few(NamedTuple):
    """The inputs with nulls."""

    numbers: NDArray[np.int_]
    rows: Tensor

    @classmethod
    def numbered(cls, numbers: list[int], device: torch.device) -> Few:
        return cls(np.array(numbers, dtype=np.int_), torch.tensor(numbers, dtype=torch.long, device=device))


@dataclass(eq=False)
class Course:
    """One block's points and parts."""

    tokens: Tensor
    points: dict[str, Point] = field(default_factory=dict)
    waiting: list[tuple[str, Tensor, Few | None]] = field(default_factory=list)
    parts: dict[str, Formula] = field(default_factory=dict)  # their sum is `after` less `before`
    orders: dict[str, Formula] = field(default_factory=dict)
    nulls: dict[str, dict[str, Formula]] = field(default_factory=dict)
    reason: str = ""  # why not all is known
    operator: Operator | None = None
    scale: float = 1.0
    contraction: dict[str, Floats] = field(default_factory=dict)  # (B, H): of P v over v, without their means

    @property
    def count(self) -> int:
        return len(self.points) + len(self.waiting)

    def at(self, name: str, state: Tensor, few: Few | None = None) -> str:
        self.waiting.append((name, state, few))
        if sum(each.nbytes for _, each, _ in self.waiting) >= _TOGETHER:
            self.measure()
        return name

    def measure(self) -> None:
        for whole in (True, False):
            own = [one for one in self.waiting if (one[2] is None) == whole]
            if not own:
                continue
            few, items = own[0][2], len(self.tokens)
            tokens = (self.tokens if few is None else self.tokens[few.rows]).expand(len(own), -1, -1).flatten(0, 1)
            found = point_of(torch.cat([state for _, state, _ in own]), tokens, ranked=whole)
            if few is not None:
                places = items * np.arange(len(own))[:, None] + few.numbers
                found = found.spread(places.ravel(), items * len(own))
            for number, (name, *_) in enumerate(own):
                self.points[name] = found.part(slice(number * items, (number + 1) * items))
        self.waiting.clear()

    def give(self, part: str, formula: Mapping[str, float], null: str = "", weight: float = 1.0) -> None:
        own = (self.nulls.setdefault(null, {}) if null else self.parts).setdefault(part, {})
        for name, value in formula.items():
            own[name] = own.get(name, 0.0) + weight * value


def course_of(
    one: Seen,
    layer: Layer | None,
    seen: Projected,
    tokens: Tensor,
    *,
    few: Few | None,
    generator: torch.Generator,
    before: Point | None = None,
) -> Course:
    course = Course(tokens)
    assert one.before is not None  # checked by the caller
    assert one.after is not None
    if before is None:
        course.at("before", one.before)
    else:
        course.points["before"] = before
    course.at("after", one.after)
    if not one.steps:
        course.reason = one.reason or "its steps are not known"
        course.give("unknown", {"after": 1.0, "before": -1.0})
        course.measure()
        return course
    _Walk(course, one, layer, seen, few, generator).go()
    course.measure()
    return course


class _Walk:
    """One way along the stream."""

    def __init__(
        self,
        course: Course,
        one: Seen,
        layer: Layer | None,
        seen: Projected,
        few: Few | None,
        generator: torch.Generator,
    ) -> None:
        self.course, self.one, self.layer, self.seen = course, one, layer, seen
        self.nulls, self.generator = few is not None, generator
        assert one.before is not None
        there = one.before.device
        self.few = Few.numbered([], there) if few is None else few._replace(rows=few.rows.to(there))
        self.state, self.name = one.before, "before"
        self.left = len(one.steps)

    def go(self) -> None:
        steps = list(self.one.steps)
        while steps:
            step = steps.pop(0)
            self.left = len(steps)
            if step.kind == NORM:
                self.norm(step)
                continue
            beside = []
            if step.kind == ATTENTION or step.beside:
                group = [step]
                while steps and (steps[0].beside or steps[0].kind == ATTENTION):
                    group.append(steps.pop(0))
                self.left = len(steps)
                found = [other for other in group if other.kind == ATTENTION]
                beside = [other for other in group if other.kind != ATTENTION]
                if len(found) == 1:
                    self.attention(found[0], beside)
                    continue
                for other in group[:-1]:
                    self.add(other)
                step = group[-1]
            self.add(step, last=not steps)

    def reached(self, state: Tensor, last: bool) -> tuple[str, Tensor]:
        """Return the name and the state of the next point; the last is what the layer returned."""
        if last:
            assert self.one.after is not None
            return "after", self.one.after
        return self.course.at(f"point {self.course.count}", state), state

    def add(self, step: Step, *, last: bool = False) -> None:
        name, state = self.reached(self.state + step.tensor, last)
        part = {ATTENTION: "attention", CROSS: "cross-attention", MLP: "mlp"}[step.kind]
        self.course.give(part, {name: 1.0, self.name: -1.0})
        self.null_of(part, step.tensor)
        self.state, self.name = state, name

    def null_of(self, part: str, added: Tensor) -> None:
        if self.nulls:
            null = self.null_at(self.state[self.few.rows], self.turned(added))
            self.course.give(part, {null: 1.0, self.name: -1.0}, "weights")

    def null_at(self, base: Tensor, added: Tensor) -> str:
        """Measure a state of the inputs that have nulls; both are of these alone."""
        return self.course.at(f"null {self.course.count}", base + added, self.few)

    def norm(self, step: Step) -> None:
        name, state = self.reached(step.tensor, not self.left)
        self.course.give("norms", {name: 1.0, self.name: -1.0})
        if self.nulls and (norm := self.known_norm(step.tensor)) is not None:
            order = torch.randperm(len(norm.gain), generator=self.generator).to(norm.gain.device)
            other = Norm(norm.gain[order], norm.shift[order], norm.centred, norm.epsilon)
            null = self.course.at(f"weights {self.course.count}", other(self.state[self.few.rows]), self.few)
            self.course.give("norms", {null: 1.0, self.name: -1.0}, "weights")
        self.state, self.name = state, name

    def known_norm(self, made: Tensor) -> Norm | None:
        for module, given, out in self.one.norms:
            if equal(out, made):
                try:
                    return norm_of(module, given, out)
                except UnknownError:
                    return None
        return None

    def turned(self, added: Tensor) -> Tensor:
        """Return an addition to the inputs that have nulls, its channels in random order and signs."""
        width = added.shape[-1]
        order = torch.randperm(width, generator=self.generator)
        signs = torch.randint(2, (width,), generator=self.generator) * 2 - 1
        few = added[self.few.rows]
        return few.index_select(-1, order.to(few.device)).mul_(signs.to(few))

    # ---- attention

    def attention(self, step: Step, beside: list[Step]) -> None:
        last = not self.left
        other = sum((one.tensor for one in beside), torch.zeros_like(self.state)) if beside else None
        try:
            corners: _Corners | None = _Corners(self, step.tensor)
        except UnknownError as error:
            corners, self.course.reason = None, str(error)
        if other is None:
            name, state = self.reached(self.state + step.tensor, last)
            self.split(corners, step.tensor, self.name, self.state, name, 1.0)
            self.state, self.name = state, name
            return
        both, state = self.reached(self.state + step.tensor + other, last)
        attended = self.course.at(f"point {self.course.count}", self.state + step.tensor)
        without = self.course.at(f"point {self.course.count}", self.state + other)
        self.split(corners, step.tensor, self.name, self.state, attended, 0.5)
        self.split(corners, step.tensor, without, self.state + other, both, 0.5)
        self.course.give("mlp", {without: 0.5, self.name: -0.5, both: 0.5, attended: -0.5})
        self.null_of("mlp", other)
        self.state, self.name = state, both

    def split(self, corners: _Corners | None, added: Tensor, start: str, base: Tensor, end: str, weight: float) -> None:
        """Share out the way from `start` to `end`, which attention has added."""
        course = self.course
        if corners is None:
            course.give("attention", {end: weight, start: -weight})
            if self.nulls:
                self.null_of("attention", added)
            return
        mark = course.count
        normed, mixed, projected = (
            course.at(f"{name} {mark}", base + tensor) for name, tensor in corners.tensors.items()
        )
        course.give("norms", {normed: weight, start: -weight})
        first, final = {mixed: 1.0, normed: -1.0}, {end: 1.0, projected: -1.0}
        course.give("mixing", first, weight=weight / 2)
        course.give("mixing", final, weight=weight / 2)
        course.give("projection", {projected: 1.0, normed: -1.0}, weight=weight / 2)
        course.give("projection", {end: 1.0, mixed: -1.0}, weight=weight / 2)
        for name, formula in (("mixing first", first), ("mixing last", final)):
            own = course.orders.setdefault(name, {})
            for point, value in formula.items():
                own[point] = own.get(point, 0.0) + weight * value
        if not self.nulls:
            return
        few = base[self.few.rows]
        for null, (averaged, whole) in corners.others.items():
            first = {self.null_at(few, averaged): 1.0, normed: -1.0}
            final = {self.null_at(few, whole): 1.0, projected: -1.0}
            course.give("mixing", first, null, weight / 2)
            course.give("mixing", final, null, weight / 2)
        for tensor, from_point in ((corners.tensors["projected"], normed), (added, mixed)):
            point = self.null_at(few, self.turned(tensor))
            course.give("projection", {point: 1.0, from_point: -1.0}, "weights", weight / 2)


class _Corners:
    """What attention would add with P or W set aside (`tensors`), and with the P of nulls (`others`)."""

    def __init__(self, walk: _Walk, added: Tensor) -> None:
        one, layer, state = walk.one, walk.layer, walk.state
        if layer is None:
            raise UnknownError("it sums by itself, and its queries, keys and values are not seen; pass take=")
        if layer.tokens.shape != state.shape[:2]:
            raise UnknownError("attention gets tokens in another arrangement than that of the state (windows)")
        operator = operator_of(one, one.taken, state, added, walk.seen)
        n = operator.normed(state)
        if layer.padded:
            n = n.masked_fill(~layer.tokens[..., None], 0.0)  # as it may be NaN there
        traces, v = operator.traces.to(n.dtype), without_padding(layer, _ALL, layer.v).to(n.dtype)
        null = _Moved.of(layer, n, walk.few.rows, walk.generator) if walk.nulls else None
        averaged, whole = _averages(layer, n, traces, walk.seen, null)
        course = walk.course
        course.operator = operator
        spread = _spread_of(v, layer.tokens)
        course.contraction = {"P": numbers_of(_spread_of(whole, layer.tokens) / spread)}
        if operator.norm is not None:
            course.scale = float((_length(n) / _length(state).clamp_min(_TINY))[layer.tokens].median())
        self.tensors = {"normed": traces.sum() * n, "mixed": averaged, "projected": operator.added(v)}
        self.others: dict[str, tuple[Tensor, Tensor]] = {}
        if null is not None:
            random = _random_averages(null, traces, operator.values.to(n.dtype), walk.generator)
            for name, (summed, averages) in {"keys": (null.averaged, null.whole), "random": random}.items():
                self.others[name] = summed, operator.added(averages)
                own = _spread_of(averages, layer.tokens[walk.few.rows]) / spread[walk.few.rows]
                course.contraction[name] = spread_over(numbers_of(own), walk.few.numbers, len(v))


def _length(x: Tensor) -> Tensor:
    found: Tensor = torch.linalg.vector_norm(x, dim=-1)
    return found


@dataclass(eq=False)
class _Moved:
    """The averages of some inputs with keys of other tokens.

    Where P hides no token that counts from another, they are those of values in another order, with the P that is
    there.
    """

    layer: Layer  # of these inputs
    rows: Tensor
    n: Tensor
    v: Tensor
    order: Tensor
    again: bool
    averaged: Tensor
    whole: Tensor

    @classmethod
    def of(cls, layer: Layer, n: Tensor, rows: Tensor, generator: torch.Generator) -> _Moved:
        few = layer.of(rows)
        n, v = n[rows], without_padding(few, _ALL, few.v).to(n.dtype)
        order = _shuffled(few.tokens, generator)
        return cls(few, rows, n, v, order, not _free(few), torch.empty_like(n), torch.empty_like(v))

    def take(self, place: Place, weights: Tensor) -> None:
        here, weights = self._here(place[0], weights)
        if len(weights):
            self.whole[here, place[1]] = weights @ _taken_in(self.v[here, place[1]], self.order[here])

    def take_sum(self, items: slice, summed: Tensor) -> None:
        here, summed = self._here(items, summed)
        if len(summed):
            self.averaged[here] = summed @ _taken_in(self.n[here], self.order[here])

    def _here(self, items: slice, matrices: Tensor) -> tuple[Tensor, Tensor]:
        """Return which of the rows are among these inputs, and their matrices."""
        here = (self.rows >= items.start) & (self.rows < items.stop)
        local = self.rows[here] - items.start
        return here, matrices if len(local) == len(matrices) else matrices[local]

    def compute(self, traces: Tensor) -> None:
        keys = _taken_in(without_padding(self.layer, _ALL, self.layer.k), self.order)
        for items, places in _places(self.layer):
            total = self.n.new_zeros(())
            for place in places:
                weights = matrices_of(self.layer, place, keys[place]).to(self.n.dtype)
                total = total + torch.einsum("h,bhij->bij", traces[place[1]], weights)
                self.whole[place] = weights @ self.v[place]
            self.averaged[items] = total @ self.n[items]


def _free(layer: Layer) -> bool:
    """Return whether each token sees all that count, without a bias."""
    if layer.mask is None:
        return True
    seen = layer.mask if layer.mask.dtype == torch.bool else layer.mask == 0
    return bool((seen | ~layer.tokens[:, None, None, :]).all())


def _averages(layer: Layer, n: Tensor, traces: Tensor, seen: Projected, null: _Moved | None) -> tuple[Tensor, Tensor]:
    """Return sum_h w_h P_h n, (B, N, D), and P_h v, (B, H, N, d); those of the null are put into it."""
    v = without_padding(layer, _ALL, layer.v).to(n.dtype)
    shown = _shown(seen, v)
    averaged, whole = torch.empty_like(n), torch.empty_like(v) if shown is None else shown.to(v.dtype)
    shared = None if null is None or null.again else null
    for items, places in _places(layer):
        summed = n.new_zeros(())
        for place in places:
            weights = matrices_of(layer, place).to(n.dtype)
            summed = summed + torch.einsum("h,bhij->bij", traces[place[1]], weights)
            if shown is None:
                whole[place] = weights @ v[place]
            else:
                _check(weights, v[place], shown[place], layer.tokens[items])
            if shared is not None:
                shared.take(place, weights)
        averaged[items] = summed @ n[items]
        if shared is not None:
            shared.take_sum(items, summed)
    if null is not None and null.again:
        null.compute(traces)
    return averaged, whole


def _places(layer: Layer) -> Iterator[tuple[slice, list[Place]]]:
    """Yield sequences, with their heads in parts whose matrices are in memory at a time."""
    items, heads, count, _ = layer.q.shape
    step = max(1, _CHUNK // (layer.q.element_size() * count**2))
    beside = max(1, step // heads)
    for first in range(0, items, beside):
        own = slice(first, first + beside)
        yield own, [(own, slice(low, low + step)) for low in range(0, heads, step)]


def _random_averages(null: _Moved, traces: Tensor, values: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return the same averages with random stochastic matrices; `values` is W_V (H, D, d)."""
    random = _random(null.layer, generator, null.n)
    if random.shape[1] > 1:
        return torch.einsum("h,bhij->bij", traces, random) @ null.n, random @ null.v
    summed = random[:, 0] @ null.n
    if random.shape[-1] <= null.n.shape[-1]:
        return traces.sum() * summed, random @ null.v
    # P (n W_V + b) = (P n) W_V + b, in O(N D^2)
    bias = null.v[:, :, :1] - null.n[:, None, :1] @ values
    heads, width, d = values.shape
    made = summed @ values.transpose(0, 1).reshape(width, heads * d)  # of all heads in one product
    return traces.sum() * summed, made.view(*made.shape[:2], heads, d).transpose(1, 2) + bias


def _shown(seen: Projected, v: Tensor) -> Tensor | None:
    """Return the averages (B, H, N, d) that came to W_O, in their own dtype; None where that was not seen."""
    given = seen.averaged
    if given is None:
        return None
    if given.numel() != v.numel():
        raise UnknownError("what comes to W_O has another shape than the averages of all heads")
    items, heads, count, width = v.shape
    return given.reshape(items, count, heads, width).transpose(1, 2)


def _check(weights: Tensor, v: Tensor, shown: Tensor, tokens: Tensor) -> None:
    """Refuse what comes to W_O where that is not the averages, head after head, by a few rows."""
    rows = torch.linspace(0, v.shape[-2] - 1, min(_ROWS, v.shape[-2]), device=v.device).long()
    off = (weights[..., rows, :] @ v - shown[..., rows, :]).abs().masked_fill(~tokens[:, None, rows, None], 0.0)
    unit = torch.finfo(shown.dtype).eps
    if float(off.max()) > max(_OFF, _ROUNDINGS * unit) * float(v.abs().max()):
        coarse = f", or {shown.dtype} is too coarse for them; try model.float()" if unit > _OFF / _ROUNDINGS else ""
        raise UnknownError(
            "what comes to W_O is not the averages, head after head (a gate, a norm or another term is between)"
            + coarse
        )


def _shuffled(tokens: Tensor, generator: torch.Generator) -> Tensor:
    """Return a random order of the tokens (B, N) that count; the others stay."""
    count = tokens.shape[1]
    order = torch.arange(count).repeat(len(tokens), 1)
    for row, inside in zip(order, tokens.cpu(), strict=True):
        places = inside.nonzero()[:, 0]
        row[places] = places[torch.randperm(len(places), generator=generator)]
    return order.to(tokens.device)


def _taken_in(x: Tensor, order: Tensor) -> Tensor:
    """Return tokens (B, ..., N, d) in another order (B, N)."""
    shape = (len(order), *(1,) * (x.ndim - 3), order.shape[1], 1)
    return x.gather(-2, order.view(shape).expand(x.shape))


def _random(layer: Layer, generator: torch.Generator, like: Tensor) -> Tensor:
    """Return random stochastic matrices (B or 1, H or 1, N, N), seen as P is seen."""
    count = layer.q.shape[-2]
    drawn = torch.rand(count, count, generator=generator).clamp_min(_TINY).log().neg().to(like)[None, None]
    visible, every = None, not layer.padded
    if layer.mask is not None or not every:
        narrow = (slice(0, 1 if every and layer.mask is not None and len(layer.mask) == 1 else None), slice(0, 1))
        if layer.mask is not None and layer.mask.shape[1] > 1:
            narrow = (narrow[0], slice(None))
        bias = bias_of(layer, narrow)
        assert bias is not None
        visible = bias > -torch.inf
    made: Tensor = stochastic(drawn, visible)
    return made


def _spread_of(x: Tensor, tokens: Tensor) -> Tensor:
    """Return the length (B, H) of what tells values (B, H, N, d) apart, over the tokens that count."""
    if bool(tokens.all()):
        return _whole(x - x.mean(-2, keepdim=True))
    counted = tokens[:, None, :, None].to(x.dtype)
    mean = (x * counted).sum(-2, keepdim=True) / counted.sum(-2, keepdim=True)
    return _whole((x - mean) * counted)


def _whole(x: Tensor) -> Tensor:
    found: Tensor = torch.linalg.vector_norm(_length(x), dim=-1, dtype=torch.float64)
    return found
