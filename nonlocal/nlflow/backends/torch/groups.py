"""The local Wiener step on tensors, as in `nlflow.backends.numba.groups`."""

# All groups have the same shapes, so that each part of the step is one operation on a chunk of them. What is computed
# of a group does not depend on those beside it, and patches are added to the image in the order of the groups: the
# result has the same bits for any number of threads and for chunks of any size. Taking patches out of images and
# putting them back are transposes of each other, so that derivatives go chunk by chunk as well, in the memory of one.

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from nlflow._array import root
from nlflow.backends.threads import in_order
from nlflow.backends.torch.search import Three
from nlflow.backends.torch.workers import exact_products, share, workers_for
from nlflow.errors import InputError


@dataclass(frozen=True)
class Matrices:
    """Matrices of patches of D samples, which all groups share."""

    # - correlation, whitening : (C, 1, D, D) or None; R and R^-1/2 of the noise of each plane; None for white noise.
    # - extremes : (C, 2) or None; Least and largest eigenvalue of R.
    # - basis : (D, D) or None; Orthonormal columns that stand in for the eigenvectors of covariances that are shrunk.
    # - powers : tuple of 9 floats, or none; As in `nlflow.denoising.patches.filters.Stage`.

    correlation: Tensor | None
    whitening: Tensor | None
    extremes: Tensor | None
    basis: Tensor | None
    powers: tuple[float, ...]

    def to(self, dtype: torch.dtype) -> Matrices:
        def turned(matrix: Tensor | None) -> Tensor | None:
            return None if matrix is None else matrix.to(dtype)

        return Matrices(
            turned(self.correlation), turned(self.whitening), turned(self.extremes), turned(self.basis), self.powers
        )


def wiener(
    covariance: Tensor, noise: Tensor, count: float | Tensor, shrink: float, matrices: Matrices
) -> tuple[Tensor, Tensor, Tensor]:
    # - covariance : (C, g, D, D); n C, of the pilot; it may be written over.
    # - noise : (C, g, D); The diagonal of N.
    # - count : float or (g, 1); n, members of each group.
    # - shrink : float; Multiple of the noise that is taken from the eigenvalues of C.
    # - matrices : Matrices
    # Returns:
    # - filtered : (C, g, D, D)
    # - scale : (C, g, D); Of tokens z about their mean m, z - m times `filtered` diag(`scale`) is N (C + N)^-1 (z - m).
    # - variance : (C, g, D); Of each sample of the estimate.
    correlation, scaled = matrices.correlation, noise * count
    if shrink > 0 or correlation is not None:
        roots = scaled.sqrt()
        scale = roots[..., None] * roots[..., None, :]
    full = None if correlation is None else correlation * scale
    if shrink > 0:
        inverse = _shrunk_inverse(covariance / scale, shrink, matrices) / scale
    else:
        if full is None:
            torch.diagonal(covariance, dim1=-2, dim2=-1).add_(scaled)
        else:
            covariance += full
        inverse = _Inverse.apply(covariance)  # type: ignore[no-untyped-call]  # torch's
    share = 1 / count
    if full is None or correlation is None:
        kept = (1 - torch.diagonal(inverse, dim1=-2, dim2=-1) * scaled).clamp(min=0)
        # That of the filter, and that of the mean.
        return inverse, scaled, noise * (kept * (1 - share) + share)
    filtered = inverse @ full
    variances = torch.diagonal(correlation, dim1=-2, dim2=-1)
    kept = (variances - (full * filtered.mT).sum(-1) / scaled).clamp(min=0)
    return filtered, torch.ones_like(noise), noise * (kept * (1 - share) + share * variances)


def across_members(tokens: Tensor, source: Tensor, noise: Tensor, count: float | Tensor) -> tuple[Tensor, Tensor]:
    """Return what the step across the members removes (C, g, n, D), and the variances of its estimate."""
    # `tokens` and `source` are about their means, and 0 where there is no member; see
    # `nlflow.denoising.patches.filters.GroupFilter`.
    size = noise.shape[-1]
    spread = (count / size).clamp(min=1) if isinstance(count, Tensor) else max(count / size, 1.0)
    ridge = (noise.sum(-1, keepdim=True) * spread)[..., None]
    between = source @ source.mT
    torch.diagonal(between, dim1=-2, dim2=-1).add_(ridge[..., 0])
    inverse = _Inverse.apply(between)  # type: ignore[no-untyped-call]  # torch's
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

    torch 2.13 has a wrong forward derivative of `torch.cholesky_inverse`. Bits of LAPACK depend on where in memory a
    matrix begins: those of some sizes all begin alike, so that nothing depends on which matrices lie before one.
    """

    @staticmethod
    def forward(ctx: Any, matrix: Tensor) -> Tensor:
        size = matrix.shape[-1]
        if size % _ALIGNED:
            more = -size % _ALIGNED
            matrix = torch.nn.functional.pad(matrix, (0, more, 0, more))
            torch.diagonal(matrix, dim1=-2, dim2=-1)[..., size:] = 1
        inverse = torch.cholesky_inverse(torch.linalg.cholesky_ex(matrix).L)
        if size % _ALIGNED:
            inverse = inverse[..., :size, :size].contiguous()
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


_ALIGNED = 4  # of a side: then matrices take a multiple of 64 bytes
_LEAST = 1e-3  # of the noise counts as left in the state, at least
_HELD = 12  # arrays of tokens that a chunk holds at a time, about


@dataclass(frozen=True)
class Step:
    """A step on groups, with its constants."""

    # - members, counts : (G, n), (G,); As `find_groups` gives them; a count of 0 says that the guide is out of range.
    # - full : bool; Whether all groups have n members.
    # - shape, patch : triples of int; Of the images and of a patch.
    # - within : (D,); How far the samples of a patch lie behind its first.
    # - variance : (C, N) or (C, 1); Of the noise in the input.
    # - matrices : Matrices
    # - leave, factor, shrink, across, running: As in `nlflow.denoising.patches.filters.Stage`.
    # - rounding : (single, double); Relative rounding over the error that it may leave in weights: of the precision of
    #   the images, and of float64.
    # - numbers : int; How many numbers a worker holds at a time, about.
    # - during : callable; Gets the share that is done.
    # - check : callable; Gets whether the guide was in range and whether the sums are finite; may raise.

    members: Tensor
    counts: Tensor
    full: bool
    shape: Three
    patch: Three
    within: Tensor
    variance: Tensor
    matrices: Matrices
    leave: float
    factor: float
    shrink: float
    across: float
    running: bool
    rounding: tuple[float, float]
    numbers: int
    during: Callable[[float], Any]
    check: Callable[[bool, bool], None]

    def __call__(self, state: Tensor, pilot: Tensor, observed: Tensor) -> tuple[Tensor, Tensor]:
        """Return the estimate and the next state, with first derivatives in the three images; the groups are constants.

        The images (C, Z, H, W) are the running state z, the estimate from which covariances are taken, and the input.
        """
        images = [state.flatten(1)]
        if pilot is not state:
            images.append(pilot.flatten(1))
        if self.running:
            images.append(_box_sums(observed - state, self.patch))
        dual = any(unpacked(one)[1] is not None for one in images)
        with exact_products(state.device), workers_for(state.device):
            if tracked(images) and not dual:
                sums = _Summed.apply(self, *images)  # type: ignore[no-untyped-call]  # torch's apply is untyped
            else:
                sums = _summed(self, images)[0]
            made = [one.view(state.shape) for one in averages(sums, images[0])]
        return made[0], made[-1]  # the same where no noise is left

    def kinds(self, images: list[Tensor]) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return the state, the pilot if it is another image, and the sums over patches where noise is measured."""
        sums = images[-1] if self.running else None
        return images[0], images[1] if len(images) > 1 + self.running else None, sums


def averages(sums: Tensor, state: Tensor) -> list[Tensor]:
    """Return the state less sums of weight x change (K, C, N) over the last of them, that of weights."""
    # No patch is near the cut of a strip, which is cut off afterwards.
    mass = torch.where(sums[-1] == 0, 1, sums[-1])
    return [state - one / mass for one in sums[:-1]]


def tracked(images: Iterable[Tensor]) -> bool:
    return any(unpacked(one)[1] is not None or (torch.is_grad_enabled() and one.requires_grad) for one in images)


def unpacked(tensor: Tensor) -> tuple[Tensor, Tensor | None]:
    pair: Any = forward_ad.unpack_dual(tensor)  # type: ignore[no-untyped-call]  # torch's is untyped
    return pair.primal, pair.tangent


def _box_sums(removed: Tensor, patch: Three) -> Tensor:
    """Return the sums over each patch of samples (C, Z, H, W) and of their squares, at its corner, (2 C, N) float64."""
    wide = removed.double()
    sums = torch.cat((wide, wide.square()))
    for axis, side in enumerate(patch, 1):
        if side > 1:
            sums = sums.unfold(axis, side, 1).sum(-1)
    beside = [(0, n - m) for n, m in zip(removed.shape[1:], sums.shape[1:], strict=True)]
    return torch.nn.functional.pad(sums, [n for pair in reversed(beside) for n in pair]).flatten(1)


def _summed(step: Step, images: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Return sums of weight x change, of that of the next state (unless it is the estimate) and of weights, (K, C, N).

    And the groups that lose too many digits in the precision of the images, (C, G): they are filtered in float64.
    """
    kinds, rounded = 2 if step.leave == 0 else 3, images[0].dtype
    sums = torch.zeros(kinds, *images[0].shape, dtype=rounded, device=images[0].device)
    poor: list[Tensor] = []

    def work(chunk: _Chunk) -> tuple[_Chunk, list[Tensor], Tensor]:
        with torch.no_grad():
            values, lost = _weighted(step, chunk, *_lifted(step, chunk, images))
            return chunk, values, lost

    with workers_for(sums.device) as workers:
        for chunk, values, lost in in_order(work, _chunks(step, workers), workers):
            chunk.add(values, sums)
            poor.append(lost)
            step.during(sum(one.shape[1] for one in poor) / len(step.members))
        losing = torch.cat(poor, dim=1)
        several = losing.any(dim=0)
        count, fewest, finite = torch.stack(
            (several.sum(), step.counts.amin().long(), sums.isfinite().all().long())
        ).tolist()  # fmt: skip
        step.check(fewest > 0, bool(finite or count))
        if count:
            which = torch.nonzero_static(several, size=count)[:, 0]
            for chunk, values, _ in in_order(work, _chunks(step, workers, losing, which), workers):
                chunk.add(values, sums)
            step.check(True, bool(sums.isfinite().all()))
    return sums, losing


class _Summed(torch.autograd.Function):
    """`_summed` with its derivative."""

    @staticmethod
    def forward(ctx: Any, step: Step, *images: Tensor) -> Tensor:
        sums, losing = _summed(step, list(images))
        ctx.save_for_backward(*images, losing)
        ctx.step = step
        return sums

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise InputError(
                "create_graph: got True, expected False: the denoiser has first derivatives only; take differences of "
                "gradients for second ones"
            )
        *images, losing = ctx.saved_tensors
        step: Step = ctx.step
        results = [torch.zeros_like(one) for one in images]

        def work(chunk: _Chunk) -> tuple[_Chunk, list[Tensor]]:
            with torch.enable_grad():
                tokens: Any = [
                    one if one is None else one.detach().requires_grad_() for one in _lifted(step, chunk, images)
                ]
                values, _ = _weighted(step, chunk, *tokens)
            wanted = [chunk.lift(one) for one in gradient]
            given = [one for one in tokens if one is not None]
            found: Any = torch.autograd.grad(values, given, wanted, allow_unused=True)
            return chunk, [torch.zeros_like(t) if g is None else g for g, t in zip(found, given, strict=True)]

        which = losing.any(dim=0).nonzero()[:, 0]
        with exact_products(gradient.device), workers_for(gradient.device) as workers:
            chunks = [*_chunks(step, workers)]
            chunks += _chunks(step, workers, losing, which) if len(which) else []
            for chunk, parts in in_order(work, chunks, workers):
                for part, result in zip(parts, results, strict=True):
                    chunk.add([part], result[None])
        return None, *results


@dataclass(frozen=True)
class _Chunk:
    """Some groups, and where their patches lie."""

    # - corners : (g n,)
    # - places : (g n D,)
    # - shape : (g, n, D)
    # - there : (g, n, 1) or None; 1 for members, 0 for what stands where a group has fewer than n.
    # - poor : (C, g) or None; Which groups are filtered here, in float64; None for all that do not lose too many
    #   digits.

    corners: Tensor
    places: Tensor
    shape: tuple[int, int, int]
    there: Tensor | None
    poor: Tensor | None

    def lift(self, planes: Tensor) -> Tensor:
        """Return the tokens (C, g, n, D) of planes (C, N)."""
        # One line by itself is read twice as fast.
        found = planes[0].index_select(0, self.places) if len(planes) == 1 else planes.index_select(1, self.places)
        tokens = found.view(len(planes), *self.shape)
        return tokens if self.poor is None else tokens.double()

    def lift_corners(self, planes: Tensor) -> Tensor:
        """Return what planes (C, N) hold at the corners of patches, (C, g, n, 1)."""
        return planes.index_select(1, self.corners).view(len(planes), *self.shape[:2], 1)

    def add(self, values: list[Tensor], sums: Tensor) -> None:
        """Add tokens (C, g, n, D), or what belongs to their corners (C, g, n, 1), to sums (K, C, N)."""
        for tokens, planes in zip(values, sums, strict=True):
            index = self.places if tokens.shape[-1] == self.shape[-1] else self.corners
            # One line at a time: then torch has an order of its own for sums on a GPU, where that is asked for.
            for source, target in zip(tokens, planes, strict=True):
                target.scatter_add_(0, index, source.flatten().to(target.dtype))

    def count(self, like: Tensor) -> float | Tensor:
        """Return the members of each group, (g, 1), or of all."""
        return float(self.shape[1]) if self.there is None else self.there.sum(1).to(like.dtype)

    def masked(self, tokens: Tensor) -> Tensor:
        """Return tokens with 0 where there is no member."""
        return tokens if self.there is None else tokens * self.there.to(tokens.dtype)

    def mean(self, tokens: Tensor) -> Tensor:
        """Return the mean token of each group, (C, g, 1, D)."""
        if self.there is None:
            return tokens.mean(-2, keepdim=True)
        return self.masked(tokens).sum(-2, keepdim=True) / self.there.sum(1, keepdim=True).to(tokens.dtype)

    def centred(self, tokens: Tensor) -> Tensor:
        """Return tokens about their mean; they are written over where that has no derivative."""
        mean = self.mean(tokens)
        return self.masked(tokens - mean if tokens.requires_grad else tokens.sub_(mean))


def _lifted(step: Step, chunk: _Chunk, images: list[Tensor]) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the tokens of the state and of the pilot, where it is another image, and sums over the patches."""
    state, pilot, boxes = step.kinds(images)
    return (
        chunk.lift(state),
        None if pilot is None else chunk.lift(pilot),
        None if boxes is None else chunk.lift_corners(boxes),
    )


def _chunks(step: Step, workers: int, losing: Tensor | None = None, which: Tensor | None = None) -> Iterator[_Chunk]:
    """Give all groups in chunks, or some of them, which lose too many digits."""
    most, size = step.members.shape[1], len(step.within)
    groups = len(step.members if which is None else which)
    together = share(groups, max(1, step.numbers // (_HELD * len(step.variance) * most * size)), workers)
    for start in range(0, groups, together):
        part: Any = slice(start, start + together)
        if which is not None:
            part = which[part]
        corners, there = step.members[part].long(), None
        if not step.full:
            there = (torch.arange(most, device=corners.device) < step.counts[part][:, None])[..., None]
        places = (corners[..., None] + step.within).flatten()
        poor = None if losing is None else losing[:, part]
        yield _Chunk(corners.flatten(), places, (*corners.shape, size), there, poor)


def _weighted(
    step: Step, chunk: _Chunk, z: Tensor, pilot: Tensor | None, boxes: Tensor | None
) -> tuple[list[Tensor], Tensor]:
    """Return tokens of weight x change, that of the next state, and weight; and which groups lose too many digits.

    A change is what is taken from the state. Those have weight 0 here, where they are not filtered in float64.
    """
    count, matrices = chunk.count(z), step.matrices.to(z.dtype)
    if step.variance.shape[1] == 1:
        own = step.variance.to(z.dtype)[..., None].expand(len(z), z.shape[1], z.shape[3])
    else:
        own = chunk.mean(chunk.lift(step.variance)).to(z.dtype)[..., 0, :]
    total = own.mean(-1, keepdim=True)
    left = None
    if boxes is not None:
        spread = _spread(chunk, boxes, z.shape[-1]).to(z.dtype)
        left = (1 - root(spread / total)).clamp(min=max(step.leave, _LEAST))
        own = own * left.square()
    if step.factor != 1:
        own = own * step.factor
    centred = chunk.centred(z)
    source = centred if pilot is None else chunk.centred(pilot)
    covariance = source.mT @ source
    trace = torch.diagonal(covariance, dim1=-2, dim2=-1).sum(-1, keepdim=True) / count
    # Less noise than this drowns in rounding. It counts as so much; where that is more than the noise of the input the
    # group is left as it is.
    least = count * step.rounding[1] * trace
    idle = least > total
    own = torch.maximum(own, least)
    lost = torch.zeros_like(idle)
    if chunk.poor is not None:
        masked = idle | ~chunk.poor[..., None]
    elif z.dtype == torch.float64:
        masked = idle
    else:
        lost = _lost(step, own, trace, count) & ~idle
        masked = idle | lost
    own = torch.where(masked, trace + total, own)  # so much that a factor exists
    filtered, scale, variance = wiener(covariance, own, count, step.shrink, matrices)
    idle, variance, variances = idle[..., None], variance[..., None, :], total[..., None]
    if step.across == 0:
        weight = _weights(chunk, variance, variances, idle, masked[..., None])
        # One product gives weight x change.
        scale = torch.where(masked[..., None], 0, scale[..., None, :] * weight)
        removed = centred @ (filtered * scale)
    else:
        own_change = centred @ (filtered * scale[..., None, :])
        source = torch.where(masked[..., None], 0, source)
        change, across = across_members(centred, source, own, count)
        change = own_change + step.across * (change - own_change)
        weight = _weights(chunk, variance + step.across * (across - variance), variances, idle, masked[..., None])
        removed = torch.where(masked[..., None], 0, weight * change)
    values = [removed]
    if step.leave > 0:
        values.append(removed * (1 - step.leave if left is None else (1 - step.leave / left)[..., None]))
    return [*values, chunk.masked(weight.expand_as(removed))], lost[..., 0]


def _weights(chunk: _Chunk, variance: Tensor, untouched: Tensor, idle: Tensor, masked: Tensor) -> Tensor:
    """Return inverse variances; those of the input where groups are idle, and 0 where they are filtered elsewhere."""
    weight = torch.where(idle, 1 / untouched, torch.where(masked, 0, 1 / variance))
    return weight if chunk.poor is None else torch.where(chunk.poor[..., None, None], weight, 0)


def _lost(step: Step, own: Tensor, trace: Tensor, count: float | Tensor) -> Tensor:
    """Return which groups (C, g, 1) lose too many digits in single precision."""
    extremes = step.matrices.extremes
    most, fewest = own.amax(-1, keepdim=True), own.amin(-1, keepdim=True)
    if extremes is not None:
        most, fewest = most * extremes[:, None, 1:], fewest * extremes[:, None, :1]
    lost = ~(count * step.rounding[0] * (trace + most) < fewest)
    if step.across > 0:
        ridge = own.sum(-1, keepdim=True)
        lost = lost | ~(count * step.rounding[0] * (ridge + count * trace) < ridge)
    return lost


def _spread(chunk: _Chunk, boxes: Tensor, size: int) -> Tensor:
    """Return the variance over all samples of a group, (C, g, 1), from the sums over its patches (2 C, g, n, 1)."""
    sums = chunk.masked(boxes).sum(-2)
    count = chunk.count(boxes)
    first, second = (sums / (count * size)).chunk(2)
    return (second - first.square()).clamp(min=0)
