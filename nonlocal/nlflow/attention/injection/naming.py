"""The names under which transformers knows the functions of attention with terms, and models that are given them."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

from torch import nn

from nlflow.attention.injection.adapters import Block, transformers_library
from nlflow.attention.injection.discovery import INTERFACE, asks
from nlflow.attention.injection.forward import STOCK, attention, stock_function
from nlflow.attention.injection.keeping import Record
from nlflow.attention.terms.averages import AFFINITIES, FUSED
from nlflow.errors import InputError

BASES = ("eager", "sdpa")
BLOCK = "_neutreno_block"


def register() -> tuple[str, ...]:
    """Register the attention functions and the masks that they need with transformers; once or any number of times.

    Returns
    -------
    tuple of str
        The names, for ``attn_implementation=``. ``neutreno`` and ``neutreno_symmetric`` (q = k) need `attach`, which
        gives them v0. ``gaussian``, ``sigmoid``, ``softplus`` and ``linear`` are other averages instead of attention's;
        `attach` gives them the term too.

    Raises
    ------
    InputError
        If transformers is missing or too old, or has another function under one of the names.
    """
    library = transformers_library()
    functions, masks = library.AttentionInterface, library.AttentionMaskInterface
    for name, (affinity, base) in REGISTERED.items():
        known = functions().get(name)
        if known is None:
            functions.register(name, partial(attention, affinity, base))
            # Without a mask of this name a model would drop its padding mask without a word.
            masks.register(name, masks()[base])
        elif getattr(known, "func", None) is not attention:
            raise InputError(
                f"transformers: got an attention function of another package named {name!r}, expected none; "
                "register that one under another name"
            )
    return tuple(REGISTERED)


def named(affinity: str, base: str) -> str:
    """Return the registered name; affinities that always form their matrix have one name for both bases."""
    name = {"softmax": "neutreno", "symmetric": "neutreno_symmetric"}.get(affinity, affinity)
    return f"{name}_sdpa" if base == "sdpa" and affinity in FUSED else name


REGISTERED = {
    named(affinity, base): (affinity, base)
    for affinity in AFFINITIES
    for base in (BASES if affinity in FUSED else ("eager",))
}
"""Registered names to affinity and base."""


def set_implementation(model: nn.Module, found: list[Block], affinity: str, record: Record) -> None:
    """Give the model configs of its own, since models may share one, and the name of the function in them."""
    asking = [block for block in found if block.kind == INTERFACE]
    for block in asking:
        config: Any = block.module.config
        before = config._attn_implementation
        if REGISTERED.get(before, ("", before))[1] not in (*BASES, None):
            raise InputError(
                f"model: got {block.name} with attn_implementation={before!r}, expected 'eager' or 'sdpa'; call "
                "model.set_attn_implementation('sdpa') first"
            )
    memo: dict[int, Any] = {}
    for module in model.modules():
        known = module.__dict__.get("config")
        if known is not None and hasattr(known, "_attn_implementation"):
            record.configs.append((module, known))
            module.config = copy.deepcopy(known, memo)
    _set_names(model, asking, affinity)


def _set_names(model: nn.Module, asking: list[Block], affinity: str) -> None:
    """Name our function in the configurations of the blocks, and keep what their modules call without it."""
    bases: dict[int, str] = {}
    for block in asking:
        config: Any = block.module.config
        before = config._attn_implementation or "eager"
        bases[id(config)] = REGISTERED.get(before, ("", before))[1]
        config._attn_implementation_internal = named(affinity, bases[id(config)])
    for module in model.modules():
        config = module.__dict__.get("config")
        if id(config) in bases and asks(module):
            setattr(module, STOCK, stock_function(module, bases[id(config)]))


class Switch:
    """The ``set_attn_implementation`` of a model that has terms: it sets what computes the averages, and keeps them."""

    def __init__(self, model: nn.Module, part: nn.Module, affinity: str) -> None:
        self.model, self.part, self.affinity = model, part, affinity

    def __call__(self, attn_implementation: Any, **options: Any) -> None:
        """Set ``'eager'`` or ``'sdpa'``; other functions do not hand out what a term needs."""
        wanted = REGISTERED.get(str(attn_implementation), (self.affinity, attn_implementation))
        if wanted[0] != self.affinity or wanted[1] not in BASES:
            raise InputError(
                f"attn_implementation: got {attn_implementation!r} for a model with terms of NeuTRENO, expected "
                "'eager' or 'sdpa'; call detach(model) first"
            )
        asking = [block for block in (one.__dict__.get(BLOCK) for one in self.model.modules()) if block is not None]
        type(self.part).set_attn_implementation(self.part, wanted[1], **options)  # type: ignore[attr-defined]
        _set_names(self.model, asking, self.affinity)
