"""What is added to a layer's average against over-smoothing: pure functions of tensors.

Tensors of tokens have shape (..., N, D); averages, values and first values are alike in shape.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nlflow.errors import check_memory

__all__ = [
    "covariance",
    "matrix_step",
    "neutreno",
    "removed_similarity",
    "scaled_attention",
    "scaled_features",
    "wide",
]


def neutreno(
    average: Tensor,
    values: Tensor,
    first: Tensor,
    fidelity: float | Tensor,
    *,
    semi_implicit: bool = False,
    overwrite: bool = False,
) -> Tensor:
    """Return the NeuTRENO step from the average.

    Parameters
    ----------
    average : tensor
        P v.
    values : tensor
        v of this layer.
    first : tensor
        v0, the values of the first layer, with their graph.
    fidelity : float or tensor
        λ̃ >= 0; 0 as a float returns the average itself.
    semi_implicit : bool
        (P v + λ̃ v0) / (1 + λ̃), which is stable for every λ̃, in place of P v + λ̃ (v0 - v), which is for symmetric
        affinities up to 1 + μ_min(P).
    overwrite : bool
        Write the result into `average`: half the time, and no memory. Not where derivatives are wanted.

    Returns
    -------
    tensor

    References
    ----------
    .. [1] T. Nguyen, T. M. Nguyen, R. Baraniuk, "Mitigating over-smoothing in transformers via regularized nonlocal
       functionals", NeurIPS 2023, arXiv 2312.00751, equation 28; the semi-implicit form is the step of the same flow
       that takes its own end point in the place of v.
    """
    if not isinstance(fidelity, Tensor) and fidelity == 0:
        return average
    if semi_implicit:
        return torch.lerp(average, first, fidelity / (1 + fidelity))
    if isinstance(fidelity, Tensor):
        return torch.addcmul(average, first - values, fidelity)
    # The same two sums in both cases, so that a model has the same bits with derivatives and without.
    if overwrite:
        return average.add_(first, alpha=fidelity).sub_(values, alpha=fidelity)
    return average.add(first, alpha=fidelity).sub(values, alpha=fidelity)


def scaled_attention(average: Tensor, uniform: Tensor, weight: Tensor) -> Tensor:
    """Return AttnScale, (11^T/n + (1 + ω)(A - 11^T/n)) v, from A v and 11^T v / n.

    Parameters
    ----------
    average, uniform : tensor
    weight : tensor
        ω, one for each head.

    References
    ----------
    .. [1] P. Wang, W. Zheng, T. Chen, Z. Wang, "Anti-oversmoothing in deep vision transformers via the Fourier domain
       analysis", ICLR 2022, arXiv 2203.05962.
    """
    return torch.addcmul(average, average - uniform, weight)


def scaled_features(tokens: Tensor, mean: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Return FeatScale, (1 + s) DC(x) + (1 + t)(x - DC(x)), DC being the mean over tokens.

    Parameters
    ----------
    tokens, mean : tensor
    low, high : tensor of shape (D,)
        s and t.

    References
    ----------
    .. [1] P. Wang et al., ICLR 2022, arXiv 2203.05962.
    """
    return tokens + low * mean + high * (tokens - mean)


def removed_similarity(tokens: Tensor, mean: Tensor, strength: float) -> Tensor:
    """Return (I - τ 11^T/n) x.

    The share t of |x|^2 that lies in the mean becomes (1 - τ)^2 t / ((1 - τ)^2 t + 1 - t).

    References
    ----------
    .. [1] Y. Yu, Y. Zhang, "Why 'classic' transformers are shallow and how to make them go deep", arXiv 2312.06182.
    """
    return torch.sub(tokens, mean, alpha=strength)


def covariance(weights: Tensor, values: Tensor, average: Tensor) -> Tensor:
    """Return the local covariances C_i = sum_j P_ij v_j v_j^T - (P v)_i (P v)_i^T.

    Parameters
    ----------
    weights : tensor of shape (..., M, N)
        P.
    values : tensor of shape (..., N, D)
    average : tensor of shape (..., M, D)
        P v. Of half precision it is formed anew, since what is left of the difference would be the rounding of P v and
        of rows of P, which do not add up to 1 then.

    Returns
    -------
    tensor of shape (..., M, D, D)
        Of half precision in float32. O(M N D^2) operations.

    Raises
    ------
    MemoryLimitError
        Before the N products of D × D numbers would pass the limit.
    """
    *lead, tokens, width = values.shape
    numbers = 2 * width * width * (tokens + average.shape[-2])
    for size in lead:
        numbers *= size
    remedy = "use shorter or fewer sequences, or a fidelity that is one number"
    check_memory("matrix_fidelity: the covariances of values", numbers * max(4, values.element_size()), remedy)
    half = values.element_size() < 4
    with torch.autocast(values.device.type, enabled=False):
        weights, values, average = wide(weights), wide(values), wide(average)
        if half:
            weights = weights / weights.sum(-1, keepdim=True)
            average = weights @ values
        products = (values[..., :, None] * values[..., None, :]).flatten(-2)
        second = (weights @ products).reshape(*average.shape, width)
        local: Tensor = second - average[..., :, None] * average[..., None, :]
    return local


def matrix_step(average: Tensor, first: Tensor, spread: Tensor, variance: Tensor) -> Tensor:
    """Return P v + C (C + σ² I)^{-1} (v0 - P v): the semi-implicit step with the matrix fidelity Λ̃ = C/σ².

    Parameters
    ----------
    average, first : tensor of shape (..., M, D)
    spread : tensor of shape (..., M, D, D)
        C, the covariances of `covariance`.
    variance : tensor
        σ² > 0, one number.

    Notes
    -----
    The local Wiener filter: the average where the tokens that are averaged agree, fidelity along the directions in
    which they differ. Experimental. O(M D^3). Half precision is solved in float32, torch having no other way, and the
    result is rounded to the type of `average`.
    """
    with torch.autocast(spread.device.type, enabled=False):
        spread, mean = wide(spread), wide(average)
        noise = wide(variance) * torch.eye(spread.shape[-1], dtype=spread.dtype, device=spread.device)
        solved: Tensor = torch.linalg.solve(spread + noise, (wide(first) - mean)[..., None])
        return (mean + (spread @ solved)[..., 0]).to(average.dtype)


def wide(tensor: Tensor) -> Tensor:
    """Return a tensor in float32 if it is in half precision, and as it is otherwise."""
    return tensor.float() if tensor.element_size() < 4 else tensor
