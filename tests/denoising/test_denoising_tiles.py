"""Tiles, memory, threads, progress: what must not change the result of denoising."""

from __future__ import annotations

import gc
import math
import weakref
from dataclasses import replace
from typing import Any

import numba
import numpy as np
import pytest

from benchmarks.resident import traced
from nlflow import InputError, MemoryLimitError, denoise
from nlflow.denoising import groupwise
from nlflow.denoising.groupwise import PRESETS, bytes_needed, in_tiles
from nlflow.denoising.noise import GaussianNoise
from nlflow.denoising.patches import CompiledFilter
from nlflow.denoising.patches.affinity import as_signal
from nlflow.denoising.runs import Watch
from tests.covering import pairs
from tests.pictures import GROUPS_SLOWLY, ON_GROUPS, QUALITIES, SLOWLY, SMALL, Floats, noisy, steps_and_waves, waves

TALL, LONG = (420, 24), (1, 5200)


def planes(shape: tuple[int, int], channels: int = 1, dtype: Any = np.float32) -> Floats:
    clean = waves(*shape) if shape[0] > 1 else steps_and_waves(shape[1])[None]
    return noisy(np.stack([(4 + c) * clean for c in range(channels)]), 1.0).astype(dtype)


def cut(
    image: Floats, variance: Floats | None, missing: Floats | None, limit: float | None, path: bool = False,
    tell: Any = None,
) -> Any:  # fmt: skip
    dimension = 2 if image.shape[1] > 1 else 1
    signal = as_signal(image, (*image.shape[1:], len(image)))
    given = None if variance is None else as_signal(variance, signal.shape)
    groupings, watch = SMALL.groupings(0.3, dimension), Watch(path, limit, tell)
    return in_tiles(signal, SMALL, groupings, given, missing, groupwise.problem, watch)


# ---- tiles


@pytest.mark.numerical
@pytest.mark.parametrize(("shape", "kind", "channels"), pairs([TALL, LONG], ["plain", "map", "missing"], [1, 3]))
@pytest.mark.sampled(2)
def test_strips_have_the_bits_of_the_whole(shape: tuple[int, int], kind: str, channels: int):
    image = planes(shape, channels)
    variance = None
    if kind == "map":
        level = np.linspace(0.5, 1.5, math.prod(shape), dtype=np.float32).reshape(shape)
        variance = np.ascontiguousarray(np.broadcast_to(level, image.shape))
    missing = np.random.default_rng(0).random(shape) < 0.02 if kind == "missing" else None
    whole, one, memory = cut(image, variance, missing, None)
    parts, several, less = cut(image, variance, missing, 0.75 * memory)
    assert one == 1
    assert several >= 2
    assert less <= 0.75 * memory
    np.testing.assert_array_equal(parts[0], whole[0])


def test_the_path_is_cut_too():
    image = planes(TALL, dtype=np.float64)
    whole, _, memory = cut(image, None, None, None, path=True)
    parts, count, _ = cut(image, None, None, 0.6 * memory, path=True)
    assert count >= 2
    assert len(whole) == len(parts) == SMALL.steps + 1
    for mine, its in zip(parts, whole, strict=True):
        np.testing.assert_array_equal(mine, its)


@pytest.mark.parametrize("shape", [(420, 24), (5200,), (420, 20, 3)])
def test_a_limit_of_memory_does_not_change_the_result(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(PRESETS, "balanced", SMALL)
    clean = steps_and_waves(math.prod(shape)) if len(shape) == 1 else 4 * waves(*shape[:2])
    value = noisy(np.stack([clean] * 3, axis=-1) if len(shape) == 3 else clean, 1.0)
    options: dict[str, Any] = {"return_info": True, "channel_axis": -1 if len(shape) == 3 else None}
    expected, info = denoise(value, 1.0, **options)
    result, cut_info = denoise(value, 1.0, max_memory=0.8 * info.memory_bytes, **options)
    np.testing.assert_array_equal(result, expected)
    assert info.tiles == 1
    assert cut_info.memory_bytes <= 0.8 * info.memory_bytes
    assert cut_info.tiles >= 2


@pytest.mark.slow
@pytest.mark.parametrize("noise", ["white", "correlated"])
def test_a_first_estimate_of_a_large_image_comes_in_strips(noise: str, monkeypatch: pytest.MonkeyPatch):
    spectrum = None if noise == "white" else np.linspace(2.0, 0.1, 16)[None, :, None] * np.ones((1, 1, 16))
    model, image = GaussianNoise(10.0, spectrum), noisy(waves(200, 40), 10.0)
    whole = denoise(image, noise=model, quality="fast")
    monkeypatch.setattr(groupwise, "_STRIP", 1)
    parts, info = denoise(image, noise=model, quality="fast", return_info=True)
    assert info.tiles > 1
    assert np.array_equal(parts, whole)


def test_strips_follow_a_mask_and_a_rule(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(PRESETS, "best", SMALL)
    value, missing = noisy(4 * waves(*TALL), 1.0), np.random.default_rng(1).random(TALL) < 0.02
    for options in (
        {"stopping": "sure"},
        {"stopping": "discrepancy"},
        {"sigma": np.linspace(0.5, 1.5, 24) + 0 * value},
    ):
        given: dict[str, Any] = {"sigma": 1.0, "quality": "best", "mask": missing, "return_info": True, **options}
        expected, info = denoise(value, **given)
        result, cut_info = denoise(value, max_memory=0.75 * info.memory_bytes, **given)
        np.testing.assert_array_equal(result, expected)
        assert cut_info.tiles > info.tiles == 1
        assert cut_info.risk == info.risk
        assert cut_info.stopped_by == info.stopped_by


@pytest.mark.parametrize("quality", QUALITIES)
def test_too_little_memory_is_refused(quality: str):
    value = np.zeros((300, 300), np.float32)
    value[0, 0] = 1
    with pytest.raises(MemoryLimitError, match=r"^max_memory: .* needs .* bytes\), the limit is .*raise max_memory"):
        denoise(value, 0.1, quality=quality, max_memory=10_000)


@pytest.mark.parametrize(
    ("bad", "message"), [(-5, "got -5"), (0, "got 0"), (math.nan, "got nan"), ("1 GB", "got '1 GB'")]
)
def test_a_limit_is_a_number_of_bytes(bad: Any, message: str):
    with pytest.raises(InputError, match=f"max_memory: {message}"):
        denoise(np.ones((9, 9)), 1.0, max_memory=bad)


def test_no_limit_is_a_limit():
    value = noisy(waves(24, 24))
    np.testing.assert_array_equal(denoise(value, 0.1, max_memory=math.inf), denoise(value, 0.1))


def test_the_default_limit_is_that_of_the_package(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NLFLOW_MEMORY_LIMIT", "10000")
    with pytest.raises(MemoryLimitError):
        denoise(noisy(waves(70, 70)), 0.1)


# ---- memory


@pytest.mark.slow
@pytest.mark.parametrize("quality", SLOWLY)
@pytest.mark.sampled(1)
def test_the_working_memory_of_a_pixel(quality: str):
    value = noisy(5 * waves(256, 256), 1.0).astype(np.float32)
    denoise(value[:20, :20], 1.0, quality=quality)  # loops are compiled before anything is counted
    if quality in PRESETS:
        # The number of steps adds the estimates of the path alone, which count by their size.
        steps = PRESETS[quality].steps
        value = value if steps < 6 else value[:, :160]
    with traced() as taken:
        _, info = denoise(value, 1.0, quality=quality, return_info=True)
    assert taken.bytes < 1500 * value.size
    assert info.memory_bytes < 1500 * value.size
    assert 0.4 * taken.bytes < info.memory_bytes < 2.5 * taken.bytes


def test_memory_grows_with_what_there_is():
    groupings = SMALL.groupings(0.3, 2)
    needed = [
        bytes_needed((c, n, n), groupings, 2, size) for c, n, size in ((1, 64, 4), (1, 64, 8), (3, 64, 4), (1, 128, 4))
    ]
    assert needed[0] < min(needed[1:])
    assert 2 * needed[0] < needed[3] < 5 * needed[0]


def test_a_tile_is_let_go_before_the_next_begins() -> None:
    # What a cycle holds stays until its collector comes, and that counts objects, not the bytes of their arrays.
    held: list[weakref.ref[Any]] = []

    def alone(*arguments: Any, **options: Any) -> Any:
        assert [one() for one in held] == [None] * len(held)
        made = groupwise.problem(*arguments, **options)
        held.append(weakref.ref(made.flow.filter))
        return made

    kept = replace(SMALL, steps=4, search_every=2)  # groups of a step are kept for the next
    signal, groupings = as_signal(planes(TALL), (*TALL, 1)), SMALL.groupings(0.3, 2)
    gc.disable()
    try:
        in_tiles(signal, kept, groupings, None, None, alone, Watch(False, 550_000, None))
    finally:
        gc.enable()
    assert len(held) > 2


# ---- threads


@pytest.mark.numerical
@pytest.mark.parametrize(
    ("quality", "channels"),
    [
        *(("pixels", None), ("pixels", 3), ("balanced", None)),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("balanced", 3), ("best", None), ("best", 3))),
    ],
)
def test_the_number_of_threads_does_not_matter(quality: str, channels: int | None):
    value = noisy(5 * waves(44, 70), 1.0)
    if channels is not None:
        value = noisy(np.stack([value] * channels, axis=-1), 1.0, seed=1)
    missing = np.zeros(value.shape[:2], bool)
    missing[10:14, 20:25] = True
    most, results = numba.get_num_threads(), []
    try:
        for threads in (1, min(2, numba.config.NUMBA_NUM_THREADS)):
            numba.set_num_threads(threads)
            results.append(denoise(value, 1.0, quality=quality, channel_axis=channels and -1, mask=missing))
    finally:
        numba.set_num_threads(most)
    np.testing.assert_array_equal(*results)


# ---- progress


@pytest.mark.parametrize("quality", GROUPS_SLOWLY)
@pytest.mark.parametrize("hidden", [False, True])
def test_progress_goes_to_stderr_alone_and_ends_at_all(quality: str, hidden: bool, capsys: pytest.CaptureFixture[str]):
    value, missing = noisy(5 * waves(), 1.0), np.zeros((40, 40), bool)
    missing[3, 4] = hidden
    quiet = denoise(value, 1.0, quality=quality, mask=missing)
    assert capsys.readouterr() == ("", "")
    np.testing.assert_array_equal(denoise(value, 1.0, quality=quality, mask=missing, progress=True), quiet)
    out, err = capsys.readouterr()
    assert out == ""
    assert quality in err


@pytest.mark.parametrize("limit", [None, 0.75])
def test_the_shares_of_progress_rise_to_all(limit: float | None):
    shares: list[float] = []
    image = planes(TALL)
    memory = cut(image, None, None, None)[2]
    cut(image, None, None, limit and limit * memory, tell=shares.append)
    assert min(shares) >= 0
    assert shares == sorted(shares)
    assert shares[-1] == 1
    assert len(set(shares)) > 3 * SMALL.steps  # within steps too


@pytest.mark.parametrize("quality", ON_GROUPS)
def test_an_interruption_passes_through(quality: str, monkeypatch: pytest.MonkeyPatch):
    def interrupted(*args: Any, **options: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(CompiledFilter, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        denoise(noisy(waves(20, 20)), 0.1, quality=quality, progress=True)
