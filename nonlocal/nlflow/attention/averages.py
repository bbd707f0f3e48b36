"""Row averages of attention: sum_j k(q_i, k_j) v_j / sum_j k(q_i, k_j) for several affinities k, on tensors.

With l_ij = scaling q_i . k_j (plus a mask, -inf where i must not see j):

========= ============================== ====================================================================
affinity  k                              source
========= ============================== ====================================================================
softmax   exp(l)                         arXiv 1706.03762
symmetric exp(l) with q_i = k_i          NeuTRENO, Theorem 1, arXiv 2312.00751
gaussian  exp(-scaling |q - k|^2 / 2)    kernel attention, ibid., Table 8, where the dot product is replaced
sigmoid   1 / (1 + exp(-l))              arXiv 2409.04431, which does not divide by the row sum (it subtracts log N
                                         from l instead); here rows are normalised, as an average demands
softplus  log(1 + exp(l))                normalised by the row sum, no further re-weighting
linear    phi(q) . phi(k), phi = elu + 1 arXiv 2006.16236, normalised there as well; q and k are not scaled
========= ============================== ====================================================================

Every row is a softmax of log k, which is formed without overflow for logits of any size. The cost is O(N^2 d) for all
of them, `linear` included: masks of any shape are worth more here than its O(N d^2).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from nlflow.errors import InputError

__all__ = [
    "AFFINITIES",
    "FUSED",
    "as_wide",
    "average",
    "causal_mask",
    "fused_average",
    "log_affinity",
    "repeated",
    "seen",
    "uniform_average",
    "with_squares",
]

AFFINITIES = ("softmax", "symmetric", "gaussian", "sigmoid", "softplus", "linear")

FUSED = ("softmax", "symmetric", "gaussian")
"""Those that a softmax over dot products computes, and so any implementation of it: fused ones too."""

_FAR = 12.0  # below -12, log log(1 + e^l) is l - e^l / 2 to within e^(2l), 4e-11


def repeated(heads: Tensor, count: int) -> Tensor:
    """Return keys or values (B, H, N, d) for `count` heads of queries, each of theirs serving count / H of those."""
    groups = count // heads.shape[1]
    return heads if groups == 1 else heads.repeat_interleave(groups, dim=1)


def with_squares(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """Return queries and keys with one more coordinate, whose dot product is q . k - |k|^2 / 2.

    A softmax over it is the Gaussian average, since |q|^2 is the same in a whole row.
    """
    ones = torch.ones_like(query[..., :1])
    return torch.cat([query, ones], dim=-1), torch.cat([key, key.square().sum(-1, keepdim=True) / -2], dim=-1)


def as_wide(value: Tensor) -> Tensor:
    """Return values with one more coordinate, as queries and keys have it then: fused kernels want equal widths."""
    return functional.pad(value, (0, 1))


def log_affinity(query: Tensor, key: Tensor, affinity: str, scaling: float) -> Tensor:
    """Return log k(q_i, k_j) up to a constant in each row.

    Parameters
    ----------
    query : tensor of shape (..., M, d)
    key : tensor of shape (..., N, d)
    affinity : str
        One of `AFFINITIES`; for ``'symmetric'`` the queries are to be keys.
    scaling : float

    Returns
    -------
    tensor of shape (..., M, N)
    """
    if affinity == "linear":
        product = (functional.elu(query) + 1) @ (functional.elu(key) + 1).transpose(-1, -2)
        return product.clamp_min(torch.finfo(product.dtype).tiny).log()
    if affinity == "gaussian":
        query, key = with_squares(query, key)
    logits = query @ key.transpose(-1, -2) * scaling
    if affinity == "sigmoid":
        return functional.logsigmoid(logits)
    if affinity == "softplus":
        # log log(1 + e^l) would be log 0 where e^l is lost; there it is l - e^l / 2 + ...
        near = functional.softplus(logits.clamp_min(-_FAR)).log()
        return torch.where(logits > -_FAR, near, logits - logits.clamp_max(-_FAR).exp() / 2)
    if affinity in ("softmax", "symmetric", "gaussian"):
        return logits
    raise InputError(f"affinity: got {affinity!r}, expected one of {', '.join(map(repr, AFFINITIES))}")


def average(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    affinity: str = "softmax",
    *,
    scaling: float | None = None,
    mask: Tensor | None = None,
    causal: bool = False,
    dropout: float = 0.0,
    training: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the averages of the values, and the weights.

    Parameters
    ----------
    query : tensor of shape (B, H, M, d)
        With ``'symmetric'`` it is not looked at, but for M: the last M keys are the queries.
    key, value : tensors of shape (B, G, N, d) and (B, G, N, D)
        H is a multiple of G.
    affinity : str
        One of `AFFINITIES`.
    scaling : float, optional
        Of the logits, by default 1/sqrt(d).
    mask : tensor that broadcasts to (B, H, M, N), optional
        Boolean (True: i sees j) or added to the logarithms.
    causal : bool
        Without a mask: token i sees those up to itself, the last of the M being the last of the N.
    dropout : float
        Rate at which weights are dropped, when `training`.

    Returns
    -------
    averages : tensor of shape (B, H, M, D)
    weights : tensor of shape (B, H, M, N)
        Rows add up to 1 (before dropout).
    """
    heads, count = query.shape[1], query.shape[-2]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    key, value = repeated(key, heads), repeated(value, heads)
    logarithms = log_affinity(key[..., -count:, :] if affinity == "symmetric" else query, key, affinity, scale)
    if mask is None and causal and count > 1:
        mask = causal_mask(count, key.shape[-2], key.device)
    if mask is not None and mask.dtype == torch.bool:
        logarithms = logarithms.masked_fill(~mask, torch.finfo(logarithms.dtype).min)
    elif mask is not None:
        logarithms = logarithms + mask
    weights = functional.dropout(logarithms.softmax(-1), p=dropout, training=training)
    return weights @ value, weights


def fused_average(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    affinity: str = "softmax",
    *,
    mask: Tensor | None = None,
    causal: bool = False,
    dropout: float = 0.0,
    training: bool = False,
) -> Tensor:
    """Return the averages of `average` by torch's fused attention, without the matrix of weights.

    Parameters as for `average`, for the same tokens as queries and keys; the affinity is one of `FUSED`.
    """
    scale = query.shape[-1] ** -0.5
    if affinity == "symmetric":
        query = key
    width = value.shape[-1]
    if affinity == "gaussian":
        query, key = with_squares(query, key)
        value = as_wide(value)
    if mask is not None and mask.dtype == torch.bool:
        # Finite, as in `average`: rows of padding may see nothing.
        lowest = torch.finfo(query.dtype).min
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, lowest)
    averages = functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, dropout_p=dropout if training else 0.0,
        is_causal=causal and mask is None, scale=scale,
    )  # fmt: skip
    return averages[..., :width]


def causal_mask(queries: int, keys: int, device: torch.device) -> Tensor:
    """Return a boolean (queries, keys): whether token i, one of the last, sees token j."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)


def seen(mask: Tensor | None) -> Tensor | None:
    """Return a mask as a boolean one, True where i sees j."""
    if mask is None or mask.dtype == torch.bool:
        return mask
    return mask > torch.finfo(mask.dtype).min / 2


def uniform_average(values: Tensor, count: int, mask: Tensor | None = None, causal: bool = False) -> Tensor:
    """Return the mean of the tokens that each token sees: the action of 11^T/n, or of the prefix mean.

    Parameters
    ----------
    values : tensor of shape (..., N, D)
    count : int
        The last of how many tokens look.
    mask : tensor that broadcasts to (..., M, N), optional
        As for `average`.
    causal : bool
        Without a mask: token i sees those up to itself.

    Returns
    -------
    tensor of shape (..., M, D), or (..., 1, D) where all tokens see the same
        Zero for tokens that see nothing.
    """
    tokens = values.shape[-2]
    if mask is not None:
        visible = seen(mask)
        weights = visible.to(values.dtype)  # type: ignore[union-attr]  # a mask gives a mask
        return weights @ values / weights.sum(-1, keepdim=True).clamp_min(1)
    if not causal or count == 1:
        return values.mean(-2, keepdim=True)
    sums = values.cumsum(-2)[..., tokens - count :, :]
    return sums / torch.arange(tokens - count + 1, tokens + 1, device=values.device, dtype=values.dtype)[:, None]
