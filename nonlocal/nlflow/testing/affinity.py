"""Promises of affinities."""

from __future__ import annotations

from typing import Any

import numpy as np

from nlflow._array import Array, Floats, to_numpy
from nlflow.affinities import Affinity
from nlflow.affinities.checks import check_averages
from nlflow.errors import InputError, NumericalError
from nlflow.testing.contract import Contract, ContractError, random

_MOST = 2000  # nodes, of which the matrix is formed


def check_affinity(affinity: Affinity) -> None:
    """Check the promises of an affinity against the matrix P of its averages; O(N) averages and O(N^3) time.

    Parameters
    ----------
    affinity : Affinity
        Of at most 2000 nodes.

    Raises
    ------
    ContractError
        If a check fails.
    InputError
        For what is no affinity, and for more nodes.

    Examples
    --------
    >>> from nlflow import Gaussian, Grid, affinity
    >>> from nlflow.testing import check_affinity
    >>> check_affinity(affinity(Gaussian(width=2.0), Grid((5, 4))))
    """
    contract = Contract("affinity", affinity, Affinity)
    n, shape = affinity.domain.size, affinity.domain.shape
    if n > _MOST:
        raise InputError(f"affinity: got {n} nodes, expected at most {_MOST}, of which the matrix is formed")
    try:
        check_averages(affinity)
    except InputError as error:
        raise ContractError(str(error)) from error
    matrix = _matrix(contract, affinity)
    rounding = _rounding(affinity)
    _check_signals(contract, affinity, matrix, rounding)
    lowest = float(matrix.min())
    contract.holds(lowest >= -rounding, "weights are >= 0", f"an entry {lowest:.3g} of P", "entries >= 0")
    logs = np.asarray(to_numpy(affinity.log_degree), dtype=np.float64).ravel()
    contract.holds(bool(np.all(np.isfinite(logs))), "log_degree is finite", logs, "a number for each node")
    weights = np.asarray(affinity.domain.weights, dtype=np.float64).ravel()
    k = np.exp(logs - logs.max())[:, None] * matrix / weights  # over exp(max log d)
    if affinity.symmetric:
        contract.near("symmetric: w d P is that of a symmetric k, with the degree that is told", k, k.T, 10 * rounding)
    if affinity.symmetric and affinity.positive_semidefinite:
        root = np.sqrt(weights)
        form = root[:, None] * (k + k.T) / 2 * root
        values = np.linalg.eigvalsh(form)
        contract.holds(
            values[0] >= -100 * rounding * values[-1], "positive semidefinite", f"an eigenvalue {values[0]:.3g}", ">= 0"
        )
    _check_related(contract, affinity, matrix, k, weights, rounding)
    contract.holds(affinity.memory_bytes >= 0, "memory_bytes counts what is kept", affinity.memory_bytes, "bytes >= 0")
    contract.holds(type(affinity).__name__ in repr(affinity), "repr names the class", repr(affinity), "its name")
    contract.refuses("another shape is refused", affinity.average, affinity.as_signal(random(*shape, 2, 2, seed=1)))
    bad = random(*shape)
    bad.flat[0] = np.nan
    contract.refuses("NaN is refused", affinity.average, affinity.as_signal(bad))


def _rounding(affinity: Affinity) -> float:
    single = str(affinity.as_signal(np.zeros(affinity.domain.shape)).dtype).endswith("float32")
    return (1e-5 if single else 1e-10) + 4 * affinity.error_estimate


def _matrix(contract: Contract, affinity: Affinity) -> Floats:
    n = affinity.domain.size
    units = affinity.as_signal(np.eye(n).reshape(*affinity.domain.shape, n))
    columns = contract.kept("averages keep shape and dtype", contract.asked("average", affinity.average, units), units)
    return np.asarray(to_numpy(columns), dtype=np.float64).reshape(n, n)


def _check_signals(contract: Contract, affinity: Affinity, matrix: Floats, rounding: float) -> None:
    shape = affinity.domain.shape
    for channels in ((), (1,), (3,)):
        u = affinity.as_signal(random(*shape, *channels))
        promise = f"signals of shape domain.shape + {channels} are averaged, each channel by itself"
        found = contract.kept(promise, contract.asked(promise, affinity.average, u), u)
        expected = matrix @ np.asarray(to_numpy(u), dtype=np.float64).reshape(len(matrix), -1)
        contract.near(promise, np.asarray(to_numpy(found)).reshape(len(matrix), -1), expected, 10 * rounding)
    if affinity.dtype is None:
        single = random(*shape).astype(np.float32)
        contract.kept("dtype None: float32 signals stay float32", affinity.average(single), single)


def _check_related(
    contract: Contract, affinity: Affinity, matrix: Floats, k: Floats, weights: Floats, rounding: float
) -> None:
    law = np.abs(random(*affinity.domain.shape, seed=2))
    given = affinity.as_signal(law / law.sum())
    try:
        pushed = affinity.push(given)
    except NumericalError:  # what cannot be told is refused
        pushed = None
    if pushed is not None:
        expected = np.asarray(to_numpy(given), dtype=np.float64).ravel() @ matrix
        contract.near("push(p) is p P", np.asarray(to_numpy(pushed)).ravel(), expected, 100 * rounding)
    twice = affinity.scaled(2.0)
    u = affinity.as_signal(random(*affinity.domain.shape, seed=3))
    contract.near("scaled(c) keeps averages", twice.average(u), affinity.average(u), 10 * rounding)
    logs = _logs(affinity)
    contract.near("scaled(c) has c times the degree", _logs(twice), logs + np.log(2.0), rounding)
    try:
        both: Any = affinity.symmetrized()
    except (NumericalError, InputError):
        return
    sums = k + k.T
    told = np.exp(_logs(both) - logs.max())
    # A loop alone may be that of a node which sees nobody, and k + k^T is without it then.
    others = _without_loops(sums) @ weights
    lacking = (others == 0) | (np.abs(told - others) < np.abs(told - sums @ weights))
    bare = lacking & ~_without_loops(k).any(axis=1)
    sums[bare, bare] = 0
    degree = sums @ weights
    linked = degree > 0  # the others keep their value, whatever their degree is
    v = np.asarray(to_numpy(u), dtype=np.float64).ravel()
    expected = np.where(linked, (sums * weights) @ v / np.where(linked, degree, 1.0), v)
    contract.near("symmetrized() averages with k + k^T", to_numpy(both.average(u)).ravel(), expected, 100 * rounding)
    contract.near("symmetrized() has the degree of k + k^T", told[linked], degree[linked], 100 * rounding)


def _without_loops(k: Floats) -> Floats:
    return k - np.diag(np.diag(k))


def _logs(affinity: Any) -> Floats:
    logs: Array = affinity.log_degree
    return np.asarray(to_numpy(logs), dtype=np.float64).ravel()
