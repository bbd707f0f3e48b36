"""Flows on the sphere: against scalar equations, plain double sums and derivatives of their energies."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scipy.integrate import solve_ivp

from nlflow import (
    AttentionFlow,
    Callback,
    Checkpoint,
    ExpDotProduct,
    ExplicitEuler,
    GeodesicEuler,
    GeodesicMidpoint,
    InputError,
    LayerStep,
    Mask,
    NumericalError,
    Points,
    RungeKutta,
    SphereFlow,
    StabilityError,
    affinity,
    on_sphere,
    solve,
)
from nlflow.affinities import rows
from nlflow.studies.fits import regress

pytestmark = pytest.mark.numerical

NORMALIZATIONS = ("softmax", "none", "sinkhorn")


def tokens(count: int = 12, width: int = 3, seed: int = 0) -> Any:
    return on_sphere(np.random.default_rng(seed).standard_normal((count, width)))


def symmetric(width: int, seed: int = 1) -> Any:
    matrix = np.random.default_rng(seed).standard_normal((width, width))
    return (matrix + matrix.T) / 2


@pytest.mark.slow
@pytest.mark.parametrize("normalization", ["softmax", "none"])
@pytest.mark.parametrize("beta", [0.5, 4.0, 9.0])
def test_two_tokens_follow_their_scalar_equation(normalization: str, beta: float) -> None:
    """cos' = 2 w (1 - cos^2), w = exp(beta cos) over the sum of the row, or over N = 2."""
    angle = 2.0
    start = np.array([[1.0, 0.0, 0.0], [np.cos(angle), np.sin(angle), 0.0]])
    times = np.linspace(0.0, 3.0, 7)

    def slope(t: float, c: Any) -> Any:
        weight = np.exp(beta * c)
        return 2 * (1 - c**2) * weight / (np.exp(beta) + weight if normalization == "softmax" else 2.0)

    exact = solve_ivp(slope, (0, 3), [np.cos(angle)], t_eval=times, method="DOP853", rtol=1e-13, atol=1e-13).y[0]
    flow = SphereFlow(start, beta, normalization=normalization)
    found = solve(flow, start, t_eval=times, integrator=RungeKutta(rtol=1e-12, atol=1e-13))
    assert np.abs((found.u[:, 0] * found.u[:, 1]).sum(axis=1) - exact).max() < 1e-10


def plain(x: Any, beta: float, normalization: str, query: Any, key: Any, value: Any, seen: Any = None) -> Any:
    """Return the velocity by double sums, token after token."""
    count = len(x)
    k = np.array([[np.exp(beta * (x[i] @ query) @ (x[j] @ key)) for j in range(count)] for i in range(count)])
    k = k if seen is None else k * seen
    if normalization == "sinkhorn":
        u, v = np.ones(count), np.ones(count)
        for _ in range(500):
            v = 1 / (k.T @ u)
            u = 1 / (k @ v)
        weights = u[:, None] * k * v
    else:
        weights = k / (k.sum(axis=1, keepdims=True) if normalization == "softmax" else count)
    result = np.zeros_like(x)
    for i in range(count):
        moved = sum(weights[i, j] * (x[j] @ value) for j in range(count))
        result[i] = moved - (x[i] @ moved) * x[i]
    return result


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
@pytest.mark.parametrize("blocks", [1, 5])
def test_velocity_is_the_double_sum(normalization: str, blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "_BLOCK_BYTES", 8 * 12 * (12 if blocks == 1 else 3))
    x, rng = tokens(), np.random.default_rng(2)
    maps = [rng.standard_normal((3, n)) for n in (2, 2, 3)]
    flow = SphereFlow(
        tokens(seed=5), 1.5, query_map=maps[0], key_map=maps[1], value_map=maps[2], normalization=normalization
    )
    assert np.abs(flow.velocity(x) - plain(x, 1.5, normalization, *maps)).max() < 1e-11
    assert not flow.has_energy
    assert np.isnan(flow.energy(x))


def test_masks_are_those_of_affinities() -> None:
    x, eye = tokens(), np.eye(3)
    flow = SphereFlow(x, 3.0, mask=Mask(causal=True))
    expected = plain(x, 3.0, "softmax", eye, eye, eye, np.tril(np.ones((12, 12))))
    assert np.abs(flow.velocity(x) - expected).max() < 1e-13
    assert not flow.has_energy
    assert flow.velocity(x)[0] == pytest.approx(0, abs=1e-15)  # the first token sees itself alone


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
@pytest.mark.parametrize("slope", [1.0, -0.7])
@pytest.mark.parametrize("mapped", [False, True])
def test_velocity_is_the_gradient_of_the_energy(normalization: str, slope: float, mapped: bool) -> None:
    """With r_i = sum_j k_ij / N for softmax, 1 otherwise: r_i dx_i/dt = -N grad_i, by central differences."""
    x, beta, step = tokens(7), 1.3, 1e-5
    query = symmetric(3) if mapped else None
    both = np.eye(3) if query is None else query
    flow = SphereFlow(x, beta, query_map=query, value_map=slope * both, normalization=normalization)
    assert flow.has_energy
    gradient = np.zeros_like(x)
    for i in range(7):
        for axis in range(3):
            moved = []
            for sign in (1, -1):
                y = x.copy()
                y[i, axis] += sign * step
                moved.append(flow.energy(y))  # the formula holds off the sphere as well
            gradient[i, axis] = (moved[0] - moved[1]) / (2 * step)
    gradient -= (gradient * x).sum(axis=1, keepdims=True) * x
    mass = np.exp(beta * x @ both @ x.T).mean(axis=1, keepdims=True) if normalization == "softmax" else 1.0
    assert np.abs(mass * flow.velocity(x) + 7 * gradient).max() < 1e-7
    assert np.abs(gradient).max() > 1e-3


def test_no_energy_where_maps_descend_none() -> None:
    x = tokens()
    skew = np.array([[0.0, 1, 0], [-1, 0, 0], [0, 0, 1]])
    assert not SphereFlow(x, value_map=skew).has_energy
    assert not SphereFlow(x, query_map=skew, value_map=skew).has_energy
    assert not SphereFlow(x, value_map=np.zeros((3, 3))).has_energy
    assert not SphereFlow(x, beta=0.0).has_energy


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
def test_energy_falls_and_tokens_keep_their_length(normalization: str) -> None:
    x = tokens(16)
    flow = SphereFlow(x, 2.0, normalization=normalization)
    for integrator in (RungeKutta(), GeodesicEuler(0.05), GeodesicMidpoint(0.1), LayerStep(0.05)):
        found = solve(flow, x, t_eval=np.linspace(0, 1.0, 6), integrator=integrator)
        assert np.all(np.diff(found.energy) < 0), integrator
        assert np.abs(np.linalg.norm(found.u, axis=-1) - 1).max() < 4e-16, integrator


@pytest.mark.parametrize(("method", "order"), [(GeodesicEuler, 1), (GeodesicMidpoint, 2), (LayerStep, 1)])
@pytest.mark.parametrize("normalization", ["softmax", "none"])
def test_order(method: Any, order: int, normalization: str) -> None:
    x = tokens(10, 4)
    flow = SphereFlow(x, 1.0, normalization=normalization)
    exact = solve(flow, x, t=1.0, integrator=RungeKutta(rtol=1e-12, atol=1e-13)).final
    steps = [1 / 20, 1 / 40, 1 / 80, 1 / 160]
    errors = [np.abs(solve(flow, x, t=1.0, integrator=method(dt)).final - exact).max() for dt in steps]
    assert method.order == order
    assert abs(regress(np.log(steps), np.log(errors)).slope - order) < 0.1


def test_a_geodesic_step_is_the_exponential_map() -> None:
    """One token pulled by a map alone: exp_x(v) = cos|v| x + sin|v| v / |v|."""
    x = tokens(2)
    flow = SphereFlow(x, beta=0.0, value_map=2 * symmetric(3))
    v = flow.velocity(x)
    size = np.linalg.norm(v, axis=1, keepdims=True)
    expected = np.cos(size / 2) * x + np.sin(size / 2) * v / size
    assert np.abs(solve(flow, x, t=0.5, integrator=GeodesicEuler(0.5)).final - expected).max() < 1e-15


def test_a_layer_is_attention_residual_and_norm() -> None:
    x, beta = tokens(6), 3.0
    weights = np.exp(beta * x @ x.T)
    layer = x + weights / weights.sum(axis=1, keepdims=True) @ x
    expected = layer / np.linalg.norm(layer, axis=1, keepdims=True)
    assert np.abs(solve(SphereFlow(x, beta), x, t=1.0, integrator=LayerStep(1.0)).final - expected).max() < 1e-15


def test_clusters_are_chains_of_near_tokens() -> None:
    angles = np.array([0.0, 2.0, 0.05, 2.05, 4.0, 0.1])
    x = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    flow = SphereFlow(x)
    assert flow.clusters(x, 0.998).tolist() == [0, 1, 0, 1, 2, 0]  # 0 and 0.1 are joined by 0.05
    assert flow.clusters(x, 0.9999).tolist() == [0, 1, 2, 3, 4, 5]
    assert flow.clusters(x, -1.0).tolist() == [0] * 6


def test_everything_becomes_one_cluster() -> None:
    """Tokens of a hemisphere do so exponentially fast (arXiv 2312.10794, section 4)."""
    x = on_sphere(np.abs(np.random.default_rng(4).standard_normal((20, 3))))
    found = solve(SphereFlow(x), x, t_eval=[0, 4, 8, 12])
    spread = 1 - np.einsum("tnd,tmd->tnm", found.u, found.u).min(axis=(1, 2))
    rates = np.diff(np.log(spread)) / -4
    assert np.allclose(rates[1:], 2.0, rtol=1e-2)  # the angle decays like e^-t, its square like e^-2t


def test_float32_and_tensors() -> None:
    torch = pytest.importorskip("torch")
    x = tokens(9)
    exact = solve(SphereFlow(x, 2.0), x, t=2.0, integrator=GeodesicMidpoint(0.05)).final
    single = x.astype(np.float32)
    found = solve(SphereFlow(single, 2.0), single, t=2.0, integrator=GeodesicMidpoint(0.05)).final
    assert found.dtype == np.float32
    assert np.abs(found - exact).max() < 5e-6  # 40 steps, a rounding each
    for normalization in NORMALIZATIONS:
        given = torch.from_numpy(x)
        flow = SphereFlow(given, 2.0, normalization=normalization, value_map=torch.eye(3, dtype=given.dtype))
        same = solve(flow, given, t=1.0, integrator=GeodesicMidpoint(0.05))
        other = solve(SphereFlow(x, 2.0, normalization=normalization), x, t=1.0, integrator=GeodesicMidpoint(0.05))
        assert isinstance(same.final, torch.Tensor)
        assert np.abs(same.final.numpy() - other.final).max() < 1e-13
        assert np.allclose(same.energy, other.energy, rtol=1e-13)


def test_permutations_and_rotations() -> None:
    x, rng = tokens(10), np.random.default_rng(3)
    order, turn = rng.permutation(10), np.linalg.qr(rng.standard_normal((3, 3)))[0]
    flow = SphereFlow(x, 3.0)
    assert np.abs(flow.velocity(x[order]) - flow.velocity(x)[order]).max() < 1e-15
    assert np.abs(flow.velocity(x @ turn) - flow.velocity(x) @ turn).max() < 1e-14


def test_a_resumed_run_has_the_same_bits(tmp_path: Any) -> None:
    x = tokens(8)
    flow, path = SphereFlow(x, 3.0), tmp_path / "run.npz"
    whole = solve(flow, x, t=2.0, integrator=GeodesicMidpoint(0.1)).final

    def stop(t: float, u: Any, energy: Any) -> str | None:
        del u, energy
        return "enough" if t > 0.95 else None

    trackers = [Callback(stop), Checkpoint(path, every=1)]
    solve(flow, x, t=2.0, integrator=GeodesicMidpoint(0.1), trackers=trackers)
    resumed = solve(flow, x, t=2.0, integrator=GeodesicMidpoint(0.1), resume=path)
    assert np.array_equal(resumed.final, whole)
    other = SphereFlow(x, 3.0, value_map=2 * np.eye(3))
    with pytest.raises(Exception, match="another problem"):
        solve(other, x, t=2.0, integrator=GeodesicMidpoint(0.1), resume=path)


def test_what_cannot_be() -> None:
    x = tokens()
    with pytest.raises(InputError, match=r"tokens: got tokens of length 2 to 2, expected 1; .* nlflow.on_sphere"):
        SphereFlow(2 * x)
    with pytest.raises(InputError, match="start: got tokens of length"):
        solve(SphereFlow(x), 1.001 * x, t=1.0)
    with pytest.raises(InputError, match=r"start: got shape \(12, 4\), expected \(12, 3\)"):
        solve(SphereFlow(x), tokens(12, 4), t=1.0)
    with pytest.raises(InputError, match="tokens: got token 1 of length 0"):
        on_sphere([[1.0, 2.0], [0.0, 0.0]])
    with pytest.raises(InputError, match="at least 2"):
        SphereFlow(np.ones((3, 1)))
    with pytest.raises(InputError, match=r"query_map: got shape .* expected 3 rows"):
        SphereFlow(x, query_map=np.eye(2))
    with pytest.raises(InputError, match="query_map: got 2 columns, expected 3"):
        SphereFlow(x, query_map=np.ones((3, 2)))
    with pytest.raises(InputError, match=r"value_map: got shape \(3, 2\)"):
        SphereFlow(x, value_map=np.ones((3, 2)))
    with pytest.raises(InputError, match="mask: got one with normalization='sinkhorn'"):
        SphereFlow(x, normalization="sinkhorn", mask=Mask(causal=True))
    with pytest.raises(InputError, match="mask: got ndarray, expected a Mask"):
        SphereFlow(x, mask=np.ones((12, 12), bool))
    with pytest.raises(InputError, match="normalization: got 'layer'"):
        SphereFlow(x, normalization="layer")
    with pytest.raises(NumericalError, match="use normalization='softmax'"):
        SphereFlow(x, 1000.0, normalization="none").velocity(x)
    assert SphereFlow(x, 1000.0).energy(x) == -np.inf
    keys = affinity(ExpDotProduct(), Points(np.arange(12.0)), x)
    with pytest.raises(InputError, match="GeodesicEuler is for a SphereFlow, got AttentionFlow"):
        solve(AttentionFlow(keys), x, t=1.0, integrator=GeodesicEuler(0.1))
    with pytest.raises(InputError, match="not linear"):
        solve(SphereFlow(x), x, t=1.0, integrator=ExplicitEuler(0.1))
    with pytest.raises(InputError, match="domain: got nodes of different weights"):
        rows.RowAffinity(ExpDotProduct(), Points(np.arange(12.0), np.arange(1.0, 13.0)), x)


def test_steps_that_throw_clusters_apart_are_refused() -> None:
    """Around a cluster of all tokens deviations decay at the rate 1, or exp(beta) without a normalization."""
    x = on_sphere(tokens(6) * 1e-3 + np.array([1.0, 0, 0]))
    for normalization, rate in (("softmax", 1.0), ("none", np.exp(2.0)), ("sinkhorn", 1.0)):
        flow = SphereFlow(x, 2.0, normalization=normalization)
        assert flow.rate == pytest.approx(rate)
        for method in (GeodesicEuler, GeodesicMidpoint):
            with pytest.raises(StabilityError, match="tokens of a cluster meet at the rate"):
                solve(flow, x, t=5.0, integrator=method(2.01 / rate))
            spread = [np.ptp(u, axis=0).max() for u in solve(flow, x, t=40 / rate, integrator=method(1.99 / rate)).u]
            assert spread[-1] < spread[0]
    mapped = SphereFlow(x, 2.0, query_map=2 * np.eye(3), value_map=3 * np.eye(3), normalization="none")
    assert mapped.rate == pytest.approx(3 * np.exp(4.0))


def test_a_layer_that_leaves_no_direction_is_refused() -> None:
    x = on_sphere(np.ones((3, 2)))
    found = solve(SphereFlow(x, value_map=-np.eye(2)), x, t=1.0, integrator=LayerStep(1.0))
    assert not found.success
    assert "no direction is left" in found.message


def test_lengths_of_any_size() -> None:
    x = tokens(4)
    for size in (1e-300, 1e300):
        assert np.abs(on_sphere(size * x) - x).max() < 4e-16


def test_rows_are_the_dense_affinity() -> None:
    rng = np.random.default_rng(0)
    x, u = rng.standard_normal((20, 4)), rng.standard_normal((20, 2))
    kernel, domain = ExpDotProduct(scale=2.0, amplitude=3.0), Points(np.arange(20.0))
    for mask in (None, Mask(window=3), Mask(causal=True)):
        dense, light = affinity(kernel, domain, x, mask=mask, method="dense"), rows.RowAffinity(kernel, domain, x, mask)
        assert np.abs(dense.average(u) - light.average(u)).max() < 1e-14
        assert np.abs(dense.log_degree - light.log_degree).max() < 1e-13
        assert (light.symmetric, light.evolves) == (dense.symmetric, True)
    again = rows.RowAffinity(kernel, domain, u[:, :2]).update(x)
    assert np.array_equal(again.average(u), rows.RowAffinity(kernel, domain, x).average(u))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("normalization", ["softmax", "none"])
def test_many_tokens_have_the_velocity_of_a_table(normalization: str, dtype: str) -> None:
    x = tokens(600, 4, 21).astype(dtype)
    flow = SphereFlow(x, beta=3.0, query_map=symmetric(4).astype(dtype), normalization=normalization)
    wide = x.astype(np.float64)
    weights = np.exp(3.0 * (wide @ symmetric(4)) @ wide.T)
    weights /= weights.sum(axis=1, keepdims=True) if normalization == "softmax" else 600
    pulled = weights @ wide
    expected = pulled - (pulled * wide).sum(axis=1, keepdims=True) * wide
    size = np.abs(pulled).max()
    found = flow.velocity(x)
    assert found.dtype == x.dtype
    assert np.abs(found - expected).max() <= (2e-6 if dtype == "float32" else 1e-13) * size


def test_clusters_of_many_tokens_are_connected_components() -> None:
    """Against connected components of the table of all cosines."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    x = tokens(700, 3, 22)
    flow = SphereFlow(x)
    for cosine in (0.9, 0.99, 0.999, 1 - 1e-9):
        found = flow.clusters(x, cosine)
        expected = connected_components(coo_array(x @ x.T >= cosine), directed=False)[1]
        pairs = set(zip(found.tolist(), expected.tolist(), strict=True))
        assert len(pairs) == found.max() + 1 == expected.max() + 1
        assert found[np.unique(found, return_index=True)[1]].tolist() == sorted(set(found.tolist()))
