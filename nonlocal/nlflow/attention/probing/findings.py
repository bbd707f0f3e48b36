"""What was found about a model in sentences, each from numbers of its tables, none beyond what was measured."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from scipy import stats

from nlflow.attention.probing.parts import PARTS
from nlflow.attention.probing.spectra import LayerSpectrum, verdict_of

if TYPE_CHECKING:
    from nlflow.attention.probing.cause import Cause, CausedBlock

NAMES = {
    "norms": "norms", "mixing": "mixing by P", "projection": "W_V W_O", "attention": "attention (not split)",
    "cross-attention": "cross-attention", "mlp": "MLP", "unknown": "unknown",
}  # fmt: skip
_NULLS = {"mixing": ("keys", "random"), "projection": ("weights",), "mlp": ("weights",), "norms": ("weights",)}
_NULL_NAMES = {"keys": "keys of other tokens", "random": "random stochastic P", "weights": "random weights"}
_LEVEL = 0.95  # of the interval of a difference that is told
_SHARE = 0.05  # of the squared length: outlier channels that are told


def findings(cause: Cause, spectra: Sequence[LayerSpectrum] | None = None) -> list[str]:
    """Return sentences about a model, of its mean cosine first."""
    told: list[str] = []
    for stack in dict.fromkeys(block.stack for block in cause.blocks):
        blocks = [block for block in cause.blocks if block.stack == stack]
        told += _of_stack(stack, blocks)
    if spectra:
        told.append(verdict_of(spectra))
    return told


def _of_stack(stack: str, blocks: Sequence[CausedBlock]) -> Iterator[str]:
    first, last = blocks[0], blocks[-1]
    begin, end = first.measured({"before": 1.0}, "cosine")[0], last.measured({"after": 1.0}, "cosine")[0]
    yield f"{stack}: the mean cosine of two tokens goes from {begin:.3g} to {end:.3g} over {len(blocks)} blocks"
    sums = {part: sum(block.part(part, "cosine")[0] for block in blocks if part in block.parts) for part in PARTS}
    shown = [f"{NAMES[part]} {value:+.3g}" for part, value in sums.items() if any(part in one.parts for one in blocks)]
    yield (
        f"{stack}: summed over the blocks, {', '.join(shown)}; these are exact differences along one path through each "
        "block, and another order of the parts would share the change otherwise"
    )
    yield _largest(stack, blocks)
    centred = first.measured({"before": 1.0}, "centred")[0], last.measured({"after": 1.0}, "centred")[0]
    plain = first.measured({"before": 1.0}, "t_sim")[0], last.measured({"after": 1.0}, "t_sim")[0]
    if not any(math.isnan(one) for one in (*centred, *plain)):
        yield (
            f"{stack}: the share of the mean token goes from {plain[0]:.3g} to {plain[1]:.3g}, and from "
            f"{centred[0]:.3g} to {centred[1]:.3g} without what all inputs have in common"
        )
    found = last.outliers()
    if (share := sum(one for _, one in found)) > _SHARE:
        channels = ", ".join(str(channel) for channel, _ in found[:6])
        without = last.similarity_without([channel for channel, _ in found])[0]
        yield (
            f"{stack}: after the last block {len(found)} outlier channel{'s' * (len(found) > 1)} ({channels}"
            f"{', …' if found[6:] else ''}) hold {share:.0%} of the squared length; t_sim is {plain[1]:.3g} with them, "
            f"{without:.3g} without"
        )


def _largest(stack: str, blocks: Sequence[CausedBlock]) -> str:
    """Return which part of which block changes the cosine most, beside its null."""
    value, part, block = max(
        ((block.part(part, "cosine")[0], part, block) for block in blocks for part in block.parts),
        key=lambda one: -1.0 if math.isnan(one[0]) else abs(one[0]),
    )
    text = f"{stack}: the largest single part is {NAMES[part]} in block {block.index}, {value:+.3g}"
    beside = []
    for null in _NULLS.get(part, ()):
        if part not in block.nulls.get(null, {}):
            continue
        under = block.part(part, "cosine", null)[0]
        less = {name: -weight for name, weight in block.nulls[null][part].items()}
        own = block.parts[part]
        both = {name: own.get(name, 0.0) + less.get(name, 0.0) for name in {**own, **less}}
        beside.append(f"{under:+.3g} with {_NULL_NAMES[null]} ({_compared(block, both)})")
    return f"{text}; {', '.join(beside)}" if beside else text


def _compared(block: CausedBlock, both: Mapping[str, float]) -> str:
    """Return whether a part differs from its null, by the inputs that have one: Student's law, since they are few."""
    draws = int(np.isfinite(block.of_inputs(both, "cosine")).sum())
    if draws < 2:
        return "one draw, which tells no difference"
    mean, error = block.measured(both, "cosine")
    sure = abs(mean) > stats.t.ppf((1 + _LEVEL) / 2, draws - 1) * error
    return f"{draws} draws; " + ("the difference is beyond chance" if sure else "a difference is not sure")
