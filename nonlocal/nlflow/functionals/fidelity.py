"""Fidelity operators Lambda, which draw a signal to the observed one."""

from __future__ import annotations

import copy
import math
import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Self

import array_api_compat
import numpy as np

from nlflow._array import Array, is_tensor, namespace, over_channels, same_kind, scalar
from nlflow.affinities import Affinity
from nlflow.errors import (
    InputError,
    NlflowError,
    NumericalError,
    check_array,
    check_memory,
    check_number,
    check_tensor,
    is_number,
)


class Fidelity(ABC):
    """Contract of a fidelity operator Lambda, which `nlflow.testing.check_fidelity` checks.

    The last axis of signals may hold several vectors of `width` channels.
    """

    @property
    def width(self) -> int:
        """Number of channels that it mixes."""
        return 1

    @property
    def uniform(self) -> float | None:
        """The number, if it is the same for all nodes, else None."""
        return None

    @property
    def tracked(self) -> bool:
        """Whether its values require a gradient."""
        return any(getattr(value, "requires_grad", False) for value in vars(self).values())

    def stated(self, like: Array) -> Array | float:
        """Return a number, one for each node, or a matrix for each node."""
        xp, width = namespace(like), self.width
        if width == 1:
            return self.times(xp.ones_like(like))
        units = xp.reshape(xp.eye(width, dtype=like.dtype, device=array_api_compat.device(like)), (-1,))
        nodes = tuple(like.shape)[:-1]
        return xp.reshape(self.times(xp.broadcast_to(units, (*nodes, width * width)) + 0), (*nodes, width, width))

    @abstractmethod
    def times(self, v: Array) -> Array:
        """Return Lambda v."""

    @abstractmethod
    def damped(self, v: Array, step: float) -> Array:
        """Return (I + step Lambda)^-1 v."""

    def implicit_step(self, v: Array, observed: Array, step: float) -> Array:
        """Return (I + step Lambda)^-1 (v + step Lambda f), a step of implicit Euler towards f."""
        return self.damped(v + step * self.times(observed), step)

    @abstractmethod
    def bounds(self) -> tuple[float, float]:
        """Return the smallest and the largest eigenvalue over all nodes."""

    @abstractmethod
    def scaled(self, factor: Array | float) -> Fidelity:
        """Return factor Lambda; the factor is a number or one for each node."""

    @abstractmethod
    def over_degree(self, log_degree: Array, like: Array) -> Fidelity:
        """Return Lambda / d in the precision of `like`, 0 where Lambda is; `NumericalError` when it overflows."""

    @abstractmethod
    def centre(self, f: Array, measure: Array, axes: tuple[int, ...]) -> Array:
        """Return the constant c with sum_i m_i Lambda_i (f_i - c) = 0, float64; `axes` are those of nodes."""


@dataclass(frozen=True)
class NodeFidelity(Fidelity):
    """A fidelity of one number, or one for each node."""

    values: Array | float

    @property
    def uniform(self) -> float | None:
        return self.values if isinstance(self.values, float) else None

    def stated(self, like: Array) -> Array | float:
        del like
        return self.values

    def times(self, v: Array) -> Array:
        """Return Lambda v."""
        return over_channels(self.values, v) * v

    def damped(self, v: Array, step: float) -> Array:
        return v / (over_channels(self.values, v) * step + 1)

    def bounds(self) -> tuple[float, float]:
        if isinstance(self.values, float):
            return self.values, self.values
        xp = namespace(self.values)
        return scalar(xp.min(self.values)), scalar(xp.max(self.values))

    def scaled(self, factor: Array | float) -> NodeFidelity:
        """Return factor Lambda."""
        return NodeFidelity(factor * self.values)

    def over_degree(self, log_degree: Array, like: Array) -> NodeFidelity:
        xp = namespace(like)
        log_degree = xp.astype(log_degree, xp.float64)
        given = self.values + 0 * log_degree
        inside = given > 0
        exponent = xp.log(xp.where(inside, given, xp.ones_like(given))) - log_degree
        check_exponent(scalar(xp.max(xp.where(inside, exponent, 0 * exponent))), like)
        # 0 where the fidelity is, and still with the slope 1 / d there, which is what a tensor's gradient follows.
        nothing = xp.where(inside, xp.zeros_like(given), given) * xp.exp(-xp.clip(log_degree, -700, 700))
        ratio = xp.where(inside, xp.exp(xp.where(inside, exponent, 0 * exponent)), nothing)
        return NodeFidelity(xp.astype(ratio, like.dtype))

    def centre(self, f: Array, measure: Array, axes: tuple[int, ...]) -> Array:
        xp = namespace(f)
        weight = self.times(xp.ones_like(f)) * measure
        total = xp.sum(weight * f, axis=axes, keepdims=True, dtype=xp.float64)
        return total / xp.sum(weight, axis=axes, keepdims=True, dtype=xp.float64)


def checked_method(fidelity: Fidelity, method: str, *arguments: Any) -> Fidelity:
    try:
        made = getattr(fidelity, method)(*arguments)
    except NlflowError:
        raise
    except Exception as error:
        raise InputError(
            f"fidelity: {type(fidelity).__name__}.{method}() failed for a factor for each node "
            f"({type(error).__name__}: {error}), expected Lambda times one number for each node; mend it "
            "(nlflow.testing.check_fidelity shows what is promised), or use the measure of the flow's metric"
        ) from error
    if not isinstance(made, Fidelity):
        raise InputError(f"fidelity: {type(fidelity).__name__}.{method}() returned {made!r}, expected a Fidelity")
    return made


def check_exponent(exponent: float, like: Array) -> None:
    if exponent > math.log(float(namespace(like).finfo(like.dtype).max)):
        raise NumericalError(
            "degree: so small at some node that fidelity / degree overflows; use measure='degree', or scale the "
            "kernel's amplitude or logits"
        )


class MatrixFidelity(Fidelity):
    """A fidelity of a symmetric positive semidefinite matrix for each node.

    Parameters
    ----------
    values : array of shape ``domain.shape + (D, D)``
        Node axes of length 1 are shared.
    dtype : dtype, optional
        Precision to compute in; that of the values by default.

    Raises
    ------
    InputError
        For matrices that are not symmetric positive semidefinite (beyond rounding), NaN or infinity.
    MemoryLimitError
        When the matrices and their eigenvectors would pass the limit.
    """

    def __init__(self, values: Any, dtype: Any = None) -> None:
        matrices = check_array("fidelity", values)
        shape = tuple(matrices.shape)
        if len(shape) < 3 or shape[-1] != shape[-2]:
            raise InputError(f"fidelity: got shape {shape}, expected node axes and one square matrix (D, D) for each")
        check_memory(
            f"the eigenvectors of {math.prod(shape[:-2])} matrices of {shape[-1]} x {shape[-1]}",
            5 * math.prod(shape) * 8,
            "share matrices between nodes (an axis of length 1), use smaller tokens or fewer groups",
        )
        xp = namespace(matrices)
        dtype = matrices.dtype if dtype is None else dtype
        exact = xp.astype(matrices, xp.float64)
        # Symmetric in every bit: the product with rows of vectors stands for that with columns.
        self._matrices = xp.astype((exact + xp.matrix_transpose(exact)) / 2, dtype)
        exact = exact.detach() if hasattr(exact, "detach") else exact  # from here on it is looked at only
        transposed = xp.matrix_transpose(exact)
        rounding = 16 * shape[-1] * float(xp.finfo(matrices.dtype).eps)
        size = xp.max(xp.abs(exact), axis=(-2, -1))
        skew = xp.max(xp.abs(exact - transposed), axis=(-2, -1))
        _check_nodes(
            skew - rounding * size, lambda node: f"an asymmetry of {float(skew[node]):.3g} (entries up to "
            f"{float(size[node]):.3g})", "take (A + A^T) / 2",
        )  # fmt: skip
        eigenvalues, vectors = xp.linalg.eigh((exact + transposed) / 2)
        lowest = xp.min(eigenvalues, axis=-1)
        _check_nodes(
            -lowest - rounding * size, lambda node: f"a smallest eigenvalue of {float(lowest[node]):.3g}",
            "set negative eigenvalues to 0",
        )  # fmt: skip
        self._eigenvalues = xp.astype(xp.where(eigenvalues > 0, eigenvalues, 0 * eigenvalues), dtype)
        self._vectors = xp.astype(vectors, dtype)
        self._scale: Array | float = 1.0
        # Node axes from here on share their matrices, so that a product takes all of them at once.
        self._split = max((axis + 1 for axis, n in enumerate(shape[:-2]) if n != 1), default=0)

    @property
    def values(self) -> Array:
        """The matrices."""
        return self._matrices if isinstance(self._scale, float) and self._scale == 1 else self._of_nodes(self._matrices)

    def stated(self, like: Array) -> Array:
        del like
        return self.values

    @property
    def width(self) -> int:
        """Number of channels."""
        return int(self._matrices.shape[-1])

    @property
    def nodes(self) -> tuple[int, ...]:
        """The axes of nodes of the matrices."""
        return tuple(self._matrices.shape[:-2])

    def times(self, v: Array) -> Array:
        """Return Lambda v."""
        xp = namespace(v)
        return xp.reshape(self._scale_rows(v) * (self._rows(v) @ self._shared(self._matrices)), v.shape)

    def damped(self, v: Array, step: float) -> Array:
        if self._learnt:
            return self._solve(v, step)
        strength = step * self._strengths(v)
        return self._in_eigenvectors(v, 1 / (1 + strength))

    def implicit_step(self, v: Array, observed: Array, step: float) -> Array:
        if self._learnt:
            return v + self._solve(step * self.times(observed - v), step)
        strength = step * self._strengths(v)
        return v + self._in_eigenvectors(observed - v, strength / (1 + strength))

    def bounds(self) -> tuple[float, float]:
        xp = namespace(self._eigenvalues)
        low = self._scale * xp.min(self._eigenvalues, axis=-1)
        high = self._scale * xp.max(self._eigenvalues, axis=-1)
        return scalar(xp.min(low)), scalar(xp.max(high))

    def scaled(self, factor: Array | float) -> Self:
        result = copy.copy(self)
        result._scale = self._scale * factor
        return result

    def over_degree(self, log_degree: Array, like: Array) -> Self:
        xp = namespace(like)
        log_degree = xp.astype(log_degree, xp.float64)
        highest = self.bounds()[1]
        lowest = scalar(xp.min(log_degree))
        check_exponent(max(math.log(highest) if highest > 0 else 0.0, 0.0) - lowest, like)
        result = self.scaled(xp.astype(xp.exp(-log_degree), like.dtype))
        for part in ("_matrices", "_eigenvalues", "_vectors"):
            setattr(result, part, xp.astype(getattr(self, part), like.dtype, copy=False))
        return result

    def centre(self, f: Array, measure: Array, axes: tuple[int, ...]) -> Array:
        xp = namespace(f)
        mass = xp.astype(measure + 0 * f[..., :1], xp.float64)
        mean = xp.sum(mass * f, axis=axes, keepdims=True, dtype=xp.float64) / xp.sum(mass, axis=axes, keepdims=True)
        pull = xp.sum(mass * self.times(f - xp.astype(mean, f.dtype)), axis=axes, dtype=xp.float64)
        weight = mass[..., 0] * self._scale
        shared = tuple(axis for axis in axes if self.nodes[axis] == 1)
        weight = xp.sum(weight, axis=shared, keepdims=True) if shared else weight
        total = xp.sum(weight[..., None, None] * self._matrices, axis=axes, dtype=xp.float64)
        return mean + xp.linalg.pinv(total) @ pull

    # ---- vectors as rows, those that share a matrix together

    def _shared(self, per_matrix: Array) -> Array:
        xp = namespace(per_matrix)
        own = tuple(per_matrix.shape)
        return xp.reshape(per_matrix, own[: self._split] + own[len(self.nodes) :])

    def _rows(self, v: Array) -> Array:
        """Return a signal as (..., rows, D)."""
        shape, width = tuple(v.shape), self.width
        if len(shape) != len(self.nodes) + 1 or shape[-1] % width:
            raise InputError(
                f"v: got shape {shape}, expected {len(self.nodes)} node axes and {width} channels (or a multiple), as "
                "the matrices of the fidelity have"
            )
        rows = math.prod(shape[self._split :]) // width
        return namespace(v).reshape(v, (*shape[: self._split], rows, width))

    def _scale_rows(self, v: Array) -> Array | float:
        """Return the scale as (..., rows, 1), beside what `_rows` returns."""
        if isinstance(self._scale, float):
            return self._scale
        xp = namespace(v)
        vectors = (*tuple(v.shape)[:-1], int(v.shape[-1]) // self.width)
        scale = xp.broadcast_to(xp.astype(self._scale, v.dtype)[..., None], vectors)
        return xp.reshape(scale, (*vectors[: self._split], -1, 1))

    def _strengths(self, v: Array) -> Array:
        return self._scale_rows(v) * self._shared(self._eigenvalues)[..., None, :]

    def _in_eigenvectors(self, v: Array, gain: Array) -> Array:
        xp = namespace(v)
        vectors = self._shared(self._vectors)
        return xp.reshape((gain * (self._rows(v) @ vectors)) @ xp.matrix_transpose(vectors), v.shape)

    @property
    def _learnt(self) -> bool:
        return bool(getattr(self._matrices, "requires_grad", False) and sys.modules["torch"].is_grad_enabled())

    def _solve(self, v: Array, step: float) -> Array:
        xp = namespace(v)
        rows = xp.astype(self._rows(v), xp.float64)
        matrices = xp.astype(self._shared(self._matrices), xp.float64)
        identity = xp.eye(self.width, dtype=xp.float64, device=array_api_compat.device(matrices))
        if isinstance(self._scale, float):
            matrices = identity + step * self._scale * matrices
            solved = xp.matrix_transpose(xp.linalg.solve(matrices, xp.matrix_transpose(rows)))
        else:  # nodes that share a matrix do not share its multiple
            strength = step * xp.astype(self._scale_rows(v), xp.float64)[..., None]
            solved = xp.linalg.solve(identity + strength * matrices[..., None, :, :], rows[..., None])[..., 0]
        return xp.reshape(xp.astype(solved, v.dtype), v.shape)

    def _of_nodes(self, per_matrix: Array) -> Array:
        scale = self._scale
        return scale * per_matrix if isinstance(scale, float) else scale[..., None, None] * per_matrix


def _check_nodes(excess: Array, found: Any, remedy: str) -> None:
    xp = namespace(excess)
    if not bool(xp.any(excess > 0)):
        return
    node = tuple(int(i) for i in np.unravel_index(int(xp.argmax(xp.reshape(excess, (-1,)))), tuple(excess.shape)))
    raise InputError(
        f"fidelity: got a matrix with {found(node)} at node {node}, expected symmetric positive semidefinite matrices; "
        f"{remedy}"
    )


_HINT = "0 switches the term off; to hold values exactly, give a constraint=Constraint(nodes, values)"


def as_fidelity(given: Any, observed: Array, affinity: Affinity, *, matrices: bool = True) -> Fidelity:
    shape = affinity.domain.shape
    if isinstance(given, MatrixFidelity):
        _check_matrices((*given.nodes, given.width, given.width), observed, shape)
        same_kind("fidelity", given._matrices, observed)
        return _of_one_channel(given, shape)
    if isinstance(given, NodeFidelity):
        given = given.values
    elif isinstance(given, Fidelity):  # of somebody's own
        channels = 1 if observed.ndim == len(shape) else int(observed.shape[-1])
        if channels % given.width:
            raise InputError(
                f"fidelity: got one of {given.width} channels, expected one for the {channels} of the signal"
            )
        return given
    if isinstance(given, list | tuple):
        given = np.asarray(check_array("fidelity", given))
    if is_tensor(given):
        check_tensor("fidelity", given)
    if getattr(given, "requires_grad", False) and tuple(given.shape) == ():
        given = given.expand(shape)  # a number that is learnt
    if is_number(given):
        return NodeFidelity(check_number("fidelity", given, minimum=0, hint=_HINT))
    values = check_array("fidelity", given, hint=_HINT)
    many = matrices and values.ndim == len(shape) + 2
    if not many and tuple(values.shape) != shape:
        also = f", or {(*shape, 'D', 'D')}, one matrix for each node" if matrices else ""
        got = tuple(values.shape)
        raise InputError(f"fidelity: got shape {got}, expected a number or {shape}, one for each node{also}")
    if type(values) is not type(observed):
        same_kind("fidelity", values, observed)
    xp = namespace(values)
    if many:
        _check_matrices(tuple(values.shape), observed, shape)
        return _of_one_channel(MatrixFidelity(values, dtype=observed.dtype), shape)
    lowest = scalar(xp.min(values))
    if lowest < 0:
        raise InputError(f"fidelity: got {lowest:g} at some node, expected values >= 0 (0 where data is missing)")
    return NodeFidelity(xp.astype(values, observed.dtype, copy=True))


def _of_one_channel(given: MatrixFidelity, shape: tuple[int, ...]) -> Fidelity:
    """Return matrices of one entry as what they are, a number for each node."""
    if given.width > 1:
        return given
    values = given.values[..., 0, 0]
    xp = namespace(values)
    return NodeFidelity(xp.broadcast_to(xp.where(values > 0, values, 0 * values), shape))


def _check_matrices(got: tuple[int, ...], observed: Array, nodes: tuple[int, ...]) -> None:
    channels = int(observed.shape[-1]) if observed.ndim > len(nodes) else None
    if channels is None:
        raise InputError(
            f"fidelity: got matrices (shape {got}) for a signal without channels (shape {tuple(observed.shape)}), "
            "expected a number for each node; or give the signal a channel axis, the last"
        )
    fits = len(got) == len(nodes) + 2 and all(n in (1, own) for n, own in zip(got, nodes, strict=False))
    if not fits or got[-2:] != (channels, channels):
        raise InputError(
            f"fidelity: got shape {got}, expected {(*nodes, channels, channels)}, one matrix for each node (node axes "
            "may have length 1, which nodes share)"
        )
