"""What calls tell."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from nlflow._array import Brief, root_mean_square
from nlflow.domains.samples import range_of
from nlflow.errors import warn_caller

if TYPE_CHECKING:
    from nlflow.denoising.noise import NoiseEstimate

_NOTHING: Final = 1 / 2000  # of the range: what was removed is then less than an eighth of a grey level
_CLEAN: Final = 1e-6  # of the range: there is no noise at all
_ROUNDING: Final = 1 / math.sqrt(12)  # the standard deviation of a number that is anywhere in an interval of length 1
_TAIL: Final = 0.05  # of the samples, at each end, that do not count for the range
_FEW: Final = 16  # different values, of which a drawing is made
_SURE: Final = ("low", "medium", "high")
_SOME: Final = 100_000  # samples that are looked at for them
#: Advice for a wrong verdict on noise, by the number of axes.
_REMEDIES: Final = {
    1: "give its standard deviation (sigma), that of a stretch where nothing but noise is",
    2: "measure it in a flat part without print or edges, by rows and columns "
    "(estimate_noise(image, flat=np.s_[20:84, 300:400]).model), take a model of another picture of the same camera "
    "(estimate_noise(other).model), or give sigma",
    3: "take a model of another stack of the same instrument (estimate_noise(other).model), or give sigma",
}


@dataclass(frozen=True, repr=False)
class DenoiseInfo(Brief):
    """What `denoise` did, in the units of the input unless it says otherwise.

    Attributes
    ----------
    sigma : float
        Standard deviation of the noise in the input, times `strength`: a root mean square over samples and channels
        that vary. For counts 1, that after their variance was stabilized.
    sigma_estimated : bool
        Whether sigma was estimated from the input.
    noise : str
        The model of the noise, in words.
    model : dict or None
        The model as numbers, `Noise.as_dict`; None if there is `sigma` alone.
    confidence : str
        'high', 'medium' or 'low' confidence in the kind of noise, if that was found out; otherwise empty.
    quality, functional, stopped_by, method : str
    parameters : dict
        Parameters of kernel and flow.
    steps : int
        Steps taken.
    residual : float
        Root mean square of input minus result, over samples that are not missing and channels that vary.
    risk : float or None
        Mean squared error of the result by Stein's estimate, with ``stopping='sure'``; for counts, after their variance
        was stabilized.
    tiles : int
        Number of parts into which the image was cut.
    memory_bytes : int
        Estimate of the working memory: of the affinity, or of the largest tile.
    seconds, compile_seconds : float
        Wall time in all, and for compiling loops or loading them from the cache.
    sigma_effective : float or None
        Standard deviation for which the flow was run, if that is not `sigma`.
    reasons : tuple of str
        Reasons for the noise that was found out.
    given : tuple of str
        Which samples are missing, and which stay as they are.
    columns : tuple of DenoiseInfo
        One for each channel with ``separate``, and for each image of several. The other fields then are about all
        together.
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
    given: tuple[str, ...] = ()
    columns: tuple[DenoiseInfo, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return a dict that JSON can hold."""
        columns = [column.as_dict() for column in self.columns]
        return {**asdict(self), "reasons": list(self.reasons), "given": list(self.given), "columns": columns}


def together(infos: list[DenoiseInfo]) -> DenoiseInfo:
    first, risks = infos[0], [info.risk for info in infos]

    def joined(name: str) -> str:
        return "; ".join(dict.fromkeys(str(getattr(info, name)) for info in infos))

    effective = None
    if any(info.sigma_effective is not None for info in infos):
        met = [info.sigma if info.sigma_effective is None else info.sigma_effective for info in infos]
        effective = root_mean_square(np.array(met))
    return replace(
        first,
        sigma=root_mean_square(np.array([info.sigma for info in infos])),
        sigma_effective=effective,
        sigma_estimated=any(info.sigma_estimated for info in infos),
        noise=joined("noise"),
        model=first.model if all(info.model == first.model for info in infos) else None,
        confidence=min((info.confidence for info in infos if info.confidence), key=_SURE.index, default=""),
        reasons=tuple(dict.fromkeys(text for info in infos for text in info.reasons)),
        functional=joined("functional"),
        parameters=first.parameters if all(info.parameters == first.parameters for info in infos) else {},
        steps=max(info.steps for info in infos),
        stopped_by=joined("stopped_by"),
        method=joined("method"),
        residual=root_mean_square(np.array([info.residual for info in infos])),
        risk=None if None in risks else float(np.mean([risk for risk in risks if risk is not None])),
        tiles=max(info.tiles for info in infos),
        memory_bytes=max(info.memory_bytes for info in infos),
        seconds=sum(info.seconds for info in infos),
        compile_seconds=sum(info.compile_seconds for info in infos),
        given=tuple(dict.fromkeys(text for info in infos for text in info.given)),
        columns=tuple(infos),
    )


def check_units(dtype: np.dtype[Any], sigma: Any) -> None:
    """Warn of a sigma below the noise of rounding to integers, which may be meant for values from 0 to 1."""
    if dtype.kind not in "iu" or sigma is None:
        return
    level, top = float(np.max(sigma)), np.iinfo(dtype).max
    if 0 < level < _ROUNDING:
        text = (
            f"sigma: got {level:.3g} for integers, less than their rounding adds ({_ROUNDING:.3g}), so that next to "
            f"nothing is removed; it is in the units of the input: {level:.3g} of the range of {dtype} is "
            f"{level * top:.4g}"
        )
        warn_caller(text)


def doubts(samples: NDArray[Any], changed: float, found: NoiseEstimate | None, axes: int) -> list[str]:
    if found is None:
        return []
    from nlflow.denoising.noise.finding.verdict import TWO_VALUES

    span = _bulk_of(samples)
    if span == 0:
        return []
    if found.reasons == (TWO_VALUES,):
        return [f"the result is the input: {TWO_VALUES}; if they hold noise, give sigma or noise"]
    recording = axes == 1  # weak noise beside high peaks is seen there
    if changed < (_CLEAN if recording else _NOTHING) * span and found.confidence != "high" and not _drawn(samples):
        kept = "the result is the input" if changed < _CLEAN * span else "the result is nearly the input"
        why = f"; {found.reasons[0]}" if found.confidence == "low" and found.reasons else ""
        return [f"{kept}: {found}{why}; if you see noise, {_REMEDIES[axes]}"]
    if changed < _CLEAN * span:
        return []
    if found.confidence == "low":
        return [f"the noise was hard to find out: {found}; {found.reasons[0]}; {if_wrong(axes)}"]
    return []


def if_wrong(axes: int) -> str:
    return f"if the result looks wrong, strength=0.5 keeps more; or {_REMEDIES[axes]}"


def _bulk_of(samples: NDArray[Any]) -> float:
    """Return the range without stars and peaks; of all samples where most are alike."""
    some = samples.reshape(-1)[:: max(samples.size // _SOME, 1)]
    low, high = np.quantile(some, [_TAIL, 1 - _TAIL])
    return float(high) - float(low) or range_of(samples)


def _drawn(samples: NDArray[Any]) -> bool:
    """Tell whether samples take so few values that nobody would look for noise."""
    some = samples.ravel()[:: max(samples.size // _SOME, 1)]
    return len(np.unique(some)) <= _FEW
