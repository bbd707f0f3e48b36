"""Preconditioners of the minimizer of E: dense solutions, self-adjointness, and what they save."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scipy.sparse import csr_array

from nlflow import Constraint, E, ExpDotProduct, Gaussian, Grid, InputError, MemoryLimitError, Patch, Points, affinity
from nlflow.affinities.sparse import SparseAffinity
from nlflow.functionals.fidelity import MatrixFidelity, NodeFidelity
from nlflow.functionals.metrics import METRICS
from nlflow.functionals.preconditioners.choice import PRECONDITIONERS, Choice
from nlflow.functionals.preconditioners.multigrid import Multigrid, split
from nlflow.functionals.preconditioners.transform import Transform
from tests.covering import pairs

pytestmark = pytest.mark.numerical

BOUNDARIES = ("reflect", "periodic", "isolated")
SHAPES = [(131,), (13, 19), (24, 8)]


def normal(shape: Any, seed: int = 1) -> Any:
    return np.random.default_rng(seed).normal(size=shape)


def holes(shape: tuple[int, ...], value: float = 0.3) -> Any:
    """A third of the nodes at random and one block without fidelity."""
    result = np.where(np.random.default_rng(7).random(shape) < 0.3, 0.0, value)
    result[tuple(slice(n // 4, n // 2) for n in shape)] = 0
    return result


def picture(shape: tuple[int, ...], dtype: Any = np.float64) -> Any:
    """Steps and noise, so that weights between neighbours run over many orders of magnitude."""
    steps = sum(np.sign(np.sin(0.4 * index + 0.3)) for index in np.indices(shape))
    return (2 * steps + normal(shape, 3)).astype(dtype)


def patches(shape: tuple[int, ...], boundary: Any = "reflect", dtype: Any = np.float64, width: float = 1.2) -> Any:
    return affinity(Patch(width, patch_size=3, search_radius=2), Grid(shape, 1.0, boundary), picture(shape, dtype))


def table(shape: tuple[int, ...], boundary: Any = "reflect", method: str = "stencil") -> Any:
    return affinity(Gaussian(width=1.0), Grid(shape, 1.0, boundary), window=2, method=method)


def matrix(k: Any) -> Any:
    """Return P of K as a dense matrix, from averages of one node at a time."""
    size = k.domain.size
    unit = np.eye(size, dtype=k.dtype or np.float64).reshape(*k.domain.shape, size)
    return k.average(unit).reshape(size, size).astype(np.float64)


def solved(k: Any, f: Any, phi: Any) -> Any:
    """Return ((I - P) + phi)^-1 phi f."""
    phi = np.broadcast_to(phi, k.domain.shape).reshape(-1, 1)
    system = np.eye(len(phi)) - matrix(k) + np.diag(phi[:, 0])
    return np.linalg.solve(system, phi * f.reshape(len(phi), -1)).reshape(f.shape)


def preconditioner(k: Any, phi: Any, name: str, channels: tuple[int, ...] = ()) -> Any:
    both = k.symmetrized()
    like = np.zeros(k.domain.shape + channels, k.dtype or np.float64)
    fidelity = NodeFidelity(phi if isinstance(phi, float) else phi.astype(like.dtype))
    return Choice(both, fidelity, lambda v: v - both.average(v) + fidelity.times(v), like, name, 1e-10).first


@pytest.mark.parametrize(
    ("build", "shape", "boundary", "fidelity"),
    [
        *pairs([patches], SHAPES, BOUNDARIES, ["uniform", "holes", "one node"]),
        *pairs([table], SHAPES, BOUNDARIES, ["uniform", "holes", "one node"]),
    ],
)
@pytest.mark.sampled(4)
def test_solution(build: Any, shape: Any, boundary: str, fidelity: str) -> None:
    k = build(shape, boundary)
    f = normal(shape if fidelity == "holes" else (*shape, 3), 4)
    one = np.zeros(shape)
    one[tuple(n // 3 for n in shape)] = 0.5
    phi: Any = {"uniform": 1e-3, "holes": holes(shape), "one node": one}[fidelity]
    expected = solved(k, f, phi)
    e = E(k, f, phi, measure="degree")
    names = ["auto", "multigrid"] + (["transform"] if build is table and boundary != "isolated" else [])
    for name in names:
        found = e.minimizer(preconditioner=name)
        assert found.success, found.message
        # The residual allows for errors of 1e-10 times the condition number, which one node makes large.
        np.testing.assert_allclose(found.u, expected, rtol=0, atol=1e-5 if fidelity == "one node" else 1e-7)
        if name != "auto":
            assert found.message.endswith(f"preconditioner: {name}")


@pytest.mark.parametrize(("name", "boundary"), [("transform", "periodic"), ("transform", "reflect"),
                                                ("multigrid", "isolated")])  # fmt: skip
def test_volumes(name: str, boundary: str) -> None:
    k, f = table((6, 5, 8), boundary), normal((6, 5, 8), 4)
    found = E(k, f, 1e-3, measure="degree").minimizer(preconditioner=name)
    assert found.success, found.message
    np.testing.assert_allclose(found.u, solved(k, f, 1e-3), rtol=0, atol=1e-7)


@pytest.mark.parametrize("measure", METRICS)
@pytest.mark.parametrize("name", sorted({*PRECONDITIONERS} - {"sweeps"}))
def test_both_measures_and_units(name: str, measure: str) -> None:
    """Spacings and amplitudes that are not 1."""
    k = affinity(Gaussian(width=0.05, amplitude=7.0), Grid((20, 21), (0.05, 0.04)), window=2)
    f = normal((20, 21), 4)
    fidelity = 0.01 if measure == "degree" else 0.01 * float(k.symmetrized().degree.ravel()[0])
    found = E(k, f, fidelity, measure=measure).minimizer(preconditioner=name)
    assert found.success, found.message
    np.testing.assert_allclose(found.u, solved(k, f, 0.01), rtol=0, atol=1e-8)


@pytest.mark.slow
@pytest.mark.parametrize("channels", [(), (1,), (3,)])
@pytest.mark.parametrize("boundary", BOUNDARIES)
@pytest.mark.parametrize("build", [patches, table])
def test_self_adjoint_and_positive(build: Any, boundary: str, channels: tuple[int, ...]) -> None:
    """In the degree measure, in which conjugate gradients run."""
    shape = (37, 26)
    k = build(shape, boundary)
    measure = k.measure("degree", np.zeros(shape)).reshape(shape + (1,) * len(channels))
    for phi in (1e-3, holes(shape)):
        for name in ["multigrid"] + (["transform"] if build is table and boundary != "isolated" else []):
            apply = preconditioner(k, phi, name, channels)
            for seed in range(5):
                x, y = normal(shape + channels, seed), normal(shape + channels, seed + 50)
                mx, my = apply(x), apply(y)
                left, right = float((measure * mx * y).sum()), float((measure * x * my).sum())
                size = float(np.sqrt((measure * mx * x).sum() * (measure * my * y).sum()))
                assert abs(left - right) <= 1e-11 * size
                assert float((measure * mx * x).sum()) > 0
                np.testing.assert_allclose(apply(x + 2 * y), mx + 2 * my, rtol=0, atol=1e-9 * np.abs(mx).max())


def test_spectrum() -> None:
    """All eigenvalues of the preconditioned operator lie between 0 and 1, and they are close together."""
    shape = (15, 12)
    k = patches(shape, width=0.8)
    phi = holes(shape)
    apply = preconditioner(k, phi, "multigrid", (180,))
    system = np.eye(180) - matrix(k) + np.diag(phi.ravel())
    values = np.sort(np.linalg.eigvals(apply(system.reshape(*shape, 180)).reshape(180, 180)).real)
    plain = np.sort(np.linalg.eigvals(system / (1 + phi.reshape(-1, 1))).real)
    assert values[-1] <= 1 + 1e-9
    assert values[0] > 0.3
    assert plain[0] < 1e-2


@pytest.mark.parametrize("channels", [1, 3])
def test_channels_are_preconditioned_one_by_one(channels: int) -> None:
    k = patches((24, 24))
    x = normal((24, 24, channels))
    together = preconditioner(k, holes((24, 24)), "multigrid", (channels,))(x)
    for c in range(channels):
        alone = preconditioner(k, holes((24, 24)), "multigrid")(np.ascontiguousarray(x[..., c]))
        np.testing.assert_allclose(together[..., c], alone, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("boundary", ["reflect", "periodic"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("method", ["stencil", "convolution"])
def test_transform_is_the_inverse(method: str, shape: Any, boundary: str) -> None:
    k = table(shape, boundary, method)
    r = normal((*shape, 2))
    expected = np.linalg.solve(1.01 * np.eye(k.domain.size) - matrix(k), r.reshape(-1, 2)).reshape(r.shape)
    np.testing.assert_allclose(Transform(k, 0.01)(r), expected, rtol=0, atol=1e-10)
    found = E(k, r, 0.01, measure="degree").minimizer()
    assert found.message.endswith("transform")
    assert found.iterations <= 2


@pytest.mark.parametrize("phi", [1e-6, 1e-9, 1e-12])
def test_transform_keeps_the_digits_of_small_fidelities(phi: float) -> None:
    """u* is the mean of f and a deviation of the size of phi, of which the leading digits are right."""
    k, f = table((40,)), normal((40,), 4)
    mean = np.full((40, 40), 1 / 40)
    deviation = np.linalg.solve(np.eye(40) - matrix(k) + phi * np.eye(40) + mean, phi * (f - f.mean()))
    found = E(k, f, phi, measure="degree").minimizer(preconditioner="transform")
    np.testing.assert_allclose(found.u, f.mean() + deviation, rtol=0, atol=1e-15)


def test_transform_with_fidelities_that_vary() -> None:
    shape = (40, 41)
    k, f = table(shape), normal(shape)
    phi = 1e-3 * (1 + 2.9 * np.random.default_rng(0).random(shape))
    e = E(k, f, phi, measure="degree")
    found = e.minimizer()
    assert found.message.endswith("transform")
    assert found.iterations * 10 < e.minimizer(preconditioner="diagonal").iterations
    np.testing.assert_allclose(found.u, solved(k, f, phi), rtol=0, atol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("fidelity", ["uniform", "holes"])
@pytest.mark.parametrize("build", [patches, table])
@pytest.mark.sampled(2)
def test_fewer_iterations(build: Any, fidelity: str) -> None:
    """Measured: 10 to 40 times fewer; and next to no more on four times the nodes."""
    counts = []
    for side in (64, 128):
        shape = (side, side)
        e = E(build(shape), picture(shape), 1e-3 if fidelity == "uniform" else holes(shape), measure="degree")
        found = e.minimizer(preconditioner="multigrid")
        assert found.success
        counts.append(found.iterations)
        plain = e.minimizer(preconditioner="diagonal", maxiter=8 * found.iterations)
        if fidelity == "uniform" or build is patches:
            assert not plain.success
    assert counts[1] <= 1.4 * counts[0]
    assert counts[1] <= 45


@pytest.mark.parametrize("fidelity", [0.0, 1e-3, 1.0])
def test_fewer_iterations_with_a_constraint(fidelity: float) -> None:
    shape = (48, 48)
    rows = np.zeros(shape, dtype=bool)
    rows[[0, -1]] = True
    e = E(
        table(shape, "isolated"), picture(shape), np.where(np.indices(shape)[1] < 24, fidelity, 0.0), measure="degree"
    )
    found, plain = (
        e.minimizer(constraint=Constraint(rows, picture(shape)), preconditioner=name)
        for name in ("multigrid", "diagonal")
    )
    assert found.success
    assert plain.success
    assert found.iterations <= 0.15 * plain.iterations


def test_what_auto_takes() -> None:
    """The diagonal where it is quick, multigrid where it is not, told by the message."""
    shape = (64, 64)
    k, f = patches(shape, width=0.9), picture(shape)
    quick = E(k, f, 1.0, measure="degree").minimizer()
    assert quick.message.endswith("preconditioner: diagonal")
    slow = E(k, f, holes(shape), measure="degree")
    found = slow.minimizer()
    assert found.success
    assert found.message.endswith("preconditioner: multigrid")
    assert found.iterations < 0.5 * slow.minimizer(preconditioner="diagonal").iterations
    again = slow.minimizer(start=found.u)
    assert again.iterations == 0


def test_float32() -> None:
    shape = (48, 48)
    k, f = patches(shape, dtype=np.float32), picture(shape, np.float32)
    exact = E(patches(shape), f.astype(np.float64), holes(shape), measure="degree").minimizer()
    for name in ("auto", "multigrid"):
        found = E(k, f, holes(shape).astype(np.float32), measure="degree").minimizer(preconditioner=name)
        assert found.success, found.message
        assert found.u.dtype == np.float32
        np.testing.assert_allclose(found.u, exact.u, rtol=0, atol=2e-2)
    flat = table(shape)
    found = E(flat, f, 1e-3, measure="degree").minimizer()
    assert found.message.endswith("transform")
    assert found.u.dtype == np.float32
    exact = E(flat, f.astype(np.float64), 1e-3, measure="degree").minimizer()
    np.testing.assert_allclose(found.u, exact.u, rtol=0, atol=1e-4)


@pytest.mark.parametrize("weak", [1e-3, 1e-6, 1e-12])
def test_edges_of_next_to_no_weight(weak: float) -> None:
    """Two halves of a line that hardly see each other, one without fidelity: it takes its values through the gap.

    Those are known to roundings over the weight of the gap, and where that is too little the result says so.
    """
    k = affinity(Patch(1.0, patch_size=1, search_radius=1), Grid(200), np.where(np.arange(200) < 100, 0.0, np.sqrt(
        -2 * np.log(weak)
    )))  # fmt: skip
    f = normal(200)
    phi = np.where(np.arange(200) < 100, 1.0, 0.0)
    found = E(k, f, phi, measure="degree").minimizer(preconditioner="multigrid")
    expected = solved(k, f, phi)
    np.testing.assert_allclose(found.u[:100], expected[:100], rtol=0, atol=1e-9)
    assert found.success == (weak > 1e-4), found.message
    if weak > 1e-8:
        np.testing.assert_allclose(found.u, expected, rtol=0, atol=1e-2 if weak < 1e-4 else 1e-7)
    else:
        assert "the error has no bound" in found.message


def test_points() -> None:
    """A graph of given edges, with weights of the nodes that differ, and a node without edges."""
    nodes = np.random.default_rng(5).random((400, 2))
    weights = np.random.default_rng(6).uniform(0.5, 2, 400)
    squared = ((nodes[:, None] - nodes) ** 2).sum(-1)
    squared[17] = squared[:, 17] = 1.0
    from scipy.sparse import csr_array

    edges = np.where((squared < 0.02) & (squared > 0), np.exp(-squared / 0.01) * weights[:, None] * weights, 0.0)
    k = SparseAffinity(Points(nodes, weights), csr_array(edges))
    phi = np.where(np.random.default_rng(8).random(400) < 0.05, 0.2, 0.0)
    phi[17] = 0.1
    f = normal((400, 2))
    e = E(k, f, phi, measure="degree")
    found = e.minimizer(preconditioner="multigrid")
    assert found.success
    assert found.iterations * 2 < e.minimizer(preconditioner="diagonal").iterations
    np.testing.assert_allclose(found.u, solved(k, f, phi), rtol=0, atol=1e-6)


def test_nothing_to_coarsen() -> None:
    """A fidelity so large at every node that Jacobi's method is all that it takes; and a single node."""
    shape = (30, 30)
    k = patches(shape)
    e = E(k, picture(shape), 50.0, measure="degree")
    assert e.minimizer(preconditioner="multigrid").iterations <= 8
    assert Multigrid(k.symmetrized(), lambda v: v, np.full(900, 1 / 900), np.full(900, 50.0)).levels == []
    one = E(affinity(Gaussian(width=1.0), Grid(1), window=1, method="stencil"), np.array([2.0]), 0.5)
    for name in ("multigrid", "transform"):
        np.testing.assert_allclose(one.minimizer(preconditioner=name).u, 2.0)


def test_a_coarse_matrix_without_an_edge() -> None:
    diagonal, graph = split(csr_array(np.diag([2.0, 3.0, 0.5])))
    np.testing.assert_array_equal(diagonal, [2.0, 3.0, 0.5])
    assert graph.nnz == 0
    again, graph = split(graph)
    np.testing.assert_array_equal(again, 1.0)
    assert graph.shape == (3, 3)


def test_what_does_not_exist() -> None:
    f = normal((12, 12))
    isolated = E(table((12, 12), "isolated"), f, 0.1)
    with pytest.raises(InputError, match=r"preconditioner: got 'transform'.*periodic or reflecting"):
        isolated.minimizer(preconditioner="transform")
    points = affinity(ExpDotProduct(), Points(np.arange(6.0)), normal((6, 2)))
    with pytest.raises(InputError, match=r"preconditioner: got 'multigrid'.*stencil"):
        E(points, normal(6), 0.1).minimizer(preconditioner="multigrid")
    with pytest.raises(InputError, match="preconditioner: got 'ilu'"):
        isolated.minimizer(preconditioner="ilu")
    vectors = np.stack([f, f], axis=-1)
    matrices = MatrixFidelity(np.broadcast_to(0.1 * np.eye(2), (12, 12, 2, 2)))
    coupled = E(table((12, 12)), vectors, matrices, measure="degree")
    with pytest.raises(InputError, match="one number for each node"):
        coupled.minimizer(preconditioner="transform")
    assert coupled.minimizer().message.endswith("diagonal")


def test_memory_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = (40, 40)
    e = E(patches(shape, width=0.9), picture(shape), 1e-3, measure="degree")
    assert e.minimizer().message.endswith("multigrid")
    monkeypatch.setenv("NLFLOW_MEMORY_LIMIT", "100000")
    assert e.minimizer().message.endswith("diagonal")
    with pytest.raises(MemoryLimitError, match="multigrid for 1600 nodes"):
        e.minimizer(preconditioner="multigrid")


@pytest.mark.parametrize("threads", [1, 2])
def test_same_bits_for_any_number_of_threads(threads: int) -> None:
    import numba
    from threadpoolctl import threadpool_limits

    shape = (70, 64)
    e = E(patches(shape), picture(shape), holes(shape), measure="degree")
    expected = e.minimizer(preconditioner="multigrid").u
    before = numba.get_num_threads()
    numba.set_num_threads(min(threads, before))
    try:
        with threadpool_limits(threads):
            np.testing.assert_array_equal(e.minimizer(preconditioner="multigrid").u, expected)
    finally:
        numba.set_num_threads(before)
