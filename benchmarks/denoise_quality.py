"""Quality, time and memory of `nlflow.denoise` and its peers on photographs and signals.

    python -m benchmarks.denoise_quality --data DIR [--sets Set12 BSD68-even Kodak24 signals unknown cost]
        [--sigmas 15 25 50] [--quick] [--out benchmarks/results] [--cache .denoise-cache] [--jobs 2] [--only METHOD ...]
        [--nl-ridge DIR] [--lichi DIR]

DIR holds the folders Set12, BSD68-even (grey) and Kodak24 (colour) of PNG files. White Gaussian noise,
``default_rng(0)`` for each image, scale 0...255, neither clipped nor rounded: all methods see the same samples. Ours
run as users call them, with sigma given and no other choice; the peers with the parameters in
`benchmarks.denoising.methods`, which were tuned on Set12. BM3D, NL-Ridge and LIChI run where the user has installed
them; `--nl-ridge` and `--lichi` name checkouts of the latter two (github.com/sherbret).

Besides the sets there are three parts: ``signals`` (PyWavelets' ECG and demonstration signals; the noise is 0.1, 0.3
and 0.5 of the signal's standard deviation; means over five draws; the peers' best choice counts for each signal and
level), ``unknown`` (what is lost on Set12 when sigma has to be estimated) and ``cost`` (seconds and peak memory on
512 x 512, `benchmarks.denoising.cost`, when nothing else should run).

A full run takes hours, nearly all of them BM3D's and those of ``best``. Each result goes into the folder `--cache` and
is not computed again until the samples, the parameters, the version of the peer or the source of nlflow change.
denoise_quality.md, .json and .png are written to `--out` after each set. With `--only` these methods are computed into
the cache, their means are printed, and nothing is written; with `--update` besides, they take the place of their
earlier records in the report, which keeps the others (each record tells the version that made it). ``--quick`` tries
everything in minutes: two images a set, their middle alone, and one level of noise. For its length this is not part of
``python -m benchmarks``.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import pywt

from benchmarks.denoising import cost
from benchmarks.denoising.methods import COLOUR, ESTIMATED, SIGNAL, denoisers, our_digest, use_checkout
from benchmarks.denoising.report import read, score_table, write
from benchmarks.denoising.targets import Results
from benchmarks.denoising.tasks import QUICK_IMAGES, SETS, Cache, Crop, Task, compute

UNKNOWN, COST = "unknown", "cost"
COLOUR_SIGMAS = (25.0,)  # in colour a level takes an hour
SIGMAS, SIGNAL_LEVELS, UNKNOWN_SIGMAS = (15.0, 25.0, 50.0), (0.1, 0.3, 0.5), (10.0, 15.0, 25.0, 50.0, 60.0)
# What the figure shows: image, top, left, of these sides. Kodak released its photographs for any use.
CROPS = (("kodim07", 200, 200), ("kodim08", 200, 300), ("kodim23", 180, 5))
CROP_SIDE = 96


def tasks(section: str, data: Path, sigmas: tuple[float, ...], quick: bool) -> list[Task]:
    """Return all that is to be computed for a set or a part."""
    if section == UNKNOWN:
        levels = (25.0,) if quick else UNKNOWN_SIGMAS
        return [
            Task("Set12", str(path), method, sigma, quick)
            for path in images(data, "Set12", quick)
            for method in ("balanced", ESTIMATED)
            for sigma in levels
        ]
    kind = SETS[section]
    sigmas = sigmas or (COLOUR_SIGMAS if kind == COLOUR else SIGMAS)
    methods = [name for name in denoisers(kind) if name != ESTIMATED]
    if kind == SIGNAL:
        names = ["ecg", *pywt.data.demo_signal("list")][: QUICK_IMAGES + 1 if quick else None]
        levels = SIGNAL_LEVELS[1:2] if quick else SIGNAL_LEVELS
        return [Task(section, name, m, level, quick) for name in names for m in methods for level in levels]
    return [
        Task(section, str(path), method, sigma, quick, crop(path, quick) if shown(kind, sigma, sigmas) else None)
        for path in images(data, section, quick) for method in methods for sigma in sigmas
    ]  # fmt: skip


def images(data: Path, name: str, quick: bool) -> list[Path]:
    paths = sorted((data / name).glob("*.png"))
    if not paths:
        raise SystemExit(f"{data / name}: got no PNG files, expected those of {name}; see --data")
    return paths[:QUICK_IMAGES] if quick else paths


def shown(kind: str, sigma: float, sigmas: tuple[float, ...]) -> bool:
    """Whether the figure shows crops of this kind and level."""
    return kind == COLOUR and sigma == (25.0 if 25.0 in sigmas else sigmas[0])


def crop(path: Path, quick: bool) -> Crop | None:
    if quick:
        return slice(16, 112), slice(16, 112)
    places = {name: (slice(top, top + CROP_SIDE), slice(left, left + CROP_SIDE)) for name, top, left in CROPS}
    return places.get(path.stem)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0], epilog="The head of the file says more.",
    )  # fmt: skip
    every = (*SETS, UNKNOWN, COST)
    parser.add_argument("--data", type=Path, required=True, help="folder with Set12/, BSD68-even/ and Kodak24/")
    parser.add_argument("--sets", nargs="+", choices=every, default=every, metavar="SET", help=", ".join(every))
    parser.add_argument(
        "--sigmas", nargs="+", type=float, metavar="SIGMA", help="of 0...255; colour at 25 alone by default"
    )
    parser.add_argument("--quick", action="store_true", help="two images a set, 128 x 128, one sigma")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="where the results go")
    parser.add_argument("--cache", type=Path, default=Path(".denoise-cache"), help="where single results are kept")
    parser.add_argument("--jobs", type=int, default=2, help="results computed at a time, each on one thread")
    parser.add_argument(
        "--only", nargs="+", metavar="METHOD", help="compute these into the cache, print, do not report"
    )
    for option, package in (("--nl-ridge", "nlridge"), ("--lichi", "lichi")):
        parser.add_argument(option, type=Path, metavar="DIR", help=f"a checkout that holds {package}.py")
    parser.add_argument("--update", action="store_true", help="with --only: put these results into the report in --out")
    arguments = parser.parse_args()
    if arguments.update and not arguments.only:
        parser.error("--update: got no --only, expected the methods whose records are to be replaced")
    for folder, package in ((arguments.nl_ridge, "nlridge"), (arguments.lichi, "lichi")):
        if folder is not None:
            use_checkout(folder, package)
    known = {name for kind in SETS.values() for name in denoisers(kind)}
    if unknown := set(arguments.only or ()) - known:
        parser.error(f"--only: got {'; '.join(sorted(unknown))}, expected any of: {'; '.join(sorted(known))}")
    sigmas = (25.0,) if arguments.quick else tuple(arguments.sigmas or ())
    cache, results = Cache(arguments.cache, our_digest()), Results(arguments.data, arguments.quick)
    if arguments.update:
        results = read(arguments.out, arguments.data)
    for section in arguments.sets:
        if section == COST:
            if arguments.only:
                continue
            if arguments.quick:
                results.times, results.memory = cost.times(128, (1, 1)), cost.memory(128)
            else:
                results.times, results.memory = cost.times(), cost.memory()
        else:
            wanted = tasks(section, arguments.data, sigmas, arguments.quick)
            if arguments.only:
                only = [t for t in wanted if t.method in arguments.only]
                found = compute(only, cache, arguments.jobs, section)
                print(score_table(section, found))
                if not arguments.update:
                    continue
                results.replace(section, [{k: v for k, v in r.items() if k not in ("crop", "place")} for r in found])
                write(results, arguments.out)
                continue
            results.records[section] = compute(wanted, cache, arguments.jobs, section)
        write(results, arguments.out)


if __name__ == "__main__":
    main()
