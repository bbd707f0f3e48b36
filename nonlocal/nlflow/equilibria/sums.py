"""Traces tr g(A) and forms <f, g(A) f> of a flow's operator A."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np

from nlflow._array import Array, Floats, constant_like, namespace, over_channels, to_numpy, underflowing
from nlflow.errors import InputError, NumericalError, check_choice, check_generator, check_integer, checked_call
from nlflow.flows.ensemble import students_t
from nlflow.flows.functions import eigenpairs, is_aside, raw_values, symmetric_flow, transform_of, values_of
from nlflow.flows.linear import LinearFlow
from nlflow.flows.spectrum import dense_operator, relaxation_rate
from nlflow.functionals.energies import E, J
from nlflow.functionals.fidelity import NodeFidelity
from nlflow.functionals.krylov import Lanczos, eigen_tridiagonal
from nlflow.functionals.metrics import Metric
from nlflow.functionals.minimizer import inner_product
from nlflow.functionals.preconditioners.transform import Diagonal

METHODS = ("auto", "transform", "dense", "lanczos")
DENSE_NODES = 2000  # up to which ``auto`` takes all eigenvalues, a few seconds on one core

Function = Callable[[Floats], Floats]


@dataclass(frozen=True)
class Estimate:
    """A number, exact or estimated from random vectors.

    Attributes
    ----------
    value : float
    error : float
        Half the width of its 95 % interval; 0 for exact methods.
    method : {'transform', 'dense', 'lanczos'}
    averages : int
        Averages taken, without those that form a matrix.
    """

    value: float
    error: float
    method: str
    averages: int

    @property
    def exact(self) -> bool:
        """Whether the method is exact."""
        return self.method != "lanczos"


@dataclass(frozen=True)
class _Measure:
    """Nodes and weights of sums over a spectrum, twice: of Gauss's rule and of Gauss's and Radau's.

    The second has a node at the lower end. For log(a + s) and for powers of 1 / (a + s) one is below the integral and
    the other above (Golub and Meurant 2010, Matrices, Moments and Quadrature, ch. 6).
    """

    nodes: tuple[Floats, Floats]
    weights: tuple[Floats, Floats]

    def integrals(self, g: Function) -> Floats:
        return np.array([float(w @ g(a)) for a, w in zip(self.nodes, self.weights, strict=True)])


@dataclass(frozen=True)
class ExactSums:
    """Sums over a spectrum that is known.

    Attributes
    ----------
    values : array of shape (K,)
        Eigenvalues, without that of constants where these are an eigenvector.
    counts : array of shape (K,)
        Their multiplicities.
    power : array of shape (K,)
        The sum of squares of the signal's parts, in the measure and over channels.
    method : {'transform', 'dense'}
    """

    values: Floats
    counts: Floats
    power: Floats
    method: str
    averages: int = 0

    def trace(self, g: Function) -> Estimate:
        return Estimate(float(self.counts @ g(self.values)), 0.0, self.method, self.averages)

    def form(self, g: Function) -> tuple[float, float]:
        """Return <f, g(A) f>, channels added up, without the mean, and what the quadrature leaves open."""
        return float(self.power @ g(self.values)), 0.0


@dataclass(frozen=True)
class QuadratureSums:
    """`ExactSums` by Lanczos quadrature."""

    forms: Sequence[_Measure]
    probes: Sequence[_Measure]
    averages: int
    method: str = "lanczos"

    def trace(self, g: Function) -> Estimate:
        """See `ExactSums.trace`."""
        both = np.array([measure.integrals(g) for measure in self.probes])
        values = both.mean(axis=1)
        gap = float(abs(both[:, 0].mean() - both[:, 1].mean()) / 2)
        return Estimate(float(values.mean()), float(half_width(values)) + gap, self.method, self.averages)

    def form(self, g: Function) -> tuple[float, float]:
        """See `ExactSums.form`."""
        both = np.array([measure.integrals(g) for measure in self.forms])
        return float(both.mean(axis=1).sum()), float(np.abs(np.diff(both, axis=1)).sum() / 2)


Sums: TypeAlias = ExactSums | QuadratureSums


@checked_call
@underflowing
def trace_of(
    L: Any,
    function: Callable[[Floats], Any],
    metric: str | Metric | None = None,
    *,
    method: str = "auto",
    samples: int = 16,
    averages: int = 100,
    rng: Any = 0,
) -> Estimate:
    """Return the trace of g(A), the sum of g over all eigenvalues of A.

    Parameters
    ----------
    L, function, metric
        See `nlflow.flows.function_of`.
    method : {'auto', 'transform', 'dense', 'lanczos'}
        Exact by a transform or from all eigenvalues (``auto``: up to 2000 unknowns); else stochastic Lanczos
        quadrature (Ubaru, Chen and Saad 2017, doi 10.1137/16M1104974).
    samples : int
        Random vectors of signs; the error falls as 1 / sqrt(samples).
    averages : int
        Steps of Lanczos iteration.
    rng : seed or numpy.random.Generator

    Returns
    -------
    Estimate

    Raises
    ------
    InputError
        As `nlflow.flows.function_of`; for a batch.

    Examples
    --------
    >>> import numpy as np
    >>> from nlflow import Gaussian, Grid, J, affinity
    >>> from nlflow.equilibria import trace_of
    >>> path = affinity(Gaussian(2.0), Grid(50, boundary="reflect"))
    >>> trace_of(path, lambda a: np.exp(-100 * a), "degree").value < 10  # of 50 modes: few are slow
    True
    """
    flow = symmetric_flow(L, metric)

    def g(a: Floats) -> Floats:
        return values_of(function, a, flow.spectral_bounds(), is_aside(flow))

    low = np.array([flow.spectral_bounds()[0]])
    # Where g has no value at the bound the smallest eigenvalue may still be larger, if constants are not the first.
    gap = not is_aside(flow) and not np.isfinite(raw_values(function, low)).all()
    sums = spectral_sums(flow, method=method, samples=samples, averages=averages, rng=rng, gap=gap)
    found = sums.trace(g)
    return replace(found, value=found.value + float(g(low)[0])) if is_aside(flow) else found


def spectral_sums(
    flow: LinearFlow, f: Array | None = None, *, method: str, samples: int, averages: int, rng: Any, gap: bool = False
) -> Sums:
    # `f` is the signal of `form`, `gap` whether g has no value at 0.
    if flow.affinity.domain.leading:
        raise InputError("affinity: got that of a batch, expected one item; take affinity.item(...)")
    check_choice("method", method, METHODS)
    samples, averages, rng = check_estimates(samples, averages, rng)
    width = 1 if flow.fidelity is None else flow.fidelity.width
    size = flow.affinity.domain.size * width
    found = transform_of(flow, method) if method in ("auto", "transform") else None
    if found is not None:
        return _of_transform(flow, *found, f)
    if method == "dense" or (method == "auto" and size <= DENSE_NODES):
        return _of_matrix(flow, f, width)
    return _Quadrature(flow, gap).sums(f, width, samples, averages, rng)


def check_estimates(samples: Any, averages: Any, rng: Any) -> tuple[int, int, np.random.Generator]:
    samples = check_integer("samples", samples, minimum=2)
    return samples, check_integer("averages", averages, minimum=1), check_generator(rng)


def observed_sums(energy: E, strength: Floats) -> tuple[ExactSums, Floats]:
    """Return sums over the spectrum of J between observed nodes, a Schur complement, and their measure; O(N^3)."""
    flow = symmetric_flow(J(energy.given), energy.measure)
    seen = strength.ravel() > 0
    size = int(seen.size)
    if size > DENSE_NODES:
        raise InputError(
            f"energy: got a fidelity for each of {size} nodes, expected one number beyond {DENSE_NODES} nodes"
        )
    measure = measure_of(energy).ravel()
    laplacian = measure[:, None] * dense_operator(flow)
    laplacian = (laplacian + laplacian.T) / 2
    inner, cross = laplacian[np.ix_(~seen, ~seen)], laplacian[np.ix_(~seen, seen)]
    try:
        left = laplacian[np.ix_(seen, seen)] - (cross.T @ np.linalg.solve(inner, cross) if len(inner) else 0.0)
    except np.linalg.LinAlgError as error:
        raise NumericalError(
            "fidelity: some part of the domain sees no node with a fidelity > 0; give each part one"
        ) from error
    weight = measure[seen] * strength.ravel()[seen]
    root = np.sqrt(weight)
    values, vectors = np.linalg.eigh((left + left.T) / 2 / root[:, None] / root)
    vectors[:, 0] = root / np.linalg.norm(root)
    f = np.asarray(to_numpy(energy.observed), np.float64).reshape(size, -1)[seen]
    f = f - (weight @ f) / weight.sum()
    power = ((vectors.T @ (root[:, None] * f)) ** 2).sum(axis=1)
    return ExactSums(np.maximum(values[1:], 0.0), np.ones(len(values) - 1), power[1:], "dense"), weight


def _of_transform(flow: LinearFlow, basis: Diagonal, values: Floats, f: Array | None) -> ExactSums:
    counts = np.broadcast_to(basis.multiplicities, values.shape).ravel()[1:]
    power = np.zeros(values.size)
    if f is not None:
        flat = f.reshape(*flow.affinity.domain.shape, -1)
        power = basis.power(basis.forward(flat)).sum(axis=-1).ravel() * float(flow.measure(f).ravel()[0])
    return ExactSums(np.maximum(values, flow.spectral_bounds()[0]).ravel()[1:], counts, power[1:], "transform")


def _of_matrix(flow: LinearFlow, f: Array | None, width: int) -> ExactSums:
    values, vectors, root = eigenpairs(flow)
    power = np.zeros(len(values))
    if f is not None:
        n = flow.affinity.domain.size
        flat = np.asarray(to_numpy(f), np.float64).reshape(n, -1, width).swapaxes(1, 2).reshape(n * width, -1)
        if is_aside(flow):
            flat = flat - (root**2 @ flat) / (root @ root)
        power = float(to_numpy(flow.measure(f)).max()) * ((vectors.T @ (root[:, None] * flat)) ** 2).sum(axis=1)
    kept = slice(1 if is_aside(flow) else 0, None)
    values = np.maximum(values, flow.spectral_bounds()[0])
    return ExactSums(values[kept], np.ones(len(values))[kept], power[kept], "dense")


class _Quadrature:
    """Lanczos quadrature for the spectrum of A of a flow."""

    def __init__(self, flow: LinearFlow, gap: bool) -> None:
        self._flow, self._aside, self._averages = flow, is_aside(flow), 0
        low, self._high = flow.spectral_bounds()
        # Where Radau's rule has its node: no eigenvalue that counts is smaller.
        self._node = relaxation_rate(flow) * (1 - 1e-6) if gap and not low > 0 else low

    def sums(
        self, f: Array | None, width: int, samples: int, averages: int, rng: np.random.Generator
    ) -> QuadratureSums:
        """Return sums from the channels of `f` and from random signs."""
        like = self._flow.affinity.log_degree if f is None else f
        xp, shape = namespace(like), self._flow.affinity.domain.shape
        signs = 2.0 * rng.integers(0, 2, (*shape, samples * width), dtype=np.int8) - 1
        # Of covariance 1 / m, so that the mean of forms in the measure is the trace.
        root = xp.sqrt(self._flow.measure(like))
        vectors = constant_like(signs, like) / over_channels(root, xp.reshape(like, (*shape, -1)))
        if width > 1:  # one after another where a fidelity mixes channels: they would be one system
            parts = [vectors[..., i * width : (i + 1) * width] for i in range(samples)]
            probes = [self._measures(part, averages)[0] for part in parts]
            return QuadratureSums([] if f is None else self._measures(f, averages), probes, self._averages)
        if f is not None:
            vectors = xp.concat([xp.reshape(f, (*shape, -1)), vectors], axis=-1)
        measures = self._measures(vectors, averages)
        return QuadratureSums(measures[:-samples], measures[-samples:], self._averages)

    def _measures(self, vectors: Array, averages: int) -> list[_Measure]:
        flow = self._flow
        inner = inner_product(
            over_channels(flow.measure(vectors), vectors), tuple(range(len(flow.affinity.domain.shape))),
            NodeFidelity(0.0) if flow.fidelity is None else flow.fidelity,
        )  # fmt: skip

        def free(v: Array) -> Array:
            return v - flow.mean(v) if self._aside else v

        counted, most = flow.applications, min(averages, math.prod(vectors.shape))
        steps = Lanczos(flow.linear, free(vectors), inner, keep=False, free=free)
        while steps.step() and len(steps.alphas) < most:
            pass
        flow.applications = counted
        self._averages += len(steps.alphas)
        return [self._rules(*steps.tridiagonal(i), size) for i, size in enumerate(steps.sizes)]

    def _rules(self, diagonal: Floats, beside: Floats, size: float) -> _Measure:
        gauss = radau = _rule(diagonal, beside[:-1], size)
        if beside[-1] != 0:
            # The last entry that gives T the eigenvalue of the node.
            values, vectors = eigen_tridiagonal(diagonal, beside[:-1])
            gaps = np.maximum(values - self._node, 1e-14 * self._high)
            last = self._node + float(beside[-1] ** 2 * np.sum(vectors[-1] ** 2 / gaps))
            radau = _rule(np.append(diagonal, last), beside, size)
        nodes = np.maximum(gauss[0], self._node), np.maximum(radau[0], self._node)
        return _Measure(nodes, (gauss[1], radau[1]))


def _rule(diagonal: Floats, beside: Floats, size: float) -> tuple[Floats, Floats]:
    values, vectors = eigen_tridiagonal(diagonal, beside)
    return values, size**2 * vectors[0] ** 2


def half_width(values: Floats) -> Any:
    count = values.shape[-1]
    return students_t(count - 1) * values.std(axis=-1, ddof=1) / math.sqrt(count)


def positive(a: Floats) -> Floats:
    if not a.min(initial=math.inf) > 1e-13 * a.max(initial=0.0):
        raise NumericalError(
            "affinity: it falls into parts that do not see each other, each with a mean of its own; take a wider "
            "kernel or each part by itself"
        )
    return a


def measure_of(energy: E) -> Floats:
    weights = np.asarray(energy.affinity.domain.weights, np.float64)
    if energy.measure == "l2":
        return weights
    return np.asarray(weights * np.asarray(to_numpy(energy.affinity.degree), np.float64))
