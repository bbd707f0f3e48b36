"""Helpers that let one body of code serve NumPy arrays and torch tensors."""

from __future__ import annotations

import sys
from typing import Any, TypeAlias

import array_api_compat
import array_api_compat.numpy
import numpy as np
from numpy.typing import NDArray

from nlflow.errors import InputError

__all__ = [
    "Array",
    "check_untracked",
    "constant_like",
    "is_numpy",
    "mean_over_nodes",
    "namespace",
    "over_channels",
    "same_kind",
    "scalar",
    "to_numpy",
]

Array: TypeAlias = Any
"""An array of any namespace that the array API covers: numpy.ndarray or torch.Tensor."""


def namespace(*arrays: Array) -> Any:
    """Return the array namespace that `arrays` share (`array_api_compat`)."""
    if all(type(array) is np.ndarray for array in arrays):
        return array_api_compat.numpy  # ten times faster than to find out, and it is asked at every average
    return array_api_compat.array_namespace(*arrays)


def is_numpy(array: Array) -> bool:
    """Tell whether `array` is a NumPy array."""
    return isinstance(array, np.ndarray)


def scalar(array: Array) -> float:
    """Return an array of one number as a float; derivatives stay behind."""
    return float(array) if is_numpy(array) or not hasattr(array, "detach") else float(array.detach())


def to_numpy(array: Array) -> NDArray[Any]:
    """Return `array` as a NumPy array on the host, cut loose from any graph of derivatives."""
    return array if is_numpy(array) else np.asarray(array.detach().cpu().numpy())


def check_untracked(name: str, tracked: bool, instead: str) -> None:
    """Raise `InputError` where derivatives would be recorded that nobody can use; `tracked` is a tensor's wish."""
    if tracked and sys.modules["torch"].is_grad_enabled():
        raise InputError(
            f"{name}: got a tensor that requires a gradient, expected one that does not; use {instead}, or detach it"
        )


def constant_like(values: NDArray[Any] | float, like: Array) -> Array:
    """Return `values` with the namespace, dtype and device of `like`."""
    xp = namespace(like)
    return xp.asarray(np.asarray(values), dtype=like.dtype, device=array_api_compat.device(like))


def over_channels(per_node: Array | float, u: Array) -> Array | float:
    """Return a number, or an array with one value for each node, ready to multiply the signal `u` in its precision."""
    if isinstance(per_node, float | int):
        return per_node
    if per_node.dtype != u.dtype:
        per_node = namespace(u).astype(per_node, u.dtype)
    return per_node if per_node.ndim == u.ndim else per_node[..., None]


def mean_over_nodes(u: Array, weights: Array, axes: tuple[int, ...] | None = None) -> Array:
    """Return sum_i weights_i u_i for each channel, broadcastable to `u`; the weights sum to 1, one for each node.

    Over all axes of nodes by default, or over some of them.
    """
    xp = namespace(u)
    # Summed in float64: along leading axes NumPy does not sum pairwise, and float32 loses a percent on an image.
    axes = tuple(range(weights.ndim)) if axes is None else axes
    total = xp.sum(over_channels(weights, u) * u, axis=axes, keepdims=True, dtype=xp.float64)
    return xp.astype(total, u.dtype)


def same_kind(name: str, array: Array, like: Array) -> None:
    """Raise `InputError` unless `array` has the namespace, dtype and device of `like`."""
    if type(array) is not type(like) or array.dtype != like.dtype:
        raise InputError(
            f"{name}: got {type(array).__name__} of {array.dtype}, expected {type(like).__name__} of {like.dtype}; "
            "convert one of them (results keep the type of their input, so nothing is converted silently)"
        )
    here, there = array_api_compat.device(array), array_api_compat.device(like)
    if here != there:
        raise InputError(f"{name}: it is on {here}, expected {there} as the others; move one of them (.to({there}))")
