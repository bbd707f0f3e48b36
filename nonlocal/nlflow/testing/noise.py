"""What every model of noise must hold, checked on one of them: `check_noise`."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np

from nlflow.denoising.noise.base import Noise, Reduction
from nlflow.denoising.noise.files import noise_of
from nlflow.errors import InputError


def check_noise(noise: Noise, clean: Any, *, channel_axis: int | None = None) -> None:
    """Check that a model of noise keeps the contract of `nlflow.denoising.noise.Noise`.

    It compares and hashes by its numbers; comes back from its dictionary to the last bit; says what it is; samples the
    same picture from the same seed, and leaves the clean one as it was; and reduces what it sampled to finite samples
    of the same shape, with a way back, without touching them.

    Parameters
    ----------
    noise : Noise
    clean : array_like
        A signal, image, volume or clip that the noise can be sampled on.
    channel_axis : int, optional

    Raises
    ------
    InputError
        Naming what does not hold.

    Examples
    --------
    >>> import numpy as np
    >>> from nlflow.denoising.noise import Stripes
    >>> from nlflow.testing import check_noise
    >>> check_noise(Stripes(3.0), np.full((32, 32), 100.0))
    """
    name = type(noise).__name__
    _check_identity(noise, name)
    values = np.asarray(clean, np.float64)
    before = values.copy()
    first, second = (noise.sample(values, rng=7, channel_axis=channel_axis) for _ in range(2))
    _hold(np.array_equal(values, before), f"{name}.sample", "a change of the clean samples", "a new array")
    _hold(np.shape(first) == values.shape and np.isfinite(first).all(), f"{name}.sample",
          f"shape {np.shape(first)}", f"finite samples of shape {values.shape}")  # fmt: skip
    _hold(np.array_equal(first, second), f"{name}.sample", "two pictures from one seed", "the same twice")
    samples = first[..., None] if channel_axis is None else np.moveaxis(first, channel_axis, -1)
    given = np.ascontiguousarray(samples)
    kept = given.copy()
    found = noise.completed(given).reduce(given)
    _hold(np.array_equal(given, kept), f"{name}.reduce", "a change of the samples", "new ones")
    _check_reduction(found, given, name)


def _check_identity(noise: Noise, name: str) -> None:
    """Check the comparison, the dictionary and the words of a model."""
    words: dict[str, Any] = {one.name: getattr(noise, one.name) for one in fields(noise)}  # type: ignore[arg-type]
    again = type(noise)(**words)
    _hold(again == noise and hash(again) == hash(noise), name, "a model unlike one of the same numbers",
          "equal ones with one hash")  # fmt: skip
    _hold(noise != object(), name, "a model that equals any object", "models of the same class alone")
    _hold(noise_of(noise.as_dict()) == noise, f"{name}.as_dict", "another model when read again", "the same")
    _hold(bool(noise.describe().strip()), f"{name}.describe", "nothing", "a few words for people")


def _check_reduction(found: Reduction, samples: Any, name: str) -> None:
    """Check that what is left has the shape of the samples, and a way back to their units."""
    place = f"{name}.reduce"
    known = slice(None) if found.missing is None else ~found.missing
    _hold(found.samples.shape == samples.shape and np.isfinite(found.samples[known]).all(), place,
          f"samples of shape {found.samples.shape}", f"finite ones of shape {samples.shape}")  # fmt: skip
    _hold(found.missing is None or found.missing.shape == samples.shape[:-1], place, "missing samples of another shape",
          f"booleans of shape {samples.shape[:-1]}")  # fmt: skip
    _hold(found.rest is None or isinstance(found.rest, Noise), place, f"a rest of {type(found.rest).__name__}",
          "a model of the noise that is left, or None")  # fmt: skip
    restored = np.asarray(found.back(found.samples))
    _hold(restored.shape == samples.shape and np.isfinite(restored[known]).all(), place,
          f"a way back to shape {restored.shape}", f"finite samples of shape {samples.shape}")  # fmt: skip


def _hold(kept: Any, place: str, got: str, expected: str) -> None:
    if not kept:
        raise InputError(f"{place}: got {got}, expected {expected}; see nlflow.denoising.noise.Noise")
