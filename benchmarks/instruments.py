"""Blind denoising of what simulated instruments give, held against simple filters that are tuned by the truth.

    python -m benchmarks.instruments [--only NAME ...] [--quality balanced] [--out benchmarks/results]
        [--figure FOLDER] [--jobs 2] [--fresh]

`nlflow.denoise` gets the samples alone, as an array. Each peer is the best of a grid by the truth, which flatters it;
the best of all peers counts for each scene. The instruments are in `benchmarks.blind.instruments`.

instruments.json and .md are written to `--out` as results come in. What is ours is measured again when the source of
nlflow has changed; peers keep their figures unless `--fresh` is given.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from scipy.ndimage import distance_transform_edt, gaussian_filter, median_filter
from scipy.signal import savgol_filter
from skimage.restoration import denoise_nl_means, denoise_tv_chambolle, denoise_wavelet

from benchmarks.blind import methods as by
from benchmarks.blind.instruments import INSTRUMENTS, SCENES
from benchmarks.blind.methods import Method, Outcome, Sample, psnr
from benchmarks.blind.runner import Figure, Kept, measure, write_as_they_come
from benchmarks.blind.scenes import Scene
from benchmarks.denoising.methods import Array
from benchmarks.denoising.report import about
from benchmarks.harness import Row, keep, listed, table
from nlflow.backends.machine import source_digest
from nlflow.errors import InputError
from nlflow.store.atomic import locked, make_folder
from validation.tables import markdown

NAME: Final = "instruments"
OURS: Final = by.BLIND.format("balanced")
HARM: Final = -0.05  # dB, the least gain over the samples as they are
NEAR: Final = -0.3  # dB, the least gain over the best peer, in SHARE of all scenes
SHARE: Final = 0.85

# Each filter with its grid; strengths are in units of the root mean square of the noise, by the truth.
WIDTHS: Final = (0.5, 0.7, 1.0, 1.4, 2.0, 3.0, 4.5, 7.0)
SIZES: Final = (3, 5, 7, 9)
STRENGTHS: Final = (0.25, 0.4, 0.6, 0.8, 1.1, 1.6, 2.4, 4.0)
WINDOWS: Final = (5, 7, 11, 15, 21, 31, 45, 65, 95)


def filled(sample: Sample) -> Array:
    """Return the samples as floats, missing ones replaced by the nearest."""
    values = np.asarray(sample.noisy, np.float64)
    lost = ~np.isfinite(sample.truth)
    if not lost.any():
        return values
    nearest = distance_transform_edt(lost, return_distances=False, return_indices=True)
    return np.asarray(values[tuple(nearest)])


def rms(sample: Sample, values: Array) -> float:
    return float(np.sqrt(np.nanmean((values - sample.truth) ** 2)))


def colours_of(values: Array) -> int | None:
    return -1 if values.ndim == 3 else None


def apart(values: Array) -> tuple[float, ...]:
    """Return 0 for the axis of colours, 1 for others: widths of a filter that does not mix colours."""
    return (1, 1, 0)[: values.ndim]


FILTERS: Final[dict[str, tuple[Sequence[float], Callable[[Array, float, float], Array]]]] = {
    "Gaussian": (WIDTHS, lambda u, width, _: gaussian_filter(u, [width * a for a in apart(u)])),
    "median": (SIZES, lambda u, size, _: median_filter(u, [int(size) if a else 1 for a in apart(u)])),
    "total variation": (
        STRENGTHS,
        lambda u, s, level: level * denoise_tv_chambolle(u / level, s, channel_axis=colours_of(u)),
    ),
    "wavelets": (
        STRENGTHS,
        lambda u, s, level: denoise_wavelet(
            u, s * level, wavelet="db2", channel_axis=colours_of(u), rescale_sigma=False
        ),
    ),
}
OF_PICTURES: Final[dict[str, tuple[Sequence[float], Callable[[Array, float, float], Array]]]] = {
    "nonlocal means": (
        STRENGTHS[:6],
        lambda u, s, level: level * denoise_nl_means(u / level, 5, 6, s, sigma=0.0, channel_axis=colours_of(u)),
    ),
}


def polynomial(u: Array, window: float, _: float, *, order: int) -> Array:
    return savgol_filter(u, max(int(window), order + 3), order)


OF_SIGNALS: Final[dict[str, tuple[Sequence[float], Callable[[Array, float, float], Array]]]] = {
    f"Savitzky-Golay of order {order}": (WINDOWS, partial(polynomial, order=order)) for order in (2, 4)
}


def best_peer(sample: Sample) -> Outcome:
    """Return the best of all filters and strengths by the truth."""
    values = filled(sample)
    level = max(rms(sample, values), 1e-12 * sample.peak)
    found: tuple[float, NDArray[Any], str] = (psnr(sample.truth, values, sample.peak), values, "none")
    for name, (grid, call) in (FILTERS | (OF_SIGNALS if values.ndim == 1 else OF_PICTURES)).items():
        for strength in grid:
            result = call(values, strength, level)
            score = psnr(sample.truth, result, sample.peak)
            if score > found[0]:
                found = score, result, f"{name} {strength:g}"
    return Outcome(found[1], found[2])


def noisy(sample: Sample) -> Outcome:
    return Outcome(filled(sample))


def blind(sample: Sample, quality: str) -> Outcome:
    """Return what `denoise` makes of the samples alone, or why it refuses them."""
    try:
        return by.ours(sample, quality=quality)
    except InputError as error:
        return Outcome(note=f"refused: {error}")


def scenes(names: Sequence[str]) -> Iterator[Scene]:
    for name in names:
        for number in range(SCENES):
            seed = [list(INSTRUMENTS).index(name), number]
            yield Scene(NAME, name, f"scene {number + 1}", partial(drawn, name, number, seed))


def drawn(name: str, number: int, seed: Sequence[int]) -> Sample:
    return INSTRUMENTS[name](number, np.random.default_rng(seed))


def methods(qualities: Sequence[str]) -> dict[str, Method]:
    peers = {by.NOISY: Method(noisy, ours=False), "best peer": Method(best_peer, ours=False)}
    return peers | {by.BLIND.format(quality): Method(partial(blind, quality=quality)) for quality in qualities}


def by_scene(figures: Sequence[Figure]) -> dict[tuple[str, str], dict[str, Figure]]:
    found: dict[tuple[str, str], dict[str, Figure]] = {}
    for figure in figures:
        found.setdefault((figure.setting, figure.picture), {})[figure.method] = figure
    return found


def verdicts(figures: Sequence[Figure]) -> list[Row]:
    """Hold ours against what it was given and against the best peer."""
    complete = [f for f in by_scene(figures).values() if {OURS, by.NOISY, "best peer"} <= f.keys()]
    if not complete:
        return []
    given = [f for f in complete if f[OURS].value is not None]  # what is refused is not harmed
    gains = [(gain(f[OURS], f[by.NOISY]), f"{f[OURS].setting}, {f[OURS].picture}") for f in given]
    least, where = min(gains)
    near = statistics.fmean(gain(f[OURS], f["best peer"]) >= NEAR for f in complete)
    row = partial(Row.of, NAME)
    return [
        row(f"least gain in dB over the samples ({len(gains)} scenes)", "noisy", where, least, least=HARM),
        row(
            f"share of scenes within {-NEAR:g} dB of the best peer",
            "tuned by the truth",
            "blind",
            near,
            least=SHARE,
        ),
    ]


def gain(ours: Figure, other: Figure) -> float:
    a, b = (float(-np.inf if f.value is None else f.value) for f in (ours, other))
    return 0.0 if a == b else a - b  # both infinite: nothing to remove, and nothing was removed


def document(figures: Sequence[Figure]) -> str:
    lines = []
    for (setting, picture), found in by_scene(figures).items():
        cells = [shown(found.get(name)) for name in (by.NOISY, OURS, "best peer")]
        notes = [found[name].note if name in found else "" for name in ("best peer", OURS)]
        lines.append([setting, picture, *cells, *notes])
    heads = ["instrument", "", by.NOISY, "blind", "best peer", "which", "told"]
    parts = ["# Blind denoising of simulated instruments", (__doc__ or "").partition("\n\n")[2].partition("\n\n")[2]]
    parts += [table(verdicts(figures)), markdown(heads, lines), "## Machine and versions", listed(about())]
    return "\n\n".join(parts) + "\n"


def shown(figure: Figure | None) -> str:
    if figure is None or figure.value is None:
        return "–"
    return "inf" if math.isinf(figure.value) else f"{figure.value:.2f}"


def write(kept: Kept, out: Path) -> None:
    figures = kept.figures
    content = {"machine": about(), "rows": [asdict(r) for r in verdicts(figures)], "entries": kept.plain()}
    keep(out, NAME, content, document(figures))


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--only", nargs="+", choices=INSTRUMENTS, default=list(INSTRUMENTS), metavar="NAME")
    parser.add_argument("--quality", nargs="+", default=["balanced"], metavar="QUALITY")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="where the results go")
    parser.add_argument("--figure", type=Path, metavar="FOLDER", help="gets a PNG for each result of ours measured now")
    parser.add_argument("--jobs", type=int, default=2, help="results at a time, each on one thread")
    parser.add_argument("--fresh", action="store_true", help="measure again what has been measured, peers too")
    return parser.parse_args()


def main() -> None:
    arguments = options()
    with locked(make_folder(arguments.out), "--out"):
        source = source_digest()
        kept = Kept(arguments.out / f"{NAME}.json", source, arguments.fresh)
        asked = scenes(arguments.only), methods(arguments.quality)
        figures = measure(NAME, *asked, kept, source, jobs=arguments.jobs, drawn=arguments.figure)
        write_as_they_come(figures, lambda: write(kept, arguments.out))
    print(table(verdicts(kept.figures)))
    print(f"written to {arguments.out}", file=sys.stderr)


if __name__ == "__main__":
    main()
