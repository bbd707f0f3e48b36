"""One head of a trained layer as an affinity, as a Markov chain, and as the initial values of a flow."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import softmax

from nlflow._array import to_numpy, underflowing
from nlflow.affinities import Affinity, affinity, from_matrix
from nlflow.attention.terms.averages import log_affinity, seen
from nlflow.domains import Points
from nlflow.domains.mask import Mask, Sight
from nlflow.equilibria import largest_stable_fidelity
from nlflow.errors import InputError, check_number
from nlflow.kernels import ExpDotProduct, Gaussian, Kernel
from nlflow.markov import MarkovChain

Floats = NDArray[np.float64]

_MATRIX_TOKENS = 2048  # a masked head with more tokens keeps no matrix; its rows are computed when needed


@underflowing
@dataclass(frozen=True, eq=False)
class Head:
    """One head of one layer on one sequence, without padding, in float64.

    A token j has the quadrature weight 1. So the degree d_i = sum_j k_ij is the denominator of the softmax, and 1 / d_i
    is the step of the L2 flow that the layer takes at token i (arXiv 2312.00751, theorem 1). Where numbers are added to
    log k, and for kernels that the package does not have, P is a matrix and degrees are 1.

    Attributes
    ----------
    q, k : array of shape (N, d)
        Queries and keys; the same array where the layer uses keys as queries.
    v : array of shape (N, d_v)
        Values.
    scaling : float
        Factor of the dot products.
    bias : array of shape (N, N), optional
        Added to log k, with -inf where token i does not see token j.
    kernel : str
        Which k, one of `nlflow.attention.terms.averages.AFFINITIES`.
    mask : Mask, optional
        Who sees whom, where that is a rule, such as all tokens up to each. Either this or `bias`.

    Raises
    ------
    InputError
        Where both a bias and a mask are given.
    """

    q: Floats
    k: Floats
    v: Floats
    scaling: float
    bias: Floats | None = None
    kernel: str = "softmax"
    mask: Mask | None = None

    def __post_init__(self) -> None:
        if self.mask is not None and self.bias is not None:
            raise InputError("mask: got one beside a bias, expected either; put -inf into the bias where it hides")

    @property
    def tokens(self) -> int:
        """Number of tokens N."""
        return len(self.v)

    @cached_property
    def causal(self) -> bool:
        """Whether no token sees a later one. Then P is lower-triangular, and its eigenvalues are its diagonal."""
        if self.bias is None:
            return self.mask is not None and self.mask.causal
        return bool(np.isneginf(self.bias[np.triu_indices(self.tokens, 1)]).all())

    @cached_property
    def symmetric(self) -> bool:
        """Whether k is symmetric: keys are queries, and if i sees j, j sees i."""
        return self.affinity.symmetric

    def along(self, q: Floats, k: Floats) -> Affinity:
        """Return the affinity of other queries and keys with the same mask.

        It is that of `nlflow.ExpDotProduct` or `nlflow.Gaussian`, matrix-free for long sequences: O(N d) memory. With a
        bias, and for other kernels, it holds P as a matrix.
        """
        nodes = Points(np.arange(len(k)), weights=np.ones(len(k)))
        same = q is k or (q.shape == k.shape and bool((q == k).all()))
        kernel = self._kernel(same)
        if kernel is not None:
            queries = None if same else q
            if self.mask is None or len(k) <= _MATRIX_TOKENS:
                return affinity(kernel, nodes, features=k, queries=queries, mask=self.mask)
            # Masked sums without a matrix exist for tensors only.
            features, other = (None if part is None else torch.from_numpy(part) for part in (k, queries))
            return _OnHost(affinity(kernel, nodes, features, queries=other, method="tiled", mask=self.mask))
        logarithms = log_affinity(torch.from_numpy(q), torch.from_numpy(k), self.kernel, self.scaling).numpy()
        if self.mask is not None:
            logarithms = Sight(self.mask, (), len(k), k).applied(logarithms, slice(None))
        logarithms = logarithms if self.bias is None else logarithms + self.bias
        if not np.isfinite(logarithms.max(axis=1)).all():
            raise InputError("mask: got a token that sees none, not even itself; expected one seen token for each")
        return from_matrix(softmax(logarithms, axis=1), nodes)

    def _kernel(self, same: bool) -> Kernel | None:
        """Return k as a kernel of the package, if it is one; `same` says whether queries are the keys."""
        if self.bias is None and self.kernel in ("softmax", "symmetric"):
            return ExpDotProduct(scale=self.scaling)
        if self.bias is None and self.kernel == "gaussian" and same and self.scaling > 0:
            return Gaussian(width=self.scaling**-0.5)
        return None

    @cached_property
    def affinity(self) -> Affinity:
        """The affinity k whose P is the attention matrix; see `along`."""
        return self.along(self.q, self.k)

    @cached_property
    def chain(self) -> MarkovChain:
        """The Markov chain of the attention matrix."""
        return MarkovChain(self.affinity)

    @property
    def matrix(self) -> Floats:
        """The attention matrix P, shape (N, N). O(N^2) memory."""
        return self.chain.matrix()

    @property
    def stationary(self) -> Floats:
        """The stationary law pi = pi P, shape (N,). In a causal layer the first token has all of it."""
        return self.chain.stationary

    @cached_property
    def eigenvalues(self) -> NDArray[Any]:
        """All eigenvalues of P by decreasing modulus. O(N^3) time; causal layers O(N^2 d), from the diagonal."""
        if self.causal:
            diagonal = self._diagonal
            return diagonal[np.argsort(-diagonal, kind="stable")]
        return self.chain.eigenvalues()

    @property
    def _diagonal(self) -> Floats:
        """P_ii, from k_ii and the degree where there is no matrix."""
        matrix = getattr(self.affinity, "matrix", None)
        if matrix is not None:
            return np.diagonal(matrix)
        own = 0.0 if isinstance(self.affinity.kernel, Gaussian) else self.scaling * (self.q * self.k).sum(axis=1)
        return np.asarray(np.exp(own - self.affinity.log_degree))

    @property
    def spectral_gap(self) -> float:
        """1 - |mu_2|: the share of the differences between tokens that each application removes, in the long run."""
        if self.causal:
            return float(1 - self.eigenvalues[1]) if self.tokens > 1 else 1.0
        return self.chain.spectral_gap

    def mixing_time(self, eps: float = 0.25) -> int:
        """Return after how many applications of the layer a walker's law is within `eps` of pi from any token."""
        return self.chain.mixing_time(eps)

    @property
    def fidelity_limit(self) -> float:
        """The fidelity lambda~ up to which NeuTRENO steps converge; see `nlflow.equilibria.largest_stable_fidelity`."""
        if self.causal:
            return 1 + float(self.eigenvalues[-1])
        return largest_stable_fidelity(self.affinity)

    def spectral_radius(self, fidelity: float) -> float:
        """Return rho(P - lambda~ I), below 1 where NeuTRENO steps converge. O(N^3) time."""
        return float(np.abs(self.eigenvalues - check_number("fidelity", fidelity)).max())


def rule_or_bias(mask: torch.Tensor) -> tuple[Mask | None, Floats | None]:
    """Return a mask (N, N) as a rule, or as a bias added to log k where no rule fits; neither where all see all.

    The mask is boolean (True: i sees j) or added to log k. A rule is: all tokens up to each, or the last few of them.
    """
    visible = seen(mask)
    adds = mask.is_floating_point() and bool((mask.masked_fill(~visible, 0) != 0).any())
    if not adds:
        if bool(visible.all()):
            return None, None
        widest = int(visible[-1].sum())
        if torch.equal(visible, torch.ones_like(visible).tril().triu(1 - widest)):
            return Mask(causal=True, window=None if widest == len(mask) else widest - 1), None
    added = mask.detach().double().cpu().numpy() if adds else 0.0
    return None, np.where(visible.cpu().numpy(), added, -np.inf)


class _OnHost(Affinity):
    """An affinity of tensors in float64 on the CPU, for signals of NumPy; its kernel has the amplitude 1."""

    method = "tiled"

    def __init__(self, tensors: Affinity) -> None:
        super().__init__(
            tensors.domain, tensors.kernel, symmetric=tensors.symmetric,
            positive_semidefinite=tensors.positive_semidefinite, dtype=np.dtype(np.float64),
        )  # fmt: skip
        self._tensors, self.reason = tensors, tensors.reason

    @property
    def memory_bytes(self) -> int:
        """Bytes that the affinity keeps."""
        return self._tensors.memory_bytes

    def _average(self, u: Floats) -> Floats:
        return to_numpy(self._tensors._average(torch.from_numpy(np.ascontiguousarray(u))))

    def _push(self, law: Floats) -> Floats:
        return to_numpy(self._tensors._push(torch.from_numpy(np.ascontiguousarray(law))))

    def _log_transitions(self) -> Floats | None:
        return self._tensors._log_transitions()

    def _log_degree(self) -> Floats:
        return to_numpy(self._tensors.log_degree)

    def _symmetrized(self) -> Affinity:
        return _OnHost(self._tensors.symmetrized())
