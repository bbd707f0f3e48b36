"""What the folder of a model declares and what it stores, by headers alone: before weights are made or read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from nlflow.attention.adapters import transformers_library
from nlflow.errors import FileFormatError, check_memory, format_bytes, shortened

__all__ = ["check_declared", "check_whole"]

_LONGEST = 10**8  # bytes of a header of safetensors, as that library has it
_MOST_LABELS = 10**6
_FLOOR = 2**24
_WIDER = 8  # float32 of the narrowest numbers that are stored, and as much again for what need not be there
_UNSTORED = ("pooler",)  # what a base model may have and a trained one was saved without


def check_declared(folder: Path) -> None:
    """Refuse a configuration that asks for more weights than its folder can hold.

    Without it a configuration of a few words fills the memory, since the weights that are missing are made up.

    Parameters
    ----------
    folder : Path
        With ``config.json`` and safetensors.

    Raises
    ------
    FileFormatError
        For files that are damaged, more layers than tensors, and eight times the bytes that are stored (beyond 16 MiB).
    MemoryLimitError
        For a model beyond the memory limit.
    """
    library: Any = transformers_library()
    files = sorted(folder.glob("*.safetensors"))
    tensors = sum(_count_tensors(path) for path in files)
    try:
        if (labels := _labels(folder / "config.json")) > _MOST_LABELS:  # of which the library makes a dictionary
            raise ValueError(f"{labels} labels")
        config = library.AutoConfig.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        layers = max((number for name, number in _numbers(config.to_dict()) if _counts_layers(name)), default=0)
    except Exception as error:  # as the library itself, in many ways
        raise _damaged(folder / "config.json", error) from error
    if layers > tensors:
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
    """Refuse a model of which weights were made up, since its files do not have them.

    Raises
    ------
    FileFormatError
        Naming the first; a pooler, which a model may have been trained without, is left aside.
    """
    lacking = sorted(name for name in missing if not any(part in name.split(".") for part in _UNSTORED))
    if lacking:
        raise FileFormatError(
            f"{source}: got weights without {lacking[0]}{f' and {len(lacking) - 1} more' if lacking[1:] else ''}, "
            "expected all of the model that config.json tells of; save it again with model.save_pretrained(folder)"
        )


def _count_tensors(path: Path) -> int:
    """Return how many tensors a file of safetensors names."""
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


def _labels(path: Path) -> int:
    """Return how many classes a configuration tells of."""
    about = json.loads(path.read_text(encoding="utf-8"))
    return max([number for name, number in _numbers(about) if name in ("num_labels", "_num_labels")], default=0)


def _damaged(path: Path, error: Exception) -> FileFormatError:
    return FileFormatError(
        f"{path.parent}: got a folder that cannot be loaded ({path.name}: {shortened(error, 300)}), expected a model "
        "of transformers; save it again with model.save_pretrained(folder)"
    )


def _numbers(tree: Any) -> list[tuple[str, int]]:
    """Return the whole numbers of a configuration, those of configurations inside too, by name."""
    found: list[tuple[str, int]] = []
    for name, value in tree.items():
        if isinstance(value, dict):
            found += _numbers(value)
        elif isinstance(value, int) and not isinstance(value, bool):
            found.append((str(name), value))
    return found


def _counts_layers(name: str) -> bool:
    return name.endswith(("layers", "n_layer"))
