"""What a call of `denoise` did."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["DenoiseInfo"]


@dataclass(frozen=True)
class DenoiseInfo:
    """What `denoise` did, all in units of the input.

    Attributes
    ----------
    sigma : float
        Standard deviation of the noise that was assumed.
    sigma_estimated : bool
        Whether it was estimated from the input.
    width, patch_size, search_radius, spatial_width
        Of the patch kernel (`nlflow.Patch`); ``width`` is the filter parameter h.
    smoothing : float
        Width in nodes of the Gaussian by which the input was smoothed before patches were compared.
    fidelity_mean : float
        Mean of the fidelity over the nodes; 0 when there is none.
    steps : int
        Semi-implicit steps taken.
    stopped_by : str
        Why the flow ended.
    method : str
        How the averages were computed, and why.
    residual : float
        Root mean square of input minus result.
    memory_bytes : int
        What the affinity kept.
    seconds, compile_seconds : float
        Wall time in all, and its part for compiling loops or loading them from the cache.
    """

    sigma: float
    sigma_estimated: bool
    width: float
    patch_size: int
    search_radius: int
    spatial_width: float
    smoothing: float
    fidelity_mean: float
    steps: int
    stopped_by: str
    method: str
    residual: float
    memory_bytes: int
    seconds: float
    compile_seconds: float

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as a dictionary of plain numbers and texts, ready for JSON."""
        return asdict(self)
