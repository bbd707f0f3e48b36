"""Gradients of what a probe measures, against central differences."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import nlflow as nl  # noqa: E402
from nlflow.attention import attach, probe  # noqa: E402

STEP = 1e-5


def bert(**changes: Any) -> Any:
    torch.manual_seed(3)
    config = transformers.BertConfig(
        hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=32, vocab_size=30, **changes
    )
    return transformers.BertModel(config).double().eval()


def given(model: Any, x: Any, padded: bool) -> dict[str, Any]:
    mask = torch.ones(x.shape[:2], dtype=torch.long)
    if padded:
        mask[1, 4:] = 0
    return {"inputs_embeds": x, "attention_mask": mask}


def tokens(model: Any) -> Any:
    return torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.mark.slow
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("kernel", ["softmax", "symmetric", "gaussian"])
def test_gradients_are_those_of_central_differences(kernel: str, padded: bool) -> None:
    """Of every quantity of every layer, along one way of the tokens."""
    model = bert()
    if kernel != "softmax":
        attach(model, affinity=kernel, fidelity=0.4)
    x = tokens(model)
    way = torch.randn(x.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    place = torch.zeros((), dtype=torch.float64, requires_grad=True)
    trace = probe(model, given(model, x + place * way, padded), gradients=True)
    sides = [probe(model, given(model, x + sign * STEP * way, padded)) for sign in (-1, 1)]
    plain = probe(model, given(model, x, padded))
    for number, layer in enumerate(trace):
        assert set(layer.differentiable) == set(layer.quantities) == set(plain[number].quantities)
        for name, values in layer.differentiable.items():
            np.testing.assert_allclose(layer.quantities[name], plain[number].quantities[name], rtol=1e-9, err_msg=name)
            low, high = (side[number].quantities[name] for side in sides)
            expected = (high - low) / (2 * STEP)
            counted = np.isfinite(expected)
            assert counted.any()
            flat = values[torch.from_numpy(counted)]
            found = [float(torch.autograd.grad(one, place, retain_graph=True)[0]) for one in flat]
            np.testing.assert_allclose(found, expected[counted], rtol=1e-5, atol=1e-7, err_msg=name)


def test_a_learned_strength_can_be_told_how_alike_tokens_become() -> None:
    """The cosine after the last layer falls along the gradient of the strengths."""
    model = attach(bert(), fidelity=0.2, learned=True)
    strengths = [parameter for name, parameter in model.named_parameters() if "fidelity" in name]
    assert strengths
    inputs = given(model, tokens(model), False)
    before = probe(model, inputs, gradients=True)[-1].differentiable["mean_cosine"].mean()
    before.backward()
    with torch.no_grad():
        for parameter in strengths:
            if parameter.grad is not None:
                parameter -= 1e-2 * parameter.grad.sign()
    assert float(probe(model, inputs)[-1].quantities["mean_cosine"].mean()) < float(before.detach())


def test_heads_and_states_belong_to_the_graph_on_request_alone() -> None:
    model = bert()
    x = tokens(model).requires_grad_()
    layer = probe(model, given(model, x, False), gradients=True, keep_matrices=True)[1]
    for part in (layer.q, layer.k, layer.v, layer.before, layer.between, layer.after):
        (slope,) = torch.autograd.grad(part.square().sum(), x, retain_graph=True)
        assert float(slope.abs().max()) > 0
    assert layer.matrices is not None
    assert not layer.matrices.requires_grad
    plain = probe(model, given(model, x, False))[1]
    assert plain.differentiable == {}
    assert not any(part.requires_grad for part in (plain.q, plain.k, plain.v, plain.before, plain.after))
    assert layer.head(0).spectral_gap == pytest.approx(plain.head(0).spectral_gap, rel=1e-9)


def test_what_gradients_need_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NLFLOW_MEMORY_LIMIT", "1000")
    with pytest.raises(nl.MemoryLimitError, match=r"the gradients of .*probe fewer sequences"):
        probe(bert(), torch.arange(20)[None], gradients=True)
