"""What trainings say together: means over seeds, and differences in pairs with their standard errors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import t as student

from nlflow.backends.machine import provenance
from nlflow.store.encoding import plain
from nlflow.store.storage import save_record
from validation.training.variants import VARIANTS

__all__ = ["SUMMARY", "Difference", "difference", "interval", "number", "summarize", "table", "write_summary"]

SUMMARY = "summary of trainings"
"""The kind of the record ``summary.json``."""


@dataclass(frozen=True)
class Difference:
    """The mean of paired differences.

    Attributes
    ----------
    mean : float
    error : float
        Standard error of the mean; NaN for fewer than two pairs.
    count : int
        Number of pairs.
    low, high : float
        The interval that holds the true mean at 95 %, of Student's t with count - 1 degrees of freedom; NaN where there
        is none.
    p_value : float
        Two-sided, of the same distribution.
    """

    mean: float
    error: float
    count: int
    low: float
    high: float
    p_value: float


def difference(values: Sequence[float], others: Sequence[float]) -> Difference:
    """Return the mean of values - others, pair by pair."""
    gaps = np.asarray(values, dtype=np.float64) - np.asarray(others, dtype=np.float64)
    mean, error = _mean(gaps)
    half, p_value = math.nan, math.nan
    if len(gaps) > 1:
        half = error * float(student.ppf(0.975, len(gaps) - 1))
        p_value = float(2 * student.sf(abs(mean / error), len(gaps) - 1)) if error > 0 else math.nan
    return Difference(mean, error, len(gaps), mean - half, mean + half, p_value)


def _mean(values: Any) -> tuple[float, float]:
    """Return mean and standard error, NaN where there is none."""
    if len(values) == 0:
        return math.nan, math.nan
    error = float(np.std(values, ddof=1) / math.sqrt(len(values))) if len(values) > 1 else math.nan
    return float(np.mean(values)), error


def figures(record: dict[str, Any]) -> dict[str, float]:
    """Return what a finished training is judged by: the figures of its last epoch, layers in numbers.

    ``cosine`` is that of the tokens after the last layer, ``J`` the energy of values in it and ``mean_J`` the mean over
    layers.
    """
    last = record["epochs"][-1]
    found = {name: _float(last[name]) for name in ("accuracy", "mean_iou", "loss", "perplexity") if name in last}
    layers = last["layers"]
    return {
        **found,
        "training_loss": _float(last["training_loss"]),
        "cosine": _float(layers["cosine"][-1]),
        "t_sim": _float(layers["t_sim"][-1]),
        "J": _float(layers["J"][-1]),
        "mean_J": float(np.mean([_float(value) for value in layers["J"]])),
    }


def _float(value: float | None) -> float:
    """Return a number of a record, in which JSON has none for NaN."""
    return math.nan if value is None else float(value)


def summarize(records: Sequence[dict[str, Any]], measure: str) -> dict[str, Any]:
    """Return means and paired differences of the trainings of one task.

    Parameters
    ----------
    records : sequence of dict
        Of `validation.training.loop.train`; those that are not finished are left out, diverged ones are counted.
    measure : str
        The figure that is compared first.

    Returns
    -------
    dict
        ``variants``: for each the mean of every figure and its standard error over seeds, and against softmax and the
        same attention without the term the differences over the seeds that both have.
    """
    known: dict[str, dict[int, dict[str, float]]] = {}
    diverged: dict[str, int] = {}
    for record in records:
        name, seed = record["settings"]["variant"], record["settings"]["seed"]
        if not record["finished"]:
            continue
        if record["epochs"][-1]["diverged"]:
            diverged[name] = diverged.get(name, 0) + 1
        else:
            known.setdefault(name, {})[seed] = figures(record)
    variants = {}
    for name in (one for one in VARIANTS if one in known or one in diverged):
        runs = known.get(name, {})
        against = [other for other in dict.fromkeys(("softmax", VARIANTS[name].without)) if other and other != name]
        variants[name] = {
            "seeds": sorted(runs),
            "diverged": diverged.get(name, 0),
            "mean": {figure: _described(runs, figure) for figure in _figures(runs)},
            "against": {other: _compared(runs, known[other]) for other in against if other in known},
        }
    return {"measure": measure, "variants": variants}


def _figures(runs: dict[int, dict[str, float]]) -> list[str]:
    return list(next(iter(runs.values()))) if runs else []


def _described(runs: dict[int, dict[str, float]], figure: str) -> dict[str, float]:
    mean, error = _mean([runs[seed][figure] for seed in sorted(runs)])
    return {"mean": mean, "error": error}


def _compared(runs: dict[int, dict[str, float]], others: dict[int, dict[str, float]]) -> dict[str, Any]:
    """Return the differences of all figures over the seeds that both have."""
    seeds = sorted(set(runs) & set(others))
    if not seeds:
        return {}
    return {
        figure: asdict(difference([runs[seed][figure] for seed in seeds], [others[seed][figure] for seed in seeds]))
        for figure in _figures(runs)
    }


def table(summary: dict[str, Any]) -> str:
    """Return the summary as text: one line a variant, numbers with their standard errors."""
    measure = summary["measure"]
    shown = (measure, "cosine", "mean_J")
    lines = [f"{'variant':<20}seeds" + "".join(f"{name:>20}" for name in shown) + f"   {measure} less that of …"]
    for name, entry in summary["variants"].items():
        cells = "".join(f"{number(entry['mean'].get(figure)):>20}" for figure in shown)
        beside = "; ".join(
            f"{other} {gaps[measure]['mean']:+.4f}{interval(gaps[measure])}"
            for other, gaps in entry["against"].items()
            if gaps
        )
        lost = f" ({entry['diverged']} diverged)" if entry["diverged"] else ""
        lines.append(f"{name:<20}{len(entry['seeds']):>5}{cells}   {beside}{lost}")
    return "\n".join(lines)


def number(entry: dict[str, float | None] | None) -> str:
    """Return a mean with its standard error, if it has one."""
    if entry is None:
        return ""
    error = _float(entry["error"])
    return f"{_float(entry['mean']):.4f}" + ("" if math.isnan(error) else f" ± {error:.4f}")


def interval(gap: dict[str, Any]) -> str:
    """Return the interval of a difference, nothing where there is none."""
    low, high = _float(gap["low"]), _float(gap["high"])
    return "" if math.isnan(low) else f" ({low:+.4f} … {high:+.4f})"


def write_summary(folder: Path, summary: dict[str, Any], settings: dict[str, Any]) -> None:
    """Write ``summary.json``."""
    report = {"settings": settings, **summary, "environment": provenance()}
    save_record(folder / "summary.json", SUMMARY, plain(report))
