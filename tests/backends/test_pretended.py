"""One computation of each kind on the pretended GPU: no mixed device, no hidden copy, the bits of CPU tensors.

`make device` runs all tests of tensors so. That the pretended GPU is as strict as a real one is shown here too.
"""

from __future__ import annotations
import __future__

import inspect
import textwrap
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import nlflow as nl
from nlflow.attention import NeutrenoAttention
from nlflow.denoising import denoise
from nlflow.domains import Batch, Mask
from nlflow.flows import derivatives
from nlflow.learning import LabelSpreading
from tests.problems import torch_on_one_thread

torch = torch_on_one_thread()

from nlflow.backends.triton import choice  # noqa: E402
from tests import on_device, pretended  # noqa: E402  # which load torch

pytestmark = pytest.mark.on_cpu("puts tensors on the pretended GPU itself")

N = 40
POINTS = nl.Points(np.arange(float(N)), np.linspace(0.5, 1.5, N))


def drawn(*shape: int, dtype: Any = torch.float64) -> Any:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)), dtype=dtype)


def averages(kernel: Any, method: str, dtype: Any = torch.float64) -> Callable[[], tuple[Any, Any]]:
    """Return an average of features and a signal, and these."""

    def average(x: Any, u: Any) -> Any:
        return nl.affinity(kernel, POINTS, x, method=method).average(u)

    return lambda: (average, (drawn(N, 3, dtype=dtype), drawn(N, 2, dtype=dtype)))


def flows(make: Callable[[Any, Any], Any]) -> Callable[[], tuple[Any, Any]]:
    """Return what makes a result of features and a signal, neither of which it is differentiated by."""
    return lambda: (lambda x, u: make(x.detach(), u.detach()), (drawn(N, 3), drawn(N, 2)))


def steps() -> tuple[Any, Any]:
    def some(x: Any, u: Any) -> Any:
        return derivatives.run(nl.GradientFlow(nl.J(smooth(x.detach()))), u, nl.ExplicitEuler(0.05), 3)

    return some, (drawn(N, 3), drawn(N, 2))


def smooth(x: Any) -> Any:
    return nl.affinity(nl.Gaussian(1.0), POINTS, x)


def evolved(_: Any, u: Any) -> Any:
    flow = nl.AttentionFlow(nl.affinity(nl.ExpDotProduct(), POINTS, u), evolving=True)
    return nl.solve(flow, u, t=3.0, integrator=nl.AttentionStep()).u


def padded() -> tuple[Any, Any]:
    present = torch.ones(2, N, dtype=torch.bool)
    present[1, N // 2 :] = False
    batch = Batch(nl.Points(np.arange(float(N))), (2,))

    def average(x: Any, u: Any, there: Any) -> Any:
        return nl.affinity(nl.ExpDotProduct(), batch, x, mask=Mask(causal=True, present=there)).average(u)

    return average, (drawn(2, N, 3), drawn(2, N, 2), present)


def images(*shape: int, **options: Any) -> Callable[[], tuple[Any, Any]]:
    def flat(image: Any) -> Any:
        return denoise(image, 0.2, **options)

    return lambda: (flat, (drawn(*shape, dtype=torch.float32),))


def learnt() -> tuple[Any, Any]:
    def probabilities(x: Any) -> Any:
        labels = np.where(np.arange(N) % 4 == 0, np.arange(N) // 4 % 2, -1)
        return torch.from_numpy(
            np.asarray(LabelSpreading("rbf", gamma=20.0).fit(x.detach(), labels).predict_proba(x.detach()))
        )

    return probabilities, (drawn(N, 3),)


def term() -> tuple[Any, Any]:
    torch.manual_seed(0)
    layer = NeutrenoAttention(8, 2)

    def output(tokens: Any) -> Any:
        own = layer.to(tokens.device)
        first = own(tokens)[1]
        return own(tokens, first)[0]

    return output, (drawn(2, 7, 8, dtype=torch.float32),)


CASES: dict[str, Callable[[], tuple[Any, Any]]] = {
    "dense average": averages(nl.Gaussian(1.0), "dense"),
    "fused average": averages(nl.ExpDotProduct(), "tiled", torch.float32),
    "wide Gaussian": averages(nl.Gaussian(3.0), "tiled"),
    "tiled average": averages(nl.Gaussian(0.05), "tiled"),
    "Matern": averages(nl.kernels.Matern(1.0), "tiled", torch.float32),
    "J-flow": flows(lambda x, u: nl.solve(nl.GradientFlow(nl.J(smooth(x))), u, t=1.0).u),
    "E-flow": flows(lambda x, u: nl.solve(nl.GradientFlow(nl.E(smooth(x), u, 0.5)), u, t=1.0).u),
    "minimizer": flows(lambda x, u: nl.equilibrium(nl.GradientFlow(nl.E(smooth(x), u, 0.5))).u),
    "steps of a flow": steps,
    "evolving kernel": flows(evolved),
    "batch with mask": padded,
    "image": images(20, 20),
    "colours": images(16, 16, 3, channel_axis=-1),
    "images": images(2, 16, 16, axes="BYX"),
    "volume": images(6, 12, 12, axes="ZYX"),
    "learning": learnt,
    "term of a layer": term,
}  # fmt: skip


def values_and_gradients(function: Any, given: Any) -> list[Any]:
    inputs = [x.clone().requires_grad_(x.is_floating_point()) for x in given]
    with pretended.counting() as counts:
        result = function(*inputs)
        found = [result]
        if result.requires_grad:
            asked = [x for x in inputs if x.requires_grad]
            found += torch.autograd.grad((result * result.detach().cos()).sum(), asked, allow_unused=True)
    on_device.check_copies(counts)
    return [None if x is None else pretended.take(x.detach()) for x in found]


@pytest.mark.parametrize("name", CASES)
def test_bits_are_those_of_tensors_on_the_cpu(name: str) -> None:
    with on_device.like_a_gpu():
        expected = values_and_gradients(*CASES[name]())
    function, given = CASES[name]()
    with pretended.gpu(), on_device.choices_of_the_cpu():
        found = values_and_gradients(function, [pretended.put(x) for x in given])
    for mine, theirs in zip(found, expected, strict=True):
        assert (mine is None) == (theirs is None)
        assert mine is None or torch.equal(mine, theirs)


def spoilt(method: Any, old: str, new: str) -> Any:
    """Return a method with another text in its source, at its own lines of its own file."""
    own = inspect.unwrap(method)
    lines, first = inspect.getsourcelines(own)
    text = textwrap.dedent("".join(lines))
    assert text.count(old) == 1
    file = inspect.getsourcefile(own)
    assert file is not None
    code = compile("\n" * (first - 1) + text.replace(old, new), file, "exec", __future__.annotations.compiler_flag)
    names: dict[str, Any] = {}
    exec(code, own.__globals__, names)
    return names[own.__name__]


def counted(steps: int) -> pretended.Counts:
    with pretended.gpu():
        flow = nl.GradientFlow(nl.J(smooth(pretended.put(drawn(N, 3)))))
        start = pretended.put(drawn(N, 2))
        with pretended.counting() as counts:
            nl.solve(flow, start, t=steps / 32, integrator=nl.ExplicitEuler(1 / 32), energies=False)
    return counts


def test_steps_of_a_flow_ask_the_device_for_nothing() -> None:
    few, many = counted(8), counted(32)
    assert many.operations > few.operations
    many.check_waits_no_more_than(few)


@pytest.mark.parametrize("text", ["u.cpu().cuda()", "u * u.sum().sign().item() ** 2", "u[u[:, 0].isfinite()]"])
def test_what_is_put_into_a_step_fails_and_is_named(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        nl.ExplicitEuler, "step", spoilt(nl.ExplicitEuler.step, "flow.velocity(u)", f"flow.velocity({text})")
    )
    few, many = counted(8), counted(32)
    with pytest.raises(AssertionError, match=r"24 more x .* at flows/integrators/fixed_step\.py:\d+ step"):
        many.check_waits_no_more_than(few)


# ---- as strict as a GPU


REFUSED: dict[str, tuple[Callable[[Any], Any], type[Exception], str]] = {
    "host tensor": (lambda x: x + torch.ones(3), RuntimeError, "Expected all tensors to be on the same device"),
    "mixed product": (lambda x: torch.eye(4) @ x, RuntimeError, "Expected all tensors to be on the same device"),
    "mask for the host": (lambda x: torch.ones(4)[x[:, 0] > 0], RuntimeError, "on the same device"),
    "numpy": (lambda x: x.numpy(), TypeError, "can't convert cuda:0 device type tensor to numpy"),
    "asarray": (lambda x: np.asarray(x), TypeError, "can't convert cuda:0 device type tensor to numpy"),
    "generator": (lambda x: x.normal_(generator=torch.Generator()), RuntimeError, "device type for generator"),
    "pinned": (lambda x: x.pin_memory(), RuntimeError, "only dense CPU tensors can be pinned"),
    "another device": (lambda x: x.to("cuda:1"), RuntimeError, "invalid device ordinal"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_it_refuses_what_a_gpu_refuses(name: str) -> None:
    call, error, reason = REFUSED[name]
    with pretended.gpu(), pytest.raises(error, match=reason):
        call(torch.ones(4, 3, device="cuda"))


COSTS: dict[str, tuple[Callable[[Any], Any], str, int]] = {
    "item": (lambda x: x[0, 0].item(), pretended.SYNCHRONIZATION, 1),
    "bool": (lambda x: bool(x.any()), pretended.SYNCHRONIZATION, 1),
    "float": (lambda x: float(x.sum()), pretended.SYNCHRONIZATION, 1),
    "tolist": (lambda x: x.tolist(), pretended.SYNCHRONIZATION, 1),
    "nonzero": (lambda x: x.nonzero(), pretended.SYNCHRONIZATION, 1),
    "booleans": (lambda x: x[x > 0], pretended.SYNCHRONIZATION, 1),
    "factor": (lambda x: torch.linalg.cholesky(x.T @ x + torch.eye(3, device=x.device)), pretended.SYNCHRONIZATION, 1),
    "cpu": (lambda x: x.cpu(), pretended.TO_HOST, 1),
    "to": (lambda x: x.double().to("cpu"), pretended.TO_HOST, 1),
    "written to the host": (lambda x: torch.zeros(4, 3).copy_(x), pretended.TO_HOST, 1),
    "tensor": (lambda x: torch.tensor([1.0], device=x.device), pretended.TO_DEVICE, 1),
    "array": (lambda x: torch.as_tensor(np.ones(3), device="cuda"), pretended.TO_DEVICE, 1),
    "cuda": (lambda x: torch.ones(3).pin_memory().cuda(), pretended.TO_DEVICE, 1),
    "list of indices": (lambda x: x[[0, 1]], pretended.TO_DEVICE, 1),
    "filled": (lambda x: x.zero_(), pretended.OPERATION, 1),
    "views": (lambda x: x.T[1:].unflatten(0, (2, 1)), pretended.OPERATION, 0),
}  # fmt: skip


@pytest.mark.parametrize("name", COSTS)
def test_it_counts_what_a_gpu_does(name: str) -> None:
    call, kind, count = COSTS[name]
    with pretended.gpu():
        x = torch.ones(4, 3, device="cuda")
        with pretended.counting() as counts:
            call(x)
    assert counts.places[kind].total() == count


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # by torch's own rules for jvp
def test_derivatives_are_those_of_torch() -> None:
    x = drawn(5, 3)

    def f(x: Any) -> Any:
        return (x @ torch.ones(3, dtype=x.dtype, device=x.device)).tanh()

    def all_of(x: Any) -> list[Any]:
        ways = [torch.func.jvp(f, (x,), (x,))[1], torch.func.vjp(f, x)[1](f(x))[0], torch.func.vmap(f)(x)]
        asked = x.clone().requires_grad_()
        f(asked).sum().backward()
        again = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(f(again).sum(), again, create_graph=True)
        return [*ways, asked.grad, *torch.autograd.grad(slope.square().sum(), again)]

    expected = all_of(x)
    with pretended.gpu():
        found = [pretended.take(one) for one in all_of(pretended.put(x))]
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.equal(mine, theirs)


def test_autocast_rounds_products_alone() -> None:
    x = torch.randn(6, 6, generator=torch.Generator().manual_seed(0))
    half = (x.bfloat16() @ x.bfloat16()).float()
    with pretended.gpu():
        there = pretended.put(x).requires_grad_()
        with torch.autocast("cuda", torch.bfloat16):
            product = there @ there
            weights = product.softmax(-1)
            with torch.autocast("cuda", enabled=False):
                exact = there @ there
        assert (product.dtype, weights.dtype, exact.dtype) == (torch.bfloat16, torch.float32, torch.float32)
        weights.square().sum().backward()
        assert there.grad is not None
        assert there.grad.dtype == torch.float32
        assert (there @ there).dtype == torch.float32
    assert torch.equal(pretended.take(product).float(), half)
    assert torch.equal(pretended.take(weights), half.softmax(-1))
    assert torch.equal(pretended.take(exact), x @ x)


def test_default_dtype_and_random_numbers() -> None:
    with pretended.gpu():
        torch.set_default_dtype(torch.float64)
        try:
            assert torch.zeros(3, device="cuda").dtype == torch.float64
        finally:
            torch.set_default_dtype(torch.float32)
        mine = torch.randn(3, device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    assert torch.equal(pretended.take(mine), torch.randn(3, generator=torch.Generator().manual_seed(1)))


def test_kernels_do_not_read_the_memory_of_a_pretended_device() -> None:
    with pretended.gpu():
        assert "need not have memory" in choice.why_not(pretended.put(torch.zeros(2)), None)
