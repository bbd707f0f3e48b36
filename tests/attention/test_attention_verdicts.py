"""Spectra of W_V W_O and of P, and what they rule: against torch, dense matrices and closed forms."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from nlflow.attention import explain, ruling  # needs torch
from nlflow.attention.probing import spectra, verdicts
from nlflow.attention.probing.spectra import eigenvalues_of, rate_of, verdict_of
from nlflow.attention.probing.verdicts import contraction_of, random_products, random_stochastic, ruling_of_heads
from tests.transformer_models import build, inputs, torch, transformers

pytestmark = pytest.mark.numerical


def stochastic(count: int, seed: int = 0) -> Any:
    drawn = np.exp(np.random.default_rng(seed).standard_normal((count, count)))
    return drawn / drawn.sum(axis=1, keepdims=True)


def largest(matrix: Any, keep: int) -> Any:
    found = torch.linalg.eigvals(matrix).detach().numpy()
    return found[np.argsort(-np.abs(found))][:keep]


def assert_same_set(found: Any, expected: Any, tolerance: float) -> None:
    gaps = np.abs(np.asarray(found)[:, None] - np.asarray(expected))
    assert max(gaps.min(axis=0).max(), gaps.min(axis=1).max()) < tolerance


# ---- weights of models


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "dinov2"])
def test_eigenvalues_are_those_of_torch_with_the_gains_of_norms(name: str) -> None:
    """Whole D x D matrices with the norm's centring and gain before, and the scale of the layer after."""
    if name == "dinov2":
        torch.manual_seed(0)
        config = transformers.Dinov2Config(
            hidden_size=32, num_hidden_layers=2, num_attention_heads=4, image_size=28, patch_size=7,
            initializer_range=0.3, layerscale_value=0.4,
        )  # fmt: skip
        model, given = transformers.Dinov2Model(config).eval(), {"pixel_values": torch.randn(1, 3, 28, 28)}
    else:
        model, given = build(name), inputs(name, batch=1)
    model = model.double()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += torch.linspace(-1.5, 1, len(parameter))  # gains of both signs
    given = {key: one.double() if one.is_floating_point() else one for key, one in given.items()}
    with pytest.warns(UserWarning, match="got one input"):
        found = explain(model, given, nulls=False).spectra()
    gain, value, out, scale = weights_of(name, model)
    centre = torch.eye(32).double() - (1 / 32 if name in ("gpt2", "dinov2") else 0)
    whole = torch.zeros(32, 32).double()
    for number, head in enumerate(found[1].heads):
        part, own = slice(8 * number, 8 * number + 8), slice(8 * number, 8 * number + 8)
        if name == "llama":  # two heads of values for four of queries
            own = slice(8 * (number // 2), 8 * (number // 2) + 8)
        w = centre @ torch.diag(gain) @ value[:, own] @ out[part] @ torch.diag(scale)
        assert_same_set(head.omegas, largest(w, 8), 1e-10)
        whole += w
    assert_same_set(found[1].omegas, torch.linalg.eigvals(whole).detach().numpy(), 1e-10)


def weights_of(name: str, model: Any) -> tuple[Any, Any, Any, Any]:
    """Return the gain of the norm before attention, W_V (D, ...), W_O (..., D) and the scale after, of layer 2."""
    ones = torch.ones(32).double()
    if name == "bert":
        own = model.encoder.layer[1].attention
        return ones, own.self.value.weight.T, own.output.dense.weight.T, ones
    if name == "gpt2":
        own = model.transformer.h[1]
        return own.ln_1.weight, own.attn.c_attn.weight[:, 64:], own.attn.c_proj.weight, ones
    if name == "llama":
        own = model.model.layers[1]
        return own.input_layernorm.weight, own.self_attn.v_proj.weight.T, own.self_attn.o_proj.weight.T, ones
    own = model.encoder.layer[1]
    found = dict(own.attention.named_modules())
    value = next(one for key, one in found.items() if key.endswith(("value", "v_proj")))
    out = next(one for key, one in found.items() if key.endswith(("dense", "o_proj")))
    return own.norm1.weight, value.weight.T, out.weight.T, own.layer_scale1.lambda1


# ---- which eigenvalue rules


@pytest.mark.parametrize(("omega", "lowest", "verdict"), [
    (0.5, -0.4, "smoothing"), (-0.5, -0.4, "sharpening"), (-3.0, -0.4, "sharpening"), (-3.5, -0.4, "smoothing"),
    (-1.9, 0.1, "smoothing"), (-1.7, 0.1, "sharpening"), (0.0, -0.4, "neither"),
])  # fmt: skip
def test_one_number_rules_by_the_range_of_the_theory(omega: float, lowest: float, verdict: str) -> None:
    """Sharpening where -2/(1 + least alpha) < omega < 0, and smoothing outside."""
    found = ruling(np.array([1.0, 0.3, lowest]), np.array([omega]))
    assert found.verdict == verdict
    if verdict == "neither":
        assert math.isinf(found.layers)
        return
    assert (-2 / (1 + lowest) < omega < 0) == (verdict == "sharpening")
    n = found.layers
    ratio = max(found.smooth, found.other) / min(found.smooth, found.other)
    assert ratio**n == pytest.approx(10)
    assert {"smoothing": " > ", "sharpening": " < "}[verdict] in found.condition


def test_what_stays_as_it_is_has_no_verdict() -> None:
    assert ruling(np.ones(4), np.array([-0.5, 0.7])).verdict == "neither"  # P = I
    assert ruling(np.array([1.0, 0.3]), np.array([-0.5, 0.0])).verdict == "neither"  # W does not touch the rest
    assert ruling_of_heads(np.eye(3)[None], np.zeros((1, 2, 1)), np.zeros((1, 1, 2))).verdict == "neither"


def test_the_norm_scales_what_rules() -> None:
    alphas, omegas = np.array([1.0, -0.4]), np.array([-1.0])
    assert ruling(alphas, omegas).verdict == "sharpening"
    assert ruling(alphas, omegas, 4.0).verdict == "smoothing"


@pytest.mark.parametrize("causal", [False, True])
def test_heads_together_are_the_dense_map(causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """All ways to the radius of what tells tokens apart: dense, block by block of causal heads, and by iterations."""
    rng = np.random.default_rng(3)
    matrices = np.stack([stochastic(9, seed) for seed in (1, 2)])
    if causal:
        matrices = np.tril(matrices)
        matrices = matrices / matrices.sum(axis=2, keepdims=True)
    values, output = rng.standard_normal((2, 5, 3)), rng.standard_normal((2, 3, 5))
    scale = 0.3
    dense = np.eye(45) + scale * sum(
        np.kron(p, (v @ o).T) for p, v, o in zip(matrices, values, output, strict=True)
    )  # fmt: skip
    everything = np.abs(np.linalg.eigvals(dense))
    smooth = np.abs(1 + scale * np.linalg.eigvals(np.einsum("hij,hjk->ik", values, output)))
    # Each eigenvalue of equal tokens is one of the dense map; what is left is that of the rest.
    rest = list(np.sort(everything))
    for one in smooth:
        rest.pop(int(np.abs(np.array(rest) - one).argmin()))
    found = ruling_of_heads(matrices, values, output, scale)
    assert found.smooth == pytest.approx(smooth.max(), rel=1e-12)
    assert found.other == pytest.approx(max(rest), rel=1e-8)
    if not causal:
        monkeypatch.setattr(verdicts, "_DENSE", 0)
        iterated = ruling_of_heads(matrices, values, output, scale)
        assert iterated.other == pytest.approx(max(rest), rel=1e-10)
        assert 0 < iterated.doubt < 1e-9


def test_the_outermost_eigenvalue_is_that_of_all() -> None:
    """Of matrices with complex pairs on the rim, of rank one, zero, and of a rim that no basis holds."""
    rng = np.random.default_rng(5)
    for count in (3, 60, 200):
        matrix = rng.standard_normal((count, count)) / math.sqrt(count)
        (found,), (residual,) = verdicts.outermost(lambda x, matrix=matrix: matrix @ x, count, steps=4000)
        expected = np.abs(1 + np.linalg.eigvals(matrix)).max()
        assert abs(1 + found) == pytest.approx(expected, rel=1e-9)
        assert residual < 1e-9
    one = np.outer(np.arange(1.0, 50), np.full(49, -0.5))
    assert verdicts.outermost(lambda x: one @ x, 49, steps=50)[0][0] == pytest.approx(np.trace(one), rel=1e-12)
    assert [float(abs(each[0])) for each in verdicts.outermost(np.zeros_like, 49, steps=50)] == [0.0, 0.0]


def test_what_the_iteration_leaves_open_is_undecided(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens that attend to the next one have eigenvalues all around a circle: no few steps tell their largest."""
    rng = np.random.default_rng(0)
    turned = 0.999 * np.roll(np.eye(400), 1, axis=1) + 0.001 / 400
    matrices, values = turned[None], np.eye(4)[None]
    monkeypatch.setattr(verdicts, "_STEPS", (40, 40))
    found = ruling_of_heads(matrices, values, np.diag([1.0, 0.5, 0.2, -0.3])[None])
    assert found.verdict == "undecided"
    assert found.doubt > abs(found.smooth - found.other)
    assert math.isinf(found.layers)
    assert " +- " in found.condition
    far = ruling_of_heads(np.exp(0.1 * rng.standard_normal((1, 400, 400))) / 400, values, np.eye(4)[None])
    assert far.verdict == "smoothing"


# ---- spectra of P, and nulls


def test_long_sequences_have_their_largest_and_least_eigenvalues(monkeypatch: pytest.MonkeyPatch) -> None:
    p = 0.5 * stochastic(60) + 0.5 * np.roll(np.eye(60), 1, axis=1)
    every = np.linalg.eigvals(p)
    monkeypatch.setattr(spectra, "_ALL", 10)
    some = eigenvalues_of(p)
    assert some[0] == pytest.approx(1)
    assert len(some) == 13  # 1, eight by modulus, four by real part
    largest, least = np.sort(np.abs(np.delete(every, np.abs(every - 1).argmin())))[-8:], np.sort(every.real)[:4]
    assert all(np.abs(np.abs(some) - one).min() < 1e-8 for one in largest)
    assert all(np.abs(some.real - one).min() < 1e-8 for one in least)
    assert rate_of(some) == pytest.approx(np.sort(np.abs(every))[-2], rel=1e-8)
    assert some.real.min() == pytest.approx(every.real.min(), rel=1e-8)


@pytest.mark.parametrize("count", [12, 220])
def test_no_values_keep_more_of_their_differences_than_the_bound(count: int) -> None:
    p = stochastic(count)
    centre = np.eye(count) - 1 / count
    _, _, right = np.linalg.svd(centre @ p)
    assert np.linalg.norm(centre @ p @ right[0]) == pytest.approx(contraction_of(p), rel=1e-12)
    assert eigenvalues_of(np.tril(np.ones((3, 3))), causal=True).tolist() == [1, 1, 1]


def test_nulls_are_what_they_say() -> None:
    rng = np.random.default_rng(0)
    products = random_products(64, 16, 300, rng)
    # The mean of |w|^2 over the disc of the product of two Gaussian matrices, by its trace: E |tr (OV)^2| is small.
    assert np.abs(products).max(axis=1).mean() == pytest.approx(1 / math.sqrt(64 * 16), rel=0.2)
    visible = np.tri(30, dtype=bool)
    drawn = random_stochastic(30, rng, visible)
    np.testing.assert_allclose(drawn.sum(axis=1), 1)
    assert (drawn[~visible] == 0).all()


def test_rows_of_spectra_are_numbers_of_each_head() -> None:
    model = build("bert")
    found = explain(model, [inputs("bert", seed) for seed in (0, 1)])
    layers = found.spectra()
    row, heads = layers[0].row(), list(layers[0].head_rows())
    assert (row["heads"], len(heads)) == (4, 4)
    assert row["rate"] == pytest.approx(np.mean([one["rate"] for one in heads]))
    assert row["heads_smoothing"] == sum(one["verdict"] == "smoothing" for one in heads)
    assert all(0 <= one["smoothing_random"] <= 1 for one in heads)
    p = found.blocks[0].maps.layer.head(2).matrix  # type: ignore[union-attr]
    assert heads[2]["rate"] == pytest.approx(np.sort(np.abs(np.linalg.eigvals(p)))[-2], rel=1e-8)
    u = np.linalg.svd(p)[0][:, 0]
    assert heads[2]["leading"] == pytest.approx(abs(u.sum()) / math.sqrt(len(p)), rel=1e-6)
    sentence = verdict_of(layers)
    assert "3 layers" in sentence
    assert found.findings(layers)[-1] == sentence
    assert any("what raises the cosine most is" in line for line in found.findings())


def test_the_rate_of_many_tokens_is_that_of_all_eigenvalues() -> None:
    rng = np.random.default_rng(3)
    matrix = np.exp(rng.normal(size=(420, 3)) @ rng.normal(size=(3, 420)))
    matrix /= matrix.sum(axis=1, keepdims=True)
    every = np.sort(np.abs(np.linalg.eigvals(matrix)))
    assert spectra._rate(matrix, causal=False) == pytest.approx(every[-2], rel=1e-8)
