"""Masks: causal, windows, padding and rules, as a matrix and without one, against plain sums over what is seen."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import nlflow as nl
from nlflow import Mask
from tests.affinities.test_tiled import Watch, host
from tests.problems import torch_on_one_thread

torch = torch_on_one_thread()

N, WIDTH, CHANNELS = 70, 3, 4
RNG = np.random.default_rng(0)
FEATURES, QUERIES = RNG.normal(size=(2, N, WIDTH))
SIGNAL = RNG.normal(size=(N, CHANNELS))
PRESENT = RNG.uniform(size=N) > 0.3
WEIGHTS = {"equal": np.full(N, 0.1), "uneven": RNG.uniform(0.5, 2, N)}
ROUNDING = {"float64": 1e-12, "float32": 2e-5}


def same_document(i: Any, j: Any) -> Any:
    return i // 9 == j // 9


MASKS = {
    "causal": Mask(causal=True),
    "window": Mask(window=7),
    "window of none": Mask(window=0),
    "window of all": Mask(window=500),
    "causal window": Mask(causal=True, window=66),
    "padding": Mask(present=PRESENT),
    "causal padding": Mask(causal=True, present=PRESENT),
    "window padding": Mask(window=20, present=PRESENT),
    "all": Mask(causal=True, window=11, present=PRESENT),
    "rule": Mask(rule=same_document),
    "rule causal padding": Mask(causal=True, present=PRESENT, rule=lambda i, j: (i - j) % 3 == 0),
}
KERNELS = {
    "dot product": (nl.ExpDotProduct(), False),
    "queries": (nl.ExpDotProduct(scale=0.7, amplitude=2.0), True),
    "gaussian": (nl.Gaussian(1.0), False),
    "narrow gaussian": (nl.Gaussian(0.02), False),
    "laplace": (nl.Laplace(1.0), False),
    "top hat": (nl.TopHat(2.0), False),
}


def weight(kernel: Any, x: Any, y: Any) -> float:
    """k(x, y) from its formula."""
    distance = math.dist(x, y)
    if isinstance(kernel, nl.ExpDotProduct):
        scale = 1 / math.sqrt(len(x)) if kernel.scale is None else kernel.scale
        return kernel.amplitude * math.exp(scale * float(np.dot(x, y)))
    if isinstance(kernel, nl.Gaussian):
        return math.exp(-((distance / kernel.width) ** 2) / 2)
    if isinstance(kernel, nl.Laplace):
        return math.exp(-distance / kernel.width)
    return float(distance <= kernel.radius)


def sees(mask: Mask, i: int, j: int) -> bool:
    """Whether i sees j, from what the docstring of `Mask` says."""
    if mask.present is not None and not (mask.present[i] and mask.present[j]):
        return i == j
    seen = not (mask.causal and j > i)
    seen = seen and (mask.window is None or abs(i - j) <= mask.window)
    return seen and (mask.rule is None or bool(mask.rule(np.array(i), np.array(j))))


def table(kernel: Any, queries: Any, keys: Any, mask: Mask) -> Any:
    """The matrix k_ij, entry by entry."""
    k = np.zeros((N, N))
    for i in range(N):
        for j in range(N):
            if sees(mask, i, j):
                missing = mask.present is not None and not mask.present[i]
                k[i, j] = kernel.amplitude if missing else weight(kernel, queries[i], keys[j])
    return k


def affinity(name: str, weights: str, mask: Mask, dtype: str | None, method: str = "auto") -> nl.Affinity:
    """Return it in NumPy for no dtype, otherwise on tensors."""
    kernel, asymmetric = KERNELS[name]
    domain = nl.Points(np.arange(float(N)), weights=WEIGHTS[weights])
    x, q = FEATURES, QUERIES
    if dtype is not None:
        x, q = (torch.from_numpy(a.astype(dtype)) for a in (x, q))
    return nl.affinity(kernel, domain, x, queries=q if asymmetric else None, mask=mask, method=method)


@pytest.mark.slow
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.sampled(14)
def test_sums_are_those_over_what_is_seen(name: str, mask: str) -> None:
    kernel, asymmetric = KERNELS[name]
    k = table(kernel, QUERIES if asymmetric else FEATURES, FEATURES, MASKS[mask])
    for weights, w in WEIGHTS.items():
        for matrix, whole in ((k, False), (k + k.T, True)):
            degree = matrix @ w
            average = (matrix * w) @ SIGNAL / degree[:, None]
            push = ((matrix * w) / degree[:, None]).T @ SIGNAL
            for dtype in (None, *ROUNDING):
                p = affinity(name, weights, MASKS[mask], dtype, "auto" if dtype is None else "tiled")
                atol = ROUNDING[dtype or "float64"] * (20 if "narrow" in name else 1)
                p = p.symmetrized() if whole else p
                u = SIGNAL if dtype is None else torch.from_numpy(SIGNAL.astype(dtype))
                for got, expected in ((p.average(u), average), (p.push(u), push), (p.log_degree, np.log(degree))):
                    values = got if dtype is None else host(got)
                    np.testing.assert_allclose(values, expected, rtol=0, atol=atol, err_msg=f"{weights} {dtype}")


@pytest.mark.parametrize("mask", MASKS)
def test_what_is_said_of_k_is_so(mask: str) -> None:
    k = table(nl.Gaussian(1.0), FEATURES, FEATURES, MASKS[mask])
    for dtype, method in ((None, "auto"), ("float64", "tiled"), ("float64", "dense")):
        p = affinity("gaussian", "equal", MASKS[mask], dtype, method)
        assert p.symmetric is bool((k == k.T).all())
        if p.positive_semidefinite:
            assert np.linalg.eigvalsh(k).min() > -1e-12
    assert affinity("gaussian", "equal", MASKS["padding"], None).positive_semidefinite
    assert not affinity("gaussian", "equal", MASKS["window"], None).positive_semidefinite


def test_causal_masks_padding_and_windows_are_fused_attention_and_rules_are_not() -> None:
    for name, mask in MASKS.items():
        for kernel in ("dot product", "gaussian"):
            assert affinity(kernel, "uneven", mask, "float32", "tiled").fused is ("rule" not in name)
    assert not affinity("laplace", "equal", MASKS["causal"], "float32", "tiled").fused


@pytest.mark.parametrize("method", ["dense", "tiled"])
def test_missing_nodes_stay_where_they_are_and_their_features_do_not_matter(method: str) -> None:
    mask = Mask(causal=True, present=PRESENT)
    domain = nl.Points(np.arange(float(N)), volume=N)
    results = []
    for junk in (0.0, 1e4):
        features = np.where(PRESENT[:, None], FEATURES, junk)
        p = nl.affinity(nl.Gaussian(1.0), domain, torch.from_numpy(features), mask=mask, method=method)
        assert getattr(p, "fused", True)  # far away points would forbid it
        u = torch.from_numpy(np.where(PRESENT[:, None], SIGNAL, junk))
        moved = nl.solve(nl.AttentionFlow(p), u, t=3.0).final
        np.testing.assert_allclose(host(moved)[~PRESENT], junk, rtol=1e-12)
        results.append(host(moved)[PRESENT])
    np.testing.assert_allclose(results[0], results[1], rtol=0, atol=1e-9)


def test_padding_gives_what_the_shorter_sequence_gives() -> None:
    there = np.arange(N) < 50
    kernel = nl.ExpDotProduct()
    x, u = torch.from_numpy(FEATURES), torch.from_numpy(SIGNAL)
    padded = nl.affinity(kernel, nl.Points(np.arange(float(N)), volume=N), x, mask=Mask(present=there), method="tiled")
    short = nl.affinity(kernel, nl.Points(np.arange(50.0), volume=50), x[:50], method="tiled")
    torch.testing.assert_close(padded.average(u)[:50], short.average(u[:50]), rtol=0, atol=1e-14)
    assert nl.J(padded).value(torch.where(torch.from_numpy(there)[:, None], u, 7.0)) == pytest.approx(
        nl.J(short).value(u[:50]), rel=1e-12
    )


@pytest.mark.parametrize("method", ["dense", "tiled"])
def test_rows_that_see_nothing_see_themselves_with_a_warning(method: str) -> None:
    before = Mask(rule=lambda i, j: j < i)  # the first node sees none
    with pytest.warns(nl.NlflowWarning, match=r"mask: 1 of 70 nodes see no node \(the first is 0\); each sees itself"):
        p = affinity("queries", "equal", before, "float64", method)
    u = torch.from_numpy(SIGNAL)
    torch.testing.assert_close(p.average(u)[0], u[0], rtol=0, atol=1e-15)
    np.testing.assert_allclose(host(p.average(u))[1], SIGNAL[0], rtol=0, atol=1e-15)
    both = p.symmetrized()  # of whose transposed part the last row is empty
    k = np.tril(table(*(KERNELS["queries"][0], QUERIES, FEATURES, Mask())), -1)
    k[0, 0] = weight(KERNELS["queries"][0], QUERIES[0], FEATURES[0])
    k = k + k.T
    np.testing.assert_allclose(host(both.average(u)), k @ SIGNAL / k.sum(1)[:, None], rtol=0, atol=1e-12)
    np.testing.assert_allclose(host(both.log_degree), np.log(0.1 * k.sum(1)), rtol=0, atol=1e-12)


@pytest.mark.parametrize("method", ["dense", "tiled"])
def test_rows_that_see_missing_nodes_alone_see_themselves(method: str) -> None:
    present = np.array([False, True, True, True])
    mask = Mask(rule=lambda i, j: (j == 0) | ((j == i) & (i != 2)), present=present)  # node 2 sees the missing one
    u = torch.tensor([10.0, 1.0, 2.0, 3.0], dtype=torch.float64)
    with pytest.warns(nl.NlflowWarning, match=r"mask: 1 of 4 nodes see no node \(the first is 2\)"):
        p = nl.affinity(nl.ExpDotProduct(), nl.Points(np.arange(4.0)), X[:4], mask=mask, method=method)
    torch.testing.assert_close(p.average(u), u, rtol=0, atol=1e-15)
    torch.testing.assert_close(p.push(u), u, rtol=0, atol=1e-15)
    assert bool(torch.isfinite(p.log_degree).all())
    torch.testing.assert_close(p.symmetrized().average(u), u, rtol=0, atol=1e-15)


def test_values_at_missing_nodes_do_not_matter_in_half_precision() -> None:
    there = np.arange(N) < 60
    x, u = (torch.from_numpy(a.astype("float32")) for a in (FEATURES, SIGNAL))
    for given in (Mask(present=there), Mask(present=there, window=5)):
        for precision in ("float16", "bfloat16"):
            p = nl.affinity(nl.ExpDotProduct(), nl.Points(np.arange(float(N))), x, mask=given, precision=precision)
            spoiled = u.clone()
            spoiled[60:] = 1e6
            torch.testing.assert_close(p.average(spoiled)[:60], p.average(u)[:60], rtol=0, atol=4e-3)


def test_a_mask_of_no_node_is_told() -> None:
    with pytest.warns(nl.NlflowWarning, match="mask: no node is present; all of them stay where they are"):
        p = affinity("queries", "equal", Mask(present=np.zeros(N, bool)), "float32", "tiled")
    u = torch.from_numpy(SIGNAL.astype("float32"))
    assert torch.equal(p.average(u), u)
    assert torch.equal(p.push(u), u)


@pytest.mark.slow
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", ["queries", "gaussian", "laplace"])
@pytest.mark.sampled(7)
def test_derivatives(name: str, mask: str) -> None:
    kernel, asymmetric = KERNELS[name]
    given = MASKS[mask]
    count = 12
    if given.present is not None:
        given = Mask(given.causal, given.window, given.present[:count], given.rule)
    domain = nl.Points(np.arange(float(count)), weights=WEIGHTS["uneven"][:count])

    def of(x: Any, q: Any, u: Any) -> Any:
        p = nl.affinity(kernel, domain, x, queries=q if asymmetric else None, mask=given, method="tiled")
        both = p.symmetrized()
        return p.average(u), p.log_degree, both.average(u), both.log_degree

    x, q, u = (torch.from_numpy(a[:count]).requires_grad_() for a in (FEATURES, QUERIES, SIGNAL[:, :2]))
    assert torch.autograd.gradcheck(of, (x, q, u), fast_mode=True)


@pytest.mark.parametrize("mask", ["causal", "window", "all"])
@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_half_precision(mask: str, precision: str) -> None:
    domain = nl.Points(np.arange(float(N)), volume=N)
    x, q, u = (torch.from_numpy(a.astype("float32")) for a in (FEATURES, QUERIES, SIGNAL))
    exact = nl.affinity(nl.ExpDotProduct(), domain, x, queries=q, mask=MASKS[mask])
    rough = nl.affinity(nl.ExpDotProduct(), domain, x, queries=q, mask=MASKS[mask], precision=precision)
    assert rough.fused
    # Features of size 3 are off by 2^-9 or 2^-12 of it, in three products; signals likewise.
    atol = {"bfloat16": 0.03, "float16": 0.004}[precision]
    torch.testing.assert_close(rough.average(u), exact.average(u), rtol=0, atol=atol)
    torch.testing.assert_close(rough.log_degree, exact.log_degree, rtol=0, atol=atol)


@pytest.mark.parametrize("scale", [1e-30, 1e-5, 1e-4, 1e4, 1e8])
def test_scales_of_any_size(scale: float) -> None:
    given = Mask(causal=True, present=PRESENT)
    domain = nl.Points(np.arange(float(N)), volume=N)
    expected = nl.affinity(nl.ExpDotProduct(scale=scale), domain, FEATURES, mask=given).average(SIGNAL)
    x, u = torch.from_numpy(FEATURES), torch.from_numpy(SIGNAL)
    p = nl.affinity(nl.ExpDotProduct(scale=scale), domain, x, mask=given, method="tiled")
    np.testing.assert_allclose(host(p.average(u)), expected, rtol=0, atol=1e-12)
    assert p.fused is (1e-4 <= scale <= 1e4)


def test_windows_take_memory_in_proportion_to_the_nodes() -> None:
    n, window = 20_000, 40
    x = torch.from_numpy(np.random.default_rng(3).normal(size=(n, 4)).astype("float32"))
    for kernel in (nl.ExpDotProduct(), nl.Laplace(1.0)):
        with Watch() as watch:
            p = nl.affinity(kernel, nl.Points(np.arange(float(n))), x, mask=Mask(window=window))
            p.average(x)
        assert p.method == "tiled"
        # Keys are there 1 + 2 window / 64 = 2.25 times, in 4 columns, on GPUs in 8; tiles of other kernels have 64 MiB.
        assert watch.largest <= (20 * n if isinstance(kernel, nl.ExpDotProduct) else 2**24)


def test_a_mask_keeps_what_it_was_made_from() -> None:
    present = np.ones(N, bool)
    mask = Mask(present=present)
    present[:] = False
    assert mask.present is not None
    assert mask.present.all()
    p = affinity("gaussian", "equal", mask, None)
    np.testing.assert_allclose(p.average(SIGNAL), affinity("gaussian", "equal", Mask(), None).average(SIGNAL))


def test_evolving_kernels_keep_their_mask() -> None:
    p = nl.affinity(
        nl.ExpDotProduct(), nl.Points(np.arange(float(N))), torch.from_numpy(SIGNAL), mask=Mask(causal=True)
    )
    other = p.update(torch.from_numpy(2 * SIGNAL))
    u = torch.from_numpy(SIGNAL)
    assert torch.equal(other.average(u)[0], u[0])
    assert not other.symmetric


POINTS = nl.Points(np.arange(float(N)))
X = torch.from_numpy(FEATURES)
BAD = {
    "causal": (lambda: Mask(causal=1), r"causal: got 1, expected True or False"),
    "window": (lambda: Mask(window=-1), r"window: got -1, expected an integer >= 0"),
    "numbers": (lambda: Mask(present=np.ones(N)), r"present: got float64, expected an array of bool.*== 1"),
    "list": (lambda: Mask(present=[True]), r"present: got list, expected an array of bool"),
    "one value": (lambda: Mask(present=True), r"present: got bool, expected an array of bool"),
    "rule": (lambda: Mask(rule=3), r"rule: got 3, expected a function"),
    "kind": (lambda: nl.affinity(nl.ExpDotProduct(), POINTS, X, mask=PRESENT), r"mask: got ndarray, expected a Mask"),
    "shape": (
        lambda: nl.affinity(nl.ExpDotProduct(), POINTS, X, mask=Mask(present=PRESENT[:9])),
        r"mask: present has shape \(9,\), expected \(70,\)",
    ),
    "axes": (
        lambda: nl.affinity(nl.ExpDotProduct(), POINTS, X, mask=Mask(present=PRESENT[None])),
        r"mask: present has shape \(1, 70\), expected \(70,\)",
    ),
    "rule of nothing": (
        lambda: nl.affinity(nl.ExpDotProduct(), POINTS, X, mask=Mask(rule=lambda i, j: None)),
        r"rule: got NoneType of shape \(\), expected bool of shape",
    ),
    "rule of others": (
        lambda: nl.affinity(nl.ExpDotProduct(), POINTS, X, mask=Mask(rule=lambda i, j: PRESENT[:3])),
        r"rule: got bool of shape \(3,\), expected bool of shape \(70, 70\)",
    ),
    "rule of a class": (lambda: Mask(rule=Mask), r"rule: got <class .*, expected a function"),
    "rule raises": (
        lambda: nl.affinity(nl.ExpDotProduct(), POINTS, X, mask=Mask(rule=lambda i, j: i.nothing)),
        r"rule: it raised AttributeError .* of shapes \(70, 1\) and \(70,\)",
    ),
    "rule of numbers": (
        lambda: nl.affinity(nl.ExpDotProduct(), POINTS, X, mask=Mask(rule=lambda i, j: i - j)),
        r"rule: got torch.int64 of shape \(70, 70\), expected bool",
    ),
    "grid": (
        lambda: nl.affinity(nl.Gaussian(1.0), nl.Grid(9), mask=Mask(causal=True)),
        r"mask: patches and positions on a Grid have a window instead",
    ),
    "method": (
        lambda: nl.affinity(nl.Gaussian(1.0), POINTS, FEATURES, mask=Mask(causal=True), method="pairwise"),
        r"mask: method 'pairwise' has none for NumPy features",
    ),
    "top hat": (
        lambda: nl.affinity(nl.TopHat(1e-3), POINTS, X, mask=Mask(rule=lambda i, j: i != j), method="tiled"),
        r"affinity: row 0 is zero or not finite; every node needs a neighbour",
    ),
    "top hat dense": (
        lambda: nl.affinity(nl.TopHat(1e-3), POINTS, FEATURES, mask=Mask(rule=lambda i, j: i != j)),
        r"affinity: row 0 is zero or not finite; every node needs a neighbour",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_masks(case: str) -> None:
    call, message = BAD[case]
    with pytest.raises(nl.InputError, match=f"^{message}"):
        call()


def test_a_rule_is_not_asked_of_more_than_fits() -> None:
    with pytest.raises(nl.MemoryLimitError, match="a dense affinity of 30000 nodes"):
        nl.affinity(
            nl.ExpDotProduct(), nl.Points(np.arange(30_000.0)), np.ones((30_000, 1)),
            mask=Mask(rule=lambda i, j: pytest.fail("asked")), memory_limit=1e9,
        )  # fmt: skip
