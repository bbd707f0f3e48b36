"""The local Wiener step with a program for each group."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from nlflow.backends.torch.groups import averages

Three = tuple[int, int, int]
_TILE = 16  # members that a program holds at a time
_LOOPS = 4  # of the elimination
_INVERSE, _POLYNOMIAL, _COSINES = 0, 1, 2


@triton.jit
def _places(members, counts, group, tile, height, width, PY: tl.constexpr, PX: tl.constexpr, SIZE: tl.constexpr,
            MEMBERS: tl.constexpr, TILE: tl.constexpr, SIDE: tl.constexpr):  # fmt: skip
    """Return where the samples of some members of a group lie in a plane, and which there are."""
    at, member = tl.arange(0, SIDE), tile * TILE + tl.arange(0, TILE)
    mine = member < tl.load(counts + group)
    corners = tl.load(members + group.to(tl.int64) * MEMBERS + member, mask=mine, other=0)
    within = (at // (PY * PX) * height + at // PX % PY) * width + at % PX
    # Neighbours in a patch are neighbours in the image, mostly: so neighbouring threads have them.
    places = tl.max_contiguous(corners[:, None] + within[None, :], [1, 2])
    return places, mine[:, None] & (at < SIZE)[None, :]


@triton.jit
def _rows(number, SIZE: tl.constexpr, SIDE: tl.constexpr):
    """Return where the rows of a matrix lie among those of all, and which there are."""
    at = tl.arange(0, SIDE)
    return (number * SIZE + at)[:, None] * SIDE + at[None, :], (at < SIZE)[:, None] & (at < SIDE)[None, :]


@triton.jit(
    do_not_specialize=["first", "groups", "height", "width", "samples", "leave", "factor", "narrow", "wide"],
    do_not_specialize_on_alignment=["state", "pilot", "observed", "variance", "members", "counts", "lost"],
)  # fmt: skip
def _prepare(
    state, pilot, observed, variance, members, counts, lost, matrices, deviations, figures, first, groups, height,
    width, samples, leave: tl.float64, factor: tl.float64, narrow: tl.float64, wide: tl.float64,
    PZ: tl.constexpr, PY: tl.constexpr, PX: tl.constexpr, MEMBERS: tl.constexpr, TILE: tl.constexpr,
    SIDE: tl.constexpr, FORM: tl.constexpr, RUNNING: tl.constexpr, UNIFORM: tl.constexpr, REAL: tl.constexpr,
    PASS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Form 1 + N^-1/2 C N^-1/2 of one group in one plane (without the 1 along a basis), and what is known of its noise.

    PASS is 0 for a first one, which tells which groups lose too many digits, 1 for one of these groups alone, 2 for one
    of all groups that tells nothing. The last two have the lower factor in the place of the matrix, as `_factor` has.
    """
    leave, factor = tl.full([], leave, REAL), tl.full([], factor, REAL)
    narrow, wide = tl.full([], narrow, REAL), tl.full([], wide, REAL)
    slot, plane, planes = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    group = first + slot
    flag = lost + plane * groups + group
    if PASS == 1:  # noqa: SIM102  # the flag is read in this pass alone
        if tl.load(flag) == 0:
            return
    SIZE: tl.constexpr = PZ * PY * PX
    TILES: tl.constexpr = (MEMBERS + TILE - 1) // TILE
    at = tl.arange(0, SIDE)
    sample = at < SIZE
    begin = plane.to(tl.int64) * samples
    count = tl.load(counts + group)
    share = 1.0 / count.to(REAL)
    pilots = tl.zeros([TILE, SIDE], REAL)
    noises = tl.zeros([TILE, SIDE], REAL)
    shifts = tl.zeros([TILE, SIDE], REAL)
    powers = tl.zeros([TILE, SIDE], REAL)
    for tile in range(TILES):
        places, there = _places(members, counts, group, tile, height, width, PY, PX, SIZE, MEMBERS, TILE, SIDE)
        pilots += tl.load(pilot + begin + places, mask=there, other=0.0).to(REAL)
        if not UNIFORM:
            noises += tl.load(variance + begin + places, mask=there, other=0.0).to(REAL)
        if RUNNING:
            removed = tl.load(observed + begin + places, mask=there, other=0.0).to(REAL)
            removed -= tl.load(state + begin + places, mask=there, other=0.0).to(REAL)
            shifts += removed
            powers += removed * removed
    mean = tl.sum(pilots, axis=0) * share
    matrix = tl.zeros([SIDE, SIDE], REAL)
    for tile in range(TILES):
        places, there = _places(members, counts, group, tile, height, width, PY, PX, SIZE, MEMBERS, TILE, SIDE)
        source = tl.load(pilot + begin + places, mask=there, other=0.0).to(REAL)
        source = tl.where(there, source - mean[None, :], 0.0)
        matrix = tl.dot(tl.trans(source), source, matrix, input_precision=PRECISION, out_dtype=REAL)
    matrix = matrix * share
    # The noise of the group: in each sample of a patch the mean over its members.
    if UNIFORM:
        own = tl.where(sample, tl.load(variance + plane).to(REAL), 0.0)
    else:
        own = tl.sum(noises, axis=0) * share
    total = tl.sum(own, axis=0) * (1.0 / SIZE)
    # How much of it is left in the state.
    left = total * 0.0 + 1.0
    if RUNNING:
        every = 1.0 / (count * SIZE).to(tl.float64)
        shift = tl.sum(tl.sum(shifts, axis=0).to(tl.float64), axis=0) * every
        power = tl.sum(tl.sum(powers, axis=0).to(tl.float64), axis=0) * every
        spread = tl.maximum(power - shift * shift, 0.0)
        left = tl.maximum(1.0 - tl.sqrt(spread.to(REAL) / total), tl.maximum(leave, tl.full([], 1e-3, REAL)))
    own = own * (left * left * factor)
    diagonal = at[:, None] == at[None, :]
    trace = tl.sum(tl.sum(tl.where(diagonal, matrix, 0.0), axis=1), axis=0)
    # Less noise than this drowns in rounding. It counts as so much; where that is more than the noise of the input the
    # group is left as it is.
    least = count.to(REAL) * wide * trace
    idle = least > total
    own = tl.where(sample, tl.maximum(own, least), 1.0)
    if PASS == 0:
        # The first inverse is that of 1 + N^-1/2 C N^-1/2, and its errors do not grow with the members; along a basis
        # nothing is inverted, and coefficients alone are rounded.
        fewest = tl.min(tl.where(sample, own, float("inf")), axis=0)
        errors = narrow * (trace + tl.max(tl.where(sample, own, 0.0), axis=0)) / fewest
        if FORM == 0:
            errors = errors * count.to(REAL)
        if FORM == 2:
            errors = errors * narrow
        poor = tl.where(idle, 0, tl.where(errors < 1.0, 0, 1))
        tl.store(flag, poor.to(tl.int8))
        if poor != 0:
            return
    deviation = tl.where(idle, 0.0, tl.sqrt(own))  # which tells later that the group is idle
    scale = tl.where(idle, 0.0, 1.0 / tl.sqrt(own))
    matrix = matrix * (scale[:, None] * scale[None, :])
    if FORM != 2:
        matrix += tl.where(diagonal, 1.0, 0.0).to(REAL)
        if PASS != 0:
            matrix = _lower(matrix, SIZE, SIDE, REAL)
    number = slot.to(tl.int64) * planes + plane
    rows, inside = _rows(number, SIZE, SIDE)
    tl.store(matrices + rows, matrix.to(matrices.dtype.element_ty), mask=inside)
    tl.store(deviations + number * SIDE + at, deviation.to(deviations.dtype.element_ty))
    tl.store(figures + 2 * number, (1.0 - leave / left).to(figures.dtype.element_ty))
    tl.store(figures + 2 * number + 1, (1.0 / total).to(figures.dtype.element_ty))


@triton.jit
def _lower(matrix, size, SIDE: tl.constexpr, REAL: tl.constexpr):
    """Return W = D^-1/2 L^-1 of a matrix L D L', whose inverse is W'W: as `_factor`, for few matrices."""
    at = tl.arange(0, SIDE)
    i, j = at[:, None], at[None, :]
    pivots = tl.full([SIDE], 1.0, REAL)
    for k in range(size):
        row = tl.sum(tl.where(i == k, matrix, 0.0), axis=0)
        pivot = tl.sum(tl.where(at == k, row, 0.0), axis=0)
        below = tl.where(at > k, row / pivot, 0.0)
        taken = tl.where(at == k, 1.0, row)
        pivots = tl.where(at == k, pivot, pivots)
        matrix = tl.where(j == k, 0.0, matrix) - below[:, None] * taken[None, :]
    lower = tl.where(i > j, matrix, 0.0) + tl.where(i == j, 1.0, 0.0)
    return lower * (1.0 / tl.sqrt(pivots))[:, None]


@triton.jit(do_not_specialize=["first", "groups"], do_not_specialize_on_alignment=["lost"])
def _factor(matrices, lost, first, groups, SIZE: tl.constexpr, SIDE: tl.constexpr, STEP: tl.constexpr):
    """Replace a matrix L D L' by W = D^-1/2 L^-1, whose inverse is W'W; not where a group loses too many digits.

    Elimination needs no pivots. A row lies across the threads of one warp, and each thread holds its part of all rows:
    nothing but the multiples of a row is passed on. What is left of the matrix and what there is of L^-1 share the
    place; multiples are those of the row itself, as the matrix is symmetric. A loop ends after some rows, as those that
    are done with cost as much as others.
    """
    slot, plane, planes = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    if tl.load(lost + plane * groups + first + slot) != 0:
        return
    at = tl.arange(0, SIDE)
    base = matrices + (slot.to(tl.int64) * planes + plane) * (SIZE * SIDE) + at
    none = at * 0
    rows = ()
    for i in tl.static_range(SIZE):
        rows = rows + (tl.load(base + i * SIDE),)  # type: ignore[assignment]  # noqa: RUF005  # triton knows no other
    for start in tl.static_range(0, SIZE, STEP):
        for k in range(start, min(start + STEP, SIZE)):
            row = rows[0]  # type: ignore[misc]
            pivot = tl.gather(row, none + k, 0)
            multiples = row / pivot
            here = at == k
            taken = tl.where(here, 1.0, row)
            tl.store(base + k * SIDE, tl.where(at <= k, taken, 0.0) / tl.sqrt(pivot))
            rest = ()
            for i in tl.static_range(1, SIZE - start):
                multiple = tl.gather(multiples, none + tl.minimum(k + i, SIDE - 1), 0)
                rest = rest + (tl.where(here, 0.0, rows[i]) - multiple * taken,)  # type: ignore[assignment]  # noqa: RUF005
            rows = rest + (row,)  # type: ignore[assignment]  # noqa: RUF005
        rows = rows[: SIZE - start - STEP]  # type: ignore[assignment]


@triton.jit
def _terms(powers, s, square, one, REAL: tl.constexpr):
    """Return three terms of a polynomial."""
    q0, q1, q2 = tl.load(powers), tl.load(powers + 1), tl.load(powers + 2)
    return q0.to(REAL) * one + q1.to(REAL) * s + q2.to(REAL) * square


@triton.jit(
    do_not_specialize=["first", "height", "width", "samples", "shrink"],
    do_not_specialize_on_alignment=["state", "members", "counts", "sums", "basis", "powers"],
)  # fmt: skip
def _apply(
    state, members, counts, matrices, deviations, figures, basis, powers, sums, first, height, width, samples,
    shrink: tl.float64, PZ: tl.constexpr, PY: tl.constexpr, PX: tl.constexpr, MEMBERS: tl.constexpr, TILE: tl.constexpr,
    SIDE: tl.constexpr, FORM: tl.constexpr, FOLLOWING: tl.constexpr, REAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Filter one group in one plane, and put its patches back."""
    slot, plane, planes = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    group = first + slot
    SIZE: tl.constexpr = PZ * PY * PX
    TILES: tl.constexpr = (MEMBERS + TILE - 1) // TILE
    at = tl.arange(0, SIDE)
    number = slot.to(tl.int64) * planes + plane
    rows, inside = _rows(number, SIZE, SIDE)
    matrix = tl.load(matrices + rows, mask=inside, other=0.0)
    one = tl.where(at[:, None] == at[None, :], 1.0, 0.0).to(REAL)
    if FORM == 2:
        columns = tl.load(basis + at[:, None] * SIDE + at[None, :]).to(REAL)
        values = tl.dot(matrix, columns, input_precision=PRECISION, out_dtype=REAL)
        gains = 1.0 / (tl.maximum(tl.sum(values * columns, axis=0) - tl.full([], shrink, REAL), 0.0) + 1.0)
        filter = tl.dot(columns * gains[None, :], tl.trans(columns), input_precision=PRECISION, out_dtype=REAL)
    else:
        filter = tl.dot(tl.trans(matrix), matrix, input_precision=PRECISION, out_dtype=REAL)
    if FORM == 1:
        s = 2.0 * filter - one
        square = tl.dot(s, s, input_precision=PRECISION, out_dtype=REAL)
        cube = tl.dot(s, square, input_precision=PRECISION, out_dtype=REAL)
        p = _terms(powers + 6, s, square, one, REAL)
        p = tl.dot(cube, p, _terms(powers + 3, s, square, one, REAL), input_precision=PRECISION, out_dtype=REAL)
        p = tl.dot(cube, p, _terms(powers, s, square, one, REAL), input_precision=PRECISION, out_dtype=REAL)
        filter = tl.dot(filter, p, input_precision=PRECISION, out_dtype=REAL)
    # Inverse variances: that of the filter, and that of the mean.
    share = 1.0 / tl.load(counts + group).to(REAL)
    deviation = tl.load(deviations + number * SIDE + at)
    kept = tl.maximum(1.0 - tl.sum(one * filter, axis=0), 0.0) * (1.0 - share) + share
    idle = deviation == 0.0
    scale = tl.where(idle, 0.0, 1.0 / tl.where(idle, 1.0, deviation))
    weight = tl.where(idle, tl.load(figures + 2 * number + 1), scale * scale / kept)[None, :]
    filter = filter * (scale[:, None] * deviation[None, :])
    begin = plane.to(tl.int64) * samples
    total = tl.zeros([TILE, SIDE], REAL)
    for tile in range(TILES):
        places, there = _places(members, counts, group, tile, height, width, PY, PX, SIZE, MEMBERS, TILE, SIDE)
        total += tl.load(state + begin + places, mask=there, other=0.0)
    mean = tl.sum(total, axis=0) * share
    keep = tl.load(figures + 2 * number)
    line = planes.to(tl.int64) * samples
    for tile in range(TILES):
        places, there = _places(members, counts, group, tile, height, width, PY, PX, SIZE, MEMBERS, TILE, SIDE)
        z = tl.load(state + begin + places, mask=there, other=0.0)
        centred = tl.where(there, z - mean[None, :], 0.0)
        change = tl.dot(centred, filter, input_precision=PRECISION, out_dtype=REAL)
        target = sums + begin + places
        tl.atomic_add(target, weight * change, mask=there, sem="relaxed")
        if FOLLOWING:
            target += line
            tl.atomic_add(target, weight * keep * change, mask=there, sem="relaxed")
        tl.atomic_add(target + line, tl.broadcast_to(weight, [TILE, SIDE]), mask=there, sem="relaxed")


@dataclass(frozen=True)
class Step:
    """A step on groups of images with white noise; attributes as those of `nlflow.backends.torch.groups.Step`."""

    members: Tensor
    counts: Tensor
    shape: Three
    patch: Three
    variance: Tensor
    basis: Tensor | None
    powers: tuple[float, ...]
    leave: float
    factor: float
    shrink: float
    running: bool
    rounding: tuple[float, float]
    numbers: int

    def __call__(self, state: Tensor, pilot: Tensor, observed: Tensor) -> tuple[Tensor, Tensor]:
        """Return the estimate and the next state, without derivatives."""
        state, pilot, observed = (one.detach().reshape(len(state), -1) for one in (state, pilot, observed))
        made = averages(self._sums(state, pilot, observed), state)
        return made[0].view(len(state), *self.shape), made[-1].view(len(state), *self.shape)

    def _sums(self, state: Tensor, pilot: Tensor, observed: Tensor) -> Tensor:
        """Return sums of weight x change, of that of the next state (unless it is the estimate) and of weights.

        The order in which they are formed is left to the device. Groups that lose too many digits in the precision of
        the images are filtered in float64; the device is asked whether there are any.
        """
        device, real, (planes, samples) = state.device, state.dtype, state.shape
        size, (groups, members) = math.prod(self.patch), self.members.shape
        side, tile = (max(triton.next_power_of_2(n), 16) for n in (size, min(members, _TILE)))
        form = _INVERSE if self.shrink == 0 else _POLYNOMIAL if self.basis is None else _COSINES
        basis = powers = self.variance  # which nothing reads there
        if form == _COSINES and self.basis is not None:
            basis = torch.zeros(side, side, dtype=torch.float64, device=device)
            basis[:size, :size] = self.basis
        if form == _POLYNOMIAL:
            powers = torch.tensor(self.powers, dtype=torch.float64, device=device)
        sums = torch.zeros(2 if self.leave == 0 else 3, planes, samples, dtype=real, device=device)
        lost = torch.empty(planes, groups, dtype=torch.int8, device=device)
        images = [one.contiguous() for one in (state, pilot, observed)]
        variance = self.variance.to(real).contiguous()
        together = max(1, min(groups, self.numbers // (planes * size * side)))
        matrices = torch.empty(together, planes, size, side, dtype=real, device=device)
        deviations = torch.empty(together, planes, side, dtype=real, device=device)
        figures = torch.empty(together, planes, 2, dtype=real, device=device)
        single = real == torch.float32
        wide, own = (tl.float64, "ieee"), (tl.float32, "tf32x3") if single else (tl.float64, "ieee")
        shapes, warps = (*self.patch, members, tile, side), {"num_warps": _warps(side), "num_stages": 1}
        for first in range(0, groups, together):
            grid = (min(together, groups - first), planes)
            given = (
                *images, variance, self.members, self.counts, lost, matrices, deviations, figures, first, groups,
                *self.shape[1:], samples, self.leave, self.factor, *self.rounding, *shapes, form, self.running,
                variance.shape[1] == 1,
            )  # fmt: skip
            with torch.cuda.device_of(state):
                _prepare[grid](*given, own[0], 0 if single else 2, own[1], **warps)
                if single and form != _COSINES:
                    _factor[grid](matrices, lost, first, groups, size, side, -(-size // _LOOPS), num_warps=1)
                if single and bool(lost[:, first : first + together].any()):
                    _prepare[grid](*given, wide[0], 1, wide[1], **warps)
                _apply[grid](
                    images[0], self.members, self.counts, matrices, deviations, figures, basis, powers, sums, first,
                    *self.shape[1:], samples, self.shrink, *shapes, form, self.leave > 0, *own, **warps,
                )  # fmt: skip
        return sums


def _warps(side: int) -> int:
    """Return how many warps hold matrices of a side."""
    return min(max(side // 16, 1), 8)
