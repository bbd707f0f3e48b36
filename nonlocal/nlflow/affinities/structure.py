"""The part of an affinity that depends on the structure of K: what a subclass must define and what it may define."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from nlflow._array import Array, Floats, constant_like, kept_bytes, to_numpy, underflowing
from nlflow.affinities.graph import Sparse
from nlflow.domains import Domain
from nlflow.errors import InputError, NumericalError
from nlflow.kernels import Kernel

if TYPE_CHECKING:
    from nlflow.affinities.pair_sums import PairSums


@underflowing
class Structure(ABC):
    """Averages and degrees of one structure of K; see `nlflow.Affinity`, which is what users call."""

    method: str
    reason: str = ""
    error_estimate: float = 0.0
    terms: int | None = None
    """How many terms of a sum are added up in the precision of signals, the rest in float64; None for all N."""
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
        self._recipe: Callable[[Array], Any] | None = None
        self._exact: Callable[[], PairSums] | None = None

    @abstractmethod
    def _average(self, u: Array) -> Array:
        """Return Pu for a checked signal."""

    @abstractmethod
    def _log_degree(self) -> Array:
        """Return log d without the amplitude, shape ``domain.shape``."""

    @property
    def memory_bytes(self) -> int:
        """Bytes that the affinity keeps: those of the arrays among its attributes, its domain and its kernel apart."""
        return kept_bytes([value for name, value in vars(self).items() if name not in ("domain", "kernel")])

    def _log_degree_for(self, u: Array) -> Array:
        """Return log d without the amplitude, in the precision that averages of the signal `u` are computed in."""
        return self._log_degree()

    def _log_degree_wide(self) -> Array:
        """Return log d without the amplitude before it is rounded to the dtype of signals, where that is known.

        A large logarithm in float32 has lost the digits that laws need: at 1e6 its last one is a factor of 1.06.
        """
        return self._log_degree()

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

    def _transitions(self) -> Sparse | None:
        """Return P_ij in float64 as a sparse matrix of what is not 0; None where there is none."""
        return None

    def _symmetrized(self) -> Any:
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
