"""The command ``nonlocal denoise`` for several files, with a record of each output."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import typer

from nlflow.backends.machine import provenance, version
from nlflow.desk.commands.denoise_file import Request, denoise_file
from nlflow.desk.commands.jobs import Job, Plan
from nlflow.desk.commands.reports import line
from nlflow.desk.terminal import echo, in_shell, mendable, print_json, progress_bar, progress_of
from nlflow.errors import FileFormatError, InputError, visible
from nlflow.store.atomic import locked, make_folder
from nlflow.store.encoding import digest, plain
from nlflow.store.storage import load_record, save_record

_KIND = "output of a folder"


def denoise_folder(plan: Plan, request: Request, *, resume: bool, as_json: bool, quiet: bool) -> None:
    """Denoise one file after the other; errors are told at the end, and the other files are done."""
    folder = plan.folder
    assert folder is not None
    with locked(make_folder(folder), "OUT"):
        _denoise_all(folder, plan.jobs, request, resume=resume, as_json=as_json, quiet=quiet)


def _denoise_all(
    folder: Path, jobs: tuple[Job, ...], request: Request, *, resume: bool, as_json: bool, quiet: bool
) -> None:
    start, count = time.perf_counter(), len(jobs)
    reports: list[dict[str, Any]] = []
    failed, kept, interrupted = 0, 0, False
    ledger = Ledger(folder, asdict(request))
    outputs = [path for job in jobs for path in (job.target, job.figure) if path is not None]
    for place in sorted({path.parent for path in outputs}):
        make_folder(place)
    width = max((len(str(job.source)) for job in jobs), default=0)
    log = progress_of(quiet)
    with progress_bar(quiet, total=count, desc="denoise", unit="file") as bar:

        def say(text: str, *, err: bool = True) -> None:
            with bar.external_write_mode():  # the bar makes room
                echo(visible(in_shell(text) if err else text), err=err)

        def tell(source: Path, level: str, text: str) -> None:
            if not quiet:
                say(f"nonlocal: {level}: {text}" if level == "note" else f"nonlocal: {level}: {source}: {text}")

        for job in jobs:
            bar.set_postfix_str(visible(job.source.name))
            if callable(log):
                log.name = str(job.source)
            try:
                if resume and ledger.settled(job):
                    kept += 1
                else:
                    report = denoise_file(
                        job, request, progress=log if callable(log) else False, tell=partial(tell, job.source),
                        begin=partial(ledger.begin, job),
                    )  # fmt: skip
                    ledger.finish(job)
                    reports.append(report)
                    if not (quiet or as_json):
                        say(f"{job.source!s:<{width}}  {line(report)}", err=False)
            except KeyboardInterrupt:
                interrupted = True
                break
            except Exception as error:
                message = mendable(error)
                if message is None:
                    raise
                message = message if message.startswith(visible(str(job.source))) else f"{job.source}: {message}"
                failed += 1
                reports.append({"input": str(job.source), "error": message})
                say(f"nonlocal: error: {message}")
            bar.update()
    done, seconds = len(reports) - failed, time.perf_counter() - start
    if as_json:
        counts = {"done": done, "kept": kept, "failed": failed, "interrupted": interrupted, "seconds_total": seconds}
        print_json({"files": reports, **counts, "version": version(), "provenance": provenance()})
    elif not (quiet or interrupted or not count):
        if kept:
            echo(f"{kept} of {count} file(s) were done before and stay as they are")
        echo(f"{done} of {count} file(s) written to {folder} in {seconds:.1f} s")
    if interrupted:
        echo(f"nonlocal: interrupted; {done + kept} of {count} file(s) are done and complete in {folder}", err=True)
        raise typer.Exit(130)
    if failed:
        echo(f"nonlocal: error: {failed} of {count} file(s) failed; they are named above", err=True)
        raise typer.Exit(1)


class Ledger:
    """The records of outputs."""

    def __init__(self, folder: Path, options: Mapping[str, Any]) -> None:
        self.folder = make_folder(folder / ".nlflow")
        self.options = {**plain(options), "nlflow": version()}
        self._begun: dict[str, Any] = {}

    def begin(self, job: Job) -> None:
        self._begun = self._made_of(job)
        save_record(self._path(job), _KIND, {**self._begun, "outputs": None})

    def finish(self, job: Job) -> None:
        outputs = {path.name: _digest(path) for path in (job.target, job.figure) if path is not None}
        save_record(self._path(job), _KIND, {**self._begun, "outputs": outputs})

    def settled(self, job: Job) -> bool:
        there = [path for path in (job.target, job.figure) if path is not None and path.exists()]
        if not there:
            return False
        found = self._read(job)
        if found is None:
            raise InputError(
                f"OUT: got {there[0]}, of which the folder has no record, so that it may not be of an earlier run; "
                "choose another folder, or give --existing overwrite or --existing skip"
            )
        outputs = found.get("outputs")
        if outputs is None:  # it was being written when the run ended
            return False
        if any(outputs.get(path.name) != _digest(path) for path in there):
            raise InputError(
                f"OUT: got {there[0]}, which was changed since it was written; rename it, or "
                "give --existing overwrite or --existing skip"
            )
        return len(there) == len(outputs) and found == {**self._made_of(job), "outputs": outputs}

    def _path(self, job: Job) -> Path:
        name = job.target.relative_to(self.folder.parent).as_posix()
        # The longest names leave no room for an ending, and those of folders inside are no names.
        plain_name = "/" not in name and len(os.fsencode(name)) < 200
        return self.folder / (f"{name}.json" if plain_name else f"{digest(name)}.json")

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


def _digest(path: Path) -> str | None:
    """Return the SHA-256 of a file or folder; None if it cannot be read, which its reader will say better."""
    if path.is_dir():
        inside = sorted(file for file in path.rglob("*") if file.is_file())
        return digest("".join(f"{file.relative_to(path)} {_digest(file)}\n" for file in inside))
    try:
        with path.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError:
        return None
