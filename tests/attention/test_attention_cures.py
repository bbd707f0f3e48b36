"""Cures other than the term: exact where neutral, reversible, and what they say they are, in each family."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nlflow.errors import InputError
from tests.transformer_models import HEADS, MODELS, WIDTH, build, checkpointed, inputs, output, torch, transformers

from nlflow.attention import CURES, Adapter, attach, blocks, detach, load_terms, probe  # isort: skip  # torch may be missing
from nlflow.attention.injection.cures import TERMS_OF_V0, sharpened  # isort: skip
from tests import pretended  # isort: skip

OTHERS = [name for name in CURES if name not in TERMS_OF_V0]
DOUBLE = {"rtol": 1e-10, "atol": 1e-10}


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("name", OTHERS)
def test_neutral_cures_keep_all_bits_and_others_are_taken_away(family: str, name: str) -> None:
    given, model = inputs(family), build(family)
    before = output(model, given)
    cure = CURES[name]
    assert torch.equal(output(attach(model, fidelity=0, cures={name: cure.neutral}), given), before)
    for value in cure.values:
        attach(model, fidelity=0, cures={name: value})
        changed = output(model, given)
        assert bool(torch.isfinite(changed).all())
        assert not torch.equal(changed, before)
    detach(model)
    assert torch.equal(output(model, given), before)
    assert not any(hook for module in model.modules() for hook in module._forward_hooks.values())


def _projected(model: Any, family: str) -> list[tuple[Any, Any, Any]]:
    """Return of each layer W_V, b_V and the output projection, from the names that the models have."""
    found = []
    for block in blocks(model):
        module, out = block.module, block.projection
        if family == "gpt2":
            weight, bias = module.c_attn.weight[:, 2 * WIDTH :], module.c_attn.bias[2 * WIDTH :]
        else:
            linear = getattr(module, "v_proj", None) or module.value
            weight = linear.weight.T
            bias = weight.new_zeros(weight.shape[1]) if linear.bias is None else linear.bias
        if weight.shape[1] < WIDTH:
            weight, bias = (
                one.unflatten(-1, (-1, WIDTH // HEADS)).repeat_interleave(2, dim=-2).flatten(-2)
                for one in (weight, bias)
            )
        found.append((weight, bias, out))
    return found


@pytest.mark.parametrize("family", ["bert", "vit", "gpt2", "llama"])
def test_branches_are_changed_by_their_formulas(family: str) -> None:
    """What comes out of the projection, from heads and weights: means over the tokens that each one sees."""
    given, stock = inputs(family), build(family).double()
    given = {k: v.double() if v.is_floating_point() else v for k, v in given.items()}
    numbers = {"centring": 0.3, "attn-scale": 0.4, "feat-scale": 0.25, "layer-scale": 0.9, "sharpening": 0.5}
    cured = attach(build(family).double(), fidelity=0, cures=numbers)
    seen: dict[int, list[Any]] = {}
    for number, block in enumerate(blocks(cured)):
        block.module.register_forward_pre_hook(
            lambda m, args, kw, n=number: seen.setdefault(n, []).append(kw.get("hidden_states", (args or [None])[0])),
            with_kwargs=True,
        )
        block.projection.register_forward_pre_hook(lambda m, args, n=number: seen[n].append(args[0]))  # type: ignore[union-attr]
        block.projection.register_forward_hook(lambda m, args, out, n=number: seen[n].append(out))  # type: ignore[union-attr]
    output(cured, given)
    mask = given.get("attention_mask", torch.ones(seen[0][0].shape[:2])).double()
    weights = mask[:, None, :].expand(-1, mask.shape[1], -1)
    if blocks(cured)[0].causal:
        weights = weights.tril()
    uniform = weights / weights.sum(-1, keepdim=True).clamp_min(1)
    for number, (w_v, b_v, out) in enumerate(_projected(stock, family)):
        tokens, heads, found = seen[number]
        mean = uniform @ (tokens @ w_v + b_v)
        w_o = out.weight.T if family != "gpt2" else out.weight
        b_o = 0.0 if out.bias is None else out.bias
        values, vectors = torch.linalg.eig(w_v @ w_o)
        other = torch.where(values.real > 0, values - 2 * 0.5 * values.real, values)
        # A head of values that serves two of queries leaves eigenvalues that are 0, which stay.
        ratio = torch.where(values.abs() > 1e-9, other / values, torch.ones_like(values))
        new = (vectors @ torch.diag(ratio) @ torch.linalg.inv(vectors)).real
        change = heads + 0.4 * (heads - mean) - 0.3 * mean
        y = change @ w_o @ new + b_o
        y = 0.9 * (y + 0.25 * (y - uniform @ y))
        rows = mask.bool()
        torch.testing.assert_close(found[rows], y[rows], **DOUBLE)


def _windowed(kind: str, base: str) -> Any:
    """Return a model whose last layer sees two tokens far."""
    shape: dict[str, Any] = {
        "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": HEADS, "intermediate_size": 40,
        "vocab_size": 61, "pad_token_id": 0, "initializer_range": 0.3,
    }  # fmt: skip
    if kind == "ModernBert":
        shape |= {"local_attention": 4}
    else:
        shape |= {"num_key_value_heads": 2, "head_dim": WIDTH // HEADS, "sliding_window": 3}
    if kind != "Mistral":
        shape |= {"layer_types": ["full_attention", "sliding_attention"]}
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}Model")(getattr(transformers, f"{kind}Config")(**shape)).eval()
    model.set_attn_implementation(base)
    return model


@pytest.mark.parametrize("name", ["feat-scale", "centring", "attn-scale", "similarity-removal"])
@pytest.mark.parametrize(
    ("kind", "base"), [("Mistral", "eager"), ("Mistral", "sdpa"), ("Gemma2", "eager"), ("ModernBert", "sdpa")]
)
def test_means_are_over_the_windows_that_attention_sees(kind: str, base: str, name: str) -> None:
    """What the last layer gets or gives, before and after a cure of it, of a text and of one with padding."""
    model, given = _windowed(kind, base), inputs("bert")
    block, seen = blocks(model)[-1], []
    if block.projection is None and name in ("centring", "attn-scale"):
        return  # which is refused

    def look() -> Any:
        if name == "similarity-removal":
            return block.layer.register_forward_pre_hook(lambda m, args: seen.append(args[0]))
        place = block.projection or block.module
        return place.register_forward_hook(lambda m, args, y: seen.append(y[0] if isinstance(y, tuple) else y))

    block.module.register_forward_pre_hook(
        lambda m, args, kw: seen.append((args or [*kw.values()])[0]), with_kwargs=True
    )
    look()
    attach(model, fidelity=0, cures={name: [0, 0.5]})
    look()
    seen.clear()
    output(model, given)
    before, after, tokens = seen if name == "similarity-removal" else [*seen[1:], seen[0]]
    there, i = given["attention_mask"].bool(), torch.arange(before.shape[1])
    far = i[:, None] - i
    weights = there[:, None] & ((far.abs() <= 2) if kind == "ModernBert" else (far >= 0) & (far <= 2))
    mean = weights.float() / weights.sum(-1, keepdim=True).clamp_min(1)
    if name in ("feat-scale", "similarity-removal"):
        wanted = before + 0.5 * before * (name == "feat-scale") - 0.5 * mean @ before
    else:
        values = (mean @ block.module.v_proj(tokens)).unflatten(-1, (-1, WIDTH // HEADS))  # type: ignore[operator]
        uniform = values.repeat_interleave(2, dim=-2).flatten(-2) @ block.projection.weight.T  # type: ignore[union-attr,operator]
        wanted = before + 0.5 * before * (name == "attn-scale") - 0.5 * uniform
    torch.testing.assert_close(after[there], wanted[there], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("base", ["eager", "sdpa"])
def test_a_temperature_is_that_of_the_logits(family: str, base: str) -> None:
    given = inputs(family)
    cured = attach(build(family, base), fidelity=0, cures={"temperature": 0.5})
    other = build(family, base)
    for block in blocks(other):
        module: Any = block.module
        for name in ("query", "q_proj"):
            if hasattr(module, name):
                for one in getattr(module, name).parameters():
                    one.data *= 2
        if hasattr(module, "c_attn"):
            module.c_attn.weight.data[:, :WIDTH] *= 2
            module.c_attn.bias.data[:WIDTH] *= 2
    torch.testing.assert_close(output(cured, given), output(other, given), rtol=1e-4, atol=1e-5)
    # A probe sees the P that the model has.
    for one, two in zip(probe(cured, given).layers, probe(other, given).layers, strict=True):
        assert one.quantities["energy"] == pytest.approx(two.quantities["energy"], rel=1e-4)


def test_sharpened_products_have_no_positive_real_parts() -> None:
    torch.manual_seed(0)
    matrix = torch.randn(40, 40, dtype=torch.float64)
    before = torch.linalg.eigvals(matrix)
    for share, factor in ((0.0, 1.0), (0.25, 0.5), (1.0, -1.0)):
        after = torch.linalg.eigvals(matrix @ sharpened(matrix, share))
        wanted = torch.complex(torch.where(before.real > 0, factor * before.real, before.real), before.imag)
        torch.testing.assert_close(_sorted(after), _sorted(wanted), **DOUBLE)


def _sorted(values: Any) -> Any:
    return torch.stack(sorted(values, key=lambda z: (round(float(z.real), 7), float(z.imag))))


class Summing(torch.nn.Module):
    """Attention with one projection for queries, keys and values, which sums by itself, as in timm."""

    def __init__(self, fused: bool, is_causal: bool = False) -> None:
        super().__init__()
        self.num_heads, self.fused, self.is_causal = HEADS, fused, is_causal
        self.qkv, self.proj = torch.nn.Linear(WIDTH, 3 * WIDTH), torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Any) -> Any:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        if self.fused:
            made = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=self.is_causal)
        else:
            made = (q @ k.mT * q.shape[-1] ** -0.5).softmax(dim=-1) @ v
        return self.proj(made.transpose(1, 2).flatten(2))


class Residual(torch.nn.Module):
    def __init__(self, attention: Any) -> None:
        super().__init__()
        self.attn = attention

    def forward(self, x: Any) -> Any:
        made = self.attn(x, x, x) if isinstance(self.attn, torch.nn.MultiheadAttention) else self.attn(x)
        return x + (made[0] if isinstance(made, tuple) else made)


def _outside(kind: str) -> Any:
    torch.manual_seed(0)
    layers = [
        Residual(
            torch.nn.MultiheadAttention(WIDTH, HEADS, batch_first=True) if kind == "torch" else Summing(kind == "fused")
        )
        for _ in range(3)
    ]
    return torch.nn.Sequential(*layers).eval()


@pytest.mark.parametrize("name", OTHERS)
def test_modules_outside_of_transformers_have_the_same_cures(name: str) -> None:
    """Three ways to write one attention give the same numbers when they have the same weights."""
    x = torch.randn(2, 7, WIDTH, generator=torch.Generator().manual_seed(1))
    found = []
    for kind in ("torch", "fused", "softmax"):
        model = _outside(kind)
        for layer, own in zip(model, _outside("fused"), strict=True):
            if kind == "torch":
                layer.attn.in_proj_weight, layer.attn.in_proj_bias = own.attn.qkv.weight, own.attn.qkv.bias
                layer.attn.out_proj.weight, layer.attn.out_proj.bias = own.attn.proj.weight, own.attn.proj.bias
            else:
                layer.attn.load_state_dict(own.attn.state_dict())
        with torch.no_grad():
            before = model(x)
            attach(model, fidelity=0, cures={name: CURES[name].values[0]})
            found.append(model(x))
            assert not torch.allclose(found[-1], before)
            assert torch.equal(detach(model)(x), before)
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found[2], found[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("count", [7, 90])
def test_modules_that_sum_have_the_term_in_half_precision(count: int, dtype: Any) -> None:
    x = torch.randn(2, count, WIDTH, generator=torch.Generator().manual_seed(1)).to(dtype)
    model = attach(_outside("fused").to(dtype), fidelity=0.5)
    with torch.no_grad():
        found, exact = model(x), attach(_outside("fused").to(dtype).double(), fidelity=0.5)(x.double())
    assert found.dtype == dtype
    off = 8 * torch.finfo(dtype).eps * float(exact.abs().max())
    torch.testing.assert_close(found.double(), exact, rtol=0, atol=off)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")  # which the stock encoder makes
@pytest.mark.parametrize("name", CURES)
def test_an_encoder_of_torch_has_its_cures_with_padding(name: str) -> None:
    """Without terms it makes nested tensors of padded sequences, which cures do not take."""
    x = torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(1))
    hidden = torch.arange(6)[None] >= torch.tensor([[6], [4]])
    found = []
    for nested in (True, False):
        torch.manual_seed(0)
        layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        model = torch.nn.TransformerEncoder(layer, 3, enable_nested_tensor=nested).eval()
        with torch.no_grad():
            before = model(x, src_key_padding_mask=hidden)
            attach(model, **CURES[name].arguments([CURES[name].values[0]] * 3))
            found.append(model(x, src_key_padding_mask=hidden)[~hidden])
            assert not torch.allclose(found[-1], before[~hidden])
            assert torch.equal(detach(model)(x, src_key_padding_mask=hidden), before)
    assert torch.equal(*found)


def torch_encoder(batch_first: bool = True) -> Any:
    torch.manual_seed(0)
    options = {"dropout": 0.0, "activation": "gelu", "norm_first": True}
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=batch_first, **options)
    return torch.nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).double().eval()


@pytest.mark.parametrize("name", CURES)
def test_layers_of_torch_are_cured_by_their_own_masks(name: str) -> None:
    """A causal mask hides the later tokens from means too, and tokens may come first."""
    x = torch.randn(2, 6, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    causal = torch.ones(6, 6, dtype=torch.bool).triu(1)
    hidden = torch.arange(6)[None] >= torch.tensor([[6], [5]])
    found = []
    for batch_first in (True, False):
        model = torch_encoder(batch_first)

        def run(x: Any, model: Any = model, first: bool = batch_first, **masks: Any) -> Any:
            with torch.no_grad():
                return model(x, **masks) if first else model(x.transpose(0, 1), **masks).transpose(0, 1)

        before = run(x, mask=causal)
        attach(model, **CURES[name].arguments([CURES[name].values[-1]] * 3))
        found.append(run(x, mask=causal, src_key_padding_mask=hidden))
        assert not torch.allclose(found[-1], before)
        torch.testing.assert_close(found[-1][:, :4], run(x[:, :4], mask=causal[:4, :4]), **DOUBLE)
        torch.testing.assert_close(found[-1][1, :5], run(x[1:, :5], mask=causal[:5, :5])[0], **DOUBLE)
        assert torch.equal(run(x, detach(model), mask=causal), before)
    torch.testing.assert_close(*found, **DOUBLE)


@pytest.mark.on_cpu("puts a model on the pretended GPU itself")
def test_a_removal_asks_a_device_for_masks_alone() -> None:
    model, x = torch_encoder(), torch.randn(2, 6, 16, dtype=torch.float64)
    hidden = torch.arange(6)[None] >= torch.tensor([[6], [5]])
    few, many = _asked(model, (x,), ({}, {"src_key_padding_mask": hidden}))
    assert few == 0
    assert many <= 3 * 3  # whether tokens are hidden from a layer, and from its attention, and whether it is the same


@pytest.mark.on_cpu("puts a model on the pretended GPU itself")
@pytest.mark.parametrize("family", ["bert", "llama"])
def test_a_removal_asks_a_device_once_for_a_mask_of_all_layers(family: str) -> None:
    given = inputs(family)
    ids = given.get("input_ids")
    mask = torch.ones_like(ids)
    mask[1:, -1] = 0
    few, many = _asked(build(family), (), ({"input_ids": ids}, {"input_ids": ids, "attention_mask": mask}))
    assert few <= 1
    assert many <= 1


def _asked(model: Any, args: tuple[Any, ...], calls: tuple[dict[str, Any], ...]) -> list[int]:
    """Return how much more often calls of a model on a device wait for it with a removal than without."""
    found: list[list[int]] = []
    with pretended.gpu(), torch.no_grad():
        model.to("cuda")
        there = [pretended.put(one) for one in args]
        for change in (detach, lambda model: attach(model, fidelity=0, cures={"similarity-removal": 0.5})):
            changed, own = change(model), []
            for masks in calls:
                put = {name: pretended.put(one) for name, one in masks.items()}
                with pretended.counting() as counts:
                    changed(*there, **put)
                own.append(counts.synchronizations)
            found.append(own)
    return [cured - plain for plain, cured in zip(*found, strict=True)]


class Masked(torch.nn.Module):  # type: ignore[misc]
    """A layer of one's own, whose mask no call of a layer shows."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = torch.nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x: Any) -> Any:
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        return x + self.attn(x, x, x, attn_mask=mask)[0]


def test_a_removal_before_a_mask_that_is_not_seen_is_refused() -> None:
    model, x = torch.nn.Sequential(Masked(), Masked()).eval(), torch.randn(1, 5, 16)
    attach(model, fidelity=0, cures={"similarity-removal": 0.5})
    with pytest.raises(InputError, match=r"similarity-removal'\]: got a mask in 1.attn that is not seen in the call"):
        model(x)
    causal = Adapter("MultiheadAttention", causal=True)
    whole, part = (
        attach(model, fidelity=0, cures={"similarity-removal": 0.5}, adapter=causal)(y) for y in (x, x[:, :3])
    )
    torch.testing.assert_close(whole[:, :3], part)


def _learning(kind: str) -> tuple[Any, Any]:
    """Return a model in float64, and a function that calls it."""
    if kind == "bert":
        model, given = build("bert").double(), inputs("bert")
        return model, lambda: model(**given).last_hidden_state
    model = torch_encoder() if kind == "torch" else _outside("fused").double()
    width = 16 if kind == "torch" else WIDTH
    x = torch.randn(2, 5, width, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return model, lambda: model(x)


@pytest.mark.parametrize("name", [name for name in CURES if name != "sharpening"])
@pytest.mark.parametrize("kind", ["bert", "torch", "fused"])
def test_cures_learn_with_their_weights(kind: str, name: str) -> None:
    """The derivative along a change of all weights is that of differences."""
    model, run = _learning(kind)
    attach(model, **CURES[name].arguments([CURES[name].values[-1]] * 3))
    run()  # fused projections show their layout

    def loss() -> Any:
        made = run()
        return (made * torch.linspace(-1, 2, made.shape[-1], dtype=made.dtype)).square().sum()

    loss().backward()
    generator, step, moved = torch.Generator().manual_seed(2), 1e-5, []
    ways = {one: torch.randn(one.shape, generator=generator, dtype=one.dtype) for one in model.parameters()}
    along = sum(float((one.grad * way).sum()) for one, way in ways.items() if one.grad is not None)
    with torch.no_grad():
        for move in (step, -2 * step):
            for one, way in ways.items():
                one.add_(move * way)
            moved.append(float(loss()))
    assert along == pytest.approx((moved[0] - moved[1]) / (2 * step), rel=1e-6)


@pytest.mark.parametrize("name", ["centring", "attn-scale", "sharpening"])
@pytest.mark.parametrize("kind", ["bert", "torch", "fused"])
def test_cures_follow_weights_that_change(kind: str, name: str) -> None:
    model, run = _learning(kind)
    attach(model, fidelity=0, cures={name: 0.5})
    with torch.no_grad():
        run()
        for number, block in enumerate(blocks(model)):
            for one in block.module.parameters():
                one.add_(0.1 * torch.randn(one.shape, generator=torch.Generator().manual_seed(number)))
        found = run()
        torch.testing.assert_close(found, (attach(model, fidelity=0, cures={name: 0.5}), run())[1], **DOUBLE)
    if name == "sharpening":
        with pytest.raises(InputError, match=r"sharpening'\]: got a training of .*expected weights that stay"):
            (model.train(), run())


STRENGTHS = {
    "semi-implicit": [0.2, 0.3, 0.5], "explicit": [0.2, 0.3, 0.5], "similarity-removal": [0.3, 0.4, 1.0],
    "centring": [0.3, 0, 1.0], "feat-scale": [0.4, 0, -0.3], "attn-scale": [0.4, 0, -0.3],
    "temperature": [0.5, 1, 2.0], "layer-scale": [0.7, 1, 1.4], "sharpening": [0.3, 0, 1.0],
}  # fmt: skip


def by_hand(model: Any, x: Any, name: str, strengths: list[float]) -> Any:
    """Return what a stack of `Summing` gives with a cure, each in a line of torch."""
    first = None
    for layer, s in zip(model, strengths, strict=True):
        s = 0 if first is None and CURES[name].later else s
        module = layer.attn
        weight = torch.ones(x.shape[1], x.shape[1], dtype=x.dtype)
        weight = weight.tril() if module.is_causal else weight
        uniform = weight / weight.sum(-1, keepdim=True)
        x = x - s * uniform @ x if name == "similarity-removal" else x
        q, k, v = (one.unflatten(-1, (HEADS, -1)).transpose(1, 2) for one in module.qkv(x).chunk(3, -1))
        logits = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(weight == 0, -torch.inf)
        y = (logits / (s if name == "temperature" else 1)).softmax(-1) @ v
        first = v if first is None else first
        y = (y + s * first) / (1 + s) if name == "semi-implicit" else y
        y = y + s * (first - v) if name == "explicit" else y
        y = y - s * uniform @ v if name == "centring" else y
        y = y + s * (y - uniform @ v) if name == "attn-scale" else y
        y = y.transpose(1, 2).flatten(2)
        if name == "sharpening":
            w_v = module.qkv.weight[2 * WIDTH :].T
            values, vectors = torch.linalg.eig(w_v @ module.proj.weight.T)
            values = torch.complex(values.real - 2 * s * values.real.clamp_min(0), values.imag)
            w_o = torch.linalg.solve(w_v, (vectors * values @ torch.linalg.inv(vectors)).real)  # W_V W_O is the new one
            y = y @ w_o + module.proj.bias
        else:
            y = module.proj(y)
        y = y + s * (y - uniform @ y) if name == "feat-scale" else y
        x = x + (s * y if name == "layer-scale" else y)
    return x


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", CURES)
def test_each_cure_is_its_line_of_torch(name: str, causal: bool) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(Residual(Summing(True, causal)) for _ in range(3))).double().eval()
    x = torch.randn(2, 7, WIDTH, dtype=torch.float64)
    with torch.no_grad():
        expected = by_hand(model, x, name, STRENGTHS[name])
        found = attach(model, **CURES[name].arguments(STRENGTHS[name]))(x)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)
        assert not torch.allclose(detach(model)(x), expected)


def test_cures_go_into_folders_with_the_term(tmp_path: Path) -> None:
    given = inputs("bert")
    model = attach(build("bert"), fidelity=0.2, cures={"temperature": [1, 0.8, 1.2], "layer-scale": 0.9})
    wanted = output(model, given)
    model.save_pretrained(tmp_path)
    assert torch.equal(output(load_terms(build("bert"), tmp_path), given), wanted)


def test_cures_by_layers_leave_the_others() -> None:
    given = inputs("vit")
    one = output(attach(build("vit"), fidelity=0, cures={"layer-scale": [1, 1, 0.5]}), given)
    other = build("vit")
    blocks(other)[2].projection.register_forward_hook(lambda m, a, y: 0.5 * y)  # type: ignore[union-attr]
    assert torch.equal(one, output(other, given))


def test_numbers_of_blocks_may_be_an_array() -> None:
    given, numbers = inputs("bert"), [0.5, 1.0, 2.0]
    expected = output(attach(build("bert"), fidelity=0, cures={"temperature": numbers}), given)
    for array in (np.array(numbers), torch.tensor(numbers)):
        assert torch.equal(output(attach(build("bert"), fidelity=0, cures={"temperature": array}), given), expected)


def test_cures_that_are_refused() -> None:
    model = build("bert")
    for cures, words in (
        ({"heat": 1.0}, "cures: got 'heat', expected one of"),
        ({"explicit": 1.0}, "cures: got 'explicit', which attach has as arguments of its own, expected other cures"),
        ({"temperature": 0.0}, r"cures\['temperature'\]: got 0, expected T from 0.01 to 100"),
        ({"similarity-removal": 1.5}, "expected τ from 0 to 1 for similarity-removal"),
        ({"layer-scale": [1.0]}, "got 1 values, expected 3, one for each block"),
        (["temperature"], "cures: got list, expected a mapping"),
    ):
        with pytest.raises(InputError, match=words):
            attach(model, fidelity=0, cures=cures)  # type: ignore[arg-type]
    decoder = attach(build("gpt2"), fidelity=0, cures={"centring": 0.5})
    cached = decoder(**inputs("gpt2", batch=1), use_cache=True)
    with pytest.raises(InputError, match=r"cures: got tokens after 9 in a cache .* use_cache=False"):
        decoder(input_ids=torch.tensor([[4]]), past_key_values=cached.past_key_values)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["centring", "feat-scale", "attn-scale", "similarity-removal"])
def test_means_of_tokens_are_recomputed_with_their_padding(name: str, reentrant: bool) -> None:
    given = inputs("bert")
    model = attach(build("bert"), fidelity=0, cures={name: CURES[name].values[0]}).train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    direction = torch.randn(*given["input_ids"].shape, WIDTH, generator=torch.Generator().manual_seed(0))
    found = []
    for again in (False, True):
        if again:
            checkpointed(model, use_reentrant=reentrant)
        model.zero_grad()
        (output(model, given) * direction).sum().backward()
        found.append(model.embeddings.word_embeddings.weight.grad.clone())
    torch.testing.assert_close(found[1], found[0])


class Again(torch.nn.Module):  # type: ignore[misc]
    """A stack that computes its layers again for derivatives, and whose padding no call of a layer shows."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Residual(Summing(True)) for _ in range(2))

    def forward(self, x: Any, attention_mask: Any) -> Any:
        for layer in self.layers:
            x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
        return x


def test_means_of_tokens_are_not_recomputed_without_their_padding() -> None:
    model, x = Again().eval(), torch.randn(1, 5, WIDTH)
    attach(model, fidelity=0, cures={"feat-scale": 0.5})
    loss = model(x, torch.tensor([[1, 1, 1, 0, 0]])).sum()
    with pytest.raises(InputError, match="gradient checkpointing"):
        loss.backward()


def test_means_of_tokens_are_refused_where_their_order_is_not_told() -> None:
    """A decoder whose attention sums by itself: a mean over all tokens would tell the future."""
    config = transformers.BloomConfig(hidden_size=WIDTH, n_layer=2, n_head=HEADS, vocab_size=61)
    torch.manual_seed(0)
    model = transformers.BloomModel(config).eval()
    given = {"input_ids": torch.arange(1, 9)[None]}
    if hasattr(blocks(model)[0].module, "is_causal"):
        pytest.skip("this release of transformers says it")
    with pytest.raises(InputError, match=r"centring.*does not say whether a token sees the later ones"):
        attach(model, fidelity=0, cures={"centring": 0.5})
    adapter = Adapter("BloomAttention", causal=True)
    cured = attach(model, fidelity=0, cures={"feat-scale": 0.5}, adapter=adapter)
    whole = output(cured, given)
    part = output(cured, {"input_ids": given["input_ids"][:, :5]})
    torch.testing.assert_close(whole[:, :5], part, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_sharpened_model_is_one_graph() -> None:
    torch.compiler.reset()
    model = torch_encoder()
    attach(model, fidelity=0, cures={"sharpening": 0.5})
    x = torch.randn(2, 5, 16, dtype=torch.float64)
    with torch.no_grad():
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(x), model(x), **DOUBLE)
