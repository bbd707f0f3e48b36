"""What a folder of outputs holds: of which inputs and options each was made, and whether it is still as it was written.

A record for each output, in the folder ``.nlflow`` inside. It is written twice: before the output, which from then on
is this command's to replace, and when the output is complete.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nlflow.backends.machine import version
from nlflow.commands.batches import Job
from nlflow.errors import FileFormatError, InputError
from nlflow.io.atomic import make_folder
from nlflow.io.encoding import digest
from nlflow.io.storage import load_record, save_record
from nlflow.io.terminal import plain

__all__ = ["Ledger"]

_KIND = "output of a folder"


class Ledger:
    """The records of a folder of outputs.

    Parameters
    ----------
    folder : Path
        Made if it is missing.
    options : mapping
        On which outputs depend, beside their inputs; in plain data.
    """

    def __init__(self, folder: Path, options: Mapping[str, Any]) -> None:
        self.folder = make_folder(folder / ".nlflow")
        self.options = {**plain(options), "nlflow": version()}
        self._begun: dict[str, Any] = {}

    def begin(self, job: Job) -> None:
        """Note that the outputs of a job are about to be written."""
        self._begun = self._made_of(job)
        save_record(self._path(job), _KIND, {**self._begun, "outputs": None})

    def finish(self, job: Job) -> None:
        """Note that the outputs of the job that was begun last are complete."""
        save_record(self._path(job), _KIND, {**self._begun, "outputs": self._outputs(job)})

    def settled(self, job: Job) -> bool:
        """Return whether there is nothing left to do for a job.

        Its outputs are as this command wrote them, of inputs that are as they were, with the same options.

        Raises
        ------
        InputError
            If an output is there that this command has not written, or that was changed since.
        """
        there = [path for path in (job.target, job.figure) if path is not None and path.exists()]
        if not there:
            return False
        found = self._read(job)
        if found is None:
            raise InputError(
                f"OUT: got {there[0]}, of which the folder has no record, expected what an earlier run wrote; choose "
                "another folder, or give --existing overwrite or --existing skip"
            )
        outputs = found.get("outputs")
        if outputs is None:  # it was being written when the run ended
            return False
        if any(outputs.get(path.name) != _digest(path) for path in there):
            raise InputError(
                f"OUT: got {there[0]}, which was changed since it was written, expected it as it was; rename it, or "
                "give --existing overwrite or --existing skip"
            )
        return len(there) == len(outputs) and found == {**self._made_of(job), "outputs": outputs}

    def _path(self, job: Job) -> Path:
        name = job.target.name
        # The longest names leave no room for an ending.
        return self.folder / (f"{name}.json" if len(name.encode()) < 200 else f"{digest(name)}.json")

    def _read(self, job: Job) -> dict[str, Any] | None:
        try:
            found = load_record(self._path(job), _KIND)
        except FileFormatError:  # none, or one that was damaged: nothing is known of the output
            return None
        known = isinstance(found, dict) and isinstance(found.get("outputs"), dict | None)
        return found if known else None

    def _made_of(self, job: Job) -> dict[str, Any]:
        inputs = {"IN": job.source, **job.beside}
        return {"options": self.options, "inputs": {name: _digest(path) for name, path in inputs.items()}}

    @staticmethod
    def _outputs(job: Job) -> dict[str, str | None]:
        return {path.name: _digest(path) for path in (job.target, job.figure) if path is not None}


def _digest(path: Path) -> str | None:
    """Return the SHA-256 of a file; None if it cannot be read, which its reader will say better."""
    try:
        with path.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError:
        return None
