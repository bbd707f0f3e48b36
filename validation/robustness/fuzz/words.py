"""Readers of what users type: kernels and options as text, files that tell a study, and whole command lines."""

from __future__ import annotations

import contextlib
import itertools
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from validation.robustness.fuzz import seeds
from validation.robustness.fuzz.folders import emptied
from validation.robustness.fuzz.watch import Reader, quiet, require

__all__ = ["command", "kernel", "recipe"]


def kernel(folder: Path) -> Reader:
    """Return a reader of kernels and options of studies as text, ``name=value`` on lines after the kernel."""
    del folder
    from nlflow.desk.commands.study import _listed
    from nlflow.errors import NlflowError
    from nlflow.studies.options import kernel_label, parse_kernel, read_options
    from nlflow.studies.runner import KINDS
    from nlflow.studies.settings import make_settings

    numbers: dict[str, Any] = {"nodes": int, "dimension": int, "channels": int, "fidelity": float, "dt": float}
    single: dict[str, Any] = {"seeds": int, "laziness": float, "eps": float, "t": float}

    def read(data: bytes) -> None:
        first, *lines = data.decode("utf-8", "surrogateescape").split("\n")
        options: dict[str, Any] = {}
        for line in lines[:8]:
            name, _, value = line.partition("=")
            if name in single:
                with contextlib.suppress(ValueError):
                    options[name] = single[name](value)
            elif name:
                options[name] = _listed(name, value, numbers.get(name, str))
        chosen = parse_kernel(first)
        label = kernel_label(chosen)
        require(type(parse_kernel(label)) is type(chosen), f"{label!r} is another kernel")
        refused: list[NlflowError] = []
        for kind in KINDS.values():
            try:
                read_options(kind, {"kernel": chosen})
                cases = make_settings(kind, read_options(kind, {"kernel": first, **options})) if len(data) < 200 else []
            except NlflowError as error:
                refused.append(error)
                continue
            require(all(case.label for case in cases), "a case without a label")
        if len(refused) == len(KINDS):  # a kernel or an option of one study is not one of each
            raise refused[0]

    return read


class _CheckedError(Exception):
    """All of a study was checked."""


def recipe(folder: Path) -> Reader:
    """Return a reader of ``study.toml``, which goes as far as `run_study` does before it measures."""
    from nlflow.studies import run_study
    from nlflow.studies.replay import NAME

    for name, content in seeds.recipe_files().items():
        (folder / name).write_bytes(content)

    def read(data: bytes) -> None:
        (folder / NAME).write_bytes(data)
        checked = patch("nlflow.studies.runner._measured", side_effect=_CheckedError)
        with quiet(), checked, contextlib.suppress(_CheckedError):
            run_study(folder / NAME, progress=False)
            raise AssertionError("a study was not measured")

    return read


def command(folder: Path) -> Reader:
    """Return a reader of command lines, one word a line; they run in a folder with an image and an array."""
    from PIL import Image
    from typer.testing import CliRunner

    from nlflow import denoise
    from nlflow.desk.commands import main as cli
    from nlflow.errors import InputError

    place = folder / "place"
    runner = CliRunner()

    def measured(*arguments: Any, **options: Any) -> Any:
        """Stand in for a study, whose options are checked and whose work may take hours."""
        from nlflow.studies.options import read_options
        from nlflow.studies.runner import KINDS

        options = {name: value for name, value in options.items() if name not in ("out", "jobs", "progress", "rng")}
        read_options(KINDS[arguments[0]], options)
        raise InputError("study: got options that can be studied")

    outside = sorted(path.name for path in folder.iterdir())
    for quality, dtype in itertools.product(("fast", "balanced", "best"), (np.float32, np.float64)):
        with quiet():  # compiled now, and not in the time of an input
            denoise(np.arange(63, dtype=dtype).reshape(7, 9) % 8, 1.0, quality=quality)

    def read(data: bytes) -> None:
        words = [_inside(word) for word in data.decode("utf-8", "surrogateescape").split("\n")[:24]]
        words = [word for word in words if "\0" not in word]
        if words and words[0] in ("demo", "validate"):  # no options but names of folders, and minutes of work
            words = [*words, "--help"]
        emptied(place)
        Image.fromarray(np.arange(63, dtype=np.uint8).reshape(7, 9)).save(place / "in.png")
        np.save(place / "in.npy", np.arange(24.0).reshape(4, 6) % 7)
        with quiet(), contextlib.chdir(place), patch("nlflow.studies.run_study", measured):
            result = runner.invoke(cli.app, words, prog_name="nonlocal")
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        require(result.exit_code in (0, 1, 2), f"exit code {result.exit_code} of {words}")
        require("Traceback (most recent call last)" not in result.output, f"a trace after {words}")
        now = sorted(path.name for path in folder.iterdir() if path != place)
        require(now == outside, f"{words} wrote {now} outside of its folder")
        if result.exit_code:
            require(result.stderr.strip(), f"exit code {result.exit_code} without a word after {words}")
            raise InputError("refused")

    return read


def _inside(word: str) -> str:
    """Return a word of a command line that names nothing outside of the folder, and no model on the hub."""
    return word.replace("/", "_").replace("..", "_")
