"""``pytest --device=pretended`` runs every test of tensors on the CPU, and once more with its tensors on a GPU.

The tests are the same ones: what they make (`torch.randn(...)`, modules, constants of their file, values of parameters)
lies on the GPU in the second run, and what they look at comes to the CPU. What nlflow makes lies where nlflow puts it.

On the pretended GPU (tests/pretended.py) all tensors that a test has in its hands, results and derivatives, have the
bits that they had on the CPU, and nlflow copies at the places of `COPIES` alone. ``--device=cuda`` takes a real GPU,
where sums are in another order: there the bounds that the tests hold hold too. Where a tensor has less than half the
digits of its dtype in common with that of the CPU, the test is listed at the end. ``--device=rounded`` is the pretended
GPU with results that differ in the last place: a test that fails there asks for bits that a real one cannot have.

`@pytest.mark.on_cpu("why")` leaves a test out, and `@pytest.mark.other_bits("why")` its bits.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
import math
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from _pytest.runner import runtestprotocol
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

import nlflow
from nlflow.attention.injection import weights
from nlflow.backends.torch import attention, sums
from tests import fused, pretended

TESTS, PACKAGE = str(Path(__file__).parent), str(Path(nlflow.__file__).parent)
CALLERS = (TESTS, str(Path(__file__).parents[1] / "validation"))  # of layers
MAKERS = _device_constructors()
# What modes see of the tensors of one device alone, and what does not ask what a tensor has held before.
UNSEEN = ("__deepcopy__", "__get__", "__set__", "data_ptr", "lift_fresh.default", "tolist", "untyped_storage")
WRITING = ("constant_", "fill_", "kaiming_uniform_", "normal_", "trunc_normal_", "uniform_", "xavier_uniform_", "zero_")
EMPTY = {func for func in MAKERS if func.__name__.startswith("empty")}

# Where nlflow moves numbers between host and device, and why.
HOSTED = "estimators give scikit-learn's arrays: labels and memberships lie on the host"
DRAWN = "what blocks are compared with is drawn on the host, the same everywhere"
TOLD = "what an error says"
PROBED = "what is measured of a model is told as NumPy arrays"
COPIES: dict[str, str] = {
    "_array.py kept_like": "what a flow is made of and never changes, once",
    "attention/injection/inputs.py _image": "a picture to try a model with, the same one everywhere: once for a model",
    "attention/injection/inputs.py try_out": "what a model copies itself",
    "attention/injection/keeping.py <dictcomp>": "what is written to a file",
    "attention/injection/keeping.py learned_of": "what is written to a file",
    "attention/injection/keeping.py __call__": "what is written to a file",
    "attention/probing/probe.py _on_host": PROBED + ", in one copy",
    "attention/injection/everyday.py _of_pictures": "pictures, once",
    "attention/injection/places.py _layout": "numbers to tell tokens by, the same ones everywhere: once a module",
    "attention/injection/summing.py run": "what a model copies itself",
    "attention/probing/branches.py __torch_function__": "what a model copies itself",
    "attention/injection/summing.py find_layout": "numbers to tell columns by, the same ones everywhere: once a module",
    "attention/loading.py _fill": "what is read from a file",
    "attention/probing/cause.py _block": PROBED,
    "attention/probing/cause.py _groups": PROBED,
    "attention/probing/cause.py _squares": PROBED,
    "attention/injection/weights.py columns_of": "numbers to tell columns by, the same ones everywhere: once a module",
    "attention/probing/points.py numbers_of": PROBED,
    "attention/probing/parts.py _random": DRAWN,
    "attention/probing/parts.py _shuffled": DRAWN,
    "attention/probing/points.py spread_over": PROBED,
    "attention/probing/parts.py norm": DRAWN,
    "attention/probing/parts.py turned": DRAWN,
    "attention/probing/spectra.py spectrum_of": PROBED,
    "attention/probing/survey.py <listcomp>": PROBED,
    "attention/probing/survey.py survey": PROBED,
    "attention/probing/probe.py placed": "inputs that lie elsewhere than the model, once",
    "attention/probing/survey.py _pooled": PROBED,
    "attention/probing/probe.py <lambda>": "what a model copies itself",
    "attention/probing/parts.py numbered": "which inputs have nulls: numbers, once for a batch",
    "attention/sweeping/sweep.py _scores": "scores of a task, which a setting ends with",
    "attention/sweeping/tasks.py __call__": "scores of tasks are those of NumPy: once for a batch",
    "attention/sweeping/tasks.py embed": "scores of tasks are those of NumPy: once for a batch",
    "attention/probing/trace.py head": "a head is looked at in float64 on the host, when asked for",
    "attention/probing/trace.py <genexpr>": "a head is looked at in float64 on the host, when asked for",
    "attention/probing/trace.py rule_or_bias": "a head is looked at in float64 on the host, when asked for",
    "attention/terms/neutreno.py _apply": "layers move where their owner moves them",
    "attention/terms/neutreno.py kept": "layers move where their owner moves them",
    "affinities/base.py log_total": "weights of the nodes, once for each functional",
    "affinities/base.py _measured": "weights of the nodes, once for each affinity",
    "affinities/base.py as_signal": "a caller's NumPy values, as it asked",
    "backends/devices.py place": "what the host has prepared, for a flow on the device; once",
    "backends/torch/search.py of": "where patches and their neighbours lie, once for each image",
    "denoising/derivatives.py divergence": "random signs are drawn on the host, the same everywhere; once",
    "denoising/groupwise.py _path": "the result of a flow, for what is left to do on the host",
    "denoising/looked.py _says_nothing": "an image in which samples may say that there are no data",
    "denoising/looked.py at": "what the host decides on, once for each image",
    "denoising/looked.py moments": "sums of products of channels, once for each image",
    "denoising/patches/filters.py groups_of": "groups that are given to the host's filter",
    "denoising/patches/filters.py on_host": "groups that are given to the host's filter",
    "denoising/patches/tensors.py <lambda>": "windows and transforms of patches, once for each image",
    "denoising/patches/affinity.py _average": "an average over groups, which their flows take none of: when asked for",
    "denoising/patches/affinity.py _like": "an average over groups, which their flows take none of: when asked for",
    "denoising/tensors.py _chosen": "random signs for all items, and the risk of each estimate, once",
    "denoising/tensors.py frames_of": "the strength of each item's noise, once for each image",
    "denoising/tensors.py _on_host": "an image with holes, or of other noise, which the host prepares",
    "denoising/tensors.py array": "an image with holes, or of other noise, which the host prepares",
    "denoising/tensors.py of": "noise of each item, once for each image",
    "affinities/base.py whole": "what is written to a checkpoint",
    "errors.py check_floats": "what is numbers of the host, whatever it was given as",
    "equilibria/equations.py __init__": "states of rest are found by SciPy, of NumPy arrays",
    "equilibria/equations.py _direction": "states of rest are found by SciPy, of NumPy arrays",
    "equilibria/equations.py signal": "states of rest are found by SciPy, of NumPy arrays",
    "flows/consensus.py _degrees": TOLD + " where a particle sees nothing",
    "flows/functions.py _by_iteration": "the solution in a Krylov space, once",
    "flows/functions.py _root_measure": "the measure of few nodes, for LAPACK",
    "flows/particles.py _overflowed": TOLD + " where forces overflow",
    "flows/particles.py total_energy": "energies of particles are sums of the host in float64, once for each output",
    "flows/result.py save": "what is written to a file",
    "flows/spectrum.py on_columns": "the matrix of a flow between few nodes, which LAPACK takes apart",
    "functionals/accuracy.py _compared": "one random vector of channels, once for each solution",
    "functionals/accuracy.py _seen_shares": "a matrix of channels, once for each solution",
    "functionals/constraint.py _formed": "values of constrained nodes, once, or once for each time that changes them",
    "functionals/krylov.py gmres": "a column of the Hessenberg matrices, once an iteration; a restart's small solution",
    "functionals/krylov.py __init__": "norms of the first vectors of a Lanczos iteration",
    "functionals/krylov.py step": "a row of a tridiagonal matrix, once an iteration",
    "learning/base.py _as_signal": HOSTED,
    "learning/base.py _weighed": HOSTED,
    "learning/graphs.py _by_rows": HOSTED,
    "learning/graphs.py _over_total": HOSTED,
    "learning/graphs.py as_signal": HOSTED,
    "learning/graphs.py average_at": HOSTED,
    "learning/graphs.py own": HOSTED,
    "learning/graphs.py parts": HOSTED,
    "learning/spreading.py _learn": HOSTED,
    "affinities/doubly_stochastic.py __init__": "which logits are finite: whether a scaling exists, by a matching",
    "affinities/doubly_stochastic.py _of_matrix": "which given entries are positive, for the same",
    "affinities/dense.py __init__": "weights of the nodes, once for each affinity",
    "affinities/dense.py _logits": HOSTED,
    "affinities/tiled.py __init__": "weights of the nodes, once for each affinity",
    "domains/mask.py _place": "what is masked, once for each affinity",
}


class Twice:
    """The plugin: each test runs on the CPU, and on `kind` if it had a tensor in its hands."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._listed: list[str] = []

    def pytest_configure(self, config: pytest.Config) -> None:
        """Let a real GPU repeat itself, and another version of torch warn of what this one does not."""
        if self.kind == "cuda":
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            config.addinivalue_line("filterwarnings", "default")

    def pytest_ignore_collect(self, collection_path: Path) -> bool | None:
        """Leave out the files that know no tensor, and with them what they import."""
        named = collection_path.name.startswith("test_") and collection_path.suffix == ".py"
        return True if named and "torch" not in collection_path.read_text(encoding="utf-8") else None

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Leave out what is marked, and what lies on the device anyway."""
        chosen, rest = [], []
        for item in items:
            there_anyway = getattr(item, "callspec", None) is not None and item.callspec.params.get("device") == "cuda"
            own = self.kind != "pretended" and "pretended." in inspect.getsource(item.function)  # has a GPU of its own
            (rest if there_anyway or own or item.get_closest_marker("on_cpu") else chosen).append(item)
        config.hook.pytest_deselected(items=rest)
        items[:] = chosen

    def pytest_runtest_protocol(self, item: pytest.Item) -> bool:
        """Run a test twice, and report the second run, or the first where it failed or met no tensor."""
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        item.stash[_DRAWING] = _generators(item)
        first = Watch(exact=self.kind == "pretended")
        reports = self._run(item, first)
        if all(report.passed for report in reports) and first.seen:
            second = Watch(first, self.kind, exact=first.exact)
            reports = self._run(item, second)
            if not first.exact and item.get_closest_marker("other_bits") is None and (off := second.furthest()):
                reports[-1].user_properties.append(("off", off))
        for report in reports:
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._listed += [f"{report.nodeid}: {text}" for name, text in report.user_properties if name == "off"]

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """List the tests with tensors that have less than half the digits of those of the CPU."""
        if self._listed:
            terminalreporter.section("less than half the digits in common with the CPU")
            for line in self._listed:
                terminalreporter.line(line)

    def _run(self, item: Any, watch: Watch) -> list[pytest.TestReport]:
        item._initrequest()
        item.stash[_WATCH] = watch
        return runtestprotocol(item, log=False, nextitem=None)  # fixtures of modules, too, are made anew for each run

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Iterator[None]:
        return (yield from _within(item))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        return (yield from _within(item, call=True))


def _within(item: Any, *, call: bool = False) -> Any:
    """Run a stage of a test with its tensors where they belong."""
    watch = item.stash[_WATCH]
    with ExitStack() as stack:
        if watch.kind == "cpu":
            stack.enter_context(like_a_gpu())
        elif watch.kind == "cuda":
            stack.enter_context(_repeatable())
        else:
            stack.enter_context(pretended.gpu(rounding=watch.kind == "rounded"))
            stack.enter_context(patch.object(weights, "PLAIN", (*weights.PLAIN, pretended.Pretended)))
            counts = stack.enter_context(pretended.counting())
        if watch.kind == "pretended":
            stack.enter_context(choices_of_the_cpu())
        if watch.kind != "cpu":
            stack.enter_context(patch.dict(vars(item.module), item.stash[_DRAWING]))
            stack.enter_context(_constants_moved(item))
            stack.enter_context(_arrays_moved())
            stack.enter_context(_layers_moved())
        torch.manual_seed(0)
        stack.enter_context(_readable_by_tests())
        stack.enter_context(watch)
        result = yield
    if call and watch.kind == "pretended":
        same = watch.seen == watch.expected or item.get_closest_marker("other_bits") is not None
        assert same, f"bits differ from those on the CPU, first at {watch.first_difference()}"
    if call and watch.kind in ("pretended", "rounded"):
        check_copies(counts)
    return result


def check_copies(counts: pretended.Counts) -> None:
    """Raise where nlflow has copied between host and device at a place that is not in `COPIES`."""
    hidden = [
        f"{kind} at {place}"
        for kind in (pretended.TO_DEVICE, pretended.TO_HOST)
        for place in counts.places[kind]
        if place != "elsewhere" and name_of(place) not in COPIES
    ]
    assert not hidden, f"hidden copies: {'; '.join(hidden)}. Leave them out, or name the places in tests/on_device.py"


def name_of(place: str) -> str:
    """Return file and function of a place, whose line changes."""
    where, function = place.split(" ")
    return f"{where.rpartition(':')[0]} {function}"


_WATCH: pytest.StashKey[Any] = pytest.StashKey()
_DRAWING: pytest.StashKey[Any] = pytest.StashKey()  # generators of the test's file, as they were before the first run


def _generators(item: Any) -> dict[str, Any]:
    constants = vars(item.module).items()
    return {name: copy.deepcopy(one) for name, one in constants if isinstance(one, np.random.Generator)}


class Watch(TorchFunctionMode):
    """Put what tests make on the device of this run, and take down all tensors in their hands.

    Their bits, or, unless `exact`, their numbers.
    """

    def __init__(self, first: Watch | None = None, kind: str = "cpu", *, exact: bool = True) -> None:
        super().__init__()
        self.kind, self.exact = kind, exact
        self.seen: list[tuple[str, Any]] = []
        self.expected = first.seen if first else []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        copying = sys._getframe(1).f_code.co_filename == torch.nn.parameter.__file__
        if name in UNSEEN or copying or not by_test():
            return func(*args, **kwargs)
        if not (self.kind == "cuda" and torch.cuda.is_current_stream_capturing()):  # which forbids to look
            written = name in WRITING  # as the first argument, or by name
            for value in (*args[written:], *(kwargs[word] for word in kwargs if not (written and word == "tensor"))):
                self._take_down(name, value)
        if self.kind != "cpu" and name == "to" and "cpu" in (*args[1:], kwargs.get("device")):
            return moved(args[0])  # where a test puts what it gives; what it reads, it asks for by `cpu()`
        result = func(*args, **kwargs)
        if func in EMPTY:
            result.zero_()  # what happens to lie in memory has no bits to compare
        if self.kind != "cpu" and kwargs.get("device") in (None, "cpu") and func in MAKERS:
            return moved(result)  # what is drawn has the numbers that it had on the CPU
        return result

    def _take_down(self, name: str, value: Any) -> None:
        if isinstance(value, (tuple, list)):
            for each in value:
                self._take_down(name, each)
        elif isinstance(value, torch.Tensor) and not torch._C._functorch.is_functorch_wrapped_tensor(value):
            with torch._C.DisableTorchFunction():
                self.seen.append((name, bits(value) if self.exact else figures(value)))

    def first_difference(self) -> str:
        """Describe the first tensor that differs."""
        for at, (ours, theirs) in enumerate(zip(self.seen, self.expected, strict=False)):
            if ours != theirs:
                return f"tensor {at} of {len(self.expected)}, in {ours[0]} (on the CPU in {theirs[0]})"
        count, more = min(len(self.seen), len(self.expected)), max(self.seen, self.expected, key=len)
        return f"tensor {count}, in {more[count][0]}: {len(self.seen)} seen, {len(self.expected)} on the CPU"

    def furthest(self) -> str:
        """Describe the tensor with the fewest digits in common with the CPU's, where they are less than half; or ""."""
        least, text = 0.5, ""
        for at, ((name, ours), (other, theirs)) in enumerate(zip(self.seen, self.expected, strict=False)):
            if name != other or (ours is None) != (theirs is None) or (ours and ours[0].shape != theirs[0].shape):
                break  # another way through the test, as after other random numbers
            if ours and (digits := in_common(*ours, theirs[0])) < least:
                least, text = digits, f"{digits:.2f} of the digits of {ours[1]:g}, tensor {at}, in {name}"
        return text


_MOST = 2**16  # numbers of a tensor that is kept


def figures(tensor: torch.Tensor) -> tuple[Any, float] | None:
    """Return the numbers of a tensor of floats that is not large, and the rounding of its dtype."""
    if tensor.layout != torch.strided or tensor.device.type == "meta" or tensor.is_nested:
        return None
    if not tensor.is_floating_point() or tensor.numel() > _MOST:
        return None
    return pretended.take(tensor).detach().cpu().double().numpy().copy(), torch.finfo(tensor.dtype).eps


def in_common(ours: Any, rounding: float, theirs: Any) -> float:
    """Return which share of the digits that a dtype has two arrays have in common, beside their largest number."""
    finite = np.isfinite(theirs)
    if (finite != np.isfinite(ours)).any():
        return 0.0
    size = float(np.abs(theirs[finite]).max(initial=0.0))
    off = float(np.abs(ours[finite] - theirs[finite]).max(initial=0.0))
    return 1.0 if off <= rounding * size else math.log(off / (size or 1.0)) / math.log(rounding)


def bits(tensor: torch.Tensor) -> str:
    """Return a short digest of a tensor's numbers, dtype and shape."""
    if tensor.layout != torch.strided or tensor.device.type == "meta" or tensor.is_nested:
        return f"{tensor.layout} {tensor.device.type}"
    whole = pretended.take(tensor).detach().cpu().resolve_conj().clone(memory_format=torch.contiguous_format)
    numbers = whole.reshape(-1).view(torch.uint8)
    return f"{tensor.dtype} {tuple(tensor.shape)} {hashlib.sha1(numbers.numpy().tobytes()).hexdigest()[:12]}"


def by_test() -> bool:
    """Tell whether a test called, itself or by a package of others, and not nlflow."""
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(TESTS) and frame.f_code.co_name != "called":  # which hands a test's call on
            return name not in (__file__, pretended.__file__, fused.__file__)
        if name.startswith(PACKAGE):
            return False
        frame = frame.f_back  # type: ignore[assignment]
    return False


@contextmanager
def _readable_by_tests() -> Iterator[None]:
    """Let `numpy()` and `np.asarray` of a test read tensors of the device."""
    numpy = torch.Tensor.numpy

    def on_host(tensor: torch.Tensor, readable: bool, **options: Any) -> Any:
        if tensor.is_cuda and readable:
            return numpy(pretended.take(tensor).detach().cpu(), **options)
        return own[type(tensor) is pretended.Pretended](tensor, **options)

    def read(tensor: torch.Tensor, **options: Any) -> Any:
        return on_host(tensor, by_test(), **options)

    def array(tensor: torch.Tensor, dtype: Any = None, copy: Any = None) -> Any:
        result = on_host(tensor, by_test())
        return result if dtype is None else result.astype(dtype)

    own = (numpy, pretended.Pretended.numpy)
    with ExitStack() as stack:
        for kind in (torch.Tensor, pretended.Pretended):
            stack.enter_context(patch.multiple(kind, numpy=read, __array__=array))
        yield


@contextmanager
def choices_of_the_cpu() -> Iterator[None]:
    """Let the fused kernel of the CPU serve the dtype that GPUs have none for: another formula has other bits."""
    own = attention.Kernel("that of the CPU", attention._FOR_CPU, "cuda", {torch.float64: (0, 0)})
    with patch.object(attention, "KERNELS", (*attention.KERNELS, own)):
        yield


@contextmanager
def like_a_gpu() -> Iterator[None]:
    """Let fused kernels of the CPU have columns of zeros as those of GPUs do, by which it sums in another order."""

    def width_for(q: torch.Tensor, channels: int) -> int:
        width = max(q.shape[-1], min(channels, attention.WIDEST))
        return -(-width // attention._ALIGNED) * attention._ALIGNED

    with patch.object(attention, "width_for", width_for), patch.object(sums, "width_for", width_for):
        yield


@contextmanager
def _repeatable() -> Iterator[None]:
    """Let a GPU sum in the same order at each call, where torch knows how."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextmanager
def _arrays_moved() -> Iterator[None]:
    """Let `torch.from_numpy`, which torch shows to no mode, give tests tensors of the device."""
    made = torch.from_numpy
    with patch.object(torch, "from_numpy", lambda array: moved(made(array)) if by_test() else made(array)):
        yield


@contextmanager
def _layers_moved() -> Iterator[None]:
    """Move layers of nlflow that tests make, as those of torch are moved, and what tests call any layer with."""

    def made(kind: Any) -> Any:
        begin = kind.__init__

        @wraps(begin)
        def begun(self: Any, *args: Any, **options: Any) -> None:
            begin(self, *args, **options)
            if type(self).__init__ is begun and options.get("device") is None and by_test():
                with torch._C.DisableTorchFunction():
                    self.to("cuda")

        return begun

    call = torch.nn.Module.__call__

    def called(self: Any, *args: Any, **options: Any) -> Any:
        own = [parameter.device.type for parameter in self.parameters()]
        if own and sys._getframe(1).f_code.co_filename.startswith(CALLERS):
            with torch._C.DisableTorchFunction():
                if "cpu" in own:  # read from a file
                    self.to("cuda")
                args, options = moved(args), moved(options)
        return call(self, *args, **options)

    with ExitStack() as stack:
        stack.enter_context(patch.object(torch.nn.Module, "__call__", called))
        for kind in [kind for kind in _kinds(torch.nn.Module) if kind.__module__.startswith("nlflow.")]:
            if "__init__" in vars(kind):
                stack.enter_context(patch.object(kind, "__init__", made(kind)))
        yield


def _kinds(kind: type) -> set[type]:
    """Return all classes below one."""
    return set().union(*({each} | _kinds(each) for each in kind.__subclasses__()))


@contextmanager
def _constants_moved(item: Any) -> Iterator[None]:
    """Hold the constants of a test's file, and the values of its parameters, on the device."""
    constants = {name: moved(value) for name, value in vars(item.module).items() if not name.startswith("__")}
    callspec = getattr(item, "callspec", None)
    with ExitStack() as stack:
        stack.enter_context(patch.dict(vars(item.module), constants))
        if callspec is not None:
            given = {name: moved(value) for name, value in callspec.params.items()}
            if given.get("device") == "cpu":
                given["device"] = "cuda"
            stack.enter_context(patch.dict(callspec.params, given))
        yield


def moved(value: Any) -> Any:
    """Return a value whose tensors lie on the device."""
    if isinstance(value, torch.Tensor):
        there = value.layout != torch.strided or value.device.type != "cpu"
        return value if there else value.detach().to("cuda").requires_grad_(value.requires_grad)
    if type(value) in (tuple, list):
        return type(value)(moved(each) for each in value)
    if type(value) is dict:
        return {name: moved(each) for name, each in value.items()}
    return value
