"""Wendland's kernels."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Final

import numpy as np

from nlflow._array import Array, namespace, root, underflowing
from nlflow.errors import InputError, check_integer
from nlflow.kernels.base import RadialKernel

# Of (1 - s)^l times a polynomial in s, lowest power first: l and the polynomial.
_FORMS: Final = {0: (2, (1.0,)), 2: (4, (1.0, 4.0)), 4: (6, (1.0, 6.0, 35 / 3))}


@underflowing
@dataclass(frozen=True)
class Wendland(RadialKernel):
    """Wendland's kernel of compact support, ``k = (1 - s)^4 (1 + 4 s)`` for ``s = |x - y| / radius`` < 1, 0 beyond.

    For ``derivatives=0`` it is (1 - s)^2, for 4 it is (1 - s)^6 (1 + 6 s + 35/3 s^2). Positive definite in up to three
    dimensions (Wendland 1995, doi 10.1007/BF02123482).

    Parameters
    ----------
    radius : float
        In the units of what is compared; > 0.
    derivatives : {0, 2, 4}
        Number of continuous derivatives.
    """

    radius: float
    derivatives: int = 2
    positive: ClassVar[tuple[str, ...]] = ("radius",)
    formula: ClassVar[str] = "(1 - s)^4 (1 + 4 s), s = |x-y| / radius < 1"
    positive_semidefinite: ClassVar[bool] = True
    dimensions: ClassVar[float] = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set("derivatives", check_integer("derivatives", self.derivatives))
        if self.derivatives not in _FORMS:
            raise InputError(f"derivatives: got {self.derivatives}, expected one of 0, 2 or 4")
        self._set("smoothness", 1.0 + self.derivatives)

    @np.errstate(over="ignore", invalid="ignore")  # far beyond narrow widths
    def log_profile(self, squared: Array) -> Array:
        """Return log k."""
        xp = namespace(squared)
        s = root(squared / self.radius / self.radius)
        power, polynomial = _FORMS[self.derivatives]
        total = 0 * s + polynomial[-1]
        for c in polynomial[-2::-1]:
            total = total * s + c
        near = xp.where(s < 1, 1 - s, xp.ones_like(s))
        return xp.where(s < 1, power * xp.log(near) + xp.log(total), xp.full_like(s, -math.inf))
