"""Tables: each column is a signal of its own, whose truth is known here, and nothing about a column is silent."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from nlflow import denoise
from nlflow.desk import files
from nlflow.errors import FileFormatError
from tests.commands import fails, run

Array = NDArray[np.float64]
TIME = np.arange(600) / 50
CLEAN = np.stack([np.sin(TIME), 101_325 + 500 * np.sign(np.sin(TIME / 2)), 20 + 1e-3 * np.cos(TIME)], 1)
NOISE = np.array([0.2, 100.0, 2e-4])
NOISY = CLEAN + np.random.default_rng(3).normal(size=CLEAN.shape) * NOISE
NAMES = ("volt", "pascal", "kelvin")
FAST = ("--quality", "pixels")


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
        np.testing.assert_array_equal(values[:, c], denoise(files.read("in.csv").data[:, c], quality="pixels"))
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
    run("denoise", "in.csv", "nan.csv", *FAST)
    np.testing.assert_array_equal(np.isnan(files.read("nan.csv").data), np.isnan(values))
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


# --- texts as instruments write them: what is no sample stays as it stands there

SPECTRUM = [(200 + 1.7 * k + 0.01 * k * k, float(v)) for k, v in enumerate(NOISY[:40, 0])]
SAMPLES = [v for _, v in SPECTRUM]


def _lines(mark: str, *, comma: bool = False, end: str = "") -> str:
    text = "".join(f"{a:.2f}{mark}{b!r}{end}\n" for a, b in SPECTRUM)
    return text.replace(".", ",") if comma else text


TEXTS = {
    "spectrometer.txt": "Data File\n+++\nDate: Mon 5\nTime (usec): 100000 (S1)\n>>>>>Begin<<<<<\n"
    + _lines("\t")
    + ">>>>>End<<<<<\n",
    "spaces.dat": "  " + _lines("   ").replace("\n", "\n  ").rstrip(" "),
    "comments.csv": "# made by x\n# a, b, c\nwave,counts,\n" + _lines(",", end=",") + "# the end\n",
    "names.tsv": "wave\tcounts\r\n" + _lines("\t").replace("\n", "\r\n"),
    "years.csv": "wave,2001\n" + _lines(","),
    "settings.csv": "Key,Value\nExposure,10\nwave,counts\n" + _lines(","),
    "commas.txt": "Wellenlänge;Intensität\n" + _lines(";", comma=True),
    "labels.csv": 'name,"a ""q"""\n' + "".join(f'"s, {k}",{v!r}\n' for k, v in enumerate(SAMPLES)),
    "rows.csv": "counts\n" + "".join(f"r{k},{v!r}\n" for k, v in enumerate(SAMPLES)),
    "steps.csv": "y,x,z\n" + "".join(f"{v!r},{0.5 * k},text\n" for k, v in enumerate(SAMPLES)),
}


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "latin-1"])
@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.sampled(10)
def test_a_text_comes_back_but_for_its_samples(name: str, encoding: str) -> None:
    Path(name).write_bytes(TEXTS[name].encode(encoding))
    media, out = files.read(name), f"out.{name[-3:]}"
    assert media.data.tolist() == SAMPLES
    assert files.check_output(out, media) == ()
    files.write(out, media.data, media)
    assert Path(out).read_bytes() == Path(name).read_bytes()
    files.write(out, media.data + 1, media)
    assert files.read(out).data.tolist() == [v + 1 for v in SAMPLES]


def test_empty_cells_are_missing_and_stay_empty() -> None:
    rows = [f"{k},{'' if k % 50 == 7 else v},{'NA' if k == 3 else w}" for k, (v, w) in enumerate(NOISY[:, :2].tolist())]
    Path("in.csv").write_text("id,a,b\n" + "\n".join(rows) + "\n")
    found = report("in.csv", "out.csv")
    assert (found["missing"], [column["name"] for column in found["columns"]]) == (13, ["a", "b"])
    written = [line.split(",") for line in Path("out.csv").read_text().splitlines()[1:]]
    assert [k for k, row in enumerate(written) if not row[1]] == list(range(7, 600, 50))
    assert [row[2] for row in written].index("NA") == 3
    assert all(abs(float(row[1]) - CLEAN[k, 0]) < 0.6 for k, row in enumerate(written) if row[1])
    told = run("denoise", "in.csv", "out.npy", *FAST).stderr
    assert "the first column" in told


def test_tables_in_another_kind_of_text() -> None:
    Path("in.csv").write_text("# words\nwave,counts\n" + _lines(","))
    media = files.read("in.csv")
    files.write("out.tsv", media.data, media)
    assert Path("out.tsv").read_text() == "# words\nwave\tcounts\n" + _lines("\t")
    np.save("in.npy", NOISY[:4])
    media = files.read("in.npy", kind="signal")
    files.write("out.txt", media.data, media)
    np.testing.assert_array_equal(np.loadtxt("out.txt"), NOISY[:4])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a,b\nx,y\nu,v\n", r"columns of text alone \('a', 'b'\), expected at least one column of numbers"),
        ("a,b\n1,2\n3\n5,6\n", r"got 1 cell\(s\) in line 3, expected 2"),
        ("a,b\n1,2\n3,x\n5,6\n", r"got 'x' in line 3, cell 2 \(column 'b'\)"),
        ("a,b\n1,2\n3,4\n5,x\n", r"got 'x' in line 4, cell 2"),
        ("a,b\nz,2\n3,4\n5,6\n", r"got 'z' in line 2, cell 1 \(column 'a'\)"),
        ("a;b\n1.234,5;x\n1.235,5;y\n", r"got '1\.234,5' in line 2"),
        ("volt\n1,5\n2,5\n", r"one name over numbers such as '1,5'"),
        ("a,b\n,\n,\n", "no row of numbers"),
        ("words\nand more\n", "no row of numbers"),
        ("\0\1\2\3", "bytes that are no text"),
    ],
)
def test_what_is_no_table_is_refused_by_name(text: str, words: str) -> None:
    Path("in.csv").write_bytes(text.encode("latin-1"))
    with pytest.raises(FileFormatError, match=words):
        files.read("in.csv")


def test_of_a_folder_texts_of_numbers_alone_are_tables() -> None:
    Path("in").mkdir()
    Path("in/readme.txt").write_text("what these files are\n")
    Path("in/a.txt").write_text(TEXTS["spectrometer.txt"])
    assert "1 file(s) of other formats are left out" in run("denoise", "in", "out", *FAST).stderr
    assert [path.name for path in Path("out").glob("*.txt")] == ["a.txt"]


# --- Parquet


def test_a_parquet_table_comes_back_as_it_was(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    pandas = pytest.importorskip("pandas")
    counts = np.rint(NOISY[:, 1]).astype("i4")
    given = pandas.DataFrame({"t": TIME, "volt": NOISY[:, 0].astype("f4"), "counts": counts, "name": ["x"] * 600})
    given.index = pandas.Index([f"r{k}" for k in range(600)], name="row")
    given.loc["r7", "volt"] = np.nan
    given.to_parquet("in.parquet")
    media = files.read("in.parquet")
    assert (media.columns, media.absent.sum()) == (("volt", "counts"), 1)
    assert files.check_output("out.parquet", media) == ()
    files.write("out.parquet", media.data + 0.9, media)
    found = pandas.read_parquet("out.parquet")
    assert found.dtypes.equals(given.dtypes)
    assert found[["t", "name"]].equals(given[["t", "name"]])
    assert found.index.equals(given.index)
    assert (found["counts"] - counts == 1).all()
    assert found["volt"].isna().equals(given["volt"].isna())
    assert files.check_output("out.csv", media) == ("out.csv: the other columns are left out",)


def test_pyarrow_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("in.parquet").write_bytes(b"PAR1" + bytes(40))
    monkeypatch.setenv("NLFLOW_DECODE", "here")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(
        FileFormatError, match=r"in\.parquet: needs pyarrow, which is not installed; .*nlflow\[parquet\]"
    ):
        files.read("in.parquet")
