"""The functionals J and E."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np

from nlflow._array import (
    Array,
    Pending,
    check_untracked,
    namespace,
    over_channels,
    same_kind,
    underflowing,
    unit_of,
)
from nlflow.affinities import Affinity
from nlflow.affinities.checks import check_affinity
from nlflow.errors import (
    InputError,
    NumericalError,
    check_choice,
    check_detached,
    check_flag,
    check_integer,
    check_number,
    checked_call,
)
from nlflow.functionals.constraint import Constraint, Held, as_constraint
from nlflow.functionals.fidelity import Fidelity, NodeFidelity, as_fidelity, checked_method
from nlflow.functionals.krylov import default_rtol
from nlflow.functionals.metrics import MEASURES, Metric, as_metric
from nlflow.functionals.minimizer import (
    Minimizer,
    minimize,
    minimize_direct,
    minimize_held,
    minimize_source,
)
from nlflow.functionals.preconditioners.choice import PRECONDITIONERS, is_graph

_LARGEST = math.log(np.finfo(np.float64).max)
_OVERFLOWS = "value: the squares of the signal overflow; scale it down (J and E are quadratic)"


@checked_call
@underflowing
class J:
    """Nonlocal Dirichlet energy, J(u) = 1/2 sum_ij w_i w_j k_ij |u_i - u_j|^2 (arXiv 2312.00751, eq. 5).

    Parameters
    ----------
    affinity : Affinity
        Of k; it is symmetrized to K = k + k^T here.

    Examples
    --------
    >>> import numpy as np
    >>> from nlflow import Gaussian, J, Points, affinity
    >>> j = J(affinity(Gaussian(width=1.0), Points([0.0, 1.0], weights=[1.0, 1.0])))
    >>> round(j.value(np.array([0.0, 2.0])), 6), round(4 * float(np.exp(-0.5)), 6)
    (2.426123, 2.426123)
    """

    def __init__(self, affinity: Affinity) -> None:
        self.given = check_affinity(affinity)
        self.affinity = affinity.symmetrized()

    def with_affinity(self, affinity: Affinity) -> J:
        """Return the functional of another affinity."""
        return type(self)(affinity)

    def _form(self, u: Array, average: Array | None, unit: Array | float) -> Array:
        """Return 2 J / sum(w d) of u / unit, up to rounding below 0.

        sum_i pi_i u_i . (u_i - (Pu)_i), formed about the mean so that nothing cancels.
        """
        xp = namespace(u)
        average = self.affinity._average(u) if average is None else average
        measure = over_channels(self.affinity.measure("degree", u), u)
        u, average = u / unit, average / unit
        centred = u - self.affinity.mean(u, "degree")
        # P 1 = 1, so u - Pu needs no second average for the centred signal.
        return xp.sum(measure * centred * (u - average), dtype=xp.float64)

    def _scaled(self, value: float, normalize: bool, unit: float, total: tuple[float, ...]) -> float:
        """Return unit^2 value, times sum(w d) unless it is to be normalized."""
        if value == 0:
            return value
        if normalize:
            return _product(value, unit)
        log_total = total[0] + math.log(total[1])
        exponent = math.log(value) + 2 * math.log(unit) + log_total
        if exponent > _LARGEST > log_total:
            raise NumericalError(_OVERFLOWS)
        if exponent > _LARGEST:
            raise NumericalError(
                f"value: the sum of degrees is exp({log_total:.4g}), too large for a float; ask for "
                "value(u, normalize=True), which divides by it"
            )
        return math.exp(exponent)

    def value(self, u: Array, *, normalize: bool = False, average: Array | None = None) -> float:
        """Return the functional's value; one average.

        Parameters
        ----------
        u : array of shape ``domain.shape`` or ``domain.shape + (D,)``
        normalize : bool
            Divide by sum_i w_i d_i.
        average : array, optional
            Pu, if it is known already.

        Raises
        ------
        NumericalError
            When the value overflows.
        """
        check_flag("normalize", normalize)
        u = self.affinity.check_signal("u", u)
        if average is not None:
            average = self.affinity.check_signal("average", average)
        with np.errstate(over="ignore", invalid="ignore"):  # found out in what comes of it
            value = float(self.pending(u, normalize=normalize, average=average))
        if math.isnan(value):
            raise NumericalError(_OVERFLOWS)
        return value

    def pending(self, u: Array, *, normalize: bool = False, average: Array | None = None) -> Pending:
        """Return the value, maybe still on a device."""
        unit = unit_of(u)

        def formed(unit: float, form: float, *total: float) -> float:
            return self._scaled(max(0.5 * form, 0.0), normalize, unit, total)

        return Pending(formed, unit, self._form(u, average, unit), *self.affinity.total_parts())

    def gradient(self, u: Array, metric: str | Metric = "l2", *, average: Array | None = None) -> Array:
        """Return the gradient in a metric, for J Lu (``l2``) or u - Pu (``degree``)."""
        inner = as_metric(metric)
        u = self.affinity.check_signal("u", u)
        average = self.affinity.average(u) if average is None else self.affinity.check_signal("average", average)
        gradient = u - average
        rate = inner.rate(self.affinity)
        if isinstance(rate, float):
            return self._moved(inner, gradient)
        with np.errstate(over="ignore"):  # found out in what comes of it
            gradient = over_channels(rate, u) * gradient
        return _in_range(self._moved(inner, gradient))

    def _moved(self, inner: Metric, force: Array) -> Array:
        rate = 1.0 if inner.by_nodes else inner.rate(self.affinity)
        return inner.moved(force, lambda v: over_channels(rate, v) * (v - self.affinity.average(v)))

    def value_and_gradient(
        self, u: Array, metric: str | Metric = "l2", *, normalize: bool = False
    ) -> tuple[float, Array]:
        """Return value and gradient, which share an average."""
        average = self.affinity.average(u)
        return self.value(u, normalize=normalize, average=average), self.gradient(u, metric, average=average)

    def minimizer(
        self,
        *,
        constraint: Constraint | Held | None = None,
        rtol: float | None = None,
        maxiter: int = 10_000,
        start: Array | None = None,
        preconditioner: str = "auto",
    ) -> Minimizer:
        """Return the harmonic extension: the minimizer of J among the signals with the values of a constraint.

        For the arguments see `E.minimizer`; there is no ``transform``.

        Raises
        ------
        InputError
            Without a constraint; for values that depend on time; where a part of the domain sees no constrained node.
        """
        held = as_constraint(self.affinity, constraint)
        if held is None:
            raise InputError(
                "constraint: got none, so every constant minimizes J; give it values at some nodes, take E with a "
                "fidelity > 0, or the potential() of a source"
            )
        zeros = held.zeros(self.affinity) if start is None else 0 * self.affinity.check_signal("start", start)
        check_untracked("features", self.affinity.tracked, "the steps of nlflow.flows.derivatives.run")
        options = self._options(zeros, rtol, maxiter, start, preconditioner)
        return minimize_held(self.affinity, NodeFidelity(0.0), zeros, held, **options)

    def potential(
        self,
        source: Array,
        *,
        constraint: Constraint | Held | None = None,
        rtol: float | None = None,
        maxiter: int = 10_000,
        start: Array | None = None,
        preconditioner: str = "auto",
    ) -> Minimizer:
        """Return the potential u of a source s, Lu = s (Poisson's equation).

        Without a constraint u has mean 0 in the degree measure, on each connected component where these are known.

        Parameters
        ----------
        source : array of shape ``domain.shape`` or ``domain.shape + (D,)``
            s, with sum_i w_i s_i = 0 on each component, if there is no constraint.
        constraint : Constraint, optional
            Values of u at some nodes, where s does not count.
        rtol, maxiter, start, preconditioner
            See `E.minimizer`; there is no ``transform``.

        Raises
        ------
        InputError
            For a source that does not sum to 0, a wrong shape, NaN or infinity, and where a part of the domain sees no
            node of a constraint.
        """
        s = self.affinity.check_signal("source", source)
        tracked = self.affinity.tracked or getattr(s, "requires_grad", False)
        check_untracked("source or features", tracked, "the steps of nlflow.flows.derivatives.run")
        options = self._options(s, rtol, maxiter, start, preconditioner)
        held = as_constraint(self.affinity, constraint)
        if held is None:
            return minimize_source(self.affinity, s, **options)
        rate = NodeFidelity(1.0).over_degree(self.affinity.log_degree, s).times(s)
        return minimize_held(self.affinity, NodeFidelity(0.0), 0 * s, held, source=rate, **options)

    def _options(
        self, like: Array, rtol: float | None, maxiter: int, start: Array | None, preconditioner: str
    ) -> dict[str, Any]:
        if start is not None:
            check_detached("start", start)
            start = check_shape("start", self.affinity.check_signal("start", start), like)
        return {
            "rtol": check_number("rtol", default_rtol(like) if rtol is None else rtol, minimum=0, strict=True),
            "maxiter": check_integer("maxiter", maxiter, minimum=1),
            "start": start,
            "name": check_choice("preconditioner", preconditioner, (*PRECONDITIONERS, "direct")),
        }

    def fidelity_in(self, metric: str | Metric) -> Fidelity | None:
        """See `E.fidelity_in`."""
        as_metric(metric)
        return None

    @property
    def observed(self) -> Array | None:
        """None for J."""
        return None


@checked_call
@underflowing
class E(J):
    """Nonlocal Dirichlet energy with a fidelity term, E = J + 1/2 sum_i m_i lambda_i |u_i - f_i|^2.

    (arXiv 2312.00751, eq. 21 and Proposition 1.) With a matrix for each node the term is
    1/2 sum_i m_i (u_i - f_i)^T Lambda_i (u_i - f_i).

    Parameters
    ----------
    affinity : Affinity
        Of k; it is symmetrized to K = k + k^T here.
    observed : array of shape ``domain.shape`` or ``domain.shape + (D,)``
        The signal f.
    fidelity : float, or array of shape ``domain.shape`` or ``domain.shape + (D, D)``
        lambda >= 0 (``measure='l2'``) or lambda~ >= 0 (``measure='degree'``), 0 where data is missing; or a symmetric
        positive semidefinite matrix for each node, where node axes of length 1 are shared.
    measure : {'l2', 'degree'}
        The weight m: w, or w d with the degree d of K = k + k^T, for a symmetric k twice that of `affinity`. With
        ``degree`` lambda~ is that of a NeuTRENO layer in the degree metric.

    Raises
    ------
    InputError
        For a negative fidelity, a matrix that is not symmetric positive semidefinite, a wrong shape, NaN or infinity.
    """

    def __init__(
        self, affinity: Affinity, observed: Any, fidelity: float | Array | Fidelity, *, measure: str = "l2"
    ) -> None:
        super().__init__(affinity)
        signal = self.affinity.check_signal("observed", observed)
        self._observed = namespace(signal).astype(signal, signal.dtype, copy=True)  # the functional stays what it is
        self.measure = check_choice("measure", measure, MEASURES)
        self._fidelity = as_fidelity(fidelity, self._observed, self.affinity)

    def with_affinity(self, affinity: Affinity) -> E:
        return E(affinity, self._observed, self._fidelity, measure=self.measure)

    def with_observed(self, observed: Array) -> E:
        """Return the functional with another f of the same shape and dtype."""
        result = copy.copy(self)
        signal = check_shape("observed", self.affinity.check_signal("observed", observed), self._observed)
        same_kind("observed", signal, self._observed)
        result._observed = namespace(signal).astype(signal, signal.dtype, copy=True)  # it stays what it is
        return result

    @property
    def tracked(self) -> bool:
        """Whether features, f or the fidelity require a gradient."""
        return self.affinity.tracked or self._fidelity.tracked or getattr(self._observed, "requires_grad", False)

    @property
    def fidelity(self) -> Array | float:
        """A number, one for each node, or a matrix for each node."""
        return self._fidelity.stated(self._observed)

    @property
    def observed(self) -> Array:
        """The signal f."""
        return self._observed

    def fidelity_in(self, metric: str | Metric) -> Fidelity:
        """Return the fidelity's operator in the gradient in a metric."""
        measure = as_metric(metric).measure
        if measure == self.measure:
            return self._fidelity
        if measure == "l2":
            return checked_method(self._fidelity, "scaled", self.affinity.degree)
        return checked_method(self._fidelity, "over_degree", self.affinity.log_degree, self._observed)

    def value(self, u: Array, *, normalize: bool = False, average: Array | None = None) -> float:
        u = check_shape("u", self.affinity.check_signal("u", u), self._observed)
        return super().value(u, normalize=normalize, average=average)

    def pending(self, u: Array, *, normalize: bool = False, average: Array | None = None) -> Pending:
        xp = namespace(u)
        unit = unit_of(u, self._observed)
        misfit = u / unit - self._observed / unit
        measure = over_channels(self.affinity.measure(self.measure, u), u)
        with np.errstate(over="ignore", invalid="ignore"):
            weighted = self._fidelity.times(misfit) * misfit
            pull = xp.sum(measure * weighted, dtype=xp.float64)

        def formed(unit: float, form: float, pull: float, *total: float) -> float:
            return self._sum(max(0.5 * form, 0.0), 0.5 * pull, normalize, unit, total)

        return Pending(formed, unit, self._form(u, average, unit), pull, *self.affinity.total_parts())

    def _sum(self, dirichlet: float, fidelity: float, normalize: bool, unit: float, total: tuple[float, ...]) -> float:
        """Return the value from its two parts, of signals over `unit` and the first over sum(w d)."""
        if not math.isfinite(fidelity):
            raise NumericalError("value: the fidelity times the misfit overflows; scale one of them down")
        if self.measure == "degree":
            return self._scaled(dirichlet + fidelity, normalize, unit, total)
        if normalize:
            if fidelity == 0:
                return _product(dirichlet, unit)
            exponent = math.log(fidelity) + 2 * math.log(unit) - (total[0] + math.log(total[1]))
            if exponent > _LARGEST:
                raise NumericalError("value: the degrees are so small that value / sum(w d) overflows; normalize=False")
            return _product(dirichlet, unit) + math.exp(exponent)
        return self._scaled(dirichlet, normalize, unit, total) + _product(fidelity, unit)

    def gradient(self, u: Array, metric: str | Metric = "l2", *, average: Array | None = None) -> Array:
        dirichlet = super().gradient(u, metric, average=average)
        check_shape("u", u, self._observed)
        with np.errstate(over="ignore", invalid="ignore"):  # found out in what comes of it
            force = self.fidelity_in(metric).times(u - self._observed)
            gradient = dirichlet + self._moved(as_metric(metric), force)
        return _in_range(gradient)

    def minimizer(
        self,
        *,
        constraint: Constraint | Held | None = None,
        rtol: float | None = None,
        maxiter: int = 10_000,
        start: Array | None = None,
        preconditioner: str = "auto",
    ) -> Minimizer:
        """Return the minimizer u*, (L + lambda) u* = lambda f, by preconditioned conjugate gradients.

        One average an iteration, and those of the preconditioner. On a part of the domain that sees no node with a
        fidelity > 0 u is one of many minimizers, and its error has no bound.

        Parameters
        ----------
        constraint : Constraint, optional
            Values of u at some nodes; then the fidelity may be 0 everywhere.
        rtol : float, optional
            Residual relative to the right-hand side, rows over 1 + lambda~; 1e-10 in float64 and 1e-5 in float32 by
            default.
        maxiter : int
        start : array, optional
            First guess; f by default, or a constant for a transform.
        preconditioner : {'auto', 'diagonal', 'transform', 'multigrid', 'graph', 'sweeps', 'direct'}
            ``auto`` chooses among the next three:

            - ``diagonal``
            - ``transform``: position kernels on periodic and reflecting grids
            - ``multigrid``: stencils and graphs of NumPy features
            - ``direct``: sparse elimination for a symmetric graph of edges; without a constraint also Cholesky's method
              for dense affinities, N^3 / 3 operations
            - ``sweeps``: Gauss-Seidel in float32, for a symmetric graph of edges
            - ``graph``: up to 2048 nodes ``direct`` where it loses no digits, else ``sweeps``, then multigrid

        Raises
        ------
        InputError
            Where every constant is a minimizer; for a preconditioner that does not exist for this functional; with a
            constraint where a part of the domain sees neither a constrained node nor one with a fidelity > 0.
        MemoryLimitError
            When ``multigrid`` or ``direct`` is asked for and its set-up would pass the limit.
        """
        f = self._observed
        check_untracked("observed, fidelity or features", self.tracked, "nlflow.flows.derivatives.minimizer")
        options = self._options(f, rtol, maxiter, start, preconditioner)
        held = as_constraint(self.affinity, constraint)
        if held is not None:
            with self.affinity.within_memory(f):
                return minimize_held(self.affinity, self.fidelity_in("degree"), f, held, **options)
        if self._fidelity.bounds()[1] == 0:
            raise InputError(
                "fidelity: got 0 at every node, so every constant minimizes the functional; set it > 0 somewhere, or "
                "follow the J-flow to its limit"
            )
        fidelity = self.fidelity_in("degree")
        if fidelity.bounds()[1] == 0:
            raise NumericalError("degree: so large that fidelity / degree underflows to 0; use measure='degree'")
        if options["name"] == "direct" and not is_graph(self.affinity):
            return minimize_direct(self.affinity, fidelity, f, options["rtol"])
        with self.affinity.within_memory(f):
            return minimize(self.affinity, fidelity, f, **options)


def check_shape(name: str, signal: Array, observed: Array) -> Array:
    if tuple(signal.shape) != tuple(observed.shape):
        raise InputError(
            f"{name}: got shape {tuple(signal.shape)}, expected {tuple(observed.shape)}, that of the observed signal"
        )
    return signal


def _product(value: float, unit: float) -> float:
    if value * unit * unit == math.inf:
        raise NumericalError(_OVERFLOWS)
    return value * unit * unit


def _in_range(gradient: Array) -> Array:
    xp = namespace(gradient)
    if not bool(xp.all(xp.isfinite(gradient))):
        raise NumericalError("gradient: degree or fidelity times the signal overflows; scale one of them down")
    return gradient
