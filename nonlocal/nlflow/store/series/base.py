"""What the formats of series share."""

from __future__ import annotations

import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from nlflow.errors import FileFormatError, MissingPackageError, format_bytes, not_installed
from nlflow.store.atomic import remove

if TYPE_CHECKING:
    from nlflow.domains import Domain

Variable = tuple[tuple[str, ...], NDArray[Any], dict[str, Any]]
"""Names of axes, values and attributes."""

IDENTITY = ("problem", "kernel")
"""Attributes by which a file says of which problem it is."""

_LONGEST = 2**26  # bytes of a description
_SPARE = 2**20  # bytes that are left free on a disk


@dataclass(frozen=True)
class Layout:
    """Form of frames; `coordinates` are positions along the axes, as (axes, values, attributes)."""

    domain: Domain
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    axes: tuple[str, ...]
    coordinates: dict[str, Variable]
    attributes: dict[str, Any]

    @property
    def beside(self) -> dict[str, str]:
        """The attribute of u by which readers know coordinates that are no axes (conventions CF)."""
        names = [name for name, (axes, _, _) in self.coordinates.items() if axes != (name,)]
        return {"coordinates": " ".join(names)} if names else {}

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


@dataclass(frozen=True)
class Frame:
    """A moment."""

    t: float
    u: NDArray[Any]
    energy: float


class Series(ABC):
    """A file of `count` frames that stays whole while one is added; the caller holds a lock."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.count = 0
        self.last: float | None = None

    def check(self, layout: Layout) -> None:  # noqa: B027  # a hook: most formats hold everything
        """Refuse other frames."""

    @property
    def places(self) -> tuple[Path, ...]:
        return (self.path,)

    @abstractmethod
    def create(self, layout: Layout) -> None:
        """Begin without frames."""

    @abstractmethod
    def resume(self, layout: Layout, count: int) -> None:
        """Continue after the first `count` frames; `FileFormatError` for another problem or if some are missing."""

    @abstractmethod
    def about(self) -> dict[str, Any]: ...

    def is_of(self, layout: Layout) -> bool:
        try:
            with reading(self.path):
                about = self.about()
        except FileFormatError:
            return False
        return all(isinstance(about.get(name), str) and about[name] == layout.attributes[name] for name in IDENTITY)

    def remove(self) -> None:
        with writing(self.path):
            for place in self.places:
                remove(place)

    @abstractmethod
    def _append(self, frame: Frame) -> None:
        """Add a frame."""

    def close(self) -> None:  # noqa: B027  # a hook
        """Tidy up."""

    def append(self, frame: Frame) -> None:
        with writing(self.path):
            needed, free = 2 * frame.u.nbytes + _SPARE, shutil.disk_usage(self.path.absolute().parent).free
            if free < needed:
                raise FileFormatError(
                    f"{self.path}: got a disk with {format_bytes(free)} left, expected {format_bytes(needed)} for the "
                    f"frame at t={frame.t:g}; free some space, then resume from a checkpoint"
                )
            self._append(frame)
        self.count, self.last = self.count + 1, frame.t

    def _continue(self, layout: Layout, frames: int, count: int, times: Callable[[int], float]) -> None:
        """Check that a file is of this problem, with enough frames; `times` tells when a frame was."""
        found = self.about().get("problem")
        if not isinstance(found, str) or found != layout.attributes["problem"]:
            raise FileFormatError(
                f"{self.path}: belongs to another run than the checkpoint; resume with the file that was written "
                "beside the checkpoint, or start afresh"
            )
        if frames < count:
            raise FileFormatError(
                f"{self.path}: got {frames} frames, expected {count}, which there were at the checkpoint; resume from "
                "an earlier checkpoint, or start afresh"
            )
        self.count, self.last = count, times(count - 1) if count else None


@contextmanager
def writing(path: Path) -> Iterator[None]:
    try:
        yield
    except FileFormatError:
        raise
    except (OSError, RuntimeError) as error:  # h5py raises both
        got = getattr(error, "strerror", None) or str(error)
        raise FileFormatError(
            f"{path}: got {got}, expected a file that can be written; free some space or choose another place, then "
            "resume from a checkpoint"
        ) from error


@contextmanager
def reading(path: Path) -> Iterator[None]:
    try:
        yield
    except FileFormatError:
        raise
    except (OSError, RuntimeError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise FileFormatError(
            f"{path}: not a file of frames that can be gone on with ({error}); start afresh, or restore it"
        ) from error


def described(path: Path) -> str:
    if path.stat().st_size > _LONGEST:
        raise ValueError(f"{path.name} has more than {format_bytes(_LONGEST)}")
    return path.read_text(encoding="utf-8")


def missing(package: str, extra: str, path: Path) -> MissingPackageError:
    return not_installed(f"path: {str(path)!r}", package, extra)
