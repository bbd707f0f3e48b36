"""The base of domains."""

from __future__ import annotations

import math
import sys
from typing import Any

from nlflow._array import Floats
from nlflow.errors import InputError, check_array, kind_of


class Domain:
    """Base of `Grid`, `Points` and `Batch`.

    A signal has the axes ``shape`` first, then at most one channel axis. Nodes are numbered in C order.
    """

    shape: tuple[int, ...]
    leading: tuple[int, ...] = ()
    """Shape of the batch; () without one."""

    @property
    def item(self) -> Domain:
        """The domain of one item of a batch, else the domain itself."""
        return self

    @property
    def item_size(self) -> int:
        """Number of nodes of one item."""
        return self.item.size

    @property
    def item_weights(self) -> Floats:
        """Weights of the nodes of one item."""
        return self.item.weights

    @property
    def size(self) -> int:
        """Number of nodes."""
        return math.prod(self.shape)

    @property
    def nodes(self) -> Floats:
        """Positions of the nodes, shape (N, m)."""
        raise NotImplementedError  # pragma: no cover - abstract

    @property
    def weights(self) -> Floats:
        """Quadrature weights w_i > 0, shape ``shape``."""
        raise NotImplementedError  # pragma: no cover - abstract

    def check_signal(self, name: str, value: Any) -> Any:
        """Return finite floats of shape ``shape`` or ``shape + (D,)``, or raise `InputError`."""
        array = check_array(name, value, missing="give a fidelity of 0 there" if name == "observed" else "")
        self.check_shape(name, array)
        return array

    def check_shape(self, name: str, array: Any) -> None:
        """Raise `InputError` unless the shape is ``shape`` or ``shape + (D,)``."""
        got, own = tuple(array.shape), self.shape
        if got[: len(own)] != own or len(got) > len(own) + 1:
            raise InputError(
                f"{name}: got shape {got}, expected {own} or {(*own, 'D')}: "
                "the node axes of the domain first, then at most one channel axis"
            )


def check_count(name: str, shape: tuple[int, ...]) -> None:
    """Raise `InputError` for more nodes than an array has."""
    if math.prod(shape) > sys.maxsize // 8:
        raise InputError(f"{name}: got {shape}, expected fewer nodes: no array has as many")


def check_domain(value: Any, name: str = "domain") -> Domain:
    if not isinstance(value, Domain):
        raise InputError(f"{name}: got {kind_of(value)}, expected a Grid or Points")
    return value
