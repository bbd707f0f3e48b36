"""Tables of what was measured: one record of all rows, with a page for people beside it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Generic, TypeVar

from nlflow.backends.machine import environment, git_state, machine_name
from nlflow.errors import FileFormatError
from nlflow.store.atomic import make_folder, write_content
from nlflow.store.encoding import plain
from nlflow.store.storage import load_record, save_record

T = TypeVar("T")


@dataclass(frozen=True)
class Entry(Generic[T]):
    """A row of a table with what has to be known to believe it: which case, when, where and of which source."""

    key: str
    row: T
    date: str
    source: str
    machine: str

    @classmethod
    def of(cls, key: str, row: T) -> Entry[T]:
        """Return a row that was found now and here."""
        state = git_state()
        source = "unknown" if state is None else state["commit"][:10] + (" and changes" if state["changed"] else "")
        return cls(key, row, datetime.now(UTC).date().isoformat(), source, machine_name())


class Table(Generic[T]):
    """Findings of many cases in one record, with a page for people beside it; both are complete after each case.

    Parameters
    ----------
    folder : path
        Gets ``<name>.json`` and ``<name>.md``.
    name, kind : str
        Of the files, and of the record.
    row : callable
        Makes a row, a dataclass, of its fields.
    page : callable
        From all entries to Markdown.
    order : callable, optional
        The key by which entries are sorted; else they stay in the order in which they were found.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        name: str,
        kind: str,
        row: Callable[..., T],
        page: Callable[[Sequence[Entry[T]]], str],
        order: Callable[[Entry[T]], Any] | None = None,
    ) -> None:
        self.path, self.kind = Path(folder) / f"{name}.json", kind
        self._row, self._page, self._order = row, page, order
        self.entries: list[Entry[T]] = []

    def load(self, keep: Callable[[Entry[T]], bool] = lambda entry: True) -> None:
        """Take the entries of an earlier run that are to be kept; none if there was none.

        Raises
        ------
        FileFormatError
            When the file is damaged, or is no such table.
        """
        if not self.path.exists():
            return
        content = load_record(self.path, self.kind)
        try:
            found = [Entry(**{**entry, "row": self._row(**entry["row"])}) for entry in content["entries"]]
        except (TypeError, KeyError) as error:
            raise FileFormatError(f"{self.path}: got no {self.kind} ({error}); choose another folder") from error
        self._put([entry for entry in found if keep(entry)])

    def read(self, name: str) -> T | None:
        """Return the row of a case; None if there is none."""
        return next((entry.row for entry in self.entries if entry.key == name), None)

    def write(self, name: str, finding: T) -> None:
        """Add the row of a case, and write both files."""
        self._put([*self.entries, Entry.of(name, finding)])
        make_folder(self.path.parent)
        entries = [plain(asdict(entry)) for entry in self.entries]
        save_page(self.path, self.kind, {"environment": environment(), "entries": entries}, self.page())

    def _put(self, entries: list[Entry[T]]) -> None:
        self.entries = entries if self._order is None else sorted(entries, key=self._order)

    def page(self) -> str:
        """Return the table in Markdown."""
        return self._page(self.entries)


def save_page(path: Path, kind: str, content: Mapping[str, Any], page: str) -> None:
    """Write a record, and beside it the page for people that says the same in Markdown."""
    save_record(path, kind, content)
    write_content(path.with_suffix(".md"), page.encode())


def markdown(heads: Sequence[str], lines: Iterable[Sequence[object]], numbers: Iterable[str] = ()) -> str:
    """Return a Markdown table; the columns that are named in `numbers` are aligned to the right."""
    right = set(numbers)
    ruler = "|".join("---:" if head in right else "---" for head in heads)
    first, *rest = (f"| {' | '.join(map(_cell, line))} |" for line in (heads, *lines))
    return "\n".join([first, f"|{ruler}|", *rest])


def _cell(value: object) -> str:
    """Return a value without what would end its cell or its row."""
    return str(value).replace("|", "\\|").replace("\n", " ")
