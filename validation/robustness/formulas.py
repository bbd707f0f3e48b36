"""Random formulas of kernels against Python's own evaluation: ``python -m validation.robustness.formulas``.

Each is given as text and as a function of NumPy. What mpmath makes of the same text in 40 digits is what is right: of
log k from 0 to 1e9 widths, and of averages by every method. A refusal is right where the formula is negative, infinite
or no number somewhere, is not 1 at 0, or loses its digits in floats; where NumPy alone keeps them it is told apart, as
too strict. Nothing may end in an error that is not by name, take more than two seconds, or give another value.
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
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any, Final

import mpmath
import numpy as np

from nlflow import Formula, Grid, Points, affinity
from nlflow.backends.threads import blas_limited, one_loop_thread, one_torch_thread
from nlflow.errors import InputError, NlflowError
from nlflow.kernels.expressions import SQUARED
from nlflow.kernels.forms import called
from nlflow.store.atomic import make_folder
from nlflow.studies.cases import Case
from validation.robustness.contract import Row, campaign_table, run_trials

RIGHT: Final = "right"
REFUSED: Final = "refused: no kernel"
LOST: Final = "refused: loses its digits in floats"
STRICT: Final = "refused: NumPy alone has it right"
_GOOD: Final = (RIGHT, REFUSED, LOST, STRICT)
_SLOW: Final = 2.0  # seconds of the processor, without the time that code takes to be compiled
_CLOSE: Final = 1e-7  # of log k beside 1, and of averages
_DISTANCES: Final = [0.0, *(float(np.float32(r)) for r in np.geomspace(1e-9, 1e9, 25)), 0.3, 0.7, 1.3, 1.9, 2.6, 3.7]
_NODES: Final = np.float64(np.float32(np.random.default_rng(0).random(10) * 3))
_SIGNAL: Final = np.cos(3 * _NODES)
_LINE: Final = np.cos(np.arange(10.0))
_NOTHING: Final = -690.0  # log k, beside which no weight counts
_LARGEST: Final = 1e148  # of weights
_COMPILED: Final = 100  # one formula in so many is compiled, which takes a second
_FARTHEST: Final = mpmath.mpf(10) ** 3000  # exponents beyond which mpmath's exp takes memory and time without end

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


class _Exponential:
    """exp of mpmath, infinite or 0 for exponents that are too large for it, which `cut` tells."""

    cut = False

    def __call__(self, x: Any) -> Any:
        if abs(x) <= _FARTHEST:
            return mpmath.exp(x)
        self.cut = True
        return mpmath.inf if x > 0 else mpmath.mpf(0)


_exponential: Final = _Exponential()
_DIGITS: Final[dict[str, Any]] = {
    name: _real(function)
    for name, function in {
        "sqrt": mpmath.sqrt, "square": lambda x: x * x, "exp": _exponential, "log": mpmath.log, "log1p": mpmath.log1p,
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


def of_numpy(text: str) -> Callable[[Any], Any]:
    """Return a formula as a function of NumPy."""
    function: Callable[[Any], Any] = eval(f"lambda r: {text}", dict(_NUMPY))  # of this module's own words
    return function


def in_floats(text: str, r: Sequence[float]) -> Any:
    """Return what NumPy makes of a formula."""
    with np.errstate(all="ignore"):
        return np.asarray(of_numpy(text)(np.array(r)), np.float64) * np.ones(len(r))


def exact(text: str, r: float) -> Any:
    """Return what Python makes of a formula in 40 digits; None where it has no value, NaN where mpmath does not tell.

    Where mpmath divides by 0, or takes the root of a branch that is not chosen, NumPy says what comes of it.
    """
    _exponential.cut = False
    with mpmath.workdps(40):
        try:
            found = mpmath.mpf(eval(_code(text), {"__builtins__": {}}, {**_DIGITS, "r": mpmath.mpf(r)}))
        except (ArithmeticError, ValueError, TypeError):
            found = mpmath.mpf(float(in_floats(text, [r])[0]))
        if mpmath.isfinite(found):
            return found
        return mpmath.nan if _exponential.cut else None


def _rows(k: Any) -> Any:
    """Return exact weights over their sums, as floats: the weights themselves may have none."""
    return np.float64(k / k.sum(axis=1, keepdims=True))


def _is_weight(k: Any) -> bool:
    """Whether an exact value is one that a kernel can have, as far as it is known."""
    return k is not None and not k < 0


@dataclass(frozen=True)
class Exact:
    """Values and averages of a formula in 40 digits, which all its kernels are compared with."""

    text: str

    @cached_property
    def values(self) -> list[Any]:
        """At all distances that are compared."""
        return [exact(self.text, r) for r in _DISTANCES]

    @cached_property
    def sound(self) -> bool:
        """Whether it is >= 0 at these, and at many more; first where NumPy doubts it, which takes less time."""
        more = np.float64(np.float32([*np.geomspace(1e-12, 1e12, 300), *np.linspace(0, 16, 900)]))
        more = more[np.argsort(in_floats(self.text, more) >= 0, kind="stable")]
        return all(map(_is_weight, self.values)) and all(_is_weight(exact(self.text, float(r))) for r in more)

    @cached_property
    def averages(self) -> tuple[Any, Any]:
        """Of a signal on `_NODES`, and of one on `_LINE`."""
        distances, places = np.unique(np.abs(_NODES[:, None] - _NODES), return_inverse=True)
        k = np.array([exact(self.text, r) or mpmath.mpf(0) for r in distances])[places].reshape(len(_NODES), -1)
        on_grid = self.steps[np.abs(np.subtract.outer(np.arange(10), np.arange(10)))]
        return _rows(k) @ _SIGNAL, _rows(on_grid) @ _LINE

    @cached_property
    def steps(self) -> Any:
        """Values at the offsets of a grid."""
        return np.array([exact(self.text, 0.25 * i) or mpmath.mpf(0) for i in range(10)])

    def wrong(self, logs: Any) -> str:
        """Return what is wrong of log k at `_DISTANCES`; nothing where all are right."""
        for r, log, k in zip(_DISTANCES, logs, self.values, strict=True):
            if not _is_weight(k):
                return f"WRONG: a value of {math.exp(min(log, 700))} at {r}, where there is none"
            if mpmath.isnan(k):
                continue
            with mpmath.workdps(40):  # mpmath.log of more digits than it works with can be wrong beside powers of two
                wanted = float(mpmath.log(k)) if k > 0 else -math.inf
            if not (max(log, wanted) <= _NOTHING or abs(log - wanted) <= _CLOSE * (1 + abs(wanted))):
                return f"WRONG: log k = {log} at {r}, not {wanted}"
        return ""


def judged(text: str, compiled: bool) -> tuple[str, str]:
    """Return how a formula ends, and what was wrong of it, or refused without need."""
    right, function, ended, known = Exact(text), of_numpy(text), [], ""
    for k in (text, function):
        begun = taken = time.process_time()
        try:
            if known and str(called(function, SQUARED**0.5, "k", "") * 1) == known:
                continue  # the same expression is the same kernel, which need not be seen twice
            kernel = Formula(k)
            logs = kernel.log_profile(np.array(_DISTANCES) ** 2)
            taken = time.process_time()
            ended.append(right.wrong(logs) or _averages(kernel, right, compiled))
            known = str(kernel._written)
        except NlflowError as error:
            taken = time.process_time()
            ended.append(_refused(str(error), right))
        except Exception as error:
            ended.append(f"FOREIGN {type(error).__name__}: {error}")
        if taken - begun > _SLOW:
            ended.append(f"SLOW: {taken - begun:.1f} s")
    bad = [one for one in ended if one not in _GOOD]
    if bad:
        return bad[0].split(":")[0].split(" of ")[0], f"{text}: {bad[0]}"
    return ended[0], text if ended[0] == STRICT else ""


def _refused(told: str, right: Exact) -> str:
    """Return which kind of refusal it is: what NumPy makes of the formula in float64 says whether it was needed."""
    if not right.sound:
        return REFUSED
    if not any(words in told for words in ("loses its digits", "no number in floats", "more than", "too small")):
        return f"WRONGLY REFUSED: {told}"
    with np.errstate(all="ignore"):
        return LOST if right.wrong(np.log(in_floats(right.text, _DISTANCES))) else STRICT


def _averages(kernel: Formula, right: Exact, compiled: bool) -> str:
    """Return whether averages of all methods are right."""
    import torch

    nodes, line = Points(_NODES), Grid(10, spacing=0.25, boundary="isolated")
    on_nodes, on_line = right.averages
    tensors = torch.tensor(_NODES[:, None]), torch.tensor(_SIGNAL)
    calls: dict[str, tuple[Callable[[], Any], Any]] = {
        "dense": (lambda: affinity(kernel, nodes, method="dense").average(_SIGNAL), on_nodes),
        "tensors": (lambda: affinity(kernel, nodes, tensors[0]).average(tensors[1]), on_nodes),
        "stencil": (lambda: affinity(kernel, line, method="stencil").average(_LINE), on_line),
        "grid": (lambda: affinity(kernel, line).average(_LINE), on_line),
        "dense grid": (lambda: affinity(kernel, line, method="dense").average(_LINE), on_line),
    }
    grows = max(right.steps) > _LARGEST  # sums on grids are refused then, for method='dense'
    if compiled and kernel_code(kernel):
        calls["pairwise"] = lambda: affinity(kernel, nodes, method="pairwise").average(_SIGNAL), on_nodes
    for name, (call, wanted) in calls.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that nodes see no other
            try:
                error = float(np.abs(np.asarray(call()) - wanted).max())
            except InputError as refusal:
                if grows and name in ("stencil", "grid") and "method='dense'" in str(refusal):
                    continue
                raise
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
        begun, spent, chance = time.perf_counter(), time.process_time(), random.Random(self.seed)
        ends: Counter[str] = Counter()
        failed: list[str] = []
        strict: list[str] = []
        judged("exp(-r)", compiled=True)  # loads what all need
        with one_loop_thread(), blas_limited(), one_torch_thread():  # which are as fast for sums so short
            for number in range(self.count):
                end, what = judged(formula(chance), number % _COMPILED == 0)
                ends[end] += 1
                (strict if end == STRICT else failed).extend([what] if what else [])
        wrong = sum(ends.values()) - sum(ends[good] for good in _GOOD)
        taken = f"{time.process_time() - spent:.0f}"
        details = {"failed": failed[:20], "strict": strict[:20], "processor seconds": taken}
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
