"""Images on the disk that are larger than memory: from one to a zarr array."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nlflow.backends import workers as _workers
from nlflow.backends.machine import version
from nlflow.denoising import DenoiseInfo
from nlflow.denoising.large.arrays import denoised
from nlflow.denoising.options import Options
from nlflow.desk.on_disk import nodata_of, open_image, open_stack, told_axes
from nlflow.errors import FileFormatError, InputError, NlflowError, WorkerError, check_path, shortened
from nlflow.store.atomic import locked, put_folder, remove, sweep, write_folder
from nlflow.store.encoding import digest, encode, misfit
from nlflow.store.storage import load_record, save_record

__all__ = ["denoise_store", "open_image"]
Array = NDArray[Any]
_KIND = "blocks of an image"
_RECORD = ".nlflow-blocks.json"
_PATIENCE = 5.0  # seconds between two records of what is done
_SHARE = 0.01  # of the time may go into records


def partial_name(target: Path) -> Path:
    """Return the folder that is written until the result is complete."""
    return target.with_name(f"{target.name}.partial")


def denoise_store(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    sigma: Any = None,
    *,
    quality: str = "balanced",
    noise: Any = "auto",
    channel_axis: int | None = None,
    axes: str | None = None,
    spacing: Any = None,
    block: int | None = None,
    scheduler: str = "local",
    workers: int | None = None,
    existing: str = "refuse",
    progress: Callable[[int, int], Any] = lambda done, count: None,
    note: Callable[[str], Any] = lambda text: None,
    options: Options | None = None,
    **more: Any,
) -> tuple[DenoiseInfo, dict[str, Any]]:
    """Denoise an image on the disk into a zarr array, on workers of Dask.

    Blocks are written to ``<target>.partial``, which gets the name of the target when all are done. The result has the
    dtype and the units of the input.

    Parameters
    ----------
    source : path
        A zarr array or a TIFF file, as `open_image` takes them; with `axes` also a TIFF file of pages. All workers must
        find it under this path. For an array in an OME-Zarr group, axes and spacing are those that the group says,
        unless they are given.
    target : path
        The zarr array to write; workers write it under this path.
    sigma, quality, noise, channel_axis, axes, spacing, options, **more
        As `denoise_array`.
    block : int, optional
        Wanted side of the blocks, rounded up to whole chunks of the source. By default 1024 with quality ``fast`` and
        2048 with others; of volumes and clips 256 and 192.
    scheduler : str
        Address of a scheduler of Dask, such as ``tcp://10.0.0.1:8786``, or ``'local'`` for processes on this machine.
    workers : int, optional
        Number of processes on this machine, by default one for each core; not with the address of a scheduler.
    existing : {'refuse', 'overwrite', 'resume'}
        What to do if the target or its partial folder exists. ``resume`` goes on with the partial folder of an earlier
        run of the same problem; a complete target is refused.
    progress : callable
        Called as ``progress(done, count)`` with numbers of blocks.
    note : callable
        Called with each note on how the source is read, before it is.

    Returns
    -------
    info : DenoiseInfo
    counts : dict
        ``blocks``: their number; ``kept``: how many of them an earlier run has done; ``bytes`` of the result; ``axes``
        and ``spacing`` with which the source was read.

    Raises
    ------
    InputError
        For a target that exists and must stay, a scheduler that does not answer, and as `denoise_array`.
    FileFormatError
        For a source that cannot be read, a target that cannot be written, and a partial folder of another problem.
    WorkerError
        When several workers have died on one block.
    """
    source, target = (Path(os.path.realpath(check_path(*one))) for one in (("source", source), ("target", target)))
    partial = partial_name(target)
    chosen = Options.of(options, more)
    if scheduler != _workers.LOCAL and workers is not None:
        raise InputError(f"workers: got {workers} beside a scheduler, which has workers of its own; leave it out")
    _check_place(source, target, existing)
    with locked(target, "target", whole=True), ExitStack() as stack:
        whole = _tidy(partial, target, keep=existing == "resume")
        replaces = whole or _may_replace(target, existing)
        axes, spacing, notes = told_axes(source, channel_axis, axes, spacing)
        for text in notes:
            note(text)
        told = {"axes": axes, "spacing": spacing}
        image, axis, axes = open_stack(source, channel_axis, axes, block, quality)
        stack.enter_context(_workers.cluster(scheduler, workers))
        result, info, fingerprint = denoised(
            image, sigma, chosen, quality=quality, noise=noise, channel_axis=axis, axes=axes, spacing=spacing,
            nodata=nodata_of(source, image.dtype),
        )  # fmt: skip
        result = _regular(result)
        problem = digest(encode([fingerprint, str(result.dtype), result.chunks, version()]))
        if whole:  # the process was killed after its last block
            kept = len(_done_before(target, problem, result.numblocks))
        else:
            done = _begin(partial, result, {"problem": problem, "replace": replaces}, resume=existing == "resume")
            kept = len(done)
            _write_blocks(result, partial, done, progress)
            _finish(partial, target, replace=replaces)
        _tidy(partial, target)
    return info, {"blocks": math.prod(result.numblocks), "kept": kept, "bytes": int(result.nbytes), **told}


def _check_place(source: Path, target: Path, existing: str) -> None:
    if target == source or source.is_relative_to(target):
        raise InputError(f"target: got {target}, the same place as source, expected another; choose a new name")
    if target.is_relative_to(source):
        raise InputError(f"target: got {target}, a place inside source, expected one beside it; choose another")
    if existing not in ("refuse", "overwrite", "resume"):
        raise InputError(f"existing: got {existing!r}, expected 'refuse', 'overwrite' or 'resume'")
    if not target.parent.is_dir():
        raise FileFormatError(f"target: got {target} in a folder that does not exist, expected one that does; make it")


def _may_replace(target: Path, existing: str) -> bool:
    """Return whether a result may take the place of another; `InputError` where one is there that must stay."""
    partial = partial_name(target)
    begun = partial.exists()
    if begun and existing == "refuse":
        raise InputError(
            f"target: got {target}, of which an unfinished run left {partial.name}, expected none; go on "
            "with existing='resume', or overwrite it"
        )
    asked = existing == "overwrite" or (begun and existing == "resume" and _record_of(partial)["replace"])
    if target.exists() and not asked:
        raise InputError(f"target: got {target}, already there, expected a new name; choose another, or overwrite")
    for place in (target, partial):
        _check_array(place)
    return asked


def _check_array(target: Path) -> None:
    if target.exists() and not (target / "zarr.json").is_file() and not (target / ".zarray").is_file():
        raise InputError(
            f"target: got {target}, which is no zarr array, expected one to overwrite; choose another name"
        )


def _regular(result: Any) -> Any:
    """Return the result in chunks of one size (but the last of an axis), as zarr wants them."""
    # That of the first: mostly it is a last block that was joined, and is parted again.
    chunks = tuple(sizes[0] for sizes in result.chunks)
    regular = all(
        all(n == side for n in sizes[:-1]) and sizes[-1] <= side
        for sizes, side in zip(result.chunks, chunks, strict=True)
    )
    return result if regular else result.rechunk(chunks)


def _begin(partial: Path, result: Any, about: dict[str, Any], *, resume: bool) -> dict[str, str]:
    """Make the array that is written, or check the one that is there; return which blocks are done."""
    import dask
    import zarr

    if partial.exists():
        if resume:
            done = _done_before(partial, about["problem"], result.numblocks)
            look = dask.delayed(_digest_of, pure=False)
            found = dask.compute(*(look(str(partial), _slices(result, name)) for name in done))
            return {name: known for (name, known), now in zip(done.items(), found, strict=True) if known == now}
        remove(partial)

    def make(folder: Path) -> None:
        chunks = tuple(sizes[0] for sizes in result.chunks)
        zarr.create_array(folder, shape=result.shape, chunks=chunks, dtype=result.dtype, overwrite=True)
        save_record(folder / _RECORD, _KIND, {**about, "done": {}})

    write_folder(partial, make, replace=False)
    return {}


def _record_of(folder: Path) -> dict[str, Any]:
    content = load_record(folder / _RECORD, _KIND)
    if misfit(content, {"problem": str, "replace": bool, "done": dict}) is not None:
        raise _other_blocks(folder)
    return dict(content)


def _other_blocks(folder: Path) -> FileFormatError:
    return FileFormatError(
        f"{folder}: got the blocks of another image, other options or another version, expected those of "
        "this run; overwrite them, or choose another name"
    )


def _done_before(folder: Path, problem: str, blocks: tuple[int, ...]) -> dict[str, str]:
    """Return the digests of the blocks that an earlier run of this problem has done, by name."""
    content = _record_of(folder)
    if content["problem"] != problem:
        raise _other_blocks(folder)
    names = {"/".join(map(str, place)) for place in np.ndindex(blocks)}
    return {name: known for name, known in content["done"].items() if name in names and isinstance(known, str)}


def _slices(result: Any, name: str) -> tuple[slice, ...]:
    return tuple(
        slice(sum(sizes[:k]), sum(sizes[: k + 1]))
        for sizes, k in zip(result.chunks, map(int, name.split("/")), strict=True)
    )


def _digest(block: Array) -> str:
    return digest(np.ascontiguousarray(block).data)


def _digest_of(path: str, place: tuple[slice, ...]) -> str | None:
    """Return the digest of a block as it is on the disk; None for one that cannot be read."""
    import zarr

    # A block that was half written fails in any way; it is computed again.
    try:
        array: Any = zarr.open(path, mode="r")
        return _digest(np.asarray(array[place]))
    except Exception:
        return None


def _written(block: Array, path: str, place: tuple[slice, ...]) -> str:
    import zarr

    try:
        array: Any = zarr.open(path, mode="r+")
        array[place] = block
    except OSError as error:
        raise FileFormatError(
            f"{path}: got {error.strerror or error}, expected a place that can be written; free some space"
        ) from error
    return _digest(block)


def _write_blocks(result: Any, partial: Path, done: dict[str, str], progress: Callable[[int, int], Any]) -> None:
    import dask
    from distributed import KilledWorker, as_completed, default_client

    client: Any = default_client()
    blocks = np.asarray(result.to_delayed())
    later = dask.delayed(_written, pure=False)
    tasks, names = [], []
    for index in np.ndindex(*blocks.shape):
        name = "/".join(map(str, index))
        if name not in done:
            names.append(name)
            tasks.append(later(blocks[index], str(partial), _slices(result, name)))
    count = blocks.size
    progress(len(done), count)
    if not tasks:
        return
    futures = client.compute(tasks)
    del blocks, tasks  # the graph, which the scheduler has now
    name_of = {future.key: name for future, name in zip(futures, names, strict=True)}
    saved, pause, about = time.monotonic(), _PATIENCE, _record_of(partial)

    def save() -> None:
        nonlocal saved, pause
        began = time.monotonic()
        save_record(partial / _RECORD, _KIND, {**about, "done": done})
        saved = time.monotonic()
        pause = max(_PATIENCE, (saved - began) / _SHARE)

    waiting = as_completed(futures)
    del futures  # so that each is forgotten, here and on the scheduler, once it is noted
    try:
        for future in waiting:
            done[name_of[future.key]] = future.result()
            progress(len(done), count)
            if time.monotonic() - saved > pause:
                save()
    except KilledWorker as error:
        raise WorkerError(
            f"scheduler: got several deaths of workers on one block ({shortened(error)}), expected "
            "workers that live; they may lack memory: give smaller blocks. What is done is kept: resume"
        ) from error
    finally:
        with suppress(NlflowError):  # the reason that brought us here counts
            save()
        waiting.clear()


def _finish(partial: Path, target: Path, *, replace: bool) -> None:
    _check_array(target)
    sweep(partial)
    for left in partial.rglob("*.partial"):  # of a chunk that zarr was writing when its process was killed
        left.unlink(missing_ok=True)
    try:
        put_folder(partial, target, replace=replace)
    except OSError as error:
        raise FileFormatError(
            f"{target}: got {error.strerror or error}, expected a name that can be given; the blocks are in {partial}"
        ) from error


def _tidy(partial: Path, target: Path, *, keep: bool = False) -> bool:
    """Remove what a kill has left beside a result that has its record still; return whether it keeps that."""
    if not (target / _RECORD).is_file():
        return False
    if partial.exists() and not (partial / _RECORD).exists():  # what the result has replaced
        remove(partial)
    if not keep:
        (target / _RECORD).unlink()
    return keep
