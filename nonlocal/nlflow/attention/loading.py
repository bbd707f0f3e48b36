"""Models from a folder or a hub name, and their terms."""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial, wraps
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import torch
from torch import Tensor, nn

from nlflow.attention.injection.attach import attach, detach
from nlflow.attention.injection.blocks import Adapter, transformers_library
from nlflow.attention.injection.forward import TERMS
from nlflow.attention.injection.inputs import hub_silence
from nlflow.attention.injection.keeping import LEARNED, SETTINGS, learned_of, read_terms
from nlflow.attention.threads import held
from nlflow.errors import (
    FileFormatError,
    InputError,
    check_choice,
    check_memory,
    check_path,
    checked_call,
    format_bytes,
    shortened,
)

_HEADS = {"language": "AutoModelForCausalLM", "masked": "AutoModelForMaskedLM", "speech": "AutoModelForSpeechSeq2Seq"}
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".msgpack", ".h5")
_CONVERT = (
    "convert it where you trust it: load it with torch.load(..., weights_only=True) and "
    "model.load_state_dict, then model.save_pretrained(folder), which writes model.safetensors"
)


@checked_call
def load_model(source: str | os.PathLike[str], *, head: str | None = None) -> nn.Module:
    """Return a model of transformers, in evaluation mode, in float32 on the CPU.

    A model from a folder gets the terms that are saved there in ``attention.json``; a name on the hub gives none.

    Parameters
    ----------
    source : str or path
        A folder with ``config.json`` and safetensors, read without network, or the name of a model on the Hugging Face
        hub (``'owner/name'``), taken from the cache or downloaded.
    head : {'language', 'masked', 'speech'}, optional
        Which head the model gets; without one it gives hidden states.

    Raises
    ------
    FileFormatError
        For a folder without configuration or weights, weights that are damaged, incomplete or do not fit the
        configuration, and weights that only pickle can read (``.bin``, ``.pt``).
    MemoryLimitError
        For a folder whose model is beyond the memory limit.
    InputError
        For a name that the hub does not know, and if transformers is missing or older than 5.
    """
    library = transformers_library()
    if head is not None:
        check_choice("head", head, tuple(_HEADS))
    kind = library.AutoModel if head is None else getattr(library, _HEADS[head])
    offline = _is_folder(source)
    silence = "" if offline else hub_silence(source)
    try:
        # What is downloaded shows its progress.
        with no_bars() if offline else nullcontext(), _terms_expected(offline and (Path(source) / SETTINGS).is_file()):
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
    logs = transformers_library().utils.logging
    shown = logs.is_progress_bar_enabled()
    logs.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logs.enable_progress_bar()


@contextmanager
def _terms_expected(some: bool) -> Iterator[None]:
    """Keep what terms have learned out of the report of weights that a model does not take: it gets them later."""
    from transformers import modeling_utils

    name = "log_state_dict_report"
    if not some or not hasattr(modeling_utils, name):
        yield
        return

    def without_terms(report: Any) -> Any:
        @wraps(report)
        def told(*args: Any, loading_info: Any, **options: Any) -> Any:
            keys = loading_info.unexpected_keys
            loading_info.unexpected_keys = {key for key in keys if f".{TERMS}." not in key}
            return report(*args, loading_info=loading_info, **options)

        return told

    get, put = partial(getattr, modeling_utils, name), partial(setattr, modeling_utils, name)
    with held(name, get, put, without_terms):
        yield


def attach_as_trained(model: Any, folder: Path) -> None:
    if (folder / SETTINGS).is_file():
        load_terms(model, folder)


def _is_folder(source: str | os.PathLike[str]) -> bool:
    """Return whether this is a model's folder, or else a possible name on the hub; refuse others."""
    folder = check_path("source", source)
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


def load_terms(model: nn.Module, folder: str | os.PathLike[str]) -> nn.Module:
    """Give a model the terms that a folder holds, in place, and return it.

    Parameters
    ----------
    model : torch.nn.Module
        With the blocks of the one that was saved; it may have another head, or none.
    folder : str or path
        Of `save_terms`, or of ``save_pretrained`` of a model that had terms.

    Raises
    ------
    FileFormatError
        For a folder without terms, damaged files, and terms that do not belong to the model.
    """
    path = Path(folder) / SETTINGS
    if not path.is_file():
        raise FileFormatError(
            f"{path}: got no such file, expected the terms of a model; nlflow.attention.save_terms(model, folder) "
            "writes it"
        )
    try:
        about, learned = read_terms(path.parent)
        if about["attach"] is None:
            detach(model)
        else:
            # Files that say no form are of trainings with the explicit one.
            arguments = {"semi_implicit": False, **about["attach"]}
            if adapters := arguments.pop("adapter", None):
                arguments["adapter"] = [Adapter(**one) for one in adapters]
            if removal := arguments.pop("similarity_removal", 0):  # an argument of its own before it was a cure
                arguments["cures"] = {"similarity-removal": removal} | arguments.get("cures", {})
            attach(model, **arguments)
        _fill(model, learned)
    except Exception as error:  # of json, safetensors, torch and attach, each with its own kinds
        detach(model)
        raise FileFormatError(
            f"{path}: got terms that the model cannot be given ({type(error).__name__}: {error}), expected the "
            "arguments of nlflow.attention.attach; remove the file for the model without terms"
        ) from error
    return model


def _fill(model: nn.Module, stored: dict[str, Tensor]) -> None:
    state: dict[str, Any] = {}
    wanted = learned_of(model)
    for name, tensor in stored.items():
        # They may have been learned with a head on top, or inside a wrapper, which this model may not have.
        found = [key for key in wanted if key == name or key.endswith(f".{name}") or name.endswith(f".{key}")]
        if len(found) != 1:
            raise ValueError(f"{LEARNED} has {name}, which the model does not have")
        state[found[0]] = tensor
    for name in wanted:
        if name not in state:
            raise ValueError(f"{LEARNED} does not have {name}, which was learned")
    if any(f".{TERMS}." in name for name in state):
        model.load_state_dict(state, strict=False)


# ---- what a folder declares and what it stores, from headers alone, before weights are made or read

_LONGEST = 10**8  # bytes of a header of safetensors, as that library has it
_MOST_LABELS = 10**6
_FLOOR = 2**24
# What counts parts of a model that have weights of their own, by its name.
_COUNTS = re.compile(r"(layers?|depths?|blocks?|block_sizes|attention_types|repeats|stages)$")
_FEWEST, _MODULES = 10_000, 100  # modules of any model, and for each tensor: some have no weights
_WIDER = 8  # float32 is 4 times the narrowest stored numbers, and as much again for what may be missing
_UNSTORED = "pooler"  # a base model may have it, while the trained one was saved without


def check_parts(folder: Path) -> None:
    path = folder / "model.safetensors.index.json"
    if not path.is_file():
        return
    try:
        names = {str(name) for name in json.loads(path.read_text(encoding="utf-8"))["weight_map"].values()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise _damaged(path, error) from error
    for name in sorted(names):
        if PurePosixPath(name).name != name or PureWindowsPath(name).name != name:
            raise FileFormatError(
                f"{folder}: got {name!r} in {path.name}, expected names of files in this folder; save the model again "
                "with model.save_pretrained(folder)"
            )


def check_declared(folder: Path) -> None:
    library: Any = transformers_library()
    files = sorted(folder.glob("*.safetensors"))
    headers = [_header_of(path) for path in files]
    tensors = sum(map(len, headers))
    try:
        stored = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        about = _numbers(stored)
        labels = max([number for name, number in about if name in ("num_labels", "_num_labels")], default=0)
        if labels > _MOST_LABELS:  # the library makes a dictionary of them
            raise ValueError(f"{labels} labels")
        _check_layers(folder, [number for name, number in about if _COUNTS.search(name)], tensors)
        if "quantization_config" not in stored:  # of which the library knows what to do, or says what it needs
            _check_plain(folder, headers)
        config = library.AutoConfig.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        every = _numbers(config.to_dict())
        _check_layers(folder, [number for name, number in every if name.endswith(("layers", "n_layer"))], tensors)
    except FileFormatError:
        raise
    except Exception as error:  # the library fails in many ways
        raise _damaged(folder / "config.json", error) from error
    try:
        with torch.device("meta"), _at_most(_FEWEST + _MODULES * tensors):  # shapes without values
            model = library.AutoModel.from_config(config, trust_remote_code=False)
    except Exception as error:
        raise _damaged(folder / "config.json", error) from error
    needed = sum(4 * tensor.numel() for tensor in (*model.parameters(), *model.buffers()))
    check_memory(f"{folder}: its model", needed, "take a smaller one, or a machine with more memory")
    stored = sum(path.stat().st_size for path in files)
    if needed > _FLOOR + _WIDER * stored:
        raise FileFormatError(
            f"{folder}: got a config.json of a model of {format_bytes(needed)} with {format_bytes(stored)} of weights, "
            "expected those of one model; save it again with model.save_pretrained(folder)"
        )


def _check_layers(folder: Path, counts: list[int], tensors: int) -> None:
    """Refuse more layers than tensors, before the library makes lists and modules of them."""
    if (layers := max(counts, default=0)) > tensors:
        raise FileFormatError(
            f"{folder}: got {layers} layers in config.json and {tensors} tensors in safetensors, expected at least one "
            "a layer; save the model again with model.save_pretrained(folder)"
        )


@contextmanager
def _at_most(count: int) -> Iterator[None]:
    """Raise `ValueError` where this thread makes a model of more modules."""
    own, seen = threading.get_ident(), 0

    def one_more(module: nn.Module, name: str, inner: nn.Module | None) -> None:
        nonlocal seen
        seen += threading.get_ident() == own
        if seen > count:
            raise ValueError(f"a model of more than {count} modules")

    handle = nn.modules.module.register_module_module_registration_hook(one_more)
    try:
        yield
    finally:
        handle.remove()


def check_whole(source: object, missing: Any) -> None:
    """Refuse a model with made-up weights, which its files lack; a pooler may be missing."""
    lacking = sorted(name for name in missing if _UNSTORED not in name.split("."))
    if lacking:
        raise FileFormatError(
            f"{source}: got weights without {lacking[0]}{f' and {len(lacking) - 1} more' if lacking[1:] else ''}, "
            "expected all of the model that config.json tells of; save it again with model.save_pretrained(folder)"
        )


def _check_plain(folder: Path, headers: list[dict[str, Any]]) -> None:
    """Refuse weights of few bits, which would be taken as they are stored, without their scales."""
    for header in headers:
        for name, about in header.items():
            kind = str(about.get("dtype", "")) if isinstance(about, dict) else ""
            if name.endswith((".weight", ".bias")) and (not kind.startswith(("F", "BF")) or kind.startswith("F8")):
                raise FileFormatError(
                    f"{folder}: got the weights {name} of type {kind}, which are quantised or packed, and no "
                    "quantization_config beside them, expected floating-point numbers; save the model before it was "
                    "quantised"
                )


def _header_of(path: Path) -> dict[str, Any]:
    """Return what the header of a file of safetensors says of its tensors."""
    try:
        with path.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if length > min(_LONGEST, path.stat().st_size):
                raise ValueError(f"a header of {length} bytes")
            header = json.loads(stream.read(length))
        if not isinstance(header, dict):
            raise ValueError("a header that is no object")
    except (OSError, ValueError, RecursionError) as error:
        raise _damaged(path, error) from error
    return {name: about for name, about in header.items() if name != "__metadata__"}


def _damaged(path: Path, error: Exception) -> FileFormatError:
    return FileFormatError(
        f"{path.parent}: got a folder that cannot be loaded ({path.name}: {shortened(error, 300)}), expected a model "
        "of transformers; save it again with model.save_pretrained(folder)"
    )


def _numbers(tree: Any) -> list[tuple[str, int]]:
    """Return the names and values of all integers of a configuration, also of those in lists and inside it."""
    found: list[tuple[str, int]] = []
    for name, value in tree.items():
        rest = [value]
        while rest:
            one = rest.pop()
            if isinstance(one, dict):
                found += _numbers(one)
            elif isinstance(one, list | tuple):
                rest += one
            elif isinstance(one, int) and not isinstance(one, bool):
                found.append((str(name), one))
    return found
