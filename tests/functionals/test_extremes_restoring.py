"""Denoising, p-functionals, studies and attention at extremes, while any floating-point exception is an error."""

from __future__ import annotations

import math
from typing import Any

import mpmath
import numpy as np
import pytest
from extremes import case, columns, exact, floats, signals

import nlflow as nl
from nlflow import attention
from nlflow.denoising.noise import HotPixels, Rician, photon_transfer

pytestmark = [
    pytest.mark.numerical,
    pytest.mark.filterwarnings("ignore::nlflow.NlflowWarning"),
    pytest.mark.usefixtures("strict"),
]

EPS = float(np.finfo(float).eps)
UNITS = (2.0**-990, 2.0**-40, 2.0**40, 2.0**990)
"""Units of a signal: powers of two, so that a scaled signal has the digits of the unscaled one."""


def picture(side: int = 16) -> Any:
    rng = np.random.default_rng(2)
    return np.tile(np.linspace(0, 1, side), (side, 1)) + 0.1 * rng.standard_normal((side, side))


# ---- images


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("quality", ["pixels", "balanced", "best", "total variation"])
@pytest.mark.sampled(4)
def test_denoising_does_not_know_the_unit(quality: str, unit: float) -> None:
    """denoise(c f, c sigma) = c denoise(f, sigma), for greys of 1e-298 and of 1e298."""

    def restored(image: Any, sigma: float | None) -> Any:
        if quality == "total variation":
            return nl.nonlocal_tv(image, sigma)
        return nl.denoise(image, sigma, quality=quality)

    for sigma in (None, 0.1):
        expected = restored(picture(), sigma)
        found = restored(picture() * unit, None if sigma is None else sigma * unit) / unit
        # Logarithms and powers of the unit are rounded; averages are stable, and the steps are of single precision.
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("quality", ["pixels", "balanced", "best"])
@pytest.mark.parametrize("sigma", [0.0, 1e-300, 1e-12, 1e12, 1e300])
def test_noise_of_any_strength(quality: str, sigma: float) -> None:
    """No noise leaves the image; noise that drowns it leaves finite values in a range that the image has."""
    image = picture()
    u = nl.denoise(image, sigma, quality=quality)
    if sigma <= 1e-12:
        np.testing.assert_allclose(u, image, rtol=0, atol=1e-5)
    assert np.all(np.isfinite(u))
    assert image.min() - 1 <= u.min() <= u.max() <= image.max() + 1


@pytest.mark.parametrize("quality", ["pixels", "balanced", "best"])
@pytest.mark.parametrize("shape", [(1,), (2,), (1, 1), (1, 2), (2, 2), (1, 40)], ids=str)
def test_images_of_one_and_two_pixels(shape: tuple[int, ...], quality: str) -> None:
    for dtype in (np.float16, np.float32, np.float64):
        image = np.full(shape, 0.5, dtype=dtype)
        u = nl.denoise(image, 0.1, quality=quality)
        assert u.shape == shape
        np.testing.assert_allclose(u, 0.5, rtol=1e-6)


@pytest.mark.parametrize("unit", [2.0**-1040, *UNITS])
def test_noise_is_estimated_in_any_unit(unit: float) -> None:
    expected = nl.estimate_sigma(picture(32))
    with np.errstate(under="ignore"):
        assert np.isfinite(nl.estimate_noise(picture(32) * unit).model.sigma)
        model = nl.GaussianNoise(unit)
        if unit < 1e150:
            assert np.isfinite(model.sample(np.zeros((4, 4)), rng=0)).all()
        else:
            with pytest.raises(nl.InputError, match="whose square overflows"):
                model.sample(np.zeros((4, 4)))
        assert nl.estimate_sigma(picture(32) * unit) == pytest.approx(expected * unit, rel=1e-9)
    assert nl.estimate_sigma(np.full((32, 32), unit)) <= 4 * EPS * unit


@pytest.mark.parametrize("gain", [1e-12, 1.0, 1e12])
def test_counts_of_any_gain(gain: float) -> None:
    counts = np.random.default_rng(0).poisson(20.0, (16, 16)) * gain
    model = nl.Poisson(gain)
    stable = model.stabilize(counts)
    expected = 2 * np.sqrt(np.round(counts / gain) + 3 / 8)
    np.testing.assert_allclose(stable, expected, rtol=1e-12)
    found = nl.denoise(counts, noise=model, quality="pixels") / gain
    np.testing.assert_allclose(found, nl.denoise(counts / gain, noise=nl.Poisson(1.0), quality="pixels"), rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("unit", [1e-120, 1.0, 1e120])
def test_magnitudes_of_any_unit(unit: float) -> None:
    """Far above the noise the transform is z - sigma^2 / 4z; 0 and what is below it come back as 0."""
    model = Rician(unit)
    z = np.array([0.0, 1e-30, 1e3, 1e12]) * unit
    stable = model.stabilize(z)
    np.testing.assert_allclose(stable[2:] / unit, [1e3 - 1 / 4e3, 1e12], rtol=1e-12)
    assert stable[0] == pytest.approx(stable[1], rel=1e-12)
    np.testing.assert_allclose(model.unstabilize(stable) / unit, [0, 0, 1e3 - 1 / 2e3, 1e12], rtol=1e-9)
    np.testing.assert_allclose(model.mean(z) / unit, [math.sqrt(math.pi / 2)] * 2 + [1e3 + 1 / 2e3, 1e12], rtol=1e-9)


@pytest.mark.parametrize("unit", [2.0**-400, 1.0, 2.0**400])
def test_photon_transfer_and_hot_pixels_in_any_unit(unit: float) -> None:
    light = 20 + 180 * np.indices((12, 24, 24))[2] / 24
    counts = np.random.default_rng(0).poisson(light).astype(float)
    expected, found = photon_transfer(counts, offset=0), photon_transfer(counts * unit, offset=0)
    assert found.gain == pytest.approx(expected.gain * unit, rel=1e-6)
    assert found.gain_error == pytest.approx(expected.gain_error * unit, rel=1e-6)
    counts[:, 5, 7] = 1e4
    missing = HotPixels(0.01).reduce(counts[..., None] * unit).missing
    assert missing is not None
    assert np.argwhere(missing.any(axis=0)).tolist() == [[5, 7]]


@pytest.mark.parametrize("width", [1e-12, 1.0, 1e12])
def test_patches(width: float) -> None:
    """Weights of patches from a node alone to all alike; groups of them too."""
    image = picture(9)
    affinity = nl.affinity(nl.Patch(width, patch_size=3, search_radius=4), nl.Grid((9, 9), boundary="periodic"), image)
    dense = nl.affinity(
        nl.Patch(width, patch_size=3, search_radius=4), nl.Grid((9, 9), boundary="periodic"), image, method="dense"
    )
    u = np.random.default_rng(0).standard_normal((9, 9))
    np.testing.assert_allclose(affinity.average(u), dense.average(u), rtol=0, atol=1e-12)
    expected = {1e-12: u, 1e12: np.full_like(u, u.mean())}.get(width)
    if expected is not None:
        np.testing.assert_allclose(affinity.average(u), expected, rtol=0, atol=1e-12)
    groups = nl.PatchGroups(image * width, patch_size=3, members=4)
    assert groups.distances.min() >= 0
    assert np.all(np.isfinite(groups.distances))


# ---- p-functionals


@pytest.mark.parametrize("p", [1.0, 1.5, 2.0])
@pytest.mark.parametrize("name", ["wide", "two clusters", "duplicates", "two nodes", "compact"])
def test_p_functionals(name: str, p: float) -> None:
    """J_p = 1/(2p) sum w_i w_j K_ij |u_i - u_j|^p to 50 digits, for signals whose powers a float holds."""
    problem = case(name)
    functional = nl.Jp(problem.affinity(), p)
    w, both = exact(problem.w), problem.symmetrized
    for size in (1.0, 1e-90, 1e90, 0.0):
        u = signals(problem.n, float)["usual"] * size
        v = exact(u)
        pairs = [(i, j) for i in range(problem.n) for j in range(problem.n) if i != j]
        terms = [w[i] * w[j] * both[i, j] * abs(v[i] - v[j]) ** p for i, j in pairs]
        expected = mpmath.fsum(terms) / (2 * p)
        error = abs(functional.value(u) - expected)
        # A power is off by p roundings of a difference and one of its logarithm.
        assert error <= 4 * (problem.tolerance() + 400 * EPS) * expected + mpmath.mpf(5e-324) * len(terms)
        if p > 1:
            assert np.all(np.isfinite(functional.gradient(u)))
    if p > 1:
        with pytest.raises(nl.NumericalError, match="overflow"):
            nl.Jp(case("wide").affinity(), p).value(signals(5, float)["huge"])


@pytest.mark.parametrize("fidelity", [1e-12, 1.0, 1e12])
@pytest.mark.parametrize("p", [1.0, 1.5])
def test_p_minimizers(p: float, fidelity: float) -> None:
    """Between f (an infinite fidelity) and its mean (none); the gap that is told bounds how far off it is."""
    f = signals(5, float)["usual"]
    found = nl.Ep(case("wide").affinity(), f, fidelity, p).minimizer()
    assert found.success, found.message
    if fidelity == 1e12:
        np.testing.assert_allclose(found.u, f, rtol=0, atol=1e-9)
    assert f.min() - 1e-6 <= found.u.min() <= found.u.max() <= f.max() + 1e-6
    if fidelity == 1e-12:
        np.testing.assert_allclose(found.u, f.mean(), rtol=0, atol=1e-3)


@pytest.mark.parametrize("t", [0.0, 1e-300, 1e9])
def test_p_flows(t: float) -> None:
    u = signals(5, float)["usual"]
    flow = nl.PFlow(nl.Jp(case("wide").affinity(), 1.5))
    final = nl.solve(flow, u, t=t, integrator=nl.LaggedDiffusivity(max(t, 1e-300))).final
    assert u.min() - 1e-12 <= final.min() <= final.max() <= u.max() + 1e-12
    assert final.mean() == pytest.approx(u.mean(), abs=1e-6)
    if t < 1:
        np.testing.assert_allclose(final, u, rtol=1e-12)


# ---- studies


@pytest.mark.slow
def test_studies_of_the_smallest_problems() -> None:
    """Two nodes, a tiny fidelity and a large one: a table, or the reason why there is none."""
    result = nl.run_study("equilibrium", nodes=3, fidelity=[1e-12, 1.0, 1e12])
    for metric in ("l2", "degree"):
        kept = [row["diversity"] for row in result.rows if row["metric"] == metric]
        assert len(kept) == 3
        assert kept == sorted(kept)
    for row in result.rows:  # what the bounds say, to the tolerance of the iteration over the smallest fidelity
        assert row["low"] * (1 - 1e-6) <= row["diversity"] <= row["high"] * (1 + 1e-6)
    assert nl.run_study("mixing", nodes=2).rows
    assert nl.run_study("stability", nodes=2).rows
    with pytest.raises(nl.InputError, match="nodes: got 1, expected an integer >= 2"):
        nl.run_study("time-order", nodes=1)


# ---- attention


def _metrics(x: Any) -> dict[str, float]:
    y = x[::-1].copy() / 2
    return {
        "mean_cosine": float(attention.mean_cosine(x)),
        "token_similarity": float(attention.token_similarity(x)),
        "hfc_lfc": float(attention.hfc_lfc(x)),
        "participation_rank": float(attention.participation_rank(x)),
        "centred": float(attention.participation_rank(x, centred=True)),
        "gradient_cosine": float(attention.gradient_cosine(x, y, x / 4)),
        "head_redundancy": float(attention.head_redundancy(abs(x), abs(y))),
    }


@pytest.mark.parametrize("unit", [2.0**-990, 2.0**-500, 2.0**500, 2.0**990])
def test_metrics_do_not_know_the_unit(unit: float) -> None:
    """Ratios of squares, which are out of range themselves, have the bits of those of tokens of size 1."""
    x = np.random.default_rng(0).standard_normal((6, 4))
    assert _metrics(x * unit) == _metrics(x)
    torch = pytest.importorskip("torch")
    alike = [attention.mean_cosine, attention.token_similarity, attention.hfc_lfc, attention.participation_rank]
    for metric in alike:
        assert float(metric(torch.from_numpy(x * unit))) == float(metric(torch.from_numpy(x)))


def test_metrics_of_tokens_of_all_sizes() -> None:
    """The cosine does not depend on the lengths of single tokens, from 1e-310 to 1e300."""
    x = np.random.default_rng(0).standard_normal((5, 4))
    lengths = np.array([2.0**-1000, 1.0, 2.0**990, 2.0**-500, 2.0**500])[:, None]
    assert float(attention.mean_cosine(x * lengths)) == float(attention.mean_cosine(x))
    assert float(attention.mean_cosine(np.ones((5, 3)))) == pytest.approx(1, abs=8 * EPS)
    assert float(attention.mean_cosine(np.zeros((5, 3)))) == 0
    assert math.isnan(float(attention.token_similarity(np.zeros((5, 3)))))
    assert math.isnan(float(attention.mean_cosine(np.ones((1, 3)))))
    assert float(attention.token_similarity(np.full((2, 2), 1e300))) == 1


def test_energy_of_tokens() -> None:
    x = np.random.default_rng(0).standard_normal((4, 3))
    uniform = np.broadcast_to(x.mean(axis=0), x.shape)
    squares = np.full(4, (x**2).sum(axis=1).mean())
    expected = float(attention.energy_per_token(x, uniform, squares))
    for unit in (2.0**-500, 2.0**500):
        found = float(attention.energy_per_token(x * unit, uniform * unit, squares * unit**2))
        assert found == expected * unit**2
    with pytest.raises(nl.NumericalError, match="overflow"):
        attention.energy_per_token(x * 1e300, uniform * 1e300, squares)


def test_layers_with_logits_of_ten_thousand() -> None:
    """softmax(q k^T / sqrt(d)) v + lambda~ (v0 - v) of logits of 1e4 and values of 1e30, to 50 digits."""
    torch = pytest.importorskip("torch")
    from nlflow.attention.terms.averages import average
    from nlflow.attention.terms.neutreno import neutreno

    problem = case("queries")
    q, k = problem.table("queries"), problem.table()
    d = q.shape[1]
    v = np.random.default_rng(0).standard_normal((problem.n, 3)) * 1e30
    kernel = nl.ExpDotProduct()  # 1/sqrt(d), as layers have it
    reference = floats(type(problem)("", kernel, k, q).transitions() * columns(v))
    tensors = [torch.from_numpy(a)[None, None] for a in (q, k, v)]
    size = float(np.linalg.norm(q, axis=1).max() * np.linalg.norm(k, axis=1).max()) / math.sqrt(d)
    allowed = (2 * (d + 2) * size + problem.n + 8) * EPS * np.abs(v).max()
    for found in (average(*tensors)[0], average(*tensors, fused=True)[0]):
        assert np.abs(found[0, 0].numpy() - reference).max() <= allowed
    found = neutreno(average(*tensors)[0], tensors[2], 0 * tensors[2], 0.6)[0, 0].numpy()
    assert np.abs(found - (reference - 0.6 * v)).max() <= 2 * allowed
    for name in ("gaussian", "sigmoid", "softplus", "linear", "symmetric"):
        result, weights = average(*tensors, name)
        assert bool(torch.isfinite(result).all())
        assert np.abs(weights.sum(-1).numpy() - 1).max() <= 4 * problem.n * EPS


def test_modules_of_huge_and_tiny_tokens() -> None:
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    tokens = torch.randn(1, 5, 8)
    scaling = attention.FeatScale(8)
    layer = attention.NeutrenoAttention(8, 2, fidelity=0.6).eval()
    projection = attention.SignedProjection(8, generator=torch.Generator().manual_seed(0))
    for unit in (1e-30, 1.0, 1e12):
        x = tokens * unit
        assert torch.equal(scaling(x), x)  # at its initial values it changes nothing
        first = layer(x)
        first = first[0] if isinstance(first, tuple) else first
        assert bool(torch.isfinite(first).all())
        assert bool(torch.isfinite(projection(x)).all())
