"""The kinds of study by name."""

from __future__ import annotations

from nlflow.study.contract import Kind
from nlflow.study.equilibrium import EquilibriumStudy
from nlflow.study.mixing import Mixing
from nlflow.study.monte_carlo import MonteCarlo
from nlflow.study.space_order import SpaceOrder
from nlflow.study.stability import Stability
from nlflow.study.time_order import TimeOrder

__all__ = ["KINDS"]

KINDS: dict[str, Kind] = {
    kind.name: kind for kind in (TimeOrder(), SpaceOrder(), MonteCarlo(), Mixing(), EquilibriumStudy(), Stability())
}
