"""Other terms of the literature, on tensors and as layers: what the NeuTRENO term is compared with.

=============== ============================================================== ===========================
kind            what a head returns                                            source
=============== ============================================================== ===========================
value-residual  P (λ₁ v0 + λ₂ v), λ₁ = λ₂ = 1/2 or learned                     ResFormer, arXiv 2410.17897
laplacian       v - P v in some heads, P v in the others                       arXiv 2602.09297
gated           (P v) * sigmoid(x W_g), a gate for each number of each head    arXiv 2505.06708
differential    (1 - λ_init) RMSNorm((P₁ - λ P₂) v)                            arXiv 2410.05258
sinkhorn        P v with a doubly stochastic P                                 arXiv 2110.11773
=============== ============================================================== ===========================
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from nlflow.attention.terms.averages import average
from nlflow.attention.terms.modules import NeutrenoAttention
from nlflow.attention.terms.neutreno import WideParameters
from nlflow.errors import InputError, check_choice, check_integer

KINDS = ("value-residual", "laplacian", "gated", "differential", "sinkhorn")
_DRAWN = 0.1  # standard deviation of the vectors that make λ of a differential head, in the paper's code
_EPS = 1e-5  # of the norm of a differential head, ibid.


def value_residual(values: Tensor, first: Tensor, own: float | Tensor = 0.5, shared: float | Tensor = 0.5) -> Tensor:
    """Return what ResFormer averages, λ₁ v0 + λ₂ v, with λ₁ = `shared` and λ₂ = `own` (arXiv 2410.17897, section 3).

    Unlike NeuTRENO's v0, this one is averaged as well.
    """
    return own * values + shared * first


def laplacian_heads(averages: Tensor, values: Tensor, heads: Tensor) -> Tensor:
    """Return v - P v in the heads that are True, P v in the others; (B, H, N, D), (B, H, N, D), (H,).

    (arXiv 2602.09297: a subset of the heads has the Laplacian I - P in the place of P.)
    """
    return torch.where(heads[:, None, None], values - averages, averages)


def gated(averages: Tensor, gate: Tensor) -> Tensor:
    """Return (P v) sigmoid(g), elementwise, with g of the token that looks (arXiv 2505.06708, gate G1)."""
    return averages * torch.sigmoid(gate)


def differential_start(layer: int) -> float:
    """Return λ_init = 0.8 - 0.6 exp(-0.3 (l - 1)) of the layer l = 1, 2, ... (arXiv 2410.05258, section 2.1)."""
    return 0.8 - 0.6 * math.exp(-0.3 * (check_integer("layer", layer, minimum=1) - 1))


def differential(first: Tensor, second: Tensor, strength: float | Tensor, gain: Tensor, start: float) -> Tensor:
    """Return (1 - λ_init) RMSNorm(P₁ v - λ P₂ v), normalized in each head (arXiv 2410.05258, equations 1 to 3).

    Parameters
    ----------
    first, second : tensor of shape (B, H, N, D)
        P₁ v and P₂ v.
    strength : float or tensor
        λ.
    gain : tensor of shape (D,)
        Of the norm, the same in all heads.
    start : float
        λ_init, see `differential_start`.
    """
    difference = first - strength * second
    return (1 - start) * nn.functional.rms_norm(difference, gain.shape, gain, _EPS)


def doubly_stochastic(logits: Tensor, present: Tensor | None = None, *, iterations: int = 20) -> Tensor:
    """Return exp(f_i + g_j + l_ij), whose columns and rows were scaled in turn, so many times (arXiv 2110.11773).

    Rows add up to 1, columns to what that many scalings give; 1 is softmax with columns scaled before. In log space,
    with derivatives of every order. O(N^2) an iteration. (`nlflow.affinities.sinkhorn` checks that it has converged.)

    Parameters
    ----------
    logits : tensor of shape (..., N, N)
    present : tensor of bool that broadcasts to (..., N), optional
        False at padding, which no token sees and whose rows count in no column.
    iterations : int
    """
    rows = logits
    if present is not None:
        present = present.expand(logits.shape[:-1])
        logits = logits.masked_fill(~present[..., None, :], torch.finfo(logits.dtype).min)
        rows = logits.masked_fill(~present[..., :, None], torch.finfo(logits.dtype).min)
    f, g = torch.zeros_like(logits[..., :1]), torch.zeros_like(logits[..., :1, :])
    for _ in range(iterations):
        g = -(rows + f).logsumexp(-2, keepdim=True)
        if present is not None:
            g = g.masked_fill(~present[..., None, :], 0.0)
        f = -(logits + g).logsumexp(-1, keepdim=True)
    return (logits + f + g).exp()


class NeighbourAttention(WideParameters, NeutrenoAttention):
    """Self-attention with another term of the literature, called as `NeutrenoAttention` is.

    In half precision λ₁, λ₂ and what makes λ stay float32, as strengths of `NeutrenoAttention` do.

    Parameters
    ----------
    width, heads : int
        As for `NeutrenoAttention`. A differential head has two halves of queries and keys, so width / heads is even.
    kind : {'value-residual', 'laplacian', 'gated', 'differential', 'sinkhorn'}
        See `nlflow.attention.terms.neighbours`.
    learned : bool
        Whether λ₁ and λ₂ of a value residual are learned; both start from 1/2. (λ of a differential head always is.)
    laplacian : sequence of bool, optional
        Which heads have the Laplacian; the second half of them by default.
    layer : int
        Number of the layer, from 1: where λ of a differential head starts.
    iterations : int
        Scalings of a doubly stochastic P; the paper takes 3 to 5, 20 by default.
    causal, dropout, bias
        As for `NeutrenoAttention`. Not causal with a doubly stochastic P, which would be the identity; masks are those
        of tokens.

    Raises
    ------
    InputError
        For arguments out of range, and for options that the kind does not have.

    Examples
    --------
    >>> layers = [NeighbourAttention(8, 2, "value-residual") for _ in range(3)]
    >>> x, first = torch.randn(1, 5, 8), None
    >>> for layer in layers:
    ...     step, first = layer(x, first)
    ...     x = x + step
    >>> x.shape
    torch.Size([1, 5, 8])
    """

    def __init__(
        self,
        width: int,
        heads: int,
        kind: str,
        *,
        learned: bool = False,
        laplacian: Sequence[bool] | None = None,
        layer: int = 1,
        iterations: int = 20,
        causal: bool = False,
        dropout: float = 0.0,
        bias: bool = True,
    ) -> None:
        super().__init__(width, heads, fidelity=0.0, causal=causal, dropout=dropout, bias=bias)
        self.kind = check_choice("kind", kind, KINDS)
        for name, given, owner in (("learned", learned, KINDS[0]), ("laplacian", laplacian is not None, KINDS[1])):
            if given and kind != owner:
                raise InputError(f"{name}: got it with kind={kind!r}, which has none, expected kind={owner!r}")
        self.iterations = check_integer("iterations", iterations, minimum=1)
        if causal and kind == "sinkhorn":
            raise InputError(
                "causal: got True with kind='sinkhorn', expected False: of a causal mask only the diagonal can have "
                "rows and columns that add up to 1"
            )
        # Beside the random numbers of others: models of one seed have the same projections, whatever their kind.
        with torch.random.fork_rng(devices=[]):
            self._build(width // heads, learned, laplacian, layer, bias)

    def _build(self, share: int, learned: bool, laplacian: Sequence[bool] | None, layer: int, bias: bool) -> None:
        """Add what the kind has beside the projections."""
        kind, heads, width = self.kind, self.heads, self.width
        if kind == "value-residual":
            shares = torch.full((2,), 0.5)
            self.shares: Tensor | None
            if learned:
                self.shares = nn.Parameter(shares)
            else:
                self.register_buffer("shares", shares)
        elif kind == "laplacian":
            chosen = [h >= heads // 2 for h in range(heads)] if laplacian is None else list(laplacian)
            if len(chosen) != heads or not all(isinstance(one, bool) for one in chosen):
                raise InputError(
                    f"laplacian: got {laplacian!r}, expected {heads} times True or False, one for each head"
                )
            self.chosen: Tensor
            self.register_buffer("chosen", torch.tensor(chosen))
        elif kind == "gated":
            self.gate = nn.Linear(width, width, bias=bias)
        elif kind == "differential":
            if share % 2:
                raise InputError(f"heads: got {share} features in a head, expected an even number; use other heads")
            self.begin = differential_start(layer)
            self.vectors = nn.Parameter(_DRAWN * torch.randn(4, share // 2))  # λ_q1, λ_k1, λ_q2, λ_k2
            self.gain = nn.Parameter(torch.ones(share))

    @property
    def strength(self) -> Tensor:
        """λ = exp(λ_q1 . λ_k1) - exp(λ_q2 . λ_k2) + λ_init of differential heads."""
        products = (self.vectors[0::2] * self.vectors[1::2]).sum(-1).exp()
        return products[0] - products[1] + self.begin

    def forward(
        self, tokens: Tensor, first: Tensor | None = None, *, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the layer's output, without the residual, and v0; see `NeutrenoAttention.forward`."""
        pairs = self._pairs(mask, tokens)
        query, key, value = self.parts(tokens)
        anchor = value if first is None else first
        if anchor.shape != value.shape:
            raise InputError(
                f"first: got shape {tuple(anchor.shape)}, expected {tuple(value.shape)}, that of this layer's values; "
                "pass what the first layer returned for the same tokens"
            )

        def averaged(q: Tensor, k: Tensor, v: Tensor, fused: bool = True) -> Tensor:
            dropout = self.dropout if self.training else 0.0
            return average(q, k, v, mask=pairs, causal=self.causal, dropout=dropout, fused=fused)[0]

        if self.kind == "sinkhorn":
            averages = self._scaled(query, key, mask) @ value
        elif self.kind == "differential":
            # Fused kernels expect values as wide as queries.
            halves = zip(query.chunk(2, -1), key.chunk(2, -1), strict=True)
            both = [averaged(q, k, value, fused=False) for q, k in halves]
            averages = differential(both[0], both[1], self.strength, self.gain.to(value), self.begin)
        elif self.kind == "value-residual" and first is not None and self.shares is not None:
            averages = averaged(query, key, value_residual(value, first, self.shares[1], self.shares[0]))
        else:
            averages = averaged(query, key, value)
            if self.kind == "laplacian":
                averages = laplacian_heads(averages, value, self.chosen)
            elif self.kind == "gated":
                averages = gated(averages, self.gate(tokens).unflatten(-1, (self.heads, -1)).transpose(1, 2))
        return self.output(averages.transpose(1, 2).flatten(-2)), anchor

    def _scaled(self, query: Tensor, key: Tensor, mask: Tensor | None) -> Tensor:
        """Return the doubly stochastic weights, dropped out in training."""
        if mask is not None and mask.dim() != 2:
            raise InputError(
                f"mask: got {mask.dim()} axes with kind='sinkhorn', expected 2 (sequences, tokens): other patterns of "
                "zeros need not have rows and columns that add up to 1"
            )
        present = None if mask is None else mask.bool()[:, None, :]
        logits = query @ key.mT * query.shape[-1] ** -0.5
        weights = doubly_stochastic(logits, present, iterations=self.iterations)
        return nn.functional.dropout(weights, self.dropout if self.training else 0.0)
