"""The NeuTRENO term and its like."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from nlflow.attention.terms.averages import AFFINITIES, repeated, uniform_average
from nlflow.attention.threads import OfThread
from nlflow.errors import InputError, check_choice, check_flag, check_integer, check_memory, check_number


def neutreno(
    average: Tensor,
    values: Tensor,
    first: Tensor,
    fidelity: float | Tensor,
    *,
    semi_implicit: bool = False,
    overwrite: bool = False,
) -> Tensor:
    """Return P v + λ̃ (v0 - v), or (P v + λ̃ v0) / (1 + λ̃) (arXiv 2312.00751, equation 28)."""
    if not isinstance(fidelity, Tensor) and fidelity == 0:
        return average
    if semi_implicit:
        share = fidelity / (1 + fidelity)
        return torch.lerp(average, first, share.to(average) if isinstance(share, Tensor) else share)
    if isinstance(fidelity, Tensor):  # one λ̃ for layers on several devices, and wider than half precision
        return torch.addcmul(average, first - values, fidelity.to(average))
    # Both cases compute the same two sums. So a model has the same bits with derivatives and without.
    if overwrite:
        return average.add_(first, alpha=fidelity).sub_(values, alpha=fidelity)
    return average.add(first, alpha=fidelity).sub(values, alpha=fidelity)


class WideParameters(nn.Module):
    """A module whose own parameters stay float32 in a model of half precision, where small steps would round away."""

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Apply what `Module.to`, `half` and the like do, without losing digits; children of other kinds follow."""
        if recurse:
            for child in self.children():
                child._apply(fn)  # type: ignore[no-untyped-call]  # of torch

        def kept(tensor: Tensor) -> Tensor:
            made: Tensor = fn(tensor)
            return made if widest(made.dtype) == made.dtype else tensor.to(made.device, widest(made.dtype))

        return super()._apply(kept, recurse=False)  # type: ignore[no-untyped-call]  # of torch


def widest(dtype: torch.dtype | None) -> torch.dtype:
    dtype = torch.get_default_dtype() if dtype is None else dtype
    return torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype


def scaled_attention(average: Tensor, uniform: Tensor, weight: Tensor) -> Tensor:
    """Return AttnScale, (11^T/n + (1 + ω)(A - 11^T/n)) v, from A v and 11^T v / n (arXiv 2203.05962)."""
    return torch.addcmul(average, average - uniform, weight.to(average))


def removed_similarity(tokens: Tensor, strength: float, mask: Tensor | None = None, *, causal: bool = False) -> Tensor:
    """Return (I - τ 11^T/n) x (arXiv 2312.06182)."""
    return torch.sub(tokens, uniform_average(tokens, tokens.shape[-2], mask, causal), alpha=strength)


def scaled_features(tokens: Tensor, mean: Tensor, low: float | Tensor, high: float | Tensor) -> Tensor:
    return tokens + low * mean + high * (tokens - mean)


class FeatScale(WideParameters):
    """Two learned scales for each feature, (1 + s) m + (1 + t)(x - m), from s = t = 0 on, with the mean m over tokens.

    Parameters
    ----------
    width : int
        Number of features.
    device, dtype : optional
        Of the parameters `low` (s) and `high` (t).

    References
    ----------
    .. [1] P. Wang, W. Zheng, T. Chen, Z. Wang, "Anti-oversmoothing in deep vision transformers via the Fourier domain
       analysis", ICLR 2022, arXiv 2203.05962.
    """

    def __init__(self, width: int, *, device: Any = None, dtype: Any = None) -> None:
        super().__init__()
        width = check_integer("width", width, minimum=1)
        self.low = nn.Parameter(torch.zeros(width, device=device, dtype=widest(dtype)))
        self.high = nn.Parameter(torch.zeros(width, device=device, dtype=widest(dtype)))

    def forward(self, tokens: Tensor, mask: Tensor | None = None, *, causal: bool = False) -> Tensor:
        """Return the tokens (B, N, D) scaled, with the mean over the tokens that each sees.

        `mask` broadcasts to (B, N, N), boolean (True: i sees j) or additive; `causal` holds without one.
        """
        mean = uniform_average(tokens, tokens.shape[-2], mask, causal)
        return scaled_features(tokens, mean, self.low.to(tokens), self.high.to(tokens))


@dataclass(frozen=True)
class TermOptions:
    """Arguments of `attach`."""

    affinity: str = "softmax"
    learned: bool | str = False
    semi_implicit: bool = False
    feat_scale: bool = False
    attn_scale: bool = False
    matrix_fidelity: bool = False

    def __post_init__(self) -> None:
        check_choice("affinity", self.affinity, AFFINITIES)
        if not isinstance(self.learned, bool) and self.learned != "shared":
            raise InputError(f"learned: got {self.learned!r}, expected True, False or 'shared'")
        if self.learned == "shared" and self.matrix_fidelity:
            raise InputError(
                "learned: got 'shared' with matrix_fidelity=True, expected False: each layer learns its own σ²"
            )
        for name in ("semi_implicit", "feat_scale", "attn_scale", "matrix_fidelity"):
            check_flag(name, getattr(self, name))


class LayerTerms(WideParameters):
    """The terms of one layer, with their parameters.

    `fidelity` is λ̃, or where learning it starts (with a matrix fidelity the start of 1/σ²); `width` is that of the
    output projection; the learned λ̃ of `owner` is this layer's too.
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
                "fidelity: got 0 with learned=True, expected a number > 0 to start from (its logarithm is learned); "
                "0.6 is the usual one"
            )
        self.options, self.start, self.first, self.causal = options, fidelity, first, causal
        self.label, self.repeated = "", False  # its module's name; whether that is called several times in one call
        self.visible = OfThread()  # the mask of this call, from the average to `scale_features`
        free: dict[str, Any] = {"device": device, "dtype": widest(dtype)}
        matrix = options.matrix_fidelity and not first and fidelity > 0
        # One number each, kept as a logarithm, so that it stays positive.
        logarithm = math.log(fidelity) if fidelity > 0 else 0.0
        learned = bool(options.learned) and not first and not matrix and owner is None
        # In a tuple it is no submodule, and the parameter is stored once.
        self.owner = () if owner is None or first else (owner,)
        self.raw_fidelity = nn.Parameter(torch.full((), logarithm, **free)) if learned else None
        self.log_variance = nn.Parameter(torch.full((), -logarithm, **free)) if matrix else None
        self.attn_weight = nn.Parameter(torch.zeros(heads, 1, 1, **free)) if options.attn_scale else None
        self.feat = FeatScale(width, **free) if options.feat_scale else None

    @property
    def fidelity(self) -> float | Tensor:
        """λ̃, a tensor where it is learned; 0 in the first layer."""
        if self.first:
            return 0.0
        if self.owner:
            return self.owner[0].fidelity
        return self.start if self.raw_fidelity is None else self.raw_fidelity.exp()

    @property
    def active(self) -> bool:
        return not self.first and self.start > 0

    def extra_repr(self) -> str:
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
        """Return the averages (B, H, M, D) with the terms added.

        `values` (B, G, N, D) are v of all tokens that are averaged, `new` and `first`, both (B, G, M, D), v and v0 of
        the tokens that look, `weights` P (B, H, M, N), which a matrix fidelity alone needs.
        """
        heads = averages.shape[1]
        if self.attn_weight is not None:
            uniform = uniform_average(repeated(values, heads), averages.shape[-2], mask, causal)
            averages = scaled_attention(averages, uniform, self.attn_weight)
        if not self.active or first is None:
            return averages
        first = repeated(first, heads)
        if self.log_variance is not None and weights is not None:
            return local_wiener(weights, repeated(values, heads), averages, first, self.log_variance.exp())
        # These averages were computed for this layer alone. Without derivatives they can be overwritten.
        overwrite = not torch.is_grad_enabled()
        implicit = self.options.semi_implicit
        return neutreno(
            averages, repeated(new, heads), first, self.fidelity, semi_implicit=implicit, overwrite=overwrite
        )

    def scale_features(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        scaled: Tensor = self.feat(output, self.visible.take(), causal=self.causal)  # type: ignore[misc]  # a hook where it is there
        return scaled


# ---- the matrix fidelity: the local Wiener filter of what a token sees
#
# C_i = sum_j P_ij v_j v_j^T - (P v)_i (P v)_i^T has D^2 numbers for each token, and costs O(M N D^2) to form. What the
# step needs is (C_i + s^2 I)^{-1} r_i. Conjugate gradients find it from products C_i x_i, which for all tokens at once
# are two products of matrices, ((X V^T) * P) V: O(M N D) for an iteration. The noise s^2 bounds the condition, so a
# handful of them do.

_SMALL = 8  # features of a head up to which covariances cost less than iterations
_MOST = 48  # iterations, after which covariances cost less
_TOLERANCE = {4: 1e-6, 8: 1e-13}
"""By the bytes of a number: the residual of a linear system over its right-hand side, a few roundings."""


def covariance(weights: Tensor, values: Tensor, average: Tensor) -> Tensor:
    """Return the local covariances C_i = sum_j P_ij v_j v_j^T - (P v)_i (P v)_i^T, (..., M, D, D)."""
    *lead, tokens, width = values.shape
    numbers = 2 * width * width * (tokens + average.shape[-2]) * math.prod(lead)
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
    """Return P v + C (C + σ² I)^{-1} (v0 - P v), the local Wiener filter, in O(M D^3), solved at least in float32."""
    with torch.autocast(spread.device.type, enabled=False):
        spread, mean = wide(spread), wide(average)
        noise = wide(variance) * torch.eye(spread.shape[-1], dtype=spread.dtype, device=spread.device)
        solved: Tensor = torch.linalg.solve(spread + noise, (wide(first) - mean)[..., None])
        return (mean + (spread @ solved)[..., 0]).to(average.dtype)


def wide(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.element_size() < 4 else tensor


def local_wiener(weights: Tensor, values: Tensor, average: Tensor, first: Tensor, variance: Tensor) -> Tensor:
    """Return the step of `matrix_step` from P (..., M, N), v (..., N, D), P v and v0 (..., M, D), and σ² > 0.

    Conjugate gradients take O(M N D) an iteration. Covariances are formed where these fail, and for few features.
    """
    if values.shape[-1] > _SMALL:
        found = _by_iterations(weights, values, average, first, variance)
        if found is not None:
            return found
    return matrix_step(average, first, covariance(weights, values, weights @ values), variance)


def _by_iterations(weights: Tensor, values: Tensor, average: Tensor, first: Tensor, variance: Tensor) -> Tensor | None:
    half = values.element_size() < 4
    with torch.autocast(values.device.type, enabled=False):
        weights, values, noise, start = wide(weights), wide(values), wide(variance), wide(first)
        if half:
            weights = weights / weights.sum(-1, keepdim=True)
        # A covariance does not change when all values move; near their middle less cancels.
        values = values - values.mean(-2, keepdim=True).detach()
        system = _System(weights, values, noise)
        right = start - wide(average)
        with torch.no_grad():
            solution = system.frozen().solved(right.detach())
        if solution is None:
            return None
        if torch.is_grad_enabled() and any(t.requires_grad for t in (weights, values, noise, right)):
            # The residual is 0 but its derivatives are not: with it the solution has those of (C + σ²)^{-1} r.
            solution = _Solution.apply(right - system(solution), solution, system.frozen())  # type: ignore[no-untyped-call]
        return (start - noise * solution).to(average.dtype)


class _System:
    """x -> (C_i + σ² I) x_i for all tokens."""

    def __init__(self, weights: Tensor, values: Tensor, noise: Tensor, mean: Tensor | None = None) -> None:
        self.weights, self.values, self.noise = weights, values, noise
        self.mean = weights @ values if mean is None else mean

    def frozen(self) -> _System:
        return _System(self.weights.detach(), self.values.detach(), self.noise.detach(), self.mean.detach())

    def __call__(self, x: Tensor) -> Tensor:
        products = (x @ self.values.mT) * self.weights
        along = (x * self.mean).sum(-1, keepdim=True)
        result: Tensor = products @ self.values - along * self.mean + self.noise * x
        return result

    def solved(self, right: Tensor) -> Tensor | None:
        """Return the solution by conjugate gradients, one system for each token; None where it is not good enough."""
        tiny = torch.finfo(right.dtype).tiny
        goal = _TOLERANCE[right.element_size()] ** 2 * right.square().sum(-1, keepdim=True)
        x, residual = torch.zeros_like(right), right
        direction, size = right, right.square().sum(-1, keepdim=True)
        for _ in range(_MOST):
            image = self(direction)
            step = size / (direction * image).sum(-1, keepdim=True).clamp_min(tiny)
            x = torch.addcmul(x, step, direction)
            residual = torch.addcmul(residual, step, image, value=-1)
            before, size = size, residual.square().sum(-1, keepdim=True)
            if bool((size <= goal).all()):
                return x
            direction = torch.addcmul(residual, size / before.clamp_min(tiny), direction)
        return None


class _Solution(torch.autograd.Function):
    """A solution that was found, as a function of its right-hand side: the derivative solves the same system."""

    @staticmethod
    def forward(ctx: Any, right: Tensor, solution: Tensor, system: _System) -> Tensor:
        ctx.system = system
        return solution.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        system: _System = ctx.system
        found = system.solved(gradient)
        if found is None:
            spread = covariance(system.weights, system.values, system.mean)
            noise = system.noise * torch.eye(spread.shape[-1], dtype=spread.dtype, device=spread.device)
            found = torch.linalg.solve(spread + noise, gradient[..., None])[..., 0]
        return found, None, None
