"""Where self-attention is."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import lru_cache
from types import CodeType
from typing import Any

from torch import nn

from nlflow.errors import InputError, not_installed

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
_NEEDED = 5  # the release of transformers since which BERT too calls its attention through the interface


@dataclass(frozen=True)
class Adapter:
    """Where the blocks of self-attention of a model are.

    Attributes
    ----------
    attention : str
        Class of the attention modules (``'ViTAttention'``), or, with a dot or a star, a pattern of their names in the
        model (``'backbone.layers.*.attn'``).
    projection : str
        Path of the output projection from the attention module, such as ``'o_proj'``, or ``'../output.dense'`` where it
        belongs to the parent; it is looked for where this is empty.
    causal : bool, optional
        By default what the module says.
    cross : str
        End of the names of cross-attention modules of the same class, which are left alone.
    stack : str
        ``'encoder'`` or ``'decoder'``; by default causal blocks are the decoder's.
    """

    attention: str
    projection: str = ""
    causal: bool | None = None
    cross: str = ""
    stack: str = ""

    def takes(self, name: str, module: nn.Module) -> bool:
        """Return whether this adapter is for a module of that name."""
        if "*" in self.attention or "." in self.attention:
            found = fnmatchcase(name, self.attention)
        else:
            found = any(kind.__name__ == self.attention for kind in type(module).__mro__)
        crossing = bool(self.cross) and name.endswith(self.cross)
        return found and not crossing and not getattr(module, "is_cross_attention", False)


@dataclass(frozen=True, eq=False)
class Block:
    """One block of self-attention.

    Attributes
    ----------
    name : str
        Of the attention module in the model.
    module : torch.nn.Module
    causal : bool
    stack : str
        ``'encoder'`` or ``'decoder'``.
    container : str
        Name of the module that runs the layers of the stack; ``''`` is the model itself.
    layer : torch.nn.Module
        The transformer layer (attention and MLP) of the block.
    projection : torch.nn.Module, optional
        Of the output.
    group : str
        Blocks of the same group share their v0.
    kind : str
        What averages: ``'interface'`` (transformers' function), ``'torch'`` (`torch.nn.MultiheadAttention`) or
        ``'sums'`` (the module itself).
    values : torch.nn.Module, optional
        The projection that makes the values.
    repeated : bool
        Whether one call of the stack calls the module several times.
    """

    name: str
    module: nn.Module
    causal: bool
    stack: str
    container: str
    layer: nn.Module
    projection: nn.Module | None = None
    group: str = ""
    kind: str = INTERFACE
    values: nn.Module | None = None
    repeated: bool = False

    @property
    def tokens_first(self) -> bool:
        """Whether states in this block are (N, B, D)."""
        return isinstance(self.module, nn.MultiheadAttention) and not self.module.batch_first


def transformers_library() -> Any:
    try:
        library = importlib.import_module("transformers")
    except ImportError as error:
        raise not_installed("a model", f"transformers {_NEEDED} or newer", "attention") from error
    version = str(getattr(library, "__version__", "0"))
    if not (major := version.split(".")[0]).isdigit() or int(major) < _NEEDED:
        raise InputError(
            f"transformers: got release {version}, expected {_NEEDED} or newer, whose models call their attention "
            f"through AttentionInterface; pip install 'transformers>={_NEEDED}'"
        )
    return library


def network_of(model: Any) -> nn.Module:
    if isinstance(model, nn.Module):
        return model
    inner = getattr(model, "model", None)
    if isinstance(inner, nn.Module):
        return inner
    raise InputError(
        f"model: got {type(model).__name__}, expected a torch.nn.Module, or a pipeline of transformers; load the model "
        "first"
    )


def blocks(model: Any, adapter: Adapter | Sequence[Adapter] | None = None) -> list[Block]:
    """List the blocks of self-attention of a model, the encoder's first.

    Parameters
    ----------
    model : torch.nn.Module
    adapter : Adapter or sequence of Adapter, optional
        Where they are, if not in modules that ask transformers' ``AttentionInterface``, in torch's
        ``MultiheadAttention``, or in modules that sum by themselves between projections.

    Raises
    ------
    InputError
        If nothing is found.
    """
    model = network_of(model)
    adapters = () if adapter is None else (adapter,) if isinstance(adapter, Adapter) else tuple(adapter)
    named = dict(model.named_modules())
    found = []
    for name, module in named.items():
        if adapters:
            taken = next((one for one in adapters if one.takes(name, module)), None)
            kind = kind_of(module) or SUMS
        else:
            kind = kind_of(module) or ""
            taken = Adapter("") if kind and not crosses(name, module) else None
        if taken is not None:
            found.append(_block(taken, kind, name, module, named))
    if not found:
        alike = sorted({type(module).__name__ for module in named.values() if "ttention" in type(module).__name__})
        sought = f"one of {', '.join(one.attention for one in adapters)}" if adapters else "found"
        raise InputError(
            f"model: got {type(model).__name__}, in which no attention is {sought}; expected modules that ask "
            "transformers' AttentionInterface, nn.MultiheadAttention, or modules that sum between projections "
            f"(it has {', '.join(alike) if alike else 'none that is called attention'}); say where they are with "
            "adapter=Adapter('<class or pattern of names>', projection='<output projection>')"
        )
    return sorted(_grouped(model, found, named), key=lambda block: block.stack == "decoder")


def _block(adapter: Adapter, kind: str, name: str, module: nn.Module, named: dict[str, nn.Module]) -> Block:
    told = getattr(module, "is_causal", getattr(module, "causal", False))  # the latter in x-transformers
    causal = told is True if adapter.causal is None else adapter.causal
    stack = adapter.stack or ("decoder" if causal else "encoder")
    projection: nn.Module | None = None
    if adapter.projection:
        projection = _projection(adapter, name, named)
    elif kind != TORCH:
        projection = output_of(name, module, named)
    values = None if kind == TORCH else values_of(module)
    return Block(name, module, causal, stack, "", module, projection, kind=kind, values=values)


def _grouped(model: nn.Module, found: list[Block], named: dict[str, nn.Module]) -> list[Block]:
    """Return blocks with their containers, layers and groups.

    The layers of a stack are the elements of a list, and differ in the number of that element alone. A block may be in
    lists of other things below it, as in T5, where each layer is a list of its parts.
    """
    places: list[list[tuple[int, str]]] = []  # of each block: the depths of lists above it, and what it shares there
    for block in found:
        parts = block.name.split(".")
        own = []
        for depth in _lists_above(parts, named):
            if parts[depth][-1].isdigit():
                number = re.sub(r"\d+$", "*", parts[depth])  # torchvision calls its layers encoder_layer_0 and so on
                pattern = ".".join((*parts[:depth], number, *parts[depth + 1 :]))
                own.append((depth, f"{pattern}{value_widths(block.module)}{block.kind}"))
        places.append(own)
    counts = Counter(shared for own in places for _, shared in own)
    result = []
    for block, own in zip(found, places, strict=True):
        depth, group = next(((depth, shared) for depth, shared in own if counts[shared] > 1), (own or [(-1, "")])[0])
        parts = block.name.split(".")
        if depth < 0:
            result.append(replace(block, group=block.name or "model"))
            continue
        above = parts[: max(depth - 1, 0)]  # the list itself where it is the model
        while above and isinstance(named[".".join(above)], nn.ModuleList | nn.ModuleDict):
            above.pop()  # these run nothing
        layer = named[".".join(parts[: depth + 1])]
        if isinstance(layer, nn.ModuleList):  # it runs nothing: what there is of a layer is the attention
            layer = block.module
        result.append(replace(block, container=".".join(above), layer=layer, group=group))
    return _repeated(model, result, named)


def _repeated(model: nn.Module, found: list[Block], named: dict[str, nn.Module]) -> list[Block]:
    """Mark the blocks that one call of their stack calls more than once."""
    names: dict[int, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(id(module), []).append(re.sub(r"\d+", "*", name))
    groups = {block.group for block in found}
    result = []
    for block in found:
        own = names[id(block.module)]
        several = len(set(own)) < len(own)
        layers = getattr(getattr(block.module, "config", None), "num_hidden_layers", 0)
        holder = named.get(block.group.partition(".*")[0]) if ".*" in block.group else None
        few = isinstance(holder, nn.ModuleList) and isinstance(layers, int) and len(holder) < layers
        if several or (few and len(groups) == 1):
            # What repeats it is above all lists that hold it.
            parts = block.name.split(".")
            above = [".".join(parts[: max(depth - 1, 0)]) for depth in _lists_above(parts, named)]
            block = replace(block, repeated=True, container=(block.container, *above)[-1])
        result.append(block)
    return result


def later(found: Sequence[Block]) -> list[bool]:
    """Return which blocks are called after another of their group, or again: these can have a v0."""
    begun: set[str] = set()
    result = []
    for block in found:
        result.append(block.group in begun or block.repeated)
        begun.add(block.group)
    return result


def _lists_above(parts: list[str], named: dict[str, nn.Module]) -> list[int]:
    """Return after how many parts of its name a module lies in a list, the innermost first."""
    return [
        depth
        for depth in range(len(parts) - 1, -1, -1)
        if isinstance(named[".".join(parts[:depth])], nn.ModuleList | nn.Sequential)
    ]


def _projection(adapter: Adapter, name: str, named: dict[str, nn.Module]) -> nn.Module:
    base, path = name, adapter.projection
    while path.startswith("../"):
        base, path = base.rpartition(".")[0], path[3:]
    full = f"{base}.{path}" if base else path
    if full not in named:
        raise InputError(
            f"adapter: got the projection {adapter.projection!r}, and {name} has no {full}; expected one of "
            f"{', '.join(key for key in named if key.startswith(base) and isinstance(named[key], nn.Linear))}"
        )
    return named[full]


# ---- what modules do


def own_forward(module: nn.Module) -> Any:
    return inspect.unwrap(type(module).forward)


@lru_cache(maxsize=4096)  # a model has few classes and many modules
def _names(code: CodeType) -> tuple[str, ...]:
    inner = (_names(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return (*code.co_names, *(name for names in inner for name in names))


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
    return _asks(own_forward(module))


@lru_cache(maxsize=4096)
def _asks(forward: Any) -> bool:
    code = getattr(forward, "__code__", None)
    if code is None:
        return False
    known = getattr(forward, "__globals__", {})
    used = [known.get(name) for name in _names(code) if name in known]
    return any(any(kind.__name__ == "AttentionInterface" for kind in type(one).__mro__) for one in used)


def own_eager(module: nn.Module) -> Callable[..., Any] | None:
    forward = own_forward(module)
    known = getattr(forward, "__globals__", {})
    named = [known.get(name) for name in _names(forward.__code__) if name.endswith(_EAGER)]
    files = [getattr(sys.modules.get(kind.__module__), _EAGER, None) for kind in type(module).__mro__]
    return next((one for one in (*named, *files) if one is not None), None)


def sums(module: nn.Module) -> bool:
    """Whether a module computes averages by itself, between two projections of its own."""
    direct = dict(module.named_children())
    if direct.keys().isdisjoint(_VALUES):
        return False
    if _SUMMED & _used(module) or any(isinstance(child, nn.Softmax) for child in direct.values()):
        return True
    # Some leave the sum to a module of their own that has no projections, as x-transformers does.
    return any(
        _SUMMED & _used(child)
        for child in direct.values()
        if not width(child) and type(child).__module__.partition(".")[0] == type(module).__module__.partition(".")[0]
    )


def kind_of(module: nn.Module) -> str | None:
    if isinstance(module, nn.MultiheadAttention):
        return TORCH
    if asks(module):
        return INTERFACE
    return SUMS if sums(module) else None


def crosses(name: str, module: nn.Module) -> bool:
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
    direct = dict(module.named_children())
    return next((direct[name] for name in _VALUES if name in direct), None)


def output_of(name: str, module: nn.Module, named: dict[str, nn.Module]) -> nn.Module | None:
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
    if not isinstance(projection, nn.Module):
        return 0
    projection = getattr(projection, "base_layer", projection)  # of PEFT, around a projection
    for name in ("out_features", "nf", "out_channels"):  # of a Linear, of GPT-2's Conv1D
        if isinstance(found := getattr(projection, name, None), int):
            return found
    return 0


def heads_of(module: nn.Module) -> int:
    names = ("num_attention_heads", "num_heads", "n_heads", "n_head", "h")
    found = (getattr(one, name, None) for one in (module, getattr(module, "config", None)) for name in names)
    return next((number for number in found if isinstance(number, int)), 0)  # some have one for each stage


def value_widths(module: nn.Module) -> tuple[int, ...]:
    if isinstance(module, nn.MultiheadAttention):
        return (module.embed_dim, module.num_heads)
    return tuple(found for child in module.children() if (found := width(child)) > 1)
