"""What is written for package indexes agrees with pyproject.toml."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
CONDA = {"matplotlib": "matplotlib-base"}  # without windows


def test_the_recipe_asks_for_what_the_wheel_asks_for():
    recipe = (ROOT / "conda" / "meta.yaml").read_text(encoding="utf-8")
    asked = re.findall(r"^    - (\S+ >=\S+)$", recipe.partition("  run:")[2], flags=re.M)
    wanted = [re.fullmatch(r"([\w-]+)(>=[\d.]+)", one).groups() for one in PROJECT["dependencies"]]
    python = ("python", PROJECT["requires-python"])
    assert asked == [f"{CONDA.get(name.lower(), name.lower())} {least}" for name, least in [python, *wanted]]


def test_versions_agree():
    version = re.escape(PROJECT["version"])
    for name, line in (("conda/meta.yaml", rf'set version = "{version}"'), ("CITATION.cff", rf"^version: {version}$")):
        assert re.search(line, (ROOT / name).read_text(encoding="utf-8"), flags=re.M), name
