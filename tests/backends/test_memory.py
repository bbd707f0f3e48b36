"""What computations on tensors need, what is free, and what is said where memory ran out."""

from __future__ import annotations

import types
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

import nlflow as nl
from nlflow.affinities import dense, tiled
from nlflow.backends import memory
from nlflow.backends.memory import Need
from tests.problems import torch_on_one_thread

torch = torch_on_one_thread()

N = 40
FEATURES = torch.from_numpy(np.random.default_rng(0).normal(size=(N, 3)))
SIGNAL = torch.from_numpy(np.random.default_rng(1).normal(size=(N, 2)))
LOST = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def test_what_fits_is_the_largest_count_whose_estimate_does() -> None:
    need = Need(lambda n: 8 * n * n + 100, 50, "of a matrix", "use fewer")
    for free in (107, 108, 109, 20_099, 20_100, 10**12):
        largest = need.largest(free)
        assert largest == 0 or need.of(largest) <= free
        assert need.of(largest + 1) > free
    need.check("cuda:0", 20_100)
    with pytest.raises(nl.MemoryLimitError) as caught:
        need.check("cuda:0", 20_099)
    assert str(caught.value) == (
        "device: 50 nodes of a matrix need about 19.63 KiB on cuda:0, where 19.63 KiB are free; about 49 nodes fit at "
        "most: use fewer"
    )


def on_a_gpu(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    """Let tensors be held against the memory of a GPU that has so many bytes free."""
    monkeypatch.delenv("NLFLOW_MEMORY_LIMIT", raising=False)
    monkeypatch.setattr(memory, "limit_for", lambda like, given: free if given is None else given)
    for module in (tiled, dense):
        monkeypatch.setattr(module, "limit_for", memory.limit_for)


def test_free_memory_is_that_of_the_device_of_a_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NLFLOW_MEMORY_LIMIT", raising=False)
    asked = []
    for name, value in {"mem_get_info": (1000, 2000), "memory_reserved": 300, "memory_allocated": 100}.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    monkeypatch.setattr(torch.cuda, "device", lambda device: (asked.append(device), nullcontext())[1])
    there = types.SimpleNamespace(device=torch.device("cuda", 3))
    assert memory.free_bytes(there.device) == memory.limit_for(there, None) == 1200
    assert asked == [there.device] * 2
    assert memory.limit_for(there, 5.0) == 5.0
    assert memory.limit_for(SIGNAL, None) is memory.limit_for(np.ones(3), None) is None
    assert memory.free_bytes(SIGNAL.device) == nl.errors.memory_limit()
    monkeypatch.setenv("NLFLOW_MEMORY_LIMIT", "4096")
    assert memory.free_bytes(there.device) == 4096


@pytest.mark.parametrize("method", ["dense", "tiled"])
def test_what_does_not_fit_is_refused_before_anything_is_allocated(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_a_gpu(monkeypatch, 2000)
    with pytest.raises(nl.MemoryLimitError, match=r"needs .* the limit is 1.953 KiB"):
        nl.affinity(nl.ExpDotProduct(), nl.Points(np.arange(float(N))), FEATURES, method=method)
    on_a_gpu(monkeypatch, 10**9)
    nl.affinity(nl.ExpDotProduct(), nl.Points(np.arange(float(N))), FEATURES, method=method)


CALLS: dict[str, Callable[[Any], Any]] = {
    "average": lambda p: p.average(SIGNAL),
    "degree": lambda p: p.log_degree,
    "push": lambda p: p.push(SIGNAL),
    "flow": lambda p: nl.solve(nl.GradientFlow(nl.J(p), "degree"), SIGNAL, t=1.0),
    "equilibrium": lambda p: nl.E(p, SIGNAL, 0.5).minimizer(),
}


@pytest.mark.parametrize("method", ["dense", "tiled"])
@pytest.mark.parametrize("call", list(CALLS))
def test_a_device_that_runs_out_of_memory(call: str, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    p = nl.affinity(nl.ExpDotProduct(), nl.Points(np.arange(float(N))), FEATURES, method=method)

    def lost(*_: Any) -> Any:
        raise error

    for name in ("_average", "_push", "_log_degree", "_log_degree_wide"):
        monkeypatch.setattr(type(p), name, lost)
    error: Exception = LOST
    with pytest.raises(nl.MemoryLimitError) as caught:
        CALLS[call](p)
    text, channels = str(caught.value), 1 if call in ("degree", "equilibrium") else 2  # the degree is asked for first
    assert f"affinity: 40 nodes with {channels} channel(s) in float64 by method '{method}'" in text
    assert "about 20 nodes fit at most: use fewer nodes" in text  # half of them at most
    assert caught.value.__cause__ is LOST
    error = RuntimeError("something else")
    with pytest.raises(RuntimeError, match="something else"):
        CALLS[call](p)


def test_what_fits_beside_a_matrix_grows_as_its_square(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a quarter of the memory half of the nodes; of what is linear in them a quarter."""
    n = 4000
    x = torch.zeros(n, 1)
    fits = {}
    for method in ("dense", "tiled"):
        p = nl.affinity(nl.Gaussian(1.0), nl.Points(np.arange(float(n))), x, method=method)
        needed = []
        monkeypatch.setattr(Need, "guarded", lambda self, *_, needed=needed: needed.append(self) or nullcontext())
        with pytest.raises(RuntimeError, match="no memory"), p.within_memory(torch.zeros(n)):
            raise RuntimeError("no memory")  # only then is it asked
        monkeypatch.undo()
        (need,) = needed
        fixed = need.of(0)
        fits[method] = need.largest(fixed + (need.of(n) - fixed) // 4) / n
    assert fits["dense"] == pytest.approx(0.5, abs=0.01)
    assert fits["tiled"] == pytest.approx(0.25, abs=0.01)
