"""Laws after one move, in every method and precision, against plain double sums in extended precision."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import nlflow as nl
from nlflow.affinities import BlockAffinity
from tests.problems import torch_on_one_thread

MASS = 1e-6
METHODS = ("dense", "pairwise", "sparse", "nufft", "lowrank", "tiled", "dense tensors", "causal", "window", "batch")


def transitions(kernel: Any, queries: Any, keys: Any, weights: Any, seen: Any = True, both: bool = False) -> Any:
    """P_ij = w_j k_ij / d_i as long double: a plain sum for each pair, of k + k^T with `both`."""
    q, k = (np.asarray(a, dtype=np.longdouble) for a in (queries, keys))
    if isinstance(kernel, nl.ExpDotProduct):
        logits = kernel.scale * np.sum(q[:, None] * k, axis=-1)
    elif isinstance(kernel, nl.Gaussian):
        logits = -np.sum((q[:, None] - k) ** 2, axis=-1) / 2 / np.longdouble(kernel.width) ** 2
    else:
        logits = -np.sqrt(np.sum((q[:, None] - k) ** 2, axis=-1)) / kernel.width
    if both:
        logits = np.logaddexp(logits, logits.T)
    logits = np.where(seen, logits + np.log(np.asarray(weights, np.longdouble)), -np.inf)
    table = np.exp(logits - logits.max(axis=1, keepdims=True))
    return table / table.sum(axis=1, keepdims=True)


def some_laws(n: int, dtype: str) -> Any:
    """All the same, one node, and unequal."""
    rng = np.random.default_rng(n)
    return np.stack([np.full(n, 1 / n), np.eye(n)[n // 2], rng.dirichlet(np.full(n, 0.1))], axis=-1).astype(dtype)


def hold(affinity: Any, laws: Any, moves: Any) -> None:
    """The law is right and has its mass, or the affinity refuses; tensors where the affinity has them."""
    given = affinity.as_signal(laws) if not isinstance(affinity.log_degree, np.ndarray) else laws
    pushed = np.asarray(affinity.push(given), dtype=np.float64).reshape(-1, laws.shape[-1])
    flat = laws.reshape(-1, laws.shape[-1]).astype(np.longdouble)
    assert np.abs(pushed.sum(axis=0) - flat.sum(axis=0)).max() <= MASS
    rounding = 4e-6 if laws.dtype == np.float32 else 1e-8
    assert np.abs(pushed - moves.T @ flat).sum(axis=0).max() <= rounding + affinity.error_estimate


def problem(seed: int) -> tuple[Any, Any, Any, Any]:
    """A kernel, queries, keys and weights: ratios to 1e12, logits to 1e7, widths from tiny to huge, isolated nodes."""
    rng = np.random.default_rng(seed)
    n, d = int(rng.choice([2, 5, 40])), int(rng.choice([1, 2, 8]))
    dtype = ("float32", "float64")[seed % 2]
    weights = 10.0 ** (-float(rng.choice([0, 4, 8, 12])) * rng.random(n))
    keys = rng.standard_normal((n, d))
    kind, size = seed % 3, 10.0 ** rng.uniform(0, 7)
    if kind == 2:
        keys[0] += 20.0 * (seed % 4)  # isolated, where the kernel is narrow
        width = 10.0 ** rng.uniform(-2, 3)
        keys = keys.astype(dtype)
        return (nl.Gaussian(width) if seed % 4 else nl.Laplace(width)), keys, keys, weights
    # Logits that are large beside their differences, or large all over.
    shift = np.sqrt(size) * np.eye(d)[0]
    keys = (keys / np.sqrt(size) + shift if rng.random() < 0.5 else keys * np.sqrt(size / 20)).astype(dtype)
    queries = (rng.standard_normal((n, d)) / np.sqrt(size) + shift).astype(dtype) if kind else keys
    return nl.ExpDotProduct(scale=1.0), queries, keys, weights


def built(method: str, kernel: Any, queries: Any, keys: Any, weights: Any) -> Any:
    domain: Any = nl.Points(np.arange(float(len(keys))), weights)
    options: dict[str, Any] = {}
    if method in ("tiled", "dense tensors", "causal", "window", "batch"):
        torch = torch_on_one_thread()
        same = queries is keys
        keys = torch.from_numpy(keys.copy())
        queries = keys if same else torch.from_numpy(queries.copy())
        if method == "batch":
            domain = nl.Batch(domain, (2,))
            keys, queries = (torch.stack([a, a]) for a in (keys, queries))
        options["mask"] = {"causal": nl.Mask(causal=True), "window": nl.Mask(window=3)}.get(method)
        method = "dense" if method == "dense tensors" else "tiled"
    if not isinstance(kernel, nl.ExpDotProduct):
        queries = None
    return nl.affinity(kernel, domain, keys, queries=queries, method=method, **options)


@pytest.mark.slow
@pytest.mark.filterwarnings(r"ignore:affinity. \d+ of \d+ nodes see no other node")
@pytest.mark.parametrize("method", METHODS)
def test_laws_are_those_of_a_double_sum(method: str) -> None:
    if method == "nufft":
        pytest.importorskip("finufft")
    answered = 0
    for seed in range(24):
        kernel, queries, keys, weights = problem(seed)
        n = len(keys)
        laws = some_laws(n, keys.dtype.name)
        before = np.arange(n)[:, None] - np.arange(n)
        seen = {"causal": before >= 0, "window": np.abs(before) <= 3}.get(method, np.array(True))
        try:
            affinity = built(method, kernel, queries, keys, weights)
        except nl.NlflowError:
            assert method in ("sparse", "nufft", "lowrank")  # not for every kernel, precision, width
            continue
        answered += 1
        moves = transitions(kernel, queries, keys, weights, seen)
        if method == "batch":
            moves, laws = np.kron(np.eye(2), moves), np.stack([laws, laws]) / laws.dtype.type(2)
        hold(affinity, laws, moves)
    assert answered >= 2


@pytest.mark.parametrize("method", ["pairwise", "tiled", "dense"])
def test_laws_of_the_symmetrized(method: str) -> None:
    """K = k + k^T, whose degrees span more decades than a float."""
    for seed in (1, 4, 7, 10, 13, 16, 19, 22):
        kernel, queries, keys, weights = problem(seed)
        affinity = built(method, kernel, queries, keys, weights).symmetrized()
        hold(affinity, some_laws(len(keys), keys.dtype.name), transitions(kernel, queries, keys, weights, both=True))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_unequal_weights_under_transforms(dtype: str) -> None:
    """Weights of ratio 1e8 between nodes that all see each other: no density of a light node takes part."""
    pytest.importorskip("finufft")
    rng = np.random.default_rng(3)
    points = rng.standard_normal((80, 2)).astype(dtype)
    weights = 10.0 ** (-8 * rng.random(80))
    affinity = built("nufft", nl.Gaussian(30.0), points, points, weights)
    hold(affinity, some_laws(80, dtype), transitions(nl.Gaussian(30.0), points, points, weights))
    # Two laws of very unlike size share a transform.
    laws = np.array([1.0, 1e-12]) * some_laws(80, "float64")[:, :2]
    if dtype == "float64":
        pushed, moves = affinity.push(laws), transitions(nl.Gaussian(30.0), points, points, weights)
        assert np.abs(pushed - moves.T @ laws)[:, 1].sum() <= affinity.error_estimate * 1e-12


def _along(n: int, boundary: str) -> Any:
    """Sums of exp(-r^2 / 8) over the images of each of n nodes in a row."""
    x = np.arange(n)
    images = {
        "isolated": [x],
        "periodic": [x + k * n for k in range(-5, 6)],
        "reflect": [y + 2 * k * n for k in range(-3, 4) for y in (x, -1 - x)],
    }[boundary]
    return sum(np.exp(-((x[:, None] - image) ** 2) / 8) for image in images)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("boundary", ["periodic", "reflect", "isolated"])
def test_laws_on_grids(boundary: Any, dtype: str) -> None:
    for shape in ((30,), (6, 9)):
        grid = nl.Grid(shape, boundary=boundary)
        laws = some_laws(grid.size, dtype).reshape(*shape, 3)
        lines = [_along(n, boundary) for n in shape]
        table = lines[0] if len(shape) == 1 else np.kron(*lines)
        moves = table / table.sum(axis=1, keepdims=True)
        for method in ("dense", "stencil", "convolution"):
            hold(nl.affinity(nl.Gaussian(2.0), grid, method=method), laws, moves)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_laws_of_patches_and_groups(dtype: str) -> None:
    rng = np.random.default_rng(0)
    image = rng.random((6, 9)).astype(dtype)
    patches = nl.Patch(0.3, search_radius=2)
    grid = nl.Grid((6, 9))
    moves = nl.affinity(patches, grid, image.astype(np.float64), method="dense").average(np.eye(54).reshape(6, 9, 54))
    for store in (True, False):
        stencil = nl.affinity(patches, grid, image, store=store)
        hold(stencil, some_laws(54, dtype).reshape(6, 9, 3), moves.reshape(54, 54))
    weights = 1e-60 * 10.0 ** (-12 * rng.random((2, 5)))  # in units that float32 does not hold
    rows = weights / weights.sum(axis=1, keepdims=True)
    laws = some_laws(10, dtype).reshape(2, 5, 3)
    hold(BlockAffinity(2, 5, weights), laws, np.kron(np.eye(2), np.ones((5, 5))) * rows.ravel())


def test_half_precision_keeps_the_mass() -> None:
    """What averages are rounded to is no precision for a law."""
    torch = torch_on_one_thread()
    keys = torch.from_numpy(np.random.default_rng(0).standard_normal((40, 4)))
    affinity = nl.affinity(nl.ExpDotProduct(), nl.Points(np.arange(40.0)), keys, precision="bfloat16")
    law = torch.full((40,), 1 / 40, dtype=torch.float64)
    assert abs(float(affinity.push(law).sum()) - 1) <= MASS


@pytest.mark.parametrize("same", [True, False], ids=["keys", "queries"])
@pytest.mark.parametrize("method", ["dense", "tiled"])
def test_chains_of_large_logits(method: str, same: bool) -> None:
    """Float32 features with logits of 1e6 whose differences are of order 1: matrix, stationary law, law, mixing."""
    rng = np.random.default_rng(5)
    place = 1e3 * np.eye(3)[0]
    keys, other = ((1e-3 * rng.standard_normal((25, 3)) + place).astype("float32") for _ in range(2))
    queries = keys if same else other
    moves = transitions(nl.ExpDotProduct(scale=1.0), queries, keys, np.ones(25)).astype(float)
    values, vectors = np.linalg.eig(moves.T)
    law = np.abs(vectors[:, np.argmax(values.real)].real)
    tensors = {"dense": "dense tensors", "tiled": "tiled"}[method]
    chain = nl.MarkovChain(built(tensors, nl.ExpDotProduct(scale=1.0), queries, keys, np.ones(25)))
    assert np.abs(chain.stationary - law / law.sum()).sum() <= 1e-6
    assert np.abs(chain.matrix() - moves).sum(axis=1).max() <= 1e-6
    assert np.abs(chain.law(3, 2) - (moves @ moves)[3]).sum() <= 1e-6
    far = [np.abs(np.linalg.matrix_power(moves, k) - law / law.sum()).sum(axis=1).max() / 2 for k in range(9)]
    assert chain.mixing_time(1e-4) == next(k for k, distance in enumerate(far) if distance <= 1e-4)


def test_a_push_that_loses_mass_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    affinity = nl.affinity(nl.Gaussian(1.0), nl.Points(np.arange(5.0)), method="dense")
    whole = type(affinity)._push
    monkeypatch.setattr(type(affinity), "_push", lambda self, law: (1 - 3e-6) * whole(self, law))
    with pytest.raises(nl.NumericalError, match=r"^law: its mass would change by 3e-06"):
        affinity.push(np.full(5, 0.2))
    with pytest.raises(nl.NumericalError, match=r"^start: probability 3e-06 is lost"):
        nl.MarkovChain(affinity).law(0)
