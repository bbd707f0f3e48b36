"""Tables, the document and its files."""

from __future__ import annotations

import importlib.util
import io
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Any

from benchmarks.denoising.figure import crops_figure
from benchmarks.denoising.methods import BM3D, GREY, QUALITIES, SIGNAL, TV, WAVELETS, denoisers, version
from benchmarks.denoising.targets import PUBLISHED, Record, Results, mean, sigmas, tuned, verdicts, wins
from benchmarks.denoising.tasks import SETS
from benchmarks.harness import KIND, keep, listed, machine, table
from nlflow.store.atomic import write_atomic
from nlflow.store.storage import load_record
from validation.tables import markdown


def image_table(records: list[Record]) -> str:
    """Return mean PSNR and SSIM by method and sigma."""
    levels, methods = sigmas(records), list(dict.fromkeys(r["method"] for r in records))
    lines = {m: [(mean(records, m, s), mean(records, m, s, "ssim")) for s in levels] for m in methods}
    methods.sort(key=lambda m: -(lines[m][0][0] or 0))
    shown = ([m, *("–" if p is None else f"{p:.2f} / {q:.3f}" for p, q in lines[m])] for m in methods)
    return markdown(["PSNR in dB / SSIM", *(f"σ = {s:g}" for s in levels)], shown)


def score_table(name: str, records: list[Record]) -> str:
    return signal_table(records) if SETS.get(name) == SIGNAL else image_table(records)


def signal_table(records: list[Record]) -> str:
    """Return the SNR by signal and level, the best of a family of peers counting."""
    scores, names = tuned(records), (*QUALITIES, WAVELETS, TV)
    lines = [
        [name, f"{level:g}", *(f"{s[n]:.2f}" if n in s else "–" for n in names)]
        for (name, level), s in sorted(scores.items())
    ]
    for peer in (p for p in (WAVELETS, TV) if any(p in s for s in scores.values())):
        for level in sigmas(records):
            won = [str(len(wins(scores, q, peer, level))) for q in QUALITIES]
            lines.append([f"**not below {peer}** (ECG aside)", f"{level:g}", *won, "", ""])
    return markdown(["signal, SNR in dB", "noise / spread", *QUALITIES, *(f"{n}, tuned" for n in names[3:])], lines)


def cost_table(times: dict[int, dict[str, float]], memory: dict[str, float]) -> str:
    names = sorted(memory, key=lambda n: times[min(times)][n])
    lines = [[n, *(f"{seconds[n]:.3g}" for seconds in times.values()), f"{memory[n]:.0f}"] for n in names]
    return markdown(["method", *(f"seconds, threads: {count}" for count in times), "bytes a pixel"], lines)


def about(earlier: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
    """Return the machine and the versions; of peers that are not installed, those of an earlier report."""
    found = machine()
    for name, package in (("PyWavelets", "pywt"), ("OpenCV", "cv2"), ("bm3d", "bm3d"), ("NL-Ridge", "nlridge"),
                          ("LIChI", "lichi")):  # fmt: skip
        installed = importlib.util.find_spec(package) is not None
        found[name] = version(package) if installed else earlier.get(name, "not installed")
    return found


def parameters() -> str:
    """Return the peers' parameters as a list; where a family has several choices, these."""
    lines = []
    for kind in dict.fromkeys(SETS.values()):
        peers = {name: method for name, method in denoisers(kind).items() if not method.ours}
        for family in dict.fromkeys(method.family for method in peers.values()):
            names = [name for name, method in peers.items() if method.family == family]
            choices = [name.removeprefix(f"{family}, ") for name in names if name != family]
            best = f"; the best of {'; '.join(choices)}" if choices else ""
            lines.append(f"- {kind}, {family}: {peers[names[0]].parameters}{best}")
    return "\n".join(lines)


NOTE = """White Gaussian noise, `default_rng(0)` for each image (signals: five draws), neither clipped nor rounded; all
methods see the same samples. PSNR with peak 255 and SSIM are means over a set. Ours with sigma given and nothing else
chosen. The peers' parameters were tuned at each sigma, on Set12 itself (colour: on part of Kodak24; signals: for each
signal and level), which flatters them; OpenCV gets 8 bits. Seconds are medians on one grey image, methods in turns;
targets are held against one thread. Memory is the peak of a process, less what it held before. BM3D is a closed
package for non-commercial use, compared with where the user has installed it."""


def document(results: Results) -> str:
    """Return all results as Markdown."""
    parts = ["# Denoising: quality, time and memory", NOTE]
    if results.quick:
        parts.append("**A trial run on few small images: the figures mean nothing.**")
    installed = denoisers(GREY)
    if BM3D not in installed and not results.earlier:
        parts.append("BM3D was not installed: the targets that refer to it are not judged.")
    parts += ["## Targets", table(verdicts(results))]
    for name, records in results.records.items():
        head = "Set12, sigma given and estimated" if name == "unknown" else f"{name}, {SETS[name]}"
        parts += [f"## {head}: {len({r['image'] for r in records})}", score_table(name, records)]
        if name == "Set12":
            lines = [[method, *(f"{psnr:.2f}" for psnr in levels.values())] for method, levels in PUBLISHED.items()]
            columns = ["PSNR in dB, as published (arXiv 2212.00422), not measured here"]
            columns += [f"σ = {level:g}" for level in PUBLISHED["WNNM"]]
            parts.append(markdown(columns, lines))
    if results.times:
        parts += ["## Seconds and memory on one grey photograph", cost_table(results.times, results.memory)]
    if results.earlier or any("crop" in r for records in results.records.values() for r in records):
        parts.append("## Crops\n\n![noisy, peers, ours, clean](denoise_quality.png)")
    parts += ["## The peers' parameters", parameters(), "## Machine and versions", listed(about(results.earlier))]
    return "\n\n".join(parts) + "\n"


def read(out: Path, data: Path) -> Results:
    """Return what `write` has written to a folder; the figure of crops stays as it is there.

    Raises
    ------
    SystemExit
        When there is nothing.
    """
    path = out / "denoise_quality.json"
    if not path.exists():
        raise SystemExit(f"{path}: got no such file, expected the results of an earlier run")
    plain = json.loads(path.read_text())  # reports of before there were records
    held = plain if "records" in plain else load_record(path, KIND)
    times = {int(count): seconds for count, seconds in held["seconds"].items()}
    return Results(data, held["quick"], held["records"], times, held["bytes_per_pixel"], held["machine"])


def write(results: Results, out: Path) -> None:
    """Write denoise_quality.md, .json and, when there are crops, .png to a folder."""
    whole = {
        "machine": about(results.earlier), "quick": results.quick, "rows": [asdict(r) for r in verdicts(results)],
        "seconds": results.times, "bytes_per_pixel": results.memory, "records": {
            name: [{k: v for k, v in r.items() if k not in ("crop", "place", "samples")} for r in records]
            for name, records in results.records.items()
        },
    }  # fmt: skip
    figure = crops_figure(results.records.get("Kodak24", []), results.data / "Kodak24", results.quick)
    keep(out, "denoise_quality", whole, document(results))
    if figure is not None:
        drawn = io.BytesIO()
        figure.savefig(drawn, format="png", dpi=100)
        write_atomic(out / "denoise_quality.png", lambda stream: stream.write(drawn.getvalue()))
