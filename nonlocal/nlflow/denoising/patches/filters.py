"""The contract of a filter of groups, and the compiled one."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
from numpy.polynomial import chebyshev, polynomial
from numpy.typing import NDArray

from nlflow._array import is_tensor, to_numpy
from nlflow.backends.threads import one_blas_thread
from nlflow.denoising.patches.lattice import Lattice, nearest_offsets
from nlflow.errors import InputError, NumericalError

Array = NDArray[Any]
#: Eigenvalues of a correlation count as this at least: no direction of a patch is free of noise (8 bits are rounded).
LEAST: Final = 3e-3

OUT_OF_RANGE: Final = (
    "guide: got NaN, infinity or values whose squares overflow, expected a signal in units of its noise; divide it by "
    "the standard deviation of the noise first"
)
NOT_FINITE: Final = "filter: its step returned an estimate that is not finite; scale the signal down"


@dataclass(frozen=True)
class Correlation:
    """The correlation R of the noise in a patch of D samples, for each plane; its eigenvalues are at least 0.003.

    Attributes
    ----------
    matrices, roots, whitening : array of shape (C, D, D)
        R, R^1/2 and R^-1/2; of shape (C, 0, 0) for white noise.
    extremes : array of shape (C, 2)
        Least and largest eigenvalue of R.
    """

    matrices: Array
    roots: Array
    whitening: Array
    extremes: Array

    @classmethod
    def of(cls, function: Array | None, patch: tuple[int, ...], planes: int) -> Correlation:
        """Return the matrices of patches, in double precision.

        Parameters
        ----------
        function : array of shape (C, 2a+1, 2b+1), or None
            Correlation of two samples of a slice by their offset: 1 in the middle, 0 beyond a and b and between slices.
        patch : tuple of int
            (height, width) or (depth, height, width).
        planes : int
            C.
        """
        if function is None:
            empty = np.zeros((planes, 0, 0))
            return cls(empty, empty, empty, np.ones((planes, 2)))
        reach = np.array(function.shape[1:]) // 2
        across, down, along = (
            np.subtract.outer(i.ravel(), i.ravel()) for i in np.indices((1,) * (3 - len(patch)) + patch)
        )
        inside = (across == 0) & (np.abs(down) <= reach[0]) & (np.abs(along) <= reach[1])
        places = np.where(inside, down, 0) + reach[0], np.where(inside, along, 0) + reach[1]
        with one_blas_thread():  # for such small matrices threads wait for each other fifty times as long as they work
            values, vectors = np.linalg.eigh(np.where(inside, function[:, places[0], places[1]], 0.0))
            values = np.maximum(values, LEAST)
            extremes = np.stack([values.min(axis=1), values.max(axis=1)], axis=1)
            turned = np.swapaxes(vectors, 1, 2)
            raised = [np.asarray((vectors * values[:, None] ** power) @ turned) for power in (1, 0.5, -0.5)]
        return cls(raised[0], raised[1], raised[2], extremes)

    def along(self, basis: Array) -> Array:
        """Return matrices from tokens to coefficients in a basis with white noise, and back; shape (C, 2, D, D)."""
        there = (
            self.whitening @ basis
            if self.whitening.size
            else np.broadcast_to(basis, (len(self.extremes), *basis.shape))
        )
        back = basis.T @ self.roots if self.roots.size else np.broadcast_to(basis.T, there.shape)
        return np.stack([there, back], axis=1)


def cosines(patch: tuple[int, int, int]) -> Array:
    from scipy.fft import dctn

    size = math.prod(patch)
    basis = dctn(np.eye(size).reshape(size, *patch), axes=(1, 2, 3), norm="ortho")
    return np.asarray(basis.reshape(size, size))


_DEGREE = 8  # of the polynomial of a first step
_OF_NOISE = 4.0  # variances of noise, for one of the signal
_JOBS = 64  # runs whose windows are held at a time; enough to keep threads busy


@dataclass(frozen=True)
class Groups:
    """Groups of alike patches.

    Attributes
    ----------
    lattice : Lattice
    members : int32 array or tensor of shape (G, n)
        Number in C order of the first sample of each patch, the patch of reference first.
    counts : int32 array or tensor of shape (G,)
        How many members each group has; in tensors 0 where the guide was out of range.
    """

    lattice: Lattice
    members: Any
    counts: Any

    def checked(self) -> Groups:
        """Return the groups, or raise `NumericalError` if their guide was out of range."""
        if is_tensor(self.counts) and int(self.counts.min()) == 0:
            raise NumericalError(OUT_OF_RANGE)
        return self

    @property
    def on_host(self) -> Groups:
        """The groups as NumPy arrays."""
        return Groups(self.lattice, to_numpy(self.members), to_numpy(self.counts))

    def places(self, which: Any, members: int) -> NDArray[np.int64]:
        """Return the numbers in C order of the samples of patches, shape (g, members, D).

        Parameters
        ----------
        which : array of int, or slice
            g groups.
        members : int
            How many of their members, at most as many as each has.
        """
        lattice = self.lattice
        corners = corners_of(self.members[which, :members, None].astype(np.int64), lattice)
        frames, rows, columns = (c + i.ravel() for c, i in zip(corners, np.indices(lattice.patch), strict=True))
        if len(lattice.motion) > 1:
            line, column = np.divmod(np.arange(len(self.members))[which], len(lattice.columns))
            job = line * -(-len(lattice.columns) // lattice.run) + column // lattice.run
            earliest = lattice.slices[line // len(lattice.rows)] - lattice.radii[0]
            moved = lattice.motion[job[:, None, None], frames - earliest[:, None, None]]
            rows, columns = rows + moved[..., 0], columns + moved[..., 1]
        return np.asarray((frames * lattice.shape[1] + rows) * lattice.shape[2] + columns)


@dataclass(frozen=True)
class Images:
    """What a step looks at, as planes (C, Z, H, W) of one floating-point type; an image may be (C, H, W).

    Attributes
    ----------
    state, pilot, observed : array or tensor of shape (C, Z, H, W)
        The running state z, the estimate that gives covariances, and the input.
    variance : array or tensor of shape (C, Z, H, W) or (C, 1, 1, 1)
        Variance of the noise in the input.
    correlation : array of shape (C, 2a+1, 2b+1), or None
        Correlation of the noise of two samples of a slice by their offset, 1 in the middle, and 0 between slices; None
        for white noise.
    """

    state: Array
    pilot: Array
    observed: Array
    variance: Array
    correlation: Array | None = None

    @property
    def on_host(self) -> Images:
        """The images as NumPy arrays."""
        state, pilot, observed, variance = map(to_numpy, (self.state, self.pilot, self.observed, self.variance))
        return Images(state, pilot, observed, variance, self.correlation)


@dataclass(frozen=True)
class Stage:
    """The settings of a step.

    Attributes
    ----------
    leave : float
        Fraction of the noise that the next state keeps.
    factor : float
        Multiplies the variance of the noise.
    shrink : float
        Multiple of the noise's variance that is taken from the eigenvalues of the covariance; 0 for a pilot without
        noise.
    running : bool
        Whether the state has lost noise already; what is left is then measured.
    cosine : bool
        Whether the covariances that are shrunk count as diagonal in the cosines of a patch.
    across : float
        Share of the step across the members in the estimate, in [0, 1].
    """

    leave: float = 0.0
    factor: float = 1.0
    shrink: float = 0.0
    running: bool = True
    cosine: bool = False
    across: float = 0.0

    @property
    def powers(self) -> tuple[float, ...]:
        """Coefficients of a polynomial that shrinks eigenvalues, from the constant on; empty where it is not needed."""
        return removed(self.shrink) if self.shrink and not self.cosine else ()


@functools.cache
def removed(shrink: float) -> tuple[float, ...]:
    """Return a polynomial q such that B q(2 B - 1), B = N (C + N)^-1, is the part of noisy tokens that a step removes.

    It approximates 1 / (1 + max(v - shrink, 0)) for variances v in units of the noise without eigenvectors, by least
    squares over pure noise (Marchenko and Pastur 1967) and some variances above, and lies between 0 and 1 (least
    squares with bounds: Lawson and Hanson 1974, chapter 23).
    """
    from scipy.optimize import nnls

    low, high = (1 - 3**-0.5) ** 2, (1 + 3**-0.5) ** 2
    noise, signal, rest = np.linspace(low, high, 801), np.geomspace(high, 1e3, 401), np.linspace(0, low, 101)
    spread = np.sqrt((high - noise) * (noise - low)) / noise
    variances = np.concatenate((noise, signal, rest))
    weights = np.concatenate((_OF_NOISE * spread / spread.sum(), signal / len(signal), np.full(len(rest), 1e-3)))
    roots, share = np.sqrt(weights), 1 / (1 + variances)
    wanted = roots * (1 / (1 + np.maximum(variances - shrink, 0)) - share)

    def terms(share: Array) -> Array:
        """Return B^2 times Chebyshev's polynomials, which leave it at 0 and its slope there."""
        return share[:, None] ** 2 * chebyshev.chebvander(2 * share - 1, _DEGREE - 1)

    q, r = np.linalg.qr(roots[:, None] * terms(share))
    inside = np.linspace(0, 1, 1001)
    rows = np.linalg.solve(r.T, terms(inside).T)
    bounds = np.concatenate((-inside - rows.T @ (q.T @ wanted), inside - 1 + 1e-4 + rows.T @ (q.T @ wanted)))
    nearest = np.vstack((np.hstack((rows, -rows)), bounds))
    last = np.eye(len(nearest))[-1]
    *step, scale = nearest @ nnls(nearest, last)[0] - last
    found = chebyshev.cheb2poly(np.linalg.solve(r, q.T @ wanted - np.array(step) / scale))
    return tuple(polynomial.polyadd([1.0], polynomial.polymul([0.5, 0.5], found)).tolist())


def _nobody(share: float) -> None:
    pass


class GroupFilter(Protocol):
    """A search for groups, and a step on them.

    With a group's tokens z of mean m, their covariance C in the pilot and the noise N that z still holds, a step is
    z -> z - N (C + N)^-1 (z - m), a semi-implicit step of E with the fidelity matrix C N^-1.

    The step across the members has K = X X^T / D of the n centred tokens X of the pilot in place of C:
    z -> z - s^2 (K + s^2)^-1 (z - m), so that patches are combined (Herbreteau and Kervrann 2022, arXiv 2203.00570).
    s^2 is the mean of N, times n / D where n > D, as the eigenvalues of noise in K reach n / D times as far as in C
    (Marchenko and Pastur 1967).
    """

    def find(self, guide: Any, lattice: Lattice) -> tuple[Any, Any]:
        """Return `Groups.members` and `Groups.counts`, found on a guide (C, Z, H, W)."""

    def step(
        self, groups: Groups, images: Images, stage: Stage, during: Callable[[float], Any] = _nobody
    ) -> tuple[Any, Any]:
        """Return the estimate and the next state, (C, Z, H, W) each; `during` gets the share that is done."""


def groups_of(filter: GroupFilter, guide: Array, lattice: Lattice) -> Groups:
    """Return the groups that a filter finds; raise `InputError` for members outside of the lattice's windows."""
    found: Any = filter.find(guide, lattice)
    if not str(getattr(filter.find, "__module__", "")).startswith("nlflow."):
        if not isinstance(found, tuple) or len(found) != 2:
            raise InputError(f"find: got {type(found).__name__}, expected a tuple of members and counts")
        own: Any = [to_numpy(one) if is_tensor(one) else one for one in found]
        _check_members(own[0], own[1], lattice)
    members, counts = found
    return Groups(lattice, members, counts)


def _check_members(members: Any, counts: Any, lattice: Lattice) -> None:
    """Refuse members that somebody's own search found outside of the windows that sums are kept for."""
    shapes = np.shape(members), np.shape(counts)
    if len(shapes[0]) != 2 or shapes != ((lattice.count, shapes[0][1]), (lattice.count,)):
        raise InputError(
            f"find: got members of shape {shapes[0]} and counts of shape {shapes[1]}, expected ({lattice.count}, n) "
            f"and ({lattice.count},), a row for each patch of reference"
        )
    if members.dtype != np.int32 or counts.dtype != np.int32:
        raise InputError(f"find: got members of {members.dtype} and counts of {counts.dtype}, expected int32")
    if counts.min() < 1 or counts.max() > members.shape[1]:
        raise InputError(f"find: got counts from {counts.min()} to {counts.max()}, expected 1 to {members.shape[1]}")
    there = np.arange(members.shape[1]) < counts[:, None]
    references = lattice.references()
    for axis, places in enumerate(corners_of(members, lattice)):
        offsets = np.abs(places - references[:, axis, None])
        inside = (
            (offsets <= lattice.radii[axis]) & (places >= 0) & (places <= lattice.shape[axis] - lattice.patch[axis])
        )
        if not inside[there].all():
            raise InputError(
                f"find: got a member outside of the search window, expected offsets of at most {lattice.radii[axis]} "
                f"along axis {axis} and patches within the image; give the Grouping a larger radius"
            )


def corners_of(members: NDArray[Any], lattice: Lattice) -> tuple[NDArray[Any], ...]:
    layers, columns = np.divmod(members, lattice.shape[2])
    return *np.divmod(layers, lattice.shape[1]), columns


class CompiledFilter:
    """The filter of compiled loops; a subclass may find other groups.

    Groups of float32 are filtered in double precision where float32 would lose too many digits. The bits do not depend
    on the number of threads.
    """

    def find(self, guide: Array, lattice: Lattice) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Return the nearest patches of each reference, by squared distance."""
        from nlflow.backends.numba import search

        # The loops order distances, and leave their arrays where one is not finite.
        most = math.sqrt(float(np.finfo(guide.dtype).max) / (8 * len(guide) * math.prod(lattice.patch)))
        if not float(np.abs(guide).max()) < most:
            raise NumericalError(OUT_OF_RANGE)
        members = np.zeros((lattice.count, lattice.most), np.int32)
        counts = np.zeros(lattice.count, np.int32)
        offsets, order = nearest_offsets(lattice.radii)
        moves = offsets @ (lattice.shape[1] * lattice.shape[2], lattice.shape[2], 1)
        edge = lattice.radii[2] + int(np.abs(lattice.motion).max())
        wide = (0, 0), (0, 0), (0, 0), (edge, edge + search.COLUMNS + search.lanes(guide.dtype))
        search.loop("find_groups", guide.dtype.name)(
            np.pad(_volumes(guide, lattice), wide), edge, lattice.slices, lattice.rows, lattice.columns, lattice.shape,
            lattice.patch, lattice.radii, lattice.run, lattice.motion, order, moves.astype(np.int32),
            np.finfo(guide.dtype).eps, members, counts,
        )  # fmt: skip
        return members, counts

    def step(
        self, groups: Groups, images: Images, stage: Stage, during: Callable[[float], Any] = _nobody
    ) -> tuple[Array, Array]:
        """See `GroupFilter`."""
        from nlflow.backends.numba import groups as loops
        from nlflow.backends.numba import search
        from nlflow.backends.numba.wiener import padded

        lattice, total = groups.lattice, groups.lattice.jobs
        state, pilot, observed = (_volumes(one, lattice) for one in (images.state, images.pilot, images.observed))
        kinds = 3 if stage.leave else 2  # a state of which no noise is left is the estimate
        sums = np.zeros((kinds, *state.shape), state.dtype)
        a, b, c = lattice.window
        windows = np.empty((min(_JOBS, total), kinds, len(state), a, b, c + search.lanes(state.dtype)), state.dtype)
        rounding = tuple(float(np.finfo(kind).eps) / loops.ERROR for kind in (state.dtype, np.float64))
        filter_groups = loops.loop("filter_groups", state.dtype.name)
        add_windows = loops.loop("add_windows", state.dtype.name)
        # An array that cannot be written to has a type of its own, for which the loop would be compiled again.
        uniform = images.variance[0].size == 1
        variance = images.variance.reshape(-1, 1, 1, 1) if uniform else _volumes(images.variance, lattice)
        variance = np.require(variance, requirements="W")
        if not (variance.min() > 0 and math.isfinite(float(variance.max()))):
            raise NumericalError(
                f"variance: got {variance.min():g} to {variance.max():g}, expected finite numbers > 0, as groups are "
                "filtered in units of their noise; give channels without noise a little"
            )
        found = Correlation.of(images.correlation, lattice.patch, len(state))
        size = padded(math.prod(lattice.patch), state.itemsize)
        basis = (
            found.along(cosines(lattice.patch)) if stage.cosine and stage.shrink else np.zeros((len(state), 2, 0, 0))
        )
        own = tuple(filled(m, size, state.dtype) for m in (found.matrices, found.whitening, basis))
        matrices = (*own[:2], np.ascontiguousarray(found.extremes, state.dtype), own[2])
        powers = np.array(stage.powers, state.dtype)
        places = lattice.slices, lattice.rows, lattice.columns
        along, lost = (lattice.radii, lattice.run, lattice.motion), np.zeros(len(windows), bool)
        for first in range(0, total, _JOBS):
            last = min(first + _JOBS, total)
            # Double precision is compiled when a group asks for it first; what was filtered until then is done again.
            for ready in (loops.double.cache_info().currsize > 0, True):
                filter_groups(
                    loops.double(state.dtype.name) if ready else (0, 0), state, pilot, observed, variance, *matrices,
                    groups.members, groups.counts, *places, first, lattice.patch, *along, stage.leave, stage.factor,
                    stage.shrink, powers, stage.across, stage.running, rounding, lost, windows, last - first,
                )  # fmt: skip
                if not lost.any():
                    break
                lost[:] = False
            add_windows(windows, *places, first, last, *along, sums)
            during(last / total)
        weights = sums[1]
        bare = weights == 0  # near the cut of a strip, which is cut off afterwards
        weights[bare] = 1
        results = []
        for values in (sums[0], sums[-1])[: kinds - 1]:
            values[bare] = state[bare]
            results.append(np.divide(values, weights, out=values).reshape(images.state.shape))
        return results[0], results[-1]


def filled(matrices: Array, size: int, dtype: Any) -> Array:
    more = size - matrices.shape[-1] if matrices.size else 0
    wide = [(0, 0)] * (matrices.ndim - 2) + [(0, more)] * 2
    return np.ascontiguousarray(np.pad(matrices, wide), dtype)


def _volumes(planes: Array, lattice: Lattice) -> Array:
    return np.ascontiguousarray(planes).reshape(len(planes), *lattice.shape)
