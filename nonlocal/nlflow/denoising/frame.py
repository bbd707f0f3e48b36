"""What is found out about a whole image before parts of it are denoised."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from nlflow._array import root_mean_square
from nlflow.denoising.given import Known, as_given, refuse_unordered
from nlflow.denoising.info import check_units
from nlflow.denoising.layout import Axes
from nlflow.denoising.noise.models.base import Noise, NoiseEstimate, Reduction
from nlflow.denoising.noise.names import NO_NOISE, choose_noise
from nlflow.denoising.noise.spectra import levels_for, levels_within
from nlflow.denoising.options import Options
from nlflow.denoising.residual import REACH, with_peaks
from nlflow.denoising.runs import Run, Trail, Watch, select, within
from nlflow.denoising.sigmas import LEAST_VARIANCE, check_sigma, levels_in, of_channels, strengthened
from nlflow.domains.samples import by_rows, exact_means, range_of, variance_of, varying
from nlflow.errors import InputError, warn_caller

if TYPE_CHECKING:
    from nlflow.denoising.groupwise import Groups
    from nlflow.denoising.noise.models.gaussian import GaussianNoise
    from nlflow.denoising.noise.models.intensities import Poisson
    from nlflow.denoising.pixelwise import Pixels

Array = NDArray[Any]
Mask = NDArray[np.bool_]
LEVELS = 2  # coarser images, at most
# Beyond this ratio of range to noise no two patches are ever alike, and squares would leave the range of float32.
_NOISELESS = 1e12
# Noise assumed for filling in where there is none, of the standard deviation of the samples.
_FILLING = 0.08
_COUNTS = 2.0  # times the noise of counts, above which units are no counts: texture is measured too
_HELD = 10.0  # lambda~ where there is data, of the flow that first fills in


@dataclass(frozen=True)
class Spread:
    """Figures by which a flow is chosen."""

    extent: float
    variance: float
    channels: int
    dtype: np.dtype[Any]
    moments: Callable[[], Array]

    @classmethod
    def of(cls, f: Array) -> Spread:
        def moments() -> Array:
            flat = f.reshape(-1, f.shape[-1]).astype(np.float64)
            return np.asarray(flat.T @ flat)

        return cls(float(np.ptp(f)), variance_of(f), int(f.shape[-1]), f.dtype, moments)

    @property
    def ratio(self) -> float:
        return 1 / math.sqrt(max(self.variance - 1.0, 0.01)) / self.channels


@dataclass(frozen=True)
class Coloured:
    """Gaussian noise that is not the same white noise everywhere and in all colours, in units of `Frame.level`."""

    axes: Array  # (C, C), the channels along which it is independent, as rows
    spectrum: Array  # (C, h, w), its power along them
    strength: Array  # (..., 1), its variance relative to that of the spectrum
    levels: int  # coarser images on which low frequencies are met
    shown: Array  # (C, h, w), as `spectrum` without what compression cut off: the noise that the samples show
    compressed: bool = False  # whether compression cut something off


@dataclass(frozen=True)
class Frame:
    """What the whole decides: units, channels, noise, missing and kept samples, and the flow; C channels vary."""

    axes: Axes
    quality: str
    options: Options
    offset: Array  # (C,), what is subtracted
    level: Array  # (C,), the noise, which is divided by
    idle: str = ""  # why nothing is done; empty when something is
    flow: Groups | Pixels | None = None  # None where nothing is done, and for noise that is coloured
    exact: Any = None  # broadcasts to (..., C): where samples are free of noise, and are kept
    live: Mask | None = None  # of all channels those that vary, where not all do; the others are kept
    model: Noise | None = None  # None for white noise
    found: NoiseEstimate | None = None  # where the noise was found out
    estimated: bool = False
    variance: Any = None  # (...), relative variance of the noise where it varies, of mean 1
    missing: Mask | None = None  # (...)
    absent: Mask | None = None  # (...), of those that are missing what was so before the noise was looked at
    fills: bool = True  # whether samples that are missing are filled in, where they do not all stay as they are
    kept: Any = None  # (...)
    coloured: Coloured | None = None
    given: tuple[str, ...] = ()  # what was seen of the samples: what is missing, what stays
    known: Known | None = None  # of a whole in parts, what says nothing
    few: Poisson | None = None  # counts that are so few that larger cells come first
    sigma: float = 0.0  # of the noise in the picture, whatever the flow makes of it
    sigma_effective: float | None = None  # that which the flow takes it for, where it is another one

    @property
    def shape(self) -> tuple[int, ...]:
        return self.axes.spatial

    @property
    def halo(self) -> tuple[int, ...]:
        count = len(self.shape)
        if self.flow is None:
            return (0,) * count
        given_back = REACH if count == 2 and len(self.level) == 1 else 0
        return tuple(n + given_back for n in self.flow.halo[-count:])

    def bytes_needed(self, shape: tuple[int, ...]) -> int:
        return 0 if self.flow is None else self.flow.bytes_needed(shape, len(self.level))

    def with_flow(self, spread: Spread, weakest: float = 1.0) -> Frame:
        if is_by_pixels(self.quality, self.axes):
            from nlflow.denoising.pixelwise import Pixels

            return replace(self, flow=Pixels.of(spread, self.axes.dimension, self.options, self.unit))
        from nlflow.denoising.groupwise import Groups, preset_for

        preset = preset_for(self.quality, self.axes)
        return replace(self, flow=Groups.of(preset, spread, self.axes.dimension, weakest))

    @property
    def unit(self) -> float:
        return root_mean_square(self.level)

    @property
    def noise(self) -> str:
        if self.doubted is None and self.found is not None:  # none of it is taken out, and it is there all the same
            return self.found.model.describe()
        if self.model is not None:
            return self.model.describe()
        if self.found is not None and not np.any(self.found.model.white_sigma):
            return NO_NOISE
        return "white noise" + (", varying" if self.variance is not None else "")

    def told(self) -> dict[str, Any]:
        found, model = self.found, self.model
        flow: dict[str, Any] = {"functional": "none"}
        if self.idle:
            flow["stopped_by"] = f"returned unchanged: {self.idle}"
        elif self.flow is not None:
            flow = self.flow.told()
        return {
            "sigma": self.sigma, "sigma_effective": self.sigma_effective, "sigma_estimated": self.estimated,
            "noise": self.noise, "model": None if model is None else model.as_dict(), "quality": self.quality,
            "confidence": found.confidence if found else "", "reasons": found.reasons if found else (),
            "given": self.given, **flow,
        }  # fmt: skip

    def without_noise(self, found: NoiseEstimate) -> Frame:
        idle, level = "what was taken for noise has not its law", np.zeros_like(self.level)
        return replace(self, found=found, model=found.model, idle=idle, level=level, sigma=0.0, sigma_effective=None,
                       flow=None, coloured=None)  # fmt: skip

    @property
    def doubted(self) -> NoiseEstimate | None:
        """The verdict with which a residual is compared; None if nothing was to be removed."""
        return self.found if self.options.strength else None

    def too_strong(self, span: float) -> str:
        strength = self.options.strength
        in_units = self.model is None or self.model.is_coloured or self.model.white_sigma is not None
        if not self.sigma > span > 0 or not in_units:
            return ""
        if strength <= 1:
            return "" if self.estimated else (
                f"sigma: got {self.sigma:.4g}, more than the range of the samples ({span:.4g}), of which next to "
                f"nothing is left; it is in the units of the input: {self.sigma:.4g} of 255 grey levels is "
                f"{self.sigma / 255:.3g} of samples from 0 to 1")  # fmt: skip
        return (f"strength: got {strength:g}, with which the noise is {self.sigma:.4g}, more than the range of the "
                f"samples ({span:.4g}): next to nothing of them is left; take a strength near 1")  # fmt: skip

    def part(self, block: Any) -> Part:
        looked = as_given(block, replace(self.axes, shape=block.shape), known=self.known or Known())
        samples, restore, missing = looked.samples, looked.restore, looked.missing
        if self.live is not None:
            samples, restore = _without_others(samples, missing, self.live, restore)
        if missing is not None and missing.all():  # all of it stays
            return Part(samples, Reduction(samples), np.zeros_like(samples), restore, missing)
        model = self.model
        reduction = Reduction(samples, missing=missing) if model is None else model.reduce(samples, missing)
        f = samples if self.idle else in_units(reduction.samples, self.offset, self.level)
        if missing is not None and not self.idle:
            f[missing] = 0
            f = filled(f, missing)
        return Part(samples, reduction, f, restore, missing)

    def run(self, f: Array, watch: Watch) -> Run:
        if self.coloured is not None:
            from nlflow.denoising.groupwise import coloured, preset_for

            return coloured(f, self, self.coloured, preset_for(self.quality, self.axes), watch)
        if self.few is not None and not watch.every:
            from nlflow.denoising.cells import in_cells

            return in_cells(f, self, watch)
        assert self.flow is not None
        if self.has_scales and not watch.every:
            from nlflow.denoising.groupwise import at_scales

            return at_scales(f, self, watch)
        return self.flow.run(f, self, watch)

    @property
    def fills_alone(self) -> bool:
        return self.exact is not None and bool(np.all(self.exact))

    @property
    def has_scales(self) -> bool:
        even = self.variance is None and self.exact is None and not self.idle
        blind = self.quality not in ("fast", "pixels") and even and self.found is not None and len(self.shape) == 1
        return blind and levels_within((*self.shape, len(self.level)), 1) > 0

    def solve(self, part: Part, watch: Watch) -> tuple[Array, float | None, dict[str, Any]]:
        unit, tell, stopping, f = self.unit, watch.tell, self.options.stopping, part.f
        half = 0.5 if stopping == "sure" else 1.0  # that rule runs the flow once more
        found = self.run(f, replace(watch, every=stopping is not None, tell=within(tell, 0.0, half)))
        if watch.trail is not None and "distance" in watch.trail.course:
            watch.trail.course["distance"] *= unit
        if stopping is None:
            return found.path[-1], None, found.told

        def rerun(moved: Array) -> list[Array]:
            again = self.with_flow(Spread.of(moved), self.weakest)
            return again.run(moved, Watch(True, watch.limit, within(tell, half, 1.0))).path

        relative = 1.0 if self.variance is None else np.sqrt(self.variance)[..., None]
        seen = slice(None) if self.missing is None else ~self.missing
        seed, units = self.options.seed, self.level / unit
        index, risk, why = select(stopping, f, found.path, rerun, relative, seen, seed, units)
        told = {**found.told, "stopped_by": why, "steps": index + 1}
        return found.path[index], None if risk is None else risk * unit**2, told

    @property
    def weakest(self) -> float:
        return 1.0 if self.variance is None else float(np.sqrt(self.variance.min()))


@dataclass(frozen=True)
class Part:
    """The channels that vary of an image or a part."""

    samples: Array  # (..., C), in the units of the input
    reduction: Reduction  # to units in which the noise is Gaussian, and back
    f: Array  # (..., C), in units of the noise, about 0; what is missing is filled in
    restore: Callable[[Array], Any]  # from (..., C) to the shape of the input
    missing: Mask | None = None  # (...)

    @property
    def known(self) -> Array:
        """The samples without noise that needs no flow, such as stripes."""
        reduced = self.reduction.samples
        if reduced is self.samples or not self.reduction.keeps_units:
            return self.samples
        return reduced.astype(self.samples.dtype, copy=False)

    def unchanged(self, missing: Mask | None = None) -> Array:
        return self.known if missing is None else np.where(missing[..., None], self.known[~missing][0], self.known)

    def as_it_was(self, absent: Mask | None, u: Array) -> Array:
        return self.samples if absent is None else np.where(absent[..., None], u, self.samples)

    def result(self, u: Array, frame: Frame) -> Array:
        whole = u if self.missing is not None or frame.coloured is not None else with_peaks(self.f, u)
        gaussian = by_rows(lambda rows: rows * frame.level + frame.offset, whole, self.f.dtype)
        return self.with_known(self.reduction.back(gaussian).astype(self.samples.dtype, copy=False), frame)

    def with_known(self, u: Array, frame: Frame) -> Array:
        kept = None if frame.kept is None else frame.kept[..., None]
        # What was found to be an impulse is filled in, but was not missing.
        for where, values, lost in ((frame.exact, self.known, frame.missing), (kept, self.samples, frame.absent)):
            if where is not None:
                u = np.where(where if lost is None else where & ~lost[..., None], values, u)
        return u


def observe(
    image: Any, sigma: Any, noise: Any, axes: Axes, quality: str, options: Options, *, mask: Any = None,
    keep: Any = None, trail: Trail | None = None, found: NoiseEstimate | None = None,
) -> tuple[Frame, Part]:  # fmt: skip
    axes.check_patch(options.patch_size)
    given, sigma = choose_noise(noise, sigma)
    check_sigma(sigma)
    kept = None if keep is None else axes.place("keep", keep)
    looked = as_given(image, axes, mask)
    samples, restore, missing = looked.samples, looked.restore, looked.missing
    if isinstance(given, str) and given == "auto":
        refuse_unordered(samples, np.asarray(image).dtype, missing)
    varies, asked = varying(samples, missing), sigma
    live = live_of(varies & looked.signals if (varies & looked.signals).any() else varies)
    if live is not None:  # without an alpha channel, and one that recorded nothing
        sigma = of_channels(sigma, live, axes)
        given = given if isinstance(given, str) else given.of_channels(live)
        samples, restore = _without_others(samples, missing, live, restore)
    again = found is not None
    model, found = _model(given, samples, missing, options.strength, trail, found)
    used = model
    if model is not None and is_by_pixels(quality, axes):
        used = model.nearest_white(samples.shape[-1], samples.ndim - 1)
    reduction = Reduction(samples, missing=missing) if used is None else used.separated().reduce(samples, missing)
    rest, signal = reduction.rest, reduction.samples
    if rest is not None and sigma is not None:
        raise InputError(f"sigma: got a value beside {type(model).__name__}, which says how strong the noise is; "
                         "leave one of them out")  # fmt: skip
    few = None if is_by_pixels(quality, axes) else reduction.few
    frame = Frame(axes, quality, options, np.zeros(0), np.zeros(0), live=live, model=model, found=found, kept=kept,
                  missing=reduction.missing, absent=missing, given=looked.told, few=few,
                  fills=looked.fills or reduction.missing is not missing)  # fmt: skip
    mapped = rest is not None and not rest.is_white and (signal.ndim == 4 or rest.is_mapped)
    if rest is not None and not rest.is_white and not mapped and not is_by_pixels(quality, axes):
        frame, f = with_colour(frame, signal, rest)
    else:
        if rest is not None and not rest.is_white:
            powers = rest.powers(signal.shape[-1], signal.ndim - 1)  # correlated noise of volumes is refused
            # Of a mixture; a flow of pixels counts it as white noise.
            sigma = rest.along(signal) if mapped else math.sqrt(float(powers.mean()))
            sigma = sigma if axes.channel is None or not mapped else np.moveaxis(sigma, -1, axes.channel)
        elif rest is not None:
            sigma = rest.sigma
        elif sigma is not None and options.strength != 1:
            sigma = strengthened(sigma, options.strength)
        frame, f = _white(frame, signal, sigma, trail)
    if isinstance(given, str) and given == "auto" and asked is None and not frame.idle and frame.flow is not None:
        _check_count(frame, f)
    if isinstance(given, str):
        check_units(np.asarray(image).dtype, asked)
    if isinstance(noise, str) and noise == "poisson":
        _check_gain(frame, signal, trail)
    if looked.guessed and not again:
        warn_caller(looked.guessed)
    return _with_sigma(frame, samples), Part(samples, reduction, f, restore, frame.missing)


def _check_count(frame: Frame, f: Array) -> None:
    count = math.prod(f.shape[:-1]) if frame.missing is None else int(np.count_nonzero(~frame.missing))
    flow: Any = frame.flow
    patch = 1 if is_by_pixels(frame.quality, frame.axes) else math.prod(flow.patch)
    if count < patch:
        raise InputError(f"image: got {count} samples, fewer than the {patch} of a patch, expected more to find out "
                         "their noise; give sigma, or leave them as they are")  # fmt: skip


def _check_gain(frame: Frame, even: Array, trail: Trail | None) -> None:
    """Warn where samples that count as many counts as units have far more noise than that, once it was made even."""
    level = root_mean_square(_estimated(frame, even, trail))
    if level > _COUNTS:
        warn_caller(
            f"noise: 'poisson' takes each unit of the input for a count, and the samples have about {level:.2g} times "
            f"the noise of such counts, which mostly stays; the gain is about {level**2:.2g} if nothing is added: give "
            "noise=Poisson(gain=..., sigma=..., offset=...), or leave noise out"
        )


def _model(
    given: Noise | str, samples: Array, missing: Mask | None, strength: float, trail: Trail | None,
    found: NoiseEstimate | None,
) -> tuple[Noise | None, NoiseEstimate | None]:  # fmt: skip
    """Return the noise that was given or is found out, times a strength; None for white noise to be estimated."""
    if given == "auto" and found is None:
        from nlflow.denoising.noise.finding.verdict import examine

        found = (examine if trail is None else trail.examine)(samples, missing)
    model = found.model if found is not None else None if isinstance(given, str) else given
    if model is None or (found is not None and found.is_white and samples.ndim < 4):
        return None, found
    model = model.completed(samples, missing)
    if strength != 1 and not model.undone:
        model = model if found is None else model.by_intensity(samples)
        model = model.scaled(strength) if strength else _nothing_of(model)
    return model, found


def _nothing_of(model: Noise) -> Noise:
    from nlflow.denoising.noise.models.base import Mixture
    from nlflow.denoising.noise.models.gaussian import GaussianNoise
    from nlflow.denoising.noise.models.intensities import Poisson

    if isinstance(model, Mixture):
        return Mixture([one if one.undone else _nothing_of(one) for one in model.parts])
    return model.scaled(0) if isinstance(model, (GaussianNoise, Poisson)) else GaussianNoise(0.0)


def _with_sigma(frame: Frame, samples: Array) -> Frame:
    sigma, effective, model = 0.0 if frame.fills_alone else root_mean_square(frame.level), None, frame.model
    if model is not None and model.is_coloured and samples.ndim < 4:
        noise, own, met = frame.coloured, 0.0, sigma
        if noise is not None and model.kind == "gaussian":  # its strength is known at all samples
            relative = noise.strength if frame.missing is None else noise.strength[~frame.missing]
            own = sigma * math.sqrt(float(relative.mean(dtype=np.float64)))  # the power that is shown has the mean 1
        else:
            own = model.strength(samples, frame.missing) or 0.0
        if not is_by_pixels(frame.quality, frame.axes):
            met = own * math.sqrt(float(noise.spectrum.mean())) if noise is not None and noise.compressed else own
        sigma, effective = own, met if is_by_pixels(frame.quality, frame.axes) or met != own else None
    estimated = frame.estimated or frame.found is not None
    return replace(frame, sigma=sigma, sigma_effective=effective, estimated=estimated)


def _white(frame: Frame, signal: Array, sigma: Any, trail: Trail | None) -> tuple[Frame, Array]:
    """Return the frame of samples with white noise of a strength, and the samples in its units."""
    missing, axes = frame.missing, frame.axes
    if sigma is None:
        levels, variance = _estimated(frame, signal, trail), None
        exact = levels == 0 if levels.any() else None
    else:
        levels, variance, exact = levels_in(sigma, signal, missing, axes.channel)
    exact = exact if exact is not None and exact.any() else None
    present = (signal if missing is None else signal[~missing]).reshape(-1, signal.shape[-1])
    spans = np.array([float(range_of(present[:, c])) for c in range(signal.shape[-1])])
    levels, level, exact, idle = units_of(levels, spans, exact)
    if missing is not None and idle and spans.max() > 0 and frame.fills:
        if math.isinf(spans.max()):
            raise InputError("image: got a range that overflows, with samples missing; divide it by a number first")
        idle, exact = "", np.ones(levels.shape, bool)
        with np.errstate(over="ignore"):
            spread = float(present.std(dtype=np.float64))
        if math.isinf(spread):
            raise InputError("image: got values whose squares overflow; divide it by a number first")
        level = np.full_like(levels, spread * _FILLING)
    frame = replace(frame, variance=variance, level=level, estimated=sigma is None, idle=idle, exact=exact)
    if idle:
        return replace(frame, offset=np.zeros(len(levels))), np.zeros_like(signal)
    offset = exact_means(present)
    f = in_units(signal, offset, level)
    if missing is not None:
        f[missing] = 0
        f = filled(f, missing)
    return replace(frame, offset=offset).with_flow(Spread.of(f), frame.weakest), f


def with_colour(frame: Frame, signal: Array, noise: GaussianNoise) -> tuple[Frame, Array]:
    """Return frame and samples for correlated noise."""
    from nlflow.denoising.noise.models.gaussian import OPPONENT

    missing, channels, dimension = frame.missing, signal.shape[-1], signal.ndim - 1
    counted = noise.counted(channels, dimension)
    unit = math.sqrt(float(noise.powers(channels, dimension).mean()))
    present = (signal if missing is None else signal[~missing]).reshape(-1, channels)
    idle = idle_for(range_of(present), unit)
    frame = replace(frame, level=np.full(channels, unit), idle=idle)
    if idle:
        return replace(frame, offset=np.zeros(channels)), np.zeros_like(signal)
    offset = exact_means(present)
    f = in_units(signal, offset, frame.level)
    if missing is not None:
        f[missing] = 0
    axes = np.asarray(OPPONENT) if noise.opponent else channels_for(channels, Spread.of(f).moments)
    shown = noise.powers(channels, dimension)
    without = None if noise.opponent else shown.max(axis=(1, 2)) == 0
    spectrum, shown = (
        (one if noise.opponent else np.tensordot(axes**2, one, axes=1)) / unit**2 for one in (counted, shown)
    )
    # Along an axis of channels without noise there is little, as no group has a variance of 0.
    spectrum = np.where(spectrum.max(axis=(1, 2), keepdims=True) < LEAST_VARIANCE, LEAST_VARIANCE, spectrum)
    strength = np.maximum(np.square(noise.at(signal))[..., None], LEAST_VARIANCE).astype(signal.dtype, copy=False)
    levels = LEVELS if noise.compressed else levels_for(spectrum, LEVELS)
    held = Coloured(axes, spectrum, strength, levels, shown, noise.compressed > 0)
    exact = without if without is not None and without.any() else None
    frame = replace(frame, offset=offset, coloured=held, exact=exact)
    return frame, f if missing is None else filled(f, missing)


def is_by_pixels(quality: str, axes: Axes) -> bool:
    return quality == "pixels"


def units_of(levels: Array, spans: Array, exact: Any = None) -> tuple[Array, Array, Any, str]:
    """Return the noise of channels (C,), their units, where samples are exact, and why nothing is done, or ""."""
    with np.errstate(over="ignore"):
        none = (levels > 0) & (levels * _NOISELESS < spans)
    if none.any() and not none.all():
        levels, exact = np.where(none, 0.0, levels), none if exact is None else exact | none
    strongest = float(levels.max())
    idle = idle_for(float(spans.max()), strongest)
    little = 1.0 if strongest == 0 else strongest * math.sqrt(LEAST_VARIANCE)
    return levels, levels if idle else np.where(levels > 0, levels, little), exact, idle


def idle_for(span: float, strongest: float) -> str:
    if span == 0:
        return "the input is constant"
    if strongest == 0 or strongest * _NOISELESS < span:
        return f"there is no noise to remove (sigma={strongest:g})"
    return ""


def in_units(signal: Array, offset: Array, level: Array) -> Array:
    # In double precision, since an offset or a level may be no number of the samples' precision.
    return by_rows(lambda rows: (rows - offset) / level, signal, signal.dtype)


def live_of(varies: Mask) -> Mask | None:
    return varies if 0 < np.count_nonzero(varies) < len(varies) else None


def channels_for(count: int, moments: Callable[[], Array]) -> Array:
    """Return orthonormal rows (C, C): opponent colours of three channels, else principal axes of second moments."""
    if count == 3:
        from nlflow.denoising.noise.models.gaussian import OPPONENT

        return np.asarray(OPPONENT)
    return np.asarray(np.linalg.eigh(moments())[1].T[::-1])


def _estimated(frame: Frame, signal: Array, trail: Trail | None) -> Array:
    """Return the noise of each channel of samples, times the strength that is asked for."""
    from nlflow.denoising.noise.finding.sigma import channel_levels, estimate_sigmas

    strength = frame.options.strength
    if frame.found is not None and frame.model is None:  # what looked for other noise has measured the white one
        return np.full(signal.shape[-1], np.asarray(frame.found.model.white_sigma) * strength, np.float64)
    levels = (estimate_sigmas if trail is None else trail.estimate)(signal, frame.missing)
    return channel_levels(levels * strength if strength != 1 else levels)


def _without_others(
    samples: Array, missing: Mask | None, live: Mask, restore: Callable[[Array], Any]
) -> tuple[Array, Callable[[Array], Any]]:
    """Return the channels that vary of samples (..., C), and how a result gets the others and its shape.

    A constant channel has its value where it is missing, too.
    """
    others = samples[..., ~live]
    present = others.reshape(-1, others.shape[-1]) if missing is None else others[~missing]
    varies, held = varying(others, missing), present[0]
    held = np.where(varies, others, held) if varies.any() else held

    def whole(u: Array) -> Any:
        result = np.empty((*u.shape[:-1], len(live)), u.dtype)
        result[..., live], result[..., ~live] = u, held
        return restore(result)

    return np.ascontiguousarray(samples[..., live]), whole


def filled(f: Array, missing: Mask) -> Array:
    """Return f with missing samples from the minimizer of E for a Gaussian of one sample, with fidelity 0 there."""
    from nlflow.affinities import affinity
    from nlflow.domains import Grid
    from nlflow.functionals.energies import E
    from nlflow.kernels import Gaussian

    grid, window = Grid(missing.shape, boundary="reflect"), min(2, max(missing.shape) - 1) or 1
    strength = np.where(missing, 0.0, _HELD).astype(f.dtype)
    found = E(affinity(Gaussian(width=1.0), grid, window=window), f, strength, measure="degree").minimizer(rtol=1e-4)
    return np.where(missing[..., None], found.u, f)
