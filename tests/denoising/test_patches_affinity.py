"""The affinity of groups of alike nodes, against the matrix of all nodes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

import nlflow as nl
from nlflow.affinities import BlockAffinity, Blocks
from nlflow.flows.spectrum import dense_operator, largest_eigenvalue, relaxation_rate
from tests.functionals import test_properties as properties
from tests.problems import torch_on_one_thread

pytestmark = pytest.mark.numerical

Floats = NDArray[np.float64]
WEIGHTS = np.random.default_rng(0).uniform(0.2, 3, (3, 4))


def matrix(weights: Floats) -> Floats:
    """Return k_ij, 1 / sum w within a group."""
    k = np.zeros((weights.size,) * 2)
    for group, own in enumerate(weights):
        place = slice(group * len(own), (group + 1) * len(own))
        k[place, place] = 1 / own.sum()
    return k


def dense(weights: Floats) -> nl.Affinity:
    return nl.from_matrix(matrix(weights), nl.Points(np.arange(float(weights.size)), weights.ravel()))


@pytest.mark.parametrize("channels", [(), (1,), (3,)])
@pytest.mark.parametrize("weights", [None, WEIGHTS, WEIGHTS[:1], WEIGHTS[:, :1]], ids=["equal", "any", "one", "single"])
def test_against_the_matrix(weights: Floats | None, channels: tuple[int, ...]) -> None:
    own = np.ones((3, 4)) if weights is None else weights
    block, reference = BlockAffinity(*own.shape, weights), dense(own)
    u = np.random.default_rng(1).standard_normal((*own.shape, *channels))
    flat = u.reshape(own.size, *channels)
    np.testing.assert_allclose(block.average(u).reshape(flat.shape), reference.average(flat), rtol=0, atol=1e-14)
    np.testing.assert_allclose(block.push(u).reshape(flat.shape), reference.push(flat), rtol=0, atol=1e-14)
    np.testing.assert_allclose(block.log_degree.ravel(), reference.log_degree, rtol=0, atol=1e-14)
    assert np.all(block.degree == 1)
    both = block.symmetrized()
    assert np.all(both.degree == 2)
    for metric in ("l2", "degree"):
        np.testing.assert_allclose(both.measure(metric, u).ravel(), reference.symmetrized().measure(metric, flat))
        np.testing.assert_allclose(block.mean(u, metric).ravel(), reference.mean(flat, metric).ravel(), atol=1e-14)
    np.testing.assert_allclose(block.edges().toarray(), reference.edges().toarray(), rtol=1e-13)
    assert block.average(u).flags.writeable  # a copy, not the mean seen several times
    assert block.domain.nodes.shape == (own.size, 2)
    assert block.domain.nodes[-1].tolist() == [own.shape[0] - 1, own.shape[1] - 1]


@pytest.mark.parametrize("shape", [(1, 1), (1, 5), (3, 1), (3, 4)])
def test_spectrum(shape: tuple[int, int]) -> None:
    block = BlockAffinity(*shape, np.random.default_rng(2).uniform(0.5, 2, shape))
    assert block.symmetric
    assert block.positive_semidefinite
    flow = nl.GradientFlow(nl.J(block), "degree")
    values = 1 - np.linalg.eigvals(dense_operator(flow)).real
    known = block.known_spectrum()
    assert known is not None
    np.testing.assert_allclose(np.unique(known), np.unique(values.round(12)), atol=1e-12)
    assert abs(largest_eigenvalue(flow) - (1 - values.min())) < 1e-12
    # Groups do not see each other: what is constant on each stays.
    assert abs(relaxation_rate(flow) - (0.0 if len(values) == 1 else 1 - np.sort(values)[-2])) < 1e-12


def test_a_potential_has_mean_0_in_each_group() -> None:
    source = np.random.default_rng(3).standard_normal((3, 4))
    source -= (WEIGHTS * source).sum(axis=1, keepdims=True) / WEIGHTS.sum(axis=1, keepdims=True)
    found = nl.J(BlockAffinity(3, 4, WEIGHTS)).potential(source)
    assert found.success
    np.testing.assert_allclose(found.u, source / 2, rtol=0, atol=1e-14)  # P of it is 0, and K = 2 k


def test_chain() -> None:
    law = nl.MarkovChain(BlockAffinity(1, 4, WEIGHTS[:1])).stationary
    np.testing.assert_allclose(law, WEIGHTS[:1] / WEIGHTS[0].sum(), rtol=1e-13)
    with pytest.raises(nl.InputError, match=r"a reducible chain with 3 classes"):
        _ = nl.MarkovChain(BlockAffinity(3, 4)).stationary


@st.composite
def blocks(draw: st.DrawFn) -> nl.Affinity:
    shape = draw(st.sampled_from([(1, 3), (2, 2), (3, 4), (4, 1)]))
    weights = st.one_of(st.none(), arrays(float, shape, elements=properties.values(0.05, 2)))
    return BlockAffinity(*shape, draw(weights))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("invariant", "fidelity"),
    [
        (properties.test_maximum_principle, None),
        (properties.test_energy_never_rises, None),
        (properties.test_j_flow_conserves_the_mean_of_its_metric, False),
        (properties.test_constants_do_not_move, False),
    ],
    ids=["range", "energy", "mean", "constants"],
)
@pytest.mark.sampled(2)
def test_invariants(invariant: Any, fidelity: bool | None) -> None:
    """What holds for every flow holds on groups."""
    extra = {"constant": properties.values(-100, 100)} if "constants" in invariant.__name__ else {}

    @given(
        case=properties.cases(blocks(), fidelity=fidelity), stepper=st.sampled_from(properties.STEPPERS),
        fraction=properties.FRACTION, **extra,
    )  # fmt: skip
    def check(**drawn: Any) -> None:
        invariant.hypothesis.inner_test(**drawn)

    check()


@pytest.mark.parametrize("weights", [None, WEIGHTS])
def test_single_precision(weights: Floats | None) -> None:
    block = BlockAffinity(3, 4, weights)
    u = np.random.default_rng(1).standard_normal((3, 4, 2))
    for found, expected in (
        (block.average(u.astype(np.float32)), block.average(u)),
        (block.push(u.astype(np.float32)), block.push(u)),
    ):
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)
    # Sums are in float64: over ten thousand members a mean keeps its digits.
    many = np.random.default_rng(1).uniform(1, 2, (1, 10_000, 2)).astype(np.float32)
    exact = many.astype(float).mean(axis=1, keepdims=True)
    np.testing.assert_allclose(BlockAffinity(1, 10_000).average(many)[:, :1], exact, rtol=1e-7)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_torch(dtype: str) -> None:
    torch = torch_on_one_thread()
    weights, u = WEIGHTS.astype(dtype), np.random.default_rng(1).standard_normal((3, 4, 2)).astype(dtype)
    there, here = BlockAffinity(3, 4, torch.from_numpy(weights)), BlockAffinity(3, 4, weights)
    tensor = torch.from_numpy(u)
    for name in ("average", "push"):
        found = getattr(there, name)(tensor)
        assert found.dtype == tensor.dtype
        np.testing.assert_allclose(found.numpy(), getattr(here, name)(u), rtol=0, atol=1e-6)
    energies = [nl.E(k, f, 0.5, measure="degree").value(2 * f) for k, f in ((there, tensor), (here, u))]
    np.testing.assert_allclose(energies[0], energies[1], rtol=1e-6)
    with pytest.raises(nl.InputError, match="u: got a tensor"):
        here.average(tensor)


def test_refused() -> None:
    with pytest.raises(nl.InputError, match=r"weights: got shape \(4, 3\), expected \(3, 4\), one for each member"):
        BlockAffinity(3, 4, WEIGHTS.T)
    with pytest.raises(nl.InputError, match="weights: got 0, expected every weight > 0; leave such members out"):
        BlockAffinity(3, 4, 0 * WEIGHTS)
    with pytest.raises(nl.InputError, match="members: got 0, expected an integer >= 1"):
        Blocks(3, 0)
    with pytest.raises(nl.InputError, match=r"u: got shape \(12,\), expected \(3, 4\)"):
        BlockAffinity(3, 4).average(np.ones(12))
    with pytest.raises(nl.InputError, match="which do not change with the signal"):
        BlockAffinity(3, 4).update(WEIGHTS)
