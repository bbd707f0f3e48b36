"""Functions of the linear operator A of a flow."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.sparse.linalg import LinearOperator

from nlflow._array import (
    Array,
    Brief,
    Floats,
    check_untracked,
    constant_like,
    is_numpy,
    kept_like,
    namespace,
    over_channels,
    scalar,
    to_numpy,
    underflowing,
)
from nlflow.affinities import Affinity, SparseAffinity
from nlflow.errors import (
    InputError,
    NumericalError,
    check_choice,
    check_detached,
    check_floats,
    check_integer,
    check_memory,
    check_number,
    checked_call,
    is_function,
    kind_of,
)
from nlflow.flows.gradient import GradientFlow
from nlflow.flows.integrators.exponential import chebyshev_coefficients, chebyshev_sums
from nlflow.flows.linear import LinearFlow
from nlflow.flows.spectrum import dense_operator, on_columns, relaxation_rate
from nlflow.functionals.energies import J
from nlflow.functionals.fidelity import NodeFidelity
from nlflow.functionals.krylov import Lanczos
from nlflow.functionals.metrics import Metric
from nlflow.functionals.minimizer import inner_product
from nlflow.functionals.preconditioners.transform import Diagonal

METHODS = ("auto", "transform", "dense", "chebyshev", "lanczos")
_DENSE_NODES = 400  # up to which ``auto`` takes the whole matrix
_LONG = 2**11  # samples of g for the longest expansion that ``auto`` takes
_LOOK = 10  # steps of Lanczos iteration between two looks at its error
_LARGEST = 1e140  # whose square, summed over nodes, a float holds
_NEAR = 1e-7  # of the interval: eigenvalues of T so near to a point say nothing about a quotient there

Function = Callable[[Floats], Any]


@dataclass(frozen=True, repr=False)
class FunctionValue(Brief):
    """g(A) v and its error.

    Attributes
    ----------
    u : array
        Shaped like v.
    error : float
        A bound of |u - g(A) v| / |v| in the flow's measure, for Lanczos iteration an estimate.
    left_out : float
        The same without rounding.
    applications : int
        Of A.
    success : bool
        Whether `left_out` is within the tolerance.
    message : str
    """

    u: Array
    error: float
    left_out: float
    applications: int
    success: bool
    message: str


@underflowing
class FunctionOf(LinearOperator):
    r"""g(A) as a SciPy operator on flat signals, and by a call on signals; made by `function_of`.

    Attributes
    ----------
    flow : LinearFlow
    method : {'transform', 'dense', 'chebyshev', 'lanczos'}
    interval : tuple of float
        Holds the spectrum of A.
    scale : float
        The largest \|g\| on samples of it, or on the eigenvalues where they are known.
    error : float
        A bound of that of `FunctionValue` for every v; NaN for Lanczos iteration.
    tol : float
        Tolerance of `FunctionValue.left_out`.
    applications : int
        Of A so far, those for a whole matrix aside.
    """

    def __init__(self, flow: LinearFlow, function: Function, tol: float, method: str, maxiter: int) -> None:
        self.flow, self._function, self._maxiter = flow, function, maxiter
        fidelity = flow.fidelity
        width = 1 if fidelity is None else fidelity.width
        size = flow.affinity.domain.size * width
        super().__init__(np.dtype(np.float64), (size, size))  # type: ignore[call-arg]  # its stub has __new__ alone
        self._like = flow.affinity.log_degree
        self._eps = float(namespace(self._like).finfo(self._like.dtype).eps)
        self._inner_of = NodeFidelity(0.0) if fidelity is None else fidelity
        self._aside = is_aside(flow)
        self.applications = 0
        low, high = flow.spectral_bounds()
        self.interval = (low, max(high, low * (1 + 1e-12) + 1e-300))
        self._basis: Diagonal | None = None
        self.method = self._chosen(method, tol)

    # ---- which method, and its error

    def _chosen(self, method: str, tol: float) -> str:
        if method in ("auto", "transform") and (found := transform_of(self.flow, method)):
            self._basis, values = found
            self._gains = self._known(np.maximum(values, self.interval[0]), 8 * math.log2(self.shape[0] + 2))
            self.tol = tol * self.scale
            return "transform"
        if method == "dense" or (method == "auto" and self.shape[0] <= _DENSE_NODES):
            self._whole()
            self.tol = tol * self.scale
            return "dense"
        self._sampled()
        self.tol = tol * self.scale
        return self._iterated() if method == "lanczos" else self._expanded(method)

    def _known(self, values: Floats, terms: float) -> Floats:
        """Return g at known eigenvalues; set `scale` and `error`, for sums of so many terms."""
        gains = self._at(values)
        low, high = self.interval
        self.scale = float(np.abs(gains).max())
        # Rounding moves eigenvalues by some multiple of the largest one; that of constants, the first, is known.
        values, others = (values.ravel()[1:], gains.ravel()[1:]) if self._aside else (values.ravel(), gains.ravel())
        change = terms * self._eps * high
        apart = max(
            float(np.abs(self._at(np.clip(values + sign * change, low, high)) - others).max(initial=0.0))
            for sign in (-1, 1)
        )
        self.error = 4 * terms * self._eps * self.scale + (1 + math.log(self.shape[0])) * apart
        return gains

    def _whole(self) -> None:
        values, vectors, root = eigenpairs(self.flow)
        gains = self._known(np.clip(values, *self.interval), 2 * (len(values) + 8))
        self._matrix = (vectors * gains) @ vectors.T / root[:, None] * root

    def _sampled(self) -> None:
        """Set `scale`, from samples of the interval, and raise `InputError` where g is not finite on it."""
        low, high = self.interval
        if not self._aside and not np.isfinite(raw_values(self._function, np.array([low]))).all():
            # The bound costs nothing; where g has no value there, the smallest eigenvalue is worth an iteration.
            low = relaxation_rate(self.flow) * (1 - 1e-6)
            self.interval = (low, high)
        self.scale = float(np.abs(self._at(_points(low, high))).max())

    def _iterated(self) -> str:
        if not max(self.interval[1], self.scale) < _LARGEST:
            raise InputError(
                f"function: got values up to {self.scale:.3g} of an operator up to {self.interval[1]:.3g}, expected "
                "numbers whose squares a float can hold for Lanczos iteration; change the unit"
            )
        return "lanczos"

    def _expanded(self, method: str) -> str:
        low, high = self.interval
        try:
            self._coefficients, left = chebyshev_coefficients(
                self._at, low, high, self.tol, most=_LONG if method == "auto" else 2**20
            )
        except NumericalError as error:
            if method == "chebyshev":
                raise NumericalError(
                    f"function: no polynomial reaches tol={self.tol:.3g} on [{low:.6g}, {high:.6g}], as where a slope "
                    "of the function is infinite; use method='lanczos', or a larger tol"
                ) from error
            self.error = math.nan
            return self._iterated()
        self.left_out = min(left, self.tol)  # what is more is coefficients at the rounding of the samples
        self.error = left + self._step_rounding() * _growth(self._coefficients)
        return "chebyshev"

    def _step_rounding(self) -> float:
        """Return what a step of the recurrence adds by rounding, over its largest value."""
        low, high = self.interval
        return 2 * (self._eps * ((self._terms() + 8) * 2 * high / (high - low) + 4) + self.flow.affinity.error_estimate)

    def _terms(self) -> float:
        """Return how many terms an average adds up, at most."""
        affinity = self.flow.affinity
        if affinity.method == "convolution":
            return 8 * math.log2(affinity.domain.size + 2)
        if affinity.method == "stencil":
            return affinity._edge_bound() / affinity.domain.size
        if isinstance(affinity, SparseAffinity):
            return float(np.diff(affinity._graph.indptr).max())
        return float(affinity.domain.item_size)

    def _at(self, a: Any) -> Floats:
        return values_of(self._function, np.asarray(a, np.float64), self.interval, self._aside)

    # ---- applied to signals

    def __call__(self, v: Any) -> Array:
        """Return g(A) v for a signal, an array or tensor of shape ``domain.shape`` or ``domain.shape + (D,)``.

        Raises
        ------
        NumericalError
            When Lanczos iteration does not reach the tolerance.
        """
        found = self.evaluate(v)
        if not found.success:
            raise NumericalError(f"function: {found.message}")
        return found.u

    def evaluate(self, v: Any) -> FunctionValue:
        """Return g(A) v as a `FunctionValue`."""
        v = self.flow.affinity.check_signal("v", v)
        width = self.shape[0] // self.flow.affinity.domain.size
        if width > 1 and (v.ndim == len(self.flow.affinity.domain.shape) or v.shape[-1] % width):
            raise InputError(f"v: got shape {tuple(v.shape)}, expected a multiple of {width} channels, which are mixed")
        check_untracked("v", getattr(v, "requires_grad", False), "numbers without gradients")
        counted, before = self.flow.applications, self.applications
        apply = {
            "transform": self._by_transform, "dense": self._by_matrix,
            "chebyshev": self._by_expansion, "lanczos": self._by_iteration,
        }[self.method]  # fmt: skip
        if self._aside:
            mean = self.flow.mean(v)
            u, left, error = apply(v - mean)
            u = u - self.flow.mean(u) + float(self._at(np.array([self.interval[0]]))[0]) * mean
        else:
            u, left, error = apply(v)
        self.flow.applications = counted
        success = left <= self.tol
        known = "about" if self.method == "lanczos" else "at most"
        message = f"by {self.method}: the error is {known} {error:.3g} of the norm of v"
        if not success:
            message = (
                f"Lanczos iteration has an error of up to {left:.3g} of the norm of v after {len(self._steps.alphas)} "
                f"steps, expected at most {self.tol:.3g}; raise maxiter or tol"
            )
        return FunctionValue(u, error, left, self.applications - before, success, message)

    def _by_transform(self, v: Array) -> tuple[Array, float, float]:
        assert self._basis is not None
        image = self._basis.times(self._gains, self._basis.forward(v))
        return self._basis.back(image, v.dtype), 0.0, self._rounded(v)

    def _by_matrix(self, v: Array) -> tuple[Array, float, float]:
        domain, xp = self.flow.affinity.domain, namespace(v)
        width = self.shape[0] // domain.size
        columns = xp.permute_dims(xp.reshape(xp.astype(v, xp.float64), (domain.size, -1, width)), (0, 2, 1))
        flat = xp.reshape(columns, (self.shape[0], -1))
        found = xp.reshape(kept_like(self._matrix, flat) @ flat, (domain.size, width, -1))
        found = xp.reshape(xp.permute_dims(found, (0, 2, 1)), v.shape)
        return xp.astype(found, v.dtype), 0.0, self._rounded(v)

    def _rounded(self, v: Array) -> float:
        return self.error + 4 * float(namespace(v).finfo(v.dtype).eps) * self.scale

    def _operator(self, v: Array) -> Array:
        self.applications += 1
        return self.flow.linear(v)

    def _by_expansion(self, v: Array) -> tuple[Array, float, float]:
        u = chebyshev_sums(self._operator, v, *self.interval, [self._coefficients])[0]
        return u, self.left_out, self.left_out + (self.error - self.left_out) * self._coarser(v)

    def _coarser(self, v: Array) -> float:
        """Return the rounding of a signal, which may have another precision, over that of A."""
        return float(namespace(v).finfo(v.dtype).eps) / self._eps

    def _by_iteration(self, v: Array) -> tuple[Array, float, float]:
        xp, flow = namespace(v), self.flow
        unit = scalar(xp.max(xp.abs(v))) or 1.0  # squares of v may be out of range
        flat = (v[..., None] if v.ndim == len(flow.affinity.domain.shape) else v) / unit
        check_memory(
            f"{self._maxiter} vectors of Lanczos iteration", self._maxiter * math.prod(flat.shape) * 8,
            "lower maxiter, raise tol, or take fewer channels at a time",
        )  # fmt: skip
        axes = tuple(range(len(flow.affinity.domain.shape)))
        inner = inner_product(over_channels(flow.measure(v), flat), axes, self._inner_of)
        free: Any = (lambda w: w - flow.mean(w)) if self._aside else (lambda w: w)
        steps = self._steps = Lanczos(self._operator, flat, inner, keep=True, free=free)
        total = float(np.linalg.norm(steps.sizes)) or 1.0
        left, rounding, weights = 0.0, 0.0, np.zeros((0, len(steps.sizes)))
        for k in range(1, self._maxiter + 1):
            more = steps.step()
            if k % _LOOK and more and k < self._maxiter:
                continue
            weights = np.zeros((k, len(steps.sizes)))
            bounds = np.zeros((2, len(steps.sizes)))
            for system, size in enumerate(steps.sizes):
                column, *found = self._projected(steps, system)
                weights[: len(column), system] = size * column
                bounds[:, system] = size * np.array(found)
            left, rounding = (float(b) for b in np.linalg.norm(bounds, axis=1) / total)
            if left <= self.tol or not more:
                break
        u = xp.zeros_like(flat)
        shares = constant_like(weights.reshape(len(weights), *(1,) * len(axes), -1), u)
        for number, vector in zip(range(len(weights)), steps.basis, strict=False):
            u = u + shares[number, ...] * vector
        return unit * xp.reshape(u, v.shape), left, left + rounding * self._coarser(v)

    def _projected(self, steps: Lanczos, system: int) -> tuple[Floats, float, float]:
        """Return g(T) e_1 for a unit vector, and bounds of what is left out and of what rounding adds.

        g(A) v - V g(T) e_1 = b h(A) v', with h(a) = e_k^T (g(T) - g(a)) (T - a)^-1 e_1, from Cauchy's integral of the
        residuals of resolvents. So the error is at most b times the largest |h| on the interval, here on points of it.
        """
        low, high = self.interval
        ritz, vectors = steps.eigen(system)
        ritz = np.clip(ritz, low, high)
        gains = self._at(ritz)
        last = steps.tridiagonal(system)[1][-1]
        points = _points(low, high)
        points = points[np.abs(points[:, None] - ritz).min(axis=1) > _NEAR * (high - low)]
        quotients = (gains - self._at(points)[:, None]) / (ritz - points[:, None])
        h = np.abs(quotients @ (vectors[-1] * vectors[0])).max(initial=0.0)
        beyond = quotients[points >= ritz.min()]
        slope = np.abs(beyond).max(initial=0.0)
        k = len(ritz)
        moved = (self._step_rounding() * (high - low) + k * self._eps * high) * math.sqrt(k)
        rounding = (1 + math.log(k)) * moved * slope + 4 * k * self._eps * self.scale
        return (vectors * gains) @ vectors[0], float(last * h), float(rounding)

    # ---- SciPy's side, flat signals in float64

    def dot(self, x: Any) -> Any:
        """Return g(A) of flat signals, or of another operator."""
        check_detached("x", x)
        return super().dot(x)

    def _matmat(self, X: Any) -> Floats:
        return on_columns(self.flow, self, check_floats("X", X))

    def _matvec(self, x: Any) -> Floats:
        return self._matmat(np.reshape(x, (-1, 1)))[:, 0]

    def _rmatmat(self, X: Any) -> Floats:
        measure = _root_measure(self.flow, self.shape[0])[:, None] ** 2
        return measure * self._matmat(X / measure)

    def _rmatvec(self, x: Any) -> Floats:
        return self._rmatmat(np.reshape(x, (-1, 1)))[:, 0]

    def _adjoint(self) -> LinearOperator:
        return LinearOperator(
            self.shape, matvec=self._rmatvec, rmatvec=self._matvec, matmat=self._rmatmat, rmatmat=self._matmat,
            dtype=self.dtype,
        )  # fmt: skip

    def __repr__(self) -> str:
        n, low, high = self.shape[0], *self.interval
        return f"<FunctionOf on {n} unknowns, method={self.method!r}, spectrum in [{low:.4g}, {high:.4g}]>"


def raw_values(function: Function, a: Floats) -> Floats:
    """Return g of eigenvalues, or raise `InputError` where it is no real function of arrays."""
    with np.errstate(all="ignore"):
        try:
            values = np.asarray(function(a))
        except Exception as error:
            raise InputError(
                f"function: it failed for an array of eigenvalues ({type(error).__name__}: {error}), expected one that "
                "takes an array of float64 and returns one of its shape"
            ) from error
    if values.dtype.kind not in "fiub" or values.shape not in (a.shape, ()):
        raise InputError(
            f"function: it returned {values.dtype} of shape {values.shape} for eigenvalues of shape {a.shape}, "
            "expected real numbers of their shape"
        )
    return np.broadcast_to(values.astype(np.float64), a.shape)


def values_of(function: Function, a: Floats, interval: tuple[float, float], aside: bool) -> Floats:
    values = raw_values(function, a)
    wrong = ~np.isfinite(values)
    if wrong.any():
        low, high = interval
        where = float(a[wrong].ravel()[0])
        advice = "shift its argument, as in (kappa**2 + a) ** -nu"
        if aside and where <= 0:
            advice += ", or give E a fidelity > 0: 0 is the eigenvalue of constants"
        raise InputError(
            f"function: got {values[wrong].ravel()[0]} at {where:.6g}, expected finite values on "
            f"[{low:.6g}, {high:.6g}], which holds the spectrum; {advice}"
        )
    return values


def _points(low: float, high: float) -> Floats:
    """Return points of an interval, dense towards both ends, towards the lower one by decades."""
    angles = np.concatenate([np.linspace(0, np.pi, 301), np.pi * np.logspace(-7, -2, 50)])
    return np.unique(np.clip(low + (high - low) * np.sin(angles / 2) ** 2, low, high))


def _growth(coefficients: Floats) -> float:
    """Return how much of the rounding of steps an expansion sum_k c_k T_k keeps: sum_j max |b_j| on the interval.

    A rounding d of T_j comes back as d U_{k-j} in T_k, so as d b_j in the sum, b_j = sum_{k >= j} c_k U_{k-j} being
    those of Clenshaw's recurrence b_j = c_j + 2 x b_{j+1} - b_{j+2}.
    """
    x = np.cos(np.concatenate([np.linspace(0, np.pi, 65), np.pi / len(coefficients) * np.linspace(0.1, 3, 16)]))
    x = np.concatenate([x, -x])
    now, after, total = np.zeros_like(x), np.zeros_like(x), 0.0
    for c in coefficients[:0:-1]:
        now, after = c + 2 * x * now - after, now
        total += float(np.abs(now).max())
    return total + float(np.abs(coefficients).sum())


@checked_call
@underflowing
def function_of(
    L: Any,
    function: Function,
    metric: str | Metric | None = None,
    *,
    tol: float | None = None,
    method: str = "auto",
    maxiter: int = 300,
) -> FunctionOf:
    r"""Return g(A) for the linear operator A of a frozen symmetric flow.

    A = r (I - P) + phi, which is L + lambda in the L2 metric::

        lambda a: np.exp(-t * a)                   # heat: the J-flow after the time t
        np.sqrt                                    # the half Laplacian
        lambda a: 1 / np.sqrt(a)                   # whitens; A with a fidelity > 0
        lambda a: (kappa**2 + a) ** -nu            # Matérn: a Gaussian field with the precision (kappa^2 + L)^(2 nu)

    Parameters
    ----------
    L : GradientFlow, AttentionFlow, J, E or Affinity
        An affinity stands for its J. Terms beside A have no part in it.
    function : callable
        g, of an array of eigenvalues, finite on the spectrum.
    metric : {'l2', 'degree'}, optional
        For functionals and affinities, 'l2' by default; a flow has its own.
    tol : float, optional
        Of `FunctionValue.left_out`, relative to the largest \|g\|; 1e-12 in float64 and 1e-6 in float32 by default.
    method : {'auto', 'transform', 'dense', 'chebyshev', 'lanczos'}
        - ``transform``: on periodic and reflecting grids with a position kernel and one fidelity, O(N log N).
        - ``dense``: eigenvalues and eigenvectors, O(N^3) once and O(N^2) memory.
        - ``chebyshev``: as many averages as the degree of an expansion.
        - ``lanczos``: for a g with a singularity at or near the interval; memory for `maxiter` signals.
        - ``auto``: the first that suits.
    maxiter : int
        Steps of Lanczos iteration.

    Returns
    -------
    FunctionOf

    Raises
    ------
    InputError
        For flows that are evolving, not symmetric, constrained, or in another metric; for a g that is not real and
        finite on the spectrum.
    NumericalError
        For ``chebyshev``, where no expansion reaches `tol`.

    Notes
    -----
    For Lanczos iteration the error is the largest divided difference on sampled points of the interval (in the spirit
    of Frommer and Schweitzer 2016, doi 10.1007/s10543-015-0596-3): an estimate, no bound.

    Examples
    --------
    >>> import numpy as np
    >>> from nlflow import Gaussian, Grid, affinity
    >>> from nlflow.flows import function_of
    >>> grid = Grid(100, spacing=0.01, boundary="reflect")
    >>> heat = function_of(affinity(Gaussian(0.05), grid), lambda a: np.exp(-3 * a))
    >>> half = function_of(affinity(Gaussian(0.05), grid), lambda a: np.exp(-1.5 * a))
    >>> f = np.sin(7 * grid.nodes[:, 0])
    >>> bool(np.abs(half(half(f)) - heat(f)).max() < 1e-12)
    True
    """
    flow = symmetric_flow(L, metric)
    if not is_function(function):
        raise InputError(f"function: got {kind_of(function)}, expected a callable of an array of eigenvalues")
    like = flow.affinity.log_degree
    single = like.dtype == namespace(like).float32
    tol = check_number("tol", (1e-6 if single else 1e-12) if tol is None else tol, minimum=0, strict=True)
    method = check_choice("method", method, METHODS)
    return FunctionOf(flow, function, tol, method, check_integer("maxiter", maxiter, minimum=1))


def transform_of(flow: LinearFlow, method: str) -> tuple[Diagonal, Floats] | None:
    """Return the transform that diagonalizes A and its eigenvalues, or None."""
    modes = flow.modes if is_numpy(flow.affinity.log_degree) else None
    if modes is not None and modes.alike is not None:
        return modes.basis, modes.alike
    if method == "transform":
        raise InputError(
            "method: got 'transform', expected another one here: it needs a position kernel on a periodic or "
            "reflecting grid and one fidelity for all nodes"
        )
    return None


def is_aside(flow: LinearFlow) -> bool:
    """Whether constants are the eigenvector of the smallest eigenvalue of A."""
    return flow.plain and (flow.fidelity is None or flow.fidelity.uniform is not None)


def eigenpairs(flow: LinearFlow) -> tuple[Floats, Floats, Floats]:
    """Return eigenvalues a, orthonormal vectors V and r with A = R^-1 V a V^T R, R = diag(r); O(N^3)."""
    width = 1 if flow.fidelity is None else flow.fidelity.width
    n = flow.affinity.domain.size * width
    check_memory(f"the eigenvectors of {n} unknowns", 32 * n * n, "use method='lanczos'")
    root = _root_measure(flow, n)
    matrix = root[:, None] * dense_operator(flow) / root
    matrix = (matrix + matrix.T) / 2
    if not is_aside(flow):
        return *np.linalg.eigh(matrix), root
    constant = root / np.linalg.norm(root)
    # Moved below all others, constants stay orthogonal to eigenvectors of the same eigenvalue.
    values, vectors = np.linalg.eigh(matrix - np.abs(matrix).max() * np.outer(constant, constant))
    values[0], vectors[:, 0] = flow.spectral_bounds()[0], constant
    return values, vectors, root


def _root_measure(flow: LinearFlow, size: int) -> Floats:
    measure = to_numpy(flow.measure(flow.affinity.log_degree)).ravel().astype(np.float64)
    if not measure.min() > 0:
        raise NumericalError(
            "affinity: the degrees of some nodes underflow beside those of the others; use method='chebyshev' or "
            "'lanczos', a wider kernel or smaller logits"
        )
    return np.repeat(np.sqrt(measure / measure.max()), size // len(measure))


def symmetric_flow(given: Any, metric: str | Metric | None = None, name: str = "L") -> LinearFlow:
    if isinstance(given, LinearFlow) and metric is not None:
        raise InputError(f"metric: got {metric!r} for a flow, which has its own, {given.metric!r}; leave it out")
    if isinstance(given, Affinity):
        given = J(given)
    if isinstance(given, J):
        given = GradientFlow(given, "l2" if metric is None else metric)
    if not isinstance(given, LinearFlow):
        raise InputError(
            f"{name}: got {kind_of(given)}, expected a GradientFlow or AttentionFlow, a J or E, or an affinity"
        )
    if given.evolving:
        raise InputError(
            f"{name}: got an evolving kernel, which has another operator at each signal; build it with evolving=False"
        )
    if not given.symmetric:
        raise InputError(
            f"{name}: got a flow that is not symmetric, whose eigenvalues need not be real; take the J of its "
            "affinity, which symmetrizes it, or give all nodes and channels one fidelity"
        )
    if not given.inner.by_nodes:
        raise InputError(f"{name}: got the metric {given.metric!r}, expected 'l2' or 'degree'")
    if not given.plainly_linear:
        raise InputError(f"{name}: got a {type(given).__name__} with an operator of its own, expected r (I - P) + phi")
    if given.terms.constraint is not None:
        raise InputError(f"{name}: got a flow with a constraint, expected one without; let a large fidelity hold nodes")
    check_untracked(f"observed, fidelity or features of {name}", given.tracked, "numbers without gradients")
    return given
