"""E_p: the p-Dirichlet energy with a fidelity, and its minimizer."""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nlflow._array import Floats, underflowing
from nlflow.affinities import Affinity
from nlflow.errors import InputError, NumericalError, check_integer, check_memory, check_number, shortened
from nlflow.functionals.energies import check_shape
from nlflow.functionals.fidelity import NodeFidelity, as_fidelity
from nlflow.functionals.krylov import verdict
from nlflow.functionals.misfits import KullbackLeibler, Misfit, Squares
from nlflow.functionals.variational import newton, primal_dual, reweighted
from nlflow.functionals.variational.certificate import NO_EDGES, CertifiedMinimizer
from nlflow.functionals.variational.jp import Jp

_FEWER = "use a smaller window or fewer nodes, or raise memory_limit"
_LARGEST = 600.0  # of the logarithm of how much J_p weighs beside the misfit


@underflowing
class Ep(Jp):
    """p-Dirichlet energy with a fidelity term, E_p(u) = J_p(u) + 1/2 sum_i w_i lambda_i |u_i - f_i|^2, 1 <= p <= 10.

    With another misfit g the term is sum_i w_i lambda_i g(u_i, f_i), channels added up. E_1 is the model of Rudin,
    Osher and Fatemi on the graph of the affinity (Gilboa and Osher 2008, doi 10.1137/070698592).

    Parameters
    ----------
    affinity : Affinity
        Of k; see `Jp`.
    observed : array of shape ``domain.shape`` or ``domain.shape + (D,)``
        The signal f.
    fidelity : float or array of shape ``domain.shape``
        lambda >= 0; 0 where data is missing (inpainting).
    p, isotropic, memory_limit
        See `Jp`.
    misfit : L1, Huber or KullbackLeibler, optional
        g; squares, (u - f)^2 / 2, by default.

    Raises
    ------
    InputError
        For a negative fidelity, a wrong shape, NaN or infinity, negative counts, and as `Jp`.

    Examples
    --------
    >>> import numpy as np
    >>> from nlflow import L1, Ep, Gaussian, Grid, affinity
    >>> f = np.where(np.arange(12) < 6, 0.0, 1.0)
    >>> f[3] = 9.0  # an outlier
    >>> found = Ep(affinity(Gaussian(width=1.0), Grid(12), window=2), f, 2.0, p=1, misfit=L1()).minimizer()
    >>> found.success, bool(abs(found.u[3]) < 1e-6), bool(abs(found.u[8] - 1) < 1e-6)
    (True, True, True)
    """

    def __init__(
        self,
        affinity: Affinity,
        observed: Any,
        fidelity: float | NDArray[Any],
        p: float,
        *,
        misfit: Misfit | None = None,
        isotropic: bool = False,
        memory_limit: float | None = None,
    ) -> None:
        super().__init__(affinity, p, isotropic=isotropic, memory_limit=memory_limit)
        self._memory_limit = memory_limit
        self._observed: NDArray[Any] = np.array(self.affinity.check_signal("observed", observed))
        operator = as_fidelity(fidelity, self._observed, affinity, matrices=False)
        if not isinstance(operator, NodeFidelity):
            got = type(operator).__name__
            raise InputError(f"fidelity: got {got}, expected a number or one for each node; only E takes others")
        self._fidelity = operator.values
        if misfit is not None and not isinstance(misfit, Misfit):
            raise InputError(
                f"misfit: got {shortened(repr(misfit))}, expected L1(), Huber(delta), KullbackLeibler() or None for "
                "squares"
            )
        self.misfit = misfit
        if misfit is not None:
            misfit.check(self._observed)

    @property
    def observed(self) -> NDArray[Any]:
        """The signal f."""
        return self._observed

    @property
    def fidelity(self) -> NDArray[Any] | float:
        """The fidelity lambda."""
        return self._fidelity

    def value(self, u: Any) -> float:
        weights = self.affinity.domain.weights.ravel()[:, None] * self._per_node[:, None]
        here, f = self._pair(u)
        with np.errstate(over="ignore", invalid="ignore"):
            g = (self.misfit or Squares()).value(here, f)
            fidelity = float(np.sum(np.where(weights > 0, weights * g, 0.0)))
        if not math.isfinite(fidelity):
            cause = "the misfit overflows; scale the signals down"
            if isinstance(self.misfit, KullbackLeibler):
                cause = "the divergence of a signal that is not above 0 from counts is infinite; clip it"
            raise NumericalError(f"value: {cause}")
        return super().value(u) + fidelity

    def gradient(self, u: Any) -> NDArray[Any]:
        misfit = self.misfit or Squares()
        if refusal := misfit.refusal():
            raise InputError(
                f"misfit: got {misfit!r}: {refusal}; use ForwardBackward(dt), LaggedDiffusivity(dt) or Ep.minimizer()"
            )
        gradient = super().gradient(u)
        here, f = self._pair(u)
        slope = misfit.slopes(here, f)[0]
        if not np.isfinite(slope).all() or not np.isfinite(misfit.value(here, f)).all():
            raise NumericalError(f"misfit: {misfit!r} has no slope where the signal is not above 0")
        drawn = (self._per_node[:, None] * slope).reshape(gradient.shape)
        return (gradient + drawn).astype(gradient.dtype, copy=False)

    def minimizer(
        self, *, rtol: float | None = None, maxiter: int | None = None, start: Any = None
    ) -> CertifiedMinimizer:
        """Return the minimizer with its duality gap.

        For 1 < p <= 2 by lagged diffusivity; for p > 2, and for a misfit with p > 1, by Newton's method; for p = 1 by
        the primal-dual method of Chambolle and Pock (doi 10.1007/s10851-010-0251-1), or at once where a weak fidelity
        leaves constants. O(edges D) memory; a primal-dual iteration takes O(edges D) time.

        Parameters
        ----------
        rtol : float, optional
            Stop when the gap is at most this times the value; 1e-6 in float64 and 1e-4 in float32 by default. With
            squares and a uniform fidelity sum_i w_i |u_i - u*_i|^2 <= 2 rtol E_p / lambda.
        maxiter : int, optional
            Linear problems (300, 1000 for p > 2) or primal-dual iterations (20000).
        start : array, optional
            First guess; f (p = 1) or the minimizer of E by default.

        Raises
        ------
        InputError
            When the fidelity is 0 everywhere.
        """
        f = self._observed
        single = f.dtype == np.float32
        rtol = check_number("rtol", (1e-4 if single else 1e-6) if rtol is None else rtol, minimum=0, strict=True)
        most = 20_000 if self.p == 1 else 300 if self.p <= 2 else 1000
        maxiter = check_integer("maxiter", most if maxiter is None else maxiter, minimum=1)
        known = self._per_node > 0
        if not known.any():
            raise InputError(
                "fidelity: got 0 at every node, so every constant minimizes the functional; set it > 0 somewhere"
            )
        flat, guess = self.flat(f), None
        if start is not None:
            guess = self.flat(check_shape("start", self.affinity.check_signal("start", start), f))
        # About the mean and in units of the size of what is observed: the result then scales and shifts with f.
        shift = flat[known].mean(axis=0)
        size = float(np.abs(flat[known] - shift).max())
        if size == 0:
            u = np.broadcast_to(flat[known][0], flat.shape).reshape(f.shape).astype(f.dtype)
            return CertifiedMinimizer(u, 0.0, 0, True, "what is observed is constant, and so is the minimizer")
        if not len(self.graph):
            u = np.where(known[:, None], flat, shift).reshape(f.shape).astype(f.dtype)
            return CertifiedMinimizer(u, 0.0, 0, True, NO_EDGES)
        if self.misfit is not None or self.p > 2:
            misfit = (self.misfit or Squares()).scaled(size, shift)
            return self._with_misfit(misfit, flat, shift, size, guess, rtol, maxiter)
        scaled = np.where(known[:, None], (flat - shift) / size, 0.0)
        if guess is not None:
            guess = (guess - shift) / size
        with np.errstate(over="ignore"):
            fidelity = self._per_node * size ** (2 - self.p)
        limit = np.finfo(f.dtype).max * 1e-8
        if not (fidelity < limit).all():
            raise NumericalError("fidelity: overflows in units of the signal's size; use a smaller one")
        rigid = self.affinity.domain.weights.ravel() * fidelity
        if self.p == 1:
            u, value, gap, iterations = self._saddle(scaled, rigid, guess, rtol, maxiter)
        elif (plain := self.plain(scaled, rigid, Squares(), np.float64)) is not None:
            u, value, gap, iterations = *plain, 0.0, 0
        else:
            u, value, gap, iterations = self._p_laplacian(scaled, fidelity, guess, rtol, maxiter)
        relative = gap / value if value > 0 else 0.0
        success, advice = verdict(relative, rtol)
        if not success and self.p > 1:
            advice += ", or p = 1, which has a method of its own"
        message = f"relative duality gap {relative:.3g} after {iterations} iterations{advice}"
        try:
            value *= size**self.p
        except OverflowError:
            value = math.inf
        u = self._in_units(u, scaled, flat, size, shift)
        return CertifiedMinimizer(u, relative, iterations, success, message, value)

    def _with_misfit(
        self, misfit: Misfit, flat: Floats, shift: Floats, size: float, guess: Floats | None, rtol: float, maxiter: int
    ) -> CertifiedMinimizer:
        """Minimize a J_p + sum_i r_i g in units of the size of f, with the larger of a and r near 1."""
        known = self._per_node > 0
        logs = np.log(np.where(known, self._per_node * self.affinity.domain.weights.ravel(), 1.0))
        top = float(logs[known].max())
        rigid = np.where(known, np.exp(logs - top), 0.0)
        # E_p = exp(top) size^degree (a J_p + sum r g). Beyond the limits what J_p or the misfit does is below rounding.
        factor = math.exp(min(max((self.p - misfit.degree) * math.log(size) - top, -_LARGEST), _LARGEST))
        scaled = np.where(known[:, None], (flat - shift) / size, 0.0)
        guess = None if guess is None else (guess - shift) / size
        if self.p == 1:
            u, value, gap, count = self._saddle(scaled, rigid / factor, guess, rtol, maxiter, misfit)
            value, gap = value * factor, gap * factor
        else:
            edges = len(self.graph) * (48 + 24 * flat.shape[1])
            check_memory(f"Newton's method on {len(self.graph)} edges", edges, _FEWER, self._memory_limit)
            problem = newton.Problem(self, scaled, rigid, misfit, factor)
            u, value, gap, count = newton.minimize(problem, guess, rtol, maxiter)
        relative = gap / value if value > 0 else 0.0
        success, advice = verdict(relative, rtol)
        message = f"relative duality gap {relative:.3g} after {count} iterations{advice}"
        exponent = top + misfit.degree * math.log(size)
        exponent += math.log(value) if value > 0 else -math.inf
        value = math.exp(exponent) if exponent < math.log(sys.float_info.max) else math.inf
        u = self._in_units(u, scaled, flat, size, shift)
        return CertifiedMinimizer(u, relative, count, success, message, value)

    def _in_units(
        self, u: NDArray[Any], scaled: NDArray[Any], flat: Floats, size: float, shift: Floats
    ) -> NDArray[Any]:
        """Return a signal found in units of the size of f in those of f; what is f to the bit there stays so."""
        same = (self._per_node > 0)[:, None] & (u == scaled)
        f = self._observed
        return np.where(same, flat, u.astype(np.float64) * size + shift).reshape(f.shape).astype(f.dtype)

    def _saddle(
        self, f: NDArray[Any], rigid: Floats, guess: NDArray[Any] | None, rtol: float, maxiter: int,
        misfit: Misfit | None = None,
    ) -> tuple[NDArray[Any], float, float, int]:  # fmt: skip
        dtype = self._observed.dtype
        saddle = primal_dual.minimize(
            self, f.astype(dtype), rigid, rtol=rtol, maxiter=maxiter, misfit=misfit,
            start=None if guess is None else guess.astype(dtype), memory_limit=self._memory_limit,
        )  # fmt: skip
        return saddle.u, saddle.value, saddle.gap, saddle.iterations

    def _p_laplacian(
        self, f: NDArray[Any], fidelity: NDArray[Any], guess: NDArray[Any] | None, rtol: float, maxiter: int
    ) -> tuple[NDArray[Any], float, float, int]:
        check_memory(
            f"the reweighting of {len(self.graph)} edges", 60 * len(self.graph),
            _FEWER, self._memory_limit,
        )  # fmt: skip
        floor = self.rounding(self.affinity.domain.weights.ravel() * fidelity, np.float64)
        for count, best in enumerate(reweighted.iterates(self, f, fidelity, guess), start=1):
            if best.value <= floor:  # a minimum of 0, near which no gap is small beside the value
                return best.u, best.value, 0.0, count
            if best.gap <= rtol * best.value or count == maxiter:
                break
        return best.u, best.value, best.gap, count

    @property
    def _per_node(self) -> Floats:
        shape = self.affinity.domain.shape
        return np.broadcast_to(np.asarray(self._fidelity, dtype=np.float64), shape).ravel()

    def _pair(self, u: Any) -> tuple[Floats, Floats]:
        signal = check_shape("u", self.affinity.check_signal("u", u), self._observed)
        return self.flat(signal), self.flat(self._observed)

    def __repr__(self) -> str:
        return super().__repr__().replace(", ", f", {self.misfit!r}, ", 1) if self.misfit else super().__repr__()
