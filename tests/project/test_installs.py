"""Environments of `make installs`: what is read out of uv and pytest, and which tests need an extra."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from nlflow.errors import InputError
from validation.robustness import installs
from validation.robustness.lacking import OPTIONAL, lacked

ROOT = Path(__file__).parents[2]


def test_versions_that_matter_are_told() -> None:
    assert installs.chosen("attrs==1\nnumpy==2.0.0\nscikit-image==0.24.0\n") == "numpy 2.0.0, scikit-image 0.24.0"


def test_what_pytest_counted() -> None:
    skips = "SKIPPED [3] tests/a.py: torch is not installed\nSKIPPED [2] tests/b.py: no such system\n"
    assert installs.outcome(f"{skips}12 passed, 5 skipped in 1s", 0) == "12 passed; 3 need an extra"
    assert installs.outcome("1 failed, 12 passed, 1 error in 1s", 1) == "12 passed; 1 failed; 1 error"
    assert installs.outcome("no tests ran", 5) == "pytest ended with 5"


def test_tests_that_are_left_out_exist() -> None:
    assert [name for name in installs.LEFT_OUT if not [*(ROOT / "tests").glob(f"*/test_{name}.py")]] == []


def test_the_table_has_a_line_for_each() -> None:
    rows = [installs.Install("3.12", "lowest", "here", "numpy 2.0.0", "12 passed", 3.0),
            installs.Install("3.14", "newest", "windows", "", "none: no wheel", 1.0)]  # fmt: skip
    lines = installs.table(rows).splitlines()
    assert lines[-2:] == [
        "| 3.12 | lowest | here | numpy 2.0.0 | 12 passed | 3 |",
        "| 3.14 | newest | windows |  | none: no wheel | 1 |",
    ]


def test_what_is_lacked_is_named_through_causes() -> None:
    absent = ModuleNotFoundError("No module named 'torch.nn'", name="torch.nn")
    told = InputError("pip install")
    told.__cause__ = absent
    assert lacked(absent) == lacked(told) == "torch"
    assert lacked(ModuleNotFoundError("No module named 'nlflow.new'", name="nlflow.new")) is None
    assert lacked(ValueError()) is None


@pytest.mark.slow
def test_only_what_needs_an_extra_is_skipped(tmp_path: Path) -> None:
    assert "torch" in OPTIONAL
    for name, text in {
        "extra": "def test_a():\n    raise ModuleNotFoundError('x', name='torch')\n",
        "file": "raise ModuleNotFoundError('x', name='dask.array')\n",
        "wrong": "def test_b():\n    raise ModuleNotFoundError('x', name='nlflow.lost')\n",
        "right": "def test_c():\n    pass\n",
    }.items():
        (tmp_path / f"test_{name}.py").write_text(text)
    words = ["-q", "-rs", "-p", "no:cacheprovider", "-p", "validation.robustness.lacking", "--rootdir", str(tmp_path)]
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", *words, "-c", os.devnull, str(tmp_path)],
        capture_output=True, text=True, cwd=ROOT,
    )  # fmt: skip
    assert installs.outcome(ended.stdout, ended.returncode) == "1 passed; 2 need an extra; 1 failed", ended.stdout
