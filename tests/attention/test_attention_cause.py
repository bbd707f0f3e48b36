"""What parts of a block change: against differences of one's own along the stream, in several kinds of layers."""

from __future__ import annotations

import pickle
import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from nlflow import InputError
from nlflow.attention import (  # needs torch
    Adapter,
    explain,
    mean_cosine,
    participation_rank,
    probe,
    survey,
    token_similarity,
)
from nlflow.attention.probing.cause import MEASURES
from nlflow.attention.probing.findings import beside_nulls
from nlflow.attention.probing.parts import PARTS
from nlflow.attention.probing.points import point_of
from nlflow.errors import NlflowWarning
from tests.transformer_models import MODELS, build, inputs, torch, transformers
from validation.tiny_inputs import inputs_of as tiny_inputs
from validation.tiny_models import build as tiny

pytestmark = pytest.mark.numerical

SHAPE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "initializer_range": 0.3}
TEXT = {**SHAPE, "intermediate_size": 40, "vocab_size": 60, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def family(name: str, dtype: Any = torch.float64) -> Any:
    """Return a small random model with inputs: of `MODELS`, or a text model of transformers by its name."""
    if name in MODELS:
        model, given = build(name).to(dtype), inputs(name)
    elif name == "Dinov2":
        torch.manual_seed(0)
        config = transformers.Dinov2Config(**SHAPE, image_size=28, patch_size=7, layerscale_value=0.4)
        model, given = transformers.Dinov2Model(config).eval().to(dtype), {"pixel_values": torch.randn(2, 3, 28, 28)}
        model.set_attn_implementation("eager")
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1:
                    parameter += 0.3 * torch.randn_like(parameter)
    else:
        torch.manual_seed(0)
        extra: dict[str, Any] = {"Gemma2": {"head_dim": 8, "num_key_value_heads": 2}}.get(name, {})
        config = getattr(transformers, f"{name}Config")(**TEXT, **extra)
        model = getattr(transformers, f"{name}Model")(config).eval().to(dtype)
        model.set_attn_implementation("eager")
        given = {"input_ids": torch.randint(3, 60, (2, 9))}
    return model, {key: one.to(dtype) if one.is_floating_point() else one for key, one in given.items()}


def cosine(x: Any) -> float:
    """Return the mean cosine of two different tokens by a table of all pairs, mean over the batch."""
    unit = x / x.norm(dim=-1, keepdim=True)
    table = unit @ unit.mT
    count = x.shape[1]
    return float(((table.sum((1, 2)) - count) / (count * (count - 1))).mean())


def split_by_hand(x: Any, n: Any, p: Any, w: Any, scale: Any, added: Any, constant: Any) -> dict[str, float]:
    """Return the parts of attention at a state x, with the maps w (H, D, D) of the normed state n written out."""
    traces = w.diagonal(dim1=-2, dim2=-1).sum(-1) / w.shape[-1]
    normed = x + traces.sum() * n
    mixed = x + torch.einsum("h,bhij,bjd->bid", traces, p, n)
    projected = x + torch.einsum("bjd,hde->bje", n, w) + constant
    attended = x + torch.einsum("bhij,bjd,hde->bie", p, n, w) + constant
    torch.testing.assert_close(attended, x + added, rtol=1e-10, atol=1e-10)
    f = {name: cosine(state) for name, state in
         {"x": x, "n": normed, "m": mixed, "p": projected, "a": attended}.items()}  # fmt: skip
    return {
        "norms": f["n"] - f["x"],
        "mixing": (f["m"] - f["n"] + f["a"] - f["p"]) / 2,
        "projection": (f["p"] - f["n"] + f["a"] - f["m"]) / 2,
    }


def heads(weight: Any, out: Any, count: int = 4) -> Any:
    """Return W_V W_O of each head, (H, D, D), of weights of Linear modules."""
    d = len(weight) // count
    return torch.stack([
        weight[h * d : (h + 1) * d].T @ out[:, h * d : (h + 1) * d].T for h in range(count)
    ])  # fmt: skip


def check(row: dict[str, Any], expected: dict[str, float], tolerance: float = 1e-12) -> None:
    for name, value in expected.items():
        assert row[name] == pytest.approx(value, abs=tolerance), name


def states_of(model: Any, given: Any, names: list[str]) -> tuple[dict[str, list[Any]], Any]:
    """Return what modules were given and made, and the attention matrices."""
    kept: dict[str, list[Any]] = {}
    handles = []
    for name in names:

        def keep(module: Any, args: Any, kwargs: Any, output: Any, name: str = name) -> None:
            entered = args[0] if args else kwargs.get("hidden_states")
            kept[name] = [entered, output[0] if isinstance(output, tuple) else output]

        handles.append(model.get_submodule(name).register_forward_hook(keep, with_kwargs=True))
    with torch.no_grad():
        found = model(**given, output_attentions=True)
    for handle in handles:
        handle.remove()
    return kept, found.attentions


@pytest.mark.slow
def test_parts_of_bert_are_those_by_hand() -> None:
    """Norms after the sums: the state is given as it is, and normed on the stream."""
    model, given = family("bert")
    given.pop("attention_mask")
    layer = "encoder.layer.1"
    kept, attentions = states_of(model, given, [
        layer, f"{layer}.attention.output", f"{layer}.attention.output.dense", f"{layer}.output.dense",
    ])  # fmt: skip
    own = model.get_submodule(layer)
    x, z = kept[layer]
    a, y, m = kept[f"{layer}.attention.output.dense"][1], kept[f"{layer}.attention.output"][1], kept[
        f"{layer}.output.dense"][1]  # fmt: skip
    value, out = own.attention.self.value, own.attention.output.dense
    w = heads(value.weight, out.weight).detach()
    constant = (value.bias @ out.weight.T + out.bias).detach()
    with torch.no_grad():
        expected = split_by_hand(x, x, attentions[1], w, 1.0, a, constant)
    expected["norms"] += cosine(y) - cosine(x + a) + cosine(z) - cosine(y + m)
    expected["mlp"] = cosine(y + m) - cosine(y)
    expected["change"] = cosine(z) - cosine(x)
    check(explain(model, given).rows("cosine")[1], expected)


@pytest.mark.slow
def test_parts_of_dinov2_are_those_by_hand() -> None:
    """Norms before attention, whose gain is of the maps, and scales of layers after it."""
    model, given = family("Dinov2")
    layer = "encoder.layer.1"
    kept, attentions = states_of(model, given, [layer, f"{layer}.layer_scale1", f"{layer}.layer_scale2"])
    own = model.get_submodule(layer)
    x, z = kept[layer]
    a = kept[f"{layer}.layer_scale1"][1]
    n = torch.nn.functional.layer_norm(x, x.shape[-1:], eps=own.norm1.eps)
    attention = own.attention
    found = dict(attention.named_modules())
    value = next(module for name, module in found.items() if name.endswith(("value", "v_proj")))
    out = next(module for name, module in found.items() if name.endswith(("dense", "o_proj")))
    scale = own.layer_scale1.lambda1
    centre = torch.eye(32, dtype=x.dtype) - 1 / 32
    w = (centre @ torch.diag(own.norm1.weight) @ heads(value.weight, out.weight) @ torch.diag(scale)).detach()
    constant = (((own.norm1.bias @ value.weight.T + value.bias) @ out.weight.T + out.bias) * scale).detach()
    with torch.no_grad():
        expected = split_by_hand(x, n, attentions[1], w, scale, a, constant)
    expected["mlp"] = cosine(z) - cosine(x + a)
    expected["change"] = cosine(z) - cosine(x)
    check(explain(model, given).rows("cosine")[1], expected)


@pytest.mark.slow
def test_an_mlp_beside_attention_is_shared_out_by_both_orders() -> None:
    """GPT-NeoX: values are a third of each head in one projection, and the order of attention and MLP is free."""
    model, given = family("GPTNeoX")
    layer = "layers.1"
    kept, attentions = states_of(model, given, [layer, f"{layer}.attention.dense", f"{layer}.mlp"])
    own = model.get_submodule(layer)
    x, z = kept[layer]
    a, m = kept[f"{layer}.attention.dense"][1], kept[f"{layer}.mlp"][1]
    n = torch.nn.functional.layer_norm(x, x.shape[-1:], eps=own.input_layernorm.eps)
    fused, out = own.attention.query_key_value, own.attention.dense
    value = fused.weight.view(4, 3, 8, 32)[:, 2].reshape(32, 32)
    shift = fused.bias.view(4, 3, 8)[:, 2].reshape(32)
    norm = own.input_layernorm
    centre = torch.eye(32, dtype=x.dtype) - 1 / 32
    w = (centre @ torch.diag(norm.weight) @ heads(value, out.weight)).detach()
    constant = ((norm.bias @ value.T + shift) @ out.weight.T + out.bias).detach()
    with torch.no_grad():
        first = split_by_hand(x, n, attentions[1], w, 1.0, a, constant)
        last = split_by_hand(x + m, n, attentions[1], w, 1.0, a, constant)
    expected = {name: (first[name] + last[name]) / 2 for name in first}
    expected["mlp"] = (cosine(x + m) - cosine(x) + cosine(z) - cosine(x + a)) / 2
    expected["change"] = cosine(z) - cosine(x)
    check(explain(model, given).rows("cosine")[1], expected, 1e-9)  # the softmax of this model rounds to float32


def test_cross_attention_is_a_part_of_its_own() -> None:
    """A decoder that norms before: attention, cross-attention and MLP one after another, all on the stream."""
    torch.manual_seed(0)
    config = transformers.WhisperConfig(
        vocab_size=60, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=40, decoder_ffn_dim=40, num_mel_bins=8, max_source_positions=20,
        init_std=0.3, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip
    model = transformers.WhisperModel(config).eval().double()
    given = {
        "input_features": torch.randn(2, 8, 40).double(), "decoder_input_ids": torch.randint(3, 60, (2, 7)),
    }  # fmt: skip
    kept: dict[str, Any] = {}
    layer = model.decoder.layers[1]

    def keep(name: str) -> Any:
        def hook(module: Any, args: Any, kwargs: Any, output: Any) -> None:
            kept[name] = (args or (kwargs["hidden_states"],))[0], output[0] if isinstance(output, tuple) else output

        return hook

    handles = [
        module.register_forward_hook(keep(name), with_kwargs=True)
        for name, module in (("layer", layer), ("attention", layer.self_attn), ("cross", layer.encoder_attn))
    ]
    with torch.no_grad():
        model(**given)
    for handle in handles:
        handle.remove()
    (x, z), a, c = kept["layer"], kept["attention"][1], kept["cross"][1]
    expected = {
        "cross-attention": cosine(x + a + c) - cosine(x + a), "mlp": cosine(z) - cosine(x + a + c),
        "change": cosine(z) - cosine(x),
    }  # fmt: skip
    row = explain(model, given).rows("cosine")[3]
    check(row, expected)
    assert row["norms"] + row["mixing"] + row["projection"] == pytest.approx(cosine(x + a) - cosine(x), abs=1e-12)


FAMILIES = ["bert", "gpt2", "bart", "vit", "llama", "Albert", "GPTNeoX", "Gemma2", "Olmo2", "Dinov2"]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("name", FAMILIES)
def test_parts_add_up_to_the_change(name: str, dtype: str) -> None:
    model, given = family(name, getattr(torch, dtype))
    with warnings.catch_warnings():
        warnings.simplefilter("error", NlflowWarning)  # all is told in these families
        found = explain(model, given)
    assert not any(block.reason for block in found.blocks)
    for row in found.rows():
        total = sum(row[part] for part in PARTS if part in row)
        unit = max(1.0, abs(row["change"])) if row["measure"] == "rank" else 1.0
        if row["measure"] in ("isotropy", "centred"):  # of two inputs
            assert np.isfinite(row["change"])
        assert total == pytest.approx(row["change"], abs={"float64": 1e-12, "float32": 1e-5}[dtype] * unit)
    for block, states in zip(found.blocks, _points_by_metrics(model, given, found), strict=True):
        for name_of, value in states.items():
            assert block.change(name_of)[0] == pytest.approx(value, abs=1e-12 if dtype == "float64" else 1e-5 * 9)


def _points_by_metrics(model: Any, given: Any, found: Any) -> Any:
    """Yield the changes over blocks by the metrics of the room, from what `probe` saw."""
    for layer in probe(model, given):
        yield {
            name: float((measure(layer.after, mask=layer.tokens) - measure(layer.before, mask=layer.tokens)).mean())
            for name, measure in
            (("cosine", mean_cosine), ("t_sim", token_similarity), ("rank", participation_rank))
        }  # fmt: skip


@pytest.mark.parametrize("shape", [(3, 7, 5), (2, 150, 140), (2, 140, 150)])  # of large ones half of the products
def test_measures_of_a_point_are_the_metrics(shape: tuple[int, int, int]) -> None:
    x = torch.randn(*shape, dtype=torch.float64)
    x[0, 2] = 0
    tokens = torch.ones(shape[:2], dtype=torch.bool)
    tokens[1, 4:] = False
    padded = x.masked_fill(~tokens[..., None], torch.nan)  # padding may be anything
    point = point_of(padded, tokens)
    for name, metric in (("cosine", mean_cosine), ("t_sim", token_similarity), ("rank", participation_rank)):
        np.testing.assert_allclose(point.values[name], metric(x, mask=tokens), rtol=1e-13)


@pytest.mark.parametrize(
    "place",
    ["attention.self", "attention.output.dense", "attention.output.LayerNorm", "output.dense", "output.LayerNorm"],
)
def test_states_may_be_nan_at_padding(place: str) -> None:
    """As where a row of masked attention is all -inf; parts and their nulls are those without it."""
    model, _ = family("Bert")
    tokens = torch.randint(3, 60, (3, 9))
    mask = torch.ones_like(tokens)
    mask[1, :3], mask[2, 5:] = 0, 0
    given = {"input_ids": tokens, "attention_mask": mask}

    def spoil(module: Any, args: Any, output: Any) -> Any:
        made = output[0] if isinstance(output, tuple) else output
        made = made.masked_fill(mask[..., None] == 0, torch.nan)
        return (made, *output[1:]) if isinstance(output, tuple) else made

    expected = explain(model, given).rows("cosine")
    model.encoder.layer[1].get_submodule(place).register_forward_hook(spoil)
    for found, row in zip(explain(model, given).rows("cosine"), expected, strict=True):
        known = {name: value for name, value in row.items() if not isinstance(value, str)}
        assert {name: found[name] for name in known} == pytest.approx(known, rel=1e-9, abs=1e-12, nan_ok=True)


def test_inputs_may_come_in_any_batches() -> None:
    """Numbers of each input, and of all, do not mind how inputs are gathered; nulls are of two, then one in four."""
    model, _ = family("bert")
    rows = torch.randint(3, 60, (6, 9))
    apart, together = explain(model, [row[None] for row in rows]), explain(model, [rows])
    for one, other in zip(apart.blocks, together.blocks, strict=True):
        for measure in MEASURES:
            assert one.change(measure) == pytest.approx(other.change(measure), abs=1e-12)
            assert one.part("mixing", measure) == pytest.approx(other.part("mixing", measure), abs=1e-12)
        for block in (one, other):
            under = block.of_inputs(block.nulls["keys"]["mixing"], "cosine")
            assert np.isfinite(under).tolist() == [True, True, False, False, True, False]


@pytest.mark.on_cpu("pickle asks where the numbers of a tensor lie, which a pretended device does not know")
def test_an_explanation_is_pickled() -> None:
    model, _ = family("bert")
    found = explain(model, torch.randint(3, 60, (2, 9)))
    assert pickle.loads(pickle.dumps(found)).rows("cosine") == found.rows("cosine")  # made a line ago


def test_what_all_inputs_have_in_common_is_taken_out() -> None:
    """The share of the mean token, of states that `probe` saw, less the mean of all tokens of all inputs."""
    model, _ = family("bert")
    rows = torch.randint(3, 60, (5, 9))
    state: Any = probe(model, rows)[-1].after
    x = state - state.mean((0, 1))
    expected = 9 * x.mean(1).square().sum(-1) / x.square().sum((1, 2))
    value, _ = explain(model, [rows[:2], rows[2:]]).blocks[-1].measured({"after": 1.0}, "centred")
    assert value == pytest.approx(float(expected.mean()), rel=1e-12)


def test_a_uniform_average_does_not_mind_whose_keys_it_has() -> None:
    """With all queries 0, P is uniform: keys of other tokens give the same P, and random ones another."""
    model, given = family("vit")
    model.set_attn_implementation("sdpa")  # the eager softmax rounds to float32
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "q_proj" in name:
                parameter.zero_()
    for block in explain(model, given).blocks:
        own, error = block.part("mixing", "cosine"), block.part("mixing", "cosine", "keys")
        known = np.isfinite(block.of_inputs(block.nulls["keys"]["mixing"], "cosine"))
        first = float(block.of_inputs(block.parts["mixing"], "cosine")[known].mean())
        assert error[0] == pytest.approx(first, abs=1e-12)
        assert np.isfinite(own[0])
        assert block.part("mixing", "cosine", "random")[0] != pytest.approx(first, abs=1e-6)
        assert float(block.contraction["P"].max()) == pytest.approx(0, abs=1e-12)


# ---- which tokens


def test_groups_are_told_apart() -> None:
    torch.manual_seed(0)
    config = transformers.Dinov2WithRegistersConfig(**SHAPE, image_size=28, patch_size=7, num_register_tokens=2)
    model = transformers.Dinov2WithRegistersModel(config).eval().double()
    given = {"pixel_values": torch.randn(2, 3, 28, 28, dtype=torch.float64)}
    found = explain(model, given, tokens="patch")
    groups = found.blocks[0].groups
    assert {name: values["count"].tolist() for name, values in groups.items()} == {
        "class": [1, 1], "register": [2, 2], "ordinary": [16, 16],
    }  # fmt: skip
    with torch.no_grad():
        state = model(**given, output_hidden_states=True).hidden_states[1].numpy()
    for item, x in enumerate(state):
        for name, rows in {"class": x[:1], "register": x[1:3], "ordinary": x[3:]}.items():
            units, mean = rows / np.linalg.norm(rows, axis=1, keepdims=True), rows.mean(0)
            told = {key: values[item] for key, values in groups[name].items()}
            assert told["length"] == pytest.approx(np.linalg.norm(rows, axis=1).mean(), rel=1e-12)
            assert told["t_sim"] == pytest.approx(len(rows) * mean @ mean / (rows**2).sum(), rel=1e-12)
            others = x[3:].mean(0)
            beside = mean @ others / np.linalg.norm(mean) / np.linalg.norm(others)
            assert told["to_others"] == pytest.approx(beside, rel=1e-12)
            pairs = [one @ other for i, one in enumerate(units) for j, other in enumerate(units) if i != j]
            assert told["cosine"] == pytest.approx(np.mean(pairs) if pairs else np.nan, rel=1e-12, nan_ok=True)
    mask = torch.zeros(2, 19, dtype=torch.bool)
    mask[:, 3:] = True
    assert explain(model, given, tokens=mask).blocks[1].change("cosine") == found.blocks[1].change("cosine")
    assert explain(model, given).blocks[1].change("cosine") != found.blocks[1].change("cosine")
    with pytest.raises(InputError, match="tokens: got 'special', expected one of 'all', 'class', 'register'"):
        explain(model, given, tokens="special")


def test_special_tokens_are_those_that_the_tokenizer_marks() -> None:
    model, _ = family("bert")
    ids = torch.randint(3, 60, (2, 9))
    marks = torch.zeros_like(ids)
    marks[:, [0, 8]] = 1
    given = {"input_ids": ids, "special_tokens_mask": marks}
    inside = marks == 0
    found = explain(model, given, tokens="ordinary")
    assert found.blocks[0].points["before"].count.tolist() == [7, 7]
    assert found.blocks[1].change("rank") == explain(model, {"input_ids": ids}, tokens=inside).blocks[1].change("rank")
    with pytest.raises(InputError, match="0 of 9 tokens count by 'ordinary'; all its tokens are special"):
        explain(model, {"input_ids": ids, "special_tokens_mask": torch.ones_like(ids)}, tokens="ordinary")


def test_outlier_channels_are_named() -> None:
    model, given = family("vit")
    last = model.layers[-1]
    out = next(module for name, module in last.named_modules() if name.endswith("fc2") or name == "output.dense")
    with torch.no_grad():
        out.bias[5] = 400.0
    block = explain(model, given).blocks[-1]
    (channel, share), *others = block.outliers()
    assert (channel, others) == (5, [])
    after = block.channels[1].sum(0)
    assert share == pytest.approx(after[5] / after.sum(), rel=1e-12)
    assert block.similarity_without([5])[0] < block.measured({"after": 1.0}, "t_sim")[0]


# ---- bad input


def test_one_token_and_one_input_are_named() -> None:
    model, _ = family("bert")
    with pytest.raises(InputError, match="of which 1 of 1 token count"):
        explain(model, torch.tensor([[5]]))
    with pytest.warns(NlflowWarning, match="got one input, of which isotropy"):
        found = explain(model, torch.arange(5)[None])
    assert np.isnan(found.rows("isotropy")[0]["change"])
    with pytest.raises(InputError, match="expected what probe takes"):
        explain(model, 5)
    with pytest.raises(InputError, match="got no batch"):
        explain(model, [])
    with pytest.raises(InputError, match="measure: got 'angle'"):
        found.rows("angle")


class _Rounded(torch.nn.Module):
    """A projection whose weights are stored in 8 bits."""

    def __init__(self, linear: Any) -> None:
        super().__init__()
        self.out_features, self.in_features = linear.weight.shape
        self.scale = linear.weight.detach().abs().max() / 127
        self.register_buffer("weight", (linear.weight.detach() / self.scale).round().to(torch.int8))
        self.bias = linear.bias

    def forward(self, x: Any) -> Any:
        return torch.nn.functional.linear(x, self.weight.to(x) * self.scale, self.bias)


def test_weights_in_8_bits_are_named_and_the_rest_is_told() -> None:
    model, given = family("bert")
    given.pop("attention_mask")
    own = model.encoder.layer[1].attention
    own.output.dense = _Rounded(own.output.dense)
    with pytest.warns(NlflowWarning, match=r"in 1 of 3 blocks.*_Rounded are quantised or packed \(torch.int8\)"):
        found = explain(model, given)
    row = found.rows("cosine")[1]
    assert row["attention"] + row["norms"] + row["mlp"] == pytest.approx(row["change"], abs=1e-12)
    assert row["mixing"] == 0
    assert np.isnan(row["mixing first"])
    assert len(found.spectra()) == 2


class _Scaled(torch.nn.Module):
    """Attention whose values are scaled after a fused projection, or which has a gate before the output."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.qkv, self.out, self.kind = torch.nn.Linear(8, 24), torch.nn.Linear(8, 8), kind

    def forward(self, x: Any) -> Any:
        q, k, v = self.qkv(x).chunk(3, -1)
        v = v * 2 if self.kind == "scaled" else v
        mixed = torch.nn.functional.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None])[:, 0]
        return self.out(mixed * torch.sigmoid(q) if self.kind == "gated" else mixed)


class _Stack(torch.nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(_Layer(kind) for _ in range(2))

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x


class _Layer(torch.nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.attention = _Scaled(kind)

    def forward(self, x: Any) -> Any:
        return x + self.attention(x)


@pytest.mark.parametrize(("kind", "why"), [
    ("scaled", "not columns of what the fused projection Linear gives"),
    ("gated", "what comes to W_O is not the averages, head after head"),
])  # fmt: skip
def test_values_and_averages_that_are_changed_are_named(kind: str, why: str) -> None:
    x = torch.randn(2, 6, 8)
    adapter = Adapter("layers.*.attention", projection="out")
    with pytest.warns(NlflowWarning, match=why):
        found = explain(_Stack(kind).eval(), x, adapter=adapter)
    row = found.rows("t_sim")[0]
    assert row["attention"] == pytest.approx(row["change"], abs=1e-12)
    plain = explain(_Stack("plain").eval(), x, adapter=adapter)
    assert not any(block.reason for block in plain.blocks)


@pytest.mark.parametrize("name", ["bert", "Llama"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_has_the_parts_and_nulls_of_single_within_its_roundings(name: str, dtype: Any) -> None:
    """With padding, where P is computed again for the null; two blocks of roundings of 2^-8 each."""
    ids = torch.randint(3, 60, (2, 9), generator=torch.Generator().manual_seed(1))
    given = {"input_ids": ids, "attention_mask": torch.arange(9) < torch.tensor([[9], [5]])}
    given["attention_mask"] = given["attention_mask"].long()
    half, single = (explain(family(name, one)[0], given) for one in (dtype, torch.float32))
    assert not any(block.reason for block in half.blocks)
    assert half.spectra()[0].row()["verdict"]
    for row, expected in zip(half.rows("cosine"), single.rows("cosine"), strict=True):
        numbers = [key for key, value in expected.items() if isinstance(value, float) and not key.endswith("_se")]
        assert "mixing, keys" in numbers
        assert [row[key] for key in numbers] == pytest.approx([expected[key] for key in numbers], abs=2**-5)


def test_a_gate_is_seen_in_half_precision_too() -> None:
    model, x = _Stack("gated").eval().bfloat16(), torch.randn(2, 6, 8).bfloat16()
    with pytest.warns(
        NlflowWarning, match=r"a gate, a norm or another term is between\), or torch.bfloat16 is too coarse"
    ):
        explain(model, x, adapter=Adapter("layers.*.attention", projection="out"))


def test_no_part_is_beyond_chance_and_each_stands_beside_its_nulls() -> None:
    """A null has too few draws for a test, so none is told; the sums of parts and nulls are those of the rows."""
    model, _ = family("bert")
    rows = torch.randint(3, 60, (9, 9))
    for count in (1, 2, 9):
        told = " ".join(explained(model, rows[:count]))
        assert "too few draws to tell chance" in told
        assert "beyond chance" not in told
    cause = explain(model, rows[:2])  # of which both have nulls
    found = beside_nulls(cause.blocks)
    for part, null in (("mixing", "keys"), ("mixing", "random"), ("projection", "weights"), ("mlp", "weights")):
        table = cause.rows("cosine")
        own, under = (sum(row[name] for row in table) for name in (part, f"{part}, {null}"))
        assert f"{own:+.3g} (" in found
        assert f"{under:+.3g} with " in found


@pytest.mark.parametrize(("size", "told"), [(0.5, "no larger, so its size needs no training"), (2.0, "larger")])
def test_a_part_no_larger_than_one_of_its_nulls_says_nothing(size: float, told: str) -> None:
    """The mixing of each input is `size` times that with random matrices, and twice that with other keys."""
    model, _ = family("bert")
    cause = explain(model, torch.randint(3, 60, (2, 9)))
    block = cause.blocks[0]
    random = block.nulls["random"]["mixing"]
    scaled = {name: {key: factor * weight for key, weight in random.items()}
              for name, factor in (("own", size), ("keys", size / 2))}  # fmt: skip
    nulls = {"random": {"mixing": random}, "keys": {"mixing": scaled["keys"]}}
    sentence = beside_nulls([replace(block, parts={"mixing": scaled["own"]}, nulls=nulls)])
    assert sentence.endswith(f": {told})")


def test_what_raises_the_cosine_most_is_named_before_what_lowers_it() -> None:
    model, _ = family("bert")
    cause = explain(model, torch.randint(3, 60, (4, 9)))
    parts = [(block.part(part, "cosine")[0], block.index) for block in cause.blocks for part in block.parts]
    told = [line for line in cause.findings() if "the cosine most is" in line]
    for line, word, (value, index) in zip(told, ("raises", "lowers"), (max(parts), min(parts)), strict=True):
        assert f"what {word} the cosine" in line
        assert f"in block {index}, {value:+.3g}" in line


def explained(model: Any, rows: Any) -> list[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of one input
        return explain(model, rows).findings()


def test_sinks_that_learn_are_no_part_of_a_graph() -> None:
    found = explain(tiny("gpt_oss").eval(), {"input_ids": torch.arange(16).view(2, 8) % 7 + 3}, nulls=False)
    for row in found.rows("cosine"):
        assert sum(row[part] for part in PARTS if part in row) == pytest.approx(row["change"], abs=1e-9)


def test_layers_that_change_the_width_or_the_sequences_are_named() -> None:
    model = tiny("fun_asr_nano_encoder").eval()
    with pytest.raises(InputError, match=r"which shows states of another shape than it takes; expected a layer"):
        explain(model, tiny_inputs(model))
    video = tiny("videoprism_vision_model").eval()
    for look in (survey, explain):
        with pytest.raises(InputError, match=r"inputs: got layers over \d+ and \d+ sequences in one run"):
            look(video, [tiny_inputs(video)])


def test_nulls_are_those_of_rng_and_of_no_other_seed() -> None:
    """The same bits whatever torch's own seed is, which is left as it was; other ones of another seed."""
    model, given = family("bert")
    rows = []
    for own, seed in ((1, 0), (2, 0), (2, 5)):
        torch.manual_seed(own)
        before = torch.get_rng_state()
        rows.append(explain(model, given, rng=seed).rows())
        assert torch.equal(torch.get_rng_state(), before)
    first, again, other = (str(one) for one in rows)
    assert first == again
    assert first != other
