"""Diffusion pseudotime, and branches."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nlflow._array import Brief, Floats
from nlflow.markov.spectrum import Modes

_LOOKED = 2000  # states of which the order is looked at
_SHORTEST = 5  # states on one side of a branching point


@dataclass(frozen=True, repr=False)
class Pseudotime(Brief):
    """Distances from a root, and branches.

    Attributes
    ----------
    times : array of shape ``domain.shape``
        From 0 at the root to 1 at the farthest node.
    distances : array of shape ``(3,) + domain.shape``, or (1,) without branches
        Before they are divided by the largest: from the root, and with branches from the two other tips.
    tips : array of int of shape (3,) or (1,)
        Nodes: the root, the one that is farthest from it, and the one that is farthest from both.
    branches : array of int of shape ``domain.shape``, optional
        0, 1 or 2 for nodes on the branch of that tip alone, -1 for others.
    """

    times: Floats
    distances: Floats
    tips: NDArray[np.intp]
    branches: NDArray[np.int64] | None


def pseudotime(modes: Modes, law: Floats, root: int, branching: bool) -> Pseudotime:
    """See `MarkovChain.pseudotime`."""
    # Eigenvectors of the symmetric form, orthonormal, times those of the sum over the lengths of walks.
    place = np.sqrt(law)[:, None] * modes.vectors[:, 1:] * (modes.values[1:] / (1 - modes.values[1:]))

    def distances(node: int) -> Floats:
        return np.asarray(np.linalg.norm(place - place[node], axis=1))

    tips, found = [root], [distances(root)]
    branches = None
    if branching:
        for _ in range(2):
            away = np.sum(found, axis=0)
            away[tips] = -1.0  # between two tips on a line all sums are equal
            tips.append(int(away.argmax()))
            found.append(distances(tips[-1]))
        branches = _branches(found)
    largest = float(found[0].max())
    return Pseudotime(found[0] / (largest or 1.0), np.array(found), np.array(tips), branches)


def _branches(distances: list[Floats]) -> NDArray[np.int64]:
    """Return the branch of each state from its distances to three tips; -1 where it is on none or several."""
    on = np.zeros((3, len(distances[0])), np.bool_)
    for tip in range(3):
        order = np.argsort(distances[tip], kind="stable")
        one, other = (distances[k][order] for k in range(3) if k != tip)
        on[tip, order[: split_point(one, other)]] = True
    return np.where(on.sum(axis=0) == 1, on.argmax(axis=0), -1)


def split_point(a: Floats, b: Floats) -> int:
    """Return at how many states Kendall's correlation of a and b before, less that after, is largest.

    (Haghverdi et al. 2016, supplement.)
    """
    looked = np.unique(np.linspace(0, len(a) - 1, min(len(a), _LOOKED)).astype(np.intp))
    m = len(looked)
    if m < 2 * _SHORTEST:
        return len(a)
    a, b = a[looked], b[looked]
    alike = np.sign(a[:, None] - a).astype(np.int8) * np.sign(b[:, None] - b).astype(np.int8)
    whole = np.tril(alike, -1).sum(axis=1, dtype=np.int64)  # with those before
    before = np.concatenate([[0], np.cumsum(whole)])  # among the first i
    with_later = np.triu(alike, 1).sum(axis=1, dtype=np.int64)
    after = np.concatenate([np.cumsum(with_later[::-1])[::-1], [0]])  # among the others
    i = np.arange(_SHORTEST, m - _SHORTEST + 1)
    score = before[i] / (i * (i - 1)) - after[i] / ((m - i) * (m - i - 1))
    best = int(i[score.argmax()])
    return int(looked[best])
