"""Models and inputs of which something cannot be told: through each entrance the sentence that names it."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest

from nlflow.errors import InputError
from tests.transformer_models import WIDTH, build, output, torch

from nlflow.attention import attach, blocks, detach, explain, load_model, probe, report, survey, sweep  # isort: skip  # torch may be missing above
from nlflow.attention.injection.inputs import text_inputs  # isort: skip
from nlflow.attention.injection.weights import Layout, product_of  # isort: skip

SIZE, HEADS = 8, 2


class Own(torch.nn.Module):
    """Attention of two heads with one projection for queries, keys and values, in ways that models have.

    `kind`: ``plain`` (q, k, v one after the other), ``by heads`` (q, k, v of each head), ``several outputs`` (a W_O for
    each head), ``no output``, ``gated`` (averages times a sigmoid).
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.num_heads = kind, HEADS
        self.qkv = torch.nn.Linear(SIZE, 3 * SIZE)
        if kind == "several outputs":
            self.outputs = torch.nn.ModuleList(torch.nn.Linear(SIZE // HEADS, SIZE) for _ in range(HEADS))
        elif kind != "no output":
            self.proj = torch.nn.Linear(SIZE, SIZE)

    def forward(self, x: Any) -> Any:
        made, shape = self.qkv(x), x.shape[:2]
        if self.kind == "by heads":
            q, k, v = made.view(*shape, HEADS, 3, SIZE // HEADS).permute(3, 0, 2, 1, 4)
        else:
            q, k, v = made.view(*shape, 3, HEADS, SIZE // HEADS).permute(2, 0, 3, 1, 4)
        heads = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        if self.kind == "several outputs":
            return sum(one(heads[:, number]) for number, one in enumerate(self.outputs))
        merged = heads.transpose(1, 2).flatten(2)
        merged = merged * torch.sigmoid(x) if self.kind == "gated" else merged
        return merged if self.kind == "no output" else self.proj(merged)


class Layer(torch.nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.attn = Own(kind)

    def forward(self, x: Any) -> Any:
        return x + self.attn(x)


def own(kind: str) -> Any:
    torch.manual_seed(0)
    return torch.nn.Sequential(*(Layer(kind) for _ in range(3))).eval()


def eight_bits() -> Any:
    """A model of which one projection of values has its weights in 8 bits, and runs."""

    class Rounded(torch.nn.Linear):
        def forward(self, x: Any) -> Any:
            return torch.nn.functional.linear(x, self.weight.to(x) / 64, self.bias)

    model = build("bert")
    module = model.encoder.layer[1].attention.self
    module.value = Rounded(WIDTH, WIDTH)
    weight = torch.randint(-99, 99, (WIDTH, WIDTH), dtype=torch.int8)
    module.value.weight = torch.nn.Parameter(weight, requires_grad=False)
    return model.eval()


def packed() -> Any:
    """A model whose matrices torch has packed in 8 bits, of which `weight` is a method."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that this way of quantizing will move to another package
        return torch.ao.quantization.quantize_dynamic(build("bert"), {torch.nn.Linear}, dtype=torch.qint8).eval()


def on_meta() -> Any:
    return build("bert").to("meta")


def tokens(count: int, length: int) -> Any:
    return {"input_ids": torch.randint(3, 40, (count, length), generator=torch.Generator().manual_seed(0))}


def states(count: int = 12, length: int = 6) -> Any:
    return torch.randn(count, length, SIZE, generator=torch.Generator().manual_seed(0))


def run(model: Any, given: Any) -> Any:
    with torch.no_grad():
        return output(model, given) if isinstance(given, dict) else model(given)


def task(given: Any) -> Callable[[Any], Any]:
    return lambda model: run(model, given).flatten(1).norm(dim=1)


ENTRANCES: dict[str, Callable[[Any, Any], Any]] = {
    "explain": lambda model, given: explain(model, given).rows(),
    "explain ordinary": lambda model, given: explain(model, given, tokens="ordinary").rows(),
    "survey": lambda model, given: survey(model, [given]).rows(),
    "attach": lambda model, given: run(attach(model), given),
    "cure": lambda model, given: run(attach(model, fidelity=0, cures={"centring": 0.5}), given),
    "sweep": lambda model, given: sweep(model, task(given), layers=["all"], resamples=100).left_out,
    "report": lambda model, given: report(
        model, [given], task(given), cures={"temperature": [0.5]}, layers=["all"]
    ).answers(),
}  # fmt: skip

NO_OUTPUT = "no W_O in one matrix is found; say where with adapter="
NO_TERM = "whose projections of values and of the output are not both known"
ONE = "expected at least 2.*since similarity is between tokens"
SPECIAL = {**tokens(12, 6), "special_tokens_mask": torch.ones(12, 6, dtype=torch.long)}
# Model, inputs, entrance: words of the error, of the warning, or of what a sweep has left out.
TABLE: list[tuple[Any, Any, str, str]] = [
    *((lambda kind=kind: own(kind), states(), entrance, words)
      for kind in ("no output", "several outputs")
      for entrance, words in (
          ("explain", NO_OUTPUT), ("attach", NO_TERM), ("cure", "got no known W_O .no known module. in 0.attn"),
          ("sweep", NO_TERM), ("report", NO_OUTPUT))),
    (lambda: own("gated"), states(), "explain", "what comes to W_O is not the averages, head after head"),
    (lambda: own("gated"), states(), "cure", r"0.attn \(Own\), whose averages do not lie between columns"),
    (lambda: own("gated"), states(), "sweep", r"0.attn \(Own\), whose averages do not lie between columns"),
    (lambda: own("gated"), states(), "attach", "averages whose columns are not those of the values"),
    (eight_bits, tokens(12, 6), "explain", r"weights of Rounded are quantised or packed \(torch.int8\)"),
    (eight_bits, tokens(12, 6), "cure", r"got no known W_V \(the weights of Rounded are quantised .*layer.1.attention"),
    (eight_bits, tokens(12, 6), "sweep", r"no known W_V \(the weights of Rounded are quantised"),
    pytest.param(
        packed, tokens(12, 6), "explain", r"weights of Linear are quantised or packed \(by torch\.ao\.nn\.quantized",
        marks=pytest.mark.on_cpu("torch quantizes on the CPU alone"),
    ),
    pytest.param(
        packed, tokens(12, 6), "sweep", r"no known W_V \(the weights of Linear are quantised or packed \(by torch\.ao",
        marks=pytest.mark.on_cpu("torch quantizes on the CPU alone"),
    ),
    (lambda: build("bert"), tokens(12, 1), "explain", "1 of 1 token count by 'all', " + ONE + "; give a longer"),
    (lambda: build("bert"), tokens(12, 1), "survey", "got 12 of one token, " + ONE),
    (lambda: build("bert"), tokens(12, 1), "report", "got 12 of one token, " + ONE),
    (lambda: build("bert"), tokens(1, 6), "explain", "got one input, of which isotropy"),
    (lambda: build("bert"), tokens(1, 6), "survey", "got one input, of which isotropy"),
    (lambda: build("bert"), tokens(1, 6), "sweep", "task: got scores of 1 items, expected at least 10"),
    (lambda: build("bert"), tokens(1, 6), "report", "task: got scores of 1 items, expected at least 10"),
    (lambda: build("bert"), SPECIAL, "explain ordinary", "0 of 6 tokens count by 'ordinary'; all its tokens are spec"),
    *((on_meta, tokens(12, 6), entrance, r"model: embeddings\.\S+: it is on meta, where tensors have shapes and no val")
      for entrance in ("explain", "survey", "sweep", "report")),
    (lambda: build("bert"), {"input_ids": tokens(12, 6)["input_ids"].to("meta")}, "survey", "input_ids: it is on meta"),
    (lambda: own("plain"), states() / 0, "explain", r"NaN or infinite states in 0.attn \(first of token 0 of sequ"),
    (lambda: own("plain"), states() / 0, "survey", r"NaN or infinite states in 0.attn \(first of token 0 of sequ"),
    (lambda: own("plain"), states() / 0, "sweep", "task: got 12 NaN or infinite value"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("make", "given", "entrance", "words"), TABLE, ids=[f"{number}-{one[2]}" for number, one in enumerate(TABLE)]
)
def test_what_cannot_be_told_is_named(make: Any, given: Any, entrance: str, words: str) -> None:
    model, said = make(), []
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            found = ENTRANCES[entrance](model, given)
            said += list(found.values()) if isinstance(found, dict) else []
        except InputError as error:
            said.append(str(error))
    said += [str(one.message) for one in warned]
    assert any(re.search(words, one) for one in said), said
    detach(model)
    assert not any(hook for module in model.modules() for hook in module._forward_pre_hooks.values())


# ---- projections of several layouts, whose numbers are those of the same attention written otherwise


def test_a_fused_projection_has_the_layout_that_it_shows() -> None:
    """q, k, v of each head, the same columns as in the plain order: the same numbers with every cure of W_V W_O."""
    plain, other = own("plain"), own("by heads")
    with torch.no_grad():
        for one, two in zip(plain, other, strict=True):
            for name in ("weight", "bias"):
                rows = getattr(one.attn.qkv, name).unflatten(0, (3, HEADS, SIZE // HEADS))
                getattr(two.attn.qkv, name).copy_(rows.transpose(0, 1).flatten(0, 2))
                getattr(two.attn.proj, name).copy_(getattr(one.attn.proj, name))
    given = states()
    torch.testing.assert_close(run(other, given), run(plain, given))
    for cures in ({"centring": 0.5}, {"attn-scale": 0.4}, {"sharpening": 0.5}):
        for fidelity in (0.0, 0.3):
            found = [run(attach(model, fidelity=fidelity, cures=cures), given) for model in (plain, other)]
            torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)
            for model in (plain, other):
                detach(model)


def test_a_first_run_beside_a_look_is_not_seen() -> None:
    """Of a model that sums by itself, the term finds its layout in the first call, which may be one of `survey`."""
    attached = attach(own("by heads"), fidelity=0.3)
    first = survey(attached, [states()]).rows()
    assert survey(attached, [states()]).rows()[-1]["cosine"] == first[-1]["cosine"]


def test_layouts_are_known_after_a_call_alone() -> None:
    model = own("plain")
    block = blocks(model)[0]
    module: Any = block.module
    assert product_of(block) is None
    layout = Layout()
    handles = layout.hooks(block)
    model.train()
    model(states())
    assert layout.name == ""  # a call with dropout shows nothing
    model.eval()(states())
    assert layout.name == "behind"
    for handle in handles:
        handle.remove()
    product = product_of(block, layout.name)
    assert product is not None
    weight = module.qkv.weight[2 * SIZE :].T @ module.proj.weight.T
    torch.testing.assert_close(product.matrix, weight)
    module.qkv = torch.nn.Linear(SIZE, 26)
    with pytest.raises(InputError, match=r"26 columns beside a W_O of 8 rows in 0\.attn"):
        product_of(blocks(model)[0])
    training = attach(own("plain"), fidelity=0, cures={"centring": 0.5}).train()
    with pytest.raises(InputError, match=r"not known which columns are values; .* call model.eval"):
        training(states())


# ---- masks that means need


def test_masks_are_those_of_tokens() -> None:
    """Padding given by place, and masks that are no padding: the mean is over what the model was told."""
    model, given = build("bert"), tokens(2, 6)
    mask = torch.ones(2, 6, dtype=torch.long)
    mask[1, 4:] = 0
    attach(model, fidelity=0, cures={"similarity-removal": 0.5})
    named = run(model, {**given, "attention_mask": mask})
    with torch.no_grad():
        placed = model(given["input_ids"], mask)[0]
    assert torch.equal(named, placed)
    alone = run(model, {"input_ids": given["input_ids"][1:, :4]})
    torch.testing.assert_close(named[1, :4], alone[0], rtol=1e-4, atol=1e-5)
    for other in (mask.float(), mask[:, None, None].bool().expand(2, 1, 6, 6)):
        with pytest.raises(InputError, match=r"attention_mask: got torch.* for a cure that takes means over tokens"):
            run(model, {**given, "attention_mask": other})


@pytest.mark.parametrize("source", [None, 5, ""])
def test_where_a_model_lies_is_a_path_or_a_name(source: Any) -> None:
    for read in (load_model, lambda where: text_inputs(Own("plain"), where, "words")):
        with pytest.raises(InputError, match=r"^source: got .*, expected the path of a file"):
            read(source)


def test_a_batch_without_any_tensor_is_none() -> None:
    with pytest.raises(InputError, match="inputs: got dict, expected a mapping of names to tensors"):
        probe(build("bert", "sdpa"), {})
