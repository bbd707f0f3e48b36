"""How alike tokens are: every metric against plain sums over all pairs, on arrays and tensors."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from nlflow import InputError, J, Points, from_matrix
from nlflow.attention.probing.metrics import (
    energy_per_token,
    gradient_cosine,
    head_redundancy,
    hfc_lfc,
    mean_cosine,
    participation_rank,
    token_similarity,
)

torch = pytest.importorskip("torch")

from nlflow.attention import LayerTrace, Survey, discretize  # noqa: E402

Array = NDArray[Any]
RNG = np.random.default_rng(3)
X = RNG.normal(size=(4, 9, 5)) + 0.7
MASK = RNG.random((4, 9)) < 0.7
STATES: list[Callable[..., Any]] = [mean_cosine, token_similarity, hfc_lfc, participation_rank]


def plain_cosine(x: Array) -> float:
    pairs = [(i, j) for i in range(len(x)) for j in range(len(x)) if i != j]
    return float(np.mean([x[i] @ x[j] / math.sqrt(x[i] @ x[i]) / math.sqrt(x[j] @ x[j]) for i, j in pairs]))


def plain_similarity(x: Array) -> float:
    projection = np.full((len(x), len(x)), 1 / len(x))
    return float(((projection @ x) ** 2).sum() / (x**2).sum())


def plain_frequencies(x: Array) -> float:
    projection = np.full((len(x), len(x)), 1 / len(x))
    return float(np.linalg.norm(x - projection @ x) / np.linalg.norm(projection @ x))


def plain_rank(x: Array) -> float:
    singular = np.linalg.svd(x, compute_uv=False)
    return float((singular**2).sum() ** 2 / (singular**4).sum())


PLAIN = dict(zip(STATES, [plain_cosine, plain_similarity, plain_frequencies, plain_rank], strict=True))


@pytest.mark.parametrize("metric", STATES)
def test_plain_sums(metric: Callable[..., Any]) -> None:
    expected = [PLAIN[metric](x) for x in X]
    np.testing.assert_allclose(metric(X), expected, rtol=1e-12)
    np.testing.assert_allclose(metric(torch.from_numpy(X)).numpy(), expected, rtol=1e-12)
    single = torch.from_numpy(X).float()
    found = metric(single)
    assert found.dtype == torch.float64
    assert metric(X[0]).shape == ()
    # In single precision: what rounding the tokens costs, not what adding up in it would.
    np.testing.assert_allclose(found.numpy(), [PLAIN[metric](x) for x in single.double().numpy()], rtol=1e-6)
    np.testing.assert_allclose(metric(X.transpose(0, 2, 1)), [PLAIN[metric](x.T) for x in X], rtol=1e-12)


@pytest.mark.parametrize("metric", STATES)
def test_masks_leave_tokens_out(metric: Callable[..., Any]) -> None:
    expected = [PLAIN[metric](x[inside]) for x, inside in zip(X, MASK, strict=True)]
    np.testing.assert_allclose(metric(X, mask=MASK), expected, rtol=1e-12)
    np.testing.assert_allclose(metric(torch.from_numpy(X), mask=torch.from_numpy(MASK)).numpy(), expected, rtol=1e-12)
    anything = np.where(MASK[..., None], X, np.nan)  # as padding is in some models
    np.testing.assert_allclose(metric(anything, mask=MASK), expected, rtol=1e-12)
    tensors = torch.from_numpy(anything), torch.from_numpy(MASK)
    np.testing.assert_allclose(metric(tensors[0], mask=tensors[1]).numpy(), expected, rtol=1e-12)


def test_what_they_mean() -> None:
    same = np.tile([1.0, -2.0, 3.0], (6, 1))
    assert mean_cosine(same) == pytest.approx(1)
    assert token_similarity(same) == pytest.approx(1)
    assert hfc_lfc(same) == pytest.approx(0, abs=1e-7)
    assert participation_rank(same) == pytest.approx(1)
    apart = np.eye(6)
    assert mean_cosine(apart) == 0
    assert participation_rank(apart) == pytest.approx(6)
    assert participation_rank(apart, centred=True) == pytest.approx(5)
    opposite = np.array([[1.0, 0], [-1, 0]])
    assert mean_cosine(opposite) == pytest.approx(-1)
    assert token_similarity(opposite) == 0
    assert hfc_lfc(opposite) == math.inf
    np.testing.assert_allclose(token_similarity(X), 1 / (1 + hfc_lfc(X) ** 2), rtol=1e-12)
    assert math.isnan(mean_cosine(X[0][:1]))
    assert math.isnan(token_similarity(np.zeros((3, 2))))
    assert mean_cosine(np.array([[0.0, 0], [1, 0], [1, 0]])) == pytest.approx(1 / 3)


def heads() -> tuple[Array, Array, Array]:
    """Attention matrices with q unlike k and with k alone, and values."""
    q, k = RNG.normal(size=(2, 3, 7, 4))
    weights = [np.exp(a @ k.swapaxes(1, 2) / 2) for a in (q, k)]
    a, b = (w / w.sum(-1, keepdims=True) for w in weights)
    return a, b, RNG.normal(size=(3, 7, 6)) + 2


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_energy_and_directions(kind: str) -> None:
    a, b, v = heads()
    energy = np.zeros(3)
    cosine = np.zeros(3)
    for h in range(3):
        energy[h] = sum(
            a[h, i, j] * ((v[h, i] - v[h, j]) ** 2).sum() / 2 for i in range(7) for j in range(7)
        ) / 7  # fmt: skip
        for i in range(7):
            one, other = v[h, i] - a[h, i] @ v[h], v[h, i] - b[h, i] @ v[h]
            cosine[h] += one @ other / np.linalg.norm(one) / np.linalg.norm(other) / 7
    give = torch.from_numpy if kind == "torch" else np.asarray
    arrays = [give(part) for part in (v, a @ v, (a @ (v**2).sum(-1)[..., None])[..., 0], b @ v)]
    np.testing.assert_allclose(np.asarray(energy_per_token(*arrays[:3])), energy, rtol=1e-12)
    np.testing.assert_allclose(np.asarray(gradient_cosine(*arrays[:2], arrays[3])), cosine, rtol=1e-12)
    # The package's own functional of the same affinity, its weights 1.
    j = J(from_matrix(a[0], Points(np.arange(7), weights=np.ones(7)))).value(v[0])
    assert energy[0] == pytest.approx(j / 7, rel=1e-12)


def test_tokens_that_do_not_move_have_no_direction() -> None:
    a, b, v = heads()
    a[:, 0] = b[:, 0] = np.eye(7)[0]
    full = gradient_cosine(v, a @ v, b @ v)
    inside = np.ones((3, 7), bool)
    inside[:, 0] = False
    np.testing.assert_allclose(full, gradient_cosine(v, a @ v, b @ v, mask=inside), rtol=1e-14)
    assert np.isnan(gradient_cosine(v, v, v)).all()


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_averages_of_tokens_that_do_not_count_may_be_nan(kind: str) -> None:
    a, b, v = heads()
    squares = (a @ (v**2).sum(-1)[..., None])[..., 0]
    inside = np.ones((3, 7), bool)
    inside[:, 5:] = False
    give = torch.from_numpy if kind == "torch" else np.asarray
    parts = [v, a @ v, squares, b @ v]
    spoiled = [np.where(inside[..., None] if part.ndim == 3 else inside, part, np.nan) for part in parts]
    (v1, a1, s1, b1), (v2, a2, s2, b2) = ([give(part) for part in several] for several in (parts, spoiled))
    mask = give(inside)
    np.testing.assert_array_equal(energy_per_token(v2, a2, s2, mask=mask), energy_per_token(v1, a1, s1, mask=mask))
    np.testing.assert_array_equal(gradient_cosine(v2, a2, b2, mask=mask), gradient_cosine(v1, a1, b1, mask=mask))


def test_redundancy() -> None:
    a, b, _ = heads()
    expected = [np.sum(x * y) / np.linalg.norm(x) / np.linalg.norm(y) for x, y in zip(a, b, strict=True)]
    np.testing.assert_allclose(head_redundancy(a, b), expected, rtol=1e-12)
    np.testing.assert_allclose(head_redundancy(a, a), 1, rtol=1e-14)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: mean_cosine(np.ones(4)), r"x: got shape \(4,\), expected \(\.\.\., N, D\)"),
        (lambda: mean_cosine(np.array([[1.0, np.nan]])), "x: got 1 NaN"),
        (lambda: mean_cosine(torch.tensor([[1.0, math.inf]])), "x: got 1 NaN or inf"),
        (lambda: mean_cosine(X, mask=MASK[0]), r"mask: got bool of shape \(9,\), expected bool of shape \(4, 9\)"),
        (lambda: mean_cosine(X, mask=MASK.astype(float)), "mask: got float64"),
        (lambda: energy_per_token(X, X[0], X[..., 0]), "average: got shape"),
        (lambda: energy_per_token(X, X, X), "average_of_squares: got shape"),
        (lambda: head_redundancy(X, X[0]), "following: got shape"),
        (lambda: mean_cosine(np.ones((0, 3))), "x: got an empty array"),
        (lambda: mean_cosine("words"), "x: got"),
        (lambda: participation_rank(X, centred="no"), "centred: got 'no', expected True or False"),  # type: ignore[arg-type]
        (lambda: LayerTrace((), "", {}).rows(spectra="no"), "spectra: got 'no', expected True or False"),  # type: ignore[arg-type]
        (lambda: Survey("", 1, ()).to_pandas(by_head="no"), "by_head: got 'no', expected True or False"),  # type: ignore[arg-type]
        (lambda: discretize(None, symmetric="no"), "symmetric: got 'no', expected True or False"),  # type: ignore[arg-type]
    ],
    ids=[
        "axes",
        "nan",
        "infinite",
        "mask-shape",
        "mask-type",
        "average",
        "squares",
        "matrices",
        "empty",
        "text",
        "centred",
        "spectra",
        "by_head",
        "symmetric",
    ],
)
def test_bad_input(call: Callable[[], Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        call()
