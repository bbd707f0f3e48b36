"""Values that a signal has at some nodes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nlflow._array import (
    Array,
    constant_like,
    is_numpy,
    kept_like,
    namespace,
    on_host,
    to_numpy,
    underflowing,
)
from nlflow.affinities import Affinity
from nlflow.errors import InputError, NumericalError, check_array, check_detached, check_integer, is_function, kind_of

_LISTED = ("stencil", "sparse")  # methods whose edges are few and listed at once


class TermError(NumericalError):
    """A term has no value at some time, which no shorter step changes."""


class TermInputError(InputError):
    """A term is of another kind at some time, which no shorter step changes."""


@contextmanager
def term_at_a_time() -> Iterator[None]:
    try:
        yield
    except InputError as error:
        raise TermInputError(*error.args) from error


def count_arguments(
    name: str, function: Callable[..., Any], expected: str = "one of t, or of t and the nodes", most: int = 2
) -> int:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # compiled ones do not always say
        return 1
    places = [one for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    needed = [one for one in places if one.default is one.empty]
    if not places or len(needed) > most:
        raise InputError(f"{name}: got a callable of {len(needed)} arguments, expected {expected}")
    return max(len(needed), 1)


@underflowing
class Constraint:
    """Values that a signal has at some nodes at all times; the other nodes are free.

    A volume constraint of nonlocal calculus (Du, Gunzburger, Lehoucq and Zhou 2012, doi 10.1137/110833294).

    Parameters
    ----------
    nodes : array of bool of shape ``domain.shape``, or array of int
        A mask, or the numbers of M nodes in the order of ``domain.nodes``.
    values : float, array or callable
        One number; an array of shape (M,) or (M, D), in the order of `nodes` (that of the domain for a mask); or one
        shaped like the signal, of which the constrained nodes count. A callable of t, or of t and the constrained
        nodes x of shape (M, m), returns one of these.

    Raises
    ------
    InputError
        For nodes that do not exist or are named twice, for no nodes and for all of them, and for values of another
        shape.
    NumericalError
        For values of a callable that are NaN or infinite.

    Notes
    -----
    Where values depend on time, steps that are long beside 1 / rho, rho being the bound of A, have a lower order
    (Hochbruck and Ostermann 2005, doi 10.1137/040611434).

    Examples
    --------
    >>> import numpy as np
    >>> from nlflow import Constraint, Grid, J, TopHat, affinity
    >>> path = affinity(TopHat(radius=1.0), Grid(5, boundary="isolated"))
    >>> ends = Constraint([0, 4], [0.0, 1.0])
    >>> [round(float(value), 6) for value in J(path).minimizer(constraint=ends).u]  # harmonic: a straight line
    [0.0, 0.25, 0.5, 0.75, 1.0]
    """

    def __init__(self, nodes: Any, values: Any) -> None:
        given = on_host(nodes, "nodes")
        if given.dtype != bool and (given.ndim != 1 or (given.size and given.dtype.kind not in "iu")):
            raise InputError(
                f"nodes: got an array of {given.dtype} of shape {given.shape}, expected a mask (bool) of the shape of "
                "the domain, or one-dimensional numbers of nodes (int)"
            )
        if given.size == 0 or (given.dtype == bool and not given.any()):
            raise InputError("nodes: got none, expected at least one; leave the constraint out")
        self.nodes: NDArray[Any] = given.copy()
        self.timed = is_function(values)
        self.values = values if self.timed else _checked(values)

    def on(self, affinity: Affinity, name: str = "constraint") -> Held:
        """Return the constraint on the domain of an affinity."""
        return Held(self, affinity, name)

    def __repr__(self) -> str:
        count = int(self.nodes.sum()) if self.nodes.dtype == bool else len(self.nodes)
        return f"Constraint({count} nodes{', timed' if self.timed else ''})"


def as_constraint(affinity: Affinity, given: Any) -> Held | None:
    if given is None or isinstance(given, Held):
        return given
    if not isinstance(given, Constraint):
        raise InputError(f"constraint: got {kind_of(given)}, expected Constraint(nodes, values)")
    return given.on(affinity)


def _checked(values: Any) -> Array:
    check_detached("values", values)
    found = check_array("values", values, hint="or a callable of t")
    return namespace(found).asarray(found, copy=True)  # the constraint stays what it is


class Held:
    """A constraint on a domain."""

    def __init__(self, given: Constraint, affinity: Affinity, name: str) -> None:
        if affinity.whole_shape != affinity.domain.shape:
            raise InputError(f"{name}: got nodes that processes share out, expected those of one process")
        self._given, self._name, self.timed = given, name, given.timed
        shape, size = affinity.domain.shape, affinity.domain.size
        self.mask, self._order = _places(given.nodes, shape, size)
        if self.mask.all():
            raise InputError(f"nodes: got all {size} of the domain, expected at least one that is free")
        self._rows = None
        if self.timed and count_arguments("values", given.values) == 2:
            self._rows = affinity.domain.nodes[self._order]
        self._kept: tuple[Any, Array] | None = None

    def __len__(self) -> int:
        return len(self._order)

    def zeros(self, affinity: Affinity) -> Array:
        if self.timed:
            raise InputError("constraint: got values that depend on time, expected those of one moment for a minimizer")
        values, shape = self._given.values, self.mask.shape
        channels = () if values.ndim == 0 or values.shape in (shape, (len(self),)) else tuple(values.shape)[-1:]
        dtype = np.float32 if str(values.dtype).endswith("float32") else np.float64
        signal = affinity.as_signal(np.zeros(shape + channels))
        return signal.astype(dtype) if is_numpy(signal) and affinity.dtype is None else signal

    def at(self, t: float, like: Array) -> Array:
        key = (t if self.timed else 0.0, tuple(like.shape), str(like.dtype), str(getattr(like, "device", "")))
        if self._kept is None or self._kept[0] != key:
            self._kept = (key, self._formed(t, like))
        return self._kept[1]

    def held(self, u: Array, t: float) -> Array:
        values, mask = self.at(t, u), self._mask(u)
        result = namespace(u).where(mask, values, u)
        return u if is_numpy(u) and np.array_equal(result, u) else result

    def values_of(self, u: Array) -> Array:
        return namespace(u).where(self._mask(u), u, 0 * u)

    def free(self, v: Array) -> Array:
        return namespace(v).where(self._mask(v), v.dtype.type(0) if is_numpy(v) else 0 * v, v)

    def given(self) -> list[Any]:
        own = [self.mask.astype(np.float64)]
        return own if self.timed else [*own, np.asarray(to_numpy(self._given.values), dtype=np.float64)]

    def check_reached(self, affinity: Affinity, also: NDArray[np.bool_] | None = None) -> None:
        reached = self.mask if also is None else self.mask | also
        if not reached.all():
            reached = _listed(affinity, reached) if affinity.method in _LISTED else _spread(affinity, reached)
        if not reached.all():
            first = int(np.argmin(reached.ravel()))
            raise InputError(
                f"constraint: {int((~reached).sum())} nodes (the first is node {first}) see no constrained one, so the "
                "minimizer is not unique; constrain a node of each part of the domain, or give it a fidelity > 0"
            )

    def seen(self, affinity: Affinity) -> Array:
        """Return how much of each node's weight is at constrained ones, or a little less; rounding is no weight."""
        share = affinity._average(affinity.as_signal(self.mask.astype(np.float64)))
        xp = namespace(share)
        rounding = 4 * float(xp.finfo(share.dtype).eps)
        return xp.where(share > rounding, share * (1 - rounding), 0 * share)

    def _mask(self, like: Array) -> Array:
        mask = kept_like(self.mask, like, namespace(like).bool)
        return mask if mask.ndim == like.ndim else mask[..., None]

    @term_at_a_time()
    def _formed(self, t: float, like: Array) -> Array:
        values: Any = self._given.values
        where = f" at t={t:.6g}" if self.timed else ""
        if self.timed:
            values = values(float(t)) if self._rows is None else values(float(t), self._rows.copy())
            check_detached("values", values)
        found = on_host(values, "values")
        rows = (len(self._order), *like.shape[self.mask.ndim :])
        if found.dtype.kind not in "biuf" or found.shape not in ((), rows, tuple(like.shape)):
            got = f"shape {found.shape}" if found.dtype.kind in "biuf" else type(values).__name__
            raise InputError(
                f"values: got {got}{where}, expected a number, {rows}, those of the constrained nodes, or "
                f"{tuple(like.shape)}, that of the signal"
            )
        if not np.isfinite(found).all():
            raise TermError(f"values: NaN or infinite{where}; expected finite values at all times")
        flat = np.zeros((self.mask.size, *rows[1:]))
        flat[self._order] = found.reshape(flat.shape)[self._order] if found.shape == tuple(like.shape) else found
        with np.errstate(over="ignore"):
            result = constant_like(flat.reshape(tuple(like.shape)), like)
        if not bool(namespace(result).all(namespace(result).isfinite(result))):
            raise TermError(f"values: too large for {like.dtype}{where}; scale them down, or use float64")
        return result

    def __repr__(self) -> str:
        return f"{self._given!r} of {self.mask.size}"


def _places(nodes: NDArray[Any], shape: tuple[int, ...], size: int) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
    if nodes.dtype == bool:
        if nodes.shape != shape:
            raise InputError(f"nodes: got a mask of shape {nodes.shape}, expected {shape}, that of the domain")
        return nodes, np.flatnonzero(nodes)
    numbers = nodes.astype(np.int64)
    check_integer("nodes", int(numbers.min()), minimum=0)
    if numbers.max() >= size:
        raise InputError(f"nodes: got node {int(numbers.max())}, expected numbers below {size}, the size of the domain")
    mask = np.zeros(size, dtype=bool)
    mask[numbers] = True
    if mask.sum() < len(numbers):
        raise InputError("nodes: got a node twice, expected each once, with one value")
    return mask.reshape(shape), numbers


def components_of(affinity: Affinity) -> NDArray[Any] | None:
    from scipy.sparse.csgraph import connected_components

    if affinity.domain.leading:
        return _of_items(affinity)
    if affinity.method == "block":
        return np.asarray(np.indices(affinity.domain.shape)[0])
    if affinity.method == "convolution":
        return _of_convolution(affinity)
    labels, matrix = getattr(affinity, "components", None), getattr(affinity, "matrix", None)  # a graph keeps them
    if labels is None and affinity.method in _LISTED:
        edges: Any = affinity._edges().copy()
        edges.eliminate_zeros()
        labels = connected_components(edges, directed=True, connection="weak")[1]
    elif labels is None and matrix is not None:
        labels = _labelled(to_numpy(matrix))
    return None if labels is None else np.asarray(labels).reshape(affinity.domain.shape)


def _of_items(affinity: Affinity) -> NDArray[Any]:
    """Return the components of the items of a batch, one for each item where they are not known."""
    labels: list[NDArray[Any]] = []
    count = 0
    for index in np.ndindex(*affinity.domain.leading):
        own = components_of(affinity.item(*index))
        labels.append(count + (np.zeros(affinity.domain.item.shape, int) if own is None else own))
        count = int(labels[-1].max()) + 1
    return np.reshape(labels, affinity.domain.shape)


def _of_convolution(affinity: Affinity) -> NDArray[np.intp]:
    """Return the components of a translation-invariant affinity: one where a node sees those beside it."""
    shape = affinity.domain.shape
    middle = np.array([n // 2 for n in shape])
    labels, start = np.full(shape, -1), np.zeros(shape, bool)
    start[tuple(middle)] = True
    near = _seeing(affinity, start)
    beside = [tuple(middle - step) for step in np.eye(len(shape), dtype=int)[np.array(shape) > 1]]
    if all(near[node] for node in beside):
        return np.zeros(shape, int)
    number = 0
    while (labels < 0).any():
        first = np.zeros(shape, bool)
        first[np.unravel_index(int(np.argmax(labels < 0)), shape)] = True
        labels[_spread(affinity, first)] = number
        number += 1
    return labels


def _labelled(matrix: NDArray[Any]) -> NDArray[np.intp]:
    """Return the components of a matrix by rows, without a list of its entries, of which there may be too many."""
    labels, number = np.full(len(matrix), -1), 0
    while len(front := np.flatnonzero(labels < 0)[:1]):
        while len(front):
            labels[front] = number
            near = labels >= 0
            for node in front:
                near |= (matrix[node] > 0) | (matrix[:, node] > 0)
                if near.all():
                    break
            front = np.flatnonzero(near & (labels < 0))
        number += 1
    return labels


def _listed(affinity: Affinity, reached: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return which nodes share a connected part of the graph with a node that is reached."""
    labels: Any = components_of(affinity)
    alive = np.zeros(int(labels.max()) + 1, dtype=bool)
    alive[labels[reached]] = True
    return np.asarray(alive[labels])


def _spread(affinity: Affinity, reached: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return from which nodes walks of averages come to one that is reached."""
    while True:
        more = _seeing(affinity, reached)
        if (more == reached).all():
            return reached
        reached = more


def _seeing(affinity: Affinity, reached: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return the nodes that are reached, and those that see one; rounding is no weight."""
    terms = reached.size if affinity.terms is None else affinity.terms
    seen = to_numpy(affinity._average(affinity.as_signal(reached.astype(np.float64))))
    return np.asarray(reached | (seen > 4 * terms * float(np.finfo(seen.dtype).eps)))
