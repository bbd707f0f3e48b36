"""Sums over the spectrum of a flow's operator A: traces tr g(A) and forms <f, g(A) f>, exact or with an error.

By a transform or from all eigenvalues they are exact; for many nodes by stochastic Lanczos quadrature (Ubaru, Chen and
Saad 2017, doi 10.1137/16M1104974), whose nodes serve all functions g.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from nlflow._array import Array, Floats, constant_like, namespace, over_channels, to_numpy
from nlflow.errors import InputError, check_choice, check_integer
from nlflow.flows.functions import eigenpairs, is_aside, transform_of
from nlflow.flows.linear import LinearFlow
from nlflow.flows.spectrum import relaxation_rate
from nlflow.functionals.fidelity import NodeFidelity
from nlflow.functionals.krylov import Lanczos, eigen_tridiagonal
from nlflow.functionals.minimizer import inner_product
from nlflow.functionals.preconditioners.transform import Diagonal
from nlflow.markov.walks import generator_of

METHODS = ("auto", "transform", "dense", "lanczos")
DENSE_NODES = 2000  # up to which ``auto`` takes all eigenvalues, a few seconds on one core

Function = Callable[[Floats], Floats]


@dataclass(frozen=True)
class Estimate:
    """A number that was computed, or estimated from random vectors.

    Attributes
    ----------
    value : float
    error : float
        Half the width of its 95 % interval: the spread over random vectors (Student's t), and what the quadrature
        leaves open. 0 where it is exact to rounding.
    method : {'transform', 'dense', 'lanczos'}
    averages : int
        Averages that it took, those of a whole matrix apart.
    """

    value: float
    error: float
    method: str
    averages: int

    @property
    def exact(self) -> bool:
        """Whether nothing was estimated."""
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


class SpectralSums:
    """Sums over the spectrum of A of a symmetric flow.

    Parameters
    ----------
    flow : LinearFlow
        Checked by `symmetric_flow`, not of a batch.
    f : array, optional
        The signal of `form`.
    method : {'auto', 'transform', 'dense', 'lanczos'}
    samples : int
        Random vectors of signs; they go side by side, so one average serves all.
    averages : int
        Steps of Lanczos iteration.
    rng : seed or numpy.random.Generator
    gap : bool
        Whether g has no value at 0: where `spectral_bounds` begin there, the smallest eigenvalue that counts is found.
    """

    def __init__(
        self, flow: LinearFlow, f: Array | None = None, *, method: str, samples: int, averages: int, rng: Any,
        gap: bool = False,
    ) -> None:  # fmt: skip
        if flow.affinity.domain.leading:
            raise InputError("affinity: got that of a batch, expected one item; take affinity.item(...)")
        check_choice("method", method, METHODS)
        self.flow, self.averages = flow, 0
        samples = check_integer("samples", samples, minimum=2)
        averages = check_integer("averages", averages, minimum=1)
        width = 1 if flow.fidelity is None else flow.fidelity.width
        self.size = flow.affinity.domain.size * width
        self.low = flow.spectral_bounds()[0]
        self.aside = is_aside(flow)
        self._counts: Floats | None = None
        found = transform_of(flow, method) if method in ("auto", "transform") else None
        if found is not None:
            self.method = "transform"
            self._of_transform(*found, f)
        elif method == "dense" or (method == "auto" and self.size <= DENSE_NODES):
            self.method = "dense"
            self._of_matrix(f, width)
        else:
            self.method = "lanczos"
            # Where Radau's rule has its node: no other eigenvalue is smaller.
            self._node = relaxation_rate(flow) * (1 - 1e-6) if gap and not self.low > 0 else self.low
            self._of_iteration(f, width, samples, averages, generator_of(rng))

    def trace(self, g: Function) -> Estimate:
        """Return the sum of g over all eigenvalues of A but that of constants, if they are an eigenvector."""
        if self._counts is not None:
            return Estimate(float(self._counts @ g(self._values)), 0.0, self.method, self.averages)
        both = np.array([measure.integrals(g) for measure in self._probes])
        values = both.mean(axis=1)
        return Estimate(float(values.mean()), _half_width(values) + _gap(both), self.method, self.averages)

    def form(self, g: Function) -> tuple[float, float]:
        """Return <f, g(A) f> in the flow's measure without the mean of f, and what the quadrature leaves open.

        Channels are added up. The mean belongs to it where constants are no eigenvector.
        """
        if self._counts is not None:
            return float(self._power @ g(self._values)), 0.0
        both = np.array([measure.integrals(g) for measure in self._forms])
        return float(both.mean(axis=1).sum()), float(np.abs(np.diff(both, axis=1)).sum() / 2)

    # ---- exact

    def _of_transform(self, basis: Diagonal, values: Floats, f: Array | None) -> None:
        self._values = np.maximum(values, self.low).ravel()[1:]
        self._counts = np.broadcast_to(basis.multiplicities, values.shape).ravel()[1:]
        if f is not None:
            flat = f.reshape(*self.flow.affinity.domain.shape, -1)
            power = basis.power(basis.forward(flat)).sum(axis=-1)
            self._power = power.ravel()[1:] * float(self.flow.measure(f).ravel()[0])

    def _of_matrix(self, f: Array | None, width: int) -> None:
        values, vectors, root = eigenpairs(self.flow)
        kept = slice(1 if self.aside else 0, None)
        self._values, self._counts = np.maximum(values, self.low)[kept], np.ones(self.size)[kept]
        if f is not None:
            n = self.flow.affinity.domain.size
            flat = np.asarray(to_numpy(f), np.float64).reshape(n, -1, width).swapaxes(1, 2).reshape(self.size, -1)
            largest = float(to_numpy(self.flow.measure(f)).max())
            if self.aside:
                flat = flat - (root**2 @ flat) / (root @ root)
            self._power = largest * ((vectors.T @ (root[:, None] * flat)) ** 2).sum(axis=1)[kept]

    # ---- estimated

    def _of_iteration(self, f: Array | None, width: int, samples: int, averages: int, rng: np.random.Generator) -> None:
        flow = self.flow
        like = flow.affinity.log_degree if f is None else f
        xp, shape = namespace(like), flow.affinity.domain.shape
        signs = 2.0 * rng.integers(0, 2, (*shape, samples * width), dtype=np.int8) - 1
        # Of covariance 1 / m, so that the mean of forms in the measure is the trace.
        root = namespace(like).sqrt(flow.measure(like))
        vectors = constant_like(signs, like) / over_channels(root, xp.reshape(like, (*shape, -1)))
        if width > 1:
            self._mixed(f, vectors, width, samples, averages)
            return
        if f is not None:
            vectors = xp.concat([xp.reshape(f, (*shape, -1)), vectors], axis=-1)
        measures = self._measures(vectors, averages)
        self._forms, self._probes = measures[:-samples], measures[-samples:]

    def _mixed(self, f: Array | None, vectors: Array, width: int, samples: int, averages: int) -> None:
        """Take the vectors one after another where a fidelity mixes channels: they would be one system."""
        parts = [vectors[..., i * width : (i + 1) * width] for i in range(samples)]
        self._probes = [self._measures(part, averages)[0] for part in parts]
        self._forms = [] if f is None else self._measures(f, averages)

    def _measures(self, vectors: Array, averages: int) -> list[_Measure]:
        flow = self.flow
        axes = tuple(range(len(flow.affinity.domain.shape)))
        inner = inner_product(
            over_channels(flow.measure(vectors), vectors), axes,
            NodeFidelity(0.0) if flow.fidelity is None else flow.fidelity,
        )  # fmt: skip

        def free(v: Array) -> Array:
            return v - flow.mean(v) if self.aside else v

        counted = flow.applications
        steps = Lanczos(flow.linear, free(vectors), inner, keep=False, free=free)
        while steps.step() and len(steps.alphas) < min(averages, self.size):
            pass
        flow.applications = counted
        self.averages += len(steps.alphas)
        high = flow.spectral_bounds()[1]
        return [self._rules(*steps.tridiagonal(i), size, high) for i, size in enumerate(steps.sizes)]

    def _rules(self, diagonal: Floats, beside: Floats, size: float, high: float) -> _Measure:
        gauss = _rule(diagonal, beside[:-1], size)
        if beside[-1] == 0:
            radau = gauss
        else:
            # The last entry that gives T this eigenvalue.
            node = self._node
            values, vectors = eigen_tridiagonal(diagonal, beside[:-1])
            gaps = np.maximum(values - node, 1e-14 * high)
            last = node + float(beside[-1] ** 2 * np.sum(vectors[-1] ** 2 / gaps))
            radau = _rule(np.append(diagonal, last), beside, size)
        nodes = np.maximum(gauss[0], self._node), np.maximum(radau[0], self._node)
        return _Measure(nodes, (gauss[1], radau[1]))


def _rule(diagonal: Floats, beside: Floats, size: float) -> tuple[Floats, Floats]:
    values, vectors = eigen_tridiagonal(diagonal, beside)
    return values, size**2 * vectors[0] ** 2


def _half_width(values: Floats) -> float:
    from scipy.special import stdtrit

    count = len(values)
    return float(stdtrit(count - 1, 0.975) * values.std(ddof=1) / math.sqrt(count))


def _gap(both: Floats) -> float:
    """Return half of what is between two rules, in the mean over vectors."""
    return float(abs(both[:, 0].mean() - both[:, 1].mean()) / 2)
