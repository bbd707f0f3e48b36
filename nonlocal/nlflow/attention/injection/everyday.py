"""Texts and pictures as inputs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from nlflow.attention.injection.blocks import network_of
from nlflow.attention.injection.inputs import (
    encoded,
    image_inputs,
    normalized_pixels,
    positions,
    simple_inputs,
    takes,
    takes_a_mapping,
    tokenizer_of,
    with_decoder,
)
from nlflow.errors import InputError, warn_caller

_ROWS = ("input_ids", "attention_mask", "token_type_ids", "special_tokens_mask")  # of texts, a number for each token
_IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))  # what torchvision's weights were trained with


def inputs_of(model: Any, given: Any) -> Any:
    """Return what a model is called with, of texts, pictures (Pillow's, or uint8 of (H, W) or (H, W, 3)) or tensors."""
    if isinstance(given, Tensor) or (isinstance(given, Mapping) and len(given)):
        return given
    several = list(given) if isinstance(given, Sequence) and not isinstance(given, str) else [given]
    if several and all(isinstance(one, str) for one in several):
        return _of_texts(model, several)
    if several and all(_is_picture(one) for one in several):
        return _of_pictures(model, [_pixels(one) for one in several])
    raise InputError(
        f"inputs: got {type(given).__name__}, expected a mapping of names to tensors, as a tokenizer returns it, one "
        "tensor, texts, or pictures of Pillow or of uint8; make one: torch.as_tensor(inputs)"
    )


def _is_picture(one: Any) -> bool:
    if hasattr(one, "convert") and hasattr(one, "getbands"):  # of Pillow
        return True
    return isinstance(one, np.ndarray) and one.dtype == np.uint8 and one.ndim in (2, 3)


def _pixels(one: Any) -> NDArray[Any]:
    """Return the numbers of a picture; those of palettes, of inks and of two levels as colours."""
    told = getattr(one, "mode", "L")
    return np.asarray(one if told in ("L", "RGB", "RGBA") or told[0] in "IF" else one.convert("RGB"))


def _longest(tokenizer: Any, limit: int) -> int:
    return min(limit, int(min(getattr(tokenizer, "model_max_length", 10**9), 10**9)))


def padded(tokenizer: Any, texts: Sequence[str], limit: int = 10**9) -> dict[str, Tensor]:
    limit = _longest(tokenizer, limit)
    tokens = [torch.tensor([tokenizer(one, truncation=True, max_length=limit)["input_ids"]]) for one in texts]
    rows = [{"input_ids": one, "attention_mask": torch.ones_like(one)} for one in tokens]
    found: dict[str, Tensor] = _joined(rows, int(getattr(tokenizer, "pad_token_id", 0) or 0))
    return found


def gathered(inputs: Iterable[Any], most: int = 8) -> list[Any]:
    """Join inputs of one sequence each that follow each other, up to so many, where shapes or masks allow it."""
    found: list[Any] = []
    group: list[Any] = []
    for one in inputs:
        if group and (len(group) == most or not _fit(group[0], one)):
            found.append(_joined(group))
            group = []
        group.append(one)
    return [*found, _joined(group)] if group else found


def _fit(one: Any, other: Any) -> bool:
    if not isinstance(one, Mapping) or not isinstance(other, Mapping) or set(one) != set(other):
        return False
    pairs = [(name, one[name], other[name]) for name in one]
    if not all(isinstance(each, Tensor) and each.ndim and len(each) == 1 for _, *both in pairs for each in both):
        return False
    padding = "attention_mask" in one and all(name in _ROWS and each.ndim == 2 for name, each, _ in pairs)
    return padding or all(each.shape == beside.shape for _, each, beside in pairs)


def _joined(group: list[Any], padding: int = 0) -> Any:
    """Return inputs as one batch, with `padding` behind tokens and 0 behind all else."""
    if len(group) == 1:
        return group[0]
    found = {}
    for name in group[0]:
        each, behind = [one[name] for one in group], padding if name == "input_ids" else 0
        most = max(one.shape[-1] for one in each)
        found[name] = torch.cat([torch.nn.functional.pad(one, (0, most - one.shape[-1]), value=behind) for one in each])
    return found


def _of_texts(model: Any, texts: list[str]) -> dict[str, Tensor]:
    if blank := [number for number, one in enumerate(texts) if not one.strip()]:
        raise InputError(f"inputs[{blank[0]}]: got {texts[blank[0]]!r}, expected some words")
    network = network_of(model)
    known = next((part for part in (model, network) if callable(getattr(part, "tokenizer", None))), None)
    source = _source(network)
    if known is not None:
        tokenizer = known.tokenizer
    else:
        if not source:
            raise InputError(
                f"inputs: got texts for {type(network).__name__}, whose tokenizer is not known, expected tensors; call "
                "the tokenizer: tokenizer(texts, padding=True, return_tensors='pt')"
            )
        tokenizer = tokenizer_of("inputs", source, ", or give tensors")
    limit = _longest(tokenizer, min(positions(network), int(getattr(network, "max_seq_length", 0) or 10**9)))
    owner = source or type(network).__name__
    counts = [len(encoded(f"inputs[{i}]", tokenizer, owner, one)["input_ids"]) for i, one in enumerate(texts)]
    if cut := sum(count > limit for count in counts):
        warn_caller(f"inputs: got {cut} text(s) of up to {max(counts)} tokens, more than the {limit} positions of the "
                    f"model; the first {limit} of each are used")  # fmt: skip
    made = padded(tokenizer, texts, limit)
    if takes_a_mapping(network, made):
        return made
    if not takes(network, "input_ids"):
        raise InputError(f"inputs: got texts for {type(network).__name__}, which takes none; give it what it takes")
    return with_decoder(network, {name: value for name, value in made.items() if takes(network, name)})


def _source(network: nn.Module) -> str:
    config = getattr(network, "config", None)
    return str(getattr(network, "name_or_path", "") or getattr(config, "_name_or_path", "") or "")


def _of_pictures(model: Any, pictures: list[Any]) -> Any:
    network = network_of(model)
    if not isinstance(model, nn.Module) and callable(processor := getattr(model, "image_processor", None)):
        return dict(processor([np.atleast_3d(one) for one in pictures], return_tensors="pt"))
    if getattr(network, "config", None) is not None:
        made = [image_inputs(network, _source(network), one)["pixel_values"] for one in pictures]
        return {"pixel_values": torch.cat(made)}
    sample = simple_inputs(network)
    if not isinstance(sample, Tensor) or sample.ndim != 4:
        raise InputError(
            f"inputs: got pictures for {type(network).__name__}, whose size of pictures is not known, expected a "
            "tensor (batch, channels, height, width); make one with the transform of the model"
        )
    told: Any = getattr(network, "pretrained_cfg", None) or {}
    mean, deviation = (told.get(name, usual) for name, usual in zip(("mean", "std"), _IMAGENET, strict=True))
    channels, high, wide = sample.shape[1:]
    made = [normalized_pixels(one, (channels, high, wide), mean, deviation) for one in pictures]
    return torch.cat(made).to(sample)
