"""Results of cases in a folder."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, TypeVar

from nlflow.backends.devices import CPU, Device
from nlflow.backends.machine import arithmetic, environment, source_digest
from nlflow.errors import FileFormatError, InputError, warn_caller
from nlflow.store.atomic import make_folder
from nlflow.store.storage import load_record, save_record

T = TypeVar("T")


VERSION = "version of "


def program(device: Device = CPU) -> dict[str, str]:
    """Return what decides the bits of results: versions, a digest of the package's source, and the processor."""
    versions = {f"{VERSION}{name}": value for name, value in environment()["versions"].items()}
    found = {**versions, "source of nlflow": source_digest(), **arithmetic()}
    if device.tensors:
        found |= {f"{VERSION}torch": device.torch, "processor of torch": device.processor}
    return found


class Records(Generic[T]):
    """Results of cases in a folder, a file for each.

    `unpack` returns None if a case has to be computed again, and raises `ValueError` for anything else than its result.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        kind: str,
        pack: Callable[[str, T], Any],
        unpack: Callable[[str, Any], T | None],
    ) -> None:
        self.folder, self.kind = Path(folder), kind
        self._pack, self._unpack = pack, unpack

    def path(self, name: str) -> Path:
        if Path(name).name != name:
            raise InputError(f"name: got {name!r}, expected the name of a file without a folder")
        return self.folder / f"{name}.json"

    def read(self, name: str) -> T | None:
        """Return the result of a case, or None if it has to be computed; warn of a damaged file or another case."""
        path = self.path(name)
        if not path.exists():
            return None
        try:
            return self._unpack(name, load_record(path, self.kind))
        except FileFormatError as error:
            reason = str(error)
        except ValueError as error:
            reason = f"{path}: got {error}, which is no {self.kind}"
        warn_caller(f"{reason}; it is computed again")
        return None

    def write(self, name: str, finding: T) -> None:
        make_folder(self.folder)
        save_record(self.path(name), self.kind, self._pack(name, finding))
