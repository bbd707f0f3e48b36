"""The record of a training: its settings, and what was measured after every epoch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from nlflow.errors import FileFormatError
from nlflow.store.encoding import misfit, plain
from nlflow.store.storage import load_record, save_record
from validation.training.task import LAYERS

__all__ = ["RECORD", "read_record", "write_record"]

RECORD = "record.json"
_KIND = "record of a training"
_RECORDED = {"settings": dict, "finished": bool, "step": int, "seconds": float, "torch": str, "threads": int,
             "epochs": list}  # fmt: skip
_EPOCH = {"epoch": float, "step": int, "training_loss": float | None, "diverged": bool, "layers": dict}


def write_record(folder: Path, about: dict[str, Any], run: dict[str, Any], finished: bool) -> dict[str, Any]:
    """Write what is known of a training as JSON, and return it."""
    record: dict[str, Any] = plain(
        {
            "settings": about,
            "finished": finished,
            "step": run["step"],
            "seconds": round(run["seconds"], 1),
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "epochs": run["epochs"],
        }
    )
    save_record(folder / RECORD, _KIND, record)
    return record


def read_record(path: Path, measure: str | None = None) -> dict[str, Any]:
    """Return a record, of a task whose epochs have this measure.

    Raises
    ------
    FileFormatError
        If it is damaged.
    """
    found: dict[str, Any] = load_record(path, _KIND)
    trouble = _foreign(found, measure)
    if trouble is not None:
        raise FileFormatError(f"{path}: got {trouble}; it is no record of a training: remove its folder")
    return found


def _foreign(record: Any, measure: str | None) -> str | None:
    """Return why a record is none of a training; None if it is. Of what a task measures, whether it is numbers."""
    trouble = misfit(record, _RECORDED)
    if trouble is not None:
        return trouble
    if not record["epochs"]:
        return "no epochs"
    for epoch in record["epochs"]:
        known = {name: epoch[name] for name in _EPOCH if name in epoch} if isinstance(epoch, dict) else epoch
        trouble = misfit(known, _EPOCH)
        if trouble is not None:
            return trouble
        measured = {name: value for name, value in epoch.items() if name != "layers"}
        trouble = misfit(measured, dict.fromkeys(measured, bool | float | None))
        if measure is not None and measure not in measured:
            return f"an epoch without {measure}"
        if not epoch["diverged"] and list(epoch["layers"]) != list(LAYERS):
            return f"layers with {', '.join(epoch['layers']):.60}, expected {', '.join(LAYERS)}"
        for values in epoch["layers"].values():
            if not isinstance(values, list) or not values:
                return f"{values!r:.60} for layers"
            trouble = trouble or misfit(dict(enumerate(values)), dict.fromkeys(range(len(values)), float | None))
        if trouble is not None:
            return trouble
    return None
