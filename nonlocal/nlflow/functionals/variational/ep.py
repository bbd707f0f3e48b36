"""E_p: the p-Dirichlet energy with a fidelity, and its minimizer."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nlflow._array import Floats, underflowing
from nlflow.affinities import Affinity
from nlflow.errors import InputError, NumericalError, check_integer, check_memory, check_number
from nlflow.functionals.fidelity import NodeFidelity, as_fidelity
from nlflow.functionals.krylov import verdict
from nlflow.functionals.minimizer import check_shape
from nlflow.functionals.variational import lagged, primal_dual
from nlflow.functionals.variational.certificate import NO_EDGES, CertifiedMinimizer
from nlflow.functionals.variational.jp import Jp


@underflowing
class Ep(Jp):
    """p-Dirichlet energy with a fidelity term, E_p(u) = J_p(u) + 1/2 sum_i w_i lambda_i |u_i - f_i|^2, 1 <= p <= 2.

    E_2 is `E`. E_1 is the model of Rudin, Osher and Fatemi on the graph of the affinity (Gilboa and Osher 2008,
    doi 10.1137/070698592).

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

    Raises
    ------
    InputError
        For a negative fidelity, a wrong shape, NaN or infinity, and as `Jp`.
    """

    def __init__(
        self,
        affinity: Affinity,
        observed: Any,
        fidelity: float | NDArray[Any],
        p: float,
        *,
        isotropic: bool = False,
        memory_limit: float | None = None,
    ) -> None:
        super().__init__(affinity, p, isotropic=isotropic, memory_limit=memory_limit)
        self._memory_limit = memory_limit
        self._observed: NDArray[Any] = np.array(self.affinity.check_signal("observed", observed))
        operator = as_fidelity(fidelity, self._observed, affinity)
        if not isinstance(operator, NodeFidelity):
            raise InputError("fidelity: got matrices, expected a number or one for each node; only E takes matrices")
        self._fidelity = operator.values

    @property
    def observed(self) -> NDArray[Any]:
        """The signal f that the fidelity draws to."""
        return self._observed

    @property
    def fidelity(self) -> NDArray[Any] | float:
        """The fidelity lambda."""
        return self._fidelity

    def value(self, u: Any) -> float:
        """Return E_p(u); see `Jp.value`."""
        misfit = self._misfit(u)
        weights = self.affinity.domain.weights.ravel()[:, None] * self._per_node[:, None]
        with np.errstate(over="ignore", invalid="ignore"):
            fidelity = 0.5 * float(np.sum(weights * misfit * misfit))
        if not math.isfinite(fidelity):
            raise NumericalError("value: the squares of the misfit overflow; scale the signals down")
        return super().value(u) + fidelity

    def gradient(self, u: Any) -> NDArray[Any]:
        """Return the gradient in the inner product sum_i w_i a_i . b_i, for p > 1; see `Jp.gradient`."""
        gradient = super().gradient(u)
        drawn = (self._per_node[:, None] * self._misfit(u)).reshape(gradient.shape)
        return (gradient + drawn).astype(gradient.dtype, copy=False)

    def minimizer(
        self, *, rtol: float | None = None, maxiter: int | None = None, start: Any = None
    ) -> CertifiedMinimizer:
        """Return the minimizer with a bound on what is left to gain, the duality gap.

        For p > 1 by lagged diffusivity (linear problems for conjugate gradients; tens of them, the more the nearer p is
        to 1), for p = 1 by the primal-dual method of Chambolle and Pock (doi 10.1007/s10851-010-0251-1),
        whose iteration costs O(edges D) time and whose memory is O(edges D). The result does not depend on the number
        of threads, and it scales with f where the fidelity scales with 1 / |f|^(2 - p).

        The minimum is searched in the box of the observed values, which holds it. So the gap is a bound also where
        the fidelity is 0: it then counts what the signal could gain there if it moved anywhere in that box, and falls
        more slowly. On a graph without edges J_p is 0 and f the minimizer (its mean where it is not observed).

        Parameters
        ----------
        rtol : float, optional
            Stop when the gap is at most this times the value; 1e-6 in float64 and 1e-4 in float32 by default. With a
            uniform fidelity sum_i w_i |u_i - u*_i|^2 <= 2 rtol E_p / lambda.
        maxiter : int, optional
            Linear problems (300) or primal-dual iterations (20000).
        start : array, optional
            First guess; f (p = 1) or the minimizer of E by default.

        Raises
        ------
        InputError
            When the fidelity is 0 everywhere: then every constant is a minimizer.
        """
        f = self._observed
        single = f.dtype == np.float32
        rtol = check_number("rtol", (1e-4 if single else 1e-6) if rtol is None else rtol, minimum=0, strict=True)
        maxiter = check_integer("maxiter", (20_000 if self.p == 1 else 300) if maxiter is None else maxiter, minimum=1)
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
        scaled = np.where(known[:, None], (flat - shift) / size, 0.0)
        if guess is not None:
            guess = (guess - shift) / size
        with np.errstate(over="ignore"):
            fidelity = self._per_node * size ** (2 - self.p)
        limit = np.finfo(f.dtype).max * 1e-8
        if not (fidelity < limit).all():
            raise NumericalError("fidelity: overflows in units of the signal's size; use a smaller one")
        solve = self._total_variation if self.p == 1 else self._p_laplacian
        u, value, gap, iterations = solve(scaled, fidelity, guess, rtol, maxiter)
        relative = gap / value if value > 0 else 0.0
        success, advice = verdict(relative, rtol)
        if not success and self.p > 1:
            advice += ", or p = 1, which has a method of its own"
        message = f"relative duality gap {relative:.3g} after {iterations} iterations{advice}"
        try:
            value *= size**self.p
        except OverflowError:
            value = math.inf
        u = (u.astype(np.float64) * size + shift).reshape(f.shape).astype(f.dtype)
        return CertifiedMinimizer(u, relative, iterations, success, message, value)

    def _total_variation(
        self, f: NDArray[Any], fidelity: NDArray[Any], guess: NDArray[Any] | None, rtol: float, maxiter: int
    ) -> tuple[NDArray[Any], float, float, int]:
        dtype = self._observed.dtype
        saddle = primal_dual.minimize(
            self, f.astype(dtype), self.affinity.domain.weights.ravel() * fidelity, rtol=rtol, maxiter=maxiter,
            start=None if guess is None else guess.astype(dtype), memory_limit=self._memory_limit,
        )  # fmt: skip
        return saddle.u, saddle.value, saddle.gap, saddle.iterations

    def _p_laplacian(
        self, f: NDArray[Any], fidelity: NDArray[Any], guess: NDArray[Any] | None, rtol: float, maxiter: int
    ) -> tuple[NDArray[Any], float, float, int]:
        check_memory(
            f"the reweighting of {len(self.graph)} edges", 60 * len(self.graph),
            "use a smaller window or fewer nodes, or raise memory_limit", self._memory_limit,
        )  # fmt: skip
        floor = self.rounding(self.affinity.domain.weights.ravel() * fidelity, np.float64)
        for count, best in enumerate(lagged.iterates(self, f, fidelity, guess), start=1):
            if best.value <= floor:  # a minimum of 0, near which no gap is small beside the value
                return best.u, 0.0, 0.0, count
            if best.gap <= rtol * best.value or count == maxiter:
                break
        return best.u, best.value, best.gap, count

    @property
    def _per_node(self) -> Floats:
        """The fidelity, (N,), in float64."""
        shape = self.affinity.domain.shape
        return np.broadcast_to(np.asarray(self._fidelity, dtype=np.float64), shape).ravel()

    def _misfit(self, u: Any) -> Floats:
        """Return u - f as (N, D) in float64."""
        signal = check_shape("u", self.affinity.check_signal("u", u), self._observed)
        return self.flat(signal) - self.flat(self._observed)
