"""A second writer, a clock that goes back, and workers that die."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np
import psutil

from nlflow.store.atomic import hold
from validation.robustness.contract import Row
from validation.robustness.faults.processes import (
    LIMIT,
    Running,
    Tally,
    differs,
    prepared,
    problem_left,
    run,
    tell_tale,
    undisturbed,
)
from validation.robustness.faults.victims import Study, Victim

__all__ = ["clock_back", "dead_workers", "second_writer"]

_BACK = """
import runpy, sys, time
real, start = time.time, time.time()
# Once at work, every look at the clock is ten minutes earlier than the one before.
looks = iter(range(10**9))
time.time = lambda: start - 600.0 * next(looks)
time.time_ns = lambda: int(time.time() * 1e9)
sys.argv = sys.argv[1:]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


def second_writer(victim: Victim, times: int, folder: Path) -> Row:
    """Call a victim a second time on the same folder while it is at work.

    The second is to be refused with the reason, and the first to end with the result of an undisturbed run.
    """
    tally = Tally(f"two processes, one folder: {victim.name}", folder)
    expected = undisturbed(victim, folder / "undisturbed")
    tried = calls = 0
    while tried < times:
        place = prepared(victim, folder / f"{calls}")
        if calls == 20 + 10 * times:
            raise RuntimeError(f"{victim.name}: no writer is met at work: {tried} of {calls} were")
        calls += 1
        first = Running(victim.command(place))
        if not _stopped_at_work(first, partial(victim.begun, place), place):
            first.end()
            continue
        tried += 1
        second = run(victim, place)
        first.signal(signal.SIGCONT)
        ended = first.end()
        trouble = tell_tale(second, (1,)) or tell_tale(ended, (0,))
        if trouble is None and "another process is writing" not in second.text:
            trouble = f"the second does not say why it ends: {second.text[-300:]}"
        trouble = trouble or differs(victim, place, expected)
        tally.outcomes["the second is refused, the first ends well"] += tally.note(trouble)
    return tally.row(times)


def _stopped_at_work(running: Running, begun: Callable[[], bool], place: Path) -> bool:
    """Stop a process while it keeps a place to itself, and return whether it was met there before its end."""
    deadline = time.monotonic() + LIMIT
    while time.monotonic() < deadline and running.wait_until(begun) and running.signal(signal.SIGSTOP):
        # It may not have its lock yet, or no longer. Only at a process that stands still may one look, since the look
        # takes the lock for a moment.
        try:
            seen = os.waitid(os.P_PID, running.process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        except ChildProcessError:  # it ended, and the signal found that out
            return False
        if seen is None or seen.si_code != os.CLD_STOPPED:
            return False
        if _kept(place):
            return True
        running.signal(signal.SIGCONT)
        time.sleep(0.001)
    return False


def _kept(place: Path) -> bool:
    """Return whether a process holds a lock there."""
    for path in place.rglob(".nlflow-*.lock"):
        with suppress(FileNotFoundError):
            descriptor = hold(path, make=False)
            if descriptor is None:
                return True
            os.close(descriptor)
    return False


def clock_back(victim: Victim, folder: Path) -> Row:
    """Kill a victim, date its files into the future or the past, and let it go on by a clock that runs backwards."""
    years = (1980, 2100)
    tally = Tally(f"files of {years[0]} and {years[1]}, clock backwards: {victim.name}", folder)
    expected = undisturbed(victim, folder / "undisturbed")
    for year in years:
        place = prepared(victim, folder / f"{year}")
        command = victim.command(place)
        backwards = [sys.executable, "-c", _BACK, *command[command.index("-m") + 1 :]]
        running = Running(backwards)
        running.wait_until(lambda place=place: victim.begun(place))
        time.sleep(0.2)
        running.signal(signal.SIGKILL)
        running.end()
        then = (year - 1970) * 365.25 * 86400
        for path in (path for path in place.rglob("*") if path.is_file() and not path.is_symlink()):
            os.utime(path, (then, then))
        before = victim.finished(place)
        ended = Running(backwards).end()
        trouble = tell_tale(ended, (0,))
        trouble = trouble or differs(victim, place, expected)
        gone = problem_left(victim, place, before) if trouble is None else None
        tally.outcomes["resumed to the same bits"] += tally.note(trouble, gone, f"{year}")
    return tally.row(len(years))


def dead_workers(cluster: bool, times: int, folder: Path, seed: int) -> Row:
    """Kill worker processes of a study at random times: of joblib's pool, or of a cluster of Dask.

    The study is to end with the result of an undisturbed run all the same; or, when workers keep dying, with the reason
    and all cases that were done, from which it then goes on.
    """
    pool = "Dask cluster" if cluster else "joblib pool"
    tally = Tally(f"SIGKILL of a worker at random times, {pool}: study", folder)
    more = ("--jobs", "2", *(("--scheduler", "local") if cluster else ()))
    victim = Study(*more)
    expected = undisturbed(Study(), folder / "undisturbed")
    rng = np.random.default_rng((seed, cluster))
    killed, number = 0, 0
    while killed < times:
        place = prepared(victim, folder / f"{number}")
        number += 1
        if number > 20 + 10 * times:
            raise RuntimeError(f"no workers are found: {killed} were killed in {number} studies")
        running = Running(victim.command(place))
        running.wait_until(lambda place=place: victim.begun(place))
        hits = 0
        while killed + hits < times and hits < 3:
            time.sleep(rng.uniform(0.1, 1.5))
            workers = _workers(running.process.pid)
            if running.process.poll() is not None:
                break
            if workers:
                os.kill(int(rng.choice(workers)), signal.SIGKILL)
                hits += 1
        ended = running.end()
        before = victim.finished(place)
        # Dask writes of lost connections in its own words: what it logs is no failure of the study.
        trouble = None if ended.code in (0, 1) else tell_tale(ended, (0, 1))
        if trouble is None and ended.code == 1 and "deaths of worker processes" not in ended.text:
            trouble = f"it does not say why it ends: {ended.text[-600:]}"
        if trouble is None and ended.code == 1:
            trouble = tell_tale(run(Study(), place), (0,))
        trouble = trouble or differs(victim, place, expected)
        gone = problem_left(victim, place, before) if trouble is None else None
        tally.note(trouble, gone)
        if trouble is None:
            resumed = "ended with the reason, resumed to the same bits"
            tally.outcomes[resumed if ended.code else "ended with the same bits"] += hits
        killed += hits
    return tally.row(killed, studies=number)


def _workers(pid: int) -> list[int]:
    """Return the processes below another that compute: not resource trackers, nor those that watch over workers."""
    try:
        children = psutil.Process(pid).children(recursive=True)
    except psutil.Error:
        return []
    found = []
    for child in children:
        try:
            line = " ".join(child.cmdline())
        except psutil.Error:
            continue
        if ("loky" in line or "spawn_main" in line) and "resource_tracker" not in line:
            found.append(child.pid)
    return found
