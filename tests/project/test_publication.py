"""The paper about the package: its figures are drawn, its references are there, its numbers were measured."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from matplotlib import image

from paper import figures

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "paper" / "paper.md").read_text(encoding="utf-8")
FILES = [ROOT / "paper" / name for name in re.findall(r"^  - (\S+\.bib)", TEXT, flags=re.M)]
ENTRIES = [entry for file in FILES for entry in re.split(r"^@", file.read_text(encoding="utf-8"), flags=re.M)[1:]]
KEYS = [entry.partition("{")[2].partition(",")[0] for entry in ENTRIES]


@pytest.mark.slow
def test_figures_are_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["figures", "--out", str(tmp_path)])
    figures.main()
    named = re.findall(r"\]\((\w+\.png)\)", TEXT)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(named)
    for name in named:
        assert image.imread(tmp_path / name).std() > 0.05
        assert (ROOT / "paper" / name).is_file()


def test_what_is_cited_is_there_and_what_is_there_is_cited() -> None:
    assert len(set(KEYS)) == len(KEYS)
    cited = set(re.findall(r"(?<![\w.])@(\w+)", TEXT.partition("\n---\n")[2]))
    own = set(re.findall(r"^@\w+\{(\w+),", FILES[0].read_text(encoding="utf-8"), flags=re.M))
    assert own < cited < set(KEYS)  # the second file has what studies cite, too


@pytest.mark.parametrize("entry", ENTRIES, ids=KEYS)
def test_a_reference_leads_somewhere(entry: str) -> None:
    doi = re.search(r"doi = \{(.*?)\}", entry)
    if doi is not None:
        assert re.fullmatch(r"10\.\d{4,}/\S+", doi[1])
    else:
        assert re.search(r"eprint = \{\d{4}\.\d{5}\}|url = \{https://\S+\}", entry)


def test_numbers_are_those_that_were_measured() -> None:
    found = figures.means(figures.load_record(figures.RESULTS, "benchmark")["records"]["Set12"])
    quoted = [f"{found[method, 25.0]:.2f}" for method in ("scikit-image NLM, d=6", "BM3D", "fast", "balanced", "best")]
    skimage, bm3d, *ours = quoted
    text = " ".join(TEXT.split())
    assert f"{skimage} dB for the nonlocal means" in text
    assert f"{bm3d} dB for BM3D, and {ours[0]}, {ours[1]} and {ours[2]} dB" in text
    assert f"WNNM is published with {figures.PUBLISHED['WNNM'][25.0]} dB" in text
    rows = figures.load_record(figures.RESULTS, "benchmark")["rows"]
    share = next(row["ratio"] for row in rows if row["work"].startswith("balanced: time against BM3D, threads: 1"))
    assert "`balanced` takes a fifth of BM3D's time" in text
    assert round(1 / float(share)) in (5, 6)


def test_length_and_authors() -> None:
    head, _, body = TEXT.removeprefix("---\n").partition("\n---\n")
    assert 750 < len(body.split()) < 1200
    authors = re.search(r"^authors:\n((?:  .*\n)+)", (ROOT / "CITATION.cff").read_text(encoding="utf-8"), flags=re.M)
    assert authors is not None
    names = re.findall(r"name: (.+)", authors[1])
    assert names == re.findall(r"name: (.+)", head)
