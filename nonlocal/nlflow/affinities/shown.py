"""What affinities say."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from nlflow._array import is_numpy
from nlflow.errors import NlflowError
from nlflow.store.notebook import picture

MOST_NODES = 4096
"""Of more nodes nothing is computed for a picture: one move of a law takes 2^24 terms at most."""


def tags(affinity: Any) -> str:
    names = [name for name in ("symmetric", "positive_semidefinite") if getattr(affinity, name)]
    return ", ".join(names) or "not symmetric"


def said(affinity: Any) -> list[tuple[str, Any]]:
    shape = affinity.whole_shape
    return [
        ("kernel", "given as a matrix" if affinity.kernel is None else repr(affinity.kernel)),
        ("nodes", f"{math.prod(shape)} ({' x '.join(map(str, shape))}), {type(affinity.domain).__name__}"),
        ("method", ": ".join(word for word in (affinity.method, affinity.reason) if word)),
        ("averages are off by", affinity.error_estimate or None),
        ("k is", tags(affinity).replace("_", " ")),
    ]


def pictured(affinity: Any, caption: str, values: Callable[[], Any]) -> str:
    # For more than 4096 nodes, for batches and tensors, and where `values` refuses.
    try:
        if affinity.domain.size > MOST_NODES or affinity.domain.leading or not is_numpy(affinity.log_degree):
            return ""
        return picture(caption, values())
    except NlflowError:
        return ""


def row_pictured(affinity: Any) -> str:
    node = tuple(n // 2 for n in affinity.domain.shape)

    def row() -> Any:
        law = np.zeros(affinity.domain.shape)
        law[node] = 1.0
        return np.maximum(affinity.push(affinity.as_signal(law)), 0)  # transforms leave roundings below 0

    return pictured(affinity, f"row of P: weights of node {node[0] if len(node) == 1 else node}", row)


def spectrum_pictured(affinity: Any) -> str:
    def known() -> Any:
        values = affinity.known_spectrum()
        return np.empty(0) if values is None else np.sort(np.asarray(values, np.float64).ravel())[::-1]

    return pictured(affinity, "eigenvalues of P that differ", known)
