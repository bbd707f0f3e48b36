"""A pretended GPU: tensors that say they live on ``cuda:0`` and compute on the CPU, and counts of what a GPU waits for.

    with pretended.gpu():                                  # torch.cuda says that there is one
        x = torch.randn(100, 8, device="cuda")             # or pretended.put(tensor), which counts nothing
        with pretended.counting() as counts:
            nl.J(nl.affinity(nl.Gaussian(width=1.0), points, x)).evaluate(x)
    counts.synchronizations, counts.copies, counts.operations
    counts.places["synchronization"]                       # how often each line of nlflow did so

Operations on two devices raise what torch raises on a GPU, and so does `numpy()`. Below each tensor is one of the CPU,
which torch's kernels for the CPU compute on: results have the bits of CPU tensors. Derivatives and transforms of
functions are torch's own, as tensors are told apart by their dispatcher, below autograd. `torch.autocast("cuda")`
rounds the products of matrices, and takes sums, exponentials and their like in float32, as on a GPU.

What is counted, for each line of nlflow that did it:

operation
    A kernel that a GPU would start. Views start none.
synchronization
    The host waits for a number of the device: `item()`, `bool()`, `nonzero()`, an index of booleans, a check of errors.
copy to the device, copy to the host
    Numbers move; so do those of `torch.tensor([...], device="cuda")`, and of an index that lies on the CPU.
"""

from __future__ import annotations

import ctypes
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

import nlflow
from tests import fused

GPU = torch.device("cuda", 0)
PACKAGE = str(Path(nlflow.__file__).parent)
HELPERS = (str(Path(PACKAGE, "_array.py")),)

# The device that torch's dispatcher sees. No build of torch computes on it, autograd knows it, and, other than for
# "cuda", asks no streams of a driver.
_BELOW = torch.device("ipu", 0)
_CUDA, _META, _IPU, _PRIVATE = 1, 14, 18, 20  # their numbers in torch's c10::DeviceType

OPERATION, SYNCHRONIZATION = "operation", "synchronization"
TO_DEVICE, TO_HOST = "copy to the device", "copy to the host"

# Operations for which the host waits, by their names below autograd.
_WAITING = {
    "_linalg_check_errors", "_local_scalar_dense", "_unique", "_unique2", "bincount", "equal", "is_nonzero",
    "linalg_eig", "linalg_lstsq", "masked_select", "nonzero", "unique_consecutive", "unique_dim",
    "unique_dim_consecutive",
}  # fmt: skip
# What starts no kernel, beside the views.
_FREE = {"_unsafe_view", "alias", "detach", "empty", "empty_like", "empty_strided", "lift_fresh", "new_empty",
         "new_empty_strided", "set_"}  # fmt: skip
_INDEXING = {"_index_put_impl_", "_unsafe_index", "_unsafe_index_put", "index", "index_put", "index_put_"}


class Counts:
    """How often each line of nlflow did what a GPU takes time for."""

    def __init__(self) -> None:
        self.places: dict[str, Counter[str]] = {
            kind: Counter() for kind in (OPERATION, SYNCHRONIZATION, TO_DEVICE, TO_HOST)
        }

    @property
    def operations(self) -> int:
        """Kernels started."""
        return self.places[OPERATION].total()

    @property
    def synchronizations(self) -> int:
        """Numbers of the device that the host waited for."""
        return self.places[SYNCHRONIZATION].total()

    @property
    def copies_to_device(self) -> int:
        return self.places[TO_DEVICE].total()

    @property
    def copies_to_host(self) -> int:
        return self.places[TO_HOST].total()

    @property
    def copies(self) -> int:
        """Copies in both directions."""
        return self.copies_to_device + self.copies_to_host

    def check_waits_no_more_than(self, other: Counts) -> None:
        """Raise `AssertionError`, with the places, where there are more synchronizations or copies than in `other`."""
        more = [
            f"{(self.places[kind] - other.places[kind])[place]} more x {kind} at {place}"
            for kind in (SYNCHRONIZATION, TO_DEVICE, TO_HOST)
            for place in self.places[kind] - other.places[kind]
        ]
        assert not more, "; ".join(more)

    def __str__(self) -> str:
        lines = []
        for kind, places in self.places.items():
            lines += [f"{places.total():6} x {kind}"]
            lines += [f"{count:12} {place}" for place, count in places.most_common(20)]
        return "\n".join(lines)


# Operations whose results a GPU rounds in another way than the CPU: they sum in another order, or have other series.
_ROUNDED = {
    "_fft_c2c", "_fft_c2r", "_fft_r2c", "_log_softmax", "_softmax", "addmm", "baddbmm", "bmm", "convolution", "cos",
    "cumsum", "dot", "erf", "exp", "exp2", "expm1", "log", "log1p", "log2", "logcumsumexp", "logsumexp", "mean", "mm",
    "mv", "native_layer_norm", "prod", "rsqrt", "sigmoid", "sin", "std", "sum", "tanh", "var", "vdot",
}  # fmt: skip

_library = torch.library.Library("aten", "IMPL")
_others = torch.library.Library("_", "IMPL")
_counting: list[Counts] = []
_capturing: list[bool] = []
_rounding: list[bool] = []


def _note(kind: str) -> None:
    """Count `kind` where nlflow did it; what a graph that is being captured cannot hold raises, as on a GPU."""
    if _capturing and kind in (SYNCHRONIZATION, TO_HOST):
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
    if _counting:
        place = _place()
        for counts in _counting:
            counts.places[kind][place] += 1


def _place() -> str:
    """Return the innermost line of nlflow that is being run, or "elsewhere".

    What helpers for arrays do is done by who calls them, but for what is sent once and kept.
    """
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        does = frame.f_code.co_name
        inside = does in ("<listcomp>", "<genexpr>", "<dictcomp>", "<setcomp>")  # newer Pythons have fewer frames
        if name.startswith(PACKAGE) and not inside and (name not in HELPERS or does == "kept_like"):
            return f"{name[len(PACKAGE) + 1 :]}:{frame.f_lineno} {does}"
        frame = frame.f_back  # type: ignore[assignment]
    return "elsewhere"


class Pretended(torch.Tensor):
    """A tensor of the pretended GPU; `below` is its twin on the CPU, which holds the numbers."""

    below: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, below: torch.Tensor) -> Pretended:
        plain = below.layout == torch.strided
        if not plain and below.layout != torch.sparse_coo:
            raise NotImplementedError(f"tensors of layout {below.layout} are not pretended")
        result: Pretended = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            below.size(),
            strides=below.stride() if plain else None,
            storage_offset=below.storage_offset() if plain else None,
            dtype=below.dtype,
            layout=below.layout,
            device=_BELOW,
        )
        result.below = below
        return result

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"Pretended({self.below!r})"

    def tolist(self) -> Any:
        _note(SYNCHRONIZATION)
        return self.below.tolist()

    def numpy(self, **_: Any) -> Any:
        raise TypeError(
            "can't convert cuda:0 device type tensor to numpy. "
            "Use Tensor.cpu() to copy the tensor to host memory first."
        )

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return self.numpy()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            if not self.is_leaf:
                raise RuntimeError("Only Tensors created explicitly by the user support the deepcopy protocol")
            if getattr(self, "_is_param", False):
                copied = torch.nn.Parameter(self.data.clone(), self.requires_grad)
            else:
                with torch._C.DisableTorchFunction():
                    copied = self.detach().clone().requires_grad_(self.requires_grad)
                    copied.grad = None if self.grad is None else self.grad.clone()
            vars(copied).update({name: value for name, value in vars(self).items() if name != "below"})
            memo[id(self)] = copied
        return memo[id(self)]

    def data_ptr(self) -> int:
        return self.below.data_ptr()

    def untyped_storage(self) -> Any:
        return self.below.untyped_storage()

    def _set_data(self, given: torch.Tensor) -> None:
        torch.Tensor.data.__set__(self, given)  # type: ignore[attr-defined]
        self.below = given.below if isinstance(given, Pretended) else given

    data = property(torch.Tensor.data.__get__, _set_data)  # type: ignore[attr-defined]


Pretended.__name__ = "Tensor"  # as messages call it


class _Everywhere(TorchDispatchMode):
    """Also what has no tensor of the device among its arguments yet: factories, and copies to the device."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and torch's compiler takes seconds to load

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


def _is_gpu(device: Any) -> bool:
    """Return whether this is the pretended GPU; raise what torch raises for another one."""
    if device is None or torch.device(device).type not in ("cuda", "ipu"):
        return False
    if torch.device(device).index not in (None, 0):
        raise RuntimeError("CUDA error: invalid device ordinal")
    return True


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run one operation of torch below autograd."""
    leaves = _tensors((args, kwargs))
    there = [leaf for leaf in leaves if isinstance(leaf, Pretended)]
    name = func._schema.name.partition("::")[2]
    device = kwargs.get("device")
    onto = bool(there) if device is None else _is_gpu(device)
    if name == "is_pinned":
        return False
    if name == "_pin_memory":
        return _pinned(args[0])
    if kwargs.get("pin_memory"):
        kwargs = kwargs | {"pin_memory": False}
    if not there and not onto:
        return func(*args, **kwargs)
    if name == "_to_copy":
        if device is not None and torch.device(device).type == "meta":
            pass  # no numbers move
        elif bool(there) != onto:
            _note(TO_DEVICE if onto else TO_HOST)
        elif there:
            _note(OPERATION)
    elif name == "copy_":
        _note(OPERATION if len(there) == 2 else TO_DEVICE if isinstance(args[0], Pretended) else TO_HOST)
    else:
        _check_devices(name, args, leaves)
        _note_costs(func, name, args)
    _check_generator(kwargs.get("generator"), onto)
    below = {"device": torch.device("cpu")} if device is not None and onto else {}
    if name == "_efficientzerotensor":  # of forward derivatives; it has no memory, which only its own kernels know
        func = torch.ops.aten.zeros.default
    compute = fused.KERNELS.get(name, func)
    out = compute(*tree_map(_below, args), **tree_map(_below, kwargs) | below)
    if onto and _rounding and (name in _ROUNDED or name.startswith(("linalg", "_linalg", "_scaled_dot"))):
        _round_otherwise(name, out)
    if not onto:
        return out
    known = {id(leaf.below): leaf for leaf in there}
    for leaf in there:
        if leaf.shape != leaf.below.shape:  # in place, as `unsqueeze_` does
            with torch._C._DisableTorchDispatch():
                leaf.as_strided_(leaf.below.shape, leaf.below.stride(), leaf.below.storage_offset())
    return tree_map(lambda x: known[id(x)] if id(x) in known else Pretended(x) if type(x) is torch.Tensor else x, out)


def _round_otherwise(name: str, out: Any) -> None:
    """Move numbers by at most one in their last place, the same ones at each call, but for integers."""
    for each in _tensors(out):
        if each.is_floating_point():
            generator = torch._C.Generator("cpu")
            generator.manual_seed(zlib.crc32(f"{name} {tuple(each.shape)}".encode()))
            # A little more than half of it, beside any number, which is rounded to one.
            shift = 0.51 * torch.finfo(each.dtype).eps * torch.randint(-1, 2, each.shape, generator=generator)
            moved = (each + each * shift).to(each.dtype)
            whole = (each == each.round()) & (each.abs() < 2.0**13)
            each.copy_(torch.where(moved.isfinite() & ~whole, moved, each))


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy, which is as good as one in pinned memory here."""
    if isinstance(tensor, Pretended):
        raise RuntimeError("cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be pinned")
    return tensor.clone()


def _below(value: Any) -> Any:
    return value.below if isinstance(value, Pretended) else value


def _check_devices(name: str, args: tuple[Any, ...], leaves: list[torch.Tensor]) -> None:
    """Raise where tensors are on two devices, but for numbers, and for indices that lie on the CPU."""
    if name in _INDEXING and isinstance(args[0], Pretended):
        if any(isinstance(index, torch.Tensor) and not isinstance(index, Pretended) for index in args[1]):
            _note(TO_DEVICE)
        leaves = [args[0], *args[2:3]]
    numbers_too = name in ("cat", "stack")
    if any(not isinstance(leaf, Pretended) and (leaf.dim() > 0 or numbers_too) for leaf in leaves):
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu! "
            f"(when running {name})"
        )


def _note_costs(func: Any, name: str, args: tuple[Any, ...]) -> None:
    """Count what a GPU does for an operation."""
    masks = name in _INDEXING and any(isinstance(at, torch.Tensor) and at.dtype == torch.bool for at in args[1])
    filled = name.startswith("index_put") and isinstance(args[2], torch.Tensor) and args[2].numel() == 1
    if name in _WAITING or (masks and not filled) or str(func) == "aten.repeat_interleave.Tensor":
        _note(SYNCHRONIZATION)
    if not func.is_view and name not in _FREE:
        _note(OPERATION)


def _check_generator(generator: Any, onto: bool) -> None:
    if generator is not None and (generator._cdata in _there) != onto:
        wanted, got = ("cuda", "cpu") if onto else ("cpu", "cuda")
        raise RuntimeError(f"Expected a '{wanted}' device type for generator but found '{got}'")


def put(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's numbers on the pretended GPU, uncounted."""
    return Pretended(tensor.detach().clone()).requires_grad_(tensor.requires_grad)


def take(tensor: torch.Tensor) -> torch.Tensor:
    """Return the numbers of a tensor of the pretended GPU on the CPU, uncounted; others as they are."""
    return tensor.detach().below.clone() if isinstance(tensor, Pretended) else tensor


@contextmanager
def counting() -> Iterator[Counts]:
    """Count what happens on the pretended GPU inside."""
    counts = Counts()
    _counting.append(counts)
    try:
        yield counts
    finally:
        _counting.remove(counts)


@contextmanager
def capturing() -> Iterator[None]:
    """Be as while a CUDA graph is captured: what the host would wait for raises."""
    _capturing.append(True)
    try:
        yield
    finally:
        _capturing.pop()


class _Kind(type(torch._C.Generator)):  # type: ignore[misc]
    """The class of `Generator`, of which torch's own generators are instances too."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return type.__instancecheck__(cls, instance) or isinstance(instance, torch._C.Generator)


_there: set[int] = set()  # where generators of the device lie: below autograd they are known by it alone


class Generator(torch._C.Generator, metaclass=_Kind):
    """Random numbers for either device."""

    def __new__(cls, device: Any = "cpu") -> Generator:
        result: Generator = super().__new__(cls, "cpu")
        (_there.add if _is_gpu(device) else _there.discard)(result._cdata)
        return result

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return GPU if self._cdata in _there else torch.device("cpu")


class Event:
    """An event, or a stream: everything has happened when it is asked for."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *_, **__: True

    def synchronize(self) -> None:
        _note(SYNCHRONIZATION)


class Graph:
    """A CUDA graph: the operations of a recording, which are done again on the same tensors."""

    def __init__(self) -> None:
        self._done: list[Any] = []

    @contextmanager
    def record(self) -> Iterator[None]:
        """Keep what is done inside, beside doing it; stand-in for `torch.cuda.graph`."""
        done = self._done

        class Recorder(TorchDispatchMode):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                out = func(*args, **(kwargs or {}))
                done.append((func, args, kwargs or {}, out))
                return out

        with capturing(), Recorder():
            yield

    def replay(self) -> None:
        """Do it again."""
        for func, args, kwargs, out in self._done:
            again = func(*args, **kwargs)
            for old, new in zip(_tensors(out), _tensors(again), strict=True):
                if old is not new and not func.is_view:
                    old.copy_(new)


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, torch.Tensor)]


def _driver() -> dict[str, Any]:
    """Return what stands in for functions of `torch.cuda`."""
    about = SimpleNamespace(
        name="pretended", total_memory=80 << 30, multi_processor_count=132, major=9, minor=0, L2_cache_size=50 << 20
    )
    return {
        "_exchange_device": lambda _: 0,
        "_lazy_init": lambda: None,
        "_maybe_exchange_device": lambda _: 0,
        "CUDAGraph": Graph,
        "current_device": lambda: 0,
        "current_stream": Event,
        "default_stream": Event,
        "device_count": lambda: 1,
        "empty_cache": lambda: None,
        "Event": Event,
        "get_device_capability": lambda *_: (9, 0),
        "get_device_name": lambda *_: "pretended",
        "get_device_properties": lambda *_: about,
        "graph": Graph.record,
        "get_rng_state": lambda *_: torch.get_rng_state(),
        "is_available": lambda: True,
        "is_bf16_supported": lambda *_: True,
        "is_current_stream_capturing": lambda: bool(_capturing),
        "is_initialized": lambda: True,
        "max_memory_allocated": lambda *_: 0,
        "mem_get_info": lambda *_: (70 << 30, 80 << 30),
        "memory_allocated": lambda *_: 0,
        "memory_reserved": lambda *_: 0,
        "reset_peak_memory_stats": lambda *_: None,
        "set_rng_state": lambda state, *_: torch.set_rng_state(state),
        "Stream": Event,
        "stream": lambda _: nullcontext(),
        "synchronize": lambda *_: _note(SYNCHRONIZATION),
    }


def _device_of(tensor: torch.Tensor) -> torch.device:
    found: torch.device = torch._C.TensorBase.device.__get__(tensor)
    return GPU if found.type == "ipu" else found


class _Guard(torch._C._acc.DeviceGuard):
    """What torch asks for the device that "cuda" means: the first one."""

    def type_(self) -> Any:
        return torch._C._autograd.DeviceType.CUDA  # type: ignore[attr-defined]


def _parameter(cls: Any, data: Any = None, requires_grad: bool = True) -> Any:
    """Make a parameter, of a tensor of the device by no call that a mode of torch sees, as of torch's own tensors."""
    if not isinstance(data, Pretended):
        return _own_parameter(cls, data, requires_grad)
    with torch._C.DisableTorchFunction():
        return _own_parameter(cls, data, requires_grad)


_own_parameter = torch.nn.Parameter.__new__


# What autocast computes in half precision on a GPU, and what in float32.
_NARROW = ("addmm", "baddbmm", "bmm", "conv1d", "conv2d", "linear", "matmul", "mm", "mv",
           "scaled_dot_product_attention")  # fmt: skip
_WIDE = ("cumsum", "exp", "layer_norm", "log", "log1p", "norm.Scalar", "pow.Tensor_Scalar", "prod", "reciprocal",
         "rsqrt", "softmax.int", "sum", "sum.dim_IntList")  # fmt: skip


def _teach_autocast() -> None:
    """Give the dispatcher what autocast does on a GPU: under "cuda" it is on for `_BELOW` as well."""
    _others.fallback(torch.library.fallthrough_kernel, "AutocastIPU")
    for names, wide in ((_NARROW, False), (_WIDE, True)):
        for name in names:
            packet, _, overload = name.partition(".")
            operation = getattr(getattr(torch.ops.aten, packet), overload or "default")
            _library.impl(name, _cast(operation, wide), "AutocastIPU")


def _cast(operation: Any, wide: bool) -> Callable[..., Any]:
    def cast(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not value.is_floating_point() or value.dtype == torch.float64:
            return value
        return value.to(torch.float32 if wide else torch.get_autocast_dtype("cuda"))

    def called(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastIPU)):
            return operation(*tree_map(cast, args), **tree_map(cast, kwargs))

    return called


def _set_autocast_enabled(device: str, enabled: bool, own: Any = torch.set_autocast_enabled) -> None:
    own(device, enabled)
    if device == "cuda":
        own("ipu", enabled)


@cache
def _stand_guard() -> None:
    """Give torch a guard for its devices cuda and `_BELOW`: without one it refuses to hear of them.

    Python makes guards for the private device alone, so that this one is moved. That of the meta device switches
    nothing, and serves autograd.
    """
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * 22).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    guards[_IPU] = guards[_META]
    _library.impl("scaled_dot_product_attention", fused.attention, "AutogradIPU")
    _teach_autocast()
    if not guards[_CUDA]:  # a build without CUDA
        torch._C._acc.register_python_privateuseone_device_guard(_Guard())
        guards[_CUDA], guards[_PRIVATE] = guards[_PRIVATE], None


@contextmanager
def gpu(*, rounding: bool = False) -> Iterator[torch.device]:
    """Let torch have a GPU, and give its device: ``"cuda"`` is the pretended one inside.

    With `rounding` its results differ from those of the CPU in the last place, as those of a real one do.
    """
    _stand_guard()
    before = torch._C._is_multithreading_enabled(), torch._C._only_lift_cpu_tensors()
    with ExitStack() as stack:
        stack.enter_context(patch.multiple(torch.cuda, **_driver()))
        stack.enter_context(patch.object(torch, "Generator", Generator))
        stack.enter_context(patch.object(torch, "set_autocast_enabled", _set_autocast_enabled))
        stack.enter_context(patch.object(torch.nn.Parameter, "__new__", _parameter))
        stack.enter_context(patch.object(torch.Tensor, "device", property(_device_of), create=True))
        is_cuda = property(lambda tensor: _device_of(tensor).type == "cuda")
        stack.enter_context(patch.object(torch.Tensor, "is_cuda", is_cuda, create=True))
        torch._C._set_multithreading_enabled(False)  # derivatives are computed in this thread, whose lines are counted
        torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(...) makes one on the CPU, and copies it
        stack.enter_context(_Everywhere())
        if rounding:
            _rounding.append(True)
            stack.callback(_rounding.pop)
        try:
            yield GPU
        finally:
            torch._C._set_multithreading_enabled(before[0])
            torch._C._set_only_lift_cpu_tensors(before[1])
