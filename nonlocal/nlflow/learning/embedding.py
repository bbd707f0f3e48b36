"""Diffusion maps, and clusters of points."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nlflow._array import Floats, to_numpy
from nlflow.errors import InputError, check_integer, check_number, checked_call, listed, warn_caller
from nlflow.kernels import RadialKernel
from nlflow.learning.base import GivenPoints, PointEstimator, TransformerMixin, by_chunks, check_is_fitted
from nlflow.learning.graphs import PointGraph
from nlflow.markov import MarkovChain
from nlflow.markov.spectrum import constant_first

_NEIGHBOURS = 30  # where no number is given
_LEAST = 1e-12  # of an eigenvalue, by which coordinates of other points are divided
_FEW = 25  # points of a mode: its eigenvalue, a mean over so many, is known to no better than (2 / 25)^1/2


class DiffusionMap(TransformerMixin, PointEstimator):
    """Diffusion map: the slow modes of a walk on the points, |mu_k|^t psi_k, as coordinates.

    (Coifman and Lafon 2006, doi 10.1016/j.acha.2006.04.006.) The weights are k_ij / (q_i q_j)^alpha with the density
    q_i = sum_j k_ij.

    With beta k_ij = exp(-|x_i - x_j|^2 / (s_i s_j)), s_i = s p_i^beta with a first estimate p of the density (Berry and
    Harlim 2016, doi 10.1016/j.acha.2015.01.001; in their notation alpha + beta (d + 2) / 2 takes the place of alpha).
    In d dimensions the modes are those of L = 4 (P - I) / s_i^2 for the weights (s_i s_j)^-(d/2 + 1) (q_i q_j)^-alpha
    k_ij, with q_i = sum_j k_ij / s_i^d. As widths fall, L tends to Delta + 2 (1 - alpha) grad log q . grad.

    Parameters
    ----------
    n_components : int
        At most N - 2.
    affinity : {'rbf', 'knn', 'precomputed'}, RadialKernel or callable
        As for `LabelSpreading`, but with the diagonal, of which k(x, x) = 1 for points.
    gamma, metric, search, keep
        See `LabelSpreading`. With beta k_ij = exp(-gamma |x_i - x_j|^2 / (r_i r_j)), with r = p^beta over its geometric
        mean; None takes the steepest slope of ``curve_``.
    n_neighbors : int or None
        Of 'knn'; None takes 30, or N - 1 where that is less.
    alpha : float
        In [0, 1].
    beta : float or None
        In [-1, 0]; for 'rbf', of up to 4097 points, and 'knn'. None takes the weights of `LabelSpreading`.
    t : float
        Diffusion time in moves, >= 0.
    accuracy : float or None
        See `LabelSpreading`.
    tol : float
        Largest residual of an eigenpair, P psi - mu psi in the norm of pi.
    verbose : bool
        Say on stderr what was done.
    memory_limit : float, optional
        Bytes.

    Attributes
    ----------
    embedding_ : array of shape (N, n_components)
        The mean of psi_k^2 in the stationary law is 1.
    eigenvalues_ : array of shape (n_components,)
        mu_k, decreasing; that of constants, 1, is left out.
    residual_ : float
        Largest of the eigenpairs.
    density_ : array of shape (N,)
        q over its mean.
    widths_ : array of shape (N,)
        s_i, with beta.
    generator_ : array of shape (n_components,)
        Eigenvalues of L, with beta; mu_k = 1 + ``generator_`` min s_i^2 / 4.
    curve_ : WidthCurve
        With beta; how sums grow with a factor of r.
    participation_ : array of shape (n_components,)
        1 / sum_i (pi_i psi_i^2)^2, with beta: how many points have a part in each mode.
    dimension_ : int
        d, with beta.
    affinity_, method_, reason_, error_estimate_
        Of the normalized sums.

    Raises
    ------
    InputError
        For points in more parts that do not see each other than n_components + 1, and with beta in more than one.

    Warns
    -----
    NlflowWarning
        For points in several parts: the first coordinates are constant on each and tell them apart. With beta, for
        modes that lie on few points far from others.

    Notes
    -----
    O(N^3) time up to 1000 points, and one average a step beyond.

    Examples
    --------
    >>> import numpy as np
    >>> from nlflow.learning import DiffusionMap
    >>> turn = np.linspace(0, 2 * np.pi, 50, endpoint=False)
    >>> circle = np.column_stack([np.cos(turn), np.sin(turn)])
    >>> round(float(np.ptp(np.linalg.norm(DiffusionMap(gamma=20.0).fit_transform(circle), axis=1))), 6)
    0.0
    """

    def __init__(
        self, n_components: int = 2, affinity: Any = "rbf", *, gamma: float | None = None,
        n_neighbors: int | None = None, metric: str = "euclidean", search: str = "auto", keep: str = "either",
        alpha: float = 1.0, beta: float | None = None, t: float = 1.0, accuracy: float | None = 1e-8,
        tol: float = 1e-8, verbose: bool | int = False, memory_limit: float | None = None,
    ) -> None:  # fmt: skip
        self.n_components = n_components
        self.affinity = affinity
        self.gamma = gamma
        self.n_neighbors = n_neighbors
        self.metric = metric
        self.search = search
        self.keep = keep
        self.alpha = alpha
        self.beta = beta
        self.t = t
        self.accuracy = accuracy
        self.tol = tol
        self.verbose = verbose
        self.memory_limit = memory_limit

    def fit(self, X: Any, y: Any = None) -> DiffusionMap:
        """Find the modes of points X, (N, d); `y` has no part."""
        del y
        first = isinstance(self.n_components, str | RadialKernel)
        hint = "affinity is the second argument, as in DiffusionMap(2, 'knn')" if first else ""
        count = check_integer("n_components", self.n_components, minimum=1, hint=hint)
        X = self._points(X, reset=True)
        alpha, self._time = check_number("alpha", self.alpha, minimum=0), float(self.t)
        if alpha > 1:
            raise InputError(f"alpha: got {alpha:g}, expected 0 to 1")
        if X.shape[0] <= count + 1:
            raise InputError(f"X: got n_samples = {X.shape[0]}, expected more than n_components + 1 = {count + 1}")
        self._check_room(X, count, "modes", _NEIGHBOURS)
        self.X_, start = X, time.perf_counter()
        plain = PointGraph(self._recipe(loops=True, usual=_NEIGHBOURS), X)
        self._say(f"{X.shape[0]} samples, {plain.affinity.method}: {plain.affinity.reason}", start)
        logs = np.asarray(to_numpy(plain.affinity._log_degree_wide()), np.float64).ravel()
        if plain.widths is None:
            self.density_ = _over_mean(logs)
            self.graph_ = plain if alpha == 0 else plain.weighted(self.density_**-alpha)
        else:
            self.graph_ = self._of_generator(plain, logs, alpha)
        p = self.graph_.affinity
        self.affinity_, self.method_, self.reason_, self.error_estimate_ = p, p.method, p.reason, p.error_estimate
        chain = MarkovChain(p, memory_limit=self.memory_limit)
        parts = self._check_parts(count)
        rtol = max(check_number("tol", self.tol, minimum=0), 10 * rounding_of(self.graph_))
        modes = chain.modes(count + 1, rtol=rtol)
        vectors = modes.vectors
        if parts > 1:  # of equal eigenvalues: turned so that the first is the constant
            constant: Floats = np.linalg.lstsq(vectors[:, :parts], np.ones(len(vectors)))[0].astype(np.float64)
            vectors = np.column_stack([constant_first(vectors[:, :parts], constant), vectors[:, parts:]])
        self.eigenvalues_, self._vectors = modes.values[1:], vectors[:, 1:]
        self.residual_ = modes.residual
        if plain.widths is not None:
            self.generator_ = (self.eigenvalues_ - 1) / self._move
            self.participation_ = 1 / ((chain.stationary.reshape(-1, 1) * self._vectors**2) ** 2).sum(axis=0)
            self._check_modes()
        self.embedding_ = self.graph_.as_signal(self._vectors * np.abs(self.eigenvalues_) ** self._time)
        return self

    def _of_generator(self, plain: PointGraph, logs: Floats, alpha: float) -> PointGraph:
        """Return the graph of I + c L, c = min s_i^2 / 4 being the time of a move, from one with the plain weights."""
        assert plain.widths is not None
        self.widths_, self.curve_, self.dimension_ = plain.widths.points, plain.widths.curve, plain.widths.dimension
        sizes = np.log(self.widths_)
        logs = logs - self.dimension_ * sizes
        self.density_ = _over_mean(logs)
        self._least = float(self.widths_.min())
        self._move = self._least**2 / 4
        weights = _over_mean(-alpha * logs - (self.dimension_ / 2 + 1) * sizes)
        return plain.weighted(weights).slowed((self.widths_ / self._least) ** 2)

    def _check_parts(self, count: int) -> int:
        """Return how many parts of the points do not see each other, of which the first coordinates tell."""
        sizes = np.sort(np.bincount(self.graph_.parts()))[::-1].tolist()
        if len(sizes) == 1:
            return 1
        told = f"X: got points in {shown_parts(sizes)}"
        if len(sizes) > count + 1 or self.graph_.widths is not None:
            enough = "" if self.graph_.widths is not None else f", n_components >= {len(sizes) - 1},"
            raise InputError(f"{told}, expected one; use more neighbours or a smaller gamma{enough} or map each part")
        warn_caller(
            f"{told}: the first {len(sizes) - 1} coordinates are constant on each and tell them apart, in directions "
            f"that are a choice of many, and the others are those of single parts; {self.graph_.remedy()}",
        )
        return len(sizes)

    def _check_modes(self) -> None:
        few = np.flatnonzero(self.participation_ < min(_FEW, 0.05 * len(self.widths_)))
        if len(few):
            warn_caller(
                f"beta: {len(few)} of {len(self.generator_)} modes, generator_[[{listed(few)}]], lie on fewer than "
                f"{_FEW} of {len(self.widths_)} points ({self.participation_.min():.1f} at the least), far from the "
                "others: generator_ is theirs there, and not that of the density; leave these points out, use more "
                "points, a larger gamma or a beta nearer to 0, or keep the modes of which participation_ is large",
            )

    def fit_transform(self, X: Any, y: Any = None) -> NDArray[Any]:
        """Return the coordinates of points X after `fit`, (N, n_components)."""
        return np.asarray(to_numpy(self.fit(X, y).embedding_))

    @by_chunks
    def transform(self, X: Any) -> NDArray[Any]:
        """Return the coordinates of other points by one average, (M, n_components).

        NaN for points that see no training point, and with beta where 1 + ``generator_`` s^2 / 4 <= 0, s being the
        width of the point.
        """
        check_is_fitted(self)
        found = self._at(X, self.graph_.as_signal(self._vectors), np.ones(self.graph_.size, np.bool_))
        values = self.eigenvalues_
        if self.graph_.widths is None:
            gains = np.where(np.abs(values) > _LEAST, np.copysign(np.abs(values) ** (self._time - 1), values), 0.0)
        else:  # P psi = (1 + generator s^2 / 4) psi at each point
            assert found.widths is not None
            slow = (found.widths / self._least)[:, None] ** 2
            kept = 1 + (values - 1) * slow
            gains = np.abs(values) ** self._time / np.where(kept > _LEAST, kept, np.nan)
        placed = np.where(found.seen[:, None], to_numpy(found.averages) * gains, np.nan)
        return np.asarray(placed, to_numpy(self.embedding_).dtype)

    @property
    def _n_features_out(self) -> int:
        return int(self.n_components)


def shown_parts(sizes: list[int]) -> str:
    return f"{len(sizes)} parts that do not see each other (sizes {listed(sizes)})"


def _over_mean(logs: Floats) -> Floats:
    """Return numbers of these logarithms over their mean."""
    numbers = np.exp(logs - logs.max())
    return np.asarray(numbers / numbers.mean())


def rounding_of(graph: PointGraph) -> float:
    return 1e-6 if str(graph.affinity.dtype).endswith("float32") else 1e-14


@checked_call
def spectral_clustering(
    X: Any,
    n_clusters: int,
    *,
    affinity: Any = "knn",
    gamma: float | None = None,
    n_neighbors: int | None = None,
    metric: str = "euclidean",
    search: str = "auto",
    keep: str = "either",
    accuracy: float | None = 1e-8,
    tol: float = 1e-8,
    verbose: bool | int = False,
    memory_limit: float | None = None,
) -> NDArray[np.intp]:
    """Return clusters of points by the leading modes of P (Ng, Jordan and Weiss 2001; Shi and Malik 2000).

    The rows of the modes are assigned by a pivoted QR factorization (Damle, Minden and Ying 2019, doi
    10.1093/imaiai/iay008).

    Parameters
    ----------
    X : array, data frame, tensor or sparse array of shape (N, d)
        Points, or weights (N, N) with ``affinity='precomputed'``.
    n_clusters : int
    affinity, gamma, n_neighbors, metric, search, keep, accuracy, verbose, memory_limit
        See `LabelSpreading`; with 'rbf' or a kernel k(x, x) = 1 counts beyond 4096 points.
    tol : float
        Largest residual of the modes.

    Returns
    -------
    array of int of shape (N,)
        Numbers of clusters, 0 for the largest.

    Warns
    -----
    NlflowWarning
        Where the graph has several parts, and not as many as clusters; and where the number of clusters parts equal
        eigenvalues.

    Examples
    --------
    >>> from nlflow.learning import spectral_clustering
    >>> spectral_clustering([[0.0], [0.1], [0.2], [5.0], [5.1]], 2, n_neighbors=1).tolist()
    [0, 0, 0, 1, 1]
    """
    count = check_integer("n_clusters", n_clusters, minimum=1)
    given = GivenPoints(affinity, gamma, n_neighbors, metric, search, keep, accuracy, tol, verbose, memory_limit)
    points = given._points(X, reset=True)
    if count > points.shape[0]:
        raise InputError(f"n_clusters: got {count}, expected at most {points.shape[0]}, the number of samples")
    given._check_room(points, count, "modes")
    start = time.perf_counter()
    graph = PointGraph(given._recipe(), points)
    given._say(f"{graph.size} samples, {graph.affinity.method}: {graph.affinity.reason}", start, "spectral_clustering")
    parts = np.sort(np.bincount(graph.parts()))[::-1].tolist()
    if len(parts) not in (1, count):
        warn_caller(
            f"X: got points in {shown_parts(parts)} for {count} clusters, which are made of whole parts where these "
            f"are more; {graph.remedy()}",
        )
    rtol = max(check_number("tol", tol, minimum=0), 10 * rounding_of(graph))
    modes = MarkovChain(graph.affinity, memory_limit=memory_limit).modes(count, rtol=rtol)
    if modes.parted and len(parts) == 1:
        warn_caller(
            f"n_clusters: got {count}, which parts equal eigenvalues ({modes.values[-1]:.6g}): these clusters are a "
            "choice of many; use another number",
        )
    labels = _assigned(modes.vectors)
    order = np.argsort(-np.bincount(labels, minlength=count), kind="stable")
    return np.asarray(np.argsort(order)[labels], np.intp)


def _assigned(vectors: Floats) -> NDArray[np.intp]:
    from scipy.linalg import qr, svd

    pivots = qr(vectors.T, pivoting=True)[-1][: vectors.shape[1]]
    left, _, right = svd(vectors[pivots].T)
    return np.asarray(np.abs(vectors @ (left @ right)).argmax(axis=1), np.intp)
