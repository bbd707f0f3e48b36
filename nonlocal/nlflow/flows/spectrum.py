"""Eigenvalues of flows."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from nlflow._array import Array, Floats, constant_like, to_numpy
from nlflow.errors import InputError, NumericalError

if TYPE_CHECKING:
    from nlflow.flows.linear import LinearFlow

# Up to this many nodes the whole operator is formed by applying it to the identity.
_DENSE_NODES = 400
# The smallest eigenvalue takes an iteration longer, so there the whole operator pays for longer.
_DENSE_RATE_NODES = 1000
_LAST_DIGITS = 1e-14  # of the largest eigenvalue: what products of float64 leave at best
_OWN = 1e-3  # of the largest: eigenvalues of an overridden operator between many nodes
_RESTARTS = 2000  # of a Lanczos iteration for a slow rate
_RATE_DIGITS = 1e-4  # of a slowest rate: at most its error, for symmetric operators
_ROUNDING, _ROUNDING_SINGLE = 1e-11, 1e-4  # of the largest eigenvalue: residuals that products leave


def on_columns(flow: LinearFlow, operator: Callable[[Array], Array], columns: Floats) -> Floats:
    """Return a linear map of signals times columns, (N, M), or (N D, M) where D channels are mixed; uncounted."""
    domain, counted = flow.affinity.domain, flow.applications
    size, width = columns.size // len(columns), len(columns) // domain.size
    # Channels that the fidelity mixes come last, so that it meets one vector of them after another.
    aside = columns.reshape(domain.size, width, size).swapaxes(1, 2)
    result = operator(flow.affinity.as_signal(aside.reshape(*domain.shape, size * width)))
    flow.applications = counted  # analysis, not part of the integration
    back = np.asarray(to_numpy(result), dtype=np.float64).reshape(domain.size, size, width)
    return back.swapaxes(1, 2).reshape(len(columns), size)


def apply_operator(flow: LinearFlow, columns: Floats, *, diffusion: bool = False) -> Floats:
    """Return A = r (I - P) + phi, or r (I - P), times columns; with a constraint between free nodes."""

    def operator(signal: Array) -> Array:
        signal = flow.free(signal)
        return flow.free(flow.diffusion(signal) if diffusion else flow.linear(signal))

    return on_columns(flow, operator, columns)


def dense_operator(flow: LinearFlow, *, diffusion: bool = False) -> Floats:
    """Return the matrix of A, or of r (I - P), float64, (N, N) or (N D, N D) where D channels are mixed; uncounted."""
    unknowns = _unknowns(flow, diffusion)
    if not (flow.plain and flow.inner.by_nodes and flow.terms.constraint is None):
        return apply_operator(flow, np.eye(unknowns), diffusion=diffusion)
    # The diagonal of r (I - P) is the sum of rates off it: 1 - P_ii has no digits where P_ii is nearly 1.
    matrix = _by_rates(flow, apply_operator(flow, np.eye(flow.affinity.domain.size), diffusion=True))
    if diffusion or flow.fidelity is None:
        return matrix
    pull = on_columns(flow, flow.fidelity.times, np.eye(unknowns))
    return (matrix if flow.fidelity.width == 1 else np.kron(matrix, np.eye(flow.fidelity.width))) + pull


def _by_rates(flow: LinearFlow, matrix: Floats) -> Floats:
    """Return r (I - P) from its entries off the diagonal."""
    rates = np.maximum(-matrix, 0.0)
    np.fill_diagonal(rates, 0.0)
    if not flow.inner.normalized:
        # w_j K_ij, from the row of which it is the larger part: a small one may have lost its digits.
        weights = flow.affinity.domain.weights.ravel()
        kernel = rates / weights
        rates = np.maximum(kernel, kernel.T) * weights
    return np.asarray(np.diag(rates.sum(axis=1)) - rates)


def _unknowns(flow: LinearFlow, diffusion: bool) -> int:
    """Return the number of rows of A: one for each node, or one for each channel of a node, if they are mixed."""
    return flow.affinity.domain.size * flow.width(diffusion=diffusion)


def _symmetric(matrix: Floats, nodes: int) -> Floats:
    """Return the symmetric matrix that is similar to A of a symmetric flow, m_i^1/2 A_ij m_j^-1/2.

    As -sqrt(A_ij A_ji) between nodes, where A_ij <= 0: no measure m, which may underflow, is needed.
    """
    root = np.sqrt(np.maximum(-matrix, 0))
    result = -root * root.T
    width, own = len(matrix) // nodes, np.arange(nodes)
    blocks = (nodes, width, nodes, width)
    result.reshape(blocks)[own, :, own] = matrix.reshape(blocks)[own, :, own]
    return result


def extreme(
    matvec: Callable[[Floats], Floats], n: int, which: str, k: int = 1, *, symmetric: bool = False,
    rounding: float = _ROUNDING, relative: float = math.inf, **options: Any,
) -> NDArray[Any]:  # fmt: skip
    return extreme_pairs(matvec, n, which, k, symmetric=symmetric, rounding=rounding, relative=relative, **options)[0]


def extreme_pairs(
    matvec: Callable[[Floats], Floats], n: int, which: str, k: int = 1, *, symmetric: bool = False,
    rounding: float = _ROUNDING, relative: float = math.inf, **options: Any,
) -> tuple[NDArray[Any], NDArray[Any], Floats]:  # fmt: skip
    """Return k extreme eigenvalues by SciPy's ``eigsh`` or ``eigs``, eigenvectors (n, k), and norms of residuals.

    Raises
    ------
    NumericalError
        When the iteration does not converge, or a residual is larger than 10 ``tol`` or `rounding` (of the size of the
        products), or than `relative` (of the eigenvalue).
    """
    from scipy.sparse.linalg import ArpackError, LinearOperator, eigs, eigsh

    operator = LinearOperator((n, n), matvec=lambda v: matvec(np.ravel(v)), dtype=np.float64)
    start = np.random.default_rng(0).standard_normal(n)
    moved = matvec(start)
    if not np.any(moved):
        return np.zeros(k), np.eye(n, k), np.zeros(k)  # nothing moves; the iterations need something that does
    solve: Any = eigsh if symmetric else eigs
    try:
        values, vectors = solve(operator, k=k, which=which, v0=start, **options)
    except ArpackError as error:
        raise NumericalError(f"affinity: {k} eigenvalues of {n} were not found by iteration ({error})") from error
    size = max(float(np.abs(values).max()), float(np.linalg.norm(moved) / np.linalg.norm(start)))
    allowed = max(10 * options.get("tol", 0.0), rounding) * size
    residuals = []
    for value, vector in zip(values, vectors.T, strict=True):
        moved = matvec(np.ascontiguousarray(vector.real)) + 1j * matvec(np.ascontiguousarray(vector.imag))
        left = float(np.linalg.norm(moved - value * vector))
        residuals.append(left)
        most = min(allowed, max(relative * abs(value), _LAST_DIGITS * size))
        if not left <= most:
            raise NumericalError(
                f"affinity: an eigenvalue {value:.6g} of {n} has the residual {left:.2g} after iteration, expected at "
                f"most {most:.2g}"
            )
    return np.asarray(values), np.asarray(vectors), np.array(residuals)


def _rounding(flow: LinearFlow) -> float:
    return _ROUNDING_SINGLE if "float32" in str(flow.affinity.dtype) else _ROUNDING


def _product(flow: LinearFlow, root: Floats, *, diffusion: bool) -> Callable[[Floats], Floats]:
    def product(v: Floats) -> Floats:
        return root * apply_operator(flow, (v / root)[:, None], diffusion=diffusion)[:, 0]

    return product


def _root_measure(flow: LinearFlow, size: int) -> Floats:
    """Square root of the flow's measure for each unknown, floored so that what underflows divides nothing by zero."""
    measure = to_numpy(flow.affinity.measure(flow.inner.measure, flow.affinity.log_degree)).ravel()
    root = np.sqrt(np.maximum(measure, measure.max() * 1e-280))
    return np.asarray(np.repeat(root, size // len(root)))


def _known(flow: LinearFlow) -> Floats | None:
    """Return the distinct eigenvalues of r (I - P), 0 for constants first, where the affinity tells them."""
    spectrum = flow.affinity.known_spectrum()
    if spectrum is None or flow.terms.constraint is not None or not flow.plainly_linear:
        return None
    # Then the degree is the same everywhere.
    rate = 1.0 if flow.inner.normalized else float(flow.affinity.degree.ravel()[0])
    return np.asarray(rate * (1 - spectrum))


def _uniform(flow: LinearFlow) -> bool:
    alike = flow.fidelity is None or flow.fidelity.uniform is not None
    return alike and flow.terms.constraint is None and flow.width(diffusion=True) == 1


def _free(flow: LinearFlow, n: int) -> NDArray[np.bool_]:
    constraint = flow.terms.constraint
    return np.ones(n, bool) if constraint is None else np.repeat(~constraint.mask.ravel(), n // constraint.mask.size)


def largest_eigenvalue(flow: LinearFlow, *, diffusion: bool = False) -> float:
    """Return the largest eigenvalue of A for a symmetric flow (of r (I - P) with `diffusion`), or a bound near it."""
    known = _known(flow) if diffusion or _uniform(flow) else None
    if known is not None:
        return max(float(known.max()), 0.0) + (0.0 if diffusion else flow.spectral_bounds()[0])
    bound = flow.diffusion_bound() if diffusion else flow.spectral_bounds()[1]
    n = _unknowns(flow, diffusion)
    if not flow.plainly_linear:
        return max(float(own_eigenvalues(flow, diffusion=diffusion).real.max()), 0.0)
    if n <= _DENSE_NODES:
        matrix = dense_operator(flow, diffusion=diffusion)
        value = float(np.linalg.eigvalsh(_symmetric(matrix, flow.affinity.domain.size))[-1])
    else:
        product = _product(flow, _root_measure(flow, n), diffusion=diffusion)
        try:
            value = float(extreme(product, n, "LA", symmetric=True, tol=1e-6, rounding=_rounding(flow))[0]) * (1 + 1e-6)
        except NumericalError:  # the measure spans more decades than the iteration bears
            value = bound
    # Where the measure underflows the similarity that makes the operator symmetric is lost; the bound still holds.
    return max(value, 0.0) if value <= bound * (1 + 1e-5) else bound


def own_eigenvalues(flow: LinearFlow, *, diffusion: bool = False) -> NDArray[Any]:
    """Return eigenvalues of an overridden operator: all up to 400 unknowns, beyond the six of largest modulus.

    Raises
    ------
    NumericalError
        When the iteration for them does not converge, and for NaN.
    """
    n = _unknowns(flow, diffusion)
    if flow.modes is not None and (flow.fidelity is None or not diffusion) and flow.terms.constraint is None:
        return flow.modes.eigenvalues()
    if n <= _DENSE_NODES:
        free = _free(flow, n)
        operator = dense_operator(flow, diffusion=diffusion)[np.ix_(free, free)]
        if not np.isfinite(operator).all():
            raise NumericalError(
                f"flow: the linear() of {type(flow).__name__} returns NaN or infinite values of finite signals, so no "
                "limit of steps is known; mend it"
            )
        return np.asarray(np.linalg.eigvals(operator))
    product = _product(flow, np.ones(n), diffusion=diffusion)
    try:
        return extreme(product, n, "LM", 6, tol=_OWN / 10, rounding=_rounding(flow)) * (1 + _OWN)
    except NumericalError as error:
        raise NumericalError(
            f"flow: the eigenvalues of the linear() of {type(flow).__name__} were not found by iteration, so no limit "
            f"of steps is known; use at most {_DENSE_NODES} nodes, or RungeKutta()"
        ) from error


def check_bounds(flow: LinearFlow) -> None:
    """Raise `InputError` where `spectral_bounds` does not hold the eigenvalues of an overridden operator."""
    low, high = flow.spectral_bounds()
    values = own_eigenvalues(flow)
    rounding = 1e-4 if str(flow.affinity.log_degree.dtype).endswith("float32") else 1e-6
    rounding = rounding if _unknowns(flow, False) <= _DENSE_NODES else 2 * _OWN
    slack = rounding * max(abs(low), abs(high), float(np.abs(values).max(initial=0.0)))
    smallest, largest, turns = values.real.min(), values.real.max(), np.abs(values.imag).max()
    if low - slack <= smallest and largest <= high + slack and turns <= 1e3 * slack:
        return
    found = f"from {smallest:.6g} to {largest:.6g}" + (
        f", with imaginary parts of {turns:.3g}" if turns > slack else ""
    )
    raise InputError(
        f"flow: got a {type(flow).__name__} whose spectral_bounds() are ({low:.6g}, {high:.6g}), and whose linear() "
        f"has eigenvalues {found}; override spectral_bounds() together with linear(), or use RungeKutta()"
    )


def relaxation_rate(flow: LinearFlow) -> float:
    """Return the rate of the slowest decay towards the flow's limit, |u(t) - u(inf)| ~ exp(-rate t).

    The smallest real part of an eigenvalue of A between free nodes. Constants are left out where the mean is conserved,
    and for one fidelity at all nodes without a constraint, which gives mu_2 + lambda; the mean of a start that is not
    that of f goes at the rate lambda. A J-flow whose affinity falls into parts that do not see each other, items of a
    batch aside, has the rate 0.

    Raises
    ------
    NumericalError
        When the iteration does not converge, or a rate is too slow for it.
    """
    uniform = _uniform(flow) and flow.inner.by_nodes
    settled = uniform or flow.conserves_mean  # constants have nothing to forget
    n, parts = _unknowns(flow, uniform), math.prod(flow.affinity.domain.leading)  # each item has a constant
    low, high = flow.spectral_bounds()
    if n == parts:
        return low
    known = _known(flow) if uniform else None
    if known is not None:
        return low + max(float(known[1:].min()), 0.0)
    try:
        if n <= _DENSE_RATE_NODES:
            free = _free(flow, n)
            matrix = dense_operator(flow, diffusion=uniform)[np.ix_(free, free)]
            if flow.symmetric and flow.plainly_linear:
                values = np.linalg.eigvalsh(_symmetric(matrix, len(matrix) * flow.affinity.domain.size // n))
            else:
                values = np.sort(np.linalg.eigvals(matrix).real)
            rate = float(values[parts if settled else 0])
        else:
            root = _root_measure(flow, n) if flow.symmetric else np.ones(n)
            between = _product(flow, root, diffusion=uniform)
            held = 2 * high * ~_free(flow, n)  # moved to the other end of the spectrum

            def product(v: Floats) -> Floats:
                return np.asarray(between(v) + held * v)

            if flow.symmetric:
                units = root.reshape(parts, -1)
                units = units / np.sqrt(np.sum(units * units, axis=1, keepdims=True))

                def lifted(v: Floats) -> Floats:
                    # Constants are moved from 0 to the other end of the spectrum.
                    lift = 2 * high * np.sum(units * v.reshape(parts, -1), axis=1, keepdims=True) if settled else 0.0
                    return np.asarray(product(v) + (lift * units).ravel())

                # Lowered by the tolerance, so that what is told of the limit from it is on the safe side.
                rate = _slowest(flow, lifted, n) * (1 - 1e-8)
            else:
                found = extreme(product, n, "SR", parts + 1, tol=1e-8, rounding=_rounding(flow))
                rate = float(np.sort(found.real)[parts if settled else 0])
    except NumericalError as error:
        raise NumericalError(
            "flow: the slowest rate was not found by iteration; use at most "
            f"{_DENSE_RATE_NODES} nodes, where all eigenvalues are computed"
        ) from error
    rate = max(rate, 0.0)
    return rate + low if uniform else rate


def _slowest(flow: LinearFlow, product: Callable[[Floats], Floats], n: int) -> float:
    """Return the smallest eigenvalue, from a residual that is small beside it: a slow rate is nothing beside 1e-8."""
    relative = math.inf if "float32" in str(flow.affinity.dtype) else _RATE_DIGITS
    options: dict[str, Any] = {"symmetric": True, "rounding": _rounding(flow), "relative": relative}
    try:
        return float(extreme(product, n, "SA", tol=1e-8, **options)[0])
    except NumericalError:
        return float(extreme(product, n, "SA", tol=1e-14, maxiter=_RESTARTS, **options)[0])


def is_told(flow: LinearFlow) -> bool:
    """Whether A and the bound of the reaction are enough for limits of steps."""
    if flow.terms.turns or flow.overridden("linear"):
        return False
    if flow.plain:
        return True
    if flow.terms.drives:
        return flow.plainly_linear and flow.split
    if flow.split:
        return True
    like = flow.affinity.log_degree if flow.observed is None else flow.observed
    shape, rng, counted = tuple(like.shape), np.random.default_rng(0), flow.applications
    first, second = (flow.free(constant_like(rng.standard_normal(shape), like)) for _ in range(2))
    beside, other = flow.drawn(first), flow.drawn(second)
    size = flow.norm(flow.linear(first)) + flow.norm(beside)
    flow.applications = counted
    return flow.norm(beside - other) <= (1e-3 if str(like.dtype).endswith("32") else 1e-7) * size


def euler_limit(flow: LinearFlow) -> float:
    """Return the largest stable step of explicit Euler, min 2 Re(a) / |a|^2 over eigenvalues a of A.

    For non-symmetric flows of more than 400 nodes `LinearFlow.safe_step` where no iteration converges.
    """
    if not flow.plainly_linear:
        return limit_of(own_eigenvalues(flow))
    if flow.symmetric:
        highest = largest_eigenvalue(flow)
        return 2 / highest if highest > 0 else math.inf
    if _unknowns(flow, False) <= _DENSE_NODES:
        return limit_of(np.linalg.eigvals(dense_operator(flow)))
    return _limit_by_trial(flow)


def limit_of(values: NDArray[Any]) -> float:
    """Return the limit that eigenvalues set, those left aside that are 0 or grow without a step."""
    values = values[np.abs(values) > 1e-12 * max(1.0, float(np.abs(values).max(initial=0.0)))]
    values = values[(values.real > 0) | (np.abs(values.imag) > np.abs(values.real))]
    return float(np.min(2 * values.real / np.abs(values) ** 2)) if values.size else math.inf


def _limit_by_trial(flow: LinearFlow) -> float:
    n = _unknowns(flow, False)
    product = _product(flow, np.ones(n), diffusion=False)

    def stable(step: float) -> bool:
        largest = extreme(lambda v: v - step * product(v), n, "LM", tol=1e-9, rounding=_rounding(flow))
        return bool(np.abs(largest[0]) <= 1 + 1e-9)

    try:
        low, high = flow.safe_step, limit_of(extreme(product, n, "LM", 6, rounding=_rounding(flow)))
        if high <= low or not math.isfinite(high) or stable(high):
            return max(low, high)
        while high - low > 1e-6 * high:
            middle = (low + high) / 2
            low, high = (middle, high) if stable(middle) else (low, middle)
        return low
    except NumericalError:  # eigenvalues of equal modulus all round the disk, say
        return flow.safe_step
