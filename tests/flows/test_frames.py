"""Files that grow while a run goes on: whole frames at any moment, and a resumed run goes on with them."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nlflow as nl
from benchmarks.resident import traced
from nlflow.errors import FileFormatError, InputError
from nlflow.store.series import base as series_base
from tests.problems import Floats, stop_after

EULER = nl.ExplicitEuler(0.25)
PLANE = nl.Grid((6, 5), spacing=(0.5, 0.25), boundary="periodic")
CLOUD = nl.Points(np.random.default_rng(3).random((7, 2)), np.linspace(1, 2, 7))
FORMATS = ("h5", "zarr", "pvd")


def needs(form: str) -> None:
    pytest.importorskip({"h5": "h5py", "zarr": "zarr", "pvd": "xml"}[form], reason="optional")


def flow_on(domain: Any, fidelity: float = 0.2) -> tuple[nl.GradientFlow, Floats]:
    u = np.random.default_rng(0).standard_normal(domain.shape)
    return nl.GradientFlow(nl.E(nl.affinity(nl.Gaussian(0.6), domain), u, fidelity, measure="degree"), "degree"), u


def read(path: Path) -> tuple[Floats, Floats, Floats]:
    """Return t, u and energy, by readers that are not ours."""
    if path.suffix == ".h5":
        import h5py

        with h5py.File(path, "r") as file:
            return tuple(file[name][()] for name in ("t", "u", "energy"))  # type: ignore[return-value]
    if path.suffix == ".zarr":
        import zarr

        group = zarr.open_group(path, mode="r", use_consolidated=True)
        return tuple(group[name][...] for name in ("t", "u", "energy"))  # type: ignore[return-value]
    rows = [entry.attrib for entry in ET.parse(path).getroot().iter("DataSet")]
    frames = [read_vtk(path.parent / row["file"]) for row in rows]
    times = np.array([float(row["timestep"]) for row in rows])
    assert times.tolist() == [float(frame["TimeValue"][0]) for frame in frames]
    energies = [float(frame["energy"][0]) for frame in frames]
    shape = tuple(n for n in frames[0]["shape"] if n > 1) if frames else (0,)
    return times, np.array([f["u"].reshape(shape, order="F") for f in frames]), np.array(energies)


def read_vtk(path: Path) -> dict[str, Any]:
    """Read a file of VTK from its specification: XML, and raw blocks that begin with their length."""
    content = path.read_bytes()
    head, _, data = content.partition(b'<AppendedData encoding="raw">\n_')
    root = ET.fromstring(head.decode() + "</VTKFile>")
    found: dict[str, Any] = {}
    for entry in root.iter("DataArray"):
        start = int(entry.attrib["offset"])
        length = int(np.frombuffer(data, "<u8", 1, start)[0])
        dtype = {"Float64": "<f8", "Float32": "<f4", "Int64": "<i8"}[entry.attrib["type"]]
        found[entry.attrib["Name"]] = np.frombuffer(data[start + 8 : start + 8 + length], dtype)
    body = root[0]
    if body.tag == "ImageData":
        ends = [int(x) for x in body.attrib["WholeExtent"].split()]
        found["shape"] = tuple(b - a + 1 for a, b in zip(ends[::2], ends[1::2], strict=True))
        found["origin"], found["spacing"] = ([float(x) for x in body.attrib[a].split()] for a in ("Origin", "Spacing"))
    return found


def frames(path: Path, **when: Any) -> nl.Frames:
    return nl.Frames(path, **(when or {"every": 1}))


# --- what is in the file ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMATS)
def test_a_file_holds_what_a_solution_holds(form: str, tmp_path: Path) -> None:
    needs(form)
    path, (flow, u) = tmp_path / f"run.{form}", flow_on(PLANE)
    solution = nl.solve(flow, u, t_eval=[0, 0.1, 0.2, 0.7], trackers=[frames(path, at=[0, 0.1, 0.2, 0.7])])
    t, values, energy = read(path)
    assert np.array_equal(t, solution.t)
    assert np.array_equal(values, solution.u)
    assert np.array_equal(energy, solution.energy)
    assert solution.records["frames"]["count"].tolist() == [4]
    left = {entry.name for entry in tmp_path.iterdir()}
    assert left == {path.name, *(["run.vtk"] if form == "pvd" else [])}


@pytest.mark.slow
@pytest.mark.parametrize("form", ["h5", "nc", "zarr"])
@pytest.mark.parametrize(("domain", "channels"), [(PLANE, 2), (CLOUD, None), (nl.Grid((3, 4, 5)), None)])
@pytest.mark.sampled(2)
def test_xarray_reads_it_at_once(form: str, domain: Any, channels: int | None, tmp_path: Path) -> None:
    xarray = pytest.importorskip("xarray", reason="xarray is optional")
    pytest.importorskip("zarr" if form == "zarr" else "h5netcdf", reason="optional")
    path, flow = tmp_path / f"run.{form}", flow_on(domain)[0]
    flow = nl.GradientFlow(nl.J(flow.affinity), "degree")
    shape = domain.shape + (() if channels is None else (channels,))
    u = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    tracker = nl.Frames(path, interval=0.5)
    expected = nl.solve(flow, u, t_eval=[0, 0.5, 1.0], trackers=[tracker]).to_xarray()
    with xarray.open_dataset(path) as found:
        assert found.u.dims == expected.u.dims
        assert found.u.dtype == np.float32
        assert set(found.coords) == set(expected.coords) - {"frames_t"}
        for name in ("u", "energy", *found.coords):
            assert np.array_equal(found[name].values, expected[name].values), name
            wanted = {k: v for k, v in expected[name].attrs.items() if k != "coordinates"}
            assert {k: v for k, v in found[name].attrs.items() if k != "coordinates"} == wanted
        assert json.loads(found.attrs["versions"])["nlflow"]
        assert found.attrs["integrator"] == "Exponential()"


@pytest.mark.parametrize("domain", [nl.Grid(7, 0.5), PLANE, nl.Grid((4, 3, 2), (1, 2, 3))], ids=["1-D", "2-D", "3-D"])
def test_image_data_of_vtk(domain: nl.Grid, tmp_path: Path) -> None:
    flow, u = flow_on(domain)
    nl.solve(flow, u, t=0.5).to_vtk(tmp_path / "run.pvd")
    found = read_vtk(tmp_path / "run.vtk" / "000000.vti")
    assert found["shape"] == (*domain.shape, 1, 1)[:3]
    assert found["spacing"][: domain.ndim] == list(domain.spacing)
    assert found["origin"][: domain.ndim] == [x[0] for x in domain.axes]
    assert found["u"].tolist() == u.ravel(order="F").tolist()  # x runs fastest
    two = nl.GradientFlow(nl.J(flow.affinity), "degree")
    nl.solve(two, np.stack([u, 2 * u], -1), t=0.5).to_vtk(tmp_path / "two.pvd")
    found = read_vtk(tmp_path / "two.vtk" / "000000.vti")
    assert found["u"].tolist() == np.stack([u.ravel(order="F"), 2 * u.ravel(order="F")], -1).ravel().tolist()


def test_points_of_vtk(tmp_path: Path) -> None:
    flow, u = flow_on(CLOUD)
    nl.solve(flow, u, t=0.5).to_vtk(tmp_path / "run.pvd")
    found = read_vtk(tmp_path / "run.vtk" / "000000.vtp")
    assert np.array_equal(found["Points"].reshape(-1, 3), np.column_stack([CLOUD.nodes, np.zeros(7)]))
    assert np.array_equal(found["u"], u)
    assert np.array_equal(found["weight"], CLOUD.weights)
    assert (found["connectivity"].tolist(), found["offsets"].tolist()) == (list(range(7)), list(range(1, 8)))


def test_vtk_itself_reads_it(tmp_path: Path) -> None:
    vtk = pytest.importorskip("vtk", reason="hundreds of megabytes, for this alone")
    flow, u = flow_on(PLANE)
    nl.solve(flow, u, t=0.5).to_vtk(tmp_path / "run.pvd")
    reader = vtk.vtkXMLImageDataReader()
    reader.SetFileName(str(tmp_path / "run.vtk" / "000000.vti"))
    reader.Update()
    values = reader.GetOutput().GetPointData().GetArray("u")
    assert [values.GetValue(k) for k in range(values.GetNumberOfTuples())] == u.ravel(order="F").tolist()


# --- resuming --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("form", "when"),
    [
        ("h5", {"every": 2}),
        ("zarr", {"interval": 0.6}),
        ("pvd", {"every": 2}),
        *(pytest.param(form, {"interval": 0.6}, marks=pytest.mark.slow) for form in ("h5", "pvd")),
    ],
)
def test_a_resumed_run_goes_on_with_the_file(form: str, when: dict[str, Any], tmp_path: Path) -> None:
    needs(form)
    flow, u = flow_on(PLANE)

    def run(path: Path, *more: Any, resume: bool = False) -> nl.Solution:
        trackers = [nl.Frames(path, **when), *more]
        return nl.solve(flow, u, t=3.0, integrator=EULER, trackers=trackers, resume=resume)

    run(tmp_path / f"whole.{form}")
    path, checkpoint = tmp_path / f"part.{form}", tmp_path / "checkpoint"
    for looks in (5, 1, 4):
        run(path, stop_after(looks), nl.Checkpoint(checkpoint), resume=True)
        t, _, _ = read(path)
        assert np.array_equal(t, read(tmp_path / f"whole.{form}")[0][: len(t)])
    # As after a kill: the checkpoint is older than the file.
    shutil.copy(checkpoint, tmp_path / "old")
    run(path, stop_after(2), nl.Checkpoint(checkpoint), resume=True)
    longer = len(read(path)[0])
    shutil.copy(tmp_path / "old", checkpoint)
    cut = nl.solve(
        flow, u, t=3.0, integrator=EULER, resume=checkpoint, trackers=[nl.Frames(path, **when), stop_after(0)]
    )
    assert len(read(path)[0]) == int(cut.records["frames"]["count"][0]) < longer
    run(path, nl.Checkpoint(checkpoint), resume=True)
    for one, two in zip(read(path), read(tmp_path / f"whole.{form}"), strict=True):
        assert np.array_equal(one, two)
    before = read(path)[0]
    run(path, nl.Checkpoint(checkpoint), resume=True)  # once more from its end: nothing is added
    assert np.array_equal(read(path)[0], before)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMATS)
def test_a_stopped_run_shows_its_end_and_goes_on_without_it(form: str, tmp_path: Path) -> None:
    """The end is no turn of the tracker; the checkpoint does not hold it."""
    needs(form)
    path, (flow, u) = tmp_path / f"run.{form}", flow_on(PLANE)

    def run(*more: Any, resume: bool = False) -> None:
        trackers = [nl.Frames(path, every=2), nl.Checkpoint(tmp_path / "checkpoint"), *more]
        nl.solve(flow, u, t=2.0, integrator=EULER, trackers=trackers, resume=resume)

    run(nl.Callback(lambda t, *_: t >= 0.75))
    assert read(path)[0].tolist() == [0, 0.5, 0.75]
    run(resume=True)
    assert read(path)[0].tolist() == [0, 0.5, 1, 1.5, 2]


@pytest.mark.parametrize("form", FORMATS)
def test_files_of_others_are_refused_by_name(form: str, tmp_path: Path) -> None:
    needs(form)
    path, (flow, u) = tmp_path / f"run.{form}", flow_on(PLANE)
    checkpoint = tmp_path / "checkpoint"

    def run(flow: Any, *more: Any, **options: Any) -> None:
        nl.solve(flow, u, t=1.0, integrator=EULER, trackers=[nl.Frames(path), *more], **options)

    run(flow_on(PLANE, 0.4)[0])
    before = read(path)
    with pytest.raises(InputError, match=r"^path: got .*which would be lost; expected a new name"):
        run(flow)
    nl.solve(flow, u, t=1.0, integrator=EULER, trackers=[nl.Frames(tmp_path / f"a.{form}"), stop_after(2),
             nl.Checkpoint(checkpoint)])  # fmt: skip
    with pytest.raises(FileFormatError, match=r"belongs to another run than the checkpoint"):
        run(flow, resume=checkpoint)
    assert all(np.array_equal(one, two) for one, two in zip(read(path), before, strict=True))
    path = tmp_path / f"absent.{form}"
    with pytest.raises(FileFormatError, match=r"there is no such file, expected the one .* with 3 frames"):
        run(flow, resume=checkpoint)
    (tmp_path / f"other.{form}").write_text("mine")
    path = tmp_path / f"other.{form}"
    with pytest.raises(InputError, match=r"which would be lost"):
        run(flow)
    with pytest.raises(FileFormatError, match=r"not a file of frames that can be gone on with"):
        run(flow, resume=checkpoint)
    assert path.read_text() == "mine"
    # A run of the same problem may begin anew.
    path = tmp_path / f"a.{form}"
    run(flow)
    assert read(path)[0].tolist() == [0, 0.25, 0.5, 0.75, 1]


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMATS)
def test_missing_frames_are_named(form: str, tmp_path: Path) -> None:
    needs(form)
    path, (flow, u) = tmp_path / f"run.{form}", flow_on(PLANE)
    for looks in (2, 4):
        nl.solve(flow, u, t=2.0, integrator=EULER,
                 trackers=[nl.Frames(path), stop_after(looks), nl.Checkpoint(tmp_path / f"c{looks}")])  # fmt: skip
        if looks == 2:
            kept = tmp_path / "kept"
            shutil.copytree(tmp_path, kept)
    for place in (path, tmp_path / "run.vtk"):
        if place.exists():
            shutil.rmtree(place) if place.is_dir() else place.unlink()
            source = kept / place.name
            shutil.copytree(source, place) if source.is_dir() else shutil.copy(source, place)
    with pytest.raises(FileFormatError, match=r"got 3 frames, expected 5, which there were at the checkpoint"):
        nl.solve(flow, u, t=2.0, integrator=EULER, trackers=[nl.Frames(path)], resume=tmp_path / "c4")


@pytest.mark.parametrize(
    ("form", "part"),
    [("h5", "run.h5"), ("zarr", "run.zarr/zarr.json"), ("pvd", "run.pvd"), ("pvd", "run.vtk/about.json")],
)
def test_damaged_files_are_refused_by_name(form: str, part: str, tmp_path: Path) -> None:
    """Whatever a file says, a resumed run goes on or ends with an error of the package."""
    needs(form)
    flow, u = flow_on(PLANE)
    kept = tmp_path / "kept"
    kept.mkdir()
    nl.solve(flow, u, t=1.0, integrator=EULER,
             trackers=[nl.Frames(kept / f"run.{form}"), stop_after(2), nl.Checkpoint(tmp_path / "c")])  # fmt: skip
    content, rng, refused = (kept / part).read_bytes(), np.random.default_rng(0), 0
    named = 0
    for number in range(30):
        folder = tmp_path / str(number)
        shutil.copytree(kept, folder)
        damaged = bytearray(content)
        for at in rng.integers(0, min(len(content), 4096), 3):
            damaged[at : at + 1] = rng.bytes(int(rng.integers(0, 3)))
        (folder / part).write_bytes(bytes(damaged) if number % 3 else content[: int(rng.integers(len(content)))])
        try:
            nl.solve(flow, u, t=1.0, integrator=EULER, trackers=[nl.Frames(folder / f"run.{form}")],
                     resume=tmp_path / "c")  # fmt: skip
        except FileFormatError as error:
            refused += "run." in str(error)
            named += 1
    assert refused == named >= 10


# --- whole at any moment ---------------------------------------------------------------------------------------------


class Killed(BaseException):
    """What stands for the end of a process."""


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.sampled(1)
def test_wherever_it_is_cut_the_file_holds_whole_frames(form: str, tmp_path: Path, monkeypatch: Any) -> None:
    """End at each call that changes a name, a length or a content; read a copy of what is there then."""
    needs(form)
    flow, u = flow_on(PLANE)
    end = 0.25 if form == "zarr" else 0.5  # its frames are of more files
    whole = nl.solve(flow, u, t=end, integrator=EULER, trackers=[nl.Frames(tmp_path / f"whole.{form}")])
    assert whole.success
    expected = read(tmp_path / f"whole.{form}")
    left, done = [0], [0]

    def cut(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            done[0] += 1
            if done[0] == left[0]:
                raise Killed
            return function(*given, **named)

        return call

    monkeypatch.setattr(Path, "replace", cut(Path.replace))
    monkeypatch.setattr(os, "link", cut(os.link))
    if form == "h5":
        import h5py

        monkeypatch.setattr(h5py.Dataset, "resize", cut(h5py.Dataset.resize))
        monkeypatch.setattr(h5py.Dataset, "__setitem__", cut(h5py.Dataset.__setitem__))
    seen = set()
    for left[0] in range(1, 200):
        folder = tmp_path / str(left[0])
        folder.mkdir()
        done[0], path = 0, folder / f"run.{form}"
        try:
            nl.solve(flow, u, t=end, integrator=EULER, trackers=[nl.Frames(path)])
        except Killed:
            if path.exists() and not (form == "pvd" and not (folder / "run.vtk").exists()):
                found = read(path)
                count = len(found[0])
                seen.add(count)
                if count:
                    assert all(np.array_equal(a, b[:count]) for a, b in zip(found, expected, strict=True))
                assert len(found[1]) == len(found[2]) == count
            continue
        break
    else:
        raise AssertionError("it never came to an end")
    assert seen >= set(range(round(4 * end) + 1))


def test_somebody_who_reads_an_older_state_keeps_it(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py", reason="optional")
    path, (flow, u) = tmp_path / "run.h5", flow_on(PLANE)
    opened: list[Any] = []

    def look(t: float, *_: Any) -> None:
        if t == 0.5:
            opened.append(h5py.File(path, "r"))

    nl.solve(flow, u, t=2.0, integrator=EULER, trackers=[nl.Frames(path), nl.Callback(look)])
    assert opened[0]["t"][()].tolist() == [0, 0.25, 0.5]
    opened[0].close()
    assert len(read(path)[0]) == 9


KILLED = """
import sys, numpy as np, nlflow as nl
from pathlib import Path
grid = nl.Grid((64, 64), boundary="periodic")
flow = nl.GradientFlow(nl.J(nl.affinity(nl.Gaussian(1.5), grid)), "degree")
u = np.random.default_rng(0).standard_normal(grid.shape)
trackers = [nl.Frames(sys.argv[1]), nl.Checkpoint(sys.argv[2], seconds=0, every=7)]
nl.solve(flow, u, t=float(sys.argv[3]), integrator=nl.ExplicitEuler(0.25), trackers=trackers, resume=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMATS)
def test_killed_again_and_again(form: str, tmp_path: Path) -> None:
    needs(form)
    path, whole = tmp_path / f"run.{form}", tmp_path / f"whole.{form}"
    end = {"pvd": "60", "h5": "45"}.get(form, "15")  # long enough for three kills

    def begin(target: Path, checkpoint: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-c", KILLED, str(target), str(tmp_path / checkpoint), end])

    assert begin(whole, "c").wait() == 0
    expected, rng, kills = read(whole), np.random.default_rng(0), 0
    for _ in range(8):
        process = begin(path, "d")
        until = time.monotonic() + 60  # from the moment that it writes, a little longer
        before = path.stat().st_mtime_ns if path.exists() else 0
        while process.poll() is None and time.monotonic() < until:
            if path.exists() and path.stat().st_mtime_ns != before:
                break
            time.sleep(0.005)
        time.sleep(rng.uniform(0, 0.25))
        process.send_signal(signal.SIGKILL)
        if process.wait() == 0:
            break
        kills += 1
        if path.exists() and (form != "pvd" or (tmp_path / "run.vtk").exists()):
            found = read(path)
            count = len(found[0])
            assert all(np.array_equal(a, b[:count]) for a, b in zip(found, expected, strict=True) if count)
    assert kills >= 3
    assert begin(path, "d").wait() == 0
    assert all(np.array_equal(a, b) for a, b in zip(read(path), expected, strict=True))
    assert not list(tmp_path.glob(".nlflow-*.tmp"))


# --- what goes wrong -------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMATS)
def test_a_full_disk_is_named_and_the_file_stays(form: str, tmp_path: Path, monkeypatch: Any) -> None:
    needs(form)
    path, (flow, u) = tmp_path / f"run.{form}", flow_on(PLANE)
    usage = shutil.disk_usage(tmp_path)
    calls = iter(range(100))
    monkeypatch.setattr(
        series_base.shutil, "disk_usage", lambda _: usage._replace(free=100 if next(calls) == 3 else 10**9)
    )
    checkpoint = nl.Checkpoint(tmp_path / "checkpoint")
    with pytest.raises(FileFormatError, match=rf"{path.name}: got a disk with 100 B left, expected 1 MiB .* t=0.75"):
        nl.solve(flow, u, t=2.0, integrator=EULER, trackers=[nl.Frames(path), checkpoint])
    assert read(path)[0].tolist() == [0, 0.25, 0.5]
    nl.solve(flow, u, t=2.0, integrator=EULER, trackers=[nl.Frames(path), checkpoint], resume=True)
    assert read(path)[0].tolist() == [0.25 * k for k in range(9)]


@pytest.mark.parametrize("form", FORMATS)
def test_what_the_system_refuses_is_named(form: str, tmp_path: Path, monkeypatch: Any) -> None:
    needs(form)
    path, (flow, u) = tmp_path / f"run.{form}", flow_on(PLANE)
    calls, original = iter(range(100)), os.fsync

    def refuse(descriptor: int) -> None:
        if next(calls) > 12:
            raise OSError(errno.ENOSPC, "No space left on device")
        original(descriptor)

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(FileFormatError, match=r"run.*: got No space left on device, expected a file that can be wri"):
        nl.solve(flow, u, t=9.0, integrator=EULER, trackers=[nl.Frames(path)])
    count = len(read(path)[0])
    assert 0 <= count < 36


def test_hdf5_never_meets_a_full_disk(tmp_path: Path) -> None:
    """HDF5 crashes where a write fails; here files may not grow beyond a limit, as with a quota."""
    needs("h5")
    resource = pytest.importorskip("resource", reason="Unix alone has limits")
    path, grid = tmp_path / "run.h5", nl.Grid((100, 100), boundary="periodic")
    flow = nl.GradientFlow(nl.J(nl.affinity(nl.Gaussian(1.0), grid)), "degree")
    u = np.random.default_rng(0).standard_normal(grid.shape)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10**6, before[1]))
    try:
        with pytest.raises(FileFormatError, match=r"run.h5: got File too large, expected a file that can be written"):
            nl.solve(flow, u, t=9.0, integrator=EULER, trackers=[nl.Frames(path)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    t, values, _ = read(path)
    assert 5 < len(t) < 12
    assert np.isfinite(values).all()


def test_a_folder_that_cannot_be_written_is_found_out_before(tmp_path: Path) -> None:
    flow, u = flow_on(PLANE)
    with pytest.raises(InputError, match=r"^path: got .*expected a file in a folder that exists"):
        nl.solve(flow, u, t=1.0, trackers=[nl.Frames(tmp_path / "missing" / "run.pvd")])
    assert flow.applications == 0
    with pytest.raises(InputError, match="in which another process is writing"):
        nl.solve(flow, u, t=1.0, trackers=[nl.Frames(tmp_path / "run.pvd"), nl.Frames(tmp_path / "run.pvd")])


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("run.txt", r"^path: got 'run.txt', expected a name that ends with one of .h5, .hdf5, .nc, .zarr, .pvd"),
        ("run", r"^path: got 'run', expected a name that ends with"),
        (7, r"^path: got 7, expected the path of a file"),
    ],
)
def test_bad_paths(path: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        nl.Frames(path)


@pytest.mark.parametrize(("form", "package", "extra"), [("h5", "h5py", "hdf5"), ("zarr", "zarr", "zarr")])
def test_without_its_package_it_says_what_to_install(form: str, package: str, extra: str, monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(InputError, match=re.escape(f"pip install 'nlflow[{extra}]'")):
        nl.Frames(f"run.{form}")


def test_what_vtk_has_not_is_refused(tmp_path: Path) -> None:
    batch = nl.Batch(nl.Points(np.arange(3.0)), 2)
    features = np.random.default_rng(0).standard_normal((*batch.shape, 2))
    flow = nl.GradientFlow(nl.J(nl.affinity(nl.Gaussian(1.0), batch, features)), "degree")
    with pytest.raises(InputError, match="for a batch, expected a Grid or Points"):
        nl.solve(flow, np.zeros(batch.shape), t=1.0, trackers=[nl.Frames(tmp_path / "run.pvd")])
    flow, u = flow_on(nl.Grid((2, 2, 2, 2)))
    solution = nl.solve(flow, u, t=1.0)
    with pytest.raises(InputError, match="for 4 dimensions, expected a Grid or Points"):
        solution.to_vtk(tmp_path / "run.pvd")
    flow, u = flow_on(PLANE)
    solution = nl.solve(flow, u, t=1.0)
    with pytest.raises(InputError, match=r"expected a name that ends with \.pvd"):
        solution.to_vtk(tmp_path / "run.vti")
    solution.to_vtk(tmp_path / "run.pvd")
    with pytest.raises(InputError, match="which exists"):
        solution.to_vtk(tmp_path / "run.pvd")
    solution.save(tmp_path / "run.npz")
    with pytest.raises(InputError, match=r"to_vtk\(domain="):
        nl.Solution.load(tmp_path / "run.npz").to_vtk(tmp_path / "b.pvd")


@pytest.mark.slow
@pytest.mark.parametrize("form", ["h5", *(pytest.param(form, marks=pytest.mark.slow) for form in ("zarr", "pvd"))])
def test_memory_does_not_grow_with_the_run(form: str, tmp_path: Path) -> None:
    """40 more frames of 80 kB take less than three of them (the list of a .pvd has 80 bytes a frame)."""
    needs(form)
    grid = nl.Grid((100, 100), boundary="periodic")
    flow = nl.GradientFlow(nl.J(nl.affinity(nl.Gaussian(1.0), grid)), "degree")
    u = np.random.default_rng(0).standard_normal(grid.shape)

    def peak(steps: int) -> int:
        with traced() as taken:
            nl.solve(flow, u, t=0.25 * steps, integrator=EULER, energies=False,
                     trackers=[nl.Frames(tmp_path / f"{steps}.{form}", energy=False)])  # fmt: skip
        return taken.bytes

    peak(3)
    assert peak(44) - peak(4) < 3 * u.nbytes
