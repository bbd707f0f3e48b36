"""The fidelity operator with a matrix for each node."""

from __future__ import annotations

import copy
import math
import sys
from typing import Any, Self

import numpy as np

from nlflow._array import Array, constant_like, namespace, scalar
from nlflow.errors import InputError, check_array, check_memory
from nlflow.functionals.fidelity.base import Fidelity, check_exponent


class MatrixFidelity(Fidelity):
    """A fidelity operator that multiplies each node's vector by a symmetric positive semidefinite matrix.

    With patches as tokens and the matrix C / sigma^2 of their covariance, a step of the flow of E is the local Wiener
    filter: averages where patches agree, the observed signal in the directions in which they differ.

    Parameters
    ----------
    values : array of shape ``domain.shape + (D, D)``
        Node axes of length 1 are broadcast: ``(G, 1, D, D)`` is one matrix for each group of nodes, shared by its
        members.
    dtype : dtype, optional
        Precision to compute in; that of the values by default.

    Raises
    ------
    InputError
        For a matrix that is not square, not symmetric or not positive semidefinite (beyond rounding), NaN or infinity.
    MemoryLimitError
        When the matrices and their eigenvectors would pass the limit.

    Notes
    -----
    The eigenvectors are computed once, O(D^3) for each matrix, and serve every step length. `times` and `damped` cost
    O(D^2) for each vector. A signal may hold several vectors of D channels side by side, which are multiplied one by
    one.

    Matrices may be tensors that require a gradient, which then is a symmetric matrix too. Where derivatives are
    recorded, implicit steps solve with I + step Lambda itself, O(D^3) for each matrix: eigenvectors have no derivatives
    where two eigenvalues are the same.
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
        """The matrices, shape ``domain.shape + (D, D)`` with axes of length 1 where nodes share them."""
        return self._matrices if isinstance(self._scale, float) and self._scale == 1 else self._of_nodes(self._matrices)

    def stated(self, like: Array) -> Array:
        """Return the matrices; see `Fidelity.stated`."""
        del like
        return self.values

    @property
    def width(self) -> int:
        """D, the number of channels that the matrices mix."""
        return int(self._matrices.shape[-1])

    @property
    def nodes(self) -> tuple[int, ...]:
        """Node axes of the matrices, with 1 where nodes share them."""
        return tuple(self._matrices.shape[:-2])

    def times(self, v: Array) -> Array:
        """Return Lambda v."""
        xp = namespace(v)
        return xp.reshape(self._scale_rows(v) * (self._rows(v) @ self._shared(self._matrices)), v.shape)

    def damped(self, v: Array, step: float) -> Array:
        """Return (I + step Lambda)^-1 v."""
        if self._learnt:
            return self._solve(v, step)
        strength = step * self._strengths(v)
        return self._in_eigenvectors(v, 1 / (1 + strength))

    def implicit_step(self, v: Array, observed: Array, step: float) -> Array:
        """Return v + step Lambda (I + step Lambda)^-1 (f - v), the implicit step without its cancellation.

        Each eigenvector's part of f - v is multiplied by a gain in [0, 1], however large the fidelity.
        """
        if self._learnt:
            return v + self._solve(step * self.times(observed - v), step)
        strength = step * self._strengths(v)
        return v + self._in_eigenvectors(observed - v, strength / (1 + strength))

    def bounds(self) -> tuple[float, float]:
        """Return the smallest and the largest eigenvalue."""
        xp = namespace(self._eigenvalues)
        low = self._scale * xp.min(self._eigenvalues, axis=-1)
        high = self._scale * xp.max(self._eigenvalues, axis=-1)
        return scalar(xp.min(low)), scalar(xp.max(high))

    def scaled(self, factor: Array | float) -> Self:
        """Return factor Lambda; see `Fidelity.scaled`. Shares the eigenvectors."""
        result = copy.copy(self)
        result._scale = self._scale * factor
        return result

    def over_degree(self, log_degree: Array, like: Array) -> Self:
        """Return Lambda / d; see `Fidelity.over_degree`."""
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
        """Return the constant that f is centred by, (sum m Lambda)^-1 sum m Lambda f; see `Fidelity.centre`.

        In directions in which no node has a fidelity it is the mean of f.
        """
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
        """Return an array of the matrices' node axes without those that are shared."""
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
        """Return the eigenvalues beside the rows of a signal."""
        return self._scale_rows(v) * self._shared(self._eigenvalues)[..., None, :]

    def _in_eigenvectors(self, v: Array, gain: Array) -> Array:
        """Multiply the parts of a signal along the eigenvectors."""
        xp = namespace(v)
        vectors = self._shared(self._vectors)
        return xp.reshape((gain * (self._rows(v) @ vectors)) @ xp.matrix_transpose(vectors), v.shape)

    @property
    def _learnt(self) -> bool:
        """Whether derivatives with respect to the matrices are recorded."""
        return bool(getattr(self._matrices, "requires_grad", False) and sys.modules["torch"].is_grad_enabled())

    def _solve(self, v: Array, step: float) -> Array:
        """Return (I + step Lambda)^-1 v from the matrices alone, in float64."""
        xp = namespace(v)
        rows = xp.astype(self._rows(v), xp.float64)
        matrices = xp.astype(self._shared(self._matrices), xp.float64)
        identity = constant_like(np.eye(self.width), matrices)
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
    """Raise `InputError` naming the node where `excess` is largest, if it is above 0 anywhere."""
    xp = namespace(excess)
    if not bool(xp.any(excess > 0)):
        return
    node = tuple(int(i) for i in np.unravel_index(int(xp.argmax(xp.reshape(excess, (-1,)))), tuple(excess.shape)))
    raise InputError(
        f"fidelity: got a matrix with {found(node)} at node {node}, expected symmetric positive semidefinite matrices; "
        f"{remedy}"
    )
