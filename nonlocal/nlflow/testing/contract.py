"""What checks share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from nlflow._array import Array, Floats, to_numpy
from nlflow.errors import InputError, NlflowError, shortened


class ContractError(InputError, AssertionError):
    """An object breaks a promise of its contract."""


class Contract:
    """The promises of one object; `InputError` unless it is an instance of `base`."""

    def __init__(self, kind: str, subject: Any, base: type) -> None:
        if not isinstance(subject, base):
            raise InputError(f"{kind}: got {shortened(repr(subject))}, expected an instance of {base.__name__}")
        self.name = f"{kind} {type(subject).__name__}"

    def holds(self, truth: bool, promise: str, got: Any, expected: str) -> None:
        if not truth:
            raise ContractError(f"{self.name}: {promise}: got {shortened(str(got))}, expected {expected}")

    def near(self, promise: str, got: Any, expected: Any, tolerance: float, what: str = "the same numbers") -> None:
        """Check that arrays differ by at most `tolerance` times the largest finite number expected."""
        here, there = numbers(got), numbers(expected)
        self.holds(here.shape == there.shape, promise, f"shape {here.shape}", f"shape {there.shape}")
        with np.errstate(invalid="ignore"):
            same = here == there  # infinities too
            apart = np.where(same, 0.0, np.abs(here - there))
        size = float(np.abs(there[np.isfinite(there)]).max(initial=0.0))
        off = float(apart.max(initial=0.0))
        self.holds(off <= tolerance * (size or 1.0), promise, f"numbers off by {off:.3g} of {size:.3g}", what)

    def kept(self, promise: str, got: Any, like: Array) -> Array:
        shape, dtype = tuple(getattr(got, "shape", ())), getattr(got, "dtype", type(got).__name__)
        wanted = f"shape {tuple(like.shape)} and {like.dtype}, those of its argument"
        self.holds(shape == tuple(like.shape) and dtype == like.dtype, promise, f"shape {shape} and {dtype}", wanted)
        return got

    def asked(self, promise: str, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return what a method returns if it leaves its arguments alone; errors of `nlflow.errors` pass."""
        before = [np.array(one, copy=True) if isinstance(one, np.ndarray) else None for one in arguments]
        try:
            result = function(*arguments)
        except NlflowError:
            raise
        except Exception as error:
            raise ContractError(
                f"{self.name}: {promise}: it raised {type(error).__name__} ({error}), expected a result"
            ) from error
        for one, kept in zip(arguments, before, strict=True):
            same = kept is None or np.array_equal(one, kept, equal_nan=True)
            self.holds(same, promise, "an argument that was changed in place", "arguments that stay what they are")
        return result

    def refuses(self, promise: str, function: Callable[..., Any], *arguments: Any) -> None:
        try:
            result = function(*arguments)
        except NlflowError:
            return
        except Exception as error:
            raise ContractError(
                f"{self.name}: {promise}: it raised {type(error).__name__} ({error}), expected an InputError"
            ) from error
        self.holds(False, promise, f"{type(result).__name__} returned", "an InputError")


def random(*shape: int, seed: int = 0) -> Floats:
    return np.random.default_rng([seed, *shape]).uniform(-1, 1, shape)


def numbers(values: Any) -> Floats:
    return np.asarray(values if isinstance(values, float | int | list | tuple) else to_numpy(values), dtype=np.float64)
