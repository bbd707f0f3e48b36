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
    powers : tuple of 9 floats, or none
        As in `nlflow.denoising.patches.filters.Stage`.
    """

    correlation: Tensor | None
    whitening: Tensor | None
    basis: Tensor | None
    powers: tuple[float, ...]

    def to(self, dtype: torch.dtype) -> Matrices:
        """Return the matrices in a precision."""

        def turned(matrix: Tensor | None) -> Tensor | None:
            return None if matrix is None else matrix.to(dtype)

        return Matrices(turned(self.correlation), turned(self.whitening), turned(self.basis), self.powers)


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
        inverse = _shrunk_inverse(covariance / scale, shrink, matrices) / scale
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


def _shrunk_inverse(noisy: Tensor, shrink: float, matrices: Matrices) -> Tensor:
    """Return R^-1/2 h(R^-1/2 C R^-1/2) R^-1/2; see `nlflow.backends.numba.wiener`."""
    whitening, basis = matrices.whitening, matrices.basis
    white = noisy if whitening is None else whitening @ noisy @ whitening
    if basis is None:
        one = torch.eye(white.shape[-1], dtype=white.dtype, device=white.device)
        b: Tensor = _Inverse.apply(white + one)  # type: ignore[no-untyped-call]  # torch's
        s = 2 * b - one
        s2 = s @ s
        s3 = s @ s2
        low, middle, high = (q[0] * one + q[1] * s + q[2] * s2 for q in (matrices.powers[k : k + 3] for k in (0, 3, 6)))
        inverse: Tensor = b @ (low + s3 @ (middle + s3 @ high))
    else:
        values = (basis * (white @ basis)).sum(-2)
        inverse = (basis / ((values - shrink).clamp(min=0) + 1)[..., None, :]) @ basis.mT
    return inverse if whitening is None else whitening @ inverse @ whitening


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
