"""Projections of values whose spectrum is known: whether a layer smooths tokens or sharpens them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from nlflow.attention.terms import wide
from nlflow.errors import check_choice, check_integer

__all__ = ["SignedProjection"]


class SignedProjection(nn.Module):
    """A projection x W whose eigenvalues all have one sign: a layer that sharpens, or one that smooths.

    W = V diag(±ψ²) V^T with V the orthogonal factor of a free matrix Θ. The layer X + A X W has the eigenvalues
    1 + ω_j α_i, α of A and ω of W: for ω > 0 that of α = 1 dominates, and tokens become equal; for
    -2/(1 + α_min) < ω < 0 that of α_min does. Since α_min <= 1, ω in [-1, 0) suffices, and larger ψ² count as 1.

    Parameters
    ----------
    width : int
    kind : {'sharpening', 'smoothing'}
    generator : torch.Generator, optional
        Of the random numbers of the start: Θ standard normal, ψ uniform in [0, 1).
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
        """W, shape (D, D); symmetric. Of parameters in half precision it is computed in float32. O(D³)."""
        basis = torch.linalg.qr(wide(self.theta))[0]
        weight: Tensor = basis * wide(self.eigenvalues) @ basis.T
        return weight.to(self.theta.dtype)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return x W for tokens of shape (..., D)."""
        return tokens @ self.weight
