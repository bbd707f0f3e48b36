"""Layers as `torch.nn.Module`: the terms of one block, and whole attention in plain torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from nlflow.attention.averages import AFFINITIES, FUSED, average, fused_average, repeated, seen, uniform_average
from nlflow.attention.projections import SignedProjection
from nlflow.attention.terms import (
    covariance,
    matrix_step,
    neutreno,
    removed_similarity,
    scaled_attention,
    scaled_features,
)
from nlflow.errors import InputError, check_choice, check_integer, check_number

__all__ = ["FeatScale", "LayerTerms", "NeutrenoAttention", "TermOptions"]


@dataclass(frozen=True)
class TermOptions:
    """What is added to the average of each block; the fields are the arguments of `nlflow.attention.attach`."""

    affinity: str = "softmax"
    learned: bool | str = False
    semi_implicit: bool = False
    feat_scale: bool = False
    attn_scale: bool = False
    similarity_removal: float = 0.0
    matrix_fidelity: bool = False

    def __post_init__(self) -> None:
        check_choice("affinity", self.affinity, AFFINITIES)
        check_number("similarity_removal", self.similarity_removal, minimum=0)
        if self.similarity_removal > 1:
            raise InputError(
                f"similarity_removal: got {self.similarity_removal:g}, expected a share from 0 to 1 of the tokens' "
                "mean; 1 takes all of it away"
            )
        if not isinstance(self.learned, bool) and self.learned != "shared":
            raise InputError(f"learned: got {self.learned!r}, expected True, False or 'shared'")
        if self.learned == "shared" and self.matrix_fidelity:
            raise InputError(
                "learned: got 'shared' with matrix_fidelity=True, expected False: σ² is learned layer by layer"
            )
        for name in ("semi_implicit", "feat_scale", "attn_scale", "matrix_fidelity"):
            if not isinstance(getattr(self, name), bool):
                raise InputError(f"{name}: got {getattr(self, name)!r}, expected True or False")


class FeatScale(nn.Module):
    """Two learned scales for each feature: of the mean over tokens and of what deviates from it.

    At the start both are 1, and tokens pass with all their bits.

    Parameters
    ----------
    width : int
        Number of features.
    device, dtype : optional
        Of the parameters `low` and `high` (s and t of `nlflow.attention.terms.scaled_features`).
    """

    def __init__(self, width: int, *, device: Any = None, dtype: Any = None) -> None:
        super().__init__()
        width = check_integer("width", width, minimum=1)
        self.low = nn.Parameter(torch.zeros(width, device=device, dtype=dtype))
        self.high = nn.Parameter(torch.zeros(width, device=device, dtype=dtype))

    def forward(self, tokens: Tensor, mask: Tensor | None = None, *, causal: bool = False) -> Tensor:
        """Return the scaled tokens.

        Parameters
        ----------
        tokens : tensor of shape (B, N, D)
        mask : tensor that broadcasts to (B, N, N), optional
            Boolean (True: i sees j) or additive: the mean is over the tokens that token i sees.
        causal : bool
            Without a mask: the mean is over the tokens up to i.
        """
        mean = uniform_average(tokens, tokens.shape[-2], mask, causal)
        return scaled_features(tokens, mean, self.low, self.high)


class LayerTerms(nn.Module):
    """The terms of one block of attention, with the parameters that they learn.

    Parameters
    ----------
    options : TermOptions
    fidelity : float
        λ̃ of this layer; where it is learned, what it starts from; with a matrix fidelity, the start of 1/σ².
    first : bool
        Whether this is the layer whose values are v0: it has no fidelity term.
    causal : bool
        Whether tokens see only those up to themselves.
    heads : int
        Number of heads of the queries.
    width : int
        Number of features of a token, after the output projection.
    owner : LayerTerms, optional
        The terms whose learned λ̃ is this layer's too.
    device, dtype : optional
        Of the parameters.
    """

    raw_fidelity: nn.Parameter | None
    log_variance: nn.Parameter | None
    attn_weight: nn.Parameter | None

    def __init__(
        self,
        options: TermOptions,
        fidelity: float,
        *,
        first: bool,
        causal: bool,
        heads: int,
        width: int,
        owner: LayerTerms | None = None,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        fidelity = check_number("fidelity", fidelity, minimum=0, hint="λ̃ = 0 is the layer without the term")
        if options.learned and fidelity == 0 and not first:
            raise InputError(
                "fidelity: got 0 with learned=True, expected a number > 0 to start from (its logarithm is what is "
                "learned); 0.6 is the usual one"
            )
        self.options = options
        self.first = first
        self.causal = causal
        self.visible: Tensor | None = None  # the mask of this call, from the average to the hook of the projection
        self.start = fidelity
        free: dict[str, Any] = {"device": device, "dtype": dtype}
        matrix = options.matrix_fidelity and not first and fidelity > 0
        # One number each, kept as a logarithm, so that it stays positive.
        logarithm = math.log(fidelity) if fidelity > 0 else 0.0
        learned = bool(options.learned) and not first and not matrix and owner is None
        # In a tuple it is no submodule, and the parameter is stored once.
        self.owner = () if owner is None or first else (owner,)
        self.raw_fidelity = nn.Parameter(torch.tensor(logarithm, **free)) if learned else None
        self.log_variance = nn.Parameter(torch.tensor(-logarithm, **free)) if matrix else None
        self.attn_weight = nn.Parameter(torch.zeros(heads, 1, 1, **free)) if options.attn_scale else None
        self.feat = FeatScale(width, **free) if options.feat_scale else None

    @property
    def fidelity(self) -> float | Tensor:
        """λ̃ of this layer: a number, or a tensor where it is learned; 0 in the first layer."""
        if self.first:
            return 0.0
        if self.owner:
            return self.owner[0].fidelity
        return self.start if self.raw_fidelity is None else self.raw_fidelity.exp()

    @property
    def active(self) -> bool:
        """Whether there is a fidelity term."""
        return not self.first and self.start > 0

    def extra_repr(self) -> str:
        """Return the options, for printing."""
        return f"{self.options.affinity}, fidelity={self.start if not self.first else 0:g}"

    def forward(
        self,
        averages: Tensor,
        values: Tensor,
        new: Tensor,
        first: Tensor | None,
        weights: Tensor | None,
        mask: Tensor | None,
        causal: bool,
    ) -> Tensor:
        """Return the averages of one layer with its terms.

        Parameters
        ----------
        averages : tensor of shape (B, H, M, D)
        values : tensor of shape (B, G, N, D)
            v of all tokens that are averaged, H being a multiple of G.
        new : tensor of shape (B, G, M, D)
            v of the tokens that look.
        first : tensor of shape (B, G, M, D), optional
            v0 of the tokens that look; not needed in the first layer.
        weights : tensor of shape (B, H, M, N), optional
            P; needed for a matrix fidelity alone.
        mask, causal
            As for `nlflow.attention.averages.average`.
        """
        heads = averages.shape[1]
        if self.attn_weight is not None:
            uniform = uniform_average(repeated(values, heads), averages.shape[-2], mask, causal)
            averages = scaled_attention(averages, uniform, self.attn_weight)
        if not self.active or first is None:
            return averages
        if self.log_variance is not None and weights is not None:
            spread = covariance(weights, repeated(values, heads), weights @ repeated(values, heads))
            return matrix_step(averages, repeated(first, heads), spread, self.log_variance.exp())
        return neutreno(
            averages,
            repeated(new, heads),
            repeated(first, heads),
            self.fidelity,
            semi_implicit=self.options.semi_implicit,
            # The averages were computed for this layer alone, and nobody else sees them.
            overwrite=not torch.is_grad_enabled(),
        )


class NeutrenoAttention(nn.Module):
    """Self-attention with the NeuTRENO term, in plain torch.

    Averages that a softmax computes are torch's fused attention, in O(N) memory; the others, and a matrix fidelity,
    form the matrix of weights.

    Parameters
    ----------
    width : int
        Number of features of a token.
    heads : int
        Divides `width`.
    affinity : {'softmax', 'symmetric', 'gaussian', 'sigmoid', 'softplus', 'linear'}
        The kernel of the average; see `nlflow.attention.averages`.
    fidelity : float
        λ̃ >= 0; 0 leaves plain attention.
    learned, semi_implicit, feat_scale, attn_scale, similarity_removal, matrix_fidelity
        As for `nlflow.attention.attach`; the mean that `similarity_removal` takes away is that of the tokens which
        enter this layer, unless it is the first.
    causal : bool
        Whether tokens see only those up to themselves.
    dropout : float
        Rate at which weights are dropped in training.
    bias : bool
        Of the four projections.
    projection : {None, 'sharpening', 'smoothing'}
        `SignedProjection` in the place of values and output projection; needs one head.
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
        removal = self.terms.options.similarity_removal
        if removal and first is not None:
            plain = None if mask is None else seen(mask)[:, 0]  # type: ignore[index]  # a mask gives a mask
            mean = uniform_average(tokens, tokens.shape[-2], plain, self.causal)
            tokens = removed_similarity(tokens, mean, removal)
        query, key, value = (self._split(part(tokens)) for part in (self.query, self.key, self.value))
        if first is not None and first.shape != value.shape:
            raise InputError(
                f"first: got shape {tuple(first.shape)}, expected {tuple(value.shape)}, that of this layer's values; "
                "pass what the first layer returned for the same tokens"
            )
        affinity = self.terms.options.affinity
        options: Any = {"mask": mask, "causal": self.causal, "dropout": self.dropout, "training": self.training}
        weights = None
        if affinity in FUSED and self.terms.log_variance is None:
            averages = fused_average(query, key, value, affinity, **options)
        else:
            averages, weights = average(query, key, value, affinity, **options)
        if self.training and self.dropout and self.terms.log_variance is not None:
            weights = average(query, key, value, affinity, mask=mask, causal=self.causal)[1]
        averages = self.terms(averages, value, value, first, weights, mask, self.causal)
        result = self.output(averages.transpose(1, 2).flatten(-2))
        if self.terms.feat is not None:
            plain = None if mask is None else mask[:, 0]
            result = self.terms.feat(result, plain, causal=self.causal)
        return result, value if first is None else first

    def _split(self, features: Tensor) -> Tensor:
        """Return features (B, N, D) as heads (B, H, N, D/H)."""
        return features.reshape(*features.shape[:-1], self.heads, -1).transpose(1, 2)

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
            count = tokens.shape[1]
            before = torch.ones(count, count, dtype=torch.bool, device=tokens.device).tril()
            mask = mask & before if mask.dtype == torch.bool else mask.masked_fill(~before, torch.finfo(mask.dtype).min)
        return mask
