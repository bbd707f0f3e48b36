"""The local Wiener step on groups of patches as one batch of small matrices; it has first derivatives.

`nlflow.backends.numba.wiener` computes the same for one group.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Matrices:
    """Matrices of a patch of D samples, the same for all groups.

    Attributes
    ----------
    correlation, whitening : (C, 1, D, D) or None
        R and R^-1/2 of the noise of each plane; none for noise that is not correlated.
    basis : (D, D) or None
        Orthonormal columns that stand in for the eigenvectors of covariances that are shrunk.
    """

    correlation: Tensor | None
    whitening: Tensor | None
    basis: Tensor | None

    def to(self, dtype: torch.dtype) -> Matrices:
        """Return the matrices in a precision."""
        return Matrices(*(None if m is None else m.to(dtype) for m in (self.correlation, self.whitening, self.basis)))


def wiener(
    tokens: Tensor, covariance: Tensor, noise: Tensor, count: Tensor, shrink: float, matrices: Matrices
) -> tuple[Tensor, Tensor]:
    """Filter the tokens of groups, all in one precision.

    Parameters
    ----------
    tokens : (C, g, n, D)
        z - m.
    covariance : (C, g, D, D)
        C, of the pilot.
    noise : (C, g, D)
        The diagonal of N.
    count : (g, 1) or (1, 1)
        Members of each group.
    shrink : float
        Multiple of the noise that is taken from the eigenvalues of C.
    matrices : Matrices

    Returns
    -------
    change : (C, g, n, D)
        N (C + N)^-1 (z - m).
    weight : (C, g, D)
        Inverse variance of each sample of the estimate.
    """
    root = noise.sqrt()
    scale = root[..., None] * root[..., None, :]
    correlation = matrices.correlation
    full = None if correlation is None else correlation * scale
    if shrink > 0:
        inverse = _clipped_inverse(covariance / scale, shrink, matrices) / scale
    else:
        inverse = _Inverse.apply(covariance + (torch.diag_embed(noise) if full is None else full))  # type: ignore[no-untyped-call]  # torch's
    share = 1 / count
    if full is None or correlation is None:
        filtered = inverse * noise[..., None, :]
        kept, of_mean = (1 - torch.diagonal(filtered, dim1=-2, dim2=-1)).clamp(min=0), share
    else:
        filtered = inverse @ full
        variances = torch.diagonal(correlation, dim1=-2, dim2=-1)
        kept = (variances - (full * filtered.mT).sum(-1) / noise).clamp(min=0)
        of_mean = share * variances
    # That of the filter, and that of the mean.
    return tokens @ filtered, 1 / (noise * (kept * (1 - share) + of_mean))


def across_members(tokens: Tensor, source: Tensor, noise: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """Return what the step across the members removes (C, g, n, D), and the variances of its estimate.

    `tokens` and `source` are about their means, and 0 where there is no member; see
    `nlflow.denoising.patches.filters.GroupFilter`.
    """
    ridge = (noise.sum(-1, keepdim=True) * (count / noise.shape[-1]).clamp(min=1))[..., None]
    between = source @ source.mT
    inverse = _Inverse.apply(between + ridge * torch.eye(between.shape[-1], dtype=ridge.dtype, device=ridge.device))  # type: ignore[no-untyped-call]  # torch's
    filtered, share = ridge * inverse, 1 / count
    kept = (1 - torch.diagonal(filtered, dim1=-2, dim2=-1)).clamp(min=0) * (1 - share) + share
    return filtered @ tokens, noise[..., None, :] * kept[..., None]


def _clipped_inverse(noisy: Tensor, shrink: float, matrices: Matrices) -> Tensor:
    """Return (C' + R)^-1, where R^-1/2 C' R^-1/2 has the eigenvalues of R^-1/2 C R^-1/2 less `shrink`, 0 at least."""
    whitening, basis = matrices.whitening, matrices.basis
    white = noisy if whitening is None else whitening @ noisy @ whitening
    if basis is None:
        inverse = _Clipped.apply(white, shrink)  # type: ignore[no-untyped-call]  # torch's apply is untyped
    else:
        values = (basis * (white @ basis)).sum(-2)
        inverse = (basis / ((values - shrink).clamp(min=0) + 1)[..., None, :]) @ basis.mT
    return inverse if whitening is None else whitening @ inverse @ whitening  # type: ignore[no-any-return]


class _Inverse(torch.autograd.Function):
    """The inverse of symmetric positive definite matrices by Cholesky's factors, without asking whether these exist.

    torch 2.13 has a wrong forward derivative of `torch.cholesky_inverse`.
    """

    @staticmethod
    def forward(ctx: Any, matrix: Tensor) -> Tensor:
        inverse = torch.cholesky_inverse(torch.linalg.cholesky_ex(matrix).L)
        ctx.save_for_backward(inverse)
        ctx.save_for_forward(inverse)
        return inverse

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        inverse: Tensor = ctx.saved_tensors[0]
        return -inverse @ ((gradient + gradient.mT) / 2) @ inverse

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        inverse: Tensor = ctx.saved_tensors[0]
        return -inverse @ tangent @ inverse


class _Clipped(torch.autograd.Function):
    """The function 1 / (max(x - shrink, 0) + 1) of symmetric matrices.

    Its derivative is that of Daleckii and Krein, V (F o (V^T E V)) V^T, with the divided differences F of the function.
    They are formed without a difference of values that are alike, so that eigenvalues may be equal.
    """

    @staticmethod
    def forward(ctx: Any, matrix: Tensor, shrink: float) -> Tensor:
        values, vectors = torch.linalg.eigh(matrix)
        above = values - shrink
        gain = 1 / (above.clamp(min=0) + 1)
        ctx.save_for_backward(above, vectors, gain)
        ctx.save_for_forward(above, vectors, gain)
        inverse: Tensor = (vectors * gain[..., None, :]) @ vectors.mT
        return inverse

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _daleckii_krein((gradient + gradient.mT) / 2, *ctx.saved_tensors), None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, shrink: None) -> Tensor:
        del shrink
        return _daleckii_krein(tangent, *ctx.saved_tensors)


def _daleckii_krein(direction: Tensor, above: Tensor, vectors: Tensor, gain: Tensor) -> Tensor:
    """Return the derivative of 1 / (max(x, 0) + 1) in the direction of a symmetric matrix, a symmetric map."""
    high, low = (pick(above[..., :, None], above[..., None, :]) for pick in (torch.maximum, torch.minimum))
    # Slopes between two eigenvalues of max(x, 0): 1, 0, or what of the way between them lies above 0.
    mixed = high / torch.where(high > low, high - low, 1)
    slope = torch.where(low > 0, 1, torch.where(high > 0, mixed, 0))
    inner: Tensor = vectors.mT @ direction @ vectors
    return -vectors @ (inner * slope * gain[..., :, None] * gain[..., None, :]) @ vectors.mT
