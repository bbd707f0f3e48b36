"""The columns of probes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf
from operator import attrgetter, methodcaller
from textwrap import indent
from typing import Any, TypeVar

Method = TypeVar("Method", bound=Callable[..., Any])


@dataclass(frozen=True)
class Column:
    """One column of the tables of probes."""

    name: str
    quantity: str  # in `Layer.quantities`, or in what `LayerTrace.spectra` returns
    # What `measure` takes and returns. 'state': a state (B, N, D) and the mask of its tokens, (B,). 'layer': the states
    # before, within and after a layer, and the mask, (B,). 'heads': `Averages`, (B, H). 'tokens': these, (B, H, N).
    # 'chain': one `Head`, a number or an `NlflowError`, O(N³). 'next': one and that of the next layer, a number, O(N²).
    of: str
    measure: Callable[..., Any]
    low: float
    high: float
    meaning: str
    label: str  # on the page; empty for a variant of the column before
    reduce: str | Callable[[Any], Any] = "mean"  # to one number of all values of a layer
    printed: bool = True  # by the command

    @property
    def by_head(self) -> bool:
        return bool(self.label) and self.of in ("heads", "chain")


def _metric(name: str) -> Callable[..., Any]:
    """Return a function of `metrics`, which is loaded when it is first called."""

    def measure(*args: Any, **kwargs: Any) -> Any:
        from nlflow.attention.probing import metrics

        return getattr(metrics, name)(*args, **kwargs)

    return measure


def _step(log_degrees: Any) -> Any:
    import numpy as np

    with np.errstate(over="ignore", under="ignore"):  # logits of any size
        return np.exp(-np.median(log_degrees))


_energy, _gradient = _metric("energy_per_token"), _metric("gradient_cosine")
_GAP = Column(
    "gap", "gap", "chain", attrgetter("spectral_gap"), 0, 1,
    "spectral gap 1 - |mu_2| of the heads' chains, mean; large: tokens are mixed in few layers",
    "spectral gap 1 − |μ₂|",
)  # fmt: skip
_STABLE = Column(
    "stable", "stable_fidelity", "chain", attrgetter("fidelity_limit"), 0, 2,
    "up to which lambda~ repeated steps of the explicit form converge, median of heads", "stable fidelity λ̃", "median",
)  # fmt: skip

COLUMNS = (
    Column(
        "cosine", "mean_cosine", "state", _metric("mean_cosine"), -1, 1,
        "mean cosine of two tokens after the layer; 1: all point the same way", "mean cosine of two tokens",
    ),
    Column(
        "t_sim", "token_similarity", "state", _metric("token_similarity"), 0, 1,
        "share of the mean token, |mean|^2 N / |X|^2; 1: all are equal", "share of the mean token",
    ),
    Column(
        "hfc_lfc", "hfc_lfc", "state", _metric("hfc_lfc"), 0, inf,
        "what differs between tokens over what is common, |X - mean| / |mean|; 0: all are equal",
        "what differs between tokens over what is common", printed=False,
    ),
    Column(
        "rank", "rank", "state", _metric("participation_rank"), 1, inf,
        "how many directions the tokens use, the participation ratio of the singular values; 1: multiples of one",
        "participation rank",
    ),
    Column(
        "J", "energy", "heads", lambda found: _energy(found.values, found.average, found.squares, mask=found.mask),
        0, inf, "energy of the values, 1/2 sum A_ij |v_i - v_j|^2 / N, mean of heads; 0: each averages equal values",
        "energy J of the values, per token",
    ),
    Column(
        "gradient", "gradient_cosine", "heads",
        lambda found: _gradient(found.values, found.average, found.symmetric, mask=found.mask), -1, 1,
        "cosine between the layer's direction and the gradient of J, mean of heads; 1: it is the flow of J",
        "cosine with the gradient of J",
    ),
    Column(
        "share", "attention_share", "layer", _metric("attention_share"), 0, 1,
        "attention's part of the way from state to state, norms of sums with it (the rest: MLP, cross-attention)",
        "share of attention in the layer's way",
    ),
    Column(
        "time_step", "log_degree", "tokens", attrgetter("log_degree"), 0, inf,
        "the step of the L2 flow that the layer is, 1 / d with the degree d, median of tokens and heads",
        "time step 1 / d", _step, printed=False,
    ),
    _GAP,
    replace(_GAP, name="gap_least", meaning="spectral gap, least of heads", label="", reduce="min", printed=False),
    replace(_GAP, name="gap_most", meaning="spectral gap, most of heads", label="", reduce="max", printed=False),
    Column(
        "mixing", "mixing_time", "chain", methodcaller("mixing_time"), 0, inf,
        "steps until a walker has forgotten where it began (total variation 1/4), median of heads",
        "mixing time in moves", "median",
    ),
    _STABLE,
    replace(_STABLE, name="stable_least", meaning="the same, least of heads; lambda~ should be below", label="",
            reduce="min"),
    Column(
        "redundancy", "redundancy", "next",
        lambda head, following: _metric("head_redundancy")(head.matrix, following.matrix), 0, 1,
        "cosine with the attention matrices of the next layer; 1: it attends as this one does",
        "cosine with the matrices of the next layer",
    ),
)  # fmt: skip
"""All columns, in the order of rows."""


def measures(of: str) -> dict[str, Callable[..., Any]]:
    return {column.quantity: column.measure for column in COLUMNS if column.of == of}


def write_columns(method: Method) -> Method:
    if method.__doc__ is not None:  # none under -OO
        ranges = [f">= {one.low}" if one.high == inf else f"{one.low} to {one.high}" for one in COLUMNS]
        lines = (f"- ``{one.name}`` ({span}): {one.meaning}" for one, span in zip(COLUMNS, ranges, strict=True))
        method.__doc__ = method.__doc__.replace("{columns}", indent("\n".join(lines), " " * 12).lstrip())
    return method


SPECTRA = {
    "omega": "eigenvalue of W_V W_O, summed over heads, of the largest modulus, with the gain of the norm before; its "
             "imaginary part is omega_imaginary",
    "omega_random": "the same of random weights of the same norms: the radius of their disc for a layer, what 95 % of "
                    "them stay below for a head",
    "scale": "s, what the norm before attention multiplies tokens by (median)",
    "smooth": "factor a layer of what tokens share: the largest |1 + s w| over the eigenvalues w of W_V W_O",
    "other": "factor a layer of what tells tokens apart, with the P of the first input; the larger of both rules",
    "doubt": "residual of other, where its eigenvalue was found by an iteration: 0 is exact; where smooth and other "
             "differ by less, the verdict is undecided",
    "layers": "after how many such layers the ruling part is 10 times the other",
    "heads_smoothing": "of all heads by themselves; heads_smoothing_random: of random weights of the same norms",
    "rate": "|mu_2|, factor by which P alone makes tokens equal; rate_keys: with keys of other tokens; rate_random: "
            "of a random stochastic matrix",
    "bound": "no values shrink less in one application of P",
    "leading": "1 where equal tokens are what P stretches most",
}  # fmt: skip
"""What the columns of spectra are; see `nlflow.attention.probing.spectra`."""
