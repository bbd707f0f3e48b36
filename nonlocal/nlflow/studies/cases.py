"""Cases that are computed side by side and kept one by one."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Protocol

from nlflow.backends.threads import cores
from nlflow.backends.workers import Call, completed
from nlflow.errors import InputError


@dataclass(frozen=True)
class Case:
    """A piece of work.

    Attributes
    ----------
    name : str
        Name of the record, different for each case.
    call : callable
        Returns the result, which is not None and does not depend on the process.
    arguments : tuple
    """

    name: str
    call: Callable[..., Any]
    arguments: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Done:
    """A case with its result, and whether that was read from a file."""

    case: Case
    finding: Any
    read: bool


class Keeper(Protocol):
    """Where results are kept."""

    def read(self, name: str) -> Any | None: ...

    def write(self, name: str, finding: Any) -> None: ...


def run_cases(
    cases: Iterable[Case],
    keeper: Keeper | None = None,
    *,
    resume: bool = True,
    jobs: int | None = 1,
    scheduler: str | None = None,
    threads: bool = False,
    bar: Any = None,
) -> Generator[Done]:
    """Yield all cases with their results: first those that are known, then each when it is done and kept.

    Close the iterator to end the cases that still run. `threads` is for cases that wait for other processes.
    """
    known, left, names = [], [], set[str]()
    for case in cases:
        if case.name in names:
            raise InputError(f"cases: got the name {case.name!r} twice, expected another name for each case")
        names.add(case.name)
        finding = keeper.read(case.name) if resume and keeper is not None else None
        if finding is None:
            left.append(case)
        else:
            known.append(Done(case, finding, True))
    if bar is not None:
        bar.initial = bar.n = len(known)
    yield from known
    if not left:
        return
    calls = [(case.call, case.arguments) for case in left]
    count = cores() if jobs in (None, -1) else jobs
    side_by_side = _in_threads(calls, int(count or 1)) if threads else completed(calls, jobs=jobs, scheduler=scheduler)
    with closing(side_by_side) as results:
        for number, finding in results:
            if keeper is not None:
                keeper.write(left[number].name, finding)
            if bar is not None:
                bar.update()
            yield Done(left[number], finding, False)


def _in_threads(calls: Sequence[Call], jobs: int) -> Generator[tuple[int, Any]]:
    pool = ThreadPoolExecutor(jobs)
    numbers = {pool.submit(function, *arguments): number for number, (function, arguments) in enumerate(calls)}
    try:
        for call in as_completed(numbers):
            yield numbers[call], call.result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # callers may have to end what the threads wait for
