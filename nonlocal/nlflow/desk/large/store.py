"""From an image on the disk to a zarr array: written block by block, complete or marked as incomplete, resumable."""

from __future__ import annotations

import math
import os
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nlflow.backends import workers as _workers
from nlflow.backends.machine import version
from nlflow.denoising import DenoiseInfo
from nlflow.denoising.large.arrays import denoised
from nlflow.denoising.options import Options
from nlflow.desk.large.sources import open_stack
from nlflow.errors import FileFormatError, InputError, NlflowError, WorkerError, shortened
from nlflow.store.atomic import sync_folder, temporary_name
from nlflow.store.encoding import digest, encode, misfit
from nlflow.store.storage import load_record, locked, save_record

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
    options: Options | None = None,
    **more: Any,
) -> tuple[DenoiseInfo, dict[str, Any]]:
    """Denoise an image on the disk into a zarr array, on workers of Dask.

    Blocks are written to ``<target>.partial``, with a record of those that are done; when all are, the folder gets its
    name. The result has the dtype and the units of the input, and its bits do not depend on the workers.

    Parameters
    ----------
    source : path
        A zarr array or a TIFF file; see `open_image`. With `axes` a TIFF file of pages too. Workers read it by this
        name.
    target : path
        The zarr array to write.
    sigma, quality, noise, channel_axis, axes, spacing, options, **more
        As `denoise_array`.
    block : int, optional
        Side of the blocks: 1024 for ``fast``, 2048 otherwise; of volumes 256 and 192. They become the chunks of the
        result. Blocks of a clip are some whole frames, of about as many samples as a cube of this side.
    scheduler : str
        Address of a scheduler of Dask, such as ``tcp://10.0.0.1:8786``, or ``'local'`` for processes on this machine.
    workers : int, optional
        How many local ones; all cores by default.
    existing : {'refuse', 'overwrite', 'resume'}
        What to do about a target that is there. ``resume`` goes on with a partial one of the same problem: blocks whose
        digest is still that of the record are not computed again.
    progress : callable
        Told how many blocks are done, and of how many.

    Returns
    -------
    info : DenoiseInfo
    counts : dict
        ``blocks`` in all, ``kept`` from before, ``bytes`` of samples.

    Raises
    ------
    InputError
        For a target that exists, a scheduler that does not answer, and as `denoise_array`.
    FileFormatError
        For a source that cannot be read, a target that cannot be written, and a partial one of another problem.
    WorkerError
        When workers keep dying on a block.
    """
    source, target = Path(os.path.realpath(source)), Path(os.path.realpath(target))
    partial = partial_name(target)
    _check_target(source, target, existing)
    chosen = Options.of(options, more)
    # A name that is no folder, before and after.
    with locked(target.with_name(f"{target.name}.writing"), "OUT"), _workers.cluster(scheduler, workers):
        image, axis, axes = open_stack(source, channel_axis, axes, block, quality)
        result, info, fingerprint = denoised(
            image, sigma, chosen, quality=quality, noise=noise, channel_axis=axis, axes=axes, spacing=spacing
        )
        result = _regular(result)
        problem = digest(encode([fingerprint, str(result.dtype), result.chunks, version()]))
        done = _begin(partial, result, problem, resume=existing == "resume")
        kept = len(done)
        _write_blocks(result, partial, problem, done, progress)
        _finish(partial, target)
    return info, {"blocks": math.prod(result.numblocks), "kept": kept, "bytes": int(result.nbytes)}


def _check_target(source: Path, target: Path, existing: str) -> None:
    if target == source or source.is_relative_to(target):
        raise InputError(f"OUT: got {target}, the same place as IN, expected another; choose a new name")
    if existing not in ("refuse", "overwrite", "resume"):
        raise InputError(f"existing: got {existing!r}, expected 'refuse', 'overwrite' or 'resume'")
    if target.exists() and existing != "overwrite":
        raise InputError(f"OUT: got {target}, already there, expected a new name; choose another, or overwrite")
    if target.exists() and not (target / "zarr.json").is_file() and not (target / ".zarray").is_file():
        raise InputError(f"OUT: got {target}, which is no zarr array, expected one to overwrite; choose another name")
    if not target.parent.is_dir():
        raise FileFormatError(f"OUT: got {target} in a folder that does not exist, expected one that does; make it")
    if partial_name(target).exists() and existing == "refuse":
        raise InputError(
            f"OUT: got {target}, of which an unfinished run left {partial_name(target).name}, expected none; go on "
            "with existing='resume', or overwrite it"
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


def _begin(partial: Path, result: Any, problem: str, *, resume: bool) -> dict[str, str]:
    """Make the array that is written, or check the one that is there; return which blocks are done."""
    import dask
    import zarr

    if partial.exists():
        if resume:
            done = _done_before(partial, problem, result.numblocks)
            look = dask.delayed(_digest_of, pure=False)
            found = dask.compute(*(look(str(partial), _slices(result, name)) for name in done))
            return {name: known for (name, known), now in zip(done.items(), found, strict=True) if known == now}
        shutil.rmtree(partial)
    try:
        zarr.create_array(
            partial, shape=result.shape, chunks=tuple(sizes[0] for sizes in result.chunks), dtype=result.dtype
        )
    except OSError as error:
        raise FileFormatError(
            f"{partial}: got {error.strerror or error}, expected a folder that can be made; choose another place"
        ) from error
    save_record(partial / _RECORD, _KIND, {"problem": problem, "done": {}})
    return {}


def _done_before(partial: Path, problem: str, blocks: tuple[int, ...]) -> dict[str, str]:
    """Return the digests of the blocks that an earlier run of this problem has done, by name."""
    content = load_record(partial / _RECORD, _KIND)
    if misfit(content, {"problem": str, "done": dict}) is not None or content["problem"] != problem:
        raise FileFormatError(
            f"{partial}: got the blocks of another image, other options or another version, expected those of "
            "this run; overwrite them, or choose another name"
        )
    names = {"/".join(map(str, place)) for place in np.ndindex(blocks)}
    return {name: known for name, known in content["done"].items() if name in names and isinstance(known, str)}


def _slices(result: Any, name: str) -> tuple[slice, ...]:
    """Return where the block of a name such as ``3/17`` lies."""
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
    """Write a block and return its digest."""
    import zarr

    try:
        array: Any = zarr.open(path, mode="r+")
        array[place] = block
    except OSError as error:
        raise FileFormatError(
            f"{path}: got {error.strerror or error}, expected a place that can be written; free some space"
        ) from error
    return _digest(block)


def _write_blocks(
    result: Any, partial: Path, problem: str, done: dict[str, str], progress: Callable[[int, int], Any]
) -> None:
    """Compute and write the blocks that are not done, noting those that are."""
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
    saved, pause = time.monotonic(), _PATIENCE

    def save() -> None:
        nonlocal saved, pause
        began = time.monotonic()
        save_record(partial / _RECORD, _KIND, {"problem": problem, "done": done})
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


def _finish(partial: Path, target: Path) -> None:
    """Give the complete array its name."""
    try:
        old = temporary_name(target) if target.exists() else None
        if old is not None:
            target.replace(old)
        partial.replace(target)
        (target / _RECORD).unlink()  # now, so that a partial one can always be gone on with
        if old is not None:
            shutil.rmtree(old)
        sync_folder(target.parent)
    except OSError as error:
        raise FileFormatError(
            f"{target}: got {error.strerror or error}, expected a name that can be given; the blocks are in {partial}"
        ) from error
