"""Recordings for tests of noise: demo signals, a heart, and noise of a given spectrum."""

from __future__ import annotations

import numpy as np
import pywt

from nlflow.denoising.noise import find_hum

SIZE = 1024


def demo_signals():
    """All demo signals of PyWavelets; a complex one as its two parts."""
    found = {}
    for name in pywt.data.demo_signal("list"):
        fixed = name in ("Gabor", "sineoneoverx")
        values = pywt.data.demo_signal(name) if fixed else pywt.data.demo_signal(name, SIZE)
        found[name] = np.real(values)
        if np.iscomplexobj(values):
            found[f"{name} (imaginary)"] = np.imag(values)
    return found


def heart():
    """The recording of a heart without the mains that lie on it: it was made at 360 samples a second."""
    values = pywt.data.ecg().astype(float)
    return values - find_hum(values, rate=360).wave(len(values))


def coloured(power, size, rng):
    """Noise of mean square `power` at the frequencies of a transform of this size: power is a function of those > 0."""
    frequency = np.fft.rfftfreq(size)
    level = np.concatenate([[0.0], power(frequency[1:])])
    return np.fft.irfft(np.fft.rfft(rng.normal(size=size)) * np.sqrt(level), size)
