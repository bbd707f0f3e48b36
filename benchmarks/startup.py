"""What importing costs, and whether a second process loads the compiled loops from the cache."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.harness import Row

# Bytecode is kept, whatever the shell says: without it every process compiles all that it imports.
KEPT = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def _seconds(code: str) -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True, env=KEPT)
    return time.perf_counter() - start


def run() -> list[Row]:
    codes = {"numpy": "import numpy", "nlflow": "import numpy, nlflow"}
    times: dict[str, list[float]] = {name: [] for name in codes}
    for _ in range(9):
        for name, code in codes.items():
            times[name].append(_seconds(code))
    base, full = (statistics.median(times[name]) for name in ("numpy", "nlflow"))
    work = "import nlflow beside import numpy, extra seconds"
    rows = [Row.of("start", work, f"{base:.3f} s", f"{full:.3f} s", full - base, most=0.15, unit=" s")]
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "in.npy"), Path(folder, "out.npy")
        np.save(source, np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32))
        code = (
            "import sys, json, nlflow, numpy as np\n"
            "from nlflow import denoise\n"
            "from nlflow.backends.numba import loading\n"
            f"denoise(np.load({str(source)!r}), 1.0)\n"
            "print(loading.seconds)\n"
        )
        # A cache of its own, so that the first process compiles.
        environment = {**KEPT, "NUMBA_CACHE_DIR": folder}
        loads = []
        for _ in range(4):
            done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, env=environment)
            loads.append(float(done.stdout))
        command = [str(Path(sys.executable).with_name("nonlocal")), "denoise", str(source), str(target), "--quiet"]
        command += ["--existing", "overwrite"]
        spent = []
        for _ in range(3):
            start = time.perf_counter()
            subprocess.run(command, check=True, env=KEPT)
            spent.append(time.perf_counter() - start)
    work, later = "compiled loops in a second process (loaded from the cache), seconds", statistics.median(loads[1:])
    rows.append(Row.of("start", work, f"{loads[0]:.2f} s in the first", f"{later:.2f} s", later, most=1, unit=" s"))
    work, whole = "nonlocal denoise of 64x64, whole process", statistics.median(spent)
    return [*rows, Row.of("start", work, "none", f"{whole:.2f} s", whole)]
