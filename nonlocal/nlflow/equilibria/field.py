"""The Gaussian field exp(-beta E)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from nlflow._array import (
    Array,
    Brief,
    Floats,
    check_untracked,
    constant_like,
    is_numpy,
    namespace,
    over_channels,
    to_numpy,
    underflowing,
)
from nlflow.affinities import Affinity, SparseAffinity
from nlflow.equilibria.sums import DENSE_NODES, Estimate, half_width, measure_of, positive, spectral_sums
from nlflow.errors import (
    InputError,
    NumericalError,
    check_choice,
    check_generator,
    check_integer,
    check_memory,
    check_number,
    checked_call,
    kind_of,
)
from nlflow.flows.functions import function_of, is_aside, symmetric_flow, transform_of
from nlflow.functionals.energies import E, J

SAMPLERS = ("auto", "root", "perturbed")
_CHUNK = 16  # samples that are computed side by side
_PROBES = 32  # random vectors for the diagonal of P
_LOST = 1e-3  # relative error of a variance from which on there is no number


@dataclass(frozen=True, repr=False)
class Variances(Brief):
    """Variances of a field at its nodes.

    Attributes
    ----------
    value, lower, upper : array of shape ``domain.shape``
        `lower` and `upper` are the ends of a pointwise 95 % interval; for exact methods they bound rounding.
    method : {'transform', 'dense', 'samples'}
    samples : int
        Signals drawn; 0 for exact methods.
    """

    value: Floats
    lower: Floats
    upper: Floats
    method: str
    samples: int

    @property
    def exact(self) -> bool:
        """Whether the method is exact."""
        return self.samples == 0


@dataclass(frozen=True, repr=False)
class Band(Brief):
    """A credible band, where a signal of the field lies with the probability `level`.

    Attributes
    ----------
    lower, upper : array
        Shaped like the signal.
    level : float
    factor : float
        Half the width of the band in standard deviations.
    simultaneous : bool
        Whether that is the probability of the whole signal, and not of each node.
    """

    lower: Array
    upper: Array
    level: float
    factor: float
    simultaneous: bool


@checked_call
@underflowing
class GaussianField:
    r"""The law exp(-beta E(u)) of signals: Gaussian, with mean u\* and precision beta A in the measure m of E.

    A is L + lambda in the measure w, and I - P + lambda~ in w d, with L and P of the symmetrized K. The covariance of
    the values at two nodes is (A^-1)_ij / (beta m_j); channels are independent. As a posterior J is the prior, and f is
    observed with noise of variance 1 / (beta m_i lambda_i) (Rue and Held 2005, Gaussian Markov Random Fields).

    Parameters
    ----------
    energy : E
        With a fidelity of one number, or one for each node, > 0 somewhere.
    beta : float, optional
        Inverse temperature; 1 by default.
    sigma : float, optional
        In place of beta: the standard deviation of the noise in the observed signal, beta = 1 / (sigma^2 m lambda), if
        m lambda is the same at all nodes, as on grids.

    Attributes
    ----------
    energy : E
    beta : float

    Raises
    ------
    InputError
        For J, a fidelity of 0 on a whole component of the graph, a fidelity that mixes channels, a batch, and a sigma
        where noise differs between nodes.

    Examples
    --------
    >>> import numpy as np
    >>> from nlflow import E, Gaussian, Grid, affinity
    >>> from nlflow.equilibria import GaussianField, choose_fidelity
    >>> grid = Grid(200, boundary="reflect")
    >>> clean = np.sin(grid.nodes[:, 0] / 20)
    >>> f = clean + np.random.default_rng(0).normal(0, 0.3, 200)
    >>> chosen = choose_fidelity(E(affinity(Gaussian(2.0), grid), f, 1.0), method="evidence", sigma=0.3)
    >>> band = GaussianField(chosen.energy, sigma=0.3).band(0.95)
    >>> bool(np.mean((band.lower < clean) & (clean < band.upper)) > 0.9)
    True
    """

    def __init__(self, energy: E, *, beta: float | None = None, sigma: float | None = None) -> None:
        self.energy = check_energy(energy)
        self.flow = symmetric_flow(energy, energy.measure, "energy")
        self._measure = measure_of(energy)
        if energy.fidelity_in("l2").bounds()[1] == 0:
            raise InputError(
                "energy: got a fidelity of 0 at every node, so the field is improper: constants have an infinite "
                "variance; give it a fidelity > 0 at some nodes"
            )
        _check_reached(energy)
        strength = np.broadcast_to(to_numpy(energy.fidelity) if not isinstance(energy.fidelity, float)
                                   else energy.fidelity, self._measure.shape)  # fmt: skip
        self._precision = self._measure * strength  # of the noise, over beta
        self.beta = self._inverse_temperature(beta, sigma)

    def _inverse_temperature(self, beta: float | None, sigma: float | None) -> float:
        if sigma is None:
            return check_number("beta", 1.0 if beta is None else beta, minimum=0, strict=True)
        if beta is not None:
            raise InputError("sigma: got beta too, expected one of the two")
        sigma = check_number("sigma", sigma, minimum=0, strict=True)
        seen = self._precision[self._precision > 0]
        if seen.max() > (1 + 1e-6) * seen.min():
            raise InputError(
                f"sigma: got one number, but measure times fidelity runs from {seen.min():.4g} to {seen.max():.4g}, so "
                "the noise that E assumes differs between nodes; give beta, or a fidelity that is one over the measure"
            )
        # The logarithm tells whether a float holds it.
        log = -2 * math.log(sigma) - math.log(float(seen.max()))
        if abs(log) > 700:
            raise InputError(f"sigma: got {sigma:g}, whose inverse temperature no float holds; change the unit")
        return 1 / (sigma * float(seen.max())) / sigma

    @cached_property
    def mean(self) -> Array:
        """The minimizer u* of E; raises `NumericalError` where it was not found to its tolerance."""
        found = self.energy.minimizer()
        if not found.success:
            raise NumericalError(f"energy: its minimizer was not found ({found.message})")
        return found.u

    # ---- samples

    def sample(self, count: int = 1, *, rng: Any = 0, method: str = "auto") -> Array:
        """Return independent signals of the field.

        Parameters
        ----------
        count : int
        rng : seed or numpy.random.Generator
        method : {'auto', 'root', 'perturbed'}
            - ``root``: u* + A^-1/2 z / sqrt(beta), z of variance 1 / m_i at each node, to 1e-6.
            - ``perturbed``: the minimizer of E with noise put on each edge of J and on each observed value
              (Papandreou and Yuille 2010), for NumPy affinities whose edges are listed (dense, stencil, sparse) and a
              fidelity > 0 at all nodes.
            - ``auto``: the root; where that does not reach 1e-6, perturbed.

        Returns
        -------
        array of shape (count,) + that of the observed signal
        """
        count, rng = check_integer("count", count, minimum=1), check_generator(rng)
        method = check_choice("method", method, SAMPLERS)
        mean, axes = self.mean, len(self.flow.affinity.domain.shape)
        shape = (*self.flow.affinity.domain.shape, -1)
        xp = namespace(mean)
        whole = tuple(mean.shape)
        check_memory(f"{count} signals", 2 * count * math.prod(whole) * 8, "draw fewer at a time, with one generator")
        channels = 1 if len(whole) == axes else whole[-1]
        parts = []
        for start in range(0, count, _CHUNK):
            number = min(_CHUNK, count - start)
            drawn = self.deviations(number * channels, rng, method)
            drawn = xp.reshape(drawn, (*whole[:axes], number, channels)) + xp.reshape(mean, shape)[..., None, :]
            parts.append(xp.reshape(xp.moveaxis(drawn, axes, 0), (number, *whole)))
        return xp.astype(xp.concat(parts, axis=0), mean.dtype)

    def deviations(self, count: int, rng: np.random.Generator, method: str = "auto") -> Array:
        """Return signals of one channel less its mean, ``domain.shape + (count,)``."""
        shape = (*self.flow.affinity.domain.shape, count)
        if method != "perturbed":
            noise = rng.standard_normal(shape) / np.sqrt(self.beta * self._measure)[..., None]
            found = self._root.evaluate(self.flow.affinity.as_signal(noise))
            if found.success:
                return found.u
            if method == "root" or not self._perturbs:
                raise NumericalError(f"energy: {found.message}; use a larger fidelity, or an affinity of listed edges")
        return self._perturbed(count, rng)

    @cached_property
    def _root(self) -> Any:
        return function_of(self.flow, lambda a: 1 / np.sqrt(a), tol=1e-6)

    @property
    def _perturbs(self) -> bool:
        listed = self.flow.affinity.method in ("dense", "stencil", "sparse") and is_numpy(self.energy.observed)
        return listed and bool(self._precision.min() > 0)

    def _perturbed(self, count: int, rng: np.random.Generator) -> Array:
        if not self._perturbs:
            raise InputError(
                "method: got 'perturbed', expected 'root' here: it needs listed edges (dense, stencil or sparse), "
                "NumPy features and a fidelity > 0 at all nodes"
            )
        graph = self._edges
        domain = self.flow.affinity.domain
        noise = np.sqrt(graph.data)[:, None] * rng.standard_normal((graph.nnz, count))
        force = np.zeros((domain.size, count))
        np.add.at(force, graph.coords[0], noise)
        np.subtract.at(force, graph.coords[1], noise)
        precision = self._precision.reshape(-1, 1)
        force += np.sqrt(precision) * rng.standard_normal(force.shape)
        # A force is a change of the observed signal, by force / (beta m lambda).
        observed = force / precision / math.sqrt(self.beta)
        given = self.flow.affinity.as_signal(observed.reshape(*domain.shape, count))
        found = E(self.energy.given, given, self.energy.fidelity, measure=self.energy.measure).minimizer()
        if not found.success:
            raise NumericalError(f"energy: a sample was not found ({found.message})")
        return found.u

    @cached_property
    def _edges(self) -> Any:
        from scipy.sparse import triu

        graph = triu(self.energy.given.edges(), k=1, format="coo")
        return graph.astype(np.float64)

    # ---- variances and bands

    def variance(self, *, method: str = "auto", samples: int = 200, rng: Any = 0) -> Variances:
        """Return the variance of each node, the same for all channels, with an interval.

        Parameters
        ----------
        method : {'auto', 'transform', 'dense', 'samples'}
            - ``transform``: exact on periodic and reflecting grids with a position kernel and one fidelity, O(N log N).
            - ``dense``: exact by Cholesky's method, O(N^3) and O(N^2) memory.
            - ``samples``: the variance given the neighbours, plus that of the mean given the neighbours over drawn
              signals (Sidén, Lindgren, Bolin and Villani 2018, arXiv 1705.08656); the relative standard error is at
              most about sqrt(2 / samples).
            - ``auto``: the transform, the whole matrix up to 2000 nodes, samples.
        samples : int
        rng : seed or numpy.random.Generator
        """
        method = check_choice("method", method, ("auto", "transform", "dense", "samples"))
        samples = check_integer("samples", samples, minimum=10)
        check_generator(rng)
        if method in ("auto", "transform") and (found := transform_of(self.flow, method)):
            basis, values = found
            return _exact(basis.diagonal(1 / values) / (self.beta * self._measure), 1e-12, "transform")
        if method == "dense" or (method == "auto" and self._measure.size <= DENSE_NODES):
            return self._by_cholesky()
        return self._by_samples(samples, check_generator(rng))

    def _by_cholesky(self) -> Variances:
        from scipy.linalg import lapack

        from nlflow.flows.spectrum import dense_operator

        n = self._measure.size
        check_memory(f"the covariance of {n} nodes", 32 * n * n, "use method='samples'")
        root = np.sqrt(self._measure / self._measure.max()).ravel()
        matrix = root[:, None] * dense_operator(self.flow) / root
        matrix = (matrix + matrix.T) / 2
        low, constant = self.flow.spectral_bounds()[0], root / np.linalg.norm(root)
        # Constants, whose eigenvalue is known, are lifted: what is left is as well conditioned as the graph lets it be.
        lift = float(np.trace(matrix)) / n if self.flow.fidelity is not None and self._uniform else 0.0
        matrix += lift * constant[:, None] * constant
        size = float(np.abs(matrix).sum(axis=1).max())
        factor, info = lapack.dpotrf(matrix, lower=1)
        inverse, other = lapack.dpotri(factor, lower=1) if info == 0 else (factor, info)
        if info or other:
            raise NumericalError(
                "fidelity: the precision is singular to rounding, since some part of the domain hardly sees a node "
                "with a fidelity > 0; give each part one, or use a wider kernel"
            )
        diagonal = np.diag(inverse).copy()
        both = np.abs(np.tril(inverse)).sum(axis=1) + np.abs(np.tril(inverse, -1)).sum(axis=0)
        eps = float(namespace(self.flow.affinity.log_degree).finfo(self.flow.affinity.log_degree.dtype).eps)
        rounding = 8 * eps * size * float(both.max())
        if not rounding < _LOST:
            raise NumericalError(
                f"fidelity: rounding may change variances by {rounding:.2g} of them, since some part of the domain "
                "hardly sees a node with a fidelity > 0; give each part one, use a wider kernel, or float64 features"
            )
        if lift:
            diagonal += constant**2 * lift / (low * (low + lift))
        scale = 1 / (self.beta * self._measure)
        return _exact(diagonal.reshape(self._measure.shape) * scale, rounding, "dense")

    @property
    def _uniform(self) -> bool:
        return self.flow.fidelity is not None and self.flow.fidelity.uniform is not None

    def _by_samples(self, samples: int, rng: np.random.Generator) -> Variances:
        from scipy.special import chdtri

        affinity, shape = self.flow.affinity, self._measure.shape
        weight = np.asarray(affinity.domain.weights) * np.asarray(to_numpy(affinity.degree), np.float64)
        stay = 1 + self._precision / weight  # 1 + fidelity over the degree
        own = 1 / (self.beta * weight * stay)
        signs = 2.0 * rng.integers(0, 2, (*shape, _PROBES), dtype=np.int8) - 1
        average = to_numpy(affinity.average(affinity.as_signal(np.asarray(signs, np.float64))))
        probed = np.asarray(signs * average, np.float64)
        loop, doubt = probed.mean(axis=-1) / stay, half_width(probed) / stay
        said, done = np.zeros(shape), 0
        # The variance of the mean is known where constants are an eigenvector.
        known = 1 / (self.beta * self.flow.spectral_bounds()[0] * self._measure.sum()) if self._uniform else 0.0
        while done < samples:
            number = min(_CHUNK, samples - done)
            drawn = self.deviations(number, rng)
            drawn = affinity.average(drawn - self.flow.mean(drawn) if self._uniform else drawn)
            said += np.sum((np.asarray(to_numpy(drawn), np.float64) / stay[..., None]) ** 2, axis=-1)
            done += number
        low, high = chdtri(samples, 0.975), chdtri(samples, 0.025)
        value = own * (1 + loop) + known / stay**2 + said / samples
        # Both estimates are independent of each other.
        below, above = said / samples - said / high, said / low - said / samples
        lower, upper = (value + sign * np.hypot(own * doubt, part) for sign, part in ((-1, below), (1, above)))
        return Variances(value, np.maximum(lower, 0.0), upper, "samples", samples)

    def band(
        self,
        level: float = 0.95,
        *,
        simultaneous: bool = False,
        samples: int = 1000,
        variances: Variances | None = None,
        rng: Any = 0,
    ) -> Band:
        """Return a credible band about the mean, of the same number of standard deviations at all nodes.

        Parameters
        ----------
        level : float
            In (0, 1).
        simultaneous : bool
            Whether the whole signal is to lie within the band with that probability, each channel by itself.
        samples : int
            Signals drawn for a simultaneous band.
        variances : Variances, optional
            From `variance`.
        rng : seed or numpy.random.Generator
        """
        from scipy.special import ndtri

        level = check_number("level", level, minimum=0, strict=True, below=1)
        samples = check_integer("samples", samples, minimum=20)
        check_generator(rng)
        found = self.variance(rng=rng) if variances is None else variances
        sd = np.sqrt(found.value)
        factor = float(ndtri((1 + level) / 2))
        if simultaneous:
            rng = check_generator(rng)
            largest: list[float] = []
            axes = tuple(range(sd.ndim))
            while len(largest) < samples:
                drawn = np.asarray(to_numpy(self.deviations(min(_CHUNK, samples - len(largest)), rng)), np.float64)
                largest += list(np.abs(drawn / sd[..., None]).max(axis=axes))
            factor = float(np.quantile(largest, level))
        width = over_channels(constant_like(factor * sd, self.mean), self.mean)
        return Band(self.mean - width, self.mean + width, level, factor, bool(simultaneous))

    # ---- normalization

    def log_determinant(
        self, *, method: str = "auto", samples: int = 16, averages: int = 100, rng: Any = 0
    ) -> Estimate:
        """Return log det(beta diag(m) A), of the precision of one channel; for the arguments see `trace_of`."""
        sums = spectral_sums(self.flow, method=method, samples=samples, averages=averages, rng=rng, gap=True)
        found = sums.trace(np.log)
        apart = math.log(self.flow.spectral_bounds()[0]) if is_aside(self.flow) else 0.0
        value = found.value + apart + float(np.log(self._measure).sum()) + self._measure.size * math.log(self.beta)
        return Estimate(value, found.error, found.method, found.averages)

    def log_evidence(self, *, method: str = "auto", samples: int = 16, averages: int = 100, rng: Any = 0) -> Estimate:
        """Return the restricted log marginal likelihood of the observed signal, its mean being left free.

        It compares fidelities, widths and graphs for the same f; higher is better (Patterson and Thompson 1971, doi
        10.1093/biomet/58.3.545). Channels are added up. For the arguments see `trace_of`.

        Raises
        ------
        InputError
            For a fidelity of 0 at some nodes.
        NumericalError
            For a graph of several components.
        """
        if not self._precision.min() > 0:
            raise InputError("energy: got a fidelity of 0 at some nodes, expected it > 0 at all: each value is weighed")
        options: dict[str, Any] = {"method": method, "samples": samples, "averages": averages, "rng": rng}
        prior = symmetric_flow(J(self.energy.given), self.energy.measure)
        sums = spectral_sums(prior, **options, gap=True)
        if self._uniform:
            strength = self.flow.spectral_bounds()[0]
            found = sums.trace(lambda a: np.log(positive(a)) - np.log(a + strength))
            value, error = found.value - math.log(strength), found.error
        else:
            found, other = (
                sums.trace(lambda a: np.log(positive(a))),
                spectral_sums(self.flow, **options, gap=True).trace(np.log),
            )
            value, error = found.value - other.value, found.error + other.error
        return Estimate(self._evidence(value), error * self._channels / 2, found.method, found.averages)

    def _evidence(self, logs: float) -> float:
        n = self._measure.size
        value = logs + float(np.log(self._precision).sum()) + math.log(n) - math.log(float(self._measure.sum()))
        value += (n - 1) * (math.log(self.beta) - math.log(2 * math.pi))
        return 0.5 * self._channels * value - self.beta * self.energy.value(self.mean)

    @property
    def _channels(self) -> int:
        observed = self.energy.observed
        return 1 if observed.ndim == self._measure.ndim else int(observed.shape[-1])

    def __repr__(self) -> str:
        return f"GaussianField(beta={self.beta:.6g}, {self.flow.affinity!r})"


def check_energy(energy: Any, name: str = "energy") -> E:
    if isinstance(energy, J) and not isinstance(energy, E):
        raise InputError(
            f"{name}: got J, whose field is improper: constants have an infinite variance; expected E(affinity, f, "
            "fidelity) with a fidelity > 0"
        )
    if type(energy) is not E:
        raise InputError(f"{name}: got {kind_of(energy)}, expected E(affinity, f, fidelity); of a flow .functional")
    if energy.fidelity_in(energy.measure).width > 1:
        raise InputError(f"{name}: got a fidelity that mixes channels, expected one number, or one for each node")
    if energy.affinity.domain.leading:
        raise InputError(f"{name}: got that of a batch, expected one item; take affinity.item(...)")
    check_untracked(f"observed, fidelity or features of {name}", energy.tracked, "numbers without gradients")
    return energy


def _check_reached(energy: E) -> None:
    """Raise `InputError` where a component of a graph sees no node with a fidelity > 0."""
    affinity: Affinity = energy.affinity
    if not isinstance(affinity, SparseAffinity) or isinstance(energy.fidelity, float):
        return
    parts = np.unique(affinity.components[np.asarray(energy.fidelity) > 0])
    if len(parts) < affinity.component_count:
        raise InputError(
            f"energy: {affinity.component_count - len(parts)} connected component(s) of the graph have no node with a "
            "fidelity > 0, so the field is improper there: constants have an infinite variance; give each one"
        )


def _exact(value: Floats, rounding: float, method: str) -> Variances:
    return Variances(value, value * (1 - rounding), value * (1 + rounding), method, 0)
