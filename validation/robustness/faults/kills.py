"""Kills and signals at random times, again and again until the program has finished in spite of them."""

from __future__ import annotations

import json
import shutil
import signal
import sys
import time
from pathlib import Path

import numpy as np

from validation.robustness.contract import Row
from validation.robustness.faults.processes import (
    LIMIT,
    Ended,
    Running,
    Tally,
    differs,
    prepared,
    problem_left,
    run,
    tell_tale,
)
from validation.robustness.faults.victims import Victim

__all__ = ["killed", "killed_at_calls"]

SAME = "resumed to the same bits"


def killed_at_calls(name: str, most: int, folder: Path) -> Row:
    """Kill what writes an output at each of its calls that write, or at so many spread over them; see `strike`."""
    folder.mkdir(parents=True)
    began = time.monotonic()
    # Children of a forked process find compiled loops in its memory, if they are run by Numba's own threads.
    command = [sys.executable, "-m", "validation.robustness.faults.outputs", name, str(most), str(folder)]
    ended = Running(command, {"NUMBA_THREADING_LAYER": "workqueue", "NUMBA_NUM_THREADS": "1"}).end(LIMIT * most)
    shutil.rmtree(folder)
    if ended.code:
        raise RuntimeError(f"{name}: {ended.text[-600:]}")
    title, outcomes, lost, wrong, count = json.loads(ended.text.splitlines()[-1])
    tried = sum(outcomes.values()) + len(wrong)
    details = {"lost": lost, "wrong": wrong, "calls that write": count}
    fault = f"SIGKILL at a call that writes: {title}"
    return Row(fault, tried, outcomes, len(lost), len(wrong), time.monotonic() - began, details)


def killed(
    victim: Victim,
    number: signal.Signals,
    times: int,
    folder: Path,
    seed: int,
) -> Row:
    """Send a signal to a victim at random times, and let it go on each time, until so many have struck.

    Parameters
    ----------
    victim : Victim
    number : Signals
        SIGKILL, which nobody sees coming, or SIGINT and SIGTERM, at which a program may keep what it has.
    times : int
        Signals that reach a program at work.
    folder : Path
        For its files; made and removed.
    seed : int
        Of the times.

    Returns
    -------
    Row
        Every chain of calls ends with the result of an undisturbed run, bit by bit, and after each signal all that was
        done before is there, whole and not done again.
    """
    tally = Tally(f"{number.name} at random times: {victim.name}", folder)
    rng = np.random.default_rng((seed, number, *victim.name.encode()))
    quiet = prepared(victim, folder / "undisturbed")
    running = Running(victim.command(quiet))
    running.wait_until(lambda: victim.begun(quiet))
    start = time.monotonic()
    ended = running.end()
    length = time.monotonic() - start
    trouble = tell_tale(ended, (0,))
    if trouble is not None:
        raise RuntimeError(f"{victim.name}: the undisturbed run failed: {trouble}")
    expected = victim.result(quiet)
    struck, chain = 0, 0
    while struck < times:
        place = prepared(victim, folder / f"{chain}")
        chain += 1
        if chain > 20 + 10 * times:
            raise RuntimeError(f"{victim.name}: {number.name} has no effect: {struck} of {chain} calls were struck")
        hits, bad = 0, False
        while struck + hits < times:
            before = victim.finished(place) if victim.begun(place) else {}
            running = Running(victim.command(place))
            running.wait_until(lambda place=place: victim.begun(place))
            start = time.monotonic()
            hit = not running.ended_within(rng.uniform(0, length)) and running.signal(number)
            ended = running.end()
            if not hit:  # it was faster than the undisturbed run, or had less left to do
                length = max(0.05, min(length, time.monotonic() - start))
            if number is signal.SIGINT and ended.text.rstrip().endswith("KeyboardInterrupt"):
                ended = Ended(-2, "")  # while Python was still importing, which is nobody's to answer
            # -15 before a program answers; -2 where it was still importing.
            allowed = {signal.SIGKILL: (-9,), signal.SIGINT: (130, -2), signal.SIGTERM: (143, -15)}[number]
            trouble = tell_tale(ended, (*allowed, 0) if hit else (0,))
            if not tally.note(trouble):
                bad = True
                hits += hit
                break
            tally.note(None, problem_left(victim, place, before))
            if not hit or ended.code == 0:
                break
            hits += 1
        ended = run(victim, place)
        trouble = tell_tale(ended, (0,))
        trouble = trouble or differs(victim, place, expected)
        good = not bad and tally.note(trouble)
        tally.outcomes[SAME if good else "not resumed"] += hits
        struck += hits
        shutil.rmtree(place)
    return tally.row(struck, **{"undisturbed, seconds at work": round(length, 3), "chains of calls": chain})
