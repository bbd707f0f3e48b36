"""Noise as a term of flows: its numbers, its measure, its seed in checkpoints, and what it refuses."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

import nlflow as nl
from nlflow.affinities import Unlinked
from nlflow.backends.numba.normals import loop
from nlflow.errors import FileFormatError, InputError, NumericalError, StabilityError
from nlflow.flows import Noise, normals
from nlflow.flows.flow import Flow
from tests import noise_run
from tests.problems import Floats

WEIGHTS = np.array([0.5, 1.0, 2.0, 0.25, 1.5])
POINTS = nl.Points(np.arange(5.0), WEIGHTS)
WIDE = nl.affinity(nl.Gaussian(width=1.0), POINTS)
START = np.zeros(5)


def flow(metric: str = "l2", **terms: Any) -> nl.GradientFlow:
    return nl.GradientFlow(nl.E(WIDE, START, 0.7, measure=metric), metric, **terms)


# --- numbers ---------------------------------------------------------------------------------------------------------


@pytest.mark.numerical
def test_words_are_those_of_the_published_vectors() -> None:
    """``philox4x32 10`` in the file kat_vectors of Random123 1.14, DEShawResearch/random123."""
    pi = [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344]
    vectors = [
        ([0] * 4, 0, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([2**32 - 1] * 4, 2**64 - 1, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (pi, 0x299F31D0A4093822, [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]),
    ]
    for counter, key, expected in vectors:
        out = np.empty((1, 4), np.uint64)
        loop("words")(np.array([counter], np.uint64), np.uint64(key), out)
        assert out[0].tolist() == expected


@pytest.mark.numerical
def test_normals_are_those_of_box_and_muller_by_numpy() -> None:
    seed, step, stream, count, width = 2**40 + 3, 9, 2, 40, 3
    counters = [[i, c, step, stream] for i in range(count // 2) for c in range(width)]
    words = np.empty((len(counters), 4), np.uint64)
    loop("words")(np.array(counters, np.uint64), np.uint64(seed), words)
    first, second = ((words[:, i] * 2**20 + words[:, i + 1] // 2**12).astype(float) * 2.0**-52 for i in (0, 2))
    radius, turn = np.sqrt(-2 * np.log(1 - first)), 2 * np.pi * second
    pairs = np.stack([radius * np.cos(turn), radius * np.sin(turn)], axis=-1).reshape(-1, width, 2)
    expected = pairs.swapaxes(1, 2).reshape(count, width)
    np.testing.assert_allclose(normals(seed, (count, width), step=step, stream=stream), expected, rtol=0, atol=3e-15)


@pytest.mark.numerical
def test_normals_are_normal_and_independent() -> None:
    found = normals(1, (200_000, 2))
    assert stats.kstest(found[:, 0], "norm").pvalue > 1e-3
    assert stats.kstest(found[:, 0] ** 2 + found[:, 1] ** 2, "chi2", (2,)).pvalue > 1e-3
    others = [normals(2, (200_000, 1)), normals(1, (200_000, 1), step=1), normals(1, (200_000, 1), stream=1), found[1:]]
    for other in others:  # another seed, step, stream, node
        size = min(len(other), len(found))
        assert abs(np.corrcoef(found[:size, 0], other[:size, 0])[0, 1]) < 5 / np.sqrt(size)


@pytest.mark.parametrize(
    ("node", "channel", "count", "width"), [(0, 0, 1, 1), (1, 0, 6, 3), (17, 2, 700, 1), (3, 1, 9, 2)]
)
def test_a_part_has_the_bits_of_the_whole(node: int, channel: int, count: int, width: int) -> None:
    whole = normals(5, (1000, 4), step=3)
    part = normals(5, (count, width), node=node, channel=channel, step=3)
    assert np.array_equal(part, whole[node : node + count, channel : channel + width])
    assert np.isfinite(normals(5, (2, 1), node=2**33 - 2, channel=2**32 - 1, step=2**32 - 1)).all()
    assert np.isfinite(normals(2**64 - 1, (2, 1))).all()


@pytest.mark.parametrize(
    ("name", "value"),
    [("seed", -1), ("seed", 2**64), ("step", 2**32), ("stream", -1), ("node", 2**33), ("channel", 2**32)],
)
def test_counters_out_of_range_are_refused(name: str, value: int) -> None:
    with pytest.raises(InputError, match=rf"{name}: got .*{value}, expected"):
        normals(**{"seed": 1, "shape": (1, 1), name: value})


@pytest.mark.parametrize("shape", [3, (3,), (1, 2, 3), None])
def test_shapes_of_normals_are_pairs(shape: Any) -> None:
    with pytest.raises(InputError, match=r"shape: got .*expected a pair"):
        normals(1, shape)


# --- what it is of flows ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("metric", ["l2", "degree"])
def test_increments_have_the_variance_of_the_measure(metric: str) -> None:
    k = np.exp(-((np.arange(5)[:, None] - np.arange(5)) ** 2) / 2)
    mass = WEIGHTS if metric == "l2" else WEIGHTS * (2 * k @ WEIGHTS)
    one = flow(metric) + Noise(beta=1.0, rng=1)
    assert one.noise is not None
    white = one.noise.increments(one, START, 7, 0.3)
    np.testing.assert_allclose(white, np.sqrt(0.3 / mass) * normals(1, (5, 1), step=7)[:, 0], rtol=1e-13)
    by_nodes = Noise(beta=1.0, rng=1, white="nodes").increments(one, START, 7, 0.3)
    np.testing.assert_allclose(by_nodes, np.sqrt(0.3) * normals(1, (5, 1), step=7)[:, 0], rtol=1e-14)


def test_strengths_per_node_channel_and_by_a_matrix() -> None:
    u, mix = np.ones((5, 2)), np.array([[1.0, 0.0], [0.6, 0.8]])
    white = np.arange(10.0).reshape(5, 2)
    given: list[tuple[dict[str, Any], Floats]] = [
        ({"strength": 3.0}, 3 * white),
        ({"beta": 0.5}, 2 * white),
        ({"strength": WEIGHTS}, WEIGHTS[:, None] * white),
        ({"strength": np.arange(10.0).reshape(5, 2)}, white * white),
        ({"strength": 1.0, "channels": [2.0, 5.0]}, white * [2.0, 5.0]),
        ({"strength": 2.0, "channels": mix}, 2 * white @ mix.T),
        ({"strength": lambda v: v + 1}, 2 * white),
    ]
    for words, expected in given:
        noise = Noise(rng=0, **words)
        noise.check(flow())
        noise.check_start(flow(), u)
        np.testing.assert_allclose(noise.times(flow(), u, white), expected, rtol=1e-15)


@pytest.mark.numerical
def test_single_precision_follows_double_precision() -> None:
    one = flow() + Noise(beta=2.0, rng=4)
    half = nl.solve(nl.GradientFlow(nl.E(WIDE, START.astype(np.float32), 0.7)) + Noise(beta=2.0, rng=4), t=1.0)
    assert half.final.dtype == np.float32
    np.testing.assert_allclose(half.final, nl.solve(one, t=1.0).final, atol=1e-5)


def test_held_nodes_get_no_noise() -> None:
    held = flow(constraint=nl.Constraint([1, 4], [2.0, -1.0])) + Noise(beta=1.0, rng=1)
    assert held.noise is not None
    assert (held.noise.increments(held, START, 0, 1.0) != 0).tolist() == [True, False, True, True, False]
    for step in (nl.EulerMaruyama(0.05), nl.PlatenWeak2(0.05), nl.ExponentialEuler(0.3), nl.ExactGaussian()):
        found = nl.solve(held, t_eval=[0.0, 0.5, 1.0], integrator=step)
        assert found.success
        assert (found.u[:, [1, 4]] == [2.0, -1.0]).all()
        assert (found.u[1, [0, 2, 3]] != found.u[2, [0, 2, 3]]).all()


def test_paths_and_seeds_differ_and_are_told() -> None:
    found = {
        nl.solve(flow() + Noise(beta=1.0, rng=s, path=p), t=1.0).final.tobytes() for s in (1, 2) for p in (0, 1, 2)
    }
    assert len(found) == 6
    told = nl.solve(flow() + Noise(beta=1.0, rng=7), t=1.0)
    assert told.stats["seed"] == 7
    assert all("rng=7" in told.provenance[name] for name in ("noise", "flow"))
    assert Noise(beta=1.0).seed != Noise(beta=1.0).seed
    assert Noise(beta=1.0, rng=np.random.default_rng(3)).seed == Noise(beta=1.0, rng=np.random.default_rng(3)).seed


def test_a_flow_is_not_changed_by_noise() -> None:
    plain = flow()
    noisy = plain + Noise(beta=1.0, rng=1) + nl.AllenCahn()
    assert plain.noise is None
    assert noisy.noise is not None
    assert noisy.terms.reaction is not None
    assert nl.solve(plain, t=1.0).final.tolist() == [0.0] * 5


# --- the same bits ---------------------------------------------------------------------------------------------------


def started(job: str, out: Path, **more: str) -> subprocess.Popen[bytes]:
    path = os.pathsep.join([str(Path(noise_run.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, noise_run.__file__, job, str(out)]
    return subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **more})


@pytest.mark.slow
def test_one_and_two_threads_have_the_same_bits(tmp_path: Path) -> None:
    for count in ("1", "2"):
        assert started("threads", tmp_path / count, NUMBA_NUM_THREADS=count).wait(300) == 0
    one, two = (np.load(tmp_path / f"{count}.npz") for count in ("1", "2"))
    for name in ("normals", "u"):
        assert np.array_equal(one[name], two[name]), name


@pytest.mark.slow
def test_one_and_three_processes_have_the_same_bits(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        pytest.skip("torch is built without gloo")
    more = {"GLOO_SOCKET_IFNAME": "lo", "WORLD_SIZE": "3", "INIT": f"file://{tmp_path / 'init'}"}
    ranks = [started("sharded", tmp_path / "three", RANK=str(rank), **more) for rank in range(3)]
    assert [rank.wait(300) for rank in ranks] == [0, 0, 0]
    three = np.load(tmp_path / "three.npz")
    x, u = torch.from_numpy(noise_run.NODES[:, None]), torch.zeros(noise_run.N, 2, dtype=torch.float64)
    points = nl.Points(noise_run.NODES, volume=1.0)
    for wide in (0.05, 3.0):
        one = noise_run.alone(lambda kernel: nl.affinity(kernel, points, x, method="tiled"), u, wide)
        white = one.noise.increments(one, u, 4, 0.1).numpy()
        path = nl.solve(one, u, t=1.0, integrator=nl.EulerMaruyama(0.1)).final.numpy()
        if wide < 1:  # nodes see themselves alone, so that no sum over nodes is rounded
            assert np.array_equal(three[f"noise {wide}"], white)
            assert np.array_equal(three[f"path {wide}"], path)
        np.testing.assert_allclose(three[f"noise {wide}"], white, rtol=1e-12)
        np.testing.assert_allclose(three[f"path {wide}"], path, atol=1e-12 * np.abs(path).max())
    assert "processes would draw others" in str(three["refused"])


@pytest.mark.slow
def test_a_killed_run_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    file = tmp_path / "checkpoint"
    assert started("killed", file).wait(300) == -signal.SIGKILL
    whole, resumed = noise_run.run(), noise_run.run(resume=file)
    assert np.array_equal(resumed.u, whole.u)
    assert resumed.stats["steps"] == whole.stats["steps"] == 201


@pytest.mark.parametrize(
    "step", [nl.EulerMaruyama(0.1), nl.PlatenWeak2(0.1), nl.ExponentialEuler(0.1), nl.ExactGaussian()]
)
def test_resumed_runs_have_the_bits_of_whole_ones(step: Any, tmp_path: Path) -> None:
    one = flow() + Noise(beta=3.0, rng=11)
    times = [0.0, 0.25, 0.5, 1.0]
    whole = nl.solve(one, t_eval=times, integrator=step)
    looks = iter(range(99))
    stop = nl.flows.Callback(lambda *_: next(looks) >= 2)
    part = nl.solve(one, t_eval=times, integrator=step, trackers=[stop, nl.Checkpoint(tmp_path / "c")])
    assert part.t[-1] < 1.0
    resumed = nl.solve(one, t_eval=times, integrator=step, resume=tmp_path / "c")
    assert np.array_equal(resumed.u, whole.u)


def test_another_seed_and_a_missing_one_are_named_on_resume(tmp_path: Path) -> None:
    drawn = Noise(beta=3.0)
    nl.solve(flow() + drawn, t=1.0, trackers=[nl.Checkpoint(tmp_path / "c")])
    for given, said in (
        (Noise(beta=3.0), "got none"),
        (Noise(beta=3.0, rng=5), "got the seed 5"),
        (None, "one without"),
    ):
        with pytest.raises(FileFormatError, match=f"seed {drawn.seed}") as raised:
            nl.solve(flow() if given is None else flow() + given, t=1.0, resume=tmp_path / "c")
        assert said in str(raised.value)
        assert f"rng={drawn.seed}" in str(raised.value)
    with pytest.raises(FileFormatError, match="another problem"):
        nl.solve(flow() + Noise(beta=4.0, rng=drawn.seed), t=1.0, resume=tmp_path / "c")
    assert nl.solve(flow() + Noise(beta=3.0, rng=drawn.seed), t=1.0, resume=tmp_path / "c").success
    nl.solve(flow(), t=1.0, trackers=[nl.Checkpoint(tmp_path / "d")])
    with pytest.raises(FileFormatError, match="without noise"):
        nl.solve(flow() + drawn, t=1.0, resume=tmp_path / "d")


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({}, "beta or strength"),
        ({"beta": 1.0, "strength": 1.0}, "beta or strength"),
        ({"beta": -1.0}, "beta: got -1"),
        ({"beta": 0.0}, "beta: got 0"),
        ({"beta": float("nan")}, "beta: got nan"),
        ({"beta": float("inf")}, "beta: got inf"),
        ({"strength": -1.0}, "strength: got -1"),
        ({"strength": [[1.0], [1.0, 2.0]]}, "strength: got"),
        ({"strength": [1.0, -2.0]}, "strength: got -2"),
        ({"strength": [1.0, float("nan")]}, "strength: got 1 NaN"),
        ({"strength": 1.0, "channels": np.ones((2, 3))}, "channels: got shape"),
        ({"strength": np.cos, "channels": np.eye(2)}, "not diagonal"),
        ({"beta": 1.0, "white": "pink"}, "white: got 'pink'"),
        ({"beta": 1.0, "rng": -1}, "rng: got -1"),
        ({"beta": 1.0, "rng": 2**64}, "below 2"),
        ({"beta": 1.0, "rng": "seven"}, "rng: got 'seven'"),
        ({"beta": 1.0, "path": -1}, "path: got -1"),
        ({"temperature": 1.0}, "temperature"),
    ],
)
def test_useless_noise_is_refused(words: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        Noise(**words)


def _mean(u: Floats) -> Floats:
    return 0 * u + u.mean()


@pytest.mark.parametrize(
    ("noise", "start", "said"),
    [
        (Noise(strength=[1.0, 2.0], rng=1), START, r"strength: got shape \(2,\), expected \(5,\)"),
        (Noise(strength=np.ones((5, 3)), rng=1), np.ones((5, 2)), "strength: got shape"),
        (Noise(beta=1.0, channels=[1.0, 2.0], rng=1), START, "channels: got shape"),
        (Noise(strength=_mean, rng=1), np.arange(5.0), "each value by itself"),
        (Noise(strength=lambda u: np.ones(3), rng=1), START, r"returns shape \(3,\)"),
        (Noise(strength=lambda u: u * WEIGHTS, rng=1), START, "the function fails"),
        (Noise(strength=lambda u: 1.0, rng=1), START, "returns float"),
    ],
)
def test_noise_that_does_not_fit_is_refused(noise: Noise, start: Floats, said: str) -> None:
    with pytest.raises(InputError, match=said):
        nl.solve(nl.GradientFlow(nl.J(WIDE)) + noise, start, t=1.0, integrator=nl.EulerMaruyama(0.1))


def test_a_strength_that_is_not_finite_ends_the_run() -> None:
    noise = Noise(strength=lambda u: np.sqrt(u - 0.5), rng=1)
    with pytest.raises(NumericalError, match="not finite"):
        nl.solve(flow() + noise, t=1.0, integrator=nl.EulerMaruyama(0.1))
    found = nl.solve(flow() + noise, START + 0.6, t=9.0, integrator=nl.EulerMaruyama(0.1))
    assert not found.success
    assert "not finite" in found.message


@pytest.mark.parametrize(
    "step",
    [
        nl.RungeKutta(),
        nl.Exponential(),
        *(kind(0.1) for kind in (nl.ExplicitEuler, nl.ETD2RK, nl.IMEX, nl.SemiImplicit, nl.ConvexSplitting)),
    ],
)
def test_deterministic_steps_refuse_noise_by_name(step: Any) -> None:
    with pytest.raises(InputError, match=f"{type(step).__name__} takes no noise"):
        nl.solve(flow() + Noise(beta=1.0, rng=1), t=1.0, integrator=step)


def test_flows_that_take_no_noise_and_second_noises() -> None:
    tokens = nl.on_sphere(np.random.default_rng(0).standard_normal((4, 3)))
    with pytest.raises(InputError, match="SphereFlow, which takes no noise"):
        nl.SphereFlow(tokens) + Noise(beta=1.0, rng=1)
    with pytest.raises(InputError, match="has one already"):
        flow() + Noise(beta=1.0, rng=1) + Noise(beta=1.0, rng=2)
    with pytest.raises(InputError, match="expected Noise"):
        nl.PFlow(nl.Jp(WIDE, 2.0)) + nl.AllenCahn()


def test_what_is_not_linear_needs_an_integrator_and_steps_a_stable_length() -> None:
    noisy = flow(reaction=nl.AllenCahn()) + Noise(beta=1.0, rng=1)
    with pytest.raises(InputError, match="integrator: got none"):
        nl.solve(noisy, t=1.0)
    limit = nl.EulerMaruyama(1.0).stability_limit(noisy)
    assert limit == nl.ExplicitEuler(1.0).stability_limit(noisy)
    for step in (nl.EulerMaruyama(1.01 * limit), nl.PlatenWeak2(1.01 * limit), nl.Milstein(1.01 * limit)):
        with pytest.raises(StabilityError, match=f"needs dt < {limit:.4g}"):
            nl.solve(noisy, t=1.0, integrator=step)
    with pytest.raises(StabilityError, match="ExponentialEuler needs dt"):
        nl.solve(noisy, t=9.0, integrator=nl.ExponentialEuler(1.01))
    fading = flow() + Noise(strength=lambda u: u, rng=1)
    with pytest.raises(InputError, match="depends on the signal"):
        nl.solve(fading, t=1.0, integrator=nl.ExactGaussian())
    spotted = Noise(strength=np.ones(1001), rng=1)
    with pytest.raises(InputError, match="takes at most 1000 nodes"):
        nl.solve(
            nl.GradientFlow(nl.J(nl.affinity(nl.Gaussian(2.0), nl.Grid(1001)))) + spotted,
            np.zeros(1001),
            t=1.0,
            integrator=nl.ExactGaussian(),
        )


class Resting(Flow):
    def velocity(self, u: Floats) -> Floats:
        return 0 * u


def test_flows_of_another_kind_take_noise() -> None:
    nodes = Unlinked(nl.Points(np.arange(4.0)))
    alone = Resting(nodes, "l2", None, evolving=False, every=1) + Noise(strength=2.0, white="nodes", rng=6)
    found = nl.solve(alone, np.zeros(4), t=0.2, integrator=nl.EulerMaruyama(0.1))
    expected = 2 * np.sqrt(0.1) * sum(normals(6, (4, 1), step=k)[:, 0] for k in range(2))
    np.testing.assert_allclose(found.final, expected, rtol=1e-14)


# --- particles -------------------------------------------------------------------------------------------------------


def test_particles_in_a_trap_have_the_variance_of_their_temperature() -> None:
    """1 / (beta k) each without inertia, where the step's own error is known; velocities 1 / beta with it."""
    count, beta, stiffness, dt = 20_000, 2.0, 1.5, 0.1
    x = np.zeros((count, 1))
    flow = nl.flows.ParticleFlow(x, potential=nl.flows.trap(stiffness)) + Noise(beta=beta, white="nodes", rng=1)
    found = nl.solve(flow, x, t=6.0, integrator=nl.EulerMaruyama(dt), energies=False).final
    expected = 1 / (beta * stiffness * (1 - stiffness * dt / 2))
    assert abs(float(np.var(found)) / expected - 1) < 5 * np.sqrt(2 / count)
    heavy = nl.flows.ParticleFlow(x, potential=nl.flows.trap(stiffness), friction=3.0)
    heavy = heavy + Noise(beta=beta, white="nodes", rng=1)
    found = nl.solve(heavy, np.zeros((count, 2)), t=8.0, integrator=nl.PlatenWeak2(0.05), energies=False).final
    np.testing.assert_allclose(np.var(found, axis=0), [1 / (beta * stiffness), 1 / beta], rtol=0.04)
    assert nl.solve(heavy, np.zeros((count, 2)), t=0.05, integrator=nl.EulerMaruyama(0.05)).final[0, 0] == 0


def test_the_measure_of_particles_makes_beta_that_of_all() -> None:
    x = np.zeros((10, 2))
    flow = nl.flows.ParticleFlow(x, potential=nl.flows.trap()) + Noise(beta=30.0, rng=1)
    one = nl.flows.ParticleFlow(x, potential=nl.flows.trap()) + Noise(beta=3.0, white="nodes", rng=1)
    ends = [nl.solve(f, x, t=1.0, integrator=nl.EulerMaruyama(0.1)).final for f in (flow, one)]
    np.testing.assert_allclose(ends[0], ends[1], rtol=1e-12)


@pytest.mark.parametrize(
    ("friction", "drag", "noise", "said"),
    [
        (-1.0, 1.0, Noise(beta=1.0, rng=1), "have no temperature"),
        (0.0, 0.0, Noise(beta=1.0, rng=1), "have no temperature"),
        (1.0, 0.5, Noise(beta=1.0, rng=1), "have no temperature"),
        (1.0, 0.0, Noise(strength=np.cos, rng=1), "got a function for particles with inertia"),
    ],
)
def test_noise_that_particles_with_inertia_do_not_take(friction: float, drag: float, noise: Noise, said: str) -> None:
    particles = nl.flows.ParticleFlow(np.zeros((3, 1)), potential=nl.flows.trap(), friction=friction, drag=drag)
    with pytest.raises(InputError, match=said):
        particles + noise
    assert (particles + Noise(strength=1.0, rng=1)).noise is not None


def test_particles_with_noise_resume_with_the_same_bits(tmp_path: Path) -> None:
    x = np.random.default_rng(0).standard_normal((30, 2))
    flow = nl.flows.ParticleFlow(x, nl.kernels.PowerLaws(attraction=4, repulsion=2)) + Noise(beta=100.0, rng=3)
    whole = nl.solve(flow, x, t=1.0, integrator=nl.EulerMaruyama(0.1))
    looks = iter(range(99))
    stop = nl.flows.Callback(lambda *_: next(looks) >= 4)
    nl.solve(flow, x, t=1.0, integrator=nl.EulerMaruyama(0.1), trackers=[stop, nl.Checkpoint(tmp_path / "c")])
    resumed = nl.solve(flow, x, t=1.0, integrator=nl.EulerMaruyama(0.1), resume=tmp_path / "c")
    assert np.array_equal(resumed.final, whole.final)
