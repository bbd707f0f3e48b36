"""`denoise` and `problem`."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Literal, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from nlflow._array import is_tensor, root_mean_square, underflowing
from nlflow.backends.devices import CPU, choose_device
from nlflow.backends.numba import loading
from nlflow.denoising.frame import Frame, Part, is_by_pixels, observe
from nlflow.denoising.given import seen
from nlflow.denoising.info import DenoiseInfo, doubts
from nlflow.denoising.labelled import denoised_labelled, is_labelled
from nlflow.denoising.layout import Axes, shape_of_image
from nlflow.denoising.noise.models.base import NoiseEstimate
from nlflow.denoising.noise.names import NO_NOISE
from nlflow.denoising.options import OPTIONS, Options
from nlflow.denoising.residual import figures_of, milder
from nlflow.denoising.runs import Problem, Trail, Watch, telling, within
from nlflow.domains.samples import check_scale, finish, range_of
from nlflow.errors import InputError, checked_call, warn_caller

Array = NDArray[Any]
FloatT = TypeVar("FloatT", bound=np.floating[Any])
_FIRST = 0.9  # share of the progress at which the residual is looked at; another flow is seldom asked for


@overload
def denoise(
    image: NDArray[FloatT], sigma: Any = ..., *, return_info: Literal[False] = ..., **options: Any
) -> NDArray[FloatT]: ...
@overload
def denoise(
    image: NDArray[FloatT], sigma: Any = ..., *, return_info: Literal[True], **options: Any
) -> tuple[NDArray[FloatT], DenoiseInfo]: ...
@overload
def denoise(image: Any, sigma: Any = ..., *, return_info: bool = ..., **options: Any) -> Any: ...
@partial(checked_call, more=OPTIONS)
@underflowing
def denoise(
    image: Any,
    sigma: Any = None,
    *,
    quality: str = "balanced",
    noise: Any = "auto",
    channel_axis: int | None = None,
    axes: str | None = None,
    spacing: Any = None,
    mask: Any = None,
    keep: Any = None,
    preserve_range: bool = False,
    return_info: bool = False,
    progress: bool | Callable[[float], Any] = False,
    options: Options | None = None,
    **more: Any,
) -> Any:
    """Denoise an image, a volume, a clip or a signal, with channels or without, by a nonlocal flow of its patches.

    ``pixels`` is the E-flow of pixels under the patch kernel of nonlocal means, with a fidelity for each pixel. The
    other qualities are flows of groups of alike patches with a fidelity matrix for each group, C / s^2 for its
    covariance C and the noise s that is left: a semi-implicit step is the local Wiener (nonlocal Bayes) filter.

    Parameters
    ----------
    image : array_like or tensor
        (N,) signal, (H, W) image or (Z, H, W) volume; with channels (N, C), (H, W, C) or (Z, H, W, C). Integers,
        booleans and floats; a torch tensor of floats; an object of pandas or xarray. In a DataFrame, without `axes` and
        `channel_axis`, each column of numbers is a signal of its own; columns that rise or fall in equal steps stay.
    sigma : float or array_like, optional
        Standard deviation of the noise **in the units of the input** (grey levels 0...255 for uint8); estimated by
        default. One number, one a channel, one a slice or frame (Z,), or a map of the spatial or the full shape; where
        an array holds 0, samples stay as they are.
    quality : {'fast', 'balanced', 'best', 'pixels'}
        'pixels' is for images and signals.
    noise : {'auto', 'white', 'poisson', 'rician', 'impulses', 'hot'} or Noise
        'auto' finds out which noise it is when no `sigma` is given (`nlflow.estimate_noise`), 'white' estimates the
        strength alone. The others are for counts (`Poisson`), for magnitudes of complex samples (`Rician`), and for
        single samples that are wrong (`Impulses`, `HotPixels`) beside white noise. ``pixels`` takes correlated noise
        for white noise.
    channel_axis : int, optional
        Axis of colours or channels, which are compared together. Constant channels come back as they are.
    axes : str, optional
        One letter for each axis: T (time), Z, Y, X or C (channels), such as 'ZYX', 'TYXC' or 'CZYX'; for tensors also B
        (a batch). At most three of T, Z, Y and X, T before the others. T before two others makes a clip, in which the
        search follows motion. Without `axes` three axes without channels are a volume of at least 8 samples along each;
        fewer are refused.
    spacing : array_like, optional
        Distance of samples along each axis but that of the channels, in any unit; equal by default. Along axes whose
        samples lie farther apart, patches and windows of a volume are thinner, and wider along the others.
        Without effect on images and clips.
    mask : array_like of bool, or 'nan', optional
        Not 0 where samples are **missing** and are to be filled in, whatever their values: of the spatial shape, or of
        the full shape (a pixel is missing where any channel is). ``'nan'`` means samples that are not finite.
    keep : array_like of bool, optional
        Not 0 where the result is the input, unless it is missing; shaped as `mask`.
    preserve_range : bool
        Keep the units of an integer input. By default integers come back as scikit-image converts them to float
        (uint8: 0...1).
    return_info : bool
        Return ``(result, info)`` with a `DenoiseInfo`.
    progress : bool or callable
        True for a progress bar on stderr. A callable gets the share of the work that is done, from 0 to 1; what it
        raises ends the call. A `nlflow.denoising.Trail` keeps the course of the flow.
    options : Options, optional
        All else: `nlflow.denoising.Options`.
    **more
        Single options by name: `strength`, `separate`, `stopping`, `max_memory`, `width`, `patch_size`,
        `search_radius`, `fidelity`, `steps`, `seed` and `device`.

    Returns
    -------
    array or tensor
        Shape of the input; float32 for float32 and float16, otherwise float64. A tensor for a tensor, on its device; an
        object of pandas or xarray for one, in its own units and types, integers rounded.

    Raises
    ------
    InputError
        For infinity, an image without samples, arguments of wrong shape or range, and integers of 32 or 64 bits without
        `preserve_range` whose values fit 16 bits; without `sigma` and `noise` also for wrapped phases, integers that
        wrapped round and label images.
    MemoryLimitError
        When not even the smallest strip, or for ``pixels`` the padded image, fits `max_memory`.

    Notes
    -----
    ``pixels`` costs O(N (2 r + 1)^n) for N nodes along n axes and a search radius r. Groups cost
    O(G ((2 r + 1)^n D + m D^2 + D^3)) a step for G groups of m patches of D samples. The result on a CPU does not
    depend on the number of threads.

    Samples that no `mask` names stay as they are where they are NaN or hidden by a masked array. Without a `mask` also
    those stay whose value seems to stand for "no data" (-9999, 0 in holes), of which a warning tells, and an alpha
    channel that is nearly everywhere 0 or full.

    A tensor that requires a gradient gets derivatives for groups held still: groups, principal channels and an
    estimated noise are constants. It is refused if an item is returned unchanged, for missing samples, `stopping` and
    models of noise that is not white. ``pixels``, clips and `separate` are refused for all tensors.

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
    chosen = Options.of(options, more)
    if is_labelled(image):
        words = {"quality": quality, "noise": noise, "channel_axis": channel_axis, "axes": axes, "spacing": spacing,
                 "mask": mask, "keep": keep, "progress": progress}  # fmt: skip
        result, info = denoised_labelled(denoise, image, sigma, chosen, words)
        return (result, info) if return_info else result
    if is_tensor(image):
        from nlflow.denoising.tensors import denoised_tensor

        return denoised_tensor(
            denoise, image, sigma, chosen, quality=quality, noise=noise, channel_axis=channel_axis, axes=axes,
            spacing=spacing, mask=mask, keep=keep, return_info=return_info, progress=progress,
        )  # fmt: skip
    for name, value in (("sigma", sigma), ("mask", mask), ("keep", keep)):
        if is_tensor(value):
            raise InputError(
                f"{name}: got a tensor beside an image that is none, expected an array; convert one of them"
            )
    placed = Axes.of(shape_of_image(image), channel_axis, axes, spacing)
    if not placed.shape:
        placed.check_count()
    check_scale(seen(image, placed, mask), preserve_range)
    if chosen.separate:
        from nlflow.denoising.columns import each_by_itself

        result, info = each_by_itself(
            denoise, image, sigma, placed, mask=mask, keep=keep, progress=progress, quality=quality, noise=noise,
            preserve_range=preserve_range, options=replace(chosen, separate=False),
        )  # fmt: skip
        return (result, info) if return_info else result
    begun, compiled = time.perf_counter(), loading.seconds
    trail = progress if isinstance(progress, Trail) else None
    if trail is not None:
        trail.course = {}
    place = choose_device(chosen.device)
    chosen.check(quality, len(placed.letters))
    if chosen.stopping is not None and isinstance(noise, str) and noise == "auto":
        noise = "white"  # the rules know no other
    frame, part = observe(image, sigma, noise, placed, quality, chosen, mask=mask, keep=keep, trail=trail)
    if chosen.device == "auto" and (is_by_pixels(quality, placed) or placed.moving):
        place = CPU
    if chosen.stopping is not None and frame.coloured is not None:
        raise InputError(
            f"stopping: got {chosen.stopping!r} with noise that is not white; leave it out, or give noise='white'"
        )
    with telling(progress, quality) as tell:
        watch = Watch(False, chosen.max_memory, tell, trail, place)
        first = 1.0 if frame.found is None else _FIRST
        u, told, less = _solved(frame, part, replace(watch, tell=within(tell, 0.0, first)))
        while less is not None:
            if frame.found is not None and less.model is frame.found.model:
                frame = replace(frame, found=less)
                break
            if trail is not None:
                trail.course = {}  # of a flow whose result is not taken
            if less.model.describe() == NO_NOISE:
                frame, u, told = frame.without_noise(less), part.as_it_was(frame.absent, u), {}
                break
            frame, part = observe(image, sigma, noise, placed, quality, chosen, mask=mask, keep=keep, found=less)
            u, told, less = _solved(frame, part, replace(watch, tell=within(tell, first, 1.0)))
        present = slice(None) if frame.missing is None else ~frame.missing
        samples, removed = part.samples[present], root_mean_square((u - part.samples)[present])
        changed = removed
        if frame.missing is not frame.absent:  # with what was replaced
            there = slice(None) if frame.absent is None else ~frame.absent
            changed = root_mean_square((u - part.samples)[there])
        words = {**frame.told(), "residual": removed, **told}
        seconds, loaded = time.perf_counter() - begun, loading.seconds - compiled
        result = finish(image, part.restore(u), preserve_range)
        for text in (frame.too_strong(range_of(samples)), *doubts(samples, changed, frame.doubted, len(frame.shape))):
            if text:
                warn_caller(text)
        if tell is not None:
            tell(1.0)
    return (result, DenoiseInfo(seconds=seconds, compile_seconds=loaded, **words)) if return_info else result


def _solved(frame: Frame, part: Part, watch: Watch) -> tuple[Array, dict[str, Any], NoiseEstimate | None]:
    """Return the result (..., C), what is told of the flow, and a milder verdict where the residual asks for it."""
    if frame.idle:
        return part.with_known(part.unchanged(frame.missing), frame), {}, None
    estimate, risk, told = frame.solve(part, watch)
    # What was asked for is not held against anything: neither a noise nor another strength of it.
    told_so = frame.found is None or frame.options.strength != 1
    figures = None if told_so else figures_of(part.f, estimate, frame)
    less = None if figures is None else milder(frame, figures)
    return part.result(estimate, frame), {**told, "risk": risk}, less


@checked_call
def problem(
    image: Any,
    sigma: Any = None,
    *,
    quality: str = "balanced",
    noise: Any = "auto",
    channel_axis: int | None = None,
    axes: str | None = None,
    spacing: Any = None,
    keep: Any = None,
    preserve_range: bool = False,
) -> Problem:
    """Return the flow that `denoise` solves, for trackers, checkpoints and stopping rules of your own.

    Parameters
    ----------
    image, sigma, quality, noise, channel_axis, axes, spacing, keep, preserve_range
        As in `denoise` for arrays.

    Returns
    -------
    Problem
        For `nlflow.solve`. ``back(solution.final)`` is the result of `denoise`; where the noise is found out, `denoise`
        may take less out.

    Raises
    ------
    InputError
        As in `denoise`; for an input without noise, samples that are missing or were replaced (impulses), few counts,
        and a recording whose noise is to be found out; for ``pixels`` a map of the noise, else correlated noise.
    MemoryLimitError
        When the flow does not fit the memory as a whole.

    Examples
    --------
    A long run that goes on where it was interrupted:

    >>> import numpy as np, tempfile, pathlib
    >>> from nlflow import Checkpoint, denoise, solve
    >>> from nlflow.denoising import problem
    >>> noisy = np.random.default_rng(0).normal(0, 1, (40, 40)) + np.arange(40)
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "large.npz"
    >>> p = problem(noisy, 1.0)
    >>> solution = solve(p.flow, t=p.t, integrator=p.integrator, trackers=[*p.rules, Checkpoint(path)], resume=True)
    >>> bool(np.array_equal(p.back(solution.final), denoise(noisy, 1.0)))
    True
    """
    placed, options = Axes.of(shape_of_image(image), channel_axis, axes, spacing), Options()
    check_scale(image, preserve_range)
    options.check(quality, len(placed.letters))
    frame, part = observe(image, sigma, noise, placed, quality, options, keep=keep)
    if frame.coloured is not None:
        raise InputError(
            f"noise: got {frame.noise}, for which denoise() solves a flow for each size of the picture; "
            "give noise='white' or a sigma for one flow"
        )
    if frame.few is not None:
        raise InputError(f"noise: got {frame.noise}, so few that denoise() solves flows on cells of samples; give "
                         "noise='white' or a sigma for one flow")  # fmt: skip
    if frame.missing is not None:
        if frame.absent is not None:
            raise InputError(f"image: got {np.count_nonzero(frame.absent)} missing sample(s), which denoise() fills in "
                             "by several flows; fill them in before, or use denoise()")  # fmt: skip
        raise InputError(f"noise: got {frame.noise}, which denoise() fills in by several flows; give noise='white' or "
                         "a sigma for one flow")  # fmt: skip
    if frame.has_scales:
        raise InputError("noise: got a recording whose noise is to be found out, for which denoise() solves flows on "
                         "several scales; give noise='white' or a sigma for one flow")  # fmt: skip
    if frame.flow is None:
        raise InputError(f"image: {frame.idle}, so that there is no flow; denoise() returns it unchanged")
    found = frame.flow.whole_problem(part.f, frame.variance)

    def back(u: Array) -> Any:
        estimate = found.back(u).astype(part.f.dtype, copy=False)
        return finish(image, part.restore(part.result(estimate, frame)), preserve_range)

    return replace(found, back=back)
