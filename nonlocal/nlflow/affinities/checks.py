"""Checks of an affinity where it enters a functional, a flow or a chain."""

from __future__ import annotations

from typing import Any

import numpy as np

from nlflow._array import namespace, scalar
from nlflow.affinities.base import Affinity
from nlflow.errors import InputError, kind_of


def check_affinity(affinity: Any, name: str = "affinity") -> Affinity:
    if not isinstance(affinity, Affinity):
        raise InputError(f"{name}: got {kind_of(affinity)}, expected an Affinity; build one with affinity()")
    if not affinity._sound and _of_somebodys_own(affinity):
        check_averages(affinity)
    affinity._sound = True
    return affinity


def _of_somebodys_own(affinity: Affinity) -> bool:
    """Whether averages or degrees are those of a class outside the package."""
    return any(
        not next(one for one in type(affinity).__mro__ if method in vars(one)).__module__.startswith("nlflow.")
        for method in ("_average", "_log_degree")
    )


def check_averages(affinity: Affinity) -> None:
    # One average of three channels: ones, and noise twice.
    name, shape = type(affinity).__name__, (*affinity.domain.shape, 3)
    noise = np.random.default_rng(0).uniform(-1, 1, shape)
    noise[..., 0] = 1
    logs = affinity._log_degree()
    if tuple(getattr(logs, "shape", ())) != affinity.domain.shape:
        got = tuple(getattr(logs, "shape", ()))
        raise InputError(
            f"affinity: log_degree of {name} has shape {got}, expected {affinity.domain.shape}, a node each"
        )
    u = affinity.as_signal(noise)
    average = affinity._average(u)
    got = tuple(getattr(average, "shape", ()))
    if got != shape or average.dtype != u.dtype:
        raise InputError(
            f"affinity: the average of {name} has shape {got} and dtype {getattr(average, 'dtype', None)} for a signal "
            f"of shape {shape} and {u.dtype}, expected those of the signal (domain.shape, or domain.shape + (D,))"
        )
    xp = namespace(u)
    rounding = (1e-4 if u.dtype == xp.float32 else 1e-8) + 2 * affinity.error_estimate
    off = scalar(xp.max(xp.abs(average[..., 0] - 1)))
    if not off <= rounding:
        raise InputError(
            f"affinity: {name} averages a signal of ones to values off by {off:.3g}, expected 1 at every node; divide "
            "sums by the degree, sum_j w_j k_ij"
        )
    outside = scalar(xp.max(xp.abs(average)))
    if not outside <= 1 + rounding:
        raise InputError(
            f"affinity: {name} averages values from -1 to 1 to {outside:.4g}, expected averages within their range, as "
            "weights >= 0 give; take weights k_ij >= 0"
        )
    if not affinity.symmetric:
        return
    measure = affinity.measure("degree", u)
    products = [scalar(xp.sum(measure * u[..., i] * average[..., j], dtype=xp.float64)) for i, j in ((1, 2), (2, 1))]
    if not abs(products[0] - products[1]) <= rounding:
        raise InputError(
            f"affinity: {name} says that it is symmetric, but sum w d u Pv is {products[0]:.6g} and sum w d v Pu "
            f"{products[1]:.6g}, expected the same; set symmetric=False, or let log_degree be that of the sums"
        )
