"""Figure 5: how alike the attention matrices of successive layers are."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from validation.depth_figure import depth_figure
from validation.harness import PAPER, Check, Claim, Context, Outcome, largest, smallest
from validation.networks import checkpoints, embeddings, minilm, on_one_thread, passages, random_model, traced
from validation.plain_transformer import Block, plain_copy

Floats = NDArray[np.float64]

FIDELITY = 0.6
WITHOUT, WITH = "softmax", f"NeuTRENO, λ̃ = {FIDELITY}"
OTHERS, UNIFORM = "softmax, any head with any", "softmax, with uniform attention"


def table(first: Block, second: Block) -> Floats:
    """Return ⟨A_g, B_h⟩ / (|A_g| |B_h|) for all heads g of a layer and h of the next, as sums over entries."""
    a, b = (block.a.reshape(len(block.a), -1) for block in (first, second))
    products = np.array([[np.sum(x * y) for y in b] for x in a])
    return np.asarray(products / np.sqrt(np.outer((a**2).sum(axis=1), (b**2).sum(axis=1))))


def uniform(block: Block) -> float:
    """Return the mean cosine of a layer's attention matrices with 11ᵀ/N: 1 / |A|, since rows add up to 1."""
    return float(np.mean(1 / np.sqrt((block.a**2).sum(axis=(1, 2)))))


@on_one_thread
def run(context: Context) -> Outcome:
    model = minilm()
    plain = plain_copy(model)
    error = 0.0
    courses: dict[str, list[Any]] = {WITHOUT: [], WITH: [], OTHERS: [], UNIFORM: []}
    for _, inputs in passages(context):
        x = embeddings(traced(model, inputs))
        for label, fidelity in ((WITHOUT, 0.0), (WITH, FIDELITY)):
            blocks = plain.run(x, fidelity)
            ours = traced(model, inputs, fidelity=fidelity).head_redundancy()[:, 0]
            tables = np.array([table(one, two) for one, two in pairwise(blocks)])
            expected = np.array([np.diagonal(one) for one in tables])
            error = largest(error, float(np.abs(ours - expected).max()))
            courses[label].append(expected.mean(axis=1))
            if label == WITHOUT:
                courses[OTHERS].append(tables.mean(axis=(1, 2)))
                courses[UNIFORM].append([uniform(block) for block in blocks[1:]])
    panels = {"all-MiniLM-L6-v2": {name: np.mean(runs, axis=0) for name, runs in courses.items()}}
    context.step("DeiT-tiny")
    untrained, inputs = random_model("DeiT-tiny")
    trace = traced(untrained, inputs)
    twice = table(*plain_copy(untrained).run(embeddings(trace))[:1] * 2)
    panels["DeiT-tiny, untrained"] = {WITHOUT: trace.head_redundancy()[:, 0].mean(axis=1)}
    for name, trace in checkpoints():
        context.step(name)
        panels.setdefault("trained by this project", {})[name] = trace.head_redundancy().mean(axis=(1, 2))
    change = np.array(courses[WITH]) - np.array(courses[WITHOUT])
    chance = np.array(courses[WITHOUT]) - np.array(courses[OTHERS])
    checks = [
        Check("package against plain sums", error, 1e-12),
        Check("a layer with itself: distance from 1", float(np.abs(np.diagonal(twice) - 1).max()), 1e-12),
        Check("untrained: least cosine", smallest(*panels["DeiT-tiny, untrained"][WITHOUT]), 0.97, at_least=True),
        Check("MiniLM: largest mean cosine of a layer", largest(*np.array(courses[WITHOUT]).ravel()), 0.9),
        Check("MiniLM: |cosine of equal numbers − of any heads|, mean of layers and passages", abs(chance.mean()), 0.1),
    ]
    details = {
        **{title: {name: list(values) for name, values in ways.items()} for title, ways in panels.items()},
        "MiniLM: change by the term, without training, mean over passages": list(change.mean(axis=0)),
        "MiniLM: cosine of equal numbers less that of any heads": list(chance.mean(axis=0)),
    }
    figure = depth_figure(panels, "cosine of attention matrices", first=2, width=4.2, together=True)
    return Outcome(checks, {CAPTION: figure}, details)


CAPTION = (
    "Cosine of the attention matrices of a layer (its number below) and of the one before, mean over heads. Heads of "
    "an untrained model are all nearly uniform. In the trained encoder the number of a head means nothing: head h is "
    "as like to any head of the layer before as to head h."
)

CLAIM = Claim(
    name="head-redundancy",
    title="Head redundancy between layers, and that the numbers of heads mean nothing",
    statement=(
        "Figure 5 measures how redundant layers are by the cosine ⟨A, B⟩ / (|A| |B|) of the attention matrices of "
        "head h in two successive layers, mean over heads (G.2; the published code compares heads within a layer). "
        "Definition held against plain sums. In an untrained DeiT it is above 0.97, for nearly uniform attention. In "
        "all-MiniLM-L6-v2 it is 0.3 to 0.75, and head h is, in the mean, no more alike to head h of the layer before "
        "than to any other head: order has no meaning there, and matrices without negative entries have positive "
        "cosines. What the term changes without training is in the details; its sign differs from layer to layer."
    ),
    source=f"{PAPER}, Figure 5, G.2",
    run=run,
)
