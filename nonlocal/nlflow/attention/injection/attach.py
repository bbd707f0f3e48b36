"""`attach` and `detach`."""

from __future__ import annotations

import copy
import inspect
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from nlflow.attention.injection.blocks import (
    INTERFACE,
    TORCH,
    Adapter,
    Block,
    asks,
    blocks,
    heads_of,
    later,
    network_of,
    transformers_library,
    width,
)
from nlflow.attention.injection.cures import checked, give_cures
from nlflow.attention.injection.forward import (
    STACK,
    STOCK,
    TERMS,
    Part,
    Stack,
    attention,
    stock_function,
)
from nlflow.attention.injection.inputs import try_out
from nlflow.attention.injection.keeping import RECORD, Record, Saver, plain_arguments
from nlflow.attention.injection.summing import InTorch, Summed
from nlflow.attention.terms.averages import AFFINITIES, FUSED
from nlflow.attention.terms.neutreno import LayerTerms, TermOptions
from nlflow.attention.threads import using
from nlflow.errors import InputError, check_number, checked_call, warn_caller

Model = TypeVar("Model")  # a module, or a pipeline that holds one
BASES = ("eager", "sdpa")
BLOCK = "_neutreno_block"  # the block that an attention module is


@checked_call
def attach(
    model: Model,
    *,
    affinity: str = "softmax",
    fidelity: float | Sequence[float] = 0.4,
    learned: bool | str = False,
    semi_implicit: bool = True,
    feat_scale: bool = False,
    attn_scale: bool = False,
    matrix_fidelity: bool = False,
    cures: Mapping[str, float | Sequence[float]] | None = None,
    adapter: Adapter | Sequence[Adapter] | None = None,
    inputs: Any = None,
) -> Model:
    """Give the self-attention of a model the NeuTRENO term, in place of terms that it has.

    The averages P v of each head become (P v + λ̃ v0) / (1 + λ̃), with the values v0 of the first layer of the stack,
    which has no term. Cross-attention stays as it is.

    Parameters
    ----------
    model : torch.nn.Module
        A model of transformers, timm or torchvision, a pipeline, or a module whose attention is found; no other thread
        may run it during this call.
    affinity : {'softmax', 'symmetric', 'gaussian', 'sigmoid', 'softplus', 'linear'}
        The kernel of the average; see `nlflow.attention.terms.averages`.
    fidelity : float or sequence of float
        λ̃ >= 0, one for the model or one for each block.
    learned : bool or 'shared'
        Learn log λ̃ for each layer, or one for the whole model; it starts from `fidelity`.
    semi_implicit : bool
        False is the explicit form of the paper, P v + λ̃ (v0 - v), which needs λ̃ < 1 + μ_min(P) to be stable.
    feat_scale : bool
        Learn FeatScale after the output projection, from the identity on.
    attn_scale : bool
        Learn AttnScale, one parameter for each head, from the identity on.
    matrix_fidelity : bool
        Experimental: the semi-implicit form with Λ̃ = C/σ² and the local covariance C of the values, where each layer
        learns σ² from 1/λ̃ on, at O(N² d) for each head and iteration.
    cures : mapping of str to float or sequence of float, optional
        Other changes by their names in `nlflow.attention.CURES`, with one number for the model or one for each block,
        such as ``{'temperature': 0.8}``; ``fidelity=0`` gives them alone.
    adapter : Adapter or sequence of Adapter, optional
        Where the blocks are, for models in which they are not found.
    inputs : mapping or tensor, optional
        Inputs of one run that shows whether the term arrives in every layer; by default they are made up, or the first
        call is watched.

    Returns
    -------
    torch.nn.Module
        The model itself.

    Warns
    -----
    NlflowWarning
        For λ̃ > 1 with the explicit form.

    Raises
    ------
    InputError
        For models whose attention cannot be replaced, for transformers older than 5, and for arguments out of range.

    References
    ----------
    .. [1] T. Nguyen, T. M. Nguyen, R. Baraniuk, "Mitigating over-smoothing in transformers via regularized nonlocal
       functionals", NeurIPS 2023, arXiv 2312.00751.
    """
    network = network_of(model)
    options = TermOptions(affinity, learned, semi_implicit, feat_scale, attn_scale, matrix_fidelity)
    register()
    found = blocks(network, adapter)
    _check_whole(network)
    strengths = _strengths(fidelity, found)
    used = [one for one, able in zip(strengths, later(found), strict=True) if able]
    others = checked(cures, len(found))
    if learned == "shared" and len(set(used)) > 1:
        raise InputError(
            f"fidelity: got {len(strengths)} values with learned='shared', expected one number, which all layers begin "
            "with and share; use learned=True"
        )
    _check_terms(network, found, options, max(strengths))
    terms = _terms_of(network, found, strengths, options)  # before the old terms are taken away, since this may fail
    if not semi_implicit and not matrix_fidelity and max(used, default=0) > 1:
        warn_caller(
            f"fidelity: got {max(used):g}, beyond 1 + μ_min(P), which is about 1 for long sequences: repeated "
            "steps may not be stable; probe(model, inputs) gives the limit of each layer, semi_implicit=True has none",
        )
    record = Record(
        arguments=plain_arguments(
            {
                **asdict(options),
                "fidelity": strengths if len(set(strengths)) > 1 else strengths[0],
                "adapter": adapter,
                **({"cures": others} if others else {}),
            }
        )
    )
    with using(network, "gives it terms", alone=True):
        detach(network)
        setattr(network, RECORD, record)
        try:
            set_implementation(network, found, affinity, record)
            _give_terms(network, found, terms, options, record)
            give_cures(network, found, others, record.handles, adapter)
            for part in network.modules():  # parts too: PEFT hands out the model inside its wrapper
                if isinstance(part, nn.TransformerEncoder) and part.use_nested_tensor and record.handles:
                    part.use_nested_tensor = False  # layers with hooks do not take nested tensors
                    record.nested.append(part)
                if hasattr(part, "set_attn_implementation"):
                    part.__dict__["set_attn_implementation"] = Switch(network, part, affinity)
                if hasattr(part, "save_pretrained"):
                    part.__dict__["save_pretrained"] = Saver(network, part)
            if not torch.compiler.is_compiling():
                try_out(network, inputs)
        except Exception:
            detach(network)  # the model is left as it was
            raise
    return model


def detach(model: Model) -> Model:
    """Take away the terms and cures that `attach` gave a model, with their parameters, and return it.

    Parameters
    ----------
    model : torch.nn.Module
        The module that was attached, or one that contains it.
    """
    network = network_of(model)
    _check_whole(network)
    for owner in [module for module in network.modules() if RECORD in module.__dict__]:
        with using(owner, "takes its terms away", alone=True):
            _take_away(owner)
    return model


def _take_away(owner: nn.Module) -> None:
    record = owner.__dict__[RECORD]
    for handle in record.handles:
        handle.remove()
    for module in list(owner.modules()):
        for hooks in (module._forward_hooks, module._forward_pre_hooks):  # what quantization has handed on
            for key, hook in list(hooks.items()):
                if isinstance(getattr(hook, "__self__", None), Summed | LayerTerms):
                    del hooks[key]
        module._modules.pop(TERMS, None)
        for name in (STACK, STOCK, BLOCK):
            module.__dict__.pop(name, None)
        for name in ("set_attn_implementation", "save_pretrained"):
            if isinstance(module.__dict__.get(name), Switch | Saver):
                del module.__dict__[name]
    for module, config in record.configs:
        module.config = config
    for module in record.nested:
        module.use_nested_tensor = True
    delattr(owner, RECORD)


def _strengths(fidelity: float | Sequence[float], found: list[Block]) -> list[float]:
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


def _check_whole(model: nn.Module) -> None:
    """Refuse a part of a model that has terms: its stacks and configurations belong to the whole."""
    owned = {id(one) for owner in model.modules() if RECORD in owner.__dict__ for one in owner.modules()}
    for name, module in model.named_modules():
        if STACK in module.__dict__ and id(module) not in owned:
            raise InputError(
                f"model: got {type(model).__name__}, a part of a model that has terms (at {name or 'itself'}); "
                "expected that model, since its layers share v0; call detach on the whole model first"
            )


def _check_terms(model: nn.Module, found: list[Block], options: TermOptions, most: float) -> None:
    """Refuse modules that cannot have these terms, and models in which nothing would act."""
    sizes = Counter(block.group for block in found)
    others = options != TermOptions(learned=options.learned, semi_implicit=options.semi_implicit)
    for block in found:
        kind = f"{type(block.module).__name__} ({block.name})"
        if block.kind == INTERFACE:
            if not hasattr(block.module, "config"):
                raise InputError(
                    f"model: got attention {kind} without a config, which names its function; expected one"
                )
            continue
        acts = (sizes[block.group] > 1 or block.repeated) and most > 0
        if not acts and not others:
            continue
        if others:
            raise InputError(
                f"model: got attention {kind}, which computes its average by itself and not through transformers' "
                "AttentionInterface, so that only the plain term can be added; expected no other options than "
                "fidelity, learned and semi_implicit"
            )
        if block.kind != TORCH and (block.values is None or block.projection is None):
            raise InputError(
                f"model: got attention {kind}, which computes its average by itself, and whose projections of values "
                "and of the output are not both known; expected modules such as v_proj and o_proj; name the "
                "output with adapter=Adapter(…, projection=…)"
            )
    if not others and most > 0 and not any(sizes[block.group] > 1 or block.repeated for block in found):
        listed = ", ".join(block.name for block in found[:4])
        raise InputError(
            f"model: got {type(model).__name__}, in which no two layers of self-attention have values of the same "
            f"tokens and widths ({listed}{' …' if found[4:] else ''}), so that no layer has a v0 before it; expected a "
            "stack of at least two layers"
        )


def _give_terms(
    model: nn.Module, found: list[Block], terms: list[LayerTerms], options: TermOptions, record: Record
) -> None:
    stacks: dict[str, Stack] = {}
    sizes = Counter(block.group for block in found)
    for block, own in zip(found, terms, strict=True):
        alone = sizes[block.group] == 1 and not block.repeated
        if block.kind != INTERFACE and (alone or not any(one.active for one in terms)):
            continue  # nothing is added: the module stays as it is, with torch's fast path
        if block.group not in stacks:
            stacks[block.group] = _stack(model, block, record)
        stack = stacks[block.group]
        setattr(block.module, TERMS, own)
        setattr(block.module, STACK, stack)
        stack.terms[block.name] = own
        stack.parts.append(Part(block.name, block.module, TERMS, own))
        if own.active:
            stack.acting[block.name] = block.module
        if block.layer is not block.module and not alone:
            enter = partial(stack.enter, block.module)
            record.handles.append(block.layer.register_forward_pre_hook(enter, with_kwargs=True))
        if block.kind == INTERFACE:
            if not alone:
                record.handles.append(block.module.register_forward_pre_hook(stack.count, with_kwargs=True))
            block.module.__dict__[BLOCK] = block
            stack.configs[block.name] = block.module.config
            stack.names = frozenset(named(options.affinity, base) for base in BASES)
        elif block.kind == TORCH:
            record.handles += InTorch(block.module, own, stack).hooks()  # type: ignore[arg-type]
        else:
            values: Any = block.values  # `_check_terms` has seen that both are there
            projection: Any = block.projection
            summed = Summed(block.module, values, projection, own, stack)
            record.handles += summed.hooks()
            for one, hook in ((values, summed.take), (projection, summed.give)):
                stack.parts.append(_part(model, block, one, hook))
        if options.feat_scale and block.projection is not None:
            record.handles.append(block.projection.register_forward_hook(own.scale_features))
            stack.parts.append(_part(model, block, block.projection, own.scale_features))


def _part(model: nn.Module, block: Block, child: nn.Module, hook: Any) -> Part:
    places = ((parent, name) for parent in model.modules() for name, one in parent._modules.items() if one is child)
    return Part(block.name, *next(places), child, hook)


def _stack(model: nn.Module, block: Block, record: Record) -> Stack:
    container = model.get_submodule(block.container)
    stack = Stack(block.group, container, _hands_on(model, block) and not block.repeated and block.kind == INTERFACE)
    for runner in {id(model): model, id(container): container}.values():
        record.handles.append(runner.register_forward_pre_hook(stack.open, with_kwargs=True))
        record.handles.append(runner.register_forward_hook(stack.close, always_call=True))
    return stack


def _terms_of(model: nn.Module, found: list[Block], strengths: list[float], options: TermOptions) -> list[LayerTerms]:
    """Return the terms of all blocks. What they refuse is refused here, before the model is changed."""
    sample = next((one for one in model.parameters() if one.is_floating_point()), torch.zeros(()))
    owner: LayerTerms | None = None  # of the λ̃ that all layers share
    result = []
    for block, strength, able in zip(found, strengths, later(found), strict=True):
        module: Any = block.module
        heads, features = heads_of(module), width(block.projection)
        if options.feat_scale and features == 0:
            raise InputError(
                f"feat_scale: got {block.name}, whose output projection is not known; expected a Linear; name it in "
                "adapter=Adapter(…, projection=…)"
            )
        if options.attn_scale and heads == 0:
            raise InputError(
                f"attn_scale: got {block.name}, whose number of heads is not known; expected num_heads in it"
            )
        # Quantized modules have no such.
        weight = next((one for one in module.parameters() if one.is_floating_point()), sample)
        terms = LayerTerms(
            options, strength, first=not able, causal=block.causal, heads=heads, width=features, owner=owner,
            device=weight.device, dtype=weight.dtype,
        )  # fmt: skip
        terms.label, terms.repeated = block.name, block.repeated
        if options.learned == "shared" and able:
            owner = owner or terms
        result.append(terms)
    return result


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


# ---- the names under which transformers knows the functions


def register() -> tuple[str, ...]:
    """Register the attention functions and their masks with transformers, once.

    Returns
    -------
    tuple of str
        The names, for ``attn_implementation=``; those that begin with ``neutreno`` need `attach`.

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
    name = {"softmax": "neutreno", "symmetric": "neutreno_symmetric"}.get(affinity, affinity)
    return f"{name}_sdpa" if base == "sdpa" and affinity in FUSED else name


REGISTERED = {
    named(affinity, base): (affinity, base)
    for affinity in AFFINITIES
    for base in (BASES if affinity in FUSED else ("eager",))
}
"""Registered names to affinity and base."""


def set_implementation(model: nn.Module, found: list[Block], affinity: str, record: Record) -> None:
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
    """Its ``set_attn_implementation``."""

    def __init__(self, model: nn.Module, part: nn.Module, affinity: str) -> None:
        self.model, self.part, self.affinity = model, part, affinity

    def __call__(self, attn_implementation: Any, **options: Any) -> None:
        """Set ``'eager'`` or ``'sdpa'``; others are refused."""
        wanted = REGISTERED.get(str(attn_implementation), (self.affinity, attn_implementation))
        if wanted[0] != self.affinity or wanted[1] not in BASES:
            raise InputError(
                f"attn_implementation: got {attn_implementation!r} for a model with terms of NeuTRENO, expected "
                "'eager' or 'sdpa'; call detach(model) first"
            )
        asking = [block for block in (one.__dict__.get(BLOCK) for one in self.model.modules()) if block is not None]
        type(self.part).set_attn_implementation(self.part, wanted[1], **options)  # type: ignore[attr-defined]
        _set_names(self.model, asking, self.affinity)
