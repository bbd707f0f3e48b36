"""The rules by which the noise in the blocks of a picture, at several sizes of it, becomes a model.

Their thresholds were chosen on PolyU photographs, simulated cameras and Set12 with coloured noise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from nlflow._array import root_mean_square
from nlflow.denoising.noise import spectra
from nlflow.denoising.noise.base import Array, NoiseEstimate
from nlflow.denoising.noise.blocks import SIDE, BlockNoise, block_noise
from nlflow.denoising.noise.gaussian import OPPONENT, GaussianNoise
from nlflow.domains.samples import range_of

Kind = Literal["cut", "trusted", "coloured", "structured", "white"]
_Light = tuple[Array, Array] | tuple[None, None]  # intensities, and relative standard deviations there
LEVELS: Final = 3  # sizes at which blocks are looked at
_REACH: Final = 6.5 / SIDE  # share of the frequencies of a size that its coefficients tell well
# Middle frequencies of the picture of half the size: texture is weak there, and JPEG keeps them.
_MIDDLE: Final = (3, 4)
_OF_BLOCKS: Final = (2, 3)  # the like of the picture itself
_HIGHEST: Final = (6, 7)
_CUT: Final = 0.15  # noise at the highest frequencies over that at the middle ones: below, compression cut it off
_ROUNDED: Final = 1.55  # and no more than so many steps of 8 bits
_WHITE: Final = 0.92  # noise at the highest frequencies over that at the next lower ones: above, it is white
_STRONGER: Final = 0.6  # the same over that at middle ones: below, there is structure
_VISIBLE: Final = 0.015  # of the range: weaker noise that is not white cannot be told from fine texture
_DRAWN: Final = 5.0  # `BlockNoise.bulk` from which on it is structure that JPEG left of a clean picture
_LOST: Final = 1.25  # by which compression lowers the noise of the quietest blocks, where it leaves colours none
_OF_BLOTCHES: Final = 1.12  # the same where colours tell how strong noise is
_NOISY: Final = {True: 0.6, False: 0.68}  # `BlockNoise.like_noise` from which on blocks show noise, in colours and grey
_SURE: Final = 0.78  # the same for noise that nothing was cut off
_NEARBY: Final = 0.65  # and the least for the picture itself
_BULK: Final = 2.4  # and `BlockNoise.bulk` up to which noise rules the picture
_CERTAIN: Final = 0.85  # the same two where texture that looks like noise must be told from it
_RULED: Final = 1.75
_COLOURED: Final = 0.45  # `BlockNoise.like_noise` from which on colour differences show noise
_OF_COLOURS: Final = 0.75  # noise of the luminance at middle frequencies over that of colours at low ones, at most
_GREEN: Final = 0.58  # `BlockNoise.like_noise` from which on green - magenta shows noise at middle frequencies
_COLOURED_COARSE: Final = 0.6
_TEXTURE: Final = 0.19  # texture of green - magenta over that of the luminance
_OF_GREEN: Final = 1.15  # noise of the luminance at middle frequencies over that of green - magenta
_AT_MOST: Final = 1.8  # noise of the luminance over what colours say, as gradient-corrected demosaicking leaves it
_COARSE_COLOURS: Final = 0.7  # `BlockNoise.like_noise` from which on red - blue tells it at low frequencies
_OF_RED_BLUE: Final = 1.1  # noise of the luminance over that of red - blue there, at most
_TOO_MUCH: Final = 2.5  # noise of the luminance over what colours say, from which on it is texture
_SEEN: Final = 4 / 255  # of the range: with less in green - magenta the picture counts as clean
_BY_COLOURS: Final = "texture is everywhere: the noise of the colours says how strong that of the luminance is"
_EVERYWHERE: Final = (
    "structure is everywhere: only the highest frequencies were counted as noise; "
    "flat=np.s_[20:84, 300:400] measures it in a flat part"
)
_CHROMA: Final = 0.8  # least noise of colour differences over that of the luminance, at low frequencies
_CHROMA_MOST: Final = 1.4  # and the greatest
_CHROMA_REACH: Final = 0.3  # of the highest frequency: so far it reaches
_STRUCTURE: Final = 0.65  # `BlockNoise.like_noise` below which the blocks of a size show structure
_STEEPEST: Final = 2.25  # by which noise grows towards low frequencies then
_CLEAR: Final = 0.9  # `BlockNoise.like_noise` of blocks that show hardly anything but noise
# Frequencies, as shares of the highest, from which the noise at lower ones is bounded, when they are not and when they
# are measured well; and the power of the frequency by which it may grow.
_REFERENCE: Final = {False: (0.2, 0.3), True: (0.12, 0.18)}
_FALLING: Final = 3.0  # ratio of the two, from which on noise itself falls, and not structure with it
_GROWN: Final = 2.5  # noise at low frequencies over that at middle ones, from which on it is no camera's
_GROWTH: Final = 0.8
_SPARSE: Final = 0.75  # `BlockNoise.like_noise` of the picture, below which compression left noise here and there
# `GaussianNoise.compressed` by the same: the fewer blocks kept noise, the more was cut off.
_COMPRESSED: Final = (0.68, 0.78, 0.95), (0.85, 0.33, 0.15)
_UNSURE: Final = 0.67  # and the most where only colours tell how strong it is
_VARYING: Final = 3.0  # ratio of variances from which on white noise counts as depending on the intensity
_ON_LINE: Final = 1.5  # ratio of variances to a line up to which they lie on it


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
            if len(self.found) < LEVELS:  # too small to tell
                return self._verdict(self.white, "low", reason)
        return self._verdict(self.white, "high" if self._clear and fine.bulk < _BULK else "medium", reason)

    def estimate_flat(self) -> NoiseEstimate:
        """Return the model of blocks that hold nothing but noise, all of one intensity."""
        if not self._falling:
            return self._verdict(self.white, "high", "noise is as strong at high frequencies as at middle ones")
        cut = self.colour and self._highest < min(_CUT * self._middle, _ROUNDED * self.span / 255)
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
        if falling and self._middle > _VISIBLE * self.span and self._trusted and not self._textured:
            return "trusted"
        if falling and self._bounded is not None and self._bounded > _SEEN * self.span:
            return "coloured"
        return "structured" if falling or self._highest < _STRONGER * self._middle else "white"

    @property
    def doubtful(self) -> bool:
        """Whether flat parts may tell more: windows show no noise, or much less than blocks."""
        if self.kind not in ("structured", "white") or self._increasing[0] is not None:
            return False
        return self._windows < max(_STRONGER * self._highest, _SEEN * self.span)

    def _verdict(self, model: GaussianNoise, confidence: str, *reasons: str) -> NoiseEstimate:
        """Return a verdict with the figures that it rests on."""
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
        return self._highest > _SEEN * self.span

    @property
    def _clear(self) -> bool:
        """Whether the blocks of the picture itself show white noise."""
        return self._of(0).like_noise > _SURE and not self._falling

    @cached_property
    def _increasing(self) -> _Light:
        """Intensities and relative strengths of white noise that grows with them along a line."""
        return _line(self._of(0)) if self._clear else (None, None)

    @property
    def _falling(self) -> bool:
        """Whether noise is weaker at the highest frequencies than just below, or than at middle ones."""
        return self._highest < max(_WHITE * self._of(0).spread((4, 5), (4, 5)), _CUT * self._middle)

    @property
    def _windows(self) -> float:
        """White noise in the windows of the picture, of channels that differ the root mean square."""
        return root_mean_square(np.atleast_1d(self.white.sigma))

    @cached_property
    def _middle(self) -> float:
        """Noise of the luminance at middle frequencies."""
        return 2 * self._of(1).spread(_MIDDLE, _MIDDLE)

    @cached_property
    def _highest(self) -> float:
        """Noise of the luminance at the highest frequencies."""
        return self._of(0).spread(_HIGHEST, _HIGHEST)

    @cached_property
    def _of_colours(self) -> float | None:
        """Noise of the luminance at middle frequencies as that of green - magenta tells it, where it does.

        Texture is weak in this plane: a share of that of the luminance.
        """
        green = self.found[1][2] if self.colour else None
        if green is None or green.like_noise < _GREEN:
            return None
        power = (2 * green.spread((1, 2), (1, 2))) ** 2 - (_TEXTURE * self._middle) ** 2
        return _OF_GREEN * math.sqrt(max(power, 0.0))

    @property
    def _textured(self) -> bool:
        """Whether colours say that most of what looks like noise of the luminance is texture."""
        return self._of_colours is not None and self._middle > _TOO_MUCH * self._of_colours

    @property
    def _capped(self) -> float:
        """Noise of the luminance, at most so much as colours allow."""
        return self._middle if self._of_colours is None else min(self._middle, _AT_MOST * self._of_colours)

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
        coarse = self.found[2][1] if self.colour and len(self.found) == LEVELS else None
        if coarse is None or coarse.like_noise < _COARSE_COLOURS:
            return math.inf
        return _OF_RED_BLUE * 4 * coarse.spread((1, 2), (1, 2))

    @property
    def _blotches(self) -> float:
        """How strong the noise of the luminance is at most, as low frequencies of the colours tell it."""
        if not self.colour or len(self.found) < LEVELS:
            return math.inf
        half, coarse = self.found[1][1], self.found[2][1:]
        if half is None or half.like_noise < _COLOURED or any(b is None for b in coarse):
            return math.inf
        return _OF_COLOURS * 4 * max(b.spread((1, 2), (1, 2)) for b in coarse if b is not None)

    @property
    def _cut(self) -> bool:
        """Whether compression or demosaicking cut off what noise had at the highest frequencies."""
        fine, half = self._of(0), self._of(1)
        return (
            self._highest < min(_CUT * self._middle, _ROUNDED * self.span / 255)
            and half.like_noise > _NOISY[self.colour]
            and fine.like_noise < _SPARSE
            and half.bulk < _DRAWN
        )

    @property
    def _trusted(self) -> bool:
        """Whether noise rules the picture, or what is coarser of it; of colour pictures the colours too.

        They have little texture; where compression left them nothing, half the size must show hardly anything but
        noise. Noise looks like noise at each size. Grass and gravel do so from afar alone.
        """
        half = self._of(1)
        if self._of(0).like_noise < _NEARBY and half.like_noise < _CERTAIN:
            return False
        clear = half.like_noise > _CLEAR and half.bulk < _BULK
        return self._ruled(_SURE) and (not self.colour or clear or self._ruled(_CLEAR, plane=1))

    @cached_property
    def _coarse_trusted(self) -> bool:
        """Whether noise rules a coarser picture so much that it is no texture."""
        return self._ruled(_CERTAIN, _RULED, first=1)

    @property
    def _growing(self) -> bool:
        """Whether noise rules the coarsest picture and grows towards low frequencies, as that of no camera."""
        ruled = self._ruled(_CLEAR, first=len(self.found) - 1)
        return ruled and 2 * self._of(1).spread((1, 2), (1, 2)) > _GROWN * self._middle

    def _ruled(self, like: float, bulk: float = _BULK, *, first: int = 0, plane: int = 0) -> bool:
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
            if half.like_noise > _CLEAR and half.bulk < _RULED:
                return (min(middle, self._ceiling),)
            sure = self._coarse_trusted and not self._textured
            return (self._capped,) if sure else (self._bounded, _BY_COLOURS)
        if not self._coarse_trusted and middle > self._blotches:
            return _OF_BLOTCHES * self._blotches, _BY_COLOURS
        return (min(_LOST * middle, self._ceiling),)

    def _camera(self, plateau: float, *reasons: str) -> NoiseEstimate:
        """Return the noise of a photograph, which is flat up to middle frequencies and falls beyond."""
        shape = np.minimum(self._composed(0) / self._middle**2, 1.0)
        planes = [plateau**2 * shape]
        for c in range(1, 3 if self.colour else 1):
            reach = np.exp(-np.square(_radius() / _CHROMA_REACH))
            own = self._composed(c, cut=True) if self.found[1][c] is not None else 0.0
            planes.append(plateau**2 * np.clip(own / plateau**2, _CHROMA**2 * reach * shape, _CHROMA_MOST**2))
        lost = float(np.interp(self._of(0).like_noise, *_COMPRESSED))
        if plateau < self._middle:  # what is uncertain is filled up less
            lost = min(lost, _UNSURE)
        model = self._model(np.stack(planes), self._light(), lost)
        words = "its high frequencies were cut off, as demosaicking and JPEG do", *reasons
        return self._verdict(model, "high" if self._coarse_trusted else "medium", *words)

    def _correlated(self, *, levelled: bool = True) -> NoiseEstimate:
        """Return noise of the spectrum that was measured."""
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
        share = 2 * np.abs(np.fft.fftfreq(spectra.FREQUENCIES))
        farthest = np.maximum(share[:, None], share)
        result = np.zeros((spectra.FREQUENCIES,) * 2)
        for level, blocks in enumerate(self.found):
            own = blocks[plane]
            if own is not None:
                limit = _REACH / 2**level
                values = 4.0**level * np.exp(_interpolated(np.log(own.variances), share * (SIDE << level)))
                if levelled and level and own.like_noise < _STRUCTURE:
                    edge = (farthest > 0.8 * limit) & (farthest < 1.3 * limit)
                    values = np.minimum(values, _STEEPEST * np.median(result[edge]))
                result = np.where((farthest <= limit) | (result == 0), values, result)
        coarsest = self.found[-1][plane]
        if not levelled or (cut and coarsest is not None and coarsest.like_noise > _COLOURED_COARSE):
            return result
        return self._levelled(result, plane)

    def _levelled(self, spectrum: spectra.Spectrum, plane: int) -> spectra.Spectrum:
        """Return a spectrum that grows no faster than noise does at the lowest frequencies, where structure is."""
        coarsest = self.found[-1][plane]
        radius = np.maximum(_radius(), 1 / spectra.FREQUENCIES)
        levels = {
            sure: float(np.median(spectrum[(radius >= low) & (radius < high)]))
            for sure, (low, high) in _REFERENCE.items()
        }
        like = 0.0 if coarsest is None or len(self.found) < LEVELS else coarsest.like_noise
        steep = levels[True] > _FALLING * levels[False]
        sure = steep and like > _SURE
        (low, high), level = _REFERENCE[sure], levels[sure]
        middle = math.sqrt(low * high)
        bound = level * (middle / radius) ** _GROWTH
        return np.asarray(np.where(radius < low, np.minimum(spectrum, bound), spectrum))


def planes_of(channels: int) -> Array:
    """Return the rows along which planes are looked at: opponent colours, or the mean of other channels alone."""
    return OPPONENT if channels == 3 else np.full((1, channels), 1 / math.sqrt(channels))


def looks_white(samples: Array, missing: NDArray[np.bool_] | None) -> bool:
    """Tell whether the quietest blocks of samples (H, W, C) are as strong at the highest frequencies as at middle ones.

    Below 32 samples along an axis, and with samples missing, there are too few blocks to say otherwise. O(N).
    """
    if min(samples.shape[:-1]) < 4 * SIDE or missing is not None:
        return True
    luminance = samples.mean(axis=-1, dtype=np.float64)
    found = block_noise(luminance, luminance, range_of(samples) / 255)
    return found is None or found.spread(_HIGHEST, _HIGHEST) >= _STRONGER * found.spread(_OF_BLOCKS, _OF_BLOCKS)


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
    if len(v) < 3 or v.max() < _VARYING * v.min() or (np.diff(x) <= 0).any():
        return None, None
    slope, start = theilslopes(v, x)[:2]
    line = np.maximum(start + slope * x, 0.5 * v.min())
    # One may lie beside it: a step of intensities that is wide, of which the quietest part was measured.
    if slope <= 0 or np.sort(np.abs(np.log(v / line)))[-2] > math.log(_ON_LINE):
        return None, None
    return x, np.sqrt(line)


def _interpolated(table: Array, places: Array) -> Array:
    """Return a table (8, 8) at fractional places along both axes, bilinear."""
    from scipy.ndimage import map_coordinates

    grid = np.meshgrid(np.minimum(places, SIDE - 1), np.minimum(places, SIDE - 1), indexing="ij")
    return np.asarray(map_coordinates(table, grid, order=1, mode="nearest"))


def _radius() -> Array:
    share = 2 * np.abs(np.fft.fftfreq(spectra.FREQUENCIES))
    return np.asarray(np.hypot(share[:, None], share))
