"""What tests of the command line share: a denoiser that is none, and running a command."""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path
from typing import Any

import numpy as np
from typer.testing import CliRunner

from nlflow.desk.commands import main as cli
from nlflow.errors import NlflowWarning

RNG = np.random.default_rng(11)
IMAGE = RNG.integers(0, 256, (12, 16), dtype=np.uint8)


@dataclasses.dataclass(frozen=True)
class Info:
    sigma: float
    sigma_estimated: bool
    noise: str = "white"
    quality: str = "balanced"
    functional: str = "E"
    parameters: dict[str, Any] = dataclasses.field(default_factory=lambda: {"patch_size": 7})
    steps: int = 4
    stopped_by: str = "converged"
    risk: float | None = None
    residual: float = float("nan")
    levels: tuple[float, ...] = (1.0, 2.0)
    seconds: float = 0.125
    confidence: str = ""
    columns: tuple[Info, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


class Denoiser:
    """Stand-in for the real one: halves its input and remembers what it was given."""

    def __init__(self) -> None:
        self.calls: list[tuple[np.ndarray[Any, Any], Any, dict[str, Any]]] = []
        self.layouts: list[dict[str, Any]] = []  # what was said of axes, apart
        self.failures: dict[int, BaseException] = {}  # by the number of the call; -1 for every one
        self.warning = ""

    def __call__(self, image: Any, sigma: Any = None, **options: Any) -> tuple[Any, Info]:
        self.layouts.append({name: options.pop(name) for name in ("axes", "spacing") if name in options})
        options |= dataclasses.asdict(options.pop("options"))
        assert set(options) == set(OPTIONS)
        failure = self.failures.get(len(self.calls), self.failures.get(-1))
        if callable(options["progress"]):  # of a log, as every run without a terminal has one
            options["progress"] = False
        self.calls.append((image, sigma, options))
        if failure is not None:
            raise failure
        if self.warning:
            warnings.warn(self.warning, NlflowWarning, stacklevel=2)
        result = np.where(np.isfinite(image), image, 0.0) * 0.5
        level = 12.5 if sigma is None else float(np.sqrt(np.mean(np.square(sigma))))
        found = (
            {"noise": "white", "confidence": "high"} if options["noise"] == "auto" else {"noise": str(options["noise"])}
        )
        info = Info(level, sigma is None, quality=options["quality"], **found)
        columns = (info,) * image.shape[options["channel_axis"]] if options["separate"] else ()
        return result, dataclasses.replace(info, columns=columns)


#: What the real one gets if nothing is said.
OPTIONS = {
    **dict.fromkeys(("width", "patch_size", "search_radius", "fidelity", "steps")),
    "quality": "balanced",
    "noise": "auto",
    "strength": 1.0,
    "channel_axis": None,
    "separate": False,
    "mask": None,
    "keep": None,
    "stopping": None,
    "max_memory": None,
    "seed": 0,
    "device": "cpu",
    "preserve_range": True,
    "return_info": True,
    "progress": False,
}


def run(*arguments: object, code: int = 0) -> Any:
    result = CliRunner().invoke(cli.app, list(map(str, arguments)), prog_name="nonlocal", catch_exceptions=False)
    assert result.exit_code == code, result.output
    return result


def fails(*arguments: object) -> str:
    """Return the message of a run that fails with one line on stderr and nothing else."""
    before = listing()
    result = run(*arguments, code=1)
    assert result.stdout == ""
    lines = [line for line in result.stderr.splitlines() if not line.startswith("nonlocal: note:")]
    assert len(lines) == 1, lines
    assert lines[0].startswith("nonlocal: error: ")
    assert listing() == before
    return lines[0]


def misused(*arguments: object) -> str:
    """Return what is wrong with the usage, on one line, of a run that refuses it and does nothing else."""
    before = listing()
    result = run(*arguments, code=2)
    assert result.stdout == ""
    assert listing() == before
    return str(" ".join(result.stderr.split()).rpartition("Error: ")[2])


def listing(folder: Path | None = None) -> list[str]:
    """Return the names in a folder but for that of the records, which a folder of outputs has."""
    return sorted(path.name for path in (folder or Path.cwd()).iterdir() if path.name != ".nlflow")
