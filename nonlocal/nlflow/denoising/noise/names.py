"""Names of noise."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from nlflow.denoising.noise.models.base import Noise

KINDS: Final = {
    "drift": "Drift",
    "gaussian": "GaussianNoise",
    "hot-pixels": "HotPixels",
    "hum": "Hum",
    "impulses": "Impulses",
    "log-speckle": "LogSpeckle",
    "mixture": "Mixture",
    "noncentral-chi": "NoncentralChi",
    "poisson": "Poisson",
    "rician": "Rician",
    "speckle": "Speckle",
    "spikes": "Spikes",
    "stripes": "Stripes",
}
"""Public classes of `nlflow.denoising.noise` by their `Noise.kind`."""


#: The words for a model of no noise at all.
NO_NOISE: Final = "no noise"


class Word(NamedTuple):
    """Texts beside a word of ``noise=``."""

    label: str
    help: str
    kind: str = ""  # of the model that a word stands for, with its defaults


WORDS: Final = {
    "auto": Word("automatic: from the file", "found out from the file, which is the default"),
    "white": Word("white, Gaussian", "white noise; its strength is estimated"),
    "poisson": Word("counts (Poisson)", "counts of photons or events", "poisson"),
    "rician": Word("MRI magnitudes (Rician)",
                   "magnitudes of magnetic resonance; sigma is that of the complex samples", "rician"),
    "impulses": Word("impulses", "salt and pepper, or spikes up and down; white noise beside them", "impulses"),
    "hot": Word("hot pixels", "single samples that are far too bright; white noise beside them", "hot-pixels"),
}  # fmt: skip
"""Words of ``noise=``."""


def choose_noise(noise: Any, sigma: Any) -> tuple[Noise | str, Any]:
    """Return a model, or 'white' or 'auto', and what is left of a sigma, with which 'auto' is 'white'."""
    from nlflow.denoising.noise.models.base import Noise
    from nlflow.errors import InputError

    if isinstance(sigma, str):
        raise InputError(f"sigma: got {sigma!r}, expected a number, or an array; leave it out to have it found out")
    word = WORDS.get(noise) if isinstance(noise, str) else None
    model = model_class(word.kind)() if word is not None and word.kind else noise
    if isinstance(model, Noise):
        return model.with_sigma(sigma)
    if isinstance(noise, str) and noise in WORDS:
        return "white" if noise == "auto" and sigma is not None else noise, sigma
    raise InputError(f"noise: got {noise!r}, expected one of {', '.join(map(repr, WORDS))} or a model such as "
                     "nlflow.GaussianNoise or nlflow.Poisson")  # fmt: skip


def model_class(kind: str) -> type[Noise]:
    if kind in KINDS:
        found: type[Noise] = getattr(import_module("nlflow.denoising.noise"), KINDS[kind])
        return found
    return _defined()[kind]


def kinds() -> list[str]:
    return sorted({*KINDS, *_defined()})


def has_sigma(word_or_model: str | Mapping[str, Any] | None) -> bool:
    """Tell whether a standard deviation says how strong noise is, that of a word or of `Noise.as_dict`."""
    kind = word_or_model.get("kind") if isinstance(word_or_model, Mapping) else word_or_model
    kind = WORDS[kind].kind or None if kind in WORDS else kind
    return kind is None or kind not in kinds() or model_class(kind).scalable


def verdict_of(noise: str, confidence: str) -> str:
    if not confidence:
        return noise
    return f"{noise}{' found' if noise == NO_NOISE else ''} (confidence {confidence})"


def _defined() -> dict[str, type[Noise]]:
    """Return the classes that are defined by now: all below `Noise` that have a kind of their own."""
    from nlflow.denoising.noise.models.base import Noise

    found: dict[str, type[Noise]] = {}
    left: list[type[Noise]] = [Noise]  # type: ignore[type-abstract]  # those below it are not
    while left:
        below = left.pop().__subclasses__()
        found |= {one.kind: one for one in below if "kind" in vars(one)}
        left += below
    return found
