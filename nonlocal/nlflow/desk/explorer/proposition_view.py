"""What "Proposition" computes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nlflow.affinities import affinity
from nlflow.backends.threads import one_loop_thread
from nlflow.desk.explorer.texts import shell
from nlflow.domains import Domain, Grid, Points
from nlflow.equilibria import diversity, diversity_bounds, equilibrium
from nlflow.errors import check_choice, check_number
from nlflow.flows.gradient import GradientFlow
from nlflow.functionals.energies import E
from nlflow.kernels import Gaussian
from nlflow.markov import MarkovChain

Floats = NDArray[np.float64]

NODES = 96
_POINTS = f"np.random.default_rng(1).random(({NODES}, 2))"
#: The nodes, what they are called, and the program that makes them.
_DOMAINS: dict[str, tuple[Callable[[], Domain], str]] = {
    "grid": (lambda: Grid(NODES, spacing=1 / NODES), f"domain = Grid({NODES}, spacing={1 / NODES!r})"),
    "points": (lambda: Points(np.random.default_rng(1).random((NODES, 2))), f"domain = Points({_POINTS})"),
}


def _step(domain: Domain, modes: Floats) -> Floats:
    noise = np.random.default_rng(0).normal(size=domain.size)
    return np.asarray(np.sign(domain.nodes[:, 0] - 0.5) + 0.3 * noise)


#: The signals, from the domain and the eigenvectors of P by decreasing eigenvalue; and the programs that make them.
_SIGNALS: dict[str, tuple[Callable[[Domain, Floats], Floats], str]] = {
    "step": (_step, "noise = np.random.default_rng(0).normal(size=domain.size)\n"
                    "observed = np.sign(domain.nodes[:, 0] - 0.5) + 0.3 * noise"),
    "noise": (lambda domain, modes: np.random.default_rng(0).normal(size=domain.size),
              "observed = np.random.default_rng(0).normal(size=domain.size)"),
    "slowest": (lambda domain, modes: np.asarray(modes[:, 1] / np.abs(modes[:, 1]).max()),
                "observed = modes[:, 1] / np.abs(modes[:, 1]).max()"),
    "fastest": (lambda domain, modes: np.asarray(modes[:, -1] / np.abs(modes[:, -1]).max()),
                "observed = modes[:, -1] / np.abs(modes[:, -1]).max()"),
}  # fmt: skip
#: Where the curves over the fidelity are computed.
FIDELITIES = np.geomspace(1e-3, 1e2, 41)
COMMAND_NOTE = "The command runs the Python text and saves its arrays as proposition.npz, a new file."


@dataclass(frozen=True)
class PropositionSettings:
    """Settings."""

    domain: str = "grid"  # {'grid', 'points'}: the unit interval, or points by chance in the unit square
    signal: str = "step"  # {'step', 'noise', 'slowest', 'fastest'}: the last two are eigenvectors of P
    width: float = 0.05  # of the Gaussian kernel
    fidelity: float = 0.1  # lambda~ > 0, in the degree metric

    def __post_init__(self) -> None:
        check_choice("domain", self.domain, tuple(_DOMAINS))
        check_choice("signal", self.signal, tuple(_SIGNALS))
        check_number("width", self.width, minimum=0, strict=True)
        check_number("fidelity", self.fidelity, minimum=0, strict=True, hint="without it the limit is constant")


def compute(settings: PropositionSettings, known: SimpleNamespace | None = None) -> SimpleNamespace:
    with one_loop_thread():  # starting a second one takes longer than these small problems
        setup = settings.domain, settings.signal, settings.width
        made = known if known is not None and known.setup == setup else _prepared(settings)
        return SimpleNamespace(**{**vars(made), **_at(made, settings.fidelity), "setup": setup})


def _prepared(settings: PropositionSettings) -> SimpleNamespace:
    domain = _DOMAINS[settings.domain][0]()
    weights = affinity(Gaussian(settings.width), domain)
    chain = MarkovChain(weights)
    root = np.sqrt(chain.stationary)
    values, vectors = np.linalg.eigh(root[:, None] * chain.matrix() / root)
    rates, modes = 1 - values[::-1], vectors[:, ::-1] / root[:, None]
    observed = _SIGNALS[settings.signal][0](domain, modes)
    made = SimpleNamespace(domain=domain, weights=weights, rates=rates, modes=modes, observed=observed)
    made.law = chain.stationary
    found = [_at(made, float(one)) for one in FIDELITIES]
    made.curves = np.array([[one["bounds"][0], one["kept"], one["bounds"][1]] for one in found]).T
    return made


def _at(made: SimpleNamespace, fidelity: float) -> dict[str, Any]:
    flow = GradientFlow(E(made.weights, made.observed, fidelity, measure="degree"), metric="degree")
    limit = equilibrium(flow).u
    given, left = diversity(flow, made.observed), diversity(flow, limit)
    return {"limit": limit, "kept": left / given, "bounds": diversity_bounds(flow), "diversities": (given, left)}


def as_python(settings: PropositionSettings) -> str:
    return f"""import numpy as np
from nlflow import E, Gaussian, GradientFlow, Grid, MarkovChain, Points
from nlflow import affinity, diversity, diversity_bounds, equilibrium

{_DOMAINS[settings.domain][1]}
weights = affinity(Gaussian({settings.width!r}), domain)

chain = MarkovChain(weights)
root = np.sqrt(chain.stationary)  # P is symmetric in the measure of its stationary law
values, vectors = np.linalg.eigh(root[:, None] * chain.matrix() / root)
rates, modes = 1 - values[::-1], vectors[:, ::-1] / root[:, None]

{_SIGNALS[settings.signal][1]}
flow = GradientFlow(E(weights, observed, {settings.fidelity!r}, measure="degree"), metric="degree")
limit = equilibrium(flow).u
kept = diversity(flow, limit) / diversity(flow, observed)
bounds = diversity_bounds(flow)
print("kept", kept, "between", bounds)
"""


def as_command(settings: PropositionSettings) -> str:
    given = ", ".join(f"{name}={name}" for name in ("observed", "limit", "kept", "bounds", "rates", "modes"))
    return shell(as_python(settings), "proposition.npz", f"np.savez(file, {given})")
