"""Findings in sentences."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from nlflow.attention.probing.parts import PARTS
from nlflow.attention.probing.spectra import LayerSpectrum, verdict_of
from nlflow.attention.probing.survey import growth_of

if TYPE_CHECKING:
    from nlflow.attention.probing.cause import Cause, CausedBlock

NAMES = {
    "norms": "norms", "mixing": "mixing by P", "projection": "W_V W_O", "attention": "attention (not split)",
    "cross-attention": "cross-attention", "mlp": "MLP", "unknown": "unknown",
}  # fmt: skip
_NULLS = {"mixing": ("keys", "random"), "projection": ("weights",), "mlp": ("weights",), "norms": ("weights",)}
_NULL_NAMES = {"keys": "keys of other tokens", "random": "random stochastic P", "weights": "random weights"}
_SHARE = 0.05  # of the squared length: outlier channels that are told


def findings(cause: Cause, spectra: Sequence[LayerSpectrum] | None = None) -> list[str]:
    return [*(_growth(stack, blocks) for stack, blocks in _stacks(cause).items()), *causes(cause, spectra)]


def causes(cause: Cause, spectra: Sequence[LayerSpectrum] | None = None) -> list[str]:
    told = [one for stack, blocks in _stacks(cause).items() for one in _of_stack(stack, blocks)]
    return [*told, verdict_of(spectra)] if spectra else told


def _stacks(cause: Cause) -> dict[str, list[CausedBlock]]:
    names = dict.fromkeys(block.stack for block in cause.blocks)
    return {name: [block for block in cause.blocks if block.stack == name] for name in names}


def _growth(stack: str, blocks: Sequence[CausedBlock]) -> str:
    points = [blocks[0].points["before"], *(block.points["after"] for block in blocks)]
    return growth_of(stack, [one.values["cosine"] for one in points], points[0].pooled, points[-1].pooled).sentence()


def _of_stack(stack: str, blocks: Sequence[CausedBlock]) -> Iterator[str]:
    first, last = blocks[0], blocks[-1]
    sums = {part: sum(block.part(part, "cosine")[0] for block in blocks if part in block.parts) for part in PARTS}
    shown = [f"{NAMES[part]} {value:+.3g}" for part, value in sums.items() if any(part in one.parts for one in blocks)]
    yield (
        f"{stack}: summed over {len(blocks)} blocks, {', '.join(shown)} in the cosine; these are exact differences "
        "along one path through each block, and another order of the parts would share the change otherwise"
    )
    if told := beside_nulls(blocks):
        yield f"{stack}: {told}"
    yield from _largest(stack, blocks)
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
        verb = "holds" if len(found) == 1 else "hold"
        without = last.similarity_without([channel for channel, _ in found])[0]
        yield (
            f"{stack}: after the last block {len(found)} outlier channel{'s' * (len(found) > 1)} ({channels}"
            f"{', …' if found[6:] else ''}) {verb} {share:.0%} of the squared length; t_sim is {plain[1]:.3g} "
            f"with {'it' if len(found) == 1 else 'them'}, {without:.3g} without"
        )


def beside_nulls(blocks: Sequence[CausedBlock]) -> str:
    """Return the parts of some blocks, summed, beside those under their nulls, on the inputs that have nulls."""
    told, drawn = [], 0
    for part, nulls in _NULLS.items():
        own = [block for block in blocks if part in block.parts]
        having = [null for null in nulls if own and all(part in block.nulls.get(null, {}) for block in own)]
        pairs = {null: found for null in having if (found := _pair(own, part, null))[2]}
        if not pairs:
            continue
        value, drawn = next(iter(pairs.values()))[0], max(drawn, *(count for _, _, count in pairs.values()))
        beside = ", ".join(f"{under:+.3g} with {_NULL_NAMES[null]}" for null, (_, under, _) in pairs.items())
        along = [float(np.sign(value)) * under for _, under, _ in pairs.values()]
        size = "larger" if max(along) < abs(value) else "no larger, so its size needs no training"
        size = "of the other sign" if max(along) < 0 else size
        told.append(f"{NAMES[part]} {value:+.3g} ({beside}: {size})")
    if not told:
        return ""
    count = len(blocks[0].points["before"].count)
    return f"beside nulls, on {drawn} of {count} inputs, too few draws to tell chance: {'; '.join(told)}"


def _pair(blocks: Sequence[CausedBlock], part: str, null: str) -> tuple[float, float, int]:
    """Return what a part changes, and what it would under a null, on the same inputs, and how many these are."""
    own = np.sum([block.of_inputs(block.parts[part], "cosine") for block in blocks], axis=0)
    under = np.sum([block.of_inputs(block.nulls[null][part], "cosine") for block in blocks], axis=0)
    known = np.isfinite(own) & np.isfinite(under)
    count = int(known.sum())
    return (float(own[known].mean()), float(under[known].mean()), count) if count else (math.nan, math.nan, 0)


def _largest(stack: str, blocks: Sequence[CausedBlock]) -> Iterator[str]:
    """Yield which part of which block makes tokens more alike than any other, and which less, each beside its nulls."""
    found = [(block.part(part, "cosine")[0], part, block) for block in blocks for part in block.parts]
    for sign, word in ((1, "raises"), (-1, "lowers")):
        value, part, block = max(found, key=lambda one: -math.inf if math.isnan(one[0]) else sign * one[0])
        if not sign * value > 0:
            continue
        text = f"{stack}: what {word} the cosine most is {NAMES[part]} in block {block.index}, {value:+.3g}"
        told = beside_nulls([replace(block, parts={part: block.parts[part]})])
        yield f"{text}; {told}" if told else text
