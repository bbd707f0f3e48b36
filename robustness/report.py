"""The table of a run: for people in Markdown, and in JSON."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from nlflow._atomic import make_folder, write_atomic
from nlflow._machine import environment
from nlflow._terminal import plain
from robustness.contract import Row

__all__ = ["line", "write"]


def line(row: Row) -> str:
    """Return a row as text."""
    outcomes = ", ".join(f"{count} {what}" for what, count in row.outcomes.items() if count)
    verdict = "good" if row.good else "BAD"
    return f"{verdict:<5}{row.fault}: {row.tried} times: {outcomes}; lost {row.lost}, wrong {row.wrong}"


def write(folder: Path, rows: Sequence[Row], settings: dict[str, Any]) -> None:
    """Write ``robustness.json`` and ``robustness.md``."""
    make_folder(folder)
    about = {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{platform.system()} {platform.machine()}, {_processor()}, {os.cpu_count()} cores",
        "settings": settings,
        "environment": environment(),
    }
    entries = [
        {
            "fault": row.fault, "tried": row.tried, "outcomes": dict(row.outcomes), "lost": row.lost,
            "wrong": row.wrong, "seconds": round(row.seconds, 1), "details": row.details,
        }
        for row in rows
    ]  # fmt: skip
    text = json.dumps(plain({**about, "rows": entries}), indent=1, allow_nan=False)
    page = table(rows, about)
    write_atomic(folder / "robustness.json", lambda file: file.write(text.encode()))
    write_atomic(folder / "robustness.md", lambda file: file.write(page.encode()))


def table(rows: Sequence[Row], about: dict[str, Any]) -> str:
    """Return the table in Markdown."""
    given = ", ".join(f"{name} {value}" for name, value in about["settings"].items())
    lines = [
        "# Faults and hostile files",
        "",
        f"{about['date']}, {about['machine']}; {given}. `make robustness` writes this table.",
        "",
        "| fault | tried | outcome | lost | wrong | seconds |",
        "|---|---:|---|---:|---:|---:|",
    ]
    for row in rows:
        outcomes = "; ".join(f"{count} {what}" for what, count in row.outcomes.items() if count)
        lines.append(f"| {row.fault} | {row.tried} | {outcomes} | {row.lost} | {row.wrong} | {row.seconds:.0f} |")
    good = sum(row.good for row in rows)
    return "\n".join([*lines, "", f"{good} of {len(rows)} rows without loss or wrong result.", ""])


def _processor() -> str:
    try:
        for text in Path("/proc/cpuinfo").read_text().splitlines():
            if text.startswith("model name"):
                return text.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or "unknown processor"
