"""Names from files in messages, and in the commands that messages suggest: seen by people, obeyed by nobody."""

from __future__ import annotations

import io
import re
import shutil
import subprocess
import sys
import warnings
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from nlflow.desk import files
from nlflow.desk.terminal import echo, print_table, say
from nlflow.errors import FileFormatError, NlflowWarning, command, quoted, shortened, visible
from tests.commands import run

SOURCES = Path(files.__file__).parents[1]
EVIL = "\x1b]0;title\x07\x1b[31mred\u202etxt.\x9b\u2066\r\u2028"
UNSEEN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
# Of Default_Ignorable_Code_Point in Unicode's DerivedCoreProperties.txt those of no category C.
IGNORED = "\u034f\u115f\u1160\u17b4\u17b5\u180b\u180c\u180d\u180f\u3164\ufe00\ufe0f\uffa0\U000e0100\U000e01ef"
WORDS = ("plain.png", "a b.png", "$(touch X)", "`touch X`", "a'b\"c", "a;touch X #", "-x.png", "é☃ 中文", "\\n", "~",
         EVIL, "two\nlines", "-\t%d'\\1", "end\n", "\udcff\udc80.png", IGNORED, "")  # fmt: skip


@pytest.mark.parametrize("name", ["bash", "dash", "sh", "zsh"])
@pytest.mark.parametrize("word", WORDS)
def test_a_shell_takes_a_quoted_word_as_it_is(word: str, name: str) -> None:
    shell = shutil.which(name)
    if shell is None or (word.endswith("\n") and name in ("dash", "sh")):
        pytest.skip(f"there is no {name} here, or it has no quotes for this word")
    text = command("printf", "%s", word)
    assert not UNSEEN.search(text)
    found = subprocess.run([shell, "-c", text], capture_output=True, check=True, timeout=20).stdout
    assert found == word.encode("utf-8", "surrogateescape")


def test_paths_are_no_options() -> None:
    assert quoted(Path("-x.png")) == "./-x.png"
    assert quoted("-x") == "-x"


def test_half_a_pair_is_quoted_too() -> None:
    """Names inside files and of uploads may hold one, names of files not."""
    assert quoted("a\ud800") == r'''"$(printf 'a\355\240\200')"'''


def test_what_nobody_sees_is_shown() -> None:
    assert visible("a\x1b[31m\u202e\x9b\n") == r"a\x1b[31m\u202e\x9b\n"
    assert visible("a\n\tb", keep="\n\t") == "a\n\tb"
    for text in ("é☃ 中文 русский עברית", "1\u202f000\u00a0µm", "plain", "e\u0301 ᄀ ᅡ ﾡ ា"):
        assert visible(text) == text
    for letter in IGNORED:  # letters and marks to Python
        assert visible(f"a{letter}b", keep="\n").isascii(), hex(ord(letter))
    assert not UNSEEN.search(visible(EVIL))
    assert not UNSEEN.search(shortened(EVIL))
    assert not UNSEEN.search(str(FileFormatError(EVIL)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.warn(EVIL, NlflowWarning, stacklevel=1)
    assert not UNSEEN.search(str(caught[0].message))


def test_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    echo(f"{EVIL}\n\tmore")
    print_table([("input", f"a\n{EVIL}"), (EVIL, "b")])
    say("note", f"a\nnonlocal: error: {EVIL}")
    printed = capsys.readouterr()
    assert not UNSEEN.search(printed.out + printed.err)
    assert len(printed.out.splitlines()) == 4
    assert len(printed.err.splitlines()) == 1


def _array(stream: Any) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, stream)
    return buffer.getvalue()


@pytest.mark.parametrize("name", ["$(touch PWNED)", "a;touch PWNED #", EVIL, "two\nnonlocal: error: no"])
def test_names_of_arrays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The suggested command names the array, and does nothing else."""
    monkeypatch.chdir(tmp_path)
    with zipfile.ZipFile("a.npz", "w") as archive:
        for one in (name, "b"):
            archive.writestr(f"{one}.npy", _array(np.ones((9, 9))))
    with pytest.raises(FileFormatError) as caught:
        files.read("a.npz")
    text = str(caught.value)
    assert not UNSEEN.search(text)
    assert f"nonlocal denoise a.npz OUT --array {quoted(name)}" in text
    stderr = run("denoise", "a.npz", "b.npy", code=1).stderr
    assert not UNSEEN.search(stderr)
    assert len(stderr.splitlines()) == 1


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="names of files hold no control characters there")
def test_names_of_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    name = "a\x1b[31m\u202e\n$(touch X).png"
    Path("in").mkdir()
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (24, 24), np.uint8)).save(Path("in") / name)
    (Path("in") / f"b{name}").write_text("no picture\n" * 9)
    result = run("denoise", "in", "out", "--sigma", "9", "--quality", "fast", "--compare", "figures", code=1)
    assert not UNSEEN.search(result.stdout + result.stderr)
    assert (Path("out") / name).is_file()
    for code, arguments in enumerate((["noise", f"in/{name}"], ["denoise", f"in/{name}", f"out/{name}"],
                                      ["denoise", f"--{name}"])):  # fmt: skip
        result = run(*arguments, code=code)
        assert not UNSEEN.search(result.stdout + result.stderr), arguments
    Path("a b$(touch X).heic").write_bytes(b"\0\0\0\x18ftypheic")
    with pytest.raises(FileFormatError, match=re.escape("heif-convert 'a b$(touch X).heic' 'a b$(touch X)'.png")):
        files.read("a b$(touch X).heic")
    assert not Path("X").exists()


def test_names_of_columns(tmp_path: Path) -> None:
    rows = "\n".join(f"{k},{np.sin(k / 9) + k % 7 / 9}" for k in range(60))
    (tmp_path / "a.csv").write_text(f"time,b\x1b[31m\n{rows}\n", encoding="utf-8")
    for arguments in (["noise", tmp_path / "a.csv"], ["denoise", tmp_path / "a.csv", tmp_path / "b.csv"]):
        result = run(*map(str, arguments))
        assert not UNSEEN.search(result.stdout + result.stderr)


def test_commands_are_quoted_in_one_place() -> None:
    found = [path.name for path in SOURCES.rglob("*.py") if "shlex" in path.read_text(encoding="utf-8")]
    assert found == ["_words.py"]
