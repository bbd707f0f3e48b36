"""The command `nonlocal` as a process: its start, its exit codes and what Ctrl-C leaves behind."""

from __future__ import annotations

import os
import re
import runpy
import select
import shlex
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from PIL import Image

from nlflow.backends.numba import loading
from nlflow.denoising.runs import telling
from nlflow.desk import terminal
from nlflow.desk.commands.main import main


def process(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize(
    "start",
    [
        "from nlflow.desk.commands.main import main; main()",
        "import runpy; runpy.run_module('nlflow', run_name='__main__')",
    ],
    ids=["nonlocal", "python -m nlflow"],
)
def test_entry_point_and_start(start: str) -> None:
    heavy = "{'numpy', 'numba', 'scipy', 'matplotlib', 'PIL', 'skimage', 'torch', 'rich'}"
    check = f"import atexit, sys; atexit.register(lambda: print(sorted({heavy} & set(sys.modules))));"
    result = process(check + start, "--help")
    assert result.returncode == 0
    assert result.stdout.startswith("Usage: nonlocal [OPTIONS]")
    assert result.stdout.endswith("[]\n")
    assert result.stderr == ""


@pytest.mark.slow
def test_interrupted_process(tmp_path: Path) -> None:
    Image.new("L", (16, 12)).save(tmp_path / "in.png")
    code = """
import os, signal, sys, time, types
def denoise(image, *args, **options):
    try:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(60)
    except KeyboardInterrupt:
        pass  # as a flow does that returns what it has reached
    return image, types.SimpleNamespace(as_dict=lambda: {"sigma": 1.0, "sigma_estimated": True, "noise": "white"})
import nlflow.denoising
nlflow.denoising.denoise = denoise
from nlflow.desk.commands.main import main
main()
"""
    result = process(code, "denoise", str(tmp_path / "in.png"), str(tmp_path / "out.png"))
    assert result.returncode == 130
    assert (result.stdout, result.stderr) == ("", "nonlocal: interrupted\n")
    assert [path.name for path in tmp_path.iterdir()] == ["in.png"]


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="signals can be sent to a process on POSIX only")
@pytest.mark.parametrize(("number", "code", "word"), [("SIGINT", 130, "interrupted"), ("SIGTERM", 143, "terminated")])
@pytest.mark.sampled(1)
def test_interrupted_in_a_callback(tmp_path: Path, number: str, code: int, word: str) -> None:
    """LLVM calls Python while a loop is loaded: what is raised there goes nowhere but to stderr."""
    Image.new("L", (16, 12)).save(tmp_path / "in.png")
    program = f"""
import ctypes, os, signal, sys, time, types
def denoise(image, *args, **options):
    callback = ctypes.CFUNCTYPE(None)(lambda: (os.kill(os.getpid(), signal.{number}), time.sleep(0.01), None)[2])
    callback()
    time.sleep(60)
    return image, types.SimpleNamespace(as_dict=lambda: {{"sigma": 1.0}})
import nlflow.denoising
nlflow.denoising.denoise = denoise
from nlflow.desk.commands.main import main
main()
"""
    result = process(program, "denoise", str(tmp_path / "in.png"), str(tmp_path / "out.png"))
    assert (result.returncode, result.stdout, result.stderr) == (code, "", f"nonlocal: {word}\n")
    assert [path.name for path in tmp_path.iterdir()] == ["in.png"]


@pytest.mark.skipif(sys.platform != "linux", reason="other systems keep a folder where a process is")
def test_a_working_folder_that_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    monkeypatch.setattr(sys, "argv", ["nonlocal", "info"])
    with pytest.raises(SystemExit, match="1"):
        main()
    assert capsys.readouterr().err.startswith("nonlocal: error: the working folder is gone, expected one that is there")


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="shells elsewhere close no streams")
@pytest.mark.parametrize("closed", ["<&- >&- 2>&-", "2>/dev/full", ">&-"])
def test_streams_that_lead_nowhere(closed: str, tmp_path: Path) -> None:
    """What is written has none of the numbers under which libraries print."""
    Image.new("L", (16, 12)).save(tmp_path / "in.png")
    command = [sys.executable, "-m", "nlflow.desk.commands.main", "denoise", "in.png", "out.png", "--sigma", "1"]
    line = f"{shlex.join(command)} {closed}"
    assert subprocess.run(["sh", "-c", line], cwd=tmp_path, check=False, timeout=300).returncode == 0
    with Image.open(tmp_path / "out.png") as found:
        assert found.size == (16, 12)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["in.png", "out.png"]


@pytest.mark.skipif(os.name != "posix", reason="signals can be sent to a process on POSIX only")
def test_sigterm_where_ctrl_c_is_ignored() -> None:
    program = """
import os, signal, time
signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a shell has it for what runs in the background
from nlflow.backends.interrupts import terminable
with terminable() as terminated:
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)
    except KeyboardInterrupt:
        print(terminated())
"""
    result = process(program)
    assert (result.returncode, result.stdout, result.stderr) == (0, "True\n", "")


@pytest.mark.slow
def test_interrupted_folder(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for name in ("a.png", "b.png", "c.png"):
        Image.new("L", (16, 12)).save(tmp_path / "in" / name)
    code = """
import os, signal, sys, time, types
calls = []
def denoise(image, *args, **options):
    calls.append(image)
    if len(calls) == 2:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(60)
    return image, types.SimpleNamespace(as_dict=lambda: {"sigma": 1.0, "sigma_estimated": True, "noise": "white"})
import nlflow.denoising
nlflow.denoising.denoise = denoise
from nlflow.desk.commands.main import main
main()
"""
    out = tmp_path / "out"
    result = process(code, "denoise", str(tmp_path / "in"), str(out))
    assert result.returncode == 130
    assert result.stderr == f"nonlocal: interrupted; 1 of 3 file(s) are done and complete in {out}\n"
    assert [path.name for path in out.iterdir() if path.name != ".nlflow"] == ["a.png"]


@pytest.mark.slow
def test_errors_of_a_process_have_no_traceback(tmp_path: Path) -> None:
    result = process(
        "from nlflow.desk.commands.main import main; main()",
        "denoise",
        str(tmp_path / "no.png"),
        str(tmp_path / "o.png"),
    )
    assert result.returncode == 1
    assert result.stdout == ""
    assert result.stderr.startswith("nonlocal: error: ")
    assert result.stderr.count("\n") == 1


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int, int], Callable[[], str]]]:
    """Return what makes a terminal of some size stderr, and returns what reads it."""
    pty, termios = pytest.importorskip("pty"), pytest.importorskip("termios", reason="terminals are those of POSIX")
    fcntl = pytest.importorskip("fcntl")
    outer, inner = pty.openpty()
    with os.fdopen(inner, "w") as stream:

        def begin(lines: int, columns: int) -> Callable[[], str]:
            fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
            monkeypatch.setattr(sys, "stderr", stream)
            return read

        def read() -> str:
            stream.flush()
            found = b""
            while select.select([outer], [], [], 0.3)[0]:  # what was written in parts may come in parts
                found += os.read(outer, 65536)
            return found.decode()

        yield begin
    os.close(outer)


@pytest.mark.slow
@pytest.mark.parametrize("size", [(24, 80), (0, 0)])
def test_bars_on_any_terminal(screen: Callable[[int, int], Callable[[], str]], size: tuple[int, int]) -> None:
    """A terminal that nobody has told its size has no rows and no columns; a bar is drawn nevertheless."""
    read = screen(*size)
    assert terminal.shows_progress(quiet=False)
    with telling(True, "balanced") as tell:
        assert tell is not None
        tell(0.5)
    assert "balanced:   0%|" in read()


@pytest.mark.slow
def test_compiling_is_told_once_and_loading_is_not(
    screen: Callable[[int, int], Callable[[], str]], tmp_path: Path
) -> None:
    from numba import types

    (tmp_path / "loops.py").write_text(
        "from numba import njit\n\n\n@njit(cache=True)\ndef twice(x):\n    return 2 * x\n", encoding="utf-8"
    )
    read, told = screen(24, 80), []
    for signatures in ((types.float64, types.float32), (types.float64, types.float32), (types.int64,)):
        loops = runpy.run_path(str(tmp_path / "loops.py"))
        terminal.tell_of_compiling(quiet=False)
        for signature in signatures:
            loading.compiled(loops["twice"], (signature,))
        told.append(read().count("compiling loops, once in this installation"))
    assert told == [1, 0, 1]
    terminal.tell_of_compiling(quiet=True)
    assert loading.tell is None


def test_without_the_desk_the_command_says_how_it_is_installed() -> None:
    program = "import sys; sys.modules['typer'] = None; from nlflow.desk import main; main()"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert result.stdout == ""
    assert re.fullmatch(r"nonlocal: error: the command line is not installed; .*nlflow\[desk\]'?\n", result.stderr)
