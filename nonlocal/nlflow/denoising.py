"""Denoising of images and signals by nonlocal flows on patch tokens."""

from __future__ import annotations

import math
import time
import warnings
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nlflow import _numba
from nlflow.affinities import Affinity, affinity
from nlflow.domain import Grid
from nlflow.errors import (
    InputError,
    MemoryLimitError,
    NlflowWarning,
    NumericalError,
    check_array,
    check_integer,
    check_number,
)
from nlflow.events import Discrepancy
from nlflow.flow import GradientFlow
from nlflow.functional import E
from nlflow.integrators import SemiImplicit
from nlflow.kernel import Patch
from nlflow.result import Status
from nlflow.solver import solve

__all__ = ["DenoiseInfo", "denoise", "estimate_sigma"]

# Chosen on BSD68 and Kodak photographs (images) and on synthetic test signals (1-D) with `benchmarks/tune_denoise.py`.
_MOST_STEPS = 10
_ENOUGH_RESIDUAL = 0.4  # of sigma; one step at the widths below removes more, unless hardly any patches are alike
_VARIANCE_MARGIN = 1.4  # patches that happen to be alike overestimate the variance beyond the noise
_SMOOTHING = 0.55  # nodes; patches are compared after a Gaussian of this width, which takes more noise than signal
_WIDTH = 1.9  # of the noise left in the patches, over the fourth root of the samples in a patch
_SPATIAL = 0.6  # of the search radius: near patches are likelier alike
_MORE_PIXELS = (0.32, 0.65)  # noise over signal, a channel: from here on patches of 5 and of 7 pixels instead of 3
# Beyond this ratio of range to noise no two patches are ever alike, and squares would leave the range of float32.
_NOISELESS = 1e12


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


def estimate_sigma(image: Any, *, channel_axis: int | None = None) -> float:
    """Estimate the standard deviation of white Gaussian noise, in the units of the input.

    Median of the finest wavelet coefficients (Donoho and Johnstone 1994, doi 10.1093/biomet/81.3.425), by
    `skimage.restoration.estimate_sigma`; the mean over channels. Biased up where the noise is low (texture counts as
    noise) and down on clipped data.

    Parameters
    ----------
    image : array_like
        1-D signal or 2-D image, with a channel axis where there is one.
    channel_axis : int, optional

    Raises
    ------
    InputError
        As `denoise`.
    """
    signal, _ = _as_signal(image, channel_axis)
    return _estimate(signal)


def denoise(
    image: Any,
    sigma: float | None = None,
    *,
    channel_axis: int | None = None,
    width: float | None = None,
    patch_size: int | None = None,
    search_radius: int | None = None,
    fidelity: float | None = None,
    steps: int | None = None,
    preserve_range: bool = False,
    return_info: bool = False,
    progress: bool = False,
    memory_limit: float | None = None,
) -> Any:
    r"""Denoise a grey or colour image or a 1-D signal with the E-flow of its patch tokens.

    The affinity is the patch kernel of nonlocal means on the slightly smoothed input, noise-corrected and averaged over
    the patch (so that whole patches are averaged, not pixels); the functional is E with a fidelity that grows where the
    patches found differ by more than noise, lambda~_i = max(var_i - 1.4 sigma^2, 0) / sigma^2; the flow runs in the
    degree metric by semi-implicit NeuTRENO steps u <- (Pu + lambda~ f) / (1 + lambda~) from f until the residual says
    that the noise is out. All of it is chosen from sigma; give a keyword to fix a choice.

    Parameters
    ----------
    image : array_like
        (N,) signal or (H, W) image; with `channel_axis` (N, C) or (H, W, C). Integers, booleans and floats; NaN and
        infinity are refused.
    sigma : float, optional
        Standard deviation of the noise **in the units of the input** (grey levels 0...255 for uint8). Estimated by
        `estimate_sigma` when not given.
    channel_axis : int, optional
        Axis of colours or channels; they share one kernel.
    width : float, optional
        Filter parameter h in the units of the input. By default in proportion to the spread that noise alone gives the
        distance of two patches: h = 1.9 s n^(-1/4), n the samples in a patch (channels count) and s the noise left in
        them by the smoothing.
    patch_size : int, optional
        Side of the patches, odd.
    search_radius : int, optional
        Half side of the search window; its weights fall off as a Gaussian of 0.6 times this width.
    fidelity : float, optional
        A constant lambda~ in place of the local one; 0 for the J-flow.
    steps : int, optional
        Exactly this many steps, in place of the stopping rule.
    preserve_range : bool
        Keep the units of an integer input. By default integers come back as scikit-image converts them to float
        (uint8: 0...1). Floating-point input keeps its units in either case.
    return_info : bool
        Return ``(result, info)`` with a `DenoiseInfo`.
    progress : bool
        Progress bar on stderr.
    memory_limit : float, optional
        Bytes that the weights may take; half of the physical memory by default. When half the stencil does not fit,
        weights are computed anew at each step.

    Returns
    -------
    array
        Shape of the input; float32 for float32 and float16, otherwise float64.

    Raises
    ------
    InputError
        Naming the argument: NaN or infinity, empty, complex, wrong number of dimensions, negative numbers.
    MemoryLimitError
        When not even the padded image fits the limit.

    Warns
    -----
    NlflowWarning
        When the search window is larger than the image and is shrunk.

    Notes
    -----
    Cost O(N (2 r + 1)^n) for N nodes, whatever the patch size; 4 (2 r + 1)^n / 2 bytes a node in single precision, in
    which everything but float64 and integers of more than 16 bits is computed. The result scales and shifts with the
    input.

    References
    ----------
    Buades, Coll and Morel 2005 (doi 10.1137/040616024) for the kernel; Nguyen et al., NeurIPS 2023 (arXiv 2312.00751)
    for the step; Gilboa and Osher 2008 (doi 10.1137/070698592) for the functional.

    Examples
    --------
    >>> import numpy as np
    >>> from nlflow import denoise
    >>> clean = np.sign(np.sin(np.arange(400) / 20))
    >>> noisy = clean + np.random.default_rng(0).normal(0, 0.3, 400)
    >>> result = denoise(noisy, sigma=0.3)
    >>> bool(np.std(result - clean) < 0.5 * np.std(noisy - clean))
    True
    """
    begun, compiled = time.perf_counter(), _numba.seconds
    signal, restore = _as_signal(image, channel_axis)
    if sigma is not None:
        sigma = check_number("sigma", sigma, minimum=0, hint="the noise in the units of the input")
    if width is not None:
        width = check_number("width", width, minimum=0, strict=True)
    if patch_size is not None:
        patch_size = check_integer("patch_size", patch_size, minimum=1, odd=True)
    if search_radius is not None:
        search_radius = check_integer("search_radius", search_radius, minimum=1)
    if fidelity is not None:
        fidelity = check_number("fidelity", fidelity, minimum=0)
    if steps is not None:
        steps = check_integer("steps", steps, minimum=1)
    if memory_limit is not None:
        memory_limit = check_number("memory_limit", memory_limit, minimum=1, finite=False)
    noise = _estimate(signal) if sigma is None else sigma
    span = _span(signal)
    if noise == 0 or span == 0 or noise * _NOISELESS < span:
        why = "the input is constant" if span == 0 else f"there is no noise to remove (sigma={noise:g})"
        info = DenoiseInfo(
            noise, sigma is None, width or 0.0, patch_size or 0, search_radius or 0, 0.0, 0.0, fidelity or 0.0, 0,
            f"returned unchanged: {why}", "none", 0.0, 0, time.perf_counter() - begun, 0.0,
        )  # fmt: skip
        return _finish(image, restore(signal), preserve_range, return_info, info)
    # In units of the noise and about the mean: the result then scales and shifts with the input, and single precision
    # does not suffer from a large offset.
    offset = float(signal.mean(dtype=np.float64))
    f = ((signal - signal.dtype.type(offset)) / signal.dtype.type(noise)).astype(signal.dtype)
    spatial = f.shape[:-1]
    kernel = _kernel(f, None if width is None else width / noise, patch_size, search_radius)
    operator = _affinity(kernel, Grid(spatial, boundary="reflect"), _smoothed(f), memory_limit)
    strength = _local_fidelity(operator, f, kernel.patch_size) if fidelity is None else fidelity
    flow = GradientFlow(E(operator, f, strength, measure="degree"), metric="degree")
    rules = [] if steps is not None else [Discrepancy(f, 1.0, _ENOUGH_RESIDUAL)]
    solution = solve(
        flow, f, t=float(steps or _MOST_STEPS), integrator=SemiImplicit(dt=1.0), trackers=rules, progress=progress,
        energies=False,
    )  # fmt: skip
    if solution.status is Status.INTERRUPTED:
        raise KeyboardInterrupt  # half a result is none; `solve` gives what there is
    if not solution.success:
        raise NumericalError(f"image: {solution.message}")
    result = solution.final * signal.dtype.type(noise) + signal.dtype.type(offset)
    info = DenoiseInfo(
        sigma=noise,
        sigma_estimated=sigma is None,
        width=kernel.width * noise,
        patch_size=kernel.patch_size,
        search_radius=kernel.search_radius,
        spatial_width=kernel.spatial_width or 0.0,
        smoothing=_SMOOTHING,
        fidelity_mean=float(np.mean(strength)),
        steps=int(solution.stats["steps"]),
        stopped_by=solution.message,
        method=f"{operator.method}: {operator.reason}",
        residual=float(np.sqrt(np.mean((solution.final - f) ** 2, dtype=np.float64))) * noise,
        memory_bytes=operator.memory_bytes,
        seconds=time.perf_counter() - begun,
        compile_seconds=_numba.seconds - compiled,
    )
    return _finish(image, restore(result), preserve_range, return_info, info)


def _as_signal(image: Any, channel_axis: int | None) -> tuple[NDArray[Any], Any]:
    """Return the input as (..., C) in its computing precision, and how to give a result the input's shape."""
    array = check_array("image", image)
    if not isinstance(array, np.ndarray):
        raise InputError(f"image: got {type(array).__name__}, expected a NumPy array; convert it (.cpu().numpy())")
    given = np.asarray(image).dtype
    if given.kind in "biu" and given.itemsize <= 2:  # wider integers do not fit single precision
        array = array.astype(np.float32)
    spatial = array.ndim - (channel_axis is not None)
    if spatial not in (1, 2):
        hint = "; is the last axis colour? then pass channel_axis=-1" if array.ndim == 3 else ""
        raise InputError(
            f"image: got {array.ndim} dimension(s) (shape {array.shape}) with channel_axis={channel_axis}, expected "
            "a 1-D "
            f"signal or a 2-D image{' besides the channel axis' if channel_axis is not None else ''}{hint}"
        )
    if channel_axis is None:
        return np.ascontiguousarray(array)[..., None], lambda result: result[..., 0]
    axis = check_integer("channel_axis", channel_axis)
    if not -array.ndim <= axis < array.ndim:
        raise InputError(f"channel_axis: got {axis}, expected an axis of an array of {array.ndim} dimensions")
    return np.ascontiguousarray(np.moveaxis(array, axis, -1)), lambda result: np.moveaxis(result, -1, axis)


def _finish(image: Any, result: NDArray[Any], preserve_range: bool, return_info: bool, info: DenoiseInfo) -> Any:
    """Give the result the dtype and range that scikit-image gives a float version of the input."""
    given = np.asarray(image).dtype
    if given.kind in "biu":
        result = result.astype(np.float64)
        if not preserve_range and given.kind != "b":
            result = np.maximum(result / float(np.iinfo(given).max), -1)  # the lowest signed integer is -1 too
    result = np.array(result)  # never a view of the input
    return (result, info) if return_info else result


def _span(signal: NDArray[Any]) -> float:
    """Return the range of a signal; infinity, without a warning, when that overflows."""
    return float(signal.max()) - float(signal.min())


def _estimate(signal: NDArray[Any]) -> float:
    from skimage.restoration import estimate_sigma as wavelet_sigma

    estimator: Any = wavelet_sigma  # not annotated there

    # The wavelet needs two samples along each axis; an axis of one sample carries no detail.
    squeezed = signal.reshape([n for n in signal.shape[:-1] if n > 1] + [signal.shape[-1]])
    if squeezed.ndim == 1 or min(squeezed.shape[:-1]) < 2:
        return 0.0
    # float64 and scaled to its range: the estimate does not depend on the units then.
    span = _span(squeezed)
    if span == 0 or math.isinf(span):
        return 0.0
    scaled = (squeezed.astype(np.float64) - float(squeezed.min())) / span
    return float(estimator(scaled, channel_axis=-1, average_sigmas=True)) * span


def _kernel(f: NDArray[Any], width: float | None, patch_size: int | None, search_radius: int | None) -> Patch:
    """Choose the patch kernel for a signal in units of its noise, to compare patches of `_smoothed`."""
    from scipy.ndimage import gaussian_filter

    dimension = sum(n > 1 for n in f.shape[:-1])
    channels = f.shape[-1]
    if patch_size is None:
        # The more noise over signal, the more samples it takes to tell patches apart; channels are samples too.
        variance = max(float(np.var(f, dtype=np.float64)) - 1.0, 0.01)
        noisiness = 1 / math.sqrt(variance) / channels
        patch_size = 3 + 2 * sum(noisiness > limit for limit in _MORE_PIXELS) if dimension == 2 else 15
    if search_radius is None:
        search_radius = 8 if dimension == 2 else 60
    # What the smoothing leaves of white noise of variance 1.
    impulse = np.zeros(2 * math.ceil(4 * _SMOOTHING) + 3)
    impulse[len(impulse) // 2] = 1
    noise = float(np.linalg.norm(gaussian_filter(impulse, _SMOOTHING))) ** dimension
    if width is None:
        width = _WIDTH * noise * float(channels * patch_size**dimension) ** -0.25
    return Patch(
        width=width, patch_size=patch_size, search_radius=search_radius, sigma=noise, tokens="patch",
        spatial_width=_SPATIAL * search_radius,
    )  # fmt: skip


def _smoothed(f: NDArray[Any]) -> NDArray[Any]:
    """Return the signal as patches of it are compared."""
    from scipy.ndimage import gaussian_filter

    return np.asarray(gaussian_filter(f, (_SMOOTHING,) * (f.ndim - 1) + (0,), mode="reflect"))


def _affinity(kernel: Patch, grid: Grid, f: NDArray[Any], memory_limit: float | None) -> Affinity:
    """Store the weights when they fit, otherwise compute them anew at each average."""
    try:
        return affinity(kernel, grid, f, memory_limit=memory_limit)
    except MemoryLimitError:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", NlflowWarning)  # the shrunk window was reported by the first call
            result = affinity(kernel, grid, f, store=False, memory_limit=memory_limit)
        result.reason = "weights do not fit the memory limit and are computed anew at each average"
        return result


def _local_fidelity(operator: Affinity, f: NDArray[Any], patch_size: int) -> NDArray[Any]:
    """Return lambda~_i = max(var_i - 1.2, 0): the variance of the neighbours found, beyond that of the noise.

    With it a semi-implicit step is the scalar form of the local Wiener filter, Pf + C / (C + sigma^2) (f - Pf).
    """
    from scipy.ndimage import uniform_filter

    power = np.sum(f * f, axis=-1, keepdims=True)
    moments = operator.average(np.concatenate([f, power], axis=-1))
    mean = moments[..., :-1]
    variance = (moments[..., -1] - np.sum(mean * mean, axis=-1)) / f.shape[-1]
    smooth = uniform_filter(variance, size=patch_size, mode="reflect")
    return np.maximum(smooth - _VARIANCE_MARGIN, 0).astype(f.dtype)
