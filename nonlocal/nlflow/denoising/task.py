"""What a call of `denoise` is to do: samples in units of their noise, the flow that is chosen, and the way back."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nlflow._array import root_mean_square
from nlflow.denoising import groupwise, pixelwise
from nlflow.denoising.doubts import check_units, doubts
from nlflow.denoising.inpainting import filled
from nlflow.denoising.inputs import (
    Observation,
    check_patch,
    observed,
    of_channels,
    opened,
    place,
    shape_of,
    spatial_shape,
    without_constant,
)
from nlflow.denoising.layout import Layout
from nlflow.denoising.noise import Noise, NoiseEstimate
from nlflow.denoising.noise.base import same
from nlflow.denoising.noise.estimation import estimate_sigmas
from nlflow.denoising.noise.names import choose_noise
from nlflow.denoising.noise.verdict import examine
from nlflow.denoising.options import Options
from nlflow.denoising.presets import GroupPreset, preset_for
from nlflow.denoising.progress import Trail, within
from nlflow.denoising.runs import Run, Watch
from nlflow.denoising.selection import select
from nlflow.domains.samples import range_of, varying
from nlflow.errors import InputError, NlflowWarning

Array = NDArray[Any]


@dataclass(frozen=True)
class Task:
    """What is to be denoised: the samples, what is known of them, and what is wanted."""

    preset: GroupPreset | None  # None for the flow of pixels, which has options
    options: Options
    seen: Observation
    samples: Array
    restore: Callable[[Array], Array]
    model: Noise | None
    found: NoiseEstimate | None
    kept: NDArray[np.bool_] | None

    @classmethod
    def of(
        cls, image: Any, sigma: Any, quality: str, noise: Any, layout: Layout, channel_axis: int | None, mask: Any,
        keep: Any, options: Options, trail: Trail | None,
    ) -> Task:  # fmt: skip
        """Observe an image."""
        shape, preset, strength = shape_of("image", image), preset_for(quality, layout), options.strength
        check_patch(options.patch_size, spatial_shape(shape, channel_axis))
        given, sigma = choose_noise(noise, sigma)
        kept = None if keep is None else place("keep", keep, shape, channel_axis)
        samples, missing, restore = opened(image, channel_axis, mask)
        live = varying(samples, missing)
        if 0 < np.count_nonzero(live) < len(live):  # an opaque alpha channel, or one that recorded nothing
            sigma = of_channels(sigma, live, channel_axis, shape)
            given = given if isinstance(given, str) else given.of_channels(live)
            samples, restore = without_constant(samples, missing, live, restore)
        look = examine if trail is None else trail.examine
        found = look(samples, missing) if given == "auto" else None
        model = found.model if found is not None else None if isinstance(given, str) else given
        if found is not None and found.is_white and samples.ndim < 4:
            model = None  # its strength is estimated below
        if model is not None:
            model = model.completed(samples, missing)
        if model is not None and strength != 1:
            model = (model if found is None else model.by_intensity(samples)).scaled(strength)
        used = model
        if preset is None and model is not None:
            used = model.nearest_white(samples.shape[-1], samples.ndim - 1)

        def estimate(signal: Array, absent: NDArray[np.bool_] | None) -> NDArray[np.float64]:
            levels = (estimate_sigmas if trail is None else trail.estimate)(signal, absent)
            return levels * strength if strength != 1 else levels

        seen = observed(samples, missing, sigma if sigma is None or strength == 1 else np.asarray(sigma) * strength,
                        used, channel_axis, estimate)  # fmt: skip
        if isinstance(given, str):
            check_units(np.asarray(image).dtype, sigma, stacklevel=5)
        if found is not None:
            seen = replace(seen, estimated=True)
        return cls(preset, options, seen, samples, restore, model, found, kept)

    @property
    def noise(self) -> str:
        """The model of the noise in words."""
        if self.model is not None:
            return self.model.describe()
        return "white noise" + (", varying" if self.seen.variance is not None else "")

    @property
    def strong(self) -> str:
        """What to say of a strength that makes the noise larger than the range of the samples; empty otherwise."""
        span = range_of(self.samples if self.seen.missing is None else self.samples[~self.seen.missing])
        if self.options.strength <= 1 or not self.sigma > span > 0:
            return ""
        return (f"strength: got {self.options.strength:g}, with which the noise is {self.sigma:.4g}, more than the "
                f"range of the samples ({span:.4g}): next to nothing of them is left; take a strength near "
                "1")  # fmt: skip

    @property
    def sigma(self) -> float:
        """Standard deviation of the noise in the picture, whatever the preset makes of it."""
        strength = self._strength()
        return root_mean_square(self.seen.level) if strength is None else strength

    @property
    def sigma_effective(self) -> float | None:
        """That of the noise which the preset takes it for; None where it is the same."""
        strength = self._strength()
        if strength is None:
            return None
        effective = root_mean_square(self.seen.level) if self.preset is None else self._strength(counted=True)
        return None if self.preset is not None and effective == strength else effective

    def _strength(self, *, counted: bool = False) -> float | None:
        """Return the strength of noise that is Gaussian, but not white."""
        if self.model is None or not self.model.is_coloured or self.samples.ndim == 4:
            return None
        return self.model.strength(self.samples, self.seen.missing, counted=counted)

    def warn(self, u: Array) -> None:
        """Say what a user would not expect of a result for which the noise was found out."""
        if self.strong:
            warnings.warn(self.strong, NlflowWarning, stacklevel=5)
        if self.found is None:
            return
        present = slice(None) if self.seen.missing is None else ~self.seen.missing
        for text in doubts(self.samples[present], u[present], self.found):
            warnings.warn(text, NlflowWarning, stacklevel=5)

    @property
    def unit(self) -> float:
        """The noise in the units of the input; 1 for counts, whose noise has no unit."""
        return root_mean_square(self.seen.level)

    def unchanged(self) -> Array:
        """Return the samples, those that are missing with the value of one that is not."""
        if self.seen.missing is None:
            return self.known
        return np.where(self.seen.missing[..., None], self.known[~self.seen.missing][0], self.known)

    @property
    def known(self) -> Array:
        """The samples without what needs no flow to be taken out, such as stripes."""
        reduced = self.seen.reduced
        if reduced is None or self.seen.reduction is not same:
            return self.samples
        return reduced.astype(self.samples.dtype, copy=False)

    def run(self, f: Array, watch: Watch) -> Run:
        """Run the flow on samples in units of the noise."""
        if self.preset is None:
            if watch.device.tensors:
                raise InputError(
                    f"device: got {watch.device.name!r} with quality='fast', a flow of pixels on the CPU alone, "
                    "expected 'cpu'; or take 'balanced'"
                )
            return pixelwise.denoised(f, self.seen, self.options.fast, self.unit, watch)
        return groupwise.denoised(f, self.seen, self.preset, watch)

    def chosen(self, stopping: str | None, seed: int, watch: Watch) -> tuple[Array, float | None, dict[str, Any]]:
        """Return the estimate that the preset or a rule chooses, its estimated risk, and what is told."""
        seen, unit, tell = self.seen, self.unit, watch.tell
        start = seen.f if seen.missing is None else filled(seen.f, seen.missing)
        half = 0.5 if stopping == "sure" else 1.0  # that rule runs the flow once more
        found = self.run(start, replace(watch, every=stopping is not None, tell=within(tell, 0.0, half)))
        if watch.trail is not None and "distance" in watch.trail.course:
            watch.trail.course["distance"] *= unit
        if stopping is None:
            return found.path[-1], None, found.told

        def rerun(f: Array) -> list[Array]:
            return self.run(f, Watch(True, watch.limit, within(tell, half, 1.0))).path

        relative = 1.0 if seen.variance is None else np.sqrt(seen.variance)[..., None]
        observed = slice(None) if seen.missing is None else ~seen.missing
        index, risk, why = select(stopping, start, found.path, rerun, relative, observed, seed, seen.level / unit)
        told = {**found.told, "stopped_by": why, "steps": index + 1}
        return found.path[index], None if risk is None else risk * unit**2, told

    def back(self, estimate: Array) -> Array:
        """Return an estimate in the units of the samples."""
        return self.seen.back(estimate).astype(self.samples.dtype, copy=False)

    def with_known(self, u: Array) -> Array:
        """Return an estimate with the samples that are kept, or known to be free of noise."""
        seen = self.seen
        kept = None if self.kept is None else self.kept[..., None]
        for where, values in ((seen.exact, self.known), (kept, self.samples)):
            if where is not None:
                u = np.where(where if seen.missing is None else where & ~seen.missing[..., None], values, u)
        return u
