"""Learning on graphs beside scikit-learn, GraphLearning, pydiffmap, deeptime and pyGPCCA: the same points and labels.

``python -m benchmarks learning`` runs all rows but those of CIFAR-10; with ``--data DIR`` these too, where DIR holds
``cifar10-train.zip`` and ``cifar10-test.zip``. Times are processor seconds, the sides taking turns; start it with one
thread (``OMP_NUM_THREADS=1 NUMBA_NUM_THREADS=1``), which the largest cases do not take over. A peer that is not
installed has rows 'not installed'.

GraphLearning's ``plaplace`` solves the game-theoretic equation, for each class alone: a node is (p - 2) / (p - 1) of
the mean of its largest and least neighbour and 1 / (p - 1) of the average of all. Ours is the minimizer of J_p, of all
classes at once. For p = 2 both are harmonic functions; for other p they are two models, whose accuracies stand side by
side without a target.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import learning_pictures
from benchmarks.harness import Row, missing, turns
from benchmarks.resident import peak
from nlflow import affinity_from_graph, neighbour_graph

NAME = "learning"
TRIALS = 100
MANY, WIDE = 697_526, 15
SIZES = (1_000, 10_000, 100_000, 1_000_000)
ROLL = 100_000


def hidden(y: Any, each: int, rng: Any) -> tuple[Any, Any]:
    """Return the numbers of `each` labelled samples a class, and labels of which the others are hidden."""
    known = np.concatenate([rng.choice(np.flatnonzero(y == c), each, replace=False) for c in np.unique(y)])
    few = np.full(len(y), -1)
    few[known] = y[known]
    return known, few


def digits() -> tuple[Any, Any]:
    from sklearn.datasets import load_digits

    return load_digits(return_X_y=True)


def spreading() -> list[Row]:
    """Return label spreading on digits: as it comes on both sides, and theirs to convergence."""
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.semi_supervised import LabelSpreading as Theirs

    from nlflow.learning import LabelSpreading

    X, y = digits()
    X = X / 16  # in [0, 1], for which the default gamma = 20 is meant
    few = hidden(y, 10, np.random.default_rng(0))[1]
    rows = []
    for alpha, steps, repeats in ((0.2, 60, 9), (0.99, 5000, 1)):
        settled, plain = Theirs(alpha=alpha, tol=1e-12, max_iter=steps), Theirs(alpha=alpha)
        with warnings.catch_warnings():  # the default max_iter = 30 is too few for alpha = 0.99
            warnings.simplefilter("ignore", ConvergenceWarning)
            seconds, found = turns(
                {
                    "settled": lambda m=settled: m.fit(X, few),
                    "plain": lambda m=plain: m.fit(X, few),
                    "ours": lambda a=alpha: LabelSpreading("rbf", gamma=20.0, alpha=a).fit(X, few),
                },
                repeats,
            )
        ours = found["ours"].label_distributions_
        apart = {side: float(np.abs(found[side].label_distributions_ - ours).max()) for side in ("settled", "plain")}
        work = f"label spreading, digits / 16, defaults, alpha {alpha:g}"
        for side, how in (("settled", "to tol 1e-12"), ("plain", "as it comes, tol 1e-3")):
            rows.append(Row.of(
                NAME, f"{work}: time; theirs {how}, {found[side].n_iter_} steps, {apart[side]:.0e} from ours",
                f"{seconds[side] * 1e3:.0f} ms", f"{seconds['ours'] * 1e3:.0f} ms", seconds[side] / seconds["ours"],
                least=5, also=side == "plain" or apart[side] < 1e-8,
            ))  # fmt: skip
    return rows


def on_graph(name: str, W: Any, y: Any, each: int, trials: int) -> list[Row]:
    """Return GraphLearning's Poisson, Laplace and p-Laplace learning beside ours, on one graph."""
    absent = missing(NAME, f"{name}: Poisson, Laplace, p-Laplace learning", "graphlearning", ">= 5")
    if absent is not None:
        return [absent]
    import graphlearning as gl

    from nlflow.learning import HarmonicClassifier, PLaplacianClassifier, PoissonClassifier

    sides: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], int]] = {
        "Poisson": (lambda: gl.ssl.poisson(W), lambda graph: PoissonClassifier(graph, tol=1e-4), trials),
        "Laplace": (lambda: gl.ssl.laplace(W), lambda graph: HarmonicClassifier(graph, tol=1e-5), trials),
        "p = 2": (lambda: gl.ssl.plaplace(W, p=2), lambda graph: HarmonicClassifier(graph, tol=1e-5), trials // 10),
        "p = 4": (
            lambda: gl.ssl.plaplace(W, p=4),
            lambda graph: PLaplacianClassifier(graph, p=4, tol=1e-2),
            trials if len(y) < 5000 else trials // 10,
        ),
    }
    rows = []
    for kind, (build, ours, count) in sides.items():
        other = kind == "p = 4"
        kind = f"game-theoretic p-Laplace ({kind}) beside our variational one" if kind.startswith("p") else kind
        work = f"{name}, {each} labels a class, {kind}"
        rng = np.random.default_rng(0)
        known, few = hidden(y, each, rng)
        seconds, _ = turns(
            {
                "theirs": lambda b=build, k=known: b().fit_predict(k, y[k]),
                "ours": lambda o=ours, f=few: o(affinity_from_graph(W)).fit(y[:, None], f).transduction_,
            },
            3,
        )
        once = f"{seconds['theirs'] * 1e3:.1f} ms", f"{seconds['ours'] * 1e3:.1f} ms"
        right, spent, same = _trials(build(), ours(affinity_from_graph(W)), y, each, count)
        gap = abs(right["ours"] - right["theirs"])
        rows.append(Row.of(
            NAME, f"{work}: accuracy, points apart, {count} trials ({100 * same:.2f} % of the labels agree)",
            f"{right['theirs']:.2f} %", f"{right['ours']:.2f} %", gap, most=None if other else 0.2,
        ))  # fmt: skip
        rows.append(Row.of(NAME, f"{work}: one fit, from the weights", *once, seconds["theirs"] / seconds["ours"],
                           least=None if other else 5))  # fmt: skip
        rows.append(Row.of(
            NAME, f"{work}: a trial of {count} on one graph, mean", f"{spent['theirs'] * 1e3:.1f} ms",
            f"{spent['ours'] * 1e3:.1f} ms", spent["theirs"] / spent["ours"], least=None if other else 5,
        ))  # fmt: skip
    return rows


def _trials(theirs: Any, ours: Any, y: Any, each: int, count: int) -> tuple[dict[str, float], dict[str, float], float]:
    """Return mean accuracies in percent, mean seconds, and the share of labels that are the same, over trials."""
    rng, same = np.random.default_rng(0), 0.0
    right, spent = {"theirs": 0.0, "ours": 0.0}, {"theirs": 0.0, "ours": 0.0}
    for _ in range(count):
        known, few = hidden(y, each, rng)
        done, found = turns(
            {
                "theirs": lambda k=known: theirs.fit_predict(k, y[k]),
                "ours": lambda f=few: ours.fit(y[:, None], f).transduction_,
            },
            1,
        )
        for side in right:
            right[side] += 100 * float((found[side] == y)[few < 0].mean()) / count
            spent[side] += done[side] / count
        same += float((found["theirs"] == found["ours"]).mean()) / count
    return right, spent, same


def graph_of(X: Any, count: int = 10) -> Any:
    """Return GraphLearning's default weights, exp(-4 d^2 / d_k^2), symmetrized, without loops; exact neighbours."""
    from scipy.sparse import csr_array
    from sklearn.neighbors import NearestNeighbors

    distances, ends = NearestNeighbors(n_neighbors=count + 1, algorithm="brute").fit(X).kneighbors(X)
    weights = np.exp(-4 * distances**2 / distances[:, -1:] ** 2)
    weights[ends == np.arange(len(X))[:, None]] = 0
    starts = np.arange(0, ends.size + 1, count + 1)
    W = csr_array((weights.ravel(), ends.ravel(), starts), shape=(len(X),) * 2)
    W = csr_array((W + W.T) / 2)
    W.eliminate_zeros()
    return W


def roll() -> list[Row]:
    """Return the diffusion map of a swiss roll: eigenvalues against a dense solution, time against pydiffmap."""
    import scipy.linalg
    from scipy.spatial.distance import cdist
    from sklearn.datasets import make_swiss_roll

    from nlflow.learning import DiffusionMap

    X = make_swiss_roll(3000, random_state=0)[0]
    worst = 0.0
    for alpha in (0.0, 0.5, 1.0):
        k = np.exp(-0.25 * cdist(X, X, "sqeuclidean"))
        q = k.sum(axis=1)
        k /= np.outer(q, q) ** alpha
        d = k.sum(axis=1)
        expected = scipy.linalg.eigvalsh(k / np.sqrt(np.outer(d, d)), subset_by_index=(2990, 2998))[::-1]
        found = DiffusionMap(9, gamma=0.25, alpha=alpha).fit(X)
        worst = max(worst, float(np.abs(found.eigenvalues_ - expected).max()))
    rows = [Row.of(NAME, "diffusion map, swiss roll of 3 000: 9 eigenvalues, largest error (alpha 0, 1/2, 1)",
                   "dense eigenvalues", f"{worst:.0e}", worst, most=1e-6)]  # fmt: skip
    work = f"diffusion map, swiss roll of {ROLL}, 64 neighbours, 4 modes: time"
    absent = missing(NAME, work, "pydiffmap", ">= 5")
    if absent is not None:
        return [*rows, absent]
    from pydiffmap.diffusion_map import DiffusionMap as Theirs

    X = make_swiss_roll(ROLL, random_state=0)[0]
    theirs = Theirs.from_sklearn(
        n_evecs=4, epsilon=3000 / ROLL, alpha=1.0, k=64, neighbor_params={"n_jobs": 1, "algorithm": "kd_tree"}
    )
    seconds, _ = turns(
        {"theirs": lambda: theirs.fit(X), "ours": lambda: DiffusionMap(4, "knn", n_neighbors=64).fit(X)}, 1
    )
    rows.append(Row.of(NAME, work, f"{seconds['theirs']:.1f} s", f"{seconds['ours']:.1f} s",
                       seconds["theirs"] / seconds["ours"], least=5))  # fmt: skip
    return rows


def growth() -> list[Row]:
    """Return how iterations grow with the number of points, in the plane with ten neighbours and twenty labels."""
    from nlflow import Constraint, J
    from nlflow.learning import HarmonicClassifier, PoissonClassifier
    from nlflow.learning.graphs import SELF_TUNING

    counts: dict[str, list[int]] = {"harmonic": [], "Poisson": []}
    whole: dict[str, list[int]] = {"harmonic": [], "Poisson": []}
    for n in SIZES:
        rng = np.random.default_rng(0)
        x = rng.uniform(size=(n, 2))
        y = (np.floor(3 * x[:, 0]) + np.floor(3 * x[:, 1])).astype(int) % 2
        few = np.full(n, -1)
        known = rng.choice(n, 20, replace=False)
        few[known] = y[known]
        graph = affinity_from_graph(neighbour_graph(x, 10, SELF_TUNING, local=True))
        whole["harmonic"].append(HarmonicClassifier(graph, tol=1e-6).fit(x, few).n_iter_)
        poisson = PoissonClassifier(graph, tol=1e-6).fit(x, few)
        whole["Poisson"].append(poisson.n_iter_)
        given: dict[str, Any] = {"rtol": 1e-6, "preconditioner": "multigrid"}
        held = Constraint(known, np.eye(2)[y[known]])
        counts["harmonic"].append(J(graph).minimizer(constraint=held, **given).iterations)
        counts["Poisson"].append(poisson.functional_.potential(poisson.source_, **given).iterations)
    return [
        Row.of(NAME, f"{kind} functions, {SIZES[0]} to {SIZES[-1]} points in the plane: iterations with multigrid, "
               f"growth (estimators: {', '.join(map(str, whole[kind]))}, the first by elimination, the others with "
               "sweeps first)", "", ", ".join(map(str, found)), found[-1] / found[0], most=1.5)
        for kind, found in counts.items()
    ]  # fmt: skip


@contextlib.contextmanager
def settled_search(module: Any) -> Iterator[None]:
    """Let SciPy's simplex search, which a module calls with its tolerance of 1e-4, go on to 1e-13."""
    search = module.fmin

    def settled(function: Any, start: Any, args: Any = (), **options: Any) -> Any:
        for _ in range(12):
            start = search(function, start, args=args, xtol=1e-13 * np.abs(start).max(), ftol=1e-16, disp=False)
        return (start, function(start, *args), 0, 0, 0) if options.get("full_output") else start

    module.fmin = settled
    try:
        yield
    finally:
        module.fmin = search


def chains() -> list[Row]:
    """Return committors, passage times and metastable sets beside other packages."""
    return [*of_deeptime(), *of_gpcca()]


def of_deeptime() -> list[Row]:
    """Return committors, passage times and PCCA+ of a chain with sets."""
    from nlflow import MarkovChain, Points, from_matrix

    work = "chain of 36 states in m blocks"
    absent = missing(NAME, f"{work}: committor, passage times, PCCA+", "deeptime", "<= 1e-8")
    if absent is not None:
        return [absent]
    import scipy.optimize
    from deeptime.markov import pcca
    from deeptime.markov.tools.analysis import committor, mfpt

    rows = []
    for m in (2, 3):
        rng = np.random.default_rng(0)
        k = 1e-3 * rng.random((36, 36))
        for b in range(m):
            inside = slice(b * 36 // m, (b + 1) * 36 // m)
            k[inside, inside] += rng.random((36 // m, 36 // m))
        chain = MarkovChain(from_matrix(k + k.T, Points(np.arange(36.0), np.ones(36))))
        p, found = chain.matrix(), chain.metastable_sets(m)
        if m == 2:
            apart = float(np.abs(chain.committor([0, 1], 35) - committor(p, [0, 1], [35])).max())
            rows.append(Row.of(NAME, f"{work}: committor", "deeptime", f"{apart:.0e}", apart, most=1e-8))
            times = chain.mean_first_passage_times()[:35, 35] / mfpt(p, [35])[:35]
            apart = float(np.abs(times - 1).max())
            rows.append(Row.of(NAME, f"{work}: mean first passage times, relative", "deeptime", f"{apart:.0e}", apart,
                               most=1e-8))  # fmt: skip
        with settled_search(scipy.optimize):
            theirs = pcca(p, m).memberships
        rows.append(
            of_sets(f"{work}: PCCA+ memberships for m = {m}", "deeptime", found, pcca(p, m).memberships, theirs)
        )
    return rows


def of_gpcca() -> list[Row]:
    """Return metastable sets of chains that are not reversible in the weights: the test matrices of pyGPCCA.

    Nine states in three groups; mu more moves lead from each group to the next (Reuter et al. 2018, doi
    10.1021/acs.jctc.8b00079).
    """
    from nlflow import MarkovChain

    work = "chain of 9 states in 3 groups"
    absent = missing(NAME, f"{work}: GPCCA", "pygpcca", "<= 1e-8")
    if absent is not None:
        return [absent]
    from pygpcca import _gpcca

    rows, weights = [], np.full(9, 1 / 9)
    for mu in (0, 10, 100, 1000):
        k = 100.0 * np.kron(np.eye(3), np.ones((3, 3))) + 900 * np.eye(9)
        for i, j, moves in ((0, 3, 10), (3, 6, 10), (2, 4, mu), (5, 7, mu)):
            k[i, j] = k[j, i] = moves
        chain = MarkovChain.from_graph(k)
        plain = _gpcca.GPCCA(chain.matrix(), eta=weights, z="LR", method="brandts").optimize(3).memberships
        with settled_search(_gpcca):
            theirs = _gpcca.GPCCA(chain.matrix(), eta=weights, z="LR", method="brandts").optimize(3).memberships
        found = chain.metastable_sets(3, weights=weights)
        rows.append(of_sets(f"{work}, mu = {mu}: GPCCA memberships", "pyGPCCA", found, plain, theirs))
    return rows


def of_sets(work: str, peer: str, found: Any, plain: Any, theirs: Any) -> Row:
    """Return how far memberships are from those of a peer whose search ran on, and how crisp all are."""
    from scipy.optimize import linear_sum_assignment

    sides = {"theirs": plain, "continued": theirs, "ours": found.memberships}
    crisp = {s: float(np.mean((found.weights @ chi**2) / (found.weights @ chi))) for s, chi in sides.items()}
    theirs = theirs[:, linear_sum_assignment(-found.memberships.T @ theirs)[1]]
    apart = float(np.abs(found.memberships - theirs).max())
    return Row.of(
        NAME, f"{work}, their search continued from 1e-4 to 1e-13 (crispness {crisp['ours']:.12f}, theirs "
        f"{crisp['continued']:.12f}, as it ends by itself {crisp['theirs']:.12f})", peer, f"{apart:.0e}", apart,
        most=1e-8, also=abs(crisp["ours"] - crisp["continued"]) <= 1e-8,
    )  # fmt: skip


def turned(count: int, rng: Any) -> tuple[Any, Any]:
    """Return points of a cube that lies askew in 15 dimensions, with noise, and slices of it as ten classes."""
    z = rng.uniform(size=(count, 3))
    turn = np.linalg.qr(rng.normal(size=(WIDE, 3)))[0]
    return z @ turn.T + 0.002 * rng.normal(size=(count, WIDE)), np.minimum((10 * z[:, 0]).astype(int), 9)


def grouped(count: int, rng: Any) -> tuple[Any, Any]:
    """Return standardized points of 30 clusters, each along five directions of its own with noise; three a class."""
    cluster = rng.integers(30, size=count)
    X = 0.05 * rng.normal(size=(count, WIDE))
    for k in range(30):
        inside = cluster == k
        axes = np.linalg.qr(rng.normal(size=(WIDE, 5)))[0] * 0.7 ** np.arange(5)
        X[inside] += 0.7 * rng.normal(size=WIDE) + rng.normal(size=(inside.sum(), 5)) @ axes.T
    return (X - X.mean(axis=0)) / X.std(axis=0), cluster % 10


# Points, the width of the kernel
CLOUDS: dict[str, tuple[Callable[[int, Any], tuple[Any, Any]], float]] = {
    "a cube of 3 dimensions": (turned, 0.03),
    "30 clusters": (grouped, 0.3),
}


def many(cloud: str, count: int = MANY) -> dict[str, Any]:
    """Return what label spreading on so many points in 15 dimensions takes, in this process."""
    from nlflow.learning import LabelSpreading

    rng, (points, width) = np.random.default_rng(0), CLOUDS[cloud]
    X, y = points(count, rng)
    X, few = X.astype(np.float32), hidden(y, 10, rng)[1]
    start, used = time.perf_counter(), time.process_time()
    model = LabelSpreading("rbf", gamma=1 / (2 * width**2), alpha=0.9, accuracy=1e-4, tol=1e-4).fit(X, few)
    done = {"wall": time.perf_counter() - start, "processor": time.process_time() - used, "bytes": peak()}
    right = float((model.transduction_ == y)[few < 0].mean())
    measured = model.affinity_.measure_error() if model.error_estimate_ else 0.0
    return {**done, "method": model.method_, "reason": model.reason_, "error": model.error_estimate_, "right": right,
            "measured": measured, "iterations": int(model.n_iter_)}  # fmt: skip


def large() -> list[Row]:
    """Return the rows of 697 526 points in 15 dimensions, each in a process of its own, with all cores."""
    rows, everything = [], {name: value for name, value in os.environ.items() if name != "NUMBA_NUM_THREADS"}
    for cloud in CLOUDS:
        program = f"import json; from benchmarks.learning import many; print(json.dumps(many({cloud!r})))"
        command = [sys.executable, "-c", program]
        done = subprocess.run(command, check=True, capture_output=True, text=True, env=everything)
        found = json.loads(done.stdout.splitlines()[-1])
        size = found["bytes"] / 2**30
        error = (
            f"error at most {found['error']:.0e}, {found['measured']:.0e} at 100 nodes" if found["error"]
            else "exact to rounding in float32"
        )  # fmt: skip
        spent = f"{found['processor'] / 60:.1f} processor minutes, {found['wall'] / 60:.1f} minutes"
        right = f"{100 * found['right']:.1f} % right"
        rows.append(Row.of(
            NAME, f"label spreading, {MANY} points in 15 dimensions ({cloud}), RBF, 10 labels a class: memory "
            f"({found['method']}, {error}, {found['iterations']} iterations, {spent}, {right})",
            f"scikit-learn: {MANY**2 * 8 / 2**40:.1f} TiB for the matrix", f"{size:.2f} GiB", size, most=4, unit=" GiB",
        ))  # fmt: skip
    return rows


SECTIONS: dict[str, Callable[[], list[Row]]] = {
    "spreading": spreading,
    "digits": lambda: on_graph("digits", graph_of(digits()[0]), digits()[1], 1, TRIALS),
    "chains": chains,
    "growth": growth,
    "roll": roll,
    "large": large,
}
PARTS = ("spreading", "digits", "pictures", "chains", "growth", "roll", "large")
"""The parts of a run, in their order; that of pictures has no rows without the folder of CIFAR-10."""


def run(only: Sequence[str] = PARTS, data: Path | None = None) -> list[Row]:
    """Return the rows of some parts."""
    absent = missing(NAME, "all rows", "sklearn", "scikit-learn")
    if absent is not None:
        return [absent]
    return [row for name in only for row in (_pictures(data) if name == "pictures" else SECTIONS[name]())]


def _pictures(data: Path | None) -> list[Row]:
    """Return the rows of CIFAR-10."""
    if data is None:
        return []
    features, y = learning_pictures.graphs(data)
    return [row for name, X in features.items() for row in on_graph(name, graph_of(X), y, 10, TRIALS)]
