"""Noise of volumes and clips: how strong it is, photon transfer, hot pixels, and models in three axes."""

import numpy as np
import pytest
from scipy.fft import dctn, idctn
from scipy.ndimage import gaussian_filter

from nlflow import InputError, denoise, estimate_noise, estimate_sigma
from nlflow.denoising import Options
from nlflow.denoising.frame import Frame, observe
from nlflow.denoising.layout import Axes
from nlflow.denoising.noise import (
    GaussianNoise,
    HotPixels,
    Impulses,
    Mixture,
    NoncentralChi,
    Poisson,
    Rician,
    Speckle,
    Stripes,
    estimate_sigmas,
    find_hot_pixels,
    find_impulses,
    find_speckle,
    load_noise,
    photon_transfer,
)
from nlflow.denoising.noise.figures import OfVerdict
from nlflow.denoising.noise.finding.verdict import _falling, _slabs, examine


def tissue(side=40, low=20.0, high=200.0):
    """A volume with smooth shades and sharp edges, nowhere constant."""
    z, y, x = np.indices((side, side, side)) / side
    shade = 0.5 + 0.5 * np.sin(5 * x + 3 * y) * np.cos(4 * z)
    inside = (z - 0.5) ** 2 + (y - 0.4) ** 2 + (x - 0.5) ** 2 < 0.1
    return low + (high - low) * (0.25 * shade + 0.75 * np.where(inside, 0.9, 0.15))


CLEAN = tissue()
WHITE = np.random.default_rng(0).standard_normal(CLEAN.shape)
RAMP = np.maximum(np.indices(CLEAN.shape)[2] / 20 - 0.8, 0)


# ---- white noise


@pytest.mark.slow
@pytest.mark.parametrize("sigma", [4.0, 12.0, 40.0])
def test_the_strength_of_white_noise_in_volumes(sigma):
    z = CLEAN + sigma * WHITE
    assert estimate_sigma(z) == pytest.approx(sigma, rel=0.04)
    assert estimate_sigma((1e-9 * z).astype(np.float32)) == pytest.approx(1e-9 * sigma, rel=0.04)
    assert estimate_sigma(z[:3, ..., None], channel_axis=-1) == pytest.approx(sigma, rel=0.08)  # few slices


def test_values_that_were_cut_off_do_not_count():
    assert estimate_sigma(np.clip(CLEAN + 12 * WHITE, CLEAN.min(), 180)) == pytest.approx(12, rel=0.05)
    counts = np.minimum(np.random.default_rng(0).poisson(CLEAN), 170)
    assert photon_transfer(counts, offset=0.0).gain == pytest.approx(1, abs=0.25)


def test_surroundings_that_were_cut_out_and_missing_samples_do_not_count():
    z = CLEAN + 10 * WHITE
    outside = np.indices(z.shape)[1] > 15  # more than half: in a picture that would be a drawing
    assert estimate_sigma(np.where(outside, 0, z)) == pytest.approx(10, rel=0.05)
    gone = np.indices(z.shape)[0] < 10
    assert estimate_sigmas(np.where(gone, np.nan, z)[..., None], gone)[0] == pytest.approx(10, rel=0.05)
    assert estimate_sigmas(np.where(gone, 1e300, z)[..., None], np.ones_like(gone))[0] == 0
    assert estimate_sigma(np.where(outside, 1.0, 0.0)) == 0
    assert estimate_sigma(np.full((9, 9, 9), 3.0)) == 0


def test_axes_of_one_sample_are_none():
    z = (CLEAN + 10 * WHITE)[:1, ..., None]
    np.testing.assert_array_equal(estimate_sigmas(z), estimate_sigmas(z[0]))


def test_colours_are_not_taken_for_volumes():
    with pytest.raises(InputError, match=r"is the last axis colour\? then pass channel_axis=-1; .* axes='ZYX'"):
        estimate_sigma(np.ones((50, 50, 3)))


# ---- photon transfer


@pytest.mark.slow
@pytest.mark.parametrize(("gain", "read", "offset"), [(1.0, 0.0, 0.0), (0.25, 2.0, 100.0), (3.0, 9.0, -20.0)])
def test_gain_and_read_noise_are_found_from_the_stack(gain, read, offset):
    z = Poisson(gain, read, offset).sample(gain * CLEAN + offset, rng=0)
    found = photon_transfer(z, offset=offset)
    assert abs(found.gain - gain) < 4 * found.gain_error < 0.5 * gain
    assert found.intercept == pytest.approx(read**2 - gain * offset, abs=4 * found.intercept_error)
    assert found.model.sigma**2 == pytest.approx(
        read**2, abs=4 * found.intercept_error + 4 * abs(offset) * found.gain_error
    )
    assert (found.gain, found.sigma, offset) == (found.model.gain, found.model.sigma, found.model.offset)
    assert f"{found.gain:.4g} ± " in str(found)
    assert "given" in str(found)
    # What the transform knows does not depend on an offset that is assumed.
    free = photon_transfer(z)
    assert free.model.sigma**2 - free.gain * free.model.offset == pytest.approx(
        found.intercept, abs=4 * found.intercept_error
    )
    stable = free.model.stabilize(z)
    assert estimate_sigma(stable) == pytest.approx(1, rel=0.08)


@pytest.mark.slow
def test_standard_errors_are_those_of_repeated_draws():
    light = CLEAN[:24, :24, :24]
    found = [photon_transfer(np.random.default_rng(seed).poisson(light), offset=0.0) for seed in range(24)]
    gains, errors = np.array([(one.gain, one.gain_error) for one in found]).T
    assert abs(gains.mean() - 1) < 0.1
    assert 0.4 < gains.std() / errors.mean() < 1.6


def test_structure_and_low_counts_and_masks():
    rng = np.random.default_rng(0)
    z = rng.poisson(CLEAN / 50)  # 0.4 to 4 counts
    assert photon_transfer(z, offset=0.0).gain == pytest.approx(1, abs=0.15)
    y = rng.poisson(CLEAN).astype(float)
    gone = rng.random(y.shape) < 0.002
    y[gone] = 1e6
    free = photon_transfer(y, mask=gone)
    assert free.gain == pytest.approx(1, abs=0.15)
    holed = np.where(gone, np.nan, y)
    assert photon_transfer(holed, mask=gone).gain == pytest.approx(free.gain, abs=0.05)
    assert photon_transfer(holed[None], channel_axis=0, mask=gone).gain == pytest.approx(free.gain, abs=0.05)
    assert "one pair of many" in str(free)  # read noise and dark level, of which their sum is known
    assert f"± {free.sigma_error:.2g}, offset" not in str(free)


@pytest.mark.parametrize(
    ("stack", "message"),
    [
        (CLEAN + 10 * WHITE, "the noise does not follow the light"),
        (np.random.default_rng(0).poisson(30.0, (8, 8, 8)), "got 125 blocks .* larger stack"),
        (np.random.default_rng(0).poisson(30.0, (20, 20, 20)), "differ too little|does not follow"),
        (CLEAN + 60 * np.random.default_rng(0).gamma(1, 1, CLEAN.shape) * (CLEAN / 100) ** 2, "square|off any line"),
        # Cut off at 0, it looks weaker in the dark, as counts do.
        (np.clip(110 * RAMP + 12 * WHITE, 0, 255), "the noise does not follow the light"),
        (np.ones((20, 20, 20)), "equal values"),
        (np.ones((20, 20)), "expected a volume or clip"),
    ],
)
def test_a_stack_that_does_not_tell_the_gain_is_refused_with_the_reason(stack, message):
    with pytest.raises(InputError, match=message):
        photon_transfer(stack)


def test_channels_masks_and_offsets_that_do_not_fit_are_refused():
    z = np.random.default_rng(0).poisson(CLEAN).astype(float)
    with pytest.raises(InputError, match="got 2 channels"):
        photon_transfer(np.stack([z, z], axis=-1), channel_axis=-1)
    with pytest.raises(InputError, match="mask: got shape"):
        photon_transfer(z, mask=np.zeros((3, 3, 3), bool))
    with pytest.raises(InputError, match="offset: got -400, with which the variance in the dark were"):
        photon_transfer(z, offset=-400)
    with pytest.raises(InputError, match="offset"):
        photon_transfer(z, offset=np.nan)


# ---- hot pixels


@pytest.mark.slow
@pytest.mark.parametrize("fixed", [True, False])
@pytest.mark.sampled(1)
def test_hot_pixels_are_found_and_missing_afterwards(fixed, tmp_path):
    clean = CLEAN + 5 * WHITE
    noise = HotPixels(0.006 if fixed else 0.001, 600.0, fixed)
    z = noise.sample(clean, rng=1)
    hot = z - clean > (80 if fixed else 160)
    result = noise.reduce(z[..., None])
    assert result.missing[hot].mean() > 0.85  # not those that touch each other, or an edge
    assert not result.missing[z == clean].any()
    found = find_hot_pixels(z[..., None])
    assert (found.fixed, found.density) == (fixed, pytest.approx(noise.density, rel=0.5))
    model = estimate_noise(z).model
    assert isinstance(model, Mixture)
    assert model.parts[0] == found
    assert model.parts[1].sigma == pytest.approx(5, rel=0.05)
    found.save(tmp_path / "hot.json")
    assert load_noise(tmp_path / "hot.json") == found


def test_hot_pixels_of_pictures_and_signals_and_those_beside_missing_samples():
    z = (CLEAN + 5 * WHITE)[20]
    z[7, 9] = z[30, 2] = 900
    gone = np.zeros(z.shape, bool)
    gone[30, 3] = True
    found = HotPixels(0.001, fixed=False).reduce(np.where(gone, 1e9, z)[..., None], gone).missing
    assert np.argwhere(found).tolist() == [[7, 9], [30, 2], [30, 3]]
    z[12:14, 20:22] = 900  # what is two pixels wide is a thing
    missing = HotPixels(0.001, fixed=False).reduce(z[..., None]).missing
    assert missing[7, 9]
    assert not missing[12:14, 20:22].any()
    signal = np.sin(np.arange(400) / 20) + 0.1 * WHITE[0].ravel()[:400]
    signal[77] += 5
    assert np.flatnonzero(HotPixels(0.01, fixed=False).reduce(signal[:, None]).missing).tolist() == [77]


@pytest.mark.slow
def test_other_noise_has_no_hot_pixels():
    rng = np.random.default_rng(0)
    for z in (
        CLEAN,
        CLEAN + 20 * WHITE,
        rng.poisson(CLEAN / 50),
        rng.poisson(CLEAN),
        Rician(20.0).sample(CLEAN, rng=0),
    ):
        assert find_hot_pixels(np.asarray(z, float)[..., None]) is None


def test_hot_pixels_that_make_no_sense_are_refused():
    assert HotPixels(0.0).reduce(CLEAN[..., None]).missing is None
    assert HotPixels(0.1).scaled(1) == HotPixels(0.1)
    assert "the same in all frames" in HotPixels(0.1).describe()
    for call, message in (
        (lambda: HotPixels(1.0), "density: got 1"),
        (lambda: HotPixels(0.1, -1.0), "level: got -1"),
        (lambda: HotPixels(0.1, fixed=1), "fixed: got 1"),
        (lambda: HotPixels(0.1).scaled(2), "factor: got 2"),
        (lambda: HotPixels(0.1).reduce(CLEAN[0][..., None]), "at least 4 frames"),
    ):
        with pytest.raises(InputError, match=message):
            call()


def test_what_is_wrong_with_a_stack_is_said_of_the_stack():
    with pytest.raises(InputError, match="stack: got 5 dimension"):
        photon_transfer(np.ones((2, 3, 4, 5, 6)))
    with pytest.raises(InputError, match=r"stack: .*nfinite"):
        photon_transfer(np.full((9, 16, 16), np.inf))


# ---- the models of photographs


def test_impulses_in_three_axes():
    for density in (0.003, 0.1):
        z = Impulses(density, 0.0, 255.0).sample((CLEAN + 5 * WHITE).clip(1, 254), rng=0)
        found = find_impulses(z[..., None])
        assert found.density == pytest.approx(density, rel=0.1)
        assert (found.low, found.high) == (0, 255)
        np.testing.assert_array_equal(found.reduce(z[..., None]).missing, (z == 0) | (z == 255))
    assert find_impulses((CLEAN + 5 * WHITE)[..., None]) is None
    z = Impulses(0.02, -200.0, 400.0, random=True).sample(CLEAN + 2 * WHITE, rng=0)
    missing = Impulses(0.02, -200.0, 400.0, random=True).reduce(z[..., None]).missing
    assert missing[np.abs(z - CLEAN) > 150].mean() > 0.9
    assert missing[np.abs(z - CLEAN) < 8].mean() < 0.01


@pytest.mark.slow
def test_speckle_in_three_axes():
    for looks in (1.0, 4.0):
        z = Speckle(looks).sample(CLEAN, rng=0)
        assert find_speckle(z[..., None]).looks == pytest.approx(looks, rel=0.1)
        even = Speckle(looks).sample(np.full((24, 32, 32), 50.0), rng=0)[..., None]
        found = Speckle(looks).reduce(even)
        assert found.samples.std() == pytest.approx(Speckle(looks).stable_sigma, rel=0.03)
        assert found.back(np.full(even.shape, found.samples.mean())).mean() == pytest.approx(50, rel=0.03)
    assert find_speckle(np.random.default_rng(0).poisson(CLEAN).astype(float)[..., None]) is None


def frame_of(volume, model) -> Frame:
    return observe(volume, None, model, Axes.of(volume.shape), "balanced", Options())[0]


def test_gaussian_noise_in_three_axes():
    """White or by intensity; noise that is correlated, and stripes, are refused by name."""
    model = GaussianNoise(10.0, intensities=[0.0, 250.0], strengths=[0.2, 2.0])
    z = model.sample(CLEAN, rng=0)
    away = (z - CLEAN) / (10 * np.interp(CLEAN, [0, 250], [0.2, 2]))
    assert away.std() == pytest.approx(1, rel=0.02)
    seen = frame_of(z, model)
    assert seen.coloured is None
    # The map of strengths that the engine takes, by the smoothed intensity, which is exact away from edges.
    wanted = np.interp(gaussian_filter(CLEAN, 1.5), [0, 250], [2, 20]) ** 2
    np.testing.assert_allclose(seen.variance * seen.level**2, wanted, rtol=0.5)
    assert np.median(seen.variance * seen.level**2 / wanted) == pytest.approx(1, abs=0.05)
    coloured = GaussianNoise.from_kernel(np.ones((3, 3)), sigma=5.0)
    with pytest.raises(InputError, match="correlated noise, which is for images and signals"):
        coloured.sample(CLEAN)
    with pytest.raises(InputError, match="correlated noise, which is for images and signals"):
        frame_of(z, coloured)
    for call in (lambda: Stripes(1.0).sample(CLEAN), lambda: Stripes(1.0).reduce(CLEAN[..., None])):
        with pytest.raises(InputError, match=r"got a volume .* slice by slice"):
            call()


# ---- found out


@pytest.mark.slow
def test_the_verdict_on_volumes():
    rng = np.random.default_rng(0)
    white = estimate_noise(CLEAN + 12 * WHITE)
    assert white.confidence == "high"
    assert white.model.is_white
    assert white.model.sigma == pytest.approx(12, rel=0.04)
    # Values that were cut off at 0 look like less noise in the dark, not like counts.
    cut = estimate_noise(np.clip(tissue(low=0.0) + 12 * WHITE, 0, 255))
    assert isinstance(cut.model, GaussianNoise)
    counts = estimate_noise(rng.poisson(CLEAN / 8))
    assert isinstance(counts.model, Poisson)
    assert counts.model.gain == pytest.approx(1, abs=0.2)
    assert "gain" in counts.reasons[0]
    assert counts.confidence == "high"
    read = estimate_noise(Poisson(2.0, 9.0, 100.0).sample(2 * CLEAN + 100, rng=0))
    assert "one pair of many" in read.reasons[0]  # which the line that says the model does not repeat
    assert read.confidence == "medium"
    assert isinstance(examine(Speckle(4.0).sample(CLEAN, rng=0)[..., None]).model, Speckle)


@pytest.mark.parametrize(("coils", "seed"), [(2, 0), (4, 0), (4, 2)])
def test_magnitudes_of_several_coils_are_no_counts(coils, seed):
    z, y, x = np.mgrid[-1:1:32j, -1:1:48j, -1:1:48j]
    clean = 30 * np.clip(1 - (x**2 + y**2 + z**2), 0, 1)
    found = estimate_noise(NoncentralChi(5.0, coils).sample(clean, rng=seed))
    assert isinstance(found.model, NoncentralChi)
    assert found.model.coils == coils
    assert found.model.sigma == pytest.approx(5, rel=0.05)
    assert found.confidence == "medium"
    counts = estimate_noise(Poisson(1.0, offset=-25.0).sample(clean, rng=seed))
    assert isinstance(counts.model, Poisson)


@pytest.mark.parametrize("last", [6.0, 2.0])
def test_noise_of_small_slices_is_told_slice_by_slice(last):
    sigma = np.linspace(2.0, last, 16)
    draws = np.random.default_rng(0).normal(size=(16, 48, 48))
    found = estimate_noise(100 + sigma[:, None, None] * draws)
    if last == 2:
        assert found.is_white
    else:
        np.testing.assert_allclose(found.model.sigma * found.model.places[:, 0, 0], sigma, rtol=0.2)


@pytest.mark.parametrize("coils", [2, 4])
def test_magnitudes_beside_sharp_edges_are_no_counts(coils):
    rng, places = np.random.default_rng(0), np.mgrid[:40, :40, :40] / 40 - 0.5
    clean = 30.0 * (np.square(places).sum(axis=0) < 0.2)
    for _ in range(12):
        away, radius = places - rng.uniform(-0.3, 0.3, 3)[:, None, None, None], rng.uniform(0.05, 0.15)
        clean[np.square(away).sum(axis=0) < radius**2] = rng.uniform(5, 100)
    found = estimate_noise(NoncentralChi(2.0, coils).sample(clean, rng=0))
    assert isinstance(found.model, NoncentralChi)
    assert found.model.sigma == pytest.approx(2, rel=0.1)
    assert found.confidence == "low"  # most variances are those of edges
    counts = estimate_noise(Poisson(2.0).sample(clean, rng=0))
    assert isinstance(counts.model, Poisson)
    assert counts.confidence == "high"


@pytest.mark.slow
def test_noise_that_is_not_white_in_a_volume_is_told():
    grain = gaussian_filter(WHITE, (0, 0.7, 0.7), mode="wrap")
    found = estimate_noise(CLEAN + 12 * grain / grain.std())
    assert found.confidence == "low"
    assert "along axis 1, 2" in found.reasons[0]
    assert found.model.is_white
    assert found.model.sigma == pytest.approx(12, rel=0.3)
    falling = _falling(CLEAN + 12 * WHITE, None)
    np.testing.assert_allclose(falling, 1, atol=0.15)


@pytest.mark.slow
@pytest.mark.parametrize(("sigma", "step"), [(3, 10), (8, 26)])
def test_noise_that_compression_left_a_part_of_is_doubted(sigma, step):
    # Blocks of 8 x 8 samples whose coefficients are rounded towards 0, as films are kept: high frequencies are lost.
    whole = tissue(48) + np.random.default_rng(0).normal(0, sigma, (48, 48, 48))
    blocks = dctn(whole.reshape(48, 6, 8, 6, 8), axes=(2, 4), norm="ortho")
    blocks = np.sign(blocks) * np.floor(np.abs(blocks) / step + 1 / 3) * step
    kept = idctn(blocks, axes=(2, 4), norm="ortho").reshape(whole.shape)
    found = estimate_noise(np.clip(np.rint(kept), 0, 255))
    assert np.std(kept - tissue(48)) > 2 * found.model.sigma
    assert found.confidence == "low"
    assert "compressed" in found.reasons[0]


@pytest.mark.slow
def test_channels_with_noise_of_their_own():
    z = np.stack([CLEAN + 2 * WHITE, CLEAN + 20 * WHITE[::-1]], axis=-1)
    np.testing.assert_allclose(estimate_noise(z, channel_axis=-1).model.sigma, [2, 20], rtol=0.06)
    alike = estimate_noise(z[..., :1].repeat(3, axis=-1), channel_axis=-1).model.sigma
    assert np.ndim(alike) == 0


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(8, 8, 8), (2, 40, 40), (1, 40, 40), (40, 2, 2), (3, 20, 30)])
def test_small_and_thin_volumes_have_a_verdict(shape):
    rng = np.random.default_rng(0)
    gone = np.zeros(shape, bool)
    gone[..., 0] = True
    with np.errstate(over="raise", divide="raise", invalid="raise"):
        for z in (rng.normal(100, 5, shape), rng.poisson(2.0, shape), np.ones(shape), rng.normal(0, 1e200, shape)):
            for mask in (None, gone):
                assert str(estimate_noise(z[..., None], channel_axis=-1, mask=mask))


def test_large_volumes_are_looked_at_in_slabs():
    side = int(np.sqrt(OfVerdict.most / 30))
    z = np.broadcast_to(np.arange(64.0)[:, None, None, None], (64, side, side, 1))
    part, absent = _slabs(z, np.zeros(z.shape[:-1], bool))
    assert part.size <= OfVerdict.most
    assert part.shape[:-1] == absent.shape
    first = part[:, 0, 0, 0]
    assert (first[0], first[-1]) == (0, 63)
    assert set(np.diff(first[: len(first) // 8 * 8].reshape(-1, 8)).ravel()) == {1.0}


def test_counts_that_were_found_can_be_scaled_as_noise_by_intensity():
    z = np.random.default_rng(0).poisson(CLEAN).astype(float)[..., None]
    counts = Poisson(2.0, 3.0, 10.0)
    scaled = Mixture([HotPixels(0.01), counts]).by_intensity(z).scaled(1.5)
    places = np.array([50.0, 150.0])
    np.testing.assert_allclose(
        scaled.parts[1].sigma * scaled.parts[1].relative(places), 1.5 * np.sqrt(counts.variance(places)), rtol=0.01
    )
    assert scaled.parts[0] == HotPixels(0.01)
    assert Rician(1.0).by_intensity(z) == Rician(1.0)
    assert Mixture([HotPixels(0.01), Rician(1.0)]).scaled(2.0).parts[1] == Rician(2.0)
    with pytest.raises(InputError, match="strength: got 2 with counts"):
        Mixture([HotPixels(0.01), counts]).scaled(2.0)


@pytest.mark.parametrize("axes", ["ZYX", "TYX"])
def test_slices_and_frames_have_a_noise_of_their_own(axes):
    level = np.linspace(5, 20, 8)
    clean = tissue(80)[:8]
    noisy = clean + level[:, None, None] * np.random.default_rng(0).standard_normal(clean.shape)
    model = estimate_noise(noisy, axes=axes).model
    np.testing.assert_allclose(model.along(noisy[..., None])[:, 0, 0, 0], level, rtol=0.1)
    assert estimate_noise(clean + 10 * np.random.default_rng(0).standard_normal(clean.shape), axes=axes).is_white
    one = denoise(noisy, sigma=level, axes=axes, quality="fast")
    each = denoise(noisy, sigma=level[:, None, None] * np.ones(clean.shape), axes=axes, quality="fast")
    np.testing.assert_array_equal(one, each)
    with pytest.raises(InputError, match=r"\(8,\) for one number a slice or frame"):
        denoise(noisy, sigma=level[:5], axes=axes)


@pytest.mark.parametrize("brighter", [0.0, 6.0])
def test_slices_of_more_light_are_counts_where_bright_parts_are_as_noisy_within_them(brighter):
    z, y, x = np.mgrid[:14, :80, :80]
    light = 100 + 40 * np.sin(x / 14) * np.cos(y / 17)
    fading = Poisson(2.0, 3.0, 100.0).sample(2 * (light - 50) * np.exp(-z / 10) + 100, rng=0)
    counts = estimate_noise(fading).model
    assert isinstance(counts, Poisson)
    assert counts.gain == pytest.approx(2, abs=0.2)
    own = np.linspace(3, 12, 14)[:, None, None] * np.random.default_rng(0).standard_normal(z.shape)
    assert estimate_noise(light + brighter * z + own).model.places.shape == (14, 1, 1)
