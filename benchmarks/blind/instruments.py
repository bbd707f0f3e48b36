"""Instruments, simulated: what a detector makes of a scene, beside what it looked at.

Each instrument is a function of a scene (a picture, a volume of slices or a signal, by number) and a generator. It
returns the samples as a user has them, in the units and the type of the instrument, and their mean: what would be there
without noise. Scenes differ in kind: photographs, text, cells, skies, phantoms, spectra, recordings.

Sources of the models: J. R. Janesick, *Photon Transfer* (2007), for sensors; Robbins and Hadwen, IEEE Trans. Electron
Devices 50 (2003), doi 10.1109/TED.2003.813462, for electron multiplication; Gudbjartsson and Patz, Magn. Reson. Med. 34
(1995), doi 10.1002/mrm.1910340618, for magnitudes of MRI; Goodman, *Speckle Phenomena in Optics* (2007), for speckle.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Final

import numpy as np
import skimage.data
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont
from scipy.ndimage import gaussian_filter, map_coordinates, uniform_filter1d
from skimage.transform import iradon, radon, resize

from benchmarks.blind.methods import Sample
from benchmarks.denoising.methods import Array

Generator = np.random.Generator
SCENES: Final = 3  # of each instrument
SIDE: Final = 256
NODATA: Final = -9999.0


# ---- scenes, from 0 to 1


@lru_cache(maxsize=8)
def photograph(number: int) -> Array:
    """Return a piece of a grey photograph."""
    picture = (skimage.data.camera, skimage.data.moon, skimage.data.coins)[number]()
    return np.asarray(picture[20 : 20 + SIDE, 100 : 100 + SIDE], np.float64) / 255


@lru_cache(maxsize=8)
def colours(number: int) -> Array:
    """Return a piece of a photograph in colours."""
    picture = (skimage.data.chelsea, skimage.data.coffee, skimage.data.astronaut)[number]()
    return np.asarray(picture[20 : 20 + SIDE, 60 : 60 + SIDE], np.float64) / 255


@lru_cache(maxsize=8)
def text(number: int) -> Array:
    """Return a page of letters, of 18, 24 or 14 pixels."""
    size = (18, 24, 14)[number]
    page = Image.new("L", (SIDE, SIDE), 235)
    draw, font = ImageDraw.Draw(page), ImageFont.load_default(size)
    lines = "The flow of a functional", "moves each value towards", "the mean of what is alike", "held to data denoises"
    for k, top in enumerate(range(4, SIDE, int(1.4 * size))):
        draw.text((6 - 3 * (k % 4), top), lines[k % 4] * 2, fill=25, font=font)
    return np.asarray(page, np.float64) / 255


@lru_cache(maxsize=8)
def cells(number: int) -> Array:
    """Return filaments, spots and soft bodies, as fluorescence shows them."""
    rng = np.random.default_rng(100 + number)
    threads = np.zeros((SIDE, SIDE))
    for _ in range(25):
        place, angle = rng.uniform(0, SIDE, 2), rng.uniform(0, 2 * np.pi)
        for _ in range(400):
            angle += rng.normal(0, 0.05)
            place = place + 0.7 * np.array([np.sin(angle), np.cos(angle)])
            if place.min() < 0 or place.max() >= SIDE:
                break
            threads[tuple(place.astype(int))] += 1
    spots = np.zeros((SIDE, SIDE))
    spots[tuple(rng.integers(4, SIDE - 4, (2, 80)))] = rng.uniform(2, 15, 80)
    rows, columns = np.mgrid[:SIDE, :SIDE]
    bodies = np.zeros((SIDE, SIDE))
    for _ in range(4):
        (y, x), (a, b) = rng.uniform(0, SIDE, 2), rng.uniform(25, 60, 2)
        bodies += np.exp(-(((rows - y) / a) ** 4) - ((columns - x) / b) ** 4)
    drawn = gaussian_filter(threads, 1.3)
    drawn = drawn / np.percentile(drawn, 99.5) + 8 * gaussian_filter(spots, 1.3) / spots.max() + 0.3 * bodies + 0.04
    return np.minimum(drawn / np.percentile(drawn, 99.9), 1.2)


@lru_cache(maxsize=8)
def sky(number: int) -> Array:
    """Return stars and a few galaxies over a sky, the brightest star 1."""
    rng = np.random.default_rng(200 + number)
    field = np.zeros((SIDE, SIDE))
    flux = 0.002 * rng.pareto(1.0, 150) + 0.002
    for strength in np.minimum(flux, 1):
        place = rng.uniform(4, SIDE - 4, 2)
        whole = place.astype(int)
        share = place - whole
        for dy in (0, 1):
            for dx in (0, 1):
                field[whole[0] + dy, whole[1] + dx] += strength * abs(1 - dy - share[0]) * abs(1 - dx - share[1])
    stars = gaussian_filter(field, 1.4)
    rows, columns = np.mgrid[:SIDE, :SIDE]
    for _ in range(3):
        (y, x), size = rng.uniform(30, SIDE - 30, 2), rng.uniform(6, 16)
        stars += 0.01 * np.exp(-np.sqrt(((rows - y) / size) ** 2 + ((columns - x) / (0.6 * size)) ** 2))
    return np.asarray(stars / stars.max())


@lru_cache(maxsize=8)
def phantom(number: int) -> Array:
    """Return a phantom of tissues: flat parts, soft shades and a background of 0."""
    flat = resize(skimage.data.shepp_logan_phantom(), (SIDE, SIDE), anti_aliasing=True)
    rng = np.random.default_rng(300 + number)
    fine = gaussian_filter(rng.normal(size=(SIDE, SIDE)), 2 + 2 * number)
    texture = 1 + 0.08 * (1 + number) * fine / fine.std()
    return np.where(flat > 0.02, np.maximum(flat * texture, 0.03), 0.0)


@lru_cache(maxsize=8)
def relief(number: int) -> Array:
    """Return a landscape with ridges, from 0 to 1."""
    rng = np.random.default_rng(400 + number)
    frequency = np.hypot(np.fft.fftfreq(SIDE)[:, None], np.fft.rfftfreq(SIDE)[None])
    frequency[0, 0] = np.inf
    rough = np.fft.irfft2(np.fft.rfft2(rng.normal(size=(SIDE, SIDE))) / frequency**1.8)
    ridges = 1 - np.abs(rough / rough.std()) / 3
    return np.asarray((ridges - ridges.min()) / np.ptp(ridges))


def peaks(axis: Array, rng: Generator, count: int, widths: tuple[float, float], heights: tuple[float, float]) -> Array:
    """Return a sum of Lorentzian lines."""
    low, high = np.log(heights)
    centres = rng.uniform(axis[0] + 0.03 * np.ptp(axis), axis[-1] - 0.03 * np.ptp(axis), count)
    lines = zip(centres, rng.uniform(*widths, count), np.exp(rng.uniform(low, high, count)), strict=True)
    return np.sum([a / (1 + ((axis - c) / w) ** 2) for c, w, a in lines], axis=0)


# ---- instruments


def whole(values: Array, most: float, kind: type[np.integer[Any]]) -> NDArray[Any]:
    return np.clip(np.rint(values), 0, most).astype(kind)


def sample(noisy: NDArray[Any], truth: Array) -> Sample:
    return Sample(noisy, truth, peak=float(np.nanmax(truth) - np.nanmin(truth)))


def white_camera(number: int, rng: Generator) -> Sample:
    truth = 255 * photograph(number)
    return sample(truth + rng.normal(0, (7, 15, 30)[number], truth.shape), truth)


def scanned_text(number: int, rng: Generator) -> Sample:
    truth = 255 * text(number)
    return sample(truth + rng.normal(0, 7, truth.shape), truth)


def photon_counting(number: int, rng: Generator) -> Sample:
    truth = 0.6 * cells(number)
    return sample(rng.poisson(truth).astype(np.uint8), truth)


def confocal(number: int, rng: Generator) -> Sample:
    electrons = 25 * cells(number)
    shot = rng.poisson(electrons) + rng.normal(0, 1.5, electrons.shape)
    return sample(whole(8 * shot + 100, 4095, np.uint16), 8 * electrons + 100)


def emccd(number: int, rng: Generator) -> Sample:
    """Electrons multiplied in a register of random gain, then digitized."""
    electrons, gain = 6 * cells(number) + 0.2, 200.0
    out = rng.gamma(np.maximum(rng.poisson(electrons), 1e-9), gain)
    noisy = out / 12 + rng.normal(0, 4, out.shape) + 200
    return sample(whole(noisy, 65535, np.uint16), electrons * gain / 12 + 200)


def scmos(number: int, rng: Generator) -> Sample:
    """Each pixel with a readout noise of its own; one in a thousand is hot."""
    electrons = 60 * cells(number)
    read = np.exp(rng.normal(0.3, 0.35, electrons.shape))
    dark = np.where(rng.random(electrons.shape) < 0.001, rng.uniform(100, 600, electrons.shape), 0.0)
    shot = rng.poisson(electrons + dark) + rng.normal(size=electrons.shape) * read
    return sample(whole(shot / 0.46 + 100, 65535, np.uint16), electrons / 0.46 + 100)


def bayer(number: int, rng: Generator) -> Sample:
    linear = colours(number) ** 2.2 * np.array([0.5, 1, 0.6])
    plane = linear[..., 1].copy()
    plane[0::2, 0::2], plane[1::2, 1::2] = linear[0::2, 0::2, 0], linear[1::2, 1::2, 2]
    electrons = 1500 * plane
    shot = rng.poisson(electrons) + rng.normal(0, 4, plane.shape)
    return sample(whole(1.8 * shot + 512, 16383, np.uint16), 1.8 * electrons + 512)


def phone(number: int, rng: Generator) -> Sample:
    """Sensor noise in linear light, then the tone curve and 8 bits, each colour with its own gain."""
    light = colours(number) ** 2.2
    gains = np.array([2.1, 1.0, 1.6])
    shot = (rng.poisson(light / gains * 700) + rng.normal(0, 3, light.shape)) * gains / 700
    return sample(whole(255 * np.clip(shot, 0, 1) ** (1 / 2.2), 255, np.uint8), 255 * colours(number))


def drizzled_sky(number: int, rng: Generator) -> Sample:
    """Frames at shifts of parts of a pixel, resampled by lines: the noise is correlated."""
    truth = 4e-21 * sky(number) + 1e-22
    noise = np.zeros(truth.shape)
    for _ in range(4):
        grid = np.indices(truth.shape) + rng.uniform(0, 1, 2)[:, None, None]
        noise += map_coordinates(rng.normal(size=truth.shape), grid, order=1, mode="wrap") / 4
    return sample(truth + 4e-23 * noise / noise.std(), truth)


def astronomical_ccd(number: int, rng: Generator) -> Sample:
    electrons = 12000 * sky(number) + 150
    shot = rng.poisson(electrons) + rng.normal(0, 6, electrons.shape)
    for _ in range(12):  # cosmic rays: short tracks
        place, angle = rng.uniform(8, SIDE - 8, 2), rng.uniform(0, np.pi)
        for step in range(int(rng.integers(1, 7))):
            y, x = (place + step * np.array([np.sin(angle), np.cos(angle)])).astype(int)
            shot[y, x] += rng.uniform(500, 5000)
    return sample(whole(shot / 1.6 + 300, 65535, np.uint16), electrons / 1.6 + 300)


def ultrasound(number: int, rng: Generator) -> Sample:
    """Correlated fully developed speckle, its envelope compressed by a logarithm to 8 bits."""
    tissue = 0.02 + gaussian_filter(phantom(number), 1.0)
    field = rng.normal(size=(2, *tissue.shape))
    field = gaussian_filter(field, (0, 0.8, 1.4))
    field /= field.std()
    envelope = tissue * np.hypot(*field)
    mean = 20 * np.log10(tissue) + 10 * (np.log(2) - np.euler_gamma) / np.log(10)  # of the logarithm of an envelope
    shown, truth = (255 * (decibel + 50) / 60 for decibel in (20 * np.log10(envelope + 1e-9), mean))
    return sample(whole(shown, 255, np.uint8), np.clip(truth, 0, 255))


def radar(number: int, rng: Generator) -> Sample:
    truth = 0.02 + photograph(number) ** 1.5
    return sample((truth * rng.gamma(4, 1 / 4, truth.shape)).astype(np.float32), truth)


def magnitude_mri(number: int, rng: Generator) -> Sample:
    truth = 1000 * phantom(number)
    noise = rng.normal(0, 40, (2, *truth.shape))
    return sample(np.hypot(truth + noise[0], noise[1]).astype(np.float32), truth)


def parallel_mri(number: int, rng: Generator) -> Sample:
    """The g-factor makes the noise larger in the middle; the background is stripped to 0."""
    truth = 1000 * phantom(number)
    rows, columns = np.mgrid[-1 : 1 : SIDE * 1j, -1 : 1 : SIDE * 1j]
    level = 20 + 45 * np.exp(-4 * (rows**2 + columns**2))
    noisy = np.hypot(truth + level * rng.normal(size=truth.shape), level * rng.normal(size=truth.shape))
    return sample(np.where(truth > 0, noisy, 0).astype(np.float32), truth)


def tomograph(number: int, rng: Generator) -> Sample:
    """Filtered back projection of counts: the noise is correlated and differs from place to place."""
    tissue = resize(phantom(number), (SIDE // 2, SIDE // 2), anti_aliasing=True)
    angles = np.linspace(0, 180, 200, endpoint=False)
    sinogram = radon(tissue, angles, circle=True)
    scale = 3.0 / sinogram.max()
    counts = np.maximum(rng.poisson(600 * np.exp(-scale * sinogram)), 1)
    back = iradon(-np.log(counts / 600) / scale, angles, filter_name="hann", circle=True)
    truth = iradon(sinogram, angles, filter_name="hann", circle=True)
    return sample((1000 * back - 1000).astype(np.float32), 1000 * truth - 1000)


def electron_microscope(number: int, rng: Generator) -> Sample:
    """Counts of a scan, its lines flickering; below the picture a bar with letters, as the instrument writes it."""
    electrons = 30 * (0.1 + photograph(number))
    drift = 1 + 0.02 * rng.normal(size=(SIDE, 1))
    picture = rng.poisson(electrons * drift) + rng.normal(0, 1, electrons.shape)
    bar = Image.new("L", (SIDE, 24), 0)
    draw = ImageDraw.Draw(bar)
    draw.text((6, 4), "15.0 kV  x 5 000", fill=255, font=ImageFont.load_default(14))
    draw.rectangle((180, 10, 240, 14), fill=255)
    levels = 255 / 40
    noisy = np.vstack([np.clip(picture * levels, 0, 255), np.asarray(bar, np.float64)])
    return sample(whole(noisy, 255, np.uint8), np.vstack([electrons * levels, np.asarray(bar, np.float64)]))


def thermal(number: int, rng: Generator) -> Sample:
    """Columns with offsets of their own, rows less so, and white noise; hundredths of a kelvin in 14 bits."""
    truth = 29000 + 1200 * gaussian_filter(photograph(number), 1.0)
    lines = rng.normal(0, 12, (1, SIDE)) + rng.normal(0, 5, (SIDE, 1))
    return sample(whole(truth + lines + rng.normal(0, 18, truth.shape), 65535, np.uint16), truth)


def jpeg_scan(number: int, rng: Generator) -> Sample:
    truth = 255 * photograph(number)
    stream = io.BytesIO()
    Image.fromarray(whole(truth + rng.normal(0, 10, truth.shape), 255, np.uint8)).save(stream, "JPEG", quality=85)
    return sample(np.asarray(Image.open(stream)), truth)


def dithered(number: int, rng: Generator) -> Sample:
    """A picture of two values, spread by Floyd and Steinberg: all of it is meant."""
    picture = Image.fromarray(whole(255 * photograph(number), 255, np.uint8)).convert("1")
    values = np.asarray(picture).astype(np.uint8) * 255
    return sample(values, values.astype(np.float64))


def radiograph(number: int, rng: Generator) -> Sample:
    """Quanta blurred by the screen of the detector, then the noise of its readout."""
    quanta = 400 * (0.15 + cells(number))
    light = gaussian_filter(rng.poisson(quanta).astype(np.float64), 0.7, mode="wrap")
    truth = gaussian_filter(quanta, 0.7, mode="wrap")
    return sample(whole(10 * light + rng.normal(0, 15, light.shape), 16383, np.uint16), 10 * truth)


def depth_camera(number: int, rng: Generator) -> Sample:
    """Depths in metres whose noise grows with the square of the depth; where nothing comes back, NaN."""
    truth = 0.6 + 3 * np.round(6 * relief(number)) / 6 + 0.3 * relief((number + 1) % SCENES)
    noisy = truth + 0.004 * truth**2 * rng.normal(size=truth.shape)
    lost = gaussian_filter(rng.normal(size=truth.shape), 3) > 0.12
    return sample(np.where(lost, np.nan, noisy).astype(np.float32), np.where(lost, np.nan, truth))


def elevation(number: int, rng: Generator) -> Sample:
    """Heights by radar, in metres; a sea without data, marked as GDAL does."""
    truth = 300 + 900 * relief(number)
    noisy = truth + rng.normal(0, 8, truth.shape)
    sea = relief(number) < 0.25
    return sample(np.where(sea, NODATA, noisy).astype(np.float32), np.where(sea, np.nan, truth))


def raman(number: int, rng: Generator) -> Sample:
    shift = np.linspace(200, 3200, 2048)
    truth = 1500 + 4000 * np.exp(-(((shift - 900) / 1500) ** 2)) + peaks(shift, rng, 18, (4, 18), (100, 4000))
    noisy = rng.poisson(truth) + rng.normal(0, 15, shift.shape)
    for place in rng.integers(0, 2046, 7):
        noisy[place : place + rng.integers(1, 3)] += rng.uniform(2000, 20000)
    return sample(noisy, truth)


def chromatogram(number: int, rng: Generator) -> Sample:
    minutes = np.arange(6000) / 600
    truth = 50 + 8 * minutes + 30 * np.exp(-minutes)
    for _ in range(8):
        centre, width, height = rng.uniform(0.5, 9.5), rng.uniform(0.02, 0.08), 80 * 1000 ** rng.uniform()
        truth += height * np.exp(-(((minutes - centre) / width) ** 2) / 2)
    return sample(truth + rng.normal(0, 12, minutes.shape), truth)


def diffraction(number: int, rng: Generator) -> Sample:
    """Counts of X-rays by angle: few between the lines."""
    angle = np.linspace(10, 90, 4000)
    truth = 3 + 20 * np.exp(-angle / 25) + peaks(angle, rng, 14, (0.04, 0.15), (20, 800))
    return sample(rng.poisson(truth), truth)


def brain_waves(number: int, rng: Generator) -> Sample:
    """Alpha waves in bursts, slow coloured activity and blinks, in volts; white noise and the hum of the mains."""
    rate = 256
    t = np.arange(16 * rate) / rate
    bursts = uniform_filter1d((np.sin(2 * np.pi * t / 5 + number) > 0.2).astype(float), 80)
    spectrum = np.fft.rfft(rng.normal(size=t.size)) / np.maximum(np.fft.rfftfreq(t.size, 1 / rate), 0.5) ** 0.8
    slow = gaussian_filter(np.fft.irfft(spectrum), 2)
    truth = 20 * bursts * np.sin(2 * np.pi * 10.2 * t) + 8 * slow / slow.std()
    for blink in rng.uniform(1, 15, 4):
        truth += 140 * np.exp(-(((t - blink) / 0.09) ** 2)) - 30 * np.exp(-(((t - blink - 0.25) / 0.12) ** 2))
    hum = 18 * np.sin(2 * np.pi * 50 * t + number) + 5 * np.sin(2 * np.pi * 100 * t)
    return sample(1e-6 * (truth + rng.normal(0, 6, t.size) + hum), 1e-6 * truth)


def heartbeat(number: int, rng: Generator) -> Sample:
    """Beats in millivolts under white noise: the standard case of a recording."""
    t = np.linspace(0, 8, 2048)
    beat = t * (1.1 + 0.1 * number) % 1
    waves = ((1.2, 0.3, 0.012), (0.25, 0.55, 0.05), (0.12, 0.17, 0.03))  # height, place and width of R, T and P
    truth = np.sum([a * np.exp(-(((beat - c) / w) ** 2)) for a, c, w in waves], axis=0)
    return sample(truth + rng.normal(0, 0.06, t.shape), truth)


# ---- instruments whose noise differs from place to place, follows another law, or lies in lines


@lru_cache(maxsize=8)
def leaves(number: int) -> Array:
    """Return discs and ellipses over each other, from 0.05 to 1."""
    rng = np.random.default_rng(500 + number)
    picture, (rows, columns) = np.full((SIDE, SIDE), 0.4), np.mgrid[:SIDE, :SIDE]
    for _ in range(250):
        radius, (y, x) = 4 / np.sqrt(rng.uniform(0.002, 1)), rng.uniform(0, SIDE, 2)
        angle, flat = rng.uniform(0, np.pi), rng.uniform(0.4, 1)
        along = (rows - y) * np.cos(angle) + (columns - x) * np.sin(angle)
        across = -(rows - y) * np.sin(angle) + (columns - x) * np.cos(angle)
        picture[along**2 + (across / flat) ** 2 < radius**2] = rng.uniform(0.05, 1)
    return np.asarray(gaussian_filter(picture, 0.6))


def lidar(number: int, rng: Generator) -> Sample:
    """Intensities with speckle of nine looks; one pulse in twenty does not come back, and some areas send none."""
    truth = 20 + 200 * leaves(number)
    lost = (rng.random(truth.shape) < 0.04) | (gaussian_filter(rng.normal(size=truth.shape), 4) > 0.14)
    noisy = np.maximum(truth * rng.gamma(9, 1 / 9, truth.shape) + rng.normal(0, 4, truth.shape), 1)
    return sample(np.where(lost, np.nan, noisy).astype(np.float32), np.where(lost, np.nan, truth))


def time_of_flight(number: int, rng: Generator) -> Sample:
    """Depths whose noise grows as less light comes back: with the distance, and from dark things."""
    truth = 1 + 3 * leaves(number)
    light = (0.3 + 0.7 * leaves((number + 1) % SCENES)) / truth**2
    noisy, lost = truth + 0.0054 / np.sqrt(light) * rng.normal(size=truth.shape), light < np.quantile(light, 0.06)
    return sample(np.where(lost, np.nan, noisy).astype(np.float32), np.where(lost, np.nan, truth))


def film(number: int, rng: Generator) -> Sample:
    """Grains over about a pixel, most in middle tones, scanned to 8 bits."""
    truth = photograph(number)
    grains = gaussian_filter(rng.normal(size=truth.shape), 0.9)
    noisy = truth + 0.12 * np.sqrt(truth * (1 - truth) + 0.03) * grains / grains.std()
    return sample(whole(255 * noisy + rng.normal(0, 1, truth.shape), 255, np.uint8), 255 * truth)


def atomic_force(number: int, rng: Generator) -> Sample:
    """Heights in metres, each line with an offset of its own and a drift along it."""
    truth = 40 * relief(number)
    drift = np.cumsum(rng.normal(0, 0.04, truth.shape), axis=1)
    lines = rng.normal(0, 0.5, (SIDE, 1)) + drift - drift.mean(axis=1, keepdims=True)
    return sample(1e-9 * (truth + lines + rng.normal(0, 0.35, truth.shape)), 1e-9 * truth)


def polarization(number: int, rng: Generator) -> Sample:
    """A sensor under polarizers of four directions, in 12 bits."""
    light, kind = 0.15 + 0.8 * leaves(number), 0.6 * relief(number)
    truth = np.empty_like(light)
    for place, angle in (((0, 0), 90), ((0, 1), 45), ((1, 0), 135), ((1, 1), 0)):
        own = np.s_[place[0] :: 2, place[1] :: 2]
        seen = 1 + kind * np.cos(2 * (3 * relief((number + 1) % SCENES) - np.deg2rad(angle)))
        truth[own] = (2500 * light * seen)[own]
    noisy = 0.38 * (rng.poisson(truth) + rng.normal(0, 2.5, truth.shape)) + 60
    return sample(whole(noisy, 4095, np.uint16), 0.38 * truth + 60)


def side_scan(number: int, rng: Generator) -> Sample:
    """Amplitudes of one look, four echoes to a mean, that fade with the distance."""
    truth = (0.1 + leaves(number)) * np.linspace(1.2, 0.4, SIDE)
    echo = np.sqrt(rng.exponential(size=(4, *truth.shape))).mean(axis=0)
    return sample((1000 * truth * echo).astype(np.float32), 1000 * truth * np.sqrt(np.pi) / 2)


def video_tape(number: int, rng: Generator) -> Sample:
    """Luminance and colours of a line pass through filters of their own: colour noise is wide."""
    to_luma = np.array([[0.299, 0.587, 0.114], [-0.147, -0.289, 0.436], [0.615, -0.515, -0.1]])
    seen = colours(number) @ to_luma.T
    seen[..., 1:] = gaussian_filter(seen[..., 1:], (0, 2.5, 0))
    truth = np.clip(seen @ np.linalg.inv(to_luma).T, 0, 1)
    noise = rng.normal(size=seen.shape)
    noise = np.dstack([gaussian_filter(noise[..., c], (0, 3.5 if c else 0.8)) for c in range(3)])
    noisy = (seen + 0.04 * noise / noise.std(axis=(0, 1))) @ np.linalg.inv(to_luma).T
    return sample(whole(255 * noisy, 255, np.uint8), 255 * truth)


def position(number: int, rng: Generator) -> Sample:
    """Degrees of latitude along a way, with jumps of two samples where an echo was taken for the signal."""
    speed = gaussian_filter(rng.normal(size=3000), 60)
    truth = 48.1 + 1e-5 * np.cumsum(speed / speed.std())
    noisy = truth + 3e-5 * rng.normal(size=truth.size)
    for place in rng.integers(0, 2990, 6):
        noisy[place : place + 2] += rng.choice([-1, 1]) * rng.uniform(3e-4, 1e-3)
    return sample(noisy, truth)


def clicks(number: int, rng: Generator) -> Sample:
    """Tones that swell and fade, as a microphone hears them, with clicks of one to three samples."""
    t = np.arange(6000) / 8000
    truth = np.zeros(t.size)
    for pitch, loud in ((220 + 30 * number, 0.5), (440 + 60 * number, 0.3), (663, 0.2), (1330, 0.1)):
        swell = gaussian_filter(rng.random(t.size) ** 8, 200)
        truth += loud * swell / swell.max() * np.sin(2 * np.pi * pitch * t + rng.uniform(0, 6))
    noisy = truth + 0.01 * rng.normal(size=t.size)
    for place in rng.integers(0, t.size - 5, 12):
        noisy[place : place + rng.integers(1, 4)] += rng.choice([-1, 1]) * rng.uniform(0.3, 1)
    return sample(noisy, truth)


def thermometer(number: int, rng: Generator) -> Sample:
    """Degrees in steps of a sixteenth, over ten days; stretches are lost, and single readings are those of a reset."""
    days = np.arange(3000) / 288
    wander = gaussian_filter(np.cumsum(rng.normal(size=days.size)), 20)
    truth = 15 + (4 + number) * np.sin(2 * np.pi * days) + 2 * (wander - wander.mean()) / wander.std()
    noisy = np.round((truth + 0.15 * rng.normal(size=days.size)) * 16) / 16
    noisy[rng.random(days.size) < 0.01] = 85.0
    lost = rng.random(days.size) < 0.02
    lost[(begin := int(rng.integers(0, 2800))) : begin + 120] = True
    return sample(np.where(lost, np.nan, noisy), np.where(lost, np.nan, truth))


def light_curve(number: int, rng: Generator) -> Sample:
    """The light of a star that varies, with transits of a planet, gaps, and single frames that went wrong both ways."""
    t = np.arange(4000)
    phase = np.abs((t + 90 * number) % (520 + 110 * number) - 250)
    truth = 1 + 0.003 * np.sin(2 * np.pi * t / 700 + number) - 0.004 * np.clip((22 - phase) / 5, 0, 1)
    noisy = truth + 0.0008 * rng.normal(size=t.size)
    noisy[rng.integers(0, t.size, 20)] += rng.choice([-1, 1], 20) * rng.uniform(0.006, 0.03, 20)
    lost = (rng.random(t.size) < 0.02) | ((t > 1800) & (t < 2100))
    return sample(np.where(lost, np.nan, noisy), np.where(lost, np.nan, truth))


def channel_current(number: int, rng: Generator) -> Sample:
    """Picoamperes through a channel that opens and closes: steps, softened by the filter of the amplifier."""
    turns = rng.random(6000) < (0.008, 0.015, 0.004)[number]
    truth = -3 * gaussian_filter((np.cumsum(turns) % 2).astype(float), 1.0)
    return sample(truth + 0.6 * rng.normal(size=truth.size), truth)


INSTRUMENTS: Final[dict[str, Callable[[int, Generator], Sample]]] = {
    function.__name__.replace("_", " "): function
    for function in (
        white_camera, scanned_text, photon_counting, confocal, emccd, scmos, bayer, phone, drizzled_sky,
        astronomical_ccd, ultrasound, radar, magnitude_mri, parallel_mri, tomograph, electron_microscope, thermal,
        jpeg_scan, dithered, radiograph, depth_camera, elevation, raman, chromatogram, diffraction, brain_waves,
        heartbeat, lidar, time_of_flight, film, atomic_force, polarization, side_scan, video_tape, position, clicks,
        thermometer, light_curve, channel_current,
    )
}  # fmt: skip
