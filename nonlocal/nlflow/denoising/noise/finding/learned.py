"""What a network learned of noise in quiet blocks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from nlflow.denoising.noise.finding.evidence import BANDS

Array = NDArray[Any]
KINDS: Final = ("clean", "white", "correlated")
LIMITS: Final = (0.02, 0.5, 0.98)  # quantiles of the strength that are told
_FARTHEST: Final = 5.0  # standard deviations of a figure: one that is farther was never seen, and counts as that far


@dataclass(frozen=True)
class Belief:
    """What the network says of a picture."""

    probabilities: dict[str, float]  # of `KINDS`
    shares: Array  # (P, B) of the measured standard deviation, that is noise
    light: float  # from 0 to 1: how far the noise follows the intensity as quiet blocks say
    limits: Array  # (3,) quantiles `LIMITS` of the strength of all noise, in units of `Evidence.reference`
    confidence: str  # 'high', 'medium', 'low': by how narrow the limits are


@lru_cache(maxsize=2)
def weights(planes: int) -> dict[str, Array]:
    path = files("nlflow.denoising.noise.finding") / "learned.npz"
    with path.open("rb") as stream, np.load(stream, allow_pickle=False) as held:
        first = f"{planes}."
        return {
            name.removeprefix(first): held[name].astype(np.float64) for name in held.files if name.startswith(first)
        }


def believe(features: Array, planes: int, held: dict[str, Array] | None = None) -> Belief:
    held = weights(planes) if held is None else held
    values = np.clip((features - held["mean"]) / held["spread"], -_FARTHEST, _FARTHEST)
    members = np.stack([_run(values, held, k) for k in range(int(held["members"]))])
    out = members.mean(axis=0)
    shares = np.exp(np.minimum(out[: planes * len(BANDS)].reshape(planes, len(BANDS)), 1.0))
    rest = out[planes * len(BANDS) :]
    odds = np.exp(rest[: len(KINDS)] - rest[: len(KINDS)].max())
    logs = np.sort(rest[len(KINDS) + 1 :])
    limits = np.exp(logs[1] + held.get("stretch", 1.0) * (logs - logs[1]))
    probabilities = dict(zip(KINDS, (odds / odds.sum()).tolist(), strict=True))
    wide = np.log(limits[1:] / limits[:-1]).max()
    high, medium = held.get("widths", (0.0, 0.0))
    sure = "high" if wide <= high else "medium" if wide <= medium else "low"
    return Belief(probabilities, shares, float(1 / (1 + np.exp(-rest[len(KINDS)]))), limits, sure)


def _run(values: Array, held: dict[str, Array], member: int) -> Array:
    layer = 0
    while f"{member}.{layer}.weight" in held:
        if layer:
            values = np.maximum(values, 0)
        values = held[f"{member}.{layer}.weight"] @ values + held[f"{member}.{layer}.bias"]
        layer += 1
    return values
