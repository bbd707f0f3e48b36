"""Choice of the fidelity, and of widths, from the observed signal."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from nlflow._array import Array, Brief, Floats, scalar, to_numpy, underflowing
from nlflow.equilibria.field import check_energy
from nlflow.equilibria.sums import METHODS as TRACES
from nlflow.equilibria.sums import Sums, check_estimates, measure_of, observed_sums, positive, spectral_sums
from nlflow.errors import (
    InputError,
    NumericalError,
    check_choice,
    check_increasing,
    check_number,
    checked_call,
    kind_of,
)
from nlflow.flows.functions import symmetric_flow
from nlflow.functionals.energies import E, J

METHODS = ("rgcv", "gcv", "sure", "discrepancy", "evidence", "lcurve")
_WANTS_SIGMA = ("sure", "discrepancy")
_ROBUST = 0.3  # share of the plain criterion in the robust one; Lukas finds 0.1 to 0.3 good
_GRID = 61  # fidelities that are tried where none are given
_REFINED = 1e-6  # relative width at which the search between two of them ends


@dataclass(frozen=True, repr=False)
class Choice(Brief):
    """A parameter that was chosen, and the criterion for it.

    Attributes
    ----------
    value : float
        The fidelity, or another parameter.
    energy : E
        With that parameter.
    method : {'rgcv', 'gcv', 'sure', 'discrepancy', 'evidence', 'lcurve'}
    values : array of shape (M,)
        Those that were tried.
    curve : array of shape (M,)
        The criterion, smallest at the choice: for `gcv` and `sure` an estimate of the mean squared error (plus the
        variance of the noise for `gcv`), for `discrepancy` the distance of the residual from ``factor * sigma``, for
        `evidence` minus the log marginal likelihood, for `lcurve` minus the curvature.
    trace, trace_error : array of shape (M,)
        tr S, the degrees of freedom of the signal, and half the width of its 95 % interval; 0 where it is exact.
    residual, roughness : array of shape (M,)
        Root mean square of f - u in the measure of E, channels averaged; and <u, A u>.
    traces : {'transform', 'dense', 'lanczos'}
        How sums over the spectrum were taken.
    averages : int
        Averages taken, without those that form a matrix.
    success : bool
        Whether the minimum is inside the range, by more than the error of random traces.
    message : str
    """

    value: float
    energy: E
    method: str
    values: Floats
    curve: Floats
    trace: Floats
    trace_error: Floats
    residual: Floats
    roughness: Floats
    traces: str
    averages: int
    success: bool
    message: str

    def plot(self, axis: Any) -> None:
        """Draw the criterion and the choice on an axis of Matplotlib."""
        axis.plot(self.values, self.curve, color="#0b5394", linewidth=1.8)
        axis.axvline(self.value, color="#d1711c", linestyle="--", linewidth=1.2)
        axis.set(xscale="log", xlabel="parameter", title=f"{self.method}: {self.value:.4g}")


class _Criteria:
    """The criteria of one E at fidelities lambda, from sums over the spectrum of its J."""

    def __init__(self, energy: E, method: str, sigma: float | None, factor: float, options: dict[str, Any]) -> None:
        self._method, self._sigma, self._factor = method, sigma, factor
        observed = energy.observed
        measure = measure_of(energy)
        size = scalar(abs(observed).max())
        if size > 0 and not 1e-140 < size < 1e140:
            raise InputError(
                f"energy: got an observed signal of size {size:.3g}, expected one whose square a float can hold; "
                "change the unit"
            )
        self._channels = 1 if observed.ndim == measure.ndim else int(observed.shape[-1])
        flow = symmetric_flow(J(energy.given), energy.measure)
        self.largest = flow.spectral_bounds()[1]
        self.sums: Sums
        if isinstance(energy.fidelity, float):
            # Sums of the flow's measure, which is over its sum in the degree metric, in that of E.
            self._unit = float(measure.sum()) / scalar(flow.measure(observed).sum())
            self.sums = spectral_sums(flow, observed, **options, gap=method == "evidence")
        else:
            if options["method"] not in ("auto", "dense"):
                raise InputError(f"traces: got {options['method']!r}, expected 'auto' with a fidelity for each node")
            self._unit = 1.0
            self.sums, measure = observed_sums(energy, np.asarray(to_numpy(energy.fidelity), np.float64))
        self._n, self._mass = measure.size, float(measure.sum())
        total = self._unit * self.sums.form(np.ones_like)[0]
        if not total > 1e-24 * size**2 * self._mass:  # of a constant rounding is left
            raise InputError("energy: got a constant observed signal, expected one that varies, or no fidelity is best")
        if not self.trace(1e-12 * self.largest)[0] < self._n:
            raise InputError(
                f"energy: got {self._n} node(s) of which none sees another in float64, expected some that do: without, "
                "every fidelity leaves the signal as it is; use a wider kernel, or smaller logits"
            )
        self._log_measure = float(np.log(measure).sum())

    def mean_square(self, strength: float) -> float:
        """Return the mean of |f - u|^2 in the measure of E, and over channels."""
        value, _ = self.sums.form(lambda a: (a / (a + strength)) ** 2)
        return self._unit * value / (self._mass * self._channels)

    def roughness(self, strength: float) -> float:
        return self._unit * self.sums.form(lambda a: a * (strength / (a + strength)) ** 2)[0]

    def trace(self, strength: float) -> tuple[float, float]:
        found = self.sums.trace(lambda a: strength / (a + strength))
        return 1 + found.value, found.error

    def __call__(self, strength: float) -> float:
        if self._method == "lcurve":
            return -self._curvature(strength)
        if self._method == "evidence":
            return -self._evidence(strength)
        residual = self.mean_square(strength)
        if self._method == "discrepancy":
            assert self._sigma is not None
            return abs(math.sqrt(residual) - self._factor * self._sigma)
        share = self.trace(strength)[0] / self._n
        if share == 1:
            raise NumericalError(f"values: {strength:g} is so large that nothing is smoothed in floats; end with less")
        if self._method in ("gcv", "rgcv"):
            plain = residual / (1 - share) ** 2
            return plain if self._method == "gcv" else plain * self._robust(strength)
        assert self._sigma is not None
        return residual + self._sigma**2 * (2 * share - 1)

    def _robust(self, strength: float) -> float:
        squares = 1 + self.sums.trace(lambda a: (strength / (a + strength)) ** 2).value
        return _ROBUST + (1 - _ROBUST) * squares / self._n

    def is_rough(self, strength: float) -> bool:
        """Whether the residual is above what is wanted of it."""
        assert self._sigma is not None
        return math.sqrt(self.mean_square(strength)) > self._factor * self._sigma

    def doubt(self, strength: float) -> float:
        """Return by how much the criterion may change within the interval of its trace."""
        if self._method in ("discrepancy", "lcurve") or self.sums.method != "lanczos":
            return 0.0
        if self._method == "evidence":
            logs = self.sums.trace(lambda a: np.log(positive(a) / (a + strength)))
            return self._channels * logs.error / 2
        trace, error = self.trace(strength)
        if self._method == "sure":
            assert self._sigma is not None
            return 2 * self._sigma**2 * error / self._n
        left = 1 - trace / self._n
        return 2 * self(strength) * error / self._n / left if left > 0 else math.inf

    def _evidence(self, strength: float) -> float:
        n, channels = self._n, self._channels
        least = 0.5 * self._unit * self.sums.form(lambda a: strength * a / (a + strength))[0]
        logs = self.sums.trace(lambda a: np.log(positive(a) / (a + strength))).value
        free = (n - 1) * channels
        if self._sigma is None:
            beta = free / (2 * least)  # the likeliest
        else:
            beta = self._n / (self._sigma**2 * self._mass * strength)
        value = logs + (n - 1) * math.log(strength) + self._log_measure + math.log(n) - math.log(self._mass)
        return 0.5 * channels * value + 0.5 * free * math.log(beta / (2 * math.pi)) - beta * least

    def _curvature(self, strength: float) -> float:
        """Return that of log roughness over log residual; > 0 at a corner of an L.

        With their slopes x and y over log lambda it is x y (1 + x - y) / (x^2 + y^2)^3/2: both come from one sum, whose
        own slope cancels. (Hansen and O'Leary 1993, doi 10.1137/0914086.)
        """
        rest = self.sums.form(lambda a: (a / (a + strength)) ** 2)[0]
        rough = self.sums.form(lambda a: a * (strength / (a + strength)) ** 2)[0]
        third = self.sums.form(lambda a: a**2 / (a + strength) ** 3)[0]
        if not min(rest, rough) > 0:
            return 0.0
        x, y = -2 * strength * third / rest, 2 * strength**2 * third / rough
        return float(x * y * (1 + x - y) / (x**2 + y**2) ** 1.5)


@checked_call
@underflowing
def choose_fidelity(
    energy: E,
    values: Any = None,
    *,
    method: str = "rgcv",
    sigma: float | None = None,
    factor: float = 1.0,
    traces: str = "auto",
    samples: int = 8,
    averages: int = 100,
    rng: Any = 0,
) -> Choice:
    r"""Return E with the fidelity that a criterion finds best for its observed signal.

    u = S f with S = lambda (A + lambda)^-1, A being r (I - P) in the measure of E.

    Parameters
    ----------
    energy : E
        Its fidelity is one number, which does not matter, or one for each of up to 2000 nodes, which a factor
        multiplies; nodes where it is 0 are not observed.
    values : array of shape (M,), optional
        Increasing fidelities, or factors, to search between; from 1e-5 to 10 times the bound of the eigenvalues by
        default.
    method : {'rgcv', 'gcv', 'sure', 'discrepancy', 'evidence', 'lcurve'}
        - ``gcv``: generalized cross-validation, \|f - u\|^2 / (1 - tr S / N)^2 (Golub, Heath and Wahba 1979, doi
          10.1080/00401706.1979.10489751). For large lambda its curve is flat, and may have its minimum there.
        - ``rgcv``: the robust form of it, times 0.3 + 0.7 tr S^2 / N (Lukas 2006, doi 10.1088/0266-5611/22/5/021).
        - ``sure``: Stein's unbiased estimate of the mean squared error, \|f - u\|^2 - sigma^2 + 2 sigma^2 tr S / N.
        - ``discrepancy``: the residual that is ``factor * sigma`` (Morozov).
        - ``evidence``: the restricted marginal likelihood of f under the prior exp(-beta J); beta is the likeliest, or
          that of sigma.
        - ``lcurve``: the corner of log roughness over log residual (Hansen 1992, doi 10.1137/1034115).
    sigma : float, optional
        Standard deviation of the noise, root mean square in the measure of E over observed nodes: for ``sure`` and
        ``discrepancy``, and in place of the likeliest beta for ``evidence``.
    factor : float
        For ``discrepancy``.
    traces : {'auto', 'transform', 'dense', 'lanczos'}
        Sums over the spectrum: exact by a transform, or from all eigenvalues (``auto``: up to 2000 nodes); else by
        Lanczos iteration for the channels of f and random signs.
    samples, averages : int
        Random signals, and steps of Lanczos iteration.
    rng : seed or numpy.random.Generator

    Returns
    -------
    Choice

    Raises
    ------
    InputError
        For J, a fidelity that mixes channels, one for each of more than 2000 nodes, a batch, nodes of which none sees
        another; for ``sure`` and ``discrepancy`` without a sigma; for fewer than three values, or such as do not
        increase.
    NumericalError
        For ``evidence`` on a graph of several components.

    Examples
    --------
    >>> import numpy as np
    >>> from nlflow import E, Gaussian, Grid, affinity
    >>> from nlflow.equilibria import choose_fidelity
    >>> grid = Grid(400, boundary="reflect")
    >>> clean = np.sin(grid.nodes[:, 0] / 30)
    >>> f = clean + np.random.default_rng(0).normal(0, 0.3, 400)
    >>> found = choose_fidelity(E(affinity(Gaussian(3.0), grid), f, 1.0))
    >>> found.success, bool(np.std(found.energy.minimizer().u - clean) < 0.1)
    (True, True)
    """
    energy = check_energy(energy)
    method, factor = _check_method(method, sigma, factor)
    sigma = None if sigma is None else check_number("sigma", sigma, minimum=0, strict=True)
    check_estimates(samples, averages, rng)
    options: dict[str, Any] = {
        "method": check_choice("traces", traces, TRACES),
        "samples": samples,
        "averages": averages,
        "rng": rng,
    }
    criteria = _Criteria(energy, method, sigma, factor, options)
    if values is None:
        grid = criteria.largest * np.geomspace(1e-5, 10, _GRID)
    else:
        grid = check_increasing("values", values, "fidelities", least=3, minimum=0, strict=True)
    curve = np.array([criteria(float(one)) for one in grid])
    best = _best(method, criteria, grid, curve)
    inside = 0 < best < len(grid) - 1
    value = _refined(criteria, grid, best) if inside else float(grid[best])
    chosen = E(energy.given, energy.observed, _times(energy.fidelity, value), measure=energy.measure)
    return _told(value, chosen, method, grid, curve, [criteria] * len(grid), list(grid), best)


@checked_call
@underflowing
def choose_parameter(
    build: Callable[[Any], E],
    values: Any,
    *,
    method: str = "evidence",
    sigma: float | None = None,
    factor: float = 1.0,
    traces: str = "auto",
    samples: int = 8,
    averages: int = 100,
    rng: Any = 0,
) -> Choice:
    """Return the E, among those with different widths or kernels, that a criterion finds best.

    Parameters
    ----------
    build : callable
        Returns E for a value, all with the same observed signal.
    values : array of shape (M,)
        Increasing, at least three.
    method : {'evidence', 'rgcv', 'gcv', 'sure', 'discrepancy'}
        See `choose_fidelity`; each E is weighed at its own fidelity.
    sigma, factor, traces, samples, averages, rng
        See `choose_fidelity`.

    Returns
    -------
    Choice
    """
    if not callable(build):
        raise InputError(f"build: got {kind_of(build)}, expected a callable that returns E for a value")
    method, factor = _check_method(method, sigma, factor)
    if method == "lcurve":
        raise InputError("method: got 'lcurve', expected another one: it compares fidelities alone")
    sigma = None if sigma is None else check_number("sigma", sigma, minimum=0, strict=True)
    grid = check_increasing("values", values, least=3)
    check_estimates(samples, averages, rng)
    options: dict[str, Any] = {
        "method": check_choice("traces", traces, TRACES),
        "samples": samples,
        "averages": averages,
        "rng": rng,
    }
    energies = [check_energy(build(float(one)), "build") for one in grid]
    _check_same(energies)
    strengths = [_one(energy) for energy in energies]
    criteria = [_Criteria(energy, method, sigma, factor, options) for energy in energies]
    curve = np.array([one(strength) for one, strength in zip(criteria, strengths, strict=True)])
    best = int(np.argmin(curve))
    return _told(float(grid[best]), energies[best], method, grid, curve, criteria, strengths, best)


def _times(fidelity: Array | float, value: float) -> Array | float:
    """Return a fidelity of one number, or the given one of nodes times a number."""
    return value if isinstance(fidelity, float) else fidelity * value


def _one(energy: E) -> float:
    """Return what the fidelity is beside that of `_Criteria`: the number, or 1 for one for each node."""
    if not isinstance(energy.fidelity, float):
        return 1.0
    if energy.fidelity == 0:
        raise InputError("build: it returned E with a fidelity of 0, expected one > 0")
    return energy.fidelity


def _check_same(energies: list[E]) -> None:
    first = to_numpy(energies[0].observed)
    if not all(np.array_equal(first, to_numpy(energy.observed)) for energy in energies):
        raise InputError("build: it returned E with other observed signals, expected the same in all of them")


def _check_method(method: str, sigma: Any, factor: Any) -> tuple[str, float]:
    method = check_choice("method", method, METHODS)
    if method in _WANTS_SIGMA and sigma is None:
        raise InputError(f"sigma: needed for method={method!r}, the standard deviation of the noise; 'gcv' needs none")
    return method, check_number("factor", factor, minimum=0, strict=True)


def _best(method: str, criteria: _Criteria, grid: Floats, curve: Floats) -> int:
    if method != "discrepancy":
        return int(np.argmin(curve))
    # The residual falls with the fidelity: its place is where it crosses, which need not be at a minimum of the values.
    above = np.array([criteria.is_rough(float(one)) for one in grid])
    if not above[0]:
        return 0
    return len(grid) - 1 if above[-1] else int(np.clip(np.argmin(curve), 1, len(grid) - 2))


def _refined(criteria: _Criteria, grid: Floats, best: int) -> float:
    """Return the fidelity of the smallest criterion between the neighbours of the best of the grid."""
    from scipy.optimize import minimize_scalar

    ends = tuple(np.log(grid[[best - 1, best + 1]]))
    found = minimize_scalar(lambda x: criteria(math.exp(x)), bounds=ends, method="bounded", options={"xatol": _REFINED})
    value = math.exp(float(found.x))
    return value if criteria(value) <= criteria(float(grid[best])) else float(grid[best])


def _told(
    value: float, energy: E, method: str, grid: Floats, curve: Floats, criteria: list[_Criteria],
    strengths: list[float], best: int,
) -> Choice:  # fmt: skip
    pairs = [(one, float(strength)) for one, strength in zip(criteria, strengths, strict=True)]
    found = [one.trace(strength) for one, strength in pairs]
    inside = 0 < best < len(grid) - 1
    message = f"{method}: {value:.6g}"
    if not inside:
        message += f", the {'first' if best == 0 else 'last'} of the values: the best may be beyond; give a wider range"
    doubt = pairs[best][0].doubt(pairs[best][1])
    known = doubt <= max(float(min(curve[0], curve[-1]) - curve[best]), 0.0)
    if not known:
        message += f"; random traces leave {doubt:.3g} of the criterion open, more than to an end: raise samples"
    return Choice(
        value, energy, method, grid, curve, np.array([trace for trace, _ in found]),
        np.array([error for _, error in found]),
        np.array([math.sqrt(max(one.mean_square(strength), 0.0)) for one, strength in pairs]),
        np.array([one.roughness(strength) for one, strength in pairs]),
        criteria[0].sums.method, max(one.sums.averages for one in criteria), inside and known, message,
    )  # fmt: skip
