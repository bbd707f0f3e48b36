"""Draw the figures of the paper: ``python -m paper.figures``, or ``make paper``.

The first is drawn from results that are committed (``benchmarks/results/denoise_quality.json``); the second computes.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.denoising.targets import PUBLISHED
from nlflow import E, Gaussian, GradientFlow, Grid, J, affinity, diversity_bounds, solve
from nlflow.plotting import new_figure
from nlflow.store.records import load_record

HERE = Path(__file__).resolve().parent
RESULTS = HERE.parent / "benchmarks" / "results" / "denoise_quality.json"
MEASURED = ("scikit-image NLM, d=6", "fast", "BM3D", "balanced", "best")
SIGMAS = (15.0, 25.0, 50.0)
COLOURS = {"J": "#b03a2e", "E": "#0b5394"}


def means(records: list[dict[str, Any]]) -> dict[tuple[str, float], float]:
    """Return the mean PSNR of each method and noise level."""
    found: dict[tuple[str, float], list[float]] = {}
    for one in records:
        found.setdefault((one["method"], one["sigma"]), []).append(one["psnr"])
    return {key: float(np.mean(values)) for key, values in found.items()}


def quality(target: Path) -> None:
    """Draw the quality of methods on Set12, less that of BM3D."""
    measured = means(load_record(RESULTS, "benchmark")["records"]["Set12"])
    figure = new_figure(6.4, 2.6)
    axes = figure.subplots(1, len(SIGMAS), sharey=True)
    names = [*MEASURED, *(name for name in PUBLISHED if name in ("LIChI", "WNNM"))]
    for axis, sigma in zip(axes, SIGMAS, strict=True):
        reference = measured["BM3D", sigma]
        for place, name in enumerate(names):
            ours = name in ("fast", "balanced", "best")
            style = {"color": "#0b5394" if ours else "#d1711c", "marker": "o" if name in MEASURED else "D", "ms": 6}
            gain = measured[name, sigma] if name in MEASURED else PUBLISHED[name][sigma]
            axis.plot(gain - reference, place, fillstyle="full" if name in MEASURED else "none", **style)
        axis.axvline(0, color="0.6", linewidth=0.8)
        axis.set_title(f"σ = {sigma:g}, BM3D {reference:.2f} dB", fontsize=9)
        axis.set_yticks(range(len(names)), [{"scikit-image NLM, d=6": "scikit-image NLM"}.get(n, n) for n in names])
        axis.set_xlim(-1.7, 0.6)
        axis.tick_params(labelsize=8)
        axis.grid(alpha=0.3, axis="x")
        axis.spines[["top", "right"]].set_visible(False)
    figure.supxlabel("mean PSNR on Set12 less that of BM3D, in dB", fontsize=9)
    figure.savefig(target)


def flows(target: Path, nodes: int = 256) -> None:
    """Draw a square wave under both flows, and how far they are from a constant."""
    f = np.sign(np.sin(2 * np.pi * (np.arange(nodes) + 0.5) / nodes * 2))
    weights = affinity(Gaussian(width=nodes / 21), Grid(nodes, boundary="periodic"))
    times = np.concatenate([[0.0], np.logspace(-1, 4, 40)])
    flow = {
        "J": GradientFlow(J(weights), metric="degree"),
        "E": GradientFlow(E(weights, f, 0.5, measure="degree"), metric="degree"),
    }
    figure = new_figure(6.4, 2.6)
    left, right = figure.subplots(1, 2)
    left.plot(f, color="0.75", label="data")
    for name, style in (("J", "--"), ("E", "-")):
        run = solve(flow[name], f, t_eval=times)
        drawn = {"color": COLOURS[name], "linestyle": style, "label": f"flow of {name}"}
        left.plot(run.final, **drawn)
        distance = np.array([flow[name].distance_to_constant(u) for u in run.u])
        right.loglog(times[1:], np.maximum(distance[1:] / distance[0], 1e-12), **drawn)
    low, _ = diversity_bounds(flow["E"])
    right.axhline(low, color="0.4", linestyle=":", label="lower bound for E")
    left.set(xlabel="node", ylabel=f"u at t = {times[-1]:g}")
    right.set(xlabel="t", ylabel="distance to a constant, relative", ylim=(1e-10, 3))
    for axis in (left, right):
        axis.legend(fontsize=7, frameon=False)
        axis.tick_params(labelsize=8)
        axis.xaxis.label.set_size(9)
        axis.yaxis.label.set_size(9)
        axis.spines[["top", "right"]].set_visible(False)
    left.set_ylim(-1.1, 1.75)
    figure.savefig(target)


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw the figures of the paper.")
    parser.add_argument("--out", type=Path, default=HERE, help="folder for them (%(default)s)")
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    quality(out / "quality.png")
    flows(out / "flows.png")


if __name__ == "__main__":
    main()
