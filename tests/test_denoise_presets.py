"""What must hold for every preset of `denoise`: equivariance, types, threads, strips, masks, noise of every kind."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace

import numba
import numpy as np
import pytest
import pywt
from skimage.data import camera

from nlflow import InputError, MemoryLimitError, PatchGroups, Poisson, denoise
from nlflow.denoising import api, groupwise, presets, tiles
from nlflow.denoising.presets import PRESETS, Grouping, GroupPreset
from nlflow.fidelity import MatrixFidelity

QUALITIES = ("fast", "balanced", "best")
SIGMA = 20.0
CLEAN = camera()[100:172, 190:270].astype(np.float64)
NOISY = CLEAN + np.random.default_rng(0).normal(0, SIGMA, CLEAN.shape)
LINE = np.sign(np.sin(np.arange(300) / 20)) + np.random.default_rng(1).normal(0, 0.3, 300)
SMALL = GroupPreset(
    steps=2,
    first=((np.inf, Grouping(4, 20, 5, 3)),),
    later=((np.inf, Grouping(4, 12, 5, 3)),),
    first_signal=Grouping(8, 12, 20, 2),
    later_signal=Grouping(8, 10, 20, 2),
)


@pytest.fixture(scope="module")
def results() -> dict[str, np.ndarray]:
    return {quality: denoise(NOISY, SIGMA, quality=quality) for quality in QUALITIES}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> GroupPreset:
    monkeypatch.setitem(PRESETS, "balanced", SMALL)
    return SMALL


def psnr(result: np.ndarray, clean: np.ndarray = CLEAN) -> float:
    return float(10 * np.log10(255**2 / np.mean((result - clean) ** 2)))


def test_more_time_gives_more_quality(results: dict[str, np.ndarray]) -> None:
    fast, balanced, best = (psnr(results[quality]) for quality in QUALITIES)
    assert psnr(NOISY) + 7 < fast
    assert fast < balanced < best


@pytest.mark.parametrize("quality", QUALITIES)
@pytest.mark.parametrize(
    "turn",
    [np.transpose, np.flipud, np.fliplr, lambda a: np.rot90(a)],
    ids=["transposed", "upside down", "mirrored", "turned"],
)
def test_turned_input_gives_the_turned_result(results: dict[str, np.ndarray], quality: str, turn: object) -> None:
    turned = denoise(np.ascontiguousarray(turn(NOISY)), SIGMA, quality=quality)  # type: ignore[operator]
    # Rounding may swap members of a group that are equally near.
    np.testing.assert_allclose(turned, turn(results[quality]), atol=1e-2 * SIGMA)  # type: ignore[operator]


@pytest.mark.parametrize("quality", QUALITIES)
def test_a_reversed_signal_gives_the_reversed_result(quality: str) -> None:
    np.testing.assert_allclose(
        denoise(LINE[::-1].copy(), 0.3, quality=quality), denoise(LINE, 0.3, quality=quality)[::-1], atol=1e-3
    )


@pytest.mark.parametrize("quality", QUALITIES)
@pytest.mark.parametrize(("scale", "shift"), [(1e6, 0.0), (1e-6, 0.0), (1.0, 3e3), (1 / 255, -7.0)])
def test_the_result_scales_and_shifts_with_the_input(
    results: dict[str, np.ndarray], quality: str, scale: float, shift: float
) -> None:
    result = denoise(scale * NOISY + shift, scale * SIGMA, quality=quality)
    np.testing.assert_allclose((result - shift) / scale, results[quality], atol=2e-3 * SIGMA)


@pytest.mark.parametrize("quality", QUALITIES)
@pytest.mark.parametrize("dtype", ["f4", "f8", "u1", "u2", "i2", "i8"])
def test_every_type_gives_the_same_result(quality: str, dtype: str) -> None:
    counts = np.clip(np.rint(NOISY), 0, 255)
    whole = denoise(counts, SIGMA, quality=quality)
    result = denoise(counts.astype(dtype), SIGMA, quality=quality, preserve_range=True)
    assert result.dtype == (np.float32 if dtype == "f4" else np.float64)
    np.testing.assert_allclose(result, whole, atol=2e-3 * SIGMA)


@pytest.mark.parametrize("quality", QUALITIES)
@pytest.mark.parametrize("channels", [1, 2, 3, 5])
def test_channels_may_lie_on_any_axis(quality: str, channels: int) -> None:
    image = np.stack([NOISY[:40, :44] + 10 * c for c in range(channels)], axis=-1)
    last = denoise(image, SIGMA, quality=quality, channel_axis=-1)
    first = denoise(np.moveaxis(image, -1, 0), SIGMA, quality=quality, channel_axis=0)
    assert last.shape == image.shape
    np.testing.assert_array_equal(np.moveaxis(first, 0, -1), last)


@pytest.mark.parametrize("quality", QUALITIES)
def test_colour_is_worth_more_than_each_channel_on_its_own(quality: str) -> None:
    rng = np.random.default_rng(2)
    clean = np.stack([CLEAN, 0.8 * CLEAN + 20, 255 - 0.5 * CLEAN], axis=-1)
    noisy = clean + rng.normal(0, SIGMA, clean.shape)
    together = denoise(noisy, SIGMA, quality=quality, channel_axis=-1)
    alone = np.stack([denoise(noisy[..., c], SIGMA, quality=quality) for c in range(3)], axis=-1)
    assert psnr(together, clean) > psnr(alone, clean) + 0.3


@pytest.mark.parametrize("quality", QUALITIES)
def test_the_number_of_threads_does_not_matter(results: dict[str, np.ndarray], quality: str) -> None:
    kept = numba.get_num_threads()
    try:
        numba.set_num_threads(1)
        np.testing.assert_array_equal(denoise(NOISY, SIGMA, quality=quality), results[quality])
    finally:
        numba.set_num_threads(kept)


@pytest.mark.parametrize("kind", ["grey", "colour", "varying", "missing", "signal"])
def test_strips_have_the_bits_of_the_whole(kind: str, small: GroupPreset) -> None:
    rng = np.random.default_rng(3)
    shape = {"colour": (400, 24, 3), "signal": (6000,)}.get(kind, (500, 24))
    image = np.cumsum(rng.normal(0, 1, shape), axis=0) + rng.normal(0, 2, shape)
    sigma = np.broadcast_to(np.linspace(1, 3, shape[1]), shape) if kind == "varying" else 2.0
    options = {"channel_axis": -1 if kind == "colour" else None, "return_info": True}
    if kind == "missing":
        options["mask"] = rng.random(shape) < 0.05
    whole, info = denoise(image, sigma, **options)
    assert info.tiles == 1
    parts, info_parts = denoise(image, sigma, max_memory=0.75 * info.memory_bytes, **options)
    assert info_parts.tiles > 1
    assert info_parts.memory_bytes <= 0.75 * info.memory_bytes
    np.testing.assert_array_equal(parts, whole)


def test_too_little_memory_is_refused_with_what_is_needed() -> None:
    with pytest.raises(MemoryLimitError, match=r"max_memory: a strip of 64 samples .* raise max_memory"):
        denoise(NOISY, SIGMA, max_memory=1000)


@pytest.mark.parametrize("quality", QUALITIES)
def test_memory_stays_below_a_kilobyte_and_a_half_a_pixel(quality: str) -> None:
    image = np.tile(NOISY.astype(np.float32), (4, 4))[:256, :256]
    tracemalloc.start()
    try:
        _, info = denoise(image, SIGMA, quality=quality, return_info=True)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak / image.size < 1500
    assert info.memory_bytes / image.size < 1500


@pytest.mark.parametrize("quality", QUALITIES)
def test_what_is_missing_never_leaks(quality: str) -> None:
    image, mask = NOISY[:40, :44].copy(), np.random.default_rng(4).random((40, 44)) < 0.2
    found = []
    for hidden in (0.0, 1e9, np.nan, np.inf):
        image[mask] = hidden
        found.append(denoise(image, SIGMA, mask=mask, quality=quality))
    image[mask] = np.nan
    found.append(denoise(image, SIGMA, mask="nan", quality=quality))
    for other in found[1:]:
        np.testing.assert_array_equal(other, found[0])
    clean = CLEAN[:40, :44]
    blind = np.where(mask, clean[~mask].mean(), clean)
    assert np.mean((found[0] - clean)[mask] ** 2) < 0.5 * np.mean((blind - clean)[mask] ** 2)


def test_holes_without_noise_are_filled_and_the_rest_kept_exactly() -> None:
    mask = np.random.default_rng(5).random(CLEAN.shape) < 0.3
    result = denoise(CLEAN, 0, mask=mask)
    np.testing.assert_array_equal(result[~mask], CLEAN[~mask])
    from skimage.restoration import inpaint_biharmonic

    peer = inpaint_biharmonic(CLEAN / 255, mask) * 255
    assert np.mean((result - CLEAN)[mask] ** 2) < np.mean((peer - CLEAN)[mask] ** 2)


@pytest.mark.parametrize("quality", QUALITIES)
def test_regions_are_left_alone(results: dict[str, np.ndarray], quality: str) -> None:
    keep = np.zeros(NOISY.shape, bool)
    keep[10:20] = True
    result = denoise(NOISY, SIGMA, keep=keep, quality=quality)
    np.testing.assert_array_equal(result[keep], NOISY[keep])
    np.testing.assert_array_equal(result[~keep], results[quality][~keep])


@pytest.mark.parametrize("quality", QUALITIES)
def test_a_map_of_the_noise_is_used(quality: str) -> None:
    level = np.broadcast_to(np.linspace(3, 45, NOISY.shape[1]), NOISY.shape)
    noisy = CLEAN + level * np.random.default_rng(6).normal(size=CLEAN.shape)
    uniform = float(np.sqrt(np.mean(level**2)))
    assert psnr(denoise(noisy, level, quality=quality)) > psnr(denoise(noisy, uniform, quality=quality)) + 1


@pytest.mark.parametrize("quality", QUALITIES)
def test_a_constant_map_is_a_number(results: dict[str, np.ndarray], quality: str) -> None:
    result = denoise(NOISY, np.full(NOISY.shape, SIGMA), quality=quality)
    np.testing.assert_allclose(result, results[quality], atol=1e-3 * SIGMA)


@pytest.mark.parametrize("quality", QUALITIES)
def test_counts_are_denoised_through_their_variance(quality: str) -> None:
    clean = CLEAN / 255 * 20
    counts = np.random.default_rng(7).poisson(clean)
    result = denoise(counts, noise="poisson", quality=quality, preserve_range=True)
    plain = denoise(counts, float(np.sqrt(clean.mean())), quality=quality, preserve_range=True)
    assert np.mean((result - clean) ** 2) < np.mean((plain - clean) ** 2)
    assert result.min() >= 0
    assert result.mean() == pytest.approx(clean.mean(), rel=0.01)
    shifted = denoise(3.0 * counts + 50, noise=Poisson(gain=3.0, offset=50.0), quality=quality)
    np.testing.assert_allclose((shifted - 50) / 3, result, atol=0.02)


@pytest.mark.parametrize("quality", ["fast", "balanced"])
def test_the_risk_is_estimated(quality: str) -> None:
    image = np.tile(CLEAN, (2, 2))
    noisy = image + np.random.default_rng(8).normal(0, SIGMA, image.shape)
    result, info = denoise(noisy, SIGMA, quality=quality, stopping="sure", return_info=True)
    error = float(np.mean((result - image) ** 2))
    assert info.risk == pytest.approx(error, abs=4 * SIGMA**2 * np.sqrt(2 / image.size))
    assert "SURE" in info.stopped_by


def test_the_discrepancy_takes_the_nearest_estimate() -> None:
    result, info = denoise(NOISY, SIGMA, quality="fast", stopping="discrepancy", return_info=True)
    residual = np.sqrt(np.mean((result - NOISY) ** 2)) / SIGMA
    others = [
        np.sqrt(np.mean((denoise(NOISY, SIGMA, quality="fast", steps=n) - NOISY) ** 2)) / SIGMA for n in range(1, 11)
    ]
    assert residual == pytest.approx(min(others, key=lambda r: abs(r - 1)), rel=1e-6)
    assert info.steps == 1 + int(np.argmin(np.abs(np.array(others) - 1)))


@pytest.mark.parametrize("quality", QUALITIES)
@pytest.mark.parametrize("shape", [(1, 1), (2, 3), (1, 30), (3, 50), (1,), (5,), (40, 2)])
def test_inputs_smaller_than_a_patch_are_denoised(quality: str, shape: tuple[int, ...], recwarn: object) -> None:
    image = np.random.default_rng(9).normal(0, 1, shape)
    result = denoise(image, 1.0, quality=quality)
    assert result.shape == shape
    assert np.isfinite(result).all()
    assert np.abs(result).max() <= np.abs(image).max() + 1e-6


@pytest.mark.parametrize("quality", QUALITIES)
def test_constant_saturated_and_periodic_images(quality: str) -> None:
    np.testing.assert_array_equal(denoise(np.full((30, 30), 7.0), 1.0, quality=quality), 7.0)
    saturated = np.clip(NOISY[:48, :48] * 2 - 100, 0, 255)
    assert np.isfinite(denoise(saturated, SIGMA, quality=quality)).all()
    x = np.arange(48)
    waves = 50 * np.sin(2 * np.pi * x / 8)[:, None] * np.cos(2 * np.pi * x / 8)
    assert np.abs(denoise(waves, 1.0, quality=quality) - waves).max() < 1.0


@pytest.mark.parametrize("dtype", ["u1", "i2", "u2", "i8"])
def test_integers_at_their_limits_do_not_wrap(dtype: str) -> None:
    limits = np.iinfo(dtype)
    image = np.full((24, 24), limits.max, dtype)
    image[:, 12:] = limits.min
    span = float(limits.max) - float(limits.min)
    result = denoise(image, span / 50, preserve_range=True)
    np.testing.assert_allclose(result, image.astype(np.float64), atol=span / 25)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quality": "good"}, "quality: got 'good'"),
        ({"noise": "salt"}, "noise: got 'salt', expected 'gaussian', 'poisson' or an nlflow.Poisson"),
        ({"stopping": "now"}, "stopping: got 'now'"),
        ({"width": 3.0}, "width: only quality='fast' has it, got quality='balanced'"),
        ({"mask": np.ones(NOISY.shape, bool)}, "mask: hides every sample; leave at least one"),
        ({"mask": np.zeros((3, 3), bool)}, r"mask: got shape \(3, 3\), expected \(72, 80\)"),
        ({"mask": np.zeros(NOISY.shape)}, "mask: got values of type float64, expected booleans"),
        ({"mask": "holes"}, "mask: got 'holes', expected booleans"),
        ({"keep": np.zeros((2,), bool)}, "keep: got shape"),
        ({"sigma": np.ones((3, 3))}, r"sigma: got an array of shape \(3, 3\), expected a number"),
        ({"sigma": -np.ones(NOISY.shape)}, "sigma: got -1, expected values >= 0"),
        ({"sigma": 1.0, "noise": "poisson"}, "sigma: got a value with noise='poisson'"),
        ({"max_memory": 0}, "max_memory: got 0"),
        ({"seed": -1}, "seed: got -1"),
    ],
)
def test_unusable_options_are_refused_by_name(options: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        denoise(NOISY, **options)  # type: ignore[arg-type]


def test_negative_counts_and_nan_are_refused() -> None:
    with pytest.raises(InputError, match="negative"):
        denoise(NOISY - 1000, noise="poisson")
    broken = NOISY.copy()
    broken[3, 4] = np.nan
    with pytest.raises(InputError, match="1 NaN or infinite"):
        denoise(broken, SIGMA)


def wiener(
    state: np.ndarray,
    pilot: np.ndarray,
    observed: np.ndarray,
    variance: np.ndarray,
    groups: PatchGroups,
    leave: float,
    factor: float,
) -> tuple[np.ndarray, np.ndarray]:
    """Compute the step plainly, group by group, for one channel."""
    f, p, y = (groups.lift(image) for image in (state, pilot, observed))
    noise_of = groups.lift(variance).mean(axis=1)
    tokens, following, weights = np.empty_like(f), np.empty_like(f), np.empty_like(f)
    for g in range(len(f)):
        rest = max(1 - (y[g] - f[g]).std() / np.sqrt(noise_of[g].mean()), leave, 1e-3)
        noise = np.diag(noise_of[g]) * rest**2 * factor
        gain = np.linalg.solve(np.cov(p[g].T, bias=True) + noise, np.cov(p[g].T, bias=True)).T
        mean = f[g].mean(axis=0)
        tokens[g] = mean + (f[g] - mean) @ gain.T
        following[g] = (1 - leave / rest) * tokens[g] + leave / rest * f[g]
        n = f.shape[1]
        weights[g] = 1 / (np.diag(noise) * (np.diag(gain) * (1 - 1 / n) + 1 / n))
    return groups.aggregate(tokens, weights), groups.aggregate(following, weights)


@pytest.mark.parametrize("precision", ["f8", "f4"])
@pytest.mark.parametrize("varying", [False, True])
@pytest.mark.parametrize("leave", [0.0, 0.4])
def test_a_step_is_the_wiener_filter_of_the_groups(precision: str, varying: bool, leave: float) -> None:
    rng = np.random.default_rng(10)
    observed = (CLEAN[:30, :34] - 100) / SIGMA + rng.normal(size=(30, 34))
    state, pilot = observed + 0.2 * rng.normal(size=observed.shape), (CLEAN[:30, :34] - 100) / SIGMA
    variance = rng.uniform(0.5, 1.5, observed.shape) if varying else np.ones_like(observed)
    grouping = Grouping(4, 12, 5, 3)
    groups = PatchGroups(state, patch_size=4, search_radius=5, members=12, step=3)

    def planes(image: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(image[None].astype(precision))

    found = groupwise.Groups(planes(state), grouping)
    corners = groups.positions[..., 0] * state.shape[1] + groups.positions[..., 1]
    assert (np.sort(found.members, axis=1) == np.sort(corners, axis=1)).mean() > (
        0.999 if precision == "f4" else 1 - 1e-9
    )
    estimate, following = found.step(
        planes(state), planes(pilot), planes(observed),
        planes(variance) if varying else np.ones((1, 1, 1), precision), leave=leave, factor=0.8,
    )  # fmt: skip
    expected = wiener(state, pilot, observed, variance, groups, leave, 0.8)
    tolerance = 1e-9 if precision == "f8" else 2e-3
    np.testing.assert_allclose(estimate[0], expected[0], atol=tolerance)
    np.testing.assert_allclose(following[0], expected[1], atol=tolerance)


def test_the_first_estimate_lowers_the_eigenvalues_by_the_noise() -> None:
    image = (CLEAN[:30, :34] - 100) / SIGMA + np.random.default_rng(11).normal(size=(30, 34))
    groups = PatchGroups(image, patch_size=4, search_radius=5, members=30, step=3)
    fidelity = groups.covariance(image, noise_variance=1.4)[:, None]
    tokens = groups.lift(image)
    mean = tokens.mean(axis=1, keepdims=True)
    step = MatrixFidelity(fidelity).implicit_step(np.broadcast_to(mean, tokens.shape), tokens, 1.0)
    gain = np.linalg.inv(np.eye(16) + fidelity[:, 0]) @ fidelity[:, 0]
    kept = np.diagonal(gain, axis1=1, axis2=2)[:, None, :]
    weights = np.broadcast_to(1 / (kept * (1 - 1 / 30) + 1 / 30), tokens.shape)
    expected = groups.aggregate(step, weights)
    planes = np.ascontiguousarray(image[None])
    found = groupwise.Groups(planes, Grouping(4, 30, 5, 3))
    estimate, _ = found.step(planes, planes, planes, np.ones((1, 1, 1)), shrink=1.4, running=False)
    np.testing.assert_allclose(estimate[0], expected, atol=1e-9)


def test_progress_is_shown_on_stderr(small: GroupPreset, capsys: pytest.CaptureFixture[str]) -> None:
    denoise(NOISY, SIGMA, progress=True)
    shown = capsys.readouterr()
    assert "balanced" in shown.err
    assert not shown.out


def test_an_interrupt_passes_through(small: GroupPreset, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(tiles, "estimates", interrupted)
    with pytest.raises(KeyboardInterrupt):
        denoise(NOISY, SIGMA)


def test_presets_are_what_they_say() -> None:
    assert set(api.QUALITIES) == {"fast", *PRESETS}
    for preset in PRESETS.values():
        for level in (0.01, 0.4, 0.5, 1.0, 10.0):
            for dimension in (1, 2):
                for grouping in preset.groupings(level, dimension):
                    assert grouping.stride <= grouping.patch  # no sample is left out
    assert replace(SMALL, steps=1).steps == 1
    assert presets.noisiness(NOISY[..., None] / SIGMA) == pytest.approx(SIGMA / CLEAN.std(), rel=0.05)


@pytest.mark.parametrize("quality", QUALITIES)
@pytest.mark.parametrize("dtype", ["f4", "f8"])
@pytest.mark.parametrize("ratio", [60, 3e3, 1e5])
def test_noise_far_below_the_contrast_does_no_harm(quality: str, dtype: str, ratio: float) -> None:
    x, y = np.mgrid[:40, :40]
    rng = np.random.default_rng(12)
    for clean in (np.sin(x / 3) * np.cos(y / 5) + (x > y), np.sin(np.pi * x / 4) * np.sin(np.pi * y / 4)):
        level = np.ptp(clean) / ratio
        noisy = (clean + level * rng.normal(size=clean.shape)).astype(dtype)
        result = denoise(noisy, level, quality=quality)
        assert np.sqrt(np.mean((result - clean) ** 2)) < 1.1 * level


@pytest.mark.parametrize("quality", QUALITIES)
def test_one_huge_sample_spoils_nothing_else(results: dict[str, np.ndarray], quality: str) -> None:
    image = NOISY.copy()
    image[30, 30] = 1e9
    result = denoise(image, SIGMA, quality=quality)
    assert result[30, 30] == pytest.approx(1e9, rel=1e-3)
    assert np.sqrt(np.mean((result - CLEAN)[:, 60:] ** 2)) < 0.7 * SIGMA
    assert np.abs(result - image)[np.arange(len(image)) != 30].max() < 6 * SIGMA


@pytest.mark.parametrize("quality", ["balanced", "best"])
def test_a_pure_tone_far_above_the_noise_stays_whole(quality: str):
    """Groups of it have next to no variance but in two directions: what rounding leaves must not turn a weight."""
    clean = np.real(pywt.data.demo_signal("LoSine", 1024))
    sigma = 0.1 * clean.std()
    for seed in range(5):
        result = denoise(clean + np.random.default_rng(seed).normal(0, sigma, clean.shape), sigma, quality=quality)
        assert np.abs(result - clean).max() < 1.5 * sigma
        assert np.sqrt(np.mean((result - clean) ** 2)) < 0.35 * sigma
