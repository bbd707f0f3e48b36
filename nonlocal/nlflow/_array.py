"""One body of code for NumPy arrays and torch tensors."""

from __future__ import annotations

import inspect
import math
import sys
import weakref
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from functools import cached_property
from typing import Any, Protocol, TypeAlias, TypeVar

import array_api_compat
import array_api_compat.numpy
import numpy as np
from numpy.typing import NDArray

from nlflow._looks import Doubt, take_answers, waiting_looks
from nlflow._looks import is_tensor as is_tensor
from nlflow.errors import InputError, NumericalError, as_numpy, check_dense, check_tensor, check_unmasked, kind_of

Item = TypeVar("Item")

Array: TypeAlias = Any
"""An array of any namespace that the array API covers: numpy.ndarray or torch.Tensor."""

Floats: TypeAlias = NDArray[np.float64]
"""A NumPy array in double precision."""


class _Array(Protocol):
    """What a type checker has to know of an array."""

    @property
    def shape(self) -> Any: ...

    @property
    def dtype(self) -> Any: ...

    def __getitem__(self, index: Any, /) -> Any: ...


ArrayT = TypeVar("ArrayT", bound=_Array)
"""The type of an array that goes in, and comes out: a checker tells users of NumPy and of torch their own."""


class Brief:
    """What a result prints: numbers and words as they are, long arrays and nested results by their size."""

    def __repr__(self) -> str:
        fields = [name for name in getattr(self, "__dataclass_fields__", {}) if not name.startswith("_")]
        return f"{type(self).__name__}({', '.join(f'{name}={_briefly(getattr(self, name))}' for name in fields)})"


_SHOWN = 8  # entries of an array, and 100 letters of the rest


def _briefly(value: Any) -> str:
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        if math.prod(value.shape) <= _SHOWN:
            return repr(value)
        return f"<{' x '.join(map(str, value.shape))} {str(value.dtype).rpartition('.')[2]}>"
    text = repr(value)
    if isinstance(value, str | int | float | None) or len(text) <= 100:
        return text
    return f"<{type(value).__name__}{f' of {len(value)}' if isinstance(value, dict | list | tuple) else ''}>"


def underflowing(item: Item) -> Item:
    """Let a function, or all public methods of a class, round what is too small for a float to 0."""
    quiet = np.errstate(under="ignore")
    if not isinstance(item, type):
        return quiet(item)  # type: ignore[type-var]  # a function, as it is no class
    for name, member in list(vars(item).items()):
        if name.startswith("_") and name not in ("__init__", "__call__"):
            continue
        if isinstance(member, property) and member.fget is not None:
            setattr(item, name, property(quiet(member.fget), member.fset, member.fdel, member.__doc__))
        elif isinstance(member, cached_property):
            member.func = quiet(member.func)
        elif inspect.isfunction(member) and not inspect.isgeneratorfunction(member):
            setattr(item, name, quiet(member))
    return item


_PIECE = 2**20  # entries of which a copy takes little memory


def power_of_two(size: float) -> float:
    """Return the power of two in (size / 2, size], or 1 where `size` is 0 or not finite; to divide by it is exact."""
    return 2.0 ** (math.frexp(size)[1] - 1) if 0 < size < math.inf else 1.0


def far_unit(u: NDArray[Any], near: float = 1e-3) -> float:
    """Return the power of two that a signal is divided by so that its weighted sums are in range; 1 near 1."""
    size = float(np.abs(u).max())
    return 1.0 if near < size < 1 / near else power_of_two(size)


def pieces_of(values: Array) -> list[Array]:
    """Return a large NumPy array in flat pieces, of which copies take little memory; all else as it is."""
    if not isinstance(values, np.ndarray) or values.size <= _PIECE:
        return [values]
    return np.array_split(values.reshape(-1), -(-values.size // _PIECE))


def root_mean_square(values: Array) -> float:
    """Return the root of the mean square of all entries, whose squares may be out of range."""
    xp, parts = namespace(values), pieces_of(values)
    size = power_of_two(max(scalar(xp.max(xp.abs(part))) for part in parts))
    means = [scalar(xp.mean(xp.astype(part / size, xp.float64) ** 2)) for part in parts]
    shares = [math.prod(part.shape) / math.prod(values.shape) for part in parts]
    return size * math.sqrt(sum(mean * share for mean, share in zip(means, shares, strict=True)))


def namespace(*arrays: Array) -> Any:
    """Return the array namespace that `arrays` share (`array_api_compat`)."""
    if all(type(array) is np.ndarray for array in arrays):
        return array_api_compat.numpy  # quicker than to find out, and it is asked at every average
    return array_api_compat.array_namespace(*arrays)


def root(squared: Array, power: float = 0.5) -> Array:
    """Return the square root, or another power below 1; on tensors with the derivative 0 at 0, where it is infinite."""
    xp = namespace(squared)

    def raised(values: Array) -> Array:
        return xp.sqrt(values) if power == 0.5 else values**power

    if not hasattr(squared, "requires_grad"):
        return raised(squared)
    apart = squared > 0
    return xp.where(apart, raised(xp.where(apart, squared, xp.ones_like(squared))), 0 * squared)


def is_numpy(array: Array) -> bool:
    """Tell whether `array` is a NumPy array."""
    return isinstance(array, np.ndarray)


def plus(u: Array, factor: float, v: Array) -> Array:
    """Return u + factor v; of tensors in one operation, whose product is not rounded."""
    return u.add(v, alpha=factor) if is_tensor(u) and not is_tensor(factor) else u + factor * v


def contiguous(array: Array) -> Array:
    """Return an array in C order, itself where it is already."""
    return np.ascontiguousarray(array) if is_numpy(array) else array.contiguous()


recorded: ContextVar[bool] = ContextVar("recorded", default=False)
"""Whether a step is being recorded, or done as a recorded one: what it asks of itself on the CPU alone is left out."""


def scalar(array: Array) -> float:
    """Return an array of one number as a float; derivatives stay behind."""
    return float(array) if is_numpy(array) or not hasattr(array, "detach") else float(array.detach())


def numbers(*given: Array | float) -> list[float]:
    """Return arrays of one number each, and floats, as floats; the numbers of a device come over in one copy."""
    there = [place for place, one in enumerate(given) if hasattr(one, "detach")]
    beside = waiting_looks(given[there[0]].device) if there else []  # type: ignore[union-attr]  # it has one
    if len(there) + len(beside) < 2:
        return [scalar(one) for one in given]
    tensors = [given[place].detach() for place in there]  # type: ignore[union-attr]  # those that have it
    xp = namespace(*tensors)
    found = xp.stack([xp.astype(one, xp.float64) for one in (*tensors, *beside)]).tolist()
    take_answers(found[len(there) :])
    result = [0.0 if hasattr(one, "detach") else scalar(one) for one in given]
    for place, number in zip(there, found, strict=False):
        result[place] = number
    return result


def told_of(doubts: Sequence[Doubt]) -> str | None:
    """Return why a step failed, the first reason that is found, in one copy from a device."""
    found = numbers(*(part for one in doubts for part in one.parts))
    for one in doubts:
        own, found = found[: len(one.parts)], found[len(one.parts) :]
        if reason := one.tell(*own):
            return reason
    return None


class Pending:
    """A number that is formed on the host of parts that may lie on a device; `fetch` asks for many in one copy.

    `form` takes the parts as floats.
    """

    def __init__(self, form: Callable[..., float], *parts: Array | float) -> None:
        self._form, self._parts = form, parts
        self._value: float | None = None

    def __add__(self, other: Pending) -> Pending:
        own = len(self._parts)
        return Pending(lambda *found: self._form(*found[:own]) + other._form(*found[own:]), *self._parts, *other._parts)

    def times(self, factor: float) -> Pending:
        """Return the number times a factor."""
        return Pending(lambda *found: factor * self._form(*found), *self._parts)

    def or_infinite(self) -> Pending:
        """Return the number, or infinity where `NumericalError` is raised as it is formed."""

        def formed(*found: float) -> float:
            try:
                return self._form(*found)
            except NumericalError:
                return math.inf

        return Pending(formed, *self._parts)

    def __float__(self) -> float:
        if self._value is None:
            self._take(numbers(*self._parts))
        return self._value  # type: ignore[return-value]  # it has been taken

    def _take(self, found: list[float]) -> None:
        self._value, self._parts = self._form(*found), ()


def fetch(pending: Sequence[Pending | float]) -> list[float]:
    """Return numbers as floats, in one copy from a device."""
    waiting = [one for one in pending if isinstance(one, Pending) and one._value is None]
    found = numbers(*(part for one in waiting for part in one._parts))
    for one in waiting:
        own = len(one._parts)
        one._take(found[:own])
        found = found[own:]
    return [float(one) for one in pending]


def unit_of(*signals: Array) -> Array | float:
    """Return the power of two that signals are divided by so that their squares are in range; of tensors a tensor."""
    xp = namespace(*signals)
    tops = [xp.max(xp.abs(one)) for one in signals]
    if is_numpy(signals[0]):
        return power_of_two(max(scalar(top) for top in tops))
    top = tops[0]
    for other in tops[1:]:
        top = xp.maximum(top, other)
    # A number over its mantissa is a power of two, and so is the quotient that is rounded.
    unit = top / (2 * xp.frexp(top)[0])
    return xp.where((top > 0) & xp.isfinite(top), unit, xp.ones_like(top))


def to_numpy(array: Array) -> NDArray[Any]:
    """Return `array` as a NumPy array on the host, without its derivatives."""
    return array if is_numpy(array) else np.asarray(_readable(array.detach()).cpu().resolve_neg().numpy())


def _readable(tensor: Array) -> Array:
    """Return a tensor of a dtype that NumPy has, which bfloat16 is not."""
    return tensor.float() if str(tensor.dtype) == "torch.bfloat16" else tensor


def on_host(given: Any, name: str = "") -> NDArray[Any]:
    """Return what a user gave as a NumPy array on the host: a tensor of any device, an array or a sequence."""
    if not name:
        return to_numpy(given) if is_tensor(given) else np.asarray(given)
    if not is_tensor(given):
        return as_numpy(name, given)
    check_tensor(name, given)
    return to_numpy(given)


def check_untracked(name: str, tracked: bool, instead: str) -> None:
    """Raise `InputError` where derivatives would be recorded that nobody can use."""
    if tracked and sys.modules["torch"].is_grad_enabled():
        raise InputError(
            f"{name}: got a tensor that requires a gradient, expected one that does not; use {instead}, or detach it"
        )


def constant_like(values: NDArray[Any] | float, like: Array) -> Array:
    """Return `values` with the namespace, dtype and device of `like`."""
    xp = namespace(like)
    return xp.asarray(np.asarray(values), dtype=like.dtype, device=array_api_compat.device(like))


_kept: dict[int, tuple[Any, dict[Any, Array]]] = {}  # by the place of an array: what looks after it, and its copies


def kept_like(values: NDArray[Any], like: Array, dtype: Any = None) -> Array:
    """Return `values`, which must not change, as `constant_like` does; a device gets them once.

    A copy from the host in each step would hold it up, and cannot be recorded.
    """
    xp, dtype, device = namespace(like), like.dtype if dtype is None else dtype, array_api_compat.device(like)
    if is_numpy(like) or str(device) == "cpu":  # they share their memory with `values`, or are copied as fast
        return xp.asarray(values, dtype=dtype, device=device)
    place = id(values)
    if place not in _kept:
        _kept[place] = weakref.ref(values, lambda _: _kept.pop(place, None)), {}
    copies = _kept[place][1]
    found = copies.get((device, dtype))
    if found is None:
        found = xp.asarray(values, dtype=dtype, device=device)
        if not found.is_inference():  # which no derivative may use later
            copies[device, dtype] = found
    return found


def over_channels(per_node: Array | float, u: Array) -> Array | float:
    """Return one number, or one for each node, ready to multiply the signal `u` in its precision."""
    if isinstance(per_node, float | int):
        return per_node
    if per_node.dtype != u.dtype:
        per_node = namespace(u).astype(per_node, u.dtype)
    return per_node if per_node.ndim == u.ndim else per_node[..., None]


def mean_over_nodes(u: Array, weights: Array, axes: tuple[int, ...] | None = None) -> Array:
    """Return sum_i weights_i u_i for each channel, broadcastable to `u`; by default over all axes of nodes."""
    xp = namespace(u)
    # Summed in float64: along leading axes NumPy does not sum pairwise, and float32 loses a percent on an image.
    axes = tuple(range(weights.ndim)) if axes is None else axes
    total = xp.sum(over_channels(weights, u) * u, axis=axes, keepdims=True, dtype=xp.float64)
    return xp.astype(total, u.dtype)


def middle_of_range(flat: NDArray[Any]) -> NDArray[Any]:
    """Return the middle between the least and the largest value of each column."""
    return np.asarray(flat.min(axis=0) / 2 + flat.max(axis=0) / 2)  # their sum could overflow


def kept_bytes(*kept: Any) -> int:
    """Return the bytes of the arrays among some values, in lists, dictionaries and sparse matrices too, each once."""
    found: dict[int, int] = {}
    left = list(kept)
    while left:
        value = left.pop()
        if hasattr(value, "memory_bytes"):
            found[id(value)] = value.memory_bytes
        elif hasattr(value, "indptr"):
            left += [value.data, value.indices, value.indptr]
        elif isinstance(value, dict | list | tuple):
            left += value.values() if isinstance(value, dict) else value
        elif hasattr(value, "nbytes") and hasattr(value, "shape"):
            found[id(value)] = int(value.nbytes)
    return sum(found.values())


def check_signal_like(name: str, array: Any) -> None:
    """Raise `InputError` for what is neither a NumPy array nor a dense tensor."""
    if is_tensor(array):
        check_dense(name, array)
    elif not is_numpy(array):
        raise InputError(f"{name}: got {kind_of(array)}, expected an array or a tensor, a signal as it is")
    check_unmasked(name, array)


def check_real(name: str, array: Any) -> None:
    """Raise `InputError` for what is neither a tensor of floats nor a NumPy array of float32 or float64."""
    check_signal_like(name, array)
    if not (array.is_floating_point() if is_tensor(array) else array.dtype.char in "fd" and array.dtype.isnative):
        raise InputError(f"{name}: got dtype {array.dtype}, expected float32 or float64; convert it")


def same_kind(name: str, array: Array, like: Array) -> None:
    """Raise `InputError` unless `array` has the namespace, dtype and device of `like`."""
    check_signal_like(name, array)
    here, there = array_api_compat.device(array), array_api_compat.device(like)
    if is_tensor(array) and is_tensor(like) and here != there:
        raise InputError(f"{name}: it is on {here}, expected {there} as the others; move one of them (.to({there}))")
    kinds = {type(one).__name__ for one in (array, like)}  # a parameter is a tensor, and a shard is another kind
    alike = type(array) is type(like) or kinds == {"Tensor", "Parameter"}
    if not alike or array.dtype != like.dtype:
        raise InputError(
            f"{name}: got {type(array).__name__} of {array.dtype}, expected {type(like).__name__} of {like.dtype}; "
            "convert one of them (results keep the type of their input, so nothing is converted silently)"
        )
