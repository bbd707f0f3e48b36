"""Films from pictures."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from nlflow.errors import InputError, not_installed
from nlflow.store.atomic import write_atomic

SUFFIXES = (".mp4", ".gif")
_FASTEST = 50.0  # pictures a second of a GIF: shorter times than two hundredths of a second are not kept to


def check_video(path: Path, rate: float) -> None:
    if path.suffix.lower() not in SUFFIXES:
        raise InputError(f"path: got {str(path)!r}, expected a name that ends with .mp4 or .gif")
    if path.suffix.lower() == ".mp4":
        try:
            import av  # noqa: F401
        except ImportError as error:
            raise not_installed(f"path: {str(path)!r}", "PyAV", "film", ", or name it .gif") from error
    elif rate > _FASTEST:
        raise InputError(f"rate: got {rate:g} for a .gif, expected {_FASTEST:g} at most; draw fewer, or name it .mp4")


def write_video(path: Path, pictures: list[Path], rate: float, comment: str) -> None:
    """Write pictures of one size with even sides as ``.mp4`` or ``.gif``, `rate` of them a second."""
    write = _write_gif if path.suffix.lower() == ".gif" else _write_mp4
    write_atomic(path, lambda stream: write(stream, pictures, rate, comment))


def _opened(pictures: list[Path]) -> Iterator[Any]:
    from PIL import Image

    for picture in pictures:
        with Image.open(picture) as image:
            yield image.convert("RGB")


def _write_gif(stream: BinaryIO, pictures: list[Path], rate: float, comment: str) -> None:
    first, *others = pictures
    images = _opened([first])
    ends = np.rint(100 / rate * np.arange(len(pictures) + 1))  # hundredths of a second, in which a GIF counts
    times = (10 * np.diff(ends)).tolist()
    next(images).save(
        stream, "GIF", save_all=True, append_images=list(_opened(others)), duration=times, loop=0,
        comment=comment.encode(),
    )  # fmt: skip


def _write_mp4(stream: BinaryIO, pictures: list[Path], rate: float, comment: str) -> None:
    import av

    with av.open(stream, "w", format="mp4") as container:
        container.metadata["comment"] = comment
        codec = "libx264" if "libx264" in av.codecs_available else "mpeg4"
        video = container.add_stream(codec, rate=Fraction(rate).limit_denominator(1000))
        video.pix_fmt = "yuv420p"  # what every player knows
        if codec == "libx264":
            video.options = {"crf": "16"}
        video.width, video.height = next(_opened(pictures[:1])).size
        for image in _opened(pictures):
            container.mux(video.encode(av.VideoFrame.from_image(image)))
        container.mux(video.encode())


def comment_of(path: Path) -> str | None:
    try:
        if path.suffix.lower() == ".gif":
            from PIL import Image

            with Image.open(path, formats=["GIF"]) as image:
                comment = image.info.get("comment", b"")
            return str(comment.decode()) if isinstance(comment, bytes) else None
        import av

        with av.open(str(path), "r", format="mp4", options={"protocol_whitelist": "file"}) as container:
            return str(container.metadata["comment"])
    except Exception:  # whatever lies there: it is none of ours
        return None
