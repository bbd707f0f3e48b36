"""Minimizers, and the linear system that the minimizer of E solves."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nlflow._array import (
    Array,
    Brief,
    constant_like,
    is_numpy,
    namespace,
    over_channels,
    power_of_two,
    scalar,
    to_numpy,
)
from nlflow.affinities import Affinity, SparseAffinity
from nlflow.errors import InputError, NumericalError, check_memory
from nlflow.functionals.accuracy import Rows, Run, rounded_residual
from nlflow.functionals.constraint import Held, components_of
from nlflow.functionals.fidelity import Fidelity, NodeFidelity
from nlflow.functionals.krylov import Solved, conjugate_gradients, error_allowed, verdict
from nlflow.functionals.preconditioners.choice import Choice


@dataclass(frozen=True, repr=False)
class Minimizer(Brief):
    """A minimizer, or the limit of a flow, and how well it was reached.

    Attributes
    ----------
    u : array
        Shaped like the observed signal.
    residual : float
        Of its equation, relative to the right-hand side, of signals less a constant and before `u` is rounded. For a
        minimizer of E the larger of two ratios: that of the norms in the degree measure, and that of the largest
        entries, rows over 1 + lambda~. By Cholesky's method that of `u`, each row of A u = b relative to
        2 a_ii max|u| + |b_i|.
    iterations : int
    success : bool
        Whether the residual is within rtol, and for rtol < 1e-4 a bound of the error of `u` within 10^4 rtol of its
        largest value, or of a hundredth of the spread of the data if that is more.
    message : str
    """

    u: Array
    residual: float
    iterations: int
    success: bool
    message: str


def minimize(
    affinity: Affinity, fidelity: Fidelity, f: Array, start: Array | None, *, rtol: float, maxiter: int, name: str
) -> Minimizer:
    xp = namespace(f)
    measure = over_channels(affinity.measure("degree", f, by_item=True), f)
    axes = tuple(range(len(affinity.domain.shape)))

    def total(v: Array) -> Array:
        return xp.sum(v, axis=axes, keepdims=True, dtype=xp.float64)

    # The system is linear in f: its size is taken out so that squares stay in range, and a constant too, since only
    # differences from it matter, which keeps small fidelities well scaled.
    size = float(xp.max(xp.abs(f))) or 1.0
    shift = xp.astype(fidelity.centre(f / size, measure, axes), f.dtype)
    centred = f / size - shift
    mass = total(measure + 0 * (f[..., :1] if f.ndim > len(axes) else f))

    def operator(v: Array) -> Array:
        difference = v - affinity._average(v)
        # I - P has no mean in its measure; what rounding leaves of one would be amplified by 1 / fidelity.
        difference = difference - xp.astype(total(measure * difference) / mass, f.dtype)
        return difference + fidelity.times(v)

    choice = Choice(affinity, fidelity, operator, f, name, rtol, maxiter=maxiter)
    if start is not None:
        guess = start / size - shift
    else:
        # A transform begins at 0, where there is nothing for rounding to leave a constant of, which it would multiply
        # by 1 / fidelity.
        guess = 0 * centred if choice.used == "transform" else centred
    rows = Rows.of(operator, fidelity, f, axes)
    run = _running(rows, choice, fidelity, inner_product(measure, axes, fidelity), maxiter)
    result = rows.solved(run, fidelity.times(centred), guess, rtol, rows._top(centred))
    found = _told(result, rtol, choice)
    with np.errstate(over="ignore"):  # an iteration that failed may have gone anywhere
        return replace(found, u=(result.x + shift) * size)


def _running(
    rows: Rows, choice: Choice, fidelity: Fidelity, inner: Callable[[Array, Array], Array], maxiter: int
) -> Run:
    """Return conjugate gradients with the preconditioners of a choice, `maxiter` iterations in all."""
    # The system over its size, a power of two, which changes no bit: squares of a large fidelity stay in range.
    large = power_of_two(max(fidelity.bounds()[1], 1.0))
    done = 0

    def run(b: Array, guess: Array, rtol: float) -> Solved:
        nonlocal done
        if done > 0:
            choice.again()
        found = conjugate_gradients(
            lambda v: rows.free(rows.operator(v)) / large, b / large, guess, inner=inner, rtol=rtol,
            maxiter=max(maxiter - done, 0), measured=rows.scaled,
            **_conditioned(choice, lambda precondition: lambda v: rows.free(precondition(v)) * large),
        )  # fmt: skip
        done += found.iterations
        return replace(found, left=None if found.left is None else found.left * large)

    return run


_STIFF = 1e4
"""The fidelity that stands for a constraint where a preconditioner needs one, beside I - P."""


def minimize_held(
    affinity: Affinity, fidelity: Fidelity, f: Array, held: Held, start: Array | None, *, rtol: float, maxiter: int,
    name: str, source: Array | None = None,
) -> Minimizer:  # fmt: skip
    """Return the minimizer u of E among the signals with the values of a constraint.

    With M zero at its nodes, g the values and s the source M ((I - P) + phi) M v = M (phi f + s - ((I - P) + phi) g),
    u = v + g.
    """
    if held.timed:
        raise InputError("constraint: got values that depend on time, expected those of one moment for a minimizer")
    if name == "transform":
        raise InputError(
            "preconditioner: got 'transform', expected 'auto', 'diagonal', 'multigrid', 'direct', 'graph' or 'sweeps' "
            "with a constraint"
        )
    xp, axes = namespace(f), tuple(range(len(affinity.domain.shape)))
    held.check_reached(affinity, _determined(fidelity, f, affinity.domain.shape))
    if source is None and fidelity.bounds()[1] == 0 and isinstance(affinity, SparseAffinity):
        affinity = affinity.without_loops()  # of which the minimizer is the same, and known to more digits
    measure = over_channels(affinity.measure("degree", f, by_item=True), f)
    values = held.at(0.0, f)
    shift = xp.astype(xp.sum(values / len(held), axis=axes, keepdims=True, dtype=xp.float64), f.dtype)
    inside, drawn = values - held.values_of(shift + 0 * f), fidelity.times(f - shift)
    drawn = drawn if source is None else drawn + source
    size = power_of_two(max(float(xp.max(xp.abs(inside))), float(xp.max(xp.abs(drawn)))))

    def system(v: Array) -> Array:
        return v - affinity._average(v) + fidelity.times(v)

    def operator(v: Array) -> Array:
        return held.free(system(v))

    stiff = fidelity
    if isinstance(fidelity, NodeFidelity) and is_numpy(f):
        stiff = NodeFidelity(fidelity.values + _STIFF * constant_like(held.mask, f))
    choice = Choice(
        affinity, stiff, lambda v: v - affinity._average(v) + stiff.times(v), f, name, rtol, held.mask, maxiter
    )

    b = held.free(drawn / size - system(inside / size))
    guess = 0 * f if start is None else held.free((start - shift) / size)
    rows = Rows.of(operator, fidelity, f, axes, stopped=over_channels(held.seen(affinity), f), free=held.free)
    run = _running(rows, choice, fidelity, inner_product(measure, axes, fidelity), maxiter)
    result = rows.solved(run, b, guess, rtol, rows._top(inside) / size)
    found = _told(result, rtol, choice)
    with np.errstate(over="ignore"):
        return replace(found, u=held.held(result.x * size + shift, 0.0))


def minimize_source(
    affinity: Affinity, source: Array, start: Array | None, *, rtol: float, maxiter: int, name: str
) -> Minimizer:
    """Return the minimizer u of J(u) - sum_i w_i s_i . u_i, with mean 0 in the degree measure."""
    if name == "transform":
        raise InputError(
            "preconditioner: got 'transform', expected 'auto', 'diagonal', 'multigrid', 'direct', 'graph' or 'sweeps' "
            "with a source"
        )
    xp, shape = namespace(source), affinity.domain.shape
    axes = tuple(range(len(shape)))
    parts = _parts(affinity, source)
    measure = over_channels(affinity.measure("degree", source), source)
    inner = inner_product(measure, axes, NodeFidelity(0.0))

    shares = []
    for number, part in enumerate(parts):
        weight = over_channels(part, source) * measure
        mass = xp.sum(weight)
        if not scalar(mass) > 0:
            raise NumericalError(
                f"degree: those of part {number} of the graph underflow beside the others; use a wider kernel, or "
                "leave that part out"
            )
        shares.append((over_channels(part, source), weight / mass))

    def centred(v: Array) -> Array:
        for part, share in shares:
            mean = _total(share, v, axes)
            v = v - xp.astype(mean if len(shares) == 1 else part * mean, v.dtype)
        return v

    # In the degree metric the source is s / d, relative to its largest entries: other degrees need have no float.
    size = power_of_two(float(xp.max(xp.abs(source))))
    there = xp.reshape(source, (*shape, -1))
    there = xp.any(there != 0, axis=-1)
    logs = affinity.log_degree
    low = scalar(xp.min(xp.where(there, logs, logs[there][0] if bool(xp.any(there)) else logs)))
    factor = xp.where(there, xp.exp(low - xp.where(there, logs, low + 0 * logs)), 0 * logs)
    b = over_channels(factor, source) * (source / size)
    high = float(xp.max(xp.abs(b))) or 1.0
    b = b / high
    for number, part in enumerate(parts):
        weight = over_channels(part, b) * measure
        total = xp.abs(xp.sum(weight * b, axis=axes, dtype=xp.float64))
        bound = xp.sum(weight * xp.abs(b), axis=axes, dtype=xp.float64)
        if bool(xp.any(total > 1e3 * float(xp.finfo(b.dtype).eps) * bound)):
            raise InputError(
                f"source: its sum over part {number} of the graph ({int(xp.sum(part))} nodes) is not 0, so J(u) - <s, "
                "u> has no minimizer; take its mean off on each connected component"
            )

    def operator(v: Array) -> Array:
        return centred(v - affinity._average(v))

    choice = Choice(affinity, NodeFidelity(0.0), operator, source, name, rtol, maxiter=maxiter)
    unit = size * high * (math.exp(-low) if -low < 700 else math.inf)
    guess = 0 * b if start is None or not 0 < unit < math.inf else centred(start / unit)
    # Against the node of the largest degree in each component, where the system has an inverse: it holds still there.
    ground = constant_like(_grounds(parts, measure), source)

    def beside_ground(v: Array) -> Array:
        return v - over_channels(ground, v) * v

    none = NodeFidelity(0.0)
    run = _running(Rows.of(operator, none, b, axes, free=centred), choice, none, inner, maxiter)

    def compare(ones: Array, guess: Array, rtol: float) -> Solved:
        # Charges at these nodes, less the value there, solve the system without them.
        here, least = over_channels(ground, ones), 1.0
        for part, share in shares:
            own = float(xp.sum(share * over_channels(ground, share)))
            ones, least = ones - xp.astype(part * here * (_total(share, ones, axes) / own), ones.dtype), min(least, own)
        found = run(ones, guess, rtol * least)
        v = found.x
        for part, _ in shares:
            v = v - part * xp.astype(_total(part * here, v, axes), v.dtype)
        return replace(found, x=v, left=None)

    rows = Rows.of(lambda v: beside_ground(v - affinity._average(v)), none, b, axes, free=beside_ground)
    result = rows.solved(run, centred(b), guess, rtol, compare=compare)
    found = _told(result, rtol, choice)
    with np.errstate(over="ignore", invalid="ignore"):
        u = centred(result.x) * unit
    if not bool(xp.all(xp.isfinite(u))):
        raise NumericalError(
            "degree: so small that source / degree overflows; scale the kernel's amplitude or logits up"
        )
    return replace(found, u=u)


def _parts(affinity: Affinity, like: Array) -> list[Array]:
    """Return what is 1 on each connected component and 0 elsewhere; one part where none are known."""
    labels = components_of(affinity)
    if labels is None:
        return [constant_like(np.ones(affinity.domain.shape), like)]
    return [constant_like((labels == number).astype(np.float64), like) for number in range(int(labels.max()) + 1)]


def _grounds(parts: list[Array], measure: Array) -> NDArray[np.float64]:
    ground = np.zeros(tuple(parts[0].shape))
    for part in parts:
        ground.flat[int(np.argmax(to_numpy(part).ravel() * to_numpy(measure).ravel()))] = 1.0
    return ground


def minimize_direct(affinity: Affinity, fidelity: Fidelity, f: Array, rtol: float) -> Minimizer:
    """Return the minimizer of E for a dense affinity by Cholesky's method, N^3 / 3 operations.

    ((1 + phi) I - S) v = phi m^1/2 f with S_ij = (P_ij P_ji)^1/2 and v = m^1/2 u.
    """
    from scipy.linalg import cho_factor, cho_solve

    matrix = getattr(affinity, "matrix", None)
    low = fidelity.bounds()[0]
    if matrix is None or not is_numpy(matrix) or not isinstance(fidelity, NodeFidelity) or not low > 0:
        raise InputError(
            f"preconditioner: got 'direct' for method {affinity.method!r} and a fidelity of at least {low:g}, expected "
            "a dense affinity of NumPy features and a fidelity > 0 of one number for each node; use 'auto'"
        )
    n = affinity.domain.size
    check_memory(f"Cholesky's method for {n} nodes", 24 * n * n, "use preconditioner='auto'")
    phi = np.broadcast_to(np.asarray(fidelity.values, np.float64), affinity.domain.shape).reshape(n, 1)
    logs = np.asarray(affinity._log_degree_wide(), np.float64).ravel() + np.log(affinity.domain.weights).ravel()
    root = np.exp((logs - logs.max()) / 2)[:, None]
    system = np.sqrt(np.multiply(matrix, matrix.T, dtype=np.float64))
    np.negative(system, out=system)
    system.flat[:: n + 1] += 1 + phi[:, 0]
    signal = f.reshape(n, -1).astype(np.float64)
    b = phi * root * signal
    try:
        v = cho_solve(cho_factor(system, lower=True, overwrite_a=True, check_finite=False), b, check_finite=False)
    except np.linalg.LinAlgError as error:
        raise NumericalError(
            "affinity: Cholesky's method broke down, since parts of the domain hardly see a node with a fidelity that "
            "counts beside 1; use equilibrium(flow, method='direct'), a wider kernel or smaller logits"
        ) from error
    x, pulls = v / root, phi * signal
    u = x.reshape(f.shape).astype(f.dtype)
    given = u.reshape(n, -1).astype(np.float64)

    def operator(v: Array) -> Array:
        return v - matrix @ v + phi * v

    residual = rounded_residual(
        pulls - operator(given), phi + (1 - np.diag(matrix).astype(np.float64)[:, None]), np.abs(given), pulls
    )
    # Of what was found, not of its rounding to the precision of f.
    rows = Rows.of(operator, NodeFidelity(phi[:, 0]), x, (0,))
    bound = rows.judged(Solved(x, residual, 0), None, pulls, rows._top(signal), error_allowed(rtol)).error
    success, advice = verdict(0.0, rtol, bound)
    if success and not residual <= rtol:
        success, advice = False, f", above rtol={rtol:g}, which {f.dtype} does not reach"
    return Minimizer(u, residual, 0, success, f"residual {residual:.3g} by Cholesky's method{advice}")


def inner_product(measure: Array, axes: tuple[int, ...], fidelity: Fidelity) -> Callable[[Array, Array], Array]:
    xp = namespace(measure)

    def inner(a: Array, b: Array) -> Array:
        products = _total(measure * a, b, axes)
        return products if fidelity.width == 1 else xp.sum(products, axis=-1, keepdims=True)

    return inner


def _total(weights: Array, v: Array, axes: tuple[int, ...]) -> Array:
    """Return the sum of weights v over nodes, of each channel, float64."""
    xp = namespace(v)
    if not is_numpy(v) or v.ndim == len(axes) or v.shape[-1] == 1:
        return xp.sum(weights * v, axis=axes, keepdims=True, dtype=xp.float64)
    # Several times as fast as a sum over the first axes; for one channel that sum is pairwise, which keeps more digits.
    flat = v.reshape(-1, v.shape[-1]).astype(np.float64, copy=False)
    sums = np.einsum("nc,nc->c", np.broadcast_to(weights, v.shape).reshape(flat.shape), flat)
    return np.asarray(sums.reshape((1,) * len(axes) + sums.shape))


Precondition = Callable[[Array], Array]


def _conditioned(choice: Choice, change: Callable[[Precondition], Precondition]) -> dict[str, Any]:
    def reconsider(done: int, residual: float) -> Precondition | None:
        other = choice.reconsider(done, residual)
        return None if other is None else change(other)

    return {"precondition": change(choice.first), "reconsider": reconsider, "beside": choice.beside}


def _determined(fidelity: Fidelity, like: Array, shape: tuple[int, ...]) -> NDArray[np.bool_] | None:
    """Return the nodes whose values a fidelity determines, None for none of them."""
    low, high = fidelity.bounds()
    if high == 0 or (fidelity.width > 1 and low == 0):
        return None
    return np.ones(shape, bool) if low > 0 else to_numpy(fidelity.times(constant_like(np.ones(shape), like))) > 0


def _told(result: Solved, rtol: float, choice: Choice) -> Minimizer:
    if not math.isfinite(result.residual):
        raise NumericalError(
            "affinity: conjugate gradients broke down, since degrees (or fidelities) span more decades than a "
            "float has; use equilibrium(flow, method='direct'), a wider kernel or smaller logits"
        )
    return told(result, rtol, choice.used)


def told(result: Solved, rtol: float, used: str = "") -> Minimizer:
    success, advice = verdict(result.residual, rtol, result.error)
    message = f"residual {result.residual:.3g} after {result.iterations} iterations{advice}"
    message += f"; preconditioner: {used}" if used else ""
    return Minimizer(result.x, result.residual, result.iterations, success, message)
