"""Matern's kernels."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Final

import numpy as np

from nlflow._array import Array, namespace, root, underflowing
from nlflow.errors import InputError, check_number, checked_call
from nlflow.kernels.base import RadialKernel

_FAR: Final = 1e4  # where k is exp(-1e4), which is 0
# Polynomials of s = sqrt(2 nu) r / width beside exp(-s), lowest power first.
_POLYNOMIALS: Final = {0.5: (1.0,), 1.5: (1.0, 1.0), 2.5: (1.0, 1.0, 1 / 3), 3.5: (1.0, 1.0, 0.4, 1 / 15)}


@checked_call
@underflowing
@dataclass(frozen=True)
class Matern(RadialKernel):
    """Matern's kernel, ``k = 2^(1 - nu) / Gamma(nu) s^nu K_nu(s)`` with ``s = sqrt(2 nu) |x - y| / width``.

    Positive definite; nu = 1/2 is `Laplace` (Rasmussen and Williams 2006, eq. 4.14 and 4.16).

    Parameters
    ----------
    width : float
        Length over which the kernel falls, in the units of what is compared; > 0.
    nu : {0.5, 1.5, 2.5, 3.5}
        Smoothness.
    """

    width: float
    nu: float = 1.5
    positive: ClassVar[tuple[str, ...]] = ("width",)
    formula: ClassVar[str] = "2^(1-nu)/Gamma(nu) s^nu K_nu(s), s = sqrt(2 nu) |x-y| / width"
    positive_semidefinite: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set("nu", check_number("nu", self.nu))
        if self.nu not in _POLYNOMIALS:
            raise InputError(f"nu: got {self.nu:g}, expected one of {', '.join(f'{nu:g}' for nu in _POLYNOMIALS)}")
        self._set("smoothness", 2 * self.nu)

    @np.errstate(over="ignore", invalid="ignore")  # far beyond narrow widths
    def log_profile(self, squared: Array) -> Array:
        """Return log k."""
        xp = namespace(squared)
        s = root(squared / self.width / self.width) * math.sqrt(2 * self.nu)
        s = xp.minimum(s, xp.full_like(s, _FAR))  # whose powers are in range
        polynomial, highest = _POLYNOMIALS[self.nu], len(_POLYNOMIALS[self.nu]) - 1
        total = 0 * s + polynomial[highest]
        for c in polynomial[highest - 1 :: -1] if highest else ():
            total = total * s + c
        return xp.log(total) - s
