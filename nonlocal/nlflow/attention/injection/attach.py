"""Give a model of transformers its terms, and take them away: `attach`, `detach`, and the names of its attention."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from torch import nn

from nlflow.attention.injection.adapters import Adapter, Block, blocks, transformers_library
from nlflow.attention.injection.forward import (
    STACK,
    STOCK,
    TERMS,
    SimilarityRemoval,
    Stack,
    attention,
    mask_position,
    stock_function,
)
from nlflow.attention.terms.averages import AFFINITIES, FUSED
from nlflow.attention.terms.neutreno import LayerTerms, TermOptions
from nlflow.errors import InputError, NlflowWarning, check_number

Model = TypeVar("Model", bound=nn.Module)

_BASES = ("eager", "sdpa")
_RECORD = "_neutreno_record"  # what detach undoes


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


def attach(
    model: Model,
    *,
    affinity: str = "softmax",
    fidelity: float | Sequence[float] = 0.6,
    learned: bool | str = False,
    semi_implicit: bool = False,
    feat_scale: bool = False,
    attn_scale: bool = False,
    similarity_removal: float = 0.0,
    matrix_fidelity: bool = False,
    adapter: Adapter | Sequence[Adapter] | None = None,
) -> Model:
    """Give the self-attention of a model the NeuTRENO term λ̃ (v0 - v), in place.

    The term is added to the averages of each head, before heads are merged and projected. v0 are the values of the
    first layer of the same stack (encoder and decoder each have their own), with their derivative. The first layer has
    no term, and cross-attention stays as it is. The attention is still computed by what computed it before, ``eager``
    or ``sdpa``. With λ̃ = 0 the model's output keeps all its bits. Terms that a model already has are replaced.

    Parameters
    ----------
    model : torch.nn.Module
        A model of transformers, or one that contains such; decoders may use caches.
    affinity : {'softmax', 'symmetric', 'gaussian', 'sigmoid', 'softplus', 'linear'}
        The kernel of the average; see `nlflow.attention.terms.averages`. Trained models were trained with softmax.
    fidelity : float or sequence of float
        λ̃ >= 0, one for the model or one for each block (that of a stack's first block is not used). The published
        models use 0.6 (images), 0.4 (language).
    learned : bool or 'shared'
        Learn one λ̃ for each layer, or one for the whole model. It starts from `fidelity`; the parameter is log λ̃.
    semi_implicit : bool
        The step (P v + λ̃ v0) / (1 + λ̃), stable for all λ̃; the plain one is for λ̃ < 1 + μ_min(P).
    feat_scale : bool
        FeatScale after the output projection, over the tokens that are no padding (in causal models: up to each
        token). It starts as the identity.
    attn_scale : bool
        AttnScale, one parameter for each head. It starts as the identity.
    similarity_removal : float
        τ in [0, 1]: the share of the tokens' mean that is taken away before each layer but the first (in causal
        models: the mean of the tokens up to each).
    matrix_fidelity : bool
        Experimental: Λ̃ = C/σ² in the semi-implicit form, with the local covariance C of the values. σ² is learned for
        each layer and starts from 1/λ̃. O(N² d) operations for each head and iteration, a handful of them.
    adapter : Adapter or sequence of Adapter, optional
        Where the blocks are, for models that are not known.

    Returns
    -------
    torch.nn.Module
        The model itself.

    Warns
    -----
    NlflowWarning
        If λ̃ > 1 with the plain step: with many tokens μ_min(P) is about 0, and the step is not stable.

    Raises
    ------
    InputError
        For models whose attention cannot be replaced, saying which and why, for transformers older than 5, and for
        arguments out of range.

    References
    ----------
    .. [1] T. Nguyen, T. M. Nguyen, R. Baraniuk, "Mitigating over-smoothing in transformers via regularized nonlocal
       functionals", NeurIPS 2023, arXiv 2312.00751.
    """
    options = TermOptions(affinity, learned, semi_implicit, feat_scale, attn_scale, similarity_removal, matrix_fidelity)
    register()
    found = blocks(model, adapter)
    strengths = _strengths(fidelity, found)
    if learned == "shared" and len(set(strengths)) > 1:
        raise InputError(
            f"fidelity: got {len(strengths)} values with learned='shared', expected one number, which all layers begin "
            "with and share; use learned=True"
        )
    for block in found:
        _check_replaceable(block)
    terms = _terms_of(found, strengths, options)  # before the old terms are taken away, since this may fail
    detach(model)
    if not semi_implicit and not matrix_fidelity and max(strengths) > 1:
        warnings.warn(
            f"fidelity: got {max(strengths):g}, beyond 1 + μ_min(P), which is about 1 for long sequences: repeated "
            "steps may not be stable; probe(model, inputs) gives the limit of each layer, semi_implicit=True has none",
            NlflowWarning,
            stacklevel=2,
        )
    record = _Record()
    setattr(model, _RECORD, record)
    try:
        _set_implementation(model, found, affinity, record)
        _give_terms(model, found, terms, options, record)
    except Exception:
        detach(model)
        raise
    return model


def detach(model: Model) -> Model:
    """Take away the terms that `attach` gave a model, with their parameters. The model is what it was before.

    Parameters
    ----------
    model : torch.nn.Module
        The module that was attached, or one that contains it. Without terms it is left as it is.

    Returns
    -------
    torch.nn.Module
        The model itself.
    """
    for owner in [module for module in model.modules() if _RECORD in module.__dict__]:
        record = owner.__dict__[_RECORD]
        for handle in record.handles:
            handle.remove()
        for module in list(owner.modules()):
            module._modules.pop(TERMS, None)
            module.__dict__.pop(STACK, None)
            module.__dict__.pop(STOCK, None)
        for module, config in record.configs:
            module.config = config
        delattr(owner, _RECORD)
    return model


@dataclass
class _Record:
    """What was changed in a model."""

    handles: list[Any] = field(default_factory=list)
    configs: list[tuple[Any, Any]] = field(default_factory=list)


def _name(affinity: str, base: str) -> str:
    """Return the registered name; affinities that always form their matrix have one name for both bases."""
    name = {"softmax": "neutreno", "symmetric": "neutreno_symmetric"}.get(affinity, affinity)
    return f"{name}_sdpa" if base == "sdpa" and affinity in FUSED else name


REGISTERED = {
    _name(affinity, base): (affinity, base)
    for affinity in AFFINITIES
    for base in (_BASES if affinity in FUSED else ("eager",))
}
"""Registered names to affinity and base."""


def _strengths(fidelity: float | Sequence[float], found: list[Block]) -> list[float]:
    """Return λ̃ of each block."""
    given: Any = fidelity
    hint = "λ̃ = 0 is the model without the term"
    # Strings are for check_number to refuse, and a tensor or array without axes is a number.
    if isinstance(given, str) or not hasattr(given, "__len__") or getattr(given, "ndim", 1) == 0:
        return [check_number("fidelity", given, minimum=0, hint=hint)] * len(found)
    if len(given) != len(found):
        layers = ", ".join(f"{stack} {count}" for stack, count in Counter(block.stack for block in found).items())
        raise InputError(
            f"fidelity: got {len(given)} values, expected {len(found)}, one for each block of self-attention "
            f"({layers}), or one number for all"
        )
    return [check_number(f"fidelity[{index}]", value, minimum=0, hint=hint) for index, value in enumerate(given)]


def _interface_is_used(module: nn.Module) -> bool:
    """Return whether the forward of a module comes from a file that asks transformers' interface for its attention."""
    forward = next((kind.__dict__["forward"] for kind in type(module).__mro__ if "forward" in kind.__dict__), None)
    known = "ALL_ATTENTION_FUNCTIONS" in getattr(inspect.unwrap(forward), "__globals__", {}) if forward else False
    return known and "ttention" in type(module).__name__


def _check_replaceable(block: Block) -> None:
    """Raise `InputError` for an attention module that does not ask the interface for its function."""
    if not (_interface_is_used(block.module) and hasattr(block.module, "config")):
        raise InputError(
            f"model: got attention {type(block.module).__name__} ({block.name}), which computes its average by itself "
            "and not through transformers' AttentionInterface, so it cannot be replaced; expected a model that does "
            "(BERT, ViT, DeiT, GPT-2, Llama, BART …), or NeutrenoAttention in a model of your own"
        )


def _set_implementation(model: nn.Module, found: list[Block], affinity: str, record: _Record) -> None:
    """Give the model configs of its own, since models may share one, and the name of the function in them."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        config = module.__dict__.get("config")
        if config is not None and hasattr(config, "_attn_implementation"):
            record.configs.append((module, config))
            module.config = copy.deepcopy(config, memo)
    for name, module in model.named_modules():
        if not hasattr(module, "set_attn_implementation"):
            continue
        before = module.config._attn_implementation
        base = REGISTERED.get(before, ("", before))[1]
        if base not in _BASES:
            raise InputError(
                f"model: got {type(module).__name__} {name} with attn_implementation={before!r}, expected 'eager' or "
                "'sdpa'; call model.set_attn_implementation('sdpa') first"
            )
        if before != _name(affinity, base):
            module.set_attn_implementation(_name(affinity, base))
    for block in found:
        known: Any = block.module.config
        if known._attn_implementation not in {_name(affinity, base) for base in _BASES}:
            raise InputError(
                f"model: got {type(block.module).__name__} ({block.name}), whose model does not let its attention be "
                "set; expected one with set_attn_implementation"
            )


def _give_terms(
    model: nn.Module, found: list[Block], terms: list[LayerTerms], options: TermOptions, record: _Record
) -> None:
    """Give each block its terms, and each stack of layers the hooks around its calls."""
    for module in model.modules():
        name = getattr(module.__dict__.get("config"), "_attn_implementation", None)
        if name in REGISTERED and _interface_is_used(module):
            setattr(module, STOCK, stock_function(module, REGISTERED[name][1]))
    stacks: dict[str, Stack] = {}
    for block, own in zip(found, terms, strict=True):
        if block.container not in stacks:
            container = model.get_submodule(block.container)
            stack = stacks[block.container] = Stack(container, _hands_on(model, block))
            record.handles.append(container.register_forward_pre_hook(stack.open, with_kwargs=True))
            if not stack.hands_on:
                record.handles.append(container.register_forward_hook(stack.close, always_call=True))
        stack = stacks[block.container]
        setattr(block.module, TERMS, own)
        setattr(block.module, STACK, stack)
        if options.feat_scale and block.projection is not None:
            record.handles.append(block.projection.register_forward_hook(own.scale_features))
        if options.similarity_removal and not own.first:
            position = mask_position(block.layer)
            removal = SimilarityRemoval(position, options.similarity_removal, block.causal, stack)
            record.handles.append(block.layer.register_forward_pre_hook(removal, with_kwargs=True))


def _terms_of(found: list[Block], strengths: list[float], options: TermOptions) -> list[LayerTerms]:
    """Return the terms of all blocks. What they refuse is refused here, before the model is changed."""
    stacks: set[str] = set()
    owner: LayerTerms | None = None  # of the λ̃ that all layers share
    result = []
    for block, strength in zip(found, strengths, strict=True):
        module: Any = block.module
        heads = _first_of(("num_attention_heads", "num_heads", "n_heads"), module, module.config)
        width = _first_of(("out_features", "nf"), block.projection)  # of a Linear, or of GPT-2's Conv1D
        if options.feat_scale and width == 0:
            raise InputError(
                f"feat_scale: got {block.name}, whose output projection is not known; expected a Linear; name it in "
                "adapter=Adapter(…, projection=…)"
            )
        if options.attn_scale and heads == 0:
            raise InputError(
                f"attn_scale: got {block.name}, whose number of heads is not known; expected num_heads in it"
            )
        first, weight = block.container not in stacks, next(iter(module.parameters()))
        terms = LayerTerms(
            options, strength, first=first, causal=block.causal, heads=heads, width=width, owner=owner,
            device=weight.device, dtype=weight.dtype,
        )  # fmt: skip
        stacks.add(block.container)
        if options.learned == "shared" and not first:
            owner = owner or terms
        if options.similarity_removal and not first:
            mask_position(block.layer)
        result.append(terms)
    return result


def _first_of(names: tuple[str, ...], *holders: Any) -> int:
    """Return the first of these numbers that a holder has, 0 where none has any."""
    return next((int(getattr(holder, name)) for holder in holders for name in names if hasattr(holder, name)), 0)


def _hands_on(model: nn.Module, block: Block) -> bool:
    """Return whether all modules from the stack down to the attention take keyword arguments that they do not know."""
    module = model.get_submodule(block.container)
    path = [module]
    for part in block.name.removeprefix(f"{block.container}." if block.container else "").split("."):
        module = module.get_submodule(part)
        if not isinstance(module, nn.ModuleList | nn.Sequential):
            path.append(module)
    return all(
        any(kind.kind is inspect.Parameter.VAR_KEYWORD for kind in inspect.signature(step.forward).parameters.values())
        for step in path
    )
