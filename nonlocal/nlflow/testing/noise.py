"""Promises of noise."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np

from nlflow.denoising.noise.models.base import Noise, Reduction
from nlflow.denoising.noise.models.files import noise_of
from nlflow.denoising.noise.models.gaussian import GaussianNoise
from nlflow.errors import InputError, check_floats
from nlflow.testing.contract import Contract


def check_noise(noise: Noise, clean: Any, *, channel_axis: int | None = None) -> None:
    """Check that a model of noise keeps the contract of `nlflow.denoising.noise.Noise`.

    Parameters
    ----------
    noise : Noise
    clean : array_like
        A signal, image, volume or clip that the noise can be sampled on.
    channel_axis : int, optional

    Raises
    ------
    ContractError
        If a check fails.
    InputError
        For what is no model of noise, and for samples that are not finite or that the model is not for.

    Examples
    --------
    >>> import numpy as np
    >>> from nlflow.denoising.noise import Stripes
    >>> from nlflow.testing import check_noise
    >>> check_noise(Stripes(3.0), np.full((32, 32), 100.0))
    """
    contract = Contract("noise", noise, Noise)
    _check_identity(noise, contract)
    values = check_floats("clean", clean)
    before = values.copy()
    first, second = (noise.sample(values, rng=7, channel_axis=channel_axis) for _ in range(2))
    contract.holds(np.array_equal(values, before), "sample", "a change of the clean samples", "a new array")
    contract.holds(
        np.shape(first) == values.shape and bool(np.isfinite(first).all()), "sample", f"shape {np.shape(first)}",
        f"finite samples of shape {values.shape}",
    )  # fmt: skip
    contract.holds(np.array_equal(first, second), "sample", "two pictures from one seed", "the same twice")
    samples = first[..., None] if channel_axis is None else np.moveaxis(first, channel_axis, -1)
    given = np.ascontiguousarray(samples)
    kept = given.copy()
    found = noise.completed(given).reduce(given)
    contract.holds(np.array_equal(given, kept), "reduce", "a change of the samples", "new ones")
    _check_reduction(noise, found, given, contract)


def _check_identity(noise: Noise, contract: Contract) -> None:
    """Check the comparison, the dictionary and the words of a model."""
    words: dict[str, Any] = {one.name: getattr(noise, one.name) for one in fields(noise)}  # type: ignore[arg-type]
    again = type(noise)(**words)
    contract.holds(
        again == noise and hash(again) == hash(noise), "equality", "a model unlike one of the same numbers",
        "equal ones with one hash",
    )  # fmt: skip
    contract.holds(noise != object(), "equality", "a model that equals any object", "models of the same class alone")
    contract.holds(noise_of(noise.as_dict()) == noise, "as_dict", "another model when read again", "the same")
    contract.holds(bool(noise.describe().strip()), "describe", "nothing", "a few words for people")
    try:
        stronger = noise.scaled(1.5)
    except InputError:
        return  # as impulses, which have no strength
    contract.holds(noise.scalable, "scaled", "another strength though `scalable` is False", "an InputError")
    contract.holds(type(stronger) is type(noise), "scaled", type(stronger).__name__, type(noise).__name__)


def _check_reduction(noise: Noise, found: Reduction, samples: Any, contract: Contract) -> None:
    """Check that what is left has the shape of the samples, and a way back to their units."""
    known = slice(None) if found.missing is None else ~found.missing
    contract.holds(
        found.samples.shape == samples.shape and bool(np.isfinite(found.samples[known]).all()), "reduce",
        f"samples of shape {found.samples.shape}", f"finite ones of shape {samples.shape}",
    )  # fmt: skip
    contract.holds(
        found.missing is None or found.missing.shape == samples.shape[:-1], "reduce",
        "missing samples of another shape", f"booleans of shape {samples.shape[:-1]}",
    )  # fmt: skip
    contract.holds(
        found.rest is None or isinstance(found.rest, GaussianNoise), "reduce", f"a rest of {type(found.rest).__name__}",
        "a GaussianNoise that is left, or None",
    )  # fmt: skip
    contract.holds(found.rest is None or not noise.undone, "undone", "True with noise that is left", "False")
    restored = np.asarray(found.back(found.samples))
    contract.holds(
        restored.shape == samples.shape and bool(np.isfinite(restored[known]).all()), "reduce",
        f"a way back to shape {restored.shape}", f"finite samples of shape {samples.shape}",
    )  # fmt: skip
