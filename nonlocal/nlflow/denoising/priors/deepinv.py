"""Adapter for deepinv."""

from __future__ import annotations

from typing import Any

import numpy as np

from nlflow.denoising.priors import denoisers
from nlflow.denoising.priors.denoisers import base
from nlflow.errors import InputError

Base: Any = base("deepinv.models", "Denoiser", "pip install deepinv")


class Denoiser(Base):
    """`nlflow.denoise` as a denoiser of deepinv.

    Parameters
    ----------
    quality : {'fast', 'balanced', 'best', 'pixels'}
    **options
        As `nlflow.denoise` takes them, but ``channel_axis``.

    Notes
    -----
    Off the CPU, and where a gradient is required, `nlflow.denoise` gets tensors, for which it refuses more: see there.

    Examples
    --------
    >>> from nlflow.denoising.priors.deepinv import Denoiser  # doctest: +SKIP
    >>> prior = deepinv.optim.PnP(denoiser=Denoiser("balanced"))  # doctest: +SKIP
    """

    def __init__(self, quality: str = "balanced", **options: Any) -> None:
        super().__init__(device="cpu")
        if "channel_axis" in options:
            raise InputError("channel_axis: deepinv's tensors are (B, C, H, W), leave it out; separate=True denoises "
                             "channels each by itself")  # fmt: skip
        self.denoiser = denoisers.Denoiser(quality, **options)

    def forward(self, x: Any, sigma: Any) -> Any:
        """Return the denoised batch: ``denoise(item, sigma, channel_axis=0)`` of each item.

        Parameters
        ----------
        x : torch.Tensor of shape (B, C, H, W), or (B, C, D, H, W) for volumes
        sigma : float or torch.Tensor of shape (B,)
            Standard deviation of the noise, in the units of `x`; an item with 0 comes back as it is.
        """
        import torch

        if not isinstance(x, torch.Tensor):
            raise InputError(f"x: got {type(x).__name__}, expected a torch tensor of shape (B, C, H, W)")
        if x.ndim not in (4, 5):
            raise InputError(f"x: got shape {tuple(x.shape)}, expected (B, C, H, W), or (B, C, D, H, W)")
        levels = self._handle_sigma(sigma, batch_size=len(x), dtype=torch.float64).tolist()
        if x.device.type != "cpu" or (x.requires_grad and torch.is_grad_enabled()):
            return torch.stack([self.denoiser(*item, channel_axis=0) for item in zip(x, levels, strict=True)])
        items = zip(x.detach().numpy(), levels, strict=True)
        results = [self.denoiser(item, level, channel_axis=0) for item, level in items]
        return torch.from_numpy(np.stack(results)).to(x.dtype)
