"""Trained models as folders that transformers loads, with what their attention is beside them."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from nlflow.attention import detach
from nlflow.attention.injection.forward import TERMS
from nlflow.attention.loading import attach_as_trained, no_bars
from nlflow.errors import FileFormatError, InputError
from nlflow.store.atomic import make_folder, write_atomic
from validation.training.state import read_tensors, write_tensors
from validation.training.task import WEIGHTS, Task
from validation.training.variants import variant

__all__ = ["SETTINGS", "export", "load_trained"]

SETTINGS = "attention.json"
_TERMS = "terms.safetensors"
_FORMAT = 1


def export(task: Task, record: dict[str, Any], run: Path, folder: Path) -> None:
    """Write a finished training as a folder of transformers.

    Parameters
    ----------
    task : Task
    record : dict
        Of the training.
    run : Path
        Its folder.
    folder : Path
        Gets ``config.json`` and ``model.safetensors`` of the model without terms, ``attention.json`` with the arguments
        of `nlflow.attention.attach` that it was trained with, the settings and the last figures, and where terms have
        parameters ``terms.safetensors``. Models of text get the tokenizer of their characters, ``tokenizer.json``.

    Raises
    ------
    InputError
        For a model that is not one of transformers.
    """
    kind = variant(record["settings"]["variant"])
    model: Any = task.model(kind, record["settings"]["seed"]).cpu()
    if not isinstance(model, transformers.PreTrainedModel):
        raise InputError(
            f"--export: got the task {task.name}, whose model is plain torch, expected one of transformers"
        )
    weights, _ = read_tensors(run / WEIGHTS)
    model.load_state_dict(weights)
    make_folder(folder)
    terms = {name: tensor for name, tensor in weights.items() if f".{TERMS}." in name}
    if terms:
        write_tensors(folder / _TERMS, terms, {})
    detach(model)
    with no_bars(), tempfile.TemporaryDirectory(dir=folder) as place:
        model.save_pretrained(place)
        tokenizer = task.tokenizer()
        if tokenizer is not None:
            tokenizer.save_pretrained(place)
        for path in sorted(Path(place).iterdir()):
            data = path.read_bytes()
            write_atomic(folder / path.name, lambda file, data=data: file.write(data))
    about = {
        "format": _FORMAT,
        "attach": None if kind.stock else kind.options(task.fidelity),
        "training": {**record["settings"], "seconds": record["seconds"]},
        "result": record["epochs"][-1],
    }
    text = json.dumps(about, indent=1, allow_nan=False)
    write_atomic(folder / SETTINGS, lambda file: file.write(text.encode()))


def load_trained(folder: Path) -> nn.Module:
    """Return a model of `export` with the attention that it was trained with and its head, in evaluation mode.

    Raises
    ------
    FileFormatError
        For a folder without these files, or damaged ones.
    """
    try:
        about = json.loads((folder / SETTINGS).read_text(encoding="utf-8"))
        name = json.loads((folder / "config.json").read_text(encoding="utf-8"))["architectures"][0]
        base = about["training"]["model"]["attn_implementation"]
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise FileFormatError(
            f"{folder}: got no trained model ({error}), expected config.json, model.safetensors and {SETTINGS}; "
            "train one with --export"
        ) from error
    try:
        with no_bars():
            model = getattr(transformers, name).from_pretrained(
                folder, local_files_only=True, use_safetensors=True, dtype=torch.float32, attn_implementation=base
            )
    except Exception as error:  # loaders fail in many ways: OSError, KeyError, SafetensorError, ValueError ...
        raise FileFormatError(f"{folder}: got a model that cannot be loaded ({error}); train it anew") from error
    attach_as_trained(model, folder)
    loaded: nn.Module = model.eval()
    return loaded
