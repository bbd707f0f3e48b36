"""What a training keeps: states from which it goes on, and weights in safetensors for others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from nlflow.errors import FileFormatError, shortened
from nlflow.store.atomic import write_atomic
from nlflow.store.checkpoints import Checkpoints, Fits

__all__ = ["finite", "load_state", "read_tensors", "save_state", "states", "write_tensors"]

_FORMAT = 2
_ABOUT = "nlflow"


def write_tensors(path: Path, tensors: dict[str, Tensor], meta: dict[str, Any]) -> None:
    """Write tensors with a description in JSON, atomically."""
    # Copies, since tensors of a file may not share memory, as tied weights do.
    plain = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    # One entry: several are written in an order of chance, and the same weights are to have the same bytes.
    data = save(plain, {_ABOUT: json.dumps({"format": _FORMAT, "meta": meta})})
    write_atomic(path, lambda file: file.write(data))


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors and the description of `write_tensors`.

    Raises
    ------
    FileFormatError
        For a missing or damaged file, or one of another format.
    """
    try:
        with safe_open(path, framework="pt") as file:
            about = json.loads((file.metadata() or {}).get(_ABOUT, "null"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    except (OSError, SafetensorError, ValueError, RecursionError) as error:
        raise FileFormatError(f"{path}: got no whole file of tensors ({error}); remove it to start afresh") from error
    if not isinstance(about, dict) or about.get("format") != _FORMAT or not isinstance(about.get("meta"), dict):
        raise FileFormatError(f"{path}: got a file of another program, expected the state of a training; remove it")
    return tensors, about["meta"]


def states(path: Path) -> Checkpoints:
    """Return the states of a training that are kept at a path: the newest and the one before."""
    return Checkpoints(path, "state of a training")


def save_state(kept: Checkpoints, model: nn.Module, optimizer: Any, scheduler: Any, meta: dict[str, Any]) -> None:
    """Write everything that a training needs to go on."""
    known = optimizer.state_dict()
    tensors = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    for number, entries in known["state"].items():
        for name, tensor in entries.items():
            tensors[f"optimizer.{number}.{name}"] = tensor
    arrays = {name: tensor.detach().cpu().numpy() for name, tensor in tensors.items()}
    kept.save(arrays, {**meta, "groups": known["param_groups"], "scheduler": scheduler.state_dict()})


def load_state(kept: Checkpoints, fits: Fits, model: nn.Module, optimizer: Any, scheduler: Any) -> dict[str, Any]:
    """Put a state back, and return what was written beside it.

    Raises
    ------
    FileFormatError
        If there is none that is whole and fits.
    """
    arrays, meta = kept.load(fits)
    weights: dict[str, Tensor] = {}
    moments: dict[int, dict[str, Tensor]] = {}
    try:
        for name, array in arrays.items():
            kind, rest = name.split(".", 1)
            if kind == "model":
                weights[rest] = torch.from_numpy(array)
            else:
                number, entry = rest.split(".", 1)
                moments.setdefault(int(number), {})[entry] = torch.from_numpy(array)
        model.load_state_dict(weights)
        # JSON has no tuples, and AdamW's betas are one.
        groups = [{**group, "betas": tuple(group["betas"])} for group in meta.pop("groups")]
        optimizer.load_state_dict({"state": moments, "param_groups": groups})
        scheduler.load_state_dict(meta.pop("scheduler"))
    except (RuntimeError, KeyError, ValueError, TypeError, AttributeError) as error:
        raise FileFormatError(
            f"{kept.path}: got the state of another model ({shortened(error)}); remove it to start afresh"
        ) from error
    return meta


def finite(model: nn.Module) -> bool:
    """Return whether all weights are numbers."""
    return all(bool(torch.isfinite(parameter).all()) for parameter in model.parameters())
