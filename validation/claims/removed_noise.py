"""What was removed is held against the noise: figures of residuals, peaks that are given back, counts in cells."""

from __future__ import annotations

import re

import numpy as np
from numpy.typing import NDArray
from scipy import stats
from scipy.ndimage import convolve1d, uniform_filter
from skimage.metrics import peak_signal_noise_ratio

from nlflow import Gaussian, Grid, affinity, denoise
from nlflow.denoising import cells, pixelwise, residual
from nlflow.denoising.noise import GaussianNoise, Poisson, discrepancy, perturbation, spectra, sure
from nlflow.denoising.noise.figures import OfSpectra
from nlflow.denoising.patches.means import _between
from nlflow.denoising.quality import psnr, snr
from validation.harness import CannotRunError, Check, Claim, Context, Outcome, largest

Floats = NDArray[np.float64]


def truncated() -> float:
    """Return errors of mean squares of normal variables that are cut off at two ends, about their mean before that."""
    worst = 0.0
    for a, b, level in ((0.3, 2.0, 1.0), (1.2, 0.1, 0.5), (4.0, 0.6, 2.0), (9.0, 9.0, 1.0)):
        told = residual._cut_off(np.array([a]), np.array([b]), np.array([level]))[0]
        exact = stats.truncnorm(-a / level, b / level).moment(2)
        worst = largest(worst, abs(float(told) / exact - 1))
    return worst


def products(rng: np.random.Generator) -> float:
    """Return errors of moments of a residual in windows, and of neighbours in them, against plain loops."""
    side, rest, light = 4, rng.standard_normal((9, 13)), rng.random((9, 13))
    away = rng.random((9, 13)) < 0.1
    level = rng.uniform(0.5, 2.0, (9, 13))
    rest = np.where(away, 0.0, rest)
    found = residual._windows_of(rest, light, away, side, level)
    told, worst = rest / level, 0.0
    diagonal = (rest[1:, 1:] - rest[1:, :-1] - rest[:-1, 1:] + rest[:-1, :-1]) / 2
    for number, (i, j) in enumerate((i, j) for i in (0, 4) for j in (0, 4, 8)):
        rows, columns = range(i, i + side), range(j, j + side)
        window = np.s_[i : i + side, j : j + side]
        count = float((~away[window]).sum())
        down, across, mixed = (
            sum(told[r, c] * told[r + 1, c] for r in rows for c in columns if r < 8),
            sum(told[r, c] * told[r, c + 1] for r in rows for c in columns),
            sum(diagonal[r, c] ** 2 for r in rows for c in columns if r < 8 and c < 12),
        )
        exact = (light[window].std(), light[window].mean(), away[window].mean(), (told[window] ** 2).sum() / count,
                 (told[window] ** 3).sum() / count, mixed / count, down / count, across / count)  # fmt: skip
        pairs = zip(found, exact, strict=True)
        worst = largest(worst, *(abs(float(one[number]) - float(wanted)) for one, wanted in pairs))
    return worst


def figures(rng: np.random.Generator) -> float:
    """Return errors of figures of windows and of what is missing, less what chance can make of them."""
    square, cube = rng.random(50) + 0.5, rng.standard_normal(50)
    neighbours = [rng.standard_normal(50) / 9, rng.standard_normal(50) / 9]
    where, own = np.arange(5, 40), np.array([0.03, 0.02, 1.6])  # of the noise along each axis; samples for one alone
    related = max(float(one[where].sum() / square[where].sum()) - c for one, c in zip(neighbours, own, strict=False))
    related -= residual._ERRORS * np.sqrt(1.6 / (256 * 35))
    skewness = float(cube[where].mean() / square[where].mean() ** 1.5)
    missing = np.repeat(rng.random((40, 30)) < 0.3, 2, axis=1)
    one, other = missing[:, :-1].ravel(), missing[:, 1:].ravel()
    share = (one.mean() + other.mean()) / 2
    clumps = ((one & other).mean() - share**2) / (share * (1 - share)) - residual._ERRORS / np.sqrt(one.size)
    rests = [square - 1, cube]
    fourth = float(np.mean(np.concatenate(rests) ** 4) / np.mean(np.concatenate(rests) ** 2) ** 2)
    return largest(
        abs(residual._two(rests) - 3 + fourth),
        abs(residual._related(square, neighbours, where, own, 256) - related),
        abs(residual._skewness(square, cube, where) - skewness),
        abs(residual._clumps([missing]) - clumps),
    )


def peaks() -> float:
    """Return how much of isolated stars and dips is missing of what is given back, relative."""
    i, j = np.mgrid[:64, :64]
    stars = sum(sign * 40 * np.exp(-((i - a) ** 2 + (j - b) ** 2) / (2 * 1.5**2))
                for a, b, sign in ((20, 18, 1), (40, 44, 1), (17, 46, -1)))  # fmt: skip
    left = residual.with_peaks((stars + 3.0)[..., None], (0.7 * stars + 3.0)[..., None])[..., 0] - 3.0
    return float(np.abs(left - stars).max() / 40)


def in_cells(rng: np.random.Generator) -> tuple[float, float, float]:
    """Return errors of sums over cells and of lines between them; bias and error of estimates of few counts."""
    counts = rng.poisson(0.4, (10, 14, 1)).astype(np.float64)
    padded = np.pad(counts, ((0, 2), (0, 2), (0, 0)), mode="symmetric")
    sums = np.array([[padded[i : i + 4, j : j + 4].sum() for j in range(0, 16, 4)] for i in range(0, 12, 4)])
    found = cells._summed(counts, 2)
    ramp = 2.0 + 0.5 * np.arange(3)[:, None] + 0.25 * np.arange(4)
    spread = cells._spread(16 * ramp[..., None], 2, (12, 16, 1))[..., 0]
    middle = (np.arange(2, 10) + 0.5) / 4 - 0.5, (np.arange(2, 14) + 0.5) / 4 - 0.5
    lines = 2.0 + 0.5 * middle[0][:, None] + 0.25 * middle[1]
    off = largest(float(np.abs(found[..., 0] - sums).max()), float(np.abs(spread[2:10, 2:14] - lines).max()))
    truth = 0.5 + 0.4 * np.sin(np.arange(96) / 15)[:, None] * np.ones(96)
    bias, error = 0.0, 0.0
    for gain, read in ((1.0, 0.0), (3.0, 1.5)):
        noise = Poisson(gain, read, 2.0)
        estimate = denoise(noise.sample(gain * truth + 2.0, rng=rng), noise=noise)
        counted = (np.asarray(estimate) - 2.0) / gain
        bias = largest(bias, abs(float(counted.mean() / truth.mean()) - 1))
        error = largest(error, float(np.sqrt(((counted - truth) ** 2).mean())))
    return off, bias, error


def by_pixels(rng: np.random.Generator) -> float:
    """Return errors of fidelities max(variance of neighbours − 1.4, 0) against sums, and of widths of patch kernels.

    The noise that smoothing leaves is the norm of a Gaussian to the power of axes; widths go with the number of samples
    of a patch to the power −1/4.
    """
    f = 2 * rng.standard_normal((9, 11, 2))
    operator = affinity(Gaussian(1.2), Grid((9, 11)), method="dense")
    rows = operator.average(np.eye(99).reshape(9, 11, 99)).reshape(99, 99)
    flat = f.reshape(99, 2)
    spread = [(row @ (flat - row @ flat) ** 2).mean() for row in rows]
    told = uniform_filter(np.reshape(spread, (9, 11)), 3, mode="reflect")
    worst = float(np.abs(pixelwise._local_fidelity(operator, f, 3) - np.maximum(told - 1.4, 0)).max())
    line = np.exp(-(np.arange(-20.0, 21.0) ** 2) / (2 * pixelwise.SMOOTHING**2))
    line = line[np.abs(np.arange(-20, 21)) <= int(4 * pixelwise.SMOOTHING + 0.5)]
    one = pixelwise.kernel_for(0.1, 1, 1, None, 5, 9)
    for axes, channels, patch in ((1, 3, 7), (2, 1, 3), (2, 3, 5)):
        kernel = pixelwise.kernel_for(0.1, axes, channels, None, patch, 18)
        worst = largest(worst, abs(kernel.spatial_width / one.spatial_width / 2 - 1))  # as far as is looked
        noise = float(np.linalg.norm(line / line.sum()))
        wanted = one.width * noise ** (axes - 1) * (channels * patch**axes / 5) ** -0.25
        worst = largest(worst, abs(kernel.width / wanted - 1), abs(kernel.sigma / noise**axes - 1))
    return worst


def told_strength(rng: np.random.Generator) -> float:
    """Return errors of strengths that `denoise` tells of noise with a spectrum and places, relative."""
    frequency, worst = np.fft.fftfreq(16), 0.0
    power = 3 * np.exp(-6 * np.hypot(frequency[:, None], frequency / 2))
    for places in (None, np.array([[1.0, 2.0, 0.5], [0.7, 1.2, 3.0]])):
        noise = GaussianNoise(4.0, power, places=places)
        z = 100 + 20 * np.sin(np.arange(40) / 9)[:, None] + noise.sample(np.zeros((40, 48)), rng=rng)
        by = np.ones(z.shape) if noise.places is None else noise.along(z[..., None])[..., 0] / 4.0
        info = denoise(z, noise=noise, return_info=True, quality="fast")[1]
        worst = largest(worst, abs(info.sigma / (4.0 * float(np.sqrt(np.mean(by**2)))) - 1))
    return worst


def ratios(rng: np.random.Generator) -> float:
    """Return errors of ratios of signal and noise, in decibels, against scikit-image's and a formula."""
    clean = rng.random((12, 15))
    estimate = clean + 0.1 * rng.standard_normal(clean.shape)
    bytes_, moved = np.uint8(255 * clean), np.uint8(200 * clean + 20)
    error = float(np.mean((clean - estimate) ** 2))
    return largest(
        abs(psnr(clean, estimate) - peak_signal_noise_ratio(clean, estimate, data_range=float(np.ptp(clean)))),
        abs(psnr(bytes_, moved) - peak_signal_noise_ratio(bytes_, moved)),
        abs(snr(clean, estimate) - 10 * float(np.log10(clean.var() / error))),
    )


def between_blocks(rng: np.random.Generator) -> float:
    """Return errors of lines between smoothed means of blocks, and of what is kept of noise on coarser images."""
    means, worst = rng.standard_normal((7, 9)), 0.0
    for axis in (0, 1):
        smooth = convolve1d(means, [0.25, 0.5, 0.25], axis=axis, mode="nearest")
        place = (np.arange(2 * means.shape[axis]) + 0.5) / 2 - 0.5
        exact = np.apply_along_axis(lambda one, at=place: np.interp(at, np.arange(len(one)), one), axis, smooth)
        worst = largest(worst, float(np.abs(_between(means, axis) - exact).max()))
    # From where a coarse image is taken over as it is, its share falls as a raised cosine.
    begin = OfSpectra.taken
    share = np.array([0.0, begin, begin + (1 - begin) / 3, begin + (1 - begin) / 2, 1.0, 1.4])
    worst = largest(worst, float(np.abs(spectra.fade(share) - [1, 1, 0.75, 0.5, 0, 0]).max()))
    power = rng.random((1, 16, 16))
    gain = spectra.fade(4 * np.abs(np.fft.fftfreq(16)))
    gain = gain[:, None] * gain
    left = power * ((1 - gain) ** 2 + OfSpectra.left * gain**2)
    return largest(worst, float(np.abs(spectra.remaining(power) - left).max()))


def risks(rng: np.random.Generator) -> tuple[float, float]:
    """Return errors of Stein's estimate and of the discrepancy of a linear map, and of what rules say they chose."""
    try:
        import torch
    except ImportError as error:
        raise CannotRunError("torch is not installed: pip install 'nlflow[torch]'") from error
    n, worst, chosen = 40, 0.0, 0.0
    matrix, y = rng.standard_normal((n, n)) / 9, rng.standard_normal(n)
    for sigma in (0.7, rng.uniform(0.3, 2.0, n)):
        signs = perturbation((n,), rng=3)
        told = sure(y, matrix @ y, matrix @ (y + 0.05 * signs), signs, 0.05, sigma)
        exact = np.mean((matrix @ y - y) ** 2 + sigma**2 * (2 * signs * (matrix @ signs) - 1))
        off = np.sqrt(np.mean(((y - matrix @ y) / sigma) ** 2))
        worst = largest(worst, abs(told / exact - 1), abs(discrepancy(y, matrix @ y, sigma) / off - 1))
        worst = largest(worst, float(np.abs(signs**2 - 1).max()))
    worst = largest(worst, float(abs(perturbation((10_000,), rng=1).mean()) > 0.04))  # four standard errors
    i, j = np.mgrid[:64, :64]
    clean = 100 + 50 * np.sin(i / 14) * np.cos(j / 11) + 40 * (np.hypot(i - 35, j - 30) < 14)
    noisy = clean + rng.normal(0, 20, clean.shape)
    for image in (noisy, torch.from_numpy(noisy)):
        for quality in ("balanced", "pixels"):
            if quality == "pixels" and image is not noisy:
                continue
            for rule in ("sure", "discrepancy"):
                found, info = denoise(image, 20.0, stopping=rule, quality=quality, return_info=True)
                error = float(np.mean((np.asarray(found) - clean) ** 2))
                left = float(np.sqrt(np.mean((noisy - np.asarray(found)) ** 2)))
                worst = largest(worst, abs(info.residual / left - 1))
                if rule == "sure":  # of which the standard error is about σ² √(2/N)
                    chosen = largest(chosen, abs(info.risk - error) / (20**2 * np.sqrt(2 / noisy.size)))
                    chosen = largest(chosen, 4 * error / (3 * info.risk))  # at most three times the estimate
                else:
                    said = float(re.search(r"residual of (\S+) sigma", info.stopped_by)[1])  # type: ignore[index]
                    chosen = largest(chosen, 4 * abs(said / discrepancy(noisy, np.asarray(found), 20.0) - 1) / 1e-3)
    return worst, chosen


def run(context: Context) -> Outcome:
    rng = np.random.default_rng(55)
    sums, bias, error = in_cells(rng)
    linear, chosen = risks(rng)
    return Outcome([
        Check("Stein's estimate and the discrepancy of a linear map against formulas, relative", linear, 1e-9),
        Check("risks and residuals that rules tell, from the clean picture, in standard errors", chosen, 4.0),
        Check("noise that ends of a range cut off: mean squares against SciPy's, relative", truncated(), 1e-10),
        Check("moments of residuals in windows against loops", products(rng), 1e-12),
        Check("figures of windows and of what is missing, against formulas", figures(rng), 1e-12),
        Check("isolated peaks that are given back: what is missing, relative", peaks(), 0.02),
        Check("local fidelities of pixels, and widths of kernels of patches, against sums", by_pixels(rng), 1e-9),
        Check("strengths that are told of noise with a spectrum and places, relative", told_strength(rng), 1e-6),
        Check("lines between means of blocks, and shares of coarser images", between_blocks(rng), 1e-12),
        Check("ratios of signal and noise against scikit-image's, in decibels", ratios(rng), 1e-9),
        Check("sums over cells, and lines between them", sums, 1e-12),
        Check("estimates of few counts: bias, relative", bias, 0.1),
        Check("estimates of few counts: root mean square error, in counts", error, 0.09),
    ])  # fmt: skip


CLAIM = Claim(
    name="removed-noise",
    title="What was removed is measured as noise is, and few counts keep their sum",
    statement=(
        "The mean square of normal noise between two ends is 1 − (aφ(a) + bφ(b)) / (Φ(a) + Φ(b) − 1). Moments, "
        "correlations of neighbours and clumps of a residual are sums over windows, less four standard errors. An "
        "isolated peak of which a share is lost is given back by least squares. Counts of less than one a sample are "
        "summed in cells, and estimates of them have no bias."
    ),
    source="derived; Johnson, Kotz, Balakrishnan 1994, section 13.10; Mäkitalo, Foi 2011, doi 10.1109/TIP.2010.2056693",
    run=run,
)
