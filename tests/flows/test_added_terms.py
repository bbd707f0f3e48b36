"""Terms that are added to a flow, and derivatives of velocities along a direction."""

import numpy as np
import pytest
from scipy.integrate import solve_ivp

from nlflow import (
    AllenCahn,
    AttentionFlow,
    Constraint,
    E,
    ExpDotProduct,
    FisherKPP,
    Gaussian,
    GradientFlow,
    Grid,
    InputError,
    J,
    Points,
    Reaction,
    Source,
    affinity,
    solve,
)
from nlflow.affinities import Unlinked

N = 12
U = np.sin(np.arange(float(N)))


@pytest.fixture
def weights():
    return affinity(Gaussian(width=1.5), Grid(N, spacing=0.5))


def matrix_of(flow):
    """Return A of a flow as a matrix, column by column."""
    return np.stack([flow.linear(e) for e in np.eye(N)], axis=1)


def test_terms_that_are_added_are_those_that_are_given(weights):
    source, constraint = np.cos(np.arange(float(N))), Constraint([0, 3], np.array([0.2, 0.1]))
    given = GradientFlow(J(weights), reaction=AllenCahn(2.0), source=source, constraint=constraint)
    added = GradientFlow(J(weights)) + AllenCahn(2.0) + Source(source) + constraint
    assert np.array_equal(given.velocity(U), added.velocity(U))
    assert given.energy(U) == added.energy(U)


def test_reactions_and_sources_add_up(weights):
    plain = GradientFlow(J(weights))
    more = plain + AllenCahn(2.0, interval=(-1.5, 1.5)) + FisherKPP(0.5, interval=(-2.0, 1.2))
    more = more + Source(np.ones(N)) + Source(lambda t: t * np.ones(N))
    assert plain.terms.words == []  # a flow is never changed
    assert more.terms.reaction.interval == (-1.5, 1.2)

    def rate(t, u):
        return -matrix_of(plain) @ u + 2 * (u - u**3) + 0.5 * u * (1 - u) + 1 + t

    exact = solve_ivp(rate, (0, 0.5), U / 2, "DOP853", rtol=1e-12, atol=1e-13).y[:, -1]
    assert np.abs(solve(more, U / 2, t=0.5).final - exact).max() < 1e-5
    potential = 2 / 4 * (U**2 - 1) ** 2 + 0.5 * (U**3 / 3 - U**2 / 2) - 1 * U
    assert more.energy(U) == pytest.approx(J(weights).value(U) + 0.5 * potential.sum(), rel=1e-12)


@pytest.mark.parametrize(
    ("term", "message"),
    [
        (lambda u: u, "got function to be added, expected a Reaction, a Source or a Constraint"),
        (FisherKPP(interval=(2.0, 3.0)), "expected intervals that overlap"),
        (Reaction(lambda u: -u, (0.0, 1.0), bound=1.0, components=2), "expected the same number of components"),
        (Constraint([1], np.array([0.0])), "expected one Constraint that holds all values"),
        (Source(np.ones(N + 1)), "source: got shape"),
    ],
)
def test_what_cannot_be_added_is_named(weights, term, message):
    both = Reaction(lambda u: -u, (0.0, 1.0), bound=1.0, components=3)
    flow = GradientFlow(J(weights)) + Constraint([0], np.array([0.0]))
    flow = flow + (both if getattr(term, "components", None) else AllenCahn())
    with pytest.raises(InputError, match=message):
        flow + term


@pytest.mark.parametrize("metric", ["l2", "degree"])
def test_jacobian_is_that_of_a_matrix(weights, metric):
    f = np.cos(np.arange(float(N)))
    flow = GradientFlow(E(weights, f, 0.7, measure=metric), metric) + AllenCahn(2.0)
    rng = np.random.default_rng(0)
    v = rng.standard_normal(N)
    exact = -matrix_of(flow) @ v + 2 * (1 - 3 * U**2) * v
    assert np.abs(flow.jacobian(U, v) - exact).max() < 1e-13
    held = flow + Constraint([2], np.array([0.3]))
    at, along = held.held(U), v.copy()
    along[2] = 0
    exact = -matrix_of(flow) @ along + 2 * (1 - 3 * at**2) * along
    exact[2] = 0
    assert np.abs(held.jacobian(U, v) - exact).max() < 1e-13


def test_jacobian_by_differences(weights):
    coupled = Reaction(
        lambda u: np.stack([u[..., 0] * u[..., 1], -(u[..., 0] ** 2)], axis=-1), (-1.0, 1.0), bound=4.0, components=2
    )
    flow, rng = GradientFlow(J(weights)) + coupled, np.random.default_rng(1)
    u, v = rng.uniform(-1, 1, (2, N, 2))
    exact = -flow.linear(v) + np.stack([v[:, 0] * u[:, 1] + u[:, 0] * v[:, 1], -2 * u[:, 0] * v[:, 0]], axis=-1)
    assert np.abs(flow.jacobian(u, v) - exact).max() < 1e-9
    tokens = rng.standard_normal((N, 3))
    evolving = AttentionFlow(affinity(ExpDotProduct(), Points(range(N)), tokens), evolving=True)
    v = rng.standard_normal((N, 3))
    h = 1e-6
    slope = (evolving.velocity(tokens + h * v) - evolving.velocity(tokens - h * v)) / (2 * h)
    assert np.abs(evolving.jacobian(tokens, v) - slope).max() < 1e-7
    assert not np.allclose(evolving.jacobian(tokens, v), -evolving.rebuilt(tokens).linear(v))


def test_unlinked_nodes_move_by_themselves():
    domain = Points(np.arange(float(N)), weights=np.linspace(1, 2, N))
    own = Unlinked(domain)
    assert np.array_equal(own.average(U), U)
    assert J(own).value(U) == 0
    assert own.edges().nnz == 0
    flow = GradientFlow(J(own)) + Reaction(lambda u: -u, (-1.0, 1.0), derivative=lambda u: 0 * u - 1)
    assert np.abs(solve(flow, U, t=1.0).final - U / np.e).max() < 1e-6


def test_unlinked_tensors():
    torch = pytest.importorskip("torch")
    u = torch.linspace(-1, 1, N)
    flow = GradientFlow(J(Unlinked(Points(np.arange(float(N))), u))) + Source(torch.ones(N))
    assert torch.allclose(solve(flow, u, t=0.5).final, u + 0.5)
