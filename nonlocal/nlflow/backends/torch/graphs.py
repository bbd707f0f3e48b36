"""CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from nlflow._array import recorded
from nlflow._looks import Doubt, doubt, doubting
from nlflow.errors import InputError

_WARM = 2  # calls before the recording, in which libraries find their plans and what is kept is formed
_ASKING = {
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "is_nonzero",
    "equal",
    "unique_dim",
    "_unique2",
    "unique_consecutive",
}


class _Unasked(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own
    """Raises where the host asks a device for a number, or moves a tensor between devices."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        chosen = name == "index" and any(isinstance(one, Tensor) and one.dtype == torch.bool for one in args[1])
        if name in _ASKING or chosen:
            raise _AskedError(f"torch.ops.aten.{name}")
        result = func(*args, **(kwargs or {}))
        if name in ("_to_copy", "copy_"):
            devices = {one.device for one in (*args, result) if isinstance(one, Tensor) and one.ndim}
            if len(devices) > 1:
                raise _AskedError(f"a copy between {' and '.join(sorted(map(str, devices)))}")
        return result


class _Unlisted(TorchFunctionMode):
    """Raises where a tensor becomes a list or an array, which is no operation on the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in ("tolist", "numpy", "__array__"):
            raise _AskedError(f"torch.Tensor.{func.__name__}")
        return func(*args, **(kwargs or {}))


class _AskedError(RuntimeError):
    pass


@contextmanager
def _recorded() -> Iterator[None]:
    token = recorded.set(True)
    try:
        yield
    finally:
        recorded.reset(token)


class Replay:
    """A function of one tensor that a GPU records once and repeats in one launch; elsewhere it is called.

    Raises
    ------
    InputError
        If the function asks the device for a number or copies to or from the host, or within another recording.
    """

    def __init__(self, function: Callable[[Tensor], Tensor], like: Tensor, name: str) -> None:
        self._function, self._name = function, name
        self._input = like.detach().clone()
        self._doubts: list[Doubt] = []  # of the recording
        on_gpu = like.is_cuda
        if on_gpu and torch.cuda.is_current_stream_capturing():
            raise InputError(
                f"{name}: a CUDA graph is being recorded already, expected none, since a graph holds no other; leave "
                "one of the two recordings out"
            )
        try:
            with torch.no_grad(), _recorded(), doubting([]):
                if on_gpu:
                    function(self._input)  # what is kept on the device is sent there
                with _Unasked(), _Unlisted():  # type: ignore[no-untyped-call]
                    self._output = function(self._input)
                self._graph = self._captured() if on_gpu else None
        except _AskedError as found:
            raise self._refusal(str(found)) from found
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            if not on_gpu:
                raise
            raise self._refusal(" ".join(str(error).split())[:200]) from error

    def _refusal(self, what: str) -> InputError:
        return InputError(
            f"{self._name}: it waits for the device within a step ({what}), expected operations on the device alone, "
            "which can be recorded; use the integrator without Replayed"
        )

    def _captured(self) -> Any:
        device = self._input.device
        with torch.cuda.device(device):
            beside = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            beside.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(beside):
                for _ in range(_WARM):
                    self._function(self._input)
            torch.cuda.current_stream(device).wait_stream(beside)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph), doubting(self._doubts):
                self._output = self._function(self._input)
        return graph

    def __call__(self, u: Tensor) -> Tensor:
        """Return the function of `u`; `InputError` for another shape, dtype or device than was recorded."""
        kept = self._input
        if u.shape != kept.shape or u.dtype != kept.dtype or u.device != kept.device:
            raise InputError(
                f"{self._name}: got a tensor of shape {tuple(u.shape)}, {u.dtype} on {u.device}, expected "
                f"{tuple(kept.shape)}, {kept.dtype} on {kept.device}, as it was recorded; record another one"
            )
        with torch.no_grad(), _recorded():
            kept.copy_(u)
            if self._graph is not None:
                self._graph.replay()
                for one in self._doubts:
                    doubt(one.tell, *(part.clone() for part in one.parts))
            else:
                self._output = self._function(kept)
            return self._output.clone()
