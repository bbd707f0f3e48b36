"""Noise is found in what it lies on: its kind by name, its strength and its figures within the errors of chance."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats
from scipy.signal import lfilter

from nlflow.denoising.noise import (
    GaussianNoise,
    HotPixels,
    Hum,
    Impulses,
    LogSpeckle,
    Poisson,
    Rician,
    Speckle,
    Spikes,
    Stripes,
    estimate_noise,
    estimate_sigma,
    estimate_sigmas,
    find_hot_pixels,
    find_hum,
    find_impulses,
    find_rician,
    find_speckle,
    find_stripes,
    photon_transfer,
    spectrum_of_signal,
)
from nlflow.denoising.noise.finding import counts as of_counts
from nlflow.denoising.noise.finding import evidence, periodograms, pictures, recordings, sigma, speckle
from nlflow.denoising.noise.finding.finders import strength_of
from nlflow.denoising.noise.finding.mosaics import find_mosaic
from nlflow.denoising.noise.finding.places import find_places
from nlflow.denoising.noise.finding.transfer import is_square, line_through
from validation.harness import Check, Claim, Context, Outcome, largest

Floats = NDArray[np.float64]

SURE = 4.5
"""Standard errors: of some hundred figures none is farther off than this once in a thousand programs."""

ROWS, COLUMNS = np.mgrid[:128, :160]
SOFT = 100 + 40 * np.sin(ROWS / 40) * np.cos(COLUMNS / 50)
SCENE = SOFT + 20 * (np.hypot(ROWS - 60, COLUMNS - 80) < 30)
TEXTURED = SCENE + 15 * np.sin(ROWS / 1.7 + COLUMNS / 2.3) * (COLUMNS > 100)
DEEP = np.mgrid[:24, :28, :30]
VOLUME = 50 + 20 * np.sin(DEEP[0] / 9) * np.cos(DEEP[2] / 7) + DEEP[1]


# ---- strengths of white noise


def strengths(rng: np.random.Generator) -> Iterator[float]:
    """Yield errors of strengths of white noise, relative: of pictures, clipped ones, signals, volumes, channels."""
    for scene, level in ((SCENE, 5.0), (TEXTURED, 5.0), (TEXTURED, 20.0)):
        yield estimate_sigma(scene + rng.normal(0, level, scene.shape)) / level - 1
    yield estimate_sigma(np.clip(SCENE + rng.normal(0, 8, SCENE.shape), 70, 125)) / 8 - 1
    yield estimate_sigma(np.sin(np.arange(6000) / 40) + rng.normal(0, 0.2, 6000)) / 0.2 - 1
    inside = np.hypot(DEEP[1] - 14, DEEP[2] - 15) < 12
    yield estimate_sigma(np.where(inside, VOLUME + rng.normal(0, 3, VOLUME.shape), 0)) / 3 - 1
    yield estimate_sigma(VOLUME[:12, :14, :13] + rng.normal(0, 3, (12, 14, 13))) / 3 - 1
    colours = SCENE[..., None] + rng.normal(0, [2.0, 5.0, 9.0], (*SCENE.shape, 3))
    missing = np.hypot(ROWS - 30, COLUMNS - 30) < 20
    colours[missing] = np.nan
    yield from estimate_sigmas(colours, missing) / [2.0, 5.0, 9.0] - 1


def by_parts(rng: np.random.Generator) -> float:
    """Return errors of strengths that are put together from parts, against those of the whole, relative."""
    worst, halo = 0.0, sigma.PART_HALO
    noisy = SCENE + rng.normal(0, 6, SCENE.shape)
    noisy[:40, :50] = 80.0  # without noise to the last bit
    for whole in (noisy, noisy[0, :], noisy[:, :1]):
        shape = whole.shape
        ends = float(whole.min()), float(whole.max())
        for side in sigma.window_sides(tuple(n for n in shape if n > 1)):
            parts = []
            cuts = [[(0, n)] if n == 1 else [(0, n // 3), (n // 3, n // 2), (n // 2, n)] for n in shape]
            for cut in product(*cuts):
                start = [max(a - halo, 0) for a, _ in cut]
                stop = [min(b + halo, n) for (_, b), n in zip(cut, shape, strict=True)]
                own = tuple(slice(a - s, b - s) for (a, b), s in zip(cut, start, strict=True))
                around = whole[tuple(slice(s, e) for s, e in zip(start, stop, strict=True))]
                parts.append(sigma.windows_of_part(around, tuple(start), own, shape, ends, side))
            found = sigma.sigma_of_parts(parts, shape, ends, side)
            if found is not None:
                worst = largest(worst, abs(found / float(estimate_sigmas(whole[..., None])[0]) - 1))
                break
    return worst


# ---- kinds


def kinds(rng: np.random.Generator) -> Iterator[tuple[str, float]]:
    """Yield what is found and errors of its figures, in standard errors or in what the method's page says."""
    n = SCENE.size
    for density in (0.02, 0.12):
        noise = find_impulses(Impulses(density, 20, 235).sample(np.rint(SCENE), rng=rng)[..., None])
        assert isinstance(noise, Impulses)
        assert (noise.low, noise.high) == (20, 235)
        yield "impulses", (noise.density / density - 1) / np.sqrt(1 / (density * n)) / 2
    pepper = find_impulses(np.where(rng.random(SCENE.shape) < 0.05, 0.0, SCENE)[..., None])
    assert isinstance(pepper, Impulses)
    yield "pepper", (pepper.density / 0.05 - 1) / np.sqrt(1 / (0.05 * n)) / 2
    tall = 100 + 40 * np.sin(np.arange(1500) / 90)[:, None] * np.cos(np.arange(60) / 30)
    for axis in (0, 1):
        noisy = Stripes(6.0, 0).sample(tall + rng.normal(0, 3, tall.shape), rng=rng)
        stripes = find_stripes((noisy if axis == 0 else noisy.T)[..., None])
        assert isinstance(stripes, Stripes)
        assert stripes.axis == axis
        yield "stripes", (stripes.sigma / 6 - 1) * np.sqrt(1500 / 2.7)  # a median of sizes has 2.7 times the variance
    rician = find_rician(
        Rician(6.0).sample(np.where(np.hypot(ROWS - 60, COLUMNS - 80) < 45, SCENE, 0.0), rng=rng)[..., None]
    )
    assert isinstance(rician, Rician)
    yield "Rician", (rician.sigma / 6 - 1) / 0.01
    bright = Rician(6.0).sample(SCENE, rng=rng)[..., None]  # no background tells it
    told = strength_of(bright, np.zeros(SCENE.shape, bool), 1.0)
    assert told is not None
    yield "Rician", (told / 6 - 1) / 0.01
    bright = SCENE * np.where(ROWS > 80, 3, 1)
    for looks, scene in ((1.0, bright), (3.0, bright), (20.0, np.geomspace(50, 800, 200)[:, None] * np.ones(240))):
        noise = find_speckle(Speckle(looks).sample(scene, rng=rng)[..., None])
        assert isinstance(noise, Speckle)
        yield "speckle", (noise.looks / looks - 1) / 0.02
    amplitude = find_speckle(Speckle(1.0, True).sample(bright, rng=rng)[..., None])
    assert isinstance(amplitude, Speckle)
    assert amplitude.amplitude
    yield "speckle of amplitudes", (amplitude.looks - 1) / 0.02
    decibels = find_speckle(LogSpeckle(10.0, 1.0).sample(SCENE, rng=rng)[..., None])
    assert isinstance(decibels, LogSpeckle)
    yield "log-compressed speckle", (decibels.scale / 10 - 1) / 0.02
    for fixed, scene in ((True, np.broadcast_to(SOFT, (8, *SOFT.shape))), (False, SOFT)):
        clean = scene + rng.normal(0, 3, scene.shape)
        hot = HotPixels(0.002, 400.0, fixed)
        noisy = hot.sample(clean, rng=rng)
        found = find_hot_pixels(noisy[..., None])
        assert isinstance(found, HotPixels)
        assert found.fixed == fixed
        struck = noisy - clean > 40  # what noise does not reach
        told = hot.reduce(noisy[..., None]).missing
        yield "hot pixels", SURE * float(np.count_nonzero(struck & ~told) + np.count_nonzero(told & (noisy == clean)))
        yield "hot pixels", (found.level / float((noisy - clean)[told].mean()) - 1) / 0.03
    place = 1 + np.add.outer(np.linspace(0, 1, 192), np.linspace(0, 0.5, 192))
    wide = 100 + 30 * np.sin(np.arange(192) / 60)[:, None] * np.cos(np.arange(192) / 70)
    uneven = find_places((wide + 4 * place * rng.standard_normal(place.shape))[..., None])
    assert isinstance(uneven, GaussianNoise)
    yield "noise by place", float(np.abs(np.log(uneven.along(wide[..., None])[..., 0] / (4 * place))).mean()) / 0.005


def mosaics(rng: np.random.Generator) -> Iterator[tuple[str, float]]:
    """Yield errors of the noise of mosaics of colours, by an even and an uneven sensor."""
    wide = 300 + 200 * np.sin(np.arange(320) / 120)[:, None] * np.cos(np.arange(320) / 110)
    shares = np.array([[0.5, 1.0], [1.0, 0.3]])
    mosaic = wide * np.tile(shares, (160, 160))
    even = find_mosaic((mosaic + rng.normal(0, 9, mosaic.shape))[..., None])
    assert isinstance(even, GaussianNoise)
    yield "mosaic", (float(even.sigma) / 9 - 1) / 0.03
    counted = find_mosaic(Poisson(1.5, 2.0, 0.0).sample(mosaic, rng=rng)[..., None])
    assert isinstance(counted, Poisson)
    middle = float(np.median(mosaic))
    yield "mosaic of counts", (float(counted.variance(np.array([middle]))[0]) / (1.5 * middle + 4) - 1) / 0.04
    yield "mosaic of counts", (counted.gain / 1.5 - 1) / 0.05


# ---- counts


def counted(rng: np.random.Generator) -> Iterator[tuple[str, float]]:
    """Yield errors of gains, offsets and read noise, in their standard errors or in small parts."""
    light = 1 + np.add.outer(np.linspace(0, 30, 192), 10 * np.sin(np.arange(192) / 40) + 10)
    whole = of_counts.find_whole_counts(Poisson(2.0, 0.0, 500.0).sample(2 * light + 500, rng=rng)[..., None])
    assert isinstance(whole, Poisson)
    yield "whole counts", SURE * abs(whole.gain - 2)
    yield "whole counts", abs(whole.offset - 500) / 2
    amplified = of_counts.find_counts(Poisson(1.7, 2.0, 20.0).sample(1.7 * light + 20, rng=rng)[..., None])
    assert isinstance(amplified, Poisson)
    yield "amplified counts", (amplified.gain / 1.7 - 1) / 0.02
    yield "amplified counts", (float(amplified.variance(np.array([60.0]))[0]) / (1.7 * 40 + 4) - 1) / 0.02
    stack = np.linspace(5, 200, 40)[:, None] * np.ones((24, 40, 40))
    noisy = Poisson(2.0, 6.0, 100.0).sample(2 * stack + 100, rng=rng)
    told = photon_transfer(noisy, offset=100)
    yield "photon transfer", (told.gain - 2) / told.gain_error
    yield "photon transfer", (told.sigma - 6) / told.sigma_error
    yield "photon transfer", (told.intercept + 164) / told.intercept_error
    off = told.variances - 2 * (told.means - 100) - 36
    yield "photon transfer", (float(np.mean((off / told.errors) ** 2)) - 1) / np.sqrt(2 / len(off)) / 3
    unknown = photon_transfer(noisy)
    yield "photon transfer", (unknown.model.offset - 125) / 2  # the darkest blocks, of which the read noise is real
    yield (
        "photon transfer",
        SURE * (abs(unknown.gain / told.gain - 1) + abs(unknown.intercept / told.intercept - 1)) / 1e-9,
    )


def lines(rng: np.random.Generator) -> float:
    """Return errors of lines through variances and of their covariances, against NumPy's fits, relative."""
    means, worst = np.sort(rng.uniform(300, 400, 25)), 0.0
    for off in (0.0, 0.3, 2.0):
        variances = 2.0 * (means - 250)
        errors = 0.02 * variances
        variances = variances + off * errors * np.clip(rng.standard_normal(25), -1.5, 1.5)
        slope, level, covariance = line_through(means, variances, errors * variances / (2 * (means - 250)), 0.0)
        # At the fixed point errors are in proportion to the line itself.
        spread = 0.02 * (slope * means + level)
        fit, scaled = np.polyfit(means - 350, variances, 1, w=1 / spread, cov="unscaled")
        rest = (variances - np.polyval(fit, means - 350)) / spread
        scaled = scaled * max(float((rest**2).sum()) / 23, 1.0)
        shift = np.array([[1.0, 0.0], [-350.0, 1.0]])
        exact = shift @ scaled @ shift.T
        worst = largest(worst, abs(slope / fit[0] - 1), abs(level / (fit[1] - 350 * fit[0]) - 1),
                        float(np.abs(covariance / exact - 1).max()))  # fmt: skip
    parabola = 1 + 1e-3 * (means - 300) ** 2
    wrong = is_square(means, 2 * (means - 250), 0.5 * np.ones(25), 0.0) or not is_square(
        means, parabola, 0.02 * parabola, 0.0
    )
    return largest(worst, float(wrong))


def blocks(rng: np.random.Generator) -> float:
    """Return errors of moments of blocks and of what is around them, against loops and SciPy's k-statistics."""
    plane, worst = rng.gamma(2.0, size=(21, 26)), 0.0
    found = of_counts._blocks(plane).reshape(6, 3, 4)
    own = plane[:20, :24].reshape(5, 4, 6, 4).swapaxes(1, 2)
    level = own.mean(axis=(2, 3))
    for i, j in product(range(3), range(4)):
        block, four = own[i + 1, j + 1], []
        for a, b in product((0, 2), repeat=2):
            (p, q), (r, s) = cell = block[a : a + 2, b : b + 2]
            down, across = (p + q - r - s) / 2, (p + r - q - s) / 2
            four.append(
                (cell.mean(), ((p - q - r + s) / 2) ** 2, (down**2 + across**2) / 2, stats.kstat(cell.ravel(), 3))
            )
        up, low, left, right = level[i, j + 1], level[i + 2, j + 1], level[i + 1, j], level[i + 1, j + 2]
        exact = [(up + low + left + right) / 4, (up - low) ** 2 + (left - right) ** 2, *np.mean(four, axis=0)]
        worst = largest(worst, float(np.abs(found[:, i, j] - exact).max()))
    return worst


# ---- recordings


def recorded(rng: np.random.Generator) -> Iterator[tuple[str, float]]:
    """Yield errors of hum, in the errors of Cramér and Rao, of a spectrum and of spikes."""
    n, t = 6000, np.arange(6000)
    signal = lfilter([0.05], [1, -1.0], rng.standard_normal(n)) + 3 * np.sin(t / 300)
    lines = ((0.12, 0.3, 1.0), (0.24, 0.1, -0.5))
    wave = sum(a * np.cos(2 * np.pi * f * t + phase) for f, a, phase in lines)
    hum = find_hum(signal + wave + rng.normal(0, 0.1, n))
    assert isinstance(hum, Hum)
    assert hum.amplitudes is not None
    assert hum.phases is not None
    for told, (f, a, phase) in zip(zip(hum.frequencies, hum.amplitudes, hum.phases, strict=True), lines, strict=True):
        noise = 0.1**2 + 0.05**2 / (2 * np.sin(np.pi * f)) ** 2  # of the walk at that frequency as well
        yield "hum", (told[0] - f) * 2 * np.pi / np.sqrt(24 * noise / a**2) * n**1.5
        yield "hum", (told[1] - a) / np.sqrt(2 * noise / n)
        yield "hum", (told[2] - phase) / np.sqrt(8 * noise / (a**2 * n))
    for pole in (0.6, -0.5):
        walk = lfilter([1.0], [1, -pole], rng.standard_normal(20_000))
        found = spectrum_of_signal(5 * walk + np.sin(np.arange(20_000) / 900))
        assert found is not None
        assert 0.5 <= found[1] <= 1
        place = np.exp(-2j * np.pi * np.arange(len(found[0])) / len(found[0]))
        logs = np.log(found[0] / (25 / np.abs(1 - pole * place) ** 2))
        yield "spectrum", float(np.abs(logs[4:-4]).max()) / 0.05
        yield "spectrum", float(np.abs(logs[1:4]).max()) / 0.35
    peak = 50 / (1 + ((t - 3000) / 40.0) ** 2) + t / 1000 + rng.normal(0, 1, n)
    spiky = Spikes(0.003, level=150.0).sample(peak, rng=rng)
    told = Spikes(0.003).reduce(spiky[:, None]).missing
    assert told is not None
    far = np.abs(spiky - peak) > 20
    yield "spikes", SURE * float(np.count_nonzero(far & ~told) + np.count_nonzero(told & (spiky == peak)))
    verdict = estimate_noise(np.sin(t / 40) + rng.normal(0, 0.2, n))
    assert isinstance(verdict.model, GaussianNoise)
    yield "white noise in time", (float(verdict.model.sigma) / 0.2 - 1) / 0.01
    yield "white noise in time", SURE * float(verdict.confidence != "high")
    counts = rng.poisson(3 + 2 * np.sin(t / 200))
    ratio, error, fits = recordings._dispersion(counts.astype(np.float64))
    yield "counts in time", (ratio - 1) / error if fits else np.inf
    yield (
        "counts in time",
        (error / np.sqrt(float(np.mean(2 - 2 / np.maximum(counts.reshape(-1, 2).sum(axis=1), 2))) / (n / 4)) - 1)
        / 0.03,
    )
    verdict = estimate_noise(3.0 * counts)
    assert isinstance(verdict.model, Poisson)
    yield "counts in time", SURE * abs(verdict.model.gain - 3)


def smoothed(rng: np.random.Generator) -> float:
    """Return errors of local straight lines through logarithms, and of their errors, against NumPy's fits."""
    count, worst = 33, 0.0
    error, kept = rng.uniform(0.1, 0.3, count), np.arange(count) >= 2
    kept[[9, 20, 21]] = False
    logs = rng.standard_normal(count)
    smooth, blur = periodograms._smoothed(logs, error, kept)
    rows = np.stack([periodograms._smoothed(one, error, kept)[0] for one in np.eye(count)], axis=1)  # it is linear
    place = np.log(np.maximum(np.arange(count), 0.5))
    for k in range(4, count):
        reach = recordings.OfRecordings.neighbours
        near = np.flatnonzero(kept & (np.abs(np.arange(count) - k) <= reach))
        while len(near) < 4:
            reach += 1
            near = np.flatnonzero(kept & (np.abs(np.arange(count) - k) <= reach))
        weight = np.sqrt(1 - ((near - k) / (reach + 1)) ** 2) / error[near]
        fit = np.polyfit(place[near] - place[k], logs[near], 1, w=weight)
        worst = largest(worst, abs(smooth[k] - fit[1]), abs(blur[k] / np.sqrt(1.5 * rows[k] ** 2 @ error**2) - 1))
    return worst


# ---- other units


def in_units(rng: np.random.Generator) -> float:
    """Return by how much figures of noise that is found in a f + b are off what a and b make of those in f, relative.

    Strengths, gains, levels and amplitudes are as large as a, powers as a², and shares, looks and frequencies as 1. Of
    laws that tell where 0 is, b is 0.
    """
    light = 1 + np.add.outer(np.linspace(0, 30, 192), 10 * np.sin(np.arange(192) / 40) + 10)
    whole = Poisson(2.0, 0.0, 500.0).sample(2 * light + 500, rng=rng)
    amplified = Poisson(1.7, 2.0, 20.0).sample(1.7 * light + 20, rng=rng)
    white = 7 * rng.standard_normal((256, 256)) + 90
    stack = Poisson(2.0, 6.0, 100.0).sample(np.linspace(110, 500, 40)[:, None] * np.ones((12, 40, 40)), rng=rng)
    striped = Stripes(6.0, 0).sample(SOFT + rng.normal(0, 3, SOFT.shape), rng=rng)
    speckled, dark = Speckle(3.0).sample(SCENE, rng=rng), np.where(np.hypot(ROWS - 60, COLUMNS - 80) < 45, SCENE, 0.0)
    magnitudes, salted = Rician(6.0).sample(dark, rng=rng), Impulses(0.05, 20, 235).sample(np.rint(SCENE), rng=rng)
    wave, t = lfilter([0.05], [1, -1.0], rng.standard_normal(6000)) + rng.normal(0, 0.1, 6000), np.arange(6000)
    wave = wave + 0.3 * np.cos(2 * np.pi * 0.12 * t + 1) + 0.1 * np.cos(2 * np.pi * 0.24 * t - 0.5)

    def figures(a: float, b: float) -> Iterator[tuple[int, Any]]:
        seen = evidence.look((a * white + b)[..., None])
        told = photon_transfer(a * stack + b, offset=a * 100 + b)
        counts = [find((a * one + b)[..., None]) for find, one in ((of_counts.find_whole_counts, whole),
                                                                   (of_counts.find_counts, amplified))]  # fmt: skip
        stripes, salt = find_stripes((a * striped + b)[..., None]), find_impulses((a * salted + b)[..., None])
        speckle, hum = find_speckle(a * speckled[..., None]), find_hum(a * wave + b)
        unknown = photon_transfer(a * stack + b)
        yield 1, [unknown.sigma, unknown.model.offset - b]
        yield 2, np.concatenate([seen.powers.ravel(), *(table.ravel() for table in seen.tables)])
        yield 1, [seen.reference, *(seen.intensities - b)]
        yield 1, [told.gain, told.gain_error, told.sigma, told.sigma_error, *(told.means - b)]
        yield 2, [told.intercept + told.gain * b, *told.variances, *told.errors]
        for one in counts:
            yield 1, [one.gain, one.sigma, one.offset - b]
        yield 1, [stripes.sigma, find_rician(a * magnitudes[..., None]).sigma, salt.low - b, salt.high - b]
        yield 1, [estimate_sigma(a * white + b), estimate_sigma(a * wave + b), *hum.amplitudes]
        yield 0, [*hum.frequencies, *hum.phases, salt.density, speckle.looks]

    worst, plain = 0.0, list(figures(1.0, 0.0))
    for a, b in ((2.0**-9, 0.0), (24.0, -512.0)):
        for (degree, one), (_, other) in zip(figures(a, b), plain, strict=True):
            wanted = a**degree * np.asarray(other)
            worst = largest(worst, float(np.abs(np.asarray(one) - wanted).max() / np.abs(wanted).max()))
    return worst


# ---- what windows show


def shown(rng: np.random.Generator) -> Iterator[tuple[str, float]]:
    """Yield errors of powers of white noise by frequency, of the law of quiet blocks and of spectra made of them."""
    seen = evidence.look((7 * rng.standard_normal((256, 256)) + 90)[..., None])
    assert seen is not None
    # Of 256 windows the quietest share is measured: a hundred coefficients a band, and more.
    yield "windows", float(np.abs(np.log(seen.powers / 49)).max()) / 0.04
    yield "windows", (seen.reference / 7 - 1) / 0.01
    yield "tails", seen.tails
    yield "windows", float(np.abs(np.log(seen.strengths)).max()) / 0.05
    spectrum = pictures.composed(seen, np.full_like(seen.powers[0], 0.5)[None], 0)
    yield "spectra of windows", float(np.log(spectrum.mean() / (49 / 4))) / 0.02
    yield "spectra of windows", float(np.abs(np.log(spectrum / (49 / 4))).max()) / 0.1
    place = (np.arange(400) + 0.5) / 400
    inside = [(np.hypot(place[:, None], place) < high).mean() for _, _, high in evidence.BANDS]
    shares = -np.diff([*inside, 0.0])
    yield "areas of bands", float(np.abs(pictures.areas() - shares / shares.sum()).max()) / 1e-3
    odds = {"clean": 0.2, "white": 0.5, "correlated": 0.3}
    for tails, factor in ((1.0, 1.0), (-5.0, 10.0), (24.0, 64.0), (160.0, 100.0)):
        told = pictures.revised(odds, tails)
        yield "revised odds", SURE * abs(told["clean"] / (1 - told["clean"]) / (factor * 0.25) - 1) / 1e-9
    for shape in ((300, 16, 16), (400, 1, 64)):
        flat = speckle._Flat(3 * rng.standard_normal(shape), np.zeros(shape[0]))
        for level, number in ((flat.fine, 4), (flat.middle, 2)):
            yield "flat windows", (level / 3 - 1) * np.sqrt(2 * np.prod(shape) / number)
    flat = speckle._Flat(np.log(rng.gamma(2.0, size=(60, 16, 16))), np.zeros(60))
    share = (np.arange(speckle.OfSpeckle.quantiles) + 0.5) / speckle.OfSpeckle.quantiles
    x = np.sort(flat.rest, axis=None)[(share * flat.rest.size).astype(int)] / flat.sigma
    for looks in (1.0, 2.0, 5.0):
        law = stats.loggamma(looks)
        apart = np.abs(law.cdf(law.mean() + law.std() * x) - share).max() / np.abs(stats.norm.cdf(x) - share).max()
        yield "distances of laws", SURE * abs(flat.distance(looks) / apart - 1) / 1e-9
    energy = rng.standard_normal((400, 30)) ** 2 * rng.uniform(0.5, 2, 30)
    white = energy / energy.mean(axis=0)
    kurtosis = np.mean([(32 / 30) * np.mean(one**2) / np.mean(one) ** 2 - 3 for one in white])  # of 30 it is 3 · 30/32
    error = np.sqrt(24 / (30 * evidence.SHARES[0] * 5000))
    yield "tails of blocks", SURE * abs(evidence._tails(energy, 5000.0) / (kurtosis / error) - 1) / 1e-9
    edges = 100.0 * np.repeat(np.repeat(rng.random((17, 17)), 8, axis=0), 8, axis=1)
    yield "blocks of JPEG", SURE * float((evidence._edges(edges[..., None], 100.0) < np.log(1e3)).any())


def verdicts(rng: np.random.Generator) -> Iterator[tuple[str, float]]:
    """Yield errors of the strengths of verdicts, whose kind is that of what was put there."""
    low = np.exp(-3 * np.hypot(*np.meshgrid(np.fft.fftfreq(64), np.fft.fftfreq(64))))
    wide = np.kron(SCENE, np.ones((2, 2)))[:256, :256]
    for scene, added, bound in (
        (wide, GaussianNoise(8.0), 0.02),
        (np.kron(TEXTURED, np.ones((2, 2)))[:256, :256], GaussianNoise(12.0), 0.02),
        (100 + ROWS / 8, GaussianNoise(6.0, low), 0.06),
    ):
        told = estimate_noise(added.sample(scene, rng=rng))
        assert isinstance(told.model, GaussianNoise)
        yield "verdict", (float(told.model.sigma) / float(added.sigma) - 1) / bound
        white = told.model.spectrum is None
        yield "verdict", SURE * float(white != (added.spectrum is None))
    clean = estimate_noise(SCENE)
    yield "verdict", SURE * float(clean.model.sigma)
    # Light that falls off is a surface of second order, and is taken away.
    shade = 100 + ROWS / 4 + COLUMNS / 6 + 9 * (ROWS / 128) ** 2 - 15 * (COLUMNS / 160) ** 2 + ROWS * COLUMNS / 2e3
    named = estimate_noise(shade + rng.normal(0, 6, shade.shape), flat=np.s_[20:120, 20:140])
    yield "named part", (float(named.model.sigma) / 6 - 1) * np.sqrt(2 * 100 * 120)
    coloured = estimate_noise(GaussianNoise(6.0, low).sample(shade, rng=rng), flat=np.s_[20:120, 20:140])
    yield "named part", (float(coloured.model.sigma) / 6 - 1) / 0.03
    yield "named part", SURE * float(coloured.model.spectrum is None)


def run(context: Context) -> Outcome:
    rng = np.random.default_rng(77)
    context.step("strengths")
    checks = [
        Check("strengths of white noise, relative", largest(*map(abs, strengths(rng))), 0.055),
        Check("strengths from parts against that of the whole, relative", by_parts(rng), 1e-6),
        Check("lines through variances, and covariances, against NumPy's fits, relative", lines(rng), 1e-9),
        Check("moments of blocks against loops and SciPy's k-statistics", blocks(rng), 1e-10),
        Check("figures in other units, relative", in_units(np.random.default_rng(0)), 1e-6),
        Check("local lines through logarithms against NumPy's fits", smoothed(rng), 1e-10),
    ]
    for number, part in enumerate((kinds, mosaics, counted, recorded, shown, verdicts)):
        context.step(part.__name__)
        found: dict[str, float] = {}
        for name, off in part(np.random.default_rng([77, number])):
            found[name] = largest(found.get(name, 0.0), abs(float(off)))
        checks += [Check(f"{name}: figures in standard errors", off, SURE) for name, off in found.items()]
    return Outcome(checks)


CLAIM = Claim(
    name="noise-found",
    title="Noise is found by its law, with its strength and figures",
    statement=(
        "White noise on smooth and textured scenes, in signals, volumes and colours, clipped and beside areas without "
        "noise, is measured within 5.5 %. Impulses, stripes, hot pixels, spikes, hum, speckle of intensities, "
        "amplitudes and decibels, Rician noise, counts, mosaics, noise that differs by place, coloured noise and "
        "verdicts have the name of what was put there, and its figures within some standard errors: of binomial "
        "shares, of a chi-squared law, of the bound of Cramér and Rao, or of what the stack itself tells. Moments of "
        "blocks, lines through variances and through logarithms are those of loops, SciPy and NumPy."
    ),
    source=(
        "simulated; Ponomarenko et al. 2007; Colom and Buades 2013, doi 10.5201/ipol.2013.45; Rife and Boorstyn 1974, "
        "doi 10.1109/TIT.1974.1055282; Janesick, Klaasen and Elliott 1987, doi 10.1117/12.7974183"
    ),
    run=run,
)
