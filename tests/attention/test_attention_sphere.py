"""Whole blocks beside their flow on the sphere: against a block that is written out, and in models of transformers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scipy.integrate import solve_ivp

from nlflow.attention import Adapter, discretize_blocks  # needs torch
from nlflow.errors import InputError
from tests.transformer_models import MODELS, torch

pytestmark = pytest.mark.numerical

WIDTH, N = 6, 7


class Attention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.maps = torch.nn.ParameterList(torch.randn(WIDTH, WIDTH) / WIDTH**0.5 for _ in range(3))
        self.out = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Any) -> Any:
        q, k, v = (x @ m for m in self.maps)
        return self.out((q @ k.mT / WIDTH**0.5).softmax(-1) @ v)


class Renamed(Attention):
    @property
    def out(self) -> Any:
        return self.last


class Layer(torch.nn.Module):
    def __init__(self, mlp: float, norm: Any) -> None:
        super().__init__()
        self.norm, self.attention, self.mlp = norm(WIDTH), Attention(), torch.nn.Linear(WIDTH, WIDTH)
        self.strength = mlp

    def forward(self, x: Any) -> Any:
        x = x + self.attention(self.norm(x))
        return x + self.strength * self.mlp(self.norm(x))


class Stack(torch.nn.Module):
    def __init__(self, depth: int = 2, mlp: float = 0.0, norm: Any = torch.nn.LayerNorm) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer(mlp, norm) for _ in range(depth))

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x


ADAPTER = Adapter("layers.*.attention", projection="out")


def stack(**options: Any) -> Any:
    torch.manual_seed(0)
    return Stack(**options).double().eval(), torch.randn(2, N, WIDTH, dtype=torch.float64)


@pytest.mark.slow
def test_a_block_without_mlp_is_its_own_layer_step() -> None:
    model, x = stack()
    for one in discretize_blocks(model, x, adapter=ADAPTER):
        assert one.layer == pytest.approx(1, abs=1e-12)
        assert one.explained < 1


@pytest.mark.slow
@pytest.mark.parametrize("norm", [torch.nn.LayerNorm, torch.nn.RMSNorm])
def test_shares_are_those_of_the_flow_written_out(norm: Any) -> None:
    """The flow of the first block by SciPy's integrator, in plain NumPy, and its update by angles."""
    model, x = stack(mlp=0.4, norm=norm)
    one = discretize_blocks(model, x[:1], adapter=ADAPTER, substeps=(4, 8, 16))[0]
    layer, centred = model.layers[0], norm is torch.nn.LayerNorm
    maps = [m.detach().numpy() for m in layer.attention.maps]
    weight, bias = layer.attention.out.weight.detach().numpy(), layer.attention.out.bias.detach().numpy()
    x0 = x[0].numpy()
    mean = x0.mean(axis=1, keepdims=True) if centred else 0.0
    r = np.linalg.norm(x0 - mean, axis=1, keepdims=True)

    def added(u: Any) -> Any:
        y = r * u
        eps = layer.norm.eps if centred else np.finfo(float).eps
        y = y / np.sqrt((y**2).mean(axis=1, keepdims=True) + eps)
        q, k, v = (y @ m for m in maps)
        p = np.exp(q @ k.T / np.sqrt(WIDTH))
        a = (p / p.sum(axis=1, keepdims=True)) @ v @ weight.T + bias
        return (a - a.mean(axis=1, keepdims=True) if centred else a) / r

    def velocity(t: float, flat: Any) -> Any:
        u = flat.reshape(x0.shape)
        a = added(u / np.linalg.norm(u, axis=1, keepdims=True))
        return (a - (a * u).sum(axis=1, keepdims=True) * u).ravel()

    u0 = (x0 - mean) / r
    end = solve_ivp(velocity, (0, 1), u0.ravel(), method="DOP853", rtol=1e-11, atol=1e-12).y[:, -1].reshape(u0.shape)
    after = layer(x[:1])[0].detach().numpy()
    after = after - after.mean(axis=1, keepdims=True) if centred else after

    def arc(y: Any) -> Any:
        y = y / np.linalg.norm(y, axis=1, keepdims=True)
        cosine = (u0 * y).sum(axis=1, keepdims=True)
        return np.arccos(cosine) / np.sqrt(1 - cosine**2) * (y - cosine * u0)

    update = arc(after)
    shares = [1 - ((arc(y) - update) ** 2).sum() / (update**2).sum() for y in (end, u0 + added(u0))]
    assert one.explained == pytest.approx(shares[0], abs=1e-3)  # 64 steps of order 2
    assert one.layer == pytest.approx(shares[1], abs=1e-12)
    v = velocity(0, u0.ravel()).reshape(u0.shape)
    assert one.time == pytest.approx((v * update).sum() / (v**2).sum(), rel=1e-10)
    assert one.direction == pytest.approx((v * update).sum() ** 2 / (v**2).sum() / (update**2).sum(), rel=1e-10)
    assert one.angle == pytest.approx(np.sqrt((update**2).sum(axis=1).mean()), rel=1e-12)
    assert abs(one.order - 1) < 0.1
    assert one.distance[0] > one.distance[1] > one.distance[2] > 0


@pytest.mark.slow
def test_an_mlp_is_what_is_not_explained() -> None:
    shares = [discretize_blocks(stack(mlp=m)[0], stack()[1], adapter=ADAPTER)[0].layer for m in (0.0, 0.5, 2.0)]
    assert shares[0] > shares[1] > shares[2]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert", "vit", "gpt2", "llama"])
def test_in_models_of_transformers(name: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    inputs: Any = {"input_ids": torch.randint(3, 60, (2, 9))}
    if name == "vit":
        inputs = {"pixel_values": torch.randn(2, 3, 12, 12)}
    elif name == "bert":
        inputs["attention_mask"] = torch.ones(2, 9, dtype=torch.long)
        inputs["attention_mask"][1, 6:] = 0
    before = [parameter.clone() for parameter in model.parameters()]
    found = discretize_blocks(model, inputs, substeps=(1, 2, 4))
    assert len(found) == 3
    for one in found:
        assert one.explained <= 1
        assert 0 <= one.direction <= 1
        assert 0 < one.angle < np.pi
        assert one.distance[0] > one.distance[2]
    assert all(torch.equal(*both) for both in zip(before, model.parameters(), strict=True))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    if name == "bert":  # padding has no part in it
        alone = {"input_ids": inputs["input_ids"][1:, :6]}
        short = discretize_blocks(model, alone, substeps=(1,))
        padded = discretize_blocks(model, {key: value[1:] for key, value in inputs.items()}, substeps=(1,))
        assert padded[0].layer == pytest.approx(short[0].layer, abs=1e-4)


def test_layers_of_torch_with_tokens_first_are_those_with_them_behind() -> None:
    x = torch.randn(2, 6, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    found = []
    for batch_first in (True, False):
        torch.manual_seed(0)
        layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=batch_first, dtype=torch.float64)
        model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
        found.append(discretize_blocks(model, x if batch_first else x.transpose(0, 1), substeps=(1, 2)))
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one.distance, other.distance, rtol=1e-9)
        assert one.explained == pytest.approx(other.explained, rel=1e-9)


@pytest.mark.slow
def test_what_cannot_be_compared() -> None:
    model, x = stack()
    unknown, _ = stack()
    for layer in unknown.layers:  # by a name that no library uses
        layer.attention.last = layer.attention.out
        layer.attention.__class__ = Renamed
        del layer.attention._modules["out"]
    named, found = (
        discretize_blocks(unknown, x, adapter=Adapter("layers.*.attention", projection=name)) for name in ("last", "")
    )
    assert [one.layer for one in named] == [one.layer for one in found]  # what is added needs no projection
    with pytest.raises(InputError, match="substeps: got none"):
        discretize_blocks(model, x, substeps=(), adapter=ADAPTER)
    with pytest.raises(InputError, match="inputs: got list"):
        discretize_blocks(model, [x], adapter=ADAPTER)
    with pytest.raises(InputError, match="without a direction"):
        discretize_blocks(model, torch.ones_like(x), adapter=ADAPTER)
    still, _ = stack()
    for parameter in still.parameters():
        parameter.data.zero_()
    with pytest.raises(
        InputError, match=r"moves no token beyond the rounding of torch.float64, expected some that move$"
    ):
        discretize_blocks(still, x, adapter=ADAPTER)
    slow, _ = stack()
    for layer in slow.layers:  # of which bfloat16 sees nothing
        layer.attention.out.weight.data.mul_(1e-3)
        layer.attention.out.bias.data.mul_(1e-3)
    assert discretize_blocks(slow, x, substeps=(1,), adapter=ADAPTER)
    with pytest.raises(InputError, match=r"rounding of torch.bfloat16, .*; load the model in float32"):
        discretize_blocks(slow.bfloat16(), x.bfloat16(), substeps=(1,), adapter=ADAPTER)
    noisy, _ = stack()
    noisy.layers[0].attention.out.register_forward_hook(lambda module, args, output: output + torch.randn_like(output))
    with pytest.raises(InputError, match="adds something else when its layer is called again"):
        discretize_blocks(noisy, x, adapter=ADAPTER)


def test_padding_of_an_encoder_is_none_of_its_decoder() -> None:
    torch.manual_seed(0)
    model, ids = MODELS["bart"]().eval(), torch.randint(3, 60, (2, 6))
    mask = torch.tensor([[1, 1, 1, 1, 0, 0]])
    padded = {"input_ids": ids[:1], "attention_mask": mask, "decoder_input_ids": ids[1:]}
    alone = {"input_ids": ids[:1, :4], "decoder_input_ids": ids[1:]}
    found, expected = (discretize_blocks(model, one, substeps=(1,)) for one in (padded, alone))
    for one, other in zip(found, expected, strict=True):
        assert one.layer == pytest.approx(other.layer, abs=1e-4)
        assert one.angle == pytest.approx(other.angle, rel=1e-4)
