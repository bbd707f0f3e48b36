"""Models that several threads use: what is changed in them for a while, and who may run them meanwhile.

Several threads may run a model, and look into it, at the same time. What takes a model's mode or its terms from under
another thread is refused, in whichever thread would be wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from threading import RLock, get_ident
from typing import Any

import torch
from torch import nn

from nlflow.errors import InputError

_LOCK = RLock()


# ---- values that are changed for a while


@dataclass
class _Held:
    before: Any
    now: Any
    holders: int = 0


_HELD: dict[Any, _Held] = {}


@contextmanager
def held(key: Any, get: Callable[[], Any], put: Callable[[Any], Any], change: Callable[[Any], Any]) -> Iterator[None]:
    """Change a value for as long as any thread wants it; the last one puts back what it was before the first.

    A value that somebody else has set meanwhile stays.
    """
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
                if get() == one.now:
                    put(one.before)


@contextmanager
def replaced(names: dict[str, Any], name: str, value: Any) -> Iterator[None]:
    """Put another value under a name of a module for the time of a call, one thread after the other."""
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
    """Say what this thread does with a model, for a while.

    `alone`: no other thread may run it or look into it then. `InputError` is raised here where one does so already,
    and in that thread where it begins later, or goes on.
    """
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
