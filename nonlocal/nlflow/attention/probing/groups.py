"""Kinds of tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from nlflow.attention.injection.inputs import without_wrapper
from nlflow.errors import InputError

GROUPS = ("all", "ordinary", "class", "distillation", "register", "patch", "special")
"""Names of groups, without padding. `ordinary` are those that are none of the others but patches."""

Choice = str | Tensor | Mapping[str, Any] | Callable[[Any], Any]

_LEADING = {
    "class": ("cls_token", "class_embedding", "class_token"),
    "distillation": ("distillation_token", "dist_token"),
    "register": ("register_tokens", "reg_token", "registers"),
}
_SPECIAL = (
    "bos_token_id", "eos_token_id", "pad_token_id", "cls_token_id", "sep_token_id", "mask_token_id",
    "decoder_start_token_id",
)  # fmt: skip


def token_groups(model: nn.Module, inputs: Any, stack: str, tokens: Tensor) -> dict[str, Tensor]:
    """Return the groups of tokens that a stack has, boolean (B, N) each, without padding."""
    groups = {"all": tokens}
    apart = torch.zeros_like(tokens)
    leading = _leading(without_wrapper(model), tokens.shape[1])
    for name, (first, last) in leading.items():
        groups[name] = torch.zeros_like(tokens)
        groups[name][:, first:last] = tokens[:, first:last]
        apart |= groups[name]
    special = _special(model, inputs, stack, tokens)
    if special is not None:
        groups["special"] = special & tokens
        apart |= groups["special"]
    groups["ordinary"] = tokens & ~apart
    if leading:
        groups["patch"] = groups["ordinary"]
    return groups


def _leading(model: Any, count: int) -> dict[str, tuple[int, int]]:
    """Return where the learned tokens before the patches are."""
    sizes: dict[str, int] = {}
    for path, parameter in model.named_parameters():
        for name, endings in _LEADING.items():
            if path.rpartition(".")[2] in endings and parameter.numel():
                sizes[name] = parameter.shape[1] if parameter.ndim == 3 else 1
    if "class" not in sizes and "register" not in sizes:
        return {}
    found, first = {}, 0
    for name in _LEADING:
        if name in sizes and first + sizes[name] < count:
            found[name] = (first, first + sizes[name])
            first += sizes[name]
    return found


def _special(model: Any, inputs: Any, stack: str, tokens: Tensor) -> Tensor | None:
    given = inputs if isinstance(inputs, Mapping) else {"input_ids": inputs}
    name = "decoder_input_ids" if stack == "decoder" and "decoder_input_ids" in given else "input_ids"
    told = given.get("special_tokens_mask")
    if name == "input_ids" and isinstance(told, Tensor) and told.shape == tokens.shape:
        return told.to(tokens.device).bool()
    ids = given.get(name)
    if not isinstance(ids, Tensor) or ids.is_floating_point() or ids.shape != tokens.shape:
        return None
    config = getattr(model, "config", None)
    known = [one for name in _SPECIAL if isinstance(one := getattr(config, name, None), int)]
    if not known:
        return None
    ids = ids.to(tokens.device)
    return torch.stack([ids == one for one in known]).any(0)


def chosen(choice: Choice, inputs: Any, stack: str, groups: Mapping[str, Tensor]) -> Tensor:
    tokens = groups["all"]
    wanted: Any = choice(inputs) if callable(choice) else choice
    if isinstance(wanted, Mapping):
        wanted = wanted.get(stack, "all")
    if isinstance(wanted, str):
        if wanted not in groups:
            raise InputError(
                f"tokens: got {wanted!r}, expected one of {', '.join(map(repr, groups))}, which the {stack} has; or a "
                "boolean mask (B, N)"
            )
        found, name = groups[wanted], f"{wanted!r}"
    elif isinstance(wanted, Tensor) and wanted.dtype == torch.bool and wanted.shape == tokens.shape:
        found, name = wanted.to(tokens.device) & tokens, "the mask"
    else:
        got = f"{wanted.dtype} of shape {tuple(wanted.shape)}" if isinstance(wanted, Tensor) else type(wanted).__name__
        raise InputError(
            f"tokens: got {got} for the {stack}, expected a name of {', '.join(map(repr, groups))}, or a boolean mask "
            f"of shape {tuple(tokens.shape)}"
        )
    fewest = int(found.sum(-1).min())
    if fewest < 2:
        row = int(found.sum(-1).argmin())
        of = int(tokens[row].sum())
        others = "choose others, such as tokens='all', or give a longer input"
        advice = "give a longer input" if of < 2 else others
        why = "; all its tokens are special" if of >= 2 and wanted == "ordinary" and not fewest else ""
        raise InputError(
            f"tokens: got an input of which {fewest} of {of} token{'s' * (of != 1)} count by {name}{why}, expected at "
            f"least 2, since similarity is between tokens; {advice}"
        )
    return found


def pooled(states: Tensor, mask: Tensor | None, pooling: str) -> Tensor:
    """Return one vector for each sequence of states (B, N, D); `mask` (B, N) is 1 for tokens that count."""
    counted = torch.ones(states.shape[:2], device=states.device) if mask is None else (mask != 0).float()
    rows = torch.arange(len(states), device=states.device)
    if pooling == "first":
        return states[rows, counted.argmax(dim=1)]
    if pooling == "last":  # argmax gives the first of equal ones
        return states[rows, counted.shape[1] - 1 - counted.flip(1).argmax(dim=1)]
    kept = states.masked_fill(counted[..., None] == 0, 0.0)  # padding may be NaN, which 0 times it would be too
    return kept.sum(dim=1) / counted.sum(dim=1, keepdim=True)
