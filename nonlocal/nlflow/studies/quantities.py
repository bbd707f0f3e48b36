"""Symbols, words and units of measured quantities."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Quantity:
    """A quantity: its symbol in LaTeX, its words and its unit."""

    symbol: str
    words: str = ""
    unit: str = ""

    @property
    def label(self) -> str:
        text = f"{self.words} ${self.symbol}$" if self.words else f"${self.symbol}$"
        return f"{text} [{self.unit}]" if self.unit else text

    @property
    def heading(self) -> str:
        return f"${self.symbol}$ [{self.unit}]" if self.unit else f"${self.symbol}$"


_NORM = r"\|P^k v - \pi^{\mathsf{T}} v\|_\pi"
_TIME = "time of the flow"
_RATE = "1 / time"

QUANTITIES: Mapping[str, Quantity] = {
    "nodes": Quantity("N", "nodes along an axis"),
    "spacing": Quantity("h = 1/N", "spacing", "side of the domain"),
    "dimension": Quantity(r"\mathrm{dim}", "dimension"),
    "channels": Quantity("D", "channels"),
    "fidelity": Quantity(r"\lambda", "fidelity", _RATE),
    "degree_fidelity": Quantity(r"\tilde\lambda", "fidelity", _RATE),
    "t": Quantity("T", "time", _TIME),
    "dt": Quantity(r"\Delta t", "step", _TIME),
    "order": Quantity("p", "order"),
    "k": Quantity("k", "steps of the chain"),
    "distance": Quantity(_NORM, "distance to the limit"),
    "total_variation": Quantity(r"\max_i \|P^k_i - \pi\|_{\mathrm{TV}}", "distance to the limit"),
    "mu_2": Quantity(r"|\mu_2|", "second eigenvalue of P"),
    "rate": Quantity("r", "rate"),
    "rate_predicted": Quantity(r"r_{\mathrm{theory}}", "rate predicted"),
    "rate_ratio": Quantity(r"r / r_{\mathrm{theory}}", "rate, measured over predicted"),
    "gap": Quantity(r"\gamma", "spectral gap", _RATE),
    "mixing_time": Quantity(r"k_{\mathrm{mix}}", "mixing time", "steps"),
    "lower": Quantity(r"k_{\mathrm{low}}", "lower bound", "steps"),
    "upper": Quantity(r"k_{\mathrm{high}}", "upper bound", "steps"),
    "diversity": Quantity(r"\|u^* - \bar u^*\|_m / \|f - \bar f\|_m", "diversity kept"),
    "growth": Quantity("g", "growth of a disturbance in one step"),
    "growth_predicted": Quantity(r"\rho(P - \tilde\lambda I)", "growth predicted"),
    "limit": Quantity(r"1 + \mu_{\min}", "largest stable fidelity"),
    "error_rms": Quantity(r"e_{\mathrm{rms}}", "error, root mean square"),
    "error_median": Quantity(r"e_{50\,\%}", "error, median"),
    "low_95": Quantity(r"e_{2.5\,\%}", "error, lower end of 95 %"),
    "high_95": Quantity(r"e_{97.5\,\%}", "error, upper end of 95 %"),
    "predicted": Quantity(r"C n^{-1/2}", "error predicted"),
    "error": Quantity("e", "error"),
}
"""The columns of all kinds that are quantities; other columns are words."""

ERRORS: Mapping[str, str] = {
    "time-order": r"error $\|u_{\Delta t}(T) - u(T)\|_m$",
    "space-order": r"error of $Pu$, root mean square at 4 nodes",
    "monte-carlo": r"error of $Pu$, root mean square at the targets (median, 95 % of draws)",
    "samples": r"error $\|Pv - s q\|_2$ (median, 95 % of draws)",
}
"""What the error of each kind is, for its axis."""

PHRASES: Mapping[str, str] = {
    "|P^k v - pi v|": f"${_NORM}$",
    "order in dt": r"order in $\Delta t$",
    "order in 1/N": r"order in $1/N$",
    "order in N": r"order in $N$",
    "order in n": r"order in $n$",
    "C n^(-1/2)": r"$C n^{-1/2}$",
    "l2": r"$\ell^2$",
}
"""Words of fits and settings as mathematics."""


def in_math(words: str) -> str:
    for plain in sorted(PHRASES, key=len, reverse=True):
        if words == plain or (len(plain) > 2 and plain in words):
            return PHRASES[plain].join(in_math(part) if part else "" for part in words.split(plain, 1))
    return words.replace("$", r"\$")


def setting_in_math(setting: Mapping[str, Any]) -> str:
    parts = []
    for name, value in setting.items():
        shown = f"{value:g}" if isinstance(value, float) else str(value)
        if name == "dimension":
            parts.append(f"{shown}-D")
        elif name == "metric":
            parts.append(r"metric $\ell^2$" if shown == "l2" else f"metric of {shown}s")
        elif name in QUANTITIES:
            parts.append(f"${QUANTITIES[name].symbol} = {shown}$")
        elif name == "what":
            parts.append(in_math(shown))
        else:
            parts.append(shown.replace("$", r"\$").replace(":", " ").replace(",", " "))
    return ", ".join(parts)
