"""Averages and functionals of extreme problems against 50 digits, while any floating-point exception is an error."""

from __future__ import annotations

import ast
import math
from pathlib import Path
from typing import Any

import mpmath
import numpy as np
import pytest
from extremes import CASES, Case, case, exact, signals

import nlflow as nl
from nlflow import attention
from nlflow.kernels import Kernel
from tests.covering import pairs
from tests.names import FOUND

pytestmark = [
    pytest.mark.numerical,
    pytest.mark.filterwarnings("ignore::nlflow.NlflowWarning"),  # nodes that see no other: meant here
    pytest.mark.usefixtures("strict"),
]

EXACT = ("dense", "pairwise", "tiled")
APPROXIMATE = {"sparse": (nl.Gaussian, nl.Laplace, nl.TopHat), "nufft": nl.Gaussian, "lowrank": Kernel}
RTOL = 1e-4
DTYPES = (np.float16, np.float32, np.float64)

# Of what takes numbers elsewhere: exceptions, what is returned, and what only holds names, files or models.
WITHOUT_NUMBERS = {
    *("Affinity", "Callback", "Checkpoint", "DenoiseInfo", "Equilibrium", "Solution", "Status", "StudyResult"),
    *("Film", "Frames", "Live"),
    *(
        "CertifiedMinimizer",
        "FileFormatError",
        "InputError",
        "KeywordError",
        "MemoryLimitError",
        "NlflowError",
        "NlflowWarning",
    ),
    *("NumericalError", "StabilityError", "WorkerError"),
}
ATTENTION_WITHOUT_NUMBERS = {
    *(
        "Adapter",
        "Block",
        "BlockFlow",
        "Cause",
        "CausedBlock",
        "Discretization",
        "discretize_blocks",
        "Extrapolation",
        "Head",
        "HeadSpectrum",
        "Layer",
        "LayerSpectrum",
        "LayerTrace",
        "Ruling",
        "Survey",
        "SurveyedState",
        "Taken",
    ),
    *("attach", "blocks", "detach", "discretize", "explain", "extrapolate", "register", "probe", "survey"),  # of models
    *("Perplexity", "Retrieval", "Sweep", "neighbouring_passages", "reciprocal_ranks", "sweep"),
    *("CURES", "Classification", "Cure", "Report", "TokenAccuracy", "WordErrors", "masked_tokens", "report"),
    *("fidelities", "image_inputs", "load_model", "load_terms", "save_terms", "text_inputs", "token_inputs"),
}


# ---- nothing is left out


def _named(prefix: str) -> set[str]:
    """Return the attributes of `prefix` that the tests of extreme cases use."""
    found = set()
    for path in Path(__file__).parents[1].rglob("*extremes*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == prefix:
                found.add(node.attr)
    return found


def test_every_public_name_has_an_extreme_case() -> None:
    assert set(FOUND) - WITHOUT_NUMBERS - _named("nl") == set()
    assert set(attention.__all__) - ATTENTION_WITHOUT_NUMBERS - _named("attention") == set()


def test_tables_of_exceptions_hold_public_names_alone() -> None:
    assert set(FOUND) >= WITHOUT_NUMBERS
    assert set(attention.__all__) >= ATTENTION_WITHOUT_NUMBERS


# ---- averages


def identity(value: Any) -> str:
    """Name a value in the name of a test."""
    return str(getattr(value, "__name__", None) or getattr(value, "name", value))


def _built(problem: Case, method: str) -> Any:
    if method != "tiled":
        return problem.affinity(method, **({"rtol": RTOL} if method in APPROXIMATE else {}))
    torch = pytest.importorskip("torch")
    queries = problem.table("queries")
    return nl.affinity(
        problem.kernel,
        problem.domain,
        torch.from_numpy(problem.table()),
        queries=None if queries is None else torch.from_numpy(queries),
        method="tiled",
    )


def _check_average(problem: Case, method: str) -> None:
    """Hold an affinity against 50 digits, for signals of all sizes that the dtype holds."""
    affinity = _built(problem, method)
    dtype = np.float64 if problem.dtype == np.float64 else np.float32
    # Approximations say how far off they are; `lowrank` and `nufft` bound it, which leaves the degree as far off.
    relative = problem.tolerance(dtype) + 2 * affinity.error_estimate
    if method == "pairwise" and dtype == np.float32:
        relative += 4e-6  # what the choice of precision allows the logits (`pair_sums`)
    expected = problem.log_degree()
    error = np.abs(np.asarray(affinity.log_degree) - expected).max()
    assert error <= relative * (1 + np.abs(expected).max())
    least = float(np.finfo(dtype).smallest_subnormal)
    names, values = zip(*signals(problem.n, dtype).items(), strict=True)
    for name, u in zip(names, values, strict=True):
        given = affinity.as_signal(u.astype(float)) if method == "tiled" else u
        average = np.asarray(affinity.average(given))
        assert average.dtype == dtype
        size = float(np.abs(u).max())
        with np.errstate(under="ignore"):
            allowed = relative * size + 4 * problem.n * least
        assert np.abs(average.astype(float) - problem.average(u)).max() <= allowed, name


@pytest.mark.parametrize(
    ("problem", "method", "dtype"),
    pairs(CASES, EXACT, DTYPES, where=lambda problem, _, dtype: problem.of(dtype).fits),
    ids=identity,
)
def test_exact_averages(problem: Case, method: str, dtype: Any) -> None:
    problem = problem.of(dtype)
    lightest = float(problem.w.min()) / float(problem.w.max())
    least = {"pairwise": 1e-280, "tiled": float(np.finfo(problem.table().dtype).smallest_normal)}.get(method, 0.0)
    if lightest < least:  # sums would lose such nodes
        with pytest.raises(nl.InputError, match="of the largest; leave such nodes out"):
            _built(problem, method)
        return
    _check_average(problem, method)


REFUSED = {
    ("sparse", "one subnormal weight"): (nl.InputError, "less than 1e-140 of the largest"),
    ("nufft", "light node"): (nl.NumericalError, "some nodes have a degree far below the total weight"),
    ("nufft", "narrow"): (nl.MemoryLimitError, "Fourier modes"),
    ("nufft", "duplicates"): (nl.MemoryLimitError, "Fourier modes"),
    ("lowrank", "light node"): (nl.NumericalError, "rounding alone leaves an error bound"),
    ("lowrank", "logits"): (nl.NumericalError, "rounding alone leaves an error bound"),
    ("lowrank", "queries"): (nl.NumericalError, "rounding alone leaves an error bound"),
    ("lowrank", "negative"): (nl.InputError, "positive definite"),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("problem", "method", "dtype"), pairs(CASES, list(APPROXIMATE), [np.float32, np.float64]), ids=identity
)
def test_approximate_averages(problem: Case, method: str, dtype: Any) -> None:
    if method == "nufft":
        pytest.importorskip("finufft")
    problem = problem.of(dtype)
    if (method, problem.name) in REFUSED:
        error, words = REFUSED[method, problem.name]
        with pytest.raises(error, match=words):
            problem.affinity(method, rtol=RTOL)
    elif not isinstance(problem.kernel, APPROXIMATE[method]):
        with pytest.raises(nl.InputError, match="kernel"):
            problem.affinity(method, rtol=RTOL)
    elif method == "lowrank" and isinstance(problem.kernel, nl.TopHat):
        with pytest.raises(nl.InputError, match="positive"):
            problem.affinity(method, rtol=RTOL)
    else:
        _check_average(problem, method)


@pytest.mark.parametrize("method", ["dense", "pairwise", "sparse", "tiled"])
@pytest.mark.parametrize("name", ["logits", "queries", "two clusters", "tiny units", "subnormal weights"])
def test_push_is_the_transpose(name: str, method: str) -> None:
    """(p P)_j = sum_i p_i P_ij, of laws that are tiny, too."""
    problem = case(name)
    if method == "sparse" and isinstance(problem.kernel, nl.ExpDotProduct):
        return
    affinity, moves = _built(problem, method), problem.transitions()
    for law in (np.full(problem.n, 1 / problem.n), np.full(problem.n, 1e-300), np.eye(problem.n)[0]):
        expected = [float(mpmath.fdot(exact(law), moves[:, j])) for j in range(problem.n)]
        pushed = np.asarray(affinity.push(affinity.as_signal(law)))
        relative = 2 * problem.tolerance() + 2 * affinity.error_estimate
        with np.errstate(under="ignore"):
            allowed = relative * float(law.sum())
        assert np.abs(pushed - expected).max() <= allowed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "kernel", "boundary"),
    pairs(
        [(1,), (2,), (5,), (1, 1), (2, 3)], [nl.Gaussian, nl.Laplace, nl.TopHat], ["periodic", "reflect", "isolated"]
    ),
    ids=identity,
)
def test_grids(shape: tuple[int, ...], kernel: Any, boundary: Any) -> None:
    """Widths from 1e-12 to 1e12 of grids in units from 1e-150 to 1e12: all methods agree, or say what they lack."""
    for spacing in (1.0, 1e-12, 1e12, 1e-150):
        grid = nl.Grid(shape, spacing=spacing, boundary=boundary)
        u = np.random.default_rng(1).standard_normal(shape)
        for width in (1e-12, 1.0, 1e12):
            found = []
            for method in ("dense", "stencil", "convolution"):
                try:
                    found.append(nl.affinity(kernel(width), grid, method=method).average(u))
                except nl.MemoryLimitError:
                    assert boundary != "isolated"
                    assert width / spacing > 1e6
            for average in found:
                if width / spacing <= 1e-2:  # no node sees another
                    np.testing.assert_allclose(average, u, rtol=0, atol=1e-13)
                if width / spacing >= 1e11 and boundary == "isolated":  # all see all alike, up to r / width
                    np.testing.assert_allclose(average, u.mean(), rtol=0, atol=1e-13 + 20 * spacing / width)
                np.testing.assert_allclose(average, found[0], rtol=0, atol=1e-13)


@pytest.mark.parametrize("method", ["stencil", "convolution", "patches"])
@pytest.mark.parametrize("boundary", ["periodic", "reflect", "isolated"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_signals_of_any_size_on_grids(method: str, boundary: Any, dtype: Any) -> None:
    """An average lies between its numbers, whatever the sums of weights."""
    grid = nl.Grid((8, 9), spacing=0.2, boundary=boundary)
    u = np.random.default_rng(0).uniform(0.5, 0.99, grid.shape).astype(dtype)
    kernel = nl.Patch(1.0, 3, 2) if method == "patches" else nl.Gaussian(1.0)
    smooth = nl.affinity(kernel, grid, u if method == "patches" else None, method=method.replace("patches", "auto"))
    expected, limits = smooth.average(u), np.finfo(dtype)
    for size in (dtype(2.0 ** (limits.maxexp - 1)), dtype(2.0 ** (limits.minexp + 2))):
        np.testing.assert_allclose(smooth.average(u * size) / size, expected, rtol=8 * limits.eps)


@pytest.mark.parametrize("width", [1e308, 1e-308, 5e-324])
@pytest.mark.parametrize("kernel", [nl.Gaussian, nl.Laplace, nl.TopHat, nl.Matern, nl.RationalQuadratic,
                                    nl.InverseMultiquadric, nl.Wendland], ids=identity)  # fmt: skip
def test_widths_at_the_ends_of_the_range(kernel: Any, width: float) -> None:
    """Nodes see nobody else, or the kernel is refused."""
    x, message = np.array([0.0, 1.0, 3.0]), ""
    try:
        found = nl.affinity(kernel(width), nl.Points(x)).average(x)
    except nl.InputError as error:
        message = str(error)
    assert "kernel: " in message if message else np.array_equal(found, x)


@pytest.mark.parametrize("unit", [1e-150, 1.0, 1e150])
@pytest.mark.parametrize(
    "kernel",
    [
        lambda w: nl.Matern(w, 2.5), lambda w: nl.RationalQuadratic(w, alpha=0.3), nl.InverseMultiquadric,
        lambda w: nl.Wendland(3 * w), lambda w: nl.TruncatedPower(2.5, w, 4 * w),
        lambda w: nl.Formula("exp(-r**1.5)", w), lambda w: nl.Anisotropic(nl.Gaussian(1.0), widths=(w, 2 * w)),
    ],
    ids=["Matern", "RationalQuadratic", "InverseMultiquadric", "Wendland", "TruncatedPower", "Formula", "Anisotropic"],
)  # fmt: skip
def test_kernels_in_any_unit(kernel: Any, unit: float) -> None:
    """Widths whose squares are near the ends of the range, with distances to match: averages do not change."""
    x = np.random.default_rng(0).random((40, 2)) * 6
    u = np.sin(x)
    expected = nl.affinity(kernel(1.0), nl.Points(x), method="dense").average(u)
    for method in ("dense", "pairwise"):
        found = nl.affinity(kernel(unit), nl.Points(x * unit), method=method).average(u)
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-13)
    found = nl.affinity(kernel(unit), nl.Points(x * unit), method="sparse", rtol=1e-6).average(u)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("unit", [2.0**-600, 2.0**600])
@pytest.mark.parametrize("kernel", [nl.Gaussian, nl.Laplace, nl.Matern], ids=lambda kernel: kernel.__name__)
def test_units_whose_squares_are_no_floats(kernel: Any, unit: float) -> None:
    """Sums that choose their unit do not change; the others refuse: dense ones gave the mean, or the signal itself."""
    x = np.random.default_rng(0).normal(size=(9, 2))
    expected = nl.affinity(kernel(1.0), nl.Points(x), method="dense").average(x)
    if kernel is nl.Gaussian:
        found = nl.affinity(kernel(unit), nl.Points(x * unit), method="pairwise").average(x)
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-13)
    for method in ("dense", "sparse"):
        with pytest.raises(nl.InputError, match="change the unit"):
            nl.affinity(kernel(unit), nl.Points(x * unit), method=method)
    for method in ("dense", "stencil", "convolution"):
        with pytest.raises(nl.InputError, match="change the unit"):
            nl.affinity(kernel(unit), nl.Grid(9, unit), method=method)


@pytest.mark.parametrize("unit", [2.0**-80, 2.0**80])
def test_units_whose_squares_are_no_float32(unit: float) -> None:
    torch = pytest.importorskip("torch", reason="pip install '.[torch]'")
    x = torch.randn(9, 2, generator=torch.Generator().manual_seed(0))
    expected = nl.affinity(nl.Gaussian(1.0), nl.Grid(9), features=x, method="dense").average(x)
    found = nl.affinity(nl.Gaussian(unit), nl.Grid(9), features=x * unit, method="dense").average(x)  # in float64
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)
    with pytest.raises(nl.InputError, match="change the unit"):
        nl.affinity(nl.Laplace(unit), nl.Grid(9), features=x * unit, method="tiled")


@pytest.mark.parametrize("size", [1e-300, 1e-100, 1.0, 1e100, 1e300])
@pytest.mark.parametrize("span", [1.0, 1e-3, 1e-120])
def test_graphs_of_any_weights(size: float, span: float) -> None:
    """Averages and degrees of a path whose weights fall by `span` from edge to edge, of signals of any size."""
    with np.errstate(under="ignore"):
        weights = size * span ** np.array([0.0, 1.0, 2.0])
    if weights.min() == 0:  # no float holds it
        return
    ends = np.array([[0, 1, 2, 1, 2, 3], [1, 2, 3, 0, 1, 2]])
    domain = nl.Points(np.arange(4.0), [1e-30, 1.0, 3.0, 1e30])
    affinity = nl.affinity_from_graph(ends, domain, edge_weight=np.tile(weights, 2))
    k = mpmath.matrix(4, 4)
    for i, j, value in zip(*ends, np.tile(weights, 2), strict=True):
        k[int(i), int(j)] = mpmath.mpf(float(value))
    w = exact(domain.weights)
    degrees = [mpmath.fdot(w, k[i, :]) for i in range(4)]
    assert np.abs(affinity.log_degree - [float(mpmath.log(d)) for d in degrees]).max() <= 1e-12
    for name, u in signals(4, float).items():
        v = exact(u)
        expected = [mpmath.fsum(w[j] * k[i, j] * v[j] for j in range(4)) / degrees[i] for i in range(4)]
        allowed = 1e-14 * float(np.abs(u).max()) + 5e-324
        assert max(abs(a - b) for a, b in zip(affinity.average(u), expected, strict=True)) <= allowed, name


@pytest.mark.parametrize("size", [1e-300, 1e-150, 1.0, 1e150, 1e300])
def test_neighbours_at_any_distance(size: float) -> None:
    points = np.array([0.0, 1.0, 3.0, 7.0]) * size
    assert nl.neighbour_graph(points, 1).sum() == 6
    if not 1e-160 < size < 1e160:  # formulas of kernels take the squared distance
        with pytest.raises(nl.InputError, match="whose squares a float can hold"):
            nl.neighbour_graph(points, 1, nl.Laplace(width=size))
        return
    graph = nl.neighbour_graph(points, 1, nl.Laplace(width=size))
    expected = np.diag(np.exp([-1.0, -2.0, -4.0]), 1)
    np.testing.assert_allclose(graph.toarray(), expected + expected.T, rtol=1e-14)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_refused(value: float) -> None:
    u = np.array([1.0, value, 2.0, 0.0, 1.0])
    affinity = case("wide").affinity()
    image = np.zeros((16, 16))
    image[3, 4] = value
    lost = image if math.isinf(value) else np.full((16, 16), value)  # some NaN are missing samples
    for call in (
        lambda: nl.affinity(nl.Gaussian(1.0), case("wide").domain, u),
        lambda: nl.from_matrix(np.diag(u), nl.Points(np.arange(5.0))),
        lambda: nl.affinity_from_graph(np.diag(u)),
        lambda: nl.neighbour_graph(u, 1),
        lambda: nl.Points(u),
        lambda: nl.Gaussian(value),
        lambda: nl.Poisson(value),
        lambda: nl.Grid(4, spacing=value),
        lambda: affinity.average(u),
        lambda: affinity.push(u),
        lambda: nl.J(affinity).value(u),
        lambda: nl.E(affinity, u, 1.0),
        lambda: nl.E(affinity, np.zeros(5), value),
        lambda: nl.Jp(affinity, 1.5).value(u),
        lambda: nl.solve(nl.AttentionFlow(affinity), u, t=1),
        lambda: nl.solve(nl.AttentionFlow(affinity), np.zeros(5), t=value),
        lambda: nl.equilibrium(nl.AttentionFlow(affinity), u),
        lambda: nl.diversity(nl.AttentionFlow(affinity), u),
        lambda: nl.MarkovChain(affinity).law(u, 1),
        lambda: nl.denoise(lost, 0.1),
        lambda: nl.nonlocal_tv(image, 0.1),
        lambda: nl.estimate_sigma(lost),
        lambda: attention.mean_cosine(image),
    ):
        with pytest.raises(nl.InputError):
            call()


@pytest.mark.slow
@pytest.mark.parametrize("size", [1e-130, 1e-3, 1.0, 1e130])
def test_fractional_operators_at_any_scale(size: float) -> None:
    """(-Laplace)^s has the unit length^-2s: solutions grow like the power of the scale."""
    grid = nl.Grid(6, size, "isolated")
    for s in (1e-3, 0.5, 0.999):
        a, unit = nl.FractionalLaplacian(grid, s), nl.FractionalLaplacian(nl.Grid(6, 1.0, "isolated"), s)
        for scale in (1e-300, 1.0, 1e300):
            expected = [v * mpmath.mpf(size) ** (2 * s) * scale for v in exact(unit.solve(1.0).u)]
            if max(abs(v) for v in expected) > mpmath.mpf(float(np.finfo(float).max)):
                with pytest.raises(nl.NumericalError, match="rhs"):
                    a.solve(scale)
                continue
            found = a.solve(scale).u
            assert all(abs(v - w) <= 1e-9 * abs(w) + 1e-300 for v, w in zip(exact(found), expected, strict=True))
    with pytest.raises(nl.InputError, match="change the unit"):
        nl.FractionalLaplacian(nl.Grid(6, 1e-200, "isolated"), 0.5)
    with pytest.raises(nl.NumericalError, match="overflows"):
        nl.FractionalLaplacian(nl.Grid(6, 1e-3, "isolated"), 0.5).apply(np.full(6, 1e308))


# ---- functionals


@pytest.mark.slow
@pytest.mark.parametrize("problem", CASES, ids=lambda problem: problem.name)
def test_energies_and_gradients(problem: Case) -> None:
    """J, E and their gradients, or the error that says that no float holds them."""
    affinity, both = problem.affinity(), problem.symmetrized
    w, d = exact(problem.w), problem.degrees(both)
    moves, total = problem.transitions(both), mpmath.fdot(w, d)
    largest = mpmath.mpf(float(np.finfo(float).max))
    functional = nl.J(affinity)
    for name in ("usual", "constant", "tiny", "huge"):
        u = signals(problem.n, float)[name]
        v = exact(u)
        spread = max(v) - min(v)
        expected = problem.dirichlet(u)
        # J is the sum of products of u less its mean, at most the spread, and u - Pu; both differences are off by
        # roundings of u. Values are exponentials of sums of logarithms.
        off = problem.tolerance() * max(map(abs, v))
        allowed = 4 * total * (off * spread + off**2)
        misfit = mpmath.mpf(1e-300) * mpmath.fsum(a * b * c * c for a, b, c in zip(w, d, v, strict=True)) / 2
        values = ((functional, expected), (nl.E(affinity, 0 * u, 1e-300, measure="degree"), expected + misfit))
        for energy, value in values:
            if allowed < largest and value < largest * mpmath.mpf("0.999999"):
                logarithms = 0 if value == 0 else 2 * abs(mpmath.log(total)) + abs(mpmath.log(value)) + 1500
                slack = allowed + mpmath.mpf(2.0**-52) * logarithms * value + mpmath.mpf(5e-324) * problem.n
                assert abs(energy.value(u) - value) <= slack
            elif value - allowed > largest:
                with pytest.raises(nl.NumericalError, match=r"overflow|too large"):
                    energy.value(u)
        gradient = functional.gradient(u, "degree")
        by_degree = [v[i] - mpmath.fdot(moves[i, :], v) for i in range(problem.n)]
        slack = problem.tolerance() * max(map(abs, v)) + mpmath.mpf(5e-324) * problem.n
        assert max(abs(a - b) for a, b in zip(exact(gradient), by_degree, strict=True)) <= 2 * slack
        steep = [a * b for a, b in zip(by_degree, d, strict=True)]
        if max(d) > largest or min(d) < 1 / largest or max(map(abs, steep)) > largest:
            with pytest.raises(nl.NumericalError, match="degree"):
                functional.gradient(u, "l2")
        else:
            got = exact(functional.gradient(u, "l2"))
            slack = 2 * max(d) * slack + mpmath.mpf(5e-324) * problem.n
            # A degree is off by its logarithm's rounding.
            slack += max(map(abs, steep)) * max(abs(mpmath.log(x)) for x in d) * mpmath.mpf(2.0**-51)
            assert max(abs(a - b) for a, b in zip(got, steep, strict=True)) <= slack


@pytest.mark.parametrize("scale", [1e-300, 1e12, 1e300])
def test_matrix_fidelity_of_any_size(scale: float) -> None:
    """The minimizer of E with one matrix a node, against the linear system in 50 digits."""
    problem = case("two nodes")
    f = np.array([[1.0, -2.0], [0.5, 3.0]])
    matrix = np.array([[2.0, 1.0], [1.0, 2.0]]) * scale
    functional = nl.E(problem.affinity(), f, matrix[None], measure="degree")
    moves = problem.transitions(problem.symmetrized)
    with mpmath.workdps(700):  # a fidelity of 1e-300 is added to numbers of size 1
        system, right = mpmath.zeros(4), mpmath.zeros(4, 1)
        for i in range(2):
            for c in range(2):
                for j in range(2):
                    system[2 * i + c, 2 * j + c] += moves[i, 1 - i] * (1 if i == j else -1)  # 1 - P_ii, exactly
                for e in range(2):
                    system[2 * i + c, 2 * i + e] += mpmath.mpf(matrix[c, e])
                    right[2 * i + c] += mpmath.mpf(matrix[c, e]) * mpmath.mpf(f[i, e])
        expected = mpmath.lu_solve(system, right)
    found = functional.minimizer()
    # The residual is told relative to the right-hand side, below whose rounding it cannot fall for a tiny fidelity.
    assert found.success or scale < 1
    error = max(abs(a - b) for a, b in zip(exact(found.u), expected, strict=True))
    # The residual is within rtol of the right-hand side; the smallest eigenvalue of the system is that of the fidelity,
    # and the mean, which it multiplies alone, has been taken out.
    assert error <= 1e-9


@pytest.mark.parametrize("size", [1e-150, 1.0, 1e150])
def test_rulings_of_large_and_small_eigenvalues(size: float) -> None:
    found = attention.ruling(np.array([1.0, 0.5]), size * np.array([2.0, 1.0]), 1 / size)
    assert (found.verdict, found.smooth, found.other) == ("smoothing", pytest.approx(3.0), pytest.approx(2.0))


@pytest.mark.parametrize(
    ("alphas", "omegas", "scale", "words"),
    [
        ([], [1.0], 1.0, r"alphas: got shape \(0,\)"),
        ([1.0], [np.nan], 1.0, "omegas: got shape"),
        ([1.0], [1e300], 1e300, "omegas: got shape"),
        ([1.0], [1.0], 0.0, "scale: got 0"),
    ],
)
def test_eigenvalues_that_rule_nothing(alphas: Any, omegas: Any, scale: float, words: str) -> None:
    with pytest.raises(nl.InputError, match=words):
        attention.ruling(np.array(alphas), np.array(omegas), scale)
