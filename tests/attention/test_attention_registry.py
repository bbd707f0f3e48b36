"""The term inside models of transformers, against stock models and against stock models with hooks."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

from nlflow.errors import InputError, NlflowWarning
from tests.problems import torch_on_one_thread

torch = torch_on_one_thread()

from nlflow.attention import (  # noqa: E402
    Adapter,
    NeutrenoAttention,
    attach,
    blocks,
    detach,
    register,
)
from nlflow.attention.injection import attach as attaching  # noqa: E402
from nlflow.attention.injection.blocks import transformers_library  # noqa: E402
from tests.transformer_models import (  # noqa: E402  # both need torch
    EVERYTHING,
    FOUR,
    HEADS,
    LAYERS,
    MODELS,
    assert_same,
    build,
    by_hooks,
    explicit,
    gradients,
    inputs,
    moved,
    output,
    transformers,
)

PAPER: dict[str, Any] = {"fidelity": 0.6, "semi_implicit": False}  # the form of the paper, as the hooks have it

# ---- against stock models


@pytest.mark.parametrize("base", ["eager", "sdpa"])
@pytest.mark.parametrize("name", MODELS)
def test_no_fidelity_leaves_all_bits(name: str, base: str) -> None:
    model, given = build(name, base), inputs(name)
    before = [output(model, given)]
    torch.manual_seed(1)
    before.append(output(model.train(), given))  # dropout of weights included
    attach(model, fidelity=0.0)
    assert torch.equal(output(model.eval(), given), before[0])
    torch.manual_seed(1)
    assert torch.equal(output(model.train(), given), before[1])
    attach(model, fidelity=[0.0] * len(blocks(model)), feat_scale=True, attn_scale=True)
    torch.testing.assert_close(output(model.eval(), given), before[0], rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("semi_implicit", [False, True])
@pytest.mark.parametrize("base", ["eager", "sdpa"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.sampled(5)
def test_term_equals_hooks_on_a_stock_model(name: str, base: str, semi_implicit: bool) -> None:
    given = inputs(name)
    strengths = [0.2 + 0.1 * index for index in range(2 * LAYERS if name == "bart" else LAYERS)]
    ours = attach(build(name, base), fidelity=strengths, semi_implicit=semi_implicit)
    stacks = iter([strengths[:LAYERS], strengths[LAYERS:]])
    current: list[Any] = []

    def step(average: Any, v: Any, v0: Any, layer: int) -> Any:
        if layer == 1:
            current[:] = next(stacks)
        size = current[layer]
        return (average + size * v0) / (1 + size) if semi_implicit else average + size * (v0 - v)

    expected = output(by_hooks(build(name, base), step), given)
    torch.testing.assert_close(output(ours, given), expected, rtol=1e-5, atol=2e-5)
    assert (expected - output(build(name, base), given)).abs().max() > 0.01
    with torch.no_grad():  # where the term is added in place, with the same bits
        assert torch.equal(output(ours, given), output(ours, given))
        quiet = output(ours, given)
    assert torch.equal(quiet, output(ours, given))


@pytest.mark.slow
@pytest.mark.parametrize("base", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["bert", "gpt2", "bart"])
def test_derivatives_pass_through_the_first_values(name: str, base: str) -> None:
    given = inputs(name)
    expected = gradients(by_hooks(build(name, base).double(), explicit), given)
    assert_same(gradients(attach(build(name, base), **PAPER).double(), given), expected)

    def detached(average: Any, v: Any, v0: Any, layer: int) -> Any:
        return explicit(average, v, v0.detach(), layer)

    other = gradients(by_hooks(build(name, base).double(), detached), given)
    assert any((other[key] - expected[key]).abs().max() > 1e-4 for key in expected)  # it would be seen


def test_cross_attention_has_no_term() -> None:
    # Only the decoder's own attention gets its term: with the encoder's at 0, what it sends over is the stock model's.
    given = inputs("bart")
    ours = attach(build("bart"), affinity="sigmoid", fidelity=[0.0] * 2 * LAYERS)
    names = [name for name, module in ours.named_modules() if name.endswith("attn") and not hasattr(module, "neutreno")]
    assert names == [f"model.decoder.layers.{index}.encoder_attn" for index in range(LAYERS)]
    calls = []
    stock = build("bart")
    cross = ours.model.decoder.layers[1].encoder_attn
    cross.register_forward_hook(
        lambda module, args, kwargs, result: calls.append((args, kwargs, result)), with_kwargs=True
    )
    output(ours, given)
    args, kwargs, result = calls[0]
    kwargs = {**kwargs, "past_key_values": None}
    torch.testing.assert_close(stock.model.decoder.layers[1].encoder_attn(*args, **kwargs)[0], result[0])


@pytest.mark.parametrize("base", ["eager", "sdpa"])
@pytest.mark.parametrize("name", FOUR)
def test_symmetric_attention_compares_keys_with_keys(name: str, base: str) -> None:
    given, twin = inputs(name), build(name, base)
    for block in blocks(twin):
        part: Any = block.module
        with torch.no_grad():
            if name == "gpt2":
                for tensor in (part.c_attn.weight, part.c_attn.bias):
                    tensor[..., :32] = tensor[..., 32:64]
            else:
                q, k = (part.query, part.key) if name == "bert" else (part.q_proj, part.k_proj)
                q.load_state_dict(k.state_dict())
    ours = attach(build(name, base), affinity="symmetric", **PAPER)
    torch.testing.assert_close(output(ours, given), output(by_hooks(twin, explicit), given), rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("affinity", ["softmax", "symmetric", "gaussian", "sigmoid", "softplus", "linear"])
@pytest.mark.parametrize("options", [{}, EVERYTHING, {"matrix_fidelity": True}], ids=["plain", "everything", "matrix"])
@pytest.mark.sampled(8)
def test_plain_module_equals_the_registered_function(affinity: str, causal: bool, options: dict[str, Any]) -> None:
    name = "gpt2" if causal else "vit"
    model = moved(attach(build(name, "sdpa"), affinity=affinity, **{**PAPER, **options})).double()
    found, first = blocks(model), None
    calls: list[Any] = []
    for block in found:
        block.module.register_forward_hook(lambda module, args, result: calls.append((args[0], result[0])))
    given = inputs(name, batch=1)
    output(model, {key: value.double() if value.is_floating_point() else value for key, value in given.items()})
    for block, (tokens, result) in zip(found, calls, strict=True):
        theirs: Any = block.module
        terms = {name: value for name, value in options.items() if name != "cures"}
        own = NeutrenoAttention(32, HEADS, affinity=affinity, causal=causal, **terms)
        own.double()
        with torch.no_grad():
            if causal:
                pairs = zip((own.query, own.key, own.value), range(3), strict=True)
                for part, index in pairs:
                    part.weight.copy_(theirs.c_attn.weight[:, 32 * index : 32 * index + 32].T)
                    part.bias.copy_(theirs.c_attn.bias[32 * index : 32 * index + 32])
                own.output.weight.copy_(theirs.c_proj.weight.T)
                own.output.bias.copy_(theirs.c_proj.bias)
            else:
                for part, letter in ((own.query, "q"), (own.key, "k"), (own.value, "v"), (own.output, "o")):
                    part.load_state_dict(getattr(theirs, f"{letter}_proj").state_dict())
            own.terms.load_state_dict(theirs.neutreno.state_dict(), strict=block is not found[0])
        expected, first = own(tokens, first)
        torch.testing.assert_close(result, expected, rtol=1e-9, atol=1e-9)


# ---- names, adapters and what is refused


def test_names_are_registered_with_their_masks() -> None:
    names = register()
    assert set(names) >= {"neutreno", "neutreno_symmetric", "gaussian", "sigmoid", "softplus", "linear"}
    assert register() == names
    assert set(names) <= set(transformers.AttentionInterface()) & set(transformers.AttentionMaskInterface())


@pytest.mark.parametrize("affinity", ["gaussian", "sigmoid", "softplus", "linear"])
def test_other_averages_need_no_attaching(affinity: str) -> None:
    register()
    model, given = build("bert"), inputs("bert")
    model.set_attn_implementation(affinity)
    by_name = output(model, given)
    assert torch.equal(by_name, output(attach(build("bert"), affinity=affinity, fidelity=0.0), given))
    assert (by_name - output(build("bert"), given)).abs().max() > 0.01


def test_a_name_without_terms_is_refused() -> None:
    register()
    model, given = build("bert"), inputs("bert")
    model.set_attn_implementation("neutreno")
    with pytest.raises(InputError, match=r"no terms; call nlflow.attention.attach\(model\)"):
        output(model, given)
    expected = output(by_hooks(build("bert"), explicit), given)
    torch.testing.assert_close(output(attach(model, **PAPER), given), expected, rtol=1e-5, atol=2e-5)


def test_returned_weights_and_stored_configs_are_the_stock_ones(tmp_path: Path) -> None:
    given, stock = inputs("gpt2"), build("gpt2")
    model = attach(build("gpt2"), attn_scale=True)
    ours, theirs = (one(**given, output_attentions=True).attentions for one in (model, stock))
    assert torch.equal(ours[0], theirs[0])  # the first layer's: what enters it is the same
    assert [one.shape for one in ours] == [one.shape for one in theirs]
    model.config.save_pretrained(tmp_path)
    assert "neutreno" not in (tmp_path / "config.json").read_text()


@pytest.mark.other_bits("autocast rounds other operations on a GPU than on the CPU")
def test_half_precision() -> None:
    model = attach(build("vit", "sdpa"), attn_scale=True, learned=True).to(torch.bfloat16)
    given = {"pixel_values": inputs("vit")["pixel_values"].bfloat16()}
    assert output(model, given).dtype == torch.bfloat16
    full = attach(build("vit", "sdpa"))
    with torch.autocast(given["pixel_values"].device.type, torch.bfloat16):
        near = output(full, inputs("vit"))
    torch.testing.assert_close(near.float(), output(full, inputs("vit")), rtol=0.1, atol=0.2)


def test_the_other_eager_path_of_gpt2() -> None:
    given = inputs("gpt2")
    stock = output(build("gpt2", reorder_and_upcast_attn=True), given)
    assert torch.equal(output(attach(build("gpt2", reorder_and_upcast_attn=True), fidelity=0.0), given), stock)


class Wrapped(torch.nn.Module):
    """A model of one's own around one of transformers, whose layers take no further arguments."""

    class Layer(torch.nn.Module):
        def __init__(self, inner: Any) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, hidden_states: Any) -> Any:
            return self.inner(hidden_states)

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.embeddings = model.embeddings
        self.model = model
        self.steps = torch.nn.ModuleList([self.Layer(layer) for layer in model.layers])
        self.checkpoint = False
        del model.layers

    def forward(self, pixel_values: Any) -> tuple[Any]:
        hidden = self.embeddings(pixel_values)
        for layer in self.steps:
            if self.checkpoint:
                hidden = torch.utils.checkpoint.checkpoint(layer, hidden, use_reentrant=False)
            else:
                hidden = layer(hidden)
        return (self.model.layernorm(hidden),)


def test_models_that_hand_no_arguments_on() -> None:
    given = inputs("vit")
    expected = by_hooks(build("vit"), explicit)
    adapter = Adapter("steps.*.inner.attention", projection="o_proj")
    model = attach(Wrapped(build("vit")), fidelity=0.6, semi_implicit=False, adapter=adapter)
    torch.testing.assert_close(output(model, given), output(expected, given), rtol=1e-5, atol=2e-5)
    model.checkpoint = True
    with pytest.raises(InputError, match=r"outside of the forward of its stack.*checkpointing"):
        output(model, given).sum().backward()


def test_adapters_find_blocks() -> None:
    found = blocks(build("bart"))
    assert [block.stack for block in found] == ["encoder"] * LAYERS + ["decoder"] * LAYERS
    assert [block.causal for block in found] == [False] * LAYERS + [True] * LAYERS
    assert [block.container for block in found] == ["model.encoder"] * LAYERS + ["model.decoder"] * LAYERS
    assert found[-1].layer is build("bart").model.decoder.layers[-1] or type(found[-1].layer).__name__.endswith("Layer")
    named = blocks(build("vit"), Adapter("layers.*.attention", causal=True, stack="encoder"))
    assert [block.name for block in named] == [f"layers.{index}.attention" for index in range(LAYERS)]
    assert all(block.causal and block.stack == "encoder" for block in named)
    assert all(block.projection is block.module.o_proj for block in named)  # where it is not named it is looked for
    with pytest.raises(InputError, match=r"projection 'nowhere'.*has no layers.0.attention.nowhere.*o_proj"):
        blocks(build("vit"), Adapter("ViTAttention", projection="nowhere"))
    with pytest.raises(InputError, match=r"no attention is one of Missing.*ViTAttention"):
        blocks(build("vit"), Adapter("Missing"))
    with pytest.raises(InputError, match="got str, expected a torch"):
        blocks("bert")  # type: ignore[arg-type]


def test_a_model_may_be_a_list_of_layers() -> None:
    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = torch.nn.Identity()

    model = torch.nn.Sequential(Layer(), Layer())
    found = blocks(model, Adapter("*.attention"))
    assert [block.layer for block in found] == list(model)
    assert [block.container for block in found] == ["", ""]


class Own(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.MultiheadAttention(8, 2)])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"affinity": "cosine"}, "affinity: got 'cosine', expected one of 'softmax'"),
        ({"fidelity": -0.1}, "fidelity: got -0.1"),
        ({"fidelity": float("nan")}, "fidelity: got nan"),
        ({"fidelity": [0.1, float("nan"), 0.2]}, r"fidelity\[1\]: got nan"),
        ({"fidelity": "much"}, "fidelity: got 'much'"),
        ({"fidelity": [0.1, 0.2]}, r"fidelity: got 2 values, expected 3.*encoder 3"),
        ({"fidelity": 0.0, "learned": True}, "fidelity: got 0 with learned=True"),
        ({"cures": {"similarity-removal": 2}}, r"cures\['similarity-removal'\]: got 2, expected τ from 0 to 1"),
        ({"learned": 1}, "learned: got 1, expected True, False or 'shared'"),
        ({"learned": True, "semi_implicit": 1}, "semi_implicit: got 1, expected True or False"),
        ({"learned": "shared", "fidelity": [0.1, 0.2, 0.3]}, "fidelity: got 3 values with learned='shared'"),
        ({"learned": "shared", "matrix_fidelity": True}, "learned: got 'shared' with matrix_fidelity=True"),
    ],
)
def test_attach_refuses(arguments: dict[str, Any], message: str) -> None:
    model, given = build("vit"), inputs("vit")
    before = output(model, given)
    with pytest.raises(InputError, match=message):
        attach(model, **arguments)
    assert torch.equal(output(model, given), before)  # nothing was changed
    assert not any(hasattr(module, "neutreno") for module in model.modules())


def test_models_whose_attention_cannot_be_replaced() -> None:
    with pytest.raises(InputError, match="no two layers of self-attention"):
        attach(Own())
    with pytest.raises(InputError, match=r"MultiheadAttention \(layers.0\), which computes its average by itself"):
        attach(Own(), affinity="sigmoid", adapter=Adapter("MultiheadAttention"))
    with pytest.raises(InputError, match=r"Linear \(0.layers.0.out_proj\).*projections of values .* not both known"):
        attach(torch.nn.ModuleList([Own(), Own()]), adapter=Adapter("*.out_proj"))
    model = build("vit")
    model.config._attn_implementation_internal = "flex_attention"
    with pytest.raises(InputError, match="attn_implementation='flex_attention', expected 'eager' or 'sdpa'"):
        attach(model)


def test_a_first_layer_that_did_not_run() -> None:
    model = attach(build("vit"))
    del model.layers[0]
    with pytest.raises(InputError, match="the first layer of its stack did not"):
        output(model, inputs("vit"))


def test_a_fidelity_beyond_the_stable_range_is_told() -> None:
    with pytest.warns(NlflowWarning, match=r"fidelity: got 1.5, beyond 1 \+ μ_min"):
        attach(build("vit"), fidelity=1.5, semi_implicit=False)
    attach(build("vit"), fidelity=1.5)


@pytest.mark.parametrize("version", ["4.57.1", "unknown"])
def test_too_old_transformers(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    # torch.compile imports the package anew, so the one that was imported above may not be the one in use.
    monkeypatch.setattr(importlib.import_module("transformers"), "__version__", version)
    with pytest.raises(InputError, match=f"got release {version}, expected 5 or newer"):
        transformers_library()


def test_missing_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(InputError, match=r"a model needs transformers 5 or newer, which is.*nlflow\[attention\]"):
        register()


def test_a_name_that_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    register()
    taken = {**transformers.AttentionInterface._global_mapping, "gaussian": print}
    monkeypatch.setattr(transformers.AttentionInterface, "_global_mapping", taken)
    with pytest.raises(InputError, match="another package named 'gaussian'"):
        register()


def test_terms_inside_an_attached_part_are_replaced_too() -> None:
    class Wrapped(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = build("bert")

        def forward(self, **given: Any) -> Any:
            return self.inner(**given)

    given = inputs("bert")
    whole = Wrapped().eval()
    plain, removal = output(whole, given), {"similarity-removal": 0.5}
    expected = output(attach(whole, cures=removal), given)
    detach(whole)
    attach(whole.inner, cures=removal)
    assert torch.equal(output(attach(whole, cures=removal), given), expected)
    assert torch.equal(output(detach(whole), given), plain)
    attach(whole.inner)
    assert torch.equal(output(detach(whole), given), plain)


def test_terms_stay_where_new_ones_are_refused() -> None:
    model, given = build("bert"), inputs("bert")
    expected = output(attach(model, fidelity=0.6), given)
    with pytest.raises(InputError, match="fidelity: got 0 with learned=True"):
        attach(model, fidelity=[0.1] + [0.0] * (len(blocks(model)) - 1), learned=True)
    assert torch.equal(output(model, given), expected)


def test_terms_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    class Counted(attaching.LayerTerms):
        def __init__(self, *given: Any, **options: Any) -> None:
            super().__init__(*given, **options)
            made.append(self)

    monkeypatch.setattr(attaching, "LayerTerms", Counted)
    model = attach(build("bart"), learned="shared", attn_scale=True)
    assert [block.module.neutreno for block in blocks(model)] == made
    owners = {id(terms.owner[0]) for terms in made if terms.owner}
    assert len(owners) == 1
    assert sum(name.endswith("raw_fidelity") for name, _ in model.named_parameters()) == 1
