"""Whole layers in plain torch: attention with the NeuTRENO term, and projections whose spectrum is known."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from nlflow.attention.terms.averages import FUSED, average, causal_mask
from nlflow.attention.terms.neutreno import LayerTerms, TermOptions, removed_similarity
from nlflow.attention.terms.wiener import wide
from nlflow.errors import InputError, check_choice, check_integer, check_number, checked_call


@checked_call
class NeutrenoAttention(nn.Module):
    """Self-attention with the NeuTRENO term, in plain torch.

    Where a softmax computes the average, torch's fused attention is used, in O(N) memory. The other affinities, and a
    matrix fidelity, need the matrix of weights.

    Parameters
    ----------
    width : int
        Number of features of a token.
    heads : int
        Divides `width`.
    affinity : {'softmax', 'symmetric', 'gaussian', 'sigmoid', 'softplus', 'linear'}
        The kernel of the average; see `nlflow.attention.terms.averages`.
    fidelity : float
        λ̃ >= 0; 0 leaves plain attention.
    learned, semi_implicit, feat_scale, attn_scale, similarity_removal, matrix_fidelity
        As for `nlflow.attention.attach`. `similarity_removal` takes away the mean of the tokens that enter this layer,
        unless it is the first.
    causal : bool
        Whether tokens see only those up to themselves.
    dropout : float
        Rate at which weights are dropped in training.
    bias : bool
        Of the four projections.
    projection : {None, 'sharpening', 'smoothing'}
        Use `SignedProjection` for the values, and no output projection; needs one head.
    generator : torch.Generator, optional
        For `SignedProjection`.

    Attributes
    ----------
    query, key, value, output : torch.nn.Linear
        The projections; `output` is the identity with a signed projection.

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
        self.causal = causal
        options = TermOptions(
            affinity, learned, semi_implicit, feat_scale, attn_scale, similarity_removal, matrix_fidelity
        )
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
            (B, N), True for tokens that count; or what broadcasts to (B, H, N, N), boolean (True: i sees j) or
            additive.

        Returns
        -------
        output : tensor of shape (B, N, D)
        first : tensor of shape (B, H, N, D/H)
            v0, with its graph: pass it on to the layers that follow.
        """
        mask = self._pairs(mask, tokens)
        plain = None if mask is None else mask[:, 0]
        removal, affinity = self.terms.options.similarity_removal, self.terms.options.affinity
        if removal and first is not None:
            tokens = removed_similarity(tokens, removal, plain, causal=self.causal)
        query, key, value = self.parts(tokens)
        if first is not None and first.shape != value.shape:
            raise InputError(
                f"first: got shape {tuple(first.shape)}, expected {tuple(value.shape)}, that of this layer's values; "
                "pass what the first layer returned for the same tokens"
            )
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
        return result, value if first is None else first

    def parts(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values of tokens (B, N, D), each (B, H, N, D/H)."""
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


class SignedProjection(nn.Module):
    """A projection x W whose eigenvalues all have one sign: a layer that sharpens, or one that smooths.

    W = V diag(±ψ²) V^T with V the orthogonal factor of a free matrix Θ. The layer X + A X W has the eigenvalues
    1 + ω_j α_i, with α of A and ω of W. For ω > 0 that of α = 1 dominates, and tokens become equal. For
    -2/(1 + α_min) < ω < 0 that of α_min dominates. Since α_min <= 1, ω in [-1, 0) is enough. So ψ² > 1 counts as 1.

    Parameters
    ----------
    width : int
    kind : {'sharpening', 'smoothing'}
    generator : torch.Generator, optional
        Of the random start: Θ standard normal, ψ uniform in [0, 1).
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
        """ω, shape (D,)."""
        return self.psi.square() if self.kind == "smoothing" else -self.psi.square().clamp_max(1)

    @property
    def weight(self) -> Tensor:
        """W, shape (D, D); symmetric. Computed in float32 where parameters are in half precision. O(D³)."""
        basis = torch.linalg.qr(wide(self.theta))[0]
        weight: Tensor = basis * wide(self.eigenvalues) @ basis.T
        return weight.to(self.theta.dtype)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return x W for tokens of shape (..., D)."""
        return tokens @ self.weight
