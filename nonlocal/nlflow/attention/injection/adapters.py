"""Where the self-attention of a model is: its blocks in order, their stacks, their projections.

Models of transformers are known by the class of their attention. For others an `Adapter` of a few lines says where.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from nlflow.errors import InputError

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
        belongs to the parent. Empty: there is none, and FeatScale cannot be used.
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
        Name of the module that holds all layers of the stack (``'bert.encoder'``, ``''`` for the model itself). Blocks
        with the same container share their v0.
    layer : torch.nn.Module
        The transformer layer (attention and MLP) of the block.
    projection : torch.nn.Module, optional
        The output projection.
    """

    name: str
    module: nn.Module
    causal: bool
    stack: str
    container: str
    layer: nn.Module
    projection: nn.Module | None = None


ADAPTERS: tuple[Adapter, ...] = (
    Adapter("BertSelfAttention", projection="../output.dense"),
    Adapter("RobertaSelfAttention", projection="../output.dense"),
    Adapter("DistilBertSelfAttention", projection="out_lin"),
    Adapter("ViTAttention", projection="o_proj"),
    Adapter("DeiTAttention", projection="o_proj"),
    Adapter("GPT2Attention", projection="c_proj"),
    Adapter("LlamaAttention", projection="o_proj"),
    Adapter("BartAttention", projection="out_proj", cross="encoder_attn"),
)
"""The known models, by the class of their attention."""


def transformers_library() -> Any:
    """Return the module transformers, or raise `InputError` where it is missing or older than release 5."""
    try:
        library = importlib.import_module("transformers")
    except ImportError as error:
        raise InputError(
            f"transformers: got no such package ({error}), expected release {_NEEDED} or newer; "
            "pip install 'nlflow[attention]'"
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
        What to look for; by default the models of `ADAPTERS` (BERT, RoBERTa, DistilBERT, ViT, DeiT, GPT-2, Llama,
        BART).

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
    adapters = ADAPTERS if adapter is None else (adapter,) if isinstance(adapter, Adapter) else tuple(adapter)
    named = dict(model.named_modules())
    found = []
    for name, module in named.items():
        taken = next((one for one in adapters if one.takes(name, module)), None)
        if taken is not None:
            found.append(_block(taken, name, module, named))
    if not found:
        alike = sorted({type(module).__name__ for module in named.values() if "ttention" in type(module).__name__})
        sought = ", ".join(one.attention for one in adapters)
        raise InputError(
            f"model: got {type(model).__name__}, in which no attention is one of {sought}; expected such modules "
            f"(it has {', '.join(alike) if alike else 'none that is called attention'}); say where they are with "
            "adapter=Adapter('<class or pattern of names>', projection='<output projection>')"
        )
    return sorted(found, key=lambda block: block.stack == "decoder")


def _block(adapter: Adapter, name: str, module: nn.Module, named: dict[str, nn.Module]) -> Block:
    """Return the block of one attention module."""
    causal = bool(getattr(module, "is_causal", False)) if adapter.causal is None else adapter.causal
    # The innermost list above a block holds the layers of its stack, and the owner of the list runs them.
    parts = name.split(".")
    container, layer = "", module
    for depth in range(len(parts) - 1, -1, -1):
        if isinstance(named[".".join(parts[:depth])], nn.ModuleList | nn.Sequential):
            layer = named[".".join(parts[: depth + 1])]
            container = ".".join(parts[: max(depth - 1, 0)])  # the list itself where it is the model
            break
    stack = adapter.stack or ("decoder" if causal else "encoder")
    return Block(name, module, causal, stack, container, layer, _projection(adapter, name, named))


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
