"""Problems and solutions for the options of a study."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.linalg
from numpy.typing import NDArray

from nlflow._array import Array, constant_like, to_numpy
from nlflow.affinities import Affinity, affinity
from nlflow.backends.devices import CPU
from nlflow.domains import Boundary, Domain, Grid, Points
from nlflow.errors import InputError, NumericalError, check_array, check_memory
from nlflow.flows.gradient import AttentionFlow, GradientFlow
from nlflow.flows.integrators import Exponential, Integrator
from nlflow.flows.linear import LinearFlow
from nlflow.flows.result import Solution, Status
from nlflow.flows.solver import solve
from nlflow.flows.spectrum import dense_operator
from nlflow.functionals.energies import E, J
from nlflow.studies.contract import Kind, Options, Row, Setting
from nlflow.studies.options import kernel_label

Floats = NDArray[np.float64]
DENSE = 1000  # nodes of which matrices are formed
_LONG = 1e6  # of a time by the largest eigenvalue: an expansion takes about its root of averages


def make_settings(kind: Kind, options: Options) -> list[Setting]:
    axes = [name for name in kind.axes if options[name] is not None]
    fixed = {name: value for name, value in options.items() if name not in axes}
    given = options.get("keys") if options.get("domain") is None else options["domain"]
    entries = [list(zip(options[name], _labels(name, options[name]), strict=True)) for name in axes]
    cases = []
    for combination in itertools.product(*entries):
        chosen: Options = {}
        label: Row = {}
        for name, (value, words) in zip(axes, combination, strict=True):
            chosen[name], label[name] = value, words
            if name == "kernel" and "nodes" not in axes and given is not None:
                label["nodes"] = given.size if isinstance(given, Domain) else len(given)
        cases.append(Setting(label, {**fixed, **chosen}))
    return cases


def _labels(name: str, values: list[Any]) -> list[Any]:
    """Return what tells the values of an option apart in tables; those of the same name are numbered."""
    labels: list[Any] = []
    for value in values:
        label = kernel_label(value) if name == "kernel" else value
        if callable(label):
            label = getattr(label, "__name__", type(label).__name__)
        same, number = label, 1
        while label in labels:
            number += 1
            label = f"{same}#{number}"
        labels.append(label)
    return labels


def grid(nodes: int, dimension: int, boundary: Boundary) -> Grid:
    return Grid((nodes,) * dimension, spacing=1 / nodes, boundary=boundary)


@dataclass(frozen=True)
class Problem:
    """An affinity, and a signal on its domain."""

    affinity: Affinity
    start: Array

    @property
    def domain(self) -> Domain:
        return self.affinity.domain


def extent(options: Options) -> tuple[int, int, int, str]:
    keys, domain = options.get("keys"), options.get("domain")
    nodes = domain.size if domain is not None else len(keys) if keys is not None else 0
    nodes = nodes or options["nodes"] ** options["dimension"]
    given = options.get("start") if options.get("values") is None else options["values"]
    channels = options.get("channels") or (1 if given is None or callable(given) else max(1, given.size // nodes))
    return nodes, channels if keys is None else keys.size // nodes, channels, options.get("dtype", "float64")


def build(options: Options, rng: np.random.Generator, *, exact: bool = False) -> Problem:
    """Return the problem of a case; with `exact` in float64, on data rounded to the dtype of the case."""
    device, dtype = options.get("device", CPU), options.get("dtype", "float64")
    used = "float64" if exact else dtype

    def placed(array: Floats | None) -> Any:
        return None if array is None else device.place(array.astype(dtype).astype(used))

    keys, values = options.get("keys"), options.get("values")
    domain: Domain
    if options.get("domain") is not None:
        domain = options["domain"]
    elif keys is not None:
        domain = Points(np.zeros(len(keys)))
    else:
        domain = grid(options["nodes"], options["dimension"], options["boundary"])
    given = options.get("start") if values is None else values
    if given is None:
        start: Floats = rng.standard_normal((*domain.shape, options.get("channels") or 1))
    else:
        start = np.asarray(sampled(given, domain), dtype=np.float64)
    features = keys
    if features is None and not options["kernel"].positional:
        features = start
    limit = device.check_fits(*extent(options)[:3], used) if device.tensors else None
    weights = affinity(
        options["kernel"], domain, placed(features), queries=placed(options.get("queries")), memory_limit=limit
    )
    return Problem(weights, placed(start))


def sampled(signal: Any, domain: Domain) -> Any:
    if not callable(signal):
        return domain.check_signal("start", signal)
    values = values_at(signal, domain.nodes)
    return domain.check_signal("start", values.reshape(*domain.shape, *values.shape[1:]))


def values_at(signal: Callable[[Floats], Any], positions: Floats) -> Floats:
    values = np.asarray(to_numpy(check_array("start", signal(positions))), dtype=np.float64)
    count = len(positions)
    if values.ndim not in (1, 2) or len(values) != count:
        raise InputError(
            f"start: got a function that returns shape {values.shape} for {count} nodes, expected "
            f"({count},) or ({count}, D)"
        )
    return values


def smooth(boundary: str, channels: int) -> Callable[[Floats], Floats]:
    def signal(x: Floats) -> Floats:
        shift = np.arange(channels) * 0.7
        if boundary == "periodic":
            parts = np.sin(2 * np.pi * x[:, :, None] + shift)
        elif boundary == "reflect":  # even about 0 and about 1
            parts = np.cos(np.pi * x[:, :, None]) * (1 + shift / 4)
        else:
            parts = np.sin(3 * x[:, :, None] + shift)
        return np.asarray(np.exp(parts.mean(axis=1)) + 0.5 * parts[:, 0] * parts[:, -1])

    return signal


def build_flow(weights: Affinity, observed: Array, metric: str, fidelity: float) -> LinearFlow:
    if metric == "degree" and not weights.symmetric:
        return AttentionFlow(weights, observed if fidelity > 0 else None, fidelity)
    functional = E(weights, observed, fidelity, measure=metric) if fidelity > 0 else J(weights)
    return GradientFlow(functional, metric)


def solve_to_end(*arguments: Any, **options: Any) -> Solution[Any]:
    solution = solve(*arguments, **options)
    if solution.status is Status.INTERRUPTED:
        raise KeyboardInterrupt
    return solution


def integrate(flow: LinearFlow, start: Array, times: float | list[float], integrator: Integrator) -> Solution[Any]:
    wanted = [0.0, times] if isinstance(times, float) else times
    solution = solve_to_end(flow, start, t_eval=wanted, integrator=integrator, energies=False)
    if not solution.success:
        raise NumericalError(f"the integration by {integrator!r} failed: {solution.message}")
    return solution


def exact_solution(flow: LinearFlow, start: Array, t: float) -> tuple[Array, float]:
    """Return u(t) to about rounding, and a bound of its relative error."""
    if _is_dense(flow, t):
        rounding = float(np.finfo(np.float64).eps) * t * flow.spectral_bounds()[1] if flow.symmetric else 0.0
        return _by_squares(flow, start, t), rounding
    solution = _expanded(flow, start, t)
    return solution.final, 2 * float(solution.stats["error_bound"])


def exact_course(flow: LinearFlow, start: Array, times: list[float]) -> list[Array]:
    """Return u at increasing times, each to about rounding."""
    if _is_dense(flow, times[-1]):
        return [_by_squares(flow, start, t) for t in times]
    return list(_expanded(flow, start, times).u)


def _is_dense(flow: LinearFlow, t: float) -> bool:
    few = flow.affinity.domain.size <= DENSE
    return not flow.symmetric or (few and t * flow.spectral_bounds()[1] > _LONG)


def _expanded(flow: LinearFlow, start: Array, times: float | list[float]) -> Solution[Any]:
    try:
        return integrate(flow, start, times, Exponential(tol=1e-13))
    except NumericalError as error:
        end = times if isinstance(times, float) else times[-1]
        raise NumericalError(
            f"the nodes almost fall into parts: t={end:.3g}, in which these mix, is too long for "
            f"{flow.affinity.domain.size} nodes; use at most {DENSE}, or a wider kernel"
        ) from error


def _by_squares(flow: LinearFlow, start: Array, t: float) -> Array:
    n = flow.affinity.domain.size
    flat = to_numpy(start).reshape(n, -1)
    size = n + flat.shape[1]
    check_memory("the exponential of a dense matrix", 10 * 8 * size**2, "use fewer nodes")
    matrix = np.zeros((size, size))
    matrix[:n, :n] = -t * dense_operator(flow)
    if flow.fidelity is not None and flow.observed is not None:
        matrix[:n, n:] = t * to_numpy(flow.fidelity.times(flow.observed)).reshape(n, -1)
    moved = scipy.linalg.expm(matrix)
    result = moved[:n, :n] @ flat + moved[:n, n:]
    return constant_like(result.reshape(tuple(start.shape)), start)
