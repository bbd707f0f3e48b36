"""All faults, one after the other."""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from robustness.contract import Row
from robustness.faults.disks import full_disk, mountable, read_only, sizes_for
from robustness.faults.kills import killed
from robustness.faults.others import clock_back, dead_workers, second_writer
from robustness.faults.victims import FLOWS, FolderRun, Study

__all__ = ["campaign"]


def campaign(kills: int, seed: int, tell: Callable[[Row], None] = lambda row: None) -> list[Row]:
    """Return what came of all faults.

    Parameters
    ----------
    kills : int
        By SIGKILL, over all programs; a tenth as many by SIGINT and by SIGTERM, and of worker processes.
    seed : int
    tell : callable
        Gets each row as soon as it is known.
    """
    rows = []
    with tempfile.TemporaryDirectory(prefix="nlflow-robustness-") as name:
        for row in _rows(Path(name), kills, seed):
            rows.append(row)
            tell(row)
    return rows


def _rows(folder: Path, kills: int, seed: int) -> Iterator[Row]:
    everything = (*FLOWS, Study(), FolderRun())
    representative = (FLOWS[1], Study(), FolderRun())
    # Flows and folders are quick to begin with, studies are not.
    shares = {FLOWS[0]: 0.2, FLOWS[1]: 0.25, FLOWS[2]: 0.1, everything[3]: 0.2, everything[4]: 0.25}
    for victim, share in shares.items():
        yield killed(victim, signal.SIGKILL, max(1, round(share * kills)), folder / "kill", seed)
    few = max(1, kills // 30)
    for number in (signal.SIGINT, signal.SIGTERM):
        for victim in representative:
            yield killed(victim, number, few, folder / "signal", seed)
    if mountable(folder):
        for victim in representative:
            yield full_disk(victim, sizes_for(victim), folder / "full")
    for victim in representative:
        yield read_only(victim, folder / "read-only")
        yield second_writer(victim, min(3, few), folder / "second")
        yield clock_back(victim, folder / "clock")
    for cluster in (False, True):
        yield dead_workers(cluster, max(1, kills // 10), folder / "workers", seed)
