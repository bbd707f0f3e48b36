"""Where the attention of a model is, found by what its modules do.

A module is attention if its own ``forward`` asks transformers' interface for the function (`asks`), if it is torch's
`torch.nn.MultiheadAttention`, or if it sums by itself: its code calls a softmax or torch's fused attention, between a
projection of values and one of the output (`sums`). Names of classes play no part.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

from torch import nn

INTERFACE, TORCH, SUMS = "interface", "torch", "sums"

_VALUES = (
    "value", "v_proj", "v_lin", "value_proj", "v", "project_v", "v_head", "projection_value", "query_key_value", "qkv",
    "c_attn", "Wqkv", "qkv_proj", "in_proj", "to_v", "to_qkv",
)  # fmt: skip
_OUTPUTS = (
    "o_proj", "out_proj", "out_lin", "output_projection", "c_proj", "dense", "proj", "o", "out", "projection", "wo",
    "to_out", "output_proj", "attention_out", "post_proj",
)  # fmt: skip
_OUTPUTS_BESIDE = ("../output.dense", "../output", "../attn_proj")
_EAGER = "eager_attention_forward"
_SUMMED = frozenset({"softmax", "scaled_dot_product_attention", "Softmax"})
_OTHER_TOKENS = frozenset(
    {"key_value_states", "encoder_hidden_states", "encoder_outputs", "context", "memory", "kv_states", "latents",
     "kv", "cross_hidden_states", "cross_attention_states"}
)  # fmt: skip
_SAMPLED = frozenset({"reference_points", "spatial_shapes"})  # of attention that looks at points of a map
_CROSS = re.compile(r"cross|encoder_attn|encdec|enc_dec|encoder_decoder|multihead_attn$|pool", re.IGNORECASE)


def own_forward(module: nn.Module) -> Any:
    """Return the function that is the forward of a module's class, without its decorators."""
    return inspect.unwrap(type(module).forward)


def _names(code: CodeType) -> Iterator[str]:
    """Yield the names that a function uses, and those of the functions inside it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _used(module: nn.Module) -> set[str]:
    """Return the names that the forward of a module uses, and those of its own methods that it calls."""
    found: set[str] = set()
    waiting, done = [own_forward(module)], set()
    while waiting:
        function = waiting.pop()
        code = getattr(function, "__code__", None)
        if code is None or code in done:
            continue
        done.add(code)
        names = set(_names(code))
        found |= names
        for name in names:
            method = inspect.getattr_static(type(module), name, None)
            if inspect.isfunction(method) and method.__module__ == type(module).__module__:
                waiting.append(inspect.unwrap(method))
    return found


def asks(module: nn.Module) -> bool:
    """Return whether the forward of a module asks transformers' ``AttentionInterface`` for its attention."""
    forward = own_forward(module)
    code = getattr(forward, "__code__", None)
    if code is None:
        return False
    known = getattr(forward, "__globals__", {})
    used = [known.get(name) for name in _names(code) if name in known]
    return any(any(kind.__name__ == "AttentionInterface" for kind in type(one).__mro__) for one in used)


def own_eager(module: nn.Module) -> Callable[..., Any] | None:
    """Return the function that a module calls where its configuration names ``eager``, None where there is none.

    It is the one that the module's forward names, whatever it is called there, or else that of the file of its class.
    """
    forward = own_forward(module)
    known = getattr(forward, "__globals__", {})
    named = [known.get(name) for name in _names(forward.__code__) if name.endswith(_EAGER)]
    files = [getattr(sys.modules.get(kind.__module__), _EAGER, None) for kind in type(module).__mro__]
    return next((one for one in (*named, *files) if one is not None), None)


def sums(module: nn.Module) -> bool:
    """Return whether a module computes averages of attention by itself, between two projections of its own."""
    direct = dict(module.named_children())
    if not any(isinstance(direct.get(name), nn.Module) for name in _VALUES):
        return False
    return bool(_SUMMED & _used(module)) or any(isinstance(child, nn.Softmax) for child in direct.values())


def kind_of(module: nn.Module) -> str | None:
    """Return which kind of attention a module is: `INTERFACE`, `TORCH` or `SUMS`; None for others."""
    if isinstance(module, nn.MultiheadAttention):
        return TORCH
    if asks(module):
        return INTERFACE
    return SUMS if sums(module) else None


def crosses(name: str, module: nn.Module) -> bool:
    """Return whether a module averages over others than its own tokens, by what it says of itself.

    They are those of another sequence, or points of a map between its pixels (deformable attention).
    """
    *_, holder, own = ("", *name.split("."))  # BERT's kind has its sums one module below: crossattention.self
    if getattr(module, "is_cross_attention", False) or _CROSS.search(own) or "cross" in holder.lower():
        return True
    if re.search("Cross|Pool", type(module).__name__):
        return True
    if isinstance(module, nn.MultiheadAttention):
        return False
    for argument, about in inspect.signature(own_forward(module)).parameters.items():
        if argument in _SAMPLED:
            return True
        if argument in _OTHER_TOKENS and about.default is inspect.Parameter.empty:
            return True
    return False


def values_of(module: nn.Module) -> nn.Module | None:
    """Return the projection that makes a module's values, alone or together with queries and keys."""
    direct = dict(module.named_children())
    return next((direct[name] for name in _VALUES if name in direct), None)


def output_of(name: str, module: nn.Module, named: dict[str, nn.Module]) -> nn.Module | None:
    """Return the output projection of the attention module of this name, where it is where such usually are."""
    direct = dict(module.named_children())
    for child in _OUTPUTS:
        found = direct.get(child)
        if isinstance(found, nn.Sequential | nn.ModuleList) and len(found):
            found = found[0]
        if width(found):
            return found
    parent = name.rpartition(".")[0]
    for path in _OUTPUTS_BESIDE:
        base = named.get(f"{parent}.{path[3:]}" if parent else path[3:])
        if width(base) and base is not None:
            return base
    return None


def width(projection: Any) -> int:
    """Return how many features a projection makes, 0 for what is none."""
    if not isinstance(projection, nn.Module):
        return 0
    projection = getattr(projection, "base_layer", projection)  # of PEFT, around a projection
    for name in ("out_features", "nf", "out_channels"):  # of a Linear, of GPT-2's Conv1D
        if isinstance(found := getattr(projection, name, None), int):
            return found
    return 0


def value_widths(module: nn.Module) -> tuple[int, ...]:
    """Return what tells the values of two modules apart: the widths of their projections."""
    if isinstance(module, nn.MultiheadAttention):
        return (module.embed_dim, module.num_heads)
    return tuple(found for child in module.children() if (found := width(child)) > 1)
