"""Probes and terms in models that do not ask transformers for their attention: torch's own, and drawn after others."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", minversion="5")

from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402
from torch.nn.functional import scaled_dot_product_attention  # noqa: E402

from nlflow.attention import attach, detach, explain, probe  # noqa: E402
from nlflow.errors import InputError  # noqa: E402


def tokens(count: int = 7) -> Any:
    return torch.randn(2, count, 16, generator=torch.Generator().manual_seed(0))


class Fused(nn.Module):
    """Attention as timm has it: one projection to queries, keys and values, torch's function, one projection."""

    def __init__(self, twice: bool = False) -> None:
        super().__init__()
        self.qkv, self.proj, self.twice = nn.Linear(16, 48), nn.Linear(16, 16), twice

    def parts(self, x: Any) -> Any:
        return self.qkv(x).reshape(*x.shape[:2], 3, 2, 8).permute(2, 0, 3, 1, 4)

    def forward(self, x: Any) -> Any:
        q, k, v = self.parts(x)
        found = functional.scaled_dot_product_attention(q, k, v)
        if self.twice:
            found = found - 0.5 * scaled_dot_product_attention(k, q, v)  # by a name that is bound
        return self.proj(found.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, twice: bool = False) -> None:
        super().__init__()
        self.norm, self.attn, self.mlp = nn.LayerNorm(16), Fused(twice), nn.Linear(16, 16)

    def forward(self, x: Any) -> Any:
        x = x + self.attn(self.norm(x))
        return x + self.mlp(x)


class Pictures(nn.Module):
    """A vision transformer whose layers have names that end in a number, as torchvision's have."""

    def __init__(self) -> None:
        super().__init__()
        self.image_size, self.patch = 8, nn.Conv2d(3, 16, 4, 4)
        layer = [nn.TransformerEncoderLayer(16, 2, 32, batch_first=True) for _ in range(3)]
        self.layers = nn.Sequential()
        for number, one in enumerate(layer):
            self.layers.add_module(f"encoder_layer_{number}", one)

    def forward(self, x: Any) -> Any:
        return self.layers(self.patch(x).flatten(2).transpose(1, 2))


def made(model: Any) -> Any:
    torch.manual_seed(5)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model.eval()


@pytest.mark.parametrize("causal", [False, True])
def test_layers_of_torch_are_seen(causal: bool) -> None:
    """P is what nn.MultiheadAttention itself gives out; J is a plain double sum."""
    model = made(nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 3))
    x, seen = tokens(), []
    given = {"src": x}
    if causal:
        given["mask"] = nn.Transformer.generate_square_subsequent_mask(7)
    fast = torch.backends.mha.get_fastpath_enabled()
    own = functional.scaled_dot_product_attention
    trace = probe(model, given, keep_matrices=True)
    assert (torch.backends.mha.get_fastpath_enabled(), functional.scaled_dot_product_attention) == (fast, own)
    assert len(trace) == 3
    attention = model.layers[1].self_attn
    with torch.no_grad():
        handle = attention.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
        model(**given)
        handle.remove()
        mask = given.get("mask")
        _, p = attention(seen[0], seen[0], seen[0], attn_mask=mask, average_attn_weights=False)
    assert trace[1].matrices is not None
    np.testing.assert_allclose(trace[1].matrices.numpy(), p.numpy(), atol=1e-6)
    v = trace[1].v.numpy()
    apart = ((v[..., :, None, :] - v[..., None, :, :]) ** 2).sum(-1)
    np.testing.assert_allclose(trace[1].quantities["energy"], (p.numpy() * apart).sum((-2, -1)) / 14, rtol=1e-4)
    assert np.isfinite(trace[1].quantities["mean_cosine"]).all()


class Turning(nn.Module):
    """A layer of states (B, N, D), whose attention takes tokens (N, B, D) and gives its weights, as torch's does."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attn, self.mlp = nn.LayerNorm(16), nn.MultiheadAttention(16, 2), nn.Linear(16, 16)

    def forward(self, x: Any) -> Any:
        y = self.norm(x).transpose(0, 1)
        x = x + self.attn(y, y, y)[0].transpose(0, 1)
        return x + self.mlp(x)


@pytest.mark.parametrize("sequences", [2, 7])  # 7: as many as tokens, so shapes do not tell
@pytest.mark.parametrize("kind", ["first", "before", "turned"])
def test_tokens_may_come_first(kind: str, sequences: int) -> None:
    """The states are those of hooks, and the parts those of the same weights with sequences first."""
    x = torch.randn(sequences, 7, 16, generator=torch.Generator().manual_seed(1))
    if kind == "turned":
        model, first = made(nn.Sequential(Turning(), Turning())), False
        layers = list(model)
    else:
        one = nn.TransformerEncoderLayer(16, 2, 32, norm_first=kind == "before")
        model, first = made(nn.TransformerEncoder(one, 2, enable_nested_tensor=False)), True
        layers = list(model.layers)
    given = x.transpose(0, 1) if first else x
    states: list[Any] = []
    handles = [layer.register_forward_hook(lambda *call: states.append(call[2])) for layer in layers]
    with torch.no_grad():
        model(given)
    for handle in handles:
        handle.remove()
    trace, cause = probe(model, given), explain(model, given)
    for layer, block, state in zip(trace, cause.blocks, states, strict=True):
        expected = state.transpose(0, 1) if first else state
        assert torch.equal(layer.after, expected)
        units = nn.functional.normalize(expected.double(), dim=-1)
        cosine = ((units @ units.mT).sum((1, 2)) - 7) / 42
        np.testing.assert_allclose(layer.quantities["mean_cosine"], cosine, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(block.points["after"].values["cosine"], cosine, rtol=1e-5, atol=1e-6)
        assert not block.reason
        assert "mixing" in block.parts
    if first:
        one = nn.TransformerEncoderLayer(16, 2, 32, norm_first=kind == "before", batch_first=True)
        other = nn.TransformerEncoder(one, 2, enable_nested_tensor=False).eval()
        other.load_state_dict(model.state_dict())
        for row, same in zip(cause.rows(), explain(other, x).rows(), strict=True):
            numbers = [name for name, value in row.items() if isinstance(value, float)]
            np.testing.assert_allclose([row[name] for name in numbers], [same[name] for name in numbers], atol=1e-5)


def test_one_projection_for_all_is_seen() -> None:
    model = made(nn.Sequential(*(Block() for _ in range(3))))
    trace = probe(model, tokens(), keep_matrices=True)
    assert [layer.name for layer in trace] == ["0.attn", "1.attn", "2.attn"]
    with torch.no_grad():
        for number, layer in enumerate(trace):
            assert layer.before is not None
            q, k, v = model[number].attn.parts(model[number].norm(layer.before))
            p = (q @ k.transpose(-1, -2) / 8**0.5).softmax(-1)
            np.testing.assert_allclose(layer.matrices.numpy(), p.numpy(), atol=1e-6)
            torch.testing.assert_close(layer.v, v)
    attach(model, fidelity=0.5, inputs=tokens())
    changed = probe(model, tokens())
    assert float(changed[-1].quantities["mean_cosine"].mean()) != float(trace[-1].quantities["mean_cosine"].mean())
    detach(model)


def test_an_average_taken_twice_is_refused() -> None:
    with pytest.raises(InputError, match=r"0\.attn \(Fused\) averages more than once in a call; .* pass take="):
        probe(made(nn.Sequential(Block(True), Block(True))), tokens())
    assert functional.scaled_dot_product_attention.__module__ != __name__


def test_layers_named_with_a_number_are_a_stack_and_tried_on_a_picture() -> None:
    """The model says the size of its images: attach runs it, without inputs from the user."""
    model = made(Pictures())
    x = torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        before = model(x)
        calls: list[int] = []
        handle = model.register_forward_hook(lambda *_: calls.append(1))
        attach(model, fidelity=0.5)
        handle.remove()
        assert calls == [1]
        assert not torch.equal(model(x), before)
        detach(model)
        assert torch.equal(model(x), before)
    assert len(probe(model, x)) == 3
