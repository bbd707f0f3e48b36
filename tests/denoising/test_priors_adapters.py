"""The denoiser inside other people's reconstruction programs: the bits of `denoise`, and their loops."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import numpy as np
import pytest

from nlflow import ExpDotProduct, Gaussian, Grid, InputError, Points, affinity, denoise
from nlflow.denoising.priors import EA, Forward
from tests.problems import torch_on_one_thread

RNG = np.random.default_rng(0)
NOISY = RNG.normal(100, 20, (24, 26))
ADAPTERS = {"deepinv": "Denoiser", "pylops": "Average", "pyproximal": "Prior", "scico": "Prior"}
INSTALLED = {name: importlib.util.find_spec(name) is not None for name in ADAPTERS}


def adapter(name: str) -> Any:
    """Return an adapter, or skip where its package is missing."""
    pytest.importorskip(name, reason=f"needs {name}")
    return importlib.import_module(f"nlflow.denoising.priors.{name}")


@pytest.mark.parametrize("name", INSTALLED)
def test_a_missing_package_is_refused_with_what_to_do(name: str) -> None:
    if INSTALLED[name]:
        pytest.skip(f"{name} is installed")
    install = f"'nlflow\\[{name}\\]'" if name.startswith("py") else name
    module = importlib.import_module(f"nlflow.denoising.priors.{name}")
    with pytest.raises(InputError, match=rf"{name}: it cannot be imported .*; .*pip install {install}"):
        getattr(module, ADAPTERS[name])(affinity(Gaussian(1.5), Grid(5)))


# ---- deepinv


@pytest.mark.filterwarnings("ignore")  # of deepinv's own
def test_deepinv_denoiser() -> None:
    torch = pytest.importorskip("torch", reason="torch is optional")
    deepinv = pytest.importorskip("deepinv", reason="needs deepinv")
    torch_on_one_thread()
    kind = adapter("deepinv").Denoiser
    ours = kind("fast")
    assert isinstance(ours, deepinv.models.Denoiser)
    grey = torch.from_numpy(np.stack([NOISY, NOISY[::-1]])[:, None].astype(np.float32))
    found = ours(grey, 20.0)
    assert found.dtype == torch.float32
    for item, image in zip(found, grey, strict=True):
        assert np.array_equal(item[0].numpy(), denoise(image[0].numpy(), 20.0, quality="fast"))
    colours = torch.from_numpy(RNG.normal(100, 20, (2, 3, 24, 26)))
    found = ours(colours, torch.tensor([20.0, 10.0]))
    for item, image, sigma in zip(found, colours, (20.0, 10.0), strict=True):
        assert np.array_equal(item.numpy(), denoise(image.numpy(), sigma, quality="fast", channel_axis=0))
    with torch.no_grad():
        assert torch.equal(ours(grey.clone().requires_grad_(), 20.0), ours(grey, 20.0))
    for call, message in (
        (lambda: ours(grey.clone().requires_grad_(), 20.0), "quality: got 'fast'"),
        (lambda: ours(grey[0], 20.0), r"x: got shape \(1, 24, 26\), expected \(B, C, H, W\)"),
        (lambda: ours(NOISY, 20.0), "x: got ndarray, expected a torch tensor"),
        (lambda: ours(grey, -1.0), "sigma: "),
        (lambda: kind(channel_axis=0), "channel_axis: deepinv's tensors are"),
        (lambda: kind("fastest"), "quality: got 'fastest'"),
    ):
        with pytest.raises(InputError, match=message):
            call()
    with pytest.raises(TypeError, match="gamma"):
        ours(grey, 20.0, gamma=1.0)


@pytest.mark.filterwarnings("ignore")  # of deepinv's own
def test_gradients_through_deepinv() -> None:
    torch = pytest.importorskip("torch", reason="torch is optional")
    pytest.importorskip("deepinv", reason="needs deepinv")
    torch_on_one_thread()
    x = torch.from_numpy(NOISY)[None, None].requires_grad_()
    adapter("deepinv").Denoiser("balanced")(x, 20.0).sum().backward()
    alone = torch.from_numpy(NOISY).requires_grad_()
    denoise(alone, 20.0).sum().backward()
    assert torch.allclose(x.grad[0, 0], alone.grad, rtol=1e-9, atol=1e-9)


@pytest.mark.filterwarnings("ignore")  # of deepinv's own
def test_a_loop_of_deepinv() -> None:
    torch = pytest.importorskip("torch", reason="torch is optional")
    deepinv = pytest.importorskip("deepinv", reason="needs deepinv")
    torch_on_one_thread()
    clean = torch.zeros(1, 1, 32, 32)
    clean[..., 8:22, 10:24] = 1
    kernel = deepinv.physics.blur.gaussian_blur(sigma=1.0)
    physics = deepinv.physics.BlurFFT((1, 32, 32), filter=kernel)
    blurred = physics(clean) + 0.02 * torch.from_numpy(RNG.standard_normal((1, 1, 32, 32)).astype(np.float32))
    model = deepinv.optim.optim_builder(
        iteration="HQS", prior=deepinv.optim.PnP(denoiser=adapter("deepinv").Denoiser("fast")),
        data_fidelity=deepinv.optim.L2(), params_algo={"stepsize": 1.0, "g_param": 0.1}, max_iter=5,
    )  # fmt: skip
    with torch.no_grad():
        restored = model(blurred, physics)
    assert float(((restored - clean) ** 2).mean()) < 0.7 * float(((blurred - clean) ** 2).mean())


# ---- PyLops


def test_pylops_operators_of_a_frozen_kernel() -> None:
    module, pylops = adapter("pylops"), pytest.importorskip("pylops", reason="needs pylops")
    size = 30
    k = affinity(Gaussian(1.5), Grid(size))
    average, laplacian = module.Average(k), module.Laplacian(k)
    v = RNG.standard_normal(size)
    assert np.array_equal(average @ v, k.average(v))  # the same bits
    for operator in (average, laplacian):
        assert pylops.utils.dottest(operator, size, size)
    nodes, keys, queries = RNG.standard_normal((3, 12, 2))
    skew = affinity(ExpDotProduct(), Points(nodes), keys, queries=queries)
    one_way = module.Average(skew)
    assert pylops.utils.dottest(one_way, 12, 12)
    features = RNG.standard_normal((12, 1)).astype(np.float32)
    single = module.Average(affinity(Gaussian(1.5), Points(nodes), features))
    assert (single @ np.ones(12, np.float32)).dtype == np.float32
    with pytest.raises(InputError, match="affinity: "):
        module.Average("blur")
    # Their normal equations have our minimizer, and our operators take theirs.
    matrix = RNG.standard_normal((40, size))
    data, sigma = RNG.standard_normal(40), 0.5
    theirs = pylops.MatrixMult(matrix)
    normal = (theirs.H @ theirs + sigma**2 * laplacian) @ EA(k, data, Forward(theirs, size), sigma).minimizer().u
    right = matrix.T @ data
    np.testing.assert_allclose(normal, right, rtol=0, atol=1e-9 * np.linalg.norm(right))


# ---- PyProximal


def test_pyproximal_prior() -> None:
    module, pyproximal = adapter("pyproximal"), pytest.importorskip("pyproximal", reason="needs pyproximal")
    prior = module.Prior(NOISY.shape, weight=2.0, quality="fast")
    assert isinstance(prior, pyproximal.ProxOperator)
    found = prior.prox(NOISY.ravel(), 200.0)
    assert np.array_equal(found.reshape(NOISY.shape), denoise(NOISY, 20.0, quality="fast"))
    assert prior(NOISY.ravel()) == 0.0
    moreau = prior.proxdual(NOISY.ravel(), 0.005)
    np.testing.assert_allclose(moreau, NOISY.ravel() - 0.005 * prior.prox(NOISY.ravel() / 0.005, 200.0), rtol=1e-12)
    x, _ = pyproximal.optimization.primal.ADMM(
        pyproximal.L2(b=NOISY.ravel(), sigma=1 / 400), prior, x0=NOISY.ravel(), tau=200.0, niter=3
    )
    assert np.std(x) < np.std(NOISY)
    for call, message in (
        (lambda: prior.prox(NOISY.ravel(), 0.0), "tau: got 0"),
        (lambda: prior.prox(NOISY.ravel()[1:], 1.0), r"x: got 623 samples, expected 624, those of \(24, 26\)"),
        (lambda: module.Prior((3, 0)), r"dims: got \(3, 0\)"),
        (lambda: module.Prior(5, weight=-1), "weight: got -1"),
        (lambda: module.Prior(5, noise="poisson"), "noise: got an unknown option"),
    ):
        with pytest.raises(InputError, match=message):
            call()


# ---- SCICO


@pytest.mark.filterwarnings("ignore")  # of SCICO's own
def test_scico_prior() -> None:
    module, scico = adapter("scico"), pytest.importorskip("scico", reason="needs scico")
    jax, loss, optimize = (importlib.import_module(name) for name in ("jax", "scico.loss", "scico.optimize"))
    prior = module.Prior("fast")
    assert isinstance(prior, scico.functional.Functional)
    image = jax.numpy.asarray(NOISY.astype(np.float32))
    found = prior.prox(image, 20.0)
    assert np.array_equal(np.asarray(found), denoise(np.asarray(image), 20.0, quality="fast"))
    misfit = loss.SquaredL2Loss(y=image, A=scico.linop.Identity(NOISY.shape))
    solver = optimize.AcceleratedPGM(f=misfit, g=20.0 * prior, L0=1.0, x0=image, maxiter=3)
    assert float(np.std(np.asarray(solver.solve()))) < np.std(NOISY)
    splitting = optimize.ADMM(
        f=misfit, g_list=[20.0 * prior], C_list=[scico.linop.Identity(NOISY.shape)], rho_list=[1.0], x0=image,
        maxiter=3, subproblem_solver=optimize.admm.LinearSubproblemSolver(),
    )  # fmt: skip
    assert float(np.std(np.asarray(splitting.solve()))) < np.std(NOISY)
    assert np.array_equal(jax.jit(lambda v: prior.prox(v, 20.0))(image), found)
    with pytest.raises(ValueError, match="JVP"):
        jax.grad(lambda v: prior.prox(v, 1.0).sum())(image)
    with pytest.raises(InputError, match="v: got dtype int32, expected float32 or float64"):
        prior.prox(np.ones((24, 26), int), 1.0)
    with pytest.raises(InputError, match="rho: got unknown keywords"):
        prior.prox(image, 1.0, rho=2)
