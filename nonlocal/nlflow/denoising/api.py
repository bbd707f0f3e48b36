"""The denoising of images and signals: from the user's samples to units of the noise, a flow, and back."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from nlflow import _numba
from nlflow._samples import as_signal, finish, range_of
from nlflow.denoising.info import DenoiseInfo
from nlflow.denoising.pixelwise import SMOOTHING, run
from nlflow.errors import check_integer, check_number
from nlflow.noise.estimation import wavelet_sigma

__all__ = ["denoise"]

# Beyond this ratio of range to noise no two patches are ever alike, and squares would leave the range of float32.
_NOISELESS = 1e12


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
    signal, restore = as_signal(image, channel_axis)
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
    noise = wavelet_sigma(signal) if sigma is None else sigma
    span = range_of(signal)
    if noise == 0 or span == 0 or noise * _NOISELESS < span:
        why = "the input is constant" if span == 0 else f"there is no noise to remove (sigma={noise:g})"
        info = DenoiseInfo(
            noise, sigma is None, width or 0.0, patch_size or 0, search_radius or 0, 0.0, 0.0, fidelity or 0.0, 0,
            f"returned unchanged: {why}", "none", 0.0, 0, time.perf_counter() - begun, 0.0,
        )  # fmt: skip
        result = finish(image, restore(signal), preserve_range)
        return (result, info) if return_info else result
    # In units of the noise and about the mean: the result then scales and shifts with the input, and single precision
    # does not suffer from a large offset.
    offset = float(signal.mean(dtype=np.float64))
    f = ((signal - signal.dtype.type(offset)) / signal.dtype.type(noise)).astype(signal.dtype)
    outcome = run(
        f, width=None if width is None else width / noise, patch_size=patch_size, search_radius=search_radius,
        fidelity=fidelity, steps=steps, progress=progress, memory_limit=memory_limit,
    )  # fmt: skip
    kernel, solution, operator = outcome.kernel, outcome.solution, outcome.operator
    u = solution.final * signal.dtype.type(noise) + signal.dtype.type(offset)
    info = DenoiseInfo(
        sigma=noise,
        sigma_estimated=sigma is None,
        width=kernel.width * noise,
        patch_size=kernel.patch_size,
        search_radius=kernel.search_radius,
        spatial_width=kernel.spatial_width or 0.0,
        smoothing=SMOOTHING,
        fidelity_mean=outcome.fidelity_mean,
        steps=int(solution.stats["steps"]),
        stopped_by=solution.message,
        method=f"{operator.method}: {operator.reason}",
        residual=float(np.sqrt(np.mean((solution.final - f) ** 2, dtype=np.float64))) * noise,
        memory_bytes=operator.memory_bytes,
        seconds=time.perf_counter() - begun,
        compile_seconds=_numba.seconds - compiled,
    )
    result = finish(image, restore(u), preserve_range)
    return (result, info) if return_info else result
