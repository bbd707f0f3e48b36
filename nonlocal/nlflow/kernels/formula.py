"""A kernel of one's own, from a formula."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from nlflow._array import Array, underflowing
from nlflow.errors import InputError
from nlflow.kernels.base import RadialKernel
from nlflow.kernels.expressions import SQUARED, Expression, as_expression, value
from nlflow.kernels.forms import logarithm, parsed


@underflowing
@dataclass(frozen=True)
class Formula(RadialKernel):
    r"""A kernel ``k(|x - y| / width)``, given as text or as a function.

    Everything that is there for other radial kernels is there for it: sums without a matrix are compiled, on tensors
    the formula is evaluated tile by tile, and its derivatives are known.

    Parameters
    ----------
    k : str or callable
        As a function of r, the distance over the width; 1 at r = 0. Text has numbers, ``r``, + - * / \*\*,
        comparisons, and sqrt, square, pow, exp, log, log1p, abs, minimum, maximum and where. Nothing of it is run as
        Python. A function gets a symbol in place of an array, and may use the same functions of NumPy.
    width : float
        In the units of what is compared; > 0.
    definite : bool
        Whether the kernel is positive semidefinite, as you know: integrators then take longer steps.

    Raises
    ------
    InputError
        For a formula that is negative, infinite or not a number somewhere, that is not 1 at r = 0, or that uses what
        is not known.

    Examples
    --------
    >>> import numpy as np
    >>> from nlflow import Formula, Points, affinity
    >>> p = affinity(Formula("exp(-r**1.5)", width=0.2), Points(np.linspace(0, 1, 5)))
    >>> round(float(p.average(np.arange(5.0))[0]), 4)
    0.2271
    """

    k: str | Callable[[Any], Any]
    width: float = 1.0
    definite: bool = field(default=False, kw_only=True)
    _log: Expression = field(init=False, repr=False, compare=False)
    positive: ClassVar[tuple[str, ...]] = ("width",)
    formula: ClassVar[str] = "k(|x-y| / width)"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set("positive_semidefinite", bool(self.definite))
        r = SQUARED**0.5
        if isinstance(self.k, str):
            found = parsed(self.k, {"r": r})
        elif callable(self.k):
            found = _called(self.k, r)
        else:
            raise InputError(f"k: got {type(self.k).__name__}, expected text or a function of r")
        self._set("_log", logarithm(found))
        self.check_profile()
        self.weight()

    def __repr__(self) -> str:
        """Return the formula as text; of a function what it does, not where it lies, so that runs can be resumed."""
        k = repr(self.k) if isinstance(self.k, str) else f"<log k: {self._log}>"
        own = f"k={k}, width={self.width!r}, definite={self.definite!r}, amplitude={self.amplitude!r}"
        return f"Formula({own})"

    def log_profile(self, squared: Array) -> Array:
        """Return log k as a function of the squared distance."""
        return value(self._log, squared / self.width / self.width)


def _called(function: Callable[[Any], Any], r: Expression) -> Expression:
    try:
        return as_expression(function(r))
    except (AttributeError, TypeError) as error:
        raise InputError(
            f"k: the function failed on a symbol for distances ({error}); use arithmetic and functions of NumPy"
        ) from error
