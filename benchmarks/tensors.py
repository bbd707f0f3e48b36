"""The denoiser on tensors: agreement with the compiled loops, and time, ``python -m benchmarks.tensors --data DIR``.

`benchmarks.gpu` has its rows of throughput, made by `throughput` here.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numba
import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.harness import keep, machine
from benchmarks.volumes import brain
from nlflow import denoise
from nlflow.backends.threads import one_torch_thread
from nlflow.denoising.quality import psnr

APART, SAMPLES, SHARE = 0.005, 0.02, 0.999
"""Most decibels, and grey levels at a share of the samples, that tensors may be apart from compiled loops."""

SLOWER = 3.0
"""Most times the compiled loops that tensors may take on the same cores."""

BATCH = 0.5
"""Most times as many calls that a batch of images may take."""

PUBLISHED = (
    (
        "bm3d-cupy, RTX 6000 Ada",
        "an image of its users, which is not told",
        {"seconds": 0.188, "seconds of bm3d beside it": 3.02},
    ),
    ("BM3DCUDA, GTX 1080", "basic step, three planes of 1080p", {"frames_a_second": 90}),
)
"""Of other denoisers on other machines, as their authors or users have told them; nothing here measures them."""

SIGMA = 25.0

Work = tuple[str, tuple[int, ...], dict[str, str]]


def drawn(shape: tuple[int, ...]) -> tuple[Any, Any]:
    """Return a picture of edges and waves, and the same with noise, grey levels in float32."""
    y, x = np.mgrid[: shape[-2], : shape[-1]].astype(np.float32)
    clean = 120 + 50 * np.sin(x / 17) * np.cos(y / 23) + 40 * ((x // 64 + y // 48) % 2)
    noise = np.random.default_rng(0).normal(0, SIGMA, shape)
    clean = np.broadcast_to(clean, shape)
    return clean, (clean + noise).astype(np.float32)


# ---- throughput, for benchmarks.gpu


BALANCED = {"quality": "balanced"}
FIRST: tuple[Work, ...] = (
    *(("image", (side, side), BALANCED) for side in (1000, 2000, 4000)),
    ("batch", (16, 256, 256), {"axes": "BYX", **BALANCED}),
    ("image", (256, 256), BALANCED),
)
"""Kind, shape and words for `denoise` of what goals are set for."""

FEW: tuple[Work, ...] = (
    ("image", (128, 128), BALANCED),
    ("batch", (4, 48, 48), {"axes": "BYX", **BALANCED}),
    ("volume", (16, 16, 16), {"axes": "ZYX", **BALANCED}),
)

MORE: tuple[Work, ...] = (
    ("image", (1000, 1000), {"quality": "best"}),
    ("volume", (64, 64, 64), {"axes": "ZYX", **BALANCED}),
    *(("batch", shape, {"axes": "BYX", **BALANCED}) for shape in ((64, 128, 128), (256, 64, 64), (16, 512, 512))),
    ("volume", (160, 160, 160), {"axes": "ZYX", **BALANCED}),
    *(("bm3d-cupy", (side, side), {}) for side in (1000, 2000)),
    ("bm3d on the CPU", (512, 512), {}),
    ("image", (2000, 2000), {"quality": "best"}),
    ("image", (10000, 10000), BALANCED),
)


def throughput(log: Any, device: str, works: tuple[Work, ...], measure: Callable[..., dict[str, Any]]) -> None:
    """Images, batches and volumes on a device, and bm3d where it is installed."""
    for kind, shape, words in works:
        if kind != "bm3d-cupy" or device == "cuda":
            _row(log, "cpu" if kind == "bm3d on the CPU" else device, measure, kind, shape, words)


def published(log: Any, device: str) -> None:
    """Rows of figures that others have told."""
    for peer, work, figures in PUBLISHED:
        log.add(what="denoise", peer=peer, work=work, status="published, not measured here", **figures)
    if device != "cuda":
        log.add(what="denoise", peer="nlflow on a GPU", status="not measured")


def _row(log: Any, device: str, measure: Any, kind: str, shape: tuple[int, ...], words: dict[str, Any]) -> None:
    def work() -> dict[str, Any]:
        clean, noisy = drawn(shape)
        made: list[Any] = []
        try:
            task = _task(kind, noisy, device, words)
        except ImportError as error:
            return {"status": f"not installed: {error}"}

        def kept() -> None:
            made[:] = [task()]

        found = measure(kept, device)
        result = made[0].get() if hasattr(made[0], "get") else np.asarray(torch.as_tensor(made[0]).cpu())
        if kind == "bm3d-cupy":
            found["peak_bytes"] = None  # not of torch
        rate = noisy.size / 1e6 / found["seconds"]
        return {**found, "megasamples_a_second": rate, "psnr": psnr(clean, result)}

    log.run(
        "denoise", round(float(np.prod(shape)) ** 0.5), work, 0.3, kind=kind, shape="x".join(map(str, shape)), **words
    )


def _task(kind: str, noisy: Any, device: str, words: dict[str, Any]) -> Callable[[], Any]:
    if kind == "bm3d on the CPU":
        import bm3d

        return lambda: bm3d.bm3d(noisy, SIGMA)
    if kind == "bm3d-cupy":
        import cupy
        from bm3d_cupy import bm3d_gpu

        cupy.get_default_memory_pool().free_all_blocks()
        given = cupy.asarray(noisy)

        def alone() -> Any:
            result = bm3d_gpu(given, SIGMA)
            cupy.cuda.get_current_stream().synchronize()
            return result

        return alone
    image = torch.from_numpy(noisy).to(device)
    return lambda: denoise(image, SIGMA, **words)


# ---- agreement


def cases(data: Path, few: bool) -> Iterator[tuple[str, Any, float, dict[str, Any]]]:
    """Give names, clean samples 0...255, noise and words for `denoise`."""
    from skimage.io import imread

    levels = (25.0,) if few else (15.0, 25.0, 50.0)
    for path in sorted((data / "Set12").glob("*.png"))[: 2 if few else None]:
        for sigma in levels:
            yield f"Set12/{path.name}", imread(path).astype(np.float32), sigma, {}
    for path in sorted((data / "Kodak24").glob("*.png"))[: 1 if few else None]:
        clean = imread(path).astype(np.float32)[128:320, 128:320]
        yield f"Kodak24/{path.name} [128:320, 128:320]", clean, 25.0, {"channel_axis": -1}
    t = np.arange(4000) / 4000
    signals = {"steps": 100 * (np.floor(9 * t) % 2) + 60, "chirp": 128 + 90 * np.sin(300 * t**2)}
    for name, clean in signals.items():
        yield f"signal of {name}", clean.astype(np.float32), 20.0, {}
    for side in (32,) if few else (32, 48):
        yield f"volume of {side}^3", 255 * brain(data, side).astype(np.float32), 25.0, {"axes": "ZYX"}


def interleaved(works: list[Callable[[], Any]], repeats: int) -> tuple[list[Any], Any, Any]:
    """Return what works make, and the seconds and CPU seconds (repeats, works) that they took in turn."""
    made, seconds = [], np.empty((2, repeats, len(works)))
    for repeat in range(repeats):
        made = []
        for number, work in enumerate(works):
            begun = time.perf_counter(), time.process_time()
            made.append(work())
            seconds[:, repeat, number] = time.perf_counter() - begun[0], time.process_time() - begun[1]
    return made, *seconds


def ratio(seconds: Any) -> float:
    """Return how many times the first work's time the second takes, the median of all repeats."""
    return float(np.median(seconds[:, 1] / seconds[:, 0]))


def agreement(data: Path, few: bool, repeats: int) -> list[dict[str, Any]]:
    """Return a row for each case: how far tensors are from the compiled loops, and how long both take."""
    rows = []
    for name, clean, sigma, words in cases(data, few):
        noisy = (clean + np.random.default_rng(0).normal(0, sigma, clean.shape)).astype(np.float32)
        both: Any = (noisy, torch.from_numpy(noisy))
        if not rows:
            for one in both:
                denoise(one[:48, :48], sigma, **words)  # compiles, and loads what it needs
        works = [partial(denoise, one, sigma, **words) for one in both]
        (compiled, tensor), seconds, cpu = interleaved(works, repeats)
        tensors = tensor.numpy()
        differences = np.abs(compiled - tensors)
        row = {
            "case": name, "sigma": sigma, "psnr": psnr(clean, compiled),
            "psnr_apart": abs(psnr(clean, compiled) - psnr(clean, tensors)),
            "samples_apart": float(np.quantile(differences, SHARE)), "most_apart": float(differences.max()),
            "samples": differences.size, "beyond": int((differences > SAMPLES).sum()),
            "seconds": float(np.median(seconds[:, 1])), "times_compiled": ratio(seconds),
            "cpu_seconds": float(np.median(cpu[:, 1])), "cpu_times_compiled": ratio(cpu),
        }  # fmt: skip
        rows.append(row)
        told(row)
    return rows


def batch(repeats: int) -> dict[str, Any]:
    """Return how a batch of 16 images of 256 x 256 compares with as many calls.

    Beside the times are the floating-point operations of all products of matrices, which torch's own counter counts for
    two of the images: what a batch could save of them is what its images share.
    """
    images = torch.from_numpy(drawn((16, 256, 256))[1])

    def works_of(images: Any) -> list[Callable[[], Any]]:
        return [
            lambda: [denoise(one, SIGMA, **BALANCED) for one in images],
            lambda: denoise(images, SIGMA, axes="BYX", **BALANCED),
        ]

    works, flops = works_of(images), []
    for work in works_of(images[:2]):
        with FlopCounterMode(display=False) as counter, one_torch_thread():  # modes see this thread alone
            work()
        flops.append(counter.get_total_flops())
    (alone, together), seconds, cpu = interleaved(works, repeats)
    row = {
        "case": "batch of 16 images of 256 x 256 beside 16 calls", "seconds": float(np.median(seconds[:, 1])),
        "times_calls": ratio(seconds), "cpu_seconds": float(np.median(cpu[:, 1])), "cpu_times_calls": ratio(cpu),
        "flops_of_two": flops[1], "flops_times_calls": flops[1] / flops[0],
        "most_apart": float((torch.stack(alone) - together).abs().max()),
    }  # fmt: skip
    told(row)
    return row


def told(row: dict[str, Any]) -> None:
    """Print a row."""
    print("  ".join(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in row.items()), flush=True)


def times(rows: list[dict[str, Any]], kind: str = "") -> float:
    """Return how many times the compiled loops' time tensors take for all cases together."""
    own, word = f"{kind}seconds", f"{kind}times_compiled"
    return float(sum(row[own] for row in rows) / sum(row[own] / row[word] for row in rows))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tensors", description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with Set12, Kodak24, volumes")
    parser.add_argument("--out", type=Path, help="folder for tensors.json")
    parser.add_argument("--few", action="store_true", help="two images, one crop, signals, one volume")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3, help="of each case, in turn with the compiled loops")
    chosen = parser.parse_args()
    numba.set_num_threads(chosen.threads)
    torch.set_num_threads(chosen.threads)
    rows = agreement(chosen.data, chosen.few, chosen.repeats)
    beside = batch(chosen.repeats)
    worst = {name: max(row[name] for row in rows) for name in ("psnr_apart", "samples_apart", "most_apart")}
    beyond = sum(row["beyond"] for row in rows) / sum(row["samples"] for row in rows)
    near = worst["psnr_apart"] <= APART and beyond <= 1 - SHARE
    alone = sum(row["samples_apart"] > SAMPLES for row in rows)
    set12 = [row for row in rows if row["case"].startswith("Set12")]
    summary = {
        **worst,
        "threads": chosen.threads,
        "cases": len(rows),
        "cases_beyond": alone,
        "samples_beyond": beyond,
        "times_compiled": times(rows),
        "cpu_times_compiled": times(rows, "cpu_"),
        "times_compiled_set12": times(set12),
        "cpu_times_compiled_set12": times(set12, "cpu_"),
        "near": near,
        "fast_enough": times(set12) <= SLOWER,
        "batch_fast_enough": beside["times_calls"] <= BATCH,
    }
    print(summary)
    if chosen.out is not None:
        keep(chosen.out, "tensors", {"about": machine(), "summary": summary, "rows": rows, "batch": beside})
    raise SystemExit(0 if near else 1)


if __name__ == "__main__":
    main()
