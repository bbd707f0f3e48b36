"""Attention to random tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from nlflow.errors import InputError
from nlflow.kernels import ExpDotProduct
from nlflow.studies.contract import JUDGED, Kind, Options, Row, columns, grouped, judged
from nlflow.studies.fits import Fit, no_fit, power_fit
from nlflow.studies.options import check_sizes
from nlflow.studies.quantities import ERRORS
from nlflow.studies.settings import Floats

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SETTING = ("kernel", "dimension", "channels")
_LARGEST = 3  # sizes from which the constant is taken: those with the smallest bias
_CONSTANT = 0.1  # how far the constant may be from the predicted one beside its interval: the bias is O(C^2 / n)
_STRONGEST = 2.0  # of s |q|, beyond which squares have so heavy tails that their mean is not seen in some hundred draws
_NORMAL = 1.96


class Samples(Kind):
    """Error of softmax attention to n tokens drawn from a normal law, expected: C n^(-1/2).

    Keys k are of the law N(0, I) in d dimensions; values are their first D coordinates. With logits s q.k the limit is
    E[exp(s q.k) k] / E[exp(s q.k)] = s q, and by the delta method C^2 = E[exp(2 s q.k) |k - s q|^2] / E[exp(s q.k)]^2 =
    exp(s^2 |q|^2) D (1 + s^2 |q|^2 / d) in the mean over directions of q, |q|^2 = d.
    """

    name = "samples"
    summary = "error of attention to n random tokens against its limit"
    defaults = {  # noqa: RUF012
        "kernel": [ExpDotProduct()],
        "nodes": [64, 128, 256, 512, 1024, 2048, 4096],
        "dimension": [4, 16],
        "channels": [4],
        "seeds": 200,
    }
    axes = (*_SETTING, "nodes")
    setting = _SETTING
    columns = {"draw": int, "error": float, "predicted": float, **JUDGED}  # noqa: RUF012

    def check(self, options: Options, given: Any) -> None:
        del given
        check_sizes("nodes", options["nodes"])
        if max(options["channels"]) > min(options["dimension"]):
            raise InputError(
                f"channels: got {max(options['channels'])}, expected {min(options['dimension'])} at most, the "
                "dimension of the keys, whose coordinates are the values"
            )
        for kernel in options["kernel"]:
            if type(kernel) is not ExpDotProduct or kernel.query_map is not None or kernel.key_map is not None:
                raise InputError(
                    f"kernel: got {kernel!r}, expected ExpDotProduct (dot:scale=...) without maps, whose limit is known"
                )
            for dimension in options["dimension"]:
                if (strength := _strength(kernel, dimension)) > _STRONGEST:
                    raise InputError(
                        f"kernel: got a scale with logits of size {strength:.3g} in {dimension} dimensions, expected "
                        f"{_STRONGEST:g} at most, beyond which draws do not show the mean error; use a smaller scale"
                    )

    def measure(self, options: Options, seed: np.random.SeedSequence) -> list[Row]:
        kernel, count, dimension = options["kernel"], options["nodes"], options["dimension"]
        strength = _strength(kernel, dimension)
        scale = strength / math.sqrt(dimension)
        channels = options["channels"]
        constant = math.exp(strength**2 / 2) * math.sqrt(channels * (1 + strength**2 / dimension))
        rows = []
        for number, stream in enumerate(seed.spawn(options["seeds"])):
            rng = np.random.default_rng(stream)
            tokens, query = rng.standard_normal((count, dimension)), _direction(rng, dimension) * math.sqrt(dimension)
            logits = scale * tokens @ query
            weights = np.exp(logits - logits.max())
            found = weights @ tokens[:, :channels] / weights.sum()
            error = float(np.linalg.norm(found - scale * query[:channels]))
            row = {"draw": number, "error": error, "predicted": constant / math.sqrt(count)}
            rows.append({**row, **judged(error, math.sqrt(channels))})
        return rows

    def fitted(self, name: str, rows: list[Row], options: Options) -> Iterator[Fit]:
        drawn = columns(rows, "nodes", "error", "used")
        yield power_fit(name, "order in n", *drawn, expected=-0.5, tolerance=0.05, sampled=True)
        what = "root mean square error over C n^(-1/2)"
        sizes = sorted({row["nodes"] for row in rows})[-_LARGEST:]
        squares = np.array([(row["error"] / row["predicted"]) ** 2 for row in rows if row["nodes"] in sizes])
        if squares.size < 2:
            yield no_fit(name, what, "one draw has no spread", expected=1.0)
            return
        mean = float(squares.mean())
        half = _NORMAL * float(squares.std(ddof=1)) / math.sqrt(squares.size)
        low, high = math.sqrt(max(mean - half, 0.0)), math.sqrt(mean + half)
        yield Fit(name, what, math.sqrt(mean), low, high, 1.0, tolerance=_CONSTANT, points=int(squares.size))

    def condensed(self, rows: list[Row]) -> list[Row]:
        lines = []
        for setting, members in grouped(rows, self.axes):
            errors = np.array([row["error"] for row in members])
            low, middle, high = np.quantile(errors, [0.025, 0.5, 0.975])
            line = {"draws": len(members), "error_rms": float(np.sqrt(np.mean(errors**2)))}
            line |= {"predicted": members[0]["predicted"], "error_median": float(middle)}
            line |= {"low_95": float(low), "high_95": float(high), "used": sum(row["used"] for row in members)}
            lines.append({**setting, **line, "note": ""})
        return lines

    def figure(self, rows: list[Row], fits: list[Fit]) -> Figure:
        from nlflow.studies.drawing import rate_panel

        lines = [{**line, "used": bool(line["used"])} for line in self.condensed(rows)]
        return rate_panel(
            lines, [fit for fit in fits if fit.what == "order in n"], _SETTING, x="nodes", y="error_median",
            split="dimension", xlabel="tokens $n$", ylabel=ERRORS[self.name],
            band=("low_95", "high_95"),
        )  # fmt: skip


def _strength(kernel: Any, dimension: int) -> float:
    """Return s |q|, the standard deviation of the logits, for |q|^2 = d."""
    scale = 1 / math.sqrt(dimension) if kernel.scale is None else abs(kernel.scale)
    return float(scale * math.sqrt(dimension))


def _direction(rng: np.random.Generator, dimension: int) -> Floats:
    v = rng.standard_normal(dimension)
    return np.asarray(v / np.linalg.norm(v))
