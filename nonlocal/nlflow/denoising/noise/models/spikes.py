"""Spikes."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import chain, repeat
from typing import Any, ClassVar, Final, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from nlflow._array import Floats, underflowing
from nlflow.denoising.noise.figures import TO_SIGMA, OfHot, OfImpulses, OfRecordings, OfSpikes
from nlflow.denoising.noise.finding.sigma import estimate_sigmas
from nlflow.denoising.noise.models.base import Array, Reduction, Strewn
from nlflow.denoising.noise.models.recordings import check_recording, interpolated

_CUBIC: Final = np.array([1, -4, 6, -4, 1]) / math.sqrt(70)  # of norm 1: leaves white noise its strength


@underflowing
@dataclass(frozen=True)
class Spikes(Strewn):
    """Runs of up to five samples of a recording that are far off: cosmic rays, clicks, jumps, dropouts.

    Parameters
    ----------
    density : float, optional
        For `sample`, the probability that a spike begins at a sample; in what was found, the part of the samples that
        is hit. 0 <= density < 1.
    level : float
        Mean height of spikes in `sample`, in the units of the input, >= 0; `reduce` ignores it.

    Raises
    ------
    InputError
        For a density outside [0, 1), a negative level, and numbers that are not finite.

    Notes
    -----
    A run counts as a spike where no peak or decay of two samples width or more fits it. Runs that may be the signal
    stay: those with similar heights or intervals, those that fill more than 2 % of the samples, and those of one
    sign if the recording may have peaks as narrow; and all runs in a recording of nothing but noise, or without noise.
    Far-off samples that all have one value, at uneven intervals, are spikes in noise alone too.

    `reduce` marks spikes of a single recording as missing, and interpolates those of several channels. O(N).

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
        if self.density is None:
            return "spikes, to be found"
        return f"spikes: {100 * self.density:.3g} % of the samples stick out and are narrower than any line"

    def _check(self, samples: Array, name: str = "image") -> None:
        check_recording(samples, self.kind, name)

    def _found(self, samples: Array, missing: NDArray[np.bool_] | None) -> Spikes:
        return Spikes(float(Spikes(0.5).hits(samples, missing).mean()))

    def hits(self, samples: Array, missing: NDArray[np.bool_] | None = None) -> NDArray[np.bool_]:
        """Return which samples (N, C) are hit; channels are looked at together."""
        present = np.ones(len(samples), bool) if missing is None else ~missing
        return spikes_in(np.asarray(samples, np.float64), present)[0]

    def reduce(self, samples: Array, missing: NDArray[np.bool_] | None = None) -> Reduction:
        """Mark or interpolate spikes."""
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
    height: float  # of the highest sample, with its sign
    apart: float  # what narrower lines leave more than a spike, in variances of the noise
    proved: bool  # no such line looks so


class _Shapes(NamedTuple):
    """What the samples around a run are compared with, beside all parabolas: rows of norm 1, as `basis` sees them."""

    basis: Floats  # (size, n), of which parabolas have nothing
    free: Floats  # (n, length), values of their own in the run
    lines: Floats  # lines of two samples and more
    narrow: Floats  # and narrower ones
    tones: bool  # whether the recording is far above the noise beside parabolas all over


def _shapes(length: int, windows: Floats) -> _Shapes:
    """Return the shapes for runs of a length, by windows (n, size) of the recording without any.

    What tones are used to weighs less: their windows are made white.
    """
    size = windows.shape[1]
    t = np.linspace(-1, 1, size)
    basis = np.linalg.svd(np.stack([np.ones(size), t, t**2]))[2][3:].T
    rest = windows @ basis
    energy = np.square(rest).sum(axis=1)
    tones = len(rest) > 0 and bool(np.median(energy) > OfRecordings.disagree**2 * basis.shape[1])
    if tones:
        power, axes = np.linalg.eigh(rest.T @ rest / len(rest))
        basis = basis @ (axes / np.sqrt(np.maximum(power, 1.0))) @ axes.T
    reach = (length + 1) / 2
    centres = np.linspace(-reach, reach, int(20 * reach) + 1)

    def lines(widths: tuple[float, ...]) -> Floats:
        place = (np.arange(size) - (size - 1) / 2 - centres[:, None])[None] / np.array(widths)[:, None, None]
        decays = np.where(place >= 0, np.exp2(-np.abs(place)), 0.0)
        shapes = [np.exp2(-4 * place**2), (1 + 4 * place**2) ** -1, decays, decays[..., ::-1]]
        seen = np.concatenate(shapes).reshape(-1, size) @ basis
        return np.asarray(seen / np.linalg.norm(seen, axis=1, keepdims=True))

    free = basis[OfSpikes.beside : -OfSpikes.beside].T
    return _Shapes(basis, free, lines(OfSpikes.lines), lines(OfSpikes.narrow), tones)


def rough_of(values: Floats) -> Floats:
    """Return what cubics through their neighbours leave of samples (N,)."""
    return np.convolve(np.pad(values, 2, mode="reflect", reflect_type="odd"), _CUBIC, "valid")


def spikes_in(samples: Floats, present: NDArray[np.bool_]) -> tuple[NDArray[np.bool_], str]:
    """Return where channels (N, C) of a recording have spikes, and why what looks like them stays."""
    found = np.zeros(samples.shape, bool)
    if len(samples) < 4 * OfSpikes.beside + 3 or np.count_nonzero(present) < len(samples) / 2:
        return found, ""
    channels = [np.where(present, one, 0.0) / (np.abs(one[present]).max() or 1.0) for one in samples.T]
    found |= np.stack([_of_one_value(one, present) for one in channels], axis=1)
    for established in chain([False], repeat(True)):
        looks = [_look(one, present & ~f, established) for one, f in zip(channels, found.T, strict=True)]
        each, more = [look.runs for look in looks], found.copy()
        for runs, which in zip(each, more.T, strict=True):
            for run in runs:
                which[run.start : run.start + run.length] = True
        if np.array_equal(more, found):
            break
        if not established:
            why = _kept(each, len(samples)) or _alone(looks, ~more)
            if why:
                return found, why
        found = more
    return found, ""


class _Look(NamedTuple):
    """One channel without what is missing, what the noise is in it, and runs that are spikes by themselves."""

    values: Floats
    level: Floats
    runs: list[_Run]


def _look(values: Floats, known: NDArray[np.bool_], established: bool) -> _Look:
    from scipy.ndimage import median_filter

    values = interpolated(values, known)
    sigma = float(estimate_sigmas(values[:, None], ~known)[0])
    rough = np.abs(rough_of(values))
    level = np.maximum(TO_SIGMA * median_filter(rough, OfSpikes.near, mode="reflect"), sigma)
    places = np.flatnonzero(rough > OfImpulses.spike * level)
    if sigma < OfSpikes.nothing * float(np.ptp(values)) or not 0 < len(places) <= len(values) / 10:
        return _Look(values, level, [])
    chosen = known & ~_in_held(values)
    runs = _runs(values, level, places, established)
    return _Look(values, level, [run for run in runs if chosen[run.start : run.start + run.length].all()])


def _in_held(values: Floats) -> NDArray[np.bool_]:
    """Return which samples (N,) repeat one value as often as nearly all values are: one observation, and no run."""
    begins = np.flatnonzero(np.diff(values, prepend=math.nan) != 0)
    lengths = np.diff(begins, append=len(values))
    usual = np.sort(lengths)[int(OfSpikes.unusual * len(lengths))]
    return np.repeat((lengths >= usual) & (usual > 1), lengths)


def _of_one_value(values: Floats, present: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return the samples of one value, far from what is beside them: what sensors and links give in place of none.

    Pulses of one height have the noise of what they stand on, and peaks that are cut off have flanks.
    """
    from scipy.ndimage import binary_dilation, label

    different, counts = np.unique(values[present], return_counts=True)
    for k in {0, len(counts) - 1, int(counts.argmax())}:
        near = np.delete(counts[max(k - 1, 0) : k + 2], min(k, 1))
        hit = present & (values == different[k])
        pieces, count = label(hit)
        if OfSpikes.few * near.max(initial=1) > count or np.bincount(pieces[hit]).max() > OfSpikes.longest:
            continue
        wider = binary_dilation(hit)
        base = interpolated(values, present & ~wider)
        sigma = float(estimate_sigmas(base[:, None], ~present | wider)[0])
        off = np.abs(values - base) > OfImpulses.spike * sigma
        begins = np.flatnonzero(np.diff(pieces, prepend=0) > 0)
        if sigma > 0 and off[hit].mean() > 0.5 > off[wider & ~hit & present].mean() and not _alike(np.diff(begins)):
            return np.asarray(hit)
    return np.zeros(len(values), bool)


def _alike(numbers: Any) -> bool:
    """Tell whether numbers differ as little as the heights, or the intervals, of beats."""
    return bool(np.std(numbers) < OfSpikes.alike * abs(np.mean(numbers)))


def _runs(values: Floats, level: Floats, places: NDArray[np.intp], established: bool) -> list[_Run]:
    """Return runs that are spikes by themselves, none of which touches another; more are likely beside others."""
    from scipy.ndimage import label, median_filter
    from scipy.stats import chi2
    from scipy.stats import f as law_of_f

    size, most = len(values), OfSpikes.longest
    limit = math.log(OfRecordings.false / (1 if established else size))
    starts = np.unique(np.clip(np.add.outer(places, np.arange(-most, 3)).ravel(), 0, size - 1))
    margin = OfSpikes.beside + most
    padded, middle = np.pad(values, margin, mode="reflect", reflect_type="odd"), np.pad(values, margin, mode="edge")
    middle = median_filter(middle, 2 * most + 1)
    islands = label(np.abs(padded - middle) > OfImpulses.spike * np.pad(level, margin, mode="edge"))[0]
    islands[np.bincount(islands.ravel())[islands] > most] = 0
    rough = np.zeros(size + 2 * margin, bool)
    rough[places + margin] = True
    freedom = 2 * OfSpikes.beside - 3
    found: list[_Run] = []
    proofs: dict[tuple[int, int], tuple[float, bool]] = {}
    for length in range(1, most + 1):
        start, wide = starts[starts + length <= size], length + 2 * OfSpikes.beside
        windows, others, calm, strange = (
            sliding_window_view(one, wide)[most : most + size + 1 - length] for one in (padded, islands, middle, rough)
        )
        unit = level[np.minimum(np.arange(len(windows)) + length // 2, size - 1)][:, None]
        usual = np.flatnonzero(~strange.any(axis=1))[:: math.ceil(size / OfRecordings.most_windows)]
        shapes = _shapes(length, (windows[usual] - windows[usual, :1]) / unit[usual])
        own, others, calm, unit = windows[start], others[start], calm[start], unit[start]
        # Another spike nearby, with calm samples between the two, says nothing of this one; of the other sign it may be
        # the same event.
        near = others[:, OfSpikes.beside - 1 : 1 - OfSpikes.beside]
        if not established:
            sign = np.sign(own - calm)
            others = np.where(sign == sign[:, OfSpikes.beside, None], others, 0)
        own = np.where((others > 0) & ~(others[:, :, None] == near[:, None]).any(axis=2), calm, own)
        own = ((own - own[:, :1]) / unit) @ shapes.basis
        energy = np.square(own).sum(axis=1)
        height = own @ np.linalg.pinv(shapes.free).T
        rest = np.square(own - height @ shapes.free.T).sum(axis=1)
        is_noise = rest < chi2.isf(OfSpikes.noise, freedom)

        def chance(left: Floats, rest: Floats = rest, is_noise: Any = is_noise, length: int = length) -> Floats:
            more = np.maximum(left - rest, 0.0)
            ratio = more / length / np.maximum(rest / freedom, 1e-12)
            by_noise = chi2.logsf(more, length)
            by_structure = law_of_f.logsf(ratio, length, freedom)
            return np.asarray(np.where(is_noise, by_noise, np.maximum(by_noise, by_structure)))

        wide_left, narrow_left = (energy - np.square(own @ s.T).max(axis=1) for s in (shapes.lines, shapes.narrow))
        by_line = chance(wide_left)
        one_sign = (np.sign(height) == np.sign(height[:, :1])).all(axis=1)
        # A line has neighbours, wherever it lies; of longer runs that counts which no line on the list looks like.
        # Tones begin as abruptly as spikes, and prove nothing.
        apart = (
            (not shapes.tones) & (chance(narrow_left) < limit) & (narrow_left - rest > OfSpikes.apart * (energy - rest))
        )
        by_place = zip(start, np.where(is_noise & (not shapes.tones), narrow_left - rest, 0.0), apart, strict=True)
        proofs |= {(int(s), length): (float(m), bool(p)) for s, m, p in by_place}
        error = np.sqrt(np.maximum(rest / freedom, 1.0))
        for k in np.flatnonzero((by_line < limit) & one_sign & (wide_left - rest > OfSpikes.apart * (energy - rest))):
            clear = np.flatnonzero(np.abs(height[k]) > OfImpulses.spike * error[k])
            if len(clear):
                first, last = int(clear[0]), int(clear[-1])
                high = float(height[k, np.abs(height[k]).argmax()] * unit[k, 0])
                found.append(_Run(float(by_line[k]), int(start[k]) + first, last - first + 1, high, 0.0, False))
    taken = np.zeros(size + 2, bool)
    chosen = []
    for run in sorted(found):
        if not taken[run.start : run.start + run.length + 2].any():
            taken[run.start : run.start + run.length + 2] = True
            more, proved = proofs.get((run.start, run.length), (0.0, False))
            chosen.append(run._replace(apart=more, proved=proved))
    return chosen


def _kept(each: list[list[_Run]], size: int) -> str:
    """Return why spikes of channels may be the signal by their number, heights and places; empty where they are not."""
    from scipy.stats import chi2

    runs = [run for one in each for run in one]
    what = f"{len(runs)} runs of few samples stick out"
    if sum(run.length for run in runs) > OfHot.most_share * size * len(each):
        return f"{what}, too many to be spikes: they stay"
    single = [run.apart for run in runs if run.length == 1]
    together = bool(single) and chi2.logsf(sum(single), len(single)) < math.log(OfRecordings.false / size)
    down = sum(run.height < 0 for run in runs)
    both_ways = OfSpikes.few * min(down, len(runs) - down) >= len(runs) >= OfSpikes.few  # lines go one way
    proved = max(sum(run.proved and run.length < OfSpikes.few for run in runs), together * len(single))
    if proved < OfSpikes.proved * len(runs) and not both_ways:
        return f"{what}, but may be lines as narrow as that: they stay"
    for own in each:
        heights, gaps = [run.height for run in own], np.diff(np.sort([run.start for run in own]))
        for kind, numbers in (("heights", heights), ("intervals", gaps)):
            if len(own) >= OfSpikes.few and _alike(numbers):
                return f"{what}, but their {kind} are alike, as those of beats and pulses: they stay"
    return ""


def _alone(looks: list[_Look], known: NDArray[np.bool_]) -> str:
    """Return why spikes may be the signal since nothing else is one in any channel; empty where something is."""
    from scipy.stats import chi2

    side = OfSpikes.near // 4
    count = len(known) // side
    for look, own in zip(looks, known.T, strict=True):
        values = interpolated(look.values, own)
        middle = np.median((values / look.level)[: count * side].reshape(count, side), axis=1)
        # Of that of means the variance of medians is pi / 2.
        if count > 2 and 2 / math.pi * side * float(np.var(middle)) * count > chi2.isf(OfRecordings.false, count - 1):
            return ""
    return "single samples stick out, but nothing else is in the recording: they may be the signal, and stay"
