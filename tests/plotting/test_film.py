"""Films and pictures in a notebook: what they show, when, and how a film goes on with a resumed run."""

from __future__ import annotations

import io
import shutil
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

import nlflow as nl
from nlflow.errors import FileFormatError, InputError
from nlflow.plotting.scene import Scene
from tests.problems import Floats, stop_after

EULER = nl.ExplicitEuler(0.25)
PLANE = nl.Grid((6, 5), boundary="periodic")


def flow_on(domain: Any, fidelity: float = 0.2) -> tuple[nl.GradientFlow, Floats]:
    u = np.random.default_rng(0).standard_normal(domain.shape)
    return nl.GradientFlow(nl.E(nl.affinity(nl.Gaussian(0.6), domain), u, fidelity, measure="degree"), "degree"), u


def pictures(path: Path) -> list[Floats]:
    """Return the pictures of a film, read by PyAV or Pillow."""
    if path.suffix == ".gif":
        with Image.open(path) as film:
            found = []
            for number in range(film.n_frames):
                film.seek(number)
                found.append(np.asarray(film.convert("RGB"), dtype=float))
            return found
    import av

    with av.open(str(path)) as film:
        return [frame.to_ndarray(format="rgb24").astype(float) for frame in film.decode(video=0)]


def test_a_gif_has_a_picture_for_each_look(tmp_path: Path) -> None:
    flow, u = flow_on(PLANE)
    path = tmp_path / "run.gif"
    nl.solve(flow, u, t=1.0, integrator=EULER, trackers=[nl.Film(path, rate=30, size=(101, 121), cmap="gray")])
    found = pictures(path)
    assert len(found) == 5
    assert found[0].shape == (122, 102, 3)  # even
    with Image.open(path) as film:  # hundredths of a second, 30 pictures a second on average
        assert [film.seek(number) or film.info["duration"] for number in range(5)] == [30, 40, 30, 30, 40]
    assert [entry.name for entry in tmp_path.iterdir() if not entry.name.endswith(".lock")] == ["run.gif"]


@pytest.mark.slow
def test_an_mp4_holds_the_same_pictures(tmp_path: Path) -> None:
    pytest.importorskip("av", reason="PyAV is optional")
    flow, u = flow_on(PLANE)
    film = nl.Film(tmp_path / "run.mp4", interval=0.5, size=(161, 121), rate=25, limits=(-1, 1))
    nl.solve(
        flow, u, t=2.0, trackers=[film, nl.Film(tmp_path / "run.gif", interval=0.5, size=(161, 121), limits=(-1, 1))]
    )
    found, other = pictures(tmp_path / "run.mp4"), pictures(tmp_path / "run.gif")
    assert len(found) == len(other) == 5
    assert found[0].shape == (122, 162, 3)
    apart = [[np.abs(one - two).mean() for two in other] for one in found]
    # Both lose a little; each moment is still nearest to itself.
    assert [int(np.argmin(row)) for row in apart] == list(range(5))
    assert max(apart[k][k] for k in range(5)) < 0.5 * np.abs(other[0] - other[1]).mean()


def test_values_have_their_colours() -> None:
    """The middle of each cell of the drawn picture, against the colours of matplotlib."""
    from matplotlib import colormaps

    u = np.linspace(0, 1, 6).reshape(2, 3)
    scene = Scene(nl.Grid((2, 3)), u, size=(400, 300))
    drawn = scene.pixels(u, 0.0)
    colours = (np.asarray(colormaps["viridis"](u.ravel()))[:, :3] * 255).round()
    for colour in colours:  # each fills a good part of the picture
        assert (np.abs(drawn - colour).max(axis=-1) <= 1).mean() > 0.03
    # Fixed limits: what is beyond them has the colour of the end.
    beyond = scene.pixels(u + 5, 0.0)
    assert (np.abs(beyond - colours[-1]).max(axis=-1) <= 1).mean() > 6 * 0.03
    assert np.array_equal(scene.pixels(u, 0.0), drawn)


@pytest.mark.parametrize("channels", [1, 4])
def test_the_smallest_pictures_are_all_signal(channels: int) -> None:
    u = np.zeros((4, 4, channels)) + np.arange(16).reshape(4, 4, 1) / 15
    drawn = Scene(nl.Grid((4, 4)), u, size=(64, 64)).pixels(u, 0.0)
    assert drawn.shape == (64, 64, 3)
    assert (drawn != 255).any(axis=-1).mean() >= 1 / channels


@pytest.mark.slow
@pytest.mark.parametrize(
    ("domain", "channels", "shape"),
    [
        (nl.Grid(9), None, (420, 640)),
        (nl.Grid(9), 2, (420, 640)),
        (nl.Points(np.linspace(0, 1, 9)), None, (420, 640)),
        (nl.Grid((5, 4)), 3, (360, 1040)),
        (nl.Grid((5, 4, 3)), None, (360, 1040)),
        (nl.Points(np.random.default_rng(0).random((9, 2))), None, (420, 640)),
    ],
    ids=["line", "lines", "nodes on a line", "channels", "slices", "cloud"],
)
@pytest.mark.sampled(2)
def test_each_kind_of_signal_has_a_picture_that_changes(domain: Any, channels: Any, shape: Any) -> None:
    u = np.random.default_rng(1).standard_normal(domain.shape + (() if channels is None else (channels,)))
    scene = Scene(domain, u)
    one, two = scene.pixels(u, 0.0), scene.pixels(0 * u, 0.0)
    assert one.shape == (*shape, 3)
    assert one.std() > 5
    assert (one != two).any()
    assert np.array_equal(scene.pixels(u, 0.0), one)


@pytest.mark.slow
def test_slices_are_the_middle_ones() -> None:
    domain, u = nl.Grid((4, 6, 2)), np.zeros((4, 6, 2))
    scene = Scene(domain, u, limits=(0, 1))
    plain = scene.pixels(u, 0.0)
    for node, seen in (((2, 0, 0), True), ((0, 3, 0), True), ((0, 0, 1), True), ((1, 1, 0), False)):
        v = u.copy()
        v[node] = 1
        assert (scene.pixels(v, 0.0) != plain).any() == seen


@pytest.mark.slow
@pytest.mark.parametrize("when", [{"every": 2}, {"interval": 0.6}], ids=["steps", "times"])
@pytest.mark.sampled(1)
def test_a_resumed_film_is_that_of_a_whole_run(when: dict[str, Any], tmp_path: Path) -> None:
    flow, u = flow_on(PLANE)
    path, checkpoint, frames = tmp_path / "part.gif", tmp_path / "checkpoint", tmp_path / "part.gif.frames"

    def run(path: Path, *more: Any, **options: Any) -> None:
        film = nl.Film(path, **when, size=(120, 100))
        nl.solve(flow, u, t=2.0, integrator=EULER, trackers=[film, *more], **options)

    run(tmp_path / "whole.gif")
    whole = pictures(tmp_path / "whole.gif")
    run(path, stop_after(5), nl.Checkpoint(checkpoint))
    assert 0 < len(pictures(path)) < len(whole)  # what there is so far
    shutil.copytree(frames, tmp_path / "kept")
    run(path, nl.Checkpoint(checkpoint), resume=True)
    for one, two in zip(pictures(path), whole, strict=True):
        assert np.array_equal(one, two)
    assert not frames.exists()
    for left in ("nothing", "a part of the pictures, as after a kill"):  # once more from its end
        if left != "nothing":
            shutil.copytree(tmp_path / "kept", frames)
        run(path, nl.Checkpoint(checkpoint), resume=True)
        assert len(pictures(path)) == len(whole)
        assert not frames.exists()


def test_films_of_others_and_lost_pictures_are_refused_by_name(tmp_path: Path) -> None:
    flow, u = flow_on(PLANE)
    path, checkpoint = tmp_path / "run.gif", tmp_path / "checkpoint"

    def run(*more: Any, which: Any = flow, **options: Any) -> None:
        film = nl.Film(path, size=(100, 100))
        nl.solve(which, u, t=1.0, integrator=EULER, trackers=[film, *more], **options)

    run(which=flow_on(PLANE, 0.4)[0])
    with pytest.raises(InputError, match=r"^path: got .*run.gif', which would be lost; expected a new name"):
        run()
    path.write_bytes(b"mine")
    with pytest.raises(InputError, match="which would be lost"):
        run()
    assert path.read_bytes() == b"mine"
    path.unlink()
    run(stop_after(2), nl.Checkpoint(checkpoint))
    frames = tmp_path / "run.gif.frames"
    path.unlink()
    (frames / "000001.png").unlink()
    with pytest.raises(FileFormatError, match=r"got no 000001.png, expected the 3 pictures"):
        run(resume=checkpoint)
    shutil.rmtree(frames)
    with pytest.raises(FileFormatError, match="got no pictures of this run, expected the 3"):
        run(resume=checkpoint)
    run()
    run()  # the film of the same problem is made anew
    assert len(pictures(path)) == 5
    with pytest.raises(FileFormatError, match="got no pictures of this run"):  # complete, and its pictures are gone
        run(resume=checkpoint)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nl.Film("run.avi"), r"^path: got 'run.avi', expected a name that ends with .mp4 or .gif"),
        (lambda: nl.Film(3), r"^path: got 3, expected the path"),
        (lambda: nl.Film("/proc/none/a.gif"), r"^path: got '/proc/none/a.gif', expected a file in a folder that"),
        (lambda: nl.Film("a.gif", limits=(1, 0)), r"^limits: got \(1, 0\), expected low < high"),
        (lambda: nl.Film("a.gif", limits=3), r"^limits: got 3, expected two numbers"),
        (lambda: nl.Film("a.gif", limits=(0, np.nan)), r"^limits: got nan"),
        (lambda: nl.Film("a.gif", rate=0), r"^rate: got 0, expected"),
        (lambda: nl.Film("a.gif", rate=51), r"^rate: got 51 for a .gif, expected 50 at most"),
        (lambda: nl.Film("a.gif", size=(10, 100)), r"^size: got 10, expected an integer >= 64"),
        (lambda: nl.Film("a.gif", size="large"), r"^size: got 'large', expected width and height"),
        (lambda: nl.Film("a.gif", cmap="none such"), r"^cmap: got 'none such', expected the name of colours"),
        (lambda: nl.Live(seconds=-1), r"^seconds: got -1"),
    ],
)
def test_bad_arguments(make: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        make()


@pytest.mark.parametrize(
    ("domain", "channels", "message"),
    [
        (nl.Grid((2, 2, 2, 2)), None, "got Grid of 4 dimensions to draw"),
        (nl.Points(np.random.default_rng(0).random((5, 3))), None, "got Points of 3 dimensions to draw"),
        (nl.Grid((3, 3)), 5, "got 5 channels in 2 dimensions to draw, expected at most 4"),
        (nl.Grid((3, 3, 3)), 2, "got 2 channels in 3 dimensions to draw, expected at most 1"),
    ],
)
def test_what_has_no_picture_is_refused_before_the_run(
    domain: Any, channels: Any, message: str, tmp_path: Path
) -> None:
    flow = nl.GradientFlow(nl.J(nl.affinity(nl.Gaussian(1.0), domain)), "degree")
    u = np.zeros(domain.shape + (() if channels is None else (channels,)))
    with pytest.raises(InputError, match=message):
        nl.solve(flow, u, t=1.0, trackers=[nl.Film(tmp_path / "run.gif")])
    assert not list(tmp_path.glob("run*"))


def test_without_pyav_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(InputError, match=r"pip install 'nlflow\[film\]', or name it .gif"):
        nl.Film("run.mp4")


def test_a_part_of_the_signal_is_no_film(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flow, u = flow_on(PLANE)
    monkeypatch.setattr(type(flow.affinity), "whole_shape", (60, 5))  # nodes shared out among processes
    for tracker in (nl.Film(tmp_path / "run.gif"), nl.Frames(tmp_path / "run.pvd"), nl.Live()):
        with pytest.raises(InputError, match=f"{type(tracker).__name__} needs the whole signal in one process"):
            nl.solve(flow, u, t=1.0, trackers=[tracker])


# --- in a notebook ---------------------------------------------------------------------------------------------------


def test_outside_a_notebook_live_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    flow, u = flow_on(PLANE)
    for module in (None, fake(SimpleNamespace())[0]):  # no IPython, and a shell in a terminal
        monkeypatch.setitem(sys.modules, "IPython", module)
        with pytest.raises(InputError, match=r"Live shows a flow in a notebook, and none runs here; use Film"):
            nl.solve(flow, u, t=1.0, trackers=[nl.Live()])


def fake(shell: Any) -> tuple[ModuleType, ModuleType, list[bytes]]:
    """Stand in for IPython, and keep what is shown."""
    shown: list[bytes] = []
    display = ModuleType("IPython.display")
    display.Image = lambda data: data  # type: ignore[attr-defined]
    handle = SimpleNamespace(update=shown.append)
    display.display = lambda picture, display_id: shown.append(picture) or handle  # type: ignore[attr-defined]
    top = ModuleType("IPython")
    top.get_ipython = lambda: shell  # type: ignore[attr-defined]
    return top, display, shown


@pytest.mark.parametrize(("seconds", "count"), [(0, 5), (1e6, 2)])
def test_a_notebook_shows_the_signal(seconds: float, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    top, display, shown = fake(SimpleNamespace(kernel=object()))
    monkeypatch.setitem(sys.modules, "IPython", top)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    flow, u = flow_on(PLANE)
    nl.solve(flow, u, t=1.0, integrator=EULER, trackers=[nl.Live(seconds=seconds, size=(120, 100))])
    assert len(shown) == count
    sizes = {Image.open(io.BytesIO(picture)).size for picture in shown}
    assert sizes == {(120, 100)}
    assert shown[0] != shown[-1]
