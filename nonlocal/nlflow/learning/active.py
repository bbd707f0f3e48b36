"""Which node to ask next."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nlflow._array import Floats, to_numpy
from nlflow.affinities import Affinity
from nlflow.errors import InputError, check_choice, check_generator, check_integer, checked_call, shortened
from nlflow.functionals.constraint import Constraint
from nlflow.functionals.energies import J
from nlflow.learning.inputs import check_signals
from nlflow.markov import MarkovChain
from nlflow.markov.passages import node_numbers

_DENSE_NODES = 1000  # up to here all nodes are candidates


class Question(NamedTuple):
    """Nodes to ask, the best first, and how much each promised when it was chosen."""

    nodes: NDArray[np.intp]
    scores: Floats


@checked_call
def ask_next(
    model: Any, labelled: Any, count: int = 1, *, by: str = "variance", candidates: int = 64, rng: Any = 0
) -> Question:
    """Return the nodes whose labels are to be asked for next, each as if the labels of those before were known.

    Parameters
    ----------
    model : fitted estimator of this package, or Affinity
        Symmetric.
    labelled : array of int, or array of bool of shape (N,)
        Nodes whose labels are known, at least one in each component.
    count : int
    by : {'variance', 'hitting time'}
        ``variance``: the largest variance of the Gaussian field exp(-J / 2) with the known labels held, (D - W)^-1_ii
        between free nodes (Zhu, Lafferty and Ghahramani 2003). ``hitting time``: the longest mean time of a walk from
        the node to a label.
    candidates : int
        How many nodes, drawn at random, are looked at for the variance beyond 1000 nodes.
    rng : seed or numpy.random.Generator

    Returns
    -------
    Question

    Raises
    ------
    InputError
        For nodes that do not exist, more than are free, and components without a label.

    Examples
    --------
    >>> import numpy as np
    >>> from nlflow import affinity_from_graph
    >>> from nlflow.learning import ask_next
    >>> path = affinity_from_graph(np.diag(np.ones(8), 1) + np.diag(np.ones(8), -1))
    >>> ask_next(path, [0, 8]).nodes.tolist(), ask_next(path, [0], by="hitting time").nodes.tolist()
    ([4], [8])
    """
    affinity = model if isinstance(model, Affinity) else getattr(model, "affinity_", None)
    if not isinstance(affinity, Affinity):
        raise InputError(
            f"model: got {shortened(repr(model), 60)}, expected a fitted estimator of this package, or an Affinity"
        )
    if not affinity.symmetric:
        raise InputError("model: got an affinity that is not symmetric, expected a symmetric one; use symmetrized()")
    check_choice("by", by, ("variance", "hitting time"))
    size = affinity.domain.size
    known = np.zeros(size, np.bool_)
    known[node_numbers("labelled", labelled, (size,))] = True
    count = check_integer("count", count, minimum=1)
    if count > int((~known).sum()):
        raise InputError(f"count: got {count}, expected at most {int((~known).sum())}, the nodes without a label")
    try:
        Constraint(np.flatnonzero(known), 0.0).on(affinity).check_reached(affinity)
    except InputError as error:
        raise InputError(
            "labelled: some component of the graph has no label, expected one in each; ask for one there first"
        ) from error
    generator, nodes, scores = check_generator(rng), [], []
    few = check_integer("candidates", candidates, minimum=1) if by == "variance" and size > _DENSE_NODES else size
    if by == "variance":
        check_signals(size, few, None)
    for _ in range(count):
        free = np.flatnonzero(~known)
        if few < len(free):
            free = np.sort(generator.choice(free, few, replace=False))
        if by == "variance":
            found = _variances(affinity, known, free)
        else:
            found = MarkovChain(affinity).hitting_times(known.reshape(affinity.domain.shape)).ravel()[free]
        best = int(np.argmax(found))
        nodes.append(int(free[best]))
        scores.append(float(found[best]))
        known[free[best]] = True
    return Question(np.array(nodes, np.intp), np.array(scores))


def _variances(affinity: Affinity, known: NDArray[np.bool_], nodes: NDArray[np.intp]) -> Floats:
    """Return (L^-1)_ii between free nodes, L = D - W, as potentials of a unit source at each node."""
    functional = J(affinity.scaled(0.5))
    weights = np.asarray(affinity.domain.weights, np.float64).ravel()
    source = np.zeros((affinity.domain.size, len(nodes)))
    source[nodes, np.arange(len(nodes))] = 1 / weights[nodes]
    signal = affinity.as_signal(source.reshape(*affinity.domain.shape, -1))
    held = Constraint(np.flatnonzero(known), 0.0)
    u = np.asarray(to_numpy(functional.potential(signal, constraint=held, rtol=1e-6).u), np.float64)
    return np.asarray(u.reshape(source.shape)[nodes, np.arange(len(nodes))])
