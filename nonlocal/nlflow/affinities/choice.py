"""Which structure of K serves a kernel on a domain, and why."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from nlflow._array import Array, is_numpy, is_tensor, namespace, same_kind, underflowing
from nlflow._looks import looking_once
from nlflow.affinities.base import Affinity
from nlflow.affinities.pairs import PAIR_METHODS, Asked, Pairs, at_once, from_pairs, loaded
from nlflow.backends.memory import limit_for
from nlflow.domains import Domain, Grid
from nlflow.domains.base import check_domain
from nlflow.domains.mask import Mask, check_mask, check_present
from nlflow.errors import (
    InputError,
    MemoryLimitError,
    check_array,
    check_choice,
    check_detached,
    check_flag,
    check_integer,
    check_memory,
    check_number,
    checked_call,
    kind_of,
    memory_limit,
)
from nlflow.kernels import Anisotropic, ExpDotProduct, Kernel, Patch, RadialKernel

# A direct sum over a window costs about 0.3 ns a weight, a pair of transforms about 20 ns a node (measured on 2 cores):
# below this many weights the direct sum is faster.
_DIRECT_WEIGHTS = 60


_ON_GRIDS = {
    "dense": "dense.DenseAffinity.from_table",
    "stencil": "stencil.TableStencil",
    "convolution": "convolution.ConvolutionAffinity",
}
METHODS = (*PAIR_METHODS, "stencil", "convolution")
_GRID_METHODS = ("auto", *_ON_GRIDS)


@checked_call
@underflowing
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
    mask: Mask | None = None,
    precision: str | None = None,
    memory_limit: float | None = None,
) -> Affinity:
    """Return the affinity of a kernel on a domain.

    Parameters
    ----------
    kernel : Kernel
    domain : Grid, Points or Batch
    features : array of shape ``domain.shape`` or ``domain.shape + (d,)``, optional
        What the kernel compares: keys for `ExpDotProduct`, the image or signal for `Patch`, feature vectors for radial
        kernels, which compare node positions by default. On a `Batch` the axis of d is needed; axes of the batch
        broadcast.
    queries : array like `features`, optional
        Queries of a dot product; the features themselves by default.
    method : {'auto', 'dense', 'pairwise', 'tiled', 'sparse', 'nufft', 'lowrank', 'stencil', 'convolution'}
        How sums are computed; ``reason`` of the result tells what ``auto`` chose, and why. On grids, for positions and
        patches: ``stencil`` sums over a window, ``convolution`` transforms. Between scattered nodes or features:
        ``dense`` stores the matrix, O(N^2) memory; ``pairwise`` (with `rtol` without far ones) and, for torch tensors,
        ``tiled`` compute its entries anew at each average. Approximate, to `rtol`: ``sparse`` stores the pairs within
        reach of a radial kernel, ``nufft`` is for Gaussians in up to three dimensions (``pip install
        'nlflow[nufft]'``), ``lowrank`` for positive semidefinite kernels.
    window : int, optional
        Truncate a position kernel on a grid to offsets of at most this many nodes along each axis.
    store : bool
        Keep the weights of a patch stencil; False computes them anew at each average.
    rtol : float, optional
        How far averages may be off, over the largest deviation of a signal from the middle of its range. By default
        sums are exact to rounding; methods that approximate take 1e-6.
    mask : Mask, optional
        Which nodes see each other, for features or scattered nodes.
    precision : {'float64', 'float32', 'bfloat16', 'float16'}, optional
        What torch features and signals are rounded to inside averages; that of the features by default.
    memory_limit : float, optional
        Bytes; by default ``NLFLOW_MEMORY_LIMIT``, or what is free on the GPU of the features, or half of the memory.

    Returns
    -------
    Affinity

    Raises
    ------
    InputError
        When kernel, domain and method do not go together, or for unusable features.
    MemoryLimitError
        When what is needed would pass the limit; averages may raise it too.
    NumericalError
        When a method that was asked for does not reach `rtol`.

    Warns
    -----
    NlflowWarning
        When a window is shrunk to the grid, when rounding to half precision may move weights far, and by ``sparse``,
        ``nufft`` and averages of ``pairwise`` when nodes see no other node.

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
        raise InputError(f"kernel: got {kind_of(kernel)}, expected a Kernel such as Gaussian(width=1.0)")
    if isinstance(kernel.compared, RadialKernel):
        kernel.compared.check_profile()
    if not isinstance(domain, Domain):
        raise InputError(f"domain: got {kind_of(domain)}, expected a Grid, Points or Batch")
    check_mask(mask)
    if window is not None:
        window = check_integer("window", window, minimum=1)
    if queries is not None and (features is None or not isinstance(kernel, ExpDotProduct)):
        what = "a radial kernel compares features with themselves; leave queries out"
        raise InputError(f"queries: {what if kernel.positional else 'only a dot product has them'}")
    if not check_flag("store", store) and not isinstance(kernel, Patch):
        raise InputError("store: only patch kernels can compute their weights anew; leave it out")
    if rtol is not None:
        rtol = check_number("rtol", rtol, minimum=0, strict=True, below=1)
    if precision is not None and (features is None or isinstance(kernel, Patch)):
        raise InputError("precision: only affinities of torch features round inside averages; leave it out")
    if mask is not None and mask.present is not None:
        check_present(mask.present, domain.leading, domain.item_size)
    pairs = features is not None or not isinstance(domain.item, Grid)
    if mask is not None and (isinstance(kernel, Patch) or not pairs):
        raise InputError("mask: patches and positions on a Grid have a window instead; leave it out")
    asked = Asked(kernel, domain, features, queries, method, window, store, rtol, mask, precision, memory_limit)
    # Whether features are finite, and how large logits are: what overflows is found out then.
    with looking_once(), np.errstate(over="ignore", invalid="ignore"):
        made = _affordable(asked)
        made.settle()
    return made


@underflowing
def from_matrix(matrix: Any, domain: Domain, memory_limit: float | None = None) -> Affinity:
    """Return the affinity of a given matrix k_ij >= 0, shape (N, N).

    Raises
    ------
    InputError
        For a wrong shape, negative or non-finite entries, or a row of zeros, and for what is no domain.
    """
    check_detached("memory_limit", memory_limit)
    check_domain(domain)
    from nlflow.affinities.dense import DenseAffinity

    result = DenseAffinity.from_matrix(matrix, domain, memory_limit)
    result.reason = "the matrix was given"
    return result


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(map(repr, names[:-1])) + f" or {names[-1]!r}"


def _affordable(asked: Asked) -> Affinity:
    """Return what was asked for, without a matrix where the chosen method would pass the memory limit."""
    try:
        return _built(asked)
    except MemoryLimitError as error:
        if asked.method != "auto" or not _summable(asked):
            raise
        why = f"sums without a matrix, since the memory limit allows no other method ({error})"
        try:
            made = _built(replace(asked, method="pairwise", why=why))
            check_memory("the affinity", made._to_keep, "raise memory_limit", asked.memory_limit)  # made without a look
        except MemoryLimitError as last:
            raise error from last
        return made


def _summable(asked: Asked) -> bool:
    """Whether ``pairwise`` may serve."""
    from nlflow.affinities.pair_sums import not_compiled

    kernel = asked.kernel.compared
    among = not isinstance(asked.domain.item, Grid) if asked.features is None else not is_tensor(asked.features)
    return among and asked.mask is None and not isinstance(kernel, Patch) and not not_compiled(kernel)


def _built(asked: Asked) -> Affinity:
    kernel, domain = asked.kernel, asked.domain
    if isinstance(kernel, Anisotropic) and getattr(domain, "boundary", "") == "reflect" and not kernel.diagonal:
        raise InputError(
            "kernel: its map is not diagonal, expected widths along the axes for the boundary 'reflect', which mirrors "
            "along axes; or use 'periodic' or 'isolated'"
        )
    whole = asked.features is not None and at_once(kernel, asked.features, asked.method)
    if domain.leading and not whole:
        return _batch_of(asked)
    if isinstance(kernel, Patch):
        return _patches(asked)
    if asked.features is not None or not kernel.positional:
        return _features(asked)
    if isinstance(domain, Grid):
        return _on_grid(asked, domain)
    _check_pairs(asked, "on scattered points")
    return from_pairs(Pairs(replace(asked, kernel=kernel.compared), *kernel.map_features(domain.nodes)))


def _check_pairs(asked: Asked, where: str) -> None:
    """Raise `InputError` for options that only sums on grids have."""
    if asked.method not in PAIR_METHODS:
        raise InputError(f"method: got {asked.method!r}, expected {_listed(PAIR_METHODS)} {where}")
    if asked.window is not None:
        raise InputError("window: only position kernels on a Grid can be windowed; leave it out")


def _on_grid(asked: Asked, domain: Grid) -> Affinity:
    from nlflow.affinities.table import CUT, table_radius, warn_shrunk

    kernel, window = asked.kernel, asked.window
    if asked.method not in _GRID_METHODS:
        raise InputError(
            f"method: got {asked.method!r}, expected {_listed(_GRID_METHODS)} for a kernel of positions on a Grid; use "
            "Points(grid.nodes, grid.weights.ravel()) for scattered nodes without a boundary"
        )
    radii = table_radius(kernel, domain, window)
    if window is not None:
        reaches = zip(kernel.supports(CUT, domain.ndim), domain.spacing, strict=True)
        endless = tuple(min(window, math.ceil(min(reach / h, 2**40))) for reach, h in reaches)
        if domain.boundary == "isolated" and any(r < e for r, e in zip(radii, endless, strict=True)):
            warn_shrunk(window, radii, domain)
    weights = math.prod(2 * r + 1 for r in radii)
    fast = "stencil" if weights <= _DIRECT_WEIGHTS else "convolution"
    chosen = fast if asked.method == "auto" else asked.method
    result: Affinity = loaded(_ON_GRIDS[chosen])(kernel, domain, window, memory_limit=asked.limit)
    result.reason = "asked for"
    if asked.method == "auto":
        result.reason = (
            f"translation-invariant on a grid with {weights} weights, {'no ' * (weights <= _DIRECT_WEIGHTS)}more than "
            f"the {_DIRECT_WEIGHTS} up to which a direct sum beats transforms"
        )
    return result


def _patches(asked: Asked, *, warn: bool = True) -> Affinity:
    from nlflow.affinities.table import warn_shrunk

    kernel, domain, method = asked.kernel, asked.domain, asked.method
    if asked.window is not None:
        raise InputError("window: a patch kernel has its own; set its search_radius")
    if not isinstance(domain, Grid):
        raise InputError("domain: a patch kernel needs a Grid, on which patches exist")
    if asked.features is None:
        raise InputError("features: a patch kernel needs the image or signal that patches are taken from")
    if method not in ("auto", "stencil", "dense"):
        raise InputError(f"method: got {method!r}, expected 'auto', 'stencil' or 'dense': patch weights vary in space")
    image = domain.check_signal("features", asked.features)
    if not is_numpy(image):
        raise InputError(f"features: got {kind_of(image)}, expected a NumPy array; convert it (.cpu().numpy())")
    radii = tuple(min(kernel.search_radius, (n - 1) // 2) for n in domain.shape)
    if warn and any(2 * kernel.search_radius + 1 > n > 1 for n in domain.shape):
        warn_shrunk(kernel.search_radius, radii, domain)
    channels = image[..., None] if image.ndim == len(domain.shape) else image
    if domain.ndim > 2 and method != "dense":
        raise InputError(
            f"domain: got a grid of {domain.ndim} axes, expected one or two for a patch kernel; take slice by slice, "
            "or method='dense' for few nodes"
        )
    if method == "dense":
        make = loaded("dense.DenseAffinity.from_patches")
        result: Affinity = make(kernel, domain, channels, radii, asked.limit)
    else:
        result = loaded("stencil.PatchStencil")(
            kernel, domain, channels, radii, store=asked.store, memory_limit=asked.limit
        )
    result.reason = "a patch kernel is windowed on its grid" if method == "auto" else "asked for"
    # The shrunk window has been reported; an evolving kernel would say it again at each step.
    bare = replace(asked, features=None, held=0)  # what a recipe refers to stays in memory
    result._recipe = partial(_patches_again, bare)
    return result


# What recipes call, by name: functions made here could not be pickled.


def _patches_again(bare: Asked, u: Array) -> Affinity:
    return _patches(replace(bare, features=u), warn=False)


def _batch_again(bare: Asked, u: Array) -> Affinity:
    return _batch_of(replace(bare, features=_with_channels(u, bare.domain)))


def _features_again(bare: Asked, u: Array) -> Affinity:
    features = _with_channels(u, bare.domain) if bare.domain.leading else u
    return _features(replace(bare, features=features, sound=is_tensor(u)))


def _item_features(name: str, value: Any, domain: Domain) -> Array:
    """Return features of a batch, (..., *item.shape, d), whose leading axes broadcast to those of the batch."""
    array, item = check_array(name, value), domain.item.shape
    got, nodes = tuple(array.shape), len(domain.item.shape)
    leading = got[: -nodes - 1]
    fits = len(got) > nodes and got[-nodes - 1 : -1] == item and len(leading) <= len(domain.leading)
    pairs = zip(reversed(leading), reversed(domain.leading), strict=False)
    if not fits or any(g not in (1, n) for g, n in pairs):
        raise InputError(
            f"{name}: got shape {got}, expected {(*domain.shape, 'd')}: the axes of the batch, the nodes of an item, "
            "the features; axes of the batch may be 1, or missing from the left"
        )
    return array


def _batch_of(asked: Asked) -> Affinity:
    """Return the affinity of a batch as that of its items; those that would be equal are built once."""
    from nlflow.affinities.batch import BatchAffinity

    domain, mask = asked.domain, asked.mask
    names = [name for name in ("features", "queries") if getattr(asked, name) is not None]
    given = {name: _item_features(name, getattr(asked, name), domain) for name in names}

    def places(index: tuple[int, ...]) -> list[tuple[int, ...]]:
        axes = [array.shape[: array.ndim - len(domain.item.shape) - 1] for array in given.values()]
        own = [zip(index[len(index) - len(lengths) :], lengths, strict=True) for lengths in axes]
        return [tuple(i if n > 1 else 0 for i, n in pairs) for pairs in own]

    single = mask is not None and mask.present is not None
    keys = {index: (*places(index), index if single else ()) for index in np.ndindex(*domain.leading)}
    count = len(set(keys.values()))
    made: dict[tuple[tuple[int, ...], ...], Affinity] = {}
    held, limit = 0, asked.memory_limit
    if limit is not None:
        limit = check_number("memory_limit", limit, minimum=1, finite=False)
    elif limit_for(next(iter(given.values()), None), None) is None:  # a GPU tells what is left of it
        limit = memory_limit()
    for index, key in keys.items():
        if key in made:
            continue
        parts = {name: array[place] for (name, array), place in zip(given.items(), places(index), strict=True)}
        own = None if mask is None else mask.item(index, domain.leading)
        one = replace(asked, domain=domain.item, mask=own, memory_limit=limit, held=held, **parts)
        try:
            made[key] = _built(one)
        except MemoryLimitError as error:
            if error.needed:
                rest = (count - len(made) - 1) * (held / len(made) if made else error.kept)
                what = f"a batch of {count} different items, each {error.what}"
                check_memory(what, held + error.needed + math.ceil(rest), error.remedy, limit)
            raise
        held += made[key]._to_keep
        if limit is not None and held > limit - 1:
            what = f"a batch of {count} different items with method {made[key].method!r}"
            check_memory(what, math.ceil(held / len(made) * count), "use fewer items, or raise memory_limit", limit)
    items = [made[key] for key in keys.values()]
    result = BatchAffinity(domain, items)
    if names == ["features"] and all(item.evolves for item in items):
        bare = replace(asked, features=None)
        result._recipe = partial(_batch_again, bare)
    return result


def _with_channels(u: Array, domain: Domain) -> Array:
    return u if u.ndim > len(domain.shape) else u[..., None]


def _features(asked: Asked) -> Affinity:
    kernel, domain = asked.kernel, asked.domain
    _check_pairs(asked, "for a kernel that compares features")
    if asked.features is None:
        raise InputError(
            f"features: got none for {type(kernel).__name__}, which compares them, expected keys of shape "
            f"{(*domain.shape, 'd')}; domain.nodes compares positions"
        )

    def table(name: str, value: Any) -> Array:
        if asked.sound:
            array, leading = value, tuple(value.shape[: value.ndim - len(domain.item.shape) - 1])
            leading = leading if domain.leading else ()
        elif domain.leading:
            array = _item_features(name, value, domain)
            leading = array.shape[: array.ndim - len(domain.item.shape) - 1]
        else:
            array, leading = domain.check_signal(name, value), ()
        return namespace(array).reshape(array, (*leading, domain.item_size, -1))

    keys = table("features", asked.features)
    for name in ("query_map", "key_map"):
        if getattr(kernel, name, None) is not None:
            same_kind(name, getattr(kernel, name), keys)
    if asked.queries is None:
        result = from_pairs(Pairs(replace(asked, kernel=kernel.compared), *kernel.map_features(keys)))
        bare = replace(asked, features=None, held=0)
        result._recipe = partial(_features_again, bare)
        return result
    given = table("queries", asked.queries)
    same_kind("queries", given, keys)
    q, k = kernel.map_features(keys, given)
    if q.shape[-1] != k.shape[-1]:
        raise InputError(f"queries: got width {q.shape[-1]}, expected {k.shape[-1]}, the width of the keys")
    learnt = any(getattr(array, "requires_grad", False) for array in (q, k))  # each has a derivative of its own
    alike = q.shape == k.shape and not learnt and bool(namespace(q).all(q == k))
    return from_pairs(Pairs(replace(asked, kernel=kernel.compared), k if alike else q, k))
