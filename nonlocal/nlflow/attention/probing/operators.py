"""Maps around attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from nlflow.attention.injection.blocks import TORCH
from nlflow.attention.injection.weights import UnknownError, columns_of, weight_of
from nlflow.attention.probing.branches import Seen, equal, own, state_of
from nlflow.attention.terms.neutreno import wide

_ROWS = 16  # tokens by which norms are compared
_OFF, _ROUNDINGS = 1e-4, 4  # of the largest number: beyond rounding in float32; units of half precision
_EPS = ("eps", "variance_epsilon", "epsilon", "norm_eps")


@dataclass(frozen=True, eq=False)
class Norm:
    """A norm as it acts on a state: gain * (x - its mean, where it is `centred`) / its length + shift."""

    gain: Tensor
    shift: Tensor
    centred: bool
    epsilon: float

    def normed(self, x: Tensor) -> Tensor:
        x = wide(x)
        x = x - x.mean(-1, keepdim=True) if self.centred else x
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.epsilon)

    def __call__(self, x: Tensor) -> Tensor:
        """Return what the norm gives for tokens (..., D)."""
        return self.normed(x) * self.gain + self.shift


@dataclass(frozen=True, eq=False)
class Operator:
    """W_V and W_O of one block: attention adds ``sum_h P_h n(x) values[h] @ output[h]``, and what all tokens share."""

    values: Tensor  # (H, D, d): W_V, with gain and centring of the norm before
    output: Tensor  # (H, d, D): W_O, with what scales channels after it (LayerScale, the gain of a norm)
    norm: Norm | None  # before attention
    tail: Callable[[Tensor], Tensor]  # after the output projection
    weight: Tensor
    bias: Tensor | None

    @property
    def inner(self) -> Tensor:
        """output[h] @ values[h], (H, d, d), with the eigenvalues of W_V W_O other than 0."""
        return self.output @ self.values

    @property
    def traces(self) -> Tensor:
        return (self.output * self.values.mT).sum((-2, -1)) / self.values.shape[1]

    def added(self, averages: Tensor) -> Tensor:
        merged = averages.transpose(1, 2).flatten(2)
        made = merged @ self.weight.to(merged.dtype)
        return self.tail(made if self.bias is None else made + self.bias)

    def normed(self, x: Tensor) -> Tensor:
        return wide(x) if self.norm is None else self.norm.normed(x)


@dataclass(eq=False)
class Projected:
    """Projections of one call."""

    entered: Tensor | None = None
    made: Tensor | None = None
    averaged: Tensor | None = None
    output: Tensor | None = None


@contextmanager
def projecting(found: Sequence[Seen]) -> Iterator[dict[int, list[Projected]]]:
    kept: dict[int, list[Projected]] = {id(one.block.module): [] for one in found}

    def begin(calls: list[Projected], turned: bool, module: nn.Module, args: Any, kwargs: Any) -> None:
        state = state_of((*args, kwargs.get("hidden_states"), kwargs.get("query")))
        calls.append(Projected(entered=state.transpose(0, 1) if turned and state is not None else state))

    def made(calls: list[Projected], module: nn.Module, args: Any, output: Any) -> None:
        if calls and isinstance(output, Tensor) and args:
            calls[-1].entered, calls[-1].made = args[0], output

    def gave_all(calls: list[Projected], turned: bool, module: nn.Module, args: Any, output: Any) -> None:
        made = output[0] if isinstance(output, tuple) else output
        calls[-1].output = made.transpose(0, 1) if turned and made.ndim == 3 else made

    def gave(calls: list[Projected], module: nn.Module, args: Any, output: Any) -> None:
        if calls and isinstance(output, Tensor) and args:
            calls[-1].averaged, calls[-1].output = args[0], output

    with ExitStack() as stack:
        for one in found:
            block, calls = one.block, kept[id(one.block.module)]
            turned = block.tokens_first
            before = block.module.register_forward_pre_hook(own(partial(begin, calls, turned)), with_kwargs=True)
            stack.callback(before.remove)
            for module, hook in ((block.values, made), (block.projection, gave)):
                if module is not None:
                    stack.callback(module.register_forward_hook(own(partial(hook, calls))).remove)
            if block.kind == TORCH:  # its output projection does not run as a module
                stack.callback(block.module.register_forward_hook(own(partial(gave_all, calls, turned))).remove)
        yield kept


def operator_of(one: Seen, taken: Any, state: Tensor, added: Tensor, seen: Projected) -> Operator:
    """Return the maps of a block from what a call showed and `added` to `state`; `UnknownError` where not known."""
    weight, bias = _output(one)
    values = _values(one, taken, seen)
    if seen.entered is None or seen.entered.shape != state.shape:
        raise UnknownError("attention gets tokens in another arrangement than that of the state")
    norm = _norm_before(one, seen.entered, state)
    heads, d = taken.q.shape[1], taken.v.shape[-1]
    if len(weight) != heads * d:
        raise UnknownError(
            f"W_O takes {len(weight)} features, expected {heads} heads of {d}: there is no W_O in one matrix"
        )
    if seen.output is None:
        raise UnknownError("the output projection was not seen to run as a module")
    scale, tail = _tail(one, seen.output, added)
    groups = values.reshape(len(values), -1, d).transpose(0, 1)
    wide = (groups if len(groups) == heads else groups.repeat_interleave(heads // len(groups), 0)).double()
    if norm is not None:
        wide = norm.gain.double()[:, None] * wide
        wide = wide - wide.mean(1, keepdim=True) if norm.centred else wide
    output = weight.double().reshape(heads, d, -1) * scale.double()
    return Operator(wide, output, norm, tail, weight, bias)


# ---- weights


def _output(one: Seen) -> tuple[Tensor, Tensor | None]:
    module = one.block.module
    if isinstance(module, nn.MultiheadAttention):
        return _frozen(module.out_proj)
    if one.block.projection is None:
        raise UnknownError("no W_O in one matrix is found; say where with adapter=Adapter(..., projection='...')")
    return _frozen(one.block.projection)


def _frozen(module: nn.Module) -> tuple[Tensor, Tensor | None]:
    weight, bias = weight_of(module)
    return weight.detach(), None if bias is None else bias.detach()


def _values(one: Seen, taken: Any, seen: Projected) -> Tensor:
    """Return W_V, (D, G d)."""
    block, module = one.block, one.block.module
    if isinstance(module, nn.MultiheadAttention):
        return _frozen(module)[0]
    if block.values is None or seen.made is None:
        raise UnknownError("no projection of values is found among the modules of attention")
    weight, _ = _frozen(block.values)
    columns = columns_of(seen.made, taken.v)
    if columns is None:
        kind = "fused " if seen.made.shape[-1] > taken.v.shape[1] * taken.v.shape[-1] else ""
        raise UnknownError(
            f"the values are not columns of what the {kind}projection {type(block.values).__name__} gives (they are "
            "normed, scaled or mixed after it), so W_V is not known"
        )
    found: Tensor = weight[:, columns]
    return found


# ---- norms and what comes after


def _norm_before(one: Seen, entered: Tensor, state: Tensor) -> Norm | None:
    """Return the norm between the state and attention; None where attention gets the state as it is."""
    if equal(entered, state):
        return None
    for module, given, made in one.norms:
        if (made is entered or equal(made, entered)) and _close(given, state):
            return norm_of(module, given, made)
    raise UnknownError("what attention gets is neither the state nor its norm")


def _close(one: Tensor, other: Tensor) -> bool:
    """Return whether numbers agree, without NaN, which states may be at padding alone."""
    if one.shape != other.shape:
        return False
    unit = max(torch.finfo(each.dtype).eps for each in (one, other))
    off = float((wide(one) - wide(other)).nan_to_num(0.0).abs().max())
    return off <= max(_OFF, _ROUNDINGS * unit) * float(other.nan_to_num(0.0).abs().max())


def norm_of(module: nn.Module, given: Tensor, made: Tensor) -> Norm:
    epsilon = next((float(value) for name in _EPS if isinstance(value := getattr(module, name, None), float)), 0.0)
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    ones = torch.ones_like(given[0, 0])
    gains = [weight.detach(), 1 + weight.detach()] if isinstance(weight, Tensor) else [ones]
    shift = bias.detach() if isinstance(bias, Tensor) else torch.zeros_like(ones)
    rows = given.flatten(0, -2), made.flatten(0, -2)
    known = ~(rows[0] + rows[1]).isnan().any(-1)
    few = rows[0][known][:_ROWS], rows[1][known][:_ROWS]
    for gain in gains:
        for centred in (isinstance(module, nn.LayerNorm), not isinstance(module, nn.LayerNorm)):
            found = Norm(gain, shift, centred, epsilon)
            if gain.shape == ones.shape and _close(found(few[0]), few[1]):
                return found
    raise UnknownError(f"{type(module).__name__} is neither a layer norm nor one by the root mean square")


def _itself(made: Tensor) -> Tensor:
    return made


def _scaled(scale: Tensor, made: Tensor) -> Tensor:
    return made * scale


def _tail(one: Seen, given: Tensor, added: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Return what scales channels after W_O, (D,), and all that is done after it."""
    if given.numel() != added.numel():
        raise UnknownError("what W_O gives has another shape than what is added to the state")
    flat = given.reshape(added.shape)
    ones = torch.ones_like(added[0, 0])
    if equal(flat, added):
        return ones, _itself
    rows, sums = flat.flatten(0, -2), added.flatten(0, -2)
    known = ~(rows + sums).isnan().any(-1)
    rows, sums = rows[known], sums[known]
    place = rows.abs().argmax(0, keepdim=True)
    scale = sums.gather(0, place)[0] / rows.gather(0, place)[0]
    if _close(rows * scale, sums):
        return scale, partial(_scaled, scale)
    for module, entered, made in one.norms:
        if (
            entered.numel() == flat.numel()
            and equal(entered.reshape(flat.shape), flat)
            and _close(made.reshape(added.shape), added)
        ):
            norm = norm_of(module, entered, made)
            return norm.gain * rows.square().mean(-1).rsqrt().mean(), norm
    raise UnknownError("what stands between W_O and the state is neither a scale of channels nor a norm")
