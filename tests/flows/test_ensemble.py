"""Ensembles: each path is that of a single run, and intervals hold what they say."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import nlflow as nl
from nlflow.affinities import Unlinked
from nlflow.errors import InputError, MemoryLimitError, NumericalError
from nlflow.flows import Ensemble, Noise
from tests.problems import Floats

N = 24
WEIGHTS = nl.affinity(nl.Gaussian(width=2.0), nl.Grid(N), window=5)
PERIODIC = nl.affinity(nl.Gaussian(width=2.0), nl.Grid(N, boundary="periodic"), method="convolution")
F = np.sin(np.arange(float(N)))


def noise(path: int = 0) -> Noise:
    return Noise(beta=10.0, rng=4, path=path)


def linear(f: Floats = F, weights: Any = WEIGHTS) -> nl.GradientFlow:
    return nl.GradientFlow(nl.E(weights, f, 0.4))


SYSTEM = nl.Reaction(lambda u: 0.5 * np.roll(u, 1, axis=-1), (-9.0, 9.0), components=2, bound=0.5)
FLOWS: dict[str, tuple[Any, Any, bool]] = {
    "linear": (linear(), nl.ExactGaussian(), True),
    "by transforms": (linear(weights=PERIODIC), nl.ExactGaussian(), True),
    "two channels": (linear(np.stack([F, -F], axis=-1)), nl.ExactGaussian(), True),
    "reaction": (linear() + nl.AllenCahn(interval=(-3.0, 3.0)), nl.EulerMaruyama(0.02), True),
    "attention": (nl.AttentionFlow(WEIGHTS, F, 0.5), nl.PlatenWeak2(0.1), True),
    "coupled": (nl.GradientFlow(nl.J(WEIGHTS), reaction=SYSTEM), nl.EulerMaruyama(0.02), False),
    "held": (nl.GradientFlow(nl.J(WEIGHTS), constraint=nl.Constraint([0], [1.0])), nl.ExactGaussian(), False),
}


@pytest.mark.parametrize("name", FLOWS)
@pytest.mark.parametrize("first", [0, 3])
def test_paths_have_the_bits_of_single_runs(name: str, first: int) -> None:
    flow, step, together = FLOWS[name]
    start = F if flow.observed is None else flow.observed
    start = np.stack([F, F], axis=-1) if name == "coupled" else start
    times = [0.0, 0.5, 1.0]
    found = nl.ensemble(flow + noise(first), start, 5, t_eval=times, integrator=step, side_by_side=3)
    assert found.stats["side_by_side"] == (3 if together else 1)
    assert found.values.shape == (5, 3, *start.shape)
    for path in range(5):
        alone = nl.solve(flow + noise(first + path), start, t_eval=times, integrator=step)
        assert np.array_equal(found.values[path], alone.u), path
    assert len({path.tobytes() for path in found.values}) == 5


def test_a_strength_that_depends_on_the_signal_is_side_by_side_too() -> None:
    flow = linear() + Noise(strength=lambda u: 0.1 * u, rng=4)
    found = nl.ensemble(flow, F, 4, t=0.5, integrator=nl.Milstein(0.05))
    one = nl.solve(linear() + Noise(strength=lambda u: 0.1 * u, rng=4, path=2), F, t=0.5, integrator=nl.Milstein(0.05))
    assert found.stats["side_by_side"] == 4
    assert np.array_equal(found.values[2], one.u)


def test_matrix_products_agree_to_rounding_and_one_by_one_to_the_bit() -> None:
    flow = linear(weights=nl.affinity(nl.Gaussian(width=2.0), nl.Grid(N), method="dense")) + noise()
    alone = nl.solve(flow, F, t=1.0, integrator=nl.EulerMaruyama(0.05)).u
    for together in (7, 1):
        found = nl.ensemble(flow, F, 7, t=1.0, integrator=nl.EulerMaruyama(0.05), side_by_side=together)
        np.testing.assert_allclose(found.values[0], alone, atol=1e-13)
    assert np.array_equal(found.values[0], alone)


def test_what_is_kept_of_a_path() -> None:
    flow = linear() + noise()
    found = nl.ensemble(flow, F, 20, t_eval=[0.0, 1.0], keep=lambda t, u: [t[-1], u[-1].max()])
    whole = nl.ensemble(flow, F, 20, t_eval=[0.0, 1.0])
    assert found.values.shape == (20, 2)
    assert np.array_equal(found.values[:, 1], whole.values[:, -1].max(axis=-1))
    assert found.t.tolist() == [0.0, 1.0]


@pytest.mark.slow
def test_intervals_hold_the_truth_as_often_as_they_say() -> None:
    """Of mean and variance of an Ornstein-Uhlenbeck process: 20 000 intervals of 60 paths each."""
    nodes = 20_000
    alone = nl.GradientFlow(nl.E(Unlinked(nl.Points(np.arange(float(nodes)))), np.zeros(nodes), 1.0))
    flow = alone + Noise(beta=1.0, white="nodes", rng=2)
    found = nl.ensemble(flow, np.ones(nodes), 60, t=0.5, integrator=nl.EulerMaruyama(0.5)).values[:, -1]
    several = Ensemble(np.zeros(1), found, 2, {})
    for level in (0.5, 0.95):
        low, high = several.interval(level)
        share = float(np.mean((low <= 0.5) & (high >= 0.5)))
        assert abs(share - level) < 4 * np.sqrt(level * (1 - level) / nodes)
        low, high = several.interval(level, of="variance")
        assert abs(float(np.mean((low <= 1.0) & (high >= 1.0))) - level) < 0.06
    np.testing.assert_allclose(several.quantile(0.5), np.median(found, axis=0))


def test_means_and_variances_are_those_of_numpy() -> None:
    values = np.random.default_rng(0).standard_normal((11, 2, 3)).astype(np.float32)
    found = Ensemble(np.zeros(2), values, 0, {})
    np.testing.assert_allclose(found.mean, values.astype(float).mean(axis=0), rtol=1e-12)
    np.testing.assert_allclose(found.variance, values.astype(float).var(axis=0, ddof=1), rtol=1e-12)
    from scipy import stats

    known = stats.ttest_1samp(values.astype(float), 0.0, axis=0).confidence_interval(0.9)
    np.testing.assert_allclose(found.interval(0.9), (known.low, known.high), rtol=1e-10)


@pytest.mark.parametrize(
    ("words", "error", "said"),
    [
        ({"count": 1}, InputError, "count: got 1"),
        ({"count": 4, "t": -1.0}, InputError, "t: got -1"),
        ({"count": 4, "memory_limit": 100}, MemoryLimitError, "keep less"),
        ({"count": 4, "side_by_side": 0}, InputError, "side_by_side"),
        ({"count": 4, "integrator": nl.RungeKutta()}, InputError, "takes no noise"),
        ({"count": 4, "keep": lambda t, u: np.zeros(int(u[-1, 0] * 1e6) % 97)}, InputError, "keep: got shape"),
        ({"count": 4, "keep": 3}, InputError, "keep: got int, expected a callable"),
    ],
)
def test_useless_calls_are_refused(words: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        nl.ensemble(linear() + noise(), F, **{"t": 1.0, **words})
    with pytest.raises(InputError, match="without noise"):
        nl.ensemble(linear(), F, 4, t=1.0)
    with pytest.raises(InputError, match="flow: got Noise, expected a flow"):
        nl.ensemble(noise(), F, 4, t=1.0)


def test_a_path_that_fails_is_named() -> None:
    flow = linear() + Noise(strength=lambda u: np.sqrt(1.0 - u), rng=1)
    with pytest.raises(NumericalError, match="paths 0 to 3 did not come"):
        nl.ensemble(flow, F - 0.5, 4, t=50.0, integrator=nl.EulerMaruyama(0.05))


@pytest.mark.parametrize("words", [{"level": 0.0}, {"level": 1.0}, {"level": float("nan")}, {"of": "median"}])
def test_useless_intervals_are_refused(words: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        Ensemble(np.zeros(1), np.arange(5.0), 0, {}).interval(**words)
