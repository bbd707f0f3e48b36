"""Other terms of the literature against their formulas, a head and a token at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from nlflow.errors import InputError
from tests.problems import torch_on_one_thread

torch = torch_on_one_thread()

from nlflow.attention import NeighbourAttention  # noqa: E402  # needs torch
from nlflow.attention.terms import modules  # noqa: E402

pytestmark = pytest.mark.numerical

B, N, WIDTH, HEADS = 2, 6, 8, 2
SHARE = WIDTH // HEADS


def numbers(part: Any) -> Any:
    return part.detach().double().numpy()


def linear(layer: Any, x: Any) -> Any:
    return x @ numbers(layer.weight).T + numbers(layer.bias)


def softmax(q: Any, k: Any, seen: Any) -> Any:
    """Return P, one row at a time."""
    rows = []
    for i in range(len(q)):
        weights = np.array([np.exp(q[i] @ k[j] / np.sqrt(len(q[i]))) * seen[i, j] for j in range(len(k))])
        rows.append(weights / weights.sum())
    return np.array(rows)


def formula(layer: Any, x: Any, v0: Any, seen: Any) -> Any:
    """Return a layer's output for tokens (N, D) by the formulas of the papers."""
    q, k, v = (linear(part, x) for part in (layer.query, layer.key, layer.value))
    heads = []
    for h in range(HEADS):
        own = slice(h * SHARE, (h + 1) * SHARE)
        if layer.kind == "differential":
            half, w = SHARE // 2, numbers(layer.vectors)
            start = 0.8 - 0.6 * np.exp(-0.3 * (3 - 1))
            strength = np.exp(w[0] @ w[1]) - np.exp(w[2] @ w[3]) + start
            qh, kh = q[:, own], k[:, own]
            first, second = softmax(qh[:, :half], kh[:, :half], seen), softmax(qh[:, half:], kh[:, half:], seen)
            head = (first - strength * second) @ v[:, own]
            head = head / np.sqrt((head**2).mean(axis=1, keepdims=True) + 1e-5) * numbers(layer.gain)
            heads.append((1 - start) * head)
            continue
        P = softmax(q[:, own], k[:, own], seen)
        if layer.kind == "sinkhorn":
            P = np.zeros((len(x), len(x)))
            inside = seen[0].astype(bool)
            k_ij = np.exp(q[:, own] @ k[:, own].T / np.sqrt(SHARE))
            a, b = np.ones(inside.sum()), np.ones(inside.sum())
            for _ in range(20):
                b = 1 / (k_ij[np.ix_(inside, inside)].T @ a)
                a = 1 / (k_ij[np.ix_(inside, inside)] @ b)
            P[:, inside] = k_ij[:, inside] * b
            heads.append(P / P.sum(axis=1, keepdims=True) @ v[:, own])
        elif layer.kind == "value-residual":
            share = numbers(layer.shares)
            heads.append(P @ (share[0] * v0[:, own] + share[1] * v[:, own]))
        elif layer.kind == "laplacian":
            heads.append((np.eye(len(x)) - P) @ v[:, own] if h == 1 else P @ v[:, own])
        else:
            gate = linear(layer.gate, x)[:, own]
            heads.append(P @ v[:, own] / (1 + np.exp(-gate)))
    return linear(layer.output, np.concatenate(heads, axis=1))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", modules.KINDS)
def test_layers_are_the_formulas_of_their_papers(kind: str, causal: bool) -> None:
    if causal and kind == "sinkhorn":
        with pytest.raises(InputError, match="causal: got True with kind='sinkhorn'"):
            NeighbourAttention(WIDTH, HEADS, kind, causal=True)
        return
    torch.manual_seed(0)
    options = {"value-residual": {"learned": True}, "differential": {"layer": 3}}.get(kind, {})
    layer = NeighbourAttention(WIDTH, HEADS, kind, causal=causal, **options).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    x, y = torch.randn(2, B, N, WIDTH, dtype=torch.float64)
    _, first = layer(y)
    assert first.shape == (B, HEADS, N, SHARE)
    mask = torch.ones(B, N, dtype=torch.bool)
    mask[1, 4:] = False
    found, anchor = layer(x, first, mask=mask)
    assert anchor is first
    for b in range(B):
        seen = (np.tri(N) if causal else np.ones((N, N))) * mask[b].numpy()
        expected = formula(layer, numbers(x[b]), linear(layer.value, numbers(y[b])), seen)
        np.testing.assert_allclose(found[b].detach(), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", modules.KINDS)
def test_everything_learns(kind: str) -> None:
    torch.manual_seed(0)
    options = {"learned": True} if kind == "value-residual" else {}
    layer = NeighbourAttention(WIDTH, HEADS, kind, **options).double()
    x = torch.randn(1, N, WIDTH, dtype=torch.float64, requires_grad=True)
    _, first = layer(2 * x)
    names, parameters = zip(*layer.named_parameters(), strict=True)
    gradients = torch.autograd.grad(layer(x, first)[0].sin().sum(), [*parameters, x])
    # A softmax does not see what all keys share; scalings of columns do not see what all queries share either.
    unseen = {"key.bias"} | ({"query.bias"} if kind == "sinkhorn" else set())
    assert all(float(g.abs().max()) > 0 for n, g in zip([*names, "x"], gradients, strict=True) if n not in unseen)
    assert torch.autograd.gradcheck(lambda t: layer(t, first.detach())[0], (x.detach().requires_grad_(),))


def test_where_lambda_starts() -> None:
    found = [modules.differential_start(n) for n in (1, 2, 100)]
    assert found == pytest.approx([0.2, 0.8 - 0.6 * np.exp(-0.3), 0.8])
    torch.manual_seed(0)
    layer = NeighbourAttention(WIDTH, HEADS, "differential", layer=2)
    with torch.no_grad():
        layer.vectors.zero_()
    assert layer.strength.item() == pytest.approx(found[1])


def test_pairs_of_trainings_begin_with_the_same_numbers() -> None:
    """The four projections are drawn first, whichever the kind."""
    layers = []
    for kind in modules.KINDS:
        torch.manual_seed(3)
        layers.append(torch.nn.ModuleList(NeighbourAttention(WIDTH, HEADS, kind) for _ in range(2)))
    for name in ("query", "key", "value", "output"):
        weights = [getattr(pair[1], name).weight for pair in layers]
        assert all(torch.equal(one, weights[0]) for one in weights)


def test_the_first_layer_of_a_value_residual_is_plain() -> None:
    torch.manual_seed(0)
    layer = NeighbourAttention(WIDTH, HEADS, "value-residual")
    x = torch.randn(1, N, WIDTH)
    found, first = layer(x)
    assert torch.allclose(found, layer(x, first)[0], atol=1e-6)  # 1/2 v0 + 1/2 v with v0 = v


def test_which_heads_have_the_laplacian() -> None:
    layer = NeighbourAttention(WIDTH, HEADS, "laplacian", laplacian=[True, False])
    assert layer.chosen.tolist() == [True, False]
    assert NeighbourAttention(WIDTH, 1, "laplacian").chosen.tolist() == [True]


def test_doubly_stochastic_weights() -> None:
    logits = torch.randn(2, 3, 7, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = modules.doubly_stochastic(logits, iterations=200)
    for axis in (-1, -2):
        assert (found.sum(axis) - 1).abs().max() < 1e-6
    import nlflow as nl

    p = nl.sinkhorn(logits[0, 0].exp())
    assert (found[0, 0] - p.matrix).abs().max() < 1e-10
    both = (logits + logits.mT) / 2
    symmetric = modules.doubly_stochastic(both, iterations=200)
    assert (symmetric - symmetric.mT).abs().max() < 1e-10
    small = logits[:1, :1, :4, :4].clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda t: modules.doubly_stochastic(t, iterations=8), (small,))
    softmax = modules.doubly_stochastic(1e4 * logits, iterations=3)
    assert torch.isfinite(softmax).all()
    with pytest.raises(InputError, match="mask: got 4 axes with kind='sinkhorn'"):
        NeighbourAttention(WIDTH, HEADS, "sinkhorn")(torch.randn(1, N, WIDTH), mask=torch.ones(1, 1, N, N).bool())


def test_what_cannot_be() -> None:
    with pytest.raises(InputError, match="kind: got 'other'"):
        NeighbourAttention(WIDTH, HEADS, "other")
    with pytest.raises(InputError, match="learned: got it with kind='gated'"):
        NeighbourAttention(WIDTH, HEADS, "gated", learned=True)
    with pytest.raises(InputError, match="laplacian: got it with kind='gated'"):
        NeighbourAttention(WIDTH, HEADS, "gated", laplacian=[True, True])
    with pytest.raises(InputError, match="expected 2 times True or False"):
        NeighbourAttention(WIDTH, HEADS, "laplacian", laplacian=[True])
    with pytest.raises(InputError, match="3 features in a head, expected an even number"):
        NeighbourAttention(6, 2, "differential")
    with pytest.raises(InputError, match="layer: got 0"):
        NeighbourAttention(WIDTH, HEADS, "differential", layer=0)
    layer = NeighbourAttention(WIDTH, HEADS, "value-residual")
    with pytest.raises(InputError, match="first: got shape"):
        layer(torch.randn(1, N, WIDTH), torch.randn(1, HEADS, N + 1, SHARE))


def test_learned_shares_stay_wide_in_half_precision() -> None:
    for kind, options in (("value-residual", {"learned": True}), ("differential", {})):
        layer = NeighbourAttention(8, 2, kind, **options).to(torch.bfloat16)
        own = [one for name, one in layer.named_parameters(recurse=False)]
        assert {one.dtype for one in own} == {torch.float32}
        assert layer.query.weight.dtype == torch.bfloat16
        x = torch.randn(1, 5, 8, dtype=torch.bfloat16)
        result = layer(x, layer(x.flip(1))[1])[0]
        assert result.dtype == torch.bfloat16
        result.float().sum().backward()
        assert all(one.grad is not None for one in own)
