"""A process that has what Windows has: ``python tests/elsewhere.py FOLDER`` does the main jobs there, without POSIX.

Calls, signals and modules that Windows lacks are taken away before nlflow is imported, and files behave as they do
there: what is open cannot be replaced or removed, no folder can be opened, and what is open for reading alone cannot
be flushed. ``--as-it-is`` takes nothing away, ``--one`` does one job alone.
"""

from __future__ import annotations

import builtins
import errno
import fcntl
import io
import os
import shutil
import signal
import sys
import tempfile
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

CALLS = (
    *("fork", "forkpty", "getuid", "geteuid", "getgid", "getpgid", "killpg", "setsid", "nice", "sync", "sysconf"),
    *("sched_getaffinity", "sched_setaffinity", "posix_fallocate", "posix_fadvise", "fchmod", "chown", "mkfifo"),
    *("uname", "getloadavg", "openpty", "wait3", "wait4", "pread", "pwrite", "ctermid", "getpriority"),
)
SIGNALS = (
    *("SIGKILL", "SIGHUP", "SIGPIPE", "SIGUSR1", "SIGUSR2", "SIGALRM", "SIGCHLD", "SIGSTOP", "SIGCONT", "SIGQUIT"),
    *("pthread_kill", "alarm", "setitimer", "sigwait", "sigpending", "pause"),
)
MODULES = ("fcntl", "resource", "pwd", "grp", "termios", "tty", "pty", "posix", "syslog", "readline")
PLACES = ("/proc", "/dev", "/sys", "/tmp", "/etc")


def refused(*paths: Any) -> PermissionError:
    return PermissionError(
        errno.EACCES, "The process cannot access the file because it is being used", *map(str, paths)
    )


def asked_by_nlflow() -> bool:
    """Whether nlflow opens a file; other packages have halves of their own for Windows."""
    frame: Any = sys._getframe(2)
    while frame.f_globals.get("__name__", "").startswith("pathlib"):
        frame = frame.f_back
    return str(frame.f_globals.get("__name__", "")).startswith("nlflow")


def take_away(home: Path) -> None:
    """Take away what Windows lacks; `home` is where this process may work."""
    # These have their own halves for Windows, which is not what is tested.
    import multiprocessing.popen_spawn_posix
    import multiprocessing.resource_tracker
    import subprocess  # noqa: F401

    import joblib  # noqa: F401
    import matplotlib  # noqa: F401
    import numba  # noqa: F401

    listed, link_of, plain_open, control = os.listdir, os.readlink, io.open, fcntl.fcntl

    def held(path: Any) -> bool:
        """Whether a file, or one in this folder, is open in this process or mapped into it."""
        place = os.path.realpath(path)
        with plain_open("/proc/self/maps", encoding="utf-8") as maps:
            names = [line.split(maxsplit=5)[-1].strip() for line in maps]
        for number in listed("/proc/self/fd"):
            try:
                names.append(link_of(f"/proc/self/fd/{number}"))
            except OSError:  # that of the list
                continue
        return any(name == place or name.startswith(place + os.sep) for name in names)

    def guarded(name: str, count: int) -> None:
        before: Callable[..., Any] = getattr(os, name)

        def call(*paths: Any, **options: Any) -> Any:
            if any(held(path) for path in paths[:count]):
                raise refused(*paths[:count])
            return before(*paths, **options)

        setattr(os, name, call)

    for name, count in (("replace", 2), ("rename", 2), ("unlink", 1), ("remove", 1), ("rmdir", 1)):
        guarded(name, count)
    shutil._use_fd_functions = False  # type: ignore[attr-defined]  # which remove by the descriptors of folders

    flush, opened = os.fsync, os.open

    def fsync(number: int) -> None:
        if control(number, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EBADF, "Bad file descriptor")
        flush(number)

    def open_number(path: Any, flags: int, *options: Any, **more: Any) -> int:
        unnamed = flags & os.O_TMPFILE == os.O_TMPFILE  # of tempfile, which does otherwise on Windows
        if isinstance(path, str | os.PathLike) and Path(path).is_dir() and not unnamed:
            raise refused(path)
        return opened(path, flags, *options, **more)

    os.fsync, os.open = fsync, open_number  # type: ignore[assignment]

    def open_file(file: Any, *options: Any, **more: Any) -> Any:
        if asked_by_nlflow() and isinstance(file, str | os.PathLike):
            path = Path(file)
            if any(path.is_relative_to(place) for place in PLACES) and not path.is_relative_to(home):
                raise FileNotFoundError(errno.ENOENT, "no such place on Windows", str(file))
        return plain_open(file, *options, **more)

    builtins.open = io.open = open_file  # type: ignore[assignment]
    for module, names in ((os, CALLS), (signal, SIGNALS)):
        for name in names:
            if hasattr(module, name):
                delattr(module, name)
    for name in MODULES:
        sys.modules[name] = None  # type: ignore[assignment]
    sys.modules["msvcrt"] = types.ModuleType("msvcrt")

    def locking(number: int, mode: int, count: int) -> None:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)

    vars(sys.modules["msvcrt"]).update(locking=locking, LK_NBLCK=2)
    multiprocessing.set_start_method("spawn")


def jobs(folder: Path, one: bool) -> None:
    """Denoise files by the command, run a flow whose frames are kept, work in parts and in processes."""
    import numpy as np

    import nlflow as nl
    from nlflow.desk.commands.main import main

    def command(*words: str) -> None:
        sys.argv[:] = ["nonlocal", *words]
        try:
            main()
        except SystemExit as end:
            if end.code:
                raise RuntimeError(f"{words}: {end.code}") from end

    rng = np.random.default_rng(0)
    ramp = np.add.outer(np.arange(48.0), 2 * np.arange(40.0))
    noisy = ramp + rng.normal(0, 10, ramp.shape)
    for number in range(2):
        np.save(folder / f"in{number}.npy", noisy + number)
    command("denoise", str(folder / "in0.npy"), str(folder / "out.npy"), "--sigma", "10", "--quiet")
    if one:
        return
    told = ("--sigma", "10", "--quiet")
    command("denoise", str(folder / "in1.npy"), str(folder / "out.npy"), *told, "--existing", "overwrite")
    photos = folder / "photos"
    photos.mkdir()
    shutil.copyfile(folder / "in0.npy", photos / "a.npy")
    for how in ("refuse", "resume", "overwrite"):
        command("denoise", str(photos), str(folder / "denoised"), *told, "--existing", how)
    command("info")

    np.save(folder / "strips.npy", nl.denoise(noisy, 10.0, max_memory=2_000_000))

    flow = nl.GradientFlow(nl.J(nl.affinity(nl.Gaussian(width=2.0), nl.Grid(ramp.shape))), metric="degree")
    forms = [name for name, module in (("h5", "h5py"), ("zarr", "zarr"), ("pvd", "xml")) if installed(module)]

    def stop(t: float, u: Any, flow: Any) -> None:
        if t >= 1:
            raise KeyboardInterrupt

    def run(*more: nl.Callback, resume: bool) -> nl.Solution:
        kept = [nl.Frames(folder / f"run.{form}", interval=0.5) for form in forms]
        trackers = [*kept, nl.Film(folder / "run.gif", interval=0.5, size=(160, 120)), nl.Energy(),
                    nl.Checkpoint(folder / "run.checkpoint", every=2), *more]  # fmt: skip
        return nl.solve(flow, noisy, t=2.0, integrator=nl.SemiImplicit(0.25), trackers=trackers, resume=resume)

    run(nl.Callback(stop), resume=False)
    solution = run(resume=True)
    solution.save(folder / "run.npz")
    np.save(folder / "flow.npy", nl.Solution.load(folder / "run.npz").final)
    cases = ("--nodes", "16", "--dt", "0.2,0.1,0.05", "--jobs", "2", "--quiet")
    command("study", "time-order", *cases, "--out", str(folder / "study"))


def installed(module: str) -> bool:
    from importlib.util import find_spec

    return find_spec(module) is not None


if __name__ == "__main__":
    place, as_it_is = Path(sys.argv[1]).resolve(), "--as-it-is" in sys.argv
    tempfile.tempdir = str(place)
    if not as_it_is:
        take_away(place)
    jobs(place, "--one" in sys.argv)
