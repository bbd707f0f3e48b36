"""Groups of alike patches: where they lie, who belongs to them, and tokens out of an image and back."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

import nlflow as nl
from nlflow.denoising.patches.groups import fewest_candidates
from nlflow.denoising.patches.lattice import reference_positions
from nlflow.functionals.fidelity import MatrixFidelity
from validation.claims import nonlocal_bayes
from validation.harness import Context

pytestmark = pytest.mark.numerical

Floats = NDArray[np.float64]


def normal(shape: Any, seed: int = 1) -> Floats:
    return np.asarray(np.random.default_rng(seed).normal(size=shape))


# --- where patches of reference lie ----------------------------------------------------------------------------------


@given(st.integers(0, 60), st.integers(1, 12))
def test_references_look_the_same_from_both_ends(last: int, step: int) -> None:
    places = reference_positions(last, step)
    assert places.tolist() == sorted(set((last - places).tolist()))
    assert places[0] == 0
    assert np.all(np.diff(places) <= step)
    multiples = {k * step for k in range(last // (2 * step) + 1)}
    beside = {last // 2, last - last // 2}
    assert multiples | {last - place for place in multiples} <= set(places.tolist())
    assert set(places.tolist()) <= multiples | {last - place for place in multiples} | beside


@pytest.mark.parametrize(
    ("last", "step", "expected"),
    [
        (0, 3, [0]),
        (2, 3, [0, 2]),
        (6, 3, [0, 3, 6]),
        (7, 3, [0, 3, 4, 7]),
        (9, 4, [0, 4, 5, 9]),
        (10, 4, [0, 4, 6, 10]),
        (14, 4, [0, 4, 7, 10, 14]),  # the middle of a gap of 6
        (15, 4, [0, 4, 7, 8, 11, 15]),
    ],
)
def test_references(last: int, step: int, expected: list[int]) -> None:
    assert reference_positions(last, step).tolist() == expected


# --- who belongs to a group ------------------------------------------------------------------------------------------

SHAPES: dict[str, tuple[tuple[int, ...], int | None, dict[str, int]]] = {
    "image": ((13, 11), None, {"patch_size": 4, "search_radius": 3, "members": 7, "step": 3}),
    "colour": ((9, 10, 3), -1, {"patch_size": 3, "search_radius": 4, "members": 12, "step": 2}),
    "channels first": ((2, 8, 9), 0, {"patch_size": 3, "search_radius": 2, "members": 5, "step": 3}),
    "signal": ((40,), None, {"patch_size": 6, "search_radius": 9, "members": 8, "step": 4}),
    "volume": ((7, 8, 9), None, {"patch_size": 3, "search_radius": 2, "members": 6, "step": 3}),
    "volume with channels": ((5, 6, 7, 2), -1, {"patch_size": 2, "search_radius": 2, "members": 5, "step": 2}),
    "signal with channels": ((30, 2), 1, {"patch_size": 5, "search_radius": 20, "members": 9, "step": 5}),
    "as small as a patch": ((4, 4), None, {"patch_size": 4, "search_radius": 2, "members": 1, "step": 1}),
    "patches of one sample": ((6, 7), None, {"patch_size": 1, "search_radius": 2, "members": 4, "step": 1}),
}


def channels_last(image: Floats, axis: int | None) -> Floats:
    return image[..., None] if axis is None else np.moveaxis(image, axis, -1)


@pytest.mark.parametrize("name", SHAPES)
def test_members_are_the_nearest_in_the_window(name: str) -> None:
    shape, axis, options = SHAPES[name]
    image = normal(shape)
    groups = nl.PatchGroups(image, channel_axis=axis, **options)
    plain, p, r = channels_last(image, axis), options["patch_size"], options["search_radius"]
    last = [n - p for n in plain.shape[:-1]]
    references = list(itertools.product(*(reference_positions(end, options["step"]).tolist() for end in last)))
    assert [tuple(place) for place in groups.positions[:, 0].tolist()] == references

    def patch(place: tuple[int, ...]) -> Floats:
        return plain[tuple(slice(i, i + p) for i in place)]

    for own, members, distances in zip(references, groups.positions.tolist(), groups.distances, strict=True):
        window = itertools.product(*(range(max(i - r, 0), min(i + r, e) + 1) for i, e in zip(own, last, strict=True)))
        ranked = sorted((((patch(place) - patch(own)) ** 2).sum(), place) for place in window)[: options["members"]]
        assert [tuple(place) for place in members] == [place for _, place in ranked]
        np.testing.assert_allclose(distances, [distance for distance, _ in ranked], rtol=1e-12)
    assert np.all(groups.distances[:, 0] == 0)
    assert groups.shape == (*groups.distances.shape, plain.shape[-1] * p ** len(last))
    assert np.prod(groups.patch_shape) == groups.shape[2]
    assert f"{len(references)} groups of {options['members']} patches" in repr(groups)


def test_of_equal_patches_the_reference_comes_first_and_then_the_nearest_in_space() -> None:
    groups = nl.PatchGroups(np.zeros((7, 7)), patch_size=3, search_radius=1, members=4, step=2)
    centre = groups.positions[groups.positions[:, 0].tolist().index([2, 2])]
    assert centre.tolist() == [[2, 2], [1, 2], [2, 1], [2, 3]]
    assert np.all(groups.distances == 0)


@pytest.mark.parametrize("change", [lambda x: x[::-1], lambda x: x[:, ::-1], lambda x: x.T, lambda x: 1e6 * x - 3e5])
def test_groups_move_with_the_image(change: Any) -> None:
    """Flips, transposition, scale and shift: the same patches, so that what is done to them is the same as well."""
    image = normal((12, 15))
    options: dict[str, Any] = {"patch_size": 4, "search_radius": 3, "members": 8, "step": 3}
    here, there = (nl.PatchGroups(x, **options) for x in (image, change(image)))
    averages = [g.aggregate(g.affinity().average(g.lift(x))) for g, x in ((here, image), (there, change(image)))]
    np.testing.assert_allclose(averages[1], change(averages[0]), rtol=1e-12, atol=1e-12 * np.abs(averages[1]).max())


def test_small_windows_make_small_groups() -> None:
    with pytest.warns(nl.NlflowWarning, match="members: 50 patches do not lie within search_radius=2 .* have 9"):
        groups = nl.PatchGroups(normal((12, 12)), patch_size=4, search_radius=2, members=50, step=4)
    assert groups.shape[1] == 9
    assert fewest_candidates(np.array([[3], [0]]), (3,), 9) == 4


def test_members_lie_within_twelve_samples_unless_told() -> None:
    """64 of the 625 patches around each, none alike: some are as far as they may be."""
    positions = nl.PatchGroups(normal((48, 48)), step=8).positions
    assert positions.shape[1] == 64
    assert np.abs(positions - positions[:, :1]).max() == 12


# --- tokens ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("name", SHAPES)
def test_tokens_are_patches_and_come_back(name: str, dtype: Any) -> None:
    shape, axis, options = SHAPES[name]
    guide, image = normal(shape), normal(shape, 2).astype(dtype)
    groups = nl.PatchGroups(guide, channel_axis=axis, **options)
    tokens = groups.lift(image)
    assert tokens.shape == groups.shape
    assert tokens.dtype == dtype
    plain, p = channels_last(image, axis), options["patch_size"]
    for g, i in ((0, 0), (len(tokens) // 2, options["members"] - 1), (-1, 0)):
        place = tuple(slice(k, k + p) for k in groups.positions[g, i])
        np.testing.assert_array_equal(tokens[g, i], plain[place].ravel())
    result = groups.aggregate(tokens)
    assert result.dtype == dtype
    assert result.shape == image.shape
    tolerance = 1e-14 if dtype == np.float64 else 1e-6
    np.testing.assert_allclose(result, image, rtol=0, atol=tolerance)
    weights = np.random.default_rng(3).uniform(0.1, 2, groups.shape)
    np.testing.assert_allclose(groups.aggregate(tokens, weights), image, rtol=0, atol=tolerance)


@pytest.mark.parametrize("which", [None, "token", "component", "group"])
@pytest.mark.parametrize("name", ["image", "colour", "signal"])
def test_aggregation_is_a_weighted_mean(name: str, which: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nlflow.denoising.patches.groups._BLOCK", 300)
    shape, axis, options = SHAPES[name]
    groups = nl.PatchGroups(normal(shape), channel_axis=axis, **options)
    tokens = normal(groups.shape, 2)
    sizes = {"token": groups.shape[:2], "component": groups.shape, "group": (groups.shape[0], 1, 1)}
    weights = None if which is None else np.random.default_rng(3).uniform(0.1, 2, sizes[which])
    full = np.ones(groups.shape) if weights is None else weights[..., None] if which == "token" else weights
    full = np.broadcast_to(full, groups.shape)
    sums, masses = np.zeros((2, *channels_last(np.empty(shape), axis).shape))
    for g, i in np.ndindex(groups.shape[:2]):
        place = tuple(slice(k, k + groups.patch_size) for k in groups.positions[g, i])
        sums[place] += (full[g, i] * tokens[g, i]).reshape(sums[place].shape)
        masses[place] += full[g, i].reshape(sums[place].shape)
    result = channels_last(groups.aggregate(tokens, weights), axis)
    np.testing.assert_allclose(result, sums / masses, rtol=0, atol=1e-13)


def test_tokens_without_weight_do_not_count() -> None:
    groups = nl.PatchGroups(normal((9, 9)), patch_size=3, search_radius=2, members=4, step=2)
    image = normal((9, 9), 2)
    tokens, weights = groups.lift(image), np.ones(groups.shape[:2])
    tokens[:, 1:], weights[:, 1:] = 1e9, 0
    np.testing.assert_allclose(groups.aggregate(tokens, weights), image, rtol=0, atol=1e-14)
    with pytest.raises(nl.InputError, match=r"weights: got 0 for every token at 81 sample\(s\)"):
        groups.aggregate(tokens, 0 * weights)


def test_other_channels_than_the_guide() -> None:
    """Groups found on brightness serve colours."""
    colour = normal((10, 10, 3))
    groups = nl.PatchGroups(
        colour.mean(axis=-1, keepdims=True), patch_size=3, search_radius=3, members=6, step=3, channel_axis=-1
    )
    tokens = groups.lift(colour)
    assert tokens.shape == (*groups.shape[:2], 27)
    np.testing.assert_allclose(groups.aggregate(tokens), colour, rtol=0, atol=1e-14)
    assert groups.covariance(colour).shape == (groups.shape[0], 27, 27)


def test_integers_do_not_wrap() -> None:
    image = np.random.default_rng(0).integers(0, 2, (10, 10)).astype(np.uint8) * 255
    options: dict[str, Any] = {"patch_size": 3, "search_radius": 3, "members": 9, "step": 2}
    groups, plain = nl.PatchGroups(image, **options), nl.PatchGroups(image.astype(float), **options)
    np.testing.assert_array_equal(groups.positions, plain.positions)
    np.testing.assert_array_equal(groups.distances, plain.distances)
    assert groups.lift(image).max() == 255


# --- the affinity and the covariance ---------------------------------------------------------------------------------


def test_affinity_is_the_mean_of_the_group() -> None:
    groups = nl.PatchGroups(normal((12, 12)), patch_size=4, search_radius=3, members=10, step=4)
    tokens = groups.lift(normal((12, 12), 2))
    average = groups.affinity().average(tokens)
    np.testing.assert_allclose(average, np.broadcast_to(tokens.mean(axis=1, keepdims=True), tokens.shape), atol=1e-14)


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_covariance(dtype: Any) -> None:
    image = 20 * normal((12, 12)).astype(dtype) + dtype(500)
    groups = nl.PatchGroups(image, patch_size=3, search_radius=3, members=14, step=3)
    tokens = groups.lift(image).astype(float)
    found = groups.covariance(image)
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, np.swapaxes(found, 1, 2))
    expected = np.array([np.cov(group.T, bias=True) for group in tokens])
    np.testing.assert_allclose(found, expected, rtol=0, atol=(1e-10 if dtype == np.float64 else 1e-4))
    # P(u u^T) - Pu Pu^T by the affinity itself: the second moments are averages as well.
    outer = (tokens[..., :, None] * tokens[..., None, :]).reshape(*tokens.shape[:2], -1)
    mean = groups.affinity().average(tokens)
    moments = groups.affinity().average(outer).reshape(*outer.shape[:2], 9, 9) - mean[..., :, None] * mean[..., None, :]
    np.testing.assert_allclose(moments[:, 0], expected, rtol=0, atol=1e-6)
    removed = groups.covariance(image, noise_variance=300.0)
    np.testing.assert_allclose(
        np.linalg.eigvalsh(removed.astype(float)), np.maximum(np.linalg.eigvalsh(expected) - 300, 0),
        atol=1e-9 if dtype == np.float64 else 1e-3,
    )  # fmt: skip
    one = nl.PatchGroups(image, patch_size=3, search_radius=3, members=1, step=3)
    assert not one.covariance(image).any()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_a_step_is_the_filter_of_the_group(dtype: Any) -> None:
    """Pu + C (C + sigma^2 I)^-1 (f - Pu), u being the noisy tokens or the running estimate's; it lowers E."""
    sigma = 0.5
    clean = np.add.outer(np.sin(np.arange(14) / 3), np.arange(14) > 6)
    noisy = (clean + sigma * normal((14, 14))).astype(dtype)
    estimate = clean.astype(dtype)
    groups = nl.PatchGroups(estimate, patch_size=3, search_radius=4, members=15, step=2)
    f, covariance = groups.lift(noisy), groups.covariance(estimate)
    energy = nl.E(groups.affinity(), f, covariance[:, None] / dtype(sigma**2), measure="degree")
    for start in (f, groups.lift(estimate)):
        stage = nl.solve(nl.GradientFlow(energy, "degree"), start, t=1, integrator=nl.SemiImplicit())
        mean = start.mean(axis=1, keepdims=True)
        inverse = np.linalg.solve(covariance + sigma**2 * np.eye(9), np.swapaxes(f - mean, 1, 2))
        expected = mean + np.swapaxes(covariance @ inverse, 1, 2)
        assert stage.final.dtype == dtype
        tolerance = 1e-12 if dtype == np.float64 else 1e-5
        np.testing.assert_allclose(stage.final, expected, rtol=0, atol=tolerance)
        moved = stage.final - start
        drop = float(
            np.sum(moved * (moved + energy.fidelity_in("degree").times(moved) + groups.affinity().average(moved)))
        )
        np.testing.assert_allclose(stage.energy[0] - stage.energy[1], drop, rtol=1e-10 if dtype == np.float64 else 1e-3)
        assert drop > 0
        if start is f:
            np.testing.assert_allclose(energy.minimizer().u, stage.final, rtol=0, atol=tolerance)


# --- what is refused -------------------------------------------------------------------------------------------------

IMAGE = normal((12, 12))
SMALL: dict[str, Any] = {"patch_size": 3, "search_radius": 2, "members": 4, "step": 2}
GROUPS = nl.PatchGroups(IMAGE, **SMALL)
TOKENS = GROUPS.lift(IMAGE)
REFUSED: dict[str, tuple[Any, str]] = {
    "too small": (lambda: nl.PatchGroups(IMAGE[:2], **SMALL), "image: got 2 x 12 samples, expected at least patch"),
    "NaN": (lambda: nl.PatchGroups(np.full((12, 12), np.nan), **SMALL), "image: got 144 NaN or infinite"),
    "volumes": (lambda: nl.PatchGroups(np.ones((5, 5, 5, 5)), **SMALL), r"image: got 4 dimension\(s\)"),
    "gaps": (lambda: nl.PatchGroups(IMAGE, **{**SMALL, "step": 4}), r"step: got 4, expected at most patch_size \(3\)"),
    "patch_size": (lambda: nl.PatchGroups(IMAGE, **{**SMALL, "patch_size": 0}), "patch_size: got 0, expected an"),
    "members": (lambda: nl.PatchGroups(IMAGE, **{**SMALL, "members": 0}), "members: got 0, expected an integer >= 1"),
    "radius": (lambda: nl.PatchGroups(IMAGE, **{**SMALL, "search_radius": 1.5}), "search_radius: got 1.5, expected"),
    "another image": (lambda: GROUPS.lift(IMAGE[:-1]), r"image: got \(11, 12\) samples, expected \(12, 12\), those of"),
    "another covariance": (lambda: GROUPS.covariance(IMAGE.T[:6]), r"image: got \(6, 12\) samples"),
    "negative variance": (lambda: GROUPS.covariance(IMAGE, noise_variance=-1), "noise_variance: got -1, expected"),
    "tokens": (lambda: GROUPS.aggregate(TOKENS[1:]), r"tokens: got shape .*, expected .* \(D a multiple of 9\)"),
    "parts of tokens": (lambda: GROUPS.aggregate(TOKENS[..., :5]), "tokens: got shape"),
    "tokens of channels": (
        lambda: GROUPS.aggregate(np.concatenate([TOKENS, TOKENS], axis=-1)),
        "tokens: got 2 channels, expected 1, since channel_axis is None",
    ),
    "weights": (lambda: GROUPS.aggregate(TOKENS, np.ones((len(TOKENS), 3))), r"weights: got shape .*, expected"),
    "negative weights": (lambda: GROUPS.aggregate(TOKENS, -np.ones(TOKENS.shape)), "weights: got -1, expected every"),
    "weights with NaN": (lambda: GROUPS.aggregate(TOKENS, np.full(TOKENS.shape, np.nan)), "weights: got .* NaN"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    call, message = REFUSED[name]
    with pytest.raises(nl.InputError, match=message):
        call()


def test_memory_is_asked_for_first() -> None:
    with pytest.raises(
        nl.MemoryLimitError, match=r"the tokens of 36 groups of 4 patches of 9 samples needs .*; use a part"
    ):
        nl.PatchGroups(IMAGE, **SMALL, memory_limit=1000)
    limited = nl.PatchGroups(IMAGE, **SMALL, memory_limit=25_000)
    assert limited.lift(IMAGE).shape == TOKENS.shape
    with pytest.raises(nl.MemoryLimitError, match="the covariances of 36 groups"):
        limited.covariance(IMAGE)


# --- the claim -------------------------------------------------------------------------------------------------------


@pytest.mark.slow  # the claim itself is among those that all tests run
def test_the_claim_fails_where_the_step_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    def short(self: MatrixFidelity, v: Floats, observed: Floats, step: float) -> Floats:
        return self.damped(v + step * self.times(observed), 1.001 * step)

    context = Context(quick=True)
    assert nonlocal_bayes.run(context).passed
    monkeypatch.setattr(MatrixFidelity, "implicit_step", short)
    failed = [check.what for check in nonlocal_bayes.run(context).checks if not check.passed]
    assert failed[0].startswith("step against mean + C")
    assert len(failed) == 3  # the image, and what the energy falls by
