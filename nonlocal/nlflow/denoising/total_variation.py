"""Nonlocal total variation."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nlflow._array import underflowing
from nlflow.affinities import Affinity, affinity
from nlflow.denoising.noise import estimate_sigma
from nlflow.domains import Grid
from nlflow.domains.samples import as_signal, check_scale, finish, range_of
from nlflow.errors import InputError, check_integer, check_number, checked_call, remedied
from nlflow.functionals.variational import primal_dual
from nlflow.functionals.variational.certificate import NO_EDGES, CertifiedMinimizer
from nlflow.functionals.variational.jp import Jp
from nlflow.kernels import Patch

_NOISELESS = 1e12  # beyond this ratio of range to noise squares leave the range of float32
# Chosen on photographs of BSD68 at sigma = 25.
_SMOOTHING = 1.0  # pixels; patches are compared after a Gaussian of this width, which takes more noise than signal
_WIDTH = 0.2  # of the noise, once and for all channels
_SPATIAL = 1.0  # pixels; near pixels are likelier alike
_FIRST = 0.46  # fidelity of the first guess, over the root of the median degree
_SLOPE = -0.25  # of log residual over log fidelity, to begin with
_SOLVES = 12
_NEAR = 0.01  # the residual may miss what is wanted by this; that of an inexact minimizer is not known better


@checked_call
@underflowing
def nonlocal_tv(
    image: Any,
    sigma: float | None = None,
    *,
    fidelity: float | None = None,
    residual: float = 0.93,
    isotropic: bool = True,
    channel_axis: int | None = None,
    patch_size: int = 3,
    search_radius: int = 3,
    rtol: float = 3e-3,
    maxiter: int = 5000,
    preserve_range: bool = False,
    return_info: bool = False,
    memory_limit: float | None = None,
) -> Any:
    """Denoise an image or a signal by nonlocal total variation on the graph of its patches.

    It minimizes E_1(u) = J_1(u) + fidelity/2 sum_i |u_i - f_i|^2 (`Ep` with p = 1) with the patch kernel of the
    slightly smoothed input, in units of the noise (Gilboa and Osher 2008, doi 10.1137/070698592). Where the graph has
    no edges, the input comes back unchanged.

    Parameters
    ----------
    image : array_like
        (N,) signal or (H, W) image; with `channel_axis` (N, C) or (H, W, C).
    sigma : float, optional
        Standard deviation of the noise in the units of the input; estimated by `estimate_sigma` by default.
    fidelity : float, optional
        > 0, in units of the noise; chosen for the `residual` by default.
    residual : float
        The root mean square of u - f, in units of sigma, for which a fidelity that is not given is chosen. 1 is the
        discrepancy principle of Morozov, |u - f|^2 = N sigma^2.
    isotropic : bool
        True for one norm a pixel (`Jp`), False for one an edge.
    channel_axis : int, optional
    patch_size, search_radius : int
        Of the patch kernel. The graph has up to (2 r + 1)^n - 1 edges a node along n axes.
    rtol : float
        Relative duality gap at which iterations stop.
    maxiter : int
        Most iterations for each fidelity that is tried.
    preserve_range : bool
        As in `denoise`.
    return_info : bool
        Return ``(result, found, fidelity)`` with the `CertifiedMinimizer`, whose u is in units of the noise, less the
        mean (the input itself where there is no noise to remove).
    memory_limit : float, optional
        Bytes; half of the physical memory by default.

    Returns
    -------
    array
        Shape of the input; float32 for float32 and float16, otherwise float64.

    Raises
    ------
    InputError
        For NaN, infinite and complex values, volumes, and parameters out of range; for wide integers as `denoise`.
    MemoryLimitError
        When the graph does not fit the limit: about 50 bytes an edge in float32, 70 in float64.

    Examples
    --------
    >>> import numpy as np
    >>> from nlflow import nonlocal_tv
    >>> clean = np.where(np.arange(120) < 60, 0.0, 1.0)
    >>> noisy = clean + np.random.default_rng(0).normal(0, 0.1, 120)
    >>> bool(np.std(nonlocal_tv(noisy, sigma=0.1) - clean) < 0.05)
    True
    """
    signal, restore = as_signal(image, channel_axis)
    if signal.ndim > 3:
        raise InputError(f"image: got {signal.ndim - 1} axes of space (shape {np.shape(image)}), expected one or two: "
                         "a signal or an image; denoise a volume slice by slice, or give channel_axis")  # fmt: skip
    check_scale(image, preserve_range)
    sigma = estimate_sigma(image, channel_axis=channel_axis) if sigma is None else sigma
    sigma = check_number("sigma", sigma, minimum=0, hint="the noise in the units of the input")
    wanted = check_number("residual", residual, minimum=0, strict=True, hint="1 is the discrepancy principle")
    if fidelity is not None:
        fidelity = check_number("fidelity", fidelity, minimum=0, strict=True)
    rtol = check_number("rtol", rtol, minimum=0, strict=True)
    maxiter = check_integer("maxiter", maxiter, minimum=1)
    span = range_of(signal)
    if span == 0 or sigma * _NOISELESS < span:
        found = CertifiedMinimizer(signal, 0.0, 0, True, "returned unchanged: there is no noise to remove")
        fidelity = math.inf if fidelity is None else fidelity
        restored = finish(image, restore(signal), preserve_range)
        return (restored, found, fidelity) if return_info else restored
    offset = signal.mean(axis=tuple(range(signal.ndim - 1)), dtype=np.float64)
    f = ((signal - offset) / sigma).astype(signal.dtype)
    with remedied("memory_limit", "use a smaller search_radius or image, or raise memory_limit"):
        graph = _patch_affinity(f, patch_size, search_radius, memory_limit)
        jp = Jp(graph, 1, isotropic=isotropic, memory_limit=memory_limit)
        found, fidelity = _fit(jp, f.reshape(-1, f.shape[-1]), fidelity, wanted, rtol, maxiter, memory_limit)
    u = (found.u.reshape(signal.shape) * np.float64(sigma) + offset).astype(signal.dtype)
    restored = finish(image, restore(u), preserve_range)
    return (restored, found, fidelity) if return_info else restored


def _patch_affinity(f: NDArray[Any], patch_size: int, search_radius: int, memory_limit: float | None) -> Affinity:
    """Return the patch kernel of a signal (..., C) in units of its noise."""
    from scipy.ndimage import gaussian_filter

    smoothed = np.asarray(gaussian_filter(f, (_SMOOTHING,) * (f.ndim - 1) + (0,), mode="reflect"))
    impulse = np.zeros(17)
    impulse[8] = 1
    dimension = sum(n > 1 for n in f.shape[:-1])
    noise = float(np.linalg.norm(gaussian_filter(impulse, _SMOOTHING))) ** dimension
    kernel = Patch(
        _WIDTH, patch_size=patch_size, search_radius=search_radius, sigma=noise, tokens="patch", spatial_width=_SPATIAL
    )
    # Its weights are read once, for the list of edges.
    return affinity(kernel, Grid(f.shape[:-1]), smoothed, store=False, memory_limit=memory_limit)


def _fit(
    jp: Jp, f: NDArray[Any], given: float | None, wanted: float, rtol: float, maxiter: int, memory_limit: float | None
) -> tuple[CertifiedMinimizer, float]:
    """Minimize E_1, with the fidelity that is given or leaves the wanted residual, by a secant on logarithms."""
    if not len(jp.graph):
        return CertifiedMinimizer(f, 0.0, 0, True, NO_EDGES), math.inf if given is None else given
    spread = float(np.sqrt(np.mean(f.astype(np.float64) ** 2)))
    if given is None and spread <= wanted:
        mean = np.zeros_like(f)  # f has the mean 0
        return CertifiedMinimizer(mean, 0.0, 0, True, "all of the signal is within the noise: its mean"), 0.0
    degree = jp.graph.degree
    scale = float(np.median(degree[degree > 0]))
    strength = given or _FIRST * (math.sqrt(scale) if jp.isotropic else scale)
    tried: list[tuple[float, float]] = []
    saddle: primal_dual.Saddle | None = None
    iterations = 0
    while True:
        saddle = primal_dual.minimize(
            jp, f, np.full(len(f), strength), rtol=rtol, maxiter=maxiter, start=None if saddle is None else saddle.u,
            dual=None if saddle is None else saddle.q, memory_limit=memory_limit,
        )  # fmt: skip
        iterations += saddle.iterations
        excess = math.log(max(float(np.sqrt(np.mean((saddle.u - f).astype(np.float64) ** 2))), 1e-12) / wanted)
        tried.append((math.log(strength), excess))
        if given is not None or abs(excess) < _NEAR or len(tried) == _SOLVES:
            break
        strength = math.exp(_next(tried))
    relative = saddle.gap / saddle.value if saddle.value > 0 else 0.0
    success = relative <= rtol and (given is not None or abs(excess) < _NEAR)
    message = (
        f"relative duality gap {relative:.3g} and residual {wanted * math.exp(excess):.4g} sigma after {iterations} "
        f"iterations for {len(tried)} value(s) of the fidelity{'' if success else ': raise maxiter or lower rtol'}"
    )
    return CertifiedMinimizer(saddle.u, relative, iterations, success, message, saddle.value), strength


def _next(tried: list[tuple[float, float]]) -> float:
    """Return the next logarithm of the fidelity; the excess falls as it grows."""
    here, excess = tried[-1]
    slope = _SLOPE
    if len(tried) > 1 and tried[-2][0] != here:
        slope = min((excess - tried[-2][1]) / (here - tried[-2][0]), _SLOPE / 10)
    step = -excess / slope
    proposal = here + math.copysign(min(abs(step), 2.0), step)
    low = max((x for x, e in tried if e > 0), default=-math.inf)
    high = min((x for x, e in tried if e < 0), default=math.inf)
    if not low < proposal < high and math.isfinite(high - low):
        proposal = (low + high) / 2
    return proposal
