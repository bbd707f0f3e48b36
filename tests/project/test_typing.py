"""What a checker of types says of users' programs: nothing about the pages', and no `Any` where arrays come out."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "docs/start.md", *sorted((ROOT / "docs/use").glob("*.md"))]
PAGES += [ROOT / f"docs/howto/own_{part}.md" for part in ("integrator", "kernel", "reaction")]

# torch itself has functions without types, and a name of one block is a new one in the next.
RELAXED = ("--allow-untyped-calls", "--allow-redefinition-new", "--local-partial-types")

# What comes out has the type of what went in. `assert_type` fails for `Any`.
PROGRAM = """
from __future__ import annotations

from typing import assert_type

import numpy as np
from numpy.typing import NDArray

from nlflow import Adaptive, ETD4RK, E, Energy, Gaussian, GradientFlow, Grid, J, MarkovChain, affinity, denoise, solve
from nlflow import Solution, diversity_bounds
from nlflow.denoising.info import DenoiseInfo

Doubles = NDArray[np.float64]
Singles = NDArray[np.float32]


def smoothed(f: Doubles, width: float) -> Doubles:
    flow = GradientFlow(J(affinity(Gaussian(width), Grid(f.size))), metric="degree")
    return solve(flow, f, t=1.0).final


def bounds(f: Doubles) -> tuple[float, float]:
    weights = affinity(Gaussian(2.0), Grid(f.size))
    return diversity_bounds(GradientFlow(E(weights, f, 0.5, measure="degree"), metric="degree"))


def course(f: Singles) -> Solution[Singles]:
    flow = GradientFlow(J(affinity(Gaussian(2.0), Grid(f.size))))
    found = solve(flow, f, t_eval=[0.0, 0.5, 1.0], integrator=Adaptive(ETD4RK(0.1)), trackers=[Energy()])
    assert_type(found.u, Singles)
    assert_type(found.energy, Doubles)
    assert_type(found.success, bool)
    return found


def averages(f: Doubles) -> Doubles:
    weights = affinity(Gaussian(2.0), Grid(f.size))
    chain = MarkovChain(weights)
    assert_type(chain.mixing_time(), int)
    assert_type(chain.expectation(f, 3), Doubles)
    assert_type(chain.limit(f), Doubles)
    return weights.average(f)


def clean(photo: Singles) -> tuple[Singles, DenoiseInfo]:
    assert_type(denoise(photo, 25.0), Singles)
    return denoise(photo, 25.0, return_info=True)
"""


@pytest.mark.slow
def test_users_programs_are_typed(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    for page in PAGES:
        blocks = re.findall(r"^```python\n(.*?)^```$", page.read_text(encoding="utf-8"), flags=re.S | re.M)
        # The blocks of a page follow one another, as a reader runs them.
        lines = (line for block in blocks for line in block.splitlines() if not line.startswith("from __future__"))
        if blocks:
            (tmp_path / f"page_{page.stem}.py").write_text("\n".join(lines))
    files = sorted(map(str, tmp_path.glob("*.py")))
    assert len(files) >= 6
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", *RELAXED, *files],
        cwd=ROOT, env={**os.environ, "MYPYPATH": "nonlocal", "MYPY_NUM_WORKERS": "0"}, capture_output=True, text=True,
        timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
