"""Label spreading."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nlflow._array import Array, constant_like, is_numpy, namespace, to_numpy
from nlflow.affinities import DenseAffinity
from nlflow.errors import NumericalError, check_number
from nlflow.functionals.energies import E
from nlflow.functionals.krylov import default_rtol, verdict
from nlflow.functionals.minimizer import Minimizer
from nlflow.learning.base import ProbabilisticClassifier
from nlflow.learning.graphs import DENSE_NODES

_STEPS = 200  # of the flow after conjugate gradients, where these may be many
_QUICK = 0.3  # alpha up to which steps alone are taken between all pairs
_SLOW = 0.8  # alpha from which on the direct method is faster than these
_ROUGH = 1e-2  # change of a node's values up to which the first choice of edges serves
_CHOICES = 4  # of edges after the first
_ROWS = 64  # of a matrix, which stay in the cache
_FEW = 1 / 8  # of the pairs: up to so many are worth a graph of their own


class LabelSpreading(ProbabilisticClassifier):
    """Label spreading: F = (1 - alpha) (I - alpha S)^-1 Y with S = D^-1/2 W D^-1/2, rows over their sums.

    (Zhou, Bousquet, Lal, Weston and Schoelkopf 2004, learning with local and global consistency.) F = D^1/2 u, where u
    minimizes E for the fidelity lambda~ = (1 - alpha) / alpha in the degree measure and f = D^-1/2 Y.

    Parameters
    ----------
    affinity : {'knn', 'rbf', 'precomputed'}, RadialKernel, callable or Affinity
        W. 'knn': the nearest neighbours with local widths, exp(-|x - y|^2 / (s_x s_y)), s being the distance to the
        farthest of them (Zelnik-Manor and Perona 2004). 'rbf' or a kernel: exp(-gamma |x - y|^2), or that kernel,
        between all pairs. 'precomputed': weights (N, N) given as X. A function of two sets of points (N, d) and (M, d)
        returns weights (N, M), of which the mean of both directions is taken. Their diagonal has no part. An Affinity
        of the samples has W_ij = w_i w_j k_ij, without its diagonal if it keeps a matrix; X tells their number.
    gamma : float or None
        Of 'rbf'; None takes the width of the steepest slope of `choose_width`.
    n_neighbors : int or None
        Of 'knn', at most N - 1; None takes 10, or N - 1 where that is less.
    metric : {'euclidean', 'cosine', 'correlation', 'jaccard', 'precomputed'}
        Of 'knn'; see `neighbour_graph`. 'precomputed' takes distances (N, N) as X, and rows of them to predict at.
    search : {'auto', 'tree', 'brute', 'descent'}
        Of 'knn'; see `neighbour_graph`.
    keep : {'either', 'both'}
        Of 'knn'; see `neighbour_graph`.
    alpha : float
        In (0, 1).
    class_prior : None, 'labels' or array of shape (C,)
        Shares of the classes among the unlabelled samples; 'labels' takes those among the labels.
    balance : {'count', 'mass'}
        What has the shares: the numbers of samples, or the sums of the scores (class mass normalization, Zhu,
        Ghahramani and Lafferty 2003).
    accuracy : float or None
        How far averages over all pairs may be off beyond 4096 points; None for exact sums.
    tol : float or None
        Relative residual; 1e-10 in float64 and 1e-5 in float32 by default.
    max_iter : int
    missing : -1, None, NaN or NA
        What marks samples without a label, and those that get none; any of the last three stands for all of them.
    verbose : bool
        Say on stderr what was done.
    memory_limit : float, optional
        Bytes.

    Attributes
    ----------
    classes_ : array of shape (C,)
    label_distributions_ : array of shape (N, C)
        Probabilities; NaN in components without a label.
    transduction_ : array of shape (N,)
        Class of each sample; `missing` in components without a label.
    class_factors_, class_shifts_ : array of shape (C,)
        What scores are multiplied by, and what is added, for ``class_prior``.
    class_shares_ : array of shape (C,)
        With ``class_prior``: shares of the classes among the unlabelled samples that labels reach.
    labelled_ : array of bool of shape (N,)
    functional_ : E
    n_iter_, residual_, message_
        Of the solution; see `nlflow.functionals.minimizer.Minimizer`.
    affinity_, method_, reason_, error_estimate_
        Of the sums.
    reached_ : array of bool of shape (N,)
        Which samples share a component with a label.

    Examples
    --------
    >>> import numpy as np
    >>> from nlflow.learning import LabelSpreading
    >>> X = np.array([[0.0], [0.1], [0.2], [1.0], [1.1]])
    >>> LabelSpreading().fit(X, ["left", -1, -1, "right", -1]).transduction_.tolist()
    ['left', 'left', 'left', 'right', 'right']
    """

    def __init__(
        self, affinity: Any = "knn", *, gamma: float | None = None, n_neighbors: int | None = None,
        metric: str = "euclidean", search: str = "auto", keep: str = "either", alpha: float = 0.2,
        class_prior: Any = None, balance: str = "count", accuracy: float | None = 1e-6, tol: float | None = None,
        max_iter: int = 10_000, missing: Any = -1, verbose: bool | int = False,
        memory_limit: float | None = None,
    ) -> None:  # fmt: skip
        self.affinity = affinity
        self.gamma = gamma
        self.n_neighbors = n_neighbors
        self.metric = metric
        self.search = search
        self.keep = keep
        self.alpha = alpha
        self.class_prior = class_prior
        self.balance = balance
        self.accuracy = accuracy
        self.tol = tol
        self.max_iter = max_iter
        self.missing = missing
        self.verbose = verbose
        self.memory_limit = memory_limit

    @property
    def _weakest(self) -> float:
        return 0.0  # each probability keeps its digits

    @property
    def _better(self) -> str:
        return "a smaller alpha"

    def _learn(self, one_hot: Array, labelled: NDArray[np.bool_]) -> Array:
        alpha = check_number("alpha", self.alpha, minimum=sys.float_info.min, below=1)  # 1 / alpha is finite
        graph, xp = self.graph_, namespace(one_hot)
        lonely = self.graph_.own > 1 - 1e-15
        rest = np.where(lonely, 1.0, 1 - graph.own)  # of the degree, without the loop
        logs = np.asarray(to_numpy(graph.affinity._log_degree_wide()), np.float64).ravel() + np.log(rest)
        logs = logs + np.log(np.asarray(graph.affinity.domain.weights, np.float64)).ravel()
        logs = np.where(lonely, logs.max(), logs)
        if np.ptp(logs) > 0.9 * 2 * np.log(float(xp.finfo(one_hot.dtype).max)):
            raise NumericalError(f"degree: those of samples span exp({np.ptp(logs):.0f}), no float holds their roots")
        root = constant_like(np.exp((logs - logs.max()) / 2), one_hot)[:, None]
        phi = (1 - alpha) / alpha * rest
        self.functional_ = E(graph.affinity, one_hot / root, graph.as_signal(phi), measure="degree")
        u = self._took(self._minimizer(alpha))  # over the root, by which no share of a row changes
        there = constant_like(self.reached_.astype(np.float64), u)[:, None]
        total = xp.sum(xp.where(u > 0, u, xp.zeros_like(u)), axis=1, keepdims=True)
        return there * u / xp.where(total > 0, total, xp.ones_like(total))

    def _minimizer(self, alpha: float) -> Minimizer:
        energy, p = self.functional_, self.graph_.affinity
        if p.method == "dense" and is_numpy(energy.observed) and alpha > _SLOW:
            return energy.minimizer(preconditioner="direct")
        if p.method == "dense" and alpha <= _QUICK:  # steps alone converge as fast
            return self._settled(*self._rough(energy.observed), "steps along the strongest edges")
        name = "graph" if alpha > _SLOW else "auto"
        found = energy.minimizer(rtol=self.tol, maxiter=self.max_iter, start=self._start, preconditioner=name)
        if p.error_estimate > 0 or not found.success:  # the sums have no digits below it
            return found
        return self._settled(found.u, found.iterations, "iterations")

    def _settled(self, u: Array, before: int, kind: str) -> Minimizer:
        """Return a minimizer after steps with all edges, until these leave each value, or node, within `tol` of itself.

        Conjugate gradients make the residual small beside the largest values, and steps beside each.
        """
        most = self.max_iter if self._each else _STEPS
        u, left, done = self._stepped(u, self.functional_.affinity._average, most)
        # Beyond its own rounding nobody gets.
        success, advice = verdict(left, max(self._rtol, _rounding(u) / (1 - self.alpha) if self._each else 0.0))
        told = "further ones change no probability" if self._each else "the last step changed no node"
        message = f"after {before} {kind} and {done} further steps: {told} by more than {left:.3g} of its value"
        return Minimizer(u, left, before + done, success, message + advice)

    def _rough(self, u: Array) -> tuple[Array, int]:
        """Return a first guess for all pairs, and how many steps it took along the edges that decide about it.

        What is left out must not change a node in a step with all edges, so edges are chosen again where values have
        grown.
        """
        p, done, left = self.graph_.affinity, 0, math.inf
        if not isinstance(p, DenseAffinity) or not is_numpy(u):
            return u, 0
        u, _, _ = self._stepped(u, p._average, 1)
        for rtol in (_ROUGH, *(self._rtol,) * _CHOICES):
            graph = _deciding(p.matrix, u.sum(axis=1), self._rtol / len(u))
            if graph is None:
                break
            u, _, steps = self._stepped(u, graph.__matmul__, _STEPS, rtol)
            done += steps
            if rtol < _ROUGH:
                u, left, _ = self._stepped(u, p._average, 1)
            if left <= rtol:
                break
        return u, done

    @property
    def _rtol(self) -> float:
        return default_rtol(self.functional_.observed) if self.tol is None else self.tol

    @property
    def _each(self) -> bool:
        """Whether each value keeps its digits, and not each node alone."""
        return self.graph_.size <= DENSE_NODES

    def _stepped(
        self, u: Array, average: Callable[[Array], Array], most: int = _STEPS, rtol: float | None = None
    ) -> tuple[Array, float, int]:
        """Return a signal after semi-implicit steps, the relative error that is left, and how many they were."""
        rtol, most = self._rtol if rtol is None else rtol, min(most, self.max_iter)
        fidelity, f = self.functional_.fidelity_in("degree"), self.functional_.observed
        xp, done, left, before = namespace(u), 0, math.inf, math.inf
        least, fewest = (_rounding(u), 2) if self._each else (0.0, 1)  # one change does not tell how they fall
        u, drawn = xp.where(u > 0, u, xp.zeros_like(u)), fidelity.times(f)
        while done < most and (left > rtol or done < fewest) and before > least:
            new = fidelity.damped(average(u) + drawn, 1.0)
            change = self._change(u, new)
            left = _still_to_come(change, before, self.alpha, new) if self._each else change
            u, done, before = new, done + 1, change
        return u, left, done

    def _change(self, old: Array, new: Array) -> float:
        xp, size, change = namespace(new), new, abs(new - old)
        if not self._each:
            size, change = xp.sum(size, axis=1), xp.sum(change, axis=1)
        least = float(xp.finfo(new.dtype).smallest_normal) / float(xp.finfo(new.dtype).eps)
        there = size > (least if self._each else 0)  # what is smaller has no digits to keep
        return float(xp.max(xp.where(there, change, xp.zeros_like(size)) / xp.where(there, size, xp.ones_like(size))))


def _still_to_come(change: float, before: float, alpha: float, u: Array) -> float:
    """Return the sum of all further changes, which fall as the last two, and no faster than by alpha.

    They do not fall at first, while what is wrong near labels is handed on from node to node.
    """
    ratio = max(change / before if before > 0 else 0.0, alpha)
    if change <= _rounding(u):
        return change / (1 - alpha)
    return change * ratio / (1 - ratio) if ratio < 1 else math.inf


def _rounding(u: Array) -> float:
    """Return below which relative change steps say nothing."""
    return 16 * float(namespace(u).finfo(u.dtype).eps)


def _deciding(matrix: NDArray[Any], values: NDArray[Any], share: float) -> Any:
    """Return the entries of P that bring a node more than a share of its value; None where these are not few."""
    from scipy.sparse import csr_array

    size, places = len(values), []
    for start in range(0, size, _ROWS):
        rows = slice(start, start + _ROWS)
        there = matrix[rows] * values > share * values[rows, None]
        places.append(np.flatnonzero(there) + start * size)
        if len(places[-1]) > _FEW * there.size:
            return None
    rows_of, columns = np.divmod(np.concatenate(places), size)
    starts = np.searchsorted(rows_of, np.arange(size + 1))
    return csr_array((matrix[rows_of, columns], columns.astype(np.int32), starts.astype(np.int32)), shape=matrix.shape)
