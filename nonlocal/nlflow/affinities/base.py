"""The contract of an affinity: one averaging operator and the logarithm of its degree."""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from operator import methodcaller
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from nlflow._array import (
    Array,
    ArrayT,
    Floats,
    check_real,
    check_signal_like,
    constant_like,
    is_numpy,
    kept_bytes,
    kept_like,
    mean_over_nodes,
    middle_of_range,
    namespace,
    numbers,
    over_channels,
    power_of_two,
    scalar,
    to_numpy,
    underflowing,
)
from nlflow.affinities import shown
from nlflow.affinities.graph import Sparse, functional_graph
from nlflow.affinities.guarded import guarded
from nlflow.domains import Domain
from nlflow.errors import (
    InputError,
    NumericalError,
    check_generator,
    check_integer,
    check_memory,
    check_number,
)
from nlflow.kernels import Kernel
from nlflow.store.notebook import card

if TYPE_CHECKING:
    from nlflow.affinities.pair_sums import PairSums

MASS = 1e-6
"""How far the mass of a law may be from what it was, relatively, after one move."""


def _changed(recipe: Callable[[Array], Any], change: Callable[[Affinity], Affinity], features: Array) -> Affinity:
    return change(recipe(features))


@underflowing
class Affinity(ABC):
    """An affinity matrix k_ij on a domain, known through what it does to signals.

    With degree d_i = sum_j w_j k_ij the averaging operator is (Pu)_i = sum_j w_j k_ij u_j / d_i, row-stochastic.

    Attributes
    ----------
    domain : Domain
    kernel : Kernel or None
        None for a given matrix or graph.
    method : str
        How sums are computed, such as ``dense``; see `nlflow.affinity`.
    reason : str
        Why this method was chosen.
    error_estimate : float
        How far averages are off, over the largest deviation of the signal from the middle of its range; 0 for methods
        that are exact to rounding. An estimate for ``nufft``, else a bound of all but rounding.
    dtype : dtype or None
        What signals must be; None when they may be float32 or float64.
    device : device or None
        Where tensors must be; None for NumPy.
    symmetric : bool
        Whether k_ij = k_ji.
    positive_semidefinite : bool
        Whether k is known to be so.

    Notes
    -----
    A subclass defines ``_average(u)`` (Pu of a checked signal) and ``_log_degree()`` (log d without the kernel's
    amplitude); for a k that is not symmetric `push` asks for ``_push``, and functionals for ``_symmetrized``.
    """

    method: str
    reason: str = ""
    error_estimate: float = 0.0
    terms: int | None = None
    """How many terms of a sum are added up in the precision of signals, the rest in float64; None for all N."""
    device: Any = None
    shared: bool = False
    """Whether nodes are shared out among processes."""
    _sound: bool = False  # whether `check_affinity` has looked at it

    def __init__(
        self, domain: Domain, kernel: Kernel | None, *, symmetric: bool, positive_semidefinite: bool, dtype: Any = None
    ) -> None:
        self.domain = domain
        self.kernel = kernel
        self.symmetric = symmetric
        self.positive_semidefinite = positive_semidefinite
        if isinstance(dtype, type):  # numpy.float32; dtypes of tensors are objects
            dtype = np.dtype(dtype)
        self.dtype = dtype
        self._log_scale = math.log(kernel.amplitude) if kernel is not None else 0.0
        self._recipe: Callable[[Array], Any] | None = None
        self._exact: Callable[[], PairSums] | None = None
        self._measures: dict[tuple[str, bool, str], tuple[Any, Domain, Array]] = {}

    def _push(self, law: Array) -> Array:
        """Return p P for a checked signal; only for symmetric k, where P is self-adjoint in w d."""
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

    def average(self, u: ArrayT) -> ArrayT:
        """Return the row average Pu, in float32 or float64, with the shape and device of `u`.

        Parameters
        ----------
        u : array of shape ``domain.shape`` or ``domain.shape + (D,)``

        Raises
        ------
        InputError
            For a wrong shape, dtype or device, NaN and infinity.
        """
        u = self.check_signal("u", u)
        with self.within_memory(u):
            averaged: ArrayT = self._average(u)
            return averaged

    def as_signal(self, values: Floats) -> Array:
        """Return NumPy values as a signal that this affinity averages."""
        like = self.log_degree
        if is_numpy(like):
            return np.asarray(values, dtype=self.dtype or np.float64)
        return constant_like(values, like)

    def push(self, law: Array) -> Array:
        """Return the law of a walker after one more move, (p P)_j = sum_i p_i w_j k_ij / d_i.

        Parameters
        ----------
        law : array of shape ``domain.shape`` or ``domain.shape + (D,)``
            Probabilities of the nodes, one law for each channel.

        Raises
        ------
        InputError
            For a wrong shape, dtype or device, NaN and infinity.
        NumericalError
            If rounding would change the mass by more than 1e-6 or `error_estimate`, or if p P is not known.
        """
        law = self.check_signal("law", law)
        with self.within_memory(law), np.errstate(over="ignore", invalid="ignore"):  # found out by the mass
            pushed = self._push(law)
            self._check_mass(law, pushed)
        return pushed

    def _check_mass(self, law: Array, pushed: Array) -> None:
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
        self._check_device(name, value)
        return self._check_dtype(name, self.domain.check_signal(name, value))

    def _check_device(self, name: str, value: Any) -> None:
        device = None if is_numpy(value) else getattr(value, "device", None)
        if None not in (device, self.device) and device != self.device:
            raise InputError(
                f"{name}: it is on {device}, expected {self.device}, the device of the features that the affinity was "
                "built from; move one of them"
            )

    def check_kind(self, name: str, array: Array) -> Array:
        """Return an array of the right kind and shape, or raise `InputError`."""
        check_signal_like(name, array)
        self._check_device(name, array)
        self.domain.check_shape(name, array)
        return self._check_dtype(name, array)

    def _check_dtype(self, name: str, array: Array) -> Array:
        if self.dtype is None:
            if not is_numpy(array):
                raise InputError(
                    f"{name}: got a tensor of {array.dtype}, expected a NumPy array, in which this affinity is computed"
                    "; convert it (.cpu().numpy()), or build the affinity from torch features"
                )
            if array.dtype.char not in "fd":
                raise InputError(f"{name}: got dtype {array.dtype}, expected float32 or float64; convert it")
        # As text: NumPy and torch do not compare their dtypes.
        elif array.dtype is not self.dtype and str(array.dtype) != str(self.dtype):
            tensors = is_numpy(array) and str(self.dtype).startswith("torch")
            advice = "give a tensor (torch.from_numpy)" if tensors else "convert one of them"
            raise InputError(
                f"{name}: got dtype {array.dtype}, expected {self.dtype}, the dtype of the features that the affinity "
                f"was built from; {advice}"
            )
        return array

    @property
    def log_degree(self) -> Array:
        """Logarithm of d_i, shape ``domain.shape``."""
        with self.within_memory():
            return self._log_degree() + self._log_scale

    @property
    def degree(self) -> Array:
        """d_i = sum_j w_j k_ij, shape ``domain.shape``.

        Raises
        ------
        NumericalError
            If one overflows or underflows; take ``log_degree`` then.
        """
        log_degree = self.log_degree
        xp = namespace(log_degree)
        limit = math.log(float(xp.finfo(log_degree.dtype).max))
        highest, lowest = numbers(xp.max(log_degree), xp.min(log_degree))
        if highest >= limit or lowest <= -limit:
            raise NumericalError(
                f"degree: log d runs from {lowest:.4g} to {highest:.4g}, which cannot be represented; use the degree "
                "metric (which needs P alone), or scale the kernel's amplitude or logits"
            )
        return xp.exp(log_degree)

    def log_total(self) -> float:
        """Return log sum_i w_i d_i."""
        highest, mass = numbers(*self.total_parts())
        return highest + math.log(mass)

    def total_parts(self) -> tuple[Array, Array]:
        """Return a and s with `log_total` = a + log s, still on their device."""
        log_degree = self.log_degree
        xp = namespace(log_degree)
        highest = xp.max(log_degree)
        weights = xp.astype(self.measure("l2", log_degree), log_degree.dtype)
        return highest, xp.sum(weights * xp.exp(log_degree - highest), dtype=xp.float64)

    def symmetrized(self) -> Affinity:
        """Return the affinity of K = k + k^T, or raise `NumericalError` if it is not known."""
        if self.symmetric:
            return self.scaled(2.0)
        result: Affinity = self._symmetrized()
        result._log_scale = self._log_scale
        self._evolve(result, Affinity.symmetrized)
        return result

    def edges(self, memory_limit: float | None = None) -> Sparse:
        """Return the graph of J(u) = 1/4 sum_ij W_ij |u_i - u_j|^2, W_ij = w_i w_j K_ij with K = k + k^T.

        Parameters
        ----------
        memory_limit : float, optional
            Bytes; by default ``NLFLOW_MEMORY_LIMIT``, or half of the physical memory.

        Returns
        -------
        scipy.sparse.csr_array of shape (N, N)
            Symmetric, rows sorted, without diagonal and zeros; nodes are numbered in C order.

        Raises
        ------
        InputError
            For methods that do not list edges, such as ``convolution`` and ``pairwise``, and for torch features.
        MemoryLimitError
            If the list of edges would pass the limit.
        NumericalError
            When the weights overflow.
        """
        both = self.symmetrized()
        if not is_numpy(both.log_degree):
            raise InputError("affinity: its edges are listed for NumPy features only; convert them (.cpu().numpy())")
        dtype = np.dtype(self.dtype or np.float64)
        count = both._edge_bound()
        check_memory(
            f"the list of up to {count} edges between {self.domain.size} nodes",
            count * (5 * dtype.itemsize + 28),  # at the moment when edges, their transpose and the sum are there
            "use a smaller window or fewer nodes, or raise memory_limit", memory_limit,
        )  # fmt: skip
        return functional_graph(both._edges(), self.domain.weights.ravel().astype(dtype), both._log_scale)

    def measure_error(self, u: Array | None = None, *, samples: int = 100, rng: Any = 0) -> float:
        """Return the largest error of an average at sampled nodes, against exact sums; O(samples N d) beside it.

        Parameters
        ----------
        u : array of shape ``domain.shape`` or ``domain.shape + (D,)``, optional
            The signal; white noise by default.
        samples : int
        rng : int or numpy.random.Generator

        Returns
        -------
        float
            Relative to the largest deviation of the signal from the middle of its range.

        Raises
        ------
        InputError
            For methods that are exact to rounding, for k + k^T of a k that is not symmetric, and for constant signals.
        """
        if self._exact is None and self.error_estimate > 0:
            raise InputError(
                f"affinity: method {self.method!r} has no exact sums here to measure its error with, expected what "
                "nlflow.affinity() returned, not symmetrized; error_estimate bounds the error"
            )
        if self._exact is None:
            raise InputError(f"affinity: method {self.method!r} is exact to rounding, so there is no error to measure")
        rng = check_generator(rng)
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
        """Return the affinity of factor * k, which shares all data."""
        factor = check_number("factor", factor, minimum=0, strict=True)
        result = copy.copy(self)
        result._log_scale = self._log_scale + math.log(factor)
        self._evolve(result, methodcaller("scaled", factor))
        return result

    def _evolve(self, other: Affinity, change: Callable[[Affinity], Affinity]) -> None:
        """Let another affinity evolve as this one does, with a change."""
        recipe = self._recipe
        if recipe is not None:
            other._recipe = partial(_changed, recipe, change)

    def item(self, *index: int) -> Affinity:
        """Return the affinity of one item of a `Batch`; `InputError` where there is none."""
        leading = self.domain.leading
        fits = len(index) == len(leading) > 0
        numbers = tuple(check_integer("item", i) for i in index)
        if not fits or not all(-n <= i < n for i, n in zip(numbers, leading, strict=True)):
            raise InputError(f"item: got {numbers}, expected {len(leading)} numbers within {leading}, of a Batch")
        result = self._item(tuple(i % n for i, n in zip(numbers, leading, strict=True)))
        result.reason = self.reason
        return result

    def _item(self, index: tuple[int, ...]) -> Affinity:
        raise InputError(
            f"item: {type(self).__name__} does not tell the items of its Batch apart, expected what nlflow.affinity() "
            "returned; build one on domain.item"
        )

    @property
    def evolves(self) -> bool:
        """Whether `update` is possible."""
        return self._recipe is not None

    def update(self, u: Array) -> Affinity:
        """Return the affinity with features taken from the signal `u`, or raise `InputError` if it does not evolve."""
        if self._recipe is None:
            raise InputError(
                "affinity: it compares node positions or queries, or is a given matrix, which do not change with the "
                "signal; build it from features (features=u) for an evolving kernel"
            )
        return self._updated(self.domain.check_signal("u", u))

    def settle(self) -> None:  # noqa: B027  # a hook: most have nothing to ask
        """Ask the device for what decides how sums are computed."""

    @property
    def takes_unsound(self) -> bool:
        """Whether it can follow a signal that is not finite: averages are NaN then."""
        return False

    def _updated(self, u: Array) -> Affinity:
        """Return `update` of a flow's own signal; a tensor is not looked at, for which a device would have to wait."""
        if type(self).update is not Affinity.update or self._recipe is None:
            return self.update(u)
        updated: Affinity = self._recipe(u)
        updated._sound = self._sound
        updated._measures.update({key: kept for key, kept in self._measures.items() if key[0] == "l2"})
        return updated

    def flatten(self, u: Array) -> Array:
        """Return `u` as (N, D)."""
        return namespace(u).reshape(u, (self.domain.size, -1))

    def measure(self, metric: str, like: Array, *, by_item: bool = False) -> Array:
        """Return the node measure of a metric in float64: w_i (``l2``) or w_i d_i / sum w d (``degree``)."""
        if is_numpy(like):
            return self._measured(metric, like, by_item)
        # A device forms it once: all its parts are the same at each step, and the weights come from the host.
        source = None if metric == "l2" else self._log_degree_wide()
        key = metric, by_item, str(like.device)
        kept = self._measures.get(key)
        if kept is None or kept[0] is not source or kept[1] is not self.domain:
            kept = (source, self.domain, self._measured(metric, like, by_item))
            if not self.tracked:
                self._measures[key] = kept
        return kept[2]

    def _measured(self, metric: str, like: Array, by_item: bool) -> Array:
        xp = namespace(like)
        if metric == "l2":
            return constant_like(self.domain.weights, xp.astype(like, xp.float64))
        weights = self.measure("l2", like)
        with self.within_memory():
            log_degree = xp.astype(self._log_degree_wide(), xp.float64)
        leading = len(self.domain.leading)
        if by_item and leading:
            axes = tuple(range(leading, log_degree.ndim))
            mass = weights * xp.exp(log_degree - xp.max(log_degree, axis=axes, keepdims=True))
            return mass / (xp.sum(mass, axis=axes, keepdims=True) * math.prod(self.domain.leading))
        mass = weights * xp.exp(log_degree - xp.max(log_degree))
        return mass / xp.sum(mass)

    def mean(self, u: Array, metric: str) -> Array:
        """Return the mean of each channel, and of each item of a batch, in the measure of a metric."""
        check_real("u", u)
        xp, measure, leading = namespace(u), self.measure(metric, u, by_item=True), len(self.domain.leading)
        if not leading:
            return mean_over_nodes(u, measure / xp.sum(measure))
        axes = tuple(range(leading, measure.ndim))
        return mean_over_nodes(u, measure / xp.sum(measure, axis=axes, keepdims=True), axes)

    def __repr__(self) -> str:
        nodes = math.prod(self.whole_shape)
        return f"<{type(self).__name__} {self.kernel!r} on {nodes} nodes, method={self.method!r}, {shown.tags(self)}>"

    def _repr_html_(self) -> str:
        return card(type(self).__name__, shown.said(self), shown.row_pictured(self))

    # ---- what the structure of K says: a subclass defines the first two, and what it knows of the others

    @abstractmethod
    def _average(self, u: Array) -> Array:
        """Return Pu for a checked signal."""

    @abstractmethod
    def _log_degree(self) -> Array:
        """Return log d without the amplitude, shape ``domain.shape``."""

    @property
    def memory_bytes(self) -> int:
        """Bytes kept."""
        return kept_bytes([value for name, value in vars(self).items() if name not in ("domain", "kernel")])

    @property
    def _to_keep(self) -> int:
        return self.memory_bytes

    def within_memory(self, u: Array | None = None) -> AbstractContextManager[None]:
        """Turn a device's "out of memory" into `MemoryLimitError`."""
        return nullcontext() if self.device is None else guarded(self, u)

    def _log_degree_for(self, u: Array) -> Array:
        """Return log d without the amplitude, in the precision of averages of `u`."""
        return self._log_degree()

    def _log_degree_wide(self) -> Array:
        """Return log d without the amplitude before it is rounded to the dtype of signals, where that is known."""
        # A large logarithm in float32 has lost the digits that laws need: at 1e6 its last one is a factor of 1.06.
        return self._log_degree()

    def _log_transitions(self) -> Floats | None:
        """Return log P_ij, (N, N), of an affinity that is not symmetric; None if unknown."""
        # -inf where k is 0; finite where P underflows.
        return None

    def known_spectrum(self) -> Floats | None:
        """Return the eigenvalues of P, 1 first, or None."""
        # Each is there at least once; not as often as it has eigenvectors. Where they are known the degree is constant.
        return None

    @property
    def laws_have_more_digits(self) -> bool:
        """Whether `push` is computed in a higher precision than `average`."""
        return False

    @property
    def tracked(self) -> bool:
        """Whether features require a gradient."""
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

    def _transitions(self) -> Sparse | None:
        """Return P_ij in float64 as a sparse matrix of what is not 0; None where there is none."""
        return None

    def _symmetrized(self) -> Any:
        """Return the affinity of K = k + k^T, for a k that is not symmetric."""
        raise NumericalError(f"{self.method}: K = k + k^T is not available for this affinity; use method='dense'")

    # ---- what checkpoints need; other answers where nodes are shared out among processes (`nlflow.affinities.sharded`)

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """The shape of the nodes of all processes."""
        return self.domain.shape

    def whole(self, u: Array) -> NDArray[Any]:
        """Return a signal at all nodes as a NumPy array, to the process that writes files."""
        return to_numpy(u)

    def own(self, whole: NDArray[Any], like: Array) -> Array:
        """Return this process's part of a NumPy array of all nodes."""
        return kept_like(whole, like)

    def formed(self, rows: Callable[[int, int], Floats], like: Array) -> Array:
        """Return a signal from ``rows(first, count)``, which gives the rows (count, D) of some nodes."""
        return constant_like(rows(0, self.domain.size).reshape(tuple(like.shape)), like)

    def agreed(self, answer: bool) -> bool:
        """Return the writing process's answer."""
        return answer

    def writes(self, step: int) -> bool:
        """Whether this process writes files; `FileFormatError` if processes stand at different steps."""
        del step
        return True
