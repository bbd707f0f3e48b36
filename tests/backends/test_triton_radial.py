"""Sums with radial kernels in one Triton kernel: its code, and what it gives in Triton's interpreter on the CPU."""

from __future__ import annotations

import importlib
import math
import os
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import nlflow as nl
from nlflow.kernels.expressions import structure
from tests.problems import torch_on_one_thread

torch = torch_on_one_thread()

from nlflow.backends.torch import sums  # noqa: E402  # after the skip where torch is missing
from nlflow.backends.triton import radial  # noqa: E402

KERNELS: dict[str, nl.RadialKernel] = {
    "laplace": nl.Laplace(0.7),
    "matern": nl.Matern(0.9, 2.5),
    "narrow gaussian": nl.Gaussian(0.05),
    "power": nl.RationalQuadratic(0.8, 0.75),
    "any power": nl.RationalQuadratic(0.8, 0.7),
    "inverse root": nl.InverseMultiquadric(0.6),
    "compact": nl.Wendland(1.5),
    "indicator": nl.TopHat(1.1),
    "singular": nl.TruncatedPower(1.5, 0.1, 2.0),
    "formula": nl.Formula("exp(-r) / (1 + 0.3 * r**3)"),
}
ROUNDING = 2.0**-24


def exact(kernel: nl.RadialKernel, x: Any, y: Any) -> Any:
    """Return the weights in float64."""
    squared = ((x.double()[..., :, None, :] - y.double()[..., None, :, :]) ** 2).sum(-1)
    return torch.exp(kernel.log_profile(squared))


@pytest.mark.parametrize("name", list(KERNELS))
def test_the_code_of_a_formula_gives_its_weights(name: str) -> None:
    form, numbers = radial._joined(*structure(KERNELS[name].weight()))
    assert len(set(numbers)) == len(numbers)
    lines, result, count = radial.written(form)
    assert count == len(numbers)
    names = {"maximum": torch.maximum, "minimum": torch.minimum, "where": torch.where, "abs": torch.abs,
             "exp2": torch.exp2, "log2": torch.log2, "sqrt_rn": torch.sqrt}  # fmt: skip
    squared = torch.cat([torch.zeros(1), torch.logspace(-8, 3, 400)]).double()
    space = {"squared": squared, "tl": types.SimpleNamespace(**names)}
    space |= {f"c{i}": torch.tensor(c, dtype=torch.float64) for i, c in enumerate(numbers)}
    exec("\n".join([*lines, f"found = {result}"]), space)
    expected = torch.exp(KERNELS[name].log_profile(squared))
    np.testing.assert_allclose(space["found"].numpy(), expected.numpy(), rtol=1e-13, atol=1e-29)  # where `weight` ends


@pytest.mark.parametrize(
    ("exponent", "base", "expected"),
    [
        ("3", 2.0, 8.0), ("-2", 2.0, 0.25), ("1/2", 9.0, 3.0), ("-3/4", 16.0, 0.125), ("7/3", 8.0, 128.0),
        ("12", 2.0, 4096.0), ("-12", 2.0, 2.0**-12), ("5/2", 4.0, 32.0),
    ],
)  # fmt: skip
def test_powers(exponent: str, base: float, expected: float) -> None:
    tl = types.SimpleNamespace(exp2=lambda x: 2.0**x, log2=math.log2, sqrt_rn=math.sqrt)
    assert eval(radial._power("base", exponent), {"base": base, "tl": tl}) == pytest.approx(expected, rel=1e-14)


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # which Triton reads when it is imported


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let Triton's interpreter run kernels on tensors of the CPU, where there is no GPU."""
    triton = pytest.importorskip("triton", reason="Triton comes with builds of torch for CUDA")
    if DEVICE == "cpu" and type(triton.language.sum).__name__ != "InterpretedFunction":
        pytest.skip("triton was imported without its interpreter; run this file by itself")
    interpreter = importlib.import_module("triton.runtime.interpreter")
    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        # int() of an array with one axis has ended with NumPy 2.4.
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)
    radial.compiled.cache_clear()
    yield
    radial.compiled.cache_clear()


@pytest.mark.parametrize("name", list(KERNELS))
@pytest.mark.sampled(4)
def test_sums_are_those_of_the_matrix(name: str, interpreted: None) -> None:
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(2, n, 3, generator=generator).to(DEVICE) for n in (70, 131))  # no multiples of tiles
    y[:, :70] = x
    w = (0.5 + torch.rand(2, 131, generator=generator)).to(DEVICE)
    for columns in (0, 1, 70):
        v = torch.randn(2, 131, columns, generator=generator).to(DEVICE)
        found, totals = radial.radial_sums(KERNELS[name], x, y, w, v)
        weights = exact(KERNELS[name], x, y) * w.double()[:, None, :]
        # A weight has some roundings of its squared distance, which a steep kernel multiplies, and of its formula.
        steep = 8 * ROUNDING * (40 if name == "narrow gaussian" else 8)
        bound = steep * weights.sum(-1)
        near = torch.ones_like(totals, dtype=torch.bool) if name != "indicator" else totals > 0
        assert bool(((totals.double() - weights.sum(-1)).abs() <= bound)[near].all())
        largest = (weights @ v.double().abs()).clamp(min=1e-30) * steep
        assert bool(((found.double() - weights @ v.double()).abs() <= largest).all())


def test_errors_do_not_grow_with_the_number_of_keys(interpreted: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many equal terms each sum rounds to one side: without what is kept of rounding their error is N / 2 of it."""
    monkeypatch.setattr(radial, "KEYS", 16)
    n = 16 * 400
    x = torch.zeros(n, 1, device=DEVICE)
    w = torch.full((n,), 0.1, device=DEVICE)
    v = torch.full((n, 1), 0.7, device=DEVICE)
    found, totals = radial.radial_sums(nl.Laplace(1.0), x[:1], x, w, v)
    exact_total = n * float(w[0])
    assert abs(float(totals[0]) / exact_total - 1) <= 8 * ROUNDING
    assert abs(float(found[0, 0]) / (exact_total * float(v[0, 0])) - 1) <= 8 * ROUNDING


@pytest.mark.parametrize("leading", [(), (2,)], ids=["one", "batch"])
def test_an_affinity_takes_it_for_many_nodes(
    leading: tuple[int, ...], interpreted: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    n = 80
    points = nl.Points(np.arange(float(n)), np.random.default_rng(0).uniform(0.5, 2, n))
    domain = nl.Batch(points, leading) if leading else points
    x, u = (torch.randn(*leading, n, 3, generator=torch.Generator().manual_seed(i)).to(DEVICE) for i in (1, 2))
    tiled = nl.affinity(nl.Laplace(1.0), domain, x, method="tiled")
    assert "a Triton kernel is compiled for 268435456 pairs or more" in tiled.reason
    monkeypatch.setattr(sums, "_WAITED", 0)
    if DEVICE == "cpu":
        assert "and tensors lie on cpu" in nl.affinity(nl.Laplace(1.0), domain, x, method="tiled").reason
    wide = nl.affinity(nl.Laplace(1.0), domain, x.double(), method="tiled")
    assert "Triton kernels are for float32 and 64 features at most" in wide.reason
    monkeypatch.setattr(radial, "refusal", lambda *_: "")
    asked: list[int] = []
    original = radial.radial_sums
    monkeypatch.setattr(radial, "radial_sums", lambda *a: (asked.append(1), original(*a))[1])
    p = nl.affinity(nl.Laplace(1.0), domain, x, method="tiled")
    assert "by a Triton kernel of the formula of Laplace" in p.reason
    torch.testing.assert_close(p.average(u), tiled.average(u), rtol=0, atol=2e-6)
    torch.testing.assert_close(p.log_degree, tiled.log_degree, rtol=0, atol=2e-6)
    assert len(asked) == 2
    tracked = u.clone().requires_grad_()
    p.average(tracked).sum().backward()  # has derivatives, in tiles
    assert len(asked) == 2
    masked = nl.affinity(nl.Laplace(1.0), domain, x, method="tiled", mask=nl.Mask(causal=True))
    assert "Triton kernels take no masks" in masked.reason
