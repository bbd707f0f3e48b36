"""The denoiser on tensors: the third implementation of groups and steps, `denoise` of tensors, batches, devices."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nlflow as nl
from nlflow import denoise
from nlflow.denoising import Trail, groupwise, problem
from nlflow.denoising.groupwise import in_tiles
from nlflow.denoising.patches import (
    CompiledFilter,
    GroupFlow,
    Grouping,
    Groups,
    Images,
    Lattice,
    PlainFilter,
    RelaxedSemiImplicit,
    Stage,
    TensorFilter,
)
from nlflow.denoising.patches.filters import groups_of
from nlflow.denoising.runs import Watch
from tests.pictures import SMALL, SMALL_IMAGE, Floats, noisy, steps_and_waves, waves
from tests.problems import torch_on_one_thread

torch = torch_on_one_thread()
pytestmark = pytest.mark.numerical

RNG = np.random.default_rng(0)
CLEAN = 120 + 30 * waves(32, 36)
IMAGE = noisy(CLEAN, 8.0)
SHAPES = {"image": (1, 1, 21, 26), "colour": (3, 1, 18, 20), "signal": (1, 1, 1, 70), "volume": (1, 7, 9, 11),
          "few": (1, 1, 5, 6)}  # fmt: skip
# From where a group's weights are, float32 leaves a relative error of at most 0.1 in them by construction; what is
# seen in samples in units of the noise is far below a hundredth.
SINGLE = 2e-3


def planes(kind: str, seed: int = 0) -> Floats:
    shape = SHAPES[kind]
    return np.random.default_rng(seed).normal(0, 1, shape) + np.cumsum(np.ones(shape), -1) / 3


def space(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(n for n in shape[1:] if n > 1)


def tensors(images: Images) -> Images:
    state, pilot, observed, variance = (
        torch.from_numpy(one) for one in (images.state, images.pilot, images.observed, images.variance)
    )
    return Images(state, pilot, observed, variance, images.correlation)


# ---- groups and steps


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("ties", [False, True])
def test_the_groups_are_those_of_the_compiled_loops(kind: str, dtype: str, ties: bool) -> None:
    guide = planes(kind).astype(dtype)
    if ties:  # whole numbers, of which many patches are equal
        guide = np.rint(guide / 2).astype(dtype)
    lattice = Lattice.of(space(guide.shape), Grouping(3, 20, 4, 2))
    found = TensorFilter(numbers=20_000).find(torch.from_numpy(guide), lattice)
    members, counts = (one.numpy() for one in found)
    expected, wanted = CompiledFilter().find(guide, lattice)
    np.testing.assert_array_equal(counts, wanted)
    there = np.arange(members.shape[1]) < counts[:, None]
    np.testing.assert_array_equal(members[there], expected[there])
    assert (members.dtype, counts.dtype) == (np.int32, np.int32)
    assert (members[:, 0] == expected[:, 0]).all()


STAGES = {
    "first": Stage(shrink=1.4, running=False),
    "cosines": Stage(shrink=1.2, running=False, cosine=True),
    "later": Stage(leave=0.4, factor=0.8),
    "last": Stage(leave=0.0, factor=1.3),
}
CORRELATION = np.array([[0.1, 0.3, 0.1], [0.4, 1.0, 0.4], [0.1, 0.3, 0.1]])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("noise", ["white", "varying", "correlated"])
@pytest.mark.parametrize("kind", ["image", "colour", "signal", "volume", "few"])
@pytest.mark.sampled(24)
def test_a_step_is_that_of_the_plain_objects(kind: str, noise: str, stage: str, dtype: str) -> None:
    check_step(kind, noise, stage, dtype)


@pytest.mark.parametrize("stage", ["first", "later"])
def test_groups_of_few_members_are_filtered_as_those_of_the_plain_objects(stage: str) -> None:
    check_step("few", "white", stage, "float64")


def check_step(kind: str, noise: str, stage: str, dtype: str) -> None:
    f = planes(kind)
    state, pilot = 0.8 * f + 0.3, f - 0.4 * planes(kind, seed=1)
    variance = np.ones((len(f), 1, 1, 1)) if noise != "varying" else 0.5 + np.abs(planes(kind, seed=2))
    correlation = None
    if noise == "correlated":
        correlation = CORRELATION[None] if f.shape[2] > 1 else CORRELATION[1:2][None]
        correlation = np.broadcast_to(correlation, (len(f), *correlation.shape[1:]))
    lattice = Lattice.of(space(f.shape), Grouping(3, 15, 3, 2))
    groups = Groups(lattice, *CompiledFilter().find(f, lattice))
    images = Images(state, pilot, f, variance, correlation)
    expected = PlainFilter().step(groups, images, STAGES[stage])
    rounded = Images(*(one.astype(dtype) for one in (state, pilot, f, variance)), correlation)
    on_device = Groups(lattice, torch.from_numpy(groups.members), torch.from_numpy(groups.counts))
    made = TensorFilter(numbers=30_000).step(on_device, tensors(rounded), STAGES[stage])
    for mine, plain in zip(made, expected, strict=True):
        assert str(mine.dtype) == f"torch.{dtype}"
        np.testing.assert_allclose(mine.numpy(), plain, rtol=0, atol=1e-9 if dtype == "float64" else SINGLE)


@pytest.mark.parametrize("height", [300.0, 3e4, 3e7])
def test_groups_far_from_well_conditioned_keep_their_digits(height: float) -> None:
    # Edges much higher than the noise: float32 alone would lose it in the covariances.
    f = (planes("image") + height * (np.arange(26) > 12)).astype(np.float32)
    lattice = Lattice.of(space(f.shape), Grouping(4, 20, 6, 3))
    images, stage = Images(f, f, f, np.ones((1, 1, 1, 1), np.float32)), Stage(shrink=1.4, running=False)
    on_device = Groups(lattice, *TensorFilter().find(torch.from_numpy(f), lattice))
    expected = PlainFilter().step(on_device.on_host, images, stage)[0]
    made = TensorFilter().step(on_device, tensors(images), stage)[0].numpy()
    # Sums of samples of this height are rounded; nothing else is lost.
    assert np.abs(made - expected).max() <= SINGLE + 8 * np.finfo(np.float32).eps * height


def test_groups_whose_noise_drowns_in_rounding_are_left_as_they_are() -> None:
    f = planes("image") * 1e9
    lattice = Lattice.of(space(f.shape), SMALL_IMAGE)
    groups = Groups(lattice, *CompiledFilter().find(f, lattice))
    on_device = Groups(lattice, torch.from_numpy(groups.members), torch.from_numpy(groups.counts))
    made = TensorFilter().step(on_device, tensors(Images(f, f, f, np.ones((1, 1, 1, 1)))), Stage(factor=0.8))
    for one in made:  # sums of weights are rounded
        np.testing.assert_allclose(one.numpy(), f, rtol=1e-14)


def test_the_bits_do_not_depend_on_threads_and_chunks_stay_near() -> None:
    results = []
    for threads, numbers in ((1, None), (2, None), (3, None), (1, 3000)):
        torch.set_num_threads(threads)
        flow = GroupFlow(torch.from_numpy(IMAGE), SMALL_IMAGE, variance=64.0, filter=TensorFilter(numbers))
        results.append(nl.solve(flow, t=3, integrator=RelaxedSemiImplicit(2), energies=False).final)
        assert torch.get_num_threads() == threads
    torch.set_num_threads(1)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
    torch.testing.assert_close(results[0], results[3], rtol=0, atol=1e-9)


def test_sums_of_one_order_and_precision_of_the_caller() -> None:
    image = torch.from_numpy(IMAGE).float()
    expected = denoise(image, 8.0)
    torch.use_deterministic_algorithms(True)
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        with torch.autocast(image.device.type, torch.bfloat16):
            assert torch.equal(denoise(image, 8.0), expected)
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_float32_matmul_precision(before)


def test_the_device_is_asked_as_often_however_many_chunks_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    for name in ("cpu", "item", "tolist", "__bool__", "__float__", "__int__", "__index__", "nonzero"):
        method = getattr(torch.Tensor, name)

        def counted(self: Any, *given: Any, _method: Any = method, _name: str = name) -> Any:
            asked.append(_name)
            return _method(self, *given)

        monkeypatch.setattr(torch.Tensor, name, counted)
    flow = GroupFlow(torch.from_numpy(IMAGE).float(), SMALL_IMAGE, variance=64.0)
    counts = []
    for numbers in (2**24, 4000):
        flow.filter.numbers = numbers
        asked.clear()
        now = flow.rebuilt(flow.observed)
        now.step(flow.observed)
        counts.append(sorted(asked))
    assert counts[0] == counts[1]
    assert len(counts[0]) <= 12  # which groups there are, which lose digits, whether all is finite


# ---- the flow


@pytest.mark.slow
def test_solve_runs_tensors_with_trackers_stopping_and_checkpoints(tmp_path: Path) -> None:
    f, g = IMAGE / 8, torch.from_numpy(IMAGE / 8)
    runs = []
    for signal in (f, g):
        rules = [nl.Energy(), nl.DiscrepancyPrinciple(signal, 0.9), nl.DistanceToConstant()]
        flow = GroupFlow(signal, SMALL_IMAGE)
        runs.append(nl.solve(flow, t=5, integrator=RelaxedSemiImplicit(4), trackers=rules))
    here, there = runs
    assert (there.status, there.t.tolist()) == (here.status, here.t.tolist())
    assert isinstance(there.final, torch.Tensor)
    np.testing.assert_allclose(there.final.numpy(), here.final, atol=1e-9)
    np.testing.assert_allclose(there.energy, here.energy, rtol=1e-7)
    for name, record in here.records.items():
        for key, values in record.items():
            np.testing.assert_allclose(there.records[name][key], values, rtol=1e-7, atol=1e-9)
    path = tmp_path / "run.npz"
    integrator = RelaxedSemiImplicit(4)
    whole = nl.solve(GroupFlow(g, SMALL_IMAGE), t=5, integrator=integrator, energies=False)
    nl.solve(GroupFlow(g, SMALL_IMAGE), t=5, integrator=integrator, energies=False, trackers=[
        nl.Checkpoint(path), nl.Callback(lambda t, u, flow: "enough" if t == 2 else None)])  # fmt: skip
    again = nl.solve(GroupFlow(g, SMALL_IMAGE), t=5, integrator=integrator, energies=False, resume=path)
    assert torch.equal(again.final, whole.final)


def test_averages_and_missing_samples_of_a_flow_of_tensors() -> None:
    missing = RNG.random(IMAGE.shape) < 0.2
    variance = np.linspace(0.5, 2, IMAGE.size).reshape(IMAGE.shape)
    here = GroupFlow(IMAGE / 8, SMALL_IMAGE, missing=missing, variance=variance, search_every=2)
    there = GroupFlow(
        torch.from_numpy(IMAGE / 8), SMALL_IMAGE, missing=torch.from_numpy(missing),
        variance=torch.from_numpy(variance), search_every=2,
    )  # fmt: skip
    ends = [nl.solve(one, t=4, integrator=RelaxedSemiImplicit(3), energies=False).final for one in (here, there)]
    np.testing.assert_allclose(ends[1].numpy(), ends[0], atol=1e-9)
    for one, like in ((here, IMAGE), (there, torch.from_numpy(IMAGE))):
        assert type(one.affinity.average(like)) is type(like)
    np.testing.assert_allclose(there.affinity.average(torch.from_numpy(IMAGE)).numpy(), here.affinity.average(IMAGE))
    np.testing.assert_allclose(there.velocity(there.observed).numpy(), here.velocity(here.observed), atol=1e-9)


# ---- denoise


@pytest.mark.parametrize(
    "words",
    [
        {},
        {"sigma": None},
        {"sigma": None, "noise": "white"},
        {"sigma": None, "noise": nl.GaussianNoise(8.0)},
        {"strength": 1.3, "keep": CLEAN > 130},
        {"sigma": np.linspace(0, 16, 36) + 0 * CLEAN},
        {"stopping": "discrepancy"},
        {"stopping": "sure", "seed": 3},
        {"mask": np.random.default_rng(1).random(CLEAN.shape) < 0.1},
        {"sigma": None, "noise": "poisson"},
        {"sigma": None, "noise": nl.GaussianNoise.from_kernel(np.ones((2, 2)), 8.0)},
        pytest.param({"quality": "best"}, marks=pytest.mark.slow),
    ],
    ids=lambda words: "-".join(words) or "plain",
)  # fmt: skip
def test_a_tensor_is_denoised_as_an_array(words: dict[str, Any]) -> None:
    image = np.abs(IMAGE)
    given = {"sigma": 8.0, **words}
    expected, info = denoise(image, **given, return_info=True)
    placed = {name: torch.from_numpy(v) if isinstance(v, np.ndarray) else v for name, v in given.items()}
    made, told = denoise(torch.from_numpy(image), **placed, return_info=True)
    assert made.dtype == torch.float64
    assert made.shape == image.shape
    assert np.abs(made.numpy() - expected).max() < 0.02
    for name in ("steps", "quality", "sigma_estimated", "parameters", "functional"):
        assert getattr(told, name) == getattr(info, name), name
    for name in ("sigma", "residual", "risk"):
        here, there = getattr(info, name), getattr(told, name)
        assert there == (None if here is None else pytest.approx(here, rel=1e-3, abs=0.01)), name


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["colour", "two", "signal", "volume", "fast volume", "float16"])
def test_layouts_and_types(kind: str) -> None:
    words: dict[str, Any] = {}
    if kind == "colour":
        image, words = np.stack([IMAGE, IMAGE[::-1], IMAGE + 3]), {"channel_axis": 0, "sigma": [8.0, 7.0, 8.0]}
    elif kind == "two":
        image, words = np.stack([IMAGE, IMAGE[:, ::-1]], axis=1), {"axes": "YCX"}
    elif kind == "signal":
        image = noisy(40 * steps_and_waves(300), 8.0)
    elif kind == "float16":
        image = IMAGE.astype(np.float16)
    else:
        image = noisy(np.add.outer(np.linspace(0, 40, 9), CLEAN[:20, :22]), 8.0).astype(np.float32)
        words = {
            "axes": "ZYX",
            "spacing": (2.0, 1.0, 1.0),
            "quality": "fast" if kind == "fast volume" else "balanced",
        }
    words = {"sigma": 8.0, **words}
    expected, made = denoise(image, **words), denoise(torch.from_numpy(image), **words)
    assert str(made.dtype) == f"torch.{expected.dtype}"
    assert np.abs(made.numpy() - expected).max() < 0.02


@pytest.mark.slow
@pytest.mark.parametrize("axes", ["BYX", "YBX", "BX", "BYXC", "CBYX", "BZYX"])
def test_a_batch_is_its_items_one_by_one(axes: str) -> None:
    item = {"YX": CLEAN, "X": 40 * steps_and_waves(200), "YXC": np.stack([CLEAN[:24], CLEAN[8:32]], -1),
            "ZYX": np.add.outer(np.linspace(0, 40, 8), CLEAN[:12, :12])}  # fmt: skip
    batch = axes.index("B")
    clean = item["".join(sorted(axes.replace("B", ""), key="ZYXC".index))]
    clean = np.moveaxis(clean, -1, 0) if axes == "CBYX" else clean
    # The third has far less noise over its signal, so that its groups are others.
    items = [noisy(clean, 8.0, seed=0), noisy(clean[::-1], 8.0, seed=1), noisy(5 * clean, 8.0, seed=2)]
    channel = {"YXC": -1, "CYX": 0}.get(axes.replace("B", ""))
    layout = {"axes": "ZYX"} if "Z" in axes else {"channel_axis": channel}
    made = denoise(torch.from_numpy(np.stack(items, batch)), 8.0, axes=axes)
    for number, one in enumerate(items):
        expected = denoise(torch.from_numpy(one), 8.0, **layout)
        assert float((made.select(batch, number) - expected).abs().max()) < 0.02


def with_constant(image: Floats) -> Floats:
    return np.stack([image, image[::-1], np.full_like(image, 255.0)], -1)


def test_a_constant_channel_counts_as_none() -> None:
    """As for arrays: an opaque alpha channel decides nothing and comes back."""
    image = with_constant(IMAGE[:16, :18])
    made = denoise(torch.from_numpy(image), 8.0, channel_axis=-1)
    assert torch.equal(made[..., 2], torch.from_numpy(image[..., 2]))
    without = denoise(torch.from_numpy(image[..., :2].copy()), 8.0, channel_axis=-1)
    # A GPU sums over three channels in another order than over two: some roundings of float32 of samples up to 256.
    assert float((made[..., :2] - without).abs().max()) <= (16 * 256 * 2.0**-24 if made.is_cuda else 0)
    assert np.abs(made.numpy() - denoise(image, 8.0, channel_axis=-1)).max() < 0.02


@pytest.mark.slow
def test_a_constant_channel_of_one_item_counts_as_none_there() -> None:
    image = with_constant(IMAGE)
    made = denoise(torch.from_numpy(image), 8.0, channel_axis=-1)
    noisy_third = image + np.random.default_rng(3).normal(0, 8, image.shape) * (np.arange(3) == 2)
    batch = denoise(torch.from_numpy(np.stack([image, noisy_third])), (8.0, 8.0, 8.0), axes="BYXC")
    assert float((batch[0] - made).abs().max()) < 0.02
    assert float((batch[1] - denoise(torch.from_numpy(noisy_third), 8.0, channel_axis=-1)).abs().max()) < 0.02
    tracked = torch.from_numpy(image).requires_grad_()
    denoise(tracked, 8.0, channel_axis=-1)[..., 2].sum().backward()
    assert tracked.grad is not None
    assert torch.equal(tracked.grad, torch.ones_like(tracked) * (torch.arange(3) == 2))
    _, info = denoise(torch.from_numpy(image), channel_axis=-1, noise="white", return_info=True)
    assert info.sigma == pytest.approx(denoise(image, channel_axis=-1, noise="white", return_info=True)[1].sigma)


@pytest.mark.slow
def test_what_is_said_of_each_item_of_a_batch() -> None:
    images = torch.from_numpy(np.stack([IMAGE, np.full_like(IMAGE, 7.0), IMAGE[::-1]]))
    sigma = torch.full(images.shape, 8.0, dtype=torch.float64)
    sigma[2, :, :20] = 3.0
    made, info = denoise(images, sigma, axes="BYX", return_info=True)
    assert torch.equal(made[1], images[1])  # constant
    for number in (0, 2):
        expected = denoise(images[number], sigma[number])
        assert float((made[number] - expected).abs().max()) < 0.02
    assert info.steps == 6
    estimated = denoise(images[::2], axes="BYX", noise="white")
    assert float((estimated[1] - denoise(images[2], noise="white")).abs().max()) < 0.02
    counts = torch.from_numpy(RNG.poisson(CLEAN, (2, *CLEAN.shape)).astype(np.float64))
    made, info = denoise(counts, axes="BYX", noise="poisson", return_info=True)
    assert len(info.columns) == 2
    assert torch.equal(made[1], denoise(counts[1], noise="poisson"))


def test_arrays_on_another_device(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = denoise(IMAGE, 8.0)
    made = denoise(IMAGE, 8.0, device="cpu-tensors")
    assert isinstance(made, np.ndarray)
    assert 0 < np.abs(made - expected).max() < 0.02  # another implementation
    shown = np.stack([IMAGE[:20], IMAGE[:20]], axis=-1)
    two = denoise(shown, 8.0, channel_axis=-1, separate=True, device="cpu-tensors")
    assert np.abs(two[..., 0] - denoise(IMAGE[:20], 8.0)).max() < 0.02
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # a GPU, where there is one, sums in another order
    for quality in ("pixels", "balanced"):
        np.testing.assert_array_equal(denoise(IMAGE, 8.0, quality=quality, device="auto"),
                                      denoise(IMAGE, 8.0, quality=quality))  # fmt: skip


@pytest.mark.slow
def test_parts_of_an_image_agree_with_the_whole() -> None:
    signal = torch.from_numpy(noisy(4 * waves(400, 24), 1.0))[..., None].float()
    groupings, run = SMALL.groupings(0.3, 2), []
    for limit in (1e9, 2.5e5):
        path, tiles, memory = in_tiles(
            signal, SMALL, groupings, torch.ones_like(signal), None, groupwise.problem, Watch(limit=limit), 1000
        )
        run.append((path[-1], tiles))
        assert memory <= limit
    assert run[0][1] == 1 < run[1][1]
    # The order of sums is another one where the first chunk begins elsewhere.
    torch.testing.assert_close(run[0][0], run[1][0], rtol=0, atol=SINGLE)
    image = torch.from_numpy(IMAGE)
    result, info = denoise(image, 8.0, max_memory=4e6, return_info=True)  # smaller chunks
    assert info.memory_bytes <= 4e6
    assert float((result - denoise(image, 8.0)).abs().max()) < 0.02
    with pytest.raises(nl.MemoryLimitError, match="max_memory: a strip of 64 samples"):
        denoise(image, 8.0, max_memory=10_000)


def test_a_device_out_of_memory_says_what_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(TensorFilter, "step", full)
    message = r"image: 1152 samples in torch.float32 need .* on cpu, where .* are free; about 576 samples fit at most"
    with pytest.raises(nl.MemoryLimitError, match=message):
        denoise(torch.from_numpy(IMAGE), 8.0)

    def another(*_: Any, **__: Any) -> Any:
        raise RuntimeError("something else")

    monkeypatch.setattr(TensorFilter, "step", another)
    with pytest.raises(RuntimeError, match="something else"):
        denoise(torch.from_numpy(IMAGE), 8.0)


@pytest.mark.slow
def test_progress_rises_to_one() -> None:
    for words in ({}, {"mask": torch.zeros(IMAGE.shape, dtype=torch.bool)}, {"axes": "BYX"}, {"stopping": "sure"}):
        image = torch.from_numpy(IMAGE)
        shares: list[float] = []
        denoise(torch.stack([image, 3 * image]) if "axes" in words else image, 8.0, progress=shares.append, **words)
        assert shares == sorted(shares)
        assert shares[-1] == 1.0
        assert len(shares) > 6


def test_doubts_about_noise_that_was_found_out_are_told() -> None:
    image = IMAGE.copy()
    with warnings.catch_warnings(record=True) as here:
        warnings.simplefilter("always")
        denoise(image / 1e3 + 5 * CLEAN)
    with warnings.catch_warnings(record=True) as there:
        warnings.simplefilter("always")
        denoise(torch.from_numpy(image / 1e3 + 5 * CLEAN))
    assert [str(one.message) for one in there] == [str(one.message) for one in here]


@pytest.mark.parametrize("values", [[np.nan], [np.inf], [-np.inf, np.inf, np.nan]], ids=str)
@pytest.mark.parametrize("batch", [False, True])
def test_what_a_mask_hides_need_not_be_finite(values: list[float], batch: bool) -> None:
    image, mask = IMAGE.copy(), np.zeros(IMAGE.shape, bool)
    mask[9:11, 9:13] = True
    image[mask] = np.resize(values, np.count_nonzero(mask))
    expected = denoise(image, 8.0, mask=mask, quality="fast")
    for given in ("nan", mask):
        if batch:
            given = given if isinstance(given, str) else torch.from_numpy(np.stack([mask, mask]))
            made = denoise(torch.from_numpy(np.stack([image, image])), 8.0, mask=given, quality="fast", axes="BYX")[1]
        else:
            given = given if isinstance(given, str) else torch.from_numpy(given)
            made = denoise(torch.from_numpy(image), 8.0, mask=given, quality="fast")
        np.testing.assert_allclose(made, expected, atol=SINGLE)
    with pytest.raises(nl.InputError, match="requires a gradient with a mask of missing samples"):
        denoise(torch.from_numpy(image).requires_grad_(), 8.0, mask="nan", quality="fast")
    image[0, 0] = np.inf
    with pytest.raises(nl.InputError, match=r"image: got 1 infinite value\(s\) .*\(0, 0\)"):
        denoise(torch.from_numpy(image), 8.0, mask=torch.from_numpy(mask), quality="fast")


@pytest.mark.parametrize("noise", ["impulses", "hot"])
def test_what_is_kept_is_the_input_though_it_is_an_impulse(noise: str) -> None:
    image, keep = np.rint(IMAGE).clip(1, 254), np.ones(IMAGE.shape, bool)
    image[4::9, 5::11] = 255.0
    given = torch.from_numpy(image)
    made = denoise(given, noise=noise, keep=torch.from_numpy(keep), quality="fast")
    assert torch.equal(made, given)


# ---- what cannot be done


T = torch.zeros(12, 12)
REFUSED = [
    (T.bfloat16(), {}, r"image: got bfloat16, .* expected float32 or float64; convert it with \.float\(\)"),
    (T.int(), {}, r"image: got a tensor of torch.int32, expected float32 or float64"),
    (T.to(torch.complex64), {}, "image: got a torch tensor of dtype torch.complex64"),
    (T.to("meta"), {}, "image: it is on meta, .* expected a tensor on cpu or cuda"),
    (T.to_sparse(), {}, "image: got a tensor of layout torch.sparse_coo, expected a dense one"),
    (T + torch.nan, {}, "image: got no sample that is a number"),
    (T[:0], {}, "image: got an empty array"),
    (T, {"sigma": torch.ones((), device="meta")}, "sigma: it is on meta, expected cpu, as the image"),
    (T, {"sigma": np.ones((12, 12))}, "sigma: got an array beside a tensor on cpu, expected a tensor there"),
    (T, {"sigma": -1.0}, "sigma: got -1"),
    (T, {"sigma": torch.full((12, 12), -1.0)}, "sigma: got -1, expected values >= 0"),
    (T, {"sigma": torch.ones(3)}, r"sigma: got shape \(3,\), expected \(12, 12\)"),
    (T, {"sigma": [1.0, 2.0]}, r"sigma: got numbers of shape \(2,\), expected one"),
    (T, {"sigma": torch.ones(12, 12, requires_grad=True)}, "sigma: got a tensor that requires a gradient"),
    (T, {"mask": torch.zeros(12, 12, dtype=torch.bool, device="meta")}, "mask: it is on meta, expected cpu"),
    (T, {"keep": np.zeros((12, 12), bool)}, "keep: got an array beside a tensor"),
    (T, {"keep": T + torch.nan}, "keep: got NaN or infinite values, expected numbers"),
    (T, {"quality": "pixels"}, "quality: got 'pixels' for a tensor, a flow of pixels on the CPU alone"),
    (T, {"width": 3.0}, "width: only quality='pixels' has it"),
    (torch.zeros(9, 9, 9), {"axes": "TYX"}, "axes: got a clip for a tensor, whose search follows no motion"),
    (T, {"separate": True}, "separate: got True for a tensor, expected False; name its channels as a batch"),
    (T, {"device": "cuda"}, "device: got 'cuda' for a tensor, which stays on cpu; leave it out"),
    (T, {"progress": Trail()}, "progress: got a Trail for a tensor"),
    (T, {"stopping": "soon"}, "stopping: got 'soon'"),
    (T, {"max_memory": -1}, "max_memory: got -1"),
    (torch.zeros(3, 9, 9), {"axes": "BYX", "channel_axis": 1}, "channel_axis: got 1 beside axes='BYX', expected None"),
    (torch.zeros(2, 3, 9, 9), {"axes": "BBYX"}, "axes: got 'BBYX'"),
]


@pytest.mark.parametrize("words", [{"quality": "pixels"}, {"axes": "TYX"}], ids=str)
def test_what_tensors_cannot_do_is_refused_before_the_noise_is_found_out(words: dict[str, Any]) -> None:
    image = torch.from_numpy(np.random.default_rng(0).normal(0, 1, (9, 12, 12) if "axes" in words else (12, 12)))
    for given in (image, image.clone().requires_grad_()):
        with pytest.raises(nl.InputError, match=f"{next(iter(words))}: got .* for a tensor"):
            denoise(given, **words)


def test_a_constant_channel_is_no_part_of_the_residual() -> None:
    image = np.stack([IMAGE, np.full_like(IMAGE, 255.0)], axis=-1)
    words: dict[str, Any] = {"channel_axis": -1, "quality": "fast", "return_info": True}
    result, info = denoise(torch.from_numpy(image), 8.0, **words)
    assert info.residual == pytest.approx(float((result[..., 0] - torch.from_numpy(IMAGE)).square().mean().sqrt()))
    assert info.residual == pytest.approx(denoise(image, 8.0, **words)[1].residual, rel=1e-5)


@pytest.mark.parametrize(("image", "words", "message"), REFUSED, ids=[message[:30] for *_, message in REFUSED])
def test_what_tensors_cannot_do_is_refused_by_name(image: Any, words: dict[str, Any], message: str) -> None:
    with pytest.raises(nl.InputError, match=message):
        denoise(image, **{"sigma": 1.0, **words})


def test_arrays_beside_tensors_and_devices_that_are_not_there() -> None:
    for name in ("sigma", "mask", "keep"):
        with pytest.raises(nl.InputError, match=f"{name}: got a tensor beside an image that is none"):
            denoise(IMAGE, **{"sigma": 1.0, name: torch.ones(IMAGE.shape)})
    with pytest.raises(nl.InputError, match="device: got 'cpu-tensors' with quality='pixels'"):
        denoise(IMAGE, 8.0, quality="pixels", device="cpu-tensors")
    with pytest.raises(nl.InputError, match="device: got 'cpu-tensors' for a clip"):
        denoise(np.stack([IMAGE[:12, :12]] * 3), 8.0, axes="TYX", device="cpu-tensors")
    with pytest.raises(nl.InputError, match="device: got 'gpu', expected one of"):
        denoise(IMAGE, 8.0, device="gpu")
    if not torch.cuda.is_available():
        with pytest.raises(nl.InputError, match="device: got 'cuda', and there is cpu"):
            denoise(IMAGE, 8.0, device="cuda")
    with pytest.raises(nl.InputError, match="image: got Tensor, expected a NumPy array"):
        problem(torch.from_numpy(IMAGE), 8.0)


def test_flows_and_filters_of_other_kinds_are_refused() -> None:
    g = torch.from_numpy(IMAGE)
    with pytest.raises(nl.InputError, match="filter: got CompiledFilter for a tensor, expected TensorFilter"):
        GroupFlow(g, SMALL_IMAGE, filter=CompiledFilter())
    with pytest.raises(nl.InputError, match="filter: got TensorFilter for an array, expected CompiledFilter or Plain"):
        GroupFlow(IMAGE, SMALL_IMAGE, filter=TensorFilter())
    with pytest.raises(nl.InputError, match="moving: got True for a tensor"):
        GroupFlow(torch.zeros(4, 9, 9), SMALL_IMAGE, moving=True)
    with pytest.raises(nl.InputError, match="missing: it is on the host, expected c"):
        GroupFlow(g, SMALL_IMAGE, missing=np.zeros(IMAGE.shape, bool))
    with pytest.raises(nl.InputError, match="variance: got ndarray of float64, expected Tensor"):
        GroupFlow(g, SMALL_IMAGE, variance=np.ones(IMAGE.shape))
    with pytest.raises(nl.NumericalError, match="guide: got NaN, infinity or values whose squares overflow"):
        _ = GroupFlow(1e20 * g.float(), SMALL_IMAGE).groups

    class Outside(TensorFilter):
        def find(self, guide: Any, lattice: Lattice) -> Any:
            members, counts = super().find(guide, lattice)
            return members + 1000, counts

    with pytest.raises(nl.InputError, match="find: got a member outside of the search window"):
        _ = GroupFlow(g, SMALL_IMAGE, filter=Outside()).groups

    class Fewer(TensorFilter):  # groups of one's own: their first four members
        def find(self, guide: Any, lattice: Lattice) -> Any:
            members, counts = super().find(guide, lattice)
            return members, counts.clamp(max=4)

    flow = GroupFlow(g, SMALL_IMAGE, variance=64.0, filter=Fewer())
    plain = PlainFilter().step(flow.groups.on_host, flow._images(g).on_host, flow._stage())[0]
    np.testing.assert_allclose(flow.step(g)[0].numpy(), plain.reshape(IMAGE.shape), atol=1e-8)
    assert groups_of(flow.filter, torch.from_numpy(IMAGE)[None, None], flow._lattices[0]).counts.max() == 4


# ---- the command, and the workers


def test_the_command_takes_a_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from typer.testing import CliRunner

    from nlflow.desk.commands.main import app

    monkeypatch.chdir(tmp_path)
    np.save("in.npy", IMAGE)
    runner = CliRunner()
    made = runner.invoke(
        app, ["denoise", "in.npy", "out.npy", "--sigma", "8", "--kind", "image", "--device", "cpu-tensors"]
    )
    assert made.exit_code == 0, made.output
    np.testing.assert_array_equal(np.load("out.npy", allow_pickle=False), denoise(IMAGE, 8.0, device="cpu-tensors"))
    if not torch.cuda.is_available():
        refused = runner.invoke(app, ["denoise", "in.npy", "other.npy", "--device", "cuda"])
        assert refused.exit_code == 2
        assert "--device" in refused.output
    words = ["--quality", "pixels", "--device", "cpu-tensors", "--kind", "image"]
    fast = runner.invoke(app, ["denoise", "in.npy", "other.npy", *words])
    assert fast.exit_code == 1
    assert "device: got 'cpu-tensors' with quality='pixels'" in fast.output
    store = runner.invoke(app, ["denoise", "in.npy", "out.zarr", "--device", "cpu-tensors"])
    assert store.exit_code != 0
    assert "--device" in store.output


def test_work_in_order_by_several_workers() -> None:
    from nlflow.backends.threads import in_order

    for workers in (1, 2, 5):
        begun: list[int] = []

        def square(k: int, begun: list[int] = begun) -> int:
            begun.append(k)
            return k * k

        assert list(in_order(square, range(30), workers)) == [k * k for k in range(30)]
        begun.clear()
        some = in_order(square, range(1000), workers)
        assert next(some) == 0
        some.close()
        assert len(begun) < 50  # what nobody waits for is not begun

    def fails(k: int) -> int:
        return 1 // (3 - k)

    with pytest.raises(ZeroDivisionError):
        list(in_order(fails, range(9), 2))


def test_holders_of_one_thread_may_overlap() -> None:
    from nlflow.backends.threads import one_torch_thread

    torch.set_num_threads(2)
    first, second = one_torch_thread(), one_torch_thread()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert torch.get_num_threads() == 1
    second.__exit__(None, None, None)
    assert torch.get_num_threads() == 2
    torch.set_num_threads(1)
