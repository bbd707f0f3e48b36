"""Look into a transformer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from nlflow._array import underflowing
from nlflow._looks import assure, looking_once
from nlflow.attention.injection.blocks import Adapter, blocks, network_of
from nlflow.attention.injection.everyday import inputs_of
from nlflow.attention.injection.inputs import check_inputs, takes, takes_a_mapping, without_wrapper
from nlflow.attention.probing.branches import Seen, watching
from nlflow.attention.probing.columns import measures
from nlflow.attention.probing.recording import Take, kept_by_tokens, recording, rows_of_sink, taking
from nlflow.attention.probing.trace import Layer, LayerTrace
from nlflow.attention.probing.weights import bias_of, logarithms_of, without_padding
from nlflow.attention.terms.averages import repeated, seen
from nlflow.attention.threads import evaluating, using
from nlflow.errors import InputError, check_memory, checked_call, warn_caller

Floats = NDArray[np.float64]
_CHUNK = {"cpu": 2**21}  # bytes of attention matrices at a time, which caches hold; at least those of one head
_CHUNK_ELSEWHERE = 2**28


@checked_call
@underflowing
def probe(
    model: Any,
    inputs: Any,
    *,
    keep_matrices: bool = False,
    gradients: bool = False,
    adapter: Adapter | Sequence[Adapter] | None = None,
    take: Take | None = None,
) -> LayerTrace:
    """Run a model once and return what its layers of self-attention did.

    Parameters
    ----------
    model : torch.nn.Module or pipeline
        A model of transformers, timm or torchvision, a SentenceTransformer, a pipeline, or a module that an adapter
        describes; it runs in evaluation mode, and is not changed.
    inputs : mapping, tensor, texts or pictures
        What the model is called with; texts (str, or a list of them) go through the model's tokenizer, pictures
        (Pillow's, or uint8) through its normalization. Quantities leave out the padding of ``attention_mask`` (and
        ``decoder_attention_mask``).
    keep_matrices : bool
        Keep all attention matrices, 4 B H N^2 bytes for each layer.
    gradients : bool
        Give `Layer.differentiable` the quantities as tensors, in one graph with `Layer.q` and its like and the hidden
        states, at some 12 B H N^2 bytes for each layer beside the memory of a step of training.
    adapter : Adapter or sequence of Adapter, optional
        Where the blocks are, for models that are not known.
    take : callable, optional
        ``take(module, args, kwargs, output)`` returns a `Taken` for each call of an attention module that asks neither
        transformers' ``AttentionInterface`` nor torch's ``scaled_dot_product_attention``.

    Raises
    ------
    InputError
        For a model without known attention, one whose attention cannot be seen, a run in which queries and keys are not
        the same tokens (decoding with a cache), and a model that another thread changes.
    MemoryLimitError
        When the matrices to be kept, or those that gradients need, pass the limit.

    Warns
    -----
    NlflowWarning
        For modules that are left out, layers in which it is not known what attention adds, and texts that are cut off.

    Notes
    -----
    P has the caps of logits, masks, windows and position biases of the model. Sinks are in `Layer.matrices` and degrees
    alone. `Layer.between` is normed where the layer norms the sum (BERT).

    Examples
    --------
    >>> from transformers import BertConfig, BertModel
    >>> import torch
    >>> config = BertConfig(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32)
    >>> trace = probe(BertModel(config), torch.arange(5)[None])
    >>> len(trace), tuple(trace[0].q.shape), tuple(trace[0].quantities["energy"].shape)
    (2, (1, 2, 5, 8), (1, 2))

    How alike the last tokens are, as a loss:

    >>> model = BertModel(config)
    >>> last = probe(model, torch.arange(5)[None], gradients=True)[-1]
    >>> last.differentiable["mean_cosine"].sum().backward()
    >>> bool(model.encoder.layer[0].attention.self.value.weight.grad.abs().max() > 0)
    True
    """
    network = network_of(model)  # first, as its inputs depend on it
    inputs, model = inputs_of(model, inputs), network
    model = getattr(model, "_orig_mod", model)  # what torch.compile was given: hooks do not reach compiled code
    seen_blocks = [Seen(block) for block in blocks(model, adapter)]
    given = call_of(model, inputs)
    taken = recording(seen_blocks) if take is None else taking(seen_blocks, take)
    with torch.set_grad_enabled(gradients), using(model, "looks into it"), evaluating(model):
        with watching(seen_blocks), taken:
            given()
        return _trace(type(model).__name__, seen_blocks, placed(model, inputs), keep_matrices)


# ---- running


def call_of(model: nn.Module, inputs: Any) -> Callable[[], Any]:
    if not isinstance(inputs, Mapping | Tensor):
        raise InputError(
            f"inputs: got {type(inputs).__name__}, expected a tensor, or a dict of them as a tokenizer or a processor "
            "returns; call it for one after another"
        )
    check_inputs(model, inputs)
    moved = placed(model, inputs)
    if isinstance(moved, Tensor) or takes_a_mapping(model, moved):
        return lambda: model(moved)
    if takes(without_wrapper(model), "use_cache"):
        moved.setdefault("use_cache", False)  # a cache would only cost memory
    return lambda: model(**moved)


def placed(model: nn.Module, inputs: Any) -> Any:
    place = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    if isinstance(inputs, Tensor):
        return inputs.to(place)
    moved = dict(inputs)
    for name, value in moved.items():
        moved[name] = value.to(place) if isinstance(value, Tensor) else value
    return moved


# ---- quantities


def _trace(model: str, watched: list[Seen], inputs: Any, keep_matrices: bool) -> LayerTrace:
    layers: list[Layer] = []
    entering: dict[str, dict[str, Tensor]] = {}
    measured: list[dict[str, Tensor]] = []
    run = [one for last in watched for one in (*last.earlier, last) if one.attended or one.taken is not None]
    for one in seen_ones(model, run):
        layer = layer_of(one, inputs, several=len({other.block.stack for other in run}) > 1)
        with looking_once():  # whether states are finite, and what is measured of them
            check_finite(layer.name, (layer.before, layer.after), layer.tokens)
            if layer.stack not in entering:
                entering[layer.stack] = _of_state(layer.before, layer)
            found = {
                **_of_heads(layer, keep_matrices), **_of_state(layer.after, layer), **_of_layer(layer, one.summed)
            }  # fmt: skip
        measured.append(found)
        if torch.is_grad_enabled():
            layer.differentiable.update(found)
        layers.append(layer)
    if unknown := [one for one in run if one.reason]:
        first = unknown[0]
        warn_caller(
            f"model: between and share are not told (None, NaN) for {len(unknown)} layer(s), first {first.name} in "
            f"{type(first.block.layer).__name__}: {first.reason}",
        )
    if hidden := [layer for layer in layers if layer.after is None or not _is_shown(layer.after, layer)]:
        warn_caller(
            f"model: the states after {len(hidden)} of {len(layers)} layer(s) are not told (NaN), first "
            f"{hidden[0].name}: no module around its attention takes and gives hidden states (B, N, D)",
        )
    numbers = _on_host([*measured, *entering.values()])
    for layer, of_layer in zip(layers, numbers, strict=False):
        layer.quantities.update(of_layer)
    return LayerTrace(layers, model, dict(zip(entering, numbers[len(layers) :], strict=True)))


def seen_ones(model: str, run: list[Seen]) -> list[Seen]:
    if not run:
        raise InputError(f"inputs: got a call of {model} in which no self-attention ran; expected inputs that need it")
    run = beside_pooling(run)
    silent = [one for one in run if one.taken is None]
    if len(silent) < len(run):
        _leave_out(silent, run, "sum by themselves, and are left out; pass take= to see them")
    return [one for one in run if one.taken is not None] or run


def beside_pooling(run: list[Seen]) -> list[Seen]:
    pooling = [one for one in run if one.taken is not None and one.taken.q.shape[-2] != one.taken.k.shape[-2]]
    rest = [one for one in run if one not in pooling]
    if not any(one.taken is not None for one in rest):
        return run
    _leave_out(pooling, run, "have other tokens as queries than as keys, and are left out")
    return rest


def _leave_out(modules: list[Seen], run: list[Seen], why: str) -> None:
    if modules:
        names = ", ".join(one.block.name for one in modules[:3]) + (" …" if modules[3:] else "")
        text = f"model: {len(modules)} of {len(run)} modules of attention ({names}) {why}"
        warn_caller(text)


def layer_of(one: Seen, inputs: Any, *, several: bool) -> Layer:
    taken, block = one.taken, one.block
    if taken is None:
        raise InputError(
            f"model: {block.name} ({type(block.module).__name__}) called neither transformers' AttentionInterface nor "
            "torch's scaled_dot_product_attention; expected a call; build the model with fused attention "
            "(x-transformers: attn_flash=True), or pass take=, a function that returns Taken(q, k, v) for it"
        )
    if taken.q.ndim != 4 or taken.q.shape[-2] != taken.k.shape[-2]:
        raise InputError(
            f"inputs: {block.name} compared queries {tuple(taken.q.shape)} with keys {tuple(taken.k.shape)}, expected "
            "(B, H, N, d) of the same tokens; probe a whole sequence at once, without a cache of earlier tokens"
        )
    heads, mask = taken.q.shape[1], taken.mask
    if mask is not None:
        mask = mask[(None,) * (4 - mask.ndim)]
    q, k, v = (part if torch.is_grad_enabled() else part.detach() for part in (taken.q, taken.k, taken.v))
    key = repeated(k, heads)
    tokens = tokens_of(taken.q, mask, inputs, block.stack if several else "")
    scaling = float(taken.q.shape[-1] ** -0.5 if taken.scaling is None else taken.scaling)
    query = key if taken.kernel == "symmetric" else q
    sink = None if taken.sink is None else rows_of_sink(taken.sink, (len(q), heads, q.shape[-2]))
    return Layer(
        one.name, block.stack, block.causal, scaling, taken.kernel, query, key, repeated(v, heads),
        mask, tokens, before=one.before, between=one.between, after=one.after, softcap=taken.softcap, sink=sink,
    )  # fmt: skip


def tokens_of(q: Tensor, mask: Tensor | None, inputs: Any, stack: str) -> Tensor:
    """Return which tokens are no padding, (B, N): from the inputs, or else those that some token sees."""
    size = (q.shape[0], q.shape[-2])
    name = "decoder_attention_mask" if stack == "decoder" else "attention_mask"
    given = inputs.get(name) if isinstance(inputs, Mapping) else None
    if isinstance(given, Tensor) and tuple(given.shape) == size:
        tokens = given.to(q.device).bool()
    elif mask is None:
        return torch.ones(size, dtype=torch.bool, device=q.device)
    else:
        tokens = seen(mask).any(-2).any(1).expand(size)
    if not bool(tokens.any(-1).all()):
        raise InputError(f"inputs: got a sequence without any token in {name}, expected at least one")
    return tokens


def check_sequences(model: str, counts: Iterable[int]) -> None:
    if len(sizes := sorted(set(counts))) > 1:
        raise InputError(
            f"inputs: got layers over {' and '.join(map(str, sizes))} sequences in one run of {model}, expected one "
            "number, that of the inputs; such a model cuts its inputs into parts: take probe"
        )


def check_finite(name: str, states: Iterable[Tensor | None], tokens: Tensor) -> None:
    for state in states:
        if state is None or state.shape[:2] != tokens.shape:
            continue
        here = tokens.to(state.device)
        # A sum for each token, as nearly all are finite, without the cost of the rest.
        finite = state.detach().sum(-1, dtype=torch.float64).isfinite() | ~here
        assure(finite.all(), partial(_look_at, name, state.detach(), here))


def _look_at(name: str, state: Tensor, tokens: Tensor) -> None:
    wrong = ~torch.isfinite(state).all(-1) & tokens
    if bool(wrong.any()):
        row, token = wrong.nonzero()[0].tolist()
        raise InputError(
            f"inputs: got NaN or infinite states in {name} (first of token {token} of sequence {row}), expected "
            "finite ones; look for NaN among inputs and weights, or load the model in float32"
        )


def _on_host(found: list[dict[str, Tensor]]) -> list[dict[str, Floats]]:
    """Return quantities as arrays in float64; they come in one copy from each device that holds some."""
    arrays: list[dict[str, Floats]] = [{} for _ in found]
    named = [(name, value, array) for one, array in zip(found, arrays, strict=True) for name, value in one.items()]
    for device in {value.device for _, value, _ in named}:
        here = [one for one in named if one[1].device == device]
        joined = torch.cat([value.detach().double().reshape(-1) for _, value, _ in here]).cpu().numpy()
        ends = np.cumsum([value.numel() for _, value, _ in here])
        for (name, value, array), part in zip(here, np.split(joined, ends[:-1]), strict=True):
            array[name] = part.reshape(value.shape)
    return arrays


def _of_state(state: Tensor | None, layer: Layer) -> dict[str, Tensor]:
    tokens, mask = layer.tokens, layer.tokens if layer.padded else None
    shown = state is not None and _is_shown(state, layer)
    return {
        name: measure(state, mask=mask) if shown else tokens.new_full((len(tokens),), torch.nan, dtype=torch.float32)
        for name, measure in measures("state").items()
    }


def _is_shown(state: Tensor, layer: Layer) -> bool:
    return tuple(state.shape[:2]) == tuple(layer.tokens.shape)


def _of_layer(layer: Layer, summed: Tensor | None) -> dict[str, Tensor]:
    """Return what the states around a layer say; `summed` is the sum of which the state after it is the norm."""
    states = (layer.before, layer.between, layer.after if summed is None else summed)
    found = {name: measure(*states, layer.tokens) for name, measure in measures("layer").items()}
    unknown = layer.tokens.new_full((layer.items,), torch.nan, dtype=torch.float32)
    return {name: unknown if values is None else values for name, values in found.items()}


def _of_heads(layer: Layer, keep_matrices: bool) -> dict[str, Tensor]:
    items, heads, count, _ = layer.q.shape
    if keep_matrices:
        check_memory(
            f"the attention matrices of {layer.name}", 4 * items * heads * count**2, "leave keep_matrices=False"
        )
        object.__setattr__(layer, "matrices", layer.q.new_empty(items, heads, count, count, dtype=torch.float32))
    if torch.is_grad_enabled():
        check_memory(f"the gradients of {layer.name}", 12 * items * heads * count**2, "probe fewer sequences at a time")
        return _of_some(layer, (slice(None), slice(None)))
    step = max(1, _CHUNK.get(layer.q.device.type, _CHUNK_ELSEWHERE) // (4 * count**2))
    beside = max(1, step // heads)  # sequences at a time, where all heads of one are no more than that
    result: dict[str, Tensor] = {}
    for first in range(0, items, beside):
        for low in range(0, heads, step):
            place = (slice(first, first + beside), slice(low, low + step))
            for name, values in _of_some(layer, place).items():
                if name not in result:
                    result[name] = layer.q.new_empty((items, heads, *values.shape[2:]), dtype=torch.float64)
                result[name][place] = values
    return result


@dataclass(frozen=True)
class Averages:
    """What is measured of heads."""

    values: Tensor  # (B, H, N, D): v less its mean
    average: Tensor
    symmetric: Tensor  # the average with keys as queries
    squares: Tensor  # (B, H, N): the average of |v|^2
    log_degree: Tensor  # NaN at padding
    mask: Tensor | None


def _of_some(layer: Layer, place: tuple[slice, slice]) -> dict[str, Tensor]:
    q, k, v = (without_padding(layer, place, part) for part in (layer.q, layer.k, layer.v))
    tokens = layer.tokens[place[0], None].expand(q.shape[:-1])
    padded = layer.padded and not bool(tokens.all())
    counted = tokens.to(v.dtype)[..., None]
    # A constant does not change J and the directions of tokens. Without it they have more digits.
    values = v - (v * counted).sum(-2, keepdim=True) / counted.sum(-2, keepdim=True)
    bias = bias_of(layer, place)
    augmented = torch.cat([values, values.square().sum(-1, keepdim=True)], dim=-1)
    logarithms = logarithms_of(layer, q, k, bias)
    weights = logarithms.softmax(-1)
    # The log-sum-exp without another exponential: the largest weight of a row is exp(its logarithm) / d.
    degree = logarithms.amax(-1) - weights.amax(-1).log()
    if layer.kernel == "gaussian":
        degree = degree - layer.scaling / 2 * q.square().sum(-1)  # `log_affinity` leaves this out
    kept = None if layer.sink is None else kept_by_tokens(logarithms, layer.sink[place])
    if kept is not None:
        degree = degree - kept[..., 0].log()  # d with the sink is d / (the share that it leaves)
    if layer.matrices is not None:
        matrices = (weights if kept is None else weights * kept).masked_fill(~tokens[..., None], 0.0).float()
        layer.matrices[place] = matrices.detach()
    moved = weights @ augmented
    average = symmetric = moved[..., :-1]
    if layer.q is not layer.k:
        if (
            layer.kernel == "softmax" and layer.softcap is None
        ):  # fused where torch can, since only the average is needed
            symmetric = scaled_dot_product_attention(k, k, values, attn_mask=bias, scale=layer.scaling)
        else:
            symmetric = logarithms_of(layer, k, k, bias).softmax(-1) @ values
    degrees = degree.double().masked_fill(~tokens, torch.nan)
    found = Averages(values, average, symmetric, moved[..., -1], degrees, tokens if padded else None)
    return {name: measure(found) for name, measure in (measures("heads") | measures("tokens")).items()}
