"""Particles: against plain double sums, differences of their energy and closed forms; what they keep and refuse."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from nlflow import Formula, Gaussian, InputError, RungeKutta, solve
from nlflow.flows import External, ParticleFlow, Status, StoermerVerlet, trap
from nlflow.flows.checkpoints import fingerprint
from nlflow.kernels import Interaction, Morse, PowerLaws, Wendland
from nlflow.studies.fits import regress
from nlflow.testing import check_flow

pytestmark = pytest.mark.numerical

INTERACTIONS = [
    Morse(),
    Morse(1.0, 0.05, 0.5, 0.1),
    PowerLaws(2, 0),
    PowerLaws(4, 1.5),
    Interaction(Gaussian(0.1), strength=-2.0),
    Interaction(Formula("exp(-r**1.5)", width=0.3)),
    Interaction("minimum(r*r, 0.01) / 2"),
    Interaction(Wendland(0.2)),
]
ROUNDING = {"float32": 1e-6, "float64": 1e-14}  # of the sum of sizes of forces


def drawn(count: int, d: int, seed: int = 0, dtype: str = "float64") -> Any:
    return np.random.default_rng(seed).random((count, d)).astype(dtype)


def double_sum(w: Any, interaction: Any, x: Any, box: Any = None) -> tuple[Any, float]:
    """Return -sum_j w_j grad W(x_i - x_j), and the largest sum of sizes, by a table of all pairs in float64."""
    x = x.astype(np.float64)
    gaps = x[:, None] - x
    if box is not None:
        gaps = gaps - np.where(box > 0, box * np.round(gaps / np.where(box > 0, box, 1)), 0)
    r = np.sqrt((gaps**2).sum(-1))
    apart = np.where(r > 0, r, 1.0)
    sizes = np.where(r > 0, interaction.slope(apart) / apart, 0)[..., None] * gaps
    return -np.einsum("j,ijc->ic", w, sizes), float(np.einsum("j,ijc->ic", w, np.abs(sizes)).max())


@pytest.mark.sampled(8)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("d", [1, 2, 3, 5])
@pytest.mark.parametrize("interaction", INTERACTIONS, ids=lambda w: repr(w)[:60])
def test_forces_are_a_plain_double_sum(interaction: Any, d: int, dtype: str) -> None:
    w = np.random.default_rng(1).uniform(0.1, 1.0, 450)
    for box in (None, np.array([0.0] + [3.0] * (d - 1))):
        if box is not None and (interaction.reach(1e-6) > 1.5 or d == 1):
            continue
        x = drawn(450, d, dtype=dtype) * (1 if box is None else 3)
        flow = ParticleFlow(x, interaction, weights=w, box=None if box is None else [p or None for p in box])
        expected, size = double_sum(w, interaction, x, box)
        found = flow.velocity(x)
        assert found.dtype == x.dtype
        assert np.abs(found - expected).max() <= ROUNDING[dtype] * size
        assert np.abs(flow.momentum(x)).max() <= ROUNDING[dtype] * size * w.sum()


@pytest.mark.parametrize("interaction", INTERACTIONS[:5], ids=lambda w: repr(w)[:60])
def test_forces_are_differences_of_the_energy(interaction: Any) -> None:
    rng = np.random.default_rng(2)
    x, w = rng.standard_normal((40, 3)), rng.uniform(0.1, 1.0, 40)
    flow = ParticleFlow(x, interaction, weights=w, potential=trap(0.7, [0.1, 0.2, 0.3]))
    v, step = rng.standard_normal((40, 3)), 1e-6
    slope = (flow.energy(x + step * v) - flow.energy(x - step * v)) / (2 * step)
    expected = -float(np.sum(w[:, None] * flow.velocity(x) * v))
    assert slope == pytest.approx(expected, rel=1e-6, abs=1e-6 * np.abs(w[:, None] * flow.velocity(x) * v).sum())


@pytest.mark.parametrize("interaction", INTERACTIONS, ids=lambda w: repr(w)[:60])
def test_energies_are_plain_double_sums_over_pairs(interaction: Any) -> None:
    x, w = drawn(400, 2, 3), np.random.default_rng(4).uniform(0.1, 1.0, 400)
    r = np.sqrt(((x[:, None] - x) ** 2).sum(-1))
    above = np.triu_indices(400, 1)
    expected = float(np.sum((w[:, None] * w)[above] * interaction(r[above])))
    assert ParticleFlow(x, interaction, weights=w).energy(x) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    "text",
    [
        "4 * (r**-12 - r**-6)",
        "r**-6",
        "r**-3",
        "(r*r + 1e-4)**-6",
        "1e9 * exp(-r/0.01) - exp(-r)",
        "1 / sqrt(r*r + 1e-8)",
    ],
)
def test_what_is_huge_where_no_particle_is_hides_nothing(text: str, dtype: str) -> None:
    lattice = np.stack(np.meshgrid(*[np.arange(18.0)] * 2), -1).reshape(-1, 2)
    x = (1.1 * lattice + 0.1 * drawn(324, 2, 8)).astype(dtype)
    interaction, w, above = Interaction(text), np.full(324, 1 / 324), np.triu_indices(324, 1)
    flow = ParticleFlow(x, interaction)
    expected, size = double_sum(w, interaction, x)
    assert np.abs(flow.velocity(x) - expected).max() <= 4 * ROUNDING[dtype] * size
    r = np.sqrt(((x[:, None].astype(np.float64) - x) ** 2).sum(-1))[above]
    assert flow.energy(x) == pytest.approx(np.sum(interaction(r)) / 324**2, rel=1e-13)


def test_particles_that_coincide_have_the_energy_of_their_pairs() -> None:
    x, w = np.array([[0.0, 1.0], [0.0, 1.0], [-0.0, 1.0], [3.0, 0.0]]), np.array([0.5, 1.0, 2.0, 4.0])
    met, apart = 0.5 * 1 + 0.5 * 2 + 1 * 2, 3.5 * 4 * np.exp(-np.sqrt(10))
    for text, far in (("exp(-r)", 0.0), ("3 + exp(-r)", 3.0 * (met + 3.5 * 4))):
        assert ParticleFlow(x, Interaction(text), weights=w).energy(x) == pytest.approx(met + apart + far, rel=1e-14)


@pytest.mark.parametrize("interaction", INTERACTIONS, ids=lambda w: repr(w)[:60])
def test_flows_of_particles_keep_the_promises_of_flows(interaction: Any) -> None:
    x = drawn(50, 2, 5) * 2
    check_flow(ParticleFlow(x, interaction, potential=trap()), x)
    check_flow(ParticleFlow(x, interaction, friction=0.3), np.hstack([x, 0.1 * x]))


def test_forces_follow_permutations_shifts_and_turns() -> None:
    x, rng = drawn(300, 3, 6), np.random.default_rng(7)
    flow = ParticleFlow(x, PowerLaws(2, 0))
    v, order = flow.velocity(x), rng.permutation(300)
    turn = np.linalg.qr(rng.standard_normal((3, 3)))[0]
    size = 1e-11 * np.abs(v).max()
    assert np.abs(flow.velocity(x[order]) - v[order]).max() <= size
    assert np.abs(flow.velocity(x + np.array([0.3, -0.2, 0.1])) - v).max() <= size * 100  # differences of other numbers
    assert np.abs(flow.velocity(x @ turn) - v @ turn).max() <= size * 100


def test_two_particles_follow_their_closed_form() -> None:
    """q = r^2 of W = r^2/2 - log r with weights that sum to 1: q' = -2 (q - 1)."""
    x = np.array([[0.0, 0.0], [1.5, 2.0]])
    flow = ParticleFlow(x, PowerLaws(2, 0), weights=[0.25, 0.75])
    times = np.array([0.0, 0.3, 1.0, 3.0])
    found = solve(flow, x, t_eval=times, integrator=RungeKutta(1e-10, 1e-12))
    q = ((found.u[:, 0] - found.u[:, 1]) ** 2).sum(-1)
    assert q == pytest.approx(1 + 5.25 * np.exp(-2 * times), rel=1e-8)
    assert 0.25 * found.u[:, 0] + 0.75 * found.u[:, 1] == pytest.approx(
        np.tile(0.25 * x[0] + 0.75 * x[1], (4, 1)), abs=1e-14
    )


@pytest.mark.slow
def test_the_order_of_runge_kutta_is_its_own_on_particles() -> None:
    x = drawn(12, 2, 8) * 2
    flow = ParticleFlow(x, Interaction(Gaussian(0.6)), potential=trap(0.5), friction=0.4)  # smooth everywhere
    u = np.hstack([x, 0.3 - 0.5 * x[::-1]])
    exact = solve(flow, u, t=2.0, integrator=RungeKutta(1e-13, 1e-14)).final
    steps = np.array([0.1, 0.05, 0.025])
    errors = [
        np.abs(solve(flow, u, t=2.0, integrator=RungeKutta(dt=h, adaptive=False)).final - exact).max() for h in steps
    ]
    assert regress(np.log(steps), np.log(errors)).slope == pytest.approx(5.0, abs=0.2)


def test_energies_fall_and_momentum_stays() -> None:
    x = np.random.default_rng(9).standard_normal((60, 2))
    found = solve(ParticleFlow(x, Morse()), x, t_eval=np.linspace(0, 4, 9))
    assert found.success
    assert (np.diff(found.energy) < 0).all()
    assert found.u.mean(axis=1) == pytest.approx(np.tile(x.mean(axis=0), (9, 1)), abs=1e-14)
    u = np.hstack([x, np.ones_like(x)])
    falling = solve(ParticleFlow(x, Morse(), friction=0.5), u, t_eval=np.linspace(0, 2, 5))
    assert (np.diff(falling.energy) < 0).all()
    kept = solve(ParticleFlow(x, Morse(), friction=0.0), u, t_eval=[0.0, 2.0], integrator=RungeKutta(1e-11, 1e-12))
    assert kept.energy[1] == pytest.approx(kept.energy[0], rel=1e-9)
    assert kept.final[:, 2:].mean(axis=0) == pytest.approx(np.ones(2), abs=1e-14)


def test_inertia_in_a_trap_is_a_damped_oscillator() -> None:
    x = np.array([[1.0, -2.0]])
    flow = ParticleFlow(x, potential=trap(2.0), friction=0.4)
    found = solve(flow, np.hstack([x, 0 * x]), t=3.0, integrator=RungeKutta(1e-12, 1e-13)).final
    rate = np.sqrt(2.0 - 0.04)
    share = np.exp(-0.6) * (np.cos(rate * 3) + 0.2 / rate * np.sin(rate * 3))
    assert found[:, :2] == pytest.approx(x * share, rel=1e-9)


def test_the_step_of_verlet_falls_as_fast_as_friction_lets_it() -> None:
    """A constant force g and friction give v = g / friction (1 - exp(-friction t)) in steps of any length."""
    x, g = np.array([[0.0, 1.0]]), np.array([0.0, -9.81])
    fall = External(lambda x: -(x @ g), lambda x: 0 * x - g)
    flow = ParticleFlow(x, potential=fall, friction=40.0)
    found = solve(flow, np.hstack([x, 0 * x]), t_eval=np.linspace(0, 1, 6), integrator=StoermerVerlet(0.1))
    assert found.u[:, 0, 2:] == pytest.approx(-np.expm1(-40 * found.t)[:, None] * g / 40, rel=1e-13)
    same = solve(flow, np.hstack([x, 0 * x]), t_eval=np.linspace(0, 1, 6), integrator=StoermerVerlet(0.1, stride=2))
    assert same.u == pytest.approx(found.u, rel=1e-14)


def test_runs_of_particles_are_told_apart_by_what_functions_do() -> None:
    x = drawn(6, 2, 12)
    times, step = np.array([0.0, 1.0]), RungeKutta()

    def told(w: Any, v: Any) -> str:
        return fingerprint(ParticleFlow(x, Interaction(w), potential=v), x, times, step)

    def slope(factor: float) -> External:
        return External(lambda x: factor * x[:, 0], lambda x: 0 * x + factor * np.array([1.0, 0.0]))

    first = told(lambda r: np.exp(-r), slope(1.0))
    assert " at 0x" not in repr(Interaction(lambda r: np.exp(-r)))
    assert told(lambda r: np.exp(-r), slope(1.0)) == first  # another function that does the same, as in another process
    assert told(lambda r: np.exp(-2 * r), slope(1.0)) != first
    assert told(lambda r: np.exp(-r), slope(2.0)) != first


def test_positions_just_below_a_box_are_within_it() -> None:
    x = np.array([[-1e-20], [0.5]])
    flow = ParticleFlow(x, PowerLaws(2, 0, cutoff=0.4), box=1.0)
    assert flow.wrapped(x).max() < 1.0
    assert np.isfinite(flow.velocity(x)).all()


def test_propelled_particles_reach_their_speed_and_have_no_falling_energy() -> None:
    x = drawn(20, 2, 10)
    flow = ParticleFlow(x, friction=-1.0, drag=0.25)
    found = solve(flow, np.hstack([x, x - 0.4]), t=30.0)
    assert np.linalg.norm(flow.velocities(found.final), axis=1) == pytest.approx(2.0, rel=1e-6)
    assert np.isnan(found.energy).all()
    assert flow.total_energy(found.final) == pytest.approx(2.0, rel=1e-6)


def test_a_box_has_the_forces_of_its_images() -> None:
    """Against an open sum over particles and their nearest images written out."""
    x, interaction = drawn(80, 2, 11), Interaction(Wendland(0.4))
    flow = ParticleFlow(x, interaction, box=(1.0, None))
    images = np.concatenate([x + np.array([k, 0]) for k in (-1, 0, 1)])
    every = ParticleFlow(images, interaction, weights=np.full(240, 1 / 80))
    assert np.abs(flow.velocity(x) - every.velocity(images)[80:160]).max() <= 1e-15
    moved = x + np.array([7.0, 0.0])
    assert np.abs(flow.velocity(moved) - flow.velocity(x)).max() <= 1e-13
    assert flow.wrapped(moved) == pytest.approx(x, abs=1e-14)


def test_tensors_have_the_forces_of_arrays() -> None:
    x = drawn(120, 2, 12)
    for interaction, box in ((Morse(), None), (Interaction(Wendland(0.4)), 1.0)):
        flow, own = ParticleFlow(x, interaction, box=box), ParticleFlow(torch.tensor(x), interaction, box=box)
        found = own.velocity(torch.tensor(x))
        assert found.dtype == torch.float64
        assert found.numpy() == pytest.approx(flow.velocity(x), rel=1e-11, abs=1e-14)
    assert solve(own, torch.tensor(x), t=0.1).success


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_particles_that_fall_together_are_named(dtype: str) -> None:
    x = np.array([[0.0, 0.0], [1.0, 0.0], [0.5, 3.0]], dtype)
    loose = RungeKutta(1e-4, 1e-5) if dtype == "float32" else RungeKutta()
    found = solve(ParticleFlow(x, Interaction("log(r)")), x, t=5.0, integrator=loose)
    assert found.status is Status.STEP_FAILED
    assert "particles 0 and 1 collide" in found.message
    assert "soften" in found.message
    soft = Interaction("log(r*r + 0.01) / 2")
    assert solve(ParticleFlow(x, soft), x, t=1.0, integrator=loose).success


SAME = np.array([[0.0, 1.0], [2.0, 0.5], [0.0, 1.0]])


def test_no_energy_is_told_of_places_that_are_no_numbers() -> None:
    x = drawn(30, 2, 13)
    assert ParticleFlow(x, Morse()).total_energy(np.where(x == x.max(), np.nan, x)) == np.inf


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda x: ParticleFlow(SAME, PowerLaws(2, 0)), "particles 0 and 2 collide"),
        (lambda x: ParticleFlow(x, Morse(), box=1.0), "twice the range"),
        (lambda x: ParticleFlow(x, Interaction("1 / sqrt(r*r + 1e-8)"), box=10.0), "with a cutoff of 5"),
        (lambda x: ParticleFlow(x, Morse(), box=(40.0,)), "expected 2, one for each dimension"),
        (lambda x: ParticleFlow(x, Morse(), box=-1.0), "box"),
        (lambda x: ParticleFlow(np.where(x > 0.9, np.nan, x), Morse()), "NaN"),
        (lambda x: ParticleFlow(x[:, 0], Morse()), "a column"),
        (lambda x: ParticleFlow(x, "exp(-r)"), "expected an Interaction"),  # type: ignore[arg-type]
        (lambda x: ParticleFlow(x, Morse(), weights=[1.0]), "weights"),
        (lambda x: ParticleFlow(x, Morse(), drag=1.0), "friction=0.0"),
        (lambda x: ParticleFlow(x, Morse(), friction=-1.0), "give a drag"),
        (lambda x: ParticleFlow(x, potential=External(lambda x: (x**2).sum(-1), lambda x: x)), "differs by"),
        (lambda x: ParticleFlow(x, potential=External(lambda x: x, lambda x: x)), "gave shape"),
        (lambda x: ParticleFlow(x, potential=External(lambda x: 1j * x[:, 0], lambda x: x)), "gives: got complex"),
        (lambda x: External(None, lambda x: x), "^value: got NoneType, expected a function of positions"),
        (lambda x: ParticleFlow(x, potential=trap(1.0, [1.0, 2.0, 3.0])), "^centre: got 3 coordinates, expected 2"),
        (lambda x: ParticleFlow(x, potential=lambda x: x), "expected an External"),  # type: ignore[arg-type]
        (lambda x: solve(ParticleFlow(x, Morse(), friction=0.0), x, t=1.0), "side by side"),
        (lambda x: ParticleFlow(x, Morse()).total_energy(x[:5]), r"^u: got shape \(5, 2\), expected \(30, 2\)"),
        (lambda x: ParticleFlow(x, Morse()).total_energy(np.ma.array(x, mask=x > 0)), "^u: got a masked array"),
        (lambda x: ParticleFlow(x, Morse()).velocity((9 * x).astype(np.uint8)), "^u: got "),
        (lambda x: ParticleFlow(x, Morse()).acceleration((9 * x).astype(int)), "^u: got dtype int64, expected float32"),
        (lambda x: ParticleFlow(x, Morse()).positions([1.0]), "^u: got list, expected an array or a tensor"),
        (lambda x: solve(ParticleFlow(x, Morse()), x[:5], t=1.0), "expected"),
        (lambda x: solve(ParticleFlow(x, Morse()), x.astype(np.float32), t=1.0), "float64"),
    ],
)
def test_what_cannot_move_is_refused(make: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        make(drawn(30, 2, 13))


POTENTIALS: dict[str, Any] = {
    "wells": (lambda x: ((x**2 - 1) ** 2).sum(-1), lambda x: 4 * x * (x**2 - 1), [[1.0], [-1.0]]),
    "Morse": (
        lambda x: ((1 - np.exp(1 - x)) ** 2).sum(-1),
        lambda x: 2 * (1 - np.exp(1 - x)) * np.exp(1 - x),
        [[1.0]],
    ),
    "cosine": (lambda x: (1 + np.cos(x)).sum(-1), lambda x: -np.sin(x), [[np.pi]]),
    "fast": (lambda x: np.sin(1000 * x).sum(-1), lambda x: 1000 * np.cos(1000 * x), [[0.3], [1.0], [-7.7]]),
    "steep": (lambda x: x**2 @ np.array([5e5, 0.5], x.dtype), lambda x: x * np.array([1e6, 1.0], x.dtype), 3),
}


@pytest.mark.parametrize("name", POTENTIALS)
def test_a_right_gradient_is_taken_also_where_it_vanishes_or_is_fast(name: str) -> None:
    value, gradient, places = POTENTIALS[name]
    x = drawn(20, 2, places) if isinstance(places, int) else np.array(places)
    for shift in (0.0, 1e-9, 1e-3):
        External(value, gradient).check(x + shift)


@pytest.mark.parametrize("name", ["wells", "Morse", "cosine", "steep"])
def test_a_right_gradient_in_float32_is_taken(name: str) -> None:
    value, gradient, places = POTENTIALS[name]
    x = drawn(20, 2, places) if isinstance(places, int) else np.array(places)
    for shift in (0.0, 0.1):
        External(value, gradient).check((x + shift).astype(np.float32))


def test_a_wrong_gradient_is_refused_beside_a_steeper_axis_and_in_float32() -> None:
    x = drawn(20, 2, 3)
    steep = POTENTIALS["steep"][0]
    for sign in (-1.0, 0.9, 0.0):
        with pytest.raises(InputError, match="along axis 1"):
            External(steep, lambda x, sign=sign: x * np.array([1e6, sign])).check(x)
    for wrong in (0.99, 1.01):
        off = External(lambda x: (x**2).sum(-1) / 2, lambda x, wrong=wrong: x * x.dtype.type(wrong))
        with pytest.raises(InputError, match="differs by"):
            off.check(x.astype(np.float32))
    for shift in (0.1, 1e-3):
        wells, slopes, places = POTENTIALS["wells"]
        with pytest.raises(InputError, match="differs by"):
            External(wells, lambda x, slopes=slopes: 1.01 * slopes(x)).check(np.array(places) + shift)
