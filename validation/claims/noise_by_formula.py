"""What models of noise calculate with, against the same formulas written out with NumPy and SciPy on small inputs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats
from scipy.interpolate import CubicSpline
from scipy.ndimage import gaussian_filter
from scipy.optimize import least_squares
from scipy.special import gammaln

from nlflow.denoising.noise import (
    Drift,
    GaussianNoise,
    Hum,
    Impulses,
    LogSpeckle,
    Mixture,
    Poisson,
    Spikes,
    Stripes,
    discrepancy,
    perturbation,
    spectra,
    sure,
)
from nlflow.denoising.noise.figures import (
    OfDrift,
    OfHum,
    OfImpulses,
    OfLaw,
    OfRecordings,
    OfSharpness,
    OfSpectra,
    OfSpikes,
    OfStripes,
    OfTransfer,
)
from nlflow.denoising.noise.models import intensities, magnitudes, outliers, recordings, sharpness, spikes, stripes
from nlflow.denoising.noise.models import speckle as of_gamma
from nlflow.denoising.noise.names import kinds
from validation.claims.finding_by_formula import TO_SIGMA
from validation.harness import Claim, Context, Outcome, checks_of, largest, off, unless

Floats = NDArray[np.float64]


# ---- spectra and sums


def of_spectra(rng: np.random.Generator) -> Iterator[float]:
    """Yield errors of weights and spectra by scale, of what is drawn, and of risks."""
    share = np.array([0.0, 0.2, 0.3, 0.62, 0.97, 1.0, 1.2])
    fade = (1 + np.cos(np.pi * np.clip((share - OfSpectra.taken) / (1 - OfSpectra.taken), 0, 1))) / 2
    yield off(spectra.fade(share), fade)
    power = rng.uniform(1, 3, (2, 64, 64))
    gain = np.multiply.outer(*[spectra.fade(4 * np.abs(np.fft.fftfreq(64)))] * 2)
    yield off(spectra.remaining(power), power * ((1 - gain) ** 2 + OfSpectra.left * gain**2))
    coarse = rng.random((1, 1, 24))
    places = np.arange(64) * 24 / 64
    yield off(spectra.on_grid(coarse)[0, 0], np.interp(places, np.arange(25), np.append(coarse, coarse[0, 0, 0])))
    power = (power + np.roll(power[:, ::-1, ::-1], (1, 1), axis=(1, 2))) / 2  # of noise that is real
    drawn = np.fft.fft2(spectra.sampled(power, (64, 64), np.random.default_rng(3)))
    white = np.fft.fft2(np.random.default_rng(3).standard_normal((2, 64, 64)))
    yield off(np.abs(drawn / white) ** 2, power)
    f, strength = rng.standard_normal((48, 48, 1)), np.ones((48, 48, 1))
    given: list[Floats] = []

    def run(image: Floats, *others: Any) -> Floats:
        given.append(image)
        return image / 3

    found = spectra.coarse_to_fine(f.copy(), power[:1], strength, 1, run)
    wanted = f - spectra.up(2 / 3 * spectra.down(f), f.shape)
    yield largest(off(given[-1], wanted), off(found, wanted / 3))
    y, u, moved, sigma = rng.standard_normal((4, 7, 9)) * 2.3
    signs, sigma = perturbation((7, 9), rng=rng), np.abs(sigma)
    yield unless(set(np.unique(signs)) == {-1.0, 1.0})
    terms = (u - y) ** 2 - sigma**2 + 2 * sigma**2 * signs * (moved - u) / 0.07
    yield off(sure(y, u, moved, signs, 0.07, sigma), terms.mean())
    yield off(discrepancy(y, u, sigma), np.sqrt((((y - u) / sigma) ** 2).mean()))


def of_gaussian(rng: np.random.Generator) -> Iterator[float]:
    """Yield errors of Gaussian noise: what is counted, drawn, summed, scaled and told apart."""
    yield unless({Poisson.kind, Hum.kind, Spikes.kind} <= set(kinds()))  # however far below `Noise` a class is
    grid = np.fft.fftfreq(64)
    power = np.exp(-3 * np.hypot(grid[:, None], grid / 2))
    noise = GaussianNoise(2.0, power, compressed=0.3)
    whole = 4 * power / power.mean()
    yield off(noise.counted(1, 2)[0], whole.max() * (whole / whole.max()) ** 0.7)
    image = rng.uniform(0, 9, (8, 11))
    following = GaussianNoise(2.0, intensities=np.array([0.0, 9.0]), strengths=np.array([1.0, 3.0]))
    drawn = np.random.default_rng(4).standard_normal((1, 8, 11))[0]
    yield off(following.sample(image, rng=4), image + 2 * drawn * (1 + 2 * image / 9))
    other = GaussianNoise(3.0, power[::-1, ::-1].T ** 0.3)
    yield off(GaussianNoise(2.0, power).beside(other, 1, 2).powers(1, 2), whole + other.powers(1, 2)[0])
    total = following.beside(GaussianNoise(1.5), 1, 2)
    yield off(total.relative(np.array([4.5])) * total.sigma, np.sqrt(4**2 + 1.5**2), 1e-2)
    yield off(total.relative(np.array([0.0, 9.0])) * total.sigma, np.sqrt([4 + 2.25, 36 + 2.25]))
    yield largest(
        off(LogSpeckle(4.0).scaled(3.0).scale, 12), off(Hum((0.1, 0.2), (2.0, 5.0)).scaled(3.0).amplitudes, [6, 15])
    )
    line = power.copy()
    line[:, 0] += 30 * power.mean()
    parts = GaussianNoise(2.0, line).separated()
    assert isinstance(parts, Mixture)
    striped, rest = parts.parts
    left = line.copy()
    left[:, 0] = (line[:, 1] + line[:, -1]) / 2
    share = (line - left).sum() / line.sum()
    yield off([striped.sigma**2, float(rest.sigma) ** 2], [4 * share, 4 * (1 - share)])
    yield off(rest.powers(1, 2)[0], 4 * (1 - share) * left / left.mean())


# ---- counts, magnitudes, speckle


def of_counts(rng: np.random.Generator) -> Iterator[float]:
    """Yield errors of transforms of counts, of their means, and of noise by intensity."""
    xi = np.linspace(-9, 9, 20_001)
    weights = stats.norm.pdf(xi) / stats.norm.pdf(xi).sum()
    for read in (0.3, 4.0):
        x = np.array([3.0, 20.0])
        k = np.arange(80.0)
        roots = 2 * np.sqrt(np.maximum(k[:, None] + read * xi + 0.375 + read**2, 0)) @ weights
        yield off(intensities.expected_transform(x, read), stats.poisson.pmf(k, x[:, None]) @ roots, 1e-5)
    for noise, counts in ((Poisson(0.4, 0.52, -40.0), [0.0, 0.3]), (Poisson(2.5, 0.0, 4.0), [1.0, 0.2]),
                          (Poisson(0.4, 0.52, -40.0), [2.0, 90.0])):  # fmt: skip
        mean = noise.gain * np.array(counts) + noise.offset
        yield off(
            noise.expected(mean), intensities.expected_transform(np.array(counts), noise.sigma / noise.gain), 1e-4
        )
    told = Poisson(2.5, 0.0, 4.0).by_intensity(np.array([4.0, 104.0]))
    places = 4 + 100 * np.linspace(0, 1, 33) ** 2
    yield off(told.intensities, places)
    yield off(told.strengths, np.maximum(np.sqrt(2.5 * (places - 4)), 0.3 * 2.5))


def of_magnitudes(rng: np.random.Generator) -> Iterator[float]:
    """Yield errors of the law of magnitudes, of its series, of moments, and of the slopes that are chosen."""
    z, a = np.array([0.4, 2.0, 5.0, 11.0])[:, None], np.array([0.3, 2.5, 6.0, 12.0])
    for coils in (1.0, 3.5):
        law = np.log(2 * z) + stats.ncx2(2 * coils, a**2).logpdf(z**2)
        yield float(np.abs(magnitudes.log_density(z, a, coils) - law).max()) / 1e-9
        mean, variance, skewness, excess = (np.asarray(one) for one in stats.ncx2(2 * coils, a[2:] ** 2).stats("mvsk"))
        m = mean - coils + 0.5
        terms = (
            1
            - variance / (8 * m**2)
            + skewness * variance**1.5 / (16 * m**3)
            - 5 * (excess + 3) * variance**2 / (128 * m**4)
        )
        # Four rounds gain a factor of m each.
        yield float(np.abs(magnitudes._from_series(np.sqrt(m) * terms, coils) - a[2:]).max()) * m[0] ** 4
    even = magnitudes.stabilizer(14.5)
    start = even.inner.x[0]  # before it f is straight
    near = even(start + np.array([-0.2, -0.1, 0.0, 1e-6]))
    yield largest(off(np.diff(near[:3], 2), 0.0, 1e-12), off(near[2] - near[1], 1e5 * (near[3] - near[2]), 1e-4))
    for one in (0.0, 3.0):
        law = stats.ncx2(29, max(one, 1e-6) ** 2)
        x = np.linspace(0.01, one + 16, 6001)
        weights = 2 * x * law.pdf(x**2)
        weights /= weights.sum()
        middle = weights @ even(x)
        yield off(even.spread(one), np.sqrt(weights @ (even(x) - middle) ** 2), 1e-6)
        yield off(even.mean(one), middle, 1e-6)
    yield chosen(3.5) / OfLaw.digits


def chosen(coils: float) -> float:
    """Return how far chosen log slopes are from those of least squares, written out with a trapezoidal rule."""
    start, end, places, logs = magnitudes._chosen(coils)
    least = np.sqrt(2 * coils)
    wrong = abs(start - max(least - OfLaw.below, 0)) + abs(end - least - OfLaw.span)
    a = np.linspace(0, end, OfLaw.means)
    z = np.linspace(max(start - OfLaw.below, 0) + 1e-6, end + 2 * OfLaw.tail, 3001)
    law = np.exp(np.log(2 * z) + stats.ncx2(2 * coils, np.maximum(a[:, None], 1e-9) ** 2).logpdf(z**2))
    law /= law.sum(axis=1, keepdims=True)
    beyond = z > end
    tail = z / np.sqrt(z**2 - coils + 0.5, where=beyond, out=np.ones_like(z))

    def residuals(free: Floats) -> Floats:
        whole = np.append(free, np.log(end / np.sqrt(end**2 - coils + 0.5)))
        slope = np.where(beyond, tail, np.exp(CubicSpline(places, whole, bc_type="natural")(np.clip(z, start, end))))
        f = np.concatenate([[0], np.cumsum((slope[1:] + slope[:-1]) / 2 * np.diff(z))])
        spread = law @ f**2 - (law @ f) ** 2
        return np.concatenate([spread - 1, OfLaw.smooth * np.diff(whole, 2)])

    found = least_squares(residuals, logs[:-1], xtol=1e-9)
    return largest(wrong, float(np.abs(found.x - logs[:-1]).max()))


def of_speckle(rng: np.random.Generator) -> Iterator[float]:
    """Yield errors of moments of many looks, and of the laws of samples."""
    for power in (1 / 3, 2.0):
        many = 2e4  # of the series the first term beyond counts 1 / looks²
        exact = np.exp(gammaln(many + power) - gammaln(many) - power * np.log(many))
        yield abs(of_gamma.gamma_moment(many, power) - exact) * many**2 / 2
    absent, z = rng.random((14, 17)) < 0.3, rng.random((14, 17))
    known = np.where(absent, 0.0, 1.0)
    wanted = gaussian_filter(z * known, 1.5, mode="reflect") / gaussian_filter(known, 1.5, mode="reflect")
    yield off(of_gamma._local_mean((z * known)[..., None], absent)[..., 0], wanted)
    drawn = LogSpeckle(4.0, 2.0).sample(np.full(4000, 3.0), rng=rng)
    law = stats.loggamma(2.0)
    yield 1e-3 / stats.kstest((drawn - 3) / 4 + law.mean(), law.cdf).pvalue
    grid = np.abs(np.fft.fftfreq(64))
    coloured = of_gamma._gamma(2.0, np.exp(-4 * np.add.outer(grid, grid)), (150, 150, 1), rng)[::7, ::7]
    yield 1e-3 / stats.kstest(coloured.ravel(), stats.gamma(2.0, scale=0.5).cdf).pvalue


# ---- what is replaced


def of_outliers(rng: np.random.Generator) -> Iterator[float]:
    """Yield errors of surroundings of samples, and of what impulses and spikes replace."""
    hit = Impulses(0.9, -1.0, 5.0, random=True).sample(np.full(3000, 9.0), rng=rng)
    values = hit[hit != 9]
    yield unless(values.min() >= -1 and values.max() <= 5)
    yield 1e-3 / stats.kstest(values, stats.uniform(-1, 6).cdf).pvalue
    yield unless((Spikes(0.2, level=3.0).sample(np.zeros(200), rng=rng) >= 0).all())
    for shape, reach in (((9, 8), (2, 2)), ((1, 30), (0, 6)), ((5, 4, 6), (1, 1, 1))):
        plane = rng.standard_normal(shape)
        plane.ravel()[:9] = 1.0  # neighbours that are alike by chance
        excluded = rng.random(shape) < 0.25
        median, spread = outliers.surroundings(plane, excluded)
        everything = np.argwhere(np.ones(shape, bool))
        some = outliers.surroundings(plane, excluded, everything)
        exact = []
        for place in everything:
            box = tuple(slice(max(p - r, 0), p + r + 1) for p, r in zip(place, reach, strict=True))
            known = ~excluded[box] & (
                np.abs(np.moveaxis(np.indices(shape)[(slice(None), *box)], 0, -1) - place).sum(-1) > 0
            )
            near, few = plane[box][known], 0.25 * (np.prod([2 * r + 1 for r in reach]) - 1)
            low, mid, high = np.quantile(near, (0.25, 0.5, 0.75)) if len(near) else (0, 0, 0)
            wide = max(
                (high - low) * TO_SIGMA / 2 * (1 + OfImpulses.unsure / max(len(near), 1)), OfImpulses.least_spread
            )
            exact.append((mid, wide) if len(near) >= few else (np.nan, np.nan))
        wanted = np.array(exact).T
        for told in ((median.ravel(), spread.ravel()), some):
            yield unless((np.isnan(told) == np.isnan(wanted)).all())
            yield off(np.nan_to_num(told), np.nan_to_num(wanted))
    calm = 50 + 1e-3 * rng.standard_normal((30, 30))
    calm[0, 0], calm[9, 9], calm[20, 9] = 150, 52, 80  # the last alone is beyond four hundredths of the range
    yield unless(np.argwhere(outliers._sticking_out(calm, np.zeros((30, 30), bool))).tolist() == [[0, 0], [20, 9]])


def of_sharp(rng: np.random.Generator) -> Iterator[float]:
    """Yield errors of samples that are sharper than optics: what is around them, and how far noise reaches."""
    plane = 300 + 3 * rng.standard_normal((40, 37))
    plane[9, 12], plane[25, 30] = 500, 60
    for picture, soft in ((plane, True), (plane + 60 * (np.arange(37) // 5 % 2), False)):
        found = sharpness.Outliers.of(picture, np.zeros(picture.shape, bool))
        padded = np.pad(picture, 2, mode="reflect")
        cut = np.lib.stride_tricks.sliding_window_view(padded, (5, 5))
        around = np.sort(np.delete(cut.reshape(*picture.shape, 25), 12, axis=-1), axis=-1)
        low, high = around[..., 5], around[..., 17]
        down, along = (picture - (cut[..., 1, 2] + cut[..., 3, 2]) / 2, picture - (cut[..., 2, 1] + cut[..., 2, 3]) / 2)
        down[[0, -1]] = along[:, [0, -1]] = 0
        bend = np.where(np.abs(along) > np.abs(down), along, down)
        sizes = np.abs(bend).ravel()
        least = np.sort(sizes)[: int((1 - OfSharpness.tail[1]) * sizes.size)].mean()
        wide = np.maximum((high - low) * TO_SIGMA / 2, least)
        first, last = np.quantile(sizes / wide.ravel(), 1 - np.array(OfSharpness.tail))
        reach = last + (last - first) * np.emath.logn(4, sizes.size * 0.05 / OfSharpness.chance)
        at = found.rows, found.columns
        yield unless(found.soft == soft and {(9, 12), (25, 30)} <= set(zip(*(one.tolist() for one in at), strict=True)))
        yield off(found.above, np.where(bend > 0, picture - low, picture - high)[at])
        yield off(found.excess, (np.abs(bend) / (reach * wide))[at])
    absent = np.zeros((12, 12), bool)
    absent[4:6, 5] = absent[0, 0] = True
    filled, unit = sharpness._filled(plane[:12, :12], absent)
    wanted = plane[:12, :12].copy()
    for i, j in np.argwhere(absent):
        rows, columns = (np.abs(np.arange(n - 2, n + 3)) - (np.arange(n - 2, n + 3) < 0) for n in (i, j))
        own = np.ix_(rows, columns)
        wanted[i, j] = plane[own][~absent[own]].mean()
    yield off(filled * unit, wanted)


def of_spikes(rng: np.random.Generator) -> Iterator[float]:
    """Yield errors of how likely a line of a spectrum looks like a run of samples, by least squares."""
    size, beside = 60, OfSpikes.beside
    t = np.arange(size)
    values = 0.01 * (t - 30) ** 2 + rng.uniform(-1.4, 1.4, size)
    values[[30, 31]] += [20, 16]
    for length in (1, 4):
        wide = length + 2 * beside
        told = spikes._shapes(length, np.zeros((0, wide)))
        for seen, widths in ((told.lines, OfSpikes.lines), (told.narrow, OfSpikes.narrow)):
            lines = lines_of(wide, length, widths)
            lines /= np.linalg.norm(lines, axis=1, keepdims=True)
            yield off(seen @ seen.T, lines @ lines.T)
    place = np.arange(900)
    noisy = 50 / (1 + ((place - 400) / 8) ** 2) + place / 100 + np.random.default_rng(4).standard_normal(900)
    noisy[[120, 310, 555, 556, 700, 860]] += [90, 70, 150, 200, 110, 260]
    noisy = noisy[:, None]
    hits = Spikes(0.006).hits(noisy)
    yield unless(hits.any() and (Spikes(0.006).hits(1e-200 * noisy) == hits).all())
    for small, also in ((1.0, False), (0.42, False), (1.0, True)):
        own, level = values.copy(), np.where(np.abs(t - 30) < 12, small, 1.0)
        if small < 1:  # structure that no parabola follows
            own = 1.3 * np.sin(1.2 * t) + 90 * (t == 30) + 70 * (t == 31)
        if also:
            own[35] += 18  # another spike nearby, which counts as calm
        run = min(one for one in spikes._runs(own, level, np.array([30, 31] + [35] * also), False) if one.start < 33)
        if also:
            own[35] = np.sort(own[30:41])[5]
        found = []
        for length in range(1, OfSpikes.longest + 1):
            for start in range(30 + 2 - length, 31):
                window = (own - own[start - beside])[start - beside : start + length + beside] / small
                chance, more, height, error = likely(window, length)
                clear = np.flatnonzero(np.abs(height) > OfImpulses.spike * error)
                if len(clear) and len(set(np.sign(height))) == 1:
                    found.append((chance, start + clear[0], clear[-1] - clear[0] + 1, height.max() * small))
                if (start, length) == (30, 2):
                    apart = more
        wanted = min(found)
        yield unless((run.start, run.length) == wanted[1:3])
        yield off([run.chance, run.height], [wanted[0], wanted[3]], 1e-7)
        yield off(run.apart, apart, 1e-7)


def lines_of(size: int, length: int, widths: tuple[float, ...]) -> Floats:
    """Return lines and decays of all widths and places about a run, without the parabolas that are nearest."""
    t, reach = np.arange(size) - (size - 1) / 2, (length + 1) / 2
    centres = np.linspace(-reach, reach, int(20 * reach) + 1)
    x = ((t - centres[:, None])[None] / np.array(widths)[:, None, None]).reshape(-1, size)
    decay = np.where(x >= 0, 0.5 ** np.abs(x), 0)
    # Half as high at half a width from the middle, or at one; a decay the other way has its place mirrored.
    shapes = np.concatenate([0.5 ** (4 * x**2), 1 / (1 + 4 * x**2), decay, decay[:, ::-1]])
    parabola = np.stack([t**0, t, t**2], axis=1)
    return np.asarray(shapes - (parabola @ np.linalg.lstsq(parabola, shapes.T)[0]).T)


def likely(window: Floats, length: int) -> tuple[float, float, Floats, float]:
    """Return the log chance of a line, what narrow lines leave more, free heights and their error."""
    t = np.arange(len(window)) - (len(window) - 1) / 2
    parabola = np.stack([t**0, t, t**2], axis=1)
    free = np.hstack([parabola, np.eye(len(window))[:, OfSpikes.beside : -OfSpikes.beside]])
    fit = np.linalg.lstsq(free, window)[0]
    rest = float(np.square(window - free @ fit).sum())
    left = []
    for widths in (OfSpikes.lines, OfSpikes.narrow):
        away, own = lines_of(len(window), length, widths), window - parabola @ np.linalg.lstsq(parabola, window)[0]
        left.append(float((own @ own - (away @ own) ** 2 / (away**2).sum(axis=1)).min()))
    more, freedom = left[0] - rest, len(window) - 3 - length
    chance, is_noise = stats.chi2(length).logsf(more), rest < stats.chi2(freedom).isf(OfSpikes.noise)
    if not is_noise:
        chance = max(chance, stats.f(length, freedom).logsf(more / length / (rest / freedom)))
    return float(chance), (left[1] - rest) * is_noise, fit[3:], float(np.sqrt(max(rest / freedom, 1.0)))


# ---- what lies on samples


def of_stripes(rng: np.random.Generator) -> Iterator[float]:
    """Yield errors of locations of rows, and of offsets that fit their differences."""
    rows = rng.standard_normal((6, 21)) * np.array([1, 2, 0.01, 1, 1, 3])[:, None]
    rows[0, 3] = rows[1, 4:7] = np.nan
    rows[3] = np.nan
    centre, variance = stripes._location(rows, 0.4)
    for i, row in enumerate(rows):
        known = row[~np.isnan(row)]
        if not len(known):
            yield unless(centre[i] == 0 and np.isinf(variance[i]))
            continue
        middle = np.median(known)
        wide = OfStripes.width * max(TO_SIGMA * np.median(np.abs(known - middle)), OfStripes.least_spread * 0.4)
        for _ in range(OfStripes.reweightings):
            middle = np.average(known, weights=np.exp(-((known - middle) ** 2) / (2 * wide**2)))
        yield off(centre[i], middle)
        yield off(variance[i], (wide / OfStripes.width) ** 2 * OfStripes.dependent / len(known))
    centres, variances = ([rng.uniform(0.2, 0.4, 12 - k) for k in (1, 2)] for _ in range(2))
    weights, o = [1 / one for one in variances], np.zeros(12)
    apart = [np.eye(12)[k:] - np.eye(12)[:-k] for k in (1, 2)]
    for _ in range(OfHum.rounds):
        normal = np.eye(12) / 0.7**2 + sum(d.T @ (w[:, None] * d) for d, w in zip(apart, weights, strict=True)) / 2
        o = np.linalg.solve(normal, sum(d.T @ (w * c) for d, w, c in zip(apart, weights, centres, strict=True)) / 2)
        weights = [1 / (v + (d @ o - c) ** 2 / OfStripes.degrees)
                   for d, v, c in zip(apart, variances, centres, strict=True)]  # fmt: skip
    yield off(stripes.solve(centres, variances, 0.7), o)
    drawn = Stripes(0.6, axis=0).sample(np.zeros((9, 5)), rng=rng)
    yield off(drawn, drawn[:, :1] * np.ones(5))


def huber(error: Floats, used: NDArray[np.bool_]) -> Floats:
    """Return Huber's weights by the median deviation about 0."""
    limit = OfRecordings.huber * TO_SIGMA * np.median(np.abs(error[used]))
    return np.where(used, np.minimum(limit / np.maximum(np.abs(error), 1e-300), 1.0), 0.0)


def of_recordings(rng: np.random.Generator) -> Iterator[float]:
    """Yield errors of weights, filters of prediction, waves, processes and baselines."""
    error = rng.standard_t(2, 40)
    used = rng.random(40) < 0.8
    yield off(recordings.robust_weights(error, used), huber(error, used))
    values = np.zeros(200)
    for k in range(2, 200):
        values[k] = 1.2 * values[k - 1] - 0.6 * values[k - 2] + rng.standard_t(2)
    past, now = np.stack([values[:-2], values[1:-1]], axis=1), values[2:]
    weights = np.ones(198)
    for _ in range(3):
        root = np.sqrt(weights)
        fit = np.linalg.lstsq(past * root[:, None], now * root)[0]
        weights = huber(now - past @ fit, np.ones(198, bool))
    yield off(recordings.prediction_filter(values, np.ones(200, bool), 2)[0], [1, -fit[1], -fit[0]], 1e-7)
    far = recordings.waves([0.125], 2**18)[-8:]  # with all digits, however far
    angle = np.arange(8) * np.pi / 4
    yield off(far, np.stack([np.cos(angle), np.sin(angle)], axis=1), 1e-13)
    for scale, cell in ((20.0, 1), (300.0, 2)):
        size = 90
        length = -(-size // cell) + 1 + int(np.ceil(3 * scale / cell))
        lag = np.add.outer(np.arange(-3, 4) * length, np.arange(length)) * cell  # of a process that is periodic
        power = np.maximum(np.real(np.fft.fft(np.exp(-2 * lag**2 / scale**2).sum(axis=0))), 0)
        white = np.fft.fft(np.random.default_rng(6).normal(size=length))
        wanted = np.real(np.fft.ifft(white * np.sqrt(power / power.mean())))
        drawn = Drift(scale, 1.5).sample(np.full(size, 2.0), rng=6)
        yield off(drawn[::cell], 2 + 1.5 * wanted[: len(drawn[::cell])], 1e-6)
    time = np.arange(203)
    signal = 40 + time / 9 + 5 * np.sin(time / 25) + 0.3 * rng.standard_t(2, 203)
    present = (time < 90) | (time > 104)
    for scale in (40.0, 140.0):
        yield off(Drift(scale).reduce(signal[:, None], ~present).samples[present, 0],
                  (signal - baseline(signal, present, scale))[present], 1e-6)  # fmt: skip


def baseline(signal: Floats, present: NDArray[np.bool_], scale: float) -> Floats:
    """Return b, less its mean, that minimizes Σ w (y − b)² + (scale/2π)⁴ Σ (b'')², by dense matrices on cells."""
    size, side = len(signal), max(1, int(scale / OfDrift.cells))
    number = np.minimum(np.arange(size) // side, size // side - 1)
    cells = (number == np.arange(number[-1] + 1)[:, None]).astype(float)
    centre = cells @ np.arange(size) / cells.sum(axis=1)
    second = np.diff(np.eye(len(cells)), 2, axis=0) / side**2  # b'' in each cell, which stands for `side` samples
    penalty = (scale / (2 * np.pi)) ** 4 * side * second.T @ second
    y = np.where(present, signal, 0.0)
    line = np.polyval(np.polyfit(np.arange(size)[present], signal[present], 1), np.arange(size))
    y, weights, b = np.where(present, y - line, 0.0), present.astype(float), np.zeros(size)
    for sweep in range(OfTransfer.sweeps + 1):
        before = b
        b = np.linalg.solve(np.diag(cells @ weights) + penalty, cells @ (weights * y))
        b = b if side == 1 else CubicSpline(centre, b, bc_type="natural")(np.arange(size))
        if sweep and np.abs(b - before).max() <= OfDrift.settled * np.std((y - before)[present]):
            break
        weights = huber(y - b, present)
    return b + line - (b + line)[present].mean()


PARTS = (of_spectra, of_gaussian, of_counts, of_magnitudes, of_speckle, of_outliers, of_sharp, of_spikes, of_stripes,
         of_recordings)  # fmt: skip
SEED = 6


def run(context: Context) -> Outcome:
    return Outcome(checks_of(context, PARTS, SEED))


CLAIM = Claim(
    name="noise-by-formula",
    title="Models of noise calculate what their formulas say",
    statement=(
        "Spectra by scale, sums and draws of Gaussian noise, Stein's risk and the discrepancy, transforms of counts, "
        "the noncentral χ law and the function that makes its spread 1 by least squares, moments of gamma laws, "
        "quartiles around samples, steps sharper than optics, likelihoods of spikes and of lines, offsets of stripes, "
        "robust prediction and baselines are those of the formulas, written out by dense least squares, loops, sums "
        "over laws of SciPy and quadrature: to 1e-9 relative, or to what the rule on either side may be off."
    ),
    source=(
        "docs/mathematics, docstrings of nlflow.denoising.noise; Stein 1981, doi 10.1214/aos/1176345632; Foi 2011, doi "
        "10.1109/ISBI.2011.5872758; Huber 1964, doi 10.1214/aoms/1177703732; Eilers 2003, doi 10.1021/ac034173t"
    ),
    run=run,
)
