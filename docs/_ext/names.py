"""Links names of the package in Markdown to their pages: `nlflow.denoise` is plain code on a forge, and a link here."""

from __future__ import annotations

import re
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx

_NAME = re.compile(r"nlflow(\.\w+)+")


def _link(app: Sphinx, document: nodes.document) -> None:
    """Make each name that is set as code a reference, which stays plain code where there is no such page."""
    if not str(document.get("source", "")).endswith(".md"):
        return
    for code in list(document.findall(nodes.literal)):
        inside = isinstance(code.parent, nodes.reference | nodes.title | addnodes.pending_xref)
        if inside or not _NAME.fullmatch(code.astext()):
            continue
        name = code.astext()
        code.replace_self(addnodes.pending_xref(
            "", code.deepcopy(), refdomain="py", reftype="obj", reftarget=name, refexplicit=True, refwarn=False,
            refdoc=app.env.docname,
        ))  # fmt: skip


def setup(app: Sphinx) -> dict[str, Any]:
    """Register with Sphinx."""
    app.connect("doctree-read", _link)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
