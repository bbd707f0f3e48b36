"""The command ``nonlocal denoise`` for files: one, or many one after the other, and what is printed of them."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

import typer

from nlflow.io.terminal import echo, mendable, print_json, print_table

if TYPE_CHECKING:
    from nlflow.commands.batches import Batch
    from nlflow.commands.denoise_files import Options

__all__ = ["denoise_many", "denoise_one"]

_SHOWN = 8  # columns of a table in a summary; --json has all


def denoise_one(batch: Batch, options: Options, *, as_json: bool, quiet: bool) -> None:
    """Denoise a file, and print what was done."""
    from nlflow.backends.machine import provenance, version
    from nlflow.commands.denoise_files import denoise_file

    def note(level: str, text: str) -> None:
        if not quiet:
            echo(f"nonlocal: {level}: {text}", err=True)

    progress = not quiet and sys.stderr.isatty()
    report = denoise_file(batch.jobs[0], options, folders=False, progress=progress, note=note)
    if as_json:
        print_json(report | {"version": version(), "provenance": provenance()})
    elif not quiet:
        print_table(_summary(report))


def denoise_many(batch: Batch, options: Options, *, resume: bool, as_json: bool, quiet: bool) -> None:
    """Denoise one file after the other; a broken one is named and does not keep the others from being done."""
    from tqdm import tqdm

    from nlflow.backends.machine import provenance, version
    from nlflow.commands.denoise_files import denoise_file
    from nlflow.commands.ledger import Ledger

    began, count = time.perf_counter(), len(batch.jobs)
    reports: list[dict[str, Any]] = []
    failed, kept, interrupted = 0, 0, False
    assert batch.folder is not None
    ledger = Ledger(batch.folder, asdict(options))
    width = max((len(str(job.source)) for job in batch.jobs), default=0)
    bar = tqdm(
        total=count, desc="denoise", unit="file", disable=quiet or not sys.stderr.isatty(), leave=False, file=sys.stderr
    )

    def say(text: str, *, err: bool = True) -> None:
        with tqdm.external_write_mode():  # the bar makes room
            echo(text, err=err)

    with bar:
        for job in batch.jobs:
            bar.set_postfix_str(job.source.name)

            def note(level: str, text: str, source: str = str(job.source)) -> None:
                if not quiet:
                    say(f"nonlocal: {level}: {text}" if level == "note" else f"nonlocal: {level}: {source}: {text}")

            try:
                if resume and ledger.settled(job):
                    kept += 1
                    bar.update()
                    continue
                report = denoise_file(
                    job, options, folders=True, progress=False, note=note, writes=partial(ledger.begin, job)
                )
                ledger.finish(job)
            except KeyboardInterrupt:
                interrupted = True
                break
            except Exception as error:
                message = mendable(error)
                if message is None:
                    raise
                message = message if message.startswith(str(job.source)) else f"{job.source}: {message}"
                failed += 1
                reports.append({"input": str(job.source), "error": message})
                say(f"nonlocal: error: {message}")
            else:
                reports.append(report)
                if not (quiet or as_json):
                    say(f"{job.source!s:<{width}}  {_line(report)}", err=False)
            bar.update()
    done = len(reports) - failed
    if as_json:
        counts = {"done": done, "kept": kept, "failed": failed, "interrupted": interrupted}
        print_json(
            {
                "files": reports,
                **counts,
                "seconds_total": time.perf_counter() - began,
                "version": version(),
                "provenance": provenance(),
            }
        )
    elif not (quiet or interrupted or not count):
        if kept:
            echo(f"{kept} of {count} file(s) were done before and stay as they are")
        echo(f"{done} of {count} file(s) written to {batch.folder} in {time.perf_counter() - began:.1f} s")
    if interrupted:
        echo(
            f"nonlocal: interrupted; {done + kept} of {count} file(s) are done and complete in {batch.folder}", err=True
        )
        raise typer.Exit(130)
    if failed:
        echo(f"nonlocal: error: {failed} of {count} file(s) failed; they are named above", err=True)
        raise typer.Exit(1)


def _given_sigma(report: dict[str, Any]) -> str:
    origin = report["sigma_given"]
    words = "estimated" if origin is None else f"map {origin}" if isinstance(origin, str) else "given"
    columns = report.get("columns", ())
    if len(columns) < 2:
        return f"{report['denoise']['sigma']:.4g} ({words})"
    return f"{_of_columns(columns, 'sigma')} ({words})"


def _of_columns(columns: Sequence[dict[str, Any]], name: str) -> str:
    """Return a number of each column of a table, whose units differ."""
    shown = ", ".join(f"{column['name']} {column[name]:.4g}" for column in columns[:_SHOWN])
    return shown + (f" and {len(columns) - _SHOWN} more" if len(columns) > _SHOWN else "")


def _figures(report: dict[str, Any], of: str = "") -> list[tuple[str, str]]:
    """Return the figures of quality that a report has, before and after; of each column of a table."""
    columns = report.get("columns", ())
    if len(columns) > 1:
        return [row for column in columns[:_SHOWN] for row in _figures(column, f" {column['name']}")]
    rows = []
    for name, form, unit in (("psnr", ".2f", " dB"), ("snr", ".2f", " dB"), ("ssim", ".4f", "")):
        if report.get(f"{name}_output") is not None:
            before = report[f"{name}_input"]
            shown = "unknown" if before is None else f"{before:{form}}{unit}"
            rows.append((f"{name.upper()}{of}", f"{shown} before, {report[f'{name}_output']:{form}}{unit} after"))
    return rows


def _line(report: dict[str, Any]) -> str:
    """Return what a report says in one line."""
    figures = "".join(f", {name} {value}" for name, value in _figures(report))
    return f"sigma {_given_sigma(report)}{figures}, {report['seconds_total']:.2f} s"


def _summary(report: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the lines for people: what was given, what was done, what was written."""
    from nlflow.errors import format_bytes

    details = dict(report["denoise"])
    size = " x ".join(map(str, report["shape"]))
    rows = [
        ("input", f"{report['input']}, {report['kind']} of {size}, {report['dtype']}"),
        ("sigma", _given_sigma(report)),
    ]
    rows += [(name, f"{report[name]} sample(s)") for name in ("missing", "kept") if report[name]]
    for name in ("sigma", "sigma_estimated"):
        details.pop(name, None)
    seconds = details.pop("seconds", report["seconds_total"])
    for name, value in details.items():
        if name == "residual" and len(report.get("columns", ())) > 1:
            rows.append((name, _of_columns(report["columns"], name)))
        elif isinstance(value, bool | int | float | str):
            shown = f"{value:.4g}" if isinstance(value, float) else str(value)
            shown = format_bytes(float(value)) if name.endswith("_bytes") else shown
            rows.append((name.removesuffix("_bytes").replace("_", " "), shown))
    rows += [*_figures(report), ("seconds", f"{seconds:.2f}"), ("written", report["output"])]
    return rows + ([("figure", report["figure"])] if report["figure"] else [])
