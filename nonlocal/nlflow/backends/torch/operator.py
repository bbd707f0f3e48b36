"""Sums with a kernel on tensors, with first derivatives."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

_TILE = 2**24  # numbers


class _Applied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, operator: Any, x: Tensor, y: Tensor, weights: Tensor) -> Tensor:
        ctx.operator = operator
        ctx.save_for_backward(weights)
        return torch.from_numpy(operator @ weights.detach().numpy())

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> Any:
        (weights,) = ctx.saved_tensors
        values = slopes[0].detach().contiguous().numpy()
        if not any(ctx.needs_input_grad[1:3]):
            return None, None, None, torch.from_numpy(ctx.operator.T @ values)
        found = ctx.operator.gradients(weights.detach().numpy(), values)
        return None, *(torch.from_numpy(one) for one in (found.x, found.y, found.weights))


def applied(operator: Any, x: Tensor, y: Tensor, weights: Tensor) -> Tensor:
    """Return sum_j k(x_i, y_j) w_j, with first derivatives with respect to x, y and w."""
    if x.device.type == "cpu":
        found: Tensor = _Applied.apply(operator, x, y, weights)  # type: ignore[no-untyped-call]
        return found
    kernel = operator.kernel
    queries, keys = kernel.map_features(y, x)
    step = max(1, _TILE // len(y))

    def tile(rows: Tensor, keys: Tensor, weights: Tensor) -> Tensor:
        return torch.exp(kernel.compared.log_matrix(rows, keys)) @ weights

    parts = [
        checkpoint(tile, queries[start : start + step], keys, weights, use_reentrant=False)
        for start in range(0, len(x), step)
    ]
    result: Tensor = kernel.amplitude * torch.cat(parts)
    return result
