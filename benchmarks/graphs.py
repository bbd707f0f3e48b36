"""Graphs of points: neighbours of texts, one query among many points, and how much memory is taken beside its limit.

``python -m benchmarks graphs`` runs all rows. Times are processor
seconds, the sides taking turns; start it with one thread.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import time
import warnings
from functools import cache
from typing import Any

import numpy as np

from benchmarks.harness import Row, missing
from benchmarks.learning import turns
from benchmarks.resident import peak_of
from nlflow import Gaussian, MarkovChain, MemoryLimitError, neighbour_graph

NAME = "graphs"
TEXTS, WORDS = 600, 20_000
QUERIES = (3_000, 10_000, 50_000, 150_000)
MEMORY: dict[str, tuple[int, int]] = {  # samples, and classes, modes or neighbours
    "neighbour_graph": (60_000, 10),
    "neighbour_graph, all pairs": (15_000, 10),
    "HarmonicClassifier": (60_000, 2),
    "HarmonicClassifier, 60 classes": (20_000, 60),
    "PoissonClassifier": (60_000, 2),
    "LabelSpreading": (60_000, 2),
    "LabelSpreading, rbf": (3_000, 2),
    "HarmonicRegressor": (30_000, 2),
    "DiffusionMap": (60_000, 2),
    "spectral_clustering": (60_000, 2),
    "from_graph": (60_000, 10),
    "absorption": (30_000, 10),
    "hitting_times": (30_000, 10),
    "stationary": (30_000, 10),
    "metastable_sets": (30_000, 5),
    "metastable_sets, all pairs": (1_000, 5),
    "modes": (30_000, 5),
    "modes, all pairs": (1_000, 5),
    "eigenvalues": (1_000, 5),
    "mean_first_passage_times": (1_000, 5),
}
CHAINS = ("from_graph", "absorption", "hitting_times", "stationary", "metastable_sets", "modes", "eigenvalues",
          "mean_first_passage_times")  # fmt: skip


def texts() -> Any:
    """Return TF-IDF rows of texts of 80 words, which are as unlike in number as words of a language."""
    from scipy.sparse import csr_array
    from sklearn.feature_extraction.text import TfidfTransformer

    rng = np.random.default_rng(0)
    words = np.minimum((rng.pareto(0.7, (TEXTS, 80)) * 20).astype(int), WORDS - 1)
    counts = csr_array((np.ones(words.size), (np.repeat(np.arange(TEXTS), 80), words.ravel())), shape=(TEXTS, WORDS))
    return csr_array(TfidfTransformer().fit_transform(counts))


def of_texts() -> list[Row]:
    """Return the graph of the ten nearest texts beside scikit-learn's search among all pairs."""
    from sklearn.neighbors import NearestNeighbors

    X, rows = texts(), []
    for metric in ("euclidean", "cosine"):
        theirs = NearestNeighbors(n_neighbors=10, algorithm="brute", metric=metric)
        seconds, found = turns(
            {
                "theirs": lambda t=theirs: t.fit(X).kneighbors_graph(mode="distance"),
                "ours": lambda m=metric: neighbour_graph(X, 10, metric=m, keep="directed"),
            },
            15,
        )
        same = float((found["theirs"] > 0).astype(float).multiply(found["ours"]).sum()) / found["ours"].nnz
        rows.append(Row.of(
            NAME,
            f"{TEXTS} TF-IDF rows of {WORDS} words, ten nearest by {metric} distances ({100 * same:.1f} % the same)",
            f"{seconds['theirs'] * 1e3:.1f} ms", f"{seconds['ours'] * 1e3:.1f} ms", seconds["ours"] / seconds["theirs"],
            most=2, also=same > 0.99,
        ))  # fmt: skip
    return rows


def of_one() -> list[Row]:
    """Return how long the prediction of one point takes among few and many training points."""
    from nlflow.learning import HarmonicClassifier

    spent = []
    for count in QUERIES:
        rng = np.random.default_rng(0)
        X = rng.normal(size=(count, 3))
        y = np.full(count, -1)
        y[:100] = X[:100, 0] > 0
        model = HarmonicClassifier().fit(X, y)
        model.predict(X[:1])
        seconds = []
        for point in rng.normal(size=(100, 1, 3)):
            start = time.process_time()
            model.predict(point)
            seconds.append(time.process_time() - start)
        spent.append(1e3 * statistics.median(seconds))
    shown = ", ".join(f"{value:.2f}" for value in spent)
    work = f"prediction of one point, neighbours, {QUERIES[0]} to {QUERIES[-1]} samples"
    return [
        Row.of(NAME, f"{work}: ms at {', '.join(map(str, QUERIES))}", "", shown, spent[-1], most=2, unit=" ms"),
        Row.of(NAME, f"{work}: growth", "", shown, spent[-1] / spent[0], most=1.5),
    ]


@cache
def moves(count: int, symmetric: bool) -> Any:
    """Return the weights of a graph of points around five centres to their ten nearest."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(count, 3)) + rng.normal(size=(5, 3))[np.arange(count) % 5]
    W = neighbour_graph(X, 10, Gaussian(width=1.0), keep="either" if symmetric else "directed")
    return W + np.exp(-8) * W.T  # so that walks come from everywhere to everywhere


def ask(name: str, count: int, more: int, limit: float) -> None:
    """Ask a chain for what needs memory."""
    chain = MarkovChain.from_graph(moves(count, name == "modes"), memory_limit=limit)
    given = {
        "absorption": [range(20 * k, 20 * k + 10) for k in range(more)], "hitting_times": 0, "metastable_sets": more,
        "modes": more,
    }  # fmt: skip
    if name != "from_graph":
        asked = getattr(chain, name)
        if callable(asked):
            asked(*[given[name]] if name in given else [])


def make(what: str, count: int, more: int, limit: float) -> None:
    """Make a graph, or fit an estimator, of so many points under a limit of memory."""
    from nlflow import learning

    name, _, kind = what.partition(", ")
    if name in CHAINS:
        return ask(name, count, more, limit)
    rng = np.random.default_rng(0)
    X = rng.normal(size=(count, 30 if kind == "all pairs" else 3))
    y = np.full(count, -1)
    y[: 10 * more] = np.arange(10 * more) % more
    if name == "neighbour_graph":
        neighbour_graph(X, more, Gaussian(width=1.0), search="brute" if kind else "auto", memory_limit=limit)
    elif name == "spectral_clustering":
        learning.spectral_clustering(X, more, memory_limit=limit)
    elif name == "DiffusionMap":
        learning.DiffusionMap(more, "knn", memory_limit=limit).fit(X)
    else:
        way = "rbf" if kind == "rbf" else "knn"
        targets = np.where(y < 0, np.nan, y) if name == "HarmonicRegressor" else y
        getattr(learning, name)(way, memory_limit=limit).fit(X, targets)


def measured(what: str) -> dict[str, float]:
    """Return the least limit that is accepted, and what this process holds at most beside what it held before."""
    count, more = MEMORY[what]
    warnings.simplefilter("ignore")  # of parts of the graph; what is told on stderr is not read
    # Loads and compiles; chains of few states go another way.
    make(what, count // 2 if what.partition(", ")[0] in CHAINS else max(2500, 30 * more), more, 1e12)
    limit = 1e5

    def raised(times: int) -> None:
        nonlocal limit
        for _ in range(times):
            try:
                make(what, count, more, limit)
                return
            except MemoryLimitError as error:
                limit = float(re.findall(r"\((\d+) bytes\)", str(error))[0])

    raised(1)
    rises = peak_of(lambda: raised(3))  # a further check may come later
    return {"limit": limit, "peak": rises}


def of_memory() -> list[Row]:
    """Return the peak beside the least limit that is accepted, each in a process of its own."""
    rows = []
    for what, (count, _) in MEMORY.items():
        command = [sys.executable, "-m", "benchmarks.graphs", "--memory", what]
        done = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
        rows.append(Row.of(
            NAME, f"memory_limit, {what}, {count} samples: peak beside the least limit that is accepted",
            f"{done['limit'] / 2**20:.1f} MiB", f"{done['peak'] / 2**20:.1f} MiB", done["peak"] / done["limit"],
            most=1.1,
        ))  # fmt: skip
    return rows


def run() -> list[Row]:
    absent = missing(NAME, "all rows", "sklearn", "scikit-learn")
    return [absent] if absent is not None else [*of_texts(), *of_one(), *of_memory()]


if __name__ == "__main__":  # a process of its own, for its memory
    parser = argparse.ArgumentParser(prog="python -m benchmarks.graphs", description=__doc__)
    parser.add_argument(
        "--memory", choices=list(MEMORY), required=True, help="print what one of the cases takes, alone"
    )
    print(json.dumps(measured(parser.parse_args().memory)))
