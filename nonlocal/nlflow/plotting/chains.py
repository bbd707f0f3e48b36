"""Chains."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from nlflow.errors import InputError, check_array
from nlflow.plotting import base
from nlflow.plotting.base import Array

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_STABLE, _UNSTABLE, _ACCENT = "#0b5394", "#b03a2e", "#d1711c"
_LOWEST = r"$\mu_\mathrm{min}$"
_SHOWN = 28  # markers of one series
_MANY = 50  # more eigenvalues get a logarithmic axis for their numbers
_STRONGEST = 2.0  # growth in one step at which the colours end
_NEAR_ONE = 1e-4  # of 1: rounding of single precision, and of matrices that are far from normal


def chain_figure(
    stationary: Mapping[str, Array],
    eigenvalues: Array,
    *,
    x: Array | None = None,
    title: str | None = None,
    decay: Array | Mapping[str, Array] | None = None,
) -> Figure:
    """Draw a Markov chain: its stationary distribution, its spectrum and how fast it mixes.

    Parameters
    ----------
    stationary : mapping of str to numpy.ndarray, shape (N,) or (H, W)
        The stationary distribution, computed in one or several ways.
    eigenvalues : numpy.ndarray, shape (M,)
        Eigenvalues of the transition matrix, at least two, with 1 among them.
    x : numpy.ndarray, shape (N,), optional
        Coordinates of the nodes in one dimension; by default their numbers.
    title : str, optional
    decay : numpy.ndarray, shape (S,), or mapping of str to such arrays, optional
        Total variation distance to the stationary distribution after k = 0, 1, … steps, not all 0; |μ₂|^k is dashed.
    """
    base.check_named("stationary", stationary, "distribution")
    hint = "take a slice of a volume, such as pi[len(pi) // 2]"
    found = {name: check_array("stationary", pi, ndim=(1, 2), hint=hint) for name, pi in stationary.items()}
    shape, *others = {pi.shape for pi in found.values()}
    if others:
        raise InputError(f"stationary: got shapes {sorted([shape, *others])}, expected one shape")
    where = None if x is None else check_array("x", x, ndim=1)
    if where is not None:
        base.check_shape("x", where, shape, "stationary (none for an image)")
    mu = np.asarray(eigenvalues)
    if mu.ndim != 1 or mu.size < 2 or mu.dtype.kind not in "iufc" or not np.isfinite(mu).all():
        raise InputError(f"eigenvalues: got shape {mu.shape}, {mu.dtype}; expected at least two finite numbers")
    first = int(np.argmin(np.abs(mu - 1)))
    if abs(mu[first] - 1) > _NEAR_ONE:
        raise InputError(f"eigenvalues: got {mu[first]:.6g} as the nearest to 1, expected 1 among them; give all of "
                         "a chain with a stationary distribution, as of MarkovChain.eigenvalues()")  # fmt: skip
    second = float(np.sort(np.abs(np.delete(mu, first)))[-1])

    columns = 2 if decay is None else 3
    figure = base.new_figure(4.5 * columns, 4.3, 120, title)
    left, middle, *right = figure.subplots(1, columns)
    (_draw_stationary if len(shape) == 1 else _draw_image)(figure, left, found, where)
    (_draw_plane if np.iscomplexobj(mu) else _draw_spectrum)(middle, mu, second)
    if decay is not None:
        distances = decay if isinstance(decay, Mapping) else {"total variation": decay}
        _draw_mixing(right[0], distances, second)
    return figure


def phase_figure(
    mu_min: Array, fidelity: Array, growth: Array, *, limit: Array | None = None, title: str | None = None
) -> Figure:
    """Draw where the NeuTRENO step u ← Pu + λ̃ (f − u) is stable, over the smallest eigenvalue of P and λ̃.

    Parameters
    ----------
    mu_min, fidelity, growth : numpy.ndarray, shape (M,)
        Smallest eigenvalue of P, fidelity λ̃, and the growth >= 0 of a disturbance in one step, of each experiment.
    limit : numpy.ndarray, shape (M,), optional
        Largest stable fidelity for each `mu_min`; by default the theoretical 1 + μ_min.
    title : str, optional
    """
    from matplotlib.colors import LogNorm

    lowest, strength = check_array("mu_min", mu_min, ndim=1), check_array("fidelity", fidelity, ndim=1)
    factor = check_array("growth", growth, ndim=1)
    bound = None if limit is None else check_array("limit", limit, ndim=1)
    for name, array in (("fidelity", strength), ("growth", factor), ("limit", bound)):
        if array is not None:
            base.check_shape(name, array, lowest.shape, "mu_min")
    if factor.min() < 0:
        raise InputError(f"growth: got {factor.min():.4g}, expected factors >= 0, the growth of a norm in one step")

    figure = base.new_figure(7.6, 5.6, 130, title)
    axis = figure.subplots()
    cut = np.clip(factor, 1 / _STRONGEST, _STRONGEST)
    end = min(max(float(np.exp(np.abs(np.log(cut)).max())), 1.1), _STRONGEST)
    size = float(np.clip(9000 / lowest.size, 9, 60))
    for name, chosen, marker, edge in (("stable", factor <= 1, "o", _STABLE), ("unstable", factor > 1, "D", _UNSTABLE)):
        drawn = axis.scatter(
            lowest[chosen], strength[chosen], c=cut[chosen], s=size, cmap="RdBu_r", norm=LogNorm(1 / end, end),
            marker=marker, edgecolors=edge, linewidths=0.5, label=f"{name} ({np.count_nonzero(chosen)})", zorder=3,
        )  # fmt: skip
    ends = np.array([lowest.min(), lowest.max()]) + np.array([-0.03, 0.03]) * (np.ptp(lowest) or 1)
    order, label = (
        np.argsort(lowest),
        r"limit $\tilde\lambda = 1 + \mu_\mathrm{min}$" if bound is None else r"given limit of $\tilde\lambda$",
    )
    line, height = (ends, 1 + ends) if bound is None else (lowest[order], bound[order])
    axis.plot(line, height, color="black", linewidth=2.2, zorder=4, label=label)
    axis.set_xlim(*ends)
    base.finish(axis, "", f"smallest eigenvalue {_LOWEST} of $P$", r"fidelity $\tilde\lambda$")
    base.legend_below(axis)
    beyond = (bool(factor.min() < 1 / _STRONGEST), bool(factor.max() > _STRONGEST))
    extend = {(True, False): "min", (False, True): "max", (True, True): "both"}.get(beyond, "neither")
    bar = figure.colorbar(drawn, ax=axis, extend=extend)
    bar.set_label("measured growth in one step")
    ticks = [tick for tick in (0.5, 0.6, 0.8, 1, 1.25, 1.6, 2) if 1 / end <= tick <= end]
    bar.set_ticks(ticks, labels=[f"{tick:g}" for tick in ticks])
    bar.minorticks_off()
    return figure


def _agreement(found: dict[str, Array]) -> str:
    first, *others = found.values()
    if not others:
        return ""
    largest = max(float(np.abs(pi - first).max()) for pi in others) / float(first.max())
    return f"\ndifferences ≤ {largest:.1e} · max π"


def _draw_stationary(figure: Figure, axis: Axes, found: dict[str, Array], where: Array | None) -> None:
    size = next(iter(found.values())).size
    nodes = np.arange(size) if where is None else where
    step = max(size // _SHOWN, 1)
    for number, (name, pi) in enumerate(found.items()):
        shade, marker = base.look(number)
        if number == 0:
            axis.plot(nodes, pi, color=shade, linewidth=2, label=name)
            continue
        # The series take turns. So their markers do not hide each other.
        start = (number - 1) * step // max(len(found) - 1, 1)
        axis.plot(
            nodes, pi, linestyle="none", marker=marker, markevery=(start, step), markersize=6,
            markerfacecolor="none", markeredgecolor=shade, markeredgewidth=1.3, label=name,
        )  # fmt: skip
    axis.set_ylim(0, 1.12 * max(float(pi.max()) for pi in found.values()))  # from 0: noise stays small to the eye
    _panel(axis, f"stationary distribution π{_agreement(found)}", "node" if where is None else "x")


def _draw_image(figure: Figure, axis: Axes, found: dict[str, Array], where: Array | None) -> None:
    name, pi = next(iter(found.items()))
    shown = axis.imshow(pi, cmap="viridis", vmin=0)
    figure.colorbar(shown, cax=axis.inset_axes((1.04, 0, 0.05, 1)))
    axis.set_xlabel(" = ".join([name, *list(found)[1:]]) if len(found) > 1 else name, fontsize=9)
    axis.set_xticks([])
    axis.set_yticks([])
    axis.set_title(f"stationary distribution π{_agreement(found)}", fontsize=11)


def _draw_spectrum(axis: Axes, mu: Array, second: float) -> None:
    order = np.sort(mu)[::-1]
    axis.axhline(0, color="0.6", linewidth=0.8)
    for level in (second, -second) if order[-1] < -second / 2 else (second,):
        label = f"|μ₂| = {second:.6g}" if level > 0 else None
        axis.axhline(level, color=_ACCENT, linewidth=1.4, linestyle="--", label=label)
    axis.plot(
        np.arange(1, mu.size + 1), order, linestyle="none", marker="o", color=base.PALETTE[0],
        markersize=4 if mu.size > _MANY else 5.5, label=f"{mu.size} eigenvalues",
    )  # fmt: skip
    axis.set_ylim(min(-0.05, 1.12 * float(order[-1])), 1.08)
    if mu.size > _MANY:
        axis.set_xscale("log")  # the first ones say how fast the chain mixes
    _panel(axis, f"spectrum of P, gap 1 − |μ₂| = {1 - second:.3g}", "number j", "μ$_j$")


def _draw_plane(axis: Axes, mu: Array, second: float) -> None:
    angle = np.linspace(0, 2 * np.pi, 400)
    axis.plot(np.cos(angle), np.sin(angle), color="0.6", linewidth=1.2, label="unit circle")
    axis.plot(
        second * np.cos(angle), second * np.sin(angle), color=_ACCENT, linewidth=1.4, linestyle="--",
        label=f"|μ₂| = {second:.6g}", zorder=4,
    )  # fmt: skip
    axis.plot(mu.real, mu.imag, linestyle="none", marker="o", markersize=4, color=base.PALETTE[0],
              label=f"{mu.size} eigenvalues")  # fmt: skip
    axis.set_aspect("equal")
    _panel(axis, f"spectrum of P, gap 1 − |μ₂| = {1 - second:.3g}", "Re μ", "Im μ")


def _draw_mixing(axis: Axes, distances: Mapping[str, Array], second: float) -> None:
    if not distances:
        raise InputError("decay: got none, expected at least one array of distances")
    axis.set_yscale("log")
    low, high, steps = math.inf, 0.0, 1
    for number, (name, given) in enumerate(distances.items()):
        values = check_array("decay", given, ndim=1)
        if values.min() < 0 or values.max() == 0:
            raise InputError(
                f"decay {name!r}: got values from {values.min():.4g} on, expected distances >= 0, not all 0"
            )
        k = np.flatnonzero(values > base.ROUNDING * values.max())
        shade, _ = base.look(number)
        axis.plot(k, values[k], color=shade, alpha=0.4, linewidth=4, solid_capstyle="round", label=name)
        low, high, steps = min(low, float(values[k].min())), max(high, float(values.max())), max(steps, int(k[-1]))
        if second > 0:
            middle = base.middle_of(values[k].astype(np.float64))
            exponent = (k - k[middle]) * math.log(second)
            near = np.abs(exponent) < base.REACH
            axis.plot(k[near], values[k[middle]] * np.exp(exponent[near]), color=shade, linewidth=1.4, linestyle="--",
                      label=f"|μ₂|ᵏ, |μ₂| = {second:.6g}" if number == 0 else None)  # fmt: skip
    base.show_decades(axis, low, high, 2.5)
    axis.set_xlim(-0.02 * steps, 1.02 * steps)
    _panel(axis, "distance to π, total variation", "steps k")


def _panel(axis: Axes, title: str, xlabel: str, ylabel: str = "") -> None:
    base.finish(axis, title, xlabel, ylabel)
    base.legend_below(axis, down=0.16)
