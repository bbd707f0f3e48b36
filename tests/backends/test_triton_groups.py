"""The kernels in Triton, in triton's interpreter: the groups and the steps of torch's operations and of plain ones."""

from __future__ import annotations

import importlib
import inspect
import os
from typing import Any

import numpy as np
import pytest

from nlflow.denoising.patches import CompiledFilter, Grouping, Groups, Images, Lattice, PlainFilter, Stage, TensorFilter
from tests.pictures import Floats
from tests.problems import torch_on_one_thread

torch = torch_on_one_thread()
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # which triton reads when it is imported
triton = pytest.importorskip("triton", reason="triton comes with builds of torch for CUDA")
if DEVICE == "cpu" and type(triton.language.sum).__name__ != "InterpretedFunction":
    pytest.skip("triton was imported without its interpreter; run this file by itself", allow_module_level=True)
pytestmark = [
    pytest.mark.numerical, pytest.mark.on_cpu("puts tensors on a GPU itself, and kernels have no order of sums"),
]  # fmt: skip

# An interpreted program takes a tenth of a second: few groups, of which some have fewer members than are wanted.
SHAPES = {"image": (1, 1, 8, 8), "colour": (3, 1, 8, 7), "signal": (1, 1, 1, 12), "volume": (1, 5, 6, 7),
          "few": (1, 1, 5, 6)}  # fmt: skip
GROUPING = Grouping((3, 4, 4), 18, 4, 6)
KERNELS, OPERATIONS = TensorFilter(kernels=True), TensorFilter(kernels=False)


@pytest.fixture(autouse=True)
def numbers_as_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let numbers reach interpreted kernels as compiled ones: in float32, but where a parameter is of float64.

    And let a comparison of numbers stay one where it meets those of lanes: the interpreter spreads it as integers,
    which it refuses as masks from 3.9 on.
    """
    interpreter = importlib.import_module("triton.runtime.interpreter")
    on_host = interpreter.GridExecutor._init_args_hst

    def rounded(self: Any, given: Any, named: Any) -> Any:
        wide = ["float64" in str(one.annotation) for one in inspect.signature(self.fn).parameters.values()]
        given = [
            float(np.float32(one)) if isinstance(one, float) and not wide[place] else one
            for place, one in enumerate(given)
        ]
        return on_host(self, given, named)

    builder = interpreter.InterpreterBuilder
    spread = builder.create_splat

    def as_compared(self: Any, kind: Any, number: Any) -> Any:
        result = spread(self, kind, number)
        result.data = result.data.astype(bool) if number.data.dtype == bool else result.data
        return result

    monkeypatch.setattr(interpreter.GridExecutor, "_init_args_hst", rounded)
    monkeypatch.setattr(builder, "create_splat", as_compared)


def planes(kind: str, seed: int = 0) -> Floats:
    shape = SHAPES[kind]
    return np.random.default_rng(seed).normal(0, 1, shape) + np.cumsum(np.ones(shape), -1) / 3


def lattice_of(kind: str, grouping: Grouping = GROUPING) -> Lattice:
    return Lattice.of(tuple(n for n in SHAPES[kind][1:] if n > 1), grouping)


def tensors(images: Images) -> Images:
    return Images(*(placed(one) for one in (images.state, images.pilot, images.observed, images.variance)))


def placed(array: Any) -> Any:
    return torch.from_numpy(array).to(DEVICE)


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("ties", [False, True])
def test_the_groups_are_those_of_the_operations_and_the_loops(kind: str, ties: bool) -> None:
    guide = planes(kind).astype(np.float32)
    if ties:  # whole numbers, of which many patches are equal
        guide = np.rint(guide / 2).astype(np.float32)
    lattice = lattice_of(kind)
    on_device = placed(guide)
    assert KERNELS.why_no_search(on_device, lattice) == ""
    members, counts = (one.cpu().numpy() for one in KERNELS.find(on_device, lattice))
    same, as_many = (one.cpu().numpy() for one in OPERATIONS.find(on_device, lattice))
    np.testing.assert_array_equal(members, same)
    np.testing.assert_array_equal(counts, as_many)
    assert (members.dtype, counts.dtype) == (np.int32, np.int32)
    expected, wanted = CompiledFilter().find(guide, lattice)
    there = np.arange(members.shape[1]) < wanted[:, None]
    np.testing.assert_array_equal(counts, wanted)
    np.testing.assert_array_equal(members[there], expected[there])


@pytest.mark.parametrize("members", [1, 2])
def test_groups_of_one_and_of_two(members: int) -> None:
    guide = torch.zeros(SHAPES["image"], device=DEVICE)  # all are equal: the order of offsets decides
    lattice = lattice_of("image", Grouping(4, members, 5, 6))
    found, counts = KERNELS.find(guide, lattice)
    same, as_many = OPERATIONS.find(guide, lattice)
    assert bool((found == same).all() and (counts == as_many).all())


STAGES = {
    "first": Stage(shrink=1.4, running=False),
    "cosines": Stage(shrink=1.2, running=False, cosine=True),
    "later": Stage(leave=0.4, factor=0.8),
    "last": Stage(leave=0.0, factor=1.3),
}


def error_of(groups: Groups, images: Images, stage: Stage) -> float:
    """How far single precision is from the truth: n eps kappa of the inverse, times what is filtered."""
    state, pilot = np.ptp(images.state), np.ptp(images.pilot)
    noise = images.variance.min() * stage.factor * max(stage.leave, 0.05) ** 2 if stage.running else 1.0
    samples, most = np.prod(groups.lattice.patch), groups.members.shape[1]
    return float(most * np.finfo(np.float32).eps * (1 + samples * (pilot / 2) ** 2 / noise) * state)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("kind", ["image", "colour", "volume", "few"])
@pytest.mark.parametrize("noise", ["white", "varying"])
@pytest.mark.sampled(5)
def test_a_step_is_that_of_the_plain_objects(noise: str, kind: str, stage: str) -> None:
    f = planes(kind)
    state, pilot = 0.8 * f + 0.3, f - 0.4 * planes(kind, seed=1)
    if not STAGES[stage].running:
        state, pilot = f, f
    variance = np.ones((len(f), 1, 1, 1)) if noise != "varying" else 0.5 + np.abs(planes(kind, seed=2))
    lattice = lattice_of(kind)
    groups = Groups(lattice, *CompiledFilter().find(f, lattice))
    images = Images(state, pilot, f, variance)
    expected = PlainFilter().step(groups, images, STAGES[stage])
    on_device = Groups(lattice, placed(groups.members), placed(groups.counts))
    for dtype, bound in (("float64", 1e-11), ("float32", error_of(groups, images, STAGES[stage]))):
        rounded = Images(*(one.astype(dtype) for one in (state, pilot, f, variance)))
        assert KERNELS.why_no_step(lattice, tensors(rounded), STAGES[stage]) == ""
        made = KERNELS.step(on_device, tensors(rounded), STAGES[stage])
        for mine, plain in zip(made, expected, strict=True):
            assert str(mine.dtype) == f"torch.{dtype}"
            np.testing.assert_allclose(mine.cpu().numpy(), plain, rtol=0, atol=bound)


@pytest.mark.parametrize("height", [300.0, 3e4, 3e9])
def test_groups_far_from_well_conditioned_keep_their_digits(height: float) -> None:
    # Edges much higher than the noise ask for float64, and those of which it drowns in rounding stay as they are.
    f = (planes("image") + height * (np.arange(8) > 3)).astype(np.float32)
    lattice = lattice_of("image")
    images, stage = tensors(Images(f, f, f, np.ones((1, 1, 1, 1), np.float32))), Stage(shrink=1.4, running=False)
    groups = Groups(lattice, *OPERATIONS.find(images.state, lattice))
    expected = PlainFilter().step(groups.on_host, images.on_host, stage)[0]
    made = KERNELS.step(groups, images, stage)[0].cpu().numpy()
    assert np.abs(made - expected).max() <= 2e-3 + 8 * np.finfo(np.float32).eps * height


def test_why_kernels_do_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    f: Any = torch.zeros(SHAPES["image"], device=DEVICE)
    lattice, one = lattice_of("image"), torch.ones(1, 1, 1, 1, device=DEVICE)
    images, stage = Images(f, f, f, one), STAGES["later"]
    on_cpu = Images(f.cpu(), f.cpu(), f.cpu(), one.cpu())
    assert "tensors lie on cpu" in TensorFilter().why_no_step(lattice, on_cpu, stage)
    assert OPERATIONS.why_no_search(f, lattice) == "kernels=False"
    assert "derivatives" in KERNELS.why_no_step(lattice, Images(f, f, f.clone().requires_grad_(), one), stage)
    assert "correlated" in KERNELS.why_no_step(lattice, Images(f, f, f, one, np.ones((1, 1, 1))), stage)
    assert "across" in KERNELS.why_no_step(lattice, images, Stage(across=0.5))
    assert "more than 4096" in KERNELS.why_no_search(f, Lattice.of((90, 90), Grouping(4, 9, 40, 6)))
    assert "more than 64" in KERNELS.why_no_step(Lattice.of((90, 90), Grouping(12, 9, 4, 6)), images, stage)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert "deterministic" in KERNELS.why_no_step(lattice, images, stage)
