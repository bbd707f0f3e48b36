"""What all kernels share: the affinity k(x, y) >= 0 of the functional J.

A kernel is a formula and its parameters. Which points it compares (node positions, features, patches of an image) and
how sums with it are computed is decided by `nlflow.affinities`. Where a functional needs a symmetric kernel it uses
K(x, y) = k(x, y) + k(y, x); a paper that states K itself therefore has k = K/2 (``amplitude=0.5``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

from scipy.spatial.distance import cdist

from nlflow._array import Array, is_numpy, underflowing
from nlflow.errors import check_number


@dataclass(frozen=True, kw_only=True)
class Kernel(ABC):
    """Base of all kernels.

    Parameters
    ----------
    amplitude : float
        Factor > 0 in front of the formula; it scales J and the degree and leaves averages as they are.
    """

    amplitude: float = 1.0

    formula: ClassVar[str]
    positive: ClassVar[tuple[str, ...]] = ()
    """Names of further parameters that must be > 0."""
    symmetric: ClassVar[bool] = True
    positive_semidefinite: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for name in ("amplitude", *self.positive):
            self._set(name, check_number(name, getattr(self, name), minimum=0, strict=True))

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    @abstractmethod
    def log_matrix(self, x: Array, y: Array) -> Array:
        """Return log k(x_i, y_j) without the amplitude, shape (N, M), for features (N, d) and (M, d).

        Where k = 0 the logarithm is -inf. Cost O(N M d) time, O(N M) memory.
        """

    def map_features(self, features: Array, queries: Array | None = None) -> tuple[Array, Array]:
        """Return what is compared: (features of x, features of y)."""
        return (features if queries is None else queries), features


@underflowing
@dataclass(frozen=True, kw_only=True)
class RadialKernel(Kernel):
    """A kernel of the Euclidean distance r = |x - y| alone."""

    @abstractmethod
    def log_profile(self, squared: Array) -> Array:
        """Return log k as a function of the squared distance r^2, without the amplitude."""

    @abstractmethod
    def support(self, rtol: float) -> float:
        """Return the radius beyond which k(r) <= rtol k(0)."""

    def log_matrix(self, x: Array, y: Array) -> Array:
        """Return log k(x_i, y_j) without the amplitude; see `Kernel.log_matrix`."""
        if is_numpy(x):
            return self.log_profile(cdist(x, y, "sqeuclidean"))
        # Differences, not |x|^2 - 2 x.y + |y|^2: the expansion cancels for close points.
        squared = (x[:, None, 0] - y[None, :, 0]) ** 2
        for column in range(1, x.shape[1]):
            squared = squared + (x[:, None, column] - y[None, :, column]) ** 2
        return self.log_profile(squared)
