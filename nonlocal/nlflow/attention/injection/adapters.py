"""Where the self-attention of a model is: its blocks in order, their stacks, their projections.

`discovery` finds attention by what modules do. An `Adapter` of a few lines says where it is if that is not enough.
"""

from __future__ import annotations

import importlib
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from nlflow.attention.injection.discovery import (
    INTERFACE,
    SUMS,
    TORCH,
    crosses,
    kind_of,
    output_of,
    value_widths,
    values_of,
)
from nlflow.errors import InputError, install_command

_NEEDED = 5  # the release of transformers since which BERT too calls its attention through the interface


@dataclass(frozen=True)
class Adapter:
    """Where the blocks of self-attention of a model are.

    Attributes
    ----------
    attention : str
        Class of its attention modules (``'ViTAttention'``), or a pattern of their names in the model, with ``*`` for
        any text (``'backbone.layers.*.attn'``). A text with a dot or a star is a pattern.
    projection : str
        The output projection, relative to the attention module: ``'o_proj'``, or ``'../output.dense'`` where it
        belongs to the parent. Empty: it is looked for.
    causal : bool, optional
        Whether a token sees only those before it; by default what the module says (``module.is_causal``).
    cross : str
        How the names of cross-attention modules of the same class end. They are left alone.
    stack : str
        ``'encoder'`` or ``'decoder'``; by default causal blocks are the decoder's.
    """

    attention: str
    projection: str = ""
    causal: bool | None = None
    cross: str = ""
    stack: str = ""

    def takes(self, name: str, module: nn.Module) -> bool:
        """Return whether the adapter describes the module of this name."""
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
        The attention module, which calls the attention function.
    causal : bool
    stack : str
        ``'encoder'`` or ``'decoder'``.
    container : str
        Name of the module that runs all layers of the stack (``'bert.encoder'``, ``''`` for the model itself).
    layer : torch.nn.Module
        The transformer layer (attention and MLP) of the block.
    projection : torch.nn.Module, optional
        The output projection.
    group : str
        Blocks of the same group share their v0: their layers are in one list, and their values have the same widths.
    kind : str
        How the module averages: ``'interface'`` (it asks transformers for the function), ``'torch'``
        (`torch.nn.MultiheadAttention`) or ``'sums'`` (by itself).
    values : torch.nn.Module, optional
        The projection that makes the values.
    repeated : bool
        Whether the module is called several times in one call of its stack, as in ALBERT.
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


def transformers_library() -> Any:
    """Return the module transformers, or raise `InputError` where it is missing or older than release 5."""
    try:
        library = importlib.import_module("transformers")
    except ImportError as error:
        raise InputError(
            f"transformers: got no such package ({error}), expected release {_NEEDED} or newer; "
            f"{install_command('attention')}"
        ) from error
    version = str(getattr(library, "__version__", "0"))
    if not (major := version.split(".")[0]).isdigit() or int(major) < _NEEDED:
        raise InputError(
            f"transformers: got release {version}, expected {_NEEDED} or newer, whose models call their attention "
            f"through AttentionInterface; pip install 'transformers>={_NEEDED}'"
        )
    return library


def blocks(model: nn.Module, adapter: Adapter | Sequence[Adapter] | None = None) -> list[Block]:
    """List the blocks of self-attention of a model, in the order in which a token passes them.

    Parameters
    ----------
    model : torch.nn.Module
    adapter : Adapter or sequence of Adapter, optional
        Where they are. By default they are found: modules whose own forward asks transformers' ``AttentionInterface``,
        `torch.nn.MultiheadAttention`, and modules that sum by themselves between projections. Cross-attention and
        deformable attention are left out.

    Returns
    -------
    list of Block
        The encoder's before the decoder's where a model has both.

    Raises
    ------
    InputError
        If nothing is found, with the classes of modules in the model that look like attention.
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"model: got {type(model).__name__}, expected a torch.nn.Module; load the model first")
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
    """Return the block of one attention module; `_grouped` finds its container and layer."""
    causal = bool(getattr(module, "is_causal", False)) if adapter.causal is None else adapter.causal
    stack = adapter.stack or ("decoder" if causal else "encoder")
    if adapter.projection:
        projection = _projection(adapter, name, named)
    else:
        projection = None if kind == TORCH else output_of(name, module, named)
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
        for depth in range(len(parts) - 1, -1, -1):
            holder = named[".".join(parts[:depth])]
            if isinstance(holder, nn.ModuleList | nn.Sequential) and parts[depth][-1].isdigit():
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
        result.append(replace(block, container=".".join(above), layer=layer, group=group))
    return _repeated(model, result, named)


def _repeated(model: nn.Module, found: list[Block], named: dict[str, nn.Module]) -> list[Block]:
    """Return the blocks, with a mark on those that are called more than once in a call of their stack.

    They are in several places of one list, or the list has fewer elements than the model has layers.
    """
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
            outer = _lists_above(block.name, named)
            block = replace(block, repeated=True, container=outer[-1] if outer else block.container)
        result.append(block)
    return result


def _lists_above(name: str, named: dict[str, nn.Module]) -> list[str]:
    """Return the names of the owners of all lists above a module, the innermost first."""
    parts = name.split(".")
    depths = [
        depth for depth in range(len(parts) - 1, -1, -1)
        if isinstance(named[".".join(parts[:depth])], nn.ModuleList | nn.Sequential)
    ]  # fmt: skip
    return [".".join(parts[: max(depth - 1, 0)]) for depth in depths]


def _projection(adapter: Adapter, name: str, named: dict[str, nn.Module]) -> nn.Module | None:
    """Return the output projection of the attention module of this name."""
    if not adapter.projection:
        return None
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
