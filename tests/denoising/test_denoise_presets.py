"""Presets of `denoise` against other ways to compute the same, and on what is hard on their arithmetic."""

from __future__ import annotations

import numpy as np
import pytest
import pywt
from skimage.data import camera
from skimage.restoration import inpaint_biharmonic

from nlflow import PatchGroups, denoise
from nlflow.denoising import groupwise, options
from nlflow.denoising.frame import Spread
from nlflow.denoising.groupwise import PRESETS
from nlflow.denoising.noise import GaussianNoise
from nlflow.denoising.patches import Grouping
from nlflow.denoising.patches.filters import removed
from nlflow.errors import InputError
from nlflow.functionals.fidelity import MatrixFidelity
from tests.covering import pairs
from tests.pictures import GROUPS_SLOWLY, QUALITIES, SLOWLY, group_step, grouped, signal_in

pytestmark = pytest.mark.numerical

SIGMA = 20.0
CLEAN = camera()[100:172, 190:270].astype(np.float64)
NOISY = CLEAN + np.random.default_rng(0).normal(0, SIGMA, CLEAN.shape)


def test_holes_without_noise_are_filled_and_the_rest_kept_exactly() -> None:
    mask = np.random.default_rng(5).random(CLEAN.shape) < 0.3
    result = denoise(CLEAN, 0, mask=mask)
    np.testing.assert_array_equal(result[~mask], CLEAN[~mask])
    peer = inpaint_biharmonic(CLEAN / 255, mask) * 255
    assert np.mean((result - CLEAN)[mask] ** 2) < np.mean((peer - CLEAN)[mask] ** 2)


def test_the_discrepancy_takes_the_nearest_estimate() -> None:
    result, info = denoise(NOISY, SIGMA, quality="pixels", stopping="discrepancy", return_info=True)
    residual = np.sqrt(np.mean((result - NOISY) ** 2)) / SIGMA
    others = [
        np.sqrt(np.mean((denoise(NOISY, SIGMA, quality="pixels", steps=n) - NOISY) ** 2)) / SIGMA for n in range(1, 11)
    ]
    assert residual == pytest.approx(min(others, key=lambda r: abs(r - 1)), rel=1e-6)
    assert info.steps == 1 + int(np.argmin(np.abs(np.array(others) - 1)))


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


@pytest.mark.parametrize(("precision", "varying", "leave"), pairs(["f8", "f4"], [False, True], [0.0, 0.4]))
def test_a_step_is_the_wiener_filter_of_the_groups(precision: str, varying: bool, leave: float) -> None:
    rng = np.random.default_rng(10)
    observed = (CLEAN[:30, :34] - 100) / SIGMA + rng.normal(size=(30, 34))
    state, pilot = observed + 0.2 * rng.normal(size=observed.shape), (CLEAN[:30, :34] - 100) / SIGMA
    variance = rng.uniform(0.5, 1.5, observed.shape) if varying else np.ones_like(observed)
    grouping = Grouping(4, 12, 5, 3)
    groups = PatchGroups(state, patch_size=4, search_radius=5, members=12, step=3)

    def planes(image: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(image[None].astype(precision))

    found = grouped(planes(state), grouping)
    corners = groups.positions[..., 0] * state.shape[1] + groups.positions[..., 1]
    assert (np.sort(found.members, axis=1) == np.sort(corners, axis=1)).mean() > (
        0.999 if precision == "f4" else 1 - 1e-9
    )
    estimate, following = group_step(found,
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
    values, vectors = np.linalg.eigh(groups.covariance(image, noise_variance=0))
    fidelity = ((vectors * signal_in(values, 1.4)[:, None]) @ np.swapaxes(vectors, 1, 2))[:, None]
    tokens = groups.lift(image)
    mean = tokens.mean(axis=1, keepdims=True)
    step = MatrixFidelity(fidelity).implicit_step(np.broadcast_to(mean, tokens.shape), tokens, 1.0)
    gain = np.linalg.inv(np.eye(16) + fidelity[:, 0]) @ fidelity[:, 0]
    kept = np.diagonal(gain, axis1=1, axis2=2)[:, None, :]
    weights = np.broadcast_to(1 / (kept * (1 - 1 / 30) + 1 / 30), tokens.shape)
    expected = groups.aggregate(step, weights)
    planes = np.ascontiguousarray(image[None])
    found = grouped(planes, Grouping(4, 30, 5, 3))
    estimate, _ = group_step(found, planes, planes, planes, np.ones((1, 1, 1)), shrink=1.4, running=False)
    np.testing.assert_allclose(estimate[0], expected, atol=1e-9)


@pytest.mark.parametrize("shrink", [0.0, 1.0, 1.4, 1.5, 1.8])
def test_what_goes_of_noisy_tokens_is_near_the_rule(shrink: float) -> None:
    share = np.linspace(0, 1, 100_001)[1:]
    goes = share * np.polynomial.Polynomial(removed(shrink))(2 * share - 1)
    rule = 1 / (1 + np.maximum(1 / share - 1 - shrink, 0))
    assert goes.min() > 0
    assert goes.max() < 1  # more than all would be no minimizer
    assert np.abs(goes - rule)[share < 0.9].max() < 0.12
    # What is far above the noise goes as by Wiener's filter, to first order.
    assert np.all(np.abs(goes / share - 1)[:100] <= 20 * share[:100])
    # In the mean square over what noise alone makes of variances, in groups three times as large as patches.
    rng = np.random.default_rng(4)
    noise = np.linalg.eigvalsh([np.cov(rng.normal(size=(25, 75)), bias=True) for _ in range(40)])
    at = np.interp(1 / (1 + noise), share, goes - rule)
    assert np.sqrt(np.mean(at**2)) < 0.04


def test_presets_are_what_they_say() -> None:
    assert set(options.QUALITIES) == {"pixels", *PRESETS}
    for preset in PRESETS.values():
        for level in (0.01, 0.4, 0.5, 1.0, 10.0):
            for dimension in (1, 2):
                for grouping in preset.groupings(level, dimension):
                    assert grouping.stride <= grouping.patch  # no sample is left out
    assert Spread.of(NOISY[..., None] / SIGMA).ratio == pytest.approx(SIGMA / CLEAN.std(), rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize(("quality", "dtype", "ratio"), pairs(QUALITIES, ["f4", "f8"], [60, 3e3, 1e5]))
@pytest.mark.sampled(2)
def test_noise_far_below_the_contrast_does_no_harm(quality: str, dtype: str, ratio: float) -> None:
    x, y = np.mgrid[:40, :40]
    rng = np.random.default_rng(12)
    for clean in (np.sin(x / 3) * np.cos(y / 5) + (x > y), np.sin(np.pi * x / 4) * np.sin(np.pi * y / 4)):
        level = np.ptp(clean) / ratio
        noisy = (clean + level * rng.normal(size=clean.shape)).astype(dtype)
        result = denoise(noisy, level, quality=quality)
        assert np.sqrt(np.mean((result - clean) ** 2)) < 1.1 * level


@pytest.mark.parametrize("quality", SLOWLY)
def test_one_huge_sample_spoils_nothing_else(quality: str) -> None:
    image = NOISY.copy()
    image[30, 30] = 1e9
    result = denoise(image, SIGMA, quality=quality)
    assert result[30, 30] == pytest.approx(1e9, rel=1e-3)
    assert np.sqrt(np.mean((result - CLEAN)[:, 60:] ** 2)) < 0.7 * SIGMA
    assert np.abs(result - image)[np.arange(len(image)) != 30].max() < 6 * SIGMA


@pytest.mark.parametrize("quality", GROUPS_SLOWLY)
@pytest.mark.slow
def test_a_pure_tone_far_above_the_noise_stays_whole(quality: str, monkeypatch: pytest.MonkeyPatch):
    """Groups of it vary in two directions alone: single precision must not decide what becomes of the others."""
    clean = np.real(pywt.data.demo_signal("LoSine", 1024))
    sigma = 0.1 * clean.std()
    noisy = [clean + np.random.default_rng(seed).normal(0, sigma, clean.shape) for seed in (1, 4, 13)]
    single = [denoise(f, sigma, quality=quality) for f in noisy]
    monkeypatch.setattr(groupwise, "SINGLE", 0.0)
    for result, f in zip(single, noisy, strict=True):
        # Samples are rounded to 24 bits of a range of some 30 sigma, in each of at most nine steps; weights to `ERROR`.
        assert np.abs(result - denoise(f, sigma, quality=quality)).max() < 1e-3 * sigma
        assert np.abs(result - clean).max() < 1.5 * sigma
        assert np.sqrt(np.mean((result - clean) ** 2)) < 0.35 * sigma


def test_the_preset_in_a_hurry_takes_one_step_of_the_flow_of_groups() -> None:
    result, info = denoise(NOISY, SIGMA, quality="fast", return_info=True)
    pixels = denoise(NOISY, SIGMA, quality="pixels")
    slow = denoise(NOISY, SIGMA, quality="balanced")
    errors = [float(np.mean((u - CLEAN) ** 2)) for u in (slow, result, NOISY)]
    assert (info.steps, info.functional) == (1, groupwise.FUNCTIONAL)
    assert errors[0] < errors[1] < 0.25 * errors[2]
    assert not np.array_equal(result, pixels)


def test_parameters_of_pixels_are_told_where_they_went() -> None:
    with pytest.raises(InputError, match="only quality='pixels' has it, as 'fast' was called before"):
        denoise(NOISY, SIGMA, quality="fast", steps=2)
    with pytest.raises(InputError, match="quality: got 'pixels' for a volume"):
        denoise(np.zeros((9, 9, 9)), 1.0, quality="pixels")


def test_the_best_preset_does_not_take_its_time_where_it_gains_nothing() -> None:
    spectrum = np.ones((1, 8, 8))
    spectrum[:, 3:6, 3:6] = 0.2
    noise = GaussianNoise(SIGMA, spectrum, [0.0, 255.0], [0.8, 1.2], compressed=0.85)
    result, info = denoise(NOISY, noise=noise, quality="best", return_info=True)
    np.testing.assert_array_equal(result, denoise(NOISY, noise=noise, quality="balanced"))
    assert "gains nothing" in info.stopped_by
    assert "gains nothing" not in denoise(NOISY, noise=noise, quality="balanced", return_info=True)[1].stopped_by


def test_colours_tell_small_patches_apart() -> None:
    clean = np.stack([CLEAN, 0.9 * CLEAN, 255 - CLEAN], axis=-1)
    noisy = clean + np.random.default_rng(1).normal(0, 10, clean.shape)
    result, info = denoise(noisy, 10.0, quality="fast", channel_axis=-1, return_info=True)
    _, grey = denoise(noisy[..., 0], 10.0, quality="fast", return_info=True)
    assert info.parameters["first_patch_size"] < grey.parameters["first_patch_size"]
    assert np.mean((result - clean) ** 2) < 0.6 * np.mean((noisy - clean) ** 2)
