"""What the words of commands mean: texts of options become what the functions take, or are refused."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any, Literal

import typer

from nlflow.denoising.noise.names import WORDS, has_sigma, model_class

Quality = Literal["fast", "balanced", "best"]
#: `nlflow.backends.devices.DEVICES`, as types need them.
DeviceName = Literal["auto", "cpu", "cuda", "mps", "cpu-tensors"]
#: Stands for stdin as an input, and for stdout as an output.
PIPE = "-"


def parse_bytes(text: str) -> int:
    """Return a size such as ``2GiB``, ``500 MB`` or ``1e9`` in bytes."""
    found = re.fullmatch(r"\s*([0-9.]+(?:e[0-9]+)?)\s*(?:([kmgt])(i?b)?|b)?\s*", str(text), re.IGNORECASE)
    try:
        number = float(found[1]) if found else math.nan
    except ValueError:
        number = math.nan
    base = 1000 if found and (found[3] or "").lower() == "b" else 1024
    unit = (found[2] or "").lower() if found else ""
    size = number * base ** ("kmgt".index(unit) + 1 if unit else 0)
    if not 1 <= size < 2**63:
        raise typer.BadParameter(f"got {text!r}, expected a number of bytes such as 2000000000, 2GiB or 500MB")
    return int(size)


def split_sigma(text: str | None) -> tuple[float | list[float] | None, Path | None]:
    """Return what ``--sigma`` says: numbers, or the file or folder that holds them; nothing where it is estimated."""
    if text is None or text == "auto":
        return None, None
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        path = Path(text)
        if not text or not (path.suffix or path.exists()):
            raise typer.BadParameter(
                f"got {text!r}, expected a number, numbers with commas between them, a file, or auto",
                param_hint="--sigma",
            ) from None
        return None, path
    if not all(0 <= number < math.inf for number in numbers):
        raise typer.BadParameter(f"got {text}, expected a number >= 0, or numbers with commas between them",
                                 param_hint="--sigma")  # fmt: skip
    return (numbers[0] if len(numbers) == 1 else numbers), None


def split_spacing(text: str | None) -> list[float] | None:
    """Return the numbers of ``--spacing``."""
    try:
        numbers = None if text is None else [float(part) for part in text.split(",")]
    except ValueError:
        numbers = [math.nan]
    if numbers is not None and not all(0 < number < math.inf for number in numbers):
        raise typer.BadParameter(
            f"got {text!r}, expected positive numbers with commas between them, such as 0.5,0.2,0.2",
            param_hint="--spacing",
        )
    return numbers


def split_flat(text: str | None) -> tuple[slice, slice] | None:
    """Return the rows and columns that ``--flat`` names."""
    if text is None:
        return None
    found = re.fullmatch(r"\s*(\d+):(\d+)\s*,\s*(\d+):(\d+)\s*", text, re.ASCII)
    if found is None:
        raise typer.BadParameter(
            f"got {text!r}, expected rows and columns of a flat part as first:end,first:end, such as 20:84,300:400",
            param_hint="--flat",
        )
    top, bottom, left, right = (int(number) for number in found.groups())
    return slice(top, bottom), slice(left, right)


def video_coding(text: str | None) -> int | str | None:
    """Return what ``--video-quality`` says."""
    if text is None or text == "lossless":
        return text
    if not (text.isascii() and text.isdecimal() and int(text) <= 51):
        raise typer.BadParameter(f"got {text!r}, expected lossless, or a whole number from 0 to 51",
                                 param_hint="--video-quality")  # fmt: skip
    return int(text)


def is_whole(sources: list[Path], target: str, axes: str | None) -> bool:
    """Return whether an OUT of zarr is that of a stack, which is denoised as a whole and not block by block."""
    from nlflow.desk.files import is_stack

    if target.lower().endswith(".ome.zarr") or any(map(is_stack, sources)):
        return True
    return axes is not None and not all((s / "zarr.json").is_file() or (s / ".zarray").is_file() for s in sources)


def noise_of(
    word: str, level: Any, strength: float | None, *, gain: float | None, read_noise: float | None, offset: float | None
) -> Any:
    """Return the noise as `nlflow.denoise` wants it: a word, or a model."""
    given = {"gain": gain, "sigma": read_noise, "offset": offset}
    words = {name: value for name, value in given.items() if value is not None}
    if words and word != "poisson":
        option = "--read-noise" if "sigma" in words else f"--{next(iter(words))}"
        raise typer.BadParameter("is a property of counts; give --noise poisson too", param_hint=option)
    if word == "gaussian":
        raise typer.BadParameter("got gaussian, which is now called white; say --noise white", param_hint="--noise")
    if strength is not None and not has_sigma(word):
        raise typer.BadParameter("is not for counts, whose noise follows from them; leave it out",
                                 param_hint="--strength")  # fmt: skip
    if word in WORDS:
        return model_class(word)(**words) if words else word
    if not (word.lower().endswith(".json") or Path(word).exists()):
        raise typer.BadParameter(
            f"got {word!r}, expected {', '.join(WORDS)} or a file that nonlocal noise --save has written",
            param_hint="--noise",
        )
    if level is not None:
        raise typer.BadParameter(f"is said by the model in {word} already; leave one of them out", param_hint="--sigma")
    from nlflow.denoising.noise import load_noise

    model = load_noise(word)
    if strength is not None and not model.scalable:
        raise typer.BadParameter(f"is not for counts, of which {word} holds a model; leave it out",
                                 param_hint="--strength")  # fmt: skip
    return model


def of_fast(stopping: str | None, **options: float | None) -> dict[str, Any]:
    """Return the settings of the flow of pixels, which other qualities do not have."""
    if options["steps"] is not None and stopping is not None:
        raise typer.BadParameter("is a stopping rule by itself; leave --stopping out", param_hint="--steps")
    return options


def check_pipes(sources: list[Path], target: str, *, as_json: bool, recursive: bool) -> None:
    """Refuse what cannot be told, read or written beside stdin and stdout."""
    names = [str(source) for source in sources]
    if PIPE not in (*names, target):
        return
    folder = any(source.is_dir() for source in sources) and target == PIPE
    if len(names) > 1 or recursive or folder or target.endswith((".zarr", "/")) or Path(target).is_dir():
        raise typer.BadParameter("got -, expected one file in and one file out beside it; name files", param_hint="IN")
    if as_json and target == PIPE:
        raise typer.BadParameter("goes to stdout, and so does the file; name OUT", param_hint="--json")
