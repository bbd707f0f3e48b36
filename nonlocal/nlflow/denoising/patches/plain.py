"""The step on groups by `E`, `GradientFlow` and `SemiImplicit`, to be read and tested against."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nlflow.affinities import BlockAffinity
from nlflow.denoising.patches.filters import CompiledFilter, Correlation, Groups, Images, Stage, cosines
from nlflow.errors import InputError
from nlflow.flows.gradient import GradientFlow
from nlflow.flows.integrators import SemiImplicit
from nlflow.functionals.energies import E

Array = NDArray[Any]
_BLOCK = 2**21  # samples of tokens at a time
_LEAST = 1e-3  # of the noise counts as left in the state, at least


class PlainFilter(CompiledFilter):
    """The step by `E`, `GradientFlow` and `SemiImplicit` on the tokens of each group, in float64.

    It finds the groups of `CompiledFilter`. A subclass may have another `fidelity`.

    Examples
    --------
    A fidelity that is 0 in directions whose variance is at most twice that of the noise:

    >>> import numpy as np
    >>> from nlflow import solve
    >>> from nlflow.denoising.patches import GroupFlow, Grouping, PlainFilter, RelaxedSemiImplicit
    >>> class Thresholded(PlainFilter):
    ...     def fidelity(self, covariance):
    ...         values, vectors = np.linalg.eigh(covariance)
    ...         return (vectors * np.where(values > 2, values, 0)[:, None]) @ np.swapaxes(vectors, 1, 2)
    >>> clean = np.add.outer(np.arange(24) > 11, np.sin(np.arange(24) / 4)) * 5.0
    >>> noisy = clean + np.random.default_rng(0).normal(0, 1, clean.shape)
    >>> flow = GroupFlow(noisy, Grouping(patch=4, neighbours=16, radius=6, stride=3), filter=Thresholded())
    >>> solution = solve(flow, t=2, integrator=RelaxedSemiImplicit(steps=1))
    >>> bool(np.std(solution.final - clean) < 0.6)
    True
    """

    def fidelity(self, covariance: Array) -> Array:
        """Return the fidelity matrices of groups from covariances, both in units of the noise.

        Parameters
        ----------
        covariance : array of shape (G, D, D)
            Covariances of tokens without noise; that of the noise is the identity in these units.

        Returns
        -------
        array of shape (G, D, D)
            Symmetric positive semidefinite. The covariance itself gives the local Wiener filter.
        """
        return covariance

    def step(
        self, groups: Groups, images: Images, stage: Stage, during: Callable[[float], Any] = lambda share: None
    ) -> tuple[Array, Array]:
        state = images.state
        sums, done = np.zeros((3, *state.shape)), 0
        for tokens in _blocks(groups, images):
            z, members = tokens.lift(state), tokens.places.shape[1]
            left = tokens.left(z, images.observed, stage)
            noise = tokens.noise * left**2 * stage.factor
            root = np.sqrt(noise)
            white = tokens.whitened(z / root)
            energy = self._energy(white, tokens.whitened(tokens.lift(images.pilot) / root), tokens, stage)
            u = tokens.coloured(SemiImplicit().step(GradientFlow(energy, metric="degree"), white, 1.0)) * root
            matrices: Any = energy.fidelity
            filtered = np.linalg.inv(np.eye(z.shape[2]) + matrices[:, 0])
            removed = tokens.coloured(np.swapaxes(tokens.coloured(filtered), 1, 2))
            own = tokens.variances
            kept = own - np.diagonal(removed, axis1=1, axis2=2)[:, None]
            # Variance of a sample of the estimate: what the filter keeps of the noise, and that of the mean.
            variances = noise * (kept * (1 - 1 / members) + own / members)
            if stage.across:
                other, kept = _across(z, tokens.lift(images.pilot), noise.mean(axis=2, keepdims=True))
                u = u + stage.across * (other - u)
                of_other = noise * (kept * (1 - 1 / members) + 1 / members)
                variances = variances + stage.across * (of_other - variances)
            following = z + (1 - stage.leave / left) * (u - z)
            for target, values in zip(sums, (u, following, np.ones_like(u)), strict=True):
                tokens.add(values / variances, target)
            done += len(z)
            during(min(done / (len(state) * groups.lattice.count), 1.0))
        bare = sums[2] == 0
        sums[0, bare], sums[1, bare], sums[2, bare] = state[bare], state[bare], 1
        return (sums[0] / sums[2]).astype(state.dtype), (sums[1] / sums[2]).astype(state.dtype)

    def energy(self, groups: Groups, images: Images, stage: Stage) -> float:
        """Return E of the pilot's tokens with the fidelity to those of the state, in units of the input's noise."""
        total = 0.0
        for tokens in _blocks(groups, images):
            root = np.sqrt(tokens.noise)
            z, pilot = (tokens.whitened(tokens.lift(image) / root) for image in (images.state, images.pilot))
            strength = tokens.left(tokens.lift(images.state), images.observed, stage) * np.sqrt(stage.factor)
            fidelity = self._energy(z, pilot / strength, tokens, stage).fidelity  # of the pilot alone
            total += E(BlockAffinity(*z.shape[:2]), z, fidelity, measure="degree").value(pilot)
        return total

    def _energy(self, z: Array, pilot: Array, tokens: _Tokens, stage: Stage) -> E:
        """Return E of tokens in units of their noise, drawn to z, with the covariances of a pilot."""
        centred = pilot - pilot.mean(axis=1, keepdims=True)
        covariance = np.swapaxes(centred, 1, 2) @ centred / z.shape[1]
        if stage.shrink:
            values, vectors = tokens.cosine(covariance) if stage.cosine else np.linalg.eigh(covariance)
            if stage.cosine:
                values = np.maximum(values - stage.shrink, 0)
            else:  # 1 / (1 + value) goes
                share = 1 / (1 + np.maximum(values, 0))
                values = 1 / (share * np.polynomial.Polynomial(stage.powers)(2 * share - 1)) - 1
            covariance = (vectors * values[:, None]) @ np.swapaxes(vectors, -1, -2)
        matrices = self.fidelity((covariance + np.swapaxes(covariance, 1, 2)) / 2)
        if np.shape(matrices) != covariance.shape:
            raise InputError(
                f"fidelity: got shape {np.shape(matrices)}, expected {covariance.shape}, one matrix for each group"
            )
        return E(BlockAffinity(*z.shape[:2]), z, matrices[:, None], measure="degree")


def _across(z: Array, pilot: Array, noise: Array) -> tuple[Array, Array]:
    """Return the step across the members, and which part of the noise each of them keeps, shape (G, n, 1)."""
    centred = pilot - pilot.mean(axis=1, keepdims=True)
    between = centred @ np.swapaxes(centred, 1, 2) / z.shape[2]
    spread = max(1, z.shape[1] / z.shape[2])  # of the eigenvalues of noise, against those of the covariance of samples
    combination = between @ np.linalg.inv(between + spread * noise * np.eye(z.shape[1]))
    mean = z.mean(axis=1, keepdims=True)
    return mean + combination @ (z - mean), np.diagonal(combination, axis1=1, axis2=2)[..., None]


@dataclass(frozen=True)
class _Tokens:
    """The tokens of some groups with equally many members, in one plane of an image.

    Attributes
    ----------
    plane : int
    places : int array of shape (G, n, D)
        Where their samples lie in the plane.
    noise : array of shape (G, 1, D)
        Variance of the noise of the input in each sample of a patch, the mean over the members.
    correlation : Correlation
    basis : array of shape (D, D)
        The cosines of a patch as columns.
    """

    plane: int
    places: NDArray[np.int64]
    noise: Array
    correlation: Correlation
    basis: Array

    @property
    def variances(self) -> Array:
        """Variance of the samples of a patch in units of `noise`: 1, or a little more where eigenvalues were raised."""
        matrices = self.correlation.matrices
        return np.diagonal(matrices[self.plane]) if matrices.size else np.ones(self.places.shape[2])

    def lift(self, image: Array) -> Array:
        """Return the tokens of an image (C, Z, H, W), shape (G, n, D)."""
        return np.asarray(image[self.plane].ravel()[self.places], np.float64)

    def whitened(self, tokens: Array) -> Array:
        """Return tokens in units of their noise in coordinates in which it is white."""
        return self._times(tokens, self.correlation.whitening)

    def coloured(self, tokens: Array) -> Array:
        """Return tokens from coordinates in which their noise is white."""
        return self._times(tokens, self.correlation.roots)

    def _times(self, tokens: Array, matrices: Array) -> Array:
        return tokens @ matrices[self.plane] if matrices.size else tokens

    def cosine(self, covariance: Array) -> tuple[Array, Array]:
        """Return the variances along the cosines of a patch, and these."""
        return np.einsum("ik,gij,jk->gk", self.basis, covariance, self.basis, optimize=True), self.basis

    def add(self, values: Array, target: Array) -> None:
        """Add tokens to where they came from."""
        plane = target[self.plane]
        plane += np.bincount(self.places.ravel(), values.ravel(), minlength=plane.size).reshape(plane.shape)

    def left(self, z: Array, observed: Array, stage: Stage) -> Array:
        """Return which part of its noise each group's state still holds, shape (G, 1, 1): 1 - std(f - z) / sigma."""
        if not stage.running:
            return np.ones((len(z), 1, 1))
        removed = (self.lift(observed) - z).std(axis=(1, 2), keepdims=True)
        left = 1 - removed / np.sqrt(self.noise.mean(axis=2, keepdims=True))
        return np.asarray(np.maximum(left, max(stage.leave, _LEAST)))


def _blocks(groups: Groups, images: Images) -> Iterator[_Tokens]:
    """Give the tokens of all groups in all planes, some groups at a time."""
    lattice, variance = groups.lattice, images.variance
    correlation, basis = Correlation.of(images.correlation, lattice.patch, len(variance)), cosines(lattice.patch)
    for members in np.unique(groups.counts):
        alike = np.flatnonzero(groups.counts == members)
        block = max(1, _BLOCK // (int(members) * math.prod(lattice.patch)))
        for start in range(0, len(alike), block):
            places = groups.places(alike[start : start + block], int(members))
            for c in range(len(variance)):
                plane = np.broadcast_to(variance[c], lattice.shape).ravel()
                yield _Tokens(c, places, plane[places].astype(np.float64).mean(axis=1, keepdims=True),
                              correlation, basis)  # fmt: skip
