"""The affinity of groups."""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nlflow._array import Array, constant_like, contiguous, is_numpy, namespace, to_numpy, underflowing
from nlflow.affinities import Affinity
from nlflow.denoising.patches.filters import (
    GroupFilter,
    Groups,
    groups_of,
)
from nlflow.denoising.patches.lattice import Lattice, follow, three
from nlflow.denoising.patches.means import Blocks
from nlflow.domains import Grid

_BLOCK = 2**21  # samples of tokens at a time


def as_planes(u: Array) -> Array:
    return contiguous(namespace(u).moveaxis(u.reshape(*three(tuple(u.shape[:-1])), u.shape[-1]), -1, 0))


def as_signal(planes: Array, shape: tuple[int, ...]) -> Array:
    return namespace(planes).moveaxis(planes, 0, -1).reshape(shape)


@underflowing
class GroupAffinity(Affinity):
    """The affinity of samples that share groups of alike patches.

    k_ij is the sum of 1/n over all pairs of patches of a group, of n members, in which i and j have the same place. So
    J(u) is J of the patches as tokens (`BlockAffinity`), and P replaces each patch by the mean of its group and puts
    the patches back with equal weights. It is symmetric; the degree of a sample is the number of members that cover it.

    Parameters
    ----------
    guide : array or tensor of shape (N, C), (H, W, C) or (Z, H, W, C)
        Signal on which patches are compared.
    lattice : Lattice
    filter : GroupFilter
        Finds the groups.
    moving : bool
        Whether the first axis is time, and the search follows motion.
    blocks : Blocks, optional
        Blocks whose means have groups of their own, which J and P leave out.
    """

    method = "groups"
    reason = "nearest patches in a window, one Wiener filter for each group"

    def __init__(
        self,
        guide: Array,
        lattice: Lattice,
        filter: GroupFilter,
        moving: bool = False,
        blocks: Blocks | None = None,
    ) -> None:
        shape = tuple(guide.shape[:-1])
        super().__init__(Grid(shape), None, symmetric=True, positive_semidefinite=True, dtype=guide.dtype)
        self.guide, self.lattice, self._filter, self._moving = guide, lattice, filter, moving
        self.blocks = blocks

    @cached_property
    def groups(self) -> Groups:
        """The groups, found at the first use. O(G (2 r + 1)^m D) for G groups of patches of D samples."""
        planes = as_planes(self.guide)
        lattice = follow(self.lattice, planes[0]) if self._moving else self.lattice
        return groups_of(self._filter, planes, lattice)

    @cached_property
    def groups_of_means(self) -> Groups:
        """The groups of means over `blocks`."""
        assert self.blocks is not None
        return groups_of(self._filter, self.blocks.mean(as_planes(self.guide)), self.blocks.lattice)

    @property
    def evolves(self) -> bool:
        """Whether the groups can be taken from another signal."""
        return True

    def update(self, u: Array) -> GroupAffinity:
        """Return the affinity of groups found in another signal."""
        guide = u if u.ndim > len(self.domain.shape) else u[..., None]
        return GroupAffinity(guide, self.lattice, self._filter, self._moving, self.blocks)

    @property
    def memory_bytes(self) -> int:
        """Bytes of members and counts."""
        return int(self.groups.members.nbytes + self.groups.counts.nbytes)

    def _put_back(self, values: NDArray[Any] | None) -> NDArray[np.float64]:
        """Return sums over the patches that cover a sample: of 1, or of the means of their groups of some samples."""
        groups, lattice = self.groups.on_host, self.groups.lattice
        total = np.zeros(math.prod(lattice.shape))
        for count in np.unique(groups.counts):
            alike = np.flatnonzero(groups.counts == count)
            block = max(1, _BLOCK // (int(count) * math.prod(lattice.patch)))
            for start in range(0, len(alike), block):
                places = groups.places(alike[start : start + block], int(count))
                means = 1.0 if values is None else values[places].mean(axis=1, keepdims=True)
                weights = np.broadcast_to(means, places.shape)
                total += np.bincount(places.ravel(), weights.ravel(), minlength=len(total))
        return total

    @cached_property
    def _covering(self) -> NDArray[np.float64]:
        """How many patches cover each sample."""
        return self._put_back(None)

    def _average(self, u: Array) -> Array:
        flat = np.asarray(to_numpy(self.flatten(u)), np.float64)
        columns = [self._put_back(flat[:, c]) / self._covering for c in range(flat.shape[1])]
        return _like(np.stack(columns, axis=-1).reshape(u.shape), u)

    def _log_degree(self) -> Array:
        return _like(np.log(self._covering).reshape(self.domain.shape), self.guide)


def _like(values: NDArray[np.float64], like: Array) -> Array:
    return values.astype(like.dtype) if is_numpy(like) else constant_like(values, like)
