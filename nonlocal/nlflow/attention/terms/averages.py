"""Row averages sum_j k(q_i, k_j) v_j / sum_j k(q_i, k_j), with l = scaling q . k, in O(N^2 d).

========= ============================== ====================================================================
affinity  k                              source
========= ============================== ====================================================================
softmax   exp(l)                         arXiv 1706.03762
symmetric exp(l) with q_i = k_i          NeuTRENO, Theorem 1, arXiv 2312.00751
gaussian  exp(-scaling |q - k|^2 / 2)    kernel attention, ibid., Table 8, where the dot product is replaced
sigmoid   1 / (1 + exp(-l))              arXiv 2409.04431, where rows are not divided by their sum, as here
softplus  log(1 + exp(l))                normalized by the row sum, no further re-weighting
linear    phi(q) . phi(k), phi = elu + 1 arXiv 2006.16236; q and k are not scaled
========= ============================== ====================================================================
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from nlflow.errors import InputError

AFFINITIES = ("softmax", "symmetric", "gaussian", "sigmoid", "softplus", "linear")

FUSED = ("softmax", "symmetric", "gaussian")
"""A softmax over dot products computes these. So fused attention can compute them too."""

_HIDES = -745.0  # where exp is 0 in float64; models hide by -inf, by the least number or by -1e4

_FAR = 12.0  # below -12, log log(1 + e^l) is l - e^l / 2 to within e^(2l), 4e-11


def repeated(heads: Tensor, count: int) -> Tensor:
    groups = count // heads.shape[1]
    return heads if groups == 1 else heads.repeat_interleave(groups, dim=1)


def with_squares(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    ones = torch.ones_like(query[..., :1])
    return torch.cat([query, ones], dim=-1), torch.cat([key, key.square().sum(-1, keepdim=True) / -2], dim=-1)


def _features(x: Tensor) -> Tensor:
    """Return elu(x) + 1, which is e^x below 0, where the sum would lose it."""
    return torch.where(x > 0, x + 1, x.clamp_max(0.0).exp())


def log_affinity(query: Tensor, key: Tensor, affinity: str, scaling: float) -> Tensor:
    """Return log k(q_i, k_j), (..., M, N), up to a constant in each row; ``'symmetric'`` needs keys as queries."""
    if affinity == "linear":
        product = _features(query) @ _features(key).transpose(-1, -2)
        return product.clamp_min(torch.finfo(product.dtype).tiny).log()
    if affinity == "gaussian":
        query, key = with_squares(query, key)
    logits = query @ key.transpose(-1, -2) * scaling
    if affinity in FUSED:
        return logits
    if affinity == "sigmoid":
        return functional.logsigmoid(logits)
    if affinity == "softplus":
        # log log(1 + e^l) would be log 0 where e^l is lost; there it is l - e^l / 2 + ...
        near = functional.softplus(logits.clamp_min(-_FAR)).log()
        return torch.where(logits > -_FAR, near, logits - logits.clamp_max(-_FAR).exp() / 2)
    raise InputError(f"affinity: got {affinity!r}, expected one of {', '.join(map(repr, AFFINITIES))}")


def capped(logits: Tensor, softcap: float | None) -> Tensor:
    return logits if softcap is None else torch.tanh(logits / softcap) * softcap


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
    fused: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Return the averages of the values (B, H, M, D), and the weights (B, H, M, N) where they are formed.

    Parameters
    ----------
    query, key, value : tensors of shape (B, H, M, d), (B, G, N, d) and (B, G, N, D)
        H is a multiple of G; ``'symmetric'`` takes the last M keys in the place of queries.
    affinity : str
        One of `AFFINITIES`.
    scaling : float, optional
        Of the logits, by default 1/sqrt(d).
    mask : tensor that broadcasts to (B, H, M, N), optional
        Boolean (True: i sees j) or added to the logarithms.
    causal : bool
        Without a mask: a token sees the tokens up to itself, and the last of the M is the last of the N.
    dropout : float
        Rate at which weights are dropped.
    fused : bool
        Use torch's fused attention, which returns no weights, for affinities of `FUSED` and M = N.
    """
    heads, count = query.shape[1], query.shape[-2]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    key, value = repeated(key, heads), repeated(value, heads)
    if affinity == "symmetric":
        query = key[..., -count:, :]
    if fused:
        width = value.shape[-1]
        if affinity == "gaussian":
            query, key = with_squares(query, key)
            value = functional.pad(value, (0, 1))  # fused kernels expect equal widths
        if mask is not None and mask.dtype == torch.bool:  # finite, as below: rows of padding may see nothing
            mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, torch.finfo(query.dtype).min)
        averages = functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, dropout_p=dropout, is_causal=causal and mask is None, scale=scale
        )
        return averages[..., :width], None
    logarithms = log_affinity(query, key, affinity, scale)
    if mask is None and causal and count > 1:
        mask = causal_mask(count, key.shape[-2], key.device)
    if mask is not None and mask.dtype == torch.bool:
        logarithms = logarithms.masked_fill(~mask, torch.finfo(logarithms.dtype).min)
    elif mask is not None:
        logarithms = logarithms + mask
    weights = functional.dropout(logarithms.softmax(-1), p=dropout)
    return weights @ value, weights


def causal_mask(queries: int, keys: int, device: torch.device) -> Tensor:
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)


def seen(mask: Tensor) -> Tensor:
    return mask if mask.dtype == torch.bool else mask > _HIDES


def uniform_average(values: Tensor, count: int, mask: Tensor | None = None, causal: bool = False) -> Tensor:
    """Return the mean of the tokens (..., N, D) that each of the last `count` tokens sees, zero where it sees none.

    The shape is (..., count, D), or (..., 1, D) where all tokens see the same.
    """
    tokens = values.shape[-2]
    if mask is not None:
        sees = seen(mask)
        weights = sees.to(values.dtype)
        values = values.masked_fill(~sees.any(-2)[..., None], 0)  # padding may be NaN
        return weights @ values / weights.sum(-1, keepdim=True).clamp_min(1)
    if not causal or count == 1:
        return values.mean(-2, keepdim=True)
    sums = values.cumsum(-2)[..., tokens - count :, :]
    return sums / torch.arange(tokens - count + 1, tokens + 1, device=values.device, dtype=values.dtype)[:, None]
