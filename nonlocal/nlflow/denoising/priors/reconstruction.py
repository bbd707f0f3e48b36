"""Reconstruction with priors."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nlflow._array import underflowing
from nlflow.backends.progress import bar
from nlflow.denoising.priors.denoisers import Denoiser, check_denoised
from nlflow.errors import (
    InputError,
    NumericalError,
    StabilityError,
    check_choice,
    check_floats,
    check_integer,
    check_number,
    check_numpy,
)
from nlflow.flows.result import Status
from nlflow.functionals.forward import Forward, nearest

Array = NDArray[Any]

WEIGHT = 0.23
"""Of the prior, as Zhang et al. 2021 chose it for their denoiser and their schedule."""
_STEPS = 8
_SYSTEMS = 2000  # iterations of conjugate gradients
_LARGEST = 1e3  # times the size of the first estimate, beyond which a loop has diverged


@dataclass(frozen=True)
class Reconstruction:
    """The result of `reconstruct`.

    Attributes
    ----------
    u : array
        The estimate, in the dtype of the data.
    success : bool
        Whether the loop ended as asked: with its schedule, or at a fixed point.
    status : Status
        ``finished`` (the schedule), ``stopped`` (a fixed point), ``not converged``, ``diverged``, ``step failed`` or
        ``interrupted``.
    message : str
        How the loop ended and, where it failed, what to change.
    iterations : int
    strength, change, misfit : array of shape (iterations,)
        Of each iteration: the denoiser's strength; the change of the loop's state, relative to its size; and
        |A u - f| / (sigma sqrt(M)) for M data, which is about 1 if the residual is noise.
    """

    u: Array
    success: bool
    status: Status
    message: str
    iterations: int
    strength: NDArray[np.float64]
    change: NDArray[np.float64]
    misfit: NDArray[np.float64]

    def __repr__(self) -> str:
        return f"<Reconstruction {self.status.value} after {self.iterations} iterations: {self.message}>"


@dataclass(frozen=True)
class _Problem:
    """Data f = A u + noise, and the prior that is to help.

    Attributes
    ----------
    data : array
    forward : Forward
    sigma, weight : float
        Of the noise, and mu of the prior.
    denoise : callable
        A checked denoiser.
    rtol : float
        Of linear systems.
    """

    data: Array
    forward: Forward
    sigma: float
    weight: float
    denoise: Callable[[Array, float], Array]
    rtol: float

    def near(self, u: Array, strength: float) -> Array:
        """Return argmin_x |A x - f|^2 / (2 sigma^2) + mu |x - u|^2 / (2 s^2)."""
        pull = self.weight * (self.sigma / strength) ** 2
        found = nearest(self.forward, self.data, u, pull, self.rtol, _SYSTEMS)
        if not found.success:
            raise NumericalError(
                f"operator: the linear system of the misfit is not solved: {found.message}; lower the strength, raise "
                "the weight, or ask for less accuracy (rtol)"
            )
        return np.asarray(found.u)

    def limit(self) -> float:
        """Return the strength that ``forward-backward`` must not reach: its step is s^2 / (mu sigma^2) < 2 / |A|^2."""
        return self.sigma * math.sqrt(2 * self.weight / self.forward.squared_norm)

    def slope(self, u: Array) -> Array:
        """Return A'(A u - f)."""
        return self.forward.adjoint(self.forward.apply(u) - self.data)

    def misfit(self, u: Array) -> float:
        """Return |A u - f| / (sigma sqrt(M))."""
        residual = self.forward.apply(u) - self.data
        return float(np.linalg.norm(residual)) / (self.sigma * math.sqrt(self.data.size))

    def constant(self) -> Array:
        """Return the constant signal that fits the data best, 0 where A maps constants to 0."""
        ones = np.ones(self.forward.shape)
        seen = self.forward.apply(ones)
        mass = float(np.sum(seen * seen))
        return ones * (float(np.sum(seen * self.data)) / mass if mass > 0 else 0.0)

    def spread(self, first: Array) -> float:
        """Return about the standard deviation of the signal: that of a rough solution without prior."""
        rough = nearest(self.forward, self.data, first, 0.01 * self.forward.squared_norm, 0.01, _SYSTEMS)
        return float(np.std(rough.u))


def half_quadratic(problem: _Problem, z: Array, strength: float) -> tuple[Array, Array]:
    z = problem.denoise(problem.near(z, strength), strength)
    return z, z


def douglas_rachford(problem: _Problem, v: Array, strength: float) -> tuple[Array, Array]:
    """Denoise, then fit the data near the reflection; in ADMM the state v is x plus the multiplier."""
    z = problem.denoise(v, strength)
    return v + problem.near(2 * z - v, strength) - z, z


def forward_backward(problem: _Problem, u: Array, strength: float) -> tuple[Array, Array]:
    length = strength**2 / (problem.weight * problem.sigma**2)
    u = problem.denoise(u - length * problem.slope(u), strength)
    return u, u


def red(problem: _Problem, x: Array, strength: float) -> tuple[Array, Array]:
    x = problem.near(problem.denoise(x, strength), strength)
    return x, x


Method = Callable[[_Problem, Array, float], tuple[Array, Array]]
METHODS: dict[str, Method] = {
    "hqs": half_quadratic,
    "admm": douglas_rachford,
    "forward-backward": forward_backward,
    "red": red,
}


@underflowing
def reconstruct(
    data: Any,
    forward: Forward,
    sigma: float,
    *,
    denoiser: Callable[[Array, float], Any] | None = None,
    method: str = "hqs",
    strength: Any = None,
    weight: float = WEIGHT,
    start: Any = None,
    maxiter: int = 100,
    rtol: float = 1e-3,
    progress: bool = False,
) -> Reconstruction:
    """Reconstruct a signal u from f = A u + noise, with a denoiser as the prior (plug-and-play, or RED).

    Where the denoiser D of strength s is the proximal map of s^2 R and mu is the `weight`, the methods look for the
    minimizer of |A u - f|^2 / (2 sigma^2) + mu R(u), with one strength exactly (``admm``, ``forward-backward``) or
    nearly (the others; see Notes):

    ``hqs``
        Half-quadratic splitting. x = argmin |A x - f|^2 / (2 sigma^2) + mu |x - z|^2 / (2 s^2), then z = D(x); the
        estimate is z. With falling strengths it is the method of Zhang et al. 2021.
    ``admm``
        z = D(v), x as above near 2 z - v, and v + x - z in place of v (Douglas-Rachford, which is ADMM in another
        variable); the estimate is z.
    ``forward-backward``
        D(u - s^2 / (mu sigma^2) A'(A u - f)), which needs s^2 |A|^2 < 2 mu sigma^2.
    ``red``
        Regularization by denoising: x as above near D(x), the estimate is x. Its fixed points solve A'(A u - f) /
        sigma^2 + mu (u - D(u)) / s^2 = 0.

    Parameters
    ----------
    data : array of the data's shape
        f, what was measured.
    forward : Forward
        A, with its adjoint.
    sigma : float
        Standard deviation of the noise in the data, in their units.
    denoiser : callable, optional
        ``denoiser(u, s)`` returns u without its white noise of strength s; ``Denoiser()`` by default. See also
        `Resolvent`.
    method : {'hqs', 'admm', 'forward-backward', 'red'}
    strength : float or sequence of float, optional
        Of the noise that the denoiser removes, in the units of the signal. A number means iterations to a fixed point;
        a sequence, such as ``numpy.geomspace(50, 2, 8)``, is a schedule with an iteration for each. By default a
        schedule of 8, from 0.8 of the estimated standard deviation of the signal down to sigma / |A|; for
        ``forward-backward`` the number sigma sqrt(mu) / |A|.
    weight : float
        mu > 0: larger for smoother results.
    start : array, optional
        First estimate; the constant that fits the data best by default.
    maxiter : int
        Most iterations with one strength.
    rtol : float
        With one strength the loop stops when an iteration changes its state by at most this share of its size, which a
        slow loop may do early: try a smaller one. Linear systems are solved to a tenth of `rtol`.
    progress : bool
        Progress bar on stderr.

    Returns
    -------
    Reconstruction
        Ctrl-C ends the loop and returns what there is, with status ``interrupted``.

    Raises
    ------
    InputError
        For data of another shape, NaN or infinity, sigma, strength or weight <= 0, and a denoiser that returns another
        shape or complex numbers.
    StabilityError
        For a strength beyond the limit of ``forward-backward``, as far as `Forward.squared_norm` tells it, which is
        from below: slightly beyond, the loop may end with ``diverged`` or ``not converged``.

    Notes
    -----
    Convergence with one strength is known for a D that is a proximal map of a convex function, such as a linear
    symmetric filter with eigenvalues in (0, 1]: ``admm`` and ``forward-backward`` then minimize the energy above,
    ``red`` that with the envelope of R, and ``hqs`` gives D of what ``red`` does (Combettes and Wajs 2005,
    doi 10.1137/050626090; Lions and Mercier 1979, doi 10.1137/0716071). Nothing of this is known for `nlflow.denoise`,
    which finds new groups in each call: use a schedule.

    An iteration costs one call of the denoiser and, except for ``forward-backward``, a number of applications of A and
    A' that grows at most as |A| s / (sigma sqrt(mu)).

    References
    ----------
    Venkatakrishnan, Bouman and Wohlberg 2013 (doi 10.1109/GlobalSIP.2013.6737048); Romano, Elad and Milanfar 2017
    (arXiv 1611.02862); Zhang, Li, Zuo, Zhang, Van Gool and Timofte 2021 (arXiv 2008.13751).

    Examples
    --------
    >>> import numpy as np
    >>> from nlflow.denoising.priors import Denoiser, Forward, reconstruct
    >>> clean = np.sign(np.sin(np.arange(400) / 20))
    >>> blur = Forward((lambda u: (np.roll(u, 1) + u) / 2, lambda v: (np.roll(v, -1) + v) / 2), 400)
    >>> data = blur.apply(clean) + np.random.default_rng(0).normal(0, 0.05, 400)
    >>> found = reconstruct(data, blur, 0.05, denoiser=Denoiser("fast"))
    >>> bool(found.success), bool(np.std(found.u - clean) < np.std(data - clean))
    (True, True)
    """
    if not isinstance(forward, Forward):
        raise InputError(f"forward: got {type(forward).__name__}, expected a Forward, which tests the adjoint")
    data = forward.check_data(data)
    sigma = check_number("sigma", sigma, minimum=0, strict=True)
    weight = check_number("weight", weight, minimum=0, strict=True)
    maxiter = check_integer("maxiter", maxiter, minimum=1)
    rtol = check_number("rtol", rtol, minimum=0, strict=True)
    step = METHODS[check_choice("method", method, tuple(METHODS))]
    if denoiser is None:
        denoiser = Denoiser()
    if not callable(denoiser):
        raise InputError(f"denoiser: got {type(denoiser).__name__}, expected a function of a signal and a strength")
    # In double precision, since linear systems are far from well conditioned.
    problem = _Problem(data.astype(np.float64), forward, sigma, weight, _checked(denoiser), 0.1 * rtol)
    first = problem.constant() if start is None else _start(start, problem)
    limit = problem.limit() if method == "forward-backward" else math.inf
    scheduled, strengths = _strengths(strength, problem, first, limit, maxiter)
    return _Loop(problem, step, first, progress).run(strengths, scheduled, rtol, data.dtype)


def _checked(denoiser: Callable[[Array, float], Any]) -> Callable[[Array, float], Array]:
    return lambda u, strength: check_denoised(denoiser(u, strength), u)


def _start(start: Any, problem: _Problem) -> Array:
    array = check_numpy("start", start)
    if array.shape != problem.forward.shape:
        raise InputError(f"start: got shape {array.shape}, expected {problem.forward.shape}, that of the operator")
    return array.astype(np.float64)


def _strengths(
    given: Any, problem: _Problem, first: Array, limit: float, maxiter: int
) -> tuple[bool, NDArray[np.float64]]:
    """Return whether there is a schedule, and the strength of each iteration."""
    if given is None and math.isfinite(limit):
        given = limit / math.sqrt(2)
    elif given is None:
        end = problem.sigma / math.sqrt(problem.forward.squared_norm)
        given = np.geomspace(max(0.8 * problem.spread(first), end), end, _STEPS)
    array = check_floats("strength", given, ndim=(0, 1))
    if array.min() <= 0:
        raise InputError(f"strength: got {array.min():g}, expected numbers > 0")
    if array.max() >= limit:
        raise StabilityError(
            f"strength: got {array.max():g}, expected < {limit:g} = sigma sqrt(2 mu) / |A| for 'forward-backward'; "
            "raise the weight, or use 'hqs' or 'admm', which have no such limit"
        )
    return (True, array) if array.ndim else (False, np.full(maxiter, float(array)))


class _Loop:
    """One run of a method, and what is told of each iteration."""

    def __init__(self, problem: _Problem, step: Method, first: Array, progress: bool) -> None:
        self.problem, self.step, self.progress = problem, step, progress
        self.state = self.estimate = first
        self.strength: list[float] = []
        self.change: list[float] = []
        self.misfit: list[float] = []

    def run(self, strengths: NDArray[np.float64], scheduled: bool, rtol: float, dtype: Any) -> Reconstruction:
        try:
            status, message = self._iterate(strengths.tolist(), -1.0 if scheduled else rtol)
        except KeyboardInterrupt:
            status, message = Status.INTERRUPTED, "interrupted; what was reached is returned"
        except NumericalError as failure:
            status, message = Status.STEP_FAILED, str(failure)
        if scheduled and status is Status.NOT_CONVERGED:
            status, message = Status.FINISHED, f"the schedule of {len(self.change)} strengths was followed"
        if self.misfit:
            message += f"; the residual is {self.misfit[-1]:.3g} of what the noise leaves"
        return Reconstruction(
            self.estimate.astype(dtype), status in (Status.FINISHED, Status.STOPPED), status, message,
            len(self.change), np.array(self.strength), np.array(self.change), np.array(self.misfit),
        )  # fmt: skip

    def _iterate(self, strengths: list[float], rtol: float) -> tuple[Status, str]:
        """Take the iterations; return how they ended, and the message."""
        largest = _LARGEST * float(np.linalg.norm(self.problem.near(self.state, strengths[0])))
        for strength in bar(strengths, progress=self.progress, unit="iteration"):
            new, estimate = self.step(self.problem, self.state, strength)
            size = float(np.linalg.norm(new))
            if not size <= largest:
                return Status.DIVERGED, (
                    f"the state grew beyond {_LARGEST:g} times its first size at strength {strength:g}: raise the "
                    "weight, or check sigma and the size of the operator"
                )
            self.strength.append(strength)
            self.change.append(float(np.linalg.norm(new - self.state)) / (size or 1.0))
            self.misfit.append(self.problem.misfit(estimate))
            self.state, self.estimate = new, estimate
            if self.change[-1] <= rtol:
                return Status.STOPPED, f"{self._found()}, within rtol={rtol:g}"
        return Status.NOT_CONVERGED, (
            f"{self._found()}, above rtol={rtol:g}: raise maxiter or rtol. A denoiser that looks for its patches anew "
            "need not have a fixed point: give a schedule of strengths, or a frozen filter (Resolvent)"
        )

    def _found(self) -> str:
        return f"iteration {len(self.change)} changes the state by {self.change[-1]:.3g} of its size"
