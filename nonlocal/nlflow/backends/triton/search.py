"""The search for groups of alike patches with a program for each reference."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

Three = tuple[int, int, int]
_ROOM = 256  # members, for most of which one kernel serves
_LANES = 16  # distances that a thread holds, about


@triton.jit(
    do_not_specialize=[
        "n_rows", "n_columns", "n_slices", "depth", "height", "width", "radius_z", "radius_y", "radius_x", "wanted",
    ],
    do_not_specialize_on_alignment=["guide", "slices", "rows", "columns", "rank", "members", "counts"],
)  # fmt: skip
def _find(
    guide, slices, rows, columns, rank, members, counts, n_slices, n_rows, n_columns, depth, height, width, radius_z,
    radius_y, radius_x, rounding, wanted, PLANES: tl.constexpr,
    PZ: tl.constexpr, PY: tl.constexpr, PX: tl.constexpr, ROOM: tl.constexpr,
    LANES: tl.constexpr,
):  # fmt: skip
    reference = tl.program_id(0)
    z = tl.load(slices + reference // (n_rows * n_columns))
    y = tl.load(rows + reference // n_columns % n_rows)
    x = tl.load(columns + reference % n_columns)
    own = (z * height + y) * width + x
    # Offsets of the window lie in lanes, in C order.
    lane = tl.arange(0, LANES)
    side, layer = 2 * radius_x + 1, (2 * radius_y + 1) * (2 * radius_x + 1)
    offsets = (2 * radius_z + 1) * layer
    there_z = z + lane // layer - radius_z
    there_y = y + lane // side % (2 * radius_y + 1) - radius_y
    there_x = x + lane % side - radius_x
    inside = (lane < offsets) & (there_z >= 0) & (there_z <= depth - PZ) & (there_y >= 0) & (there_y <= height - PY)
    inside = inside & (there_x >= 0) & (there_x <= width - PX)
    corner = tl.where(inside, (there_z * height + there_y) * width + there_x, own)
    other = inside & (lane != offsets // 2)
    distance = tl.zeros([LANES], tl.float64)
    largest = tl.sum(distance, axis=0)
    square = largest
    for c in range(PLANES):
        for k in range(PZ):
            for r in range(PY):
                at = guide + ((c * depth + k) * height + r) * width
                for s in tl.static_range(PX):
                    value = tl.load(at + s + own).to(tl.float64)
                    gap = tl.load(at + s + corner).to(tl.float64) - value
                    distance += gap * gap
                    largest = tl.maximum(largest, tl.abs(value))
                    square += value * value
    # The least distance that enough patches reach: by bisection, as counting takes no places.
    found = tl.sum(other.to(tl.int32), axis=0)
    enough = found >= wanted - 1
    distance = tl.where(other, distance, float("inf"))
    high = tl.max(tl.where(other, distance, 0.0), axis=0)
    low = high * 0.0
    going = enough & (tl.sum((distance <= low).to(tl.int32), axis=0) < wanted - 1) & (wanted > 1)
    high = tl.where(going, high, low)
    while going:
        middle = low + 0.5 * (high - low)
        below = tl.sum((distance <= middle).to(tl.int32), axis=0)
        going = (below != wanted - 1) & (low < middle) & (middle < high)
        high = tl.where(below >= wanted - 1, middle, high)
        low = tl.where(below >= wanted - 1, low, middle)
    limit = tl.max(tl.where(distance <= high, distance, 0.0), axis=0)
    # What rounding makes equal; see `nlflow.backends.torch.search`.
    m = tl.full([], PLANES * PZ * PY * PX, tl.float64)
    root = tl.sqrt(limit)
    reach = 2.0 * tl.sqrt(square) + root
    slack = rounding * ((m + 3) * limit + 4.0 * (largest + root) * tl.sqrt(m) * root)
    slack += 2.220446049250313e-16 * (m + 3) * reach * reach
    sure = other & ((distance < limit - slack) | (found < wanted - 1))
    tied = other & (distance <= limit + slack) & (distance >= limit - slack) & enough
    needed = wanted - 1 - tl.sum(sure.to(tl.int32), axis=0)
    place = tl.load(rank + lane, mask=lane < offsets, other=LANES)
    first, last = needed * 0, needed * 0 + LANES
    searching = tl.sum(tied.to(tl.int32), axis=0) > needed
    while searching:
        between = (first + last) // 2
        before = tl.sum((tied & (place < between)).to(tl.int32), axis=0)
        searching = before != needed
        first = tl.where(before < needed, between, first)
        last = tl.where(before < needed, last, between)
    chosen = sure | (tied & (place < last))
    number = tl.cumsum(chosen.to(tl.int32), axis=0)
    count = 1 + tl.sum(chosen.to(tl.int32), axis=0)
    begin = members + reference.to(tl.int64) * wanted
    tl.store(begin + number, corner, mask=chosen)
    rest = tl.arange(0, ROOM)
    tl.store(begin + rest, own + rest * 0, mask=(rest == 0) | ((rest >= count) & (rest < wanted)))
    tl.store(counts + reference, count)


def find_groups(
    guide: Tensor, references: Sequence[Tensor], patch: Three, radii: Three, order: Tensor, members: int
) -> tuple[Tensor, Tensor]:
    # - guide : (C, Z, H, W); Of at most 2^31 samples.
    # - references : (A,), (B,), (E,); First samples of the patches of reference along the three axes.
    # - patch, radii: Along the three axes.
    # - order : (offsets,); The offsets of a window (in C order), by their length.
    # - members : int; n, wanted in a group; at most the number of offsets.
    # Returns:
    # - members : (A B E, n) int32; Corners of the patches, the reference first, then in C order; the reference again
    #   where there are too few.
    # - counts : (A B E,) int32
    # No number is asked of the device. Squared distances are sums of squared differences, in float64.
    device, (planes, *shape) = guide.device, guide.shape
    sides = [len(one) for one in references]
    places = [one.to(device, torch.int32) for one in references]
    rank = torch.empty(len(order), dtype=torch.int32, device=device)
    rank[order.to(device)] = torch.arange(len(order), dtype=torch.int32, device=device)
    found = torch.empty((math.prod(sides), members), dtype=torch.int32, device=device)
    counts = torch.empty(math.prod(sides), dtype=torch.int32, device=device)
    lanes = max(triton.next_power_of_2(len(order)), 32)
    with torch.cuda.device_of(guide):
        _find[(len(counts),)](
            guide.contiguous(), *places, rank, found, counts, *sides, *shape, *radii,
            torch.finfo(guide.dtype).eps, members, planes, *patch, max(triton.next_power_of_2(members), _ROOM), lanes,
            num_warps=min(max(lanes // (32 * _LANES), 1), 8),
        )  # fmt: skip
    return found, counts
