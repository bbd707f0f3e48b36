"""Blind denoising of noise from real cameras, and of simulated noise whose truth is known.

    python -m benchmarks.real_noise --data DIR [--only cameras simulated coloured impulses speckle white clean time]
        [--images N] [--quality balanced best] [--out benchmarks/results] [--figure FOLDER] [--jobs 2] [--fresh]

DIR holds the folders PolyU-even (pairs *_real.JPG, *_mean.JPG), Kodak24 and Set12 (PNG files). `nlflow.denoise` gets
the noisy samples alone. What it is held against is in `benchmarks.blind.methods`, the scenes are in
`benchmarks.blind.scenes` and the goals in `benchmarks.blind.report`.

real_noise.json and .md are written to `--out` as results come in, each with its date and the state of the source.
Another run measures what is not there. What is ours is measured again when the source of nlflow has changed; peers and
oracles keep their figures. With `--fresh` everything in the chosen sections is measured again, which is needed after a
change of the scenes or the peers. A full run takes hours, most of them the oracle's; hence this is not part of
``python -m benchmarks``.

Times are for a machine on which nothing else runs.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.blind import report
from benchmarks.blind.runner import Kept, measure, write_as_they_come
from benchmarks.blind.scenes import SECTIONS
from benchmarks.harness import table
from nlflow.backends.machine import source_digest
from nlflow.store.atomic import locked, make_folder

QUALITIES = ("fast", "balanced", "best")


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0], epilog="The head of the file says more.",
    )  # fmt: skip
    parser.add_argument("--data", type=Path, required=True, help="folder with PolyU-even/, Kodak24/ and Set12/")
    parser.add_argument(
        "--only", nargs="+", choices=SECTIONS, default=list(SECTIONS), metavar="NAME", help=", ".join(SECTIONS)
    )
    parser.add_argument("--images", type=int, metavar="N", help="the first N pictures of each set alone")
    parser.add_argument(
        "--quality", nargs="+", choices=QUALITIES, metavar="QUALITY", help="balanced; for cameras best too by default"
    )
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="where the results go")
    parser.add_argument("--figure", type=Path, metavar="FOLDER", help="gets a PNG for each result of ours measured now")
    parser.add_argument("--jobs", type=int, default=2, help="results at a time, each on one thread")
    parser.add_argument("--fresh", action="store_true", help="measure again what has been measured, peers too")
    arguments = parser.parse_args()
    for name, least in (("images", 1), ("jobs", 1)):
        value = getattr(arguments, name)
        if value is not None and value < least:
            parser.error(f"--{name}: got {value}, expected a whole number >= {least}")
    return arguments


def run(arguments: argparse.Namespace) -> Kept:
    """Measure the chosen sections, and write what is there after each and now and then."""
    source, limited = source_digest(), arguments.images is not None
    kept = Kept(arguments.out / f"{report.NAME}.json", source, arguments.fresh)
    for name in arguments.only:
        section = SECTIONS[name]
        scenes = list(section.scenes(arguments.data, arguments.images))
        if not limited:
            kept.drop_former(name, scenes)
        methods = section.methods(arguments.quality or section.qualities)
        jobs = 1 if section.alone else arguments.jobs
        figures = measure(name, scenes, methods, kept, source, jobs=jobs, drawn=arguments.figure)
        write_as_they_come(figures, lambda: report.write(kept, arguments.out, limited))
    return kept


def main() -> None:
    arguments = options()
    with locked(make_folder(arguments.out), "--out"):
        kept = run(arguments)
    print(table(report.verdicts(kept.figures)))
    print(f"written to {arguments.out}", file=sys.stderr)


if __name__ == "__main__":
    main()
