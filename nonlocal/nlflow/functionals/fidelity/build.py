"""The choice of a fidelity operator: what users give, checked against the signal."""

from __future__ import annotations

from typing import Any

import numpy as np

from nlflow._array import Array, namespace, same_kind, scalar
from nlflow.affinities import Affinity
from nlflow.errors import InputError, check_array, check_number
from nlflow.functionals.fidelity.base import Fidelity, NodeFidelity
from nlflow.functionals.fidelity.matrix import MatrixFidelity

_HINT = "0 switches the term off; to hold values exactly, give a constraint=Constraint(nodes, values)"


def as_fidelity(given: Any, observed: Array, affinity: Affinity) -> Fidelity:
    """Return a fidelity operator for an observed signal, or raise `InputError`.

    Parameters
    ----------
    given : float, array of shape ``domain.shape`` or ``domain.shape + (D, D)``, or Fidelity
        Matrices may have node axes of length 1, which nodes share. A `Fidelity` is taken as it is.
    observed : array of shape ``domain.shape`` or ``domain.shape + (D,)``
    affinity : Affinity
    """
    shape = affinity.domain.shape
    if isinstance(given, MatrixFidelity):
        _check_matrices((*given.nodes, given.width, given.width), observed, shape)
        same_kind("fidelity", given._matrices, observed)
        return given
    if isinstance(given, NodeFidelity):
        given = given.values
    elif isinstance(given, Fidelity):  # of somebody's own
        channels = 1 if observed.ndim == len(shape) else int(observed.shape[-1])
        if channels % given.width:
            raise InputError(
                f"fidelity: got one of {given.width} channels, expected one for the {channels} of the signal"
            )
        return given
    if isinstance(given, list | tuple):
        given = np.asarray(check_array("fidelity", given))
    if getattr(given, "requires_grad", False) and tuple(given.shape) == ():
        given = given.expand(shape)  # a number that is learnt
    if not hasattr(given, "shape") or tuple(given.shape) == ():
        return NodeFidelity(check_number("fidelity", given, minimum=0, hint=_HINT))
    values = check_array("fidelity", given, hint=_HINT)
    matrices = values.ndim == len(shape) + 2
    if not matrices and tuple(values.shape) != shape:
        raise InputError(
            f"fidelity: got shape {tuple(values.shape)}, expected a number or {shape}, one for each node, or "
            f"{(*shape, 'D', 'D')}, one matrix for each node"
        )
    if type(values) is not type(observed):
        same_kind("fidelity", values, observed)
    xp = namespace(values)
    if matrices:
        _check_matrices(tuple(values.shape), observed, shape)
        return MatrixFidelity(values, dtype=observed.dtype)
    lowest = scalar(xp.min(values))
    if lowest < 0:
        raise InputError(f"fidelity: got {lowest:g} at some node, expected values >= 0 (0 where data is missing)")
    return NodeFidelity(xp.astype(values, observed.dtype, copy=True))


def _check_matrices(got: tuple[int, ...], observed: Array, nodes: tuple[int, ...]) -> None:
    """Raise `InputError` unless matrices of a shape go with the nodes and with the channels of a signal."""
    channels = int(observed.shape[-1]) if observed.ndim > len(nodes) else None
    if channels is None:
        raise InputError(
            f"fidelity: got matrices (shape {got}) for a signal without channels (shape {tuple(observed.shape)}), "
            "expected a number for each node; or give the signal a channel axis, the last"
        )
    fits = len(got) == len(nodes) + 2 and all(n in (1, own) for n, own in zip(got, nodes, strict=False))
    if not fits or got[-2:] != (channels, channels):
        raise InputError(
            f"fidelity: got shape {got}, expected {(*nodes, channels, channels)}, one matrix for each node (node axes "
            "may have length 1, which nodes share)"
        )
