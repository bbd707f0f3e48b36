"""The state of one call of a stack of layers: v0, and what has been seen.

Each call of a stack has a dictionary. Where all modules down to the attention take keyword arguments that they do not
know, it travels as one of them, so that a recomputation of gradient checkpointing meets the state of its own call.
Everywhere else it is the innermost call that is open in this thread.
"""

from __future__ import annotations

import inspect
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from nlflow.attention.injection.places import counting, note, tracing
from nlflow.attention.terms.threads import thread_number
from nlflow.errors import InputError, NlflowWarning

CALL = "neutreno_call"
_PATIENCE = 100  # calls


@dataclass(eq=False)
class Part:
    """What must stay in its place for the term of the module `name`: a child, or at least the hook on it."""

    name: str
    parent: nn.Module
    place: str
    child: nn.Module
    hook: Any = None

    def there(self) -> bool:
        """Return whether it is there."""
        now = self.parent._modules.get(self.place)
        if now is self.child:
            return True
        if now is None or self.hook is None:
            return False
        return self.hook in (*now._forward_hooks.values(), *now._forward_pre_hooks.values())


class Stack:
    """The layers that share v0, and the state of their calls.

    `container` runs the layers. `hands_on` says whether it and all modules between it and the attention functions take
    keyword arguments that they do not know.
    """

    def __init__(self, group: str, container: nn.Module, hands_on: bool) -> None:
        self.group, self.container, self.hands_on = group, container, hands_on
        self.acting: dict[str, nn.Module] = {}  # by name: the attention modules that have a term
        self.terms: dict[str, nn.Module] = {}  # by the name of the attention module
        self.parts: list[Part] = []
        self.told = False  # that strengths do not learn
        self.configs: dict[str, Any] = {}  # of attention modules that ask for their function by a name
        self.names: frozenset[str] = frozenset()
        self.seen = False  # whether a whole call has shown that the term arrives everywhere
        self.acted: set[str] = set()
        self.calls = 0
        self.layouts: dict[Any, Tensor] = {}  # which token each row of values is, by layer and shapes
        self._open: dict[int, list[dict[str, Any]]] = {}

    def open(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Begin a call: a hook before the container's forward."""
        for name, config in self.configs.items():
            if (now := str(config._attn_implementation)).removeprefix("nlflow_probe_") not in self.names:
                raise InputError(
                    f"model: got attn_implementation={now!r} in {name}, set after attach, with which its term would be "
                    "left out; set it with the attached model's own set_attn_implementation('eager' or 'sdpa'), or "
                    "call detach(model) first"
                )
        if not torch.compiler.is_compiling():
            self._check_terms(module)
        cached = any(
            one is not None and not isinstance(one, bool) and ("past" in name or "cache" in name)
            for name, one in kwargs.items()
        ) or any(hasattr(one, "get_seq_length") for one in args)
        call: dict[str, Any] = {"past": self._past(module, args, kwargs), "cached": cached, "acted": set()}
        if self.hands_on and module is self.container:
            kwargs = {**kwargs, CALL: {**kwargs.get(CALL, {}), self.group: call}}  # of all stacks that it runs
            if torch.compiler.is_compiling():
                return args, kwargs
        self._open.setdefault(thread_number(), []).append(call)
        return args, kwargs

    def _check_terms(self, runner: nn.Module) -> None:
        """Refuse modules that another library has put there, and tell of strengths that it has frozen."""
        frozen = []
        learns = runner.training and torch.is_grad_enabled() and not self.told
        for part in self.parts:
            if not part.there():
                raise InputError(
                    f"model: got another {part.place} in {part.name} than when it was attached (PEFT puts others "
                    "there, in modules_to_save and merge_and_unload too), so that its term would be wrong; call detach "
                    "on the attached model first, and attach afterwards"
                )
        for name, own in self.terms.items():
            if learns and not all(one.requires_grad for one in own.parameters()):
                frozen.append(name)
        if frozen and any(one.requires_grad for one in runner.parameters()):
            self.told = True
            warnings.warn(
                f"model: got a training in which what the terms of {', '.join(frozen[:3])}"
                f"{' …' if frozen[3:] else ''} would learn is frozen (get_peft_model freezes what it did not make): it "
                "keeps its value; call attach after get_peft_model, or set requires_grad before the optimizer is made",
                NlflowWarning,
                stacklevel=2,
            )

    def close(self, module: nn.Module, args: Any, output: Any) -> None:
        """End a call: a hook after the container's forward, also when it fails."""
        calls = self._open.get(thread_number())
        if not calls:
            return
        call = calls.pop()
        if not calls:
            self._open.pop(thread_number(), None)
        if output is None or torch.compiler.is_compiling():
            return
        if partly := [count for count in call.get("counts", {}).values() if 0 < count[0] < count[1]]:
            raise InputError(
                f"model: got a forward in which a layer averaged over {partly[0][0]} of its {partly[0][1]} tokens; "
                "expected one value for each; leave this module out with adapter="
            )
        if self.seen:
            return
        self.acted |= call["acted"]
        self.calls += 1
        dropped = self.calls < _PATIENCE  # layers may be dropped at random in training
        missing = [
            name for name, one in self.acting.items() if name not in self.acted and not (one.training and dropped)
        ]
        if missing and call.keys() & {"first", "latest", "ran"}:
            raise InputError(
                f"model: got a forward in which {', '.join(missing[:4])}{' …' if missing[4:] else ''} did not get the "
                "term, since it was not called, or does not call its projection; give these layers fidelity 0, or say "
                "with adapter= which modules are meant"
            )
        self.seen = self.acting.keys() <= self.acted

    def of(self, calls: dict[str, dict[str, Any]] | None, name: str) -> dict[str, Any]:
        """Return the state of the running call; `calls` are those that came as a keyword argument."""
        if calls is not None and self.group in calls:
            return calls[self.group]
        if running := self._open.get(thread_number()):
            return running[-1]
        raise InputError(
            f"model: got a call of {name} outside of the forward of its stack of layers, where v0 is not known; "
            "call the whole model. If this is gradient checkpointing: it is with use_reentrant=True, or the layers of "
            "this model take no further keyword arguments, through which v0 would reach the recomputation; switch "
            "checkpointing off. If the model was wrapped after attach (PEFT): attach the wrapper"
        )

    def enter(self, module: nn.Module, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keep what a layer of the running call is called with: a hook before it."""
        if tracing():
            return
        if (call := self._running(kwargs)) is not None:
            note(call, module, layer, args, kwargs)

    def count(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Begin a call of an attention module: a hook before it."""
        if tracing():
            return
        if (call := self._running(kwargs)) is not None:
            counting(call, module, args, kwargs)

    def _running(self, kwargs: dict[str, Any]) -> dict[str, Any] | None:
        """Return the state of the running call: that among these keyword arguments, or the innermost one."""
        found = kwargs.get(CALL, {}).get(self.group)
        return found or next(iter(self._open.get(thread_number(), ())[-1:]), None)

    def ran(self) -> None:
        """Note that a module of the running call was called, whether or not its term was."""
        if calls := () if tracing() else self._open.get(thread_number(), ()):
            calls[-1]["ran"] = True

    def _past(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return how many tokens a cache has, which is asked before the layers count on."""
        cache = kwargs.get("past_key_values")
        if cache is None and args:
            names = list(inspect.signature(module.forward).parameters)
            place = names.index("past_key_values") if "past_key_values" in names else len(args)
            cache = args[place] if len(args) > place else None
        counted = getattr(cache, "get_seq_length", None)
        if counted is None:
            return 0
        past: Any = 0
        for layer in range(max(1, len(getattr(cache, "layers", ())))):
            try:
                past = counted(layer) if layer else counted()
                break
            except (ValueError, IndexError, TypeError, AttributeError):  # a layer that keeps no keys, as Mamba's
                continue
        return past.clone() if isinstance(past, Tensor) else past  # of a static cache, which counts on in place
