"""Run pytest, or claims, in children of a process that has imported all large packages but not the one that is tested.

A program of its own: its arguments are those packages, its folder is the private copy, and it reads one request a line
and answers in lines of JSON. The process computes nothing, so that no pool of threads has been started when it forks.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import resource
import sys
import tempfile
from pathlib import Path
from typing import Any, TextIO

import pytest

OPTIONS = ("-x", "-q", "-n", "0", "--no-cov", "-m", "not slow", "-p", "no:cacheprovider", "--tb=short")


class Chosen:
    """A plugin: the chosen tests in their order, as many as the seconds suffice for, and a word about each.

    Parameters
    ----------
    seconds : dict
        Of each test, the first to be run first; without any, all tests that are collected.
    most : float
        Seconds for all.
    without : list of str
        Tests that are left out.
    channel : text file
    """

    def __init__(self, seconds: dict[str, float], most: float, without: list[str], channel: TextIO) -> None:
        self.seconds, self.most, self.without, self.channel = seconds, most, set(without), channel

    def tell(self, **words: Any) -> None:
        """Write an answer."""
        self.channel.write(json.dumps(words) + "\n")
        self.channel.flush()

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if self.seconds:
            place = {name: index for index, name in enumerate(self.seconds)}
            items[:] = sorted((item for item in items if item.nodeid in place), key=lambda item: place[item.nodeid])
        items[:] = [item for item in items if item.nodeid not in self.without]
        kept: list[pytest.Item] = []
        left = self.most
        for item in items:
            left -= self.seconds.get(item.nodeid, 0.0)
            if left > 0 or not kept:
                kept.append(item)
        self.tell(selected=len(items))
        items[:] = kept

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.tell(start=nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.tell(failed=report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.tell(failed=report.nodeid)


def main() -> None:
    """Answer requests: ``{"module": name}`` imports one, ``{"files", "seconds", "most", "without"}`` runs tests.

    ``{"claims": names}`` runs claims in their quick form until one does not pass.
    """
    channel = os.fdopen(os.dup(1), "w")
    requests = os.fdopen(os.dup(0))
    log = os.open("server.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.path[0] = str(Path.cwd())  # as with `python -m pytest`
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_DATA, (memory, resource.getrlimit(resource.RLIMIT_DATA)[1]))
    for name in sys.argv[1:]:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    pytest.main([*OPTIONS, tempfile.gettempdir()])  # without a test, for its plugins
    # Of two mutants of one size within a second the first would be read again, here and in subprocesses.
    sys.dont_write_bytecode = True
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    gc.freeze()  # or each child would look through all that was imported
    channel.write(json.dumps({"ready": True}) + "\n")
    channel.flush()
    for line in requests:
        process = os.fork()
        if process == 0:
            os.setsid()
            os._exit(_answer(json.loads(line), channel))
        channel.write(json.dumps({"process": process}) + "\n")
        channel.flush()
        ended = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        channel.write(json.dumps({"ended": ended}) + "\n")
        channel.flush()


def _answer(request: dict[str, Any], channel: TextIO) -> int:
    """Do what is asked for and return the exit status."""
    try:
        if "module" in request:
            importlib.import_module(request["module"])
            return 0
        if "claims" in request:
            return _claims(request["claims"], channel)
        plugin = Chosen(request["seconds"], request["most"], request["without"], channel)
        return int(pytest.main([*OPTIONS, *request["files"]], plugins=[plugin]))
    except BaseException as error:
        print(repr(error), flush=True)
        return 1


def _claims(names: list[str], channel: TextIO) -> int:
    """Run claims until one does not pass."""
    from validation.harness import Context  # of the private copy, with the change
    from validation.runner import run_one

    for name in names:
        channel.write(json.dumps({"start": name}) + "\n")
        channel.flush()
        claim = importlib.import_module(f"validation.claims.{name.replace('-', '_')}").CLAIM
        finding = run_one(claim, Context(quick=True))
        if finding.status in ("fail", "error"):
            print(finding.line, flush=True)
            channel.write(json.dumps({"failed": name}) + "\n")
            channel.flush()
            return 1
    return 0


if __name__ == "__main__":
    main()
