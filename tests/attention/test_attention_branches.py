"""What attention adds to the state of its layer: against hooks of one's own, in layers of many kinds."""

from __future__ import annotations

from typing import Any

import pytest

from nlflow import InputError, NlflowWarning
from nlflow.attention import Adapter, discretize_blocks, probe, survey  # needs torch
from tests.transformer_models import torch, transformers

pytestmark = pytest.mark.numerical

SMALL = {"hidden_size": 32, "num_attention_heads": 4, "initializer_range": 0.2}
TEXT = {**SMALL, "num_hidden_layers": 3, "intermediate_size": 40, "vocab_size": 60, "pad_token_id": 0,
        "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
FEW = {"head_dim": 8, "num_key_value_heads": 2}


def text(name: str, **options: Any) -> Any:
    """Return a model of this family with tokens for it."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{name.removesuffix('Text')}{'Text' * name.endswith('Text')}Config")
    given = TEXT if name != "GPT2" else {"n_embd": 32, "n_layer": 3, "n_head": 4, "vocab_size": 60, "n_positions": 32,
                                         "initializer_range": 0.2, "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
    model = getattr(transformers, f"{name}Model")(config(**{**given, **options})).eval()
    return model, {"input_ids": torch.randint(3, 60, (2, 9))}


def dinov2() -> Any:
    torch.manual_seed(0)
    shape = {**SMALL, "num_hidden_layers": 3, "image_size": 28, "patch_size": 14, "layerscale_value": 0.1}
    return transformers.Dinov2Model(transformers.Dinov2Config(**shape)).eval(), {
        "pixel_values": torch.randn(2, 3, 28, 28)
    }


CASES: dict[str, Any] = {  # model with inputs, its layers, the module of a layer that gets the state with attention
    "dinov2": (dinov2, "encoder.layer", "norm2"),
    "olmo2": (lambda: text("Olmo2"), "layers", "mlp"),
    "gemma2": (lambda: text("Gemma2", **FEW), "layers", "pre_feedforward_layernorm"),
    "gemma3": (lambda: text("Gemma3Text", **FEW), "layers", "pre_feedforward_layernorm"),
    "llama": (lambda: text("Llama"), "layers", "post_attention_layernorm"),
    "gpt2": (lambda: text("GPT2"), "h", "ln_2"),
    "bert": (lambda: text("Bert"), "encoder.layer", "intermediate"),
    "albert": (lambda: text("Albert", embedding_size=16), "encoder.albert_layer_groups.0.albert_layers", "ffn"),
    "opt": (lambda: text("OPT", ffn_dim=40, word_embed_proj_dim=32), "decoder.layers", "final_layer_norm"),
}


def seen(model: Any, given: Any, layers: str, entry: str) -> list[dict[str, Any]]:
    """Return the states before, between and after each call of a layer, by hooks."""
    calls: list[dict[str, Any]] = []
    handles = []

    def enter(module: Any, args: Any, kwargs: Any) -> None:
        calls.append({"x": (*args, *kwargs.values())[0].clone()})

    def middle(module: Any, args: Any) -> None:
        calls[-1]["y"] = args[0].clone()

    def leave(module: Any, args: Any, out: Any) -> None:
        calls[-1]["z"] = (out[0] if isinstance(out, tuple) else out).clone()

    for layer in model.get_submodule(layers):
        handles.append(layer.register_forward_pre_hook(enter, with_kwargs=True))
        handles.append(layer.get_submodule(entry).register_forward_pre_hook(middle))
        handles.append(layer.register_forward_hook(leave))
    with torch.no_grad():
        model(**given)
    for handle in handles:
        handle.remove()
    return calls


def length(x: Any) -> Any:
    return x.double().flatten(1).norm(dim=1)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_between_and_share_are_of_what_is_added(case: str) -> None:
    make, layers, entry = CASES[case]
    model, given = make()
    own = seen(model, given, layers, entry)
    trace: Any = probe(model, given)
    several = survey(model, [given])
    assert len(trace) == len(own) == 3
    for number, (layer, state) in enumerate(zip(trace, own, strict=True)):
        x, y, z = (state[name].reshape(layer.before.shape) for name in "xyz")
        torch.testing.assert_close(layer.before, x, rtol=0, atol=0)
        torch.testing.assert_close(layer.between, y, rtol=0, atol=0)
        torch.testing.assert_close(layer.after, z, rtol=0, atol=0)
        first, second = length(y - x), length(z - y)
        expected = (first / (first + second)).numpy()
        assert layer.quantities["attention_share"] == pytest.approx(expected, rel=1e-6)
        assert several.states[number + 1].values["share"] == pytest.approx(expected, rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["dinov2", "olmo2", "albert"])
def test_blocks_move_by_what_is_added(case: str) -> None:
    """The share of a block that one step explains, from the states alone; one row for each call of a block."""
    make, layers, entry = CASES[case]
    model, given = make()
    found = discretize_blocks(model, given, substeps=(1,))
    centred = case != "olmo2"
    assert len({one.name for one in found}) == 3

    def middle(x: Any) -> Any:
        return x.double() - x.double().mean(-1, keepdim=True) if centred else x.double()

    for one, state in zip(found, seen(model, given, layers, entry), strict=True):
        if case == "albert":
            continue  # where its sum is normed, no state has what is added
        added = state["y"] - state["x"]
        r = middle(state["x"]).norm(dim=-1, keepdim=True)
        u = middle(state["x"]) / r

        def arc(y: Any, u: Any = u) -> Any:
            y = y / y.norm(dim=-1, keepdim=True)
            across, along = y - (u * y).sum(-1, keepdim=True) * u, (u * y).sum(-1, keepdim=True)
            sine = across.norm(dim=-1, keepdim=True)
            return torch.atan2(sine, along) / sine * across

        update = arc(middle(state["z"]))
        expected = 1 - float((arc(u + middle(added) / r) - update).square().sum() / update.square().sum())
        assert one.layer == pytest.approx(expected, abs=2e-5)


# ---- layers that are written out


class Attention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.v, self.out = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

    def forward(self, x: Any) -> Any:
        q, v = x[:, None], self.v(x)[:, None]
        return self.out(torch.nn.functional.scaled_dot_product_attention(q, q, v)[:, 0])


class Layer(torch.nn.Module):
    """A layer whose state after it is what `rule` makes of its parts."""

    def __init__(self, rule: Any) -> None:
        super().__init__()
        self.attention, self.mlp = Attention(), torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU())
        self.norm, self.end = torch.nn.LayerNorm(8), torch.nn.LayerNorm(8)
        self.gate, self.scale = torch.nn.Linear(8, 8), torch.nn.Parameter(torch.linspace(0.1, 2, 8))
        self.rule = rule
        self.told: Any = None

    def forward(self, x: Any) -> Any:
        return self.rule(self, x)


def sequential(layer: Any, x: Any) -> Any:
    a = layer.norm(layer.attention(x)) * layer.scale * torch.sigmoid(layer.gate(x))
    layer.told = a.clone()
    y = x + a
    y += layer.mlp(layer.norm(y))  # in place
    return y


def parallel(layer: Any, x: Any) -> Any:
    n = layer.norm(x)
    a, m = layer.attention(n), layer.mlp(n)
    layer.told = a.clone()
    m += a  # in place, as Falcon does
    return torch.nn.functional.dropout(m, 0.3, layer.training) + x


def rows(layer: Any, x: Any) -> Any:
    a = layer.attention(x)
    layer.told = a
    y = (x + a).reshape(-1, x.shape[-1])
    return (y + layer.mlp(layer.norm(y))).view(x.shape)


def macaron(layer: Any, x: Any) -> Any:
    y = x + 0.5 * layer.mlp(layer.norm(x))
    a = layer.attention(layer.norm(y))
    layer.told = a
    y = y + a
    return layer.end(y + 0.5 * layer.mlp(layer.norm(y)))


def averaged_state(layer: Any, x: Any) -> Any:
    y = 0.5 * x + layer.attention(x)
    return y + layer.mlp(layer.norm(y))


def mixed(layer: Any, x: Any) -> Any:
    return x + layer.norm(layer.attention(x) + layer.mlp(x))


def bent(layer: Any, x: Any) -> Any:
    return x + layer.mlp(layer.attention(x))


def normed_first(layer: Any, x: Any) -> Any:
    y = layer.norm(x)
    return y + layer.attention(y)


def written_behind(layer: Any, x: Any) -> Any:
    y = x + layer.attention(x)
    with torch.no_grad():
        y.numpy()[...] *= 2  # nothing of torch sees this
    return y


class Stack(torch.nn.Module):
    def __init__(self, rule: Any) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = torch.nn.ModuleList(Layer(rule) for _ in range(2))

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x


ADAPTER = Adapter("layers.*.attention", projection="out")


@pytest.mark.parametrize("rule", [sequential, parallel, rows, macaron])
@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
def test_layers_of_every_order(rule: Any, kind: Any) -> None:
    model, x = Stack(rule).eval().to(kind), torch.randn(2, 5, 8, dtype=kind)
    trace: Any = probe(model, x, adapter=ADAPTER)
    for layer, one in zip(model.layers, trace, strict=True):
        torch.testing.assert_close(one.between, one.before + layer.told)
        assert (one.quantities["attention_share"] > 0).all()
        if rule is not macaron:
            first, rest = length(layer.told), length(one.after - one.before - layer.told)
            assert one.quantities["attention_share"] == pytest.approx((first / (first + rest)).numpy(), rel=1e-5)


@pytest.mark.parametrize(
    ("rule", "reason"),
    [
        (averaged_state, "is not seen to be its input and what is added"),
        (mixed, "passes a norm or a scale together with"),
        (bent, "passes an activation"),
        (normed_first, "its input is normed before"),
        pytest.param(
            written_behind,
            "is not the sum of what was seen",
            marks=pytest.mark.on_cpu("NumPy writes to no memory of a device"),
        ),
    ],
)
def test_what_is_no_sum_is_told(rule: Any, reason: str) -> None:
    model, x = Stack(rule).eval(), torch.randn(2, 5, 8)
    with pytest.warns(NlflowWarning, match=rf"for 2 layer\(s\), first layers\.0\.attention in Layer: .*{reason}"):
        trace = probe(model, x, adapter=ADAPTER)
    assert trace[0].between is None
    assert all(value != value for value in trace[0].quantities["attention_share"])
    assert trace[0].quantities["mean_cosine"].shape == (2,)
    with pytest.raises(InputError, match=rf"layers\.0\.attention in Layer, .*{reason}"):
        discretize_blocks(model, x, adapter=ADAPTER)


def test_the_way_back_passes_what_is_added() -> None:
    model, x = Stack(rows).eval(), torch.randn(2, 5, 8)
    trace: Any = probe(model, x, adapter=ADAPTER, gradients=True)
    trace[1].differentiable["attention_share"].sum().backward()
    assert model.layers[0].attention.v.weight.grad.abs().max() > 0
