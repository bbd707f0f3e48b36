"""FeatScale and AttnScale: what they do to the tokens' mean and to what deviates from it, alone and with the term."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from validation.depth_figure import depth_figure
from validation.harness import PAPER, Check, Claim, Context, Outcome, largest
from validation.networks import embeddings, libraries, minilm, on_one_thread, read, traced
from validation.plain_transformer import plain_copy

Floats = NDArray[np.float64]

FIDELITY = 0.6


def low(x: Floats) -> Floats:
    """Return Πx, the mean over tokens (the last axis but one)."""
    return np.asarray(np.broadcast_to(x.mean(axis=-2, keepdims=True), x.shape))


def size(x: Floats) -> float:
    return float(np.linalg.norm(x))


@contextmanager
def scaled(model: Any, low_scale: Any, high_scale: Any, weights: Any, fidelity: float) -> Iterator[None]:
    """Give a model FeatScale and AttnScale with these parameters in all layers (or none where they are None)."""
    from nlflow.attention import attach, detach

    torch, _ = libraries()
    attach(
        model,
        fidelity=fidelity,
        semi_implicit=False,
        feat_scale=low_scale is not None,
        attn_scale=weights is not None,
    )
    try:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                for ending, value in (("feat.low", low_scale), ("feat.high", high_scale), ("attn_weight", weights)):
                    if name.endswith(f"neutreno.{ending}"):
                        new = torch.as_tensor(value, dtype=parameter.dtype)
                        parameter.copy_((new[:, None, None] if ending == "attn_weight" and new.ndim else new) + 0)
        yield
    finally:
        detach(model)


def first_layer(model: Any, inputs: Any) -> tuple[Floats, Floats]:
    """Return (merged heads, what leaves the output projection) of the first layer."""
    from nlflow.attention import blocks

    torch, _ = libraries()
    seen: dict[str, Floats] = {}
    projection = blocks(model)[0].projection
    assert projection is not None
    hooks = [
        projection.register_forward_pre_hook(lambda module, args: seen.update(merged=args[0][0].numpy().copy())),
        # Registered after FeatScale's own, it sees what that one returns.
        projection.register_forward_hook(lambda module, args, result: seen.update(out=result[0].numpy().copy())),
    ]
    try:
        with torch.no_grad():
            model(**inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return seen["merged"], seen["out"]


@on_one_thread
def run(context: Context) -> Outcome:
    rng = np.random.default_rng(40)
    model, inputs = minilm(), read(0)
    plain = plain_copy(model)
    x = embeddings(traced(model, inputs))
    stock = plain.run(x)
    heads, width = plain.heads, x.shape[1]
    worst: dict[str, float] = {}

    def note(what: str, ours: float | Floats, theirs: float | Floats) -> None:
        error = float(np.abs(np.subtract(ours, theirs)).max() / np.abs(theirs).max())
        worst[what] = largest(worst.get(what, 0.0), error)

    merged, out = first_layer(model, inputs)
    av = (stock[0].a @ stock[0].v).transpose(1, 0, 2).reshape(x.shape)
    note("merged heads of the stock model against plain sums", merged, av)
    note("output of the stock model against plain sums", out, stock[0].attended)
    for s, t in ((0.0, 0.5), (-0.3, 0.8), (0.4, -0.5)):
        context.step(f"FeatScale, s = {s}, t = {t}")
        with scaled(model, s, t, None, 0.0):
            found = first_layer(model, inputs)[1]
        ratio = size(out - low(out)) / size(low(out))
        note("FeatScale: HFC becomes |1 + t| HFC", size(found - low(found)), abs(1 + t) * size(out - low(out)))
        note("FeatScale: LFC becomes |1 + s| LFC", size(low(found)), abs(1 + s) * size(low(out)))
        note("FeatScale: HFC/LFC becomes |1 + t| / |1 + s| of it", size(found - low(found)) / size(low(found)),
             ratio * abs(1 + t) / abs(1 + s))  # fmt: skip
    for omega in (0.5, -0.4, 2.0):
        context.step(f"AttnScale, ω = {omega}")
        with scaled(model, None, None, omega, 0.0):
            found = first_layer(model, inputs)[0]
        v = stock[0].v.transpose(1, 0, 2).reshape(x.shape)
        note("AttnScale: HFC of Av becomes |1 + ω| HFC", size(found - low(found)),
             abs(1 + omega) * size(av - low(av)))  # fmt: skip
        note(
            "AttnScale: mean of Av becomes Πv + (1 + ω)(ΠAv − Πv)",
            low(found),
            low(v) + (1 + omega) * (low(av) - low(v)),
        )
    context.step("all at once")
    s, t = rng.uniform(-0.5, 0.5, (2, width))
    omegas = rng.uniform(-0.5, 0.5, heads)

    def term(i: int, a: Floats, v: Floats, v0: Floats) -> Floats:
        """One matrix for each head, as AttnScale is defined, and the term."""
        flat = np.full(a.shape[1:], 1 / a.shape[-1])
        changed = flat + (1 + omegas[:, None, None]) * (a - flat)
        return np.asarray(changed @ v + (FIDELITY if i else 0.0) * (v0 - v))

    def projected(i: int, y: Floats) -> Floats:
        return (1 + s) * low(y) + (1 + t) * (y - low(y))

    expected = plain.run(x, term=term, projected=projected)
    with scaled(model, s, t, omegas, FIDELITY):
        trace = traced(model, inputs)
    for layer, block in zip(trace, expected, strict=True):
        note("FeatScale, AttnScale and the term in all layers against plain sums", layer.after[0].numpy(), block.after)
    curves = {}
    variants = {
        "softmax": (None, None, 0.0),
        "FeatScale, t = 0.5": (0.5, None, 0.0),
        "AttnScale, ω = 0.5": (None, 0.5, 0.0),
        f"NeuTRENO, λ̃ = {FIDELITY}": (None, None, FIDELITY),
        "NeuTRENO and FeatScale": (0.5, None, FIDELITY),
        "all three": (0.5, 0.5, FIDELITY),
    }
    panels: dict[str, dict[str, list[float]]] = {"HFC / LFC of the tokens": {}, "mean cosine of two tokens": {}}
    for name, (high, omega, fidelity) in variants.items():
        context.step(name)
        with scaled(model, None if high is None else 0.0, high, omega, fidelity):
            trace = traced(model, inputs)
        for title, key in zip(panels, ("hfc_lfc", "mean_cosine"), strict=True):
            panels[title][name] = [float(layer.quantities[key][0]) for layer in trace]
        curves[name] = panels["HFC / LFC of the tokens"][name]
    checks = [Check(what, value, 1e-11) for what, value in worst.items()]
    return Outcome(checks, {CAPTION: depth_figure(panels, "", width=4.8)}, panels)


CAPTION = (
    "all-MiniLM-L6-v2, without training, with parameters that are set by hand: what FeatScale, AttnScale and the term "
    "do to the tokens after each layer, alone and together."
)

CLAIM = Claim(
    name="frequency-scaling",
    title="FeatScale and AttnScale scale what deviates from the mean; the term adds to it",
    statement=(
        "With Π = 11ᵀ/N, HFC = |X − ΠX| and LFC = |ΠX|: FeatScale, x ← (1+s)Πx + (1+t)(x − Πx), turns HFC into |1+t| "
        "HFC and LFC into |1+s| LFC exactly; AttnScale, A ← Π + (1+ω)(A − Π), turns HFC of Av into |1+ω| HFC and its "
        "mean into Πv + (1+ω)(ΠAv − Πv). With one parameter for each feature and each head, together with the term λ̃ "
        "(v⁰ − v) in all layers, the states of all-MiniLM-L6-v2 are those of plain sums in float64 in which the "
        "matrices are changed as defined. The figure shows what they do without training."
    ),
    source=f"arXiv 2203.05962; {PAPER}, Table 1",
    run=run,
)
