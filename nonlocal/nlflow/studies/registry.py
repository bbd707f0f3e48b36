"""The kinds of study by name."""

from __future__ import annotations

from nlflow.studies.contract import Kind
from nlflow.studies.equilibrium import EquilibriumStudy
from nlflow.studies.mixing import Mixing
from nlflow.studies.monte_carlo import MonteCarlo
from nlflow.studies.space_order import SpaceOrder
from nlflow.studies.stability import Stability
from nlflow.studies.time_order import TimeOrder

__all__ = ["KINDS"]

KINDS: dict[str, Kind] = {
    kind.name: kind for kind in (TimeOrder(), SpaceOrder(), MonteCarlo(), Mixing(), EquilibriumStudy(), Stability())
}
