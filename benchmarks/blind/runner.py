"""One method on one scene after the other, each figure kept as soon as it is there."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from tqdm import tqdm

from benchmarks.blind.figure import draw, file_name
from benchmarks.blind.methods import Method, psnr
from benchmarks.blind.scenes import Scene, sample_of
from benchmarks.denoising.methods import threads
from benchmarks.harness import KIND
from nlflow.store.storage import load_record
from nlflow.studies.cases import Case, run_cases
from validation.tables import Entry

_PAUSE: Final = 30.0  # seconds at least between two writings of the files


@dataclass(frozen=True)
class Figure:
    """What a method reached on a scene: PSNR in dB, or a ratio of times; None with the reason where it did not run.

    `source` is the digest of nlflow's source for methods that are measured again when it changes, else empty.
    """

    section: str
    setting: str
    picture: str
    method: str
    value: float | None
    note: str = ""
    seconds: float = 0.0
    source: str = ""

    @classmethod
    def read(cls, row: dict[str, Any]) -> Figure:
        """Return the figure of a record, whose null is the infinite PSNR of an unchanged picture."""
        figure = cls(**row)
        unchanged = figure.section == "clean" and figure.value is None
        return replace(figure, value=math.inf) if unchanged else figure

    @property
    def key(self) -> str:
        return "/".join((self.section, self.setting, self.picture, self.method))


class Kept:
    """Figures with their provenance, by key, as they lie in a record.

    Parameters
    ----------
    path : Path
        Of the record; it need not exist.
    source : str
        Digest of nlflow's source.
    fresh : bool
        Whether nothing of the record counts as measured.
    """

    def __init__(self, path: Path, source: str, fresh: bool = False):
        content = load_record(path, KIND) if path.exists() else {"entries": []}
        found = [Entry(**{**entry, "row": Figure.read(entry["row"])}) for entry in content["entries"]]
        self.entries: dict[str, Entry[Figure]] = {entry.key: entry for entry in found}
        self._source, self._fresh, self._measured = source, fresh, set[str]()

    @property
    def figures(self) -> list[Figure]:
        return [entry.row for entry in self.entries.values()]

    def read(self, name: str) -> Figure | None:
        """Return a figure that need not be measured again."""
        entry = self.entries.get(name)
        if entry is None or self._fresh or entry.row.value is None:
            return None
        return entry.row if entry.row.source in ("", self._source) else None

    def write(self, name: str, finding: Figure) -> None:
        self.entries[name] = Entry.of(name, finding)

    def drop_former(self, section: str, scenes: Iterable[Scene]) -> None:
        """Drop the figures of scenes that a section has no longer."""
        there = {(section, scene.setting, scene.picture) for scene in scenes}
        for key, entry in list(self.entries.items()):
            figure = entry.row
            if figure.section == section and (section, figure.setting, figure.picture) not in there:
                del self.entries[key]

    def plain(self) -> list[dict[str, Any]]:
        return [asdict(entry) for entry in self.entries.values()]


def measured(scene: Scene, name: str, method: Method, source: str, drawn: Path | None) -> Figure:
    """Run a method on a scene, on one thread; draw what it did where `drawn` names a folder."""
    sample = sample_of(scene)
    begun = time.perf_counter()
    with threads(1):
        outcome = method.call(sample)
    seconds = time.perf_counter() - begun
    value = outcome.value if outcome.result is None else psnr(sample.truth, outcome.result, sample.peak)
    where = (scene.section, scene.setting, scene.picture, name)
    figure = Figure(*where, value, outcome.note, seconds, source if method.ours else "")
    if drawn is not None and outcome.result is not None and method.ours:
        draw(drawn / file_name(figure.key), sample, outcome.result)
    return figure


def measure(
    section: str,
    scenes: Iterable[Scene],
    methods: dict[str, Method],
    kept: Kept,
    source: str,
    *,
    jobs: int = 1,
    drawn: Path | None = None,
) -> Iterable[Figure]:
    """Yield the figure of every method on every scene, those that are known first."""
    cases = []
    for scene in scenes:
        for name, method in methods.items():
            key = Figure(section, scene.setting, scene.picture, name, None).key
            cases.append(Case(key, measured, (scene, name, method, source, drawn)))
    with tqdm(total=len(cases), desc=section, unit="result", smoothing=0.02) as bar:
        for done in run_cases(cases, kept, jobs=jobs, bar=bar):
            yield done.finding


def write_as_they_come(figures: Iterable[Figure], write: Callable[[], None]) -> None:
    """Take figures as they come in, and write now and then and at the end, whatever ends the run."""
    written = time.monotonic()
    try:
        for _ in figures:
            if time.monotonic() - written > _PAUSE:
                write()
                written = time.monotonic()
    finally:
        write()
