"""Records of what was done, which later runs go by: of outputs, of blocks, of claims, of trainings.

What a checksum proves is that a record is as some program wrote it, not that this package did.
"""

from __future__ import annotations

import json
import math
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from validation.robustness.fuzz.watch import require

__all__ = ["record", "records"]

_BLOCKS = "0" * 64  # the problem of an image in blocks
_SETTINGS = {"variant": "neutreno", "seed": 0}


def _job(folder: Path) -> Any:
    """Return the ledger of a folder with one output, and its job."""
    from nlflow.desk.commands.denoise_folder import Ledger
    from nlflow.desk.commands.jobs import Job

    source, target = folder / "in.png", folder / "out" / "in.png"
    target.parent.mkdir(parents=True, exist_ok=True)
    for path in (source, target):
        path.write_bytes(b"as it was")
    return Ledger(target.parent, {"sigma": 20.0}), Job(source, target, None, {})


def record(folder: Path) -> Callable[[bytes], object]:
    """Return a reader of records, by the kind that is written in them."""
    from nlflow.desk.large import _RECORD, _done_before
    from nlflow.errors import FileFormatError, NlflowWarning
    from nlflow.store.storage import load_record
    from validation.claims import all_claims
    from validation.finding import Finding, findings_in
    from validation.runner import _write
    from validation.training.record import read_record
    from validation.training.report import summarize, table

    ledger, job = _job(folder)
    ledger.begin(job)
    ledger.finish(job)
    known = load_record(ledger._path(job), "output of a folder")
    claim = all_claims()[0]
    claims = findings_in(folder, [claim], True)
    claims.folder.mkdir()
    known_training = _training(folder, {**_SETTINGS, "variant": "softmax"}, diverged=False)
    blocks = folder / "blocks"
    blocks.mkdir()

    def output(data: bytes) -> None:
        ledger._path(job).write_bytes(data)
        if ledger.settled(job):
            require(load_record(ledger._path(job), "output of a folder") == known, "other outputs, taken for these")

    def image(data: bytes) -> None:
        (blocks / _RECORD).write_bytes(data)
        done = _done_before(blocks, _BLOCKS, (2, 2))
        places = [tuple(map(int, name.split("/"))) for name in done]
        require(all(len(place) == 2 and max(place) < 2 for place in places), "a block that the image does not have")
        require(all(isinstance(known, str) for known in done.values()), "a digest that is no text")

    def finding(data: bytes) -> None:
        claims.path(claim.name).write_bytes(data)
        with warnings.catch_warnings():
            warnings.simplefilter("error", NlflowWarning)
            try:
                known_finding = claims.read(claim.name)
            except NlflowWarning as warning:
                raise FileFormatError(str(warning)) from None
        if known_finding is None:
            return
        found = Finding.from_plain(claim, known_finding)
        require(found.outcome is not None and found.outcome.passed == (found.status == "pass"), "a wrong status")
        _write(folder, [found], 1, True)
        require(isinstance(found.line, str), "a line that is no text")

    def training(data: bytes) -> None:
        path = folder / "record.json"
        path.write_bytes(data)
        found = read_record(path, "mean_iou")
        if found["settings"] != _SETTINGS:  # which a training compares with its own before it goes on
            raise FileFormatError("other settings")
        require(isinstance(table(summarize([known_training, found], "mean_iou")), str), "a table that is no text")

    readers = {"output of a folder": output, "blocks of an image": image, "finding of a claim": finding}

    def read(data: bytes) -> None:
        try:
            kind = json.loads(data)["kind"]
            reader = readers.get(kind, training)
        except (ValueError, LookupError, TypeError, RecursionError):
            reader = training
        reader(data)

    return read


def records() -> list[bytes]:
    """Return a record of each kind."""
    from nlflow.desk.large import _KIND
    from nlflow.store.storage import save_record
    from validation.claims import all_claims
    from validation.finding import Finding, findings_in
    from validation.harness import Check, Outcome

    found = []
    with tempfile.TemporaryDirectory() as base:
        folder = Path(base)
        path = folder / "record.json"
        ledger, job = _job(folder)
        ledger.begin(job)
        found.append(ledger._path(job).read_bytes())
        ledger.finish(job)
        found.append(ledger._path(job).read_bytes())
        save_record(path, _KIND, {"problem": _BLOCKS, "done": {"0/0": "1" * 64, "1/1": "2" * 64}})
        found.append(path.read_bytes())
        claim = all_claims()[0]
        claims = findings_in(folder, [claim], True)
        checks = [Check("a figure", 1e-16, 1e-13), Check("an order", 2.01, 0.05, expected=2.0)]
        for status, outcome in (("pass", Outcome(checks, {}, {"orders": [1.9, None]})), ("error", None)):
            claims.write(claim.name, Finding(claim, status, outcome, "", 1.5, {"a picture": b"\x89PNG"}).as_plain())
            found.append(claims.path(claim.name).read_bytes())
        for diverged in (False, True):
            _training(folder, _SETTINGS, diverged=diverged)
            found.append(path.read_bytes())
    return found


def _training(folder: Path, settings: dict[str, Any], *, diverged: bool) -> dict[str, Any]:
    """Write the record of a training of two epochs, and return it."""
    from validation.training.record import write_record

    layers = {"cosine": [0.5, 0.9], "t_sim": [0.4, 0.8], "J": [1.0, 0.1]}
    epoch = {"epoch": 0.0, "step": 0, "training_loss": None, "diverged": False, "whole": False, "mean_iou": 0.1}
    last = {**epoch, "epoch": 1.0, "step": 9, "training_loss": 0.5, "whole": True, "mean_iou": 0.4, "layers": layers}
    lost = {**last, "diverged": True, "mean_iou": math.nan, "layers": {}}
    epochs = [{**epoch, "layers": layers}, lost if diverged else last]
    return write_record(folder, settings, {"step": 9, "seconds": 2.0, "epochs": epochs}, True)
