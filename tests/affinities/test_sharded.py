"""Affinities whose nodes are shared out among processes: the numbers of one process, its memory divided, its errors."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.problems import torch_on_one_thread

torch = torch_on_one_thread()
if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
    pytest.skip("torch is built without gloo", allow_module_level=True)

import nlflow as nl  # noqa: E402
from nlflow.affinities import sharded  # noqa: E402
from nlflow.errors import InputError  # noqa: E402
from tests import sharded_run  # noqa: E402

SCRIPT = sharded_run.__file__
ONE_THREAD = {
    "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
    "PYTHONPATH": os.pathsep.join([str(Path(SCRIPT).parents[1]), os.environ.get("PYTHONPATH", "")]),
}  # fmt: skip


@pytest.fixture(scope="module")
def by_torchrun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("two") / "out"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    subprocess.run([*command, SCRIPT, "numbers", str(out)], env={**os.environ, **ONE_THREAD}, check=True, timeout=600)
    return out


def processes(job: str, out: Path, count: int) -> list[int]:
    """Run a job in processes that torchrun knows nothing of, and return how each ended."""
    started = [
        subprocess.Popen(
            [sys.executable, SCRIPT, job, str(out)],
            env={**os.environ, **ONE_THREAD, "RANK": str(rank), "WORLD_SIZE": str(count), "INIT": f"file://{out}.init"},
        )
        for rank in range(count)
    ]
    try:
        return [process.wait(600) for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def by_two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run the few sums that are cheap; what torchrun starts does the others."""
    out = tmp_path_factory.mktemp("basics") / "out"
    assert processes("basics", out, 2) == [0, 0]
    return out


@pytest.fixture(scope="module")
def by_three(tmp_path_factory: pytest.TempPathFactory, by_torchrun: Path) -> Path:
    """Run without torchrun, which would end the others when one is lost; the last is, at the end.

    After the two processes, whose checkpoints these go on from.
    """
    del by_torchrun
    out = tmp_path_factory.mktemp("three") / "out"
    assert processes("losses", out, 3) == [0, 0, -signal.SIGKILL]
    return out


@pytest.fixture(scope="module")
def by_one() -> dict[str, Any]:
    return sharded_run.numbers(sharded_run.One(), sharded_run.EVERYTHING, sharded_run.BASICS)


def closeness(name: str) -> float:
    """How far numbers in the precision of the one that is named may lie apart."""
    return 1e-6 if name.startswith("float32") else 1e-12


@pytest.mark.parametrize(
    ("launch", "mode"),
    [
        ("by_two", "ring"),
        pytest.param("by_torchrun", "ring", marks=pytest.mark.slow),
        pytest.param("by_torchrun", "gather", marks=pytest.mark.slow),
        pytest.param("by_three", "ring", marks=pytest.mark.slow),
    ],
)
@pytest.mark.slow
def test_numbers_are_those_of_one_process(
    launch: str, mode: str, by_one: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    out = request.getfixturevalue(launch)
    ranks = [np.load(f"{out}.{mode}.{rank}.npz") for rank in range(3 if launch == "by_three" else 2)]
    names = sharded_run.EVERYTHING if (launch, mode) == ("by_torchrun", "ring") else sharded_run.BASICS
    assert {name.split(":")[0].split(",")[0] for name in ranks[0]} == {*names, "evolving", "float32"}
    for name in ranks[0]:
        close = closeness(name)
        np.testing.assert_allclose(ranks[0][name], by_one[name], rtol=close, atol=close, err_msg=name)
        for other in ranks[1:]:  # to the last bit, so that all decide alike
            assert np.array_equal(ranks[0][name], other[name]), name


@pytest.mark.slow
def test_between_gpus_nothing_but_their_tensors_travels(by_one: dict[str, Any], tmp_path: Path) -> None:
    """As with nccl, on pretended GPUs: no message is made of the host, and none takes its way through it."""
    out = tmp_path / "out"
    assert processes("gpus", out, 2) == [0, 0]
    ranks = [np.load(f"{out}.ring.{rank}.npz") for rank in range(2)]
    for name in ranks[0]:
        np.testing.assert_allclose(ranks[0][name], by_one[name], rtol=closeness(name), atol=closeness(name))
        assert np.array_equal(ranks[0][name], ranks[1][name]), name
    for rank in range(2):
        told = json.loads(Path(f"{out}.told.{rank}.json").read_text())
        assert told["copies"] == 0
        assert told["features of a CPU"].startswith("features: got a tensor on cpu, expected one on cuda")


@pytest.mark.parametrize(
    ("config", "device", "refused"),
    [
        ("cuda:nccl", "cuda:1", ""),
        ("cuda:nccl", "cuda:0", "got a tensor on cuda:0, expected cuda:1, the GPU of this process"),
        ("cuda:nccl", "cpu", "got a tensor on cpu, expected one on cuda, from where"),
        ("cpu:gloo,cuda:nccl", "cpu", ""),
        ("cpu:gloo,cuda:nccl", "cuda:0", ""),
        ("cpu:gloo,cuda:gloo", "cuda:0", "got a tensor on cuda:0, expected one on cpu, from where"),
        ("cpu:gloo,cuda:gloo", "cpu", ""),
    ],
)
def test_which_tensors_a_group_sends(
    config: str, device: str, refused: str, alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nlflow.backends.torch import shards

    monkeypatch.setattr(shards.dist, "get_backend_config", lambda _: config)
    monkeypatch.setattr(shards, "_own_gpu", lambda _: torch.device("cuda", 1))
    monkeypatch.setattr(shards.Processes, "agree", lambda *_, **__: [(5,)])
    processes = shards.Processes(5)
    assert processes._device == torch.device("cpu" if "cpu" in config else "cuda:1")
    tensor: Any = SimpleNamespace(device=torch.device(device))
    if not refused:
        processes.check_carried("features", tensor)
        return
    with pytest.raises(InputError, match=f"features: {refused}"):
        processes.check_carried("features", tensor)


def test_the_gpu_of_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    from nlflow.backends.torch.shards import _own_gpu

    found = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    for current, rank, bound in ((0, None, None), (0, "3", None), (2, "3", None), (0, "5", None), (2, "3", 1)):
        monkeypatch.setattr(torch.cuda, "current_device", lambda current=current: current)
        if rank is None:
            monkeypatch.delenv("LOCAL_RANK", raising=False)
        else:
            monkeypatch.setenv("LOCAL_RANK", rank)
        where = None if bound is None else torch.device("cuda", bound)
        found.append(_own_gpu(SimpleNamespace(bound_device_id=where)).index)
    assert found == [0, 3, 2, 1, 1]


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """Make this process a group of its own."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'init'}", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("mode", sharded.MODES)
@pytest.mark.sampled(1)
def test_a_group_of_one(mode: str, by_one: dict[str, Any], alone: None) -> None:
    found = sharded_run.numbers(sharded_run.Many(mode), sharded_run.EVERYTHING)
    for name, value in found.items():
        np.testing.assert_allclose(value, by_one[name], rtol=closeness(name), atol=closeness(name), err_msg=name)
    if mode == "ring":
        refused = sharded_run.refusals()
        everyone_agrees = {"channels that differ", "features that differ", "rows of others", "too few nodes"}
        assert set(REFUSED) - set(refused) == everyone_agrees
        for name, message in refused.items():
            assert REFUSED[name][1] in message


@pytest.mark.parametrize("unit", [1e-60, 1e60])
@pytest.mark.parametrize("mode", sharded.MODES)
def test_the_unit_of_the_weights_does_not_matter(mode: str, unit: float, alone: None) -> None:
    problem = sharded_run.Many(mode)
    averages, logs = [], []
    for factor in (1.0, unit):  # float32 cannot hold such weights
        p = problem.affinity(nl.ExpDotProduct(), factor * sharded_run.WEIGHTS, sharded_run.FEATURES.float())
        averages.append(problem.whole(p, p.average(sharded_run.SIGNAL.float())))
        logs.append(problem.whole(p, p.log_degree) - np.log(factor))
    np.testing.assert_allclose(*averages, rtol=0, atol=1e-6)
    np.testing.assert_allclose(*logs, rtol=0, atol=1e-4)


def test_what_a_shard_says_of_itself(alone: None) -> None:
    p: Any = sharded_run.built(sharded_run.Many("gather"), "queries")
    u = p.average(sharded_run.SIGNAL)
    assert repr(u).startswith("Shard(process 0 of 1, tensor([[")
    assert repr(p) == "<ShardedAffinity " + repr(p.kernel) + " on 91 nodes, method='sharded', not symmetric>"
    assert type(sharded.local(u)) is torch.Tensor
    sharded.local(u).zero_()
    assert float(u.abs().sum()) == 0  # they share their memory
    u = p.average(sharded_run.SIGNAL)
    # Keys and queries of this process and the keys of all (3 columns), logarithms and weights.
    assert p.memory_bytes == 8 * 91 * (3 * 3 + 2)
    assert u.shape == (91, 2)
    assert float(u.mean()) == pytest.approx(float(sharded.local(u).mean()), abs=1e-15)
    assert torch.equal(u.mean(dim=-1).sum(dim=0, keepdim=True), sharded.local(u).mean(-1).sum(0, keepdim=True))
    assert float(u.abs().max()) == float(u.abs().amax())


@pytest.mark.slow
@pytest.mark.parametrize("name", sharded_run.EVERYTHING)
def test_averages_are_plain_sums(name: str, by_one: dict[str, Any]) -> None:
    """Those of one process, which the numbers of all others are held against."""
    kernel, queries, weights = sharded_run.CASES[name]
    y, u = sharded_run.FEATURES.numpy(), sharded_run.SIGNAL.numpy()
    x = sharded_run.QUERIES.numpy() if queries else y
    w = sharded_run.WEIGHTS if weights else np.full(len(u), 1 / len(u))
    distance = np.sqrt(((x[:, None] - y[None]) ** 2).sum(-1))
    if isinstance(kernel, nl.ExpDotProduct):
        k = np.exp((x @ y.T) * (3**-0.5 if kernel.scale is None else kernel.scale))
    elif isinstance(kernel, nl.Gaussian):
        k = np.exp(-(distance**2) / (2 * kernel.width**2))
    else:
        k = np.exp(-distance / kernel.width) if isinstance(kernel, nl.Laplace) else (distance <= 1) * 1.0
    found = by_one
    np.testing.assert_allclose(found[f"{name}: log degree"], np.log(k @ w), rtol=0, atol=1e-12)
    np.testing.assert_allclose(found[f"{name}: average"], (k * w) @ u / (k @ w)[:, None], rtol=0, atol=1e-12)
    both = w[:, None] * w * k * ((2 * u[:, None] - 2 * u[None]) ** 2).sum(-1)
    np.testing.assert_allclose(found[f"{name}: J"], both.sum() / 2, rtol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("run", ["evolving", "runge-kutta"])
def test_checkpoints_resume_on_another_number_of_processes(run: str, by_torchrun: Path, by_three: Path) -> None:
    for out, what, count in ((by_torchrun, "written", 2), (by_three, "resumed", 3)):
        for rank in range(count):
            found = np.load(f"{out}.{what}.{rank}.npz")
            for value in ("u", "first", "energy"):
                whole, resumed = found[f"{run}, whole: {value}"], found[f"{run}, resumed: {value}"]
                np.testing.assert_allclose(resumed, whole, rtol=1e-12, atol=1e-12)
                assert np.array_equal(resumed, whole) or count == 3  # the same processes: the same bits
            assert found[f"{run}, resumed: applications"] < found[f"{run}, whole: applications"]
            assert found[f"{run}: refused"]


def told(out: Path, what: str, rank: int) -> dict[str, Any]:
    return dict(json.loads(Path(f"{out}.{what}.{rank}.json").read_text()))


@pytest.mark.slow
def test_memory_of_a_process_is_its_share(by_torchrun: Path, record_property: Any) -> None:
    one = told(by_torchrun, "memory", 0)["one"]
    shares = [told(by_torchrun, "memory", rank)["share"] / one for rank in (0, 1)]
    record_property("peak memory of a process over that of one", max(shares))
    assert one > 256  # MiB: two signals at least
    assert max(shares) <= 0.6, shares


REFUSED = {
    "nan in one process": ("process(es) [{last}] cannot use", "u: got 2 NaN or infinite"),
    "channels that differ": ("u: got [", "u: got ["),
    "features that differ": ("features: got [", "features: got ["),
    "gradient": ("process(es) [{last}] cannot use", "features: got a tensor that requires a gradient"),
    "gradient of a signal": ("process(es) [{last}] cannot use", "u: got a tensor that requires a gradient"),
    **{
        name: (words, words)
        for name, words in {
            "numpy": "u: got ndarray, expected a torch tensor",
            "grid": "domain: got Grid, expected Points",
            "mode": "mode: got 'star'",
            "patches": "kernel: got Patch",
            "radial queries": "queries: a radial kernel",
            "memory": "MemoryLimitError: sums over",
            "spectrum": "is computed by one",
            "fidelity without shard": "fidelity: got Tensor",
            "push by queries": "NumericalError: sharded: p P",
            "unknown operation": "torch.cumsum: not known",
            "one node": "torch.getitem: not known",
            "a sum over nodes that is not seen": "torch.matmul: not known",
            "where the largest is": "torch.max: not known",
            "gradient of a shard": "torch.requires_grad: not known",
            "rows of others": "values: got shape (91,)",
            "nodes of a signal without channels": "torch.getitem: not known",
            "no shard": "signal: got Tensor",
            "as NumPy": "torch.numpy: not known",
            "too few nodes": "count: got 1 nodes",
        }.items()
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_all_processes_refuse_what_one_cannot_use(name: str, by_torchrun: Path, by_three: Path) -> None:
    others, last = REFUSED[name]
    for out, count in ((by_torchrun, 2), (by_three, 3)):
        for rank in range(count):
            expected = last if rank == count - 1 else others.format(last=count - 1)
            assert expected in told(out, "refusals", rank)[name], (count, rank)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["killed", "stalled"])
def test_a_lost_process_ends_the_others(how: str, by_three: Path) -> None:
    for rank in (0, 1):
        found = told(by_three, how, rank)
        assert "another process was lost or did not answer within the timeout" in found["error"]
        # The timeout, or at once where a connection is closed, and what a busy machine adds; the group has a minute.
        assert found["seconds"] < 30
        assert found["again"] == found["error"]
        assert found["at once"] < sharded_run.TIMEOUT
    assert not Path(f"{by_three}.killed.2.json").exists()


def test_without_processes_there_is_nothing_to_share() -> None:
    with pytest.raises(InputError, match=r"group: there is no process group; call torch\.distributed\.init_process"):
        sharded.rows(5)
