"""The exponential dot product."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from nlflow._array import Array, is_numpy, kept_like, underflowing
from nlflow.errors import InputError, check_array, check_number
from nlflow.kernels.base import Kernel


@underflowing
@dataclass(frozen=True, eq=False)
class ExpDotProduct(Kernel):
    """Exponential dot product, ``k = exp(scale q(x).k(y))``: the kernel of softmax attention.

    With queries equal to keys it is symmetric, and positive semidefinite for a scale > 0. K of arXiv 2312.00751,
    Theorem 1, has this form, so k = K/2.

    Parameters
    ----------
    scale : float, optional
        Factor of the dot product; 1/sqrt(d) by default, d the width of queries and keys.
    query_map, key_map : array of shape (d_u, d), optional
        Linear maps from features to queries and keys, q = u W_Q and k = u W_K. With one array object for both queries
        are keys.
    """

    scale: float | None = None
    query_map: Array | None = None
    key_map: Array | None = None
    formula: ClassVar[str] = "exp(scale q(x).k(y))"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.scale is not None:
            self._set("scale", check_number("scale", self.scale))
        both = self.query_map is not None and self.query_map is self.key_map
        for name in ("query_map", "key_map"):
            if getattr(self, name) is not None:
                self._set(name, check_array(name, getattr(self, name), ndim=2))
        if both:  # what is made of a list, or of integers, is a new array
            self._set("query_map", self.key_map)
        # exp(s q.q') is positive definite for s >= 0 (its power series is); for s < 0 it is not.
        self._set("positive_semidefinite", self.scale is None or self.scale >= 0)

    def __eq__(self, other: object) -> bool:
        """Tell whether another kernel has the same numbers and the very same maps."""
        if type(other) is not type(self) or not isinstance(other, ExpDotProduct):
            return NotImplemented
        maps = self.query_map is other.query_map and self.key_map is other.key_map
        return maps and (self.amplitude, self.scale) == (other.amplitude, other.scale)

    def __hash__(self) -> int:
        """Return a hash of what `==` compares."""
        return hash((self.amplitude, self.scale, id(self.query_map), id(self.key_map)))

    def map_features(self, features: Array, queries: Array | None = None) -> tuple[Array, Array]:
        """Return (queries, keys)."""
        if queries is None and self.query_map is self.key_map:
            both = self._mapped("key_map", features)
            return both, both  # the same array: symmetric to the last bit
        return self._mapped("query_map", features if queries is None else queries), self._mapped("key_map", features)

    def _mapped(self, name: str, features: Array) -> Array:
        matrix = getattr(self, name)
        if matrix is None:
            return features
        if matrix.shape[0] != features.shape[-1]:
            raise InputError(
                f"{name}: got shape {tuple(matrix.shape)}, expected {features.shape[-1]} rows, "
                "as many as the features have columns"
            )
        return features @ (kept_like(matrix, features) if is_numpy(matrix) and not is_numpy(features) else matrix)

    def log_matrix(self, x: Array, y: Array) -> Array:
        """Return the logits."""
        if x.shape[1] != y.shape[1]:
            raise InputError(f"queries: got width {x.shape[1]}, expected {y.shape[1]}, the width of the keys")
        scale = 1 / math.sqrt(x.shape[1]) if self.scale is None else self.scale
        return (x * scale) @ y.T
