"""Memory and time of denoising an image on the disk with Dask: ``python -m benchmarks.scaleout [--out DIR]``.

An image is made block by block, and denoised from zarr to zarr by a process of its own with a cluster of workers. The
memory of all of its processes is read from /proc four times a second, and told beside how many blocks are done, so that
a growth would be seen. After ``--seconds`` the run is ended, and what was done until then is told.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.harness import keep, machine
from benchmarks.resident import figures

SIGMA = 25.0


def make(path: Path, size: int, block: int) -> None:
    """Write waves with noise as uint8, a block at a time."""
    import numpy as np
    import zarr

    array: Any = zarr.create_array(path, shape=(size, size), chunks=(block, block), dtype="u1", overwrite=True)
    x = np.arange(block)
    wave = 128 + 40 * np.sin(x / 40)[:, None] * np.cos(x / 55)
    for i in range(0, size, block):
        for j in range(0, size, block):
            rng = np.random.default_rng((i, j))
            noisy = wave + rng.normal(0, SIGMA, wave.shape)
            part = np.clip(np.rint(noisy), 0, 255).astype(np.uint8)
            array[i : i + block, j : j + block] = part[: size - i, : size - j]


def denoise(source: str, target: str, options: dict[str, Any]) -> None:
    """Denoise, telling the progress as lines of JSON."""
    from nlflow.desk.large import denoise_store

    def tell(done: int, count: int) -> None:
        print(json.dumps({"done": done, "blocks": count}), flush=True)

    began = time.perf_counter()
    info, counts = denoise_store(source, target, SIGMA, existing="overwrite", progress=tell, **options)
    seconds = time.perf_counter() - began
    print(json.dumps({"seconds": seconds, **counts, "stopped_by": info.stopped_by}), flush=True)


def processes(root: int) -> list[int]:
    """Return a process and all that it has started."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
            except OSError:  # it has ended meanwhile
                continue
    found = [root]
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    return found


def memory(pid: int) -> dict[str, int]:
    """Return the resident memory of a process, its peak, and its share of it (Pss), in bytes."""
    values: dict[str, int] = {}
    with suppress(OSError):  # it has ended meanwhile
        for file in ("status", "smaps_rollup"):
            values |= figures(Path(f"/proc/{pid}"), file)
    return values


def watch(child: subprocess.Popen[str], seconds: float) -> dict[str, Any]:
    """Follow a run to its end, or end it after so many seconds."""
    began = time.perf_counter()
    peaks: dict[int, int] = {}
    names: dict[int, str] = {}
    done, blocks, most, most_shared, told = 0, 0, 0, 0, {}
    over_time: list[dict[str, Any]] = []
    assert child.stdout is not None
    os.set_blocking(child.stdout.fileno(), False)
    ended = False
    while child.poll() is None:
        for line in child.stdout.readlines():
            said = json.loads(line)
            done, blocks = said.get("done", done), said.get("blocks", blocks)
            told = said if "seconds" in said else told
        now = {pid: memory(pid) for pid in processes(child.pid)}
        for pid, values in now.items():
            peaks[pid] = max(peaks.get(pid, 0), values.get("VmHWM", 0))
            if pid not in names:
                try:
                    words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                except OSError:
                    words = ""
                names[pid] = "client and scheduler" if pid == child.pid else (
                    "resource tracker" if "resource_tracker" in words else "worker")  # fmt: skip
        total = sum(values.get("VmRSS", 0) for values in now.values())
        most = max(most, total)
        most_shared = max(most_shared, sum(values.get("Pss", 0) for values in now.values()))
        elapsed = time.perf_counter() - began
        if not over_time or elapsed - over_time[-1]["seconds"] >= 10:
            each = {f"{names[pid]} {pid}": round(values.get("VmRSS", 0) / 1e6) for pid, values in now.items()}
            over_time.append(
                {"seconds": round(elapsed, 1), "blocks_done": done, "resident_MB": round(total / 1e6), "each_MB": each}
            )
            print(over_time[-1], file=sys.stderr, flush=True)
        if elapsed > seconds and not ended:
            child.send_signal(signal.SIGINT)
            ended = True
        time.sleep(0.25)
    for line in child.stdout.readlines():
        said = json.loads(line)
        done, told = said.get("done", done), said if "seconds" in said else told
    return {
        "blocks_done": done,
        "blocks": blocks,
        "ended_early": ended,
        "exit_code": child.returncode,
        "run": told,
        "peak_of_the_sum_of_resident_memory_MB": round(most / 1e6),
        "peak_of_the_sum_of_proportional_memory_MB": round(most_shared / 1e6),
        "sum_of_the_peaks_MB": round(sum(peaks.values()) / 1e6),
        "peaks_MB": [{"process": names[pid], "VmHWM_MB": round(peak / 1e6)} for pid, peak in peaks.items()],
        "over_time": over_time,
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scaleout", description=__doc__)
    parser.add_argument("--size", type=int, default=32768, help="side of the image in pixels")
    parser.add_argument("--block", type=int, default=1024, help="side of a block")
    parser.add_argument("--quality", default="fast")
    parser.add_argument("--search-radius", type=int, help="of fast; its own choice by default")
    parser.add_argument("--patch-size", type=int, help="of fast; its own choice by default")
    parser.add_argument("--steps", type=int, help="of fast; until the residual is enough by default")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=3600, help="end the run after so long")
    parser.add_argument("--folder", type=Path, default=Path("/tmp"), help="where the images are made")
    parser.add_argument("--out", type=Path, help="folder for scaleout.json")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        denoise(**json.loads(arguments.child))
        return
    options = {"quality": arguments.quality, "block": arguments.block, "workers": arguments.workers}
    for name in ("search_radius", "patch_size", "steps"):
        if getattr(arguments, name) is not None:
            options[name] = getattr(arguments, name)
    folder = arguments.folder / f"nlflow-scaleout-{os.getpid()}"
    folder.mkdir()
    try:
        source, target = folder / "in.zarr", folder / "out.zarr"
        began = time.perf_counter()
        make(source, arguments.size, arguments.block)
        print(f"made in {time.perf_counter() - began:.0f} s", file=sys.stderr)
        words = json.dumps({"source": str(source), "target": str(target), "options": options})
        command = [sys.executable, "-m", "benchmarks.scaleout", "--child", words]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
            report = watch(child, arguments.seconds)
    finally:
        shutil.rmtree(folder)
    report = {"machine": machine(), "date": time.strftime("%Y-%m-%d"), "command": " ".join(sys.argv[1:]),
              "size": arguments.size, "dtype": "uint8", "options": options, **report}  # fmt: skip
    print(json.dumps({key: value for key, value in report.items() if key != "over_time"}, indent=1))
    if arguments.out is not None:
        keep(arguments.out, "scaleout", report)


if __name__ == "__main__":
    main()
