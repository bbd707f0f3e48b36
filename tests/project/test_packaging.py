"""What is written for package indexes agrees with pyproject.toml."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
CONDA = {"matplotlib": "matplotlib-base"}  # without windows
EXTRAS = {None: [], "[codecs]": ["imagecodecs"]}  # conda has no extras


DESK = [one for extra in ("desk", "plots") for one in PROJECT["optional-dependencies"][extra] if "[plots]" not in one]


def test_the_recipe_asks_for_what_the_wheel_asks_for():
    """With its desk."""
    recipe = (ROOT / "conda" / "meta.yaml").read_text(encoding="utf-8")
    asked = re.findall(r"^    - (.+)$", recipe.partition("  run:")[2].partition("\n\n")[0], flags=re.M)
    wanted = [f"python {PROJECT['requires-python']}"]
    for one in sorted([*PROJECT["dependencies"], *DESK]):
        name, extra, least = re.fullmatch(r"([\w-]+)(\[\w+\])?(>=[\d.]+)", one).groups()
        wanted.append(f"{CONDA.get(name.lower(), name.lower())} {least}")
        wanted += EXTRAS[extra]
    assert asked == wanted


def test_few_packages_are_asked_for():
    assert len(PROJECT["dependencies"]) <= 9


def test_versions_agree():
    version = re.escape(PROJECT["version"])
    for name, line in (("conda/meta.yaml", rf'set version = "{version}"'), ("CITATION.cff", rf"^version: {version}$")):
        assert re.search(line, (ROOT / name).read_text(encoding="utf-8"), flags=re.M), name
