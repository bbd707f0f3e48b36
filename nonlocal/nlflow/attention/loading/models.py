"""Models from a folder or a hub name, from safetensors alone, with the terms that they were trained with."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nlflow.attention.injection.adapters import transformers_library
from nlflow.attention.injection.keeping import SETTINGS
from nlflow.attention.loading.stored import check_declared, check_parts, check_whole, hub_silence
from nlflow.attention.loading.terms import load_terms
from nlflow.errors import FileFormatError, InputError, check_choice, checked_call, shortened

_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".msgpack", ".h5")
_CONVERT = (
    "convert it where you trust it: load it with torch.load(..., weights_only=True) and "
    "model.load_state_dict, then model.save_pretrained(folder), which writes model.safetensors"
)


@checked_call
def load_model(source: str | os.PathLike[str], *, head: str | None = None) -> nn.Module:
    """Return a model of transformers, in evaluation mode, in float32 on the CPU.

    Where the folder has a file ``attention.json``, the model gets the terms that it was trained with. The file is an
    object: its ``"attach"`` holds the arguments of `nlflow.attention.attach`, or null for none, and its ``"format"`` is
    1. The learned values of terms are beside it in ``terms.safetensors``.

    Parameters
    ----------
    source : str or path
        A folder with ``config.json`` and ``model.safetensors``, read without network. Or the name of a model on the
        Hugging Face hub (``'owner/name'``), taken from the cache or downloaded.
    head : {'language'}, optional
        With the head that tells the next token, for decoders. By default the model gives hidden states.

    Raises
    ------
    FileFormatError
        For a folder without configuration or weights, damaged or incomplete weights, weights that do not belong to the
        configuration, and weights that only pickle can read (``.bin``, ``.pt``). Pickle would run code from the file;
        the message says how to convert them.
    MemoryLimitError
        For a model beyond the memory limit, before anything is allocated.
    InputError
        For a name that the hub does not know, and if transformers is missing or older than 5.
    """
    library = transformers_library()
    if head is not None:
        check_choice("head", head, ("language",))
    kind = library.AutoModel if head is None else library.AutoModelForCausalLM
    offline = _is_folder(source)
    silence = "" if offline else hub_silence(source)
    try:
        with no_bars() if offline else nullcontext():  # what is downloaded shows its progress
            model, report = kind.from_pretrained(
                str(source),
                output_loading_info=True,
                local_files_only=offline or bool(silence),
                use_safetensors=True,
                trust_remote_code=False,  # or the library would offer to run code that lies in the folder
                dtype=torch.float32,
            )
    except Exception as error:  # loaders fail in many ways: OSError, KeyError, SafetensorError, ValueError ...
        if offline:
            raise FileFormatError(
                f"{source}: got a folder that cannot be loaded ({shortened(error, 300)}), expected a model of "
                f"transformers {library.__version__} with its weights; save it again with model.save_pretrained(folder)"
            ) from error
        if silence:
            raise InputError(
                f"model: got {str(source)!r}, which is no folder here and not in the cache, and the hub does not "
                f"answer ({silence}); expected a folder with config.json and model.safetensors, as "
                "model.save_pretrained(folder) makes it; give its name, such as 'distilbert-base-uncased', or "
                "connect to the network"
            ) from error
        raise InputError(
            f"model: got {str(source)!r}, which the hub does not give with safetensors weights "
            f"({shortened(error, 300)}); expected the name of such a model, or a folder; check name and connection"
        ) from error
    check_whole(source, report["missing_keys"])
    if offline:
        attach_as_trained(model, Path(source))
    return model.eval()  # type: ignore[no-any-return]


@contextmanager
def no_bars() -> Iterator[None]:
    """Hide the progress bars of transformers for a while. The terminal belongs to the caller's."""
    logs = transformers_library().utils.logging
    shown = logs.is_progress_bar_enabled()
    logs.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logs.enable_progress_bar()


def attach_as_trained(model: Any, folder: Path) -> None:
    """Give a model the terms that its folder describes; see `load_model`. Damaged files, and others' terms, raise."""
    if (folder / SETTINGS).is_file():
        load_terms(model, folder)


def _is_folder(source: str | os.PathLike[str]) -> bool:
    """Return True for the folder of a model, False for a possible name on the hub (``owner/name``); refuse others."""
    folder = Path(source)
    if folder.is_dir():
        _check_folder(folder)
        check_declared(folder)
        return True
    if folder.suffix in (*_PICKLES, ".safetensors"):
        got, advice = "weights that only pickle can read, which runs code", _CONVERT
        if folder.suffix == ".safetensors":
            got, advice = "a file of weights alone", "name the folder that holds it and config.json"
        raise FileFormatError(
            f"{source}: got {got}, expected a folder with config.json and model.safetensors; {advice}"
        )
    if folder.exists():
        raise FileFormatError(f"{folder}: got a file, expected a folder with config.json and model.safetensors")
    parts = str(source).split("/")
    named = len(parts) <= 2 and all(part and part[0].isalnum() and "\\" not in part for part in parts)
    if not named or (len(parts) == 2 and Path(parts[0]).exists()):
        raise FileFormatError(
            f"{source}: got no such folder, expected one with config.json and model.safetensors, or the name of a "
            "model on the hub such as 'owner/name'; check the name, or make one with model.save_pretrained(folder)"
        )
    return False


def _check_folder(folder: Path) -> None:
    if not (folder / "config.json").is_file():
        raise FileFormatError(
            f"{folder}: got no config.json in it, expected the folder of a model; model.save_pretrained(folder) "
            "makes one"
        )
    if any((folder / name).is_file() for name in _WEIGHTS):
        check_parts(folder)
        return
    pickles = sorted(path.name for path in folder.iterdir() if path.suffix in _PICKLES)
    if pickles:
        raise FileFormatError(
            f"{folder}: got weights that only pickle can read ({', '.join(pickles)}), which runs code, expected "
            f"model.safetensors; {_CONVERT}"
        )
    raise FileFormatError(
        f"{folder}: got no weights in it, expected model.safetensors; model.save_pretrained(folder) writes it"
    )
