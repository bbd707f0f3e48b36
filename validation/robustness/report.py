"""The table of a run: for people in Markdown, and in JSON."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from nlflow.backends.machine import environment, git_state
from nlflow.io.atomic import make_folder, write_atomic
from nlflow.io.storage import load_record, save_record
from nlflow.io.terminal import plain
from validation.robustness.contract import Row

__all__ = ["Entry", "here", "line", "read", "write"]

_KIND = "table of faults"


def line(row: Row) -> str:
    """Return a row as text."""
    verdict = "good" if row.good else "BAD"
    return f"{verdict:<5}{row.fault}: {row.tried} times: {_outcomes(row, ', ')}; lost {row.lost}, wrong {row.wrong}"


@dataclass(frozen=True)
class Entry:
    """A row with what has to be known to believe it: which trial, when, where and of which source."""

    key: str
    row: Row
    date: str
    source: str
    machine: str

    @classmethod
    def of(cls, key: str, row: Row) -> Entry:
        """Return a row that was found now and here."""
        return cls(key, row, *here())


def here() -> tuple[str, str, str]:
    """Return the date, the source and the machine."""
    state = git_state()
    source = "unknown" if state is None else state["commit"][:10] + (" and changes" if state["changed"] else "")
    machine = f"{platform.system()} {platform.machine()}, {_processor()}, {os.cpu_count()} cores"
    return datetime.now(UTC).date().isoformat(), source, machine


def read(folder: Path, name: str = "robustness") -> list[Entry]:
    """Return the entries of a table that was written before; none if there is none."""
    path = folder / f"{name}.json"
    if not path.exists():
        return []
    entries = load_record(path, _KIND)["entries"]
    return [Entry(**{**entry, "row": Row(**entry["row"])}) for entry in entries]


def write(
    folder: Path,
    entries: Sequence[Entry],
    name: str = "robustness",
    title: str = "Faults and hostile files",
    command: str = "make robustness",
) -> None:
    """Write ``<name>.json`` and ``<name>.md``, the table with a title and the command that wrote it."""
    make_folder(folder)
    save_record(folder / f"{name}.json", _KIND,
                {"environment": environment(), "entries": [plain(asdict(entry)) for entry in entries]})  # fmt: skip
    page = table(entries, title, command)
    write_atomic(folder / f"{name}.md", lambda file: file.write(page.encode()))


def table(entries: Sequence[Entry], title: str, command: str) -> str:
    """Return the table in Markdown."""
    dates = sorted({entry.date for entry in entries})
    when = " to ".join(dict.fromkeys((dates[0], dates[-1])))
    where = "; ".join(sorted({entry.machine for entry in entries}))
    lines = [
        f"# {title}",
        "",
        f"Written by `{command}`. {when}; {where}.",
        "",
        "| fault | tried | outcome | lost | wrong | seconds | processor seconds | source |",
        "|---|---:|---|---:|---:|---:|---:|---|",
    ]
    for entry in entries:
        row = entry.row
        lines.append(
            f"| {row.fault} | {row.tried} | {_outcomes(row, '; ')} | {row.lost} | {row.wrong} | {row.seconds:.0f} | "
            f"{row.details.get('processor seconds', '')} | {entry.source} |"
        )
    good = sum(entry.row.good for entry in entries)
    return "\n".join([*lines, "", f"{good} of {len(entries)} rows without loss or wrong result.", ""])


def _outcomes(row: Row, between: str) -> str:
    return between.join(f"{count} {what}" for what, count in row.outcomes.items() if count)


def _processor() -> str:
    try:
        for text in Path("/proc/cpuinfo").read_text().splitlines():
            if text.startswith("model name"):
                return text.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or "unknown processor"
