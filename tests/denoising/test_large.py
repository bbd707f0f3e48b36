"""Denoising in blocks: the bits of the whole image, whatever the blocks, the workers and what befalls them."""

from __future__ import annotations

import json
import math
import os
import pickle
import re
import signal
import sys
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import dask
import dask.array as da
import numpy as np
import pytest
import tifffile
import zarr
from distributed import Client, LocalCluster

from nlflow import FileFormatError, Grid, InputError, MemoryLimitError, NlflowWarning, Patch, affinity, denoise
from nlflow.denoising.groupwise import PRESETS
from nlflow.denoising.large import denoise_array
from nlflow.denoising.large.survey import Blocks, estimated, surveyed
from nlflow.denoising.noise import GaussianNoise, Speckle, estimate_sigma
from nlflow.desk import large as storing
from nlflow.desk.large import denoise_store, open_image
from nlflow.domains.samples import exact_means, exact_sums, mean_of_sums
from nlflow.errors import WorkerError
from tests.commands import fails, run
from tests.pictures import SMALL, Floats, noisy, waves

GREY = noisy(120 + 60 * waves(150, 137), 20.0)
BYTES = np.clip(np.rint(GREY), 0, 255).astype(np.uint8)
COLOUR = np.stack([GREY, GREY[::-1], GREY[:, ::-1]], axis=-1)
COUNTS = np.random.default_rng(1).poisson(6 + 4 * waves(150, 137)).astype(np.uint16)
SIGNAL = noisy(5 * np.sin(np.arange(3000) / 40), 1.0)
FIVE = noisy(np.stack([(c + 1) * 30 * waves(150, 137) for c in range(5)]), 20.0, seed=4)


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Blocks of this process, one after the other, with groups that are quickly found."""
    monkeypatch.setitem(PRESETS, "balanced", SMALL)
    with dask.config.set(scheduler="synchronous"):
        yield


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    """Two workers, processes of their own."""
    with LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address="127.0.0.1:0") as found:
        yield found


def in_memory(image: Floats, *given: Any, **options: Any) -> Floats:
    """Return the result of the whole image in the dtype of the input."""
    result = denoise(image, *given, preserve_range=True, **options)
    if image.dtype.kind == "f":
        return result.astype(image.dtype)
    limits = np.iinfo(image.dtype)
    return np.clip(np.rint(result), limits.min, limits.max).astype(image.dtype)


# ---- the same bits

CASES: dict[str, tuple[Any, Any, Any, dict[str, Any]]] = {
    "double": (GREY, (64, 50), 20.0, {}),
    "single": (GREY.astype(np.float32), (70, 137), 20.0, {}),
    "half": (GREY.astype(np.float16), (75, 60), 20.0, {}),
    "bytes, sigma estimated": (BYTES, (60, 71), None, {"noise": "white"}),
    "wide integers": ((GREY * 1e6).astype(np.int64), (64, 50), 2e7, {}),
    "colour": (COLOUR.astype(np.float32), (75, 60, 2), 20.0, {"channel_axis": -1}),
    "one sigma a channel": (
        np.moveaxis(COLOUR, -1, 0),
        (1, 75, 60),
        [20.0, 0.0, 10.0],
        {"channel_axis": 0, "steps": 2},
    ),
    "five channels": (FIVE, (5, 75, 70), 20.0, {"channel_axis": 0}),
    "counts": (COUNTS, (75, 137), None, {"noise": "poisson"}),
    "signal": (SIGNAL, (700,), 1.0, {}),
    "constant": (np.full((90, 80), 7, np.uint8), (40, 40), 20.0, {}),
    "no noise": (BYTES, (64, 50), 0.0, {}),
}


RARE = ("double", "half", "wide integers", "one sigma a channel")  # whose slow cases hold what others do


# Each case in one quality; in the other it is slow.
@pytest.mark.parametrize(
    ("case", "quality"),
    [
        pytest.param(case, quality, marks=pytest.mark.slow if (number + turn) % 2 or case in RARE else [])
        for number, case in enumerate(CASES)
        for turn, quality in enumerate(["pixels", "balanced"])
    ],
)
@pytest.mark.sampled(3)
@pytest.mark.filterwarnings("ignore:image. blocks of")  # that small ones are joined
def test_blocks_have_the_bits_of_the_whole(case: str, quality: str):
    image, chunks, sigma, options = CASES[case]
    options = {"quality": quality, **options}
    if quality != "pixels":  # its own choice of steps would be a flow of ten
        options.pop("steps", None)
    result, info = denoise_array(da.from_array(image, chunks=chunks), sigma, return_info=True, **options)
    _, told = denoise(image, sigma, return_info=True, **options)
    assert (result.dtype, result.shape) == (image.dtype, image.shape)
    expected = in_memory(image, sigma, **options)
    if case == "five channels" and quality != "pixels":
        # Principal axes are sums over the whole, in which threads of BLAS meet in any order: they hold to rounding, and
        # so do samples of single precision, whose last digit is 1e-6 of the range.
        np.testing.assert_allclose(result.compute(), expected, rtol=0, atol=1e-5 * float(np.ptp(expected)))
    else:
        np.testing.assert_array_equal(result.compute(), expected)
    assert info.tiles > 1
    assert info.sigma == pytest.approx(told.sigma, rel=1e-12)  # products of matrices of other sizes
    for name in ("sigma_estimated", "steps", "noise", "quality", "functional"):
        assert getattr(info, name) == getattr(told, name), name
    assert info.parameters.items() <= told.parameters.items()
    assert math.isnan(info.residual)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:image. blocks of")  # that small ones are joined
@pytest.mark.parametrize("chunks", [(37, 41), ((31, 60, 59), (137,)), ((20, 130), (100, 37))])
def test_any_blocks_will_do(chunks: Any):
    result = denoise_array(da.from_array(BYTES, chunks=chunks), 20.0, quality="pixels", steps=1)
    np.testing.assert_array_equal(result.compute(), in_memory(BYTES, 20.0, quality="pixels", steps=1))


@pytest.mark.slow
def test_blocks_smaller_than_the_halo_are_joined():
    with pytest.warns(NlflowWarning, match="blocks of 5 samples are smaller than the halo of 42 and are joined"):
        result = denoise_array(da.from_array(BYTES, chunks=(9, 5)), 20.0, quality="pixels", steps=1)
    assert min(min(sizes) for sizes in result.chunks) >= 16
    np.testing.assert_array_equal(result.compute(), in_memory(BYTES, 20.0, quality="pixels", steps=1))


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"steps": 3},
        {"width": 2.0},
        {"fidelity": 1.2},  # the residual of the first step is not enough yet
        {"patch_size": 5, "search_radius": 3, "fidelity": 0.3},
        {"patch_size": 7, "search_radius": 2, "width": 4.0},
    ],
)
@pytest.mark.sampled(2)
def test_the_whole_image_decides_how_many_steps_are_taken(options: dict[str, Any]):
    image = da.from_array(GREY, chunks=(100, 90))
    result, info = denoise_array(image, 20.0, quality="pixels", return_info=True, **options)
    _, told = denoise(GREY, 20.0, quality="pixels", return_info=True, **options)
    assert info.steps == told.steps
    np.testing.assert_array_equal(result.compute(), denoise(GREY, 20.0, quality="pixels", **options))


def test_the_halo_is_as_wide_as_it_must_be(monkeypatch: pytest.MonkeyPatch):
    """A halo that is three samples narrower leaves seams, so the tests above would see them."""
    from nlflow.denoising import frame, pixelwise

    reach = pixelwise.reach
    monkeypatch.setattr(frame, "REACH", 0)  # of what is given back to isolated peaks, of which there are none
    monkeypatch.setattr(pixelwise, "reach", lambda kernel, steps: reach(kernel, steps) - 3)
    result = denoise_array(da.from_array(GREY, chunks=(64, 50)), 20.0, quality="pixels", steps=1)
    assert (result.compute() != denoise(GREY, 20.0, quality="pixels", steps=1)).any()


@pytest.mark.parametrize("quality", ["pixels", pytest.param("balanced", marks=pytest.mark.slow)])
def test_a_constant_channel_counts_as_none(quality: str) -> None:
    """An opaque alpha channel decides neither groups nor noise, in blocks as in memory."""
    image = np.concatenate([COLOUR[:60, :90], np.full((60, 90, 1), 255.0)], axis=-1).astype(np.float32)
    blocks = da.from_array(image, chunks=(60, 45, 4))
    for sigma in (20.0, (20.0, 20.0, 20.0, 5.0)):
        result = denoise_array(blocks, sigma, quality=quality, channel_axis=-1).compute()
        np.testing.assert_array_equal(result, denoise(image, sigma, quality=quality, channel_axis=-1))
        np.testing.assert_array_equal(result[..., :3], denoise(image[..., :3], 20.0, quality=quality, channel_axis=-1))
    estimated = denoise_array(blocks, noise="white", quality=quality, channel_axis=-1, return_info=True)[1]
    assert estimated.sigma == pytest.approx(20, rel=0.1)


def test_a_strength_that_leaves_nothing_is_told() -> None:
    with pytest.warns(NlflowWarning, match="strength: got 1000, with which the noise is"):
        denoise_array(da.from_array(GREY[:40, :40]), 20.0, strength=1000, quality="pixels", steps=1)


def test_options_that_need_the_whole_are_refused() -> None:
    for word in ({"separate": True}, {"stopping": "sure"}, {"device": "auto"}):
        with pytest.raises(InputError, match=rf"{next(iter(word))}: got .* for an array in blocks"):
            denoise_array(da.from_array(GREY), 20.0, **word)


def test_nothing_is_denoised_before_it_is_asked_for(monkeypatch: pytest.MonkeyPatch):
    from nlflow.denoising.large import arrays

    calls: list[int] = []
    estimate = arrays._estimate
    monkeypatch.setattr(arrays, "_estimate", lambda *words: calls.append(1) or estimate(*words))
    image = da.from_array(BYTES, chunks=(50, 50))
    result = denoise_array(image, 20.0, quality="pixels", steps=1)
    assert not calls
    result[:10, :10].compute()
    assert len(calls) == 1
    calls.clear()
    denoise_array(image, 20.0, quality="pixels")  # looks after how many steps the flow stops
    assert 0 < len(calls) <= 9


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(150, 137), (3000,), (1, 700), (10, 9)])
@pytest.mark.parametrize("kind", ["plain", "clipped", "filled in"])
def test_the_estimate_of_the_noise_is_that_of_the_whole(kind: str, shape: tuple[int, ...]):
    image = np.random.default_rng(2).normal(100, 20, shape)
    if kind == "clipped":
        image = np.clip(np.rint(2 * image), 0, 255)
    if kind == "filled in":
        image[tuple(slice(0, n // 3 + 1) for n in shape)] = 5
    blocks = Blocks(da.from_array(image, chunks=tuple(-(-n // 3) for n in shape)), None)
    found, known, _ = surveyed(blocks, None)
    assert estimated(blocks, found, known) == pytest.approx(estimate_sigma(image), rel=1e-12)


# ---- what makes the bits the same


def test_sums_are_exact_in_any_order(rng: np.random.Generator):
    values = rng.normal(size=(5000, 2)) * 10.0 ** rng.integers(-300, 300, (5000, 2))
    values[:3] = [[1e308, 5e-324], [1e308, -5e-324], [-1e308, 0]]
    expected = [sum(map(Fraction, values[:, c].tolist())) for c in range(2)]
    sums = exact_sums(values)
    assert [Fraction(total, 2**1126) for total in sums] == expected
    parts = [exact_sums(part) for part in np.split(rng.permutation(values), [7, 4000])]
    assert [sum(column) for column in zip(*parts, strict=True)] == sums
    assert mean_of_sums(sums, 5000).tolist() == [float(total / 5000) for total in expected]
    assert exact_means(BYTES[..., None]).item() == BYTES.mean(dtype=np.float64)


@pytest.mark.parametrize("patch_size", [1, 3, 5, 7, 9])
@pytest.mark.parametrize("tokens", ["patch", "pixel"])
def test_weights_have_the_same_bits_stored_or_not_and_in_parts(patch_size: int, tokens: Any, rng: np.random.Generator):
    u = rng.normal(size=(90, 70)).astype(np.float32)
    kernel = Patch(1.0, patch_size=patch_size, search_radius=3, tokens=tokens)
    stored = affinity(kernel, Grid(u.shape), u).average(u)
    np.testing.assert_array_equal(affinity(kernel, Grid(u.shape), u, store=False).average(u), stored)
    around = 3 + 2 * (patch_size // 2)
    part = u[41 - around : 60 + around, 33 - around : 50 + around]
    for store in (True, False):
        found = affinity(kernel, Grid(part.shape), part, store=store).average(part)
        np.testing.assert_array_equal(found[around:-around, around:-around], stored[41:60, 33:50])


@pytest.mark.slow
@pytest.mark.parametrize("layer", ["default", "workqueue"])
def test_loops_of_many_threads_at_once(layer: str, monkeypatch: pytest.MonkeyPatch):
    """With Numba's own pool, which must not be entered twice, blocks wait for each other; see test_threads."""
    monkeypatch.setattr("numba.config.THREADING_LAYER", layer)
    with dask.config.set(scheduler="threads", num_workers=4):
        result = denoise_array(da.from_array(GREY, chunks=(50, 50)), 20.0, quality="pixels", steps=1).compute()
    np.testing.assert_array_equal(result, denoise(GREY, 20.0, quality="pixels", steps=1))


@pytest.mark.slow
def test_noise_is_white_and_as_strong_as_asked_for():
    lazy = da.from_array(GREY, chunks=(70, 80))
    expected = denoise(GREY, noise="white", strength=1.5, quality="pixels", steps=1, preserve_range=True)
    for noise in ("auto", "white"):
        result = denoise_array(lazy, noise=noise, strength=1.5, quality="pixels", steps=1)
        np.testing.assert_allclose(result.compute(), expected, rtol=1e-6)  # sigma is a mean, to rounding the same
    twice = denoise_array(lazy, 10.0, strength=2.0, quality="pixels", steps=1)
    np.testing.assert_array_equal(twice.compute(), denoise(GREY, 20.0, quality="pixels", steps=1))


# ---- what is refused


@pytest.mark.parametrize(
    ("image", "options", "message"),
    [
        (GREY, {}, "image: got ndarray, expected a dask.array.Array; use nlflow.denoise"),
        (da.from_array(GREY > 3), {}, "image: got dtype bool, expected integers or floats"),
        (da.from_array(GREY + 0j), {}, "image: got dtype complex128"),
        (da.from_array(COLOUR), {}, "is the last axis colour"),
        (da.zeros((0, 4)), {}, "image: got an empty array"),
        (da.from_array(GREY)[da.from_array(GREY[:, 0]) > 100], {}, "image: got chunks of unknown sizes"),
        (da.from_array(GREY), {"sigma": -1}, "sigma: got -1, expected"),
        (da.from_array(GREY), {"sigma": GREY}, "noise that varies in space is left to nlflow.denoise"),
        (da.from_array(COLOUR), {"sigma": [1, 2, -3], "channel_axis": 2}, "sigma: got -3"),
        (da.from_array(GREY), {"quality": "good"}, "quality: got 'good'"),
        (da.from_array(GREY), {"steps": 3}, "steps: only quality='pixels' has it"),
        (da.from_array(GREY), {"channel_axis": 5}, "channel_axis: got 5"),
        (da.from_array(GREY), {"noise": "poisson", "sigma": 3.0}, "sigma: got a value with noise='poisson'"),
        (da.from_array(GREY), {"noise": "poisson", "strength": 2.0}, "strength: got 2 with counts"),
        (da.from_array(GREY), {"noise": "gaussian"}, "noise: got 'gaussian', expected one of 'auto', 'white'"),
        (da.from_array(GREY), {"noise": GaussianNoise(3.0)}, "noise: got GaussianNoise for an array in blocks"),
        (da.from_array(GREY), {"noise": Speckle(4.0)}, "noise: got Speckle for an array in blocks"),
        (da.from_array(GREY), {"strength": -1}, "strength: got -1"),
        (da.from_array(GREY), {"max_memory": 0}, "max_memory: got 0"),
        (da.from_array(np.where(GREY > 200, np.inf, GREY)), {}, "x)) (in the block that begins at"),  # no mask
    ],
)
def test_bad_arguments_are_named(image: Any, options: dict[str, Any], message: str):
    with pytest.raises(InputError, match=re.escape(message)):
        denoise_array(image, **options)


def test_a_block_that_does_not_fit_is_refused_before_it_is_computed():
    with pytest.raises(
        MemoryLimitError, match=r"largest block, of 150 x 137 samples with a halo of 42,.*smaller chunks"
    ):
        denoise_array(da.from_array(GREY), 20.0, quality="pixels", max_memory=1e5, steps=1)


def test_without_dask(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "dask.array", None)
    with pytest.raises(InputError, match=r"pip install 'nlflow\[distributed\]'"):
        denoise_array(None)


def test_counts_that_a_whole_sums_in_cells_are_told():
    few = np.random.default_rng(0).poisson(1.9, (70, 80)).astype(np.uint16)
    with pytest.warns(NlflowWarning, match=r"noise: got 1\.9 counts a sample .* their result is another one"):
        denoise_array(da.from_array(few, chunks=(70, 80)), noise="poisson", quality="fast")
    more = few + np.uint16(1)
    denoise_array(da.from_array(more, chunks=(70, 80)), noise="poisson", quality="fast")  # warnings are errors


# ---- workers


@pytest.mark.slow
def test_errors_of_workers_are_those_of_the_package(cluster: LocalCluster):
    with Client(cluster), pytest.raises(InputError, match="below offset=0"):
        denoise_array(da.from_array(GREY - 200, chunks=(50, 50)), noise="poisson", quality="pixels")


@pytest.mark.slow
def test_a_killed_worker_changes_nothing(cluster: LocalCluster, tmp_path: Path):
    image = np.tile(BYTES, (3, 3))
    source = write(tmp_path / "in.zarr", image, 90)
    killed: list[int] = []
    with Client(cluster) as client:
        workers = list(client.run(os.getpid).values())
        assert os.getpid() not in workers

        def kill(done: int, count: int) -> None:
            if 3 <= done < count // 2 and not killed:
                os.kill(workers[0], signal.SIGKILL)
                killed.append(done)

        info, counts = denoise_store(
            source, tmp_path / "out.zarr", 20.0, quality="pixels", steps=1, block=90,
            scheduler=client.scheduler.address,
            progress=kill,
        )  # fmt: skip
    assert killed
    assert counts["blocks"] == info.tiles == 5 * 5
    np.testing.assert_array_equal(read(tmp_path / "out.zarr"), in_memory(image, 20.0, quality="pixels", steps=1))


@pytest.mark.slow
def test_a_block_that_kills_every_worker_is_an_error(cluster: LocalCluster, tmp_path: Path, monkeypatch: Any):
    source = write(tmp_path / "in.zarr", BYTES, 50)
    target = tmp_path / "out.zarr"
    with Client(cluster) as client, monkeypatch.context() as patch:
        patch.setattr(storing, "_written", _fatal)
        client.run_on_scheduler(_less_patient)
        with pytest.raises(WorkerError, match="several deaths of workers on one block"):
            denoise_store(source, target, 20.0, quality="pixels", block=50, scheduler=client.scheduler.address)
    assert not target.exists()
    assert storing.partial_name(target).is_dir()


def _less_patient(dask_scheduler: Any) -> None:
    dask_scheduler.allowed_failures = 0


def _fatal(*words: Any) -> str:
    os.kill(os.getpid(), signal.SIGKILL)
    return ""


# ---- from disk to disk


def write(path: Path, image: Floats, chunk: int, **words: Any) -> Path:
    array: Any = zarr.create_array(path, shape=image.shape, chunks=(chunk,) * image.ndim, dtype=image.dtype, **words)
    array[:] = image
    return path


def read(path: Path) -> Any:
    array: Any = zarr.open(path, mode="r")
    return np.asarray(array[:])


def test_compressed_tiff_files(tmp_path: Path):
    image = np.clip(GREY, 0, 255).astype(np.uint8)
    for compression in ("lzw", "zstd"):
        tifffile.imwrite(tmp_path / "a.tif", image, compression=compression, tile=(64, 64))
        found, _ = open_image(tmp_path / "a.tif", block=64)
        np.testing.assert_array_equal(found.compute(), image)
    tifffile.imwrite(tmp_path / "a.tif", image, compression="lerc")
    with pytest.raises(FileFormatError, match="save it uncompressed, or with LZW"):
        open_image(tmp_path / "a.tif", block=64)


@pytest.fixture
def local(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that are threads of this process."""
    from contextlib import contextmanager

    @contextmanager
    def threads(scheduler: str, jobs: int | None) -> Iterator[None]:
        with Client(processes=False, n_workers=1, threads_per_worker=2, dashboard_address="127.0.0.1:0"):
            yield

    monkeypatch.setattr(storing._workers, "cluster", threads)


@pytest.mark.parametrize(
    "form",
    [
        "zarr",
        "tiff in tiles",
        *(
            pytest.param(one, marks=pytest.mark.slow)
            for one in ("zarr of version 2", "tiff", "tiff in colour", "planes apart")
        ),
    ],
)
@pytest.mark.usefixtures("local")
@pytest.mark.sampled(2)
def test_files_of_every_kind(form: str, tmp_path: Path):
    image, options, axis = BYTES, {}, None
    source = tmp_path / ("in.zarr" if form.startswith("zarr") else "in.tif")
    if form.startswith("zarr"):
        write(source, image, 40, zarr_format=2 if "2" in form else 3)
    elif form == "tiff":
        tifffile.imwrite(source, image, rowsperstrip=16)
    elif form == "tiff in tiles":
        tifffile.imwrite(source, image, tile=(64, 64), compression="zlib")
    else:
        image, axis = np.clip(np.rint(COLOUR), 0, 255).astype(np.uint8), -1
        if form == "planes apart":
            image, axis = np.ascontiguousarray(np.moveaxis(image, -1, 0)), 0
        options = {"planarconfig": "separate" if axis == 0 else "contig"}
        tifffile.imwrite(source, image, photometric="rgb", tile=(64, 64), **options)
    info, counts = denoise_store(source, tmp_path / "out.zarr", 20.0, quality="pixels", steps=1, block=60)
    expected = in_memory(image, 20.0, quality="pixels", steps=1, channel_axis=axis)
    np.testing.assert_array_equal(read(tmp_path / "out.zarr"), expected)
    assert info.tiles > 1
    assert (counts["kept"], counts["bytes"]) == (0, image.nbytes)
    assert (
        sorted(path.name for path in tmp_path.iterdir() if not path.name.startswith("."))
        == [source.name, "out.zarr"][:: 1 if source.name < "out.zarr" else -1]
    )


@pytest.mark.slow
@pytest.mark.usefixtures("local")
def test_an_ended_run_goes_on(tmp_path: Path):
    source, target = write(tmp_path / "in.zarr", BYTES, 50), tmp_path / "out.zarr"
    partial = storing.partial_name(target)
    options: dict[str, Any] = {"quality": "pixels", "steps": 1, "block": 50}

    def stop(done: int, count: int) -> None:
        if done == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        denoise_store(source, target, 20.0, progress=stop, **options)
    assert not target.exists()
    with pytest.raises(InputError, match=r"an unfinished run left out\.zarr\.partial"):
        denoise_store(source, target, 20.0, **options)
    with pytest.raises(FileFormatError, match="blocks of another image, other options or another version"):
        denoise_store(source, target, 21.0, existing="resume", **options)
    record = json.loads((partial / ".nlflow-blocks.json").read_text())
    done = sorted(record["content"]["done"])
    assert len(done) == 4
    # One of the four is damaged since, as after a loss of power: it is computed again.
    (partial / "c" / done[0]).write_bytes(b"")
    _, counts = denoise_store(source, target, 20.0, existing="resume", **options)
    assert (counts["blocks"], counts["kept"]) == (9, 3)
    np.testing.assert_array_equal(read(target), in_memory(BYTES, 20.0, quality="pixels", steps=1))
    assert not partial.exists()
    with pytest.raises(InputError, match=r"^target: got .*, already there"):
        denoise_store(source, target, 20.0, **options)
    denoise_store(source, target, 10.0, existing="overwrite", **options)
    np.testing.assert_array_equal(read(target), in_memory(BYTES, 10.0, quality="pixels", steps=1))
    partial.mkdir()
    (partial / "holiday.txt").write_text("sun")
    with pytest.raises(InputError, match=r"out\.zarr\.partial, which is no zarr array"):
        denoise_store(source, target, 20.0, existing="overwrite", **options)
    assert (partial / "holiday.txt").read_text() == "sun"


@pytest.mark.usefixtures("local")
def test_a_resumed_run_knows_its_image(tmp_path: Path):
    """Two samples of one block change places with two of another: the whole has the same sums, the blocks have not."""
    source, target = write(tmp_path / "in.zarr", BYTES, 50), tmp_path / "out.zarr"

    def stop(done: int, count: int) -> None:
        if done:
            raise KeyboardInterrupt

    options: dict[str, Any] = {"quality": "pixels", "steps": 1, "block": 50}
    with pytest.raises(KeyboardInterrupt):
        denoise_store(source, target, 20.0, progress=stop, **options)
    array: Any = zarr.open(source, mode="r+")
    array[3, 3], array[140, 130] = BYTES[140, 130], BYTES[3, 3]
    assert BYTES[3, 3] != BYTES[140, 130]
    with pytest.raises(FileFormatError, match="blocks of another image"):
        denoise_store(source, target, 20.0, existing="resume", **options)


def test_what_a_kill_left_beside_a_complete_store_is_removed(tmp_path: Path):
    """After the exchange of names the old store has that of the partial one, and the record lies in the new one."""
    partial, target = tmp_path / "out.zarr.partial", tmp_path / "out.zarr"
    for keep in (True, False):
        for folder in (partial, target):
            folder.mkdir(exist_ok=True)
        record = target / storing._RECORD
        record.write_text("")
        assert storing._tidy(partial, target, keep=keep) is keep
        assert (partial.exists(), record.exists()) == (False, keep)
    assert not storing._tidy(partial, target)
    partial.mkdir()
    record.write_text("")
    (partial / storing._RECORD).write_text("")  # of a later run
    storing._tidy(partial, target)
    assert partial.exists()


def test_half_a_chunk_and_half_a_record_are_no_part_of_a_store(tmp_path: Path):
    partial = tmp_path / "out.zarr.partial"
    for name in ("c/0/0", "c/0/1.2f1e.partial", ".nlflow-1234-0.tmp"):
        (partial / name).parent.mkdir(parents=True, exist_ok=True)
        (partial / name).write_text("")
    storing._finish(partial, tmp_path / "out.zarr", replace=False)
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["0"]


def test_a_tiff_file_tells_its_channels(tmp_path: Path):
    colours = np.zeros((20, 30, 3), np.uint8)
    tifffile.imwrite(tmp_path / "a.tif", colours, photometric="rgb")
    for axis in (None, 2, -1):
        assert open_image(tmp_path / "a.tif", channel_axis=axis)[1] == 2
    with pytest.raises(InputError, match=r"channel_axis: got 0 for .*a.tif, which has its channels along axis 2"):
        open_image(tmp_path / "a.tif", channel_axis=0)
    tifffile.imwrite(tmp_path / "b.tif", colours[..., 0])
    with pytest.raises(InputError, match=r"channel_axis: got 0 for .*b.tif, which has no channels"):
        open_image(tmp_path / "b.tif", channel_axis=0)


def test_files_that_are_refused(tmp_path: Path):
    with pytest.raises(FileFormatError, match="no such file"):
        open_image(tmp_path / "none.zarr")
    with pytest.raises(InputError, match="path: got None, expected the path of a file"):
        open_image(None)
    write(tmp_path / "in.zarr", BYTES, 20)
    with pytest.raises(InputError, match="block: got -1, expected an integer >= 1"):
        open_image(tmp_path / "in.zarr", block=-1)
    for words, reason in (
        ({"scheduler": None}, "scheduler: got None"),
        ({"workers": 0}, "workers: got 0"),
        ({"scheduler": "tcp://127.0.0.1:1", "workers": 2}, "workers: got 2 beside a scheduler"),
    ):
        with pytest.raises(InputError, match=reason):
            denoise_store(tmp_path / "in.zarr", tmp_path / "out.zarr", **words)
    with pytest.raises(InputError, match=r"^target: got .*, a place inside source"):
        denoise_store(tmp_path / "in.zarr", tmp_path / "in.zarr" / "out.zarr")
    (tmp_path / "empty.zarr").mkdir()
    (tmp_path / "bad.zarr").mkdir()
    (tmp_path / "bad.zarr" / "zarr.json").write_text("{")
    (tmp_path / "bad.tif").write_bytes(b"II*\0nothing")
    for name in ("empty.zarr", "bad.zarr", "bad.tif"):
        with pytest.raises(FileFormatError, match=f"{name}: got no"):
            open_image(tmp_path / name)
    group: Any = zarr.create_group(tmp_path / "group.zarr")
    group.create_array("scale0", shape=(4, 4), dtype="u1")
    with pytest.raises(FileFormatError, match=r"a zarr group \(arrays in it: scale0"):
        open_image(tmp_path / "group.zarr")
    assert open_image(tmp_path / "group.zarr" / "scale0")[0].shape == (4, 4)
    tifffile.imwrite(tmp_path / "pages.tif", np.zeros((3, 20, 30), np.uint8), photometric="minisblack")
    tifffile.imwrite(tmp_path / "white.tif", BYTES, photometric="miniswhite")
    for name in ("pages.tif", "white.tif"):
        with pytest.raises(FileFormatError, match="expected one grey or RGB image"):
            open_image(tmp_path / name)
    np.save(tmp_path / "in.npy", BYTES)
    with pytest.raises(FileFormatError, match="a file of another format"):
        open_image(tmp_path / "in.npy")
    write(tmp_path / "four.zarr", np.zeros((2, 2, 2, 2)), 2)
    with pytest.raises(FileFormatError, match="expected one to three axes"):
        open_image(tmp_path / "four.zarr")
    write(tmp_path / "complex.zarr", np.zeros((2, 2), complex), 2)
    with pytest.raises(FileFormatError, match="got values of complex128"):
        open_image(tmp_path / "complex.zarr")


@pytest.mark.parametrize("place", [{"filters": [{"id": "pickle"}]}, {"compressor": {"id": "pickle"}}])
@pytest.mark.parametrize("dtype", ["|u1", "|O"])
def test_what_is_pickled_in_a_block_is_not_run(place: dict[str, Any], dtype: str, tmp_path: Path):
    """With the codec of numcodecs that unpickles: zarr refuses it for numbers, and objects are no image."""
    source = hostile(tmp_path, {**place, "dtype": dtype, "fill_value": 0})
    with pytest.raises(FileFormatError, match=r"in\.zarr: got"):
        open_image(source)
    assert not (tmp_path / "ran").exists()


def test_codecs_that_are_not_known_are_refused(tmp_path: Path):
    with pytest.raises(FileFormatError, match=r"got the codec\(s\) base64, expected those that only turn bytes"):
        open_image(hostile(tmp_path, {"filters": [{"id": "base64"}]}))


def hostile(folder: Path, about: dict[str, Any]) -> Path:
    source = write(folder / "in.zarr", np.zeros((20, 20), np.uint8), 20, zarr_format=2, compressors=None, filters=None)
    told = json.loads((source / ".zarray").read_text())
    (source / ".zarray").write_text(json.dumps({**told, **about}))
    (source / "0.0").write_bytes(pickle.dumps(_Hostile(folder / "ran")))
    return source


class _Hostile:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


@pytest.mark.slow
@pytest.mark.usefixtures("local")
def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    write(Path("in.zarr"), BYTES, 50)
    given = ("denoise", "in.zarr", "out.zarr", "--sigma", "20", "--quality", "pixels", "--steps", "1", "--block", "50")
    report = json.loads(run(*given, "--json").stdout)
    assert (report["blocks"], report["kept"], report["sigma_given"]) == (9, 0, 20.0)
    np.testing.assert_array_equal(read(Path("out.zarr")), in_memory(BYTES, 20.0, quality="pixels", steps=1))
    assert "OUT: got" in fails(*given)
    shown = run(*given, "--existing", "overwrite").stdout
    assert "20 (given)" in shown
    assert run(*given, "--existing", "overwrite", "--quiet").stdout == ""
    for words, message in (
        (("--mask", "nan"), "--mask"),
        (("--existing", "skip"), "got skip"),
        (("--stopping", "sure"), "stopping"),
    ):
        assert message in run(*given, *words, code=2).stderr
    assert "for an OUT that ends in .zarr" in run("denoise", "in.npy", "out.npy", "--scheduler", "local", code=2).stderr


def test_a_tiff_file_of_int64_has_the_dtype_that_zarr_knows(tmp_path: Path) -> None:
    tifffile.imwrite(tmp_path / "in.tif", np.zeros((40, 40), np.int64))
    assert open_image(tmp_path / "in.tif")[0].dtype.char == np.dtype(np.int64).char


def test_an_array_of_too_many_blocks_is_refused(tmp_path: Path) -> None:
    zarr.create_array(tmp_path / "a.zarr", shape=(10**9, 10**9), chunks=(10, 10), dtype="u1")
    with pytest.raises(
        FileFormatError, match=r"a\.zarr: got an array of shape .*, which is \d{12} blocks, expected at most 1000000"
    ):
        open_image(tmp_path / "a.zarr")
