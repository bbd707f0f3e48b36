"""Random formulas of kernels against Python's own evaluation: ``python -m validation.robustness.formulas``.

Each is given as text and as a function of NumPy. What mpmath makes of the same text in 40 digits is what is right: of
log k from 0 to 1e9 widths, and of averages by every method. A refusal is right where the formula is negative, infinite
or no number somewhere, is not 1 at 0, or loses its digits in floats. Nothing may end in an error that is not by name,
take more than two seconds, or give another value.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, Final

import mpmath
import numpy as np

from nlflow import Formula, Grid, Points, affinity
from nlflow.errors import NlflowError
from nlflow.io.atomic import make_folder
from nlflow.studies.cases import Case
from validation.robustness.contract import Row, campaign_table, run_trials

RIGHT: Final = "right"
REFUSED: Final = "refused: no kernel"
LOST: Final = "refused: loses its digits, or is too long"
_SLOW: Final = 2.0  # seconds of the processor, without the time that code takes to be compiled
_CLOSE: Final = 1e-7  # of log k beside 1, and of averages
_DISTANCES: Final = [0.0, *(float(np.float32(r)) for r in np.geomspace(1e-9, 1e9, 25)), 0.3, 0.7, 1.3, 1.9, 2.6, 3.7]
_NODES: Final = np.random.default_rng(0).random(14) * 3
_COMPILED: Final = 25  # one formula in so many is compiled, which takes a second

_NUMPY: Final[dict[str, Any]] = {
    name: getattr(np, name) for name in ("sqrt", "square", "exp", "log", "log1p", "abs", "minimum", "maximum", "where")
}


def _real(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of mpmath that has no value where a root of before was complex, as in NumPy."""

    def of(*values: Any) -> Any:
        if any(isinstance(value, mpmath.mpc) for value in values):
            raise ValueError("a root of a negative number")
        return function(*values)

    return of


_DIGITS: Final[dict[str, Any]] = {
    name: _real(function)
    for name, function in {
        "sqrt": mpmath.sqrt, "square": lambda x: x * x, "exp": mpmath.exp, "log": mpmath.log, "log1p": mpmath.log1p,
        "abs": abs, "minimum": min, "maximum": max,
    }.items()
} | {"where": lambda c, a, b: a if c else b}  # fmt: skip


def written(chance: random.Random, depth: int = 3) -> str:
    """Return a random formula of r."""
    inner = partial(written, chance, depth - 1)
    if depth == 0 or chance.random() < 0.1:
        return chance.choice(["r", "r", "r", "(1+r)", "(1-r)", "r**2", "exp(-r)", f"{chance.uniform(0.1, 3):.3g}", "2"])
    kind = chance.randrange(12)
    if kind < 3:
        return f"({inner()}{chance.choice('+-*')}{inner()})"
    if kind == 3:
        return f"({inner()}/(1+abs({inner()})))"
    if kind == 4:
        return f"({inner()})**{chance.choice(['2', '3', '4', '0.5', '1.5', '-1', '0.3', '2.5', '6'])}"
    if kind == 5:
        return f"sqrt(({inner()})**2)"
    if kind == 6:
        return f"exp(-{chance.choice(['', '2*', '0.1*', '40*'])}abs({inner()}))"
    if kind == 7:
        return f"where(r{chance.choice(['<', '<=', '>', '>='])}{chance.uniform(0.1, 2):.3g},{inner()},{inner()})"
    if kind == 8:
        return f"{chance.choice(['minimum', 'maximum'])}({inner()},{inner()})"
    if kind == 9:
        return chance.choice(["log1p(abs({}))", "square({})", "abs({})", "exp({})", "log(2+abs({}))"]).format(inner())
    if kind == 10:
        return f"((r<{chance.uniform(0.2, 2):.3g})*({inner()}))"
    return f"(({inner()})*({inner()}))"


def formula(chance: random.Random) -> str:
    """Return a random formula that is 1 at 0 where it has a value there, and mostly falls."""
    while True:
        text = chance.choice(
            ["{}", "({})**2", "({})*({})", "sqrt(({})**2)*exp(-r)", "abs({})*exp(-r**2)", "exp(-abs({}))"]
        )
        text = text.replace("{}", "\0")
        while "\0" in text:
            text = text.replace("\0", written(chance), 1)
        start = exact(text, 0.0)
        if start is not None and 1e-100 < start < 1e100:
            return text if start == 1 else f"({text})/{float(start)!r}"


@cache
def _code(text: str) -> Any:
    return compile(text, "formula", "eval")


def exact(text: str, r: float) -> Any:
    """Return what Python makes of a formula in 40 digits; None where it has no value."""
    with mpmath.workdps(40):
        try:
            found = eval(_code(text), {"__builtins__": {}}, {**_DIGITS, "r": mpmath.mpf(r)})
            found = mpmath.mpf(found)
        except (ArithmeticError, ValueError, TypeError):
            return None
        return found if mpmath.isfinite(found) else None


def judged(text: str, compiled: bool) -> tuple[str, str]:
    """Return how a formula ends, and what was wrong of it."""
    right = [exact(text, r) for r in _DISTANCES]
    sound = all(k is not None and k >= 0 for k in right)
    function = eval(f"lambda r: {text}", dict(_NUMPY))  # of this module's own words
    ended = []
    for k in (text, function):
        begun = time.process_time()
        try:
            kernel = Formula(k)
            ended.append(_values(kernel, right) or _averages(kernel, text, compiled and k is text))
        except NlflowError as error:
            told = str(error)
            own = any(words in told for words in ("loses its digits", "more than", "too small"))
            ended.append(LOST if own else REFUSED if not sound or not _dense(text) else f"WRONGLY REFUSED: {told}")
        except Exception as error:
            ended.append(f"FOREIGN {type(error).__name__}: {error}")
        if not compiled and time.process_time() - begun > _SLOW:
            ended.append(f"SLOW: {time.process_time() - begun:.1f} s")
    bad = [one for one in ended if one not in (RIGHT, REFUSED, LOST)]
    return (bad[0].split(":")[0].split(" of ")[0], f"{text}: {bad[0]}") if bad else (ended[0], "")


def _dense(text: str) -> bool:
    """Whether a formula has values >= 0 at many more distances."""
    found = [exact(text, float(np.float32(r))) for r in (*np.geomspace(1e-12, 1e12, 300), *np.linspace(0, 16, 900))]
    return all(k is not None and k >= 0 for k in found)


def _values(kernel: Formula, right: list[Any]) -> str:
    logs = kernel.log_profile(np.array(_DISTANCES) ** 2)
    for r, log, k in zip(_DISTANCES, logs, right, strict=True):
        if k is None or k < 0:
            return f"WRONG: a value of {math.exp(min(log, 700))} at {r}, where there is none"
        with mpmath.workdps(40):  # mpmath.log of more digits than it works with can be wrong beside powers of two
            wanted = float(mpmath.log(k)) if k > 0 else -math.inf
        if max(log, wanted) > -690 and not abs(log - wanted) <= _CLOSE * (1 + abs(wanted)):
            return f"WRONG: log k = {log} at {r}, not {wanted}"
    return ""


def _averages(kernel: Formula, text: str, compiled: bool) -> str:
    """Return whether averages of all methods are right."""
    import torch

    nodes = np.float64(np.float32(_NODES))
    u = np.cos(3 * nodes)
    distances = np.abs(nodes[:, None] - nodes)
    k = np.array([[float(exact(text, r) or 0) for r in row] for row in distances])
    right = k @ u / k.sum(axis=1)
    line = Grid(10, spacing=0.25, boundary="isolated")
    steps = np.array([float(exact(text, 0.25 * i) or 0) for i in range(10)])
    on_grid = steps[np.abs(np.subtract.outer(np.arange(10), np.arange(10)))]
    v = np.cos(np.arange(10.0))
    calls: dict[str, tuple[Callable[[], Any], Any]] = {
        "dense": (lambda: affinity(kernel, Points(nodes), method="dense").average(u), right),
        "tensors": (
            lambda: affinity(kernel, Points(nodes), torch.tensor(nodes[:, None])).average(torch.tensor(u)),
            right,
        ),
        "stencil": (lambda: affinity(kernel, line, method="stencil").average(v), on_grid @ v / on_grid.sum(axis=1)),
        "grid": (lambda: affinity(kernel, line).average(v), on_grid @ v / on_grid.sum(axis=1)),
    }
    if compiled and kernel_code(kernel):
        calls["pairwise"] = lambda: affinity(kernel, Points(nodes), method="pairwise").average(u), right
    for name, (call, wanted) in calls.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that nodes see no other
            error = float(np.abs(np.asarray(call()) - wanted).max())
        if not error <= _CLOSE:
            return f"WRONG: an average of {name} is off by {error}"
    return RIGHT


def kernel_code(kernel: Formula) -> bool:
    """Whether a kernel has compiled sums."""
    from nlflow.affinities.pair_sums import not_compiled

    return not_compiled(kernel) is None


@dataclass(frozen=True)
class Formulas:
    """So many random formulas."""

    count: int
    seed: int

    def __call__(self) -> Row:
        """Try them."""
        begun, chance = time.perf_counter(), random.Random(self.seed)
        ends: Counter[str] = Counter()
        failed: list[str] = []
        judged("exp(-r)", compiled=True)  # loads what all need
        for number in range(self.count):
            end, what = judged(formula(chance), number % _COMPILED == 0)
            ends[end] += 1
            failed += [what] if what else []
        wrong = sum(ends.values()) - sum(ends[good] for good in (RIGHT, REFUSED, LOST))
        details = {"failed": failed[:20]}
        return Row("random formulas", self.count, dict(ends), 0, wrong, time.perf_counter() - begun, details)


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit status: 1 if a value was wrong or an error foreign."""
    parser = argparse.ArgumentParser(prog="python -m validation.robustness.formulas", description=__doc__)
    parser.add_argument("--count", type=int, default=2000, help="formulas (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("robustness-output"), help="folder (%(default)s)")
    args = parser.parse_args(arguments)
    make_folder(args.out)
    title, command = "Random formulas of kernels", "python -m validation.robustness.formulas"
    table = campaign_table(args.out, "formulas", title, command)
    run_trials([Case("formulas", Formulas(args.count, args.seed))], table)
    return int(not all(entry.row.good for entry in table.entries))


if __name__ == "__main__":
    sys.exit(main())
