"""The flow of groups: its affinity, energies, steps, trackers, checkpoints; and the presets made of objects."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nlflow as nl
from nlflow.denoising import problem
from nlflow.denoising.frame import Spread, channels_for
from nlflow.denoising.groupwise import PRESETS
from nlflow.denoising.patches import (
    CompiledFilter,
    GroupAffinity,
    GroupFlow,
    Grouping,
    Lattice,
    PlainFilter,
    RelaxedSemiImplicit,
)
from nlflow.denoising.patches.affinity import as_planes
from nlflow.domains.samples import exact_means
from tests.pictures import (
    GROUPS_SLOWLY,
    SMALL,
    SMALL_IMAGE,
    SMALL_SIGNAL,
    Floats,
    group_step,
    grouped,
    noisy,
    rms,
    steps_and_waves,
    waves,
)

pytestmark = pytest.mark.numerical

CLEAN = 6 * waves(26, 29)
F = noisy(CLEAN, 1.0)
TIMES = float(SMALL.steps + 1)


def flow(f: Floats = F, **options: Any) -> GroupFlow:
    return GroupFlow(f, options.pop("grouping", SMALL_IMAGE if f.ndim > 1 else SMALL_SIGNAL), **options)


def run(made: GroupFlow, **options: Any) -> nl.Solution:
    return nl.solve(made, t=TIMES, integrator=RelaxedSemiImplicit(SMALL.steps), **options)


# ---- presets out of objects


@pytest.mark.parametrize("quality", GROUPS_SLOWLY)
@pytest.mark.parametrize("kind", ["grey", "colour", "signal", "float32"])
def test_a_preset_made_of_objects_has_the_bits_of_denoise(quality: str, kind: str) -> None:
    sigma, clean = np.array([0.7]), steps_and_waves(300) if kind == "signal" else 5 * waves(36, 33)
    image = noisy(np.stack([clean, 2 * clean, -clean], axis=-1) if kind == "colour" else clean, sigma)
    image = image.astype(np.float32) if kind == "float32" else image
    preset = PRESETS[quality]

    # observe: about 0, in units of the noise, in channels that are not correlated, in single precision
    samples = image if kind == "colour" else image[..., None]
    offset = exact_means(samples.reshape(-1, samples.shape[-1]))
    f = ((samples - offset) / sigma).astype(samples.dtype)
    channels = channels_for(f.shape[-1], Spread.of(f).moments)
    signal = (f @ channels.T.astype(f.dtype)).astype(np.float32)
    # build the flow
    groupings = preset.groupings(Spread.of(f).ratio, 1 if kind == "signal" else 2)
    made = GroupFlow(
        signal, groupings, channels=True, shrink=preset.shrink, factor=preset.factor,
        across=preset.across, search_every=preset.search_every,
    )  # fmt: skip
    # solve
    integrator = RelaxedSemiImplicit(preset.steps, preset.leave)
    u = nl.solve(made, t=preset.steps + 1, integrator=integrator, energies=False).final
    # give back
    result = (np.moveaxis(as_planes(u), 0, -1).reshape(u.shape) @ channels.astype(u.dtype)).astype(f.dtype)
    result = (result * sigma + offset).astype(f.dtype).reshape(image.shape)

    expected = nl.denoise(image, 0.7, quality=quality, channel_axis=-1 if kind == "colour" else None)
    np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("quality", ["pixels", *GROUPS_SLOWLY])
@pytest.mark.parametrize("kind", ["grey", "colour", "signal", "counts", "bytes", "map", "keep"])
@pytest.mark.sampled(3)
def test_a_problem_is_that_of_denoise(quality: str, kind: str) -> None:
    image: Any = noisy(40 + 20 * waves(36, 33), 4.0)
    options: dict[str, Any] = {"sigma": 4.0, "quality": quality}
    if kind == "colour":
        image, options["channel_axis"] = np.stack([image, image[::-1], image + 3]), 0
    elif kind == "signal":
        image = 10 * steps_and_waves(300)
    elif kind == "counts":
        image, options["noise"], options["sigma"] = np.random.default_rng(0).poisson(image), "poisson", None
        options["preserve_range"] = True
    elif kind == "bytes":
        image, options["preserve_range"] = np.rint(image).astype(np.uint8), True
    elif kind == "map":
        options["sigma"] = np.linspace(2, 6, 33) + 0 * image
    elif kind == "keep":
        options["keep"] = image > 60
    if kind == "map" and quality == "pixels":
        with pytest.raises(nl.InputError, match="sigma: got a map"):
            problem(image, **options)
        return
    made = problem(image, **options)
    solution = nl.solve(made.flow, t=made.t, integrator=made.integrator, trackers=made.rules, energies=False)
    result, expected = made.back(solution.final), nl.denoise(image, **options)
    assert result.dtype == expected.dtype
    np.testing.assert_array_equal(result, expected)


def test_what_has_no_flow_or_several_is_refused() -> None:
    with pytest.raises(nl.InputError, match="image: the input is constant, so that there is no flow; denoise"):
        problem(np.ones((9, 9)), 1.0)
    with pytest.raises(nl.InputError, match=r"^image: got 2 missing sample\(s\), .* fill them in before"):
        problem(np.where(np.arange(F.size).reshape(F.shape) < 2, np.nan, F), 1.0)
    with pytest.raises(TypeError):
        problem(F, 1.0, mask=F > 0)  # type: ignore[call-arg]  # holes are filled in by several flows
    with pytest.raises(nl.InputError, match="quality: got 'pixels' for a volume"):
        problem(np.random.default_rng(0).normal(0, 1, (9, 9, 9)), 1.0, quality="pixels")


def test_a_recording_of_unknown_noise_has_several_flows() -> None:
    recording = noisy(10 * steps_and_waves(2000), 1.0)
    with pytest.raises(nl.InputError, match="noise: got a recording whose noise is to be found out"):
        problem(recording)
    made = problem(recording, quality="fast")
    solution = nl.solve(made.flow, t=made.t, integrator=made.integrator, energies=False)
    np.testing.assert_array_equal(made.back(solution.final), nl.denoise(recording, quality="fast"))


# ---- the affinity


@pytest.mark.parametrize("shape", [(26, 29), (80,)])
def test_the_affinity_is_that_of_groups_of_tokens(shape: tuple[int, ...]) -> None:
    f = noisy(6 * (waves(*shape) if len(shape) == 2 else steps_and_waves(80)), 1.0)
    grouping = SMALL_IMAGE if len(shape) == 2 else SMALL_SIGNAL
    tokens = nl.PatchGroups(
        f, patch_size=grouping.patch, search_radius=grouping.radius, members=grouping.neighbours, step=grouping.stride
    )
    own = GroupAffinity(f[..., None], Lattice.of((1, *shape)[-2:], grouping), CompiledFilter())
    u = np.random.default_rng(1).normal(size=shape)
    block = tokens.affinity()
    np.testing.assert_allclose(own.average(u), tokens.aggregate(block.average(tokens.lift(u))), atol=1e-12)
    np.testing.assert_allclose(nl.J(own).value(u), nl.J(block).value(tokens.lift(u)), rtol=1e-12)
    covered = np.zeros(shape)
    for start in tokens.positions.reshape(-1, len(shape)):
        covered[tuple(slice(i, i + grouping.patch) for i in start)] += 1
    np.testing.assert_allclose(own.degree, covered, rtol=1e-12)
    v = np.random.default_rng(2).normal(size=shape)
    assert np.sum(covered * v * own.average(u)) == pytest.approx(np.sum(covered * u * own.average(v)))
    assert own.evolves
    assert own.memory_bytes == 4 * (tokens.distances.size + len(tokens.distances))


def test_the_affinity_of_another_signal() -> None:
    affinity = flow().affinity
    other = affinity.update(F[::-1, :, None].copy())
    assert not np.array_equal(affinity.average(F), other.average(F))
    np.testing.assert_allclose(other.average(np.ones_like(F)), 1, rtol=1e-14)


# ---- steps and energies


@pytest.mark.parametrize("kind", ["plain", "map", "missing", "channels", "signal"])
def test_compiled_and_plain_steps_agree(kind: str) -> None:
    f, options = F, dict[str, Any]()
    if kind == "map":
        options["variance"] = np.linspace(0.5, 1.5, F.shape[1]) + 0 * F
    elif kind == "missing":
        options["missing"] = np.random.default_rng(0).random(F.shape) < 0.05
    elif kind == "channels":
        f, options["channels"] = np.stack([F, noisy(CLEAN[::-1], 1.0, seed=2)], axis=-1), True
    elif kind == "signal":
        f = noisy(6 * steps_and_waves(120), 1.0)
    paths: list[list[Floats]] = []
    for filter in (CompiledFilter(), PlainFilter()):
        paths.append([])
        run(flow(f, filter=filter, **options), trackers=[nl.Callback(lambda t, u, flow: paths[-1].append(u))])
    assert len(paths[0]) == SMALL.steps + 2
    for mine, its in zip(*paths, strict=True):
        np.testing.assert_allclose(mine, its, atol=1e-8)


def test_windows_that_hold_few_patches_agree_too() -> None:
    f = noisy(4 * waves(7, 9), 1.0)
    compiled, plain = (run(flow(f, filter=filter)).final for filter in (CompiledFilter(), PlainFilter()))
    np.testing.assert_allclose(compiled, plain, atol=1e-8)


def test_energies_are_those_of_e_on_tokens() -> None:
    tokens = nl.PatchGroups(F, patch_size=4, search_radius=4, members=10, step=3)
    seen: list[tuple[float, Floats, Any]] = []
    solution = run(flow(), trackers=[nl.Energy(), nl.Callback(lambda t, u, flow: seen.append((t, u, flow)))])
    energies = solution.records["energy"]["value"]
    assert solution.energy.tolist() == energies[[0, -1]].tolist()
    assert np.all(np.diff(energies) < 0)
    # At the start the fidelity is 0, so that E is J of the noisy patches; at the end u is the running state.
    assert energies[0] == pytest.approx(nl.J(tokens.affinity()).value(tokens.lift(F)), rel=1e-10)
    np.testing.assert_array_equal(seen[-1][2].state, solution.final)
    # In between: E of these tokens, drawn to those of the running state.
    _, u, held = seen[1]
    held.state = 0.5 * (F + u)
    lifted, state = tokens.lift(u), tokens.lift(held.state)
    removed = (tokens.lift(F) - state).std(axis=(1, 2))
    noise = held.factor * np.maximum(1 - removed, 1e-3) ** 2
    matrices = tokens.covariance(u)[:, None] / noise[:, None, None, None]
    expected = nl.E(tokens.affinity(), state, matrices, measure="degree").value(lifted)
    assert held.energy(u) == pytest.approx(expected, rel=1e-9)


def test_the_velocity_is_a_step_less_the_signal() -> None:
    made = flow()
    planes = F[None]
    expected, _ = group_step(
        grouped(planes, SMALL_IMAGE), planes, planes, planes, np.ones((1, 1, 1)), shrink=1.5, running=False
    )
    np.testing.assert_allclose(made.velocity(F), expected[0] - F, atol=1e-12)
    assert made.speed(F) == pytest.approx(float(np.sqrt(np.mean((expected[0] - F) ** 2))))


def test_a_flow_is_relaxed_by_its_integrator() -> None:
    states: list[Floats] = []
    keep = nl.Callback(lambda t, u, flow: states.append(flow.state))
    nl.solve(
        flow(0.01 * CLEAN + noisy(0 * CLEAN) * 10), t=4, integrator=RelaxedSemiImplicit(3, leave=0.6), trackers=[keep]
    )
    spread = [float(np.std(z)) for z in states]
    assert spread[0] == spread[1]  # the first step leaves the running state as it is
    assert spread[1] > spread[2] > spread[3] > spread[4]
    assert run(flow()).stats["order"] == 1


# ---- trackers, stopping, checkpoints


def test_rules_of_other_flows_stop_it() -> None:
    solution = run(flow(), trackers=[nl.DiscrepancyPrinciple(F, 1.0, 0.3), nl.DistanceToConstant()])
    assert solution.status is nl.Status.STOPPED
    assert "discrepancy" in solution.message
    assert solution.t[-1] < TIMES
    assert rms(solution.final, CLEAN) < 0.9
    distances = solution.records["distance"]["value"]
    assert distances[0] == pytest.approx(float(F.std()))
    assert np.all(np.diff(distances) < 0)


def test_trackers_hear_of_long_steps() -> None:
    shares: list[tuple[float, float]] = []

    class Heard(nl.Callback):
        def during(self, t: float, share: float) -> None:
            shares.append((t, share))

    run(flow(noisy(6 * waves(230, 40), 1.0)), trackers=[Heard(lambda t, u, flow: None)])
    assert len(shares) > TIMES
    assert shares == sorted(shares)
    assert 1.0 in {share for _, share in shares}


@pytest.mark.slow
@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("options", ["plain", "missing", "channels", "turns"])
@pytest.mark.sampled(3)
def test_a_resumed_flow_has_the_bits_of_one_that_ran_through(every: int, options: str, tmp_path: Path) -> None:
    f, given = F.astype(np.float32), dict[str, Any](search_every=every)
    if options == "missing":
        given["missing"] = np.random.default_rng(0).random(F.shape) < 0.05
    elif options == "channels":
        f, given["channels"] = np.stack([f, f[::-1]], axis=-1), True
    elif options == "turns":
        given |= {"across": 0.4, "grouping": (SMALL_IMAGE, SMALL_IMAGE, Grouping(3, 9, 3, 2))}
    integrator = RelaxedSemiImplicit(4)
    whole = nl.solve(flow(f, **given), t=5, integrator=integrator, trackers=[nl.Energy()])
    for stop in range(1, 5):
        path = tmp_path / f"{stop}.npz"

        def at(t: float, u: Floats, flow: Any, stop: int = stop) -> bool:
            return t >= stop

        trackers: list[Any] = [nl.Energy(), nl.Checkpoint(path, seconds=0)]
        ended = nl.solve(flow(f, **given), t=5, integrator=integrator, trackers=[*trackers, nl.Callback(at)])
        assert ended.t[-1] == stop
        trackers = [nl.Energy(), nl.Checkpoint(path, seconds=0)]
        result = nl.solve(flow(f, **given), t=5, integrator=integrator, trackers=trackers, resume=True)
        np.testing.assert_array_equal(result.final, whole.final)
        np.testing.assert_array_equal(result.records["energy"]["value"], whole.records["energy"]["value"])


def test_a_checkpoint_of_another_flow_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.npz"
    run(flow(), trackers=[nl.Checkpoint(path, seconds=0), nl.Callback(lambda t, u, flow: t >= 2)])
    others = (
        flow(variance=1.1),
        flow(missing=F > 5),
        flow(factor=0.7),
        flow(noisy(CLEAN, 1.0, seed=5)),
        flow(filter=PlainFilter()),
    )
    for other in others:
        with pytest.raises(nl.FileFormatError, match="another problem"):
            run(other, resume=path)
    assert run(flow(), resume=path).success


# ---- own parts


class Mirrored(CompiledFilter):
    """Groups of the nearest patches in space, whatever they hold."""

    def find(self, guide: Floats, lattice: Lattice) -> Any:
        return super().find(np.zeros_like(guide), lattice)


def test_an_own_search_is_used_and_looked_at() -> None:
    own, usual = run(flow(filter=Mirrored())).final, run(flow()).final
    assert rms(own, CLEAN) < 1
    assert rms(own, usual) > 0.05
    bad: dict[str, Any] = {
        "row for each patch": lambda members, counts: (members[1:], counts[1:]),
        "expected int32": lambda members, counts: (members.astype(np.int64), counts),
        "got counts from 0": lambda members, counts: (members, 0 * counts),
        "outside of the search window": lambda members, counts: (members[::-1].copy(), counts),
    }
    for message, change in bad.items():

        class Wrong(CompiledFilter):
            def find(self, guide: Floats, lattice: Lattice, change: Any = change) -> Any:
                return change(*super().find(guide, lattice))

        with pytest.raises(nl.InputError, match=f"find: got .*{message}|find: {message}"):
            run(flow(filter=Wrong()))


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e160])
def test_a_guide_that_is_not_finite_is_refused_and_not_searched(value: float) -> None:
    """The compiled search leaves its arrays where a distance is not finite."""
    guide = F.copy()
    guide[3, 4] = value
    with pytest.raises(nl.NumericalError, match="guide: got NaN, infinity or values whose squares overflow"):
        CompiledFilter().find(guide[None], Lattice.of(F.shape, SMALL_IMAGE))
    if np.isfinite(value):
        solution = run(flow(guide), energies=False)
        assert solution.status is nl.Status.STEP_FAILED
        assert "guide: got" in solution.message


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda u, z: None, "its step returned NoneType, expected an estimate and a state"),
        (lambda u, z: (u[:, 1:], z), "its step returned an estimate of shape"),
        (lambda u, z: (u, z.astype(np.float32)), "its step returned a state of shape"),
        (lambda u, z: (u, z * np.nan), "that is not finite"),
    ],
)
def test_what_an_own_step_returns_is_looked_at(change: Any, message: str) -> None:
    class Own(CompiledFilter):
        def step(self, *words: Any, **options: Any) -> Any:
            return change(*super().step(*words, **options))

    with pytest.raises((nl.InputError, nl.NumericalError), match=message):
        flow(filter=Own()).velocity(F)


def test_an_own_fidelity_of_another_shape_is_refused() -> None:
    class Number(PlainFilter):
        def fidelity(self, covariance: Floats) -> Floats:
            return np.full(3, 0.5)

    with pytest.raises(nl.InputError, match=r"fidelity: got shape \(3,\), expected .*one matrix for each group"):
        flow(filter=Number()).velocity(F)


def test_parameters_of_a_filter_belong_to_the_problem(tmp_path: Path) -> None:
    class Shrunk(PlainFilter):
        def __init__(self, factor: float) -> None:
            self.factor = factor

        def fidelity(self, covariance: Floats) -> Floats:
            return self.factor * covariance

    path = tmp_path / "run.npz"
    run(flow(filter=Shrunk(1.0)), trackers=[nl.Checkpoint(path, seconds=0), nl.Callback(lambda t, u, flow: t >= 2)])
    with pytest.raises(nl.FileFormatError, match="another problem"):
        run(flow(filter=Shrunk(0.5)), resume=path)
    assert run(flow(filter=Shrunk(1.0)), resume=path).success


def test_nothing_of_a_run_stays_with_the_flow() -> None:
    made = nl.GradientFlow(nl.J(nl.affinity(nl.Gaussian(width=1.0), nl.Grid(9))))
    nl.solve(made, np.arange(9.0), t=1, trackers=[nl.Callback(lambda t, u, flow: None)])
    assert "during" not in vars(made)


def test_an_own_fidelity_is_used() -> None:
    class Nothing(PlainFilter):
        def fidelity(self, covariance: Floats) -> Floats:
            return 0 * covariance

    made = flow(filter=Nothing())
    u = run(made).final
    # Without fidelity a step is the mean of each group, and with it the energy is J.
    assert made.energy(u) == pytest.approx(nl.J(made.affinity).value(u), rel=1e-10)
    assert rms(u, run(flow()).final) > 0.3


# ---- what is refused


@pytest.mark.parametrize(
    "integrator", [nl.SemiImplicit(), nl.Exponential(), nl.AttentionStep(), nl.NeutrenoStep()], ids=repr
)
def test_integrators_of_linear_pieces_are_refused(integrator: Any) -> None:
    with pytest.raises(nl.InputError, match=r"integrator: |is not linear; integrate it with RelaxedSemiImplicit"):
        nl.solve(flow(), t=2, integrator=integrator)


def test_the_relaxed_step_is_for_groups_alone() -> None:
    j = nl.J(nl.affinity(nl.Gaussian(width=1.0), nl.Grid(9)))
    with pytest.raises(nl.InputError, match="RelaxedSemiImplicit is for a GroupFlow, got GradientFlow; use"):
        nl.solve(nl.GradientFlow(j), np.arange(9.0), t=1, integrator=RelaxedSemiImplicit(2))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: flow(variance=0.0), "variance: got 0, expected numbers > 0"),
        (lambda: flow(variance=np.ones(3)), r"variance: got shape \(3,\), expected one number or \(26, 29\)"),
        (lambda: flow(missing=np.zeros(4, bool)), r"missing: got shape \(4,\), expected \(26, 29\)"),
        (lambda: flow(shrink=-1), "shrink: got -1"),
        (lambda: flow(factor=0), "factor: got 0"),
        (lambda: flow(search_every=0), "search_every: got 0"),
        (lambda: flow(np.full((9, 9), np.nan)), "observed: got 81 NaN"),
        (lambda: flow(np.zeros((2, 3, 9, 9))), r"observed: got 4 dimension"),
        (lambda: flow(missing=np.ones(F.shape, bool)), "missing: hides every sample"),
        (lambda: flow(filter=CompiledFilter), "filter: got <class .*expected an object with find and step"),
        (lambda: flow(filter="plain"), "filter: got 'plain'"),
        (lambda: GroupFlow(F, (SMALL_IMAGE,)), "grouping: got .*expected a Grouping, or a tuple"),
        (lambda: GroupFlow(F, (4, 16)), "grouping: got .*expected a Grouping, or a tuple"),
        (lambda: flow(across=-0.1), "across: got -0.1"),
        (lambda: flow(across=1.1), "across: got 1.1, expected a share, at most 1"),
        (lambda: flow(origin=(5, 5)), r"origin: got \(5, 5\) .*expected a part that lies within"),
        (lambda: Lattice.of((3, 29), SMALL_IMAGE, (20, 0), (26, 29)), "shape: got a part of 3 samples at 20 of 26"),
        (lambda: Grouping(0, 4, 3, 2), "patch: got 0"),
        (lambda: Grouping(4, 0, 3, 2), "neighbours: got 0"),
        (lambda: Grouping(4, 4, -1, 2), "radius: got -1"),
        (lambda: Grouping(4, 4, 3, 0), "stride: got 0"),
        (
            lambda: nl.solve(flow(), t=2),
            "integrator: got none, expected one for a GroupFlow; integrate",
        ),
        (lambda: RelaxedSemiImplicit(0), "steps: got 0"),
        (lambda: RelaxedSemiImplicit(3, leave=1.5), "leave: got 1.5, expected a fraction"),
    ],
)
def test_bad_input(make: Any, message: str) -> None:
    with pytest.raises(nl.InputError, match=message):
        make()
