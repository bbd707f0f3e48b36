"""The denoising of images and signals: from the user's samples to units of the noise, a flow, and back."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nlflow._array import root_mean_square, underflowing
from nlflow.backends.numba import loading
from nlflow.denoising.columns import each_by_itself
from nlflow.denoising.following import Trail, within
from nlflow.denoising.info import DenoiseInfo
from nlflow.denoising.inpainting import filled
from nlflow.denoising.inputs import (
    check_axis,
    check_options,
    check_patch,
    noise_model,
    observe,
    place,
    shape_of,
    spatial_shape,
)
from nlflow.denoising.noise.estimation import estimate_sigmas
from nlflow.denoising.presets import PRESETS
from nlflow.denoising.runs import Run, Watch, fast, on_groups
from nlflow.denoising.selection import STOPPING, select
from nlflow.domains.samples import finish
from nlflow.errors import check_choice, check_integer, check_number

__all__ = ["QUALITIES", "denoise"]

Array = NDArray[Any]
QUALITIES = ("fast", *PRESETS)


@underflowing
def denoise(
    image: Any,
    sigma: Any = None,
    *,
    quality: str = "balanced",
    noise: Any = "gaussian",
    channel_axis: int | None = None,
    separate: bool = False,
    mask: Any = None,
    keep: Any = None,
    stopping: str | None = None,
    max_memory: float | None = None,
    width: float | None = None,
    patch_size: int | None = None,
    search_radius: int | None = None,
    fidelity: float | None = None,
    steps: int | None = None,
    preserve_range: bool = False,
    return_info: bool = False,
    progress: bool | Callable[[float], Any] = False,
    seed: int = 0,
) -> Any:
    r"""Denoise a grey or colour image, a multichannel image or a 1-D signal with a nonlocal flow of its patches.

    ``fast`` is the E-flow of patch tokens under the patch kernel of nonlocal means, with a scalar fidelity for each
    pixel. ``balanced`` and ``best`` are flows of groups of alike patches with a fidelity matrix for each group,
    Lambda = C / s^2 of the group's covariance C, so that a semi-implicit step is the local Wiener (nonlocal Bayes)
    filter; groups and covariances are found anew from the running estimate. `nlflow.denoising.presets` states kernel,
    functional, integrator and stopping of each. Everything is chosen from sigma.

    Parameters
    ----------
    image : array_like
        (N,) signal or (H, W) image; with `channel_axis` (N, C) or (H, W, C). Integers, booleans and floats; NaN and
        infinity are refused unless `mask` says that they are missing.
    sigma : float or array_like, optional
        Standard deviation of the noise **in the units of the input** (grey levels 0...255 for uint8): a number, one
        number a channel, or a map of the spatial shape (or of the image's). Samples with a 0 in an array are free of
        noise and left as they are. Estimated by `estimate_sigma` when not given: one number for all channels, the mean
        of their estimates, as suits colours. Give one a channel, or `separate`, where channels differ in their noise.
    quality : {'fast', 'balanced', 'best'}
        How much time quality is worth.
    noise : {'gaussian', 'poisson'} or Poisson
        Counts are given noise of strength 1 by a transform that stabilises their variance, and come back through its
        exact unbiased inverse; see `nlflow.Poisson` for gain, read noise and offset.
    channel_axis : int, optional
        Axis of colours or channels; all of them say which patches are alike. Three channels are denoised as opponent
        colours, other numbers along their principal axes.
    separate : bool
        Denoise each channel as if it were alone, with its own noise, groups and missing samples: for channels that have
        nothing to do with each other, as the columns of a table. A channel of which every sample is missing stays as it
        is.
    mask : array_like of bool, or 'nan', optional
        True where samples are **missing**: the fidelity is 0 there, so that they are filled in from patches that are
        alike. Their values are never looked at. Of the spatial shape, or of the image's (a pixel is missing where any
        channel is). ``'nan'``: what is not finite is missing.
    keep : array_like of bool, optional
        True where the result is the input, exactly, unless it is missing. These samples still help to denoise the
        others.
    stopping : {'discrepancy', 'sure'}, optional
        Which estimate on the flow's path to return, in place of the preset's rule: the one whose residual is nearest to
        the noise, or the one of least mean squared error by Stein's estimate with Monte-Carlo divergence (a second run;
        the estimate is returned as ``info.risk``).
    max_memory : float, optional
        Bytes of working memory; half of the physical memory by default (`nlflow.errors.memory_limit`). ``fast``
        computes its weights anew at each step when they do not fit; the others cut the image into overlapping strips,
        with the same bits as a result.
    width : float, optional
        ``fast`` only, as the next four: filter parameter h in the units of the input. By default in proportion to the
        spread that noise alone gives the distance of two patches: h = 1.9 s n^(-1/4), n the samples in a patch
        (channels count) and s the noise left in them by the smoothing.
    patch_size : int, optional
        Side of the patches, odd; at most what holds the whole image from any of its pixels.
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
    progress : bool or callable
        True for a progress bar with the time left, on stderr. A callable gets the share of the work that is done, never
        falling and 1 at last, in the calling thread: for ``fast`` when the weights are there and after each step, for
        the others after each few hundred groups, within strips too. What it raises ends the call and comes out of it as
        it is; there is no half result. A `nlflow.denoising.Trail` is such a callable, and keeps the course of the flow.
    seed : int
        Of the random signs for ``stopping='sure'``; nothing else is random.

    Returns
    -------
    array
        Shape of the input; float32 for float32 and float16, otherwise float64.

    Raises
    ------
    InputError
        Naming the argument: NaN or infinity, empty, complex, wrong number of dimensions, negative numbers, maps and
        masks of another shape, a mask that hides everything, negative counts.
    MemoryLimitError
        When not even the smallest strip, or for ``fast`` the padded image, fits `max_memory`.

    Warns
    -----
    NlflowWarning
        ``fast``: when the search window is larger than the image and is shrunk.

    Notes
    -----
    ``fast`` costs O(N (2 r + 1)^n) for N nodes, whatever the patch size, and 4 (2 r + 1)^n / 2 bytes a node in single
    precision. Groups cost O(G ((2 r + 1)^n D + m D^2 + D^3)) a step for G groups of m patches of D samples and some 100
    bytes a node and channel. Single precision is used up to a range of 10^4 sigma (``fast``) and of 90 sigma (groups),
    for float64 input too; groups that are far from well conditioned are filtered in double precision all the same. The
    result scales and shifts with the input, and has the same bits for any number of threads. On another processor it is
    the same to a bound (docs/processors.md).

    References
    ----------
    Nguyen et al., NeurIPS 2023 (arXiv 2312.00751) for the step; Gilboa and Osher 2008 (doi 10.1137/070698592) for the
    functional; Buades, Coll and Morel 2005 (doi 10.1137/040616024) for the patch kernel; Lebrun, Buades and Morel 2013
    (doi 10.1137/120874989) for the filter that the matrix fidelity leads to; Herbreteau and Kervrann 2022
    (arXiv 2212.00422) for taking the noise out in parts.

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
    if separate:
        result, info = each_by_itself(
            denoise, image, sigma, channel_axis=channel_axis, mask=mask, keep=keep, progress=progress, quality=quality,
            noise=noise, stopping=stopping, max_memory=max_memory, width=width, patch_size=patch_size,
            search_radius=search_radius, fidelity=fidelity, steps=steps, preserve_range=preserve_range, seed=seed,
        )  # fmt: skip
        return (result, info) if return_info else result
    begun, compiled = time.perf_counter(), loading.seconds
    tell, bar = (progress, False) if callable(progress) else (None, bool(progress))
    trail = progress if isinstance(progress, Trail) else None
    if trail is not None:
        trail.course = {}
    check_choice("quality", quality, QUALITIES)
    if stopping is not None:
        check_choice("stopping", stopping, STOPPING)
    options = check_options(quality, width, patch_size, search_radius, fidelity, steps, stopping)
    if max_memory is not None:
        max_memory = check_number("max_memory", max_memory, minimum=1, finite=False)
    seed = check_integer("seed", seed, minimum=0)
    shape = shape_of("image", image)
    channel_axis = check_axis(len(shape), channel_axis)
    check_patch(options["patch_size"], spatial_shape(shape, channel_axis))
    model = noise_model(noise, sigma)
    kept = None if keep is None else place("keep", keep, shape, channel_axis)
    seen, samples, restore = observe(
        image, sigma, model, channel_axis, mask, estimate_sigmas if trail is None else trail.estimate
    )  # fmt: skip
    level = root_mean_square(seen.level)
    told: dict[str, Any] = {"functional": "none", "parameters": {}}
    risk = None
    if seen.idle:
        u, told["stopped_by"] = samples, f"returned unchanged: {seen.idle}"
        if seen.missing is not None:
            u = np.where(seen.missing[..., None], samples[~seen.missing][0], u)
    else:
        start = seen.f if seen.missing is None else filled(seen.f, seen.missing)
        unit = level if model is None else 1.0

        def run(f: Array, watch: Watch) -> Run:
            if quality == "fast":
                return fast(f, seen, options, unit, watch)
            return on_groups(f, seen, quality, watch)

        half = 0.5 if stopping == "sure" else 1.0  # that rule runs the flow once more
        found = run(start, Watch(stopping is not None, bar, max_memory, within(tell, 0.0, half), trail))
        told, estimate = found.told, found.path[-1]
        if stopping is not None:

            def rerun(f: Array) -> list[Array]:
                return run(f, Watch(True, False, max_memory, within(tell, half, 1.0))).path

            relative = 1.0 if seen.variance is None else np.sqrt(seen.variance)[..., None]
            observed = slice(None) if seen.missing is None else ~seen.missing
            index, risk, why = select(
                stopping, start, found.path, rerun, relative, observed, seed, seen.level / unit,
            )  # fmt: skip
            estimate, told = found.path[index], {**told, "stopped_by": why, "steps": index + 1}
            risk = None if risk is None else risk * unit**2
        if trail is not None and "distance" in trail.course:
            trail.course["distance"] *= unit
        u = seen.back(estimate)
        if model is not None:
            u = np.asarray(model.unstabilise(u)).astype(samples.dtype)
    for known in (seen.exact, None if kept is None else kept[..., None]):
        if known is not None:
            u = np.where(known if seen.missing is None else known & ~seen.missing[..., None], samples, u)
    present = slice(None) if seen.missing is None else ~seen.missing
    info = DenoiseInfo(
        sigma=level,
        sigma_estimated=seen.estimated,
        noise="Gaussian" + (", varying" if seen.variance is not None else "") if model is None else repr(model),
        quality=quality,
        residual=root_mean_square((u - samples)[present]),
        risk=risk,
        seconds=time.perf_counter() - begun,
        compile_seconds=loading.seconds - compiled,
        **told,
    )
    result = finish(image, restore(u), preserve_range)
    if tell is not None:
        tell(1.0)
    return (result, info) if return_info else result
