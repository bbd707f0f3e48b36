"""Figures of a tensor, brought to the host in one copy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nlflow._array import Floats, to_numpy
from nlflow.denoising.frame import Spread
from nlflow.denoising.given import SOME, TELL_MISSING, as_given, candidates, least_count
from nlflow.denoising.layout import Axes
from nlflow.errors import check_array


@dataclass(frozen=True)
class Looked:
    """Figures of items (B, ..., C) on the host.

    Attributes
    ----------
    means, variances, low, high : array of shape (B, C)
        In double precision.
    missing : bool
        Whether some samples are NaN.
    some : list of array
        Samples of each item, evenly spaced; empty if not asked for.
    """

    means: Floats
    variances: Floats
    low: Floats
    high: Floats
    missing: bool
    some: list[NDArray[Any]]

    @classmethod
    def at(cls, items: Tensor, some: bool = False) -> Looked:
        given, inner = items.detach(), tuple(range(1, items.ndim - 1))
        wide = given.double()
        ends = wide.amin(inner), wide.amax(inner)
        parts = [torch.stack((wide.mean(inner), wide.var(inner, correction=0), *ends)).flatten()]
        parts.append(given.isinf().any().double()[None])
        if some:
            flat = given.flatten(1)
            parts.append(flat[:, :: max(flat.shape[1] // SOME, 1)].double().flatten())
        told = to_numpy(torch.cat(parts))
        shape = (4, len(items), items.shape[-1])
        size = int(np.prod(shape))
        means, variances, low, high = told[:size].reshape(shape)
        if told[size]:
            check_array("image", given.nan_to_num(0.0, torch.inf, -torch.inf), missing=TELL_MISSING)
        samples = told[size + 1 :].astype(str(items.dtype).removeprefix("torch."))
        shown = list(samples.reshape(len(items), -1)) if some else []
        return cls(means, variances, low, high, bool(np.isnan(means).any()), shown)

    def says_nothing(self, items: Tensor) -> bool:
        return any(
            _says_nothing(item, some, low.min(), high.max())
            for item, some, low, high in zip(items, self.some, self.low, self.high, strict=True)
        )

    def span(self, number: int) -> float:
        return float(self.high[number].max() - self.low[number].min())

    def spread(self, number: int, own: Any, item: Tensor, offset: Floats, level: Floats) -> Spread:
        low, high = ((ends[number][own] - offset) / level for ends in (self.low, self.high))
        variance = float(np.mean(self.variances[number][own] / level**2))

        def moments() -> Floats:
            flat = item.flatten(0, -2)
            if len(level) == 1:
                return np.array([[variance * len(flat)]])
            chosen = flat if isinstance(own, slice) else flat[:, torch.from_numpy(np.flatnonzero(own)).to(flat.device)]
            place = torch.from_numpy(np.stack((offset, level))).to(flat.device)
            f = (chosen.double() - place[0]) / place[1]
            return to_numpy(f.T @ f)

        return Spread(float(high.max() - low.min()), variance, len(level), np.dtype(np.float64), moments)


def _says_nothing(item: Tensor, some: NDArray[Any], low: Any, high: Any) -> bool:
    kind = some.dtype.type
    if item.shape[-1] not in (2, 4):
        found = candidates(some, kind(low), kind(high))
        # The least of many samples of noise lies apart, but alone.
        counts = [(item == float(value)).all(dim=-1).sum() for value in found]
        if not counts or not any(n >= least_count(v) for n, v in zip(torch.stack(counts).tolist(), found, strict=True)):
            return False
    axes = Axes(tuple(item.shape), "ZYX"[-(item.ndim - 1) :], (1.0,) * (item.ndim - 1), item.ndim - 1)
    looked = as_given(to_numpy(item), axes)
    return looked.missing is not None or looked.opacity is not None
