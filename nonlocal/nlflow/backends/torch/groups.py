"""The local Wiener step on groups of alike patches, on tensors; `nlflow.backends.numba.groups` computes the same.

All groups have the same shapes, so that each part of the step is one operation on a chunk of them. A chunk adds its
patches up in a window of its own, and the windows are added in the order of the chunks: the result has the same bits
for any number of threads. Taking patches out of images and putting them back are transposes of each other, so that
derivatives go chunk by chunk as well, in the memory of one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd import forward_ad

from nlflow._array import root
from nlflow.backends.threads import in_order
from nlflow.backends.torch.search import Three, patch_offsets
from nlflow.backends.torch.workers import exact_products, workers_for
from nlflow.errors import InputError


@dataclass(frozen=True)
class Matrices:
    """Matrices of a patch of D samples, the same for all groups.

    Attributes
    ----------
    correlation, whitening : (C, 1, D, D) or None
        R and R^-1/2 of the noise of each plane; none for noise that is not correlated.
    basis : (D, D) or None
        Orthonormal columns that stand in for the eigenvectors of covariances that are shrunk.
    powers : tuple of 9 floats, or none
        As in `nlflow.denoising.patches.filters.Stage`.
    """

    correlation: Tensor | None
    whitening: Tensor | None
    basis: Tensor | None
    powers: tuple[float, ...]

    def to(self, dtype: torch.dtype) -> Matrices:
        """Return the matrices in a precision."""

        def turned(matrix: Tensor | None) -> Tensor | None:
            return None if matrix is None else matrix.to(dtype)

        return Matrices(turned(self.correlation), turned(self.whitening), turned(self.basis), self.powers)


def wiener(
    tokens: Tensor, covariance: Tensor, noise: Tensor, count: Tensor, shrink: float, matrices: Matrices
) -> tuple[Tensor, Tensor]:
    """Filter the tokens of groups, all in one precision.

    Parameters
    ----------
    tokens : (C, g, n, D)
        z - m.
    covariance : (C, g, D, D)
        C, of the pilot.
    noise : (C, g, D)
        The diagonal of N.
    count : (g, 1) or (1, 1)
        Members of each group.
    shrink : float
        Multiple of the noise that is taken from the eigenvalues of C.
    matrices : Matrices

    Returns
    -------
    change : (C, g, n, D)
        N (C + N)^-1 (z - m).
    weight : (C, g, D)
        Inverse variance of each sample of the estimate.
    """
    root = noise.sqrt()
    scale = root[..., None] * root[..., None, :]
    correlation = matrices.correlation
    full = None if correlation is None else correlation * scale
    if shrink > 0:
        inverse = _shrunk_inverse(covariance / scale, shrink, matrices) / scale
    else:
        inverse = _Inverse.apply(covariance + (torch.diag_embed(noise) if full is None else full))  # type: ignore[no-untyped-call]  # torch's
    share = 1 / count
    if full is None or correlation is None:
        filtered = inverse * noise[..., None, :]
        kept, of_mean = (1 - torch.diagonal(filtered, dim1=-2, dim2=-1)).clamp(min=0), share
    else:
        filtered = inverse @ full
        variances = torch.diagonal(correlation, dim1=-2, dim2=-1)
        kept = (variances - (full * filtered.mT).sum(-1) / noise).clamp(min=0)
        of_mean = share * variances
    # That of the filter, and that of the mean.
    return tokens @ filtered, 1 / (noise * (kept * (1 - share) + of_mean))


def across_members(tokens: Tensor, source: Tensor, noise: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """Return what the step across the members removes (C, g, n, D), and the variances of its estimate.

    `tokens` and `source` are about their means, and 0 where there is no member; see
    `nlflow.denoising.patches.filters.GroupFilter`.
    """
    ridge = (noise.sum(-1, keepdim=True) * (count / noise.shape[-1]).clamp(min=1))[..., None]
    between = source @ source.mT
    inverse = _Inverse.apply(between + ridge * torch.eye(between.shape[-1], dtype=ridge.dtype, device=ridge.device))  # type: ignore[no-untyped-call]  # torch's
    filtered, share = ridge * inverse, 1 / count
    kept = (1 - torch.diagonal(filtered, dim1=-2, dim2=-1)).clamp(min=0) * (1 - share) + share
    return filtered @ tokens, noise[..., None, :] * kept[..., None]


def _shrunk_inverse(noisy: Tensor, shrink: float, matrices: Matrices) -> Tensor:
    """Return R^-1/2 h(R^-1/2 C R^-1/2) R^-1/2; see `nlflow.backends.numba.wiener`."""
    whitening, basis = matrices.whitening, matrices.basis
    white = noisy if whitening is None else whitening @ noisy @ whitening
    if basis is None:
        one = torch.eye(white.shape[-1], dtype=white.dtype, device=white.device)
        b: Tensor = _Inverse.apply(white + one)  # type: ignore[no-untyped-call]  # torch's
        s = 2 * b - one
        s2 = s @ s
        s3 = s @ s2
        low, middle, high = (q[0] * one + q[1] * s + q[2] * s2 for q in (matrices.powers[k : k + 3] for k in (0, 3, 6)))
        inverse: Tensor = b @ (low + s3 @ (middle + s3 @ high))
    else:
        values = (basis * (white @ basis)).sum(-2)
        inverse = (basis / ((values - shrink).clamp(min=0) + 1)[..., None, :]) @ basis.mT
    return inverse if whitening is None else whitening @ inverse @ whitening


class _Inverse(torch.autograd.Function):
    """The inverse of symmetric positive definite matrices by Cholesky's factors, without asking whether these exist.

    torch 2.13 has a wrong forward derivative of `torch.cholesky_inverse`.
    """

    @staticmethod
    def forward(ctx: Any, matrix: Tensor) -> Tensor:
        inverse = torch.cholesky_inverse(torch.linalg.cholesky_ex(matrix).L)
        ctx.save_for_backward(inverse)
        ctx.save_for_forward(inverse)
        return inverse

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        inverse: Tensor = ctx.saved_tensors[0]
        return -inverse @ ((gradient + gradient.mT) / 2) @ inverse

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        inverse: Tensor = ctx.saved_tensors[0]
        return -inverse @ tangent @ inverse


_LEAST = 1e-3  # of the noise counts as left in the state, at least
_HELD = 12  # arrays of tokens that a chunk holds at a time, about


@dataclass(frozen=True)
class Step:
    """A step on groups, with all that is constant in it.

    Attributes
    ----------
    members, counts : (G, n), (G,)
        As `find_groups` gives them.
    full : bool
        Whether all groups have n members.
    references : int array of shape (G, 3), on the host
        First samples of the patches of reference.
    shape, patch, radii : triples of int
        Of the images, of a patch, and the largest offsets of a member.
    variance : (C, N) or (C, 1)
        Of the noise in the input.
    extremes : (C, 2)
        Least and largest eigenvalue of the correlation of the noise.
    matrices : Matrices
    leave, factor, shrink, across, running
        As in `nlflow.denoising.patches.filters.Stage`.
    rounding : (single, double)
        Relative rounding over the error that it may leave in weights: of the precision of the images, and of float64.
    numbers : int
        How many numbers a worker holds at a time, about.
    during : callable
        Gets the share that is done.
    """

    members: Tensor
    counts: Tensor
    full: bool
    references: NDArray[np.int64]
    shape: Three
    patch: Three
    radii: Three
    variance: Tensor
    extremes: Tensor
    matrices: Matrices
    leave: float
    factor: float
    shrink: float
    across: float
    running: bool
    rounding: tuple[float, float]
    numbers: int
    during: Callable[[float], Any]

    def __call__(self, state: Tensor, pilot: Tensor, observed: Tensor) -> tuple[Tensor, Tensor]:
        """Return the estimate and the next state.

        They have first derivatives, of both modes, with respect to all three images; the groups are constants.

        Parameters
        ----------
        state, pilot, observed : (C, Z, H, W)
            The running state z, the estimate from which covariances are taken, and the input.
        """
        images = [one.reshape(len(state), -1) for one in (state, pilot, observed)]
        dual = any(unpacked(one)[1] is not None for one in images)
        with exact_products(state.device):
            if tracked(images) and not dual:
                sums = _Summed.apply(*images, self)  # type: ignore[no-untyped-call]  # torch's apply is untyped
            else:
                sums = _summed(self, images)[0]
        made = [one.view(state.shape) for one in averages(sums, images[0])]
        return made[0], made[-1]  # the same where no noise is left


def averages(sums: Tensor, state: Tensor) -> list[Tensor]:
    """Return sums of weight x value (K, C, N), the last of which is that of weights, over the latter."""
    mass = sums[-1]
    bare = mass == 0  # near the cut of a strip, which is cut off afterwards
    mass = torch.where(bare, 1, mass)
    return [torch.where(bare, state, one / mass) for one in sums[:-1]]


def tracked(images: Iterable[Tensor]) -> bool:
    """Tell whether results have derivatives, of either mode, with respect to some of the images."""
    return any(unpacked(one)[1] is not None or (torch.is_grad_enabled() and one.requires_grad) for one in images)


def unpacked(tensor: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return a tensor and its derivative in forward mode, None where there is none."""
    pair: Any = forward_ad.unpack_dual(tensor)  # type: ignore[no-untyped-call]  # torch's is untyped
    return pair.primal, pair.tangent


def _summed(step: Step, images: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Return sums of weight x estimate, of weight x next state (unless it is the estimate) and of weights, (K, C, N).

    And the groups that lose too many digits in the precision of the images, (C, G): they are filtered in float64.
    """
    kinds, rounded = 2 if step.leave == 0 else 3, images[0].dtype
    sums = torch.zeros(kinds, *images[0].shape, dtype=rounded, device=images[0].device)
    poor: list[Tensor] = []

    def work(chunk: _Chunk) -> tuple[_Chunk, Tensor, Tensor]:
        with torch.no_grad():
            values, lost = _weighted(step, chunk, [chunk.lift(one) for one in images])
            return chunk, chunk.windows(values, rounded), lost

    with workers_for(sums.device) as workers:
        for chunk, windows, lost in in_order(work, _chunks(step, None), workers):
            sums[..., chunk.low : chunk.high] += windows
            poor.append(lost)
            step.during(sum(one.shape[1] for one in poor) / len(step.members))
        for chunk, windows, _ in in_order(work, _chunks(step, torch.cat(poor, dim=1)), workers):
            sums[..., chunk.low : chunk.high] += windows
    return sums, torch.cat(poor, dim=1)


class _Summed(torch.autograd.Function):
    """`_summed` with its derivative."""

    @staticmethod
    def forward(ctx: Any, state: Tensor, pilot: Tensor, observed: Tensor, step: Step) -> Tensor:
        sums, lost = _summed(step, [state, pilot, observed])
        ctx.save_for_backward(state, pilot, observed, lost)
        ctx.step = step
        return sums

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise InputError(
                "create_graph: got True, expected False: the denoiser has first derivatives only; take differences of "
                "gradients for second ones"
            )
        *images, lost = ctx.saved_tensors
        step: Step = ctx.step
        results = torch.zeros(3, *images[0].shape, dtype=images[0].dtype, device=images[0].device)

        def work(chunk: _Chunk) -> tuple[_Chunk, Tensor]:
            with torch.enable_grad():
                tokens = [chunk.lift(one.detach()).requires_grad_() for one in images]
                values, _ = _weighted(step, chunk, tokens)
            wanted = [chunk.lift(one) for one in gradient]
            found: Any = torch.autograd.grad(values, tokens, wanted, allow_unused=True)
            parts = [torch.zeros_like(t) if g is None else g for g, t in zip(found, tokens, strict=True)]
            return chunk, chunk.windows(parts, results.dtype)

        chunks = [*_chunks(step, None), *_chunks(step, lost)]
        with exact_products(results.device), workers_for(results.device) as workers:
            for chunk, windows in in_order(work, chunks, workers):
                results[..., chunk.low : chunk.high] += windows
        return *results, None


@dataclass(frozen=True)
class _Chunk:
    """Some groups, and where their patches lie.

    Attributes
    ----------
    low, high : int
        Of the samples that the patches cover, the first and the one behind the last.
    places : (g n D,)
    shape : (g, n, D)
    there : (g, n, 1) or None
        1 for members, 0 for what stands where a group has fewer than n.
    poor : (C, g) or None
        Which groups are filtered here, in float64; None for all that do not lose too many digits.
    """

    low: int
    high: int
    places: Tensor
    shape: tuple[int, int, int]
    there: Tensor | None
    poor: Tensor | None

    def lift(self, planes: Tensor) -> Tensor:
        """Return the tokens (C, g, n, D) of planes (C, N)."""
        tokens = planes.index_select(1, self.places).view(len(planes), *self.shape)
        return tokens if self.poor is None else tokens.double()

    def windows(self, values: list[Tensor], dtype: torch.dtype) -> Tensor:
        """Return sums over K tokens (C, g, n, D) at each sample from `low` to `high`, (K, C, samples)."""
        at = (self.places - self.low).long()
        made = torch.zeros(len(values), len(values[0]), self.high - self.low, dtype=dtype, device=at.device)
        # One line at a time: then torch has an order of its own for sums on a GPU, where that is asked for.
        for target, source in zip(made.flatten(0, 1), itertools.chain(*values), strict=True):
            target.scatter_add_(0, at, source.flatten().to(dtype))
        return made

    def count(self, like: Tensor) -> Tensor:
        """Return the members of each group, (g, 1)."""
        if self.there is None:
            return torch.full((1, 1), self.shape[1], dtype=like.dtype, device=like.device)
        return self.there.sum(1).to(like.dtype)

    def masked(self, tokens: Tensor) -> Tensor:
        """Return tokens with 0 where there is no member."""
        return tokens if self.there is None else tokens * self.there.to(tokens.dtype)

    def mean(self, tokens: Tensor) -> Tensor:
        """Return the mean token of each group, (C, g, 1, D)."""
        return self.masked(tokens).sum(-2, keepdim=True) / self.count(tokens)[..., None]

    def centred(self, tokens: Tensor) -> Tensor:
        """Return tokens about their mean."""
        return self.masked(tokens - self.mean(tokens))


def _chunks(step: Step, lost: Tensor | None) -> Iterator[_Chunk]:
    """Give all groups in chunks, or those that lose too many digits; the device is asked once which these are."""
    planes, most = len(step.variance), step.members.shape[1]
    within = patch_offsets(step.patch, step.shape, step.members.device)
    together = max(1, step.numbers // (_HELD * planes * most * len(within)))
    which = None if lost is None else lost.any(dim=0).nonzero()[:, 0].cpu()
    count = len(step.members) if which is None else len(which)
    for start in range(0, count, together):
        part: Any = slice(start, start + together)
        if which is not None:
            part = which[part]
        corners, has = step.members[part], None
        if not step.full:
            has = (torch.arange(most, device=corners.device) < step.counts[part][:, None])[..., None]
        references = step.references[part]
        ends = np.minimum(references.max(axis=0) + step.radii + step.patch, step.shape) - 1
        low, high = (
            int(np.ravel_multi_index(tuple(at), step.shape))
            for at in (np.maximum(references.min(axis=0) - step.radii, 0), ends)
        )
        places = (corners[..., None] + within).flatten()
        poor = None if lost is None else lost[:, part]
        yield _Chunk(low, high + 1, places, (*corners.shape, len(within)), has, poor)


def _weighted(step: Step, chunk: _Chunk, tokens: list[Tensor]) -> tuple[list[Tensor], Tensor]:
    """Return tokens of weight x estimate, weight x next state and weight; and which groups lose too many digits.

    Those have weight 0 here, where they are not filtered in float64.
    """
    z, pilot, observed = tokens
    count = chunk.count(z)
    if step.variance.shape[1] == 1:
        own = step.variance.to(z.dtype)[..., None].expand(len(z), z.shape[1], z.shape[3])
    else:
        own = chunk.mean(chunk.lift(step.variance)).to(z.dtype)[..., 0, :]
    total = own.mean(-1, keepdim=True)
    left = torch.ones_like(total)
    if step.running:
        left = (1 - root(_spread(chunk, observed - z, count) / total)).clamp(min=max(step.leave, _LEAST))
    own = own * left.square() * step.factor
    source = chunk.centred(pilot)
    covariance = source.mT @ source / count[..., None]
    trace = torch.diagonal(covariance, dim1=-2, dim2=-1).sum(-1, keepdim=True)
    # Less noise than this drowns in rounding. It counts as so much; where that is more than the noise of the input the
    # group is left as it is.
    least = count * step.rounding[1] * trace
    idle = least > total
    own = torch.maximum(own, least)
    lost = torch.zeros_like(idle)
    if chunk.poor is not None:
        masked = idle | ~chunk.poor[..., None]
    else:
        if z.dtype != torch.float64:
            extremes = step.extremes[:, None]
            most, fewest = own.amax(-1, keepdim=True), own.amin(-1, keepdim=True)
            bound = count * step.rounding[0] * (trace + most * extremes[..., 1:])
            lost = ~(bound < fewest * extremes[..., :1]) & ~idle
            if step.across > 0:
                ridge = own.sum(-1, keepdim=True)
                lost = lost | (~(count * step.rounding[0] * (ridge + count * trace) < ridge) & ~idle)
        masked = idle | lost
    own = torch.where(masked, 1, own)  # an identity, whose factor exists
    covariance = torch.where(masked[..., None], 0, covariance)
    centred = chunk.centred(z)
    change, weight = wiener(centred, covariance, own, count, step.shrink, step.matrices.to(z.dtype))
    weight = weight[..., None, :]
    if step.across > 0:
        removed, variances = across_members(centred, torch.where(masked[..., None], 0, source), own, count)
        change = change + step.across * (removed - change)
        weight = 1 / (1 / weight + step.across * (variances - 1 / weight))
    change = torch.where(masked[..., None], 0, change)
    weight = torch.where(idle[..., None], 1 / total[..., None], torch.where(masked[..., None], 0, weight))
    if chunk.poor is not None:
        weight = torch.where(chunk.poor[..., None, None], weight, 0)
    shares = chunk.masked(weight.expand_as(z))
    values = [shares * (z - change)]
    if step.leave > 0:
        values.append(shares * (z - (1 - step.leave / left)[..., None] * change))
    return [*values, shares], lost[..., 0]


def _spread(chunk: _Chunk, removed: Tensor, count: Tensor) -> Tensor:
    """Return the variance over all samples of a group, (C, g, 1)."""
    removed, samples = chunk.masked(removed), count * removed.shape[-1]
    first, second = ((one.sum(-1).double().sum(-1, keepdim=True) / samples) for one in (removed, removed * removed))
    return (second - first.square()).clamp(min=0).to(removed.dtype)
