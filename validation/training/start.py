"""Trained weights from which trainings begin: a model without the term is adapted to it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from nlflow.attention.injection.forward import TERMS
from nlflow.errors import InputError
from nlflow.store.encoding import plain
from validation.training.record import RECORD, read_record
from validation.training.state import read_tensors
from validation.training.task import WEIGHTS, Task

__all__ = ["Start"]

_FROM = "softmax"


@dataclass(frozen=True)
class Start:
    """The weights with which the trainings of a seed begin (the adaptation of arXiv 2312.00751, Table 1).

    Attributes
    ----------
    folder : Path
        The ``--out`` of finished trainings, of which each seed takes its own one of softmax attention; or the folder of
        one training, with which all seeds begin.
    """

    folder: Path

    def about(self, task: Task, seed: int) -> dict[str, Any]:
        """Return what a result depends on: which training, how long it was, and the digest of its weights.

        Raises
        ------
        InputError
            If there is no finished training of this task and model.
        FileFormatError
            For damaged files.
        """
        path = self._path(seed)
        if not (path / WEIGHTS).is_file() or not (path / RECORD).is_file():
            raise InputError(
                f"--start: got {path}, which has no {WEIGHTS} beside a {RECORD}, expected a finished training of the "
                f"variant {_FROM} with seed {seed}; train it first, with the same --size"
            )
        record = read_record(path / RECORD)
        found, wanted = record["settings"], plain(task.settings())
        other = [name for name in ("task", "model") if found.get(name) != wanted[name]]
        if other or not record["finished"] or record["epochs"][-1]["diverged"]:
            fault = f"of another {other[0]}" if other else "that diverged" if record["finished"] else "that goes on"
            raise InputError(
                f"--start: got {path}, a training {fault}, expected a finished one of the task {task.name} with the "
                "same --size; train that first"
            )
        digest = hashlib.sha256((path / WEIGHTS).read_bytes()).hexdigest()
        return {"variant": found["variant"], "seed": found["seed"], "steps": record["step"], "sha256": digest}

    def load(self, model: nn.Module, seed: int) -> None:
        """Put the weights into a model; parameters of its terms stay as they are.

        Raises
        ------
        InputError
            If the model has other weights.
        """
        path = self._path(seed) / WEIGHTS
        missing, left = model.load_state_dict(read_tensors(path)[0], strict=False)
        wrong = [name for name in missing if f".{TERMS}." not in name] + list(left)
        if wrong:
            raise InputError(
                f"--start: got {path}, whose weights do not fit this attention ({wrong[0]}), expected those of a model "
                f"without parameters of a term; start from the variant {_FROM}"
            )

    def _path(self, seed: int) -> Path:
        return self.folder if (self.folder / RECORD).is_file() else self.folder / f"{_FROM}-seed{seed}"
