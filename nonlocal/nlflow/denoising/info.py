"""What a call of `denoise` did."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class DenoiseInfo:
    """What `denoise` did, all in units of the input unless it says otherwise.

    Attributes
    ----------
    sigma : float
        Standard deviation of the noise in the input, the root mean square over samples and channels, whatever the
        quality; times `strength`, where that was given. Of counts, 1 after their variance was stabilized.
    sigma_estimated : bool
        Whether it was estimated from the input.
    noise : str
        The model of the noise, in words.
    model : dict or None
        The same as numbers, `Noise.as_dict`; None for white noise of `sigma`.
    confidence : str
        How sure the model is that was found out: 'high', 'medium' or 'low'; empty when it was given.
    quality : str
        The preset.
    functional : str
        What was minimized, and how.
    parameters : dict
        Of kernel and flow: plain numbers and texts.
    steps : int
        Steps taken.
    stopped_by : str
        Why the flow ended.
    method : str
        How the averages were computed, and why.
    residual : float
        Root mean square of input minus result, over the samples that are not missing.
    risk : float or None
        Mean squared error of the result by Stein's estimate, with ``stopping='sure'``; of counts, after their variance
        was stabilized.
    tiles : int
        Parts that the image was cut into.
    memory_bytes : int
        Working memory: of the affinity, or of the largest tile.
    seconds, compile_seconds : float
        Wall time in all, and its part for compiling loops or loading them from the cache.
    sigma_effective : float or None
        Standard deviation that the preset worked with where it is another one: that of the nearest white noise for
        'fast', which knows no other, and more than `sigma` where compression took noise out of the quiet parts, in
        which it is measured. None where it is `sigma`.
    reasons : tuple of str
        What the verdict rests on, when the noise was found out.
    columns : tuple of DenoiseInfo
        With ``separate``, what was done to each channel, and of an array of images to each image; the rest then tells
        of all: root mean squares, sums of times, the largest of counts, and of texts and parameters what they share.
    """

    sigma: float
    sigma_estimated: bool
    noise: str
    quality: str
    functional: str
    parameters: dict[str, Any] = field(default_factory=dict)
    steps: int = 0
    stopped_by: str = ""
    method: str = "none"
    residual: float = 0.0
    risk: float | None = None
    tiles: int = 1
    memory_bytes: int = 0
    seconds: float = 0.0
    compile_seconds: float = 0.0
    model: dict[str, Any] | None = field(default=None, repr=False)
    confidence: str = ""
    sigma_effective: float | None = None
    reasons: tuple[str, ...] = ()
    columns: tuple[DenoiseInfo, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as a dictionary of plain numbers and texts, ready for JSON."""
        columns = [column.as_dict() for column in self.columns]
        return {**asdict(self), "reasons": list(self.reasons), "columns": columns}
