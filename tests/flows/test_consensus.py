"""Averaging agents and oscillators: against plain sums, published models and closed forms."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from nlflow import EulerMaruyama, Gaussian, InputError, Noise, RungeKutta, SemiImplicit, solve
from nlflow.flows import AveragingFlow, Kuramoto, ParticleFlow, StoermerVerlet, hegselmann_krause, mean_shift, trap
from nlflow.kernels import Interaction, Laplace, Matern, Morse, TopHat
from nlflow.studies.fits import regress
from nlflow.testing import check_flow

pytestmark = pytest.mark.numerical


def normal(seed: int, *shape: int) -> Any:
    return np.random.default_rng(seed).standard_normal(shape)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("kernel", [Gaussian(0.2), Matern(0.3), TopHat(0.5), Laplace(0.1)], ids=lambda k: repr(k)[:8])
def test_velocities_are_means_less_positions(kernel: Any, dtype: str) -> None:
    x, y = normal(0, 400, 2).astype(dtype), normal(1, 500, 2).astype(dtype)
    w = np.random.default_rng(2).uniform(0.5, 2.0, 500)
    for seen, weights, flow in (
        (x, np.ones(400), AveragingFlow(x, kernel)),
        (y, w, AveragingFlow(np.round(x), kernel, data=y, weights=w)),
    ):
        here = x if seen is x else y[:400] + np.asarray(0.05, dtype)
        k = np.exp(kernel.log_matrix(here.astype(np.float64), seen.astype(np.float64))) * weights
        expected = k @ seen / k.sum(axis=1, keepdims=True) - here
        assert np.abs(flow.velocity(here) - expected).max() <= (1e-5 if dtype == "float32" else 1e-12)


def test_averaging_flows_and_oscillators_keep_the_promises_of_flows() -> None:
    x = normal(3, 40, 2)
    for flow in (AveragingFlow(x, Gaussian(0.4)), mean_shift(normal(4, 60, 2), 0.5, x), hegselmann_krause(x, 0.5)):
        check_flow(flow, x)
    check_flow(Kuramoto(normal(5, 30), 1.5), normal(6, 30))


def test_mean_shift_climbs_the_density_and_ends_where_its_slope_is_zero() -> None:
    data = np.concatenate([normal(7, 60, 2) * 0.3, normal(8, 60, 2) * 0.3 + 3])
    found = solve(mean_shift(data, 0.6), data, t_eval=[0.0, 1.0, 4.0, 60.0])
    assert (np.diff(found.energy) < 0).all()
    ends = np.unique(np.round(found.final, 4), axis=0)
    assert len(ends) == 2
    for end in found.final[[0, -1]]:
        weights = np.exp(-((end - data) ** 2).sum(axis=1) / (2 * 0.36))
        assert weights @ (data - end) / weights.sum() == pytest.approx(np.zeros(2), abs=1e-5)


def test_steps_of_length_1_are_the_model_of_hegselmann_and_krause() -> None:
    x = np.random.default_rng(9).random((200, 1))
    here = x.copy()
    for _ in range(6):
        seen = np.abs(here - here.T) <= 0.15
        here = seen @ here / seen.sum(axis=1, keepdims=True)
    found = solve(hegselmann_krause(x, 0.15), x, t=6.0, integrator=EulerMaruyama(1.0)).final
    assert found == pytest.approx(here, abs=1e-12)


def test_oscillators_are_their_plain_double_sum() -> None:
    omega, theta = normal(10, 50), 3 * normal(11, 50)
    flow = Kuramoto(omega, 2.5)
    expected = omega + 2.5 / 50 * np.sin(theta[None] - theta[:, None]).sum(axis=1)
    assert flow.velocity(theta) == pytest.approx(expected, abs=1e-13)
    own = Kuramoto(torch.tensor(omega), 2.5).velocity(torch.tensor(theta))
    assert own.numpy() == pytest.approx(expected, abs=1e-13)


def test_oscillators_lock_as_their_mean_field_says() -> None:
    """r = sqrt(1 - 2 g / K) for Lorentzian frequencies of half width g, at their quantiles (Kuramoto 1975)."""
    n = 4000
    omega = 0.5 * np.tan(np.pi * ((np.arange(n) + 0.5) / n - 0.5))
    omega = omega[np.abs(omega) < 60]
    flow = Kuramoto(omega, 2.0)
    found = solve(flow, np.zeros(len(omega)), t_eval=np.linspace(20, 30, 21), integrator=RungeKutta(1e-5, 1e-6))
    order = np.mean([flow.order_parameter(u)[0] for u in found.u])
    assert order == pytest.approx(np.sqrt(1 - 2 * 0.5 / 2.0), abs=0.01)


@pytest.mark.slow
def test_the_order_of_verlet_is_2_and_it_keeps_the_energy() -> None:
    x = normal(12, 15, 2)
    u = np.hstack([x, 0.3 * x[::-1]])
    for friction, drag in ((0.0, 0.0), (-0.5, 0.7), (0.0, 0.5), (2.0, 0.0)):
        flow = ParticleFlow(x, Interaction(Gaussian(0.8)), potential=trap(), friction=friction, drag=drag)
        exact = solve(flow, u, t=2.0, integrator=RungeKutta(1e-9, 1e-10)).final
        steps = np.array([0.1, 0.05, 0.025])
        errors = [np.abs(solve(flow, u, t=2.0, integrator=StoermerVerlet(h)).final - exact).max() for h in steps]
        assert regress(np.log(steps), np.log(errors)).slope == pytest.approx(2.0, abs=0.1)
    flow = ParticleFlow(x, Interaction(Gaussian(0.8)), potential=trap(), friction=0.0)
    found = solve(flow, u, t_eval=np.linspace(0, 50, 11), integrator=StoermerVerlet(0.1))
    assert np.abs(found.energy / found.energy[0] - 1).max() < 3e-3


def test_noise_gives_particles_the_law_of_their_trap() -> None:
    """dx = -k x dt + sqrt(2 / beta) dW has the variance 1 / (beta k)."""
    x = np.zeros((2000, 1))
    flow = ParticleFlow(x, potential=trap(2.0)) + Noise(beta=5.0, white="nodes", rng=1)
    found = solve(flow, x, t=2.0, integrator=EulerMaruyama(0.05), energies=False).final
    assert np.var(found) == pytest.approx(0.1 / (1 - 0.05), rel=4 * np.sqrt(2 / 2000))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda x: AveragingFlow(x, Morse()), "expected a radial one"),
        (lambda x: AveragingFlow(x, Gaussian(1.0), data=x[:, :1]), "as particles have"),
        (lambda x: AveragingFlow(x, Gaussian(1.0), weights=[1.0]), "weights"),
        (lambda x: AveragingFlow(x, Gaussian(1.0), weights=-np.ones(20)), "numbers > 0"),
        (lambda x: mean_shift(x, -1.0), "width"),
        (lambda x: hegselmann_krause(np.where(x > 0, np.nan, x), 0.1), "NaN"),
        (lambda x: solve(hegselmann_krause(x, 0.1), x[:5], t=1.0), "expected .20, 2., that of the particles"),
        (lambda x: solve(hegselmann_krause(x, 0.1), x[:, :1], t=1.0), "that of the particles"),
        (lambda x: Kuramoto(x, 1.0), "expected 1"),
        (lambda x: solve(Kuramoto(x[:, 0], 1.0), x, t=1.0), "phases"),
        (lambda x: solve(ParticleFlow(x, Morse()), x, t=1.0, integrator=StoermerVerlet(0.1)), "with inertia"),
        (lambda x: solve(Kuramoto(x[:, 0], 1.0), x[:, 0], t=1.0, integrator=SemiImplicit(0.1)), "not linear"),
    ],
)
def test_what_cannot_agree_is_refused(make: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        make(normal(13, 20, 2))


def test_a_particle_that_sees_nothing_is_named() -> None:
    data, far = normal(14, 3000, 2) * 0.1, np.array([[3.0, 0.0]])
    k = np.exp(-((far - data) ** 2).sum(axis=1) / 0.08)  # 1e-40
    assert mean_shift(data, 0.2, far).velocity(far) == pytest.approx((k @ data / k.sum() - far), rel=1e-9)
    found = solve(mean_shift(normal(14, 9, 2), 0.01, np.full((2, 2), 9.0)), np.full((2, 2), 9.0), t=1.0)
    assert not found.success
    assert "particle 0 at [9.0, 9.0] sees nothing" in found.message
