"""Mutations that keep what a format checks first, so that fuzzing gets past it: CRCs, lengths and checksums.

A container is taken apart, one of its parts is changed by the fuzzer's own mutations, and it is put together again.
What cannot be taken apart, and every fifth input, is changed as plain bytes.
"""

from __future__ import annotations

import io
import json
import random
import struct
import zipfile
import zlib
from collections.abc import Callable
from typing import Any

__all__ = ["MUTATORS", "Mutate", "random_bytes", "sealed_case"]

#: From bytes, the largest length and random numbers to changed bytes.
Mutate = Callable[[bytes, int, random.Random], bytes]

_PNG = b"\x89PNG\r\n\x1a\n"
_EDGES = (0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 2**63 - 1, 2**64 - 1)
_TEXTS = (b"-1", b"0", b"1e308", b"1e-320", b"nan", b"inf", b"9" * 30, b"true", b"null", b"[]", b"{}", b'""', b"../")


def random_bytes(data: bytes, longest: int, rng: random.Random) -> bytes:
    """Return `data` with some bytes flipped, set, removed, doubled, moved, or replaced by extreme numbers."""
    found = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4, 8))):
        place = rng.randrange(len(found) + 1)
        kind = rng.randrange(8)
        if not found or kind == 0:
            found[place:place] = rng.randbytes(rng.randrange(1, 9))
        elif kind == 1:
            found[place % len(found)] ^= 1 << rng.randrange(8)
        elif kind == 2:
            found[place % len(found)] = rng.randrange(256)
        elif kind == 3:
            del found[place : place + rng.choice((1, 2, 4, 8, 64))]
        elif kind == 4:
            size = rng.choice((1, 2, 4, 8))
            number = (rng.choice(_EDGES) % 256**size).to_bytes(size, rng.choice(("little", "big")))
            found[place : place + size] = number
        elif kind == 5:
            found[place:place] = found[place : place + rng.choice((1, 4, 16, 64))]
        elif kind == 6:
            found[place : place + rng.randrange(4)] = rng.choice(_TEXTS)
        else:
            start = rng.randrange(len(found))
            size = rng.randrange(1, 17)
            found[place : place + size] = found[start : start + size]
    return bytes(found[:longest])


def png(data: bytes, longest: int, rng: random.Random, change: Mutate) -> bytes:
    """Change the body of a chunk, or take, double or rename one; lengths and CRCs are right."""
    chunks = _png_chunks(data)
    if not chunks:
        return change(data, longest, rng)
    place = rng.randrange(len(chunks))
    name, body = chunks[place]
    kind = rng.randrange(8)
    if kind == 0:
        chunks.pop(place)
    elif kind == 1:
        chunks.insert(place, chunks[rng.randrange(len(chunks))])
    elif kind == 2:
        chunks[place] = (rng.choice((b"tRNS", b"PLTE", b"gAMA", b"eXIf", b"acTL", b"fdAT", b"iCCP", b"zTXt")), body)
    elif name in (b"IDAT", b"zTXt") and kind < 6:
        try:
            chunks[place] = (name, zlib.compress(change(zlib.decompress(body), longest, rng)))
        except zlib.error:
            chunks[place] = (name, change(body, longest, rng))
    else:
        chunks[place] = (name, change(body, longest, rng))
    parts = [_PNG]
    for name, body in chunks:
        parts += [struct.pack(">I", len(body)), name, body, struct.pack(">I", zlib.crc32(name + body))]
    return b"".join(parts)


def _png_chunks(data: bytes) -> list[tuple[bytes, bytes]]:
    chunks: list[tuple[bytes, bytes]] = []
    place = len(_PNG)
    while data.startswith(_PNG) and place + 12 <= len(data):
        (size,) = struct.unpack(">I", data[place : place + 4])
        name, body = data[place + 4 : place + 8], data[place + 8 : place + 8 + size]
        if len(body) < size:
            break
        chunks.append((name, body))
        place += 12 + size
    return chunks


def _unzipped(data: bytes) -> list[tuple[str, bytes]]:
    """Return the members of a zip archive as far as they can be read."""
    found = []
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            for info in archive.infolist():
                if info.file_size <= 2**20:
                    found.append((info.filename, archive.read(info)))
    except Exception:  # of a mutated archive, in as many ways as zipfile has
        return []
    return found


def _zipped(members: list[tuple[str, bytes]], rng: random.Random) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in members:
            entry = zipfile.ZipInfo(name[:200] or "x")
            entry.compress_type = rng.choice((zipfile.ZIP_STORED, zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))
            archive.NameToInfo.pop(entry.filename, None)  # two members of one name are meant, and no warning
            archive.writestr(entry, content)
    return buffer.getvalue()


def npz(data: bytes, longest: int, rng: random.Random, change: Mutate) -> bytes:
    """Change a member of an archive; CRCs, and the checksums that an archive of nlflow holds, are right."""
    return _folder(data, longest, rng, change, _seal_archive)


def study(data: bytes, longest: int, rng: random.Random, change: Mutate) -> bytes:
    """Change a file of a study's folder; the checksums of its cases are right."""
    return _folder(data, longest, rng, change, _seal_cases)


def record(data: bytes, longest: int, rng: random.Random, change: Mutate) -> bytes:
    """Change a record in JSON; its checksum is mostly right."""
    changed = text_json(data, longest, rng, change)
    return sealed_case(changed) if rng.randrange(10) else changed


def model(data: bytes, longest: int, rng: random.Random, change: Mutate) -> bytes:
    """Change a file of a model's folder; the lengths of headers of safetensors are right."""
    return _folder(data, longest, rng, change, lambda members: members)


def _folder(
    data: bytes,
    longest: int,
    rng: random.Random,
    change: Mutate,
    seal: Callable[[list[tuple[str, bytes]]], list[tuple[str, bytes]]],
) -> bytes:
    members = _unzipped(data)
    if not members:
        return change(data, longest, rng)
    place = rng.randrange(len(members))
    name, content = members[place]
    kind = rng.randrange(12)
    if kind == 0:
        members.pop(place)
    elif kind == 1:
        members.append((rng.choice(("../", "/", "a/", "")) + name, content))
    elif kind == 2:
        members[place] = (members[rng.randrange(len(members))][0], content)
    else:
        members[place] = (name, _changed(name, content, longest, rng, change))
    try:
        sealed = seal(members) if rng.randrange(10) else members
    except Exception:  # what was changed cannot be sealed: it goes as it is
        sealed = members
    return _zipped(sealed, rng)


def _changed(name: str, content: bytes, longest: int, rng: random.Random, change: Mutate) -> bytes:
    """Return the content of a file changed in a way that suits what it is."""
    stem = name.rsplit("/", 1)[-1]
    if content.startswith(b"\x93NUMPY"):
        if stem == "__meta__.npy":
            return _npy_text(content, longest, rng, change)
        return npy(content, longest, rng, change)
    if stem.endswith(".safetensors"):
        return safetensors(content, longest, rng, change)
    if stem.endswith(".json"):
        return text_json(content, longest, rng, change)
    if content.startswith(_PNG):
        return png(content, longest, rng, change)
    return change(content, longest, rng)


def npy(data: bytes, longest: int, rng: random.Random, change: Mutate) -> bytes:
    """Change the header of an array and keep its length right, or change the values."""
    if not data.startswith(b"\x93NUMPY") or len(data) < 10:
        return change(data, longest, rng)
    width = 2 if data[6] == 1 else 4
    size = int.from_bytes(data[8 : 8 + width], "little")
    header, values = data[8 + width : 8 + width + size], data[8 + width + size :]
    kind = rng.randrange(4)
    if kind == 0:
        return data[: 8 + width + size] + change(values, longest, rng)
    text = header.decode("latin1")
    if kind == 1:
        for part in ("descr", "shape", "fortran_order"):
            if part in text and rng.randrange(2):
                text = _replaced(text, part, rng)
        header = text.encode("latin1")
    else:
        header = change(header, min(longest, 60000), rng)
    if width == 2 and len(header) > 65535:
        header = header[:65535]
    return data[:8] + len(header).to_bytes(width, "little") + header + values


def _replaced(text: str, part: str, rng: random.Random) -> str:
    values = {
        "descr": ("'|O'", "'<f8'", "'<f16'", "'|S1000000000'", "'<U4'", "'<M8[s]'", "'<c16'", "[('a','<f8',(9,9))]",
                  "'|V1000000000'", "'|b1'", "'>f2'", "[]", "'|u1'", "None"),
        "shape": ("(10**12,)", "(1000000000000,)", "()", "(-1,)", "(0,)", "(1,)*99", "(2,3)", "(True,)", "(1.0,)",
                  "(4294967296,4294967296)", "(18446744073709551616,)", "[3]", "(1,1,1,1,1)"),
        "fortran_order": ("True", "False", "2", "None"),
    }  # fmt: skip
    import re

    pattern = rf"('{part}':\s*)(\([^)]*\)|'[^']*'|[^,}}]*)"
    return re.sub(pattern, lambda found: found[1] + rng.choice(values[part]), text, count=1)


def _npy_text(content: bytes, longest: int, rng: random.Random, change: Mutate) -> bytes:
    """Return a JSON text that is stored as an array of bytes, changed, with the shape that it has then."""
    import numpy as np

    text = np.load(io.BytesIO(content), allow_pickle=False).tobytes()
    buffer = io.BytesIO()
    np.save(buffer, np.frombuffer(text_json(text, longest, rng, change), dtype=np.uint8))
    return buffer.getvalue()


def safetensors(data: bytes, longest: int, rng: random.Random, change: Mutate) -> bytes:
    """Change the header of a file of tensors and keep its length right, or change the values."""
    size = int.from_bytes(data[:8], "little")
    header, values = data[8 : 8 + size], data[8 + size :]
    if len(header) < size or rng.randrange(3) == 0:
        return data[: 8 + size] + change(values, longest, rng)
    header = text_json(header, longest, rng, change)
    return len(header).to_bytes(8, "little") + header + values


def text_json(data: bytes, longest: int, rng: random.Random, change: Mutate) -> bytes:
    """Replace a value, a key or a whole branch of a JSON text, or change its bytes."""
    if rng.randrange(3) == 0:
        return change(data, longest, rng)
    try:
        tree = json.loads(data)
    except (ValueError, RecursionError):
        return change(data, longest, rng)
    places: list[tuple[Any, Any]] = []

    def look(branch: Any) -> None:
        entries = branch.items() if isinstance(branch, dict) else enumerate(branch) if isinstance(branch, list) else ()
        for key, value in entries:
            places.append((branch, key))
            look(value)

    try:
        look(tree)
    except RecursionError:
        return change(data, longest, rng)
    if not places:
        return change(data, longest, rng)
    branch, key = rng.choice(places)
    other, its = rng.choice(places)
    values = (None, True, -1, 0, 1, 2, 3, 10**6, 10**12, 10**30, 1e308, 0.5, "", "x", "../../x", [], {}, [1], {"a": 1})
    kind = rng.randrange(6)
    if kind == 0 and isinstance(branch, dict):
        branch[rng.choice(("", "x", "__class__", "auto_map", "float", "__meta__"))] = branch.pop(key)
    elif kind == 1 and isinstance(branch, dict):
        del branch[key]
    elif kind == 2:
        branch[key] = json.loads(json.dumps(other[its]))
    elif kind == 3:
        for _ in range(rng.choice((1, 3, 90, 300, 600, 2000))):
            branch[key] = [branch[key]]
    else:
        branch[key] = rng.choice(values)
    try:
        return json.dumps(tree).encode()
    except RecursionError:
        return change(data, longest, rng)


def _seal_archive(members: list[tuple[str, bytes]]) -> list[tuple[str, bytes]]:
    """Return the members of an archive with the checksum that they now have, in its description."""
    import numpy as np

    # The package's own sums: a checksum is no secret, and whoever crafts a file can compute it.
    from nlflow.store.storage import _array, _digest

    arrays = {name.removesuffix(".npy"): _array(content) for name, content in members}
    meta = json.loads(arrays.pop("__meta__").tobytes())
    meta.pop("sha256", None)
    text = json.dumps({**meta, "sha256": _digest(arrays, meta)})
    buffer = io.BytesIO()
    np.save(buffer, np.frombuffer(text.encode(), dtype=np.uint8))
    rest = [(name, content) for name, content in members if name != "__meta__.npy"]
    return [("__meta__.npy", buffer.getvalue()), *rest]


def _seal_cases(members: list[tuple[str, bytes]]) -> list[tuple[str, bytes]]:
    return [(name, sealed_case(content) if name.startswith("cases/") else content) for name, content in members]


def sealed_case(content: bytes) -> bytes:
    """Return a record with the checksum that its content now has."""
    from nlflow.store.storage import _record_digest

    found = json.loads(content)
    found["sha256"] = _record_digest(found["kind"], found["content"])
    return json.dumps(found).encode()


def _after(prefix: int, inner: Callable[[bytes, int, random.Random, Mutate], bytes]) -> Any:
    """Return a mutator of what stands behind some bytes that choose."""

    def outer(data: bytes, longest: int, rng: random.Random, change: Mutate) -> bytes:
        head = data[:prefix] if rng.randrange(4) else bytes(rng.randrange(8) for _ in range(prefix))
        return head + inner(data[prefix:], longest, rng, change)

    return outer


def _any_picture(data: bytes, longest: int, rng: random.Random, change: Mutate) -> bytes:
    return (png if data.startswith(_PNG) else npy)(data, longest, rng, change)


def _state(data: bytes, longest: int, rng: random.Random, change: Mutate) -> bytes:
    return (npz if data.startswith(b"PK") else safetensors)(data, longest, rng, change)


#: From the name of a structure to the function that changes it.
MUTATORS: dict[str, Callable[[bytes, int, random.Random, Mutate], bytes]] = {
    "bytes": lambda data, longest, rng, change: change(data, longest, rng),
    "png": png,
    "npy": npy,
    "npz": npz,
    "study": study,
    "record": record,
    "model": model,
    "state": _state,
    "companion": _after(2, _any_picture),
}
