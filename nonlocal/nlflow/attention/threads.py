"""Models that several threads use."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from threading import RLock, get_ident
from typing import Any

import torch
from torch import Tensor, nn

from nlflow.backends import forks
from nlflow.errors import InputError

_LOCK = forks.renewed(RLock())


# ---- values that are changed for a while


@dataclass
class _Held:
    before: Any
    now: Any
    holders: int = 0


_HELD: dict[Any, _Held] = {}


@contextmanager
def held(key: Any, get: Callable[[], Any], put: Callable[[Any], Any], change: Callable[[Any], Any]) -> Iterator[None]:
    """Change a value while any thread wants it; the last one puts it back, unless somebody else has set it."""
    with _LOCK:
        if key not in _HELD:
            before = get()
            _HELD[key] = _Held(before, change(before))
            put(_HELD[key].now)
        one = _HELD[key]
        one.holders += 1
    try:
        yield
    finally:
        with _LOCK:
            one.holders -= 1
            if not one.holders:
                del _HELD[key]
                now = get()
                if now is one.now or (not isinstance(now, Tensor) and now == one.now):
                    put(one.before)


@contextmanager
def replaced(names: dict[str, Any], name: str, value: Any) -> Iterator[None]:
    with _LOCK:
        before = names[name]
        names[name] = value
        try:
            yield
        finally:
            names[name] = before


# ---- models that are changed for a while


@dataclass(frozen=True)
class _Use:
    thread: int
    doing: str
    alone: bool


_USES: dict[int, list[_Use]] = {}


@contextmanager
def using(model: nn.Module, doing: str, *, alone: bool = False) -> Iterator[None]:
    """Say what this thread does with a model, which no other thread may use meanwhile if `alone`."""
    own = _Use(get_ident(), doing, alone)
    modules = list(model.modules())

    def refuse(module: nn.Module, *_: Any) -> None:
        if get_ident() != own.thread and not torch.compiler.is_compiling():
            raise _refused(module, own, "runs it")

    with ExitStack() as stack:
        with _LOCK:
            for module in modules:
                for use in _USES.get(id(module), ()):
                    if use.thread != own.thread and (use.alone or alone):
                        raise _refused(module, use, doing)
            for module in modules:
                _USES.setdefault(id(module), []).append(own)
            stack.callback(_end, modules, own)
        if alone:
            for module in modules:
                stack.callback(module.register_forward_pre_hook(refuse).remove)
        yield


def _refused(module: nn.Module, other: _Use, doing: str) -> InputError:
    return InputError(
        f"model: got {type(module).__name__}, of which another thread {other.doing}, while this one {doing}; expected "
        "one of them at a time; call model.eval() before, or use a lock of your own, or a copy of the model"
    )


def _end(modules: list[nn.Module], own: _Use) -> None:
    with _LOCK:
        for module in modules:
            uses = _USES[id(module)]
            uses.remove(own)
            if not uses:
                del _USES[id(module)]


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    training = [module for module in model.modules() if module.training]
    if not training:
        yield
        return
    with using(model, "has put the training into evaluation mode", alone=True):
        for module in training:
            module.training = False
        try:
            yield
        finally:
            for module in training:
                module.training = True


# ---- what one thread does


def thread_number() -> int:
    return 0 if torch.compiler.is_compiling() else get_ident()


class OfThread:
    """A value for each thread."""

    def __init__(self) -> None:
        self._values: dict[int, Any] = {}

    def get(self) -> Any:
        return self._values.get(thread_number())

    def set(self, value: Any) -> None:
        if value is None:
            self._values.pop(thread_number(), None)
        else:
            self._values[thread_number()] = value

    def take(self) -> Any:
        return self._values.pop(thread_number(), None)


_TRACED: ContextVar[nn.Module | None] = ContextVar("nlflow_traced", default=None)


class _Shown(BaseException):  # no module between may catch it
    def __init__(self, values: Tensor) -> None:
        self.values = values


def run_for_values(module: nn.Module, run: Callable[[], Any]) -> Tensor | None:
    """Return the values of a module from a run that ends with them; None where it does not come to them."""
    token = _TRACED.set(module)
    try:
        run()
    except _Shown as found:
        return found.values
    finally:
        _TRACED.reset(token)
    return None


_ASIDE = nn.Module()  # none of any model


@contextmanager
def aside() -> Iterator[None]:
    token = _TRACED.set(_ASIDE)
    try:
        yield
    finally:
        _TRACED.reset(token)


def tracing() -> bool:
    return not torch.compiler.is_compiling() and _TRACED.get() is not None


def end_with_values(module: nn.Module, values: Tensor) -> None:
    if not torch.compiler.is_compiling() and _TRACED.get() is module:
        raise _Shown(values)
