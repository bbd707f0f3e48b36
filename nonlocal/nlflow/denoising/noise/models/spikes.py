"""Spikes of a recording: cosmic rays, sparks, pops of an electrode."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, ClassVar, Final, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from nlflow._array import Floats, underflowing
from nlflow.denoising.noise.figures import OfHot, OfImpulses, OfRecordings, OfSpikes
from nlflow.denoising.noise.finding.sigma import estimate_sigmas
from nlflow.denoising.noise.models.base import Array, Reduction, Strewn
from nlflow.denoising.noise.models.recordings import check_recording, interpolated, spread_of

_CUBIC: Final = np.array([1, -4, 6, -4, 1]) / math.sqrt(70)  # of norm 1: leaves white noise its strength


@underflowing
@dataclass(frozen=True)
class Spikes(Strewn):
    """Runs of one to three samples of a recording are replaced by something far off: cosmic rays, sparks, pops.

    Parameters
    ----------
    density : float, optional
        Spikes a sample, 0 <= density < 1. None where they are to be found (`completed`).
    level : float
        Mean height of spikes, in the units of the input, >= 0; only `sample` uses it.

    Raises
    ------
    InputError
        For a density outside [0, 1), a negative level, and numbers that are not finite.

    Notes
    -----
    A spike is narrower than what an instrument lets through; a line of a spectrum is two samples wide at half of its
    height, or wider, and has flanks. So `reduce` holds two hypotheses against each other on the samples around each
    run: a parabola and free values in the run, or a parabola and a line of a width and place that fit best. A spike is
    one where the second leaves more than the first by an amount that chance explains once in a thousand recordings:
    by the law of chi-squared where the first leaves no more than the noise, by that of F where there is structure.

    Nothing counts as a spike in these cases, since it may be what was recorded:

    - Spikes are alike in height or follow each other at equal intervals, as beats and pulses do.
    - They are many, or all of them may be lines narrower than two samples.
    - Nothing but noise is beside them.
    - There is no noise.

    In a single recording the samples of a spike are missing afterwards. Where there are several channels those of the
    channel are interpolated, for the others tell what they tell. O(N).

    References
    ----------
    A ratio of likelihoods, as it is told in textbooks; the search is ours.

    Examples
    --------
    >>> import numpy as np
    >>> from nlflow.denoising.noise import Spikes
    >>> t, rng = np.arange(2000), np.random.default_rng(0)
    >>> spectrum = 50 / (1 + ((t - 900) / 8) ** 2) + t / 100 + rng.normal(size=2000)
    >>> noisy = Spikes(0.003, level=300.0).sample(spectrum, rng=1)
    >>> found = Spikes(0.003).reduce(noisy[:, None])
    >>> bool(np.abs(noisy - spectrum)[~found.missing].max() < 20)
    True
    """

    kind: ClassVar[str] = "spikes"

    level: float = field(default=0.0, metadata={"minimum": 0, "hint": "the mean height"})

    def _noisy(self, samples: Array, rng: np.random.Generator) -> Array:
        """Add spikes of one or two samples, of exponential heights; others in each channel."""
        begins = rng.random(samples.shape) < self._known("density")
        heights = np.where(begins, rng.exponential(self.level, samples.shape), 0.0)
        goes_on = rng.random(samples.shape) < 0.5
        heights[1:] = np.where(begins[1:], heights[1:], np.where(goes_on, heights, 0.0)[:-1])
        return np.asarray(samples + heights)

    def describe(self) -> str:
        """Return what this noise is, in a few words."""
        if self.density is None:
            return "spikes, to be found"
        return f"spikes: {100 * self.density:.3g} % of the samples stick out and are as narrow as no line is"

    def _check(self, samples: Array) -> None:
        check_recording(samples, self.kind)

    def _found(self, samples: Array, missing: NDArray[np.bool_] | None) -> Spikes:
        return Spikes(float(Spikes(0.5).hits(samples, missing).mean()))

    def _hits(self, plane: Array, absent: NDArray[np.bool_]) -> NDArray[np.bool_]:
        return spikes_in(np.asarray(plane, np.float64), ~absent)[0]

    def reduce(self, samples: Array, missing: NDArray[np.bool_] | None = None) -> Reduction:
        """Say where spikes are, or interpolate where there are several channels; see the notes.

        Raises
        ------
        InputError
            For images.
        """
        if np.ndim(samples) != 2 or samples.shape[1] == 1:
            return super().reduce(samples, missing)
        present = np.ones(len(samples), bool) if missing is None else ~missing
        signal, found = np.asarray(samples, np.float64).T, self.hits(samples, missing).T
        columns = [interpolated(c, present & ~f) if f.any() else c for c, f in zip(signal, found, strict=True)]
        filled = np.where(found.T, np.stack(columns, axis=1), samples)
        return Reduction(filled.astype(samples.dtype), missing=missing)


class _Run(NamedTuple):
    """Samples that may be a spike."""

    chance: float  # logarithm, that a line of two samples or more looks so
    start: int
    length: int
    height: float
    apart: float  # what narrower lines leave more than a spike, in variances of the noise
    proved: bool  # no such line looks so


class _Shapes(NamedTuple):
    """What the samples around a run are compared with: rows of norm 1, beside all parabolas."""

    inside: NDArray[np.bool_]
    whole: Floats  # orthonormal parabolas over all samples, as columns
    outside: Floats  # the same over those beside the run
    through: Floats  # from the samples beside the run to the parabola over all
    lines: Floats  # lines of two samples and more
    narrow: Floats  # and narrower ones


@lru_cache
def _shapes(length: int) -> _Shapes:
    size = length + 2 * OfSpikes.beside
    t = np.linspace(-1, 1, size)
    parabolas = np.stack([t**0, t, t**2], axis=1)
    inside = np.zeros(size, bool)
    inside[OfSpikes.beside : -OfSpikes.beside] = True
    whole, outside = np.linalg.qr(parabolas)[0], np.linalg.qr(parabolas[~inside])[0]

    def lines(widths: tuple[float, ...]) -> Floats:
        reach = (length + 1) / 2
        centres = np.linspace(-reach, reach, int(20 * reach) + 1)
        place = (np.arange(size) - (size - 1) / 2 - centres[:, None])[None] / np.array(widths)[:, None, None]
        both = np.concatenate([np.exp2(-4 * place**2), 1 / (1 + 4 * place**2)]).reshape(-1, size)
        both = both - (both @ whole) @ whole.T
        return np.asarray(both / np.linalg.norm(both, axis=1, keepdims=True))

    through = parabolas @ np.linalg.pinv(parabolas[~inside])
    return _Shapes(inside, whole, outside, through, lines(OfSpikes.lines), lines(OfSpikes.narrow))


def rough_of(values: Floats) -> Floats:
    """Return what cubics through their neighbours leave of samples (N,); white noise keeps its strength."""
    return np.convolve(np.pad(values, 2, mode="reflect", reflect_type="odd"), _CUBIC, "valid")


def spikes_in(values: Floats, present: NDArray[np.bool_]) -> tuple[NDArray[np.bool_], str]:
    """Return where a recording (N,) has spikes, and why what looks like them stays; empty where nothing does."""
    from scipy.ndimage import median_filter

    found = np.zeros(len(values), bool)
    if len(values) < 4 * OfSpikes.beside + 3 or np.count_nonzero(present) < len(values) / 2:
        return found, ""
    scale = float(np.abs(values[present]).max(initial=0.0))
    values = interpolated(np.where(present, values, 0.0), present) / (scale or 1.0)
    sigma = float(estimate_sigmas(values[:, None], ~present)[0])
    rough = np.abs(rough_of(values))
    level = np.maximum(spread_of(np.ones(1)) * median_filter(rough, OfSpikes.near, mode="reflect"), sigma)
    if sigma < OfSpikes.nothing * float(np.ptp(values)):
        return found, ""
    rough_places = np.flatnonzero(rough > OfImpulses.spike * level)
    if len(rough_places) == 0 or len(rough_places) > len(values) / 10:
        return found, ""
    runs = [run for run in _runs(values, level, rough_places) if present[run.start : run.start + run.length].all()]
    if not runs:
        return found, ""
    for run in runs:
        found[run.start : run.start + run.length] = True
    why = _kept(runs, len(values)) or _alone(interpolated(values, ~found), level)
    return (np.zeros_like(found), why) if why else (found, "")


def _runs(values: Floats, level: Floats, places: NDArray[np.intp]) -> list[_Run]:
    """Return runs that are spikes by themselves, none of which touches another."""
    from scipy.ndimage import label, median_filter
    from scipy.stats import chi2
    from scipy.stats import f as law_of_f

    size, most = len(values), OfSpikes.longest
    limit = math.log(OfRecordings.false / size)
    starts = np.unique(np.clip(np.add.outer(places, np.arange(-most, 3)).ravel(), 0, size - 1))
    margin = OfSpikes.beside + most
    padded, middle = np.pad(values, margin, mode="reflect", reflect_type="odd"), np.pad(values, margin, mode="edge")
    middle = median_filter(middle, 2 * most + 1)
    islands = label(np.abs(padded - middle) > OfImpulses.spike * np.pad(level, margin, mode="edge"))[0]
    islands[np.bincount(islands.ravel())[islands] > most] = 0
    freedom = 2 * OfSpikes.beside - 3
    found: list[_Run] = []
    proofs: dict[tuple[int, int], tuple[float, bool]] = {}
    for length in range(1, most + 1):
        shapes, start = _shapes(length), starts[starts + length <= size]
        own, others, calm = (
            sliding_window_view(one, length + 2 * OfSpikes.beside)[start + most] for one in (padded, islands, middle)
        )
        # Another spike of the same sign nearby, with calm samples between the two, says nothing of this one.
        near = others[:, OfSpikes.beside - 1 : 1 - OfSpikes.beside]
        sign = np.sign(own - calm)
        others = np.where(sign == sign[:, OfSpikes.beside, None], others, 0)
        own = np.where((others > 0) & ~(others[:, :, None] == near[:, None]).any(axis=2), calm, own)
        unit = level[np.minimum(start + length // 2, size - 1)]
        own = (own - own[:, :1]) / unit[:, None]
        beside = own[:, ~shapes.inside]
        rest = np.square(beside - (beside @ shapes.outside) @ shapes.outside.T).sum(axis=1)
        smooth = own - (own @ shapes.whole) @ shapes.whole.T
        energy = np.square(smooth).sum(axis=1)
        is_noise = rest < chi2.isf(OfSpikes.noise, freedom)

        def chance(left: Floats, rest: Floats = rest, is_noise: Any = is_noise, length: int = length) -> Floats:
            more = np.maximum(left - rest, 0.0)
            ratio = more / length / np.maximum(rest / freedom, 1e-12)
            by_noise = chi2.logsf(more, length)
            by_structure = law_of_f.logsf(ratio, length, freedom)
            return np.asarray(np.where(is_noise, by_noise, np.maximum(by_noise, by_structure)))

        wide_left, narrow_left = (energy - np.square(smooth @ s.T).max(axis=1) for s in (shapes.lines, shapes.narrow))
        wide = chance(wide_left)
        height = own[:, shapes.inside] - (beside @ shapes.through.T)[:, shapes.inside]
        one_sign = (np.sign(height) == np.sign(height[:, :1])).all(axis=1)
        # A line has neighbours, wherever it lies; of longer runs that counts which no line on the list looks like.
        apart = chance(narrow_left) < limit
        if length > 1:
            apart &= narrow_left - rest > OfSpikes.apart * (energy - rest)
        by_place = zip(start, np.where(is_noise, narrow_left - rest, 0.0), apart, strict=True)
        proofs |= {(int(s), length): (float(m), bool(p)) for s, m, p in by_place}
        error = np.sqrt(np.maximum(rest / freedom, 1.0))
        for k in np.flatnonzero((wide < limit) & one_sign):
            clear = np.flatnonzero(np.abs(height[k]) > OfImpulses.spike * error[k])
            if len(clear):
                first, last = int(clear[0]), int(clear[-1])
                high = float(np.abs(height[k]).max() * unit[k])
                found.append(_Run(float(wide[k]), int(start[k]) + first, last - first + 1, high, 0.0, False))
    taken = np.zeros(size + 2, bool)
    chosen = []
    for run in sorted(found):
        if not taken[run.start : run.start + run.length + 2].any():
            taken[run.start : run.start + run.length + 2] = True
            more, proved = proofs.get((run.start, run.length), (0.0, False))
            chosen.append(run._replace(apart=more, proved=proved))
    return chosen


def _kept(runs: list[_Run], size: int) -> str:
    """Return why spikes may be the signal by their number, heights and places; empty where they are not."""
    from scipy.stats import chi2

    what = f"{len(runs)} runs of one to three samples stick out"
    if sum(run.length for run in runs) > OfHot.most_share * size:
        return f"{what}, too many to be spikes: they stay"
    single = [run.apart for run in runs if run.length == 1]
    together = bool(single) and chi2.logsf(sum(single), len(single)) < math.log(OfRecordings.false / size)
    if max(sum(run.proved for run in runs), together * len(single)) < OfSpikes.proved * len(runs):
        return f"{what}, but may be lines as narrow as that: they stay"
    if len(runs) >= OfSpikes.few:
        heights, gaps = np.array([run.height for run in runs]), np.diff(np.sort([run.start for run in runs]))
        for kind, numbers in (("heights", heights), ("intervals", gaps)):
            if np.std(numbers) < OfSpikes.alike * np.mean(numbers):
                return f"{what}, but their {kind} are alike, as those of beats and pulses: they stay"
    return ""


def _alone(values: Floats, level: Floats) -> str:
    """Return why spikes may be the signal since nothing else is one; empty where something is."""
    from scipy.stats import chi2

    side = OfSpikes.near // 4
    count = len(values) // side
    middle = np.median((values / level)[: count * side].reshape(count, side), axis=1)
    # Of that of means the variance of medians is pi / 2.
    if count > 2 and 2 / math.pi * side * float(np.var(middle)) * count > chi2.isf(OfRecordings.false, count - 1):
        return ""
    return "single samples stick out, but nothing else is in the recording: they may be the signal, and stay"
