"""Terms in a folder."""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nlflow.attention.injection.blocks import Adapter
from nlflow.attention.injection.forward import TERMS
from nlflow.attention.terms.neutreno import LayerTerms
from nlflow.errors import InputError
from nlflow.store.atomic import make_folder, remove, write_content

SETTINGS, LEARNED = "attention.json", "terms.safetensors"
RECORD = "_neutreno_record"  # what detach undoes, and the arguments of attach


@dataclass
class Record:
    """What was changed."""

    arguments: dict[str, Any]
    handles: list[Any] = field(default_factory=list)
    configs: list[tuple[Any, Any]] = field(default_factory=list)
    nested: list[Any] = field(default_factory=list)  # encoders of torch that would make nested tensors


def plain_arguments(arguments: dict[str, Any]) -> dict[str, Any]:
    result = dict(arguments)
    adapter: Adapter | Sequence[Adapter] | None = result.pop("adapter")
    if adapter is not None:
        result["adapter"] = [asdict(one) for one in ([adapter] if isinstance(adapter, Adapter) else adapter)]
    return result


def learned_of(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: parameter.detach().cpu().contiguous().clone()
        for name, parameter in model.named_parameters()
        if f".{TERMS}." in name
    }


def fidelities(model: nn.Module) -> dict[str, float]:
    """Return λ̃ (1/σ² with ``matrix_fidelity=True``) of each layer that has a term, by the names of attention modules.

    Parameters
    ----------
    model : torch.nn.Module
        With terms of `nlflow.attention.attach`, or layers of `NeutrenoAttention`.

    Examples
    --------
    >>> from transformers import BertConfig, BertModel
    >>> from nlflow.attention import attach
    >>> config = BertConfig(hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=32)
    >>> model = attach(BertModel(config), fidelity=0.6, learned=True)
    >>> {name: round(value, 3) for name, value in fidelities(model).items()}
    {'encoder.layer.1.attention.self': 0.6, 'encoder.layer.2.attention.self': 0.6}
    """
    with torch.no_grad():
        return {
            name.rpartition(".")[0]: float(
                terms.fidelity if terms.log_variance is None else (-terms.log_variance).exp()
            )
            for name, terms in model.named_modules()
            if isinstance(terms, LayerTerms) and not terms.first
        }


def write_terms(owner: nn.Module, folder: Path) -> None:
    """Write the terms into a folder, where `read_terms` finds a whole pair at each moment."""
    from safetensors.torch import save

    about = {"format": 1, "attach": owner.__dict__[RECORD].arguments, "learned": None}
    state = learned_of(owner)
    if state:
        content = save(state, {"about": json.dumps(about)})
        about["learned"] = sha256(content).hexdigest()
        write_content(folder / LEARNED, content)
    write_content(folder / SETTINGS, (json.dumps(about, indent=1) + "\n").encode())
    if not state:
        remove(folder / LEARNED)  # of other terms that were here


def read_terms(folder: Path) -> tuple[Any, dict[str, Tensor]]:
    from safetensors import safe_open

    about = json.loads((folder / SETTINGS).read_text(encoding="utf-8"))
    if about["format"] != 1:
        raise ValueError(f"format {about['format']!r}, this version reads 1")
    path = folder / LEARNED
    digest = about.get("learned", "")  # none where others wrote the files
    if digest is None or not path.is_file():
        return about, {}
    if digest and digest != sha256(path.read_bytes()).hexdigest():
        with safe_open(path, "pt") as file:
            about = json.loads((file.metadata() or {}).get("about", "null"))
        if about is None:
            raise ValueError(f"{LEARNED} is not the one that {SETTINGS} names; save both again")
    with safe_open(path, "pt") as file:
        return about, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # it is no dict


def save_terms(model: nn.Module, folder: str | os.PathLike[str]) -> Path:
    """Write the terms of a model into a folder, without the model, and return the folder.

    ``attention.json`` gets the arguments of `nlflow.attention.attach`, ``terms.safetensors`` what was learned.

    Parameters
    ----------
    model : torch.nn.Module
        The module that was attached, or one that contains it.
    folder : str or path
        Is made where there is none.

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


class Saver:
    """Its ``save_pretrained``."""

    def __init__(self, model: nn.Module, part: nn.Module) -> None:
        self.model, self.part = model, part

    def __call__(self, save_directory: Any, is_main_process: bool = True, **options: Any) -> Any:
        """Save the part, and the terms of the model."""
        kind: Any = type(self.part)
        # That of a SentenceTransformer does not know of processes.
        known = inspect.signature(kind.save_pretrained).parameters.values()
        takes = any(one.name == "is_main_process" or one.kind is one.VAR_KEYWORD for one in known)
        process = {"is_main_process": is_main_process} if takes else {}
        result = kind.save_pretrained(self.part, save_directory, **process, **options)
        if is_main_process and RECORD in self.model.__dict__:
            write_terms(self.model, Path(save_directory))
        return result
