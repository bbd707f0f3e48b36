"""Models of noise: their laws, the transforms that make them even, and the means that these give back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats
from scipy.ndimage import gaussian_filter, map_coordinates
from scipy.special import polygamma

from nlflow.denoising.noise import (
    Drift,
    GaussianNoise,
    Hum,
    Impulses,
    LogSpeckle,
    Mixture,
    NoncentralChi,
    Poisson,
    Rician,
    Speckle,
    Stripes,
    spectra,
)
from nlflow.denoising.noise.figures import OfStripes
from nlflow.denoising.noise.models import intensities
from nlflow.denoising.noise.models.stripes import differences, solve
from validation.harness import FALSE_ALARM, Check, Claim, Context, Outcome, bonferroni, largest

Floats = NDArray[np.float64]

DRAWN = 40_000
COUNTS = (0.3, 2.0, 11.0, 90.0, 290.0, 310.0, 1e3, 2e4)
MAGNITUDES = (0.4, 1.0, 2.0, 3.5, 6.0, 9.0, 15.0, 30.0, 300.0)


def moments(law: Any, function: Callable[[Floats], Floats], many: int = 12_001) -> tuple[float, float]:
    """Return the mean and the standard deviation of a function under a law of SciPy, by the trapezoidal rule."""
    z = np.linspace(*law.ppf([1e-15, 1 - 1e-13]), many)
    weights = law.pdf(z)
    weights /= weights.sum()
    values = function(z)
    mean = float(weights @ values)
    return mean, float(np.sqrt(weights @ (values - mean) ** 2))


# ---- counts


def anscombe(read: float) -> Callable[[float], float]:
    """Return E[2 √(k + 3/8 + s² + s ξ)₊] as a function of the counts x, by quadrature over the Gaussian ξ."""
    xi = np.linspace(-9, 9, 4001)
    weights = stats.norm.pdf(xi) / stats.norm.pdf(xi).sum()

    def expected(x: float) -> float:
        low, high = stats.poisson.ppf([1e-15, 1 - 1e-15], x)
        k = np.arange(low, high + 2)
        under = k + 0.375 + read**2
        if read:
            roots = np.sqrt(np.maximum(under[:, None] + read * xi, 0)) @ weights
        else:
            roots = np.sqrt(under)
        return float(2 * stats.poisson.pmf(k, x) @ roots)

    return expected


def counts() -> tuple[float, float, float]:
    """Return the largest errors of means that are given back, of expected transforms, and of other formulas."""
    back, tables, formulas = 0.0, 0.0, 0.0
    for noise in (Poisson(), Poisson(2.5, 2.5 * 1.3, -4.0)):
        read = noise.sigma / noise.gain
        mean = anscombe(read)
        expected = np.array([mean(x) for x in COUNTS])
        true = noise.gain * np.array(COUNTS) + noise.offset
        error = (noise.unstabilize(expected) - true) / noise.gain / np.maximum(np.sqrt(COUNTS), 1)
        table = noise.expected(true)  # by straight lines between places
        variance = noise.gain**2 * (np.array(COUNTS) + read**2)
        told = noise.by_intensity(true)
        z = noise.gain * np.array([0.0, 1.5, 40.0]) + noise.offset
        plain = 2 * np.sqrt(np.array([0.0, 1.5, 40.0]) + 0.375 + read**2)
        tables = largest(tables, float(np.abs(table - expected).max()))
        back = largest(back, float((np.abs(error) / np.where((read > 0) & (true < 300), 3e-5, 1e-6)).max()))
        formulas = largest(
            formulas,
            float(np.abs(noise.variance(true) / variance - 1).max()),
            float(np.abs(noise.stabilize(z) / plain - 1).max()),
            float(np.abs(told.at(np.full((9, 1), true[-1]))[4] / np.sqrt(variance[-1]) - 1)),
            float(np.abs(np.interp(told.intensities[16], told.intensities, told.strengths) ** 2
                         / (noise.gain * (told.intensities[16] - noise.offset) + noise.sigma**2) - 1)),
        )  # fmt: skip
        # Many counts are given back from 2 √m (1 − v/8m² + t/16m³ − 5q/128m⁴), central moments v, t, q about m − 3/8.
        x = np.array([100.0, 400.0, 1e4])
        m, v = x + 0.375 + read**2, x + read**2
        terms = 1 - v / (8 * m**2) + x / (16 * m**3) - 5 * (x + 3 * v**2) / (128 * m**4)
        formulas = largest(formulas, float(np.abs(intensities._from_series(2 * np.sqrt(m) * terms, read) - x).max()))
    return back, tables, formulas


# ---- magnitudes


def magnitudes() -> tuple[float, float, float]:
    """Return the errors of magnitudes that are given back, of their means, and the spread that is farthest from 1."""
    back, means, spread = 0.0, 0.0, 1.0
    for coils, noise in ((1, Rician(2.0)), (20, NoncentralChi(2.0, coils=20))):
        for a in MAGNITUDES:
            law = Root(stats.ncx2(2 * coils, a**2))
            middle, wide = moments(law, lambda z: noise.stabilize(2 * z) / 2)  # noqa: B023
            # What is near 0 is known as the root of what the noise leaves.
            back = largest(back, abs(float(noise.unstabilize(np.array([2 * middle]))[0]) / 2 - a) * min(a, 1.0))
            means = largest(means, abs(float(noise.mean(np.array([2 * a]))[0]) / 2 - moments(law, np.asarray)[0]))
            spread = max(spread, wide, key=lambda one: abs(one - 1))
        nothing = moments(Root(stats.ncx2(2 * coils, 1e-12)), lambda z: noise.stabilize(2 * z))[0]  # noqa: B023
        back = largest(back, *noise.unstabilize(np.array([nothing - 0.1, nothing - 9.0])).tolist())
    return back, means, spread


class Root:
    """The law of the root of a variable."""

    def __init__(self, law: Any) -> None:
        self.law = law

    def ppf(self, share: Any) -> Floats:
        return np.asarray(np.sqrt(self.law.ppf(share)))

    def pdf(self, z: Floats) -> Floats:
        return np.asarray(2 * z * self.law.pdf(z**2))


# ---- speckle


def of_gamma(looks: float, function: Callable[[Floats], Floats]) -> float:
    """Return the mean of a function of a gamma variable of mean 1, over its quantiles as those of a normal one."""
    law, x = stats.gamma(looks, scale=1 / looks), np.linspace(0, 8, 4001)
    values = np.concatenate([function(law.ppf(stats.norm.sf(x))), function(law.isf(stats.norm.sf(x)))])
    weights = np.tile(stats.norm.pdf(x), 2)
    weights[[0, len(x)]] /= 2  # both have the place 0
    return float(weights @ values / weights.sum())


def own_weights(correlation: Floats | None, width: float) -> list[float]:
    """Return how much a sample shares with its local mean, a Gaussian, and the variance of that, relative to its own.

    The second is a Gaussian √2 times as wide, both of them sampled.
    """
    offsets = np.arange(-30, 31)
    found = []
    for wide in (width, np.sqrt(2) * width):
        line = stats.norm.pdf(offsets, scale=wide)
        plane = line[:, None] * line
        found.append(float((plane * (np.abs(plane) == plane.max() if correlation is None else correlation)).sum()))
    return found


def speckle(rng: np.random.Generator) -> tuple[float, float]:
    """Return errors of strengths and of samples that were made additive, by formulas written out."""
    size, p = 61, 1 / 3
    frequency = np.fft.fftfreq(64)
    # A Gaussian correlation of 2 pixels and its spectrum.
    spectrum = np.exp(-2 * (np.pi * 2.0) ** 2 * (frequency[:, None] ** 2 + frequency**2))
    far = np.arange(-30, 31)
    together = np.exp(-(far[:, None] ** 2 + far**2) / (2 * 2.0**2))
    strengths, formulas = 0.0, 0.0
    x = 5 + np.hypot(*np.mgrid[:size, :size]) / 9
    for looks, amplitude, coloured in ((1.0, False, False), (1.0, True, False), (3.5, False, True)):
        root = 2 if amplitude else 1
        unit = of_gamma(looks, lambda g: g ** (1 / root))  # noqa: B023
        mean = {q: of_gamma(looks, lambda g: (g ** (1 / root) / unit) ** q)  # noqa: B023
                for q in (p * root, 2 * p * root, 1 + p * root)}  # fmt: skip
        sigma = np.sqrt(mean[2 * p * root] / mean[p * root] ** 2 - 1) / (p * root)
        noise = Speckle(looks, amplitude, spectrum if coloured else None)
        own, shared = own_weights(together if coloured else None, 1.5)
        z = x * rng.gamma(looks, 1 / looks, x.shape) ** (1 / root) / unit
        found = noise.reduce(z[..., None])
        around = gaussian_filter(z, 1.5, mode="reflect")
        power = p * root
        even = np.log(around) + ((z / around) ** power / mean[power] - 1) / power
        even += own * (mean[1 + power] / mean[power] - 1)
        estimate = np.log(x) + 0.1
        returned = around * (1 + power * (estimate - np.log(around))) ** (1 / power)
        strengths = largest(strengths, abs(noise.stable_sigma / sigma - 1))
        formulas = largest(
            formulas,
            float(np.abs(found.samples[..., 0] - even).max()),
            float(np.abs(found.back(estimate[..., None])[..., 0] / returned - 1).max()),
        )
        if amplitude:
            continue
        logs = LogSpeckle(4.0, looks, spectrum if coloured else None)
        y = logs.sample(x, rng=rng) / 4.0
        mean_log = of_gamma(looks, np.log)
        level = gaussian_filter(y, 1.5, mode="reflect") - mean_log
        of_power = of_gamma(looks, lambda g: g**p * np.log(g)) / mean[p]
        bias = own * (of_power - mean_log) - shared * p / 2 * float(polygamma(1, looks))
        drawn = 4 * (level + (np.exp(p * (y - level)) / mean[p] - 1) / p + mean_log + bias)
        reduced = logs.reduce(4 * y[..., None])
        assert reduced.rest is not None
        strengths = largest(strengths, abs(float(reduced.rest.sigma) / (4 * sigma) - 1))
        formulas = largest(formulas, float(np.abs(reduced.samples[..., 0] - drawn).max()))
    many = 2e4  # the series of moments, of which the first term beyond counts 1 / looks
    strengths = largest(strengths, abs(Speckle(many, True).stable_sigma * np.sqrt(many) * 2 - 1))
    strengths = largest(strengths, abs(Speckle(2.0).scaled(2.0).looks / 0.5 - 1))
    return strengths, formulas


# ---- what is sampled


def sampled(rng: np.random.Generator) -> Iterator[tuple[Floats, float, float]]:
    """Yield samples, the mean that they should have, and the variance."""
    flat = np.full(DRAWN, 3.0)
    for noise, mean, variance in (
        (Poisson(0.5, 0.4, 1.0), 3.0, 0.5 * 2.0 + 0.4**2),
        (Speckle(2.0), 3.0, 3.0**2 / 2),
        (Speckle(1.0, amplitude=True), 3.0, 3.0**2 * (4 / np.pi - 1)),
        (LogSpeckle(4.0, 2.0), 3.0, 16 * (np.pi**2 / 6 - 1)),
        (Impulses(0.2, -1.0, 5.0), 0.8 * 3 + 0.2 * 2, 0.8 * 9 + 0.2 * 13 - 2.8**2),
        (Impulses(0.2, -1.0, 5.0, random=True), 0.8 * 3 + 0.2 * 2, 0.8 * 9 + 0.2 * 7 - 2.8**2),
        (GaussianNoise(0.7), 3.0, 0.49),
    ):
        yield np.asarray(noise.sample(flat, rng=rng), np.float64), mean, variance
    for coils, magnitude in ((1, Rician(2.0)), (3, NoncentralChi(2.0, coils=3))):
        squares = np.asarray(magnitude.sample(flat, rng=rng)) ** 2
        law = stats.ncx2(2 * coils, (3 / 2) ** 2)
        yield squares, 4 * law.mean(), 16 * law.var()
    coloured = GaussianNoise(0.7, np.exp(-8 * np.abs(np.fft.fftfreq(64))))
    yield np.asarray(coloured.sample(flat, rng=rng))[::50], 3.0, 0.49
    rows = Stripes(0.6, axis=0).sample(np.zeros((2000, 3)), rng=rng)
    yield rows[:, 0], 0.0, 0.36
    drifts = np.stack([Drift(20.0, 1.5).sample(np.zeros(60), rng=rng)[[10, 15]] for _ in range(1500)])
    yield drifts[:, 0], 0.0, 2.25
    yield drifts[:, 0] - drifts[:, 1], 0.0, 2 * 2.25 * (1 - np.exp(-2 * 5**2 / 20**2))


def levels(rng: np.random.Generator) -> list[float]:
    """Return p-values of the means and of the variances of what is sampled."""
    found = []
    for samples, mean, variance in sampled(rng):
        n, away = samples.size, samples - mean
        found.append(abs(float(away.mean())) / np.sqrt(variance / n))
        fourth = float((away**4).mean()) - variance**2
        found.append(abs(float((away**2).mean()) - variance) / np.sqrt(max(fourth, 1e-300) / n))
    values = np.unique(Impulses(0.2, -1.0, 5.0).sample(np.full(200, 3.0), rng=rng)).tolist()
    return [float(2 * stats.norm.sf(one)) for one in found] + [float(values == [-1.0, 3.0, 5.0])]


# ---- what lies on samples, and strengths that follow the place


def subtracted(rng: np.random.Generator) -> float:
    """Return by how much hum, drift and stripes that are found differ from what was put there, or from its formula."""
    t = np.arange(900)
    wave = 0.3 * np.cos(2 * np.pi * 0.12 * t + 1.0) + 0.2 * np.cos(2 * np.pi * 0.31 * t - 0.4)
    hum = Hum((0.12, 0.31), (0.3, 0.2), (1.0, -0.4))
    lost = np.zeros(900, bool)
    lost[300:340] = True
    clean = 50 + np.sign(np.sin(t / 70))
    fitted = Hum((0.12, 0.31)).reduce((clean + wave)[:, None], lost).samples[:, 0] - clean
    worst = largest(float(np.abs(hum.wave(900) - wave).max()) / 1e-9, float(np.abs(fitted)[~lost].max()) / 1e-6)
    # Of a wave the baseline takes this share, far from the ends; s is its frequency by second differences.
    long = np.arange(4000)
    for period, scale in ((400.0, 400.0), (800.0, 400.0), (60.0, 40.0), (16.0, 12.0)):
        y = np.cos(2 * np.pi * (long - 1999.5) / period)
        rest = Drift(scale).reduce((y + 5 + long / 100)[:, None]).samples[:, 0]
        middle = slice(1000, 3000)
        s = np.sin(np.pi / period) / np.pi
        left = (1 - 1 / (1 + (scale * s) ** 4)) * y + 5 + long.mean() / 100 + y.mean()
        worst = largest(worst, float(np.abs(rest - left)[middle].max()) / 5e-3)
    offsets = rng.normal(0, 0.5, 120)
    picture = np.tile(np.sin(np.arange(200) / 9), (120, 1)) + 0.02 * rng.standard_normal((120, 200))
    for axis in (0, 1):
        striped = picture + offsets[:, None]
        noise = Stripes(0.5, axis)
        found = noise.reduce((striped if axis == 0 else striped.T)[..., None]).samples[..., 0]
        left = ((found if axis == 0 else found.T) - picture).mean(axis=1)
        worst = largest(worst, float(np.std(left)) / 0.015)
    return largest(worst, steepness(rng) / 1e-3)


def steepness(rng: np.random.Generator) -> float:
    """Return the slope that Σ_k ν/2 log(1 + r²/(ν v))/K + Σ o²/(2 σ²) has at offsets o that are said to minimize it."""
    centres, variances = ([rng.uniform(0.2, 0.4, 30 - k) for k in (1, 2)] for _ in range(2))
    o, freedom, sigma = solve(centres, variances, 0.3), OfStripes.degrees, 0.3
    slope, size = o / sigma**2, float(np.abs(o / sigma**2).max())
    for k, (centre, variance) in enumerate(zip(centres, variances, strict=True), start=1):
        r = o[k:] - o[:-k] - centre
        pull = r / (variance + r**2 / freedom) / 2
        slope[k:] += pull
        slope[:-k] -= pull
    return float(np.abs(slope).max()) / size


def spreads(rng: np.random.Generator) -> float:
    """Return errors of variances of differences of rows, (1.48 times the median deviation)² c / n, relative."""
    rows, worst = rng.standard_normal((5, 40)), 0.0
    for k, variance in enumerate(differences(rows, 0.01)[1], start=1):
        apart = rows[k:] - rows[:-k]
        middle = np.median(apart, axis=1, keepdims=True)
        deviation = np.median(np.abs(apart - middle), axis=1) / stats.norm.ppf(0.75)
        worst = largest(worst, float(np.abs(variance / (deviation**2 * OfStripes.dependent / 40) - 1).max()))
    return worst


def told_apart() -> float:
    """Return by how much the power of noise changes that is told as stripes and the rest, relative."""
    power = np.ones((64, 64))
    power[:, 0] = 40.0
    noise = GaussianNoise(2.0, power).separated()
    assert isinstance(noise, Mixture)
    stripes, rest = noise.parts
    assert isinstance(stripes, Stripes)
    assert isinstance(rest, GaussianNoise)
    share = 64 * 39 / power.sum()
    return largest(abs(stripes.sigma**2 / (4 * share) - 1), abs(float(rest.sigma) ** 2 / (4 * (1 - share)) - 1))


def placed() -> float:
    """Return errors of strengths by place and by intensity, and of sums of two noises, relative."""
    places = np.array([[1.0, 2.0, 0.5], [0.7, 1.2, 3.0]])
    shape = (14, 30)
    at = [np.clip((np.arange(n) + 0.5) * parts / n - 0.5, 0, parts - 1)
          for n, parts in zip(shape, places.shape, strict=True)]  # fmt: skip
    wanted = map_coordinates(places, np.meshgrid(*at, indexing="ij"), order=1)
    noise = GaussianNoise(2.0, places=places)
    ramp = np.add.outer(np.arange(14.0), np.arange(30.0) * 1.7)[..., None]
    worst = float(np.abs(noise.along(ramp)[..., 0] / (2 * wanted / noise_scale(noise, places)) - 1).max())
    by = GaussianNoise(1.0, intensities=np.array([0.0, 1.0]), strengths=np.array([1.0, 3.0]))
    total = by.beside(GaussianNoise(2.0), 1, 2)
    at_half = float(total.relative(np.array([0.5]))[0] * total.sigma)
    worst = largest(worst, abs(at_half / np.sqrt(2.0**2 + 2.0**2) - 1))
    both = GaussianNoise(3.0).beside(GaussianNoise(4.0), 1, 2)
    return largest(worst, abs(float(both.sigma) / 5 - 1))


def noise_scale(noise: GaussianNoise, places: Floats) -> float:
    """Return by what a model divides the strengths by place that it was given."""
    assert noise.places is not None
    return float((places / noise.places).mean())


def correlated(rng: np.random.Generator) -> tuple[float, float]:
    """Return errors of correlations that a spectrum tells, and of those of noise drawn with it, in standard errors."""
    frequency = np.fft.fftfreq(16)
    power = 3 * np.exp(-6 * np.hypot(frequency[:, None], frequency / 2))
    told = spectra.correlation(power[None])[0]
    drawn = np.asarray(GaussianNoise(0.7, power).sample(np.zeros((240, 300)), rng=rng)) / 0.7
    off, sure = 0.0, 0.0
    middle = told.shape[0] // 2, told.shape[1] // 2
    spread = np.sqrt(float((told**2).sum()) / drawn.size)  # of a product of neighbours, by Bartlett's formula
    for down, along in ((0, 0), (0, 1), (1, 0), (2, 3), (0, 5)):
        waves = np.cos(2 * np.pi * (down * frequency[:, None] + along * frequency))
        exact = float((power * waves).sum() / power.sum())
        off = largest(off, abs(float(told[middle[0] + down, middle[1] + along]) - exact))
        seen = float(np.mean(drawn[: 240 - down, : 300 - along] * drawn[down:, along:]))
        sure = largest(sure, abs(seen - exact) / (spread * np.sqrt(2)))
    return off, sure


def run(context: Context) -> Outcome:
    rng = np.random.default_rng(2024)
    back, tables, formulas = counts()
    found, means, spread = magnitudes()
    strengths, additive = speckle(rng)
    off, sure = correlated(np.random.default_rng(2025))
    return Outcome([
        Check("counts given back from the mean of their transform, over what tables may be off", back, 1.0),
        Check("means of the transform of counts", tables, 5e-5),
        Check("variance of counts, their transform and strengths by intensity, relative", formulas, 1e-9),
        Check("magnitudes given back from the mean of their transform, over sigma", found, 1e-6),
        Check("means of magnitudes against SciPy's law, over sigma", means, 1e-7),
        Check("spread of magnitudes that were made even, over sigma: the farthest from 1", spread, 0.03, expected=1),
        Check("strengths of speckle that was made even, against quadrature, relative", strengths, 1e-9),
        Check("speckle made additive, and taken back, against the formula written out", additive, 1e-7),
        Check("means and variances of what is sampled: p-value", bonferroni(levels(rng)), FALSE_ALARM, at_least=True),
        Check("correlations that a spectrum tells, against sums of cosines", off, 1e-12),
        Check("correlations of noise that is drawn with it, in standard errors", sure, 4.0),
        Check("hum, drift and stripes that are found, over what they may be off", subtracted(rng), 1.0),
        Check("strengths by place, of sums, parts and rows", largest(placed(), told_apart(), spreads(rng)), 1e-9),
    ])  # fmt: skip


CLAIM = Claim(
    name="noise-laws",
    title="Models of noise have their laws, and their transforms give means back without bias",
    statement=(
        "Counts with and without read noise, magnitudes of one coil or several and speckle have the means and "
        "variances of their laws. Of counts D = 2 √(z + 3/8 + s²), and of magnitudes a function of spread 1, are "
        "undone by E[D] ↦ x, exactly; of speckle log m + ((z/m)^p / E[g^p] − 1)/p + w (E[g^(p+1)] / E[g^p] − 1) is "
        "additive. A drift takes 1 / (1 + (scale/P)⁴) of a wave of period P; hum and stripes are found as they were "
        "put there. Laws and moments are SciPy's, by quadrature."
    ),
    source=(
        "Anscombe 1948, doi 10.1093/biomet/35.3-4.246; Mäkitalo and Foi 2013, doi 10.1109/TIP.2012.2202675; Foi 2011, "
        "doi 10.1109/ISBI.2011.5872758; Goodman 1976, doi 10.1364/JOSA.66.001145; Whittaker 1923"
    ),
    run=run,
)
