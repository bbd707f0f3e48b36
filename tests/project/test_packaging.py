"""What is written for package indexes agrees with pyproject.toml."""

import re
import runpy
import sys
import tomllib
from pathlib import Path
from unittest.mock import Mock

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

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


ASKED = [
    Requirement(line)
    for lines in (PROJECT["dependencies"], *PROJECT["optional-dependencies"].values())
    for line in lines
    if not line.startswith("nlflow[")
]
PINNED = dict(re.findall(r"^([^#=]+)==(\S+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), flags=re.M))
PINNED = {canonicalize_name(name): pinned for name, pinned in PINNED.items()}
UNPINNED = {"magicgui", "napari", "npe2", "pyarrow"}  # of environments of their own
# The first versions without what public reports told of the ones before.
MENDED = {
    "bokeh": ("3.8.2", "CVE-2026-21883"),
    "dask": ("2026.1", "CVE-2026-23528, of distributed"),
    "filelock": ("3.20.3", "CVE-2025-68146, CVE-2026-22701"),
    "h5py": ("3.16", "wheels with HDF5 2.0, where CVE-2025-2153 and its kin are mended"),
    "opencv-python-headless": ("4.12", "CVE-2025-53644"),
    "pillow": ("12.3", "CVE-2026-25990, -40192, -55379, -55798, -59197 to -59200"),
    "pyarrow": ("23.0.1", "CVE-2026-25087"),
    "pytest": ("9.0.3", "CVE-2025-71176"),
    "rawpy": ("0.28", "wheels with LibRaw 0.22.2: CVE-2026-20884, -20911, -21413, -24450"),
    "scikit-learn": ("1.5", "CVE-2024-5206"),
    "scipy": ("1.10", "CVE-2023-25399"),
    "torch": ("2.12.1", "CVE-2025-32434, -2953, -3000, -3001, -3730, CVE-2026-24747"),
    "tornado": ("6.5.9", "CVE-2025-67724 to -67726, CVE-2026-31958, -35536, -49853 to -49855"),
    "tqdm": ("4.66.3", "CVE-2024-34062"),
    "transformers": ("5.10", "CVE-2026-4372, -5241, -9856"),
    "uv": ("0.11.6", "CVE-2025-54368, -62518"),
}


@pytest.mark.parametrize("need", ASKED, ids=str)
def test_bounds_and_constraints_agree(need: Requirement) -> None:
    name = canonicalize_name(need.name)
    others = {str(one.specifier) for one in ASKED if canonicalize_name(one.name) == name}
    assert others == {str(need.specifier)}, "one package, one bound"
    (bound,) = need.specifier
    assert bound.operator == ">="
    if name in UNPINNED:
        assert name not in PINNED
    else:
        assert need.specifier.contains(PINNED[name]), f"{PINNED[name]} in constraints.txt"
    if name in MENDED:
        assert Version(bound.version) >= Version(MENDED[name][0]), MENDED[name][1]


def test_mended_versions_are_asked_for() -> None:
    assert set(MENDED) <= {canonicalize_name(need.name) for need in ASKED}


def test_a_release_is_built_with_what_was_tested() -> None:
    workflow = (ROOT / ".github" / "workflows" / "release.yml").read_text(encoding="utf-8")
    (installed,) = re.findall(r"pip install (.+)", workflow)
    words = installed.split()
    assert words[:2] == ["-c", "constraints.txt"]
    assert {"build", "hatchling", "twine"} == set(words[2:]) <= set(PINNED)
    assert "-m build --no-isolation" in workflow
    assert all(re.fullmatch(r"[\w./-]+@v\d+(\.\d+)*", action) for action in re.findall(r"uses: (\S+)", workflow))


def test_few_packages_are_asked_for():
    assert len(PROJECT["dependencies"]) <= 9


def test_the_index_shows_no_link_into_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hatchling.metadata.plugin.interface", Mock(MetadataHookInterface=object))
    for_index = runpy.run_path(str(ROOT / "hatch_build.py"))["for_index"]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = for_index(readme)
    targets = re.findall(r"\]\(([^)]*)\)", shown)
    assert targets
    assert all(target.startswith("https://") for target in targets)
    assert "![" not in shown
    assert "Four doors: denoise, flow, cure,\ntheory." in shown
    assert re.findall(r"```.*?```", shown, flags=re.S) == re.findall(r"```.*?```", readme, flags=re.S)
    absolute = for_index(readme, "https://example.org/nlflow/blob/main/")
    assert "](https://example.org/nlflow/blob/main/docs/use/theory.md)" in absolute
    assert all(target.startswith("https://") for target in re.findall(r"\]\(([^)]*)\)", absolute))


def test_versions_agree():
    version = re.escape(PROJECT["version"])
    for name, line in (("conda/meta.yaml", rf'set version = "{version}"'), ("CITATION.cff", rf"^version: {version}$")):
        assert re.search(line, (ROOT / name).read_text(encoding="utf-8"), flags=re.M), name
