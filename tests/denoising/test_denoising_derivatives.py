"""Derivatives of the denoiser on tensors: steps, the whole estimate, and the Jacobian without a matrix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import nlflow as nl
from nlflow import denoise
from nlflow.denoising.frame import Spread
from nlflow.denoising.groupwise import PRESETS
from nlflow.denoising.patches import (
    GroupFlow,
    Grouping,
    Groups,
    Images,
    Lattice,
    PlainFilter,
    RelaxedSemiImplicit,
    Stage,
    TensorFilter,
)
from nlflow.denoising.patches.filters import removed
from tests.pictures import SMALL_IMAGE, Floats, noisy, signal_in, waves
from tests.problems import torch_on_one_thread

torch = torch_on_one_thread()
derivatives = pytest.importorskip("nlflow.denoising.derivatives", reason="torch is optional")
pytestmark = [
    pytest.mark.numerical,
    # What torch says of itself when its gradcheck goes forward for the first time.
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning"),
]

RNG = np.random.default_rng(0)
SHAPE = (11, 13)
IMAGE = noisy(100 + 40 * waves(*SHAPE), 8.0)
CORRELATION = np.array([[[0.0, 0.3, 0.0], [0.4, 1.0, 0.4], [0.0, 0.3, 0.0]]])


def drawn(*shape: int) -> Any:
    return torch.from_numpy(RNG.normal(0, 1, shape))


def prepared(grouping: Grouping, shape: tuple[int, int] = (7, 8)) -> tuple[Groups, list[Any]]:
    """Groups, and three images that are unlike: kinks lie elsewhere."""
    f = drawn(1, 1, *shape) + 4 * (torch.arange(shape[1]) > 3)
    lattice = Lattice.of(shape, grouping)
    return Groups(lattice, *TensorFilter().find(f, lattice)), [0.9 * f, 0.8 * f + 0.1 * drawn(1, 1, *shape), f]


# ---- one step


STAGES = {
    "first": Stage(shrink=1.4, running=False),
    "cosines": Stage(shrink=1.2, running=False, cosine=True),
    "later": Stage(leave=0.4, factor=0.8),
    "last": Stage(leave=0.0, factor=1.3),
}


@pytest.mark.slow
@pytest.mark.other_bits("zeros of torch's forward derivatives have no sign, those of the pretended GPU have one")
@pytest.mark.parametrize("noise", ["white", "varying", "correlated"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_step_has_both_derivatives(stage: str, noise: str) -> None:
    groups, images = prepared(Grouping(3, 9, 3, 2))
    variance = torch.ones(1, 1, 1, 1, dtype=torch.float64)
    if noise == "varying":
        variance = 0.5 + drawn(1, 1, 7, 8).abs()
    correlation = CORRELATION if noise == "correlated" else None

    def step(*given: Any) -> Any:
        return TensorFilter().step(groups, Images(*given, variance, correlation), STAGES[stage])

    inputs = [one.clone().requires_grad_() for one in images]
    assert torch.autograd.gradcheck(step, inputs, check_forward_ad=True, fast_mode=True)


def test_equal_eigenvalues_have_a_derivative() -> None:
    from nlflow.backends.torch.groups import Matrices, _shrunk_inverse

    turn = torch.linalg.qr(drawn(5, 5)).Q
    matrix = (turn * torch.tensor([3.0, 3.0, 3.0, 0.5, 0.5], dtype=torch.float64)) @ turn.T

    def shrunk(x: Any) -> Any:
        return _shrunk_inverse((x + x.T)[None, None] / 2, 1.4, Matrices(None, None, None, None, removed(1.4)))

    assert torch.autograd.gradcheck(shrunk, matrix.requires_grad_(), check_forward_ad=True)


def test_inverses_have_both_derivatives() -> None:
    from nlflow.backends.torch.groups import _Inverse

    root = drawn(2, 4, 4)

    def inverse(x: Any) -> Any:
        return _Inverse.apply(x @ x.mT + torch.eye(4, dtype=torch.float64))

    assert torch.autograd.gradcheck(inverse, root.requires_grad_(), check_forward_ad=True)


def test_groups_that_are_filtered_in_float64_have_derivatives_too() -> None:
    groups, images = prepared(Grouping(3, 9, 3, 2))
    high = [(one + 2e4 * (torch.arange(8) > 3)).float() for one in images]
    weight = drawn(1, 1, 7, 8)
    gradients = []
    for dtype in (torch.float32, torch.float64):
        inputs = [one.to(dtype).requires_grad_() for one in high]
        variance = torch.ones(1, 1, 1, 1, dtype=dtype)
        estimate = TensorFilter().step(groups, Images(*inputs, variance), STAGES["later"])[0]
        gradients.append(torch.autograd.grad((estimate * weight.to(dtype)).sum(), inputs))
    for single, double in zip(*gradients, strict=True):
        # Values and estimates of 2e4, of which derivatives of weights have the difference, are rounded to float32.
        torch.testing.assert_close(single.double(), double, rtol=2e-3, atol=2 * 2e4 * torch.finfo(torch.float32).eps)


def test_a_filter_whose_covariances_are_held_still_is_symmetric_in_the_measure_of_its_weights() -> None:
    # Patches of one sample: then a group has one weight, and M J is a sum of symmetric matrices.
    groups, (f, pilot, _) = prepared(Grouping(1, 6, 3, 1))
    one = torch.ones(1, 1, 1, 1, dtype=torch.float64)
    stage = Stage(shrink=1.4, running=False)

    def estimate(z: Any) -> Any:
        return TensorFilter().step(groups, Images(z.view(f.shape), pilot, z.view(f.shape), one), stage)[0].flatten()

    jacobian = torch.autograd.functional.jacobian(estimate, f.flatten())
    # The weights of the samples, from the plain formulas: 1 / (1 - n/(n+...) ...) of each group, put back.
    tokens = pilot.flatten()[groups.members.long()]
    values = tokens.var(dim=1, correction=0)
    kept = 1 - 1 / (torch.from_numpy(signal_in(values.numpy(), 1.4)) + 1)
    n = tokens.shape[1]
    weights = 1 / (kept * (1 - 1 / n) + 1 / n)
    mass = torch.zeros(f.numel(), dtype=torch.float64)
    mass.index_add_(0, groups.members.long().flatten(), weights[:, None].expand(-1, n).flatten())
    symmetric = mass[:, None] * jacobian
    torch.testing.assert_close(symmetric, symmetric.T, rtol=0, atol=1e-12)
    assert float((jacobian - jacobian.T).abs().max()) > 1e-3


# ---- the whole estimate


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flows in float64, which differences need."""
    from nlflow.denoising import groupwise

    monkeypatch.setattr(groupwise, "SINGLE", 0.0)


@pytest.fixture
def map_(double: None) -> Any:
    return derivatives.linearized(torch.from_numpy(IMAGE), 8.0)


def columns(apply: Callable[[Any], Any], shape: tuple[int, ...]) -> Any:
    size = int(np.prod(shape))
    return torch.stack([apply(one.view(shape)).flatten() for one in torch.eye(size, dtype=torch.float64)], 1)


def test_the_jacobian_is_that_of_differences_of_the_plain_objects(map_: Any) -> None:
    """An independent one: E, GradientFlow and SemiImplicit in NumPy, with the groups of the first run."""
    preset = PRESETS["balanced"]
    f = (IMAGE - IMAGE.mean()) / 8

    class Held(PlainFilter):
        found: list[Any] = []  # noqa: RUF012 - shared by all runs, that is what it is for
        place = 0

        def find(self, guide: Floats, lattice: Lattice) -> Any:
            if self.place == len(self.found):
                self.found.append(super().find(guide, lattice))
            self.place += 1
            return self.found[self.place - 1]

    def estimate(signal: Floats) -> Floats:
        flow = GroupFlow(
            signal, preset.groupings(Spread.of(f[..., None]).ratio, 2), shrink=preset.shrink, factor=preset.factor,
            search_every=preset.search_every, filter=Held(),
        )  # fmt: skip
        integrator = RelaxedSemiImplicit(preset.steps, preset.leave)
        return np.asarray(nl.solve(flow, t=preset.steps + 1, integrator=integrator, energies=False).final)

    np.testing.assert_allclose(estimate(f) * 8 + IMAGE.mean(), map_.estimate.numpy(), atol=1e-9)
    for direction in RNG.normal(0, 1, (2, *SHAPE)):
        h = 1e-5
        difference = (estimate(f + h * direction) - estimate(f - h * direction)) / (2 * h)
        np.testing.assert_allclose(map_.jvp(torch.from_numpy(direction)).numpy(), difference, atol=1e-6)


@pytest.mark.slow
def test_products_are_those_of_one_matrix(map_: Any) -> None:
    directions, cotangents = drawn(4, *SHAPE), drawn(4, *SHAPE)
    along = torch.stack([map_.jvp(one).flatten() for one in directions], 1)
    back = torch.stack([map_.vjp(one).flatten() for one in cotangents])
    torch.testing.assert_close(cotangents.flatten(1) @ along, back @ directions.flatten(1).T, rtol=0, atol=1e-11)
    # A shift of all samples is a shift of the estimate.
    ones = torch.ones(SHAPE, dtype=torch.float64)
    torch.testing.assert_close(map_.jvp(ones), ones, rtol=0, atol=1e-11)
    # Weights and covariances follow the samples, so that the matrix is not symmetric.
    assert float((map_.vjp(ones) - ones).abs().max()) > 1e-3
    signs = torch.from_numpy(np.random.default_rng(5).integers(0, 2, (2, *SHAPE), dtype=np.int8)).double() * 2 - 1
    expected = sum(float((one * map_.jvp(one)).sum()) for one in signs) / 2
    assert map_.divergence(2, seed=5) == pytest.approx(expected, rel=1e-12)
    assert "shape (11, 13)" in repr(map_)


@pytest.mark.slow
def test_the_divergence_is_the_trace(map_: Any) -> None:
    jacobian = columns(map_.jvp, SHAPE)
    trace = float(jacobian.trace())
    # Signs make each probe trace + sum of the entries off the diagonal: their variance is known.
    even = (jacobian + jacobian.T) / 2
    spread = float(2 * (even - torch.diag(even.diagonal())).square().sum()) ** 0.5
    assert abs(map_.divergence(40, seed=1) - trace) < 5 * spread / 40**0.5
    assert 0 < trace < len(jacobian)


@pytest.mark.slow
@pytest.mark.parametrize("words", [{}, {"axes": "BYX"}, {"axes": "YXC"}, {"axes": "X"}, {"axes": "ZYX"}, {"map": True}])
def test_denoise_of_a_tensor_that_asks_for_a_gradient(double: None, words: dict[str, Any]) -> None:
    axes, sigma = words.get("axes", "YX"), 8.0
    image: Any = torch.from_numpy(IMAGE)
    if axes == "BYX":
        image = torch.stack([image, 3 * image, image.flip(0)])
    elif axes == "YXC":
        image = torch.stack([image, image.flip(0)], -1)
    elif axes == "X":
        image = image.flatten()
    elif axes == "ZYX":
        image = torch.stack([image[:8, :8] + k + drawn(8, 8) for k in range(8)])
    if "map" in words:
        sigma = torch.linspace(4, 12, image.numel(), dtype=torch.float64).view(image.shape)
        sigma[:2] = 0
    keep = torch.zeros(image.shape, dtype=torch.bool)
    keep.view(-1)[3] = True
    given = {"axes": axes, "keep": keep}
    tracked = image.clone().requires_grad_()
    u = denoise(tracked, sigma, **given)
    assert float((u - denoise(image, sigma, **given)).detach().abs().max()) < 1e-9
    weight = drawn(*image.shape)
    (gradient,) = torch.autograd.grad((u * weight).sum(), tracked)
    map_ = derivatives.linearized(image, sigma, **given)
    torch.testing.assert_close(gradient, map_.vjp(weight), rtol=0, atol=1e-11)
    direction, h = drawn(*image.shape), 1e-5
    difference = (map_(image + h * direction) - map_(image - h * direction)) / (2 * h)
    along = map_.jvp(direction)
    torch.testing.assert_close(along, difference, rtol=0, atol=2e-5)
    assert abs(float((along * weight).sum() - (gradient * direction).sum())) < 1e-9
    assert float(gradient.reshape(-1)[3]) != 0
    assert float(along.reshape(-1)[3] - direction.reshape(-1)[3]) == 0  # kept


def test_single_precision_learns() -> None:
    # A few steps of gradient descent through the denoiser lower the error of its estimate.
    clean = torch.from_numpy(100 + 40 * waves(*SHAPE)).float()
    image = torch.from_numpy(IMAGE).float().requires_grad_()
    losses = []
    for _ in range(4):
        loss = (denoise(image, 8.0) - clean).square().mean()
        losses.append(float(loss.detach()))
        (gradient,) = torch.autograd.grad(loss, image)
        image = (image - 20 * gradient).detach().requires_grad_()
    assert gradient.dtype == torch.float32
    assert losses[-1] < 0.8 * losses[0]
    with torch.no_grad():
        assert not denoise(image, 8.0).requires_grad


# ---- what has no derivative


def test_what_has_no_derivative_is_refused_by_name() -> None:
    image = torch.from_numpy(IMAGE).requires_grad_()
    flat = torch.full(SHAPE, 3.0, requires_grad=True)
    with pytest.raises(nl.InputError, match="image: the input is constant, so that it is returned unchanged"):
        denoise(flat, 8.0)
    batch = torch.stack([image, image * 0])
    with pytest.raises(nl.InputError, match="image: the input is constant, item 1, so that it is returned unchanged"):
        denoise(batch, 8.0, axes="BYX")
    with pytest.raises(nl.InputError, match=r"image: there is no noise to remove \(sigma=0\), so that"):
        derivatives.linearized(image, 0.0)
    for words, why in (
        ({"mask": torch.zeros(SHAPE, dtype=torch.bool)}, "a mask of missing samples"),
        ({"noise": "poisson"}, "noise=Poisson"),
    ):
        sigma = None if "noise" in words else 8.0
        with pytest.raises(nl.InputError, match=f"image: got a tensor that requires a gradient with {why}"):
            denoise(image, sigma, **words)
    for rule in ("sure", "discrepancy"):
        with pytest.raises(nl.InputError, match=f"stopping: got '{rule}' with a tensor that requires a gradient"):
            denoise(image, 8.0, stopping=rule)
    with pytest.raises(nl.InputError, match="create_graph: got True, expected False"):
        torch.autograd.grad(denoise(image, 8.0).sum(), image, create_graph=True)
    with pytest.raises(nl.MemoryLimitError, match=r"image: its flow with derivatives needs .* denoise smaller parts"):
        denoise(image, 8.0, max_memory=20_000)
    flow = GroupFlow(image, SMALL_IMAGE)
    with pytest.raises(
        nl.InputError, match=r"start, or what the flow is made of: got a tensor that requires.*use nlflow.denoise"
    ):
        nl.solve(flow, t=2, integrator=RelaxedSemiImplicit(1))
    from nlflow.flows.derivatives import run

    with pytest.raises(nl.InputError, match="flow: got a GroupFlow, whose steps remember more than a signal"):
        run(flow, image, RelaxedSemiImplicit(1), 2)


def test_an_estimated_noise_is_a_constant() -> None:
    image = torch.from_numpy(noisy(100 + 40 * waves(32, 32), 8.0)).requires_grad_()
    estimated, info = denoise(image, noise="white", return_info=True)
    (gradient,) = torch.autograd.grad(estimated.sum(), image)
    (given,) = torch.autograd.grad(denoise(image, info.sigma).sum(), image)
    torch.testing.assert_close(gradient, given, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((IMAGE, 8.0), "image: got ndarray, expected a torch tensor"),
        ((torch.from_numpy(IMAGE), None), "sigma: got None, expected the strength of white noise"),
        ((torch.from_numpy(IMAGE), torch.ones((), requires_grad=True)), "sigma: got a tensor that requires a gradient"),
        ((torch.from_numpy(IMAGE).bfloat16(), 8.0), "image: got bfloat16"),
        ((torch.full((9, 9), torch.nan), 1.0), "image: got NaN, which counts as missing samples"),
    ],
)
def test_linearized_refuses(arguments: tuple[Any, Any], message: str) -> None:
    with pytest.raises(nl.InputError, match=message):
        derivatives.linearized(*arguments)


def test_directions_are_like_the_image() -> None:
    made = derivatives.linearized(torch.from_numpy(IMAGE), 8.0)
    for name, method in (("direction", made.jvp), ("cotangent", made.vjp), ("image", made)):
        with pytest.raises(
            nl.InputError, match=rf"{name}: got \(3,\), torch.float32, cpu, expected a tensor of \(11, 13\)"
        ):
            method(torch.ones(3))
        with pytest.raises(nl.InputError, match=f"{name}: got ndarray"):
            method(IMAGE)
    with pytest.raises(nl.InputError, match="probes: got 0"):
        made.divergence(0)
