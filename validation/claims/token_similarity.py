"""Figures 1, 6 and 7: tokens of untrained transformers grow alike with depth; the term and the removal prevent it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from validation.depth_figure import depth_figure
from validation.harness import PAPER, Check, Claim, Context, Outcome, largest, smallest
from validation.networks import checkpoints, embeddings, on_one_thread, random_model, traced
from validation.plain_transformer import mean_cosine, plain_copy, token_similarity

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Floats = NDArray[np.float64]

FIDELITY = 0.6
REMOVALS = (0.5, 1.0)
SMALL = {
    "hidden_size": 384,
    "num_attention_heads": 6,
    "intermediate_size": 1536,
    "max_position_embeddings": 128,
    "initializer_range": 0.028,
}
"""Of a BERT that is drawn in a second: half the width, and weights larger by √2, whose sums are as large."""

WITHOUT, WITH = "softmax", f"NeuTRENO, λ̃ = {FIDELITY}"
REMOVED = "mean taken away, τ = {:g}"


def models(context: Context) -> list[tuple[str, str, int, dict[str, Any]]]:
    """Return (title, name, seed, changes to the configuration)."""
    tiny = [("DeiT-tiny", "DeiT-tiny", 0, {})]
    small = [("BERT of width 384", "BERT-base", 0, SMALL)]
    full = [
        *tiny,
        ("DeiT-tiny, another seed", "DeiT-tiny", 1, {}),
        ("DeiT-small", "DeiT-small", 0, {}),
        ("BERT-base", "BERT-base", 0, {}),
        ("GPT-2", "GPT-2", 0, {}),
    ]
    return context.pick(full, tiny + small)


def run_one(
    name: str, seed: int, changes: dict[str, Any], worst: dict[str, float]
) -> dict[str, dict[str, list[float]]]:
    """Return mean cosine and t_sim by depth, of the embeddings first, for each way to run a model."""
    model, inputs = random_model(name, seed, **changes)
    plain = plain_copy(model)

    def note(what: str, value: float) -> None:
        worst[what] = largest(worst.get(what, 0.0), value)

    def course(trace: Any, reference: list[Any]) -> dict[str, list[float]]:
        start = trace.states[trace[0].stack]
        found: dict[str, list[float]] = {}
        for metric, plainly in (("mean_cosine", mean_cosine), ("token_similarity", token_similarity)):
            found[metric] = [float(start[metric][0]), *(float(layer.quantities[metric][0]) for layer in trace)]
            expected = [plainly(embeddings(trace)), *(plainly(block.after) for block in reference)]
            note("cosine and t_sim against plain sums", float(np.abs(np.subtract(found[metric], expected)).max()))
        for layer, block in zip(trace, reference, strict=True):
            note("hidden states against plain sums, relative", _distance(_array(layer.after), block.after))
            ratio, share = (float(layer.quantities[key][0]) for key in ("hfc_lfc", "token_similarity"))
            note("t_sim = 1 / (1 + (HFC/LFC)²)", abs(share - 1 / (1 + ratio**2)))
        return found

    trace = traced(model, inputs)
    x = embeddings(trace)
    courses = {WITHOUT: course(trace, plain.run(x))}
    courses[WITH] = course(traced(model, inputs, fidelity=FIDELITY), plain.run(x, FIDELITY))
    for strength in REMOVALS:
        trace = traced(model, inputs, fidelity=0.0, cures={"similarity-removal": strength})

        def without_mean(i: int, y: Floats, strength: float = strength) -> Floats:
            seen = np.tri(len(y)) if plain.causal else np.ones((len(y), len(y)))  # a full mean would show the future
            return y if i == 0 else y - strength * seen / seen.sum(axis=1, keepdims=True) @ y

        courses[REMOVED.format(strength)] = course(trace, plain.run(x, entering=without_mean))
        if plain.causal:
            continue
        for layer, following in zip(trace.layers, trace.layers[1:], strict=False):
            t = float(layer.quantities["token_similarity"][0])
            left = (1 - strength) ** 2 * t
            # What enters the next layer, from which the mean has been taken.
            note(
                "t' = (1−τ)²t / ((1−τ)²t + 1 − t)",
                abs(token_similarity(_array(following.before)) - left / (left + 1 - t)),
            )
    return courses


def _array(states: Any) -> Floats:
    return np.asarray(states[0].double().numpy())


def _distance(a: Floats, b: Floats) -> float:
    return float(np.abs(a - b).max() / np.abs(b).max())


@on_one_thread
def run(context: Context) -> Outcome:
    worst: dict[str, float] = {}
    found = {}
    for title, name, seed, changes in models(context):
        context.step(title)
        found[title] = run_one(name, seed, changes, worst)
    checks = [Check(what, value, 1e-12) for what, value in worst.items()]
    rises, falls, shares, removed = [], [], [], []
    for courses in found.values():
        plain, term = (np.array(courses[key]["mean_cosine"][1:]) for key in (WITHOUT, WITH))
        for metric in ("mean_cosine", "token_similarity"):
            course = np.array(courses[WITHOUT][metric][1:])
            rises.append(float(course[-1] / course[0]))
            falls.append(float(-np.diff(course).min() / (course[-1] - course[0])))
        shares.append(float((term[-1] - term[0]) / (plain[-1] - plain[0])))
        if REMOVED.format(1.0) in courses:
            removed.append(
                courses[REMOVED.format(1.0)]["token_similarity"][-1] / courses[WITHOUT]["token_similarity"][-1]
            )
    checks += [
        Check(
            "without a term: cosine and t_sim after the last layer over those after the first, least",
            smallest(*rises),
            1.3,
            at_least=True,
        ),
        Check(
            "without a term: largest fall of cosine or t_sim in one layer, over the whole rise", largest(*falls), 0.05
        ),
        Check("rise of the cosine over the layers with the term, over that without", largest(*shares), 0.5),
        Check("t_sim after the last layer with the mean taken away, over that without", largest(*removed), 0.2),
    ]
    trained = {}
    for name, trace in checkpoints():
        context.step(name)
        states = (trace.states[trace[0].stack], *(layer.quantities for layer in trace))
        trained[name] = {"mean_cosine": [float(state["mean_cosine"].mean()) for state in states]}
    if trained:
        found["trained by this project"] = trained
    return Outcome(checks, {CAPTION: draw(found)}, found)


def draw(found: dict[str, dict[str, dict[str, list[float]]]]) -> Figure:
    panels = {
        title: {key: course["mean_cosine"] for key, course in courses.items()} for title, courses in found.items()
    }
    return depth_figure(panels, "mean cosine of two tokens", first=0)


CAPTION = (
    "Mean cosine of two tokens by depth (0: embeddings) in models that are drawn from their configurations and not "
    "trained: it grows, much less with the term λ̃ (v⁰ − v), and falls to nearly 0 when the tokens' mean "
    "is taken away before each layer."
)

CLAIM = Claim(
    name="token-similarity",
    title="Tokens of untrained transformers grow alike with depth",
    statement=(
        "In DeiT-tiny, DeiT-small, BERT-base and GPT-2 as their configurations draw them (quick: DeiT-tiny and a "
        "narrow BERT), the mean cosine of two tokens and t_sim = |ΠX|²/|X|² rise with depth; with the "
        f"NeuTRENO term at λ̃ = {FIDELITY} the cosine rises less than half as much. Taking the share τ of the mean "
        "away before each layer but the first turns t_sim = t into (1−τ)²t / ((1−τ)²t + 1 − t), exactly; decoders "
        "take the mean of the tokens up to each, for which there is no such formula. All states are held against a "
        "transformer written as plain sums in float64. The rises themselves are findings about these models, not "
        "theorems."
    ),
    source=f"{PAPER}, Figures 1, 6, 7, E.3; arXiv 2312.06182",
    run=run,
)
