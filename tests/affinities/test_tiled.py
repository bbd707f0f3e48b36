"""Affinities of torch features without a matrix: numbers, memory, and what stays on the device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import nlflow as nl
from tests.covering import pairs
from tests.problems import devices, torch_on_one_thread, unchecked

pytestmark = pytest.mark.numerical

torch = torch_on_one_thread()
dispatch = pytest.importorskip("torch.utils._python_dispatch", reason="torch is optional")

DEVICES = devices()
N = 90
KERNELS = {
    "gaussian": (nl.Gaussian(1.5), False, True),
    "narrow gaussian": (nl.Gaussian(0.05), False, False),
    "laplace": (nl.Laplace(1.0), False, False),
    "top hat": (nl.TopHat(1.5), False, False),
    "dot product": (nl.ExpDotProduct(), False, True),
    "queries": (nl.ExpDotProduct(scale=0.7), True, True),
    "steep queries": (nl.ExpDotProduct(scale=40.0), True, True),
}
"""Kernel, whether queries are not keys, whether averages are fused attention."""
ROUNDING = {"float64": 1e-13, "float32": 4e-6}
FEATURES, QUERIES = np.random.default_rng(0).normal(size=(2, N, 4))
SIGNAL = np.random.default_rng(1).normal(size=(N, 6))
WEIGHTS = {"equal": None, "uneven": np.random.default_rng(2).uniform(0.5, 2, N)}


def both(name: str, weights: str, dtype: str, device: str = "cpu") -> tuple[nl.Affinity, nl.Affinity]:
    """Return the dense affinity in NumPy and float64, and the one under test, of the same features."""
    kernel, asymmetric, _ = KERNELS[name]
    domain = nl.Points(np.arange(float(N)), weights=WEIGHTS[weights])
    x, q = (a.astype(dtype) for a in (FEATURES, QUERIES))
    reference = nl.affinity(
        kernel, domain, x.astype("float64"), queries=q.astype("float64") if asymmetric else None, method="dense"
    )
    x, q = (torch.from_numpy(a).to(device) for a in (x, q))
    return reference, nl.affinity(kernel, domain, x, queries=q if asymmetric else None, method="tiled")


def test_rows_begin_where_kernels_of_gpus_load() -> None:
    """A piece of a wider tensor begins anywhere, and kernels end with "misaligned address"."""
    from nlflow.backends.torch import attention

    wide, flat = torch.randn(1, 1, 5, 181), torch.randn(1 + 5 * 128)
    for view in (wide[..., :128], flat[1:].reshape(1, 1, 5, 128), wide[..., :128].contiguous()):
        aligned = attention._aligned(view)
        assert torch.equal(aligned, view)
        assert aligned.stride()[-2] == 128
        assert aligned.storage_offset() % 4 == 0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("precision", "near"), [(None, 1e-5), ("bfloat16", 0.05)])
def test_an_odd_number_of_channels(precision: str | None, near: float, device: str) -> None:
    x, u = torch.from_numpy(FEATURES).float().to(device), torch.randn(N, 181).to(device)
    p = nl.affinity(nl.ExpDotProduct(), nl.Points(np.arange(float(N))), x, method="tiled", precision=precision)
    expected = torch.softmax(x.double() @ x.double().T / 2, 1) @ u.double()
    np.testing.assert_allclose(host(p.average(u).double()), host(expected), rtol=0, atol=near)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA here")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_more_items_than_one_launch_takes(dtype: torch.dtype) -> None:
    from nlflow.backends.torch import attention

    q, k, v = torch.randn(3, 70_000, 2, 8, device="cuda", dtype=dtype)
    whole = attention.attend(q, k, v, attention.Form())
    parts = torch.cat(
        [attention.attend(*(x[at : at + 7000] for x in (q, k, v)), attention.Form()) for at in range(0, 70_000, 7000)]
    )
    assert torch.equal(whole, parts)


def host(tensor: Any) -> Any:
    return tensor.cpu().numpy()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("name", "weights", "dtype"), pairs(list(KERNELS), list(WEIGHTS), list(ROUNDING)))
def test_numbers_are_those_of_the_dense_matrix(name: str, weights: str, dtype: str, device: str) -> None:
    reference, p = both(name, weights, dtype, device)
    atol = ROUNDING[dtype] * (20 if name == "steep queries" else 1)
    assert p.method == "tiled"
    assert p.fused is KERNELS[name][2] or device != "cpu"
    for u in (SIGNAL, SIGNAL[:, 0], np.tile(SIGNAL, 30)):  # more channels than are taken at a time, too
        u = u.astype(dtype)
        got = p.average(torch.from_numpy(u).to(device))
        assert got.dtype == getattr(torch, dtype)
        assert got.device.type == device
        np.testing.assert_allclose(host(got), reference.average(u.astype("float64")), rtol=0, atol=atol)
    np.testing.assert_allclose(host(p.log_degree), reference.log_degree, rtol=0, atol=5 * atol)
    law = np.abs(SIGNAL).astype(dtype)
    np.testing.assert_allclose(
        host(p.push(torch.from_numpy(law).to(device))), reference.push(law.astype("float64")), rtol=0, atol=10 * atol
    )
    symmetric, expected = p.symmetrized(), reference.symmetrized()
    u = SIGNAL.astype(dtype)
    np.testing.assert_allclose(
        host(symmetric.average(torch.from_numpy(u).to(device))),
        expected.average(u.astype("float64")),
        rtol=0,
        atol=atol,
    )
    np.testing.assert_allclose(host(symmetric.log_degree), expected.log_degree, rtol=0, atol=5 * atol)


@pytest.mark.parametrize("unit", [1e-60, 1e60])
@pytest.mark.parametrize("name", ["laplace", "queries"])
def test_the_unit_of_the_weights_does_not_matter(name: str, unit: float) -> None:
    kernel, asymmetric, _ = KERNELS[name]
    x, q, u = (torch.from_numpy(a.astype("float32")) for a in (FEATURES, QUERIES, SIGNAL))
    averages, logs = [], []
    for factor in (1.0, unit):
        domain = nl.Points(np.arange(float(N)), weights=WEIGHTS["uneven"] * factor)
        p = nl.affinity(kernel, domain, x, queries=q if asymmetric else None, method="tiled")
        averages.append(host(p.average(u)))
        logs.append(host(p.log_degree) - np.log(factor))
    np.testing.assert_allclose(*averages, rtol=0, atol=1e-6)
    np.testing.assert_allclose(*logs, rtol=0, atol=1e-4)


class Watch(dispatch.TorchDispatchMode):  # type: ignore[name-defined,misc]  # of a module that may be missing
    """Notes the largest tensor that is formed, and how often a number is asked for by the host."""

    def __init__(self) -> None:
        super().__init__()
        self.largest, self.asked = 0, 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function is torch.ops.aten._local_scalar_dense.default:
            self.asked += 1
        for out in result if isinstance(result, tuple | list) else (result,):
            if isinstance(out, torch.Tensor):
                self.largest = max(self.largest, out.numel())
        return result


@pytest.mark.slow
@pytest.mark.parametrize(
    "kernel", [nl.ExpDotProduct(), nl.Gaussian(1.0), nl.Laplace(1.0)], ids=lambda k: type(k).__name__
)
@pytest.mark.sampled(1)
def test_no_tensor_has_the_size_of_the_matrix(kernel: Any) -> None:
    n = 9000  # a matrix of 8.1e7 entries
    x = torch.from_numpy(np.random.default_rng(3).normal(size=(n, 4)).astype("float32"))
    with Watch() as watch:
        p = nl.affinity(kernel, nl.Points(np.arange(float(n))), x)
        assert p.method == "tiled"
        p.average(x)
        assert p.log_degree.shape == (n,)
    assert watch.largest <= 2**26 / 4
    assert p.memory_bytes <= 4 * n * (2 * 4 + 2 * 5 + 1)


FLOWS = {
    "J": lambda p, f: nl.GradientFlow(nl.J(p), metric="degree"),
    "E": lambda p, f: nl.GradientFlow(nl.E(p, f, 0.3), metric="degree"),
    "attention": lambda p, f: nl.AttentionFlow(p, f, 0.3),
}
INTEGRATORS = {
    "euler": nl.ExplicitEuler(0.05),
    "semi-implicit": nl.SemiImplicit(0.05),
    "exponential": nl.Exponential(),
}


CASES = [
    (name, integrator, flow)
    for name in ("gaussian", "laplace", "queries")
    for integrator in INTEGRATORS
    for flow in FLOWS
    if (name, integrator, flow) != ("queries", "exponential", "attention")  # which is for symmetric flows
]


@pytest.mark.parametrize(("name", "integrator", "flow"), CASES)
@pytest.mark.sampled(6)
@pytest.mark.on_cpu("forbids copies to the host, by which `make device` looks at tensors")
def test_the_time_loop_asks_the_device_for_nothing(
    name: str, integrator: str, flow: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, p = both(name, "uneven", "float64")
    f = torch.from_numpy(SIGNAL)
    problem = FLOWS[flow](p, f)
    copies: list[int] = []
    tolist = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: (copies.append(1), tolist(self))[1])
    asked = []
    for steps in (4, 12):
        copies.clear()
        with Watch() as watch:
            nl.solve(problem, f, t=0.05 * steps, integrator=INTEGRATORS[integrator])
        asked.append((watch.asked, len(copies)))  # numbers, and many of them at once
    assert asked[0] == asked[1]
    # A tensor of another device would not be copied by these, but refused.
    for leak in ("cpu", "numpy", "__array__"):
        monkeypatch.setattr(torch.Tensor, leak, lambda *_, leak=leak: pytest.fail(f"copied to the host by {leak}"))
    solution = nl.solve(problem, f, t=0.3, integrator=INTEGRATORS[integrator])
    assert isinstance(solution.u, torch.Tensor)


def everything(p: nl.Affinity, u: Any, f: Any) -> dict[str, Any]:
    """Return what every functional, flow, integrator, chain and equilibrium makes of an affinity and signals."""
    result: dict[str, Any] = {}
    functionals = {
        "J": nl.J(p),
        "E, l2": nl.E(p, f, 0.4),
        "E, degree": nl.E(p, f, 0.4, measure="degree"),
    }
    for name, functional in functionals.items():
        result[f"{name}: value"] = functional.value(u)
        for metric in ("l2", "degree"):
            result[f"{name}: gradient, {metric}"] = functional.gradient(u, metric)
        if name != "J":
            result[f"{name}: minimizer"] = functional.minimizer(rtol=1e-12).u
        flow = nl.GradientFlow(functional, metric="degree")
        integrators = {
            "euler": nl.ExplicitEuler(0.3),
            "semi-implicit": nl.SemiImplicit(0.5),
            "runge-kutta": nl.RungeKutta(rtol=1e-10, atol=1e-12),
            "exponential": nl.Exponential(tol=1e-12),
            **({"attention step": nl.AttentionStep()} if name == "J" else {}),
        }
        for how, integrator in integrators.items():
            solution = nl.solve(flow, u, t=3.0, integrator=integrator, trackers=[nl.DistanceToConstant(), nl.Energy()])
            assert solution.success, (name, how, solution.message)
            result[f"{name}: {how}"] = solution.final
            result[f"{name}: {how}, energy"] = solution.energy
            result[f"{name}: {how}, distance"] = solution.records["distance"]["value"][-1]
    attention = nl.AttentionFlow(p, f, 0.4)
    result["NeuTRENO"] = nl.solve(attention, u, t=4.0, integrator=nl.NeutrenoStep()).final
    result["NeuTRENO: equilibrium"] = nl.equilibrium(attention).u
    result["NeuTRENO: diversity"] = nl.diversity(attention, u)
    result["NeuTRENO: bounds"] = np.array(nl.diversity_bounds(attention))
    result["attention: equilibrium"] = nl.equilibrium(nl.AttentionFlow(p), u).u
    chain = nl.MarkovChain(p)
    result["chain: expectation"] = chain.expectation(u, 3)
    result["chain: limit"] = chain.limit(u)
    result["chain: stationary"] = chain.stationary
    result["chain: second eigenvalue"] = abs(chain.second_eigenvalue)
    result["chain: mixing time"] = float(chain.mixing_time())
    return result


# Each kernel with one of the methods; with the other it is slow.
@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("name", "method"),
    [
        pytest.param(name, method, marks=pytest.mark.slow if (number + turn) % 2 else [])
        for number, name in enumerate(["gaussian", "laplace", "dot product", "queries"])
        for turn, method in enumerate(["dense", "tiled"])
    ],
)
@pytest.mark.sampled(2)
def test_everything_is_what_the_dense_matrix_gives(name: str, method: str, device: str) -> None:
    kernel, asymmetric, _ = KERNELS[name]
    n = 30
    domain = nl.Points(np.arange(float(n)), weights=np.random.default_rng(4).uniform(0.5, 2, n) / n)
    x, q, u, f = np.random.default_rng(5).normal(size=(4, n, 3))
    queries = q if asymmetric else None
    expected = everything(nl.affinity(kernel, domain, x, queries=queries, method="dense"), u, f)
    x, q, u, f = (torch.from_numpy(a).to(device) for a in (x, q, u, f))
    queries = q if asymmetric else None
    got = everything(nl.affinity(kernel, domain, x, queries=queries, method=method), u, f)
    assert got.keys() == expected.keys()
    for what, value in got.items():
        there = host(value) if isinstance(value, torch.Tensor) else value
        size = np.abs(expected[what]).max()
        np.testing.assert_allclose(there, expected[what], rtol=0, atol=2e-9 * max(size, 1.0), err_msg=what)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("precision", ["bfloat16", None])
def test_wide_features(precision: str | None, device: str) -> None:
    x, u = np.random.default_rng(6).normal(size=(2, N, 300)).astype("float32")
    domain = nl.Points(np.arange(float(N)))
    expected = nl.affinity(nl.ExpDotProduct(), domain, x.astype("float64"), method="dense").average(u.astype("float64"))
    tensors = [torch.from_numpy(a).to(device) for a in (x, u)]
    p = nl.affinity(nl.ExpDotProduct(), domain, tensors[0], method="tiled", precision=precision)
    atol = 1e-5 if precision is None else 0.1
    np.testing.assert_allclose(host(p.average(tensors[1])), expected, rtol=0, atol=atol)


def test_an_evolving_kernel_on_tensors() -> None:
    x = torch.from_numpy(FEATURES)
    ends = []
    for method in ("dense", "tiled"):
        p = nl.affinity(nl.ExpDotProduct(), nl.Points(np.arange(float(N))), x, method=method)
        flow = nl.AttentionFlow(p, evolving=True)
        ends.append(host(nl.solve(flow, x, t=3.0, integrator=nl.AttentionStep()).final))
    np.testing.assert_allclose(*ends, rtol=0, atol=1e-12)


def test_an_overflow_is_found_on_a_device() -> None:
    _, p = both("laplace", "equal", "float64")
    flow = nl.GradientFlow(nl.J(p), metric="degree")
    unstable = unchecked(nl.ExplicitEuler(100.0))
    rising = nl.solve(flow, torch.from_numpy(SIGNAL), t=1e6, integrator=unstable)
    assert rising.status is nl.Status.DIVERGED
    assert "the energy rose" in rising.message
    solution = nl.solve(flow, torch.from_numpy(SIGNAL), t=1e6, integrator=unstable, energies=False)
    assert not solution.success
    assert "overflowed" in solution.message
    assert solution.stats["steps"] < 300


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"features": FEATURES, "method": "tiled"}, "method: got 'tiled', expected 'pairwise' for NumPy"),
        ({"method": "pairwise"}, "method: got 'pairwise', expected 'auto', 'dense' or 'tiled' for features in torch"),
        ({"queries": torch.zeros(N, 3, dtype=torch.float64)}, "queries: got width 3, expected 4"),
        ({"queries": torch.zeros(N, 4)}, "queries: got Tensor of torch.float32, expected Tensor of torch.float64"),
        ({"memory_limit": 1000.0, "method": "tiled"}, "sums over 90 nodes with 4 features needs"),
    ],
    ids=["NumPy", "method", "width", "dtype", "memory"],
)
def test_bad_input(arguments: dict[str, Any], words: str) -> None:
    given = {"features": torch.from_numpy(FEATURES), **arguments}
    with pytest.raises(nl.NlflowError, match=words):
        nl.affinity(nl.ExpDotProduct(), nl.Points(np.arange(float(N))), **given)


def test_signals_of_another_dtype_or_kind() -> None:
    _, p = both("gaussian", "equal", "float64")
    with pytest.raises(nl.InputError, match=r"u: got dtype torch.float32, expected torch.float64"):
        p.average(torch.zeros(N))
    with pytest.raises(nl.InputError, match=r"u: got dtype float64, expected torch.float64"):
        p.average(SIGNAL)
    with pytest.raises(nl.InputError, match=r"u: got 1 NaN"):
        p.average(torch.tensor([np.nan] + [0.0] * (N - 1), dtype=torch.float64))


@pytest.mark.parametrize("name", ["dot product", "queries"])
@pytest.mark.parametrize("precision", ["bfloat16", "float16", "float32"])
def test_half_precision_inside_averages(precision: str, name: str) -> None:
    kernel, asymmetric, _ = KERNELS[name]
    domain = nl.Points(np.arange(float(N)), weights=WEIGHTS["uneven"])
    x, q = (torch.from_numpy(a.astype("float32")) for a in (FEATURES, QUERIES))
    queries = q if asymmetric else None
    p = nl.affinity(kernel, domain, x, queries=queries, precision=precision)
    coarse = [a.to(getattr(torch, precision)).double().numpy() for a in (x, q)]
    reference = nl.affinity(kernel, domain, coarse[0], queries=coarse[1] if asymmetric else None, method="dense")
    u = torch.from_numpy(1000 + SIGNAL.astype("float32"))  # what is lost is a share of the deviation
    got = p.average(u)
    assert got.dtype == torch.float32
    digits = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-23}[precision]
    error = np.abs(host(got).astype("float64") - reference.average(u.double().numpy())).max()
    assert error <= 8 * digits + 2e-4  # and a rounding of 1000 in float32
    np.testing.assert_allclose(host(p.log_degree), reference.log_degree, rtol=0, atol=16 * digits)
    constant = p.average(torch.full((N,), 3.25))
    assert float((constant - 3.25).abs().max()) <= 1e-6


def test_half_precision_rounds_no_value_that_it_holds() -> None:
    """Values on its grid, whose mean is less than their spacing: all would be rounded back by the mean, to one side."""
    n = 2048
    x = torch.randn(n, 4, generator=torch.Generator().manual_seed(3))
    u = torch.randn(n, 3, generator=torch.Generator().manual_seed(4)).bfloat16().float() + 0.0
    p = nl.affinity(
        nl.ExpDotProduct(scale=0.1), nl.Points(np.arange(float(n))), x, precision="bfloat16", method="tiled"
    )
    coarse = x.bfloat16().double()
    expected = torch.softmax(0.1 * coarse @ coarse.T, 1) @ u.double()
    error = (p.average(u).double() - expected).abs().max()
    assert float(u.mean(0).abs().max()) > 5e-3  # by which they would be off
    assert float(error) < 1e-3


def test_half_precision_of_short_range_keeps_large_and_small_values() -> None:
    x = torch.from_numpy(FEATURES).float()
    p = nl.affinity(nl.ExpDotProduct(), nl.Points(np.arange(float(N))), x, precision="float16")
    u = torch.from_numpy(SIGNAL).float()
    expected = p.average(u)
    for factor in (2.0**40, 2.0**-40):
        torch.testing.assert_close(p.average(factor * u), factor * expected, rtol=1e-6, atol=0)


def test_half_precision_where_it_cannot_hold() -> None:
    def build(x: Any, precision: str) -> nl.Affinity:
        return nl.affinity(
            nl.ExpDotProduct(scale=1e-9), nl.Points(np.arange(float(len(x)))), x, method="tiled", precision=precision
        )

    large = torch.tensor([[7e4], [1.0]])
    with pytest.raises(
        nl.InputError, match=r"precision: got 'float16' for features up to 7e\+04, expected at most 65504"
    ):
        build(large, "float16")
    build(large, "bfloat16")
    many = torch.zeros(2**17 + 1, 1)
    with pytest.raises(nl.InputError, match="got 'float16' for 131073 keys, expected 'bfloat16' beyond 131072"):
        build(many, "float16")
    build(many, "bfloat16")
    build(many[1:], "float16")
    steep = torch.tensor([[400.0], [-400.0]])
    with pytest.warns(
        nl.NlflowWarning, match=r"rounded to bfloat16 may move logits by 1.25, and weights by a factor 3.49"
    ):
        nl.affinity(nl.ExpDotProduct(scale=1e-3), nl.Points([0.0, 1.0]), steep, precision="bfloat16")


def test_degrees_are_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """They cost what an average does; energies, means and measures all ask for them."""
    from nlflow.backends.torch.sums import TorchSums

    passes = []
    for name in ("average", "log_totals", "log_totals_wide"):
        original = getattr(TorchSums, name)
        monkeypatch.setattr(
            TorchSums, name, lambda self, *a, name=name, of=original: (passes.append(name), of(self, *a))[1]
        )
    for name in ("dot product", "laplace", "steep queries"):
        p = both(name, "uneven", "float32")[1].symmetrized()
        passes.clear()
        for _ in range(3):
            p.measure("degree", torch.from_numpy(SIGNAL).float())
            nl.J(p).value(torch.from_numpy(SIGNAL).float())
        assert max(passes.count("log_totals"), passes.count("log_totals_wide")) <= 2  # of k and its transpose


@pytest.mark.on_cpu("names the kernels of the CPU")
def test_the_reason_says_what_sums() -> None:
    x = torch.from_numpy(FEATURES).float()
    domain = nl.Points(np.arange(float(N)))
    reasons = {
        name: nl.affinity(kernel, domain, x, method="tiled", **words).reason
        for name, kernel, words in (
            ("fused", nl.ExpDotProduct(), {"precision": "bfloat16"}),
            ("laplace", nl.Laplace(1.0), {}),
            ("window", nl.ExpDotProduct(), {"mask": nl.Mask(window=3)}),
        )
    }
    assert reasons["fused"] == "asked for; fused by FlashAttention of the CPU, for bfloat16 of 4 columns on cpu"
    assert (
        "in tiles: fused attention is for dot products and wide Gaussians, not for this Laplace" in reasons["laplace"]
    )
    assert "in blocks of 64 nodes and what they see, fused by" in reasons["window"]


def test_half_precision_where_there_is_no_kernel_for_it() -> None:
    x, domain = torch.from_numpy(FEATURES), nl.Points(np.arange(float(N)))
    for half in ("bfloat16", "float16"):
        for kernel in (nl.Laplace(1.0), nl.Gaussian(0.001), nl.TopHat(0.5)):
            name = type(kernel).__name__
            message = f"precision: got '{half}', expected 'float32' or 'float64' for {name}"
            with pytest.raises(nl.InputError, match=message):
                nl.affinity(kernel, domain, x, precision=half)
    with pytest.raises(nl.InputError, match="precision: got 'int8', expected one of"):
        nl.affinity(nl.ExpDotProduct(), domain, x, precision="int8")
    for arguments in ({"features": FEATURES}, {"features": x, "method": "dense"}):
        with pytest.raises(nl.InputError, match="precision: only method='tiled'"):
            nl.affinity(nl.ExpDotProduct(), domain, precision="float32", **arguments)
    with pytest.raises(nl.InputError, match="precision: only affinities of torch features"):
        nl.affinity(nl.Gaussian(1.0), domain, precision="float32")


@pytest.mark.parametrize("own", [True, False], ids=["queries", "keys"])
@pytest.mark.parametrize(("extra", "itemsize"), [("nothing", 0), ("missing", 8), ("bfloat16", 2)])
def test_memory_of_queries_of_their_own(own: bool, extra: str, itemsize: int) -> None:
    """Queries and keys count once each, and again where sums keep them in another form; then the degree."""
    n, d = 24, 4
    keys, queries = (torch.from_numpy(a) for a in np.random.default_rng(0).standard_normal((2, n, d)))
    present = np.arange(n) > 2
    p = nl.affinity(
        nl.ExpDotProduct(), nl.Points(np.arange(float(n)), np.ones(n)), keys, queries=queries if own else None,
        method="tiled", mask=nl.Mask(present=present) if extra == "missing" else None,
        precision="bfloat16" if extra == "bfloat16" else None,
    )  # fmt: skip
    tables = 2 if own else 1
    again = {"nothing": 0, "missing": 2 * n * (d + 1), "bfloat16": tables * n * d}[extra]
    assert p.memory_bytes == 8 * tables * n * d + itemsize * again
    assert p.log_degree.shape == (n,)
    assert p.memory_bytes == 8 * tables * n * d + itemsize * again + 8 * n


@pytest.mark.parametrize("method", ["dense", "tiled"])
def test_what_the_caller_allows_products_elsewhere_takes_no_digits(method: str) -> None:
    x, u = (torch.randn(40, 3, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))

    def found() -> list[Any]:
        p = nl.affinity(nl.Laplace(1.0), nl.Points(np.arange(40.0)), x, method=method)
        flow = nl.GradientFlow(nl.E(p, u, 1.0), "degree")
        return [p.average(u), p.log_degree, nl.solve(flow, u, t=1.0).u, flow.functional.minimizer().u]

    expected = found()
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        with torch.autocast(x.device.type, torch.bfloat16):
            assert all(torch.equal(one, other) for one, other in zip(found(), expected, strict=True))
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)
