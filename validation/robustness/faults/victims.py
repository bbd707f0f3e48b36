"""Programs that are killed and gone on with: how each is called, when it has begun, and what it is to leave behind."""

from __future__ import annotations

import json
import sys
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import numpy as np

from nlflow.errors import FileFormatError
from nlflow.flows.result import Solution
from nlflow.store.checkpoints import previous
from nlflow.store.storage import load_archive, load_record
from validation.robustness.faults import flow

__all__ = ["FLOWS", "Claims", "Flow", "FolderRun", "Study", "Training", "Victim"]

CLI = [sys.executable, "-m", "nlflow.desk.commands.main"]


class Victim(ABC):
    """A program that keeps what it has done in a folder, and that goes on when it is called again.

    Attributes
    ----------
    name : str
    """

    name: str

    def prepare(self, folder: Path) -> None:  # noqa: B027  # a hook
        """Put the inputs into an empty folder."""

    @abstractmethod
    def command(self, folder: Path) -> list[str]:
        """Return the command line."""

    @abstractmethod
    def begun(self, folder: Path) -> bool:
        """Return whether it is at work: what comes before is the start of Python."""

    @abstractmethod
    def result(self, folder: Path) -> Any:
        """Return the result, to be compared bit by bit."""

    @abstractmethod
    def finished(self, folder: Path) -> dict[str, Any]:
        """Return what is done, by name, with something that changes when it is done again.

        Raises
        ------
        FileFormatError
            When something that was done cannot be read any more.
        """


class Flow(Victim):
    """An integration with a checkpoint after every step."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.name = f"flow, {kind}"

    def command(self, folder: Path) -> list[str]:
        return [sys.executable, "-m", "validation.robustness.faults.flow", self.kind, str(folder)]

    def begun(self, folder: Path) -> bool:
        return (folder / "checkpoint").exists()

    def result(self, folder: Path) -> Any:
        solution = Solution.load(folder / "solution.npz")
        records = {name: {key: column.tobytes() for key, column in record.items()}
                   for name, record in solution.records.items()}  # fmt: skip
        arrays = [array.tobytes() for array in (solution.t, np.asarray(solution.u), solution.energy)]
        return arrays, records, solution.message, solution.stats["steps"]

    def finished(self, folder: Path) -> dict[str, Any]:
        path = folder / "checkpoint"
        found = {}
        for place in (path, previous(path)):
            if place.exists():
                found["steps"] = load_archive(place, "checkpoint")[1]["steps"]
                break
        return found


class Study(Victim):
    """A study from the command line; what is done are its cases."""

    name = "study"
    options = ("--nodes", "10,11,12,13,14,15", "--integrator", "euler,semi-implicit", "--fidelity", "0.5",
               "--dt", "0.4,0.2,0.1,0.05", "--boundary", "reflect", "--metric", "degree")  # fmt: skip

    def __init__(self, *more: str) -> None:
        self.more = more

    def command(self, folder: Path) -> list[str]:
        return [*CLI, "study", "time-order", "--out", str(folder / "out"), "--quiet", *self.options, *self.more]

    def begun(self, folder: Path) -> bool:
        return (folder / "out" / "study.json").exists()

    def result(self, folder: Path) -> Any:
        found = json.loads((folder / "out" / "result.json").read_text())
        return found["rows"], found["fits"], (folder / "out" / "table.csv").read_bytes()

    def finished(self, folder: Path) -> dict[str, Any]:
        done = {}
        for path in sorted((folder / "out" / "cases").glob("*.json")):
            load_record(path, "case of a study")
            done[path.name] = path.stat().st_ino
        return done


class FolderRun(Victim):
    """A folder of pictures that is denoised."""

    name = "folder of images"
    count, side = 10, 96

    def prepare(self, folder: Path) -> None:
        from PIL import Image

        (folder / "in").mkdir()
        rng = np.random.default_rng(3)
        y, x = np.mgrid[: self.side, : self.side]
        for number in range(self.count):
            clean = 128 + 80 * np.sin(x / (4 + number)) * np.cos(y / 9)
            noisy = np.clip(np.rint(clean + rng.normal(0, 20, clean.shape)), 0, 255).astype(np.uint8)
            Image.fromarray(noisy).save(folder / "in" / f"{number:02}.png")

    def command(self, folder: Path) -> list[str]:
        return [*CLI, "denoise", str(folder / "in"), str(folder / "out"), "--existing", "resume", "--sigma", "20",
                "--quality", "fast", "--quiet"]  # fmt: skip

    def begun(self, folder: Path) -> bool:
        return (folder / "out" / ".nlflow").exists()

    def result(self, folder: Path) -> Any:
        found = {path.name: path.read_bytes() for path in sorted((folder / "out").glob("*.png"))}
        if len(found) != self.count:
            raise FileFormatError(f"{len(found)} of {self.count} outputs are there")
        return found

    def finished(self, folder: Path) -> dict[str, Any]:
        done = {}
        for path in sorted((folder / "out" / ".nlflow").glob("*.png.json")):
            if load_record(path, "output of a folder")["outputs"] is not None:
                target = folder / "out" / path.name.removesuffix(".json")
                done[path.name] = target.stat().st_ino
        return done


class Training(Victim):
    """The training of a small network, with a state after every step."""

    name = "training"

    def command(self, folder: Path) -> list[str]:
        return [sys.executable, "-m", "validation.robustness.faults.training", str(folder)]

    def begun(self, folder: Path) -> bool:
        return (folder / "out" / "state.npz").exists() or (folder / "out" / "weights.safetensors").exists()

    def result(self, folder: Path) -> Any:
        record = load_record(folder / "out" / "record.json", "record of a training")
        return record["epochs"], record["finished"], (folder / "out" / "weights.safetensors").read_bytes()

    def finished(self, folder: Path) -> dict[str, Any]:
        out = folder / "out"
        for place in (out / "state.npz", previous(out / "state.npz")):
            if place.exists():
                return {"steps": load_archive(place, "state of a training")[1]["run"]["step"]}
        if (out / "record.json").exists():
            return {"steps": load_record(out / "record.json", "record of a training")["step"]}
        return {}


class Claims(Victim):
    """Claims of the theory as programs; what is done are those that have been found."""

    name = "validation"
    claims = ("frechet-derivative", "limit-of-averages", "proposition-1", "law-of-the-walk", "energy-balance",
              "constant-limits")  # fmt: skip

    def command(self, folder: Path) -> list[str]:
        return [*CLI, "validate", *self.claims, "--quick", "--resume", "--out", str(folder / "out"), "--quiet"]

    def begun(self, folder: Path) -> bool:
        return (folder / "out" / "claims").exists()

    def result(self, folder: Path) -> Any:
        found = json.loads((folder / "out" / "results.json").read_text())
        report = (folder / "out" / "report.html").exists()
        untimed = [{name: value for name, value in claim.items() if name != "seconds"} for claim in found["claims"]]
        return found["passed"], found["complete"], report, untimed

    def finished(self, folder: Path) -> dict[str, Any]:
        done = {}
        for path in sorted((folder / "out" / "claims").glob("*.json")):
            load_record(path, "finding of a claim")
            done[path.name] = path.stat().st_ino
        return done


FLOWS = tuple(Flow(kind) for kind in flow.KINDS)
