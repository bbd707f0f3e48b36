"""All faults, one after the other."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

from nlflow.studies.cases import Case
from validation.robustness.faults.calls import possible
from validation.robustness.faults.disks import full_disk, mountable, read_only, sizes_for
from validation.robustness.faults.kills import killed, killed_at_calls
from validation.robustness.faults.others import clock_back, dead_workers, second_writer
from validation.robustness.faults.outputs import OUTPUTS
from validation.robustness.faults.page import closed_sessions, hostile_requests
from validation.robustness.faults.soak import endured
from validation.robustness.faults.surroundings import LIMITS, limited, met, surrounded
from validation.robustness.faults.victims import FLOWS, Claims, FolderRun, Study, Training

__all__ = ["guests", "trials"]


def trials(kills: int, seed: int, folder: Path) -> Iterator[Case]:
    """Yield all faults.

    Parameters
    ----------
    kills : int
        By SIGKILL, over flows, studies and folders; 0.4 times as many of each output at calls that write; a tenth as
        many of trainings, of validation and of worker processes, and by SIGINT and by SIGTERM a quarter of a flow, a
        study and a folder, a thirtieth of the others.
    seed : int
    folder : Path
        For their files, which are removed.
    """
    study, images, training, claims = Study(), FolderRun(), Training(), Claims()
    representative = (FLOWS[1], study, images)
    few, some = max(1, kills // 30), max(1, kills // 10)
    # Flows and folders are quick to begin with, studies are not.
    shares = {FLOWS[0]: 0.2, FLOWS[1]: 0.25, FLOWS[2]: 0.1, study: 0.2, images: 0.25}
    struck = [(signal.SIGKILL, victim, max(1, round(share * kills))) for victim, share in shares.items()]
    struck += [(signal.SIGKILL, victim, some) for victim in (training, claims)]
    # Where nothing may be raised, in callbacks of compiled code, only one signal in some ten arrives.
    for number in (signal.SIGINT, signal.SIGTERM):
        struck += [(number, victim, max(1, kills // 4)) for victim in representative]
        struck += [(number, victim, few) for victim in (training, claims)]
    for number, victim, times in struck:
        what = f"{number.name}, {victim.name}, {times} times, seed {seed}"
        yield Case(what, killed, (victim, number, times, folder / "kill", seed))
    if possible():
        for name in OUTPUTS:
            most = max(1, round(0.4 * kills))
            what = f"SIGKILL at calls that write, {name}, {most} of them"
            yield Case(what, killed_at_calls, (name, most, folder / "calls"))
    for victim in representative:
        if mountable(folder):
            yield Case(f"full disk, {victim.name}", full_disk, (victim, sizes_for(victim), folder / "full"))
        yield Case(f"read-only folder, {victim.name}", read_only, (victim, folder / "read-only"))
        times = min(3, few)
        yield Case(f"second writer, {victim.name}, {times} times", second_writer, (victim, times, folder / "second"))
        yield Case(f"clock, {victim.name}", clock_back, (victim, folder / "clock"))
    for cluster in (False, True):
        what = f"workers of {'Dask' if cluster else 'joblib'}, {some} times, seed {seed}"
        yield Case(what, dead_workers, (cluster, some, folder / "workers", seed))


def guests(calls: int, folder: Path) -> Iterator[Case]:
    """Yield what guests meet and bring: other surroundings, limits, strangers at the page, and many calls."""
    for name in met():
        yield Case(f"program in surroundings: {name}", surrounded, (name, folder / "surroundings"))
    for limit in LIMITS:
        yield Case(f"command under ulimit -{limit}", limited, (limit, folder / "limits"))
    yield Case("strangers at the page", hostile_requests, (folder / "page",))
    yield Case("50 closed sessions of the page", closed_sessions, (50, folder / "page"))
    yield Case(f"{calls} calls in one process", endured, (calls, folder / "soak"))
