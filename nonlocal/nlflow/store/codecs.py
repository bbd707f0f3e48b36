"""Which codecs of zarr arrays do nothing but decode."""

from __future__ import annotations

from typing import Any

# Codecs that turn bytes into numbers and nothing else. (One of numcodecs unpickles, which runs what is in the file.)
_HARMLESS = {
    "bytes", "transpose", "crc32c", "sharding_indexed", "blosc", "gzip", "zstd", "zlib", "lz4", "lzma", "bz2",
    "delta", "shuffle", "fixedscaleoffset", "bitround", "packbits", "quantize", "astype", "crc32", "adler32",
    "fletcher32", "jenkins_lookup3",
}  # fmt: skip


def strange_codecs(meta: dict[str, Any]) -> list[str]:
    """Return the codecs in a description of version 2 or 3 that may do more than turn bytes into numbers, sorted."""
    return sorted(_codecs(meta) - _HARMLESS)


def _codecs(meta: dict[str, Any]) -> set[str]:
    """Return the names of all codecs in a description, those inside shards too."""
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
