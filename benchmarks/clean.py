"""Pictures that blind denoising may not harm: clean ones, letters with noise, isolated stars.

    python -m benchmarks clean [--only "two values" letters sky ...] [--out FOLDER]

A clean picture comes back at 45 dB or more to itself, one of two values to the bit; what is refused by name, as labels
are, is not changed. Letters of 18 px, a little out of
focus, with white noise of 7 reach 37.5 dB; all pages lose nothing. Stars on a background of 100 electrons keep their
flux: the mean over stars of 500 counts and more, against the flux of the noisy picture in the same apertures, is within
3 %. Photographs are in ``python -m benchmarks.real_noise --only clean``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np

from benchmarks.blind.delicate import CLEAN, LEAST_FLUX, NOISY, fluxes_of, scanned, sky
from benchmarks.blind.methods import Sample, ours, psnr
from benchmarks.harness import Row

NAME: Final = "clean"
LEAST, LEAST_OF_LETTERS, FLUX = 45.0, 37.5, 0.03
WIDTHS: Final = (0.9, 1.2, 1.5)  # of stars
PARTS: Final = (*CLEAN, "letters", "sky")


def blind(picture: Any) -> tuple[Any, str]:
    """Return what `denoise` makes of a picture alone, and what it says of its noise."""
    found = ours(Sample(picture, picture))
    return np.asarray(found.result, np.float64), found.note


def clean_rows(kind: str) -> Iterator[Row]:
    for name, make in CLEAN[kind].items():
        picture = np.asarray(make())
        result, told = blind(picture)
        reached = psnr(picture.astype(np.float64), result, max(float(np.max(picture)), 1.0))
        least = math.inf if kind == "two values" else LEAST
        yield Row.of(NAME, f"{kind}: {name}", told, f"{reached:.2f} dB", reached, least=least)


def letter_rows() -> Iterator[Row]:
    for size, blur, sigma in NOISY:
        clean = scanned(size, blur)
        noisy = clean + np.random.default_rng(0).normal(0, sigma, clean.shape)
        result, told = blind(noisy)
        given, reached = psnr(clean, noisy), psnr(clean, result)
        least = LEAST_OF_LETTERS if (size, blur, sigma) == (18, 0.8, 7.0) else given
        work = f"letters of {size} px, blurred by {blur:g}, white noise of {sigma:g}: {told}"
        yield Row.of(NAME, work, f"{given:.2f} dB", f"{reached:.2f} dB", reached, least=round(least, 2), unit=" dB")


def sky_rows() -> Iterator[Row]:
    for number, width in enumerate(WIDTHS):
        clean, places, fluxes = sky(number, width=width)
        noisy = np.random.default_rng(number).poisson(clean).astype(np.float64)
        result, told = blind(noisy)
        bright = fluxes >= LEAST_FLUX
        kept = fluxes_of(result, places)[bright] / fluxes_of(noisy, places)[bright]
        lost = abs(float(np.mean(kept)) - 1)
        work = f"flux of stars of width {width:g}, {np.count_nonzero(bright)} of 500 counts and more: {told}"
        yield Row.of(NAME, work, "1", f"{np.mean(kept):.3f}", lost, most=FLUX)


def run(only: Sequence[str] = PARTS) -> list[Row]:
    """Return the rows of some kinds of pictures."""
    others = {"letters": letter_rows, "sky": sky_rows}
    return [row for kind in only for row in (clean_rows(kind) if kind in CLEAN else others[kind]())]
