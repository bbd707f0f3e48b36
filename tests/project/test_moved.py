"""Modules under their former names are the modules themselves."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module

import pytest

from nlflow import _moved


@pytest.mark.parametrize(
    "name", [*_moved._PLACES, "nlflow.io.atomic", "nlflow.io.formats.hdf5", "nlflow.commands.main"]
)
def test_a_former_name_gives_the_module_itself(name: str) -> None:
    new = _moved.place_of(name)
    found = import_module(name)
    if name == _moved._SPLIT:
        assert found.__name__ == name
        return
    assert new is not None
    assert found is import_module(new)
    assert found.__name__ == found.__spec__.name == new  # type: ignore[union-attr]


def test_names_and_commands_are_found_where_they_were() -> None:
    program = """
from nlflow.io import files
from nlflow.denoising.large import denoise_array, denoise_store, open_image
import nlflow, nlflow.desk.files
assert files is nlflow.desk.files is nlflow.io.files
"""
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True)
    words = [sys.executable, "-m", "nlflow.commands.main", "--version"]
    assert subprocess.run(words, check=True, capture_output=True, text=True).stdout.startswith("nlflow ")


def test_what_never_was_is_not_there() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"nlflow\.io\.nothing"):
        import_module("nlflow.io.nothing")
    with pytest.raises(ModuleNotFoundError, match=r"nlflow\.nothing"):
        import_module("nlflow.nothing")
