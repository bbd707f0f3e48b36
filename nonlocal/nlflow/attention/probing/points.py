"""What is measured of the states of a block."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.linalg.blas import dsyrk, ssyrk
from torch import Tensor

from nlflow.attention.terms.neutreno import wide

Floats = NDArray[np.float64]
_LARGE = 128  # rows of a Gram matrix from which computing half of it pays for its calls


@dataclass(frozen=True, eq=False)
class Point:
    """Measures of states."""

    values: dict[str, Floats]  # (n,): t_sim, cosine and rank of the tokens that count
    pooled: Floats  # (n, D): the mean token
    energy: Floats  # (n,): sum of the squared lengths
    count: Floats  # (n,): of tokens

    def spread(self, rows: NDArray[np.int_], items: int) -> Point:
        """Return the point of more inputs, NaN of those that are not `rows`."""
        values = {name: spread_over(each, rows, items) for name, each in self.values.items()}
        return Point(values, *(spread_over(each, rows, items) for each in (self.pooled, self.energy, self.count)))

    def part(self, rows: NDArray[np.bool_] | slice) -> Point:
        values = {name: each[rows] for name, each in self.values.items()}
        return Point(values, self.pooled[rows], self.energy[rows], self.count[rows])


def spread_over(values: Floats, rows: NDArray[np.int_], items: int) -> Floats:
    found = np.full((items, *values.shape[1:]), np.nan)
    found[rows] = values
    return found


def joined(points: Iterable[Point]) -> Point:
    several = list(points)
    values = {name: np.concatenate([one.values[name] for one in several]) for name in several[0].values}
    rest = (np.concatenate([getattr(one, name) for one in several]) for name in ("pooled", "energy", "count"))
    return Point(values, *rest)


def point_of(state: Tensor, tokens: Tensor, *, ranked: bool = True) -> Point:
    """Measure states (B, N, D) over the tokens (B, N) that count; `state` is overwritten where tokens do not count."""
    # What `metrics` has, in single precision and with one look at each state, which takes a fifth of the time.
    given = state.detach()
    if not bool(tokens.all()):
        given.view(-1, given.shape[-1]).index_fill_(0, (~tokens).flatten().nonzero()[:, 0], 0.0)  # may be anything
    x, counted = wide(given), tokens.double()
    lengths = torch.linalg.vector_norm(x, dim=-1).double()
    squares, none = lengths.square(), lengths == 0
    inverse = lengths.reciprocal().masked_fill_(none, 0.0)
    units = (inverse.to(x.dtype)[:, None] @ x).double().squeeze(1)  # the sum of the tokens as units
    count, energy = counted.sum(-1), squares.sum(-1)
    mean = x.sum(1).double() / count[:, None]  # torch adds pairwise
    pairs = count * (count - 1)
    cosine = (units.square().sum(-1) - (~none).sum(-1)) / pairs
    t_sim = count * mean.square().sum(-1) / energy
    rank = torch.full_like(t_sim, torch.nan)
    if ranked and len(rank):
        rank = _rank(x, squares)
    measured = numbers_of(torch.stack([t_sim, cosine, rank]))
    measured[~np.isfinite(measured)] = np.nan
    values = dict(zip(("t_sim", "cosine", "rank"), measured, strict=True))
    return Point(values, numbers_of(mean), numbers_of(energy), numbers_of(count))


def _rank(x: Tensor, squares: Tensor) -> Tensor:
    """Return (tr G)^2 / tr G^2 of the Gram matrix G."""
    unit = squares.amax(-1)
    scale = unit.reciprocal().masked_fill_(unit == 0, 0.0)
    # The trace of a square is the sum of the squares of a symmetric matrix.
    x = x if x.shape[-2] <= x.shape[-1] else x.mT
    if x.device.type == "cpu" and x.shape[-2] > _LARGE:
        lengths = torch.stack([_length_of_gram(one) for one in x])
    else:
        lengths = torch.linalg.vector_norm(x @ x.mT, dim=(-2, -1), dtype=torch.float64)
    ranks: Tensor = (squares.sum(-1) * scale).square() / (lengths * scale).square()
    return ranks


def _length_of_gram(x: Tensor) -> Tensor:
    """Return the root of the sum of the squares of x x^T, of which BLAS computes half."""
    rows = x.is_contiguous()
    syrk = ssyrk if x.dtype == torch.float32 else dsyrk
    half = torch.from_numpy(syrk(1.0, (x.mT if rows else x).numpy(), trans=rows).T)
    above, diagonal = (torch.linalg.vector_norm(one, dtype=torch.float64) for one in (half, half.diagonal()))
    found: Tensor = (2 * above.square() - diagonal.square()).sqrt()
    return found


def numbers_of(values: Tensor) -> Floats:
    return np.asarray(values.cpu().numpy(), dtype=np.float64)
