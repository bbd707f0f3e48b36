"""The command `nonlocal cite`: BibTeX that leads somewhere, of the package and of the theory behind what was run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from nlflow import InputError
from nlflow.studies.citing import THEORY, bibtex
from nlflow.studies.replay import study_files
from nlflow.studies.runner import KINDS
from tests.commands import fails, run

ROOT = Path(__file__).parents[2]


def entries(text: str) -> dict[str, str]:
    parts = re.split(r"^@\w+\{", text, flags=re.M)[1:]
    return {part.partition(",")[0]: " ".join(part.partition(",")[2].split()) for part in parts}


@pytest.mark.parametrize("subject", THEORY)
def test_every_subject_has_its_works(subject: str) -> None:
    found = entries(bibtex(subject))
    assert list(found) == ["nlflow", *THEORY[subject]]
    for key, entry in list(found.items())[1:]:
        assert re.search(r"doi = \{10\.\d{4,}/\S+\}|eprint = \{\d{4}\.\d{5}\}", entry), key
        assert entry.count("{") + 1 == entry.count("}")
        assert re.search(r"author = \{.+\}, title = \{.+\}.* year = \{\d{4}\}", entry)


def test_every_kind_of_study_has_a_theory() -> None:
    assert set(KINDS) <= set(THEORY)


def test_the_package_is_told_as_in_its_citation_file() -> None:
    told = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    entry = entries(bibtex())["nlflow"]
    for key in ("title", "version", "license"):
        said = re.search(rf'^{key}: "?(.+?)"?$', told, flags=re.M)
        assert said is not None
        assert said[1] in entry.replace("{nlflow}", "nlflow")
    assert "author = {{the nlflow developers}}" in entry


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run("cite").stdout == bibtex()
    assert run("cite", "mixing").stdout == bibtex("mixing")
    Path("study.toml").write_bytes(study_files("mixing", {}, 0, [])["study.toml"])
    assert run("cite", "study.toml").stdout == bibtex("mixing")
    assert "subject: got 'Mixing', expected one of 'flows'" in fails("cite", "Mixing")
    assert "none.toml: there is no such file" in fails("cite", "none.toml")
    with pytest.raises(InputError, match="subject: got 'all'"):
        bibtex("all")
