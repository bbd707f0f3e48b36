"""The command `nonlocal denoise` for many files: folders and patterns in, a folder out."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from nlflow.desk import files
from nlflow.desk.commands import denoise_file
from nlflow.errors import InputError
from tests.commands import IMAGE, OPTIONS, Denoiser, fails, listing, misused, run


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder of three images and what is to be left out."""
    monkeypatch.chdir(tmp_path)
    Path("in").mkdir()
    for number, name in enumerate(("b.png", "a.tif", "c.PNG")):
        Image.fromarray(IMAGE // (number + 1)).save(Path("in") / name)
    Path("in/readme.txt").write_text("no image")
    Path("in/.hidden.png").write_text("no image")
    Path("in/deeper").mkdir()
    Image.fromarray(IMAGE).save("in/deeper/d.png")
    return tmp_path


def test_a_folder(folder: Path, denoiser: Denoiser) -> None:
    result = run("denoise", "in", "out", "--quality", "fast")
    assert listing(Path("out")) == ["a.tif", "b.png", "c.PNG"]
    for number, name in enumerate(("b.png", "a.tif", "c.PNG")):
        np.testing.assert_array_equal(files.read(Path("out") / name).data, np.rint(IMAGE // (number + 1) * 0.5))
    assert [options for _, _, options in denoiser.calls] == [OPTIONS | {"quality": "fast"}] * 3
    assert result.stderr == "nonlocal: note: in: 1 file(s) of other formats are left out\n"
    lines = result.stdout.splitlines()
    assert [line.split("  ")[0] for line in lines[:3]] == ["in/a.tif", "in/b.png", "in/c.PNG"]
    assert lines[0].startswith("in/a.tif  sigma 12.5 (estimated), ")
    assert lines[3].startswith("3 of 3 file(s) written to out in ")
    assert run("denoise", "in", "again", "--quiet").output == ""


@pytest.mark.skipif(sys.platform != "linux", reason="names are UTF-8, or 16 bits a letter")
def test_names_of_any_bytes(folder: Path, denoiser: Denoiser) -> None:
    name, out = os.fsdecode(b"d\xff.png"), os.fsdecode(b"out\xfe")
    Image.fromarray(IMAGE).save(Path("in") / name, "PNG")
    told = json.loads(run("denoise", "in", out, "--json").stdout)
    assert listing(Path(out)) == sorted(["a.tif", "b.png", "c.PNG", name])
    assert [report["output"] for report in told["files"]][-1] == f"{out}/{name}"
    assert json.loads(run("denoise", "in", out, "--existing", "resume", "--json").stdout)["kept"] == 4
    assert "d\\udcff.png: there is no such file" in fails("denoise", name, "x.png")


def test_what_was_made_meanwhile_stays(folder: Path, denoiser: Denoiser, monkeypatch: pytest.MonkeyPatch) -> None:
    work = denoise_file._denoise

    def slow(*given: Any) -> Any:
        for place in ("out.png", "out/b.png"):
            Path(place).parent.mkdir(exist_ok=True)
            Path(place).write_text("of another program")
        return work(*given)

    monkeypatch.setattr(denoise_file, "_denoise", slow)
    message = "out.png: got a file that was made while this one was computed, expected none"
    assert message in run("denoise", "in/b.png", "out.png", code=1).stderr
    assert Path("out.png").read_text() == "of another program"
    Path("out/b.png").unlink()
    assert "1 of 3 file(s) failed" in run("denoise", "in", "out", "--existing", "skip", code=1).stderr
    assert Path("out/b.png").read_text() == "of another program"
    assert listing(Path("out")) == ["a.tif", "b.png", "c.PNG"]
    assert "already there, and complete" in fails("denoise", "in/b.png", "out.png", "--existing", "resume")
    assert "it begins anew" in run("denoise", "in/b.png", "new.png", "--existing", "resume").stderr
    run("denoise", "in/b.png", "out.png", "--existing", "overwrite")
    assert files.read("out.png").data.shape == IMAGE.shape


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["in/*.png", "out"], ["b.png"]),
        (["in/*.[pP][nN][gG]", "out"], ["b.png", "c.PNG"]),
        (["in/b.png", "in/a.tif", "out"], ["a.tif", "b.png"]),
        (["in/b.png", "in/*.png", "in/b.png", "out"], ["b.png"]),
        (["in/deeper", "in/*.tif", "out"], ["a.tif", "d.png"]),
        (["in/*", "out"], ["a.tif", "b.png", "c.PNG"]),
        (["in/b.png", "out/"], ["b.png"]),
        (["in/b.png", "there"], ["b.png"]),
        (["in/b.png", "new/deep/"], ["b.png"]),
    ],
)
def test_what_is_meant(folder: Path, denoiser: Denoiser, arguments: list[str], names: list[str]) -> None:
    Path("there").mkdir()
    run("denoise", *arguments)
    assert listing(Path(arguments[-1])) == names
    assert len(denoiser.calls) == len(names)


def test_an_absolute_pattern(folder: Path, denoiser: Denoiser) -> None:
    run("denoise", str(folder / "in" / "*.tif"), str(folder / "out"))
    assert listing(Path("out")) == ["a.tif"]


def test_a_name_with_brackets_is_no_pattern(folder: Path, denoiser: Denoiser) -> None:
    Image.fromarray(IMAGE).save("shot[1].png")
    run("denoise", "shot[1].png", "out.png")
    assert Path("out.png").is_file()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["in", "in"], "the same file as the input in/a.tif"),
        (["in/a.tif", "in/b.png", "in"], "the same file as the input in/a.tif"),
        (["in/b.png", "in/a.tif", "in/c.PNG"], "OUT: got in/c.PNG, a file, expected a folder for 2 input(s)"),
        (["in", "new.png"], "OUT: got new.png, the name of a file, expected a folder for 3 input(s)"),
        (["in/*.gif", "out"], "IN: got in/*.gif, which matches no file(s), expected at least one that ends in .png"),
        (["in/*.txt", "out"], "IN: got in/*.txt, which matches 1 file(s), expected at least one that ends in .png"),
        (["empty", "out"], "IN: got empty, a folder with no file(s)"),
        (["in/b.png", "other/b.png", "out"], "OUT for other/b.png: got out/b.png, the same file as OUT for in/b.png"),
        (["in", "out", "--compare", "fig.png"], "--compare: got fig.png, the name of a file"),
        (["in", "out", "--compare", "fig.pdf"], "--compare: got fig.pdf, the name of a file"),
        (["in", "out", "--compare", "in/a.tif"], "--compare: got in/a.tif, a file"),
        (["in", "out", "--mask", "nowhere"], "--mask: nowhere: there is no such file or folder; check the name"),
        (["in", "masks", "--mask", "masks"], "OUT for in/b.png: got masks/b.png, the same file as --mask masks/b.png"),
    ],
)
def test_refused_before_any_work(folder: Path, denoiser: Denoiser, arguments: list[str], message: str) -> None:
    for name in ("empty", "other", "masks"):
        Path(name).mkdir()
    for name in ("other/b.png", "masks/b.png"):
        Image.fromarray(IMAGE).save(name)
    assert message in fails("denoise", *arguments)
    assert denoiser.calls == []


def test_a_broken_file_does_not_keep_others_from_being_done(folder: Path, denoiser: Denoiser) -> None:
    Path("in/aa.png").write_text("no image\n" * 20)
    Path("in/b2.png").touch()
    denoiser.failures[1] = InputError("image: got\nnothing")
    result = run("denoise", "in", "out", code=1)
    assert listing(Path("out")) == ["a.tif", "c.PNG"]
    errors = [line for line in result.stderr.splitlines() if "error" in line]
    assert len(errors) == 4
    assert errors[0].startswith("nonlocal: error: in/aa.png: got a text file, expected")
    assert errors[1] == "nonlocal: error: in/b.png: got nothing"
    assert errors[2].startswith("nonlocal: error: in/b2.png: got an empty file")
    assert errors[3] == "nonlocal: error: 3 of 5 file(s) failed; they are named above"
    assert "2 of 5 file(s) written to out" in result.stdout


def test_programming_errors_are_not_hidden(folder: Path, denoiser: Denoiser) -> None:
    denoiser.failures[1] = ZeroDivisionError("a fault of ours")
    with pytest.raises(ZeroDivisionError):
        run("denoise", "in", "out")


def test_json(folder: Path, denoiser: Denoiser) -> None:
    denoiser.failures[1] = InputError("image: got nothing")
    denoiser.warning = "shrunk"
    result = run("denoise", "in", "out", "--json", "--sigma", "3", code=1)
    report = json.loads(result.stdout)
    assert [entry["input"] for entry in report["files"]] == ["in/a.tif", "in/b.png", "in/c.PNG"]
    assert report["files"][0]["output"] == "out/a.tif"
    assert report["files"][0]["denoise"]["sigma"] == 3
    assert report["files"][1] == {"input": "in/b.png", "error": "in/b.png: got nothing"}
    assert (report["done"], report["failed"], report["interrupted"]) == (2, 1, False)
    assert report["version"]
    assert "nonlocal: warning: in/a.tif: shrunk" in result.stderr


def test_interrupt_leaves_complete_files(folder: Path, denoiser: Denoiser) -> None:
    denoiser.failures[2] = KeyboardInterrupt()
    result = run("denoise", "in", "out", "--json", "-q", code=130)
    assert listing(Path("out")) == ["a.tif", "b.png"]
    assert result.stderr == "nonlocal: interrupted; 2 of 3 file(s) are done and complete in out\n"
    assert json.loads(result.stdout)["interrupted"] is True
    denoiser.failures.clear()
    again = run("denoise", "in", "out", "--existing", "skip")
    assert "2 of 3 output(s) are there already and stay as they are" in again.stderr
    assert "1 of 1 file(s) written" in again.stdout
    assert listing(Path("out")) == ["a.tif", "b.png", "c.PNG"]
    assert len(denoiser.calls) == 4
    nothing = run("denoise", "in", "out", "--existing", "skip", "--json")
    assert json.loads(nothing.stdout)["files"] == []
    message = fails("denoise", "in", "out")
    assert "OUT: got out/a.tif, out/b.png, out/c.PNG, already there" in message
    run("denoise", "in", "out", "--existing", "overwrite")
    assert len(denoiser.calls) == 7


def test_figures_go_to_a_folder(folder: Path, denoiser: Denoiser) -> None:
    run("denoise", "in/*.png", "out", "--compare", "figures")
    assert listing(Path("figures")) == ["b.png.png"]
    with Image.open("figures/b.png.png") as figure:
        assert figure.width > 500


def test_files_beside_the_inputs(folder: Path, denoiser: Denoiser) -> None:
    where = IMAGE > 99
    for name in ("masks", "references", "maps"):
        Path(name).mkdir()
    Image.fromarray(where).save("masks/a.png")  # the same name but for its extension
    Image.fromarray(~where).save("masks/b.png")
    np.save("masks/b.npy", where)  # the one of equal name comes first
    np.save("masks/c.npy", where)
    Image.fromarray(where).save("masks/c.tif")
    for name in ("a.tif", "b.png", "c.PNG"):
        Image.fromarray(IMAGE).save(f"references/{name}")
        np.save(f"maps/{name[0]}.npy", np.full(IMAGE.shape, 2.5))
    Image.fromarray(where).save("keep.png")
    result = run(
        "denoise", "in", "out", "--mask", "masks", "--reference", "references", "--sigma", "maps", "--keep", "keep.png",
        code=1,
    )  # fmt: skip
    assert "--mask: got the folder masks with 2 files called c, expected one for in/c.PNG" in result.stderr
    assert listing(Path("out")) == ["a.tif", "b.png"]
    first, second = (options for _, _, options in denoiser.calls)
    np.testing.assert_array_equal(first["mask"], where)
    np.testing.assert_array_equal(second["mask"], ~where)
    for (_, sigma, options), name in zip(denoiser.calls, ("in/a.tif", "in/b.png"), strict=True):
        np.testing.assert_array_equal(options["keep"], where)
        np.testing.assert_array_equal(sigma, np.full(IMAGE.shape, 2.5))
        (line,) = (line for line in result.stdout.splitlines() if line.startswith(name))
        assert "sigma 2.5 (map maps/" in line
        assert " dB after, SSIM " in line


def test_nothing_beside_an_input(folder: Path, denoiser: Denoiser) -> None:
    Path("masks").mkdir()
    message = fails("denoise", "in/b.png", "out.png", "--mask", "masks")
    assert "--mask: got the folder masks with no file called b.png or b, expected one for in/b.png" in message


def test_a_bar_over_the_files(folder: Path, denoiser: Denoiser, monkeypatch: pytest.MonkeyPatch) -> None:
    given = []

    class Bar:
        def __init__(self, **options: object) -> None:
            given.append(options)

        def __enter__(self) -> Bar:
            return self

        def __exit__(self, *problem: object) -> None:
            given.append("closed")

        def set_postfix_str(self, text: str) -> None:
            given.append(text)

        def update(self) -> None:
            given.append("+")

        @staticmethod
        def external_write_mode() -> Bar:
            return Bar.__new__(Bar)

    monkeypatch.setattr("tqdm.tqdm", Bar)
    run("denoise", "in", "out", "-q")
    options = given[0]
    assert isinstance(options, dict)
    assert (options["total"], options["unit"], options["disable"]) == (3, "file", True)
    assert given[1:] == ["a.tif", "+", "b.png", "+", "c.PNG", "+", "closed"]


# --- folders inside folders ------------------------------------------------------------------------------------------


@pytest.fixture
def tree(folder: Path) -> Path:
    """Return a folder with folders inside, links to them and back, and what is to be left out."""
    Path("in/deeper/last").mkdir()
    Image.fromarray(IMAGE).save("in/deeper/last/b.png")
    Image.fromarray(IMAGE).save("in/deeper/x.gif")
    Path("in/.git").mkdir()
    Image.fromarray(IMAGE).save("in/.git/e.png")
    Path("in/empty").mkdir()
    try:
        Path("in/deeper/round").symlink_to(Path("..").resolve(), target_is_directory=True)
        Path("in/deeper/link.png").symlink_to(Path("in/b.png").resolve())
    except OSError:
        pytest.skip("this system makes no links")
    return folder


def tree_of(folder: str) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in Path(folder).rglob("*")
                  if path.is_file() and ".nlflow" not in path.parts)  # fmt: skip


TREE = ["a.tif", "b.png", "c.PNG", "deeper/d.png", "deeper/last/b.png", "deeper/link.png", "deeper/x.png"]


@pytest.mark.slow
def test_a_tree(tree: Path, denoiser: Denoiser) -> None:
    result = run("denoise", "in", "out", "--recursive", "--compare", "figures")
    assert tree_of("out") == TREE
    assert tree_of("figures") == [f"{name}.png" for name in [*TREE[:-1], "deeper/x.gif"]]
    assert result.stderr.splitlines() == [
        "nonlocal: note: in/deeper/round: is a link to a folder, and is left out",
        "nonlocal: note: in: 1 file(s) of other formats are left out",
        "nonlocal: note: a GIF file holds 256 colours, fewer than a result has: outputs of such inputs are called "
        "x.png and so on",
        "nonlocal: note: in/deeper/x.gif: palette colours converted to RGB",
        "nonlocal: note: in/deeper/x.gif: its three channels are equal, and are read as grey",
    ]
    assert len(denoiser.calls) == len(TREE)
    assert result.stdout.splitlines()[-1].startswith("7 of 7 file(s) written to out in ")
    kept = run("denoise", "in", "out", "--recursive", "--compare", "figures", "--existing", "resume")
    assert len(denoiser.calls) == len(TREE)
    assert "7 of 7 file(s) were done before" in kept.stdout


def test_an_output_folder_inside_the_input(tree: Path, denoiser: Denoiser) -> None:
    for _ in range(2):  # the outputs of the first run are no inputs of the second
        run("denoise", "in", "in/deeper/out", "-r", "-q", "--existing", "overwrite")
        assert tree_of("in/deeper/out") == TREE
    Path("linked").symlink_to(Path("in/deeper/out").resolve(), target_is_directory=True)
    run("denoise", "in", "linked", "-r", "-q", "--existing", "overwrite")
    assert tree_of("in/deeper/out") == TREE
    assert len(denoiser.calls) == 3 * len(TREE)
    assert "the same file as the input in/a.tif" in fails("denoise", "in", "in", "-r")


def test_files_that_belong_to_a_tree(tree: Path, denoiser: Denoiser) -> None:
    for name in TREE:
        mask = Path("masks") / name
        mask.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full_like(IMAGE, 255 * (name == "deeper/last/b.png"))).save(mask.with_suffix(".png"))
    run("denoise", "in", "out", "-r", "-q", "--mask", "masks", "--quality", "fast")
    masks = [bool(options["mask"].any()) for _, _, options in denoiser.calls]
    assert masks == [name == "deeper/last/b.png" for name in TREE]


def test_what_recursive_is_not_for(tree: Path, denoiser: Denoiser) -> None:
    assert "--recursive: got in/b.png, expected a folder" in misused("denoise", "in/b.png", "out", "--recursive")
    Path("only/inside").mkdir(parents=True)
    Image.fromarray(IMAGE).save("only/inside/a.png")
    assert fails("denoise", "only", "out").endswith("give --recursive for folders inside folders")
    run("denoise", "only", "out", "-r")
    assert tree_of("out") == ["inside/a.png"]


def test_formats_that_are_not_written(folder: Path, denoiser: Denoiser) -> None:
    Image.fromarray(IMAGE).save("in/b.gif")
    result = run("denoise", "in", "out", code=1)
    assert "OUT for in/b.png: got out/b.png, the same file as OUT for in/b.gif, expected another" in result.stderr
    assert "OUT for in/b.gif: got out/b.png, the same file as OUT for in/b.png" in result.stderr
    assert "2 of 4 file(s) failed" in result.stderr
    assert listing(Path("out")) == ["a.tif", "c.PNG"]
    Path("in/b.png").unlink()
    run("denoise", "in", "out", "--existing", "overwrite")
    assert listing(Path("out")) == ["a.tif", "b.png", "c.PNG"]
