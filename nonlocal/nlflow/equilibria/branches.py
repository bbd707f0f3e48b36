"""Branches of equilibria, and what happens on them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from nlflow._array import Array, Brief, Floats
from nlflow.errors import InputError, check_integer, check_number

Point = tuple[Floats, float]


class Run(Protocol):
    """A branch's continuation."""

    def switched(self, point: BranchPoint, null: Floats, step: float | None) -> Branch:
        """See `Continuation.switched`."""


@dataclass(frozen=True, repr=False)
class BranchPoint(Brief):
    """A fold, a crossing or a Hopf point of a branch.

    Attributes
    ----------
    kind : {'fold', 'pitchfork', 'transcritical', 'branch point', 'hopf'}
        Fold: the branch turns in the parameter. Pitchfork, transcritical, or branch point where these are not told
        apart: another branch crosses. Hopf: a pair of complex eigenvalues crosses the imaginary axis.
    parameter : float
    error : float
        Estimated error of the parameter.
    u : array
        The equilibrium there.
    eigenvalue : complex
        The one that crosses; at a Hopf point its imaginary part is the angular frequency of the cycle that begins.
    multiplicity : int
        How many eigenvalues, or pairs of them, cross.
    vectors : array of shape (m, ...)
        Their eigenvectors, complex at a Hopf point.
    after : int
        Number of the branch's point before it.
    """

    kind: str
    parameter: float
    error: float
    u: Array
    eigenvalue: complex
    multiplicity: int
    vectors: NDArray[Any]
    after: int
    _place: Point = field(repr=False)
    _tangent: Point = field(repr=False)
    _null: Floats = field(repr=False)

    def cycle(self, amplitude: float) -> tuple[Floats, float]:
        """Return a signal on the small cycle that begins at a Hopf point, and its period; for `find_cycle`.

        `amplitude` is the root mean square of the deviation from ``u`` along the cycle.
        """
        if self.kind != "hopf":
            raise InputError(f"kind: got a {self.kind}, expected a Hopf point, where cycles begin")
        amplitude = check_number("amplitude", amplitude)
        wave = np.asarray(self.vectors[0])
        return np.asarray(self.u) + amplitude * math.sqrt(2) * wave.real, 2 * math.pi / abs(self.eigenvalue.imag)


@dataclass(frozen=True, repr=False)
class Branch(Brief):
    """A curve of equilibria.

    Attributes
    ----------
    parameter : array of shape (M,)
    u : array of shape (M, ...)
    eigenvalues : array of shape (M, k), complex
        The rightmost ones at each point, without neutral directions (see `Stability`); NaN where there are fewer.
    unstable : array of int, shape (M,)
        How many have positive real parts, by more than their error.
    points : tuple of BranchPoint
        In order along the branch.
    status : {'range', 'closed', 'steps', 'lost'}
        Why it ended: at an end of the range, where it began, after the steps that were allowed, or since no step
        stayed on the branch.
    success : bool
        Whether the status is 'range' or 'closed'.
    message : str
    """

    parameter: Floats
    u: Array
    eigenvalues: NDArray[np.complex128]
    unstable: NDArray[np.intp]
    points: tuple[BranchPoint, ...]
    status: str
    success: bool
    message: str
    _run: Run = field(repr=False)

    @property
    def stable(self) -> NDArray[np.bool_]:
        """Whether each point is stable."""
        return np.asarray(self.unstable == 0)

    def of_kind(self, *kinds: str) -> list[BranchPoint]:
        """Return the points of these kinds; all but folds and Hopf points for ``'branch point'``."""
        others = ("pitchfork", "transcritical", "branch point") if "branch point" in kinds else ()
        return [one for one in self.points if one.kind in kinds + others]

    def switch(self, point: BranchPoint, *, sign: int = 1, vector: int = 0, step: float | None = None) -> Branch:
        """Return the branch that crosses this one at a point, along a null vector.

        Parameters
        ----------
        point : BranchPoint
            Of this branch.
        sign : {1, -1}
            Along the null vector, or against it.
        vector : int
            Which null vector, below `multiplicity`.
        step : float, optional
            Length of the first step; see `continue_equilibria`.

        Raises
        ------
        InputError
            For a fold and a Hopf point.
        NumericalError
            Where no other branch was found in that direction.
        """
        if point.kind in ("fold", "hopf"):
            raise InputError(
                f"point: got a {point.kind}, where no other branch of equilibria crosses, expected a branch point"
                + ("; find_cycle(flow, *point.cycle(amplitude)) finds the cycles" if point.kind == "hopf" else "")
            )
        if check_integer("sign", sign) not in (1, -1):
            raise InputError(f"sign: got {sign!r}, expected 1 or -1")
        vector = check_integer("vector", vector, minimum=0)
        if vector >= point._null.shape[1]:
            raise InputError(f"vector: got {vector}, expected one of {point._null.shape[1]} null vectors, from 0 on")
        step = None if step is None else check_number("step", step, minimum=0, strict=True)
        return self._run.switched(point, sign * point._null[:, vector], step)
