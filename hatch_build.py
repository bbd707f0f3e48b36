"""The README as a package index shows it, where links into the repository lead nowhere; hatchling runs this file."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_INTO_THE_REPOSITORY = r"\]\((?!https?://)([^)\s]+)\)"


def for_index(text: str, address: str | None = None) -> str:
    """Return a text with links to files below an address, or, without one, their words alone and no pictures."""
    if address is not None:
        return re.sub(_INTO_THE_REPOSITORY, lambda found: f"]({address.rstrip('/')}/{found[1]})", text)
    text = re.sub(r"!\[[^\]]*" + _INTO_THE_REPOSITORY + r"\n*", "", text)
    return re.sub(r"\[([^\]]*)" + _INTO_THE_REPOSITORY, r"\1", text)


class Readme(MetadataHookInterface):
    """Sets ``readme``; ``[project.urls]`` may name the folder of files as ``Files``."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Put the text into the metadata of a distribution."""
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        address = metadata.get("urls", {}).get("Files")
        metadata["readme"] = {"content-type": "text/markdown", "text": for_index(text, address)}
