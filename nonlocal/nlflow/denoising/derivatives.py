"""Derivatives for groups held still."""

from __future__ import annotations

import warnings
from typing import Any

from nlflow.errors import not_installed

try:
    import torch
    from torch import Tensor
    from torch.autograd import forward_ad
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise not_installed(__name__, "torch", "torch") from error

from nlflow._array import is_tensor
from nlflow.denoising.layout import Axes
from nlflow.denoising.looked import Looked
from nlflow.denoising.noise.risk import perturbation
from nlflow.denoising.options import Options
from nlflow.denoising.patches.tensors import FrozenFilter
from nlflow.denoising.tensors import Items, Noisy, beside, checked_image
from nlflow.errors import InputError, check_integer, check_seed

__all__ = ["Linearization", "linearized"]


class Linearization:
    """The Jacobian J of the denoiser at a tensor, without a matrix; `linearized` makes it.

    Groups, principal channels and sigma are constants, those at the tensor. Covariances and weights follow the tensor,
    so that J is not symmetric.

    Attributes
    ----------
    image, estimate : tensor
        The tensor, and the result of `nlflow.denoise` for it.
    """

    def __init__(self, image: Tensor, task: Items, max_memory: float | None = None) -> None:
        self.image, self._task, self._limit = image, task, max_memory
        self._filters = [FrozenFilter() for _ in task.flows]
        with torch.no_grad():
            self.estimate = self._run(image)

    def _run(self, image: Tensor) -> Tensor:
        for one in self._filters:
            one.begin()
        return self._task.differentiable(image, self._filters, self._limit)

    def __call__(self, image: Tensor) -> Tensor:
        """Return the estimate for another tensor with the groups of this one; it has derivatives."""
        return self._run(self._checked("image", image))

    def jvp(self, direction: Tensor) -> Tensor:
        """Return J v, the derivative of the estimate in a direction, with a few times the work of a run of the flow."""
        direction = self._checked("direction", direction)
        with torch.no_grad(), forward_ad.dual_level():
            with warnings.catch_warnings():  # torch compiles rules of its own in a way that it calls deprecated
                warnings.simplefilter("ignore", DeprecationWarning)
                dual: Any = forward_ad.make_dual(self.image, direction)  # type: ignore[no-untyped-call]  # torch's
            pair: Any = forward_ad.unpack_dual(self._run(dual))  # type: ignore[no-untyped-call]
        tangent: Tensor = pair.tangent
        return tangent

    def vjp(self, cotangent: Tensor) -> Tensor:
        """Return J^T w, with a few times the work of a run; the images of all steps are kept."""
        with torch.enable_grad():
            image = self.image.detach().requires_grad_()
            (gradient,) = torch.autograd.grad(self._run(image), image, self._checked("cotangent", cotangent))
        return gradient

    def divergence(self, probes: int = 1, *, seed: int = 0) -> float:
        """Return an unbiased estimate of the trace of J, sum_i du_i / df_i, by random signs.

        It is not the divergence in Stein's estimate, for which groups move.

        Parameters
        ----------
        probes : int
            Number of random signals; each costs one `jvp` (Hutchinson 1990, doi 10.1080/03610919008812866).
        seed : int
            Seed of the signs.
        """
        probes, total = check_integer("probes", probes, minimum=1), 0.0
        signs = perturbation((probes, *self.image.shape), rng=check_seed("seed", seed))
        for one in torch.from_numpy(signs).to(self.image):
            total += float((one * self.jvp(one)).sum(dtype=torch.float64))
        return total / probes

    def _checked(self, name: str, value: Any) -> Tensor:
        """Return a tensor that is like the image."""
        like = self.image
        if not is_tensor(value) or (value.shape, value.dtype, value.device) != (like.shape, like.dtype, like.device):
            got = f"{tuple(value.shape)}, {value.dtype}, {value.device}" if is_tensor(value) else type(value).__name__
            raise InputError(
                f"{name}: got {got}, expected a tensor of {tuple(like.shape)}, {like.dtype}, {like.device}"
            )
        tensor: Tensor = value
        return tensor

    def __repr__(self) -> str:
        return f"<Linearization of the denoiser at a tensor of shape {tuple(self.image.shape)}>"


def linearized(
    image: Any,
    sigma: Any,
    *,
    quality: str = "balanced",
    channel_axis: int | None = None,
    axes: str | None = None,
    spacing: Any = None,
    keep: Any = None,
    options: Options | None = None,
    **more: Any,
) -> Linearization:
    """Return the derivative of `nlflow.denoise` at a tensor, for groups held still.

    Parameters
    ----------
    image : tensor
        float32 or float64; float16 becomes float32.
    sigma : float, sequence or tensor
        Standard deviation of white noise, a constant, as in `nlflow.denoise`.
    quality, channel_axis, axes, spacing, keep, options, **more
        As in `nlflow.denoise` for tensors; of the options, `strength` and `max_memory` count.

    Returns
    -------
    Linearization

    Raises
    ------
    InputError
        As in `nlflow.denoise` for tensors; for NaN, and for an item that is constant or has no noise.
    MemoryLimitError
        When a run does not fit the memory as a whole.

    Examples
    --------
    >>> import torch
    >>> from nlflow.denoising.derivatives import linearized
    >>> generator = torch.Generator().manual_seed(0)
    >>> noisy = torch.linspace(0, 30, 24).expand(24, 24) + torch.randn(24, 24, generator=generator)
    >>> map = linearized(noisy, 1.0)
    >>> bool(0 < map.divergence() < noisy.numel() / 2)
    True
    """
    if not is_tensor(image):
        raise InputError(f"image: got {type(image).__name__}, expected a torch tensor; use torch.as_tensor")
    image = checked_image(image).detach()
    for name, value in (("sigma", sigma), ("keep", keep)):
        beside(name, value, image)
    if sigma is None:
        raise InputError("sigma: got None, expected the strength of white noise, a constant; see estimate_sigma")
    placed = Axes.of(image.shape, channel_axis, axes, spacing, batches=True)
    placed.check_count()
    chosen = Options.of(options, more)
    chosen.refuse(("separate", "stopping", "device"), "a linear map")
    chosen.check(quality, len(placed.letters))
    looked = Looked.at(placed.items(image))
    if looked.missing:
        raise InputError("image: got NaN, which counts as missing samples, expected numbers; fill them in first")
    task = Items.of(image, Noisy(sigma), placed, quality, chosen, keep, looked)
    task.check_moves()
    return Linearization(image, task, chosen.max_memory)
