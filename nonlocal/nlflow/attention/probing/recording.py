"""What attention is given."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from nlflow._array import Brief, numbers
from nlflow.attention.injection.attach import REGISTERED
from nlflow.attention.injection.blocks import INTERFACE, Block, own_eager, transformers_library
from nlflow.attention.injection.forward import scaling_of
from nlflow.attention.probing.branches import Seen, own
from nlflow.attention.terms.averages import FUSED, capped, causal_mask, repeated
from nlflow.attention.threads import held, replaced, tracing
from nlflow.errors import InputError


@dataclass(frozen=True, eq=False, repr=False)
class Taken(Brief):
    """The arguments of one call of an attention function.

    Attributes
    ----------
    q, k, v : tensor of shape (B, H, N, d)
        Keys and values may have fewer heads, each of which serves several of queries.
    mask : tensor that broadcasts to (B, H, N, N), or None
        Boolean (True: i sees j) or added to the logits.
    scaling : float, optional
        1/sqrt(d) by default.
    kernel : str
        One of `nlflow.attention.terms.averages.AFFINITIES`.
    softcap : float, optional
        c of the logits c tanh(l / c), which takes the place of l before the mask is added.
    sink : tensor of shape (H,) or (B, H, N, 1), optional
        A logit of each head, or of each row, that takes a share of the row without a value.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None = None
    scaling: float | None = None
    kernel: str = "softmax"
    softcap: float | None = None
    sink: Tensor | None = None


Take = Callable[[nn.Module, tuple[Any, ...], dict[str, Any], Any], Taken]


@contextmanager
def taking(found: list[Seen], take: Take) -> Iterator[None]:
    def keep(one: Seen, *call: Any) -> None:
        one.taken = take(*call)

    with ExitStack() as stack:
        for one in found:
            stack.callback(one.block.module.register_forward_hook(own(partial(keep, one)), with_kwargs=True).remove)
        yield


# ---- attention functions that record their arguments

_Recorder = tuple[int, dict[int, Seen], bool]  # thread; by module; whether averages are compared here
_RECORDER: ContextVar[_Recorder] = ContextVar("nlflow_probe", default=(0, {}, True))
_PRODUCT, _PRODUCTS = "scaled_dot_product_attention", functional.scaled_dot_product_attention
_PREFIX = "nlflow_probe_"
_NAME = "_attn_implementation_internal"  # the public one sets those of other configurations too
_ROWS = 8  # of each head that are compared with what the model computes
_OFF, _OFF_HALF = 1e-4, 5e-2  # of the largest value; beyond all rounding, and below what another rule makes


@contextmanager
def recording(found: list[Seen], *, compared: bool = True) -> Iterator[None]:
    """Record what blocks call in this thread, and refuse, if `compared`, averages that the arguments do not give."""
    transformers_library()
    configs = {id(config): config for one in found if (config := getattr(one.block.module, "config", None)) is not None}
    token = _RECORDER.set((get_ident(), {id(one.block.module): one for one in found}, compared))
    try:
        with ExitStack() as stack:
            for config in configs.values():
                # Under our name the function records; for other threads it is what the model has.
                get, put = partial(getattr, config, _NAME), partial(setattr, config, _NAME)
                change = held((id(config), _NAME), get, put, lambda before: _wrapped(before or "eager"))
                stack.enter_context(change)
            for one in found:
                if one.block.kind == INTERFACE:
                    stack.callback(one.block.module.register_forward_hook(own(partial(_gather, one))).remove)
            stack.enter_context(_watching_products([one for one in found if one.block.kind != INTERFACE]))
            yield
    finally:
        _RECORDER.reset(token)


def _gather(one: Seen, *_: Any) -> None:
    """Make one call of those that a module made of its function: a hook after it."""
    if one.pieces:
        one.taken = _joined(one.block, one.pieces)
        one.pieces = []


def _joined(block: Block, pieces: list[Taken]) -> Taken:
    """Return several calls of a function as one: for parts of a sequence, or for several sets of values with one P."""
    if len(pieces) == 1:
        return pieces[0]
    one = pieces[0]
    if all(each.q is one.q and each.k is one.k and _same_mask(each, one) for each in pieces):  # values in several sets
        return replace(one, v=torch.cat([each.v for each in pieces], dim=-1))
    alike = all(
        each.q.shape[:2] == one.q.shape[:2] and len(each.q) == 1 and each.q.shape[-2] == each.k.shape[-2]
        and (each.scaling, each.kernel, each.softcap) == (one.scaling, one.kernel, one.softcap)
        and each.sink is one.sink and (each.mask is None or each.mask.dtype == torch.bool)
        for each in pieces
    )  # fmt: skip
    if not alike:
        raise InputError(
            f"model: {block.name} ({type(block.module).__name__}) averages more than once in a call; expected one "
            "average, or one for each part of a sequence; pass take=, a function that returns Taken(q, k, v) for it"
        )
    squares = [
        torch.ones(1, 1, 1, 1, dtype=torch.bool, device=each.q.device).expand(1, 1, each.q.shape[-2], -1)
        if each.mask is None else each.mask for each in pieces
    ]  # fmt: skip
    heads = max(square.shape[1] if square.ndim > 3 else 1 for square in squares)
    count = sum(each.q.shape[-2] for each in pieces)
    mask = torch.zeros(1, heads, count, count, dtype=torch.bool, device=one.q.device)
    end = 0
    for each, square in zip(pieces, squares, strict=True):
        begin, end = end, end + each.q.shape[-2]
        mask[..., begin:end, begin:end] = square
    q, k, v = (torch.cat([getattr(each, name) for each in pieces], dim=-2) for name in "qkv")
    return Taken(q, k, v, mask, one.scaling, one.kernel, one.softcap, one.sink)


def _same_mask(one: Taken, other: Taken) -> bool:
    if one.mask is None or other.mask is None:
        return one.mask is other.mask
    return one.mask.shape == other.mask.shape and torch.equal(one.mask, other.mask)


@contextmanager
def _watching_products(found: list[Seen]) -> Iterator[None]:
    """Record what torch's function of attention is called with while one of these modules runs."""
    if not found:
        yield
        return
    inside: list[Seen] = []
    thread = get_ident()

    def product(*args: Any, **kwargs: Any) -> Any:
        if inside and get_ident() == thread and not tracing():
            _keep_product(inside[-1], *args, **kwargs)
        return _PRODUCTS(*args, **kwargs)

    class Products(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            given = kwargs or {}
            if func is _PRODUCTS:
                return product(*args, **given)
            if func is not functional.multi_head_attention_forward:
                return func(*args, **given)
            with replaced(vars(functional), _PRODUCT, product):  # no mode is on in here
                if given.get("need_weights", True) and inside:  # then it sums by itself: once more, only to be seen
                    func(*args, **{**given, "need_weights": False})
                return func(*args, **given)

    def enter(one: Seen, *_: Any) -> None:
        one.taken = None
        inside.append(one)

    def leave(*_: Any) -> None:
        inside.pop()

    with ExitStack() as stack:
        for one in found:
            module = one.block.module
            stack.callback(module.register_forward_pre_hook(own(partial(enter, one))).remove)
            stack.callback(module.register_forward_hook(own(leave), always_call=True).remove)
        # The fused loop of nn.MultiheadAttention shows nothing.
        fast = torch.backends.mha
        stack.enter_context(held("mha", fast.get_fastpath_enabled, fast.set_fastpath_enabled, lambda _: False))
        stack.enter_context(Products())
        yield


def _keep_product(
    one: Seen, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> None:  # fmt: skip
    """Keep the arguments of torch's function, which has these names and this order."""
    if one.taken is not None:
        raise InputError(
            f"model: {one.block.name} ({type(one.block.module).__name__}) averages more than once in a call; expected "
            "one average; pass take=, a function that returns Taken(q, k, v) for it"
        )
    mask = causal_mask(query.shape[-2], key.shape[-2], key.device) if is_causal else attn_mask
    one.taken = Taken(query, key, value, mask, scale)


def _wrapped(name: str) -> str:
    """Register the attention and the mask of this name once more, under a name that records; return that name."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    wrapper = _PREFIX + name
    if wrapper in ALL_ATTENTION_FUNCTIONS:
        return wrapper
    kernel, base = REGISTERED.get(name, ("softmax", name))  # a name that attach() has set tells the kernel
    orders = base != "eager" or kernel not in FUSED  # transformers' eager functions see what a mask says alone

    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **kwargs: Any
    ) -> Any:
        mask = attention_mask
        thread, recorded, compared = _RECORDER.get()
        one = recorded.get(id(module)) if thread == get_ident() and not tracing() else None
        if one is not None:
            taken = _as_given(module, kernel, query, key, value, mask, kwargs, orders)
            one.pieces.append(taken)
        home = vars(sys.modules[type(module).__module__])
        functions = home.get("ALL_ATTENTION_FUNCTIONS", ALL_ATTENTION_FUNCTIONS)
        original = functions.get_interface(name, own_eager(module))
        result = original(module, query, key, value, mask, **kwargs)
        if one is not None and compared and name not in REGISTERED:
            with torch._C.DisableTorchFunction():  # what follows is no part of the model: nothing watches it
                _check_average(one.block.name, taken, result[0])
        return result

    AttentionInterface.register(wrapper, attention)
    if name in ALL_MASK_ATTENTION_FUNCTIONS:  # an unregistered name makes masks None
        AttentionMaskInterface.register(wrapper, ALL_MASK_ATTENTION_FUNCTIONS[name])
    return wrapper


def _as_given(
    module: nn.Module, kernel: str, query: Tensor, key: Tensor, value: Tensor, mask: Any, kwargs: dict[str, Any],
    orders: bool = True,
) -> Taken:  # fmt: skip
    """Return the arguments of a function; `orders`: it hides what comes later where the module is causal."""
    if mask is not None and not isinstance(mask, Tensor):
        raise InputError(
            f"model: got masks of type {type(mask).__name__}, expected tensors; use "
            "model.set_attn_implementation('sdpa') or 'eager'"
        )
    ordered = kwargs.get("is_causal")
    ordered = getattr(module, "is_causal", False) if ordered is None else ordered
    causal = causal_mask(query.shape[-2], key.shape[-2], key.device) if ordered and orders else None
    if mask is not None and mask.ndim == 2:  # fused kernels take padding alone
        mask = mask[:, None, None, :].bool()
        mask = mask if causal is None else mask & causal
    elif mask is None:
        mask = causal
    bias = kwargs.get("position_bias")
    if isinstance(bias, Tensor):
        if mask is None:
            mask = bias
        elif mask.dtype == torch.bool:
            mask = torch.where(mask, bias, torch.finfo(bias.dtype).min)
        else:
            mask = mask + bias
    sink = kwargs.get("s_aux")
    sink = kwargs.get("sinks") if sink is None else sink
    sink = getattr(module, "sinks", None) if sink is None else sink
    return Taken(
        query, key, value, mask, scaling_of(module, query, kwargs), kernel, kwargs.get("softcap"),
        sink if isinstance(sink, Tensor) else None,
    )  # fmt: skip


@torch.no_grad()
def _check_average(name: str, taken: Taken, output: Tensor) -> None:
    """Refuse a function of attention that does more than is known here, by a few rows of its output (B, M, H, D)."""
    heads, rows = taken.q.shape[1], slice(0, taken.q.shape[-2], max(1, taken.q.shape[-2] // _ROWS))
    if taken.q.ndim != 4 or output.shape[:3] != (len(taken.q), taken.q.shape[-2], heads):
        return  # `probe` refuses these by their shapes
    key, value = repeated(taken.k, heads), repeated(taken.v, heads)
    logits = (taken.q[:, :, rows].float() @ key.transpose(-1, -2).float()) * (
        taken.q.shape[-1] ** -0.5 if taken.scaling is None else taken.scaling
    )
    logits = capped(logits, taken.softcap)
    if taken.mask is not None:
        mask = taken.mask[(None,) * (4 - taken.mask.ndim)]
        mask = mask[..., rows, :] if mask.shape[-2] > 1 else mask
        if mask.dtype == torch.bool:
            logits = logits.masked_fill(~mask, torch.finfo(logits.dtype).min)
        else:
            logits = logits + mask.to(logits)
    weights = logits.softmax(-1)
    if taken.sink is not None:
        sink = rows_of_sink(taken.sink, (len(taken.q), heads, taken.q.shape[-2]))
        weights = weights * kept_by_tokens(logits, sink[:, :, rows])
    blind = logits.amax(-1) <= torch.finfo(logits.dtype).min / 2  # rows of padding, whose averages mean nothing
    ours, theirs = (weights @ value.float()).transpose(1, 2), output[:, rows].float()
    furthest = (ours - theirs).abs().amax(-1).masked_fill(blind.transpose(1, 2), 0).max()
    off, size = numbers(furthest, value.abs().max())
    off /= size or 1.0
    if off > (_OFF if output.element_size() >= 4 else _OFF_HALF):
        raise InputError(
            f"model: got attention in {name} whose averages are not those of a softmax of its queries, keys, mask, "
            f"softcap, sinks and position bias (off by {off:.2g} of its largest value); expected such; pass take=, a "
            "function that returns Taken(q, k, v) for it"
        )


def kept_by_tokens(logits: Tensor, sink: Tensor) -> Tensor:
    return torch.sigmoid(logits.logsumexp(-1, keepdim=True) - sink.to(logits))


def rows_of_sink(sink: Tensor, rows: tuple[int, int, int]) -> Tensor:
    sink = sink if sink.ndim == 4 and sink.numel() > rows[1] else sink.reshape(1, -1, 1, 1)
    return sink.expand(*rows, 1)
