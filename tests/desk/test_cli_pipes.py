"""The commands in a pipe: `-` is stdin as IN and stdout as OUT, where nothing but the file goes."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from nlflow.desk import files
from nlflow.desk.commands import denoise_file
from nlflow.desk.commands import main as cli
from tests.commands import IMAGE, Denoiser, listing


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Image.fromarray(IMAGE).save("in.png")
    return tmp_path


def content_of(form: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(IMAGE).save(buffer, format=form, **options)
    return buffer.getvalue()


def piped(content: bytes, *arguments: str, code: int = 0) -> tuple[bytes, str]:
    """Return stdout and stderr of a command with this on stdin."""
    result = CliRunner().invoke(cli.app, list(arguments), input=content, prog_name="nonlocal", catch_exceptions=False)
    assert result.exit_code == code, result.stderr
    assert "/nlflow-" not in result.stderr  # the temporary folder is no matter of users
    return result.stdout_bytes, result.stderr


def as_read(content: bytes, suffix: str) -> files.Media:
    path = Path(f"found{suffix}")
    path.write_bytes(content)
    return files.read(path)


HALF = np.rint(IMAGE * 0.5).astype(np.uint8)


def test_a_log_says_stdin(folder: Path, denoiser: Denoiser, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(denoise_file, "_LARGE", 1)
    assert piped(content_of("PNG"), "denoise", "-", "-")[1].startswith("nonlocal: note: stdin: 16 x 12 samples with")


@pytest.mark.slow
@pytest.mark.parametrize(("form", "suffix"), [("PNG", ".png"), ("TIFF", ".tif"), ("BMP", ".bmp"), ("GIF", ".png")])
def test_from_pipe_to_pipe(folder: Path, denoiser: Denoiser, form: str, suffix: str) -> None:
    stdout, stderr = piped(content_of(form), "denoise", "-", "-")
    assert as_read(stdout, suffix).format == files.EXTENSIONS[suffix]
    np.testing.assert_array_equal(as_read(stdout, suffix).data, HALF)
    assert re.search(r"\nsigma +12\.5 \(estimated\): ", stderr)
    assert stderr.splitlines()[-1].split() == ["written", "stdout,", "as", files.EXTENSIONS[suffix].upper()]
    assert [line.split()[0] for line in stderr.splitlines() if "stdin" in line][-1] == "input"
    quiet = piped(content_of(form), "denoise", "-", "-", "-q")
    assert quiet == (stdout, "")
    assert listing() == sorted(["in.png", f"found{suffix}"])


def test_the_format_of_stdout(folder: Path, denoiser: Denoiser) -> None:
    for word in ("tif", ".TIF"):
        stdout, _ = piped(content_of("PNG"), "denoise", "-", "-", "--format", word)
        assert as_read(stdout, ".tif").notes == ()
    stdout, _ = piped(b"", "denoise", "in.png", "-", "--format", "npy", "-q")
    np.testing.assert_array_equal(np.load(io.BytesIO(stdout), allow_pickle=False), IMAGE * 0.5)
    Path("in.png").rename("in.jpg")  # whose content says what it is
    stdout, stderr = piped(b"", "denoise", "in.jpg", "-")
    assert as_read(stdout, ".png").notes == ()
    assert "in.jpg: the content is PNG" in stderr
    stdout, _ = piped(b"t,v\n0,1.0\n1,2.5\n2,3.5\n", "denoise", "-", "-", "-q")
    assert stdout == b"t,v\n0,0.5\n1,1.25\n2,1.75\n"


def test_one_end_in_a_pipe(folder: Path, denoiser: Denoiser) -> None:
    stdout, _ = piped(content_of("PNG"), "denoise", "-", "out.tif", "--reference", "in.png", "--json")
    assert b'"input": "stdin"' in stdout
    assert b'"output": "out.tif"' in stdout
    np.testing.assert_array_equal(files.read("out.tif").data, HALF)
    stdout, stderr = piped(b"", "denoise", "in.png", "-", "--compare", "fig.png")
    np.testing.assert_array_equal(as_read(stdout, ".png").data, HALF)
    assert re.search(r"\nfigure +fig\.png\n", stderr)
    assert Path("fig.png").is_file()


@pytest.mark.parametrize(
    ("content", "arguments", "code", "message"),
    [
        (b"", ["-", "-"], 1, "stdin: got nothing, expected a file"),
        (b"words", ["-", "-"], 1, "stdin: got content of an unknown format, expected one of .png, .jpg"),
        (b"%PDF-1.4", ["-", "o.png"], 1, "stdin: got a PDF document, expected one of .png"),
        (b"\x89PNG\r\n\x1a\n" + bytes(99), ["-", "-"], 1, "stdin: got content that is no PNG image"),
        (b"", ["in.png", "-", "--format", "gif"], 2, "--write format: got 'gif', expected one of png, jpg"),
        (b"", ["in.png", "-", "--format", "zarr"], 2, "--write format: got 'zarr'"),
        (b"", ["in.png", "-", "--format", "wav"], 1, "stdout: WAV files cannot hold an image; name the output .png"),
        (b"", ["in.png", "o.png", "--format", "tif"], 2, "is for - as OUT"),
        (b"", ["in.png", "in.png", "-"], 2, "expected one file in and one file out"),
        (b"", [".", "-"], 2, "expected one file in and one file out"),
        (b"", ["-", "out/"], 2, "expected one file in and one file out"),
        (b"", ["-", "out.zarr"], 2, "expected one file in and one file out"),
        (b"", ["in.png", "-", "--recursive"], 2, "expected one file in and one file out"),
        (b"", ["in.png", "-", "--json"], 2, "goes to stdout, and so does the file"),
        (b"", ["none.png", "-"], 1, "none.png: there is no such file or folder; check the name"),
        (
            b"",
            ["none", "-"],
            1,
            "for none, expected a format that fits a stream; say which: --write format=png",
        ),
    ],
)
def test_refused_in_a_pipe(
    folder: Path, denoiser: Denoiser, content: bytes, arguments: list[str], code: int, message: str
) -> None:
    stdout, stderr = piped(content, "denoise", *arguments, code=code)
    assert stdout == b""
    assert message in stderr
    assert listing() == ["in.png"]
    assert denoiser.calls == []


def test_a_stream_without_end(folder: Path, denoiser: Denoiser, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NLFLOW_MEMORY_LIMIT", str(2**20))
    _, stderr = piped(content_of("PNG") + bytes(2**21), "denoise", "-", "-", code=1)
    assert "stdin: got more than 1 MiB, expected less" in stderr


def test_a_failure_leaves_stdout_empty(folder: Path, denoiser: Denoiser) -> None:
    denoiser.failures[-1] = files.InputError("image: got nothing")
    assert piped(content_of("PNG"), "denoise", "-", "-", code=1) == (b"", "nonlocal: error: stdin: got nothing\n")


def test_noise_of_a_pipe(folder: Path) -> None:
    rng = np.random.default_rng(0)
    buffer = io.BytesIO()
    Image.fromarray(np.clip(rng.normal(128, 9, (64, 64)), 0, 255).astype(np.uint8)).save(buffer, format="BMP")
    stdout, _ = piped(buffer.getvalue(), "noise", "-")
    assert re.match(rb"input +stdin, image of 64 x 64, uint8\nnoise +white noise: sigma ", stdout)
    stdout, _ = piped(buffer.getvalue(), "noise", "-", "--json")
    assert b'"input": "stdin"' in stdout


_PROGRAM = """
import sys, types
import nlflow.denoising
nlflow.denoising.denoise = lambda image, *args, **words: (
    image, types.SimpleNamespace(as_dict=lambda: {"sigma": 1.0, "sigma_estimated": True, "noise": "white"}))
from nlflow.desk.commands.main import main
main()
"""


@pytest.mark.slow
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_nobody_reads_stdout(tmp_path: Path, unbuffered: str) -> None:
    path = tmp_path / "in.bmp"
    Image.new("L", (1000, 1000)).save(path)  # more than a pipe holds
    command = [sys.executable, "-W", "error", "-c", _PROGRAM, "denoise", str(path), "-"]
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    whole = subprocess.run(command, capture_output=True, check=True, env=environment).stdout
    assert whole == path.read_bytes()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(2) == b"BM"
        process.stdout.close()
        stderr = process.stderr.read().decode()
        assert process.wait(120) == 141
    assert "rror" not in stderr


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="terminals are opened as POSIX has them")
@pytest.mark.parametrize(
    ("arguments", "end", "message"),
    [
        (["in.png", "-"], "stdout", "OUT: got -, but stdout is a terminal, expected a file or a pipe; add > out.png"),
        (["-", "out.png"], "stdin", "IN: got -, but stdin is a terminal, expected a pipe or a file"),
    ],
)
def test_a_terminal_is_no_file(folder: Path, arguments: list[str], end: str, message: str) -> None:
    master, slave = os.openpty()
    try:
        streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, end: slave}
        result = subprocess.run(
            [sys.executable, "-c", _PROGRAM, "denoise", *arguments], stderr=subprocess.PIPE, check=False, **streams
        )  # type: ignore[call-overload]
    finally:
        os.close(master)
        os.close(slave)
    assert result.returncode == 1
    assert result.stderr.decode().startswith(f"nonlocal: error: {message}")
    assert listing() == ["in.png"]
