"""Affinities of batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from nlflow._array import Array, namespace
from nlflow.affinities.base import Affinity
from nlflow.affinities.graph import Sparse
from nlflow.domains import Domain
from nlflow.errors import check_generator


class BatchAffinity(Affinity):
    """The block-diagonal affinity of a batch from affinities of its items, in C order."""

    def __init__(self, domain: Domain, items: list[Affinity]) -> None:
        first = items[0]
        super().__init__(
            domain, first.kernel, symmetric=all(item.symmetric for item in items),
            positive_semidefinite=all(item.positive_semidefinite for item in items), dtype=first.dtype,
        )  # fmt: skip
        self._items = items
        self._log_scale = 0.0  # items have the amplitude of their kernel
        self.method, self.reason, self.device = first.method, first.reason, first.device
        self.error_estimate = max(item.error_estimate for item in items)

    @property
    def tracked(self) -> bool:
        return any(item.tracked for item in self._items)

    def _each(self, u: Array) -> Iterator[tuple[Affinity, Array]]:
        flat = namespace(u).reshape(u, (-1, *u.shape[len(self.domain.leading) :]))
        for number, item in enumerate(self._items):
            yield item, flat[number, ...]

    def _joined(self, parts: list[Array]) -> Array:
        xp = namespace(parts[0])
        return xp.reshape(xp.stack(parts), (*self.domain.leading, *parts[0].shape))

    def _average(self, u: Array) -> Array:
        return self._joined([item._average(part) for item, part in self._each(u)])

    def _push(self, law: Array) -> Array:
        return self._joined([item._push(part) for item, part in self._each(law)])

    def _log_degree(self) -> Array:
        return self._joined([item.log_degree for item in self._items])

    def _log_degree_wide(self) -> Array:
        return self._joined([item._log_degree_wide() + item._log_scale for item in self._items])

    def _edge_bound(self) -> int:
        return sum(item._edge_bound() for item in self._items)

    def _edges(self) -> Sparse:
        from scipy import sparse

        def graph(item: Affinity) -> Any:
            return item._edges() * float(np.exp(item._log_scale))

        return sparse.csr_array(sparse.block_diag([graph(item) for item in self._items], format="csr"))

    def measure_error(self, u: Array | None = None, *, samples: int = 100, rng: Any = 0) -> float:
        # Each item is measured at so many of its own nodes, over the deviation of its own part of the signal. Items
        # where that is constant, and those that are exact to rounding, are left out.
        if all(item._exact is None for item in self._items):
            return super().measure_error(u, samples=samples, rng=rng)  # which says so
        rng = check_generator(rng)
        if u is None:
            u = self.as_signal(rng.standard_normal(self.domain.shape))
        u = self.check_signal("u", u)
        pairs = [(item, part) for item, part in self._each(u) if item._exact is not None]
        # Where all are constant the first of them says so.
        varied = [(item, part) for item, part in pairs if np.ptp(item.flatten(part), axis=0).any()] or pairs[:1]
        return max(item.measure_error(part, samples=samples, rng=rng) for item, part in varied)

    def _symmetrized(self) -> Affinity:
        made = {id(item): item for item in self._items}
        both = {name: item.symmetrized() for name, item in made.items()}
        return BatchAffinity(self.domain, [both[id(item)] for item in self._items])

    def _item(self, index: tuple[int, ...]) -> Affinity:
        one = self._items[int(np.ravel_multi_index(index, self.domain.leading))]
        result = one.scaled(1.0)
        result._log_scale += self._log_scale
        return result
