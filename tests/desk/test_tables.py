"""Tables: each column is a signal of its own, whose truth is known here, and nothing about a column is silent."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from nlflow import denoise
from nlflow.desk import files
from tests.commands import fails, run

Array = NDArray[np.float64]
TIME = np.arange(600) / 50
CLEAN = np.stack([np.sin(TIME), 101_325 + 500 * np.sign(np.sin(TIME / 2)), 20 + 1e-3 * np.cos(TIME)], 1)
NOISE = np.array([0.2, 100.0, 2e-4])
NOISY = CLEAN + np.random.default_rng(3).normal(size=CLEAN.shape) * NOISE
NAMES = ("volt", "pascal", "kelvin")
FAST = ("--quality", "fast")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def table(name: str, values: Array, *, header: str = "depth," + ",".join(NAMES), first: Array | None = TIME) -> None:
    """Write a table as instruments do, with a first column unless it is None."""
    columns = values if first is None else np.column_stack([first, values])
    np.savetxt(name, columns, fmt="%.10g", delimiter=",", header=header, comments="")


def errors(values: Array) -> Array:
    """Return the root mean square error of each column in units of its noise."""
    return np.asarray(np.sqrt(np.mean((values - CLEAN) ** 2, axis=0)) / NOISE)


def report(*words: str) -> Any:
    return json.loads(run("denoise", *words, *FAST, "-q", "--json").stdout)


def test_the_error_of_every_column_falls_as_if_it_were_alone() -> None:
    table("in.csv", NOISY)
    result = run("denoise", "in.csv", "out.csv", *FAST)
    values = files.read("out.csv").data
    assert (errors(NOISY) > 0.9).all()
    assert (errors(values) < 0.5).all(), errors(values)
    for c in range(3):
        np.testing.assert_array_equal(values[:, c], denoise(files.read("in.csv").data[:, c], quality="fast"))
    assert "nonlocal: note: in.csv: column 'depth' is strictly increasing and is kept as it is" in result.stderr
    assert Path("out.csv").read_text().splitlines()[3].startswith("0.04,")
    (line,) = [line for line in result.stdout.splitlines() if line.startswith("sigma")]
    for name, level in zip(NAMES, NOISE, strict=True):
        shown = float(line.split(f"{name} ")[1].split()[0].rstrip(","))
        assert 0.85 * level < shown < 1.15 * level


@pytest.mark.slow
@pytest.mark.parametrize("header", ["", "time,volt,pascal,kelvin", "z,volt,pascal,kelvin"])
def test_a_first_column_that_rises_or_falls_is_kept_whatever_its_name(header: str) -> None:
    for first in (TIME, -TIME, TIME**3):
        table("in.csv", NOISY, header=header, first=first)
        if not header:
            Path("in.csv").write_text(Path("in.csv").read_text().lstrip())
        run("denoise", "in.csv", "out.csv", *FAST, "--steps", "1", "--existing", "overwrite")
        given, written = (Path(name).read_text().splitlines() for name in ("in.csv", "out.csv"))
        assert [line.split(",")[0] for line in given] == [line.split(",")[0] for line in written]
        assert files.read("out.csv").header == files.read("in.csv").header


@pytest.mark.slow
def test_the_first_column_can_be_decided() -> None:
    table("in.csv", NOISY)
    first = report("in.csv", "out.csv", "--first-column", "denoise", "--steps", "1")
    assert [column["name"] for column in first["columns"]] == ["depth", *NAMES]
    assert files.read("out.csv", first_column="denoise").data.shape == (600, 4)
    table("raw.csv", NOISY, first=None, header=",".join(NAMES))
    second = report("raw.csv", "o.csv", "--first-column", "keep", "--steps", "1")
    assert [column["name"] for column in second["columns"]] == ["pascal", "kelvin"]
    assert "leave first-column=keep out" in run_on_one_column("--first-column", "keep")


def run_on_one_column(*words: str) -> str:
    np.savetxt("one.csv", TIME)
    return fails("denoise", "one.csv", "o1.csv", *words)


@pytest.mark.slow
def test_what_sigma_says() -> None:
    table("in.csv", NOISY)
    plain = report("in.csv", "plain.csv")
    assert report("in.csv", "auto.csv", "--sigma", "auto")["columns"][0]["sigma"] == plain["columns"][0]["sigma"]
    assert Path("auto.csv").read_bytes() == Path("plain.csv").read_bytes()
    given = report("in.csv", "given.csv", "--sigma", "0.2,100,0.0002")
    assert [column["sigma"] for column in given["columns"]] == NOISE.tolist()
    assert (errors(files.read("given.csv").data) < 0.5).all()
    one = report("in.csv", "one.csv", "--sigma", "0.2", "--steps", "1")
    assert [column["sigma"] for column in one["columns"]] == [0.2] * 3
    message = fails("denoise", "in.csv", "out.csv", "--sigma", "0.2,100")
    assert "--sigma: got 2 numbers for in.csv, expected one for all columns, or 3" in message
    np.savetxt("map.csv", np.broadcast_to(NOISE, CLEAN.shape), delimiter=",")
    assert "sigma" in report("in.csv", "map-out.csv", "--sigma", "map.csv", "--steps", "1")["columns"][2]


def test_auto_is_no_sigma_for_other_files() -> None:
    np.save("in.npy", NOISY[:, 0])
    for words in ([], ["--sigma", "auto"]):
        assert report("in.npy", f"o{len(words)}.npy", *words)["sigma_given"] is None
    assert "for in.npy, expected a CSV table" in fails("denoise", "in.npy", "o.npy", "--first-column", "keep")
    assert Path("o0.npy").read_bytes() == Path("o2.npy").read_bytes()


def test_columns_with_nothing_to_do_are_told() -> None:
    values = NOISY.copy()
    values[:, 1] = 7
    values[40:60, 0] = np.nan
    values[:, 2] = np.nan
    table("in.csv", values)
    assert "give --mask nan" in fails("denoise", "in.csv", "out.csv")
    result = run("denoise", "in.csv", "out.csv", "--mask", "nan", *FAST)
    assert "column 'pascal' stays as it is (returned unchanged: the input is constant)" in result.stderr
    assert "column 'kelvin' stays as it is (returned unchanged: every sample is missing)" in result.stderr
    written = files.read("out.csv").data
    assert (written[:, 1] == 7).all()
    assert np.isnan(written[:, 2]).all()
    assert errors(written)[0] < 0.5


def test_a_table_of_one_column_that_rises_is_denoised_and_says_so() -> None:
    np.savetxt("in.csv", 9 * TIME + np.random.default_rng(5).uniform(0, 0.1, 600))
    result = run("denoise", "in.csv", "out.csv", *FAST, "--sigma", "0.03")
    assert "column 1 is strictly increasing and is denoised all the same, since there is no other" in result.stderr
    assert (files.read("out.csv").data != files.read("in.csv").data).any()
    told = run("denoise", "in.csv", "o.csv", *FAST, "--sigma", "0").stderr
    assert "column 1 stays as it is (returned unchanged: there is no noise to remove (sigma=0))" in told


@pytest.mark.slow
def test_files_beside_a_table_fit_it() -> None:
    table("in.csv", NOISY)
    table("clean.csv", CLEAN)
    table("bare.csv", CLEAN, first=None, header=",".join(NAMES))
    found = report("in.csv", "out.csv", "--reference", "clean.csv")
    assert all(column["psnr_output"] > column["psnr_input"] + 6 for column in found["columns"])
    assert found["psnr_output"] == pytest.approx(np.mean([column["psnr_output"] for column in found["columns"]]))
    assert (
        report("in.csv", "o.csv", "--reference", "bare.csv")["columns"][0]["snr_output"]
        == found["columns"][0]["snr_output"]
    )
    # Without noise a first column rises that is data, and does not where there is noise.
    rising = np.column_stack([TIME, NOISY[:, 0]])
    np.savetxt("two.csv", rising + np.array([0.2, 0]) * NOISY[:, :1], delimiter=",")
    np.savetxt("two-clean.csv", rising, delimiter=",")
    assert len(report("two.csv", "o2.csv", "--reference", "two-clean.csv")["columns"]) == 2
    keep = np.zeros(CLEAN.shape)
    keep[:9, 1] = 1
    np.savetxt("keep.csv", keep, delimiter=",")
    report("in.csv", "kept.csv", "--keep", "keep.csv")
    same = files.read("kept.csv").data == files.read("in.csv").data
    assert (same[:9, 1].all(), same[:9, 0].any()) == (True, False)


@pytest.mark.slow
def test_a_folder_of_tables_goes_on_where_it_ended() -> None:
    Path("in").mkdir()
    for name in ("a", "b"):
        table(f"in/{name}.csv", NOISY)
    assert run("denoise", "in", "out", *FAST, "--steps", "1").stdout.count("volt 0.") == 2
    again = json.loads(run("denoise", "in", "out", *FAST, "--steps", "1", "--existing", "resume", "--json").stdout)
    assert (again["kept"], again["done"]) == (2, 0)
    other = ("--existing", "resume", "--first-column", "denoise", "--json")
    changed = json.loads(run("denoise", "in", "out", *FAST, "--steps", "1", *other).stdout)
    assert (changed["kept"], changed["done"]) == (0, 2)


def test_the_figure_has_the_noise_of_each_column(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr("nlflow.plotting.comparison_figure", lambda *_, **words: seen.append(words["sigma"]))
    monkeypatch.setattr("nlflow.plotting.render", lambda figure, form: b"drawn")
    table("in.csv", NOISY)
    found = report("in.csv", "out.csv", "--compare", "fig.png", "--steps", "1")
    assert seen == [[column["sigma"] for column in found["columns"]]]


@pytest.mark.slow
@pytest.mark.parametrize("mark", [";", "\t"])
def test_decimal_commas_come_back(mark: str) -> None:
    table("points.csv", NOISY)
    text = Path("points.csv").read_text()
    Path("commas.csv").write_text(text.replace(",", mark).replace(".", ","))
    run("denoise", "points.csv", "a.csv", *FAST)
    result = run("denoise", "commas.csv", "b.csv", *FAST)
    assert "nonlocal: note: commas.csv: commas count as decimal points, and OUT has them too" in result.stderr
    assert Path("b.csv").read_text() == Path("a.csv").read_text().replace(",", mark).replace(".", ",")


def test_dates_keep_their_points_beside_decimal_commas() -> None:
    lines = [f"{1 + n // 60:02}.02.2024 10:{n % 60:02};{v:.5f}".replace(".", ",") for n, v in enumerate(NOISY[:200, 0])]
    lines = [line.replace(",02,2024", ".02.2024") for line in lines]
    Path("in.csv").write_text("\n".join(["Zeit;Volt", *lines]))
    run("denoise", "in.csv", "out.csv", *FAST, "--first-column", "keep")
    written = Path("out.csv").read_text().splitlines()
    assert [line.partition(";")[0] for line in written[1:]] == [line.partition(";")[0] for line in lines]
    assert all("," in line.partition(";")[2] and "." not in line.partition(";")[2] for line in written[1:])


def test_points_and_commas_together_are_refused() -> None:
    Path("in.csv").write_text("a;b\n1.5;2,5\n1.6;2,6\n1.7;2,7\n")
    assert "got '2,5' in line 2, cell 2 (column 'b'), expected a number with a decimal point" in fails(
        "denoise", "in.csv", "out.csv"
    )
