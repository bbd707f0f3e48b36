"""The noise of small blocks of a picture, and the rules by which blocks at several sizes tell which noise it has."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final, Literal

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from nlflow._array import root_mean_square
from nlflow.denoising.noise import spectra
from nlflow.denoising.noise.figures import OfBlocks, OfRules, OfSpectra
from nlflow.denoising.noise.models.base import Array, NoiseEstimate
from nlflow.denoising.noise.models.gaussian import OPPONENT, GaussianNoise
from nlflow.domains.samples import range_of

# Coefficients are compared in four classes, by the parity of their frequencies.
_CLASSES: Final = (2 * (np.arange(64) // 8 % 2) + np.arange(64) % 2).astype(int)
Kind = Literal["cut", "trusted", "coloured", "structured", "white"]
_Light = tuple[Array, Array] | tuple[None, None]  # intensities, and relative standard deviations there
_BY_COLOURS: Final = "texture is everywhere: the noise of the colours says how strong that of the luminance is"
_EVERYWHERE: Final = (
    "structure is everywhere: only the highest frequencies were counted as noise; "
    "flat=np.s_[20:84, 300:400] measures it in a flat part"
)


@dataclass(frozen=True)
class BlockNoise:
    """The noise in blocks of 8 x 8 samples of one plane.

    Attributes
    ----------
    variances : array of shape (8, 8)
        Of the orthonormal cosine coefficients; that of the mean is continued from its neighbours.
    intensities, strengths : array of shape (K,)
        Relative variance of the noise at intensities, of mean 1.
    like_noise : float
        Width of the lowest part of the distribution of energies against that of Gaussian noise: near 1 for noise, low
        for structure.
    bulk : float
        Median energy of all blocks over that of the blocks that were measured: 1.2 in noise alone, large in a picture
        with much structure.
    present : float
        Share of the blocks that are not constant.
    """

    variances: Array
    intensities: Array
    strengths: Array
    like_noise: float
    bulk: float
    present: float

    def spread(self, rows: tuple[int, ...], columns: tuple[int, ...]) -> float:
        """Return the root mean variance of some coefficients."""
        return math.sqrt(float(np.mean([self.variances[i, j] for i in rows for j in columns])))


def block_noise(
    plane: Array, intensity: Array, floor: float, absent: NDArray[np.bool_] | None = None, share: float = OfBlocks.share
) -> BlockNoise | None:
    """Return the noise in the blocks of a plane that hold the least structure; None where there are too few.

    The blocks of each intensity are sorted by their energy in the coefficients of other classes, each in units of its
    noise, and the squares of a class are averaged over the first of them (`share`). In Gaussian noise the classes are
    independent, so that choosing by the ones does not bias the other. Repeated, since the units are what is looked for.
    O(N).

    After D. Colom, M. Lebrun, A. Buades and J.-M. Morel, "A non-parametric approach for the estimation of
    intensity-frequency dependent noise", ICIP 2014 (doi 10.1109/ICIP.2014.7025865), who compare pairs of blocks.

    Parameters
    ----------
    plane, intensity : array of shape (H, W)
    floor : float
        Standard deviation that coefficients need to be compared by: those below were rounded away.
    absent : bool array of shape (H, W), optional
        Samples that tell nothing: blocks that touch one are left out.
    share : float
        Of the blocks of an intensity, which are measured: `SHARE` or `OF_FLAT`.
    """
    squares, levels = _windows(plane, intensity, absent)
    there = squares[:, 1:].sum(axis=1) > 1e-3 * floor**2
    if np.count_nonzero(there) < OfBlocks.least:
        return None
    order = np.argsort(levels[there], kind="stable")
    squares, levels, present = squares[there][order], levels[there][order], float(there.mean())
    parts = np.array_split(np.arange(len(levels)), max(min(OfBlocks.intensities, len(levels) // OfBlocks.each), 1))
    tiny = 1e-4 * floor**2
    variances = np.quantile(squares, 0.2, axis=0) / OfBlocks.fifth + tiny
    strengths = np.ones(len(parts))
    for _ in range(OfBlocks.rounds):
        used = _used(variances, floor)
        found = np.stack(
            [_measured(squares[p] / s, variances, used, share) * s for p, s in zip(parts, strengths, strict=True)]
        )
        found += tiny
        strengths = np.exp(np.median(np.log(found / variances)[:, used], axis=1))
        strengths /= strengths.mean()
        variances = np.exp(np.mean(np.log(found) - np.log(strengths)[:, None], axis=0))
    used = _used(variances, floor)
    each = np.repeat(strengths, [len(p) for p in parts])
    energies = (np.minimum(squares / (variances * each[:, None]), OfBlocks.most_energy) * used).sum(axis=1)
    like, bulk = _shape_of(energies, int(used.sum()))
    variances[0] = math.sqrt(variances[1] * variances[OfBlocks.side])
    means = np.array([levels[p].mean() for p in parts])
    return BlockNoise(variances.reshape(OfBlocks.side, OfBlocks.side), means, strengths, like, bulk, present)


def noise_of_all(plane: Array, floor: float) -> BlockNoise | None:
    """Return the noise in all blocks of a plane that holds nothing else; None where there are too few. O(N).

    Parameters
    ----------
    plane : array of shape (H, W)
    floor : float
        As `block_noise` takes it.
    """
    squares, _ = _windows(plane, plane, None)
    if len(squares) < OfBlocks.least:
        return None
    variances = squares.mean(axis=0) + 1e-4 * floor**2
    used = _used(variances, floor)
    energies = (np.minimum(squares / variances, OfBlocks.most_energy) * used).sum(axis=1)
    like, bulk = _shape_of(energies, int(used.sum()))
    variances[0] = math.sqrt(variances[1] * variances[OfBlocks.side])
    return BlockNoise(variances.reshape(OfBlocks.side, OfBlocks.side), np.zeros(1), np.ones(1), like, bulk, 1.0)


def _windows(plane: Array, intensity: Array, absent: NDArray[np.bool_] | None) -> tuple[Array, Array]:
    """Return the squared coefficients (blocks, 64) and the mean intensities of overlapping blocks."""
    from scipy.fft import dct

    basis = dct(np.eye(OfBlocks.side), norm="ortho", axis=0)
    step = max(1, math.ceil(math.sqrt(plane.size / OfBlocks.most)))

    def blocks(values: Array) -> Array:
        return sliding_window_view(values, (OfBlocks.side, OfBlocks.side))[::step, ::step].reshape(
            -1, OfBlocks.side, OfBlocks.side
        )

    own, levels = blocks(plane), blocks(intensity)
    if absent is not None:
        there = ~blocks(absent).any(axis=(1, 2))
        own, levels = own[there], levels[there]
    return np.square(basis @ own @ basis.T).reshape(-1, OfBlocks.side * OfBlocks.side), levels.mean(axis=(1, 2))


def _used(variances: Array, floor: float) -> NDArray[np.bool_]:
    """Return by which coefficients blocks are compared."""
    used = variances > min(floor**2, float(variances[1:].max()) / 4)
    used[0] = False
    return np.asarray(used)


def _measured(squares: Array, variances: Array, used: NDArray[np.bool_], share: float) -> Array:
    """Return the variances of the coefficients in the blocks of least energy in the other classes."""
    energies = np.minimum(squares / variances, OfBlocks.most_energy) * used
    total, count = energies.sum(axis=1), max(int(share * len(squares)), min(20, len(squares)))
    result = np.empty(OfBlocks.side * OfBlocks.side)
    for k in range(4):
        own = k == _CLASSES
        others = total - energies[:, own].sum(axis=1)
        # With all that are as large but for rounding, as those at their largest value are: none is preferred.
        chosen = np.flatnonzero(others <= (1 + OfBlocks.same) * np.partition(others, count - 1)[count - 1])
        lower = max(int(OfBlocks.kept * len(chosen)), 1)
        squared = np.partition(squares[np.ix_(chosen, np.flatnonzero(own))], lower - 1, axis=0)[:lower]
        result[own] = squared.mean(axis=0) / OfBlocks.mean_of_kept
    return result


def _shape_of(energies: Array, count: int) -> tuple[float, float]:
    """Return `BlockNoise.like_noise` and `BlockNoise.bulk`."""
    from scipy.stats import chi2

    least, first, middle = np.quantile(energies, [OfBlocks.share / 8, OfBlocks.share, 0.5])
    degrees = OfBlocks.independent * max(count, 1)
    expected = chi2(degrees).ppf(OfBlocks.share / 8) / chi2(degrees).ppf(OfBlocks.share)
    return float(least / max(first, 1e-30) / expected), float(middle / max(first, 1e-30))


@dataclass(frozen=True)
class Rules:
    """The rules by which figures of blocks become a model."""

    white: GaussianNoise
    found: list[list[BlockNoise | None]]
    colour: bool
    span: float

    def estimate(self) -> NoiseEstimate:
        """Return the model, what it rests on, and how sure it is."""
        fine, kind = self._of(0), self.kind
        if kind == "cut":
            return self._camera(*self._plateau())
        if kind == "trusted":
            return self._camera(self._capped) if self.colour and not self._growing else self._correlated()
        if kind == "coloured":
            assert self._bounded is not None
            return self._camera(self._bounded, _BY_COLOURS)
        places, strengths = self._increasing
        if places is not None:
            model = GaussianNoise(self._highest, intensities=places, strengths=strengths)
            return self._verdict(model, "high", "the variance grows with the intensity along a line")
        reason = "noise is as strong at high frequencies as at middle ones"
        if kind == "structured":
            reason = _EVERYWHERE
            if len(self.found) < OfRules.levels:  # too small to tell
                return self._verdict(self.white, "low", reason)
        return self._verdict(self.white, "high" if self._clear and fine.bulk < OfRules.bulk else "medium", reason)

    def estimate_flat(self) -> NoiseEstimate:
        """Return the model of blocks that hold nothing but noise, all of one intensity."""
        if not self._falling:
            return self._verdict(self.white, "high", "noise is as strong at high frequencies as at middle ones")
        cut = self.colour and self._highest < min(OfRules.cut * self._middle, OfRules.rounded * self.span / 255)
        found = self._camera(self._middle) if cut else self._correlated(levelled=False)
        model: Any = found.model
        return replace(found, model=replace(model, intensities=None, strengths=None), confidence="high")

    @cached_property
    def kind(self) -> Kind:
        """What the noise is: cut off at high frequencies, trusted though it falls there, told by colours, or white.

        "structured" is what cannot be told from structure.
        """
        if self._cut and (self.colour or not self._growing):
            return "cut"
        falling = self._falling
        if falling and self._middle > OfRules.visible * self.span and self._trusted and not self._textured:
            return "trusted"
        if falling and self._bounded is not None and self._bounded > OfRules.seen * self.span:
            return "coloured"
        return "structured" if falling or self._highest < OfRules.stronger * self._middle else "white"

    @property
    def doubtful(self) -> bool:
        """Whether flat parts may tell more: windows show no noise, or much less than blocks."""
        if self.kind not in ("structured", "white") or self._increasing[0] is not None:
            return False
        return self._windows < max(OfRules.stronger * self._highest, OfRules.seen * self.span)

    def _verdict(self, model: GaussianNoise, confidence: str, *reasons: str) -> NoiseEstimate:
        half, luminance = self._of(1), [b[0] for b in self.found if b[0]]
        measured = {
            "middle": self._middle, "highest": self._highest, "white": self._windows,
            "like_noise": [b.like_noise for b in luminance], "bulk": [b.bulk for b in luminance],
            "intensities": half.intensities, "strengths": np.sqrt(half.strengths), "spectrum": self._composed(0),
        }  # fmt: skip
        return NoiseEstimate(model, confidence, reasons, measured)

    # ---- figures of the picture

    @property
    def seen(self) -> bool:
        """Whether noise at the highest frequencies is stronger than the grain of pictures that count as clean."""
        return self._highest > OfRules.seen * self.span

    @property
    def _clear(self) -> bool:
        return self._of(0).like_noise > OfRules.sure and not self._falling

    @cached_property
    def _increasing(self) -> _Light:
        """Intensities and relative strengths of white noise that grows with them along a line."""
        return _line(self._of(0)) if self._clear else (None, None)

    @property
    def _falling(self) -> bool:
        """Whether noise is weaker at the highest frequencies than just below, or than at middle ones."""
        return self._highest < max(OfRules.white * self._of(0).spread((4, 5), (4, 5)), OfRules.cut * self._middle)

    @property
    def _windows(self) -> float:
        """White noise in the windows of the picture, of channels that differ the root mean square."""
        return root_mean_square(np.atleast_1d(self.white.sigma))

    @cached_property
    def _middle(self) -> float:
        """Noise of the luminance at middle frequencies."""
        return 2 * self._of(1).spread(OfRules.middle, OfRules.middle)

    @cached_property
    def _highest(self) -> float:
        return self._of(0).spread(OfRules.highest, OfRules.highest)

    @cached_property
    def _of_colours(self) -> float | None:
        """Noise of the luminance at middle frequencies as that of green - magenta tells it, where it does.

        Texture is weak in this plane: a share of that of the luminance.
        """
        green = self.found[1][2] if self.colour else None
        if green is None or green.like_noise < OfRules.green:
            return None
        power = (2 * green.spread((1, 2), (1, 2))) ** 2 - (OfRules.texture * self._middle) ** 2
        return OfRules.of_green * math.sqrt(max(power, 0.0))

    @property
    def _textured(self) -> bool:
        """Whether colours say that most of what looks like noise of the luminance is texture."""
        return self._of_colours is not None and self._middle > OfRules.too_much * self._of_colours

    @property
    def _capped(self) -> float:
        """Noise of the luminance, at most so much as colours allow."""
        return self._middle if self._of_colours is None else min(self._middle, OfRules.at_most * self._of_colours)

    @property
    def _bounded(self) -> float | None:
        """Noise of the luminance, between what its blocks say and the least of what colours say."""
        colours, middle, half = self._of_colours, self._middle, self._of(1)
        if colours is None or self._textured:
            return colours
        trust = np.clip((half.like_noise - 0.7) / 0.2, 0, 1) * np.clip((4.2 - half.bulk) / 1.5, 0, 1)
        return float(middle**trust * min(colours, middle) ** (1 - trust))

    @property
    def _ceiling(self) -> float:
        """What the noise of red - blue at the lowest frequencies, which compression spares, allows at most."""
        coarse = self.found[2][1] if self.colour and len(self.found) == OfRules.levels else None
        if coarse is None or coarse.like_noise < OfRules.coarse_colours:
            return math.inf
        return OfRules.of_red_blue * 4 * coarse.spread((1, 2), (1, 2))

    @property
    def _blotches(self) -> float:
        """How strong the noise of the luminance is at most, as low frequencies of the colours tell it."""
        if not self.colour or len(self.found) < OfRules.levels:
            return math.inf
        half, coarse = self.found[1][1], self.found[2][1:]
        if half is None or half.like_noise < OfRules.coloured or any(b is None for b in coarse):
            return math.inf
        return OfRules.of_colours * 4 * max(b.spread((1, 2), (1, 2)) for b in coarse if b is not None)

    @property
    def _cut(self) -> bool:
        """Whether compression or demosaicking cut off what noise had at the highest frequencies."""
        fine, half = self._of(0), self._of(1)
        return (
            self._highest < min(OfRules.cut * self._middle, OfRules.rounded * self.span / 255)
            and half.like_noise > OfRules.noisy[self.colour]
            and fine.like_noise < OfRules.sparse
            and half.bulk < OfRules.drawn
        )

    @property
    def _trusted(self) -> bool:
        """Whether noise rules the picture, or what is coarser of it; of colour pictures the colours too.

        They have little texture; where compression left them nothing, half the size must show hardly anything but
        noise. Noise looks like noise at each size. Grass and gravel do so from afar alone.
        """
        half = self._of(1)
        if self._of(0).like_noise < OfRules.nearby and half.like_noise < OfRules.certain:
            return False
        clear = half.like_noise > OfRules.clear and half.bulk < OfRules.bulk
        return self._ruled(OfRules.sure) and (not self.colour or clear or self._ruled(OfRules.clear, plane=1))

    @cached_property
    def _coarse_trusted(self) -> bool:
        """Whether noise rules a coarser picture so much that it is no texture."""
        return self._ruled(OfRules.certain, OfRules.ruled, first=1)

    @property
    def _growing(self) -> bool:
        """Whether noise rules the coarsest picture and grows towards low frequencies, as that of no camera."""
        ruled = self._ruled(OfRules.clear, first=len(self.found) - 1)
        return ruled and 2 * self._of(1).spread((1, 2), (1, 2)) > OfRules.grown * self._middle

    def _ruled(self, like: float, bulk: float = OfRules.bulk, *, first: int = 0, plane: int = 0) -> bool:
        """Tell whether noise rules a plane at any size from the `first` on."""
        blocks = [b[plane] for b in self.found[first:]]
        return any(b is not None and b.like_noise > like and b.bulk < bulk for b in blocks)

    def _of(self, level: int, plane: int = 0) -> BlockNoise:
        found = self.found[level][plane]
        assert found is not None
        return found

    # ---- models

    def _plateau(self) -> tuple[float, *tuple[str, ...]]:
        """Return the noise of the luminance at middle frequencies where compression cut off higher ones, and why."""
        middle, half = self._middle, self._of(1)
        if self._bounded:  # 0 says that compression left the colours nothing, not that there is no noise
            if half.like_noise > OfRules.clear and half.bulk < OfRules.ruled:
                return (min(middle, self._ceiling),)
            sure = self._coarse_trusted and not self._textured
            return (self._capped,) if sure else (self._bounded, _BY_COLOURS)
        if not self._coarse_trusted and middle > self._blotches:
            return OfRules.of_blotches * self._blotches, _BY_COLOURS
        return (min(OfRules.lost * middle, self._ceiling),)

    def _camera(self, plateau: float, *reasons: str) -> NoiseEstimate:
        """Return the noise of a photograph, which is flat up to middle frequencies and falls beyond."""
        shape = np.minimum(self._composed(0) / self._middle**2, 1.0)
        planes = [plateau**2 * shape]
        for c in range(1, 3 if self.colour else 1):
            reach = np.exp(-np.square(_radius() / OfRules.chroma_reach))
            own = self._composed(c, cut=True) if self.found[1][c] is not None else 0.0
            planes.append(
                plateau**2 * np.clip(own / plateau**2, OfRules.chroma**2 * reach * shape, OfRules.chroma_most**2)
            )
        lost = float(np.interp(self._of(0).like_noise, *OfRules.compressed))
        if plateau < self._middle:  # what is uncertain is filled up less
            lost = min(lost, OfRules.unsure)
        model = self._model(np.stack(planes), self._light(), lost)
        words = "flat parts show less noise at the highest frequencies than at middle ones", *reasons
        return self._verdict(model, "high" if self._coarse_trusted else "medium", *words)

    def _correlated(self, *, levelled: bool = True) -> NoiseEstimate:
        spectrum = np.stack([self._composed(c, levelled=levelled) for c in range(3 if self.colour else 1)])
        model = self._model(spectrum, _line(self._of(1)))
        return self._verdict(model, "high", "flat parts show noise that is weaker at high frequencies")

    def _model(self, spectrum: spectra.Spectrum, light: _Light, compressed: float = 0.0) -> GaussianNoise:
        """Return noise of a spectrum, of opponent colours or alike in all channels."""
        levels = np.sqrt(spectrum.mean(axis=(1, 2)))
        sigma = levels if self.colour else float(levels[0])
        return GaussianNoise(sigma, spectrum, light[0], light[1], opponent=self.colour, compressed=compressed)

    def _light(self) -> _Light:
        """Return intensities that increase, and the relative standard deviations there.

        Half of the way in logarithms where texture may pass for noise.
        """
        half = self._of(1)
        places, first = np.unique(half.intensities, return_index=True)
        return places, half.strengths[first] ** (0.5 if self._coarse_trusted else 0.25)

    def _composed(self, plane: int, *, cut: bool = False, levelled: bool = True) -> spectra.Spectrum:
        """Return the spectrum of a plane: low frequencies from coarser pictures.

        What compression `cut` off at middle frequencies tells nothing of lower ones. Where there is nothing but noise,
        low frequencies need not be `levelled`.
        """
        share = 2 * np.abs(np.fft.fftfreq(OfSpectra.frequencies))
        farthest = np.maximum(share[:, None], share)
        result = np.zeros((OfSpectra.frequencies,) * 2)
        for level, blocks in enumerate(self.found):
            own = blocks[plane]
            if own is not None:
                limit = OfRules.reach / 2**level
                values = 4.0**level * np.exp(_interpolated(np.log(own.variances), share * (OfBlocks.side << level)))
                if levelled and level and own.like_noise < OfRules.structure:
                    edge = (farthest > 0.8 * limit) & (farthest < 1.3 * limit)
                    values = np.minimum(values, OfRules.steepest * np.median(result[edge]))
                result = np.where((farthest <= limit) | (result == 0), values, result)
        coarsest = self.found[-1][plane]
        if not levelled or (cut and coarsest is not None and coarsest.like_noise > OfRules.coloured_coarse):
            return result
        return self._levelled(result, plane)

    def _levelled(self, spectrum: spectra.Spectrum, plane: int) -> spectra.Spectrum:
        """Return a spectrum that grows no faster than noise does at the lowest frequencies, where structure is."""
        coarsest = self.found[-1][plane]
        radius = np.maximum(_radius(), 1 / OfSpectra.frequencies)
        levels = {
            sure: float(np.median(spectrum[(radius >= low) & (radius < high)]))
            for sure, (low, high) in OfRules.reference.items()
        }
        like = 0.0 if coarsest is None or len(self.found) < OfRules.levels else coarsest.like_noise
        steep = levels[True] > OfRules.falling * levels[False]
        sure = steep and like > OfRules.sure
        (low, high), level = OfRules.reference[sure], levels[sure]
        middle = math.sqrt(low * high)
        bound = level * (middle / radius) ** OfRules.growth
        return np.asarray(np.where(radius < low, np.minimum(spectrum, bound), spectrum))


def planes_of(channels: int) -> Array:
    """Return the rows along which planes are looked at: opponent colours, or the mean of other channels alone."""
    return OPPONENT if channels == 3 else np.full((1, channels), 1 / math.sqrt(channels))


def looks_white(samples: Array, missing: NDArray[np.bool_] | None) -> bool:
    """Tell whether the quietest blocks of samples (H, W, C) are as strong at the highest frequencies as at middle ones.

    Below 32 samples along an axis, and with samples missing, there are too few blocks to say otherwise. O(N).
    """
    if min(samples.shape[:-1]) < 4 * OfBlocks.side or missing is not None:
        return True
    luminance = samples.mean(axis=-1, dtype=np.float64)
    found = block_noise(luminance, luminance, range_of(samples) / 255)
    return found is None or found.spread(OfRules.highest, OfRules.highest) >= OfRules.stronger * found.spread(
        OfRules.of_blocks, OfRules.of_blocks
    )


def in_units(found: NoiseEstimate, span: float) -> NoiseEstimate:
    """Return a verdict on samples that were divided by `span` in the units of the samples."""
    model: Any = found.model
    places = None if model.intensities is None else model.intensities * span
    units = {"middle": span, "highest": span, "white": span, "intensities": span, "spectrum": span**2}
    measured = {name: value * units[name] if name in units else value for name, value in found.measured.items()}
    return replace(found, model=replace(model, sigma=model.sigma * span, intensities=places), measured=measured)


def _line(blocks: BlockNoise) -> _Light:
    """Return intensities and relative standard deviations where the variance clearly grows along a line."""
    from scipy.stats import theilslopes

    x, v = blocks.intensities, blocks.strengths
    if len(v) < 3 or v.max() < OfRules.varying * v.min() or (np.diff(x) <= 0).any():
        return None, None
    slope, start = theilslopes(v, x)[:2]
    line = np.maximum(start + slope * x, 0.5 * v.min())
    # One may lie beside it: a step of intensities that is wide, of which the quietest part was measured.
    if slope <= 0 or np.sort(np.abs(np.log(v / line)))[-2] > math.log(OfRules.on_line):
        return None, None
    return x, np.sqrt(line)


def _interpolated(table: Array, places: Array) -> Array:
    """Return a table (8, 8) at fractional places along both axes, bilinear."""
    from scipy.ndimage import map_coordinates

    grid = np.meshgrid(np.minimum(places, OfBlocks.side - 1), np.minimum(places, OfBlocks.side - 1), indexing="ij")
    return np.asarray(map_coordinates(table, grid, order=1, mode="nearest"))


def _radius() -> Array:
    share = 2 * np.abs(np.fft.fftfreq(OfSpectra.frequencies))
    return np.asarray(np.hypot(share[:, None], share))
