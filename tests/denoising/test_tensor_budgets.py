"""What the denoiser asks of a device: operations, waits and copies; and the same bits whatever a chunk holds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from nlflow import denoise
from nlflow.denoising.derivatives import linearized
from nlflow.denoising.patches import Grouping, Groups, Images, Lattice, Stage, TensorFilter
from tests import pretended
from tests.pictures import noisy, waves
from tests.problems import torch_on_one_thread

torch = torch_on_one_thread()
pytestmark = [pytest.mark.numerical, pytest.mark.on_cpu("puts tensors on the pretended GPU itself")]

SIGMA = 20.0
IMAGE = torch.from_numpy(noisy(120 + 30 * waves(40, 44), SIGMA).astype(np.float32))
# Operations, waits for a number, copies in both directions. One wait a step tells which groups ask for float64, whether
# all is finite, and whether groups were found; two are of what a flow is given. Copies are of what is known of the
# samples (2), of the units of the noise (1), and for each lattice of what is constant in the search and in the step.
BUDGETS = {"fast": (210, 3, 4), "balanced": (970, 8, 5), "best": (3500, 16, 12)}


def counted(image: Any, quality: str, **words: Any) -> tuple[Any, pretended.Counts]:
    with pretended.gpu():
        there = pretended.put(image)
        with pretended.counting() as counts:
            result = denoise(there, SIGMA, quality=quality, **words)
        return pretended.take(result), counts


@pytest.mark.parametrize("quality", ["fast", "balanced", pytest.param("best", marks=pytest.mark.slow)])
def test_operations_waits_and_copies_of_a_flow(quality: str) -> None:
    result, counts = counted(IMAGE, quality)
    operations, waits, copies = BUDGETS[quality]
    assert counts.operations <= operations, counts
    assert counts.synchronizations <= waits, counts
    assert counts.copies <= copies, counts
    assert torch.equal(result, denoise(IMAGE, SIGMA, quality=quality))


def test_items_that_are_alike_ask_no_more_than_one() -> None:
    alone = counted(IMAGE, "fast")[1]
    _, counts = counted(torch.stack([IMAGE, IMAGE.flip(0), IMAGE.flip(1)]), "fast", axes="BYX")
    assert counts.synchronizations <= alone.synchronizations
    assert counts.copies <= alone.copies
    assert counts.operations <= alone.operations + 12


def test_what_is_put_into_a_step_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    from nlflow.backends.torch import groups

    weighted = groups._weighted

    def asking(step: Any, chunk: Any, z: Any, *given: Any) -> Any:
        z.cpu()
        float(z.sum())
        return weighted(step, chunk, z, *given)

    monkeypatch.setattr(groups, "_weighted", asking)
    _, counts = counted(IMAGE, "balanced")
    _, waits, copies = BUDGETS["balanced"]
    assert counts.copies > copies
    assert counts.synchronizations > waits


STAGES = {
    "first": Stage(shrink=1.4, running=False),
    "cosines": Stage(shrink=1.2, running=False, cosine=True),
    "later": Stage(leave=0.4, factor=0.8),
    "across": Stage(factor=0.8, across=0.4),
}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("kind", ["image", "few members", "colour", "correlated", "steep"])
@pytest.mark.sampled(4)
def test_the_bits_do_not_depend_on_chunks(kind: str, stage: str) -> None:
    generator = torch.Generator().manual_seed(0)
    shape = {"colour": (3, 1, 20, 23), "few members": (1, 1, 9, 11)}.get(kind, (1, 1, 27, 31))
    f = torch.randn(shape, generator=generator) + torch.arange(shape[-1]) / 3
    if kind == "steep":  # some groups ask for float64
        f = f + 60 * (torch.arange(shape[-1]) > 15)
    pilot = f - 0.4 * torch.randn(shape, generator=generator)
    correlation = np.array([[[0.3, 1.0, 0.3]]]) if kind == "correlated" else None
    state = f if not STAGES[stage].running else 0.8 * f + 0.2 * pilot
    lattice, results = Lattice.of(shape[2:], Grouping(5, 90 if kind == "few members" else 30, 7, 4)), []
    for numbers in (2**14, 2**20, 2**27):
        filter, given = TensorFilter(numbers, kernels=False), state.clone().requires_grad_()
        members, counts = filter.find(f, lattice)
        images = Images(given, given if state is f else pilot, f, torch.ones(len(f), 1, 1, 1), correlation)
        made = filter.step(Groups(lattice, members, counts), images, STAGES[stage])
        (gradient,) = torch.autograd.grad(sum((one**2).sum() for one in made), given)
        results.append((members, counts, *(one.detach() for one in made), gradient))
    for other in results[1:]:
        assert all(torch.equal(one, two) for one, two in zip(results[0], other, strict=True))


def test_gradients_have_the_bits_of_the_cpu() -> None:
    image, weights = IMAGE[:20, :24].clone(), IMAGE[20:40, 20:44].clone()
    here = linearized(image, SIGMA)
    with pretended.gpu():
        there = linearized(pretended.put(image), SIGMA)
        gradient = pretended.take(there.vjp(pretended.put(weights)))
        assert torch.equal(pretended.take(there.estimate), here.estimate)
    assert torch.equal(gradient, here.vjp(weights))
