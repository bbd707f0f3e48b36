"""Groups of patches whose noise is correlated: compiled and readable steps against NumPy, strips, threads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numba
import numpy as np
import pytest
from scipy import signal
from scipy.fft import dctn

import nlflow as nl
from nlflow.denoising import groupwise
from nlflow.denoising.groupwise import PRESETS
from nlflow.denoising.noise import GaussianNoise
from nlflow.denoising.noise.spectra import correlation
from nlflow.denoising.patches import (
    CompiledFilter,
    GroupFlow,
    Grouping,
    Images,
    PlainFilter,
    RelaxedSemiImplicit,
    Stage,
)
from nlflow.denoising.patches.filters import LEAST, Correlation
from tests.pictures import SMALL, SMALL_IMAGE, SMALL_SIGNAL, Floats, grouped, signal_in, steps_and_waves, waves

pytestmark = pytest.mark.numerical

# Of one step, relative to the largest value, as for white noise. What single precision may lose in a group is bounded
# by `ERROR`; correlated noise is worse conditioned, so most groups are filtered in double precision.
PRECISIONS = [np.float64, np.float32]
BOX, SLANTED = np.ones((3, 3)), np.eye(3) + 0.4 * np.eye(3, k=1)
LINE = np.array([[1.0, 2, 1]])


def of_kernel(kernel: Floats) -> Floats:
    """Correlation function of white noise after a convolution, by SciPy."""
    full = signal.correlate(kernel, kernel, mode="full", method="direct")
    return np.asarray(full / full.max())


def coloured(shape: tuple[int, ...], kernels: list[Floats], seed: int = 0) -> Floats:
    """Noise (C, H, W) of variance 1 with the correlations of kernels."""
    white = np.random.default_rng(seed).normal(size=(len(kernels), *shape))
    made = [signal.convolve2d(w, k, "same", "wrap") for w, k in zip(white, kernels, strict=True)]
    return np.stack([z / np.sqrt(np.sum(k**2)) for z, k in zip(made, kernels, strict=True)])


class Case:
    """Planes with noise, its correlation function, its variance, and how patches are grouped."""

    def __init__(self, kind: str, dtype: Any = np.float64) -> None:
        shape, kernels, self.grouping = (24, 27), [BOX], SMALL_IMAGE
        if kind == "planes":
            kernels = [BOX, SLANTED, np.ones((1, 1))]
        elif kind == "signal":
            shape, kernels, self.grouping = (1, 90), [LINE], SMALL_SIGNAL
        elif kind == "blurred":  # eigenvalues of R far below LEAST
            x = np.arange(-4, 5)
            kernels = [np.exp(-np.add.outer(x**2, x**2) / 4.5)]
        clean = waves(*shape) if shape[0] > 1 else steps_and_waves(shape[1])[None]
        functions = [of_kernel(k) for k in kernels]
        size = max(f.shape[1] for f in functions)
        self.function = np.stack([f if shape[0] == 1 else np.pad(f, (size - len(f)) // 2) for f in functions])
        self.variance = np.ones((len(kernels), 1, 1), dtype)
        if kind == "map":
            self.variance = np.broadcast_to(np.linspace(0.5, 1.5, shape[1]), (1, *shape)).astype(dtype).copy()
        factor = np.sqrt(np.broadcast_to(self.variance, (len(kernels), *shape)).astype(float))
        self.clean = np.stack([6 * (1 + c) * clean for c in range(len(kernels))])
        self.f = (self.clean + factor * coloured(shape, kernels)).astype(dtype)

    def images(self, stage: Stage) -> Images:
        """State, pilot and input, before anything was done or on the way."""
        if not stage.running:
            return Images(self.f, self.f, self.f, self.variance, self.function)
        pilot = (0.2 * self.f + 0.8 * self.clean).astype(self.f.dtype)
        state = (0.6 * self.f + 0.4 * pilot).astype(self.f.dtype)
        return Images(state, pilot, self.f, self.variance, self.function)


STAGES = {
    "first": Stage(shrink=1.4, running=False),
    "along cosines": Stage(shrink=1.2, running=False, cosine=True),
    "along cosines of another pilot": Stage(leave=0.4, shrink=1.2, cosine=True),
    "later": Stage(leave=0.4, factor=0.8),
    "last": Stage(leave=0.0, factor=0.8),
}
KINDS = ["grey", "planes", "signal", "map", "blurred"]


# ---- matrices


def matrix_of(function: Floats, patch: tuple[int, int]) -> Floats:
    """R of a patch, sample by sample, its eigenvalues at least `LEAST`."""
    places = [(y, x) for y in range(patch[0]) for x in range(patch[1])]
    reach = [n // 2 for n in function.shape]
    result = np.zeros((len(places), len(places)))
    for i, (y, x) in enumerate(places):
        for j, (v, w) in enumerate(places):
            if abs(y - v) <= reach[0] and abs(x - w) <= reach[1]:
                result[i, j] = function[y - v + reach[0], x - w + reach[1]]
    values, vectors = np.linalg.eigh(result)
    return np.asarray((vectors * np.maximum(values, LEAST)) @ vectors.T)


@pytest.mark.parametrize("kind", KINDS)
def test_the_matrices_of_a_patch(kind: str) -> None:
    case = Case(kind)
    patch = (1, 5) if kind == "signal" else (4, 3)
    found = Correlation.of(case.function, patch, len(case.f))
    for c, function in enumerate(case.function):
        expected = matrix_of(function, patch)
        np.testing.assert_allclose(found.matrices[c], expected, atol=1e-13)
        np.testing.assert_allclose(found.roots[c] @ found.roots[c], expected, atol=1e-13)
        size = len(expected)
        np.testing.assert_allclose(found.whitening[c] @ expected @ found.whitening[c], np.eye(size), atol=1e-11)
        np.testing.assert_allclose(found.extremes[c], np.linalg.eigvalsh(expected)[[0, -1]], rtol=1e-9)
    none = Correlation.of(None, patch, 2)
    assert none.matrices.shape == (2, 0, 0)
    np.testing.assert_array_equal(none.extremes, 1)


def test_the_matrix_of_a_patch_is_the_covariance_of_samples() -> None:
    noise = coloured((400, 400), [SLANTED])[0]
    patches = np.lib.stride_tricks.sliding_window_view(noise, (3, 3))[::7, ::7].reshape(-1, 9)
    found = Correlation.of(of_kernel(SLANTED)[None], (3, 3), 1).matrices[0]
    # Patches 7 apart share no noise: each entry has the variance (1 + r^2)/n.
    assert np.all(np.abs(np.cov(patches.T, bias=True) - found) < 5 * np.sqrt(2 / len(patches)))


# ---- one step


def reference(groups: Any, images: Images, stage: Stage) -> tuple[Floats, Floats, float]:
    """A step by its definition, z - N (C + N)^-1 (z - m) with correlations in N, and the largest condition of C + N."""
    state, pilot, observed = (np.asarray(x, np.float64) for x in (images.state, images.pilot, images.observed))
    variance = np.broadcast_to(np.asarray(images.variance, np.float64), state.shape)
    (_, ph, pw), width = groups.lattice.patch, state.shape[2]
    sums, condition = np.zeros((3, *state.shape)), 1.0
    for c in range(len(state)):
        matrix = matrix_of(images.correlation[c], (ph, pw))
        for members, count in zip(groups.members, groups.counts, strict=True):
            rows = (members[:count] // width)[:, None, None] + np.arange(ph)[:, None]
            columns = (members[:count] % width)[:, None, None] + np.arange(pw)
            z, source, seen, level = (
                x[c, rows, columns].reshape(count, -1) for x in (state, pilot, observed, variance)
            )
            level = level.mean(axis=0)
            rest = max(1 - np.std(seen - z) / np.sqrt(level.mean()), stage.leave) if stage.running else 1.0
            N = matrix * np.sqrt(np.outer(level, level)) * rest**2 * stage.factor
            C = np.cov(source.T, bias=True)
            if stage.cosine:  # of the tokens in which noise is white
                levels, turned = np.linalg.eigh(matrix)
                half = np.sqrt(rest**2 * stage.factor * level)[:, None] * ((turned * np.sqrt(levels)) @ turned.T)
                basis = dctn(np.eye(ph * pw).reshape(-1, ph, pw), axes=(1, 2), norm="ortho").reshape(ph * pw, -1)
                along = np.linalg.inv(half) @ (source - source.mean(axis=0)).T
                values = np.maximum(np.square(basis.T @ along).mean(axis=1) - stage.shrink, 0)
                C = half @ (basis * values) @ basis.T @ half.T
            elif stage.shrink:
                half = np.linalg.cholesky(N)  # any root of N gives the same eigenvalues
                inner = np.linalg.solve(half, np.linalg.solve(half, C).T)
                values, vectors = np.linalg.eigh((inner + inner.T) / 2)
                C = half @ (vectors * signal_in(values, stage.shrink)) @ vectors.T @ half.T
            condition = max(condition, float(np.linalg.cond(C + N)))
            change = (N @ np.linalg.solve(C + N, (z - z.mean(axis=0)).T)).T
            # Variance of a sample of the estimate: that of the filter, and that of the mean.
            weight = 1 / (np.diag(N - N @ np.linalg.solve(C + N, N)) * (1 - 1 / count) + np.diag(N) / count)
            kinds = (weight * (z - change), weight * (z - (1 - stage.leave / rest) * change), weight + 0 * z)
            for target, kind in zip(sums, kinds, strict=True):
                np.add.at(target[c], (rows, columns), kind.reshape(-1, ph, pw))
    return sums[0] / sums[2], sums[1] / sums[2], condition


@pytest.mark.parametrize("dtype", PRECISIONS)
@pytest.mark.parametrize("name", STAGES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sampled(6)
def test_a_step_is_that_of_its_definition(kind: str, name: str, dtype: Any) -> None:
    """The fast inverse of C + N loses the square of its condition, the readable filter the condition itself.

    In single precision it is taken only where that is harmless.
    """
    case, stage = Case(kind, dtype), STAGES[name]
    images = case.images(stage)
    groups = grouped(images.state, case.grouping)
    *expected, condition = reference(groups, images, stage)
    for filter, power in ((CompiledFilter(), 2), (PlainFilter(), 1)):
        tolerance = 1e-4 if dtype == np.float32 else np.finfo(np.float64).eps * condition**power
        for mine, its in zip(filter.step(groups, images, stage), expected, strict=True):
            assert mine.dtype == dtype
            np.testing.assert_allclose(mine, its, atol=tolerance * np.abs(its).max(), rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_compiled_and_plain_flows_agree(kind: str) -> None:
    case = Case(kind)
    observed = np.moveaxis(case.f, 0, -1)
    observed = observed[0] if kind == "signal" else observed
    variance = np.moveaxis(np.broadcast_to(case.variance, case.f.shape), 0, -1).reshape(observed.shape)
    paths: list[list[Floats]] = []
    for filter in (CompiledFilter(), PlainFilter()):
        paths.append([])
        made = GroupFlow(
            observed, case.grouping, variance=variance, correlation=case.function, channels=True, filter=filter
        )
        keep = nl.Callback(lambda t, u, flow: paths[-1].append(u))
        nl.solve(made, t=3, integrator=RelaxedSemiImplicit(2), trackers=[keep], energies=False)
    assert len(paths[0]) == 4
    for mine, its in zip(*paths, strict=True):
        np.testing.assert_allclose(mine, its, atol=1e-8)  # as for white noise: rounding decides about few groups


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_noise_that_is_not_correlated_is_white(dtype: Any) -> None:
    """R = I gives what no correlation gives: to the rounding of a product with I and of another order of sums."""
    case, identity = Case("grey", dtype), np.pad(np.ones((1, 1, 1)), ((0, 0), (2, 2), (2, 2)))
    for stage in STAGES.values():
        images = case.images(stage)
        groups = grouped(images.state, case.grouping)
        for filter in (CompiledFilter(), PlainFilter()):
            results = [
                filter.step(groups, Images(images.state, images.pilot, images.observed, images.variance, given), stage)
                for given in (None, identity)
            ]
            for mine, its in zip(*results, strict=True):
                np.testing.assert_allclose(mine, its, atol=1e-4 if dtype == np.float32 else 1e-12)


def test_less_noise_is_left_where_its_correlation_is_known() -> None:
    """Blurred noise counts as structure without it."""
    case = Case("grey")
    errors = []
    for given in (None, case.function):
        made = GroupFlow(case.f[0], Grouping(7, 40, 8, 3), correlation=given)
        u = nl.solve(made, t=3, integrator=RelaxedSemiImplicit(2), energies=False).final
        errors.append(float(np.sqrt(np.mean((u - case.clean[0]) ** 2))))
    assert errors[1] < errors[0] < 1


# ---- energies


def test_energies_are_those_of_e_on_whitened_tokens() -> None:
    case = Case("grey")
    f = case.f[0]
    tokens = nl.PatchGroups(f, patch_size=4, search_radius=4, members=10, step=3)
    own = GroupFlow(f, case.grouping, correlation=case.function, shrink=0.0)
    whitening = np.linalg.inv(np.linalg.cholesky(matrix_of(case.function[0], (4, 4)))).T  # any root of R^-1
    z = tokens.lift(f) @ whitening
    centred = z - z.mean(axis=1, keepdims=True)
    matrices = np.swapaxes(centred, 1, 2) @ centred / z.shape[1]
    expected = nl.E(tokens.affinity(), z, matrices[:, None], measure="degree").value(z)
    assert own.energy(f) == pytest.approx(expected, rel=1e-9)
    assert expected == pytest.approx(nl.J(tokens.affinity()).value(z), rel=1e-12)  # nothing is drawn yet
    solution = nl.solve(own, t=3, integrator=RelaxedSemiImplicit(2), trackers=[nl.Energy()])
    assert np.all(np.diff(solution.records["energy"]["value"]) < 0)


# ---- what is refused


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (np.ones((2, 3, 3)), r"correlation: got shape \(2, 3, 3\), expected \(1, 2a\+1, 2b\+1\)"),
        (np.ones((4, 3)), r"correlation: got shape \(4, 3\)"),
        (np.ones(3), "correlation: got 1 dimension"),
        (np.zeros((3, 3)), "correlation: got values that are no correlation, expected 1 in the middle"),
        (np.pad([[1.0]], 1, constant_values=1.5), "none beyond 1"),
        (np.array([[0, 0.5, 0], [0, 1, 0], [0, 0, 0]]), "the same for an offset and its opposite"),
        (np.full((3, 3), np.nan), "correlation: got 9 NaN"),
        ("box", "correlation: "),
    ],
)
def test_what_is_no_correlation_is_refused(given: Any, message: str) -> None:
    with pytest.raises(nl.InputError, match=message):
        GroupFlow(Case("grey").f[0], SMALL_IMAGE, correlation=given)


def test_a_signal_has_correlations_along_itself_alone() -> None:
    with pytest.raises(nl.InputError, match="a signal has a = 0"):
        GroupFlow(steps_and_waves(60), SMALL_SIGNAL, correlation=of_kernel(BOX))
    GroupFlow(steps_and_waves(60), SMALL_SIGNAL, correlation=of_kernel(LINE))


# ---- through denoise: strips, threads, precision


MODELS = {
    "grey": GaussianNoise.from_kernel(BOX),
    "camera": GaussianNoise(
        [1.0, 1.4, 1.2], GaussianNoise.from_kernel(np.ones((2, 2))).spectrum, [-4, 0, 6], [0.6, 1, 1.4], opponent=True,
        compressed=0.5,
    ),
    "signal": GaussianNoise.from_kernel(np.ones(6)),
}  # fmt: skip


def noisy_input(kind: str) -> tuple[Floats, dict[str, Any]]:
    clean = 4 * (steps_and_waves(5200) if kind == "signal" else waves(420, 52))
    if kind == "camera":
        clean = np.stack([clean, 0.8 * clean, clean + 1], axis=-1)
    axis = -1 if kind == "camera" else None
    model = MODELS[kind]
    return model.sample(clean, rng=0, channel_axis=axis), {"noise": model, "channel_axis": axis, "return_info": True}


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.sampled(1)
def test_strips_have_the_bits_of_the_whole(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PRESETS, "balanced", SMALL)
    image, options = noisy_input(kind)
    expected, info = nl.denoise(image, **options)
    result, cut = nl.denoise(image, max_memory=0.7 * info.memory_bytes, **options)
    np.testing.assert_array_equal(result, expected)
    assert info.tiles == 1
    assert cut.tiles >= 2
    assert cut.memory_bytes <= 0.7 * info.memory_bytes
    assert info.parameters["coarser_images"] >= 1


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.sampled(1)
def test_any_number_of_threads_gives_the_same_bits(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PRESETS, "balanced", SMALL)
    image, options = noisy_input(kind)
    before, results = numba.get_num_threads(), []
    try:
        for threads in (1, numba.config.NUMBA_NUM_THREADS):
            numba.set_num_threads(threads)
            results.append(nl.denoise(image, **options)[0])
    finally:
        numba.set_num_threads(before)
    np.testing.assert_array_equal(*results)


def test_noise_of_compressed_photographs_is_met_as_white_noise_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The result is a mean of two flows: that of the spectrum, with a step less, and that of white noise."""
    monkeypatch.setitem(PRESETS, "balanced", SMALL)
    share, stronger = groupwise._AS_WHITE, groupwise._STRONGER
    spectrum = GaussianNoise.from_kernel(np.ones((2, 2))).spectrum
    noise = GaussianNoise(1.0, spectrum, opponent=True, compressed=1e-12)
    clean = 4 * waves(60, 52)
    image = noise.sample(np.stack([clean, 0.8 * clean, clean + 1], axis=-1), rng=0, channel_axis=-1)
    result, info = nl.denoise(image, noise=noise, channel_axis=-1, return_info=True)
    first = {"cosine": True, "shrink": 1.0}  # of compressed photographs
    monkeypatch.setitem(PRESETS, "balanced", replace(SMALL, steps=SMALL.steps - 1, **first))
    coloured = nl.denoise(image, noise=replace(noise, compressed=0.0), channel_axis=-1)
    monkeypatch.setitem(PRESETS, "balanced", replace(SMALL, steps=groupwise._WHITE_STEPS))
    white = nl.denoise(image, stronger, channel_axis=-1)
    assert info.parameters["as_white"] == share
    np.testing.assert_allclose(result, coloured + share * (white - coloured), atol=1e-6)


def test_the_result_scales_with_the_input(monkeypatch: pytest.MonkeyPatch) -> None:
    """Powers of two change no bit; so do not the units in which the noise is told."""
    monkeypatch.setitem(PRESETS, "balanced", SMALL)
    image, options = noisy_input("grey")
    usual, _ = nl.denoise(image, **options)
    larger, _ = nl.denoise(64 * image, **{**options, "noise": MODELS["grey"].scaled(64)})
    np.testing.assert_array_equal(larger, 64 * usual)


def test_correlation_reaches_the_flow_as_the_model_has_it() -> None:
    model = GaussianNoise.from_kernel(SLANTED)
    found = correlation(model.powers(1, 2))[0]
    np.testing.assert_allclose(found[29:34, 29:34], of_kernel(SLANTED), atol=1e-13)
