"""Outputs of all kinds, each to be killed at its calls that write: ``python -m ... .outputs NAME MOST FOLDER``."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Callable
from contextlib import contextmanager, redirect_stdout, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import nlflow as nl
from nlflow.attention.injection.keeping import read_terms
from nlflow.desk.commands.main import main as command
from nlflow.errors import InputError
from nlflow.plotting.video import comment_of
from nlflow.store import atomic
from nlflow.store.checkpoints import Checkpoints
from validation.robustness.faults.calls import Output, strike

__all__ = ["OUTPUTS", "main"]

SIDE, STEPS = 24, 4


def nonlocal_(*words: object) -> None:
    """Run the command, which ends with a status."""
    sys.argv = ["nonlocal", *map(str, words), "--quiet"]
    command()


def contents(place: Path) -> Any:
    """Return the bytes of a file, or of all that is in a folder and not hidden; None for nothing."""
    if place.is_file():
        return place.read_bytes()
    found = {path.relative_to(place): path for path in sorted(place.rglob("*")) if path.is_file()}
    return {str(name): path.read_bytes() for name, path in found.items() if "/." not in f"/{name}"} or None


def old_or_new(name: str, folder: Path, before: Any, after: Any) -> str | None:
    """Return what is lost where an output is neither as it was nor as it is to be."""
    return None if contents(folder / name) in (before, after) else f"{name} is neither the old one nor the new one"


# ---- the command

_FAST = ("--sigma", 20, "--quality", "fast")


def noisy(*shape: int) -> Any:
    return np.random.default_rng(3).normal(128, 20, shape).clip(0, 255).astype(np.uint8)


def by_command(name: str, *words: object, source: str = "in.npy", old: bool = False) -> Output:
    """Return an output of the command, beside nothing, or in the place of an old one."""

    def prepare(folder: Path) -> None:
        inputs(folder)
        if old:
            shutil.copytree(folder / "old.ome.zarr", folder / name) if name.endswith("zarr") else (
                folder / name).write_bytes(b"old")  # fmt: skip

    def begin(folder: Path, how: str) -> None:
        more = [folder / word if str(word).endswith(".png") else word for word in words]
        nonlocal_("denoise", folder / source, folder / name, *_FAST, *more, "--existing", how)

    first = "overwrite" if old else "refuse"
    what = f"{name}{' and a figure' if '--compare' in words else ''}"
    return Output(
        f"{what} by the command{', in the place of an old one' if old else ''}",
        partial(begin, how=first), partial(begin, how="overwrite"), lambda folder: contents(folder / name), prepare,
        partial(old_or_new, name),
    )  # fmt: skip


def inputs(folder: Path) -> None:
    """Put a picture, a stack, a film and a folder of pictures into a folder."""
    import tifffile

    np.save(folder / "in.npy", noisy(SIDE, SIDE))
    tifffile.imwrite(folder / "in.tif", noisy(3, SIDE, SIDE), imagej=True, metadata={"axes": "ZYX"})
    (folder / "in").mkdir()
    for number in range(3):
        np.save(folder / "in" / f"{number}.npy", noisy(SIDE, SIDE + number))
    import av
    import zarr

    with av.open(str(folder / "in.mp4"), "w") as film:
        stream = film.add_stream("mpeg4", rate=10, width=32, height=32, pix_fmt="yuv420p")
        for frame in noisy(4, 32, 32, 3):
            film.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        film.mux(stream.encode())
    old = folder / "old.ome.zarr"

    group = zarr.open_group(old, mode="w", zarr_format=3)
    group.create_array("0", shape=(2, 2), dtype="u1")[...] = 1


def folder_of_files() -> Output:
    def go(folder: Path) -> None:
        nonlocal_("denoise", folder / "in", folder / "out", *_FAST, "--existing", "resume")

    def check(folder: Path, before: Any, after: Any) -> str | None:
        found = contents(folder / "out") or {}
        return None if all(after[name] == content for name, content in found.items()) else "half a file is there"

    return Output("folder of files by the command", go, go, lambda folder: contents(folder / "out"), inputs, check)


# ---- blocks

_BLOCKS: dict[str, Any] = {"quality": "pixels", "steps": 1, "block": 60}


def blocks(*, old: bool = False, exchange: bool = True) -> Output:
    """Return a store that is written block by block, by threads of the process that is killed."""

    def prepare(folder: Path) -> None:
        import zarr

        for name, value in (("in.zarr", noisy(120, 120)), *([("out.zarr", noisy(8, 8))] if old else [])):
            array = zarr.create_array(folder / name, shape=value.shape, chunks=(30, 30), dtype=value.dtype)
            array[...] = value

    def go(folder: Path, existing: str) -> None:
        from distributed import Client

        from nlflow.desk import large

        @contextmanager
        def threads(scheduler: str, jobs: int | None) -> Any:
            with Client(processes=False, n_workers=1, threads_per_worker=1, dashboard_address=None):
                yield

        large._workers.cluster = threads
        large._PATIENCE = 0.0
        if not exchange:
            atomic._exchanged = lambda *_: False
        try:
            large.denoise_store(folder / "in.zarr", folder / "out.zarr", 20.0, existing=existing, **_BLOCKS)
        except InputError as error:
            if existing != "resume" or "already there" not in str(error):
                raise
            if old and contents(folder / "out.zarr") == contents_of_old:  # killed before it had begun
                go(folder, "overwrite")

    contents_of_old = None

    def result(folder: Path) -> Any:
        return contents(folder / "out.zarr")

    def check(folder: Path, before: Any, after: Any) -> str | None:
        nonlocal contents_of_old
        contents_of_old = before
        if not exchange:
            atomic.sweep(folder)
        return old_or_new("out.zarr", folder, before, after)

    how = f"{', in the place of an old one' if old else ''}{'' if exchange else ', names not exchanged'}"
    return Output(
        f"zarr store by blocks{how}", partial(go, existing="overwrite" if old else "refuse"),
        partial(go, existing="resume"), result, prepare, check,
    )  # fmt: skip


# ---- flows


def flow_with(name: str, tracker: Callable[[Path], nl.Tracker] | None, look: Callable[[Path], Any]) -> Output:
    """Return a flow with checkpoints, and with a tracker that writes a file."""

    def go(folder: Path) -> None:
        signal = np.random.default_rng(5).standard_normal((6, 5))
        flow = nl.GradientFlow(nl.J(nl.affinity(nl.Gaussian(width=1.5), nl.Grid((6, 5)), signal)), "degree")
        trackers = [nl.Checkpoint(folder / "checkpoint", seconds=0)]
        if tracker is not None:
            trackers.insert(0, tracker(folder / name))
        solution = nl.solve(
            flow, signal, t=0.1 * STEPS, integrator=nl.ExplicitEuler(0.1), trackers=trackers, resume=True
        )
        solution.save(folder / "solution.npz")

    def result(folder: Path) -> Any:
        if not (folder / "solution.npz").exists():
            return None
        found = nl.Solution.load(folder / "solution.npz")
        return found.final.tobytes(), look(folder / name)

    def check(folder: Path, before: Any, after: Any) -> str | None:
        states = Checkpoints(folder / "checkpoint", "checkpoint")
        if states:
            states.load(lambda arrays, meta: None)  # raises
        if (folder / name).exists():
            look(folder / name)
        return None

    return Output(f"{name} of a flow" if tracker else "checkpoints of a flow", go, go, result, check=check)


def of_hdf5(path: Path) -> Any:
    import h5py

    with h5py.File(path) as file:
        return [file[name][...].tobytes() for name in ("u", "t", "energy")]


def of_zarr(path: Path) -> Any:
    import zarr

    group: Any = zarr.open_group(path, mode="r")
    return [group[name][...].tobytes() for name in ("u", "t", "energy")]


def of_vtk(path: Path) -> Any:
    return path.read_text(), contents(path.with_suffix(".vtk"))


def of_film(path: Path) -> Any:
    return comment_of(path), path.read_bytes() if path.suffix == ".gif" else None


# ---- terms of a model, which are two files


def terms(*, learned: tuple[bool, bool]) -> Output:
    """Return terms that take the place of others, with learned values or without."""

    def save(folder: Path, seed: int) -> None:
        import torch

        from nlflow.attention import attach, save_terms

        atomic._swept.clear()  # the old terms are of another process
        torch.manual_seed(seed)
        encoder = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(8, 2, 8, batch_first=True), 3)
        attach(encoder, fidelity=0.1 + seed, learned=learned[seed])
        for name, values in encoder.named_parameters():
            if ".neutreno." in name:
                values.data += seed
        save_terms(encoder, folder / "terms")

    def result(folder: Path) -> Any:
        about, values = read_terms(folder / "terms")
        return about["attach"], {name: one.tolist() for name, one in values.items()}

    def check(folder: Path, before: Any, after: Any) -> str | None:
        return None if result(folder) in (before, after) else "neither the old terms nor the new ones"

    how = ", then ".join("learned" if one else "given" for one in learned)
    go = partial(save, seed=1)
    return Output(f"terms of a model, {how}", go, go, result, partial(save, seed=0), check)


OUTPUTS: dict[str, Callable[[], Output]] = {
    "npy": partial(by_command, "out.npy"),
    "npy-old": partial(by_command, "out.npy", old=True),
    "tiff-old": partial(by_command, "out.tif", source="in.tif", old=True),
    "figure": partial(by_command, "out.npy", "--compare", "out.png"),
    "folder": folder_of_files,
    "ome-zarr": partial(by_command, "out.ome.zarr", source="in.tif"),
    "ome-zarr-old": partial(by_command, "out.ome.zarr", source="in.tif", old=True),
    "film": partial(by_command, "out.mp4", source="in.mp4"),
    "blocks": blocks,
    "blocks-old": partial(blocks, old=True),
    "blocks-old-renamed": partial(blocks, old=True, exchange=False),
    "checkpoints": partial(flow_with, "none", None, lambda path: None),
    "hdf5": partial(flow_with, "run.h5", nl.Frames, of_hdf5),
    "zarr": partial(flow_with, "run.zarr", nl.Frames, of_zarr),
    "vtk": partial(flow_with, "run.pvd", nl.Frames, of_vtk),
    "gif": partial(flow_with, "run.gif", partial(nl.Film, size=(64, 64)), of_film),
    "mp4": partial(flow_with, "run.mp4", partial(nl.Film, size=(64, 64)), of_film),
    "terms": partial(terms, learned=(True, True)),
    "terms-given": partial(terms, learned=(True, False)),
    "terms-learned": partial(terms, learned=(False, True)),
}


def main(name: str, most: str, folder: str) -> int:
    """Kill an output, and print what came of it as JSON."""
    output, place = OUTPUTS[name](), Path(folder).resolve()
    # With compiled loops in memory a try takes a tenth of the time. Threads of Dask do not outlive the fork.
    if name.startswith("blocks"):
        import distributed  # noqa: F401

        from nlflow.desk import large  # noqa: F401

        nl.denoise(noisy(SIDE, SIDE), 20.0, preserve_range=True, quality="pixels", steps=1)
    else:
        with tempfile.TemporaryDirectory(dir=place) as warm, suppress(SystemExit), redirect_stdout(sys.stderr):
            output.prepare(Path(warm))
            output.begin(Path(warm))
    print(json.dumps([output.name, *strike(output, place, int(most))]))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
