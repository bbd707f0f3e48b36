"""Patches as tokens, and back."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nlflow._array import underflowing
from nlflow.affinities import BlockAffinity
from nlflow.denoising.patches.lattice import nearest_offsets, reference_positions
from nlflow.domains.samples import as_signal
from nlflow.errors import (
    InputError,
    check_array,
    check_detached,
    check_floats,
    check_integer,
    check_memory,
    check_number,
    warn_caller,
)

Integers = NDArray[np.intp]
_BLOCK = 2**22  # samples of tokens that are put back at once
_BLOCK_BYTES = 2**27  # of what is compared at once


@underflowing
class PatchGroups:
    """Groups of alike patches of a signal, an image or a volume.

    Patches of reference lie on a grid; a group has the n patches of a search window that are nearest to one, itself
    first. The members are the nodes of a `BlockAffinity`, the patches a signal on it. With Lambda = C / sigma^2, C the
    covariance of the group and P the mean over it, a `SemiImplicit` step of length 1 in the degree metric is the
    nonlocal Bayes filter Pu + C (C + sigma^2 I)^-1 (f - Pu) (Lebrun, Buades and Morel 2013, doi 10.1137/120874989).
    O(G (2 r + 1)^m D) time for G groups of patches of D samples along m axes.

    Parameters
    ----------
    image : array_like
        The guide, on which patches are compared: a signal, an image or a volume.
    patch_size : int
        Side of a patch, in samples.
    search_radius : int
        r, the largest offset of a member from its reference along each axis, in samples.
    members : int
        n, the number of patches in a group.
    step : int
        Distance between patches of reference along each axis, at most `patch_size`.
    channel_axis : int, optional
        Of the guide, and of all images that are lifted.
    memory_limit : float, optional
        Bytes of all tokens, or of all covariances; half of the physical memory by default.

    Attributes
    ----------
    positions : array of shape (G, n, m)
        First sample of each patch along the m axes of space.
    distances : array of shape (G, n)
        Squared Euclidean distances of the patches to that of reference.
    patch_shape : tuple of int
        Sides of a patch, and channels; the product is D.

    Raises
    ------
    InputError
        For an image that is smaller than a patch, NaN or infinite values, and parameters out of range.
    MemoryLimitError
        When the tokens do not fit the limit.

    Warns
    -----
    NlflowWarning
        When a search window has fewer than `members` patches, so that all groups get fewer.

    Examples
    --------
    One step of E on groups, with covariances from the noisy image:

    >>> import numpy as np
    >>> from nlflow import E, GradientFlow, PatchGroups, SemiImplicit, solve
    >>> sigma, rng = 0.1, np.random.default_rng(0)
    >>> clean = np.add.outer(np.arange(24) > 11, np.sin(np.arange(24) / 4))
    >>> noisy = clean + sigma * rng.standard_normal(clean.shape)
    >>> groups = PatchGroups(noisy, patch_size=4, search_radius=6, members=30, step=2)
    >>> tokens = groups.lift(noisy)
    >>> fidelity = groups.covariance(noisy, noise_variance=1.4 * sigma**2)[:, None] / sigma**2
    >>> energy = E(groups.affinity(), tokens, fidelity, measure="degree")
    >>> stage = solve(GradientFlow(energy, metric="degree"), tokens, t=1, integrator=SemiImplicit())
    >>> [round(value) for value in stage.energy.tolist()]
    [2410, 1948]
    >>> bool(np.allclose(stage.final, energy.minimizer().u))
    True
    >>> estimate = groups.aggregate(stage.final)
    >>> [round(float(np.std(result - clean)), 2) for result in (noisy, estimate)]
    [0.1, 0.05]
    """

    def __init__(
        self,
        image: Any,
        *,
        patch_size: int = 8,
        search_radius: int = 12,
        members: int = 64,
        step: int = 3,
        channel_axis: int | None = None,
        memory_limit: float | None = None,
    ) -> None:
        guide, self._restore = as_signal(image, channel_axis)
        self.channel_axis = channel_axis
        self.patch_size = check_integer("patch_size", patch_size, minimum=1)
        self.search_radius = check_integer("search_radius", search_radius, minimum=1)
        self.step = check_integer("step", step, minimum=1)
        members = check_integer("members", members, minimum=1)
        check_detached("memory_limit", memory_limit)
        self._limit = memory_limit
        self._space = guide.shape[:-1]
        if self.step > self.patch_size:
            raise InputError(
                f"step: got {self.step}, expected at most patch_size ({self.patch_size}), so that patches cover all"
            )
        last = tuple(n - self.patch_size for n in self._space)
        if min(last) < 0:
            raise InputError(
                f"image: got {' x '.join(map(str, self._space))} samples, expected at least patch_size "
                f"({self.patch_size}) along each axis; use a smaller patch_size"
            )
        lines = [reference_positions(end, self.step) for end in last]
        references = np.stack([axis.ravel() for axis in np.meshgrid(*lines, indexing="ij")], axis=1)
        fewest = fewest_candidates(references, last, self.search_radius)
        if members > fewest:
            warn_caller(
                f"members: {members} patches do not lie within search_radius={self.search_radius} of every patch; "
                f"groups have {fewest}",
            )
        self.patch_shape = (self.patch_size,) * len(self._space) + guide.shape[-1:]
        self._check_tokens(len(references), min(members, fewest), guide.shape[-1])
        self.positions, self.distances = nearest_patches(
            guide, self.patch_size, self.search_radius, references, min(members, fewest)
        )

    @property
    def shape(self) -> tuple[int, int, int]:
        """(G, n, D), the shape of the tokens of an image with the channels of the guide."""
        groups, members = self.distances.shape
        return groups, members, math.prod(self.patch_shape)

    def affinity(self) -> BlockAffinity:
        """Return the affinity of the groups: 1/n within a group, so that P is the mean over its members."""
        groups, members, _ = self.shape
        return BlockAffinity(groups, members)

    def lift(self, image: Any) -> NDArray[Any]:
        """Return the patches of an image as tokens.

        Parameters
        ----------
        image : array_like
            Of the shape of the guide, with any number of channels.

        Returns
        -------
        array of shape (G, n, D)
            Patches in C order with the channels last: D = patch_size^m C.

        Raises
        ------
        InputError
            For another shape, NaN or infinite values.
        MemoryLimitError
            When the tokens do not fit the limit.
        """
        signal, _ = as_signal(image, self.channel_axis)
        if signal.shape[:-1] != self._space:
            raise InputError(
                f"image: got {signal.shape[:-1]} samples, expected {self._space}, those of the image that the groups "
                "were found on"
            )
        groups, members, _ = self.shape
        self._check_tokens(groups, members, signal.shape[-1])
        axes = tuple(range(len(self._space)))
        patches = np.lib.stride_tricks.sliding_window_view(signal, (self.patch_size,) * len(axes), axis=axes)
        # The window's axes come last, behind the channels.
        tokens = patches[tuple(np.moveaxis(self.positions, -1, 0))]
        return np.asarray(np.moveaxis(tokens, 2, -1).reshape(groups, members, -1))

    def aggregate(self, tokens: Any, weights: Any = None) -> NDArray[Any]:
        """Put tokens back where they came from: at each sample the weighted mean of the tokens that cover it.

        Parameters
        ----------
        tokens : array of shape (G, n, D)
        weights : array, optional
            >= 0, of shape (G, n) for tokens or (G, n, D) for their components; axes of length 1 are broadcast. Equal
            by default.

        Returns
        -------
        array
            Shaped as the guide, in the precision of the tokens; sums are in float64.

        Raises
        ------
        InputError
            For a wrong shape, NaN or infinite values, negative weights, and samples that no token with a weight covers.
        """
        values = check_array("tokens", tokens, ndim=3)
        groups, members, _ = self.shape
        cells = self.patch_size ** len(self._space)
        channels = values.shape[2] // cells
        if values.shape != (groups, members, cells * channels) or channels == 0:
            raise InputError(f"tokens: got shape {values.shape}, expected {self.shape} (D a multiple of {cells})")
        if self.channel_axis is None and channels > 1:
            raise InputError(f"tokens: got {channels} channels, expected 1, since channel_axis is None")
        given = self._check_weights(weights, values.shape)
        count = math.prod(self._space)
        strides = np.array([math.prod(self._space[axis + 1 :]) for axis in range(len(self._space))])
        first = self.positions @ strides
        within = np.array(list(itertools.product(range(self.patch_size), repeat=len(self._space)))) @ strides
        sums, masses = np.zeros((2, channels, count))
        block = max(1, _BLOCK // (members * cells))
        for start in range(0, groups, block):
            part = slice(start, start + block)
            places = (first[part, :, None] + within).ravel()
            shape = (-1, members, cells, channels)
            numbers = values[part].astype(np.float64).reshape(shape)
            own = np.broadcast_to(given[part], values[part].shape).reshape(shape)
            for channel in range(channels):
                weight = own[..., channel].ravel()
                sums[channel] += np.bincount(places, weight * numbers[..., channel].ravel(), minlength=count)
                masses[channel] += np.bincount(places, weight, minlength=count)
        bare = int((masses == 0).sum())
        if bare:
            raise InputError(f"weights: got 0 for every token at {bare} sample(s), expected one > 0 at each")
        result = (sums / masses).T.reshape(*self._space, channels).astype(values.dtype)
        return np.ascontiguousarray(self._restore(result))

    def covariance(self, image: Any, *, noise_variance: float = 0.0) -> NDArray[Any]:
        """Return the covariance of the members of each group, C = P(u u^T) - Pu Pu^T.

        Parameters
        ----------
        image : array_like
            Of the shape of the guide.
        noise_variance : float
            Subtracted from the eigenvalues, which are then at least 0: that of the noise in the image, or a little
            more; 0 for a clean image.

        Returns
        -------
        array of shape (G, D, D)
            Symmetric positive semidefinite; as a fidelity of E, ``covariance(...)[:, None] / sigma**2``.

        Raises
        ------
        InputError
            As `lift`, and for a negative variance.
        MemoryLimitError
            When they do not fit the limit.
        """
        removed = check_number("noise_variance", noise_variance, minimum=0)
        tokens = self.lift(image)
        groups, members, size = tokens.shape
        check_memory(
            f"the covariances of {groups} groups of tokens of {size}", 8 * groups * size**2 * (4 if removed else 2),
            "use smaller patches, a larger step, or raise memory_limit", self._limit,
        )  # fmt: skip
        centred = tokens.astype(np.float64)
        centred -= centred.mean(axis=1, keepdims=True)
        result = np.swapaxes(centred, 1, 2) @ centred / members
        if removed:
            values, vectors = np.linalg.eigh(result)
            result = (vectors * np.maximum(values - removed, 0)[:, None]) @ np.swapaxes(vectors, 1, 2)
        return np.asarray((result + np.swapaxes(result, 1, 2)) / 2).astype(tokens.dtype)

    def __repr__(self) -> str:
        groups, members, size = self.shape
        return f"<PatchGroups {groups} groups of {members} patches of {size} samples, step={self.step}>"

    def _check_tokens(self, groups: int, members: int, channels: int) -> None:
        size = self.patch_size ** len(self._space) * channels
        check_memory(
            f"the tokens of {groups} groups of {members} patches of {size} samples",
            8 * groups * members * (size + 4),
            "use a part of the image, a larger step or fewer members, or raise memory_limit",
            self._limit,
        )

    def _check_weights(self, weights: Any, tokens: tuple[int, ...]) -> NDArray[np.float64]:
        """Return weights as an array of three axes that is broadcastable to tokens of a shape."""
        if weights is None:
            return np.ones((tokens[0], 1, 1))
        given = check_floats("weights", weights, ndim=(2, 3))
        full = given[..., None] if given.ndim == 2 else given
        if any(n not in (1, own) for n, own in zip(full.shape, tokens, strict=True)):
            raise InputError(f"weights: got shape {given.shape}, expected {tokens[:2]} or {tokens}")
        if full.min() < 0:
            raise InputError(f"weights: got {full.min():g}, expected every weight >= 0")
        return np.broadcast_to(full, (tokens[0], *full.shape[1:]))


def fewest_candidates(references: Integers, last: tuple[int, ...], radius: int) -> int:
    ends = np.array(last)
    sides = np.minimum(references, radius) + np.minimum(ends - references, radius) + 1
    return int(sides.prod(axis=1).min())


def nearest_patches(
    guide: NDArray[Any], patch_size: int, radius: int, references: Integers, members: int
) -> tuple[Integers, NDArray[np.float64]]:
    """Return positions (G, n, m) and squared Euclidean distances (G, n) of the patches nearest to those of reference.

    A patch of reference comes first. Ties, within the rounding of the guide, go to the least offset, and then to the
    first in C order. `references` has shape (G, m), the guide (..., C).
    """
    axes = references.shape[1]
    side = (patch_size,) * axes
    patches = np.lib.stride_tricks.sliding_window_view(guide.astype(np.float64), side, axis=tuple(range(axes)))
    last = np.array(patches.shape[:axes]) - 1
    offsets, order = nearest_offsets((radius,) * axes)
    offsets = offsets[order]
    positions = np.empty((len(references), members, axes), np.intp)
    distances = np.empty((len(references), members))
    length = math.prod(patches.shape[axes:])
    block = max(1, _BLOCK_BYTES // (8 * (3 * length + 2 * len(offsets))))
    for start in range(0, len(references), block):
        own = references[start : start + block]
        centres = patches[tuple(own.T)]
        found = np.full((len(own), len(offsets)), np.inf)
        for column, offset in enumerate(offsets):
            places = own + offset
            inside = np.all((places >= 0) & (places <= last), axis=1)
            difference = (patches[tuple(places[inside].T)] - centres[inside]).reshape(-1, length)
            found[inside, column] = np.einsum("gd,gd->g", difference, difference)
        found[:, 0] = -1  # the patch itself comes before others that equal it
        largest = np.abs(centres).reshape(len(own), -1).max(axis=1)
        nearest = _chosen(found, members, largest, length, float(np.finfo(guide.dtype).eps))
        positions[start : start + block] = own[:, None] + offsets[nearest]
        distances[start : start + block] = np.maximum(np.take_along_axis(found, nearest, axis=1), 0)
    return positions, distances


def _chosen(found: NDArray[Any], members: int, largest: NDArray[Any], length: int, rounding: float) -> NDArray[np.intp]:
    """Return the columns of the least distances in each row, by distance; of those that are tied the first columns.

    `nlflow.backends.numba.groups` derives which are: those that rounding may have put on the wrong side of the last
    one taken.
    """
    limit = np.maximum(np.partition(found, members - 1, axis=1)[:, members - 1], 0)
    root = np.sqrt(limit)
    slack = (rounding * ((length + 3) * limit + 4 * (largest + root) * math.sqrt(length) * root))[:, None]
    below = found < limit[:, None] - slack
    tied = ~below & (found <= limit[:, None] + slack)
    below[:, 0], tied[:, 0] = True, False
    taken = below | (tied & (np.cumsum(tied, axis=1) <= members - below.sum(axis=1, keepdims=True)))
    return np.argsort(np.where(taken, found, np.inf), axis=1, kind="stable")[:, :members]
