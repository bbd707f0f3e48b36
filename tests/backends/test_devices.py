"""Devices by name, studies that run on tensors, and how the command line says what is not there."""

from __future__ import annotations

import sys
import types
from contextlib import nullcontext
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from typer.testing import CliRunner

from nlflow import J, affinity, run_study
from nlflow.affinities import pairs
from nlflow.backends.devices import CPU, DEVICES, DTYPES, Device, choose_device, found_devices
from nlflow.desk.commands import main as cli
from nlflow.desk.commands import study as cli_study
from nlflow.errors import FileFormatError, InputError, MemoryLimitError, format_bytes
from nlflow.kernels import ExpDotProduct, Gaussian, Laplace, TopHat
from nlflow.store.storage import load_record
from nlflow.studies.runner import KINDS
from nlflow.studies.settings import build
from tests.problems import torch_on_one_thread

torch = torch_on_one_thread()
gpu = pytest.importorskip("benchmarks.gpu")
KIND = "benchmark"

ON_TENSORS = [
    "cpu-tensors",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA here")),
]
KEYS, QUERIES = np.random.default_rng(0).normal(size=(2, 24, 3))
VALUES = np.random.default_rng(1).normal(size=(24, 2))
SHORT = [0.02, 0.01, 0.005]
EULER = {"integrator": "euler", "fidelity": 0, "dt": SHORT, "t": 0.5}
STUDIES: dict[str, tuple[str, dict[str, Any]]] = {
    "time": ("time-order", {"keys": KEYS, "values": VALUES, "fidelity": 0.5, "dt": SHORT, "t": 1.0}),
    "time, queries": ("time-order", {"keys": KEYS, "queries": QUERIES, "values": VALUES, "dt": SHORT, "t": 1.0}),
    "time, radial": ("time-order", {"keys": KEYS, "kernel": [Laplace(1.0), TopHat(2.0)], **EULER}),
    "time, signal": ("time-order", {"nodes": 12, "kernel": "dot", "channels": 3, **EULER}),
    "mixing": ("mixing", {"keys": KEYS, "values": VALUES, "kernel": [Gaussian(1.0), ExpDotProduct()]}),
    "mixing, queries": ("mixing", {"keys": KEYS, "queries": QUERIES, "origin": 3}),
    "equilibrium": ("equilibrium", {"keys": KEYS, "values": VALUES, "fidelity": [0.01, 0.1, 1]}),
    "equilibrium, queries": ("equilibrium", {"keys": KEYS, "queries": QUERIES, "fidelity": [0.1, 1, 10]}),
    "stability": ("stability", {"keys": KEYS, "kernel": Gaussian(1.0), "fidelity": [0.9, 1.1, 1.3]}),
    "stability, queries": ("stability", {"keys": KEYS, "queries": QUERIES, "fidelity": [0.3, 0.5, 0.7]}),
}


def fake_torch(*, cuda: bool = False, built: str | None = None, mps: bool = False) -> Any:
    return types.SimpleNamespace(
        __version__="9.9",
        version=types.SimpleNamespace(cuda=built),
        device=lambda name: types.SimpleNamespace(type=name),
        cuda=types.SimpleNamespace(
            is_available=lambda: cuda,
            device=nullcontext,
            device_count=lambda: int(cuda),
            get_device_name=lambda index: f"card {index}",
            mem_get_info=lambda: (10**9, 2 * 10**9),
            memory_reserved=lambda: 300,
            memory_allocated=lambda: 100,
        ),
        backends=types.SimpleNamespace(mps=types.SimpleNamespace(is_available=lambda: mps)),
    )


# ---- devices by name


def test_names_on_a_machine_with_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", fake_torch(cuda=True, built="13.0"))
    assert choose_device("cpu") == CPU
    assert choose_device("cuda") == choose_device("auto") == Device("cuda", "card 0", "9.9")
    assert choose_device("cpu-tensors") == Device("cpu-tensors", torch="9.9")
    assert [choose_device(name).tensors for name in ("cpu", "cuda", "cpu-tensors")] == [False, True, True]
    assert found_devices() == ["cpu", "cuda:0 card 0"]


@pytest.mark.parametrize(
    ("name", "torch_module", "message"),
    [
        ("cuda", fake_torch(), "got 'cuda', and there is cpu (torch 9.9 has no CUDA); install a build of it with CUDA"),
        (
            "cuda",
            fake_torch(built="13.0", mps=True),
            "there is cpu, mps (torch 9.9 is built for CUDA 13.0 and finds no",
        ),
        ("cuda", None, "-m pip install 'nlflow[torch]'"),
        ("cpu-tensors", None, "got 'cpu-tensors', which needs torch"),
        ("mps", fake_torch(mps=True), "got 'mps', which has no float64"),
        ("gpu", None, "got 'gpu', expected one of 'auto', 'cpu', 'cuda', 'mps', 'cpu-tensors'"),
    ],
)
def test_what_is_asked_for_and_missing(
    name: str, torch_module: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", torch_module)
    with pytest.raises(InputError) as caught:
        choose_device(name)
    assert str(caught.value).startswith("device: got ")
    assert message in str(caught.value)


@pytest.mark.parametrize("torch_module", [None, fake_torch(), fake_torch(built="13.0", mps=True)])
def test_auto_falls_back_to_the_cpu(torch_module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", torch_module)
    assert choose_device("auto") == CPU


def test_the_command_line_has_the_same_names() -> None:
    assert get_args(cli_study.DeviceName) == DEVICES
    assert get_args(cli_study.Dtype) == DTYPES


# ---- studies on tensors


# Each study with one of the methods; with the other it is slow.
@pytest.mark.parametrize(
    ("study", "method"),
    [
        pytest.param(study, method, marks=pytest.mark.slow if (number + turn) % 2 else [])
        for number, study in enumerate(STUDIES)
        for turn, method in enumerate(["dense", "tiled"])
    ],
)
@pytest.mark.parametrize("device", ON_TENSORS)
@pytest.mark.sampled(4)
def test_tables_are_those_of_numpy(study: str, device: str, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, options = STUDIES[study]
    expected = run_study(kind, **options).rows
    if method == "tiled":  # as beyond 2048 nodes; NumPy would take its loops over pairs
        monkeypatch.setattr(pairs, "_DENSE_NODES", 1)
    rows = run_study(kind, device=device, **options).rows
    assert len(rows) == len(expected)
    for row, other in zip(rows, expected, strict=True):
        assert row.keys() == other.keys()
        for name, value in other.items():
            if isinstance(value, float):
                # The rates of equilibria are read from distances that end at rounding.
                close = 2e-9 if kind == "equilibrium" and name in ("rate", "rate_ratio") else 1e-10
                assert row[name] == pytest.approx(value, rel=close, abs=close, nan_ok=True), name
            elif name not in ("used", "note") or other.get("distance", 1.0) > 1e-10:  # where does rounding begin?
                assert row[name] == value, name


@pytest.mark.parametrize("device", ON_TENSORS)
def test_signal_and_affinity_lie_on_the_device(device: str) -> None:
    place = choose_device(device)
    options = {"kernel": ExpDotProduct(), "keys": KEYS, "queries": QUERIES, "values": VALUES, "device": place}
    problem = build({**options, "dtype": "float32"}, np.random.default_rng(0))
    kind = "cuda" if device == "cuda" else "cpu"
    assert isinstance(problem.start, torch.Tensor)
    assert problem.affinity.average(problem.start).device.type == kind
    assert problem.start.dtype == problem.affinity.log_degree.dtype == torch.float32
    precise = build({**options, "dtype": "float32"}, np.random.default_rng(0), exact=True)
    assert precise.start.dtype == torch.float64
    assert torch.equal(precise.start.float(), problem.start), "the same data"
    assert torch.equal(precise.start, problem.start.double()), "rounded to float32"


def test_cases_run_on_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    inside = []  # bits of sums depend on the number of threads

    def measure(*_: Any) -> list[dict[str, Any]]:
        inside.append(torch.get_num_threads())
        return []

    monkeypatch.setattr(type(KINDS["stability"]), "measure", measure)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        run_study("stability", keys=KEYS, device="cpu-tensors")
        assert (inside, torch.get_num_threads()) == ([1], 2)
        with choose_device("cpu-tensors").guarded(10, 1, 1, "float64"):
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.slow
def test_auto_takes_the_cpu_where_tensors_do_not_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", fake_torch(cuda=True))
    options: dict[str, Any] = {"nodes": 12, "integrator": "euler", "fidelity": 0}
    result = run_study("time-order", device="auto", **options)
    assert result.rows == run_study("time-order", **options).rows
    assert result.options["device"]["fields"]["name"] == "cpu"


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("time-order", {"device": "cuda"}, "device: got 'cuda' for the kernel gaussian:width=0.1, which compares node"),
        (
            "mixing",
            {"device": "cuda", "kernel": ExpDotProduct(query_map=np.eye(3)), "keys": KEYS},
            "device: got 'cuda' for the kernel ExpDotProduct.* computed in NumPy",
        ),
        ("space-order", {"device": "auto"}, "device: the study 'space-order' has no such option: it runs on the CPU"),
        ("monte-carlo", {"device": "cuda"}, "device: the study 'monte-carlo' has no such option: it runs on the CPU"),
        ("mixing", {"dtype": "float32"}, "dtype: the study 'mixing' has no such option: it computes in float64"),
        ("stability", {"dtype": "bfloat16"}, "dtype: got 'bfloat16', expected one of 'float64', 'float32'"),
    ],
)
def test_what_does_not_go_together(kind: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        run_study(kind, **options)


@pytest.mark.slow
def test_a_folder_is_not_continued_on_another_device(tmp_path: Path) -> None:
    options: dict[str, Any] = {"keys": KEYS, "integrator": "euler", "fidelity": 0, "metric": "degree", "out": tmp_path}
    run_study("time-order", **options)
    with pytest.raises(FileFormatError, match="holds another study: device is"):
        run_study("time-order", device="cpu-tensors", **options)


# ---- single precision


@pytest.mark.slow
def test_orders_in_single_precision() -> None:
    options: dict[str, Any] = {"keys": KEYS, "values": VALUES, "metric": "degree", "fidelity": 0}
    double = run_study("time-order", **options)
    for device in ("cpu", "cpu-tensors"):
        single = run_study("time-order", dtype="float32", device=device, **options)
        for fit in single.fits:
            assert fit.passed is (None if "runge-kutta" in fit.name else True), fit
        for row, exact in zip(single.rows, double.rows, strict=True):
            assert row["dt"] == pytest.approx(exact["dt"], rel=1e-6)
            # The error of the step and the rounding of all steps, which float32 adds to it.
            assert row["error"] == pytest.approx(exact["error"], rel=1e-3, abs=1.2e-7 * row["t"] / row["dt"] + 1e-6)
        high = [row for row in single.rows if row["order"] == 5]
        assert {row["note"] for row in high} == {"rounding level"}
        assert min(row["error"] for row in high) > 1e-9, "float32 cannot be that close to the reference"


@pytest.mark.slow
def test_what_the_rounding_of_steps_adds_up_to_is_not_fitted() -> None:
    options: dict[str, Any] = {"kernel": "dot", "nodes": 30, "channels": 2, "integrator": "semi-implicit"}
    result = run_study("time-order", dtype="float32", metric="l2", fidelity=0, **options)
    assert [fit.passed for fit in result.fits] != [False]
    assert max(row["error"] for row in result.rows if not row["used"]) > 1e-5, "it had added up"


# ---- memory


def test_estimate_and_largest_number_of_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    device = choose_device("cpu-tensors")
    monkeypatch.setenv("NLFLOW_MEMORY_LIMIT", str(10**9))
    with pytest.raises(MemoryLimitError) as caught:
        device.check_fits(10**7, 64, 3, "float32")
    text = str(caught.value)
    needed = 4 * (10**7 * (8 * 64 + 12 * 3 + 64) + 5 * 2048**2)
    assert f"10000000 nodes with 64 feature(s) and 3 channel(s) in float32 need about {format_bytes(needed)}" in text
    assert "on cpu-tensors, where 953.7 MiB are free" in text
    largest = int(text.split("; about ")[1].split()[0])
    assert device.check_fits(largest, 64, 3, "float32") == 10**9
    with pytest.raises(MemoryLimitError):
        device.check_fits(largest + 1, 64, 3, "float32")


def test_studies_are_refused_before_anything_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NLFLOW_MEMORY_LIMIT", str(10**4))
    with pytest.raises(
        MemoryLimitError, match=r"24 nodes with 3 feature\(s\) and 2 .* nodes fit at most.* \[in the case"
    ):
        run_study("time-order", keys=KEYS, values=VALUES, device="cpu-tensors", metric="degree", fidelity=0)


def test_free_memory_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NLFLOW_MEMORY_LIMIT", raising=False)
    monkeypatch.setitem(sys.modules, "torch", fake_torch(cuda=True))
    assert choose_device("cuda").free_bytes() == 10**9 + 200
    monkeypatch.setenv("NLFLOW_MEMORY_LIMIT", "4096")
    assert choose_device("cuda").free_bytes() == 4096


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), MemoryLimitError),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), MemoryLimitError),
        (RuntimeError("something else"), RuntimeError),
    ],
)
def test_out_of_memory_on_the_way(error: Exception, expected: type, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(*_: Any) -> Any:
        raise error

    monkeypatch.setattr(type(KINDS["stability"]), "measure", measure)
    with pytest.raises(expected) as caught:
        run_study("stability", keys=KEYS, kernel="dot", device="cpu-tensors")
    assert type(caught.value) is expected
    if expected is MemoryLimitError:
        assert "24 nodes with 3 feature(s) and 1 channel(s) in float64 need about" in str(caught.value)
        assert "about 12 nodes fit at most" in str(caught.value)


# ---- the command line


def run(*arguments: str) -> Any:
    return CliRunner().invoke(cli.app, list(arguments), prog_name="nonlocal", catch_exceptions=False)


def test_a_device_that_is_missing_is_wrong_usage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", fake_torch())
    result = run("study", "time-order", "--device", "cuda")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "Invalid value for --device: got 'cuda', and there is cpu (torch 9.9 has no CUDA)" in result.stderr
    assert run("study", "time-order", "--device", "gpu").exit_code == 2
    assert run("denoise", "in.png", "out.png", "--device", "cuda").exit_code == 2
    result = run("demo", "--device", "cuda")  # this has none, and says so
    assert result.exit_code == 2
    assert "No such option: --device" in result.stderr


@pytest.mark.slow
def test_study_with_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    np.save("k.npy", KEYS)
    words = ["study", "time-order", "--keys", "k.npy", "--integrator", "euler", "--dtype", "float32"]
    on_tensors = run(*words, "--device", "cpu-tensors")
    assert on_tensors.exit_code == 0
    expected = run_study("time-order", keys=KEYS, integrator="euler", dtype="float32", device="cpu-tensors")
    assert on_tensors.stdout.startswith(expected.report())
    result = run("study", "time-order", "--device", "cpu-tensors")
    assert result.exit_code == 1
    assert result.stderr.startswith("nonlocal: error: device: got 'cpu-tensors' for the kernel gaussian:width=0.1")


# ---- the benchmark


def test_benchmark_keeps_every_row_and_leaves_out_what_would_take_too_long(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = gpu.Log(tmp_path, "cpu", 100.0)
    log.run("step", 1024, lambda: {"seconds": 1.0, "repeats": 5}, 0.3, d=8)
    assert load_record(tmp_path / "gpu.json", KIND)["rows"][0]["seconds"] == 1.0
    log.run("step", 4096, lambda: pytest.fail("begun"), 0.15, d=8)  # 16 s, once
    log.run("step", 4096, lambda: {"status": "not supported"}, 0.3, d=8)
    log.run("step", 2048, lambda: 1 / 0, d=8)  # 24 s of what a busy machine leaves of 100
    rows = load_record(tmp_path / "gpu.json", KIND)["rows"]
    assert [row["status"].split(":")[0] for row in rows] == ["measured", "left out", "not supported", "failed"]
    assert "left out: about 16 s" in capsys.readouterr().out
    log.run("denoise", 500, lambda: {"seconds": 2.0, "repeats": 1, "psnr": 30.0}, kind="image", shape="500x500")
    log.run("denoise", 5000, lambda: pytest.fail("begun"), 0.3, kind="image", shape="5000x5000")
    log.add(what="denoise", peer="other", status="published, not measured here")
    text = (tmp_path / "gpu.md").read_text()
    assert "The run was cut short" in text
    assert "| d | n | seconds | repeats |  |\n|---|---|---|---|---|\n| 8 | 2^10 | 1 | 5 |  |\n" in text
    assert "| image | 500x500 | 2 | 1 | 30 |  |\n| image | 5000x5000 |  |  |  | left out: about 200 s" in text
    assert "## The denoiser, elsewhere" in text
    log.add(finished=True)
    assert "cut short" not in (tmp_path / "gpu.md").read_text()


def test_benchmark_holds_steps_and_energies_against_sums_in_double_precision() -> None:
    keys, values = gpu.problem(200, 8, torch.float32, "cpu")
    step = gpu.average_by("nlflow", keys, values)
    assert gpu.error_of(step(), keys, values) < 1e-6
    assert gpu.error_of(step() * 1.01, keys, values) > 1e-4
    for kernel in (ExpDotProduct(), Laplace(2.0)):
        dense = affinity(kernel, gpu.domain(200), keys.double().numpy(), method="dense")
        expected = J(dense).value(values.double().numpy())
        assert gpu.energy_by_sums(kernel, keys, values) == pytest.approx(expected, rel=1e-12)


def test_benchmark_of_flows() -> None:
    flow, limit = gpu.j_flow(128, "cpu"), gpu.equilibrium(128, "cpu")
    assert flow["conserved"]
    assert flow["energy"][1] < flow["energy"][0]
    assert limit["success"]
    assert limit["gradient"] < 1e-4
