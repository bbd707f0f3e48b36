"""Whole layers in plain torch.

=============== ============================================================== ===========================
kind            what a head of `NeighbourAttention` returns                    source
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
from typing import Any

import torch
from torch import Tensor, nn

from nlflow.attention.terms.averages import FUSED, average, causal_mask
from nlflow.attention.terms.neutreno import LayerTerms, TermOptions, WideParameters, removed_similarity, wide
from nlflow.errors import InputError, check_choice, check_dense, check_flag, check_integer, check_number, checked_call


@checked_call
class NeutrenoAttention(nn.Module):
    """Self-attention with the NeuTRENO term, in plain torch.

    The affinities 'sigmoid', 'softplus' and 'linear', and a matrix fidelity, take O(N²) memory for each head.

    Parameters
    ----------
    width : int
        Number of features of a token.
    heads : int
        Divides `width`.
    affinity : {'softmax', 'symmetric', 'gaussian', 'sigmoid', 'softplus', 'linear'}
        The kernel of the average; see `nlflow.attention.terms.averages`.
    fidelity : float
        λ̃ >= 0.
    learned : bool
        Whether log λ̃ is learned.
    semi_implicit, feat_scale, attn_scale, matrix_fidelity
        As for `nlflow.attention.attach`; `semi_implicit` is False by default.
    similarity_removal : float
        τ in [0, 1]: the share of the mean token that is subtracted from the tokens when they enter a layer other than
        the first.
    causal : bool
    dropout : float
        Rate at which weights are dropped in training.
    bias : bool
        Whether linear projections have one.
    projection : {None, 'sharpening', 'smoothing'}
        Use `SignedProjection` for the values, and no output projection; needs one head.
    generator : torch.Generator, optional
        For `SignedProjection`.

    Attributes
    ----------
    query, key, value, output : torch.nn.Module

    Examples
    --------
    >>> layers = [NeutrenoAttention(8, 2, fidelity=0.6) for _ in range(3)]
    >>> x, first = torch.randn(1, 5, 8), None
    >>> for layer in layers:
    ...     step, first = layer(x, first)
    ...     x = x + step
    >>> x.shape, first.shape
    (torch.Size([1, 5, 8]), torch.Size([1, 2, 5, 4]))

    Raises
    ------
    InputError
        For arguments out of range.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        affinity: str = "softmax",
        fidelity: float = 0.6,
        learned: bool = False,
        semi_implicit: bool = False,
        feat_scale: bool = False,
        attn_scale: bool = False,
        similarity_removal: float = 0.0,
        matrix_fidelity: bool = False,
        causal: bool = False,
        dropout: float = 0.0,
        bias: bool = True,
        projection: str | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        self.width = check_integer("width", width, minimum=1)
        self.heads = check_integer("heads", heads, minimum=1)
        if width % heads:
            raise InputError(f"heads: got {heads}, expected a divisor of width={width}")
        if projection is not None and heads != 1:
            raise InputError(f"projection: got {projection!r} with {heads} heads, expected one; use heads=1")
        self.dropout = check_number("dropout", dropout, minimum=0, below=1)
        self.causal, bias = check_flag("causal", causal), check_flag("bias", bias)
        check_flag("learned", learned)  # one layer alone shares nothing
        self.similarity_removal = check_number("similarity_removal", similarity_removal, minimum=0)
        if self.similarity_removal > 1:
            raise InputError(
                f"similarity_removal: got {similarity_removal:g}, expected a share from 0 to 1 of the tokens' mean; 1 "
                "takes all of it away"
            )
        options = TermOptions(affinity, learned, semi_implicit, feat_scale, attn_scale, matrix_fidelity)
        self.query, self.key = nn.Linear(width, width, bias=bias), nn.Linear(width, width, bias=bias)
        self.value: nn.Module
        self.output: nn.Module
        if projection is None:
            self.value, self.output = nn.Linear(width, width, bias=bias), nn.Linear(width, width, bias=bias)
        else:
            self.value, self.output = SignedProjection(width, projection, generator=generator), nn.Identity()
        self.terms = LayerTerms(options, fidelity, first=False, causal=causal, heads=heads, width=width)

    def forward(
        self, tokens: Tensor, first: Tensor | None = None, *, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the layer's output, without the residual, and v0.

        Parameters
        ----------
        tokens : tensor of shape (B, N, D)
        first : tensor of shape (B, H, N, D/H), optional
            v0, as the first layer returned it; None in the first layer, which has no term.
        mask : tensor, optional
            (B, N), True for tokens that count; or four axes that broadcast to (B, H, N, N), boolean (True: i sees j) or
            additive; means over tokens take that of the first head.

        Returns
        -------
        output : tensor of shape (B, N, D)
        first : tensor of shape (B, H, N, D/H)
            v0, with its graph.
        """
        mask = self._pairs(mask, tokens)
        plain = None if mask is None else mask[:, 0]
        removal, affinity = self.similarity_removal, self.terms.options.affinity
        if removal and first is not None:
            tokens = removed_similarity(tokens, removal, plain, causal=self.causal)
        query, key, value = self.parts(tokens)
        anchor = _anchor(first, value)
        options: Any = {"mask": mask, "causal": self.causal}
        dropout = self.dropout if self.training else 0.0
        matrix = self.terms.log_variance is not None
        fused = affinity in FUSED and not matrix
        averages, weights = average(query, key, value, affinity, dropout=dropout, fused=fused, **options)
        if matrix and dropout:
            weights = average(query, key, value, affinity, **options)[1]
        averages = self.terms(averages, value, value, first, weights, mask, self.causal)
        result = self.output(averages.transpose(1, 2).flatten(-2))
        if self.terms.feat is not None:
            result = self.terms.feat(result, plain, causal=self.causal)
        return result, anchor

    def parts(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values."""
        check_dense("tokens", tokens)
        there = getattr(self.query, "weight", tokens).device
        if tokens.device != there:
            raise InputError(
                f"tokens: they are on {tokens.device}, expected {there}, where this layer is; move one of them"
            )
        query, key, value = (
            part(tokens).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        return query, key, value

    def _pairs(self, mask: Tensor | None, tokens: Tensor) -> Tensor | None:
        """Return a mask as (B, 1 or H, N, N), with the causal one in it."""
        if mask is None:
            return None
        if mask.dim() == 2:
            if mask.shape != tokens.shape[:2]:
                raise InputError(
                    f"mask: got shape {tuple(mask.shape)}, expected {tuple(tokens.shape[:2])}, one entry for each "
                    "token, or four axes"
                )
            if mask.dtype.is_floating_point:
                raise InputError(
                    f"mask: got {mask.dtype} for tokens, expected bool or integers, 1 for those that count"
                )
            mask = mask.bool()[:, None, None, :]
        if mask.dim() != 4:
            raise InputError(f"mask: got {mask.dim()} axes, expected 2 (sequences, tokens) or 4 (…, heads, i, j)")
        if not (mask.dtype == torch.bool or mask.dtype.is_floating_point):
            raise InputError(f"mask: got four axes of {mask.dtype}, expected bool, or numbers that are added")
        if self.causal:
            before = causal_mask(tokens.shape[1], tokens.shape[1], tokens.device)
            mask = mask & before if mask.dtype == torch.bool else mask.masked_fill(~before, torch.finfo(mask.dtype).min)
        return mask


def _anchor(first: Tensor | None, value: Tensor) -> Tensor:
    """Return v0, which the values of the first layer are."""
    if first is not None and first.shape != value.shape:
        raise InputError(
            f"first: got shape {tuple(first.shape)}, expected {tuple(value.shape)}, that of this layer's values; "
            "pass what the first layer returned for the same tokens"
        )
    return value if first is None else first


class SignedProjection(nn.Module):
    """A projection x W with a symmetric W whose eigenvalues ω are >= 0 (smoothing), or from -1 to 0 (sharpening).

    W = V diag(ω) V^T with V the orthogonal factor of a free matrix Θ, and ω = ψ², or -min(ψ², 1) for sharpening.

    Parameters
    ----------
    width : int
    kind : {'sharpening', 'smoothing'}
    generator : torch.Generator, optional
        For the random start: Θ standard normal, ψ uniform in [0, 1).
    device, dtype : optional

    References
    ----------
    .. [1] G. Dovonon, M. Bronstein, M. Kusner, "Setting the record straight on transformer oversmoothing",
       arXiv 2401.04301.
    """

    def __init__(
        self,
        width: int,
        kind: str = "sharpening",
        *,
        generator: torch.Generator | None = None,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        width = check_integer("width", width, minimum=1)
        self.kind = check_choice("kind", kind, ("sharpening", "smoothing"))
        free: dict[str, Any] = {"device": device, "dtype": dtype, "generator": generator}
        self.theta = nn.Parameter(torch.randn(width, width, **free))
        self.psi = nn.Parameter(torch.rand(width, **free))

    @property
    def eigenvalues(self) -> Tensor:
        """The eigenvalues ω, shape (D,)."""
        return self.psi.square() if self.kind == "smoothing" else -self.psi.square().clamp_max(1)

    @property
    def weight(self) -> Tensor:
        """W, shape (D, D), at least in float32, in O(D³)."""
        basis = torch.linalg.qr(wide(self.theta))[0]
        weight: Tensor = basis * wide(self.eigenvalues) @ basis.T
        return weight.to(self.theta.dtype)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return x W."""
        return tokens @ self.weight


# ---- other terms of the literature

KINDS = ("value-residual", "laplacian", "gated", "differential", "sinkhorn")
_DRAWN = 0.1  # standard deviation of the vectors that make λ of a differential head, in the paper's code
_EPS = 1e-5  # of the norm of a differential head, ibid.


def value_residual(values: Tensor, first: Tensor, own: float | Tensor = 0.5, shared: float | Tensor = 0.5) -> Tensor:
    """Return what ResFormer averages, λ₁ v0 + λ₂ v, with λ₁ = `shared` and λ₂ = `own` (arXiv 2410.17897)."""
    return own * values + shared * first


def differential_start(layer: int) -> float:
    return 0.8 - 0.6 * math.exp(-0.3 * (check_integer("layer", layer, minimum=1) - 1))


def doubly_stochastic(logits: Tensor, present: Tensor | None = None, *, iterations: int = 20) -> Tensor:
    """Return exp(f_i + g_j + l_ij) with rows of sum 1 after so many scalings of rows and columns (arXiv 2110.11773)."""
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

    Parameters
    ----------
    width, heads : int
        As for `NeutrenoAttention`; for differential heads width / heads is even.
    kind : {'value-residual', 'laplacian', 'gated', 'differential', 'sinkhorn'}
        See `nlflow.attention.terms.modules`.
    learned : bool
        Whether λ₁ and λ₂ of a value residual are learned; both start from 1/2.
    laplacian : sequence of bool, optional
        Which heads have the Laplacian; the second half by default.
    layer : int
        Number of the layer, from 1, on which λ_init of differential heads depends.
    iterations : int
        How often rows and columns are scaled for a doubly stochastic P.
    causal, dropout, bias
        As for `NeutrenoAttention`; a doubly stochastic P is not causal, and takes masks of tokens alone.

    Raises
    ------
    InputError
        For arguments out of range, and for `learned` or `laplacian` with another kind.

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
        layer = check_integer("layer", layer, minimum=1)
        if causal and kind == "sinkhorn":
            raise InputError(
                "causal: got True with kind='sinkhorn', expected False: of a causal mask only the diagonal can have "
                "rows and columns that add up to 1"
            )
        # Beside the random numbers of others: models of one seed have the same projections, whatever their kind.
        with torch.random.fork_rng(devices=[]):
            self._build(width // heads, learned, laplacian, layer, bias)

    def _build(self, share: int, learned: bool, laplacian: Sequence[bool] | None, layer: int, bias: bool) -> None:
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
        """As `NeutrenoAttention.forward`."""
        pairs = self._pairs(mask, tokens)
        query, key, value = self.parts(tokens)
        anchor = _anchor(first, value)

        def averaged(q: Tensor, k: Tensor, v: Tensor, fused: bool = True) -> Tensor:
            dropout = self.dropout if self.training else 0.0
            return average(q, k, v, mask=pairs, causal=self.causal, dropout=dropout, fused=fused)[0]

        if self.kind == "sinkhorn":
            averages = self._scaled(query, key, mask) @ value
        elif self.kind == "differential":
            # Fused kernels expect values as wide as queries.
            halves = zip(query.chunk(2, -1), key.chunk(2, -1), strict=True)
            both = [averaged(q, k, value, fused=False) for q, k in halves]
            difference, gain = both[0] - self.strength * both[1], self.gain.to(value)
            averages = (1 - self.begin) * nn.functional.rms_norm(difference, gain.shape, gain, _EPS)
        elif self.kind == "value-residual" and first is not None and self.shares is not None:
            averages = averaged(query, key, value_residual(value, first, self.shares[1], self.shares[0]))
        else:
            averages = averaged(query, key, value)
            if self.kind == "laplacian":
                averages = torch.where(self.chosen[:, None, None], value - averages, averages)
            elif self.kind == "gated":
                gate = self.gate(tokens).unflatten(-1, (self.heads, -1)).transpose(1, 2)
                averages = averages * torch.sigmoid(gate)
        return self.output(averages.transpose(1, 2).flatten(-2)), anchor

    def _scaled(self, query: Tensor, key: Tensor, mask: Tensor | None) -> Tensor:
        if mask is not None and mask.dim() != 2:
            raise InputError(
                f"mask: got {mask.dim()} axes with kind='sinkhorn', expected 2 (sequences, tokens): other patterns of "
                "zeros need not have rows and columns that add up to 1"
            )
        present = None if mask is None else mask.bool()[:, None, :]
        logits = query @ key.mT * query.shape[-1] ** -0.5
        weights = doubly_stochastic(logits, present, iterations=self.iterations)
        return nn.functional.dropout(weights, self.dropout if self.training else 0.0)
