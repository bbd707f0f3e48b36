"""Kernel families: the affinity k(x, y) >= 0 of the functional J.

A kernel is a formula and its parameters. Which points it compares (node positions, features, patches of an image) and
how sums with it are computed is decided by `nlflow.affinities`. Where a functional needs a symmetric kernel it uses
K(x, y) = k(x, y) + k(y, x); a paper that states K itself therefore has k = K/2 (``amplitude=0.5``).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
from scipy.spatial.distance import cdist

from nlflow._array import Array, is_numpy, namespace, underflowing
from nlflow.errors import InputError, check_array, check_choice, check_integer, check_number

__all__ = ["DotProduct", "Gaussian", "Kernel", "Laplace", "Patch", "RadialKernel", "TopHat"]


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
    symmetric: ClassVar[bool] = True
    positive_semidefinite: ClassVar[bool] = False

    def __post_init__(self) -> None:
        self._set("amplitude", check_number("amplitude", self.amplitude, minimum=0, strict=True))

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


@underflowing
@dataclass(frozen=True)
class Gaussian(RadialKernel):
    """Gaussian kernel, ``k = exp(-|x - y|^2 / (2 width^2))``.

    Positive definite; support: all distances. The kernel of kernel attention (NeuTRENO, arXiv 2312.00751, Table 8) and,
    on grey values, of the bilateral filter.

    Parameters
    ----------
    width : float
        Standard deviation, in the units of what is compared; > 0.
    """

    width: float
    formula: ClassVar[str] = "exp(-|x-y|^2 / (2 width^2))"
    positive_semidefinite: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set("width", check_number("width", self.width, minimum=0, strict=True))

    def log_profile(self, squared: Array) -> Array:
        """Return log k as a function of the squared distance."""
        return squared / self.width / self.width * -0.5  # in two steps: width**2 could underflow

    def support(self, rtol: float) -> float:
        """Return the radius beyond which k(r) <= rtol k(0)."""
        return self.width * math.sqrt(-2 * math.log(rtol))


@underflowing
@dataclass(frozen=True)
class Laplace(RadialKernel):
    """Exponential (Laplace) kernel, ``k = exp(-|x - y| / width)``.

    Positive definite; support: all distances, with a kink at r = 0 (Rasmussen and Williams 2006, eq. 4.18).

    Parameters
    ----------
    width : float
        Decay length, in the units of what is compared; > 0.
    """

    width: float
    formula: ClassVar[str] = "exp(-|x-y| / width)"
    positive_semidefinite: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set("width", check_number("width", self.width, minimum=0, strict=True))

    def log_profile(self, squared: Array) -> Array:
        """Return log k as a function of the squared distance."""
        xp = namespace(squared)
        if is_numpy(squared):
            return -(xp.sqrt(squared) / self.width)
        # At the kink the derivative of the root is infinite: 0 is taken, the middle of its slopes.
        apart = squared > 0
        return -(xp.where(apart, xp.sqrt(xp.where(apart, squared, xp.ones_like(squared))), 0 * squared) / self.width)

    def support(self, rtol: float) -> float:
        """Return the radius beyond which k(r) <= rtol k(0)."""
        return -self.width * math.log(rtol)


@underflowing
@dataclass(frozen=True)
class TopHat(RadialKernel):
    """Top-hat kernel, ``k = 1 where |x - y| <= radius, else 0``.

    Not positive definite (its Fourier transform changes sign), so the averaging operator can have negative eigenvalues;
    compact support. The kernel of bounded-confidence consensus (Hegselmann and Krause 2002).

    Parameters
    ----------
    radius : float
        In the units of what is compared; > 0. The comparison allows for rounding (1e-12 relative), so that nodes at
        exactly this distance count.
    """

    radius: float
    formula: ClassVar[str] = "1 if |x-y| <= radius else 0"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set("radius", check_number("radius", self.radius, minimum=0, strict=True))

    def log_profile(self, squared: Array) -> Array:
        """Return log k as a function of the squared distance: 0 or -inf."""
        xp = namespace(squared)
        inside = xp.sqrt(squared) <= self.radius * (1 + 1e-12)
        return xp.where(inside, xp.zeros_like(squared), xp.full_like(squared, -math.inf))

    def support(self, rtol: float) -> float:
        """Return the radius beyond which k vanishes."""
        return self.radius * (1 + 1e-12)


@underflowing
@dataclass(frozen=True, eq=False)
class DotProduct(Kernel):
    """Exponential dot product, ``k = exp(scale q(x).k(y))``: the kernel of softmax attention.

    With queries equal to keys it is symmetric and positive definite (Theorem 1 of arXiv 2312.00751 has K of this form,
    so k = K/2); otherwise it is not symmetric: functionals use k + k^T, Markov chains and attention steps use it as it
    is. Support: everything. Logits of any size are handled in log space.

    Parameters
    ----------
    scale : float, optional
        Factor of the dot product; 1/sqrt(d) by default, d the width of queries and keys.
    query_map, key_map : array of shape (d_u, d), optional
        Linear maps from features to queries and keys, q = u W_Q and k = u W_K. With them the kernel can evolve with the
        signal even when queries and keys differ.
    """

    scale: float | None = None
    query_map: Array | None = None
    key_map: Array | None = None
    formula: ClassVar[str] = "exp(scale q(x).k(y))"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.scale is not None:
            self._set("scale", check_number("scale", self.scale))
        for name in ("query_map", "key_map"):
            if getattr(self, name) is not None:
                self._set(name, check_array(name, getattr(self, name), ndim=2))
        # exp(s q.q') is positive definite for s >= 0 (its power series is); for s < 0 it is not.
        self._set("positive_semidefinite", self.scale is None or self.scale >= 0)

    def map_features(self, features: Array, queries: Array | None = None) -> tuple[Array, Array]:
        """Return (queries, keys) of the features (N, d_u), the queries from features of their own where given."""
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
        return features @ matrix

    def log_matrix(self, x: Array, y: Array) -> Array:
        """Return the logits scale q_i . k_j; see `Kernel.log_matrix`."""
        if x.shape[1] != y.shape[1]:
            raise InputError(f"queries: got width {x.shape[1]}, expected {y.shape[1]}, the width of the keys")
        scale = 1 / math.sqrt(x.shape[1]) if self.scale is None else self.scale
        return (x * scale) @ y.T


@underflowing
@dataclass(frozen=True)
class Patch(Kernel):
    r"""Patch kernel of nonlocal means on a grid, windowed.

    ``k = exp(-max(D(x, y) - 2 sigma^2, 0) / width^2)`` where D is the mean squared difference of the patches around x
    and y over pixels and channels, for y in the square window around x, and 0 outside. With ``sigma`` > 0 the distance
    is corrected for the noise that both patches carry (Buades, Coll and Morel 2005, doi 10.1137/040616024; 2011,
    doi 10.5201/ipol.2011.bcm_nlm). Symmetric; not positive definite in general.

    Parameters
    ----------
    width : float
        Filter parameter h, in units of the signal; > 0.
    patch_size : int
        Side of the square patch, odd.
    search_radius : int
        Half side of the window: y - x runs over -search_radius ... search_radius along each axis.
    sigma : float
        Standard deviation of the noise in what is compared; 0 for no correction.
    tokens : {'pixel', 'patch'}
        ``pixel`` averages pixel values. ``patch`` averages whole patches and puts them back where they overlap: the
        functional of the patch tokens, 1/2 sum k(x, y) |p_x u - p_y u|^2 / patch_size^n, is the functional of the
        pixels with the affinity averaged over the patch, k'(x, y) = mean_o k(x + o, y + o), and that is how it is
        computed.
    spatial_width : float, optional
        Standard deviation in pixels of a Gaussian factor of the distance between x and y; with ``patch_size=1`` that is
        the bilateral filter.

    Notes
    -----
    Patches near the edge see the signal extended as the grid's boundary says; for an isolated boundary they see it
    mirrored.
    """

    width: float
    patch_size: int = 7
    search_radius: int = 10
    sigma: float = 0.0
    tokens: Literal["pixel", "patch"] = "pixel"
    spatial_width: float | None = None
    formula: ClassVar[str] = "exp(-max(D(x,y) - 2 sigma^2, 0) / width^2), D = mean squared patch difference"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set("width", check_number("width", self.width, minimum=0, strict=True))
        self._set("patch_size", check_integer("patch_size", self.patch_size, minimum=1, odd=True))
        self._set("search_radius", check_integer("search_radius", self.search_radius, minimum=1))
        self._set("sigma", check_number("sigma", self.sigma, minimum=0))
        self._set("tokens", check_choice("tokens", self.tokens, ("pixel", "patch")))
        if self.spatial_width is not None:
            self._set("spatial_width", check_number("spatial_width", self.spatial_width, minimum=0, strict=True))

    @property
    def correction(self) -> float:
        """What is subtracted from D / width^2: 2 sigma^2 / width^2."""
        ratio = self.sigma / self.width
        return min(2 * ratio * ratio, 1e30)  # beyond, every pair counts as alike; infinity would not compute

    def log_matrix(self, x: Array, y: Array) -> Array:
        """Return log k for patches as rows, (N, p) and (M, p), without window and spatial factor."""
        distance = cdist(np.asarray(x), np.asarray(y), "sqeuclidean") / x.shape[1]
        return -np.maximum(distance / self.width**2 - self.correction, 0)
