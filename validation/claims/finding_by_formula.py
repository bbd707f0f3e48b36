"""What finders of noise calculate with, against the same formulas written out with NumPy and SciPy on small inputs."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, product
from typing import Any
from unittest import mock

import numpy as np
from numpy.typing import NDArray
from scipy import stats
from scipy.fft import dctn
from scipy.interpolate import RegularGridInterpolator
from scipy.ndimage import uniform_filter
from scipy.special import expit, polygamma, softmax

from nlflow.denoising.noise import (
    GaussianNoise,
    Impulses,
    Poisson,
    Speckle,
    Stripes,
    estimate_noise,
    photon_transfer,
    spectra,
)
from nlflow.denoising.noise.figures import (
    OfCounts,
    OfEnlarged,
    OfHum,
    OfMosaics,
    OfRecordings,
    OfStripes,
    OfTransfer,
)
from nlflow.denoising.noise.finding import (
    counts,
    enlarged,
    evidence,
    finders,
    flat,
    hum,
    learned,
    mosaics,
    periodograms,
    pictures,
    places,
    recordings,
    sigma,
    speckle,
    transfer,
    verdict,
)
from validation.harness import Claim, Context, Outcome, checks_of, largest, off, unless

Floats = NDArray[np.float64]
TO_SIGMA = 1 / float(stats.norm.ppf(0.75))


# ---- counts and lines


def reweighted(means: Floats, variances: Floats, errors: Floats) -> tuple[float, float, Floats]:
    """Return slope, value at 0 and their covariance by NumPy's weighted fits, points above the line weighing less."""
    expected, weight = variances, np.ones(len(means))
    middle = float(means.mean())
    for _ in range(OfTransfer.sweeps):
        spread = errors / variances * np.maximum(expected, variances.max() / 1000)
        fit, scaled = np.polyfit(means - middle, variances, 1, w=np.sqrt(weight) / spread, cov="unscaled")
        expected = np.polyval(fit, means - middle)
        rest = (variances - expected) / spread
        bound = OfTransfer.outlier * max(TO_SIGMA * float(np.median(np.abs(rest))), 1.0)
        inflation = float((np.minimum(1.0, bound / np.maximum(rest, 1e-300)) ** 2 * rest**2).sum()) / (len(means) - 2)
        weight = np.where(rest > bound, (bound / np.maximum(rest, bound)) ** 2, 1.0)
    shift = np.array([[1.0, 0.0], [-middle, 1.0]])
    return float(fit[0]), float(fit[1] - middle * fit[0]), shift @ (scaled * max(inflation, 1.0)) @ shift.T


def of_lines(rng: np.random.Generator) -> Iterator[float]:
    """Yield errors of lines with outliers, of models of counts, and of what a stack tells."""
    means = np.sort(rng.uniform(251, 400, 25))
    means[0] = 250.05  # its variance is less than a thousandth of the largest
    for strong, errors in ((1.0, 0.02), (40.0, 0.02), (40.0, 0.004)):
        line = 2.0 * (means - 250)
        variances = line * (1 + 0.02 * np.clip(rng.standard_normal(25), -1.5, 1.5))
        variances[[7, 19]] *= 1 + 0.01 * strong
        for one, other in zip(transfer.line_through(means, variances, errors * line, 0.0),
                              reweighted(means, variances, errors * line), strict=True):  # fmt: skip
            yield off(one, other)
    for (gain, intercept, error, dark), wanted in (
        ((2.0, -1.0, 1.0, 30.0), 0.0), ((2.0, -164.0, 1.0, 30.0), 82.0), ((2.0, -164.0, 1.0, 125.0), 125.0),
    ):  # fmt: skip
        yield off(transfer._assumed(gain, intercept, error, dark), wanted)
    for read, told in ((4.0, 2.0), (0.0, 0.17)):  # at least a tenth of a count
        model = transfer._model(1.7, read - 34.0, 20.0, 1e-4, 10.0)
        yield off([model.gain, model.sigma, model.offset], [1.7, told, 20.0])
    alike = sigma.Windows(np.arange(90.0), np.full((90, 6), 3.0, np.float32), np.arange(90.0), 2.0)
    order = np.arange(90)
    yield off(transfer._of_bin(alike, order)[1:], [9.0, 9e-3])
    stack = Poisson(2.0, 6.0, 100.0).sample(2 * np.linspace(5, 200, 40)[:, None] * np.ones((12, 40, 40)) + 100, rng=rng)
    for offset in (103.0, None):
        told = photon_transfer(stack, offset=offset)
        slope, level, covariance = reweighted(told.means, told.variances, told.errors)
        at = np.array([told.model.offset, 1.0])
        read, error = level + slope * told.model.offset, np.sqrt(at @ covariance @ at)
        yield off([told.gain, told.gain_error], [slope, np.sqrt(covariance[0, 0])])
        yield off([told.intercept, told.intercept_error], [level, np.sqrt(covariance[1, 1])])
        yield off([told.sigma, told.sigma_error], [np.sqrt(read), error / (2 * np.sqrt(read))])
    blocks = np.sort(uniform_filter(stack, 4, origin=-2)[:-3, :-3, :-3], axis=None)
    yield off(told.model.offset, max(-level / slope, blocks[: int(OfTransfer.darkest * blocks.size)].mean()))


def of_counts(rng: np.random.Generator) -> Iterator[float]:
    """Yield errors of counts that are told by levels on an exact line, and of the least error of a level."""
    mean, none = np.linspace(30, 200, 9), np.zeros(9, bool)
    for read in (4.0, 0.0):
        variance = 1.7 * (mean - 20) + read
        third = 1.5 * 1.7 * (variance - read)
        model = counts._Levels(mean, variance, 0.02 * variance, third, 0.05 * third, ~none, none).amplified()
        yield off([model.gain, model.sigma, model.offset], [1.7, np.sqrt(max(read, 0.17**2)), 20.0 + (read == 0) * 0.0])
    cell = np.array([[3.0, -3.0], [-3.0, 3.0]])
    level = counts._Levels.of(
        (np.add.outer(np.arange(80.0), np.arange(80) / 2) // 4 * 8 + np.tile(cell, (40, 40)))[..., None], None
    )
    yield off(level.error, level.variance / np.sqrt(4 * OfCounts.in_level))


# ---- windows of a picture


def of_windows(rng: np.random.Generator) -> Iterator[float]:
    """Yield errors of what windows of a picture show."""
    image = np.rint(300 + np.add.outer(np.arange(40.0), np.arange(48) / 3) + 4 * rng.standard_normal((40, 48)))
    seen = evidence.look(image[..., None])
    span = float(np.ptp(image))
    corners = evidence.places(image.shape)
    cut = np.array([image[r : r + 32, c : c + 32] for r, c in corners])
    yield off(seen.intensities.mean(), cut.mean(), 1e-6)  # in single precision
    powers = np.square(dctn(cut.reshape(-1, 4, 8, 4, 8), axes=(2, 4), norm="ortho"))
    place = np.hypot(np.arange(8)[:, None], np.arange(8)) / 8
    least = np.moveaxis(powers, 3, 2)[..., place > 0.5].mean(axis=-1).min(axis=(1, 2))
    variance = float(cut.var())
    logs = [np.log(seen.reference / span), np.log(seen.reference / np.sqrt(variance)), np.log(1 / seen.reference)]
    start = 24 + 18 + 2
    yield off(seen.features[start : start + 3], logs, 1e-6)
    yield off(seen.features[-3:], np.log(np.quantile(least, (0.1, 0.5, 0.9)) / seen.reference**2) / 2, 1e-5)
    yield off(evidence._step(3.0 * np.arange(300).reshape(15, 20), 40.0), 3 / 40)
    lines, edges = rng.random((27, 34)), []
    for own in (lines, lines.T):
        phases: list[list[float]] = [[] for _ in range(8)]
        for one in own:
            steps = np.abs(np.diff(one)) / 7
            for k in range(1, len(steps) - 1):
                phases[(k - 1) % 8].append(abs(2 * steps[k] - steps[k - 1] - steps[k + 1]))
        each = np.array([np.mean(one) for one in phases]) + 1e-6
        edges.append(np.log(each.max() / np.median(each)))
    yield off(evidence._edges(lines[..., None], 7.0), edges)
    blocks = rng.standard_normal((200, 8, 8)) * rng.uniform(0.5, 2, 200)[:, None, None] + rng.gamma(
        2.0, size=(200, 8, 8)
    )
    y, x = np.mgrid[:8, :8].reshape(2, -1)
    plane = np.stack([np.ones(64), y, x], axis=1)
    flat_ = blocks.reshape(200, 64)
    rest = flat_ - (plane @ np.linalg.lstsq(plane, flat_.T)[0]).T
    spread = rest.var(axis=1)
    order = np.sort(spread)
    own = rest[(spread > order[4]) & (spread <= order[40])]
    own = own / np.sqrt(np.square(own).mean())
    yield off(evidence._moments(blocks), [(own**3).mean(), np.log((own**4).mean() / 3 + 1e-6)])
    mixed = np.einsum("cd,dmij->cmij", [[1, 0.4, 0], [0, 1, 0.3], [0.2, 0, 2.0]], rng.standard_normal((3, 150, 8, 8)))
    energy = np.square(mixed[..., place > 0.3]).sum(axis=(0, 2))
    quiet = mixed[:, energy <= np.quantile(energy, 0.15)]
    alike = []
    for low, high in ((0.6, 1.5), (0.25, 0.6)):
        p = quiet[..., (place >= low) & (place < high)].reshape(3, -1)
        root = np.sqrt(np.square(p).mean(axis=1))
        alike += [(p[i] * p[j]).mean() / (root[i] * root[j]) for i, j in ((0, 1), (1, 2), (0, 2))]
    yield off(evidence._alike(mixed), alike, 1e-8)  # spreads are 1e-9 more


def of_pictures(rng: np.random.Generator) -> Iterator[float]:
    """Yield errors of spectra and strengths that are put together, and of what a network says."""
    middles = np.array([np.sqrt(low * min(high, 1.2)) for _, low, high in evidence.BANDS])
    levels, shares = rng.uniform(1, 9, 8), rng.uniform(0.3, 1, 8)

    def smooth(values: Floats, far: Floats) -> Floats:
        return np.interp(np.log(np.maximum(far, 1e-3)), np.log(middles[::-1]), np.log(values)[::-1])

    tables = []
    for size in evidence.SIZES:
        place = np.arange(size) / size
        tables.append(np.exp(smooth(levels, np.hypot(place[:, None], place)))[None])
    nothing = np.zeros(0)
    seen = evidence.Evidence(nothing, levels[None], tables, np.array([3.0, 5.0, 5.0]), np.array([1.0, 4.0, 4.0]))
    share = 2 * np.abs(np.fft.fftfreq(64))
    far = np.hypot(share[:, None], share)
    grid = np.stack(np.meshgrid(share, share, indexing="ij"), axis=-1)
    wanted = np.full(far.shape, np.nan)
    for size, reach in ((32, 0.2), (16, 0.42), (8, 2.0)):
        place = np.arange(size) / size
        inner = RegularGridInterpolator((place, place), smooth(levels, np.hypot(place[:, None], place)))
        where = np.isnan(wanted) & (np.maximum(share[:, None], share) <= reach)
        wanted[where] = inner(np.minimum(grid, place[-1])[where])
    yield off(pictures.composed(seen, shares[None], 0), np.exp(wanted + 2 * smooth(shares, far)))
    yield off(pictures._variances(seen, shares[None]), [(levels * shares**2 * pictures.areas()).sum()])
    belief = learned.Belief({"clean": 0.2, "white": 0.5, "correlated": 0.3}, shares[None], 0.4, np.ones(3), "high")
    yield off(pictures._light(seen, belief)[1], np.sqrt([1, 4**0.4] / np.mean([1, 4**0.4])))
    image = (40 * rng.standard_normal((48, 48)))[..., None]
    for clean, sure in ((0.7, "medium"), (0.6, "low")):  # what all quiet parts have beyond the spectrum is doubted
        belief = learned.Belief(
            {"clean": clean, "white": 1 - clean, "correlated": 0.0}, shares[None], 0.4, np.ones(3), "high"
        )
        with mock.patch.object(pictures, "believe", return_value=belief):
            yield unless(pictures.noise_of_picture(image, None, lambda: 1.0).confidence == sure)
    held: dict[str, Any] = {"mean": rng.standard_normal(5), "spread": rng.uniform(0.5, 2, 5), "members": 2}
    out = np.zeros(15)
    features = np.array([0.3, -40.0, 1.0, 50.0, -0.2])
    for k in range(2):
        held[f"{k}.0.weight"], held[f"{k}.0.bias"] = 0.3 * rng.standard_normal((15, 5)), 0.1 * rng.standard_normal(15)
        inside = np.minimum(np.maximum((features - held["mean"]) / held["spread"], -5), 5)
        out += (held[f"{k}.0.weight"] @ inside + held[f"{k}.0.bias"]) / 2
    told = learned.believe(features, 1, held)
    yield off(told.shares, np.exp(np.minimum(out[None, :8], 1)))
    yield off(list(told.probabilities.values()), softmax(out[8:11]))
    yield off([told.light, *told.limits], [expit(out[11]), *np.exp(np.sort(out[12:]))])


# ---- impulses, stripes, magnitudes


def of_finders(rng: np.random.Generator) -> Iterator[float]:
    """Yield errors of units, stripes, backgrounds, and of impulses beside other samples that stick out."""
    plane = np.rint(rng.uniform(10, 60, (9, 11)))
    low, span = float(plane.min()), float(np.ptp(plane))
    view = finders._View.of(plane, np.zeros(plane.shape, bool), [], low, span)
    yield largest(off(view.plane, (plane - low) / span), off(view.step, 1 / span))
    yield off(finders._unit(27.0, low, span), (27 - low) / span)
    soft = 100 + 40 * np.sin(np.arange(100) / 40)[:, None] * np.cos(np.arange(120) / 50)
    salted = Impulses(0.05, 20, 235).sample(np.rint(soft), rng=rng)
    wide = np.flatnonzero((salted != 20) & (salted != 235))[50::500]
    salted.ravel()[wide] = 40  # stick out nearly as much
    series = Impulses(0.05, 20, 235).sample(np.rint(100 + 40 * np.sin(np.arange(4000) / 90)), rng=rng)
    for noisy in (salted, series):
        found = finders.find_impulses(noisy[..., None])
        yield unless(found is not None and abs(found.density / np.isin(noisy, (20, 235)).mean() - 1) < 0.1)
    rows = rng.standard_normal((90, 1)) * 0.05 + rng.standard_normal((90, 60)) * 0.02
    marks = finders._Marks.of(rows.astype(np.float32))
    cuts = [rows.astype(np.float32)], np.array_split(rows.astype(np.float32), OfStripes.parts, axis=1)
    steps, parts = ([finders.differences(one, 1e-3, 1)[0][0] for one in cut] for cut in cuts)
    apart = TO_SIGMA * np.median(np.abs(np.array(parts) - np.median(parts, axis=0)), axis=0)
    spread = TO_SIGMA * np.median(np.abs(steps[0]))
    yield off(marks.sigma, np.sqrt((spread**2 - np.pi / 2 * np.median(apart) ** 2 / OfStripes.parts) / 2), 1e-6)
    striped = Stripes(6.0, 0).sample(soft + rng.normal(0, 3, soft.shape), rng=rng)
    below = finders.find_stripes((striped - striped.max() - 1)[..., None])
    yield np.inf if below is None else off(below.sigma, finders.find_stripes(striped[..., None]).sigma, 1e-3)
    for coils in (1.0, 3.5):
        law = stats.chi(2 * coils)
        yield off(finders._of_nothing(coils), [law.mean(), law.std()])
    # A background of Rayleigh's mean and spread with a Gaussian law is none of magnitudes.
    mean, spread = stats.rayleigh.stats(moments="m"), stats.rayleigh.std()
    bright = np.hypot(*(np.mgrid[:128, :160] - [[[60]], [[80]]])) < 45
    for draw, told in ((np.abs(rng.normal(mean, spread, bright.shape)), False),
                       (rng.rayleigh(size=bright.shape), True)):  # fmt: skip
        found = finders.find_rician((6 * np.where(bright, 20 + rng.standard_normal(bright.shape), draw))[..., None])
        yield unless((found is not None) == told)


# ---- parts and cells


def of_parts(rng: np.random.Generator) -> Iterator[float]:
    """Yield errors of noise in flat parts, cells, places and mosaics."""
    y, x = np.meshgrid(np.linspace(-1, 1, 40), np.linspace(-1, 1, 50), indexing="ij")
    surface = np.stack([np.ones(2000), *(one.ravel() for one in (y, x, y * y, y * x, x * x))], axis=1)
    shade = (surface @ rng.uniform(-9, 9, (6, 3))).reshape(40, 50, 3) + 100
    yield off(shade + flat._without_shading(shade), shade)
    for channels, level in ((1, [4.0]), (3, [2.0, 3.0, 4.0])):
        noisy = shade[..., :channels] / 9 + rng.standard_normal((40, 50, channels)) * level
        rest = noisy.reshape(2000, channels)
        rest = rest - surface @ np.linalg.lstsq(surface, rest)[0]
        told = estimate_noise(noisy, flat=np.s_[:, :], channel_axis=-1).model
        yield off(np.atleast_1d(told.sigma), np.sqrt(np.square(rest).mean(axis=0)))
    white = 5 + rng.standard_normal((60, 60))
    yield unless(not flat._is_uneven(white) and flat._is_uneven(5 + (white - 5) * np.where(np.arange(60) < 30, 0.3, 2)))
    cells = np.kron(rng.uniform(0, 99, (20, 20)), np.ones((4, 4))) + rng.standard_normal((80, 80))
    own = cells.reshape(20, 4, 20, 4).swapaxes(1, 2).reshape(400, 4, 4)
    variances = np.quantile(own.reshape(400, 16).var(axis=1, ddof=1), OfEnlarged.quantiles)
    steps = ((own[:, 1:] - own[:, :-1]) ** 2).mean() / 4 + ((own[:, :, 1:] - own[:, :, :-1]) ** 2).mean() / 4
    wanted = np.median([*(variances / (stats.chi2(15).ppf(OfEnlarged.quantiles) / 15)), steps])
    yield off(enlarged._within(cells, 4), np.sqrt(wanted))
    parts = places._parts(90 + 7 * rng.standard_normal((144, 162, 1)), 50.0, None, 9)
    middles = (2 * np.arange(9) + 1) / 9 - 1
    yield off([parts.rows, parts.columns], np.stack(np.meshgrid(middles, middles, indexing="ij")).reshape(2, -1))
    yield off(parts.logs.mean(), np.log(7 / 50), 1e-2)
    some = parts._replace(errors=rng.uniform(0.01, 0.2, 81))
    basis = np.stack([np.ones(81), some.rows, some.rows * some.columns], axis=1)
    coefficients, missed = places._fit(some, basis)
    inverse = np.diag(some.errors**-2.0)
    normal = np.linalg.solve(basis.T @ inverse @ basis, basis.T @ inverse @ some.logs)
    left = some.logs - basis @ normal
    yield largest(off(coefficients, normal), off(missed, left @ inverse @ left / 78))
    place = 1 + np.add.outer(np.linspace(0, 1, 120), np.linspace(0, 0.5, 126))
    model = places.find_places(90 + (place * rng.standard_normal((3, 120, 126))).transpose(1, 2, 0) * [2.0, 5.0, 9.0])
    yield off(np.square(model.places).mean(), 1.0)
    yield off(model.sigma / [2.0, 5.0, 9.0], np.sqrt(np.square(place).mean()) * np.ones(3), 1e-1)
    yield from of_mosaics(rng)


def of_mosaics(rng: np.random.Generator) -> Iterator[float]:
    """Yield errors of noise of mosaics: the best line below variances passes through two of them, or is level at 0."""
    plane = (300 + 200 * np.sin(np.arange(160) / 60)[:, None] * np.cos(np.arange(160) / 55)) * np.tile(
        [[0.5, 1], [1, 0.3]], (80, 80)
    )
    for noise in (GaussianNoise(9.0), Poisson(1.5, 14.0)):
        noisy = noise.sample(plane, rng=rng)
        means, variances = mosaics._points(noisy, 2)
        low, span = means[0], float(np.ptp(means))
        best, cost = (0.0, 0.0), np.inf
        for i, j in combinations(range(len(means)), 2):
            slope = (variances[j] - variances[i]) / (means[j] - means[i])
            ends = variances[i] + slope * (low - means[i]), variances[i] + slope * (low + span - means[i])
            rest = (variances - ends[0] - slope * (means - low)) / variances
            paid = float(np.where(rest > 0, OfMosaics.below * rest, (OfMosaics.below - 1) * rest).sum())
            if min(ends) >= 0 and paid < cost:
                best, cost = ends, paid
        found = mosaics._noise_of(noisy, 2)
        if isinstance(found, Poisson):
            gain = (best[1] - best[0]) / span
            yield off([found.gain, found.sigma], [gain, np.sqrt(best[0] - gain * (low - found.offset))])
        else:
            yield off(found.sigma, np.sqrt(sum(best) / 2))
        yield unless(isinstance(found, Poisson) == isinstance(noise, Poisson))


# ---- recordings


def of_hum(rng: np.random.Generator) -> Iterator[float]:
    """Yield errors of whitened recordings, of frequencies by phases, and of series of lines."""
    values = np.cumsum(rng.standard_normal(300))
    values[40] += 30
    left = values
    for _ in range(2):
        before, now = left[:-1], left[1:]
        left = now - np.polynomial.polynomial.polyfit(before, now, [1])[1] * before
    limit = OfHum.clipped * TO_SIGMA * np.median(np.abs(left))
    yield off(hum._whitened(values), np.maximum(np.minimum(left, limit), -limit))
    t = np.arange(1600)
    yield off(hum._from_phases(np.cos(2 * np.pi * 0.1217 * t + 0.4), 0.1217 + 0.2 / 1600), 0.1217, 1e-6)
    for base, orders, rate in ((0.0217, [2, 3, 5], None), (50.1 / 270, [1, 2, 3, 7], 270.0)):
        orders = np.array(orders)
        true = orders * base + 1e-6 * rng.standard_normal(len(orders))
        lines = np.abs(true - np.rint(true * (rate is not None)))
        told, multiples = hum._series(lines.tolist(), 4000, rate)
        told_orders = np.sort(multiples)
        yield off(told_orders, orders)
        yield off(told, np.linalg.lstsq(orders[:, None], true)[0][0])
        present = np.ones(1600, bool)
        wave = sum(a * np.cos(2 * np.pi * m * base * t + a) for a, m in zip((1.0, 0.5, 0.3, 0.7), orders, strict=False))
        found = hum._refined(wave, base + 1e-6, orders.astype(float), present)
        yield off(found, np.sort(np.abs(orders * base - np.rint(orders * base))), 1e-6)


def of_spectra(rng: np.random.Generator) -> Iterator[float]:
    """Yield errors of squared coefficients of windows, of levels of white noise, and of spectra that are continued."""
    for size, side in ((300, 32), (4200, 64)):
        values = rng.standard_normal(size)
        none = np.zeros(size, bool)
        squares, each = periodograms._squares(values, ~none, none)
        step = side // OfRecordings.overlap
        taper = np.sin(np.pi * (np.arange(side) + 0.5) / side) ** 2
        taper *= np.sqrt(side / (taper**2).sum())
        turn = np.exp(-2j * np.pi * np.outer(np.arange(side), np.arange(side // 2 + 1)) / side)
        cut = np.array([values[k : k + side] for k in range(0, size - side + 1, step)])
        yield off(squares, np.abs((cut * taper) @ turn) ** 2 / side)
        yield off(each, side / step / 2)
    index = np.arange(2, 17.0)
    for power, told in ((-1.5, -1.5), (-5.0, -OfRecordings.steepest), (0.7, 0.0)):
        smooth = np.concatenate([[9.0, 9.0], 2 + power * np.log(index)])
        step = 3000 / 32
        below = np.mean((np.arange(1, int(step / 2) + 1) / step) ** told)
        first = smooth[2] - told * np.log(2)
        yield off(periodograms._continued(smooth, 3000), [first + np.log(below), first, *smooth[2:]])
    flat_, fast = rng.uniform(1, 2, 32), rng.uniform(0.2, 1, 32)
    yield off(periodograms.Spectrum(flat_, 1.0, False, 1.0, fast).rise, 1 - fast.sum() / flat_.sum())
    white = 0.2 * rng.standard_normal(3000)
    tone = white + 0.5 * np.cos(2 * np.pi * 0.31 * np.arange(3000))
    for recording in (white, tone, np.convolve(rng.standard_normal(3003), [1, -0.8, 0.3, 0.1], "valid")):
        yield spectrum_of(recording)


def spectrum_of(values: Floats) -> float:
    """Return errors of the white noise that a spectrum leaves room for, and of the share that is as noise is."""
    found = periodograms.look_at_spectrum(values)
    size = np.abs(values).max()
    none = np.zeros(len(values), bool)
    power, error, alike = periodograms._measured(*periodograms._squares((values - values.mean()) / size, ~none, none))
    kept = periodograms._kept(np.log(power), error)
    smooth, blur = periodograms._smoothed(np.log(power), error, kept)
    middle = np.arange(max(3, int(OfRecordings.hump * len(power) / 2)), len(power))
    level = (smooth[middle] / blur[middle] ** 2).sum() / (1 / blur[middle] ** 2).sum()
    beyond = np.abs(smooth[middle] - level) > np.maximum(OfRecordings.white * blur[middle], OfRecordings.flat)
    least = float((smooth + blur)[2:].min()) if beyond.any() else level
    shape = np.exp(periodograms._continued(smooth, len(values)))[2:]
    return largest(
        off(found.white, np.exp(least / 2) * size),
        off(found.sure, shape[(kept & alike)[2:]].sum() / shape.sum()),
        unless(found.is_white == (not beyond.any())),
    )


def of_recordings(rng: np.random.Generator) -> Iterator[float]:
    """Yield errors of steps, of spectra of channels, and of strengths that quantiles tell."""
    numbers = rng.integers(1, 400, 200)
    for values, step, exact in ((np.float32(0.3) * numbers.astype(np.float32), 0.3, 1e-7), (0.1 * numbers, 0.1, 1e-15)):
        yield off(recordings._step_of(values), step, exact)
    coloured = np.convolve(rng.standard_normal(3001), [1, -0.8], "valid")
    slow = np.cumsum(rng.standard_normal(3000))
    for other in (coloured, slow):
        pair = 7 * np.stack([other, 3 * rng.standard_normal(3000)], axis=1)
        told = recordings._of_rest(pair, None).model
        if np.ndim(told.sigma):
            yield off(told.sigma[1], sigma.estimate_sigmas(pair)[1], 1e-1)
        else:
            yield np.inf
    bursts = np.where(rng.random(1500) < 0.2, 30 * rng.standard_normal(1500), 0) + 0.1 * rng.standard_normal(1500)
    for scale in (0.01, 30.0):
        padded = np.pad(scale * bursts, 2, mode="reflect", reflect_type="odd")
        rough = np.abs(np.convolve(padded, [1, -4, 6, -4, 1], "valid")) / np.sqrt(70)
        told = recordings._of_rest(scale * bursts[:, None], None).model
        yield off(told.sigma, np.quantile(rough, 0.25) / stats.norm.ppf(0.625))
        white = scale * rng.standard_normal((1500, 1))
        yield unless(recordings._of_rest(white, None).confidence == "high")


# ---- strengths


def of_sigma(rng: np.random.Generator) -> Iterator[float]:
    """Yield errors of units, areas and windows by which strengths are measured."""
    volume = rng.uniform(40, 90, (5, 6, 7))
    absent = rng.random(volume.shape) < 0.2
    unit, span = sigma.in_unit(volume, absent)
    yield off(span, np.ptp(volume[~absent]))
    low = volume[~absent].min()
    yield off(unit, np.where(absent, 0, (volume - low) / np.ptp(volume[~absent])))
    yield off(sigma.blocks_of(unit, absent & False).repeats, 0.65 * 64)
    plane = rng.integers(0, 2, (21, 23)).astype(float)
    plane[4:13, 5:15] = 0.5
    plane[8, 20:] = 0.5
    filled = np.zeros(plane.shape, bool)
    for i, j in product(range(21), range(23)):
        part = plane[max(i - 2, 0) : i + 3, max(j - 2, 0) : j + 3]
        filled[i, j] = (part == part[0, 0]).all()
    yield unless((sigma.constant_areas(plane, 2) == filled).all())
    line = plane[8:9, :]
    near = [(line[0, max(j - 4, 0) : j + 5] == line[0, j]).all() for j in range(23)]
    yield unless((sigma.constant_areas(line, 1) == [near]).all())
    for shape in ((6, 6, 6), (12, 14, 13)):  # of few blocks, and of more
        noise = rng.standard_normal((*shape, 1))
        yield off(sigma.estimate_sigmas(7 * noise + 3), 7 * sigma.estimate_sigmas(noise), 1e-6)
    image, missing = rng.standard_normal((40, 40, 1)), np.zeros((40, 40), bool)
    missing[::8, 5::9] = missing[::8, 6::9] = True
    filled = image.copy()
    filled[:, 5::9], filled[:, 6::9] = image[:, 3::9][:, :4], image[:, 2::9][:, :4]
    yield off(verdict._mirrored(image, missing)[0], np.where(missing[..., None], filled, image))
    volume = rng.standard_normal((12, 30, 30, 1))
    yield unless(verdict.of_volume(20 * volume, None).confidence == "high")
    yield unless(verdict.of_volume(volume / 50, None).confidence == "high")
    soft = 20 * (volume[:, 1:] + volume[:, :-1])
    ratio = float((sigma.sigmas_at_half(soft) / sigma.estimate_sigmas(soft))[0])
    yield off(verdict.of_volume(soft, None).model.sigma, sigma.estimate_sigmas(soft) * min(max(ratio, 1.0), 3.0))


def of_speckle(rng: np.random.Generator) -> Iterator[float]:
    """Yield errors of speckle that flat windows tell: skewness, looks and scales."""
    for rows in (16, 1):
        rest = rng.standard_normal((9, rows, 16 if rows > 1 else 64))
        seen = speckle._Flat(3.1 * rest, np.zeros(9))
        yield off(seen.relative, rest / np.sqrt(np.square(rest).mean()))
        power = np.square(
            dctn((3.1 * rest).reshape(9, -1, min(rows, 2), rest.shape[2] // 2, 2), axes=(2, 4), norm="ortho")
        )
        if rows > 1:
            middle = (power[:, :, 0, :, 1].mean() + power[:, :, 1, :, 0].mean()) / 2
            yield off([seen.fine**2, seen.middle**2], [power[:, :, 1, :, 1].mean(), middle])
        else:
            yield off(seen.fine**2, power[..., 1].mean())
    for level in (0.3, 0.9):
        yield off(polygamma(1, speckle._looks_of(level)), level**2)
    windows = np.log(rng.gamma(3.0, size=(150, 16, 16)))
    flat_ = speckle._Flat.of(windows)
    compressed = speckle._compressed(windows, 2.5)
    law = stats.loggamma(compressed.looks)
    skewness = float((flat_.rest**3).mean() / np.square(flat_.rest).mean() ** 1.5)
    yield off([law.stats("s"), compressed.scale], [skewness, 2.5 * flat_.sigma / law.std()])
    light = rng.gamma(1.0, size=(150, 16, 16))
    found = speckle._linear(np.sqrt(light))
    fine = speckle._Flat.of(np.log(light)).fine  # of intensities, twice that of amplitudes
    yield unless(found.amplitude)
    yield off(polygamma(1, found.looks), fine**2)
    grid = np.fft.fftfreq(64)
    power = 0.05 + np.exp(-40 * np.add.outer(grid**2, grid**2))
    noisy = Speckle(2.0, spectrum=power).sample(np.full((128, 150), 9.0), rng=rng)
    found = speckle.find_speckle(noisy[..., None])
    related = spectra.correlation(power[None])[0][31:34, 31:34]
    yield off(spectra.correlation(found.spectrum)[0][31:34, 31:34], related, 0.1)
    yield off(found.looks, 2.0, 0.15)


PARTS = (of_lines, of_counts, of_windows, of_pictures, of_finders, of_parts, of_hum, of_spectra, of_recordings,
         of_sigma, of_speckle)  # fmt: skip
SEED = 5


def run(context: Context) -> Outcome:
    return Outcome(checks_of(context, PARTS, SEED))


CLAIM = Claim(
    name="finding-by-formula",
    title="Finders of noise calculate what their formulas say",
    statement=(
        "Lines through variances with outliers, counts of levels on an exact line, what windows, cells and flat parts "
        "show, spectra put together of bands, quantile regression of mosaics, whitened recordings, series of "
        "mains and their harmonics, periodograms, continued spectra, strengths by quantiles, speckle of flat windows "
        "are those of NumPy's and SciPy's fits, transforms and laws, of loops and of all pairs of points: to 1e-9 "
        "relative, to single precision where windows are held in it, or to the error of chance where noise is drawn."
    ),
    source=(
        "docstrings of nlflow.denoising.noise; Koenker and Bassett 1978, doi 10.2307/1913643; Colom, Buades and Morel "
        "2014, doi 10.1109/ICIP.2014.7025865; Satterthwaite 1946, doi 10.2307/3002019; Welch 1967, doi "
        "10.1109/TAU.1967.1161901"
    ),
    run=run,
)
