"""The term with a matrix fidelity: the local Wiener filter of what a token sees, without forming covariances.

C_i = sum_j P_ij v_j v_j^T - (P v)_i (P v)_i^T has D^2 numbers for each token, and costs O(M N D^2) to form. What the
step needs is (C_i + s^2 I)^{-1} r_i. Conjugate gradients find it from products C_i x_i, which for all tokens at once
are two products of matrices, ((X V^T) * P) V: O(M N D) for an iteration. The noise s^2 bounds the condition, so a
handful of them do.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from nlflow.errors import check_memory

_SMALL = 8  # features of a head up to which covariances cost less than iterations
_MOST = 48  # iterations, after which covariances cost less
_TOLERANCE = {4: 1e-6, 8: 1e-13}
"""By the bytes of a number: the residual of a linear system over its right-hand side, a few roundings."""


def covariance(weights: Tensor, values: Tensor, average: Tensor) -> Tensor:
    """Return the local covariances C_i = sum_j P_ij v_j v_j^T - (P v)_i (P v)_i^T, shape (..., M, D, D).

    From P (..., M, N), v (..., N, D) and P v (..., M, D), in O(M N D^2) operations. `MemoryLimitError` is raised before
    the N products of D × D numbers would pass the limit. Half precision gives float32, and P v is computed again:
    otherwise the difference would be mostly the rounding of P v and of the rows of P, whose sums are not exactly 1.
    """
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
    """Return P v + C (C + σ² I)^{-1} (v0 - P v): the semi-implicit step with the matrix fidelity Λ̃ = C/σ².

    This is the local Wiener filter: the average where the averaged tokens agree, fidelity along the directions in which
    they differ. Experimental. O(M D^3). `spread` is C, from `covariance`; `variance` is σ² > 0, one number. Half
    precision is solved in float32, since torch has no solver for it. The result has the type of `average`.
    """
    with torch.autocast(spread.device.type, enabled=False):
        spread, mean = wide(spread), wide(average)
        noise = wide(variance) * torch.eye(spread.shape[-1], dtype=spread.dtype, device=spread.device)
        solved: Tensor = torch.linalg.solve(spread + noise, (wide(first) - mean)[..., None])
        return (mean + (spread @ solved)[..., 0]).to(average.dtype)


def wide(tensor: Tensor) -> Tensor:
    """Return a tensor in float32 if it is in half precision, and as it is otherwise."""
    return tensor.float() if tensor.element_size() < 4 else tensor


def local_wiener(weights: Tensor, values: Tensor, average: Tensor, first: Tensor, variance: Tensor) -> Tensor:
    """Return P v + C (C + σ² I)^{-1} (v0 - P v) from P (..., M, N), v (..., N, D), P v and v0 (..., M, D), and σ² > 0.

    The same as `matrix_step` of `covariance`, to the tolerance of its iterations (1e-6 of v0 - P v in float32, 1e-13 in
    float64), in O(M N D) time each and O(M N) memory. They depend on the spread of the values over σ²; where they do
    not get there, and for few features, covariances are formed. It has first derivatives.
    """
    if values.shape[-1] > _SMALL:
        found = _by_iterations(weights, values, average, first, variance)
        if found is not None:
            return found
    return matrix_step(average, first, covariance(weights, values, weights @ values), variance)


def _by_iterations(weights: Tensor, values: Tensor, average: Tensor, first: Tensor, variance: Tensor) -> Tensor | None:
    """Return the step by conjugate gradients, None where they do not converge."""
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
        """Return the same without its graph."""
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
