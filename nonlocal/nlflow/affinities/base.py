"""The contract of an affinity: one averaging operator and the logarithm of its degree."""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from nlflow._array import (
    Array,
    Floats,
    constant_like,
    is_numpy,
    mean_over_nodes,
    namespace,
    over_channels,
    power_of_two,
    scalar,
    to_numpy,
    underflowing,
)
from nlflow.domains import Domain
from nlflow.domains.mask import Mask
from nlflow.errors import InputError, NumericalError, check_integer, check_memory, check_number
from nlflow.kernels import Kernel

if TYPE_CHECKING:
    from scipy.sparse import csr_array

    from nlflow.affinities.pair_sums import PairSums

__all__ = ["MASS", "Affinity", "Sparse", "check_rows", "log_transitions", "middle_of_range", "properties"]

MASS = 1e-6
"""How far the mass of a law may be from what it was, relatively, after one move."""

Sparse: TypeAlias = "csr_array[Any, tuple[int, int]]"
"""A sparse matrix by rows; SciPy's module is loaded when the first is made."""


def middle_of_range(flat: NDArray[Any]) -> NDArray[Any]:
    """Return the middle between the least and the largest value of each column."""
    return np.asarray(flat.min(axis=0) / 2 + flat.max(axis=0) / 2)  # their sum could overflow


def properties(kernel: Kernel, queries: Array, keys: Array, mask: Mask | None = None) -> dict[str, bool]:
    """Return whether k_ij is symmetric and positive semidefinite; it may be where queries and keys are one array."""
    same = queries is keys
    # Of a definite matrix what lies between nodes that are there is definite; what is left of it by windows may not be.
    whole = mask is None or not (mask.causal or mask.window is not None or mask.rule is not None)
    return {
        "symmetric": same and kernel.symmetric and not (mask is not None and mask.causal),
        "positive_semidefinite": same and kernel.positive_semidefinite and whole,
    }


def check_rows(highest: Array, start: int = 0) -> None:
    """Raise `InputError` when the largest logit of a row is -inf (no neighbour), or +inf or NaN (overflow)."""
    xp = namespace(highest)
    wrong = ~xp.isfinite(highest)
    if not bool(xp.any(wrong)):
        return
    row = int(xp.argmax(xp.astype(wrong, xp.int32)))
    if float(highest[row]) == -np.inf:
        what = "is zero or not finite; every node needs a neighbour (itself, say)"
    else:
        what = "has logits that overflow; scale the features or the kernel"
    raise InputError(f"affinity: row {start + row} {what}")


def log_transitions(logits: Array, weights: Floats) -> Floats:
    """Return log P_ij, shape (N, N), from log k_ij in float64; -inf where that is."""
    logs = to_numpy(logits) + np.log(weights.ravel())
    return np.asarray(logs - np.logaddexp.reduce(logs, axis=1, keepdims=True))


@underflowing
class Affinity(ABC):
    """An affinity matrix k_ij on a domain, known through what it does to signals.

    Attributes
    ----------
    domain : Domain
    kernel : Kernel or None
        None for an affinity given as a matrix.
    method : str
        How sums are computed: ``dense``, ``stencil``, ``convolution``, ``pairwise``, ``tiled``, ``sparse``,
        ``nufft`` or ``lowrank``.
    reason : str
        Why this method was chosen.
    error_estimate : float
        How far averages are off, over the largest deviation of the signal from the middle of its range; 0 for methods
        that are exact to rounding. The class of the affinity says whether it is a bound; `measure_error` measures.
    dtype : dtype or None
        What signals must be; None when they may be float32 or float64.
    device : device or None
        Where tensors must be; None for NumPy.
    symmetric, positive_semidefinite : bool
        Properties of k_ij. They decide which flows and integrators apply and how tight their bounds are.

    Notes
    -----
    With degree d_i = sum_j w_j k_ij the averaging operator is (Pu)_i = sum_j w_j k_ij u_j / d_i, row-stochastic. All
    functionals, flows and chains follow from ``average`` and ``log_degree``.

    A subclass of your own defines ``_average(u)`` (Pu of a checked signal), ``_log_degree()`` (log d without the
    kernel's amplitude) and ``memory_bytes``.
    """

    method: str
    reason: str = ""
    error_estimate: float = 0.0
    device: Any = None

    def __init__(
        self, domain: Domain, kernel: Kernel | None, *, symmetric: bool, positive_semidefinite: bool, dtype: Any = None
    ) -> None:
        self.domain = domain
        self.kernel = kernel
        self.symmetric = symmetric
        self.positive_semidefinite = positive_semidefinite
        self.dtype = dtype
        self._log_scale = math.log(kernel.amplitude) if kernel is not None else 0.0
        self._recipe: Callable[[Array], Affinity] | None = None
        self._exact: Callable[[], PairSums] | None = None

    # ---- what a subclass provides

    @abstractmethod
    def _average(self, u: Array) -> Array:
        """Return Pu for a checked signal."""

    @abstractmethod
    def _log_degree(self) -> Array:
        """Return log d without the amplitude, shape ``domain.shape``."""

    @property
    @abstractmethod
    def memory_bytes(self) -> int:
        """Bytes that the affinity keeps."""

    def _log_degree_for(self, u: Array) -> Array:
        """Return log d without the amplitude, in the precision that averages of the signal `u` are computed in."""
        return self._log_degree()

    def _log_degree_wide(self) -> Array:
        """Return log d without the amplitude before it is rounded to the dtype of signals, where that is known.

        A large logarithm in float32 has lost the digits that laws need: at 1e6 its last one is a factor of 1.06.
        """
        return self._log_degree()

    def _push(self, law: Array) -> Array:
        """Return p P for a checked signal; this form holds for symmetric k, where P is self-adjoint in w d."""
        if not self.symmetric:
            raise NumericalError(f"{self.method}: p P is not available for this affinity; use method='dense'")
        xp = namespace(law)
        measure = self.measure("degree", law)
        # Elsewhere a density would be out of range: no walker comes there, and none may have been there.
        inside = measure > 4 / float(xp.finfo(law.dtype).max)
        size = power_of_two(scalar(xp.max(xp.abs(law))))
        share = law / size
        lost = scalar(xp.sum(over_channels(xp.where(inside, 0 * measure, 1.0), law) * xp.abs(share)))
        total = scalar(xp.sum(xp.abs(share)))
        if lost > float(xp.finfo(law.dtype).eps) * total:
            raise NumericalError(
                f"law: got {lost / total:.3g} of it at nodes whose degrees underflow beside those of the others, where "
                "it would be lost; use method='dense', float64 features, or smaller logits"
            )
        density = over_channels(xp.where(inside, 1 / xp.where(inside, measure, 1.0), 0.0), law) * share
        return over_channels(measure, law) * self._average(density) * size

    def _log_transitions(self) -> Floats | None:
        """Return log P_ij, shape (N, N), with -inf where k is 0 and finite numbers where P underflows; None if unknown.

        Only asked of affinities that are not symmetric.
        """
        return None

    def known_spectrum(self) -> Floats | None:
        """Return the distinct eigenvalues of P, that of constants (1) first, where the structure tells them.

        None where only an eigenvalue solver does. Where they are known the degree is the same at all nodes.
        """
        return None

    @property
    def laws_have_more_digits(self) -> bool:
        """Whether `push` is computed in a higher precision than `average`, so that it says more about P."""
        return False

    @property
    def tracked(self) -> bool:
        """Whether it was made from tensors that require a gradient."""
        return False

    def _edge_bound(self) -> int:
        """Return how many pairs (i, j) may have k_ij > 0."""
        raise InputError(
            f"affinity: method {self.method!r} has all pairs of nodes as edges and does not list them; build it with "
            "method='stencil' and a window (or with method='dense' for few nodes)"
        )

    def _edges(self) -> Sparse:
        """Return k_ij without the amplitude as a sparse matrix; diagonal, repeated and zero entries are allowed."""
        raise NotImplementedError  # pragma: no cover - whoever has a bound has them

    def _symmetrised(self) -> Affinity:
        """Return the affinity of K = k + k^T; only asked of non-symmetric ones."""
        raise NumericalError(f"{self.method}: K = k + k^T is not available for this affinity; use method='dense'")

    # ---- what checkpoints need; other answers where nodes are shared out among processes (`nlflow.affinities.sharded`)

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """The node shape of the domain of all processes."""
        return self.domain.shape

    def whole(self, u: Array) -> NDArray[Any]:
        """Return a signal at all nodes as a NumPy array, to the process that writes files."""
        return to_numpy(u)

    def own(self, whole: NDArray[Any], like: Array) -> Array:
        """Return this process's part of a NumPy array of all nodes, with the kind of `like`."""
        return constant_like(whole, like)

    def agreed(self, answer: bool) -> bool:
        """Return what the process that writes files thinks."""
        return answer

    def writes(self, step: int) -> bool:
        """Whether this process writes files; raise `FileFormatError` where processes stand at different steps."""
        del step
        return True

    # ---- what users call

    def average(self, u: Array) -> Array:
        """Return the row average Pu.

        Parameters
        ----------
        u : array of shape ``domain.shape`` or ``domain.shape + (D,)``

        Returns
        -------
        array
            Same shape, dtype and device as `u`.

        Raises
        ------
        InputError
            For a wrong shape or dtype, and for NaN or infinite values.
        """
        return self._average(self.check_signal("u", u))

    def as_signal(self, values: Floats) -> Array:
        """Return NumPy values with the namespace, dtype and device that this affinity averages."""
        like = self.log_degree
        if is_numpy(like):
            return np.asarray(values, dtype=self.dtype or np.float64)
        return constant_like(values, like)

    def push(self, law: Array) -> Array:
        """Return the law of a walker after one more move, (p P)_j = sum_i p_i w_j k_ij / d_i.

        The transpose of `average`. Its mass is that of `law` to 1e-6, or to `error_estimate` where that is more.

        Parameters
        ----------
        law : array of shape ``domain.shape`` or ``domain.shape + (D,)``
            Probabilities of the nodes; one law for each channel.

        Raises
        ------
        InputError
            For a wrong shape or dtype, and for NaN or infinite values.
        NumericalError
            When mass would be lost to rounding.
        """
        law = self.check_signal("law", law)
        pushed = self._push(law)
        self._check_mass(law, pushed)
        return pushed

    def _check_mass(self, law: Array, pushed: Array) -> None:
        """Raise `NumericalError` where a law has another mass than before it was pushed."""
        xp, axes = namespace(law), tuple(range(len(self.domain.shape)))
        before, size, after = (xp.sum(values, axis=axes, dtype=xp.float64) for values in (law, xp.abs(law), pushed))
        allowed = max(MASS, self.error_estimate) * size
        if not bool(xp.all(xp.abs(after - before) <= allowed)):
            gained = scalar(xp.max(xp.abs(after - before) / xp.where(size > 0, size, xp.ones_like(size))))
            raise NumericalError(
                f"law: its mass would change by {gained:.3g} of it, since rounding in {law.dtype} moves the degrees of "
                "this affinity; build it with method='dense' or from float64 features, or scale the logits down"
            )

    def check_signal(self, name: str, value: Any) -> Array:
        """Return `value` as a signal that this affinity can average, or raise `InputError`."""
        device = None if is_numpy(value) else getattr(value, "device", None)
        if None not in (device, self.device) and device != self.device:
            raise InputError(
                f"{name}: it is on {device}, expected {self.device}, the device of the features that the affinity was "
                "built from; move one of them"
            )
        array = self.domain.check_signal(name, value)
        if self.dtype is None:
            if not is_numpy(array):
                raise InputError(
                    f"{name}: got a tensor of {array.dtype}, expected a NumPy array, in which this affinity is computed"
                    "; convert it (.cpu().numpy()), or build the affinity from torch features"
                )
        elif str(array.dtype) != str(self.dtype):  # as text: NumPy and torch do not compare their dtypes
            raise InputError(
                f"{name}: got dtype {array.dtype}, expected {self.dtype}, the dtype of the features that the "
                "affinity was "
                "built from; convert one of them"
            )
        return array

    @property
    def log_degree(self) -> Array:
        """Logarithm of the degree, log d_i, shape ``domain.shape``."""
        return self._log_degree() + self._log_scale

    @property
    def degree(self) -> Array:
        """d_i = sum_j w_j k_ij, shape ``domain.shape``.

        Raises
        ------
        NumericalError
            When it overflows (or all of it underflows); ``log_degree`` always exists.
        """
        log_degree = self.log_degree
        xp = namespace(log_degree)
        limit = math.log(float(xp.finfo(log_degree.dtype).max))
        highest, lowest = scalar(xp.max(log_degree)), scalar(xp.min(log_degree))
        if highest >= limit or lowest <= -limit:
            raise NumericalError(
                f"degree: log d runs from {lowest:.4g} to {highest:.4g}, which cannot be represented; use the degree "
                "metric (which needs P alone), or scale the kernel's amplitude or logits"
            )
        return xp.exp(log_degree)

    def log_total(self) -> float:
        """Return log sum_i w_i d_i, which exists where the sum of degrees is out of range."""
        log_degree = self.log_degree
        xp = namespace(log_degree)
        highest = scalar(xp.max(log_degree))
        weights = constant_like(self.domain.weights, log_degree)
        return highest + math.log(scalar(xp.sum(weights * xp.exp(log_degree - highest), dtype=xp.float64)))

    def symmetrised(self) -> Affinity:
        """Return the affinity of K = k + k^T, as functionals use it; 2k for a symmetric one, without a copy."""
        if self.symmetric:
            return self.scaled(2.0)
        result = self._symmetrised()
        result._log_scale = self._log_scale
        if self._recipe is not None:
            recipe = self._recipe
            result._recipe = lambda features: recipe(features).symmetrised()
        return result

    def edges(self, memory_limit: float | None = None) -> Sparse:
        """Return the graph of the functionals: W_ij = w_i w_j K_ij for i != j, where K = k + k^T is not 0.

        J(u) = 1/4 sum_ij W_ij |u_i - u_j|^2. The edges of dense affinities and of stencils are listed, not those of
        convolutions.

        Parameters
        ----------
        memory_limit : float, optional
            Bytes; half of the physical memory by default. For a moment 48 bytes an edge are needed in float32, 68 in
            float64.

        Returns
        -------
        scipy.sparse.csr_array of shape (N, N)
            Symmetric to the last bit, rows sorted, without diagonal and zeros, in the dtype of the affinity (float64
            where it has none); nodes are numbered in C order.

        Raises
        ------
        InputError
            For convolutions, and for affinities of torch features.
        MemoryLimitError
            Before anything is allocated.
        NumericalError
            When the weights overflow.
        """
        from scipy import sparse

        both = self.symmetrised()
        if not is_numpy(both.log_degree):
            raise InputError("affinity: its edges are listed for NumPy features only; convert them (.cpu().numpy())")
        dtype = np.dtype(self.dtype or np.float64)
        count = both._edge_bound()
        check_memory(
            f"the list of up to {count} edges between {self.domain.size} nodes",
            count * (5 * dtype.itemsize + 28),  # at the moment when edges, their transpose and the sum are there
            "use a smaller window or fewer nodes, or raise memory_limit",
            memory_limit,
        )
        graph = both._edges()
        graph.sum_duplicates()
        rows = np.repeat(np.arange(self.domain.size), np.diff(graph.indptr))
        weights = self.domain.weights.ravel().astype(dtype)
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            graph.data *= weights[rows] * dtype.type(math.exp(min(both._log_scale, 709.0)))
            graph.data *= weights[graph.indices]
        graph.data[rows == graph.indices] = 0
        if not np.isfinite(graph.data).all():
            raise NumericalError(
                "edges: weights w_i w_j K_ij overflow; scale the kernel's amplitude or logits, or the domain's units"
            )
        # The images of a node at a boundary are summed in another order from either end.
        result = sparse.csr_array((graph + graph.T) * dtype.type(0.5))
        result.eliminate_zeros()
        return result

    def measure_error(self, u: Array | None = None, *, samples: int = 100, rng: Any = 0) -> float:
        """Return how far averages are off at sampled nodes, against exact sums over all nodes.

        For the methods that approximate (``sparse``, ``nufft``, ``lowrank``): what `error_estimate` promises for all
        nodes, measured at some. O(samples N d) time.

        Parameters
        ----------
        u : array of shape ``domain.shape`` or ``domain.shape + (D,)``, optional
            The signal; white noise by default.
        samples : int
        rng : int or numpy.random.Generator
            Which nodes, and which noise.

        Returns
        -------
        float
            The largest difference, over the largest deviation of the signal from the middle of its range.

        Raises
        ------
        InputError
            For a method that is exact to rounding, and for a constant signal.
        """
        if self._exact is None:
            raise InputError(
                f"affinity: method {self.method!r} is exact to rounding, so there is nothing to measure its error with"
            )
        rng = np.random.default_rng(rng)
        samples = check_integer("samples", samples, minimum=1)
        if u is None:
            u = self.as_signal(rng.standard_normal(self.domain.shape))
        u = self.check_signal("u", u)
        average = np.asarray(self.flatten(self.average(u)), dtype=np.float64)
        signal = np.asarray(self.flatten(u), dtype=np.float64)
        middle = middle_of_range(signal)
        size = float(np.abs(signal - middle).max())
        if size == 0:
            raise InputError("u: got a constant signal, which every average keeps; expected one that varies")
        rows = np.sort(rng.choice(self.domain.size, min(samples, self.domain.size), replace=False))
        sums, totals, _ = self._exact()(signal - middle, rows)
        return float(np.abs(sums / totals[:, None] + middle - average[rows]).max()) / size

    def scaled(self, factor: float) -> Self:
        """Return the affinity of factor * k; shares all data."""
        factor = check_number("factor", factor, minimum=0, strict=True)
        result = copy.copy(self)
        result._log_scale = self._log_scale + math.log(factor)
        if self._recipe is not None:
            recipe = self._recipe
            result._recipe = lambda features: recipe(features).scaled(factor)
        return result

    def item(self, *index: int) -> Affinity:
        """Return the affinity of one item of a `Batch`.

        Raises
        ------
        InputError
            Where there is no such item, or no batch.
        """
        leading = self.domain.leading
        fits = len(index) == len(leading) > 0
        numbers = tuple(check_integer("item", i) for i in index)
        if not fits or not all(-n <= i < n for i, n in zip(numbers, leading, strict=True)):
            raise InputError(f"item: got {numbers}, expected {len(leading)} numbers within {leading}, of a Batch")
        result = self._item(tuple(i % n for i, n in zip(numbers, leading, strict=True)))
        result.reason = self.reason
        return result

    def _item(self, index: tuple[int, ...]) -> Affinity:
        """Return the affinity of one item; only asked of those that know batches."""
        raise NotImplementedError  # pragma: no cover - whoever knows batches has it

    @property
    def evolves(self) -> bool:
        """Whether the kernel compares features that can be taken from a signal."""
        return self._recipe is not None

    def update(self, u: Array) -> Affinity:
        """Return the affinity with its features taken from the signal `u` (an evolving kernel).

        Raises
        ------
        InputError
            When the kernel compares node positions, or a given matrix, which no signal changes.
        """
        if self._recipe is None:
            raise InputError(
                "affinity: it compares node positions or is a given matrix, which do not change with the signal; build "
                "it from features (features=u) for an evolving kernel"
            )
        return self._recipe(u)

    def flatten(self, u: Array) -> Array:
        """Return `u` as (N, D)."""
        return namespace(u).reshape(u, (self.domain.size, -1))

    def measure(self, metric: str, like: Array, *, by_item: bool = False) -> Array:
        """Return the node measure of a metric in float64: w_i (``l2``) or w_i d_i / sum w d (``degree``).

        The second is the stationary law of P when k is symmetric; it is formed in log space. With `by_item` all
        items of a batch have the same mass, since the degrees of one may be out of the range of those of another; P is
        self-adjoint in both.
        """
        xp = namespace(like)
        weights = constant_like(self.domain.weights, xp.astype(like, xp.float64))
        if metric == "l2":
            return weights
        log_degree = xp.astype(self._log_degree_wide(), xp.float64)
        leading = len(self.domain.leading)
        if by_item and leading:
            axes = tuple(range(leading, log_degree.ndim))
            mass = weights * xp.exp(log_degree - xp.max(log_degree, axis=axes, keepdims=True))
            return mass / (xp.sum(mass, axis=axes, keepdims=True) * math.prod(self.domain.leading))
        mass = weights * xp.exp(log_degree - xp.max(log_degree))
        return mass / xp.sum(mass)

    def mean(self, u: Array, metric: str) -> Array:
        """Return the mean of `u` in the measure of a metric, broadcastable to `u`.

        One number for each channel, and for each item of a batch.
        """
        xp, measure, leading = namespace(u), self.measure(metric, u, by_item=True), len(self.domain.leading)
        if not leading:
            return mean_over_nodes(u, measure / xp.sum(measure))
        axes = tuple(range(leading, measure.ndim))
        return mean_over_nodes(u, measure / xp.sum(measure, axis=axes, keepdims=True), axes)

    def __repr__(self) -> str:
        tags = [name for name in ("symmetric", "positive_semidefinite") if getattr(self, name)]
        return (
            f"<{type(self).__name__} {self.kernel!r} on {self.domain.size} nodes, method={self.method!r}, "
            f"{', '.join(tags) or 'not symmetric'}>"
        )
