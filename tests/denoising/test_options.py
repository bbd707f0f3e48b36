"""Options of `denoise`: each once, in an object or by its name."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest

from nlflow import InputError, denoise
from nlflow.denoising import Options
from nlflow.denoising.options import OPTIONS
from nlflow.errors import KeywordError

NOISY = np.random.default_rng(3).normal(0, 10, (40, 40)) + np.arange(40.0)


def test_denoise_has_few_arguments_beside_its_options() -> None:
    parameters = inspect.signature(denoise).parameters
    assert len(set(parameters) - {"options", "more"}) <= 12
    assert set(parameters) & set(OPTIONS) == set()
    assert denoise.__doc__ is not None
    assert all(f"`{name}`" in denoise.__doc__ for name in OPTIONS)


@pytest.mark.parametrize(
    "words", [{"strength": 0.7}, {"width": 9.0, "steps": 2}, {"max_memory": 1e7, "patch_size": 3}, {"stopping": "sure"}]
)
def test_an_object_says_what_names_say(words: dict[str, Any]) -> None:
    by_name = denoise(NOISY, 10.0, quality="pixels", **words)
    assert not np.array_equal(by_name, denoise(NOISY, 10.0, quality="pixels")) or "max_memory" in words
    np.testing.assert_array_equal(denoise(NOISY, 10.0, quality="pixels", options=Options(**words)), by_name)


def test_names_count_where_both_say_something() -> None:
    both = denoise(NOISY, 10.0, quality="pixels", options=Options(strength=2.0, patch_size=3), strength=0.7)
    np.testing.assert_array_equal(both, denoise(NOISY, 10.0, quality="pixels", strength=0.7, patch_size=3))


def test_an_object_serves_channels_one_by_one() -> None:
    image = np.stack([NOISY, 2 * NOISY], -1)
    options = Options(separate=True, strength=0.7)
    found = denoise(image, (10.0, 20.0), quality="pixels", channel_axis=-1, options=options)
    np.testing.assert_array_equal(found[..., 1], denoise(image[..., 1], 20.0, quality="pixels", strength=0.7))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("strength", -1), ("strength", None), ("stopping", "soon"), ("max_memory", 0), ("width", 0), ("patch_size", 4),
        ("search_radius", 0), ("fidelity", -1), ("steps", 0), ("seed", -1), ("seed", 0.5),
        ("separate", "a"), ("device", "disk"), ("device", None),
    ],
)  # fmt: skip
def test_each_is_checked_by_name(name: str, value: Any) -> None:
    for call in (lambda: Options(**{name: value}), lambda: denoise(NOISY, 10.0, **{name: value})):
        with pytest.raises(InputError, match=f"^{name}: got "):
            call()


def test_what_is_no_option_is_refused() -> None:
    with pytest.raises(InputError, match=r"^options: got dict, expected an Options"):
        denoise(NOISY, 10.0, options={"strength": 0.7})  # type: ignore[arg-type]
    with pytest.raises(KeywordError, match=r"got an argument 'strenght'; did you mean strength\?"):
        denoise(NOISY, 10.0, strenght=0.7)
    with pytest.raises(KeywordError, match="got an argument 'more'"):
        denoise(NOISY, 10.0, more=1)
