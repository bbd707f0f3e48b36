"""Terms apart from their model: `save_terms`, `load_terms`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from nlflow.attention.injection.adapters import Adapter
from nlflow.attention.injection.attach import attach, detach
from nlflow.attention.injection.forward import TERMS
from nlflow.attention.injection.keeping import LEARNED, RECORD, SETTINGS, learned_of, write_terms
from nlflow.errors import FileFormatError, InputError
from nlflow.store.atomic import make_folder


def save_terms(model: nn.Module, folder: str | os.PathLike[str]) -> Path:
    """Write the terms of a model into a folder, without the model.

    ``attention.json`` gets the arguments of `nlflow.attention.attach`, ``terms.safetensors`` what was learned. A model
    of transformers that has terms writes both in its ``save_pretrained`` too, and so does a ``Trainer``; this function
    is for other modules, and for PEFT, which saves its adapters alone.

    Parameters
    ----------
    model : torch.nn.Module
        The module that was attached, or one that contains it.
    folder : str or path
        Is made where there is none.

    Returns
    -------
    Path
        The folder.

    Raises
    ------
    InputError
        For a model without terms, or with several that were attached apart.
    """
    owners = [module for module in model.modules() if RECORD in module.__dict__]
    if len(owners) != 1:
        raise InputError(
            f"model: got {type(model).__name__} with {len(owners)} attached modules in it, expected one; call "
            "nlflow.attention.attach(model) first, or save each of them"
        )
    path = make_folder(folder)
    write_terms(owners[0], path)
    return path


def load_terms(model: nn.Module, folder: str | os.PathLike[str]) -> nn.Module:
    """Give a model the terms that a folder holds, in place.

    Parameters
    ----------
    model : torch.nn.Module
        With the blocks of the one that was saved; it may have another head, or none.
    folder : str or path
        Of `save_terms`, or of ``save_pretrained`` of a model that had terms.

    Returns
    -------
    torch.nn.Module
        The model itself. When something fails it has no terms.

    Raises
    ------
    FileFormatError
        For a folder without terms, damaged files, and terms that do not belong to this model.
    """
    path = Path(folder) / SETTINGS
    if not path.is_file():
        raise FileFormatError(
            f"{path}: got no such file, expected the terms of a model; nlflow.attention.save_terms(model, folder) "
            "writes it"
        )
    try:
        about = json.loads(path.read_text(encoding="utf-8"))
        if about["format"] != 1:
            raise ValueError(f"format {about['format']!r}, this version reads 1")
        if about["attach"] is None:
            detach(model)
        else:
            # Files that say no form are of trainings with the explicit one.
            arguments = {"semi_implicit": False, **about["attach"]}
            if adapters := arguments.pop("adapter", None):
                arguments["adapter"] = [Adapter(**one) for one in adapters]
            attach(model, **arguments)
        _fill(model, path.parent / LEARNED)
    except Exception as error:  # of json, safetensors, torch and attach, each with its own kinds
        detach(model)
        raise FileFormatError(
            f"{path}: got terms that the model cannot be given ({type(error).__name__}: {error}), expected the "
            "arguments of nlflow.attention.attach; remove the file for the model without terms"
        ) from error
    return model


def _fill(model: nn.Module, path: Path) -> None:
    """Load the learned values into a model's terms, all of them and no others."""
    stored: dict[str, Tensor] = {}
    if path.is_file():
        from safetensors.torch import load_file

        stored = load_file(path)
    state: dict[str, Any] = {}
    wanted = learned_of(model)
    for name, tensor in stored.items():
        # They may have been learned with a head on top, or inside a wrapper, which this model may not have.
        found = [key for key in wanted if key == name or key.endswith(f".{name}") or name.endswith(f".{key}")]
        if len(found) != 1:
            raise ValueError(f"{path.name} has {name}, which the model does not have")
        state[found[0]] = tensor
    for name in wanted:
        if name not in state:
            raise ValueError(f"{path.name} does not have {name}, which was learned")
    if any(f".{TERMS}." in name for name in state):
        model.load_state_dict(state, strict=False)
