"""Devices by name, and what fits into their memory."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nlflow.backends.machine import processor
from nlflow.backends.memory import Need, free_bytes
from nlflow.backends.threads import one_torch_thread
from nlflow.errors import InputError, MissingPackageError, check_choice, install_command

DEVICES = ("auto", "cpu", "cuda", "mps", "cpu-tensors")
"""``cpu`` is NumPy and compiled loops, ``cpu-tensors`` is torch on the CPU, to compare a device with."""

DTYPES = ("float64", "float32")

_MATRIX_NODES = 2048  # up to here affinities of tensors keep their matrix; beyond, tiles are no larger than it


@dataclass(frozen=True)
class Device:
    """Where arrays lie."""

    # - name : {'cpu', 'cuda', 'cpu-tensors'}
    # - hardware : name of the GPU; empty on the CPU
    # - torch : its version; empty where arrays are NumPy's

    name: str
    hardware: str = ""
    torch: str = ""

    @property
    def tensors(self) -> bool:
        return self.torch != ""

    @property
    def processor(self) -> str:
        """Return the GPU, or for which instructions torch has chosen its loops on the CPU."""
        return self.hardware or f"{_torch().backends.cpu.get_cpu_capability()}, {processor()}"

    def place(self, array: NDArray[Any]) -> Any:
        if not self.tensors:
            return array
        return _torch().tensor(array, device="cuda" if self.name == "cuda" else "cpu")

    def free_bytes(self) -> int:
        """See `nlflow.backends.memory.free_bytes`."""
        return free_bytes(_torch().device("cuda") if self.name == "cuda" else None)

    def check_fits(self, nodes: int, width: int, channels: int, dtype: str) -> int:
        """Return the bytes that are free; raise `MemoryLimitError` if a flow of this size needs more."""
        free = self.free_bytes()
        flow_need(nodes, width, channels, dtype).check(self._place, free)
        return free

    @contextmanager
    def guarded(self, nodes: int, width: int, channels: int, dtype: str) -> Iterator[None]:
        """Hold torch to one thread, and raise `MemoryLimitError` for "out of memory"."""
        # The last bits of sums depend on the number of threads.
        free = self.free_bytes()
        with flow_need(nodes, width, channels, dtype).guarded(self._place, lambda: free), one_torch_thread():
            yield

    @property
    def _place(self) -> str:
        return f"{self.name} ({self.hardware})" if self.hardware else self.name


CPU = Device("cpu")


def choose_device(name: str) -> Device:
    """Return a device by name; ``auto`` is CUDA if there is one, else the CPU."""
    # ``mps`` is refused: it has no float64.
    check_choice("device", name, DEVICES)
    if name == "cpu":
        return CPU
    try:
        torch = _torch()
    except (ImportError, OSError) as error:  # OSError: a library it needs is missing
        if name == "auto":
            return CPU
        raise MissingPackageError(
            f"device: got {name!r}, which needs torch ({error}), expected 'cpu' here; {install_command('torch')}"
        ) from error
    version = str(torch.__version__)
    if name == "cpu-tensors":
        return Device(name, torch=version)
    if name == "mps":
        raise InputError(
            "device: got 'mps', which has no float64, in which energies and inner products are added up; expected "
            "'cpu' or 'cuda'; use 'cpu'"
        )
    if torch.cuda.is_available():
        return Device("cuda", str(torch.cuda.get_device_name(0)), version)
    if name == "auto":
        return CPU
    built = getattr(torch.version, "cuda", None)
    why = f"torch {version} is built for CUDA {built} and finds no GPU" if built else f"torch {version} has no CUDA"
    remedy = "look at nvidia-smi, the driver and CUDA_VISIBLE_DEVICES" if built else "install a build of it with CUDA"
    raise InputError(
        f"device: got 'cuda', and there is {', '.join(found_devices())} ({why}); {remedy}, or use 'cpu', or 'auto', "
        "which takes a GPU where there is one"
    )


def found_devices() -> list[str]:
    try:
        torch = _torch()
    except (ImportError, OSError):
        return ["cpu"]
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    found = ["cpu", *(f"cuda:{index} {torch.cuda.get_device_name(index)}" for index in range(count))]
    return [*found, "mps"] if torch.backends.mps.is_available() else found


def _torch() -> Any:
    return importlib.import_module("torch")  # loaded only where a device is asked for


def flow_need(nodes: int, width: int, channels: int, dtype: str) -> Need:
    # Features and their copies, a dozen signals, one matrix or its tiles.

    def needed(count: int) -> int:
        numbers = count * (8 * width + 12 * channels + 64) + 5 * min(count, _MATRIX_NODES) ** 2
        return numbers * int(np.dtype(dtype).itemsize)

    halved = " or dtype='float32'" if dtype == "float64" else ""
    return Need(
        needed, nodes, f"with {width} feature(s) and {channels} channel(s) in {dtype}",
        f"use fewer{halved}, or close other programs that use the device",
    )  # fmt: skip
