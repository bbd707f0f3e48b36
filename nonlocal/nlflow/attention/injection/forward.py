"""The forward pass with terms."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from nlflow.attention.injection.blocks import own_eager, transformers_library
from nlflow.attention.injection.places import Entered, rearrange
from nlflow.attention.terms.averages import FUSED, average, repeated, with_squares
from nlflow.attention.threads import end_with_values, thread_number, tracing
from nlflow.errors import InputError, warn_caller

TERMS = "neutreno"  # the submodule of an attention module that holds its terms
STOCK = "_neutreno_stock"  # what an attention module calls without a term; modules without terms call just that
STACK = "_neutreno_stack"
CALL = "neutreno_call"
TEMPERATURE = "_nlflow_temperature"  # T of an attention module whose logits are divided by it
_PATIENCE = 100  # calls


# ---- the state of one call


@dataclass(eq=False)
class Call:
    """One call of a stack."""

    past: Any
    cached: bool
    layouts: dict[Any, Tensor]
    acted: set[str] = field(default_factory=set)  # names of the modules that got the term
    ran: bool = False  # whether a module that sums by itself was called
    owner: nn.Module | None = None  # whose values are v0
    first: dict[int, Tensor] = field(default_factory=dict)  # v0, by the number of the set
    graph: bool | None = None  # whether v0 has its derivative
    counts: dict[int, list[int]] = field(default_factory=dict)  # by module: rows so far, tokens, sets of values so far
    entered: Entered | None = None  # what the layer of v0 was called with
    latest: Entered | None = None

    def enter(self, module: nn.Module, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.entered is not None and self.owner is not None and self.entered.module is not self.owner:
            self.entered = None
        values = (*args, *kwargs.values())
        tokens = next((one for one in values if _is_numbers(one) and one.ndim > 2), None)  # (B, …, C)
        self.latest = Entered(module, layer, args, kwargs, tokens)
        if self.entered is None:
            self.entered = self.latest

    def count(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = (kwargs.get("hidden_states"), *args, *kwargs.values())
        tokens = next((one for one in given if _is_numbers(one) and one.ndim > 1), None)
        self.counts[id(module)] = [0, 0 if tokens is None else tokens.shape[:-1].numel(), 0]

    def first_values(self, module: nn.Module, terms: Any, new: Tensor) -> Tensor | None:
        name = terms.label or type(module).__name__
        if self.owner is None:
            self.owner = module
        number = self._turn(module, new)
        if not self.first or (self.owner is module and (not terms.repeated or number not in self.first)):
            self._keep_first(module, new, number)
            if not (terms.first or terms.repeated or module.training):
                raise InputError(
                    f"model: got a call in which {name} ran and the first layer of its stack did not, so that there is "
                    "no v0; do not drop the first layer (layerdrop=0)"
                )
            return None
        if not terms.active:
            if terms.first:
                raise InputError(
                    f"model: got a call in which {name}, the first layer of its stack, ran after another, whose values "
                    "would be v0; expected layers that run in the order in which the model lists them"
                )
            return None
        if number not in self.first:
            raise InputError(
                f"model: got {number + 1} averages in one call of {name}, more than in the first layer of its stack; "
                "expected layers of the same kind; give these layers fidelity 0"
            )
        first = self.first[number]
        self.acted.add(name)
        if first.device != new.device:  # layers on several devices
            first = first.to(new.device)
        moved = self._piece_of(module, first, new)
        if moved is None:
            moved = self._in_order(module, first, new)
        if moved.shape != new.shape:
            raise InputError(
                f"model: got values of shape {tuple(new.shape)} in {name} and v0 of shape {tuple(first.shape)}; "
                "expected layers of the same heads and tokens; give these layers fidelity 0"
            )
        if not self.graph and torch.is_grad_enabled() and new.requires_grad:
            raise InputError(
                "model: got gradient checkpointing with use_reentrant=True (or a first layer under no_grad), with "
                "which the derivative with respect to v0 is lost; expected the other kind; switch checkpointing on "
                "with use_reentrant=False"
            )
        return moved

    def _turn(self, module: nn.Module, new: Tensor) -> int:
        """Return which set of values of a module this is: some average two sets with the same P, as DiffLlama."""
        counts = self.counts.get(id(module))
        if counts is None or self._pieces(module, new) is not None:
            return 0
        counts[2] += 1
        return counts[2] - 1

    def _pieces(self, module: nn.Module, new: Tensor) -> list[int] | None:
        """Return the counts of a module that averages over parts of its tokens, as pictures in one sequence."""
        counts = self.counts.get(id(module))
        return counts if counts is not None and new.shape[0] == 1 and new.shape[-2] < counts[1] else None

    def _keep_first(self, module: nn.Module, new: Tensor, number: int) -> None:
        """Keep v0, or add the next piece to it."""
        counts = self._pieces(module, new)
        if number not in self.first:
            self.first[number] = new
        elif counts is not None and self.first[number].shape[-2] < counts[1]:
            self.first[number] = torch.cat([self.first[number], new], dim=-2)
        if counts is not None:
            counts[0] += new.shape[-2]
        if self.graph is None:
            self.graph = torch.is_grad_enabled()

    def _piece_of(self, module: nn.Module, first: Tensor, new: Tensor) -> Tensor | None:
        """Return the rows of v0 that belong to a piece of the tokens; None where `new` has all of them."""
        counts = self._pieces(module, new)
        if counts is None:
            return None
        begin, counts[0] = counts[0], counts[0] + new.shape[-2]
        if first.shape[-2] != counts[1] or counts[0] > counts[1]:
            raise InputError(
                f"model: got {type(module).__name__}, which averages over parts of {counts[1]} tokens, and a first "
                f"layer of its stack with {first.shape[-2]}; expected layers over the same tokens; give these layers "
                "fidelity 0"
            )
        return first.narrow(-2, begin, new.shape[-2])

    def _in_order(self, module: nn.Module, first: Tensor, new: Tensor) -> Tensor:
        """Return v0 with its rows in the order of this layer's."""
        begun, latest = self.entered, self.latest
        if begun is None or latest is None or latest.module is not module or begun.module is not self.owner:
            return first  # the layer is the attention itself
        if _are_tokens(begun.tokens, first) and _are_tokens(latest.tokens, new):
            return first
        return rearrange(self.layouts, begun, latest, first, new)


def _is_numbers(one: Any) -> bool:
    return isinstance(one, Tensor) and one.is_floating_point()


def _are_tokens(tokens: Tensor | None, values: Tensor) -> bool:
    return tokens is None or (tokens.shape[0] == values.shape[0] and tokens.shape[1:-1].numel() == values.shape[2])


# ---- the layers that share v0


@dataclass(eq=False)
class Part:
    """What must stay for a term to act."""

    name: str
    parent: nn.Module
    place: str
    child: nn.Module
    hook: Any = None

    def there(self) -> bool:
        now = self.parent._modules.get(self.place)
        if now is self.child:
            return True
        if now is None or self.hook is None:
            return False
        return self.hook in (*now._forward_hooks.values(), *now._forward_pre_hooks.values())


class Stack:
    """The layers that share v0.

    A call travels as a keyword argument where all modules down to the attention take such, so that gradient
    checkpointing meets its own; elsewhere it is the innermost open one of this thread.
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
        self._open: dict[int, list[Call]] = {}

    def open(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
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
        call = Call(self._past(module, args, kwargs), cached, self.layouts)
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
            warn_caller(
                f"model: got a training in which what the terms of {', '.join(frozen[:3])}"
                f"{' …' if frozen[3:] else ''} would learn is frozen (get_peft_model freezes what it did not make): it "
                "keeps its value; call attach after get_peft_model, or set requires_grad before the optimizer is made",
            )

    def close(self, module: nn.Module, args: Any, output: Any) -> None:
        calls = self._open.get(thread_number())
        if not calls:
            return
        call = calls.pop()
        if not calls:
            self._open.pop(thread_number(), None)
        if output is None or torch.compiler.is_compiling():
            return
        if partly := [count for count in call.counts.values() if 0 < count[0] < count[1]]:
            raise InputError(
                f"model: got a forward in which a layer averaged over {partly[0][0]} of its {partly[0][1]} tokens; "
                "expected one value for each; leave this module out with adapter="
            )
        if self.seen:
            return
        self.acted |= call.acted
        self.calls += 1
        dropped = self.calls < _PATIENCE  # layers may be dropped at random in training
        missing = [
            name for name, one in self.acting.items() if name not in self.acted and not (one.training and dropped)
        ]
        if missing and (call.first or call.latest is not None or call.ran):
            raise InputError(
                f"model: got a forward in which {', '.join(missing[:4])}{' …' if missing[4:] else ''} did not get the "
                "term, since it was not called, or does not call its projection; give these layers fidelity 0, or say "
                "with adapter= which modules are meant"
            )
        self.seen = self.acting.keys() <= self.acted

    def of(self, calls: dict[str, Call] | None, name: str) -> Call:
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
        if (call := self._running(kwargs)) is not None:
            call.enter(module, layer, args, kwargs)

    def count(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if (call := self._running(kwargs)) is not None:
            call.count(module, args, kwargs)

    def _running(self, kwargs: dict[str, Any]) -> Call | None:
        """Return the running call, that among these keyword arguments or the innermost one; None while tracing."""
        if tracing():
            return None
        found = kwargs.get(CALL, {}).get(self.group)
        return found or next(iter(self._open.get(thread_number(), ())[-1:]), None)

    def ran(self) -> None:
        if calls := () if tracing() else self._open.get(thread_number(), ()):
            calls[-1].ran = True

    def _past(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return how many tokens a cache has. It is asked before the layers count on."""
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


# ---- the attention function


def attention(
    affinity: str,
    base: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Compute the attention of one block with its terms, as transformers asks for it.

    `query` is (B, H, M, d), `key` and `value` are (B, G, N, d); the output is (B, M, H, d), the weights (B, H, M, N).
    """
    call = kwargs.pop(CALL, None)
    terms: Any = getattr(module, TERMS, None)
    if terms is None:  # cross-attention beside blocks that have terms, or a model that was not attached
        stock = hasattr(module, STOCK)
        if not stock and affinity in ("softmax", "symmetric"):
            raise InputError(
                f"attn_implementation: got a name of NeuTRENO's for {type(module).__name__}, whose model has no terms; "
                "call nlflow.attention.attach(model), which numbers its layers and sets the name"
            )
        return _plain("softmax" if stock else affinity, base, module, (query, key, value), attention_mask, kwargs)
    stack: Stack = getattr(module, STACK)
    name: str = terms.label or type(module).__name__
    end_with_values(module, value)
    call = stack.of(call, name)
    count, past = query.shape[-2], call.past
    _check_tokens(call, name, count, value)
    if affinity == "symmetric":
        query = repeated(_new_rows(key, count, past), query.shape[1])
    output, weights = _plain(affinity, base, module, (query, key, value), attention_mask, kwargs)
    new, causal = _new_rows(value, count, past), terms.causal and count > 1
    if terms.feat is not None:
        terms.visible.set(_square_mask(attention_mask, count, key.shape[-2], terms.causal, "feat_scale"))
    first = call.first_values(module, terms, new)
    if first is None and terms.attn_weight is None:
        return output, weights
    if causal and attention_mask is None and key.shape[-2] > count:
        # transformers gave no causal mask: a cache of fixed size holds these tokens first, and then nothing.
        key, value = key[..., :count, :], value[..., :count, :]
    used = weights
    if terms.log_variance is not None and first is not None and (weights is None or kwargs.get("dropout")):
        kernel = "softmax" if affinity == "symmetric" else affinity  # whose queries are keys already
        scaling = scaling_of(module, query, kwargs)
        used = average(query, key, value, kernel, scaling=scaling, mask=attention_mask, causal=causal)[1]
    result = terms(output.transpose(1, 2), value, new, first, used, attention_mask, causal)
    return result.transpose(1, 2), weights


def scaling_of(module: nn.Module, query: Tensor, kwargs: Mapping[str, Any]) -> Any:
    scaling = kwargs.get("scaling")
    if (temperature := module.__dict__.get(TEMPERATURE)) is None:
        return scaling
    return (query.shape[-1] ** -0.5 if scaling is None else scaling) / temperature


def _plain(
    affinity: str, base: str, module: nn.Module, tokens: tuple[Tensor, ...], mask: Tensor | None, kwargs: dict[str, Any]
) -> tuple[Tensor, Tensor | None]:
    """Return the average alone, (B, M, H, d), and its weights where they are formed.

    With ``'symmetric'`` the queries are keys already.
    """
    query, key, value = tokens
    if (temperature := module.__dict__.get(TEMPERATURE)) is not None:
        kwargs = {**kwargs, "scaling": scaling_of(module, query, kwargs)}
    if affinity in FUSED:
        if affinity == "gaussian":
            scaling = kwargs.get("scaling")
            kwargs = {**kwargs, "scaling": query.shape[-1] ** -0.5 if scaling is None else scaling}
            query, key = with_squares(query, key)
        if base == "eager" and getattr(module, "reorder_and_upcast_attn", False):  # GPT-2's other eager path
            if temperature is not None:
                query = query / temperature
            return module._upcast_and_reordered_attn(query, key, value, mask)  # type: ignore[no-any-return,operator]
        stock = getattr(module, STOCK, None) or stock_function(module, base)
        return stock(module, query, key, value, mask, **kwargs)  # type: ignore[no-any-return]
    foreign = [name for name in ("softcap", "s_aux", "position_bias") if kwargs.get(name) is not None]
    if foreign:
        raise InputError(
            f"affinity: got {affinity!r} for {type(module).__name__}, whose attention uses {', '.join(foreign)}, "
            "which is defined for softmax; expected 'softmax', 'symmetric' or 'gaussian'"
        )
    averages, weights = average(
        query, key, value, affinity, scaling=kwargs.get("scaling"), mask=mask,
        causal=bool(getattr(module, "is_causal", False)),
        dropout=kwargs.get("dropout", 0.0) if module.training else 0.0,
    )  # fmt: skip
    return averages.transpose(1, 2).contiguous(), weights


def stock_function(module: nn.Module, base: str) -> Callable[..., Any]:
    """Return what a module calls without a term: its own file's eager function, or transformers' sdpa."""
    if base == "sdpa":
        function: Callable[..., Any] = transformers_library().AttentionInterface()["sdpa"]
        return function
    if (found := own_eager(module)) is not None:
        return found
    raise InputError(
        f"model: got {type(module).__name__}, whose file has no eager_attention_forward, expected one as in "
        "transformers 5; load the model with attn_implementation='sdpa'"
    )


def _new_rows(value: Tensor, count: int, past: int | Tensor) -> Tensor:
    """Return the rows of values that belong to this call's tokens.

    With a growing cache they are the last; in one of fixed size they follow those of the past, until it is full.
    """
    tokens = value.shape[-2]
    if tokens == count:
        return value
    if isinstance(past, Tensor):
        start = past.clamp_max(tokens - count)
        return value.index_select(-2, start + torch.arange(count, device=value.device))
    return value.narrow(-2, min(past, tokens - count), count)


def _check_tokens(call: Call, name: str, count: int, value: Tensor) -> None:
    tokens = value.shape[-2]
    if tokens < count or (tokens > count and not call.cached):
        raise InputError(
            f"model: got {tokens} values for {count} queries in {name}, without a cache: reduced keys, or those of "
            "another sequence; expected self-attention over the same tokens; leave this module out with adapter="
        )


def _square_mask(mask: Tensor | None, queries: int, keys: int, causal: bool, name: str) -> Tensor | None:
    """Return the mask between the tokens of this call, (B, N, N), or refuse where means need tokens of the past."""
    if queries != keys and causal:
        raise InputError(
            f"{name}: got {queries} token(s) after {keys - queries} in a cache, expected the whole sequence, since the "
            "mean over its tokens is not in the cache; decode with use_cache=False"
        )
    return None if mask is None else mask[:, 0]
