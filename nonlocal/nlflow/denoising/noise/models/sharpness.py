"""Samples sharper than optics."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from nlflow.denoising.noise.figures import QUARTILES, OfSharpness
from nlflow.denoising.noise.models.base import Array

Values = NDArray[np.float64]
Places = NDArray[np.intp]


@dataclass(frozen=True)
class Outliers:
    """Samples of one channel (H, W) that are sharper than optics allow (after van Dokkum 2001, doi 10.1086/323894)."""

    rows: Places
    columns: Places
    above: Values  # what is around
    excess: Values  # over what noise reaches
    alone: NDArray[np.bool_]  # no neighbour is far as well
    piece: Places  # a number, the same for those that hang together
    line: NDArray[np.bool_]  # in a piece that is longer than a track
    soft: bool  # whether the picture has no step that is as sharp
    absent: NDArray[np.bool_]

    @classmethod
    def of(cls, plane: Array, absent: NDArray[np.bool_], band: int | None = None) -> Self:
        """Look at samples, of which every `band` rows need not go on in the next."""
        z, unit = _filled(plane, absent)
        columns = z.shape[1]
        padded = np.pad(z, 2, mode="reflect" if min(z.shape) > 2 else "edge")
        off = [z - (padded[2:-2, 1:-3] + padded[2:-2, 3:-1]) / 2, z - (padded[1:-3, 2:-2] + padded[3:-1, 2:-2]) / 2]
        off[0][:, [0, -1]] = off[1][[0, -1]] = 0  # a slope would have a kink where it is mirrored
        if band is not None:
            off[1][::band] = off[1][band - 1 :: band] = 0
        bend = np.where(np.abs(off[0]) > np.abs(off[1]), *off).ravel()
        few = np.arange(0, bend.size, max(1, bend.size // OfSharpness.sampled) | 1)
        few = few[~absent.ravel()[few]]
        least, most = _noise(padded, few, columns, bend)
        if not 0 < most < math.inf:
            nothing, none = np.zeros(0), np.zeros(0, np.intp)
            return cls(none, none, nothing, nothing, none > 0, none, none > 0, True, absent)
        near = np.flatnonzero((np.abs(bend) > most * least) & ~absent.ravel())
        rows, along = np.divmod(near, columns)
        far = np.sort([padded[rows + i, along + j] for i, j in ((0, 2), (4, 2), (2, 0), (2, 4))], axis=0)
        beyond = np.where(bend[near] > 0, far[:2].mean(0), far[2:].mean(0))  # a line goes on to two of the four
        lined = near[_like(bend[near], z.ravel()[near] - beyond, OfSharpness.roughly)]
        near = near[_like(bend[near], z.ravel()[near] - far[1:3].mean(0), OfSharpness.roughly)]
        low, middle, high = _around(padded, near, columns)
        spread, values = np.maximum((high - low) / QUARTILES, least), z.ravel()[near]
        above = np.where(bend[near] > 0, values - low, values - high)  # on a ridge the median is high
        kept = (np.abs(bend[near]) > most * spread) & _like(bend[near], above, OfSharpness.sharp)
        near, above, middle = near[kept], above[kept], middle[kept]
        excess = np.abs(bend[near]) / (most * spread[kept])
        rows, along = np.divmod(near, columns)
        ring = [padded[rows + i, along + j] for i, j in itertools.product((1, 2, 3), repeat=2) if (i, j) != (2, 2)]
        beside = np.max((np.array(ring) - middle) * np.sign(above), axis=0) if len(near) else above
        alone = beside < OfSharpness.alone * np.abs(above)
        both = np.union1d(lined, near) if len(near) else near
        piece = _pieces(np.stack([*np.divmod(both, columns), 3 * np.sign(bend[both])], axis=-1))
        line = (np.bincount(piece) > OfSharpness.track)[piece]
        at = np.searchsorted(both, near)
        return cls(
            rows, along, unit * above, excess, alone, piece[at], line[at], _is_soft(z, most * least, band), absent
        )

    @property
    def found(self) -> NDArray[np.bool_]:
        """Those that the picture's own lines are not; in a sharp one those that are alone."""
        return np.asarray(~self.line if self.soft else self.alone)

    @property
    def mask(self) -> NDArray[np.bool_]:
        mask = np.zeros(self.absent.shape, bool)
        mask[self.rows[self.found], self.columns[self.found]] = True
        return mask

    @property
    def believed(self) -> bool:
        """Whether they are no part of the picture."""
        for chosen, least in ((self.found & self.soft, OfSharpness.least), (self.alone, OfSharpness.least_alone)):
            _, firsts = np.unique(self.piece[chosen], return_index=True)
            if len(firsts) < least or float(np.median(self.excess[chosen])) < OfSharpness.beyond:
                continue
            most = self.soft or np.count_nonzero(chosen) > OfSharpness.strewn * len(self.rows)
            places = np.stack([self.rows[chosen][firsts], self.columns[chosen][firsts]], axis=-1)
            least_tiles = OfSharpness.strewn_softly if self.soft else OfSharpness.strewn
            if most and _are_strewn(places, self.absent, least_tiles):
                return True
        return False


def _pieces(places: Values) -> Places:
    """Return a number for each place, the same for those that hang together, with gaps of a sample at most."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components
    from scipy.spatial import cKDTree

    if not len(places):
        return np.zeros(0, np.intp)
    pairs = cKDTree(places).query_pairs(2, p=math.inf, output_type="ndarray")
    touch = coo_array((np.ones(len(pairs), bool), tuple(pairs.T)), shape=(len(places),) * 2)
    return np.asarray(connected_components(touch, directed=False)[1], np.intp)


def _are_strewn(places: Places, absent: NDArray[np.bool_], least: float) -> bool:
    """Tell whether places are in as many parts of a picture as by chance, and neither close to each other nor even."""
    count, tiles = len(places), OfSharpness.tiles
    across, along = (np.eye(tiles)[:, np.arange(n) * tiles // n] for n in absent.shape)
    room = across @ (~absent).astype(np.float64) @ along.T
    expected = float(np.sum(1 - (1 - room / room.sum()) ** count))
    if np.count_nonzero(across[:, places[:, 0]] @ along[:, places[:, 1]].T) <= least * expected:
        return False
    if count < OfSharpness.least_alone:
        return True
    off = share_near(places, absent.shape, float(room.sum())) - 0.5
    return off <= OfSharpness.by_chance and (off >= -OfSharpness.by_chance or count < OfSharpness.lattice)


def share_near(places: Places, shape: tuple[int, ...], room: float) -> float:
    """Return how many places (n, 2) have another near: a half of places that are strewn over so many samples."""
    from scipy.spatial import cKDTree

    area = math.log(2) * room / len(places)
    reach = max(math.sqrt(area), area / min(shape)) / 2
    return float(np.mean(cKDTree(places).query(places, k=[2], p=math.inf)[0] <= reach))


def _filled(plane: Array, absent: NDArray[np.bool_]) -> tuple[Values, float]:
    """Return samples in units of the largest, missing ones as the mean of what is around them, and that unit."""
    known = np.where(absent, 0.0, plane.astype(np.float64))
    unit = float(np.abs(known).max()) or 1.0
    known /= unit
    if not absent.any():
        return known, unit
    from scipy.ndimage import uniform_filter

    share = uniform_filter((~absent).astype(np.float64), OfSharpness.filled)
    around = np.divide(uniform_filter(known, OfSharpness.filled), share, out=np.zeros_like(known), where=share > 1e-9)
    return np.where(absent, around, known), unit


def _around(padded: Values, places: Places, columns: int) -> Values:
    """Return the quartiles of the 24 samples around places."""
    rows, along = np.divmod(places, columns)
    window = [padded[rows + i, along + j] for i, j in itertools.product(range(5), repeat=2) if (i, j) != (2, 2)]
    ordered = np.sort(window, axis=0)
    return np.stack([ordered[5], ordered[11:13].mean(axis=0), ordered[17]])


def _noise(padded: Values, few: Places, columns: int, bend: Values) -> tuple[float, float]:
    """Return the least noise, and how many times the noise around it a sample is bent by chance, at most.

    From two quantiles of a few samples, by a tail that falls from the one to the other and on exponentially.
    """
    sizes = np.abs(bend[few])
    if len(sizes) < OfSharpness.least_sampled:
        return 0.0, 0.0
    least = float(np.sort(sizes)[: int((1 - OfSharpness.tail[1]) * len(sizes))].mean())
    if least == 0:
        return 0.0, 0.0
    low, _, high = _around(padded, few, columns)
    shares = np.array(OfSharpness.tail)
    first, last = np.quantile(sizes / np.maximum((high - low) / QUARTILES, least), 1 - shares)
    decades = math.log10(bend.size * shares[1] / OfSharpness.chance) / math.log10(shares[0] / shares[1])
    return least, float(last + (last - first) * decades)


def _like(bend: Values, above: Values, share: tuple[float, float]) -> NDArray[np.bool_]:
    """Tell where samples are bent by about as much as they are above what is around them, with the same sign."""
    ratio = np.divide(bend, above, out=np.zeros_like(bend), where=above != 0)
    return (ratio > share[0]) & (ratio < share[1])


def _is_soft(z: Values, least: float, band: int | None) -> bool:
    """Tell whether no step of the picture, of three differences of one sign, is as sharp as a pixel.

    Behind optics of 0.8 pixels the middle difference of a step is half of the three.
    """
    bands = z if band is None or len(z) % band else z.reshape(-1, band, z.shape[1])
    share = np.concatenate([_shares(z[::2], least), _shares(np.swapaxes(bands[..., ::2], -1, -2), least)])
    return len(share) < OfSharpness.least_steps or float(np.quantile(share, 0.9)) < OfSharpness.soft


def _shares(lines: Values, least: float) -> Values:
    """Return of steps along the last axis the middle difference over all three, where that is the greatest."""
    steps = np.diff(lines, axis=-1)
    three = np.stack([steps[..., :-2], steps[..., 1:-1], steps[..., 2:]])
    whole = three.sum(axis=0)
    one_sign = (three * np.sign(whole) >= 0).all(axis=0) & (np.abs(whole) > least)
    sizes = np.abs(three[:, one_sign])
    return np.asarray((sizes[1] / sizes.sum(axis=0))[sizes[1] >= sizes.max(axis=0)])
