"""What the folder of a model declares and what it stores, from headers alone, before weights are made or read."""

from __future__ import annotations

import importlib
import json
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import torch

from nlflow.attention.injection.adapters import transformers_library
from nlflow.errors import FileFormatError, check_memory, format_bytes, shortened

_LONGEST = 10**8  # bytes of a header of safetensors, as that library has it
_MOST_LABELS = 10**6
_FLOOR = 2**24
_WIDER = 8  # float32 is 4 times the narrowest stored numbers, and as much again for what may be missing
_UNSTORED = "pooler"  # a base model may have it, while the trained one was saved without


def hub_silence(source: object) -> str:
    """Return why the hub does not answer when it is asked for a model, once and for 5 seconds; empty if it answers.

    The library itself asks for each of some files, each several times, before it says that there is no network.
    """
    hub: Any = importlib.import_module("huggingface_hub")
    try:
        hub.get_hf_file_metadata(hub.hf_hub_url(str(source), "config.json"), timeout=5)
    except hub.errors.HfHubHTTPError:  # an answer, of which the library says more
        return ""
    except Exception as error:  # the errors of its packages for connections
        return shortened(error)
    return ""


def check_parts(folder: Path) -> None:
    """Refuse a list of weights that names files outside of its folder, which the library would read: `FileFormatError`.

    Links are left to the library: its own cache is made of them.
    """
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
    """Refuse a configuration that asks for more weights than its folder (``config.json``, safetensors) can hold.

    Otherwise a configuration of a few words could fill the memory, since missing weights are made up. `FileFormatError`
    is for damaged files, more layers than tensors, and more than eight times the stored bytes (beyond 16 MiB);
    `MemoryLimitError` for a model beyond the memory limit.
    """
    library: Any = transformers_library()
    files = sorted(folder.glob("*.safetensors"))
    tensors = sum(_count_tensors(path) for path in files)
    try:
        about = _numbers(json.loads((folder / "config.json").read_text(encoding="utf-8")))
        labels = max([number for name, number in about if name in ("num_labels", "_num_labels")], default=0)
        if labels > _MOST_LABELS:  # the library makes a dictionary of them
            raise ValueError(f"{labels} labels")
        config = library.AutoConfig.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        counts = [number for name, number in _numbers(config.to_dict()) if name.endswith(("layers", "n_layer"))]
    except Exception as error:  # the library fails in many ways
        raise _damaged(folder / "config.json", error) from error
    if (layers := max(counts, default=0)) > tensors:
        raise FileFormatError(
            f"{folder}: got {layers} layers in config.json and {tensors} tensors in safetensors, expected at least one "
            "a layer; save the model again with model.save_pretrained(folder)"
        )
    try:
        with torch.device("meta"):  # shapes without values
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


def check_whole(source: object, missing: Any) -> None:
    """Refuse a model with made-up weights, which its files lack: `FileFormatError`. A pooler may be missing."""
    lacking = sorted(name for name in missing if _UNSTORED not in name.split("."))
    if lacking:
        raise FileFormatError(
            f"{source}: got weights without {lacking[0]}{f' and {len(lacking) - 1} more' if lacking[1:] else ''}, "
            "expected all of the model that config.json tells of; save it again with model.save_pretrained(folder)"
        )


def _count_tensors(path: Path) -> int:
    """Return the number of tensors that a file of safetensors names."""
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
    return len(header.keys() - {"__metadata__"})


def _damaged(path: Path, error: Exception) -> FileFormatError:
    return FileFormatError(
        f"{path.parent}: got a folder that cannot be loaded ({path.name}: {shortened(error, 300)}), expected a model "
        "of transformers; save it again with model.save_pretrained(folder)"
    )


def _numbers(tree: Any) -> list[tuple[str, int]]:
    """Return the names and values of all integers of a configuration, also of configurations inside it."""
    found: list[tuple[str, int]] = []
    for name, value in tree.items():
        if isinstance(value, dict):
            found += _numbers(value)
        elif isinstance(value, int) and not isinstance(value, bool):
            found.append((str(name), value))
    return found
