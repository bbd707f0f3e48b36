"""Which fused kernel takes what: a table that is asked about devices that are not here."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import nlflow as nl
from tests.problems import torch_on_one_thread

torch = torch_on_one_thread()

from nlflow.backends.torch import attention  # noqa: E402  # after the skip where torch is missing
from nlflow.backends.torch.attention import Call, Form, Kernel, Place, kernels_for  # noqa: E402
from tests import pretended  # noqa: E402

HALF, HALVES, SINGLE, DOUBLE = torch.bfloat16, torch.float16, torch.float32, torch.float64
LARGE = 2**40
H100, A100, V100 = Place("cuda", (9, 0), 91900), Place("cuda", (8, 0), 91900), Place("cuda", (7, 0))


@pytest.mark.parametrize(
    ("place", "call", "expected"),
    [
        (H100, Call(HALF, 64, pairs=LARGE), "cuDNN's attention"),
        (Place("cuda", (10, 0), 91900), Call(HALVES, 128, pairs=LARGE), "cuDNN's attention"),
        (H100, Call(HALF, 64, pairs=2**20), "FlashAttention-2"),
        (H100, Call(HALF, 64, pairs=LARGE, tracked=True), "FlashAttention-2"),
        (H100, Call(HALF, 136, pairs=LARGE), "FlashAttention-2"),
        (H100, Call(HALF, 264, pairs=LARGE), "memory-efficient attention"),
        (H100, Call(HALF, 64, biased=True, pairs=LARGE), "memory-efficient attention"),
        (H100, Call(SINGLE, 64, pairs=LARGE), "memory-efficient attention"),
        (H100, Call(DOUBLE, 64, pairs=LARGE), None),
        (Place("cuda", (9, 0), 90100), Call(HALF, 64, pairs=LARGE), "FlashAttention-2"),
        (Place("cuda", (9, 0), 0), Call(HALF, 64, pairs=LARGE), "FlashAttention-2"),
        (Place("cuda", (9, 0), 91900, "FA3"), Call(HALF, 64, pairs=LARGE), "the FlashAttention that was activated"),
        (A100, Call(HALF, 64, pairs=LARGE), "FlashAttention-2"),
        (V100, Call(HALVES, 64), "memory-efficient attention"),
        (V100, Call(HALF, 64), None),
        (V100, Call(SINGLE, 64), "memory-efficient attention"),
        (Place("cuda", (3, 7)), Call(SINGLE, 64), None),
        (Place("cpu"), Call(DOUBLE, 300, biased=True, tracked=True), "FlashAttention of the CPU"),
        (Place("mps"), Call(SINGLE, 64), None),
    ],
)
def test_the_table(place: Place, call: Call, expected: str | None) -> None:
    chosen = next(kernels_for(place, call), None)
    assert (None if chosen is None else chosen.name) == expected


def test_every_operator_of_the_table_is_one_of_torch() -> None:
    for kernel in attention.KERNELS:
        assert hasattr(torch.ops.aten, kernel.operator)
        arguments = [a.name for a in getattr(torch.ops.aten, kernel.operator).default._schema.arguments]
        assert arguments[:3] == ["query", "key", "value"]
        assert arguments[-1] == "scale"


def called(monkeypatch: pytest.MonkeyPatch, error: Exception | None) -> list[str]:
    """Let the choice believe in an H100, and every kernel compute on the CPU; return the names of those asked."""
    names: list[str] = []
    on_cpu = next(kernel for kernel in attention.KERNELS if kernel.kind == "cpu")
    original = attention._called

    def pretend(kernel: Kernel, *tensors: Any) -> Any:
        names.append(kernel.name)
        if error is not None and kernel.name == "cuDNN's attention":
            raise error
        return original(on_cpu, *tensors)

    monkeypatch.setattr(attention, "_called", pretend)
    monkeypatch.setattr(attention.Place, "of", lambda device: H100)
    return names


def average(n: int = 5) -> Any:
    q, k, v = torch.randn(3, 2**12, n, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    expected = torch.softmax(q.float() @ k.float().mT, -1) @ v.float()
    torch.testing.assert_close(attention.attend(q, k, v, Form()).float(), expected, rtol=0.02, atol=0.02)


@pytest.mark.on_cpu("every kernel computes on the CPU in it")
def test_what_cudnn_has_no_plan_for_is_asked_of_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    names = called(monkeypatch, RuntimeError("cuDNN Frontend error: No valid execution plans built"))
    monkeypatch.setattr(attention, "Call", lambda *a: Call(*a[:4], LARGE))
    average()
    assert names == ["cuDNN's attention", "FlashAttention-2"]
    names.clear()
    monkeypatch.undo()
    names = called(monkeypatch, torch.OutOfMemoryError("CUDA out of memory"))
    monkeypatch.setattr(attention, "Call", lambda *a: Call(*a[:4], LARGE))
    with pytest.raises(torch.OutOfMemoryError):
        average()
    assert names == ["cuDNN's attention"]


@pytest.mark.on_cpu("puts stand-ins in the place of torch's operators")
def test_rows_that_kernels_fill_up_and_axes_that_they_add(monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.randn(2, 1, 5, 8)
    expected = torch.logsumexp(q @ q.mT, -1)
    own = {
        "_scaled_dot_product_cudnn_attention": expected[..., None],
        "_scaled_dot_product_efficient_attention": torch.nn.functional.pad(expected, (0, 27)),
    }
    for operator, logs in own.items():
        kernel = next(kernel for kernel in attention.KERNELS if kernel.operator == operator)
        asked: list[Any] = []

        class Aten:
            pass

        setattr(Aten, operator, lambda *a, logs=logs, asked=asked, **w: (asked.append((a, w)), (q, logs, None))[1])
        with monkeypatch.context() as patch:
            patch.setattr(torch.ops, "aten", Aten)
            assert torch.equal(attention._called(kernel, q, q, q, Form(scale=0.5, causal=True))[1], expected)
        (arguments, words) = asked[0]
        assert arguments[3:] == (None, True, 0.0, True)
        assert words == {"scale": 0.5}


def test_an_affinity_says_and_asks_what_the_table_says(monkeypatch: pytest.MonkeyPatch) -> None:
    x, u = (torch.randn(60, 5, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    found = []
    monkeypatch.setattr(attention, "KERNELS", tuple(replace(kernel, pairs=0) for kernel in attention.KERNELS))
    original = attention._called
    asked: list[str] = []
    monkeypatch.setattr(attention, "_called", lambda kernel, *a: (asked.append(kernel.name), original(kernel, *a))[1])
    with pretended.gpu():
        for version in (91900, 90100):
            monkeypatch.setattr(torch.backends.cudnn, "version", lambda version=version: version)
            p = nl.affinity(
                nl.ExpDotProduct(), nl.Points(range(60)), pretended.put(x), method="tiled", precision="bfloat16"
            )
            found.append((p.reason, pretended.take(p.average(pretended.put(u))), pretended.take(p.log_degree)))
    for (reason, average, logs), name in zip(found, ("cuDNN's attention", "FlashAttention-2"), strict=True):
        assert reason == f"asked for; fused by {name}, for bfloat16 of 8 columns on CUDA 9.0"
        assert torch.equal(average, found[0][1])
        assert torch.equal(logs, found[0][2])
    assert asked == ["cuDNN's attention"] * 2 + ["FlashAttention-2"] * 2


@pytest.mark.on_cpu("puts tensors on the pretended GPU itself")
def test_weights_do_not_widen_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """One column more than 64 would take the time of 96, or of 128; what the weights give is kept instead."""
    x, u = (torch.randn(60, 64, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    w = torch.rand(60, generator=torch.Generator().manual_seed(2)).double() + 0.5
    original, widths = attention._called, list[int]()
    monkeypatch.setattr(
        attention, "_called", lambda kernel, q, *a: (widths.append(q.shape[-1]), original(kernel, q, *a))[1]
    )
    with pretended.gpu():
        p = nl.affinity(nl.ExpDotProduct(), nl.Points(range(60), w.numpy()), pretended.put(x), method="tiled")
        before = p.memory_bytes
        found = [pretended.take(p.average(pretended.put(signal))) for signal in (u, u, u[:, :3])]
        after = p.memory_bytes
    weights = torch.softmax(x.double() @ x.double().T / 8 + w.log(), 1)
    for average, signal in zip(found, (u, u, u[:, :3]), strict=True):
        torch.testing.assert_close(average.double(), weights @ signal.double(), rtol=0, atol=2e-6)
    assert widths == [64] * 4
    assert after == before + 4 * 60
