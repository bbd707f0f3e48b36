"""The choice of an affinity: which structure of K serves a kernel on a domain."""

from __future__ import annotations

import math
from typing import Any

from nlflow._array import Array, is_numpy, namespace, same_kind
from nlflow.affinities.base import Affinity
from nlflow.affinities.choice import METHODS as PAIR_METHODS
from nlflow.affinities.choice import from_pairs
from nlflow.affinities.convolution import ConvolutionAffinity
from nlflow.affinities.dense import DenseAffinity
from nlflow.affinities.stencil import PatchStencil, TableStencil
from nlflow.affinities.table import CUT, table_radius, warn_shrunk
from nlflow.domain import Domain, Grid
from nlflow.errors import InputError, check_array, check_choice, check_integer, check_number
from nlflow.kernel import DotProduct, Kernel, Patch, RadialKernel

__all__ = ["METHODS", "affinity", "from_matrix"]

METHODS = (*PAIR_METHODS, "stencil", "convolution")
_GRID_METHODS = ("auto", "dense", "stencil", "convolution")

# A direct sum over a window costs about 0.3 ns a weight, a pair of transforms about 20 ns a node (measured on 2 cores):
# below this many weights the direct sum is faster.
_DIRECT_WEIGHTS = 60


def affinity(
    kernel: Kernel,
    domain: Domain,
    features: Any = None,
    *,
    queries: Any = None,
    method: str = "auto",
    window: int | None = None,
    store: bool = True,
    rtol: float | None = None,
    precision: str | None = None,
    memory_limit: float | None = None,
) -> Affinity:
    """Return the affinity of a kernel on a domain.

    Parameters
    ----------
    kernel : Kernel
    domain : Grid or Points
    features : array of shape ``domain.shape`` or ``domain.shape + (d,)``, optional
        What the kernel compares: keys for `DotProduct`, the image or signal for `Patch`, feature vectors for radial
        kernels. Radial kernels compare node positions when it is left out.
    queries : array like `features`, optional
        Queries of a dot product; the features themselves by default.
    method : {'auto', 'dense', 'pairwise', 'tiled', 'sparse', 'nufft', 'lowrank', 'stencil', 'convolution'}
        How sums are computed. On grids, for positions and patches: ``stencil`` sums over a window, ``convolution``
        transforms. Between scattered nodes or features, exact: ``dense`` stores the matrix, ``pairwise`` computes its
        entries anew at each average, and so does ``tiled`` for torch tensors, on their device. Approximate, to `rtol`:
        ``sparse`` stores the pairs within reach of a radial kernel, ``nufft`` is for Gaussians in up to three
        dimensions (``pip install 'nlflow[nufft]'``), ``lowrank`` for positive definite kernels in many.

        ``auto`` takes the stencil for patch kernels and small windows, the convolution for other position kernels on
        grids, the dense matrix up to 2048 nodes and exact sums without a matrix beyond, or with `rtol` what is
        estimated to be the fastest. ``reason`` of the result says why.
    window : int, optional
        Truncate a position kernel on a grid to offsets of at most this many nodes along each axis.
    store : bool
        Keep the weights of a patch stencil (half of them, 4 (2 r + 1)^2 / 2 bytes a node in float32); with False they
        are computed anew at each average.
    rtol : float, optional
        How far averages may be off, over the largest deviation of a signal from the middle of its range, for methods
        that approximate; exact to rounding by default, 1e-6 where such a method is asked for by name. What was reached
        is ``error_estimate`` of the result.
    precision : {'float64', 'float32', 'bfloat16', 'float16'}, optional
        What torch features and signals are rounded to inside averages, which are fused attention in half precision;
        that of the features by default. Signals keep their dtype.
    memory_limit : float, optional
        Bytes; half of the physical memory by default.

    Returns
    -------
    Affinity

    Raises
    ------
    InputError
        When the kernel, the domain and the method do not go together, or for unusable features.
    MemoryLimitError
        Before anything is allocated, with the bytes needed and the remedy.
    NumericalError
        When a method that was asked for does not reach `rtol`.

    Warns
    -----
    NlflowWarning
        When a window larger than the grid is shrunk, and when nodes see no other node.

    Examples
    --------
    >>> import numpy as np
    >>> from nlflow import Gaussian, Grid, affinity
    >>> p = affinity(Gaussian(width=0.1), Grid(100, spacing=0.01, boundary="periodic"))
    >>> p.method, float(np.ptp(p.average(np.ones(100))))
    ('convolution', 0.0)
    """
    method = check_choice("method", method, METHODS)
    if not isinstance(kernel, Kernel):
        raise InputError(f"kernel: got {type(kernel).__name__}, expected a Kernel such as Gaussian(width=1.0)")
    if not isinstance(domain, Domain):
        raise InputError(f"domain: got {type(domain).__name__}, expected a Grid or Points")
    if window is not None:
        window = check_integer("window", window, minimum=1)
    if queries is not None and (features is None or not isinstance(kernel, DotProduct)):
        what = "a radial kernel compares features with themselves; leave queries out"
        raise InputError(f"queries: {what if isinstance(kernel, RadialKernel) else 'only a dot product has them'}")
    if not store and not isinstance(kernel, Patch):
        raise InputError("store: only patch kernels can compute their weights anew; leave it out")
    if rtol is not None:
        rtol = check_number("rtol", rtol, minimum=0, strict=True, below=1)
    if precision is not None and (features is None or isinstance(kernel, Patch)):
        raise InputError("precision: only affinities of torch features round inside averages; leave it out")
    if isinstance(kernel, Patch):
        if window is not None:
            raise InputError("window: a patch kernel has its own; set its search_radius")
        return _patch_affinity(kernel, domain, features, method, store, memory_limit)
    if features is None and isinstance(kernel, RadialKernel):
        return _position_affinity(kernel, domain, method, window, rtol, memory_limit)
    if method not in PAIR_METHODS:
        raise InputError(
            f"method: got {method!r}, expected {_listed(PAIR_METHODS)} for a kernel that compares features"
        )
    if window is not None:
        raise InputError("window: only position kernels on a Grid can be windowed; leave it out")
    return _feature_affinity(kernel, domain, features, queries, method, rtol, precision, memory_limit)


def from_matrix(matrix: Any, domain: Domain, memory_limit: float | None = None) -> Affinity:
    """Return the affinity of a given matrix k_ij >= 0, shape (N, N).

    Raises
    ------
    InputError
        For a wrong shape, negative or non-finite entries, or a row of zeros.
    """
    result = DenseAffinity.from_matrix(matrix, domain, memory_limit)
    result.reason = "the matrix was given"
    return result


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(map(repr, names[:-1])) + f" or {names[-1]!r}"


def _position_affinity(
    kernel: RadialKernel,
    domain: Domain,
    method: str,
    window: int | None,
    rtol: float | None,
    memory_limit: float | None,
) -> Affinity:
    if not isinstance(domain, Grid):
        if method not in PAIR_METHODS:
            raise InputError(f"method: got {method!r}, expected {_listed(PAIR_METHODS)} on scattered points")
        if window is not None:
            raise InputError("window: only position kernels on a Grid can be windowed; leave it out")
        nodes = domain.nodes
        return from_pairs(
            kernel, domain, nodes, nodes, positions=True, method=method, rtol=rtol, memory_limit=memory_limit
        )
    if method not in _GRID_METHODS:
        raise InputError(
            f"method: got {method!r}, expected {_listed(_GRID_METHODS)} for a kernel of positions on a Grid; use "
            "Points(grid.nodes, grid.weights.ravel()) for scattered nodes without a boundary"
        )
    if window is not None:
        radii = table_radius(kernel, domain, window)
        endless = tuple(min(window, math.ceil(kernel.support(CUT) / h)) for h in domain.spacing)
        if domain.boundary == "isolated" and any(r < e for r, e in zip(radii, endless, strict=True)):
            warn_shrunk(window, radii, domain)
    weights = math.prod(2 * r + 1 for r in table_radius(kernel, domain, window))
    chosen = method
    if method == "auto":
        chosen = "stencil" if weights <= _DIRECT_WEIGHTS else "convolution"
    result: Affinity
    if chosen == "stencil":
        result = TableStencil(kernel, domain, window, memory_limit)
    elif chosen == "convolution":
        result = ConvolutionAffinity(kernel, domain, window, memory_limit)
    else:
        result = DenseAffinity.from_table(kernel, domain, window, memory_limit=memory_limit)
    compared = "no more" if weights <= _DIRECT_WEIGHTS else "more"
    result.reason = (
        f"translation-invariant on a grid with {weights} weights, {compared} than the {_DIRECT_WEIGHTS} up to which a "
        "direct sum beats transforms"
        if method == "auto"
        else "asked for"
    )
    return result


def _patch_affinity(
    kernel: Patch,
    domain: Domain,
    features: Any,
    method: str,
    store: bool,
    memory_limit: float | None,
    *,
    warn: bool = True,
) -> Affinity:
    if not isinstance(domain, Grid):
        raise InputError("domain: a patch kernel needs a Grid, on which patches exist")
    if features is None:
        raise InputError("features: a patch kernel needs the image or signal that patches are taken from")
    if method not in ("auto", "stencil", "dense"):
        raise InputError(f"method: got {method!r}, expected 'auto', 'stencil' or 'dense': patch weights vary in space")
    image = domain.check_signal("features", features)
    if not is_numpy(image):
        raise InputError(f"features: got {type(image).__name__}, expected a NumPy array; convert it (.cpu().numpy())")
    radii = tuple(min(kernel.search_radius, (n - 1) // 2) for n in domain.shape)
    if warn and any(2 * kernel.search_radius + 1 > n > 1 for n in domain.shape):
        warn_shrunk(kernel.search_radius, radii, domain)
    channels = image[..., None] if image.ndim == len(domain.shape) else image
    if method == "dense":
        result: Affinity = DenseAffinity.from_patches(kernel, domain, channels, radii, memory_limit)
    else:
        result = PatchStencil(kernel, domain, channels, radii, store=store, memory_limit=memory_limit)
    result.reason = "a patch kernel is windowed on its grid" if method == "auto" else "asked for"
    # The shrunk window has been reported; an evolving kernel would say it again at each step.
    result._recipe = lambda u: _patch_affinity(kernel, domain, u, method, store, memory_limit, warn=False)
    return result


def _feature_affinity(
    kernel: Kernel,
    domain: Domain,
    features: Any,
    queries: Any,
    method: str,
    rtol: float | None,
    precision: str | None,
    memory_limit: float | None,
) -> Affinity:
    if features is None:
        raise InputError(f"features: {type(kernel).__name__} needs features (keys), shape {(*domain.shape, 'd')}")

    def table(name: str, value: Any) -> Array:
        array = domain.check_signal(name, value)
        return namespace(array).reshape(array, (domain.size, -1))

    keys = table("features", features)
    if isinstance(kernel, DotProduct):
        for name in ("query_map", "key_map"):
            if getattr(kernel, name) is not None:
                same_kind(name, getattr(kernel, name), keys)
    if queries is None:
        q, k = kernel.map_features(keys)
    else:
        given = check_array("queries", queries)
        same_kind("queries", given, keys)
        given = table("queries", given)
        q, k = kernel.map_features(keys, given)
        if q.shape == k.shape and bool(namespace(q).all(q == k)):
            q = k
    result = from_pairs(
        kernel, domain, q, k, positions=False, method=method, rtol=rtol, memory_limit=memory_limit, precision=precision
    )
    if queries is None:
        result._recipe = lambda u: _feature_affinity(kernel, domain, u, None, method, rtol, precision, memory_limit)
    return result
