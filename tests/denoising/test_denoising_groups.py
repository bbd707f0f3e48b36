"""The flow on groups: members, steps and paths against their definition in NumPy and the package's own objects."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from nlflow import E, GradientFlow, PatchGroups, SemiImplicit, denoise, solve
from nlflow.backends.numba import groups as loops
from nlflow.backends.numba import search
from nlflow.denoising import frame, groupwise
from nlflow.denoising.groupwise import GroupPreset, margins
from nlflow.denoising.patches import CompiledFilter, Grouping, Groups, Lattice
from nlflow.denoising.patches.lattice import reference_positions
from tests.pictures import (
    GROUPS_SLOWLY,
    SMALL,
    Floats,
    estimates,
    group_step,
    grouped,
    noisy,
    rms,
    signal_in,
    steps_and_waves,
    waves,
)

pytestmark = pytest.mark.numerical

IMAGE = Grouping(patch=4, neighbours=12, radius=4, stride=3)
SIGNAL = Grouping(patch=6, neighbours=10, radius=15, stride=2)
PRECISIONS = [(np.float64, 1e-10), (np.float32, 1e-4)]


def planes(channels: int = 1, shape: tuple[int, int] = (23, 26), dtype: Any = np.float64, seed: int = 3) -> Floats:
    """Waves and noise of strength 1."""
    clean = 6 * np.stack([waves(*shape) * (1 + c) for c in range(channels)])
    return noisy(clean, 1.0, seed).astype(dtype)


def uniform(channels: int, dtype: Any = np.float64, value: float = 1.0) -> Floats:
    return np.full((channels, 1, 1), value, dtype)


def as_members(guide: Floats, grouping: Grouping) -> Floats:
    """Return the corners of the members by `PatchGroups`."""
    signal = guide.shape[1] == 1
    image = np.moveaxis(guide[:, 0] if signal else guide, 0, -1)
    found = PatchGroups(
        image, patch_size=grouping.patch, search_radius=grouping.radius, members=grouping.neighbours,
        step=grouping.stride, channel_axis=-1,
    )  # fmt: skip
    positions = found.positions
    return positions[..., 0] if signal else positions[..., 0] * guide.shape[2] + positions[..., 1]


# ---- who belongs to a group


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(
    ("channels", "shape", "grouping"),
    [(1, (23, 26), IMAGE), (3, (14, 19), IMAGE), (2, (5, 30), Grouping(3, 4, 2, 3)), (1, (1, 90), SIGNAL),
     (2, (1, 61), SIGNAL), (1, (20, 9), Grouping(1, 6, 3, 1)), (1, (150, 150), Grouping(2, 3, 1, 2))],
)  # fmt: skip
def test_members_are_those_of_patch_groups(channels: int, shape: tuple[int, int], grouping: Grouping, dtype: Any):
    guide = planes(channels, shape, dtype)
    found, expected = grouped(guide, grouping), as_members(guide, grouping)
    assert np.all(found.counts == expected.shape[1])
    np.testing.assert_array_equal(found.members[:, 0], expected[:, 0])
    np.testing.assert_array_equal(np.sort(found.members, axis=1), np.sort(expected, axis=1))


@pytest.mark.parametrize("kind", ["constant", "lines", "chequers", "few values"])
def test_of_equal_distances_the_nearest_in_space_are_taken(kind: str):
    y, x = np.mgrid[:14, :15]
    few = np.random.default_rng(0).integers(0, 2, (14, 15))
    guide = {"constant": 3.5 + 0 * x, "lines": x % 3, "chequers": (x + y) % 2, "few values": few}[kind][None].astype(
        float
    )
    found, expected = grouped(guide, IMAGE), as_members(guide, IMAGE)
    assert np.all(found.counts == expected.shape[1])
    np.testing.assert_array_equal(np.sort(found.members, axis=1), np.sort(expected, axis=1))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("shape", [(24, 25), (1, 200)])
def test_rounding_decides_no_tie(shape: tuple[int, int], dtype: Any):
    """Counts have many patches that are equally near; in other units rounding makes their distances differ."""
    counts = np.random.default_rng(5).poisson(20.0, (1, *shape)).astype(np.float64)
    grouping = IMAGE if shape[0] > 1 else SIGNAL
    expected = grouped(counts, grouping).members
    for scale, offset in ((1 / 3, 0.1), (0.7, -14.3), (1 / 255, 0.0)):
        guide = (scale * counts + offset).astype(dtype)
        np.testing.assert_array_equal(grouped(guide, grouping).members, expected)
        np.testing.assert_array_equal(np.sort(as_members(guide, grouping), axis=1), np.sort(expected, axis=1))


@pytest.mark.parametrize("shape", [(1, 1), (1, 2), (2, 3), (3, 40), (1, 9), (4, 4), (5, 5)])
def test_windows_that_hold_few_patches_give_small_groups(shape: tuple[int, int]):
    guide = planes(1, shape)
    found = grouped(guide, Grouping(4, 30, 6, 3))
    assert found.lattice.patch == (1, *(min(4, n) for n in shape))
    places = [n - p + 1 for n, p in zip(shape, found.lattice.patch[1:], strict=True)]
    for own, members, count in zip(found.members[:, 0], found.members, found.counts, strict=True):
        sides = [min(at, 6) + min(n - 1 - at, 6) + 1 for at, n in zip(divmod(own, shape[1]), places, strict=True)]
        assert count == min(30, np.prod(sides), found.members.shape[1])
        assert len(set(members[:count])) == count
        assert members[0] == own


def test_references_lie_as_those_of_patch_groups():
    found = grouped(planes(), IMAGE)
    assert found.lattice.rows.tolist() == reference_positions(19, 3).tolist()
    assert found.lattice.columns.tolist() == reference_positions(22, 3).tolist()


# ---- one step


def reference_step(
    found: Groups,
    state: Floats,
    pilot: Floats,
    observed: Floats,
    variance: Floats,
    leave: float = 0.0,
    factor: float = 1.0,
    shrink: float = 0.0,
    running: bool = True,
    across: float = 0.0,
) -> tuple[Floats, Floats]:
    """A step by its definition, group by group, in double precision."""
    state, pilot, observed = (x.astype(np.float64) for x in (state, pilot, observed))
    variance = np.broadcast_to(variance, state.shape).astype(np.float64)
    (_, ph, pw), width = found.lattice.patch, state.shape[2]
    sums = np.zeros((3, *state.shape))
    for members, count in zip(found.members, found.counts, strict=True):
        rows = (members[:count] // width)[:, None, None] + np.arange(ph)[:, None]
        columns = (members[:count] % width)[:, None, None] + np.arange(pw)
        for c in range(len(state)):

            def tokens(image: Floats, c: int = c, rows: Any = rows, columns: Any = columns) -> Floats:
                return image[c, rows, columns].reshape(len(rows), -1)

            z, n = tokens(state), tokens(variance).mean(axis=0)
            rest = 1.0
            if running:
                rest = max(1 - np.std(tokens(observed) - z) / np.sqrt(n.mean()), leave)
            n = n * rest**2 * factor
            covariance = np.cov((z if shrink else tokens(pilot)).T, bias=True)
            if shrink:
                values, vectors = np.linalg.eigh(covariance / np.sqrt(np.outer(n, n)))
                covariance = (vectors * signal_in(values, shrink)) @ vectors.T * np.sqrt(np.outer(n, n))
            inverse = np.linalg.inv(covariance + np.diag(n))
            change = (z - z.mean(axis=0)) @ (n[:, None] * inverse).T
            kept = 1 - n * np.diag(inverse)
            if across:  # ridge regression of the members on each other
                x = tokens(pilot) - tokens(pilot).mean(axis=0)
                ridge = n.mean() * max(count, x.shape[1])
                combination = np.linalg.solve(x @ x.T + ridge * np.eye(count), x @ x.T)
                other = (np.eye(count) - combination) @ (z - z.mean(axis=0))
                change = (1 - across) * change + across * other
                kept = (1 - across) * kept + across * np.diag(combination)[:, None]
            weight = 1 / (n * (kept * (1 - 1 / count) + 1 / count))
            kinds = (weight * (z - change), weight * (z - (1 - leave / rest) * change), weight + 0 * z)
            for target, kind in zip(sums, kinds, strict=True):
                np.add.at(target[c], (rows, columns), kind.reshape(-1, ph, pw))
    return sums[0] / sums[2], sums[1] / sums[2]


def ramp(channels: int, shape: tuple[int, int]) -> Floats:
    """Return a variance from 0.5 to 1.5 across the columns, another one in each channel."""
    line = np.linspace(0.5, 1.5, shape[1])
    return np.ascontiguousarray(
        np.stack([np.roll(line, 5 * c)[None] * np.ones((shape[0], 1)) for c in range(channels)])
    )


STEPS: dict[str, dict[str, Any]] = {
    "first": {"shrink": 1.4, "running": False},
    "first, noise unlike 1": {"shrink": 1.4, "running": False, "factor": 0.7},
    "later": {"leave": 0.4, "factor": 0.8},
    "last": {"leave": 0.0, "factor": 0.8},
    "less left than wanted": {"leave": 0.9},
    "across too": {"leave": 0.4, "factor": 0.8, "across": 0.4},
    "across alone": {"leave": 0.2, "across": 1.0},
}


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "tolerance"), PRECISIONS)
@pytest.mark.parametrize("varying", [False, True])
@pytest.mark.parametrize("name", STEPS)
@pytest.mark.sampled(6)
def test_a_step_is_that_of_its_definition(name: str, varying: bool, dtype: Any, tolerance: float):
    options = STEPS[name]
    wide = Grouping(patch=7, neighbours=60, radius=6, stride=6)  # 49 samples: several vectors, the last not full
    for channels, shape, grouping in (
        (1, (23, 26), IMAGE),
        (3, (13, 17), IMAGE),
        (2, (1, 70), SIGNAL),
        (1, (20, 23), wide),
    ):
        variance = (ramp(channels, shape) if varying else uniform(channels, value=1.3)).astype(dtype)
        observed = planes(channels, shape, dtype)
        if options.get("running", True):  # some of the noise has been taken out
            pilot = (0.3 * observed + 0.7 * planes(channels, shape, seed=9)).astype(dtype)
            state = (0.6 * observed + 0.4 * pilot).astype(dtype)
        else:
            pilot = state = observed
        found = grouped(state, grouping)
        result = group_step(found, state, pilot, observed, variance, **options)
        expected = reference_step(found, state, pilot, observed, variance, **options)
        for mine, its in zip(result, expected, strict=True):
            assert mine.dtype == dtype
            np.testing.assert_allclose(mine, its, atol=tolerance * np.abs(its).max(), rtol=0)


def test_a_step_is_one_of_the_flow_of_e_with_a_fidelity_matrix():
    """(I + C/s^2)^-1 (Pz + C/s^2 z) on each group, by the package's affinity, fidelity, flow and integrator."""
    z, pilot, variance = planes()[0], noisy(6 * waves(23, 26), 0.2), 0.8
    own = PatchGroups(z, patch_size=4, search_radius=4, members=12, step=3)
    fidelity = own.covariance(pilot)[:, None] / variance
    energy = E(own.affinity(), own.lift(z), fidelity, measure="degree")
    assert energy.fidelity.shape == (len(own.positions), 1, 16, 16)
    stage = solve(GradientFlow(energy, metric="degree"), own.lift(z), t=1, integrator=SemiImplicit())
    np.testing.assert_allclose(stage.final, energy.minimizer().u, atol=1e-10)
    kept = np.diagonal(np.linalg.solve(np.eye(16) + fidelity[:, 0], fidelity[:, 0]), axis1=1, axis2=2)
    weights = 1 / (variance * (kept * (1 - 1 / 12) + 1 / 12))
    expected = own.aggregate(stage.final, weights[:, None])
    estimate, _ = group_step(
        grouped(z[None], IMAGE), z[None], pilot[None], z[None], uniform(1, value=variance), running=False
    )
    np.testing.assert_allclose(estimate[0], expected, atol=1e-10)


def test_a_step_moves_the_state_so_far_that_the_wanted_noise_is_left():
    noise = np.random.default_rng(0).normal(size=(1, 60, 60))
    found = grouped(noise, Grouping(4, 120, 9, 3))
    _, state = group_step(found, noise, 0 * noise, noise, uniform(1), leave=0.6)
    assert np.std(state) == pytest.approx(0.6, rel=0.1)
    _, following = group_step(found, state, 0 * noise, noise, uniform(1), leave=0.3)
    assert np.std(following) == pytest.approx(0.3, rel=0.15)
    result, last = group_step(found, following, 0 * noise, noise, uniform(1), leave=0.0)
    np.testing.assert_array_equal(result, last)
    assert np.std(last) < 0.3


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_loops_are_compiled_for_what_they_are_called_with(dtype: Any):
    """A call with other types than those that were asked for compiles a loop once more, unseen, for seconds."""
    image = planes(1, (13, 14), dtype)
    variance = np.broadcast_to(np.linspace(0.5, 1.5, 14, dtype=dtype), image.shape)
    group_step(grouped(image, IMAGE), image, image, image, variance, leave=0.5)
    group_step(grouped(image, IMAGE), image, image, image, uniform(1, dtype), shrink=1.0, running=False)
    precision = np.dtype(dtype).name
    found: list[Any] = [
        search.loop("find_groups", precision),
        *(loops.loop(name, precision) for name in ("filter_groups", "add_windows")),
    ]
    for loop in found:  # which holds the addresses of what it calls
        assert len(getattr(loop, "func", loop).signatures) <= 2


# ---- the path


@pytest.mark.slow
@pytest.mark.parametrize("hidden", [False, True])
@pytest.mark.parametrize("every", [1, 2])
def test_a_path_is_that_of_its_definition(every: int, hidden: bool):
    image = planes(2, (19, 21))
    missing = np.zeros((19, 21), bool)
    missing[4:7, 9:12] = hidden
    later = Grouping(3, 9, 3, 2), Grouping(4, 7, 3, 3)  # which take turns
    preset = GroupPreset(3, (), (), shrink=1.2, leave=0.6, factor=0.7, across=0.4, search_every=every)
    path = estimates(image, preset, (IMAGE, *later), uniform(2), missing if hidden else None)
    observed, pilot, state = image.copy(), image, image
    expected = []
    for k in range(4):
        if k == 0:
            pilot, _ = reference_step(grouped(image, IMAGE), image, image, image, uniform(2), 0, 1, 1.2, False)
        else:
            if (k - 1) % every == 0:
                found = grouped(state, later[(k - 1) // every % 2])
            left = 0.6 * (1 - k / 3)
            pilot, state = reference_step(found, state, pilot, observed, uniform(2), left, 0.7, across=0.4)
        state, observed = (np.where(missing, pilot, x) for x in (state, observed))
        expected.append(pilot)
    assert len(path) == 4
    for mine, its in zip(path, expected, strict=True):
        np.testing.assert_allclose(mine, its, atol=1e-9)


@pytest.mark.parametrize("turn", [lambda a: a[:, ::-1], lambda a: a[:, :, ::-1], lambda a: np.swapaxes(a, 1, 2)])
def test_a_path_turns_with_the_image(turn: Any):
    image, variance = planes(3, (31, 37)), ramp(3, (31, 37))
    groupings = SMALL.groupings(1.0, 2)
    expected = estimates(image, SMALL, groupings, variance)[-1]
    turned = estimates(*(np.ascontiguousarray(turn(x)) if i != 1 else x for i, x in enumerate((image, SMALL))),
                       groupings, np.ascontiguousarray(turn(variance)))[-1]  # fmt: skip
    np.testing.assert_allclose(turned, turn(expected), atol=1e-9)


def test_a_sample_looks_no_farther_than_the_halo():
    image = planes(1, (1, 400))
    groupings = SMALL.groupings(1.0, 1)
    margin = margins(groupings, SMALL.steps)[2]
    changed = image.copy()
    changed[0, 0, 200] += 50
    difference = (
        estimates(changed, SMALL, groupings, uniform(1))[-1] != estimates(image, SMALL, groupings, uniform(1))[-1]
    )
    reach = np.abs(np.flatnonzero(difference[0, 0]) - 200)
    assert 10 < reach.max() <= margin


# ---- precision


@pytest.mark.parametrize("quality", GROUPS_SLOWLY)
@pytest.mark.parametrize("ratio", [20, 100, 240])
def test_single_precision_is_enough_where_it_is_used(quality: str, ratio: float, monkeypatch: pytest.MonkeyPatch):
    """Smooth content of many times the noise: covariances that are nearly singular."""
    t = np.arange(500)
    for clean in (np.sin(t / 20), waves(40, 44)):
        value = noisy(clean, sigma := float(np.ptp(clean)) / ratio)
        single = denoise(value, sigma, quality=quality)
        with monkeypatch.context() as patch:
            patch.setattr(groupwise, "SINGLE", 0)
            double = denoise(value, sigma, quality=quality)
        assert rms(single, double) < 0.05 * sigma
        assert np.abs(single - double).max() < 0.5 * sigma
        assert rms(single, clean) < 1.05 * rms(double, clean)


@pytest.mark.parametrize("quality", GROUPS_SLOWLY)
@pytest.mark.parametrize("ratio", [1e3, 1e5, 1e6, 1e9, 1e10])
@pytest.mark.sampled(2)
def test_hardly_any_noise_does_no_harm(quality: str, ratio: float):
    for clean in (steps_and_waves(400), np.sin(np.arange(300) / 20), waves(32, 32)):
        sigma = float(np.ptp(clean)) / ratio
        # Beyond the precision of covariances no gain can be expected, but the input is not to be spoilt either.
        assert rms(denoise(noisy(clean, sigma), sigma, quality=quality), clean) < max(sigma, 1e-7)


@pytest.mark.parametrize("quality", GROUPS_SLOWLY)
def test_one_outlier_does_no_harm(quality: str):
    clean = 20 * waves(32, 32)
    clean[20, 11] = 1e9
    error = denoise(noisy(clean, 1.0), 1.0, quality=quality) - clean
    assert np.std(error) < 0.7
    assert abs(error[20, 11]) < 4


@pytest.mark.parametrize("quality", GROUPS_SLOWLY)
@pytest.mark.parametrize("weak", [0.05, 0.2, 0.6])
def test_no_estimate_on_the_path_is_worse_than_the_input_where_noise_varies(
    quality: str, weak: float, monkeypatch: pytest.MonkeyPatch
):
    clean = 4 * waves(48, 48)
    level = np.where(np.arange(48) < 24, weak, 1.5) * np.ones((48, 1))
    value = noisy(clean, level)
    seen: list[Floats] = []

    def select(rule: str, f: Floats, path: list[Floats], *rest: Any) -> tuple[int, None, str]:
        seen.extend(path)
        return 0, None, ""

    monkeypatch.setattr(frame, "select", select)
    denoise(value, level, quality=quality, stopping="discrepancy")
    unit, offset = float(np.sqrt(np.mean(level**2))), value.mean()
    errors = [rms(unit * u[..., 0] + offset, clean) / unit for u in seen]
    assert len(errors) > 2
    assert max(errors) < 0.6


@pytest.mark.parametrize("step", [1e3, 3e6, 3e7, 1e8])
def test_groups_have_as_many_members_as_they_can_hold(step: float) -> None:
    """Distances of which rounding leaves little: a group holds each patch once, and none beside its row of members."""
    f = np.random.default_rng(0).normal(0, 1, (21, 26)) + step * (np.arange(26) > 12)
    lattice = Lattice.of(f.shape, Grouping(4, 20, 6, 3))
    members, counts = CompiledFilter().find(f.astype(np.float32).reshape(1, 1, 21, 26), lattice)
    assert (counts == 20).all()
    assert all(len(set(row)) == 20 for row in members.tolist())
