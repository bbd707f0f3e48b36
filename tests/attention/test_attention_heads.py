"""Heads behind masks: as rules of who sees whom, against the matrix of all pairs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from benchmarks.resident import traced
from nlflow import InputError, Mask
from tests.covering import pairs
from tests.problems import torch_on_one_thread

torch = torch_on_one_thread()

from nlflow.attention import Head, discretize, probe  # noqa: E402  # needs torch
from nlflow.attention.probing import trace  # noqa: E402
from nlflow.attention.probing.trace import rule_or_bias  # noqa: E402
from tests.affinities.test_tiled import Watch  # noqa: E402
from tests.transformer_models import build, inputs  # noqa: E402

Array = NDArray[Any]
COUNT = 40
KERNELS = ("softmax", "symmetric", "gaussian", "sigmoid", "linear")
EXPONENTIAL = ("softmax", "symmetric", "gaussian")  # those that the package has itself


def who_sees(count: int, window: int | None) -> Array:
    """Return a boolean (N, N): tokens see those up to themselves, or the last so many of them and themselves."""
    i = np.arange(count)
    return np.asarray((i[:, None] >= i) & (i[:, None] - i <= (count if window is None else window)))


def pair(kernel: str, window: int | None, count: int = COUNT) -> tuple[Head, Head]:
    """Return a head behind a rule, and the same behind a matrix of what is added to log k."""
    q, k, v = np.random.default_rng(4).normal(size=(3, count, 6)) * 1.3
    q = k if kernel in ("symmetric", "gaussian") else q
    bias = np.where(who_sees(count, window), 0.0, -np.inf)
    return Head(q, k, v, 0.4, None, kernel, Mask(causal=True, window=window)), Head(q, k, v, 0.4, bias, kernel)


@pytest.mark.slow
@pytest.mark.parametrize(("kernel", "window", "kept"), pairs(KERNELS, [None, 5], ["a matrix", "no matrix"]))
@pytest.mark.sampled(2)
def test_a_rule_is_the_matrix_of_what_is_seen(
    kernel: str, window: int | None, kept: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kept == "no matrix":
        monkeypatch.setattr(trace, "_MATRIX_TOKENS", 8)
    head, same = pair(kernel, window)
    assert hasattr(head.affinity, "matrix") == (kept == "a matrix" or kernel not in EXPONENTIAL)
    assert head.causal
    assert same.causal
    assert not head.symmetric
    signal = head.v
    for found, expected in (
        (head.affinity.average(signal), same.affinity.average(signal)),
        (head.affinity.average(signal[:, 0]), same.affinity.average(signal[:, 0])),
        (head.affinity.push(np.abs(signal)), same.affinity.push(np.abs(signal))),
        (head.along(signal, head.k).average(signal), same.along(signal, head.k).average(signal)),
        (head.matrix, same.matrix),
        (head.eigenvalues, same.eigenvalues),
        (head.stationary, same.stationary),
        (head.spectral_gap, same.spectral_gap),
        (head.fidelity_limit, same.fidelity_limit),
        (head.spectral_radius(0.7), same.spectral_radius(0.7)),
        (discretize(head).distance, discretize(same).distance),
        (discretize(head, symmetric=True, evolving=True).distance,
         discretize(same, symmetric=True, evolving=True).distance),
    ):  # fmt: skip
        np.testing.assert_allclose(found, expected, rtol=1e-11, atol=1e-12)
    assert head.mixing_time() == same.mixing_time()


@pytest.mark.parametrize("kept", ["a matrix", "no matrix"])
@pytest.mark.parametrize("window", [None, 5], ids=["causal", "window"])
@pytest.mark.parametrize("kernel", EXPONENTIAL)
def test_degrees_behind_a_rule_are_sums_of_what_is_seen(
    kernel: str, window: int | None, kept: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kept == "no matrix":
        monkeypatch.setattr(trace, "_MATRIX_TOKENS", 8)
    head = pair(kernel, window)[0]
    if kernel == "gaussian":
        logits = -0.4 * np.square(head.q[:, None] - head.k).sum(axis=-1) / 2
    else:
        logits = 0.4 * head.q @ head.k.T
    weights = np.exp(logits) * who_sees(COUNT, window)
    np.testing.assert_allclose(head.affinity.degree, weights.sum(axis=1), rtol=1e-12)
    both = weights + weights.T
    symmetric = head.affinity.symmetrized()
    assert symmetric.symmetric
    np.testing.assert_allclose(symmetric.degree, both.sum(axis=1), rtol=1e-12)
    expected = both @ head.v / both.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(symmetric.average(head.v), expected, rtol=1e-11, atol=1e-12)
    assert symmetric.average(head.v[::-1]).dtype == np.float64
    with pytest.raises(InputError, match="u: got dtype float32"):
        head.affinity.average(head.v.astype(np.float32))


@pytest.mark.parametrize("window", [None, 50], ids=["causal", "window"])
@pytest.mark.sampled(1)
def test_long_causal_heads_form_nothing_of_the_size_of_the_matrix(
    window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = 6000
    with monkeypatch.context() as patch, Watch():
        patch.setattr(trace, "_MATRIX_TOKENS", 8)
        pair("softmax", window)[0].affinity.average(np.ones(COUNT))  # loads what the first call of all needs
    q, k, v = np.random.default_rng(5).normal(size=(3, count, 6))
    head = Head(q, k, v, 0.4, mask=Mask(causal=True, window=window))
    with traced() as taken, Watch() as watch:
        average = head.affinity.average(v)
        limit = head.fidelity_limit
    assert watch.largest < count**2 / 8
    assert taken.bytes < count**2 / 8  # bytes, of which a matrix takes eight for each pair
    assert head.affinity.memory_bytes < count**2 / 8
    seen = who_sees(count, window)
    some = np.arange(0, count, 500)
    logits = np.where(seen[some], 0.4 * q[some] @ k.T, -np.inf)
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    np.testing.assert_allclose(average[some], weights @ v / weights.sum(axis=1, keepdims=True), rtol=0, atol=1e-12)
    assert 1 < limit < 1.1


@pytest.mark.parametrize("kind", ["bool", "added", "-1e4"])
@pytest.mark.parametrize("window", [None, 0, 3], ids=["causal", "itself", "window"])
def test_masks_that_are_rules(window: int | None, kind: str) -> None:
    seen = torch.from_numpy(who_sees(7, window))
    hides = -1e4 if kind == "-1e4" else torch.finfo(torch.float32).min
    mask = seen if kind == "bool" else torch.zeros(7, 7).masked_fill(~seen, hides)
    rule, bias = rule_or_bias(mask)
    assert bias is None
    assert rule is not None
    assert (rule.causal, rule.window, rule.present) == (True, window, None)
    assert rule_or_bias(torch.ones(7, 7, dtype=torch.bool)) == (None, None)
    assert rule_or_bias(torch.zeros(7, 7)) == (None, None)


def test_masks_that_are_no_rules() -> None:
    seen = torch.from_numpy(who_sees(7, None))
    seen[5, 2] = False
    rule, bias = rule_or_bias(seen)
    assert rule is None
    np.testing.assert_array_equal(bias, np.where(seen.numpy(), 0.0, -np.inf))
    slope = torch.arange(7.0) - torch.arange(7.0)[:, None]  # as ALiBi adds
    rule, bias = rule_or_bias(slope.masked_fill(slope > 0, -torch.inf))
    assert rule is None
    np.testing.assert_array_equal(bias, np.where(slope.numpy() > 0, -np.inf, slope.numpy()))
    rule, bias = rule_or_bias(torch.from_numpy(who_sees(7, None).T.copy()))
    assert rule is None
    with pytest.raises(InputError, match="mask: got one beside a bias"):
        Head(*np.ones((3, 4, 2)), 0.5, np.zeros((4, 4)), mask=Mask(causal=True))


@pytest.mark.parametrize("base", ["eager", "sdpa"])
@pytest.mark.parametrize("padding", ["behind", "before"])
def test_heads_of_causal_models_are_behind_rules(base: str, padding: str) -> None:
    given = inputs("gpt2")
    if padding == "before":
        given["attention_mask"] = given["attention_mask"].flip(1)
    model = build("gpt2", base)
    trace = probe(model, given, keep_matrices=True)
    for layer in trace:
        for item in range(2):
            inside = layer.tokens[item].numpy()
            assert inside.sum() == (9, 6)[item]
            for number in range(layer.heads):
                head = layer.head(number, item)
                assert head.bias is None
                assert head.mask is not None
                assert (head.mask.causal, head.mask.window) == (True, None)
                kept = layer.matrices[item, number].numpy()[np.ix_(inside, inside)]
                np.testing.assert_allclose(head.matrix, kept, rtol=0, atol=1e-6)
                degree = np.exp(layer.quantities["log_degree"][item, number][inside])
                np.testing.assert_allclose(head.affinity.degree, degree, rtol=1e-4)
    for layer in probe(build("bert", base), inputs("bert")):
        assert layer.head(0, 1).bias is layer.head(0, 1).mask is None
