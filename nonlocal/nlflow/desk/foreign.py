"""Links that lead out of a folder, and codecs that do more than decode."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from nlflow.errors import file_error

# Codecs that turn bytes into numbers and nothing else. (One of numcodecs unpickles, which runs what is in the file.)
_HARMLESS = {
    "bytes", "transpose", "crc32c", "sharding_indexed", "blosc", "gzip", "zstd", "zlib", "lz4", "lzma", "bz2",
    "delta", "shuffle", "fixedscaleoffset", "bitround", "packbits", "quantize", "astype", "crc32", "adler32",
    "fletcher32", "jenkins_lookup3",
}  # fmt: skip


def leads_out(path: Path, folder: Path) -> bool:
    return path.is_symlink() and not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))


def check_links(folder: Path, entries: Iterable[Path], expected: str) -> None:
    for entry in entries:
        if leads_out(entry, folder):
            got = f"the link {os.path.relpath(entry, folder)!r} in it, which leads to {os.path.realpath(entry)}"
            raise file_error(folder, got, f"{expected} without links to other places", "copy what is meant into it")


def links_in(folder: Path) -> Iterator[Path]:
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_symlink():
                yield Path(entry.path)
            elif entry.is_dir(follow_symlinks=False):
                yield from links_in(Path(entry.path))


def strange_codecs(meta: dict[str, Any]) -> list[str]:
    """Return the codecs in a description of zarr 2 or 3 that may do more than decode."""
    return sorted(_codecs(meta) - _HARMLESS)


def _codecs(meta: dict[str, Any]) -> set[str]:
    names: set[str] = set()

    def look(codec: Any) -> None:
        if isinstance(codec, dict):
            names.add(str(codec.get("name", codec.get("id"))).lower().removeprefix("numcodecs."))
            configuration = codec.get("configuration")
            inner = configuration if isinstance(configuration, dict) else {}
            for key in ("codecs", "index_codecs"):
                for other in inner.get(key) or ():
                    look(other)
        elif codec is not None:
            names.add(str(codec).lower())

    for codec in (*(meta.get("codecs") or ()), *(meta.get("filters") or ()), meta.get("compressor")):
        look(codec)
    return names
