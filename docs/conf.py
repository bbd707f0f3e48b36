"""How the documentation is built: ``make docs``."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE / "_ext"), str(HERE.parent)]

import numpy as np  # noqa: E402  # the paths come first
from sphinx.util import logging  # noqa: E402  # as above

import nlflow  # noqa: E402  # as above
from nlflow.backends.machine import version  # noqa: E402  # as above

project = "nlflow"
author = "the authors of nlflow"
copyright = author
version = release = version()  # type: ignore[misc,assignment]  # Sphinx's name for the text

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.mathjax",
    "sphinx-mathjax-offline",  # pages are read without a network
    "numpydoc",
    "myst_parser",
    "sphinx_copybutton",
    "sphinx_design",
    "sphinx_gallery.gen_gallery",
    "docstrings",
    "equations",
    "measured",
    "names",
    "programs",
]
exclude_patterns = ["_build", "examples"]

# Names of other packages become links where their lists can be fetched: on Read the Docs, and with DOCS_ONLINE=1. The
# build without a network stays the same but for these links. Python itself is left out: `signal` is an argument here.
ONLINE = os.environ.get("READTHEDOCS") == "True" or os.environ.get("DOCS_ONLINE") == "1"
extensions += ["sphinx.ext.intersphinx"] if ONLINE else []
intersphinx_mapping = {
    name: (f"https://{place}/", None)
    for name, place in (
        ("numpy", "numpy.org/doc/stable"),
        ("scipy", "docs.scipy.org/doc/scipy"),
        ("matplotlib", "matplotlib.org/stable"),
        ("skimage", "scikit-image.org/docs/stable"),
        ("sklearn", "scikit-learn.org/stable"),
        ("joblib", "joblib.readthedocs.io/en/stable"),
        ("xarray", "docs.xarray.dev/en/stable"),
        ("torch", "docs.pytorch.org/docs/stable"),
    )
}
# The gallery's pages are written anew by each build.
suppress_warnings = ["config.cache"]

# ---- text
default_role = "autolink"  # names in backquotes become links where they exist
myst_enable_extensions = ["amsmath", "dollarmath", "deflist", "colon_fence", "substitution"]
myst_heading_anchors = 3
math_eqref_format = "({number})"
math_number_all = False
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

# ---- reference
autosummary_generate = True
autodoc_typehints = "none"  # docstrings state the types, in the words of the field
autodoc_member_order = "bysource"
numpydoc_show_class_members = False  # the template of a class lists its methods
numpydoc_xref_param_type = False
templates_path = ["_templates"]

# ---- gallery
sphinx_gallery_conf = {
    "examples_dirs": ["examples"],
    "gallery_dirs": ["gallery"],
    "filename_pattern": r"/plot_",
    # Cells that scanpy ships, which brings thirty packages: that page is left out where it is not installed.
    "ignore_pattern": r"__init__\.py" if importlib.util.find_spec("scanpy") else r"__init__\.py|plot_single_cells\.py",
    "within_subsection_order": "FileNameSortKey",
    "matplotlib_animations": (True, "jshtml"),
    "image_srcset": ["2x"],
    "remove_config_comments": True,
    "show_memory": False,
    "show_signature": False,
    "abort_on_example_error": True,
    "write_computation_times": False,
    "reference_url": {"nlflow": None},
    "doc_module": ("nlflow",),
    "backreferences_dir": "reference/used_in",
    "download_all_examples": False,
    "nested_sections": True,
}

# ---- pages
html_theme = "pydata_sphinx_theme"
html_title = "nlflow"
html_static_path = ["_static"]
html_css_files = ["nlflow.css"]
html_show_sourcelink = False
html_theme_options = {
    "show_toc_level": 2,
    "navigation_with_keys": True,
    "header_links_before_dropdown": 5,
    "collapse_navigation": True,
    "navbar_persistent": ["search-button"],  # its field would take a second line
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": ["copyright"],
    "footer_end": ["theme-version"],
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
}
html_sidebars = {"index": [], "**": ["navigation.html"]}


# ---- files of the repository that are pages as well

ROOT_PAGES = {name.lower(): name for name in ("ARCHITECTURE", "CHANGELOG", "CONTRIBUTING", "SECURITY")}


def _from_root(app: Any, docname: str, source: list[str]) -> None:
    """Replace a stub by the text of its file in the root; links from there lead to the pages."""
    if docname in ROOT_PAGES:
        text = (HERE.parent / f"{ROOT_PAGES[docname]}.md").read_text(encoding="utf-8")
        for page, name in ROOT_PAGES.items():
            text = text.replace(f"({name}.md)", f"({page}.md)")
        text = text.replace("](docs/", "](")
        source[0] = text
        app.env.note_dependency(str(HERE.parent / f"{ROOT_PAGES[docname]}.md"))


FONT = re.compile(r'<link rel="stylesheet"\s+href="https://[^"]*font-awesome[^"]*">')


def _local_icons(app: Any, pagename: str, templatename: str, context: dict[str, Any], doctree: Any) -> None:
    """Remove the link of films to icons on a network; the theme has these icons."""
    if "body" in context:
        context["body"] = FONT.sub("", context["body"])


def _compiled(app: Any) -> None:
    """Compile the loops that denoise pictures before the gallery runs, so the time of an example is its own."""
    if app.config.sphinx_gallery_conf["plot_gallery"]:
        logging.getLogger(__name__).info("compiling the loops of the gallery, once on a machine")
        noisy = np.random.default_rng(0).normal(100, 20, (48, 48)).astype(np.float32)
        for quality in ("fast", "balanced"):
            nlflow.denoise(noisy, 20.0, quality=quality)


def setup(app: Any) -> None:
    """Register with Sphinx."""
    app.connect("builder-inited", _compiled, priority=100)  # before sphinx-gallery
    app.connect("source-read", _from_root)
    app.connect("html-page-context", _local_icons)
