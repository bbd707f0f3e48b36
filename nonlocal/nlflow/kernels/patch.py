"""The patch kernel: nonlocal means and the bilateral filter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
from scipy.spatial.distance import cdist

from nlflow._array import Array, underflowing
from nlflow.errors import check_choice, check_integer, check_number
from nlflow.kernels.base import Kernel


@underflowing
@dataclass(frozen=True)
class Patch(Kernel):
    r"""Patch kernel of nonlocal means on a grid of one or two axes (of more by ``method='dense'``), windowed.

    ``k = exp(-max(D(x, y) - 2 sigma^2, 0) / width^2)`` where D is the mean squared difference of the patches around x
    and y over pixels and channels, for y in the square window around x, and 0 outside (Buades, Coll and Morel 2005,
    doi 10.1137/040616024; 2011, doi 10.5201/ipol.2011.bcm_nlm). Symmetric; not positive definite in general.

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
        ``patch`` averages the affinity of pixels over the patch, k'(x, y) = mean_o k(x + o, y + o).
    spatial_width : float, optional
        Standard deviation in pixels of a Gaussian factor of the distance between x and y; with ``patch_size=1`` that is
        the bilateral filter.

    Notes
    -----
    Windows and patches go on beyond the edge as the grid's boundary says; for an isolated boundary windows end there,
    and patches see the signal mirrored.
    """

    width: float
    patch_size: int = 7
    search_radius: int = 10
    sigma: float = 0.0
    tokens: Literal["pixel", "patch"] = "pixel"
    spatial_width: float | None = None
    positive: ClassVar[tuple[str, ...]] = ("width",)
    formula: ClassVar[str] = "exp(-max(D(x,y) - 2 sigma^2, 0) / width^2), D = mean squared patch difference"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set("patch_size", check_integer("patch_size", self.patch_size, minimum=1, odd=True))
        self._set("search_radius", check_integer("search_radius", self.search_radius, minimum=1))
        self._set("sigma", check_number("sigma", self.sigma, minimum=0))
        self._set("tokens", check_choice("tokens", self.tokens, ("pixel", "patch")))
        if self.spatial_width is not None:
            self._set("spatial_width", check_number("spatial_width", self.spatial_width, minimum=0, strict=True))

    @property
    def correction(self) -> float:
        """2 sigma^2 / width^2."""
        ratio = self.sigma / self.width
        return min(2 * ratio * ratio, 1e30)  # beyond, every pair counts as alike; infinity would not compute

    def log_matrix(self, x: Array, y: Array) -> Array:
        """Return log k for patches as rows, (N, p) and (M, p), without window and spatial factor."""
        distance = cdist(np.asarray(x), np.asarray(y), "sqeuclidean") / x.shape[1]
        return -np.maximum(distance / self.width**2 - self.correction, 0)
