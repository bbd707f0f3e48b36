"""One head of a trained layer as what the rest of the package knows: an affinity, a chain, a flow's initial data."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from nlflow.affinities import Affinity, affinity, from_matrix
from nlflow.attention.averages import log_affinity
from nlflow.domain import Points
from nlflow.equilibria import neutreno_limit
from nlflow.errors import InputError, check_number
from nlflow.kernel import DotProduct, Gaussian
from nlflow.markov import MarkovChain

__all__ = ["Head"]

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Head:
    """One head of one layer on one sequence, padding left out, in float64.

    A token j has the quadrature weight 1, so that the degree d_i = sum_j k_ij is the denominator of the softmax, and
    1 / d_i the step of the L2 flow that the layer takes at token i (arXiv 2312.00751, theorem 1). Behind a mask, and
    for kernels that the package does not have, P is given as a matrix; degrees are 1 then.

    Attributes
    ----------
    q, k : array of shape (N, d)
        Queries and keys; the same array where the layer uses keys as queries.
    v : array of shape (N, d_v)
        Values.
    scaling : float
        Factor of the dot products.
    bias : array of shape (N, N), optional
        What is added to log k, -inf where token i does not see token j; None where all see all.
    kernel : str
        Which k, one of `nlflow.attention.averages.AFFINITIES`.
    """

    q: Floats
    k: Floats
    v: Floats
    scaling: float
    bias: Floats | None = None
    kernel: str = "softmax"

    @property
    def tokens(self) -> int:
        """Number of tokens N."""
        return len(self.v)

    @cached_property
    def causal(self) -> bool:
        """Whether no token sees one after it; then P is lower-triangular and its eigenvalues are its diagonal."""
        return self.bias is not None and bool(np.isneginf(self.bias[np.triu_indices(self.tokens, 1)]).all())

    @cached_property
    def symmetric(self) -> bool:
        """Whether k is symmetric: keys are queries, and who is seen sees."""
        return self.affinity.symmetric

    def along(self, q: Floats, k: Floats) -> Affinity:
        """Return the affinity of other queries and keys, behind the same mask.

        Without a mask it is that of `nlflow.DotProduct` or `nlflow.Gaussian`, matrix-free for long sequences; behind a
        mask, and for other kernels, P is given as a matrix.
        """
        nodes = Points(np.arange(len(k)), weights=np.ones(len(k)))
        same = q is k or (q.shape == k.shape and bool((q == k).all()))
        if self.bias is None and self.kernel in ("softmax", "symmetric"):
            return affinity(DotProduct(scale=self.scaling), nodes, features=k, queries=None if same else q)
        if self.bias is None and self.kernel == "gaussian" and same and self.scaling > 0:
            return affinity(Gaussian(width=self.scaling**-0.5), nodes, features=k)
        logarithms = log_affinity(torch.from_numpy(q), torch.from_numpy(k), self.kernel, self.scaling).numpy()
        return from_matrix(_softmax(logarithms if self.bias is None else logarithms + self.bias), nodes)

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
        """The stationary law pi = pi P, shape (N,); all at the first token where the layer is causal."""
        return self.chain.stationary

    @cached_property
    def eigenvalues(self) -> NDArray[Any]:
        """All eigenvalues of P by decreasing modulus. O(N^3) time; the diagonal where the layer is causal."""
        if self.causal:
            diagonal = np.diagonal(self.matrix)
            return diagonal[np.argsort(-diagonal, kind="stable")]
        return self.chain.eigenvalues()

    @property
    def spectral_gap(self) -> float:
        """1 - |mu_2|: how much of what tells tokens apart one application of the layer takes away, in the long run."""
        if self.causal:
            return float(1 - self.eigenvalues[1]) if self.tokens > 1 else 1.0
        return self.chain.spectral_gap

    def mixing_time(self, eps: float = 0.25) -> int:
        """Return the applications of the layer after which a walker's law is within `eps` of pi from any token."""
        return self.chain.mixing_time(eps)

    @property
    def fidelity_limit(self) -> float:
        """The fidelity lambda~ up to which NeuTRENO steps with this P converge; see `nlflow.neutreno_limit`."""
        if self.causal:
            return 1 + float(self.eigenvalues[-1])
        return neutreno_limit(self.affinity)

    def spectral_radius(self, fidelity: float) -> float:
        """Return rho(P - lambda~ I), below 1 where NeuTRENO steps converge. O(N^3) time."""
        return float(np.abs(self.eigenvalues - check_number("fidelity", fidelity)).max())


def _softmax(logarithms: Floats) -> Floats:
    """Return the softmax of each row."""
    highest = logarithms.max(axis=1, keepdims=True)
    if not np.isfinite(highest).all():
        raise InputError("mask: got a token that sees none, not even itself; expected one seen token for each")
    weights = np.exp(logarithms - highest)
    return np.asarray(weights / weights.sum(axis=1, keepdims=True))
