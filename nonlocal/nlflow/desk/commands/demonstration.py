"""The command ``demo``."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from nlflow.affinities import affinity
from nlflow.backends.numba import loading
from nlflow.denoising import denoise
from nlflow.desk.terminal import progress_bar
from nlflow.domains import Grid
from nlflow.flows.gradient import GradientFlow
from nlflow.flows.integrators import Exponential
from nlflow.flows.result import Solution
from nlflow.flows.solver import solve
from nlflow.flows.trackers import DistanceToConstant, Energy, Tracker
from nlflow.functionals.energies import E, J
from nlflow.kernels import Patch
from nlflow.plotting import new_figure, psnr, render
from nlflow.store.atomic import make_folder, write_content

Array: TypeAlias = NDArray[Any]
_FIDELITY = 0.3
_TIMES = np.concatenate([[0.0], np.logspace(-1, 4, 26)])
# P, Q, R, S and T: where they are in a beat (radians), how high (R is 1) and how wide, as in Table I of the model.
_WAVES = np.array([
    [-np.pi / 3, 0.25, 0.25], [-np.pi / 12, -0.167, 0.1], [0, 1, 0.1], [np.pi / 12, -0.25, 0.1], [np.pi / 2, 0.4, 0.4],
])  # fmt: skip
_COLOURS = {"J": "#b03a2e", "E": "#0b5394"}


@dataclass(frozen=True)
class _Input:
    """A signal with noise, and what the flows run on: the same, or a smaller one."""

    name: str
    sigma: float
    clean: Array
    noisy: Array
    flow_clean: Array
    flow_noisy: Array
    kernel: Patch
    peer: Array | None = None
    peer_seconds: float = 0.0


@dataclass(frozen=True)
class _Case:
    """An input with everything that is computed on it."""

    given: _Input
    result: Array
    seconds: float
    j: Solution[Any]
    e: Solution[Any]
    minimizer: Any


def run_demo(out: Path, progress: bool = True) -> str:
    make_folder(out)
    begun = time.perf_counter()
    with progress_bar(not progress, total=9, desc="demo") as bar:
        cases = [_run(_photograph(bar), bar), _run(_electrocardiogram(bar), bar)]
        bar.set_postfix_str("figure")
        target = out / "demo.png"
        write_content(target, render(_figure(cases), "png"))
        bar.update()
    return _table(cases, time.perf_counter() - begun, target)


def _photograph(bar: Any) -> _Input:
    from skimage import data
    from skimage.restoration import denoise_nl_means

    photograph: Any = data.camera  # not annotated there
    clean = photograph().astype(np.float64)
    sigma = 25.0
    noisy = clean + np.random.default_rng(0).normal(0, sigma, clean.shape)
    start = time.perf_counter()
    bar.set_postfix_str("scikit-image")
    # Its best parameters on photographs at this noise level.
    peer = denoise_nl_means(noisy, patch_size=5, patch_distance=6, h=0.7 * sigma, sigma=sigma, fast_mode=True)
    seconds = time.perf_counter() - start
    bar.update()
    # The flows run on a quarter of the resolution: to its constant a diffusion needs a time that grows with the area.
    small = clean.reshape(128, 4, 128, 4).mean(axis=(1, 3))
    small_noisy = small + np.random.default_rng(1).normal(0, sigma, small.shape)
    kernel = Patch(width=2 * sigma, patch_size=5, search_radius=6, sigma=sigma, tokens="patch")
    return _Input("photograph", sigma, clean, noisy, small, small_noisy, kernel, peer, seconds)


def _heartbeats(size: int, rate: float = 180.0) -> Array:
    """Return `size` samples of a heart in microvolts, `rate` a second; it beats faster while its owner breathes in.

    The model of McSharry, Clifford, Tarassenko and Smith (2003), doi:10.1109/TBME.2003.808805.
    """
    seconds = np.arange(size) / rate
    angle = 2 * np.pi * 1.15 * seconds + 0.25 * np.sin(2 * np.pi * 0.25 * seconds)
    where, height, width = _WAVES.T[..., None]
    distance = (angle - where + np.pi) % (2 * np.pi) - np.pi
    beats: Array = 1000 * np.sum(height * np.exp(-(distance**2) / (2 * width**2)), axis=0)
    return beats


def _electrocardiogram(bar: Any) -> _Input:
    clean = _heartbeats(1024)
    sigma = round(0.3 * float(clean.std()), 1)
    noisy = clean + np.random.default_rng(0).normal(0, sigma, clean.shape)
    kernel = Patch(width=2 * sigma, patch_size=11, search_radius=150, sigma=sigma, tokens="patch")
    bar.update()  # scikit-image's nonlocal means takes no 1-D signals
    return _Input("ECG", sigma, clean, noisy, clean, noisy, kernel)


def _run(given: _Input, bar: Any) -> _Case:
    bar.set_postfix_str(f"{given.name}: denoise")
    start, compiled = time.perf_counter(), loading.seconds
    result = denoise(given.noisy, given.sigma)
    seconds = time.perf_counter() - start - (loading.seconds - compiled)
    bar.update()
    weights = affinity(given.kernel, Grid(given.flow_noisy.shape), given.flow_noisy)
    functional = E(weights, given.flow_noisy, _FIDELITY, measure="degree")
    solutions = []
    for name, energy in (("J-flow", J(weights)), ("E-flow", functional)):
        bar.set_postfix_str(f"{given.name}: {name}")
        trackers: list[Tracker] = [Energy(), DistanceToConstant()]
        solutions.append(
            solve(
                GradientFlow(energy, "degree"), given.flow_noisy, t_eval=_TIMES, integrator=Exponential(tol=1e-8),
                trackers=trackers,
            )
        )  # fmt: skip
        bar.update()
    j, e = solutions
    return _Case(given, result, seconds, j, e, functional.minimizer())


def _table(cases: list[_Case], seconds: float, figure: Path) -> str:
    lines = ["Denoising                       sigma    PSNR (dB)   seconds"]
    for case in cases:
        given = case.given
        rows: list[tuple[str, Array | None, float | None]] = [
            (f"{given.name} {_size(given.clean)}, noisy", given.noisy, None),
            ("  scikit-image NLM", given.peer, given.peer_seconds),
            ("  nlflow.denoise", case.result, case.seconds),
        ]
        for label, estimate, took in rows:
            quality = "no 1-D" if estimate is None else f"{psnr(given.clean, estimate):.2f}"
            spent = "" if took is None or estimate is None else f"{took:.2f}"
            lines.append(f"{label:<30} {given.sigma:6.1f} {quality:>12} {spent:>9}")
    lines += [
        "",
        "Flows in the degree metric     energy: start -> end          distance to constant: start -> end    averages",
    ]
    for case in cases:
        name = f"{case.given.name} {_size(case.given.flow_clean)}"
        for letter, solution in (("J", case.j), ("E", case.e)):
            energy, distance = solution.energy, solution.records["distance"]["value"]
            lines.append(
                f"{name:<18} {letter}-flow  {energy[0]:12.4e} -> {energy[-1]:<12.4e}  "
                f"{distance[0]:16.4e} -> {distance[-1]:<12.4e} {solution.stats['applications']:11d}"
            )
        gap = float(np.abs(case.e.final - case.minimizer.u).max()) / case.given.sigma
        lines.append(
            f"{'':18} E-flow at t={case.e.t[-1]:g} against the minimizer of E: {gap:.1e} sigma "
            f"(conjugate gradients, residual {case.minimizer.residual:.0e})"
        )
    lines += [
        "",
        f"The J-flow runs to a constant; the E-flow (fidelity {_FIDELITY}) stops at the minimizer of E and keeps the "
        "signal.",
        f"{seconds:.1f} s in all, {loading.seconds:.1f} s of it for compiling loops (the next process loads them).",
        f"Figure: {figure}",
    ]
    return "\n".join(lines)


def _size(array: Array) -> str:
    return "x".join(map(str, array.shape))


def _figure(cases: list[_Case]) -> Any:
    figure = new_figure(14, 11.2, dpi=110)
    rows: Any = figure.subfigures(4, 1, height_ratios=[1.18, 1.18, 0.95, 0.95])
    photograph, heart = cases
    given = photograph.given
    clean = given.clean
    panels = [("noisy", given.noisy), ("scikit-image NLM", given.peer), ("nlflow.denoise", photograph.result)]
    _images(
        rows[0], f"Photograph {clean.shape[0]}², noise σ = {given.sigma:g}",
        [("clean", clean), *((f"{n}, {psnr(clean, u):.2f} dB", u) for n, u in panels if u is not None)],
    )  # fmt: skip
    late = [int(np.argmin(np.abs(_TIMES - t))) for t in (10.0, 1e3)]
    size = given.flow_clean.shape[0]
    _images(
        rows[1], f"The same at {size}²: the J-flow runs to a constant, the E-flow does not",
        [
            (f"J-flow, t = {_TIMES[late[0]]:.0f}", photograph.j.u[late[0]]),
            (f"J-flow, t = {_TIMES[late[1]]:.0f}", photograph.j.u[late[1]]),
            (f"J-flow, t = {_TIMES[-1]:.0f}", photograph.j.final),
            (f"E-flow, t = {_TIMES[-1]:.0f}", photograph.e.final),
        ],
    )  # fmt: skip
    _signals(rows[2], heart)
    _courses(rows[3], cases)
    return figure


def _images(row: Any, title: str, panels: list[tuple[str, Any]]) -> None:
    for axis, (name, array) in zip(_panels(row, title, len(panels)), panels, strict=True):
        axis.imshow(array, cmap="gray", vmin=0, vmax=255)
        axis.set_title(name, fontsize=10)
        axis.set_axis_off()


def _signals(row: Any, case: _Case) -> None:
    given = case.given
    left, right = _panels(row, f"Electrocardiogram, noise σ = {given.sigma:g}", 2)

    def draw(axis: Any, signal: Array, label: str, **style: Any) -> None:
        axis.plot(signal[:600], label=label, **style)

    draw(left, given.noisy, f"noisy, {psnr(given.clean, given.noisy):.2f} dB", color="0.75", linewidth=0.8)
    draw(left, given.clean, "clean", color="#d1711c", linewidth=1.6)
    quality = f"{psnr(given.clean, case.result):.2f} dB"
    draw(left, case.result, f"nlflow.denoise, {quality}", color=_COLOURS["E"], linewidth=1.1)
    draw(right, given.noisy, "noisy", color="0.75", linewidth=0.8)
    draw(right, case.e.final, f"E-flow, t = {_TIMES[-1]:.0f}", color=_COLOURS["E"], linewidth=1.2)
    middle = int(np.argmin(np.abs(_TIMES - 100)))
    dashed = {"color": _COLOURS["J"], "linewidth": 1.2, "linestyle": "--"}
    draw(right, case.j.u[middle], f"J-flow, t = {_TIMES[middle]:.0f}", **dashed)
    draw(right, case.j.final, f"J-flow, t = {_TIMES[-1]:.0f}", color=_COLOURS["J"], linewidth=1.6)
    for axis in (left, right):
        _finish(axis, "sample", ncols=4, loc="lower left", bbox_to_anchor=(0, 1))
        axis.margins(x=0)
        axis.spines[["top", "right"]].set_visible(False)


def _courses(row: Any, cases: list[_Case]) -> None:
    axes = _panels(row, "Energy and distance to a constant over time", 4)
    for pair, case in zip((axes[:2], axes[2:]), cases, strict=True):
        for letter, solution in (("J", case.j), ("E", case.e)):
            style = {"color": _COLOURS[letter], "linewidth": 1.6, "label": f"{letter}-flow"}
            t, u0 = solution.t[1:], solution.energy[0]
            pair[0].loglog(t, solution.energy[1:] / u0, **style)
            distance = solution.records["distance"]["value"]
            pair[1].loglog(t, distance[1:] / distance[0], **style)
        pair[0].set_title(f"{case.given.name}: energy / energy at t = 0", fontsize=9)
        pair[1].set_title(f"{case.given.name}: distance to its constant / at t = 0", fontsize=9)
        pair[0].set_ylim(1e-16, 3)
        pair[1].set_ylim(1e-10, 3)
        for axis in pair:
            _finish(axis, "t")
            axis.grid(alpha=0.25)


def _panels(row: Any, title: str, count: int) -> Any:
    row.suptitle(title, fontsize=11, x=0.01, ha="left", fontweight="bold")
    return row.subplots(1, count)


def _finish(axis: Any, xlabel: str, **legend: Any) -> None:
    axis.legend(fontsize=8, frameon=False, **legend)
    axis.tick_params(labelsize=8)
    axis.set_xlabel(xlabel, fontsize=8)
