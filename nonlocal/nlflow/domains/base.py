"""What all domains share: nodes, and the quadrature that turns integrals over them into sums.

A signal on a domain is an array whose leading axes are ``domain.shape``, followed by at most one channel axis. Nodes
are numbered in C order wherever a flat numbering is needed.
"""

from __future__ import annotations

import math
from typing import Any

from nlflow._array import Floats
from nlflow.errors import InputError, check_array


class Domain:
    """What `Grid`, `Points` and `Batch` share: a node shape, nodes and quadrature weights."""

    shape: tuple[int, ...]
    leading: tuple[int, ...] = ()
    """Shape of the batch that the domain is; () for one that is none."""

    @property
    def item(self) -> Domain:
        """The domain of one item of a batch; the domain itself where it is none."""
        return self

    @property
    def item_size(self) -> int:
        """Number of nodes of one item."""
        return self.item.size

    @property
    def item_weights(self) -> Floats:
        """Quadrature weights of one item."""
        return self.item.weights

    @property
    def size(self) -> int:
        """Number of nodes N."""
        return math.prod(self.shape)

    @property
    def nodes(self) -> Floats:
        """Node positions, shape (N, m)."""
        raise NotImplementedError  # pragma: no cover - abstract

    @property
    def weights(self) -> Floats:
        """Quadrature weights w_i > 0, shape ``shape``; their sum is the volume."""
        raise NotImplementedError  # pragma: no cover - abstract

    def check_signal(self, name: str, value: Any) -> Any:
        """Return `value` as a finite floating-point array of shape ``shape`` or ``shape + (D,)``.

        Raises
        ------
        InputError
            For another shape, NaN or infinity.
        """
        array = check_array(name, value, missing="give a fidelity of 0 there" if name == "observed" else "")
        self.check_shape(name, array)
        return array

    def check_shape(self, name: str, array: Any) -> None:
        """Raise `InputError` for an array whose shape is not that of a signal."""
        got, own = tuple(array.shape), self.shape
        if got[: len(own)] != own or len(got) > len(own) + 1:
            raise InputError(
                f"{name}: got shape {got}, expected {own} or {(*own, 'D')}: "
                "the node axes of the domain first, then at most one channel axis"
            )
