"""The motion of blocks from one frame to the next: where their difference varies least."""

from numba import njit, prange, types

from nlflow.backends.numba.loading import loader

_FLAGS = {"contract", "reassoc", "nnan", "ninf", "nsz"}


@njit(fastmath=_FLAGS)
def _difference(first, second, top, left, side, dy, dx):
    """Return the variance of the difference of a block and a displaced one over what lies in both frames, or -1.

    A variance, as the light may change from frame to frame.
    """
    H, W = first.shape
    up = max(top, -dy, 0)
    down = min(top + side, H - dy, H)
    start = max(left, -dx, 0)
    stop = min(left + side, W - dx, W)
    if down - up < side // 2 or stop - start < side // 2:
        return -1.0
    total = 0.0
    shift = 0.0
    for y in range(up, down):
        here = first[y, start:stop]
        there = second[y + dy, start + dx : stop + dx]
        squares = first.dtype.type(0)
        sums = first.dtype.type(0)
        for x in range(stop - start):
            squares += (here[x] - there[x]) * (here[x] - there[x])
            sums += here[x] - there[x]
        total += squares
        shift += sums
    count = (down - up) * (stop - start)
    return max(total / count - (shift / count) ** 2, 0.0)


@njit(parallel=True, cache=True, fastmath=_FLAGS)
def match_blocks(first, second, guess, step, side, radius, least, moved):
    """Find where blocks of a frame have moved to in another.

    Parameters
    ----------
    first, second : (H, W)
    guess : (A, B, 2) int32
        Rows and columns by which the blocks are expected to move.
    step, side, radius : int
        Distance of the middles of blocks, the first at half of it; side of a block; how far from the guess is looked.
    least : float
        A displacement has to lower the variance of the difference by this part of it to be preferred to the guess and
        to none.
    moved : (A, B, 2) int32, output
    """
    for a in prange(guess.shape[0]):
        for b in range(guess.shape[1]):
            top = a * step + step // 2 - side // 2
            left = b * step + step // 2 - side // 2
            best_y = 0
            best_x = 0
            lowest = _difference(first, second, top, left, side, 0, 0)
            found = _difference(first, second, top, left, side, guess[a, b, 0], guess[a, b, 1])
            if 0 <= found < lowest:
                lowest = found
                best_y = guess[a, b, 0]
                best_x = guess[a, b, 1]
            lowest *= 1 - least
            for dy in range(guess[a, b, 0] - radius, guess[a, b, 0] + radius + 1):
                for dx in range(guess[a, b, 1] - radius, guess[a, b, 1] + radius + 1):
                    found = _difference(first, second, top, left, side, dy, dx)
                    if 0 <= found < lowest:
                        lowest = found
                        best_y = dy
                        best_x = dx
            moved[a, b, 0] = best_y
            moved[a, b, 1] = best_x


def _loops(real):
    frame, field = types.Array(real, 2, "C"), types.Array(types.int32, 3, "C")
    number = types.int64
    return {"match_blocks": (match_blocks, frame, frame, field, number, number, number, types.float64, field)}


loop = loader(_loops)
