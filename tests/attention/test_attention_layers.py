"""Averages, terms and modules of attention, against sums in NumPy that are written out."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest

from nlflow.errors import InputError, MemoryLimitError
from tests.affinities.test_tiled import Watch
from tests.problems import torch_on_one_thread

torch = torch_on_one_thread()

from nlflow.attention import FeatScale, NeutrenoAttention, SignedProjection  # noqa: E402  # needs torch
from nlflow.attention.terms import averages  # noqa: E402
from nlflow.attention.terms import neutreno as terms  # noqa: E402

B, H, N, D = 2, 3, 7, 4
SCALING = D**-0.5


def weigh(affinity: str, q: Any, k: Any) -> float:
    """k(q, k) of the table at the head of `averages`, written out."""
    dot = SCALING * float(q @ k)
    features = [np.where(x > 0, x + 1, np.exp(x)) for x in (q, k)]
    return {
        "softmax": np.exp(dot),
        "symmetric": np.exp(dot),
        "gaussian": np.exp(-SCALING * np.sum((q - k) ** 2) / 2),
        "sigmoid": 1 / (1 + np.exp(-dot)),
        "softplus": np.log(1 + np.exp(dot)),
        "linear": float(features[0] @ features[1]),
    }[affinity]


def matrix(affinity: str, q: Any, k: Any, visible: Any) -> Any:
    """P, one entry at a time, for one head of one sequence."""
    rows = k[-len(q) :] if affinity == "symmetric" else q
    P = np.array([[weigh(affinity, a, b) for b in k] for a in rows]) * visible
    return P / P.sum(axis=1, keepdims=True)


def tensors(seed: int, *shape: int, count: int = 3) -> list[Any]:
    rng = np.random.default_rng(seed)
    return [torch.tensor(rng.normal(size=shape)) for _ in range(count)]


@pytest.mark.parametrize("kind", ["all", "padding", "causal", "cached"])
@pytest.mark.parametrize("affinity", averages.AFFINITIES)
def test_averages_are_sums_over_tokens(affinity: str, kind: str) -> None:
    q, k, v = tensors(1, B, H, N, D)
    visible = np.ones((B, N, N), dtype=bool)
    mask, causal = None, kind in ("causal", "cached")
    if kind == "padding":
        visible[1, :, 5:] = False
        mask = torch.tensor(visible)[:, None]
    if causal:
        visible[:] = np.tri(N, dtype=bool)
    if kind == "cached":
        q, visible = q[..., -2:, :], visible[:, -2:]
    result, weights = averages.average(q, k, v, affinity, mask=mask, causal=causal)
    for b in range(B):
        for h in range(H):
            P = matrix(affinity, q[b, h].numpy(), k[b, h].numpy(), visible[b])
            np.testing.assert_allclose(weights[b, h], P, rtol=1e-11, atol=1e-14)
            np.testing.assert_allclose(result[b, h], P @ v[b, h].numpy(), rtol=1e-11, atol=1e-13)
    if kind == "padding":  # an additive mask says the same
        added = torch.zeros(mask.shape).double().masked_fill(~mask, torch.finfo(torch.float64).min)
        assert torch.equal(averages.average(q, k, v, affinity, scaling=SCALING, mask=added)[0], result)
    if affinity == "softmax":
        halved = averages.average(q / 2, k, v, scaling=2 * SCALING, mask=mask, causal=causal)[0]
        np.testing.assert_allclose(halved, result, rtol=1e-13)


@pytest.mark.parametrize("affinity", averages.AFFINITIES)
@pytest.mark.parametrize("size", [1e-3, 30.0, 1e4])
def test_logits_of_any_size(affinity: str, size: float) -> None:
    q, k, v = (x.float() for x in tensors(2, 1, 1, N, D))
    q, k = (q * size).requires_grad_(), (k * size).requires_grad_()
    result, weights = averages.average(q, k, v, affinity)
    result.sum().backward()
    assert bool(weights.isfinite().all())
    assert (weights.sum(-1) - 1).abs().max() < 1e-5
    assert bool(q.grad is None or q.grad.isfinite().all())
    assert bool(k.grad.isfinite().all())


def test_softplus_of_far_logits_is_their_exponential() -> None:
    low = torch.linspace(-300, 5, 1221, dtype=torch.float64)[:, None]
    got = averages.log_affinity(torch.ones(1, 1, dtype=torch.float64), low, "softplus", 1.0)[0]
    expected = np.log(np.log1p(np.exp(np.longdouble(low[:, 0].numpy())))).astype(float)
    np.testing.assert_allclose(got, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 1e-5), (torch.bfloat16, 0.2)])
def test_linear_affinity_of_negative_entries_keeps_its_digits(dtype: Any, rtol: float) -> None:
    q, k = (x.to(dtype) - 16 for x in tensors(5, 1, 1, N, D, count=2))
    weights = averages.average(q, k, k, "linear")[1]
    expected = matrix("linear", *(x[0, 0].double().numpy() for x in (q, k)), 1)
    np.testing.assert_allclose(weights[0, 0].double(), expected, rtol=rtol)


def test_queries_share_keys() -> None:
    q, k, v = tensors(3, B, 4, N, D)
    k, v = k[:, :2], v[:, :2]
    result = averages.average(q, k, v)[0]
    for h in range(4):
        alone = averages.average(q[:, h : h + 1], k[:, h // 2, None], v[:, h // 2, None])[0]
        # Averages may be near 0: their roundings are those of the values.
        np.testing.assert_allclose(result[:, h : h + 1], alone, rtol=0, atol=1e-13 * float(v.abs().max()))


def test_means_of_visible_tokens() -> None:
    (x,) = tensors(4, B, N, D, count=1)
    a = x.numpy()
    np.testing.assert_allclose(averages.uniform_average(x, N), a.mean(1, keepdims=True), rtol=1e-13)
    prefix = np.stack([a[:, : i + 1].mean(1) for i in range(N)], axis=1)
    np.testing.assert_allclose(averages.uniform_average(x, N, causal=True), prefix, rtol=1e-13)
    np.testing.assert_allclose(averages.uniform_average(x, 2, causal=True), prefix[:, -2:], rtol=1e-13)
    mask = torch.tensor([[True] * 4 + [False] * 3, [True] * N])[:, None]
    some = averages.uniform_average(x, N, mask)
    np.testing.assert_allclose(some[0, 0], a[0, :4].mean(0), rtol=1e-13)
    np.testing.assert_allclose(some[1, 0], a[1].mean(0), rtol=1e-13)
    assert averages.uniform_average(x, N, torch.zeros(N, N, dtype=torch.bool)).abs().max() == 0
    x[0, 4:] = torch.nan  # which nobody sees
    assert torch.equal(averages.uniform_average(x, N, mask), some)
    for hides in (-torch.inf, torch.finfo(torch.float64).min, -1e4):  # as models add it
        added = torch.zeros(mask.shape).double().masked_fill(~mask, hides)
        assert torch.equal(averages.uniform_average(x, N, added), some)
    assert averages.seen(torch.tensor([-300.0, 0.0, -1e4])).tolist() == [True, True, False]


def test_steps_are_what_the_formulas_say() -> None:
    pv, v, v0 = tensors(5, B, H, N, D)
    for size in (0.6, torch.tensor(0.6, dtype=torch.float64)):
        np.testing.assert_allclose(terms.neutreno(pv, v, v0, size), pv + 0.6 * (v0 - v), rtol=1e-13, atol=1e-14)
        implicit = terms.neutreno(pv, v, v0, size, semi_implicit=True)
        np.testing.assert_allclose(implicit, (pv + 0.6 * v0) / 1.6, rtol=1e-13, atol=1e-14)
    assert terms.neutreno(pv, v, v0, 0.0) is pv
    kept = pv.clone()
    assert torch.equal(terms.neutreno(kept, v, v0, 0.6, overwrite=True), terms.neutreno(pv, v, v0, 0.6))
    A = torch.softmax(torch.randn(N, N, generator=torch.Generator().manual_seed(0), dtype=torch.float64), -1)
    omega = torch.tensor([0.3, -0.2, 1.0], dtype=torch.float64)[:, None, None]
    uniform = torch.full((N, N), 1 / N, dtype=torch.float64)
    scaled = (uniform + (1 + omega) * (A - uniform)) @ v
    np.testing.assert_allclose(terms.scaled_attention(A @ v, uniform @ v, omega), scaled, rtol=1e-12)


def test_feature_scales() -> None:
    (x,) = tensors(6, B, N, D, count=1)
    layer = FeatScale(D, dtype=torch.float64)
    assert torch.equal(layer(x), x)
    with torch.no_grad():
        layer.low += torch.arange(D)
        layer.high -= 0.5
    mean = x.mean(1, keepdim=True)
    expected = (1 + np.arange(D)) * mean.numpy() + 0.5 * (x - mean).numpy()
    np.testing.assert_allclose(layer(x).detach(), expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("strength", [0.3, 1.0])
def test_similarity_after_removal(strength: float) -> None:
    (x,) = tensors(7, N, D, count=1)

    def similarity(tokens: Any) -> float:
        return float(N * tokens.mean(0).square().sum() / tokens.square().sum())

    t = similarity(x)
    removed = terms.removed_similarity(x, strength)
    left = (1 - strength) ** 2 * t
    assert similarity(removed) == pytest.approx(left / (left + 1 - t), abs=1e-14)


def test_matrix_fidelity_is_the_local_wiener_filter() -> None:
    q, k, v = tensors(8, 1, 1, N, D)
    (v0,) = tensors(9, 1, 1, N, D, count=1)
    pv, P = averages.average(q, k, v)
    C = terms.covariance(P, v, pv)
    result = terms.matrix_step(pv, v0, C, torch.tensor(0.3, dtype=torch.float64))
    a, mean = v[0, 0].numpy(), pv[0, 0].numpy()
    for i in range(N):
        centred = a - mean[i]
        covariance = (P[0, 0, i].numpy()[:, None] * centred).T @ centred
        np.testing.assert_allclose(C[0, 0, i], covariance, rtol=1e-10, atol=1e-14)
        weight = covariance / 0.3  # Λ̃
        expected = np.linalg.inv(np.eye(D) + weight) @ (mean[i] + weight @ v0[0, 0, i].numpy())
        np.testing.assert_allclose(result[0, 0, i], expected, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_covariances_in_half_precision_keep_their_digits(dtype: Any) -> None:
    q, k, v = (10 * part for part in tensors(8, 1, 1, N, D))
    v, P = (v + 10).to(dtype), averages.average(q, k, v)[1].to(dtype)
    C = terms.covariance(P, v, P @ v)
    assert C.dtype == torch.float32
    weights = P.double() / P.double().sum(-1, keepdim=True)
    centred = v.double()[..., None, :, :] - (weights @ v.double())[..., :, None, :]
    expected = torch.einsum("bhij,bhija,bhijc->bhiac", weights, centred, centred)
    torch.testing.assert_close(C.double(), expected, rtol=1e-4, atol=1e-3)
    with torch.autocast(C.device.type, torch.bfloat16):
        assert torch.equal(terms.covariance(P, v, P @ v), C)
    v0, variance = v.flip(-2), torch.tensor(0.3, dtype=dtype)
    result = terms.matrix_step(P @ v, v0, C, variance)
    assert result.dtype == dtype
    pv = (P @ v).double()
    local = expected @ torch.linalg.inv(expected + float(variance) * torch.eye(D, dtype=torch.float64))
    right = pv + (local @ (v0.double() - pv)[..., None])[..., 0]
    torch.testing.assert_close(result.double(), right, rtol=2 * torch.finfo(dtype).eps, atol=1e-3)


@pytest.mark.other_bits("autocast rounds other operations on a GPU than on the CPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("options", [{"matrix_fidelity": True}, {"projection": "sharpening"}], ids=["matrix", "signed"])
def test_half_precision_where_torch_has_no_solver_for_it(options: Any, dtype: Any) -> None:
    torch.manual_seed(0)
    half = NeutrenoAttention(8, 1, fidelity=0.6, **options).to(dtype)
    whole = copy.deepcopy(half).float()
    x = torch.randn(2, 6, 8).to(dtype)
    results = {}
    for name, module in (("half", half), ("whole", whole)):
        tokens = x.to(next(module.parameters()).dtype)
        first = module(tokens)[1]
        results[name] = module(tokens.flip(1), first)[0]
        results[name].float().square().sum().backward()
    assert results["half"].dtype == dtype
    torch.testing.assert_close(results["half"].float(), results["whole"], rtol=0, atol=8 * torch.finfo(dtype).eps)
    for name, parameter in half.named_parameters():
        expected = whole.get_parameter(name).grad
        learned = name.startswith("terms.")  # what strengths learn stays wide
        assert parameter.grad.dtype == (torch.float32 if learned else dtype)
        allowed = 40 * torch.finfo(dtype).eps * max(1.0, float(expected.abs().max()))
        torch.testing.assert_close(parameter.grad.float(), expected, rtol=0, atol=allowed, msg=name)
    with torch.autocast(x.device.type, torch.bfloat16):
        mixed = whole(x.float().flip(1), whole(x.float())[1])[0]
    torch.testing.assert_close(mixed.float(), results["whole"], rtol=0, atol=8 * torch.finfo(torch.bfloat16).eps)


def test_covariances_are_not_allocated_without_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NLFLOW_MEMORY_LIMIT", "1000")
    q, k, v = tensors(8, 1, 1, N, D)
    pv, P = averages.average(q, k, v)
    with pytest.raises(MemoryLimitError, match="covariances"):
        terms.covariance(P, v, pv)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sharpening", "smoothing"])
def test_projection_has_its_spectrum_and_dominates_as_predicted(kind: str) -> None:
    projection = SignedProjection(5, kind, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    W = projection.weight.detach().numpy()
    omega = np.linalg.eigvalsh((W + W.T) / 2)
    np.testing.assert_allclose(W, W.T, atol=1e-14)
    np.testing.assert_allclose(np.sort(projection.eigenvalues.detach()), omega, atol=1e-13)
    assert np.all(omega >= 0) if kind == "smoothing" else np.all((omega >= -1) & (omega <= 0))
    with torch.no_grad():
        projection.psi.copy_(0.5 + projection.psi / 2)  # no eigenvalue near 0, which would take long
    # X + A X W, many times: smoothing leaves equal tokens, sharpening takes their common part away.
    rng = np.random.default_rng(0)
    points = rng.normal(size=(6, 2))
    A = np.exp(points @ points.T)
    A /= A.sum(1, keepdims=True)
    X = torch.tensor(rng.normal(size=(6, 5)))
    for _ in range(3000):
        X = X + torch.tensor(A) @ projection(X).detach()
        X = X / X.norm()
    values, vectors = np.linalg.eig(A)
    wanted = np.argmax(values.real) if kind == "smoothing" else np.argmin(values.real)
    direction = vectors[:, wanted].real
    assert np.linalg.norm(direction @ X.numpy()) / np.linalg.norm(direction) == pytest.approx(1, abs=1e-6)


def test_a_generator_draws_the_projection_and_nothing_else_does() -> None:
    """Of one seed are the same numbers whatever torch's own seed is, which they leave as it was."""
    made = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        made.append(SignedProjection(D, generator=torch.Generator().manual_seed(7)))
        assert torch.equal(torch.get_rng_state(), before)
        layer = NeutrenoAttention(D, 1, projection="sharpening", generator=torch.Generator().manual_seed(7))
        made.append(layer.value)
    for name in ("theta", "psi"):
        assert all(torch.equal(getattr(one, name), getattr(made[0], name)) for one in made)


def test_large_negative_eigenvalues_count_as_one() -> None:
    projection = SignedProjection(3, "sharpening")
    with torch.no_grad():
        projection.psi.fill_(5.0)
    assert projection.eigenvalues.tolist() == [-1.0] * 3


def written_out(layer: Any, x: Any, v0: Any, fidelity: float, visible: Any, affinity: str) -> tuple[Any, Any]:
    """The module's output and values, in NumPy."""
    parts = [x @ p.weight.detach().numpy().T + p.bias.detach().numpy() for p in (layer.query, layer.key, layer.value)]
    q, k, v = (part.reshape(N, 2, -1) for part in parts)
    heads = []
    for h in range(2):
        P = matrix(affinity, q[:, h], k[:, h], visible)
        heads.append(P @ v[:, h] + (0 if v0 is None else fidelity * (v0[:, h] - v[:, h])))
    merged = np.concatenate(heads, axis=1)
    return merged @ layer.output.weight.detach().numpy().T + layer.output.bias.detach().numpy(), v


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("affinity", averages.AFFINITIES)
def test_module_in_plain_torch(affinity: str, causal: bool) -> None:
    torch.manual_seed(0)
    layers = [NeutrenoAttention(2 * D, 2, affinity=affinity, fidelity=0.7, causal=causal).double() for _ in range(2)]
    (x,) = tensors(10, 1, N, 2 * D, count=1)
    visible = (np.tri(N, dtype=bool) if causal else np.ones((N, N), dtype=bool)) & (np.arange(N) < 5)
    mask = torch.arange(N)[None] < 5
    one, v0 = layers[0](x, mask=mask)
    two, again = layers[1](x + one, v0, mask=mask)
    assert again is v0
    expected, first = written_out(layers[0], x[0].numpy(), None, 0.7, visible, affinity)
    np.testing.assert_allclose(one[0].detach(), expected, rtol=1e-10, atol=1e-12)
    expected, _ = written_out(layers[1], (x + one)[0].detach().numpy(), first, 0.7, visible, affinity)
    np.testing.assert_allclose(two[0].detach(), expected, rtol=1e-10, atol=1e-12)
    if causal:  # without padding, the mask comes from the layer
        torch.testing.assert_close(layers[1](x)[0][:, :5], layers[1](x, mask=mask)[0][:, :5])


@pytest.mark.parametrize("affinity", ["softmax", "symmetric", "gaussian"])
def test_module_without_a_matrix_of_weights(affinity: str) -> None:
    count = 1500
    layer = NeutrenoAttention(8, 2, affinity=affinity, causal=True)
    x = torch.randn(1, count, 8)
    with Watch() as watch, torch.no_grad():
        _, first = layer(x)
        layer(x, first)
    assert watch.largest < 20 * count


@pytest.mark.parametrize("affinity", ["softmax", "symmetric", "gaussian"])
@pytest.mark.parametrize("causal", [False, True])
def test_fused_averages_are_those_with_weights(affinity: str, causal: bool) -> None:
    q, k, v = torch.randn(3, B, H, N, D, dtype=torch.float64)
    keys = torch.tensor([[True] * N, [False, False] + [True] * (N - 2)])[:, None, None]  # causal rows that see nothing
    both = keys & torch.ones(N, N, dtype=torch.bool).tril() if causal else keys
    additive = torch.zeros_like(both, dtype=torch.float64).masked_fill(~both, torch.finfo(torch.float64).min)
    for mask in (None, both, additive):
        got, weights = averages.average(q, k, v, affinity, mask=mask, causal=causal, fused=True)
        assert weights is None
        expected = averages.average(q, k, v, affinity, mask=mask, causal=causal)[0]
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-13)


def test_module_with_every_term() -> None:
    torch.manual_seed(0)
    options: dict[str, Any] = {"semi_implicit": True, "feat_scale": True, "attn_scale": True}
    layer = NeutrenoAttention(2 * D, 2, similarity_removal=0.5, causal=True, learned=True, **options).double()
    x, v = tensors(11, 1, N, 2 * D, count=2)
    v0 = v.unflatten(-1, (2, D)).transpose(1, 2)
    with torch.no_grad():
        layer.terms.feat.low += 0.3
        layer.terms.feat.high -= 0.2
        layer.terms.attn_weight += 0.4
    strength = float(layer.terms.fidelity.detach())  # exp(log 0.6) in float32
    assert strength == pytest.approx(0.6, abs=1e-7)
    prefix = np.tri(N) / np.tri(N).sum(1, keepdims=True)
    tokens = x[0].numpy() - 0.5 * prefix @ x[0].numpy()
    q, k, u = ((tokens @ p.weight.T.numpy(force=True) + p.bias.numpy(force=True)).reshape(N, 2, D)
               for p in (layer.query, layer.key, layer.value))  # fmt: skip
    heads = []
    for h in range(2):
        P = matrix("softmax", q[:, h], k[:, h], np.tri(N))
        P = prefix + 1.4 * (P - prefix)
        heads.append((P @ u[:, h] + strength * v0[0, h].numpy()) / (1 + strength))
    out = np.concatenate(heads, 1) @ layer.output.weight.T.numpy(force=True) + layer.output.bias.numpy(force=True)
    mean = prefix @ out
    expected = 1.3 * mean + 0.8 * (out - mean)
    result = layer(x, v0)[0]
    np.testing.assert_allclose(result[0].detach(), expected, rtol=1e-10, atol=1e-12)
    result.square().sum().backward()
    assert all(parameter.grad is not None for parameter in layer.parameters())


def test_module_learns_its_fidelity_and_variance() -> None:
    x, v = tensors(12, 1, N, 2 * D, count=2)
    v0 = v.unflatten(-1, (2, D)).transpose(1, 2)
    for options, name in (({"learned": True}, "raw_fidelity"), ({"matrix_fidelity": True}, "log_variance")):
        torch.manual_seed(0)
        layer = NeutrenoAttention(2 * D, 2, fidelity=0.5, **options).double()
        parameter = getattr(layer.terms, name)
        assert float(parameter.detach().exp()) == pytest.approx(0.5 if name == "raw_fidelity" else 2.0)
        layer(x, v0)[0].square().sum().backward()
        sides = []
        for step in (1e-5, -1e-5):
            with torch.no_grad():
                parameter += step
                sides.append(float(layer(x, v0)[0].square().sum().detach()))
                parameter -= step
        assert float(parameter.grad) == pytest.approx((sides[0] - sides[1]) / 2e-5, rel=1e-6)


def test_module_with_a_signed_projection() -> None:
    layer = NeutrenoAttention(D, 1, projection="sharpening", generator=torch.Generator().manual_seed(0)).double()
    (x,) = tensors(13, B, N, D, count=1)
    weights = averages.average(layer.query(x)[:, None], layer.key(x)[:, None], x[:, None])[1][:, 0]
    torch.testing.assert_close(layer(x)[0], weights @ x @ layer.value.weight)


def test_dropout_of_weights_repeats_with_the_seed() -> None:
    layer = NeutrenoAttention(2 * D, 2, dropout=0.5, matrix_fidelity=True).double()
    (x,) = tensors(14, 1, N, 2 * D, count=1)
    v0 = layer(x)[1]
    results = []
    for _ in range(2):
        torch.manual_seed(3)
        results.append(layer(x, v0)[0])
    assert torch.equal(*results)
    assert not torch.equal(layer(x, v0)[0], results[0])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"affinity": "cosine"}, "affinity: got 'cosine'"),
        ({"fidelity": -0.1}, "fidelity: got -0.1"),
        ({"fidelity": float("nan")}, "fidelity: got nan"),
        ({"fidelity": float("inf")}, "fidelity: got inf"),
        ({"fidelity": 0, "learned": True}, "fidelity: got 0 with learned=True"),
        ({"similarity_removal": 1.5}, "similarity_removal: got 1.5"),
        ({"similarity_removal": -0.5}, "similarity_removal: got -0.5"),
        ({"semi_implicit": "yes"}, "semi_implicit: got 'yes'"),
        ({"heads": 3}, "heads: got 3"),
        ({"projection": "sharpening"}, "projection: got 'sharpening' with 2 heads"),
        ({"heads": 1, "projection": "flat"}, "kind: got 'flat'"),
        ({"dropout": 1.0}, "dropout: got 1.0"),
        ({"causal": "yes"}, "causal: got 'yes'"),
        ({"bias": "no"}, "bias: got 'no'"),
        ({"learned": "shared"}, "learned: got 'shared'"),
    ],
)
def test_module_refuses(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        NeutrenoAttention(8, **{"heads": 2, **arguments})


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (torch.zeros(1, 5), "mask: got torch.float32 for tokens, expected bool or integers"),
        (torch.ones(1, 1, 5, 5, dtype=torch.int64), "mask: got four axes of torch.int64, expected bool, or numbers"),
    ],
    ids=["additive", "integers"],
)
def test_module_refuses_masks_that_mean_something_else(mask: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        NeutrenoAttention(8, 2, affinity="sigmoid")(torch.randn(1, 5, 8), mask=mask)


def test_module_refuses_tokens_that_do_not_fit() -> None:
    layer = NeutrenoAttention(8, 2)
    x = torch.zeros(1, 5, 8)
    with pytest.raises(InputError, match="first: got shape"):
        layer(x, torch.zeros(1, 2, 4, 4))
    with pytest.raises(InputError, match="mask: got shape"):
        layer(x, mask=torch.ones(1, 4, dtype=torch.bool))
    with pytest.raises(InputError, match="mask: got 3 axes"):
        layer(x, mask=torch.ones(1, 5, 5, dtype=torch.bool))
    with pytest.raises(InputError, match="affinity: got 'cosine'"):
        averages.log_affinity(x, x, "cosine", 1.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_strengths_move_in_half_precision(dtype: Any) -> None:
    """A step of 1e-3 is seen in λ̃, which half precision would round away; whenever the model becomes narrow."""
    for before in (True, False):
        torch.manual_seed(0)
        layer: Any = torch.nn.Module()
        layer.inner = NeutrenoAttention(8, 2, fidelity=0.5, learned=True, feat_scale=True, attn_scale=True)
        layer.inner.to(dtype) if before else layer.to(dtype)
        assert {one.dtype for one in layer.inner.terms.parameters()} == {torch.float32}
        assert layer.inner.query.weight.dtype == dtype
        start = layer.inner.terms.raw_fidelity.item()
        assert start == pytest.approx(math.log(0.5), rel=1e-7)
        x = torch.randn(1, 5, 8).to(dtype)
        result, first = layer.inner(x, layer.inner(x.flip(1))[1])
        assert result.dtype == first.dtype == dtype
        result.float().square().sum().backward()
        with torch.no_grad():
            for one in layer.inner.terms.parameters():
                assert one.grad.abs().max() > 0
                one -= 1e-3 * one.grad.sign()
        assert abs(layer.inner.terms.raw_fidelity.item() - start) == pytest.approx(1e-3, rel=1e-3)
        again = NeutrenoAttention(8, 2, fidelity=0.7, learned=True, feat_scale=True, attn_scale=True).to(dtype)
        again.load_state_dict(layer.inner.state_dict())
        assert torch.equal(again.terms.raw_fidelity, layer.inner.terms.raw_fidelity)
        assert layer.double().inner.terms.raw_fidelity.dtype == torch.float64
