"""Random linear systems against dense solutions in extended precision: ``python -m validation.robustness.systems``.

Fidelities of 1e-8 to 1e12, nodes that are held, large logits, both metrics, symmetric or not. The reference eliminates
node after node without a subtraction, in 80-bit floats, from the weights off the diagonal. A result that calls itself
solved is wrong from a relative error of 1e-6 on; what is not solved has to say so.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nlflow import (
    IMEX,
    AttentionFlow,
    Constraint,
    ConvexSplitting,
    E,
    ExpDotProduct,
    Gaussian,
    GradientFlow,
    Grid,
    Points,
    SemiImplicit,
    affinity,
    affinity_from_graph,
    equilibrium,
)  # fmt: skip
from nlflow.errors import InputError, NlflowError
from nlflow.flows.integrators.base import StepFailureError
from nlflow.markov import MarkovChain
from nlflow.store.atomic import locked, make_folder
from nlflow.studies.cases import Case
from validation.robustness.contract import Row, campaign_table, run_trials

ALLOWED = 1e-6
PRECONDITIONERS = ("auto", "diagonal", "transform", "multigrid", "direct", "graph", "sweeps")
METHODS = ("auto", "iterative", "direct")
Exact = np.longdouble


@dataclass(frozen=True)
class System:
    """A flow and its rates in extended precision: `rates` of moving, `phi`, `f`, and values `g` at nodes `held`."""

    flow: Any
    rates: Any
    phi: Any
    f: Any
    held: Any
    g: Any

    def solved(self, b: Any, lift: float = 0.0, s: float = 1.0) -> Any:
        """Return u with (lift + s A) u = b at free nodes, and the values at held ones."""
        free, u = ~self.held, self.g.copy()
        rates = s * self.rates
        stopped = lift + s * self.phi[free] + rates[np.ix_(free, self.held)].sum(axis=1)
        right = b[free] + rates[np.ix_(free, self.held)] @ self.g[self.held]
        u[free] = eliminated(rates[np.ix_(free, free)], stopped, right)
        return u

    def operator(self, u: Any) -> Any:
        """Return A u, from differences."""
        return (self.rates * (u[:, None] - u)).sum(axis=1) + self.phi * u


def eliminated(rates: Any, stopped: Any, b: Any) -> Any:
    """Solve (diag(stopped) + L) u = b, L being the Laplacian of rates; nothing but b can cancel."""
    a, k, b = rates.copy(), stopped.copy(), b.copy()
    n, left = len(a), np.zeros(len(a), Exact)
    np.fill_diagonal(a, 0)
    for i in range(n - 1, -1, -1):
        left[i] = k[i] + a[i, :i].sum()
        share = a[:i, i] / left[i]
        k[:i] += share * k[i]
        b[:i] += share * b[i]
        a[:i, :i] += share[:, None] * a[i, :i]
        np.fill_diagonal(a[:i, :i], 0)
    u = np.zeros(n, Exact)
    for i in range(n):
        u[i] = (b[i] + a[i, :i] @ u[:i]) / left[i]
    return u


def drawn(seed: int) -> System:
    """Draw a system."""
    rng = np.random.default_rng(seed)
    n = int(rng.integers(2, 25))
    kind, metric = rng.choice(["gaussian", "graph", "logits"]), rng.choice(["l2", "degree", "attention"])
    if kind == "logits":
        x, q = rng.normal(size=(2, n, 4)) * rng.choice([0.5, 2.0, 6.0])
        queries = None if rng.random() < 0.4 else q
        k = affinity(ExpDotProduct(), Points(np.arange(float(n))), x, queries=queries)
        logs = (x if queries is None else q).astype(Exact) @ x.astype(Exact).T / 2
        kernel, weights = np.exp(logs), np.full(n, Exact(1) / n)
    elif kind == "graph":
        kernel = 10.0 ** rng.uniform(-8, 0, (n, n)) * (rng.random((n, n)) < 0.4)
        kernel = kernel + np.diag(10.0 ** rng.uniform(-8, 0, n - 1), 1)
        kernel = np.triu(kernel, 1) + np.triu(kernel, 1).T
        k, weights, kernel = affinity_from_graph(kernel), np.ones(n, Exact), kernel.astype(Exact)
    else:
        k = affinity(Gaussian(rng.uniform(0.5, 2.0)), Grid(n, boundary=rng.choice(["isolated", "periodic", "reflect"])))
        weights = np.ones(n, Exact)
        kernel = MarkovChain(k).matrix().astype(Exact) * k.degree[:, None]
        kernel = (kernel + kernel.T) / 2
    if metric != "attention":
        kernel = kernel + kernel.T
    rates = kernel * weights
    degree = rates.sum(axis=1)
    phi = 10.0 ** rng.uniform(-8, 12, n)
    style = rng.choice(["number", "each", "one", "zeros"])
    if style == "number":
        phi = np.full(n, phi[0])
    if style == "one":
        phi = np.where(np.arange(n) == rng.integers(n), phi.max(), 0.3)
    if style == "zeros":
        phi = np.where(rng.random(n) < 0.5, 0.0, phi)
        phi[rng.integers(n)] = 1.0
    f, held, g = rng.normal(size=n), np.zeros(n, bool), np.zeros(n, Exact)
    if n > 2 and rng.random() < 0.4:
        held[rng.choice(n, size=int(rng.integers(1, min(n, 4))), replace=False)] = True
        g[held] = values = rng.normal(size=held.sum())
    constraint = Constraint(np.flatnonzero(held), values) if held.any() else None
    given = float(phi[0]) if style == "number" else phi
    if metric == "attention":
        flow: Any = AttentionFlow(k, f, given, constraint=constraint)
    else:
        flow = GradientFlow(E(k, f, given, measure=metric), metric, constraint=constraint)
    exact = phi.astype(Exact)
    if metric != "l2":
        rates = rates / degree[:, None]
    np.fill_diagonal(rates, 0)
    return System(flow, rates, exact, f.astype(Exact), held, g)


Solver = tuple[str, Callable[[System, float], tuple[Any, bool]], Callable[[System, float], Any]]


def solvers() -> Iterator[Solver]:
    """Yield a solver's name, what it finds and whether it says success, and the exact result; of a system and dt."""

    def limit(system: System, dt: float) -> Any:
        del dt
        return system.solved(system.phi * system.f)

    def minimizer(name: str) -> Callable[[System, float], tuple[Any, bool]]:
        def found(system: System, dt: float) -> tuple[Any, bool]:
            del dt
            functional = system.flow.functional
            if functional is None:
                raise InputError("flow: got one without a functional")
            result = functional.minimizer(constraint=system.flow.terms.constraint, preconditioner=name)
            return result.u, result.success

        return found

    def limited(method: str) -> Callable[[System, float], tuple[Any, bool]]:
        def found(system: System, dt: float) -> tuple[Any, bool]:
            del dt
            result = equilibrium(system.flow, method=method)
            return result.u, result.success

        return found

    def step(kind: Any) -> Callable[[System, float], tuple[Any, bool]]:
        def found(system: System, dt: float) -> tuple[Any, bool]:
            integrator = kind(dt)
            integrator.check(system.flow)
            try:
                start = system.flow.held(system.f.astype(float))
                return system.flow.held(integrator.step(system.flow, start, dt)), True
            except StepFailureError:
                return None, False

        return found

    def split(system: System, dt: float) -> Any:
        u = np.where(system.held, system.g, system.f)
        return system.solved(u + dt * system.phi * system.f, 1.0, dt)

    def imex(system: System, dt: float) -> Any:
        u = np.where(system.held, system.g, system.f)
        h, g = Exact(dt), 1 - np.sqrt(Exact(1) / 2)
        a = system.solved(u + h * g * system.phi * system.f, 1.0, h * g)
        moved = system.phi * system.f - system.operator(a)
        return system.solved(u + h * (1 - g) * moved + h * g * system.phi * system.f, 1.0, h * g)

    def semi(system: System, dt: float) -> Any:
        u = np.where(system.held, system.g, system.f)
        moved = u - dt * (system.operator(u) - system.phi * u)
        return np.where(system.held, system.g, (moved + dt * system.phi * system.f) / (1 + dt * system.phi))

    for name in PRECONDITIONERS:
        yield f"minimizer, {name}", minimizer(name), limit
    for method in METHODS:
        yield f"equilibrium, {method}", limited(method), limit
    yield "IMEX", step(IMEX), imex
    yield "ConvexSplitting", step(ConvexSplitting), split
    yield "SemiImplicit", step(SemiImplicit), semi


def tried(name: str, count: int, seed: int) -> Row:
    """Try one solver on `count` systems that are offered to it."""
    solve, exact = next((solve, exact) for own, solve, exact in solvers() if own == name)
    begun, outcomes, failed, worst = time.perf_counter(), Counter[str](), [], 0.0
    for number in range(seed, seed + count):
        system = drawn(number)
        dt = float(10.0 ** np.random.default_rng(number).uniform(-2, 2))
        with np.errstate(all="ignore"):
            expected = exact(system, dt)
        try:
            u, success = solve(system, dt)
        except InputError:
            outcomes["not offered"] += 1
            continue
        except NlflowError:
            outcomes["refused"] += 1
            continue
        error = float(np.abs(u - expected).max() / np.abs(expected).max()) if success else 0.0
        worst = max(worst, error)
        outcomes["solved" if success else "not solved"] += 1
        if not error <= ALLOWED:
            failed.append(f"system {number}, dt {dt:.3g}: relative error {error:.2g}")
    offered = count - outcomes["not offered"]
    share = 100 * (outcomes["not solved"] + outcomes["refused"]) / max(offered, 1)
    told = {f"{share:.1f} % not solved, and said so; largest error where solved {worst:.1g}": 0}
    details = {"worst": worst, "not solved": share, "failed": failed[:20]}
    return Row(f"{name}: {share:.1f} % not solved", count, {**outcomes, **told}, 0, len(failed),
               time.perf_counter() - begun, details)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit status: 1 if a result that calls itself solved is wrong."""
    parser = argparse.ArgumentParser(prog="python -m validation.robustness.systems", description=__doc__)
    add = parser.add_argument
    add("--systems", type=int, default=10_000, help="in all, shared out among the solvers (%(default)s)")
    add("--seed", type=int, default=0)
    add("--jobs", type=int, default=1, help="solvers at a time (%(default)s)")
    add("--out", type=Path, default=Path("robustness-output"), help="folder for the table (%(default)s)")
    args = parser.parse_args(arguments)
    names = [name for name, _, _ in solvers()]
    count = -(-args.systems // len(names))
    command = f"python -m validation.robustness.systems --systems {args.systems} --seed {args.seed}"
    table = campaign_table(args.out, "systems", "Random linear systems", command)
    with locked(make_folder(args.out), "--out"):
        trials = [Case(name, tried, (name, count, args.seed + i * count)) for i, name in enumerate(names)]
        run_trials(trials, table, jobs=args.jobs)
    print(f"table: {table.path.with_suffix('.md')}")
    return 0 if all(entry.row.wrong == 0 for entry in table.entries) else 1


if __name__ == "__main__":
    sys.exit(main())
