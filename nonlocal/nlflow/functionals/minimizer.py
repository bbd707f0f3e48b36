"""Minimizers: the record of a result, and the linear system that the minimizer of E solves."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nlflow._array import Array, constant_like, is_numpy, namespace, over_channels, power_of_two, to_numpy
from nlflow.affinities import Affinity
from nlflow.errors import InputError, NumericalError
from nlflow.functionals.constraint import Held
from nlflow.functionals.fidelity import Fidelity, NodeFidelity
from nlflow.functionals.krylov import Solved, conjugate_gradients, verdict
from nlflow.functionals.preconditioners import Choice


@dataclass(frozen=True)
class Minimizer:
    """A minimizer, or the limit of a flow, and how well it was reached.

    Attributes
    ----------
    u : array
        Shaped like the observed signal.
    residual : float
        What is left of its equation, relative to the right-hand side and recomputed from `u`. For a minimizer of E the
        larger of two ratios: that of the norms in the degree measure, and that of the largest entries. Where fidelities
        of nodes differ by more than 1000, entries are divided by 1 + fidelity~ before; else the largest would hide the
        others.
    iterations : int
    success : bool
        Whether the residual is within the tolerance.
    message : str
    """

    u: Array
    residual: float
    iterations: int
    success: bool
    message: str


def check_shape(name: str, signal: Array, observed: Array) -> Array:
    """Return a signal if it has the shape of the observed one, or raise `InputError`."""
    if tuple(signal.shape) != tuple(observed.shape):
        raise InputError(
            f"{name}: got shape {tuple(signal.shape)}, expected {tuple(observed.shape)}, that of the observed signal"
        )
    return signal


def minimize(
    affinity: Affinity, fidelity: Fidelity, f: Array, start: Array | None, *, rtol: float, maxiter: int, name: str
) -> Minimizer:
    """Return the minimizer u of E, ((I - P) + phi) u = phi f, by preconditioned conjugate gradients.

    Parameters
    ----------
    affinity : Affinity
        Of K.
    fidelity : Fidelity
        phi, that of the degree metric, in whose inner product the system is self-adjoint.
    f : array
    start : array, optional
        First guess.
    rtol : float
    maxiter : int
    name : str
        Of the preconditioner; see `nlflow.E.minimizer`.
    """
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
    mass = total(measure + 0 * f)

    def operator(v: Array) -> Array:
        difference = v - affinity._average(v)
        # I - P has no mean in its measure; what rounding leaves of one would be amplified by 1 / fidelity.
        difference = difference - xp.astype(total(measure * difference) / mass, f.dtype)
        return difference + fidelity.times(v)

    choice = Choice(affinity, fidelity, operator, f, name, rtol)
    if start is not None:
        guess = start / size - shift
    else:
        # A transform begins at 0, where there is nothing for rounding to leave a constant of, which it would multiply
        # by 1 / fidelity.
        guess = 0 * centred if choice.used == "transform" else centred
    # The system over its size, a power of two, which changes no bit: squares of a large fidelity stay in range.
    low, high = fidelity.bounds()
    large = power_of_two(max(high, 1.0))

    def scaled(precondition: Callable[[Array], Array]) -> Callable[[Array], Array]:
        return lambda v: precondition(v) * large

    stiff = 1 + high > _FAR_APART * (1 + low)
    result = conjugate_gradients(
        lambda v: operator(v) / large, fidelity.times(centred) / large, guess,
        inner=_inner(measure, axes, fidelity), rtol=rtol, maxiter=maxiter, **_conditioned(choice, scaled),
        measured=(lambda r: fidelity.damped(r, 1.0)) if stiff else (lambda r: r),
    )  # fmt: skip
    found = _told(result, rtol, choice)
    with np.errstate(over="ignore"):  # an iteration that failed may have gone anywhere
        return replace(found, u=(result.x + shift) * size)


_FAR_APART = 1e3  # ratio of two fidelities from which on one hides the other in a norm
_STIFF = 1e4
"""The fidelity that stands for a constraint where a preconditioner needs one, beside I - P."""


def minimize_held(
    affinity: Affinity, fidelity: Fidelity, f: Array, held: Held, start: Array | None, *, rtol: float, maxiter: int,
    name: str,
) -> Minimizer:  # fmt: skip
    """Return the minimizer u of E among the signals with the values of a constraint.

    With M zero at its nodes and g the values: M ((I - P) + phi) M v = M (phi f - ((I - P) + phi) g), u = v + g, less a
    constant. Self-adjoint and positive between the free nodes, which conjugate gradients never leave. Arguments are
    those of `minimize`, with a fidelity that may be 0 everywhere.
    """
    if held.timed:
        raise InputError("constraint: got values that depend on time, expected those of one moment for a minimizer")
    if name == "transform":
        raise InputError(
            "preconditioner: got 'transform', expected 'auto', 'diagonal' or 'multigrid' with a constraint"
        )
    xp, axes = namespace(f), tuple(range(len(affinity.domain.shape)))
    held.check_reached(affinity, _determined(fidelity, f, affinity.domain.shape))
    measure = over_channels(affinity.measure("degree", f, by_item=True), f)
    values = held.at(0.0, f)
    shift = xp.astype(xp.sum(values / len(held), axis=axes, keepdims=True, dtype=xp.float64), f.dtype)
    inside, drawn = values - held.values_of(shift + 0 * f), fidelity.times(f - shift)
    size = power_of_two(max(float(xp.max(xp.abs(inside))), float(xp.max(xp.abs(drawn)))))

    def operator(v: Array) -> Array:
        return v - affinity._average(v) + fidelity.times(v)

    stiff = fidelity
    if isinstance(fidelity, NodeFidelity) and is_numpy(f):
        stiff = NodeFidelity(fidelity.values + _STIFF * constant_like(held.mask, f))
    choice = Choice(affinity, stiff, lambda v: v - affinity._average(v) + stiff.times(v), f, name, rtol)

    def within(precondition: Callable[[Array], Array]) -> Callable[[Array], Array]:
        return lambda v: held.free(precondition(v))

    large = power_of_two(max(fidelity.bounds()[1], 1.0))
    b = held.free(drawn / size - operator(inside / size)) / large
    guess = 0 * f if start is None else held.free((start - shift) / size)
    result = conjugate_gradients(
        lambda v: held.free(operator(v)) / large, b, guess, inner=_inner(measure, axes, fidelity), rtol=rtol,
        maxiter=maxiter, **_conditioned(choice, within),
    )  # fmt: skip
    found = _told(result, rtol, choice)
    with np.errstate(over="ignore"):
        return replace(found, u=held.held(result.x * size + shift, 0.0))


def _inner(measure: Array, axes: tuple[int, ...], fidelity: Fidelity) -> Callable[[Array, Array], Array]:
    """Return the inner product in a measure. A matrix couples the channels: they are one system, otherwise one each."""
    xp = namespace(measure)

    def inner(a: Array, b: Array) -> Array:
        products = xp.sum(measure * a * b, axis=axes, keepdims=True, dtype=xp.float64)
        return products if fidelity.width == 1 else xp.sum(products, axis=-1, keepdims=True)

    return inner


Precondition = Callable[[Array], Array]


def _conditioned(choice: Choice, change: Callable[[Precondition], Precondition]) -> dict[str, Any]:
    """Return arguments of conjugate gradients: the preconditioners of a choice, changed."""

    def reconsider(done: int, residual: float) -> Precondition | None:
        other = choice.reconsider(done, residual)
        return None if other is None else change(other)

    return {"precondition": change(choice.first), "reconsider": reconsider}


def _determined(fidelity: Fidelity, like: Array, shape: tuple[int, ...]) -> NDArray[np.bool_] | None:
    """Return the nodes whose values a fidelity determines, None for none of them."""
    low, high = fidelity.bounds()
    if high == 0 or (fidelity.width > 1 and low == 0):
        return None
    return np.ones(shape, bool) if low > 0 else to_numpy(fidelity.times(constant_like(np.ones(shape), like))) > 0


def _told(result: Solved, rtol: float, choice: Choice) -> Minimizer:
    """Return the record of what conjugate gradients found, or raise `NumericalError`."""
    if not math.isfinite(result.residual):
        raise NumericalError(
            "affinity: conjugate gradients broke down, since degrees (or fidelities) span more decades than a "
            "float has; use equilibrium(flow, method='direct'), a wider kernel or smaller logits"
        )
    success, advice = verdict(result.residual, rtol)
    message = (
        f"residual {result.residual:.3g} after {result.iterations} iterations{advice}; preconditioner: {choice.used}"
    )
    return Minimizer(result.x, result.residual, result.iterations, success, message)
